"""Four ranks on one GPU, one of them made slow: a labelled trace, `ranks.tar`."""

from __future__ import annotations

import json
import tarfile
import time
from typing import Any

import numpy as np

from argus.model.units import duration
from scripts.gpu_check.common import Child, Context, PartFailed, begin_session, spool_rows, tally, training

RANKS = 4
SLOW, SLOW_FROM = 2, 20
STEPS = (40, 80)
"""At least, at most: several ranks on one GPU take turns, and nobody knows how long that takes."""
LASTS_S = 25.0
BEFORE = 5
MOST_BYTES = 10 << 20


def _start(ctx: Context, backend: str, port: int) -> list[Child]:
    children = []
    for rank in range(RANKS):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
            # NCCL refuses two ranks on one GPU of one host; as different hosts they talk through sockets.
            "NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
            "TORCHELASTIC_RUN_ID": "gpu-check", "NCCL_MAX_NCHANNELS": "1",
        }  # fmt: skip
        children.append(
            training(
                ctx, "--size", "small", "--backend", backend, "--slow-rank", str(SLOW), "--slow-from", str(SLOW_FROM),
                "--slow-matmuls", "100", "--warmup", "3", armed=True, name=f"{backend}-{rank}", **environment,
            )
        )  # fmt: skip
    return children


def run(ctx: Context) -> None:
    for number, backend in enumerate(("nccl", "gloo")):
        children = _start(ctx, backend, 29500 + number)
        try:
            try:
                for child in children:
                    child.answer(30)
            except PartFailed as failure:
                ctx.note(f"{backend} with {RANKS} ranks on one GPU: {failure}"[:600])
                continue
            _trace(ctx, backend, children)
            return
        finally:
            for child in children:
                child.kill()
    raise PartFailed("no way to run several ranks on one GPU")


def _trace(ctx: Context, backend: str, children: list[Child]) -> None:
    pids = [child.pid for child in children]
    for child in children:
        child.send("steps 2")
    first = [child.answer(20) for child in children]
    step_s = max(t["end_ns"] - t["begin_ns"] for t in first) / 2e9
    steps = int(np.clip(LASTS_S / step_s, *STEPS))
    session = begin_session(ctx, pids, "ranks", job="four-ranks")
    try:
        began = session.began
        until = time.monotonic() + ctx.left_s() - 15
        for child in children:
            child.send(f"steps {steps}")
        answers = [child.answer(max(1.0, until - time.monotonic())) for child in children]
        ended = session.stop()
    finally:
        session.kill()
    label: dict[str, Any] = {
        "what": f"{RANKS} ranks on one GPU, {backend}, DistributedDataParallel; rank {SLOW} makes extra matrix products"
        f" in the backward pass from its step {SLOW_FROM} on (steps count from the first of the warm-up; the first "
        f"{BEFORE} were before the trace)",
        "backend": backend, "ranks": RANKS, "slow_rank": SLOW, "slow_from_step": SLOW_FROM, "untraced_steps": BEFORE,
        "pids": pids,
        "steps": {str(rank): {"begin_ns": t["begin_ns"], "end_ns": t["end_ns"], "step_ns": t["step_ns"]}
                  for rank, t in enumerate(answers)},
    }  # fmt: skip
    early = slice(0, SLOW_FROM - BEFORE)
    before = float(np.median(answers[0]["step_ns"][early])) / 1e6
    after = float(np.median(answers[0]["step_ns"][SLOW_FROM - BEFORE + 3 :])) / 1e6
    files = sorted(session.spool.glob("*.arrow"))
    size = sum(file.stat().st_size for file in files)
    with tarfile.open(ctx.out / "ranks.tar", "w") as tar:
        place = ctx.scratch / "label.json"
        place.write_text(json.dumps(label, indent=1))
        tar.add(place, "ranks/label.json")
        for file in files:
            tar.add(file, f"ranks/spool/{file.name}")
    rows = {}
    for table in ("launches", "collectives", "kernel_events", "iterations", "communicators", "ranks"):
        found = spool_rows(session.spool, table)
        rows[table] = 0 if found is None else found.num_rows
    collectives = spool_rows(session.spool, "collectives")
    ops = tally(collectives["op"].cast("string").to_pylist()) if collectives is not None else {}
    ctx.save(began=began, ended=ended, backend=backend, rows=rows, spool_bytes=size, ops=ops)
    ctx.table(
        f"{steps} steps of {RANKS} ranks, {backend}",
        ["step ms before", "step ms after", "spool bytes", *rows],
        [[before, after, size, *rows.values()]],
    )
    ctx.check(
        "the slow rank slows all",
        None if ctx.fake else after > before * 1.1,
        f"{duration(1e6 * before)}, then {duration(1e6 * after)}",
    )
    ctx.check("all ranks were traced", len(ended["seen"]) == RANKS, str(ended["seen"]))
    ctx.check(
        "steps were found",
        min((r["steps"] for r in ended["seen"].values()), default=0) >= steps // 2,
        str(ended["seen"]),
    )
    ctx.check("nothing was lost", not ended["lost"], str(ended["lost"]))
    ctx.check("at most 10 MB", size <= MOST_BYTES, f"{size:,}")
