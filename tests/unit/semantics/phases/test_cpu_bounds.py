"""Marks that no usual program makes take no longer than others, and change nothing in the phases of usual ones."""

from __future__ import annotations

import random
import sys
import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from argus.semantics.phases import cpu
from argus.semantics.phases.cpu import MARK, What, _Label, _Span, _WorkMarks, _Works
from tests.unit.semantics.phases.test_cpu import GLOO, Array

MANY = 20_000


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes."""
    lines = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def bytes_of(call: Callable[[], object]) -> int:
    """Memory that a call takes, those bytes included that it gives back."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


# ---- works


def works_marks(*marks: tuple[int, int, int, What]) -> Array:
    """Time, handle, thread, and what happens."""
    return np.array([(ts, handle, tid, what, 0, 0) for ts, handle, tid, what in marks], MARK)


def covered(spans: list[_Span], begin: int, until: int) -> list[int]:
    """The moments of a step in which a work runs."""
    at = np.zeros(until - begin, bool)
    for label, since, end in spans:
        assert label is _Label.WORK
        at[max(since - begin, 0) : max(end - begin, 0)] = True
    return np.flatnonzero(at).tolist()


class PlainWorks:
    """What :class:`_Works` finds, looked for in all marks."""

    def __init__(self) -> None:
        self.unfinished = 0
        self.open: dict[int, tuple[int, int]] = {}
        self.last: dict[int, tuple[int, bool]] = {}
        self.events: dict[int, list[tuple[int, bool]]] = {}

    def advance(self, marks: Array, begin: int, until: int) -> list[_Span]:
        spans, busy = [], set()
        self.events = {}
        for ts, handle, tid, what, *_ in marks.tolist():
            last = self.last.pop(handle, None)
            self.events.setdefault(handle, [last] if last else []).append((ts, what == What.WORK_END))
            self.last[handle] = ts, what == What.WORK_END
            if opened := self.open.pop(handle, None):
                spans.append((_Label.WORK, opened[1], ts))
            if what == What.WORK_BEGIN:
                self.open[handle] = tid, ts
                busy.add(tid)
        for handle, (tid, since) in list(self.open.items()):
            spans.append((_Label.WORK, since, until))
            if since <= begin and tid in busy:
                del self.open[handle]
                self.unfinished += 1
        while len(self.last) > cpu.WORKS:
            handle = next(iter(self.last))
            del self.last[handle]
            self.open.pop(handle, None)
        return spans

    def wait_end(self, since: int, handle: int, limit: int) -> tuple[int, bool]:
        events = self.events.get(handle) or ([self.last[handle]] if handle in self.last else [])
        at = bisect_right([ts for ts, _ in events], since)
        done = at > 0 and events[at - 1][1]
        for ts, end in events[at:]:
            if ts > limit:
                break
            if end and not done:
                return ts, True
            done &= end
        return (since, True) if done else (limit, bool(events))


@pytest.mark.parametrize("seed", range(60))
def test_works_and_waits_are_what_a_search_of_all_marks_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(cpu, "WORKS", rng.choice([3, 100]))
    monkeypatch.setattr(cpu, "THREADS", 0)  # what is forgotten with more threads
    counters: Counter[str] = Counter()
    works, plain = _Works(counters), PlainWorks()
    begin = 1000
    for _ in range(20):
        until = begin + rng.randrange(1, 40)
        times = sorted(rng.randrange(begin - 30 * (rng.random() < 0.1), until) for _ in range(rng.randrange(30)))
        kinds = What.WORK_BEGIN, What.WORK_END
        marks = works_marks(
            *((ts, rng.randrange(1, 8), rng.randrange(GLOO, GLOO + 4), rng.choice(kinds)) for ts in times)
        )
        expected = covered(plain.advance(marks, begin, until), begin, until)
        assert covered(works.advance(marks, begin, until), begin, until) == expected
        assert counters["works_unfinished"] == plain.unfinished
        for _ in range(30 * works.seen):
            since = rng.randrange(begin - 2, until)
            asked = since, rng.randrange(1, 9), rng.randrange(since, until + 2)
            assert works.wait_end(*asked, over=True) == plain.wait_end(*asked)
        begin = until


@pytest.mark.parametrize("first", [What.WORK_BEGIN, What.WORK_END])
def test_a_wait_does_not_go_through_all_marks_of_its_work(first: What) -> None:
    works = _Works(Counter())
    marks = np.repeat(works_marks((0, 5, GLOO, What.WORK_END)), MANY)
    marks["ts_ns"] = np.arange(MANY)
    marks["what"][0] = first
    works.advance(marks, 0, MANY)
    assert works.wait_end(0, 5, MANY, over=True) == (int(first is What.WORK_BEGIN), True)
    assert lines_of(lambda: works.wait_end(0, 5, MANY, over=True)) < 50
    assert bytes_of(lambda: works.wait_end(0, 5, MANY, over=True)) < 1000


def test_works_that_stay_open_are_one_in_each_step() -> None:
    works = _Works(Counter())
    begun = works_marks(*((handle, handle, handle, What.WORK_BEGIN) for handle in range(1, cpu.WORKS + 1)))
    assert works.advance(begun, 0, 5000) == [(_Label.WORK, 1, 5000)]
    more = works_marks((5001, 9999, GLOO, What.WORK_BEGIN), (5002, 9999, GLOO, What.WORK_END))
    assert works.advance(more, 5000, 6000)[-1] == (_Label.WORK, 1, 6000)
    assert works.advance(more, 6000, 7000)[-1] == (_Label.WORK, 2, 7000), "the first one was one too many"
    assert lines_of(lambda: works.advance(more, 7000, 8000)) < 150


def test_what_is_remembered_of_works_that_were_open_is_bounded() -> None:
    works = _Works(Counter())
    works.advance(works_marks((1, 1, 1, What.WORK_BEGIN)), 0, 2)
    for at in range(10, 10_000, 10):
        again = works_marks((at, 2, 2, What.WORK_BEGIN), (at + 1, 2, 2, What.WORK_END))
        assert works.advance(again, at, at + 10) == [(_Label.WORK, at, at + 1), (_Label.WORK, 1, at + 10)]
    assert len(works._begun) <= 2 + cpu.THREADS


class Searched(dict[int, tuple[int, bool]]):
    """Counts how often somebody begins at its first key: what was removed before that is gone through each time."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


def test_works_that_are_too_many_are_forgotten_in_one_pass() -> None:
    works = _Works(Counter())
    works._last = last = Searched()
    marks = np.repeat(works_marks((0, 0, GLOO, What.WORK_END)), 3 * cpu.WORKS)
    marks["ts_ns"] = marks["handle"] = np.arange(1, len(marks) + 1)
    works.advance(marks, 0, 2 * len(marks))
    assert last.times == 1
    assert list(last) == list(range(len(marks) - cpu.WORKS + 1, len(marks) + 1))


def test_the_marks_of_a_work_remember_what_was_last_before() -> None:
    marks = _WorkMarks((7, True))
    assert marks.wait_end(8, 20) == (8, True)
    marks.append(10, False)
    assert marks.wait_end(8, 20) == (20, True)
    marks.append(12, True)
    assert marks.wait_end(8, 20) == (12, True)
    assert marks.wait_end(8, 11) == (11, True)
