"""Which rank holds up the others, by timers that its training loop logged: step times and phases of each rank.

Ranks that train together wait for one another in every step, and the timer around whatever they wait in contains that
wait: a backward pass that all-reduces gradients, a blocking collective, a timer called *waiting*. So the slow rank has
the *shortest* such timer, and its step is as long as everybody's. What a rank needs for itself is its step less the
timers that contain waiting; the ranks' own times are compared in each step with the low median rank's.

Which timers contain waiting is measured, not assumed (:func:`waiting_phases`). Names decide only where the numbers
cannot: loading data, garbage collection and checkpoints are a rank's own time.

A rank is the cause if its own time grew at a step by more than ranks' own times wander, or is far above that of all the
others all along. What the others would gain is the cost: the time between the slow rank and the next one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.chance import outlier_limit
from argus.diagnose.iteration.regression import MISSED, SEPARATE
from argus.diagnose.ranks.lateness import ALPHA, PERSISTENCE, RECENT_STEPS, by_chance, find_episode
from argus.model.statistics import MEDIAN, low_median, mad, row_medians

Float = NDArray[np.float64]
Int = NDArray[np.int64]

MIN_STEPS = 10
"""Fewer steps on either side of a change are not compared, as in :mod:`argus.diagnose.iteration.regression`."""
LOADING = ("data", "dataset", "dataloader", "load", "loader", "loading", "input", "fetch", "batch", "preprocess")
COLLECTING = ("gc", "garbage")
ON_HOST = ("checkpoint", "checkpointing", "ckpt", "save", "saving", "log", "logging", "python", "cpu", "host", "launch")
WAITING = ("wait", "waiting", "comm", "comms", "communication", "sync", "synchronize", "synchronise", "barrier",
           "allreduce", "reduce", "gather", "scatter", "broadcast", "nccl", "idle", "bubble")  # fmt: skip
COMMUNICATING = ("comm", "comms", "communication", "allreduce", "reduce", "gather", "scatter", "broadcast", "nccl")
COMPUTING = ("compute", "computing", "computation", "backward", "bwd", "train", "gpu", "device", "model")
"""Parts of a phase's name, which its words are compared with. Computing contains waiting where nothing can be measured:
a backward pass synchronises gradients."""
TAKES = 0.2
"""A phase contains waiting if it takes up this share of what other ranks are late by."""
ERRORS = 4.0
"""Standard errors by which that must be above 0."""
WAITED = 0.5
"""The phases called waiting or communication contain the wait for this share of what a phase is longer by, at least, if
that phase is a rank's own time."""
MOST = 1.3
"""A timer that is shorter by more than this much of what another is longer by does not wait for that."""
LEVEL = 0.75
"""On the last to come, the timer that contains the wait varies by at most this share of what the other one does."""
NOW_AND_THEN = 0.03
"""A timer with more such spikes among its changes from step to step is long in single steps."""
EQUAL = 0.1
"""A timer that differs between ranks by less than this share of what it changes by from step to step is the same on
all."""
PRECISE = 0.1
"""Standard error of that share below which it is measured."""
WANDERS = 5.0
"""Standard deviations of what ranks' own times wander by, from which a change is one: among 16 ranks, whose spread is
an estimate itself (Student's t), one healthy recording in 300 has one, before the other conditions."""
PART = 5
"""A rank counts from this part of the threshold on: own times leave out what all ranks share, and are that much
quieter than step times."""
OUTLIER = 3.5
"""Modified z-score from which a rank stands out all along (Iglewicz, Hoaglin 1993)."""
CERTAIN = 4.0
"""Standard errors by which that rank must be slower than the median of the others: where work varies by 10 %, one of
two healthy ranks often is the slower one in two thirds of 16 steps."""
FEW = 4
"""At most one rank in so many stands out all along; more are another kind of machine."""
SPIKE = 6.0
"""Scatters of own times from which a rank's step is a spike."""
LEAST_SPIKES = 3
SIZE = 1 / 3
"""Spikes this large, of those in which a rank loses most, are of a size."""
LAST = 0.5
"""A small growth counts only on a rank that then is the last in more than half of the steps: healthy ranks take turns,
and the luckiest of 16 was last in 0.42 of the steps of 17 recordings."""
LEAST_EPISODE = 5
"""Steps in a row that are more than a stall (:data:`argus.diagnose.iteration.stalls.LONGEST_STALL`)."""
BLOCK = 20
"""Steps whose median is one sample of how own times wander."""
BLOCKS = 6
"""So many of them in a log that is too short for three such blocks."""


@dataclass(frozen=True)
class Timers:
    """Logged timers as matrices.

    Attributes:
        ranks: Shape (ranks,).
        steps: Shape (steps,).
        step: Step times, shape (ranks, steps), ns; NaN: not logged.
        phases: By name, the same shape, ns; 0 where a step does not have it. ``other`` is what no timer covers.
    """

    ranks: Int
    steps: Int
    step: Float
    phases: Mapping[str, Float]


@dataclass(frozen=True)
class Slow:
    """Ranks that hold the others up.

    Attributes:
        places: Of the ranks, among :attr:`Timers.ranks`.
        since: Place of the first slow step.
        until: Place after the last one; the number of steps if it lasts.
        excess_ns: How much more a step of theirs needs than the low median rank's, median over these steps.
        before_ns: The same before; NaN: it was so from the first step on.
        cost_ns: What a step would be shorter if they were like the others.
        last: Share of the steps in which one of them was last.
        jitter: They are slow in some steps only.
        confidence: 0 to 1.
        beside: Places of ranks that are slow in the same steps for another reason; the cost is shared out among all.
    """

    places: tuple[int, ...]
    since: int
    until: int
    excess_ns: float
    before_ns: float
    cost_ns: float
    last: float
    jitter: bool
    confidence: float
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` concludes.

    Attributes:
        waits: Phases that contain waiting.
        own: What each rank needs for itself, shape (ranks, steps), ns.
        slow: Ranks that are the cause, those that cost most first.
        over: Ranks that were slow and are well again.
        unlike: Ranks that differ from the others by a constant without standing out, as another kind of machine does,
            with what they cost; None: there are none.
        least_ns: Growth of a rank's own time below which it may not be reported.
    """

    waits: tuple[str, ...]
    own: Float
    slow: tuple[Slow, ...]
    over: tuple[Slow, ...]
    unlike: Slow | None
    least_ns: float


def split_words(name: str) -> set[str]:
    """The words of a phase's name: ``allReduce_wait`` has ``all``, ``reduce``, ``wait``."""
    parts = re.findall(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])", name)
    return {part.lower() for part in parts} | {name.lower()}


def _is(name: str, kinds: Sequence[str]) -> bool:
    return not split_words(name).isdisjoint(kinds)


def kind_of(phase: str) -> str:
    """The kind of a finding on a rank that spends its time in this phase."""
    if _is(phase, LOADING):
        return "data_loading"
    if _is(phase, COLLECTING):
        return "gc_pause"
    return "kernel_issue_stall" if _is(phase, ON_HOST) else "compute_straggler"


def is_communication(phase: str) -> bool:
    """Whether a phase is transfers between ranks, by its name."""
    return _is(phase, COMMUNICATING)


def _scatter(values: Float) -> float:
    return mad(values[np.isfinite(values)])


def waiting_phases(timers: Timers) -> tuple[str, ...]:
    """Phases whose timer contains the wait for other ranks.

    A rank that loads its batch for 5 ms longer than the others waits 5 ms less for them: the slope of each phase on the
    ranks' own time on the host, over ranks and steps, shows what takes up the difference. Where no such phase is logged
    or it hardly varies, it is whatever grows when the step of most ranks does, unless the others wait for it elsewhere.
    Where that shows nothing either, it is computing. What is called waiting or communication is taken at its word.
    """
    host = [name for name in timers.phases if _is(name, LOADING + COLLECTING + ON_HOST)]
    # Losses are averaged while they are logged, batches are broadcast: the wait may be in any of them.
    next_step = [name for name in timers.phases if _takes_up_last_step(timers, name)]
    awaiting = {name for name in host if name in next_step or _takes_up_all(timers, name)}
    awaiting = awaiting.union(*(_in_turn(timers, name, host) for name in host))
    host = [name for name in host if name not in awaiting]
    rest = [name for name in timers.phases if name not in host]
    named = [name for name in rest if _is(name, WAITING) or name in awaiting]
    late = np.zeros_like(timers.step) + sum(timers.phases[name] for name in host)
    growth = np.diff(np.nanmedian(timers.step, axis=0))
    waiting: list[str] = []
    guessed: list[str] = []
    for name in rest:
        # Neighbouring steps are compared: a fault that lasts is one long step among many.
        taken, error = _slope(np.diff(_centered(late), axis=1), -np.diff(_centered(timers.phases[name]), axis=1))
        if error > PRECISE and name not in named and _is_waited_for(timers, name, named):
            continue
        if error > PRECISE:
            taken, error = _slope(growth, np.diff(np.nanmedian(timers.phases[name], axis=0)))
        if taken >= TAKES and taken >= ERRORS * error:
            waiting.append(name)
        elif error > PRECISE and _is(name, COMPUTING):
            guessed.append(name)
    waiting = waiting or [name for name in next_step if name in rest] or guessed
    return tuple(sorted({*waiting, *named}))


def _takes_up_all(timers: Timers, name: str) -> bool:
    """Whether a timer is shorter on a rank by what each of its other timers is longer by, as only one that contains the
    wait for the others is: a rank's own times have nothing to do with one another.

    Two others at least must vary enough to show it, and must not be longer together: such two contain a wait
    themselves.
    """
    shorter = -np.diff(_centered(timers.phases[name]), axis=1)
    shown: list[Float] = []
    for other, spent in timers.phases.items():
        if other == name or not spent.any():
            continue
        longer = np.diff(_centered(spent), axis=1)
        taken, error = _slope(longer, shorter)
        if max(TAKES, ERRORS * error) <= taken <= MOST and (error <= PRECISE or len(longer) > 2):
            shown.append(longer)  # of two ranks each is what the other one is not: less is no proof
        elif error <= PRECISE and taken > -max(TAKES, ERRORS * error):
            return False
    return any(_slope(one, -other)[0] > -TAKES for one, other in combinations(shown, 2))


def _takes_up_last_step(timers: Timers, name: str) -> bool:
    """Whether a timer is shorter on a rank by what one of its timers was longer by in the step before, after the last
    wait there: only one that contains the wait for the others can be."""
    shorter = -np.diff(_centered(timers.phases[name]), axis=1)[:, 1:]
    for other, spent in timers.phases.items():
        if other == name or not spent.any():
            continue
        taken, error = _slope(np.diff(_centered(spent), axis=1)[:, :-1], shorter)
        if taken >= WAITED and error <= PRECISE:
            return True
    return False


def _in_turn(timers: Timers, name: str, host: Sequence[str]) -> set[str]:
    """Which of a timer of the host and another one contains the wait, where each takes up the other, for they are alone
    between two waits: the one that varies less on the rank that it is shortest on, for the last to come waits for
    nobody. Both, if that does not decide: nobody is blamed then. Empty: the other one does, or they are not so.

    Loaders are left out: their times may have a least one as well. So are timers that are long in single steps.
    """
    longer = np.diff(_centered(timers.phases[name]), axis=1)
    if not _is(name, ON_HOST) or np.nanmean(np.abs(longer) > SPIKE * _scatter(longer)) > NOW_AND_THEN:
        return set()
    least = _scatter(np.diff(np.nanmin(timers.phases[name], axis=0)))
    for other, spent in timers.phases.items():
        if other in host or _is(other, WAITING) or not spent.any():
            continue
        theirs = np.diff(_centered(spent), axis=1)
        slopes = (_slope(theirs, -longer), _slope(longer, -theirs))
        if all(taken >= WAITED and error <= PRECISE for taken, error in slopes):
            others = _scatter(np.diff(np.nanmin(spent, axis=0)))
            if least <= LEVEL * others:
                return {name}
            return {name, other} if others > LEVEL * least else set()
    return set()


def equal_on_all(timers: Timers) -> tuple[str, ...]:
    """Timers that change from step to step, and are equally long on all ranks in each: those that ranks leave together,
    and enter together. What one of them is slower by inside, all have."""
    found = []
    for name, spent in timers.phases.items():
        changes = _scatter(np.diff(np.nanmedian(spent, axis=0)))
        if changes > 0 and _scatter(_centered(spent)) <= EQUAL * changes:
            found.append(name)
    return tuple(found)


def hiding(waits: Sequence[str]) -> list[str]:
    """Timers that contain waiting, and computing too: what a rank computes longer there does not show."""
    return [name for name in waits if not _is(name, WAITING)]


def _is_waited_for(timers: Timers, name: str, named: Sequence[str]) -> bool:
    """Whether what a phase is longer by on one rank than on the others, these are longer by in the phases that are
    called waiting or communication: then it is a rank's own time, however much all ranks have in common."""
    if not named:
        return False
    waited = sum((timers.phases[each] for each in named), np.zeros_like(timers.step))
    taken, error = _slope(np.diff(_centered(timers.phases[name]), axis=1), -np.diff(_centered(waited), axis=1))
    return taken >= WAITED and error <= PRECISE


def _centered(values: Float) -> Float:
    """Off the middle of the ranks: of two, what one is longer by is half on either side."""
    seen = np.isfinite(values).any(axis=0)
    return np.asarray(values - np.nanmedian(np.where(seen, values, 0.0), axis=0, keepdims=True), np.float64)


def _deviation(values: Float) -> Float:
    """Off the median of the ranks, of an even number the faster one: of two ranks, and of a slow half, the other."""
    return np.asarray(values - low_median(values), np.float64)


def _slope(cause: Float, effect: Float) -> tuple[float, float]:
    """Least squares through the origin's median, and its standard error; outliers of the effect are clipped to those of
    the cause, for a long step of another reason shows nothing."""
    x, y = cause.ravel(), effect.ravel()
    seen = np.isfinite(x) & np.isfinite(y)
    x, y = x[seen], y[seen]
    if len(x) < MIN_STEPS:
        return 0.0, np.inf
    x, y = x - np.median(x), y - np.median(y)
    for _ in range(3):
        power = float(x @ x)
        if power <= 0:
            return 0.0, np.inf
        slope = float(x @ y) / power
        rest = y - slope * x
        limit = SPIKE * max(_scatter(rest), 1.0)
        kept = np.abs(rest) <= limit
        if kept.all() or kept.sum() < len(x) / 2:
            break
        x, y = x[kept], y[kept]
    return slope, float(np.std(rest)) / float(np.sqrt(power))


def compare(timers: Timers, threshold: float) -> Comparison:
    """Compares the ranks' own times.

    Args:
        timers: Of at least 2 ranks and 10 steps.
        threshold: Share of the step that counts; of a rank a fifth of it does.
    """
    waits = waiting_phases(timers)
    own = timers.step - sum((timers.phases[name] for name in waits), np.zeros_like(timers.step))
    late = _deviation(own)
    usual = float(np.nanmedian(timers.step[:, -max(RECENT_STEPS, len(timers.steps) // 2) :]))
    least = threshold / PART * float(np.nanmedian(timers.step))
    wander = _wander(late)
    slow_ranks = _changed(late, least, wander) or _standing(own, late, threshold * usual)
    slow: list[Slow] = []
    over: list[Slow] = []
    for one in slow_ranks:
        (slow if one.until == len(timers.steps) else over).append(one)
    small = LAST + LAST / len(timers.ranks)
    slow = [
        one for one in _alone(slow, own, threshold * usual) if one.last >= small or one.excess_ns >= threshold * usual
    ]
    taken = {place for one in slow for place in one.places}
    over = [one for one in over if not set(one.places) & taken] + _episodes(late, own, timers, threshold, taken)
    slow += _spiky(late, own, timers, threshold, taken, over)
    noise = _peer_scatter(late, wander, len(timers.steps) // 2)
    # The last of the others comes so much after a usual rank: less of a growth costs nothing.
    seen = late[:, ~np.isnan(late).all(axis=0)]
    last = float(np.median(np.nanmax(seen, axis=0) - np.nanmedian(seen, axis=0)))
    unlike = None if slow else _unlike(own, late, threshold * usual)
    return Comparison(waits, own, tuple(slow), tuple(over), unlike, max(least + last, WANDERS * noise) + MISSED * noise)


def _wander(late: Float) -> float:
    """Standard deviation of what own times wander by from block to block of steps, of a typical rank. Blocks of short
    logs are shorter and vary more, as times that wander do over longer ones."""
    steps = late.shape[1]
    block = BLOCK if steps >= 3 * BLOCK else max(1, steps // BLOCKS)
    edges = np.arange(0, steps - block + 1, block)
    levels = np.stack([_row_levels(late[:, a : a + block]) for a in edges.tolist()], axis=1)
    # Differences of neighbours: a change is in one of them.
    return float(np.nanmedian([_scatter(np.diff(row)) for row in levels])) / 2**0.5


def _row_levels(values: Float) -> Float:
    """Median of each row; NaN of one that was not seen."""
    return np.where(np.isfinite(values).any(axis=1), row_medians(values), np.nan)


def _peer_scatter(late: Float, wander: float, since: int) -> float:
    """Standard deviation of what own times of healthy ranks change by from before a step to after it."""
    change = _row_levels(late[:, since:]) - _row_levels(late[:, :since])
    few = wander * float(np.sqrt(1 / max(1.0, since / BLOCK) + 1 / max(1.0, (late.shape[1] - since) / BLOCK)))
    return max(_scatter(change), few)


def _changed(late: Float, least: float, wander: float) -> list[Slow]:
    """Ranks whose own time grew at a step by more than those of healthy ranks wander."""
    changed = []
    for place, row in enumerate(late):
        seen = np.flatnonzero(np.isfinite(row))
        onset = _split(row[seen])
        if onset is None:
            continue
        here = row[seen]
        before = float(np.median(here[:onset]))
        after = float(np.median(here[onset:]))
        now = float(np.median(here[-max(MIN_STEPS, min(RECENT_STEPS, (len(here) - onset) // 2)) :]))
        grown = max(after, now) - before
        others = np.delete(late, place, axis=0)
        noise = _peer_scatter(others, wander, int(seen[onset])) if len(late) > FEW else 0.0
        noise = max(noise, _own_error(here, onset, wander))
        if grown < max(least, WANDERS * noise):
            continue
        # Ramps begin before the step that parts the two halves best.
        bar = before + min(grown / 2, max(least, 3 * _scatter(here[:onset])))
        since = _longest_end(here >= bar)
        if since > len(here) - MIN_STEPS or now - before < grown / 2:
            # The newest steps decide: an episode, if anything.
            continue
        held = float(np.mean(here[since:] >= before + grown / 2))
        began = int(seen[min(since, onset)]) if since >= MIN_STEPS else int(seen[onset])
        excess = float(np.median(here[since:]))
        changed.append(Slow((place,), began, late.shape[1], excess, before, 0.0, 0.0, False, held))
    return changed


def _split(row: Float) -> int | None:
    """Where a series parts best into a lower and a higher part: the greatest standardised rank sum (Pettitt 1979). Of
    fewer than 36 steps that is below 5 even in full order, which is enough there."""
    count = len(row)
    if count < 2 * MIN_STEPS:
        return None
    rank = np.empty(count)
    rank[np.argsort(row, kind="stable")] = np.arange(1.0, count + 1)
    at = np.arange(MIN_STEPS, count - MIN_STEPS + 1)
    below = at * (count + 1) / 2 - np.cumsum(rank)[at - 1]
    score = below / np.sqrt(at * (count - at) * (count + 1) / 12)
    best = int(np.argmax(score))
    in_order = 0.5 + below[best] / (at[best] * (count - at[best]))
    return int(at[best]) if score[best] >= WANDERS or in_order >= SEPARATE else None


def _own_error(row: Float, onset: int, wander: float) -> float:
    """Standard error of a growth: of two medians, and of what own times wander by."""
    error = 0.0
    for part in (row[:onset], row[onset:]):
        error += (MEDIAN * _scatter(part)) ** 2 / len(part) + wander**2 / max(1.0, len(part) / BLOCK)
    return float(np.sqrt(error))


def _longest_end(hit: NDArray[np.bool_]) -> int:
    sums = np.cumsum(np.where(hit, 1 - PERSISTENCE, -PERSISTENCE)[::-1])[::-1]
    return int(np.argmax(sums))


def _standing(own: Float, late: Float, least: float) -> list[Slow]:
    """Ranks that are far slower than all the others from the first step to the last."""
    count, steps = late.shape
    half = max(MIN_STEPS, steps // 2)
    seen: NDArray[np.bool_] = np.asarray(np.isfinite(late[:, -half:]).any(axis=1))
    level = np.array([np.nanmedian(row[-half:]) if there else -np.inf for row, there in zip(late, seen, strict=True)])
    order = np.argsort(-level, kind="stable")
    gaps = level[order[:-1]] - level[order[1:]]
    size = int(np.argmax(gaps[: max(1, count // FEW)])) + 1
    places = tuple(sorted(order[:size].tolist()))
    lead = lead_of(own[:, -half:], places, ())
    rest = level[order[size:]]
    spread = max(_scatter(rest), least / OUTLIER / 2)
    outlier = outlier_limit(ALPHA, count, OUTLIER)
    if not len(lead) or np.median(lead) < least or np.mean(lead > 0) < PERSISTENCE:
        return []
    ahead = np.nanmedian(own[list(places), -half:], axis=0) - np.nanmedian(np.delete(own, places, 0)[:, -half:], axis=0)
    ahead = ahead[np.isfinite(ahead)]
    if np.median(ahead) < CERTAIN * MEDIAN * _scatter(ahead) / np.sqrt(len(ahead)):
        return []
    if level[order[size - 1]] - float(np.median(rest)) < outlier * spread:
        return []
    held = float(np.mean(lead > least / 2))
    excess = float(np.median(level[list(places)]))
    return [Slow(places, 0, steps, excess, float("nan"), 0.0, 0.0, False, held)]


def _unlike(own: Float, late: Float, least: float) -> Slow | None:
    """The slower of two groups of ranks, parted where typical own times differ most, if it costs as much as counts."""
    steps = late.shape[1]
    half = max(MIN_STEPS, steps // 2)
    level = _row_levels(late[:, -half:])
    order = np.argsort(-np.where(np.isnan(level), -np.inf, level), kind="stable")[: int(np.isfinite(level).sum())]
    if len(order) < 2:
        return None
    size = int(np.argmax(level[order[:-1]] - level[order[1:]])) + 1
    places = tuple(sorted(order[:size].tolist()))
    lead = lead_of(own[:, -half:], places, ())
    before = lead_of(own[:, : steps - half], places, ())
    before = before if len(before) >= MIN_STEPS else lead
    if not len(lead) or min(np.median(lead), np.median(before)) < least:
        return None
    excess = float(np.median(level[list(places)]))
    return Slow(places, 0, steps, excess, float("nan"), _gain(lead), float(np.mean(lead > 0)), False, 1.0)


def lead_of(own: Float, places: Sequence[int], besides: Sequence[int]) -> Float:
    """How much longer the slowest of these ranks needs than the slowest of the others, but for those ``besides``, shape
    (steps in which both were seen,), ns."""
    inside, others = np.zeros(len(own), np.bool_), np.ones(len(own), np.bool_)
    inside[list(places)] = True
    others[[*places, *besides]] = False
    if not others.any():
        return np.empty(0)
    low = np.where(np.isfinite(own), own, -np.inf)
    lead = low[inside].max(axis=0) - low[others].max(axis=0)
    return np.asarray(lead[np.isfinite(lead)])


def _gain(lead: Float) -> float:
    """What others wait in an average step; single long steps are cut off."""
    return float(np.mean(np.clip(lead, 0.0, np.quantile(lead, 0.95)))) if len(lead) else 0.0


def _alone(slow: list[Slow], own: Float, least: float) -> list[Slow]:
    """The slowest rank, and others that cost as much as counts once it is well; each with what it costs."""
    kept: list[Slow] = []
    named: list[int] = []
    for one in sorted(slow, key=lambda each: -each.excess_ns):
        if kept and one.excess_ns < least:
            continue
        lead = lead_of(own[:, one.since :], one.places, named)
        # One that another hides is as far ahead of those who are well.
        rest = [place for other in slow if other is not one for place in other.places]
        lead = lead if not kept else lead_of(own[:, one.since :], one.places, rest)
        past = lead_of(own[:, : one.since], one.places, rest)
        cost = max(0.0, _gain(lead) - (_gain(past) if len(past) >= MIN_STEPS else 0.0))
        last = float(np.mean(lead > 0)) if len(lead) else 0.0
        named += one.places
        kept.append(_with(one, cost, last))
    # Those that became slow together are one event.
    together: list[Slow] = []
    for one in kept:
        twin = next((k for k, other in enumerate(together) if abs(other.since - one.since) < MIN_STEPS), None)
        if twin is None:
            together.append(one)
            continue
        other = together[twin]
        both = tuple(sorted(other.places + one.places))
        lead = lead_of(own[:, other.since :], both, ())
        cost, last = max(other.cost_ns, one.cost_ns, _gain(lead)), float(np.mean(lead > 0)) if len(lead) else 0.0
        together[twin] = Slow(both, other.since, other.until, min(other.excess_ns, one.excess_ns), other.before_ns,
                              cost, last, False, min(other.confidence, one.confidence))  # fmt: skip
    return together


def _with(one: Slow, cost_ns: float, last: float) -> Slow:
    return Slow(one.places, one.since, one.until, one.excess_ns, one.before_ns, cost_ns, last, one.jitter,
                one.confidence)  # fmt: skip


def part(one: Slow, own: Float, groups: Sequence[Sequence[int]]) -> list[Slow]:
    """Ranks that are slow in the same steps, by reason. What they cost together is shared out as each is ahead of the
    ranks that are well: one that is well again gains nothing where the others of them are as slow.

    Args:
        one: All of them.
        own: What each rank needs for itself, shape (ranks, steps), ns.
        groups: Places of those with the same reason.
    """
    late, during = _deviation(own), slice(one.since, one.until)
    ahead = []
    for places in groups:
        ahead.append(_gain(lead_of(own[:, during], places, [each for each in one.places if each not in places])))
    parts = []
    for places, gain in zip(groups, ahead, strict=True):
        here = list(places)
        excess = float(np.nanmedian(late[here, during]))
        before = one.before_ns if np.isnan(one.before_ns) else float(np.nanmedian(late[here, : one.since]))
        lead = lead_of(own[:, during], places, ())
        parts.append(Slow(
            tuple(places), one.since, one.until, excess, before, one.cost_ns * gain / max(sum(ahead), 1.0),
            float(np.mean(lead > 0)) if len(lead) else 0.0, False, one.confidence,
            tuple(each for each in one.places if each not in places),
        ))  # fmt: skip
    return parts


def _episodes(late: Float, own: Float, timers: Timers, threshold: float, taken: set[int]) -> list[Slow]:
    """Ranks that were slow for a while, the longest while of each."""
    episodes = []
    least = threshold * float(np.nanmedian(timers.step))
    for place, row in enumerate(late):
        seen = np.flatnonzero(np.isfinite(row))
        if place in taken or len(seen) < 2 * MIN_STEPS:
            continue
        # As it is now: it may have been slow for longer than it has been well.
        here = row[seen] - np.median(row[seen][-RECENT_STEPS:])
        scatter = _scatter(np.diff(here)) / 2**0.5
        episode = find_episode(here >= max(least, WANDERS * scatter), LEAST_EPISODE)
        if episode is None or episode[1] == len(seen):
            continue
        first, end = int(seen[episode[0]]), int(seen[episode[1] - 1]) + 1
        lead = lead_of(own[:, first:end], (place,), sorted(taken))
        cost = float(np.sum(np.clip(lead, 0.0, None)))
        if cost < least * LEAST_EPISODE:
            continue
        episodes.append(Slow((place,), first, end, float(np.median(here[slice(*episode)])), float("nan"), cost,
                          float(np.mean(lead > 0)), False, 1.0))  # fmt: skip
    return sorted(episodes, key=lambda one: -one.cost_ns)


def _spiky(
    late: Float, own: Float, timers: Timers, threshold: float, taken: set[int], over: Sequence[Slow]
) -> list[Slow]:
    """The rank that has most of the single long steps that are one rank's: more than turns would give it, at a cost
    that counts, and still. Steps of episodes (``over``) are no single ones."""
    count, steps = late.shape
    usual = np.nanmedian(late, axis=1, keepdims=True)
    scatter = max(_scatter(late - usual), 1.0)
    limit = max(threshold * float(np.nanmedian(timers.step)), SPIKE * scatter)
    free = [place for place in range(count) if place not in taken]
    if len(free) < 2:
        return []
    spikes = np.zeros((count, steps), np.bool_)
    leads = np.zeros((count, steps))
    low = np.where(np.isfinite(own), own, -np.inf)[free]
    order = np.argsort(-low, axis=0)
    first, second = (np.take_along_axis(low, order[which : which + 1], 0)[0] for which in (0, 1))
    top = np.array(free)[order[0]]
    ahead = np.where(np.isfinite(second), first - second, 0.0)
    above = np.take_along_axis(late - usual, top[None], 0)[0]
    # Where many ranks are late in the same step, what they share is.
    many = np.sum((late - usual)[free] >= limit / 2, axis=0) > 1 + count // (2 * FEW)
    hit = np.isfinite(above) & (above >= limit) & (ahead >= np.maximum(limit, above) / 2) & ~many
    at = np.flatnonzero(hit)
    spikes[top[at], at], leads[top[at], at] = True, ahead[at]
    for one in over:
        for place in one.places:
            spikes[place, one.since : one.until], leads[place, one.since : one.until] = False, 0.0
    total = float(np.nansum(np.nanmedian(timers.step, axis=0)))
    place = int(np.argmax(leads.sum(axis=1)))
    # Short spikes that ranks have by turns do not clear a rank of long ones: those of a size are compared first.
    for some in (spikes & (leads >= SIZE * _typical_lead(leads[place])), spikes):
        hits = some.sum(axis=1)
        cost = float(leads[place][some[place]].sum())
        if hits[place] < LEAST_SPIKES or cost < threshold * total:
            continue
        if 4 * int(some[place, steps // 2 :].sum()) < hits[place]:
            continue
        if by_chance(int(hits[place]), int(hits.sum()), 1, len(free), windows=2) > ALPHA:
            continue
        since = int(np.argmax(some[place]))
        share = float(np.mean(some[place, since:]))
        excess = float(np.median(leads[place][some[place]]))
        sure = float(hits[place] / hits.sum())
        return [Slow((place,), since, steps, excess, float("nan"), cost / max(steps - since, 1), share, True, sure)]
    return []


def _typical_lead(leads: Float) -> float:
    """A lead that half of the time lost is lost in leads of at least; 0: there is none."""
    ordered = np.sort(leads)
    lost = np.cumsum(ordered)
    return float(ordered[np.searchsorted(lost, lost[-1] / 2)])


def leads_of(own: Float) -> tuple[Int, Float]:
    """Of each step the rank whose own time is furthest above its usual one, and by how much more than any other's.

    Args:
        own: Shape (ranks, steps), ns, of 2 ranks at least; NaN: not seen.

    Returns:
        Places of the ranks, shape (steps,), and leads, ns; 0 where fewer than two ranks were seen.
    """
    above = own - row_medians(own)[:, None]
    above = np.where(np.isfinite(above), above, -np.inf)
    order = np.argsort(-above, axis=0, kind="stable")
    first, second = (np.take_along_axis(above, order[which : which + 1], 0)[0] for which in (0, 1))
    seen = np.isfinite(second)
    return order[0], np.where(seen, np.where(seen, first, 0.0) - np.where(seen, second, 0.0), 0.0)
