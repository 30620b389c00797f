"""GPU temperature: of the core and of its memory, against the GPU's own limits."""

from __future__ import annotations

from argus.health.check import Blind, Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "margin_c": Limit(
        3.0,
        "degrees below the GPU's own slowdown temperature: warning",
        "there it lowers its clocks; the limit is NVML's, by model",
    ),
    "memory_c": Limit(
        95.0, "temperature of HBM, degrees: warning", "NVIDIA names 95 C for HBM2e and HBM3 as where it slows down"
    ),
}


def check(look: Look) -> Result:
    """Reads both sensors, and the threshold of the model."""
    found = look.found()
    for device in devices(look):
        with found.part():
            name, nvml = device.name, device.nvml
            core = device.ask("GetTemperature", nvml.NVML_TEMPERATURE_GPU)
            slow = device.ask("GetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
            if core is not None:
                found.figures[f"core_c/{name}"] = float(core)
                if slow and core >= slow:
                    found.critical(
                        f"{name}: {core} C, and it slows down at {slow}", "Look at fans, air flow and cold plates."
                    )
                elif slow and core >= slow - look.limits["margin_c"]:
                    found.warning(
                        f"{name}: {core} C, close to the {slow} at which it slows down", "Look at the cooling."
                    )
            memory = (device.ask("GetFieldValues", [nvml.NVML_FI_DEV_MEMORY_TEMP]) or [None])[0]
            if memory is not None and memory.nvmlReturn == nvml.NVML_SUCCESS and memory.value.uiVal:
                heat = found.figures[f"memory_c/{name}"] = float(memory.value.uiVal)
                if heat >= look.limits["memory_c"]:
                    found.warning(f"{name}: memory at {heat:.0f} C", "Look at the cooling.")
    if not found.figures and not found.result("").text:
        raise Blind("no GPU reports its temperature")
    return found.result(f"hottest {max(found.figures.values()):.0f} C")
