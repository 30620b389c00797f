"""Calls that are kept for steps: who has too many drops the oldest, and what goes is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.live.job import Job, Member
from argus.live.sides import call_room
from argus.live.sides.call_room import DOWN_TO, KERNELS_S, SEVERAL, CallRoom, _of
from argus.live.sides.call_shares import CallShares
from argus.live.sides.calls import CallSide
from argus.model import records
from argus.model.calls import CALLS
from argus.model.losses import Owner
from argus.model.records import COLLECTIVE, CONTROL, LAUNCH
from argus.semantics.phases import gpu
from argus.semantics.phases.cpu import MARK, What
from argus.semantics.steps.by_calls import CALL, StepTracker
from argus.semantics.steps.by_marks import MarkedSteps, keep_calls, kept_calls
from argus.semantics.steps.marks import Marks
from argus.semantics.steps.period import WINDOW
from tests.builders.sessions import a_session
from tests.unit.semantics.steps.test_by_calls import analyse, simulate

HONEST, OTHER = (1000, ""), (1001, "")


def launches_of(ts_ns: NDArray[np.int64], seed: int = 0) -> NDArray[np.void]:
    """Launches that never repeat."""
    rows = np.zeros(len(ts_ns), LAUNCH)
    rows["ts_ns"], rows["handle"] = ts_ns, np.random.default_rng(seed).integers(1, 1 << 60, len(ts_ns))
    return rows


def collectives_of(ts_ns: NDArray[np.int64], comms: Any = 7) -> NDArray[np.void]:
    rows = np.zeros(len(ts_ns), COLLECTIVE)
    rows["ts_ns"], rows["comm"], rows["seq"] = ts_ns, comms, np.arange(len(ts_ns))
    return rows


def take_calls(job: Job, rank: int, collectives: NDArray[np.void]) -> None:
    """What they say of traffic, and of the rank's kernels."""
    number = len(collectives)
    job.count_traffic(rank, collectives, np.full(number, 4, np.uint64))
    what, nbytes = np.full(number, gpu.What.ALL_REDUCE, np.uint8), np.full(number, 4)
    rows = gpu.call_rows(collectives["ts_ns"].astype(np.int64), np.full(number, 7), what, nbytes)
    job.calls.setdefault(rank, gpu.Calls()).feed_rows(rows)


def a_job(owner: Owner, ranks: int, calls: int) -> Job:
    job = Job(f"job of {owner[0]}", 1, owner=owner)
    for rank in range(ranks):
        target: Any = SimpleNamespace(pid=owner[0] * 1000 + rank)
        job.members[target.pid] = Member(target, rank, "order")
        times = 1000 * np.arange(1, calls + 1)
        collectives = collectives_of(times[: calls // 8])
        job.tracker.feed(rank, launches_of(times, rank), collectives)
        job.marked.feed_calls(rank, times, collectives)
        take_calls(job, rank, collectives)
        job.recent[rank] = collectives[-64:].copy()
        job.syncs[rank] = np.zeros((64, 2), np.int64)
        job.control[rank] = np.zeros(8, CONTROL)
    return job


def a_room(session: Any) -> CallRoom:
    return CallRoom(session, CallShares(session))


def held(*jobs: Job) -> int:
    return sum(each.held for job in jobs for each in _of(job))


def lost(session: Any, job: Job) -> int:
    return int(session.losses.of(job).get("step_calls_over_share", 0))


def arrays(job: Job) -> list[NDArray[Any]]:
    kept = [*job.recent.values(), *job.syncs.values(), *job.control.values()]
    kept += [state.calls for state in job.tracker._ranks.values()]
    for state in job.marked._ranks.values():
        kept += [state.called, state.comm, state.seq, state.nbytes, state.launched]
    return [rows.copy() for rows in kept + [calls._join() for calls in job.calls.values()]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_room, "SEVERAL", 1 << 20)
    monkeypatch.setattr(call_room, "ALONE", 2 << 20)


@pytest.mark.usefixtures("small")
def test_an_owner_s_ranks_share_its_room() -> None:
    """However many they are, and in however many jobs. One that is alone has twice as much."""
    many = [a_job(OTHER, 20, 5_000), a_job(OTHER, 20, 5_000)]
    modest = a_job(HONEST, 2, 2_000)
    before = arrays(modest)
    session = a_session(None, jobs=many)
    assert held(*many) > 8 << 20
    a_room(session).make(0.0)
    assert 0.9 * DOWN_TO * (2 << 20) < held(*many) <= 2 << 20
    session.roster.jobs.append(modest)
    a_room(session).make(0.0)
    assert 0.9 * DOWN_TO * (1 << 20) < held(*many, modest) <= 1 << 20
    of_each = [each.held for job in many for each in _of(job)]
    assert max(of_each) < 1.05 * min(of_each)
    assert all(np.array_equal(one, other) for one, other in zip(before, arrays(modest), strict=True))
    assert lost(session, modest) == 0
    assert all(lost(session, job) > 0 for job in many)
    # Who made room has some for a while.
    again = [arrays(job) for job in many]
    for rank in range(20):
        many[0].tracker.feed(rank, launches_of(np.array([10**9])), np.empty(0, COLLECTIVE))
    a_room(session).make(0.0)
    assert all(np.array_equal(*pair) for pair in zip(again[1], arrays(many[1]), strict=True))
    assert held(*many, modest) <= 1 << 20


@pytest.mark.usefixtures("small")
def test_ranks_with_little_keep_all() -> None:
    large, little = a_job(OTHER, 1, 60_000), a_job(OTHER, 30, 100)
    before = arrays(little)
    session = a_session(None, jobs=[large, little])
    a_room(session).make(0.0)
    assert held(large, little) <= 2 << 20
    assert all(np.array_equal(one, other) for one, other in zip(before, arrays(little), strict=True))
    assert lost(session, little) == 0
    # The newest stay.
    assert large.tracker._ranks[0].calls["ts"][-1] == 60_000_000
    assert large.marked._ranks[0].launched[-1] == 60_000_000


@pytest.mark.usefixtures("small")
def test_who_has_too_many_pays_for_the_time_that_dropping_takes() -> None:
    honest, other = a_job(HONEST, 1, 100), a_job(OTHER, 20, 5_000)
    session = a_session(None, jobs=[honest, other])
    shares, charged = CallShares(session), list[Job]()

    @contextmanager
    def working(job: Job) -> Iterator[None]:
        before = held(job)
        yield
        assert held(job) < before
        charged.append(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "working", working)
        CallRoom(session, shares).make(0.0)
    assert charged == [other] * 20


@pytest.mark.usefixtures("small")
def test_a_user_in_many_containers_takes_no_more_of_the_room() -> None:
    """Beside a user in eight, a job's ranks keep all that half of the room has space for."""
    honest = a_job(HONEST, 4, 1_200)
    many = [a_job((OTHER[0], f"c{number}"), 6, 5_000) for number in range(8)]
    before = arrays(honest)
    assert (1 << 20) / 4 < held(honest) < DOWN_TO * (1 << 19)
    session = a_session(None, jobs=[honest, *many])
    a_room(session).make(0.0)
    assert all(np.array_equal(one, other) for one, other in zip(before, arrays(honest), strict=True))
    assert lost(session, honest) == 0
    assert held(honest, *many) <= 1 << 20
    assert max(map(held, many)) < 1.1 * min(map(held, many)), "nor has one of its containers more than another"


@pytest.mark.usefixtures("small")
def test_names_and_marks_that_wait_are_in_the_room() -> None:
    """Names of ranges, marks of phases, and those that wait for the end of what is seen throughout."""
    job = Job("job", 1, owner=OTHER)
    pushes, waits = np.zeros(2000, records.MARK), np.zeros(40_000, MARK)
    pushes["call"] = next(call.id for call in CALLS if call.kind == "nvtx_push")
    pushes["ts_ns"], pushes["name_len"] = 1 + np.arange(len(pushes)), 40
    pushes["name"][:, :40] = np.random.default_rng(0).integers(ord("a"), ord("z"), (len(pushes), 40))
    waits["what"], waits["ts_ns"] = What.WAIT, 10**6 + np.arange(len(waits))
    for rank in range(3):
        target: Any = SimpleNamespace(pid=rank, has=lambda _: False)
        job.members[rank] = Member(target, rank, "order")
        job.marks[rank] = Marks()
        job.marks[rank].take(pushes, ends_of_backward=False)
        job.feed_marks(job.members[rank], waits)
        job._early[rank] = [waits[:10_000].copy()]
    marks = 3 * (40_000 + 10_000) * MARK.itemsize
    assert held(job) > marks + 3 * 2000 * 200
    session = a_session(None, jobs=[job])
    a_room(session).make(0.0)
    assert DOWN_TO * (1 << 20) < held(job) <= DOWN_TO * (2 << 20)
    assert sum(job.phases[rank].marks_kept for rank in range(3)) * MARK.itemsize <= 2 << 20
    assert lost(session, job) == 3 * 10_000 - sum(len(each) for of in job._early.values() for each in of)
    dropped = sum(phases.counters["marks_dropped_old"] for phases in job.phases.values())
    assert dropped == 3 * 40_000 - sum(phases.marks_kept for phases in job.phases.values()) > 0
    assert all(phases._pieces[-1]["ts_ns"][-1] == waits["ts_ns"][-1] for phases in job.phases.values())


def test_the_ranks_of_a_node_keep_what_they_kept_before() -> None:
    """Sixteen, each with a full ring of calls, and of NCCL's."""
    job = Job("job", 1, owner=HONEST)
    job.members[1] = Member(SimpleNamespace(pid=1), 0, "order")  # type: ignore[arg-type]
    for begin in range(0, 3 * WINDOW, 7_500):
        times = 1000 * np.arange(begin + 1, begin + 7_501)
        job.tracker.feed(0, launches_of(times), np.empty(0, COLLECTIVE))
        nccl = collectives_of(times)
        take_calls(job, 0, nccl)
        job.recent[0] = nccl[-4096:].copy()
    assert 16 * held(job) <= SEVERAL


def test_what_goes_is_counted_once_it_is_in_no_step() -> None:
    """Against what a list would keep."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        window, number = int(rng.integers(5, 40)), int(rng.integers(1, 60))
        tracker = StepTracker(window)
        tracker.feed(3, launches_of(1 + np.arange(number)), np.empty(0, COLLECTIVE))
        state = tracker._ranks[3]
        first, calls = state.dropped, state.calls["ts"].tolist()
        state.boundary = int(rng.integers(-1, number))
        most = int(rng.integers(0, number + 5))
        gone = [first + place for place in range(len(calls) - min(most, len(calls)))]
        newest = first + len(calls) - window
        expected = sum(place >= max(state.boundary, newest) for place in gone)
        assert tracker.keep(3, most * CALL.itemsize) == expected
        assert state.calls["ts"].tolist() == calls[len(gone) :]
        assert state.dropped == first + len(gone)
        assert tracker.kept(3) == len(state.calls) * CALL.itemsize
        tracker.feed(3, launches_of(10**6 + np.arange(9)), np.empty(0, COLLECTIVE))
        assert state.calls["ts"].tolist()[-5:] == (10**6 + np.arange(4, 9)).tolist()


def test_of_marked_steps_the_newest_calls_stay() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        steps, calls, launched = MarkedSteps(), *(int(each) for each in rng.integers(0, 50, 2))
        times, comms = np.sort(rng.integers(1, 1000, calls)), rng.integers(1, 5, calls)
        at = np.sort(rng.integers(1, 1000, launched))
        steps.feed_calls(0, at, collectives_of(times, comms))
        state = steps._ranks[0]
        state.last = (int(rng.integers(0, 1000)), 1) if rng.random() < 0.5 else None
        since = state.last[0] if state.last else 0
        before = kept_calls(steps, 0)
        assert before == 32 * calls + 8 * launched
        most = int(rng.integers(0, before + 1))
        counted = keep_calls(steps, 0, most)
        assert kept_calls(steps, 0) <= most
        assert kept_calls(steps, 0) > most - 41
        assert state.called.tolist() == times[calls - len(state.called) :].tolist()
        assert state.comm.tolist() == comms[calls - len(state.called) :].tolist()
        assert state.launched.tolist() == at[launched - len(state.launched) :].tolist()
        gone = times[: calls - len(state.called)].tolist() + at[: launched - len(state.launched)].tolist()
        assert counted == sum(ts > since for ts in gone)
        assert dict(state.comms.calls) == {comm: state.comm.tolist().count(comm) for comm in set(state.comm.tolist())}


def test_steps_that_are_known_go_on_with_few_calls() -> None:
    """What was in a step is needed no more."""
    job, found = simulate(2, steps=120), []
    groups, _, _ = analyse(job)
    for most in (1 << 40, 20_000):
        tracker, out = StepTracker(), []
        tracker.align(groups)
        edges = np.linspace(job.boundaries.min() - 10**9, job.boundaries.max() + 10**9, 400).astype(np.int64)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            for rank in job.ranks:
                parts = [a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (rank.launches, rank.collectives)]
                tracker.feed(rank.rank, *parts)
            out.append(tracker.advance())
            if sum(map(len, out)) > 50:
                assert [tracker.keep(rank.rank, most) for rank in job.ranks] == [0, 0]
        found.append(np.concatenate(out))
    assert len(found[0]) > 80
    assert np.array_equal(found[0], found[1])


def test_calls_for_kernels_of_a_job_that_is_over_go_once_none_comes() -> None:
    job = a_job(HONEST, 2, 800)
    session = a_session(None, jobs=[job])
    job.finish()
    job.over_since = 100.0
    a_room(session).make(100.0 + KERNELS_S)
    assert job.calls
    a_room(session).make(101.0 + KERNELS_S)
    assert held(job) < 100_000
    assert not job.calls


@pytest.mark.parametrize("by_marks", [True, False])
def test_calls_for_the_other_way_of_finding_steps_go(by_marks: bool) -> None:
    job = a_job(HONEST, 2, 800)
    job.by_marks = by_marks
    a_room(a_session(None, jobs=[job])).make(0.0)
    assert (job.tracker.kept(0) == 0) is by_marks
    assert (kept_calls(job.marked, 0) == 0) is not by_marks


def test_room_is_made_in_each_turn() -> None:
    job = a_job(HONEST, 1, 800)
    job.by_marks = True
    session = a_session(None, jobs=[job])
    idle: Any = SimpleNamespace(collects=False)
    session.probes = SimpleNamespace(rings=dict, trains=lambda users: None)
    probing: Any = SimpleNamespace(take_note=lambda _: None)
    side = CallSide(session, idle, probing, *[SimpleNamespace()] * 2)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session), "calls_come", False)
        side.work(1.0)
    assert job.tracker.kept(0) == 0
