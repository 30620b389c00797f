"""Rows of a large job as its hosts would write them: blocks in order of time, each of the ranks of some hosts.

Kernels' rows are made by ``Compressor`` from random durations of ``BASE_RANKS`` ranks. The other ranks get the same
rows in another order, each column of codes shuffled together and ``total_ns`` changed by a little, so that rows of
different ranks are no copies of one another that would compress better than those of a job do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.compress.kernels import Compressor

Columns: TypeAlias = "dict[str, Any]"

T0 = 1_790_000_000_000_000_000
"""2026-09-21: the whole job lies in one day, that is in one partition."""
STEP_NS = 1_500_000_000
RANKS_A_HOST = 8
REDUCES = 4
"""Collectives a rank and step."""
BASE_RANKS = 64
LAUNCHES = 400
"""Of each kernel a rank and step."""
KERNELS = ("gemm_bf16_128x128", "flash_fwd", "flash_bwd", "layer_norm", "ncclDevKernel_AllReduce_Sum_bf16")
PHASES = ("data_loading", "forward", "backward", "communication", "optimizer", "other")
GPU_PHASES = ("forward", "backward", "optimizer", "all_reduce", "idle")
SLOW_RANK = 37
SLOWER = 1.3
BLOCK_STEPS = 10
"""Steps of a block: a step takes longer than a writer waits, but so many hosts' blocks would each be too small to be
made here one by one."""


class LargeJob:
    """One job, the same for the same arguments. Its rank ``SLOW_RANK`` computes ``SLOWER`` times as long.

    Args:
        name: Of the job.
        ranks: How many.
        steps: How many, a multiple of ``BLOCK_STEPS``.
    """

    def __init__(self, name: str, ranks: int, steps: int) -> None:
        self.name, self.ranks, self.steps = name, ranks, steps
        self._random = np.random.default_rng(7)
        self._hosts = pa.array([f"node-{k:04}" for k in range(-(-ranks // RANKS_A_HOST))])

    def blocks(self) -> Iterator[tuple[str, Columns]]:
        """(table, columns) of everything, in the order in which it would be written."""
        yield from self._once()
        yield from self._kernels()
        for first in range(0, self.steps, BLOCK_STEPS):
            for low in range(0, self.ranks, 1024):
                yield from self._steps(np.arange(low, min(low + 1024, self.ranks)), first)

    def _common(self, rank: NDArray[np.int64]) -> Columns:
        host = pa.DictionaryArray.from_arrays(pa.array(rank // RANKS_A_HOST, pa.int32()), self._hosts)
        return {"job": self.name, "run": 1, "rank": rank, "host": host}

    def _once(self) -> Iterator[tuple[str, Columns]]:
        hosts = self._hosts.to_pylist()
        yield "jobs", {
            "job": self.name, "run": 1, "host": hosts, "launcher": "torchrun", "world_size": self.ranks,
            "started": T0, "ended": T0 + self.steps * STEP_NS, "mono_offset_ns": 0,
            "argus_version": "bench", "version": 1,
        }  # fmt: skip
        rank = np.arange(self.ranks)
        yield "ranks", {
            **self._common(rank), "pid": 4000 + rank % RANKS_A_HOST, "local_rank": rank % RANKS_A_HOST,
            "rank_source": "torchrun", "started": T0, "exe": "python", "command": "python train.py",
            "libraries": [[]] * self.ranks, "probes": 9, "state": "traced", "version": 1,
        }  # fmt: skip
        yield "communicators", {
            "job": self.name, "run": 1, "rank": rank, "comm": 1000 + rank, "comm_group": 7, "comm_rank": rank,
            "nranks": self.ranks, "seq_offset": 0, "joined_by": "unique_id", "error": "", "version": 1,
        }  # fmt: skip

    def _steps(self, ranks: NDArray[np.int64], first: int) -> Iterator[tuple[str, Columns]]:
        rng, count = self._random, len(ranks) * BLOCK_STEPS
        rank, step = np.repeat(ranks, BLOCK_STEPS), np.tile(np.arange(first, first + BLOCK_STEPS), len(ranks))
        begin = T0 + step * STEP_NS + rng.integers(0, 2_000_000, count)
        late = np.where(rank == SLOW_RANK, int((SLOWER - 1) * 0.6 * STEP_NS), rng.integers(0, 3_000_000, count))
        common = self._common(rank)
        yield "iterations", {
            **common, "step": step, "ts": begin, "duration_ns": STEP_NS + rng.integers(-500_000, 500_000, count),
            "collectives": REDUCES, "launches": len(KERNELS) * LAUNCHES, "method": "marks", "confidence": 1.0,
        }  # fmt: skip
        several = {name: _repeated(values, REDUCES) for name, values in common.items()}
        place = np.tile(np.arange(REDUCES), count)
        called = np.repeat(begin + late, REDUCES) + (place + 1) * (STEP_NS // 8)
        yield "collectives", {
            **several, "pid": 4000 + several["rank"] % RANKS_A_HOST, "tid": 4000 + several["rank"] % RANKS_A_HOST,
            "comm": 1000 + several["rank"], "op": "AllReduce", "seq": np.repeat(step, REDUCES) * REDUCES + place,
            "bytes": 1 << 26, "count": 1 << 25, "dtype": "bfloat16", "redop": "sum", "peer": -1, "stream": 7,
            "ts": called, "duration_ns": rng.integers(9_000, 30_000, count * REDUCES), "result": 0, "in_group": False,
        }  # fmt: skip
        for table, names, more in (
            ("phases", PHASES, {"method": "marks"}),
            ("gpu_phases", GPU_PHASES, {"method": "records", "pid": 4000, "device": 0, "operations": 80}),
        ):
            part = rng.dirichlet(np.full(len(names), 400.0), count)
            yield table, {
                **{name: _repeated(values, len(names)) for name, values in common.items()}, **more,
                "step": np.repeat(step, len(names)), "ts": np.repeat(begin, len(names)),
                "phase": pa.DictionaryArray.from_arrays(
                    pa.array(np.tile(np.arange(len(names), dtype=np.int32), count)), pa.array(names)
                ),
                "duration_ns": (part * STEP_NS).astype(np.int64).ravel(), "overlapped_ns": 0, "confidence": 1.0,
                **({"spans": 1} if table == "phases" else {}),
            }  # fmt: skip
        busy = (rng.uniform(0.9, 0.97, count) * STEP_NS).astype(np.int64)
        yield "gpu_steps", {
            **common, "pid": 4000 + rank % RANKS_A_HOST, "device": rank % RANKS_A_HOST, "step": step, "ts": begin,
            "duration_ns": STEP_NS, "busy_ns": busy, "compute_ns": busy * 8 // 10, "communication_ns": busy * 3 // 10,
            "exposed_communication_ns": busy * 2 // 10, "overlapped_communication_ns": busy // 10, "memcpy_ns": 0,
            "idle_ns": STEP_NS - busy, "idle_gaps": rng.integers(50, 90, count),
            "largest_gap_ns": rng.integers(10**6, 10**7, count), "kernels": len(KERNELS) * LAUNCHES,
            "queue_depth_mean": rng.uniform(5, 9, count), "queue_depth_max": 40,
            "issue_latency_p50_ns": rng.integers(10**5, 10**6, count),
            "issue_latency_p99_ns": rng.integers(10**6, 10**7, count), "void_share": 1 - busy / STEP_NS,
        }  # fmt: skip

    def _kernels(self) -> Iterator[tuple[str, Columns]]:
        rng, compressor = self._random, Compressor()
        numbers = [compressor.group(name, 7, 0, (k + 1, 1, 1), (128, 1, 1)) for k, name in enumerate(KERNELS)]
        kind = np.repeat(np.array(numbers), LAUNCHES)
        center = 10.5 + 0.4 * np.arange(len(KERNELS))
        many = min(BASE_RANKS, self.ranks)
        for step in range(self.steps):
            for rank in range(many):
                log = np.repeat(center, LAUNCHES) + 0.03 * rng.standard_normal(len(kind))
                log += 0.3 * (rng.random(len(kind)) < 0.3)
                start = np.sort(rng.integers(0, STEP_NS, len(kind))) + step * STEP_NS
                slower = SLOWER if rank == SLOW_RANK else 1.0
                took = (np.exp(log) * slower).astype(np.int64)
                compressor.feed(rank, step, step * STEP_NS, (step + 1) * STEP_NS, kind, start, took)
        taken = compressor.take(final=True)
        for table in ("kernel_groups", "kernel_templates"):
            yield table, {"job": self.name, "run": 1, **taken.pop(table)}
        taken.pop("kernel_spikes", None)
        for table, columns in taken.items():
            typical = np.asarray(columns["rank"]) != SLOW_RANK
            flat = pa.table(columns)
            yield table, self._of_ranks(flat, 0)
            for low in range(many, self.ranks, many):
                part = flat.filter(pa.array(typical & (np.asarray(columns["rank"]) + low < self.ranks)))
                yield table, self._of_ranks(self._shuffled(part), low)

    def _of_ranks(self, rows: pa.Table, low: int) -> Columns:
        columns = {name: rows.column(name).combine_chunks() for name in rows.column_names}
        rank = columns.pop("rank").to_numpy() + low
        return {**columns, **self._common(rank.astype(np.int64))}

    def _shuffled(self, rows: pa.Table) -> pa.Table:
        """Rows with codes of other ranks and steps of the same kernel."""
        kernel = rows.column("kernel_id").to_numpy()
        order = np.lexsort((self._random.random(len(kernel)), kernel))
        place = np.empty_like(order)
        place[np.argsort(kernel, kind="stable")] = order
        other = rows.take(pa.array(place))
        keep = {name: rows.column(name) for name in ("rank", "kernel_id", "step")}
        near = other.column("total_ns").to_numpy() * self._random.uniform(0.998, 1.002, len(kernel))
        mixed = {name: other.column(name) for name in rows.column_names} | keep
        return pa.table(mixed | {"total_ns": pa.array(near.astype(np.int64))})


def _repeated(values: Any, times: int) -> Any:
    if isinstance(values, pa.DictionaryArray):
        return pa.DictionaryArray.from_arrays(np.repeat(values.indices.to_numpy(), times), values.dictionary)
    return np.repeat(values, times) if isinstance(values, np.ndarray) else values
