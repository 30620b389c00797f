"""Time that files take while their probes change, accounted to the sets of users who map them."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Mapping

Users = frozenset[int]
"""Who map a file: the key of an account."""
ACCOUNTS, OF_A_USER = 1024, 16
"""Accounts that have taken time lately; in all, and those that a user is part of: another one of users who all are part
of so many takes none."""
_LITTLE_S = 1e-6
"""An account that lacks less lacks nothing."""


def weight(account: Users, of_user: Mapping[int, int]) -> float:
    """What part of the time an account has. One of several users has the less the more of them each of these is part
    of: whoever makes many, with users that it has, takes nothing from others. ``of_user``: accounts of each user."""
    return 1.0 if len(account) == 1 else 1 / max(min(of_user[user] for user in account) - 1, 1)


class Accounts:
    """What is left to each account.

    Args:
        now: The clock.
        of_each: Share of the time that an account may take.
        of_all: That of all together: what one does not need is for others.
        saved_s: What each may have saved of it.
        most_debt_s: Nobody owes more.
    """

    def __init__(
        self, now: Callable[[], float], of_each: float, of_all: float, saved_s: float, most_debt_s: float
    ) -> None:
        self._now = now
        self._of_each, self._of_all, self._saved_s, self._most_debt_s = of_each, of_all, saved_s, most_debt_s
        self._filled_at = now()
        self._left: dict[Users, float] = {}
        """Of accounts that have taken time: what was left to them at ``_filled_at``, less what they took since."""
        self._of_user = Tally[int]()
        """Accounts of these that each user is part of."""

    def left(self, account: Users) -> float:
        """Seconds; negative: it owes them."""
        return self._left.get(account, self._saved_s)

    def has_room(self, account: Users) -> bool:
        """Whether it could be noted what an account takes."""
        own = len(account) == 1
        return own or account in self._left or any(self._of_user[user] < OF_A_USER for user in account)

    def fill(self) -> None:
        """Hands out time, by water-filling, to accounts that lack some."""
        passed_s, self._filled_at = self._now() - self._filled_at, self._now()
        weights = {account: weight(account, self._of_user) for account in self._left}
        lacks = {
            account: min(self._saved_s - left_s, passed_s * self._of_each) for account, left_s in self._left.items()
        }
        left_s, weights_left = passed_s * self._of_all, sum(weights.values())
        for account in sorted(weights, key=lambda account: lacks[account] / weights[account]):
            gets_s = min(lacks[account], left_s * weights[account] / weights_left)
            left_s, weights_left = left_s - gets_s, weights_left - weights[account]
            self._left[account] += gets_s
            if self._saved_s - self._left[account] < _LITTLE_S:
                self._forget(account)

    def spend(self, account: Users, seconds: float) -> None:
        """An account has taken so much."""
        if account not in self._left:
            self._of_user.update(account)
        left_s = self._left.pop(account, self._saved_s) - seconds
        self._left[account] = max(left_s, -self._most_debt_s)
        if len(self._left) > ACCOUNTS:
            self._forget(next(iter(self._left)))

    def _forget(self, account: Users) -> None:
        del self._left[account]
        self._of_user -= Tally(account)
