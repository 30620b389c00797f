"""Room for the names of all processes whose GPU times are recorded: who may keep how much."""

from __future__ import annotations

from collections import Counter

from argus.model.losses import Owner
from argus.system.proc import owner_of

OF_PART, OF_ALL = 48 << 20, 192 << 20
"""Bytes of the names of a process and the pointers to them; of what they are called when demangled; and of all. A rank
has 2 to 5 MB."""
NAME_BYTES, POINTER_BYTES = 250, 200
"""What a name takes besides its text, in the collector and in the tables; what a pointer to one takes."""


class NamesRoom:
    """The room. An owner may hold as much as is left: one alone half of it, two a third each. Who comes later has some
    in any case."""

    def __init__(self) -> None:
        self.held: Counter[Owner] = Counter()
        self.total = 0

    def change(self, owner: Owner, nbytes: int) -> None:
        """An owner holds so much more, or less."""
        self.held[owner] += nbytes
        self.total += nbytes
        if self.held[owner] <= 0:
            del self.held[owner]

    def has(self, owner: Owner, nbytes: int) -> bool:
        """Whether an owner may hold so much more."""
        return self.held[owner] + nbytes <= OF_ALL - self.total - nbytes


shared = NamesRoom()
"""The one of this process."""


class Part:
    """What one process holds of one kind, until nobody has this any more.

    Args:
        pid: The process.
        room: Of what.
    """

    def __init__(self, pid: int, room: NamesRoom | None = None) -> None:
        self._pid = pid
        self._room = shared if room is None else room
        self._owner: Owner | None = None
        self.names = self.pointers = 0
        """Bytes."""

    @property
    def _whose(self) -> Owner:
        if self._owner is None:
            self._owner = owner_of(self._pid)
        return self._owner

    def take(self, nbytes: int) -> bool:
        """Takes room for a name, for good; False: there is none."""
        if self.names + self.pointers + nbytes > OF_PART or not self._room.has(self._whose, nbytes):
            return False
        self.names += nbytes
        self._room.change(self._whose, nbytes)
        return True

    def hold(self, pointers: int) -> bool:
        """Holds room for so many pointers in all; False: there is none, and it holds for none."""
        nbytes = pointers * POINTER_BYTES
        more = nbytes - self.pointers
        if more > 0 and (self.names + nbytes > OF_PART or not self._room.has(self._whose, more)):
            more, nbytes = -self.pointers, 0
        self._room.change(self._whose, more)
        self.pointers = nbytes
        return nbytes > 0 or not pointers

    def __del__(self) -> None:
        if self._owner is not None:
            self._room.change(self._owner, -self.names - self.pointers)
