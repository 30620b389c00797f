"""Who may take more of a room that several owners share."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping

from argus.model.losses import Owner

CONTAINERS = 8
"""A user in many containers has the part of so many owners."""


class Shares:
    """What each owner holds of a room.

    An owner may hold as much as is free (Choudhury and Hahne 1998, "Dynamic queue length thresholds"): k owners that
    take all they can get leave one part in k + 1 to the others. One that is alone may have all of it.
    """

    def __init__(self) -> None:
        self._held: Tally[Owner] = Tally()

    def fits(self, owner: Owner, used: float, *, several: bool) -> bool:
        """Whether an owner may take more.

        Args:
            owner: Who.
            used: Part of the room that is taken, 0 to 1.
            several: Whether there are others, though they may hold nothing now.
        """
        total = self._held.total()
        if not total or not (several or len(self._held) > 1):
            return True
        free = max(1.0 - used, 0.0)
        of_user = sum(held for (user, _), held in self._held.items() if user == owner[0])
        return used * self._held[owner] / total <= free and used * of_user / total <= CONTAINERS * free

    def add(self, owner: Owner, number: int) -> None:
        """An owner holds so much more of the room."""
        self._held[owner] += number

    def remove(self, numbers: Mapping[Owner, int]) -> None:
        """Owners hold so much less."""
        for owner, number in numbers.items():
            self._held[owner] -= number
            if self._held[owner] <= 0:
                del self._held[owner]
