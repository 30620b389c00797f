"""Memory of a trace that goes on for long: of the tracer and of the store's engine, with the slope of each.

Three jobs on the fake GPU are traced at once, each by a tracer of its own into an embedded store of its own, with GPU
times, stacks and the diagnosis on: ``steady`` (4 ranks, always the same step), ``changing`` (each step launches other
grids, and a kernel and a Python function that were never seen before, as programs do that compile while they run) and
``churn`` (processes that come and go: programs that use the GPU for a moment, and others). Every 10 s
``/proc/PID/smaps`` says what each process has. Told are what it has at a third of the time and at its end, pages of
files left out (they are the system's, and shared with whoever maps them), the slope over the last two thirds (least
squares; 95 %, widened by the residuals' own correlation), and what each kind of mapping has at the end. ``flat``: the
interval lies below ``FLAT_MB_MIN``. The ratio is that bound over the steepest slope's upper end.
``ARGUS_BENCH_MINUTES`` (12) and ``ARGUS_BENCH_JOBS`` (all three) shape it; a round (``--rounds 1``) takes so many
minutes. ``ARGUS_BENCH_TABLES`` (1) divides the sizes of the tables that ``changing`` fills (``TABLES``): it takes half
an hour and more to fill them as they are, and what is to be shown is that memory stays as it is once they are full.

Also told: CPU time of tracer and engine for each event that was recorded (launches, collectives, operations of the
GPU, samples), which is what streaming costs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from argus.errors import ArgusError
from argus.store.open import open_store
from argus.store.reader import query
from benches import Result

ROOT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("ARGUS_BENCH_MINUTES", "12"))
INTERVAL_S = 10.0
SMALLER = int(os.environ.get("ARGUS_BENCH_TABLES", "1"))
TABLES = (
    "argus.stacks.KEPT_STACKS",
    "argus.capture.code.MAX_CODES",
    "argus.capture.code.MAX_CHAIN_BYTES",
    "argus.capture.names.KEPT_HANDLES",
    "argus.compress.kernels.GROUPS",
    "argus.cupti.collector.MAX_NAMES",
    "argus.semantics.kernel_steps.MAX_KEYS",
)
"""Sizes of tables whose keys are code, kernels and shapes."""
_WITH_SMALLER = """
import importlib, sys
for name in sys.argv[2].split(","):
    module, _, size = name.rpartition(".")
    module = importlib.import_module(module)
    setattr(module, size, getattr(module, size) // int(sys.argv[1]))
del sys.argv[1:3]
from argus.cli.main import main
sys.exit(main())
"""
FLAT_MB_MIN = 1.0
"""A day's trace may not cost more than some GB even if its slope were real."""
_EVENTS = ("launches", "collectives", "gpu_ops", "stack_samples", "stack_off_cpu")
"""Counters of what a trace takes in."""


def _fakegpu():  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))
    import run

    run.build()
    return run


@contextlib.contextmanager
def _steady() -> Iterator[list[str]]:
    """1,600 launches a second of 4 ranks."""
    words = ["--forward-us", "120000", "--backward-us", "200000", "--optimizer-us", "30000", "--data-ms", "30"]
    with _fakegpu().Job(ranks=4, args=words, cupti=True, stderr=subprocess.DEVNULL) as job:
        yield [word for pid in job.pids for word in ("--pid", str(pid))]


@contextlib.contextmanager
def _program(name: str) -> Iterator[list[str]]:
    run = _fakegpu()
    folder = Path(__file__).resolve().parent / "programs"
    environment = {**os.environ, **run.armed(), "PROGRAMS": str(run.BUILD)}
    process = subprocess.Popen([sys.executable, str(folder / name)], env=environment, start_new_session=True)
    try:
        time.sleep(1.0)  # until it has loaded the libraries
        yield ["--children", "--pid", str(process.pid)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_JOBS: dict[str, Callable[[], contextlib.AbstractContextManager[list[str]]]] = {
    "steady": _steady,
    "changing": lambda: _program("changing.py"),
    "churn": lambda: _program("churning.py"),
}


@dataclass
class _Watched:
    """What a process had, time after time. ``parts``: MB by kind of mapping, the newest."""

    minutes: list[float] = field(default_factory=list)
    own_mb: list[float] = field(default_factory=list)
    parts: Tally[str] = field(default_factory=Tally)

    def look(self, pid: int, minutes: float) -> None:
        parts: Tally[str] = Tally()
        with contextlib.suppress(OSError):
            kind = ""
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                name, _, rest = line.partition(":")
                if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                    kind = _kind(line)
                elif name == "Pss":
                    parts[kind] += int(rest.split()[0])
        if parts:
            self.minutes.append(minutes)
            self.own_mb.append((parts.total() - parts["files"]) / 1024)
            self.parts = Tally({kind: kib // 1024 for kind, kib in parts.items()})


def _kind(mapping: str) -> str:
    words = mapping.split(maxsplit=5)
    path = words[5] if len(words) > 5 else ""
    if not path or path.startswith("[anon"):
        return "anonymous"
    if path == "[heap]":
        return "heap"
    if "bpf-map" in path:
        return "rings of the kernel"
    return "shared with the job" if "memfd" in path or path.startswith("/dev/shm") else "files"


def slope(minutes: list[float], values: list[float]) -> tuple[float, float]:
    """Least squares: what is gained a minute, and half of its 95 % interval.

    Residuals that follow each other (memory does) say less than as many that do not: the variance is widened by
    (1 + r) / (1 - r), r being their correlation at one interval.
    """
    x, y = np.array(minutes), np.array(values)
    if len(x) < 8:
        raise ArgusError("too few readings for a slope", "Let it last longer: ARGUS_BENCH_MINUTES")
    x = x - x.mean()
    gain = float((x * (y - y.mean())).sum() / (x * x).sum())
    left = y - y.mean() - gain * x
    spread = float((left * left).sum())
    r = float((left[1:] * left[:-1]).sum() / spread) if spread else 0.0
    r = min(max(r, 0.0), 0.9)
    error = np.sqrt(spread / (len(x) - 2) / (x * x).sum() * (1 + r) / (1 - r))
    return gain, 1.96 * float(error)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _engine(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((folder / "lock").read_text().split()[0])
    return 0


@dataclass
class _Traced:
    """A job and its trace."""

    tracing: subprocess.Popen[bytes]
    folder: Path
    watched: dict[str, _Watched] = field(default_factory=lambda: {"tracer": _Watched(), "engine": _Watched()})
    cpu_s: float = 0.0

    def look(self, minutes: float) -> None:
        engine = _engine(self.folder)
        self.watched["tracer"].look(self.tracing.pid, minutes)
        self.watched["engine"].look(engine, minutes)
        self.cpu_s = max(self.cpu_s, _cpu_s(self.tracing.pid) + _cpu_s(engine))

    def events(self) -> int:
        store = open_store(f"chdb://{self.folder}")
        try:
            names = ", ".join(f"'{name}'" for name in _EVENTS)
            text = f"SELECT sum(value) AS value FROM coverage FINAL WHERE counter IN ({names})"
            return int(query(store, text)["value"][0])
        finally:
            store.close()


def _trace(stack: contextlib.ExitStack, name: str, folder: Path) -> _Traced:
    target = stack.enter_context(_JOBS[name]())
    (folder / name).mkdir()
    argus = ["-c", _WITH_SMALLER, str(SMALLER), ",".join(TABLES)] if SMALLER > 1 else ["-m", "argus.cli.main"]
    command = [
        sys.executable,
        *argus,
        "trace",
        *target,
        "--plain",
        "--store",
        f"chdb://{folder}/{name}",
    ]
    tracing = subprocess.Popen(command, stdout=(folder / f"{name}.log").open("wb"), stderr=subprocess.STDOUT)
    stack.callback(tracing.wait)
    stack.callback(tracing.kill)
    return _Traced(tracing, folder / name)


def run(rounds: int) -> Result:
    chosen = os.environ.get("ARGUS_BENCH_JOBS", ",".join(_JOBS)).split(",")
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {}
    lines = []
    steepest = 0.0
    for _ in range(rounds):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            traces = {name: _trace(stack, name, folder) for name in chosen}
            begin = time.monotonic()
            while (minutes := (time.monotonic() - begin) / 60) < MINUTES:
                for name, traced in traces.items():
                    if traced.tracing.poll() is not None:
                        raise ArgusError(f"{name}: the trace ended: {(folder / f'{name}.log').read_text()[-2000:]}")
                    traced.look(minutes)
                time.sleep(INTERVAL_S)
            for name, traced in traces.items():
                traced.tracing.send_signal(signal.SIGINT)
                traced.tracing.wait(120)
                more[f"CPU µs an event, {name}"] = 1e6 * traced.cpu_s / max(traced.events(), 1)
                for who, watched in traced.watched.items():
                    third = next(i for i, at in enumerate(watched.minutes) if at >= MINUTES / 3)
                    gain, error = slope(watched.minutes[third:], watched.own_mb[third:])
                    steepest = max(steepest, gain + error)
                    verdict = "flat" if gain + error < FLAT_MB_MIN else "grows" if gain - error > 0 else "unclear"
                    rows.setdefault(f"{name}, {who}", []).append(gain)
                    parts = ", ".join(f"{kind} {mb}" for kind, mb in watched.parts.most_common() if mb)
                    lines.append(
                        f"{name}, {who}: {watched.own_mb[third]:.1f} MB after {watched.minutes[third]:.0f} min, "
                        f"{watched.own_mb[-1]:.1f} after {watched.minutes[-1]:.0f}; {gain:+.2f} ± {error:.2f} MB/min: "
                        f"{verdict} ({parts})"
                    )
    ratio = FLAT_MB_MIN / steepest if steepest > 0 else float("inf")
    return Result(
        f"slope of memory over the last two thirds of {MINUTES:g} minutes", "MB/min", rows, ratio, more, lines
    )
