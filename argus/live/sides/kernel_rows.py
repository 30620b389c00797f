"""Which GPU operations are stored: summaries of all; one by one all, or those of some steps and flagged time spans.

``KernelSide`` is one trace's. Steps are thinned by powers of two, by number: all ranks of all hosts keep the same
steps, so that ranks can be compared in them.

A row of the summaries covers several steps while a job is calm (``COVERED``), and one each from the moment on that
somebody flags one, or that a step takes longer than usual: a flag is what a finding leads to as well.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.compress.kernels import HELD, Compressor
from argus.live.gpu.room import over_room
from argus.live.job import Job
from argus.live.session import Session
from argus.live.side import Counters, Side
from argus.live.sides.recorder import RECORDER_BYTES, FlightRecorder, called_ns
from argus.model.losses import Owner
from argus.semantics.gpu.kernel_steps import NO_STEP, KernelGroups, KernelSteps, StepOps, describe
from argus.tables import gpu

RATE_S = 10.0
"""Over which the rate is taken: buffers come about once a second."""
THICKEN_S = 60.0
"""After so long below half of what may be stored, twice as many steps are."""
MAX_EVERY = 1 << 20
FLAG_S = 10.0
"""At most one moment in that time is flagged for a reason of Argus's own."""
MAX_FLAGGED_NS = 10_000_000_000
"""The longest such moment."""
SLOW = 1.3
"""A step longer than so many times the median of the rank's last ones is flagged."""
COMPARED_STEPS = 64
LATE_NS = 5_000_000_000
"""So long after a moment its operations have come: buffers are handed over every second."""
COVERED = 16
"""Steps that a row of a kernel may cover while nothing happens; a power of two, since rows end at multiples of it."""
ROW_S = 10.0
"""The longest that a row may be open for."""
CALM_S = 60.0
"""How long after something happened every step still gets rows of its own: so long a window of a diagnosis is."""
RECORDED = 8 * RECORDER_BYTES
"""What all flight recorders may keep, 256 MiB: those of a node's eight ranks fill it. Who has more shares it."""
OUTSIDE = 1 << 31
"""From here on numbers of steps stand for stretches outside every step: plus the second of the trace they began in."""
_OF_JOB = ("kernel_groups", "kernel_templates")
"""Tables whose rows are of no host."""


@dataclass
class _Window:
    """A moment that was flagged, of one process."""

    begin_ns: int
    end_ns: int
    why: str
    operations: int = 0


@dataclass
class _Process:
    """One process's operations."""

    job: Job
    rank: int
    pid: int
    names: gpu.Names
    groups: KernelGroups
    steps: KernelSteps = field(default_factory=KernelSteps)
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    first_ns: int = 0
    """When the first operation that was recorded began; 0: none was."""
    windows: list[_Window] = field(default_factory=list)
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=COMPARED_STEPS))
    open_since: float = 0.0
    """When the oldest of its open rows was begun, ``time.monotonic()``; 0: none is open."""
    outside: int = OUTSIDE

    @property
    def held(self) -> int:
        """Bytes in its flight recorder, as ``over_room`` asks."""
        return self.recorder.nbytes

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        return self.job.owner


@dataclass
class _JobKernels:
    """A job's. ``outside``: sums up what is of no step; ``every``: of so many steps one is stored one by one;
    ``communicated``: of ``counted``, those that communicate; ``floods``: whether these are too many to be stored all;
    ``quiet``: since when that could be more; ``left_at``: when the last of its processes had gone, 0: there is one;
    ``stirred_at``: when something happened last."""

    job: Job
    compressor: Compressor = field(default_factory=lambda: Compressor())
    outside: Compressor = field(default_factory=lambda: Compressor())
    every: int = 1
    counted: int = 0
    communicated: int = 0
    floods: bool = False
    since: float = 0.0
    quiet: float = 0.0
    left_at: float = 0.0
    flagged_at: float = -FLAG_S
    stirred_at: float = -CALM_S

    @property
    def held(self) -> int:
        """Bins of rows that wait for templates, as ``over_room`` asks."""
        return self.compressor.held + self.outside.held

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        return self.job.owner


_REJECTED = "kernels_durations_rejected"


class KernelSide(Side):
    """The operations of all ranks of a trace.

    Args:
        session: The trace. Of its options: ``raw``, what is stored one by one ("auto": everything up to ``raw_rows_s``
            a second and job, beyond that some steps and what was flagged; "all"; "flagged": only that; what
            communicates is in any case, up to ``raw_rows_s``).
    """

    name = "kernels"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._raw = session.options.raw
        self._rows_s = session.options.raw_rows_s
        self._jobs: dict[int, _JobKernels] = {}
        self._processes: dict[tuple[int, int], _Process] = {}
        self._outside = self._thinned = self._cut = 0
        self._counted: Tally[str] = Tally()
        self._held = 0
        """Of all jobs (``_JobKernels.held``)."""
        self._begun_ns = time.monotonic_ns()

    @property
    def keeps(self) -> bool:
        """Whether operations are in memory that are not in the store: flagging a moment makes a difference."""
        return self._raw == "flagged" or any(of_job.every > 1 for of_job in self._jobs.values())

    # ---- operations

    def feed(
        self,
        job: Job,
        rank: int,
        pid: int,
        names: gpu.Names,
        ops: NDArray[np.void],
        communication: NDArray[np.bool_],
    ) -> None:
        """Takes operations of a process, and stores those that are to be stored at once.

        Args:
            job: Its job.
            rank: Its rank.
            pid: The process.
            names: Its names; those of ``ops`` are known.
            ops: ``records.GPU_OP``, shape (n,). Must not be changed afterwards.
            communication: Which of them communicate, shape (n,).
        """
        of_job, process = self._of_job(job), self._of_process(job, rank, pid, names)
        if not len(ops):
            return
        of_job.counted += len(ops)
        of_job.communicated += int(np.count_nonzero(communication))
        process.first_ns = process.first_ns or int(ops["start_ns"].min())
        called = called_ns(ops)
        process.steps.feed(ops, called, process.groups.of(ops))
        at_once = communication & (not of_job.floods) | (of_job.every == 1 and self._raw != "flagged")
        self._store(process, ops[at_once])
        if self._raw != "all" and not at_once.all():
            process.recorder.feed(ops, called, at_once)
        for window in process.windows:
            self._store_window(process, window)

    def settle(self, job: Job, pid: int, steps: Sequence[tuple[int, int, int]], *, final: bool = False) -> None:
        """Sums up the steps that are over.

        Args:
            job: The process's job.
            pid: The process.
            steps: Begin and end on the CPU in ns, and number, of each step of which all operations have been fed.
            final: Nothing more of the process will come.
        """
        process = self._processes.get((id(job), pid))
        if process is None:
            return
        of_job = self._of_job(job)
        for begin_ns, end_ns, step in steps:
            if of_job.every > 1 and step % of_job.every == 0:
                self._store(process, process.recorder.take_called(begin_ns, end_ns))
            compared = len(process.lengths) >= COMPARED_STEPS // 2
            if compared and end_ns - begin_ns > SLOW * float(np.median(process.lengths)):
                self.flag(job, begin_ns, end_ns, "slow step")
            process.lengths.append(end_ns - begin_ns)
        self._sum_up(process, process.steps.settle(steps, final=final))
        if final:
            of_job.compressor.release(process.rank)
            for window in process.windows:
                self._close_window(process, window)
            process.recorder.close()
            self._outside += process.steps.outside
            self._cut += process.steps.cut
            self._thinned += process.recorder.forgotten
            del self._processes[id(job), pid]
            if not any(process.job is job for process in self._processes.values()):
                of_job.left_at = time.monotonic()

    def waiting(self, job: Job, pid: int) -> int:
        """Operations of a process that wait for their step. Arguments as for ``settle``."""
        process = self._processes.get((id(job), pid))
        return 0 if process is None else process.steps.size

    def keep(self, job: Job, pid: int, most: int) -> None:
        """Lets no more than so many operations of a process wait for their step: the oldest are summed up now, as of no
        step, and so are the steps that they were of (``gpu_steps_cut``). Other arguments as for ``settle``."""
        process = self._processes.get((id(job), pid))
        if process is not None and process.steps.size > most:
            self._sum_up(process, process.steps.settle([], most=most))

    def _sum_up(self, process: _Process, settled: Iterable[StepOps]) -> None:
        of_job = self._of_job(process.job)
        before = of_job.held
        for step, begin_ns, end_ns, ops in settled:
            compressor = of_job.compressor
            if step == NO_STEP:
                second = OUTSIDE + max(begin_ns - self._begun_ns, 0) // 1_000_000_000
                step = process.outside = max(process.outside + 1, second)
                compressor = of_job.outside
            compressor.feed(process.rank, step, begin_ns, end_ns, ops.group, ops.start, ops.duration)
            if not of_job.compressor.holds(process.rank):
                process.open_since = 0.0
            elif not process.open_since:
                process.open_since = time.monotonic()
        self._held += of_job.held - before
        if self._held > HELD:
            self._store_held()

    def _store_held(self) -> None:
        """Stores rows that wait for templates, of jobs that have more of them than their part of ``HELD``."""
        for of_job, _ in over_room(self._jobs.values(), HELD, HELD):
            of_job.compressor.mature()
            of_job.outside.mature()
            self._store_summaries(of_job, final=False)
        self._held = sum(of_job.held for of_job in self._jobs.values())

    def work(self, now: float, *, final: bool = False) -> None:
        """Stores summaries that are ready, and finds out how much may be stored one by one."""
        self.work_at(now, time.monotonic_ns(), final=final)

    def work_at(self, now: float, now_ns: int, *, final: bool = False) -> None:
        """The same at a given time: ``time.monotonic()``, and in nanoseconds."""
        for process in self._processes.values():
            for window in [window for window in process.windows if window.end_ns + LATE_NS < now_ns]:
                process.windows.remove(window)
                self._close_window(process, window)
            if process.open_since and now - process.open_since >= ROW_S:
                self._of_job(process.job).compressor.release(process.rank)
                process.open_since = 0.0
        for process, most in over_room(self._processes.values(), RECORDED, RECORDED):
            process.recorder.keep(most)
        self._store_held()
        for key, of_job in list(self._jobs.items()):
            if now - of_job.since >= RATE_S:
                if of_job.since:
                    over_s = now - of_job.since
                    # No job's collectives are so many. What a kernel is called is up to the process.
                    of_job.floods = self._raw != "all" and of_job.communicated / over_s > self._rows_s
                    self._thin(of_job, of_job.counted / over_s, now)
                    self._cover(of_job, now)
                of_job.counted, of_job.communicated, of_job.since = 0, 0, now
            over = bool(of_job.left_at) and now - of_job.left_at > LATE_NS / 1e9
            self._store_summaries(of_job, final=final or over)
            if over and not final:
                # Ranks that start again are another job: what this one still held has gone to the store.
                counted = _counters(of_job)
                self._counted.update(counted)
                of_job.job.losses[_REJECTED] += counted["durations_rejected"]
                del self._jobs[key]

    # ---- moments

    def flag(
        self, job: Job, begin_ns: int, end_ns: int, why: str, ranks: Iterable[int] = (), *, asked: bool = False
    ) -> None:
        """Keeps the operations of a moment one by one.

        Args:
            job: The job.
            begin_ns: Begin of the moment, CLOCK_MONOTONIC.
            end_ns: Its end; may lie ahead.
            why: What for, in words.
            ranks: Whose operations; none: all ranks'.
            asked: Somebody asked for it. For other reasons it is done now and then only.
        """
        of_job, now, wanted = self._of_job(job), time.monotonic(), set(ranks)
        of_job.stirred_at = now
        of_job.compressor.cover(1)
        if self._raw == "all" or begin_ns >= end_ns:
            return
        if not asked:
            if now - of_job.flagged_at < FLAG_S or (of_job.every == 1 and self._raw == "auto"):
                return
            of_job.flagged_at = now
            end_ns = min(end_ns, begin_ns + MAX_FLAGGED_NS)
        for process in self._processes.values():
            if process.job is job and (not wanted or process.rank in wanted):
                process.windows.append(window := _Window(begin_ns, end_ns, why))
                self._store_window(process, window)

    def _store_window(self, process: _Process, window: _Window) -> None:
        ops = process.recorder.take_ran(window.begin_ns, window.end_ns)
        window.operations += len(ops)
        self._store(process, ops)

    def _close_window(self, process: _Process, window: _Window) -> None:
        self._store_window(process, window)
        origin = self._session.origin(process.job)
        self._session.writer.append(
            "raw_windows",
            {
                "job": origin.job,
                "run": origin.run,
                "rank": process.rank,
                "host": origin.host,
                "ts": np.array([window.begin_ns + origin.mono_offset_ns], np.int64),
                "duration_ns": window.end_ns - window.begin_ns,
                "why": window.why,
                "whole": process.recorder.gone_ns <= window.begin_ns and 0 < process.first_ns <= window.begin_ns,
                "operations": window.operations,
            },
        )

    def forget(self, job: Job) -> None:
        """Drops what is left of a job that is over: somebody may have flagged a moment of one without GPU times."""
        if not any(process.job is job for process in self._processes.values()):
            of_job = self._jobs.pop(id(job), None)
            if of_job is not None:
                self._store_summaries(of_job, final=True)
                self._counted.update(_counters(of_job))

    # ---- inside

    def _of_job(self, job: Job) -> _JobKernels:
        if id(job) not in self._jobs:
            self._jobs[id(job)] = _JobKernels(job)
        return self._jobs[id(job)]

    def _of_process(self, job: Job, rank: int, pid: int, names: gpu.Names) -> _Process:
        key = id(job), pid
        process = self._processes.get(key)
        if process is None or process.names is not names:  # it runs another program now
            both = self._of_job(job).compressor, self._of_job(job).outside

            def number(op: NDArray[np.void]) -> int:
                what = describe(op, names.words, names.codes)
                group, same = (compressor.group(**what) for compressor in both)
                assert group == same  # they are asked for the same kernels in the same order
                return group

            def others(operations: int) -> int:
                group, same = (compressor.others(operations) for compressor in both)
                assert group == same
                return group

            groups = KernelGroups(number, others)
            if process is not None:
                # What is in memory has the old program's names.
                for window in process.windows:
                    self._store_window(process, window)
                process.recorder.close()
            if process is None:
                process = self._processes[key] = _Process(job, rank, pid, names, groups)
            process.names, process.groups = names, groups
        return process

    def _store(self, process: _Process, ops: NDArray[np.void]) -> None:
        if len(ops):
            origin = self._session.origin(process.job)
            rows = gpu.kernel_events(ops, origin, process.rank, process.pid, process.names)
            self._session.writer.append("kernel_events", rows)

    def _thin(self, of_job: _JobKernels, rate: float, now: float) -> None:
        every = of_job.every
        while rate / every > self._rows_s and every < MAX_EVERY:
            every *= 2
        if rate / every > self._rows_s / 4 or every == 1:
            of_job.quiet = now
        elif now - of_job.quiet >= THICKEN_S:
            every, of_job.quiet = every // 2, now
        if every != of_job.every and self._raw == "auto":
            of_job.every = every
            self._session.note(
                f"job {of_job.job.name}: {rate:,.0f} GPU operations a second; one by one those of 1 step in {every} "
                "are stored from now on, and all are summed up (--raw)"
            )

    def _cover(self, of_job: _JobKernels, now: float) -> None:
        """Finds out how many steps a row may cover: none is open for longer than ``ROW_S``."""
        usual = [np.median(p.lengths) for p in self._processes.values() if p.job is of_job.job and len(p.lengths)]
        steps = COVERED if usual and now - of_job.stirred_at >= CALM_S else 1
        while steps > 1 and steps * float(max(usual)) > ROW_S * 1e9:
            steps //= 2
        of_job.compressor.cover(steps)

    def _store_summaries(self, of_job: _JobKernels, *, final: bool) -> None:
        origin = self._session.origin(of_job.job)
        for compressor in (of_job.compressor, of_job.outside):
            for table, columns in compressor.take(final=final).items():
                if compressor is of_job.outside and table == "kernel_groups":
                    continue  # the other one has the same
                rows: dict[str, Any] = {"job": origin.job, "run": origin.run, **columns}
                if table not in _OF_JOB:
                    rows["host"] = origin.host
                if "ts" in rows:
                    rows["ts"] = rows["ts"] + origin.mono_offset_ns
                self._session.writer.append(table, rows)

    def counters(self) -> Counters:
        """Value of each counter, and whether a value above 0 is a loss."""
        thinned = self._thinned + sum(process.recorder.forgotten for process in self._processes.values())
        outside = self._outside + sum(process.steps.outside for process in self._processes.values())
        cut = self._cut + sum(process.steps.cut for process in self._processes.values())
        compressed = Tally(self._counted)
        for of_job in self._jobs.values():
            compressed.update(_counters(of_job))
        return {
            "gpu_ops_thinned": (thinned, False),
            "gpu_ops_outside_steps": (outside, False),
            "gpu_steps_cut": (cut, False),
            **{f"kernels_{name}": (value, name == "durations_rejected") for name, value in compressed.items()},
        }

    def own_losses(self, job: Job) -> dict[str, int]:
        """Kernels of a job whose durations cannot be."""
        of_job = self._jobs.get(id(job))
        live = 0 if of_job is None else _counters(of_job)["durations_rejected"]
        return {_REJECTED: live + job.losses[_REJECTED]}


def _counters(of_job: _JobKernels) -> Tally[str]:
    """What both of a job's compressors count; they know the same groups."""
    counters = Tally(of_job.compressor.counters)
    counters.update({name: value for name, value in of_job.outside.counters.items() if not name.startswith("groups")})
    return counters
