"""Checks of the network: real interfaces in namespaces, and a made-up /sys/class/infiniband."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink.devlink import devlinkcmd
from pyroute2.netlink.exceptions import NetlinkError

from argus.health.check import Absent, Blind, Look, Result
from argus.health.checks import devlink, infiniband, pause
from argus.health.checks._links import Link
from tests.e2e.health_node import Node, Server

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="makes network namespaces: needs root and ip"
)
LINKS = ("link", "link_errors")


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Node]:
    """A namespace with two pairs of interfaces, a0-a1 and b0-b1, all up."""
    node = Node(tmp_path)
    name = f"argus-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    node.before = ["ip", "netns", "exec", name]
    inside(node, "ip link set lo up")
    for pair in "ab":
        inside(node, f"ip link add {pair}0 type veth peer name {pair}1")
        for end in (f"{pair}0", f"{pair}1"):
            inside(node, f"ip link set {end} up")
    for check in LINKS:
        node.limits[check] = {"interfaces": ["[ab]*"]}
    yield node
    Server.of(node.before, dict(os.environ)).end()
    subprocess.run(["ip", "netns", "del", name], check=True)


def inside(node: Node, command: str) -> None:
    subprocess.run([*node.before, *command.split()], check=True)


def forget(node: Node) -> None:
    """The next look is the first one."""
    (node.folder / "state" / "state.json").unlink()


@needs_root
def test_links(space: Node) -> None:
    assert space.check("link") == ("ok", "a1 10 Gbit/s, a0 10 Gbit/s, b1 10 Gbit/s, b0 10 Gbit/s")
    inside(space, "ip link set a0 mtu 9000")
    assert "MTU 1500, not the 9000 that others have" in space.check("link")[1]
    inside(space, "ip link set a0 mtu 1500")
    space.limits["link"] |= {"mtu": 9000, "speed_gbit": 25.0, "up": ["a0", "c0"]}
    status, text = space.check("link")
    assert status == "critical"
    assert "c0 is not there" in text
    assert "a0: 10 Gbit/s of 25" in text
    assert "a0: MTU 1500, not the 9000 wanted" in text
    space.limits["link"] = {"interfaces": ["[ab]*"]}
    inside(space, "ip link set b1 down")  # b0's cable is pulled
    assert space.check("link") == ("critical", "b0 is down")
    space.limits["link"] = {}
    assert space.check("link") == ("absent", "no interface to look at")


@needs_root
def test_links_that_lose_packets_and_come_and_go(space: Node) -> None:
    assert space.check("link_errors") == ("ok", "no new errors")
    # The other side takes smaller packets only: what is larger is dropped, and counted.
    inside(space, "ip addr add 10.7.0.1/24 dev a0")
    inside(space, "ip neigh add 10.7.0.2 lladdr 02:00:00:00:00:01 dev a0")
    inside(space, "ip link set a0 mtu 9000")
    program = """import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
    for _ in range(2000):
        out.sendto(b"x" * 4000, ("10.7.0.2", 9))
"""
    subprocess.run([*space.before, "python3", "-c", program], check=True)
    status, text = space.check("link_errors")
    assert status == "warning"
    assert "a0: " in text
    assert "packets dropped" in text
    # A tunnel without a route to its end: the kernel counts errors. A tap that nobody reads: it counts drops.
    inside(space, "ip link add vx0 type vxlan id 5 remote 10.99.0.1 dstport 4789")
    subprocess.run([*space.before, "python3", "-c", UNREAD, "before"], check=True)
    space.limits["link_errors"]["interfaces"] = ["vx0", "tap0"]
    forget(space)
    assert space.check("link_errors") == ("ok", "no new errors")
    subprocess.run([*space.before, "python3", "-c", UNREAD, "send"], check=True)
    status, text = space.check("link_errors")
    assert status == "warning"
    assert re.search(r"vx0: 2\d\d packets with errors \(0 of them CRC\) in the last", text)
    assert re.search(r"tap0: [23]\d\d\d packets dropped in the last \d+ min, 100", text)
    space.limits["link_errors"] |= {"errors": 100000, "drop_share": 1.1, "flaps": 9, "flaps_critical": 9}
    assert space.check("link_errors") == ("ok", "no new errors")
    space.limits["link_errors"] = {"interfaces": ["[ab]*"]}
    forget(space)
    assert space.check("link_errors") == ("ok", "no new errors")
    inside(space, "ip link set b1 down")
    inside(space, "ip link set b1 up")
    assert "b0: the link was lost 1 times" in space.check("link_errors")[1]
    for _ in range(5):
        inside(space, "ip link set b1 down")
        inside(space, "ip link set b1 up")
    assert space.check("link_errors")[0] == "critical"


UNREAD = """
import fcntl, os, socket, struct, subprocess, sys
def ip(words):
    subprocess.run(["ip", *words.split()], check=True)
if sys.argv[1] == "before":
    ip("tuntap add dev tap0 mode tap")
    for name, net in (("vx0", "10.8.0"), ("tap0", "10.9.0")):
        ip(f"addr add {net}.1/24 dev {name}")
        ip(f"link set {name} up")
        ip(f"neigh add {net}.2 lladdr 02:00:00:00:00:01 dev {name}")
    sys.exit()
tap = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH22x", b"tap0", 0x1002))  # TUNSETIFF, IFF_TAP | IFF_NO_PI
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
    for net, times in (("10.8.0", 200), ("10.9.0", 4000)):
        for _ in range(times):
            out.sendto(b"x", (net + ".2", 9))
"""


# ---- pause frames ---------------------------------------------------------------------------------------------------


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, int], dict[str, int]], Result]:
    """The check over ten minutes, in which a driver's counters went from one to another value."""

    def look(first: dict[str, int], then: dict[str, int]) -> Result:
        limits = {name: limit.default for name, limit in pause.LIMITS.items()}
        monkeypatch.setattr(pause, "links", lambda look: [Link("eth9", 1, True, True, 0, 1, 9000, "mlx5_core")])
        monkeypatch.setattr(pause, "statistics", lambda name: first)
        before = pause.check(Look(limits, now=1000.0))
        monkeypatch.setattr(pause, "statistics", lambda name: then)
        return pause.check(Look(limits, before=[(1000.0, before.figures)], now=1600.0))

    return look


def test_pause_storms(paused: Callable[[dict[str, int], dict[str, int]], Result]) -> None:
    calm = {"rx_prio3_pause": 100, "rx_prio3_pause_duration": 100, "tx_pause_storm_error_events": 0, "rx_bytes": 0}
    assert paused(calm, {**calm, "rx_prio3_pause": 5000, "rx_bytes": 10**12}).status == "ok"
    result = paused(calm, {**calm, "rx_prio3_pause_duration": 120_000_100})
    assert (result.status, result.text) == (
        "warning",
        "eth9: had to pause for 20% of the time (rx_prio3_pause_duration)",
    )
    assert "10000 pause frames a second" in paused(calm, {**calm, "rx_prio3_pause": 6_000_100}).text
    assert paused(calm, {**calm, "tx_pause_storm_error_events": 1}).status == "critical"


# ---- InfiniBand -----------------------------------------------------------------------------------------------------


def port(node: Node, name: str, **files: str) -> None:
    there = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "counters/symbol_error": "0",
        "counters/link_downed": "0",
        "hw_counters/out_of_sequence": "0",
        **files,
    }
    for file, text in there.items():
        node.file(f"sys/class/infiniband/{name}/ports/1/{file}", text + "\n")


def test_infiniband(tmp_path: Path) -> None:
    node = Node(tmp_path)
    limits = {name: limit.default for name, limit in infiniband.LIMITS.items()}
    for number in range(4):
        port(node, f"mlx5_{number}")
    first = infiniband.check(Look(limits, tmp_path / "root"))
    assert (first.status, first.text) == ("ok", "4 ports at 400 Gbit/s")

    def again(**changes: str) -> tuple[str, str]:
        port(node, "mlx5_2", **changes)
        look = Look(limits, tmp_path / "root", before=[(1000.0, first.figures)], now=2000.0)
        result = infiniband.check(look)
        return result.status, result.text

    assert again() == ("ok", "4 ports at 400 Gbit/s")
    assert again(state="1: DOWN", phys_state="3: Disabled") == ("critical", "mlx5_2/1 is DOWN, Disabled")
    assert again(rate="200 Gb/sec (2X NDR)") == ("warning", "mlx5_2/1: 200 Gbit/s of 400")
    assert again(**{"counters/symbol_error": "12"})[1] == "mlx5_2/1: symbol_error rose by 12 in the last 17 min"
    assert again(**{"counters/symbol_error": "9"})[0] == "ok"
    assert again(**{"counters/link_downed": "1"})[0] == "warning"
    assert again(**{"hw_counters/out_of_sequence": "500"})[0] == "warning"
    assert json.dumps(first.figures).count("/mlx5_2:1") == 4


# ---- devlink --------------------------------------------------------------------------------------------------------

# Numbers are include/uapi/linux/devlink.h's. The kernel of a test machine may have no devlink, so its bytes are
# made here, and pyroute2 reads them.
BUS, DEVICE, PORT_INDEX, PORT_NAME, REPORTER, RELOAD_FAILED = 1, 2, 3, 7, 114, 136
NAME, STATE, ERRORS, RECOVERED = 115, 116, 117, 118
DEV_GET, PORT_GET, REPORTER_GET = 1, 5, 52


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(command: int, *attributes: bytes) -> Any:
    body = struct.pack("=BBH", command, 1, 0) + attribute(BUS, b"pci\0") + attribute(DEVICE, b"0000:5e:00.0\0")
    body += b"".join(attributes)
    reported = devlinkcmd(struct.pack("=IHHII", 16 + len(body), 30, 2, 1, 0) + body)
    reported.decode()
    return reported


def reporter(name: bytes, state: int = 0, errors: int = 0, port: int | None = None) -> Any:
    nested = [attribute(NAME, name + b"\0"), attribute(STATE, bytes([state]))]
    nested += [attribute(ERRORS, struct.pack("=Q", errors)), attribute(RECOVERED, struct.pack("=Q", errors))]
    where = [] if port is None else [attribute(PORT_INDEX, struct.pack("=I", port))]
    return message(REPORTER_GET, *where, attribute(REPORTER | 0x8000, b"".join(nested)))


class Devlink:
    """Stands for pyroute2's socket."""

    prid = 30
    devices: tuple[Any, ...] = ()
    reporters: tuple[Any, ...] = ()
    failure: Exception | None = None

    def __enter__(self) -> Devlink:
        if self.failure:
            raise self.failure
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_dump(self) -> tuple[Any, ...]:
        return self.devices

    def get_port_dump(self) -> list[Any]:
        index, name = attribute(PORT_INDEX, struct.pack("=I", 65535)), attribute(PORT_NAME, b"eth4\0")
        return [message(PORT_GET, index, name)]

    def nlm_request(self, asked: Any, family: int, flags: int) -> tuple[Any, ...]:
        assert (asked["cmd"], family, flags) == (REPORTER_GET, 30, 0x301)
        return self.reporters


def test_devlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyroute2.DL", Devlink)
    limits = {name: limit.default for name, limit in devlink.LIMITS.items()}

    def look(*reporters: Any, reload_failed: int = 0, before: Result | None = None, **more: Any) -> Result:
        failed = attribute(RELOAD_FAILED, bytes([reload_failed]))
        monkeypatch.setattr(Devlink, "devices", (message(DEV_GET, failed),))
        monkeypatch.setattr(Devlink, "reporters", reporters)
        past = [(1000.0, before.figures)] if before else []
        return devlink.check(Look(limits | more, before=past, now=1600.0))

    good = look(reporter(b"fw", errors=2), reporter(b"tx", port=65535))
    assert (good.status, good.text) == ("ok", "1 devices, 1 ports, 2 reporters, all well")
    assert set(good.figures) == {"errors_total/0000:5e:00.0:fw", "errors_total/0000:5e:00.0:eth4:tx", "ports"}
    assert look(reporter(b"fw", errors=2), before=good).status == "ok"
    bad = look(reporter(b"fw_fatal", state=1, errors=1), reporter(b"tx", errors=3, port=65535), before=good)
    assert (bad.status, bad.text) == (
        "critical",
        "0000:5e:00.0: fw_fatal is in error, and was not recovered; "
        "0000:5e:00.0 (eth4): tx had 3 errors in the last 10 min, recovered",
    )
    assert look(reporter(b"tx", errors=3, port=65535), before=good).status == "warning"
    assert look(reporter(b"tx", errors=3, port=65535), before=good, skip=["tx"]).status == "ok"
    assert "could not be reloaded" in look(reload_failed=1).text
    monkeypatch.setattr(Devlink, "devices", ())
    with pytest.raises(Absent, match="no device with devlink"):
        devlink.check(Look(limits))
    monkeypatch.setattr(Devlink, "failure", NetlinkError(2))
    with pytest.raises(Absent, match="the kernel has no devlink"):
        devlink.check(Look(limits))
    monkeypatch.setattr(Devlink, "failure", NetlinkError(1))
    with pytest.raises(Blind, match="devlink does not answer"):
        devlink.check(Look(limits))
