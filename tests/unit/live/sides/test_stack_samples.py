"""From what the kernel counted to rows, with a sampler that gives what the test wants it to."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture import DEFAULT_OFF_CPU_NS
from argus.capture.python.interpreter import Interpreter
from argus.capture.sampler import Drained, RawStack
from argus.live.job import Job
from argus.live.sampling import children, dictionary, processes, programs, symbolize, waits
from argus.live.sides import stack_samples
from argus.live.sides.stack_samples import StackSide
from argus.model import records
from argus.model.errors import ArgusError
from argus.model.losses import Owner
from argus.model.records import StackCounter
from argus.model.stacks import Stack
from tests.builders.sessions import a_session

PID = os.getpid()
LIBC = ctypes.CDLL(None)
S = 1_000_000_000


def address(name: str) -> int:
    return ctypes.cast(getattr(LIBC, name), ctypes.c_void_p).value or 0


class Sampler:
    """Stands in for ``StackProbes``: gives out what is put into it, once."""

    period_ns = 10_000_000
    used = counts_used = 0.0
    clock: Callable[[], int]
    longest_poll_s = 10.0

    def __init__(self, **options: Any) -> None:
        self.state = {"sampling": "on", "off-cpu": "on"}
        self.owners = SimpleNamespace(take_refused=dict)
        self.counts: list[np.ndarray[Any, Any]] = []
        self.new: list[RawStack] = []
        self.off = np.zeros(0, records.OFF_NOW)
        self.targets: list[int] = []
        self.functions: list[tuple[int, int, int]] = []
        self.drains = self.executed = self.cloned = 0
        self.counted_ns = self.drained_ns = 0
        self.rates: list[int] = []
        self.leaves: list[int] = []
        self.asked: list[list[int] | None] = []

    def add_target(self, pid: int, owner: Owner) -> None:
        self.targets.append(pid)

    def remove_target(self, pid: int) -> None: ...

    def set_python(self, pid: int, layout: object) -> None: ...

    def set_threads(self, pid: int, states: dict[int, int]) -> None: ...

    def set_function(self, pid: int, begin: int, end: int, near: int) -> None:
        self.functions.append((begin, end, near))

    def counters(self) -> dict[StackCounter, int]:
        return dict.fromkeys(StackCounter, 0)

    def set_leaf_only(self, pid: int, place: int) -> None:
        self.leaves.append(place)

    def set_rate(self, rate_hz: int) -> None:
        self.rates.append(rate_hz)
        self.period_ns = S // rate_hz

    def execs(self) -> int:
        return self.executed

    def clones(self) -> int:
        return self.cloned

    def off_now(self, tids: list[int] | None = None) -> np.ndarray[Any, Any]:
        self.asked.append(tids)
        return self.off

    def drain(self, *, final: bool = False) -> Drained:
        counts = np.concatenate([np.zeros(0, records.STACK_COUNT), *self.counts])
        new, self.counts, self.new = self.new, [], []
        self.drains += 1
        self.counted_ns, self.drained_ns = self.drained_ns, self.clock()  # the last window is not over
        return Drained(counts, new, [], np.zeros(0, records.PAUSE))

    def close(self) -> None: ...

    def stack(self, number: int, function: str) -> None:
        head = np.zeros(1, records.STACK)[0]
        head["stack"], head["pid"], head["tid"], head["native_frames"] = number, PID, PID, 1
        self.new.append(RawStack(head, np.zeros(0, records.FRAME), np.array([address(function)], np.uint64)))

    def row(self, number: int, **values: int) -> None:
        row = np.zeros(1, records.STACK_COUNT)
        row["stack"], row["pid"], row["tid"], row["count"] = number, PID, PID, 1
        row["what"] = records.NO_SYSCALL
        for name, value in values.items():
            row[name] = value
        if not row["what"] & records.WHAT_OFF:
            row["ns"] = row["count"] * self.period_ns
        self.counts.append(row)


class Session:
    """A session with this very process as its rank 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate_hz: int | None = None) -> None:
        monkeypatch.setattr(programs, "StackProbes", Sampler)
        # Far from the real one, which nothing here may read.
        self.now = 1_000_000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, monotonic_ns=self.now_ns)
        for module in (stack_samples, processes, waits):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(Sampler, "clock", staticmethod(self.now_ns), raising=False)
        # Tests before this one may have left children of this process.
        monkeypatch.setattr(children, "threads_of", lambda pid, *, all_threads: [])
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.features: list[dict[str, Any]] = []
        member = SimpleNamespace(rank=3, state="traced")
        self.job: Any = Job("j", 7, members={PID: member})  # type: ignore[dict-item]
        self.shared = a_session(self, host="host", jobs=[self.job], stacks=True, rate_hz=rate_hz)
        self.side = StackSide(self.shared)
        self.side.start()
        self.sampler: Any = self.side._programs._probes
        self.side.look(self.now)

    def now_ns(self) -> int:
        return int(self.now * S)

    def append(self, table: str, rows: Any) -> int:
        if hasattr(rows, "to_pylist"):
            # Libraries of this process have threads that wait: they are reported, too.
            self.rows[table] += [row for row in rows.to_pylist() if row.get("tid", PID) == PID]
        elif table == "features":
            self.features.append({**rows, "rank": int(rows["rank"][0]), "feature": rows["feature"][0]})
        return 1

    @property
    def samples(self) -> list[dict[str, Any]]:
        return self.rows["stack_samples"]

    @property
    def functions(self) -> list[str]:
        """Of each row: the function that its stack is in."""
        names = {row["stack_id"]: row["leaf_function"] for row in self.rows["stacks"]}
        return [names[row["stack_id"]] for row in self.samples]

    def go(self, seconds: float = 2.5) -> None:
        """Lets time pass: everything that is due is done."""
        self.now += seconds
        self.side.poll(self.now)
        self.side.work(self.now)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    return Session(monkeypatch)


def test_samples_become_rows_and_stacks_a_dictionary(session: Session) -> None:
    session.sampler.stack(11, "getppid")
    session.sampler.stack(12, "getuid")
    session.sampler.row(11, count=3, first_ns=5, last_ns=9)
    session.sampler.row(12, count=2)
    session.go()
    session.sampler.row(11, count=4)
    session.go()
    seen = zip(session.functions, session.samples, strict=True)
    assert sorted((name, row["count"], row["rank"], row["kind"]) for name, row in seen) == [
        ("getppid", 3, 3, "cpu"),
        ("getppid", 4, 3, "cpu"),
        ("getuid", 2, 3, "cpu"),
    ]
    ids = [row["stack_id"] for row in session.rows["stacks"]]
    assert len(ids) == len(set(ids)), "a stack is sent once"
    assert sum(row["ns"] for row in session.samples) == 9 * Sampler.period_ns
    assert not any(value for value, loss in session.side.counters().values() if loss)


def test_places_in_one_function_are_one_row(session: Session) -> None:
    """The kernel distinguishes where in a function a thread was; its stack is the same."""
    for number in (21, 22, 23):
        session.sampler.stack(number, "getppid")
    session.sampler.row(21, count=3, first_ns=50_000, last_ns=90_000)
    session.sampler.row(22, count=2, first_ns=40_000, last_ns=60_000)
    session.sampler.row(23, count=1, first_ns=70_000, last_ns=95_000, window=1)
    session.go()
    rows = session.samples
    assert sorted(row["count"] for row in rows) == [1, 5]
    whole = next(row for row in rows if row["count"] == 5)
    begin, end = (
        int(np.datetime64(whole[name].replace(tzinfo=None), "ns").astype(np.int64)) for name in ("ts", "last_ts")
    )
    assert (begin, end) == (40_000, 90_000)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_wait_that_was_reported_while_it_lasted_is_not_reported_twice(session: Session, pieces: int) -> None:
    session.sampler.stack(31, "read")
    since = session.now_ns() - 10 * S
    what = records.WHAT_OFF | 0
    for _ in range(pieces):
        session.sampler.off = np.zeros(1, records.OFF_NOW)
        session.sampler.off["pid"] = session.sampler.off["tid"] = PID
        session.sampler.off["since_ns"], session.sampler.off["stack"] = since, 31
        session.sampler.off["what"] = what
        session.go()
        since_more = 3 * S
        if session.side._waits._reported:
            (wait,) = session.side._waits._reported.values()
            wait.reported_ns -= since_more  # as if so much time had passed
            for row in session.samples[-1:]:
                row["ns"] -= since_more
    session.sampler.off = np.zeros(0, records.OFF_NOW)
    end = session.now_ns()
    session.sampler.row(31, what=what, ns=end - since, max_ns=end - since, first_ns=since, last_ns=end)
    session.go()
    rows = session.samples
    assert sum(row["ns"] for row in rows) == end - since
    assert sum(row["count"] for row in rows) == 1
    assert len(rows) == pieces + 1
    assert not session.side._waits._reported


@pytest.mark.parametrize("end", ["it wakes", "it ends", "its process ends", "its process is met ending"])
def test_a_wait_from_before_argus_is_reported_until_it_is_over(
    session: Session, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """No switch reported when it began. It is reported by intervals; it was over when the thread is met first."""
    session.go()
    side, process, tid = session.side, session.side._processes.by_pid[PID], 4_000_000
    what = records.WHAT_OFF | 202
    monkeypatch.setattr(side._waits, "_read_blocked", lambda *_: (11, what))
    side._counts.clear()
    usage = np.zeros(1, records.THREAD_USAGE)
    usage["pid"], usage["tid"], usage["begin_ns"], usage["end_ns"] = PID, tid, 10 * S, 20 * S
    side._keep(side._waits.asleep(process, usage, side._counts))
    first, side._counts = side._counts, []  # they have become rows
    usage["begin_ns"], usage["end_ns"] = 20 * S, 30 * S
    met = np.zeros(2, records.STACK_COUNT)
    met["pid"], met["tid"], met["first_ns"], met["what"] = PID, tid, [27 * S, 25 * S], records.WHAT_OFF | 7
    until_ns = 25 * S
    if end in ("it wakes", "it ends", "its process is met ending"):
        side._counts.append(met)
    if end == "it wakes":
        usage["cpu_ns"], usage["runqueue_ns"], usage["switches_voluntary"] = 4_000_000, 2_000_000, 3
        until_ns -= 4_000_000 + 2_000_000 + 3 * DEFAULT_OFF_CPU_NS
        side._keep(side._waits.asleep(process, usage, side._counts))
    elif end == "it ends":
        usage["tid"] = tid + 1
        side._keep(side._waits.asleep(process, usage, side._counts))
    else:
        process.ended, process.ended_ns = True, 28 * S
        until_ns = until_ns if end == "its process is met ending" else 28 * S
        side._read_threads(process, with_names=True)
    pieces = np.concatenate(first + side._counts)
    pieces = pieces[(pieces["what"] == what) & (pieces["tid"] == tid)]
    assert (pieces["stack"] == 11).all()
    assert [pieces[name].tolist() for name in ("first_ns", "last_ns", "ns", "count")] == [
        [10 * S, 20 * S], [20 * S, until_ns], [10 * S, until_ns - 20 * S], [0, 0],
    ]  # fmt: skip
    side._counts.clear()
    side._read_threads(process, with_names=True)
    assert not any((part["tid"] == tid).any() for part in side._counts), "once"


def test_a_wait_that_begins_before_the_last_one_s_count_has_come(session: Session) -> None:
    session.sampler.stack(31, "read")
    now = session.now_ns()
    first, second = now - 20 * S, now - 4 * S
    what = records.WHAT_OFF | 0

    def off_since(since: int) -> None:
        session.sampler.off = np.zeros(1, records.OFF_NOW)
        session.sampler.off["pid"] = session.sampler.off["tid"] = PID
        session.sampler.off["since_ns"], session.sampler.off["stack"], session.sampler.off["what"] = since, 31, what
        session.go()

    off_since(first)
    off_since(second)
    assert len(session.samples) == 2, "both were reported while they lasted"
    spent = 15 * S
    session.sampler.row(31, what=what, ns=spent, max_ns=spent, first_ns=first, last_ns=first + spent)
    # That it was reported for longer than it was is this test's doing: it sets how long by the clock.
    next(wait for wait in session.side._waits._reported.values() if wait.since_ns == first).reported_ns = 10 * S
    before = sum(row["ns"] for row in session.samples)
    session.go()
    assert sum(row["ns"] for row in session.samples) - before == (5 + 2.5) * S, "the second one went on meanwhile"
    assert sum(row["count"] for row in session.samples) == 2, "two waits"
    assert [wait.since_ns for wait in session.side._waits._reported.values()] == [second]
    session.sampler.off = np.zeros(0, records.OFF_NOW)
    for _ in range(10):
        session.go()
    assert not session.side._waits._reported, "no count will come: the thread has ended"


def test_the_kernel_gets_places_whose_chains_are_never_believed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = iter(range(1000))

    def stacks_at(function: str, count: int) -> None:
        for _ in range(count):
            number = next(chains)
            session.sampler.stack(1000 + number, function)
            raw = session.sampler.new[-1]
            raw.native = np.append(raw.native, np.uint64(8 * number + 8))  # no return address
        session.go()

    stacks_at("getppid", symbolize.DOUBTS - 1)
    assert session.sampler.leaves == []
    stacks_at("getuid", 1)
    stacks_at("getppid", 3)
    assert session.sampler.leaves == [address("getppid")], "once"
    # A place where a chain was believed once keeps its chains.
    with monkeypatch.context() as patched:
        patched.setattr(symbolize, "assemble", lambda *_: Stack((), "none", "complete"))
        stacks_at("getgid", 1)
    stacks_at("getgid", 2 * symbolize.DOUBTS)
    assert session.sampler.leaves == [address("getppid")]


def test_samples_without_their_stack_are_counted(session: Session) -> None:
    session.sampler.row(99, count=5)
    session.go()
    assert session.side.counters()["stack_samples_without_stack"] == (5, True)


def test_a_dictionary_that_begins_anew_loses_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.go()
    # Other threads of this process, which wait, have stacks as well.
    monkeypatch.setattr(dictionary, "KEPT_STACKS", len(session.side._dictionary) + 2)
    monkeypatch.setattr(dictionary, "STACKS_OF_PROCESS", 1)
    for number, function in ((41, "getppid"), (42, "getuid"), (43, "getgid")):
        session.sampler.stack(number, function)
    session.sampler.row(41)
    session.go()
    assert session.sampler.targets == [PID]
    session.sampler.row(42)  # it was counted before the kernel heard of the new numbers
    session.go()
    assert session.sampler.targets == [PID, PID]
    session.sampler.stack(51, "getppid")
    session.sampler.row(51)
    session.go()
    assert session.functions == ["getppid", "getuid", "getppid"]
    assert not any(value for value, loss in session.side.counters().values() if loss)


def test_stacks_are_fetched_often_while_there_are_many(session: Session) -> None:
    def intervals_of_polls(turns: int = 5) -> list[float]:
        intervals = []
        for _ in range(turns):
            session.now = max(session.now, session.side._poll_due)
            session.side.poll(session.now)
            intervals.append(round(session.side._poll_due - session.now - stack_samples.SLACK_S, 6))
        return intervals

    session.go()
    assert intervals_of_polls(8)[-1] == stack_samples.LONGEST_POLL_S
    session.sampler.used = 0.1
    assert intervals_of_polls() == [stack_samples.POLL_S] * 5
    session.sampler.used = 0.03  # as it is
    assert intervals_of_polls() == [stack_samples.POLL_S] * 5
    session.sampler.used = 0.0
    assert intervals_of_polls() == [0.2, 0.4, 0.8, 1.6, 3.2]
    session.sampler.longest_poll_s = 0.3
    assert intervals_of_polls()[-1] == 0.3
    session.sampler.longest_poll_s = 0.01
    assert intervals_of_polls()[-1] == stack_samples.POLL_S


def test_the_rate_is_raised_while_something_is_the_matter(session: Session) -> None:
    side, probes = session.side, session.sampler
    assert side.raise_sampling("", session.now) == ""
    assert side.raise_sampling("jitter: rank 3", session.now) == "stacks: 97 samples a second now: jitter: rank 3"
    assert side.raise_sampling("jitter: rank 3", session.now + 100) == ""
    assert side.raise_sampling("", session.now + 100 + programs.CALM_S - 1) == ""
    assert side.raise_sampling("jitter: rank 3", session.now + 150) == ""
    assert side.raise_sampling("", session.now + 150 + programs.CALM_S - 1) == ""
    change = side.raise_sampling("", session.now + 150 + programs.CALM_S)
    assert change == "stacks: 19 samples a second now: nothing was the matter for 1 min 00 s"
    assert probes.rates == [97, 19]
    reasons = [row["reason"][0] for row in session.features if row["feature"] == "sampling"]
    assert reasons == ["19 a second", "97 a second: jitter: rank 3", "19 a second"]
    assert side.counters()["stack_rate_changes"] == (2, False)


def test_a_rate_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, rate_hz=19)
    assert session.side.raise_sampling("jitter: rank 3", session.now) == ""
    assert session.sampler.rates == []


def test_a_kernel_that_refuses_another_rate_is_reported_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(rate_hz: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(session.sampler, "set_rate", refuses)
    refusal = session.side.raise_sampling("jitter: rank 3", session.now)
    assert refusal == "stacks: the rate stays at 19 a second: Invalid argument"
    assert session.side.raise_sampling("jitter: rank 3", session.now) == ""


def test_the_hottest_lines_are_those_of_most_time_whatever_the_rate(session: Session) -> None:
    session.sampler.stack(11, "getppid")
    session.sampler.stack(12, "getuid")
    session.sampler.row(11, count=3)
    session.sampler.set_rate(1000)
    session.sampler.row(12, count=10)
    session.go()
    assert {row["count"]: row["ns"] for row in session.samples} == {3: 30_000_000, 10: 10_000_000}
    assert [(line.text.split()[0], round(line.share, 2)) for line in session.side.view().lines] == [
        ("getppid", 0.75),
        ("getuid", 0.25),
    ]


def test_children_are_looked_for_when_the_kernel_reports_one(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(children, "threads_of", lambda pid, *, all_threads: looked.append(all_threads) or [])
    at = session.now + processes.REFRESH_ALL_S + 1  # once more: this process has just come
    session.side.look(at)
    looked.clear()
    for seconds in range(1, 12):
        session.side.look(at + seconds)
    assert looked == []
    session.sampler.cloned += 1
    for seconds in range(12, 24):
        session.side.look(at + seconds)
    assert looked == [False, True], "of its main thread at once, of the others when all is looked at"


def test_counts_are_left_to_be_fetched_when_rows_are_due(session: Session) -> None:
    """Turns between cost next to nothing; what is many is fetched at once."""
    while session.side._rows_s < stack_samples.CALM_ROWS_S or session.side._poll_s < stack_samples.LONGEST_POLL_S:
        session.go()
    fetched, became_rows = [], []
    for _ in range(40):
        drains, due = session.sampler.drains, session.side._rows_due
        session.go(1.0)
        fetched += [session.now] * (session.sampler.drains - drains)
        became_rows += [session.now] * (session.side._rows_due != due)
    assert 3 <= len(fetched) <= 5, "once for each time that counts become rows"
    assert fetched == became_rows, "nothing waits until the next time"
    for name, much in (("used", stack_samples.FEW), ("counts_used", stack_samples.FULL)):
        drains = session.sampler.drains
        setattr(session.sampler, name, much)
        session.go(0.1)
        setattr(session.sampler, name, 0.0)
        session.go(0.1)
        assert session.sampler.drains == drains + 1


@pytest.mark.parametrize("reported", [True, False])
def test_an_exec_is_looked_for_when_the_kernel_reports_one_and_now_and_then(
    session: Session, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    session.side.look(session.now)
    session.side.look(session.now + 0.5)
    before = len(session.sampler.targets)
    monkeypatch.setattr(processes, "program_of", lambda pid: b"another")
    session.side.look(session.now + 1.0)
    assert len(session.sampler.targets) == before
    session.sampler.executed += reported
    session.side.look(session.now + (1.5 if reported else processes.REFRESH_ALL_S + 0.5))
    assert len(session.sampler.targets) == before + 1


def rows_after(session: Session, seconds: int) -> list[int]:
    """After how many seconds of so many counts became rows."""
    after_s = []
    for second in range(1, seconds + 1):
        due = session.side._rows_due
        session.go(1.0)
        if session.side._rows_due != due:
            after_s.append(second)
    return after_s


def intervals(session: Session, seconds: int) -> set[int]:
    return set(np.diff(rows_after(session, seconds)).tolist())


def calm(session: Session) -> None:
    """Rows have just come, and are seldom by now."""
    while session.side._rows_s < stack_samples.CALM_ROWS_S:
        session.go(1.0)
    while session.side._rows_due < session.now + stack_samples.CALM_ROWS_S:
        session.go(1.0)


def test_rows_come_more_often_while_something_is_the_matter(session: Session) -> None:
    assert rows_after(session, 9) == [1, 2, 4, 7], "often at first"
    calm(session)
    assert intervals(session, 40) == {round(stack_samples.CALM_ROWS_S)}
    calm(session)
    session.go(1.0)
    session.side.raise_sampling("hang", session.now)
    assert rows_after(session, 12) == [1, 6, 11], "at once"
    session.go(programs.CALM_S)
    calm(session)
    assert intervals(session, 60) == {round(stack_samples.CALM_ROWS_S)}


def test_rows_come_more_often_while_somebody_looks(session: Session) -> None:
    calm(session)
    session.go(1.0)
    session.side.view()
    assert rows_after(session, 40) == [9, 19, 29, 39], "once is not looking"
    calm(session)
    seen = []
    for _ in range(20):
        due = session.side._rows_due
        session.side.view()
        session.go(1.0)
        if session.side._rows_due != due:
            seen.append(session.now)
    assert set(np.diff(seen).tolist()) == {stack_samples.ROWS_S}
    calm(session)
    assert intervals(session, 40) == {round(stack_samples.CALM_ROWS_S)}


def test_times_of_threads_become_rows_with_the_counts(session: Session) -> None:
    for _ in range(20):
        session.sampler.row(0, what=records.WHAT_OFF, ns=S, max_ns=S)
        session.go(1.0)
        session.side.look(session.now)
    rows = [row for row in session.rows["thread_usage"] if row["tid"] == PID]
    assert [row["rank"] for row in rows] == [3] * 6, "1, 2, 4, 7, 11 and 16 s later"
    ends = [row["ts"].value + row["interval_ns"] for row in rows]
    assert ends[:-1] == [row["ts"].value for row in rows[1:]], "no time is reported twice, or missing"


def test_waits_in_the_view_are_seconds_a_second(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    none = np.zeros(0, records.STACK_COUNT)
    monkeypatch.setattr(session.side._waits, "asleep", lambda *_: none)  # of this process's other threads
    session.go(10)
    for _ in range(3):
        session.sampler.row(0, what=records.WHAT_OFF, ns=2 * S, max_ns=S)
        session.go(5)
    seconds_by_reason = session.side.view().waits
    assert sum(seconds for _, seconds in seconds_by_reason) == pytest.approx(0.4, rel=0.1)


def test_what_is_not_of_a_rank_is_counted(session: Session) -> None:
    session.sampler.row(11, pid=PID + 1, count=4)
    session.go()
    assert session.samples == []
    assert session.side.counters()["stack_samples_without_rank"] == (4, True)


def test_without_stacks_nothing_is_loaded() -> None:
    side = StackSide(a_session(stacks=False))
    side.start()
    assert not side.on
    assert side.summary() == ["stacks: off: switched off with --no-stacks"]
    assert side.counters() == {}


def test_the_last_samples_of_a_process_that_ended_become_rows(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come once the window that it ended in is over."""
    session.go()
    pidfd = session.side._processes.by_pid[PID].pidfd
    ends = SimpleNamespace(poll=lambda timeout: [(pidfd, 1)], unregister=lambda fd: None, close=lambda: None)
    monkeypatch.setattr(session.side._processes, "_ends", ends)
    session.side.look(session.now)
    ended_ns = session.side._processes.by_pid[PID].ended_ns
    drain = session.sampler.drain

    def drain_until_it_ended(*, final: bool = False) -> Drained:
        drained: Drained = drain(final=final)
        session.sampler.counted_ns = ended_ns
        return drained

    monkeypatch.setattr(session.sampler, "drain", drain_until_it_ended)
    session.sampler.stack(11, "getppid")
    session.go(10)
    monkeypatch.setattr(session.sampler, "drain", drain)
    session.sampler.row(11, count=2)
    session.go(10)
    assert [row["count"] for row in session.samples if row["kind"] == "cpu"] == [2]
    session.sampler.row(11, count=1)
    session.go(10)
    assert session.side.counters()["stack_samples_without_rank"][0] == 1, "then it is forgotten"


def test_the_kernel_gets_a_function_once(session: Session) -> None:
    session.sampler.stack(11, "getppid")
    session.go()
    session.sampler.stack(12, "getppid")
    session.sampler.stack(13, "getuid")
    session.go()
    assert [begin for begin, _, _ in session.sampler.functions] == [address("getppid"), address("getuid")]
    assert all(begin <= near < end for begin, end, near in session.sampler.functions)


def refusing(state: dict[str, str]) -> type[Sampler]:
    """A sampler of which some parts did not start."""

    class Refused(Sampler):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.state = {**self.state, **state}

    return Refused


def test_a_part_that_did_not_start_is_in_features_summary_and_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "failed: cannot follow sched_switch: the verifier refuses it: R1 pointer |= pointer prohibited"
    monkeypatch.setattr(sys.modules[__name__], "Sampler", refusing({"off-cpu": why, "forks": "failed: no"}))
    session = Session(monkeypatch)
    session.go()
    states = {row["feature"]: (row["state"][0], row["reason"][0]) for row in session.features}
    assert states["off-cpu"] == ("failed", why.removeprefix("failed: "))
    assert states["forks"] == ("failed", "no")
    assert session.side.counters()["off_cpu_not_followed"] == (1, True)
    assert session.side.counters()["forks_not_followed"] == (1, True)
    assert "stacks_not_sampled" not in session.side.counters()
    lines = session.side.summary()
    assert "off the CPU" not in lines[0]
    assert lines[1].startswith(f"off-cpu: {why}; waits for data")
    assert lines[2].startswith("forks: failed: no; ")
    session.side.close()
    assert session.side.summary() == lines


def test_without_types_of_the_kernel_the_coverage_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"off-cpu": "off: the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)", "sampling": "failed: no CPU"}
    monkeypatch.setattr(sys.modules[__name__], "Sampler", refusing(state))
    lost = {name for name, (value, loss) in Session(monkeypatch).side.counters().items() if loss and value}
    assert lost == {"off_cpu_not_followed", "stacks_not_sampled"}


def test_what_was_not_asked_for_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Sampler", refusing({"off-cpu": "off: not asked for"}))
    session = Session(monkeypatch)
    assert not any(value and loss for value, loss in session.side.counters().values())
    assert len(session.side.summary()) == 1


def test_a_sampler_that_does_not_start_at_all_is_reported_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Sampler:
        raise ArgusError("cannot compile the BPF programs for stacks: error: no", "`argus check` says more")

    monkeypatch.setattr(sys.modules[__name__], "Sampler", refuse)
    session = Session(monkeypatch)
    session.side.look(session.now)
    reason = "cannot compile the BPF programs for stacks: error: no (`argus check` says more)"
    features = [(row["rank"], row["feature"], row["state"], row["reason"]) for row in session.features]
    assert features == [(3, "sampling", ["failed"], [reason]), (3, "off-cpu", ["failed"], [reason])]
    assert session.side.counters() == {"stacks_not_sampled": (1, True), "off_cpu_not_followed": (1, True)}
    assert [line.partition(":")[0] for line in session.side.summary()] == ["sampling", "off-cpu"]


def test_a_python_that_is_not_understood_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "CPython 3.99 is not supported (3.8 to 3.15 are)"
    unknown = Interpreter((3, 99, 0), f"off: {why}", None, "/usr/bin/python3.99")
    monkeypatch.setattr(processes, "find_interpreter", lambda pid: unknown)
    side = Session(monkeypatch).side
    assert side.counters()["python_stacks_not_read"] == (1, True)
    assert side.summary()[1:] == [f"Python stacks of a process: off: {why}"]
    begins = Interpreter((3, 99, 0), "off: it has not begun yet", None, "", settled=False)
    for absent in (None, begins):
        monkeypatch.setattr(processes, "find_interpreter", lambda pid, interpreter=absent: interpreter)
        assert Session(monkeypatch).side.counters()["python_stacks_not_read"] == (0, True)


def test_pythons_that_were_not_read_are_counted_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a week any number of processes ends; their reasons are few, or made up."""
    side = Session(monkeypatch).side
    for number in range(10 * processes.KEPT_REASONS):
        pid = 5_000_000 + number
        closed = SimpleNamespace(pidfd=-1, counters=Counter, close=lambda: None, job=None)
        side._processes.by_pid[pid], side._processes._unread[pid] = closed, f"reason {number}"  # type: ignore[assignment]
        side._processes.remove(pid)
    assert side.counters()["python_stacks_not_read"] == (10 * processes.KEPT_REASONS, True)
    assert not side._processes._unread
    assert len(side._processes._unread_before) == processes.KEPT_REASONS + 1
    assert "Python stacks of 576 processes: off: other reasons" in side.summary()


def test_a_program_without_cpython_is_searched_again_when_it_maps_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files that it maps are opened for that: for each of 500 processes."""
    searched: list[float] = []
    mapped = [b"1"]
    monkeypatch.setattr(processes, "find_interpreter", lambda pid: searched.append(session.now))
    monkeypatch.setattr(processes, "mapped_pages", lambda pid: mapped[0])
    session: Any = SimpleNamespace(now=0.0)
    session = Session(monkeypatch)

    def look(seconds: float) -> int:
        before = len(searched)
        for _ in range(int(2 * seconds)):
            session.now += 0.5
            session.side.look(session.now)
        return len(searched) - before

    assert look(30) <= 2, "it has mapped nothing since"
    mapped[0] = b"2"
    assert look(0.5) == 1, "a young process: at once"
    look(60)
    assert look(600) == 10, "each minute"
    mapped[0] = b"3"
    assert look(10.5) == 1
    numbers = itertools.count(4)
    monkeypatch.setattr(processes, "mapped_pages", lambda pid: b"%d" % next(numbers))
    assert look(100) == 10, "one that allocates: every ten seconds"


def test_new_stacks_of_an_owner_do_not_hold_the_loop(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    may = iter([True, True, False, False, True])
    for number, function in enumerate(("getpid", "getppid", "getuid", "geteuid", "getgid"), 11):
        session.sampler.stack(number, function)
        session.sampler.row(number)
    monkeypatch.setattr(session.shared, "may_look_up", lambda pid: next(may, True))
    session.go()
    session.go()
    named = {row["leaf_function"] for row in session.rows["stacks"]}
    assert {"getpid", "getppid", "getgid"} <= named
    assert not {"getuid", "geteuid"} & named
    assert session.shared.losses.of(session.job)["stack_samples_without_stack"] == 2


def test_what_an_owner_has_beyond_its_share_is_a_loss_of_its_own_jobs(session: Session) -> None:
    session.job.owner = (1001, "")
    refused = {
        ((1001, ""), "stack_samples_over_share"): 2,
        ((1001, ""), "stack_rows_over_share"): 3,
        ((1002, ""), "stack_rows_over_share"): 40,
    }
    session.sampler.owners.take_refused = lambda: {key: refused.pop(key) for key in [*refused]}
    session.go(20)
    session.go(20)
    own = session.shared.losses.of(session.job)
    assert (own["stack_samples_over_share"], own["stack_rows_over_share"]) == (2, 3)
    assert session.side.counters()["stack_rows_over_share"] == (43, True)


def test_threads_of_an_owner_do_not_hold_the_loop(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.go(20)
    before = len(session.rows["thread_usage"])
    assert before
    monkeypatch.setattr(session.shared, "may_look_up", lambda pid: False)
    session.go(20)
    session.go(20)
    assert len(session.rows["thread_usage"]) == before
