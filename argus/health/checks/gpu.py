"""GPUs: whether all are there and answer, alike, in persistence mode."""

from __future__ import annotations

from argus.health.check import Absent, Blind, Look, Result
from argus.health.checks._nvml import Device, library, on_bus
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "count": Limit(
        0,
        "GPUs that the node must have; 0: as many as the PCI bus shows",
        "a GPU that fell off the bus is often gone from the bus, too: set it",
    ),
    "persistence": Limit(
        True,
        "whether persistence mode must be on",
        "without it the driver unloads between jobs: seconds for each start, and counters are lost",
    ),
}


def check(look: Look) -> Result:
    """Opens each GPU by NVML and compares with the PCI bus; notes models, driver and CUDA versions."""
    try:
        nvml = library(look)
    except (Absent, Blind) as reason:
        wanted = max(look.limits["count"], on_bus(look))
        if not wanted:
            raise
        found = look.found()
        found.critical(f"{wanted} GPUs expected: {reason}", "Load the driver: modprobe nvidia; then nvidia-smi, dmesg.")
        return found.result("")
    found = look.found()
    count = nvml.nvmlDeviceGetCount()
    wanted = look.limits["count"] or max(on_bus(look), count)
    models: list[str] = []
    for index in range(count):
        look.note(f"gpu{index}: nvmlDeviceGetHandleByIndex")
        try:
            device = Device(f"gpu{index}", nvml.nvmlDeviceGetHandleByIndex(index), nvml, look)
            models.append(device.ask("GetName") or "?")
        except (nvml.NVMLError, Blind) as reason:
            found.critical(f"gpu{index} does not answer: {reason}", "Restart the node; if it stays, replace the GPU.")
            continue
        if look.limits["persistence"] and device.ask("GetPersistenceMode") == 0:
            found.warning(f"gpu{index}: persistence mode is off", "systemctl enable --now nvidia-persistenced")
    found.figures["count"] = float(len(models))
    if count < wanted:
        found.critical(f"{count} of {wanted} GPUs are there", "See dmesg for Xid 79; switch the node off and on again.")
    if len(set(models)) > 1:
        found.warning(f"different GPUs: {', '.join(sorted(set(models)))}", "")
    found.facts["gpus"] = ", ".join(f"{models.count(model)} x {model}" for model in sorted(set(models)))
    found.facts["driver"] = nvml.nvmlSystemGetDriverVersion()
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    found.facts["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    if not count:
        raise Absent("no NVIDIA GPU") if not wanted else Blind("no GPU")
    return found.result(f"{found.facts['gpus']}, driver {found.facts['driver']}")
