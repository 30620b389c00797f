"""Communicators that are lined up a part at a time: how long that takes of a turn, and of all the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.live.cost import turns
from argus.live.job import Alignment, Alignments, Job, Member
from argus.live.sides import alignment
from argus.live.sides.alignment import INTERVAL_S, JOB_SHARE, LAST_S, OF_LOOP, TURN_S, Aligner, _is_due
from argus.model.calls import BY_SYMBOL
from argus.model.records import COLLECTIVE, CONTROL
from argus.semantics.groups.communicators import COMMUNICATOR
from tests.builders.sessions import a_session

PART_S = 0.001


class Time:
    """That of the alignment alone: each part takes a millisecond."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.now_s = 100.0
        self.parts = 0
        self.fails = False

    def thread_time(self) -> float:
        return self.cpu_s

    def monotonic(self) -> float:
        return self.now_s


class Loop:
    """The loop of a trace, as far as it lines up."""

    def __init__(self, at: Time, *jobs: Job) -> None:
        self.at, self.jobs = at, list(jobs)
        self.session = a_session(None, jobs=jobs)
        self.session.roster.jobs = self.jobs
        self.aligner = Aligner(self.session)
        self.found_at: dict[int, list[float]] = {job.run: [] for job in jobs}
        self.longest_s = 0.0

    def turn(self, every_s: float = 0.5, *, drains: int = 0, final: bool = False) -> list[bool]:
        """A turn so long after the last one, with so many before it that only drain: whose communicators were found."""
        for _ in range(drains):
            self.spend(every_s / (drains + 1), self.aligner.go_on)
        self.spend(every_s / (drains + 1), self.aligner.begin_turn)
        found = []
        for job in [job for job in self.jobs if not job.finished]:
            found.append(self.aligner.run(job, self.at.now_s, final=final) is not None)
            if found[-1]:
                self.found_at[job.run].append(self.at.now_s)
                with self.aligner.using(job):
                    pass
        return found

    def spend(self, every_s: float, what: Callable[[float], None]) -> None:
        self.at.now_s += every_s
        before = self.at.cpu_s
        what(self.at.now_s)
        self.longest_s = max(self.longest_s, self.at.cpu_s - before)

    @property
    def losses(self) -> list[int]:
        return [self.session.losses.of(job).get("communicators_over_share", 0) for job in self.jobs]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Jobs have as many parts as their runs' numbers."""
    at = Time()

    def in_parts(known: Any) -> Iterator[None]:
        for _ in range(known):
            at.cpu_s += PART_S
            at.now_s += PART_S
            at.parts += 1
            if at.fails:
                raise ValueError("a planted fault")
            yield
        return np.zeros(1, COMMUNICATOR)

    monkeypatch.setattr(alignment, "time", at)
    monkeypatch.setattr(turns, "time", at)
    monkeypatch.setattr(alignment, "groups_in_parts", in_parts)
    monkeypatch.setattr(alignment, "_known", lambda job: job.run)
    return at


def test_a_small_job_is_lined_up_at_once(at: Time) -> None:
    assert Loop(at, Job("job", 8)).turn() == [True]


@pytest.mark.parametrize(("every_s", "drains"), [(0.25, 4), (4.0, 80), (4.0, 8)])
def test_a_large_job_is_lined_up_over_several_turns(at: Time, every_s: float, drains: int) -> None:
    """As hundreds of ranks have it, whose turns are seconds apart: between them rings are drained."""
    job = Job("job", 1300)
    loop, begun_s = Loop(at, job), at.now_s
    for _ in range(200):
        if any(loop.turn(every_s, drains=drains)):
            break
    assert loop.longest_s <= TURN_S + 2 * PART_S
    by_turns = 1300 * PART_S / TURN_S * every_s / (drains + 1)
    assert at.now_s - begun_s <= 1.5 * max(1300 * PART_S / OF_LOOP, by_turns) + 2 * every_s


def test_it_rests_so_that_it_takes_little_of_the_time(at: Time) -> None:
    """However often a communicator is made."""
    job = Job("job", 25)
    loop, begun_s = Loop(at, job), at.now_s
    for _ in range(200):
        loop.turn()
        job.groups_due = 0.0
    assert at.parts >= 3 * 25
    assert at.cpu_s <= JOB_SHARE * (at.now_s - begun_s) + 25 * PART_S


def lined_up(at: Time, calls_at: Callable[[float], int], error: str = "", turns: int = 20_000) -> list[float]:
    """When the one communicator of a job is lined up in so many hundredths of a second, by how many calls are there."""
    job = Job("job", 1)
    job.members[7] = Member(SimpleNamespace(pid=7), 0, "order")  # type: ignore[arg-type]
    job.handles = {(0, 7)}
    found = np.zeros(1, COMMUNICATOR)
    found["comm"], found["error"] = 7, error
    loop, begun_s = Loop(at, job), at.now_s
    times: list[float] = []
    for _ in range(turns):
        at.now_s += 0.01
        job.recent[0] = np.zeros(calls_at(at.now_s - begun_s), COLLECTIVE)
        if loop.aligner.run(job, at.now_s, final=False) is not None:
            times.append(at.now_s - begun_s)
            with loop.aligner.using(job):
                job.communicators = found.copy()
            job.alignments.rests = job.alignments.rests_in_vain = 0.0
        loop.aligner.begin_turn(at.now_s)
    return times


def test_what_is_found_again_is_looked_for_once_there_are_twice_as_many_calls(at: Time) -> None:
    """A job with few calls was lined up at every chance for minutes, to the same end: a tenth of the tracer's time."""
    times = lined_up(at, lambda after_s: 4 + int(after_s))
    waited = [round(after - before) for before, after in itertools.pairwise(times)]
    assert waited == [1, 5, 10, 20, 40, 60, 60]


def test_nor_does_training_wait_that_begins_late(at: Time) -> None:
    """After minutes of compiling, with three calls until then, its groups were wrong for another minute."""
    times = lined_up(at, lambda after_s: 3 if after_s < 150 else 3 + int((after_s - 150) * 10))
    assert min(time for time in times if time > 150) == pytest.approx(150.3, abs=0.05)


def test_what_is_not_known_is_looked_for_each_second(at: Time) -> None:
    times = lined_up(at, lambda _: 3, "several communicators have equal call sequences", 1000)
    assert [round(after - before) for before, after in itertools.pairwise(times)] == [1] * 9


def test_what_takes_long_and_stays_unknown_is_looked_for_ever_more_seldom(at: Time) -> None:
    """Ranks that cannot be lined up took a fiftieth of a core for good. New calls or handles bring it forward."""
    job = Job("job", 1)
    loop = Loop(at, job)
    job.handles = {(0, 7)}
    job.members[7] = member = Member(SimpleNamespace(pid=7), 0, "order", collectives=100)  # type: ignore[arg-type]

    def rests_s(took_s: float = 0.1) -> float:
        job.alignment = Alignment(took_s=took_s)
        with loop.aligner.using(job):
            pass
        return next(seconds for seconds in itertools.count() if is_due_in(seconds))

    def is_due_in(seconds: float) -> bool:
        job.groups_due = 0.0
        return _is_due(job, at.now_s + seconds)

    assert [rests_s() for _ in range(5)] == [10, 20, 40, 60, 60]
    assert rests_s(2.0) == 100, "it takes so long each time"
    assert rests_s() == 60
    member.collectives = 200
    assert [is_due_in(4), is_due_in(6)] == [False, True]
    assert rests_s() == 60
    job.handles = {(0, 8)}
    assert [is_due_in(4), is_due_in(6)] == [False, True]
    assert rests_s() == 60
    loop.aligner.begin_anew(job)
    assert is_due_in(0), "its last steps are to go by all calls"


def test_a_new_communicator_is_looked_for_soon(at: Time) -> None:
    job = Job("job", 1)
    job.alignments = Alignments(at.now_s - 2, 0.0, 1000)
    job.groups_due = at.now_s + 50
    loop = Loop(at, job)
    assert loop.aligner.run(job, at.now_s, final=False) is None
    job.groups_due = 0.0
    assert loop.aligner.run(job, at.now_s, final=False) is not None


def test_what_is_asked_for_while_it_is_under_way_is_done_after_it(at: Time) -> None:
    job = Job("job", 50)
    loop = Loop(at, job)
    assert loop.turn() == [False]
    job.groups_due = 0.0  # one was made
    assert loop.turn() == [True]
    assert any(loop.turn()[0] for _ in range(10))


def test_all_jobs_of_an_owner_have_their_turn(at: Time) -> None:
    """More than there is time for: each has waited for as long as the others."""
    loop = Loop(at, *(Job("job", 100 + number, owner=(1000, "")) for number in range(20)))
    for _ in range(2000):
        loop.turn(0.1)
    times = [len(found) for found in loop.found_at.values()]
    assert min(times) >= 0.8 * max(times) >= 5


def test_only_the_job_that_is_under_way_holds_what_was_called(at: Time) -> None:
    loop = Loop(at, *(Job("job", 100 + number, owner=(1000, "")) for number in range(20)))
    loop.turn()
    assert sum(job.alignment is not None and job.alignment.parts is not None for job in loop.jobs) == 1


def test_an_owner_s_large_jobs_do_not_keep_another_s_waiting(at: Time) -> None:
    small = Job("small", 20, owner=(1001, ""))
    loop = Loop(at, *(Job("large", 100_000 + number, owner=(1000, "")) for number in range(8)), small)
    # The others' are due first, and take the first turn. Of the next two half is its own: 15 parts, and 5.
    assert [loop.turn()[-1] for _ in range(3)] == [False, False, True]


def test_what_fails_is_tried_again(at: Time) -> None:
    """And costs other jobs nothing."""
    job, other = Job("job", 5), Job("other", 6)
    loop = Loop(at, job, other)
    at.fails = True
    assert loop.turn() == [False, False]
    assert (job.losses["job_turns_failed"], other.losses["job_turns_failed"]) == (1, 1)
    at.fails = False
    assert loop.turn(INTERVAL_S) == [True, True]


def test_the_last_time_it_is_done_at_once(at: Time) -> None:
    """Of what is known then."""
    job = Job("job", 100)
    loop = Loop(at, job)
    loop.turn()
    assert loop.turn(final=True) == [True]
    assert at.parts >= 100 + 30
    assert job.alignment is None


def test_who_has_too_much_of_it_at_the_end_is_told(at: Time) -> None:
    large = [Job("large", 1500 + number, owner=(1000, "")) for number in range(3)]
    loop = Loop(at, *large, Job("small", 20, owner=(1001, "")))
    loop.turn()
    assert loop.turn(final=True) == [True, False, False, True]
    assert at.cpu_s <= 2 * LAST_S
    assert loop.losses == [0, 1, 1, 0]
    assert all(job.alignment is None for job in loop.jobs)


def test_who_is_left_alone_by_jobs_that_ended_has_all_the_time(at: Time) -> None:
    """They are remembered for a while."""
    ended = Job("ended", 1, owner=(1001, ""))
    ended.finished = True
    loop = Loop(at, ended, Job("large", 5000, owner=(1000, "")))
    loop.turn()
    assert loop.turn(final=True) == [True]
    assert loop.losses == [0, 0]


def test_what_is_kept_is_of_owners_and_jobs_that_are_there(at: Time) -> None:
    loop = Loop(at, *(Job("job", 100, owner=(1000 + number, "")) for number in range(20)))
    loop.turn()
    assert len(loop.aligner._waiting) == 20
    for job in loop.jobs[1:]:
        loop.aligner.run(job, at.now_s + 1, final=True)
        with loop.aligner.using(job):
            pass
    assert list(loop.aligner._waiting) == [(1000, "")]
    assert [job.alignment is None for job in loop.jobs] == [False, *[True] * 19]


def test_all_that_is_done_for_it_is_on_its_account(at: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of its ranks when it begins, the parts, what is left of what was found, and what follows."""

    def known(job: Job) -> int:
        at.cpu_s += 0.01
        return job.run

    class Slow(np.ndarray[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            at.cpu_s += 0.01
            return super().__getitem__(key)

    monkeypatch.setattr(alignment, "_known", known)
    job = Job("job", 5)
    loop = Loop(at, job)
    loop.aligner._left_s = TURN_S
    assert loop.aligner.run(job, at.now_s, final=False) is not None
    job.alignment.found = np.zeros(1, COMMUNICATOR).view(Slow)  # type: ignore[union-attr]
    before = job.alignment.took_s  # type: ignore[union-attr]
    assert before == pytest.approx(0.01 + 5 * PART_S)
    assert loop.aligner.run(job, at.now_s, final=False) is not None
    assert job.alignment.took_s - before == pytest.approx(0.03)  # type: ignore[union-attr]
    with loop.aligner.using(job):
        at.cpu_s += 1
    assert job.alignments.rests - at.now_s == pytest.approx((1.04 + 5 * PART_S) / JOB_SHARE)


def calls_of(rank: int, number: int, *, count: int) -> Any:
    calls = np.zeros(number, COLLECTIVE)
    calls["ts_ns"], calls["seq"], calls["comm"], calls["count"] = np.arange(number) * 10**8, np.arange(number), 7, count
    calls["call"], calls["pid"] = BY_SYMBOL["ncclAllReduce"].id, rank
    return calls


def test_what_is_found_is_of_no_communicator_that_was_made_meanwhile() -> None:
    """At the same address: the rows of the one before would be its own. New calls change nothing of what is under
    way."""
    job = Job("job", 1)
    job.recent = {rank: calls_of(rank, 50, count=9) for rank in range(3)}
    loop = Loop(Time(), job)
    loop.aligner._left_s = 0.0
    assert loop.aligner.run(job, 0.0, final=False) is None
    assert not loop.aligner._part(job, loop.aligner._turns)
    made = np.zeros(2, CONTROL)
    made["handle"], made["call"] = 7, [BY_SYMBOL["ncclCommDestroy"].id, BY_SYMBOL["ncclCommInitRank"].id]
    job.keep_control(1, made)
    job.recent[2] = calls_of(2, 50, count=11)
    while not loop.aligner._part(job, loop.aligner._turns):
        pass
    found = loop.aligner.run(job, 0.0, final=False)
    assert found is not None
    assert found["rank"].tolist() == [0, 2]
    assert len(set(found["comm_group"].tolist())) == 1
    with loop.aligner.using(job):
        pass
    job.recent[1] = calls_of(1, 50, count=9)
    again = loop.aligner.run(job, 0.0, final=True)
    assert again is not None
    assert again["rank"].tolist() == [0, 1, 2]


def test_jobs_that_all_begin_anew_do_not_hold_the_loop(at: Time) -> None:
    """As once calls of all jobs are seen in windows from then on: each owner's were done at once, for two seconds."""
    jobs = [Job(f"job {user}", 300 + user, owner=(1000 + user, "")) for user in range(8)]
    loop = Loop(at, *jobs)
    loop.turn()
    for job in jobs:
        job.groups_due = job.alignments.rests = job.alignments.rests_in_vain = float("inf")
        loop.aligner.begin_anew(job)
    before = {run: len(found) for run, found in loop.found_at.items()}
    loop.longest_s = 0.0
    for _ in range(200):
        loop.turn(0.1)
        if all(len(found) > before[run] for run, found in loop.found_at.items()):
            break
    else:
        pytest.fail("not all were lined up")
    assert loop.longest_s <= TURN_S + 2 * PART_S
    assert loop.losses == [0] * 8


def test_what_is_under_way_is_begun_anew(at: Time) -> None:
    """It knew nothing of the last calls."""
    job = Job("job", 1000)
    loop = Loop(at, job)
    assert loop.turn() == [False]
    under_way = job.alignment
    assert under_way is not None
    loop.aligner.begin_anew(job)
    loop.aligner.run(job, at.now_s, final=False)
    assert job.alignment is not None
    assert job.alignment is not under_way
    assert [list(waiting) for waiting in loop.aligner._waiting.values()] == [[job]]
