"""How much of the loop's time the GPU records of each owner may take.

A process writes its records into memory of its own, as many as it likes, and whoever reads them has no time for others
meanwhile. So where processes of several owners have GPU times, each has an account of CPU time, filled all the time;
what its records took is taken off. While an account is empty the owner's buffers are left as they are: the helper runs
out of buffers, and counts what it drops as losses of that process.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from argus.model.losses import Owner

OF_LOOP = 0.5
"""Share of the loop's time for the GPU records of all owners together. An owner that uses less than its part leaves it
to those that use more (max-min fairness)."""
SAVED_S = 0.25
"""The most that an account holds: half a million records at once."""
CONTAINERS = 8
"""Containers of a user that count as owners of their own; those of a user with more share as much."""
_ROUNDS = 4
"""In which what full accounts leave is handed to the others."""


class Turns:
    """The accounts of one trace's owners."""

    def __init__(self) -> None:
        self._left_s: dict[Owner, float] = {}
        self._filled = 0.0

    def fill(self, owners: AbstractSet[Owner], now: float) -> None:
        """Adds what the time since the last call is worth.

        Args:
            owners: Those with processes that may have GPU times; the accounts of others are closed.
            now: ``time.monotonic()``.
        """
        share_s, self._filled = OF_LOOP * max(now - self._filled, 0.0), now
        self._left_s = {owner: self._left_s.get(owner, SAVED_S) for owner in owners}
        containers = Tally(user for user, _ in owners)
        weights = {owner: min(1.0, CONTAINERS / containers[owner[0]]) for owner in owners}
        for _ in range(_ROUNDS):
            open_to = [owner for owner in owners if self._left_s[owner] < SAVED_S]
            if not open_to or share_s <= 0:
                return
            each_s = share_s / sum(weights[owner] for owner in open_to)
            for owner in open_to:
                given_s = min(each_s * weights[owner], SAVED_S - self._left_s[owner])
                self._left_s[owner] += given_s
                share_s -= given_s

    def may(self, owner: Owner) -> bool:
        """Whether records of an owner's processes may be taken now: always, if there is no other owner."""
        return len(self._left_s) < 2 or self._left_s.get(owner, 0.0) > 0

    @contextmanager
    def spending(self, owner: Owner) -> Iterator[None]:
        """What the thread does within is done with an owner's records."""
        begun_s = time.thread_time()
        try:
            yield
        finally:
            self.spend(owner, time.thread_time() - begun_s)

    def spend(self, owner: Owner, seconds: float) -> None:
        """Takes off what an owner's records took of the loop's CPU time, s."""
        if owner in self._left_s:
            self._left_s[owner] -= seconds
