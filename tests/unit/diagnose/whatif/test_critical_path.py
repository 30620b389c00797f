"""Critical paths of small made-up jobs of which the path is obvious."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from argus.diagnose.whatif.critical_path import (
    CALL,
    COMMUNICATING,
    COMPUTING,
    COPY,
    COPYING,
    IDLE,
    KERNEL,
    LOADING,
    WAITING,
    CriticalPath,
    Segment,
    Work,
    through,
    walk,
)
from argus.diagnose.whatif.rebuild import build
from argus.diagnose.whatif.stored_paths import read_paths
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.timeline_job import NCCL, T0, TimelineJob, store_timeline
from tests.unit.diagnose.whatif.test_rebuild import MS, workers

NAMES = ("gemm", "adam", "nccl", "copy")
GEMM, ADAM, REDUCE, LOAD = range(4)
Operation = tuple[int, int, int, int, int]
"""Begin, end (ms), kind, call, name."""


def work(*operations: Operation) -> Work:
    begin, end, kind, call, name = np.array(operations, np.int64).reshape(-1, 5).T
    return Work(begin * 1_000_000, end * 1_000_000, kind, call, name, NAMES)


def shown(path: tuple[Segment, ...]) -> list[tuple[int, str, float, float]]:
    """Segments in ms."""
    return [(own.rank, own.what, own.begin_ns / MS, own.end_ns / MS) for own in path]


def steps(length_ms: int, ranks: int) -> dict[int, tuple[int, int]]:
    return dict.fromkeys(range(ranks), (0, length_ms * 1000000))


def test_the_path_goes_over_the_rank_that_others_wait_for() -> None:
    works = {
        rank: work((0, late, KERNEL, 0, GEMM), (late, 52, CALL, 7, REDUCE), (52, 60, KERNEL, 0, ADAM))
        for rank, late in enumerate((20, 20, 50, 20))
    }
    path = walk(works, steps(60, 4))
    assert shown(path) == [(2, COMPUTING, 0, 50), (0, COMMUNICATING, 50, 52), (0, COMPUTING, 52, 60)]
    assert [own.name for own in path] == ["gemm", "nccl", "adam"]
    whole = CriticalPath(3, path)
    assert whole.by_rank() == {2: 50_000_000, 0: 10_000_000}
    assert whole.by_what() == {COMPUTING: 58_000_000, COMMUNICATING: 2_000_000}
    assert whole.length_ns == 60_000_000


def test_a_pipeline_is_followed_back_from_stage_to_stage() -> None:
    """Each stage waits for what the one before it sends; then the gradients of the first come back."""
    works = {
        0: work((0, 10, KERNEL, 0, GEMM), (10, 11, CALL, 1, REDUCE), (11, 43, CALL, 4, REDUCE),
                (43, 53, KERNEL, 0, ADAM)),
        1: work((0, 11, CALL, 1, REDUCE), (11, 21, KERNEL, 0, GEMM), (21, 22, CALL, 2, REDUCE),
                (22, 42, KERNEL, 0, GEMM), (42, 43, CALL, 4, REDUCE)),
    }  # fmt: skip
    assert shown(walk(works, {0: (0, 53 * 1_000_000), 1: (0, 43 * 1_000_000)})) == [
        (0, COMPUTING, 0, 10), (1, COMMUNICATING, 10, 11), (1, COMPUTING, 11, 21), (1, WAITING, 21, 22),
        (1, COMPUTING, 22, 42), (0, COMMUNICATING, 42, 43), (0, COMPUTING, 43, 53),
    ]  # fmt: skip


def test_waiting_for_data_comes_before_the_forward_pass() -> None:
    works = {
        0: work((5, 25, KERNEL, 0, GEMM), (25, 42, CALL, 7, REDUCE)),
        1: work((20, 40, KERNEL, 0, GEMM), (40, 42, CALL, 7, REDUCE)),
    }
    loading = {0: 0, 1: 18_000_000}
    assert shown(walk(works, steps(42, 2), loading_ns=loading)) == [
        (1, LOADING, 0, 20), (1, COMPUTING, 20, 40), (0, COMMUNICATING, 40, 42),
    ]  # fmt: skip
    assert walk(works, steps(42, 2), loading_ns={1: 2_000_000})[0].what == IDLE, "most of the gap was something else"


def test_communication_that_work_hides_is_not_on_the_path() -> None:
    works = {
        0: work((0, 30, KERNEL, 0, GEMM), (5, 25, CALL, 7, REDUCE), (30, 31, COPY, 0, LOAD)),
        1: work((0, 24, KERNEL, 0, GEMM), (24, 25, CALL, 7, REDUCE)),
    }
    assert shown(walk(works, {0: (0, 31_000_000), 1: (0, 25_000_000)})) == [(0, COMPUTING, 0, 30), (0, COPYING, 30, 31)]


def test_who_came_later_by_less_than_the_clocks_may_be_off_did_not_come_later() -> None:
    works = {
        0: work((0, 10, KERNEL, 0, GEMM), (10, 15, CALL, 7, REDUCE)),
        1: work((0, 12, KERNEL, 0, GEMM), (12, 15, CALL, 7, REDUCE)),
    }
    assert shown(walk(works, steps(15, 2)))[0] == (1, COMPUTING, 0, 12)
    unsure = walk(works, steps(15, 2), apart_ns=lambda one, other: 3_000_000)
    assert shown(unsure) == [(0, COMPUTING, 0, 10), (0, COMMUNICATING, 10, 15)]


def test_a_call_whose_other_ranks_are_not_known_is_waiting() -> None:
    assert shown(walk({5: work((0, 10, KERNEL, 0, GEMM), (10, 15, CALL, 0, REDUCE))}, {5: (0, 15_000_000)})) == [
        (5, COMPUTING, 0, 10), (5, WAITING, 10, 15),
    ]  # fmt: skip


def test_short_gaps_are_no_segments_and_nothing_is_a_path_too() -> None:
    begins = np.arange(100) * 100_000
    many = Work(
        begins, begins + 95_000, np.zeros(100, np.int64), np.zeros(100, np.int64), np.zeros(100, np.int64), NAMES
    )
    path = walk({0: many}, {0: (0, 10_000_000)})
    assert shown(path) == [(0, COMPUTING, 0, 10.0)]
    assert walk({}, {}) == ()
    assert shown(walk({0: work()}, {0: (0, 5_000_000)})) == [(0, IDLE, 0, 5)]


@pytest.mark.parametrize("seed", range(8))
def test_a_path_covers_its_step_without_overlap_and_ends(seed: int) -> None:
    """Whatever is recorded: also calls that end before others enter, as wrong clocks have it."""
    rng = np.random.default_rng(seed)
    works, spans = {}, {}
    for rank in range(5):
        count = int(rng.integers(0, 60))
        begin = np.sort(rng.integers(0, 10**6, count))
        kind = rng.integers(0, 3, count)
        call = np.where(kind == CALL, rng.integers(0, 12, count), 0)
        works[rank] = Work(begin, begin + rng.integers(0, 10**5, count), kind, call, np.zeros(count, np.int64), NAMES)
        spans[rank] = 0, int(rng.integers(10**6, 2 * 10**6))
    path = walk(works, spans)
    assert path[-1].end_ns == max(end for _, end in spans.values())
    assert path[0].begin_ns == 0
    for one, following in pairwise(path):
        assert one.end_ns == following.begin_ns
        assert one.end_ns > one.begin_ns


# ---- through a model


def of_model(model: Any, place: int = 0) -> list[tuple[int, str, str, float, float]]:
    return [(own.rank, own.what, own.name, own.begin_ns / MS, own.end_ns / MS) for own in through(model, place)]


def test_the_slow_worker_of_a_model_is_on_the_path() -> None:
    known = workers(1, 3, 1)
    known.backward[0, 1] *= 2
    path = of_model(build(known, 1, 1))
    assert path == [
        (1, COMPUTING, "forward-compute", 0, 10), (1, COMPUTING, "backward-compute", 10, 50),
        (path[-1][0], COMPUTING, "optimizer", 50, 55),
    ]  # fmt: skip


def test_idle_comes_before_the_forward_pass_of_a_model() -> None:
    known = workers(1, 2, 1)
    idle = known.idle.copy()
    idle[0, 1] = 7 * MS
    path = of_model(build(replace(known, idle=idle), 1, 1))
    assert path[:2] == [(1, IDLE, "idle", 0, 7), (1, COMPUTING, "forward-compute", 7, 17)]


def test_a_pipeline_of_a_model_is_as_long_as_its_step() -> None:
    known = workers(4, 2, 4)
    model = build(replace(known, transfer=known.transfer + 1 * MS), 1, 4)
    path = through(model, 3, 1_000)
    step_ns = model.times_ns(np.ones((1, *model.actual_ns.shape[:2]), bool))[0][0, 3]
    assert sum(own.length_ns for own in path) == pytest.approx(step_ns)
    assert path[0].begin_ns == 1_000
    ranks = [own.rank // 2 for own in path]
    assert ranks[0] == 0
    assert max(ranks) == 3, "the first batch has to reach the last stage"
    assert {own.what for own in path} == {COMPUTING, COMMUNICATING}


# ---- of a store


def read(store: Store, job: str, steps: tuple[int, int], **options: Any) -> Any:
    return read_paths(partial(query_columns, store), job, 1, steps, **options)


def test_what_was_recorded_of_a_straggler(store: Store) -> None:
    job = TimelineJob(ranks=3, steps=2, slow={1: 2.0}, loading_ns={1: 3_000_000})
    store_timeline(store, job)
    paths = read(store, "made", (0, 1))
    assert (len(paths.steps), paths.measured, paths.why_not) == (2, True, "")
    begin, enters, reduced = job.begins()
    for step, path in enumerate(paths.steps):
        assert [(own.rank, own.what) for own in path.segments] == [
            (1, LOADING), (1, COMPUTING), (0, COMMUNICATING), (0, COMPUTING),
        ]  # fmt: skip
        assert path.segments[0].begin_ns == begin[step]
        assert path.segments[2].begin_ns == enters[step].max()
        assert path.segments[2].name == NCCL
        assert path.segments[3].end_ns == reduced[step] + job.GAP_NS + job.OPTIMIZER_NS


def test_why_there_is_none(store: Store) -> None:
    assert "no GPU times" in read(store, "made", (0, 1)).why_not
    store_timeline(store, TimelineJob(gpu=False))
    paths = read(store, "made", (0, 1))
    assert not paths.steps
    assert "no GPU times of these steps are stored" in paths.why_not
    assert "too few to rebuild" in paths.why_not
    assert "only some were chosen" in read(store, "made", (0, 1), ranks=(1,)).why_not
    assert "more than 50" in read(store, "made", (0, 1000)).why_not


def test_operations_that_are_not_all_stored_are_not_taken_for_idle_time(store: Store) -> None:
    store_timeline(store, TimelineJob())
    with store.lease() as client:
        client.command("DELETE FROM kernel_events WHERE name = 'gemm' AND rank = 1")
    assert "of some operations of rank 1's GPU nothing is stored" in read(store, "made", (0, 2)).why_not


def test_a_simulated_pipeline_is_rebuilt(store: Store) -> None:
    made = write(store, "simulated", Spec(Mesh(dp=2, tp=1, pp=2), Program(), steps=30), run=1)
    assert made.run == 1
    paths = read(store, "simulated", (27, 29))
    assert not paths.measured
    assert len(paths.steps) == 3, paths.why_not
    for path in paths.steps:
        assert path.length_ns == pytest.approx(made.step_ns[path.step], rel=0.15)
        assert len(path.by_rank()) > 1


def test_recorded_operations_are_followed_by_their_dependencies(store: Store) -> None:
    """Two data-parallel ranks; rank 1's backward pass is longer, and all reduce and optimise together after it."""
    with Writer(store, source="test") as writer:
        for rank, back_ms in ((0, 20), (1, 35)):
            ops = (("forward-compute", 0, 10), ("backward-compute", 10, 10 + back_ms),
                   ("grads-reduce-scatter", 10 + back_ms, 50), ("optimizer", 50, 55))  # fmt: skip
            begin = np.array([own[1] for own in ops]) * 1_000_000 + T0
            end = np.array([own[2] for own in ops]) * 1_000_000 + T0
            writer.append("phase_ops", {
                "job": "made", "run": 1, "rank": rank, "step": 3, "host": "node-0", "stage": 0, "dp_rank": rank,
                "op": [own[0] for own in ops], "seq": 0, "microbatch": -1, "chunk": 0, "global_chunk": 0, "ts": begin,
                "ts_end": end, "duration_ns": end - begin,
            })  # fmt: skip
        assert writer.flush(), writer.last_error
    paths = read(store, "made", (3, 3))
    assert (paths.measured, paths.why_not) == (False, "")
    (path,) = paths.steps
    first = [(own.rank, own.name, (own.begin_ns - T0) / MS, (own.end_ns - T0) / MS) for own in path.segments]
    assert first[:2] == [(1, "forward-compute", 0, 10), (1, "backward-compute", 10, 45)]
    assert [name for _, name, *_ in first[2:]] == ["grads-reduce-scatter", "optimizer"]
    assert path.length_ns == 55_000_000


def test_sends_meet_receives_by_pair_and_turn(store: Store) -> None:
    """Stage 0 computes, sends, and waits for what comes back from stage 1: the path goes there and back."""
    ms = 1_000_000
    # Begin and end of each operation of each rank, ms; those of NCCL with their call.
    done = {
        0: [(0, 10, "gemm", ""), (10, 12, NCCL, "Send"), (12, 34, NCCL, "Recv"), (34, 40, "gemm", "")],
        1: [(0, 12, NCCL, "Recv"), (12, 32, "gemm", ""), (32, 34, NCCL, "Send")],
    }
    with Writer(store, source="test") as writer:
        for rank, ops in done.items():
            own = {"job": "made", "run": 1, "rank": rank, "host": "node-0"}
            begin, end = (np.array([op[place] for op in ops]) * ms + T0 for place in (0, 1))
            writer.append("communicators", {
                "job": "made", "run": 1, "rank": rank, "comm": 5 + rank, "comm_group": 77, "comm_rank": rank,
                "nranks": 2, "seq_offset": 0, "joined_by": "unique_id", "error": "", "version": 1,
            })  # fmt: skip
            writer.append("kernel_events", {
                **own, "pid": 1, "device": 0, "context": 1, "stream": 7, "kind": "kernel",
                "name": [op[2] for op in ops], "ts": begin, "duration_ns": end - begin,
                "launch_ts": begin - 10_000, "issue_latency_ns": 10_000,
                "launch_tid": 9, "launch_probed": True, "correlation": 1, "graph": 0, "graph_node": 0,
                "grid": [[]] * len(ops), "block": [[]] * len(ops), "registers": 0, "shared_static": 0,
                "shared_dynamic": 0, "bytes": 0,
            })  # fmt: skip
            called = [place for place, op in enumerate(ops) if op[3]]
            writer.append("collectives", {
                **own, "pid": 1, "tid": 9, "comm": 5 + rank, "op": [ops[place][3] for place in called], "seq": 0,
                "bytes": 4, "count": 1, "dtype": "float32", "redop": "", "peer": 1 - rank, "stream": 7,
                "ts": begin[called] - 12_000, "duration_ns": 5_000, "result": 0, "in_group": False,
            })  # fmt: skip
            length = end[-1:] - begin[:1]
            writer.append("gpu_steps", {
                **own, "pid": 1, "device": 0, "step": 0, "ts": begin[:1], "duration_ns": length, "busy_ns": length,
                "compute_ns": 0, "communication_ns": 0, "exposed_communication_ns": 0, "overlapped_communication_ns": 0,
                "memcpy_ns": 0, "idle_ns": 0, "idle_gaps": 0, "largest_gap_ns": 0, "kernels": 3,
                "queue_depth_mean": -1.0, "queue_depth_max": -1, "issue_latency_p50_ns": -1, "issue_latency_p99_ns": -1,
                "void_share": 0.0,
            })  # fmt: skip
        assert writer.flush(), writer.last_error
    (path,) = read(store, "made", (0, 0)).steps
    assert [(own.rank, own.what, (own.begin_ns - T0) // ms, (own.end_ns - T0) // ms) for own in path.segments] == [
        (0, COMPUTING, 0, 10), (1, COMMUNICATING, 10, 12), (1, COMPUTING, 12, 32), (0, COMMUNICATING, 32, 34),
        (0, COMPUTING, 34, 40),
    ]  # fmt: skip
