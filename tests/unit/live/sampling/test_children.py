"""What ranks have forked: each process is read once, however ranks lie below one another, and few in one look."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.live.job import Job
from argus.live.sampling import children
from argus.live.sampling.children import AS_ONE, AT_ONCE, MOST_READ, Descendants, Whose
from tests.builders.sessions import a_session

Forest = dict[int, dict[int, list[int]]]
"""Process → thread → what it has forked."""


class Kernel:
    """Stands in for /proc, and counts lists that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forest: Forest) -> None:
        self.forest = forest
        self.read: list[tuple[int, int]] = []
        monkeypatch.setattr(children, "threads_of", self.threads_of)
        monkeypatch.setattr(children, "forked_by", self.forked_by)
        monkeypatch.setattr(children, "parent_of", self.parent_of)

    def threads_of(self, pid: int, *, all_threads: bool) -> list[int]:
        return list(self.forest.get(pid, {})) if all_threads else [pid]

    def forked_by(self, pid: int, tid: int) -> list[int]:
        self.read.append((pid, tid))
        return list(self.forest.get(pid, {}).get(tid, []))

    def parent_of(self, pid: int) -> int:
        return next((one for one, threads in self.forest.items() for forked in threads.values() if pid in forked), 0)


def all_below(forest: Forest, wanted: dict[int, Whose], *, all_threads: bool) -> None:
    """What ``Descendants`` adds, in the plain way: all that is below each rank."""
    for pid, whose in list(wanted.items()):
        found, queue = [], [pid]
        while queue:
            one = queue.pop()
            threads = forest.get(one, {})
            for tid in list(threads) if all_threads else [one]:
                found += threads.get(tid, [])
                queue += threads.get(tid, [])
        for child in found:
            wanted.setdefault(child, whose)


def a_forest(rng: random.Random, size: int) -> Forest:
    forest: Forest = {}
    pids = rng.sample(range(2, 100_000), size)
    for place, pid in enumerate(pids):
        forest[pid] = {pid: [], **{10**6 + 10 * pid + more: [] for more in range(rng.choice([0, 0, 1, 3]))}}
        if place and rng.random() < 0.9:
            parent = forest[rng.choice(pids[max(place - rng.choice([1, 3, 20]), 0) : place])]
            parent[rng.choice(list(parent))].append(pid)
    return forest


def descendants(*owners: tuple[int, str]) -> tuple[Descendants, Any]:
    jobs = [Job(f"j{owner}", 1, owner=owner) for owner in owners]
    session = a_session(jobs=jobs)
    session.look_ups._clock = lambda: 0.0  # nothing takes time here but what a test says
    session.fill_look_ups(0.0)
    return Descendants(session), session


@pytest.mark.parametrize("all_threads", [False, True])
def test_as_when_all_below_each_rank_is_read(monkeypatch: pytest.MonkeyPatch, all_threads: bool) -> None:
    rng = random.Random(7)
    for _ in range(100):
        forest = a_forest(rng, rng.choice([3, 20, 60]))
        kernel = Kernel(monkeypatch, forest)
        below, session = descendants((7, ""))
        ranks = rng.sample(list(forest), rng.randrange(1, len(forest)))
        wanted: dict[int, Whose] = {pid: (session.jobs[0], rank) for rank, pid in enumerate(ranks)}
        expected = dict(wanted)
        all_below(forest, expected, all_threads=all_threads)
        below.search(all_threads=all_threads)
        below.find(wanted)
        assert list(wanted.items()) == list(expected.items())
        assert len(set(kernel.read)) == len(kernel.read)
        below.find(fresh := dict.fromkeys(ranks, (session.jobs[0], 0)))
        assert len(fresh) == len(ranks), "nothing is left"


@pytest.mark.parametrize("all_threads", [False, True])
def test_over_several_looks_all_are_found(monkeypatch: pytest.MonkeyPatch, all_threads: bool) -> None:
    monkeypatch.setattr(children, "MOST_READ", 7)
    monkeypatch.setattr(children, "AT_ONCE", 2)
    rng = random.Random(8)
    for _ in range(50):
        forest = a_forest(rng, 60)
        kernel = Kernel(monkeypatch, forest)
        below, session = descendants((7, ""))
        ranks = {pid: (session.jobs[0], rank) for rank, pid in enumerate(rng.sample(list(forest), 20))}
        all_below(forest, expected := dict(ranks), all_threads=all_threads)
        below.search(all_threads=all_threads)
        found: dict[int, Whose] = dict(ranks)
        for _ in range(100):
            before = len(kernel.read)
            below.find(wanted := dict(ranks))
            assert len(kernel.read) - before <= 7
            for pid, whose in wanted.items():
                found.setdefault(pid, whose)
        assert found == expected


def test_a_chain_of_ranks_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forest: Forest = {pid: {pid: [pid + 1]} for pid in range(1, 300)} | {300: {300: list(range(301, 1301))}}
    kernel = Kernel(monkeypatch, forest)
    below, session = descendants((7, ""))
    wanted: dict[int, Whose] = {pid: (session.jobs[0], pid) for pid in range(1, 301)}
    below.search(all_threads=True)
    below.find(wanted)
    assert len(wanted) == 1300
    assert len(kernel.read) == 300


def test_no_look_reads_more_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process with very many threads, one with very many children, and another owner beside them."""
    threads: Forest = {1: {tid: [] for tid in range(1, 3 * MOST_READ)}}
    threads[1][1] = list(range(100_000, 160_000))
    threads[2] = {2: [3]}
    kernel = Kernel(monkeypatch, threads | {pid: {pid: []} for pid in threads[1][1]})
    below, session = descendants((7, ""), (8, ""))
    crowd, honest = session.jobs
    found: set[int] = set()
    below.search(all_threads=True)
    for look in range(100):
        before = len(kernel.read)
        below.find(wanted := {1: (crowd, 0), 2: (honest, 0)})
        found |= wanted.keys()
        assert len(kernel.read) - before <= MOST_READ + 2 * AT_ONCE
        assert wanted.get(3) == ((honest, 0) if look == 0 else None)
    assert found == {1, 2, 3, *threads[1][1]}


def test_an_owner_without_time_waits_and_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, {1: {1: [3]}, 2: {2: [4]}})
    below, session = descendants((7, ""), (8, ""))
    crowd, honest = session.jobs
    session.look_ups.spend(crowd.owner, 1e6)
    below.search(all_threads=False)
    below.find(wanted := {1: (crowd, 0), 2: (honest, 0)})
    assert wanted.keys() == {1, 2, 4}
    assert session.losses.of(crowd) == {"look_ups_over_share": 1}
    assert not session.losses.of(honest)["look_ups_over_share"]
    session.look_ups.spend(crowd.owner, -2e6)
    kernel.read.clear()
    below.find(wanted := {1: (crowd, 0), 2: (honest, 0)})
    assert wanted.keys() == {1, 2, 3}
    assert {pid for pid, _ in kernel.read} == {1, 3}


def test_a_number_that_another_process_has_by_then_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MOST_READ", 1)
    monkeypatch.setattr(children, "AT_ONCE", 1)
    kernel = Kernel(monkeypatch, {1: {1: [3, 4]}, 4: {4: [5]}, 3: {3: [6]}})
    below, session = descendants((7, ""))
    below.search(all_threads=False)
    found: set[int] = set()
    for _ in range(6):
        below.find(wanted := {1: (session.jobs[0], 0)})
        found |= wanted.keys()
        kernel.forest[1] = {1: [4]}  # 3 has ended, and is no child of 1's now
    assert found == {1, 3, 4, 5}


def test_ranks_that_have_ended_are_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MOST_READ", 1)
    monkeypatch.setattr(children, "AT_ONCE", 1)
    kernel = Kernel(monkeypatch, {1: {1: [3, 4]}, 2: {2: [5]}})
    below, session = descendants((7, ""))
    below.search(all_threads=False)
    below.find({1: (session.jobs[0], 0), 2: (session.jobs[0], 1)})
    for _ in range(5):
        below.find(wanted := {2: (session.jobs[0], 1)})
    assert [pid for pid, _ in kernel.read] == [1, 2, 5]
    assert wanted.keys() == {2}


def nearest_below(forest: Forest, wanted: dict[int, Whose], *, all_threads: bool) -> None:
    """What ``Descendants`` adds of several owners, in the plain way: of each all that is below its ranks, down to ranks
    of others."""
    ranks = dict(wanted)
    for owner in {job.owner: 0 for job, _ in ranks.values()}:
        own = {pid: whose for pid, whose in ranks.items() if whose[0].owner == owner}
        others = ranks.keys() - own.keys()
        its = {pid: {} if pid in others else threads for pid, threads in forest.items()}
        all_below(its, own, all_threads=all_threads)
        for pid, whose in own.items():
            wanted.setdefault(pid, whose)


@pytest.mark.parametrize("all_threads", [False, True])
@pytest.mark.parametrize("most", [MOST_READ, 9])
def test_of_several_owners_all_are_found(monkeypatch: pytest.MonkeyPatch, all_threads: bool, most: int) -> None:
    """Also where their ranks are below one another, and one has no time for some looks; each process is read once."""
    monkeypatch.setattr(children, "MOST_READ", most)
    monkeypatch.setattr(children, "AT_ONCE", 2)
    rng = random.Random(9)
    for _ in range(50):
        forest = a_forest(rng, rng.choice([20, 60]))
        kernel = Kernel(monkeypatch, forest)
        owners = [(1, ""), (1, "pod"), (2, ""), (3, ""), (3, "pod")][: rng.randrange(2, 6)]
        below, session = descendants(*owners)
        pids = rng.sample(list(forest), rng.randrange(2, 20))
        ranks: dict[int, Whose] = {pid: (rng.choice(session.jobs), rank) for rank, pid in enumerate(pids)}
        expected = dict(ranks)
        nearest_below(forest, expected, all_threads=all_threads)
        below.search(all_threads=all_threads)
        found: dict[int, Whose] = dict(ranks)
        if most == MOST_READ:
            below.find(found)
            assert found == expected, "in one look"
        else:
            session.look_ups.spend(owners[0], 1e6)
        for look in range(200):
            if look == 3:
                session.look_ups.spend(owners[0], -1e7)
            before = len(kernel.read)
            below.find(wanted := dict(ranks))
            assert len(kernel.read) - before <= most + len(owners)
            for pid, whose in wanted.items():
                found.setdefault(pid, whose)
        assert found == expected
        assert len(set(kernel.read)) == len(kernel.read)
        assert not below._searches


@pytest.mark.parametrize("without_time", [True, False])
def test_no_owner_waits_for_another_s_search(monkeypatch: pytest.MonkeyPatch, without_time: bool) -> None:
    """The crowd has no time all the while, or a process with very many threads."""
    threads = {10: []} if without_time else {10 + number: [] for number in range(10 * MOST_READ)}
    kernel = Kernel(monkeypatch, {1: {1: [10]}, 10: threads, 2: {2: []}, 3: {3: []}})
    below, session = descendants((7, ""), (8, ""), (9, ""))
    crowd, honest, other = session.jobs
    ranks: dict[int, Whose] = {1: (crowd, 0), 2: (honest, 0), 3: (other, 0)}
    for look in range(8):
        if without_time:
            session.look_ups.spend(crowd.owner, 1e6)
        kernel.forest[2][2].append(100 + look)
        kernel.forest[3][3].append(200 + look)
        below.search(all_threads=True)
        below.find(wanted := dict(ranks))
        assert wanted[100 + look] == (honest, 0)
        assert wanted[200 + look] == (other, 0)
        assert below._searches.keys() == {crowd.owner}
    assert session.losses.of(crowd).get("look_ups_over_share", 0) == (8 if without_time else 0)
    assert not session.losses.of(honest).get("look_ups_over_share")
    below.find({2: (honest, 0), 3: (other, 0)})
    assert not below._searches, "an owner that is gone"


def test_a_search_that_is_put_off_is_counted_for_each_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(monkeypatch, {})
    below, session = descendants((7, ""), (7, ""), (8, ""))
    first, second, honest = session.jobs
    session.look_ups.spend(first.owner, 1e6)
    below.search(all_threads=False)
    below.find({1: (first, 0), 2: (second, 0), 4: (second, 1), 3: (honest, 0)})
    assert [session.losses.of(job)["look_ups_over_share"] for job in session.jobs] == [1, 1, 0]
    assert session.losses.totals["look_ups_over_share"] == 1


@pytest.mark.parametrize("users", [1, 1000])
def test_containers_without_end_are_one_look_s_lists(monkeypatch: pytest.MonkeyPatch, users: int) -> None:
    """Of one user, which leave the others their part; or each of another user, and all have their turn."""
    owners = [(1000 + number % users, f"pid:[{number}]") for number in range(1000)]
    # Ranks are 1 to 1,000; each has 100 threads, of which the last has a child.
    forest: Forest = {pid: {1000 * pid + more: [] for more in range(100)} for pid in range(1, 1001)}
    for pid in range(1, 1001):
        forest[pid][1000 * pid + 99] = [10_000 + pid]
    forest[2000] = {2000 + more: [] for more in range(100)} | {2100: [20_000]}
    kernel = Kernel(monkeypatch, forest)
    below, session = descendants(*owners, (8, ""))
    ranks: dict[int, Whose] = {number + 1: (job, 0) for number, job in enumerate(session.jobs[:-1])}
    honest = session.jobs[-1]
    ranks[2000] = (honest, 0)
    below.search(all_threads=True)
    found: set[int] = set()
    for look in range(40):
        before = len(kernel.read)
        below.find(wanted := dict(ranks))
        found |= wanted.keys()
        assert len(kernel.read) - before <= MOST_READ
        if users == 1:
            assert (20_000 in wanted) == (look == 0)
    assert found == {*ranks, *range(10_001, 11_001), 20_000}
    assert not below._searches
    assert session.losses.of(session.jobs[900])["look_ups_over_share"]
    if users == 1:
        assert not session.losses.of(honest)["look_ups_over_share"]


def test_what_is_below_ranks_of_very_many_owners_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has forked the next; below the last are very many. What is kept of them is kept once."""
    forest: Forest = {pid: {pid: [pid + 1]} for pid in range(1, 400)} | {400: {400: list(range(401, 5401))}}
    kernel = Kernel(monkeypatch, forest)
    below, session = descendants(*((number, "pod") for number in range(400)))
    ranks: dict[int, Whose] = {pid: (session.jobs[pid - 1], 0) for pid in range(1, 401)}
    below.search(all_threads=True)
    found: set[int] = set()
    for _ in range(200):
        below.find(wanted := dict(ranks))
        found |= wanted.keys()
        assert sum(len(search.seen) for search in below._searches.values()) <= 5401
    assert found == set(range(1, 5401))
    assert len(set(kernel.read)) == len(kernel.read)


@pytest.mark.parametrize("of_threads", [True, False])
def test_a_list_without_end_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch, of_threads: bool) -> None:
    """Of threads, or of children."""
    Kernel(monkeypatch, {})
    taken = 0

    def without_end() -> Iterator[int]:
        nonlocal taken
        for number in itertools.count(10):
            taken += 1
            assert taken < 10**6
            yield number

    monkeypatch.setattr(children, "threads_of", lambda pid, **_: without_end() if of_threads else [pid])
    monkeypatch.setattr(children, "forked_by", lambda pid, tid: [] if of_threads else without_end())
    below, session = descendants((7, ""))
    below.search(all_threads=True)
    for look in range(1, 4):
        below.find(wanted := {1: (session.jobs[0], 0)})
        assert taken <= look * MOST_READ * (1 if of_threads else AS_ONE)
        assert len(wanted) == 1 or not of_threads


def test_lists_of_the_kernel_are_read_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tid in range(20, 50):
        (tmp_path / "1" / "task" / str(tid)).mkdir(parents=True)
    numbers = list(range(90, 1200, 7))
    (tmp_path / "1" / "task" / "20" / "children").write_text("".join(f"{number} " for number in numbers))
    monkeypatch.setattr(children, "PROC", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert sorted(children.threads_of(1, all_threads=True)) == list(range(20, 50))
    assert list(children.threads_of(1, all_threads=False)) == [1]
    assert list(children.threads_of(2, all_threads=True)) == []
    assert list(children.forked_by(1, 21)) == []
    read, reads = os.read, []
    monkeypatch.setattr(children.os, "read", lambda fd, most: reads.append(most) or read(fd, 5))
    assert list(children.forked_by(1, 20)) == numbers
    reads.clear()
    forked, threads = children.forked_by(1, 20), children.threads_of(1, all_threads=True)
    assert [next(forked), next(forked)] == numbers[:2]
    next(threads)
    assert len(reads) < 5
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del forked, threads
    assert len(os.listdir("/proc/self/fd")) == before
