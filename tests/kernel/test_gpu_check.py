"""gpu-check itself: its arithmetic, its report, and its parts on the fake GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.gpu_check import common
from scripts.gpu_check.check import report
from scripts.gpu_check.parts import LIMIT_S, ORDER


def test_the_same_kernels_compare_as_equal() -> None:
    events = [("_Z3addPf", 1000.0)] * 101 + [("gemm", 5000.0)] * 7
    found = common.compare(events, [("add(float*)", 1000.0)] * 101 + [("gemm", 5000.0)] * 7)
    assert (found.ours, found.theirs, found.matched, found.share) == (108, 108, 108, 1.0)
    assert (found.missing, found.extra, found.median_difference) == ({}, {}, 0.0)


def test_missing_and_extra_kernels_are_named() -> None:
    found = common.compare([("a", 1.0)] * 5 + [("c", 1.0)], [("a", 1.0)] * 7 + [("b", 2.0)] * 3)
    assert (found.matched, found.missing, found.extra) == (5, {"a": 2, "b": 3}, {"c": 1})
    assert found.share == 0.5


def test_the_difference_of_times_is_weighted_by_time() -> None:
    theirs = [("long", 1_000_000.0)] * 10 + [("short", 1000.0)] * 10
    ours = [("long", 1_002_000.0)] * 10 + [("short", 2000.0)] * 10
    assert common.compare(ours, theirs).median_difference == pytest.approx(0.002)
    assert math.isnan(common.compare([], theirs).median_difference)


def test_the_bootstrap_covers_the_truth() -> None:
    rng = np.random.default_rng(3)
    base = [rng.normal(10, 0.1, 50) for _ in range(5)]
    slower = [rng.normal(10.3, 0.1, 50) for _ in range(5)]
    ratio, low, high = common.bootstrap_ratio(slower, base)
    assert low < 1.03 < high
    assert 1.02 < ratio < 1.04
    assert all(math.isnan(x) for x in common.bootstrap_ratio([], base))


def test_a_limit_is_kept_exceeded_or_cannot_be_decided() -> None:
    rng = np.random.default_rng(5)
    value, low, high = common.bootstrap_median(list(rng.normal(40, 5, 12)))
    assert low < value < high
    assert [common.at_most(limit, (value, low, high)) for limit in (60, value, 20)] == [True, None, False]
    assert common.at_most(1, common.bootstrap_median([])) is None


def test_cpu_time_of_steps_within_a_window() -> None:
    steps = [[k * 10_000_000, 10_000_000] for k in range(6)]
    used = [3_000_000, 5_000_000, 8_000_000, 12_000_000, 17_000_000, 23_000_000]
    assert common.step_cpu(steps, used, (20_000_000, 50_000_000)) == [3.0, 4.0, 5.0]
    assert common.step_cpu(steps, used, (0, 20_000_000)) == [2.0]


def test_steps_are_cut_by_windows() -> None:
    steps = [[k * 10_000_000, 10_000_000] for k in range(10)]
    assert common.step_windows(steps, [(20_000_000, 50_000_000), (95_000_000, 200_000_000)]) == [[10.0] * 3, []]


def test_the_report_is_a_text() -> None:
    results = {
        "when": "now", "fake": True, "seconds": 1.0,
        "parts": {
            "a": {"what": "A.", "seconds": 1.0,
                  "checks": [{"what": "x", "passed": True}, {"what": "y", "passed": None}],
                  "tables": [{"title": "T", "head": ["n", "v"], "rows": [["one\ntwo", "1.5"], ["three", "20"]]}]},
            "b": {"checks": [{"what": "z", "passed": False, "detail": "why"}], "log": "last words"},
        },
    }  # fmt: skip
    text = report(results)
    assert "FAKE GPU" in text
    assert "one two  1.5" in text
    assert "why" in text
    assert "last words" in text


def test_every_part_has_a_limit_and_a_module() -> None:
    here = Path(common.__file__).parent / "parts"
    assert {path.stem for path in here.glob("*.py")} - {"__init__"} == set(ORDER) == set(LIMIT_S)


@pytest.mark.kernel
@pytest.mark.alone  # it prices probes, and a burst of calls on a busy machine is above the budget for overhead
def test_parts_on_the_fake_gpu(tmp_path: Path, fakegpu: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "scripts.gpu_check.check",
        "--fake",
        "--only",
        "machine,bpf,kernels,profiler,callers,fixtures,ranks,health,volume",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
    results = json.loads((tmp_path / "results.json").read_text())
    failed = [c for part in results["parts"].values() for c in part["checks"] if c["passed"] is False]
    # What a probe costs is no business of a test: machines differ, and others use this one as well.
    assert not [c for c in failed if "costs at most" not in c["what"]], done.stdout + done.stderr
    assert (tmp_path / "report.txt").read_text().startswith("gpu-check")


def test_a_part_that_hangs_loses_nothing(tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "scripts.gpu_check.check",
        "--only",
        "machine,volume",
        "--out",
        str(tmp_path / "out"),
    ]
    subprocess.run([*command, "--time-limit", "9", "--python", str(hangs)], capture_output=True, cwd=common.ROOT)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["parts"]) == {"machine", "volume"}
    assert "kernel" in results["parts"]["machine"]["facts"]
    assert [c["passed"] for c in results["parts"]["machine"]["checks"]] == [False]
