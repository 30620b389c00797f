"""What sampling stacks costs, beside py-spy at the same rate; how much it slows the target; what a context switch pays.

The target is a Python program whose main thread computes at a given depth while its other threads wait for a lock as
deep, or compute too ("all": one of them has the GIL, and is on the CPU). Argus is its whole stack side
(``argus.live.sides.stack_samples.StackSide``, polled as ``argus trace`` does) with a writer that only counts, and the
run time of its BPF programs by the kernel's clock. py-spy is ``py-spy record --format raw``, as it comes and with
``--nonblocking``. Both are measured while they sample, without their start, which stands below.

``ratio`` is the least that py-spy takes for a sample over what Argus takes, one thread, depth 10 and 40, either way of
py-spy; ``of_goal`` the same over the goals (30 and 40 times), ``ratio_with_interrupts`` with the timer interrupts of
all CPUs on Argus's side, which no clock of the kernel ascribes to anybody. Argus's BPF time is that of the whole
machine: its tracepoints see everybody's context switches. What py-spy does not do, recording what threads wait for, is
left out in "nothing off the CPU" (``ratio_on_cpu_…``). On a busy machine the target is seldom on a CPU and often
preempted: then Argus has few samples to spread its cost over, and the ratio means little.

Slowdown is measured in pairs of windows, on and off (off: no timer, no tracepoint), by what the target gets done for
its CPU time, and in wall time. Where the noise is far above the effect, three figures are more precise: the BPF time
for the target's CPU time at the default rate (of the sampling program, and of all); what the target loses for a sample
at 250 times the rate; and from both the estimate, whose interval is that of the second (``slowdown_percent_estimate``,
``_low``, ``_high``).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from argus.capture import DEFAULT_OFF_CPU_NS, DEFAULT_RATE_HZ
from argus.capture.python.interpreter import PythonProcess, find_interpreter
from argus.capture.sampler import _PERF_EVENT_IOC_DISABLE, _PERF_EVENT_IOC_ENABLE, StackProbes, run_time_statistics
from argus.live.job import Job, Member
from argus.live.options import Options
from argus.live.session import Session
from argus.live.sides.stack_samples import CALM_ROWS_S, LONGEST_POLL_S, StackSide
from argus.live.tracer import IDLE_SLACK_S
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.records import STACK_LOSS_COUNTERS, StackCounter
from benches import Result

RATE_HZ = 100
"""py-spy's default; Argus's is 19."""
WARM_HZ, WARM_S = 2000, 2.0
"""So long, and so often, Argus samples a target before it is measured: most of its stacks are known then, as after some
minutes of a job. ``new_stacks_a_sample`` counts those that were not."""
GOALS = {10: 30.0, 40: 40.0}
"""How much less CPU time than py-spy, by depth."""
SLOWDOWN_GOAL_PERCENT = 0.1
TIMES = 250
"""The rate is raised by so much where the slowdown is too small to be seen."""
WORK_S, LOOK_S = 1.0, 1.0
"""As in argus/live/tracer.py, where no calls are probed."""
CYCLE_S = CALM_ROWS_S
"""Argus is measured for so long: some of what it does comes round only then."""
BLOCKS_A_SECOND = 20_000
PAIRS_A_ROUND = 8
WINDOW_S = 0.25
_RESAMPLES = 4000

TARGET = """
import mmap, struct, sys, threading, time
depth, mode = int(sys.argv[2]), sys.argv[4]
with open(sys.argv[1], "r+b") as file:
    slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
gate = threading.Lock()
gate.acquire()
def scale(x, i):
    y = x * 3 + i
    if y > 1_000_000:
        y -= 999_999
    return y
def add(x, i):
    return x + i & 0xFFFF
def compute(report):
    done = x = 0
    while True:
        for i in range(1000):
            x = scale(x, i)
            x = add(x, i)
        done += 1
        if report:
            at = 1 + 3 * (done & 1)
            slots[at], slots[at + 1], slots[at + 2] = done, time.thread_time_ns(), time.monotonic_ns()
            slots[0] = done
def block(report):
    done, period = 0, 1 / float(sys.argv[5])
    due = time.perf_counter()
    while True:
        due += period
        late = time.perf_counter() - due
        if late > 0:
            due += late
        time.sleep(max(-late, 1e-6))
def wait(report):
    gate.acquire()
def down(levels, last, report):
    return down(levels - 1, last, report) if levels else last(report)
def begin(last, frames, report):
    down(depth - frames, last, report)
for _ in range(int(sys.argv[3]) - 1):
    threading.Thread(target=begin, args=(compute if mode == "all" else wait, 6, False), daemon=True).start()
if mode == "block":
    import ctypes
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
begin({"block": block, "idle": wait}.get(mode, compute), 4, True)
"""
"""Frames: those of ``threading``, ``begin``, the last ``down``, and what computes; the functions that it calls lie one
deeper. prctl: PR_SET_TIMERSLACK, 1 ns."""


@dataclass(frozen=True)
class Progress:
    """What a target had done at some moment: pieces of work, CPU time of its thread and monotonic time, ns."""

    pieces: int
    cpu_ns: int
    ns: int


class Target:
    """A Python program that computes."""

    def __init__(self, depth: int, threads: int = 1, mode: str = "one", hz: float = 0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "slots").write_bytes(bytes(mmap.PAGESIZE))
        (folder / "target.py").write_text(TARGET)
        words = [str(word) for word in (folder / "target.py", folder / "slots", depth, threads, mode, hz)]
        self.process = subprocess.Popen([sys.executable, *words])
        self.pid = self.process.pid
        with open(folder / "slots", "r+b") as file:
            self._slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        deadline = time.monotonic() + 30
        while len(os.listdir(f"/proc/{self.pid}/task")) < threads or (mode in ("one", "all") and not self._slots[0]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ArgusError("the bench's target does not begin")
            time.sleep(0.01)

    def progress(self) -> Progress:
        while True:
            newest = self._slots[0]
            at = 1 + 3 * (newest & 1)
            found = Progress(*self._slots[at : at + 3])
            if self._slots[0] == newest == found.pieces:
                return found

    def switches(self) -> int:
        return _switches(self.pid)

    def cpu_ns(self) -> int:
        return _cpu_ns(self.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()


def _cpu_ns(pid: int) -> int:
    """CPU time of a process's threads that live."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


def _switches(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            text = (task / "status").read_text()
            total += sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)
    return total


class _Writer:
    """Takes rows and counts them."""

    def __init__(self) -> None:
        self.rows: Tally[str] = Tally()

    def append(self, table: str, rows: Any) -> int:
        found = rows.num_rows if hasattr(rows, "num_rows") else 1
        self.rows[table] += found
        return found


@dataclass
class Spent:
    """What sampling took while it went on. Times in ns."""

    ns: int = 0
    outside_ns: int = 0
    bpf_ns: int = 0
    samples: float = 0
    new_stacks: int = 0

    @property
    def percent(self) -> float:
        """Of a CPU."""
        return 100 * (self.outside_ns + self.bpf_ns) / self.ns

    @property
    def us_a_sample(self) -> float:
        return (self.outside_ns + self.bpf_ns) / 1e3 / max(self.samples, 1)


def _never() -> bool:
    return False


class Ours:
    """Argus's stack side, loaded once; ``off`` leaves neither a timer nor a tracepoint."""

    def __init__(self, rate_hz: int, off_cpu_ns: int | None = DEFAULT_OFF_CPU_NS) -> None:
        self.writer = _Writer()
        self.job = Job("bench", 1)
        before, began = time.process_time_ns(), time.monotonic_ns()
        options = Options(stacks=True, rate_hz=rate_hz, off_cpu_ns=off_cpu_ns)
        session = Session(options, self.writer)  # type: ignore[arg-type]
        session.roster = SimpleNamespace(jobs=[self.job])  # type: ignore[assignment]
        self.side = StackSide(session)
        self.side.start()
        self.start_cpu_ns, self.start_ns = time.process_time_ns() - before, time.monotonic_ns() - began
        if not self.side.on:
            raise ArgusError(f"no stacks here: {self.side.state}", "Run the bench as root", EXIT_UNAVAILABLE)
        self.probes: StackProbes = self.side._programs.probes
        self._switch = Switch(self.probes)
        self._work_due = self._look_due = 0.0
        self.off()

    def on(self) -> None:
        self._switch.on()

    def off(self) -> None:
        self._switch.off()

    def add(self, pid: int) -> int:
        """Returns the CPU time that taking notice of the process took, ns."""
        self.job.members[pid] = Member(None, 0, "order")  # type: ignore[arg-type]
        before = time.process_time_ns()
        self.side.look(time.monotonic())
        return time.process_time_ns() - before

    def remove(self, pid: int) -> None:
        del self.job.members[pid]
        self.side.poll(time.monotonic())
        self.side.work(time.monotonic())
        self.side._processes.remove(pid)

    def follow(self, seconds: float, until: Callable[[], bool] = _never) -> None:
        """What ``argus.live.tracer.Tracer.poll`` does for stacks."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not until():
            self.side.poll(now, slack_s=IDLE_SLACK_S)
            if now + IDLE_SLACK_S >= self._work_due:
                self._work_due = now + WORK_S
                self.side.work(now)
            if now + IDLE_SLACK_S >= self._look_due:
                self._look_due = now + LOOK_S
                self.side.look(now)
            wake = min(self.side.due, self._work_due, self._look_due, end)
            if until is not _never:
                wake = min(wake, now + 0.1)
            time.sleep(max(0.0, wake - time.monotonic()))

    def settle(self) -> None:
        """What it does now and then is done as seldom from now on as it is half a minute after it has begun."""
        self.follow(1.5)
        self.side._rows_s, self.side._poll_s = CALM_ROWS_S, LONGEST_POLL_S
        self.follow(LONGEST_POLL_S)

    def measure(self, seconds: float) -> Spent:
        bpf, before = self.probes.cpu_ns(), self.probes.counters()
        cpu, began = time.process_time_ns(), time.monotonic_ns()
        self.follow(seconds)
        cpu, ns = time.process_time_ns() - cpu, time.monotonic_ns() - began
        after = self.probes.counters()
        samples, stacks = (after[one] - before[one] for one in (StackCounter.SAMPLES, StackCounter.STACKS_SENT))
        return Spent(ns, cpu, self.probes.cpu_ns() - bpf, samples, stacks)

    def lost(self) -> int:
        return sum(value for counter, value in self.probes.counters().items() if counter in STACK_LOSS_COUNTERS)

    def close(self) -> None:
        self.side.close()


class Switch:
    """Takes the programs of a loaded sampler away from the CPUs, and puts them back."""

    def __init__(self, probes: StackProbes) -> None:
        self._probes = probes
        programs = {"sched_switch": "on_switch", "sched_wakeup": "on_wakeup", "sched_process_exit": "on_exit"}
        programs |= {"sched_process_exec": "on_exec", "sched_process_fork": "on_fork"}
        self._programs = {k: v for k, v in programs.items() if k in probes._tracepoints}
        self._is_on = True

    def on(self) -> None:
        if self._is_on:
            return
        self._is_on = True
        for tracepoint, program in self._programs.items():
            self._probes._attach_tracepoint(tracepoint, program)
        for event in self._probes._events:
            fcntl.ioctl(event, _PERF_EVENT_IOC_ENABLE, 0)

    def off(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        for event in self._probes._events:
            fcntl.ioctl(event, _PERF_EVENT_IOC_DISABLE, 0)
        for tracepoint in self._programs:
            os.close(self._probes._tracepoints.pop(tracepoint))


class PySpy:
    """``py-spy record`` at work. Its CPU time is read while it samples."""

    def __init__(self, pid: int, *, nonblocking: bool, rate_hz: int = RATE_HZ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        words = ["--rate", rate_hz, "--format", "raw", "--output", Path(self._folder.name) / "out", "--pid", pid]
        words += ["--duration", 3600, *(["--nonblocking"] if nonblocking else [])]
        self._process = subprocess.Popen(
            [_py_spy(), "record", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        self._output = b""
        deadline = time.monotonic() + 60
        assert self._process.stdout is not None
        while b"Sampling process" not in self._output:
            ready = select.select([self._process.stdout], [], [], deadline - time.monotonic())[0]
            more = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not more:
                self._process.kill()
                raise ArgusError(f"py-spy does not begin: {self._output.decode(errors='replace').strip()}")
            self._output += more
        self._began_ns = time.monotonic_ns()
        self.start_cpu_ns = _cpu_ns(self._process.pid)
        self.errors = 0

    def measure(self, seconds: float) -> Spent:
        """Its samples are known once ``close`` has given how many it took a second."""
        cpu, began = _cpu_ns(self._process.pid), time.monotonic_ns()
        time.sleep(seconds)
        return Spent(time.monotonic_ns() - began, _cpu_ns(self._process.pid) - cpu)

    def close(self) -> float:
        """Ends it. Returns how many samples it took a second."""
        self._process.send_signal(signal.SIGINT)
        ns = time.monotonic_ns() - self._began_ns
        output = (self._output + self._process.communicate(timeout=60)[0]).decode(errors="replace")
        self._folder.cleanup()
        words = output.replace("'", " ").split()
        if "Samples:" not in words:
            raise ArgusError(f"py-spy failed: {output.strip()}")
        self.errors = int(words[words.index("Errors:") + 1])
        return int(words[words.index("Samples:") + 1]) / ns * 1e9


def _py_spy() -> str:
    found = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise ArgusError("no py-spy, the reference", f"{sys.executable} -m pip install py-spy", EXIT_UNAVAILABLE)
    return found


# ---- a) CPU time of the samplers


@dataclass(frozen=True)
class Case:
    depth: int
    threads: int
    mode: str = "one"

    def __str__(self) -> str:
        on_cpu = "all compute" if self.mode == "all" else "1 computes" if self.threads > 1 else "it computes"
        return f"depth {self.depth}, {self.threads} thread{'s' if self.threads > 1 else ''} ({on_cpu})"


CASES = (
    *(Case(depth, threads) for depth in GOALS for threads in (1, 8, 64)),
    Case(40, 8, "all"),
)
ARGUS, ON_CPU, PLAIN, NONBLOCKING = "Argus", "Argus, nothing off the CPU", "py-spy", "py-spy --nonblocking"
KEYS = {ARGUS: "argus", ON_CPU: "argus_on_cpu", PLAIN: "py_spy", NONBLOCKING: "py_spy_nonblocking"}


@dataclass
class Costs:
    spent: dict[tuple[Case, str], list[Spent]] = field(default_factory=dict)
    start_ms: dict[str, list[float]] = field(default_factory=dict)
    errors: int = 0

    def add(self, case: Case, who: str, spent: Spent) -> None:
        self.spent.setdefault((case, who), []).append(spent)

    def median(self, case: Case, who: str, figure: Callable[[Spent], float]) -> float:
        return statistics.median(map(figure, self.spent[case, who]))

    def ratio(self, case: Case, who: str, extra_us: float = 0.0, whose: str = ARGUS) -> float:
        """Of the CPU time for a sample, py-spy's over Argus's: the median of the rounds."""
        pairs = zip(self.spent[case, who], self.spent[case, whose], strict=True)
        return statistics.median(theirs.us_a_sample / (own_cost.us_a_sample + extra_us) for theirs, own_cost in pairs)


def _idle_percent(ours: Ours, seconds: float) -> float:
    """CPU time of Argus while its only target waits for a lock, once it has settled."""
    target = Target(40, mode="idle")
    try:
        ours.add(target.pid)
        ours.on()
        ours.settle()
        spent = ours.measure(seconds)
        ours.off()
        ours.remove(target.pid)
        return 100 * spent.outside_ns / spent.ns
    finally:
        target.close()


def _costs(ours: dict[str, Ours], rounds: int) -> Costs:
    costs = Costs()
    for case in CASES if rounds > 1 else [case for case in CASES if case.threads == 1]:
        target = Target(case.depth, case.threads, case.mode)
        try:
            for one in ours.values():
                costs.start_ms.setdefault("argus_target_start_ms", []).append(one.add(target.pid) / 1e6)
                one.on()
                one.probes.set_rate(WARM_HZ)
                one.follow(WARM_S)
                one.probes.set_rate(RATE_HZ)
                one.settle()
                one.off()
            for _ in range(rounds if case.threads == 1 else max(rounds // 3, 1)):
                for who, one in ours.items():
                    one.on()
                    one.follow(0.1)
                    costs.add(case, who, one.measure(CYCLE_S))
                    one.off()
                for who in (PLAIN, NONBLOCKING):
                    spy = PySpy(target.pid, nonblocking=who == NONBLOCKING)
                    costs.start_ms.setdefault("py_spy_start_ms", []).append(spy.start_cpu_ns / 1e6)
                    time.sleep(0.2)
                    spent = spy.measure(1.0)
                    # It counts each running thread that it saw.
                    spent.samples = min(spy.close(), RATE_HZ) * spent.ns / 1e9
                    costs.errors += spy.errors
                    costs.add(case, who, spent)
            for one in ours.values():
                one.remove(target.pid)
        finally:
            target.close()
    return costs


# ---- b) slowdown of the target


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % confidence interval, by resampling."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Interval:
        array = np.array(values)
        drawn = np.random.default_rng(1).integers(0, len(array), (_RESAMPLES, len(array)))
        low, high = np.percentile(np.median(array[drawn], axis=1), [2.5, 97.5])
        return Interval(float(np.median(array)), float(low), float(high))

    def figures(self, name: str) -> dict[str, float]:
        return {name: self.middle, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass
class Slowdown:
    """Percent that a target gets done less, in each pair of windows: for its CPU time, and in wall time."""

    by_cpu: list[float] = field(default_factory=list)
    by_wall: list[float] = field(default_factory=list)


def _speed(target: Target, wait: Callable[[float], object], seconds: float) -> tuple[float, float, int]:
    """Pieces of work for a second of CPU and of wall time, and the CPU time in ns."""
    a = target.progress()
    wait(seconds)
    b = target.progress()
    while b.pieces == a.pieces:
        time.sleep(0.001)
        b = target.progress()
    pieces = b.pieces - a.pieces
    return pieces / (b.cpu_ns - a.cpu_ns), pieces / (b.ns - a.ns), b.cpu_ns - a.cpu_ns


def _pairs(
    target: Target, pairs: int, seconds: float, sampled: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Slowdown:
    """Windows with a sampler and without, in turns; each second pair the other way round."""
    found = Slowdown()
    for pair in range(pairs):
        speeds = {}
        for on in (True, False) if pair % 2 else (False, True):
            with sampled() if on else contextlib.nullcontext(time.sleep) as wait:
                wait(0.03)
                speeds[on] = _speed(target, wait, seconds)
        found.by_cpu.append(100 * (1 - speeds[True][0] / speeds[False][0]))
        found.by_wall.append(100 * (1 - speeds[True][1] / speeds[False][1]))
    return found


def _slowdowns(rounds: int) -> tuple[dict[str, float], float]:
    """Figures, and what the interrupt of a sample costs beside its program, us."""
    more: dict[str, float] = {}
    target = Target(40)
    ours = Ours(DEFAULT_RATE_HZ)
    try:
        ours.add(target.pid)
        bpf_ns = sampling_ns = cpu_ns = 0

        @contextlib.contextmanager
        def argus() -> Iterator[Callable[[float], object]]:
            nonlocal bpf_ns, sampling_ns, cpu_ns
            ours.on()
            bpf, sampling, cpu = ours.probes.cpu_ns(), ours.probes.run_times()["on_sample"][0], target.cpu_ns()
            try:
                yield ours.follow
            finally:
                bpf_ns += ours.probes.cpu_ns() - bpf
                sampling_ns += ours.probes.run_times()["on_sample"][0] - sampling
                cpu_ns += target.cpu_ns() - cpu
                ours.off()

        with run_time_statistics():
            found = _pairs(target, PAIRS_A_ROUND * rounds, WINDOW_S, argus)
        more |= Interval.of(found.by_cpu).figures("slowdown_percent_by_cpu_time")
        more |= Interval.of(found.by_wall).figures("slowdown_percent_by_wall_time")
        # With the tracepoints' time, which on a busy machine is mostly for the switches of others.
        more["bpf_percent_of_target_cpu"] = 100 * bpf_ns / cpu_ns
        direct = more["sampling_percent_of_target_cpu"] = 100 * sampling_ns / cpu_ns
        for name, nonblocking in (("py_spy", False), ("py_spy_nonblocking", True)):

            @contextlib.contextmanager
            def py_spy(nonblocking: bool = nonblocking) -> Iterator[Callable[[float], object]]:
                spy = PySpy(target.pid, nonblocking=nonblocking)
                try:
                    yield time.sleep
                finally:
                    spy.close()

            found = _pairs(target, rounds + 1, 2 * WINDOW_S, py_spy)
            more |= Interval.of(found.by_cpu).figures(f"{name}_slowdown_percent_by_cpu_time")
            more |= Interval.of(found.by_wall).figures(f"{name}_slowdown_percent_by_wall_time")
        raised, program_ns = _raised(target, 4 * rounds)
        # Of each sample: what the target loses in all, and what of that its program is.
        ns = Interval(*(x / 100 * 1e9 / (TIMES * DEFAULT_RATE_HZ) for x in (raised.middle, raised.low, raised.high)))
        more |= {f"{name}_times_{TIMES}": value for name, value in raised.figures("slowdown_percent").items()}
        more |= ns.figures("lost_ns_a_sample")
        more["program_ns_a_sample"] = program_ns
        interrupts_ns = [max(one - program_ns, 0.0) for one in (ns.middle, ns.low, ns.high)]
        interrupt_ns = interrupts_ns[0]
        estimates = [direct + 100 * one * DEFAULT_RATE_HZ / 1e9 for one in interrupts_ns]
        more |= Interval(*estimates).figures("slowdown_percent_estimate")
        more["slowdown_percent_goal"] = SLOWDOWN_GOAL_PERCENT
        return more, interrupt_ns / 1e3
    finally:
        ours.close()
        target.close()


def _raised(target: Target, pairs: int) -> tuple[Interval, float]:
    """Slowdown in percent by CPU time at a raised rate, and what the program takes for a sample, ns.

    User space takes what comes and throws it away.
    """
    probes = StackProbes(rate_hz=TIMES * DEFAULT_RATE_HZ, off_cpu_ns=None)
    switch = Switch(probes)
    switch.off()
    interpreter = find_interpreter(target.pid)
    assert interpreter is not None
    assert interpreter.layout is not None
    process = PythonProcess(target.pid, interpreter)
    probes.set_python(target.pid, interpreter.layout)
    probes.add_target(target.pid)
    probes.set_threads(target.pid, process.thread_states())

    def wait(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            probes.drain()
            time.sleep(0.01)

    @contextlib.contextmanager
    def sampled() -> Iterator[Callable[[float], object]]:
        switch.on()
        try:
            yield wait
        finally:
            switch.off()

    try:
        found = _pairs(target, pairs, WINDOW_S, sampled)
        # Apart: measuring the program costs time itself.
        with run_time_statistics(), sampled():
            samples, ran = probes.counters()[StackCounter.SAMPLES], probes.cpu_ns()
            wait(WINDOW_S)
            ran, samples = probes.cpu_ns() - ran, probes.counters()[StackCounter.SAMPLES] - samples
        return Interval.of(found.by_cpu), ran / max(samples, 1)
    finally:
        process.close()
        probes.close()


# ---- c) context switches


class Blocking:
    """The C program (stacks.c)."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        program = Path(self._folder.name) / "stacks"
        source = Path(__file__).with_suffix(".c")
        try:
            subprocess.run(["gcc", "-O2", "-o", program, source, "-lpthread"], check=True)
        except (OSError, subprocess.CalledProcessError) as reason:
            raise ArgusError(f"the bench's target does not compile: {reason}") from reason
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def ask(self, words: str, ours: Ours | None = None) -> tuple[int, int, int]:
        """Nanoseconds, switches and CPU time of a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = self._process.stdout
        print(words, file=self._process.stdin, flush=True)
        if ours is not None:
            ours.follow(600, lambda: bool(select.select([output], [], [], 0)[0]))
        ns, switches, cpu_ns = map(int, output.readline().split())
        return ns, switches, cpu_ns

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _switch_ns(ours: Ours, rounds: int) -> dict[str, float]:
    more: dict[str, float] = {}
    blocking = Blocking()
    turns = 20_000
    seen: dict[str, list[float]] = {"off": [], "bystander": [], "target": []}
    try:
        blocking.ask(f"t {turns}")
        for _ in range(3 * rounds):
            for name in seen:
                if name == "target":
                    ours.add(blocking.pid)
                if name != "off":
                    ours.on()
                ns, switches, _ = blocking.ask(f"t {turns}", None if name == "off" else ours)
                seen[name].append(ns / switches)
                ours.off()
                if name == "target":
                    ours.remove(blocking.pid)
        for name in ("bystander", "target"):
            pairs = zip(seen[name], seen["off"], strict=True)
            more |= Interval.of([with_ns - without for with_ns, without in pairs]).figures(f"switch_ns_{name}")
        more["switch_ns_off"] = statistics.median(seen["off"])
        with run_time_statistics():
            for name in ("bystander", "target"):
                if name == "target":
                    ours.add(blocking.pid)
                more |= _programs(
                    ours, name, lambda: blocking.ask(f"b {BLOCKS_A_SECOND} {1000 * min(rounds, 2)}", ours)
                )
                if name == "target":
                    ours.remove(blocking.pid)
            target = Target(40, 1, "block", BLOCKS_A_SECOND)
            try:
                ours.add(target.pid)
                more |= _programs(ours, "python_target", lambda: _blocks(target, ours, min(rounds, 2)))
                ours.remove(target.pid)
            finally:
                target.close()
    finally:
        blocking.close()
    return more


def _blocks(target: Target, ours: Ours, seconds: float) -> tuple[int, int, int]:
    began, switches, cpu = time.monotonic_ns(), target.switches(), target.cpu_ns()
    ours.follow(seconds)
    return time.monotonic_ns() - began, target.switches() - switches, target.cpu_ns() - cpu


def _programs(ours: Ours, name: str, work: Callable[[], tuple[int, int, int]]) -> dict[str, float]:
    """BPF time while threads block, over what else runs on the machine too."""
    ours.on()
    before, cpu = ours.probes.run_times(), time.process_time_ns()
    ns, switches, cpu_ns = work()
    cpu = time.process_time_ns() - cpu
    after = ours.probes.run_times()
    ours.off()
    spent = {program: (after[program][0] - then[0], after[program][1] - then[1]) for program, then in before.items()}
    return {
        f"blocks_a_second_{name}": switches / ns * 1e9,
        f"on_switch_ns_a_run_{name}": spent["on_switch"][0] / max(spent["on_switch"][1], 1),
        f"on_wakeup_ns_a_run_{name}": spent["on_wakeup"][0] / max(spent["on_wakeup"][1], 1),
        f"bpf_ns_a_block_{name}": (spent["on_switch"][0] + spent["on_wakeup"][0]) / max(switches, 1),
        f"bpf_percent_of_a_cpu_{name}": 100 * sum(one for one, _ in spent.values()) / ns,
        f"bpf_percent_of_its_cpu_time_{name}": 100 * sum(one for one, _ in spent.values()) / max(cpu_ns, 1),
        f"argus_percent_of_a_cpu_{name}": 100 * cpu / ns,
    }


# ---- all of it


def run(rounds: int) -> Result:
    """One round is a smoke test: one thread only, and short windows."""
    _py_spy()
    ours = Ours(RATE_HZ)
    try:
        on_cpu = Ours(RATE_HZ, None)
        try:
            with run_time_statistics():
                idle = _idle_percent(ours, 2 * CYCLE_S)
                costs = _costs({ARGUS: ours, ON_CPU: on_cpu}, rounds)
            lost = ours.lost() + on_cpu.lost()
        finally:
            on_cpu.close()
        switches = _switch_ns(ours, rounds)
    finally:
        ours.close()
    slow, interrupt_us = _slowdowns(rounds)
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {"cpu_percent_argus_idle": idle}
    for (case, who), all_spent in costs.spent.items():
        rows[f"{case}: {who}"] = [spent.us_a_sample for spent in all_spent]
    for case in dict.fromkeys(case for case, _ in costs.spent):
        name = f"depth_{case.depth}_threads_{case.threads}{'_all' if case.mode == 'all' else ''}"
        for who, key in KEYS.items():
            more[f"cpu_percent_{key}_{name}"] = costs.median(case, who, lambda spent: spent.percent)
        for who in (PLAIN, NONBLOCKING):
            more[f"ratio_{KEYS[who]}_{name}"] = costs.ratio(case, who)
            more[f"ratio_on_cpu_{KEYS[who]}_{name}"] = costs.ratio(case, who, whose=ON_CPU)
        more[f"bpf_us_a_sample_{name}"] = costs.median(case, ARGUS, lambda one: one.bpf_ns / 1e3 / max(one.samples, 1))
        more[f"new_stacks_a_sample_{name}"] = costs.median(
            case, ARGUS, lambda one: one.new_stacks / max(one.samples, 1)
        )
        for who, key in ((ARGUS, "argus"), (PLAIN, "py_spy")):
            more[f"samples_a_second_{key}_{name}"] = costs.median(case, who, lambda one: one.samples / one.ns * 1e9)
    single = [case for case in CASES if case.threads == 1]
    least = {case.depth: min(costs.ratio(case, who) for who in (PLAIN, NONBLOCKING)) for case in single}
    extra_us = interrupt_us * (os.cpu_count() or 1)
    more |= {f"ratio_depth_{depth}": ratio for depth, ratio in least.items()}
    more["of_goal"] = min(ratio / GOALS[depth] for depth, ratio in least.items())
    more["ratio_with_interrupts"] = min(
        costs.ratio(case, who, extra_us) for case in single for who in (PLAIN, NONBLOCKING)
    )
    more["interrupt_us"] = interrupt_us
    more["argus_start_cpu_ms"], more["argus_start_ms"] = ours.start_cpu_ns / 1e6, ours.start_ns / 1e6
    more |= {name: statistics.median(values) for name, values in costs.start_ms.items()}
    more["argus_lost"], more["py_spy_errors"] = lost, costs.errors
    return Result(
        f"CPU time for a sample, {RATE_HZ} samples a second, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "microseconds of CPU a sample",
        rows,
        min(least.values()),
        more | slow | switches,
    )
