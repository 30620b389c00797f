"""What ``argus health`` said of a finding's nodes meanwhile: a slow GPU that throttles is one finding, not two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from argus.diagnose import sql
from argus.diagnose.verdict import Finding

ABOUT: dict[str, tuple[str, ...]] = {
    "compute_straggler": ("gpu", "xid", "probe_gpu"),
    "masked_compute_straggler": ("gpu", "xid", "probe_gpu"),
    "link_degradation": ("gpu_nvlink", "gpu_pcie", "link", "infiniband", "pause", "xid", "probe_gpu", "probe_loopback"),
    "kernel_issue_stall": (
        "cpu",
        "numa",
        "pressure",
        "run_queue",
        "steal",
        "memory",
        "edac",
        "probe_cpu",
        "probe_memory",
    ),
    "host_contention": ("cpu", "numa", "pressure", "run_queue", "steal", "memory", "swap", "oom", "edac", "disk"),
    "data_loading": ("disk", "smart", "read_only", "link", "pressure", "memory", "swap", "probe_disk"),
    "jitter": ("gpu", "xid", "cpu", "pressure", "run_queue", "steal", "memory", "swap", "oom", "edac", "disk"),
    "jit_stall": ("disk", "read_only", "cpu"),
    "hang": ("gpu", "xid", "kernel_log", "stuck", "oom", "link", "infiniband", "pause", "read_only", "disk"),
}
"""Checks, by the beginning of their names, that can explain a kind of finding. Others (clocks, versions) are not
told."""
TOLD = 3
"""Results that a finding cites, at most."""


def add(query: sql.Query, params: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Adds to the evidence of findings what health checks of their nodes found while the job ran, or in the hour
    before.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        findings: Those with ``hosts``.
    """
    hosts = sorted({host for finding in findings for host in finding["hosts"] if finding["kind"] in ABOUT})
    if not hosts:
        return
    asked = {**params, "hosts": hosts}
    rows = query(sql.NODE_HEALTH, asked)
    names = ("host", "check", "status", "text", "ts_ns")
    found = list(zip(*(rows[name].tolist() for name in names), strict=True))
    for finding in findings:
        told = [
            (host, check, status, text, ts)
            for host, check, status, text, ts in found
            if host in finding["hosts"] and str(check).startswith(ABOUT.get(finding["kind"], ("\0",)))
        ]
        told.sort(key=lambda row: (row[2] != "critical", -row[4]))
        shown = sql.shown(sql.NODE_HEALTH, {**asked, "hosts": list(finding["hosts"])})
        for host, check, status, text, ts in told[:TOLD]:
            at = datetime.fromtimestamp(ts / 1e9, timezone.utc)
            words = f"argus health on {host}, {at:%Y-%m-%d %H:%M} UTC: {check} {status}: {text}"
            finding["evidence"].append({"text": words, "sql": shown})
