"""The comparison: what ``argus compare --format json`` prints. The contract is ``comparison.schema.json`` beside this
file.

The status follows from two questions, each with its own chance of a false answer. Did the step time change: by a t-test
on run means, with :data:`LEVEL`. Did something in it change: each figure of each comparer, all together with
:data:`argus.compare.changes.LEVEL`. A run whose kernels are 10 % slower in one place is found by the second where the
first drowns in how much runs differ. ``same`` is a finding as well: the step time differs by less than :data:`MARGIN`,
with 95 % certainty (two one-sided tests). What is left is ``inconclusive``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from argus.compare.changes import CAPPED, GIVEN, LEAST_COST, Cause, confidence_of, find_causes
from argus.compare.comparer import Side
from argus.compare.workload import Workload, compare_workloads
from argus.diagnose.read.environment import environment_changes
from argus.diagnose.read.profile import Profile
from argus.diagnose.variation import SPREAD, Difference, difference, runs_needed
from argus.model.units import duration

SCHEMA = "argus.comparison/1"
LEVEL = 0.0025
"""Chance that the step time of runs that do not differ is called changed."""
LEAST = 0.01
"""Share of the step time that counts as a change of it."""
MARGIN = 0.03
"""Share of the step time by which runs that are called the same may differ: three times what runs of a healthy cluster
usually do."""
PART = 0.1
"""Part of a change without a cause that a figure must have to be mentioned."""
NOT_HEALTHY = 8
"""Verdicts on the runs that are noted at most."""
EXIT_CODES = {"same": 0, "changed": 10, "inconclusive": 12}
"""As those of ``argus diagnose``: 10 there is something, 12 it cannot be decided."""

Status = Literal["same", "changed", "inconclusive"]


class RunFacts(TypedDict):
    """One run: ``step_ns`` its mean step, ``error_ns`` the standard error of that within the run (-1: unknown)."""

    job: str
    run: int
    ranks: int
    hosts: list[str]
    steps: int
    step_ns: float
    error_ns: float


class CauseFacts(TypedDict):
    """One cause: ``cost_ns`` what a step became longer by it, ``interval_ns`` its 95 % interval, ``share`` of the
    change."""

    kind: str
    subject: str
    text: str
    before: float
    after: float
    unit: str
    cost_ns: float
    interval_ns: list[float]
    share: float
    confidence: float


class Change(TypedDict):
    """A fact of the environment that differs."""

    name: str
    before: str
    after: str


class Comparison(TypedDict):
    """All of it."""

    schema: str
    status: Status
    direction: str
    confidence: float
    reason: str
    before: list[RunFacts]
    after: list[RunFacts]
    step_ns: dict[str, float]
    interval_ns: list[float]
    workload: dict[str, Any]
    causes: list[CauseFacts]
    environment: list[Change] | None
    figures: int
    runs_needed: int | None
    notes: list[str]


def _environment(before: Side, after: Side) -> list[Change] | None:
    """What no run of one side has in common with a run of the other; None: of one side nothing is known."""
    found = environment_changes([one.environment for one in before], [one.environment for one in after])
    return None if found is None else [Change(name=one.fact, before=one.before, after=one.after) for one in found]


def compare(before: Side, after: Side, verdicts: Mapping[tuple[str, int], str] | None = None) -> Comparison:
    """Two sides of runs, at least one each.

    Args:
        before, after: The runs.
        verdicts: What is stored of how they were, in words that begin with the status, by job and run.
    """
    verdicts = verdicts or {}
    step = difference([one.step for one in before], [one.step for one in after], spread=SPREAD)
    workload = compare_workloads(before, after)
    causes, compared, undecided = find_causes(before, after, step.before, changed=_longer(step))
    status, direction, reason, confidence = _status(step, causes, compared, workload)
    hung = [one for one in after if verdicts.get((one.job, one.run), "").startswith("hung")]
    if hung and status == "same":
        status, confidence = "inconclusive", 0.0
        reason = f"{_names(hung)} hung: until then {reason}"
    most = max(len(before), len(after))
    needed = None
    if status == "inconclusive" and not workload.mixed and not hung:
        needed = max(runs_needed(step, MARGIN * step.before, most, LEVEL), 2)
        few = "at least " if needed >= 100 else ""
        reason += f"; {few}{needed} runs a side would decide, if they scatter as these do"
    return Comparison(
        schema=SCHEMA, status=status, direction=direction, confidence=round(confidence, 4), reason=reason,
        before=[_facts(one) for one in before], after=[_facts(one) for one in after],
        step_ns={"before": round(step.before, 1), "after": round(step.after, 1), "change": round(step.change, 1)},
        interval_ns=[round(step.low, 1), round(step.high, 1)], workload=_workload(workload),
        causes=[_cause(one, step) for one in causes], environment=_environment(before, after),
        figures=compared, runs_needed=needed,
        notes=[
            *_unexplained(status, causes, undecided, step, most), *_not_healthy(before, after, verdicts),
            *_notes(before, after, step, workload),
        ],
    )  # fmt: skip


def _names(side: Side) -> str:
    return ", ".join(f"{one.job}@{one.run}" for one in side)


def _unexplained(status: Status, causes: list[Cause], undecided: list[Cause], step: Difference, runs: int) -> list[str]:
    """What a change without a cause needs."""
    if status != "changed" or any(cause.cost_ns for cause in causes):
        return []
    text = "no single figure changed by more than it varies between runs, so where the change comes from is not known"
    likely = [one for one in undecided if one.cost_ns * step.change > 0 and abs(one.cost_ns) >= PART * abs(step.change)]
    nearest = max(likely, key=lambda one: abs(one.cost_ns), default=None)
    if nearest is None:
        return [f"{text}: what would show it was not observed"]
    name = f"{nearest.figure.kind.replace('_', ' ')} {nearest.figure.subject}".rstrip()
    low, high = (duration(value, signed=True) for value in sorted((nearest.low_ns, nearest.high_ns)))
    more = max(runs_needed(nearest.found, abs(nearest.found.change), runs, GIVEN), 3)
    text += f"; the largest change is {name}, {duration(nearest.cost_ns, signed=True)} ({low} to {high})"
    return [f"{text}: {more} runs a side would show it, if they scatter as these do"]


def _not_healthy(before: Side, after: Side, verdicts: Mapping[tuple[str, int], str]) -> list[str]:
    """What the runs' own verdicts say, of those that are not healthy."""
    return [
        f"the verdict on {one.job}@{one.run} is {text}"
        for one in (*before, *after)
        if (text := verdicts.get((one.job, one.run), "")) and not text.startswith(("healthy", "inconclusive"))
    ][:NOT_HEALTHY]


def _longer(step: Difference) -> bool:
    """Whether the step time changed, longer or shorter."""
    return step.p < LEVEL and abs(step.change) >= LEAST * step.before


def _status(step: Difference, causes: list[Cause], compared: int, workload: Workload) -> tuple[Status, str, str, float]:
    if workload.mixed:
        return "inconclusive", "", f"{workload.mixed}: compare them size by size", 0.0
    status, direction, reason, confidence = _status_of_steps(step, causes, compared)
    if (found := workload.scaling) is not None:
        sizes = f"{found.ranks[0]:,} to {found.ranks[1]:,} ranks"
        reason = f"scaling from {sizes} is {found.efficiency:.0%} efficient: {reason}"
    return status, direction, reason, confidence


def _status_of_steps(step: Difference, causes: list[Cause], compared: int) -> tuple[Status, str, str, float]:
    costly = [cause for cause in causes if cause.cost_ns]
    longer = _longer(step)
    amount = f"a step takes {duration(step.after)} instead of {duration(step.before)}"
    if longer or costly:
        total = step.change if longer else sum(cause.cost_ns for cause in costly)
        sure = max([confidence_of(step)] * longer + [cause.confidence for cause in costly])
        if longer:
            return "changed", "slower" if total > 0 else "faster", f"{amount} ({step.change / step.before:+.1%})", sure
        text = f"{amount}, which is within how much runs differ, but the causes below changed by more than that"
        return "changed", "slower" if total > 0 else "faster", text, sure
    from scipy.stats import t

    half = float(t.ppf(0.95, step.df)) * step.error
    least = MARGIN * step.before
    worst = max(abs(step.change - half), abs(step.change + half))
    if worst < least and not step.assumed:
        text = (
            f"the step time differs by less than {worst / step.before:.1%}, and none of {compared} figures changed by "
            f"more than runs do and {LEAST_COST:.1%} of a step"
        )
        both = float(t.sf((least - abs(step.change)) / step.error, step.df))
        return "same", "", text, min(1 - both, CAPPED)
    text = f"the step time differs by {step.change / step.before:+.1%}, give or take {half / step.before:.1%}"
    return "inconclusive", "", text, 0.0


def _facts(profile: Profile) -> RunFacts:
    return RunFacts(
        job=profile.job, run=profile.run, ranks=profile.ranks, hosts=list(profile.hosts), steps=profile.steps,
        step_ns=round(profile.step.value, 1), error_ns=round(profile.step.error, 1),
    )  # fmt: skip


def _cause(cause: Cause, step: Difference) -> CauseFacts:
    figure, found = cause.figure, cause.found
    share = cause.cost_ns / step.change if step.change * cause.cost_ns > 0 else 0.0
    return CauseFacts(
        kind=figure.kind, subject=figure.subject, text="; ".join(filter(None, [figure.text, figure.note])),
        before=round(found.before, 1), after=round(found.after, 1), unit=figure.unit, cost_ns=round(cause.cost_ns, 1),
        interval_ns=sorted((round(cause.low_ns, 1), round(cause.high_ns, 1))), share=round(share, 4),
        confidence=round(cause.confidence, 4),
    )  # fmt: skip


def _workload(workload: Workload) -> dict[str, Any]:
    scaling = workload.scaling
    return {
        "same": None if workload.unknown else workload.same,
        "differences": list(workload.differences), "unobserved": list(workload.unobserved),
        "scaling": None if scaling is None else {
            "ranks": list(scaling.ranks), "work": round(scaling.work, 4), "efficiency": round(scaling.efficiency, 4),
            "weak": scaling.weak, "strong": scaling.strong,
            "eaten": [{"part": name, "cost_ns": round(cost, 1)} for name, cost in scaling.eaten],
        },
    }  # fmt: skip


def _notes(before: Side, after: Side, step: Difference, workload: Workload) -> list[str]:
    notes = []
    if step.assumed:
        notes.append(
            f"one run a side: how much runs differ is not known, {SPREAD:.1%} is assumed, and confidence is low; "
            "compare several runs a side"
        )
    elif min(len(before), len(after)) == 1:
        notes.append("one side has one run: how much such runs differ is taken from the other side")
    if workload.unobserved:
        notes.append(f"not observed on both sides, and not compared: {', '.join(workload.unobserved)}")
    open_runs = [f"{one.job}@{one.run}" for one in (*before, *after) if not one.ended]
    if open_runs:
        notes.append(f"still running, or cut off: {', '.join(open_runs)}")
    return notes


def to_json(comparison: Comparison, *, indent: int | None = 2) -> str:
    """The comparison as text."""
    return json.dumps(comparison, indent=indent, ensure_ascii=False, allow_nan=False)


def schema() -> dict[str, Any]:
    """The JSON schema of a comparison."""
    text = (Path(__file__).parent / "comparison.schema.json").read_text(encoding="utf-8")
    contract: dict[str, Any] = json.loads(text)
    return contract
