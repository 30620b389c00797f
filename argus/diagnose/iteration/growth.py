"""Steps that became longer on nearly all ranks: a regression, unless more work, Argus itself, or ranks that others wait
for explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import MIN_STEPS, WAITED_FOR, Case, evidence
from argus.diagnose.causes.crowded import find_crowd, find_increase
from argus.diagnose.iteration import logged_growth, short
from argus.diagnose.iteration.regression import (
    VARIES,
    Regression,
    find_growth,
    find_regression,
    find_rise,
    more_to_do,
    without_work,
)
from argus.diagnose.iteration.shift import ALONE, Shift, explain
from argus.diagnose.kernels import issue_latency
from argus.diagnose.kernels.slower import slower_kernels
from argus.diagnose.ranks import slow_gpus
from argus.diagnose.read import queries
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Evidence
from argus.model.statistics import median_deviation
from argus.model.units import duration, seconds

MEASURES = ("launches", "collective calls", "bytes of collectives")
"""What :data:`argus.diagnose.read.queries.WORK` measures, in words."""
WORKERS = 4
"""Ranks whose work is compared."""
SETTLED_NS = 10_000_000_000
"""So long must steps without a GPU be longer where other programs keep the CPUs busy throughout: schedulers move
threads between shared cores, and one whose sibling computes is up to half as fast for a while (seen: 0.7 s)."""
LEAST_PART = 0.2
"""Part of the growth that a rank's own time shows at least, if that rank is the reason: a forward pass is a quarter of
a step, and its backward pass contains the wait."""


def detect(case: Case) -> list[Suspect]:
    """The regression that the newest steps are in. A slow GPU that nobody seems to wait for, and that is slow since
    then, is what it is: that one is reported in its own place."""
    suspects = case.suspects_of(*WAITED_FOR)
    confirmed = None if case.gpus is None or suspects else partial(slow_gpus.all_grown, case.gpus)
    regression, more_work = _regression(case, has_suspects=bool(suspects), confirmed=confirmed)
    case.notes.more_work = more_work
    if regression is None or _explained(case, suspects, regression):
        return []
    onset = int(case.numbers[regression.index])
    if (slower := _slower(case, onset)) is None:
        return []
    if (rank := _partly_timed(case, regression)) is not None:
        return [_in_full(case, rank, regression)]
    if (gpu := _behind(case, suspects, regression)) is not None:
        return [_unmasked(case, gpu, regression)]
    suspect, no_fault = _all_slower(case, regression, slower)
    case.notes.more_work = "; ".join(filter(None, [more_work, no_fault]))
    return [] if suspect is None else [suspect]


def _regression(
    case: Case, *, has_suspects: bool, confirmed: Callable[[int], bool] | None
) -> tuple[Regression | None, str]:
    """The regression that the newest steps are in, and that their work does not explain; or a sentence on the work.

    Args:
        case: The job.
        has_suspects: Ranks or links are suspects, and their work is not compared.
        confirmed: Whether, by the GPUs' own times, all compute longer from a step on than at first; None: unknown.
            Small slowdowns count if they are confirmed.
    """
    numbers, durations = case.numbers, case.durations

    def find(durations: NDArray[np.float64]) -> Regression | None:
        # Of ranks that were found since when is known: what came gradually is looked for where nobody was.
        change = find_regression(durations) if has_suspects else find_growth(durations)
        if case.gpus is not None and (change is not None or not has_suspects):
            # With fewer than ten steps on a side the rule of ten puts a change too far from that end.
            sharp = short.regression(case.gpus, numbers, durations)
            if sharp is not None and (change is None or min(sharp.index, len(numbers) - sharp.index) < MIN_STEPS):
                return sharp
        if change is None and confirmed is not None:
            change = find_regression(durations, least=case.threshold)
            if change is not None and not confirmed(int(numbers[change.index])):
                return None
        return change

    change = find(durations)
    if has_suspects:
        return change, ""
    median = float(np.median(durations))
    if change is None and median_deviation(durations, median) < VARIES * median:
        return None, ""
    ranks = sorted(case.hosts)[:: max(1, len(case.hosts) // WORKERS)][:WORKERS]
    rows = case.query(queries.WORK, {**case.params, "ranks": ranks})
    work = work_of(rows, numbers)
    if not np.isfinite(work).any():
        return change, ""
    if change is not None and (more := more_to_do(change, work)) is not None:
        which, factor = more
        case.notes.more_work_since = int(numbers[change.index])
        text = (
            f"from step {numbers[change.index]} on a step takes {duration(change.after_ns)} instead of "
            f"{duration(change.before_ns)}"
        )
        return None, f"{text}, and has more to do: {factor:.2f} times as many {MEASURES[which]}"
    return find(without_work(durations, work)), ""


def work_of(rows: Mapping[str, NDArray[Any]], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """The measures of :data:`argus.diagnose.read.queries.WORK` by step, shape (steps, measures); NaN: not known."""
    work = np.full((len(numbers), len(MEASURES)), np.nan)
    if len(rows["step"]):
        at = np.minimum(np.searchsorted(numbers, rows["step"].astype(np.int64)), len(numbers) - 1)
        known = numbers[at] == rows["step"]
        for which, name in enumerate(("launches", "calls", "bytes")):
            values = rows[name][known].astype(np.float64)
            work[at[known], which] = np.where(values > 0, values, np.nan)
    return work


def _explained(case: Case, suspects: list[Suspect], regression: Regression) -> bool:
    """Whether steps became longer when others became slow, or since all wait for the ranks that logged times name: by
    half of the growth."""
    since = [suspect.since for suspect in suspects if suspect.lost_ns or suspect.detector == "late_ranks"]
    onsets = [int(np.searchsorted(case.numbers, step)) for step in since]
    if any(abs(place - regression.index) <= MIN_STEPS for place in onsets):
        return True
    if case.notes.logged is None or not case.notes.logged.synchronous:
        return False
    logged = case.suspects_of("logged_times")
    grown = regression.after_ns - regression.before_ns
    if any(suspect.kind == "jitter" for suspect in logged):
        # The typical step is one of a rank's long ones once these are the half of all.
        at = regression.index
        grown = min(grown, float(np.mean(case.durations[at:]) - np.mean(case.durations[:at])))
    return sum(suspect.lost_ns for suspect in logged) >= grown / 2


def _slower(case: Case, onset: int) -> float | None:
    """Share of ranks whose steps became longer, where it is nearly all of them."""
    rows = case.query(queries.SLOWER, {**case.params, "onset": onset})
    grown = rows["after_ns"] > 1.05 * rows["before_ns"]
    share = float(np.mean(grown)) if len(grown) else 0.0
    return share if share >= 0.9 else None


def _partly_timed(case: Case, regression: Regression) -> Suspect | None:
    """The one rank that became slow at the step since which all steps are longer, if its timers show a part of that:
    where the wait is inside a timer of computing, what the rank computes longer there does not show."""
    logged = case.notes.logged
    if logged is None or not logged.partial:
        return None
    slow = case.suspects_of("logged_times")
    if len(slow) != 1 or len(slow[0].ranks) != 1 or slow[0].kind == "jitter":
        return None
    place = int(np.searchsorted(case.numbers, slow[0].since))
    part = slow[0].lost_ns / (regression.after_ns - regression.before_ns)
    return slow[0] if abs(place - regression.index) <= MIN_STEPS and part >= LEAST_PART else None


def _in_full(case: Case, rank: Suspect, regression: Regression) -> Suspect:
    """A rank of which timers show a part, with all that it costs."""
    grown = regression.after_ns / regression.before_ns
    text = (
        f"since then a step takes {duration(regression.after_ns)} instead of {duration(regression.before_ns)}: what "
        "the rank takes longer inside timers that contain the wait does not show"
    )
    now = case.step.now_ns
    return replace(
        rank,
        kind="compute_straggler" if rank.kind == "masked_compute_straggler" else rank.kind,
        lost_ns=now - now / grown,
        slowdown=grown,
        cost=evidence(text, queries.SLOWER, {**case.params, "onset": int(case.numbers[regression.index])}),
        effect=lambda step: step.before(grown),
        replaces=(rank,),
    )


def _behind(case: Case, suspects: list[Suspect], regression: Regression) -> Suspect | None:
    """A slow GPU that nobody seems to wait for, and that is slow since all steps are longer."""
    for suspect in suspects:
        place = int(np.searchsorted(case.numbers, suspect.since))
        masked = suspect.detector == "slow_gpus" and suspect.kind == "masked_compute_straggler"
        if masked and abs(place - regression.index) <= MIN_STEPS:
            return suspect
    return None


def _unmasked(case: Case, gpu: Suspect, regression: Regression) -> Suspect:
    """A slow GPU that explains what the steps became longer by: though others have as much to do, the pipeline fills
    and empties more slowly."""
    grown = regression.after_ns / regression.before_ns
    text = f"since then a step takes {duration(regression.after_ns)} instead of {duration(regression.before_ns)}"
    now = case.step.now_ns
    onset = int(case.numbers[regression.index])
    return replace(
        gpu,
        kind="compute_straggler",
        lost_ns=now - now / grown,
        slowdown=grown,
        cost=evidence(text, queries.SLOWER, {**case.params, "onset": onset}),
        effect=lambda step: step.shorter(gpu.lost_ns).before(grown),
        replaces=(gpu,),
    )


def _all_slower(case: Case, change: Regression, slower: float) -> tuple[Suspect | None, str]:
    """Steps that became longer on nearly all ranks; or why that is no fault, a sentence without a full stop.

    Args:
        case: The job.
        change: Since when, and by how much.
        slower: Share of the ranks.
    """
    numbers, hosts, gpus = case.numbers, case.hosts, case.gpus is not None
    onset, last = int(numbers[change.index]), case.last
    grown = change.after_ns / change.before_ns
    some = sorted(hosts)[:: max(1, len(hosts) // issue_latency.RANKS)][: issue_latency.RANKS]
    shift = explain(case.query, case.params, some, (int(numbers[0]), onset, last), change.before_ns, change.after_ns)
    contended = False
    if not gpus and not shift.by_argus and not shift.taken:
        shift, contended = _crowded(case, shift, onset)
    longer = f"from step {onset} on a step takes {duration(change.after_ns)} instead of {duration(change.before_ns)}"
    since, when = onset, f"at step {onset}"
    if (rise := find_rise(case.durations, change.index)) is not None:
        since = int(numbers[rise[0]])
        until = f"to step {numbers[rise[1]]}" if rise[1] < len(numbers) - MIN_STEPS else "on"
        longer += f"; it grew gradually from step {since} {until}"
        when = f"from step {since} {until}"
    if shift.by_argus:
        return None, f"{longer}, when {shift.by_argus}: that is not a change of the job"
    if shift.unknown and not gpus:
        return None, f"{longer}; whether its threads wait for a free CPU is not known"
    if contended and (lasted := _lasted_ns(case, onset)) < SETTLED_NS:
        return None, (
            f"{longer}, for {seconds(lasted / 1e9)} so far, on CPUs that other programs keep busy before and since: "
            "too short to distinguish from their load"
        )
    if len(hosts) == 1 and not gpus and grown < 1 + ALONE:
        return None, f"{longer}, which on CPUs alone may be their clocks, caches or neighbours"
    timers = logged_growth.grown_phases(case, onset, change.after_ns - change.before_ns)
    text = f"{longer}, on {slower:.0%} of the ranks{logged_growth.whose(case, timers)}"
    if len(hosts) == 1:
        text = longer
    cited: list[Evidence] = [evidence(text, queries.SLOWER, {**case.params, "onset": onset})]
    if timers.evidence is not None:
        cited.append(timers.evidence)
    if min(change.index, len(numbers) - change.index) < MIN_STEPS:
        text = (
            f"only {change.index} steps before it and {len(numbers) - change.index} from then on were seen; the GPUs' "
            "own compute time grew at the same step"
        )
        cited.append(evidence(text, queries.GPU_TIMES, {**case.params, "last": last}))
    if shift.evidence is not None and shift.queued_ns > 0:
        cited.append(shift.evidence)
    kind, confidence, action = _kind(case, change, shift, onset, some, cited, timers.action(when))
    owner = timers.owner if kind == "regression" else ""
    if kind == "regression" and gpus:
        found = slower_kernels(case.query, case.params, onset, some, change.after_ns - change.before_ns)
        if found is not None:
            cited.append({"text": found[0], "sql": found[1]})
            owner, action = "infrastructure", _of_gpus(onset)
    now = case.step.now_ns
    return Suspect(
        kind=kind,
        ranks=[],
        hosts=list(dict.fromkeys(hosts.values())) if shift.taken else [],
        since=since,
        last=last,
        lost_ns=now - now / grown,
        slowdown=grown,
        confidence=confidence,
        level="iteration",
        phase=timers.phase if kind == "regression" else "",
        evidence=cited,
        action=action,
        effect=lambda step: step.before(grown),
        owner=owner,
    ), ""


def _of_gpus(onset: int) -> str:
    """What to do where the GPUs of all ranks became slower."""
    return (
        f"Check the GPUs of all nodes since step {onset}: clocks, a power or thermal limit, other programs on them "
        "(nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER; argus health -v). If they are well, see what changed "
        "in the inputs there."
    )


def _crowded(case: Case, shift: Shift, onset: int) -> tuple[Shift, bool]:
    """The shift, taken by other programs where they came to the nodes at that step, or take more of their CPUs since;
    and whether they keep the CPUs busy before it and since."""
    spans = ((int(case.numbers[0]), onset - 1), (onset, case.last))
    nodes = set(case.hosts.values())
    before, crowd = (
        find_crowd(case.query, {**case.params, "first": first, "last": last}, nodes) for first, last in spans
    )
    reason = crowd.evidence if crowd is not None and before is None else None
    if reason is None:
        reason = find_increase(case.query, case.params, nodes, spans)
    if reason is None:
        return shift, crowd is not None
    return replace(shift, evidence=reason, queued_ns=max(shift.queued_ns, 1.0), taken=True, unknown=False), False


def _lasted_ns(case: Case, onset: int) -> int:
    """How long the steps from one on have taken together, ns."""
    span = case.query(queries.SPAN_NS, {**case.params, "first": onset, "last": case.last})
    return int(span["end_ns"][0] - span["begin_ns"][0]) if len(span["end_ns"]) else 0


def _kind(
    case: Case, change: Regression, shift: Shift, onset: int, some: list[int], cited: list[Evidence], usual: str
) -> tuple[str, float, str]:
    """Kind, confidence and action of steps that became longer on all ranks; ``usual``: the action of a regression.
    Evidence on the CPUs is appended to ``cited``."""
    if shift.taken:
        certainty = min(1.0, 0.5 + shift.queued_ns / (change.after_ns - change.before_ns) / 2)
        where = ", ".join(list(dict.fromkeys(case.hosts.values()))[:4])
        action = (
            f"Find out what else runs on the CPUs of {where} since then (top -H), which CPUs the job may use (taskset "
            "-pc PID), and whether its control group is throttled (cpu.max, cpu.stat)."
        )
        return "host_contention", change.confidence * certainty, action
    behaved, sql = issue_latency.against_past(case.query, case.params, onset, some)
    if behaved is not None:
        cited.append({"text": behaved.text("the GPUs", "before"), "sql": sql})
    if behaved is not None and behaved.stalled:
        action = (
            f"Find out what changed on the CPUs of all ranks at step {onset}: synchronisation or timers that were "
            "added, garbage collection, checks in Python, smaller kernels."
        )
        return "kernel_issue_stall", change.confidence, action
    return "regression", change.confidence, usual
