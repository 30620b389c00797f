"""Lines the communicators of jobs up while they run, a part of it in each turn of the loop."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from argus.live.cost.turns import Turns
from argus.live.job import Alignment, Job
from argus.live.session import Session
from argus.model import records
from argus.model.losses import UNKNOWN, Owner, Whom
from argus.semantics.groups.communicators import RankCalls, groups_in_parts

INTERVAL_S = 1.0
"""How often the communicators are lined up while something about them is unknown."""
JOB_SHARE = 0.02
"""Of the time, for that, at most: a job of hundreds of ranks here takes a tenth of a second each time."""
SETTLED_INTERVAL_S = 60.0
"""The same once all is known; a communicator not seen before brings it forward."""
SETTLED_CALLS = 256
"""Collectives of each rank before an alignment counts as settled: dozens of steps."""
TURN_S = 0.03
"""CPU time in each turn of the loop for all owners' jobs, in equal parts: rings wait so long. Lining two ranks up takes
a millisecond or two, and whoever has a turn does so once."""
OF_LOOP, SAVED_S = 0.1, 0.5
"""Share of the loop's time for all owners' jobs together, and what an owner has saved (``Turns``)."""
LAST_S = 2.0
"""What an owner has saved for when its jobs end, or the trace does: then it is done at once."""


class Aligner:
    """Finds which handles on which ranks are one communicator.

    Args:
        session: The trace. ``communicators_over_share``: jobs of which the last alignment was left out.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turns = Turns(OF_LOOP, SAVED_S)
        self._left_s: dict[Owner, float] = {}
        self._last_turns = Turns(OF_LOOP, LAST_S)

    def begin_turn(self, now: float) -> None:
        """A turn of the loop begins. ``now``: ``time.monotonic()``."""
        owners = {job.owner for job in self._session.roster.jobs}
        self._left_s = dict.fromkeys(owners, TURN_S / max(len(owners), 1))
        for turns in (self._turns, self._last_turns):
            turns.fill({UNKNOWN, *owners}, now)

    def run(self, job: Job, now: float, *, final: bool) -> NDArray[np.void] | None:
        """Goes on with a job, if that is due.

        Args:
            job: The job.
            now: ``time.monotonic()``.
            final: Nothing more will come: to the end.

        Returns:
            ``COMMUNICATOR`` rows, once all are found; then :meth:`rest` is due. None: not due, or not there yet.
        """
        alignment = None if final else job.alignment
        if alignment is None:
            if not final and now < max(job.groups_due, job.alignment_rests):
                return None
            alignment = job.alignment = Alignment(groups_in_parts(_known(job)))
            job.groups_due = np.inf
        turns = self._last_turns if final else self._turns
        left_s = turns.left_s(job.owner) if final else min(turns.left_s(job.owner), self._left_s.get(job.owner, TURN_S))
        begun_s, spent_s = time.thread_time(), 0.0
        found = None
        try:
            while found is None and spent_s < left_s:
                try:
                    next(alignment.parts)
                except StopIteration as done:
                    found = done.value
                spent_s = time.thread_time() - begun_s
        except BaseException:
            job.alignment = None
            raise
        alignment.took_s += spent_s
        turns.spend(job.owner, spent_s)
        if not final:
            self._left_s[job.owner] = self._left_s.get(job.owner, TURN_S) - spent_s
        if found is None and final:
            job.alignment = None
            self._session.losses.count("communicators_over_share", Whom(job))
        return found

    @staticmethod
    def rest(job: Job) -> None:
        """What was found is in ``job.communicators``: until something about them is due again."""
        assert job.alignment is not None
        now, took_s = time.monotonic(), job.alignment.took_s
        every_s = SETTLED_INTERVAL_S if _settled(job) else INTERVAL_S
        job.alignment = None
        job.alignment_rests = now + took_s / JOB_SHARE
        job.groups_due = min(job.groups_due, now + every_s)  # sooner, if it was asked for meanwhile


def _known(job: Job) -> list[RankCalls]:
    """What each rank has called. Nothing of it is changed later: new calls make new arrays."""
    job.forget_old_communicators()
    nothing = np.empty((0, 2), np.int64)
    return [
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


def _settled(job: Job) -> bool:
    """Whether every communicator seen is lined up, on enough calls to stay so."""
    aligned = {(int(row["rank"]), int(row["comm"])) for row in job.communicators if not row["error"]}
    calls_seen = min((len(recent) for recent in job.recent.values()), default=0)
    return len(job.recent) == len(job.ranks()) and calls_seen >= SETTLED_CALLS and job.handles <= aligned
