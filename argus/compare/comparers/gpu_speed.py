"""All kernels slower alike: clocks, temperature, power, another GPU."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side
from argus.compare.comparers.speed import FEWEST, common_kernels, speed
from argus.diagnose.read.profile import COMPUTE, Profile
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """What the computation of a step takes at the speed of each run's kernels."""
    common = common_kernels(before, after)
    if len(common) < FEWEST:
        return []
    computed = sum(one.phase_ns(COMPUTE) for one in before) / len(before)

    def taken(profile: Profile) -> Mean:
        return Mean(computed * speed(profile, before[0], common))

    return [
        Figure(
            "gpu_speed", "", [taken(one) for one in before], [taken(one) for one in after],
            "computation, at the speed that all kernels have", explains=tuple(f"phase {phase}" for phase in COMPUTE),
        )
    ]  # fmt: skip
