"""How scripts/healthy compares stored steps with a program's log."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("healthy")
    for name in ("healthy", "demo"):
        sys.modules.pop(name, None)


def test_durations_are_compared_between_the_same_marks(healthy: ModuleType) -> None:
    rng = np.random.default_rng(5)
    took = rng.exponential(1e6, 400).astype(np.int64) + 500_000  # steps on a busy machine
    marks = 10**9 + np.cumsum(took)
    late = rng.integers(1_000, 30_000, 398)  # from the log's line to the probe, and back
    begins = marks[:-2] + late
    found = np.stack([begins, np.diff(np.append(begins, marks[-2] + 5_000))], axis=1)
    assert healthy.duration_error(found, marks) < 0.02
    assert healthy.duration_error(found - [late.mean().astype(np.int64) * 2, 0], marks) < 0.02, "also of earlier begins"
    wrong = found * np.array([1, 1.1])
    assert healthy.duration_error(wrong.astype(np.int64), marks) == pytest.approx(0.1, abs=0.02)
    # Halfway between marks, steps are others, however exact each clock is: what made up 2 to 4 % of small steps.
    middles = (marks[:-1] + marks[1:]) // 2
    assert healthy.duration_error(np.stack([middles[:-1], np.diff(middles)], axis=1), marks) > 0.1
