"""Waiting for a CPU: other programs on the host, or too few CPUs for the job."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side, felt, mean_change, of_all
from argus.diagnose.read.profile import COMMUNICATION

_SHOWN = ("idle", "other", *COMMUNICATION)
_EXPLAINED = ("void", *(f"phase {phase}" for phase in _SHOWN))


def figures(before: Side, after: Side) -> list[Figure]:
    """What the training threads wait of a step."""
    first, second = of_all(before, "runqueue"), of_all(after, "runqueue")
    if first is None or second is None:
        return []
    share = felt(before, after, mean_change(first, second), _SHOWN) if any(one.phases for one in before) else 1.0
    return [Figure("runqueue", "", first, second, "training threads wait for a CPU", share, _EXPLAINED)]
