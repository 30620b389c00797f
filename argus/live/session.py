"""What all sides of one trace share: the writer, the host, the clocks, notes for the user, the jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.forks import wall_error_ns
from argus.capture.reader import left_out
from argus.live.bulkhead import Bulkheads
from argus.live.clock import mono_offset_ns
from argus.live.cost.admission import Admission
from argus.live.cost.turns import Turns
from argus.live.notes import Notes
from argus.live.options import Options
from argus.model.losses import UNKNOWN, Losses, Owner, Whom
from argus.model.units import duration
from argus.store.writer import Writer
from argus.system import host as hosts
from argus.system import redact
from argus.system.proc import owner_of
from argus.tables.arrow import Origin

if TYPE_CHECKING:
    from argus.capture.attachment import Attachment
    from argus.capture.probes import Probes
    from argus.capture.process.targets import Target
    from argus.live.job import Job, Member

OF_LOOP, SAVED_S = 0.25, 2.0
"""Share of the loop's time for names of several owners' processes, and what an owner has saved that had few looked up:
a job that begins has thousands of stacks that are new."""
KEPT_HUNG = 4096
"""File systems that did not answer, times those whom they concern, that are kept apart."""
JUMP_NS = 1_000_000
"""By how much the clocks differ otherwise than before: both are slewed alike, so that only a clock that was set, or a
machine that slept, changes it. A measurement is good to microseconds."""


def host_name(options: Options) -> str:
    """Name of this host, as rows have it."""
    return redact.host(hosts.host_name(options.host), options.redact)


class Processes(Protocol):
    """Who is traced, as sides may ask: ``argus.live.roster.Roster``.

    Attributes:
        jobs: Every attempt of every job that is kept.
        admission: Time for each owner's new processes.
        by_pid: Ranks and helpers, those included that ended and whose last records have not been read.
    """

    admission: Admission
    jobs: list[Job]
    by_pid: dict[int, tuple[Job, Member]]

    @property
    def attached(self) -> list[Attachment]:
        """Probes on files."""

    def live(self) -> list[Member]:
        """Ranks whose process runs."""

    def candidates(self) -> list[Target]:
        """Processes that have loaded a library of the GPU and may yet be ranks of their own."""

    def attachments_of(self, member: Member) -> list[Attachment]:
        """Probes on the files that a process maps."""

    def adopt_callers(self, pids: set[int]) -> bool:
        """Makes ranks of processes whose calls have arrived. Whether there was one."""

    def waited(self, pid: int) -> None:
        """Takes note that a process had made no CUDA call when its libraries got their probes."""

    def whom(self, pid: int) -> Whom:
        """Whom a loss of a process concerns."""

    def own_losses(self, job: Job) -> Mapping[str, int]:
        """As ``Side.own_losses``."""


class Session:
    """One trace, as its sides see it. ``Tracer`` makes it, and is the only one to set what changes.

    Args:
        options: What to trace, and how.
        writer: Where rows go.

    Attributes:
        host: Name of this host, as rows have it.
        mono_offset_ns: Wall time minus CLOCK_MONOTONIC, ns.
        first_offset_ns: The same when the trace began.
        wall_error_ns: How far the wall clock may be off; -1: not known.
        clock_jumps: How often ``mono_offset_ns`` was taken anew.
        started_ns, end_ns: When the trace began, and when its probes began to go (None: they are there),
            CLOCK_MONOTONIC.
        attached_ns: When the first probes were on, CLOCK_MONOTONIC.
        run: Number of the first run.
        notes: What the user is to read.
        losses: What was lost, and whom it concerns.
        bulkheads: What failed alone.
        children: Whether forks of the targets are followed.
        look_ups: Time of the loop for names of each owner's processes.
        several: Whether jobs of several owners run.
    """

    def __init__(self, options: Options, writer: Writer) -> None:
        self.options = options
        self.writer = writer
        self.host = host_name(options)
        self.mono_offset_ns = self.first_offset_ns = mono_offset_ns()
        self.wall_error_ns = wall_error_ns()
        self.clock_jumps = 0
        self.started_ns = time.monotonic_ns()
        self.end_ns: int | None = None
        self.attached_ns = 0
        self.run = int(time.time()) if options.run is None else options.run
        self.notes = Notes()
        self.losses = Losses(any_container=options.job is not None)
        self.bulkheads = Bulkheads(self.note, self.losses)
        self._probes: Probes | None = None
        self._roster: Processes | None = None
        self._version = time.time_ns()
        self.several = False
        self.look_ups = Turns(OF_LOOP, SAVED_S, time.monotonic)
        self._hung: set[tuple[object, ...]] = set()

    # ---- traced processes

    @property
    def has_probes(self) -> bool:
        """Whether probes are loaded."""
        return self._probes is not None

    @property
    def probes(self) -> Probes:
        """The probes on CUDA's and NCCL's calls, from ``Tracer.start`` on."""
        assert self._probes is not None
        return self._probes

    @probes.setter
    def probes(self, probes: Probes | None) -> None:
        self._probes = probes

    @property
    def has_roster(self) -> bool:
        """Whether the roster of traced processes exists already."""
        return self._roster is not None

    @property
    def roster(self) -> Processes:
        """The traced processes, from ``Tracer.start`` on."""
        assert self._roster is not None
        return self._roster

    @roster.setter
    def roster(self, roster: Processes | None) -> None:
        self._roster = roster

    @property
    def jobs(self) -> list[Job]:
        """Every attempt of every job that is kept."""
        return [] if self._roster is None else self._roster.jobs

    def live(self) -> list[Member]:
        """Ranks whose process runs."""
        return [] if self._roster is None else self._roster.live()

    @property
    def calls_come(self) -> bool:
        """Whether calls are probed, or may be."""
        return self._roster is not None and bool(self._roster.attached or self.options.children)

    def fill_look_ups(self, now: float) -> None:
        """Gives each owner its part of the time for look-ups, ``time.monotonic()``. Has the probes know who trains."""
        jobs = {job.owner for job in self.jobs if not job.over_since}
        self.several = len(jobs) > 1
        if self._probes is not None:
            self._probes.trains({user for user, _ in jobs})
        candidates = [] if self._roster is None else self._roster.candidates()
        self.look_ups.fill({UNKNOWN, *jobs, *(target.identity.owner for target in candidates)}, now)

    def may_look_up(self, pid: int) -> bool:
        """As ``LookUps.may_look_up``."""
        if may := self.has_time(pid):
            return may
        self.losses.count("look_ups_over_share", self.whom(pid))
        return False

    def has_time(self, pid: int) -> bool:
        """The same for what can be done later: nothing is counted."""
        whom = self.whom(pid)
        return self.look_ups.may(whom.owner if whom.job is None else whom.job.owner)

    def looking_up(self, pid: int) -> AbstractContextManager[None]:
        """As ``LookUps.looking_up``."""
        whom = self.whom(pid)
        return self.look_ups.spending(whom.owner if whom.job is None else whom.job.owner)

    def waited(self, pid: int) -> None:
        """Takes note that a process had waited for GPU times before its first CUDA call."""
        if self._roster is not None:
            self._roster.waited(pid)

    def whom(self, pid: int) -> Whom:
        """Whom a loss of a process concerns: its job, or the jobs of its owner. Any thread may ask."""
        return Whom(None, owner_of(pid)) if self._roster is None else self._roster.whom(pid)

    def count_of_reader(self, counter: str, pid: int, number: int, device: str) -> None:
        """As ``Reader.on_loss``. A file system that does not answer is one loss of each that it concerns."""
        whom = self.whom(pid)
        if device:
            key = device, whom.owner if whom.job is None else id(whom.job)
            if key in self._hung or len(self._hung) >= KEPT_HUNG:
                return
            self._hung.add(key)
        self.losses.count(counter, whom, number=number)

    def count_left_out(self) -> None:
        """Counts what the tracer has left out of processes, where there is no reader, and what the kernel has lost."""
        for counter, pid, number in left_out.take():
            self.losses.count(counter, self.whom(pid), number=number)
        for owner, lost, number in self.probes.owners.take_losses():
            self.losses.count(lost.name.lower(), Whom(None, owner), number=number)

    def forget_losses(self) -> None:
        """Forgets losses of owners of whom neither a process nor a job is there, before their number is a problem."""
        if self.losses.crowded:
            self.losses.keep(self.probes.owners.there() | {job.owner for job in self.jobs})

    def count_losses(
        self, counter: str, pids: NDArray[np.integer], numbers: NDArray[np.integer], lost: NDArray[np.bool_]
    ) -> None:
        """Counts what was lost of several processes.

        Args:
            counter: Its name.
            pids: Whose each record is, shape (n,).
            numbers: How much each stands for, shape (n,).
            lost: Which of them were lost, shape (n,).
        """
        whose, places = np.unique(pids[lost], return_inverse=True)
        counts = np.zeros(len(whose), np.int64)
        np.add.at(counts, places, numbers[lost])
        for pid, number in zip(whose.tolist(), counts.tolist(), strict=True):
            self.losses.count(counter, self.whom(pid), number=number)

    # ---- rows

    def origin(self, job: Job) -> Origin:
        """What rows of a job say besides the records that they are made of."""
        return Origin(job.name, job.run, self.host, self.mono_offset_ns)

    def owner_of(self, job: str, run: int) -> Owner | None:
        """As ``JobOwners.owner_of``."""
        found = self._job(job, run)
        return None if found is None else found.owner

    def count_refused(self, job: str, run: int, rows: int) -> None:
        """As ``JobOwners.count_refused``."""
        found = self._job(job, run)
        assert found is not None
        self.losses.count("rows_over_share", Whom(found), number=rows)

    def _job(self, name: str, run: int) -> Job | None:
        return next((job for job in self.jobs if job.run == run and job.name == name), None)

    def next_version(self) -> int:
        """Of a row that replaces an older one: greater each time."""
        self._version += 1
        return self._version

    def now_ns(self) -> int:
        """Wall time on the session's own clock: an adjustment of the system's reaches it within ``clock.CLOCK_S``."""
        return time.monotonic_ns() + self.mono_offset_ns

    def note(self, text: str) -> None:
        """Notes something for the user."""
        self.notes.append(text)

    def write_features(self, job: Job, ranks: Sequence[int], states: Sequence[tuple[str, str, str]]) -> None:
        """Stores what works and what does not.

        Args:
            job: Whose.
            ranks: Of which of its ranks; each gets all ``states``.
            states: Feature, state ("on", "off", "failed", …) and reason, for people.
        """
        origin, count = self.origin(job), len(states)
        self.writer.append(
            "features",
            {
                "job": origin.job,
                "run": origin.run,
                "rank": np.repeat(np.array(ranks, np.uint32), count),
                "host": origin.host,
                "feature": [feature for feature, _, _ in states] * len(ranks),
                "state": [state for _, state, _ in states] * len(ranks),
                "reason": [reason for _, _, reason in states] * len(ranks),
                "version": self.next_version(),
            },
        )

    def rename(self, host: str) -> None:
        """Gives this host another name, before the first row is stored."""
        if host != self.host:
            self.note(
                f"another node of run {self.run} is called {self.host}, too: this one is {host} (or name it: --host)"
            )
            self.host = host

    def take_offset(self, offset_ns: int) -> bool:
        """Takes a new offset of the wall clock over, if the clock was set or the machine slept. What was stored before
        keeps its times. Whether it did."""
        jumped_ns = offset_ns - self.mono_offset_ns
        if abs(jumped_ns) < JUMP_NS:
            return False
        self.clock_jumps += 1
        self.mono_offset_ns = offset_ns
        self.wall_error_ns = wall_error_ns()
        self.note(
            f"the wall clock jumped by {duration(jumped_ns, signed=True)} (it was set, or the machine slept): "
            "times are of the new clock from here on"
        )
        return True
