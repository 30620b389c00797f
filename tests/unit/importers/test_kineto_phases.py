"""Ranges that a training loop names itself: what they are in the phases of a step, and in a verdict."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.cli.main import main
from argus.diagnose.causes.cpu_time import Cause, refine
from argus.importers.recordings.phases import MOST_NAMED, phases_of
from argus.importers.recordings.recording import CALL, CALL_KINDS, Recording
from argus.semantics.steps.by_calls import ITERATION
from tests.builders.kineto_job import Job, make
from tests.stores import new_store

LOADER = "enumerate(DataLoader)"


def job_with(folder: Path, name: str, *, first: bool = True) -> Path:
    """Four ranks, of which rank 2 spends 7.85 ms a step in a range of this name, before its batch or after it, and
    loads its batch in less time than the others."""
    for path in make(Job(dp=4, layers=6, fault="loader", much=7.0, victim=2, steps=16), folder):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        events: list[dict[str, Any]] = []
        for event in trace["traceEvents"]:
            if event["name"].startswith(LOADER) and event["dur"] > 2000:
                other = {**event, "name": name, "dur": event["dur"] - 100}
                event["dur"] = 50
                moved = event if first else other
                moved["ts"] += 60 if not first else other["dur"] + 50
                events.append(other)
            events.append(event)
        path.write_bytes(gzip.compress(json.dumps({**trace, "traceEvents": events}).encode()))
    return folder


def verdict_of(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The verdict on these traces."""
    url = new_store(tmp_path)
    assert main(["import", "kineto", str(folder), "--job", "j", "--store", url]) == 0
    capsys.readouterr()
    assert main(["diagnose", "--job", "j", "--store", url, "--no-store", "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "first"), [("save_checkpoint", True), ("all_gather_metrics", True), ("my_logging", False)]
)
def test_a_range_before_the_copy_of_the_batch_is_no_data_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, first: bool
) -> None:
    verdict = verdict_of(job_with(tmp_path / "traces", name, first=first), tmp_path, capsys)
    (finding,) = verdict["findings"]
    phase = "checkpoint" if name == "save_checkpoint" else name
    assert (finding["kind"], finding["ranks"], finding["phase"]) == ("kernel_issue_stall", [2], phase)
    assert "it spends 7.8" in finding["evidence"][1]["text"]
    assert f"a step in {phase}, the others" in finding["evidence"][1]["text"]
    assert ("saves checkpoints" if phase == "checkpoint" else f"does in {name}") in finding["action"]


@pytest.mark.thorough
def test_a_slow_loader_is_still_data_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(Job(dp=4, layers=6, fault="loader", much=7.0, victim=2, steps=16), tmp_path / "traces")
    verdict = verdict_of(tmp_path / "traces", tmp_path, capsys)
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"]) == ("data_loading", [2])
    # Nothing names the host of these recordings.
    assert finding["hosts"] == []
    assert "unknown" not in json.dumps(finding)


# ---- which ranges are phases


def step_of(*ranges: tuple[str, int, int], launches: tuple[int, ...] = ()) -> dict[str, int]:
    """How long the phases of one step are that has these ranges, us, and launches kernels at these times."""
    recording = Recording("a.json", "kineto", 0, "trace", 1)
    recording.ranges = [(name, begin * 1000, end * 1000, 7) for name, begin, end in ranges]
    recording.calls = np.zeros(len(launches), CALL)
    recording.calls["ts_ns"], recording.calls["tid"], recording.calls["op"] = np.array(launches) * 1000, 7, -1
    recording.calls["kind"] = CALL_KINDS.index("kernel")
    steps = np.zeros(1, ITERATION)
    steps["duration_ns"] = 100_000
    rows, names = phases_of(recording, steps)
    assert int(rows["duration_ns"].sum()) == (100_000 if len(rows) else 0)
    return {names[row["phase"]]: int(row["duration_ns"]) // 1000 for row in rows}


OWN = ((LOADER, 0, 10), ("forward", 30, 50), ("backward", 50, 80), ("Optimizer.step#Adam.step", 80, 90))
PARTS = {"data_loading": 10, "forward": 20, "backward": 30, "optimizer": 10}


def test_a_range_of_the_program_is_a_phase_by_its_name() -> None:
    assert step_of(*OWN) == {**PARTS, "data_loading": 30, "other": 10}
    assert step_of(*OWN, ("my_logging", 12, 28), ("step 3 summary!", 91, 99)) == {
        **PARTS, "data_loading": 14, "my_logging": 16, "step_N_summary": 8, "other": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "ranges",
    [
        [("train_one", 0, 100)],  # holds parts of a step
        [("attention", 31, 40)],  # is a part of one
        [("FSDP::all_gather", 12, 28), ("## Call CompiledFxGraph x ##", 12, 28), ("123", 12, 28)],
        [("other", 91, 95)],
    ],
)  # fmt: skip
def test_other_ranges_are_no_phases(ranges: list[tuple[str, int, int]]) -> None:
    assert step_of(*OWN, *ranges) == step_of(*OWN)


def test_a_layer_is_part_of_a_forward_that_is_not_marked() -> None:
    parts = ((LOADER, 0, 10), ("backward", 50, 80), ("Optimizer.step#Adam.step", 80, 90))
    whole = step_of(*parts)
    assert whole["forward"] == 40
    assert step_of(*parts, ("attention", 20, 30), launches=(25,)) == whole
    assert step_of(*parts, ("my_logging", 20, 30), launches=(35,)) == {**whole, "forward": 30, "my_logging": 10}


def test_names_of_phases_are_few_and_short() -> None:
    many = [(f"{'long' * 20}{chr(65 + k // 26)}{chr(65 + k % 26)}"[-60:], 91, 92) for k in range(2)]
    assert max(map(len, step_of(*OWN, *many))) <= 40
    few = step_of(*OWN[:1], ("Optimizer.step#Adam.step", 90, 100),
                  *((f"part_{chr(97 + k)}", 10 + 2 * k, 12 + 2 * k) for k in range(26)))  # fmt: skip
    assert sum(name.startswith("part_") for name in few) == MOST_NAMED


# ---- which phase is the cause


def phases(**ms: tuple[float, float]) -> dict[str, NDArray[Any]]:
    """Of 10 steps: what the late rank 1 spends in each phase, and what rank 0 does."""
    rows = [(rank, step, phase, both[1 - rank] * 1e6) for step in range(10) for rank in (0, 1)
            for phase, both in ms.items() if both[1 - rank]]  # fmt: skip
    return dict(zip(("rank", "step", "phase", "duration_ns"), map(np.array, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize(
    ("columns", "kind", "phase"),
    [
        (phases(data_loading=(9.0, 1.0), forward=(5.0, 5.0)), "data_loading", ""),
        (phases(data_loading=(0.1, 1.0), checkpoint=(7.9, 0.0)), "kernel_issue_stall", "checkpoint"),
        (phases(data_loading=(1.0, 1.0), other=(9.0, 1.0)), "kernel_issue_stall", "other"),
        # Their loader has no marks; and what is taken for the forward may hold the way of a batch to the GPU.
        (phases(forward=(1.0, 1.0), other=(9.0, 1.0)), "data_loading", ""),
        (phases(data_loading=(1.0, 1.0), forward=(9.0, 1.0)), "data_loading", ""),
        (phases(data_loading=(3.0, 1.0), checkpoint=(3.9, 0.0)), "data_loading", ""),
    ],
)
def test_what_comes_before_the_copy_of_a_batch(columns: dict[str, NDArray[Any]], kind: str, phase: str) -> None:
    by_calls = Cause("data_loading", "8.00 ms more before the copy", True)
    cause = refine(by_calls, columns, (1,), 8e6)
    assert (cause.kind, cause.phase) == (kind, phase)
