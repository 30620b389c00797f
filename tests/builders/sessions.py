"""A trace's session without a trace: for tests of single sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from argus.live.cost.admission import Admission
from argus.live.job import Job
from argus.live.options import Options
from argus.live.session import Session
from argus.model.losses import EVERYBODY, Whom
from argus.store.arrow import Values, to_arrow


class Rows:
    """A writer that keeps rows, and raises what the store's own does.

    Attributes:
        tables: Rows of each table as the store would have them, in order.
    """

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def append(self, table: str, rows: pa.Table | Mapping[str, Values]) -> int:
        """As ``argus.store.writer.Writer.append``."""
        converted = to_arrow(table, rows)
        self.tables.setdefault(table, []).extend(converted.to_pylist())
        return int(converted.num_rows)

    def __getitem__(self, table: str) -> list[dict[str, Any]]:
        return self.tables.get(table, [])


def a_session(
    writer: Any = None, *, host: str = "h", offset_ns: int = 0, jobs: Sequence[Job] = (), **options: Any
) -> Any:
    """A session that writes to ``writer`` and traces ``jobs``; ``options``: of ``Options``."""
    session = Session(Options(**options), writer)
    session.host = host
    session.mono_offset_ns = session.first_offset_ns = offset_ns
    roster: Any = SimpleNamespace(
        jobs=list(jobs), attached=[], by_pid={}, candidates=list, live=list, own_losses=lambda job: {}
    )
    roster.whom = lambda pid: Whom(roster.by_pid[pid][0]) if pid in roster.by_pid else EVERYBODY
    roster.admission = Admission(session.losses)
    session.roster = roster
    return session
