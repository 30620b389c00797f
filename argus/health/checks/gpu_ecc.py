"""GPU memory errors (ECC): corrected and uncorrected, since the driver came up and of all time."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "corrected": Limit(
        100,
        "corrected errors of a GPU in an hour: warning",
        "NVIDIA: Xid 92, high single-bit ECC error rate; single ones are normal",
    ),
    "aggregate": Limit(
        10, "uncorrected ones of the GPU's whole life: warning", "row remapping and Xid decide; this is information"
    ),
}


def check(look: Look) -> Result:
    """NVML's totals; docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt explains what follows from them."""
    found, with_ecc = look.found(), 0
    for device in devices(look):
        with found.part():
            name, nvml = device.name, device.nvml
            mode = device.ask("GetEccMode")
            if mode is None:
                continue
            if not mode[0]:
                found.warning(
                    f"{name}: ECC is off: errors change results unseen", f"nvidia-smi -i {name[3:]} -e 1, and restart."
                )
                continue
            with_ecc += 1
            for word, kind in (
                ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ):
                for life, counter in (("", nvml.NVML_VOLATILE_ECC), ("life_", nvml.NVML_AGGREGATE_ECC)):
                    count = device.ask("GetTotalEccErrors", kind, counter)
                    if count is not None:
                        found.figures[f"{life}{word}_total/{name}"] = float(count)
            if lost := found.figures.get(f"uncorrected_total/{name}", 0.0):
                found.critical(
                    f"{name}: {lost:.0f} uncorrected memory errors", "Drain the node and reset the GPU: nvidia-smi -r."
                )
            if (ever := found.figures.get(f"life_uncorrected_total/{name}", 0.0)) >= look.limits["aggregate"]:
                found.warning(f"{name}: {ever:.0f} uncorrected memory errors in its life", "See the check gpu_pages.")
            corrected = f"corrected_total/{name}"
            rise = (look.moved(found.figures, corrected) or 0.0) if corrected in found.figures else 0.0
            if rise >= look.limits["corrected"]:
                found.warning(
                    f"{name}: {rise:.0f} corrected memory errors {look.since()}", "Watch it; run dcgmi diag -r 3."
                )
    if not with_ecc and not found.result("").text:
        raise Absent("no GPU has ECC")
    return found.result(f"{with_ecc} GPUs with ECC, no uncorrected errors")
