"""What a roster remembers of processes that ended: enough for the summary, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.names import KernelNames
from argus.roster import KEPT_HELPERS, KEPT_OVER, Job, Member, Roster


@pytest.fixture
def roster() -> Roster:
    probes: Any = SimpleNamespace(remove_target=lambda pid: None)
    return Roster(probes, KernelNames(), follow=False, job=None, run=1)


def join(roster: Roster, job: Job, pid: int, *, helper: bool = False) -> None:
    target: Any = SimpleNamespace(pid=pid, close=lambda: None)
    member = Member(target, 0, "parent" if helper else "torchrun", launches=7, collectives=3)
    job.members[pid] = member
    roster.by_pid[pid] = (job, member)


def leave(roster: Roster, *pids: int) -> None:
    roster._leaving += pids
    roster.retire(list(pids))


def test_of_jobs_that_start_again_the_newest_are_remembered(roster: Roster) -> None:
    """A launcher that restarts its ranks for weeks."""
    jobs = []
    for run in range(100):
        jobs.append(job := Job("train", run))
        roster.jobs.append(job)
        roster._current["train"] = job
        join(roster, job, run + 1)
        if run < 99:
            leave(roster, run + 1)
    now = max(job.over_since for job in jobs)
    assert roster.take_over(now + 9, 10.0) == []
    gone = roster.take_over(now + 11, 10.0)
    assert gone == jobs[: 99 - KEPT_OVER]
    assert roster.jobs == jobs[99 - KEPT_OVER :]
    count = len(gone)
    assert dict(roster.past) == {"jobs": count, "launches": 7 * count, "collectives": 3 * count}
    assert roster.take_over(now + 60, 10.0) == []


def test_a_job_that_did_not_start_again_is_remembered_for_ten_minutes(roster: Roster) -> None:
    """A node runs a job after the other, each of another name."""
    for number in range(3 * KEPT_OVER):
        job = Job(f"job {number}", 1)
        roster.jobs.append(job)
        roster._current[job.name] = job
        join(roster, job, number + 1)
        leave(roster, number + 1)
    over = max(job.over_since for job in roster.jobs)
    assert roster.take_over(over + 500, 10.0) == []
    assert len(roster.jobs) == 3 * KEPT_OVER
    gone = roster.take_over(over + 700, 10.0)
    assert [job.name for job in gone] == [f"job {number}" for number in range(2 * KEPT_OVER)]
    assert len(roster._current) == len(roster.jobs) == KEPT_OVER, "the newest stay for the summary"
    assert roster.past["jobs"] == 2 * KEPT_OVER


def test_of_helpers_that_ended_the_newest_are_remembered(roster: Roster) -> None:
    """Data-loader workers, started anew each epoch."""
    job = Job("train", 1)
    roster.jobs.append(job)
    join(roster, job, 1)
    for pid in range(2, 502):
        join(roster, job, pid, helper=True)
        leave(roster, pid)
    assert list(job.members) == [1, *range(502 - KEPT_HELPERS, 502)]
    assert not job.over_since
    kept = sum(member.launches for member in job.members.values())
    assert kept + roster.past["launches"] == 7 * 501
    leave(roster, 1)
    assert job.over_since
