"""Collections of garbage, where stacks were sampled."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side, felt, mean_change, of_all
from argus.diagnose.read.profile import COMMUNICATION

_SHOWN = ("idle", "other", *COMMUNICATION)
_EXPLAINED = ("void", *(f"phase {phase}" for phase in _SHOWN))


def figures(before: Side, after: Side) -> list[Figure]:
    """What they take of a step, as far as the step feels it."""
    first, second = of_all(before, "collections"), of_all(after, "collections")
    if first is None or second is None:
        return []
    share = felt(before, after, mean_change(first, second), _SHOWN) if any(one.phases for one in before) else 1.0
    return [Figure("collections", "", first, second, "collections of garbage", share, _EXPLAINED)]
