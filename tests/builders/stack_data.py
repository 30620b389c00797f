"""Small sets of stacks that tests put into a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from argus.model.stacks import Frame, Stack
from argus.store.writer import Writer
from argus.tables.arrow import Origin
from argus.tables.stacks import to_stacks

T0 = 1_700_000_000_000_000_000
MS = 1_000_000
PERIOD = 10 * MS


def py(function: str, line: int = 0, file: str = "/app/train.py") -> Frame:
    return Frame("python", function, file, line)


def native(function: str, module: str = "/usr/lib/libc.so.6") -> Frame:
    return Frame("native", function, module)


def stack(*frames: Frame, python: str = "complete", native: str = "leaf") -> Stack:
    return Stack(frames, python, native)


@dataclass
class Row:
    """A row of stack_samples; times in ms after T0."""

    rank: int
    stack: Stack | None
    ms: float = 0
    kind: str = "cpu"
    count: int = 1
    ns: int | None = None
    last_ms: float | None = None
    reason: str = ""
    pid: int | None = None
    tid: int | None = None
    thread: str = "python"
    gil: bool = False
    gc: bool = False
    in_kernel: bool = False
    runqueue_ns: int = 0


def store_stacks(writer: Writer, rows: Iterable[Row], *, job: str = "llama", run: int = 1) -> None:
    rows = list(rows)
    stacks = list({row.stack.id: row.stack for row in rows if row.stack is not None}.values())
    writer.append("stacks", to_stacks(stacks, Origin(job, run, "node-0", 0)))
    ns = [row.count * PERIOD if row.ns is None else row.ns for row in rows]
    pids = [1000 + row.rank if row.pid is None else row.pid for row in rows]
    columns: dict[str, Any] = {
        "job": job, "run": run, "host": [f"node-{row.rank // 8}" for row in rows],
        "pid": pids, "tid": [pid if row.tid is None else row.tid for pid, row in zip(pids, rows, strict=True)],
        **{name: [getattr(row, name) for row in rows]
           for name in ("rank", "thread", "kind", "reason", "gil", "gc", "in_kernel", "count", "runqueue_ns")},
        "ts": np.array([T0 + round(row.ms * MS) for row in rows]),
        "last_ts": np.array([T0 + round((row.ms if row.last_ms is None else row.last_ms) * MS) for row in rows]),
        "ns": ns, "max_ns": [took if row.kind == "off" else 0 for took, row in zip(ns, rows, strict=True)],
        "stack_id": np.array([row.stack.id if row.stack else 0 for row in rows], np.uint64),
    }  # fmt: skip
    writer.append("stack_samples", columns)


def store_run(
    writer: Writer, ranks: Iterable[int], *, job: str = "llama", run: int = 1, steps: int = 0, step_ms: int = 100
) -> None:
    """A session, its ranks, and steps of equal length from T0 on."""
    ranks = list(ranks)
    writer.append("jobs", {
        "job": job, "run": run, "host": "node-0", "started": [T0], "ended": None, "world_size": len(ranks),
        "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
    })  # fmt: skip
    writer.append("ranks", {
        "job": job, "run": run, "rank": ranks, "host": [f"node-{rank // 8}" for rank in ranks],
        "pid": [1000 + rank for rank in ranks], "local_rank": [rank % 8 for rank in ranks], "rank_source": "torchrun",
        "started": T0, "exe": "python", "command": "python train.py", "libraries": [[]] * len(ranks), "probes": 0,
        "state": "traced", "version": 1,
    })  # fmt: skip
    every = [(rank, step) for rank in ranks for step in range(steps)]
    if every:
        writer.append("iterations", {
            "job": job, "run": run, "rank": [rank for rank, _ in every], "step": [step for _, step in every],
            "host": "node-0", "ts": [T0 + step * step_ms * MS for _, step in every], "duration_ns": step_ms * MS,
            "collectives": 1, "launches": 1, "method": "test", "confidence": 1.0,
        })  # fmt: skip
