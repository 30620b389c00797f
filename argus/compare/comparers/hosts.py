"""Hosts: one whose ranks compute slower than those of the run's other hosts, as after it was swapped."""

from __future__ import annotations

from collections.abc import Mapping

from argus.compare.comparer import Figure, Side, mean_change
from argus.diagnose.read.profile import COMMUNICATION, COMPUTE, Profile
from argus.diagnose.variation import Mean


def figures(before: Side, after: Side) -> list[Figure]:
    """How much longer the slowest rank of a run's slowest host computes than that of its fastest, since all wait for
    it; of one host, than its ranks do on average. What differs between stages of a pipeline does on both sides."""
    runs = (*before, *after)
    known = all(one.slowest for one in runs)
    several = all(len(one.computed) > 1 for one in runs)
    if not several and not (known and all(len(one.computed) == 1 for one in runs)):
        return []
    lags = [_lag(one.slowest if known else one.computed) if several else _lag_inside(one) for one in runs]
    first, second = lags[: len(before)], lags[len(before) :]
    faster = mean_change(first, second) < 0
    name, note = _named(*((before, after) if faster else (after, before)), faster, known)
    than = "those of the fastest host" if several else "the others on it"
    return [
        Figure(
            "host", name, first, second, f"ranks on {name} compute longer than {than}",
            explains=("gpu_speed", *(f"phase {phase}" for phase in (*COMPUTE, *COMMUNICATION))), note=note,
        )
    ]  # fmt: skip


def _lag_inside(one: Profile) -> Mean:
    (slowest,), (usual,) = one.slowest.values(), one.computed.values()
    return Mean(slowest.value - usual.value, slowest.error)


def _lag(computed: Mapping[str, Mean]) -> Mean:
    slowest, fastest = max(computed.values(), key=_value), min(computed.values(), key=_value)
    known = slowest.error >= 0 and fastest.error >= 0
    return Mean(slowest.value - fastest.value, (slowest.error**2 + fastest.error**2) ** 0.5 if known else -1.0)


def _value(mean: Mean) -> float:
    return mean.value


def _named(chosen: Side, others: Side, faster: bool, known: bool) -> tuple[str, str]:
    """The host that the change is about, of the side whose hosts differ more; and a note: which rank of it, and whether
    the other side has it."""
    computed = [one.slowest if known else one.computed for one in chosen]
    slowest = [max(one, key=lambda host, one=one: one[host].value) for one in computed]  # type: ignore[misc]
    name = max(dict.fromkeys(slowest), key=slowest.count)
    ranks = {one.slowest_ranks[name] for one in chosen if name in one.slowest_ranks}
    notes = [f"most of all rank {ranks.pop()}"] if known and len(ranks) == 1 else []
    elsewhere = {host for profile in others for host in profile.hosts}
    if name not in elsewhere:
        gone = sorted(elsewhere - {host for profile in chosen for host in profile.hosts})
        side = "after" if faster else "before"
        instead = f", which have {', '.join(gone[:3])} instead" if gone else ""
        notes.append(f"it is not among the hosts {side}{instead}")
    return name, "; ".join(notes)
