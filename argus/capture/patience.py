"""How long the loop waits while probes of many files are changed.

A job needs the probes of all its files: a window that lacks one is none. So users have the time of a change one after
the other, each whole or not at all; and who takes much has fewer changes, not parts of each. A file that several users
map, as they do the driver's library, takes the time of that one of them who has most left: nobody's windows are up to
the account of who mapped it first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from argus.capture.attachment import Attachment

LONGEST_S, OF_USER_S, OF_FILE_S = 5.0, 2.0, 1.0
"""One change takes no longer: in all; for the files of one user where there are several; for one file."""
SAME_S = 0.1
"""Waits with less than that in between are of one change: probes go, and others come."""
OF_LOOP, OF_USERS, SAVED_S = 0.2, 0.4, 1.0
"""Share of the loop's time that a user's files may take where there are several users, and that of all of them
together; what each has saved of it. Of who is alone, it is what files take that do not answer. Who has taken more waits
until that is made up for."""
ANSWERS_S = 0.05
"""So much of the wait until probes are gone is free."""
OF_CLOSINGS, CLOSING_S = 0.1, 0.1
"""Share of the loop's time for that; and one waits for so long in any case."""
USERS = 1024
"""Users who have taken time lately that are known."""
_LEAST_S = 0.02
"""Who has less left is not waited for."""


class Patience:
    """Bounds the waits of one change after the other. One thread asks.

    Args:
        now: The clock.
    """

    def __init__(self, now: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._now = now
        self._closed_at = now()
        self._closing_s = SAVED_S
        self._saved: dict[int, tuple[float, float]] = {}
        """Of users who have taken time: what was left to them, and when."""
        self._several = False
        self._share = OF_LOOP
        self._waited_at = now()
        self._left_s = LONGEST_S
        """Of this change."""
        self._left_of: dict[int, float] = {}
        """Of this change, of each user."""
        self._resting: set[int] = set()
        """Users who have none of this change."""
        self._guests: set[int] = set()
        """Users whose files nobody maps any more."""

    def begin(self, attachments: Iterable[Attachment], among: Sequence[Attachment] = ()) -> list[Attachment]:
        """A change begins. Returns the files in the order to go through them: those of users who have taken little time
        come first, and of each user those that were not late. ``among``: all files, if others do not change."""
        files = list(attachments)
        users = {user for each in (among or files) if not each.unused for user in each.users}
        self._several = len(users) > 1
        self._share = min(OF_LOOP, OF_USERS / max(len(users), 1))
        saved = {user: self._saved_s(user) for user in {user for each in files for user in each.users}}
        self._begin_change()
        for user in saved:
            self._left_of.setdefault(user, OF_USER_S)
        self._resting = {user for user, left_s in saved.items() if left_s <= 0}
        self._guests = saved.keys() - users
        payers = {id(each): max(each.users, key=lambda user: (saved[user], -user)) for each in files}
        return sorted(files, key=lambda each: (-saved[payers[id(each)]], payers[id(each)], not each.answers))

    def _payer(self, attachment: Attachment) -> int:
        """That user of a file who has most left."""
        users = attachment.users
        if len(users) == 1:
            return next(iter(users))
        return max(users, key=lambda user: (user not in self._resting, self._left(user), self._saved_s(user), -user))

    def _left(self, user: int) -> float:
        return self._left_of.get(user, 0.0) if self._is_bounded(user) else self._left_s

    def _begin_change(self) -> None:
        if self._now() - self._waited_at > SAME_S:
            self._left_s, self._left_of = LONGEST_S, {}

    def _saved_s(self, user: int) -> float:
        left_s, since = self._saved.get(user, (SAVED_S, 0.0))
        return min(left_s + self._share * (self._now() - since), SAVED_S)

    def has_turn(self, attachment: Attachment) -> bool:
        """Whether one of a file's users has anything of this change: else it waits until what they took is made up
        for."""
        return not attachment.users <= self._resting

    def _is_bounded(self, user: int) -> bool:
        return self._several or user in self._guests

    def seconds(self, attachment: Attachment) -> float:
        """How long a file may be waited for; 0: not at all."""
        user = self._payer(attachment)
        if user in self._resting:
            return 0.0
        left_s = min(OF_FILE_S, self._left_s, self._left(user))
        return left_s if left_s >= _LEAST_S else 0.0

    def spend(self, attachment: Attachment, waited_s: float, *, came: bool) -> None:
        """A file was waited for. ``came``: for probes that are there now."""
        user = self._payer(attachment)
        self._took(waited_s)
        if user in self._left_of:
            self._left_of[user] -= waited_s
        if came and not self._is_bounded(user):
            return
        left_s = max(self._saved_s(user) - waited_s, -LONGEST_S)  # nobody owes more than one change
        self._saved.pop(user, None)
        self._saved[user] = left_s, self._now()
        if len(self._saved) > USERS:
            del self._saved[next(iter(self._saved))]

    def _took(self, waited_s: float) -> None:
        self._left_s -= waited_s
        self._waited_at = self._now()

    def closing_s(self, *, moving: bool = False) -> float:
        """How long to wait until probes are gone. ``moving``: those of one file after those of another, of one user
        that is alone."""
        now = self._now()
        self._begin_change()
        self._closing_s = min(self._closing_s + OF_CLOSINGS * (now - self._closed_at), SAVED_S)
        self._closed_at = now
        if moving:
            return max(self._left_s, 0.0)
        return max(min(self._closing_s, self._left_s), CLOSING_S)

    def spend_closing(self, waited_s: float, *, gone: bool) -> None:
        """Probes were waited for. Those that go in time add up, too: one change after the other would hold the loop."""
        self._took(waited_s)
        self._closing_s = max(self._closing_s - (max(waited_s - ANSWERS_S, 0.0) if gone else waited_s), 0.0)
