"""Steps that are longer than those of earlier runs, on all ranks and from the first one on: a regression against the
baseline, which a run alone cannot show.

A new run is expected within a prediction interval of the runs before it (Student's t): what runs scatter by, what is
usually between runs, and what steps scatter by within one (:mod:`argus.diagnose.variation`). Beside it the distribution
of the issue latency is compared with the learned ones by W1, as Flare (NSDI '26) does: it shows a slow CPU side before
steps get longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from argus.diagnose.case import Case, evidence
from argus.diagnose.read import queries
from argus.diagnose.read.baseline import Baseline
from argus.diagnose.read.profile import FEWEST_STEPS, WARM_UP, Profile, read_latencies, read_profile
from argus.diagnose.suspect import Suspect
from argus.diagnose.variation import SPREAD, Difference, Mean, difference, mean_of, w1
from argus.diagnose.verdict import Evidence
from argus.model.errors import ArgusError
from argus.model.units import milliseconds

MIN_RUNS = 3
"""Earlier runs below which nothing is reported: two show next to nothing of how much runs scatter."""
LEVEL = 0.005
"""Chance that a healthy new run is called slower, one-sided."""
LEAST = 0.025
"""Share of the step time from which on it is reported: less is not worth a search."""
DIFFERENT_WORK = 0.02
"""By how much launches and collectives of a step may differ from the baseline's."""
UNLIKE, UNLIKE_TIMES = 0.1, 3.0
"""W1 of the issue latency over the mean that is reported, and how many times as far as from one another the baseline's
runs it must be."""
CAPPED = 0.99
"""Confidence at most: the baseline is of other days."""


def detect(case: Case) -> list[Suspect]:
    """The regression against earlier runs, less what other suspects explain."""
    if not case.asked.whole or (baseline := case.baseline) is None or not case.asked.to_the_end:
        return []
    numbers = case.numbers[min(WARM_UP, len(case.numbers) // 10) :]
    if len(numbers) < FEWEST_STEPS:
        return []
    params = {**case.params, "first": int(numbers[0]), "last": int(numbers[-1]), "class": baseline.name}
    steps = case.query(queries.RUN_STEPS, case.params)
    used = np.isin(steps["step"].astype(np.int64), numbers)
    work = {name: float(np.mean(steps[name][used])) for name in ("launches", "collectives")}
    runs = [run for run in baseline.runs if _alike(run, work)]
    others = len(baseline.runs) - len(runs)
    if len(runs) < MIN_RUNS:
        case.notes.history = _too_few(len(runs), others, baseline)
        return []
    step = mean_of(steps["duration_ns"][used].astype(np.float64))
    explained = case.step.ideal_ns / case.step.now_ns
    found = difference([run.step for run in runs], [step * explained], spread=SPREAD, single=True)
    cited = _latency(case, params, runs)
    if found.change < LEAST * found.before or found.p / 2 >= LEVEL:
        if cited:
            case.notes.history = cited[0]["text"]
        return []
    return [_suspect(case, params, runs, found, cited)]


def _suspect(
    case: Case, params: dict[str, Any], runs: Sequence[Profile], found: Difference, cited: list[Evidence]
) -> Suspect:
    grown = found.after / found.before
    names = ", ".join(str(run.run) for run in runs[:5]) + (" …" if len(runs) > 5 else "")
    text = (
        f"a step takes {milliseconds(found.after)}, and {milliseconds(found.before)} in {len(runs)} healthy runs of "
        f"this job class ({names}; {milliseconds(min(run.step.value for run in runs))} to "
        f"{milliseconds(max(run.step.value for run in runs))}): {found.change / found.before:+.1%}, 95 % interval "
        f"{found.low / found.before:+.1%} to {found.high / found.before:+.1%}"
    )
    phase, further = _changed(case, runs)
    return Suspect(
        kind="regression", ranks=[], hosts=[], since=int(case.numbers[0]), last=case.last,
        lost_ns=case.step.now_ns * (1 - 1 / grown), slowdown=grown, confidence=min(1 - found.p / 2, CAPPED),
        level="iteration", evidence=[evidence(text, queries.BASELINE_STEPS, params)], phase=phase,
        action="Compare the run with its baseline (argus compare): what changed, and what is different around it. If "
        "it is meant to be so, make it the baseline: argus baseline set.",
        further=[*further, *cited], effect=lambda step: step.before(grown),
    )  # fmt: skip


def _alike(run: Profile, work: dict[str, float]) -> bool:
    return all(
        abs(run.work[name] - value) <= DIFFERENT_WORK * max(run.work[name], value)
        for name, value in work.items()
        if name in run.work and value
    )


def _too_few(runs: int, others: int, baseline: Baseline) -> str:
    """A clause on a history that is too short; empty: there is none at all."""
    if not runs and not others and not baseline.unreadable:
        return ""
    text = f"{runs} earlier healthy run{'s' * (runs != 1)} of this job class {'are' if runs != 1 else 'is'} stored"
    if others:
        text += f" ({others} more do other work in a step)"
    if baseline.unreadable:
        text += f" ({baseline.unreadable} more were written by another version of Argus)"
    return f"{text}, {MIN_RUNS} are needed to tell whether steps were slow from the first one on"


def _latency(case: Case, params: dict[str, Any], runs: Sequence[Profile]) -> list[Evidence]:
    """Evidence that the issue latency is distributed otherwise than in the baseline; empty: it is not, or was not
    observed."""
    known = [run.latencies for run in runs if run.latencies]
    if len(known) < MIN_RUNS or not (now := read_latencies(case.query, params)):
        return []
    distance = float(np.median([w1(one, now) for one in known]))
    among = max(w1(one, other) for one in known for other in known if one is not other)
    if distance < max(UNLIKE, UNLIKE_TIMES * among):
        return []
    median = float(np.median([one[len(one) // 2] for one in known]))
    text = (
        f"kernels are launched {milliseconds(now[len(now) // 2], '.2f')} ahead of the GPU (median) instead of "
        f"{milliseconds(median, '.2f')} in the baseline; the distributions differ by {distance:.0%} of the mean (W1), "
        f"those of the baseline by {among:.0%} at most"
    )
    return [evidence(text, queries.RUN_LATENCIES, params)]


def _changed(case: Case, runs: Sequence[Profile]) -> tuple[str, list[Evidence]]:
    """The phase that grew most, and evidence on what is longer than in the baseline; argus compare says more."""
    try:
        profile = read_profile(case.query, case.params["job"], case.params["run"])
    except ArgusError:
        return "", []
    params = {**case.params, "first": int(case.numbers[0]), "last": case.last}
    grown: list[tuple[float, str, Mean, float]] = []
    for name, mean in profile.phases.items():
        known = [run.phases.get(name, Mean(0.0)).value for run in runs if run.clock == profile.clock]
        if known:
            usual = float(np.mean(known))
            grown.append((mean.value - usual, name, mean, usual))
    grown.sort(reverse=True, key=lambda one: one[0])
    least = LEAST / 5 * profile.step.value
    shown = [one for one in grown[:3] if one[0] >= least]
    if not shown:
        return "", []
    parts = [f"{name} {milliseconds(mean.value)} instead of {milliseconds(usual)}" for _, name, mean, usual in shown]
    where = queries.RUN_GPU_PHASES if profile.clock == "gpu" else queries.RUN_CPU_PHASES
    return shown[0][1], [evidence(f"longer than in the baseline: {', '.join(parts)}", where, params)]
