"""Waits that lasted are taken off counts, and end where their threads are met: at a cost that is linear in both."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.live.job import Job
from argus.live.sampling import dictionary
from argus.live.sampling import waits as waits_module
from argus.live.sampling.dictionary import StackDictionary
from argus.live.sampling.process import SampledProcess
from argus.live.sampling.processes import SampledProcesses
from argus.live.sampling.programs import StackPrograms
from argus.live.sampling.waits import Waits, _Reported
from argus.model import records
from argus.model.losses import Losses, Owner, Whom
from argus.model.stacks import Frame, Stack

PID = 4711
Reported = dict[tuple[int, int, int], _Reported]


def waits_of(reported: Reported | None = None) -> Waits:
    session: Any = SimpleNamespace(may_look_up=lambda pid: True, looking_up=lambda pid: contextlib.nullcontext())
    waits = Waits(
        cast(StackPrograms, SimpleNamespace(off_cpu_ns=1)),
        cast(SampledProcesses, None),
        cast(StackDictionary, None),
        session,
    )
    waits._reported = reported if reported is not None else {}
    return waits


def one_by_one(counts: NDArray[np.void], reported: Reported) -> NDArray[np.void]:
    """What ``Waits.without_reported`` does, in the plain way: all rows for each wait."""
    counts = counts.copy()
    for key, wait in list(reported.items()):
        same = (counts["pid"] == key[0]) & (counts["tid"] == key[1]) & (counts["stack"] == wait.kernel_stack)
        same &= (counts["what"] & records.WHAT_OFF) != 0
        same &= (counts["max_ns"] >= wait.reported_ns) & (counts["first_ns"] <= wait.since_ns)
        for place in np.flatnonzero(same & (counts["last_ns"] >= wait.since_ns + wait.reported_ns))[:1]:
            row = counts[place]
            row["ns"] -= min(wait.reported_ns, int(row["ns"]))
            row["count"] -= min(1, int(row["count"]))
            row["max_ns"] = max(int(row["max_ns"]) - wait.reported_ns, 0) if row["count"] == 0 else row["max_ns"]
            row["first_ns"] = max(int(row["first_ns"]), wait.since_ns + wait.reported_ns)
            del reported[key]
    return counts


def some_counts(random: np.random.Generator, rows: int) -> NDArray[np.void]:
    """Of few processes, threads and stacks, so that several waits are of one row, and several rows fit one wait."""
    counts = np.zeros(rows, records.STACK_COUNT)
    for name, most in (("pid", 3), ("tid", 3), ("stack", 3), ("count", 4), ("ns", 30), ("max_ns", 12), ("last_ns", 40)):
        counts[name] = random.integers(0, most, rows)
    counts["first_ns"] = random.integers(0, 12, rows)
    counts["what"] = np.where(random.random(rows) < 0.7, records.WHAT_OFF, 0) | random.integers(0, 2, rows)
    return counts


@pytest.mark.parametrize("seed", range(40))
def test_waits_are_taken_off_the_same_rows_as_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    reported: Reported = {}
    for pid, tid, since, lasted, stack in random.integers(
        0, [3, 3, 12, 10, 3], (int(random.integers(0, 40)), 5)
    ).tolist():
        reported[pid, tid, since] = _Reported(since, lasted, 99, records.WHAT_OFF, stack)
    counts = some_counts(random, int(random.integers(0, 60)))
    before, left = counts.copy(), copy.deepcopy(reported)
    expected = one_by_one(counts, left)
    waits = waits_of(reported)
    assert waits.without_reported(counts).tobytes() == expected.tobytes()
    assert waits._reported == left
    assert counts.tobytes() == before.tobytes(), "what was drained is not changed"


class Counted(np.ndarray[Any, np.dtype[np.void]]):
    """Rows that count how often a field of all, or a row, is asked for."""

    asked = 0

    def __getitem__(self, which: Any) -> Any:
        Counted.asked += 1
        found = super().__getitem__(which)
        return found.view(np.ndarray) if isinstance(found, np.ndarray) else found


def test_rows_are_compared_with_all_waits_at_once() -> None:
    """With 16,384 threads that waited, comparing all rows with each took a third of a second a drain."""
    reported = {(1, tid, 1000): _Reported(1000, 500, 1, records.WHAT_OFF, 1) for tid in range(1000)}
    counts = np.zeros(1000, records.STACK_COUNT)
    counts["pid"], counts["tid"], counts["what"], counts["stack"] = 9, np.arange(1000), records.WHAT_OFF, 1
    counts["pid"][:3] = 1
    counts["max_ns"], counts["ns"], counts["count"], counts["first_ns"], counts["last_ns"] = 700, 700, 1, 1000, 1700
    waits = waits_of(reported)
    Counted.asked = 0
    left = waits.without_reported(counts.view(Counted))
    assert Counted.asked < 20
    assert left["ns"].tolist() == [200] * 3 + [700] * 997
    assert len(waits._reported) == 997


def first_met_ns(tid: int, pending: list[NDArray[np.void]]) -> int:
    """When a thread was met first, in the plain way; 0: it was not."""
    met = [part["first_ns"][(part["pid"] == PID) & (part["tid"] == tid)] for part in pending]
    return min((int(times.min()) for times in met if len(times)), default=0)


def a_process(asleep: list[int], ended_ns: int = 0) -> SampledProcess:
    process = SimpleNamespace(
        pid=PID, asleep={tid: (tid + 100, 7) for tid in asleep}, asleep_until_ns=3, awake=set(), ended_ns=ended_ns,
        python=None, unread={}, quarantined=False, python_since_ns=0,
        job=SimpleNamespace(owner=(1000, "")),
    )  # fmt: skip
    return cast(SampledProcess, process)


class Parts(list[NDArray[np.void]]):
    """What was drained, and how often it was gone through."""

    gone_through = 0

    def __iter__(self) -> Iterator[NDArray[np.void]]:
        self.gone_through += 1
        return super().__iter__()


def some_parts(random: np.random.Generator) -> Parts:
    parts = Parts()
    for rows in random.integers(0, 15, int(random.integers(0, 6))).tolist():
        part = np.zeros(rows, records.STACK_COUNT)
        part["pid"], part["tid"] = random.choice([PID, PID + 1], rows), random.integers(0, 30, rows)
        part["first_ns"] = random.integers(0, 50, rows)
        parts.append(part)
    return parts


@pytest.mark.parametrize("seed", range(40))
def test_waits_end_where_threads_are_met_first(seed: int) -> None:
    """As one by one: threads that woke, that ended, and those of a process that ended."""
    random = np.random.default_rng(seed)
    parts = some_parts(random)
    asleep = random.permutation(30)[: random.integers(0, 25)].tolist()
    usage = np.zeros(20, records.THREAD_USAGE)
    usage["pid"], usage["tid"], usage["end_ns"] = PID, random.permutation(30)[:20], 60
    usage["cpu_ns"], usage["switches_voluntary"] = 2, 1
    listed = set(usage["tid"].tolist())
    expected = {
        tid: (3, until - 3) for tid in asleep if (until := first_met_ns(tid, parts) - (3 if tid in listed else 0)) > 3
    }
    rows = waits_of().asleep(a_process(asleep), usage, parts)
    assert {int(row["tid"]): (int(row["first_ns"]), int(row["ns"])) for row in rows} == expected
    assert (rows["stack"] == rows["tid"] + 100).all()
    rows = waits_of().asleep_until_the_end(a_process(asleep, ended_ns=55), parts)
    expected = {tid: (3, until - 3) for tid in asleep if (until := first_met_ns(tid, parts) or 55) > 3}
    assert {int(row["tid"]): (int(row["first_ns"]), int(row["ns"])) for row in rows} == expected


def test_what_was_drained_is_gone_through_once_for_all_threads() -> None:
    """With 4,096 threads that wake together, each going through 50 drains of 1,000 rows held the loop for a second."""
    part = np.zeros(100, records.STACK_COUNT)
    part["pid"], part["tid"], part["first_ns"] = PID, np.arange(100), 40
    usage = np.zeros(50, records.THREAD_USAGE)
    usage["pid"], usage["tid"], usage["end_ns"], usage["cpu_ns"] = PID, np.arange(50), 60, 1
    parts = Parts([part])
    assert len(waits_of().asleep(a_process(list(range(100))), usage, parts)) == 100
    assert parts.gone_through == 1
    assert len(waits_of().asleep_until_the_end(a_process(list(range(100))), parts)) == 100
    assert parts.gone_through == 2


class Blocked:
    """Threads of processes that wait, of which the kernel took no stack; to read one takes a second.

    Attributes:
        read: Threads that were read, in order.
        may: So many may be read yet for each process.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owners: dict[int, Owner], threads: int) -> None:
        self.read: list[tuple[int, int]] = []
        self.may = dict.fromkeys(owners, 1_000_000)
        self.spending = 0
        self.now_s = 1000.0
        self.off = np.zeros(len(owners) * threads, records.OFF_NOW)
        self.off["pid"] = np.repeat(list(owners), threads)
        self.off["tid"] = np.arange(len(self.off))
        self.off["since_ns"] = 1
        clock = SimpleNamespace(monotonic=lambda: self.now_s, monotonic_ns=lambda: int(self.now_s * 1e9))
        monkeypatch.setattr(waits_module, "time", clock)
        self.losses = Losses()
        session: Any = SimpleNamespace(
            may_look_up=self.may_look_up,
            has_time=lambda pid: self.may[pid] > 0,
            looking_up=self.looking_up,
            losses=self.losses,
        )
        self.by_pid = {pid: a_process(()) for pid in owners}
        for pid, process in self.by_pid.items():
            process.pid, process.job = pid, Job(f"job {pid}", 1, owner=owners[pid])
        processes: Any = SimpleNamespace(
            by_pid=self.by_pid, threads=lambda: None, guard=lambda pid, job: contextlib.nullcontext()
        )
        probes = SimpleNamespace(off_now=lambda tids: self.off, counted_ns=0)
        programs: Any = SimpleNamespace(off_cpu_ns=1, probes=probes)
        self.dictionary = StackDictionary()
        self.waits = Waits(programs, processes, self.dictionary, session)
        monkeypatch.setattr(self.waits, "_read_blocked", self._read)

    def may_look_up(self, pid: int) -> bool:
        if not self.may[pid]:
            self.losses.count("look_ups_over_share", Whom(self.by_pid[pid].job))
        return self.may[pid] > 0

    @contextlib.contextmanager
    def looking_up(self, pid: int) -> Iterator[None]:
        self.spending += 1
        yield
        self.spending -= 1

    def _read(self, process: SampledProcess, tid: int, states: object = None) -> tuple[int, int]:
        assert self.spending == 1, "it is of its owner's time, once"
        self.may[process.pid] -= 1
        self.now_s += 1.0
        self.read.append((process.pid, tid))
        return 7, records.WHAT_OFF

    def lost(self, pid: int) -> int:
        return self.losses.of(self.by_pid[pid].job).get("look_ups_over_share", 0)

    def ongoing(self, *, final: bool = False) -> list[tuple[int, int, int]]:
        """Process, stack and count of each row."""
        rows = self.waits.ongoing(final=final)
        return [(int(row["pid"]), int(row["stack"]), int(row["count"])) for row in rows]


def test_threads_whose_owner_has_no_time_left_are_read_once_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are reported from when they began. They were without stacks for as long as they waited."""
    monkeypatch.setattr(waits_module, "ONGOING_S", 100.0)
    blocked = Blocked(monkeypatch, {1: (1001, ""), 2: (1002, "")}, 3)
    blocked.may[1] = 0
    assert blocked.ongoing() == [(2, 7, 1)] * 3
    assert blocked.waits.behind
    blocked.now_s += 10
    blocked.may[1] = 100
    rows = blocked.waits.ongoing(final=False)
    assert rows[rows["pid"] == 1]["stack"].tolist() == [7] * 3
    assert rows[rows["pid"] == 1]["first_ns"].tolist() == [1] * 3
    assert not blocked.waits.behind
    assert not blocked.losses.totals.total()


def test_threads_that_are_never_read_are_reported_without_a_stack_then_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 2)
    monkeypatch.setattr(waits_module, "ONGOING_S", 100.0)
    blocked.may[1] = 0
    rows = []
    for _ in range(5):
        rows.append(blocked.ongoing())
        blocked.now_s += 10
    assert rows == [[], [], [], [(1, 0, 1)] * 2, [(1, 0, 0)] * 2]
    assert blocked.lost(1) == 2, "each wait once"
    blocked.may[1] = 100
    for _ in range(3):
        assert blocked.ongoing() == [(1, 7, 0)] * 2
        blocked.now_s += 10
    assert len(blocked.read) == 2, "read once"


def test_nor_are_they_forgotten_for_lack_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 1)
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1000)
    blocked.dictionary.add(1, Stack((Frame("python", "n" * 5000, "f.py", 1),), "complete", "none"), (1001, ""))
    assert blocked.ongoing() == []
    blocked.dictionary.begin_anew((1001, ""))
    blocked.now_s += 10
    assert blocked.ongoing() == [(1, 7, 1)]


def test_a_thread_that_could_not_be_read_when_it_was_tried_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 1)
    tried: list[int] = []
    monkeypatch.setattr(blocked.waits, "_read_blocked", lambda process, tid: tried.append(tid))
    assert blocked.ongoing() == [(1, 0, 1)]
    blocked.now_s += 10
    assert blocked.ongoing() == [(1, 0, 0)]
    assert len(tried) == 1
    assert not blocked.losses.totals.total()


def test_stacks_that_the_kernel_took_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 2)
    blocked.off["stack"] = 5
    assert blocked.ongoing() == [(1, 5, 1)] * 2
    blocked.by_pid[1].python_since_ns = 100
    blocked.now_s += 10
    assert blocked.ongoing() == [(1, 5, 0)] * 2
    assert not blocked.read, "what was reported keeps its stack"


def test_waits_of_many_threads_are_read_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lose nothing: they are reported later, from when they began. A call takes half a second of all owners."""
    blocked = Blocked(monkeypatch, {1: (1001, ""), 2: (1001, ""), 3: (1002, "")}, 4)
    reported: list[int] = []
    for turn in range(1, 13):
        rows = blocked.waits.ongoing(final=False)
        fresh = rows[rows["count"] == 1]
        assert (fresh["stack"] == 7).all()
        assert (fresh["first_ns"] == 1).all()
        reported += fresh["tid"].tolist()
        assert len(blocked.read) == turn, "one takes a second"
        assert blocked.waits.behind == (turn < 12)
        blocked.now_s += 1
    assert sorted(reported) == list(range(12))
    assert not blocked.losses.totals.total()
    pids = [pid for pid, _ in blocked.read]
    assert pids[:8] in ([1, 3, 2, 3] * 2, [3, 1, 3, 2] * 2), "users take turns, and processes of one"


def test_a_user_s_containers_do_not_hold_the_loop_nor_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each container's own two seconds, eight of them held the loop for sixteen."""
    blocked = Blocked(monkeypatch, {pid: (65534, f"ns{pid}") for pid in range(1, 65)} | {100: (1000, "")}, 3)
    for _ in range(6):
        begun_s = blocked.now_s
        blocked.ongoing()
        assert blocked.now_s <= begun_s + 1.0, "one thread's"
    assert [pid for pid, _ in blocked.read].count(100) == 3
    assert len({pid for pid, _ in blocked.read}) == 4, "each time another container"


@pytest.mark.parametrize("seed", range(20))
def test_with_time_for_all_of_them_threads_are_reported_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = np.random.default_rng(seed)
    monkeypatch.setattr(waits_module, "ONGOING_S", 1e6)
    blocked = Blocked(monkeypatch, {pid: (int(random.integers(3)), "") for pid in range(1, 6)}, 6)
    expected: dict[tuple[int, int, int], list[int]] = {}
    for _ in range(6):
        for place in np.flatnonzero(random.random(len(blocked.off)) < 0.3).tolist():
            blocked.off["since_ns"][place] = int((blocked.now_s - 3 * random.random()) * 1e9)
            blocked.off["stack"][place] = random.integers(0, 2) * 5
        now_ns, rows = int(blocked.now_s * 1e9), []
        for one in blocked.off:
            key = int(one["pid"]), int(one["tid"]), int(one["since_ns"])
            reported_ns, stack = expected.get(key, (0, int(one["stack"]) or 7))
            fresh = now_ns - key[2] - reported_ns
            if fresh >= waits_module.WAITING_S * 1e9:
                rows.append((*key[:2], stack, int(not reported_ns), fresh, key[2] + reported_ns, now_ns))
                expected[key] = [reported_ns + fresh, stack]
        names = ("pid", "tid", "stack", "count", "ns", "first_ns", "last_ns")
        got = blocked.waits.ongoing(final=False)
        assert [tuple(int(row[name]) for name in names) for row in got] == rows
        blocked.now_s += 1


def test_what_is_not_read_at_the_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 5)
    rows = blocked.waits.ongoing(final=True)
    assert rows["stack"].tolist() == [7, 7, 0, 0, 0]
    assert blocked.lost(1) == 3


def asleep_now(
    blocked: Blocked, pid: int, threads: int, begin_ns: int = 10, *, final: bool = False
) -> NDArray[np.void]:
    usage = np.zeros(threads, records.THREAD_USAGE)
    usage["pid"], usage["tid"] = pid, np.arange(threads)
    usage["begin_ns"], usage["end_ns"] = begin_ns, begin_ns + 10
    (process,) = blocked.waits.begin_turn([blocked.by_pid[pid]], final=final)
    blocked.waits.next_is(process)
    return blocked.waits.asleep(process, usage, [])


def test_before_each_thread_its_owner_s_time_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "HELD_S", 100.0)
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 1)
    blocked.may[1] = 2
    assert asleep_now(blocked, 1, 40)["tid"].tolist() == [1, 0], "the main thread comes first"
    assert len(blocked.read) == 2
    blocked.may[1] = 100
    rows = asleep_now(blocked, 1, 4, 20)
    assert rows["first_ns"].tolist() == [20, 20, 10, 10], "from when they began"
    assert rows["ns"].tolist() == [10, 10, 20, 20]
    assert blocked.read == [(1, 1), (1, 0), (1, 2), (1, 3)]
    assert blocked.lost(1) == 36, "those that have ended unread"


def test_threads_of_a_process_do_not_hold_the_loop_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything lost if they go on: a job that is alone had its waits counted as lost."""
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 1)
    for turn in range(1, 21):
        rows = asleep_now(blocked, 1, 40, 10 * turn)
        assert len(blocked.read) == 2 * turn
        assert len(rows) == 2 * turn
        assert rows["first_ns"].tolist()[-2:] == [10, 10]
    assert not blocked.lost(1)


def test_what_slept_and_was_never_read_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, ""), 2: (1002, ""), 3: (1003, "")}, 1)
    monkeypatch.setattr(waits_module, "HELD_S", 0.0)
    usage = np.zeros(3, records.THREAD_USAGE)
    usage["tid"], usage["begin_ns"], usage["end_ns"] = np.arange(3), 10, 20
    for pid in (1, 2):
        asleep_now(blocked, pid, 3)
    usage["cpu_ns"][1] = 1
    blocked.waits.asleep(blocked.by_pid[1], usage[:2], [])
    assert blocked.lost(1) == 2, "one has woken, one has ended"
    blocked.waits.asleep_until_the_end(blocked.by_pid[2], [])
    assert blocked.lost(2) == 3
    asleep_now(blocked, 3, 3, final=True)
    assert blocked.lost(3) == 3


def test_nor_do_those_of_all_processes_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process had two seconds of its own. Users take turns, and their processes."""
    owners = {pid: (65534, f"ns{pid}") for pid in range(1, 9)} | {100 + pid: (1000, "") for pid in range(4)}
    blocked = Blocked(monkeypatch, owners, 1)
    usage = np.zeros(5, records.THREAD_USAGE)
    usage["tid"], usage["begin_ns"], usage["end_ns"] = np.arange(5), 10, 20
    for _ in range(4):
        begun_s = blocked.now_s
        for process in blocked.waits.begin_turn():
            blocked.waits.next_is(process)
            blocked.waits.asleep(process, usage, [])
        assert blocked.now_s - begun_s == 2
    pids = [pid for pid, _ in blocked.read]
    assert sorted(pids) == [1, 2, 3, 4, 100, 101, 102, 103]


def test_main_threads_of_a_job_are_read_before_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last ranks came behind hundreds of threads of the first: of a hang, the one stack that tells."""
    monkeypatch.setattr(waits_module, "HELD_S", 16.0)
    blocked = Blocked(monkeypatch, {100 * pid: (1001, "") for pid in range(1, 9)}, 1)
    read_in_turns = []
    for _ in range(3):
        before = len(blocked.read)
        for process in blocked.waits.begin_turn():
            usage = np.zeros(50, records.THREAD_USAGE)
            usage["tid"] = process.pid + np.roll(np.arange(50), 25)
            usage["begin_ns"], usage["end_ns"] = 10, 20
            blocked.waits.next_is(process)
            blocked.waits.asleep(process, usage, [])
        read_in_turns.append(blocked.read[before:])
    assert {tid for pid, tid in read_in_turns[0] if tid == pid} == {100 * pid for pid in range(1, 9)}
    assert all(len(turn) == 16 for turn in read_in_turns), "a thread takes a second"


@pytest.mark.parametrize("all_of_them", [False, True])
def test_processes_of_which_nothing_is_read_leave_their_time(
    monkeypatch: pytest.MonkeyPatch, all_of_them: bool
) -> None:
    """A rank that came late among 64 had a 64th of the time, and so had one beside 63 that had ended."""
    monkeypatch.setattr(waits_module, "HELD_S", 64.0)
    blocked = Blocked(monkeypatch, {100 * pid: (1001, "") for pid in range(1, 65)}, 1)
    rank = blocked.by_pid[6400]
    found = blocked.waits.begin_turn() if all_of_them else blocked.waits.begin_turn([rank])
    for process in found:
        blocked.waits.next_is(process)
    usage = np.zeros(100, records.THREAD_USAGE)
    usage["tid"], usage["begin_ns"], usage["end_ns"] = rank.pid + np.arange(100), 10, 20
    blocked.waits.asleep(rank, usage, [])
    assert len(blocked.read) == 64, "a thread takes a second"


def test_a_thread_that_cannot_be_read_stays_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it slept while it was not read was lost, and in no counter."""
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 1)
    blocked.may[1] = 0
    asleep_now(blocked, 1, 3)
    assert blocked.by_pid[1].unread.keys() == {0, 1, 2}
    blocked.may[1] = 100
    monkeypatch.setattr(blocked.waits, "_read_blocked", lambda *_: None)
    assert not len(asleep_now(blocked, 1, 3, 20))
    blocked.waits.asleep_until_the_end(blocked.by_pid[1], [])
    assert blocked.lost(1) == 3


def test_nothing_is_read_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, "")}, 1)
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1000)
    stack = Stack((Frame("python", "n" * 5000, "f.py", 1),), "complete", "none")
    blocked.dictionary.add(1, stack, (1001, ""))
    assert not len(asleep_now(blocked, 1, 4))
    assert not blocked.read
    blocked.waits.asleep_until_the_end(blocked.by_pid[1], [])
    assert blocked.lost(1) == 4


def test_stacks_of_waits_that_go_on_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, {1: (1001, ""), 2: (1002, "")}, 2)
    blocked.off["stack"] = [11, 12, 13, 14]
    blocked.waits.ongoing(final=False)
    assert blocked.waits.asked_for() == {(1001, ""): [11, 12], (1002, ""): [13, 14]}
    blocked.off, blocked.now_s = blocked.off[1:], blocked.now_s + 10
    blocked.waits.ongoing(final=False)
    assert blocked.waits.asked_for() == {(1001, ""): [12], (1002, ""): [13, 14]}
