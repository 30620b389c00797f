"""Phases of a few steps now and then."""

from __future__ import annotations

import numpy as np
import pytest

from argus.semantics.phases import sampled
from argus.semantics.phases.cpu import MARK, PHASES
from argus.semantics.phases.sampled import SampledPhases
from tests.unit.semantics.phases.test_cpu import MS, Array, backward, data, forward, optimizer, steps, stream

STEP_MS = 10
BEGIN, END = 1000 * MS, 1100 * MS


def marks(first: int, last: int, load_ms: float = 1.0) -> Array:
    """Steps by their backward passes: 4 ms backward, 2 of the optimiser, a batch, the rest forward."""
    parts = []
    for number in range(first, last):
        at = number * STEP_MS
        parts.append(backward(at, at + 4))
        parts.append(optimizer(at + 4, at + 6))
        parts.append(data(at + 6, at + 6 + load_ms))
        parts.append(forward(at + 6 + load_ms, at + 10))
    return stream(*parts)


def step_rows(first: int, last: int) -> Array:
    rows = steps(*range(first * STEP_MS, (last + 1) * STEP_MS, STEP_MS))
    rows["step"] += first
    return rows


def spent(rows: Array) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        found.setdefault(int(row["step"]), {})[PHASES[row["phase"]]] = float(row["duration_ns"]) / MS
    return found


def test_steps_in_a_window_have_phases_and_those_that_its_edges_cut_have_none() -> None:
    phases = SampledPhases()
    assert not phases
    phases.begin(BEGIN + 3 * MS)
    phases.feed(7, marks(90, 105))
    phases.end(END + 3 * MS)
    phases.feed(7, marks(105, 130))
    rows, of, segments = phases.split(step_rows(90, 130))
    expected = {"data_loading": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 2.0}
    assert spent(rows) == dict.fromkeys(range(101, 110), expected)
    assert of["step"].tolist() == list(range(101, 110))
    assert segments[7]["begin_ns"][0] == 1010 * MS
    assert segments[7]["end_ns"][-1] == END


def test_a_window_is_complete_when_a_step_ends_behind_it() -> None:
    phases = SampledPhases()
    phases.begin(BEGIN)
    phases.feed(7, marks(100, 110))
    assert not len(phases.split(step_rows(95, 104))[0]), "it is open"
    phases.end(END)
    assert not len(phases.split(step_rows(104, 108))[0]), "more steps may lie in it"
    found = spent(phases.split(step_rows(108, 112))[0])
    assert sorted(found) == list(range(100, 110))
    assert not len(phases.split(step_rows(112, 120))[0]), "once"


def test_what_is_open_at_the_end_of_a_window_does_not_reach_into_the_next() -> None:
    """The batch's end comes after the first window: in the second another one takes 3 ms."""
    phases = SampledPhases()
    phases.begin(BEGIN)
    phases.feed(7, marks(100, 110))
    phases.feed(7, stream(data(1099.5, 1101)))
    phases.end(END)
    phases.begin(2000 * MS)
    phases.feed(7, marks(200, 210, load_ms=3.0))
    phases.end(2100 * MS)
    found = spent(phases.split(step_rows(95, 215))[0])
    assert found[205] == {"data_loading": 3.0, "forward": 1.0, "backward": 4.0, "optimizer": 2.0}
    assert sorted(found) == [*range(100, 110), *range(200, 210)]


def test_each_rank_has_its_own() -> None:
    phases = SampledPhases()
    phases.begin(BEGIN)
    phases.feed(7, marks(100, 110))
    phases.feed(8, marks(100, 110, load_ms=2.0))
    phases.end(END)
    others = step_rows(100, 112)
    others["rank"] = 8
    rows, of, segments = phases.split(np.concatenate([step_rows(100, 112), others]))
    loads = rows[rows["phase"] == 0]
    assert {int(row["rank"]): int(row["duration_ns"]) for row in loads} == {7: MS, 8: 2 * MS}
    assert sorted(segments) == [7, 8]
    assert len(of) == 20


def test_more_marks_than_are_kept_give_no_phases_and_the_next_window_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "MARKS", 100)
    phases = SampledPhases()
    phases.begin(BEGIN)
    for number in range(100, 120):
        phases.feed(7, marks(number, number + 1))
    phases.end(END + 100 * MS)
    phases.begin(2000 * MS)
    assert not len(phases.split(step_rows(99, 130))[0])
    assert phases.counters["marks_dropped_old"] == len(marks(100, 120)) - 96, "12 steps of eight marks are kept"
    phases.feed(7, marks(200, 205))
    phases.end(2050 * MS)
    assert sorted(spent(phases.split(step_rows(199, 210))[0])) == list(range(200, 205))


def test_marks_that_come_one_by_one_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces are counted each time: a rank whose steps never come had as many as marks."""
    phases, joined = SampledPhases(), SampledPhases()
    for each, most in ((phases, 10), (joined, 1 << 20)):
        monkeypatch.setattr(sampled, "PIECES", most)
        each.begin(BEGIN)
        for row in marks(100, 110):
            each.feed(7, row.reshape(1))
        each.end(END)
    assert len(phases._marks[7]) <= 10
    assert len(joined._marks[7]) == len(marks(100, 110))
    assert spent(phases.split(step_rows(98, 112))[0]) == spent(joined.split(step_rows(98, 112))[0])


def test_marks_of_a_window_that_was_forgotten_are_in_no_later_one() -> None:
    """It ended in a batch that took for ever."""
    phases = SampledPhases()
    for number in range(10):
        phases.begin(number * 100 * MS)
        phases.feed(7, stream(data(number * 100 + 40, 5000))[:1])
        phases.end((number * 100 + 50) * MS)
    for number in range(10, 17):
        phases.begin(number * 100 * MS)
        phases.end((number * 100 + 50) * MS)
    phases.begin(2000 * MS)
    phases.feed(7, marks(200, 210))
    phases.end(2100 * MS)
    found = spent(phases.split(step_rows(198, 215))[0])
    assert found[200] == {"data_loading": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 2.0}


def test_windows_whose_steps_never_come_are_forgotten() -> None:
    phases = SampledPhases()
    for number in range(1000):
        phases.begin(number * 100 * MS)
        phases.feed(7, np.empty(0, MARK))
        phases.end((number * 100 + 50) * MS)
    assert len(phases._windows) == sampled.MOST_WINDOWS
