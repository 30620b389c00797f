"""Recordings of few steps, in whole verdicts: what the GPUs' own times show of them, and what stays open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.run import diagnose
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns

START_NS = 1_700_000_000 * 10**9


def verdict_on(store: Store, job: str, mesh: Mesh, steps: int, *faults: str) -> Verdict:
    spec = Spec(mesh, faults=[parse(fault) for fault in faults if fault], steps=steps)
    write(store, job, spec, run=1, start_ns=START_NS)
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
@pytest.mark.thorough(first=1)
def test_few_steps_of_a_healthy_job_name_nobody(shared: Store, mesh: Mesh) -> None:
    verdict = verdict_on(shared, f"well {mesh}", mesh, 8)
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])


def test_three_steps_are_too_few_for_what_gpus_wait_for(shared: Store) -> None:
    verdict = verdict_on(shared, "three", Mesh(dp=8), 3, "data_loading:loud:ranks=3")
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])


@pytest.mark.parametrize(("before", "after"), [(16, 8), (20, 8), (12, 6), (8, 16)])
@pytest.mark.thorough(first=1)
def test_a_change_near_an_end_is_reported_where_it_is(shared: Store, before: int, after: int) -> None:
    job = f"change {before} {after}"
    verdict = verdict_on(shared, job, Mesh(dp=4), before + after, f"regression:loud:from={before}")
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["steps"][0]) == ("regression", before)
    assert f"only {before} steps before it and {after} from then on were seen" in finding["evidence"][1]["text"]
    fewer = min(before, after)
    assert finding["confidence"] == pytest.approx(0.9 * fewer / (fewer + 1), abs=0.02)


def verdict_with_kernels(store: Store, job: str, steps: int, slow: int, *faults: str) -> Verdict:
    """The verdict on four ranks whose kernels are stored one by one; those of one rank take 1.2 times as long."""
    verdict_on(store, job, Mesh(dp=4), steps, f"compute_straggler:quiet:ranks={slow}", *faults)

    def query(text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        if text != queries.RECORDED_KERNELS:
            return query_columns(store, text, params)
        kernel, rank = (part.ravel() for part in np.meshgrid(np.arange(5), np.arange(4), indexing="ij"))
        took_ns = 50_000.0 * (kernel + 1) * np.where(rank == slow, 1.2, 1.0)
        return {
            "kernel_id": kernel.astype(np.uint64), "kernel": kernel.astype(str), "rank": rank,
            "launches": np.full(len(rank), 10 * steps), "steps": np.full(len(rank), steps),
            "spent_ns": 10 * steps * took_ns, "short_ns": took_ns, "long_ns": took_ns,
        }  # fmt: skip

    return diagnose(query, job, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [4, 8])
def test_a_slow_gpu_hides_no_loader_that_costs_more(shared: Store, steps: int) -> None:
    loader = "data_loading:loud:ranks=3"
    first, second = verdict_with_kernels(shared, f"both {steps}", steps, 0, loader)["findings"]
    assert (first["kind"], first["ranks"]) == ("data_loading", [3])
    assert (second["kind"], second["ranks"], second["slowdown"]) == ("masked_compute_straggler", [0], 1.0)
    assert "the step does not wait for it yet" in second["evidence"][1]["text"]
    (alone,) = verdict_on(shared, f"loader {steps}", Mesh(dp=4), steps, loader)["findings"]
    # Without the loader the step would still be longer for the slow GPU.
    assert 1.05 < first["slowdown"] < alone["slowdown"] - 0.05


def test_a_slow_gpu_that_all_wait_for_costs_what_it_computes_longer(shared: Store) -> None:
    (finding,) = verdict_with_kernels(shared, "slow", 8, 2)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("compute_straggler", [2])
    assert finding["slowdown"] == pytest.approx(1.15, abs=0.05)


@pytest.mark.thorough
def test_two_ranks_with_equally_slow_loaders(shared: Store) -> None:
    one = verdict_on(shared, "one loader", Mesh(dp=4), 6, "data_loading:loud:ranks=1")
    two = verdict_on(shared, "two loaders", Mesh(dp=4), 6, *(f"data_loading:loud:ranks={rank}" for rank in (1, 3)))
    (finding,) = two["findings"]
    assert (finding["kind"], finding["ranks"]) == ("data_loading", [1, 3])
    assert two["slowdown"] == pytest.approx(one["slowdown"], rel=0.05)


@pytest.mark.thorough
def test_loaders_that_are_not_equally_slow(shared: Store) -> None:
    faults = "data_loading:loud:ranks=1", "data_loading:quiet:ranks=3"
    one = verdict_on(shared, "loud", Mesh(dp=8), 6, faults[0])
    verdict = verdict_on(shared, "loud and quiet", Mesh(dp=8), 6, *faults)
    assert [(each["kind"], each["ranks"]) for each in verdict["findings"]] == [
        ("data_loading", [1]), ("data_loading", [3])
    ]  # fmt: skip
    # The others wait for the later one: together they cost no more.
    assert verdict["slowdown"] == pytest.approx(one["slowdown"], rel=0.05)


def test_loaders_that_are_slow_on_all_ranks_name_nobody(shared: Store) -> None:
    verdict = verdict_on(shared, "all", Mesh(dp=4), 6, *(f"data_loading:loud:ranks={rank}" for rank in range(4)))
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])
