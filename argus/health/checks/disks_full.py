"""Disks: space and inodes of every file system."""

from __future__ import annotations

import math
import os

from argus.health.check import OK, Absent, Look, Result
from argus.health.checks._mounts import LOCAL, NETWORK, mounts
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "warning": Limit(
        0.9,
        "used share of space or inodes: warning",
        "file systems slow down; a checkpoint of the next days no longer fits",
    ),
    "critical": Limit(
        0.97, "used share of space or inodes: critical", "df(1)'s own number, which leaves out root's reserve"
    ),
    "types": Limit([], "further file system types to look at", "tmpfs, for one"),
    "paths": Limit(
        ["/", "/dev/shm", "/run", "/tmp"],
        "mounts to look at whatever their type",
        "NCCL and data loaders fail when /dev/shm is full; / and /tmp may be in memory, too",
    ),
    "skip": Limit([], "mounts to leave out", ""),
}


def check(look: Look) -> Result:
    """Asks each by statvfs(2). A dead network mount hangs here; the run then names it."""
    found = look.found()
    looked = 0
    for mount in mounts(look):
        wanted = mount.type in (*LOCAL, *NETWORK, *look.limits["types"]) or mount.path in look.limits["paths"]
        if not wanted or mount.read_only or mount.path in look.limits["skip"]:
            continue
        where = look.path(mount.path.lstrip("/"))
        look.note(f"statvfs {where}")
        try:
            usage = os.statvfs(where)
        except FileNotFoundError:
            continue  # gone since
        except PermissionError:
            found.unknown(f"{mount.path} may not be looked at", "Run it as root.")
            continue
        except OSError as failure:
            found.warning(f"{mount.path} does not answer: {failure.strerror}", "Mount it again.")
            continue
        looked += 1
        usable = usage.f_blocks - usage.f_bfree + usage.f_bavail
        for what, used in (
            ("space", (usage.f_blocks - usage.f_bfree) / usable if usable else 0.0),
            ("inodes", 1 - usage.f_favail / usage.f_files if usage.f_files else 0.0),
        ):
            found.figures[f"used_{what}_share/{mount.path}"] = used
            text = f"{mount.path}: {used:.0%} of its {what} used"
            critical = look.limits["critical"]
            if mount.is_image and mount.path not in look.limits["paths"]:
                critical = math.inf  # a user's, most likely: nothing of the node's fails
            found.above(used, look.limits["warning"], critical, text, "Delete or move old checkpoints and logs.")
    if not looked and found.result("").status == OK:
        raise Absent("no file system to look at")
    fullest = max(found.figures, key=lambda name: found.figures[name], default="/")
    return found.result(
        f"{looked} file systems, fullest {fullest.partition('/')[2]} {found.figures.get(fullest, 0):.0%}"
    )
