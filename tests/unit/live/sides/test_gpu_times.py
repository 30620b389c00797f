"""The GPU side from CUPTI's batches to rows, states and lines for people; CUPTI itself is a double."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process.targets import Identity
from argus.cli.live import Scene, frame, plain_line
from argus.cupti.collector import Collector, CollectorState, CuptiOptions
from argus.cupti.decode import Batch
from argus.live.display.view import JobView, RankView, View
from argus.live.gpu import injection, room
from argus.live.gpu import process as gpu_process
from argus.live.gpu import rows as rows_of_gpus
from argus.live.gpu.process import LINGER_S
from argus.live.job import Job, Member
from argus.live.session_rows import OVER_S, SessionRows
from argus.live.sides import gpu_times as gpu_module
from argus.live.sides.gpu_times import NOT_ARMED, GpuSide
from argus.live.sides.kernel_rows import KernelSide
from argus.live.tracer import Tracer
from argus.model import records
from argus.model.calls import BY_SYMBOL
from argus.model.errors import ArgusError
from argus.model.losses import UNKNOWN, Owner
from argus.model.records import GPU_OP, HOST_OP, LAUNCH, GpuKind, HostKind
from argus.semantics.gpu import correlation
from argus.semantics.gpu.flops import WORK
from argus.semantics.steps.by_calls import ITERATION
from argus.store.arrow import to_arrow
from argus.tables import gpu as gpu_rows
from argus.tables.arrow import Origin
from argus.tables.gpu import Names, gpu_host_events, kernel_events
from tests.builders.sessions import Rows, a_session

S, MS, US = 1_000_000_000, 1_000_000, 1_000
OFFSET = 500
ORIGIN = Origin("j", 7, "h", OFFSET)
NO_LAUNCHES = np.empty(0, LAUNCH)


def ops(count: int, **fields: Any) -> NDArray[np.void]:
    out = np.zeros(count, GPU_OP)
    out["kind"] = GpuKind.KERNEL
    for name, value in fields.items():
        out[name] = value
    return out


def host(count: int, **fields: Any) -> NDArray[np.void]:
    out = np.zeros(count, HOST_OP)
    for name, value in fields.items():
        out[name] = value
    return out


def names(*symbols: str) -> Names:
    learned = Names()
    learned.learn(["", *symbols])
    return learned


# ---- columns


def test_a_kernel_s_row() -> None:
    op = ops(
        1, start_ns=1000, end_ns=1700, launch_ns=900, launch_end_ns=950, launch_tid=5, correlation=8, name=1, device=2,
        context=3, stream=4, graph=6, graph_node=1 << 40, grid=(1, 2, 3), block=(4, 5, 1024), shared_static=9,
        shared_dynamic=10, registers=255, flags=records.GPU_LAUNCH_MATCHED | records.GPU_LAUNCH_PROBED,
    )  # fmt: skip
    (row,) = to_arrow("kernel_events", kernel_events(op, ORIGIN, 3, 77, names("_Z4gemmPfi"))).to_pylist()
    assert row.pop("ts").value == 1000 + OFFSET
    assert row.pop("launch_ts").value == 900 + OFFSET
    assert row == {
        "job": "j", "run": 7, "rank": 3, "host": "h", "pid": 77, "device": 2, "context": 3, "stream": 4,
        "kind": "kernel", "name": "gemm(float*, int)", "duration_ns": 700, "issue_latency_ns": 100, "launch_tid": 5,
        "launch_probed": True, "correlation": 8, "graph": 6, "graph_node": 1 << 40, "grid": [1, 2, 3],
        "block": [4, 5, 1024], "registers": 255, "shared_static": 9, "shared_dynamic": 10, "bytes": 0,
    }  # fmt: skip


def test_an_unknown_launch_is_not_measured_and_no_time() -> None:
    (row,) = kernel_events(ops(1, start_ns=1000, end_ns=1700), ORIGIN, 3, 77, names()).to_pylist()
    assert (row["launch_ts"].value, row["issue_latency_ns"], row["launch_tid"]) == (0, -1, 0)
    assert row["launch_probed"] is False


@pytest.mark.parametrize(
    ("kind", "copy", "word"),
    [
        (GpuKind.MEMCPY, 1, "memcpy_h2d"), (GpuKind.MEMCPY, 2, "memcpy_d2h"), (GpuKind.MEMCPY, 8, "memcpy_d2d"),
        (GpuKind.MEMCPY, 9, "memcpy_h2h"), (GpuKind.MEMCPY, 10, "memcpy_p2p"), (GpuKind.MEMCPY, 0, "memcpy"),
        (GpuKind.MEMCPY, 99, "memcpy"), (GpuKind.MEMSET, 0, "memset"), (GpuKind.KERNEL, 0, "kernel"),
    ],
)  # fmt: skip
def test_kinds(kind: GpuKind, copy: int, word: str) -> None:
    (row,) = kernel_events(ops(1, kind=kind, copy=copy, bytes=64, grid=1), ORIGIN, 0, 1, names()).to_pylist()
    assert (row["kind"], row["bytes"]) == (word, 64)
    assert row["grid"] == ([1, 1, 1] if word == "kernel" else [])


def test_names_are_demangled_once_and_no_dictionary_holds_a_word_twice() -> None:
    learned = names("_Z4gemmPfi", "softmax", "gemm(float*, int)")
    learned.learn(["", "_Z4gemmPfi", "softmax", "gemm(float*, int)", "later"])
    table = kernel_events(ops(6, name=[3, 1, 2, 0, 4, 99]), ORIGIN, 0, 1, learned)
    column = table["name"].combine_chunks()
    assert column.to_pylist() == ["gemm(float*, int)", "gemm(float*, int)", "softmax", "", "later", ""]
    assert sorted(column.dictionary.to_pylist()) == ["", "gemm(float*, int)", "later", "softmax"]
    only = kernel_events(ops(2, name=2), ORIGIN, 0, 1, learned)["name"].combine_chunks()
    assert only.dictionary.to_pylist() == ["softmax"], "words of other batches stay out"


def test_records_of_the_cpu_side() -> None:
    given = host(
        6, kind=[HostKind.SYNCHRONIZATION, HostKind.OVERHEAD, HostKind.JIT, HostKind.MARKER, HostKind.MODULE,
                 HostKind.SYNCHRONIZATION],
        code=[3, 1 << 16, 3, 2, 41, 77], name=[0, 0, 1, 2, 0, 0], tid=[0, 6, 7, 8, 0, 0],
        start_ns=[10, 20, 30, 40, 0, 60], end_ns=[15, 28, 33, 40, 0, 61], correlation=5, stream=9, result=-1,
    )  # fmt: skip
    assert gpu_rows.is_event(given).all()
    assert not gpu_rows.is_event(host(2, kind=[HostKind.RUNTIME, HostKind.DRIVER])).any()
    table = gpu_host_events(given, ORIGIN, 3, 77, names("/root/.nv/cache", "forward"), 1000)
    rows = to_arrow("gpu_host_events", table).to_pylist()
    assert [(row["kind"], row["name"], row["code"]) for row in rows] == [
        ("synchronization", "stream_synchronize", 3),
        ("overhead", "buffer_flush", 1 << 16),
        ("jit", "compile", 3),
        ("marker", "forward", 2),
        ("module", "", 41),
        ("synchronization", "", 77),
    ]
    # A module's record has no time: that of its arrival, and no duration.
    assert [row["ts"].value - OFFSET for row in rows] == [10, 20, 30, 40, 1000, 60]
    assert [row["duration_ns"] for row in rows] == [5, 8, 3, 0, -1, 1]
    assert [row["tid"] for row in rows] == [0, 6, 7, 8, 0, 0]


# ---- a session's GPU side


class FakeCollector:
    """What a test puts into ``batches`` comes with the next poll."""

    made: list[FakeCollector]
    armed: set[int]
    kernels: tuple[str, ...]

    def __init__(self, pid: int, options: CuptiOptions, owner: Owner = (-1, "")) -> None:
        self.pid, self.options, self.owner = pid, options, owner
        self.state, self.reason = CollectorState.ON, ""
        self.from_the_start = False
        self.armed = self.takes = True
        self.due = 0.0
        self.records = 0
        self.names = ["", *FakeCollector.kernels]
        self.batches: list[Batch] = []
        self.stopped = self.closed = False
        self.extra: dict[str, tuple[int, bool]] = {}
        self.shares: list[float] = []
        self.beats = 0
        FakeCollector.made.append(self)

    @classmethod
    def find(cls, pid: int) -> FakeCollector | None:
        return cls(pid, CuptiOptions()) if pid in cls.armed else None

    def beat(self) -> None:
        self.beats += 1

    def set_share(self, share: float) -> None:
        self.shares.append(share)

    def poll(self, now: float) -> list[Batch]:
        if not self.takes:
            return []
        batches, self.batches = self.batches, []
        return batches

    def counters(self) -> dict[str, tuple[int, bool]]:
        return {"cupti_records": (1, False), **self.extra}

    def begin_stop(self) -> None:
        self.end("")

    def end(self, reason: str) -> None:
        self.state, self.reason, self.stopped = CollectorState.OFF, reason, True

    def abandon(self) -> None:
        if self.batches:
            self.extra["cupti_buffers_unfinished"] = len(self.batches), True
        self.close()

    def close(self) -> None:
        self.stopped = self.closed = True

    def give(self, gpu: NDArray[np.void], host: NDArray[np.void] | None = None) -> None:
        self.batches.append(Batch(gpu, np.empty(0, HOST_OP) if host is None else host, Counter()))


class Session:
    """A GPU side, its processes and its clock."""

    def __init__(self, mode: str = "auto", options: CuptiOptions | None = None) -> None:
        self.rows = Rows()
        self.job = Job("j", 7)
        cupti_options = options or CuptiOptions()
        shared = a_session(self.rows, offset_ns=OFFSET, jobs=[self.job], cupti=mode, cupti_options=cupti_options)
        self.notes = shared.notes
        self.candidates: list[Any] = []
        shared.roster.candidates, shared.roster.waited = lambda: self.candidates, lambda pid: None
        self.side = GpuSide(shared, KernelSide(shared))
        self.now = 1000.0

    def rank(self, rank: int, pid: int) -> Member:
        target: Any = SimpleNamespace(pid=pid, start_ticks=pid * 10, on_gpu=True, identity=Identity())
        member = Member(target, rank, "torchrun")
        self.job.members[pid] = member
        return member

    def go(self, seconds: float = 0.25, cuda: NDArray[np.void] = NO_LAUNCHES, *, final: bool = False) -> None:
        self.now += seconds
        self.side.poll(self.now)
        self.side.look_quickly(self.now)
        self.side.work_at(cuda, self.now, int(self.now * S), final=final)

    def finish(self) -> None:
        self.side.begin_stop()
        assert self.side.stopped
        self.go(final=True)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeCollector]]:
    FakeCollector.made, FakeCollector.armed = [], set()
    FakeCollector.kernels = (
        "_Z4gemmPfi",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    )
    for module in (gpu_module, gpu_process):
        monkeypatch.setattr(module, "Collector", FakeCollector)
    return FakeCollector.made  # type: ignore[return-value]


def second(at: int, correlation: int = 5) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """A second's work: 400 ms of gemm, 200 ms of NCCL of which half is exposed, launched 1 ms before."""
    gpu = ops(2, start_ns=[at, at + 300 * MS], end_ns=[at + 400 * MS, at + 500 * MS], name=[1, 2])
    gpu["correlation"] = [correlation, correlation + 1]
    calls = host(2, kind=HostKind.RUNTIME, tid=7, correlation=gpu["correlation"])
    calls["start_ns"] = gpu["start_ns"] - MS
    calls["end_ns"] = calls["start_ns"] + 5 * US
    return gpu, calls


def test_what_a_rank_s_gpu_did_is_stored(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(3, 77)
    session.go()
    (collector,) = made
    for k in range(8):
        collector.give(*second((1000 + k) * S, 5 + 2 * k))
        launched = np.zeros(1, LAUNCH)
        launched["pid"], launched["tid"], launched["call"] = 77, 7, BY_SYMBOL["cudaLaunchKernel"].id
        launched["ts_ns"] = (1000 + k) * S - MS - 700
        session.go(1.0, launched)
    kernels = session.rows["kernel_events"]
    assert len(kernels) == 16
    assert {(row["job"], row["run"], row["rank"], row["host"], row["pid"]) for row in kernels} == {("j", 7, 3, "h", 77)}
    assert [row["name"] for row in kernels[:2]] == ["gemm(float*, int)", made[0].names[2]]
    assert [(row["issue_latency_ns"], row["launch_probed"]) for row in kernels[:2]] == [(MS + 700, True), (MS, False)]
    assert len(session.rows["gpu_usage"]) == 3, "windows of the last four seconds may still change"
    collector.extra = {"cupti_records_dropped": (4, True)}
    session.finish()
    usage = session.rows["gpu_usage"]
    assert [row["ts"].value - OFFSET for row in usage] == [(1000 + k) * S for k in range(8)]
    first = usage[0]
    assert (first["busy_ns"], first["compute_ns"], first["communication_ns"]) == (500 * MS, 400 * MS, 200 * MS)
    assert (first["exposed_communication_ns"], first["overlapped_communication_ns"]) == (100 * MS, 100 * MS)
    assert usage[-1]["duration_ns"] == 500 * MS
    counters = session.side.counters()
    assert counters["gpu_ops"] == (16, False)
    assert counters["gpu_launch_matched"] == (16, False)
    assert counters["gpu_launch_probed"] == (8, False)
    assert counters["gpu_ops_late"] == (0, False)
    assert counters["cupti_records_dropped"] == (4, True)
    assert session.side.top_kernels(1) == [("gemm(float*, int)", 8, 8 * 400 * MS)]
    assert session.side.kernel_ns == 8 * 600 * MS
    assert session.side.summary() == ["GPU times: on (1 rank), 16 kernels, 100.00 % matched with their launch"]
    assert [(row["rank"], row["feature"], row["state"], row["reason"]) for row in session.rows["features"]] == [
        (3, "gpu_times", "on", "")
    ]
    assert collector.closed


def test_steps_that_come_with_their_rank_are_not_missed(made: list[FakeCollector]) -> None:
    """Of a process that was armed and became a rank by its first calls, which were many steps' already."""
    session = Session()
    target: Any = SimpleNamespace(pid=77, start_ticks=770, on_gpu=True, identity=Identity())
    FakeCollector.armed, session.candidates = {77}, [target]
    session.go()
    collector = made[-1]
    for k in range(3):
        collector.give(*second((1000 + k) * S, 5 + 2 * k))
    session.rank(3, 77)
    steps = np.zeros(2, ITERATION)
    steps["rank"], steps["step"] = 3, [0, 1]
    steps["ts_ns"], steps["duration_ns"] = np.array([1000.2, 1001.2]) * S, S
    session.side.feed_steps(session.job, steps)
    session.go()
    session.finish()
    assert [row["step"] for row in session.rows["gpu_steps"]] == [0, 1]
    phases = {(row["step"], row["phase"]): row["duration_ns"] for row in session.rows["gpu_phases"]}
    assert phases[1, "compute"] == 400 * MS
    assert phases[1, "all_reduce"] == 100 * MS
    assert all(row["rank"] == 3 and row["pid"] == 77 for row in session.rows["gpu_phases"])


@pytest.mark.thorough
def test_a_match_is_never_rounded_up_to_all(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.go()
    given = ops(100_000, start_ns=1000 * S, end_ns=1000 * S + 9, correlation=np.arange(100_000) + 1)
    calls = host(99_999, kind=HostKind.RUNTIME, correlation=np.arange(99_999) + 1, start_ns=1000 * S - 9)
    made[0].give(given, calls)
    session.go()
    session.finish()
    assert session.side.summary() == ["GPU times: on (1 rank), 100,000 kernels, 99.99 % matched with their launch"]


def test_launches_that_nothing_answers_are_bounded(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of their records; and none are missing while another profiler has CUPTI, or it failed."""
    monkeypatch.setattr(rows_of_gpus, "KEEP_PROBED", 1000)
    session = Session()
    session.rank(0, 77)
    launched = np.zeros(300, LAUNCH)
    launched["pid"], launched["call"] = 77, BY_SYMBOL["cudaLaunchKernel"].id
    for k in range(5):
        launched["ts_ns"] = (1000 + k) * S + np.arange(300)
        session.go(1.0, launched)
    (process,) = session.side._processes
    assert process.unanswered.tolist() == [(1000 + k) * S + n for k in range(1, 5) for n in range(300)][200:]
    for state, reason in (
        (CollectorState.IGNORED, "torch.profiler holds CUPTI"),
        (CollectorState.FAILED, "CUPTI could not be switched on"),
    ):
        made[0].state, made[0].reason = state, reason
        session.go(1.0, launched)
        assert not len(process.unanswered)
        made[0].state, made[0].reason = CollectorState.ON, ""
        session.go(1.0, launched)
    session.job.members[77].state = "exited"
    made[0].end("the process ended")
    session.job.finished = True
    session.go()
    assert session.side.counters()["gpu_launches_unanswered"] == (300, True)


def test_other_records_are_stored_and_calls_are_not(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(3, 77)
    session.go()
    wait = host(1, kind=HostKind.SYNCHRONIZATION, code=3, start_ns=1000 * S, end_ns=1001 * S)
    made[0].give(ops(0), np.concatenate([wait, second(1000 * S)[1]]))
    session.go()
    (row,) = session.rows["gpu_host_events"]
    assert (row["rank"], row["kind"], row["name"], row["duration_ns"]) == (
        3,
        "synchronization",
        "stream_synchronize",
        S,
    )


def test_states_are_reported_and_stored_when_they_change(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.rank(1, 78)
    session.go()
    for collector in made:
        collector.state, collector.reason = CollectorState.WAITING, "the process is not armed"
    session.go()
    assert not session.side.settled(session.now), "the first look may come before the process has begun CUDA"
    session.go(3)
    assert session.side.settled(session.now)
    assert session.side.describe() == [f"GPU times: off: {NOT_ARMED}"]
    made[1].state, made[1].reason = CollectorState.ON, ""
    session.go()
    assert session.side.describe() == ["GPU times: on (1 rank)", f"GPU times of rank 0: off: {NOT_ARMED}"]
    assert [(row["rank"], row["state"]) for row in session.rows["features"]] == [
        (0, "on"), (1, "on"), (0, "off"), (1, "off"), (1, "on")
    ]  # fmt: skip
    made[1].state, made[1].reason = CollectorState.WAITING, "CUPTI is being switched on again"
    assert not session.side.settled(session.now)
    made[0].state, made[0].reason = CollectorState.IGNORED, "torch.profiler holds CUPTI"
    made[1].state, made[1].reason = CollectorState.FAILED, "the shared memory is damaged"
    session.go()
    assert session.side.describe() == [
        "GPU times of rank 0: ignored: torch.profiler holds CUPTI",
        "GPU times of rank 1: failed: the shared memory is damaged",
    ]


def test_what_stays_loaded_is_reported_at_the_end(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(2, 77)
    session.go()
    session.go()
    session.side.begin_stop()
    made[0].reason = "CUPTI stays loaded: no call"
    session.go(final=True)
    assert session.side.summary() == [
        "GPU times: on (1 rank), 0 kernels",
        "GPU times of rank 2: off: CUPTI stays loaded: no call",
    ]
    assert [(row["state"], row["reason"]) for row in session.rows["features"]][-1] == ("on", made[0].reason)


def test_off_touches_nothing(made: list[FakeCollector]) -> None:
    session = Session("off")
    session.rank(0, 77)
    FakeCollector.armed = {5}
    session.candidates = [SimpleNamespace(pid=5, start_ticks=1, on_gpu=True, identity=Identity())]
    session.go()
    session.go(3)
    assert made == []
    assert session.side.describe() == ["GPU times: off: switched off with --cupti off"]
    assert session.side.counters() == {}
    session.finish()
    assert session.rows["features"][0]["reason"] == "switched off with --cupti off"


def test_helpers_of_a_rank_are_left_alone(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.rank(0, 78).rank_source = "parent"
    session.go()
    assert [collector.pid for collector in made] == [77]


def test_without_launches_nothing_is_matched(made: list[FakeCollector]) -> None:
    session = Session(options=CuptiOptions(api=False))
    session.rank(0, 77)
    session.go()
    made[0].give(second(1000 * S)[0])
    session.go()
    assert [row["issue_latency_ns"] for row in session.rows["kernel_events"]] == [-1, -1]
    session.finish()
    assert session.side.summary() == ["GPU times: on (1 rank), 2 kernels"]


def test_a_process_that_ends_gives_its_last_records(made: list[FakeCollector]) -> None:
    session = Session()
    member = session.rank(0, 77)
    session.go()
    session.go()
    gpu, _ = second(1000 * S)
    made[0].give(gpu)  # their calls never come
    made[0].end("the process ended")
    session.go()
    assert len(session.rows["kernel_events"]) == 2, "nobody is waited for that cannot come"
    member.state = "exited"
    session.go()
    session.go()
    assert not session.side._processes[0].over, "the last steps of its job may come"
    session.job.finished = True
    session.go()
    assert len(session.rows["gpu_usage"]) == 1
    assert made[0].closed
    assert len(made) == 1
    session.finish()
    assert session.side.counters()["gpu_launch_unmatched"] == (2, False)
    assert session.side.counters()["cupti_records"] == (1, False)
    assert session.side.summary()[0].startswith("GPU times: on (1 rank), 2 kernels, 0.00 %")
    # The same PID again is another process.
    again = session.rank(0, 77)
    again.target.start_ticks = 4711
    session.side._stopping = False
    session.go()
    assert len(made) == 2


def one_step(start_ns: int) -> NDArray[np.void]:
    steps = np.zeros(1, ITERATION)
    steps["ts_ns"], steps["duration_ns"] = start_ns, 500 * MS
    return steps


@pytest.mark.parametrize(
    ("late_s", "rows", "lost"), [(0, 1, 0), (4, 1, 0), (OVER_S, 1, 0), (OVER_S + LINGER_S + 1, 0, 1)]
)
def test_last_steps_may_come_as_late_as_they_are_stored(
    late_s: float, rows: int, lost: int, made: list[FakeCollector]
) -> None:
    """Those of an owner without time are, within ``OVER_S``. What is later is counted."""
    session = Session()
    member = session.rank(0, 77)
    session.go()
    at = 1000 * S + np.arange(100) * 10 * MS
    made[0].give(ops(100, start_ns=at, end_ns=at + 5 * MS, name=1, correlation=np.arange(100) + 1))
    session.go()
    made[0].end("the process ended")
    member.state = "exited"
    session.go()
    session.go(late_s)
    session.go(0.01)
    session.side.feed_steps(session.job, np.concatenate([one_step(900 * S), one_step(1000 * S + 100 * MS)]))
    session.job.finished = True
    session.go()
    session.go()
    assert session.side._processes[0].over
    assert len(session.rows["gpu_steps"]) == rows
    assert session.side.counters()["gpu_steps_late"] == (lost, True), "not those before its GPU times"
    assert session.job.losses["gpu_steps_late"] == lost


def test_steps_of_a_rank_s_next_process_are_not_late_ones_of_its_last(made: list[FakeCollector]) -> None:
    session = Session()
    member = session.rank(0, 77)
    session.go()
    made[0].give(second(1000 * S)[0])
    session.go()
    made[0].end("the process ended")
    member.state = "exited"
    session.go()
    session.go(OVER_S + LINGER_S + 1)
    session.go(1.0)
    session.rank(0, 78)
    session.go()
    assert [process.over for process in session.side._processes] == [True, False]
    session.side.feed_steps(session.job, one_step(1100 * S))
    assert session.side.counters()["gpu_steps_late"] == (0, True)


def test_a_collector_that_never_notices_the_end_is_let_go(made: list[FakeCollector]) -> None:
    session = Session()
    member = session.rank(0, 77)
    session.go()
    made[0].give(*second(1000 * S))
    member.state = "exited"
    session.go()
    assert not made[0].stopped
    session.go(gpu_process.LINGER_S + 0.1)
    assert made[0].closed
    session.go(gpu_process.LAST_STEPS_S)
    assert len(session.rows["gpu_usage"]) == 1


def test_a_process_that_runs_another_program_gets_a_new_collector(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.go()
    made[0].give(*second(1000 * S))
    session.go()
    made[0].end("the process runs another program now (exec)")
    session.go(0.2)
    session.go(0.2)
    assert len(made) == 1, "not at once: it may be on its way out"
    FakeCollector.kernels = ("other",)
    session.go(1.0)
    session.go(0.2)
    assert len(made) == 2
    gpu, calls = second(1002 * S)
    gpu["name"] = 1
    made[1].give(gpu, calls)
    session.go()
    assert [row["name"] for row in session.rows["kernel_events"]][2:] == ["other", "other"]
    session.finish()
    assert session.side.counters()["gpu_ops"] == (4, False)
    assert session.side.counters()["cupti_records"] == (2, False)
    assert [row["ts"].value - OFFSET for row in session.rows["gpu_usage"]] == [k * S for k in (1000, 1001, 1002)]


def test_an_armed_process_is_woken_before_it_is_a_rank(made: list[FakeCollector]) -> None:
    session = Session()
    target: Any = SimpleNamespace(pid=77, start_ticks=770, on_gpu=True, identity=Identity())
    session.candidates = [target, SimpleNamespace(pid=78, start_ticks=1, on_gpu=True, identity=Identity())]
    FakeCollector.armed = {77}
    session.go()
    session.go()
    assert [(collector.pid) for collector in made] == [77, 77], "one to ask, one to keep"
    assert session.side.callers() == set()
    made[1].give(*second(1000 * S))
    session.now += 0.1
    session.side.poll(session.now)
    assert session.side.callers() == {77}
    session.go()
    assert session.rows["kernel_events"] == []
    session.candidates = []
    session.rank(4, 77)
    session.go()
    assert [row["rank"] for row in session.rows["kernel_events"]] == [4, 4]
    assert session.side.callers() == set()
    assert len(made) == 2


def test_operations_of_what_never_was_a_rank_are_counted_as_lost(made: list[FakeCollector]) -> None:
    session = Session()
    session.candidates = [SimpleNamespace(pid=77, start_ticks=770, on_gpu=True, identity=Identity())]
    FakeCollector.armed = {77}
    session.go()
    made[1].give(*second(1000 * S))
    made[1].end("the process ended")
    session.candidates = []
    session.go()
    session.go(gpu_process.LINGER_S + 0.1)
    session.finish()
    assert session.side.counters()["gpu_ops_without_rank"] == (2, True)


def inject_with(monkeypatch: pytest.MonkeyPatch, how: Callable[[int], str], *, cuda: bool = True) -> None:
    monkeypatch.setattr(injection, "inject", lambda pid, by: how(pid))
    monkeypatch.setattr(injection, "maps_cuda", lambda _: cuda)


def wait_for(session: Session, condition: Callable[[], bool]) -> None:
    for _ in range(400):
        session.go(0.01)
        if condition():
            return
        for process in session.side._processes:
            if process.injection is not None:
                process.injection.wait(10)
    pytest.fail("it did not come")


def test_injecting_arms_first(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def inject(pid: int) -> str:
        asked.append(pid)
        return "injected: it was held for 4 ms"

    inject_with(monkeypatch, inject)
    session = Session("inject")
    session.rank(0, 77)
    session.go()
    assert made == []
    wait_for(session, lambda: len(made) == 1)
    assert asked == [77]
    assert list(session.notes) == ["process 77: injected: it was held for 4 ms"]


def test_no_injection_begins_once_the_trace_ends(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, asked = threading.Event(), threading.Event(), []

    def inject(pid: int) -> str:
        asked.append(pid)
        begun.set()
        go.wait(60)
        return "injected"

    inject_with(monkeypatch, inject)
    session = Session("inject")
    session.rank(0, 77)
    session.rank(1, 78)
    for _ in range(4):
        session.go(1.0)
    assert begun.wait(60)
    under_way = session.side._processes[0].injection
    monkeypatch.setattr(injection.Injector, "finish", lambda self: go.set())
    session.side.begin_stop()
    assert under_way is not None
    assert under_way.wait(10)
    session.go(2.0)
    assert asked == [77]


def test_what_cannot_be_injected_has_a_reason(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    def inject(pid: int) -> str:
        raise ArgusError(f"process {pid} is stopped: not injected", "Let it go on")

    inject_with(monkeypatch, inject)
    session = Session("inject")
    session.rank(0, 77)
    session.go()
    wait_for(session, lambda: session.side.settled(session.now))
    assert session.side.describe() == ["GPU times: failed: process 77 is stopped: not injected. Let it go on"]
    session.go(5)
    assert made == []
    assert len(session.notes) == 1


def test_a_thread_that_cannot_be_started_costs_a_process_no_gpu_times(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_with(monkeypatch, lambda pid: "injected")
    tried, aside = [], injection.Aside

    def begin(work: Callable[[], str], name: str) -> Any:
        tried.append(name)
        if len(tried) <= 2:
            raise RuntimeError("can't start new thread")
        return aside(work, name)

    monkeypatch.setattr(injection, "Aside", begin)
    session = Session("inject")
    session.rank(0, 77)
    session.go(1.0)
    session.go(1.0)
    (process,) = session.side._processes
    assert process.state == ("failed", injection.NO_THREAD)
    wait_for(session, lambda: len(made) == 1)
    assert session.side._processes[0] is process
    assert (process.failure, process.state[0], len(tried)) == ("", "on", 3)
    assert session.side.counters()["gpu_times_failed"] == (0, True)
    assert session.side._session.losses.totals["processes_quarantined"] == 0


def test_nothing_is_injected_before_cuda_is_there(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    inject_with(monkeypatch, lambda pid: pytest.fail("too early"), cuda=False)
    session = Session("inject")
    session.rank(0, 77)
    for _ in range(5):
        session.go(1.0)
    assert made == []
    session.finish()


def test_every_counter_is_explained_and_its_loss_is_reported() -> None:
    text = (Path(__file__).parents[4] / "docs" / "trace.md").read_text().split("## Counters")[1].split("## ")[0]
    explained = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3:
            explained.update(dict.fromkeys(cells[1].split(", "), cells[2] == "yes"))
    session = Session()
    session.rank(0, 77)
    session.go()
    counters = {**session.side.counters(), **Collector(os.getpid()).counters()}
    assert len(counters) > 20
    assert {name for name in counters if name not in explained} == set()
    assert {name for name in counters if explained[name] != counters[name][1]} <= {"cupti_buffers_unfinished"}


# ---- for people


def a_view(session: Session, **changes: Any) -> View:
    fields: dict[str, Any] = {
        "monotonic_ns": int(session.now * S), "elapsed_s": 12.0,
        "ranks": [RankView("j", 0, 77, "traced", 100.0, 5.0, 3, 3, 20.0)], "kernels": [("by launches", 5)],
        "gpu": session.side.views(), "gpu_kernels": session.side.top_kernels(8),
        "gpu_kernel_ns": session.side.kernel_ns, "collectives": [], "launches": 5, "collective_calls": 0, "lost": {},
        "waiting_bytes": 0, "store_error": "", "cpu_share": 0.01, "ring_fill": 0.0, "notes": [],
        "jobs": [JobView("j", 0, 1, 1, "torchrun", 3, [20.0] * 3, int(session.now * S), 5)],
    }  # fmt: skip
    return View(**{**fields, **changes})


def shown(view: View, page: str = "") -> str:
    return "\n".join(line.plain for line in frame(view, {}, Scene(page), 110, 40))


def test_the_live_view_shows_the_gpu(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.go()
    assert "GPU" not in plain_line(a_view(session), {})
    assert "by launches" in shown(a_view(session))
    for k in range(12):
        made[0].give(*second((1000 + k) * S, 5 + 2 * k))
        session.go(1.0)
    (view,) = session.side.views()
    assert (view.busy, view.idle, view.exposed, view.overlapped) == pytest.approx((0.5, 0.5, 0.1, 0.1))
    assert view.idle_gaps == pytest.approx(1.0)
    assert view.queue_depth == pytest.approx(0.002)
    assert view.match_rate == 1.0
    assert "  GPU busy 50%  " in plain_line(a_view(session), {})
    text = shown(a_view(session), "g")
    assert [line.split() for line in text.splitlines() if " 50% " in line] == [["0", "50%", "10%", "10%", "1/s", "0.0"]]
    (line,) = [line for line in text.splitlines() if "gemm(float*, int)" in line]
    assert line.split() == ["67%", "gemm(float*,", "int)", "12", "x", "400", "ms"]
    assert line.strip() in shown(a_view(session))
    assert "nothing has ended" not in text
    late = a_view(session, monotonic_ns=view.ended_ns + 65 * S)
    assert "nothing has ended on the GPU for 1 min 05 s" in shown(late, "g")


def test_the_live_view_gives_the_reason_why_there_is_nothing(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.rank(1, 78)
    session.go()
    for collector in made:
        collector.state, collector.reason = CollectorState.WAITING, "the process is not armed"
    text = shown(a_view(session), "g")
    assert text.count("GPU times: off: the process is not armed") == 1
    assert "top kernels by launches" in text


def test_windows_around_a_change_of_the_share_are_not_whole() -> None:
    """A second each, from 0 to 60 s, of which a quarter is recorded between 21 and 41 s."""
    session = Session()
    session.rank(0, 11)
    FakeCollector.armed = {11}
    session.go()
    session.side.set_share(0.25, 21 * S, UNKNOWN)
    session.side.set_share(0.5, 30 * S, (4711, ""))
    session.side.set_share(1.0, 41 * S, UNKNOWN)
    assert [collector.shares for collector in FakeCollector.made] == [[0.25, 1.0]]
    starts = np.arange(0, 60 * S, S)
    whole = session.side._duties.of(UNKNOWN).records_whole(starts, np.full(len(starts), S))
    # Of 20 to 40 s the first five are recorded, the first of which is incomplete.
    assert (starts[whole] // S).tolist() == [*range(21), 23, 24, *range(43, 60)]


def test_what_is_over_holds_only_what_is_reported_of_it() -> None:
    session = Session()
    members = [session.rank(number, 11 + number) for number in range(3)]
    FakeCollector.armed = {11, 12, 13}
    session.go()
    for member in members[:2]:
        member.state = "exited"
    for _ in range(60):
        session.go()
    over = [process for process in session.side._processes if process.over]
    assert [process.program for process in over] == [None, None]
    assert len(session.side.views()) == 3
    other = Job("other", 1)
    session.side.forget(other)
    assert len(session.side.views()) == 3
    session.side.forget(session.job)
    assert [view.rank for view in session.side.views()] == [2]


class Counted(list[Any]):
    """A list that counts how often one of its items was looked at."""

    looked = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.looked += 1
            yield each


def test_a_look_costs_each_process_once_however_many_ranks_have_ended() -> None:
    """A job of which one process lives is not over, and keeps its others."""
    session, number = Session(), 2000
    members = [session.rank(rank, 1000 + rank) for rank in range(number)]
    session.go()
    for member, process in zip(members[1:], session.side._processes[1:], strict=True):
        member.state, process.over = "exited", True
        process.drop_records()
    session.side._processes = counted = Counted(session.side._processes)
    session.side.look_quickly(session.now)
    assert len(counted) == number
    assert counted.looked <= 3 * number


def test_looks_find_the_processes_of_new_ranks_and_no_other() -> None:
    """As if all were compared with all."""
    for seed in range(20):
        random, session = np.random.default_rng(seed), Session()
        jobs = [session.job, *(Job(f"k{number}", 8) for number in range(3))]
        session.side._session.roster.jobs[:] = jobs
        found: list[tuple[Member, Job]] = []
        for _ in range(30):
            for _ in range(int(random.integers(0, 4))):
                pid = int(random.integers(1, 40))  # of an earlier one, too
                start = pid * 10 + int(random.integers(0, 2))
                target: Any = SimpleNamespace(pid=pid, start_ticks=start, on_gpu=True, identity=Identity())
                state = "traced" if random.random() < 0.8 else "exited"
                source = "torchrun" if random.random() < 0.8 else "parent"
                jobs[int(random.integers(0, 4))].members[pid] = Member(target, pid, source, state=state)
            for process in session.side._processes:
                if process.member is not None and random.random() < 0.2:
                    process.over = True
            living = {gpu_process.key_of(each.target) for each in session.side._processes if not each.over}
            for job in jobs:
                for member in job.ranks():
                    new = gpu_process.key_of(member.target) not in living
                    if new and member.state == "traced" and not any(member is each for each, _ in found):
                        found.append((member, job))
            session.side.look_quickly(session.now)
            assert [(id(each.member), id(each.job)) for each in session.side._processes] == [
                (id(member), id(job)) for member, job in found
            ]


def test_processes_that_are_over_share_what_is_empty() -> None:
    session = Session()
    members = [session.rank(rank, 11 + rank) for rank in range(3)]
    session.go()
    for collector in FakeCollector.made[:2]:
        for at in range(1000, 1012):
            collector.give(*second(at * S, at))
            session.go(1.0)
    before = session.side.views()
    assert before[0].busy > 0
    for member, collector in zip(members[:2], FakeCollector.made, strict=False):
        member.state = "exited"
        collector.end("the process ended")
    session.job.finished = True
    session.go()
    first, second_one, third = session.side._processes
    assert (first.over, second_one.over, third.over) == (True, True, False)
    for name in ("usage", "steps", "flops"):
        assert getattr(first, name) is getattr(second_one, name) is not getattr(third, name)
    assert [len(first.windows), first.held] == [1, 0]
    assert [view.rank for view in session.side.views()] == [0, 1, 2]
    assert session.side.views()[0].busy > 0


def test_what_is_dropped_as_a_job_is_forgotten_is_in_its_coverage(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the rows: nobody looks at the counters once it is gone."""
    session = Session()
    session.rank(0, 77)
    other = beside(session, 2)
    session.go()
    shared, failing = session.side._session, made[1]
    failing.state, failing.reason = CollectorState.FAILED, "no CUPTI"
    for process in session.side._processes[1:]:
        assert process.program is not None
        assert process.member is not None
        process.program.batches.append(Batch(ops(30, start_ns=1001 * S, end_ns=1001 * S + MS), host(0), Counter()))
        process.member.state = "exited"
    rows, sides = SessionRows(shared), [session.side, session.side._kernel_side]
    tracer: Any = SimpleNamespace(
        sides=sides,
        bulkheads=shared.bulkheads,
        _rows=rows,
        _roster=SimpleNamespace(take_over=lambda *_: [other]),
        _signals=SimpleNamespace(forget=lambda job: None),
        _write_coverage=lambda jobs: rows.write_coverage(session.side.counters(), 0, lambda pid: 0, sides, jobs),
    )
    tracer._of_each_side = partial(Tracer._of_each_side, tracer)
    shared.roster.jobs.remove(other)
    Tracer._forget_jobs(tracer, session.now)
    found = {row["counter"]: row["value"] for row in session.rows["coverage"]}
    assert {row["job"] for row in session.rows["coverage"]} == {"k"}
    assert (found["gpu_ops_over_share"], found["gpu_times_failed"]) == (60, 1)
    assert [process.job for process in session.side._processes] == [session.job]


def test_what_an_owner_had_no_time_for_ends_with_its_job(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    other = beside(session, 2)
    session.go()
    in_portions(session, monkeypatch, 1.0)
    of_other = [each for each in made if each.pid >= 1000]
    for collector in of_other:
        collector.give(ops(50, start_ns=1000 * S, end_ns=1000 * S + MS, name=1))
    session.go()
    for collector in of_other:
        collector.end("the process ended")
        other.members[collector.pid].state = "exited"
    for process in session.side._processes[1:]:
        assert process.program is not None
        process.program.batches.append(Batch(ops(30, start_ns=1001 * S, end_ns=1001 * S + MS), host(0), Counter()))
    for _ in range(10):
        session.go()
    waiting = [process for process in session.side._processes if process.job is other]
    fetched = sum(len(b.gpu) for process in waiting if process.program is not None for b in process.program.batches)
    assert [process.over for process in waiting] == [False, False]
    assert fetched > 0
    before = other.losses["gpu_ops_over_share"]
    other.finished = True
    session.side.end_job(other)
    session.side.forget(other)
    assert not any(process.job is other for process in session.side._processes)
    assert all(process.over and process.program is None for process in waiting)
    assert all(collector.closed for collector in of_other)
    assert other.losses["gpu_ops_over_share"] == before + fetched
    assert session.job.losses["gpu_ops_over_share"] == 0
    assert [view.rank for view in session.side.views()] == [0]
    session.side._kernel_side.forget(other)
    assert not any(of_job.job is other for of_job in session.side._kernel_side._jobs.values())


def test_a_process_without_the_helper_is_looked_at_when_that_is_due(made: list[FakeCollector]) -> None:
    """500 of them, 50 times a second."""
    session = Session()
    member = session.rank(0, 77)
    session.go()
    (collector,) = made
    polled: list[float] = []
    collector.poll = lambda now: polled.append(now) or []  # type: ignore[method-assign,func-returns-value]
    collector.armed, collector.due, collector.state = False, float("inf"), CollectorState.WAITING
    session.side._processes[0].due = 0.0
    for _ in range(500):
        session.now += 0.02
        session.side.poll(session.now)
    assert len(polled) == pytest.approx(10 / gpu_module.UNARMED_S, abs=1)
    member.state = "exited"
    for _ in range(50):
        session.now += 0.02
        session.side.poll(session.now)
    assert session.side._processes[0].ended_at, "its end is noticed all the same"
    collector.due = 0.0
    session.now += gpu_module.UNARMED_S
    session.side.poll(session.now)
    polled.clear()
    for _ in range(10):
        session.side.poll(session.now)
    assert len(polled) == 10, "one that has the helper is fetched from in each turn"


def test_what_comes_of_a_process_that_is_no_rank_is_bounded(made: list[FakeCollector]) -> None:
    session = Session()
    session.candidates = [SimpleNamespace(pid=77, start_ticks=770, on_gpu=True, identity=Identity())]
    FakeCollector.armed = {77}
    session.go()
    most = gpu_module.KEPT_BATCHES
    for number in range(most + 30):
        made[1].give(*second((1000 + number) * S))
        session.go()
    assert len(session.side._processes[0].program.batches) <= most + 1  # type: ignore[union-attr]
    assert session.side.counters()["gpu_ops_without_rank"] == (2 * 30, True)


def test_devices_that_no_node_has_are_left_out(made: list[FakeCollector]) -> None:
    """Records are in memory that the process can write."""
    session = Session()
    session.rank(0, 77)
    session.go()
    for number in range(8):
        gpu, calls = second((1000 + number) * S)
        gpu["device"][1] = rows_of_gpus.MAX_DEVICES + number
        made[0].give(gpu, calls)
        session.go(1.0)
    session.finish()
    assert session.side.counters()["gpu_ops_of_no_device"] == (8, True)
    assert {row["device"] for row in session.rows["gpu_usage"]} == {0}


def test_of_whom_gpu_times_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper_address(pid: int) -> int | None:
        if pid == 3:
            raise FileNotFoundError("it has ended")
        return 0x7000 if pid == 1 else None

    monkeypatch.setattr(gpu_module, "helper_address", helper_address)
    assert [Session().side.may_time(pid) for pid in (1, 2, 3)] == [True, False, False]
    assert [Session("inject").side.may_time(pid) for pid in (1, 2, 3)] == [True] * 3
    assert [Session("off").side.may_time(pid) for pid in (1, 2, 3)] == [False] * 3


# ---- several owners


def test_an_owner_s_records_wait_while_they_have_taken_their_part(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reading takes is a fiction here: 2 ms of the loop's time for each record."""
    spent_s = 0.0
    monkeypatch.setattr(gpu_module.time, "thread_time", lambda: spent_s)
    session = Session()
    session.job.owner, other = (1001, ""), Job("k", 7, "", (1002, ""))
    session.rank(0, 77)
    other.members[78] = session.rank(1, 78)
    del session.job.members[78]
    session.side._session.roster.jobs.append(other)
    session.go()
    polls = {each.pid: each.poll for each in made}

    def costly(collector: FakeCollector) -> Any:
        def poll(now: float) -> list[Batch]:
            nonlocal spent_s
            batches = polls[collector.pid](now)
            spent_s += sum(0.002 * len(batch.gpu) for batch in batches)
            return batches

        return poll

    for each in made:
        monkeypatch.setattr(each, "poll", costly(each))
    greedy_at, modest_at = (next(each for each in made if each.pid == pid) for pid in (77, 78))
    for at in range(6):
        greedy_at.give(ops(500, start_ns=1000 * S + at * S, end_ns=1000 * S + at * S + MS, name=1))
        modest_at.give(ops(2, start_ns=1000 * S + at * S, end_ns=1000 * S + at * S + MS, name=1))
        session.go()
        assert not modest_at.batches, "never kept waiting"
    assert len(greedy_at.batches) == 5, "the first took a second, of which half may be had"
    session.go(1.5)
    assert not greedy_at.batches
    greedy_at.give(ops(1, start_ns=1010 * S, end_ns=1011 * S, name=1))
    session.go()
    assert len(greedy_at.batches) == 1
    monkeypatch.setattr(greedy_at, "begin_stop", lambda: None)
    monkeypatch.setattr(gpu_module, "STOP_S", 0.0)
    session.side.begin_stop()
    session.side.stop()
    assert session.side.counters()["cupti_buffers_unfinished"] == (1, True), "what is left at the end is counted"
    assert greedy_at.closed


def test_who_is_alone_never_waits(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    spent_s = 0.0

    def thread_time() -> float:
        nonlocal spent_s
        spent_s += 10
        return spent_s

    monkeypatch.setattr(gpu_module.time, "thread_time", thread_time)
    session = Session()
    session.rank(0, 77)
    session.rank(1, 78)
    for at in range(4):
        session.go()
        for each in made:
            each.give(ops(2, start_ns=1000 * S + at * S, end_ns=1000 * S + at * S + MS, name=1))
    session.go()
    assert [len(each.batches) for each in made] == [0, 0]


def test_helpers_hear_of_argus_while_the_loop_hangs(made: list[FakeCollector]) -> None:
    session = Session()
    session.rank(0, 77)
    session.go()
    session.go()
    for late_s, beats in ((1.0, 1), (60.0, 2), (gpu_module.HANGS_S + 1, 2)):
        session.side.relieve(session.now + late_s)
        assert made[0].beats == beats, late_s


def beside(session: Session, number: int, owner: Owner = (1002, "")) -> Job:
    """Another job of the session, with processes from PID 1000 on."""
    other = Job("k", 8, "", owner)
    for rank in range(number):
        other.members[1000 + rank] = session.rank(rank, 1000 + rank)
        del session.job.members[1000 + rank]
    session.side._session.roster.jobs.append(other)
    return other


def test_idle_processes_of_others_take_no_room_for_operations(made: list[FakeCollector]) -> None:
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    beside(session, 2000)
    session.go()
    honest = next(each for each in made if each.pid == 77)
    at = 1000 * S + np.arange(10_000) * 40 * US
    at[0] = 999 * S  # before the step
    given = ops(10_000, start_ns=at, end_ns=at + 30 * US, name=1, correlation=np.arange(10_000) + 1)
    calls = host(10_000, kind=HostKind.RUNTIME, tid=7, correlation=given["correlation"], start_ns=at - MS)
    honest.give(given, calls)
    session.go()
    steps = np.zeros(1, ITERATION)
    steps["ts_ns"], steps["duration_ns"] = 1000 * S - 2 * MS, S
    session.side.feed_steps(session.job, steps)
    session.go(final=True)
    assert [row["kernels"] for row in session.rows["gpu_steps"]] == [9_999]
    assert session.side.counters()["gpu_ops_over_share"] == (0, True)


def test_operations_of_an_owner_s_processes_are_bounded_in_all(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ran at one time, so that none is over. What is dropped is lost, of the job that had too many."""
    monkeypatch.setattr(room, "OF_OWNER", 500)
    monkeypatch.setattr(room, "OF_ALL", 1000)
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    greedy = beside(session, 5)
    session.go()

    def give(number: int) -> None:
        for each in made:
            each.give(ops(number if each.pid >= 1000 else 20, start_ns=1000 * S, end_ns=1000 * S + MS, name=1))
        session.go(4.0)

    for _ in range(4):
        give(100)
        held = {process.target.pid: process.held for process in session.side._processes}
        assert sum(number for pid, number in held.items() if pid >= 1000) <= 500
    losses = session.side._session.losses
    lost, loss = session.side.counters()["gpu_ops_over_share"]
    assert loss
    assert 2000 - 20 - 500 <= lost <= 2000
    assert losses.of(greedy)["gpu_ops_over_share"] == lost
    assert losses.of(session.job)["gpu_ops_over_share"] == 0
    assert session.side.counters()["gpu_ops_late"] == (0, False)
    assert 0 < session.side.counters()["gpu_ops_without_step"][0] <= lost, "no step came either"


def test_ranks_without_steps_lose_nothing_by_that(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of a server that infers: their seconds are whole, and what waited for a step has none."""
    monkeypatch.setattr(room, "OF_OWNER", 6000)
    session = Session()
    for rank in range(8):
        session.rank(rank, 77 + rank)
    session.go()
    for turn in range(40):
        at = (1000 + turn) * S + np.arange(50) * 20 * MS
        for each in made:
            each.give(ops(50, start_ns=at, end_ns=at + MS, name=1))
        session.go(1.0)
        assert sum(process.held for process in session.side._processes) <= 6000
    session.finish()
    counters = session.side.counters()
    assert counters["gpu_ops_over_share"] == (0, True)
    assert counters["gpu_ops_without_step"][0] >= 8000
    assert session.job.losses["gpu_ops_over_share"] == 0
    assert sum(row["kernels"] for row in session.rows["gpu_usage"]) == 8 * 40 * 50


def test_operations_that_wait_to_be_summed_up_take_room(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not get lost: without steps they are summed up sooner."""
    monkeypatch.setattr(room, "OF_OWNER", 500)
    session = Session()
    for rank in range(4):
        session.rank(rank, 77 + rank)
    session.go()
    kernels, waited = session.side._kernel_side, 0
    for turn in range(30):
        for each in made:
            at = (1000 + turn) * S + np.arange(50) * MS
            each.give(ops(50, start_ns=at, end_ns=at + US, name=1))
        session.go(1.0)
        waiting = [kernels.waiting(session.job, 77 + rank) for rank in range(4)]
        assert sum(waiting) <= 500
        assert [process.waiting for process in session.side._processes] == waiting
        waited = max(waited, sum(waiting))
    assert waited >= 200
    session.finish()
    kernels.work_at(session.now + 1, int(session.now * S), final=True)
    rows = session.rows["kernel_summaries"] + session.rows["kernel_escapes"]
    assert sum(row["count"] for row in rows) + len(session.rows["kernel_spikes"]) == 4 * 30 * 50
    assert [process.waiting for process in session.side._processes] == [0] * 4


def test_a_process_with_too_many_operations_of_its_own_loses_some(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_process, "MOST_OPS", 100)
    session = Session()
    session.rank(0, 77)
    session.go()
    made[0].give(ops(150, start_ns=1000 * S, end_ns=1000 * S + MS, name=1))
    session.go(4.0)
    session.go(4.0)
    counters = session.side.counters()
    assert counters["gpu_ops_over_share"] == (75, True), "of its second"
    assert counters["gpu_ops_without_step"] == (75, False), "no step came"
    assert session.job.losses["gpu_ops_over_share"] == 75


def test_calls_of_an_owner_s_processes_are_bounded_in_all(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that wait for operations that do not come, all made at one time by what they say."""
    monkeypatch.setattr(room, "OF_OWNER", 500)
    monkeypatch.setattr(room, "OF_ALL", 1000)
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    greedy = beside(session, 5)
    session.go()
    for turn in range(4):
        for each in made:
            number = 1000 if each.pid >= 1000 else 20
            given = host(number, kind=HostKind.RUNTIME, start_ns=1000 * S, end_ns=1000 * S + 1)
            given["correlation"] = np.arange(number) + number * turn + 1
            each.give(ops(0), given)
        session.go()
        held = {process.target.pid: process.held for process in session.side._processes}
        assert sum(number for pid, number in held.items() if pid >= 1000) <= 500
    losses = session.side._session.losses
    lost, _ = session.side.counters()["gpu_ops_over_share"]
    most = 500 * room.OP_BYTES // correlation.KEPT_BYTES[1]
    assert 20_000 - most <= lost <= 20_000 - 0.9 * most
    assert losses.of(greedy)["gpu_ops_over_share"] == lost
    assert losses.of(session.job)["gpu_ops_over_share"] == 0


def test_calls_of_long_ago_are_dropped_without_a_loss(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest owner, whose calls all have their operations within a second, in less room than two minutes of them
    take. What else waits takes more than an equal part beside them."""
    monkeypatch.setattr(room, "OF_OWNER", 28_000)
    session = Session()
    session.rank(0, 77)
    session.rank(1, 78)
    session.go()
    number = 1000
    launched = np.zeros(2 * number, LAUNCH)
    launched["pid"], launched["tid"] = np.repeat([77, 78], number), 7
    launched["call"] = BY_SYMBOL["cudaLaunchKernel"].id
    most = 0
    for turn in range(60):
        at = (1000 + turn) * S + np.arange(number) * 500 * US
        launched["ts_ns"] = np.tile(at - 700, 2)
        for each in made:
            ids = np.arange(number) + 1 + number * turn
            calls = host(number, kind=HostKind.RUNTIME, tid=7, correlation=ids, start_ns=at, end_ns=at + 5 * US)
            each.give(ops(number, start_ns=at + MS, end_ns=at + 2 * MS, name=1, correlation=ids), calls)
        steps = np.zeros(2, ITERATION)
        steps["ts_ns"], steps["duration_ns"] = (1000 + turn) * S - 2 * MS, S
        steps["rank"], steps["step"] = [0, 1], turn
        session.side.feed_steps(session.job, steps)
        session.go(1.0, launched)
        most = max(most, sum(process.held for process in session.side._processes))
    assert most >= 27_000, "there was not room for all"
    assert sum(process.held for process in session.side._processes) <= room.OF_OWNER
    for process in session.side._processes:
        assert process.program is not None
        assert process.program.correlator.kept[1] < 30 * number
    counters = session.side.counters()
    assert counters["gpu_ops_over_share"] == (0, True)
    assert counters["gpu_launch_matched"] == counters["gpu_launch_probed"] == (2 * 60 * number, False)
    # An operation whose call is gone is a loss, of its own job.
    made[0].give(ops(1, start_ns=1059 * S, end_ns=1060 * S, name=1, correlation=1))
    session.go(1.0)
    session.go(4.0)
    assert session.side.counters()["gpu_ops_over_share"] == (1, True)
    assert session.job.losses["gpu_ops_over_share"] == 1


def test_all_that_is_kept_of_a_process_takes_room(made: list[FakeCollector]) -> None:
    """And can be dropped."""
    session = Session()
    session.rank(0, 77)
    session.go()
    (process,) = session.side._processes
    program = process.program
    assert program is not None
    number = 10_000
    ids = np.arange(number) + 1
    times = {"start_ns": 1000 * S, "end_ns": 1000 * S + 5, "correlation": ids}
    calls, nothing = host(number, kind=HostKind.RUNTIME, **times), host(0)
    launches = np.zeros(number, LAUNCH)
    launches["ts_ns"], launches["call"] = 1000 * S, BY_SYMBOL["cudaLaunchKernel"].id
    waiting = ops(number, **{**times, "correlation": number + ids})
    launched = ops(number, launch_ns=1000 * S, flags=records.GPU_LAUNCH_MATCHED, **times)
    words = np.zeros(number, np.int32)
    products = np.zeros(number, WORK)
    products["begin_ns"] = 1000 * S

    def batches() -> None:
        program.batches = [Batch(ops(number), calls, Counter())] * 3

    def unanswered() -> None:
        process.unanswered = np.full(number, 1000 * S, np.uint64)

    makers: dict[str, Callable[[], object]] = {
        "calls": lambda: program.correlator.feed(ops(0), calls, NO_LAUNCHES, 1000 * S),
        "launches": lambda: program.correlator.feed(ops(0), nothing, launches, 1000 * S),
        "waiting": lambda: program.correlator.feed(waiting, nothing, NO_LAUNCHES, 1000 * S),
        "kernels": lambda: process.flops.feed(launched, words, ["gemm"]),
        "products": lambda: process.flops._works.append(products),
        "batches": batches,
        "unanswered": unanswered,
        "operations": lambda: process.steps.feed(launched, np.zeros(number, bool)),
    }
    process.steps.feed_steps(np.zeros(1, ITERATION))
    held = process.held
    for name, make in makers.items():
        make()
        assert process.held >= held + number * 8 // room.OP_BYTES, name
        held = process.held
    process.keep(1000)
    assert process.take_over_share() > 9 * number, "6 of batches, calls, launches, those without an answer, operations"
    program.correlator.feed(ops(0), nothing, NO_LAUNCHES, 1000 * S)  # those that waited are handed out
    assert process.held <= 1000 + room.OP_BYTES


def in_portions(session: Session, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[list[int]]:
    """What working on an operation takes is a fiction here, beside another owner: which processes had work done, of
    each turn to come."""
    spent_s, turns = 0.0, [[]]  # type: ignore[var-annotated]
    write = session.side._rows.write_fetched

    def costly(process: Any, program: Any, *rest: Any) -> None:
        nonlocal spent_s
        if program.batches:
            turns[-1].append(process.target.pid)
        spent_s += seconds * sum(len(batch.gpu) for batch in program.batches)
        write(process, program, *rest)

    monkeypatch.setattr(gpu_module.time, "thread_time", lambda: spent_s)
    monkeypatch.setattr(session.side._rows, "write_fetched", costly)
    return turns


def test_what_was_fetched_of_many_processes_is_worked_on_in_turns(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    beside(session, 8)
    session.go()
    turns = in_portions(session, monkeypatch, 0.001)
    for each in made:
        gpu, calls = second(1000 * S)
        each.give(*((gpu, calls) if each.pid == 77 else (ops(200, start_ns=1000 * S, end_ns=1000 * S + MS), None)))
    launches = np.zeros(9, LAUNCH)
    launches["pid"], launches["call"] = [each.pid for each in made], BY_SYMBOL["cudaLaunchKernel"].id
    launches["ts_ns"], launches["tid"] = 1000 * S - MS, 7
    session.go(cuda=launches)
    assert 77 in turns[0], "who has time left does not wait"
    assert len(turns[0]) <= 4, "0.25 s are saved, each takes 0.2"
    first = set(turns[0])
    waiting = {process.target.pid: process for process in session.side._processes if process.target.pid not in first}
    assert all(len(process.unanswered) == 1 for process in waiting.values()), "launches of the turn are not lost"
    assert all(process.program.correlator.kept[2] == 1 for process in waiting.values() if process.program)
    for _ in range(20):
        turns.append([])
        session.go(0.5)
        assert len(turns[-1]) <= 3
    done = [pid for turn in turns for pid in turn]
    assert sorted(done) == sorted(each.pid for each in made), "each in its turn, once"


def test_whose_turn_was_missed_comes_first(made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    beside(session, 6)
    session.go()
    turns = in_portions(session, monkeypatch, 0.001)
    for at in range(40):
        turns.append([])
        for each in made:
            if each.pid != 77 and not each.batches:
                each.give(ops(300, start_ns=(1000 + at) * S, end_ns=(1000 + at) * S + MS))
        session.go(0.5)
    done = Counter(pid for turn in turns for pid in turn)
    assert len(done) == 6
    assert max(done.values()) - min(done.values()) <= 2


def test_at_the_end_all_that_was_fetched_is_worked_on(
    made: list[FakeCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    session.job.owner = (1001, "")
    session.rank(0, 77)
    beside(session, 8)
    session.go()
    turns = in_portions(session, monkeypatch, 0.001)
    for each in made:
        each.give(ops(200, start_ns=1000 * S, end_ns=1000 * S + MS))
    session.go()
    assert len(turns[0]) < 5
    session.finish()
    assert sorted(turns[0]) == sorted(each.pid for each in made)
    assert session.side.counters()["gpu_ops"] == (9 * 200, False)
