"""What communicators are for, from traffic of the shapes that frameworks make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.live.job import Job
from argus.live.sides.step_rows import StepRows
from argus.model.calls import BY_SYMBOL
from argus.model.records import CONTROL
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.groups.mesh import (
    MAX_PEERS,
    MAX_SIZES,
    Group,
    Traffic,
    describe,
    find_mesh,
    sizes_in,
    superseded,
)
from argus.store.open import open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.sessions import a_session
from tests.stores import new_store

MB = 1 << 20


class Cluster:
    """A job's communicators and what is sent in them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rows: list[tuple[int, int, int, int]] = []
        self.traffic: dict[tuple[int, int], Traffic] = {}
        self._next = 100

    def group(self, ranks: Iterable[int], calls: dict[tuple[str, int], int]) -> None:
        """A communicator of these ranks, in which each of them makes these calls: (operation, bytes) → how often."""
        members = list(ranks)
        self._next += 1
        for rank in members:
            own = self.traffic[rank, self._next] = Traffic()
            self.rows.append((rank, self._next, self._next * 7, len(members)))
            for (op, nbytes), count in calls.items():
                own.add(op, nbytes, -1, count)

    def pipeline(self, ranks: Iterable[int], *, ring: bool = False, count: int = 100) -> None:
        """Neighbours send and receive; ``ring``: one way round only."""
        members = list(ranks)
        self._next += 1
        for place, rank in enumerate(members):
            own = self.traffic[rank, self._next] = Traffic()
            self.rows.append((rank, self._next, self._next * 7, len(members)))
            up, down = (place + 1) % len(members), (place - 1) % len(members)
            if ring or place + 1 < len(members):
                own.add("Send", 8 * MB, up, count)
            if ring or place > 0:
                own.add("Recv", 8 * MB, down, count)
            if not ring and place > 0:
                own.add("Send", 8 * MB, down, count)
            if not ring and place + 1 < len(members):
                own.add("Recv", 8 * MB, up, count)

    def communicators(self) -> NDArray[np.void]:
        out = np.zeros(len(self.rows), COMMUNICATOR)
        for place, (rank, comm, group, size) in enumerate(self.rows):
            out[place] = (rank, comm, group, -1, size, 0, "unique_id", "")
        return out

    def find(self, command: str = "") -> list[Group]:
        return find_mesh(self.communicators(), self.traffic, world=self.world, command=command)

    def guessed(self) -> list[Group]:
        """What is found where nobody saw the communicators being made."""
        rows = self.communicators()
        rows["joined_by"] = "traffic"
        return find_mesh(rows, self.traffic, world=self.world)

    def dimensions(self, command: str = "") -> dict[str, list[tuple[int, ...]]]:
        found: dict[str, list[tuple[int, ...]]] = {}
        for group in self.find(command):
            found.setdefault(group.dimension, []).append(group.ranks)
        return found


BUCKETS = {("AllReduce", 25 * MB): 400, ("AllReduce", 7 * MB): 100}
NORM = {("AllReduce", 4): 100}
ACTIVATIONS = {("AllReduce", 16 * MB): 100 * 4 * 24}


def test_data_parallel_alone() -> None:
    job = Cluster(4)
    job.group(range(4), {**BUCKETS, ("AllReduce", 4): 100, ("Broadcast", 90 * MB): 1})
    assert job.dimensions() == {"dp": [(0, 1, 2, 3)]}


def test_sharded_parameters() -> None:
    job = Cluster(4)
    layers = {("AllGather", 50 * MB): 100, ("AllGather", 12 * MB): 100 * 64, ("ReduceScatter", 50 * MB): 100}
    job.group(range(4), {**layers, ("ReduceScatter", 12 * MB): 100 * 32})
    job.group(range(4), NORM)
    assert job.dimensions() == {"fsdp": [(0, 1, 2, 3)], "world": [(0, 1, 2, 3)]}


def test_tensor_and_data_parallel() -> None:
    job = Cluster(8)
    for first in (0, 4):
        job.group(range(first, first + 4), ACTIVATIONS)
    for place in range(4):
        job.group((place, place + 4), BUCKETS)
    job.group(range(8), NORM)
    assert job.dimensions() == {
        "tp": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "world": [tuple(range(8))],
    }


def test_tensor_parallel_with_sequences_and_sharded_data_parallel() -> None:
    """Both gather and scatter: activations for each layer among neighbours, parameters among the others."""
    job = Cluster(8)
    for first in (0, 4):
        job.group(range(first, first + 4), {("AllGather", 4 * MB): 14400, ("ReduceScatter", 4 * MB): 9600})
    for place in range(4):
        job.group((place, place + 4), {("AllGather", 30 * MB): 1000, ("ReduceScatter", 30 * MB): 500})
    assert job.dimensions() == {
        "tp": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "fsdp": [(0, 4), (1, 5), (2, 6), (3, 7)],
    }


def test_sharded_inside_a_node_and_replicated_between_nodes() -> None:
    """Hybrid sharding: gathers of each layer inside, all-reduces of large buckets between."""
    job = Cluster(8)
    for first in (0, 4):
        job.group(range(first, first + 4), {("AllGather", 30 * MB): 6400, ("ReduceScatter", 30 * MB): 3200})
    for place in range(4):
        job.group((place, place + 4), {("AllReduce", 30 * MB): 200})
    assert job.dimensions() == {
        "fsdp": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
    }


def test_pipelines() -> None:
    job = Cluster(4)
    job.pipeline(range(4))
    job.group(range(4), NORM)
    assert job.dimensions() == {"pp": [(0, 1, 2, 3)], "world": [(0, 1, 2, 3)]}


def test_two_stages() -> None:
    job = Cluster(2)
    job.pipeline(range(2))
    assert job.dimensions() == {"pp": [(0, 1)]}


def test_all_three() -> None:
    job = Cluster(8)
    for first in range(0, 8, 2):
        job.group((first, first + 1), ACTIVATIONS)
    for first in (0, 1, 4, 5):
        job.group((first, first + 2), BUCKETS)
    for first in range(4):
        job.pipeline((first, first + 4))
    job.group(range(8), NORM)
    assert job.dimensions() == {
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "dp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "world": [tuple(range(8))],
    }
    assert describe(job.find())[0] == "mesh: tp 2 x dp 2 x pp 2"


def test_experts() -> None:
    job = Cluster(4)
    job.group(range(4), {("AlltoAll", 8 * MB): 3200, ("AllGather", 64): 800})
    job.group(range(4), BUCKETS)
    assert job.dimensions() == {"ep": [(0, 1, 2, 3)], "dp": [(0, 1, 2, 3)]}


def test_a_ring_of_attention_is_no_pipeline() -> None:
    job = Cluster(4)
    job.pipeline(range(4), ring=True, count=3000)
    assert job.dimensions() == {"cp": [(0, 1, 2, 3)]}


def test_a_communicator_that_was_there_before_stands_for_itself() -> None:
    """Only sends and receives: nothing lines them up with other ranks'."""
    job = Cluster(2)
    job.pipeline(range(2))
    job.rows.clear()
    assert job.dimensions() == {"pp": [(0,), (1,)]}
    assert {group.size for group in job.find()} == {-1}


def test_parallel_groups_that_were_there_before_are_a_guess() -> None:
    job = Cluster(4)
    for first in (0, 2):
        job.group(range(first, first + 2), ACTIVATIONS)
    job.group(range(4), BUCKETS)
    assert min(group.confidence for group in job.find()) > 0.6
    rows = job.communicators()
    rows["joined_by"] = "traffic"
    found = find_mesh(rows, job.traffic, world=4)
    assert {group.confidence for group in found} == {0.4}
    assert all("guess" in group.why for group in found)


def test_the_command_line_decides_where_the_ranks_are_its() -> None:
    job = Cluster(8)
    for first in range(0, 8, 2):
        job.group((first, first + 1), {("AllReduce", 16 * MB): 100})
    for first in (0, 1):
        job.group(range(first, 8, 2), {("AllReduce", 25 * MB): 100})
    # As often: nothing distinguishes them but what was asked for.
    assert set(job.dimensions()) == {"dp"}
    reported = "python pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1"
    assert job.dimensions(reported) == {"tp": [(0, 1), (2, 3), (4, 5), (6, 7)], "dp": [(0, 2, 4, 6), (1, 3, 5, 7)]}
    assert max(group.confidence for group in job.find(reported)) == 0.95


def test_sizes_on_a_command_line() -> None:
    words = "x --tensor-model-parallel-size 4 --pipeline-model-parallel-size=8 --context-parallel-size two"
    assert sizes_in(words) == {"tp": 4, "pp": 8}
    assert sizes_in("--my-tensor-model-parallel-size 4 --tp-size 4x") == {}


def test_what_says_nothing_is_unknown() -> None:
    job = Cluster(4)
    job.group((0, 1), NORM)
    job.group((2,), BUCKETS)
    assert job.dimensions() == {"unknown": [(0, 1), (2,)]}


def test_sizes_are_bounded() -> None:
    one = Traffic()
    for size in range(3 * MAX_SIZES):
        one.add("AllReduce", 1 + size, -1, 2)
    assert len(one.calls) <= MAX_SIZES + 1
    assert one.calls.total() == 6 * MAX_SIZES


def test_peers_are_bounded() -> None:
    """Whoever calls names any number as the peer, and none of the calls is lost."""
    one = Traffic()
    for peer in range(10 * MAX_PEERS):
        one.add("Send", 4, peer, 2)
        one.add("Recv", 4, peer, 3)
    assert len(one.sent) == len(one.received) == MAX_PEERS + 1
    assert (one.sent.total(), one.received.total()) == (20 * MAX_PEERS, 30 * MAX_PEERS)


class AllPeers(Traffic):
    """Remembers each peer."""

    def add(self, op: str, nbytes: int, peer: int, count: int) -> None:
        self.calls[op, nbytes] += count
        if op == "Send":
            self.sent[peer] += count
        elif op == "Recv":
            self.received[peer] += count


def test_what_sends_and_receives_are_for_does_not_depend_on_how_many_peers_are_remembered() -> None:
    """Pipelines, rings, and exchanges among all, some of them with more peers than are remembered."""
    rng = np.random.default_rng(8)
    seen: Counter[str] = Counter()
    for _ in range(300):
        size = int(rng.choice([2, 3, 4, 2 * MAX_PEERS, 5 * MAX_PEERS]))
        shape = rng.choice(["ring", "pipeline", "all", "some"])
        found = []
        sent = [
            (rank, peer)
            for rank in range(size)
            for peer in range(size)
            if {
                "ring": peer == (rank + 1) % size,
                "pipeline": abs(peer - rank) == 1,
                "all": peer != rank,
                "some": bool(rng.integers(3) == 0),
            }[str(shape)]
        ]
        for kind in (Traffic, AllPeers):
            job = Cluster(size)
            for rank in range(size):
                job.traffic[rank, 1] = kind()
                job.rows.append((rank, 1, 7, size))
            for rank, peer in sent:
                job.traffic[rank, 1].add("Send", MB, peer, 3)
                job.traffic[peer, 1].add("Recv", MB, rank, 3)
            found.append(job.find())
        assert found[0] == found[1]
        seen.update(group.dimension for group in found[0])
    assert set(seen) == {"cp", "pp"}


def test_nothing_sent_is_no_mesh() -> None:
    assert find_mesh(np.empty(0, COMMUNICATOR), {}, world=4) == []
    assert describe([]) == []
    job = Cluster(2)
    job.group((0, 1), {})
    assert job.find() == []


def test_the_mesh_in_words() -> None:
    job = Cluster(16)
    for first in range(0, 16, 2):
        job.group((first, first + 1), ACTIVATIONS)
    for first in (0, 1):
        job.group(range(first, 16, 2), BUCKETS)
    assert describe(job.find()) == [
        "mesh: tp 2 x dp 8",
        "  tp    tensor parallel: ranks 0,1 · 2,3 · 4,5 · 6,7 and 4 more (19 times as often as among other ranks, in "
        "one size)",
        "  dp    data parallel: ranks 0,2..14 · 1,3..15 (all-reduces, in 2 sizes)",
    ]


def test_a_guess_is_not_reported_as_a_fact() -> None:
    """Pairs that always end together are taken for one communicator, where nobody saw them made."""
    job = Cluster(4)
    job.group((0, 1, 2, 3), ACTIVATIONS)
    job.group((0, 1, 2, 3), BUCKETS)
    lines = describe(job.guessed())
    assert lines[0] == "mesh: dp 4?"
    assert all("is a guess from equal calls: it was made before Argus came" in line for line in lines[1:])
    job = Cluster(4)
    job.group((0, 1, 2, 3), BUCKETS)
    assert describe(job.guessed())[0] == "mesh: dp 4", "there is nothing to confuse it with"


@pytest.mark.parametrize("joined_by", ["traffic", "memory"])
def test_a_group_that_was_a_guess_is_not_left_in_the_store(tmp_path: Path, joined_by: str) -> None:
    """Ranks 1 and 2 call first; then rank 0 is seen to be one of them, and gives the group its name."""
    cluster = Cluster(3)
    cluster.group(range(3), BUCKETS)
    cluster.group(range(2), BUCKETS)
    rows = cluster.communicators()
    rows["joined_by"][:3] = joined_by
    two = rows[1:].copy()
    two["comm_group"][:2] += 1
    job = Job("j", 1, traffic=cluster.traffic)
    with open_store(new_store(tmp_path)) as store:
        writer = Writer(store, source="test")
        steps = StepRows(a_session(writer), SimpleNamespace())  # type: ignore[arg-type]
        sql = "SELECT ranks FROM parallel_groups FINAL ORDER BY ranks"
        stored = []
        # At last the second communicator, whose making was seen, is destroyed, and another one is made in its place.
        again = rows.copy()
        again["comm_group"][3:] += 1
        for job.communicators in (two, rows, again, again[3:]):
            steps.store_mesh(job)
            assert writer.flush(), writer.last_error
            stored.append([list(ranks) for ranks in query_columns(store, sql)["ranks"].tolist()])
    assert stored == [
        [[0], [0, 1], [1, 2]],
        [[0, 1], [0, 1, 2]],
        [[0, 1], [0, 1], [0, 1, 2]],
        [[0, 1], [0, 1], [0, 1, 2]],
    ]


@pytest.mark.parametrize("joined_by", ["traffic", "memory"])
def test_a_group_from_before_the_trace_stays_in_the_store_when_another_has_its_addresses(
    tmp_path: Path, joined_by: str
) -> None:
    cluster = Cluster(2)
    cluster.group(range(2), BUCKETS)
    rows = cluster.communicators()
    rows["joined_by"] = joined_by
    again = rows.copy()
    again["comm_group"] += 1
    again["joined_by"] = "unique_id"
    job = Job("j", 1, traffic=dict(cluster.traffic))
    with open_store(new_store(tmp_path)) as store:
        writer = Writer(store, source="test")
        steps = StepRows(a_session(writer), SimpleNamespace())  # type: ignore[arg-type]
        for job.communicators in (rows, again):
            steps.store_mesh(job)
            for rank, handle in cluster.traffic:
                events = np.zeros(2, CONTROL)
                events["call"] = [BY_SYMBOL[name].id for name in ("ncclCommDestroy", "ncclCommInitRank")]
                events["handle"] = handle
                job.keep_control(rank, events)
            job.traffic |= cluster.traffic
        assert writer.flush(), writer.last_error
        stored = query_columns(store, "SELECT comm_group FROM parallel_groups FINAL")["comm_group"].tolist()
    assert sorted(stored) == [rows["comm_group"][0], again["comm_group"][0]]


def test_a_communicator_whose_making_is_reported_after_its_calls_supersedes_the_guess() -> None:
    cluster = Cluster(2)
    cluster.group(range(2), BUCKETS)
    before = find_mesh(cluster.communicators()[:0], cluster.traffic, world=2)
    assert [group.ranks for group in before] == [(0,), (1,)]
    assert superseded(before, cluster.find()) == before


def test_shards_of_a_small_model_have_sizes() -> None:
    cluster = Cluster(2)
    cluster.group((0, 1), {("AllGather", 4096): 9, ("AllGather", 512): 9, ("ReduceScatter", 512): 9})
    assert [group.why for group in cluster.find()] == ["all-gathers and reduce-scatters, in 2 sizes"]
