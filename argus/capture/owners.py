"""Users and containers whose processes are traced together. None fills a ring for the others, and what is lost of its
processes concerns its own jobs only."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.programs import Module
from argus.model import records
from argus.model.losses import ANY_CONTAINER, UNKNOWN, Owner
from argus.model.records import Counter

OWNERS = 2048
"""Room for so many owners and users (``ARGUS_OWNERS``). Owners beyond share the first place with processes whose
owner is not known; users beyond have no bound besides their owners'."""
CONTAINERS = 256
"""Containers of one user that have a number each. Further ones share one, and so they do while less than half of all
numbers is free: the rest is for users who have none yet."""


_USE = np.dtype([(name, "<u8") for name in ("sampled_ns", "switched_ns", "stacks_due", "refused", "rows_refused")])
"""``struct owner_use`` of bpf/stacks.bpf.h."""
_REFUSED = {"refused": "stack_samples_over_share", "rows_refused": "stack_rows_over_share"}
"""Of these, what an owner had beyond its share: the counters of such losses."""


class Owners:
    """Numbers owners for the kernel, and says there of how many processes are traced. Any thread may call: forks are
    noticed on one of their own.

    Args:
        module: The programs' maps.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._of: dict[int, tuple[int, int]] = {}
        self._numbers: dict[Owner | int, int] = {}
        """Of owners, and of users in all their containers."""
        self._lost: dict[int, NDArray[np.uint64]] = {}
        """Of each number, what was lost until ``take_losses`` was called last."""
        self._whose: dict[int, Owner] = {}
        self._gone: list[tuple[Owner, Counter, int]] = []

    def add(self, pid: int, owner: Owner) -> tuple[int, int]:
        """The numbers of a process's owner, and of its user in all containers. Both count among those that are traced
        from now on."""
        with self._lock:
            self._of[pid], self._whose[pid] = (0, 0), owner
            if owner[0] >= 0:
                number = self._number_of(owner)
                self._of[pid] = number, 0  # not to be forgotten when room is made for the other
                self._of[pid] = number, self._number(owner[0])
            self._publish()
            return self._of[pid]

    def remove(self, pid: int) -> None:
        """A process is not traced any more."""
        with self._lock:
            self._whose.pop(pid, None)
            if self._of.pop(pid, None) is not None:
                self._publish()

    def number(self, pid: int) -> int:
        """The number of a process's owner; 0: it is not traced, or has none of its own."""
        with self._lock:
            return self._of.get(pid, (0, 0))[0]

    def there(self) -> set[Owner]:
        """Owners of all processes that are traced."""
        with self._lock:
            return set(self._whose.values())

    def count_rooms(self) -> None:
        """Counts again what the processes that are traced may hold of the maps that they fill. What the kernel grants
        meanwhile may be missed until the next time."""
        with self._lock:
            _, rows = self._module["targets"].read()
            targets = np.ascontiguousarray(rows).view(records.TARGET)[:, 0]
            rooms = np.zeros(OWNERS + 1, records.ROOM)["granted"]
            rooms[OWNERS] = targets["granted"].sum(axis=0)
            for whose, known in (("owner", targets), ("user", targets[targets["user"] > 0])):
                np.add.at(rooms, known[whose], known["granted"])
            places, now = self._module["rooms"].read()
            wrong = (now.view(records.ROOM)[:, 0]["granted"] != rooms[places.view("<u4")[:, 0]]).any(axis=1)
            for place in places[wrong].view("<u4")[:, 0].tolist():
                self._module["rooms"].set(place, rooms[place].tobytes())

    def take_losses(self) -> list[tuple[Owner, Counter, int]]:
        """What the kernel lost of the owners' processes since the last call: whose, what, how many. Of processes whose
        owner is not known it is anybody's."""
        with self._lock:
            found, self._gone = self._gone, []
            for owner, number in [(UNKNOWN, 0), *self._numbers.items()]:
                if not isinstance(owner, int):
                    found += self._losses_of(owner, number)
        return found

    def _number_of(self, owner: Owner) -> int:
        if owner not in self._numbers and self._has_many(owner[0]):
            self._forget_gone()
            if self._has_many(owner[0]):
                owner = owner[0], ANY_CONTAINER
        return self._number(owner)

    def _has_many(self, user: int) -> bool:
        """A user has as many numbers as one may have."""
        found = sum(not isinstance(whose, int) and whose[0] == user for whose in self._numbers)
        return _has_many(found, len(self._numbers))

    def _number(self, whose: Owner | int) -> int:
        if whose not in self._numbers:
            self._forget_gone()
            if not (number := _free_number(self._numbers.values())):
                return 0
            self._numbers[whose] = number
        return self._numbers[whose]

    def _losses_of(self, owner: Owner, number: int) -> list[tuple[Owner, Counter, int]]:
        value = self._module["owners"].get(number)
        if value is None:
            return []
        now = np.frombuffer(value, records.OWNER)["lost"][0]
        new = now - self._lost.get(number, np.uint64(0))
        self._lost[number] = now
        return [(owner, Counter(which), int(new[which])) for which in np.flatnonzero(new).tolist()]

    def _forget_gone(self) -> None:
        there = {number for numbers in self._of.values() for number in numbers}
        for whose, number in [each for each in self._numbers.items() if each[1] not in there]:
            del self._numbers[whose]
            if not isinstance(whose, int):
                self._gone += self._losses_of(whose, number)

    def _publish(self) -> None:
        for place in (0, 1):
            self._module["owners_traced"].set(place, len({numbers[place] for numbers in self._of.values()}))


def _has_many(of_user: int, given: int) -> bool:
    """Whether a user with so many numbers, of all that are given, gets no more for containers of its own."""
    return 0 < of_user >= min(CONTAINERS, OWNERS // 2 - given)


def _free_number(taken: Iterable[int]) -> int:
    """The lowest place that is free; 0: none is."""
    return min(set(range(1, OWNERS)).difference(taken), default=0)


class ThreadOwners:
    """Numbers owners for the programs that take stacks, and counts there whose threads are followed.

    Args:
        module: The programs' maps.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._of: dict[int, Owner] = {}
        self._counted_as: dict[Owner, Owner] = {}
        """Owners with processes, and under whom each has its number: itself, or its user in any container."""
        self._numbers: dict[Owner, int] = {}
        self._before: dict[int, np.void] = {}
        """By number: what those had used who had it before, and refusals that were taken."""
        self._resting: set[Owner] = set()

    def add(self, pid: int, owner: Owner) -> int:
        """The number of a process's owner; 0: it is not known, or there are too many. Containers of one user beyond
        ``CONTAINERS`` share a number, as in ``Owners``: they are one owner to the kernel."""
        if owner == UNKNOWN:
            return 0
        counted_as = self._counted_as.get(owner) or self._place_for(owner)
        if counted_as not in self._numbers:
            if not (number := _free_number(self._numbers.values())):
                return 0
            self._numbers[counted_as] = number
            self._before[number] = self._use(number)
        self._of[pid], self._counted_as[owner] = owner, counted_as
        self._publish_resting(counted_as)
        self._publish()
        return self._numbers[counted_as]

    def _place_for(self, owner: Owner) -> Owner:
        found = sum(user == owner[0] for user, _ in self._numbers)
        return (owner[0], ANY_CONTAINER) if _has_many(found, len(self._numbers)) else owner

    def rest(self, owner: Owner, *, on: bool) -> None:
        """Whether an owner's threads are not followed off the CPU: those that are off it now are reported when they
        come back. Containers that share a number rest as soon as one of them is to."""
        (self._resting.add if on else self._resting.discard)(owner)
        if owner == UNKNOWN:
            self._module["owners_resting"].set(0, int(on))
        elif owner in self._counted_as:
            self._publish_resting(self._counted_as[owner])

    def _publish_resting(self, counted_as: Owner) -> None:
        resting = any(self._counted_as.get(owner) == counted_as for owner in self._resting)
        self._module["owners_resting"].set(self._numbers[counted_as], int(resting))

    def times(self) -> dict[Owner, tuple[int, int]]:
        """Time that each owner's threads had the programs run for, at samples and at switches, ns. That of containers
        that share a number is their user's, in ``ANY_CONTAINER``."""
        numbers = {UNKNOWN: 0, **self._numbers}
        return {owner: self._times(number) for owner, number in numbers.items()}

    def take_refused(self) -> dict[tuple[Owner, str], int]:
        """What owners had beyond their share since the last call, by owner and counter."""
        found = {}
        for owner, number in {UNKNOWN: 0, **self._numbers}.items():
            now = self._use(number)
            before = self._before.setdefault(number, np.zeros(1, _USE)[0].copy())
            for name, counter in _REFUSED.items():
                if now[name] > before[name]:
                    found[owner, counter] = int(now[name] - before[name])
                    before[name] = now[name]
        return found

    def _times(self, number: int) -> tuple[int, int]:
        now, before = self._use(number), self._before.get(number, np.zeros(1, _USE)[0])
        return int(now["sampled_ns"] - before["sampled_ns"]), int(now["switched_ns"] - before["switched_ns"])

    def _use(self, number: int) -> np.void:
        row: np.void = np.frombuffer(self._module["owner_uses"].get(number) or bytes(_USE.itemsize), _USE)[0].copy()
        return row

    def remove(self, pid: int, left: NDArray[np.uint32]) -> None:
        """A process is not looked at any more.

        Args:
            pid: Which.
            left: The owner's number of each thread that is still followed: all are counted again.
        """
        owner = self._of.pop(pid, UNKNOWN)
        counts = np.bincount(left, minlength=OWNERS)
        counts[0] = len(left)
        for place in (0, *self._numbers.values()):
            self._module["owner_threads"].set(place, int(counts[place]))
        if owner in self._counted_as and owner not in self._of.values():
            counted_as = self._counted_as.pop(owner)
            if counted_as in self._counted_as.values():
                self._publish_resting(counted_as)
            else:
                del self._numbers[counted_as]
        self._publish()

    def _publish(self) -> None:
        self._module["thread_owners"].set(0, len(self._numbers))
