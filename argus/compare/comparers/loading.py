"""Loading: what a step waits for its batch, on the GPU where that is observed, else on the CPU."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side
from argus.diagnose.read.profile import COMMUNICATION
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """The phase ``data_loading``; ranks that wait for others' batches do so in collectives."""
    clocks = {profile.clock for profile in (*before, *after)}
    if len(clocks) != 1 or clocks == {""}:
        return []
    first, second = ([one.phases.get("data_loading", Mean(0.0)) for one in side] for side in (before, after))
    if not any(mean.value for mean in (*first, *second)):
        return []
    explains = ("phase data_loading", *(f"phase {phase}" for phase in COMMUNICATION))
    return [Figure("data_loading", "", first, second, "waiting for the next batch", explains=explains)]
