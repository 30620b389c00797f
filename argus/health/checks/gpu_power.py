"""GPU power: limits against the model's, and what is drawn."""

from __future__ import annotations

from argus.health.check import Blind, Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "limit": Limit(
        0.99,
        "share of the model's default power limit that must be allowed: warning below",
        "a lowered limit makes one node slower than its peers",
    ),
}


def check(look: Look) -> Result:
    """Reads limits in mW (default: the model's; enforced: the lowest of all that limit it) and the draw."""
    found = look.found()
    for device in devices(look):
        with found.part():
            name = device.name
            drawn, default = device.ask("GetPowerUsage"), device.ask("GetPowerManagementDefaultLimit")
            enforced = device.ask("GetEnforcedPowerLimit")
            if drawn is not None:
                found.figures[f"drawn_w/{name}"] = drawn / 1000
            if default and enforced is not None:
                found.figures[f"limit_w/{name}"] = enforced / 1000
                if enforced < look.limits["limit"] * default:
                    text = f"{name}: limited to {enforced / 1000:.0f} W of {default / 1000:.0f}"
                    found.warning(text, f"If nobody wants that: nvidia-smi -i {name[3:]} -pl {default // 1000}")
    if not found.figures and not found.result("").text:
        raise Blind("no GPU reports its power")
    return found.result(f"{sum(v for k, v in found.figures.items() if k.startswith('drawn')):.0f} W drawn")
