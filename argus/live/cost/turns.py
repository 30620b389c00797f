"""How much of the loop's time may be spent on each owner's processes, for what a process can have without end.

So where processes of several owners are traced, each has an account of time, filled all the time; what was done for its
processes is taken off. While an account is empty that is not done for them.

* GPU records lie in memory of the process. They are left there: the helper runs out of buffers, and counts what it
  drops as losses of that process.
* Names of kernels, ranges and stacks are read from the process, and demangled. They stay what they are: addresses.
* Processes may be started without end, and jobs with them. New ones become ranks later, or never.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from argus.model.losses import UNKNOWN, Owner
from argus.model.shares import CONTAINERS

_ROUNDS = 4
"""In which what full accounts leave is handed to the others."""
_NEW_CONTAINERS = 4
"""Containers of a user that begin with a full account; further ones, which anybody may make without end, with what has
come back of that since."""
_LEAST_S = 0.01
"""What a container takes of that at least, and owes where there is nothing: an account that is not empty suffices for
one thing, however long it takes."""
_KEPT_GONE = 256
"""Owners that left, the newest, of which is remembered what they had."""


class Turns:
    """The accounts of one trace's owners. While there is one owner nothing is taken off.

    Args:
        of_loop: Share of the loop's time for all owners together. An owner that uses less than its part leaves it to
            those that use more (max-min fairness).
        saved_s: The most that an account holds.
        clock: What is taken off: CPU time of the thread, or, with ``time.monotonic``, the time for which it was held.
    """

    def __init__(self, of_loop: float, saved_s: float, clock: Callable[[], float] | None = None) -> None:
        self._of_loop, self._saved_s = of_loop, saved_s
        self._clock = clock or (lambda: time.thread_time())
        self._left_s: dict[Owner, float] = {}
        self._gone_s: dict[Owner, float] = {}
        """Of owners that left: what their accounts hold, until they are full."""
        self._new_s: dict[int, float] = {}
        """Of users: what their new containers may begin with, until it is all again."""
        self._filled = 0.0

    def fill(self, owners: AbstractSet[Owner], now: float) -> None:
        """Adds what the time since the last call is worth.

        Args:
            owners: Those with processes; the accounts of others are closed. ``UNKNOWN`` stands for all who are not
                known, and is not one of several.
            now: ``time.monotonic()``.
        """
        share_s, self._filled = self._of_loop * max(now - self._filled, 0.0), now
        self._keep_of_gone(owners, share_s)
        for owner in owners:
            self._open(owner)
        containers = Tally(user for user, _ in owners)
        weights = {owner: min(1.0, CONTAINERS / containers[owner[0]]) for owner in owners}
        for _ in range(_ROUNDS):
            open_to = [owner for owner in owners if self._left_s[owner] < self._saved_s]
            if not open_to or share_s <= 0:
                return
            each_s = share_s / sum(weights[owner] for owner in open_to)
            for owner in open_to:
                given_s = min(each_s * weights[owner], self._saved_s - self._left_s[owner])
                self._left_s[owner] += given_s
                share_s -= given_s

    def _keep_of_gone(self, owners: AbstractSet[Owner], share_s: float) -> None:
        """Who leaves and comes back has no more than if it had stayed."""
        each_s = share_s / max(len(owners), 1)
        self._gone_s |= {owner: self._left_s.pop(owner) for owner in self._left_s.keys() - owners}
        gone = {owner: left_s + each_s for owner, left_s in self._gone_s.items()}
        self._gone_s = {owner: left_s for owner, left_s in gone.items() if left_s < self._saved_s}
        while len(self._gone_s) > _KEPT_GONE:
            del self._gone_s[next(iter(self._gone_s))]
        all_s = _NEW_CONTAINERS * self._saved_s
        self._new_s = {user: left_s + each_s for user, left_s in self._new_s.items() if left_s + each_s < all_s}

    def _open(self, owner: Owner) -> None:
        if owner in self._left_s:
            return
        if owner in self._gone_s:
            self._left_s[owner] = self._gone_s.pop(owner)
            return
        left_s = self._new_s.get(owner[0], _NEW_CONTAINERS * self._saved_s)
        self._left_s[owner] = min(max(left_s, -_LEAST_S), self._saved_s)
        self._new_s[owner[0]] = max(left_s - max(self._left_s[owner], _LEAST_S), -self._saved_s)

    @property
    def _alone(self) -> bool:
        return len(self._left_s.keys() - {UNKNOWN}) < 2

    def may(self, owner: Owner) -> bool:
        """Whether something may be done for an owner's processes now: always, if there is no other owner."""
        self._open(owner)
        return self._alone or self._left_s[owner] > 0

    @contextmanager
    def spending(self, owner: Owner) -> Iterator[None]:
        """What the thread does within is done for an owner's processes."""
        begun_s = self._clock()
        try:
            yield
        finally:
            self.spend(owner, self._clock() - begun_s)

    def spend(self, owner: Owner, seconds: float) -> None:
        """Takes off what was spent, s: of who has it to itself nothing, since nobody had to wait."""
        self._open(owner)
        if not self._alone:
            self._left_s[owner] -= seconds
