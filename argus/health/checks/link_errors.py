"""Network errors: damaged and dropped packets, and links that came and went."""

from __future__ import annotations

from argus.health.check import Look, Result
from argus.health.checks._links import links
from argus.health.limit import Limit

PRELOAD = "pyroute2"
LIMITS: dict[str, Limit] = {
    "interfaces": Limit(
        [],
        "interfaces to look at, such as eth* or mlx5_*; empty: all that have a device",
        "bridges and containers' ends come and go",
    ),
    "errors": Limit(
        100,
        "receive and transmit errors of an interface in an hour: warning",
        "Ethernet allows one bit error in 10^12; with RS-FEC, which 25 Gbit/s and more have, packets come whole",
    ),
    "drop_share": Limit(
        0.001,
        "dropped share of packets: warning, from 1000 drops on",
        "a lossless (RoCE) network drops none; TCP loses half its rate near here (Mathis et al., 1997)",
    ),
    "flaps": Limit(
        1, "times that a link was lost in an hour: warning", "each stalls every collective for seconds, or ends it"
    ),
    "flaps_critical": Limit(5, "the same: critical", ""),
}


def check(look: Look) -> Result:
    """Counters of the interface itself (rtnl_link_stats64)."""
    found = look.found()
    for link in links(look):
        name, count = link.name, link.counters
        figures = {
            f"errors_total/{name}": count.get("rx_errors", 0) + count.get("tx_errors", 0),
            f"crc_total/{name}": count.get("rx_crc_errors", 0),
            f"drops_total/{name}": count.get("rx_dropped", 0)
            + count.get("tx_dropped", 0)
            + count.get("rx_missed_errors", 0),
            f"packets_total/{name}": count.get("rx_packets", 0) + count.get("tx_packets", 0),
            f"flaps_total/{name}": link.downs,
        }
        found.figures |= {key: float(value) for key, value in figures.items()}
        errors, crc, drops, packets, flaps = (look.moved(found.figures, key) or 0.0 for key in figures)
        if errors >= look.limits["errors"]:
            text = f"{name}: {errors:.0f} packets with errors ({crc:.0f} of them CRC) {look.since()}"
            found.warning(text, "Clean or replace cable and transceiver: ethtool -m, ethtool -S.")
        share = drops / max(packets + drops, 1.0)
        if drops >= 1000 and share >= look.limits["drop_share"]:
            text = f"{name}: {drops:.0f} packets dropped {look.since()}, {share:.1%}"
            found.warning(text, "See ring sizes (ethtool -g), the MTU of the other side, and the switch's buffers.")
        text = f"{name}: the link was lost {flaps:.0f} times {look.since()}"
        found.above(
            flaps, look.limits["flaps"], look.limits["flaps_critical"], text, "See cable, transceiver and switch port."
        )
    return found.result("no new errors")
