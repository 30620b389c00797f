"""How many links that hold probes the files of each user's processes may have: each takes a descriptor."""

from __future__ import annotations

import resource
import threading
from collections import Counter as Tally
from collections.abc import Iterable

from argus.capture.attachment import Attachment, subject_of
from argus.capture.kernel.links import Backend
from argus.capture.process.targets import Library
from argus.model import calls
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import Owner

LINKS = 5 / 8
"""Of the descriptors that this process may have, those for links that hold probes."""
MOST_LINKS: dict[Backend, int] = {"multi": 1 << 16, "perf": 1 << 20}
"""No more than that: a link has many probes, or one, and takes 6 KiB, or half a KiB."""


class LinkRoom:
    """Descriptors of links. An owner may have as many as are left for others then, and a user with several containers
    twice as many: so nobody's files take those of all.

    Args:
        backend: How probes are attached.
        launch_durations: Whether exits of launches are probed too.
    """

    def __init__(self, backend: Backend, *, launch_durations: bool) -> None:
        self._backend = backend
        self._launch_durations = launch_durations
        self._of_owner: Tally[Owner] = Tally()
        self._lock = threading.Lock()

    def take(self, attachment: Attachment) -> None:
        """Keeps room for all probes that a file may get.

        Raises:
            ArgusError: There is none.
        """
        number, owner = self.at_most(attachment.library), attachment.owner
        with self._lock:
            if not fits(number, owner, self._left, self._of_owner):
                raise ArgusError(
                    f"{attachment.library.shown_path} is not probed: files of its user have as many probes as they may",
                    "Raise the limit: ulimit -n",
                    EXIT_UNAVAILABLE,
                )
            self._of_owner[owner] += number
            attachment.links_kept = number

    def who_has(self, library: Library, owners: Iterable[Owner]) -> list[Owner]:
        """On account of which owners there is room now for all probes that a file may get, in this order."""
        number = self.at_most(library)
        with self._lock:
            left, of_user = self._left, Tally[int]()
            for owner, has in self._of_owner.items():
                of_user[owner[0]] += has
            return [owner for owner in owners if _fits(number, left, self._of_owner[owner], of_user[owner[0]])]

    @property
    def _left(self) -> int:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(int(limit * LINKS), MOST_LINKS[self._backend]) - self._of_owner.total()

    def give_back(self, *attachments: Attachment) -> None:
        """These files have no links any more."""
        with self._lock:
            for attachment in attachments:
                self._of_owner[attachment.owner] -= attachment.links_kept
                attachment.links_kept = 0
                if not self._of_owner[attachment.owner]:
                    del self._of_owner[attachment.owner]

    def hand_on(self, attachment: Attachment) -> None:
        """A file's owner does not map it any more: it is now that one's who does, and has fewest links."""
        with self._lock:
            owner = min(attachment.shared_by, key=lambda owner: (self._of_owner[owner], owner))
            number = attachment.links_kept
            self._of_owner[attachment.owner] -= number
            self._of_owner[owner] += number
            for each in (attachment.owner, *attachment.shared_by):
                if not self._of_owner[each]:
                    del self._of_owner[each]
            attachment.owner = owner

    def at_most(self, library: Library) -> int:
        """How many links a file takes if all of its functions are probed."""
        called = [calls.BY_SYMBOL[symbol] for symbol in library.offsets]
        ends = [call for call in called if calls.probes_exit(call, self._launch_durations)]
        if self._backend == "perf":
            return len(called) + len(ends)
        return sum(len({(subject_of(call), call.program) for call in edge}) for edge in (called, ends))


def fits(number: int, owner: Owner, left: int, of_owner: Tally[Owner]) -> bool:
    """Whether an owner may have so many more.

    Args:
        number: How many.
        owner: Whose.
        left: As many nobody has.
        of_owner: How many each has.
    """
    of_user = sum(has for other, has in of_owner.items() if other[0] == owner[0])
    return _fits(number, left, of_owner[owner], of_user)


def _fits(number: int, left: int, of_owner: int, of_user: int) -> bool:
    left -= number
    return of_owner + number <= left and of_user + number <= 2 * left
