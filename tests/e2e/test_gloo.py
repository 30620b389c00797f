"""PyTorch's gloo process group: every call of a program that makes known ones, and how they line up."""

from __future__ import annotations

import importlib.util
import json
import platform
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from argus.capture.process.pytorch import LAYOUTS
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import argus_with, pid_words, ranks_of, start_trace
from tests.kernel.conftest import wait_until
from tests.stores import new_store

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)"),
]

PROGRAM = Path(__file__).with_name("programs") / "gloo_calls.py"
BOTH = {
    ("AllReduce", 4000, "float32"): 7,
    ("Broadcast", 136, "int64"): 3,
    ("Barrier", 0, ""): 2,
    ("AllGather", 40, "float64"): 4,
    ("AllGather", 48, "float32"): 2,
    ("Reduce", 44, "float32"): 2,
    ("Gather", 52, "float32"): 1,
    ("Scatter", 52, "float32"): 1,
    ("AllReduce", 16, "bfloat16"): 6,
    ("Broadcast", 4, "float32"): 1,  # the one that fails
}
EXPECTED = {0: {**BOTH, ("Send", 36, "int32"): 5}, 1: {**BOTH, ("Recv", 36, "int32"): 5}}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ranks_of(PROGRAM, 2, str(tmp_path)) as ranks:
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)), 60, "the job to begin")
        yield ranks


def test_every_call_is_there(job: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    url = new_store(tmp_path)
    tracing = start_trace(url, *pid_words([process.pid for process in job]))
    try:
        assert tracing.stdout is not None
        while (first := tracing.stdout.readline()).startswith("argus: "):
            pass  # what takes time
        (tmp_path / "go").touch()
        wait_until(lambda: all((tmp_path / f"done-{rank}").exists() for rank in (0, 1)), 60, "the job's calls")
        assert [process.poll() for process in job] == [None, None]
        tracing.send_signal(signal.SIGINT)
        output = first + tracing.communicate(timeout=90)[0]
    finally:
        tracing.kill()
        tracing.wait()
    assert "coverage: complete" in output
    with open_store(url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT rank, toString(op) AS op, bytes, toString(dtype) AS dtype, comm, seq, peer, duration_ns"
            " FROM collectives ORDER BY ts",
        )
        groups = query_columns(
            store,
            "SELECT rank, comm, comm_group, comm_rank, nranks, seq_offset, toString(joined_by) AS joined_by, error"
            " FROM communicators FINAL",
        )
    calls = list(zip(*(rows[name].tolist() for name in rows), strict=True))
    for rank, expected in EXPECTED.items():
        own = [call for call in calls if call[0] == rank]
        assert Counter(call[1:4] for call in own) == expected
        assert {call[6] for call in own if call[1] in ("Send", "Recv")} == {1 - rank}
        assert {call[7] for call in own} == {-1}
        handles = {call[4] for call in own}
        assert len(handles) == 2
        for handle in handles:
            for kinds in (("Send", "Recv"), {op for op, *_ in expected} - {"Send", "Recv"}):
                numbers = [call[5] for call in own if call[4] == handle and call[1] in kinds]
                assert numbers == list(range(len(numbers)))
    # Both groups, lined up to the call, although they were made before the trace began.
    found = list(zip(*(groups[name].tolist() for name in groups), strict=True))
    assert [(row[3], row[4], row[6], row[7]) for row in found] == [(row[0], 2, "name", "") for row in found]
    assert sorted(Counter(row[2] for row in found).values()) == [2, 2]
    offsets = {(row[0], row[1]): (row[2], row[5]) for row in found}
    numbered: dict[tuple[int, int], list[tuple[object, ...]]] = defaultdict(list)
    for rank, op, nbytes, _, comm, seq, *_ in calls:
        if op not in ("Send", "Recv"):
            group, offset = offsets[rank, comm]
            numbered[group, seq + offset].append((op, nbytes))
    assert len(numbered) == sum(BOTH.values())
    assert all(len(both) == 2 and both[0] == both[1] for both in numbered.values())
    for rank in (0, 1):
        caught = (tmp_path / f"caught-{rank}").read_text().splitlines()
        assert len(caught) == 2
        assert "root" in caught[0]
        assert "backward through the graph a second time" in caught[1]


def test_the_layout_is_that_of_the_installed_pytorch() -> None:
    import torch

    layout = LAYOUTS.get((platform.machine(), *map(int, torch.__version__.split(".")[:2])))
    if layout is None or layout.group is None:
        pytest.skip(
            f"PyTorch {torch.__version__} on {platform.machine()} is not in argus.capture.process.pytorch.LAYOUTS"
        )
    with ranks_of(PROGRAM.with_name("torch_layout.py"), 3) as processes:
        output = processes[2].communicate(timeout=60)[0]
    found = json.loads(output)
    # numel is a size as well (shape and size of one dimension); the counter has a sequence number beside it.
    assert layout.numel in found["numel"]
    assert [layout.sizes] == found["sizes"]
    assert layout.group.rank in found["group_rank"]
    assert layout.group.size == layout.group.rank + 4
    assert layout.group.name in found["group_name"]
    assert layout.group.counter in found["group_counter"]


def test_process_groups_that_come_and_go_are_distinguished(tmp_path: Path) -> None:
    """Each new one may lie where the one before did, and counts its collectives from the start."""
    url = new_store(tmp_path)
    with ranks_of(PROGRAM.with_name("gloo_again.py"), 2, str(tmp_path), "{rank}") as processes:
        files = [tmp_path / f"ends-{rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.stat().st_size > 200 for file in files), 60, "the job's steps")
        # Steps of 6 ms, whose marks cost 0.7 % of them, and on a busy machine more than may be spent by default.
        words = [*pid_words([process.pid for process in processes]), "--steps", "150", "--duration", "60"]
        output = argus_with(url)("trace", *words, "--max-overhead", "10").stdout
        (tmp_path / "stop").touch()
        assert [process.wait(60) for process in processes] == [0, 0]
    assert "coverage: complete" in output
    with open_store(url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT rank, step, toUnixTimestamp64Nano(ts) - j.offset + toInt64(duration_ns) AS end FROM iterations"
            " CROSS JOIN (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j ORDER BY rank, step",
        )
        groups = query_columns(store, "SELECT rank, uniqExact(comm_group) AS n FROM communicators GROUP BY rank")
    assert groups["n"].min() >= 3
    shifts = set()
    for rank, file in enumerate(files):
        numbers, ends = np.loadtxt(file, np.int64).T
        own = rows["rank"] == rank
        assert own.sum() >= 150
        # The program notes the time just after its optimiser.
        theirs = numbers[np.searchsorted(ends, rows["end"][own])]
        assert np.array_equal(np.diff(theirs), np.ones(own.sum() - 1))
        shifts |= set((theirs - rows["step"][own].astype(int)).tolist())
    assert len(shifts) == 1


RANGES = """
import torch
while True:
    with torch.autograd.profiler.record_function("layer"):
        pass
"""


def test_a_program_with_thousands_of_ranges_is_let_alone(tmp_path: Path) -> None:
    """Probes on them would slow it down to a fifth."""
    program = subprocess.Popen([sys.executable, "-c", RANGES])
    try:
        wait_until(
            lambda: "libtorch_python" in Path(f"/proc/{program.pid}/maps").read_text(), 60, "PyTorch to be loaded"
        )
        output = argus_with(new_store(tmp_path))("trace", "--pid", str(program.pid), "--duration", "12").stdout
    finally:
        program.kill()
        program.wait()
    assert "PyTorch's ranges are probed in samples only" in output
    assert "coverage: incomplete (" in output
    assert "PyTorch's ranges not observed for some of the time, since it cost too much" in output
