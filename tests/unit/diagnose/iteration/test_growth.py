"""Slow and partial growth of step times: offline and online agree, and what is too small is reported as such."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.case import Case, Logged, Notes
from argus.diagnose.iteration.changes import Detector
from argus.diagnose.iteration.logged_growth import Growth, whose
from argus.diagnose.iteration.regression import find_growth, find_rise, least_growth
from argus.diagnose.ranks.own_times import hiding

Float = NDArray[np.float64]


def natural(seed: int, steps: int = 300) -> Float:
    """Step times as real ones vary, ns: neighbours alike, a tail, a few steps far longer, a slow begin."""
    rng = np.random.default_rng(seed)
    noise = np.zeros(steps)
    for step in range(1, steps):
        noise[step] = 0.4 * noise[step - 1] + rng.exponential(0.018)
    noise += (rng.random(steps) < 0.02) * rng.random(steps)
    noise[:4] += 0.3
    return np.asarray(76e6 * (1 + noise))


def online(times: Float) -> bool:
    """Whether the detector of running jobs has growth that lasts."""
    detector = Detector(1, least=0.1)
    for step, time in enumerate(times.tolist()):
        detector.feed(step, np.array([time]))
    return bool(detector.since[0] >= 0)


@pytest.mark.parametrize(
    ("phase", "waits", "equal", "text"),
    [
        ("forward", ("backward",), (), ", and no rank holds up the others more than before"),
        ("allreduce", ("allreduce",), (), ", and no rank holds up the others more than before"),
        ("backward", ("backward",), (), "; no rank needs longer by itself, but backward contains the wait"),
        ("sync", ("sync",), (), "; no rank needs longer by itself, but sync contains the wait"),
        ("backward", ("forward",), ("backward",), "; backward is as long on every rank, and one that is slower inside"),
    ],
)
def test_whether_a_rank_may_be_behind_growth(
    phase: str, waits: tuple[str, ...], equal: tuple[str, ...], text: str
) -> None:
    partial = bool(hiding(waits))
    logged = Logged(synchronous=True, partial=partial, leads={}, waits=waits, equal=equal)
    case = cast("Case", cast("Any", SimpleNamespace(notes=Notes(logged=logged))))
    assert whose(case, Growth(phase=phase)).startswith(text)


@pytest.mark.parametrize("seed", range(6))
def test_a_ramp_and_a_longer_half_are_growth(seed: int) -> None:
    steps = np.arange(300)
    ramp = natural(seed) * (1 + np.clip((steps - 60) / 200, 0, 1) * (92 / 76 - 1))
    found = find_growth(ramp)
    assert found is not None
    assert found.after_ns > 1.1 * found.before_ns
    half = natural(seed) * np.where(steps >= 150, 1.2, 1.0)
    found = find_growth(half)
    assert found is not None
    assert abs(found.index - 150) <= 3
    assert online(half)


@pytest.mark.thorough
def test_healthy_steps_are_not() -> None:
    assert [seed for seed in range(30) if find_growth(natural(seed)) is not None or online(natural(seed))] == []


def test_what_only_the_sums_show_is_found() -> None:
    # Twice as long in the end, and no step parts it: every tenth of the recording is a little longer.
    rng = np.random.default_rng(1)
    times = 78e6 * np.concatenate([np.ones(100), np.linspace(1, 2, 200)]) * (1 + 0.01 * rng.standard_normal(300))
    found = find_growth(times)
    assert found is not None
    assert 90 <= found.index <= 130


@pytest.mark.parametrize(("begin", "end"), [(100, 300), (60, 160), (100, 140)])
def test_a_rise_has_its_first_and_last_step(begin: int, end: int) -> None:
    for seed in range(5):
        noise = np.exp(0.01 * np.random.default_rng(seed).standard_normal(320))
        times = np.interp(np.arange(320), [begin, end], [76e6, 92e6]) * noise
        change = find_growth(times)
        assert change is not None
        found = find_rise(times, change.index)
        assert found is not None
        assert abs(found[0] - begin) <= 12
        assert abs(found[1] - end) <= 16


def test_a_sudden_change_is_no_rise() -> None:
    for seed in range(20):
        noise = np.exp(0.01 * np.random.default_rng(seed).standard_normal(300))
        times = np.where(np.arange(300) < 100, 76e6, 92e6) * noise
        change = find_growth(times)
        assert change is not None
        assert change.index == 100
        assert find_rise(times, 100) is None


def test_a_short_rise_begins_where_it_does() -> None:
    # Too slow for a step, and over long before the end: a line up to the end would begin at step 18.
    for seed in range(10):
        noise = np.exp(0.01 * np.random.default_rng(seed).standard_normal(300))
        change = find_growth(np.interp(np.arange(300), [100, 120], [76e6, 92e6]) * noise)
        assert change is not None
        assert 94 <= change.index <= 120


def test_least_growth_follows_the_noise() -> None:
    quiet = 1e8 * (1 + 0.01 * np.random.default_rng(0).standard_normal(200))
    assert least_growth(quiet) == pytest.approx(0.104, abs=0.002)
    swings = 1e8 * np.exp(0.3 * np.repeat(np.random.default_rng(0).standard_normal(20), 10))
    assert least_growth(swings) > 0.2
    assert least_growth(quiet[:10]) == float("inf")


@pytest.mark.parametrize(("steps", "noise"), [(40, 0.05), (40, 0.1), (100, 0.1), (100, 0.2), (400, 0.2)])
def test_growth_that_is_not_small_is_found(steps: int, noise: float) -> None:
    """A healthy job's verdict says from how much growth on it would have been found: 9 of 10 such jobs are."""
    rng, found = np.random.default_rng(steps), 0
    for _ in range(40):
        times = 1e8 * np.exp(noise * rng.standard_normal(steps))
        later = np.arange(steps) >= steps // 2
        found += find_growth(np.where(later, 1 + least_growth(times), 1) * times) is not None
    assert found >= 34


def test_a_million_steps_are_not_copied_window_by_window() -> None:
    """A job of a millisecond a step, for a quarter of an hour: 8 MB of step times."""
    durations = np.random.default_rng(1).normal(1e6, 2e4, 1_000_000)
    tracemalloc.start()
    try:
        least_growth(durations)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 80e6
