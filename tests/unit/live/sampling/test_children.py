"""What ranks have forked: each process is read once, however ranks lie below one another, and few in one look."""

from __future__ import annotations

import random
from typing import Any

import pytest

from argus.live.job import Job
from argus.live.sampling import children
from argus.live.sampling.children import AT_ONCE, MOST_READ, Descendants, Whose
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
