"""How long the loop waits while probes of many files are changed: for files that do not answer, next to nothing."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable

from argus.capture.attachment import Attachment
from argus.model.losses import Owner

TURN_S = 0.25
"""So long one change waits, beyond what files that answer take."""
ANSWERS_S = 0.05
"""So much of the wait for probes that do come is free: tens of ms where everybody answers."""
LONGEST_S = 5.0
"""One change takes no longer, also where all files answer."""
OF_LOOP, SAVED_S = 0.1, 1.0
"""Share of the loop's time for what does not answer, and what is saved of it."""
_LEAST_S = 0.02
"""Who has less left is not waited for."""


class Patience:
    """Bounds the waits of one change after the other. One thread asks.

    Args:
        now: The clock.
    """

    def __init__(self, now: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._now = now
        self._saved_s, self._at = SAVED_S, now()
        self._closings_s = SAVED_S
        self._left_s, self._until = TURN_S, self._at + LONGEST_S
        self._several = False

    def begin(self, attachments: Iterable[Attachment]) -> list[Attachment]:
        """A change begins. Returns the files in the order to go through them: those that have always answered first,
        then of each owner one after the other."""
        files = list(attachments)
        now = self._now()
        self._closings_s = min(self._closings_s + OF_LOOP * (now - self._at), SAVED_S)
        self._saved_s, self._at = min(self._saved_s + OF_LOOP * (now - self._at), SAVED_S), now
        self._left_s, self._until = min(TURN_S, self._saved_s), now + LONGEST_S
        self._several = len({each.owner for each in files}) > 1
        turns: Tally[Owner] = Tally()
        order: dict[int, tuple[int, int]] = {}
        for each in files:
            order[id(each)] = each.unanswered, turns[each.owner]
            turns[each.owner] += 1
        return sorted(files, key=lambda each: order[id(each)])

    def seconds(self) -> float:
        """How long the next file may be waited for: 0, if not at all. One file never takes all that is left where there
        are others'."""
        left_s = self._left_s / 2 if self._several else self._left_s
        left_s = min(left_s, self._until - self._now())
        return left_s if left_s >= _LEAST_S else 0.0

    def spend(self, waited_s: float, *, came: bool) -> None:
        """A file was waited for."""
        cost_s = max(waited_s - ANSWERS_S, 0.0) if came else waited_s
        self._left_s -= cost_s
        self._saved_s -= cost_s

    def closing_s(self) -> float:
        """How long to wait until probes are gone."""
        self.begin(())
        return max(min(self._saved_s, self._closings_s), 0.0)

    def spend_closing(self, waited_s: float, *, gone: bool) -> None:
        """It was waited until probes are gone. Those that go in time take nothing from files that are probed later, but
        they add up, too: one change after the other would hold the loop for long."""
        self._closings_s -= max(waited_s - ANSWERS_S, 0.0) if gone else waited_s
        if not gone:
            self.spend(waited_s, came=False)
