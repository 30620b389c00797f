"""Whether a node is idle: measuring it disturbs whoever works on it, and what is measured beside work means nothing."""

from __future__ import annotations

import os

from argus.health.check import Absent, Look
from argus.health.limit import Limit

BUSY = Limit(0.1, "load for each CPU from which on the node is busy, and nothing is measured", "cron and daemons alone")


def wait_for_nobody(look: Look) -> None:
    """Goes on if the node is idle.

    Raises:
        Absent: It is not: the number of runnable threads (/proc/loadavg, the newest minute) is above the limit ``busy``
            for each CPU, and above one.
    """
    load = float(look.read("proc/loadavg").split()[0])
    if load > max(1.0, look.limits["busy"] * (os.cpu_count() or 1)):
        raise Absent(f"not measured: the node is busy (load {load:.1f})")
