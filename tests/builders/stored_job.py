"""Puts a synthetic job through steps and groups and into a store, as tracing does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from argus.model.calls import CALLS
from argus.semantics.groups.communicators import RankCalls, find_groups
from argus.semantics.steps.by_calls import ITERATION, METHODS, StepTracker
from argus.store.open import Store
from argus.store.writer import Writer
from tests.builders.synthetic_job import H2D, KERNEL, Job, RankRecords

WALL = 1_700_000_000_000_000_000


def known(rank: RankRecords) -> RankCalls:
    """What the groups are found from."""
    syncs = rank.syncs
    return RankCalls(
        rank.rank, rank.collectives, syncs["ts_ns"].astype(np.int64), syncs["duration_ns"].copy(), rank.control
    )


def analyse(job: Job, batches: int = 1) -> tuple[NDArray[np.void], NDArray[np.void], StepTracker]:
    """(communicators, steps, tracker) of a job that comes in ``batches``."""
    groups = find_groups([known(rank) for rank in job.ranks])
    tracker = StepTracker()
    tracker.align(groups)
    last = max(int(rank.collectives["ts_ns"].max()) for rank in job.ranks) + 1
    first = min(int(rank.cuda["ts_ns"].min()) for rank in job.ranks)
    edges = np.linspace(first, last + 10**9, batches + 1)
    out = [np.empty(0, ITERATION)]
    for low, high in pairwise(edges):
        for rank in job.ranks:
            parts = [a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (rank.launches, rank.collectives)]
            tracker.feed(rank.rank, *parts)
        out.append(tracker.advance(final=high == edges[-1]))
    return groups, np.concatenate(out), tracker


def store_job(store: Store, name: str, job: Job, *, run: int = 1, launches: bool = True) -> None:
    """Writes a job's rows: everything a diagnosis reads."""
    groups, steps, _ = analyse(job)
    with Writer(store, source="test") as writer:
        shared = {"job": name, "run": run}
        writer.append(
            "iterations",
            {
                **shared,
                "rank": steps["rank"],
                "step": steps["step"],
                "host": "node",
                "ts": steps["ts_ns"].astype(np.int64) + WALL,
                "duration_ns": steps["duration_ns"],
                "collectives": steps["collectives"],
                "launches": steps["launches"],
                "method": [METHODS[m] for m in steps["method"].tolist()],
                "confidence": steps["confidence"],
            },
        )
        writer.append(
            "communicators",
            {
                **shared,
                **{n: groups[n] for n in ("rank", "comm", "comm_group", "comm_rank", "nranks", "seq_offset")},
                "joined_by": groups["joined_by"].tolist(),
                "error": groups["error"].tolist(),
                "version": 1,
            },
        )
        for rank in job.ranks:
            own = {**shared, "rank": rank.rank, "host": f"node-{rank.rank // 8}", "pid": 100 + rank.rank}
            writer.append(
                "ranks",
                {
                    **own,
                    "local_rank": rank.rank % 8,
                    "rank_source": "torchrun",
                    "started": [WALL],
                    "exe": "python",
                    "command": "train.py",
                    "libraries": [[]],
                    "probes": 1,
                    "state": "traced",
                    "version": 1,
                },
            )
            c = rank.collectives
            writer.append(
                "collectives",
                {
                    **own,
                    "tid": 1,
                    "comm": c["comm"],
                    "op": [CALLS[i].kind for i in c["call"].tolist()],
                    "seq": c["seq"],
                    "bytes": c["count"] * 4,
                    "count": c["count"],
                    "dtype": "float32",
                    "redop": "sum",
                    "peer": -1,
                    "stream": 1,
                    "ts": c["ts_ns"].astype(np.int64) + WALL,
                    "duration_ns": c["duration_ns"],
                    "result": 0,
                    "in_group": False,
                },
            )
            if not launches:
                continue
            calls = rank.cuda
            kinds = np.array([call.kind for call in CALLS])
            kinds[H2D] = "memcpy_h2d"
            writer.append(
                "launches",
                {
                    **own,
                    "tid": 1,
                    "call": [CALLS[i].symbol for i in calls["call"].tolist()],
                    "kind": kinds[calls["call"]].tolist(),
                    "kernel": ["k" if i == KERNEL else "" for i in calls["call"].tolist()],
                    "handle": calls["handle"],
                    "stream": 1,
                    "bytes": 0,
                    "shared_bytes": 0,
                    "grid": [[]] * len(calls),
                    "block": [[]] * len(calls),
                    "ts": calls["ts_ns"].astype(np.int64) + WALL,
                    "duration_ns": calls["duration_ns"],
                    "result": 0,
                    "in_nccl": False,
                },
            )
