"""How far the wall clock is from CLOCK_MONOTONIC."""

from __future__ import annotations

import time

CLOCK_S = 60.0
"""How often the wall clock is compared with CLOCK_MONOTONIC anew."""


def mono_offset_ns() -> int:
    """Wall time minus CLOCK_MONOTONIC, ns: of 32 readings, the one taken in the shortest time."""
    best = (1 << 62, 0)
    for _ in range(32):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        best = min(best, (after - before, wall - (before + after) // 2))
    return best[1]
