"""Faults planted in running jobs, traced by PID, named by ``argus diagnose``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run import Job

from argus.diagnose.verdict import json_schema

from ..kernel.conftest import wait_for_cuda
from .conftest import Argus

pytestmark = pytest.mark.kernel


def traced(
    argus: Argus,
    seconds: float,
    env: dict[str, str],
    *diagnose: str,
    ranks: int = 4,
    args: tuple[str, ...] = (),
    before: float = 0.5,
) -> dict[str, Any]:
    """The verdict on a job with these faults from the start, attached after it has begun."""
    with Job(ranks=ranks, args=list(args), env=env) as job:
        wait_for_cuda(job.pids)
        time.sleep(before)
        words = [word for pid in job.pids for word in ("--pid", str(pid))]
        done = argus("trace", *words, "--duration", str(seconds))
        assert done.returncode == 0, done.stderr
    answer = argus("diagnose", "--format", "json", *diagnose)
    assert answer.returncode == 0, answer.stderr
    verdict: dict[str, Any] = json.loads(answer.stdout)
    jsonschema.validate(verdict, json_schema())
    return verdict


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_rank_whose_gpu_is_slow_is_named(argus: Argus, ranks: int) -> None:
    slow = ranks - 1
    verdict = traced(argus, 5, {"FAKEGPU_SLOW_RANK": str(slow), "FAKEGPU_SLOW_FACTOR": "1.8"}, ranks=ranks)
    assert verdict["status"] == "degraded", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("compute_straggler", [slow])
    # Slow from the start, so there is no healthy step to compare with, and the CPU sees only what the GPU delays of its
    # calls: an estimate, not a measurement (1.73 is the truth).
    assert 1.25 < verdict["slowdown"] < 2.5
    assert all(evidence["sql"].strip().upper().startswith(("SELECT", "WITH")) for evidence in finding["evidence"])
    shown = argus("sql", finding["evidence"][0]["sql"], "--format", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout), "the query that comes with the evidence shows it again"


def test_a_rank_that_waits_for_its_data_is_named(argus: Argus) -> None:
    verdict = traced(argus, 5, {"FAKEGPU_DATA_STALL_RANK": "1", "FAKEGPU_DATA_STALL_MS": "25"})
    assert verdict["status"] == "degraded", verdict
    assert (verdict["findings"][0]["kind"], verdict["findings"][0]["ranks"]) == ("data_loading", [1])


def test_a_rank_that_compiles_in_every_step_is_named(argus: Argus) -> None:
    stall = {"FAKEGPU_JIT_STALL_RANK": "2", "FAKEGPU_JIT_STALL_MS": "30", "FAKEGPU_JIT_STALL_EVERY": "1"}
    verdict = traced(argus, 5, stall)
    assert verdict["status"] == "degraded", verdict
    assert (verdict["findings"][0]["kind"], verdict["findings"][0]["ranks"]) == ("jit_stall", [2])


def test_a_slow_link_blames_no_rank(argus: Argus) -> None:
    verdict = traced(argus, 5, {"FAKEGPU_SLOW_LINK_RANK": "1", "FAKEGPU_SLOW_LINK_FACTOR": "10"})
    assert verdict["status"] in ("healthy", "degraded"), verdict
    assert all(finding["ranks"] == [] for finding in verdict["findings"]), verdict


def test_a_rank_that_stops_calling_hangs_the_job_and_is_named(argus: Argus) -> None:
    hang = {"FAKEGPU_HANG_RANK": "3", "FAKEGPU_HANG_STEP": "90"}
    verdict = traced(argus, 8, hang, "--hang-after", "2", before=0.2)
    assert verdict["status"] == "hung", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("hang", [3])
    text = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert "3 ranks called AllReduce" in text
    assert "rank 3 did not come" in text


def test_a_job_that_ended_does_not_hang(argus: Argus, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Job(ranks=2, args=["--steps", "150", "--go", str(go)]) as job:
        wait_for_cuda(job.pids)
        go.touch()
        words = [word for pid in job.pids for word in ("--pid", str(pid))]
        done = argus("trace", *words)
        assert done.returncode == 0, done.stderr
    verdict = json.loads(argus("diagnose", "--format", "json", "--hang-after", "0.1").stdout)
    assert verdict["status"] in ("healthy", "inconclusive"), verdict
    assert verdict["coverage"]["ended"] is True


def test_a_single_process_is_inconclusive_with_a_reason(argus: Argus) -> None:
    verdict = traced(argus, 4, {}, ranks=1)
    assert verdict["status"] == "inconclusive"
    assert verdict["steps"], "it has steps all the same"
    assert "fewer than 2 ranks" in verdict["reason"]


def test_an_empty_store_says_what_to_do(argus: Argus) -> None:
    for verb in (("diagnose",), ("sql", "SELECT 1 FROM jobs")):
        done = argus(*verb)
        assert done.returncode == 3
        assert "argus trace --pid" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_rank_that_stalls_now_and_then_is_named(argus: Argus) -> None:
    """One step of ten is long: the typical step is fine, and the job is slow all the same."""
    stall = {"FAKEGPU_JIT_STALL_RANK": "1", "FAKEGPU_JIT_STALL_MS": "120", "FAKEGPU_JIT_STALL_EVERY": "10"}
    verdict = traced(argus, 7, stall)
    assert verdict["status"] == "degraded", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("jit_stall", [1])
    assert verdict["slowdown"] == pytest.approx(1.3, abs=0.15)


def test_ranks_that_were_not_traced_keep_a_job_from_being_healthy(argus: Argus) -> None:
    """The slow one may be among them."""
    with Job(ranks=4, env={"FAKEGPU_SLOW_RANK": "3", "FAKEGPU_SLOW_FACTOR": "1.6"}) as job:
        wait_for_cuda(job.pids)
        done = argus("trace", "--pid", str(job.pids[0]), "--pid", str(job.pids[1]), "--duration", "4")
        assert done.returncode == 0, done.stderr
    verdict = json.loads(argus("diagnose", "--format", "json").stdout)
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])
    assert "2 of 4 ranks were traced" in verdict["reason"]


def test_a_short_silence_keeps_a_job_from_being_healthy(argus: Argus) -> None:
    """Too short to be called a hang, too long to be called health."""
    verdict = traced(argus, 9, {"FAKEGPU_HANG_RANK": "1", "FAKEGPU_HANG_STEP": "80"}, before=0.1)
    assert verdict["status"] == "inconclusive", verdict
    assert "no step was seen for the last" in verdict["reason"]


def test_a_job_that_hung_before_it_was_traced_is_told(argus: Argus) -> None:
    verdict = traced(argus, 3, {"FAKEGPU_HANG_RANK": "1", "FAKEGPU_HANG_STEP": "2"}, before=2.0)
    assert verdict["status"] == "inconclusive"
    assert "made no CUDA or NCCL call while they were traced" in verdict["reason"]
