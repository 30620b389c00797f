"""Steal: time that the hypervisor gave to others."""

from __future__ import annotations

from argus.health.check import Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(0.05, "share of the CPUs' time: warning", "one core of 20; a dedicated node has none"),
    "critical": Limit(0.25, "share of the CPUs' time: critical", "a quarter of the node is somebody else's"),
}


def check(look: Look) -> Result:
    """Reads the line ``cpu`` of /proc/stat (proc(5)): ticks by use, of which the eighth is steal."""
    found = look.found()
    ticks = [int(word) for word in look.read("proc/stat").splitlines()[0].split()[1:9]]
    found.figures |= {"ticks_total": float(sum(ticks)), "steal_ticks_total": float(ticks[7])}
    total = look.moved(found.figures, "ticks_total") or found.figures["ticks_total"]
    stolen = look.moved(found.figures, "steal_ticks_total")
    share = (found.figures["steal_ticks_total"] if stolen is None else stolen) / max(total, 1.0)
    found.figures["steal_share"] = share
    text = f"{share:.1%} of CPU time was given to others"
    found.above(share, look.limits["warning"], look.limits["critical"], text, "Ask for a dedicated host.")
    return found.result(text)
