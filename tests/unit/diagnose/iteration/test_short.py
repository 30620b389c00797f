"""Recordings of few steps, in whole verdicts: what the GPUs' own times show of them, and what stays open."""

from __future__ import annotations

import pytest

from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store

START_NS = 1_700_000_000 * 10**9


def verdict_on(store: Store, job: str, mesh: Mesh, steps: int, fault: str = "") -> Verdict:
    write(store, job, Spec(mesh, faults=[parse(fault)] if fault else [], steps=steps), run=1, start_ns=START_NS)
    return diagnose_store(store, job, 1, keep=False)


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize(("mesh", "fault", "kind"), [
    (Mesh(dp=8), "data_loading:loud:ranks=3", "data_loading"),
    (Mesh(dp=8), "kernel_issue_stall:loud:ranks=3", "kernel_issue_stall"),
    (Mesh(pp=4), "data_loading:loud:ranks=0", "data_loading"),
    (Mesh(dp=8), "gc_pause:loud:ranks=3", "gc_pause"),
    (Mesh(dp=4, tp=2), "link_degradation:loud", "link_degradation"),
])  # fmt: skip
def test_what_the_gpus_times_show_of_few_steps(shared: Store, mesh: Mesh, fault: str, kind: str) -> None:
    job = f"{fault} {mesh.pp}"
    verdict = verdict_on(shared, job, mesh, 8, fault)
    (finding,) = verdict["findings"]
    assert finding["kind"] == kind
    if "ranks=" in fault:
        assert finding["ranks"] == [int(fault[-1])]
    assert finding["confidence"] < 0.81
    assert verdict["reason"].startswith(
        "8 whole steps were seen, 10 are needed for what the GPUs' own times do not show"
    )
    assert verdict["slowdown"] == pytest.approx(finding["slowdown"], rel=0.02)


@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(pp=4), Mesh(dp=4, tp=2), Mesh(dp=2, pp=4)])
def test_few_steps_of_a_healthy_job_name_nobody(shared: Store, mesh: Mesh) -> None:
    verdict = verdict_on(shared, f"well {mesh}", mesh, 8)
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])


def test_three_steps_are_too_few_for_what_gpus_wait_for(shared: Store) -> None:
    verdict = verdict_on(shared, "three", Mesh(dp=8), 3, "data_loading:loud:ranks=3")
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])


@pytest.mark.parametrize(("before", "after"), [(16, 8), (20, 8), (12, 6), (8, 16)])
def test_a_change_near_an_end_is_reported_where_it_is(shared: Store, before: int, after: int) -> None:
    job = f"change {before} {after}"
    verdict = verdict_on(shared, job, Mesh(dp=4), before + after, f"regression:loud:from={before}")
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["steps"][0]) == ("regression", before)
    assert f"only {before} steps before it and {after} from then on were seen" in finding["evidence"][1]["text"]
    fewer = min(before, after)
    assert finding["confidence"] == pytest.approx(0.9 * fewer / (fewer + 1), abs=0.02)
