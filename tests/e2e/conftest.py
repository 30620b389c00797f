"""Real processes and the real command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import wait_until
from tests.ports import free_port
from tests.stores import new_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakegpu"))

ARGUS = [sys.executable, "-m", "argus.cli.main"]

Argus = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """An embedded store of the test's own."""
    return new_store(tmp_path)


def argus_with(store_url: str) -> Argus:
    """Runs ``argus VERB …`` against a store and returns what came of it."""

    def run(verb: str, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        command = [*ARGUS, verb, *words]
        if verb != "check":
            command += ["--store", store_url]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    return run


@pytest.fixture
def argus(store_url: str) -> Argus:
    """``argus VERB …`` against the test's store."""
    return argus_with(store_url)


def pid_words(pids: list[int]) -> list[str]:
    return [word for pid in pids for word in ("--pid", str(pid))]


def start_trace(store_url: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ARGUS, "trace", *words, "--store", store_url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def attached(tracing: subprocess.Popen[str]) -> list[str]:
    """Waits until the trace prints what it attached to; returns its output."""
    assert tracing.stdout is not None
    output = []
    for line in tracing.stdout:
        output.append(line)
        if "probes on" in line and "libnccl" in line:
            return output
    pytest.fail("argus trace ended early: " + "".join(output))


class Log:
    """What the ranks of a job write themselves: a line a step."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._path = str(folder / "steps-{rank}")
        self._files = [Path(self._path.format(rank=rank)) for rank in range(ranks)]
        self.args = ["--log", self._path]

    def steps(self) -> int:
        """Steps that every rank has finished."""
        return min(file.read_text().count("\n") if file.exists() else 0 for file in self._files)

    def wait_for_steps(self, count: int) -> None:
        """Waits for so many more steps."""
        before = self.steps()
        wait_until(lambda: self.steps() >= before + count, 60, "steps of the job")

    def lengths_s(self) -> list[float]:
        """How long each step of rank 0 took."""
        steps = [json.loads(line) for line in self._files[0].read_text().splitlines(keepends=True) if line[-1] == "\n"]
        return [(step["end_ns"] - step["start_ns"]) / 1e9 for step in steps if "end_ns" in step]


def wait_for_silence(log: Log, seconds: float) -> None:
    """Waits until no step has been finished for so long."""
    last, since = log.steps(), time.monotonic()
    deadline = since + 60
    while time.monotonic() < since + seconds:
        assert time.monotonic() < deadline, "the job does not hang"
        time.sleep(0.05)
        if log.steps() != last:
            last, since = log.steps(), time.monotonic()


@contextlib.contextmanager
def ranks_of(program: Path, count: int, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are the ranks of a job, as PyTorch's init_process_group wants them; 0: one that is in no group."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(max(count, 1)):
        place = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count else {}
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(program), *(word.replace("{rank}", str(rank)) for word in arguments)]
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE))
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
