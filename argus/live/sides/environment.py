"""The environment of ranks: read when they are new, again once they have loaded their libraries, and at the end."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Hashable

import numpy as np

from argus.capture.host_environment import host_facts
from argus.capture.process.environment import read_facts
from argus.live.job import Job, Member
from argus.live.session import Session
from argus.live.side import Side
from argus.model.environment import COMMAND, UNREADABLE, bounded, digest
from argus.model.losses import Whom
from argus.system import redact
from argus.system.aside import Aside

AGAIN_S = (0.0, 10.0, 60.0)
"""When a process's environment is read, s after it was first seen: PyTorch loads its libraries in the first minute."""
AT_ONCE = 4
"""Processes that are read in one turn: each takes a millisecond or two."""
AT_THE_END = 32
"""Processes that are read once more when the trace ends, of those that were young a moment ago: first those that were
not read yet."""
NODE_S = 5.0
"""So long ranks wait for the facts of their node, which take some ms: a driver may not answer."""
_PLACE = re.compile(
    r"\s--?(?:local[-_]?rank|node[-_]?rank|machine[-_]?rank|rank|master[-_]?(?:addr|port)|rdzv[-_]?\w+)(?:=|\s+)\S+"
)
"""Options that say which rank a process is, or where others are: they differ between ranks, and between runs."""


class EnvironmentSide(Side):
    """Stores what each rank runs on and with.

    Args:
        session: The trace.
    """

    name = "environment"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._node: Aside[dict[str, str]] | None = None
        self._node_since = 0.0
        self._reads: dict[int, tuple[float, int, dict[str, str]]] = {}
        """Of live ranks, by PID: when they were first seen, how often they were read, what was found."""
        self._unread: dict[int, Job] = {}
        """Of live ranks that were never read, by PID."""
        self._turn = 0
        self._served: dict[Hashable, int] = {}
        """Users, containers and jobs: the last turn in which a rank of theirs was read."""

    def look(self, now: float) -> None:
        if self._node is None:
            # Beside the loop: cards and drivers answer when they like.
            self._node, self._node_since = Aside(host_facts, "environment"), now
        if not self._node.wait(0) and now < self._node_since + NODE_S:
            return
        live = {member.target.pid: (job, member) for job in self._session.jobs for member in self._alive(job)}
        self._reads = {pid: read for pid, read in self._reads.items() if pid in live}
        self._count_ended(live)
        due = []
        for pid, (job, member) in live.items():
            since, times, _ = self._reads.get(pid, (now, 0, {}))
            if times < len(AGAIN_S) and now >= since + AGAIN_S[times]:
                due.append((job, member))
        for job, member in self._in_turns(due, AT_ONCE):
            self._read(job, member, now)
        self._unread = {pid: job for pid, (job, _) in live.items() if pid not in self._reads}

    def _count_ended(self, live: Collection[int]) -> None:
        """Counts ranks that have ended before it was their turn."""
        for pid, job in self._unread.items():
            if pid not in live:
                self._session.losses.count("environments_over_share", Whom(job))

    def stop(self) -> None:
        """Reads processes that the trace leaves young: they may have loaded their libraries since."""
        if self._node is None:
            return
        self._count_ended({member.target.pid for job in self._session.jobs for member in self._alive(job)})
        young = [
            (job, member)
            for job in self._session.jobs
            for member in self._alive(job)
            if self._reads.get(member.target.pid, (0.0, 0, {}))[1] < len(AGAIN_S)
        ]
        new = [one for one in young if one[1].target.pid not in self._reads]
        seen = [one for one in young if one[1].target.pid in self._reads]
        chosen = self._in_turns(new, AT_THE_END)
        chosen += self._in_turns(seen, AT_THE_END - len(chosen))
        pids = {member.target.pid for _, member in chosen}
        for job, member in young:
            if member.target.pid in pids:
                self._read(job, member, 0.0)
        for job, member in new:
            if member.target.pid not in pids:
                self._session.losses.count("environments_over_share", Whom(job))

    def _in_turns(self, ranks: list[tuple[Job, Member]], most: int) -> list[tuple[Job, Member]]:
        """The first so many: users take turns, so do a user's containers, and jobs in one."""
        waiting: dict[int, deque[tuple[Job, Member]]] = {}
        for one in ranks:
            waiting.setdefault(id(one[0]), deque()).append(one)
        places = {id(job): (job.owner[0], job.owner, (job.name, job.run)) for job in self._session.jobs}
        there = {key for keys in places.values() for key in keys}
        self._served = {key: turn for key, turn in self._served.items() if key in there}
        chosen: list[tuple[Job, Member]] = []
        while waiting and len(chosen) < most:
            place = min(waiting, key=lambda one: [self._served.get(key, 0) for key in places[one]])
            chosen.append(waiting[place].popleft())
            if not waiting[place]:
                del waiting[place]
            self._turn += 1
            self._served |= dict.fromkeys(places[place], self._turn)
        return chosen

    @staticmethod
    def _alive(job: Job) -> list[Member]:
        return [] if job.over_since else [member for member in job.ranks() if member.state == "traced"]

    def _read(self, job: Job, member: Member, now: float) -> None:
        """Reads a process's facts, and stores them if they are new."""
        pid = member.target.pid
        since, times, before = self._reads.get(pid, (now, 0, {}))
        facts = self._facts(member)
        if facts is None and before:  # what was read before stays
            facts = before
        elif facts is None:
            facts = self._complete({UNREADABLE: "process"}, member)
        self._reads[pid] = since, times + 1, facts
        if facts != before:
            self._write(job, member, facts)

    def _facts(self, member: Member) -> dict[str, str] | None:
        """Facts of a process; None: they cannot be read."""
        try:
            return self._complete(read_facts(member.target.pid), member)
        except OSError:
            return None

    def _complete(self, own: dict[str, str], member: Member) -> dict[str, str]:
        """A process's facts with those of its node and its command."""
        answered = self._node is not None and self._node.wait(0)
        node = self._node.result() if self._node is not None and answered else {UNREADABLE: "node"}
        facts = {**node, **own}
        unreadable = [one[UNREADABLE] for one in (node, own) if UNREADABLE in one]
        if unreadable:
            facts[UNREADABLE] = ",".join(unreadable)
        left_out = self._session.options.redact
        if "paths" in left_out:
            facts = {name: redact.without_folders(value) for name, value in facts.items()}
        if command := _PLACE.sub("", redact.more(member.target.command, left_out)):
            facts[COMMAND] = command
        return bounded(facts)

    def _write(self, job: Job, member: Member, facts: dict[str, str]) -> None:
        session = self._session
        session.writer.append(
            "environments",
            {
                "job": job.name,
                "run": job.run,
                "rank": np.array([member.rank], np.uint32),
                "host": session.host,
                "pid": member.target.pid,
                "ts": np.array([session.now_ns()], np.int64),
                "facts": [facts],
                "digest": np.array([digest(facts)], np.uint64),
                "version": session.next_version(),
            },
        )
