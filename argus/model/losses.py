"""Losses, and whom each concerns: a job, the processes of a user in a container, or everybody.

What a process costs Argus (a file that is not searched, a list that does not end) is a loss of that process's job. Were
it counted for all, any user of a node could make the coverage of every other user's job incomplete.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

Owner = tuple[int, str]
"""User (-1: not known) and container that a process runs as and in."""
UNKNOWN: Owner = (-1, "")
ANY_CONTAINER = "*"
"""An owner's container: one of that user's, it is not known which. No container is called so."""
OWNERS = 1024
"""Users and containers whose losses are counted apart. Half of that is for users of whom nothing is counted yet; those
of users beyond them count for every job."""
CONTAINERS = 64
"""Of one user, losses of so many containers are counted apart; those of further ones count for all its jobs."""


class Owned(Protocol):
    """A job, as far as its losses are concerned.

    Attributes:
        name: For people.
        owner: User and container that its processes run as.
        losses: What was lost of it alone, by counter.
    """

    name: str
    owner: Owner
    losses: Counter[str]


@dataclass(frozen=True)
class Whom:
    """Whom a loss concerns.

    Attributes:
        job: The job; None: the process belongs to none yet, and may belong to any of its owner's.
        owner: Of such a process; ``UNKNOWN``: it may belong to any job.
    """

    job: Owned | None = None
    owner: Owner = UNKNOWN


EVERYBODY = Whom()


class Losses:
    """Counts losses. Any thread may.

    Args:
        any_container: A job may have processes in any container of its user (``--job``).

    Attributes:
        totals: Of the whole trace, by counter.
    """

    def __init__(self, *, any_container: bool = False) -> None:
        self.totals: Counter[str] = Counter()
        self._any_container = any_container
        self._lock = threading.Lock()
        self._of_anybody: Counter[str] = Counter()
        """Of them, those that may concern any job."""
        self._of_owner: dict[Owner, Counter[str]] = {}
        """Of them, those of processes that belong to no job yet, by their owners."""

    def count(self, counter: str, *whom: Whom, number: int = 1) -> None:
        """Counts a loss, once in all and once for each of those that it concerns.

        Args:
            counter: Its name.
            whom: Whom it concerns; nobody: everybody.
            number: How many; below 0: so many were none after all, counted for the same ones before.
        """
        with self._lock:
            self.totals[counter] += number
            for account in {id(account): account for account in map(self._account, whom or (EVERYBODY,))}.values():
                account[counter] += number

    def _account(self, whom: Whom) -> Counter[str]:
        if whom.job is not None:
            return whom.job.losses
        owner = whom.owner
        if owner[0] < 0:
            return self._of_anybody
        if owner in self._of_owner:
            return self._of_owner[owner]
        of_user = sum(user == owner[0] for user, _ in self._of_owner)
        if of_user and (of_user >= CONTAINERS or len(self._of_owner) >= OWNERS // 2):
            owner = owner[0], ANY_CONTAINER
        if owner in self._of_owner or len(self._of_owner) < OWNERS:
            return self._of_owner.setdefault(owner, Counter())
        return self._of_anybody

    @property
    def crowded(self) -> bool:
        """Whether users may soon have only one account for all their containers."""
        return len(self._of_owner) >= OWNERS // 2

    def keep(self, owners: AbstractSet[Owner]) -> None:
        """Forgets what was lost of others than these owners. ``totals`` stay.

        Args:
            owners: Of all processes and jobs that are there: losses of others concern nobody any more.
        """
        users = {user for user, _ in owners}
        with self._lock:
            for owner in [*self._of_owner]:
                there = owner[0] in users if owner[1] == ANY_CONTAINER else owner in owners
                if not there and (owner[0], ANY_CONTAINER) not in owners:
                    del self._of_owner[owner]

    def may_be(self, job: Owned, owner: Owner) -> bool:
        """Whether processes of an owner may belong to a job."""
        any_container = self._any_container or owner[1] == ANY_CONTAINER
        return owner[0] == job.owner[0] and (any_container or owner[1] == job.owner[1])

    def of(self, job: Owned) -> dict[str, int]:
        """``totals`` as far as they concern a job: without what was lost of other jobs and of other owners."""
        with self._lock:
            accounts = [self._of_anybody, job.losses]
            accounts += [counted for owner, counted in self._of_owner.items() if self.may_be(job, owner)]
            return {name: sum(counted[name] for counted in accounts) for name in self.totals}
