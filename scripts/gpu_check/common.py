"""What all parts share: starting programs and sessions, reading what was traced, statistics, tables."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FAKE_BUILD = Path(os.environ.get("FAKEGPU_BUILD") or ROOT / "build" / "fakegpu")


class PartFailed(Exception):
    """A check that could not be made, in words."""


@dataclass
class Context:
    """What a part is given.

    Attributes:
        out: Where results go: few files.
        scratch: For everything else; deleted at the end.
        python: The interpreter that has torch.
        fake: Whether the GPU is the fake one.
        deadline: ``time.monotonic()`` at which the part will be ended.
    """

    out: Path
    scratch: Path
    python: str
    fake: bool
    deadline: float
    name: str
    values: dict[str, Any] = field(default_factory=dict)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def save(self, **values: Any) -> None:
        """Adds results. They are on disk when this returns."""
        self.values.update(values)
        write_json(self.scratch / f"part-{self.name}.json", self.values)

    def check(self, what: str, passed: bool | None, detail: str = "") -> None:
        """Adds a verdict: passed, failed, or None: undecided."""
        self.values.setdefault("checks", []).append({"what": what, "passed": passed, "detail": detail})
        self.save()
        word = {True: "pass", False: "FAIL", None: "????"}[passed]
        print(f"  {word}  {what}{': ' + detail if detail else ''}", flush=True)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table for the report."""
        tables = self.values.setdefault("tables", [])
        tables[:] = [t for t in tables if t["title"] != title]
        tables.append({"title": title, "head": list(head), "rows": [list(map(shown, row)) for row in rows]})
        self.save()

    def note(self, text: str) -> None:
        self.values.setdefault("notes", []).append(text)
        self.save()
        print(f"  note  {text}", flush=True)

    def folder(self, name: str) -> Path:
        path = self.scratch / f"{self.name}-{name}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """A failure inside becomes a line of the report, and the part goes on."""
        try:
            yield
        except Exception as failure:
            self.check(what, False, f"{type(failure).__name__}: {failure}"[:1500])


def write_json(path: Path, value: Any) -> None:
    """Replaces a file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1, default=_plain, allow_nan=True))
    part.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Text columns; those of numbers to the right."""
    table = [[" ".join(cell.split())[:240] for cell in row] for row in [head, *rows]]
    columns = range(len(head))
    widths = [max(len(row[k]) if k < len(row) else 0 for row in table) for k in columns]
    numeric = [all(k >= len(row) or _NUMBER.match(row[k]) for row in table[1:]) for k in columns]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(widths[k]) if numeric[k] else cell.ljust(widths[k]) for k, cell in enumerate(row)]
        return "  ".join(cells).rstrip()

    return [line(table[0]), "  ".join("-" * w for w in widths), *map(line, table[1:])]


_NUMBER = re.compile(r"^([-+]?[\d,.]+(e[-+]?\d+)?( ?%)?|-)?$")


# ---- statistics


def bootstrap_ratio(
    treated: Sequence[Sequence[float]], base: Sequence[Sequence[float]], *, rounds: int = 2000, seed: int = 1
) -> tuple[float, float, float]:
    """Ratio of the medians of two sets of windows, with a 95 % interval.

    Windows are drawn, then steps within them: steps of one window are not independent.

    Returns:
        (ratio, low, high); NaN where there is nothing.
    """
    treated = [w for w in treated if len(w)]
    base = [w for w in base if len(w)]
    if not treated or not base:
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(seed)
    # Few numbers are enough of a window: its steps are alike.
    full = [[np.asarray(w, np.float64) for w in windows] for windows in (treated, base)]
    parts = [[w[:: max(1, len(w) // 300)] for w in windows] for windows in full]

    def draw(windows: list[NDArray[np.float64]]) -> float:
        chosen = [windows[k] for k in rng.integers(0, len(windows), len(windows))]
        return float(np.median([np.median(w[rng.integers(0, len(w), len(w))]) for w in chosen]))

    ratios = np.array([draw(parts[0]) / draw(parts[1]) for _ in range(rounds)])
    point = float(np.median([np.median(w) for w in full[0]]) / np.median([np.median(w) for w in full[1]]))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return point, float(low), float(high)


# ---- programs


class Child:
    """A program that answers commands with lines of JSON."""

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        log: Path,
        cwd: Path | None = None,
    ) -> None:
        self.log = log
        self.lines: queue.Queue[str | None] = queue.Queue()
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                [os.fspath(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(env if env is not None else target_environment()),
                cwd=cwd,
                text=True,
                preexec_fn=_die_with_parent,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except OSError:
            raise PartFailed(f"the program ended: {self.last_words()}") from None

    def answer(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next line that is JSON.

        Raises:
            PartFailed: None came in time, the program ended, or it reports an error.
        """
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise PartFailed(f"no answer within {timeout_s:.0f} s: {self.last_words()}") from None
            if line is None:
                self.process.wait()
                raise PartFailed(f"the program ended with {self.process.returncode}: {self.last_words()}")
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    answer: dict[str, Any] = json.loads(line)
                    if "error" in answer:
                        raise PartFailed(str(answer["error"]))
                    return answer

    def ask(self, command: str, timeout_s: float = 60.0) -> dict[str, Any]:
        self.send(command)
        return self.answer(timeout_s)

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            return " | ".join(lines[-6:])[-1200:]
        return ""

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError, PartFailed):
                self.send("exit")
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)


def target_environment(armed: bool = False, **more: str) -> dict[str, str]:
    """The environment of a traced program: none of Argus's packages are on its path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment.update(PYTHONUNBUFFERED="1", **more)
    environment.pop("CUDA_INJECTION64_PATH", None)
    if armed:
        from argus.cupti.arm import arm

        arming = arm(environment)
        if not arming.on:
            raise PartFailed(f"arming is {arming.state}")
        environment.update(arming.changes)
    return environment


def training(ctx: Context, *words: str, armed: bool = False, name: str = "", **env: str) -> Child:
    """Starts train_step.py, or what stands for it on the fake GPU. Its first answer comes when it is warm."""
    if ctx.fake:
        command = [sys.executable, HERE / "fake_step.py", *words]
        env.setdefault("FAKEGPU_JITTER", "0")
    else:
        command = [ctx.python, HERE / "train_step.py", *words]
        # Kernels compiled by one program serve the next.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ctx.scratch / "inductor"))
        env.setdefault("TRITON_CACHE_DIR", str(ctx.scratch / "triton"))
    log = ctx.scratch / f"{ctx.name}-{name or 'program'}.log"
    return Child(command, env=target_environment(armed, **env), log=log)


def cupti_folder(ctx: Context) -> str:
    """Where the CUPTI is that comes with PyTorch, else that of the toolkit; "" where there is none."""
    if ctx.fake:
        return str(FAKE_BUILD)
    done = subprocess.run([ctx.python, "-c", "import sys; print(*sys.path, sep='\\n')"], capture_output=True, text=True)
    for folder in filter(None, done.stdout.splitlines()):
        if found := sorted(Path(folder).glob("nvidia/*/lib/libcupti.so.*")):
            return str(found[-1].parent)
    for pattern in ("cuda*/extras/CUPTI/lib64/libcupti.so.*", "cuda*/targets/*/lib/libcupti.so.*"):
        if found := sorted(Path("/usr/local").glob(pattern)):
            return str(found[-1].parent)
    return ""


class ExactProgram:
    """fake_train on the fake GPU: so many launches and all-reduces, and no others, once ``go`` is called."""

    def __init__(self, ctx: Context, launches: int, reductions: int) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))
        from run import Job

        self._go = ctx.folder("exact") / "go"
        arguments = ["--exact", str(launches), str(reductions), "--go", str(self._go), "--hold", "5"]
        self.job = Job(ranks=1, args=arguments)
        time.sleep(0.5)

    @property
    def pid(self) -> int:
        return self.job.pids[0]

    def go(self) -> None:
        """Returns when all has been done."""
        self._go.touch()
        time.sleep(2.5)

    def __enter__(self) -> ExactProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.close()


def compile_launcher(ctx: Context, static: bool) -> Path:
    """launcher.cu, with the CUDA runtime linked statically or not."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        raise PartFailed("there is no nvcc")
    made = ctx.scratch / ("launcher-static" if static else "launcher-shared")
    if not made.exists():
        part = made.with_name(made.name + f".{os.getpid()}")
        kind = "static" if static else "shared"
        command = [nvcc, "-O2", "-arch=native", f"-cudart={kind}", "-o", str(part), str(HERE / "launcher.cu")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PartFailed(f"nvcc: {(done.stderr or done.stdout)[-800:]}")
        part.rename(made)
    return made


# ---- Argus


class Session(Child):
    """Argus in a process of its own, tracing into a spool (scripts/gpu_check/session.py).

    Args:
        layers: Of ``uprobes``, ``kernels`` (GPU times), ``api`` (with launches by CUPTI).
        more: Further options of it; an empty value is none.
    """

    def __init__(
        self, ctx: Context, pids: Sequence[int], layers: str, name: str, *, job: str = "gpu-check", **more: str
    ) -> None:
        self.spool = ctx.scratch / f"{ctx.name}-spool-{name}"
        words = [word for pid in pids for word in ("--pid", str(pid))]
        for key, value in more.items():
            words += [f"--{key}", *([value] if value else [])]
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment.pop("CUDA_INJECTION64_PATH", None)
        command = [sys.executable, "-m", "scripts.gpu_check.session", "--layers", layers, "--spool", str(self.spool)]
        super().__init__(
            [*command, "--job", job, *words], env=environment, log=ctx.scratch / f"{ctx.name}-{name}.log", cwd=ROOT
        )
        self.began: dict[str, Any] = {}
        self._prepared = False

    def start(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Begins to trace; returns the states of what was asked for."""
        if not self._prepared:
            self.prepared(timeout_s)
        return self.on(timeout_s)

    def prepared(self, timeout_s: float = 30.0) -> None:
        """Waits until all is loaded; nothing of the target has been touched."""
        self.answer(timeout_s)
        self._prepared = True

    def on(self, timeout_s: float = 30.0) -> dict[str, Any]:
        self.began = self.ask("start", timeout_s)
        return self.began

    def state(self) -> dict[str, Any]:
        return self.ask("state", 10)

    def stop(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Ends the session; returns counters, losses and states."""
        answer = self.ask("stop", timeout_s)
        self.close()
        return answer

    def off(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Ends one of several sessions (``again``), and waits until the next could begin."""
        answer = self.ask("stop", timeout_s)
        self.prepared(timeout_s)
        return answer

    def rows(self, table: str) -> Any:
        return spool_rows(self.spool, table)


def begin_session(ctx: Context, pids: Sequence[int], name: str, session: Session | None = None, **more: str) -> Session:
    """A session of everything that has begun; without probes where they do not work, which the report notes.

    Args:
        session: One that was made for it before, so that it may be prepared by now.
    """
    session = session or Session(ctx, pids, "uprobes,kernels,api", name, **more)
    try:
        session.start()
        return session
    except PartFailed as failure:
        session.kill()
        ctx.note(f"{name}: GPU times alone, since a whole session failed: {failure}"[:600])
    session = Session(ctx, pids, "kernels,api", name + "-alone", **more)
    session.start()
    return session


def spool_rows(folder: Path, table: str) -> Any:
    """All rows of one table of a spool as an Arrow table; None: there are none."""
    import pyarrow as pa

    from argus.store import spool

    files = sorted(folder.glob(f"*-{table}.arrow"))
    parts = [spool.read(file).rows for file in files]
    return pa.concat_tables(parts, promote_options="permissive") if parts else None


@dataclass
class Kernels:
    """Operations of the GPU in time order, on CLOCK_MONOTONIC."""

    name: NDArray[np.object_]
    kind: NDArray[np.object_]
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    launch_ns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.name)

    def within(self, begin_ns: int, end_ns: int) -> Kernels:
        mask = (self.start_ns >= begin_ns) & (self.start_ns < end_ns)
        return Kernels(*(getattr(self, f)[mask] for f in ("name", "kind", "start_ns", "duration_ns", "launch_ns")))

    def kernels(self) -> Kernels:
        mask = self.kind == "kernel"
        return Kernels(*(getattr(self, f)[mask] for f in ("name", "kind", "start_ns", "duration_ns", "launch_ns")))


def traced_kernels(folder: Path) -> Kernels:
    """What Argus stored of the GPU's operations."""
    import pyarrow as pa

    rows = spool_rows(folder, "kernel_events")
    jobs = spool_rows(folder, "jobs")
    if rows is None or jobs is None:
        empty = np.empty(0, np.int64)
        return Kernels(np.empty(0, object), np.empty(0, object), empty, empty, empty)
    offset = int(jobs["mono_offset_ns"][0].as_py())

    def times(name: str) -> NDArray[np.int64]:
        return rows[name].cast(pa.timestamp("ns", tz="UTC")).cast(pa.int64()).to_numpy() - offset

    def words(name: str) -> NDArray[np.object_]:
        return np.array(rows[name].cast(pa.string()).to_pylist(), object)

    begin = times("ts")
    order = np.argsort(begin, kind="stable")
    return Kernels(
        words("name")[order],
        words("kind")[order],
        begin[order],
        rows["duration_ns"].to_numpy()[order],
        times("launch_ts")[order],
    )


@dataclass
class Comparison:
    """Kernels by name: ours against the reference's."""

    ours: int
    theirs: int
    matched: int
    """Sum over names of the smaller count."""
    missing: dict[str, int]
    extra: dict[str, int]
    median_difference: float
    """Median over names, weighted by time, of |ours / theirs - 1| of the median durations."""
    worst: list[tuple[str, int, float, float]]
    """Names by weight: (name, count, their median ns, ours / theirs - 1)."""

    @property
    def share(self) -> float:
        return self.matched / self.theirs if self.theirs else math.nan


def compare(
    ours: Sequence[tuple[str, float]],
    theirs: Sequence[tuple[str, float]],
    *,
    normal: Callable[[str], str] | None = None,
) -> Comparison:
    """Compares two lists of (name, duration ns)."""
    normal = normal or normal_name
    known: dict[str, str] = {}
    grouped: list[dict[str, list[float]]] = [{}, {}]
    for group, events in zip(grouped, (ours, theirs), strict=True):
        for name, duration in events:
            word = known.setdefault(name, normal(name))
            group.setdefault(word, []).append(duration)
    own, reference = ({name: len(d) for name, d in group.items()} for group in grouped)
    matched = sum(min(count, own.get(name, 0)) for name, count in reference.items())
    missing = {n: c - own.get(n, 0) for n, c in reference.items() if c > own.get(n, 0)}
    extra = {n: c - reference.get(n, 0) for n, c in own.items() if c > reference.get(n, 0)}
    details = []
    for name in own.keys() & reference.keys():
        our, their = (float(np.median(group[name])) for group in grouped)
        if their > 0:
            details.append((sum(grouped[1][name]), name, len(grouped[1][name]), their, our / their - 1))
    details.sort(reverse=True)
    weights = np.array([d[0] for d in details])
    differences = np.array([abs(d[4]) for d in details])
    median = math.nan
    if len(details):
        order = np.argsort(differences)
        along = np.cumsum(weights[order]) / weights.sum()
        median = float(differences[order][np.searchsorted(along, 0.5)])
    return Comparison(
        len(ours), len(theirs), matched, missing, extra, median, [(d[1], d[2], d[3], d[4]) for d in details[:40]]
    )


_cxxabi: Any = None


def demangle(name: str) -> str:
    """A C++ name as people write it, as torch.profiler shows it."""
    global _cxxabi
    if not name.startswith("_Z"):
        return name
    if _cxxabi is None:
        try:
            _cxxabi = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
            _cxxabi.restype = ctypes.c_void_p
            _cxxabi.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        except OSError:
            _cxxabi = False
    if not _cxxabi:
        return name
    status = ctypes.c_int()
    made = _cxxabi(name.encode(), None, None, ctypes.byref(status))
    if status.value or not made:
        return name
    text = ctypes.string_at(made).decode(errors="replace")
    _libc.free(ctypes.c_void_p(made))
    return text


def normal_name(name: str) -> str:
    """A kernel's name in one form, whatever tool recorded it."""
    return re.sub(r"\s+", "", demangle(name))


def step_windows(steps: Sequence[Sequence[int]], windows: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Durations (ms) of the steps that lie wholly within each window of time (ns)."""
    found = []
    for begin, end in windows:
        found.append([d / 1e6 for at, d in steps if at >= begin and at + d <= end])
    return found


def step_cpu(steps: Sequence[Sequence[int]], cpu_ns: Sequence[int], window: tuple[int, int]) -> list[float]:
    """CPU time (ms) of the whole process in each step that lies wholly within a window."""
    begin, end = window
    return [
        (cpu_ns[k] - cpu_ns[k - 1]) / 1e6 for k in range(1, len(steps)) if steps[k][0] >= begin and sum(steps[k]) <= end
    ]


def bootstrap_median(values: Sequence[float], *, rounds: int = 2000, seed: int = 1) -> tuple[float, float, float]:
    """Median of a few values, with a 95 % interval; NaN where there is none."""
    if not len(values):
        return math.nan, math.nan, math.nan
    data = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).choice(data, (rounds, len(data)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(data)), float(low), float(high)


def at_most(limit: float, found: tuple[float, float, float]) -> bool | None:
    """Whether a value (value, low, high) keeps to a limit; None: its interval shows neither."""
    _, low, high = found
    return True if high <= limit else False if low > limit else None


def tally(words: Sequence[str]) -> dict[str, int]:
    return dict(Counter(words).most_common())
