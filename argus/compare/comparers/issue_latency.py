"""Issue latency: how far the CPU launches ahead of the GPU, by its distribution, as Flare compares it."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side, of_all
from argus.diagnose.variation import w1


def figures(before: Side, after: Side) -> list[Figure]:
    """The median of a step. It costs nothing itself: where it shrinks to nothing the GPU starves, which is void."""
    first, second = of_all(before, "issue_latency"), of_all(after, "issue_latency")
    if first is None or second is None:
        return []
    distances = [w1(one.latencies, other.latencies) for one in before for other in after if one.latencies]
    among = [w1(one.latencies, other.latencies) for one in before for other in before if one.run != other.run]
    note = ""
    if distances:
        note = f"distributions differ by {sum(distances) / len(distances):.1%} of the mean (W1)"
        note += f", those of the runs before among each other by {max(among):.1%} at most" if among else ""
    return [Figure("issue_latency", "", first, second, "issue latency of kernels, median", 0.0, note=note)]
