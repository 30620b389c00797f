"""The tail of steps: some that take much longer than the others, which the mean hardly shows."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side
from argus.diagnose.read.profile import Profile, step_tail
from argus.diagnose.variation import Mean

LEAST = 0.1
"""Share by which the 99th percentile must change: that of a few hundred steps scatters."""
FEWEST_RUNS = 3
"""Runs of one side at least: how much tails of runs scatter, nobody knows without."""


def figures(before: Side, after: Side) -> list[Figure]:
    """The 99th percentile of a step, after what its median changed by was taken out. It costs nothing itself: what is
    longer by it is in the mean step, and in what the long steps wait for."""
    if max(len(before), len(after)) < FEWEST_RUNS:
        return []
    tails = [[step_tail(one) for one in side] for side in (before, after)]
    if any(tail is None for side in tails for tail in side):
        return []
    usual, now = (sum(map(_median, side)) / len(side) for side in (before, after))
    first, second = ([Mean((tail or 0.0) * usual) for tail in side] for side in tails)
    note = f"the median changed by {now / usual - 1:+.1%}"
    return [Figure("step_tail", "", first, second, "99th percentile of a step", 0.0, note=note, least=LEAST)]


def _median(profile: Profile) -> float:
    return profile.figures["step_median"].value
