"""torch.profiler before, during and after Argus in one process: what each sees, and what Argus reports."""

from __future__ import annotations

import json
import time
from typing import Any

from scripts.gpu_check.common import Child, Context, Session, traced_kernels, training

STEPS = 10


def _profile(ctx: Context, child: Child, name: str) -> int:
    file = ctx.scratch / f"profiler-{name}.json"
    answer = child.ask(f"profile {STEPS} {file}", 60)
    assert json.loads(file.read_text())["events"] is not None
    return int(answer["kernels"])


def run(ctx: Context) -> None:
    rows: list[list[Any]] = []

    def row(what: str, torch: Any, argus: Any, states: Any = "") -> None:
        rows.append([what, torch, argus, str(states)[:200]])
        ctx.table(f"kernels of {STEPS} steps", ["when", "torch.profiler", "Argus", "Argus reports"], rows)

    def session(child: Child, name: str) -> tuple[Session, dict[str, Any]]:
        made = Session(ctx, [child.pid], "kernels,api", name)
        return made, made.start()

    def counted(made: Session, window: dict[str, Any]) -> int:
        return len(traced_kernels(made.spool).within(window["begin_ns"], window["end_ns"]).kernels())

    first = training(ctx, "--size", "small", armed=True, name="first")
    second = training(ctx, "--size", "small", armed=True, name="second")
    third = training(ctx, "--size", "small", name="reference")
    try:
        for child in (first, second, third):
            child.answer(60)
        expected = _profile(ctx, third, "reference")
        row("a process that was never armed", expected, "-")

        with ctx.trying("Argus first, then torch.profiler"):
            made, began = session(first, "a")
            window = first.ask(f"steps {STEPS}")
            answer = made.stop()
            seen = counted(made, window)
            row("Argus, before any profiler", "-", seen, began.get("states"))
            ctx.check("Argus sees every kernel", seen == expected, f"{seen} of {expected}")
            after = _profile(ctx, first, "after")
            row("torch.profiler after Argus was stopped", after, "-", answer.get("states_after"))
            ctx.check("torch.profiler works after Argus was stopped", after == expected, f"{after} of {expected}")

        with ctx.trying("Argus after torch.profiler"):
            made, began = session(first, "b")
            window = first.ask(f"steps {STEPS}")
            answer = made.stop()
            seen = counted(made, window)
            row("Argus after torch.profiler had run", "-", seen, began.get("states"))
            ctx.check(
                "Argus, after torch.profiler ran: all kernels, or a state with the reason",
                seen == expected or "ignored" in str(answer).lower(),
                f"{seen} of {expected}: {json.dumps(answer.get('states'), default=str)[:300]}",
            )

        with ctx.trying("torch.profiler while Argus is on"):
            made, began = session(second, "c")
            during = _profile(ctx, second, "during")
            time.sleep(1)
            state = made.state()
            window = second.ask(f"steps {STEPS}")
            answer = made.stop()
            row("torch.profiler while Argus is on", during, "-", state.get("states"))
            row("Argus, after torch.profiler ran beside it", "-", counted(made, window), answer.get("states"))
            later = _profile(ctx, second, "later")
            row("torch.profiler once Argus was stopped", later, "-", answer.get("states_after"))
            ctx.check("the program survives both at once", True, f"torch.profiler saw {during} of {expected}")
            if not ctx.fake:  # there, the profiler subscribes to nothing
                noticed = "ignored" in str(state).lower()
                ctx.check("Argus notices that torch.profiler came", noticed, str(state.get("states")))
            ctx.check("torch.profiler works once Argus was stopped", later == expected, f"{later} of {expected}")

        with ctx.trying("Argus while torch.profiler is on"):
            third_armed = training(ctx, "--size", "small", armed=True, name="third")
            with third_armed as child:
                child.answer(60)
                child.ask("profiler on", 30)
                made, began = session(child, "d")
                window = child.ask(f"steps {STEPS}")
                answer = made.stop()
                off = child.ask("profiler off", 60)
                seen = counted(made, window)
                row("Argus while torch.profiler is on", off["gpu_events"], seen, answer.get("states"))
                ctx.check(
                    "torch.profiler is left alone",
                    off["gpu_events"] >= expected,
                    f"{off['gpu_events']} of {expected} or more",
                )
                ctx.check(
                    "Argus is ignored and reports that, or sees all",
                    seen == expected or "ignored" in str([began, answer]).lower(),
                    str(answer.get("states"))[:300],
                )
                again, began = session(child, "e")
                window = child.ask(f"steps {STEPS}")
                answer = again.stop()
                row("Argus once torch.profiler is off", "-", counted(again, window), answer.get("states"))
    finally:
        for child in (first, second, third):
            child.kill()
