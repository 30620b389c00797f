"""GPU memory repairs: retired pages and remapped rows."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit
from argus.model.text import counted

LIMITS: dict[str, Limit] = {
    "rows": Limit(
        8,
        "rows remapped for uncorrected errors: warning",
        "NVIDIA replaces a GPU when a bank has no spare rows; each bank has 8",
    ),
}


def check(look: Look) -> Result:
    """Ampere and later remap rows, older ones retire pages: docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt."""
    found, looked = look.found(), 0
    for device in devices(look):
        with found.part():
            name, nvml = device.name, device.nvml
            rows = device.ask("GetRemappedRows")
            if rows is not None:
                looked += 1
                corrected, uncorrected, pending, failed = rows
                found.figures |= {f"remapped_rows/{name}": float(corrected + uncorrected)}
                if failed:
                    found.critical(
                        f"{name}: a row could not be remapped", "Replace the GPU (NVIDIA's criterion for an RMA)."
                    )
                if pending:
                    found.critical(
                        f"{name}: a remapping waits for a reset", "Drain the node and reset the GPU: nvidia-smi -r."
                    )
                if uncorrected >= look.limits["rows"]:
                    found.warning(
                        f"{name}: {uncorrected} rows remapped after uncorrected errors", "Run dcgmi diag -r 3."
                    )
                spare = device.ask("GetRowRemapperHistogram")
                if spare is not None and spare.none:
                    found.critical(f"{name}: {spare.none} memory banks have no spare rows", "Replace the GPU.")
                continue
            pending = device.ask("GetRetiredPagesPendingStatus")
            if pending is not None:
                looked += 1
                retired = device.ask("GetRetiredPages", nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR) or []
                found.figures[f"retired_pages/{name}"] = float(len(retired))
                if pending:
                    found.critical(
                        f"{name}: page retirement waits for a reset", "Drain the node and reset the GPU: nvidia-smi -r."
                    )
                if len(retired) >= 60:  # NVIDIA's criterion for an RMA of such GPUs
                    found.critical(f"{name}: {len(retired)} pages retired", "Replace the GPU.")
    if not looked and not found.result("").text:
        raise Absent("no GPU that repairs its memory")
    replaced = sum(found.figures.values())
    return found.result(f"{counted(looked, 'GPU')}, {replaced:.0f} rows or pages replaced, none waits")
