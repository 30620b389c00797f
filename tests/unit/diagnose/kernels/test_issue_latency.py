"""GPUs that wait for their CPUs distinguished from GPUs whose kernels are slow, by issue latencies (Flare)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from argus.diagnose.kernels.issue_latency import MIN_ROWS, compare
from argus.diagnose.stored import diagnose_store
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns


def rows(latency_ms: float, void: float, *, count: int = 60, seed: int = 1, known: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    p50 = latency_ms * 1e6 * np.exp(0.3 * rng.standard_normal(count))
    return {
        "rank": np.arange(count) % 4, "step": np.arange(count), "p50_ns": p50 if known else np.full(count, -1.0),
        "p99_ns": 4 * p50 if known else np.full(count, -1.0), "void_share": void + 0.002 * rng.standard_normal(count),
    }  # fmt: skip


def test_an_empty_queue_and_an_idle_gpu_are_a_stall() -> None:
    found = compare(rows(0.01, 0.3), rows(3.0, 0.02, seed=2))
    assert found is not None
    assert found.stalled
    assert not found.busy
    assert found.w1 == pytest.approx(1, abs=0.05), "all of the latency is gone"
    assert found.chance < 0.2
    assert found.text("the GPU of rank 3", "on others").startswith(
        "operations of the GPU of rank 3 begin 10.1 µs after their launch"
    )
    assert "its CPU does not keep up" in found.text("it", "before")


def test_slow_kernels_fill_the_queue() -> None:
    found = compare(rows(6.0, 0.01), rows(3.0, 0.02, seed=2))
    assert found is not None
    assert (found.stalled, found.busy) == (False, True)
    assert "its kernels take longer" in found.text("it", "before")


def test_what_the_reference_does_by_itself_is_no_stall() -> None:
    """Its queue had run empty before, so that it is empty now says nothing."""
    before = rows(3.0, 0.02, seed=2)
    before["p50_ns"][30:] = 1e-3 * before["p50_ns"][30:]
    before["p99_ns"] = 4 * before["p50_ns"]
    found = compare(rows(0.01, 0.3), before)
    assert found is not None
    assert found.chance > 0.5
    assert found.w1 >= 0.2
    assert not found.stalled


@pytest.mark.parametrize(
    ("latency", "void"),
    [(0.01, 0.02), (3.0, 0.3), (2.6, 0.05), (1.9, 0.3)],
    ids=["short latencies, no less busy", "idle, but not for want of launches", "as ever", "shorter, still a queue"],
)
def test_one_of_the_two_alone_is_no_stall(latency: float, void: float) -> None:
    found = compare(rows(latency, void), rows(3.0, 0.02, seed=2))
    assert found is not None
    assert not found.stalled


def test_latencies_that_always_varied_are_no_stall() -> None:
    """The reference itself falls by half on the way."""
    usual = rows(3.0, 0.02, seed=2)
    usual["p50_ns"][30:] /= 20
    usual["p99_ns"][30:] /= 20
    found = compare(rows(0.5, 0.3), usual)
    assert found is not None
    assert found.chance > 0.4
    assert not found.stalled


def test_too_little_is_known() -> None:
    assert compare(rows(1, 0.1), rows(1, 0.1, known=False)) is None
    assert compare(rows(1, 0.1, count=MIN_ROWS - 1), rows(1, 0.1)) is None


def texts(finding: Any) -> str:
    return "\n".join(evidence["text"] for evidence in finding["evidence"])


def judged(store: Store, fault: str) -> Any:
    spec = Spec(Mesh(dp=8), Program(micro_batches=1), faults=[parse(fault)], steps=60, seed=3, kernels=4)
    made = write(store, "issue", spec)
    verdict = diagnose_store(store, "issue", made.run, keep=False)
    assert len(verdict["findings"]) == 1
    return verdict["findings"][0]


@pytest.mark.thorough
def test_all_cpus_that_no_longer_keep_up_are_no_regression_of_the_kernels(shared: Store) -> None:
    finding = judged(shared, "kernel_issue_stall:loud:ranks=0-7:from=30")
    assert (finding["kind"], finding["ranks"], finding["steps"]) == ("kernel_issue_stall", [], [30, 59])
    assert "its CPU does not keep up" in texts(finding)
    assert "CPUs of all ranks" in finding["action"]
    slower = judged(shared, "compute_straggler:loud:ranks=0-7:from=30")
    assert (slower["kind"], slower["ranks"]) == ("regression", [])
    assert "its kernels take longer" in texts(slower)


@pytest.mark.thorough
def test_the_evidence_on_a_rank_separates_both(shared: Store) -> None:
    starved = judged(shared, "kernel_issue_stall:loud:ranks=1:from=20")
    assert (starved["kind"], starved["ranks"]) == ("kernel_issue_stall", [1])
    assert "operations of the GPU of rank 1 begin" in texts(starved)
    assert "its CPU does not keep up" in texts(starved)
    slow = judged(shared, "compute_straggler:loud:ranks=1:from=20")
    assert (slow["kind"], slow["ranks"]) == ("compute_straggler", [1])
    assert "it is not kept waiting, its kernels take longer" in texts(slow)
    assert "kernel gemm_bf16_128x128_nt of rank 1: " in texts(slow)
    assert "at 0.50 of the fastest rank's speed against " in texts(slow)
    # The same for anyone to query, of all steps: a third of them were before.
    seen = query_columns(
        shared,
        "SELECT rank, beta, mu FROM function_patterns WHERE run = (SELECT max(run) FROM jobs) "
        "AND kind = 'kernel' AND function = 'gemm_bf16_128x128_nt' ORDER BY rank",
    )
    own = seen["rank"] == 1
    assert len(own) == 4
    assert seen["mu"][own][0] == pytest.approx(0.57, abs=0.05)
    assert seen["mu"][~own].min() > 0.9
    assert seen["beta"][own][0] > 1.5 * seen["beta"][~own].max()
