"""Kernels by Argus against torch.profiler: names, counts and times of the same training steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from scripts.gpu_check.common import (
    HERE,
    ROOT,
    Child,
    Context,
    Kernels,
    begin_session,
    compare,
    tally,
    target_environment,
    traced_kernels,
    training,
)

STEPS = 30
MODES = ("eager", "graphs", "compile")
GOAL_COUNT, GOAL_TIME = 0.999, 0.01


def run(ctx: Context) -> None:
    modes = MODES[:1] if ctx.fake else MODES
    # All warm up at once; only one of them uses the GPU afterwards.
    armed = {mode: training(ctx, "--mode", mode, armed=True, name=f"{mode}-armed") for mode in modes}
    plain = {mode: training(ctx, "--mode", mode, name=f"{mode}-plain") for mode in modes}
    pairs: dict[str, tuple[Kernels, list[Any]]] = {}
    try:
        for mode in modes:
            with ctx.trying(f"kernels of {mode} steps"):
                started = armed[mode].answer(80)
                ctx.save(parameters=started["parameters"])
                plain[mode].answer(80)
                pairs[mode] = _one(ctx, mode, armed[mode], plain[mode])
                _compare(ctx, mode, *pairs[mode])
            armed[mode].close()
            plain[mode].close()
        with ctx.trying("argus run"):
            _argus_run(ctx)
    finally:
        for child in [*armed.values(), *plain.values()]:
            child.kill()


def _one(ctx: Context, mode: str, armed: Child, plain: Child) -> tuple[Kernels, list[Any]]:
    session = begin_session(ctx, [armed.pid], mode, whole="")  # the governor would record a part of the time
    try:
        began = session.began
        warm = armed.ask("steps 3")
        window = armed.ask(f"steps {STEPS}")
        ended = session.stop()
    finally:
        session.kill()
    file = ctx.scratch / f"kernels-{mode}.json"
    # As warm as the other: the same steps of the same training.
    plain.ask("steps 3")
    profiled = plain.ask(f"profile {STEPS} {file}")
    events = json.loads(file.read_text())["events"]
    traced = traced_kernels(session.spool)
    found = traced.within(window["begin_ns"], window["end_ns"])
    reference = [e for e in events if e[0] == "kernel"]
    ctx.values.setdefault("modes", {})[mode] = {
        "began": began, "ended": ended, "window": {k: window[k] for k in ("begin_ns", "end_ns", "steps")},
        "warm": len(traced.within(warm["begin_ns"], warm["end_ns"])),
        "profiler": {k: v for k, v in profiled.items() if k not in ("step_ns",)},
        "all_traced": len(traced), "in_window": len(found), "spool_bytes": _size(session.spool),
        "step_ms_traced": float(np.median(window["step_ns"])) / 1e6,
        "step_ms_profiled": float(np.median(profiled["step_ns"])) / 1e6,
        "kinds": tally(list(found.kind)),
        "profiler_copies": tally([e[1] for e in events if e[0] != "kernel"]),
        "kernels_a_step": len(reference) / STEPS,
        "distinct_names": len({e[1] for e in reference}),
        "launch_known": float(np.mean(found.launch_ns > 0)) if len(found) else 0.0,
    }  # fmt: skip
    ctx.save()
    return found, events


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.arrow"))


def _compare(ctx: Context, mode: str, found: Kernels, events: list[Any]) -> None:
    ours = found.kernels()
    outcome = compare(
        list(zip(ours.name.tolist(), ours.duration_ns.tolist(), strict=True)),
        [(e[1], e[3] * 1e3) for e in events if e[0] == "kernel"],
    )
    facts = ctx.values["modes"][mode]
    facts["comparison"] = {
        "ours": outcome.ours, "theirs": outcome.theirs, "matched": outcome.matched, "share": outcome.share,
        "missing": dict(list(outcome.missing.items())[:30]), "extra": dict(list(outcome.extra.items())[:30]),
        "median_difference": outcome.median_difference, "by_name": outcome.worst,
    }  # fmt: skip
    rows = ctx.values.setdefault("rows", [])
    rows.append([mode, outcome.theirs, outcome.ours, f"{outcome.share:.4%}", len(outcome.missing), len(outcome.extra),
                 f"{outcome.median_difference:.3%}", f"{facts['launch_known']:.3%}",
                 facts["profiler"]["copies"], len(found) - outcome.ours])  # fmt: skip
    ctx.table(
        f"kernels of {STEPS} steps",
        ["mode", "torch.profiler", "Argus", "found", "names missing", "names extra", "time differs", "launch known",
         "copies (profiler)", "copies (Argus)"],
        rows,
    )  # fmt: skip
    ctx.table(
        f"kernels of {mode} steps that take most time",
        ["kernel", "count", "median us", "Argus differs"],
        [[name[:90], count, ns / 1e3, f"{difference:+.2%}"] for name, count, ns, difference in outcome.worst[:12]],
    )
    exact = outcome.ours == outcome.theirs == outcome.matched
    passed = outcome.share >= GOAL_COUNT and outcome.ours <= outcome.theirs / GOAL_COUNT
    ctx.check(
        f"{mode}: at least 99.9 % of the kernels, by name",
        passed and outcome.theirs > 0,
        f"{outcome.matched:,} of {outcome.theirs:,}{', exactly the same' if exact else ''}"
        + (f"; missing {list(outcome.missing.items())[:3]}" if outcome.missing else "")
        + (f"; extra {list(outcome.extra.items())[:3]}" if outcome.extra else ""),
    )
    ctx.check(
        f"{mode}: median times within 1 %", outcome.median_difference <= GOAL_TIME, f"{outcome.median_difference:.3%}"
    )
    lost = facts["ended"].get("lost")
    ctx.check(f"{mode}: nothing was lost", not lost, str(lost or ""))


def _argus_run(ctx: Context) -> None:
    """From the first call on, by `argus run`: what torch.profiler sees of the same steps is in there."""
    spool = ctx.scratch / "kernels-spool-run"
    environment = dict(target_environment(), PYTHONPATH=_python_path())
    log = str(ctx.scratch / "argus-run.log")
    command = [sys.executable, "-c", _RUN, "run", "--store", f"spool://{spool}", "--log", log, "--"]
    command += [sys.executable, str(HERE / "fake_step.py")] if ctx.fake else [ctx.python, str(HERE / "train_step.py")]
    command += ["--size", "small"]
    with Child(command, env=environment, log=ctx.scratch / "kernels-run.log", cwd=ROOT) as child:
        child.answer(60)
        window = child.ask("steps 50")
        child.send("exit")
        code = child.process.wait(30)
    with training(ctx, "--size", "small", name="small") as plain:
        plain.answer(60)
        file = ctx.scratch / "kernels-small.json"
        assert isinstance(plain, Child)
        plain.ask(f"profile 50 {file}")
    traced = traced_kernels(spool)
    ours = traced.within(window["begin_ns"], window["end_ns"]).kernels()
    theirs = [(e[1], e[3]) for e in json.loads(file.read_text())["events"] if e[0] == "kernel"]
    outcome = compare(list(zip(ours.name.tolist(), ours.duration_ns.tolist(), strict=True)), theirs)
    before = traced.kernels().start_ns
    last_lines = Path(log).read_text(errors="replace").splitlines()[-6:] if Path(log).exists() else []
    earlier = int(np.sum(before < window["begin_ns"]))
    ctx.save(argus_run={"code": code, "ours": outcome.ours, "theirs": outcome.theirs, "before": earlier})
    ctx.check(
        "argus run: kernels of 50 small steps, and those of the warm-up",
        outcome.share >= GOAL_COUNT and code == 0,
        f"{outcome.matched:,} of {outcome.theirs:,}; {earlier:,} before; exit {code}; " + " | ".join(last_lines),
    )


# Without an installation argus.cli is the tree's cli/.
_RUN = (
    f"import sys, argus; argus.__path__.append({str(ROOT)!r}); from argus.cli.main import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def _python_path() -> str:
    import os

    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
