"""Stuck tasks: those that sleep in the kernel and cannot be killed (state D)."""

from __future__ import annotations

import os
import time
from collections import Counter

from argus.health.check import Look, Result
from argus.health.checks._waits import Wait, frames, has_fuse, is_node_s, what_for
from argus.health.limit import Limit
from argus.system.proc import field_of, read_file

LIMITS: dict[str, Limit] = {
    "seconds": Limit(3.0, "how long a task must sleep there without waking", "disks answer sooner"),
    "critical": Limit(
        20, "so many are critical", "one may wait for a slow disk; many wait for a mount or a driver that is gone"
    ),
}
_SWITCHES = (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")
_Task = tuple[int, str]
"""TID, name."""
_Sleep = tuple[str, tuple[bytes, ...]]
"""Folder in /proc; start and context switches of a task: those of one that has not run are the same."""


def check(look: Look) -> Result:
    """Looks twice at each thread (/proc/PID/task/TID/stat): one in state D both times that has not run is stuck, unless
    it waits for what any user can make. For critical count those that wait for a server or device, and the node's own
    tasks that wait for a disk."""
    first = _sleeping(look)
    if first:
        look.note("looking whether tasks in state D move")
        time.sleep(look.limits["seconds"])
    second = _sleeping(look) if first else {}
    stuck, counted = _at_fault({who: sleep[0] for who, sleep in second.items() if first.get(who) == sleep}, look)
    found = look.found()
    found.figures["stuck"] = float(len(stuck))
    if stuck:
        listed = ", ".join(f"{name} ({pid})" for pid, name in stuck[:4]) + (", …" if len(stuck) > 4 else "")
        text = f"{len(stuck)} task{'s' if len(stuck) > 1 else ''} stuck in the kernel: {listed}"
        hint = "See where: cat /proc/PID/stack; often a dead mount or driver."
        (found.critical if counted >= look.limits["critical"] else found.warning)(text, hint)
    return found.result("none")


def _at_fault(tasks: dict[_Task, str], look: Look) -> tuple[list[_Task], int]:
    """Those of stuck tasks that may be stuck by a fault of the node, and how many of them cannot be otherwise."""
    if not tasks:
        return [], 0
    look.note("looking where tasks are stuck")
    fuse_of_node = has_fuse(look)
    stuck, seen = [], Counter[Wait]()
    for who, task in tasks.items():
        wait = what_for(frames(task), node_s=is_node_s(task), fuse_of_node=fuse_of_node)
        if wait is not Wait.MADE:
            stuck.append(who)
            seen[wait] += 1
    return stuck, seen[Wait.FAULT] + (seen[Wait.BEHIND] if seen[Wait.FAULT] else 0)


def _sleeping(look: Look) -> dict[_Task, _Sleep]:
    """Threads in state D."""
    sleeping = {}
    for process in look.folders("proc/[0-9]*"):
        for task in _threads(str(process)):
            try:
                head, _, tail = read_file(f"{task}/stat").rpartition(b")")
                if not tail.startswith(b" D") or len(fields := tail.split()) < 20:
                    continue
                status = read_file(f"{task}/status")
                name = int(task.rpartition("/")[2]), head.partition(b"(")[2].decode(errors="replace")
                sleeping[name] = task, (fields[19], *(field_of(status, switches) for switches in _SWITCHES))
            except OSError:
                continue  # it ended
    return sleeping


def _threads(process: str) -> list[str]:
    try:
        return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]
    except OSError:
        return []  # as above
