"""What is kept of communicators, of programs that make new ones for ever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.live.job import KEPT_COMMUNICATORS, Job
from argus.model.calls import BY_SYMBOL, CALLS, Layer
from argus.model.groups import Membership, Place
from argus.model.records import COLLECTIVE, CONTROL
from argus.semantics.groups.communicators import RankCalls, find_groups
from argus.tables.collectives import GENERATION_BITS, KEPT_ENDS, Generations

GLOO = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "AllReduce")
NCCL = BY_SYMBOL["ncclAllReduce"].id
ENDED = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "comm_end")
ADDRESS = 0x7F00_0000_1000


def called(call: int, comm: int, ts_ns: list[int]) -> NDArray[np.void]:
    rows = np.zeros(len(ts_ns), COLLECTIVE)
    rows["call"], rows["comm"], rows["ts_ns"], rows["pid"] = call, comm, ts_ns, 1
    rows["seq"] = np.arange(len(ts_ns))
    return rows


def ended(comm: int, ts_ns: list[int], call: int = ENDED) -> NDArray[np.void]:
    rows = np.zeros(len(ts_ns), CONTROL)
    rows["call"], rows["handle"], rows["ts_ns"], rows["pid"] = call, comm, ts_ns, 1
    return rows


def test_groups_at_one_address_are_distinguished_by_when_they_ended() -> None:
    generations = Generations()
    ends, calls = ended(ADDRESS, [200, 100]), called(GLOO, ADDRESS, [50, 150, 250])
    of_others = called(NCCL, ADDRESS, [250])
    generations.number(ends, calls)
    generations.number(ends[:0], of_others)
    assert (calls["comm"] >> np.uint64(GENERATION_BITS)).tolist() == [0, 1, 2]
    assert (calls["comm"] & np.uint64((1 << GENERATION_BITS) - 1)).tolist() == [ADDRESS] * 3
    assert (ends["handle"] >> np.uint64(GENERATION_BITS)).tolist() == [1, 0], "as the calls before it"
    assert of_others["comm"].tolist() == [ADDRESS]
    generations.forget([1])
    again = called(GLOO, ADDRESS, [260])
    generations.number(ends[:0], again)
    assert again["comm"].tolist() == [ADDRESS], "of another process with this number"


@pytest.mark.thorough
def test_ends_that_are_forgotten_still_count() -> None:
    generations = Generations()
    for life in range(65_538):
        if life in (0, 3 * KEPT_ENDS, 65_535, 65_536):
            calls = called(GLOO, ADDRESS, [10 * life])
            generations.number(ended(ADDRESS, []), calls)
            assert int(calls["comm"][0]) >> GENERATION_BITS == life % 65_536
        generations.number(ended(ADDRESS, [10 * life + 5]), called(GLOO, ADDRESS, []))
    assert len(generations._processes[1].addresses[ADDRESS].ends) == KEPT_ENDS


def take(job: Job, rank: int, calls: NDArray[np.void], kept: int = 64) -> None:
    """As the tracer does."""
    job.count_traffic(rank, calls, np.full(len(calls), 8, np.uint64))
    job.recent[rank] = np.concatenate([job.recent.get(rank, calls[:0]), calls])[-kept:]
    job.handles |= {(rank, comm) for comm in np.unique(calls["comm"]).tolist()}


def sizes(job: Job) -> Counter[str]:
    return Counter(
        traffic=len(job.traffic),
        handles=len(job.handles),
        placed=len(job.placed),
        named=sum(map(len, job.named.values())),
        told=sum(map(len, job.places.values())),
        ended=len(job.ended),
    )


def live(job: Job, comm: int, ts_ns: int, *, calls: int = 4) -> None:
    """A communicator of two ranks is called, and looked at."""
    for rank in (0, 1):
        rows = called(GLOO, comm, [ts_ns + i for i in range(calls)])
        rows["stream"] = 1 + np.arange(calls)
        take(job, rank, rows)
        groups = job.named.setdefault(rank, {})
        groups.setdefault(comm, Membership("0", rank, 2, max((one.turn for one in groups.values()), default=-1) + 1))
        job.places.setdefault(rank, {})[comm] = Place(comm, rank, 2)
    job.forget_old_communicators()
    ranks = [RankCalls(rank, rows, named=job.named[rank]) for rank, rows in job.recent.items()]
    job.communicators = find_groups(ranks)
    job.find_mesh()


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("ends", [True, False])
def test_a_program_that_begins_again_for_ever_takes_no_more(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.live.job.KEPT_COMMUNICATORS", 60)
    job = Job("job", 1)
    most: Counter[str] = Counter()
    groups = []
    for life in range(200):
        comm = ADDRESS + (life << GENERATION_BITS)
        live(job, comm, 1000 * life)
        newest = job.communicators[job.communicators["comm"] == comm]
        assert newest["error"].tolist() == ["", ""]
        assert len(set(newest["comm_group"].tolist())) == 1
        groups.append(int(newest["comm_group"][0]))
        most |= sizes(job)
        if ends:
            for rank in (0, 1):
                job.keep_control(rank, ended(comm, [1000 * life + 500]))
    assert len(set(groups)) == len(groups)
    assert bool(job.forgotten) is not ends
    # 64 calls a rank are kept, of 16 groups; beside them the one that is new, or as many as are kept at all.
    bound = 2 * (16 + 2) if ends else 60
    assert not {name: size for name, size in most.items() if size > bound + 2}
    assert {(each, comm) for each in (0, 1)} <= job.traffic.keys()


def test_the_one_that_is_called_is_kept_and_what_was_called_longest_ago_goes() -> None:
    job = Job("job", 1)
    old = called(NCCL, 7, [1])
    take(job, 0, old)
    for comm in range(1000, 1000 + KEPT_COMMUNICATORS):
        take(job, 0, called(NCCL, comm, [2]))
        if comm % 100 == 0:
            take(job, 0, called(NCCL, 7, [3]))
    job.forget_old_communicators()
    assert (0, 7) in job.traffic
    assert (0, 1000) not in job.traffic
    assert len(job.traffic) == KEPT_COMMUNICATORS
    assert job.forgotten == 1


def test_what_another_communicator_at_the_address_was_called_for_is_not_its_own() -> None:
    job = Job("job", 1)
    take(job, 0, called(NCCL, 7, [1, 2, 3]))
    job.keep_control(0, ended(7, [4], BY_SYMBOL["ncclCommDestroy"].id))
    assert job.traffic[0, 7].calls.total() == 3, "its last calls may show what it was for"
    job.keep_control(0, ended(7, [5], BY_SYMBOL["ncclCommInitRank"].id))
    take(job, 0, called(NCCL, 7, [6]))
    assert job.traffic[0, 7].calls.total() == 1
    assert not job.ended
