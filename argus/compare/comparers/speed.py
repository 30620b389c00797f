"""How fast all kernels of a run are together. A GPU that is hot or has lower clocks is slower in all that computes:
runs differ in that by more than in anything else, so single kernels are compared without it."""

from __future__ import annotations

import numpy as np

from argus.compare.comparer import Side
from argus.diagnose.read.profile import Profile

FEWEST = 3
"""Kernels that all runs must have."""


def common_kernels(before: Side, after: Side) -> list[str]:
    """Kernels that all runs of both sides launch."""
    first, *others = [set(profile.kernels) for profile in (*before, *after)]
    return sorted(first.intersection(*others))


def speed(profile: Profile, reference: Profile, kernels: list[str]) -> float:
    """How many times as long a launch takes as in another run: the median over kernels, which one or two that changed
    do not move. 1 where they have too few in common."""
    if len(kernels) < FEWEST:
        return 1.0
    ratios = [_launch_ns(profile, name) / max(_launch_ns(reference, name), 1e-9) for name in kernels]
    return float(np.median(ratios))


def _launch_ns(profile: Profile, name: str) -> float:
    kernel = profile.kernels[name]
    return kernel.spent_ns.value / max(kernel.launches, 1e-9)
