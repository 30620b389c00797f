"""The environment of ranks: read when they are new, and again once they have loaded their libraries."""

from __future__ import annotations

import numpy as np

from argus.capture.host_environment import host_facts
from argus.capture.process.environment import read_facts
from argus.live.job import Job, Member
from argus.live.session import Session
from argus.live.side import Side
from argus.model.environment import UNREADABLE, bounded, digest
from argus.system import redact

AGAIN_S = (0.0, 10.0, 60.0)
"""When a process's environment is read, s after it was first seen: PyTorch loads its libraries in the first minute."""
AT_ONCE = 4
"""Processes that are read in one turn: each takes a millisecond or two."""


class EnvironmentSide(Side):
    """Stores what each rank runs on and with.

    Args:
        session: The trace.
    """

    name = "environment"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._node: dict[str, str] | None = None
        self._reads: dict[int, tuple[float, int, dict[str, str]]] = {}
        """Of live ranks, by PID: when they were first seen, how often they were read, what was found."""

    def look(self, now: float) -> None:
        live = {member.target.pid: (job, member) for job in self._session.jobs for member in self._alive(job)}
        self._reads = {pid: read for pid, read in self._reads.items() if pid in live}
        left = AT_ONCE
        for pid, (job, member) in live.items():
            since, times, before = self._reads.get(pid, (now, 0, {}))
            if times == len(AGAIN_S) or now < since + AGAIN_S[times]:
                continue
            if left == 0:
                break
            left -= 1
            facts = self._facts(pid)
            self._reads[pid] = since, times + 1, facts
            if facts != before:
                self._write(job, member, facts)

    @staticmethod
    def _alive(job: Job) -> list[Member]:
        return [] if job.over_since else [member for member in job.ranks() if member.state == "traced"]

    def _facts(self, pid: int) -> dict[str, str]:
        if self._node is None:
            self._node = host_facts()
        try:
            own = read_facts(pid)
        except OSError:
            own = {UNREADABLE: "process"}
        facts = {**self._node, **own}
        if "paths" in self._session.options.redact:
            facts = {name: redact.without_folders(value) for name, value in facts.items()}
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
