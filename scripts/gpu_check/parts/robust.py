"""Argus killed, the target killed, forked workers, a second trace: the program goes on, and at its old speed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from argus.model.units import duration
from scripts.gpu_check.common import (
    Child,
    Context,
    PartFailed,
    Session,
    at_most,
    begin_session,
    bootstrap_median,
    traced_kernels,
    training,
)

HELPER_NOTICES_S = 12.0
"""A helper without a heartbeat switches itself off within that (VANISHED_NS in argus/cupti/helper/helper.c)."""
TURNS, TURN_S = 10, 0.25
SLOWER = 1.02


class Pace:
    """Step time of a program against that of another, which nobody ever traced: machines drift, both with them.

    They step in short turns, not at once: two programs on one GPU make each other wait, which hides what is looked for.
    """

    def __init__(self, ctx: Context, program: Child, untouched: Child) -> None:
        self._ctx, self._program, self._untouched = ctx, program, untouched
        self._rows: list[list[Any]] = []
        self.before: list[float] = []

    def compare(self, when: str, detail: str = "") -> tuple[float, float, float]:
        """Its ratio to the other by that of before, with an interval; 1 for the first call, which is before."""
        pairs = [(_step_ms(self._program), _step_ms(self._untouched)) for _ in range(TURNS)]
        ratios = [a / b for a, b in pairs]
        self.before = self.before or ratios
        found = bootstrap_median([ratio / float(np.median(self.before)) for ratio in ratios])
        # What was before is not known better than what is now.
        spread = np.ptp(bootstrap_median(self.before)[1:]) / np.median(self.before) / 2
        found = (found[0], found[1] - spread, found[2] + spread)
        text = f"{found[0] - 1:+.2%} ({found[1] - 1:+.2%} to {found[2] - 1:+.2%})"
        ours, theirs = (float(np.median([pair[k] for pair in pairs])) for k in (0, 1))
        self._rows.append([when, ours, theirs, text if len(self._rows) else "-", detail])
        self._ctx.table("median step time, ms", ["when", "ms", "untouched", "against before", ""], self._rows)
        return found

    def check(self, what: str, when: str, detail: str = "") -> None:
        found = self.compare(when, detail)
        self._ctx.check(what, at_most(SLOWER, found), self._rows[-1][3])


def _step_ms(child: Child) -> float:
    child.ask("go")
    time.sleep(TURN_S)
    return float(np.median([d for _, d in child.ask("pause", 30)["steps"]])) / 1e6


def _session(ctx: Context, child: Child, name: str, **more: str) -> Session:
    """One that prepares itself meanwhile."""
    return Session(ctx, [child.pid], "uprobes,kernels,api", name, **more)


def run(ctx: Context) -> None:
    # Bound by the CPU: what stays behind would be seen.
    main, other, untouched = (
        training(ctx, "--size", "host", armed=name != "untouched", name=name) for name in ("main", "other", "untouched")
    )
    sessions: dict[str, Session] = {}
    try:
        for child in (main, other, untouched):
            child.answer(60)
        for child in (main, untouched):
            _step_ms(child)
        sessions = {
            "killed": _session(ctx, main, "killed"),
            "fork": _session(ctx, other, "fork", children=""),
            "target": _session(ctx, other, "target"),
            "second": _session(ctx, main, "second"),
        }
        pace = Pace(ctx, main, untouched)
        # What is measured now counts for all that follows: nothing else is to go on meanwhile.
        for session in sessions.values():
            with contextlib.suppress(PartFailed):  # it is reported when its turn comes
                session.prepared(30)
        pace.compare("before")
        killed_at = None
        with ctx.trying("Argus killed with SIGKILL while on"):
            killed_at = _argus_killed(ctx, main, sessions)
        # Until its helper has noticed, the other program is looked at.
        with ctx.trying("forked workers while on"):
            _forked(ctx, other, sessions)
        with ctx.trying("target killed while on"):
            _target_killed(ctx, other, sessions)
        if killed_at is not None:
            with ctx.trying("after Argus was killed"):
                time.sleep(max(0.0, killed_at + HELPER_NOTICES_S - time.monotonic()))
                steps = main.ask("pause", 30)["steps"]
                longest = duration(max(d for _, d in steps))
                ctx.check("the program goes on when Argus is killed", len(steps) > 20, f"longest step {longest}")
                pace.check("step time is back once the helper has noticed", "after Argus was killed")
        with ctx.trying("a second trace"):
            ended = _second(ctx, main, sessions)
            pace.check("step time is back after a stop", "after the second trace", str(ended["states_after"]))
    finally:
        for child in (*sessions.values(), main, other, untouched):
            child.kill()
    left = [f"{pid}: {comm}" for pid, comm in _argus_left()]
    ctx.check("nothing of Argus is left running", not left, ", ".join(left))


def _begin(ctx: Context, child: Child, sessions: dict[str, Session], name: str, **more: str) -> Session:
    sessions[name] = begin_session(ctx, [child.pid], name, sessions[name], **more)
    return sessions[name]


def _argus_killed(ctx: Context, child: Child, sessions: dict[str, Session]) -> float:
    """Returns when it was; the program steps on."""
    session = _begin(ctx, child, sessions, "killed")
    child.ask("go")
    time.sleep(1.0)
    os.kill(session.pid, signal.SIGKILL)
    session.process.wait()
    return time.monotonic()


def _second(ctx: Context, child: Child, sessions: dict[str, Session]) -> dict[str, Any]:
    session = _begin(ctx, child, sessions, "second")
    began = session.began
    window = child.ask("steps 20")
    ended = session.stop()
    found = traced_kernels(session.spool).within(window["begin_ns"], window["end_ns"]).kernels()
    ctx.check(
        "a second trace works", len(found) > 0, f"{len(found):,} kernels; {began['states']}; lost {ended['lost']}"
    )
    return ended


def _forked(ctx: Context, child: Child, sessions: dict[str, Session]) -> None:
    session = _begin(ctx, child, sessions, "fork", children="")
    answer = child.ask("loader 20", 60)
    ended = session.stop()
    ctx.check(
        "a DataLoader with forked workers works while Argus is on", answer["items"] == answer["expected"],
        f"{answer['items']} of {answer['expected']}; lost {ended['lost']}",
    )  # fmt: skip


def _target_killed(ctx: Context, child: Child, sessions: dict[str, Session]) -> None:
    session = _begin(ctx, child, sessions, "target")
    child.ask("go")
    time.sleep(1.5)
    child.kill()
    time.sleep(1.0)
    state = session.state()
    ended = session.stop()
    found = traced_kernels(session.spool)
    ctx.check(
        "Argus ends well when its target is killed",
        session.process.returncode == 0,
        f"exit {session.process.returncode}",
    )
    ctx.check(
        "and keeps what the target had done",
        len(found) > 0,
        f"{len(found):,} operations; {state['states']}; lost {ended['lost']}",
    )


def _argus_left() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"scripts.gpu_check.session" in words and parent == os.getpid():
                found.append((int(entry.name), b" ".join(words).decode(errors="replace")[:100]))
    return found
