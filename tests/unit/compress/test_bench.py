"""What scripts/bench compress measures with: outliers, planted faults, and what a form has to keep to find them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "scripts"))
    return importlib.import_module("benches.compress")


def test_an_outlier_is_kept_if_its_duration_is(bench: Any) -> None:
    forms = importlib.import_module("benches._forms")
    sample = np.array([100.0] * 97 + [2_000.0, 3_000.0, 4_000.0])
    assert forms.outliers(sample, sample, np.ones(100)) == (3, 3)
    # Two durations for three outliers; one of them is 11 % off.
    value, weight = np.array([100.0, 2_220.0, 4_000.0]), np.array([9.7, 0.1, 0.2])
    assert forms.outliers(sample, value, weight) == (3, 1)
    assert forms.outliers(sample, np.array([100.0]), np.ones(1)) == (3, 0)
    assert forms.outliers(sample[:97], sample[:97], np.ones(97)) == (0, 0)


def test_faults_are_what_their_names_say(bench: Any) -> None:
    took = np.full(100_000, 10_000)
    launches = (np.zeros(100_000, np.int64), np.arange(100_000), took)
    slower, split, spikes = (bench.planted(case, launches, 3)[2] for case in bench.CASES)
    assert set(slower.tolist()) == {10_500}
    assert set(split.tolist()) == {9_600, 10_400}
    assert abs(split.mean() / 10_000 - 1) < 1e-3
    assert set(spikes.tolist()) == {10_000, 400_000}
    assert 60 <= np.sum(spikes > 10_000) <= 120


def test_a_fault_of_one_step_is_lost_where_steps_are_put_together(bench: Any) -> None:
    jobs = importlib.import_module("benches._jobs")
    rng = np.random.default_rng(1)
    groups = [
        (
            (f"kernel_{k}", 7, (1, 1, 1), (1, 1, 1)),
            np.arange(200),
            rng.normal(10_000 * k, 600 * k, 200).astype(np.int64),
        )
        for k in (1, 2, 3, 4)
    ]
    drawn = jobs.Drawn(groups, 4, 40, 5, most=50)
    pooled = {"log bins": bench.Pooled(importlib.import_module("benches._forms").log_bins(0.001), 25)}
    figures, lines = bench._detection(drawn, "drawn", "drawn", pooled, 4, 4)
    assert figures["drawn_exact_5_slower_auc"] > 0.99
    assert figures["drawn_ours_5_slower_auc"] > 0.99
    assert float(lines[2].split()[-3]) < 0.9, "of 25 steps together, one has the fault"
    assert len(lines) == 2 + len(bench.CASES)
