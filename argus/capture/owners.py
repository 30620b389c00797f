"""Users and containers whose processes are traced together. None fills a ring for the others, and what is lost of its
processes concerns its own jobs only."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.programs import Module
from argus.model import records
from argus.model.losses import UNKNOWN, Owner
from argus.model.records import Counter

OWNERS = 1024
"""Room for so many (``ARGUS_OWNERS``). Those beyond share the first place with processes whose owner is not known."""


class Owners:
    """Numbers owners for the kernel, and says there of how many processes are traced. Any thread may call: forks are
    noticed on one of their own.

    Args:
        module: The programs' maps.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._of: dict[int, int] = {}
        self._numbers: dict[Owner, int] = {}
        self._lost: dict[int, NDArray[np.uint64]] = {}
        """Of each number, what was lost until ``take_losses`` was called last."""
        self._gone: list[tuple[Owner, Counter, int]] = []

    def add(self, pid: int, owner: Owner) -> int:
        """The number of a process's owner, from now on counted among those that are traced."""
        with self._lock:
            number = self._number(owner)
            self._of[pid] = number
            self._publish()
        return number

    def remove(self, pid: int) -> None:
        """A process is not traced any more."""
        with self._lock:
            if self._of.pop(pid, None) is not None:
                self._publish()

    def take_losses(self) -> list[tuple[Owner, Counter, int]]:
        """What the kernel lost of the owners' processes since the last call: whose, what, how many. Of processes whose
        owner is not known it is anybody's."""
        with self._lock:
            found, self._gone = self._gone, []
            for owner, number in [(UNKNOWN, 0), *self._numbers.items()]:
                found += self._losses_of(owner, number)
        return found

    def _number(self, owner: Owner) -> int:
        if owner[0] < 0:
            return 0
        if owner not in self._numbers:
            self._forget_gone()
            free = set(range(1, OWNERS)).difference(self._numbers.values())
            if not free:
                return 0
            self._numbers[owner] = min(free)
        return self._numbers[owner]

    def _losses_of(self, owner: Owner, number: int) -> list[tuple[Owner, Counter, int]]:
        value = self._module["owners"].get(number)
        if value is None:
            return []
        now = np.frombuffer(value, records.OWNER)["lost"][0]
        new = now - self._lost.get(number, np.uint64(0))
        self._lost[number] = now
        return [(owner, Counter(which), int(new[which])) for which in np.flatnonzero(new).tolist()]

    def _forget_gone(self) -> None:
        there = set(self._of.values())
        for owner in [owner for owner, number in self._numbers.items() if number not in there]:
            self._gone += self._losses_of(owner, self._numbers.pop(owner))

    def _publish(self) -> None:
        self._module["owners_traced"].set(0, len(set(self._of.values())))
