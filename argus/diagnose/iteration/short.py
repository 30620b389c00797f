"""Recordings of few steps: what their kernels prove, which run by the thousand in a single step, and whose GPU has
nothing to do.

A profiler's recording has 3 to 25 steps. Ten steps on either side of a change, and ten to compare ranks in, are what
step times alone need; where the GPUs' own times show it, fewer are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.causes import lost_time
from argus.diagnose.iteration import stalls
from argus.diagnose.iteration.regression import REGRESSION, Regression
from argus.diagnose.kernels import distributions
from argus.diagnose.ranks import links, stage_links
from argus.diagnose.ranks.lateness import Straggler, by_chance
from argus.diagnose.ranks.slow_gpus import FACTOR, cost_of
from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.peers import between_stages, mesh_of
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.diagnose.verdict import Evidence
from argus.model.statistics import low_median, row_medians
from argus.model.units import duration, ranks_on

Float = NDArray[np.float64]
Int = NDArray[np.int64]

FEWEST = 4
"""Steps on either side of a change, at least. All of 4 later ones longer than all of 12 earlier ones are one in 1,800
by chance, of each place that a change may have."""
BY_CHANCE = 0.01
"""Chance that steps in no order look so, at most: one of all places may be the one."""
APART = 0.5
"""Of the growth, how much must lie between the longest step before and the shortest after, in the middle 80 %."""
FOLLOWED = 0.5
"""Part of the growth that the GPUs' own compute time must show."""
MOST = 60
"""Longer recordings have ten steps on either side of whatever lasted."""
MIN_STEPS = 3
"""Fewer whole steps prove nothing: the first of a recording carries the profiler's own start."""
LEAST = 0.1
"""Excess of a GPU's compute time over its peers'. Above what well GPUs differ by (gpu.LEAST), for few steps."""
SURE = 0.9
"""Confidence at most; with few steps it is less."""
SINGLE = 0.8
"""The same of single kernels, against that of a GPU that is slow in all: the others may have other data."""
SETS = 1_000_000
"""Sets of ranks that may be the late ones that a chance is computed with, at most; with more it is all but 0."""


def find_short_regression(durations: Float, compute: Float) -> Regression | None:
    """A growth of the step time with fewer than ten steps on a side, that the GPUs' compute time follows.

    Args:
        durations: Step times in order, shape (steps,), ns.
        compute: The GPUs' compute time in the same steps, shape (ranks, steps), ns; NaN: not known.

    Returns:
        Its confidence is lower the fewer steps there were; None: there is none.
    """
    count = len(durations)
    if count < 2 * FEWEST or not compute.size:
        return None
    logs = np.log(np.maximum(durations, 1.0))
    cuts = range(FEWEST, count - FEWEST + 1)
    cost = [float(np.var(logs[:cut]) * cut + np.var(logs[cut:]) * (count - cut)) for cut in cuts]
    cut = FEWEST + int(np.argmin(cost))
    before, after = float(np.median(durations[:cut])), float(np.median(durations[cut:]))
    if after < (1 + REGRESSION) * before:
        return None
    gap = float(np.quantile(durations[cut:], 0.1) - np.quantile(durations[:cut], 0.9))
    order = float(np.mean(durations[cut:, None] > durations[None, :cut]))
    if gap < APART * (after - before) or order < 1.0 - 1.0 / (cut * (count - cut)) ** 0.5 / 2:
        return None
    chance = len(cuts) / comb(count, cut)
    if chance > BY_CHANCE:
        return None
    known = ~np.isnan(compute).all(axis=1)
    if not known.any():
        return None
    was, now = np.nanmedian(compute[known][:, :cut], axis=1), np.nanmedian(compute[known][:, cut:], axis=1)
    followed = now - was >= FOLLOWED * (after / before - 1) * was
    if np.mean(followed) < 0.9:
        return None
    fewer = min(cut, count - cut)
    return Regression(cut, before, after, order * SURE * fewer / (fewer + 1))


def regression(seen: gpu_times.GpuWindow, numbers: Int, durations: Float) -> Regression | None:
    """:func:`find_short_regression` of a job's sure steps. ``numbers``, ``durations``: shape (steps,)."""
    if len(numbers) > len(seen.now.steps) or len(numbers) > MOST:
        return None
    both, here, there = np.intersect1d(numbers, seen.now.steps, return_indices=True)
    if len(both) < len(numbers):
        return None
    return find_short_regression(durations[here], seen.now.compute[:, there])


def comparable(query: Query, params: Mapping[str, Any], numbers: Int, across: Hosts | None) -> bool:
    """Whether kernels of ranks with the same work are stored of these steps."""
    window = {**params, "first": int(numbers[0]), "last": int(numbers[-1])}
    times = gpu_times.times_of(query(queries.GPU_TIMES, window), numbers)
    if len(times.ranks) < 2:
        return False
    mesh = mesh_of(query(queries.GROUPS, params), times.ranks, times.kernels, gpu_times.joined(across))
    _, many = np.unique(mesh.stage, return_counts=True)
    return bool((times.compute > 0).any()) and int(many.max()) > 1


def slow_ranks(
    query: Query,
    params: Mapping[str, Any],
    numbers: Int,
    durations: Float,
    hosts: Mapping[int, str],
    across: Hosts | None,
    threshold: float,
) -> list[Suspect]:
    """GPUs that take longer for the same kernels than those with the same work, in a recording of few steps.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Sure steps, ascending, shape (steps,).
        durations: The job's time of each, ns.
        hosts: Node of each rank.
        across: How the hosts go together; None: it is one.
        threshold: Lost share of the step from which a slow GPU is what slows the job down.

    Returns:
        Suspects.
    """
    if len(numbers) < MIN_STEPS:
        return []
    window = {**params, "first": int(numbers[0]), "last": int(numbers[-1])}
    times = gpu_times.times_of(query(queries.GPU_TIMES, window), numbers)
    if len(times.ranks) < 2:
        return []
    mesh = mesh_of(query(queries.GROUPS, params), times.ranks, times.kernels, gpu_times.joined(across))
    step_ns = float(np.median(durations))
    ranks = times.ranks.tolist()[: distributions.RANKS]
    asked = {**window, "ranks": ranks, "steps": len(numbers)}
    columns, shown = query(queries.RECORDED_KERNELS, asked), runnable_sql(queries.RECORDED_KERNELS, asked)
    suspects = []
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        if len(members) < 2:
            continue
        typical = np.nanmedian(times.compute[members], axis=1)
        usual = float(np.sort(typical)[(len(members) - 1) // 2])
        for place, own in zip(members.tolist(), typical.tolist(), strict=True):
            excess = own / max(usual, 1.0)
            # In every step, against the low median of that step.
            ratio = times.compute[place] / np.maximum(low_median(times.compute[members]), 1.0)
            if excess < 1 + LEAST or np.nanmin(ratio) < 1 + LEAST / 2:
                continue
            rank = int(times.ranks[place])
            others = [int(other) for other in times.ranks[members] if other != rank]
            chosen = np.isin(columns["rank"].astype(np.int64), [rank, *others])
            launches = distributions.compared(
                {name: values[chosen] for name, values in columns.items()}, [rank], excess
            )
            if launches is None or launches.reason != "slower":
                continue
            suspects.append(
                _suspect(rank, launches, own - usual, len(others), numbers, step_ns, hosts, threshold, shown)
            )
    if not suspects and mesh.staged and len(np.unique(mesh.stage)) == len(ranks):
        suspects += _alone_in_stages(times, columns, numbers, step_ns, hosts, threshold, shown)
    named = {rank for suspect in suspects for rank in suspect.ranks}
    stage = dict(zip(times.ranks.tolist(), mesh.stage.tolist(), strict=True))
    for rank, kernels in slow_kernels(columns, stage, step_ns).items():
        lost_ns = sum(one.cost_ns for one in kernels)
        if rank not in named and lost_ns >= threshold * step_ns:
            suspects.append(_suspect_by_kernels(rank, kernels, lost_ns, numbers, step_ns, hosts, shown))
    slow = np.flatnonzero(np.isin(times.ranks, [rank for suspect in suspects for rank in suspect.ranks]))
    for suspect in suspects:
        own = np.flatnonzero(np.isin(times.ranks, suspect.ranks))
        cost_ns = cost_of(times, mesh, own, slow, suspect.lost_ns)
        _lower(suspect, cost_ns, step_ns, threshold, runnable_sql(queries.GPU_TIMES, window))
    return suspects


def _lower(suspect: Suspect, cost_ns: float, step_ns: float, threshold: float, shown: str) -> None:
    """Makes a slow GPU cost what the others wait for it, ns: with less than the threshold it is masked."""
    excess_ns = suspect.lost_ns
    if cost_ns >= excess_ns:
        return
    visible = cost_ns >= threshold * step_ns
    text = (
        f"it has {duration(cost_ns)} a step more to do than the busiest of the others, of {duration(step_ns)}"
        if visible
        else "the step does not wait for it yet: others have as much to do, or are kept waiting by their CPUs, which "
        f"hides {duration(excess_ns - cost_ns)} of {duration(excess_ns)}"
    )
    suspect.kind = "compute_straggler" if visible else "masked_compute_straggler"
    suspect.lost_ns, suspect.slowdown = cost_ns, slowdown_of(step_ns, cost_ns)
    suspect.cost = {"text": text, "sql": shown}


def gpus_of(case: Case) -> gpu_times.GpuWindow | None:
    """What the GPUs did in all steps of a recording of few; None: nothing is known of it, or it has fewer than
    :data:`FEWEST`. The parameters of the case get the communicators to leave out, as those of longer ones do."""
    window = {**case.params, "first": int(case.numbers[0]), "last": case.last}
    times = gpu_times.times_of(case.query(queries.GPU_TIMES, window), case.numbers)
    if len(times.ranks) < 2 or len(times.steps) < FEWEST:
        return None
    groups = case.query(queries.GROUPS, case.params)
    case.params["left_out"] = between_stages(groups, gpu_times.joined(case.across))
    mesh = mesh_of(groups, times.ranks, times.kernels, gpu_times.joined(case.across))
    return gpu_times.GpuWindow(times, None, mesh, window)


def waiting(case: Case, slow: Collection[int] = ()) -> tuple[list[Suspect], float]:
    """What GPUs wait for in a recording of few steps: their CPUs, in each step or in some, or a link; and what a step
    takes on the GPUs, ns.

    Args:
        case: From here on with what its GPUs did, and their steps: a loop that has not filled the queues yet is far
            ahead. Without who came late.
        slow: Ranks whose GPUs are slow in each step, which are no stalls.
    """
    seen = gpus_of(case)
    if seen is None:
        return [], 0.0
    case.gpus, case.lateness = seen, None
    case.numbers, case.durations = seen.now.steps, row_medians(seen.now.step.T)
    suspects = (
        _idle_in_each_step(case, seen)
        or links.of_steps(case, FEWEST)
        or stage_links.detect(case)
        or [stall for stall in stalls.detect(case) if not set(stall.ranks) <= set(slow)]
    )
    count = len(seen.now.steps)
    for suspect in suspects:
        suspect.confidence *= SURE * count / (count + 1)
    return suspects, float(np.median(case.durations))


def _idle_in_each_step(case: Case, seen: gpu_times.GpuWindow) -> list[Suspect]:
    """Ranks whose GPUs have nothing to do for longer than those with the same work, or than the other stages of a
    pipeline of one rank a stage. Up to half of them may be."""
    now, mesh = seen.now, seen.mesh
    step_ns, count = float(np.median(row_medians(now.step))), len(now.steps)
    least = case.threshold * step_ns
    labels = np.unique(mesh.stage)
    alone = mesh.staged and len(labels) == len(now.ranks)
    together = [np.arange(len(now.ranks))] if alone else [np.flatnonzero(mesh.stage == one) for one in labels.tolist()]
    suspects = []
    own = row_medians(now.compute + now.idle)
    for members in (part for part in together if len(part) > 1):
        lead = now.idle[members] - low_median(now.idle[members])
        typical, late = row_medians(lead), _late(lead, least)
        # In a pipeline a rank is compared with its stage: what other stages have to do comes earlier or later.
        aside = np.setdiff1d(np.arange(len(now.ranks)), members) if mesh.staged else late[:0]
        losses = []
        left = late.tolist()
        while left:
            alike = np.array([place for place in left if own[members[left[0]]] < FACTOR * own[members[place]]])
            left = [place for place in left if place not in alike]
            gain = float(np.median(typical[alike]) - np.delete(typical, late).max())
            if not alone:
                gain = cost_of(now, mesh, members[alike], np.union1d(aside, members[late]), gain)
            if gain < least:
                continue
            chance = by_chance(count, count, 1, min(comb(len(members), len(alike)), SETS))
            ranks = tuple(np.sort(now.ranks[members[alike]]).tolist())
            straggler = Straggler(ranks, gain, 1.0, chance, count, idle=True, whole_stage=alone)
            losses.append(lost_time.explain(case, straggler, int(case.numbers[0])))
        # All wait for the latest: together they cost no more than that one.
        share = max((loss.loss_ns for loss in losses), default=0.0) / max(sum(loss.loss_ns for loss in losses), 1.0)
        for loss in losses:
            loss.loss_ns *= share
            suspects.append(lost_time.suspect_of(case, loss))
    return suspects


def _late(lead: Float, least: float) -> Int:
    """Those that are late in each step, the latest first; at most half of all.

    Args:
        lead: By how much each rank is idle for longer than usual, shape (ranks, steps), ns.
        least: By how much those that are late must differ from the others, ns.

    Returns:
        Their places.
    """
    typical = row_medians(lead)
    order = np.argsort(-typical, kind="stable")
    half = len(order) // 2
    apart = np.flatnonzero(typical[order[:half]] - typical[order[1 : half + 1]] >= least)
    late = order[: apart[-1] + 1] if len(apart) else order[:0]
    each = np.nanmin(lead[late], axis=1, initial=np.inf) >= np.minimum(typical[late] / 2, least)
    return np.asarray(late[each])


def _alone_in_stages(
    times: gpu_times.GpuTimes,
    columns: Mapping[str, NDArray[Any]],
    numbers: Int,
    step_ns: float,
    hosts: Mapping[int, str],
    threshold: float,
    shown: str,
) -> list[Suspect]:
    """The GPU of a pipeline with one rank a stage that takes longer for what the other stages launch as often."""
    typical = np.nanmedian(times.compute, axis=1)
    place = int(np.argmax(typical))
    usual = float(low_median(np.delete(typical, place)[:, None])[0])
    others = low_median(np.delete(times.compute, place, axis=0))
    own, rank = float(typical[place]), int(times.ranks[place])
    excess = own / max(usual, 1.0)
    if excess < 1 + LEAST or np.nanmin(times.compute[place] / np.maximum(others, 1.0)) < 1 + LEAST / 2:
        return []
    launches = distributions.compared(columns, [rank], excess)
    if launches is None or launches.reason != "slower":
        return []
    suspect = _suspect(
        rank, launches, own - usual, len(times.ranks) - 1, numbers, step_ns, hosts, threshold, shown,
        those="of the other stages, which launch them as often",
    )  # fmt: skip
    suspect.confidence *= distributions.BY_KERNELS
    return [suspect]


def slow_kernels(
    columns: Mapping[str, NDArray[Any]], stage: Mapping[int, int], step_ns: float
) -> dict[int, list[distributions.SlowKernel]]:
    """Kernels that take longer on one rank than on those with the same work: their mean, and both quartiles.

    Args:
        columns: As :data:`argus.diagnose.read.queries.RECORDED_KERNELS` returns them.
        stage: Which ranks have the same work: a label of each.
        step_ns: A step.

    Returns:
        By rank, those that cost most first.
    """
    found: dict[int, list[distributions.SlowKernel]] = {}
    ranks = columns["rank"].astype(np.int64)
    label = np.array([stage.get(rank, -1) for rank in ranks.tolist()], np.int64)
    for one in distributions.candidates(columns, stage, step_ns):
        if len(one.ranks) > 1:
            continue
        (rank,) = one.ranks
        of_kernel = (columns["kernel_id"] == one.kernel_id) & (label == stage[rank])
        own, others = of_kernel & (ranks == rank), of_kernel & (ranks != rank)
        quartiles = [columns[name].astype(np.float64) for name in ("short_ns", "long_ns")]
        if all(part[own].min() >= (1 + distributions.LEAST / 2) * part[others].max() for part in quartiles):
            found.setdefault(rank, []).append(one)
    return found


def _suspect(
    rank: int,
    launches: distributions.Launches,
    excess_ns: float,
    peers: int,
    numbers: Int,
    step_ns: float,
    hosts: Mapping[int, str],
    threshold: float,
    shown: str,
    *,
    those: str = "with the same work",
) -> Suspect:
    count = len(numbers)
    where = ranks_on([rank], [hosts.get(rank, "")])
    text = (
        f"{launches.kernels} kernels take {launches.slower:.2f} times as long on the GPU of {where} as on the {peers} "
        f"{those}, {duration(excess_ns)} more a step, in each of the {count} steps that were recorded"
    )
    visible = excess_ns >= threshold * step_ns
    return Suspect(
        kind="compute_straggler" if visible else "masked_compute_straggler",
        ranks=[rank],
        hosts=[hosts[rank]] if hosts.get(rank) else [],
        since=int(numbers[0]),
        last=int(numbers[-1]),
        lost_ns=excess_ns,
        slowdown=slowdown_of(step_ns, excess_ns),
        confidence=SURE * count / (count + 1) * (1.0 if peers > 1 else 0.8),
        level="kernel",
        evidence=[{"text": text, "sql": shown}],
        action=f"Check the GPU of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC); record 15 steps to see "
        "whether others wait for it.",
    )


def _suspect_by_kernels(
    rank: int,
    kernels: list[distributions.SlowKernel],
    lost_ns: float,
    numbers: Int,
    step_ns: float,
    hosts: Mapping[int, str],
    shown: str,
) -> Suspect:
    count = len(numbers)
    where = ranks_on([rank], [hosts.get(rank, "")])
    evidence: list[Evidence] = [
        {
            "text": f"{one.kernel} takes {one.factor:.2f} times as long on {where} as on ranks with the same work, "
            f"{duration(one.cost_ns)} more a step, in the {count} steps that were recorded",
            "sql": shown,
        }
        for one in kernels[: distributions.CHECKED]
    ]
    return Suspect(
        kind="compute_straggler",
        ranks=[rank],
        hosts=[hosts[rank]] if hosts.get(rank) else [],
        since=int(numbers[0]),
        last=int(numbers[-1]),
        kernels=[one.kernel for one in kernels[: distributions.CHECKED]],
        lost_ns=lost_ns,
        slowdown=slowdown_of(step_ns, lost_ns),
        confidence=SINGLE * count / (count + 1),
        level="kernel",
        evidence=evidence,
        action=f"See what is different about {kernels[0].kernel} on {where}: inputs, libraries, clocks and memory of "
        "the GPU (nvidia-smi -q -d CLOCK,PERFORMANCE,ECC); record 15 steps to see whether others wait for it.",
    )
