"""Hosts: one whose ranks compute slower than those of the run's other hosts, as after it was swapped."""

from __future__ import annotations

from collections.abc import Mapping

from argus.compare.comparer import Figure, Side
from argus.diagnose.read.profile import COMMUNICATION, COMPUTE
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """How much longer the ranks of a run's slowest host compute than those of its fastest: what differs between stages
    of a pipeline does on both sides."""
    if any(len(profile.computed) < 2 for profile in (*before, *after)):
        return []
    name, note = _named(before, after)
    return [
        Figure(
            "host", name, [_lag(profile.computed) for profile in before], [_lag(profile.computed) for profile in after],
            f"ranks on {name} compute longer than those of the fastest host",
            explains=("gpu_speed", *(f"phase {phase}" for phase in (*COMPUTE, *COMMUNICATION))), note=note,
        )
    ]  # fmt: skip


def _lag(computed: Mapping[str, Mean]) -> Mean:
    slowest, fastest = max(computed.values(), key=_value), min(computed.values(), key=_value)
    known = slowest.error >= 0 and fastest.error >= 0
    return Mean(slowest.value - fastest.value, (slowest.error**2 + fastest.error**2) ** 0.5 if known else -1.0)


def _value(mean: Mean) -> float:
    return mean.value


def _named(before: Side, after: Side) -> tuple[str, str]:
    """The host that the change is about, on the side where hosts differ more, and whether the other side has it."""
    slower = sum(_lag(one.computed).value for one in after) / len(after)
    faster = slower < sum(_lag(one.computed).value for one in before) / len(before)
    chosen, others = (before, after) if faster else (after, before)
    slowest = [max(one.computed, key=lambda host, one=one: one.computed[host].value) for one in chosen]  # type: ignore[misc]
    name = max(dict.fromkeys(slowest), key=slowest.count)
    known = {host for profile in others for host in profile.hosts}
    if name in known:
        return name, ""
    gone = sorted(known - {host for profile in chosen for host in profile.hosts})
    side = "after" if faster else "before"
    return name, f"it is not among the hosts {side}" + (f", which have {', '.join(gone[:3])} instead" if gone else "")
