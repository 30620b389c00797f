"""Whether BPF programs load, uprobes fire on libcuda, libcudart and libnccl, and what a hit costs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

from argus.model.units import duration
from scripts.gpu_check.common import HERE, ROOT, Child, Context, ExactProgram, compile_launcher, target_environment

ROUNDS = 9
LAUNCHES = 20_000


def _hits(probes: Any, names: list[str], pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for ring in (probes.launches, probes.collectives, probes.control):
        events = ring.drain()
        for event in events[events["pid"] == pid]["call"].tolist():
            found[names[event]] += 1
    return found


def _cost(ctx: Context, probes: Any, child: Child, label: str, launches: int, command: str) -> None:
    """Paired: batches of launches with probes and without, in turns."""
    from argus.capture.process.targets import open_target
    from argus.model import calls

    names = [call.symbol if hasattr(call, "symbol") else call.name for call in calls.CALLS]
    target = open_target(child.pid)
    libraries = [library.describe() for library in target.libraries]
    probes.add_target(child.pid)
    plain, probed, attach_ms, detach_ms = [], [], [], []
    hits: Counter[str] = Counter()
    sent = 0

    def per_launch() -> float:
        answer = child.ask(f"{command} {launches}")
        return float(answer["launch_ns"])

    per_launch()
    for _ in range(ROUNDS):
        plain.append(per_launch())
        began = time.perf_counter()
        made = [probes.attach(library, child.pid) for library in target.libraries]
        attach_ms.append((time.perf_counter() - began) * 1e3)
        probed.append(per_launch())
        sent += launches
        hits += _hits(probes, names, child.pid)
        began = time.perf_counter()
        probes.detach(made)
        detach_ms.append((time.perf_counter() - began) * 1e3)
    target.close()
    cost = statistics.median(b - a for a, b in zip(plain, probed, strict=True))
    ctx.values.setdefault("costs", []).append(
        {"program": label, "libraries": libraries, "plain_ns": plain, "probed_ns": probed, "cost_ns": cost,
         "attach_ms": attach_ms, "detach_ms": detach_ms, "hits": dict(hits), "launches": sent}
    )  # fmt: skip
    ctx.table(
        "cost of an entry probe",
        ["program", "ns a launch", "with probes", "cost ns", "attach ms", "detach ms"],
        [[c["program"], statistics.median(c["plain_ns"]), statistics.median(c["probed_ns"]), c["cost_ns"],
          statistics.median(c["attach_ms"]), statistics.median(c["detach_ms"])] for c in ctx.values["costs"]],
    )  # fmt: skip
    seen = sum(n for name, n in hits.items() if "LaunchKernel" in name)
    ctx.check(
        f"every launch of {label} is seen once", seen == sent, f"{seen:,} of {sent:,}: {dict(hits.most_common(6))}"
    )
    ctx.check(f"a probed launch of {label} costs at most 3 µs", cost <= 3000, duration(cost))


def run(ctx: Context) -> None:
    from argus.capture.probes import Probes

    began = time.perf_counter()
    probes = Probes()
    ctx.check(
        "BPF programs load", True, f"{probes.backend} links, {time.perf_counter() - began:.1f} s to compile and load"
    )
    try:
        if ctx.fake:
            _fake(ctx, probes)
            return
        for static in (False, True):
            label = "nvcc, static runtime" if static else "nvcc, shared runtime"
            log = ctx.scratch / f"bpf-launcher-{static}.log"
            with ctx.trying(label), Child([compile_launcher(ctx, static)], env=target_environment(), log=log) as child:
                child.answer(30)
                _cost(ctx, probes, child, label, LAUNCHES, "launch")
        with ctx.trying("PyTorch and NCCL"):
            _torch(ctx, probes)
    finally:
        probes.close()


def _torch(ctx: Context, probes: Any) -> None:
    from argus.capture.process.targets import open_target
    from argus.model import calls

    names = [call.symbol if hasattr(call, "symbol") else call.name for call in calls.CALLS]
    command = [ctx.python, str(HERE / "callers.py"), "--only", "pointwise,matmul,NCCL"]
    with Child(command, env=target_environment(), log=ctx.scratch / "bpf-torch.log") as child:
        child.answer(60)
        target = open_target(child.pid)
        libraries = [library.describe() for library in target.libraries]
        ctx.table("libraries of a PyTorch process", ["file"], [[text] for text in libraries])
        probes.add_target(child.pid)
        made = [probes.attach(library, child.pid) for library in target.libraries]
        child.send("run 101")
        answer: dict[str, Any] = {}
        callers = []
        while "done" not in answer:
            answer = child.answer()
            callers.append(answer)
        hits = _hits(probes, names, child.pid)
        probes.detach(made)
        target.close()
    ctx.table("hits in a PyTorch process", ["function", "hits"], [[name, count] for name, count in hits.most_common()])
    for library in ("cu", "cuda", "nccl"):
        prefix = {"cu": "cu", "cuda": "cuda", "nccl": "nccl"}[library]
        seen = sum(
            n for name, n in hits.items() if name.startswith(prefix) and (prefix != "cu" or not name.startswith("cuda"))
        )
        known = any({"cu": "libcuda", "cuda": "libcudart", "nccl": "libnccl"}[library] in text for text in libraries)
        ctx.check(f"uprobes fire on {library}*", seen > 0 if known else None, f"{seen} hits; in PyTorch: {known}")
    reduced = hits["ncclAllReduce"]
    ctx.check("every all-reduce is seen", reduced == 202, f"{reduced} of 202")


def _fake(ctx: Context, probes: Any) -> None:
    from argus.capture.process.targets import open_target
    from argus.model import calls

    names = [call.symbol if hasattr(call, "symbol") else call.name for call in calls.CALLS]
    with ExactProgram(ctx, 1009, 211) as program:
        target = open_target(program.pid)
        probes.add_target(program.pid)
        made = [probes.attach(library, program.pid) for library in target.libraries]
        program.go()
        hits = _hits(probes, names, program.pid)
        probes.detach(made)
        target.close()
    ctx.table("hits", ["function", "hits"], [[name, count] for name, count in hits.most_common()])
    ctx.check("exact counts", hits["cudaLaunchKernel"] == 1009 and hits["ncclAllReduce"] == 211, str(dict(hits)))
    # The cost of a probe, on calls that do nothing.
    import subprocess

    made_probe = ctx.scratch / "probe_target"
    source = ROOT / "scripts" / "benches" / "probe.c"
    subprocess.run(["gcc", "-O2", "-fcf-protection=none", "-o", made_probe, source], check=True)
    target_process = _ProbeProgram([made_probe], env=target_environment(), log=ctx.scratch / "bpf-probe.log")
    with target_process as child:
        time.sleep(0.1)
        _cost(ctx, probes, child, "empty calls", 5_000, "r")


class _ProbeProgram(Child):
    """scripts/benches/probe.c answers with a bare number."""

    def ask(self, command: str, timeout_s: float = 60.0) -> dict[str, Any]:
        self.send(command)
        line = self.lines.get(timeout=timeout_s)
        return {"launch_ns": int(line or "0") / int(command.split()[1])}
