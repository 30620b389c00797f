"""Room for the calls and marks that steps are made from: ranks of an owner that keeps too many drop their oldest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from argus.live.gpu.process import LAST_STEPS_S
from argus.live.gpu.room import max_min
from argus.live.job import Job, keep_early, kept_early
from argus.live.session import Session
from argus.live.sides.call_shares import CallShares
from argus.model.losses import Owner, Whom
from argus.semantics.phases.cpu import MARK
from argus.semantics.steps.by_marks import forget_calls, keep_calls, keep_marks, kept_calls, kept_marks

_Row = TypeVar("_Row", bound=np.generic)

SEVERAL, ALONE = 128 << 20, 256 << 20
"""Bytes kept of all ranks where several users' are traced, and of one that is alone: all of Argus is to stay below
500 MB. The ranks of a node, 16 or fewer, keep 8 MB each at most."""
DOWN_TO = 7 / 8
"""Who has too many drops so many that this part of the room is used: not some in each turn."""
WEIGHTS = {
    "tracker": 4.0,
    "marked": 4.0,
    "marks": 4.0,
    "recent": 4.0,
    "syncs": 4.0,
    "control": 4.0,
    "calls": 1.0,
    "names": 4.0,
    "phases": 4.0,
    "early": 4.0,
}
"""How much of a rank's part each may have, against the others: calls whose kernels have ended are needed no more."""
KERNELS_S = LAST_STEPS_S
"""So long after a job's last process was forgotten none of its kernels comes any more."""


@dataclass
class _Kept:
    """What is kept of a rank's calls, in bytes, by who keeps it."""

    job: Job
    rank: int
    parts: dict[str, int]

    @property
    def held(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    @property
    def owner(self) -> Owner:
        """Whose they are."""
        return self.job.owner

    def keep(self, most: int) -> int:
        """Keeps so many bytes of the newest calls. Returns how many calls are in no step yet and will be in none."""
        job, rank, lost = self.job, self.rank, 0
        weights = [WEIGHTS[name] for name in self.parts]
        for (name, held), part in zip(self.parts.items(), max_min([*self.parts.values()], weights, most), strict=True):
            if part >= held:
                continue
            if name == "tracker":
                lost += job.tracker.keep(rank, part)
            elif name == "marked":
                lost += keep_calls(job.marked, rank, part)
            elif name == "marks":
                keep_marks(job.marked, rank, part)
            elif name == "names":
                job.marks[rank].keep(part)
            elif name == "phases":
                job.phases[rank].keep(part // MARK.itemsize)
            elif name == "early":
                lost += keep_early(job, rank, part)
            elif name == "calls":
                job.calls[rank].keep(part)
            elif name == "recent":
                job.recent[rank] = _newest(job.recent[rank], part)
            elif name == "syncs":
                job.syncs[rank] = _newest(job.syncs[rank], part)
            else:
                job.control[rank] = _newest(job.control[rank], part)
        return lost


class CallRoom:
    """Who keeps how much.

    Args:
        session: The trace. ``step_calls_over_share``: calls that were dropped and are in no step.
        shares: The accounts of owners: who has too many pays for the time that dropping takes.
    """

    def __init__(self, session: Session, shares: CallShares) -> None:
        self._session = session
        self._shares = shares

    def make(self, now: float) -> None:
        """Makes room, once a turn. ``now``: ``time.monotonic()``."""
        jobs = self._session.roster.jobs
        for job in jobs:
            if not job.finished:
                _forget_unused(job)
            elif now - job.over_since > KERNELS_S:
                job.calls.clear()
        room = SEVERAL if len({job.owner[0] for job in jobs if not job.finished}) > 1 else ALONE
        kept = [each for job in jobs if job.calls or not job.finished for each in _of(job)]
        if sum(each.held for each in kept) <= room:
            return
        for each, most in _over(kept, int(DOWN_TO * room)):
            with self._shares.working(each.job):
                lost = each.keep(most)
            if lost:
                self._session.losses.count("step_calls_over_share", Whom(each.job), number=lost)


def _over(kept: list[_Kept], room: int) -> list[tuple[_Kept, int]]:
    """Ranks that keep more than they may, and how much each may: users share the room equally, the containers of each
    share its part, and the ranks of each that (``max_min``). A user in many containers has no more than one in none."""
    of_user: dict[int, dict[str, list[_Kept]]] = {}
    for each in kept:
        of_user.setdefault(each.owner[0], {}).setdefault(each.owner[1], []).append(each)
    found: list[tuple[_Kept, int]] = []
    users = [sum(each.held for ranks in of.values() for each in ranks) for of in of_user.values()]
    for of_container, part in zip(of_user.values(), _equal(users, room), strict=True):
        containers = [sum(each.held for each in ranks) for ranks in of_container.values()]
        for ranks, of_ranks in zip(of_container.values(), _equal(containers, part), strict=True):
            found += zip(ranks, _equal([each.held for each in ranks], of_ranks), strict=True)
    return [(each, most) for each, most in found if each.held > most]


def _equal(wanted: list[int], room: int) -> list[int]:
    return max_min(wanted, [1.0] * len(wanted), room)


def _of(job: Job) -> Iterator[_Kept]:
    """What is kept of each of a job's ranks."""
    for rank in sorted({member.rank for member in job.members.values()} | job.calls.keys()):
        parts = {"tracker": job.tracker.kept(rank), "marked": kept_calls(job.marked, rank)}
        parts["marks"] = kept_marks(job.marked, rank)
        if rank in job.marks:
            parts["names"] = job.marks[rank].kept
        if rank in job.phases:
            parts["phases"] = MARK.itemsize * job.phases[rank].marks_kept
        if early := kept_early(job, rank):
            parts["early"] = early
        if rank in job.calls:
            parts["calls"] = job.calls[rank].kept
        for name, kept in (("recent", job.recent), ("syncs", job.syncs), ("control", job.control)):
            if rank in kept:
                parts[name] = _bytes(kept[rank])
        yield _Kept(job, rank, parts)


def _forget_unused(job: Job) -> None:
    """Gives back calls that are kept for the other way of finding steps than the job's."""
    if job.by_marks:
        job.tracker.forget_calls()
    elif job.by_marks is False and (job.thinned is not None or not job.thin_since):
        forget_calls(job.marked)


def _bytes(rows: NDArray[Any]) -> int:
    """Bytes of an array, or of the one that it is a part of."""
    while isinstance(rows.base, np.ndarray):
        rows = rows.base
    return rows.nbytes


def _newest(rows: NDArray[_Row], most: int) -> NDArray[_Row]:
    """The last rows, so many bytes of them."""
    each = rows.nbytes // max(len(rows), 1)
    last: NDArray[_Row] = rows[len(rows) - min(most // max(each, 1), len(rows)) :].copy()
    return last
