"""Void: time in which a GPU is idle and no batch is waited for (Flare's void percentage)."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side
from argus.diagnose.read.profile import COMMUNICATION, Profile
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """Idle time of the GPUs in a step, without what its phases give to loading."""
    if any(profile.clock != "gpu" for profile in (*before, *after)):
        return []
    shares = [sum(one.figures["void"].value for one in side if "void" in one.figures) / len(side)
              for side in (before, after)]  # fmt: skip
    return [
        Figure(
            "void", "", [_idle(one) for one in before], [_idle(one) for one in after], "GPUs are idle",
            explains=("phase idle", *(f"phase {phase}" for phase in COMMUNICATION)),
            note=f"void is {shares[0]:.1%} of a step before, {shares[1]:.1%} after",
        )
    ]  # fmt: skip


def _idle(profile: Profile) -> Mean:
    return profile.phases.get("idle", Mean(0.0))
