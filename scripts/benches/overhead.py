"""What a trace costs jobs, by their own step times, beside what Argus reports: windows with and without it in turns.

Each job runs on while `argus trace` comes and goes: without, with the defaults, without, with no limit to what it may
cost (the reference: every probe stays on), and so on. A job logs the end, the duration and the thread's CPU time of
each of its steps, and its gauge: how long an eighth of the step's work took in which nothing is called that Argus
probes. Where machines share hardware, steps vary by 5 to 20 % from second to second; the gauge varies with them, so a
step is measured in gauges. (What slows everything alike, the gauge too, as samples of stacks do, is not seen here:
`scripts/bench stacks` measures that.) When probes are there is seen from outside, by Argus's descriptors. Slowdowns
are of the median steps of parts of 5 ms, or four steps: the mean speed without probes, right before and after, against
that with them. Intervals (95%) are bootstrapped over parts. Wall time suffers from other load; the thread's CPU time
has all that probes cost, and little of the load. Both run with high priority, so that other programs of the machine
matter less.

Two CPUs may share a core, and each is half as fast while the other one computes: Argus's own work, of which there is
most in its first second, would look like what probes cost. So the job has a CPU of its own, everything else has the
others, and on those that share its core (where the machine does not show which: on another one) an idle-priority loop
computes all the time, with Argus and without.

The ratio is what the C job loses by CPU time with every probe on, divided by what it loses with the defaults, after
the first second. ``ARGUS_BENCH_PROGRAMS`` (all) chooses programs by a part of their names.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import ArgusError
from benches import Result

HERE = Path(__file__).parent
CALLS = {"c job": (740, 101, 13, 17)}
"""Step in us, and launches, copies and collectives in it."""
RATES = {"1k/s": (10_000, 10, 0, 0), "10k/s": (10_000, 100, 0, 0), "50k/s": (10_000, 500, 0, 0)}
KINDS = {"push": "emulated", "sub": "sub rsp, emulated later", "fixed": "single-stepped"}
BUDGET_PERCENT = 1.0
_PART_NS, _PART_STEPS = 5_000_000, 4
"""A part is so long, and has so many steps. Windows in which Argus sees more are 20 ms or more."""
_BOOTSTRAPS = 2000
_REPORTED = re.compile(r"overhead: ([\d.]+)% of the job's time")
_STEPS_DTYPE = np.dtype([("end", "<u8"), ("wall", "<u8"), ("cpu", "<u8"), ("gauge", "<u8")])


@dataclass(frozen=True)
class Program:
    """A job to trace: its name, its command without the log, and variables of its environment."""

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Window:
    """Times on CLOCK_MONOTONIC, ns, between which all probes were on, and what Argus reported (share of the job's
    time)."""

    begin: int
    end: int
    reported: float | None
    attached_s: float

    def begin_of_start(self) -> int:
        """When `argus trace` was started."""
        return self.begin - int(self.attached_s * 1e9)


def run(rounds: int) -> Result:
    quick = rounds == 1
    seconds = (2.0, 5.0) if quick else (4.0, 9.0)
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {}
    plot = [
        "",
        f"slowdown in % [95% interval], budget {BUDGET_PERCENT:g}; reported/measured: of the job's time, by CPU time",
        f"{'program':<34}{'first s':>8} {'after, wall':>22} {'after, CPU':>22} {'report':>7} {'rep./measured':>14}",
    ]
    ratio = 1.0
    with tempfile.TemporaryDirectory(prefix="argus-overhead-") as folder, _steady_core():
        for program in _programs(Path(folder), quick):
            if os.environ.get("ARGUS_BENCH_PROGRAMS", "") not in program.name:
                continue
            governed, free = _measure(program, Path(folder), rounds, seconds, reference=program.name == "c job, sub")
            rows[f"{program.name}: after the first second"] = [100 * value for value in governed.rounds]
            plot.append(_line(program.name, governed))
            more |= {f"{program.name}: {name}": value for name, value in governed.figures().items()}
            if free is not None:
                plot.append(_line(f"{program.name}, no limit", free))
                more |= {f"{program.name}, no limit: {name}": value for name, value in free.figures().items()}
                ratio = max(free.after_cpu[0], 1e-4) / max(governed.after_cpu[0], 1e-4)
    return Result("slowdown of jobs by a trace with the defaults, by CPU time", "%", rows, ratio, more, plot)


def _programs(folder: Path, quick: bool) -> Iterator[Program]:
    _compile(folder)

    def job(name: str, kind: str, numbers: tuple[int, ...]) -> Program:
        command = (str(folder / "overhead_job"),)
        libraries = {"LD_LIBRARY_PATH": str(folder / kind)}
        return Program(f"{name}, {kind}", command, tuple(map(str, numbers)), libraries)

    for kind in ("sub",) if quick else ("sub", "fixed", "push"):
        yield job("c job", kind, CALLS["c job"])
    try:
        import torch  # noqa: F401
    except ImportError:
        print("no PyTorch: its script is left out (ARGUS_WITH_TORCH=1 scripts/setup)", file=sys.stderr)
    else:
        yield Program("PyTorch, 3 ms a step", (sys.executable, str(HERE / "programs/mlp.py")))
    for name, numbers in RATES.items():
        for kind in ("push", "sub", "fixed"):
            if not quick or (name, kind) in (("10k/s", "push"), ("50k/s", "sub")):
                yield job(f"launches, {name}", kind, numbers)


def _compile(folder: Path) -> None:
    gcc = ["gcc", "-O2", "-fcf-protection=none"]
    try:
        for kind in KINDS:
            (folder / kind).mkdir()
            for library, flags in (("libcuda.so.1", []), ("libnccl.so.2", ["-DNCCL"])):
                into = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / kind / library)]
                subprocess.run([*gcc, f"-D{kind.upper()}", *flags, *into, HERE / "overhead_calls.c"], check=True)
        linked = [folder / "push" / name for name in ("libcuda.so.1", "libnccl.so.2")]
        subprocess.run([*gcc, "-o", folder / "overhead_job", HERE / "overhead_job.c", *linked], check=True)
    except (OSError, subprocess.CalledProcessError) as reason:
        raise ArgusError(f"the bench's jobs do not compile: {reason}") from reason


def _cpus() -> tuple[set[int], set[int]]:
    """The job's CPU, and those of everything else; the same where there is one only."""
    able = sorted(os.sched_getaffinity(0))
    return {able[-1]}, set(able[:-1]) or {able[-1]}


@contextlib.contextmanager
def _steady_core() -> Iterator[None]:
    """Keeps the CPUs busy that share the job's core, at idle priority."""
    (job_cpu,), others = _cpus()
    siblings: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        topology = Path(f"/sys/devices/system/cpu/cpu{job_cpu}/topology/thread_siblings_list").read_text()
        for part in topology.strip().split(","):
            first, _, last = part.partition("-")
            siblings |= set(range(int(first), int(last or first) + 1))
    chosen = siblings & others - {job_cpu} or {max(others)}

    def settle(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    loops = [
        subprocess.Popen(
            ["timeout", "7200", "sh", "-c", "while :; do :; done"],
            preexec_fn=lambda cpu=cpu: settle(cpu),  # type: ignore[misc]
            start_new_session=True,
        )
        for cpu in chosen
        if cpu != job_cpu
    ]
    try:
        yield
    finally:
        for loop in loops:
            os.killpg(loop.pid, signal.SIGKILL)
            loop.wait()


# --- one program


@dataclass
class Figures:
    """Slowdowns as shares of a step without probes: (value, low, high)."""

    first: float
    after: tuple[float, float, float]
    after_cpu: tuple[float, float, float]
    whole_cpu: float
    reported: float
    rounds: list[float]
    attached_s: float

    @property
    def ratio(self) -> float:
        """What Argus reported, against the same measured: both as shares of the job's time."""
        measured = self.whole_cpu / (1 + self.whole_cpu)
        return self.reported / measured if measured > 0 else float("inf")

    def figures(self) -> dict[str, float]:
        found = {
            "first second, %": 100 * self.first,
            "after, %": 100 * self.after[0],
            "after, low, %": 100 * self.after[1],
            "after, high, %": 100 * self.after[2],
            "after, CPU, %": 100 * self.after_cpu[0],
            "after, CPU, low, %": 100 * self.after_cpu[1],
            "after, CPU, high, %": 100 * self.after_cpu[2],
            "whole, CPU, %": 100 * self.whole_cpu,
            "reported, %": 100 * self.reported,
            "reported/measured": self.ratio,
            "attached after, s": self.attached_s,
        }
        return {name: value for name, value in found.items() if np.isfinite(value)}  # else it is no JSON


def _line(name: str, found: Figures) -> str:
    def interval(value: tuple[float, float, float]) -> str:
        return f"{100 * value[0]:6.2f} [{100 * value[1]:.2f}, {100 * value[2]:.2f}]"

    return (
        f"{name:<34}{100 * found.first:>8.2f} {interval(found.after):>22} {interval(found.after_cpu):>22} "
        f"{100 * found.reported:>7.2f} {found.ratio:>14.2f}"
    )


def _measure(
    program: Program, folder: Path, rounds: int, seconds: tuple[float, float], reference: bool
) -> tuple[Figures, Figures | None]:
    log = folder / "steps"
    log.unlink(missing_ok=True)
    quiet_s, traced_s = seconds
    windows: dict[bool, list[Window]] = {False: [], True: []}
    with _running([*program.command, str(log), *program.after], program.environment) as pid:
        time.sleep(quiet_s)
        for _ in range(rounds):
            for unlimited in (False, True) if reference else (False,):
                windows[unlimited].append(_trace(pid, folder, traced_s, unlimited))
                time.sleep(quiet_s)
    steps = np.fromfile(log, _STEPS_DTYPE)
    traced = sorted((w for both in windows.values() for w in both), key=lambda w: w.begin)
    made = {key: _figures(steps, chosen, traced, quiet_s) for key, chosen in windows.items() if chosen}
    return made[False], made.get(True)


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator[int]:
    """A job, until the context ends."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, _cpus()[0]),
    )
    try:
        _prefer(process.pid, -15)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise ArgusError(f"{' '.join(command)} did not start")
        yield process.pid
        if process.poll() is not None:
            raise ArgusError(f"{' '.join(command)} ended with {process.returncode} while it was traced")
    finally:
        process.kill()
        process.wait()


def _prefer(pid: int, niceness: int) -> None:
    """Gives a process that leads its session priority over others."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
        # Where sessions are scheduled as groups, niceness counts only within each.
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def _trace(pid: int, folder: Path, seconds: float, unlimited: bool) -> Window:
    limit = ["--max-overhead", "100"] if unlimited else []
    command = [str(Path(sys.executable).with_name("argus")), "trace", "--pid", str(pid), "--plain", *limit]
    begun = time.monotonic_ns()
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            [*command, "--store", f"chdb://{folder}/store"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, _cpus()[1]),
        )
        try:
            _prefer(process.pid, -10)
            deadline = time.monotonic() + 60
            while not _probes_of(process.pid):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ArgusError(f"argus trace did not attach:\n{(folder / 'output').read_text()}")
                time.sleep(0.02)
            begin = time.monotonic_ns()
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            end = time.monotonic_ns()
            process.wait(60)
        finally:
            process.kill()
            process.wait()
    found = _REPORTED.search((folder / "output").read_text())
    return Window(begin, end, float(found[1]) / 100 if found else None, (begin - begun) / 1e9)


def _probes_of(pid: int) -> bool:
    """Whether a process holds links of probes."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if "bpf_link" not in os.readlink(f"/proc/{pid}/fd/{name}"):
                    continue
                text = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                if "uprobe" in text or "perf" in text:
                    return True
    return False


# --- statistics


def _figures(steps: NDArray[np.void], windows: list[Window], traced: list[Window], quiet_s: float) -> Figures:
    rng = np.random.default_rng(0)
    quiet_ns, second = int(0.8 * quiet_s * 1e9), 10**9
    plain, late, first, whole = [], [], [], []
    for window in windows:
        # While Argus starts, which takes no time of the job's thread, is closest to what is compared.
        before = _parts(steps, window.begin - second // 2 - quiet_ns, window.begin - second // 4)
        following = [other.begin_of_start() for other in traced if other.begin > window.end]
        until = min([window.end + 2 * second + quiet_ns, *following])
        after = _parts(steps, window.end + second, until)
        plain.append(np.concatenate([before, after]))
        late.append(_parts(steps, window.begin + second, window.end))
        first.append(_parts(steps, window.begin, window.begin + second))
        whole.append(_parts(steps, window.begin, window.end))
    rounds = [_slowdown([p], [w], "cpu") for p, w in zip(plain, late, strict=True)]
    reported = [window.reported for window in windows if window.reported is not None]
    return Figures(
        _slowdown(plain, first, "cpu"),
        _interval(rng, plain, late, "wall"),
        _interval(rng, plain, late, "cpu"),
        _slowdown(plain, whole, "cpu"),
        float(np.mean(reported)) if reported else float("nan"),
        rounds,
        float(np.mean([window.attached_s for window in windows])),
    )


def _parts(steps: NDArray[np.void], begin: int, end: int) -> NDArray[np.void]:
    """Of each part between two times the speed: gauges to the median step, ``wall`` and ``cpu``."""
    chosen = steps[(steps["end"] >= begin) & (steps["end"] < end)]
    part_ns = max(_PART_NS, _PART_STEPS * int(np.median(steps["wall"])))
    part = ((chosen["end"] - np.uint64(begin)) // np.uint64(part_ns)).astype(np.int64)
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    made = np.zeros(len(starts), [("wall", "f8"), ("cpu", "f8")])
    counts = np.diff(starts, append=len(chosen))
    for name in ("wall", "cpu"):
        values = chosen[name] / chosen["gauge"]
        ordered = values[np.lexsort((values, part))]
        made[name] = 2 / (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2])
    return made[counts >= min(3, _PART_STEPS)]


def _slowdown(plain: list[NDArray[np.void]], probed: list[NDArray[np.void]], clock: str) -> float:
    """Mean over rounds: the parts' mean speed without probes, against that with them, less 1."""
    shares = [
        without[clock].mean() / with_[clock].mean() - 1
        for without, with_ in zip(plain, probed, strict=True)
        if len(without) and len(with_)
    ]
    return float(np.mean(shares)) if shares else float("nan")


def _interval(
    rng: np.random.Generator, plain: list[NDArray[np.void]], probed: list[NDArray[np.void]], clock: str
) -> tuple[float, float, float]:
    """A slowdown, and its 95% interval: rounds and their parts drawn anew."""
    drawn = []
    for _ in range(_BOOTSTRAPS):
        chosen = rng.integers(0, len(plain), len(plain))
        draws = [(plain[n], probed[n]) for n in chosen if len(plain[n]) and len(probed[n])]
        if not draws:
            continue
        both = [tuple(part[rng.integers(0, len(part), len(part))] for part in pair) for pair in draws]
        drawn.append(_slowdown([pair[0] for pair in both], [pair[1] for pair in both], clock))
    low, high = np.percentile(drawn, [2.5, 97.5]) if drawn else (float("nan"), float("nan"))
    return _slowdown(plain, probed, clock), float(low), float(high)
