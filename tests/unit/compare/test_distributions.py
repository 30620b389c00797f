"""Distributions of a kernel's launches tell two runs apart."""

from __future__ import annotations

import pytest

from argus.compare.comparers import kernels
from argus.compare.profile import read_side
from argus.simulate.changes import parse_change
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store

START_NS = 1_700_000_000 * 10**9
SLOWER = "gemm_bf16_128x128_tn"


@pytest.mark.thorough
def test_a_slower_kernel_lies_as_far_from_what_it_was(store: Store) -> None:
    for run in (1, 2, 3):
        changes = [parse_change(f"kernel={SLOWER}:1.2")] if run == 3 else []
        spec = Spec(Mesh(dp=2), steps=40, seed=run, kernels=1, model=0, changes=changes)
        write(store, "job", spec, run=run, start_ns=START_NS)
    before, after = read_side(store, [("job", 1), ("job", 2)]), read_side(store, [("job", 3)])
    notes = {figure.subject: figure.note for figure in kernels.figures(before, after)}
    apart, among = (float(part.split("%")[0].rpartition(" ")[2]) for part in notes[SLOWER].split(", "))
    assert 15 < apart < 25
    assert among < 5
    unchanged = float(notes["elementwise_kernel"].split("%")[0].rpartition(" ")[2])
    assert unchanged < 5


def test_without_kernels_nothing_is_read(store: Store) -> None:
    write(store, "job", Spec(Mesh(dp=2), steps=40), run=1, start_ns=START_NS)
    assert read_side(store, [("job", 1)])[0].kernels == {}
