"""What ranks have forked, from lists of the kernel (CONFIG_PROC_CHILDREN): each process is read once, and many over
several looks."""

from __future__ import annotations

import contextlib
import os
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from argus.capture.process.targets import PROC, parent_of
from argus.live.job import Job
from argus.live.session import Session
from argus.model.losses import Owner, Whom
from argus.model.shares import CONTAINERS

MOST_READ = 8192
"""Lists that are read in one look, 10 to 20 µs each: a thread of a process has one. Owners have equal parts, a user in
many containers those of ``CONTAINERS`` owners."""
AT_ONCE = 64
"""Lists of an owner that are read before it is seen whether it has time left."""
AS_ONE = 32
"""Entries of a list, or of a folder, that cost about as much as to open it."""
Whose = tuple[Job, int]


@dataclass
class _Branch:
    """What is below one rank.

    Attributes:
        root: Its process.
        queue: Processes to be read, the last first.
        found_before: So many of them were found in an earlier look.
        process, threads, listed: What is being read: threads whose lists are left, and how many were taken.
        children: What is left of the list of the last of them.
    """

    root: int
    queue: list[int]
    found_before: int = 0
    process: int = 0
    threads: Iterator[int] | None = None
    listed: int = 0
    children: Iterator[int] | None = None

    @property
    def unread(self) -> bool:
        """Whether something may be left to read."""
        return bool(self.children or self.threads or self.queue)


class _Search:
    """What one owner's ranks have forked, while something is left to read.

    Args:
        owner: Whose ranks.

    Attributes:
        due: Whether it begins anew when nothing is left to read.
        due_threads: The same, whether other threads than the main ones are read then.
        branches: Ranks below which something is left to read. At most the first of those has lists open.
        seen: Processes that have been read. Ranks may be below one another, and nothing below them is read twice.
    """

    def __init__(self, owner: Owner) -> None:
        self.due = self.due_threads = self._all_threads = False
        self.branches: list[_Branch] = []
        self.seen: set[int] = set()
        self._owner = owner

    @property
    def unread(self) -> bool:
        """Whether something is left to do, now or later."""
        return self.due or bool(self.branches)

    def go_on(self, roots: list[int], ranks: Mapping[int, Whose]) -> None:
        """Forgets what is below ranks that are gone, and begins anew if that is due and nothing else is left.

        Args:
            roots: Processes of the owner's ranks.
            ranks: Those of all owners, and whose they are.
        """
        self.branches = [branch for branch in self.branches if branch.root in ranks]
        if self.due and not self.branches:
            self.branches = [_Branch(pid, [pid]) for pid in roots]
            self.seen = set()
            self._all_threads = self.due_threads
            self.due = self.due_threads = False

    def jobs(self, ranks: Mapping[int, Whose]) -> Iterable[Job]:
        """Jobs below whose ranks something is left to read."""
        return {id(job): job for job, _ in (ranks[branch.root] for branch in self.branches if branch.unread)}.values()

    def end_look(self) -> None:
        """Forgets ranks below which nothing is left."""
        self.branches = [branch for branch in self.branches if branch.unread]
        for branch in self.branches:
            branch.found_before = len(branch.queue)

    def read_some(self, branch: _Branch, ranks: Mapping[int, Whose], wanted: dict[int, Whose], most: int) -> int:
        """Reads so many lists. How many it was, those that took as long included."""
        read, whose = 0, ranks[branch.root]
        while branch.unread and read < most:
            if branch.children is None:
                read += self._open_next(branch, ranks)
                continue
            asked = AS_ONE * (most - read)
            children = list(islice(branch.children, asked))
            if len(children) < asked:
                branch.children = None
            for child in children:
                wanted.setdefault(child, whose)
            branch.queue += children
            read += 1 + len(children) // AS_ONE
        return read

    def _open_next(self, branch: _Branch, ranks: Mapping[int, Whose]) -> int:
        """Goes on to the list of the next thread, or to the next process. What that took, in lists."""
        if branch.threads is None:
            return self._begin_next(branch, ranks)
        tid = next(branch.threads, None)
        if tid is None:
            branch.threads = None
            return int(not branch.listed)
        branch.listed += 1
        branch.children = iter(forked_by(branch.process, tid))
        return int(branch.listed % AS_ONE == 0)

    def _begin_next(self, branch: _Branch, ranks: Mapping[int, Whose]) -> int:
        """Goes on to the threads of the next process. What that took, in lists."""
        pid = branch.queue.pop()
        if pid in self.seen or (pid in ranks and ranks[pid][0].owner != self._owner):
            return 0  # what is below another owner's rank is found for that owner
        if len(branch.queue) < branch.found_before:
            branch.found_before = len(branch.queue)
            # It may have ended since, and another process may have its number.
            if pid != branch.root and parent_of(pid) not in self.seen:
                return 1
        self.seen.add(pid)
        branch.process, branch.listed = pid, 0
        branch.threads = iter(threads_of(pid, all_threads=self._all_threads))
        return 0


class Descendants:
    """Finds what ranks have forked. It takes an owner's time for look-ups, ``Session.look_ups``; what there is no time
    for in one look is read in the next ones, and another owner's search does not wait for it. ``look_ups_over_share``:
    looks that an owner had no time or no part for.

    Args:
        session: The trace.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._due = self._due_threads = False
        self._searches: dict[Owner, _Search] = {}
        """Those with something left to do, the one first that has waited for longest."""

    def search(self, *, all_threads: bool) -> None:
        """There are new ones. ``all_threads``: also of other threads than the main ones."""
        self._due = True
        self._due_threads |= all_threads

    def find(self, wanted: dict[int, Whose]) -> None:
        """Adds those that are found in this look.

        Args:
            wanted: Processes of all ranks, and whose they are. What is below several of an owner belongs to the first
                of them; what is below ranks of several owners, to the owner of the nearest.
        """
        if not (self._due or self._searches):
            return
        ranks = dict(wanted)
        self._begin(ranks)
        containers = Tally(user for user, _ in self._searches)
        part = MOST_READ / max(sum(min(number, CONTAINERS) for number in containers.values()), 1)
        of_users = {user: max(int(part * min(number, CONTAINERS)), AT_ONCE) for user, number in containers.items()}
        of_all = MOST_READ
        for owner, search in list(self._searches.items()):
            user, _ = owner
            of_owner = max(int(part * min(1.0, CONTAINERS / containers[user])), AT_ONCE)
            most = min(of_owner, of_users[user], of_all)
            read = self._read(owner, search, ranks, wanted, most)
            of_users[user] -= read
            of_all -= read
            search.end_look()
            if most > 0:
                del self._searches[owner]
                if search.unread:
                    self._searches[owner] = search

    def _begin(self, ranks: Mapping[int, Whose]) -> None:
        """Begins searches that are due, and forgets owners without ranks."""
        roots: dict[Owner, list[int]] = {}
        for pid, (job, _) in ranks.items():
            roots.setdefault(job.owner, []).append(pid)
        if self._due:
            for owner in roots:
                search = self._searches.setdefault(owner, _Search(owner))
                search.due = True
                search.due_threads |= self._due_threads
            self._due = self._due_threads = False
        for owner, search in list(self._searches.items()):
            search.go_on(roots.get(owner, []), ranks)
            if not search.branches:
                del self._searches[owner]

    def _read(
        self, owner: Owner, search: _Search, ranks: Mapping[int, Whose], wanted: dict[int, Whose], most: int
    ) -> int:
        """Reads what is below an owner's ranks, while it may. How many lists it was.

        Args:
            most: So many; not above 0: others have taken what can be read in this look.
        """
        read, look_ups = 0, self._session.look_ups
        for branch in search.branches:
            while branch.unread:
                if most <= 0 or not look_ups.may(owner):
                    self._session.losses.count("look_ups_over_share", *map(Whom, search.jobs(ranks)))
                    return read
                with look_ups.spending(owner):
                    read += search.read_some(branch, ranks, wanted, min(AT_ONCE, most - read))
                if read >= most:
                    return read
        return read


def threads_of(pid: int, *, all_threads: bool) -> Iterator[int]:
    """TIDs of the threads of a process whose children are looked for; none: it has ended. They are listed as they are
    asked for, and a folder is open until then or until the iterator goes.

    Args:
        pid: The process.
        all_threads: Also others than the main one.
    """
    if not all_threads:
        yield pid
        return
    with contextlib.suppress(OSError), os.scandir(f"{PROC}/{pid}/task") as threads:
        for thread in threads:
            yield int(thread.name)


def forked_by(pid: int, tid: int) -> Iterator[int]:
    """What a thread of a process has forked and that lives; none where the kernel does not list it. It is read as it is
    asked for, a page at a time, and the file is open until then or until the iterator goes."""
    try:
        fd = os.open(f"{PROC}/{pid}/task/{tid}/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        begun = b""
        while part := os.read(fd, 1 << 14):
            *whole, begun = (begun + part).split(b" ")
            yield from map(int, whole)
        if begun:
            yield int(begun)
    except OSError:
        return  # the process has ended
    finally:
        os.close(fd)
