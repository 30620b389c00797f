"""How much of the loop's time may be spent on each owner's processes, for what a process can have without end.

So where processes of several owners are traced, each has an account of time, filled all the time; what was done for its
processes is taken off. While an account is empty that is not done for them.

* GPU records lie in memory of the process. They are left there: the helper runs out of buffers, and counts what it
  drops as losses of that process.
* Names of kernels, ranges and stacks are read from the process, and demangled. They stay what they are: addresses.
* Processes may be started without end, and jobs with them. New ones become ranks later, or never.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from argus.capture.process.demangler import waits_s
from argus.model.losses import UNKNOWN, Owner
from argus.model.shares import CONTAINERS

_ROUNDS = 4
"""In which what full accounts leave is handed to the others."""
_OF_USER = 4
"""What a user has saved for all its containers, which anybody may make without end, in times of what one has."""
_KEPT_GONE = 256
"""Owners that left, the newest, of which is remembered what they had; and users."""
Key = TypeVar("Key", bound=Hashable)


class _Accounts(Generic[Key]):
    """Accounts of owners, or of users."""

    def __init__(self, saved_s: float) -> None:
        self._saved_s = saved_s
        self.left_s: dict[Key, float] = {}
        self.gone_s: dict[Key, float] = {}
        """Of those that left: what their accounts hold, until they are full."""

    def fill(self, weights: Mapping[Key, float], share_s: float) -> None:
        """Hands out a share of time. ``weights``: of those who are there."""
        each_s = share_s / max(sum(weights.values()), 1.0)
        for key in self.left_s.keys() - weights.keys():
            self.gone_s[key] = self.left_s.pop(key)
        gone = {key: left_s + each_s for key, left_s in self.gone_s.items()}
        self.gone_s = {key: left_s for key, left_s in gone.items() if left_s < self._saved_s}
        while len(self.gone_s) > _KEPT_GONE:
            del self.gone_s[next(iter(self.gone_s))]
        for key in weights:
            self.begin(key)
        for _ in range(_ROUNDS):
            open_to = [key for key in weights if self.left_s[key] < self._saved_s]
            if not open_to or share_s <= 0:
                return
            each_s = share_s / sum(weights[key] for key in open_to)
            for key in open_to:
                given_s = min(each_s * weights[key], self._saved_s - self.left_s[key])
                self.left_s[key] += given_s
                share_s -= given_s

    def begin(self, key: Key) -> None:
        """Who has just come begins with all; who comes back, with what it would have if it had stayed."""
        if key not in self.left_s:
            self.left_s[key] = self.gone_s.pop(key, self._saved_s)


class Turns:
    """The accounts of one trace's owners. While there is one owner nothing is taken off.

    Args:
        of_loop: Share of the loop's time for all owners together. An owner that uses less than its part leaves it to
            those that use more (max-min fairness).
        saved_s: The most that an account holds.
        clock: What is taken off: CPU time of the thread, and of the child that demangles names for it, or, with
            ``time.monotonic``, the time for which it was held.
    """

    def __init__(self, of_loop: float, saved_s: float, clock: Callable[[], float] | None = None) -> None:
        self._of_loop = of_loop
        self._clock = clock or (lambda: time.thread_time() + waits_s())
        self._of_owners = _Accounts[Owner](saved_s)
        self._of_users = _Accounts[int](_OF_USER * saved_s)
        self._filled = 0.0

    def fill(self, owners: AbstractSet[Owner], now: float) -> None:
        """Adds what the time since the last call is worth.

        Args:
            owners: Those with processes; the accounts of others are closed. ``UNKNOWN`` stands for all who are not
                known, and is not one of several.
            now: ``time.monotonic()``.
        """
        share_s, self._filled = self._of_loop * max(now - self._filled, 0.0), now
        containers = Tally(user for user, _ in owners)
        self._of_owners.fill({owner: min(1.0, CONTAINERS / containers[owner[0]]) for owner in owners}, share_s)
        self._of_users.fill({user: min(number, CONTAINERS) for user, number in containers.items()}, share_s)

    def _begin(self, owner: Owner) -> None:
        self._of_owners.begin(owner)
        self._of_users.begin(owner[0])

    @property
    def alone(self) -> bool:
        """Whether there is one owner, of whom nothing is taken off."""
        return len(self._of_owners.left_s) - (UNKNOWN in self._of_owners.left_s) < 2

    def left_s(self, owner: Owner) -> float:
        """So long something may be done for an owner's processes now: any time, if there is no other owner."""
        self._begin(owner)
        return math.inf if self.alone else min(self._of_owners.left_s[owner], self._of_users.left_s[owner[0]])

    def may(self, owner: Owner) -> bool:
        """Whether something may be done for them now."""
        return self.left_s(owner) > 0

    def spending(self, owner: Owner) -> AbstractContextManager[None]:
        """What the thread does within is done for an owner's processes."""
        return _Spending(self, owner, self._clock)

    def spend(self, owner: Owner, seconds: float) -> None:
        """Takes off what was spent, s: of who has it to itself nothing, since nobody had to wait."""
        self._begin(owner)
        if not self.alone:
            self._of_owners.left_s[owner] -= seconds
            self._of_users.left_s[owner[0]] -= seconds


class _Spending(AbstractContextManager[None]):
    """Takes off what is spent within. It is entered for each process in each turn."""

    __slots__ = ("_begun_s", "_clock", "_owner", "_turns")

    def __init__(self, turns: Turns, owner: Owner, clock: Callable[[], float]) -> None:
        self._turns, self._owner, self._clock = turns, owner, clock
        self._begun_s: float | None = None

    def __enter__(self) -> None:
        self._begun_s = None if self._turns.alone else self._clock()  # to read a clock of CPU time takes a microsecond

    def __exit__(self, *_: object) -> None:
        if self._begun_s is not None:
            self._turns.spend(self._owner, self._clock() - self._begun_s)
