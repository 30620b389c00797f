"""``argus observe`` with programs that are slow for what they wait for: no profile or log shows it, the report does.

Random spikes of latencies, which belong to them, are in test_observe_real."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_observe import argus, records

pytestmark = pytest.mark.alone  # CPU time of other tests may explain what varies, and the report says so
PROGRAM = [sys.executable, "-S", "-E", str(Path(__file__).with_name("programs") / "observed" / "waits.py")]
COLUMNS = ("wall", "on a CPU", "waiting for a CPU", "waiting for disks", "waiting for something else")


def observe(folder: Path, repeat: int, *words: str) -> tuple[dict[str, Any], str]:
    """metrics.json and report.md."""
    done = argus("--out", str(folder), "--seed", "3", "--repeat", str(repeat), "--warmup", "0", "--", *PROGRAM, *words)
    assert done.returncode in (0, 10, 12, 13), done.stderr
    return records(folder)[0], (folder / "report.md").read_text()


def shares(report: str, row: str) -> dict[str, float]:
    """What a row of the table of times has, in per cent."""
    (line,) = [line for line in report.splitlines() if line.startswith(f"| {row} | ")]
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    return {name: float(cell.rstrip("%")) for name, cell in zip(COLUMNS, cells, strict=True) if cell.endswith("%")}


def kinds(metrics: dict[str, Any]) -> set[str]:
    return {sign["kind"] for sign in metrics["decision"]["signs"]}


def test_slow_while_the_cpu_is_idle(tmp_path: Path) -> None:
    _, report = observe(tmp_path / "o", 5, "backend")
    found = shares(report, "all runs")
    assert found["waiting for something else"] > 60
    assert found["on a CPU"] < 30
    assert f"all runs: {found['waiting for something else']:.0f}% waiting for something else" in report
    assert "a CPU profile would show little of it" in report


def test_nothing_is_hot_where_others_have_the_cpu(tmp_path: Path) -> None:
    _, report = observe(tmp_path / "o", 5, "starved", str(min(os.sched_getaffinity(0))))
    found = shares(report, "all runs")
    assert found["waiting for a CPU"] > 50
    assert found["waiting for a CPU"] > 1.3 * found["on a CPU"]
    assert "% waiting for a CPU)" in report


@pytest.mark.parametrize("program", ["sometimes", "paused"])
def test_logs_are_alike_and_runs_are_not(tmp_path: Path, program: str) -> None:
    """Several times as long now and then, or stopped for a while."""
    metrics, report = observe(tmp_path / "o", 24, program, str(tmp_path))
    assert not metrics["partial_failure"]
    assert {(tmp_path / "o" / run["output"]["stdout"]).read_text() for run in metrics["runs"]} == {"done\n"}
    assert metrics["decision"]["status"] == "unstable", metrics["decision"]
    assert kinds(metrics) & {"two_modes", "outliers"}, metrics["decision"]["signs"]
    found = shares(report, "runs that stand out")
    assert found["waiting for something else"] > 60
    assert found["on a CPU"] < shares(report, "the others")["on a CPU"], "they compute no more than the others"
