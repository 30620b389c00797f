"""Time lost in a few steps: the typical step is fine, and the job is slow all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import ALIKE_TIMES, MIN_STEPS, Case, Logged, evidence
from argus.diagnose.causes import lost_time
from argus.diagnose.causes.contention import explain_jitter
from argus.diagnose.causes.cpu_time import attribute, refine
from argus.diagnose.causes.crowded import explain_crowded_jitter
from argus.diagnose.ranks.lateness import ALPHA, RECENT_STEPS, by_chance
from argus.diagnose.ranks.slow_gpus import LEAST_SHARE
from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.query import runnable_sql
from argus.diagnose.suspect import StepTime, Suspect
from argus.diagnose.verdict import Evidence
from argus.model.statistics import row_medians
from argus.model.units import duration

WINDOW = 200
"""Newest steps looked at: a stall in one step of 50 comes four times."""
OUTLIER = 1.5
"""Steps this much longer than the median count as stalled. Healthy steps on a busy machine stay below 1.35 (the fake
GPU's job on two shared cores)."""
SCATTER = 8.0
"""Where the GPUs' own times show whose stalls are: steps this many standard deviations over the typical one count,
too, if that is less; but no less than the threshold."""
QUARTER_TO_LOW, QUARTER_TO_MIDDLE = 0.970, 0.674
"""Standard deviations between quantiles 0.05 and 0.25, and 0.25 and 0.5, of normal values."""
LONGEST_STALL = 5
"""More stalled steps in a row are an episode, which the comparison of ranks decides."""
LEAST_LEVEL = RECENT_STEPS
"""So many longer steps in a row are a level of their own, which stalls stand out from as from the usual one. Where no
more than :data:`FEW_STEPS` are known of the GPUs, which show whose stalls they are, fewer in a row are stalls, unless
the rank has recovered since (:func:`_since_recovery`)."""
NOBODY = -1
"""In place of a rank: none alone was late."""
LEAST_STALLS = 3
"""One or two long steps may be a checkpoint or an evaluation: noted, without naming a rank."""
FEW_STALLS, FEW_STEPS, FEW_COST = 2, 20, 2.0
"""Two within so many steps are more often than either: where the GPUs' own times show that both are one rank's, and
they cost so many times the threshold, it is named."""
ALPHA_OWN = 0.02
"""Chance that the stalls of ranks by turns all hit one, where the GPUs' own times show whose they are: that stalls cost
so much at all is rarer in healthy jobs. (The last to come is somebody in any long step.)"""
ALPHA_FEW = 0.15
"""The same for :data:`FEW_STALLS`: two are on one of 8 ranks by chance in one of 8 jobs that have just two, which are
rare. The confidence shows it."""
CPU_LATE = " (its GPU had nothing to do: its CPU was late)"
SAME_RANK = 0.6
"""Share of the stalled steps in which one rank must have been the last, to be named. With less it is named where its
own stalls alone cost the threshold and :data:`argus.diagnose.ranks.lateness.ALPHA` leaves no doubt, or where so many
are among the longest stalls, half as long as the longest of all or more: that others have some, too, does not make it
well."""


def detect(case: Case) -> list[Suspect]:
    """Steps that took much longer than the others, time and again, because of one rank. Long steps that are too few, or
    of too many ranks, to name one become a note."""
    for window in _since_recovery(case, list(_stalled_steps(case))):
        if not window.stalled.any():
            continue
        if suspects := _suspects(case, window):
            case.notes.long_steps = ""
            return suspects
    return []


def _since_recovery(case: Case, windows: list[_Window]) -> list[_Window]:
    """The windows without the slow steps in a row of a rank that has recovered since, which become a note.

    With few steps of the GPUs, many slow steps in a row count as stalls (:data:`LEAST_LEVEL`). They are over where
    :data:`MIN_STEPS` steps followed in which that rank alone made none longer.
    """
    window = next((one for one in windows if one.shown == queries.GPU_TIMES), None)
    if window is None or case.gpus is None:
        return windows
    first, end = max(_runs(window.stalled), key=lambda run: run[1] - run[0])
    if end - first <= LONGEST_STALL or len(window.numbers) - end < MIN_STEPS:
        return windows
    at = {**case.params, "first": int(window.numbers[0])}
    inside = np.arange(len(window.numbers))
    run = replace(window, stalled=(inside >= first) & (inside < end))
    latest = _latest(case, run, at)
    slow = _stalling_rank(case, run, latest, at) if latest.own else None
    if slow is None:
        return windows
    rest = replace(window, stalled=window.stalled & ~run.stalled)
    extra = dict(zip(window.numbers.tolist(), window.extra_ns.tolist(), strict=True))
    others = _slowest(case.gpus, rest.numbers[rest.stalled])
    if any(rank == slow.rank and lead >= extra[step] / 2 for step, (rank, lead, _) in others.items()):
        return windows
    lost_ns = float(np.sum(window.extra_ns[run.stalled]))
    begin, last = int(window.numbers[first]), int(window.numbers[end - 1])
    case.notes.recovered = (
        f"rank {slow.rank} held the job up in steps {begin} to {last}, by {duration(lost_ns / (end - first))} each "
        f"({lost_ns / float(np.sum(window.durations)):.0%} of the time), and no longer does"
    )
    # CPUs may see the end of it a step later.
    return [
        replace(one, stalled=one.stalled & ((one.numbers < begin) | (one.numbers > last + 1)))
        if one is not window
        else rest
        for one in windows
    ]


def _suspects(case: Case, window: _Window) -> list[Suspect]:
    lost_ns = float(np.sum(window.extra_ns[window.stalled]))
    total_ns = float(np.sum(window.durations))
    count = int(window.stalled.sum())
    share = lost_ns / total_ns
    small = share < case.threshold
    few = count < LEAST_STALLS
    if share < _least(case) or (few and small):
        return []
    what = (
        f"{count} of the newest {len(window.numbers)} steps took over {window.limit:.2g}x the typical time, and cost "
        f"{share:.0%}"
    )
    dense = len(case.numbers) <= FEW_STEPS and share >= FEW_COST * case.threshold
    often = count == FEW_STALLS and dense
    at = {**case.params, "first": int(window.numbers[0])}
    logged = case.notes.logged if _is_logged(case) else None
    latest = None
    if logged is not None:
        latest = _by_timers(case, logged, window, at)
    elif often or not few or case.gpus is not None:
        latest = _latest(case, window, at)
    stalling = _stalling_rank(case, window, latest, at, dense) if latest is not None and (often or not few) else None
    if stalling is None:
        if logged is not None and not few and not case.suspects and share >= FEW_COST * case.threshold:
            return [_of_nobody(case, logged, window, what)]
        if few:
            case.notes.long_steps = (
                f"{what} of the time{_whose(window, latest)}: a checkpoint, an evaluation, or a stall"
            )
        else:
            whose = "no single rank is behind it" if logged is None else _by_whom(logged, window)
            case.notes.long_steps = "" if small else f"{what} of the time; {whose}"
        return []
    shown = at if window.shown == queries.STEPS or case.gpus is None else case.gpus.window
    text = (
        f"{what} of the time: {duration(lost_ns / count)} each over a step of "
        f"{duration(float(np.median(window.usual)))}"
    )
    suspect = _suspect(case, window, stalling, [evidence(text, window.shown, shown), *stalling.evidence])
    if stalling.cpu_late:
        _explain_by_cpu(case, suspect, stalling)
    explain_jitter(case.query, case.params, suspect, min(len(case.numbers), WINDOW))
    if case.gpus is None:
        explain_crowded_jitter(case.query, case.params, suspect, case.hosts)
    return [suspect]


def _is_logged(case: Case) -> bool:
    """Whether all that is known are the times that a training loop of several ranks logged."""
    return case.notes.logged is not None and len(case.hosts) > 1


def _of_log(case: Case, window: _Window) -> _Window:
    """The window of a logged loop without its warm-up, and without the stalls of ranks that recovered, which are
    reported by themselves."""
    if not _is_logged(case) or case.notes.logged is None:
        return window
    if int(window.numbers[0]) == int(case.numbers[0]):
        window = _without_warm_up(window)
    stalled = window.stalled.copy()
    for first, last in case.notes.logged.episodes:
        stalled &= (window.numbers < first) | (window.numbers > last)
    return replace(window, stalled=stalled)


def _without_warm_up(window: _Window) -> _Window:
    """The window after the long steps that a log begins with, if it does."""
    warm = int(np.argmin(window.stalled))
    if not warm:
        return window
    return replace(
        window,
        numbers=window.numbers[warm:],
        durations=window.durations[warm:],
        usual=window.usual[warm:],
        stalled=window.stalled[warm:],
    )


def _least(case: Case) -> float:
    """Share of the time from which stalls count: less where the GPUs' own times show whose they are."""
    return case.threshold if case.gpus is None else LEAST_SHARE


@dataclass(frozen=True)
class _Window:
    """The newest steps since stalls began.

    Attributes:
        numbers, durations: Of the steps, shape (steps,).
        usual: What each takes if it is no stall, ns.
        stalled: Which are stalls.
        limit: How many times as long as usual those are at least.
        newest_ns: What the newest step takes if it is no stall.
        shown: The query that shows them.
    """

    numbers: NDArray[np.int64]
    durations: NDArray[np.float64]
    usual: NDArray[np.float64]
    stalled: NDArray[np.bool_]
    limit: float
    newest_ns: float
    shown: str

    @property
    def extra_ns(self) -> NDArray[np.float64]:
        """What each step takes longer than usual, ns."""
        return self.durations - self.usual


def _stalled_steps(case: Case) -> Iterator[_Window]:
    """The newest steps since stalls began: as the CPUs took them, and as the GPUs did. A loop that never waits for its
    GPU runs ahead of it: its own steps show a stall late, or not at all."""
    for window in _since_stalls(case, case.numbers, case.durations, LONGEST_STALL, queries.STEPS):
        yield _of_log(case, window)
    if case.gpus is not None:
        took = row_medians(case.gpus.now.step.T)
        known = took > 0
        longest = LEAST_LEVEL - 1 if np.sum(known) <= FEW_STEPS else LONGEST_STALL
        yield from _since_stalls(case, case.gpus.now.steps[known], took[known], longest, queries.GPU_TIMES)


def _since_stalls(
    case: Case, numbers: NDArray[np.int64], durations: NDArray[np.float64], longest: int, shown: str
) -> Iterator[_Window]:
    numbers, durations = numbers[-WINDOW:], durations[-WINDOW:]
    if not len(numbers):
        return
    usual, stalled, limit = _stalls(durations, case.threshold, longest, of_gpus=case.gpus is not None)
    if not stalled.any():
        return
    since = 0
    if case.gpus is not None:
        # Since they began: half of what lies between two of them before the first.
        first, among = int(np.argmax(stalled)), int(stalled.sum())
        since = max(0, first - (len(stalled) - first) // among)
    yield _Window(numbers[since:], durations[since:], usual[since:], stalled[since:], limit, float(usual[-1]), shown)


@dataclass(frozen=True)
class _Latest:
    """Who was behind each stall.

    Attributes:
        by_step: Of each stalled step the rank, by how much it was later than any other, ns, and the step in which it
            was: this one or the one before.
        ranks: How many ranks it could have been.
        own: By the GPUs' own times.
        words: What the rank did, in words.
        sql: The query that shows it.
    """

    by_step: dict[int, tuple[int, float, int]]
    ranks: int
    own: bool
    words: str
    sql: str


def _latest(case: Case, window: _Window, at: dict[str, Any]) -> _Latest:
    """Who was behind each stall; of large jobs, of as many of the newest as can be read."""
    numbers, stalled, query = window.numbers, window.stalled, case.query
    if case.reach < len(numbers):
        newest = numbers[stalled][-max(LEAST_STALLS, case.reach // 2) :].tolist()
        parts = [query(queries.LAST, {**at, "first": max(step - 1, 0), "last": step}) for step in newest]
        last = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        stalled = stalled & np.isin(numbers, newest)
    else:
        last = query(queries.LAST, at)
    if case.gpus is not None and (own := _slowest(case.gpus, numbers[stalled])):
        words = "computed or did nothing for longer than others in"
        return _Latest(own, len(case.gpus.now.ranks), True, words, runnable_sql(queries.GPU_TIMES, case.gpus.window))
    steps, ranks, leads = (last[name].tolist() for name in ("step", "rank", "lead_ns"))
    seen = {int(step): (int(rank), lead, int(step)) for step, rank, lead in zip(steps, ranks, leads, strict=True)}
    # A rank that is late in a step makes that step long for itself, and the next one for those that did not wait for it
    # at once.
    by_step = {
        step: max((seen[near] for near in (step - 1, step) if near in seen), key=lambda row: row[1])
        for step in numbers[stalled].tolist()
        if step - 1 in seen or step in seen
    }
    # Whoever no GPU's own time names is one of those that came last in some step.
    many = len(np.unique(last["rank"]))
    return _Latest(by_step, many, False, "was the last to come in", runnable_sql(queries.LAST, at))


def _alone(logged: Logged, window: _Window) -> dict[int, tuple[int, float, int]]:
    """Of each stall the rank that alone was late for half of it at least, by its own time, by how much, ns, and the
    step; :data:`NOBODY`: none was."""
    leads = logged.leads or {}
    alone = {}
    for step, extra in zip(window.numbers[window.stalled].tolist(), window.extra_ns[window.stalled], strict=True):
        rank, lead = leads.get(step, (NOBODY, 0.0))
        alone[step] = (rank, lead, step) if lead >= extra / 2 else (NOBODY, 0.0, step)
    return alone


def _by_timers(case: Case, logged: Logged, window: _Window, at: dict[str, Any]) -> _Latest | None:
    """Who was behind each stall by the timers of a training loop; None: there are none, or they name ranks already."""
    if logged.leads is None or case.suspects:
        return None
    shown = runnable_sql(queries.PHASES_BY_RANK, at)
    return _Latest(_alone(logged, window), len(case.hosts), False, "alone was late in", shown)


def _by_whom(logged: Logged, window: _Window) -> str:
    """Whose the stalls of a training loop's own log are, a clause."""
    if logged.leads is None:
        return f"whose they are was not determined: {ALIKE_TIMES}"
    count = int(window.stalled.sum())
    ranks, times = np.unique([rank for rank, _, _ in _alone(logged, window).values()], return_counts=True)
    ranks, times = ranks[ranks != NOBODY], times[ranks != NOBODY]
    if not len(ranks):
        hidden = " by its own time; delays inside timers that contain the wait do not show"
        return "no single rank is behind it" + (hidden if logged.partial else "")
    order = np.argsort(-times, kind="stable")
    shares = [f"rank {ranks[each]} in {times[each]}" for each in order[:3].tolist()]
    listed = ", ".join(shares) + (", …" if len(ranks) > 3 else "")
    if times.max() <= count / 2 < times.sum():
        return f"they are of several ranks by turns: {listed} of {count}"
    return f"one rank alone was late in {times.sum()} of {count} ({listed}), whose the others are was not determined"


def _of_nobody(case: Case, logged: Logged, window: _Window, what: str) -> Suspect:
    """Long steps of a training loop's own log that no rank can be named for."""
    lost_ns = float(np.sum(window.extra_ns[window.stalled])) / len(window.numbers)
    mean_ns = float(np.mean(window.durations))
    text = f"{what} of the time; {_by_whom(logged, window)}"
    return Suspect(
        kind="jitter",
        ranks=[],
        hosts=[],
        since=int(window.numbers[np.argmax(window.stalled)]),
        last=case.last,
        lost_ns=lost_ns,
        slowdown=mean_ns / (mean_ns - lost_ns),
        confidence=0.7,
        level="iteration",
        evidence=[evidence(text, window.shown, {**case.params, "first": int(window.numbers[0])})],
        action="Find out what all ranks share in those steps: the file system and the network that data come from, "
        "evaluations, checkpoints, other jobs on the nodes.",
        effect=lambda step: StepTime(
            min(step.now_ns, window.newest_ns) + lost_ns, min(step.ideal_ns, mean_ns - lost_ns)
        ),
    )


def _whose(window: _Window, latest: _Latest | None) -> str:
    """Whose the stalls are that are too few to blame a rank, in words; empty: the GPUs' own times show no one rank."""
    if latest is None or not latest.own:
        return ""
    own = {rank for rank, _, _ in latest.by_step.values()}
    length = dict(zip(window.numbers.tolist(), window.extra_ns.tolist(), strict=True))
    clear = all(lead >= length[step] / 2 for step, (_, lead, _) in latest.by_step.items())
    if len(own) != 1 or not clear or len(latest.by_step) < int(window.stalled.sum()):
        return ""
    return f" (only rank {own.pop()} was slow in {'it' if len(latest.by_step) == 1 else 'them'})"


@dataclass(frozen=True)
class _StallingRank:
    """The rank behind stalls.

    Attributes:
        rank: It.
        since: Its first stall: the step in which it paused, which others may learn of in the next.
        lost_ns: What its stalls cost together.
        persistence: Part of the stalls that are its own.
        p_value: Chance of that.
        lead_ns: By how much it was later than the others in a typical one.
        cpu_late: Its GPU had nothing to do in them.
        loads_code: It compiled or loaded GPU code meanwhile.
        evidence: For it.
    """

    rank: int
    since: int
    lost_ns: float
    persistence: float
    p_value: float
    lead_ns: float
    cpu_late: bool
    loads_code: bool
    evidence: list[Evidence]


def _stalling_rank(
    case: Case, window: _Window, latest: _Latest, at: dict[str, Any], dense: bool = False
) -> _StallingRank | None:
    """The rank that is behind more stalls than chance allows; None: there is none. Of stalls that come often and cost
    much (``dense``), two or three of one rank alone are enough."""
    total_ns = float(np.sum(window.durations))
    length = dict(zip(window.numbers.tolist(), window.extra_ns.tolist(), strict=True))
    who = latest.by_step
    longest = max((length[step] for step in who), default=0.0)
    long = {step: row for step, row in who.items() if length[step] >= longest / 2}
    blur_ns = case.across.worst_ns if case.across is not None else 0
    # Short stalls that ranks have by turns may go with long ones of one rank: the longest are compared by themselves.
    for some, which in ((who, "of them"), (long, f"of the {len(long)} longest")):
        if not some or (some is long and not LEAST_STALLS <= len(long) < len(who)):
            continue
        candidates, times = np.unique([row[0] for row in some.values()], return_counts=True)
        hits, rank = int(times.max()), int(candidates[times.argmax()])
        persistence = hits / len(some)
        steps = [step for step, row in some.items() if row[0] == rank]
        lead = float(np.median([some[step][1] for step in steps]))
        cost = sum(length[step] for step in steps)
        p_value = by_chance(hits, len(some), 1, latest.ranks, windows=1 if some is who else 2)
        few = len(some) < LEAST_STALLS or (dense and hits == len(some) == LEAST_STALLS)
        chance = ALPHA if not latest.own else ALPHA_FEW if few else ALPHA_OWN
        often = persistence >= SAME_RANK and p_value <= chance
        often &= cost >= _least(case) * total_ns or some is who
        much = cost >= case.threshold * total_ns and p_value <= ALPHA
        if not (often or much) or lead < max(0.25 * cost / hits, blur_ns):
            continue
        side = ""
        if latest.own and case.gpus is not None:
            side = _side(case.gpus.now, rank, [some[step][2] for step in steps], lead)
        text = (
            f"rank {rank} {latest.words} {persistence:.0%} {which}, by {duration(lead)}{side}; "
            f"these cost {cost / total_ns:.0%} of the time"
        )
        cited: list[Evidence] = [{"text": text, "sql": latest.sql}]
        loading = case.query(queries.LOADING, at)
        spent = loading["loading_ns"][loading["rank"] == rank]
        loads_code = bool(len(spent) and float(spent[0]) >= 0.5 * cost)
        if loads_code:
            text = f"it spent {duration(float(spent[0]))} loading or compiling GPU code in that time"
            cited.append(evidence(text, queries.LOADING, at))
        since = min(some[step][2] for step in steps)
        return _StallingRank(rank, since, cost, persistence, p_value, lead, side == CPU_LATE, loads_code, cited)
    return None


def _suspect(case: Case, window: _Window, stalling: _StallingRank, cited: list[Evidence]) -> Suspect:
    name = f"rank {stalling.rank}"
    action = (
        f"Find what compiles or loads GPU code on {name} now and then: shapes that change, or a cache "
        "(TRITON_CACHE_DIR, CUDA_CACHE_PATH) that it cannot write."
        if stalling.loads_code
        else f"Find out what {name} does in those steps: checkpoints, evaluation, garbage collection, memory "
        "allocation, other processes on the node."
    )
    lost_ns = stalling.lost_ns / len(window.numbers)
    mean_ns = float(np.mean(window.durations))
    return Suspect(
        kind="jit_stall" if stalling.loads_code else "jitter",
        ranks=[stalling.rank],
        hosts=case.hosts_of([stalling.rank]),
        since=stalling.since,
        last=case.last,
        lost_ns=lost_ns,
        slowdown=1 / (1 - stalling.lost_ns / float(np.sum(window.durations))),
        confidence=stalling.persistence * (1 - stalling.p_value),
        level="iteration",
        evidence=cited,
        action=action,
        # Where half of the newest steps stall, their median is one.
        effect=lambda step: StepTime(
            min(step.now_ns, window.newest_ns) + lost_ns, min(step.ideal_ns, mean_ns - lost_ns)
        ),
    )


def _slowest(gpus: gpu_times.GpuWindow, steps: NDArray[np.int64]) -> dict[int, tuple[int, float, int]]:
    """Of each of these steps, or the one before, the rank that was slow itself, by how much more than any other, ns,
    and in which of the two; steps that nothing is known of are left out."""
    more = np.nan_to_num(gpu_times.by_step(gpus.now, gpus.mesh))
    by_step: dict[int, tuple[int, float, int]] = {}
    for step in steps.tolist():
        places = np.flatnonzero(np.isin(gpus.now.steps, (step - 1, step)))
        if not len(places) or len(more) < 2:
            continue
        ordered = np.sort(more[:, places], axis=0)
        lead = ordered[-1] - ordered[-2]
        best = int(places[lead.argmax()])
        rank = int(gpus.now.ranks[more[:, best].argmax()])
        by_step[step] = rank, float(lead.max()), int(gpus.now.steps[best])
    return by_step


def _side(now: gpu_times.GpuTimes, rank: int, steps: list[int], lead_ns: float) -> str:
    """Whether the GPU of a rank stalled or its CPU, in words: it computed, or had nothing to do, for longer than in its
    other steps by at least half of what the rank was late. Empty: neither did."""
    row, those = int(np.searchsorted(now.ranks, rank)), np.isin(now.steps, steps)
    if those.all():
        return ""
    parts = now.idle[row], now.compute[row]
    idle, compute = (float(np.nanmedian(part[those]) - np.nanmedian(part[~those])) for part in parts)
    if max(idle, compute) < lead_ns / 2:
        return ""
    return CPU_LATE if idle >= compute else " (its GPU took longer to compute)"


def _explain_by_cpu(case: Case, suspect: Suspect, stalling: _StallingRank) -> None:
    """Turns the stalls of a rank into ``data_loading``, or ``kernel_issue_stall`` with a phase, where it takes longer
    than the others before the copy of its batch in every step: a CPU that is ahead of its GPU makes up for most of
    that."""
    others = lost_time.some([rank for rank in case.hosts if rank != stalling.rank])
    at = {**case.params, "first": stalling.since, "last": case.last, "ranks": [stalling.rank, *others]}
    late = (stalling.rank,)
    by_calls = attribute(case.query(queries.CPU_TIME, at), late, stalling.lead_ns)
    cause = refine(by_calls, case.query(queries.PHASE_TIME, at), late, stalling.lead_ns)
    if "data_loading" not in (by_calls.kind, cause.kind):
        return
    where = f"rank {stalling.rank}"
    suspect.kind, suspect.phase, suspect.level = cause.kind, cause.phase or "data_loading", "phase"
    suspect.evidence.append(evidence(cause.text, queries.CPU_TIME if cause is by_calls else queries.PHASE_TIME, at))
    suspect.action = (
        f"Look at the data loader of {where}: its workers, prefetching, and the disk or network it reads from."
        if cause.kind == "data_loading"
        else lost_time.cpu_action(where, cause.phase)
    )


def _stalls(
    durations: NDArray[np.float64], threshold: float, longest: int, *, of_gpus: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_], float]:
    """What each step takes if it is no stall, ns; which are, ``longest`` in a row; and how much longer than usual the
    latter are at least."""
    typical, limit = _usual(durations, threshold, of_gpus=of_gpus)
    usual, longer = np.full(len(durations), typical), durations > limit * typical
    for begin, end in _runs(longer):
        if end - begin >= LEAST_LEVEL:
            own, most = _usual(durations[begin:end], threshold, of_gpus=of_gpus)
            usual[begin:end], longer[begin:end] = own, durations[begin:end] > most * own
    return usual, _isolated(longer, longest), limit


def _usual(durations: NDArray[np.float64], threshold: float, *, of_gpus: bool) -> tuple[float, float]:
    """A typical step, ns, and how many times as long a stall is at least."""
    typical = float(np.median(durations))
    if not of_gpus:
        return typical, OUTLIER
    # In pipelines a stall makes two steps long: up to half of them may be, and the rest shows what is usual. Of a few
    # steps two thirds may be.
    low, quarter = np.quantile(durations, [0.05, 0.25], method="lower")
    scatter = float(quarter - low) / QUARTER_TO_LOW
    typical = float(min(typical, quarter + QUARTER_TO_MIDDLE * scatter))
    return typical, 1 + float(np.clip(SCATTER * scatter / typical, threshold, OUTLIER - 1))


def _runs(those: NDArray[np.bool_]) -> list[list[int]]:
    """Where those in a row begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], those.astype(np.int8), [0]])))
    runs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return runs


def _isolated(stalled: NDArray[np.bool_], longest: int) -> NDArray[np.bool_]:
    """Stalled steps less those of which more than ``longest`` are in a row, shape (steps,)."""
    kept: NDArray[np.bool_] = stalled.copy()
    for begin, end in _runs(stalled):
        if end - begin > longest:
            kept[begin:end] = False
    return kept
