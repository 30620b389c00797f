"""Time lost in a few steps: the typical step is fine, and the job is slow all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import sql
from argus.diagnose.phase import ALPHA, by_chance
from argus.diagnose.verdict import Evidence, Finding

WINDOW = 200
"""Newest steps looked at: a stall in one step of 50 comes four times."""
OUTLIER = 1.5
"""Steps this much longer than the median count as stalled. Healthy steps on a busy machine stay below 1.35 (the fake
GPU's job on two shared cores)."""
LONGEST_STALL = 5
"""More stalled steps in a row are an episode, which the comparison of ranks judges."""
LEAST_STALLS = 3
"""One or two long steps may be a checkpoint or an evaluation: said, not judged."""
SAME_RANK = 0.6
"""Share of the stalled steps in which one rank must have been the last, to be named."""


def find_jitter(
    query: sql.Query,
    params: dict[str, Any],
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
    hosts: dict[int, str],
    threshold: float,
    blur_ns: int = 0,
) -> tuple[Finding | None, str]:
    """Steps that took much longer than the others, time and again, because of one rank.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Step numbers, shape (steps,).
        durations: The job's time of each, ns.
        hosts: Node of each rank.
        threshold: Lost share of the time that counts.
        blur_ns: What times of two ranks may differ by because of their hosts' clocks.

    Returns:
        A finding, whose ``share`` is the lost time of an average step in ns; or a sentence on long steps that are too
        few, or of too many ranks, to blame one (empty: none).
    """
    numbers, durations = numbers[-WINDOW:], durations[-WINDOW:]
    typical = float(np.median(durations))
    stalled = _isolated(durations > OUTLIER * typical)
    lost = float(np.sum(durations[stalled] - typical))
    share = lost / float(np.sum(durations))
    if not stalled.any() or share < threshold:
        return None, ""
    count = int(stalled.sum())
    what = f"{count} of the newest {len(numbers)} steps took over {OUTLIER:g}x the typical time, and cost {share:.0%}"
    if count < LEAST_STALLS:
        return None, f"{what} of the time: a checkpoint, an evaluation, or a stall"
    window = {**params, "first": int(numbers[0])}
    evidence: list[Evidence] = [
        {
            "text": f"{what} of the time: {lost / count / 1e6:,.1f} ms each over a step of {typical / 1e6:,.1f} ms",
            "sql": sql.shown(sql.STEPS, window),
        }
    ]
    kind, ranks, persistence, p_value = "jitter", list[int](), 0.0, 1.0
    last = query(sql.LAST, window)
    by_step = dict(
        zip(
            last["step"].astype(np.int64).tolist(),
            zip(last["rank"].astype(np.int64).tolist(), last["lead_ns"].tolist(), strict=True),
            strict=True,
        )
    )
    # A rank that is late in a step makes that step long for itself, and the next one for those that did not wait for it
    # at once.
    latest = [
        max((by_step[near] for near in (step - 1, step) if near in by_step), key=lambda row: row[1], default=None)
        for step in numbers[stalled].tolist()
    ]
    who = [row for row in latest if row is not None]
    if who:
        candidates, times = np.unique([row[0] for row in who], return_counts=True)
        persistence = float(times.max() / len(who))
        rank = int(candidates[times.argmax()])
        lead = float(np.median([row[1] for row in who if row[0] == rank]))
        p_value = by_chance(int(times.max()), len(who), 1, len(np.unique(last["rank"])))
        if persistence >= SAME_RANK and p_value <= ALPHA and lead >= max(0.25 * lost / count, blur_ns):
            ranks = [rank]
            evidence.append(
                {
                    "text": f"rank {rank} was the last to come in {persistence:.0%} of them, by {lead / 1e6:,.1f} ms",
                    "sql": sql.shown(sql.LAST, window),
                }
            )
            loading = query(sql.LOADING, window)
            mine = loading["loading_ns"][loading["rank"] == rank]
            if len(mine) and float(mine[0]) >= 0.5 * lost:
                kind = "jit_stall"
                evidence.append(
                    {
                        "text": f"it spent {float(mine[0]) / 1e6:,.1f} ms loading or compiling GPU code in that time",
                        "sql": sql.shown(sql.LOADING, window),
                    }
                )
    if not ranks:
        return None, f"{what} of the time; no single rank is behind it"
    name = f"rank {ranks[0]}"
    actions = {
        "jit_stall": f"Find what compiles or loads GPU code on {name} now and then: shapes that change, or a cache "
        "(TRITON_CACHE_DIR, CUDA_CACHE_PATH) that it cannot write.",
        "jitter": f"Find out what {name} does in those steps: checkpoints, evaluation, garbage collection, memory "
        "allocation, other processes on the node.",
    }
    finding = Finding(
        kind=kind,
        ranks=ranks,
        hosts=[hosts[rank] for rank in ranks if rank in hosts],
        steps=[int(numbers[stalled][0]), int(numbers[-1])],
        phase="",
        kernels=[],
        slowdown=round(1 / (1 - share), 4),
        share=lost / len(numbers),
        confidence=round(persistence * (1 - p_value), 4),
        level="iteration",
        evidence=evidence,
        action=actions[kind],
    )
    return finding, ""


def _isolated(stalled: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Stalled steps less those of runs longer than :data:`LONGEST_STALL`, shape (steps,)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], stalled.astype(np.int8), [0]])))
    kept: NDArray[np.bool_] = stalled.copy()
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin > LONGEST_STALL:
            kept[begin:end] = False
    return kept
