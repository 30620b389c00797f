"""Lines the communicators of jobs up while they run, a part of it in each turn of the loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from argus.live.cost.turns import Turns
from argus.live.job import Alignment, Alignments, Job
from argus.live.session import Session
from argus.model import records
from argus.model.losses import UNKNOWN, Owner, Whom
from argus.semantics.groups.communicators import RankCalls, groups_in_parts

INTERVAL_S = 1.0
"""How often the communicators are lined up while something about them is unknown. Where all are, and nothing was new,
once twice as many calls are there: it takes as many again to show better."""
JOB_SHARE = 0.02
"""Of the time, for that, at most: a job of hundreds of ranks here takes up to a second each time."""
MOST_IN_VAIN = 4
"""So often that time is doubled, each time that nothing has changed though something is unknown."""
SETTLED_INTERVAL_S = 60.0
"""The same once all is known; a communicator not seen before brings it forward."""
SETTLED_CALLS = 256
"""Collectives of each rank before an alignment counts as settled: dozens of steps."""
OF_LOOP, TURN_S = 0.25, 0.03
"""Share of the loop's time for all jobs, and CPU time at once: rings wait so long. A part of a job, one rank or two,
takes a millisecond or two."""
PART_S = 0.001
"""For so long a job goes on before what it took is accounted for: a rank with few calls takes microseconds."""
SAVED_S = 0.5
"""What an owner has saved of that (``Turns``)."""
LAST_S = 2.0
"""What an owner has saved for when its jobs end, or the trace does: then it is done at once."""
LINED_UP_S = 10.0
"""A job of which calls are seen in windows from then on waits for it so long: in that time all jobs together have 2.5 s
of CPU time."""


class Aligner:
    """Finds which handles on which ranks are one communicator. Owners have a part in turns; of an owner, the job that
    has waited for longest.

    Args:
        session: The trace. ``communicators_over_share``: jobs of which the last alignment was left out.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turns = Turns(OF_LOOP, SAVED_S)
        self._last_turns = Turns(OF_LOOP, LAST_S)
        self._left_s = TURN_S
        self._begun = 0.0
        self._waiting: dict[Owner, deque[Job]] = {}

    def go_on(self, now: float) -> None:
        """Goes on with what is under way, in a turn of the loop that only drains. ``now``: ``time.monotonic()``."""
        if self._waiting:
            self.begin_turn(now)

    def begin_turn(self, now: float) -> None:
        """A turn of the loop begins: what is under way goes on. ``now``: ``time.monotonic()``."""
        elapsed_s, self._begun = now - self._begun, now
        self._left_s = min(self._left_s + OF_LOOP * elapsed_s, TURN_S)
        owners = {job.owner for job in self._session.roster.jobs if not job.finished}
        for turns in (self._turns, self._last_turns):
            turns.fill({UNKNOWN, *owners}, now)
        self._do_parts()

    def run(self, job: Job, now: float, *, final: bool) -> NDArray[np.void] | None:
        """Begins with a job, if that is due.

        Args:
            job: The job.
            now: ``time.monotonic()``.
            final: Nothing more will come: to the end.

        Returns:
            ``COMMUNICATOR`` rows, once all are found: to be used within :meth:`using`. None: not due, or not there yet.
        """
        if final:
            self._finish(job)
        elif job.alignment is None and _is_due(job, now):
            job.alignment, job.groups_due = Alignment(), math.inf
            self._waiting.setdefault(job.owner, deque()).append(job)
            self._do_parts()
        alignment = job.alignment
        if alignment is None or alignment.found is None:
            return None
        begun_s = time.thread_time()
        keys = zip(alignment.found["rank"].tolist(), alignment.found["comm"].tolist(), strict=True)
        found = np.asarray(alignment.found[np.array([key not in alignment.gone for key in keys], bool)])
        self._spend(job, alignment, begun_s, self._turns)
        return found

    @contextmanager
    def using(self, job: Job) -> Iterator[None]:
        """Within, what was found becomes ``job.communicators``. Then the job rests until something is due again."""
        alignment, before, begun_s = job.alignment, (job.communicators, job.mesh), time.thread_time()
        assert alignment is not None
        try:
            yield
        finally:
            self._spend(job, alignment, begun_s, self._turns)
            now = time.monotonic()
            alike = np.array_equal(before[0], job.communicators) and before[1] == job.mesh
            known = _known_of_all(job)
            number, rests_s = _calls_of(job), alignment.took_s / JOB_SHARE
            in_vain_s = max(rests_s, min(rests_s * 2**MOST_IN_VAIN, SETTLED_INTERVAL_S))
            calls = number if alike and known else 0
            in_vain = min(job.alignments.in_vain + 1, MOST_IN_VAIN) if alike and not known else 0
            job.alignment = None
            job.alignments = Alignments(now, now + rests_s, calls)
            job.alignments.in_vain = in_vain
            job.alignments.rests_in_vain = now + min(rests_s * 2**in_vain, in_vain_s)
            job.alignments.went_by = frozenset(job.handles), _called(job)
            every_s = SETTLED_INTERVAL_S if calls or _settled(job) else INTERVAL_S
            job.groups_due = min(job.groups_due, now + every_s)  # sooner, if it was asked for meanwhile

    def begin_anew(self, job: Job) -> None:
        """A job is due with all that is known now: what is under way does not know the newest calls."""
        self._drop(job)
        job.alignment, job.groups_due, job.alignments = None, 0.0, Alignments()

    def _drop(self, job: Job) -> None:
        for owner, jobs in list(self._waiting.items()):
            self._waiting[owner] = deque(each for each in jobs if each is not job)
            if not self._waiting[owner]:
                del self._waiting[owner]

    def _do_parts(self) -> None:
        while self._left_s > 0:
            owner = next((owner for owner in self._waiting if self._turns.may(owner)), None)
            if owner is None:
                return
            jobs = self._waiting.pop(owner)
            if self._part(jobs[0], self._turns):
                jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # behind the others

    def _part(self, job: Job, turns: Turns) -> bool:
        """Does some of it. Returns whether that was the last; what fails is tried again later."""
        over = True
        with self._session.bulkheads.job(job):
            alignment, begun_s = job.alignment, time.thread_time()
            assert alignment is not None
            try:
                if alignment.parts is None:
                    alignment.parts = groups_in_parts(_known(job))
                until = time.monotonic() + PART_S
                next(alignment.parts)
                while time.monotonic() < until:
                    next(alignment.parts)
                over = False
            except StopIteration as done:
                alignment.found = done.value
            except BaseException:
                job.alignment, job.groups_due = None, time.monotonic() + INTERVAL_S
                raise
            finally:
                self._spend(job, alignment, begun_s, turns)
        return over

    def _spend(self, job: Job, alignment: Alignment, begun_s: float, turns: Turns) -> None:
        spent_s = time.thread_time() - begun_s
        alignment.took_s += spent_s
        turns.spend(job.owner, spent_s)
        if turns is self._turns:
            self._left_s -= spent_s

    def _finish(self, job: Job) -> None:
        """Does it with all that is known now, as far as there is time."""
        self._drop(job)
        job.alignment = Alignment()
        while self._last_turns.may(job.owner):
            if self._part(job, self._last_turns):
                return
        job.alignment = None
        self._session.losses.count("communicators_over_share", Whom(job))


def _known(job: Job) -> list[RankCalls]:
    """What each rank has called. Nothing of it is changed later: new calls make new arrays."""
    job.forget_old_communicators()
    nothing = np.empty((0, 2), np.int64)
    known = [
        RankCalls(
            rank=rank,
            collectives=recent,
            sync_ts=job.syncs.get(rank, nothing)[:, 0],
            sync_duration=job.syncs.get(rank, nothing)[:, 1],
            control=job.control.get(rank, np.empty(0, records.CONTROL)),
            named=dict(job.named.get(rank, {})),
            in_memory={comm: place for comm, place in job.places.get(rank, {}).items() if place is not None},
        )
        for rank, recent in sorted(job.recent.items())
    ]
    if job.alignment is not None:
        job.alignment.of = {
            (of.rank, handle)
            for of in known
            for handle in {*np.unique(of.collectives["comm"]).tolist(), *of.control["handle"].tolist(), *of.in_memory}
        }
    return known


def _is_due(job: Job, now: float) -> bool:
    last, (handles, number) = job.alignments, job.alignments.went_by
    if now < last.rests:
        return False
    if now < last.rests_in_vain and job.handles == handles and _called(job) < 2 * number:
        return False
    if now >= job.groups_due:
        return True
    calls = job.alignments.calls
    return calls > 0 and now >= job.alignments.at + INTERVAL_S and _calls_of(job) >= 2 * calls


def _calls_of(job: Job) -> int:
    """How many of a job's newest collectives are kept to line communicators up."""
    return sum(map(len, job.recent.values()))


def _called(job: Job) -> int:
    """How many collectives its ranks have called."""
    return sum(member.collectives for member in job.members.values())


def _known_of_all(job: Job) -> bool:
    """Whether every communicator seen is lined up."""
    aligned = {(int(row["rank"]), int(row["comm"])) for row in job.communicators if not row["error"]}
    return len(job.recent) == len(job.ranks()) and job.handles <= aligned


def _settled(job: Job) -> bool:
    """Whether it is, on enough calls to stay so."""
    calls_seen = min((len(recent) for recent in job.recent.values()), default=0)
    return calls_seen >= SETTLED_CALLS and _known_of_all(job)
