"""Jobs whose pages are looked at: simulated ones, with stacks, health checks and counters besides; and one whose names
are hostile."""

from __future__ import annotations

from typing import Any

import numpy as np

from argus.diagnose.verdict import Verdict
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.stack_data import Row, native, py, stack, store_stacks

HOSTILE = (
    "<script>alert(1)</script>\"'`;--\x1b[31m\r\n\u202e\u2066</title><!--"
    + "<img src=x onerror=alert(2)>" * 40
    + "\x00=1+1"
)
"""Script tags, quotes, control characters, right-to-left marks, a formula."""
SLOW = 5
"""The rank that is slow in the job ``slow``, from step 40 on."""
STEPS = 80
T0 = 1_700_000_000_000_000_000


def simulate(store: Store, job: str, mesh: Mesh, *faults: str, steps: int = STEPS, **more: Any) -> int:
    """A simulated job; returns its run."""
    program = Program(micro_batches=2 * mesh.pp if mesh.pp > 1 else 1)
    return write(store, job, Spec(mesh, program, faults=[parse(one) for one in faults], steps=steps, **more)).run


def write_slow(store: Store) -> None:
    """``slow``: a slow GPU in a pipeline of 8 ranks, with kernels, stacks, checks and a loss."""
    fault = f"compute_straggler:quiet:ranks={SLOW}:from=40"
    run = simulate(store, "slow", Mesh(dp=2, tp=2, pp=2), fault, skewed=False, kernels=8, calls=64)
    begun = query_columns(store, f"SELECT toUnixTimestamp64Nano(min(ts)) AS ns FROM iterations WHERE run = {run}")
    host = str(query_columns(store, f"SELECT any(host) AS host FROM ranks WHERE run = {run}")["host"][0])
    ahead_ms = (int(begun["ns"][0]) - T0) / 1e6
    common, busy = stack(py("train", 3), native("matmul")), stack(py("train", 3), py("tokenize", 9, "/app/data.py"))
    rows = [Row(rank, common, ms=ahead_ms + 400 * at, count=20) for rank in range(8) for at in range(40)]
    rows += [Row(SLOW, busy, ms=ahead_ms + 400 * at, count=10) for at in range(40)]
    with Writer(store, source="test") as writer:
        store_stacks(writer, rows, job="slow", run=run)
        writer.append("health", {
            "host": host, "ts": begun["ns"][0], "kind": "k", "check": ["gpu_heat", "memory", "argus"],
            "status": ["critical", "ok", "critical"], "text": ["GPU 5 is 97 C", "fine", "1 of 2"],
            "hint": ["clean the fans", "", ""], "facts": [{"driver": "570.1"}, {}, {}], "duration_ns": 5,
        })  # fmt: skip
        writer.append("health_figures", {
            "host": host, "ts": begun["ns"][0], "kind": "k", "check": "gpu_heat", "figure": "core_c",
            "device": ["gpu4", "gpu5"], "value": [61.0, 97.0],
        })  # fmt: skip
        writer.append("coverage", {
            "job": "slow", "run": run, "host": host,
            "counter": ["launches_dropped", "overhead_ppm", "overhead_probes_ns"],
            "value": [3, 8_000, 4_000_000], "loss": [True, False, False], "ts": int(begun["ns"][0]), "version": 9,
        })  # fmt: skip
        for number, facts in (
            (run - 1, [{"torch.version": "2.9", "env.NCCL_ALGO": "Ring"}] * 8),
            (run, [{"torch.version": "2.10", "cpu.governor": "powersave" if one == SLOW else "performance"}
                   for one in range(8)]),
        ):  # fmt: skip
            writer.append("environments", {
                "job": "slow", "run": number, "rank": np.arange(8), "host": host, "pid": 0, "ts": begun["ns"][0],
                "facts": facts, "digest": np.arange(8), "version": 1,
            })  # fmt: skip


def write_few_columns(store: Store, ranks: int = 6, steps: int = 400) -> tuple[int, int]:
    """``extreme``: step times without any scatter to speak of, but for one step of one rank. Returns which."""
    rank, step = np.repeat(np.arange(ranks), steps), np.tile(np.arange(steps), ranks)
    at = 3, 237
    took = np.full(len(rank), 50_000_000) + (rank * 7 + step * 13) % 11 * 20_000
    took[(rank == at[0]) & (step == at[1])] = 95_000_000
    with Writer(store, source="test") as writer:
        writer.append("iterations", {
            "job": "extreme", "run": 1, "rank": rank, "step": step, "host": "h", "ts": T0 + step * 100_000_000,
            "duration_ns": took, "collectives": 0, "launches": 0, "method": "imported", "confidence": 1.0,
        })  # fmt: skip
    return at


def write_hostile(store: Store) -> None:
    """A job all of whose names are hostile: its own, of its nodes, kernels, functions, files and checks."""
    ranks, steps = 4, 40
    rank, step = np.repeat(np.arange(ranks), steps), np.tile(np.arange(steps), ranks)
    hosts = [f"{HOSTILE}{one // 2}" for one in rank.tolist()]
    shared: dict[str, Any] = {"job": HOSTILE, "run": 7}
    took = 50_000_000 + (rank * 7 + step * 13) % 11 * 20_000 + (rank == 2) * 30_000_000
    each = np.arange(ranks)
    own_hosts = [f"{HOSTILE}{one // 2}" for one in each.tolist()]
    with Writer(store, source="test") as writer:
        writer.append("jobs", {
            **shared, "host": own_hosts[:1], "started": [T0], "ended": [T0 + 10**10], "world_size": ranks,
            "launcher": HOSTILE, "mono_offset_ns": 0, "argus_version": HOSTILE, "version": 1,
        })  # fmt: skip
        writer.append("ranks", {
            **shared, "rank": each, "host": own_hosts, "pid": 1000 + each, "local_rank": each,
            "rank_source": "torchrun",
            "started": T0, "exe": HOSTILE, "command": HOSTILE * 20, "libraries": [[HOSTILE]] * ranks, "probes": 0,
            "state": "traced", "version": 1,
        })  # fmt: skip
        writer.append("iterations", {
            **shared, "rank": rank, "step": step, "host": hosts, "ts": T0 + step * 100_000_000, "duration_ns": took,
            "collectives": 0, "launches": 0, "method": "imported", "confidence": 1.0,
        })  # fmt: skip
        for phase, part in (("forward", 2), (HOSTILE, 3)):
            writer.append("phases", {
                **shared, "rank": rank, "step": step, "host": hosts, "ts": T0 + step * 100_000_000, "phase": phase,
                "duration_ns": took // part, "overlapped_ns": 0, "spans": 1, "method": "marks", "confidence": 1.0,
            })  # fmt: skip
        writer.append("kernel_events", {
            **shared, "rank": rank, "host": hosts, "pid": 1, "device": 0, "context": 1, "stream": 7, "kind": "kernel",
            "name": HOSTILE, "ts": T0 + step * 100_000_000, "duration_ns": took // 4, "launch_ts": 0,
            "issue_latency_ns": -1, "launch_tid": 0, "launch_probed": False, "correlation": step, "graph": 0,
            "graph_node": 0, "grid": [[1, 1, 1]] * len(rank), "block": [[32, 1, 1]] * len(rank), "registers": 1,
            "shared_static": 0, "shared_dynamic": 0, "bytes": 0,
        })  # fmt: skip
        stacks = [Row(int(one), stack(py(HOSTILE, 3, HOSTILE), native(HOSTILE, HOSTILE)), ms=5) for one in each]
        store_stacks(writer, stacks, job=HOSTILE, run=7)
        writer.append("health", {
            "host": own_hosts[0], "ts": T0, "kind": "k", "check": [HOSTILE], "status": "critical", "text": HOSTILE,
            "hint": HOSTILE, "facts": [{HOSTILE: HOSTILE}], "duration_ns": 5,
        })  # fmt: skip
        writer.append("environments", {
            **shared, "rank": each, "host": own_hosts, "pid": 1, "ts": T0, "facts": [{HOSTILE: HOSTILE}] * ranks,
            "digest": 1, "version": 1,
        })  # fmt: skip
        writer.append("coverage", {
            **shared, "host": own_hosts[0], "counter": [HOSTILE], "value": 3, "loss": True, "ts": T0, "version": 9,
        })  # fmt: skip
        writer.append("features", {
            **shared, "rank": each, "host": own_hosts, "feature": HOSTILE, "state": HOSTILE, "reason": HOSTILE,
            "version": 1,
        })  # fmt: skip


def finding_of(verdict: Verdict) -> list[int]:
    """The ranks of the first finding."""
    return verdict["findings"][0]["ranks"] if verdict["findings"] else []
