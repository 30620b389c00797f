"""From stored rows to a verdict on one run of one job.

Confidence of a straggler is (share of steps in which it was last) x (1 - chance that turns look so) x 0.7 where neither
CUDA calls nor phases were stored to tell its cause. Confidence of a regression is the share of (earlier, later) step
pairs that it orders.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import operations, sql, step_times, whatif
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
from argus.diagnose.hang import HANG_S, find_hang
from argus.diagnose.hosts import Hosts, align_hosts, prepare, spoken
from argus.diagnose.iteration import find_regression
from argus.diagnose.jitter import WINDOW as JITTER_STEPS
from argus.diagnose.jitter import find_jitter
from argus.diagnose.phase import (
    RECENT_STEPS,
    WINDOWS,
    Lateness,
    Straggler,
    find_episode,
    find_onset,
    find_stragglers,
    lateness_of,
)
from argus.diagnose.verdict import SCHEMA, Evidence, Finding, Status, Verdict, to_json
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
"""An open trace that has not written its counters for so long was killed, or could not store them (every 2 s else)."""
FLAGGED_NS = 5_000_000_000
"""How much of a running job's next moments is kept operation by operation once something was found, ns."""
FLAGGED_RANKS = 8
"""Of so many of the ranks found, and of some others."""
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
    evidence: list[Evidence]
    phase: str
    kernels: list[str]


def diagnose(
    query: sql.Query,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    across: Hosts | None = None,
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

    Returns:
        The verdict. What the job does now, in the newest of these steps, decides.
    """
    params: dict[str, Any] = {"job": job, "run": run}
    if across is not None:
        query = sql.of_job(query)
        params |= across.params()
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
        verdict["reason"] = "no whole training step was seen"
        traced = query(sql.STATES, params)["state"]
        if int(look["looked_ns"][0]) and not int(look["called_ns"][0]) and np.any(traced == "traced"):
            verdict["reason"] = (
                f"{len(traced)} processes made no CUDA or NCCL call while they were traced: they hang, wait or idle"
            )
        return verdict
    params["first"] = int(span["first"][0]) if steps[0] is None else max(0, steps[0])
    params["last"] = int(span["last"][0]) if steps[1] is None else max(0, steps[1])
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
        return verdict

    doubt = ""
    if steps[1] is None:
        hang, doubt = find_hang(query, params, float(np.median(durations)), hang_after_s)
        if hang is not None:
            verdict["status"], verdict["slowdown"] = "hung", hang["slowdown"]
            verdict["findings"].append(hang)
            return verdict

    lateness, why_not = _lateness(query, params, numbers)
    hosts = _hosts(query, params)
    by_times = None
    if lateness is None and across is None:
        only = query(sql.ONLY_STEPS, params)
        if not int(only["calls"][0]) and not int(only["found"][0]):
            by_times = step_times.judge(query, params, hosts, threshold, float(np.median(durations[-RECENT_STEPS:])))
            why_not = "" if by_times is not None else "step times of fewer than 2 ranks are stored, and nothing else"
    losses: list[_Loss] = []
    blurred = ""
    if lateness is not None:
        at = np.searchsorted(numbers, lateness.steps)
        # Where only the forward is visible, a third of the loss is: the cause decides below.
        least = threshold / (1 + HIDDEN_BACKWARD)
        for straggler in find_stragglers(lateness, durations[at], least):
            mine, others = _places(straggler, lateness, hosts)
            error_ns = across.between(mine, others) if across is not None else 0
            if straggler.gain_ns <= error_ns:
                blurred = (
                    f"{_name(straggler.ranks)} came {spoken(straggler.gain_ns)} after everybody else, "
                    f"less than the clocks of the hosts may differ by ({spoken(error_ns)})"
                )
                continue
            loss = _judge(query, params, straggler, lateness, numbers, durations)
            if across is not None and (agreement := across.agreement(mine, others)):
                loss.evidence.append({"text": agreement, "sql": sql.shown(sql.CLOCKS, params)})
            if loss.loss_ns >= threshold * float(np.median(durations[-straggler.window :])):
                losses.append(loss)
    now = float(np.median(durations[-RECENT_STEPS:]))
    saved = min(sum(loss.loss_ns for loss in losses), 0.95 * now)
    ideal = now - saved
    if by_times is not None:
        verdict["findings"] += by_times.findings
        # Whoever waits for the slowest rank takes as long as it does.
        now *= by_times.slowest
    regression = find_regression(durations)
    if regression is not None:
        onset = int(numbers[regression.index])
        onsets = [int(np.searchsorted(numbers, loss.onset)) for loss in losses]
        explained = any(abs(place - regression.index) <= MIN_STEPS for place in onsets)
        slower = None if explained else _slower(query, {**params, "onset": onset})
        if explained or slower is None:
            regression = None
        else:
            grown = regression.after_ns / regression.before_ns
            ideal /= grown
            findings_sql = sql.shown(sql.SLOWER, {**params, "onset": onset})
            text = (
                f"from step {onset} on a step takes {_ms(regression.after_ns)} instead of {_ms(regression.before_ns)}, "
                f"on {slower:.0%} of the ranks, and no rank holds up the others more than before"
            )
            lost_ns = now - now / grown
            verdict["findings"].append(
                Finding(
                    kind="regression",
                    ranks=[],
                    hosts=[],
                    steps=[onset, int(numbers[-1])],
                    phase="",
                    kernels=[],
                    slowdown=round(grown, 4),
                    share=lost_ns,
                    confidence=round(regression.confidence, 4),
                    level="iteration",
                    evidence=[{"text": text, "sql": findings_sql}],
                    action=f"Find out what changed for all ranks at step {onset}: batch or sequence length, "
                    "checkpointing, the network, a power or thermal limit.",
                )
            )
    for loss in losses:
        verdict["findings"].append(_finding(loss, hosts, now))
    jitter, long_steps = find_jitter(
        query, params, numbers, durations, hosts, threshold, across.worst_ns if across is not None else 0
    )
    if jitter is not None and not any(finding["ranks"] == jitter["ranks"] for finding in verdict["findings"]):
        verdict["findings"].append(jitter)
        mean = float(np.mean(durations[-JITTER_STEPS:]))
        now, ideal = now + jitter["share"], min(ideal, mean - jitter["share"])
    lost_ns = max(sum(finding["share"] for finding in verdict["findings"]), 1.0)
    for finding in verdict["findings"]:
        finding["share"] = round(finding["share"] / lost_ns, 4)
    verdict["findings"].sort(key=lambda finding: -finding["share"])
    verdict["slowdown"] = round(max(1.0, now / ideal), 4)
    trouble = across.trouble(threshold * now) if across is not None else ""
    if across is not None and lateness is not None:
        alone = sorted(set(hosts) - set(lateness.ranks.tolist()))
        if alone and not trouble:
            trouble = f"{_name(alone)} could not be compared with others, which collectives are the same is not known"
    if verdict["findings"]:
        verdict["status"] = "degraded"
        judged = lateness is not None or by_times is not None
        verdict["reason"] = trouble if judged else f"stragglers could not be judged: {trouble or why_not}"
    elif trouble or blurred:
        verdict["slowdown"] = 1.0
        verdict["reason"] = "; ".join(filter(None, [doubt, blurred, trouble]))
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
            past = _history(query, params, numbers, durations, threshold, across.worst_ns if across is not None else 0)
        agreement = across.agreement(across.names[:1], across.names) if across is not None else ""
        verdict["reason"] = long_steps or past or agreement
    if across is not None and across.not_stored:
        note = f"what is known of the hosts' clocks could not be stored: {across.not_stored}"
        verdict["reason"] = "; ".join(filter(None, [verdict["reason"], note]))
    return verdict


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


def _places(straggler: Straggler, lateness: Lateness, hosts: dict[int, str]) -> tuple[list[str], list[str]]:
    """The hosts of ranks that come late, and those of the others."""
    late = straggler.ranks + straggler.waiting
    mine = [hosts[rank] for rank in straggler.ranks if rank in hosts]
    return mine, [hosts[rank] for rank in lateness.ranks.tolist() if rank not in late and rank in hosts]


def _lateness(query: sql.Query, params: dict[str, Any], numbers: NDArray[np.int64]) -> tuple[Lateness | None, str]:
    """Lateness in the newest steps, or why there is none."""
    recent = numbers[-max(WINDOWS) :]
    rows = query(sql.LATENESS, {**params, "first": int(recent[0])})
    lateness = lateness_of(rows, recent)
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


def _judge(
    query: sql.Query,
    params: dict[str, Any],
    straggler: Straggler,
    lateness: Lateness,
    numbers: NDArray[np.int64],
    durations: NDArray[np.float64],
) -> _Loss:
    """Since when, why, and how much a straggler costs."""
    ranks = list(straggler.ranks)
    late = ranks + list(straggler.waiting)
    lead = query(sql.LEAD, {**params, "ranks": late})
    kept = np.isin(lead["step"].astype(np.int64), numbers)
    lead_steps = lead["step"][kept].astype(np.int64)
    lead_ns = (lead["suspects_ns"] - lead["others_ns"])[kept]
    since = find_onset(lead_ns, straggler.gain_ns) if len(lead_steps) else 0
    # Late in all steps in which it could be compared: others may have been seen for longer.
    onset = int(lead_steps[since]) if since else int(numbers[0])
    last = int(numbers[-1])
    cited = {**params, "ranks": late, "first": onset}

    others = [int(rank) for rank in lateness.ranks if rank not in late]
    chosen = others[:: max(1, len(others) // REFERENCES)][:REFERENCES]
    window = {**params, "first": max(onset, int(lateness.steps[-straggler.window :][0])), "ranks": ranks + chosen}
    cpu = query(sql.CPU_TIME, window)
    cause = attribute(cpu, straggler.ranks, straggler.gain_ns)
    compared = sql.CPU_TIME
    if not cause.known:
        by_phase = attribute_by_phases(query(sql.PHASE_TIME, window), straggler.ranks, straggler.gain_ns)
        if by_phase is not None:
            cause, compared = by_phase, sql.PHASE_TIME

    kernels = longer = None
    if cause.kind == "compute_straggler" and not cause.phase:
        kernels = slow_kernels(query(sql.GPU_PHASE_TIME, window), straggler.ranks, straggler.gain_ns)
        summed = {**window, "last": int(numbers[-1])}
        longer = long_kernels(query(sql.KERNEL_TIME, summed), straggler.ranks, straggler.gain_ns)

    step_ns = float(np.median(durations[-straggler.window :]))
    inside = np.isin(lateness.ranks, ranks)
    tail = lateness.tail(straggler.window)
    first_ns = float(np.nanmedian(tail.first[inside]))
    last_ns = float(np.nanmedian(tail.last[inside]))
    flat = last_ns <= FLAT * first_ns
    name = _name(ranks)
    evidence: list[Evidence] = [
        {
            "text": f"{name} came last to the collectives in {straggler.persistence:.0%} of the newest "
            f"{straggler.window} steps, {_ms(straggler.gain_ns)} after everybody else, of {_ms(step_ns)} a step",
            "sql": sql.shown(sql.LEAD, cited),
        },
        {"text": cause.text, "sql": sql.shown(compared, window)},
    ]
    if kernels is not None:
        evidence.append({"text": kernels.text, "sql": sql.shown(sql.GPU_PHASE_TIME, window)})
    if longer is not None:
        evidence.append({"text": longer.text, "sql": sql.shown(sql.KERNEL_TIME, summed)})
    loss = straggler.gain_ns if kernels is None else max(straggler.gain_ns, min(kernels.excess_ns, step_ns))
    before = durations[numbers < onset]
    if len(before) >= MIN_STEPS:
        was = float(np.median(before[-max(WINDOWS) :]))
        if step_ns - was > loss:
            loss = step_ns - was
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
        cause.phase
        or (kernels.phase if kernels is not None else "")
        or ("before the first collective" if flat else "between the collectives")
    )
    return _Loss(straggler, onset, last, cause, loss, evidence, phase, [] if longer is None else longer.names)


def _finding(loss: _Loss, hosts: dict[int, str], step_ns: float) -> Finding:
    straggler = loss.straggler
    names = list(dict.fromkeys(hosts[rank] for rank in straggler.ranks if rank in hosts))
    where = _name(list(straggler.ranks)) + (f" on {', '.join(names[:4])}" if names else "")
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
    if loss.cause.kind == "compute_straggler" and loss.cause.phase:
        actions["compute_straggler"] = (
            f"See what {where} does there that the others do not: "
            f"argus export svg --rank {straggler.ranks[0]} --diff rank=others -o diff.svg."
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
        level="kernel" if loss.kernels else "phase",
        evidence=loss.evidence,
        action=actions[loss.cause.kind],
    )


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
) -> str:
    """A sentence on what a job that is healthy now went through before; empty: nothing. Ranks' times may be ``blur_ns``
    off one another."""
    rows = query(sql.LAST, params)
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


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {listed}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def diagnose_store(
    store: Store,
    job: str,
    run: int,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    threshold: float = THRESHOLD,
    hang_after_s: float = HANG_S,
    keep: bool = True,
) -> Verdict:
    """:func:`diagnose` on a store. ``keep``: how the hosts of the job go together is stored."""
    query = partial(query_columns, store)
    across = prepare(store, query, job, run) if keep else align_hosts(query, job, run)
    return diagnose(query, job, run, steps=steps, threshold=threshold, hang_after_s=hang_after_s, across=across)


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
