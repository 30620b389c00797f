"""OOM kills: processes that the kernel killed for want of memory."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result, numbers
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(1, "kills since the last hour's first look: warning", "each is a process that somebody misses"),
}


def check(look: Look) -> Result:
    """Reads oom_kill of /proc/vmstat (Linux 4.13), which counts those of containers, too."""
    found = look.found()
    lines = dict(numbers(look.read("proc/vmstat")))
    if "oom_kill" not in lines:
        raise Absent("the kernel counts no OOM kills (it does from 4.13 on)")
    found.figures["kills_total"] = float(lines["oom_kill"])
    rise = look.moved(found.figures, "kills_total") or 0.0
    if rise >= look.limits["warning"]:
        found.warning(
            f"{rise:.0f} processes killed for want of memory {look.since()}", "See which: dmesg | grep -i oom."
        )
    return found.result(f"{found.figures['kills_total']:.0f} since boot")
