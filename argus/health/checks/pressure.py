"""Pressure: the share of time that tasks stood still for want of CPU, memory or I/O (PSI)."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.checks._memory import AVAILABLE, is_short
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "cpu": Limit(
        0.95,
        "share of the last minute that some task waited for a CPU: warning",
        "run_queue reports how many wait; a node that is merely busy stays below",
    ),
    "io": Limit(
        0.4,
        "share of the last minute in which all tasks stood still for I/O: warning",
        "data loaders wait in turns; all at once for 24 s of 60 is a disk or a mount that does not keep up",
    ),
    "memory": Limit(
        0.2,
        "share of the last minute in which all tasks stood still for memory: warning",
        "a third of what systemd-oomd kills at",
    ),
    "memory_critical": Limit(
        0.6, "the same: critical, if the node itself is short of memory", "oomd.conf(5): DefaultMemoryPressureLimit"
    ),
    "available": AVAILABLE,
}

_HINT = "Lower the job's use, or raise its limit: if memory is free, a control group is at its own (systemd-cgtop -m)."


def check(look: Look) -> Result:
    """Reads ``avg60`` of /proc/pressure: Documentation/accounting/psi.rst."""
    found = look.found()
    for what in ("cpu", "memory", "io"):
        try:
            text = look.read(f"proc/pressure/{what}")
        except Absent:
            raise Absent("the kernel measures no pressure (CONFIG_PSI, psi=1)") from None
        for line in text.splitlines():
            kind, *pairs = line.split()
            value = float(dict(pair.split("=") for pair in pairs)["avg60"]) / 100
            found.figures[f"{what}_{kind}_share"] = value
    limits, figures = look.limits, found.figures
    if figures["cpu_some_share"] >= limits["cpu"]:
        found.warning(
            f"tasks waited for a CPU for {figures['cpu_some_share']:.0%} of the last minute", "See who runs: top."
        )
    if (io := figures.get("io_full_share", 0.0)) >= limits["io"]:
        found.warning(f"everything stood still for I/O for {io:.0%} of the last minute", "See which disk: iostat -x.")
    memory = figures.get("memory_full_share", 0.0)
    text = f"everything stood still for memory for {memory:.0%} of the last minute"
    if memory >= limits["memory_critical"] and is_short(look):
        found.critical(text, "Free memory, or lower the job's use.")
    elif memory >= limits["memory"]:
        found.warning(text, _HINT)
    return found.result(f"CPU {figures['cpu_some_share']:.0%}, memory {memory:.0%}, I/O {io:.0%}")
