"""Step time under each layer of Argus and under torch.profiler, against nothing, in turns in one process.

``ARGUS_GPU_CHECK_VARIANTS=eager/base,…`` has it spend all its time on these programs.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from scripts.gpu_check.common import Context, PartFailed, Session, bootstrap_ratio, step_cpu, step_windows, training

WINDOW_S = 2.0
SETTLE_S = 0.4
LAYERS = {
    "uprobes": "uprobes",
    "GPU times": "kernels",
    "GPU times and launches": "kernels,api",
    "everything": "uprobes,kernels,api",
}
GOAL = 1.005
VARIANTS = (("eager", "base"), ("eager", "host"), ("compile", "base"))
"""(mode, size); `host` is bound by the CPU that launches, where overhead is worst."""

CHOICE = "ARGUS_GPU_CHECK_VARIANTS"

NOTHING, DORMANT, AFTER, PROFILER = "nothing (not armed)", "armed, dormant", "after stop", "torch.profiler"


def chosen() -> tuple[tuple[str, str], ...]:
    """The variants that the environment names; all, if it names none."""
    words = [word.strip() for word in os.environ.get(CHOICE, "").split(",") if word.strip()]
    named = tuple((word.partition("/")[0], word.partition("/")[2] or "base") for word in words)
    return named or VARIANTS


class Measured:
    """What was recorded between ``go`` and ``pause``: steps, and the CPU time of the process in each."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._steps, self._cpu_ns = answer["steps"], answer["cpu_ns"]

    def wall(self, window: tuple[int, int]) -> list[float]:
        return step_windows(self._steps, [window])[0]

    def cpu(self, window: tuple[int, int]) -> list[float]:
        return step_cpu(self._steps, self._cpu_ns, window)


class Variant:
    """A program that steps all the time, and the windows in which something was on."""

    def __init__(self, ctx: Context, mode: str, size: str) -> None:
        self.ctx = ctx
        self.label = f"{mode}, {size}"
        words = ("--mode", mode, "--size", size)
        self.armed = training(ctx, *words, armed=True, name=f"{mode}-{size}-armed")
        self.plain = training(ctx, *words, name=f"{mode}-{size}-plain")
        self.windows: dict[str, list[list[float]]] = {}
        self.base: dict[str, list[list[float]]] = {}
        self.cpu: dict[str, list[list[float]]] = {}
        self.cpu_base: dict[str, list[list[float]]] = {}
        self.costs: dict[str, list[dict[str, Any]]] = {}
        self.rounds = 0
        self.sessions: dict[str, Session] = {}

    def ready(self) -> None:
        self.armed.answer(90)
        self.plain.answer(90)

    def round(self, ctx: Context) -> None:
        """One round: each layer once, with nothing before and after each."""
        sessions = self.sessions
        if not self.rounds:
            self._prepare(ctx)
        self._plain()
        marks: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
        self.armed.ask("go")
        time.sleep(SETTLE_S)
        first = self._window()
        marks.append((DORMANT, first, first))
        before = first
        order = list(sessions)
        for name in order if self.rounds % 2 == 0 else order[::-1]:
            session = sessions[name]
            try:
                session.on()
                time.sleep(SETTLE_S)
                on = self._window()
                answer = session.off()
            except PartFailed as failure:
                ctx.check(f"{self.label}: {name}", False, str(failure)[:400])
                sessions.pop(name).kill()
                continue
            self.costs.setdefault(name, []).append(
                {k: answer.get(k) for k in ("cpu_share", "lost", "counters", "states", "took_s", "peak_rss_mb")}
            )
            time.sleep(SETTLE_S)
            after = self._window()
            marks.append((name, on, before))
            marks.append((AFTER, after, first))
            before = after
        self._profiler(marks, before)
        measured = Measured(self.armed.ask("pause", 60))
        for name, on, base in marks:
            self.windows.setdefault(name, []).append(measured.wall(on))
            self.base.setdefault(name, []).append(measured.wall(base))
            self.cpu.setdefault(name, []).append(measured.cpu(on))
            self.cpu_base.setdefault(name, []).append(measured.cpu(base))
        self.rounds += 1

    def _prepare(self, ctx: Context) -> None:
        """Sessions that are kept for all rounds."""
        for name, layers in LAYERS.items():
            words = f"{self.label.replace(', ', '-')}-{name}".replace(" ", "")
            self.sessions[name] = Session(ctx, [self.armed.pid], layers, words, again="", whole="")
        for name in list(self.sessions):
            try:
                self.sessions[name].prepared(60)
            except PartFailed as failure:
                self.sessions.pop(name).kill()
                ctx.check(f"{self.label}: {name}", False, str(failure)[:400])

    def _window(self) -> tuple[int, int]:
        begin = time.monotonic_ns()
        time.sleep(WINDOW_S)
        return begin, time.monotonic_ns()

    def _plain(self) -> None:
        self.plain.ask("go")
        time.sleep(SETTLE_S)
        window = self._window()
        measured = Measured(self.plain.ask("pause", 30))
        self.windows.setdefault(NOTHING, []).append(measured.wall(window))
        self.cpu.setdefault(NOTHING, []).append(measured.cpu(window))

    def _profiler(self, marks: list[tuple[str, tuple[int, int], tuple[int, int]]], before: tuple[int, int]) -> None:
        with self.ctx.trying(f"{self.label}: torch.profiler"):
            answer = self.armed.ask("profiler on", 30)
            time.sleep(SETTLE_S)
            marks.append((PROFILER, self._window(), before))
            off = self.armed.ask("profiler off", 60)
            self.costs.setdefault(PROFILER, []).append({"on_ns": answer["took_ns"], "off_ns": off["took_ns"],
                                                        "gpu_events": off["gpu_events"]})  # fmt: skip

    def result(self, cpu_time: bool = False) -> list[list[Any]]:
        """A row a layer, of step times or of the CPU time of steps."""
        windows_by_layer, bases = (self.cpu, self.cpu_base) if cpu_time else (self.windows, self.base)
        rows = []
        for name in (NOTHING, DORMANT, *LAYERS, AFTER, PROFILER):
            windows = windows_by_layer.get(name, [])
            if not any(windows) or (name == DORMANT and NOTHING not in windows_by_layer):
                continue
            base = windows_by_layer.get(NOTHING, []) if name == DORMANT else bases.get(name, [])
            ratio, low, high = (1.0, 1.0, 1.0) if name == NOTHING else bootstrap_ratio(windows, base)
            median = float(np.median(np.concatenate([np.asarray(w) for w in windows if w])))
            cpu = [c["cpu_share"] for c in self.costs.get(name, []) if c.get("cpu_share") is not None]
            rows.append([self.label, name, len(windows), sum(map(len, windows)), median, ratio, low, high,
                         float(np.median(cpu)) if cpu else "-"])  # fmt: skip
        return rows

    def close(self) -> None:
        for session in self.sessions.values():
            session.kill()
        self.armed.kill()
        self.plain.kill()


def run(ctx: Context) -> None:
    variants: list[Variant] = []
    try:
        for mode, size in chosen()[:1] if ctx.fake else chosen():
            with ctx.trying(f"start of {mode}, {size}"):
                variants.append(Variant(ctx, mode, size))
        for variant in list(variants):
            with ctx.trying(f"start of {variant.label}"):
                variant.ready()
                continue
            variants.remove(variant)
        longest = 0.0
        for turn in range(2 if ctx.fake else 6 * len(VARIANTS) // max(1, len(variants))):
            for variant in variants:
                if turn and ctx.left_s() < longest * 1.2 + 5:
                    break
                began = time.monotonic()
                with ctx.trying(f"{variant.label}: round {turn + 1}"):
                    variant.round(ctx)
                longest = max(longest, time.monotonic() - began)
                _show(ctx, variants)
    finally:
        for variant in variants:
            variant.close()
    for variant in variants:
        for row in variant.result():
            if row[1] in (NOTHING, PROFILER):
                continue
            label, name, ratio, low, high = row[0], row[1], row[5], row[6], row[7]
            goal = GOAL if name != "everything" else 1.01
            ctx.check(
                f"{label}: {name} costs at most {goal - 1:.1%}",
                bool(ratio <= goal) if high - low < 0.05 else None,
                f"{ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})",
            )


def _show(ctx: Context, variants: list[Variant]) -> None:
    head = ["program", "with", "windows", "steps", "median ms", "ratio", "low", "high"]
    ctx.table(
        "step time against nothing",
        [*head, "Argus CPU"],
        [row[:5] + [f"{x:.4f}" for x in row[5:8]] + row[8:] for variant in variants for row in variant.result()],
    )
    ctx.table(
        "CPU time of the process in a step, against nothing",
        head,
        [row[:5] + [f"{x:.4f}" for x in row[5:8]] for variant in variants for row in variant.result(cpu_time=True)],
    )
    ctx.save(
        medians={v.label: _medians(v.windows) for v in variants},
        cpu_medians={v.label: _medians(v.cpu) for v in variants},
        windows={v.label: v.windows for v in variants},
        costs={v.label: v.costs for v in variants},
        rounds={v.label: v.rounds for v in variants},
    )


def _medians(windows: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Of each window, ms."""
    return {name: [float(np.median(w)) for w in found if w] for name, found in windows.items()}
