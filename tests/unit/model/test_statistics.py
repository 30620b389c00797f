"""Statistics by hand against those of scipy and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from argus.model.statistics import low_median, mad, median_deviation, medians, order_error, row_medians, share_in_order

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30).map(np.array)
MATRICES = arrays(
    np.float64,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    elements=st.sampled_from([np.nan, -3.5, 0.0, 0.1, 2e11]),
)


@given(values=VALUES)
@settings(max_examples=50, deadline=None)
def test_scatter_is_that_of_normal_values(values: np.ndarray) -> None:
    assert median_deviation(values) == stats.median_abs_deviation(values)
    assert mad(values) == pytest.approx(stats.median_abs_deviation(values, scale="normal"), rel=1e-4)
    assert mad(np.random.default_rng(1).normal(5, 2, 20_000)) == pytest.approx(2, rel=0.03)


def test_scatter_about_a_given_center_and_of_nothing() -> None:
    assert mad(np.array([1.0, 3.0, 5.0]), 1.0) == pytest.approx(1.4826 * 2)
    assert median_deviation(np.array([1, 3, 7])) == 2.0
    assert mad(np.empty(0)) == median_deviation(np.empty(0)) == 0.0


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


@given(values=MATRICES, axis=st.integers(-2, 1))
@settings(max_examples=100, deadline=None)
def test_medians_are_numpys_without_what_is_not_known(values: np.ndarray, axis: int) -> None:
    empty = np.isnan(values).all(axis=axis)
    there = np.where(np.expand_dims(empty, axis), 0.0, values)
    assert np.array_equal(medians(values, axis), np.where(empty, np.nan, np.nanmedian(there, axis)), equal_nan=True)
    assert np.array_equal(medians(values, axis, empty=0.0), np.nanmedian(there, axis))
    lower = np.nanquantile(np.where(np.isnan(values).all(axis=0), 0.0, values), 0.5, axis=0, method="lower")
    assert np.array_equal(np.nan_to_num(low_median(values)), lower)


def test_medians_of_ranks_leave_out_what_is_not_known() -> None:
    values = np.array([[1.0, np.nan, 5.0, 3.0], [np.nan] * 4, [4.0, 2.0, np.nan, np.nan]])
    assert row_medians(values).tolist() == [3.0, 0.0, 3.0]
    assert row_medians(np.empty((2, 0))).tolist() == [0.0, 0.0]
    assert np.isnan(medians(np.empty((2, 0)))).all()
    assert low_median(values[[0, 2]]).tolist() == [1.0, 2.0, 5.0, 3.0]
