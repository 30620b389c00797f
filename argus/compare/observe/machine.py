"""What the machine did besides: load, CPU time of others, steal, waiting for CPUs; read before and after a run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_S = os.sysconf("SC_CLK_TCK")
SHORTEST_S = 0.1
"""Shares of a shorter time are not known: the kernel counts in ticks of 10 ms."""


@dataclass(frozen=True)
class Machine:
    """The state at one moment; None: the kernel does not say it.

    Attributes:
        at_s: Monotonic.
        cpus: How many are online.
        busy_s: CPU time of all processes since boot, over all CPUs. steal_s: That which other guests had instead.
        iowait_s: Time that CPUs idled while somebody waited for a disk.
        load: Processes that run or wait, the mean of the last minute.
        cpu_wait_s: Time that some process waited for a CPU, of /proc/pressure.
        memory_share: Of the memory, what is in use.
        throttled_s: Time that this cgroup was kept from its CPUs.
        frequency_mhz: The mean of the CPUs that report one.
    """

    at_s: float
    cpus: int
    busy_s: float | None = None
    steal_s: float | None = None
    iowait_s: float | None = None
    load: float | None = None
    cpu_wait_s: float | None = None
    memory_share: float | None = None
    throttled_s: float | None = None
    frequency_mhz: float | None = None


def read_machine(root: Path = Path("/")) -> Machine:
    """The state now. ``root``: where /proc and /sys are."""
    busy, steal, iowait, cpus = _cpu_times(root)
    return Machine(
        time.monotonic(), cpus or os.cpu_count() or 1, busy, steal, iowait, load=_first(root / "proc/loadavg"),
        cpu_wait_s=_pressure(root / "proc/pressure/cpu"), memory_share=_memory(root), throttled_s=_throttled(root),
        frequency_mhz=_frequency(root),
    )  # fmt: skip


def during(before: Machine, after: Machine, own_cpu_s: float) -> dict[str, float | None]:
    """What the machine did between two moments, besides what used ``own_cpu_s`` of CPU time; None: unknown.

    Shares are of the time of all CPUs, but ``cpu_wait_share`` and ``throttled_share``, which are of the time alone.
    """
    span = after.at_s - before.at_s
    whole = span * before.cpus if span >= SHORTEST_S else 0.0
    busy, steal = _less(after.busy_s, before.busy_s), _less(after.steal_s, before.steal_s)
    others = None if busy is None else max(0.0, busy - own_cpu_s) + (steal or 0.0)
    return {
        "load_before": before.load,
        "others_cpu_share": _share(others, whole),
        "steal_share": _share(steal, whole),
        "iowait_share": _share(_less(after.iowait_s, before.iowait_s), whole),
        "cpu_wait_share": _share(_less(after.cpu_wait_s, before.cpu_wait_s), span if whole else 0.0),
        "throttled_share": _share(_less(after.throttled_s, before.throttled_s), span if whole else 0.0),
        "memory_share": after.memory_share,
        "frequency_mhz": after.frequency_mhz,
    }


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(0.0, one - other)


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else round(part / whole, 6)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("ascii", "replace")
    except OSError:
        return ""


def _cpu_times(root: Path) -> tuple[float | None, float | None, float | None, int]:
    """Busy, steal and I/O wait in seconds, and how many CPUs there are; guests' time is in the user's already."""
    lines = _read(root / "proc/stat").splitlines()
    cpus = sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines)
    words = lines[0].split()[1:] if lines and lines[0].startswith("cpu ") else []
    if len(words) < 7 or not all(word.isdigit() for word in words):
        return None, None, None, cpus
    ticks = [int(word) / TICKS_S for word in words]
    user, nice, system, _idle, iowait, irq, softirq = ticks[:7]
    return user + nice + system + irq + softirq, ticks[7] if len(ticks) > 7 else None, iowait, cpus


def _first(path: Path) -> float | None:
    words = _read(path).split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return None


def _pressure(path: Path) -> float | None:
    for line in _read(path).splitlines():
        kind, _, total = line.partition("total=")
        if kind.startswith("some") and total.isdigit():
            return int(total) / 1e6
    return None


def _memory(root: Path) -> float | None:
    found = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0])
    if not found.get("MemTotal") or "MemAvailable" not in found:
        return None
    return round(1 - found["MemAvailable"] / found["MemTotal"], 4)


def _throttled(root: Path) -> float | None:
    """Of the cgroup of this process, version 2 or 1."""
    for line in filter(None, _read(root / "proc/self/cgroup").split("\n")):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            place, name, unit = "sys/fs/cgroup", "throttled_usec", 1e6
        elif "cpu" in controllers.split(","):
            place, name, unit = "sys/fs/cgroup/cpu", "throttled_time", 1e9
        else:
            continue
        for row in _read(root / place / path.lstrip("/") / "cpu.stat").splitlines():
            key, _, value = row.partition(" ")
            if key == name and value.isdigit():
                return int(value) / unit
    return None


def _frequency(root: Path) -> float | None:
    found = []
    for path in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))[:512]:
        text = _read(path).strip()
        if text.isdigit():
            found.append(int(text) / 1e3)
    return round(sum(found) / len(found), 1) if found else None
