"""Kernels: slower ones beyond what all kernels of the run are, more launches of one, new and gone ones."""

from __future__ import annotations

from collections.abc import Sequence

from argus.compare.comparer import Figure, Side
from argus.compare.comparers.speed import common_kernels, speed
from argus.diagnose.read.profile import COMPUTE, Profile
from argus.diagnose.variation import Mean, w1

_PHASES = tuple(f"phase {phase}" for phase in COMPUTE)


def figures(before: Side, after: Side) -> list[Figure]:
    """Time of each kernel in a step. A kernel that no run of one side has is a figure of its own."""
    if any(not profile.kernels for profile in (*before, *after)):
        return []
    common = common_kernels(before, after)
    factor = [[speed(one, before[0], common) for one in side] for side in (before, after)]
    out = []
    for name in common:
        launches = [_launches(side, name) for side in (before, after)]
        more = launches[1] / max(launches[0], 1e-9)
        often = f"{more:.2f} times as many launches" if abs(more - 1) > 0.02 else ""
        out.append(
            Figure(
                "kernel", name, _spent(before, name, factor[0]), _spent(after, name, factor[1]), f"kernel {name}",
                explains=_PHASES, note="; ".join(filter(None, [often, _distance(before, after, name)])),
            )
        )  # fmt: skip
    gone = set.intersection(*(set(one.kernels) for one in before)) - set().union(*(set(one.kernels) for one in after))
    new = set.intersection(*(set(one.kernels) for one in after)) - set().union(*(set(one.kernels) for one in before))
    for name in sorted(new | gone):
        out.append(
            Figure(
                "new_kernel", name, _spent(before, name, factor[0]), _spent(after, name, factor[1]), f"kernel {name}",
                explains=_PHASES, note="only after" if name in new else "only before",
            )
        )  # fmt: skip
    return out


def _distance(before: Side, after: Side, name: str) -> str:
    """How far the durations of its launches lie apart, a clause; empty: they were not read."""
    first, second = ([one.kernels[name].quantiles for one in side] for side in (before, after))
    if not all(first) or not all(second):
        return ""
    apart = [w1(one, other) for one in first for other in second]
    among = [w1(one, other) for one in first for other in first if one is not other]
    text = f"durations of a launch differ by {sum(apart) / len(apart):.1%} of the mean (W1)"
    return text + (f", those of the runs before among each other by {max(among):.1%} at most" if among else "")


def _launches(side: Side, name: str) -> float:
    return sum(one.kernels[name].launches for one in side) / len(side)


def _spent(side: Side, name: str, factors: Sequence[float]) -> list[Mean]:
    def of(profile: Profile, factor: float) -> Mean:
        return profile.kernels[name].spent_ns * (1 / factor) if name in profile.kernels else Mean(0.0)

    return [of(profile, factor) for profile, factor in zip(side, factors, strict=True)]
