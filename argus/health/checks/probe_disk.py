"""Disks: how long a small write takes until it is safe (measured)."""

from __future__ import annotations

import os
import statistics
import tempfile
import time

from argus.health.check import Absent, Look, Result
from argus.health.checks._idle import BUSY, wait_for_nobody
from argus.health.limit import Limit
from argus.model.units import seconds

LIMITS: dict[str, Limit] = {
    "busy": BUSY,
    "paths": Limit(["/var/tmp"], "folders that are written to", "on a disk that jobs use, such as the scratch disk"),
    "warning": Limit(0.1, "median seconds of a write: warning", "a hard disk takes 0.02, network storage 0.05"),
    "critical": Limit(2.0, "median seconds of a write: critical", "a disk that repeats or a server that is away"),
}
WRITES, SIZE = 20, 4096


def check(look: Look) -> Result:
    """20 times 4 KiB with fsync into a new file without a name, in each folder."""
    wait_for_nobody(look)
    found = look.found()
    slowest = 0.0
    for path in look.limits["paths"]:
        look.note(f"writing to {path}")
        took = []
        try:
            with tempfile.TemporaryFile(dir=path) as file:
                for _ in range(WRITES):
                    begun = time.perf_counter()
                    file.write(bytes(SIZE))
                    file.flush()
                    os.fsync(file.fileno())
                    took.append(time.perf_counter() - begun)
        except FileNotFoundError:
            continue
        except PermissionError:
            found.unknown(f"{path}: this user may not write there", "Run it as root.")
            continue
        except OSError as failure:
            found.critical(f"{path} cannot be written: {failure.strerror}", f"See mount, df {path} and dmesg.")
            continue
        median = found.figures[f"write_s/{path}"] = statistics.median(took)
        slowest = max(slowest, median)
        text = f"{path}: a write takes {seconds(median)} until it is safe"
        found.above(median, look.limits["warning"], look.limits["critical"], text, "See smartctl -a, iotop, nfsstat.")
    if not found.figures and found.result("").status == "ok":
        raise Absent("none of the folders exists")
    return found.result(f"slowest median {seconds(slowest)}")
