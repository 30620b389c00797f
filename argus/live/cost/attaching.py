"""Probes that the kernel is putting on files, in threads of their own: how many at once, and for how long one waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from argus.capture.attachment import Attachment
from argus.capture.process.targets import FileKey, Library, Target
from argus.live.cost.turns import Turns
from argus.model.losses import UNKNOWN, Owner
from argus.system.aside import Aside

ATTACH_S = 5.0
"""Before a trace begins it waits for so long, in all, for files that do not answer, and where there are several owners
for each one's files: probes come in tens of ms where pages can be read, later on a busy node. What comes later is taken
over."""
TURN_S = 0.25
"""For so long a turn of the loop waits, in all: nearly always all probes come meanwhile."""
OF_LOOP, SAVED_S = 0.1, 4.0
"""Share of the loop's time for probes on several owners' files, and what an owner has saved that had few."""
MOST, MOST_OF_OWNER = 32, 4
"""Files that probes are being put on at one time, in all and of one owner: each holds a thread, maybe for ever. A user
has at most as many as are left for others, whatever containers it makes, and one in any case, up to ``MOST_USERS``."""
MOST_USERS = 64
ALIKE_S = 1.0
"""For so long a file waits for another user's that may be the same, and for one that is under way no longer than that:
anybody can make an overlay's file look alike, and its file system need never answer."""
_Place = tuple[FileKey, int | None]


@dataclass
class _UnderWay:
    owner: Owner
    making: Aside[Attachment]
    use: tuple[Library, Target] | None = None
    """The file, and the process by which it is opened."""
    since: float = 0.0


class Attaching:
    """What is under way.

    Attributes:
        under_way: By file and process.
    """

    def __init__(self) -> None:
        self.under_way: dict[_Place, _UnderWay] = {}
        self._turns = Turns(OF_LOOP, SAVED_S, time.monotonic)
        self._running = self._several = False
        self._left_s = ATTACH_S
        self._waited_s: dict[Owner, float] = {}
        """Before the trace begins."""

    def begin(self, owners: Iterable[Owner], *, running: bool) -> None:
        """A turn begins.

        Args:
            owners: Whose processes map files.
            running: The trace has begun.
        """
        there = {UNKNOWN, *owners}
        self._turns.fill(there, time.monotonic())
        self._several = len(there) > 2
        if running:
            self._left_s = TURN_S
        self._running = running

    def is_at(self, stamp: tuple[int, int], users: AbstractSet[int], waited_s: float) -> bool:
        """Whether a file of an overlay waits for probes that are being put on one of its size and time of change.

        Args:
            stamp: Size and time of change.
            users: Whose processes map the file that waits.
            waited_s: How long it has waited.
        """
        now = time.monotonic()
        for (key, _), each in self.under_way.items():
            if key[2:] != stamp or each.use is None or not each.use[0].file.on_overlay:
                continue
            if waited_s < ATTACH_S if each.owner[0] in users else max(waited_s, now - each.since) < ALIKE_S:
                return True
        return False

    def may(self, owner: Owner) -> bool:
        """Whether probes may be put on another file of an owner now: on one at a time whatever it has had, since what a
        file takes depends on all who map it, and on more where the loop has time for them."""
        of_owner = sum(each.owner == owner for each in self.under_way.values())
        of_user = sum(each.owner[0] == owner[0] for each in self.under_way.values())
        if of_owner >= MOST_OF_OWNER or (of_owner and not self.has_time(owner)):
            return False
        return of_user < MOST - len(self.under_way) or (not of_user and len(self.under_way) < MOST_USERS)

    def go(self, place: _Place, work: Callable[[], Attachment], use: tuple[Library, Target]) -> bool:
        """Begins to put probes on a file, and waits for a while. Whether that has ended: ``take`` has the result.

        Args:
            place: The file, and the process if it is not for all.
            work: Puts them there.
            use: The file, and the process by which it is opened: its owner's time is spent.
        """
        owner = use[1].identity.owner
        each = self.under_way[place] = _UnderWay(owner, Aside(work, "argus-attach"), use, time.monotonic())
        return self.wait(each.making, owner)

    def wait(self, work: Aside[Any], owner: Owner) -> bool:
        """Waits for something that is done for an owner, as long as this turn may. Whether it has ended."""
        begun = time.monotonic()
        ended = work.wait(max(self._patience_s(owner), 0.0))
        waited_s = time.monotonic() - begun
        if self._running:
            self._turns.spend(owner, waited_s)
        else:
            self._waited_s[owner] = self._waited_s.get(owner, 0.0) + waited_s
        if self._running or not ended:  # before the trace begins, files that answer are waited for
            self._left_s -= waited_s
        return ended

    def has_time(self, owner: Owner) -> bool:
        """Whether an owner has not had its part of the time."""
        return self._turns.may(owner)

    @property
    def several(self) -> bool:
        """Whether processes of several owners map files."""
        return self._several

    def _patience_s(self, owner: Owner) -> float:
        if self._running:
            return min(self._left_s, self._turns.left_s(owner))
        return min(self._left_s, ATTACH_S - self._waited_s.get(owner, 0.0) if self._several else math.inf)

    def ended(self) -> list[_Place]:
        """What has ended since."""
        return [place for place, each in self.under_way.items() if each.making.wait(0)]

    def take(self, place: _Place) -> Attachment:
        """The result of what has ended.

        Raises:
            ArgusError: The kernel refuses.
            OSError: Its process has ended.
        """
        return self.under_way.pop(place).making.result()
