"""Phases of a few steps now and then: of those that lie in windows in which PyTorch's ranges are seen."""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque

import numpy as np
from numpy.typing import NDArray

from argus.semantics.phases.cpu import MARK, MARKS, PHASE, PIECES, SEGMENT, PhaseTracker, What
from argus.semantics.steps.by_calls import ITERATION

MOST_WINDOWS = 8
"""Windows whose steps are not yet there; older ones are dropped."""


class SampledPhases:
    """Phases of a job's steps in windows.

    Attributes:
        counters: As those of ``PhaseTracker``; ``marks_dropped_old``: in windows with more than are kept, too.
    """

    def __init__(self) -> None:
        self.counters: Tally[str] = Tally()
        self._windows: deque[list[int]] = deque(maxlen=MOST_WINDOWS)
        """Begin and end, CLOCK_MONOTONIC; the end is 0 as long as it is open."""
        self._marks: dict[int, list[NDArray[np.void]]] = {}
        self._steps: dict[int, list[NDArray[np.void]]] = {}
        self._dropped_ns: dict[int, int] = {}
        """Of ranks with more marks than are kept: the newest that was dropped."""

    def __bool__(self) -> bool:
        return bool(self._windows)

    def begin(self, at_ns: int) -> None:
        """From now on ranges are seen."""
        self._windows.append([at_ns, 0])

    def end(self, at_ns: int) -> None:
        """They no longer are. Nothing happens if they were not."""
        if self._windows and not self._windows[-1][1]:
            self._windows[-1][1] = at_ns

    def covers(self, ts_ns: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which moments lie in a window, shape (n,)."""
        ts = ts_ns.astype(np.int64)
        inside = np.zeros(len(ts), bool)
        for begin, end in self._windows:
            inside |= (ts >= begin) & (ts < (end or 1 << 62))
        return inside

    def forget_marks(self) -> None:
        """Gives back marks and steps that wait for each other: none comes any more."""
        self._marks.clear()
        self._steps.clear()

    def feed(self, rank: int, marks: NDArray[np.void]) -> None:
        """Takes a rank's marks: :data:`argus.semantics.phases.cpu.MARK`; those outside of windows are left out."""
        marks = marks[(marks["what"] < What.STEP_BEGIN) & self.covers(marks["ts_ns"])]
        if not len(marks):
            return
        kept = self._marks.setdefault(rank, [])
        if len(kept) >= PIECES:
            kept[:] = [np.concatenate(kept)]
        if sum(map(len, kept)) + len(marks) <= MARKS:
            kept.append(marks.copy())
        else:
            self._dropped_ns[rank] = int(marks["ts_ns"].max())
            self.counters["marks_dropped_old"] += len(marks)

    def split(self, steps: NDArray[np.void]) -> tuple[NDArray[np.void], NDArray[np.void], dict[int, NDArray[np.void]]]:
        """The phases of steps in windows that are over: a rank's are, once a step comes that ends after them.

        Args:
            steps: Rows of ``steps.ITERATION`` since the last call, shape (n,), those of a rank in order of time.

        Returns:
            :data:`argus.semantics.phases.cpu.PHASE`; the steps that they are of; when each phase was, by rank
            (:data:`argus.semantics.phases.cpu.SEGMENT`).
        """
        phases, of, segments = [np.empty(0, PHASE)], [np.empty(0, ITERATION)], {}
        for rank in np.unique(steps["rank"]).tolist():
            of_rank = steps[steps["rank"] == rank]
            waiting = np.concatenate([*self._steps.pop(rank, []), of_rank[self.covers(of_rank["ts_ns"])]])
            newest_ns = int((of_rank["ts_ns"].astype(np.int64) + of_rank["duration_ns"].astype(np.int64)).max())
            found = []
            for begin, end in self._windows:
                if not 0 < end < newest_ns:
                    continue
                rows, those, when = self._of_window(rank, waiting, begin, end)
                phases.append(rows)
                of.append(those)
                found.append(when)
                waiting = waiting[waiting["ts_ns"].astype(np.int64) >= end]
            if found:
                segments[rank] = np.concatenate(found)
            if len(waiting):
                self._steps[rank] = [waiting[-MARKS:]]
        return np.concatenate(phases), np.concatenate(of), segments

    def _of_window(
        self, rank: int, steps: NDArray[np.void], begin: int, end: int
    ) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void]]:
        """The phases of one window, whose marks are dropped."""
        marks = np.concatenate([np.empty(0, MARK), *self._marks.get(rank, [])])
        ts = marks["ts_ns"].astype(np.int64)
        self._marks[rank] = [marks[ts >= end]]
        first = steps["ts_ns"].astype(np.int64)
        steps = steps[(first >= begin) & (first + steps["duration_ns"].astype(np.int64) <= end)]
        marks = marks[ts < end]  # those before it went with the window before it
        if not len(steps) or not len(marks) or begin <= self._dropped_ns.get(rank, 0):
            return np.empty(0, PHASE), np.empty(0, ITERATION), np.empty(0, SEGMENT)
        tracker = PhaseTracker()
        tracker.feed(marks)
        rows = tracker.split(steps)
        self.counters += tracker.counters
        return rows, steps, tracker.take_segments()
