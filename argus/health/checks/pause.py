"""Pause frames: storms of flow control, by which one slow receiver stops a whole network."""

from __future__ import annotations

import re

from argus.health.check import Absent, Look, Result
from argus.health.checks._links import links, statistics
from argus.health.limit import Limit

PRELOAD = "pyroute2"
LIMITS: dict[str, Limit] = {
    "interfaces": Limit(
        [],
        "interfaces to look at, such as eth* or mlx5_*; empty: all that have a device",
        "bridges and containers' ends come and go",
    ),
    "share": Limit(
        0.1,
        "share of time that a priority had to pause: warning",
        "PFC for moments is its purpose; RDMA over Commodity Ethernet at Scale (SIGCOMM 2016) describes storms",
    ),
    "frames_per_s": Limit(
        5000.0,
        "pause frames a second, where the driver does not report times: warning",
        "at 100 Gbit/s a frame stops for up to 0.3 ms",
    ),
}

_DURATION = re.compile(r"^rx_prio\d+_pause_duration$|^rx_global_pause_duration$")  # us: mlx5 counters, NVIDIA's guide
_FRAMES = re.compile(
    r"^rx_prio\d+_pause$|^rx_pause_ctrl_phy$|^rx_pause(_frames)?$|^rx_flow_control_xon$|^rx_pfc_ena_frames_pri\d+$"
)
_STORM = re.compile(r"pause_storm_(warning|error)_events$")


def check(look: Look) -> Result:
    """Drivers' own counters (ethtool -S), whose names differ."""
    found, looked = look.found(), 0
    for link in links(look):
        look.note(f"ethtool -S {link.name}")
        for name, value in statistics(link.name).items():
            duration, storm = bool(_DURATION.search(name)), bool(_STORM.search(name))
            if not duration and not storm and not _FRAMES.search(name):
                continue
            looked += 1
            key = f"{name}_total/{link.name}"
            found.figures[key] = float(value)
            rate = (look.moved(found.figures, key) or 0.0) / max(look.span_s, 1.0)
            hint = "Find the receiver that is slow: its node's PCIe, CPU and health; see the switch's PFC watchdog."
            if storm and rate:
                found.critical(f"{link.name}: {name} rose: a pause storm {look.since()}", hint)
            elif duration and rate / 1e6 >= look.limits["share"]:
                found.warning(f"{link.name}: had to pause for {rate / 1e6:.0%} of the time ({name})", hint)
            elif not duration and rate >= look.limits["frames_per_s"]:
                found.warning(f"{link.name}: {rate:.0f} pause frames a second ({name})", hint)
    if not looked:
        raise Absent("no driver counts pause frames")
    return found.result(f"{looked} counters, no storm")
