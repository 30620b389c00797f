"""Who comes late to the collectives: stragglers, from arrival times alone.

A collective ends when its last rank has arrived, so a step is as long as its latest rank makes it. For every collective
the others would gain the distance between the last arrival and the last of the rest. Differences of arrivals are
compared, never z-scores: in a group of 5 no rank can be 2 standard deviations out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.chance import binomial_tail, log_choose

Float = NDArray[np.float64]
Int = NDArray[np.int64]

RECENT_STEPS = 20
"""What a job does now is what its last 20 steps do."""
WINDOWS = (20, 30, 50, 80, 130, 250)
"""Ever longer windows, in steps, until a suspicion is certain or gone."""
PERSISTENCE = 0.6
"""A straggler is the last in at least this share of the steps; spikes hit ranks in turn."""
ALPHA = 1e-3
"""Chance that ranks which are last by turns look like one straggler in one diagnosis, all sets of ranks and all windows
counted. The least gain that is required on top keeps false alarms below 1 in 1,000 healthy jobs."""


@dataclass(frozen=True)
class Lateness:
    """Lateness against the median rank of each communicator, in ns; NaN where a rank took no part.

    Attributes:
        ranks: Shape (ranks,).
        steps: Shape (steps,).
        peak: The most in a step, over communicators, shape (ranks, steps).
        first: At a step's first call of the communicator with the most lateness, shape (ranks, steps).
        last: At its last call, shape (ranks, steps).
        groups: The same as ``peak`` by communicator: (indices of its ranks, shape (members, steps)).
    """

    ranks: Int
    steps: Int
    peak: Float
    first: Float
    last: Float
    groups: tuple[tuple[Int, Float], ...]

    def tail(self, count: int) -> Lateness:
        """The newest ``count`` steps."""
        cut = slice(-count, None)
        groups = tuple((members, values[:, cut]) for members, values in self.groups)
        return Lateness(self.ranks, self.steps[cut], self.peak[:, cut], self.first[:, cut], self.last[:, cut], groups)


def lateness_of(columns: Mapping[str, NDArray[Any]], steps: Int) -> Lateness:
    """Arranges rows (comm_group, rank, step, peak_ns, first_ns, last_ns) as matrices.

    Args:
        columns: As :data:`argus.diagnose.read.queries.LATENESS` returns them, each shape (rows,).
        steps: The steps to keep, ascending, shape (steps,).
    """
    wanted = np.isin(columns["step"], steps)
    rows = {name: np.asarray(values)[wanted] for name, values in columns.items()}
    ranks, rank_at = np.unique(rows["rank"].astype(np.int64), return_inverse=True)
    kept, step_at = np.unique(rows["step"].astype(np.int64), return_inverse=True)
    shape = (len(ranks), len(kept))
    _, group = np.unique(rows["comm_group"], return_inverse=True)
    # Of the communicators of a rank in a step the one with the most lateness, of equals the first.
    cell = rank_at * len(kept) + step_at
    order = np.lexsort((-group, rows["peak_ns"], cell))
    most = order[np.append(np.diff(cell[order]) > 0, True)] if len(order) else order
    peak, first, last = (np.full(shape, np.nan) for _ in range(3))
    for target, name in ((peak, "peak_ns"), (first, "first_ns"), (last, "last_ns")):
        target[rank_at[most], step_at[most]] = rows[name][most]
    order = np.argsort(group, kind="stable")
    groups = []
    for own in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else ():
        members, place = np.unique(rank_at[own], return_inverse=True)
        values = np.full((len(members), len(kept)), np.nan)
        values[place, step_at[own]] = rows["peak_ns"][own]
        groups.append((members, values))
    return Lateness(ranks, kept, peak, first, last, tuple(groups))


@dataclass(frozen=True)
class Straggler:
    """Ranks that come late together.

    Attributes:
        ranks: Global ranks.
        gain_ns: What a step would be shorter if they came with the last of the others: the median over the window.
        persistence: Share of steps in which one of them was last.
        p_value: Chance that ranks that are last by turns look like this (Bonferroni over sets of ranks and windows).
        window: Steps compared.
        waiting: Ranks that come late only because they wait for these.
        hidden: Their CPUs come late, and their GPUs, whose times are known, lose nothing by it.
        idle: They were detected by their GPUs, which are idle for longer, and not by who came last: gain and
            persistence are of that.
        own: The GPUs' own times agree that these ranks are late.
        behind: Ranks that hold the job up more: the gain is what these cost once those are well.
        whole_stage: They are a stage of a pipeline, idle for longer than the other stages.
    """

    ranks: tuple[int, ...]
    gain_ns: float
    persistence: float
    p_value: float
    window: int
    waiting: tuple[int, ...] = ()
    hidden: bool = False
    idle: bool = False
    own: bool = False
    behind: tuple[int, ...] = ()
    whole_stage: bool = False


def find_stragglers(lateness: Lateness, step_ns: Float, least: float) -> list[Straggler]:
    """The ranks that hold the job up now, those that cost most first.

    Args:
        lateness: Of consecutive steps, the newest last.
        step_ns: The job's time of each of these steps, shape (steps,).
        least: Gain, as a share of the step time, below which nothing is reported.
    """
    total = len(lateness.steps)
    recent = lateness.tail(RECENT_STEPS)
    for window in WINDOWS:
        stragglers = _clusters(lateness.tail(window), float(np.median(step_ns[-window:])), least)
        kept = []
        named: set[int] = set()
        for straggler in stragglers:
            late = straggler.ranks + straggler.waiting
            inside = np.isin(recent.ranks, late)
            behind = tuple(sorted(named))
            others = ~inside & ~np.isin(recent.ranks, behind)
            named |= set(late)
            lead = lead_of(recent.peak, inside, others)
            # What a longer window shows must still hold now.
            if np.mean(lead > 0) >= PERSISTENCE - 0.1 and np.median(lead) >= straggler.gain_ns / 2:
                kept.append(replace(straggler, behind=behind))
        if kept or window >= total:
            return kept
    return []


def lead_of(peak: Float, inside: NDArray[np.bool_], others: NDArray[np.bool_]) -> Float:
    """How much later the latest of ``inside`` is than the latest of ``others``, shape (steps,), ns."""
    if not inside.any() or not others.any():
        return np.zeros(peak.shape[1])
    low = np.where(np.isnan(peak), -np.inf, peak)
    lead = low[inside].max(axis=0) - low[others].max(axis=0)
    return np.asarray(lead[np.isfinite(lead)])


def _clusters(lateness: Lateness, step_ns: float, least: float) -> list[Straggler]:
    peak = lateness.peak
    count = len(lateness.ranks)
    left = np.ones(count, np.bool_)
    stragglers: list[Straggler] = []
    if count < 2 or not len(lateness.steps):
        return stragglers
    typical = np.nanmedian(np.where(np.isnan(peak).all(axis=1, keepdims=True), 0.0, peak), axis=1)
    budget = count // 2
    while budget > 0 and left.sum() > 1:
        order = np.flatnonzero(left)[np.argsort(-typical[left], kind="stable")]
        drops = typical[order[:-1]] - typical[order[1:]]
        size = int(np.argmax(drops[:budget])) + 1
        inside = np.zeros(count, np.bool_)
        inside[order[:size]] = True
        lead = lead_of(peak, inside, left & ~inside)
        if not len(lead):
            break
        gain = float(np.median(lead))
        persistence = float(np.mean(lead > 0))
        p_value = by_chance(int(np.sum(lead > 0)), len(lead), size, int(left.sum()))
        if gain < least * step_ns or persistence < PERSISTENCE or p_value > ALPHA:
            break
        guilty = _not_victims(lateness, order[:size], typical)
        ranks = tuple(sorted(lateness.ranks[guilty].tolist()))
        waiting = tuple(sorted(set(lateness.ranks[order[:size]].tolist()) - set(ranks)))
        stragglers.append(Straggler(ranks, gain, persistence, p_value, len(lateness.steps), waiting))
        left &= ~inside
        budget -= size
    return stragglers


def by_chance(hits: int, steps: int, size: int, count: int, windows: int = len(WINDOWS)) -> float:
    """Chance of at least ``hits`` of ``steps`` steps whose last rank is in the luckiest set of ``size`` of ``count``,
    in any of so many windows."""
    if size >= count or hits <= 0:
        return 1.0
    tail = binomial_tail(hits, steps, size / count)
    sets = log_choose(count, size)
    return float(min(1.0, np.exp(min(0.0, tail + sets + np.log(windows)))))


def _not_victims(lateness: Lateness, suspects: Int, typical: Float) -> Int:
    """Suspects less those that only wait for another one: in a communicator of both, the other is clearly later."""
    victims = set()
    for members, values in lateness.groups:
        inside = [i for i, rank in enumerate(members.tolist()) if rank in suspects.tolist()]
        for x in inside:
            for y in inside:
                if x == y:
                    continue
                apart = values[y] - values[x]
                rank = int(members[x])
                if np.nanmedian(apart) >= 0.5 * typical[rank] > 0 and typical[members[y]] >= 0.8 * typical[rank]:
                    victims.add(rank)
    guilty = np.array([rank for rank in suspects.tolist() if rank not in victims], np.int64)
    return guilty if len(guilty) else suspects


TURNS = 0.85
"""A rank that is late in fewer of the steps since it became late comes late in turns."""


def find_onset(lead: Float, typical: float) -> int:
    """Index of the step from which a lead holds until the end.

    The start of the longest end of the series in which at least :data:`PERSISTENCE` of the steps have half the typical
    lead: the best suffix sum with +0.4 for such a step and -0.6 for any other.

    Args:
        lead: How much later the suspects were than all others, shape (steps,), ns.
        typical: What it is now, ns.
    """
    hit = lead >= typical / 2
    if not len(hit):
        return 0
    since = _longest_end(hit, PERSISTENCE)
    share = float(np.mean(hit[since:]))
    # Late in turns, as where workers of a data loader hand over several batches at once: the end of the series in which
    # as many are late, not the last few of them that happen to be more.
    return min(since, _longest_end(hit, share / 2)) if share < TURNS else since


def _longest_end(hit: NDArray[np.bool_], share: float) -> int:
    """Where the longest end of a series begins in which more than this share was hit."""
    sums = np.cumsum(np.where(hit, 1 - share, -share)[::-1])[::-1]
    return int(np.argmax(sums))


def find_episode(hit: NDArray[np.bool_], least_steps: int = 10) -> tuple[int, int] | None:
    """The best stretch [start, stop) in which most steps were ``hit``, shape (steps,); None: none of
    ``least_steps``."""
    if not hit.any():
        return None
    sums = np.concatenate([[0.0], np.cumsum(np.where(hit, 1 - PERSISTENCE, -PERSISTENCE))])
    lowest = np.minimum.accumulate(sums)
    stop = int(np.argmax(sums - lowest))
    start = int(np.argmin(sums[: stop + 1]))
    return (start, stop) if stop - start >= least_steps else None
