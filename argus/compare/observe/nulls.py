"""Distributions of test statistics where nothing is wrong, by simulation with fixed seeds: what no closed form covers.

The law of run times is not known, so the statistics of modes and outliers are compared with five laws, light tails to
heavy and symmetric to skewed, and the least favourable one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TRIALS = 4000
"""Simulated data sets behind a chance: the smallest that can be stated is 1 in 4001."""
SHIFT_TRIALS = 40_000
"""The same for shifts, whose chance is raised where runs follow one another: it must be small to begin with."""
LEAST_IN_PHASE = 3
"""Runs in a phase of a period: two that are alike are no period."""
_SEED = 20261126
_LAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "uniform": lambda random, shape: random.random(shape),
    "laplace": lambda random, shape: random.laplace(size=shape),
    "exponential": lambda random, shape: random.exponential(size=shape),
    "t4": lambda random, shape: random.standard_t(4, shape),
}


def least_in_mode(n: int) -> int:
    """Runs that a mode must have: two, and a tenth of all."""
    return max(2, -(-n // 10))


def gap_ratios(values: Array) -> Array:
    """Gaps between neighbours in size, over the standard deviation within the two groups that each parts.

    Args:
        values: Shape (sets, n).

    Returns:
        Shape (sets, splits): of groups of ``least_in_mode(n)`` values and more, the smallest lower group first.
    """
    sets, n = values.shape
    least = least_in_mode(n)
    if n < 2 * least:
        return np.zeros((sets, 0))
    ordered = np.sort(values, axis=1)
    ordered = ordered - ordered[:, :1]
    sums, squares = np.cumsum(ordered, axis=1), np.cumsum(ordered**2, axis=1)
    below = np.arange(least, n - least + 1)
    low, low_squares = sums[:, below - 1], squares[:, below - 1]
    high, high_squares = sums[:, -1:] - low, squares[:, -1:] - low_squares
    within = low_squares - low**2 / below + high_squares - high**2 / (n - below)
    spread = np.sqrt(np.maximum(within, 0.0) / max(n - 2, 1))
    gaps = ordered[:, below] - ordered[:, below - 1]
    floor = 1e-9 * np.maximum(ordered[:, -1:], 1e-300)
    return np.asarray(gaps / np.maximum(spread, floor), np.float64)


def outlier_statistic(values: Array) -> Array:
    """How far above the median the largest value lies, over the median absolute deviation: (sets, n) to (sets,)."""
    centred = values - np.median(values, axis=1, keepdims=True)
    scale = np.median(np.abs(centred), axis=1)
    return np.asarray(centred.max(axis=1) / np.maximum(scale, 1e-12), np.float64)


@lru_cache(maxsize=64)
def _gap_null(n: int) -> tuple[Array, dict[str, Array]]:
    """What a gap is divided by at each split, so that those in the middle count as much as those in the tails, where
    gaps are wide by nature; and by law, the largest of the gaps so divided, in order."""
    drawn = {}
    for number, (law, draw) in enumerate(_LAWS.items()):
        drawn[law] = gap_ratios(draw(np.random.default_rng([_SEED, n, number]), (TRIALS, n)))
    usual = np.stack([np.asarray(np.quantile(one, 0.99, axis=0), np.float64) for one in drawn.values()]).max(axis=0)
    usual = np.maximum(usual, usual[::-1])  # a law's mirror image is as good a law
    return usual, {law: np.sort((one / usual).max(axis=1)) for law, one in drawn.items()}


@lru_cache(maxsize=256)
def _outlier_null(n: int, law: str) -> Array:
    random = np.random.default_rng([_SEED, n, 1])
    return np.sort(outlier_statistic(_LAWS[law](random, (TRIALS, n))))


def widest_gap(values: Array) -> tuple[float, int]:
    """Chance of a gap as wide as the one that stands out most, in values of one mode, shape (n,); and how many values
    lie below it. (1, 0): there are too few."""
    ratios = gap_ratios(values[None])[0]
    if not len(ratios):
        return 1.0, 0
    usual, null = _gap_null(len(values))
    best = int(np.argmax(ratios / usual))
    statistic = float(ratios[best] / usual[best])
    return max(_chance(one, statistic) for one in null.values()), least_in_mode(len(values)) + best


def outlier_chance(statistic: float, n: int) -> float:
    """Chance of such an outlier, or one farther away, among n values of one law."""
    return max(_chance(_outlier_null(n, law), statistic) for law in _LAWS)


def _chance(null: Array, statistic: float) -> float:
    return float(1 + len(null) - np.searchsorted(null, statistic, side="left")) / (len(null) + 1)


@lru_cache(maxsize=64)
def phases(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Each (period, phase) with at least three runs in it and three beside it; periods from 2 to a third of all."""
    at = np.array(positions)
    span = int(at.max() - at.min()) + 1
    found = []
    for period in range(2, span // LEAST_IN_PHASE + 1):
        for phase in range(period):
            inside = int(np.count_nonzero(at % period == phase))
            if LEAST_IN_PHASE <= inside <= len(at) - LEAST_IN_PHASE:
                found.append((period, phase))
    return tuple(found)


@lru_cache(maxsize=64)
def _contrasts(positions: tuple[int, ...]) -> Array:
    """By phase, weights of the runs' ranks: the mean in the phase less that of all, of variance 1 by chance."""
    at, n = np.array(positions), len(positions)
    rows = []
    for period, phase in phases(positions):
        inside = at % period == phase
        many = int(inside.sum())
        spread = np.sqrt((n + 1) * (n - many) / (12.0 * many))
        rows.append((inside / many - 1.0 / n) / spread)
    return np.array(rows).reshape(-1, n)


@lru_cache(maxsize=64)
def _period_null(positions: tuple[int, ...]) -> Array:
    n = len(positions)
    random = np.random.default_rng([_SEED, n, 2])
    ranks = np.argsort(random.random((TRIALS, n)), axis=1) + 1.0
    return np.sort((ranks @ _contrasts(positions).T).max(axis=1))


def period_chance(ranks: Array, positions: tuple[int, ...]) -> tuple[float, int, int]:
    """Chance that runs of one phase are so much slower than the others, in any order of the runs.

    Args:
        ranks: Of the runs' values, shape (n,).
        positions: The runs' numbers in the order of execution.

    Returns:
        The chance, the period and the phase that stand out most; (1, 0, 0): there are too few runs for any period.
    """
    if not phases(positions):
        return 1.0, 0, 0
    scores = _contrasts(positions) @ ranks
    best = int(np.argmax(scores))
    return _chance(_period_null(positions), float(scores[best]) - 1e-9), *phases(positions)[best]


@lru_cache(maxsize=64)
def _shifts(n: int) -> tuple[Array, Array]:
    """By split of n runs in order, weights of ranks: the mean behind less the mean before, of variance 1 by chance; and
    the largest of them in random orders, in order."""
    rows = []
    for before in range(LEAST_IN_PHASE, n - LEAST_IN_PHASE + 1):
        behind = n - before
        spread = np.sqrt((n + 1) * n * n / (12.0 * before * behind))
        rows.append(np.where(np.arange(n) < before, -1.0 / before, 1.0 / behind) / spread)
    weights = np.array(rows).reshape(-1, n)
    ranks = np.argsort(np.random.default_rng([_SEED, n, 3]).random((SHIFT_TRIALS, n)), axis=1) + 1.0
    return weights, np.sort(np.abs(ranks @ weights.T).max(axis=1))


def shift_chance(ranks: Array) -> tuple[float, int]:
    """Chance of such a shift from some run on, in a random order of runs (after Pettitt 1979, with each split scaled by
    its own deviation); and how many runs are before it. (1, 0): there are too few.

    Args:
        ranks: Of the runs' values in the order of execution, shape (n,).
    """
    n = len(ranks)
    if n < 2 * LEAST_IN_PHASE:
        return 1.0, 0
    weights, null = _shifts(n)
    scores = np.abs(weights @ ranks)
    best = int(np.argmax(scores))
    return _chance(null, float(scores[best]) - 1e-9), LEAST_IN_PHASE + best


@lru_cache(maxsize=16)
def _orders(n: int) -> NDArray[np.intp]:
    return np.argsort(np.random.default_rng([_SEED, n, 4]).random((TRIALS, n)), axis=1)


def covariance_chance(one: Array, other: Array) -> float:
    """Chance of a covariance of two figures of the same runs as large as this, in random orders; shapes (n,)."""
    centred = one - one.mean()
    null = np.sort(other[_orders(len(one))] @ centred)
    return _chance(null, float(other @ centred) - 1e-12)
