"""What a node is: kernel, CPUs, GPUs, network cards, their places. Asked of the kernel; nothing is run."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from argus.model.environment import bounded

_BYTES = 65536


def host_facts(root: Path = Path("/")) -> dict[str, str]:
    """Facts of this node, by name. What it does not have, or does not say, is missing.

    Args:
        root: Where /proc, /sys and /etc are.
    """
    cpus = root / "sys/devices/system/cpu"
    facts = {
        "kernel.release": _line(root / "proc/sys/kernel/osrelease"),
        "os.name": _field(root / "etc/os-release", r"^PRETTY_NAME=\"?([^\"\n]+)"),
        "cpu.model": _field(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$"),
        "cpu.online": _line(cpus / "online"),
        "cpu.governor": _common(_line(one) for one in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")),
        "cpu.smt": {"0": "off", "1": "on"}.get(_line(cpus / "smt/active"), ""),
        "clock.source": _line(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "memory.huge_pages": _field(root / "sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
        "numa.nodes": _line(root / "sys/devices/system/node/online"),
        "gpu.driver": _field(root / "proc/driver/nvidia/version", r"Kernel Module\s+(?:for \w+\s+)?(\d[\d.]+)"),
        "host.boot": _line(root / "proc/sys/kernel/random/boot_id"),
    }
    gpus = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    if gpus:
        facts["gpu.count"] = str(len(gpus))
        facts["gpu.model"] = _common(_field(one, r"^Model:\s*(.+)$") for one in gpus)
    if kilobytes := _field(root / "proc/meminfo", r"^MemTotal:\s*(\d+)"):
        facts["memory.gib"] = str(round(int(kilobytes) / (1 << 20)))
    facts["nic.digest"] = _digest(_cards(root))
    facts["topology.digest"] = _digest([*_places(root, gpus), f"nodes {facts['numa.nodes']}"] if gpus else [])
    return bounded({name: value for name, value in facts.items() if value})


def _cards(root: Path) -> list[str]:
    """Network cards: kind, speed, driver. Names and addresses are the node's own."""
    cards = []
    for card in sorted(root.glob("sys/class/net/*")):
        if (card / "device").exists():
            driver = os.path.basename(os.path.realpath(card / "device/driver"))
            cards.append(f"net {_line(card / 'speed')} {driver} {_line(card / 'mtu')}")
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        cards.append(f"ib {_line(port / 'rate')} {_line(port.parent.parent / 'fw_ver')} {_line(port / 'state')}")
    return cards


def _places(root: Path, gpus: list[Path]) -> list[str]:
    """At which memory node each GPU and adapter is."""
    devices = [(f"gpu {gpu.parent.name}", root / "sys/bus/pci/devices" / gpu.parent.name) for gpu in gpus]
    devices += [(f"ib {one.name}", one / "device") for one in sorted(root.glob("sys/class/infiniband/*"))]
    return [f"{name} {_line(device / 'numa_node')}" for name, device in devices]


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=6).hexdigest() if parts else ""


def _common(values: Iterable[str]) -> str:
    """What all are; where they differ, how many are what."""
    counted = Counter(value for value in values if value)
    if len(counted) < 2:
        return next(iter(counted), "")
    return ", ".join(f"{many} x {value}" for value, many in counted.most_common(8))


def _field(path: Path, pattern: str) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = re.search(pattern, file.read(_BYTES), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def _line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(256).strip()
    except (OSError, ValueError):
        return ""
