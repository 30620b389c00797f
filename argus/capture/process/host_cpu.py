"""Who uses the CPUs of this node: the ranks that are traced, Argus, and everything else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from argus.capture.process.targets import PROC, cpu_ns
from argus.system.proc import read_file

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
"""Unit of /proc/stat."""


@dataclass(frozen=True)
class HostCpu:
    """CPU time of a node in an interval, ns: columns of the table ``host_usage``."""

    begin_ns: int
    interval_ns: int
    cpus: int
    busy_ns: int
    stolen_ns: int
    job_ns: int
    argus_ns: int


class HostCpuReader:
    """Reads /proc/stat, and the clocks of the traced processes, from time to time."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int, int, int] | None = None
        self._cpu_of: dict[int, int] = {}

    def read(self, pids: Iterable[int]) -> HostCpu | None:
        """What was used since the last call. None: it is the first one, or the kernel does not say.

        Args:
            pids: The traced processes. One counts from the second call on that names it.
        """
        try:
            now_ns = time.monotonic_ns()
            busy, stolen, cpus = parse_stat(read_file(f"{PROC}/stat"))
        except (OSError, ValueError):
            return None
        cpu_of = {pid: ns for pid in pids if (ns := cpu_ns(pid)) >= 0}
        both = cpu_of.keys() & self._cpu_of.keys()
        job = sum(max(cpu_of[pid] - self._cpu_of[pid], 0) for pid in both)
        before, self._before = self._before, (now_ns, busy, stolen, cpus, time.process_time_ns())
        self._cpu_of = cpu_of
        if before is None or now_ns <= before[0]:
            return None
        interval = now_ns - before[0]
        most = interval * cpus
        # Ticks are counted on each CPU by itself: sums may be a little more than there was.
        used = min(max(busy - before[1], 0), most)
        return HostCpu(
            before[0],
            interval,
            cpus,
            used,
            min(max(stolen - before[2], 0), used),
            min(job, most),
            min(self._before[4] - before[4], most),
        )


def parse_stat(text: bytes) -> tuple[int, int, int]:
    """What /proc/stat says: ns in which CPUs did something, ns taken by the hypervisor (part of the first), and how
    many CPUs there are.

    Raises:
        ValueError: It is not as proc(5) has it.
    """
    lines = text.splitlines()
    cpus = sum(line.startswith(b"cpu") and line[3:4].isdigit() for line in lines)
    # user nice system idle iowait irq softirq steal; guests are in user and nice already.
    times = [int(word) for word in lines[0].split()[1:9]] if lines and lines[0].startswith(b"cpu ") else []
    if len(times) < 8 or not cpus:
        raise ValueError("/proc/stat has no line of all CPUs")
    busy = sum(times) - times[3] - times[4]
    return busy * _TICK_NS, times[7] * _TICK_NS, cpus
