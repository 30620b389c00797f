"""Steps of a job, where their time went, and its communicators, as rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.live.job import Job, is_waiting
from argus.live.session import Session
from argus.live.sides.alignment import LINED_UP_S, Aligner
from argus.live.sides.gpu_times import GpuSide
from argus.model.losses import Whom
from argus.semantics.groups.communicators import keep_alignment
from argus.semantics.groups.mesh import superseded
from argus.semantics.phases.cpu import METHODS as PHASE_METHODS
from argus.semantics.phases.cpu import PHASE, PHASES
from argus.semantics.steps.by_calls import METHODS
from argus.semantics.steps.by_marks import drop_ends
from argus.tables import arrow

SETTLE_NS = 10_000_000
"""Records of calls so long before the rings were read are in them: a probe writes within microseconds, unless it is
preempted."""

LAST_TIMES = 8
"""How often steps are numbered when a trace ends: what 16 ranks keep of ends that wait for what is a step to be
known, and of calls without a period."""


class StepRows:
    """Stores the steps of jobs.

    Args:
        session: The trace.
        gpu: Is given the steps and what the training threads did in them.
    """

    def __init__(self, session: Session, gpu: GpuSide) -> None:
        self._session = session
        self._gpu = gpu
        self._aligner = Aligner(session)

    def begin_turn(self, now: float) -> None:
        """A turn begins. ``now``: ``time.monotonic()``."""
        self._aligner.begin_turn(now)

    def go_on(self, now: float) -> None:
        """Goes on with communicators that are being lined up, between turns. ``now``: ``time.monotonic()``."""
        self._aligner.go_on(now)

    def store(self, job: Job, now: float, drained_ns: int, *, final: bool) -> None:
        """Lines a job's communicators up when that is due, and stores the steps that are complete.

        Args:
            job: The job.
            now: ``time.monotonic()``.
            drained_ns: What was called before this has been fed, CLOCK_MONOTONIC.
            final: Nothing more will come. Call it until there is nothing left (``is_waiting``).
        """
        until_ns = drained_ns - SETTLE_NS
        if not job.finishing:
            ends = job.calls_end
            if ends is not None and not ends.until and until_ns >= job.thin_since:
                ends.until = now + LINED_UP_S
                self._aligner.begin_anew(job)
            found = self._aligner.run(job, now, final=final)
            if found is not None:
                with self._aligner.using(job):
                    self._align(job, found)
            if ends is not None and ends.until and not ends.lined_up:
                ends.lined_up = found is not None or now >= ends.until
                if found is None and ends.lined_up and not final:
                    self._session.losses.count("communicators_over_share", Whom(job))
        job.finishing = final
        steps = job.steps(until_ns, final=final)
        if not len(steps):
            return
        if job.phases:
            steps = self._store_phases(job, steps)
        if job.sampled:
            phases, of, segments = job.sampled.split(steps)
            for rank, when in segments.items():
                self._gpu.feed_segments(job, rank, when)
            self._write_phases(job, phases, of)
        self._gpu.feed_steps(job, steps)
        job.recent_steps.feed(steps)
        job.step_ns += int(steps["duration_ns"].sum())
        job.step_count += len(steps)
        by_rank = {member.rank: member for member in job.ranks()}
        for rank in np.unique(steps["rank"]):
            member = by_rank[int(rank)]
            of_rank = steps[steps["rank"] == rank]
            member.steps += len(of_rank)
            member.last_step = int(of_rank["step"][-1])
            member.last_step_ns = int(of_rank["duration_ns"][-1])
        self._session.writer.append(
            "iterations",
            {
                "job": job.name,
                "run": np.full(len(steps), job.run, np.uint32),
                "rank": steps["rank"].copy(),
                "step": steps["step"].copy(),
                "host": self._session.host,
                "ts": steps["ts_ns"].astype(np.int64) + self._session.mono_offset_ns,
                "duration_ns": steps["duration_ns"].copy(),
                "collectives": steps["collectives"].copy(),
                "launches": steps["launches"].copy(),
                "method": arrow.dictionary(steps["method"].astype(np.int32), list(METHODS)),
                "confidence": steps["confidence"].copy(),
            },
        )

    def store_last(self, job: Job, now: float, drained_ns: int) -> None:
        """The same at the end, up to a bound; what is left then is dropped (``step_ends_dropped``)."""
        for _ in range(LAST_TIMES):
            self.store(job, now, drained_ns, final=True)
            if not is_waiting(job):
                return
        if job.by_marks is not False:
            drop_ends(job.marked)

    def _store_phases(self, job: Job, all_steps: NDArray[np.void]) -> NDArray[np.void]:
        """Stores where the time of these steps went. Returns them with the boundaries that marks set."""
        steps, rows = [], []
        for rank in np.unique(all_steps["rank"]).tolist():
            of_rank = all_steps[all_steps["rank"] == rank]
            phases = job.phases.get(rank)
            if phases is not None:
                until = job.phases_until or 1 << 62
                known = of_rank["ts_ns"].astype(np.int64) + of_rank["duration_ns"].astype(np.int64) <= until
                marked = of_rank[known] if job.by_marks else phases.snap(of_rank[known])
                rows.append(phases.split(marked))
                self._gpu.feed_segments(job, rank, phases.take_segments())
                steps.append(marked)
                of_rank = of_rank[~known]
                if len(of_rank):
                    del job.phases[rank]
            steps.append(of_rank)
        all_steps = np.concatenate(steps)
        self._write_phases(job, np.concatenate([np.empty(0, PHASE), *rows]), all_steps)
        return all_steps

    def _write_phases(self, job: Job, parts: NDArray[np.void], all_steps: NDArray[np.void]) -> None:
        """Stores phases of steps, which are among ``all_steps``."""
        if len(parts):
            for code, phase in enumerate(PHASES):
                job.phase_ns[phase] += int(parts["duration_ns"][parts["phase"] == code].sum())
            job.hidden_ns += int(parts["overlapped_ns"].sum())
            job.recent_steps.feed_phases(parts)
            order = np.lexsort((all_steps["step"], all_steps["rank"]))
            key = all_steps["rank"].astype(np.int64) << 32 | all_steps["step"]
            wanted = parts["rank"].astype(np.int64) << 32 | parts["step"]
            job.phased_steps += len(np.unique(wanted))
            starts = all_steps["ts_ns"][order[np.searchsorted(key[order], wanted)]].astype(np.int64)
            self._session.writer.append(
                "phases",
                {
                    "job": job.name,
                    "run": np.full(len(parts), job.run, np.uint32),
                    **{name: parts[name].copy() for name in ("rank", "step", "duration_ns", "overlapped_ns", "spans")},
                    "host": self._session.host,
                    "ts": starts + self._session.mono_offset_ns,
                    "phase": arrow.dictionary(parts["phase"].astype(np.int32), list(PHASES)),
                    "method": arrow.dictionary(parts["method"].astype(np.int32), list(PHASE_METHODS)),
                    "confidence": parts["confidence"].copy(),
                },
            )

    def _align(self, job: Job, found: NDArray[np.void]) -> None:
        """Goes by the communicators that were found, and stores what has changed."""
        communicators = keep_alignment(found, job.communicators)
        job.tracker.align(communicators)
        job.marked.align(communicators)
        same = np.array_equal(communicators, job.communicators)
        job.communicators = communicators
        self.store_mesh(job)
        if same:
            return
        self._session.writer.append(
            "communicators",
            {
                "job": job.name,
                "run": np.full(len(communicators), job.run, np.uint32),
                **{name: communicators[name].copy() for name in ("rank", "comm", "comm_group", "comm_rank", "nranks")},
                "seq_offset": communicators["seq_offset"].copy(),
                "joined_by": communicators["joined_by"].tolist(),
                "error": communicators["error"].tolist(),
                "version": np.full(len(communicators), self._session.next_version(), np.uint64),
            },
        )

    def store_mesh(self, job: Job) -> None:
        """Stores what the communicators are for, where that has changed."""
        before = job.mesh
        if not job.find_mesh():
            return
        guesses = superseded(before, job.mesh)
        mesh = [*job.mesh, *guesses]
        self._session.writer.append(
            "parallel_groups",
            {
                "job": job.name,
                "run": np.full(len(mesh), job.run, np.uint32),
                "host": self._session.host,
                "comm_group": np.array([group.id for group in mesh], np.uint64),
                "dimension": [group.dimension for group in mesh],
                "ranks": [list(group.ranks) for group in mesh],
                "nranks": np.array([group.size for group in mesh], np.int32),
                "confidence": np.array([group.confidence for group in mesh], np.float32),
                "why": [group.why for group in mesh],
                "version": self._session.next_version(),
                "superseded": np.repeat(np.array([0, 1], np.uint8), [len(job.mesh), len(guesses)]),
            },
        )
