"""Steps and phases of a real PyTorch job on CPUs, four processes over gloo, against what the program timed itself."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import argus_with, pid_words, ranks_of
from tests.kernel.conftest import wait_until
from tests.stores import new_store

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)"),
]

PROGRAM = Path(__file__).with_name("programs") / "gloo_train.py"
RANKS = 4
FAULTS = ("", "forward", "data_loading", "optimizer")
"""What is slow on the rank of the same number, for a segment of steps each in turn."""
SEGMENT = int(os.environ.get("ARGUS_DDP_SEGMENT", "50"))
LONGEST_S = 2.4 * SEGMENT
"""How long a trace may take."""
SLEEP_S = 0.012
STEPS = 5 * SEGMENT + 20
"""So many contain every segment whole, wherever they begin."""
EQUAL = 0.05
"""How far phases may be from the program's own times: their marks are some calls of Python inside of those."""


@dataclass
class Traced:
    """The job, and what it wrote itself."""

    url: str
    output: str = ""
    truth: list[dict[int, dict[str, int]]] = field(default_factory=list)
    shift: int = 0
    """The program's number of a step less Argus's."""

    def query(self, sql: str) -> dict[str, list[object]]:
        with open_store(self.url, create=False) as store:
            return {name: column.tolist() for name, column in query_columns(store, sql).items()}

    def steps(self, rank: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Numbers, and begins and ends on CLOCK_MONOTONIC."""
        rows = self.query(
            "SELECT step, toUnixTimestamp64Nano(ts) - j.offset AS begin, toInt64(duration_ns) AS duration"
            " FROM iterations"
            f" CROSS JOIN (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j WHERE rank = {rank} ORDER BY step"
        )
        begins = np.array(rows["begin"])
        return rows["step"], begins, begins + np.array(rows["duration"])  # type: ignore[return-value]

    def phases(self, rank: int) -> dict[int, dict[str, int]]:
        """Times by phase, by Argus's step; waiting for communication is a part of the program's backward."""
        rows = self.query(f"SELECT step, toString(phase) AS phase, duration_ns FROM phases WHERE rank = {rank}")
        found: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for step, phase, duration in zip(rows["step"], rows["phase"], rows["duration_ns"], strict=True):
            found[step]["backward" if phase == "communication" else phase] += duration  # type: ignore
        return found

    def segment(self, fault: int) -> range:
        """Argus's steps of a whole segment with this fault."""
        numbers, _, _ = self.steps(0)
        for step in numbers:
            program = step + self.shift
            if program % SEGMENT == 0 and program // SEGMENT % RANKS == fault and step + SEGMENT - 1 <= numbers[-1]:
                return range(step, step + SEGMENT)
        raise AssertionError(f"no whole segment of fault {fault}")


def trace(folder: Path, ranks: int, faults: tuple[str, ...], steps: int) -> Traced:
    job = Traced(new_store(folder))
    truth = [folder / f"truth-{rank}" for rank in range(max(ranks, 1))]
    arguments = str(folder), ",".join(faults), str(SEGMENT), str(SLEEP_S)
    with ranks_of(PROGRAM, ranks, *arguments) as processes:
        wait_until(lambda: all(file.exists() and file.stat().st_size > 2000 for file in truth), 120, "the job's steps")
        pids = pid_words([process.pid for process in processes])
        words = [*pids, "--steps", str(steps), "--duration", str(LONGEST_S)]
        job.output = argus_with(job.url)("trace", *words, timeout=LONGEST_S + 60).stdout
        (folder / "stop").touch()
        assert [process.wait(60) for process in processes] == [0] * len(processes)
    job.truth = [{(line := json.loads(text))["step"]: line for text in file.read_text().splitlines()} for file in truth]
    return job


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Four ranks, attached in the middle of their training."""
    job = trace(tmp_path_factory.mktemp("phases"), RANKS, FAULTS, STEPS)
    job.shift = check_steps(job, 5 * SEGMENT)
    return job


def check_steps(job: Traced, least: int) -> int:
    """That every rank's steps are the program's, with one number on all. The program's number less Argus's."""
    assert "coverage: complete" in job.output
    shifts = set()
    for rank, own in enumerate(job.truth):
        numbers, begins, ends = job.steps(rank)
        assert len(numbers) >= least
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert (begins[1:] == ends[:-1]).all()
        began = np.array([line["begin_ns"] for line in own.values()])
        for number, begin, end in zip(numbers, begins.tolist(), ends.tolist(), strict=True):
            inside = np.flatnonzero((began > begin) & (began <= end))
            assert len(inside) == 1
            line = own[int(inside[0])]
            assert line["end_ns"] >= end  # it ends with the optimiser
            shifts.add(line["step"] - number)
    assert len(shifts) == 1
    assert "where steps go: " in job.output
    methods = job.query("SELECT toString(method) AS method, min(confidence) AS sure FROM iterations GROUP BY method")
    assert methods == {"method": ["marks"], "sure": [1.0]}
    return shifts.pop()


def check_phases(job: Traced, rank: int, steps: range) -> None:
    """That phases are what the program timed, over these steps of Argus's.

    Between a mark and the program's own look at the clock the thread may lose its CPU, once for 49 ms of the program's
    optimiser where others take 9: of twenty steps the one that is farthest off says nothing.
    """
    found = job.phases(rank)
    for phase in ("data_loading", "forward", "backward", "optimizer"):
        selected = np.array([found[step][phase] for step in steps])
        own = np.array([job.truth[rank][step + job.shift][phase] for step in steps])
        informative = np.argsort(np.abs(selected - own))[: len(steps) - len(steps) // 20]
        assert selected[informative].sum() == pytest.approx(own[informative].sum(), rel=EQUAL), (rank, steps, phase)


def test_phases_are_what_the_program_timed(traced: Traced) -> None:
    for rank in range(RANKS):
        for fault in range(len(FAULTS)):
            check_phases(traced, rank, traced.segment(fault))
    # The phases of each step add up to it.
    uneven = traced.query(
        "SELECT countIf(toInt64(i.duration_ns) != p.total) AS n FROM iterations AS i INNER JOIN"
        " (SELECT rank, step, toInt64(sum(duration_ns)) AS total FROM phases GROUP BY rank, step) AS p"
        " ON i.rank = p.rank AND i.step = p.step"
    )
    assert uneven["n"] == [0]


def test_the_mesh_is_printed_and_stored(traced: Traced) -> None:
    assert "\nmesh: dp 4\n  dp    data parallel: ranks 0-3 (all-reduces, in " in traced.output
    groups = traced.query("SELECT toString(dimension) AS dimension, ranks, nranks FROM parallel_groups FINAL")
    assert groups["dimension"] == ["dp"]
    assert [list(ranks) for ranks in groups["ranks"]] == [[0, 1, 2, 3]]  # type: ignore[call-overload]
    assert groups["nranks"] == [4]


@pytest.mark.parametrize("fault", range(1, len(FAULTS)), ids=FAULTS[1:])
def test_a_sleep_shows_in_the_right_phase_of_the_right_rank(traced: Traced, fault: int) -> None:
    steps = traced.segment(fault)
    typical = {
        (rank, phase): float(np.median([found[step][phase] for step in steps]))
        for rank in range(RANKS)
        for found in [traced.phases(rank)]
        for phase in ("data_loading", "forward", "optimizer", "other")
    }
    others = {phase: float(np.median([typical[rank, phase] for rank in range(RANKS)])) for _, phase in typical}
    excess = {key: value - others[key[1]] for key, value in typical.items()}
    assert max(excess, key=lambda key: excess[key]) == (fault, FAULTS[fault])
    assert excess[fault, FAULTS[fault]] == pytest.approx(SLEEP_S * 1e9, rel=0.1)
    assert sorted(excess.values())[-2] < 0.1 * SLEEP_S * 1e9


@pytest.mark.parametrize("fault", range(1, len(FAULTS)), ids=FAULTS[1:])
def test_the_diagnosis_names_rank_and_phase(traced: Traced, fault: int) -> None:
    steps = traced.segment(fault)
    window = f"{steps[0]}:{steps[-1]}"
    output = argus_with(traced.url)("diagnose", "--no-store", "--steps", window, "--format", "json").stdout
    finding = json.loads(output)["findings"][0]
    kind = "data_loading" if FAULTS[fault] == "data_loading" else "compute_straggler"
    assert (finding["ranks"], finding["kind"], finding["phase"]) == ([fault], kind, FAULTS[fault])
    assert "FROM phases" in finding["evidence"][1]["sql"]
    assert "GPU" not in finding["action"]


def test_a_process_that_trains_alone_has_steps_and_phases(tmp_path: Path) -> None:
    job = trace(tmp_path, 0, ("forward", ""), 120)
    job.shift = check_steps(job, 120)
    numbers, _, _ = job.steps(0)
    check_phases(job, 0, range(numbers[0], numbers[-1] + 1))
