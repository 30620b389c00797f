"""The stack sampler's BPF programs on C programs whose stacks, switches and fake interpreters are known exactly."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture import sampler
from argus.capture.kernel.programs import cpus_of
from argus.capture.process.symbols import Symbols
from argus.capture.sampler import FEW_THREADS, RawStack, StackProbes
from argus.model import records
from argus.model.errors import ArgusError
from argus.model.records import StackCounter
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.kernel

HERE = Path(__file__).parent
FRAME_POINTERS = ["-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
SYSCALLS = {"nanosleep": {35, 230}, "poll": {7, 271}, "futex": {202}, "read": {0}}
if os.uname().machine == "aarch64":
    SYSCALLS = {"nanosleep": {101, 115}, "poll": {73}, "futex": {98}, "read": {63}}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stacks")
    built = {}
    for name in ("fake", "work"):
        built[name] = folder / name
        source = HERE / f"stacks_{name}.c"
        subprocess.run(["gcc", "-Wall", "-pthread", *FRAME_POINTERS, "-o", built[name], source], check=True)
    return built


@pytest.fixture
def start(programs: dict[str, Path]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts programs, and ends them after the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(name: str, *arguments: object) -> subprocess.Popen[str]:
        command = [programs[name], *map(str, arguments)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


KNOWN: WeakKeyDictionary[StackProbes, dict[int, RawStack]] = WeakKeyDictionary()
"""Stacks that probes have sent: they send each once, whichever test listens."""


class Seen:
    """What drains have brought, put together."""

    def __init__(self, probes: StackProbes) -> None:
        self.probes = probes
        self.counts = np.empty(0, records.STACK_COUNT)
        self.stacks = KNOWN.setdefault(probes, {})
        self.sent: list[int] = []
        self.pauses = np.empty(0, records.PAUSE)

    def drain(self, final: bool = False) -> None:
        drained = self.probes.drain(final=final)
        for stack in drained.stacks:
            self.add(stack)
        self.counts = np.concatenate([self.counts, drained.counts])
        self.pauses = np.concatenate([self.pauses, drained.pauses])
        if not self.probes.counters()[StackCounter.STACKS_DROPPED]:
            assert set(drained.counts["stack"].tolist()) - {0} <= self.stacks.keys(), "counted before it was sent"

    def add(self, stack: RawStack) -> None:
        self.stacks[int(stack.head["stack"])] = stack
        self.sent.append(int(stack.head["stack"]))

    def wait(self, condition: Callable[[], bool], what: str = "it") -> None:
        def drained() -> bool:
            self.drain()
            return condition()

        wait_until(drained, what=what)

    def of(self, pid: int, *, off: bool = False) -> NDArray[np.void]:
        is_off = (self.counts["what"] & records.WHAT_OFF) != 0
        return self.counts[(self.counts["pid"] == pid) & (is_off == off)]

    def samples(self, pid: int) -> int:
        return int(self.of(pid)["count"].sum())


def send_line(process: subprocess.Popen[str], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word, 0) for word in process.stdout.readline().split()]


def switches(process: subprocess.Popen[str], tid: int | None = None) -> int:
    """Context switches of a thread so far, as the kernel counts them."""
    status = Path(f"/proc/{process.pid}/task/{tid or process.pid}/status").read_text()
    return sum(int(n) for n in re.findall(r"ctxt_switches:\s+(\d+)", status))


def end_of_windows(seen: Seen, since: int) -> None:
    """Waits until all that was counted before has been drained."""
    seen.wait(lambda: seen.probes.counted_ns > since, "the end of a window")


def done(process: subprocess.Popen[str]) -> bool:
    """Whether it has reported, and sleeps for good."""
    return bool(select.select([process.stdout], [], [], 0)[0]) and sleeping(process)


def run_first(process: subprocess.Popen[str]) -> None:
    """Lets its first thread run before all others: it sleeps for as long as it asks to, however busy the machine is."""
    with contextlib.suppress(PermissionError):  # a container without CAP_SYS_NICE
        os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(1))


def sleeping(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.fixture
def probes(request: pytest.FixtureRequest) -> Iterator[StackProbes]:
    made = StackProbes(**getattr(request, "param", {}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def usual() -> Iterator[StackProbes]:
    """Probes as they are by default. Shared, since loading takes a while: tests remove their processes."""
    made = StackProbes()
    yield made
    made.close()


# ---- on the CPU


def test_samples_of_several_rates_stand_for_cpu_time(start: Callable[..., subprocess.Popen[str]]) -> None:
    """Each is weighed by the rate of its moment, and each rate is kept."""
    probes = StackProbes(rate_hz=97, off_cpu_ns=None)
    try:
        process = start("work", "burn", 1)
        account = Path(f"/proc/{process.pid}/schedstat")
        seen = Seen(probes)
        spent = [int(account.read_text().split()[0])]
        probes.add_target(process.pid)
        for rate, samples in ((97, 80), (997, 1600), (97, 80)):
            probes.set_rate(rate)
            before = seen.samples(process.pid)
            seen.wait(lambda n=before + samples: seen.samples(process.pid) >= n, f"{samples} samples")
        probes.remove_target(process.pid)
        spent.append(int(account.read_text().split()[0]))
        seen.drain(final=True)
        rows = seen.of(process.pid)
        # Weighed by one rate alone it would be a third, or the threefold.
        assert int(rows["ns"].sum()) == pytest.approx(spent[1] - spent[0], rel=0.4)
        fast = rows["ns"] == rows["count"] * (1_000_000_000 // 997)
        slow = rows["ns"] == rows["count"] * (1_000_000_000 // 97)
        assert (~fast & ~slow).sum() <= 20, "rows of more than one rate"
        taken = {name: int(rows["count"][of_rate].sum()) for name, of_rate in (("fast", fast), ("slow", slow))}
        # Less those of the windows of 134 ms in which the rate changed.
        assert taken["fast"] >= 1200
        assert 100 <= taken["slow"] < 800
    finally:
        probes.close()


@pytest.mark.parametrize("probes", [{"rate_hz": 4999, "off_cpu_ns": 0}], indirect=True)
def test_every_sample_is_counted_once(probes: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    """Sum of all rows = counters of the kernel, with many threads, at a high rate, in many windows."""
    busy = [start("work", "burn", 16), start("work", "threads", 200)]
    seen = Seen(probes)
    for process in busy:
        probes.add_target(process.pid)
    send_line(busy[1])
    seen.wait(lambda: seen.samples(busy[0].pid) > 3000 and sleeping(busy[1]), "3,000 samples")
    for _ in range(20):
        seen.drain()
    seen.drain(final=True)
    time.sleep(0.1)  # what happens now is not counted
    counters = probes.counters()
    off = (seen.counts["what"] & records.WHAT_OFF) != 0
    assert counters[StackCounter.SAMPLES] == seen.counts["count"][~off].sum()
    assert counters[StackCounter.OFF_CPU] == seen.counts["count"][off].sum()
    assert {c.name: counters[c] for c in records.STACK_LOSS_COUNTERS if counters[c]} == {}
    assert counters[StackCounter.STACKS_SENT] == len(seen.sent)
    assert len(set(seen.counts["tid"][seen.counts["pid"] == busy[0].pid].tolist())) == 16
    # Nothing is left of threads that have ended. Whoever waits for one may know it before the kernel is done with it.
    alive = {int(tid) for process in busy for tid in os.listdir(f"/proc/{process.pid}/task")}
    wait_until(lambda: set(probes._thread_rows()["tid"].tolist()) <= alive, what="threads that ended to be forgotten")


def test_what_is_counted_waits_until_its_window_is_over(start: Callable[..., subprocess.Popen[str]]) -> None:
    probes = StackProbes(rate_hz=997, off_cpu_ns=None)
    try:
        seen = Seen(probes)
        process = start("work", "burn", 2)
        seen.drain()
        assert probes.counts_used == 0
        probes.add_target(process.pid)
        wait_until(lambda: probes.counters()[StackCounter.SAMPLES] >= 307, what="307 samples")
        assert 0 < probes.counts_used < 1
        seen.wait(lambda: seen.samples(process.pid) >= 307, "307 samples")
        assert (seen.counts["window"] == seen.counts["last_ns"] >> records.WINDOW_BITS).all()
        process.kill()
        process.wait()
        end_of_windows(seen, time.monotonic_ns())
        assert probes.counts_used == 0
        assert probes.counters()[StackCounter.SAMPLES] == seen.samples(process.pid)
        # Both threads may meet one at the same time.
        assert len(set(seen.sent)) <= len(seen.sent) < 2 * len(set(seen.sent)), "a stack is sent once"
    finally:
        probes.close()


def test_what_finds_no_room_is_counted(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was counted before is whole, as is what comes when there is room again."""
    monkeypatch.setattr(sampler, "LEAST_ROWS", 2)
    monkeypatch.setattr(sampler, "READ_S", 0.0)
    probes = StackProbes(rate_hz=997, off_cpu_ns=None)
    try:
        seen = Seen(probes)
        processes = [start("work", "burn", 4) for _ in range(2)]
        for process in processes:
            probes.add_target(process.pid)
        dropped = lambda: probes.counters()[StackCounter.SAMPLES_DROPPED]  # noqa: E731
        wait_until(lambda: dropped() >= 53, what="53 samples without room")
        assert probes.counts_used == 1
        before = probes.counters()[StackCounter.SAMPLES]
        seen.wait(lambda: probes.counters()[StackCounter.SAMPLES] - dropped() > before, "samples with room again")
        seen.drain(final=True)
        assert dropped() + int(seen.counts["count"].sum()) == probes.counters()[StackCounter.SAMPLES]
        key = ["stack", "pid", "tid", "what", "window", "first_ns"]
        assert len(np.unique(seen.counts[key])) == len(seen.counts)
    finally:
        probes.close()


def test_every_process_and_thread_that_is_made_is_reported(
    usual: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("work", "threads", 7)
    script = "read x; for i in 1 2 3 4 5; do : & done; wait; echo done; read x"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        usual.add_target(shell.pid)
        before = usual.clones()
        send_line(shell)
        assert shell.stdout is not None
        assert shell.stdout.readline() == "done\n"
        assert usual.clones() == before + 5
        usual.remove_target(shell.pid)
        shell.kill()
    usual.add_target(process.pid)
    before = usual.clones()
    send_line(process)
    wait_until(lambda: usual.clones() >= before + 7, what="seven threads")
    usual.remove_target(process.pid)


def test_samples_stand_for_cpu_time(usual: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("work", "burn", 1)
    seen = Seen(usual)
    usual.add_target(process.pid)
    begin, cpu = Path(f"/proc/{process.pid}/schedstat"), []
    cpu.append(int(begin.read_text().split()[0]))
    seen.wait(lambda: seen.samples(process.pid) >= 100, "100 samples")
    ended = time.monotonic_ns()
    cpu.append(int(begin.read_text().split()[0]))
    usual.remove_target(process.pid)
    end_of_windows(seen, ended)
    assert seen.samples(process.pid) * usual.period_ns == pytest.approx(cpu[1] - cpu[0], rel=0.25)
    assert seen.of(process.pid)["ns"].sum() == seen.samples(process.pid) * usual.period_ns
    assert (seen.of(process.pid)["max_ns"] == 0).all()
    # Off the CPU and on it are all there is.
    rows = seen.of(process.pid, off=True)
    assert (rows["ns"] >= rows["max_ns"]).all()
    assert (rows["last_ns"] - rows["first_ns"] >= rows["max_ns"]).all()


def test_the_native_chain_is_the_call_chain(usual: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("work", "hang")
    at = dict(zip(("inner", "middle", "outer"), heard(process), strict=True))
    seen = Seen(usual)
    usual.add_target(process.pid)
    send_line(process)
    poll = lambda rows: np.isin(rows["what"] & records.WHAT_SYSCALL, list(SYSCALLS["poll"]))  # noqa: E731
    wait_until(lambda: bool(poll(usual.off_now()).any()), what="it to hang")
    seen.drain()
    (row,) = usual.off_now()
    # 1 is nobody's that is traced. More than FEW_THREADS, and all are read.
    assert usual.off_now(tids=[1]).size == usual.off_now(tids=[]).size == 0
    for tids in ([1, process.pid], range(1, process.pid + FEW_THREADS)):
        (same,) = usual.off_now(tids=tids)
        assert same == row
    assert row["pid"] == row["tid"] == process.pid
    assert int(row["what"]) & records.WHAT_OFF
    assert int(row["what"]) & records.WHAT_SYSCALL in SYSCALLS["poll"]
    assert 0 < time.monotonic_ns() - int(row["since_ns"]) < 60e9
    stack = seen.stacks[int(row["stack"])]
    assert int(stack.head["flags"]) & records.STACK_KERNEL
    begins = sorted(at.values())
    ends = dict(zip(begins, [*begins[1:], begins[-1] + 64], strict=True))
    callers = [name for a in stack.native.tolist() for name, begin in at.items() if begin < a < ends[begin]]
    # poll() has no frame of its own, so its caller's caller is what the chain shows first.
    assert callers in (["inner", "middle", "outer"], ["middle", "outer"])
    usual.remove_target(process.pid)
    assert len(usual.off_now()) == 0


# ---- off the CPU


@pytest.mark.parametrize("probes", [{"rate_hz": 0, "off_cpu_ns": 0}], indirect=True)
def test_every_block_is_counted_once_under_its_system_call(
    probes: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """With no threshold the counts are the kernel's own."""
    process = start("work", "block")
    wait_until(lambda: sleeping(process))
    probes.add_target(process.pid)
    assert probes.state["sampling"].startswith("off")
    seen = Seen(probes)
    before, began = switches(process), time.monotonic_ns()
    send_line(process)
    seen.wait(lambda: done(process), "the program to be done")
    after = switches(process)
    seen.drain(final=True)
    rows = seen.of(process.pid, off=True)
    rows = rows[rows["tid"] == process.pid]
    # It was blocked, unknown to the probes, at the beginning, and is blocked, not yet counted, now.
    assert int(rows["count"].sum()) == after - before - 1
    _, *voluntary = heard(process)
    blocked = rows[(rows["what"] & records.WHAT_PREEMPTED) == 0]
    times = [
        int(blocked["count"][np.isin(blocked["what"] & records.WHAT_SYSCALL, list(numbers))].sum())
        for numbers in SYSCALLS.values()
    ]
    assert times == voluntary
    # A thread that is preempted on its way to sleep may find its time over.
    assert [abs(n - m) < 10 for n, m in zip(times, (101, 103, 107, 109), strict=True)] == [True] * 4
    assert (rows["runqueue_ns"] <= rows["ns"]).all()
    assert (rows["max_ns"] * rows["count"] >= rows["ns"]).all()
    # The kernel leaves out the end of some; those are counted all the same, and not for longer than they can have been.
    assert probes.counters()[StackCounter.OFF_CPU_GUESSED] < 0.05 * rows["count"].sum()
    assert blocked["ns"].sum() > 400 * 2_900_000
    assert rows["ns"].sum() <= time.monotonic_ns() - began


def test_long_blocks_have_their_stacks(usual: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("work", "block")
    wait_until(lambda: sleeping(process))
    before = usual.counters()
    usual.add_target(process.pid)
    seen = Seen(usual)
    send_line(process)
    seen.wait(lambda: done(process), "the program to be done")
    seen.wait(lambda: seen.of(process.pid, off=True)["count"].sum() > 300)
    rows = seen.of(process.pid, off=True)
    assert (rows["ns"] >= rows["count"] * 1_000_000).all()
    asleep = rows[(rows["tid"] == process.pid) & ((rows["what"] & records.WHAT_PREEMPTED) == 0)]
    for name, numbers in SYSCALLS.items():
        those = asleep[np.isin(asleep["what"] & records.WHAT_SYSCALL, list(numbers))]
        with_stack = those["count"][those["stack"] != 0].sum()
        assert with_stack > 0.9 * those["count"].sum(), name
    assert (asleep["runqueue_ns"] < asleep["ns"]).all()
    after = usual.counters()
    assert after[StackCounter.OFF_CPU_NO_STACK] - before[StackCounter.OFF_CPU_NO_STACK] < 60
    usual.remove_target(process.pid)


@pytest.mark.parametrize(("milliseconds", "short_ones"), [(10, 0), (30, 3)])
def test_the_place_of_the_longest_waits_always_has_its_stack(
    usual: StackProbes, start: Callable[..., subprocess.Popen[str]], milliseconds: int, short_ones: int
) -> None:
    """Whatever else a thread does that uses up what it may waste, and if most waits at that place are short."""
    process = start("work", "places", 40, milliseconds, short_ones)
    wait_until(lambda: sleeping(process))
    run_first(process)
    usual.add_target(process.pid)
    seen = Seen(usual)
    began, before = time.monotonic(), usual.counters()
    send_line(process)
    seen.wait(lambda: done(process), "the program to be done")
    seconds = time.monotonic() - began
    end_of_windows(seen, time.monotonic_ns())
    taken, long = (usual.counters()[c] - before[c] for c in (StackCounter.OFF_STACKS, StackCounter.OFF_CPU))
    rows = seen.of(process.pid, off=True)
    rows = rows[(rows["what"] & records.WHAT_PREEMPTED) == 0]  # it may lose its CPU on its way into a wait
    polled = rows[np.isin(rows["what"] & records.WHAT_SYSCALL, list(SYSCALLS["poll"]))]
    assert 40 <= polled["count"].sum() <= 40 + 40 * short_ones  # a moment is long where the CPU is busy
    assert polled["count"][polled["stack"] == 0].sum() <= 2  # the first, before which nothing was known
    assert taken <= 200 * seconds + 5 + 2 * long + 40 * short_ones
    usual.remove_target(process.pid)


def test_where_in_a_function_makes_no_stack_once_it_is_known(
    usual: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("work", "burn", 1)
    symbols = Symbols(process.pid)
    usual.add_target(process.pid)
    seen = Seen(usual)

    def leaves() -> set[int]:
        found = {int(seen.stacks[n].native[0]) for n in seen.sent if seen.stacks[n].head["pid"] == process.pid}
        return {leaf for leaf in found if symbols.name(np.array([leaf], np.uint64))[0].function == "inner"}

    seen.wait(lambda: len(leaves()) > 2, "samples all over the function")
    bounds = symbols.function(min(leaves()))
    assert bounds is not None
    begin, end = bounds
    usual.remove_target(process.pid)
    end_of_windows(seen, time.monotonic_ns())
    seen.sent.clear()
    usual.add_target(process.pid)  # all of its stacks are new
    usual.set_function(process.pid, begin, end, begin)
    before = seen.samples(process.pid)
    seen.wait(lambda: seen.samples(process.pid) > before + 100)
    assert begin in leaves()
    # Sixteen bytes that belong to two functions are left as they are; one sample may come between the two calls.
    whole = range(-(-begin // 16) * 16, end // 16 * 16)
    assert len([leaf for leaf in leaves() if leaf in whole and leaf != begin]) <= 1

    def chains() -> set[int]:
        found = [seen.stacks[n].native for n in seen.sent if seen.stacks[n].head["pid"] == process.pid]
        return {len(native) for native in found if int(native[0]) == begin}

    # Once nobody believes the chain at a place, it is left out there, and only there.
    assert min(chains()) > 1
    usual.set_leaf_only(process.pid, begin)
    seen.wait(lambda: 1 in chains())
    reported = time.monotonic_ns()

    def later() -> list[int]:
        rows = seen.of(process.pid)
        found = [seen.stacks[int(n)].native for n in rows["stack"][rows["first_ns"] > reported] if int(n)]
        return [len(native) for native in found if int(native[0]) == begin]

    seen.wait(lambda: len(later()) > 10, "more samples there")
    assert set(later()) == {1}
    usual.remove_target(process.pid)
    symbols.close()


def test_short_blocks_cost_few_stacks(usual: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("work", "fast", 20_011)
    wait_until(lambda: sleeping(process))
    usual.add_target(process.pid)
    seen = Seen(usual)
    begin, before = time.monotonic(), usual.counters()
    send_line(process)
    seen.wait(lambda: done(process), "the program to be done")
    seconds = time.monotonic() - begin
    taken, long = (usual.counters()[c] - before[c] for c in (StackCounter.OFF_STACKS, StackCounter.OFF_CPU))
    assert switches(process) > 2_000
    # Two threads, at most 200 wasted a second each, and one for each long block.
    assert 0 < taken <= 2 * (200 * seconds + 5) + long
    usual.remove_target(process.pid)


def test_without_btf_there_are_samples_only(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    probes = StackProbes(rate_hz=499, btf_path=tmp_path / "none")
    try:
        assert probes.state == {"sampling": "on", "off-cpu": "off: the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)"}
        process = start("work", "burn", 2)
        probes.add_target(process.pid)
        seen = Seen(probes)
        seen.wait(lambda: seen.samples(process.pid) > 50)
        assert len(seen.of(process.pid, off=True)) == 0
    finally:
        probes.close()
    with pytest.raises(ArgusError, match="no BTF"):
        StackProbes(rate_hz=0, btf_path=tmp_path / "none")


# ---- coming and going


def test_a_removed_process_is_sampled_no_more(usual: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    process, other = start("work", "burn", 2), start("work", "burn", 1)
    seen = Seen(usual)
    usual.add_target(process.pid)
    usual.add_target(other.pid)
    seen.wait(lambda: seen.samples(process.pid) > 5 and seen.samples(other.pid) > 5)
    usual.remove_target(process.pid)
    time_then = time.monotonic_ns()
    until = seen.samples(other.pid) + 10
    seen.wait(lambda: seen.samples(other.pid) > until)
    assert seen.of(process.pid)["last_ns"].max() < time_then + 1_000_000
    assert process.pid not in usual._thread_rows()["pid"]
    usual.remove_target(other.pid)


OF_NUMBER = """
import ctypes, os, signal, struct, sys
number = (ctypes.c_int32 * 1)(int(sys.argv[1]))
# struct clone_args of include/uapi/linux/sched.h: exit_signal is its fifth word, set_tid its ninth, then its size.
request = struct.pack("11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(number), 1, 0)
child = ctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(request), ctypes.c_size_t(len(request)))
if child == 0:
    os.execv(sys.argv[2], sys.argv[2:])
assert child == number[0], child
os.waitpid(child, 0)
"""
"""Runs a program as the process of a number (clone3 of Linux 5.5)."""


def test_a_process_that_gets_the_number_of_one_that_ended_is_not_taken_for_it(
    usual: StackProbes, start: Callable[..., subprocess.Popen[str]], programs: dict[str, Path]
) -> None:
    process, other = start("work", "burn", 1), start("work", "burn", 1)
    seen = Seen(usual)
    usual.add_target(process.pid)
    usual.add_target(other.pid)
    seen.wait(lambda: seen.samples(process.pid) > 5 and seen.samples(other.pid) > 5)
    process.kill()
    process.wait()
    ended_ns = time.monotonic_ns()
    command = [sys.executable, "-c", OF_NUMBER, str(process.pid), programs["work"], "burn", "1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as parent:
        stat = Path(f"/proc/{process.pid}/schedstat")

        def has_run() -> bool:
            assert parent.poll() is None
            return stat.exists() and int(stat.read_text().split()[0]) > 300_000_000

        seen.wait(has_run, "the second process of that number")
        until = seen.samples(other.pid) + 10
        seen.wait(lambda: seen.samples(other.pid) > until)
        os.kill(process.pid, signal.SIGKILL)
    assert seen.of(process.pid)["last_ns"].max() <= ended_ns
    assert seen.of(process.pid, off=True)["last_ns"].max(initial=0) <= ended_ns
    usual.remove_target(process.pid)
    usual.remove_target(other.pid)


def test_exec_forgets_the_interpreter(usual: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("work", "exec")
    wait_until(lambda: sleeping(process))  # its own start is an exec, too
    usual.add_target(process.pid)
    usual.set_python(process.pid, np.zeros(1, records.PYTHON))
    assert usual.without_python() == set()
    before = usual.counters()[StackCounter.EXECS]
    send_line(process)
    seen = Seen(usual)
    seen.wait(lambda: seen.samples(process.pid) > 10)
    assert usual.without_python() == {process.pid}
    assert usual.counters()[StackCounter.EXECS] == before + 1
    usual.remove_target(process.pid)
    assert usual.without_python() == set()


def test_stacks_whose_place_another_takes_are_counted(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = 8
    monkeypatch.setattr(sampler, "SEEN_ENTRIES", places)
    probes = StackProbes(rate_hz=997, off_cpu_ns=None)
    try:
        process = start("work", "burn", 1)

        def many() -> bool:
            probes.add_target(process.pid)  # its stacks are new ones
            return probes.counters()[StackCounter.STACKS_SENT] > 2 * places

        wait_until(many, what="more stacks than there are places")
        probes.drain(final=True)
        found = probes.counters()
        assert found[StackCounter.STACKS_SENT] - found[StackCounter.STACKS_FORGOTTEN] == places
    finally:
        probes.close()


def test_a_stack_is_sent_again_after_the_ring_was_full(start: Callable[..., subprocess.Popen[str]]) -> None:
    probes = StackProbes(rate_hz=4999, stack_ring_bytes=4096, off_cpu_ns=None)
    try:
        for depth in (100, 101):  # one of them fits
            fake = Fake(probes, start("fake", "ok", depth))
            probes.set_python(fake.process.pid, fake.layout)
            probes.add_target(fake.process.pid)
        wait_until(lambda: probes.counters()[StackCounter.STACKS_DROPPED] > 20, what="the ring to be full")
        seen = Seen(probes)
        for stack in probes.drain().stacks:
            seen.add(stack)
        # The ring is read from now on: what was lost comes with the next samples.
        end_of_windows(seen, time.monotonic_ns())
        for _ in range(20):
            seen.drain()
            time.sleep(0.02)
        assert len(seen.sent) == len(set(seen.sent)), "sent twice"
        heads = [seen.stacks[number].head for number in seen.sent]
        # The program has another thread, which may be met while it begins to wait.
        assert {int(head["python_frames"]) for head in heads if head["pid"] == head["tid"]} == {100, 101}
        assert {int(head["python_frames"]) for head in heads if head["pid"] != head["tid"]} <= {0}
    finally:
        probes.close()


def test_nothing_is_left_after_kill(programs: dict[str, Path]) -> None:
    code = (
        "import sys, time\n"
        "from argus.capture.sampler import StackProbes\n"
        "probes = StackProbes()\n"
        "print('ready', *probes._module.programs.values(), flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        descriptors = process.stdout.readline().split()[1:]
        assert len(descriptors) == 12
        info = [Path(f"/proc/{process.pid}/fdinfo/{fd}").read_text() for fd in descriptors]
        ids = {int(re.search(r"prog_id:\s+(\d+)", text).group(1)) for text in info}  # type: ignore[union-attr]
        assert ids <= sampler.program_ids()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not ids & sampler.program_ids(), what="the programs to go")


# ---- the walk, on a fake interpreter


def layout(printed: list[int], **changes: int) -> NDArray[np.void]:
    """How stacks_fake.c laid it out."""
    runtime, code_type = printed[:2]
    namespace = os.stat("/proc/self/ns/pid")
    python = np.zeros(1, records.PYTHON)
    fields = {
        "runtime": runtime,
        "runtime_end": runtime + 24,
        "code_type": code_type,
        "gil_holder": runtime + 8,
        "gil_locked": runtime + 16,
        "gc_collecting": runtime + 20,
        "ns_dev": namespace.st_dev,
        "ns_ino": namespace.st_ino,
        "interp_head": 0,
        "interp_next": 0,
        "threads_head": 8,
        "thread_next": 0,
        "thread_id": 8,
        "native_thread_id": 16,
        "pthread_tid": records.NO_OFFSET,
        "thread_frame": 24,
        "cframe_frame": records.NO_OFFSET,
        "frame_code": 0,
        "frame_previous": 8,
        "frame_instr": 16,
        "frame_owner": 24,
        "frame_bytes": 25,
        "code_name": 24,
        "code_qualname": 32,
        "code_filename": 40,
        "code_linetable": 48,
        "code_firstlineno": 56,
        "code_adaptive": 64,
        "code_bytes": 60,
        "owner_entry": 3,
        "owner_entry_2": 4,
    }
    for name, value in (fields | changes).items():
        python[name] = value
    return python


def check_of(i: int, qualname: bool = True) -> int:
    def mix(x: int) -> int:
        x = x * 0x9E3779B97F4A7C15 % 2**64
        return x ^ x >> 29

    return mix(mix(mix(0x1000 + i) ^ (0x2000 + i if qualname else 0)) ^ 0x3000 + i) ^ 0x4000 + i


ENTRY_IS_FRAME = {"owner_entry": 1, "owner_entry_2": 1, "entry_is_frame": 1}
INDEX = {"code_adaptive": records.NO_OFFSET, "frame_owner": records.NO_OFFSET, "instr_shift": 1, "frame_bytes": 24}
OLD = {"native_thread_id": records.NO_OFFSET, "code_qualname": records.NO_OFFSET}

WALKS = {
    # shape: (depth, changes of the layout)
    "ok": (7, {}),
    "ok at the limit": (256, {}),
    "downward": (256, {}),
    "recursive": (256, {}),
    "entry_is_frame": (9, ENTRY_IS_FRAME),
    "index": (11, INDEX | OLD),
    "cframe": (6, {"cframe_frame": 8}),
    "tagged": (5, {"code_tag_bits": 1}),
    "not_begun": (5, {}),
    "short_list": (5, {}),
    "second_interpreter": (5, {}),
    "one entry marker": (5, {"owner_entry_2": 3}),
}


@pytest.fixture(scope="module")
def fast() -> Iterator[StackProbes]:
    made = StackProbes(rate_hz=997, off_cpu_ns=None)
    yield made
    made.close()


class Fake:
    """A running stacks_fake, sampled until there is enough to judge."""

    def __init__(self, probes: StackProbes, process: subprocess.Popen[str], **changes: int) -> None:
        self.process, self.probes = process, probes
        self.printed = heard(process)
        if changes.get("native_thread_id") == records.NO_OFFSET:
            changes = changes | {"pthread_tid": self.printed[5]}
        self.layout = layout(self.printed, **changes)
        self.seen = Seen(probes)
        self.before = probes.counters()

    def sample(self, at_least: int = 20, rejected: bool = False, state: int = 0) -> list[RawStack]:
        """The stacks of some samples, each once. Rejected ones count only if they are expected: otherwise a few may
        have come when a page was not there, say while it was moved."""
        pid = self.process.pid
        self.probes.set_python(pid, self.layout)  # first, or a sample in between has no Python stack
        if state:
            self.probes.set_threads(pid, {pid: state})
        self.seen.counts = self.seen.counts[:0]
        self.probes.add_target(pid)
        self.seen.wait(lambda: self.seen.samples(pid) >= at_least)
        self.probes.remove_target(pid)
        end_of_windows(self.seen, time.monotonic_ns())
        rows = self.seen.of(pid)
        rows = rows[rows["tid"] == pid]  # another thread listens, and runs no Python
        found = [self.seen.stacks[number] for number in rows["stack"].tolist()]
        if not rejected:
            bad = [bool(stack.head["flags"] & records.STACK_PYTHON_REJECTED) for stack in found]
            assert rows["count"][bad].sum() <= 0.05 * rows["count"].sum()
            assert self.counted(StackCounter.PYTHON_REJECTED) == 0
            found = [stack for stack, is_bad in zip(found, bad, strict=True) if not is_bad]
        return found

    def counted(self, counter: StackCounter) -> int:
        return self.probes.counters()[counter] - self.before[counter]


@pytest.mark.parametrize("name", WALKS)
def test_a_stack_is_read_exactly(fast: StackProbes, start: Callable[..., subprocess.Popen[str]], name: str) -> None:
    depth, changes = WALKS[name]
    shape = name.split()[0]
    fake = Fake(fast, start("fake", shape, depth), **changes)
    if name == "one entry marker":  # the marker at the bottom is the other one
        assert {int(s.head["flags"]) for s in fake.sample(rejected=True)} <= {4, 20}
        return
    codes, size = fake.printed[2:4]
    expected = np.zeros(depth, records.FRAME)
    for i in range(depth):
        of = i % 2 if shape == "recursive" else i
        expected[i] = (codes + of * size, check_of(of, "code_qualname" not in changes), 0, 2 * i, 100 + of)
    if shape == "index":
        expected["instruction"] = [2 * (i + 1) for i in range(depth)]
        expected["firstlineno"] |= records.FRAME_ENTRY
    else:
        expected["firstlineno"][[2, depth - 1]] |= records.FRAME_ENTRY
    if shape == "not_begun":
        expected["instruction"][0] = 0xFFFFFFFF
    stacks_seen = fake.sample()
    assert stacks_seen
    for stack in stacks_seen:
        assert int(stack.head["flags"]) & ~records.STACK_KERNEL == records.STACK_PYTHON
        assert (stack.head["pid"], stack.head["tid"]) == (fake.process.pid, fake.process.pid)
        assert stack.frames.tolist() == expected.tolist()
        assert len(stack.native) == stack.head["native_frames"] > 0
    assert fake.counted(StackCounter.PYTHON) >= 19


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere the kernel follows every chain")
@pytest.mark.parametrize("register", ["readable", "0x1", "0x7fffffffe000"])
def test_where_no_frame_pointer_is_there_is_no_chain(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]], register: str
) -> None:
    fake = Fake(fast, start("fake", "no_frame_pointer", 3, *([] if register == "readable" else [register])))
    stacks_seen = fake.sample()
    assert {len(stack.native) for stack in stacks_seen} == {1}
    assert all(stack.frames["firstlineno"].tolist()[0] == 100 for stack in stacks_seen)
    assert fake.counted(StackCounter.NATIVE_NONE) == 0


@pytest.mark.parametrize("depth", [257, 300])
def test_a_stack_too_deep_is_cut_at_its_root(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]], depth: int
) -> None:
    fake = Fake(fast, start("fake", "ok", depth))
    for stack in fake.sample():
        assert int(stack.head["flags"]) & ~records.STACK_KERNEL == records.STACK_PYTHON_CUT
        assert stack.frames["code"].tolist() == [fake.printed[2] + i * fake.printed[3] for i in range(256)]
        assert len(stack.native) > 0
    assert fake.counted(StackCounter.PYTHON_CUT) >= 19


REJECTED = {
    "wrong_type": StackCounter.PYTHON_REJECTED,
    "no_bottom": StackCounter.PYTHON_REJECTED,
    "unmapped_frame": StackCounter.PYTHON_FAULT,
    "unmapped_first": StackCounter.PYTHON_FAULT,
    "unmapped_code": StackCounter.PYTHON_FAULT,
    "circle": StackCounter.PYTHON_REJECTED,
    "circle_of_one": StackCounter.PYTHON_REJECTED,
    "circle_of_all": StackCounter.PYTHON_REJECTED,
    "instr_before": StackCounter.PYTHON_REJECTED,
    "instr_after": StackCounter.PYTHON_REJECTED,
}


@pytest.mark.parametrize("shape", REJECTED)
def test_a_stack_in_doubt_is_rejected_whole(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]], shape: str
) -> None:
    fake = Fake(fast, start("fake", shape, 40))
    for stack in fake.sample(rejected=True):
        assert int(stack.head["flags"]) & ~records.STACK_KERNEL == records.STACK_PYTHON_REJECTED
        assert len(stack.frames) == 0
        assert len(stack.native) > 0
    assert fake.counted(REJECTED[shape]) >= 19
    assert fake.counted(StackCounter.PYTHON) == 0


def test_a_thread_without_frames_runs_no_python(fast: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    fake = Fake(fast, start("fake", "idle", 5))
    flags = {int(stack.head["flags"]) & ~records.STACK_KERNEL for stack in fake.sample()}
    assert flags == {records.STACK_IDLE_PYTHON}


def test_a_thread_without_state_is_searched_for_rarely(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    fake = Fake(fast, start("fake", "stranger", 5))
    flags = {int(stack.head["flags"]) & ~records.STACK_KERNEL for stack in fake.sample(50)}
    assert flags == {0}
    assert fake.counted(StackCounter.NO_THREAD_STATE) >= 50
    assert fake.counted(StackCounter.THREAD_WALKS) * 20 < fake.counted(StackCounter.NO_THREAD_STATE) + 40


def test_a_state_at_the_end_of_a_long_list_is_found_by_user_space(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    fake = Fake(fast, start("fake", "long_list", 5))
    assert {len(stack.frames) for stack in fake.sample()} == {0}
    assert fake.counted(StackCounter.THREAD_LIST_CUT) > 0
    another = fake.printed[4] - 64
    flags = {int(stack.head["flags"]) & ~records.STACK_KERNEL for stack in fake.sample(state=another)}
    assert flags == {0}, "believed without looking"
    assert {len(stack.frames) for stack in fake.sample(state=fake.printed[4])} == {5}


def test_another_pid_namespace_is_not_guessed(fast: StackProbes, start: Callable[..., subprocess.Popen[str]]) -> None:
    fake = Fake(fast, start("fake", "ok", 5), ns_ino=1)
    flags = {int(stack.head["flags"]) & ~records.STACK_KERNEL for stack in fake.sample(rejected=True)}
    assert flags == {records.STACK_PYTHON_REJECTED}


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ("gil", {}, records.WHAT_GIL),
        ("gil_released", {}, 0),
        ("gil_of_another", {}, 0),
        ("gil_released", {"gil_locked": 0}, records.WHAT_GIL),
        ("gil", {"gil_holder": 0}, 0),
        ("ok", {}, 0),
    ],
)
def test_who_holds_the_gil(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]], shape: str, changes: dict[str, int], expected: int
) -> None:
    fake = Fake(fast, start("fake", shape, 5), **changes)
    fake.sample()
    rows = fake.seen.of(fake.process.pid)
    what = rows["what"][rows["tid"] == fake.process.pid] & (records.WHAT_GIL | records.WHAT_GC)
    assert set(what.tolist()) == {expected}
    other = rows["what"][rows["tid"] != fake.process.pid] & (records.WHAT_GIL | records.WHAT_GC)
    assert set(other.tolist()) <= {0}, "a thread without Python holds nothing"


def test_a_pause_for_garbage_lasts_from_its_first_to_its_last_sample(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    fake = Fake(fast, start("fake", "gc", 5))
    pid, seen = fake.process.pid, fake.seen
    fast.set_python(pid, fake.layout)
    fast.add_target(pid)

    def samples(gc: bool) -> int:
        rows = seen.of(pid)
        return int(rows["count"][((rows["what"] & records.WHAT_GC) != 0) == gc].sum())

    turned = []
    for collecting in (1, 0, 1, 0):
        before = samples(bool(collecting))
        turned.append(time.monotonic_ns())
        send_line(fake.process, str(collecting))
        seen.wait(lambda b=before, c=collecting: samples(bool(c)) > b + 20)
    wait_until(lambda: (seen.drain(), len(seen.pauses) >= 2)[1], what="two pauses")
    fast.remove_target(pid)
    assert len(seen.pauses) == 2
    for pause, (begin, end) in zip(seen.pauses, (turned[:2], turned[2:]), strict=True):
        assert (pause["pid"], pause["tid"]) == (pid, pid)
        assert begin < pause["begin_ns"] < pause["end_ns"] < pause["after_ns"]
        assert pause["before_ns"] == 0 or pause["before_ns"] < pause["begin_ns"]
        assert pause["after_ns"] > end
        assert int(pause["stack"]) in seen.stacks


def test_a_collecting_thread_without_the_gil_collects_still(
    fast: StackProbes, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """One of gc.callbacks gives the GIL away and takes it again; of a thread that never had it, nothing is known."""
    fake = Fake(fast, start("fake", "gc", 5))
    pid, seen = fake.process.pid, fake.seen
    fast.set_python(pid, fake.layout)
    fast.add_target(pid)

    def samples(what: int) -> int:
        rows = seen.of(pid)
        return int(rows["count"][(rows["what"] & (records.WHAT_GIL | records.WHAT_GC)) == what].sum())

    gil, gc = records.WHAT_GIL, records.WHAT_GC
    turned = []
    # 0: it does not collect, 1: it does, 2: and another thread has the GIL.
    for line, what in (("2", 0), ("0", gil), ("1", gil | gc), ("2", gc), ("1", gil | gc), ("0", gil)):
        before = samples(what)
        turned.append(time.monotonic_ns())
        send_line(fake.process, line)
        seen.wait(lambda b=before, w=what: samples(w) > b + 20)
    wait_until(lambda: (seen.drain(), len(seen.pauses) >= 1)[1], what="a pause")
    fast.remove_target(pid)
    (pause,) = seen.pauses
    assert turned[2] < pause["begin_ns"] < turned[3]
    assert turned[5] < pause["after_ns"]
    assert turned[4] < pause["end_ns"]


def test_cpus_on_line() -> None:
    assert cpus_of("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert cpus_of("0\n") == [0]
