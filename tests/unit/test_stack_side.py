"""From what the kernel counted to rows, with a sampler that gives what the test wants it to."""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus import records, stacks
from argus.capture.launches import Origin
from argus.capture.stacks import Drained, RawStack
from argus.records import StackCounter
from argus.stacks import StackSide

PID = os.getpid()
LIBC = ctypes.CDLL(None)
S = 1_000_000_000


def address(name: str) -> int:
    return ctypes.cast(getattr(LIBC, name), ctypes.c_void_p).value or 0


class Sampler:
    """Stands in for ``StackProbes``: gives out what is put into it, once."""

    period_ns = 10_000_000

    def __init__(self, **options: Any) -> None:
        self.state = {"sampling": "on", "off-cpu": "on"}
        self.counts: list[np.ndarray[Any, Any]] = []
        self.new: list[RawStack] = []
        self.off = np.zeros(0, records.OFF_NOW)
        self.targets: list[int] = []
        self.functions: list[tuple[int, int, int]] = []
        self.reads = 0

    def add_target(self, pid: int) -> None:
        self.targets.append(pid)

    def remove_target(self, pid: int) -> None: ...

    def set_python(self, pid: int, layout: object) -> None: ...

    def set_threads(self, pid: int, states: dict[int, int]) -> None: ...

    def set_function(self, pid: int, begin: int, end: int, near: int) -> None:
        self.functions.append((begin, end, near))

    def counters(self) -> dict[StackCounter, int]:
        return dict.fromkeys(StackCounter, 0)

    def off_now(self) -> np.ndarray[Any, Any]:
        return self.off

    def drain(self, *, final: bool = False) -> Drained:
        counts = np.concatenate([np.zeros(0, records.STACK_COUNT), *self.counts])
        new, self.counts, self.new = self.new, [], []
        self.reads += 1
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
        self.counts.append(row)


class Session:
    """A session with this very process as its rank 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stacks, "StackProbes", Sampler)
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        origin = Origin("j", 7, "host", 0)
        self.side = StackSide(self, lambda job: origin, lambda: 1)  # type: ignore[arg-type]
        self.side.start()
        self.sampler: Any = self.side._probes
        member = SimpleNamespace(rank=3, state="traced")
        self.job: Any = SimpleNamespace(name="j", run=7, members={PID: member})
        self.now = time.monotonic()
        self.side.look([self.job], self.now)

    def append(self, table: str, rows: Any) -> int:
        if hasattr(rows, "to_pylist"):
            # Libraries of this process have threads that wait: they are told, too.
            self.rows[table] += [row for row in rows.to_pylist() if row.get("tid", PID) == PID]
        return 1

    @property
    def told(self) -> list[dict[str, Any]]:
        return self.rows["stack_samples"]

    @property
    def functions(self) -> list[str]:
        """Of each row: the function that its stack is in."""
        names = {row["stack_id"]: row["leaf_function"] for row in self.rows["stacks"]}
        return [names[row["stack_id"]] for row in self.told]

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
    seen = zip(session.functions, session.told, strict=True)
    assert sorted((name, row["count"], row["rank"], row["kind"]) for name, row in seen) == [
        ("getppid", 3, 3, "cpu"),
        ("getppid", 4, 3, "cpu"),
        ("getuid", 2, 3, "cpu"),
    ]
    ids = [row["stack_id"] for row in session.rows["stacks"]]
    assert len(ids) == len(set(ids)), "a stack is sent once"
    assert sum(row["ns"] for row in session.told) == 9 * Sampler.period_ns
    assert not any(value for value, loss in session.side.counters().values() if loss)


def test_places_in_one_function_are_one_row(session: Session) -> None:
    """The kernel tells apart where in a function a thread was; its stack is the same."""
    for number in (21, 22, 23):
        session.sampler.stack(number, "getppid")
    session.sampler.row(21, count=3, first_ns=50_000, last_ns=90_000)
    session.sampler.row(22, count=2, first_ns=40_000, last_ns=60_000)
    session.sampler.row(23, count=1, first_ns=70_000, last_ns=95_000, window=1)
    session.go()
    rows = session.told
    assert sorted(row["count"] for row in rows) == [1, 5]
    whole = next(row for row in rows if row["count"] == 5)
    begin, end = (
        int(np.datetime64(whole[name].replace(tzinfo=None), "ns").astype(np.int64)) for name in ("ts", "last_ts")
    )
    assert (begin, end) == (40_000, 90_000)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_wait_that_was_told_while_it_lasted_is_not_told_twice(session: Session, pieces: int) -> None:
    session.sampler.stack(31, "read")
    since = time.monotonic_ns() - 10 * S
    what = records.WHAT_OFF | 0
    for _ in range(pieces):
        session.sampler.off = np.zeros(1, records.OFF_NOW)
        session.sampler.off["pid"] = session.sampler.off["tid"] = PID
        session.sampler.off["since_ns"], session.sampler.off["stack"] = since, 31
        session.sampler.off["what"] = what
        session.go()
        since_more = 3 * S
        if session.side._told:
            next(iter(session.side._told.values())).told_ns -= since_more  # as if so much time had passed
            for row in session.told[-1:]:
                row["ns"] -= since_more
    session.sampler.off = np.zeros(0, records.OFF_NOW)
    end = time.monotonic_ns()
    session.sampler.row(31, what=what, ns=end - since, max_ns=end - since, first_ns=since, last_ns=end)
    session.go()
    rows = session.told
    assert sum(row["ns"] for row in rows) == end - since
    assert sum(row["count"] for row in rows) == 1
    assert len(rows) == pieces + 1
    assert not session.side._told


def test_samples_without_their_stack_are_counted(session: Session) -> None:
    session.sampler.row(99, count=5)
    session.go()
    assert session.side.counters()["stack_samples_without_stack"] == (5, True)


def test_a_dictionary_that_begins_anew_loses_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.go()
    # Other threads of this process, which wait, have stacks as well.
    monkeypatch.setattr(stacks, "KEPT_STACKS", len(session.side._ids) + 2)
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


def test_what_is_not_of_a_rank_is_counted(session: Session) -> None:
    session.sampler.row(11, pid=PID + 1, count=4)
    session.go()
    assert session.told == []
    assert session.side.counters()["stack_samples_without_rank"] == (4, True)


def test_without_stacks_nothing_is_loaded() -> None:
    side = StackSide(None, lambda job: Origin("j", 1, "h", 0), lambda: 1, on=False)  # type: ignore[arg-type, return-value]
    side.start()
    assert not side.on
    assert side.summary() == ["stacks: off: switched off with --no-stacks"]
    assert side.counters() == {}


def test_the_last_samples_of_a_process_that_ended_become_rows(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in either of two maps: the second read after the end brings them."""
    session.go()
    monkeypatch.setattr(stacks, "start_ticks", lambda pid: None)
    session.side.look([session.job], session.now)
    session.sampler.stack(11, "getppid")
    session.go()
    session.sampler.row(11, count=2)
    session.go()
    assert [row["count"] for row in session.told if row["kind"] == "cpu"] == [2]
    session.sampler.row(11, count=1)
    session.go()
    assert session.side.counters()["stack_samples_without_rank"][0] == 1, "then it is forgotten"


def test_the_kernel_is_told_of_a_function_once(session: Session) -> None:
    session.sampler.stack(11, "getppid")
    session.go()
    session.sampler.stack(12, "getppid")
    session.sampler.stack(13, "getuid")
    session.go()
    assert [begin for begin, _, _ in session.sampler.functions] == [address("getppid"), address("getuid")]
    assert all(begin <= near < end for begin, end, near in session.sampler.functions)
