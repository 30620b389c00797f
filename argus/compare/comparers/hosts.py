"""Hosts: one whose ranks compute slower than those of the run's other hosts, as after it was swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from argus.compare.comparer import Figure, Side
from argus.diagnose.read.profile import COMMUNICATION, COMPUTE
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """How much longer the slowest rank of a run's slowest host computes than that of its fastest, since all wait for
    it: what differs between stages of a pipeline does on both sides."""
    runs = (*before, *after)
    each = [one.slowest for one in runs] if all(one.slowest for one in runs) else [one.computed for one in runs]
    if any(len(one) < 2 for one in each):
        return []
    first, second = each[: len(before)], each[len(before) :]
    name, note = _named(before, after, first, second)
    return [
        Figure(
            "host", name, [_lag(one) for one in first], [_lag(one) for one in second],
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


def _named(
    before: Side, after: Side, first: Sequence[Mapping[str, Mean]], second: Sequence[Mapping[str, Mean]]
) -> tuple[str, str]:
    """The host that the change is about, on the side where hosts differ more; which rank of it, and whether the other
    side has it."""
    slower = sum(_lag(one).value for one in second) / len(second)
    faster = slower < sum(_lag(one).value for one in first) / len(first)
    chosen, others, computed = (before, after, first) if faster else (after, before, second)
    slowest = [max(one, key=lambda host, one=one: one[host].value) for one in computed]  # type: ignore[misc]
    name = max(dict.fromkeys(slowest), key=slowest.count)
    ranks = {one.slowest_ranks[name] for one in chosen if name in one.slowest_ranks}
    notes = [f"most of all rank {ranks.pop()}"] if len(ranks) == 1 else []
    known = {host for profile in others for host in profile.hosts}
    if name not in known:
        gone = sorted(known - {host for profile in chosen for host in profile.hosts})
        side = "after" if faster else "before"
        notes.append(
            f"it is not among the hosts {side}" + (f", which have {', '.join(gone[:3])} instead" if gone else "")
        )
    return name, "; ".join(notes)
