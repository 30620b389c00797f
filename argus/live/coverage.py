"""Which signals of a rank are observed, since when, and for what share of the time: the table ``signal_coverage``.

A signal that was thinned out, seen in windows, or whose probes are not there yet is unknown, not silent. Whoever
concludes something from silence asks this table first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SIGNALS = (
    "ranges",
    "nvtx",
    "backward",
    "launches",
    "calls",
    "collectives",
    "products",
    "stacks",
    "off_cpu",
    "gpu_times",
)
"""Column ``signal``."""


@dataclass(frozen=True)
class Seen:
    """How much of a signal is observed.

    Attributes:
        share: Of the time: 1 throughout, 0 not at all, between: in windows.
        period_ns: From the begin of one window to the next; 0: there are no windows.
        reason: Why, for people.
    """

    share: float = 1.0
    period_ns: int = 0
    reason: str = ""


Rank = tuple[str, int, int]
"""Job, run, rank."""


class SignalCoverage:
    """Makes the rows of ``signal_coverage``: one at each change."""

    def __init__(self) -> None:
        self._now: dict[Rank, dict[str, Seen]] = {}

    def of(self, rank: Rank) -> dict[str, Seen]:
        """What holds for a rank."""
        return dict(self._now.get(rank, {}))

    def update(self, states: Mapping[Rank, Mapping[str, Seen]], ts_ns: int, host: str, version: int) -> dict[str, Any]:
        """The rows for what has changed.

        Args:
            states: Of each rank, what holds now, by signal. Signals that are left out stay as they were.
            ts_ns: Since when, wall time: for what begins, when it was there; for what ends, when it began to go.
            host: Column ``host``.
            version: Column ``version``.

        Returns:
            Columns; ``rank`` is empty where nothing has changed.
        """
        changed: list[tuple[Rank, str, Seen]] = []
        for rank, signals in states.items():
            before = self._now.setdefault(rank, {})
            changed += [(rank, name, seen) for name, seen in signals.items() if before.get(name) != seen]
            before.update(signals)
        return {
            "job": [rank[0] for rank, _, _ in changed],
            "run": np.array([rank[1] for rank, _, _ in changed], np.uint32),
            "rank": np.array([rank[2] for rank, _, _ in changed], np.uint32),
            "host": host,
            "signal": [name for _, name, _ in changed],
            "ts": np.full(len(changed), ts_ns, np.int64),
            "seen": np.array([seen.share for _, _, seen in changed], np.float32),
            "period_ns": np.array([seen.period_ns for _, _, seen in changed], np.uint64),
            "reason": [seen.reason for _, _, seen in changed],
            "version": version,
        }

    def end(self, ranks: Iterable[Rank], reason: str) -> dict[Rank, dict[str, Seen]]:
        """States for ``update`` of ranks of which nothing is observed any more."""
        return {
            rank: {name: Seen(0.0, 0, reason) for name, seen in self._now.get(rank, {}).items() if seen.share}
            for rank in ranks
        }

    def forget(self, job: str, run: int) -> None:
        """Drops what is kept of a job that is over."""
        for rank in [rank for rank in self._now if rank[:2] == (job, run)]:
            del self._now[rank]
