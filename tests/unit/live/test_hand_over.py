"""Steps by marks that end: marks are thinned, or given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.live.job import Job, Member, is_waiting
from argus.semantics.phases.cpu import MARK, What
from argus.semantics.steps import by_marks

STEPS, RANKS, MS = 1000, 16, 10**6


def a_job() -> Job:
    """Of each rank a thousand ranges wait until it is known that they are steps."""
    job = Job("job", 1)
    for rank in range(RANKS):
        target: Any = SimpleNamespace(
            pid=100 + rank, has=lambda _: True, identity=SimpleNamespace(world_size=RANKS), libraries=[], command=""
        )
        job.members[target.pid] = member = Member(target, rank, "l")
        marks: Any = np.zeros(STEPS, MARK)
        marks["what"], marks["handle"], marks["role"], marks["tid"] = What.STEP_BEGIN, 7, 1, 1
        marks["ts_ns"] = 1 + rank + np.arange(STEPS) * MS
        job.feed_marks(member, marks)
    return job


def test_where_ranges_are_thinned_all_that_wait_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number at a time."""
    monkeypatch.setattr(by_marks, "MOST_ENDS", 5000)
    job, found = a_job(), []
    job.thin_marks(2 * STEPS * MS)
    while not found or is_waiting(job):
        found.append(job.steps(3 * STEPS * MS, final=False))
        assert 0 < len(found[-1]) <= 5000 + RANKS
    found.append(job.steps(3 * STEPS * MS, final=False))
    assert len(found) == 5
    numbers = np.concatenate(found)
    assert job.counters()["step_ends_dropped"] == 0
    for rank in range(RANKS):
        assert numbers["step"][numbers["rank"] == rank].tolist() == list(range(STEPS - 1))
    assert job.thinned is not None


def test_a_job_whose_marks_are_given_up_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "MOST_ENDS", 100)
    job = a_job()
    assert job.marked.ready(range(RANKS))
    job.by_marks = True
    job.steps(3 * STEPS * MS, final=False)
    assert is_waiting(job)
    job.drop_marks()
    assert not is_waiting(job)
    assert not job.marked.waiting
    job.steps(3 * STEPS * MS, final=True)
    assert not is_waiting(job)
