"""NVLink: links that are down, and their errors."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "links": Limit(
        0,
        "links that each GPU must have up; 0: as many as any of them has",
        "one GPU with fewer than its neighbours is the usual picture",
    ),
    "errors": Limit(
        1,
        "replays, recoveries or ECC errors of a GPU's links in an hour: warning",
        "NVIDIA's fabric manager guide: none on a healthy link",
    ),
    "crc": Limit(
        1000, "CRC errors of a GPU's links in an hour: warning", "they are repeated by hardware; many cost bandwidth"
    ),
}


def check(look: Look) -> Result:
    """State and error counters of each link."""
    found = look.found()
    up: dict[str, int] = {}
    for device in devices(look):
        with found.part():
            name, nvml = device.name, device.nvml
            states = [device.ask("GetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
            links = [link for link, state in enumerate(states) if state]
            if not any(state is not None for state in states):
                continue
            up[name] = len(links)
            found.figures[f"links/{name}"] = float(len(links))
            for word, kinds, limit in (
                (
                    "errors",
                    (
                        nvml.NVML_NVLINK_ERROR_DL_REPLAY,
                        nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                        nvml.NVML_NVLINK_ERROR_DL_ECC_DATA,
                    ),
                    "errors",
                ),
                ("CRC errors", (nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, nvml.NVML_NVLINK_ERROR_DL_CRC_DATA), "crc"),
            ):
                counts = [device.ask("GetNvLinkErrorCounter", link, kind) for link in links for kind in kinds]
                key = f"{limit}_total/{name}"
                found.figures[key] = float(sum(count for count in counts if count is not None))
                rise = look.moved(found.figures, key) or 0.0
                if rise >= look.limits[limit]:
                    found.warning(
                        f"{name}: {rise:.0f} NVLink {word} {look.since()}", "nvidia-smi nvlink -e; reseat or replace."
                    )
    if not up and not found.result("").text:
        raise Absent("no GPU with NVLink")
    wanted = look.limits["links"] or max(up.values(), default=0)
    for name, count in up.items():
        if count < wanted:
            found.critical(
                f"{name}: {count} of {wanted} NVLinks are up",
                "nvidia-smi nvlink -s; systemctl status nvidia-fabricmanager.",
            )
    if not wanted and not found.result("").text:
        raise Absent("no NVLink is up on any GPU: set links to how many there should be")
    return found.result(f"{len(up)} GPUs with {wanted} links each")
