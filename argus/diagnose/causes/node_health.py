"""What ``argus health`` reported on a finding's nodes meanwhile: a slow GPU that throttles is one finding, not two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect

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
reported."""
LINKS = ("gpu_nvlink", "gpu_pcie", "link", "infiniband", "pause", "probe_loopback")
"""Checks of links themselves: their state, speed and errors."""
MAX_RESULTS = 3
"""Results that a finding cites, at most."""


def add(query: Query, params: Mapping[str, Any], suspects: Sequence[Suspect], nodes: Mapping[int, str]) -> None:
    """Adds to the evidence of suspects what health checks of their nodes found while the job ran, or in the hour
    before.

    All ranks of a ring take as long as its slowest link, so of a slow collective its communicator is named. Where some
    of that one's nodes complain of their links and the others do not, it becomes the ranks of those.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        suspects: Those with ``hosts``; changed in place.
        nodes: Node of each rank.
    """
    hosts = sorted({host for suspect in suspects for host in suspect.hosts if suspect.kind in ABOUT})
    if not hosts:
        return
    asked = {**params, "hosts": hosts}
    rows = query(queries.NODE_HEALTH, asked)
    names = ("host", "check", "status", "text", "ts_ns")
    results = list(zip(*(rows[name].tolist() for name in names), strict=True))
    for suspect in suspects:
        complain = {str(host) for host, check, *_ in results if str(check).startswith(LINKS)} & set(suspect.hosts)
        if suspect.kind == "link_degradation" and complain and complain != set(suspect.hosts):
            suspect.ranks = [rank for rank in suspect.ranks if nodes.get(rank) in complain]
            suspect.hosts = sorted(complain)
            suspect.action = f"Begin with {', '.join(suspect.hosts)}. {suspect.action}"
        relevant = [
            (host, check, status, text, ts)
            for host, check, status, text, ts in results
            if host in suspect.hosts and str(check).startswith(ABOUT.get(suspect.kind, ("\0",)))
        ]
        relevant.sort(key=lambda row: (row[2] != "critical", -row[4]))
        sql = runnable_sql(queries.NODE_HEALTH, {**asked, "hosts": list(suspect.hosts)})
        for host, check, status, text, ts in relevant[:MAX_RESULTS]:
            at = datetime.fromtimestamp(ts / 1e9, timezone.utc)
            cited = f"argus health on {host}, {at:%Y-%m-%d %H:%M} UTC: {check} {status}: {text}"
            suspect.further.append({"text": cited, "sql": sql})
