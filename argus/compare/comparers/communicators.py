"""Communicators: what they take for the same bytes. The time is that of the rank that waited for nobody."""

from __future__ import annotations

from argus.compare.comparer import Figure, Side, felt
from argus.diagnose.read.profile import COMMUNICATION, Profile
from argus.diagnose.variation import Mean
from argus.model.units import bandwidth
from argus.model.units import size as size_text

OF = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all",
    "Broadcast": "broadcast", "Reduce": "reduce", "SendRecv": "send_recv",
}  # fmt: skip
"""The phase of a GPU that an operation is seen in."""


def figures(before: Side, after: Side) -> list[Figure]:
    """Of each communicator's operation that all runs have: the time that the bytes of the first run take. The step
    feels of it what its phase became longer."""
    out = []
    common = set.intersection(*(set(profile.transfers) for profile in (*before, *after)))
    grown: dict[str, float] = {}
    for name in common:
        grown[name] = _mean([one.transfers[name].transfer_ns.value for one in after]) - _mean(
            [one.transfers[name].transfer_ns.value for one in before]
        )
    for name in sorted(common):
        dimension, op = name.split(" ", 1)
        size = before[0].transfers[name].bytes
        phase = OF.get(op, "communication")
        together = sum(other for key, other in grown.items() if OF.get(key.split(" ", 1)[1], "communication") == phase)
        share = felt(before, after, together, (phase,))
        speeds = [bandwidth(_bytes_per_s(one, name)) for one in (before[0], after[0])]
        out.append(
            Figure(
                "bandwidth", name, [_for_bytes(one, name, size) for one in before],
                [_for_bytes(one, name, size) for one in after], f"{op} of {dimension}, {size_text(size)} a step",
                share, tuple(f"phase {one}" for one in COMMUNICATION),
                note=f"{speeds[0]} before, {speeds[1]} after" if size else "",
            )
        )  # fmt: skip
    return out


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _for_bytes(profile: Profile, name: str, size: float) -> Mean:
    one = profile.transfers[name]
    return one.transfer_ns * (size / one.bytes if one.bytes and size else 1.0)


def _bytes_per_s(profile: Profile, name: str) -> float:
    one = profile.transfers[name]
    return 1e9 * one.bytes / max(one.transfer_ns.value, 1.0)
