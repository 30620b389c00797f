"""Disks: how long reads and writes took."""

from __future__ import annotations

from argus.health.check import Absent, Look, Result
from argus.health.checks._mounts import is_image
from argus.health.limit import Limit
from argus.model.units import seconds

LIMITS: dict[str, Limit] = {
    "warning": Limit(
        0.2, "mean seconds of an operation: warning", "a hard disk under load takes 0.02, an SSD far less"
    ),
    "critical": Limit(
        2.0, "mean seconds of an operation: critical", "the disk repeats or times out (SCSI's own limit is 30 s)"
    ),
    "operations": Limit(100, "operations in an hour from which on the mean counts", "fewer are one hiccup"),
}


def check(look: Look) -> Result:
    """Reads /proc/diskstats: Documentation/admin-guide/iostats.rst, fields 1, 4, 5 and 8. Whole disks only."""
    found = look.found()
    slowest = 0.0
    for line in look.read("proc/diskstats").splitlines():
        words = line.split()
        name = words[2]
        if is_image(name) or name.startswith("dm-") or not look.path(f"sys/block/{name}").exists():
            continue  # an image's speed is its owner's; what dm- maps is on disks that are listed themselves
        operations, spent_ms = int(words[3]) + int(words[7]), int(words[6]) + int(words[10])
        found.figures |= {f"operations_total/{name}": float(operations), f"spent_s_total/{name}": spent_ms / 1000}
        done = look.moved(found.figures, f"operations_total/{name}") or 0.0
        spent = look.moved(found.figures, f"spent_s_total/{name}") or 0.0
        if done >= look.limits["operations"]:
            mean = found.figures[f"mean_s/{name}"] = spent / done
            slowest = max(slowest, mean)
            text = f"{name}: an operation took {seconds(mean)} on average {look.since()}"
            found.above(
                mean,
                look.limits["warning"],
                look.limits["critical"],
                text,
                "See smartctl -a, and what loads it: iotop.",
            )
    if not found.figures:
        raise Absent("no disks")
    return found.result(f"slowest mean {seconds(slowest)}")
