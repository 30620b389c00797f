"""Differences of runs: intervals hold as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from argus.diagnose.variation import SPREAD, Mean, difference, mean_of, runs_needed, w1


def test_the_error_of_a_mean_counts_that_steps_follow_one_another() -> None:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal(2000)
    lasting = np.convolve(noise, np.ones(50) / np.sqrt(50), mode="same")
    assert mean_of(noise).error == pytest.approx(1 / np.sqrt(2000), rel=0.5)
    assert mean_of(lasting).error > 3 * mean_of(noise).error


def test_one_step_has_no_error() -> None:
    assert mean_of([5.0]) == Mean(5.0, -1.0)
    assert mean_of([]) == Mean(0.0, -1.0)


def test_intervals_hold_19_of_20_times() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(400):
        before, after = ([Mean(value) for value in rng.normal(mean, 1.0, 3)] for mean in (100.0, 102.0))
        found = difference(before, after)
        hits += found.low <= 2.0 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_a_new_run_is_expected_where_runs_lie() -> None:
    """At one-sided 0.5 % some 0.5 % of healthy new runs are called slower."""
    rng = np.random.default_rng(3)
    flagged = 0
    for _ in range(1000):
        before = [Mean(value) for value in rng.normal(100.0, 0.8, 5)]
        found = difference(before, [Mean(float(rng.normal(100.0, 0.8)))], spread=SPREAD, single=True)
        flagged += found.change > 0 and found.p / 2 < 0.005
    assert flagged / 1000 <= 0.012


def test_scatter_of_steps_is_a_floor() -> None:
    sure, unsure = ([Mean(100.0, error), Mean(100.0, error)] for error in (0.01, 5.0))
    assert difference(unsure, unsure).error > 10 * difference(sure, sure).error


def test_one_run_a_side_assumes_a_spread() -> None:
    found = difference([Mean(100.0, 0.001)], [Mean(101.0, 0.001)])
    assert found.assumed
    assert found.p > 0.1
    assert not difference([Mean(100.0)] * 2, [Mean(101.0)]).assumed


def test_more_runs_decide_sooner_what_differs_more() -> None:
    before, near, far = ([Mean(base + one) for one in (-1.0, 0.0, 1.0)] for base in (100.0, 103.5, 106.0))
    few = runs_needed(difference(before, far), 3.0, 3, 0.01)
    many = runs_needed(difference(before, near), 3.0, 3, 0.01)
    assert 3 < few <= many < 100


def test_distance_of_distributions() -> None:
    assert w1([1e6, 2e6, 3e6], [1.2e6, 2.2e6, 3.2e6]) == pytest.approx(0.1)
    assert w1([5.0, 5.0], [5.0, 5.0]) == 0
