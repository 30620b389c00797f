"""Swap: pages moved between memory and disk."""

from __future__ import annotations

from argus.health.check import Look, Result, numbers
from argus.health.checks._memory import AVAILABLE, is_short
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(
        100.0,
        "pages a second, in and out: warning",
        "0.4 MB/s: a training job is to swap nothing; less is old pages that leave once",
    ),
    "critical": Limit(
        10000.0,
        "pages a second, in and out: critical, if the node itself is short of memory",
        "40 MB/s: steps wait for it",
    ),
    "available": AVAILABLE,
}

_HINT = "If memory is free, a control group is at its limit (systemd-cgtop -m), or a process swaps its own pages."


def check(look: Look) -> Result:
    """Reads pswpin and pswpout of /proc/vmstat."""
    found = look.found()
    lines = dict(numbers(look.read("proc/vmstat")))
    found.figures["pages_total"] = lines["pswpin"] + lines["pswpout"]
    rise = look.moved(found.figures, "pages_total")
    if rise is None:
        return found.result("first look: counting from here")
    rate = rise / max(look.span_s, 1.0)
    found.figures["pages_per_s"] = rate
    text = f"{rate:.0f} pages a second swapped {look.since()}"
    if rate < look.limits["warning"]:
        return found.result(text)
    if is_short(look):
        say = found.critical if rate >= look.limits["critical"] else found.warning
        say(text, "Memory is short: see what uses it, or swapoff.")
    else:
        found.warning(f"{text}, though the node is not known to be short of memory", _HINT)
    return found.result(text)
