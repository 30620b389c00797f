"""A training job of several hosts, traced by each of them apart: clocks that differ, steps that each host numbers from
the first one it saw, communicators that a host attached late knows by their traffic only."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model.calls import CALLS
from argus.model.records import COLLECTIVE, CONTROL, LAUNCH
from argus.semantics.steps.by_calls import METHODS
from argus.store.open import Store
from argus.store.writer import Writer
from tests.builders.stored_job import WALL, analyse
from tests.builders.synthetic_job import ALL_REDUCE, H2D, INIT, KERNEL, MS, SYNC, Job, RankRecords


@dataclass
class World:
    """What really happens.

    Attributes:
        per_host: Ranks of each host.
        hosts: Hosts.
        steps: Steps.
        offset_ms: What each host's clock shows too much at the beginning.
        drift_ppm: By how much it goes too fast.
        attach_ms: When each host is attached to; what is before is not seen.
        forward_ms: Forward pass of a rank; the backward pass takes twice as long.
        slow: Factor by rank.
        late_ms: Time before the batch that ranks lose.
        sizes: Elements and transfer in ms of each all-reduce of a step among all ranks.
        local: Also all-reduces among the ranks of a host.
        sharded: The all-reduces are not among all ranks: the n-th ranks of all hosts are a communicator.
        gpu: CUPTI was there.
        made: The communicators' making was seen on hosts that were attached to from the start.
        wall_error_ms: What the hosts say about their wall clocks; -1: nothing.
    """

    per_host: int = 4
    hosts: int = 2
    steps: int = 60
    offset_ms: tuple[float, ...] = (0.0, 7.0, -4.0)
    drift_ppm: tuple[float, ...] = (0.0, 20.0, -15.0)
    attach_ms: tuple[float, ...] = (0.0, 0.0, 0.0)
    forward_ms: float = 25.0
    slow: dict[int, float] = field(default_factory=dict)
    late_ms: dict[int, float] = field(default_factory=dict)
    sizes: tuple[tuple[int, float], ...] = ((1_000_000, 2.0), (2_000_000, 3.0), (1, 0.03))
    local: bool = False
    sharded: bool = False
    gpu: bool = True
    made: bool = True
    wall_error_ms: float = -1
    jitter: float = 0.01
    seed: int = 0


@dataclass
class Seen:
    """One host's view: its ranks' records on its own clock, NCCL's kernels by rank, and its true first step."""

    job: Job
    kernels: dict[int, NDArray[np.void]]


GPU_KERNEL = np.dtype([("launch_ts", "<i8"), ("ts", "<i8"), ("duration_ns", "<i8")])


def play(world: World) -> list[Seen]:
    """What each host records."""
    rng = np.random.default_rng(world.seed)
    count = world.per_host * world.hosts
    host = np.arange(count) // world.per_host
    cpu = np.full(count, 5e9) + rng.uniform(0, 1e5, count)
    gpu = cpu.copy()
    slow = np.array([world.slow.get(rank, 1.0) for rank in range(count)])
    late = np.array([world.late_ms.get(rank, 0.0) for rank in range(count)])
    handles = {(r, g): int(rng.integers(1 << 40, 1 << 47)) for r in range(count) for g in ("all", "local")}
    cuda: list[list[tuple[float, float, int, int]]] = [[] for _ in range(count)]
    calls: list[list[tuple[float, int, int, int]]] = [[] for _ in range(count)]
    kernels: list[list[tuple[float, float, float]]] = [[] for _ in range(count)]
    seq: dict[tuple[int, str], int] = defaultdict(int)

    everybody = [np.arange(count)]
    if world.sharded:
        everybody = [np.arange(n, count, world.per_host) for n in range(world.per_host)]
    parts = {"all": everybody, "local": [np.flatnonzero(host == h) for h in range(world.hosts)]}

    def launch(name: int, ms: float) -> None:
        nonlocal cpu, gpu
        for r in range(count):
            cuda[r].append((cpu[r], -1, KERNEL, name))
        cpu = cpu + 5e3
        gpu = np.maximum(gpu, cpu) + ms * MS * slow * rng.lognormal(0, world.jitter, count)

    def reduce(group: str, elements: int, ms: float) -> None:
        nonlocal cpu, gpu
        begun = np.maximum(gpu, cpu + 3e3)
        for part in parts[group]:
            # Those that came first leave up to half the transfer later or earlier than the last.
            transfer = ms * MS * rng.uniform(1, 1.1)
            done = begun[part].max() + transfer * rng.uniform(1, 1.4, len(part))
            for i, r in enumerate(part.tolist()):
                calls[r].append((cpu[r], elements, handles[r, group], seq[r, group]))
                seq[r, group] += 1
                kernels[r].append((cpu[r] + 1e3, begun[r], done[i] - begun[r]))
                gpu[r] = done[i]
        cpu = cpu + 6e3

    for _ in range(world.steps):
        cpu = cpu + (1.0 + late) * MS * rng.lognormal(0, world.jitter, count)
        for r in range(count):
            cuda[r].append((cpu[r], 20e3, H2D, 0))
        cpu = cpu + 30e3
        for name in range(4):
            launch(name, world.forward_ms / 4)
        done = np.maximum(cpu + 2e3, gpu) + rng.uniform(2e3, 10e3, count)
        for r in range(count):
            cuda[r].append((cpu[r], done[r] - cpu[r], SYNC, 0))
        cpu = done + 1e3
        for i, (elements, ms) in enumerate(world.sizes):
            for name in range(100 + 3 * i, 103 + 3 * i):
                launch(name, 2 * world.forward_ms / len(world.sizes) / 3)
            if world.local:
                reduce("local", 4096, 0.05)
            reduce("all", elements, ms)
        launch(901, 1.0)

    def clock(t: NDArray[np.float64], h: int) -> NDArray[np.int64]:
        return np.rint(t + world.offset_ms[h] * MS + world.drift_ppm[h] * 1e-6 * t).astype(np.int64)

    out = []
    groups = ("all", "local") if world.local else ("all",)
    for h in range(world.hosts):
        cut = 5e9 + world.attach_ms[h] * MS
        records, found = [], {}
        for r in np.flatnonzero(host == h).tolist():
            table = np.array(cuda[r])
            table = table[table[:, 0] >= cut]
            rows = np.zeros(len(table), LAUNCH)
            rows["ts_ns"], rows["duration_ns"] = clock(table[:, 0], h), table[:, 1]
            rows["call"], rows["handle"] = table[:, 2], table[:, 3]
            rows["grid"], rows["block"] = 32, 128
            called = np.array([row for row in calls[r] if row[0] >= cut])
            own = np.zeros(len(called), COLLECTIVE)
            own["ts_ns"], own["count"] = clock(called[:, 0], h), called[:, 1]
            own["comm"] = [row[2] for row in calls[r] if row[0] >= cut]
            own["seq"] = called[:, 3]
            for g in groups:
                selected = own["comm"] == handles[r, g]
                own["seq"][selected] -= own["seq"][selected].min()
            own["call"], own["duration_ns"], own["dtype"], own["peer"] = ALL_REDUCE, 4000, 7, -1
            control = np.zeros(len(groups) if world.made and world.attach_ms[h] == 0 else 0, CONTROL)
            for i, g in enumerate(groups if len(control) else ()):
                which, members = next((n, part.tolist()) for n, part in enumerate(parts[g]) if r in part)
                control[i]["ts_ns"], control[i]["handle"], control[i]["call"] = 1e9, handles[r, g], INIT
                control[i]["nranks"], control[i]["rank"] = len(members), members.index(r)
                control[i]["data"][:8] = np.frombuffer(np.int64(77 + 100 * i + which).tobytes(), np.uint8)
                control[i]["data"][127] = 1
            records.append(RankRecords(r, rows[rows["call"] == KERNEL], rows, own, control))
            ran = np.array([row for row in kernels[r] if row[0] >= cut])
            times = np.zeros(len(ran), GPU_KERNEL)
            times["launch_ts"], times["ts"] = clock(ran[:, 0], h), clock(ran[:, 1], h)
            times["duration_ns"] = ran[:, 2]
            found[r] = times
        out.append(Seen(Job(records, np.zeros((0, 0), np.int64), {}, {}), found))
    return out


def store_world(store: Store, name: str, world: World, *, run: int = 1) -> None:
    """Writes what the tracing sessions of all hosts write."""
    with Writer(store, source="test") as writer:
        for h, seen in enumerate(play(world)):
            node = f"node-{h}"
            groups, steps, _ = analyse(seen.job)
            shared = {"job": name, "run": run}
            writer.append("jobs", {
                **shared, "host": node, "started": [WALL], "ended": [WALL + 10**12],
                "world_size": world.per_host * world.hosts, "launcher": "torchrun", "mono_offset_ns": WALL + h,
                "argus_version": "0", "version": 1,
                "wall_error_ns": int(world.wall_error_ms * MS) if world.wall_error_ms >= 0 else -1,
            })  # fmt: skip
            writer.append("iterations", {
                **shared, "rank": steps["rank"], "step": steps["step"], "host": node,
                "ts": steps["ts_ns"].astype(np.int64) + WALL, "duration_ns": steps["duration_ns"],
                "collectives": steps["collectives"], "launches": steps["launches"],
                "method": [METHODS[m] for m in steps["method"].tolist()], "confidence": steps["confidence"],
            })  # fmt: skip
            writer.append("communicators", {
                **shared, **{n: groups[n] for n in ("rank", "comm", "comm_group", "comm_rank", "nranks", "seq_offset")},
                "joined_by": groups["joined_by"].tolist(), "error": groups["error"].tolist(), "version": 1,
            })  # fmt: skip
            for rank in seen.job.ranks:
                own = {**shared, "rank": rank.rank, "host": node, "pid": 100 + rank.rank}
                writer.append("ranks", {
                    **own, "local_rank": rank.rank % world.per_host, "rank_source": "torchrun", "started": [WALL],
                    "exe": "python", "command": "train.py", "libraries": [[]], "probes": 1, "state": "exited",
                    "version": 1,
                })  # fmt: skip
                c = rank.collectives
                writer.append("collectives", {
                    **own, "tid": 1, "comm": c["comm"], "op": "AllReduce", "seq": c["seq"], "bytes": c["count"] * 4,
                    "count": c["count"], "dtype": "float32", "redop": "sum", "peer": -1, "stream": 1,
                    "ts": c["ts_ns"].astype(np.int64) + WALL, "duration_ns": c["duration_ns"], "result": 0,
                    "in_group": False,
                })  # fmt: skip
                calls = rank.cuda
                kinds = np.array([call.kind for call in CALLS])
                kinds[H2D] = "memcpy_h2d"
                writer.append("launches", {
                    **own, "tid": 1, "call": [CALLS[i].symbol for i in calls["call"].tolist()],
                    "kind": kinds[calls["call"]].tolist(), "kernel": "", "handle": calls["handle"], "stream": 1,
                    "bytes": 0, "shared_bytes": 0, "grid": [[]] * len(calls), "block": [[]] * len(calls),
                    "ts": calls["ts_ns"].astype(np.int64) + WALL, "duration_ns": calls["duration_ns"], "result": 0,
                    "in_nccl": False,
                })  # fmt: skip
                k = seen.kernels[rank.rank]
                if world.gpu and len(k):
                    writer.append("kernel_events", {
                        **own, "device": 0, "context": 1, "stream": 7, "kind": "kernel",
                        "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", "ts": k["ts"] + WALL,
                        "duration_ns": k["duration_ns"].copy(), "launch_ts": k["launch_ts"] + WALL,
                        "issue_latency_ns": 1000, "launch_tid": 1, "launch_probed": True, "correlation": 1, "graph": 0,
                        "graph_node": 0, "grid": [[]] * len(k), "block": [[]] * len(k), "registers": 0,
                        "shared_static": 0, "shared_dynamic": 0, "bytes": 0,
                    })  # fmt: skip
