"""How much of the loop's time each owner's processes and jobs may take as such: to be looked at, to become ranks, and
to have the rows that each job has now and then."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable
from contextlib import AbstractContextManager

from argus.live.cost.turns import Turns
from argus.live.job import Job
from argus.model.losses import UNKNOWN, Losses, Owner, Whom

OF_LOOP, SAVED_S = 0.1, 4.0
"""Share of the loop's time for each of these, and what an owner has saved that had few new processes. To make a rank of
one costs 3 to 10 ms; a look costs a tenth to 2 ms while a process loads what it needs, and there are some 200."""
FILL_S = 0.2
"""How often accounts are filled at most: there may be thousands."""
JOB_S = 0.025
"""Price of a job that begins, for what comes of it once: its rows, at its end, too."""
LIVE_JOB_SHARE = 0.001
"""Of the loop's time: price of a job that runs. Its rows cost 1 to 5 ms a second, all told. So an owner with a hundred
jobs has no more of them begin beside others."""


class Admission:
    """Decides for the roster. Where processes of one owner alone are traced, there is time for all.

    Looks, ranks and rows have accounts of their own: who starts processes without end that are no ranks has its ranks
    traced all the same.

    Args:
        losses: Where processes are counted for which there was no time: ``processes_over_share``.
    """

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._looks, self._ranks, self._rows = (Turns(OF_LOOP, SAVED_S, time.monotonic) for _ in range(3))
        self._filled = 0.0
        self._refused: set[int] = set()
        """Processes that have been counted."""

    def fill(self, jobs: Iterable[Job], owners: Iterable[Owner | None], now: float) -> None:
        """Gives each owner its part.

        Args:
            jobs: All that are kept.
            owners: Of all processes that may be ranks; None: not looked at yet.
            now: ``time.monotonic()``.
        """
        if self._filled and now - self._filled < FILL_S:
            return
        elapsed_s, self._filled = now - self._filled if self._filled else 0.0, now
        running = Tally({owner: 0 for owner in owners if owner is not None})
        for job in jobs:
            running[job.owner] += not job.over_since
        for turns in (self._looks, self._ranks, self._rows):
            turns.fill({UNKNOWN, *running}, now)
        for owner, number in running.items():
            if self._ranks.may(owner):
                self._ranks.spend(owner, LIVE_JOB_SHARE * number * elapsed_s)

    def may_look(self, pid: int, owner: Owner, *, again: bool) -> bool:
        """Whether there is time to see what a process has loaded. ``again``: it was seen before, so that nothing is
        lost if this time it is not."""
        return self._looks.may(owner) or (not again and self._refuse(pid, owner))

    def may_join(self, pid: int, owner: Owner) -> bool:
        """Whether there is time to make a rank of a process."""
        return self._ranks.may(owner) or self._refuse(pid, owner)

    def _refuse(self, pid: int, owner: Owner) -> bool:
        if pid not in self._refused and owner != UNKNOWN:
            self._refused.add(pid)
            self._losses.count("processes_over_share", Whom(None, owner))
        return False

    def looking(self, owner: Owner) -> AbstractContextManager[None]:
        """Within, it is seen what processes of an owner have loaded."""
        return self._looks.spending(owner)

    def joining(self, owner: Owner) -> AbstractContextManager[None]:
        """Within, a rank is made of a process of an owner."""
        return self._ranks.spending(owner)

    def may_write(self, owner: Owner) -> bool:
        """Whether there is time for rows that each job of an owner has now and then, however little it does."""
        return self._rows.may(owner)

    def writing(self, owner: Owner) -> AbstractContextManager[None]:
        """Within, such rows of an owner's job are made."""
        return self._rows.spending(owner)

    def begin_job(self, owner: Owner) -> None:
        """One begins."""
        self._ranks.spend(owner, JOB_S)

    def forget(self, pid: int) -> None:
        """Drops what is kept of a process that has ended."""
        self._refused.discard(pid)
