"""Stuck tasks: those that sleep in the kernel and cannot be killed (state D)."""

from __future__ import annotations

import os
import time

from argus.health.check import Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "seconds": Limit(3.0, "how long a task must sleep there without waking", "disks answer sooner"),
    "critical": Limit(
        20, "so many are critical", "one may wait for a slow disk; many wait for a mount or a driver that is gone"
    ),
}


def check(look: Look) -> Result:
    """Looks twice at each thread (/proc/PID/task/TID/stat): one in state D both times that has not run is stuck."""
    first = _sleeping(look)
    if first:
        look.note("looking whether tasks in state D move")
        time.sleep(look.limits["seconds"])
    stuck = [who for who, ran in (_sleeping(look) if first else {}).items() if first.get(who) == ran]
    found = look.found()
    found.figures["stuck"] = float(len(stuck))
    if stuck:
        listed = ", ".join(f"{name} ({pid})" for pid, name in stuck[:4]) + (", …" if len(stuck) > 4 else "")
        text = f"{len(stuck)} task{'s' if len(stuck) > 1 else ''} stuck in the kernel: {listed}"
        found.above(
            len(stuck),
            1,
            look.limits["critical"],
            text,
            "See where: cat /proc/PID/stack; often a dead mount or driver.",
        )
    return found.result("none")


def _sleeping(look: Look) -> dict[tuple[int, str], tuple[str, str]]:
    """Threads in state D: (TID, name) → (start, context switches)."""
    sleeping = {}
    for process in look.folders("proc/[0-9]*"):
        for task in _threads(str(process)):
            try:
                with open(f"{task}/stat", errors="replace") as stat:
                    head, _, tail = stat.read().rpartition(")")
                if not tail.startswith(" D"):
                    continue
                with open(f"{task}/status") as status:
                    switches = "".join(line for line in status if "ctxt_switches" in line)
                sleeping[int(task.rpartition("/")[2]), head.partition("(")[2]] = (tail.split()[19], switches)
            except OSError:
                continue  # it ended
    return sleeping


def _threads(process: str) -> list[str]:
    try:
        return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]
    except OSError:
        return []  # as above
