"""How long the loop waits while probes of many files are changed: for files that do not answer, next to nothing, and of
no user so long that others' files have no turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from argus.capture.attachment import Attachment

ANSWERS_S, ANSWERS_ALONE_S = 0.05, 0.25
"""So much of the wait for probes that do come is free: tens of ms where everybody answers. Where one user is traced: a
window is of no use to a job that lacks one of its files in it."""
LONGEST_S, OF_USER_S = 5.0, 1.0
"""One change takes no longer, also where all files answer: in all, and for the files of one user where there are
several."""
OF_LOOP, OF_LOOP_ALONE, SAVED_S = 0.1, 0.2, 1.0
"""Share of the loop's time for what does not answer, in all; where one user alone is traced; what a user has saved of
it at most. A change takes no more of that."""
LATELY_S = 60.0
"""So long a file that was late comes behind its user's others."""
CLOSING_S = 0.1
"""Until probes are gone one waits for so long in any case."""
USERS = 1024
"""Users who were late lately that are known."""
_LEAST_S = 0.02
"""Who has less left is not waited for."""


@dataclass
class _Account:
    """Of a user who was late.

    Attributes:
        saved_s: What is left for files that do not answer.
        late_at: When one did not.
    """

    saved_s: float
    late_at: float


@dataclass
class _Part:
    """Of a user in one change.

    Attributes:
        left_s: How long its files may be waited for.
        late_s: How long beyond what files that answer take.
        free_s: So long each of those takes at most.
        files: How many it has.
    """

    left_s: float
    late_s: float
    free_s: float
    files: int = 0


class Patience:
    """Bounds the waits of one change after the other. One thread asks.

    Args:
        now: The clock.
    """

    def __init__(self, now: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._now = now
        self._at = self._closed_at = now()
        self._closing_s = SAVED_S
        self._late: dict[int, _Account] = {}
        self._parts: dict[int, _Part] = {}
        """Of this change."""
        self._draw = random.Random(0)

    def begin(self, attachments: Iterable[Attachment]) -> list[Attachment]:
        """A change begins. Returns the files in the order to go through them: those of users who were late lately
        come last, and of each user those that were late. Others take turns at random: if the time does not suffice for
        all, others are left out the next time."""
        files, now = list(attachments), self._now()
        users = {each.owner[0] for each in files}
        several = len(users) > 1
        self._save(now, OF_LOOP if several else OF_LOOP_ALONE)
        left_s = min(OF_USER_S, LONGEST_S / len(users)) if several else LONGEST_S
        free_s = ANSWERS_S if several else ANSWERS_ALONE_S
        self._parts = {
            user: _Part(left_s, self._late[user].saved_s if user in self._late else SAVED_S, free_s) for user in users
        }
        for each in files:
            self._parts[each.owner[0]].files += 1
        late_at = {user: account.late_at for user, account in self._late.items()}
        self._draw.shuffle(files)
        return sorted(files, key=lambda each: (late_at.get(each.owner[0], 0.0), now - each.late_at < LATELY_S))

    def _save(self, now: float, of_loop: float) -> None:
        saved_s = of_loop * (now - self._at) / max(len(self._late), 1)
        self._at = now
        for account in self._late.values():
            account.saved_s = min(account.saved_s + saved_s, SAVED_S)
        self._late = {user: account for user, account in self._late.items() if account.saved_s < SAVED_S}

    def seconds(self, attachment: Attachment) -> float:
        """How long a file may be waited for: 0, if not at all, since its user has nothing left, or less than the file
        takes. One of several files takes half of all that a user may have. For files that were not late lately there
        is time to answer, whatever others have taken."""
        part = self._parts.get(attachment.owner[0])
        if part is None:
            return 0.0
        left_s = min(part.late_s, SAVED_S / 2 if part.files > 1 else SAVED_S)
        if attachment.took_s <= ANSWERS_S and self._at - attachment.late_at >= LATELY_S:
            left_s = max(left_s, ANSWERS_S)
        left_s = min(left_s, part.left_s)
        return left_s if left_s >= max(_LEAST_S, min(attachment.took_s, SAVED_S / 2)) else 0.0

    def spend(self, attachment: Attachment, waited_s: float, *, came: bool) -> None:
        """A file was waited for."""
        user = attachment.owner[0]
        if part := self._parts.get(user):
            part.left_s -= waited_s
            part.late_s -= max(waited_s - part.free_s, 0.0) if came else waited_s
        attachment.took_s = waited_s if came else 2 * waited_s  # it takes longer
        if came:
            return
        account = self._late.pop(user, None) or _Account(SAVED_S, 0.0)
        if len(self._late) >= USERS:
            del self._late[next(iter(self._late))]
        self._late[user] = account
        account.saved_s = max(account.saved_s - waited_s, 0.0)
        account.late_at = self._now()
        if waited_s > ANSWERS_S:  # else it had no time
            attachment.late_at = account.late_at

    def closing_s(self) -> float:
        """How long to wait until probes are gone."""
        now = self._now()
        self._closing_s = min(self._closing_s + OF_LOOP * (now - self._closed_at), SAVED_S)
        self._closed_at = now
        return max(self._closing_s, CLOSING_S)

    def spend_closing(self, waited_s: float, *, gone: bool) -> None:
        """Probes were waited for. Those that go in time add up, too: one change after the other would hold the loop."""
        self._closing_s = max(self._closing_s - (max(waited_s - ANSWERS_S, 0.0) if gone else waited_s), 0.0)
