"""A trace's session without a trace: for tests of single sides."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from argus.live.job import Job
from argus.live.options import Options
from argus.live.session import Session


def a_session(
    writer: Any = None, *, host: str = "h", offset_ns: int = 0, jobs: Sequence[Job] = (), **options: Any
) -> Any:
    """A session that writes to ``writer`` and traces ``jobs``; ``options``: of ``Options``."""
    session = Session(Options(**options), writer)
    session.host = host
    session.mono_offset_ns = session.first_offset_ns = offset_ns
    roster: Any = SimpleNamespace(jobs=list(jobs), attached=[], by_pid={}, candidates=list, live=list)
    session.roster = roster
    return session
