"""Whether other programs use the CPUs of a node. A thread that shares its core or its caches computes more slowly, also
where it never has to wait for a CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from argus.diagnose import sql
from argus.diagnose.verdict import Evidence

BUSY = 0.85
"""Share of all CPU time from which on threads share cores: two hardware threads of one core are each up to half as fast
while both compute."""
OTHERS = 0.1
"""Share of all CPU time that other programs must take to be named as the reason."""
SLOWED = 1.0
"""Times its own work that a rank may be later by and still be explained so."""


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


def find_crowd(query: sql.Query, params: Mapping[str, Any], hosts: Collection[str]) -> Crowd | None:
    """Other programs that keep the CPUs of a node busy, or the hypervisor, which takes them away; None: there are none,
    or nothing is known of it.

    Args:
        query: Runs SQL with parameters.
        params: job, run, and the steps: first, last.
        hosts: Nodes that are asked about.
    """
    span = query(sql.SPAN_NS, dict(params))
    if not hosts or not len(span["end_ns"]) or not int(span["steps"][0]):
        return None
    at = {**params, "hosts": sorted(hosts), "from_ns": int(span["begin_ns"][0]), "to_ns": int(span["end_ns"][0])}
    found = query(sql.HOST_CPU, at)
    for host, busy, others, stolen in zip(*(found[name] for name in ("host", "busy", "others", "stolen")), strict=True):
        if busy < BUSY or others < OTHERS:
            continue
        text = f"the CPUs of {host} are busy for {busy:.0%} of the time, other programs take {others - stolen:.0%}"
        if stolen >= OTHERS / 2:
            text += f", the hypervisor {stolen:.0%}"
        text += ": shared cores and caches make a step's work slower on the CPU"
        return Crowd(
            text,
            {"text": text, "sql": sql.shown(sql.HOST_CPU, at)},
            f"Find out what else runs on {host} (top), and give the job CPUs of its own (taskset, cpuset, requests and "
            "limits that are equal).",
        )
    return None
