"""Network interfaces, as the kernel reports them over netlink (pyroute2)."""

from __future__ import annotations

import contextlib
import fnmatch
from dataclasses import dataclass, field

from argus.health.check import Absent, Look

_UP = 1  # IFF_UP, include/uapi/linux/if.h


@dataclass(frozen=True)
class Link:
    """An interface.

    Attributes:
        name: Its name.
        index: Its number.
        enabled: Whether somebody switched it on.
        carrier: Whether the other side is there.
        downs: How often it was lost since boot.
        ups: How often it came.
        mtu: Bytes.
        driver: Of its device, or its kind; interfaces of one driver are alike.
        counters: Packets, errors, drops: include/uapi/linux/if_link.h, rtnl_link_stats64.
    """

    name: str
    index: int
    enabled: bool
    carrier: bool
    downs: int
    ups: int
    mtu: int
    driver: str
    counters: dict[str, int] = field(default_factory=dict)


def links(look: Look) -> list[Link]:
    """The interfaces to look at: ``interfaces`` of the thresholds, or all that have a device (no bridges, no veth).

    Raises:
        Absent: There is none.
    """
    from pyroute2 import IPRoute

    patterns = look.limits["interfaces"]
    interfaces = []
    look.note("asking for interfaces over netlink")
    with IPRoute() as netlink:
        for message in netlink.get_links():
            name = message.get_attr("IFLA_IFNAME")
            device = look.path(f"sys/class/net/{name}/device")
            if not any(fnmatch.fnmatch(name, each) for each in patterns) if patterns else not device.exists():
                continue
            driver = device / "driver"
            kind = message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND")
            interfaces.append(
                Link(
                    name,
                    message["index"],
                    bool(message["flags"] & _UP),
                    bool(message.get_attr("IFLA_CARRIER")),
                    message.get_attr("IFLA_CARRIER_DOWN_COUNT") or 0,
                    message.get_attr("IFLA_CARRIER_UP_COUNT") or 0,
                    message.get_attr("IFLA_MTU") or 0,
                    driver.resolve().name if driver.exists() else kind or "?",
                    dict(message.get_attr("IFLA_STATS64") or {}),
                )
            )
    if not interfaces:
        raise Absent("no interface to look at")
    return interfaces


def speed_mbit(name: str) -> int | None:
    """An interface's speed by ethtool, Mbit/s; None: it reports none."""
    from pyroute2 import Ethtool

    try:
        with Ethtool() as ethtool:
            speed = ethtool.get_link_mode(name).speed
    except Exception:  # pyroute2 has no one exception for what a driver does not support
        return None
    return int(speed) if isinstance(speed, int) and 0 < speed < 1 << 31 else None


def statistics(name: str) -> dict[str, int]:
    """A driver's own counters (ethtool -S); empty: it has none."""
    from pyroute2.ethtool.ioctl import IoctlEthtool

    try:
        with contextlib.closing(IoctlEthtool(name)) as ethtool:
            return {str(key): int(value) for key, value in ethtool.get_statistics()}
    except Exception:  # as above
        return {}
