"""Views as a tracer would fill them, for tests of what is drawn."""

from __future__ import annotations

from typing import Any

from argus.diagnose.follow.standing import Standing
from argus.diagnose.verdict import Finding
from argus.live.display.stack_view import HotLine, HotStack, StackView
from argus.live.display.view import JobView, RankView, View
from argus.live.gpu.describe import GpuView

JOB = "llama-7b-pretrain"
STACKS = StackView(
    "on",
    1000,
    [HotLine("forward (model.py:212)", 0.61, 16, "0-15"), HotLine("adamw (optim.py:88)", 0.12, 16, "0-15")],
    [("futex", 12.3), ("sleep", 2.0)],
    [HotLine("__getitem__ (train.py:10)", 0.82, 1, "11", "sleep"), HotLine("wait (c10d.py:7)", 0.004, 1, "3", "futex")],
    [HotStack(HotLine("x", 0.3, 1, "11", "sleep"), ["<module> (train.py:90)", "__getitem__ (train.py:10)"])],
)


def a_rank(rank: int, *, late_ms: float | None = 0.1, own_ms: float | None = 37.9, **more: Any) -> RankView:
    parts = {} if own_ms is None else {"computing": own_ms / 54.2, "waiting": 1 - own_ms / 54.2}
    fields: dict[str, Any] = {
        "job": JOB, "rank": rank, "pid": 4000 + rank, "state": "traced", "launch_rate": 1400.0, "collective_rate": 33.0,
        "steps": 640, "last_step": 640, "step_ms": 54.2, "run": 7, "late_ms": late_ms, "own_ms": own_ms,
        "parts": parts, "by": "GPU" if parts else "",
    }  # fmt: skip
    return RankView(**{**fields, **more})


def a_view(ranks: int = 4, slow: int | None = None, gpu: bool = True, **more: Any) -> View:
    """A job of so many ranks, one of which is late."""
    rows = [a_rank(rank) if rank != slow else a_rank(rank, late_ms=13.4, own_ms=52.6) for rank in range(ranks)]
    steps = [40.0 + rank % 2 for rank in range(60)] + [54.0 + rank % 2 for rank in range(60)]
    timed = [GpuView(JOB, r, 4000 + r, "on", "on", 0.97, 0.03, 0.3, 0.1, 120.0, 14.2, 0.999, 0) for r in range(ranks)]
    fields: dict[str, Any] = {
        "monotonic_ns": 10**12, "elapsed_s": 192.0, "ranks": rows, "kernels": [("gemm", 12_000)],
        "gpu": timed if gpu else [], "gpu_kernels": [("gemm<bf16>(Params)", 12_000, 4 * 10**10)] if gpu else [],
        "gpu_kernel_ns": 6 * 10**10, "collectives": [("AllReduce", 4000, 10**10)], "launches": 10**6,
        "collective_calls": 4000, "lost": {}, "waiting_bytes": 0, "store_error": "", "cpu_share": 0.031,
        "ring_fill": 0.012, "notes": ["stacks: 97 samples a second now"], "stacks": STACKS,
        "steps_go": ["where steps go: backward 61.0%, forward 30.2%, communication 8.8%"], "overhead": 0.0031,
        "jobs": [JobView(JOB, 7, ranks, 64, "torchrun", 640, steps, 10**12 - 10**8, 10**6, True)],
    }  # fmt: skip
    return View(**{**fields, **more})


def a_finding(rank: int, **more: Any) -> Finding:
    texts = (
        f"rank {rank} came last to the collectives in 98% of the newest 64 steps, 13.4 ms after everybody else",
        f"the GPU of rank {rank} computes for 50.4 ms a step, 1.37x as long as those with the same work "
        "(W1 0.63 of the mean, 0.01 expected by chance)",
        "kernel gemm of rank 3: beta 0.31 against 0.12, mu 0.9",
    )
    fields: dict[str, Any] = {
        "kind": "compute_straggler", "ranks": [rank], "hosts": ["gpu-node-17"], "steps": [320, 640], "phase": "forward",
        "kernels": [], "slowdown": 1.35, "share": 0.98, "confidence": 0.93, "level": "kernel",
        "id": "0123456789ab", "owner": "infrastructure",
        "evidence": [{"text": text, "sql": "SELECT 1"} for text in texts],
        "action": f"Check the GPU of rank {rank} on gpu-node-17: clocks, power limit and temperature (nvidia-smi -q), "
        "and whether another process uses it",
    }  # fmt: skip
    return Finding(**{**fields, **more})  # type: ignore[typeddict-item]


def degraded(rank: int) -> dict[tuple[str, int], Standing]:
    return {(JOB, 7): Standing("degraded", [a_finding(rank)])}
