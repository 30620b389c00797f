"""Network links: up, as fast as they should be, and of one MTU."""

from __future__ import annotations

from argus.health.check import Look, Result
from argus.health.checks._links import links, speed_mbit
from argus.health.limit import Limit

PRELOAD = "pyroute2"
LIMITS: dict[str, Limit] = {
    "interfaces": Limit(
        [],
        "interfaces to look at, such as eth* or mlx5_*; empty: all that have a device",
        "bridges and containers' ends come and go",
    ),
    "up": Limit(
        [],
        "interfaces that must be up; others only if they have been up since boot",
        "a port that nobody uses has no cable",
    ),
    "speed_gbit": Limit(
        0.0,
        "speed that each must have, Gbit/s; 0: as the fastest of the same driver",
        "a port that negotiated a lower speed works, and slows every collective",
    ),
    "mtu": Limit(
        0,
        "MTU that each must have; 0: that of the others of the same driver",
        "one that differs drops large packets, or cuts them up",
    ),
}


def check(look: Look) -> Result:
    """Netlink for state and MTU, ethtool for speed."""
    found = look.found()
    every = links(look)
    missing = [name for name in look.limits["up"] if name not in [link.name for link in every]]
    for name in missing:
        found.critical(f"{name} is not there", "See dmesg and lspci: the adapter or its driver is gone.")
    speeds: dict[str, int] = {}
    for link in every:
        if not link.carrier or not link.enabled:
            wanted = link.name in look.limits["up"] or (link.enabled and link.ups > 0)
            if wanted:
                found.critical(f"{link.name} is down", "See cable, transceiver and switch port: ethtool -m, dmesg.")
            continue
        look.note(f"ethtool {link.name}")
        if (speed := speed_mbit(link.name)) is not None:
            speeds[link.name] = speed
            found.figures[f"speed_gbit/{link.name}"] = speed / 1000
    active = [link for link in every if link.carrier and link.enabled]
    for link in active:
        alike = [other for other in active if other.driver == link.driver]
        best = look.limits["speed_gbit"] * 1000 or max(speeds.get(other.name, 0) for other in alike)
        speed = speeds.get(link.name, 0)
        if 0 < speed < best:
            text = f"{link.name}: {speed / 1000:g} Gbit/s of {best / 1000:g}"
            found.warning(text, "See cable, transceiver and switch port: ethtool, ethtool -m.")
        mtu = look.limits["mtu"] or max(other.mtu for other in alike)
        found.figures[f"mtu_bytes/{link.name}"] = float(link.mtu)
        if link.mtu != mtu:
            whose = "wanted" if look.limits["mtu"] else "that others have"
            found.warning(f"{link.name}: MTU {link.mtu}, not the {mtu} {whose}", f"ip link set {link.name} mtu {mtu}")
    in_use = [f"{x.name} {speeds[x.name] / 1000:g} Gbit/s" if x.name in speeds else x.name for x in active]
    return found.result(", ".join(in_use) or "none in use")
