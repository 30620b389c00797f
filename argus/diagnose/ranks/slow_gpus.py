"""GPUs that compute slower than those with the same work, by the GPU's own times: also where nothing waits for them.

The time in which kernels compute needs no clock of another host, and waiting for others is not in it. In each step a
rank is compared with the low median of the ranks of its pipeline stage, so that steps with more work count for nothing;
where a stage has one rank, or most of it is slow, with its own first steps. A slow GPU costs what it has to do beyond
the busiest of the others; what is less than that, the pipeline hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import THRESHOLD, Case, evidence
from argus.diagnose.chance import outlier_limit
from argus.diagnose.kernels import distributions
from argus.diagnose.ranks.lateness import ALPHA, by_chance, find_onset
from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import (
    ERRORS,
    MIN_STEPS,
    PAST,
    WINDOWS,
    GpuTimes,
    GpuWindow,
    levels,
    newest_count,
    usual_compute,
)
from argus.diagnose.read.peers import Mesh
from argus.diagnose.read.query import Query
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.model.statistics import MEDIAN, low_median, mad, row_medians, share_in_order
from argus.model.units import duration, ranks_on

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LEAST = 0.08
"""Least excess over the peers' compute time. GPUs of one model differ by up to 8 % on the same work when all are well
("Not All GPUs Are Created Equal", SC '22: variability of 8 % in the median application)."""
SPREADS = 4.0
"""How many times the scatter among the other ranks it must be: ranks that differ all along are no event."""
LEAST_GROWN = 0.04
"""Least growth against the peers, or where all of a stage grew against its own past, that counts as an event: half of
what well GPUs differ by all along, for those differences have gone out of it."""
LEAST_SHARE = 0.01
"""Less than this share of the step is not reported, as for transfers (argus.diagnose.ranks.links)."""
BY_CHANCE = 1e-4
"""Chance that some rank of a healthy job is as far from the others, in standard deviations of theirs."""
UNCHANGED = 0.03
"""Ranks whose time changed by less are as they were."""
FEW = 0.1
"""If this share of the ranks is as it was, the others have changed; if not, the work has."""
MOST = 0.5
"""If this share of a stage became slower, its ranks are compared with their own past."""
SEPARATE = 0.99
"""Share of the pairs of an earlier and a newest step that are in order, at least, where the newest are fewer than a
window has (as for regressions): of so few the errors themselves are not sure."""
FACTOR = 1.25
"""Slow ranks of one finding differ by less than this factor in how slow they are."""
REFERENCES = 16
"""Slow ranks, and others, whose times are compared to find the onset."""
SAMPLED = 256
"""Steps that are compared to find the onset; then those between two of them."""


@dataclass(frozen=True)
class SlowGpu:
    """Ranks whose GPUs compute slower.

    Attributes:
        ranks: Global ranks.
        peers: Those that they were compared with; empty: with their own first steps.
        phase: Where most of it shows.
        factor: How many times as long as the peers' that phase takes: the median over ``ranks``.
        excess_ns: Compute time more in a step: the median over ``ranks``.
        cost_ns: What the job's step is longer for it.
        compute_ns: Compute time of a step now.
        persistence: Share of the steps in which they were slower by half of the excess.
        waited_ns: What all of ``peers`` wait longer in collectives than these ranks, at least; infinite: unknown.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    phase: str
    factor: float
    excess_ns: float
    cost_ns: float
    compute_ns: float
    persistence: float
    waited_ns: float = np.inf


def find_slow(
    now: GpuTimes,
    mesh: Mesh,
    before: GpuTimes | None = None,
    least: float = LEAST,
    least_grown: float = LEAST_GROWN,
    *,
    steadily: float = 0.0,
) -> list[SlowGpu]:
    """The ranks whose GPUs are slow now, those that cost most first.

    Args:
        now: Of the newest steps, at least :data:`MIN_STEPS`.
        mesh: Of the same ranks.
        before: Of the first steps; None: nothing is known of them.
        least: Excess over the peers that counts.
        least_grown: That counts where it was not there before.
        steadily: Excess from which those count, too, that are the last of their stage in more steps than chance allows,
            by however different times; 0: they do not.
    """
    total = len(now.steps)
    if total < MIN_STEPS:
        return []
    newest = newest_count(total)
    recent = now.cut(slice(-newest, None))
    # What wanders by a few percent is elsewhere after ten steps already, and has not changed.
    over_past = least_grown if newest == WINDOWS[0] else max(least, least_grown)
    excess, past = np.zeros(len(now.ranks)), np.zeros(len(now.ranks), np.bool_)
    for window in dict.fromkeys((newest, *WINDOWS)):
        tail = now.cut(slice(-window, None))
        # In a recording of few steps the longer window has those that the newest are compared with. If it is full, it
        # is the surer one for ranks with the same work.
        earlier = before if newest in (window, WINDOWS[0]) else None
        over_peers = least if window >= WINDOWS[0] or total <= WINDOWS[0] else np.inf
        by_tail, by_past = _excess(tail, mesh, earlier, over_peers, over_past)
        if window > newest and (fresh := (by_tail > 0) & (excess == 0)).any():
            # What a longer window shows must still hold, against the same: the peers, or what was.
            still = [_excess(recent, mesh, was, 0.0, 0.0, sure=False)[0] for was in (None, before)]
            by_tail[fresh & (np.where(by_past, still[1], still[0]) < by_tail / 2)] = 0
        fresh = (by_tail > 0) & (excess == 0)
        excess[fresh], past[fresh] = by_tail[fresh], by_past[fresh]
        if window >= total:
            break
    if steadily:
        last = _steadily(recent, mesh, steadily)
        excess = np.where(excess > 0, excess, last)
    return sorted(_described(recent, mesh, before, excess, past), key=lambda slow: -slow.cost_ns)


def _steadily(now: GpuTimes, mesh: Mesh, least: float) -> Float:
    """By how much ranks are typically above their stage, as a share, of those that are the most of it in more steps
    than ranks that take turns are; 0 of the others."""
    excess = np.zeros(len(now.ranks))
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        ratio = now.compute[members] / np.maximum(low_median(now.compute[members]), 1.0)
        known = ~np.isnan(ratio).any(axis=0)
        if len(members) < 2 or known.sum() < MIN_STEPS:
            continue
        most = np.bincount(ratio[:, known].argmax(axis=0), minlength=len(members))
        steps = int(known.sum())
        level = row_medians(ratio)
        for place in np.flatnonzero(level >= 1 + least).tolist():
            if by_chance(int(most[place]), steps, 1, len(members), windows=1) <= ALPHA:
                excess[members[place]] = level[place] - 1
    return excess


def _excess(
    now: GpuTimes, mesh: Mesh, before: GpuTimes | None, least: float, least_grown: float, *, sure: bool = True
) -> tuple[Float, NDArray[np.bool_]]:
    """By how much each rank's GPU is slower, as a share, 0 where it is not sure; and whether than it was itself."""
    excess = np.zeros(len(now.ranks))
    past = np.zeros(len(excess), np.bool_)
    stages = [np.flatnonzero(mesh.stage == label) for label in np.unique(mesh.stage).tolist()]
    ratio, was = np.full(now.compute.shape, np.nan), None
    same = before is not None and np.array_equal(before.ranks, now.ranks)
    if before is not None and same:
        was = np.full(before.compute.shape, np.nan)
    for members in stages:
        if len(members) > 1:
            ratio[members] = now.compute[members] / np.maximum(low_median(now.compute[members]), 1.0)
            excess[members] = above(ratio[members], least, sure=sure)
            if before is not None and was is not None:
                was[members] = before.compute[members] / np.maximum(low_median(before.compute[members]), 1.0)
    if before is None:
        return excess, past
    grown = _grown(now, before, max(least_grown, LEAST_GROWN) if sure else 0.0, sure=sure)
    # What peers do as well is the work's: of some of a stage what counts is that they part from the others.
    parted = _parted(ratio, was, least_grown, sure=sure) if was is not None else np.zeros(len(excess))
    for members in stages:
        if len(members) > 1 and np.mean(grown[members] > 0) < MOST:
            grown[members] = 0.0
    parted[excess > 0] = 0.0
    excess += parted
    past = (grown > 0) & (excess == 0)
    for members in stages:
        if ((excess[members] > 0) | past[members]).all():
            # Nobody of the stage is left to be compared with.
            past[members] |= grown[members] > 0
    excess[past] = grown[past]
    return excess, past


def _parted(now: Float, before: Float, least: float, *, sure: bool) -> Float:
    """By how much series moved up against the norm, as a share; 0 where that is not beyond the errors, and beyond what
    the others moved by. Shapes (series, steps) and (series, other steps)."""
    best = np.zeros(len(now))
    known = ~np.isnan(now).all(axis=1) & ~np.isnan(before).all(axis=1)
    if not known.any():
        return best
    level, error = levels(now)
    for count in sorted({min(count, before.shape[1]) for count in PAST}):
        was, was_error = levels(before[:, :count])
        moved = np.where(known & (was > 0), level - was, 0.0)
        usual = float(np.median(moved[known]))
        far = outlier_limit(BY_CHANCE, int(known.sum()), SPREADS) * mad(moved[known], usual)
        high = (moved >= least) & (level - 1 >= least / 2)
        high &= moved - usual >= np.maximum(ERRORS * np.hypot(error, was_error), far)
        high &= _separate(now - usual, before[:, :count], high)
        best = np.maximum(best, np.where(high | (not sure), np.maximum(np.minimum(moved, level - 1), 0.0), 0.0))
    return best


def _separate(now: Float, before: Float, asked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether all newest steps of series are longer than all earlier ones, but for single ones; of so many newest steps
    as a window has, their errors tell enough. Shapes (series, steps), (series, other steps), and (series,): of which
    series it is asked."""
    out = np.ones(len(now), np.bool_)
    if now.shape[1] < WINDOWS[0]:
        for place in np.flatnonzero(asked).tolist():
            was, here = (part[place][np.isfinite(part[place])] for part in (before, now))
            out[place] = min(len(was), len(here)) > 0 and share_in_order(was, here) >= SEPARATE
    return out


def above(ratio: Float, least: float, *, sure: bool = True) -> Float:
    """By how much series are above the norm, as a share; 0 where it is not sure (``sure``: whether it must be).
    ``ratio``: over the norm of each step, shape (series, steps)."""
    level, error = levels(ratio)
    if not sure:
        return np.maximum(level - 1, 0.0)
    high = level >= 1 + least
    others = level[~high]
    scatter = mad(others)
    centre = float(np.median(others)) if len(others) else 1.0
    high &= level - centre >= np.maximum(ERRORS * error, SPREADS * scatter)
    return np.where(high, level - 1, 0.0)


def _grown(now: GpuTimes, before: GpuTimes, least: float, *, sure: bool) -> Float:
    more = np.zeros(len(now.ranks))
    both, here, there = np.intersect1d(now.ranks, before.ranks, return_indices=True)
    if not len(both) or len(before.steps) < MIN_STEPS:
        return more
    for count in sorted({min(count, len(before.steps)) for count in PAST}):
        was = before.compute[there, :count]
        more[here] = np.maximum(more[here], grown(now.compute[here], was, least, sure=sure))
    return more


def grown(now: Float, before: Float, least: float, *, sure: bool = True, alone: bool = False) -> Float:
    """By how much series became longer than they were, beyond what all did, as a share; 0 where it is not sure.

    Args:
        now: Shape (series, steps), ns.
        before: The same series in earlier steps, shape (series, other steps), ns.
        least: Growth that counts.
        sure: Only what is beyond chance.
        alone: One that there is no other of counts as it is.
    """
    more = np.zeros(len(now))
    level, error = levels(now)
    was, was_error = levels(before)
    known = (level > 0) & (was > 0)
    if not known.any():
        return more
    change = level[known] / was[known]
    relative = np.hypot(error[known] / level[known], was_error[known] / was[known]) * change
    same = np.abs(change - 1) < UNCHANGED
    norm = 1.0 if same.mean() >= FEW or (alone and len(now) == 1) else float(np.median(change))
    high = (change / norm >= 1 + least) & (change - norm >= ERRORS * relative)
    high &= _separate(now[known] / norm, before[known], high)
    more[known] = np.where(high | (not sure), np.maximum(change / norm - 1, 0.0), 0.0)
    return more


def _described(
    now: GpuTimes, mesh: Mesh, before: GpuTimes | None, excess: Float, past: NDArray[np.bool_]
) -> list[SlowGpu]:
    """Slow ranks of one stage that are slow alike, together."""
    groups = []
    slow_places = np.flatnonzero(excess > 0)
    left = slow_places[np.argsort(-excess[slow_places])].tolist()
    while left:
        first = left[0]
        alike = [
            rank
            for rank in left
            if mesh.stage[rank] == mesh.stage[first]
            and past[rank] == past[first]
            and (1 + excess[first]) / (1 + excess[rank]) < FACTOR
        ]
        left = [rank for rank in left if rank not in alike]
        slow = np.array(alike, np.int64)
        peers = np.flatnonzero((mesh.stage == mesh.stage[first]) & (excess == 0))
        groups.append(_one(now, mesh, before if past[first] or not len(peers) else None, slow, peers, slow_places))
    return groups


def _one(now: GpuTimes, mesh: Mesh, before: GpuTimes | None, slow: Int, peers: Int, slow_places: Int) -> SlowGpu:
    excess, factor, phase, most = 0.0, 1.0, "", 0.0
    series = np.zeros(len(now.steps))
    if before is not None:
        rows = np.searchsorted(before.ranks, now.ranks[slow])
        # Those of the first steps that were slow already are no norm.
        parts = [before.cut(slice(0, count)) for count in PAST]
        before = min(parts, key=lambda part: float(np.median(row_medians(part.compute[rows]))))
    for name, values in now.parts.items():
        slow_ns = row_medians(values[slow].T)
        if before is not None:
            others_ns = np.full(len(slow_ns), np.median(row_medians(before.parts[name][rows])))
        else:
            others_ns = low_median(values[peers])
        more = float(np.nanmedian(slow_ns - others_ns))
        series += np.nan_to_num(slow_ns - others_ns)
        excess += more
        if more > most:
            most, phase, factor = more, name, float(np.nanmedian(slow_ns) / max(float(np.nanmedian(others_ns)), 1.0))
    return SlowGpu(
        ranks=tuple(now.ranks[np.sort(slow)].tolist()),
        peers=() if before is not None else tuple(now.ranks[peers].tolist()),
        phase=phase,
        factor=factor,
        excess_ns=excess,
        cost_ns=cost_of(now, mesh, slow, slow_places, excess, before),
        compute_ns=float(np.median(row_medians(now.compute[slow]))),
        persistence=float(np.mean(series > excess / 2)),
        waited_ns=_waited(now, slow, peers) if before is None else np.inf,
    )


def _waited(now: GpuTimes, slow: Int, peers: Int) -> float:
    """What the peer that waits least does so longer than slow ranks, in collectives alone: the median step, ns."""
    longer = now.collective[peers].min(axis=0) - now.collective[slow].min(axis=0)
    return float(np.nanmedian(longer)) if len(peers) and not np.isnan(longer).all() else np.inf


def cost_of(
    now: GpuTimes, mesh: Mesh, slow: Int, slow_places: Int, excess: float, before: GpuTimes | None = None
) -> float:
    """What the job loses to these ranks in a step, ns, at most their excess.

    A step takes as long as the rank that has the most to do itself, computing or doing nothing, waits left out: the
    others wait for that one, in collectives or in the pipeline. Without these ranks it would be the next one. What is
    less than somebody else has to do anyway, the pipeline hides.
    """
    own = row_medians(now.compute + now.idle)
    others = np.setdiff1d(np.flatnonzero(own > 0), slow_places)
    cost = float(np.median(own[slow])) - float(own[others].max()) if len(others) else excess
    if before is not None and len(others) and not mesh.staged:
        # Compared with its own past, in a job whose ranks all wait for one another.
        cost = max(cost, float(np.median(row_medians(now.step))) - float(np.median(row_medians(before.step))))
    return float(np.clip(cost, 0.0, max(excess, 0.0)))


def find_starved(
    now: GpuTimes, mesh: Mesh, before: GpuTimes | None = None, threshold: float = THRESHOLD
) -> list[SlowGpu]:
    """Ranks whose GPUs are idle for longer than those with the same work: their CPUs keep them waiting.

    Idle time is compared by its own noise: all ranks with the same work count as computing for as long as
    their low median does. What it costs follows from all that each of them has to do, as for slow GPUs.

    Arguments and returns as for :func:`find_slow`; ``threshold`` is the share of a step from which those count, too,
    that are idle for longest in most steps; ``phase`` is "idle".
    """

    def only_idle(times: GpuTimes) -> GpuTimes:
        common = usual_compute(times, mesh)
        return replace(
            times, parts={"idle": times.idle}, compute=common + times.idle, idle=times.compute - common
        )  # compute + idle is what it was

    same = before is not None and np.array_equal(before.ranks, now.ranks)
    slow = find_slow(
        only_idle(now), mesh, only_idle(before) if before is not None and same else None, LEAST, LEAST_SHARE,
        steadily=threshold,
    )  # fmt: skip
    return [one for one in slow if one.phase == "idle"]


def find_idle_stage(now: GpuTimes, mesh: Mesh, threshold: float = THRESHOLD) -> SlowGpu | None:
    """A stage of a pipeline all of whose GPUs have nothing to do for longer than those of the other stages: what they
    wait for is no other stage, and how many layers they have makes no difference to that.

    Args:
        now: The newest steps.
        mesh: Of their ranks.
        threshold: Share of a step from which that counts.

    Returns:
        None: there is none, or it costs less. Otherwise ``peers`` are the
        ranks of the other stages, and ``phase`` is "idle".
    """
    recent = now.cut(slice(-WINDOWS[0], None))
    labels = np.unique(mesh.stage)
    if not mesh.staged or len(labels) < 2 or len(recent.steps) < MIN_STEPS:
        return None
    # Of each stage the rank with the least: what all of its ranks share.
    members = [np.flatnonzero(mesh.stage == label) for label in labels.tolist()]
    idle = np.array([np.nanmin(recent.idle[part], axis=0) for part in members])
    most = int(row_medians(idle).argmax())
    lead = idle[most] - low_median(np.delete(idle, most, axis=0))
    level, error = levels(lead[None])
    excess = float(level[0])
    if excess < max(threshold * float(np.median(row_medians(recent.step))), ERRORS * float(error[0])):
        return None
    slow = np.isin(np.arange(len(now.ranks)), members[most])
    base = float(np.median(row_medians(recent.compute + recent.idle)[slow]))
    return SlowGpu(
        tuple(now.ranks[slow].tolist()), tuple(now.ranks[~slow].tolist()), "idle", base / (base - excess), excess,
        excess, base, float(np.mean(lead >= excess / 2)),
    )  # fmt: skip


def starved_since(seen: GpuWindow, slow: SlowGpu) -> int | None:
    """The step since which GPUs of :func:`find_starved` or :func:`find_idle_stage` have less to do; None: before those
    that were read."""
    slow_rows, peer_rows = (np.isin(seen.now.ranks, ranks) for ranks in (slow.ranks, slow.peers))
    same_work = bool(np.isin(seen.mesh.stage[peer_rows], seen.mesh.stage[slow_rows]).any())
    own = seen.now.compute + seen.now.idle if same_work or not peer_rows.any() else seen.now.idle
    norm = low_median(own[peer_rows]) if peer_rows.any() else np.full(own.shape[1], slow.compute_ns - slow.excess_ns)
    lead = np.nan_to_num(np.nanmedian(own[slow_rows], axis=0) - norm)
    since = find_onset(lead, slow.excess_ns)
    return int(seen.now.steps[since]) if since else None


def all_grown(seen: GpuWindow, onset: int) -> bool:
    """Whether nearly all GPUs compute longer from a step on than they did at first, each by more than chance."""
    first = seen.now if seen.before is None else seen.before
    was, now = first.cut(slice(0, int(np.searchsorted(first.steps, onset)))), seen.now.cut(slice(-WINDOWS[0], None))
    if len(was.steps) < MIN_STEPS or not np.array_equal(was.ranks, now.ranks):
        return False
    level, error = levels(now.compute)
    before, before_error = levels(was.compute)
    more = level - before
    return bool(np.mean((more >= LEAST_GROWN * before) & (more >= ERRORS * np.hypot(error, before_error))) >= 1 - FEW)


def detect(case: Case) -> list[Suspect]:
    """GPUs that are slow by their own times: below the threshold they are masked."""
    if (gpus := case.gpus) is None:
        return []
    suspects = []
    found = find_slow(gpus.now, gpus.mesh, gpus.before)
    places = np.flatnonzero(np.isin(gpus.now.ranks, [rank for slow in found for rank in slow.ranks]))
    for slow in found:
        onset = _onset(case.query, case.params, case.numbers, slow)
        suspect = _suspect(case, gpus, _since(gpus, slow, places, case.recently(onset)), onset)
        stage = np.isin(gpus.mesh.stage, gpus.mesh.stage[np.isin(gpus.now.ranks, slow.ranks)])
        if gpus.mesh.staged and len(slow.ranks) > 1 and not slow.peers and len(slow.ranks) == stage.sum():
            # All GPUs of a stage at once: not they became slow, but there is more for them to do. Their kernels know.
            kind, suspect.kind = suspect.kind, "stage_imbalance"
            suspect.action = "Find out what this stage computes more since then, and move layers to the others."
            factor = slow.compute_ns / max(slow.compute_ns - slow.excess_ns, 1.0)
            launches, sql = distributions.against_past(
                case.query, case.params, case.numbers, suspect.since, slow.ranks, factor
            )
            if distributions.explain_stage(suspect, launches, sql, f"before step {suspect.since}") == "slower":
                suspect.kind = kind
        suspects.append(suspect)
    return suspects


def _since(gpus: GpuWindow, slow: SlowGpu, slow_places: Int, steps: Int) -> SlowGpu:
    """The same ranks by the newest steps alone in which they were slow, as far as these are enough."""
    now = gpus.now.cut(gpus.now.steps >= steps[0])
    if len(now.steps) < MIN_STEPS or len(steps) >= WINDOWS[0]:
        return slow
    own, peers = (np.flatnonzero(np.isin(now.ranks, ranks)) for ranks in (slow.ranks, slow.peers))
    return _one(now, gpus.mesh, None if slow.peers else gpus.before, own, peers, slow_places)


def _onset(query: Query, params: Mapping[str, Any], numbers: Int, slow: SlowGpu) -> int:
    """The step since which these ranks are slow."""
    slow_ranks, peers = slow.ranks[:REFERENCES], slow.peers[:: max(1, len(slow.peers) // REFERENCES)][:REFERENCES]
    usual = slow.compute_ns - slow.excess_ns
    share = slow.excess_ns / max(usual, 1.0)
    low, high = 0, len(numbers) - 1
    while True:
        places = np.unique(np.linspace(low, high, min(SAMPLED, high - low + 1)).astype(np.int64))
        rows = query(queries.GPU_COMPUTE, {**params, "steps": numbers[places].tolist(), "ranks": [*slow_ranks, *peers]})
        steps = np.unique(rows["step"].astype(np.int64))
        if not len(steps):
            return int(numbers[0])
        late, norm = np.full(len(steps), np.nan), np.full(len(steps), usual)
        for place, step in enumerate(steps.tolist()):
            at = rows["step"] == step
            of_slow = at & np.isin(rows["rank"], slow_ranks)
            if of_slow.any():
                late[place] = np.median(rows["compute_ns"][of_slow])
            if peers and (at & ~of_slow).any():
                norm[place] = low_median(rows["compute_ns"][at & ~of_slow][:, None])[0]
        lead = np.nan_to_num(late / np.maximum(norm, 1.0) - 1)
        since = find_onset(lead, share)
        onset_place = int(np.searchsorted(numbers, steps[since]))
        if since == 0 or len(places) == high - low + 1:
            return int(numbers[0 if since == 0 and low == 0 else onset_place])
        # Between the last sampled step before it and this one.
        low, high = int(np.searchsorted(numbers, steps[since - 1])) + 1, onset_place
        if low >= high:
            return int(numbers[high])


def _longer_since(case: Case, onset: int) -> float:
    """By how much steps are longer than before a step, ns, at most: two standard errors above the difference of the
    medians. Infinite: too few steps before it or since."""
    place = int(np.searchsorted(case.numbers, onset))
    before, since = case.durations[:place], case.durations[place:][-WINDOWS[0] :]
    if min(len(before), len(since)) < MIN_STEPS:
        return np.inf
    error = MEDIAN * float(np.hypot(*(mad(part) / np.sqrt(len(part)) for part in (before, since))))
    return float(np.median(since) - np.median(before)) + 2 * error


def _suspect(case: Case, gpus: GpuWindow, slow: SlowGpu, onset: int) -> Suspect:
    step_ns = case.taken_ns(onset)
    names = case.hosts_of(slow.ranks)
    where = ranks_on(slow.ranks, names)
    visible = slow.cost_ns >= case.threshold * step_ns
    # Random waits in a pipeline shrink behind a rank that is always the last: the step is longer by a part of the rest.
    least_ns = min(_longer_since(case, onset), slow.waited_ns) if gpus.mesh.staged else np.inf
    lost_ns = min(slow.cost_ns, max(least_ns, case.threshold * step_ns)) if visible else slow.cost_ns
    peers = f"the {len(slow.peers)} ranks with the same work" if slow.peers else "its first steps"
    verb = "computes" if len(slow.ranks) == 1 else "compute"
    text = (
        f"the GPU of {where} {verb} {duration(slow.excess_ns)} a step longer than {peers}, "
        f"most of it in {slow.phase} ({slow.factor:.2f}x), in {slow.persistence:.0%} of the newest steps"
    )
    if visible:
        cost = f"it has {duration(slow.cost_ns)} a step more to do than the busiest of the others, which wait for it"
        cost += (
            f"; the step of {duration(step_ns)} is {duration(lost_ns)} longer for it"
            if lost_ns < slow.cost_ns
            else f", of {duration(step_ns)}"
        )
    else:
        cost = (
            f"the step does not wait for it yet: others have as much to do, and the pipeline's bubbles hide "
            f"{duration(max(slow.excess_ns - slow.cost_ns, 0))} of {duration(slow.excess_ns)}"
        )
    then = (
        " and move the rank if it stays slow." if visible else "; it has no slack left, and is the next to cost time."
    )
    return Suspect(
        kind="compute_straggler" if visible else "masked_compute_straggler",
        ranks=list(slow.ranks),
        hosts=names,
        since=onset,
        last=case.last,
        phase=slow.phase,
        lost_ns=lost_ns,
        slowdown=slowdown_of(step_ns, lost_ns),
        confidence=min(0.99, slow.persistence) * (1.0 if len(slow.peers) > 1 else 0.8),
        level="phase",
        evidence=[evidence(text, queries.GPU_TIMES, gpus.window)],
        cost=evidence(cost, queries.GPU_TIMES, gpus.window),
        action=f"Check the GPU of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC)" + then,
    )
