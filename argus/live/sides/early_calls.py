"""Calls of the beginning, kept to look for a pulse in, should it be needed."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from argus.live.job import Job
from argus.model import event_kinds, records
from argus.model.losses import Owner
from argus.semantics.steps.by_calls import collective_codes, launch_codes
from argus.semantics.steps.thinned import SEEN

EARLY_CALLS = 65_536
"""So many are kept. A user, or container, who has less than half as many as another one takes the room of a job of
that."""


class EarlyCalls:
    """Of each job, until they are taken."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, list[NDArray[np.void]]]] = {}
        """By job (its ``id``) and rank."""
        self._number_of: dict[int, tuple[Owner, int]] = {}
        """Of each job, whose it is and how many of its calls are kept."""

    def keep(self, job: Job, rank: int, events: NDArray[np.void]) -> None:
        """Takes calls of a rank, if there is room: LAUNCH or COLLECTIVE rows, shape (n,)."""
        if self._room() <= 0 and not self._make_room(job):
            return
        events = events[: max(self._room(), 0)]
        owner, number = self._number_of.get(id(job), (job.owner, 0))
        self._number_of[id(job)] = owner, number + len(events)
        self._kept.setdefault(id(job), {}).setdefault(rank, []).append(seen_calls(events))

    def take(self, job: Job) -> dict[int, list[NDArray[np.void]]]:
        """Those of a job, by rank, which are not kept any more: ``SEEN`` rows."""
        return self._forget(id(job))

    def _room(self) -> int:
        return EARLY_CALLS - sum(number for _, number in self._number_of.values())

    def _make_room(self, job: Job) -> bool:
        """Forgets the calls of a job, if one has so many more. Returns whether there is room."""
        if (most := _with_most(self._number_of, job.owner)) is not None:
            self._forget(most)
        return most is not None

    def _forget(self, which: int) -> dict[int, list[NDArray[np.void]]]:
        self._number_of.pop(which, None)
        return self._kept.pop(which, {})


def _with_most(early: Mapping[int, tuple[Owner, int]], owner: Owner) -> int | None:
    """Which job has most calls kept of those of the user with most, or of this user's container with most, if this one
    has less than half of that."""
    of_users, of_containers = Tally[int](), Tally[Owner]()
    for whose, number in early.values():
        of_users[whose[0]] += number
        if whose[0] == owner[0]:
            of_containers[whose] += number
    user = max(of_users, key=of_users.__getitem__)
    container = max(of_containers, key=of_containers.__getitem__, default=owner)
    if 2 * of_users[owner[0]] < of_users[user]:
        of_most = {which: number for which, (whose, number) in early.items() if whose[0] == user}
    elif 2 * of_containers[owner] < of_containers[container]:
        of_most = {which: number for which, (whose, number) in early.items() if whose == container}
    else:
        return None
    return max(of_most, key=of_most.__getitem__)


def seen_calls(events: NDArray[np.void]) -> NDArray[np.void]:
    """What distinguishes calls, for ``find_pulse``: LAUNCH or COLLECTIVE rows → ``SEEN`` rows, shape (n,)."""
    out = np.zeros(len(events), SEEN)
    out["ts"], out["call"] = events["ts_ns"], events["call"]
    if events.dtype == records.LAUNCH:
        launching = event_kinds.is_launch(events)
        out["code"] = events["call"]
        if launching.any():
            out["code"][launching] = launch_codes(events[launching])[1]
    else:
        out["code"] = collective_codes(events)
    return out
