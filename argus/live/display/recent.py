"""The newest steps and collectives of a job's ranks: what the live view's step times, shares and lateness come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from argus.semantics.phases.cpu import PHASES
from argus.semantics.steps.by_calls import ITERATION

RECENT_STEPS = 120
"""Steps of each rank that are kept: as many as the widest sparkline shows."""
LATE_CALLS = 256
"""Newest collectives of a rank by which its lateness is measured: several steps of most jobs."""
COMPUTING, WAITING, DATA, OTHER = "computing", "waiting", "data loading", "other"
"""What a rank's time is spent on, in the order in which it is drawn."""
PARTS = (COMPUTING, WAITING, DATA, OTHER)
_PART_OF_PHASE = {"data_loading": DATA, "communication": WAITING, "checkpoint": OTHER, "other": OTHER}


class RecentSteps:
    """The newest steps of a job's ranks, and how their time was spent: :data:`RECENT_STEPS` of each rank."""

    def __init__(self) -> None:
        self._batches: dict[int, deque[NDArray[np.void]]] = {}
        self._phases: dict[int, deque[NDArray[np.int64]]] = {}
        self.newest_ns = 0

    def feed(self, steps: NDArray[np.void]) -> None:
        """Takes new steps: ITERATION rows."""
        for rank, chosen in _by_rank(steps):
            _keep(self._batches.setdefault(rank, deque()), chosen)
        if len(steps):
            self.newest_ns = max(self.newest_ns, int((steps["ts_ns"] + steps["duration_ns"]).max()))

    def feed_phases(self, parts: NDArray[np.void]) -> None:
        """Takes where the time of new steps went: PHASE rows."""
        for rank, chosen in _by_rank(parts):
            spent = np.bincount(chosen["phase"], chosen["duration_ns"].astype(np.float64), len(PHASES))
            kept = self._phases.setdefault(rank, deque(maxlen=64))
            kept.append(np.append(spent, len(np.unique(chosen["step"]))).astype(np.int64))

    def times_ms(self) -> list[float]:
        """Median over ranks of each of the newest steps, the oldest first."""
        kept = [batch for batches in self._batches.values() for batch in batches]
        if not kept:
            return []
        rows = np.concatenate([np.empty(0, ITERATION), *kept])
        steps, which = np.unique(rows["step"], return_inverse=True)
        order = np.lexsort((rows["duration_ns"], which))
        begins = np.searchsorted(which[order], np.arange(len(steps)))
        counts = np.diff(np.append(begins, len(rows)))
        middle = rows["duration_ns"][order][begins + counts // 2]
        return [float(ns) / 1e6 for ns in middle[-RECENT_STEPS:]]

    def typical_ms(self, rank: int) -> float | None:
        """Median of a rank's newest 32 steps; None: there is none."""
        batches = self._batches.get(rank)
        if not batches:
            return None
        times = np.concatenate([batch["duration_ns"] for batch in batches])[-32:]
        return float(np.median(times)) / 1e6

    def parts(self, rank: int) -> dict[str, float]:
        """Shares of a rank's newest steps by :data:`PARTS`; empty: there are no phases."""
        kept = self._phases.get(rank)
        if not kept:
            return {}
        spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        chosen, steps = [], 0
        for row in reversed(kept):
            chosen.append(row[:-1])
            steps += int(row[-1])
            if steps >= 32:
                break
        for phase, ns in zip(PHASES, np.sum(chosen, axis=0).tolist(), strict=True):
            spent[_PART_OF_PHASE.get(phase, COMPUTING)] += ns
        whole = sum(spent.values())
        return {part: ns / whole for part, ns in spent.items()} if whole else {}


def _by_rank(rows: NDArray[np.void]) -> list[tuple[int, NDArray[np.void]]]:
    return [(rank, rows[rows["rank"] == rank]) for rank in np.unique(rows["rank"]).tolist()]


def _keep(batches: deque[NDArray[np.void]], fresh: NDArray[np.void]) -> None:
    """Adds steps and drops what is too old: whole batches, joined once they are many."""
    batches.append(fresh[-RECENT_STEPS:].copy())
    if len(batches) > 16:
        joined = np.concatenate(list(batches))[-RECENT_STEPS:]
        batches.clear()
        batches.append(joined)


def lateness_ms(recent: Mapping[int, NDArray[np.void]], communicators: NDArray[np.void]) -> dict[int, float]:
    """By how much each rank typically comes later to collectives than the first of the ranks here.

    Args:
        recent: Of each rank its newest COLLECTIVE rows, in order.
        communicators: COMMUNICATOR rows that line them up; those with an error are left out.

    Returns:
        Rank → median over its newest :data:`LATE_CALLS` calls that another rank here made as well, ms.
    """
    by_comm = {(int(row["rank"]), int(row["comm"])): row for row in communicators if not row["error"]}
    groups, numbers, ranks, times = [], [], [], []
    for rank, calls in recent.items():
        calls = calls[-LATE_CALLS:]
        for comm in np.unique(calls["comm"]).tolist():
            place = by_comm.get((rank, comm))
            if place is None:
                continue
            chosen = calls[calls["comm"] == comm]
            groups.append(np.full(len(chosen), place["comm_group"], np.uint64))
            numbers.append(chosen["seq"].astype(np.int64) + int(place["seq_offset"]))
            ranks.append(np.full(len(chosen), rank, np.int64))
            times.append(chosen["ts_ns"].astype(np.int64))
    if not groups:
        return {}
    group, number, rank_of, at = map(np.concatenate, (groups, numbers, ranks, times))
    order = np.lexsort((at, number, group))
    group, number, rank_of, at = group[order], number[order], rank_of[order], at[order]
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(number) != 0) | (group[1:] != group[:-1])]))
    sizes = np.diff(np.append(begins, len(at)))
    late = at - np.repeat(at[begins], sizes)
    shared = np.repeat(sizes, sizes) > 1
    return {
        rank: float(np.median(late[chosen])) / 1e6
        for rank in np.unique(rank_of).tolist()
        if (chosen := shared & (rank_of == rank)).any()
    }
