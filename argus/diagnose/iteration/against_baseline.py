"""Steps that are longer than those of earlier runs, on all ranks and from the first one on: a regression against the
baseline, which a run alone cannot show.

A new run is expected within a prediction interval of the runs before it (Student's t): what runs scatter by, what is
usually between runs, and what steps scatter by within one (:mod:`argus.diagnose.variation`). Beside it the distribution
of the issue latency is compared with the learned ones by W1, as Flare (NSDI '26) does: it shows a slow CPU side before
steps get longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case, evidence
from argus.diagnose.kernels.slower import slower_than_in
from argus.diagnose.read import queries
from argus.diagnose.read.baseline import Baseline
from argus.diagnose.read.environment import environment_changes, read_environment
from argus.diagnose.read.profile import (
    FEWEST_STEPS,
    WARM_UP,
    Profile,
    read_latencies,
    read_phases,
    step_tail,
    tail_figures,
    tail_of,
)
from argus.diagnose.suspect import Suspect
from argus.diagnose.variation import SPREAD, Difference, Mean, difference, mean_of, w1
from argus.diagnose.verdict import Evidence
from argus.model.units import duration

MIN_RUNS = 3
"""Earlier runs below which nothing is reported: two show next to nothing of how much runs scatter."""
LEVEL = 0.005
"""Chance that a healthy new run is called slower, one-sided."""
PHASES_LEVEL = 0.002
"""The same that any of its phases is, where the step is not: split among them."""
ROWS = 200_000
"""Ranks and steps whose phases are read at most, of the newest steps."""
CHANGES = 5
"""Changes of the environment that are named."""
LEAST = 0.025
"""Share of the step time from which on it is reported: less is not worth a search."""
DIFFERENT_WORK = 0.02
"""By how much launches and collectives of a step may differ from the baseline's."""
UNLIKE, UNLIKE_TIMES = 0.1, 3.0
"""W1 of the issue latency over the mean that is reported, and how many times as far as from one another the baseline's
runs it must be."""
LONGER_TAIL = 0.1
"""Share by which the 99th percentile of a step, over the median, must be above the highest of the baseline's."""
MOSTLY = 0.5
"""Share of what a step is longer that one phase must have for its owner to have to act."""
OWNERS = {
    "data_loading": "data",
    **dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv",
         "communication"), "infrastructure",
    ),
}  # fmt: skip
"""Who has to act where a phase is what became longer, if not who acts on regressions."""
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
    durations = steps["duration_ns"][used].astype(np.float64)
    step = mean_of(durations)
    explained = case.step.ideal_ns / case.step.now_ns
    found = difference([run.step for run in runs], [step * explained], spread=SPREAD, single=True)
    cited = _latency(case, params, runs) + ([] if case.suspects else _tail(durations, params, runs))
    grown = _grown(case, params, numbers, runs)
    longer = found.change >= LEAST * found.before and found.p / 2 < LEVEL
    # Where ranks are slow the others wait for them, in phases that are longer by it.
    part = 0.0 if case.suspects else sum(one.found.change for one in grown if one.sure)
    if not longer and min(found.change, part) < LEAST * found.before:
        if cited:
            case.notes.history = "; ".join(one["text"] for one in cited)
        return []
    return [_suspect(case, params, runs, found, grown, cited)]


def _suspect(
    case: Case,
    params: dict[str, Any],
    runs: Sequence[Profile],
    found: Difference,
    phases: list[Grown],
    cited: list[Evidence],
) -> Suspect:
    grown = found.after / found.before
    names = ", ".join(str(run.run) for run in runs[:5]) + (" …" if len(runs) > 5 else "")
    text = (
        f"a step takes {duration(found.after)}, and {duration(found.before)} in {len(runs)} healthy runs of "
        f"this job class ({names}; {duration(min(run.step.value for run in runs))} to "
        f"{duration(max(run.step.value for run in runs))}): {found.change / found.before:+.1%}, 95 % interval "
        f"{found.low / found.before:+.1%} to {found.high / found.before:+.1%}"
    )
    sure = [one.found.p / 2 * len(phases) for one in phases if one.sure]
    chance = min([found.p / 2, *sure])
    mostly = phases[0] if phases and phases[0].found.change >= MOSTLY * found.change else None
    owner = OWNERS.get(mostly.phase, "") if mostly is not None and mostly.sure else ""
    kernels: list[Evidence] = []
    action = (
        "Compare the run with its baseline (argus compare): what changed, and what is different around it. If "
        "it is meant to be so, make it the baseline: argus baseline set."
    )
    compared = {**params, "jobs": [run.job for run in runs], "runs": [run.run for run in runs]}
    slow = slower_than_in(case.query, params, (runs[0].job, runs[0].run), sorted(case.hosts), found.change)
    if slow is not None:
        owner, kernels = "infrastructure", [Evidence(text=slow[0], sql=slow[1])]
        action = (
            "Check the GPUs of all nodes: clocks, a power or thermal limit, other programs on them (nvidia-smi -q -d "
            f"PERFORMANCE,CLOCK,TEMPERATURE,POWER; argus health -v). {action}"
        )
    return Suspect(
        kind="regression", ranks=[], hosts=[], since=int(case.numbers[0]), last=case.last,
        lost_ns=case.step.now_ns * (1 - 1 / grown), slowdown=grown, confidence=min(1 - chance, CAPPED),
        level="iteration", evidence=[evidence(text, queries.BASELINE_STEPS, compared)],
        phase=phases[0].phase if phases else "",
        action=action, owner=owner,
        further=[*kernels, *_environment(case, runs), *_longer(phases, params), *cited],
        effect=lambda step: step.before(grown),
    )  # fmt: skip


def _environment(case: Case, runs: Sequence[Profile]) -> list[Evidence]:
    """Evidence on what the run ran on and with, and none of the baseline's runs did."""
    now = read_environment(case.query, case.params["job"], case.params["run"]).typical()
    changes = environment_changes([run.environment for run in runs], [now])
    if not changes:
        return []
    first = ", ".join(change.text() for change in changes[:CHANGES])
    more = f", and {len(changes) - CHANGES} more" if len(changes) > CHANGES else ""
    return [evidence(f"in the environment {first}{more}", queries.ENVIRONMENT_FACTS, case.params)]


def _alike(run: Profile, work: dict[str, float]) -> bool:
    return all(
        abs(run.work[name] - value) <= DIFFERENT_WORK * max(run.work[name], value)
        for name, value in work.items()
        if name in run.work and value
    )


def _too_few(runs: int, others: int, baseline: Baseline) -> str:
    """A clause on a history that is too short; empty: there is none at all."""
    elsewhere, differing = baseline.elsewhere
    if not runs and not others and not baseline.unreadable and not elsewhere:
        return ""
    text = f"{runs} earlier healthy run{'s' * (runs != 1)} of this job class {'are' if runs != 1 else 'is'} stored"
    if others:
        text += f" ({others} more do other work in a step)"
    if baseline.unreadable:
        text += f" ({baseline.unreadable} more were written by another version of Argus)"
    if elsewhere:
        text += f" ({elsewhere} more have {differing})"
    return f"{text}, {MIN_RUNS} are needed to see whether steps were slow from the first one on"


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
        f"kernels are launched {duration(now[len(now) // 2])} ahead of the GPU (median) instead of "
        f"{duration(median)} in the baseline; the distributions differ by {distance:.0%} of the mean (W1), "
        f"those of the baseline by {among:.0%} at most"
    )
    return [evidence(text, queries.RUN_LATENCIES, params)]


def has_long_tail(now: float | None, runs: Sequence[Profile]) -> bool:
    """Whether single steps of a run take longer than in the baseline. ``now``: the run's tail
    (:func:`argus.diagnose.read.profile.step_tail`). Fewer than three runs are not compared."""
    known = _tails(runs)
    if len(known) < MIN_RUNS or now is None:
        return False
    found = difference([Mean(one) for one in known], [Mean(now)], spread=SPREAD, single=True)
    return now >= (1 + LONGER_TAIL) * max(known) and found.p / 2 < LEVEL


def _tails(runs: Sequence[Profile]) -> list[float]:
    return [tail for run in runs if (tail := step_tail(run)) is not None]


def _tail(durations: NDArray[np.float64], params: dict[str, Any], runs: Sequence[Profile]) -> list[Evidence]:
    """Evidence that single steps take longer than in the baseline; empty: none do, or there are too few steps."""
    figures, known = tail_figures(durations), _tails(runs)
    now = tail_of(figures)
    if now is None or not has_long_tail(now, runs):
        return []
    text = (
        f"one step in a hundred takes {duration(figures['step_p99'].value)} or longer, {now:.2f} times the median, "
        f"and in {len(known)} healthy runs of this job class {min(known):.2f} to {max(known):.2f} times"
    )
    return [evidence(text, queries.RUN_STEPS, params)]


@dataclass(frozen=True)
class Grown:
    """A phase that is longer than in the baseline.

    Attributes:
        phase: Its name. clock: Whose: gpu or cpu.
        found: By how much, ns.
        sure: A new run would not be expected to have it so long.
    """

    phase: str
    clock: str
    found: Difference
    sure: bool


def _grown(case: Case, params: dict[str, Any], numbers: NDArray[np.int64], runs: Sequence[Profile]) -> list[Grown]:
    """Phases that are longer by a fifth of what is reported, the most first. Runs differ less in waiting and in
    transfers than in computation: what is longer there shows where the whole step hides it."""
    few = numbers[-max(FEWEST_STEPS, ROWS // max(case.ranks, 1)) :]
    phases, clock = read_phases(case.query, {**params, "first": int(few[0])}, few)
    known = [run.phases for run in runs if run.clock == clock]
    if len(known) < MIN_RUNS:
        return []
    out = []
    for phase, mean in phases.items():
        found = difference([run.get(phase, Mean(0.0)) for run in known], [mean], single=True)
        if found.change >= LEAST / 5 * float(np.mean([run.step.value for run in runs])):
            out.append(Grown(phase, clock, found, found.p / 2 < PHASES_LEVEL / len(phases)))
    return sorted(out, key=lambda one: -one.found.change)


def _longer(phases: list[Grown], params: dict[str, Any]) -> list[Evidence]:
    """Evidence on phases that are longer than in the baseline; argus compare says more."""
    if not phases:
        return []
    parts = [f"{one.phase} {duration(one.found.after)} instead of {duration(one.found.before)}" for one in phases[:3]]
    sql = queries.RUN_GPU_PHASES if phases[0].clock == "gpu" else queries.RUN_CPU_PHASES
    return [evidence(f"longer than in the baseline: {', '.join(parts)}", sql, params)]
