"""Faults planted in running jobs, traced by PID, named by ``argus diagnose``."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run import Job

from argus.diagnose.verdict import json_schema
from tests.e2e.conftest import Argus, Log, argus_with, attached, pid_words, start_trace, wait_for_silence
from tests.kernel.conftest import wait_for_cuda, wait_until
from tests.stores import new_store

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

STEPS = 60
"""Steps that are traced: enough for a verdict that is sure of itself, however long they take."""


def verdict_of(argus: Argus, *words: str) -> dict[str, Any]:
    answer = argus("diagnose", "--format", "json", *words)
    assert answer.returncode == 0, answer.stderr
    print(answer.stdout)  # shown where the test fails
    verdict: dict[str, Any] = json.loads(answer.stdout)
    jsonschema.validate(verdict, json_schema())
    return verdict


COMPUTE_S = 0.033
"""What the fake GPU computes in a step, s: all of its kernels but NCCL's."""


@dataclass
class Faulty:
    """A job with faults from the start, traced after it has begun.

    Attributes:
        env: The faults.
        steps: To trace.
        only: So many of the ranks are traced; None: all.
    """

    env: dict[str, str]
    ranks: int = 4
    steps: int = STEPS
    only: int | None = None


FAULTY = {
    "slow GPU of 2": Faulty({"FAKEGPU_SLOW_RANK": "1", "FAKEGPU_SLOW_FACTOR": "1.8"}, ranks=2),
    "slow GPU of 5": Faulty({"FAKEGPU_SLOW_RANK": "4", "FAKEGPU_SLOW_FACTOR": "1.8"}, ranks=5),
    "slow data": Faulty({"FAKEGPU_DATA_STALL_RANK": "1", "FAKEGPU_DATA_STALL_MS": "25"}),
    "compiling": Faulty({"FAKEGPU_JIT_STALL_RANK": "2", "FAKEGPU_JIT_STALL_MS": "30", "FAKEGPU_JIT_STALL_EVERY": "1"}),
    "slow link": Faulty({"FAKEGPU_SLOW_LINK_RANK": "1", "FAKEGPU_SLOW_LINK_FACTOR": "10"}),
    "alone": Faulty({}, ranks=1, steps=20),
    "stalls": Faulty(
        {"FAKEGPU_JIT_STALL_RANK": "1", "FAKEGPU_JIT_STALL_MS": "120", "FAKEGPU_JIT_STALL_EVERY": "10"}, steps=140
    ),
    "slow one not traced": Faulty({"FAKEGPU_SLOW_RANK": "3", "FAKEGPU_SLOW_FACTOR": "1.6"}, only=2),
}


class Traced:
    """One of these jobs while it is traced."""

    def __init__(self, folder: Path, faulty: Faulty) -> None:
        self.store_url = new_store(folder)
        self.log = Log(folder, faulty.ranks)
        self.job = Job(ranks=faulty.ranks, args=self.log.args, env=faulty.env)
        try:
            wait_until(lambda: self.log.steps() > 2, 60, "the job's first steps")
            # The verdict does not need them, and loading their programs takes a second a trace.
            self._tracing = start_trace(
                self.store_url,
                *pid_words(self.job.pids[: faulty.only]),
                *("--steps", str(faulty.steps), "--no-stacks"),
            )
        except BaseException:
            self.job.close()
            raise

    def finish(self) -> dict[str, Any]:
        """Waits for the trace and returns the verdict."""
        output, _ = self._tracing.communicate(timeout=120)
        assert self._tracing.returncode == 0, output
        assert set(self.job.poll()) == {None}
        self.job.close()
        return verdict_of(argus_with(self.store_url))

    def close(self) -> None:
        self._tracing.kill()
        self._tracing.communicate()
        self.job.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Traced]]:
    """Starts a job of ``FAULTY``, and the next one: a trace is mostly waiting, so two run at a time."""
    started: dict[str, Traced] = {}

    def call(name: str) -> Traced:
        for one in list(FAULTY)[(at := list(FAULTY).index(name)) : at + 2]:
            # What is rare is distinguished from what a busy machine does: that job has the machine for itself.
            if one not in started and (one == name or "stalls" not in (one, name)):
                started[one] = Traced(tmp_path_factory.mktemp("faulty"), FAULTY[one])
        return started[name]

    yield call
    for traced in started.values():
        traced.close()


Start = Callable[[str], Traced]


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.8), (5, 1.8)])
def test_a_rank_whose_gpu_is_slow_is_named(start: Start, ranks: int, factor: float) -> None:
    traced = start(f"slow GPU of {ranks}")
    verdict = traced.finish()
    assert verdict["status"] == "degraded", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("compute_straggler", [ranks - 1])
    # Slow from the start, so there is no healthy step to compare with, and the CPU sees only what the GPU delays of its
    # calls: an estimate, not a measurement. The truth is less where other programs make all steps longer.
    length = statistics.median(traced.log.lengths_s())
    truth = length / (length - (factor - 1) * COMPUTE_S)
    assert 0.72 * truth < verdict["slowdown"] < 1.45 * truth
    assert all(evidence["sql"].strip().upper().startswith(("SELECT", "WITH")) for evidence in finding["evidence"])
    shown = argus_with(traced.store_url)("sql", finding["evidence"][0]["sql"], "--format", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout), "the query that comes with the evidence shows it again"


def test_a_rank_that_waits_for_its_data_is_named(start: Start) -> None:
    verdict = start("slow data").finish()
    assert verdict["status"] == "degraded", verdict
    assert (verdict["findings"][0]["kind"], verdict["findings"][0]["ranks"]) == ("data_loading", [1])


def test_a_rank_that_compiles_in_every_step_is_named(start: Start) -> None:
    verdict = start("compiling").finish()
    assert verdict["status"] == "degraded", verdict
    assert (verdict["findings"][0]["kind"], verdict["findings"][0]["ranks"]) == ("jit_stall", [2])


def test_a_slow_link_blames_no_rank(start: Start) -> None:
    verdict = start("slow link").finish()
    assert verdict["status"] in ("healthy", "degraded"), verdict
    assert all(finding["ranks"] == [] for finding in verdict["findings"]), verdict


def test_a_single_process_is_inconclusive_with_a_reason(start: Start) -> None:
    verdict = start("alone").finish()
    assert verdict["status"] == "inconclusive"
    assert verdict["steps"], "it has steps all the same"
    assert "fewer than 2 ranks" in verdict["reason"]


def test_a_rank_that_stalls_now_and_then_is_named(start: Start) -> None:
    """One step of ten is long: the typical step is fine, and the job is slow all the same."""
    verdict = start("stalls").finish()
    assert verdict["status"] == "degraded", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("jit_stall", [1])
    assert verdict["slowdown"] == pytest.approx(1.3, abs=0.15)


def test_ranks_that_were_not_traced_keep_a_job_from_being_healthy(start: Start) -> None:
    """The slow one may be among them."""
    verdict = start("slow one not traced").finish()
    assert (verdict["status"], verdict["findings"]) == ("inconclusive", [])
    assert "2 of 4 ranks were traced" in verdict["reason"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Argus:
    """A store with a job that was traced for some steps, until rank 3 stopped calling, and for six seconds after."""
    folder = tmp_path_factory.mktemp("stopped")
    store_url = new_store(folder)
    control, log = folder / "control", Log(folder, 4)
    with Job(ranks=4, args=log.args, env={"FAKEGPU_CONTROL": str(control)}) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), "--no-stacks")
        attached(tracing)
        log.wait_for_steps(40)
        (folder / "fault").write_text("FAKEGPU_HANG_RANK=3\n")
        (folder / "fault").rename(control)
        # What counts as silence is 20 steps, 5 s before a verdict is in doubt and --hang-after before it is a hang.
        wait_for_silence(log, max(6.0, 25 * statistics.median(log.lengths_s())))
        tracing.send_signal(signal.SIGINT)
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0, output
        assert job.poll() == [None] * 4
    return argus_with(store_url)


def test_a_rank_that_stops_calling_hangs_the_job_and_is_named(stopped: Argus) -> None:
    verdict = verdict_of(stopped, "--hang-after", "2")
    assert verdict["status"] == "hung", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("hang", [3])
    text = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert "3 ranks called AllReduce" in text
    assert "rank 3 did not come" in text


def test_a_short_silence_keeps_a_job_from_being_healthy(stopped: Argus) -> None:
    """Too short to be called a hang, too long to be called health."""
    verdict = verdict_of(stopped)
    assert verdict["status"] == "inconclusive", verdict
    assert "no step was seen for the last" in verdict["reason"]


def test_a_rank_that_was_killed_is_named_as_soon_as_the_others_stand(
    argus: Argus, store_url: str, tmp_path: Path
) -> None:
    log = Log(tmp_path, 4)
    with Job(ranks=4, args=log.args) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), "--no-stacks")
        attached(tracing)
        log.wait_for_steps(40)
        os.kill(job.pids[2], signal.SIGKILL)
        # 20 steps, and 5 s: a process that is no more need not be waited for the 30 s of --hang-after.
        wait_for_silence(log, max(6.5, 25 * statistics.median(log.lengths_s())))
        tracing.send_signal(signal.SIGINT)
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0, output
    verdict = verdict_of(argus)
    assert verdict["status"] == "hung", verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("hang", [2])
    assert "rank 2 has no process any more" in " ".join(evidence["text"] for evidence in finding["evidence"])
    assert "what ended rank 2" in finding["action"]


def test_a_job_that_ended_does_not_hang(argus: Argus, store_url: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Job(ranks=2, args=["--steps", str(STEPS), "--go", str(go)]) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), "--no-stacks")
        attached(tracing)
        go.touch()
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0, output
    verdict = verdict_of(argus, "--hang-after", "0.1")
    assert verdict["status"] in ("healthy", "inconclusive"), verdict
    assert verdict["coverage"]["ended"] is True


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    for verb in (("diagnose",), ("sql", "SELECT 1 FROM jobs")):
        done = argus_with(f"chdb://{tmp_path}/none")(*verb)
        assert done.returncode == 3
        assert "argus trace --pid" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_job_that_hung_before_it_was_traced_is_reported(argus: Argus, tmp_path: Path) -> None:
    log = Log(tmp_path, 4)
    with Job(ranks=4, args=log.args, env={"FAKEGPU_HANG_RANK": "1", "FAKEGPU_HANG_STEP": "2"}) as job:
        wait_until(lambda: log.steps() >= 1, what="the job's first step")
        wait_for_silence(log, 1)
        done = argus("trace", *pid_words(job.pids), "--duration", "1")
        assert done.returncode == 0, done.stderr
    verdict = verdict_of(argus)
    assert verdict["status"] == "inconclusive"
    assert "made no CUDA or NCCL call while they were traced" in verdict["reason"]
