"""What each layer adds to one launch on the CPU, and to one kernel on the GPU, against nothing, in turns."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from scripts.gpu_check.common import (
    HERE,
    Child,
    Context,
    PartFailed,
    Session,
    at_most,
    bootstrap_median,
    compile_launcher,
    cupti_folder,
    shown,
    target_environment,
)
from scripts.gpu_check.parts.overhead import AFTER, DORMANT, LAYERS, NOTHING

SETTLE_MS, WINDOW_MS = 200, 300
BATCH, PAUSE_US = 200, 500
"""So few launches that the queue never fills; the pause keeps the rate at that of a busy program."""
GPU_WINDOW_MS, GPU_BATCH = 120, 250
"""Launches wait for their turn while the GPU is held: they and what CUPTI queues with them must fit into its queue."""
KERNELS_NS = (2_000, 20_000)
ROUNDS, MOST_ROUNDS = 8, 12
FIRST = "before the first trace"
FIRST_WINDOWS = 6
OFF_LIMIT_NS, DORMANT_LIMIT_NS = 100, 50
STOP_LIMIT_S = 5.0
CPU, GPU = "ns a launch (CPU)", "ns a kernel of {:.0f} us (GPU)"


class Windows:
    """What was measured, by layer and round."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, dict[int, float]]] = {}
        self.late = 0

    def add(self, what: str, layer: str, turn: int, answer: dict[str, Any]) -> None:
        self.late += int(answer.get("late", 0))
        if answer["batches"]:
            self.found.setdefault(what, {}).setdefault(layer, {})[turn] = float(answer["median_ns"])

    def difference(self, what: str, layer: str, base: str) -> tuple[float, float, float]:
        """Median over rounds of the difference within a round, with its interval."""
        on, off = (self.found.get(what, {}).get(name, {}) for name in (layer, base))
        return bootstrap_median([on[turn] - off[turn] for turn in sorted(on.keys() & off.keys())])

    def against_first(self, what: str, layer: str) -> tuple[float, float, float]:
        """The median of a layer less that before the first trace, of the same process: another one's launches take up
        to 120 ns more or less on the GPU, and 1,000 ns on the CPU."""
        on, first = (list(self.found.get(what, {}).get(name, {}).values()) for name in (layer, FIRST))
        if not on or not first:
            return np.nan, np.nan, np.nan
        random = np.random.default_rng(1)
        drawn = [
            np.median(random.choice(on, len(on))) - np.median(random.choice(first, len(first))) for _ in range(2000)
        ]
        low, high = np.quantile(drawn, [0.025, 0.975])
        return float(np.median(on) - np.median(first)), float(low), float(high)

    def rows(self, what: str) -> list[list[Any]]:
        rows = []
        for layer in (NOTHING, DORMANT, FIRST, *LAYERS, AFTER):
            if found := list(self.found.get(what, {}).get(layer, {}).values()):
                row: list[Any] = [layer, len(found), float(np.median(found)), float(min(found)), float(max(found))]
                row += [_interval_text(self.difference(what, layer, base)) for base in (NOTHING, AFTER)]
                rows.append([*row, _interval_text(self.against_first(what, layer))])
        return rows


def _interval_text(found: tuple[float, float, float]) -> str:
    value, low, high = found
    return "-" if np.isnan(value) else f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def _program(ctx: Context, name: str, folder: str, armed: bool) -> Child:
    command: list[str | Path] = (
        [sys.executable, HERE / "fake_launcher.py"] if ctx.fake else [compile_launcher(ctx, False)]
    )
    environment = target_environment(armed)
    # The program itself loads no CUPTI; the helper in it asks for one by name.
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [folder, environment.get("LD_LIBRARY_PATH", "")]))
    environment["FAKEGPU_JITTER"] = "0"
    return Child(command, env=environment, log=ctx.scratch / f"launches-{name}.log")


def _window(windows: Windows, child: Child, layer: str, turn: int) -> None:
    windows.add(CPU, layer, turn, child.ask(f"window {SETTLE_MS} {WINDOW_MS} {BATCH} {PAUSE_US}"))
    for length in KERNELS_NS:
        answer = child.ask(f"gpu {GPU_WINDOW_MS} {GPU_BATCH} {length}")
        windows.add(GPU.format(length / 1e3), layer, turn, answer)


def _round(ctx: Context, windows: Windows, programs: dict[str, Child], sessions: dict[str, Session], turn: int) -> None:
    """Each layer once; what follows a session comes last."""
    traced = programs[AFTER]
    order = [NOTHING, DORMANT, *sessions]
    for name in order if turn % 2 == 0 else order[::-1]:
        if name in (NOTHING, DORMANT):
            _window(windows, programs[name], name, turn)
            continue
        session = sessions[name]
        try:
            began = session.on()
            _window(windows, traced, name, turn)
            ended = session.off()
        except PartFailed as failure:
            ctx.check(f"{name}, round {turn + 1}", False, str(failure)[:400])
            session.kill()
            del sessions[name]
            continue
        ctx.values.setdefault("sessions", {}).setdefault(name, []).append(
            {"on_s": began["took_s"], "off_s": ended["took_s"]}
            | {key: ended.get(key) for key in ("cpu_share", "lost", "counters", "states", "seen")}
        )
    _window(windows, traced, AFTER, turn)


def run(ctx: Context) -> None:
    folder = cupti_folder(ctx)
    ctx.save(cupti=folder)
    programs: dict[str, Child] = {}
    sessions: dict[str, Session] = {}
    windows = Windows()
    try:
        for name, armed in ((NOTHING, False), (DORMANT, True), (AFTER, True)):
            programs[name] = _program(ctx, name.split()[0], folder, armed)
        for child in programs.values():
            child.answer(30)
            # Only one of them works at a time: on one CPU they differ less. Their other threads stay where they are.
            os.sched_setaffinity(child.pid, {max(os.sched_getaffinity(0))})
        for name, layers in LAYERS.items():
            words = name.replace(" ", "-")
            sessions[name] = Session(ctx, [programs[AFTER].pid], layers, words, again="", whole="")
        for name in list(sessions):
            with ctx.trying(name):
                sessions[name].prepared(60)
                continue
            sessions.pop(name).kill()
        for turn in range(FIRST_WINDOWS):
            _window(windows, programs[AFTER], FIRST, turn)
        longest = 0.0
        for turn in range(2 if ctx.fake else MOST_ROUNDS):
            if turn and ctx.left_s() < longest * 1.2 + 6:
                break
            # More rounds than asked for only where they are quick.
            if turn >= ROUNDS and ctx.left_s() < 25 + longest:
                break
            began = time.monotonic()
            _round(ctx, windows, programs, sessions, turn)
            longest = max(longest, time.monotonic() - began)
            _show(ctx, windows, turn + 1)
    finally:
        for child in (*sessions.values(), *programs.values()):
            child.kill()
    _judge(ctx, windows)


def _show(ctx: Context, windows: Windows, rounds: int) -> None:
    for what in windows.found:
        ctx.table(
            what, ["with", "windows", "median", "least", "most", "more than nothing", "more than after stop",
                   "more than before"], windows.rows(what),
        )  # fmt: skip
    ctx.save(windows=windows.found, rounds=rounds, late=windows.late)


def _judge(ctx: Context, windows: Windows) -> None:
    for name, windows_of in ctx.values.get("sessions", {}).items():
        on = [t for t in windows_of if any((t["counters"] or {}).get(c) for c in ("hits", "cupti_records"))]
        lost: dict[str, int] = {}
        for one in windows_of:
            for key, count in (one["lost"] or {}).items():
                lost[key] = lost.get(key, 0) + count
        took = ", ".join(f"{w} in {np.median([t[w + '_s'] for t in windows_of]):.2f} s" for w in ("on", "off"))
        detail = f"{len(on)} of {len(windows_of)} windows; {took}; lost {lost}; {windows_of[-1]['states']}"
        ctx.check(f"{name}: was on", len(on) == len(windows_of), detail[:400])
        slowest = max(t["off_s"] for t in windows_of)
        ctx.check(f"{name}: every stop took at most {STOP_LIMIT_S:.0f} s", slowest <= STOP_LIMIT_S, f"{slowest:.2f} s")
    dormant = windows.difference(CPU, DORMANT, NOTHING)
    ctx.check(
        f"dormant costs a launch at most {DORMANT_LIMIT_NS} ns",
        at_most(DORMANT_LIMIT_NS, dormant),
        _interval_text(dormant),
    )
    for what in windows.found:
        after = windows.against_first(what, AFTER)
        ctx.check(
            f"off means off: {what}: at most {OFF_LIMIT_NS} ns after a stop",
            at_most(OFF_LIMIT_NS, after),
            _interval_text(after),
        )
    if windows.late:
        ctx.note(f"{windows.late} batches were not queued in time, and do not count ({shown(GPU_BATCH)} kernels each)")
