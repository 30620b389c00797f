"""Memory: whether the node itself is short of it, or only a control group or a process."""

from __future__ import annotations

from argus.health.check import Absent, Blind, Look, numbers
from argus.health.limit import Limit

AVAILABLE = Limit(
    0.05,
    "available share of memory: below, the node is short of it",
    "else a control group's own limit is why, and any user may set one of his (memory.high)",
)
"""The threshold ``available`` of checks that ask ``is_short``."""


def is_short(look: Look) -> bool:
    """Whether the whole node is, as far as is known: pressure and swap also count what only a control group's limit, or
    a process's own wish, is the cause of. Direct reclaim (``allocstall``) does not show it: reading a large file makes
    some."""
    try:
        memory = dict(numbers(look.read("proc/meminfo")))
        return memory["MemAvailable"] < float(look.limits["available"]) * memory["MemTotal"]
    except (Absent, Blind, KeyError):
        return False
