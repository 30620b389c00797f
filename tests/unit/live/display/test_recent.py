"""The newest steps, how their time was spent, and who comes late to collectives."""

from __future__ import annotations

import numpy as np
import pytest

from argus.live.display.recent import RECENT_STEPS, RecentSteps, lateness_ms
from argus.live.display.view import own_ms, parts_of_thread
from argus.model import records
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.phases.cpu import PHASE, PHASES
from argus.semantics.steps.by_calls import ITERATION

MS = 1_000_000


def steps(rank: int, first: int, times_ms: list[float]) -> np.ndarray:
    out = np.zeros(len(times_ms), ITERATION)
    out["rank"], out["step"] = rank, first + np.arange(len(times_ms))
    out["duration_ns"] = np.array(times_ms) * MS
    out["ts_ns"] = 1000 * MS * out["step"].astype(np.uint64)
    return out


def test_step_times_are_the_median_over_ranks_of_the_newest() -> None:
    recent = RecentSteps()
    assert recent.times_ms() == []
    assert recent.typical_ms(0) is None
    for rank, factor in ((0, 1.0), (1, 3.0), (2, 2.0)):
        recent.feed(steps(rank, 0, [10.0 * factor, 20.0 * factor]))
        recent.feed(steps(rank, 2, [30.0 * factor]))
    recent.feed(steps(0, 3, [40.0]))
    assert recent.times_ms() == [20.0, 40.0, 60.0, 40.0]
    assert recent.typical_ms(1) == 60.0
    assert recent.newest_ns == 3040 * MS


def test_what_is_kept_is_bounded() -> None:
    recent = RecentSteps()
    for step in range(5 * RECENT_STEPS):
        recent.feed(steps(0, step, [float(step)]))
        recent.feed_phases(phases(0, step, {"forward": 1}))
    assert recent.times_ms()[-1] == 5 * RECENT_STEPS - 1
    assert len(recent.times_ms()) == RECENT_STEPS
    assert sum(len(batch) for batch in recent._batches[0]) <= RECENT_STEPS + 16
    assert len(recent._phases[0]) <= 64


def phases(rank: int, step: int, spent: dict[str, int]) -> np.ndarray:
    out = np.zeros(len(spent), PHASE)
    out["rank"], out["step"] = rank, step
    out["phase"] = [PHASES.index(name) for name in spent]
    out["duration_ns"] = list(spent.values())
    return out


def test_parts_come_from_phases() -> None:
    recent = RecentSteps()
    assert recent.parts(0) == {}
    recent.feed_phases(phases(0, 0, {"data_loading": 10, "forward": 20, "backward": 30, "communication": 40}))
    assert recent.parts(0) == pytest.approx({"computing": 0.5, "waiting": 0.4, "data loading": 0.1, "other": 0.0})
    # The newest 32 steps count.
    for step in range(1, 40):
        recent.feed_phases(phases(0, step, {"optimizer": 10, "other": 10}))
    assert recent.parts(0) == pytest.approx({"computing": 0.5, "waiting": 0.0, "data loading": 0.0, "other": 0.5})
    assert own_ms(100.0, {"computing": 0.6, "waiting": 0.4}, "phases") == pytest.approx(60.0)
    assert own_ms(100.0, {"computing": 0.6, "waiting": 0.4}, "stacks") is None, "not every wait is for others"
    assert parts_of_thread(0.5, 0.25, 0.1) == {"computing": 0.5, "waiting": 0.25, "other": 0.1}
    assert sum(parts_of_thread(0.9, 0.3, 0.8).values()) == pytest.approx(1.0)
    assert parts_of_thread(0.0, 0.0, 0.0) == {}


def calls(comm: int, first: int, at_ms: list[float]) -> np.ndarray:
    out = np.zeros(len(at_ms), records.COLLECTIVE)
    out["comm"], out["seq"] = comm, first + np.arange(len(at_ms))
    out["ts_ns"] = np.array(at_ms) * MS
    return out


def communicators(*rows: tuple[int, int, int, int, str]) -> np.ndarray:
    out = np.zeros(len(rows), COMMUNICATOR)
    for place, (rank, comm, group, offset, error) in enumerate(rows):
        out[place]["rank"], out[place]["comm"], out[place]["comm_group"] = rank, comm, group
        out[place]["seq_offset"], out[place]["error"] = offset, error
    return out


def test_lateness_is_against_the_first_rank_of_each_call() -> None:
    recent = {
        0: calls(0xA, 5, [10.0, 20.0, 30.0]),
        1: calls(0xB, 0, [13.0, 24.0, 32.0]),
        2: calls(0xC, 0, [10.5, 20.5, 30.5]),
    }
    lined_up = communicators((0, 0xA, 1, -5, ""), (1, 0xB, 1, 0, ""), (2, 0xC, 1, 0, ""))
    assert lateness_ms(recent, lined_up) == pytest.approx({0: 0.0, 1: 3.0, 2: 0.5})
    assert lateness_ms(recent, communicators()) == {}
    doubtful = communicators((0, 0xA, 1, -5, ""), (1, 0xB, 1, 0, "no"), (2, 0xC, 2, 0, ""))
    assert lateness_ms(recent, doubtful) == {}, "nobody else called the same"
