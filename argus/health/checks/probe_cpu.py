"""CPU: how fast one thread computes (measured)."""

from __future__ import annotations

import hashlib
import time

from argus.health.check import Look, Result
from argus.health.checks._idle import BUSY, wait_for_nobody
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {"busy": BUSY}
BLOCK, ROUNDS, ROUND_S = 16_384, 5, 0.1


def check(look: Look) -> Result:
    """SHA-256 of 16 KiB, which stay in the cache, again and again; the best of 5 rounds of 0.1 s, since others may take
    the CPU meanwhile. There is no threshold: compare with a node's own past and its peers (``--trend``)."""
    wait_for_nobody(look)
    found, best = look.found(), 0.0
    data = bytes(BLOCK)
    for _ in range(ROUNDS):
        count, begun = 0, time.perf_counter()
        while (spent := time.perf_counter() - begun) < ROUND_S:
            hashlib.sha256(data).digest()
            count += 1
        best = max(best, count / spent)
    found.figures["operations_per_s"] = best
    return found.result(f"{best:,.0f} hashes of 16 KiB a second")
