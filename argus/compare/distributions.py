"""Distributions of the kernels that take longest: durations of single launches, rebuilt from what is stored of them."""

from __future__ import annotations

from dataclasses import replace

from argus.diagnose.kernels.distributions import by_distribution
from argus.diagnose.read import queries
from argus.diagnose.read.profile import Profile
from argus.diagnose.read.query import Query

LONGEST = 12
"""Kernels whose distributions are read, those that take longest: three queries each."""
STEPS = 20
"""Newest steps that they are of, on eight ranks at most."""


def with_distributions(query: Query, profile: Profile) -> Profile:
    """The profile with quantiles of its longest kernels' launches, the mean of its ranks'.

    Raises:
        ArgusError: The store cannot be asked.
    """
    if not profile.kernels:
        return profile
    params = {"job": profile.job, "run": profile.run}
    rows = query(queries.RUN_LAST, params)
    ranks, last = list(rows["ranks"][0]), int(rows["last"][0])
    if not ranks:
        return profile
    window = {**params, "first": max(0, last - STEPS + 1), "last": last}
    kernels = dict(profile.kernels)
    for name in sorted(kernels, key=lambda one: -kernels[one].spent_ns.value)[:LONGEST]:
        known, quantiles = by_distribution(query, window, kernels[name].kernel_id, ranks)
        if len(known):
            kernels[name] = replace(kernels[name], quantiles=tuple(quantiles.mean(axis=0).tolist()))
    return replace(profile, kernels=kernels)
