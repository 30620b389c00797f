"""Statistics that a few wild values do not move: scatter, medians of ranks, the order of two samples, how far chance
goes.

By hand where it is called often and scipy is many times slower (median_abs_deviation 9 times, nanmedian 5 times,
mannwhitneyu 11 times); the rest is scipy.special, which a trace that only starts does not load.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, gammaln, ndtri

from argus.model.statistics import NORMAL

Float = NDArray[np.float64]


def mad(values: Float, center: float | None = None) -> float:
    """Scatter of values as a standard deviation: their median absolute deviation, times what makes it that of normal
    values.

    Args:
        values: Without NaN, shape (n,).
        center: What they scatter about; None: their median.

    Returns:
        0 for no values.
    """
    if not len(values):
        return 0.0
    about = float(np.median(values)) if center is None else center
    return NORMAL * float(np.median(np.abs(values - about)))


def row_medians(values: Float) -> Float:
    """Of each row, NaN left out, shape (rows,); 0 where nothing is known.

    Args:
        values: Shape (rows, columns).
    """
    if not values.shape[1]:
        return np.zeros(len(values))
    # numpy's median takes a row at a time, and several times as long.
    count = values.shape[1] - np.isnan(values).sum(axis=1)
    ordered, row = np.sort(values, axis=1), np.arange(len(values))  # NaN last
    middle = (ordered[row, np.maximum(count - 1, 0) // 2] + ordered[row, np.maximum(count, 1) // 2]) / 2
    return np.where(count > 0, middle, 0.0)


def low_median(values: Float) -> Float:
    """Of each column, NaN left out, shape (columns,): of two the lesser, so that a slow half does not become the norm.

    Args:
        values: Shape (rows, columns).
    """
    count = np.sum(~np.isnan(values), axis=0)
    ordered = np.sort(values, axis=0)  # NaN last
    return np.asarray(np.take_along_axis(ordered, np.maximum(count - 1, 0)[None, :] // 2, axis=0)[0])


def share_in_order(earlier: Float, later: Float, *, ties: float = 0.0) -> float:
    """Share of pairs (earlier, later) of which the later value is greater (Mann and Whitney's statistic, the area under
    the ROC curve).

    Args:
        earlier, later: Without NaN, neither empty.
        ties: What a pair of equal values counts.
    """
    ordered = np.sort(earlier)
    less = np.searchsorted(ordered, later, side="left")
    if ties:
        less = less + ties * (np.searchsorted(ordered, later, side="right") - less)
    return float(np.mean(less) / len(earlier))


def order_error(earlier: float, later: float) -> float:
    """Standard error of :func:`share_in_order` where the values of both samples, of so many independent ones each, are
    in no order."""
    return float(np.sqrt((earlier + later + 1) / (12 * earlier * later)))


def outlier_limit(chance: float, count: int, least: float) -> float:
    """How many standard deviations from the norm one of ``count`` normal values is with this chance that any of them
    is; ``least`` at least."""
    return max(least, float(ndtri(1 - chance / max(count, 1))))


def binomial_tail(hits: int, trials: int, share: float) -> float:
    """Logarithm of the chance of at least ``hits`` (above 0) of ``trials``, each with the chance ``share``."""
    tail = float(bdtrc(hits - 1, trials, share))
    if tail > 0:
        return float(np.log(tail))
    # Too small for a number: what it begins with is nearly all of it.
    return log_choose(trials, hits) + hits * float(np.log(share)) + (trials - hits) * float(np.log1p(-share))


def log_choose(count: int, size: int) -> float:
    """Logarithm of the number of sets of ``size`` among ``count``."""
    return float(gammaln(count + 1) - gammaln(size + 1) - gammaln(count - size + 1))
