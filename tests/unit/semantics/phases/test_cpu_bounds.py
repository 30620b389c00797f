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
from argus.semantics.phases.cpu import (
    DEPTH,
    MARK,
    PhaseTracker,
    What,
    _Label,
    _Main,
    _Range,
    _Roles,
    _Span,
    _WorkMarks,
    _Works,
    innermost,
)
from argus.semantics.steps.by_calls import ITERATION
from argus.semantics.steps.range_names import Role
from tests.unit.semantics.phases.test_cpu import GLOO, MAIN, Array

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


# ---- ranges in one another


class Apart(_Main):
    """Each optimiser is suspended and resumed on its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shown: dict[int, tuple[_Range, int | None, bool]] = {}

    def _suspend_optimizers(self, ts: int) -> None:
        for entry in self.open:
            if entry.role == Role.OPTIMIZER:
                _, since, sure = self.shown.get(id(entry), (entry, entry.begin, False))
                if since is not None and sure:
                    self._spans.append((_Label.OPTIMIZER, since, ts))
                self.shown[id(entry)] = entry, None, False

    def _resume_optimizers(self, ts: int, *, sure: bool) -> None:
        for entry in self.open:
            if entry.role == Role.OPTIMIZER and self.shown.get(id(entry), (entry, 0, False))[1] is None:
                self.shown[id(entry)] = entry, ts, sure

    def _since_of(self, entry: _Range) -> int | None:
        if entry.role != Role.OPTIMIZER:
            return super()._since_of(entry)
        return self.shown.get(id(entry), (entry, entry.begin, False))[1]

    def _inside(self) -> bool:
        return any(entry.role in (Role.DATA, Role.FORWARD, Role.ZERO_GRAD) for entry in self.open)


def random_marks(rng: random.Random) -> Array:
    """Marks of the main thread, above all of optimisers and backwards in one another."""
    rows, now = [], 1000
    weights = [rng.random() ** 2 for _ in range(5)]
    roles = [*Role, Role.OPTIMIZER, Role.OPTIMIZER, Role.FORWARD]
    for _ in range(rng.choice([30, 100, 300])):
        now += rng.randrange(4)
        what = rng.choices([*What][:5], weights)[0]
        role = rng.choice(roles) if what is What.RANGE_BEGIN else 0
        role = rng.choice([0, *roles]) if what is What.RANGE_END else role
        rows.append((now - 20 * (rng.random() < 0.05), 0, MAIN, what, role, 0))
    return np.array(rows, MARK)


def all_phases(marks: Array, seed: int) -> tuple[list[Any], Counter[str]]:
    """What steps of random lengths are made of, and what was counted."""
    rng, tracker, found, begin = random.Random(seed), PhaseTracker(), [], 990
    for at in range(0, len(marks), 20):
        tracker.feed(marks[at : at + 20])
        row = np.zeros(1, ITERATION)
        row["ts_ns"], row["duration_ns"] = begin, rng.randrange(1, 60)
        begin += int(row["duration_ns"][0])
        found += [*tracker.split(row).tolist(), *tracker.take_segments().tolist()]
    return found, tracker.counters


@pytest.mark.parametrize("seed", range(100))
def test_optimizers_in_one_another_are_shown_as_if_each_was_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    marks = random_marks(rng)
    monkeypatch.setattr(cpu, "DEPTH", rng.choice([3, 6, 256]))
    found = all_phases(marks, seed)
    monkeypatch.setattr(cpu, "_Main", Apart)
    assert found == all_phases(marks, seed)


@pytest.mark.parametrize("seed", range(10))
def test_open_ranges_are_found_as_by_a_search(seed: int) -> None:
    rng = random.Random(seed)
    plain: list[int] = []
    roles = _Roles()
    for _ in range(2000):
        pick = rng.random()
        if pick < 0.5:
            plain.append(rng.randrange(4))
            roles.push(plain[-1])
        elif plain and pick < 0.8:
            plain.pop()
            roles.pop()
        elif plain:
            del plain[0]
            roles.drop()
        assert [*roles] == plain
        assert len(roles) == len(plain)
        assert [roles.innermost(role) for role in range(5)] == [innermost(plain, role) for role in range(5)]
        assert [roles.outermost(role) for role in range(5)] == [
            plain.index(role) if role in plain else -1 for role in range(5)
        ]


def opened(role: Role) -> Array:
    """As many ranges as are kept, open."""
    return np.array([(1000 + i, 0, MAIN, What.RANGE_BEGIN, role, 0) for i in range(DEPTH - 1)], MARK)


def again_and_again(*marks: tuple[What, Role], times: int = 300) -> Array:
    """The same marks many times."""
    rows = [(what, role) for _ in range(times) for what, role in marks]
    return np.array([(5000 + i, 0, MAIN, what, role, 0) for i, (what, role) in enumerate(rows)], MARK)


def test_backwards_in_optimizers_in_one_another_are_no_more_spans_than_in_one() -> None:
    """Of 65,536 marks they were sixteen million, in 1.8 GiB."""
    main = _Main(MAIN, _Works(Counter()), Counter())
    main.advance(opened(Role.OPTIMIZER), 1000, 4000)
    marks = again_and_again((What.BACKWARD_BEGIN, Role.NONE), (What.BACKWARD_END, Role.NONE))
    assert len(main.advance(marks, 4000, 9000)) <= len(marks) + 1


@pytest.mark.parametrize("outer", [Role.OPTIMIZER, Role.NONE, Role.CHECKPOINT])
@pytest.mark.parametrize(
    "inner",
    [
        [(What.BACKWARD_BEGIN, Role.NONE), (What.BACKWARD_END, Role.NONE)],
        [(What.RANGE_BEGIN, Role.FORWARD), (What.RANGE_END, Role.NONE)],
        [(What.RANGE_BEGIN, Role.DATA), (What.RANGE_END, Role.DATA)],
        [(What.RANGE_END, Role.FORWARD)],
    ],
)
def test_a_mark_inside_of_many_ranges_does_not_go_through_them(outer: Role, inner: list[tuple[What, Role]]) -> None:
    main = _Main(MAIN, _Works(Counter()), Counter())
    main.advance(opened(outer), 1000, 4000)
    few, many = again_and_again(*inner, times=1), again_and_again(*inner)
    once = lines_of(lambda: main.advance(few, 4000, 9000))
    more = lines_of(lambda: main.advance(many, 9000, 14_000)) - once
    assert more < 60 * (len(many) - len(few))


def test_ends_of_optimizers_inside_of_many_ranges_are_not_searched_for() -> None:
    tracker = PhaseTracker()
    marks = again_and_again(
        (What.RANGE_BEGIN, Role.OPTIMIZER), (What.RANGE_END, Role.OPTIMIZER), (What.RANGE_END, Role.DATA)
    )
    tracker.feed(np.concatenate([opened(Role.NONE), marks]))
    assert lines_of(tracker._optimizer_ends) < 40 * (len(marks) + DEPTH)
    assert tracker._optimizer_ends() == marks["ts_ns"][1::3].tolist()


# ---- marks that are dropped


def steps_of(*edges: int) -> Array:
    """Steps from each of these moments to the next."""
    rows = np.zeros(len(edges) - 1, ITERATION)
    rows["ts_ns"], rows["duration_ns"], rows["step"] = edges[:-1], np.diff(edges), np.arange(len(rows))
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_who_drops_marks_goes_on_as_if_traced_from_then_on(seed: int) -> None:
    """Against a tracker that never had those that were dropped."""
    rng = random.Random(seed)
    marks = random_marks(rng)
    works = [(rng.randrange(980, 1600), rng.randrange(1, 5), GLOO, rng.choice([*What][4:7]), 0, 0) for _ in range(60)]
    marks = np.concatenate([marks, np.array(works, MARK)])
    marks["tid"][marks["what"] == What.WAIT] = MAIN
    marks = marks[np.argsort(marks["ts_ns"], kind="stable")]
    pieces = np.array_split(marks, rng.randrange(1, 20))
    marks = np.concatenate([piece[::-1] if rng.random() < 0.1 else piece for piece in pieces])
    tracker, fresh = PhaseTracker(), PhaseTracker()
    for piece in np.array_split(marks, rng.randrange(1, 20)):
        tracker.feed(piece)
    edges = sorted(rng.sample(range(985, 1700), 12))
    before = rng.choice([0, 3])
    tracker.split(steps_of(*edges)[:before])
    tracker.take_segments()
    kept, most = tracker.marks_kept, rng.randrange(0, len(marks) + 5)
    tracker.keep(most)
    assert tracker.marks_kept <= most
    if kept <= most:
        assert tracker.marks_kept == kept
        return
    times = np.sort(marks["ts_ns"][marks["ts_ns"] > (edges[before] if before else 0)])
    until = int(times[kept - most - 1])
    left = marks[marks["ts_ns"] > until]
    assert tracker.counters["marks_dropped_old"] == kept - len(left)
    fresh.feed(left)
    fresh._tallies, fresh._works.seen = tracker._tallies, tracker._works.seen
    steps = steps_of(*edges)[before:]
    found, expected = tracker.split(steps), fresh.split(steps)
    after = steps["step"][steps["ts_ns"] > until]
    assert found.tolist() == expected[np.isin(expected["step"], after)].tolist()
    assert tracker.counters["steps_without_phases"] == len(steps) - len(after)
    assert all(begin > until for begin, _, _ in tracker.take_segments().tolist())


def test_marks_that_are_dropped_are_not_gone_through() -> None:
    """They were, in 1.5 us each: those of a hundred ranks at once held the loop for seconds."""
    tracker = PhaseTracker()
    marks = again_and_again((What.RANGE_BEGIN, Role.FORWARD), (What.RANGE_END, Role.FORWARD), times=MANY)
    tracker.feed(marks)
    assert lines_of(lambda: tracker.keep(100)) < 60
    assert tracker.marks_kept == 100
    assert tracker._pieces[0].tolist() == marks[-100:].tolist()
    assert tracker._pieces[0].base is None or tracker._pieces[0].base.nbytes == 100 * MARK.itemsize


@pytest.mark.parametrize("by_itself", [False, True])
def test_steps_whose_marks_were_dropped_have_no_phases(by_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were reported as other: 100 %."""
    tracker = PhaseTracker()
    loop = [(What.RANGE_BEGIN, Role.FORWARD), (What.RANGE_END, Role.NONE), (What.RANGE_BEGIN, Role.OPTIMIZER)]
    marks = again_and_again(*loop, (What.RANGE_END, Role.NONE), times=10)
    if by_itself:
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "MARKS", 24)
            for each in np.array_split(marks, 40):
                tracker.feed(each)
    else:
        tracker.feed(marks)
        tracker.keep(22)
    dropped = tracker.counters["marks_dropped_old"]
    assert 16 <= dropped < 24
    steps = steps_of(*range(5000, 5041, 4))
    rows = tracker.split(steps)
    without = 1 + (dropped - 1) // 4
    assert np.unique(rows["step"]).tolist() == [*range(without, 10)]
    assert tracker.counters["steps_without_phases"] == without
    whole = PhaseTracker()
    whole.feed(marks)
    expected = whole.split(steps)
    assert rows.tolist() == expected[expected["step"] >= without].tolist()
    assert whole.counters["steps_without_phases"] == 0
