"""Communicators that are lined up a part at a time: how long that takes of a turn, and of all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from argus.live.cost import turns
from argus.live.job import Job
from argus.live.sides import alignment
from argus.live.sides.alignment import JOB_SHARE, LAST_S, TURN_S, Aligner
from argus.semantics.groups.communicators import COMMUNICATOR
from tests.builders.sessions import a_session

PART_S = 0.001


class Time:
    """That of the alignment alone: each part takes a millisecond."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.now_s = 100.0
        self.parts = 0

    def thread_time(self) -> float:
        return self.cpu_s

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Jobs have as many parts as their runs' numbers."""
    at = Time()

    def in_parts(known: Any) -> Iterator[None]:
        for _ in range(known):
            at.cpu_s += PART_S
            at.now_s += PART_S
            at.parts += 1
            yield
        return np.zeros(1, COMMUNICATOR)

    monkeypatch.setattr(alignment, "time", at)
    monkeypatch.setattr(turns, "time", at)
    monkeypatch.setattr(alignment, "groups_in_parts", in_parts)
    monkeypatch.setattr(alignment, "_known", lambda job: job.run)
    return at


@pytest.fixture
def turn(at: Time) -> Callable[..., list[bool]]:
    """A turn of the loop, half a second after the last one: whether each job's communicators were found in it."""
    aligners: dict[int, tuple[Any, Aligner]] = {}

    def turned(*jobs: Job, final: bool = False, losses: dict[str, int] | None = None) -> list[bool]:
        session, aligner = aligners.setdefault(0, (made := a_session(None, jobs=jobs), Aligner(made)))
        at.now_s += 0.5
        aligner.begin_turn(at.now_s)
        found = []
        for job in jobs:
            found.append(aligner.run(job, at.now_s, final=final) is not None)
            if found[-1]:
                aligner.rest(job)
        if losses is not None:
            losses |= {job.run: dict(session.losses.of(job)) for job in jobs}
        return found

    return turned


def test_a_large_job_is_lined_up_over_several_turns(at: Time, turn: Callable[..., list[bool]]) -> None:
    job, found = Job("job", 100), []
    while not any(found):
        before = at.parts
        found += turn(job)
        assert (at.parts - before) * PART_S <= TURN_S + 2 * PART_S
    assert found == [False, False, False, True]


def test_it_rests_so_that_it_takes_little_of_the_time(at: Time, turn: Callable[..., list[bool]]) -> None:
    """However often a communicator is made."""
    job = Job("job", 25)
    begun = at.now_s
    for _ in range(200):
        turn(job)
        job.groups_due = 0.0
    assert at.parts >= 3 * 25
    assert at.cpu_s <= JOB_SHARE * (at.now_s - begun) + 25 * PART_S


def test_what_is_asked_for_while_it_is_under_way_is_done_after_it(at: Time, turn: Callable[..., list[bool]]) -> None:
    job = Job("job", 50)
    assert turn(job) == [False]
    job.groups_due = 0.0  # one was made
    assert turn(job) == [True]
    found: list[bool] = []
    while not any(found):
        found += turn(job)
        assert len(found) < 10


def test_an_owner_s_large_jobs_do_not_keep_another_s_waiting(at: Time, turn: Callable[..., list[bool]]) -> None:
    large = [Job("large", 100_000, owner=(1000, "")) for _ in range(8)]
    small = Job("small", 20, owner=(1001, ""))
    found = [turn(*large, small)[-1] for _ in range(60)]
    assert True in found[:3]


def test_the_last_time_it_is_done_at_once(at: Time, turn: Callable[..., list[bool]]) -> None:
    """Of what is known then. Who has too much of it, beside others, is told so."""
    alone = Job("alone", 100)
    turn(alone)
    assert turn(alone, final=True) == [True]
    assert at.parts >= 100 + 30
    assert alone.alignment is None


def test_who_has_too_much_of_it_at_the_end_is_told(at: Time, turn: Callable[..., list[bool]]) -> None:
    losses: dict[int, dict[str, int]] = {}
    large = [Job("large", 1500 + number, owner=(1000, "")) for number in range(3)]
    small = Job("small", 20, owner=(1001, ""))
    found = turn(*large, small, final=True, losses=losses)  # type: ignore[arg-type]
    assert found == [True, False, False, True]
    assert at.cpu_s <= 2 * LAST_S
    assert [losses[job.run].get("communicators_over_share", 0) for job in (*large, small)] == [0, 1, 1, 0]
    assert all(job.alignment is None for job in (*large, small))


def test_what_is_kept_is_of_owners_and_jobs_that_are_there(at: Time) -> None:
    jobs = [Job("job", 100, owner=(1000 + number, "")) for number in range(20)]
    session = a_session(None, jobs=jobs)
    aligner = Aligner(session)
    aligner.begin_turn(at.now_s)
    for job in jobs:
        assert aligner.run(job, at.now_s, final=False) is None
    assert {job.alignment is None for job in jobs} == {False}
    session.roster.jobs = jobs[:1]
    aligner.begin_turn(at.now_s + 1)
    assert list(aligner._left_s) == [(1000, "")]
    for job in jobs[1:]:
        aligner.run(job, at.now_s + 1, final=True)
        aligner.rest(job)
    assert [job.alignment is None for job in jobs] == [False, *[True] * 19]
