"""From the records of runs to the rule's arrays, to a summary, and to the decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from argus.compare.observe.latency import MOST_SAMPLES, samples_of
from argus.compare.observe.machine import SHORTEST_S
from argus.compare.observe.plan import Plan
from argus.compare.observe.rule import EXTERNAL, QUIET, Decision, decide
from argus.compare.observe.series import Array, Series, arm_numbers
from argus.compare.observe.signs import errors_of
from argus.model.text import counted
from argus.model.units import span_text

Run = Mapping[str, Any]
DISTURBANCES = (EXTERNAL, "throttled_share", "run_queue_share")
"""Of what a run's noise context has, what may explain variation."""
CONTEXT = ("others_cpu_share", "steal_share", "run_queue_share", "throttled_share", "iowait_share", "load_before",
           "gpu_temperature_c", "gpu_thermal_share")  # fmt: skip
COUNTED = ("failures", "errors")
"""Signs of what happened, whatever the machine did."""
_LATENCIES = ("p50_ns", "p95_ns", "p99_ns", "throughput_s", "errors", "retries", "count")


def measured(runs: Sequence[Run]) -> list[Run]:
    """Runs that count: no warm-up, none that was interrupted."""
    return [run for run in runs if not run["warmup"] and run["status"] != "interrupted"]


def failures(runs: Sequence[Run]) -> list[Run]:
    """Runs, also for warm-up, that did not succeed. One that was interrupted did not fail."""
    return [run for run in runs if run["status"] not in ("ok", "interrupted")]


def failure_text(runs: Sequence[Run]) -> tuple[str, str]:
    """How many runs did not succeed: in a word or two, and in a sentence. Empty: all of them did."""
    failed, made = failures(runs), sum(run["status"] != "interrupted" for run in runs)
    if not failed:
        return "", ""
    if len(failed) == made:
        return "failure", f"none of {counted(made, 'run')} succeeded"
    warm = sum(run["warmup"] for run in failed)
    also = f", {warm} of them warm-up" if warm else ""
    return "partial failure", f"{len(failed):,} of {counted(made, 'run')} did not succeed{also}"


def values_of(run: Run) -> dict[str, float | None]:
    """All figures of a run by name, those of its latencies and steps with them; None: unknown."""
    found = dict(run["figures"])
    if run["latency"] is not None:
        found |= {f"latency_{name}" if name.endswith("_ns") else name: run["latency"][name] for name in _LATENCIES}
    return found


def figures_of(runs: Sequence[Run], arms: Sequence[str]) -> list[Series]:
    """The rule's figures of runs that succeeded, the primary one first: the median latency if each has latencies, with
    the 99th percentile and the time per request beside it, else the wall time."""
    good = [run for run in measured(runs) if run["status"] == "ok"]
    if not good:
        return [_series("wall_ns", good, [], arms)]
    stepped = all(run["figures"].get("step_ns") for run in good)
    timed = all(run["latency"] is not None and run["latency"]["count"] for run in good)
    numbered = arm_numbers(arms) is not None
    wall = [run["figures"]["wall_ns"] for run in good]
    if not timed:
        figures = [_series("wall_ns", good, wall, arms, primary=not stepped, arms_compared=not stepped)]
        if stepped:
            figures.insert(0, _series("step_ns", good, [run["figures"]["step_ns"] for run in good], arms))
        return figures
    latency = [run["latency"] for run in good]
    growth = [one["growth"] for one in latency]
    return [
        _series(
            "latency_p50_ns", good, [one["p50_ns"] for one in latency], arms, arms_compared=not numbered,
            samples=[samples_of(one["histogram"]) for one in latency],
            growth=np.array([math.nan if one is None else one for one in growth], np.float64),
        ),
        _series(
            "latency_p99_ns", good, [one["p99_ns"] for one in latency], arms, primary=False, arms_compared=not numbered
        ),
        _series(
            "time_per_request_ns", good, [took / one["count"] for took, one in zip(wall, latency, strict=True)], arms,
            primary=False,
        ),
    ]  # fmt: skip


def _series(name: str, runs: Sequence[Run], values: Sequence[float], arms: Sequence[str], **more: Any) -> Series:
    disturbance: dict[str, Array] = {}
    for one in DISTURBANCES:
        shares = [run["noise"].get(one) for run in runs]
        disturbance[one] = np.array([math.nan if share is None else share for share in shares], np.float64)
    return Series(
        name, np.array(values, np.float64), np.array([run["number"] - 1 for run in runs], np.intp),
        np.array([list(arms).index(run["arm"]) for run in runs], np.intp), tuple(arms), disturbance, **more,
    )  # fmt: skip


def decision_of(runs: Sequence[Run], plan: Plan) -> Decision:
    """What the rule says of the runs so far."""
    counting = measured(runs)
    arms = [arm.name for arm in plan.arms]
    failed = sum(run["status"] != "ok" for run in counting)
    reported = []
    for name in ("errors", "retries"):
        known = [run["latency"] for run in counting if run["latency"] is not None and run["latency"][name] is not None]
        if known and (sign := errors_of(name, [one[name] for one in known], [one["count"] for one in known])):
            reported.append(sign)
    decision = decide(figures_of(runs, arms), failed=failed, counted=reported, margin=plan.margin)
    return replace(decision, notes=(*decision.notes, *_unseen(counting, decision), *_notes(counting, plan)))


def _unseen(runs: Sequence[Run], decision: Decision) -> list[str]:
    """A note that the load of other processes is not known, where it may be why runs vary."""
    good = [run for run in runs if run["status"] == "ok"]
    short = sum(run["noise"].get(EXTERNAL) is None and run["figures"]["wall_ns"] < SHORTEST_S * 1e9 for run in good)
    if not short or decision.status != "unstable" or decision.signs[0].kind in COUNTED:
        return []
    text = f"runs shorter than {span_text(SHORTEST_S)} do not show how much of the CPUs other processes used"
    text += ": they may be why these vary"
    waits = [run["noise"]["run_queue_share"] for run in good if run["noise"].get("run_queue_share") is not None]
    if waits and max(waits) >= QUIET:
        text += f" (they waited for a CPU for up to {max(waits):.0%} of their time)"
    return [f"{text}. Let each do more, or see argus observe doctor"]


def _notes(runs: Sequence[Run], plan: Plan) -> list[str]:
    """What of the latencies and steps that were asked for is missing in the runs that count."""
    notes = _trace_notes([run for run in runs if run["status"] == "ok"]) if plan.trace else []
    good = [run["latency"] for run in runs if run["status"] == "ok"]
    readings = plan.readings
    if not (readings.pattern or readings.key or readings.metrics) or not good:
        return notes
    without = sum(one is None or not one["count"] for one in good)
    if without:
        where = "the metrics of {}" if readings.metrics else "what {} printed"
        which = where.format(f"{without} of {counted(len(good), 'run')}")
        notes.append(f"no latency was found in {which}: wall times are compared instead")
    for name, what in (
        ("unreadable", "values or lines could not be read as latencies"),
        ("left_out", f"latencies beyond the first {MOST_SAMPLES:,} of a run were left out"),
    ):
        if count := sum(one.get(name, 0) for one in good if one is not None):
            notes.append(f"{count:,} {what}")
    return notes


def _trace_notes(good: Sequence[Run]) -> list[str]:
    """What is missing of steps. Of runs that succeeded."""
    off = [run for run in good if run.get("trace") is None or run["trace"]["state"] != "on"]
    without = len(good) - len(off) - sum(run["figures"].get("step_ns") is not None for run in good)
    notes = []
    if off:
        trace = off[0].get("trace")
        why = trace["state"] if trace else "off"
        notes.append(
            f"{len(off)} of {counted(len(good), 'run')} were not traced (tracing {why}): steps are not compared"
        )
    if without:
        notes.append(
            f"no step was found in {without} of {counted(len(good), 'traced run')}: wall times are compared instead"
        )
    return notes


def summary_of(runs: Sequence[Run], plan: Plan) -> list[dict[str, Any]]:
    """Of each arm and figure: over how many runs that succeeded, mean, standard deviation, least and most."""
    rows = []
    for arm in plan.arms:
        of_arm = [values_of(run) for run in measured(runs) if run["status"] == "ok" and run["arm"] == arm.name]
        for name in dict.fromkeys(name for one in of_arm for name in one):
            values = np.array([one[name] for one in of_arm if one.get(name) is not None], np.float64)
            if len(values):
                mean, std = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None
                rows.append({
                    "arm": arm.name, "figure": name, "runs": len(values), "mean": _rounded(mean),
                    "std": None if std is None else _rounded(std), "min": _rounded(values.min()),
                    "max": _rounded(values.max()), "cv": round(std / mean, 6) if std is not None and mean else None,
                })  # fmt: skip
    return rows


def _rounded(value: float) -> float:
    return round(float(value), 3)


def differences(decision: Decision, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What differed in the runs that stand out: of the recorded context and figures, those whose median in these runs
    lies outside of what the others had, the farthest first."""
    named = {
        number for sign in decision.signs for number in sign.runs if sign.kind in ("outliers", "two_modes", "tail")
    }
    good = [run for run in measured(runs) if run["status"] == "ok"]
    slow = [run for run in good if run["number"] - 1 in named]
    others = [run for run in good if run["number"] - 1 not in named]
    if not slow or len(others) < 3:
        return []
    rows = []
    for name in (*CONTEXT, "user_ns", "system_ns", "voluntary_switches", "involuntary_switches", "block_io_ns",
                 "peak_memory_bytes"):  # fmt: skip
        both = [[{**run["figures"], **run["noise"]}.get(name) for run in side] for side in (slow, others)]
        if any(value is None for side in both for value in side):
            continue
        there, usual = (np.array(side, np.float64) for side in both)
        low, middle, high = np.quantile(usual, [0.0, 0.5, 1.0])
        at = float(np.median(there))
        if at > high or at < low:
            width = max(float(high - low), 0.01 * abs(float(middle)), 1e-3 if name in CONTEXT else 1e-9)
            rows.append((abs(at - middle) / width, {
                "name": name, "in_these_runs": _rounded(at) if name not in CONTEXT else round(at, 4),
                "in_others": _rounded(middle) if name not in CONTEXT else round(float(middle), 4),
            }))  # fmt: skip
    return [row for _, row in sorted(rows, key=lambda one: -one[0])]


def to_document(decision: Decision, runs: Sequence[Run]) -> dict[str, Any]:
    """The decision as metrics.json has it; figures that are not known are null."""
    found = asdict(decision)
    signs = [
        {
            **asdict(sign), "p": float(f"{sign.p:.3g}"), "effect": round(sign.effect, 6),
            "runs": [number + 1 for number in sign.runs],
        }
        for sign in decision.signs
    ]  # fmt: skip
    explained = decision.disturbance
    return {
        "status": found["status"], "reason": found["reason"], "signs": signs, "tests": found["tests"],
        "level": round(found["level"], 6), "spread": _known(found["spread"]),
        "spread_upper": _known(found["spread_upper"]), "runs": found["runs"], "runs_needed": found["runs_needed"],
        "undetected": round(found["undetected"], 6),
        "disturbance": None if explained is None else {"name": explained[0], "share": round(explained[1], 4)},
        "differences": differences(decision, runs), "notes": list(found["notes"]),
    }  # fmt: skip


def _known(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def metrics_of(runs: Sequence[Run], plan: Plan, *, decided: bool) -> dict[str, Any]:
    """What metrics.json holds of runs; without a decision until all are there."""
    counting = measured(runs)
    return {
        "partial_failure": bool(failures(runs)),
        "failed": sum(run["status"] != "ok" for run in counting),
        "runs": list(runs),
        "summary": summary_of(runs, plan),
        "decision": to_document(decision_of(runs, plan), runs) if decided else None,
    }
