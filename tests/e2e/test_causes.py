"""What ails a rank of a running Python job: which line it hangs in, what it does that the others do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run import BUILD

from argus.diagnose.verdict import json_schema
from tests.e2e.conftest import argus_with, attached, pid_words, start_trace
from tests.kernel.conftest import wait_until
from tests.stores import new_store

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

PROGRAM = Path(__file__).with_name("programs") / "nccl_train.py"
RANKS = 3


class Training:
    """A running job of ``nccl_train.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, new_store(folder)
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(BUILD), str(folder)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            )
            for rank in range(RANKS)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.ranks]

    def steps(self) -> int:
        files = [self.folder / f"steps-{rank}" for rank in range(RANKS)]
        return min(file.read_text().count("\n") if file.exists() else 0 for file in files)

    def wait_for_steps(self, count: int) -> None:
        before = self.steps()
        wait_until(lambda: self.steps() >= before + count, 60, "steps of the job")

    def fault(self, rank: int, what: str) -> None:
        (self.folder / "fault").write_text(what)
        (self.folder / "fault").rename(self.folder / f"fault-{rank}")

    def verdict(self, *words: str) -> dict[str, Any]:
        answer = argus_with(self.url)("diagnose", "--format", "json", *words)
        assert answer.returncode == 0, answer.stderr
        print(answer.stdout)  # shown where the test fails
        verdict: dict[str, Any] = json.loads(answer.stdout)
        jsonschema.validate(verdict, json_schema())
        return verdict

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


@pytest.fixture
def training(fakegpu: Path, tmp_path: Path) -> Iterator[Training]:
    job = Training(tmp_path)
    try:
        job.wait_for_steps(2)
        yield job
    finally:
        job.close()


def line_of(text: str) -> int:
    return 1 + next(n for n, line in enumerate(PROGRAM.read_text().splitlines()) if text in line)


def test_a_rank_that_collects_garbage_and_one_that_hangs(training: Training) -> None:
    """Rank 2 collects garbage in every step; then rank 1 waits for data that never come: both while one trace runs."""
    training.fault(2, "collect")
    tracing = start_trace(training.url, *pid_words(training.pids), "--rate", "97")
    attached(tracing)
    time.sleep(6)
    training.wait_for_steps(1)
    verdict = training.verdict()
    (finding,) = [finding for finding in verdict["findings"] if finding["ranks"]]
    assert (finding["kind"], finding["ranks"], finding["level"]) == ("gc_pause", [2], "stack")
    where = f"collects_garbage (programs/nccl_train.py:{line_of('    gc.collect()')})"
    assert where in " ".join(evidence["text"] for evidence in finding["evidence"])

    training.fault(1, "hang")
    # Steps have ended for 3 s, and what waits is reported every 2 s.
    time.sleep(6)
    tracing.send_signal(signal.SIGINT)
    output, _ = tracing.communicate(timeout=60)
    assert tracing.returncode == 0, output
    verdict = training.verdict("--hang-after", "2")
    assert verdict["status"] == "hung", verdict
    (finding,) = verdict["findings"]
    assert (finding["ranks"], finding["level"]) == ([1], "stack")
    assert finding["collective"]["missing"] == [1]
    assert finding["collective"]["came"] == [0, 2]
    where = f"waits_for_data (programs/nccl_train.py:{line_of('never.wait()')})"
    text = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert f"the main thread of rank 1 waits (futex) in {where}, called by train" in text
    assert f"train (programs/nccl_train.py:{line_of('cudaStreamSynchronize(stream)')})" in text
    assert where in finding["action"]


BUSY = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_that_shares_its_cpu_is_named(training: Training) -> None:
    ours, theirs = sorted(os.sched_getaffinity(0))[:2]
    for rank, pid in enumerate(training.pids):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            os.sched_setaffinity(thread, {theirs if rank == 2 else ours})
            if rank != 2:  # these never wait for long, whatever else the machine does
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, "60"]) for _ in range(2)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, {theirs})
        tracing = start_trace(training.url, *pid_words(training.pids), "--rate", "97")
        attached(tracing)
        time.sleep(5)
        training.wait_for_steps(1)
        tracing.send_signal(signal.SIGINT)
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0, output
        verdict = training.verdict()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    (finding,) = [finding for finding in verdict["findings"] if finding["ranks"]]
    assert (finding["kind"], finding["ranks"]) == ("host_contention", [2])
    assert "for a free CPU" in " ".join(evidence["text"] for evidence in finding["evidence"])
