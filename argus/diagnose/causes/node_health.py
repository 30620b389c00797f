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
LINKS = ("gpu_nvlink", "gpu_pcie", "link", "infiniband", "pause", "probe_loopback")
"""Checks of links themselves: their state, speed and errors."""
TOLD = 3
"""Results that a finding cites, at most."""


def add(query: sql.Query, params: Mapping[str, Any], findings: Sequence[Finding], nodes: Mapping[int, str]) -> None:
    """Adds to the evidence of findings what health checks of their nodes found while the job ran, or in the hour
    before.

    All ranks of a ring take as long as its slowest link, so of a slow collective its communicator is named. Where some
    of that one's nodes complain of their links and the others do not, it becomes the ranks of those.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        findings: Those with ``hosts``.
        nodes: Node of each rank.
    """
    hosts = sorted({host for finding in findings for host in finding["hosts"] if finding["kind"] in ABOUT})
    if not hosts:
        return
    asked = {**params, "hosts": hosts}
    rows = query(sql.NODE_HEALTH, asked)
    names = ("host", "check", "status", "text", "ts_ns")
    found = list(zip(*(rows[name].tolist() for name in names), strict=True))
    for finding in findings:
        complain = {str(host) for host, check, *_ in found if str(check).startswith(LINKS)} & set(finding["hosts"])
        if finding["kind"] == "link_degradation" and complain and complain != set(finding["hosts"]):
            finding["ranks"] = [rank for rank in finding["ranks"] if nodes.get(rank) in complain]
            finding["hosts"] = sorted(complain)
            finding["action"] = f"Begin with {', '.join(finding['hosts'])}. {finding['action']}"
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
