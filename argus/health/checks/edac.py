"""Memory errors (EDAC): corrected and uncorrected ones of the node's DIMMs."""

from __future__ import annotations

from argus.health.check import Absent, Blind, Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(
        10,
        "corrected errors of a controller in an hour: warning",
        "mcelog calls a page failing from 10 in 24 h on; Schroeder et al., SIGMETRICS 2009: DIMMs with some get more",
    ),
    "critical": Limit(
        1000,
        "corrected errors of a controller in an hour: critical",
        "each costs an interrupt, and an uncorrected one is near",
    ),
}


def check(look: Look) -> Result:
    """Reads ce_count and ue_count in /sys/devices/system/edac/mc: Documentation/admin-guide/ras.rst."""
    found = look.found()
    controllers = look.folders("sys/devices/system/edac/mc/mc[0-9]*")
    if not controllers:
        raise Absent("no memory controller reports errors (EDAC)")
    for controller in controllers:
        where, name = controller.relative_to(look.root), controller.name
        try:
            lost, corrected = (float(look.number(f"{where}/{kind}_count")) for kind in ("ue", "ce"))
        except (Absent, Blind) as reason:
            found.unknown(f"{name}: {reason}")
            continue
        found.figures |= {f"uncorrected_total/{name}": lost, f"corrected_total/{name}": corrected}
        if lost:
            found.critical(
                f"{name}: {lost:.0f} uncorrected memory errors since boot", "Drain the node and replace the DIMM."
            )
        rise = look.moved(found.figures, f"corrected_total/{name}") or 0.0
        text = f"{name}: {rise:.0f} corrected memory errors {look.since()}"
        found.above(rise, look.limits["warning"], look.limits["critical"], text, "Find the DIMM: edac-util -v.")
    return found.result(f"{len(controllers)} controllers, no new errors")
