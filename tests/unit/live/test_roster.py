"""What a roster remembers of processes that ended, enough for the summary and no more; what it costs to look."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.attachment import Attachment
from argus.capture.process.names import KernelNames
from argus.capture.process.targets import Identity, Libraries
from argus.live.job import Job, Member
from argus.live.probed_files import KEPT_FILES
from argus.live.roster import (
    KEPT_HELPERS,
    KEPT_OVER,
    KEPT_OVER_OF_ALL,
    KEPT_OVER_OF_USER,
    YOUNG_S,
    Roster,
    _Candidate,
)
from tests.builders.sessions import a_session


@pytest.fixture
def roster() -> Roster:
    probes: Any = SimpleNamespace(remove_target=lambda pid: None, mapped_by=lambda file, owners: None)
    session = a_session(run=1)
    session.probes = probes
    return Roster(session, KernelNames())


def join(roster: Roster, job: Job, pid: int, *, helper: bool = False) -> None:
    target: Any = SimpleNamespace(pid=pid, close=lambda: None, libraries=[], identity=SimpleNamespace(owner=(1000, "")))
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
    gone = roster.take_over(over + 700, 10.0, most=5)
    assert [job.name for job in gone] == [f"job {number}" for number in range(5)], "the others in the next looks"
    gone += roster.take_over(over + 700, 10.0)
    assert [job.name for job in gone] == [f"job {number}" for number in range(2 * KEPT_OVER)]
    assert len(roster._current) == len(roster.jobs) == KEPT_OVER, "the newest stay for the summary"
    assert roster.past["jobs"] == 2 * KEPT_OVER


def over_jobs(roster: Roster, user: int, number: int, *, container: str = "", since: float = 1000.0) -> list[Job]:
    """Jobs of names of their own that are over, one after the other."""
    jobs = []
    for each in range(number):
        job = Job(
            f"{user} {container} {each}", 1, owner=(user, container), over_since=since + each / 100, finished=True
        )
        roster._current[job.name] = job
        roster._given.give(job.name, user, job.run)
        jobs.append(job)
    roster.jobs += jobs
    return jobs


def test_a_user_s_jobs_that_are_over_are_no_more_than_so_many(roster: Roster) -> None:
    """A script that starts jobs of names of their own. The oldest are forgotten, and another user's are not."""
    others, many = over_jobs(roster, 1000, 40), over_jobs(roster, 65534, 3000)
    rest = [over_jobs(roster, 65534, 8, container=f"c{number}", since=1030.0) for number in range(8)]
    unfinished = over_jobs(roster, 65534, 1, container="not yet", since=900.0)
    unfinished[0].finished = False
    assert roster.take_over(1030.0 + 5, 10.0, most=16)[-1].over_since < 1025.0, "their last rows may come"
    assert len(roster.take_over(1050.0, 10.0, most=16)) == 16
    roster.take_over(1050.0, 10.0)
    assert [job for job in roster.jobs if job.owner[0] == 1000] == others
    mine = [job for job in roster.jobs if job.owner[0] == 65534]
    newest = sorted([*many, *(job for jobs in rest for job in jobs)], key=lambda job: job.over_since)
    assert {id(job) for job in mine} == {id(job) for job in newest[-KEPT_OVER_OF_USER:] + unfinished}
    assert set(roster._current.values()) == set(roster.jobs)
    assert roster.past["jobs"] == 3000 + 64 - KEPT_OVER_OF_USER
    assert roster.take_over(1060.0, 10.0) == []


def test_jobs_that_are_over_are_bounded_for_all_users(roster: Roster) -> None:
    of_user = {user: over_jobs(roster, user, 5 if user == 7 else 60) for user in range(30)}
    roster.take_over(1050.0, 10.0)
    assert len(roster.jobs) <= KEPT_OVER_OF_ALL
    left = {user: [job for job in roster.jobs if job.owner[0] == user] for user in of_user}
    assert left[7] == of_user[7]
    assert all(
        jobs == of_user[user][-len(jobs) :] and len(jobs) in (17, 18) for user, jobs in left.items() if user != 7
    )


def test_an_array_of_jobs_is_remembered_as_before(roster: Roster) -> None:
    """Fewer than are remembered of a user: ten minutes each."""
    jobs = over_jobs(roster, 1000, KEPT_OVER_OF_USER)
    assert roster.take_over(1500.0, 10.0) == []
    assert roster.jobs == jobs


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


# ---- what is bounded


def library(number: int) -> Any:
    return SimpleNamespace(key=("08:01", number, 1, 1))


def probing(roster: Roster) -> list[Any]:
    """What the roster let go of, as it goes on."""
    released: list[Any] = []
    roster._session.probes.release = released.extend  # type: ignore[method-assign]
    return released


def map_file(roster: Roster, pid: int, number: int, *, apart: bool = False) -> None:
    file = library(number)
    roster.by_pid[pid][1].target.libraries.append(file)
    roster.files._shared[file.key] = not apart
    if not any(each.library.key == file.key and not apart for each in roster.attached):
        roster.attached.append(Attachment(file, pid if apart else None))


def test_probes_on_files_that_nobody_maps_are_bounded(roster: Roster) -> None:
    """A node that makes a container anew for each job."""
    released = probing(roster)
    job = Job("train", 1)
    roster.jobs.append(job)
    join(roster, job, 1)
    map_file(roster, 1, 0)
    for pid in range(2, 302):
        join(roster, job, pid, helper=True)
        map_file(roster, pid, 0)
        map_file(roster, pid, pid)
        leave(roster, pid)
    numbers = [each.library.key[1] for each in roster.attached]
    assert numbers == [0, *range(302 - KEPT_FILES, 302)], "what is mapped, and the newest of what is not"
    assert [each.library.key[1] for each in released] == list(range(2, 302 - KEPT_FILES))
    assert roster.files.released == len(released)
    assert len(roster.files._shared) == len(roster.files._unused) + 1 == KEPT_FILES + 1


def test_a_file_that_is_mapped_again_keeps_its_probes(roster: Roster) -> None:
    released = probing(roster)
    job = Job("train", 1)
    roster.jobs.append(job)
    for pid in range(1, 200):
        join(roster, job, pid, helper=True)
        map_file(roster, pid, 7)
        map_file(roster, pid, 1000 + pid)
        leave(roster, pid)
    assert 7 in {each.library.key[1] for each in roster.attached}
    assert 7 not in {each.library.key[1] for each in released}


def test_probes_that_a_twin_uses_stay_and_twins_are_bounded(roster: Roster) -> None:
    """A container's image, whose files each container shows by a device of its own."""
    released = probing(roster)
    job = Job("train", 1)
    roster.jobs.append(job)
    join(roster, job, 1)
    map_file(roster, 1, 0)
    leave(roster, 1)
    for pid in range(2, 300):
        join(roster, job, pid, helper=True)
        twin = library(pid)
        roster.by_pid[pid][1].target.libraries.append(twin)
        roster.files._shared[twin.key] = True
        roster.files._twins[twin.key] = library(0).key
        if pid > 2:
            leave(roster, pid - 1)
    assert released == []
    assert len(roster.files._twins) <= KEPT_FILES + 1


def test_probes_in_a_process_that_ended_go_with_it(roster: Roster) -> None:
    released = probing(roster)
    job = Job("train", 1)
    roster.jobs.append(job)
    for pid in (1, 2):
        join(roster, job, pid)
        map_file(roster, pid, 7, apart=True)
    leave(roster, 1)
    assert [each.pid for each in released] == [1]
    assert [each.pid for each in roster.attached] == [2]


def test_a_job_without_end_begins_a_new_run(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that numbers what it starts, beside one process that lives on."""
    monkeypatch.setattr("argus.live.roster.MOST_RANKS", 10)
    monkeypatch.setattr("argus.live.roster.parent_of", lambda pid: 0)
    for pid in range(1, 41):
        identity = Identity(pid - 1, 0, -1, "sweep", "torchrun", uid=5)
        target: Any = SimpleNamespace(
            pid=pid, close=lambda: None, libraries=[], identity=identity, alive=lambda pid=pid: pid == 1
        )
        roster._adopt(target)
        if pid > 1:
            leave(roster, pid)
    assert [len(job.members) for job in roster.jobs] == [10, 10, 10, 10]
    assert len({job.run for job in roster.jobs}) == 4
    assert "sweep has had 10 processes: a new run" in roster._session.notes


def test_a_job_that_seemed_to_be_over_goes_on(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.live.roster.parent_of", lambda pid: 0)
    for rank in range(2):
        identity = Identity(rank, 2, rank, "train", "torchrun", uid=5)
        target: Any = SimpleNamespace(
            pid=rank + 1, close=lambda: None, libraries=[], identity=identity, alive=lambda: False
        )
        job, _ = roster._adopt(target)
        assert (job.over_since, job.finished) == (0.0, False)
        if rank == 0:
            leave(roster, 1)
            job.finish()
            assert job.over_since
    assert roster.jobs == [job]


# ---- what it costs to look


@pytest.fixture
def mappings(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes whose mappings are read: ``seen.pages`` is what each has mapped, ``seen.read`` whose were read."""
    seen = SimpleNamespace(pages={}, read=[], now=100.0, took_s=0.0)
    ran = iter(range(1 << 30))

    def signature(pid: int) -> int:
        seen.read.append(pid)
        seen.now += seen.took_s
        return 1

    clock = SimpleNamespace(monotonic=lambda: seen.now, time=lambda: 1e9)
    monkeypatch.setattr("argus.live.roster.time", clock)
    monkeypatch.setattr("argus.live.mapped_libraries.time", clock)
    monkeypatch.setattr("argus.live.mapped_libraries.cpu_ns", lambda pid: next(ran))
    monkeypatch.setattr("argus.live.mapped_libraries.mapped_pages", lambda pid: seen.pages.get(pid, b"1"))
    monkeypatch.setattr("argus.live.mapped_libraries.mappings_signature", signature)
    monkeypatch.setattr("argus.live.mapped_libraries.find_libraries", lambda pid: Libraries())
    roster.family.refresh = lambda: ([], [])  # type: ignore[method-assign]
    job = Job("train", 1)
    for pid in range(1, 9):
        join(roster, job, pid)
        roster.by_pid[pid][1].target.identity = Identity(uid=-1)
    roster._attach = lambda *, running: True  # type: ignore[method-assign]
    return seen


def test_mappings_that_stay_are_read_less_and_less_often(roster: Roster, mappings: Any) -> None:
    """500 processes, a millisecond each."""
    for _ in range(1200):
        mappings.now += 0.5
        roster.look(mappings.now)
    often = mappings.read.count(1)
    assert 12 <= often <= 16, "5 s, 10 s, 20 s, 40 s, and each minute"
    mappings.pages[1] = b"2"
    roster.look(mappings.now)
    assert mappings.read.count(1) == often + 1, "at once when it maps something"


def test_a_look_reads_mappings_for_so_long_and_all_have_their_turn(roster: Roster, mappings: Any) -> None:
    """Processes that allocate: each has mapped another amount each time."""
    roster.look(mappings.now)
    mappings.read.clear()
    mappings.took_s = 0.015
    for number in range(8):
        mappings.pages = dict.fromkeys(range(1, 9), b"%d" % (number + 10))
        before = len(mappings.read)
        mappings.now += 0.5
        roster.look(mappings.now)
        assert len(mappings.read) - before == 2, "the second exceeds 20 ms"
    assert sorted(mappings.read) == sorted([*range(1, 9)] * 2)


def test_parents_are_looked_up_once_until_somebody_ends(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-loader workers are candidates for ever, and are asked for 20 times a second."""
    asked: list[int] = []
    monkeypatch.setattr("argus.live.roster.parent_of", lambda pid: asked.append(pid) or 1)
    for pid in range(2, 12):
        target: Any = SimpleNamespace(pid=pid, on_gpu=True, libraries=[], close=lambda: None)
        roster._candidates[pid] = _Candidate(0.0, target)
    for _ in range(5):
        assert len(roster.candidates()) == 10
    assert asked == list(range(2, 12))
    roster.family.refresh = lambda: ([], [99])  # type: ignore[method-assign]
    roster._left_alone |= roster._candidates.keys()
    roster.look(100.0)
    assert len(roster.candidates()) == 10
    assert len(asked) == 20


def test_young_candidates_are_looked_at_ever_less_often(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    candidate = roster._candidates[7] = _Candidate(100.0)
    roster._look_at_candidate = lambda pid, candidate, *, young: looked.append(now) or False  # type: ignore[method-assign,func-returns-value]
    for turn in range(1200):
        now = 100.0 + turn * 0.05
        roster._look_at_candidates(now)
    assert looked[:10] == [100.0 + turn * 0.05 for turn in range(10)], "in each turn at first"
    assert 100 < len(looked) < 250
    assert max(later - sooner for sooner, later in pairwise(looked)) <= YOUNG_S / 40 + 0.1
    assert candidate.due > now


def test_probes_that_come_late_are_taken_over_between_the_rounds(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, turns = iter([False, True, True]), list[bool]()

    def attach(users: Any, pids: set[int], *, running: bool) -> bool:
        turns.append(running)
        return len(turns) == 1

    monkeypatch.setattr(roster.family, "new", list)
    monkeypatch.setattr(roster.files, "due", lambda: next(due))
    monkeypatch.setattr(roster.files, "attach", attach)
    assert not roster.look_quickly(100.0)
    assert turns == []
    assert roster.look_quickly(101.0), "ranks have more probes"
    assert not roster.look_quickly(102.0), "none came"
    assert turns == [True, True]
