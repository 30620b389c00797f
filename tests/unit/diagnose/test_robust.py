"""Statistics by hand against scipy's, where scipy has them; and that a trace that starts does not load scipy."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from argus.diagnose.iteration.changes import SLACK, threshold
from argus.diagnose.ranks.lateness import by_chance
from argus.diagnose.robust import (
    binomial_tail,
    log_choose,
    low_median,
    mad,
    order_error,
    outlier_limit,
    row_medians,
    share_in_order,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30).map(np.array)


@given(values=VALUES)
@settings(max_examples=50, deadline=None)
def test_scatter_is_that_of_normal_values(values: np.ndarray) -> None:
    assert mad(values) == pytest.approx(stats.median_abs_deviation(values, scale="normal"), rel=1e-4)
    assert mad(np.random.default_rng(1).normal(5, 2, 20_000)) == pytest.approx(2, rel=0.03)


def test_scatter_about_a_given_center_and_of_nothing() -> None:
    assert mad(np.array([1.0, 3.0, 5.0]), 1.0) == pytest.approx(1.4826 * 2)
    assert mad(np.empty(0)) == 0.0


@given(earlier=VALUES, later=VALUES)
@settings(max_examples=50, deadline=None)
def test_order_of_two_samples_is_mann_whitneys(earlier: np.ndarray, later: np.ndarray) -> None:
    pairs = len(earlier) * len(later)
    expected = stats.mannwhitneyu(later, earlier).statistic / pairs
    assert share_in_order(earlier, later, ties=0.5) == pytest.approx(expected, abs=1e-12)
    assert share_in_order(earlier, later) == pytest.approx(np.mean(later[:, None] > earlier[None, :]), abs=1e-12)


def test_the_error_of_an_order_is_what_chance_makes() -> None:
    rng = np.random.default_rng(3)
    shares = [share_in_order(rng.random(20), rng.random(30)) for _ in range(2000)]
    assert order_error(20, 30) == pytest.approx(np.std(shares), rel=0.06)


def test_medians_of_ranks_leave_out_what_is_not_known() -> None:
    values = np.array([[1.0, np.nan, 5.0, 3.0], [np.nan] * 4, [4.0, 2.0, np.nan, np.nan]])
    assert row_medians(values).tolist() == [3.0, 0.0, 3.0]
    assert row_medians(np.empty((2, 0))).tolist() == [0.0, 0.0]
    assert low_median(values[[0, 2]]).tolist() == [1.0, 2.0, 5.0, 3.0]


@pytest.mark.thorough
@given(trials=st.integers(1, 250), share=st.floats(1e-4, 0.99), part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_the_tail_of_the_binomial_distribution(trials: int, share: float, part: float) -> None:
    hits, chance = 1 + int(part * (trials - 1)), Fraction(share)
    exact = sum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1))
    assert isinstance(exact, Fraction)
    expected = math.log(exact.numerator) - math.log(exact.denominator)
    # Below the least number there is only its first term.
    close = 0.1 if expected < -700 else 1e-9
    assert binomial_tail(hits, trials, share) == pytest.approx(expected, rel=1e-9, abs=close)


def test_a_tail_too_small_for_a_number_is_still_one() -> None:
    """300 of 10,240 ranks that are last in 250 of 250 steps: which 300 they are is anybody's choice."""
    tail = binomial_tail(250, 250, 300 / 10240)
    assert tail == pytest.approx(250 * math.log(300 / 10240))
    assert math.exp(tail) == 0.0
    assert log_choose(10240, 300) > -tail
    assert by_chance(250, 250, 300, 10240) == 1.0
    assert by_chance(250, 250, 1, 10240) == 0.0


def test_how_far_one_of_many_must_be() -> None:
    assert outlier_limit(0.05, 1, 0.0) == pytest.approx(1.6449, abs=1e-4)
    assert outlier_limit(1e-3, 1000, 3.5) == pytest.approx(4.7534, abs=1e-4)
    assert outlier_limit(1e-3, 2, 3.5) == 3.5


def test_where_a_sum_alarms_is_siegmunds() -> None:
    limit = threshold(1e6)
    x = 2 * SLACK * (limit + 1.166)
    assert (math.exp(x) - x - 1) / (2 * SLACK**2) == pytest.approx(1e6, rel=1e-9)


def test_a_trace_that_starts_does_not_load_scipy() -> None:
    """It costs 0.2 s of CPU time and 30 MB, and is first needed when a job has ten steps."""
    code = (
        "import sys, argus.cli.trace, argus.cli.run, argus.cli.session, argus.cli.live, argus.cli.closing; "
        "import argus.live.tracer, argus.diagnose.follow.watch; "
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'scipy'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
