"""From stored rows to a verdict on one run of one job.

Confidence of a straggler is (share of steps in which it was last) x (1 - chance that turns look so) x 0.7 where neither
CUDA calls nor phases were stored to tell its cause. Confidence of a regression is the share of (earlier, later) step
pairs that it orders.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import (
    balance,
    dumps,
    gpu,
    issue,
    links,
    node_health,
    operations,
    patterns,
    phase_times,
    rebuild,
    short,
    single_kernels,
    sql,
    step_times,
    whatif,
)
from argus.diagnose.activity import activities, describe
from argus.diagnose.ahead import Ahead
from argus.diagnose.breakdown import breakdown
from argus.diagnose.cause import (
    FLAT,
    HIDDEN_BACKWARD,
    Cause,
    attribute,
    attribute_by_phases,
    has_syncs,
    long_kernels,
    slow_kernels,
)
from argus.diagnose.contention import Seen, explain_jitter, look_closer
from argus.diagnose.crowded import SLOWED, find_crowd
from argus.diagnose.hang import HANG_S, PLACES_S, find_hang
from argus.diagnose.hosts import Hosts, align_hosts, prepare, spoken
from argus.diagnose.iteration import (
    SEPARATE,
    VARIES,
    Regression,
    find_growth,
    find_regression,
    least_growth,
    more_to_do,
    without_work,
)
from argus.diagnose.jitter import WINDOW as JITTER_STEPS
from argus.diagnose.jitter import find_jitter
from argus.diagnose.observed import on_cpus_alone
from argus.diagnose.peers import between_stages
from argus.diagnose.phase import (
    PERSISTENCE,
    RECENT_STEPS,
    WINDOWS,
    Lateness,
    Straggler,
    find_episode,
    find_onset,
    find_stragglers,
    lateness_of,
    lead_of,
)
from argus.diagnose.shift import ALONE, explain
from argus.diagnose.stacks import StackReader
from argus.diagnose.verdict import SCHEMA, Evidence, Finding, Status, Verdict, named, to_json
from argus.diagnose.whatif import Layout, Operations
from argus.errors import ArgusError
from argus.flags import Flag, flag
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

THRESHOLD = 0.05
"""Lost share of the step time from which a job counts as degraded. Below it lies what healthy clusters differ by:
StragglerAnalysis (OSDI '25) explains jobs only from a slowdown of 1.03 on, and calls them slow from 1.1."""
MIN_STEPS = 10
"""Fewer whole steps are not judged: the sign test cannot reach its certainty with two ranks."""
SURE_STEP = 0.8
"""Steps whose boundary is less sure than this (an evaluation among them, lost records) are left out."""
UNKNOWN_CAUSE = 0.7
CUT_OFF_S = 15.0
"""An open trace that has not written its counters for so long was killed, or could not store them (every 4 s else)."""
FLAGGED_NS = 5_000_000_000
"""How much of a running job's next moments is kept operation by operation once something was found, ns."""
FLAGGED_RANKS = 8
"""Of so many of the ranks found, and of some others."""
MOST_CALLS = 1_500_000
"""Collective calls that are compared at once: 1.4 s of CPU time of a query where cores are busy, and 150 MB. Of
larger jobs fewer of the newest steps are looked at (:data:`argus.diagnose.phase.WINDOWS` [0] at least), and since when
is found by halving."""
BLOCK = 10
"""Steps that are looked at to tell whether ranks were late before them."""
LIBRARIES = """
SELECT rank, max(length(libraries)) AS libraries FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""
"""How many libraries with probes each rank has loaded."""
NOTHING = "nothing to diagnose"
"""How the reason begins where a trace holds nothing that could be diagnosed."""
REFERENCES = 16
"""Other ranks that a straggler's CPU time is compared with: their median is steady from there on."""


@dataclass
class _Loss:
    straggler: Straggler
    onset: int
    """Step number."""
    last: int
    cause: Cause
    loss_ns: float
    grown_ns: float
    """What it may cost more: steps are longer than before the onset, or kernels take longer than on the others."""
    evidence: list[Evidence]
    phase: str
    kernels: list[str]
    action: str
    """Over what the kind of cause says; with a level of "stack" and a cause of another kind, in addition."""
    level: str


def diagnose(
    query: sql.Query,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    across: Hosts | None = None,
    stacks: StackReader | None = None,
    since_ns: int = 0,
    newest: int | None = None,
) -> Verdict:
    """Judges one run of one job.

    Args:
        query: Runs SQL with parameters, returns columns.
        job: The job.
        run: Its tracing session.
        steps: First and last step to look at; None: as stored.
        threshold: Lost share of the step time that counts.
        hang_after_s: Silence after the last step that counts as a hang, s.
        across: How the hosts of the job go together; None: it has one, or all have the same clock.
        stacks: Where threads were; None: nothing is known of them.
        since_ns: Only what came later, wall time.
        newest: Only so many of the newest steps; None: all.

    Returns:
        The verdict. What the job does now, in the newest of these steps, decides.
    """
    params: dict[str, Any] = {"job": job, "run": run, "since_ns": since_ns}
    if across is not None:
        query = sql.of_job(query)
        params |= across.params()
    with Ahead(query) as ahead:
        verdict = _diagnose(ahead, params, steps, threshold, hang_after_s, across, stacks, newest)
        if since_ns and verdict["status"] == "inconclusive" and steps[1] is None:
            # A job that hangs makes no steps: those before tell what it has not made since.
            before = {**params, "since_ns": 0}
            if int(ahead(sql.LAST_LOOK, before)["looked_ns"][0]) >= since_ns:
                last = _diagnose(ahead, before, steps, threshold, hang_after_s, across, stacks, RECENT_STEPS)
                return last if last["status"] == "hung" else verdict
        return verdict


def _diagnose(
    ahead: Ahead,
    params: dict[str, Any],
    steps: tuple[int | None, int | None],
    threshold: float,
    hang_after_s: float,
    across: Hosts | None,
    stacks: StackReader | None,
    newest: int | None,
) -> Verdict:
    """:func:`diagnose` with a query that can be begun before."""
    job, run, since_ns = params["job"], params["run"], params["since_ns"]
    for text in (sql.SPAN, sql.LAST_LOOK, sql.GROUPS, sql.STATES, sql.HOSTS):
        ahead.start(text, params)
    query = sql.remembered(ahead)
    verdict = Verdict(
        schema=SCHEMA,
        job=job,
        run=run,
        ranks=0,
        steps=[],
        status="inconclusive",
        slowdown=1.0,
        findings=[],
        coverage={"complete": True, "dropped": {}, "ended": True},
        reason="",
    )
    lost = query(sql.COVERAGE, params)
    dropped = {str(c): int(v) for c, v in zip(lost["counter"], lost["value"], strict=True) if v > 0}
    sessions = query(sql.SESSIONS, params)
    ended = not len(sessions["open"]) or int(sessions["open"][0]) == 0
    world_size = int(sessions["world_size"][0]) if len(sessions["world_size"]) else 0
    look = query(sql.LAST_LOOK, params)
    if not ended and int(look["now_ns"][0]) - int(look["looked_ns"][0]) > CUT_OFF_S * 1e9:
        dropped["trace_cut_off"] = 1
    verdict["coverage"] = {"complete": not dropped, "dropped": dropped, "ended": ended}
    span = query(sql.SPAN, params)
    if not len(span["n"]) or not int(span["n"][0]):
        if dumps.judge(query, params, verdict):
            return verdict
        verdict["reason"] = "no whole training step was seen" + (" since then" if since_ns else "")
        if not since_ns:
            verdict["reason"] = _without_steps(query, params, look) or verdict["reason"]
        return verdict
    params["first"] = int(span["first"][0]) if steps[0] is None else max(0, steps[0])
    params["last"] = int(span["last"][0]) if steps[1] is None else max(0, steps[1])
    if since_ns:
        params["first"] = max(params["first"], int(span["first"][0]))
    if newest is not None:
        params["first"] = max(params["first"], params["last"] - newest + 1)
    ahead.start(sql.STEPS, params)
    known = operations.read(query, params)
    if known is not None:
        _by_operations(verdict, query, params, known, threshold, world_size)
        return verdict
    series = query(sql.STEPS, params)
    sure = series["confidence"] >= SURE_STEP
    numbers = series["step"][sure].astype(np.int64)
    durations = series["duration_ns"][sure].astype(np.float64)
    verdict["ranks"] = int(series["ranks"].max(initial=0))
    if len(series["step"]):
        verdict["steps"] = [int(series["step"][0]), int(series["step"][-1])]
    if len(numbers) < MIN_STEPS:
        unsure = len(series["step"]) - len(numbers)
        verdict["reason"] = f"{len(numbers)} whole steps were seen, {MIN_STEPS} are needed" + (
            f" ({unsure} more had no sure boundary)" if unsure else ""
        )
        _by_few_steps(verdict, query, params, numbers, durations, across, threshold)
        return verdict

    doubt = ""
    if steps[1] is None:
        hang, doubt = find_hang(query, params, float(np.median(durations)), hang_after_s, stacks)
        if hang is not None:
            verdict["status"], verdict["slowdown"] = "hung", hang["slowdown"]
            verdict["findings"].append(hang)
            node_health.add(query, params, verdict["findings"], _hosts(query, params))
            return verdict

    # Calls of a step, of all ranks.
    calls = float(np.median(series["calls"][sure]) * verdict["ranks"])
    reach = int(np.clip(MOST_CALLS / max(calls, 1.0), WINDOWS[0], max(WINDOWS)))
    hosts = _hosts(query, params)
    for asked in gpu.windows(params, numbers, len(hosts)):
        ahead.start(sql.GPU_TIMES, asked)
    params["left_out"] = between_stages(query(sql.GROUPS, params), gpu.joined(across))
    ahead.start(sql.LATENESS, _newest(params, numbers, reach))
    for text, asked in links.newest(params, numbers, len(hosts)):
        ahead.start(text, asked)
    lateness, why_not = _lateness(query, params, numbers, reach)
    by_times = None
    if lateness is None and across is None:
        only = query(sql.ONLY_STEPS, params)
        if not int(only["calls"][0]) and not int(only["found"][0]):
            known_times = query, params, hosts, threshold, float(np.median(durations[-RECENT_STEPS:]))
            by_times = phase_times.judge(*known_times) or step_times.judge(*known_times)
            why_not = "" if by_times is not None else "step times of fewer than 2 ranks are stored, and nothing else"
    losses: list[_Loss] = []
    blurred = ""
    seen_gpus = gpu.read(query, params, numbers, len(hosts), across)
    stragglers: list[Straggler] = []
    if lateness is not None:
        at = np.searchsorted(numbers, lateness.steps)
        # Where only the forward is visible, a third of the loss is: the cause decides below. What GPUs' own times say
        # is looked at from less on.
        visible = threshold / (1 + HIDDEN_BACKWARD)
        least = visible if seen_gpus is None else min(visible, gpu.LEAST_SHARE)
        for straggler in find_stragglers(lateness, durations[at], least):
            mine, others = _places(straggler, lateness, hosts)
            error_ns = across.between(mine, others) if across is not None else 0
            narrowed = _narrowed(straggler, seen_gpus)
            # What its GPU does itself needs no clock.
            proven = narrowed is None or narrowed.own or narrowed.hidden
            if straggler.gain_ns <= error_ns and not (proven and seen_gpus is not None):
                if straggler.gain_ns < visible * float(np.median(durations[-straggler.window :])):
                    continue
                blurred = (
                    f"{named(straggler.ranks)} came {spoken(straggler.gain_ns)} after everybody else, "
                    f"less than the clocks of the hosts may differ by ({spoken(error_ns)})"
                )
                continue
            if narrowed is not None and (straggler.gain_ns > error_ns or narrowed.own):
                stragglers.append(narrowed)
    # Whose GPUs lose nothing costs nothing yet, and is told where nothing else is found.
    hidden = [straggler for straggler in stragglers if straggler.hidden]
    stragglers = [straggler for straggler in stragglers if not straggler.hidden]
    starved: list[gpu.SlowGpu | None] = [None] * len(stragglers)
    if seen_gpus is not None:
        least_ns = gpu.LEAST_SHARE * float(np.median(durations[-RECENT_STEPS:]))
        stragglers, starved = _kept_waiting(stragglers, seen_gpus, least_ns)
    slow_gpus = slow_links = list[Finding]()
    if seen_gpus is not None:
        slow_gpus = gpu.judge(seen_gpus, query, params, numbers, durations, hosts, threshold)
    staged = seen_gpus is not None and seen_gpus.mesh.staged
    for straggler, slow in zip(stragglers, starved, strict=True):
        begun = gpu.starved_since(seen_gpus, slow) if seen_gpus is not None and slow is not None else None
        if begun is None and _told_by_gpus(straggler, slow_gpus, staged=staged):
            # Unless its CPU is to blame it is not told, and since when it is late need not be found.
            slow_since = slow_gpus[0]["steps"][0]
            loss = _judge(query, params, straggler, slow_since, lateness, numbers, durations, stacks, seen_gpus)
            if loss.cause.kind == "compute_straggler":
                continue
        onset = _onset(query, params, straggler, lateness, numbers, calls) if begun is None else begun
        loss = _judge(query, params, straggler, onset, lateness, numbers, durations, stacks, seen_gpus)
        if begun is None and loss.straggler.ranks != straggler.ranks:
            # Together they come late for longer, if each of them does so only now and then.
            together = _onset(query, params, loss.straggler, lateness, numbers, calls)
            loss = replace(loss, onset=min(onset, together))
        if any(other.cause.kind == "host_contention" and set(loss.straggler.ranks) <= set(other.straggler.ranks)
               for other in losses):  # fmt: skip
            continue
        if across is not None and lateness is not None:
            mine, others = _places(straggler, lateness, hosts)
            if agreement := across.agreement(mine, others):
                loss.evidence.append({"text": agreement, "sql": sql.shown(sql.CLOCKS, params)})
        # What CPUs keep GPUs waiting for counts from the same share on, whichever of the two tells it first.
        waits = slow is not None or (straggler.own and loss.cause.kind != "compute_straggler")
        least = gpu.LEAST_SHARE if waits else threshold
        if loss.loss_ns + loss.grown_ns >= least * float(np.median(durations[-straggler.window :])):
            losses.append(loss)
    _share_out(losses)
    carried: links.Carried | None = None
    unburdened: links.Transfers | None = None
    if seen_gpus is not None:
        carried = links.read(seen_gpus, query, params, numbers, len(hosts), across)
        slow_links, unburdened = links.judge(seen_gpus, carried, numbers, durations, hosts)
    losses, slow_gpus = _united(losses, slow_gpus, staged=staged)
    slow_gpus += slow_links
    now = float(np.median(durations[-RECENT_STEPS:]))
    saved = min(sum(loss.loss_ns for loss in losses) + sum(finding["share"] for finding in slow_gpus), 0.95 * now)
    ideal = now - saved
    verdict["findings"] += slow_gpus
    if by_times is not None:
        verdict["findings"] += by_times.findings
        # Whoever waits for the slowest rank takes as long as it does.
        now *= by_times.slowest
        if by_times.synchronous:
            ideal = max(ideal - sum(finding["share"] for finding in by_times.findings), 0.05 * now)
    confirmed = None
    if seen_gpus is not None and not (losses or slow_gpus):
        confirmed = partial(gpu.all_grown, seen_gpus)
    regression, more_work = _regression(
        query, params, numbers, durations, hosts, threshold, blamed=bool(losses or slow_gpus), confirmed=confirmed
    )
    if regression is None and not more_work and seen_gpus is not None and not (losses or slow_gpus):
        regression = short.regression(seen_gpus, numbers, durations)
    if regression is not None:
        onset = int(numbers[regression.index])
        since = [loss.onset for loss in losses] + [finding["steps"][0] for finding in slow_gpus if finding["share"]]
        onsets = [int(np.searchsorted(numbers, step)) for step in since]
        explained = any(abs(place - regression.index) <= MIN_STEPS for place in onsets)
        explained = explained or _waited_for(by_times, regression)
        slower = None if explained else _slower(query, {**params, "onset": onset})
        if explained or slower is None:
            regression = None
        elif behind := _behind(slow_gpus, numbers, regression):
            ideal /= _unmask(behind, regression, now, sql.shown(sql.SLOWER, {**params, "onset": onset}))
            regression = None
        else:
            grown = regression.after_ns / regression.before_ns
            longer, no_fault = _all_slower(
                query, params, regression, numbers, hosts, now, slower, gpus=seen_gpus is not None
            )
            more_work = "; ".join(filter(None, [more_work, no_fault]))
            if longer is None:
                regression = None
            else:
                ideal /= grown
                verdict["findings"].append(longer)
    for loss in losses:
        verdict["findings"].append(_finding(loss, hosts, now, on_cpus=on_cpus_alone(query, params)))
    if seen_gpus is not None:
        named_ranks = {rank for finding in verdict["findings"] for rank in finding["ranks"]}
        odd_kernels = single_kernels.judge(
            query, params, seen_gpus.mesh, numbers, durations, hosts, threshold, named_ranks
        )
        verdict["findings"] += odd_kernels
        ideal -= sum(finding["share"] for finding in odd_kernels)
    if seen_gpus is not None and not verdict["findings"]:
        chunks = links.chunks(query, params, numbers) if seen_gpus.mesh.staged else 1
        layout = balance.judge(seen_gpus, query, params, numbers, durations, hosts, threshold, chunks=chunks)
        verdict["findings"] += layout
        ideal -= sum(finding["share"] for finding in layout)
    elif seen_gpus is not None and regression is not None and len(verdict["findings"]) == 1:
        # A layout that was not so before is what the regression is.
        layout = balance.judge(seen_gpus, query, params, numbers, durations, hosts, threshold, fresh=onset)
        if layout:
            layout[0]["evidence"] += verdict["findings"][0]["evidence"]
            verdict["findings"] = layout
    jitter, long_steps, calm_ns = find_jitter(
        query,
        params,
        numbers,
        durations,
        hosts,
        threshold,
        across.worst_ns if across is not None else 0,
        reach,
        seen_gpus,
    )
    if jitter is not None:
        explain_jitter(query, params, jitter, min(len(numbers), JITTER_STEPS))
        if seen_gpus is None:
            _crowded_jitter(query, params, jitter)
    if jitter is not None and not any(finding["ranks"] == jitter["ranks"] for finding in verdict["findings"]):
        verdict["findings"].append(jitter)
        mean = float(np.mean(durations[-JITTER_STEPS:]))
        # Where half of the newest steps stall, their median is one.
        now, ideal = min(now, calm_ns) + jitter["share"], min(ideal, mean - jitter["share"])
    if not verdict["findings"] and calls * len(numbers) <= 8 * MOST_CALLS:
        for straggler in hidden:
            if _lost_its_lead(query, params, straggler, lateness):
                onset = _onset(query, params, straggler, lateness, numbers, calls)
                loss = _judge(query, params, straggler, onset, lateness, numbers, durations, stacks, seen_gpus)
                _share_out([loss])
                verdict["findings"].append(_finding(loss, hosts, now, on_cpus=on_cpus_alone(query, params)))
    if seen_gpus is not None:
        for finding in verdict["findings"]:
            if (asked_of := _compared(params, finding, seen_gpus)) is not None:
                for text, asked in (issue.asked(*asked_of), patterns.asked(*asked_of)):
                    ahead.start(text, asked)
    if seen_gpus is not None and carried is not None:
        ideal += _what_if(verdict, query, params, seen_gpus, carried, unburdened, now)
    if seen_gpus is not None:
        _behaviour(query, params, verdict["findings"], seen_gpus)
    node_health.add(query, params, verdict["findings"], hosts)
    lost_ns = max(sum(finding["share"] for finding in verdict["findings"]), 1.0)
    for finding in verdict["findings"]:
        finding["share"] = round(finding["share"] / lost_ns, 4)
    verdict["findings"].sort(key=lambda finding: -finding["share"])
    verdict["slowdown"] = round(max(1.0, now / ideal), 4)
    by_gpus = seen_gpus is not None and gpu.all_compared(seen_gpus, set(hosts))
    trouble = across.trouble(threshold * now, clocks=not by_gpus) if across is not None else ""
    if across is not None and lateness is not None:
        alone = sorted(set(hosts) - set(lateness.ranks.tolist()))
        if alone and not trouble and not by_gpus:
            trouble = f"{named(alone)} could not be compared with others, which collectives are the same is not known"
    if verdict["findings"]:
        verdict["status"] = "degraded"
        judged = lateness is not None or by_times is not None or _is_alone(query, params, verdict["ranks"], world_size)
        verdict["reason"] = trouble if judged else f"stragglers could not be judged: {trouble or why_not}"
        if by_times is not None:
            verdict["reason"] = "; ".join(filter(None, [verdict["reason"], by_times.note]))
    elif trouble or blurred:
        verdict["slowdown"] = 1.0
        verdict["reason"] = "; ".join(filter(None, [doubt, blurred, trouble]))
    elif lateness is None and by_times is None and not doubt and _is_alone(query, params, verdict["ranks"], world_size):
        verdict["status"], verdict["slowdown"] = "healthy", 1.0
        steady = f"one rank, so there is nothing to compare it with; a step takes {_ms(now)}"
        verdict["reason"] = "; ".join(filter(None, [steady, long_steps, more_work]))
    elif (lateness is None and by_times is None) or doubt:
        verdict["slowdown"] = 1.0
        verdict["reason"] = doubt or why_not
    elif lateness is None and by_times is not None and by_times.blind:
        verdict["slowdown"] = 1.0
        verdict["reason"] = by_times.note
    elif world_size > verdict["ranks"]:
        verdict["slowdown"] = 1.0
        verdict["reason"] = (
            f"{verdict['ranks']} of {world_size} ranks were traced, and none of them holds up the others"
        )
    else:
        verdict["status"] = "healthy"
        verdict["slowdown"] = 1.0
        past = by_times.note if by_times is not None else ""
        if lateness is not None:
            blur_ns = across.worst_ns if across is not None else 0
            many = max(reach, int(MOST_CALLS / max(calls, 1.0)))
            past = _history(query, params, numbers, durations, threshold, blur_ns, many)
        agreement = across.agreement(across.names[:1], across.names) if across is not None else ""
        inexact = across.trouble(threshold * now) if across is not None else ""
        if inexact:
            agreement = f"by what their GPUs did all ranks are alike; {inexact}"
        verdict["reason"] = "; ".join(filter(None, [long_steps, more_work, past])) or agreement
        if newest is None and not since_ns:
            small = _too_small(durations, by_times.least if by_times is not None else "")
            verdict["reason"] = "; ".join(filter(None, [verdict["reason"], small]))
    if across is not None and across.not_stored:
        note = f"what is known of the hosts' clocks could not be stored: {across.not_stored}"
        verdict["reason"] = "; ".join(filter(None, [verdict["reason"], note]))
    return verdict


def _by_few_steps(
    verdict: Verdict,
    query: sql.Query,
    params: dict[str, Any],
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
    across: Hosts | None,
    threshold: float,
) -> None:
    """Fills in the verdict on a recording of few steps: what the kernels prove, and of the rest why nothing is said."""
    found = short.judge(query, params, numbers, durations, _hosts(query, params), across, threshold)
    rest = f"{verdict['reason']} for what is no kernel's: who comes late, stalls, links, changes"
    if found:
        verdict["status"], verdict["findings"] = "degraded", found
        lost = min(sum(one["share"] for one in found), 0.95)
        for one in found:
            one["share"] = round(one["share"] / max(sum(other["share"] for other in found), 1e-9), 4)
        verdict["slowdown"] = round(1 / (1 - lost), 4)
        verdict["reason"] = rest
    elif len(numbers) >= short.MIN_STEPS and short.comparable(query, params, numbers, across):
        verdict["reason"] = f"{rest}; kernels of ranks with the same work take equally long"


def _too_small(durations: NDArray[np.float64], least: str) -> str:
    """What a healthy job may hide: how much longer steps could have become without being reported.

    Args:
        durations: Step times, ns.
        least: The same of ranks, a clause; empty: unknown.
    """
    growth = least_growth(durations)
    text = f"steps of the newer half that are less than {growth:.0%} longer would not have been reported"
    return f"{text}, nor would {least}" if least else text


def _waited_for(by_times: step_times.Judged | None, regression: Regression) -> bool:
    """Whether steps became longer since all wait for the ranks that logged times tell of: by half of the growth."""
    if by_times is None or not by_times.synchronous:
        return False
    waited = sum(finding["share"] for finding in by_times.findings)
    return waited >= (regression.after_ns - regression.before_ns) / 2


def _is_alone(query: sql.Query, params: Mapping[str, Any], ranks: int, world_size: int) -> bool:
    """Whether a rank is a whole job: no launcher speaks of others, and it never communicated. A file that was imported
    may be one rank's of many, unless it says how many there are."""
    traced = int(query(sql.LAST_LOOK, params)["looked_ns"][0]) > 0
    if ranks != 1 or world_size > 1 or not (traced or world_size == 1):
        return False
    return int(query(sql.ALIGNMENT, params)["ranks"][0]) == 0


def _without_steps(query: sql.Query, params: Mapping[str, Any], look: Mapping[str, NDArray[Any]]) -> str:
    """Why a trace holds no step, and what its processes did instead; empty: nothing more is known."""
    states = query(sql.STATES, params)
    looked = int(look["looked_ns"][0])
    if not looked or int(look["called_ns"][0]) or not np.any(states["state"] == "traced"):
        return ""
    ranks = states["rank"].astype(np.int64).tolist()
    found = activities(query, params, ranks[:REFERENCES], looked - int(PLACES_S * 1e9), looked)
    doing = sorted(found.values(), key=lambda one: (not one.progresses, one.rank))
    many = f"{len(ranks)} processes" if len(ranks) > 1 else "1 process"
    text = f"{many} made no CUDA or NCCL call while they were traced" if len(ranks) > 1 else (
        f"{many} made no CUDA or NCCL call while it was traced"
    )  # fmt: skip
    if any(one.progresses for one in doing):
        return f"no training step was seen: {text}; {describe([one for one in doing if one.progresses])}"
    probed = bool(np.any(query(LIBRARIES, params)["libraries"] > 0))
    if (
        doing
        and not probed
        and not any((one.place is not None and one.place.kind == "python") or one.waits_for for one in doing)
    ):
        return f"{NOTHING}: {text}, ran no Python and computed nothing; {describe(doing)}"
    return f"{text}: " + (describe(doing) if doing else "they hang, wait or idle")


def _all_slower(
    query: sql.Query,
    params: dict[str, Any],
    found: Regression,
    numbers: NDArray[np.int64],
    hosts: dict[int, str],
    now: float,
    slower: float,
    *,
    gpus: bool,
) -> tuple[Finding | None, str]:
    """The finding on steps that became longer on nearly all ranks; or why it is none, a sentence without a full stop.

    Args:
        found: Since when, and by how much.
        now: What a step takes, ns.
        slower: Share of the ranks.
        gpus: Their times are known.
    """
    onset, last = int(numbers[found.index]), int(numbers[-1])
    grown = found.after_ns / found.before_ns
    some = sorted(hosts)[:: max(1, len(hosts) // issue.RANKS)][: issue.RANKS]
    shift = explain(query, params, some, (int(numbers[0]), onset, last), found.before_ns, found.after_ns)
    if not gpus and not shift.by_argus and not shift.taken:
        spans = ((int(numbers[0]), onset - 1), (onset, last))
        before, crowd = (find_crowd(query, {**params, "first": a, "last": b}, set(hosts.values())) for a, b in spans)
        if crowd is not None and before is None:
            shift = replace(
                shift, evidence=crowd.evidence, queued_ns=max(shift.queued_ns, 1.0), taken=True, unknown=False
            )
    longer = f"from step {onset} on a step takes {_ms(found.after_ns)} instead of {_ms(found.before_ns)}"
    if shift.by_argus:
        return None, f"{longer}, when {shift.by_argus}: that is no change of the job"
    if shift.unknown and not gpus:
        return None, f"{longer}; whether its threads wait for a free CPU is not known"
    if len(hosts) == 1 and not gpus and grown < 1 + ALONE and not shift.taken:
        return None, f"{longer}, which on CPUs alone may be their clocks, caches or neighbours"
    text = f"{longer}, on {slower:.0%} of the ranks, and no rank holds up the others more than before"
    if len(hosts) == 1:
        text = longer
    told: list[Evidence] = [{"text": text, "sql": sql.shown(sql.SLOWER, {**params, "onset": onset})}]
    if min(found.index, len(numbers) - found.index) < MIN_STEPS:
        text = (
            f"only {found.index} steps before it and {len(numbers) - found.index} from then on were seen; the GPUs' "
            "own compute time grew at the same step"
        )
        told.append({"text": text, "sql": sql.shown(sql.GPU_TIMES, {**params, "last": last})})
    kind, confidence = "regression", found.confidence
    action = (
        f"Find out what changed for all ranks at step {onset}: batch or sequence length, checkpointing, the network, "
    )
    action += "a power or thermal limit."
    if shift.evidence is not None and shift.queued_ns > 0:
        told.append(shift.evidence)
    if shift.taken:
        kind = "host_contention"
        confidence *= min(1.0, 0.5 + shift.queued_ns / (found.after_ns - found.before_ns) / 2)
        where = ", ".join(list(dict.fromkeys(hosts.values()))[:4])
        action = (
            f"Find out what else runs on the CPUs of {where} since then (top -H), which CPUs the job may use (taskset "
        )
        action += "-pc PID), and whether its control group is throttled (cpu.max, cpu.stat)."
    else:
        behaved, issue_sql = issue.against_past(query, params, onset, some)
        if behaved is not None:
            told.append({"text": behaved.text("the GPUs", "before"), "sql": issue_sql})
        if behaved is not None and behaved.stalled:
            kind = "kernel_issue_stall"
            action = (
                f"Find out what changed on the CPUs of all ranks at step {onset}: synchronisation or timers that were "
            )
            action += "added, garbage collection, checks in Python, smaller kernels."
    finding = Finding(
        kind=kind,
        ranks=[],
        hosts=list(dict.fromkeys(hosts.values())) if shift.taken else [],
        steps=[onset, last],
        phase="",
        kernels=[],
        slowdown=round(grown, 4),
        share=now - now / grown,
        confidence=round(confidence, 4),
        level="iteration",
        evidence=told,
        action=action,
    )
    return finding, ""


def _what_if(
    verdict: Verdict,
    query: sql.Query,
    params: dict[str, Any],
    seen: gpu.Seen,
    carried: links.Carried,
    unburdened: links.Transfers | None,
    step_ns: float,
) -> float:
    """Adds what a step would take if what was found were not so, where the step can be rebuilt. What a finding costs is
    that, from then on: one number for one loss. The rebuilt step knows what others hide of a rank's lateness.

    Args:
        unburdened: What transfers would take if those of the slow links took what is usual.
        step_ns: What a step takes. The rebuilt one is off by some percent; what a finding costs is in proportion to it.

    Returns:
        What the findings cost less than was thought, ns: a transfer that waits for another stage anyway costs nothing.
    """
    dearer = 0.0
    if (rebuilt := rebuild.read(query, params, seen, carried.now, carried.dimensions)) is None:
        return dearer
    verdict["whatif"] = operations.in_verdict(whatif.answer(rebuilt.model))
    # Of several that are late in the same steps each alone would gain little: what they cost was shared out before.
    several = (
        sum(bool(finding["ranks"]) and finding["kind"] != "link_degradation" for finding in verdict["findings"]) > 1
    )
    for finding in verdict["findings"]:
        if not finding["ranks"]:
            continue
        name, one = named(finding["ranks"]), len(finding["ranks"]) == 1
        if finding["kind"] == "link_degradation":
            if unburdened is None:
                continue
            now, *would = rebuild.unburdened_ns(rebuilt, seen, carried.now, unburdened, carried.dimensions)
            supposed, shown = f"transfers of {name} took what is usual", sql.shown(sql.TRANSFERS, carried.window)
            cheaper = now - would[0] < finding["share"]
        else:
            relieved = rebuild.relieved_ns(rebuilt.model, rebuilt.workers, finding["ranks"])
            if relieved is None:
                continue
            (now, *would), shown = relieved, sql.shown(sql.GPU_TIMES, seen.window)
            supposed = f"{name}{' alone' if several else ''} took as long as {'its' if one else 'their'} peers"
            cheaper = not several and finding["share"] > 0 and would[0] < now
        if cheaper:
            lost_ns = step_ns * max(1 - would[0] / now, 0.0)
            dearer += finding["share"] - lost_ns
            finding["share"], finding["slowdown"] = lost_ns, round(step_ns / (step_ns - lost_ns), 4)
        range_ns = dict.fromkeys(_ms(ns) for ns in would)
        text = f"if {supposed}, a step would take {' to '.join(range_ns)} instead of {_ms(now)}"
        finding["evidence"].append({"text": text, "sql": shown})
    return dearer


def _by_operations(
    verdict: Verdict,
    query: sql.Query,
    params: dict[str, Any],
    known: tuple[Operations, Layout],
    threshold: float,
    world_size: int,
) -> None:
    """Fills in the verdict on a run whose operations are stored."""
    rows, layout = known
    verdict["ranks"] = len(np.unique(rows.rank))
    verdict["steps"] = [int(rows.step.min()), int(rows.step.max())]
    try:
        model = whatif.build(rows, layout)
    except ArgusError as failure:
        verdict["reason"] = f"the step's dependencies cannot be rebuilt: {failure}"
        return
    answers = whatif.answer(model)
    verdict["whatif"] = operations.in_verdict(answers)
    left_out = "; ".join(model.notes)
    if len(model.steps) < operations.MIN_STEPS:
        verdict["reason"] = f"{len(model.steps)} whole steps are stored, {operations.MIN_STEPS} are needed"
        return
    verdict["findings"] = operations.judge(model, answers, params, _hosts(query, params), threshold)
    workers = layout.data * layout.pipeline
    if verdict["findings"]:
        verdict["status"] = "degraded"
        verdict["slowdown"] = round(max(1.0, answers.slowdown), 4)
        verdict["reason"] = left_out
    elif world_size and verdict["ranks"] < workers:
        verdict["reason"] = "; ".join(
            filter(
                None, [f"{verdict['ranks']} of {workers} workers are recorded, and nothing slows them down", left_out]
            )
        )
    else:
        verdict["status"] = "healthy"
        verdict["reason"] = left_out


def _behind(slow_gpus: list[Finding], numbers: NDArray[np.int64], regression: Regression) -> Finding | None:
    """A slow GPU that nobody seems to wait for, and that is slow since all steps are longer."""
    for finding in slow_gpus:
        place = int(np.searchsorted(numbers, finding["steps"][0]))
        if finding["kind"] == "masked_compute_straggler" and abs(place - regression.index) <= MIN_STEPS:
            return finding
    return None


def _unmask(finding: Finding, regression: Regression, now: float, shown: str) -> float:
    """Makes a slow GPU answer for what the steps became longer by, as a factor, which it returns: though others have as
    much to do, the pipeline fills and empties more slowly."""
    grown = regression.after_ns / regression.before_ns
    finding["kind"], finding["slowdown"], finding["share"] = "compute_straggler", round(grown, 4), now - now / grown
    text = f"since then a step takes {_ms(regression.after_ns)} instead of {_ms(regression.before_ns)}"
    finding["evidence"][1] = {"text": text, "sql": shown}
    return grown


def _united(losses: list[_Loss], slow_gpus: list[Finding], *, staged: bool) -> tuple[list[_Loss], list[Finding]]:
    """What came late and what computes slowly, each told once.

    The GPUs' own times know better than the order of arrivals who of several late ranks is slow: a late pipeline is
    late on all of its stages. Where just the slow ones came late, what that costs the others is known better, but for
    pipelines: who comes late to a stage's collective may be waited for by nobody.
    """
    kept = [
        loss
        for loss in losses
        if loss.cause.kind != "compute_straggler" or not _told_by_gpus(loss.straggler, slow_gpus, staged=staged)
    ]
    told = [set(loss.straggler.ranks) for loss in kept]
    return kept, [finding for finding in slow_gpus if set(finding["ranks"]) not in told]


def _told_by_gpus(straggler: Straggler, slow_gpus: list[Finding], *, staged: bool) -> bool:
    """Whether ranks that come late, and whose GPUs are to blame, are left to what the GPUs' own times tell."""
    slow = [set(finding["ranks"]) for finding in slow_gpus if staged or finding["kind"] == "compute_straggler"]
    return bool(slow) and (staged or set(straggler.ranks) not in slow)


def _narrowed(straggler: Straggler, seen: gpu.Seen | None) -> Straggler | None:
    """A straggler, of whose ranks those that the GPUs' own times say nothing of only wait for the others; None: all of
    them wait, for a rank that their pipeline or their tensor-parallel peers have."""
    if seen is None:
        return straggler
    own, sure = gpu.own_lateness(seen)
    late = straggler.ranks + straggler.waiting
    known = np.isin(seen.now.ranks, late)
    most = float(own[known].max(initial=0.0))
    # Of several ranks that are late alike the mean is known better than each.
    steps = gpu.by_step(seen.now.cut(slice(-gpu.WINDOWS[0], None)), seen.mesh)
    level, error = gpu.levels(steps[known].mean(axis=0)[None])
    beyond = sure[known].any() or level[0] > gpu.ERRORS * error[0]
    # They were found by the latest of them, who is another one in each step: later than any of them is typically.
    ahead = lead_of(steps, known, ~known)
    latest = max(most, float(np.median(ahead))) if len(ahead) else most
    if beyond and latest >= straggler.gain_ns / 2:
        # Half as late as a typical one of them: the latest of many is late by chance, too.
        typical = float(np.median(own[known & (own >= most / 2)]))
        guilty = tuple(sorted(seen.now.ranks[known & (own >= typical / 2)].tolist()))
        return replace(straggler, ranks=guilty, waiting=tuple(sorted(set(late) - set(guilty))), own=True)
    if known.sum() < len(late):
        return straggler
    together = seen.mesh.replica
    slow = ~known & sure & (own >= straggler.gain_ns / 2)
    if np.isin(together[known], together[slow]).any():
        return None
    return replace(straggler, hidden=True)


def _kept_waiting(
    stragglers: list[Straggler], seen: gpu.Seen, least_ns: float
) -> tuple[list[Straggler], list[gpu.SlowGpu | None]]:
    """Stragglers, and ranks besides whose GPUs their CPUs keep waiting.

    Where all ranks of a stage are kept waiting, who comes last to its collectives is a matter of turns: the others that
    are late themselves by half as much or more are as much to blame.

    Args:
        stragglers: Who comes late.
        seen: What the GPUs did.
        least_ns: What ranks cost a step that count.

    Returns:
        The stragglers; and of each what its GPUs are kept waiting by, if that is known.
    """
    own, _ = gpu.own_lateness(seen)
    found: list[tuple[Straggler, gpu.SlowGpu | None]] = [(one, None) for one in stragglers]
    for slow in gpu.find_starved(seen.now, seen.mesh, seen.before):
        if slow.cost_ns < least_ns:
            continue
        window = min(gpu.WINDOWS[0], len(seen.now.steps))
        part = [one for one, _ in found if set(one.ranks) <= set(slow.ranks)]
        named_ranks = {rank for one in part for rank in one.ranks}
        late = {rank for one, _ in found for rank in one.ranks + one.waiting}
        if part:
            typical = float(np.median(own[np.isin(seen.now.ranks, sorted(named_ranks))]))
            alike = np.isin(seen.now.ranks, slow.ranks) & (own >= typical / 2)
            together = tuple(seen.now.ranks[alike].tolist())
            if named_ranks < set(together):
                whole = Straggler(together, slow.cost_ns, slow.persistence, 0.0, window, idle=True)
                found = [(whole, slow), *(pair for pair in found if pair[0] not in part)]
            else:
                found = [(one, slow if one.ranks == slow.ranks else of) for one, of in found]
        elif not late & set(slow.ranks):
            idle = Straggler(slow.ranks, slow.cost_ns, slow.persistence, 0.0, window, idle=True)
            found.append((idle, slow))
    return [one for one, _ in found], [of for _, of in found]


def _crowded_jitter(query: sql.Query, params: dict[str, Any], jitter: Finding) -> None:
    """Turns stalls into ``host_contention`` where the job computes on CPUs that other programs keep busy."""
    window = {**params, "first": jitter["steps"][0], "last": jitter["steps"][1]}
    where = _hosts(query, params)
    some = jitter["ranks"] or sorted(where)[:REFERENCES]
    if jitter["kind"] != "jitter" or len(query(sql.CPU_TIME, {**window, "ranks": some})["rank"]):
        return
    hosts = set(jitter["hosts"]) or set(where.values())
    if (crowd := find_crowd(query, window, hosts)) is not None:
        jitter["kind"] = "host_contention"
        jitter["evidence"].append(crowd.evidence)
        jitter["action"] = crowd.action


def _lost_its_lead(query: sql.Query, params: dict[str, Any], straggler: Straggler, lateness: Lateness | None) -> bool:
    """Whether ranks that come late came earlier before, in nearly every step of theirs: that they always come late may
    be what they do besides."""
    late = [*straggler.ranks, *straggler.waiting]
    rows = query(sql.LEAD, {**params, "ranks": late, "members": _members(lateness, late, straggler.behind)})
    ahead = rows["suspects_ns"] - rows["others_ns"]
    since = find_onset(ahead, straggler.gain_ns)
    before, after = ahead[:since], ahead[since:]
    return min(len(before), len(after)) >= MIN_STEPS and bool(np.mean(after[:, None] > before[None, :]) >= SEPARATE)


def _places(straggler: Straggler, lateness: Lateness, hosts: dict[int, str]) -> tuple[list[str], list[str]]:
    """The hosts of ranks that come late, and those of the others."""
    late = straggler.ranks + straggler.waiting
    mine = [hosts[rank] for rank in straggler.ranks if rank in hosts]
    return mine, [hosts[rank] for rank in lateness.ranks.tolist() if rank not in late and rank in hosts]


def _newest(params: Mapping[str, Any], numbers: NDArray[np.int64], reach: int) -> dict[str, Any]:
    """Parameters of the newest ``reach`` steps."""
    return {**params, "first": int(numbers[-reach:][0])}


def _lateness(
    query: sql.Query, params: dict[str, Any], numbers: NDArray[np.int64], reach: int
) -> tuple[Lateness | None, str]:
    """Lateness in the newest ``reach`` steps, or why there is none."""
    lateness = lateness_of(query(sql.LATENESS, _newest(params, numbers, reach)), numbers[-reach:])
    if len(lateness.ranks) > 1 and len(lateness.steps) >= MIN_STEPS:
        return lateness, ""
    known = query(sql.ALIGNMENT, params)
    ranks = int(known["ranks"][0]) if len(known["ranks"]) else 0
    aligned = int(known["aligned_ranks"][0]) if len(known["ranks"]) else 0
    if ranks < 2:
        return None, "collectives of fewer than 2 ranks were seen, so no rank can be compared with another"
    if aligned < 2:
        return None, f"the ranks' collectives could not be lined up: {known['why'][0]}"
    return None, f"only {len(lateness.steps)} steps have collectives that most of their ranks were seen in"


def _members(lateness: Lateness | None, ranks: list[int], behind: Sequence[int]) -> list[int]:
    """Ranks that are in communicators with these, but for those that these are behind, if others are left."""
    if lateness is None:
        return ranks
    inside = np.flatnonzero(np.isin(lateness.ranks, ranks))
    together = [members for members, _ in lateness.groups if np.isin(members, inside).any()]
    members = set(lateness.ranks[np.concatenate([inside, *together])].tolist())
    fewer = members - (set(behind) - set(ranks))
    return sorted(fewer if fewer - set(ranks) else members)


def _onset(
    query: sql.Query,
    params: dict[str, Any],
    straggler: Straggler,
    lateness: Lateness | None,
    numbers: NDArray[np.int64],
    calls: float,
) -> int:
    """The step since which a straggler holds the others up."""
    late = [*straggler.ranks, *straggler.waiting]
    cited = {**params, "ranks": late, "members": _members(lateness, late, straggler.behind)}

    def lead(low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        rows = query(sql.LEAD, {**cited, "first": int(numbers[low]), "last": int(numbers[high - 1])})
        kept = np.isin(rows["step"].astype(np.int64), numbers)
        return rows["step"][kept].astype(np.int64), (rows["suspects_ns"] - rows["others_ns"])[kept]

    low, high = 0, len(numbers)
    if calls * high > 8 * MOST_CALLS:
        # Back from the newest steps, farther and farther, until some in which it was not late; then halve.
        far = 2 * BLOCK
        late_from, fine = max(0, high - far), -1
        while late_from > 0 and fine < 0:
            far *= 2
            probe = max(0, high - far)
            steps, ahead = lead(probe, min(probe + BLOCK, high))
            if len(steps) and np.mean(ahead >= straggler.gain_ns / 2) < PERSISTENCE:
                fine = probe
            else:
                late_from = probe
        while fine >= 0 and late_from - fine > 2 * BLOCK:
            probe = (late_from + fine) // 2
            steps, ahead = lead(probe, min(probe + BLOCK, high))
            if len(steps) and np.mean(ahead >= straggler.gain_ns / 2) < PERSISTENCE:
                fine = probe
            else:
                late_from = probe
        if fine < 0:
            return int(numbers[0])
        low, high = fine, min(late_from + 2 * BLOCK, high)
    steps, ahead = lead(low, high)
    since = find_onset(ahead, straggler.gain_ns) if len(steps) else 0
    # Late in all steps in which it could be compared: others may have been seen for longer.
    return int(steps[since]) if since else int(numbers[low])


def _judge(
    query: sql.Query,
    params: dict[str, Any],
    straggler: Straggler,
    onset: int,
    lateness: Lateness | None,
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
    stacks: StackReader | None,
    gpus: gpu.Seen | None,
) -> _Loss:
    """Why, and how much a straggler costs."""
    ranks = list(straggler.ranks)
    late = ranks + list(straggler.waiting)
    last = int(numbers[-1])
    cited = {**params, "ranks": late, "first": onset, "members": _members(lateness, late, straggler.behind)}

    others = [int(rank) for rank in lateness.ranks if rank not in late] if lateness is not None else []
    gpu_ns = None
    if gpus is not None:
        compute, idle, _ = gpu.own_excess(gpus.now, gpus.mesh)
        mine = np.isin(gpus.now.ranks, ranks)
        if mine.any():
            gpu_ns = float(np.median(compute[mine])), float(np.median(idle[mine]))
            same = np.isin(gpus.mesh.stage, gpus.mesh.stage[mine]) & ~np.isin(gpus.now.ranks, late)
            others = gpus.now.ranks[same].tolist() or others
    chosen = others[:: max(1, len(others) // REFERENCES)][:REFERENCES]
    window = {**params, "first": max(onset, int(numbers[-straggler.window :][0])), "ranks": ranks + chosen}
    cpu = query(sql.CPU_TIME, window)
    cause = attribute(cpu, straggler.ranks, straggler.gain_ns, gpu_ns, hidden=straggler.hidden)
    compared = sql.CPU_TIME
    if not cause.known or cause.kind == "kernel_issue_stall":
        # What the CPU did instead of launching, marks tell better than the calls around it.
        by_phase = attribute_by_phases(query(sql.PHASE_TIME, window), straggler.ranks, straggler.gain_ns)
        if by_phase is not None and (not cause.known or by_phase.kind == "data_loading"):
            cause, compared = by_phase, sql.PHASE_TIME
        elif by_phase is not None and by_phase.phase not in ("", "other"):
            cause = replace(cause, text=f"{cause.text}; {by_phase.text}", phase=by_phase.phase)

    seen = look_closer(
        query,
        {**params, "first": onset, "last": last},
        cause,
        ranks,
        chosen,
        straggler.gain_ns,
        named(ranks),
        stacks,
        *_by_host(_hosts(query, params), ranks),
        None if gpu_ns is None or straggler.hidden or cause.kind == "compute_straggler" else gpu_ns[1],
    )
    said, cause = cause, seen.cause
    step_ns = float(np.median(durations[-straggler.window :]))
    alone = cause.kind == "compute_straggler" and gpu_ns is None and not len(cpu["rank"])
    if alone and straggler.gain_ns <= SLOWED * (step_ns - straggler.gain_ns):
        where = {host for rank, host in _hosts(query, params).items() if rank in ranks}
        if (crowd := find_crowd(query, {**params, "first": onset, "last": last}, where)) is not None:
            cause = Cause("host_contention", crowd.text, False)
            seen = Seen(cause, [crowd.evidence], crowd.action)
    # That its CPU is not to blame is what a GPU is blamed by.
    told = cause.kind == said.kind or said.kind != "compute_straggler" or bool(said.phase)
    kernels = longer = None
    if cause.kind == "compute_straggler" and not cause.phase:
        kernels = slow_kernels(query(sql.GPU_PHASE_TIME, window), straggler.ranks, straggler.gain_ns)
        summed = {**window, "last": int(numbers[-1])}
        longer = long_kernels(query(sql.KERNEL_TIME, summed), straggler.ranks, straggler.gain_ns)

    flat = False
    if lateness is not None and (inside := np.isin(lateness.ranks, ranks)).any():
        tail = lateness.tail(straggler.window)
        first_ns = float(np.nanmedian(tail.first[inside]))
        last_ns = float(np.nanmedian(tail.last[inside]))
        flat = last_ns <= FLAT * first_ns
    name = named(ranks)
    because: Evidence = {"text": said.text, "sql": sql.shown(compared, window)}
    seen_by: Evidence = {
        "text": f"{name} came last to the collectives in {straggler.persistence:.0%} of the newest "
        f"{straggler.window} steps, {_ms(straggler.gain_ns)} after everybody else, of {_ms(step_ns)} a step",
        "sql": sql.shown(sql.LEAD, cited),
    }
    if straggler.idle and gpus is not None:
        seen_by = {
            "text": f"the GPUs of {name} have nothing to do for longer than those with the same work, or at first, "
            f"in {straggler.persistence:.0%} of the newest {straggler.window} steps, and others wait for them for "
            f"{_ms(straggler.gain_ns)} of {_ms(step_ns)} a step",
            "sql": sql.shown(sql.GPU_TIMES, gpus.window),
        }
    evidence: list[Evidence] = [
        seen_by,
        *([because] if told else []),
        *seen.evidence,
    ]
    if kernels is not None:
        evidence.append({"text": kernels.text, "sql": sql.shown(sql.GPU_PHASE_TIME, window)})
    if longer is not None:
        evidence.append({"text": longer.text, "sql": sql.shown(sql.KERNEL_TIME, summed)})
    loss = straggler.gain_ns
    grown = 0.0 if kernels is None else max(min(kernels.excess_ns, step_ns) - loss, 0.0)
    if straggler.hidden and gpu_ns is not None:
        loss, grown = float(np.clip(sum(gpu_ns), 0.0, loss + grown)), 0.0
    before = durations[numbers < onset]
    if len(before) >= MIN_STEPS:
        was = float(np.median(before[-max(WINDOWS) :]))
        if step_ns - was > loss + grown:
            grown = step_ns - was - loss
            text = f"a step took {_ms(was)} before step {onset} and takes {_ms(step_ns)} now"
            evidence.append({"text": text, "sql": sql.shown(sql.STEPS, params)})
    elif (
        cause.kind == "compute_straggler"
        and kernels is None
        and cause.known
        and not cause.phase
        and flat
        and has_syncs(cpu, straggler.ranks)
    ):
        loss *= 1 + HIDDEN_BACKWARD
        text = (
            f"estimated: only the forward is waited for on the CPU; a backward takes twice as long, so the slow GPU "
            f"costs about {_ms(loss)} a step"
        )
        evidence.append({"text": text, "sql": sql.shown(sql.LATENESS, cited)})
    phase = (
        said.phase
        or (kernels.phase if kernels is not None else "")
        or ("before the first collective" if flat else "between the collectives")
    )
    names = [] if longer is None else longer.names
    if seen.alike:
        waiting = tuple(rank for rank in straggler.waiting if rank not in seen.alike)
        straggler = replace(straggler, ranks=tuple(sorted({*ranks, *seen.alike})), waiting=waiting)
    return _Loss(straggler, onset, last, cause, loss, grown, evidence, phase, names, seen.action, seen.level)


def _share_out(losses: Sequence[_Loss]) -> None:
    """Adds what those that are late may cost more than is seen of each: all of them together do, where there are
    several, for the less late wait in part of the time."""
    seen_ns = sum(loss.loss_ns for loss in losses)
    most_ns = max((loss.loss_ns + loss.grown_ns for loss in losses), default=0.0)
    for loss in losses:
        part = loss.loss_ns / seen_ns if seen_ns else 1 / len(losses)
        loss.loss_ns = part * max(most_ns, seen_ns)


def _by_host(hosts: Mapping[int, str], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of some ranks: the others on their hosts, and some of those on other hosts."""
    theirs = {hosts[rank] for rank in ranks if rank in hosts}
    near = [rank for rank, host in hosts.items() if host in theirs and rank not in ranks]
    far = [rank for rank, host in hosts.items() if host not in theirs]
    return near, far[:: max(1, len(far) // REFERENCES)][:REFERENCES]


def _finding(loss: _Loss, hosts: dict[int, str], step_ns: float, *, on_cpus: bool) -> Finding:
    straggler = loss.straggler
    names = list(dict.fromkeys(hosts[rank] for rank in straggler.ranks if rank in hosts))
    where = named(list(straggler.ranks)) + (f" on {', '.join(names[:4])}" if names else "")
    ideal = max(step_ns - loss.loss_ns, 0.05 * step_ns)
    actions = {
        "jit_stall": f"Find what compiles or loads GPU code in every step of {where}: shapes that change, or a cache "
        "(TRITON_CACHE_DIR, CUDA_CACHE_PATH) that it cannot write.",
        "data_loading": f"Look at the data loader of {where}: its workers, prefetching, and the disk or network it "
        "reads from.",
        "kernel_issue_stall": f"Look at the CPU of {where}: other processes on its cores, affinity, garbage "
        "collection, frequency.",
        "compute_straggler": f"Check the GPU of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC) and move "
        "the rank if it stays slow.",
    }
    guessed = bool(loss.cause.phase) or not (loss.cause.known or loss.kernels)
    if loss.cause.kind == "compute_straggler" and (guessed or on_cpus):
        actions["compute_straggler"] = f"See what {where} does there that the others do not" + (
            ":" if loss.action else f": argus export svg --rank {straggler.ranks[0]} --diff rank=others -o diff.svg."
        )
    certainty = straggler.persistence * (1 - straggler.p_value) * (1.0 if loss.cause.known else UNKNOWN_CAUSE)
    return Finding(
        kind=loss.cause.kind,
        ranks=list(straggler.ranks),
        hosts=names,
        steps=[loss.onset, loss.last],
        phase=loss.phase,
        kernels=loss.kernels,
        slowdown=round(step_ns / ideal, 4),
        share=loss.loss_ns,
        confidence=round(certainty, 4),
        level=loss.level or ("kernel" if loss.kernels else "phase"),
        evidence=loss.evidence,
        action=" ".join(filter(None, [actions.get(loss.cause.kind, ""), loss.action])),
    )


ISSUED = ("compute_straggler", "masked_compute_straggler", "kernel_issue_stall", "host_contention", "gc_pause")
"""Kinds of which it is told whether the GPU was kept waiting."""


def _compared(
    params: dict[str, Any], finding: Finding, gpus: gpu.Seen
) -> tuple[dict[str, Any], list[int], list[int]] | None:
    """The newest steps of what was found, its ranks, and some with the same work; None: there is nothing to compare."""
    if not finding["ranks"] or finding["kind"] not in ISSUED:
        return None
    mine = np.isin(gpus.now.ranks, finding["ranks"])
    same = np.isin(gpus.mesh.stage, gpus.mesh.stage[mine]) & ~mine
    peers = gpus.now.ranks[same].tolist()
    peers = peers[:: max(1, len(peers) // REFERENCES)][:REFERENCES]
    if not peers:
        return None
    steps = gpus.now.steps[-gpu.WINDOWS[0] :]
    window = {**params, "first": max(finding["steps"][0], int(steps[0])), "last": int(steps[-1])}
    return window, finding["ranks"][:REFERENCES], peers


def _behaviour(query: sql.Query, params: dict[str, Any], findings: list[Finding], gpus: gpu.Seen) -> None:
    """Adds what behaves differently on the ranks found to the evidence: whether their GPUs were kept waiting, and which
    functions take longer than on ranks with the same work."""
    for finding in findings:
        if (asked := _compared(params, finding, gpus)) is None:
            continue
        waited, shown = issue.against_peers(query, *asked)
        if waited is not None and (waited.stalled or (waited.busy and finding["kind"].endswith("compute_straggler"))):
            text = waited.text(f"the GPU of {named(asked[1])}", "on others")
            finding["evidence"].append({"text": text, "sql": shown})
        odd, shown = patterns.explain(query, *asked)
        finding["evidence"] += [{"text": one.text(), "sql": shown} for one in odd]


MEASURES = ("launches", "collective calls", "bytes of collectives")
"""What :data:`argus.diagnose.sql.WORK` measures, in words."""
WORKERS = 4
"""Ranks whose work is looked at."""


def _regression(
    query: sql.Query,
    params: dict[str, Any],
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
    hosts: dict[int, str],
    threshold: float,
    *,
    blamed: bool,
    confirmed: Callable[[int], bool] | None,
) -> tuple[Regression | None, str]:
    """The regression that the newest steps are in, and that their work does not explain; or a sentence on the work.

    Args:
        threshold: Slowdown from which on small ones count that are confirmed.
        blamed: Ranks or links were found, and their work is not looked at.
        confirmed: Whether the GPUs' own times say that all compute longer from a step on than at first; None: unknown.
    """

    def find(durations: NDArray[np.float64]) -> Regression | None:
        # Of ranks that were found since when is known: what came bit by bit is looked for where nobody was.
        found = find_regression(durations) if blamed else find_growth(durations)
        if found is None and confirmed is not None:
            found = find_regression(durations, least=threshold)
            if found is not None and not confirmed(int(numbers[found.index])):
                return None
        return found

    found = find(durations)
    if blamed:
        return found, ""
    median = float(np.median(durations))
    if found is None and float(np.median(np.abs(durations - median))) < VARIES * median:
        return None, ""
    ranks = sorted(hosts)[:: max(1, len(hosts) // WORKERS)][:WORKERS]
    rows = query(sql.WORK, {**params, "ranks": ranks})
    work = work_of(rows, numbers)
    if not np.isfinite(work).any():
        return found, ""
    if found is not None and (more := more_to_do(found, work)) is not None:
        which, factor = more
        text = (
            f"from step {numbers[found.index]} on a step takes {_ms(found.after_ns)} instead of {_ms(found.before_ns)}"
        )
        return None, f"{text}, and has more to do: {factor:.2f} times as many {MEASURES[which]}"
    return find(without_work(durations, work)), ""


def work_of(rows: Mapping[str, NDArray[Any]], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """The measures of :data:`argus.diagnose.sql.WORK` by step, shape (steps, measures); NaN: not known."""
    work = np.full((len(numbers), len(MEASURES)), np.nan)
    if len(rows["step"]):
        at = np.minimum(np.searchsorted(numbers, rows["step"].astype(np.int64)), len(numbers) - 1)
        known = numbers[at] == rows["step"]
        for which, name in enumerate(("launches", "calls", "bytes")):
            values = rows[name][known].astype(np.float64)
            work[at[known], which] = np.where(values > 0, values, np.nan)
    return work


def _slower(query: sql.Query, params: dict[str, Any]) -> float | None:
    """Share of ranks whose steps became longer, where it is nearly all of them."""
    rows = query(sql.SLOWER, params)
    grown = rows["after_ns"] > 1.05 * rows["before_ns"]
    share = float(np.mean(grown)) if len(grown) else 0.0
    return share if share >= 0.9 else None


def _history(
    query: sql.Query,
    params: dict[str, Any],
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
    threshold: float,
    blur_ns: int,
    reach: int,
) -> str:
    """A sentence on what a job that is healthy now went through before; empty: nothing. Ranks' times may be ``blur_ns``
    off one another; at most ``reach`` steps are looked at."""
    # Where steps took no longer for a while, nobody held them up.
    usual = float(np.quantile(durations, 0.1))
    longer = find_episode(durations >= (1 + threshold) * usual)
    if longer is None:
        return ""
    begin = max(0, longer[0] - MIN_STEPS)
    end = min(longer[1] + MIN_STEPS, begin + reach, len(numbers))
    rows = query(sql.LAST, {**params, "first": int(numbers[begin]), "last": int(numbers[end - 1])})
    steps = rows["step"].astype(np.int64)
    at = np.minimum(np.searchsorted(numbers, steps), len(numbers) - 1)
    known = numbers[at] == steps
    steps, last, lead = steps[known], rows["rank"][known], rows["lead_ns"][known]
    slow = lead >= np.maximum(threshold * durations[at[known]], blur_ns)
    best: tuple[int, int, int] | None = None
    for rank in np.unique(last[slow]).tolist():
        episode = find_episode(slow & (last == rank))
        if episode and (best is None or episode[1] - episode[0] > best[2] - best[1]):
            best = (rank, *episode)
    if best is None:
        return ""
    return f"rank {best[0]} held the job up in steps {steps[best[1]]} to {steps[best[2] - 1]}, and no longer does"


def _hosts(query: sql.Query, params: dict[str, Any]) -> dict[int, str]:
    rows = query(sql.HOSTS, params)
    return {int(rank): str(host) for rank, host in zip(rows["rank"], rows["host"], strict=True)}


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f} ms"


def diagnose_store(
    store: Store,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    keep: bool = True,
    since_ns: int = 0,
) -> Verdict:
    """:func:`diagnose` on a store, with where the time goes if nothing is wrong or nothing can be compared. ``keep``:
    how the hosts of the job go together is stored."""
    query = partial(query_columns, store)
    across = prepare(store, query, job, run) if keep else align_hosts(query, job, run)
    verdict = diagnose(
        query, job, run, steps=steps, threshold=threshold, hang_after_s=hang_after_s, across=across,
        stacks=StackReader(store, job, run), since_ns=since_ns,
    )  # fmt: skip
    # Where a rank is to blame, or a hang is named, that is what there is to know.
    if verdict["status"] in ("healthy", "inconclusive") or (verdict["ranks"] <= 1 and verdict["status"] == "degraded"):
        ranks = sorted(_hosts(query, {"job": job, "run": run}))
        found = breakdown(query, {"job": job, "run": run}, ranks, verdict["steps"] if across is None else [])
        if found["parts"] and not verdict["reason"].startswith(NOTHING):
            verdict["breakdown"] = found
    return verdict


def save(store: Store, verdict: Verdict, *, created_ns: int | None = None) -> None:
    """Adds a verdict to the table ``findings``: one row a finding, or one without kind where there is none.

    Raises:
        ArgusError: The store did not take it.
    """
    status: Status = verdict["status"]
    shared = {
        "job": verdict["job"],
        "run": verdict["run"],
        "created": time.time_ns() if created_ns is None else created_ns,
        "status": status,
    }
    steps = verdict["steps"] or [0, 0]
    rows: list[dict[str, Any]] = [
        {
            "kind": f["kind"],
            "ranks": f["ranks"],
            "hosts": f["hosts"],
            "step_from": f["steps"][0],
            "step_to": f["steps"][1],
            "phase": f["phase"],
            "slowdown": f["slowdown"],
            "share": f["share"],
            "confidence": f["confidence"],
            "evidence": to_json(f, indent=None),
            "action": f["action"],
        }
        for f in verdict["findings"]
    ] or [
        {
            "kind": "",
            "ranks": [],
            "hosts": [],
            "step_from": steps[0],
            "step_to": steps[1],
            "phase": "",
            "slowdown": verdict["slowdown"],
            "share": 0.0,
            "confidence": 0.0,
            "evidence": verdict["reason"],
            "action": "",
        }
    ]
    with Writer(store, source="diagnose") as writer:
        writer.append("findings", {**shared, **{name: [row[name] for row in rows] for name in rows[0]}})
        report = writer.close()
    if report.dropped:
        raise ArgusError(f"the verdict could not be stored: {report.last_error}", "Use --no-store to only print it")
    if verdict["findings"] and not verdict["coverage"]["ended"]:
        _look_closer(store, verdict)


def _look_closer(store: Store, verdict: Verdict) -> None:
    """Has the tracers of a job that runs keep every GPU operation of the next moment, of the ranks to be compared."""
    found = sorted({rank for finding in verdict["findings"] for rank in finding["ranks"]})[:FLAGGED_RANKS]
    others = [rank for rank in range(verdict["ranks"]) if rank not in found][:REFERENCES]
    now, kinds = time.time_ns(), dict.fromkeys(finding["kind"] for finding in verdict["findings"])
    wanted = Flag(now, now + FLAGGED_NS, (*found, *others), ", ".join(kinds))
    job, run = verdict["job"], verdict["run"]
    # The verdict is there and stored; a store that is gone by now takes nothing from it.
    with contextlib.suppress(ArgusError):
        if not int(query_columns(store, sql.FLAGGED, {"job": job, "run": run})["n"][0]):
            flag(store, job, run, wanted)
