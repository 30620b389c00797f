"""Kernels that became slower on all ranks: whose fault a regression is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from argus.diagnose.kernels.slower import slower
from argus.diagnose.stored import diagnose_store
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store

MS = 1_000_000


def kernels(*times: tuple[int, int, float], ranks: int = 4, steps: int = 20) -> dict[str, Any]:
    """Rows of kernels (number, launches of a step, ms of a launch) on some ranks."""
    rows = [(k, rank, often * steps, often * steps * ms * MS, steps) for k, often, ms in times for rank in range(ranks)]
    names = ("kernel_id", "rank", "launches", "spent_ns", "steps")
    return {name: np.array([row[at] for row in rows]) for at, name in enumerate(names)}


BEFORE = kernels((1, 10, 2.0), (2, 100, 0.1))
"""30 ms a step."""


def test_the_same_kernels_that_take_longer_are_slower_gpus() -> None:
    text = slower(BEFORE, kernels((1, 10, 3.0), (2, 100, 0.15)), 15 * MS)
    assert text is not None
    assert "1.50 times as long on the 4 ranks" in text


@pytest.mark.parametrize(
    ("now", "grown_ms"),
    [
        (kernels((3, 10, 3.0), (4, 100, 0.15)), 15),  # other grids: more work
        (kernels((1, 15, 2.0), (2, 150, 0.1)), 15),  # more launches
        (kernels((1, 10, 3.5), (2, 100, 0.1)), 15),  # one of two: 22 % of the time are as fast as before
        (kernels((1, 10, 2.0), (2, 100, 0.1)), 15),  # what grew is something else
        (kernels((1, 10, 2.1), (2, 100, 0.105)), 15),  # they explain a tenth
        (kernels(), 15),
    ],
)
def test_what_has_other_causes_is_not(now: dict[str, Any], grown_ms: int) -> None:
    assert slower(BEFORE, now, grown_ms * MS) is None


def test_ranks_that_were_not_seen_before_are_left_out() -> None:
    assert slower(kernels((1, 10, 2.0), ranks=0), BEFORE, 15 * MS) is None


@pytest.mark.thorough
@pytest.mark.parametrize(("stored", "owner"), [(8, "infrastructure"), (0, "model")])
def test_a_regression_of_slower_kernels_is_infrastructures(shared: Store, stored: int, owner: str) -> None:
    job = f"slower kernels {stored}"
    write(shared, job, Spec(Mesh(dp=8), faults=[parse("regression")], steps=60, seed=1, kernels=stored), run=1)
    (finding,) = diagnose_store(shared, job, 1, keep=False)["findings"]
    assert finding["kind"] == "regression"
    assert finding["owner"] == owner
    assert any("times as long" in one["text"] for one in finding["evidence"]) == bool(stored)
    assert ("nvidia-smi" in finding["action"]) == bool(stored)
