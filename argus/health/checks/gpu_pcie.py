"""GPU on PCIe: width, generation, and packets that had to be repeated."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "replays": Limit(
        100,
        "replays of a GPU in an hour: warning",
        "DCGM's default for its PCIe policy is in this order; a good slot has none for weeks",
    ),
    "busy": Limit(
        10,
        "utilization, percent, from which on the generation is looked at",
        "an idle GPU lowers it to save power; the width stays",
    ),
}


def check(look: Look) -> Result:
    """Compares with what GPU and slot can do together (NVML's maximum)."""
    found, links = look.found(), []
    for device in devices(look):
        with found.part():
            name = device.name
            width, most = device.ask("GetCurrPcieLinkWidth"), device.ask("GetMaxPcieLinkWidth")
            generation, newest = device.ask("GetCurrPcieLinkGeneration"), device.ask("GetMaxPcieLinkGeneration")
            replays, use = device.ask("GetPcieReplayCounter"), device.ask("GetUtilizationRates")
            if width is None or not most:
                continue
            links.append(f"x{width}")
            found.figures[f"width/{name}"] = float(width)
            if width < most:
                found.critical(f"{name}: PCIe x{width} of x{most}", "Reseat the GPU or riser: lspci -vv, LnkSta.")
            busy = use is not None and use.gpu >= look.limits["busy"]
            if busy and generation and newest and generation < newest:
                found.warning(
                    f"{name}: PCIe generation {generation} of {newest} while busy",
                    "See lspci -vv, LnkSta, and BIOS settings.",
                )
            if replays is not None:
                found.figures[f"replays_total/{name}"] = float(replays)
                rise = look.moved(found.figures, f"replays_total/{name}") or 0.0
                if rise >= look.limits["replays"]:
                    found.warning(
                        f"{name}: {rise:.0f} PCIe packets repeated {look.since()}", "Reseat the GPU or riser."
                    )
    if not links and not found.result("").text:
        raise Absent("no GPU reports its PCIe link")
    return found.result(f"{len(links)} GPUs at {'/'.join(sorted(set(links)))}")
