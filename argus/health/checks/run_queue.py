"""Run queue: how long tasks that could run waited for a CPU."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(
        1.0, "seconds waited in each second of a CPU: warning", "on average one more task waits at every CPU"
    ),
}


def check(look: Look) -> Result:
    """Reads the eighth field of each CPU in /proc/schedstat, ns (Documentation/scheduler/sched-stats.rst)."""
    found = look.found()
    try:
        text = look.read("proc/schedstat")
    except Absent:
        raise Absent("the kernel counts no waits (CONFIG_SCHEDSTATS)") from None
    waits = [
        int(words[8]) for line in text.splitlines() if (words := line.split())[0].startswith("cpu") and len(words) > 8
    ]
    found.figures["wait_s_total"] = sum(waits) / 1e9
    rise = look.moved(found.figures, "wait_s_total")
    if rise is None or not waits:
        return found.result("first look: counting from here")
    share = rise / len(waits) / max(look.span_s, 1.0)
    found.figures["wait_share"] = share
    waited = f"tasks waited {share:.2f} s a second of each CPU {look.since()}"
    if share >= look.limits["warning"]:
        found.warning(waited, "More tasks than CPUs: fewer workers, or find the stranger: top.")
    return found.result(waited)
