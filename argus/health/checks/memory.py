"""Memory: what is available, and whether all of it is there."""

from __future__ import annotations

from argus.health.check import Look, Result, numbers
from argus.health.limit import Limit
from argus.model.units import binary_size

LIMITS: dict[str, Limit] = {
    "warning": Limit(
        0.05,
        "available share: warning below",
        "the kernel reclaims in the foreground soon after (min_free_kbytes, watermarks)",
    ),
    "critical": Limit(0.02, "available share: critical below", "at this point the OOM killer is near"),
    "total_gib": Limit(
        0.0,
        "memory that the node must have, GiB; 0: not checked",
        "a DIMM that failed is switched off by the firmware at the next boot",
    ),
}


def check(look: Look) -> Result:
    """Reads /proc/meminfo. 4 % below ``total_gib`` passes: firmware and kernel keep that much."""
    found = look.found()
    lines = dict(numbers(look.read("proc/meminfo")))
    total, free = lines["MemTotal"] << 10, lines["MemAvailable"] / lines["MemTotal"]
    found.figures |= {"total_gib": total / (1 << 30), "available_share": free}
    text = f"{free:.1%} of {binary_size(total)} available"
    found.above(-free, -look.limits["warning"], -look.limits["critical"], text, "See what uses it: ps aux --sort -rss.")
    expected = look.limits["total_gib"] * (1 << 30)
    if total < 0.96 * expected:
        missing = f"{binary_size(total)} of {binary_size(expected)} are there"
        found.critical(missing, "A DIMM may be switched off: dmidecode -t memory, and the BMC's log.")
    return found.result(text)
