"""Which callers' launches probes on exported functions see, against the kernels that torch.profiler counts."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from scripts.gpu_check.common import (
    HERE,
    Child,
    Context,
    ExactProgram,
    Session,
    compile_launcher,
    spool_rows,
    target_environment,
)

CALLS = 200


def _collect(child: Child, command: str) -> list[dict[str, Any]]:
    child.send(command)
    found: list[dict[str, Any]] = []
    while True:
        answer = child.answer(60)
        if "done" in answer:
            return found
        found.append(answer)


def run(ctx: Context) -> None:
    if ctx.fake:
        _fake(ctx)
        return
    environment = target_environment(
        TORCHINDUCTOR_CACHE_DIR=str(ctx.scratch / "inductor"), TRITON_CACHE_DIR=str(ctx.scratch / "triton")
    )
    command = [ctx.python, str(HERE / "callers.py")]
    armed = {
        **target_environment(armed=True),
        **{k: environment[k] for k in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")},
    }
    traced = Child(command, env=armed, log=ctx.scratch / "callers-traced.log")
    profiled = Child(command, env=environment, log=ctx.scratch / "callers-profiled.log")
    launcher = Child([compile_launcher(ctx, True)], env=target_environment(), log=ctx.scratch / "callers-launcher.log")
    try:
        ready = [child.answer(80) for child in (traced, profiled, launcher)]
        ctx.save(failures=ready[0].get("failures"))
        for name, failure in ready[0].get("failures", {}).items():
            ctx.note(f"{name} could not be used: {failure}")
        session = Session(ctx, [traced.pid, launcher.pid], "uprobes", "uprobes", whole="")
        try:
            began = session.start()
            runs = _collect(traced, f"run {CALLS}")
            answer = launcher.ask(f"launch {CALLS}")
            ended = session.stop()
        finally:
            session.kill()
        runs.append({"caller": "nvcc, static runtime", "calls": CALLS, "pid": launcher.pid, **answer})
        gpu = Session(ctx, [traced.pid], "kernels", "kernels")
        try:
            gpu.start()
            timed = _collect(traced, f"run {CALLS}")
            gpu.stop()
        finally:
            gpu.kill()
        counted = {t["caller"]: t.get("kernels") for t in _collect(profiled, f"profile {CALLS}")}
    finally:
        for child in (traced, profiled, launcher):
            child.kill()
    counted["nvcc, static runtime"] = CALLS
    ctx.save(attached=began.get("attached"), lost=ended["lost"], runs=runs, profiler=counted)
    rows = _by_caller(session, runs, traced.pid)
    by_cupti = _timed(gpu, timed)
    table = []
    for entry in runs:
        caller = entry["caller"]
        symbols = rows[caller]
        launched = sum(n for (kind, _), n in symbols.items() if kind in ("kernel", "graph"))
        words = ", ".join(f"{symbol} {n / CALLS:g}" for (_, symbol), n in symbols.most_common(5))
        kernels = counted.get(caller)
        table.append([caller, kernels / CALLS if kernels is not None else "-", launched / CALLS,
                      by_cupti.get(caller, 0) / CALLS, words])  # fmt: skip
        expected = kernels if "graph" not in caller else CALLS
        if "NCCL" in caller:
            reduced = sum(n for (kind, _), n in symbols.items() if kind == "collective")
            ctx.check(f"{caller}: every collective is seen", reduced == CALLS, f"{reduced} of {CALLS}; {words}")
        else:
            ctx.check(
                f"{caller}: launches seen by probes",
                None if kernels is None else launched == expected,
                f"{launched / CALLS:g} a call, torch.profiler {'?' if kernels is None else kernels / CALLS}; {words}",
            )
        if caller in by_cupti and kernels is not None:
            ctx.check(
                f"{caller}: kernels by GPU times", by_cupti[caller] == kernels, f"{by_cupti[caller]} of {kernels}"
            )
    ctx.table(
        f"a call of each, mean of {CALLS}",
        ["caller", "kernels (torch.profiler)", "launches (probes)", "kernels (GPU times)", "functions"],
        table,
    )


def _by_caller(session: Session, runs: list[dict[str, Any]], pid: int) -> dict[str, Counter[tuple[str, str]]]:
    offset = int(spool_rows(session.spool, "jobs")["mono_offset_ns"][0].as_py())
    found: dict[str, Counter[tuple[str, str]]] = {run["caller"]: Counter() for run in runs}
    for table in ("launches", "collectives"):
        rows = spool_rows(session.spool, table)
        if rows is None:
            continue
        when = rows["ts"].cast("int64").to_numpy() - offset
        pids = rows["pid"].to_numpy() if "pid" in rows.column_names else np.zeros(len(when))
        names = rows["call" if table == "launches" else "op"].cast("string").to_pylist()
        kinds = rows["kind"].cast("string").to_pylist() if table == "launches" else ["collective"] * len(names)
        in_nccl = rows["in_nccl"].to_pylist() if table == "launches" else [False] * len(names)
        for run in runs:
            mask = (when >= run["begin_ns"]) & (when < run["end_ns"])
            if pids.any():
                mask &= pids == run.get("pid", pid)
            for k in np.flatnonzero(mask):
                name = names[k] + (" (in NCCL)" if in_nccl[k] else "")
                found[run["caller"]][kinds[k], name] += 1
    return found


def _timed(session: Session, runs: list[dict[str, Any]]) -> dict[str, int]:
    from scripts.gpu_check.common import traced_kernels

    found = traced_kernels(session.spool).kernels()
    return {run["caller"]: len(found.within(run["begin_ns"], run["end_ns"])) for run in runs} if len(found) else {}


def _fake(ctx: Context) -> None:
    with ExactProgram(ctx, 1009, 211) as program:
        session = Session(ctx, [program.pid], "uprobes", "uprobes", whole="")
        try:
            session.start()
            begin = time.monotonic_ns()
            program.go()
            ended = session.stop()
        finally:
            session.kill()
    runs = [{"caller": "fake_train", "calls": 1, "begin_ns": begin, "end_ns": begin + 10**11}]
    rows = _by_caller(session, runs, program.pid)["fake_train"]
    ctx.table("calls", ["kind", "function", "rows"], [[kind, name, n] for (kind, name), n in rows.most_common()])
    launched = rows["kernel", "cudaLaunchKernel"]
    ctx.check("every launch is in the spool", launched == 1009, f"{launched} of 1009")
    reduced = sum(n for (kind, _), n in rows.items() if kind == "collective")
    ctx.check("every all-reduce is in the spool", reduced == 211, f"{reduced} of 211; {dict(rows)}")
    ctx.check("nothing was lost", not ended["lost"], str(ended["lost"]))
