"""Memory: how fast one thread copies (measured)."""

from __future__ import annotations

import time

from argus.health.check import Look, Result
from argus.health.checks._idle import BUSY, wait_for_nobody
from argus.health.limit import Limit
from argus.model.units import bandwidth

LIMITS: dict[str, Limit] = {"busy": BUSY}
SIZE, ROUNDS = 128 << 20, 8
"""Bytes that are copied, more than caches hold, and how often."""


def check(look: Look) -> Result:
    """The quickest of 8 copies of 128 MiB, read and written bytes both counted (as STREAM's Copy does). No threshold,
    as in probe_cpu."""
    import numpy as np  # every run of argus health imports this file

    wait_for_nobody(look)
    found, quickest = look.found(), float("inf")
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        np.copyto(target, source)
        quickest = min(quickest, time.perf_counter() - begun)
    found.figures["copy_gb_per_s"] = 2 * SIZE / quickest / 1e9
    return found.result(bandwidth(2 * SIZE / quickest))
