"""Time lost in a few steps: the typical step is fine, and the job is slow all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import gpu, sql
from argus.diagnose.phase import ALPHA, RECENT_STEPS, by_chance
from argus.diagnose.verdict import Evidence, Finding

WINDOW = 200
"""Newest steps looked at: a stall in one step of 50 comes four times."""
OUTLIER = 1.5
"""Steps this much longer than the median count as stalled. Healthy steps on a busy machine stay below 1.35 (the fake
GPU's job on two shared cores)."""
SCATTER = 8.0
"""Where the GPUs' own times tell whose stalls are: steps this many standard deviations over the typical one count,
too, if that is less; but no less than the threshold."""
QUARTER_TO_LOW, QUARTER_TO_MIDDLE = 0.970, 0.674
"""Standard deviations between quantiles 0.05 and 0.25, and 0.25 and 0.5, of normal values."""
LONGEST_STALL = 5
"""More stalled steps in a row are an episode, which the comparison of ranks judges."""
LEAST_LEVEL = RECENT_STEPS
"""So many longer steps in a row are a level of their own, which stalls stand out from as from the usual one."""
LEAST_STALLS = 3
"""One or two long steps may be a checkpoint or an evaluation: said, not judged."""
ALPHA_OWN = 0.02
"""Chance that the stalls of ranks by turns all hit one, where the GPUs' own times tell whose they are: that stalls cost
so much at all is rarer in healthy jobs. (The last to come is somebody in any long step.)"""
SAME_RANK = 0.6
"""Share of the stalled steps in which one rank must have been the last, to be named. With less it is named where its
own stalls alone cost the threshold and :data:`argus.diagnose.phase.ALPHA` leaves no doubt, or where so many are among
the longest stalls, half as long as the longest of all or more: that others have some, too, does not make it well."""


def find_jitter(
    query: sql.Query,
    params: dict[str, Any],
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
    hosts: dict[int, str],
    threshold: float,
    blur_ns: int = 0,
    reach: int = WINDOW,
    gpus: gpu.Seen | None = None,
) -> tuple[Finding | None, str, float]:
    """Steps that took much longer than the others, time and again, because of one rank.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Step numbers, shape (steps,).
        durations: The job's time of each, ns.
        hosts: Node of each rank.
        threshold: Lost share of the time that counts.
        blur_ns: What times of two ranks may differ by because of their hosts' clocks.
        gpus: What the GPUs did; it tells who was slow itself, where whole pipelines are late.
        reach: Steps whose calls may be compared at once; of larger jobs only the newest stalled steps are looked at.

    Returns:
        A finding, whose ``share`` is the lost time of an average step in ns; or a sentence on long steps that are too
        few, or of too many ranks, to blame one (empty: none); and what one of the newest steps takes if it is no stall,
        ns.
    """
    numbers, durations = numbers[-WINDOW:], durations[-WINDOW:]
    usual, stalled, limit = _stalls(durations, threshold, of_gpus=gpus is not None)
    newest_ns = float(usual[-1])
    if not stalled.any():
        return None, "", newest_ns
    if gpus is not None:
        # Since they began: half of what lies between two of them before the first.
        first, among = int(np.argmax(stalled)), int(stalled.sum())
        since = max(0, first - (len(stalled) - first) // among)
        numbers, durations, usual, stalled = numbers[since:], durations[since:], usual[since:], stalled[since:]
    lost = float(np.sum((durations - usual)[stalled]))
    share = lost / float(np.sum(durations))
    if share < (threshold if gpus is None else gpu.LEAST_SHARE):
        return None, "", newest_ns
    count = int(stalled.sum())
    small = share < threshold
    what = f"{count} of the newest {len(numbers)} steps took over {limit:.2g}x the typical time, and cost {share:.0%}"
    if count < LEAST_STALLS and small:
        return None, "", newest_ns
    if count < LEAST_STALLS:
        return None, f"{what} of the time: a checkpoint, an evaluation, or a stall", newest_ns
    window = {**params, "first": int(numbers[0])}
    evidence: list[Evidence] = [
        {
            "text": f"{what} of the time: {lost / count / 1e6:,.1f} ms each over a step of "
            f"{np.median(usual) / 1e6:,.1f} ms",
            "sql": sql.shown(sql.STEPS, window),
        }
    ]
    kind, ranks, persistence, p_value, since = "jitter", list[int](), 0.0, 1.0, int(numbers[stalled][0])
    if reach < len(numbers):
        newest = numbers[stalled][-max(LEAST_STALLS, reach // 2) :].tolist()
        parts = [query(sql.LAST, {**window, "first": max(step - 1, 0), "last": step}) for step in newest]
        last = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        stalled &= np.isin(numbers, newest)
    else:
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
    who = {
        step: max((by_step[near] for near in (step - 1, step) if near in by_step), key=lambda row: row[1])
        for step in numbers[stalled].tolist()
        if step - 1 in by_step or step in by_step
    }
    shown = sql.shown(sql.LAST, window)
    words = "was the last to come in"
    own = _slowest(gpus, numbers[stalled]) if gpus is not None else {}
    if own and gpus is not None:
        who, shown, words = (
            own,
            sql.shown(sql.GPU_TIMES, gpus.window),
            "computed or did nothing for longer than others in",
        )
    length = dict(zip(numbers[stalled].tolist(), (durations - usual)[stalled].tolist(), strict=True))
    # Whoever is not told by its own GPU's time is one of those that came last in some step.
    many = len(np.unique(last["rank"])) if not own or gpus is None else len(gpus.now.ranks)
    total = float(np.sum(durations))
    longest = max((length[step] for step in who), default=0.0)
    long = {step: row for step, row in who.items() if length[step] >= longest / 2}
    # Short stalls that ranks have by turns may go with long ones of one rank: the longest are looked at by themselves.
    for those, which in ((who, "of them"), (long, f"of the {len(long)} longest")):
        if not those or ranks or (those is long and not LEAST_STALLS <= len(long) < len(who)):
            continue
        candidates, times = np.unique([row[0] for row in those.values()], return_counts=True)
        hits, rank = int(times.max()), int(candidates[times.argmax()])
        persistence = hits / len(those)
        mine = [step for step, row in those.items() if row[0] == rank]
        lead = float(np.median([those[step][1] for step in mine]))
        cost = sum(length[step] for step in mine)
        p_value = by_chance(hits, len(those), 1, many, windows=1 if those is who else 2)
        often = persistence >= SAME_RANK and p_value <= (ALPHA if not own else ALPHA_OWN)
        often &= cost >= (threshold if gpus is None else gpu.LEAST_SHARE) * total or those is who
        much = cost >= threshold * total and p_value <= ALPHA
        if (often or much) and lead >= max(0.25 * cost / hits, blur_ns):
            ranks, lost, share, since = [rank], cost, cost / total, min(mine)
            evidence.append(
                {
                    "text": f"rank {rank} {words} {persistence:.0%} {which}, by {lead / 1e6:,.1f} ms; "
                    f"these cost {share:.0%} of the time",
                    "sql": shown,
                }
            )
            loading = query(sql.LOADING, window)
            spent = loading["loading_ns"][loading["rank"] == rank]
            if len(spent) and float(spent[0]) >= 0.5 * lost:
                kind = "jit_stall"
                evidence.append(
                    {
                        "text": f"it spent {float(spent[0]) / 1e6:,.1f} ms loading or compiling GPU code in that time",
                        "sql": sql.shown(sql.LOADING, window),
                    }
                )
    if not ranks and small:
        return None, "", newest_ns
    if not ranks:
        return None, f"{what} of the time; no single rank is behind it", newest_ns
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
        steps=[since, int(numbers[-1])],
        phase="",
        kernels=[],
        slowdown=round(1 / (1 - share), 4),
        share=lost / len(numbers),
        confidence=round(persistence * (1 - p_value), 4),
        level="iteration",
        evidence=evidence,
        action=actions[kind],
    )
    return finding, "", newest_ns


def _slowest(gpus: gpu.Seen, steps: NDArray[np.int64]) -> dict[int, tuple[int, float]]:
    """Of each of these steps, or the one before, the rank that was slow itself and by how much more than any other,
    ns; steps that nothing is known of are left out."""
    more = np.nan_to_num(gpu.by_step(gpus.now, gpus.mesh))
    found: dict[int, tuple[int, float]] = {}
    for step in steps.tolist():
        places = np.flatnonzero(np.isin(gpus.now.steps, (step - 1, step)))
        if not len(places) or len(more) < 2:
            continue
        ordered = np.sort(more[:, places], axis=0)
        lead = ordered[-1] - ordered[-2]
        best = int(places[lead.argmax()])
        found[step] = int(gpus.now.ranks[more[:, best].argmax()]), float(lead.max())
    return found


def _stalls(
    durations: NDArray[np.float64], threshold: float, *, of_gpus: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_], float]:
    """What each step takes if it is no stall, ns; which are; and how much longer than usual the latter are at least."""
    typical, limit = _usual(durations, threshold, of_gpus=of_gpus)
    usual, longer = np.full(len(durations), typical), durations > limit * typical
    for begin, end in _runs(longer):
        if end - begin >= LEAST_LEVEL:
            own, most = _usual(durations[begin:end], threshold, of_gpus=of_gpus)
            usual[begin:end], longer[begin:end] = own, durations[begin:end] > most * own
    return usual, _isolated(longer), limit


def _usual(durations: NDArray[np.float64], threshold: float, *, of_gpus: bool) -> tuple[float, float]:
    """A typical step, ns, and how many times as long a stall is at least."""
    typical = float(np.median(durations))
    if not of_gpus:
        return typical, OUTLIER
    # In pipelines a stall makes two steps long: up to half of them may be, and the rest tells what is usual.
    low, quarter = np.quantile(durations, [0.05, 0.25])
    scatter = float(quarter - low) / QUARTER_TO_LOW
    typical = float(min(typical, quarter + QUARTER_TO_MIDDLE * scatter))
    return typical, 1 + float(np.clip(SCATTER * scatter / typical, threshold, OUTLIER - 1))


def _runs(those: NDArray[np.bool_]) -> list[list[int]]:
    """Where those in a row begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], those.astype(np.int8), [0]])))
    runs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return runs


def _isolated(stalled: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Stalled steps less those of runs longer than :data:`LONGEST_STALL`, shape (steps,)."""
    kept: NDArray[np.bool_] = stalled.copy()
    for begin, end in _runs(stalled):
        if end - begin > LONGEST_STALL:
            kept[begin:end] = False
    return kept
