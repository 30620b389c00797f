"""Stores which signals of each rank are observed (``signal_coverage``), as its sides have it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from argus.live.coverage import Rank, Seen, SignalCoverage
from argus.live.job import Job
from argus.live.session import Session
from argus.live.side import Side


class Signals:
    """What is observed, of all ranks.

    Args:
        session: The trace.

    Attributes:
        sides: Those that observe; the tracer sets them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._coverage = SignalCoverage()
        self.sides: Sequence[Side] = ()

    def store(self, since_ns: int | None = None, over: str = "") -> None:
        """Stores what has changed.

        Args:
            since_ns: When it changed, CLOCK_MONOTONIC; None: now.
            over: Why nothing is observed any more; empty: it is.
        """
        states: dict[Rank, dict[str, Seen]] = {}
        there = {}
        for job in self._session.jobs:
            for member in job.ranks():
                key = job.name, job.run, member.rank
                if over or member.state != "traced":
                    states |= self._coverage.end([key], over or "the process has ended")
                else:
                    there[key] = member
        observed = [side.observed(list(there.values())) for side in self.sides] if there else []
        for key, member in there.items():
            states[key] = {name: seen for each in observed for name, seen in each.get(member.target.pid, {}).items()}
        session = self._session
        now_ns = time.monotonic_ns() if since_ns is None else since_ns
        rows = self._coverage.update(states, now_ns + session.mono_offset_ns, session.host, session.next_version())
        if len(rows["rank"]):
            session.writer.append("signal_coverage", rows)

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        self._coverage.forget(job.name, job.run)
