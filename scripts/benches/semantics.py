"""Finding steps as calls come in: Argus's trackers against autocorrelation of the newest calls, batch by batch.

Four ranks make 56 launches and 4 all-reduces a step of 25 ms, and come in batches of a quarter of a second. Ours:
``StepTracker`` (period, verified, numbered alike on all ranks), for jobs of PyTorch ``MarkedSteps`` and
``PhaseTracker`` (13 marks a step), and ``GpuSteps`` (phases of what the GPUs ran, in batches of a second). Reference:
the period of the call types by autocorrelation through FFT over the newest 4,096 calls, which is what GREYHOUND (ATC
'25) describes; it finds a length, and neither boundaries nor numbers. Times are of the CPU, the ratio of those per
call, median of rounds. Then the same trackers take ``ARGUS_BENCH_BLOCKS`` (5) times 2,000 steps of each rank: what
they hold after a fifth of them, and at the end.
"""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc

import numpy as np
from numpy.typing import NDArray

from argus.model.calls import BY_SYMBOL
from argus.model.records import COLLECTIVE, GPU_LAUNCH_MATCHED, GPU_OP, LAUNCH, GpuKind
from argus.semantics.gpu.usage import GpuSteps
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.phases.cpu import MARK, PhaseTracker, What
from argus.semantics.phases.gpu import What as GpuWhat
from argus.semantics.phases.gpu import communicates
from argus.semantics.steps.by_calls import ITERATION, StepTracker
from argus.semantics.steps.by_marks import MarkedSteps
from argus.semantics.steps.range_names import Role
from benches import Result

RANKS = 4
STEPS = 2000
STEP_NS = 25_000_000
BATCH_STEPS = 10
LAUNCHES = 56
REDUCES = 4
WINDOW = 4096
GPU_BATCH_STEPS = 40
BLOCK_NS = STEPS * STEP_NS
BLOCKS = int(os.environ.get("ARGUS_BENCH_BLOCKS", "5"))


def _calls(rank: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
    per_step = LAUNCHES + REDUCES
    ts = (np.arange(STEPS)[:, None] * STEP_NS + np.arange(per_step) * (STEP_NS // 80)).astype(np.uint64) + 10**9
    place = np.arange(per_step)
    reduces = place % (per_step // REDUCES) == per_step // REDUCES - 1
    launches = np.zeros(STEPS * LAUNCHES, LAUNCH)
    launches["ts_ns"] = ts[:, ~reduces].ravel()
    launches["handle"] = np.tile(np.arange(LAUNCHES) * 64 + 4096, STEPS)
    launches["call"] = BY_SYMBOL["cudaLaunchKernel"].id
    collectives = np.zeros(STEPS * REDUCES, COLLECTIVE)
    collectives["ts_ns"] = ts[:, reduces].ravel()
    collectives["call"] = BY_SYMBOL["ncclAllReduce"].id
    collectives["count"] = np.tile(np.arange(REDUCES) + 1000, STEPS)
    collectives["comm"] = 7_000_000 + rank
    collectives["seq"] = np.arange(len(collectives))
    return launches, collectives


def _communicators() -> NDArray[np.void]:
    rows = np.zeros(RANKS, COMMUNICATOR)
    rows["rank"] = rows["comm_rank"] = np.arange(RANKS)
    rows["comm"] = 7_000_000 + np.arange(RANKS)
    rows["comm_group"], rows["nranks"], rows["joined_by"] = 1, RANKS, "unique_id"
    return rows


def _marks() -> NDArray[np.void]:
    """One rank's: data, zero_grad, forward, backward with a wait and two works, optimiser."""
    one = np.zeros(14, MARK)
    one["what"] = [
        What.RANGE_BEGIN, What.RANGE_END, What.RANGE_BEGIN, What.RANGE_END, What.RANGE_BEGIN, What.RANGE_END,
        What.BACKWARD_BEGIN, What.WORK_BEGIN, What.WAIT, What.WORK_END, What.BACKWARD_END,
        What.RANGE_BEGIN, What.RANGE_END, What.RANGE_END,
    ]  # fmt: skip
    one = one[:13]
    one["role"][[0, 2, 4, 11]] = [Role.DATA, Role.ZERO_GRAD, Role.FORWARD, Role.OPTIMIZER]
    one["tid"] = np.where(np.isin(one["what"], (What.WORK_BEGIN, What.WORK_END)), 2, 1)
    one["handle"][[7, 9]] = 99
    out = np.tile(one, STEPS)
    out["ts_ns"] = 10**9 + np.repeat(np.arange(STEPS) * STEP_NS, 13) + np.tile(np.arange(13) * (STEP_NS // 14), STEPS)
    return out


def _batches(times: NDArray[np.uint64], block: int) -> NDArray[np.int64]:
    edges = 10**9 + block * BLOCK_NS + np.arange(0, STEPS + BATCH_STEPS, BATCH_STEPS) * STEP_NS
    return np.searchsorted(times, edges)


class _Tracked:
    """What a job's calls, marks and operations go through, block after block of ``STEPS`` steps."""

    def __init__(self) -> None:
        self.tracker = StepTracker()
        self.tracker.align(_communicators())
        self.marked, self.phases = MarkedSteps(), [PhaseTracker() for _ in range(RANKS)]
        self.marked.align(np.empty(0, COMMUNICATOR))
        self.gpus = [GpuSteps() for _ in range(RANKS)]

    def calls(self, jobs: list[tuple[NDArray[np.void], NDArray[np.void]]], block: int) -> tuple[float, int]:
        """CPU seconds, and steps found, of all ranks."""
        jobs = [(_later(launches, block), _later(collectives, block)) for launches, collectives in jobs]
        cuts = [(_batches(launches["ts_ns"], block), _batches(calls["ts_ns"], block)) for launches, calls in jobs]
        found = 0
        begin = time.process_time()
        for batch in range(STEPS // BATCH_STEPS):
            for rank, (launches, collectives) in enumerate(jobs):
                first, second = cuts[rank]
                self.tracker.feed(
                    rank,
                    launches[first[batch] : first[batch + 1]],
                    collectives[second[batch] : second[batch + 1]],
                )
            found += len(self.tracker.advance())
        return time.process_time() - begin, found

    def marks(self, marks: NDArray[np.void], block: int) -> tuple[float, int]:
        """CPU seconds, and phases found, of all ranks."""
        marks = _later(marks, block)
        cuts = _batches(marks["ts_ns"], block)
        found = 0
        begin = time.process_time()
        for batch in range(STEPS // BATCH_STEPS):
            part = marks[cuts[batch] : cuts[batch + 1]]
            for rank in range(RANKS):
                self.phases[rank].feed(part)
                self.marked.feed_marks(rank, part)
            if not self.marked.ready(range(RANKS)):
                continue
            rows = self.marked.advance(int(part["ts_ns"][-1]))
            for rank in range(RANKS):
                found += len(self.phases[rank].split(rows[rows["rank"] == rank]))
                self.phases[rank].take_segments()
        return time.process_time() - begin, found

    def operations(self, ops: NDArray[np.void], kinds: NDArray[np.uint8], block: int) -> tuple[float, int]:
        """CPU seconds, and phases found, of all GPUs."""
        ops = ops.copy()
        for name in ("start_ns", "end_ns", "launch_ns", "launch_end_ns"):
            ops[name] += block * BLOCK_NS
        steps = np.zeros(STEPS, ITERATION)
        steps["step"] = block * STEPS + np.arange(STEPS)
        steps["ts_ns"], steps["duration_ns"] = 10**9 + steps["step"].astype(np.uint64) * STEP_NS, STEP_NS
        per_batch = GPU_BATCH_STEPS * (len(ops) // STEPS)
        found = 0
        begin = time.process_time()
        for batch in range(STEPS // GPU_BATCH_STEPS):
            part = slice(batch * per_batch, (batch + 1) * per_batch)
            for gpu in self.gpus:
                gpu.feed(ops[part], communicates(kinds[part]), kinds[part])
                gpu.feed_steps(steps[batch * GPU_BATCH_STEPS : (batch + 1) * GPU_BATCH_STEPS])
                gpu.advance()
                gpu.take_over()
                gpu.take_collectives()
                found += len(gpu.take_phases())
        return time.process_time() - begin, found


def _later(rows: NDArray[np.void], block: int) -> NDArray[np.void]:
    """The same in a later block of steps."""
    rows = rows.copy()
    rows["ts_ns"] += block * BLOCK_NS
    if "seq" in (rows.dtype.names or ()):
        rows["seq"] += block * STEPS * REDUCES
    return rows


def _operations() -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """One rank's, and what they are: each of the calls launches one; the kernels' names show every other one."""
    per_step = LAUNCHES + REDUCES
    place = np.arange(per_step)
    one = np.where(place % 2, GpuWhat.KERNEL, np.where(place < per_step // 3, GpuWhat.FORWARD, GpuWhat.BACKWARD))
    one[place % (per_step // REDUCES) == per_step // REDUCES - 1] = GpuWhat.ALL_REDUCE
    one[0] = GpuWhat.COPY_IN
    kinds = np.tile(one.astype(np.uint8), STEPS)
    ops = np.zeros(len(kinds), GPU_OP)
    ops["kind"] = np.where(kinds == GpuWhat.COPY_IN, GpuKind.MEMCPY, GpuKind.KERNEL)
    ops["launch_ns"] = ((np.arange(STEPS)[:, None] * STEP_NS) + place * (STEP_NS // 80)).ravel() + 10**9
    ops["launch_end_ns"] = ops["launch_ns"] + 5_000
    ops["start_ns"] = ops["launch_ns"] + 20_000
    ops["end_ns"] = ops["start_ns"] + STEP_NS // 100
    ops["launch_tid"], ops["flags"] = 1, GPU_LAUNCH_MATCHED
    ops["name"] = np.tile(place, STEPS)
    return ops, kinds


def _autocorrelate(jobs: list[tuple[NDArray[np.void], NDArray[np.void]]]) -> float:
    spent = 0.0
    for launches, collectives in jobs:
        types = np.concatenate([launches["handle"], collectives["count"]]).astype(np.float64)
        order = np.argsort(np.concatenate([launches["ts_ns"], collectives["ts_ns"]]), kind="stable")
        types = types[order]
        per_batch = BATCH_STEPS * (LAUNCHES + REDUCES)
        begin = time.process_time()
        for end in range(per_batch, len(types) + 1, per_batch):
            window = types[max(0, end - WINDOW) : end]
            window = window - window.mean()
            spectrum = np.fft.rfft(window, 2 * len(window))
            correlation = np.fft.irfft(spectrum * spectrum.conj())[: len(window)]
            if len(window) > 200:
                assert np.argmax(correlation[30 : len(window) // 2]) + 30 > 0
        spent += time.process_time() - begin
    return spent


def _held(blocks: int) -> list[float]:
    """MiB that the trackers hold after each block."""
    jobs, marks, gpu = [_calls(rank) for rank in range(RANKS)], _marks(), _operations()
    tracked = _Tracked()
    tracemalloc.start()
    held = []
    for block in range(blocks):
        tracked.calls(jobs, block)
        tracked.marks(marks, block)
        tracked.operations(*gpu, block)
        held.append(tracemalloc.get_traced_memory()[0] / 2**20)
    tracemalloc.stop()
    return held


def run(rounds: int) -> Result:
    jobs = [_calls(rank) for rank in range(RANKS)]
    marks, (ops, kinds) = _marks(), _operations()
    calls = RANKS * STEPS * (LAUNCHES + REDUCES)
    names = ("calls (ours)", "calls (autocorrelation)", "marks (ours)", "operations of GPUs (ours)")
    rows: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        tracked = _Tracked()
        for name, events, least, (seconds, found) in (
            (names[0], calls, STEPS - 5, tracked.calls(jobs, 0)),
            (names[2], RANKS * len(marks), (STEPS - 10) * 5, tracked.marks(marks, 0)),
            (names[3], RANKS * len(ops), (STEPS - 300) * 5, tracked.operations(ops, kinds, 0)),
        ):
            assert found >= RANKS * least, (name, found)
            rows[name].append(seconds / events * 1e9)
        rows[names[1]].append(_autocorrelate(jobs) / calls * 1e9)
    held = _held(BLOCKS)
    ratio = statistics.median(rows[names[1]]) / statistics.median(rows[names[0]])
    return Result(
        f"finding the steps of {RANKS} ranks in {calls:,} calls",
        "ns of CPU a call, mark or operation",
        rows,
        ratio,
        {
            "long_run_million_events": BLOCKS * RANKS * (len(marks) + len(ops) + calls / RANKS) / 1e6,
            "mib_a_rank_after_a_fifth": held[len(held) // 5 - 1 if len(held) >= 5 else 0] / RANKS,
            "mib_a_rank_at_the_end": held[-1] / RANKS,
        },
    )
