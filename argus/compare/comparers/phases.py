"""Phases of a step: what became longer where nothing more specific did."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """Each phase, of GPUs where all runs have theirs, else of CPUs."""
    clocks = {profile.clock for profile in (*before, *after)}
    if len(clocks) != 1 or clocks == {""}:
        return []
    names = sorted({name for profile in (*before, *after) for name in profile.phases})
    where = "on the GPU" if clocks == {"gpu"} else "on the CPU"
    return [
        Figure(
            "phase", name, [one.phases.get(name, Mean(0.0)) for one in before],
            [one.phases.get(name, Mean(0.0)) for one in after], f"{name} {where}",
        )
        for name in names
    ]  # fmt: skip
