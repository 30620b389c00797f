"""How much of the loop's time what each owner's processes call may take: beyond that, their calls are left out."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from argus.live.cost.turns import Turns
from argus.live.job import Job
from argus.live.session import Session
from argus.model.losses import UNKNOWN, Owner

OF_LOOP, SAVED_S = 0.5, 1.0
"""Share of the loop's time for the calls of several owners, and what an owner that made few has saved."""
CALL_S = 2e-6
"""What a record is believed to cost before it is known: a launch takes a tenth of it, a range four times as much."""
LEARNED = 0.2
"""How much of what was believed the newest turn replaces."""
LEAST_CALLS = 1000
"""A turn of fewer says nothing of what one costs."""


class CallShares:
    """The accounts of one trace's owners.

    Args:
        session: The trace. ``calls_over_share``: records that were left out.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turns = Turns(OF_LOOP, SAVED_S)
        self._call_s: dict[Owner, float] = {}

    def begin_turn(self, now: float) -> None:
        """A turn begins. ``now``: ``time.monotonic()``."""
        owners = {job.owner for job in self._session.roster.jobs if not job.finished}
        self._turns.fill({UNKNOWN, *owners}, now)
        self._call_s = {owner: self._call_s.get(owner, CALL_S) for owner in owners}

    def within(self, kinds: Mapping[str, NDArray[np.void]]) -> dict[str, NDArray[np.void]]:
        """The records that there is time for: of an owner that has too many, those called first. Others are counted.

        Args:
            kinds: Records with ``pid`` and ``ts_ns``, by what they are of.
        """
        kept = dict(kinds)
        pids_of: dict[Owner, list[int]] = {}
        for pid, (job, _) in self._session.roster.by_pid.items():
            pids_of.setdefault(job.owner, []).append(pid)
        for owner, pids in pids_of.items():
            left_s, call_s = self._turns.left_s(owner), self._call_s.get(owner, CALL_S)
            if sum(map(len, kept.values())) * call_s <= left_s:
                continue
            own = {name: np.isin(events["pid"], pids) for name, events in kept.items()}
            number = sum(int(mask.sum()) for mask in own.values())
            if not number or number * call_s <= left_s:
                continue
            called = np.sort(np.concatenate([kept[name]["ts_ns"][mask] for name, mask in own.items()]))
            until = called[max(int(left_s / call_s), 0)]
            for name, mask in own.items():
                events = kept[name]
                left_out = mask & (events["ts_ns"] >= until)
                self._session.count_losses("calls_over_share", events["pid"], np.ones(len(events), np.int64), left_out)
                kept[name] = events[~left_out]
        return kept

    @contextmanager
    def working(self, job: Job) -> Iterator[Tally[str]]:
        """Within, a job's calls are worked on. What is yielded gets how many they are, in all."""
        number: Tally[str] = Tally()
        begun_s = time.thread_time()
        try:
            yield number
        finally:
            spent_s = time.thread_time() - begun_s
            self._turns.spend(job.owner, spent_s)
            if (calls := number.total()) >= LEAST_CALLS:
                before = self._call_s.get(job.owner, CALL_S)
                self._call_s[job.owner] = (1 - LEARNED) * before + LEARNED * spent_s / calls
