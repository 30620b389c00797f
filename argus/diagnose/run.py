"""From stored rows to a verdict on one run of one job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import HANG_S, MIN_STEPS, THRESHOLD, Asked, Case, hosts_of, step_time
from argus.diagnose.causes import behaviour, node_health
from argus.diagnose.causes.stacks import StackReader
from argus.diagnose.detector import ask, examining
from argus.diagnose.detectors import DETECTORS
from argus.diagnose.findings import findings_of
from argus.diagnose.iteration import dumps, short
from argus.diagnose.ranks.lateness import RECENT_STEPS
from argus.diagnose.read import queries
from argus.diagnose.read.ahead import Ahead, remembered
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.query import Query, of_job
from argus.diagnose.reason import conclude, name_failed, waits_least, without_steps
from argus.diagnose.verdict import SCHEMA, Verdict
from argus.diagnose.whatif import dependencies, operations, relief
from argus.diagnose.whatif.dependencies import Layout, Operations
from argus.model.errors import ArgusError

SURE_STEP = 0.8
"""Steps whose boundary is less sure than this (an evaluation among them, lost records) are left out."""
CUT_OFF_S = 15.0
"""An open trace that has not written its counters for so long was killed, or could not store them (every 4 s else)."""


@dataclass(frozen=True)
class _Request:
    """What :func:`diagnose` was asked."""

    params: dict[str, Any]
    steps: tuple[int | None, int | None]
    asked: Asked
    across: Hosts | None
    stacks: StackReader | None
    newest: int | None
    judged: Callable[[Case], None] | None = None


def diagnose(
    query: Query,
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
    judged: Callable[[Case], None] | None = None,
) -> Verdict:
    """The verdict on one run of one job.

    Args:
        query: Runs SQL with parameters, returns columns.
        job: The job.
        run: Its tracing session.
        steps: First and last step to compare; None: as stored.
        threshold: Lost share of the step time that counts.
        hang_after_s: Silence after the last step that counts as a hang, s.
        across: How the hosts of the job go together; None: it has one, or all have the same clock.
        stacks: Where threads were; None: nothing is known of them.
        since_ns: Only what came later, wall time.
        newest: Only so many of the newest steps; None: all.
        judged: Is given what was compared, with all that was read, once the detectors are through. Not called where
            steps could not be compared.

    Returns:
        The verdict. What the job does now, in the newest of these steps, decides.
    """
    params: dict[str, Any] = {"job": job, "run": run, "since_ns": since_ns}
    if across is not None:
        query = of_job(query)
        params |= across.params()
    asked = Asked(threshold, hang_after_s, to_the_end=steps[1] is None, whole=newest is None and not since_ns)
    with Ahead(query) as ahead:
        verdict = _diagnose(ahead, _Request(params, steps, asked, across, stacks, newest, judged))
        if since_ns and verdict["status"] == "inconclusive" and steps[1] is None:
            # A job that hangs makes no steps: those before show what it has not made since.
            before = {**params, "since_ns": 0}
            if int(ahead(queries.LAST_LOOK, before)["looked_ns"][0]) >= since_ns:
                last = _diagnose(ahead, _Request(before, steps, asked, across, stacks, RECENT_STEPS))
                return last if last["status"] == "hung" else verdict
        return verdict


def _diagnose(ahead: Ahead, request: _Request) -> Verdict:
    """:func:`diagnose` with a query that can be begun before."""
    params = request.params
    for text in (queries.SPAN, queries.LAST_LOOK, queries.GROUPS, queries.STATES, queries.HOSTS):
        ahead.start(text, params)
    query = remembered(ahead)
    verdict, world_size = _empty(query, params)
    span = query(queries.SPAN, params)
    if not len(span["n"]) or not int(span["n"][0]):
        _by_other_than_steps(verdict, query, params)
        return verdict
    params["first"], params["last"] = _bounds(span, request)
    ahead.start(queries.STEPS, params)
    recorded = operations.read(query, params)
    if recorded is not None:
        _by_operations(verdict, query, params, recorded, request.asked.threshold, world_size)
        return verdict
    series = query(queries.STEPS, params)
    sure = series["confidence"] >= SURE_STEP
    numbers = series["step"][sure].astype(np.int64)
    durations = series["duration_ns"][sure].astype(np.float64)
    verdict["ranks"] = int(series["ranks"].max(initial=0))
    if len(series["step"]):
        verdict["steps"] = [int(series["step"][0]), int(series["step"][-1])]
    calls = float(np.median(series["calls"][sure]) * verdict["ranks"]) if len(numbers) else 0.0
    case = Case(
        query, ahead, params, request.asked, numbers, durations, verdict["ranks"], calls, request.across, request.stacks
    )
    if len(numbers) < MIN_STEPS:
        unsure = len(series["step"]) - len(numbers)
        verdict["reason"] = f"{len(numbers)} whole steps were seen, {MIN_STEPS} are needed" + (
            f" ({unsure} more had no sure boundary)" if unsure else ""
        )
        _by_few_steps(verdict, case)
        return verdict
    _by_detectors(verdict, case, world_size)
    if request.judged is not None:
        request.judged(case)
    return verdict


def _by_detectors(verdict: Verdict, case: Case, world_size: int) -> None:
    """Fills in the verdict on a job whose steps are compared."""
    ask(DETECTORS, case)
    suspects = case.suspects
    if any(suspect.kind == "hang" for suspect in suspects):
        with examining(case, "node_health"):
            node_health.add(case.query, case.params, suspects, case.hosts)
        verdict["status"], verdict["findings"] = "hung", findings_of(suspects, verdict["job"], verdict["run"])
        verdict["slowdown"] = verdict["findings"][0]["slowdown"]
        name_failed(verdict, case.failed)
        return
    step, dearer_ns = case.step, 0.0
    with examining(case, "behaviour"):
        behaviour.begin(case, suspects)
    with examining(case, "relief"):
        whatif, dearer_ns = relief.add(case, suspects, step.now_ns)
        if whatif is not None:
            verdict["whatif"] = whatif
    with examining(case, "behaviour"):
        behaviour.add(case, suspects)
    with examining(case, "node_health"):
        node_health.add(case.query, case.params, suspects, case.hosts)
    verdict["findings"] = findings_of(suspects, verdict["job"], verdict["run"])
    verdict["slowdown"] = round(max(1.0, step.now_ns / (step.ideal_ns + dearer_ns)), 4)
    with examining(case, "status"):
        conclude(verdict, case, step.now_ns, world_size)
    name_failed(verdict, case.failed)


def _empty(query: Query, params: Mapping[str, Any]) -> tuple[Verdict, int]:
    """A verdict with the facts on the trace itself; and the ranks of the job by its launcher (0: unknown)."""
    lost = query(queries.COVERAGE, params)
    dropped = {str(c): int(v) for c, v in zip(lost["counter"], lost["value"], strict=True) if v > 0}
    sessions = query(queries.SESSIONS, params)
    ended = not len(sessions["open"]) or int(sessions["open"][0]) == 0
    seen = query(queries.LAST_LOOK, params)
    if not ended and int(seen["now_ns"][0]) - int(seen["looked_ns"][0]) > CUT_OFF_S * 1e9:
        dropped["trace_cut_off"] = 1
    verdict = Verdict(
        schema=SCHEMA,
        job=params["job"],
        run=params["run"],
        ranks=0,
        steps=[],
        status="inconclusive",
        slowdown=1.0,
        findings=[],
        coverage={"complete": not dropped, "dropped": dropped, "ended": ended},
        reason="",
    )
    return verdict, int(sessions["world_size"][0]) if len(sessions["world_size"]) else 0


def _bounds(span: Mapping[str, NDArray[Any]], request: _Request) -> tuple[int, int]:
    """The first and the last step to compare."""
    begin, end = request.steps
    first = int(span["first"][0]) if begin is None else max(0, begin)
    last = int(span["last"][0]) if end is None else max(0, end)
    if request.params["since_ns"]:
        first = max(first, int(span["first"][0]))
    if request.newest is not None:
        first = max(first, last - request.newest + 1)
    return first, last


def _by_other_than_steps(verdict: Verdict, query: Query, params: Mapping[str, Any]) -> None:
    """Fills in the verdict on a run without a step: of dumps, or why there is none."""
    if dumps.conclude(query, params, verdict):
        return
    since_ns = params["since_ns"]
    verdict["reason"] = "no whole training step was seen" + (" since then" if since_ns else "")
    if not since_ns:
        reason = without_steps(query, params, query(queries.LAST_LOOK, params)) or verdict["reason"]
        verdict["reason"] = "; ".join(filter(None, [reason, waits_least(query, params)]))


def _by_few_steps(verdict: Verdict, case: Case) -> None:
    """Fills in the verdict on a recording of few steps: what the GPUs' times and kernels prove, and why the rest is not
    reported."""
    query, params, numbers = case.query, case.params, case.numbers
    suspects = short.slow_ranks(query, params, numbers, case.durations, case.hosts, case.across, case.threshold)
    step_ns = float(np.median(case.durations)) if len(numbers) else 0.0
    if len(numbers):
        waiting, of_gpus_ns = short.waiting(case, [rank for suspect in suspects for rank in suspect.ranks])
        step_ns = of_gpus_ns if waiting or not suspects else step_ns
        suspects += waiting
    rest = f"{verdict['reason']} for what the GPUs' own times do not show: late ranks, changes"
    if suspects:
        verdict["status"] = "degraded"
        verdict["findings"] = findings_of(suspects, verdict["job"], verdict["run"])
        step = step_time(step_ns, suspects)
        verdict["slowdown"] = round(max(1.0, step.now_ns / step.ideal_ns), 4)
        verdict["reason"] = rest
    elif len(numbers) >= short.MIN_STEPS and short.comparable(query, params, numbers, case.across):
        verdict["reason"] = f"{rest}; kernels of ranks with the same work take equally long"


def _by_operations(
    verdict: Verdict,
    query: Query,
    params: dict[str, Any],
    recorded: tuple[Operations, Layout],
    threshold: float,
    world_size: int,
) -> None:
    """Fills in the verdict on a run whose operations are stored."""
    rows, layout = recorded
    verdict["ranks"] = len(np.unique(rows.rank))
    verdict["steps"] = [int(rows.step.min()), int(rows.step.max())]
    try:
        model = dependencies.build(rows, layout)
    except ArgusError as failure:
        verdict["reason"] = f"the step's dependencies cannot be rebuilt: {failure}"
        return
    answers = dependencies.answer(model)
    verdict["whatif"] = operations.in_verdict(answers)
    left_out = "; ".join(model.notes)
    if len(model.steps) < operations.MIN_STEPS:
        verdict["reason"] = f"{len(model.steps)} whole steps are stored, {operations.MIN_STEPS} are needed"
        return
    suspects, lost_ns = operations.causes(model, answers, params, hosts_of(query, params), threshold)
    verdict["findings"] = findings_of(suspects, verdict["job"], verdict["run"], lost_ns)
    workers = layout.data * layout.pipeline
    if suspects:
        verdict["status"] = "degraded"
        verdict["slowdown"] = round(max(1.0, answers.slowdown), 4)
        verdict["reason"] = left_out
    elif world_size and verdict["ranks"] < workers:
        recorded_text = f"{verdict['ranks']} of {workers} workers are recorded, and nothing slows them down"
        verdict["reason"] = "; ".join(filter(None, [recorded_text, left_out]))
    else:
        verdict["status"] = "healthy"
        verdict["reason"] = left_out
