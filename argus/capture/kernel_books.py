"""What is kept of the names of kernels: by process, of each owner a text once, and within bounds."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

from argus.model.losses import Owner

KEPT_HANDLES = 1 << 17
"""Kernels of a process whose names are known, at most. `import torch` registers 40,000; a program that makes kernels as
it runs never stops making others. Beyond it a half goes: first those that were never launched, then those that were
launched longest ago."""
OF_PROCESS, OF_ALL = 64 << 20, 256 << 20
"""Bytes of the names of a process's kernels, as though it had no siblings, and of all; beyond them a quarter goes at
least, of the user who has most first. `import torch` brings 14 to 24 MB, of which 4 to 8 are each rank's own."""
_ENTRY, _UNREAD, _TEXT = 100, 100, 200
"""Bytes that a kernel takes besides its name; more of one whose name is still to be read; and what a text takes besides
itself, once for its owner."""
_NEWEST = 8
"""One part in so many of what is kept is for the newest names that were not launched yet: a program that makes a kernel
launches it at once."""


class Text:
    """A text of an owner.

    Attributes:
        text: The one that is kept.
        size: What it takes, bytes.
        times: How many have it.
    """

    __slots__ = ("size", "text", "times")

    def __init__(self, text: Any) -> None:
        self.text = text
        self.size = Texts.size_of(text)
        self.times = 0


class Texts:
    """The texts of one owner: each once, however many of its processes have it.

    Attributes:
        known: Of each what is known.
        nbytes: What they take.
    """

    def __init__(self) -> None:
        self.known: dict[str | bytes, Text] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, text: str | bytes) -> bool:
        return text in self.known

    @staticmethod
    def size_of(text: str | bytes) -> int:
        """What a text takes."""
        return sys.getsizeof(text) + _TEXT

    def hold(self, text: str | bytes) -> Text:
        """One more has this text."""
        known = self.known.get(text)
        if known is None:
            known = self.known[text] = Text(text)
            self.nbytes += known.size
        known.times += 1
        return known

    def drop(self, text: str | bytes) -> Text:
        """One less has it."""
        known = self.known[text]
        known.times -= 1
        if not known.times:
            del self.known[text]
            self.nbytes -= known.size
        return known

    def compact(self) -> None:
        """Gives room back that texts took which are dropped: a dict never shrinks by itself."""
        self.known = {**self.known}


class _Owned:
    """What an owner's processes have."""

    def __init__(self) -> None:
        self.texts = Texts()
        self.entries = 0
        """Bytes of what each process has for itself."""
        self.pids: set[int] = set()

    @property
    def nbytes(self) -> int:
        return self.texts.nbytes + self.entries


class Book:
    """The names of one process's kernels, by handle: a text, or a tuple that begins with one.

    Attributes:
        learned: Of kernels that were never launched, in the order in which they were learned.
        launched: Of the others, in the order of their last launches.
        nbytes: What they would take if the owner had no other process.
    """

    def __init__(self, owner: Owner, owned: _Owned) -> None:
        self.owner, self.owned = owner, owned
        self.learned: dict[int, Any] = {}
        self.launched: dict[int, str] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.learned) + len(self.launched)

    def get(self, handle: int) -> Any:
        """What is known of a kernel; None: nothing."""
        name = self.launched.get(handle)
        return self.learned.get(handle) if name is None else name

    def launch(self, handle: int) -> str | None:
        """The name of a kernel that is launched now; None: it has to be found out."""
        name = self.launched.pop(handle, None)
        if name is None and isinstance(self.learned.get(handle), str):
            name = self.learned.pop(handle)
        if name is not None:
            self.launched[handle] = name
        return name


class Books:
    """The books of all processes.

    Args:
        owner_of: A process's owner: asked when something is first learned of it.

    Attributes:
        total: Bytes of all.
    """

    def __init__(self, owner_of: Callable[[int], Owner]) -> None:
        self._owner_of = owner_of
        self.of_pid: dict[int, Book] = {}
        self._of_owner: dict[Owner, _Owned] = {}
        self.total = 0

    def of(self, pid: int) -> Book:
        """A process's."""
        book = self.of_pid.get(pid)
        if book is None:
            owner = self._owner_of(pid)
            book = self.of_pid[pid] = Book(owner, self._of_owner.setdefault(owner, _Owned()))
            book.owned.pids.add(pid)
        return book

    def learn(self, book: Book, handle: int, name: Any) -> None:
        """A kernel is called so, whatever it was called before. There need not be room yet (``make_room``)."""
        learned = book.learned
        if handle in learned or handle in book.launched:
            if (before := learned.pop(handle, None)) is not None and before == name:
                learned[handle] = before  # the newest
                return
            if before is not None:
                self._enter(book, before, -1)
            else:
                self._forget_one(book, handle)
        # As ``_enter``, of which an import has tens of thousands.
        owned, later = book.owned, type(name) is tuple
        texts, text = owned.texts, name[0] if later else name
        size = _ENTRY + _UNREAD if later else _ENTRY
        held = texts.known.get(text)
        if held is None:
            self.total -= texts.nbytes
            held = texts.hold(text)
            self.total += texts.nbytes
        else:
            held.times += 1
        owned.entries += size
        book.nbytes += size + held.size
        self.total += size
        learned[handle] = (held.text, *name[1:]) if later else held.text

    def launch(self, book: Book, handle: int, name: str) -> None:
        """A kernel is launched, and this is what it is called."""
        if handle in book.learned or handle in book.launched:
            self._forget_one(book, handle)
        book.launched[handle] = self._enter(book, name, 1)

    def _forget_one(self, book: Book, handle: int) -> None:
        for names in (book.launched, book.learned):
            if (known := names.pop(handle, None)) is not None:
                self._enter(book, known, -1)

    def _enter(self, book: Book, name: Any, number: int) -> Any:
        """One entry more, or less. Returns it, with the owner's own text."""
        owned = book.owned
        before = owned.texts.nbytes
        later = isinstance(name, tuple)
        text = name[0] if later else name
        held = owned.texts.hold(text) if number > 0 else owned.texts.drop(text)
        size = number * (_ENTRY + _UNREAD * later)
        owned.entries += size
        book.nbytes += size + number * held.size
        self.total += size + owned.texts.nbytes - before
        return (held.text, *name[1:]) if later else held.text

    def forget(self, pid: int) -> None:
        """A process has ended, or replaced its program."""
        book = self.of_pid.pop(pid, None)
        if book is None:
            return
        owned = self._of_owner[book.owner]
        owned.pids.discard(pid)
        if owned.pids:
            self._keep(book, 0, 0)
        else:
            self.total -= owned.nbytes
            del self._of_owner[book.owner]

    def make_room(self, pid: int) -> None:
        """Forgets names, once a process or all have too many."""
        book = self.of(pid)
        if len(book) > KEPT_HANDLES:
            self._halve(book, KEPT_HANDLES // 2)
        if book.nbytes > OF_PROCESS:
            while book.nbytes > OF_PROCESS * 3 // 4:
                self._halve(book, len(book) // 2)
        if self.total > OF_ALL:
            self._share()

    def _share(self) -> None:
        """Makes room for all, until a quarter of it is free: of the user who has most, and of its containers, half of a
        book goes. Of a container's books first all names go that were never launched."""
        of_user: dict[int, list[tuple[int, Owner]]] = {}
        of_owner: dict[Owner, list[tuple[int, int, int]]] = {}
        for owner, owned in self._of_owner.items():
            if owned.nbytes:
                of_user.setdefault(owner[0], []).append((-owned.nbytes, owner))
            books = ((self.of_pid[pid], pid) for pid in owned.pids)
            of_owner[owner] = [(-len(book.learned), -book.nbytes, pid) for book, pid in books if len(book)]
            heapq.heapify(of_owner[owner])
        users = [(sum(each for each, _ in owners), user) for user, owners in of_user.items()]
        heapq.heapify(users)
        for owners in of_user.values():
            heapq.heapify(owners)
        touched = set()
        while self.total > OF_ALL * 3 // 4 and users:
            held, user = heapq.heappop(users)
            before, owner = heapq.heappop(of_user[user])
            owned = self._of_owner[owner]
            *_, pid = heapq.heappop(of_owner[owner])
            book = self.of_pid[pid]
            if book.learned:
                self._keep(book, len(book.learned) // 2, len(book.launched))
            else:
                self._keep(book, 0, len(book.launched) // 2)
            touched.add(owner)
            if len(book):
                heapq.heappush(of_owner[owner], (-len(book.learned), -book.nbytes, pid))
            if of_owner[owner]:
                heapq.heappush(of_user[user], (-owned.nbytes, owner))
            if of_user[user]:
                heapq.heappush(users, (held - before - owned.nbytes, user))
        for owner in touched:
            self._of_owner[owner].texts.compact()

    def _halve(self, book: Book, number: int) -> None:
        """Keeps so many names of a process: those that were launched, the newest ones of the others."""
        newest = min(len(book.learned), number // _NEWEST)
        launched = min(len(book.launched), number - newest)
        self._keep(book, min(len(book.learned), number - launched), launched)

    def _keep(self, book: Book, learned: int, launched: int) -> None:
        """Keeps so many names of kernels that were never launched, and of others: the newest."""
        for names, number in ((book.learned, learned), (book.launched, launched)):
            for name in islice(names.values(), len(names) - number):
                self._enter(book, name, -1)
        book.learned = dict(islice(book.learned.items(), len(book.learned) - learned, None))
        book.launched = dict(islice(book.launched.items(), len(book.launched) - launched, None))
