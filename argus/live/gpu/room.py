"""Room for the operations of GPUs that wait until their second and their step are over: who has too many."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from argus.model.losses import Owner
from argus.model.shares import CONTAINERS

MOST_OPS, OF_OWNER, OF_ALL = 2 << 20, 3 << 20, 4 << 20
"""Operations of all GPUs of a process that are kept for windows, and for steps, 77 MB a million for both: what a
process says of its GPUs and of when something ran may be anything. And of all processes of an owner, and in all: all of
Argus is to stay below 500 MB. A rank keeps some thousands."""
OP_BYTES = 77
"""Bytes of one, for both. All else that is kept of a process counts as so many operations as take its room."""


class Holder(Protocol):
    """A process, as far as room is concerned.

    Attributes:
        held: Operations that are kept of it, and what else is, in operations.
        owner: Whose it is.
    """

    @property
    def held(self) -> int: ...

    @property
    def owner(self) -> Owner: ...


AnyHolder = TypeVar("AnyHolder", bound=Holder)


def over_room(
    processes: Iterable[AnyHolder], of_owner: int | None = None, of_all: int | None = None
) -> list[tuple[AnyHolder, int]]:
    """Processes that hold more operations than they may, and how many each may keep. An owner has ``of_owner``, all
    together ``of_all``; None: ``OF_OWNER``, ``OF_ALL``.

    Room goes by what is held, so processes that hold nothing take none. Owners who hold little keep all of it, and
    those who hold more share the rest equally (max-min fairness), as do the processes of each. A user in many
    containers has the part of eight owners.
    """
    of_owner, of_all = OF_OWNER if of_owner is None else of_owner, OF_ALL if of_all is None else of_all
    of_each: defaultdict[Owner, list[AnyHolder]] = defaultdict(list)
    held: Tally[Owner] = Tally()
    for process in processes:
        if number := process.held:
            of_each[process.owner].append(process)
            held[process.owner] += number
    if held.total() <= of_all and max(held.values(), default=0) <= of_owner:
        return []
    containers = Tally(user for user, _ in held)
    weights = [min(1.0, CONTAINERS / containers[user]) for user, _ in held]
    rooms = max_min([min(number, of_owner) for number in held.values()], weights, of_all)
    found = []
    for owner, room in zip(held, rooms, strict=True):
        numbers = [process.held for process in of_each[owner]]
        parts = max_min(numbers, [1.0] * len(numbers), room)
        found += [each for each in zip(of_each[owner], parts, strict=True) if each[0].held > each[1]]
    return found


def max_min(wanted: Sequence[int], weights: Sequence[float], room: int) -> list[int]:
    """What each has of a room: as much as it wants, or its part of what those leave who want less than theirs."""
    given = [0] * len(wanted)
    left, weight = float(room), sum(weights)
    for which in sorted(range(len(wanted)), key=lambda which: wanted[which] / weights[which]):
        given[which] = min(wanted[which], int(left * weights[which] / weight))
        left, weight = left - given[which], weight - weights[which]
    return given
