"""A training job of which everything is stored that a timeline shows: what each GPU did is known to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.store.open import Store
from argus.store.writer import Writer

Int = NDArray[np.int64]
T0 = 1_700_000_000_000_000_000
US, MS, S = 1_000, 1_000_000, 1_000_000_000
COMM, GROUP = 0xC0, 0xABCDEF
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass
class TimelineJob:
    """What happens. Each step: the GPU waits for data, runs ``kernels`` kernels, and enters an all-reduce of all ranks,
    which ends ``TRANSFER_NS`` after the last rank came; then comes the optimiser, and the step is over.

    Attributes:
        ranks, steps, kernels: How many; kernels of a step.
        kernel_ns: What a kernel takes.
        slow: Factor by rank.
        loading_ns: Wait for data, by rank.
        names: Names of kernels, in turn.
        host: Of all ranks; the place of a rank's host is its number over ``per_host``.
        gpu: CUPTI was there.
        probed: Launches were seen by probes.
    """

    ranks: int = 2
    steps: int = 3
    kernels: int = 4
    kernel_ns: int = 1 * MS
    slow: dict[int, float] = field(default_factory=dict)
    loading_ns: dict[int, int] = field(default_factory=dict)
    names: tuple[str, ...] = ("gemm", "softmax<float>(int)")
    thread: str = "python"
    gpu: bool = True
    probed: bool = True
    job: str = "made"
    run: int = 1

    TRANSFER_NS = 2 * MS
    OPTIMIZER_NS = 1 * MS
    LAUNCH_NS = 50 * US
    """How long before its begin a kernel is launched."""
    GAP_NS = 2 * US

    def begins(self) -> tuple[Int, Int, Int]:
        """Of each step: its begin (all ranks), when each rank enters the all-reduce, shape (steps, ranks), and when
        that ends."""
        begin = np.zeros(self.steps, np.int64)
        enters = np.zeros((self.steps, self.ranks), np.int64)
        reduced = np.zeros(self.steps, np.int64)
        at = T0
        for step in range(self.steps):
            begin[step] = at
            for rank in range(self.ranks):
                enters[step, rank] = at + self.loading_ns.get(rank, 0) + self.kernels * (self.took(rank) + self.GAP_NS)
            reduced[step] = enters[step].max() + self.TRANSFER_NS
            at = int(reduced[step]) + self.GAP_NS + self.OPTIMIZER_NS
        return begin, enters, reduced

    def took(self, rank: int) -> int:
        """What a kernel takes on a rank."""
        return round(self.kernel_ns * self.slow.get(rank, 1.0))

    @property
    def length_ns(self) -> int:
        """A step's."""
        begin, _, reduced = self.begins()
        return int(reduced[0] + self.GAP_NS + self.OPTIMIZER_NS - begin[0])


def store_timeline(store: Store, job: TimelineJob) -> None:
    """Writes its rows."""
    with Writer(store, source="test") as writer:
        write_timeline(writer, job)
        assert writer.flush(timeout_s=300.0), writer.last_error


def write_timeline(writer: Writer, job: TimelineJob) -> None:
    shared = {"job": job.job, "run": job.run}
    ranks = list(range(job.ranks))
    writer.append("jobs", {
        **shared, "host": "node-0", "started": [T0], "ended": None, "world_size": job.ranks, "launcher": "torchrun",
        "mono_offset_ns": 0, "argus_version": "0", "version": 1,
    })  # fmt: skip
    writer.append("ranks", {
        **shared, "rank": ranks, "host": "node-0", "pid": [1000 + rank for rank in ranks], "local_rank": ranks,
        "rank_source": "torchrun", "started": T0, "exe": "python", "command": "train.py",
        "libraries": [[]] * job.ranks, "probes": 1, "state": "traced", "version": 1,
    })  # fmt: skip
    writer.append("communicators", {
        **shared, "rank": ranks, "comm": [COMM + rank for rank in ranks],
        "comm_group": np.full(job.ranks, GROUP, np.uint64), "comm_rank": ranks,
        "nranks": job.ranks, "seq_offset": 0, "joined_by": "unique_id", "error": "", "version": 1,
    })  # fmt: skip
    begin, enters, reduced = job.begins()
    writer.append("host_usage", {
        **shared, "host": "node-0", "ts": np.array([T0]), "interval_ns": S, "cpus": 8, "busy_ns": 2 * S,
        "stolen_ns": 0, "job_ns": S, "argus_ns": 0,
    })  # fmt: skip
    for rank in ranks:
        _write_rank(writer, job, rank, begin, enters[:, rank], reduced)


def _write_rank(writer: Writer, job: TimelineJob, rank: int, begin: Int, enters: Int, reduced: Int) -> None:
    placed: dict[str, Any] = {"job": job.job, "run": job.run, "rank": rank, "host": "node-0"}
    own = {**placed, "pid": 1000 + rank}
    tid = 1000 + rank
    steps = np.arange(job.steps)
    length = reduced + job.GAP_NS + job.OPTIMIZER_NS - begin
    loading = job.loading_ns.get(rank, 0)
    writer.append("iterations", {
        **placed, "step": steps, "ts": begin, "duration_ns": length, "collectives": 1, "launches": job.kernels + 2,
        "method": "test", "confidence": 1.0,
    })  # fmt: skip
    writer.append("phases", {
        **placed, "step": np.repeat(steps, 2), "ts": np.repeat(begin, 2), "phase": ["forward", "backward"] * job.steps,
        "duration_ns": np.repeat(length // 2, 2), "overlapped_ns": 0, "spans": 1, "method": "marks", "confidence": 1.0,
    })  # fmt: skip
    took = job.took(rank)
    each = np.arange(job.kernels) * (took + job.GAP_NS) + loading
    starts = np.concatenate([
        (begin[:, None] + each).ravel(), enters, reduced + job.GAP_NS,
    ])  # fmt: skip
    lengths = np.concatenate([
        np.full(job.steps * job.kernels, took), reduced - enters, np.full(job.steps, job.OPTIMIZER_NS),
    ])  # fmt: skip
    numbers = np.arange(job.steps * job.kernels) % len(job.names)
    names = [job.names[number] for number in numbers.tolist()] + [NCCL] * job.steps + ["adam"] * job.steps
    order = np.argsort(starts, kind="stable")
    starts, lengths, names = starts[order], lengths[order], [names[place] for place in order.tolist()]
    launched = starts - job.LAUNCH_NS
    count = len(starts)
    called = launched[[name == NCCL for name in names]]
    writer.append("collectives", {
        **own, "tid": tid, "comm": COMM + rank, "op": "AllReduce", "seq": steps, "bytes": 4096, "count": 2048,
        "dtype": "bfloat16", "redop": "sum", "peer": -1, "stream": 7, "ts": called - 5 * US, "duration_ns": 8 * US,
        "result": 0, "in_group": False,
    })  # fmt: skip
    if job.probed:
        writer.append("launches", {
            **own, "tid": tid, "call": "cudaLaunchKernel", "kind": "kernel", "kernel": names, "handle": 1, "stream": 7,
            "bytes": 0, "shared_bytes": 0, "grid": [[4, 1, 1]] * count, "block": [[128, 1, 1]] * count, "ts": launched,
            "duration_ns": 2 * US, "result": 0, "in_nccl": [name == NCCL for name in names],
        })  # fmt: skip
    writer.append("thread_usage", {
        **own, "tid": tid, "thread": job.thread, "ts": np.array([T0]), "interval_ns": S, "cpu_ns": S // 2,
        "runqueue_ns": 0, "io_ns": 0, "voluntary": 1, "involuntary": 1,
    })  # fmt: skip
    if not job.gpu:
        return
    writer.append("kernel_events", {
        **own, "device": 0, "context": 1, "stream": 7, "kind": "kernel", "name": names, "ts": starts,
        "duration_ns": lengths, "launch_ts": launched, "issue_latency_ns": job.LAUNCH_NS, "launch_tid": tid,
        "launch_probed": job.probed, "correlation": np.arange(1, count + 1), "graph": 0, "graph_node": 0,
        "grid": [[4, 1, 1]] * count, "block": [[128, 1, 1]] * count, "registers": 0, "shared_static": 0,
        "shared_dynamic": 0, "bytes": 0,
    })  # fmt: skip
    busy = length - loading
    usage = {
        "compute_ns": busy - (reduced - enters), "communication_ns": reduced - enters,
        "exposed_communication_ns": reduced - enters, "overlapped_communication_ns": 0, "memcpy_ns": 0,
        "idle_gaps": 1, "largest_gap_ns": loading, "kernels": job.kernels, "queue_depth_mean": 1.5,
        "queue_depth_max": 3, "issue_latency_p50_ns": job.LAUNCH_NS, "issue_latency_p99_ns": job.LAUNCH_NS,
    }  # fmt: skip
    writer.append("gpu_steps", {
        **own, "device": 0, "step": steps, "ts": begin, "duration_ns": length, "busy_ns": busy,
        "idle_ns": np.full(job.steps, loading), **usage, "void_share": loading / length,
    })  # fmt: skip
    writer.append("gpu_usage", {
        **own, "device": 0, "ts": begin[:1], "duration_ns": length[:1], "busy_ns": busy[:1],
        "idle_ns": np.full(1, loading), **{name: value[:1] if isinstance(value, np.ndarray) else value
                                           for name, value in usage.items()},
    })  # fmt: skip
    if loading:
        writer.append("gpu_phases", {
            **own, "device": 0, "step": steps, "ts": begin, "phase": "data_loading",
            "duration_ns": np.full(job.steps, loading), "overlapped_ns": 0, "operations": 0, "method": "records",
            "confidence": 1.0,
        })  # fmt: skip
