"""GPUs that compute slower than those with the same work, by the GPU's own times: also where nothing waits for them.

The time in which kernels compute needs no clock of another host, and waiting for others is not in it. In each step a
rank is compared with the low median of the ranks of its pipeline stage, so that steps with more work count for nothing;
where a stage has one rank, or most of it is slow, with its own first steps. A slow GPU costs what it has to do beyond
the busiest of the others; what is less than that, the pipeline hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import single_kernels, sql
from argus.diagnose.hosts import Hosts
from argus.diagnose.peers import Mesh, mesh_of
from argus.diagnose.phase import find_onset
from argus.diagnose.verdict import Finding, named

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LEAST = 0.08
"""Least excess over the peers' compute time. GPUs of one model differ by up to 8 % on the same work when all are well
("Not All GPUs Are Created Equal", SC '22: variability of 8 % in the median application)."""
ERRORS = 5.0
"""Standard errors that an excess must be above 0."""
SPREADS = 4.0
"""How many times the scatter among the other ranks it must be: ranks that differ all along are no event."""
LEAST_GROWN = 0.04
"""Least growth against the peers, or where all of a stage grew against its own past, that counts as an event: half of
what well GPUs differ by all along, for those differences have gone out of it."""
LEAST_SHARE = 0.01
"""Less than this share of the step is not told, as for transfers (argus.diagnose.links)."""
PAST = (50, 20, 10)
"""First steps that the newest are compared with: fewer of them, too, in case that the rest were slow already."""
BY_CHANCE = 1e-4
"""Chance that some rank of a healthy job is as far from the others, in standard deviations of theirs."""
UNCHANGED = 0.03
"""Ranks whose time changed by less are as they were."""
FEW = 0.1
"""If this share of the ranks is as it was, the others have changed; if not, the work has."""
MOST = 0.5
"""If this share of a stage became slower, its ranks are compared with their own past."""
FACTOR = 1.25
"""Slow ranks of one finding differ by less than this factor in how slow they are."""
MEDIAN_ERROR = 1.2533 * 1.4826
"""Standard error of a median of normal values times the root of their number, over the median absolute deviation."""
COMPUTES = ("forward", "backward", "optimizer", "compute")
MIN_STEPS = 10
MOST_VALUES = 250_000
"""Steps of ranks that are read at once: some 100 bytes each on the way, and a sixth of a second."""
WINDOWS = (20, 50, 130, 250)
"""Newest steps that are compared: ever more, until all that is slow is sure."""
FIRST = 50
"""First steps that ranks are compared with where they have no peers."""
FEWEST = 12
"""Steps that are enough to tell what a rank, or a link, of a very large job usually takes."""
REFERENCES = 16
"""Slow ranks, and others, whose times tell since when."""
SAMPLED = 256
"""Steps that are looked at to tell since when; then those between two of them."""


@dataclass(frozen=True)
class GpuTimes:
    """What GPUs did in some steps, in ns; NaN where nothing is known.

    Attributes:
        ranks: Ascending, shape (ranks,).
        steps: Ascending, shape (steps,).
        parts: By phase (:data:`COMPUTES`), shape (ranks, steps).
        compute: All of them together, shape (ranks, steps).
        collective: Only collectives ran, shape (ranks, steps).
        pipeline: Only sends and receives ran, or it waited for them, shape (ranks, steps).
        idle: It had nothing to do, or waited for data, shape (ranks, steps).
        step: The step on the GPU, shape (ranks, steps).
        kernels: Kernels of a step, the median over the steps, shape (ranks,).
    """

    ranks: Int
    steps: Int
    parts: dict[str, Float]
    compute: Float
    collective: Float
    pipeline: Float
    idle: Float
    step: Float
    kernels: Int

    def cut(self, kept: slice) -> GpuTimes:
        """Some of the steps."""
        parts = {name: values[:, kept] for name, values in self.parts.items()}
        waits = self.collective[:, kept], self.pipeline[:, kept], self.idle[:, kept], self.step[:, kept]
        return GpuTimes(self.ranks, self.steps[kept], parts, self.compute[:, kept], *waits, self.kernels)


def times_of(columns: Mapping[str, NDArray[Any]], steps: Int | None = None) -> GpuTimes:
    """Arranges the rows of :data:`argus.diagnose.sql.GPU_TIMES` as matrices. ``steps``: those to keep; None: all."""
    kept = np.ones(len(columns["rank"]), np.bool_) if steps is None else np.isin(columns["step"], steps)
    ranks, row = np.unique(columns["rank"][kept].astype(np.int64), return_inverse=True)
    numbers, column = np.unique(columns["step"][kept].astype(np.int64), return_inverse=True)

    def matrix(name: str) -> Float:
        values = np.full((len(ranks), len(numbers)), np.nan)
        values[row, column] = columns[name][kept]
        return values

    parts = {phase: matrix(f"{phase}_ns") for phase in COMPUTES}
    compute = np.sum(list(parts.values()), axis=0)
    kernels = _median(matrix("kernels")).astype(np.int64) if len(numbers) else np.zeros(len(ranks), np.int64)
    waits = matrix("collective_ns"), matrix("pipeline_ns"), matrix("idle_ns"), matrix("step_ns")
    return GpuTimes(ranks, numbers, parts, compute, *waits, kernels)


def _median(values: Float) -> Float:
    """Over the steps, shape (ranks,); 0 where nothing is known."""
    if not values.shape[1]:
        return np.zeros(len(values))
    # numpy's median takes a row at a time, and several times as long.
    count = values.shape[1] - np.isnan(values).sum(axis=1)
    ordered, row = np.sort(values, axis=1), np.arange(len(values))  # NaN last
    middle = (ordered[row, np.maximum(count - 1, 0) // 2] + ordered[row, np.maximum(count, 1) // 2]) / 2
    return np.where(count > 0, middle, 0.0)


def low_median(values: Float) -> Float:
    """Of the ranks, shape (steps,): of two the lesser, so that a slow half does not become the norm."""
    count = np.sum(~np.isnan(values), axis=0)
    ordered = np.sort(values, axis=0)  # NaN last
    return np.asarray(np.take_along_axis(ordered, np.maximum(count - 1, 0)[None, :] // 2, axis=0)[0])


def levels(values: Float) -> tuple[Float, Float]:
    """Median over the steps and its standard error, shape (ranks,) each."""
    level = _median(values)
    scatter = _median(np.abs(values - level[:, None]))
    count = np.maximum(np.sum(~np.isnan(values), axis=1), 1)
    return level, MEDIAN_ERROR * scatter / np.sqrt(count)


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
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    phase: str
    factor: float
    excess_ns: float
    cost_ns: float
    compute_ns: float
    persistence: float


def find_slow(
    now: GpuTimes,
    mesh: Mesh,
    before: GpuTimes | None = None,
    least: float = LEAST,
    least_grown: float = LEAST_GROWN,
) -> list[SlowGpu]:
    """The ranks whose GPUs are slow now, those that cost most first.

    Args:
        now: Of the newest steps, at least :data:`MIN_STEPS`.
        mesh: Of the same ranks.
        before: Of the first steps; None: nothing is known of them.
        least: Excess over the peers that counts.
        least_grown: That counts where it was not there before.
    """
    total = len(now.steps)
    if total < MIN_STEPS:
        return []
    # Of a recording that has no more than one window the newer half decides.
    newest = WINDOWS[0] if total > WINDOWS[0] else max(MIN_STEPS, total // 2)
    recent = now.cut(slice(-newest, None))
    excess, past = np.zeros(len(now.ranks)), np.zeros(len(now.ranks), np.bool_)
    for window in dict.fromkeys((newest, *WINDOWS)):
        tail = now.cut(slice(-window, None))
        found, by_past = _excess(tail, mesh, before, least, least_grown)
        if window > newest and (fresh := (found > 0) & (excess == 0)).any():
            # What a longer window shows must still hold.
            found[fresh & (_excess(recent, mesh, before, 0.0, 0.0, sure=False)[0] < found / 2)] = 0
        fresh = (found > 0) & (excess == 0)
        excess[fresh], past[fresh] = found[fresh], by_past[fresh]
        if window >= total:
            break
    return sorted(_described(recent, mesh, before, excess, past), key=lambda slow: -slow.cost_ns)


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
        scatter = 1.4826 * float(np.median(np.abs(moved[known] - usual)))
        high = (moved >= least) & (level - 1 >= least / 2)
        high &= moved - usual >= np.maximum(ERRORS * np.hypot(error, was_error), _far(int(known.sum())) * scatter)
        best = np.maximum(best, np.where(high | (not sure), np.maximum(np.minimum(moved, level - 1), 0.0), 0.0))
    return best


def _far(count: int) -> float:
    """How many standard deviations one of so many must be away to be none of them."""
    return max(SPREADS, NormalDist().inv_cdf(1 - BY_CHANCE / max(count, 1)))


def above(ratio: Float, least: float, *, sure: bool = True) -> Float:
    """By how much series are above the norm, as a share; 0 where it is not sure (``sure``: whether it must be).
    ``ratio``: over the norm of each step, shape (series, steps)."""
    level, error = levels(ratio)
    if not sure:
        return np.maximum(level - 1, 0.0)
    high = level >= 1 + least
    others = level[~high]
    scatter = 1.4826 * float(np.median(np.abs(others - np.median(others)))) if len(others) else 0.0
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
    more[known] = np.where(high | (not sure), np.maximum(change / norm - 1, 0.0), 0.0)
    return more


def _described(
    now: GpuTimes, mesh: Mesh, before: GpuTimes | None, excess: Float, past: NDArray[np.bool_]
) -> list[SlowGpu]:
    """Slow ranks of one stage that are slow alike, together."""
    told = []
    found = np.flatnonzero(excess > 0)
    left = found[np.argsort(-excess[found])].tolist()
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
        told.append(_one(now, mesh, before if past[first] or not len(peers) else None, slow, peers, found))
    return told


def _one(now: GpuTimes, mesh: Mesh, before: GpuTimes | None, slow: Int, peers: Int, found: Int) -> SlowGpu:
    excess, factor, phase, most = 0.0, 1.0, "", 0.0
    series = np.zeros(len(now.steps))
    if before is not None:
        rows = np.searchsorted(before.ranks, now.ranks[slow])
        # Those of the first steps that were slow already are no norm.
        parts = [before.cut(slice(0, count)) for count in PAST]
        before = min(parts, key=lambda part: float(np.median(_median(part.compute[rows]))))
    for name, values in now.parts.items():
        mine = _median(values[slow].T)
        if before is not None:
            others = np.full(len(mine), np.median(_median(before.parts[name][rows])))
        else:
            others = low_median(values[peers])
        more = float(np.nanmedian(mine - others))
        series += np.nan_to_num(mine - others)
        excess += more
        if more > most:
            most, phase, factor = more, name, float(np.nanmedian(mine) / max(float(np.nanmedian(others)), 1.0))
    return SlowGpu(
        ranks=tuple(now.ranks[np.sort(slow)].tolist()),
        peers=() if before is not None else tuple(now.ranks[peers].tolist()),
        phase=phase,
        factor=factor,
        excess_ns=excess,
        cost_ns=_cost(now, mesh, slow, found, excess, before),
        compute_ns=float(np.median(_median(now.compute[slow]))),
        persistence=float(np.mean(series > excess / 2)),
    )


def _cost(now: GpuTimes, mesh: Mesh, slow: Int, found: Int, excess: float, before: GpuTimes | None) -> float:
    """What the job loses to these ranks in a step, ns, at most their excess.

    A step takes as long as the rank that has the most to do itself, computing or doing nothing, waits left out: the
    others wait for that one, in collectives or in the pipeline. Without these ranks it would be the next one. What is
    less than somebody else has to do anyway, the pipeline hides.
    """
    own = _median(now.compute + now.idle)
    others = np.setdiff1d(np.flatnonzero(own > 0), found)
    cost = float(np.median(own[slow])) - float(own[others].max()) if len(others) else excess
    if before is not None and len(others) and not mesh.staged:
        # Compared with its own past, in a job whose ranks all wait for one another.
        cost = max(cost, float(np.median(_median(now.step))) - float(np.median(_median(before.step))))
    return float(np.clip(cost, 0.0, max(excess, 0.0)))


def find_starved(now: GpuTimes, mesh: Mesh, before: GpuTimes | None = None) -> list[SlowGpu]:
    """Ranks whose GPUs have nothing to do for longer than those with the same work: their CPUs keep them waiting.

    Time with nothing to do is compared by its own noise: all ranks with the same work count as computing for as long as
    their low median does. What it costs is told from all that each of them has to do, as for slow GPUs.

    Arguments and returns as for :func:`find_slow`; ``phase`` is "idle".
    """

    def only_idle(times: GpuTimes) -> GpuTimes:
        common = usual_compute(times, mesh)
        return replace(
            times, parts={"idle": times.idle}, compute=common + times.idle, idle=times.compute - common
        )  # compute + idle is what it was

    same = before is not None and np.array_equal(before.ranks, now.ranks)
    slow = find_slow(
        only_idle(now), mesh, only_idle(before) if before is not None and same else None, LEAST, LEAST_SHARE
    )
    return [one for one in slow if one.phase == "idle"]


def usual_compute(times: GpuTimes, mesh: Mesh) -> Float:
    """The low median of the compute time of the ranks of each stage, by step, shape (ranks, steps)."""
    usual = np.empty_like(times.compute)
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        usual[members] = low_median(times.compute[members])
    return usual


def starved_since(seen: Seen, slow: SlowGpu) -> int | None:
    """The step since which GPUs of :func:`find_starved` have less to do; None: before those that were read."""
    own = seen.now.compute + seen.now.idle
    mine, others = (np.isin(seen.now.ranks, ranks) for ranks in (slow.ranks, slow.peers))
    norm = low_median(own[others]) if others.any() else np.full(own.shape[1], slow.compute_ns - slow.excess_ns)
    lead = np.nan_to_num(np.nanmedian(own[mine], axis=0) - norm)
    since = find_onset(lead, slow.excess_ns)
    return int(seen.now.steps[since]) if since else None


def all_grown(seen: Seen, onset: int) -> bool:
    """Whether nearly all GPUs compute longer from a step on than they did at first, each by more than chance."""
    first = seen.now if seen.before is None else seen.before
    was, now = first.cut(slice(0, int(np.searchsorted(first.steps, onset)))), seen.now.cut(slice(-WINDOWS[0], None))
    if len(was.steps) < MIN_STEPS or not np.array_equal(was.ranks, now.ranks):
        return False
    level, error = levels(now.compute)
    before, before_error = levels(was.compute)
    more = level - before
    return bool(np.mean((more >= LEAST_GROWN * before) & (more >= ERRORS * np.hypot(error, before_error))) >= 1 - FEW)


def own_excess(now: GpuTimes, mesh: Mesh) -> tuple[Float, Float, NDArray[np.bool_]]:
    """By how much each rank's GPU computes longer, and has nothing to do for longer, than those with the same work, in
    the newest steps: shape (ranks,) each, ns; and whether the two together are beyond chance. What it waits for other
    ranks is in neither; so of ranks that are late together it tells which one the others wait for. Time with nothing to
    do has a noise of its own, and where it is most of the two, it is enough that it is beyond chance itself."""
    recent = now.cut(slice(-WINDOWS[0], None))
    out = []
    for values in (recent.compute, recent.idle):
        more = np.zeros(values.shape)
        for label in np.unique(mesh.stage).tolist():
            members = np.flatnonzero(mesh.stage == label)
            more[members] = values[members] - low_median(values[members])
        out.append(more)
    level, error = levels(out[0] + out[1])
    idle, idle_error = levels(out[1])
    sure = (level >= ERRORS * error) | ((idle > ERRORS * idle_error) & (idle >= level / 2))
    return _median(out[0]), idle, sure


def own_lateness(seen: Seen) -> tuple[Float, NDArray[np.bool_]]:
    """By how much each rank's GPU is late itself in the newest steps, computing or having nothing to do: longer than
    the ranks with the same work, or than itself at first (all of a stage may be late). Shape (ranks,) each, ns; and
    whether that is beyond chance."""
    compute, idle, sure = own_excess(seen.now, seen.mesh)
    own = compute + idle
    if seen.before is not None and np.array_equal(seen.before.ranks, seen.now.ranks):
        recent, first = seen.now.cut(slice(-WINDOWS[0], None)), seen.before.cut(slice(0, PAST[-1]))
        level, error = levels(recent.compute + recent.idle)
        was, was_error = levels(first.compute + first.idle)
        own = np.maximum(own, level - was)
        sure = sure | (level - was >= ERRORS * np.hypot(error, was_error))
    return own, sure


def by_step(now: GpuTimes, mesh: Mesh) -> Float:
    """By how much each rank's GPU computes or has nothing to do for longer than the low median of those with the same
    work, in each step; and of its stage's only rank, than its own typical step. Shape (ranks, steps), ns."""
    own = now.compute + now.idle
    more = np.full(own.shape, np.nan)
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        values = own[members]
        more[members] = values - (low_median(values) if len(members) > 1 else _median(values)[:, None])
    return more


@dataclass(frozen=True)
class Seen:
    """What the GPUs of a job did.

    Attributes:
        now: In the newest steps.
        before: In the first ones; None: there are not enough besides.
        mesh: Of the ranks of ``now``.
        window: Parameters of the query that ``now`` comes from.
    """

    now: GpuTimes
    before: GpuTimes | None
    mesh: Mesh
    window: dict[str, Any]


def read(query: sql.Query, params: Mapping[str, Any], numbers: Int, ranks: int, across: Hosts | None) -> Seen | None:
    """Reads what the GPUs of a job did; None: of fewer than :data:`MIN_STEPS` of the newest steps it is known.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Sure steps, ascending, shape (steps,).
        ranks: How many there are, roughly.
        across: How the hosts go together; None: it is one.
    """
    window, *past = windows(params, numbers, ranks)

    def of(asked: dict[str, Any]) -> GpuTimes:
        kept = numbers[(numbers >= asked["first"]) & (numbers <= asked["last"])]
        return times_of(query(sql.GPU_TIMES, asked), kept)

    now = of(window)
    before = of(past[0]) if past else None
    if len(now.steps) < MIN_STEPS:
        return None
    mesh = mesh_of(query(sql.GROUPS, params), now.ranks, now.kernels, joined(across))
    return Seen(now, before, mesh, window)


def windows(params: Mapping[str, Any], numbers: Int, ranks: int) -> list[dict[str, Any]]:
    """Parameters of the steps that :func:`read` reads: the newest, and the first if there are enough besides."""
    newest = numbers[-int(np.clip(MOST_VALUES // max(ranks, 1), WINDOWS[0], WINDOWS[-1])) :]
    first = first_steps(numbers)[: int(np.clip(MOST_VALUES // (2 * max(ranks, 1)), FEWEST, len(newest)))]
    return [{**params, "first": int(some[0]), "last": int(some[-1])} for some in (newest, first) if len(some)]


def first_steps(numbers: Int) -> Int:
    """The steps that the newest are compared with; none where there are too few besides."""
    first = numbers[: max(0, min(FIRST, len(numbers) - WINDOWS[0]))]
    return first if len(first) >= MIN_STEPS else first[:0]


def all_compared(seen: Seen, ranks: set[int]) -> bool:
    """Whether each of these ranks is compared with others of the same work by what its own GPU did, for which no clock
    has to agree with another."""
    _, many = np.unique(seen.mesh.stage, return_counts=True)
    return ranks <= set(seen.now.ranks.tolist()) and bool(len(many)) and int(many.min()) > 1


def judge(
    seen: Seen,
    query: sql.Query,
    params: Mapping[str, Any],
    numbers: Int,
    durations: Float,
    hosts: Mapping[int, str],
    threshold: float,
) -> list[Finding]:
    """What the GPUs' own times tell of slow ones.

    Args:
        seen: As :func:`read` returns it.
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Sure steps, ascending, shape (steps,).
        durations: The job's time of each, ns.
        hosts: Node of each rank.
        threshold: Lost share of the step from which slow GPUs are what slows the job down; below, they are masked.

    Returns:
        Findings whose ``share`` is what a step is longer for it, in ns.
    """
    step_ns = float(np.median(durations[-WINDOWS[0] :]))
    shown = sql.shown(sql.GPU_TIMES, seen.window)
    findings = []
    for slow in find_slow(seen.now, seen.mesh, seen.before):
        onset = _onset(query, params, numbers, slow)
        finding = _finding(slow, onset, numbers, hosts, step_ns, threshold, shown)
        stage = np.isin(seen.mesh.stage, seen.mesh.stage[np.isin(seen.now.ranks, slow.ranks)])
        if seen.mesh.staged and len(slow.ranks) > 1 and not slow.peers and len(slow.ranks) == stage.sum():
            # All GPUs of a stage at once: not they became slow, but there is more for them to do. Their kernels know.
            kind, finding["kind"] = finding["kind"], "stage_imbalance"
            finding["action"] = "Find out what this stage computes more since then, and move layers to the others."
            factor = slow.compute_ns / max(slow.compute_ns - slow.excess_ns, 1.0)
            told = single_kernels.against_past(query, params, numbers, onset, slow.ranks, factor)
            if single_kernels.tell_apart(finding, *told, f"before step {onset}") == "slower":
                finding["kind"] = kind
        findings.append(finding)
    return findings


def joined(across: Hosts | None) -> dict[tuple[str, int], int]:
    """The number that each communicator has on all hosts, by (host, number on that host)."""
    if across is None:
        return {}
    return {(join.host, join.comm_group): join.joined_group for join in across.joins if not join.error}


def _onset(query: sql.Query, params: Mapping[str, Any], numbers: Int, slow: SlowGpu) -> int:
    """The step since which these ranks are slow."""
    mine, others = slow.ranks[:REFERENCES], slow.peers[:: max(1, len(slow.peers) // REFERENCES)][:REFERENCES]
    usual = slow.compute_ns - slow.excess_ns
    share = slow.excess_ns / max(usual, 1.0)
    low, high = 0, len(numbers) - 1
    while True:
        places = np.unique(np.linspace(low, high, min(SAMPLED, high - low + 1)).astype(np.int64))
        rows = query(sql.GPU_COMPUTE, {**params, "steps": numbers[places].tolist(), "ranks": [*mine, *others]})
        steps = np.unique(rows["step"].astype(np.int64))
        if not len(steps):
            return int(numbers[0])
        late, norm = np.full(len(steps), np.nan), np.full(len(steps), usual)
        for place, step in enumerate(steps.tolist()):
            at = rows["step"] == step
            of_slow = at & np.isin(rows["rank"], mine)
            if of_slow.any():
                late[place] = np.median(rows["compute_ns"][of_slow])
            if others and (at & ~of_slow).any():
                norm[place] = low_median(rows["compute_ns"][at & ~of_slow][:, None])[0]
        lead = np.nan_to_num(late / np.maximum(norm, 1.0) - 1)
        since = find_onset(lead, share)
        found = int(np.searchsorted(numbers, steps[since]))
        if since == 0 or len(places) == high - low + 1:
            return int(numbers[0 if since == 0 and low == 0 else found])
        # Between the last sampled step before it and this one.
        low, high = int(np.searchsorted(numbers, steps[since - 1])) + 1, found
        if low >= high:
            return int(numbers[high])


def _finding(
    slow: SlowGpu,
    onset: int,
    numbers: Int,
    hosts: Mapping[int, str],
    step_ns: float,
    threshold: float,
    shown: str,
) -> Finding:
    names = list(dict.fromkeys(hosts[rank] for rank in slow.ranks if rank in hosts))
    where = named(slow.ranks) + (f" on {', '.join(names[:4])}" if names else "")
    visible = slow.cost_ns >= threshold * step_ns
    peers = f"the {len(slow.peers)} ranks with the same work" if slow.peers else "its first steps"
    verb = "computes" if len(slow.ranks) == 1 else "compute"
    text = (
        f"the GPU of {where} {verb} {slow.excess_ns / 1e6:,.1f} ms a step longer than {peers}, "
        f"most of it in {slow.phase} ({slow.factor:.2f}x), in {slow.persistence:.0%} of the newest steps"
    )
    if visible:
        told = (
            f"it has {slow.cost_ns / 1e6:,.1f} ms a step more to do than the busiest of the others, which wait for it, "
            f"of {step_ns / 1e6:,.1f} ms"
        )
    else:
        told = (
            f"nobody waits for it: others have as much to do, and of {slow.excess_ns / 1e6:,.1f} ms the pipeline's "
            f"bubbles hide all but {slow.cost_ns / 1e6:,.1f} ms"
        )
    ideal = max(step_ns - slow.cost_ns, 0.05 * step_ns)
    then = (
        " and move the rank if it stays slow." if visible else "; it has no slack left, and is the next to cost time."
    )
    return Finding(
        kind="compute_straggler" if visible else "masked_compute_straggler",
        ranks=list(slow.ranks),
        hosts=names,
        steps=[onset, int(numbers[-1])],
        phase=slow.phase,
        kernels=[],
        slowdown=round(step_ns / ideal, 4),
        share=slow.cost_ns,
        confidence=round(min(0.99, slow.persistence) * (1.0 if len(slow.peers) > 1 else 0.8), 4),
        level="phase",
        evidence=[{"text": text, "sql": shown}, {"text": told, "sql": shown}],
        action=f"Check the GPU of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC)" + then,
    )
