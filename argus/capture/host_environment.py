"""What a node is: kernel, CPUs, GPUs, network cards, their places. Asked of the kernel; nothing is run, but what asks
NVIDIA's library, where there are GPUs."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from argus.capture import gpu_limits
from argus.model.environment import UNREADABLE, bounded

_BYTES = 65536


def host_facts(
    root: Path = Path("/"), limits: Callable[[], Mapping[str, Sequence[str]]] = gpu_limits.gpu_limits
) -> dict[str, str]:
    """Facts of this node, by name. What it does not have, or does not say, is missing; what could not be read is named
    in ``unreadable``.

    Args:
        root: Where /proc, /sys and /etc are.
        limits: Asks what the GPUs may do; only called where there are some.
    """
    facts: dict[str, str] = {}
    unreadable = []
    for name, read in _readers(root, _once(limits)).items():
        try:
            facts[name] = read()
        except OSError:
            unreadable.append(name)
    facts[UNREADABLE] = ",".join(unreadable)
    return bounded({name: value for name, value in facts.items() if value})


def _readers(root: Path, limits: Callable[[], Mapping[str, Sequence[str]]]) -> dict[str, Callable[[], str]]:
    """By fact, what reads it; empty: the node has none. Raises OSError: it cannot be read."""
    cpus = root / "sys/devices/system/cpu"
    gpus = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    return {
        "kernel.release": lambda: _line(root / "proc/sys/kernel/osrelease"),
        "os.name": lambda: _field(root / "etc/os-release", r"^PRETTY_NAME=\"?([^\"\n]+)"),
        "cpu.model": lambda: _field(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$"),
        "cpu.online": lambda: _line(cpus / "online"),
        "cpu.count": lambda: _many(_line(cpus / "online")),
        "cpu.governor": lambda: _common(_line(one) for one in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")),
        "cpu.smt": lambda: {"0": "off", "1": "on"}.get(_line(cpus / "smt/active"), ""),
        "clock.source": lambda: _line(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "memory.gib": lambda: _gib(_field(root / "proc/meminfo", r"^MemTotal:\s*(\d+)")),
        "memory.huge_pages": lambda: _field(root / "sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
        "numa.nodes": lambda: _line(root / "sys/devices/system/node/online"),
        "gpu.driver": lambda: _field(root / "proc/driver/nvidia/version", r"Kernel Module\s+(?:for \w+\s+)?(\d[\d.]+)"),
        "gpu.count": lambda: str(len(gpus) or ""),
        "gpu.model": lambda: _common(_field(one, r"^Model:\s*(.+)$") for one in gpus),
        **{name: partial(_limit, name, limits if gpus else dict) for name in gpu_limits.NAMES},
        "host.boot": lambda: _line(root / "proc/sys/kernel/random/boot_id"),
        "nic.digest": lambda: _digest(_cards(root)),
        "topology.digest": lambda: _digest(_places(root, gpus)),
    }


def _limit(name: str, limits: Callable[[], Mapping[str, Sequence[str]]]) -> str:
    return _common(limits().get(name, ()))


def _once(limits: Callable[[], Mapping[str, Sequence[str]]]) -> Callable[[], Mapping[str, Sequence[str]]]:
    """The same, asked once, also if it does not answer."""
    answers: list[Mapping[str, Sequence[str]] | OSError] = []

    def answer() -> Mapping[str, Sequence[str]]:
        if not answers:
            try:
                answers.append(limits())
            except OSError as failure:
                answers.append(failure)
        if isinstance(answers[0], OSError):
            raise answers[0]
        return answers[0]

    return answer


def _gib(kibibytes: str) -> str:
    return str(round(int(kibibytes) / (1 << 20))) if kibibytes else ""


def _many(listed: str) -> str:
    """How many CPUs a list such as 0-3,8 has."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", listed):
        return ""
    ranges = [part.partition("-") for part in listed.split(",")]
    return str(sum(int(last or first) - int(first) + 1 for first, _, last in ranges))


def _cards(root: Path) -> list[str]:
    """Network cards: kind, speed, driver. Names and addresses are the node's own."""
    cards = []
    for card in sorted(root.glob("sys/class/net/*")):
        if (card / "device").exists():
            driver = os.path.basename(os.path.realpath(card / "device/driver"))
            cards.append(f"net {_speed(card)} {driver} {_line(card / 'mtu')}")
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        cards.append(f"ib {_line(port / 'rate')} {_line(port.parent.parent / 'fw_ver')} {_line(port / 'state')}")
    return cards


def _speed(card: Path) -> str:
    try:
        return _line(card / "speed")
    except OSError:  # EINVAL: it is down
        return ""


def _places(root: Path, gpus: list[Path]) -> list[str]:
    """The node's memory nodes, and at which each GPU and adapter is; nothing where there is no GPU."""
    if not gpus:
        return []
    devices = [(f"gpu {gpu.parent.name}", root / "sys/bus/pci/devices" / gpu.parent.name) for gpu in gpus]
    devices += [(f"ib {one.name}", one / "device") for one in sorted(root.glob("sys/class/infiniband/*"))]
    nodes = _line(root / "sys/devices/system/node/online")
    return [*(f"{name} {_line(device / 'numa_node')}" for name, device in devices), f"nodes {nodes}"]


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=6).hexdigest() if parts else ""


def _common(values: Iterable[str]) -> str:
    """What all are; where they differ, how many are what."""
    counted = Counter(value for value in values if value)
    if len(counted) < 2:
        return next(iter(counted), "")
    return ", ".join(f"{many} x {value}" for value, many in counted.most_common(8))


def _field(path: Path, pattern: str) -> str:
    """What a pattern's group finds in a file; empty: nothing, or there is no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = re.search(pattern, file.read(_BYTES), re.MULTILINE)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return found[1].strip() if found else ""


def _line(path: Path) -> str:
    """The first line of a file; empty: there is no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(256).strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
