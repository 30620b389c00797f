"""Whether other programs use the CPUs of a node. A thread that shares its core or its caches computes more slowly, also
where it never has to wait for a CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.causes.cpu_time import HALF
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Evidence

BUSY = 0.85
"""Share of all CPU time from which on threads share cores: two hardware threads of one core are each up to half as fast
while both compute."""
SHARED = 0.5
"""Share of all CPU time from which on two hardware threads of one core compute at the same time, now and then."""
OTHERS = 0.1
"""Share of all CPU time that other programs must take to be named as the reason."""
REFERENCES = 16
"""Ranks of which it is asked whether their CUDA calls are stored."""
SLOWED = 1.0
"""Times its own work that a rank may be later by and still be explained so."""
SPINNING = 0.9
"""Share of the time from which on ranks that wait for others seem not to sleep meanwhile."""


@dataclass(frozen=True)
class Crowd:
    """What else runs.

    Attributes:
        text: In words.
        evidence: The same with its query.
        action: What to do.
    """

    text: str
    evidence: Evidence
    action: str


def find_crowd(query: Query, params: Mapping[str, Any], hosts: Collection[str]) -> Crowd | None:
    """Other programs that keep the CPUs of a node busy, or the hypervisor, which takes them away; None: there are none,
    or nothing is known of it.

    Args:
        query: Runs SQL with parameters.
        params: job, run, and the steps: first, last.
        hosts: Nodes that are asked about.
    """
    usage, at = _usage(query, params, hosts)
    for host, (busy, others, stolen) in usage.items():
        if busy < BUSY or others < OTHERS:
            continue
        text = f"the CPUs of {host} are busy for {busy:.0%} of the time, other programs take {others - stolen:.0%}"
        if stolen >= OTHERS / 2:
            text += f", the hypervisor {stolen:.0%}"
        text += ": shared cores and caches make a step's work slower on the CPU"
        return Crowd(
            text,
            {"text": text, "sql": runnable_sql(queries.HOST_CPU, at)},
            f"Find out what else runs on {host} (top), and give the job CPUs of its own (taskset, cpuset, requests and "
            "limits that are equal).",
        )
    return None


def may_slow(query: Query, params: Mapping[str, Any], ranks: Collection[int], late_ns: float, step_ns: float) -> bool:
    """Whether ranks are late by work on their CPUs, which other programs can slow, and not asleep.

    A rank whose work takes longer is on a CPU, or waits for one, for longer than the others, by half of its lateness at
    least; unless the others spin where they wait for it, and so are never off it. Nor does it sleep, or wait for a
    disk, for longer by as much.

    Args:
        query: Runs SQL with parameters.
        params: job, run, first, last (steps); ranks: the late ones and those that they are compared with.
        ranks: The late ones.
        late_ns: How late they are, ns a step.
        step_ns: What a step takes.

    Returns:
        True as well where it is not known what threads did.
    """
    if late_ns > SLOWED * (step_ns - late_ns):
        return False
    span = query(queries.SPAN_NS, dict(params))
    if not len(span["end_ns"]) or not int(span["steps"][0]):
        return True
    at = {**params, "from_ns": int(span["begin_ns"][0]), "to_ns": int(span["end_ns"][0])}
    asleep = _compared(query(queries.ASLEEP, at), ranks)
    if asleep is not None and (asleep[0] - asleep[1]) * step_ns >= HALF * late_ns:
        return False
    worked = _compared(query(queries.WORKED, at), ranks)
    return worked is None or worked[1] >= SPINNING or (worked[0] - worked[1]) * step_ns >= HALF * late_ns


def _compared(shares: Mapping[str, NDArray[Any]], ranks: Collection[int]) -> tuple[float, float] | None:
    """Shares of time of these ranks and of the others, the median of each; None: not known of both."""
    slow = np.isin(shares["rank"], list(ranks))
    if not slow.any() or slow.all():
        return None
    return float(np.median(shares["share"][slow])), float(np.median(shares["share"][~slow]))


def find_increase(
    query: Query, params: Mapping[str, Any], hosts: Collection[str], spans: tuple[tuple[int, int], tuple[int, int]]
) -> Evidence | None:
    """Other programs that take more of a node's CPUs than before, where its cores are shared; None: they do not, or
    nothing is known of it.

    Args:
        query: Runs SQL with parameters.
        params: job, run.
        hosts: Nodes that are asked about.
        spans: First and last step before, and since.
    """
    (before, _), (since, at) = (
        _usage(query, {**params, "first": first, "last": last}, hosts) for first, last in spans
    )  # fmt: skip
    for host, (busy, others, _) in since.items():
        if host in before and busy >= SHARED and others - before[host][1] >= OTHERS:
            text = f"other programs take {others:.0%} of the CPUs of {host}, and took {before[host][1]:.0%} before: "
            text += "shared cores and caches make a step's work slower on the CPU"
            return {"text": text, "sql": runnable_sql(queries.HOST_CPU, at)}
    return None


def _usage(
    query: Query, params: Mapping[str, Any], hosts: Collection[str]
) -> tuple[dict[str, tuple[float, float, float]], dict[str, Any]]:
    """Shares of a node's CPU time by host: busy, taken by other programs, taken by the hypervisor; and the query's
    parameters."""
    span = query(queries.SPAN_NS, dict(params))
    if not hosts or not len(span["end_ns"]) or not int(span["steps"][0]):
        return {}, {}
    at = {**params, "hosts": sorted(hosts), "from_ns": int(span["begin_ns"][0]), "to_ns": int(span["end_ns"][0])}
    rows = query(queries.HOST_CPU, at)
    columns = (rows[name] for name in ("host", "busy", "others", "stolen"))
    return {host: (busy, others, stolen) for host, busy, others, stolen in zip(*columns, strict=True)}, at


def explain_crowded_jitter(query: Query, params: Mapping[str, Any], stalls: Suspect, nodes: Mapping[int, str]) -> None:
    """Turns stalls into ``host_contention`` where the job computes on CPUs that other programs keep busy.

    Args:
        query: Runs SQL with parameters.
        params: job, run.
        stalls: Changed in place.
        nodes: Node of each rank.
    """
    window = {**params, "first": stalls.since, "last": stalls.last}
    some = stalls.ranks or sorted(nodes)[:REFERENCES]
    if stalls.kind != "jitter" or len(query(queries.CPU_TIME, {**window, "ranks": some})["rank"]):
        return
    if (crowd := find_crowd(query, window, set(stalls.hosts) or set(nodes.values()))) is not None:
        stalls.kind = "host_contention"
        stalls.further.append(crowd.evidence)
        stalls.action = crowd.action
