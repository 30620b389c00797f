"""Whether a machine is quiet enough to observe on: what disturbs it, and how much a loop of fixed work varies."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from argus.compare.observe.machine import TICKS_S, during, read_machine
from argus.compare.observe.signs import MARGIN
from argus.model.units import seconds
from argus.system.proc import read_file

LOOPS, LOOP_S = 40, 0.02
"""Loops that are timed, and how long one is to take: 0.8 s together, 40 loops know their variation to a fifth."""
OTHERS, STEAL, THROTTLED = 0.05, 0.01, 0.01
"""Shares of the CPUs' time that disturb: of other processes, of other guests, and kept back by the cgroup."""
_SHOWN = 3

Level = Literal["ok", "noted", "disturbs", "unknown"]


@dataclass(frozen=True)
class Item:
    """One thing that was looked at: how it is, and what to do where it disturbs."""

    name: str
    level: Level
    text: str
    hint: str = ""


def time_loops(clock: Callable[[], float] = time.perf_counter, loops: int = LOOPS) -> list[float]:
    """Seconds that loops of the same work took, one after another; the work is chosen to take :data:`LOOP_S`."""
    count = 1000
    while (took := _loop(count, clock)) < LOOP_S / 4 and count < 1 << 30:
        count *= 2
    count = max(1, round(count * LOOP_S / max(took, 1e-9)))
    return [_loop(count, clock) for _ in range(loops)]


def _loop(count: int, clock: Callable[[], float]) -> float:
    began = clock()
    value = 1
    for _ in range(count):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return clock() - began


def examine(loops: Sequence[float], noise: Mapping[str, float | None], facts: Mapping[str, str], cpus: int,
            busy: Sequence[tuple[str, float]] = ()) -> list[Item]:  # fmt: skip
    """What was found, the loop first.

    Args:
        loops: Of ``time_loops``.
        noise: Of ``machine.during``, over the same time.
        facts: Of the host, as ``host_facts`` has them.
        cpus: How many there are.
        busy: Names of other processes and the CPUs they kept busy, most first.
    """
    return [
        _variation(loops),
        _others(noise.get("others_cpu_share"), cpus, busy),
        _limit(
            "steal", noise.get("steal_share"), STEAL, "of the CPUs' time went to other guests", "Ask for dedicated CPUs"
        ),
        _limit(
            "cgroup", noise.get("throttled_share"), THROTTLED, "of the time this cgroup was kept from its CPUs",
            "Raise its CPU limit",
        ),
        _load(noise.get("load_before"), cpus),
        _governor(facts.get("cpu.governor", "")),
        _smt(facts.get("cpu.smt", "")),
    ]  # fmt: skip


def quiet(items: Sequence[Item]) -> bool:
    """Whether nothing disturbs."""
    return not any(item.level == "disturbs" for item in items)


def _variation(loops: Sequence[float]) -> Item:
    values = np.array(loops)
    variation = float(values.std(ddof=1) / values.mean()) if len(values) > 1 and values.mean() > 0 else math.nan
    longest = values.max() / np.median(values)
    text = f"{len(values)} loops of {seconds(values.mean())} vary by {variation:.1%}"
    text += f", the longest took {longest:.2f} times the median"
    if not variation <= MARGIN:
        hint = f"Runs as short cannot be judged to {MARGIN:.0%}: make them longer, or the machine quieter"
        return Item("loop", "disturbs", text, hint)
    return Item("loop", "ok", text)


def _others(share: float | None, cpus: int, busy: Sequence[tuple[str, float]]) -> Item:
    names = ", ".join(f"{name} ({used:.0%} of a CPU)" for name, used in busy[:_SHOWN])
    text = f"other processes had {share or 0:.1%} of {cpus} CPUs" + (f": {names}" if names else "")
    if share is None:
        return Item("others", "unknown", "CPU time of other processes is not known: /proc/stat cannot be read")
    return Item("others", "disturbs" if share > OTHERS else "ok", text, "Stop them, or observe elsewhere")


def _limit(name: str, share: float | None, most: float, what: str, hint: str) -> Item:
    if share is None:
        return Item(name, "unknown", f"not known: what share {what}")
    return Item(name, "disturbs" if share > most else "ok", f"{share:.1%} {what}", hint)


def _load(load: float | None, cpus: int) -> Item:
    if load is None:
        return Item("load", "unknown", "the load is not known")
    text = f"load {load:.2f} on {cpus} CPUs in the last minute"
    return Item("load", "noted" if load > 0.5 * cpus else "ok", text, "Wait until it has fallen")


def _governor(governor: str) -> Item:
    if not governor:
        return Item("governor", "unknown", "the CPUs' governor is not known: in most virtual machines it is not")
    level: Level = "ok" if governor == "performance" else "noted"
    return Item("governor", level, f"the CPUs' governor is {governor}", "cpupower frequency-set -g performance")


def _smt(state: str) -> Item:
    if not state:
        return Item("smt", "unknown", "whether two threads share a core is not known")
    hint = "Pin the command: taskset, one thread a core"
    return Item("smt", "noted" if state == "on" else "ok", f"simultaneous multithreading is {state}", hint)


def measure(root: Path = Path("/")) -> tuple[list[float], dict[str, float | None], int, list[tuple[str, float]]]:
    """Times the loops and watches the machine meanwhile: arguments of ``examine``."""
    before, ticks, own = read_machine(root), _process_ticks(root), time.process_time()
    loops = time_loops()
    after, later, spent = read_machine(root), _process_ticks(root), time.process_time() - own
    span = max(after.at_s - before.at_s, 1e-9)
    busy = [
        (name, (now - ticks[pid][1]) / TICKS_S / span)
        for pid, (name, now) in later.items()
        if pid in ticks and pid != os.getpid() and now - ticks[pid][1] >= 0.02 * span * TICKS_S
    ]
    return loops, during(before, after, spent), before.cpus, sorted(busy, key=lambda one: -one[1])


def _process_ticks(root: Path) -> dict[int, tuple[str, int]]:
    """By process, its name and CPU time in ticks."""
    found = {}
    for place in (root / "proc").iterdir():
        if place.name.isdigit():
            try:
                name, _, rest = read_file(f"{place}/stat").decode(errors="replace").rpartition(")")
            except OSError:
                continue
            fields = rest.split()
            if len(fields) > 12:
                found[int(place.name)] = (name.partition("(")[2], int(fields[11]) + int(fields[12]))
    return found
