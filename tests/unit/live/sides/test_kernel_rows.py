"""What of the GPUs' operations is stored one by one, and how they come to be in their steps."""

from __future__ import annotations

import json
from collections import Counter as Tally
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.export.perfetto import Moment, moment_of, write_perfetto
from argus.live.job import Job
from argus.live.sides import kernel_rows as kernels_module
from argus.live.sides.flags import FAR_NS, FlagWatcher
from argus.live.sides.kernel_rows import FLAG_S, KernelSide
from argus.live.sides.recorder import FlightRecorder, called_ns
from argus.model.errors import ArgusError
from argus.model.records import GPU_LAUNCH_MATCHED, GPU_OP, GpuKind
from argus.semantics.gpu import kernel_steps
from argus.semantics.gpu.kernel_steps import (
    KEPT_NS,
    KEPT_OPS,
    NEW_SHAPES,
    NO_STEP,
    KernelGroups,
    KernelSteps,
    describe,
    size_text,
)
from argus.store.flags import Flag, flag
from argus.store.open import open_store
from argus.store.read.stacks import Selection
from argus.store.schema import ensure_schema
from argus.store.writer import Writer
from argus.tables.gpu import Names
from tests.builders.sessions import Rows, a_session
from tests.stores import new_store

S, MS, US = 1_000_000_000, 1_000_000, 1_000
OFFSET = 1_700_000_000 * S
STEP_NS = 10 * MS
RNG = np.random.default_rng(7)


def ops(start_ns: NDArray[np.int64], took_ns: int = 5 * US, **fields: Any) -> NDArray[np.void]:
    """Operations that began then and were asked for 100 us before."""
    out = np.zeros(len(start_ns), GPU_OP)
    out["kind"] = GpuKind.KERNEL
    out["name"] = 1
    out["flags"] = GPU_LAUNCH_MATCHED
    out["start_ns"] = start_ns
    out["end_ns"] = start_ns + took_ns
    out["launch_ns"] = start_ns - 100 * US
    for name, value in fields.items():
        out[name] = value
    return out


# ---- the recorder


def record(recorder: FlightRecorder, given: NDArray[np.void], stored: NDArray[np.bool_] | None = None) -> None:
    recorder.feed(given, called_ns(given), stored)


def test_what_was_stored_is_not_stored_again_and_the_oldest_goes_first() -> None:
    recorder = FlightRecorder(max_bytes=30 * GPU_OP.itemsize)
    for first in range(0, 50, 10):
        record(recorder, ops(S + np.arange(first, first + 10) * MS))
    assert recorder.forgotten == 20
    assert recorder.gone_ns == S + 19 * MS + 5 * US
    assert len(recorder.take_ran(0, S + 25 * MS)) == 5
    assert len(recorder.take_ran(0, S + 30 * MS + 1)) == 6, "those that were not given out yet"
    called = recorder.take_called(S + 35 * MS - 100 * US, S + 38 * MS - 100 * US)
    assert (called["start_ns"] - S).tolist() == [35 * MS, 36 * MS, 37 * MS]
    record(recorder, ops(S + np.arange(50, 60) * MS), stored=np.arange(10) < 4)
    assert len(recorder.take_ran(S + 50 * MS, 2 * S)) == 6
    recorder.close()
    assert recorder.forgotten == 20 + 16, "of 31 to 49 three were given out"


def test_what_runs_across_the_ends_of_a_moment_belongs_to_it() -> None:
    recorder = FlightRecorder()
    record(recorder, ops(np.array([S, S + 10 * MS, S + 20 * MS]), took_ns=4 * MS))
    ran = recorder.take_ran(S + 3 * MS, S + 20 * MS)
    assert (ran["start_ns"] - S).tolist() == [0, 10 * MS], "one that had begun; one that begins at the end has not"


# ---- groups


def test_groups_are_what_distinguishes_durations() -> None:
    made: list[NDArray[np.void]] = []

    def number(op: NDArray[np.void]) -> int:
        made.append(op)
        return len(made) - 1

    groups = KernelGroups(number, no_others)
    at = S + np.arange(4000) * US
    given = ops(at, name=RNG.integers(1, 9, 4000), stream=RNG.integers(7, 9, 4000))
    given["grid"] = RNG.integers(1, 4, (4000, 1))
    given["block"][:, 0] = 32 * RNG.integers(1, 3, 4000)
    numbers = groups.of(given)
    keys = np.stack([given["name"], given["stream"], given["grid"][:, 0], given["block"][:, 0]])
    distinct, expected = np.unique(keys, axis=1, return_inverse=True)
    assert len(made) == distinct.shape[1]
    # the same partition: each group of one is one group of the other
    assert len({(a, b) for a, b in zip(numbers.tolist(), expected.ravel().tolist(), strict=True)}) == distinct.shape[1]
    assert (groups.of(given[::-1]) == numbers[::-1]).all(), "a group keeps its number"
    assert len(made) == distinct.shape[1], "and is made once"


def no_others(operations: int) -> int:
    raise AssertionError(f"{operations} operations have no group of their own")


def test_of_very_many_new_shapes_some_are_numbered_each_time() -> None:
    made: list[int] = []
    crowded: list[int] = []

    def number(op: NDArray[np.void]) -> int:
        made.append(int(op["grid"][0, 0]))
        return len(made)

    def others(operations: int) -> int:
        crowded.append(operations)
        return 0

    groups = KernelGroups(number, others)
    given = ops(S + np.arange(3 * NEW_SHAPES))
    given["grid"][:, 0] = np.arange(3 * NEW_SHAPES) + 1
    numbers = groups.of(given)
    assert len(made) == NEW_SHAPES
    assert np.count_nonzero(numbers == 0) == 2 * NEW_SHAPES == crowded[0]
    again = groups.of(given)
    assert (again[numbers > 0] == numbers[numbers > 0]).all(), "a group keeps its number"
    assert (groups.of(given) > 0).all()
    assert (len(made), sorted(made)) == (3 * NEW_SHAPES, given["grid"][:, 0].tolist())
    assert crowded == [2 * NEW_SHAPES, NEW_SHAPES]


def test_grids_with_their_sides_exchanged_are_other_groups() -> None:
    groups = KernelGroups(_counter(), no_others)
    given = ops(S + np.arange(6))
    given["grid"] = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 1, 1), (1, 1, 1), (2, 2, 2)]
    given["block"] = [(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 3), (2, 1, 3), (2, 2, 2)]
    assert len(set(groups.of(given).tolist())) == 6


def _counter() -> Any:
    numbers = iter(range(10**6))
    return lambda op: next(numbers)


def test_copies_are_grouped_by_size() -> None:
    groups = KernelGroups(_counter(), no_others)
    size = np.array([0, 1, 2, 3, 4, 1 << 20, (1 << 20) - 1, (1 << 20) + 1], np.uint64)
    copies = ops(S + np.arange(8), kind=GpuKind.MEMCPY, copy=1, bytes=size)
    numbers = groups.of(copies).tolist()
    assert [numbers.index(group) for group in numbers] == [0, 0, 2, 3, 3, 5, 5, 7], "each as the first of its group"
    assert describe(copies[5:6], [""], np.zeros(1, np.int32)) == {
        "name": "memcpy_h2d <= 1 MiB", "stream": 0, "device": 0, "grid": (), "block": (),
    }  # fmt: skip
    copies["copy"] = 2
    assert min(groups.of(copies).tolist()) == 5, "the other direction"
    assert [size_text(bits) for bits in (0, 9, 10, 34, 64)] == [
        "<= 1 B",
        "<= 512 B",
        "<= 1 KiB",
        "<= 16 GiB",
        "<= 16 EiB",
    ]


def test_groups_that_share_a_slot_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_steps, "_keys", lambda ops: ops["name"].astype(np.uint64) | np.uint64(1 << 60))
    groups = KernelGroups(_counter(), no_others)
    given = ops(S + np.arange(300), name=np.arange(300) % 100)
    for _ in range(3):
        assert groups.of(given).tolist() == [n % 100 for n in range(300)]


# ---- steps


def fed(steps: KernelSteps, at: NDArray[np.int64]) -> None:
    given = ops(at)
    steps.feed(given, given["launch_ns"].astype(np.int64), np.arange(len(at)))


def test_operations_go_to_the_step_that_asked_for_them() -> None:
    steps = KernelSteps()
    begin = S - 100 * US
    fed(steps, S + np.arange(0, 50, 2) * MS)
    assert steps.settle([]) == []
    settled = steps.settle([(begin + 10 * MS, begin + 20 * MS, 4), (begin + 24 * MS, begin + 30 * MS, 5)])
    starts = [(step, [int(s - S) // MS for s in part.start]) for step, _, _, part in settled]
    assert starts == [
        (NO_STEP, [0, 2, 4, 6, 8]), (4, [10, 12, 14, 16, 18]), (NO_STEP, [20, 22]), (5, [24, 26, 28]),
    ]  # fmt: skip
    assert settled[1][1:3] == (begin + 10 * MS, begin + 20 * MS)
    assert settled[0][1:3] == (S, S + 8 * MS + 5 * US), "what was outside lasts from its first to its last"
    assert steps.outside == 7
    fed(steps, np.array([S + 29 * MS]))  # late: its step is gone
    rest = steps.settle([], final=True)
    assert sum(len(part.start) for *_, part in rest) == 10 + 1
    assert steps.outside == 7 + 11


def test_a_step_that_is_too_long_to_be_kept_is_not_stored_in_part() -> None:
    steps = KernelSteps()
    fed(steps, S + np.arange(30) * S)
    fed(steps, S + np.arange(30, 70) * S)
    ((step, _, _, part),) = steps.settle([])
    assert step == NO_STEP
    gone = len(part.start)
    fed(steps, S + np.arange(70, 90) * S)
    settled = steps.settle([(S - MS, 80 * S, 4), (80 * S, 90 * S, 5)])
    assert [one.step for one in settled] == [NO_STEP, 5]
    assert [len(one.ops.start) for one in settled] == [79 - gone + 1, 10]
    assert steps.cut == 1


def test_without_steps_operations_do_not_pile_up() -> None:
    steps = KernelSteps()
    fed(steps, S + np.arange(100) * MS)
    assert steps.settle([]) == []
    fed(steps, S + KEPT_NS // 2 + np.arange(1000, 1010) * MS)
    assert steps.settle([]) == []
    fed(steps, S + KEPT_NS + np.arange(50, 60) * MS)
    ((step, _, _, part),) = steps.settle([])
    assert (step, len(part.start)) == (NO_STEP, 100), "those that waited too long, and those that waited for half of it"
    assert steps.settle([]) == []
    many = KernelSteps()
    fed(many, S + np.arange(KEPT_OPS + 10) * US)
    assert sum(len(part.start) for *_, part in many.settle([])) >= 0.4 * KEPT_OPS


def test_operations_that_were_called_at_one_time_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """When something was called is what the process says."""
    monkeypatch.setattr(kernel_steps, "KEPT_OPS", 100)
    steps = KernelSteps()
    for _ in range(10):
        fed(steps, np.full(60, S))
        steps.settle([])
        assert steps.size <= 100


def test_however_few_may_wait_each_operation_is_in_one_step_or_in_none() -> None:
    """The newest wait; of a step that began before these nothing is stored in part."""
    for seed in range(50):
        random, steps = np.random.default_rng(seed), KernelSteps()
        told, out = [], Tally[int]()
        number = begin = step = 0
        waits: list[int] = []
        for _ in range(30):
            if (chance := random.random()) < 0.5:
                at = np.sort(S + begin * MS + random.integers(0, 20, int(random.integers(1, 30))) * MS)
                fed_ops = ops(at)
                steps.feed(fed_ops, at, np.arange(number, number + len(at)))
                number += len(at)
                told += at.tolist()
                waits += at.tolist()
                settled = []
            elif chance < 0.75:
                most = int(random.integers(0, 40))
                settled = steps.settle([], most=most)
                if len(waits) > most:
                    until = sorted(waits)[len(waits) - most // 2 - 1]
                    waits = [each for each in waits if each > until]
            else:
                end = begin + int(random.integers(1, 25))
                settled = steps.settle([(S + begin * MS, S + end * MS, step)])
                waits = [each for each in waits if each >= S + end * MS]
                begin, step = end, step + 1
            for one in settled:
                out.update(one.ops.group.tolist())
            assert steps.size == len(waits)
        for one in steps.settle([], final=True):
            out.update(one.ops.group.tolist())
        assert out == Tally(range(number))


def test_a_recorder_forgets_what_others_need_the_room_for() -> None:
    """As a list would from which the oldest are taken."""
    for seed in range(20):
        random, recorder = np.random.default_rng(seed), FlightRecorder(1000 * GPU_OP.itemsize)
        parts: list[NDArray[np.int64]] = []
        gone = 0
        for turn in range(20):
            at = S + turn * 100 * MS + np.arange(int(random.integers(1, 300))) * US
            record(recorder, ops(at))
            parts.append(at)
            most = int(random.integers(0, 1000)) if random.random() < 0.3 else 1000
            recorder.keep(most * GPU_OP.itemsize)
            while sum(map(len, parts)) > most:
                gone += len(parts.pop(0))
            assert (recorder.nbytes, recorder.forgotten) == (sum(map(len, parts)) * GPU_OP.itemsize, gone)
        left = np.concatenate([np.empty(0, np.int64), *parts])
        assert recorder.take_ran(0, 10 * S)["start_ns"].tolist() == left.tolist()


# ---- the whole


class Trace:
    """A rank that runs ``per_step`` kernels in each step of 10 ms, two of which communicate."""

    def __init__(self, raw: str = "auto", rows_s: float = 1e9, per_step: int = 20) -> None:
        self.rows = Rows()
        session = a_session(self.rows, offset_ns=OFFSET, raw=raw, raw_rows_s=rows_s)
        self.notes: list[str] = session.notes
        self.side = KernelSide(session)
        self.job = Job("j", 7)
        self.names = Names()
        self.names.learn(["", "gemm", "ncclDevKernel_AllReduce"])
        self.per_step = per_step
        self.step = 0
        self.now = 1000.0

    def go(self, steps: int, ranks: int = 2, long: tuple[int, ...] = (), took_ns: int = STEP_NS) -> None:
        for _ in range(steps):
            begin = S + self.step * took_ns
            length = took_ns * (3 if self.step in long else 1)
            for rank in range(ranks):
                at = begin + 200 * US + np.arange(self.per_step) * (took_ns // (2 * self.per_step))
                given = ops(at, took_ns=2 * US, stream=7)
                given["name"][-2:] = 2
                self.side.feed(self.job, rank, 100 + rank, self.names, given, given["name"] == 2)
                self.side.settle(self.job, 100 + rank, [(begin, begin + length, self.step)])
            self.step += 1
            self.now += took_ns / S
            self.side.work_at(self.now, begin)

    def finish(self, ranks: int = 2) -> None:
        for rank in range(ranks):
            self.side.settle(self.job, 100 + rank, [], final=True)
        self.side.work_at(self.now, S + self.step * STEP_NS, final=True)

    def stored(self, rank: int = 0) -> dict[int, int]:
        """Kernels that compute by step, of those that are stored one by one."""
        rows = [row for row in self.rows["kernel_events"] if row["rank"] == rank and row["name"] == "gemm"]
        at = [(int(row["ts"].value) - OFFSET - S) // STEP_NS for row in rows]
        return {step: at.count(step) for step in sorted(set(at))}


def test_a_small_job_is_stored_one_by_one() -> None:
    trace = Trace()
    trace.go(5)
    trace.finish()
    assert trace.stored() == dict.fromkeys(range(5), 18)
    assert len(trace.rows["kernel_events"]) == 5 * 20 * 2
    assert not trace.side.keeps
    assert trace.side.counters()["gpu_ops_thinned"] == (0, False)


def test_flight_recorders_share_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who records little keeps all of it, beside one who has many processes."""
    of_step = 20 * GPU_OP.itemsize
    monkeypatch.setattr(kernels_module, "RECORDED", 100 * of_step)
    trace = Trace("flagged", per_step=20)
    other = Job("k", 8, owner=(1002, ""))
    for step in range(30):
        for rank in range(20):
            given = ops(S + step * STEP_NS + np.arange(20) * US)
            trace.side.feed(other, rank, 1000 + rank, trace.names, given, np.zeros(20, bool))
        trace.go(1, ranks=1)
        held = {pid: process.recorder.nbytes for (_, pid), process in trace.side._processes.items()}
        assert sum(held.values()) <= 100 * of_step
    assert held[100] == 30 * 20 * GPU_OP.itemsize
    thinned, loss = trace.side.counters()["gpu_ops_thinned"]
    assert (thinned, loss) == (20 * 30 * 20 - (sum(held.values()) - held[100]) // GPU_OP.itemsize, False)


def test_rows_that_wait_for_templates_share_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of jobs. Who has few keeps all, and of the others rows are stored sooner."""
    monkeypatch.setattr(kernels_module, "HELD", 300)
    trace = Trace(per_step=20)
    others = [Job(f"k{number}", 8, owner=(1002, "")) for number in range(20)]
    alone, most = Trace(per_step=20), 0
    for step in range(20):
        for rank, other in enumerate(others):
            given = ops(S + step * STEP_NS + np.arange(20) * US)
            given["end_ns"] += np.arange(20, dtype=np.uint64) * np.uint64(1000)
            trace.side.feed(other, rank, 1000 + rank, trace.names, given, np.zeros(20, bool))
            trace.side.settle(other, 1000 + rank, [(S + step * STEP_NS, S + (step + 1) * STEP_NS, step)])
            held = [of_job.compressor._held + of_job.outside._held for of_job in trace.side._jobs.values()]
            assert sum(held) <= 300
            most = max(most, sum(held))
        trace.go(1, ranks=1)
        alone.go(1, ranks=1)
        of_job, same = trace.side._jobs[id(trace.job)], alone.side._jobs[id(alone.job)]
        assert of_job.compressor._held == same.compressor._held > 0
    assert most > 200
    for rank, other in enumerate(others):
        trace.side.settle(other, 1000 + rank, [], final=True)
    trace.finish(1)
    rows = [*trace.rows["kernel_escapes"], *trace.rows["kernel_summaries"], *trace.rows["kernel_spikes"]]
    assert sum(row.get("count", 1) for row in rows) == 20 * 20 * 21, "nothing is lost"


def test_of_a_large_job_some_steps_are_and_what_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "RATE_S", 1.0)
    # two ranks with 20 in each 10 ms: 4,000 a second
    trace = Trace(rows_s=1100.0)
    trace.go(102)
    (note,) = trace.notes
    assert "of 1 step in 4 are stored" in note
    assert trace.side.keeps
    trace.rows.tables.clear()
    begun = trace.step
    trace.go(40)
    trace.finish()
    for rank in (0, 1):
        assert trace.stored(rank) == {step: 18 for step in range(begun, begun + 40) if step % 4 == 0}
    assert sum(row["name"].startswith("nccl") for row in trace.rows["kernel_events"]) == 40 * 2 * 2
    assert trace.side.counters()["gpu_ops_thinned"] == (30 * 18 * 2, False)


@pytest.mark.parametrize("raw", ["auto", "flagged"])
def test_what_is_called_communication_does_not_fill_the_store(monkeypatch: pytest.MonkeyPatch, raw: str) -> None:
    """A process names its kernels as it likes. Here 400 a second communicate, of 300 rows a second."""
    monkeypatch.setattr(kernels_module, "RATE_S", 1.0)
    trace = Trace(raw, rows_s=300.0)
    trace.go(102)
    trace.rows.tables.clear()
    trace.go(32)
    in_steps = 2 * 2 * 2 if raw == "auto" else 0  # one in 16, by their number
    assert sum(row["name"].startswith("nccl") for row in trace.rows["kernel_events"]) == in_steps
    trace.finish()
    assert trace.side.counters()["gpu_ops_thinned"][0] >= 30 * 2 * 2


def test_flagged_only_stores_what_is_flagged_behind_and_ahead() -> None:
    trace = Trace("flagged")
    trace.go(10)
    assert trace.stored() == {}
    step = S + 3 * STEP_NS
    trace.side.flag(trace.job, step, step + 2 * STEP_NS, "asked for: x", ranks=[1], asked=True)
    ahead = S + 12 * STEP_NS
    trace.side.flag(trace.job, ahead, ahead + STEP_NS, "asked for: y", asked=True)
    trace.go(10)
    trace.finish()
    assert (trace.stored(0), trace.stored(1)) == ({12: 18}, {3: 18, 4: 18, 12: 18})
    windows = sorted((row["rank"], row["why"], row["whole"], row["operations"]) for row in trace.rows["raw_windows"])
    # what communicates was stored before
    assert windows == [(0, "asked for: y", True, 18), (1, "asked for: x", True, 36), (1, "asked for: y", True, 18)]
    (row,) = [row for row in trace.rows["raw_windows"] if row["rank"] == 0]
    assert (int(row["ts"].value) - OFFSET, row["duration_ns"]) == (ahead, STEP_NS)


def test_what_had_left_the_memory_is_reported_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlightRecorder.__init__, "__defaults__", (100 * GPU_OP.itemsize,))
    trace = Trace("flagged")
    trace.go(20, ranks=1)
    trace.side.flag(trace.job, S, S + 20 * STEP_NS, "asked for: z", asked=True)
    trace.finish(1)
    (row,) = trace.rows["raw_windows"]
    assert (row["whole"], row["operations"]) == (False, 5 * 18)
    assert trace.stored() == dict.fromkeys(range(15, 20), 18)


def test_a_moment_before_the_first_record_is_not_whole() -> None:
    trace = Trace("flagged")
    trace.go(5, ranks=1)
    trace.side.flag(trace.job, 0, S + 2 * STEP_NS, "asked for: early", asked=True)
    trace.finish(1)
    (row,) = trace.rows["raw_windows"]
    assert not row["whole"]


def test_another_program_in_the_process_has_its_own_names() -> None:
    trace = Trace("flagged")
    trace.go(3, ranks=1)
    trace.names = Names()
    trace.names.learn(["", "softmax", "ncclDevKernel_AllReduce"])
    trace.go(3, ranks=1)
    trace.side.flag(trace.job, S, S + 6 * STEP_NS, "asked for: all", asked=True)
    trace.finish(1)
    stored = [row["name"] for row in trace.rows["kernel_events"]]
    assert (stored.count("softmax"), stored.count("gemm")) == (3 * 18, 0), "names that are no more are not guessed"
    assert [row["whole"] for row in trace.rows["raw_windows"]] == [False]


def test_more_is_stored_again_once_a_job_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "RATE_S", 0.2)
    monkeypatch.setattr(kernels_module, "THICKEN_S", 1.0)
    trace = Trace(rows_s=1100.0)
    trace.go(24)
    assert "1 step in 4" in trace.notes[-1]
    trace.per_step = 2  # nothing but what communicates: 400 a second
    trace.go(100 + 40)
    assert "1 step in 2" in trace.notes[-1]
    assert len(trace.notes) == 2, "step by step"


def test_a_job_that_is_over_is_stored_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(kernels_module.time, "monotonic", lambda: clock[0])
    trace = Trace()
    trace.go(5)
    for rank in (0, 1):
        trace.side.settle(trace.job, 100 + rank, [], final=True)
    trace.side.work_at(clock[0], S)
    assert not trace.rows["kernel_escapes"], "the ranks may have begun another program"
    clock[0] += 10
    trace.side.work_at(clock[0], S)
    both = trace.rows["kernel_escapes"] + trace.rows["kernel_summaries"]
    assert sum(row["count"] for row in both) == 5 * 20 * 2
    assert trace.side._jobs == {}
    assert trace.side.counters()["kernels_groups"] == (2, False)
    assert trace.side.counters()["gpu_ops_outside_steps"] == (0, False)


def test_shapes_beyond_those_numbered_at_once_are_summed_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.semantics.gpu.kernel_steps.NEW_SHAPES", 1)
    trace = Trace()
    trace.go(5)
    trace.finish(2)
    both = trace.rows["kernel_escapes"] + trace.rows["kernel_summaries"]
    assert sum(row["count"] for row in both) == 5 * 20 * 2, "nothing is lost"
    assert sorted(row["name"] for row in trace.rows["kernel_groups"])[0] == "(other kernels)"
    crowded, is_loss = trace.side.counters()["kernels_groups_crowded"]
    assert 0 < crowded < 5 * 20 * 2
    assert not is_loss


def test_shapes_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_steps, "MAX_KEYS", 100)
    groups = KernelGroups(lambda op: int(op["grid"][0, 0]), no_others)
    for first in range(0, 5000, 50):
        given = ops(S + np.arange(50))
        given["grid"][:, 0] = first + np.arange(50)
        assert groups.of(given).tolist() == list(range(first, first + 50))
    assert len(groups._others) <= 101


def test_a_step_that_is_suddenly_slow_is_kept_but_not_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(kernels_module.time, "monotonic", lambda: clock[0])
    trace = Trace("flagged")
    trace.go(60, long=(50, 52))
    assert trace.stored() == {50: 18, 51: 18, 52: 18}, "a window of three steps' length; the next flag comes too soon"
    clock[0] += FLAG_S
    trace.go(10, long=(65,))
    trace.finish()
    assert set(trace.stored()) == {50, 51, 52, 65, 66, 67}
    assert {row["why"] for row in trace.rows["raw_windows"]} == {"slow step"}


def test_all_are_summed_up_whatever_is_stored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[int, int, int]] = []

    class Counting(kernels_module.Compressor):
        def feed(self, rank: int, step: int, *rest: Any) -> None:
            fed.append((rank, step, len(rest[2])))
            super().feed(rank, step, *rest)

    monkeypatch.setattr(kernels_module, "Compressor", Counting)
    trace = Trace("flagged")
    trace.go(6)
    trace.finish()
    assert sorted(fed) == [(rank, step, 20) for rank in (0, 1) for step in range(6)]


# ---- several steps in a row


class Calm(Trace):
    """A trace whose clock is its own, and whose kernels have templates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        monkeypatch.setattr(kernels_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(kernels_module, "RATE_S", 0.1)
        monkeypatch.setattr(kernels_module, "CALM_S", 0.5)
        super().__init__(**options)
        self.go(76)
        self.covered()

    def covered(self, rank: int = 0) -> list[tuple[int, int]]:
        """First and last step of the rows of a kernel since the last call, of steps that are covered once each."""
        rows = [row for row in self.rows.tables.pop("kernel_summaries", []) if row["rank"] == rank]
        rows = [row for row in rows if row["kernel_id"] == rows[0]["kernel_id"]]
        assert all(row["count"] == row["steps"] * rows[0]["count"] // rows[0]["steps"] for row in rows)
        return [(row["step"], row["step"] + row["steps"] - 1) for row in rows]


@pytest.mark.thorough
def test_rows_of_a_calm_job_cover_several_steps_until_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Calm(monkeypatch)
    trace.go(36)
    assert trace.covered() == [(64, 79), (80, 95), (96, 111)]
    trace.go(4)
    assert trace.covered() == []
    trace.side.flag(trace.job, S, 2 * S, "asked for: x", asked=True)
    trace.go(43)
    assert trace.covered() == [(112, 115), *((step, step) for step in range(116, 159))]
    trace.go(49)
    assert trace.covered()[-1] == (192, 207), "calm again"
    trace.go(1)
    trace.go(1, long=(trace.step,))
    assert not trace.side.keeps
    trace.go(2)
    assert trace.covered()[-2:] == [(trace.step - k, trace.step - k) for k in (2, 1)], "a step was slow"


def test_no_row_is_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Calm(monkeypatch)
    trace.go(38)
    assert trace.covered()[-1] == (96, 111)
    trace.now += kernels_module.ROW_S - 0.1
    trace.side.work_at(trace.now, S)
    assert trace.covered() == []
    trace.now += 0.2  # the job hangs
    trace.side.work_at(trace.now, S)
    assert (trace.covered(0) or trace.covered(1)) == [(112, 113)]
    trace.go(5)
    trace.side.settle(trace.job, 100, [], final=True)  # a rank ends, and its process is no more
    trace.side.work_at(trace.now, S)
    assert trace.covered(0) == [(114, 118)]


@pytest.mark.thorough
def test_long_steps_share_a_row_only_as_far_as_it_is_stored_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Calm(monkeypatch)
    trace.go(70, took_ns=3 * S)
    trace.covered()
    trace.go(9, took_ns=3 * S)
    assert {last - first for first, last in trace.covered()} == {1}, "two steps are 6 s, four would be 12"


# ---- flags through the store


def test_a_flag_reaches_the_tracers_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(new_store(tmp_path)) as store:
        ensure_schema(store)
        watcher = FlagWatcher(store)
        watcher.ask()
        job, other = Job("j", 7), Job("j", 8)
        watcher._jobs = {("j", 7): job, ("j", 8): other}
        now = 4_000_000_000 * S  # requests of long ago would expire
        monkeypatch.setattr("argus.live.sides.flags.time", SimpleNamespace(time_ns=lambda: now))
        wanted = Flag(now + 1, now + 5 * S, (3, 4), "by hand")
        flag(store, "j", 7, wanted)
        flag(store, "other", 7, wanted)
        watcher.ask()
        watcher.ask()
        assert list(watcher.take()) == [(job, wanted)], "once, and only of its own run"
        flag(store, "j", 8, Flag(now, now + S, (), "again"))
        watcher.ask()
        assert list(watcher.take()) == [(other, Flag(now, now + S, (), "again"))]
        # Rows may come from anybody: a moment of centuries is an hour on either side, one of long ago is none.
        flag(store, "j", 8, Flag(-8 * 10**18, 9 * 10**18, (), "for ever"))
        flag(store, "j", 8, Flag(S, 2 * S, (), "1970"))
        watcher.ask()
        ((_, window),) = watcher.take()
        assert window.why == "for ever"
        assert 0 <= now + FAR_NS - window.end_ns + 60 * S <= 60 * S
        assert 0 <= window.begin_ns - (now - FAR_NS) <= 60 * S


def test_a_spool_reports_that_it_takes_no_flags(tmp_path: Path) -> None:
    with open_store(f"spool://{tmp_path}/spool") as store:
        watcher = FlagWatcher(store)
        watcher.look({("j", 7): Job("j", 7)})
        assert "cannot be flagged" in watcher.trouble
        assert list(watcher.take()) == []


# ---- timelines


def test_a_timeline_shows_what_ran_when(tmp_path: Path) -> None:
    begin = OFFSET + 10 * S
    with open_store(new_store(tmp_path)) as store:
        ensure_schema(store)
        fill(store, begin)
        file = tmp_path / "t.json"
        moment = moment_of(store, Selection("j", 7, steps=(1, 1)))
        assert (moment.begin_ns, moment.end_ns) == (begin + STEP_NS, begin + 2 * STEP_NS)
        count = write_perfetto(store, moment, file, note="of a test")
        timeline = json.loads(file.read_text())
        with pytest.raises(ArgusError, match="nothing is stored of that moment"):
            write_perfetto(store, Moment("j", 7, begin - 2 * S, begin - S), tmp_path / "none.json")
        assert not list(tmp_path.glob("none*")), "no half file is left"
        packed = tmp_path / "t.json.gz"
        assert write_perfetto(store, moment_of(store, Selection("j", 7, ranks=(1,))), packed) == 3 * 3
        assert packed.read_bytes()[:2] == b"\x1f\x8b"
    spans = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == count == 2 * 3
    of_rank = {(event["cat"], event["name"], event["ts"], event["dur"]) for event in spans if event["pid"] == 1}
    assert of_rank == {
        ("step", "step 1", 0.0, 10_000.0), ("cuda", "cuLaunchKernel", 1000.0, 0.0), ("kernel", "gemm", 1100.0, 2000.0),
    }  # fmt: skip
    arrows = {event["ph"]: event for event in timeline["traceEvents"] if event.get("id") == 0}
    assert (arrows["s"]["ts"], arrows["f"]["ts"], arrows["s"]["tid"]) == (1000.0, 1100.0, 55)
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in timeline["traceEvents"]
        if event["name"] == "thread_name"
    }
    (kernel,) = [event for event in spans if event["cat"] == "kernel" and event["pid"] == 1]
    assert named[1, kernel["tid"]] == "GPU 0 stream 7"
    assert named[1, 55] == "thread 55"


def fill(store: Any, begin: int) -> None:
    """Two ranks with three steps of one kernel each."""
    with Writer(store, source="test") as writer:
        for rank in (0, 1):
            at = begin + np.arange(3) * STEP_NS
            common = {"job": "j", "run": 7, "rank": rank, "host": "h"}
            writer.append("iterations", {
                **common, "step": np.arange(3), "ts": at, "duration_ns": STEP_NS, "collectives": 0, "launches": 1,
                "method": "launches", "confidence": 1.0,
            })  # fmt: skip
            writer.append("launches", {
                **common, "pid": 100, "tid": 55, "call": "cuLaunchKernel", "kind": "kernel", "kernel": "gemm",
                "handle": 1, "stream": 9, "bytes": 0, "shared_bytes": 0, "grid": [[1, 1, 1]] * 3,
                "block": [[1, 1, 1]] * 3, "ts": at + MS, "duration_ns": -1, "result": 0, "in_nccl": False,
            })  # fmt: skip
            writer.append("kernel_events", {
                **common, "pid": 100, "device": 0, "context": 1, "stream": 7, "kind": "kernel", "name": "gemm",
                "ts": at + MS + 100 * US, "duration_ns": 2 * MS, "launch_ts": at + MS, "issue_latency_ns": 100 * US,
                "launch_tid": 55, "launch_probed": True, "correlation": 3, "graph": 0, "graph_node": 0,
                "grid": [[1, 1, 1]] * 3, "block": [[1, 1, 1]] * 3, "registers": 0, "shared_static": 0,
                "shared_dynamic": 0, "bytes": 0,
            })  # fmt: skip
        assert writer.flush()


def test_a_job_without_gpu_times_that_was_flagged_is_forgotten() -> None:
    """Each finding flags a moment: of jobs on CPUs nothing may stay."""
    side = KernelSide(a_session(Rows()))
    for number in range(100):
        job = Job(f"j{number}", 1)
        side.flag(job, S, 2 * S, "asked for", asked=True)
        side.forget(job)
    assert not side._jobs
