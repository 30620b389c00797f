"""What ranks have forked, from lists of the kernel (CONFIG_PROC_CHILDREN): each process is read once, and many over
several looks."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from argus.capture.process.targets import PROC, parent_of
from argus.live.job import Job
from argus.live.session import Session
from argus.model.losses import Owner, Whom
from argus.system.proc import read_file

MOST_READ = 8192
"""Lists that are read in one look, 10 to 20 µs each: a thread of a process has one. Owners have equal parts."""
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
        process, threads: What is being read: threads whose lists are left, the last first.
    """

    root: int
    queue: list[int]
    found_before: int = 0
    process: int = 0
    threads: list[int] = field(default_factory=list)

    @property
    def unread(self) -> bool:
        """Whether something is left to read."""
        return bool(self.threads or self.queue)


class Descendants:
    """Finds what ranks have forked. It takes an owner's time for look-ups, ``Session.look_ups``; what there is no time
    for in one look is read in the next ones. ``look_ups_over_share``: looks that an owner had no time for.

    Args:
        session: The trace.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._due = self._due_threads = self._all_threads = False
        self._branches: list[_Branch] = []
        """Ranks below which something is left to read."""
        self._seen: set[int] = set()
        """Processes that have been read. Ranks may be below one another, and nothing below them is read twice."""

    def search(self, *, all_threads: bool) -> None:
        """There are new ones. ``all_threads``: also of other threads than the main ones."""
        self._due = True
        self._due_threads |= all_threads

    def find(self, wanted: dict[int, Whose]) -> None:
        """Adds those that are found in this look.

        Args:
            wanted: Processes of all ranks, and whose they are. What is below several belongs to the first of them.
        """
        if self._due and not self._branches:
            self._branches = [_Branch(pid, [pid]) for pid in wanted]
            self._all_threads = self._due_threads
            self._due = self._due_threads = False
        if not self._branches:
            return
        ranks = dict(wanted)
        there = [(branch, ranks[branch.root]) for branch in self._branches if branch.root in ranks]
        owners = {job.owner for _, (job, _) in there}
        left = dict.fromkeys(owners, max(MOST_READ // max(len(owners), 1), AT_ONCE))
        for branch, whose in there:
            self._read(branch, whose, wanted, left)
            branch.found_before = len(branch.queue)
        self._branches = [branch for branch, _ in there if branch.unread]
        if not self._branches:
            self._seen = set()

    def _read(self, branch: _Branch, whose: Whose, wanted: dict[int, Whose], left: dict[Owner, int]) -> None:
        """Reads what is below a rank, while its owner may. ``left``: lists that each owner may read in this look."""
        owner, look_ups = whose[0].owner, self._session.look_ups
        while branch.unread and left[owner] > 0:
            if not look_ups.may(owner):
                left[owner] = 0
                self._session.losses.count("look_ups_over_share", Whom(whose[0]))
                return
            with look_ups.spending(owner):
                left[owner] -= self._read_some(branch, whose, wanted, min(AT_ONCE, left[owner]))

    def _read_some(self, branch: _Branch, whose: Whose, wanted: dict[int, Whose], most: int) -> int:
        """Reads so many lists. How many it was, those that took as long included."""
        read = 0
        while branch.unread and read < most:
            if not branch.threads:
                read += self._begin_next(branch)
                continue
            children = forked_by(branch.process, branch.threads.pop())
            for child in children:
                wanted.setdefault(child, whose)
            branch.queue += children
            read += 1 + len(children) // AS_ONE
        return read

    def _begin_next(self, branch: _Branch) -> int:
        """Lists the threads of the next process. What that took, in lists."""
        pid = branch.queue.pop()
        if pid in self._seen:
            return 0
        if len(branch.queue) < branch.found_before:
            branch.found_before = len(branch.queue)
            # It may have ended since, and another process may have its number.
            if pid != branch.root and parent_of(pid) not in self._seen:
                return 1
        self._seen.add(pid)
        branch.process = pid
        branch.threads = threads_of(pid, all_threads=self._all_threads)[::-1]
        return len(branch.threads) // AS_ONE


def threads_of(pid: int, *, all_threads: bool) -> list[int]:
    """TIDs of the threads of a process whose children are looked for; empty: it has ended.

    Args:
        pid: The process.
        all_threads: Also others than the main one.
    """
    if not all_threads:
        return [pid]
    try:
        return [int(tid) for tid in os.listdir(f"{PROC}/{pid}/task")]
    except OSError:
        return []


def forked_by(pid: int, tid: int) -> list[int]:
    """What a thread of a process has forked and that lives; empty where the kernel does not list it."""
    with contextlib.suppress(OSError):
        return [int(word) for word in read_file(f"{PROC}/{pid}/task/{tid}/children").split()]
    return []
