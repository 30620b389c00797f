"""Reads the rings of calls, also while the loop that works on them is held up.

The loop drains the rings as it turns. While it does not turn (it waits for a file, a process's memory, a store, a
terminal), the watchdog's thread drains them in its place (``relieve``): that touches nothing but memory. What is kept
has a bound; beyond it the rings are left to fill, so that the kernel counts what it has no room for, record by record
and against the process that made it (``launches_dropped`` and the like).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.ring import Ring

RELIEVE_S = 0.2
"""After so long without the loop its rings are drained for it: they hold a second of the densest load."""
KEPT_BYTES = 128 << 20
"""Records that wait for the loop: a quarter of a minute of the densest load."""


def join_records(parts: list[NDArray[np.void]], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Records in one piece, shape (n,). Each part is given up as soon as it is copied: a late loop's are many.

    Args:
        parts: What :meth:`CallRings.take` returned of one ring; empty afterwards.
    """
    if len(parts) == 1:
        return parts.pop()
    whole, at = np.empty(sum(map(len, parts)), dtype), 0
    parts.reverse()
    while parts:
        part = parts.pop()
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


class CallRings:
    """All rings of one set of probes. Any thread may use it.

    Args:
        rings: By name, in the order in which they are drained.
        kept_bytes: Bound of what is kept for ``take``.

    Attributes:
        relieved: Records that were drained while the loop did not turn.
    """

    def __init__(self, rings: Mapping[str, Ring], kept_bytes: int = KEPT_BYTES) -> None:
        self._rings = dict(rings)
        self._most = kept_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, list[NDArray[np.void]]] = {name: [] for name in self._rings}
        self._bytes = 0
        self._turned = time.monotonic()
        self._until_ns = 0
        self._closed = False
        self.relieved = 0

    @property
    def used(self) -> float:
        """Part of the fullest ring that waits to be read, 0 to 1."""
        return max(ring.used for ring in self._rings.values())

    def take(self) -> tuple[dict[str, list[NDArray[np.void]]], int]:
        """Drains all rings, for the loop.

        Returns:
            What came since the last call, by ring, in pieces, oldest first; and until when (CLOCK_MONOTONIC, ns): all
            that was written before is among it, or came earlier.
        """
        with self._lock:
            self._turned = time.monotonic()
            self._bytes = 0
            self._read()
            kept, self._kept = self._kept, {name: [] for name in self._rings}
            self._bytes = 0
            return kept, self._until_ns

    def relieve(self, now: float) -> None:
        """Drains all rings if the loop has not for ``RELIEVE_S``.

        Args:
            now: ``time.monotonic()``.
        """
        if now - self._turned < RELIEVE_S:
            return
        with self._lock:
            if not self._closed and self._bytes < self._most:
                self.relieved += self._read()

    def _read(self) -> int:
        """Reads all there is; returns how many records."""
        self._until_ns = time.monotonic_ns()
        count = 0
        for name, ring in self._rings.items():
            taken = ring.drain()
            if len(taken):
                self._kept[name].append(taken)
                self._bytes += len(taken) * taken.strides[0]
                count += len(taken)
        return count

    def close(self) -> None:
        """Drains nothing any more. Call it before the rings are closed."""
        with self._lock:
            self._closed = True
