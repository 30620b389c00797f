"""How much of the loop's time what each owner's processes call may take: beyond that, their calls are left out."""

from __future__ import annotations

import math
import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from argus.live.cost.turns import Turns
from argus.live.job import Job
from argus.live.session import Session
from argus.model.losses import UNKNOWN, Owner, Whom

OF_LOOP, SAVED_S = 0.5, 0.5
"""Share of the loop's time for the calls of several owners, and what an owner that made few has saved."""
CHARGED_S = 1.0
"""No turn is charged for more: it would leave an owner without calls for long."""
CONTROL = "control"
"""What is about communicators. Of a job that loses some of it calls are not lined up any more: it may be worked on for
``CONTROL_S`` more than there is, and is left out last."""
CONTROL_S = 0.5
CALL_S = {"launches": 5e-7, "collectives": 4e-6, "marks": 4e-6, CONTROL: 3e-6}
"""What a record is believed to cost at least: a few times what those of most jobs do, since a job may change."""
AT_ONCE = {"launches": 16_384, "collectives": 4096, "marks": 4096, CONTROL: 4096}
"""Records of a job that are worked on before it is looked at how long that took: those of a new kind may cost several
times what they are believed to, 15 us each and launches 4."""
GRACE_S = 0.25
"""So much longer than it has time for an owner may be worked on in a turn."""
LEARNED = 0.2
"""How much of what was believed a turn replaces."""
LEAST_CALLS = 1000
"""Fewer say nothing of what one costs."""


class Working:
    """What of a job's calls is worked on in a turn: how many there are, and how long they take, by what they are."""

    def __init__(self) -> None:
        self.calls: Tally[str] = Tally()
        self.took_s: dict[str, float] = {}
        self._begun_s = time.thread_time()

    @property
    def spent_s(self) -> float:
        """How long it has taken so far."""
        return time.thread_time() - self._begun_s

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Within, records of one kind are worked on, which are counted in ``calls``."""
        begun_s = time.thread_time()
        yield
        self.took_s[kind] = self.took_s.get(kind, 0.0) + time.thread_time() - begun_s


class CallShares:
    """The accounts of one trace's owners.

    Args:
        session: The trace. ``calls_over_share``: records that were left out.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turns = Turns(OF_LOOP, SAVED_S)
        self._call_s: dict[Owner, dict[str, float]] = {}
        self._seen: dict[tuple[Owner, str], tuple[int, float]] = {}
        """Of this turn: calls, and how long they took."""
        self._short: set[tuple[Owner, str]] = set()
        """Of this turn: of whom calls were left out, and of what."""
        self._put_off: dict[int, None] = {}
        """``id`` of jobs whose steps were put off, who has waited for longest first."""

    def begin_turn(self, now: float) -> None:
        """A turn begins. ``now``: ``time.monotonic()``."""
        owners = {job.owner for job in self._session.roster.jobs if not job.finished}
        self._turns.fill({UNKNOWN, *owners}, now)
        before, self._call_s = self._call_s, {}
        for owner in owners:
            believed_s = self._call_s[owner] = before.get(owner) or dict(CALL_S)
            for kind, least_s in CALL_S.items():
                number, took_s = self._seen.get((owner, kind), (0, 0.0))
                if number < LEAST_CALLS and (owner, kind) in self._short:
                    continue  # what was left out is as dear as it was
                seen_s = took_s / number if number >= LEAST_CALLS else least_s
                believed_s[kind] = max((1 - LEARNED) * believed_s[kind] + LEARNED * seen_s, least_s)
        self._seen.clear()
        self._short.clear()

    def within(self, kinds: Mapping[str, NDArray[np.void]]) -> dict[str, NDArray[np.void]]:
        """The records that there is time for: of an owner that has too many, those called first. Others are counted.

        Args:
            kinds: Records with ``pid`` and ``ts_ns``, by what they are of, as ``CALL_S`` has it.
        """
        kept = dict(kinds)
        by_pid = self._session.roster.by_pid
        if not by_pid:
            return kept
        owners = list(dict.fromkeys(job.owner for job, _ in by_pid.values()))
        number_of = {owner: number for number, owner in enumerate(owners)}
        pids = np.array(sorted(by_pid), np.int64)
        whose = np.array([number_of[by_pid[pid][0].owner] for pid in pids.tolist()])
        left_s = np.array([self._turns.left_s(owner) for owner in owners])
        of: dict[str, NDArray[np.int64]] = {}
        expected_s = {}
        for name, events in kept.items():
            place = np.minimum(np.searchsorted(pids, events["pid"]), len(pids) - 1)
            of[name] = np.where(pids[place] == events["pid"], whose[place], len(owners))
            counts = np.bincount(of[name], minlength=len(owners))[: len(owners)]
            expected_s[name] = counts * np.array([self._believed_s(owner)[name] for owner in owners])
        if CONTROL in kept:
            self._cut(kept, of, [CONTROL], expected_s[CONTROL], left_s + CONTROL_S, owners)
            left_s -= np.minimum(expected_s[CONTROL], np.maximum(left_s + CONTROL_S, 0.0))
        others = [name for name in kept if name != CONTROL]
        self._cut(kept, of, others, np.sum([expected_s[name] for name in others], axis=0), left_s, owners)
        return kept

    def _believed_s(self, owner: Owner) -> dict[str, float]:
        return self._call_s.get(owner, CALL_S)

    def _cut(
        self,
        kept: dict[str, NDArray[np.void]],
        of: dict[str, NDArray[np.int64]],
        names: list[str],
        expected_s: NDArray[np.float64],
        left_s: NDArray[np.float64],
        owners: list[Owner],
    ) -> None:
        """Leaves out what owners called after a part of their calls, where there is no time for all of them: in one
        pass, however many owners these are."""
        short = np.flatnonzero(expected_s > np.maximum(left_s, 0.0))
        if not len(short):
            return
        until = np.full(len(expected_s) + 1, np.iinfo(np.uint64).max, np.uint64)
        is_short = np.isin(np.arange(len(until)), short)
        whose = np.concatenate([of[name][is_short[of[name]]] for name in names])
        called = np.concatenate([kept[name]["ts_ns"][is_short[of[name]]] for name in names])
        called = called[np.lexsort((called, whose))]
        begin = np.concatenate([[0], np.cumsum(np.bincount(whose, minlength=len(until)))])
        for number in short.tolist():
            there = int(begin[number + 1] - begin[number])
            part = max(left_s[number], 0.0) / expected_s[number]
            self._short |= {(owners[number], name) for name in names}
            until[number] = called[begin[number] + min(int(part * there), there - 1)]
        for name in names:
            events = kept[name]
            left_out = events["ts_ns"] >= until[of[name]]
            self._session.count_losses("calls_over_share", events["pid"], np.ones(len(events), np.int64), left_out)
            kept[name], of[name] = events[~left_out], of[name][~left_out]

    def parts(self, job: Job, kind: str, number: int, working: Working) -> Iterator[tuple[int, int]]:
        """So many records of a job, in parts (first, last + 1), as long as there is time for its owner. Those that it
        has none for are counted."""
        at_once = number if math.isinf(self._turns.left_s(job.owner)) else AT_ONCE[kind]
        for begin in range(0, number, max(at_once, 1)):
            if self._turns.left_s(job.owner) + GRACE_S < working.spent_s:
                self._session.losses.count("calls_over_share", Whom(job), number=number - begin)
                return
            yield begin, min(begin + at_once, number)

    def in_turns(self, jobs: Sequence[Job]) -> list[Job]:
        """These jobs in the order in which they are to be worked on: first those whose steps were put off."""
        there = {id(job): job for job in jobs}
        self._put_off = {key: None for key in self._put_off if key in there}
        return [there[key] for key in self._put_off] + [job for job in jobs if id(job) not in self._put_off]

    def may(self, job: Job) -> bool:
        """Whether there is time for a job."""
        return self._turns.may(job.owner)

    def may_store(self, job: Job, working: Working) -> bool:
        """Whether a job's steps may be numbered and stored in this turn; else they are put off to one of the next."""
        if self._turns.left_s(job.owner) > working.spent_s:
            self._put_off.pop(id(job), None)
            return True
        self._put_off.setdefault(id(job))
        return False

    @contextmanager
    def working(self, job: Job) -> Iterator[Working]:
        """Within, a job's calls are worked on, and what comes of them."""
        working = Working()
        try:
            yield working
        finally:
            self._turns.spend(job.owner, min(working.spent_s, CHARGED_S))
            for kind, took_s in working.took_s.items():
                number, before_s = self._seen.get((job.owner, kind), (0, 0.0))
                self._seen[job.owner, kind] = number + working.calls[kind], before_s + took_s
