"""What else was seen of a late rank: from rows of threads to a cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from argus.diagnose.causes.contention import Compared, Sharpened, explain_jitter, sharpen
from argus.diagnose.causes.cpu_time import Cause
from argus.diagnose.causes.stacks import StackReader
from argus.diagnose.read import queries
from argus.diagnose.suspect import Suspect
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.stack_data import MS, T0, Row, py, stack, store_run, store_stacks
from tests.stores import new_store

STEP_MS, STEPS = 100, 100
LATE_MS = 20.0
PHASE = Cause("compute_straggler", "it spends 30.0 ms a step in forward, the others 10.0 ms", True, "forward")
LOADING = Cause("data_loading", "20.0 ms a step more before the copy of the batch", True)


def usage(writer: Writer, job: str, shares: dict[int, tuple[float, float, float]]) -> None:
    """Rows of thread_usage: of each rank's main thread (CPU, run queue, I/O), as shares of the time; below 0: unknown.
    A second thread of each does nothing."""
    rows = [
        (rank, tid, second, *(share if not tid else (0.0, 0.0, 0.0)))
        for rank, share in shares.items()
        for tid in (0, 1)
        for second in range(STEPS * STEP_MS // 1000)
    ]
    ns = {
        name: [round(row[place] * 1e9) if row[place] >= 0 else -1 for row in rows]
        for place, name in ((3, "cpu_ns"), (4, "runqueue_ns"), (5, "io_ns"))
    }
    writer.append("thread_usage", {
        "job": job, "run": 1, "rank": [row[0] for row in rows], "host": "node-0",
        "pid": [1000 + row[0] for row in rows],
        "tid": [1000 + row[0] + 100 * row[1] for row in rows], "thread": "python",
        "ts": [T0 + row[2] * 1000 * MS for row in rows], "interval_ns": 1000 * MS, **ns, "voluntary": 1,
        "involuntary": 5,
    })  # fmt: skip


def samples(writer: Writer, job: str, shares: dict[int, dict[str, float]]) -> None:
    """Rows of stack_samples, one a second: of each rank the share of the time in functions; "gc": collecting; "slow,
    queued": ready to run there."""
    lines = {"gc": 40, "slow": 50, "usual": 60}

    def row(rank: int, second: int, name: str, share: float) -> Row:
        function, queued = name.split(",")[0], "queued" in name
        return Row(
            rank, stack(py("<module>", 1), py(function, lines[function])), second * 1000, ns=round(share * 1000 * MS),
            last_ms=second * 1000 + 900, gc=name == "gc", kind="off" if queued else "cpu",
            reason="runqueue" if queued else "",
        )  # fmt: skip

    store_stacks(writer, [
        row(rank, second, name, share)
        for rank, functions in shares.items() for name, share in functions.items()
        for second in range(STEPS * STEP_MS // 1000)
    ], job=job)  # fmt: skip


def pauses(writer: Writer, job: str, rank: int, every: int, length_ms: float) -> None:
    where = stack(py("<module>", 1), py("gc", 40))
    steps = range(0, STEPS, every)
    writer.append("gc_pauses", {
        "job": job, "run": 1, "rank": rank, "host": "node-0", "pid": 1, "tid": 1, "thread": "python",
        "ts": [T0 + (step * STEP_MS + 10) * MS for step in steps], "duration_ns": round(length_ms * MS),
        "uncertainty_ns": MS, "generation": 2, "stack_id": np.array([where.id] * len(steps), np.uint64),
    })  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    usual = {"usual": 0.5}
    with open_store(new_store(tmp_path_factory.mktemp("contention"))) as store:
        with Writer(store, source="test") as writer:
            for job in ("collects", "queued", "busy", "disk", "slow", "kept off", "plain", "now and then"):
                store_run(writer, range(4), job=job, steps=STEPS, step_ms=STEP_MS)
            shared = {2: 0.21, 3: 0.12, 4: 0.1}, {2: 0.21, 3: 0.12, 5: 0.25}
            for job, queued in zip(("shared", "all queued"), shared, strict=True):
                store_run(writer, range(6), job=job, steps=STEPS, step_ms=STEP_MS)
                usage(writer, job, {rank: (0.3, queued.get(rank, 0.01), -1) for rank in range(6)})
            samples(writer, "collects", {0: usual, 1: usual, 2: {"usual": 0.3, "gc": 0.2}, 3: usual})
            usage(writer, "collects", dict.fromkeys(range(4), (0.5, 0.01, -1)))
            pauses(writer, "collects", 2, 1, 20)
            usage(writer, "queued", {rank: (0.3, 0.21 if rank == 2 else 0.01, -1) for rank in range(4)})
            # A machine that is busy all over: rank 2 works twice as long, and waits twice as long.
            usage(writer, "busy", {rank: (0.4, 0.4, -1) if rank == 2 else (0.2, 0.2, -1) for rank in range(4)})
            usage(writer, "disk", {rank: (0.3, 0.01, 0.2 if rank == 2 else 0.0) for rank in range(4)})
            samples(writer, "slow", {0: usual, 1: usual, 2: {"usual": 0.5, "slow": 0.19}, 3: usual})
            kept_off = {"usual": 0.5, "slow": 0.05, "slow, queued": 0.15}
            samples(writer, "kept off", {0: usual, 1: usual, 2: kept_off, 3: usual})
            samples(writer, "now and then", {rank: {"usual": 0.5, "gc": 0.01} for rank in range(4)})
            pauses(writer, "now and then", 2, 10, 150)
        yield store


def look(
    store: Store,
    job: str,
    cause: Cause = PHASE,
    late_ms: float = LATE_MS,
    *,
    others: Sequence[int] = (0, 1, 3),
    neighbours: Sequence[int] = (),
    elsewhere: Sequence[int] = (),
    idle_ms: float | None = None,
) -> Sharpened:
    params: dict[str, Any] = {"job": job, "run": 1, "first": 10, "last": STEPS - 1}
    query = partial(query_columns, store)
    idle_ns = None if idle_ms is None else idle_ms * MS
    stacks = StackReader(store, job, 1)
    compared = Compared([2], others, late_ms * MS, "rank 2", neighbours, elsewhere, idle_ns)
    seen = sharpen(query, params, cause, compared, stacks)
    for evidence in seen.evidence:
        assert len(next(iter(query(evidence["sql"], {}).values())))
    return seen


def test_of_an_interval_counts_what_lies_in_the_time(store: Store) -> None:
    """Threads' times are read every 10 s at most, and causes are looked for in any time."""
    with Writer(store, source="test") as writer:
        for second, runqueue_ms, tid in ((0, 1000, 7), (10, 4000, 7), (20, 10_000, 7), (3, 500, 8)):
            writer.append("thread_usage", {
                "job": "long", "run": 1, "rank": [2], "host": "node-0", "pid": 1, "tid": tid, "thread": f"t{tid}",
                "ts": [T0 + second * 1000 * MS], "interval_ns": 2000 * MS if tid == 8 else 10_000 * MS,
                "cpu_ns": 3 * runqueue_ms * MS, "runqueue_ns": runqueue_ms * MS, "io_ns": -1, "voluntary": 1,
                "involuntary": 40,
            })  # fmt: skip

    def counted(first_s: float, last_s: float) -> dict[str, Any]:
        at = {"from_ns": T0 + int(first_s * 1000 * MS), "to_ns": T0 + int(last_s * 1000 * MS)}
        found = query_columns(store, queries.HOST_TIME, {"job": "long", "run": 1, "ranks": [2], **at})
        return {name: column[0] for name, column in found.items() if len(column)}

    inside = counted(6, 8)
    assert (inside["runqueue_share"], inside["cpu_share"]) == pytest.approx((0.1, 0.3))
    assert inside["taken_per_s"] == pytest.approx(4.0)
    both = counted(5, 15)
    assert (both["thread"], both["io_share"]) == ("t7", -1)
    assert both["runqueue_share"] == pytest.approx((0.5 * 1 + 0.5 * 4) / 10)
    assert counted(4, 5)["thread"] == "t8", "a quarter of its time, and a tenth of the other's"
    assert counted(31, 32) == {}


def test_garbage_collection_is_named_with_its_line(store: Store) -> None:
    seen = look(store, "collects")
    assert (seen.cause.kind, seen.level) == ("gc_pause", "stack")
    (evidence,) = seen.evidence
    assert "it collects garbage for 20." in evidence["text"]
    assert "pauses of 20.0 ms were seen, of generation 2 at most, most in gc (app/train.py:40)" in evidence["text"]
    assert "gc.freeze()" in seen.action
    # Whatever the cause by calls was.
    assert look(store, "collects", LOADING).cause.kind == "gc_pause"
    assert look(store, "collects", Cause("jit_stall", "", True)).cause.kind == "jit_stall"
    # 20 ms of 60 are not what it is late by.
    assert look(store, "collects", late_ms=60).cause == PHASE


def test_waiting_for_a_cpu_is_named(store: Store) -> None:
    seen = look(store, "queued")
    assert seen.cause.kind == "host_contention"
    assert "waits 21.0 ms a step for a free CPU, against 1.00 ms" in seen.evidence[0]["text"]
    assert "taskset -pc 1002" in seen.action


def test_ranks_of_the_same_host_that_wait_as_long_are_named_too(store: Store) -> None:
    seen = look(store, "shared", others=[3, 4], neighbours=[3, 4, 5], elsewhere=[0, 1])
    assert (seen.cause.kind, seen.alike) == ("host_contention", (3,))
    assert "waits 21.0 ms a step for a free CPU, against 1.00 ms" in seen.evidence[0]["text"]
    assert seen.evidence[-1]["text"] == "rank 3 on the same hosts waits for a CPU as long"
    assert "the CPUs of ranks 2, 3 (top" in seen.action
    # Who is not late has waited as long as who is.
    assert look(store, "all queued", others=[3, 4], neighbours=[3, 4, 5], elsewhere=[0, 1]).cause == PHASE
    # All are on one host.
    seen = look(store, "shared", others=[3, 5], neighbours=[3, 4, 5])
    assert (seen.cause.kind, seen.alike) == ("host_contention", ())
    assert "against 6.50 ms" in seen.evidence[0]["text"]


def test_what_a_gpu_waits_for_is_to_be_explained_and_no_less_than_half_of_it(store: Store) -> None:
    """20 ms a step in which it waits for a CPU; half of the lateness, or of the GPU's idle time."""
    stall = Cause("kernel_issue_stall", "", True)
    kinds = [look(store, "queued", stall, 50, idle_ms=idle).cause.kind for idle in (None, 50, 38)]
    assert kinds == ["kernel_issue_stall", "kernel_issue_stall", "host_contention"]
    assert look(store, "queued", stall, 90, idle_ms=1).cause.kind == "kernel_issue_stall"


def test_waiting_as_much_as_others_for_more_work_is_no_contention(store: Store) -> None:
    assert look(store, "busy").cause == PHASE


def test_waiting_for_a_disk_is_named_unless_it_is_data_that_is_loaded(store: Store) -> None:
    seen = look(store, "disk")
    assert seen.cause.kind == "host_contention"
    assert "waits 20.0 ms a step for a disk" in seen.evidence[0]["text"]
    assert look(store, "disk", LOADING).cause == LOADING


def test_the_function_that_takes_longer_is_named(store: Store) -> None:
    seen = look(store, "slow")
    assert (seen.cause, seen.level) == (PHASE, "stack")
    assert "most from the others' in slow (app/train.py:50): 19% of its time, 0% of theirs" in seen.evidence[0]["text"]
    assert "argus export svg --rank 2 --kind all --diff rank=others" in seen.action
    # A slow GPU is not in the stacks of the CPU, and much less than half of the lateness no explanation.
    assert look(store, "slow", Cause("compute_straggler", "", True)).evidence == []
    assert look(store, "slow", late_ms=60).evidence == []


def test_a_function_that_gets_no_cpu_is_not_reported_as_busy(store: Store) -> None:
    (evidence,) = look(store, "kept off").evidence
    assert "in slow (app/train.py:50): 20% of its time, 0% of theirs, 20.0 ms a step more" in evidence["text"]
    assert evidence["text"].endswith("; for 75% of that it is ready to run, and no CPU is free")
    assert "ready to run" not in look(store, "slow").evidence[0]["text"]


def test_nothing_is_reported_where_nothing_is_known(store: Store) -> None:
    assert look(store, "plain") == Sharpened(PHASE, [])


def jitter(steps: list[int], lost_ms: float, rank: int = 2) -> Suspect:
    return Suspect("jitter", [rank], [], steps[0], steps[1], lost_ms * MS, 1.2, 1.0, "iteration", [], "")


def test_jitter_is_garbage_collection_where_that_takes_the_time(store: Store) -> None:
    query, params = partial(query_columns, store), {"job": "now and then", "run": 1, "first": 0, "last": STEPS}
    found = jitter([0, STEPS - 1], 15)
    explain_jitter(query, params, found, STEPS)
    assert (found.kind, found.level) == ("gc_pause", "stack")
    assert "it collected garbage 10 times in that time, for 150 ms each" in found.further[0]["text"]
    for other in (jitter([0, STEPS - 1], 40), jitter([0, STEPS - 1], 15, rank=1)):
        explain_jitter(query, params, other, STEPS)
        assert other.kind == "jitter"
