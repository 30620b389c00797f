"""Observations whose runs are traced, with traces that are made up. Real ones are in tests/e2e/test_observe_real.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from argus.compare.observe.evaluate import metrics_of
from argus.compare.observe.execute import Outcome
from argus.compare.observe.plan import Arm, Plan, Slot, check, from_yaml, to_document, to_yaml
from argus.compare.observe.records import METRICS, REPORT, read, schemas
from argus.compare.observe.sanitize import Sanitizer, sanitized
from argus.compare.observe.traced import job_of, outcome_of
from argus.model.errors import ArgusError
from tests.builders.observed import session, took

PLAN = Plan(("./train.py",), repeat=10, warmup=1, seed=3, trace="train.py")
Traced = Callable[[Slot, Mapping[str, str], int, int], tuple[Outcome, dict[str, Any], float]]


def traced(plan: Plan, step_ns: Callable[[int], float | None], state: Callable[[int], str] = lambda _n: "on") -> Traced:
    """Runs of a second whose steps take what is given by their number."""

    def run(slot: Slot, environment: Mapping[str, str], out: int, _err: int) -> tuple[Outcome, dict[str, Any], float]:
        os.write(out, b"trained\n")
        assert "MODE" not in environment, "what an arm sets is for the command, not for Argus"
        outcome = took(1.0)
        figures = {**outcome.figures, "step_ns": step_ns(slot.number)}
        trace = {"job": job_of(plan, slot), "run": 1000 + slot.number, "state": state(slot.number), "argus_cpu_ns": 7}
        return replace(outcome, figures=figures), trace, 0.0

    return run


def carried_out(folder: Path, plan: Plan, made: Traced) -> dict[str, Any]:
    runs = (plan.repeat + plan.warmup) * len(plan.arms)
    one = session(folder, plan, [took(1.0)] * runs)
    one.traced = made
    one.carry_out()
    metrics = json.loads((folder / METRICS).read_text())
    jsonschema.Draft202012Validator(schemas()[METRICS]).validate(metrics)
    return dict(metrics)


def test_steps_are_the_figure_and_the_report_leads_to_the_traces(tmp_path: Path) -> None:
    """Wall times are all alike: that one run's steps are slow shows in the steps alone."""
    metrics = carried_out(tmp_path / "o", PLAN, traced(PLAN, lambda number: 2e7 if number == 6 else 1e7 + number))
    assert metrics["decision"]["status"] == "unstable"
    assert {sign["figure"] for sign in metrics["decision"]["signs"]} == {"step_ns"}
    assert ["trace" in run for run in metrics["runs"]] == [False, *[True] * 10], "warm-up is not traced"
    lines = (tmp_path / "o" / REPORT).read_text().splitlines()
    assert "argus diagnose --job train.py --run 1011" in lines
    assert "argus compare train.py@1006 --against train.py@1002,1003,1004,1005,1007,1008,1009,1010" in lines


def test_arms_are_jobs_of_their_own(tmp_path: Path) -> None:
    plan = replace(PLAN, repeat=5, warmup=0, arms=(Arm("a b"), Arm("MODE=2", (("MODE", "2"),))))
    metrics = carried_out(tmp_path / "o", plan, traced(plan, lambda number: 1e7 + number))
    assert {run["trace"]["job"] for run in metrics["runs"]} == {"train.py+a_b", "train.py+MODE=2"}
    (line,) = [one for one in (tmp_path / "o" / REPORT).read_text().splitlines() if one.startswith("argus compare")]
    assert line.count("train.py+") == 2


def test_what_was_not_traced_is_said_and_not_taken_for_0(tmp_path: Path) -> None:
    off = traced(PLAN, lambda number: None if number in (4, 5) else 1e7, lambda n: "off: busy" if n == 4 else "on")
    metrics = carried_out(tmp_path / "o", PLAN, off)
    assert metrics["decision"]["status"] == "stable"
    assert metrics["decision"]["notes"] == [
        "1 of 10 runs were not traced (tracing off: busy): steps are not compared",
        "no step was found in 1 of 10 traced runs: wall times are compared instead",
    ]
    (steps,) = [row for row in metrics["summary"] if row["figure"] == "step_ns"]
    assert (steps["runs"], steps["min"]) == (8, 1e7)


def test_the_job_s_name_is_kept_in_the_settings_and_left_out_where_it_names_somebody(tmp_path: Path) -> None:
    plan = replace(PLAN, trace="alice-train")
    assert from_yaml(to_yaml(to_document(plan)), "c.yaml") == plan
    carried_out(tmp_path / "o", plan, traced(plan, lambda _number: 1e7))
    clean = sanitized(read(tmp_path / "o"), Sanitizer(["alice"], [], []))
    assert clean.config["trace"] == "user-train"
    assert "alice" not in json.dumps(clean.metrics)
    assert metrics_of(clean.metrics["runs"], clean.plan, decided=True)["decision"]["notes"] == []


def test_a_command_that_would_be_taken_for_a_variable_is_refused() -> None:
    plan = replace(PLAN, command=("./lr=0.1/train.py",))
    assert check(plan) == plan, "without variables `env` is not needed"
    with pytest.raises(ArgusError, match="holds ="):
        check(replace(plan, arms=(Arm("MODE=2", (("MODE", "2"),)),)))


@pytest.mark.parametrize(
    ("entries", "timed_out", "status"),
    [
        ({"exit_code": 0, "signal": None}, False, "ok"),
        ({"exit_code": 3, "signal": None}, False, "failed"),
        ({"exit_code": None, "signal": 15}, True, "timeout"),
        ({"exit_code": 0, "signal": None}, True, "timeout"),  # it ended well once it was asked to
    ],
)
def test_what_became_of_a_command_is_by_its_account(entries: dict[str, Any], timed_out: bool, status: str) -> None:
    figures = dict.fromkeys(("wall_ns", "user_ns", "system_ns", "voluntary_switches", "involuntary_switches"), 7)
    usage: Any = SimpleNamespace(figures=lambda: {"peak_memory_bytes": 9.0})
    outcome = outcome_of({"ended": True, **figures, **entries}, usage, timed_out, "its log")
    assert (outcome.status, outcome.exit_code, outcome.signal) == (status, *entries.values())
    assert (outcome.figures["wall_ns"], outcome.figures["peak_memory_bytes"]) == (7.0, 9.0)


@pytest.mark.parametrize(
    ("entries", "status", "error"),
    [
        ({}, "not_started", "argus run did not begin: its log"),
        ({"tracing": "on", "ended": False}, "failed", "argus run did not report how it ended: its log"),
    ],
)
def test_a_command_without_an_account_of_its_end_is_not_called_unstarted(
    entries: dict[str, Any], status: str, error: str
) -> None:
    """A full disk may take the second writing of the file: the command ran."""
    outcome = outcome_of(entries, SimpleNamespace(), False, "its log")  # type: ignore[arg-type]
    assert (outcome.status, outcome.error, outcome.figures) == (status, error, {})


def test_a_run_whose_end_is_not_known_is_a_failed_one_without_figures(tmp_path: Path) -> None:
    def lost(slot: Slot, *_: Any) -> tuple[Outcome, dict[str, Any], float]:
        trace = {"job": job_of(PLAN, slot), "run": 1000 + slot.number, "state": "on", "argus_cpu_ns": 7}
        known = Outcome("failed", error="argus run did not report how it ended: its log")
        return (known if slot.number == 4 else took(1.0)), trace, 0.0

    metrics = carried_out(tmp_path / "o", PLAN, lost)
    assert (metrics["failed"], metrics["partial_failure"]) == (1, True)
    (run,) = [one for one in metrics["runs"] if one["status"] == "failed"]
    assert (run["number"], run["exit_code"], run["signal"]) == (4, None, None)
    assert "did not report how it ended" in run["error"]


@pytest.mark.parametrize("name", ["a@b", "a\nb", "x" * 201])
def test_a_job_s_name_that_no_verb_could_be_given_is_refused(name: str) -> None:
    with pytest.raises(ArgusError, match="the job's name"):
        check(replace(PLAN, trace=name))
