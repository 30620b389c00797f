"""Room for the names of all processes whose GPU times are recorded: who may keep how much."""

from __future__ import annotations

from collections import Counter

from argus.capture.kernel_books import Texts
from argus.model.losses import Owner
from argus.system.proc import owner_of

OF_PART, OF_ALL = 48 << 20, 192 << 20
"""Bytes of the names of a process and the pointers to them, as though it had no siblings; of what they are called when
demangled; and of all, where texts of an owner count once. A rank has 2 to 5 MB."""
SPARE, LITTLE_OF_USER = 56 << 20, 40 << 20
"""What is left for users who hold little, and how much that is. 16 ranks with 3,000 kernels hold 26 MB."""
LITTLE = 8 << 20
"""What is left beside it for other containers of a user, and how much of a container is little."""
NAME_BYTES, POINTER_BYTES = 250, 200
"""What a name takes besides its text, in the collector and in the tables; what a pointer to one takes."""


class NamesRoom:
    """The room. Who is alone may have all but what is spare; where there are several, each may have as much as is left
    (as ``argus.model.shares``), and who comes later has some in any case. Users first, then the containers of each."""

    def __init__(self) -> None:
        self.held: Counter[Owner] = Counter()
        self.users: Counter[int] = Counter()
        self.texts: dict[Owner, Texts] = {}
        self.total = 0

    def change(self, owner: Owner, nbytes: int) -> None:
        """An owner holds so much more, or less."""
        self.held[owner] += nbytes
        self.users[owner[0]] += nbytes
        self.total += nbytes
        if self.held[owner] <= 0:
            del self.held[owner]
            self.texts.pop(owner, None)
        if self.users[owner[0]] <= 0:
            del self.users[owner[0]]

    def has(self, owner: Owner, nbytes: int) -> bool:
        """Whether an owner may hold so much more."""
        own, of_user = self.held[owner] + nbytes, self.users[owner[0]] + nbytes
        left = OF_ALL - self.total - nbytes
        if left < 0:
            return False
        others = self.total + nbytes > of_user
        if others and of_user > left:
            return False
        if of_user <= LITTLE_OF_USER:
            return True
        if own <= LITTLE:
            return left >= SPARE
        return left >= SPARE + LITTLE and (of_user == own or own <= left)

    def hold(self, owner: Owner, text: str) -> str | None:
        """One more of an owner's processes has this text: the one that is kept; None: there is no room for it."""
        texts = self.texts.get(owner)
        if texts is None or text not in texts:
            if not self.has(owner, Texts.size_of(text)):
                return None
            texts = self.texts.setdefault(owner, Texts())
            self.change(owner, Texts.size_of(text))
        kept: str = texts.hold(text).text
        return kept

    def drop(self, owner: Owner, text: str) -> None:
        """One less has it."""
        texts = self.texts[owner]
        before = texts.nbytes
        texts.drop(text)
        if texts.nbytes < before:
            self.change(owner, texts.nbytes - before)


shared = NamesRoom()
"""The one of this process."""


class Part:
    """What one process holds of one kind, until nobody has this any more.

    Args:
        pid: The process.
        owner: Whose it is; None: it is asked when the process first holds something.
        room: Of what.
    """

    def __init__(self, pid: int, owner: Owner | None = None, room: NamesRoom | None = None) -> None:
        self._pid = pid
        self._owner = owner
        self._room = shared if room is None else room
        self._texts: list[str] = []
        self._more = 0
        self.names = self.pointers = 0
        """Bytes."""

    @property
    def _whose(self) -> Owner:
        if self._owner is None:
            self._owner = owner_of(self._pid)
        return self._owner

    def take(self, text: str, more: int = 0) -> str | None:
        """Takes room for a name, and for so many bytes besides, for good. Returns the owner's text; None: there is no
        room."""
        size = Texts.size_of(text) + more
        if self.names + self.pointers + size > OF_PART or not self._room.has(self._whose, more):
            return None
        self._room.change(self._whose, more)
        kept = self._room.hold(self._whose, text)
        if kept is None:
            self._room.change(self._whose, -more)
            return None
        self._texts.append(kept)
        self._more += more
        self.names += size
        return kept

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
        if self._owner is None:
            return
        for text in self._texts:
            self._room.drop(self._owner, text)
        self._room.change(self._owner, -self._more - self.pointers)
