"""How many libraries, and files of them, the processes of each user may have noted: each takes memory, and each file a
descriptor."""

from __future__ import annotations

import resource
import threading
import weakref
from collections import Counter as Tally
from collections import deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from argus.model.losses import Owner

FILES = 1 / 4
"""Of the descriptors that this process may have, those for files."""
MOST_FILES, MOST_LIBRARIES = 8192, 131_072
"""No more than that: a file takes 20 KiB, and a process's note that it maps one 1.5 KiB. Data loaders' workers map what
their rank does: 64 ranks with 16 workers each and 30 libraries have 32,000 notes."""
Key = TypeVar("Key", bound=Hashable)


class _Kept(Generic[Key]):
    """Objects that are counted for an owner as long as they live, the newest of each key."""

    def __init__(self) -> None:
        self._by_key: dict[Key, tuple[weakref.ref[Any], Owner, int]] = {}
        self._dead: deque[tuple[Key, weakref.ref[Any]]] = deque()
        """Their numbers are taken off by the next who asks: an object may end at any moment, in any thread."""
        self._of_owner: Tally[Owner] = Tally()
        self._of_user: Tally[int] = Tally()
        self._all = 0

    def settle(self) -> None:
        """Takes off what does not live any more."""
        while self._dead:
            key, of = self._dead.popleft()
            if key in self._by_key and self._by_key[key][0] is of:
                self.drop(key)

    def drop(self, key: Key) -> None:
        """Counts an object no longer."""
        _, owner, number = self._by_key.pop(key, (None, (-1, ""), 0))
        self._all -= number
        self._of_owner[owner] -= number
        self._of_user[owner[0]] -= number
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        if not self._of_user[owner[0]]:
            del self._of_user[owner[0]]

    def has(self, key: Key) -> bool:
        """Whether one of this key is counted."""
        return key in self._by_key

    def number(self, key: Key, owner: Owner) -> int:
        """For how many one of this key is counted, if it is of this owner."""
        _, of, number = self._by_key.get(key, (None, owner, 0))
        return number if of == owner else 0

    def keep(self, key: Key, thing: Any, owner: Owner, number: int) -> None:
        """Counts an object, for so many."""
        of = weakref.ref(thing, lambda of: self._dead.append((key, of)))
        self._by_key[key] = of, owner, number
        self._all += number
        self._of_owner[owner] += number
        self._of_user[owner[0]] += number

    def room(self, owner: Owner, most: int) -> int:
        """How many more an owner may have: as many as are left for others then, a user with several containers twice as
        many."""
        left = most - self._all
        return max(min((left - self._of_owner[owner]) // 2, (2 * left - self._of_user[owner[0]]) // 3), 0)


class LibraryRoom:
    """Bounds what is noted of what processes map. Any thread may ask."""

    def __init__(self) -> None:
        self._files = _Kept[Hashable]()
        self._libraries = _Kept[int]()
        self._lock = threading.Lock()

    def has_file(self, file: Any, owner: Owner) -> bool:
        """Whether a file may be kept: it is already, or its owner may have one more.

        Args:
            file: With a ``key``. It counts for the first of its owners as long as anybody refers to it.
            owner: User and container of a process that maps it.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            self._files.settle()
            if self._files.has(file.key):
                return True
            if self._files.room(owner, min(int(limit * FILES), MOST_FILES)) < 1:
                return False
            self._files.keep(file.key, file, owner, 1)
            return True

    def cut(self, pid: int, libraries: list[Any], owner: Owner) -> int:
        """Takes those from the list of a process's libraries that its owner has no room for. Returns how many. The list
        counts as long as it lives, or until the process has a newer one, which may have as many whatever others have
        noted since."""
        with self._lock:
            self._libraries.settle()
            had = self._libraries.number(pid, owner)
            self._libraries.drop(pid)
            over = max(len(libraries) - max(self._libraries.room(owner, MOST_LIBRARIES), had), 0)
            del libraries[len(libraries) - over :]
            self._libraries.keep(pid, libraries, owner, len(libraries))
            return over
