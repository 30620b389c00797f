"""How much runs of one job vary, and what that says of a difference.

Two levels, as in a random-effects model: a run's mean is the unit; what its steps scatter by only gives a floor to what
run means can scatter by. Steps follow one another (a clock, a temperature, a neighbour lasts for many of them), so that
the error of a run's mean is that of means of batches of steps (Law, "Simulation Modeling and Analysis", 9.5.3), never
that of single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BATCHES = 10
"""Batches of a run's steps: 10 to 30 are advised (Schmeiser, Operations Research 30, 1982)."""
SPREAD = 0.008
"""Standard deviation of a run's step time that is assumed, over its mean. Clusters vary by 0.5 to 1.5 % from run to run
where nothing is wrong."""
SPREAD_DF = 6
"""What that assumption counts for, in degrees of freedom: as seven runs that were measured. So a spread that three
runs happen to show too small is corrected (Smyth 2004, moderated t)."""
LEAST_SPREAD = 0.002
"""Runs whose means are closer to one another than that are so by chance."""


@dataclass(frozen=True)
class Mean:
    """A figure of one run.

    Attributes:
        value: Its mean over the run's steps.
        error: Standard error of that within the run; -1: unknown.
    """

    value: float
    error: float = -1.0

    def __mul__(self, factor: float) -> Mean:
        return Mean(self.value * factor, self.error * factor if self.error >= 0 else -1.0)


@dataclass(frozen=True)
class Difference:
    """A figure of one group of runs, or of one run, against that of another group.

    Attributes:
        before, after: Means over the runs.
        change: ``after`` - ``before``.
        low, high: 95 % interval of it.
        p: Two-sided chance of such a change where there is none.
        error: Standard error of the change.
        df: Degrees of freedom behind the error.
        assumed: No side has two runs: how much runs differ was assumed, not measured.
    """

    before: float
    after: float
    change: float
    low: float
    high: float
    p: float
    error: float
    df: float
    assumed: bool


def mean_of(series: NDArray[np.float64] | Sequence[float]) -> Mean:
    """The mean of a figure of successive steps, shape (steps,), with its error by batch means; 0 steps: 0."""
    values = np.asarray(series, np.float64)
    if not len(values):
        return Mean(0.0)
    batches = min(BATCHES, len(values))
    if batches < 2:
        return Mean(float(values.mean()))
    parts = np.array([part.mean() for part in np.array_split(values, batches)])
    return Mean(float(values.mean()), float(parts.std(ddof=1) / math.sqrt(batches)))


def difference(
    before: Sequence[Mean], after: Sequence[Mean], *, spread: float = 0.0, single: bool = False
) -> Difference:
    """What two groups of runs differ by.

    Args:
        before, after: A figure of each run, at least one a side.
        spread: Standard deviation between runs that is assumed besides, over the mean, with :data:`SPREAD_DF` degrees
            of freedom; 0: only what the runs show counts.
        single: ``after`` is a new run, and nothing is concluded on how runs like it would scatter: it counts as one
            more of ``before`` (a prediction interval).
    """
    from scipy.stats import t

    first, second = (np.array([one.value for one in side]) for side in (before, after))
    base, mean = float(first.mean()), float(second.mean())
    scale = max(abs(base), abs(mean)) if not single else abs(base)
    groups = (first,) if single else (first, second)
    df = float(sum(len(group) - 1 for group in groups))
    squares = float(sum(((group - group.mean()) ** 2).sum() for group in groups))
    assumed = df == 0
    if assumed:
        spread = max(spread, SPREAD)
    if spread:
        squares += SPREAD_DF * (spread * scale) ** 2
        df += SPREAD_DF
    errors = [one.error for one in (*before, *after) if one.error >= 0]
    within = float(np.mean(np.square(errors))) if errors else 0.0
    variance = max(squares / df, within, (LEAST_SPREAD * scale) ** 2)
    error = max(math.sqrt(variance * (1 / len(first) + 1 / len(second))), 1e-9)
    change = mean - base
    half = float(t.ppf(0.975, df)) * error
    p = float(2 * t.sf(abs(change) / error, df))
    return Difference(base, mean, change, change - half, change + half, p, error, df, assumed)


def runs_needed(found: Difference, least: float, runs: int, level: float) -> int:
    """With how many runs a side the difference would be decided, if runs scatter as they do: it is then either beyond
    its error, or surely less than ``least``. At most 100."""
    from scipy.stats import t

    deviation = found.error / math.sqrt(2 / runs)
    for count in range(runs + 1, 100):
        error, df = deviation * math.sqrt(2 / count), max(2 * count - 2, 1)
        if abs(found.change) >= least and abs(found.change) >= float(t.ppf(1 - level / 2, df)) * error:
            return count
        if abs(found.change) + float(t.ppf(0.95, df)) * error < least:
            return count
    return 100


def w1(first: Sequence[float], second: Sequence[float]) -> float:
    """Distance of two distributions over the mean of the first: the area between their quantile functions
    (Vallender 1974). Both have the same points."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return float(np.abs(one - other).mean() / max(abs(float(one.mean())), 1.0))
