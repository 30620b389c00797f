"""Rows about the trace itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from argus.live import session_rows
from argus.live.session_rows import SessionRows
from tests.builders.sessions import a_session


def test_ranks_that_come_and_go_all_the_time_are_stored_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing them takes half a second here."""
    now = 100.0
    written: list[float] = []

    def write_ranks(self: SessionRows) -> None:
        nonlocal now
        written.append(now)
        self._ranks_changed = False
        now += 0.5

    clock: Any = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(session_rows, "time", clock)
    monkeypatch.setattr(SessionRows, "write_ranks", write_ranks)
    rows = SessionRows(a_session())
    begun = now
    for _ in range(100):
        rows.ranks_changed(now)
        now += 0.25
    took = now - begun
    assert written[0] == begun, "the first at once"
    assert 0.5 * len(written) <= took / 20 + 0.5, "a twentieth of the time"
    now += 20
    rows.store_changed(now)
    last = len(written)
    now += 20
    rows.store_changed(now)
    assert len(written) == last, "nothing has changed since"


def test_files_whose_instructions_are_not_read_are_a_loss_of_each_who_maps_them() -> None:
    session: Any = a_session()
    members = [
        SimpleNamespace(
            **dict.fromkeys(("refused", "over_share", "without_slot", "without_code"), 0),
            calls_over_share=(0, 0, 0),
            ignored="",
        )
        for _ in range(2)
    ]
    lacks: list[Any] = [SimpleNamespace(lacks_slot=False, lacks_code=each) for each in (True, False)]
    session.count_left_out = lambda: None
    session.probes = SimpleNamespace(spent_of_all=dict, over_share=lambda pid: (0, 0, 0))
    session.roster = SimpleNamespace(
        by_pid={pid: (None, member) for pid, member in enumerate(members)}, attachments_of=lambda member: lacks
    )
    rows = SessionRows(session)
    for _ in range(2):
        rows.count_refused(lambda pid: 0)
        job: Any = SimpleNamespace(members=dict(enumerate(members)))
        assert rows._of_members(job)["instructions_unread"] == (2, True)
        lacks.pop(0)
