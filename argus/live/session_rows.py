"""Rows about a trace itself: its jobs, their ranks, the counters, who used the node's CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from argus import __version__
from argus.capture.process.host_cpu import HostCpuReader
from argus.capture.reader import reader
from argus.live.job import Job
from argus.live.session import Processes, Session
from argus.live.side import Counters, Side
from argus.model.losses import Whom
from argus.model.units import span_text
from argus.system import redact

_SUBJECTS = {
    "ranges": "steps and phases by PyTorch's marks",
    "backward": "backward passes",
    "nvtx": "NVTX ranges",
    "math": "matrix products",
}
"""Probes whose programs a kernel may refuse, for people."""
_OF_READER = ("file_systems_hung", "memory_hung", "processes_unreadable", "reads_over_budget")
"""Losses that the reader counts for all traces of this process, and reports with the process that each concerns."""
OVER_S = 10.0
"""For so long the last rows of a job may come after its last process has ended."""


RANKS_PAUSE = 19
"""Times as long as storing the ranks took, none are stored: that takes a twentieth of the time at most."""


class SessionRows:
    """Stores what the session is.

    Args:
        session: The trace.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._not_started: dict[str, tuple[str, str]] = {}
        """Of the probes, what did not start: state and reason."""
        self._written_jobs: set[tuple[str, int]] = set()
        self._parts_written: set[tuple[str, int, int]] = set()
        """Job, run and rank of which the features say what did not start."""
        self._host_cpu = HostCpuReader()
        self._ranks_changed, self._ranks_due = False, 0.0

    def write_ended(self, jobs: Sequence[Job]) -> None:
        """Jobs that will have no more rows. What fails for one costs it alone."""
        for job in jobs:
            with self._session.bulkheads.job(job):
                self.write_job(job, ended=True)

    def write_job(self, job: Job, *, ended: bool = False) -> None:
        """A job; ``ended``: it will have no more rows."""
        members = job.ranks()
        if not members:
            return
        self._written_jobs.add((job.name, job.run))
        self._session.writer.append(
            "jobs",
            {
                "job": job.name,
                "run": job.run,
                "host": self._session.host,
                "started": np.array([self._session.started_ns + self._session.first_offset_ns], np.int64),
                "ended": np.array([self._session.now_ns()], np.int64) if ended else [None],
                "world_size": max(member.target.identity.world_size for member in members),
                "launcher": members[0].target.identity.launcher,
                "mono_offset_ns": self._session.mono_offset_ns,
                "argus_version": __version__,
                "wall_error_ns": self._session.wall_error_ns,
                "step_flops": self._session.options.step_flops,
                "peak_flops": self._session.options.peak_flops,
                "version": self._session.next_version(),
            },
        )

    def ranks_changed(self, now: float) -> None:
        """Stores them, ``time.monotonic``, or soon if it was done just now: processes may come and go all the time."""
        self._ranks_changed = True
        self.store_changed(now)

    def store_changed(self, now: float) -> None:
        """Stores what ``ranks_changed`` left for later, if that is due."""
        if self._ranks_changed and now >= self._ranks_due:
            begun = time.monotonic()
            self.write_ranks()
            self._ranks_due = now + RANKS_PAUSE * (time.monotonic() - begun)

    def write_ranks(self) -> None:
        """All ranks of jobs that go on, and jobs that are new."""
        self._ranks_changed = False
        for job in self._session.jobs:
            if job.over_since and self._session.end_ns is None:
                continue  # nothing of it changes any more
            if (job.name, job.run) not in self._written_jobs:
                self.write_job(job)
            members = list(job.members.values())
            if not members:
                continue
            self._session.writer.append(
                "ranks",
                {
                    "job": job.name,
                    "run": job.run,
                    "rank": np.array([m.rank for m in members], np.uint32),
                    "host": self._session.host,
                    "pid": np.array([m.target.pid for m in members], np.uint32),
                    "local_rank": np.array([m.target.identity.local_rank for m in members], np.int32),
                    "rank_source": [m.rank_source for m in members],
                    "started": np.array([int(m.target.started_unix * 1e9) for m in members], np.int64),
                    "uid": np.array([m.target.identity.uid for m in members], np.int64),
                    "container": [m.target.identity.container for m in members],
                    "exe": [_storable(m.target.exe) for m in members],
                    "command": [
                        _storable(redact.more(m.target.command, self._session.options.redact)) for m in members
                    ],
                    "libraries": [[library.shown_path for library in m.target.libraries] for m in members],
                    "probes": np.array([m.probes for m in members], np.uint32),
                    "state": [m.state for m in members],
                    "version": self._session.next_version(),
                },
            )

    def write_not_started(self, forks: str) -> None:
        """What of the probes did not start, as features of each rank. ``forks``: ``Family.state``."""
        parts = {subject: ("failed", why) for subject, why in self._session.probes.refused.items()}
        if forks != "on":
            state, _, reason = forks.partition(": ")
            parts["fork events"] = (state, reason)
        if self._session.options.children and self._session.probes.forks != "on":
            state, _, reason = self._session.probes.forks.partition(": ")
            parts["forks in the kernel"] = (state, reason)
        self._not_started = parts
        if not parts:
            return
        states = [(part, state, reason) for part, (state, reason) in parts.items()]
        for job in self._session.jobs:
            keys = {(job.name, job.run, member.rank) for member in job.ranks()} - self._parts_written
            self._parts_written |= keys
            for _, _, rank in sorted(keys):
                self._session.write_features(job, [rank], states)

    def describe_not_started(self, look_interval_s: float) -> list[str]:
        """What ``write_not_started`` found, in lines for people. ``look_interval_s``: how often children are looked
        for."""
        parts = self._not_started
        lines = [f"{text}: failed: {parts[subject][1]}" for subject, text in _SUBJECTS.items() if subject in parts]
        if reader.shared.trouble:
            lines.append(f"reader: {reader.shared.trouble}")
        if "fork events" in parts:
            state, reason = parts["fork events"]
            why = f": {reason}" if reason else ""
            lines.append(f"forks: {state}{why}; children are found up to {span_text(look_interval_s)} late")
        if "forks in the kernel" in parts:
            state, reason = parts["forks in the kernel"]
            lines.append(f"forks in the kernel: {state}: {reason}; children are traced about a millisecond late")
        return lines

    def write_host_usage(self) -> None:
        """Stores who used the node's CPUs since the last time, for each job that runs."""
        used = self._host_cpu.read(member.target.pid for member in self._session.live())
        if used is None:
            return
        columns = {name: value for name, value in vars(used).items() if name != "begin_ns"}
        running = [job for job in self._session.jobs if not job.over_since]
        left_out = {id(job): job for job in running}
        for job in self._in_turn(running):
            del left_out[id(job)]
            ts = np.full(1, used.begin_ns + self._session.mono_offset_ns, np.int64)
            self._session.writer.append(
                "host_usage", {"job": job.name, "run": job.run, "host": self._session.host, "ts": ts, **columns}
            )
        for job in left_out.values():
            self._session.losses.count("rows_over_share", Whom(job))

    def _in_turn(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Those for whose rows there is time now, each for so long as it is worked on: of an owner with very many whose
        turn it has been for longest."""
        admission = self._session.roster.admission
        for job in sorted(jobs, key=lambda job: job.covered_at):
            if admission.may_write(job.owner):
                with admission.writing(job.owner):
                    yield job

    def write_coverage(
        self,
        counters: Counters,
        seen_ns: int,
        over_share: Callable[[int], int],
        sides: Sequence[Side],
        jobs: Sequence[Job] | None = None,
    ) -> None:
        """Stores the session's counters with these jobs: of losses that processes cause, each job's own.

        Args:
            counters: Of the session.
            seen_ns: What was called until then has become rows, CLOCK_MONOTONIC; 0: now.
            over_share: Samples and switches of a process's threads beyond its share, by PID.
            sides: What is observed.
            jobs: None: those that run and have their turn, and at the end all.
        """
        session = self._session
        with session.bulkheads.part("coverage"):
            self.count_refused(over_share)
        if jobs is None and session.end_ns is not None:
            jobs = session.jobs
        if jobs is None:
            begun = time.monotonic() - OVER_S
            for job in self._in_turn([job for job in session.jobs if not 0 < job.over_since < begun]):
                job.covered_at = time.monotonic()
                self._write_coverage_of(job, counters, seen_ns, sides)
            return
        for job in jobs:
            self._write_coverage_of(job, counters, seen_ns, sides)

    def _write_coverage_of(self, job: Job, counters: Counters, seen_ns: int, sides: Sequence[Side]) -> None:
        session = self._session
        own = {name: (value, True) for name, value in self._own_losses(job, sides).items()}
        of_job = counters | own | self._of_members(job)
        session.writer.append(
            "coverage",
            {
                "job": job.name,
                "run": job.run,
                "host": session.host,
                "counter": list(of_job),
                "value": np.array([value for value, _ in of_job.values()], np.uint64),
                "loss": np.array([loss for _, loss in of_job.values()], bool),
                "ts": np.full(len(of_job), (seen_ns or time.monotonic_ns()) + session.mono_offset_ns, np.int64),
                "version": session.next_version(),
            },
        )

    def _own_losses(self, job: Job, sides: Sequence[Side]) -> dict[str, int]:
        """Losses that processes cause, or jobs: what of them concerns this job."""
        session = self._session
        own = dict.fromkeys(_OF_READER, 0) | session.losses.of(job)
        parts: list[Side | Processes] = [*sides, session.roster]
        for each in parts:
            with session.bulkheads.part("counters"):
                own |= each.own_losses(job)
        return own

    def count_refused(self, over_share: Callable[[int], int]) -> None:
        """What the kernel side refused to each process that is there, and what was left out of it.

        Args:
            over_share: As ``write_coverage`` has it.
        """
        self._session.count_left_out()
        of_processes = self._session.probes.spent_of_all()
        for pid, (_, member) in self._session.roster.by_pid.items():
            member.refused = max(of_processes.get(pid, (0, 0, 0))[1], member.refused)
            member.over_share = max(over_share(pid), member.over_share)
            member.calls_over_share = max(self._session.probes.over_share(pid), member.calls_over_share)
            attachments = self._session.roster.attachments_of(member)
            member.without_slot = max(sum(each.lacks_slot for each in attachments), member.without_slot)
            member.without_code = max(sum(each.lacks_code for each in attachments), member.without_code)

    def _of_members(self, job: Job) -> dict[str, tuple[int, bool]]:
        """The losses of a job that are its own, and its processes', and nobody else's."""
        members = list(job.members.values())
        return {
            "records_over_budget": (sum(member.refused for member in members), True),
            "stack_threads_over_share": (sum(member.over_share for member in members), True),
            "pending_over_share": (sum(member.calls_over_share[0] for member in members), True),
            "seq_over_share": (sum(member.calls_over_share[1] for member in members), True),
            "records_over_share": (sum(member.calls_over_share[2] for member in members), True),
            "file_slots_full": (sum(member.without_slot for member in members), True),
            "instructions_unread": (sum(member.without_code for member in members), True),
            "processes_ignored": (sum(bool(member.ignored) for member in members), True),
        }

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        self._written_jobs.discard((job.name, job.run))
        self._parts_written = {key for key in self._parts_written if key[:2] != (job.name, job.run)}


def _storable(text: str) -> str:
    """Text that is valid UTF-8, whatever bytes it came from."""
    return os.fsencode(text).decode(errors="backslashreplace")
