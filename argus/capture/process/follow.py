"""Which processes are let through to the rings: those the user named and, when followed, everything they fork."""

from __future__ import annotations

import errno
import os
import select
from collections import deque

from argus.capture.probes import Probes
from argus.capture.process.forks import ForkWatcher
from argus.capture.process.targets import descendants, start_ticks
from argus.system.proc import owner_of

_SCANS, _SCAN_EVERY = 10, 10
"""While the kernel reports forks at once, /proc is searched for others in the first looks, and in every tenth later:
it takes 10 µs for each process of the machine."""


class Family:
    """Processes whose calls are recorded.

    The kernel lets a child of a traced process through before it runs, where it can (``Probes.follow_forks``). A thread
    of its own notices the fork within about a millisecond, and lets the child through where the kernel has not. That
    thread only adds to ``_pids`` and ``_new`` (both safe to share: it never iterates, the other side copies);
    everything else belongs to the thread that calls ``refresh``.

    Args:
        probes: Where processes are let through.
        follow: Whether children join.
    """

    def __init__(self, probes: Probes, *, follow: bool) -> None:
        self._probes = probes
        self._follow = follow
        self._pids: set[int] = set()
        self._new: deque[int] = deque()
        self._ends = select.epoll()
        self._pidfds: dict[int, int] = {}
        self._pid_of: dict[int, int] = {}
        """By the descriptor by which ``_ends`` reports that the process has ended."""
        self._ended: set[int] = set()
        self._started: dict[int, int | None] = {}
        """When processes started that there was no descriptor for."""
        self._looks = self._missed = 0
        self.missed_calls = 0
        """Calls of followed processes before they were let through."""
        self.failures = 0
        """Processes that could not be let through (the kernel's map is full)."""
        self._losses: deque[tuple[str, int, int]] = deque()
        self._parents: dict[int, int] = {}
        """Of processes whose fork was reported: they may have ended before anybody looks at them."""
        if follow:
            probes.follow_forks()
        self._watcher = ForkWatcher(self._forked) if follow else None

    @property
    def state(self) -> str:
        """Whether forks are followed at once: on, or off and why."""
        return "on" if self._watcher is None else self._watcher.state

    @property
    def missed_events(self) -> int:
        """Times the kernel dropped fork events."""
        return 0 if self._watcher is None else self._watcher.missed

    def __contains__(self, pid: int) -> bool:
        return pid in self._pids

    def includes(self, pid: int) -> bool:
        """Whether calls of a process are recorded: also of a child that only the kernel has noticed yet."""
        if pid not in self._pids and self._follow and self._probes.forks == "on" and self._probes.is_target(pid):
            self._pids.add(pid)
            self._note(pid)
        return pid in self._pids

    def admit(self, pids: list[int]) -> None:
        """Lets processes through, nearly at the same moment. What they did before belongs to the time before."""
        for pid in pids:
            self._pids.add(pid)
            self._probes.add_target(pid, owner_of(pid))
            self._note(pid)

    def _forked(self, parent: int, child: int) -> None:
        if parent in self._pids and child not in self._pids:
            self._parents[child] = parent
            self._pids.add(child)
            self._join(child)
            self._new.append(child)

    def _join(self, pid: int) -> None:
        try:
            missed = self._probes.add_target(pid, owner_of(pid))
        except Exception:  # bcc raises nothing narrower when the kernel's map is full
            self.failures += 1
            self._losses.append(("follow_failed", pid, 1))
            return
        if missed:
            self.missed_calls += missed
            self._losses.append(("calls_before_follow", pid, missed))

    def take_losses(self) -> list[tuple[str, int, int]]:
        """Of ``missed_calls`` and ``failures`` what came since the last call: counter, process, how many."""
        return [self._losses.popleft() for _ in range(len(self._losses))]

    def parent(self, pid: int) -> int:
        """Who forked a process that was let through; 0: not known. Also after it has ended, until ``dismiss``."""
        return self._parents.get(pid, 0)

    def _note(self, pid: int) -> None:
        if pid in self._pidfds or pid in self._started or pid in self._ended:
            return
        try:
            pidfd = os.pidfd_open(pid)
            self._ends.register(pidfd, select.EPOLLIN)
        except OSError as reason:
            if reason.errno == errno.ESRCH or (started := start_ticks(pid)) is None:
                self._ended.add(pid)
            else:
                self._started[pid] = started  # there are no descriptors left
            return
        self._pidfds[pid], self._pid_of[pidfd] = pidfd, pid

    def new(self) -> list[int]:
        """Processes that were forked since the last call."""
        forked = []
        while self._new:
            pid = self._new.popleft()
            self._note(pid)
            forked.append(pid)
        return forked

    def refresh(self) -> tuple[list[int], list[int]]:
        """Reads /proc, for what the kernel did not report.

        Returns:
            Processes that joined, and processes that ended, since the last call. Those that ended are still let through
            (their last records may be in the rings): ``dismiss`` them when they have been read.
        """
        joined = self.new()
        if self._follow and self._searches():
            for pid in descendants(list(self._pids)):
                if pid not in self._pids and pid != os.getpid():
                    self._pids.add(pid)
                    self._join(pid)
                    self._note(pid)
                    joined.append(pid)
            # Of these the kernel reported no fork: its messages were dropped.
            for pid in self._probes.target_pids() if self._probes.forks == "on" else ():
                if pid not in self._pids:
                    self._pids.add(pid)
                    self._note(pid)
                    joined.append(pid)
        # Not over ``_pids``: the thread may have added one that nobody has noted yet.
        for pidfd, _ in self._ends.poll(0):
            self._ended.add(self._pid_of[pidfd])
            self._let_go(self._pid_of[pidfd])
        return joined, [*self._ended, *(pid for pid, started in self._started.items() if start_ticks(pid) != started)]

    def _searches(self) -> bool:
        """Whether /proc is searched for processes below those that are let through."""
        self._looks += 1
        missed, self._missed = self._missed, self.missed_events
        return self.state != "on" or self._missed > missed or self._looks <= _SCANS or self._looks % _SCAN_EVERY == 0

    def _let_go(self, pid: int) -> None:
        if (pidfd := self._pidfds.pop(pid, -1)) >= 0:
            del self._pid_of[pidfd]
            os.close(pidfd)  # which takes it out of ``_ends``

    def dismiss(self, pid: int) -> None:
        """Lets a process that ended through no more: its PID may be another's soon."""
        self._pids.discard(pid)
        self._parents.pop(pid, None)
        self._started.pop(pid, None)
        self._ended.discard(pid)
        self._let_go(pid)
        self._probes.remove_target(pid)

    def close(self) -> None:
        """Stops following. Who ended is reported all the same."""
        if self._watcher is not None:
            self._watcher.close()

    def let_go(self) -> None:
        """Lets go of every process. Nothing may be asked afterwards."""
        self.close()
        for pid in list(self._pidfds):
            self._let_go(pid)
        self._ends.close()
