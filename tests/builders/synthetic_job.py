"""A small training cluster in numpy, whose steps, groups and faults are known: what the unit tests judge against.

Each rank is a CPU clock that issues work, a compute stream and a communication stream. A program (one list of
operations a step, the same on every rank; kernels and times may differ) is played for all ranks at once; CPU calls
become records as the kernel side would have written them. Not simulated: GPU time inside NCCL beyond a constant.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model.calls import BY_SYMBOL
from argus.model.records import COLLECTIVE, CONTROL, LAUNCH

MS = 1_000_000
KERNEL = BY_SYMBOL["cudaLaunchKernel"].id
H2D = BY_SYMBOL["cudaMemcpyAsync"].id
SYNC = BY_SYMBOL["cudaStreamSynchronize"].id
MODULE = BY_SYMBOL["cuModuleLoadData"].id
ALL_REDUCE = BY_SYMBOL["ncclAllReduce"].id
BROADCAST = BY_SYMBOL["ncclBroadcast"].id
INIT = BY_SYMBOL["ncclCommInitRank"].id


@dataclass
class Op:
    """One entry of a step's program: data, h2d, kernels, module, sync, collective, wait."""

    what: str
    ms: float = 0.0
    names: tuple[int, ...] = ()
    group: str = "dp"
    count: int = 0
    op: int = ALL_REDUCE
    phase: str = ""
    overlap: bool = True


def ddp(
    layers: int = 4,
    kernels: int = 5,
    forward_ms: float = 30.0,
    loss_sync: bool = True,
    *,
    equal: bool = False,
    end_sync: bool = False,
    group: str = "dp",
    comm_ms: float = 2.0,
) -> list[Op]:
    """Data, forward, loss.item(), backward with a gradient bucket a layer, optimizer; backward is twice the forward."""
    out = [Op("data", 1.0), Op("h2d")]
    out += [Op("kernels", forward_ms / layers, tuple(range(kernels)), phase="forward") for _ in range(layers)]
    out.append(Op("kernels", 0.1, (900,), phase="forward"))
    if loss_sync:
        out.append(Op("sync"))
    for layer in range(layers):
        out.append(Op("kernels", 2 * forward_ms / layers, tuple(range(100, 100 + 2 * kernels)), phase="backward"))
        out.append(Op("collective", comm_ms, group=group, count=1_000_000 if equal else 1_000_000 + layer))
    out += [Op("wait"), Op("kernels", 1.0, (901, 902), phase="optimizer")]
    if end_sync:
        out.append(Op("sync"))
    return out


@dataclass
class Fault:
    """``kind`` (compute, data, issue, jit) on some ranks, in steps [start, stop)."""

    kind: str
    ranks: tuple[int, ...]
    factor: float = 2.0
    ms: float = 0.0
    start: int = 0
    stop: int = 1 << 30


@dataclass
class RankRecords:
    rank: int
    launches: NDArray[np.void]
    """Kernels only."""
    cuda: NDArray[np.void]
    """All CUDA calls."""
    collectives: NDArray[np.void]
    control: NDArray[np.void]

    @property
    def syncs(self) -> NDArray[np.void]:
        return self.cuda[self.cuda["call"] == SYNC]


@dataclass
class Job:
    ranks: list[RankRecords]
    boundaries: NDArray[np.int64]
    """Entry of each step's last collective (of any group), shape (steps, ranks), ns."""
    groups: dict[str, list[tuple[int, ...]]]
    handles: dict[tuple[int, str], int]
    first_call: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, handle) -> true number of the first call kept: what seq_offset must restore."""


# Over 100 lines: its inner functions share one job, which each of them moves on.
def simulate(
    nranks: int = 4,
    steps: int = 30,
    program: list[Op] | None = None,
    *,
    groups: dict[str, list[tuple[int, ...]]] | None = None,
    faults: tuple[Fault, ...] = (),
    jitter: float = 0.01,
    spikes: float = 0.0,
    lateness_ms: dict[int, float] | None = None,
    extra_kernels: dict[int, int] | None = None,
    warmup: int = 0,
    eval_every: int = 0,
    attach_ms: NDArray[np.float64] | None = None,
    drop: float = 0.0,
    inits: bool = True,
    issue_us: float = 5.0,
    seed: int = 0,
) -> Job:
    """Plays ``steps`` steps; see :class:`Job`. ``attach_ms``: calls before it are not seen, shape (nranks,)."""
    rng = np.random.default_rng(seed)
    program = program or ddp()
    groups = groups or {"dp": [tuple(range(nranks))]}
    handles = {(r, g): int(rng.integers(1 << 40, 1 << 47)) for r in range(nranks) for g in groups}
    member = {g: np.zeros(nranks, np.int64) for g in groups}
    for g, parts in groups.items():
        for i, part in enumerate(parts):
            member[g][list(part)] = i
    base = rng.integers(1 << 40, 1 << 47, nranks)
    extra = np.array([(extra_kernels or {}).get(r, 0) for r in range(nranks)])
    cpu = np.full(nranks, 5e9) + rng.uniform(0, 1e5, nranks)
    gpu, net = cpu.copy(), {g: cpu.copy() for g in groups}
    rows: dict[int, list[tuple[float, float, int, int]]] = defaultdict(list)
    kernel_rows: dict[int, list[tuple[NDArray[np.float64], NDArray[np.int64]]]] = defaultdict(list)
    calls: dict[int, list[tuple[float, int, int, int, int]]] = defaultdict(list)
    seq: dict[tuple[int, str], int] = defaultdict(int)
    boundaries = np.zeros((steps, nranks), np.int64)

    def noise(n: int) -> NDArray[np.float64]:
        return rng.lognormal(0.0, jitter, n) if jitter else np.ones(n)

    def play(ops: list[Op], step: int) -> None:
        nonlocal cpu, gpu
        active = [f for f in faults if f.start <= step < f.stop]
        slow = np.ones(nranks)
        issue = np.full(nranks, issue_us * 1e3)
        for f in active:
            if f.kind == "compute":
                slow[list(f.ranks)] = f.factor
            if f.kind == "issue":
                issue[list(f.ranks)] *= f.factor
        spike = np.zeros(nranks)
        if spikes and rng.random() < spikes:
            spike[rng.integers(nranks)] = rng.uniform(20, 200) * MS
        for op in ops:
            if op.what == "data":
                cpu = cpu + op.ms * MS * noise(nranks) + spike
                for f in active:
                    if f.kind == "data":
                        cpu[list(f.ranks)] += f.ms * MS
                for r, ms in (lateness_ms or {}).items():
                    cpu[r] += ms * MS
            elif op.what == "h2d":
                for r in range(nranks):
                    rows[r].append((cpu[r], 20e3, H2D, 0))
                cpu = cpu + 30e3
                for f in active:
                    if f.kind == "jit":
                        for r in f.ranks:
                            rows[r].append((cpu[r], f.ms * MS, MODULE, 0))
                            cpu[r] += f.ms * MS + 1e3
            elif op.what == "kernels":
                work = op.ms * MS * noise(nranks) * slow
                # Of all ranks at once; a rank with fewer extra kernels than another has the first of them.
                names = np.array([*op.names, *range(5000, 5000 + extra.max())])
                entered = cpu[:, None] + issue[:, None] * np.arange(1, len(names) + 1)
                launched = base[:, None] + names * 64
                for r, n in enumerate((len(op.names) + extra).tolist()):
                    kernel_rows[r].append((entered[r, :n], launched[r, :n]))
                cpu = cpu + issue * (len(op.names) + extra + 1)
                gpu = np.maximum(gpu, cpu) + work
            elif op.what == "sync":
                done = np.maximum(cpu + 2e3, gpu) + rng.uniform(2e3, 10e3, nranks)
                for r in range(nranks):
                    rows[r].append((cpu[r], done[r] - cpu[r], SYNC, 0))
                cpu = done + 1e3
            elif op.what == "collective":
                cpu = cpu + issue
                for r in range(nranks):
                    calls[r].append((cpu[r], op.op, op.count, handles[r, op.group], seq[r, op.group]))
                    seq[r, op.group] += 1
                if step >= 0:
                    boundaries[step] = cpu
                ready = np.maximum(gpu, cpu)
                for i in range(len(groups[op.group])):
                    part = member[op.group] == i
                    begin = max(ready[part].max(), net[op.group][part].max())
                    net[op.group][part] = begin + op.ms * MS * (noise(1)[0])
                if not op.overlap:
                    gpu = np.maximum(gpu, net[op.group])
                cpu = cpu + 2e3
            elif op.what == "wait":
                for lane in net.values():
                    gpu = np.maximum(gpu, lane)

    widest = max(groups, key=lambda g: max(len(p) for p in groups[g]))
    for i in range(warmup):
        play([Op("kernels", 1.0, (7000 + i,)), Op("collective", 1.0, group=widest, count=77 + i, op=BROADCAST)], -1)
    for step in range(steps):
        play(program, step)
        if eval_every and step % eval_every == eval_every - 1:
            evaluation = [Op("data", 1.0), Op("h2d"), Op("kernels", 10.0, tuple(range(5))), Op("sync")] * 3
            play([*evaluation, Op("collective", 1.0, group=widest, count=3)], -1)
    cut = np.zeros(nranks) if attach_ms is None else 5e9 + attach_ms * MS
    out, first_call = [], {}
    for r in range(nranks):
        kernels = np.zeros(sum(len(t) for t, _ in kernel_rows[r]), LAUNCH)
        kernels["ts_ns"] = np.concatenate([t for t, _ in kernel_rows[r]])
        kernels["handle"] = np.concatenate([h for _, h in kernel_rows[r]])
        kernels["grid"], kernels["block"], kernels["call"], kernels["duration_ns"] = 32, 128, KERNEL, -1
        other = np.zeros(len(rows[r]), LAUNCH)
        if rows[r]:
            ts, duration, call, handle = zip(*rows[r], strict=True)
            other["ts_ns"], other["duration_ns"], other["call"], other["handle"] = ts, duration, call, handle
        coll = np.zeros(len(calls[r]), COLLECTIVE)
        ts, op, count, comm, number = zip(*calls[r], strict=True)
        coll["ts_ns"], coll["call"], coll["count"], coll["comm"], coll["seq"] = ts, op, count, comm, number
        coll["duration_ns"], coll["dtype"], coll["peer"] = 2000, 7, -1
        kernels, other, coll = (a[a["ts_ns"] >= cut[r]] for a in (kernels, other, coll))
        for h in np.unique(coll["comm"]).tolist():
            own = coll["comm"] == h
            first_call[r, h] = int(coll["seq"][own].min())
            coll["seq"][own] -= coll["seq"][own].min()
        if drop:
            kernels = kernels[rng.random(len(kernels)) >= drop]
            coll = coll[rng.random(len(coll)) >= drop]
        control = np.zeros(len(groups) if inits and (attach_ms is None or attach_ms[r] == 0) else 0, CONTROL)
        for i, g in enumerate(groups if len(control) else ()):
            part = groups[g][member[g][r]]
            control[i]["ts_ns"], control[i]["handle"], control[i]["call"] = 1e9, handles[r, g], INIT
            control[i]["nranks"], control[i]["rank"] = len(part), part.index(r)
            control[i]["data"][:8] = np.frombuffer(np.int64(seed * 1000 + i * 100 + member[g][r]).tobytes(), np.uint8)
            control[i]["data"][127] = 1
        cuda = np.concatenate([kernels, other])
        out.append(RankRecords(r, kernels, cuda[np.argsort(cuda["ts_ns"], kind="stable")], coll, control))
    return Job(out, boundaries, groups, handles, first_call)
