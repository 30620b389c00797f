"""Sizes of real streams of kernel events: kernels a step, distinct names, bytes."""

from __future__ import annotations

import json
from typing import Any

from scripts.gpu_check.common import Context

KERNEL_BYTES, API_BYTES = 216, 40
"""Records of CUPTI 13.0: CUpti_ActivityKernel10, CUpti_ActivityAPI."""


def run(ctx: Context) -> None:
    try:
        kernels: dict[str, Any] = json.loads((ctx.scratch / "part-kernels.json").read_text())
    except OSError:
        ctx.note("the part kernels did not run")
        return
    rows = []
    for mode, facts in kernels.get("modes", {}).items():
        steps = facts["window"]["steps"]
        operations = facts["in_window"]
        counters = facts["ended"].get("counters", {})
        lasted = facts["ended"].get("lasted_s", 0)
        rows.append([
            mode, facts["kernels_a_step"], operations / steps, facts["distinct_names"],
            operations / steps * KERNEL_BYTES, counters.get("cupti_records", 0), lasted, facts["spool_bytes"],
            facts["spool_bytes"] / max(1, facts["all_traced"]), facts["profiler"]["trace_bytes"] / steps,
        ])  # fmt: skip
    ctx.table(
        "a step",
        ["mode", "kernels", "operations", "names", "CUPTI bytes (kernels)", "records of the session", "session s",
         "spool bytes", "spool bytes an operation", "bytes of torch.profiler's trace"],
        rows,
    )  # fmt: skip
    ctx.check("streams were measured", bool(rows))
