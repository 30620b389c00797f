"""Memory of a trace that goes on for long: of the tracer and of the store's engine, with the slope of each.

Three jobs on the fake GPU are traced at once, each by a tracer of its own into an embedded store of its own, with GPU
times, stacks and the diagnosis on: ``steady`` (4 ranks, always the same step), ``changing`` (each step launches other
grids, and a kernel and a Python function that were never seen before, as programs do that compile while they run) and
``churn`` (processes that come and go: programs that use the GPU for a moment, and others). Every 10 s
The source is ``/proc/PID/smaps`` of each process. Reported are its memory at a third of the time and at its end, pages
of files left out (they are the system's, and shared with whoever maps them), the slope over the last two thirds (least
squares; 95 %, widened by the residuals' own correlation), and what each kind of mapping has at the end. ``flat``: the
interval lies below ``FLAT_MB_MIN``. The ratio is that bound over the steepest slope's upper end.
``ARGUS_BENCH_MINUTES`` (12) and ``ARGUS_BENCH_JOBS`` (all three) shape it; a round (``--rounds 1``) takes so many
minutes. ``ARGUS_BENCH_TABLES`` (1) divides the sizes of the tables that ``changing`` fills (``TABLES``): it takes half
an hour and more to fill them as they are, and what is to be shown is that memory stays as it is once they are full.

Also reported: CPU time of tracer and engine for each event that was recorded (launches, collectives, operations of the
GPU, samples), which is what streaming costs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from argus.model.errors import ArgusError
from argus.store.open import open_store
from argus.store.reader import query
from benches import Result
from benches._processes import Watched, cpu_s, engine_of, family

ROOT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("ARGUS_BENCH_MINUTES", "12"))
INTERVAL_S = 10.0
SMALLER = int(os.environ.get("ARGUS_BENCH_TABLES", "1"))
TABLES = (
    "argus.live.sampling.dictionary.KEPT_STACKS",
    "argus.capture.python.code.MAX_CODES",
    "argus.capture.python.code.MAX_CHAIN_BYTES",
    "argus.capture.kernel_books.KEPT_HANDLES",
    "argus.compress.kernels.GROUPS",
    "argus.cupti.buffers.MAX_NAMES",
    "argus.semantics.gpu.kernel_steps.MAX_KEYS",
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


def with_smaller_tables(divisor: int) -> list[str]:
    """What Python is to run as ``argus`` with ``TABLES`` of so many times smaller sizes, but for the verb."""
    return ["-c", _WITH_SMALLER, str(divisor), ",".join(TABLES)] if divisor > 1 else ["-m", "argus.cli.main"]


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
class _Traced:
    """A job and its trace."""

    tracing: subprocess.Popen[bytes]
    folder: Path
    watched: dict[str, Watched] = field(default_factory=lambda: {"tracer": Watched(), "engine": Watched()})
    cpu_s: float = 0.0

    def look(self, minutes: float) -> None:
        engine = engine_of(self.folder)
        self.watched["tracer"].look(minutes, *family(self.tracing.pid))
        self.watched["engine"].look(minutes, engine)
        self.cpu_s = max(self.cpu_s, cpu_s(self.tracing.pid) + cpu_s(engine))

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
    command = [
        sys.executable,
        *with_smaller_tables(SMALLER),
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
                    found = watched.slope_from(MINUTES / 3)
                    gain, error = found.gain, found.error
                    steepest = max(steepest, found.high)
                    verdict = "flat" if found.high < FLAT_MB_MIN else "grows" if found.low > 0 else "unclear"
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
