"""Counts of stacks, garbage collections and threads' times as rows of each job's tables."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from argus.capture import offcpu
from argus.live.display.stack_view import Recent
from argus.live.job import Job
from argus.live.sampling.dictionary import StackDictionary
from argus.live.sampling.process import SampledProcess
from argus.live.sampling.processes import SampledProcesses
from argus.live.session import Session
from argus.model import records
from argus.model.losses import Whom
from argus.tables import stacks as stack_rows

RECENT_S = 5.0
"""What the live view shows, or what the newest rows hold."""


class StackRows:
    """Writes what was counted.

    Args:
        session: Where rows go, and where samples without a rank, or without a stack, are counted.
        processes: Whose they are.
        dictionary: The stacks.
        now: ``time.monotonic()``.

    Attributes:
        recent: Of each time that counts became rows in the last seconds: what the live view shows.
    """

    def __init__(
        self,
        session: Session,
        processes: SampledProcesses,
        dictionary: StackDictionary,
        now: float,
    ) -> None:
        self._session = session
        self._processes = processes
        self._dictionary = dictionary
        self._written_at = now
        self.recent: deque[Recent] = deque()

    def write(
        self,
        counts: list[NDArray[np.void]],
        pauses: list[NDArray[np.void]],
        usage: list[tuple[SampledProcess, NDArray[np.void]]],
        now: float,
        *,
        slack_s: float,
    ) -> None:
        """Writes a turn's rows of all jobs: what fails for one costs no other.

        Args:
            counts: ``records.STACK_COUNT``.
            pauses: Garbage collections, ``records.PAUSE``.
            usage: Processes, and their threads' times, ``records.THREAD_USAGE``.
            now: ``time.monotonic()``.
            slack_s: So much older than ``RECENT_S`` the oldest of ``recent`` may not be.
        """
        all_counts, all_pauses = _joined(counts, records.STACK_COUNT), _joined(pauses, records.PAUSE)
        with_rank = np.zeros(len(all_counts), bool)
        usage_of: dict[int, list[tuple[SampledProcess, NDArray[np.void]]]] = {}
        for process, used in usage:
            usage_of.setdefault(id(process.job), []).append((process, used))
        for job, pids in self._processes.pids_of_jobs():
            of_job = _among(all_counts["pid"], pids)
            with_rank |= of_job
            with self._session.bulkheads.job(job):
                self._write_counts(job, _chosen(all_counts, of_job), now)
                if len(all_pauses):
                    self._write_pauses(job, all_pauses[_among(all_pauses["pid"], pids)])
                self._write_usage(job, usage_of.get(id(job), []))
        if not with_rank.all():
            self._session.count_losses("stack_samples_without_rank", all_counts["pid"], all_counts["count"], ~with_rank)
        while self.recent and self.recent[0].until < now - RECENT_S + slack_s:
            self.recent.popleft()
        self._written_at = now

    def _write_counts(self, job: Job, counts: NDArray[np.void], now: float) -> None:
        if not len(counts):
            return
        ids = self._dictionary.ids_of(counts["stack"], job.owner)
        missing = (ids == 0) & (counts["stack"] != 0)
        if missing.any():
            number = int(counts["count"][missing].sum())
            self._session.losses.count("stack_samples_without_stack", Whom(job), number=number)
        counts, ids = _together(counts, ids)
        ranks, threads = self._ranks_and_threads(counts)
        self._write_stacks(job, ids)
        reasons = offcpu.reasons(counts["what"])
        samples = stack_rows.to_samples(counts, self._session.origin(job), ranks, threads, ids, reasons)
        self._session.writer.append("stack_samples", samples)
        self.recent.append(Recent(self._written_at, now, counts, ranks, ids, reasons))

    def _write_stacks(self, job: Job, ids: NDArray[np.uint64]) -> None:
        """Those that the job's dictionary lacks."""
        fresh = self._dictionary.unwritten(job, ids)
        if fresh and self._session.writer.append("stacks", stack_rows.to_stacks(fresh, self._session.origin(job))):
            self._dictionary.note_written(job, fresh)

    def _write_pauses(self, job: Job, pauses: NDArray[np.void]) -> None:
        if not len(pauses):
            return
        ranks, threads = self._ranks_and_threads(pauses)
        ids = self._dictionary.ids_of(pauses["stack"], job.owner)
        self._write_stacks(job, ids)
        rows = stack_rows.to_pauses(pauses, self._session.origin(job), ranks, threads, ids)
        self._session.writer.append("gc_pauses", rows)

    def _write_usage(self, job: Job, usage: list[tuple[SampledProcess, NDArray[np.void]]]) -> None:
        if not usage:
            return
        ranks = np.repeat([process.rank for process, _ in usage], [len(rows) for _, rows in usage])
        names = [process.name_of(tid) for process, rows in usage for tid in rows["tid"].tolist()]
        joined = _joined([rows for _, rows in usage], records.THREAD_USAGE)
        self._session.writer.append(
            "thread_usage", stack_rows.to_usage(joined, self._session.origin(job), ranks, names)
        )

    def _ranks_and_threads(self, events: NDArray[np.void]) -> tuple[NDArray[np.uint32], list[str]]:
        """Rank and thread name of each record."""
        processes = [self._processes.by_pid[pid] for pid in events["pid"].tolist()]
        ranks = np.array([process.rank for process in processes], np.uint32)
        return ranks, list(map(SampledProcess.name_of, processes, events["tid"].tolist()))


def _among(numbers: NDArray[np.uint32], wanted: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Which numbers are among those that are wanted, of which there is one at least, in order."""
    places = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
    matches: NDArray[np.bool_] = wanted[places] == numbers
    return matches


def _joined(parts: list[NDArray[np.void]], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """All of them. numpy copies structures field by field: one alone is taken as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _chosen(rows: NDArray[np.void], which: NDArray[np.bool_]) -> NDArray[np.void]:
    """Those rows; as they are, if all are chosen."""
    return rows if which.all() else rows[which]


def _together(counts: NDArray[np.void], ids: NDArray[np.uint64]) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
    """Rows that differ only in where in its functions a stack was, as one.

    Args:
        counts: ``records.STACK_COUNT``, shape (n,).
        ids: ``Stack.id`` of each; 0: none.
    """
    whose = counts["pid"].astype(np.uint64) << np.uint64(32) | counts["tid"]
    when = counts["what"].astype(np.uint64) << np.uint64(32) | counts["window"]
    order = np.lexsort((when, whose, ids))
    keys = [column[order] for column in (ids, whose, when)]
    begins = np.flatnonzero(
        np.concatenate([[True], np.logical_or.reduce([column[1:] != column[:-1] for column in keys])])
    )
    rows = counts[order]
    out = rows[begins]
    for name in ("count", "ns", "runqueue_ns"):
        out[name] = np.add.reduceat(rows[name], begins)
    for name in ("max_ns", "last_ns"):
        out[name] = np.maximum.reduceat(rows[name], begins)
    out["first_ns"] = np.minimum.reduceat(rows["first_ns"], begins)
    return out, keys[0][begins]
