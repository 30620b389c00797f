"""Findings from timers that a training loop logged (``argus import iterations --phase``): what
:mod:`argus.diagnose.ranks.own_times` concludes, with its numbers and the queries behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import UNKNOWN_HOST, Logged
from argus.diagnose.iteration.stalls import WINDOW
from argus.diagnose.iteration.step_times import MAX_RECOVERED, UNKNOWN_CAUSE
from argus.diagnose.ranks.lateness import RECENT_STEPS
from argus.diagnose.ranks.own_times import (
    MIN_STEPS,
    PART,
    Comparison,
    Slow,
    Timers,
    compare,
    equal_on_all,
    hiding,
    kind_of,
    leads_of,
    part,
)
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import StepTime, Suspect
from argus.diagnose.verdict import Evidence
from argus.model.ranks import Gaps
from argus.model.statistics import row_medians
from argus.model.units import duration, ranks_text

Float = NDArray[np.float64]

MOST_ROWS = 8_000_000
"""Phases that are read at once, 250 MB; of longer recordings the newest steps."""
SAME = 0.5
"""Ranks are slow for the same reason where a phase has this share of the most that any phase of theirs is longer by."""
UNTIMED = "other"
"""What is left of a step that no timer covers, as the import stores it."""


def slow_ranks(
    query: Query, params: Mapping[str, Any], hosts: Mapping[int, str], threshold: float, step_ns: float
) -> tuple[list[Suspect], Logged] | None:
    """Names the ranks that hold up the others.

    Args:
        query: Runs SQL.
        params: job, run, first and last (steps).
        hosts: Of each rank.
        threshold: Share of the step that counts.
        step_ns: Typical newest step time.

    Returns:
        The ranks, and what else the times show; None: no phases are logged, or of fewer than 2 ranks with 10 steps in
        common.
    """
    count = query(queries.LOGGED_PHASES, params)
    rows = int(count["n"][0]) if len(count["n"]) else 0
    if not rows:
        return None
    window = dict(params)
    if rows > MOST_ROWS:
        steps = params["last"] - params["first"] + 1
        window["first"] = params["last"] - max(2 * MIN_STEPS, int(steps * MOST_ROWS / rows)) + 1
    timers = read_timers(query(queries.STEP_TIMES, window), query(queries.ALL_PHASES, window))
    if len(timers.ranks) < 2 or len(timers.steps) < MIN_STEPS:
        return None
    comparison = compare(timers, threshold)
    slow = [one for together in comparison.slow for one in _by_phase(together, comparison, timers)]
    suspects = [_suspect(one, comparison, timers, window, hosts, threshold, step_ns) for one in slow]
    usual = float(np.nanmedian(timers.step))
    share = comparison.least_ns / usual
    least = f"a rank that needs less than {duration(comparison.least_ns)} ({share:.1%} of a step) more than it did"
    newest = float(np.nanmedian(timers.step[:, -RECENT_STEPS:]))
    note = "; ".join(filter(None, [_recovered(comparison, timers, newest), _constant(comparison, timers, newest)]))
    hidden = bool(hiding(comparison.waits))
    ranks, leads = leads_of(comparison.own[:, -WINDOW:])
    ahead = {
        int(step): (int(timers.ranks[place]), float(lead))
        for step, place, lead in zip(timers.steps[-WINDOW:], ranks, leads, strict=True)
    }
    now = {int(rank) for rank in timers.ranks[np.isfinite(timers.step[:, -MIN_STEPS:]).any(axis=1)]}
    unseen = Gaps(now, 0, max(hosts, default=0))
    episodes = tuple(
        (int(timers.steps[one.since]), int(timers.steps[one.until - 1])) for one in comparison.over[:MAX_RECOVERED]
    )
    return suspects, Logged(
        note, synchronous=True, least=least, partial=hidden, leads=ahead, waits=comparison.waits, episodes=episodes,
        equal=equal_on_all(timers), unseen=unseen,
    )  # fmt: skip


def read_timers(times: Mapping[str, NDArray[Any]], phases: Mapping[str, NDArray[Any]]) -> Timers:
    """Rows as matrices: ranks with 10 steps, and steps that more than half of them logged.

    Args:
        times: rank, step, duration_ns; in any order.
        phases: rank, step, phase, duration_ns; in any order.
    """
    ranks, rank = np.unique(times["rank"].astype(np.int64), return_inverse=True)
    steps, step = np.unique(times["step"].astype(np.int64), return_inverse=True)
    taken = np.full((len(ranks), len(steps)), np.nan)
    taken[rank, step] = times["duration_ns"]
    taken[~(taken > 0)] = np.nan
    common = np.isfinite(taken).sum(axis=0) * 2 > len(ranks)
    enough = np.isfinite(taken[:, common]).sum(axis=1) >= MIN_STEPS
    place = np.searchsorted(ranks, phases["rank"].astype(np.int64))
    at = np.searchsorted(steps, phases["step"].astype(np.int64))
    seen = (place < len(ranks)) & (at < len(steps))
    seen[seen] = (ranks[place[seen]] == phases["rank"][seen]) & (steps[at[seen]] == phases["step"][seen])
    names, name = np.unique(phases["phase"].astype(str), return_inverse=True)
    spent: dict[str, Float] = {}
    for number, phase in enumerate(names.tolist()):
        of_phase = seen & (name == number)
        matrix = np.where(np.isfinite(taken), 0.0, np.nan)
        matrix[place[of_phase], at[of_phase]] += phases["duration_ns"][of_phase]
        spent[phase] = matrix[enough][:, common]
    took = taken[enough][:, common]
    if len(names) and UNTIMED not in spent and took.size:
        # Steps are sums of timers: of ranks that wait for one another those of the slow one lack what none covers.
        spent[UNTIMED] = np.maximum(row_medians(took.T) - took, 0.0)
        took = took + spent[UNTIMED]
    return Timers(ranks[enough], steps[common], took, spent)


def _suspect(
    one: Slow,
    comparison: Comparison,
    timers: Timers,
    params: Mapping[str, Any],
    hosts: Mapping[int, str],
    threshold: float,
    step_ns: float,
) -> Suspect:
    numbers = [int(timers.ranks[place]) for place in one.places]
    name = ranks_text(numbers)
    verb, needs = ("waits", "needs") if len(numbers) == 1 else ("wait", "need")
    first, last = int(timers.steps[one.since]), int(timers.steps[one.until - 1])
    chosen = _steps_of(one, comparison, timers)
    slow, well = _members(one, timers)
    phase, because = _cause(one, comparison, timers, chosen)
    shown = runnable_sql(queries.PHASES_BY_RANK, {**params, "first": first, "last": last})
    usual, own = timers.step[:, chosen], comparison.own[:, chosen]
    effect = None
    cost = min(one.cost_ns, 0.95 * step_ns)
    if one.jitter:
        # A typical step has no part in it, or is one of the long ones: an average step has its part.
        step_ns = float(np.nanmean(np.nanmedian(timers.step[:, one.since : one.until], axis=0)))
        cost = min(one.cost_ns, 0.95 * step_ns)
        effect = partial(_on_average, step_ns, cost)
    where = "in those steps" if one.jitter else "a step"
    evidence: list[Evidence] = []
    if comparison.waits:
        contain, take = ("contains", "takes") if len(comparison.waits) == 1 else ("contain", "take")
        waits = sum((timers.phases[each][:, chosen] for each in comparison.waits), np.zeros_like(usual))
        text = (
            f"{name} {verb} least: {listed_phases(comparison.waits)}, which {contain} the wait for other ranks, {take} "
            f"{_typical(waits[slow])} {where}, on the others {_typical(waits[well])}; for itself it {needs} "
            f"{_typical(own[slow])}, the others {_typical(own[well])}"
        )
        evidence.append({"text": text if len(numbers) == 1 else text.replace("for itself it", "for themselves they"),
                         "sql": shown})  # fmt: skip
    else:
        text = f"{name} {needs} {_typical(own[slow])} {where}, the others {_typical(own[well])}"
        evidence.append({"text": text, "sql": shown})
    evidence.append({"text": because, "sql": shown})
    evidence.append({"text": _since(one, name, timers, first, step_ns), "sql": shown})
    kind = kind_of(phase)
    if kind == "compute_straggler" and (hidden := hiding(comparison.waits)):
        contain = "contains" if len(hidden) == 1 else "contain"
        text = (
            f"{listed_phases(hidden)} {contain} the wait: what {name} computes longer inside does not show, and costs "
        )
        evidence.append({"text": f"{text}more than this", "sql": shown})
    if one.jitter and kind != "gc_pause":
        # Collections are in some steps only by nature; whatever else is, is an event of its own.
        kind = "jitter"
    if kind == "compute_straggler" and one.cost_ns < threshold / PART * step_ns:
        kind = "masked_compute_straggler"
    names = list(dict.fromkeys(host for number in numbers if (host := hosts.get(number, UNKNOWN_HOST)) != UNKNOWN_HOST))
    return Suspect(
        kind=kind, ranks=numbers, hosts=names, since=first, last=last, phase=phase,
        slowdown=step_ns / (step_ns - cost), lost_ns=cost,
        confidence=one.confidence * (UNKNOWN_CAUSE if phase == UNTIMED else 1.0),
        level="phase", evidence=evidence, action=_action(kind, phase, name, names), effect=effect,
    )  # fmt: skip


def _on_average(mean_ns: float, cost_ns: float, step: StepTime) -> StepTime:
    """What single long steps do to the job's: they make the average one."""
    return StepTime(max(step.now_ns, mean_ns), min(step.ideal_ns, mean_ns - cost_ns))


def _steps_of(one: Slow, comparison: Comparison, timers: Timers) -> NDArray[np.int64]:
    """Places of the steps that a finding is on: of a spike those with the longest times of the rank."""
    steps = np.arange(one.since, one.until)
    if not one.jitter:
        return steps
    own = comparison.own[one.places[0], steps]
    usual = np.nanmedian(comparison.own[one.places[0]])
    return np.asarray(steps[np.nan_to_num(own - usual) >= one.excess_ns / 2])


def _members(one: Slow, timers: Timers) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which ranks a finding is on, and which it compares them with, shape (ranks,) each."""
    slow, well = np.zeros(len(timers.ranks), np.bool_), np.ones(len(timers.ranks), np.bool_)
    slow[list(one.places)] = True
    well[[*one.places, *one.beside]] = False
    return slow, well


def _by_phase(one: Slow, comparison: Comparison, timers: Timers) -> list[Slow]:
    """Ranks that became slow together, apart where it is not the same phase that takes longer: that of the slowest rank
    is the others' as well if they are longer in it by half of what they are longer in any (:data:`SAME`)."""
    if len(one.places) == 1 or one.jitter:
        return [one]
    chosen = _steps_of(one, comparison, timers)
    longer = {}
    for place in one.places:
        alone = replace(one, places=(place,), beside=tuple(each for each in one.places if each != place))
        longer[place] = _causes(alone, comparison, timers, chosen)
    rest = sorted(one.places, key=lambda place: -float(np.nanmedian(comparison.own[place, chosen])))
    groups: list[list[int]] = []
    while rest:
        phase = _longest(longer[rest[0]])
        same = [place for place in rest if longer[place][phase].more_ns >= SAME * _most(longer[place])]
        groups.append(sorted({rest[0], *same}))
        rest = [place for place in rest if place not in groups[-1]]
    return [one] if len(groups) == 1 else part(one, comparison.own, groups)


@dataclass(frozen=True)
class _Longer:
    """Attributes:
    more_ns: How much longer a phase takes than on the others, beyond what it did before.
    slow_ns, others_ns: What it takes.
    """

    more_ns: float
    slow_ns: float
    others_ns: float


def _longest(longer: Mapping[str, _Longer]) -> str:
    """The phase that takes longest beyond what the others need."""
    return max(longer, key=lambda phase: longer[phase].more_ns, default=UNTIMED)


def _most(longer: Mapping[str, _Longer]) -> float:
    return longer[_longest(longer)].more_ns if longer else 0.0


def _cause(one: Slow, comparison: Comparison, timers: Timers, chosen: NDArray[np.int64]) -> tuple[str, str]:
    """The phase that takes longer, and the sentence."""
    longer = _causes(one, comparison, timers, chosen)
    if not longer:
        return UNTIMED, "which timer covers it is not known"
    phase = _longest(longer)
    what = "outside all logged timers" if phase == UNTIMED else f"in {phase.replace('_', ' ')}"
    a_step = "" if one.jitter else " a step"
    spends = "it spends" if len(one.places) == 1 else "they spend"
    times = longer[phase]
    return phase, f"{spends} {duration(times.slow_ns)}{a_step} {what}, the others {duration(times.others_ns)}"


def _causes(one: Slow, comparison: Comparison, timers: Timers, chosen: NDArray[np.int64]) -> dict[str, _Longer]:
    """What each phase without waiting takes longer by. Where typical steps do not show what the others wait for, since
    about every other step is a slow one, averages do."""
    longer = _longer(one, comparison, timers, chosen, _middle)
    if _most(longer) < one.cost_ns / 2 and not one.jitter:
        average = _longer(one, comparison, timers, chosen, _average)
        if _most(average) >= one.cost_ns / 2:
            return average
    return longer


def _longer(
    one: Slow,
    comparison: Comparison,
    timers: Timers,
    chosen: NDArray[np.int64],
    middle: Callable[[Float], float],
) -> dict[str, _Longer]:
    """What each phase without waiting takes longer by, in typical steps or on average (``middle``)."""
    before = np.arange(one.since) if one.since >= MIN_STEPS and not one.jitter else np.empty(0, np.int64)
    slow, well = _members(one, timers)
    longer = {}
    for phase, spent in timers.phases.items():
        if phase in comparison.waits:
            continue
        slow_ns, others_ns = middle(spent[slow][:, chosen]), middle(spent[well][:, chosen])
        more = slow_ns - others_ns
        if len(before):
            # What ranks differed by before is no part of it.
            more -= middle(spent[slow][:, before]) - middle(spent[well][:, before])
        longer[phase] = _Longer(more, slow_ns, others_ns)
    return longer


def _since(one: Slow, name: str, timers: Timers, first: int, step_ns: float) -> str:
    it, them, needs = ("it", "it", "needs") if len(one.places) == 1 else ("one of them", "them", "they need")
    cost = f"the others wait {duration(one.cost_ns)} of {duration(step_ns)} a step for {them}"
    if one.beside:
        besides = ranks_text([int(timers.ranks[place]) for place in one.beside])
        cost += f" (a part: they wait for {besides} in the same steps)"
    if one.jitter:
        return f"in {one.last:.0%} of the steps since step {first} {name} alone is late; in an average step {cost}"
    last = f"{it} was last in {one.last:.0%} of the steps"
    if np.isnan(one.before_ns):
        return f"from the first step to the last {last}, and {cost}: a constant difference, not an event"
    return (
        f"since step {first} {last}, and {needs} {duration(one.excess_ns)} more than the median rank, before that "
        f"{duration(one.before_ns, signed=True)}; {cost}"
    )


def _recovered(comparison: Comparison, timers: Timers, usual: float) -> str:
    """A sentence on ranks that were slow for a while; empty: none was."""
    texts = []
    for one in comparison.over[:MAX_RECOVERED]:
        rank, steps = timers.ranks[one.places[0]], timers.steps[one.since : one.until]
        took = timers.step[one.places[0], one.since : one.until]
        most = float(np.nanmax(took)) / usual
        texts.append(
            f"rank {rank} was slow in steps {steps[0]} to {steps[-1]} (a step of up to {most:.2f}x, which cost the "
            f"others {duration(one.cost_ns)} in all), and no longer is"
        )
    return "; ".join(texts)


def _constant(comparison: Comparison, timers: Timers, usual: float) -> str:
    """A clause on ranks that are slower than others all along without standing out of them; empty: none are."""
    if (one := comparison.unlike) is None:
        return ""
    slow, well = _members(one, timers)
    name = ranks_text(timers.ranks[slow].tolist())
    needs, itself = ("needs", "itself") if len(one.places) == 1 else ("need", "themselves")
    _, because = _cause(one, comparison, timers, np.arange(one.until))
    return (
        f"ranks differ by a constant, from the first step to the last: {name} {needs} {_typical(comparison.own[slow])} "
        f"a step for {itself}, the others {_typical(comparison.own[well])} ({because}); if all should be alike, that "
        f"costs {duration(one.cost_ns)} of {duration(usual)}"
    )


def _action(kind: str, phase: str, name: str, hosts: list[str]) -> str:
    where = name + (f" on {', '.join(hosts[:4])}" if hosts else "")
    if kind == "data_loading":
        return f"See what the data loader of {where} reads from, its workers and prefetching."
    if kind == "gc_pause":
        return f"Call gc.freeze() after set-up, and collect on all ranks at the same step: {where} collects alone."
    if kind == "kernel_issue_stall":
        return f"See what the host of {where} does in {phase.replace('_', ' ')} that the others do not."
    if kind == "jitter":
        return f"See what {where} does in those steps: its data loader, garbage collection, what shares its node."
    untimed = " No timer covers it: log one around what is not timed." if phase == UNTIMED else ""
    return (
        f"Check the accelerator of {where} (clocks, temperature, ECC, what shares it), and what that rank does that "
        f"the others do not.{untimed}"
    )


def listed_phases(phases: Sequence[str]) -> str:
    """Timers in a sentence: communication, compute and what no timer covers."""
    names = [each.replace("_", " ") if each != UNTIMED else "what no timer covers" for each in phases]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _middle(values: Float) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else 0.0


def _average(values: Float) -> float:
    values = values[np.isfinite(values)]
    return float(np.mean(values)) if len(values) else 0.0


def _typical(values: Float) -> str:
    return duration(_middle(values))
