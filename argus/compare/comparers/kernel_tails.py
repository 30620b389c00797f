"""Tails of kernels: launches that now and then take much longer, which the median hides and the mean hardly shows."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side
from argus.compare.comparers.speed import common_kernels
from argus.diagnose.read.profile import Profile
from argus.diagnose.variation import Mean

LEAST = 0.25
"""Share by which a 99th percentile must change: that of a few hundred launches scatters."""
ALIKE = 0.1
"""Share by which a median may differ. More is a slower kernel, or launches of other sizes."""
FEWEST_RUNS = 2
"""Runs of a side: how much tails of runs scatter, nobody knows without."""


def figures(before: Side, after: Side) -> list[Figure]:
    """The 99th percentile of each kernel whose launches' durations were read of all runs, after what its median changed
    by was taken out. It costs nothing itself: what is longer by it is in the kernel's time, and in others' waiting."""
    if min(len(before), len(after)) < FEWEST_RUNS:
        return []
    out = []
    for name in common_kernels(before, after):
        if any(not one.kernels[name].quantiles for one in (*before, *after)):
            continue
        usual = sum(_median(one, name) for one in before) / len(before)
        first, second = ([Mean(_tail(one, name) * usual) for one in side] for side in (before, after))
        grown = sum(_median(one, name) for one in after) / len(after) / usual - 1
        if abs(grown) > ALIKE:
            continue
        note = f"the median of a launch changed by {grown:+.1%}"
        out.append(
            Figure(
                "kernel_tail", name, first, second, f"99th percentile of a launch of kernel {name}", 0.0, note=note,
                least=LEAST,
            )
        )  # fmt: skip
    return out


def _median(profile: Profile, name: str) -> float:
    values = profile.kernels[name].quantiles
    return max(values[len(values) // 2], 1.0)


def _tail(profile: Profile, name: str) -> float:
    """The 99th percentile over the median: the highest of 64 points is the 99.2nd."""
    return profile.kernels[name].quantiles[-1] / _median(profile, name)
