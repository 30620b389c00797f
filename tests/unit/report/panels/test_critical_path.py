"""Of which step a page shows the critical path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.diagnose.whatif.critical_path import Paths
from argus.report.build import build_page
from argus.report.panel import Panel
from argus.report.panels import critical_path
from argus.simulate.mesh import Mesh
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from tests.builders import report_jobs
from tests.stores import new_store

STALLED, STEPS = 2, 120


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, int]]:
    """A job one of whose ranks stalls now and then, but not in the newest steps."""
    with open_store(new_store(tmp_path_factory.mktemp("stalls"))) as store:
        fault = f"jitter:loud:ranks={STALLED}"
        yield store, report_jobs.simulate(store, "stalls", Mesh(dp=4), fault, steps=STEPS, kernels=8)


def shown(store: Store, run: int) -> tuple[int, Panel]:
    """The step, and the panel."""
    page, _ = build_page(store, "stalls", run)
    (panel,) = [panel for panel in page["panels"] if panel["id"] == "critical_path"]
    found = re.search(r"What step (\d+) ", panel["lead"])
    assert found, panel
    return int(found[1]), panel


def test_a_step_with_a_stall_is_shown(stalls: tuple[Store, int], monkeypatch: pytest.MonkeyPatch) -> None:
    store, run = stalls
    read = critical_path.read_paths

    def measured(*words: Any) -> Paths:
        """As if what the job's model has been were what its GPUs did."""
        found = read(*words)
        return Paths(found.steps, found.source, True, found.why_not)

    monkeypatch.setattr(critical_path, "read_paths", measured)
    step, panel = shown(store, run)
    rows = query_columns(
        store, f"SELECT step, max(duration_ns) AS ns FROM iterations WHERE run = {run} GROUP BY step ORDER BY step"
    )
    usual = np.median(rows["ns"])
    assert rows["ns"][-critical_path.STEPS :].max() < critical_path.LONG * usual, "the newest few have no stall"
    assert rows["ns"][rows["step"].tolist().index(step)] > 1.5 * usual
    assert "It is the longest of the newest steps" in panel["lead"]


def test_a_model_has_no_stalls_and_a_usual_step_is_shown(stalls: tuple[Store, int]) -> None:
    step, panel = shown(*stalls)
    assert step > STEPS - 1 - critical_path.STEPS
    assert "longest" not in panel["lead"]


@pytest.mark.parametrize(("slowdown", "step"), [(1.01, 7), (1.5, None)])
def test_one_long_step_says_nothing_of_what_is_lost_in_each(slowdown: float, step: int | None) -> None:
    durations = np.full(40, 100)
    durations[7] = 150
    look: Any = SimpleNamespace(
        findings=[{"steps": [0, 39], "slowdown": slowdown}], newest=lambda: {"first": 0, "last": 39},
        case=SimpleNamespace(numbers=np.arange(40), durations=durations),
    )  # fmt: skip
    assert critical_path._long_step(look) == step
