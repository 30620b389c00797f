"""Phases of a recording's steps, from the ranges that it names: PyTorch's own, and those that people give."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.recording import Int, Recording
from argus.semantics.phases.cpu import MARK, PHASE, PhaseTracker, What
from argus.semantics.steps.range_names import Role, meaning_of, role_of

PAUSE_NS = 1_000_000
"""A backward pass ends where its engine does nothing for so long, and for :data:`PAUSES` times its usual pause."""
PAUSES = 20
_BEGINS = {Role.BACKWARD: (What.BACKWARD_BEGIN, What.BACKWARD_END)}


def role_of_range(name: str) -> Role:
    """What a range is for: by PyTorch's names, else by the words of its own."""
    return role_of(name) or meaning_of(name).role


def phases_of(recording: Recording, steps: NDArray[np.void]) -> NDArray[np.void]:
    """Where the training thread's time went in each step, by the same marks as live.

    Args:
        recording: With ``ranges`` and ``engine``. What could not be paired is counted in its ``counters``.
        steps: ``ITERATION`` rows, in order of time.

    Returns:
        :data:`argus.semantics.phases.cpu.PHASE` rows; none where no range has a role.
    """
    chosen = [(each, role) for each in recording.ranges if (role := role_of_range(each[0]))]
    tid = _training_thread(chosen)
    rows: list[tuple[int, int, int, int, int, int]] = []
    for (_, begin, end, own), role in chosen:
        first, last = _BEGINS.get(role, (What.RANGE_BEGIN, What.RANGE_END))
        if own == tid and end > begin:
            shown = 0 if role is Role.BACKWARD else int(role)
            rows += [(begin, 0, own, first, shown, 0), (end, 0, own, last, shown, 0)]
    if tid >= 0 and not any(role is Role.BACKWARD for _, role in chosen):
        for begin, end in _backwards(recording.engine):
            rows += [(begin, 0, tid, What.BACKWARD_BEGIN, 0, 0), (end, 0, tid, What.BACKWARD_END, 0, 0)]
    if not rows or not len(steps):
        return np.empty(0, PHASE)
    tracker = PhaseTracker()
    marks = np.array(rows, MARK)
    marks = marks[np.lexsort((marks["what"] % 2 == 0, marks["ts_ns"]))]
    parts = []
    fed = 0
    for place in range(len(steps)):
        end = int(steps["ts_ns"][place]) + int(steps["duration_ns"][place])
        until = int(np.searchsorted(marks["ts_ns"], np.uint64(end), side="right"))
        tracker.feed(marks[fed:until])
        fed = max(fed, until)
        parts.append(tracker.split(steps[place : place + 1]))
    recording.counters["ranges_unfinished"] += tracker.counters["ranges_unfinished"]
    return np.concatenate(parts)


def _training_thread(chosen: list[tuple[tuple[str, int, int, int], Role]]) -> int:
    """The thread with the most ranges that only the one that trains has; -1: no range has a role."""
    count: dict[int, int] = {}
    for (_, _, _, tid), role in chosen:
        # Threads of their own write checkpoints, too.
        weight = 3 if role in (Role.OPTIMIZER, Role.DATA) else role is not Role.CHECKPOINT
        count[tid] = count.get(tid, 0) + weight
    return max(count, key=lambda tid: count[tid], default=-1)


def _backwards(engine: Int) -> list[tuple[int, int]]:
    """When autograd's engine was at work: (begin, end) of each backward pass. ``engine``: begin, end and thread of what
    it evaluated, shape (n, 3)."""
    if not len(engine):
        return []
    order = np.argsort(engine[:, 0], kind="stable")
    begin, end = engine[order, 0], np.maximum.accumulate(engine[order, 1])
    pause = begin[1:] - end[:-1]
    usual = float(np.median(np.maximum(pause, 0))) if len(pause) else 0.0
    cuts = np.flatnonzero(pause > max(PAUSE_NS, PAUSES * usual)) + 1
    first, last = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(begin)]]) - 1
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))
