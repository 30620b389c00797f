"""GPU times for people: what ranks' GPUs do in the live view, and why some have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from argus.cupti.collector import CollectorState
from argus.live.gpu.process import RECENT_WINDOWS, GpuProcess
from argus.model.text import counted
from argus.model.units import ranks_text
from argus.semantics.gpu.usage import USAGE


@dataclass(frozen=True)
class GpuView:
    """A rank's GPUs as the live view shows them.

    Attributes:
        state: ``CollectorState`` in a word.
        text: The same with its reason.
        busy, idle, exposed, overlapped: Shares of the last seconds: something ran, nothing ran, only NCCL ran, NCCL and
            other kernels ran. None: not known.
        idle_gaps: Idle stretches a second; None: not known.
        queue_depth: Operations launched and not begun, on average; None: not known.
        match_rate: Share of the operations whose launch is known; None: not known.
        ended_ns: Monotonic time at which these seconds end; 0: there are none.
    """

    job: str
    rank: int
    pid: int
    state: str
    text: str
    busy: float | None = None
    idle: float | None = None
    exposed: float | None = None
    overlapped: float | None = None
    idle_gaps: float | None = None
    queue_depth: float | None = None
    match_rate: float | None = None
    ended_ns: int = 0


def view_of(process: GpuProcess, state: str, reason: str, *, matched: bool) -> GpuView:
    """A rank's GPUs in the last seconds.

    Args:
        process: A rank.
        state, reason: Of its GPU times.
        matched: Whether operations are matched with their launches.
    """
    assert process.member is not None
    assert process.job is not None
    text = f"{state}: {reason}" if reason else state
    identity = (process.job.name, process.member.rank, process.target.pid, state, text)
    windows = np.concatenate([np.empty(0, USAGE), *process.windows])
    if len(windows):
        ended_ns = int((windows["start_ns"] + windows["duration_ns"]).max())
        windows = windows[windows["start_ns"] >= ended_ns - RECENT_WINDOWS * 10**9]
    whole = float(windows["duration_ns"].sum())
    if not whole:
        return GpuView(*identity)

    def share(name: str) -> float:
        return float(windows[name].sum()) / whole

    deep = windows[windows["queue_depth_mean"] >= 0]
    rate = process.program.correlator.match_rate if process.program is not None else -1.0
    return GpuView(
        *identity,
        busy=share("busy_ns"),
        idle=share("idle_ns"),
        exposed=share("exposed_communication_ns"),
        overlapped=share("overlapped_communication_ns"),
        idle_gaps=share("idle_gaps") * 1e9,
        queue_depth=float(np.average(deep["queue_depth_mean"], weights=deep["duration_ns"])) if len(deep) else None,
        match_rate=rate if rate >= 0 and matched else None,
        ended_ns=ended_ns,
    )


def describe(
    states: Sequence[tuple[GpuProcess, str, str]], counters: Mapping[str, tuple[int, bool]] | None, *, matched: bool
) -> list[str]:
    """GPU times of ranks, in lines.

    Args:
        states: Every rank with its state and why.
        counters: ``GpuSide.counters`` at the end of the session; None: it goes on.
        matched: Whether operations are matched with their launches.
    """
    done, ranks = counters is not None, [process for process, _, _ in states]
    on = [process for process in ranks if (process.was_on if done else process.state[0] == "on")]
    lines = []
    if on:
        text = f"GPU times: on ({_count_ranks(on)})"
        if counters is not None:
            text += f", {sum(process.kernels for process in ranks):,} kernels"
            total, known = counters["gpu_ops"][0], counters["gpu_launch_matched"][0]
            if total and matched:
                # Never rounded up to all.
                text += f", {int(1e4 * known / total) / 100:.2f} % matched with their launch"
        lines.append(text)
    return lines + _reasons(states, on, done=done)


def _reasons(states: Sequence[tuple[GpuProcess, str, str]], on: Sequence[GpuProcess], *, done: bool) -> list[str]:
    """Why GPU times of ranks are not on, a line each reason.

    Args:
        states: Every rank with its state and why.
        on: Those of which they are on, or were.
        done: The session is over.
    """
    reasons: dict[str, list[GpuProcess]] = {}
    for process, state, reason in states:
        if process in on and (not done or state == "on" or reason in ("", "the process ended")):
            continue
        reasons.setdefault(f"{state}: {reason}" if reason else state, []).append(process)
    lines = []
    for text, processes in reasons.items():
        everywhere = len(processes) == len(states) and not on
        which = "" if everywhere else f" of {ranks_text(_numbers(processes))}"
        lines.append(f"GPU times{which}: {text}")
    return lines


def _count_ranks(processes: Iterable[GpuProcess]) -> str:
    """How many ranks these are."""
    count = len(_numbers(processes))
    return counted(count, "rank")


def _numbers(processes: Iterable[GpuProcess]) -> list[int]:
    return sorted({process.member.rank for process in processes if process.member is not None})


def failures(processes: Iterable[GpuProcess]) -> int:
    """Ranks whose GPU times failed, or are another profiler's."""
    away = (CollectorState.FAILED, CollectorState.IGNORED)
    return sum(process.member is not None and process.state[0] in away for process in processes)
