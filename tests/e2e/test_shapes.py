"""Steps and parallel groups of jobs of every shape on the fake GPU, against what the programs say themselves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from argus.store.open import open_store
from argus.store.reader import query_columns

from .conftest import ARGUS, argus_with, pid_words

pytestmark = pytest.mark.kernel

HALVES = (
    ("one_gpu", "dp", "tp_dp", "pp_1f1b", "evaluation", "variable_length"),
    ("fsdp", "tp_pp_dp", "moe_ep", "pp_interleaved", "grad_accumulation", "checkpoint"),
)
"""Traced together: a trace takes longer to begin than these jobs take."""
MIDDLE = ("fsdp", "tp_dp", "pp_1f1b", "evaluation", "checkpoint", "variable_length")
"""Those attached to in the middle: of each kind one."""
STEPS = 120
BEFORE_S = 1.5
"""How long jobs have trained before they are attached to in the middle."""


@dataclass
class Traced:
    url: str
    folder: Path
    said: str

    def truth(self, shape: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and beginnings of the program's steps; a line may be unfinished."""
        text = (self.folder / f"truth-{shape}.{rank}").read_text()
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        steps = [line for line in lines if "step" in line]
        return np.array([line["step"] for line in steps]), np.array([line["start_ns"] for line in steps])

    def groups(self, shape: str) -> dict[str, list[tuple[list[int], float]]]:
        """By dimension: ranks and confidence."""
        with open_store(self.url, create=False) as store:
            rows = query_columns(
                store,
                "SELECT toString(dimension) AS dimension, ranks, confidence FROM parallel_groups FINAL"
                f" WHERE job = '{shape}' ORDER BY ranks",
            )
        found = defaultdict(list)
        for dimension, ranks, sure in zip(*(column.tolist() for column in rows.values()), strict=True):
            found[dimension].append(([int(rank) for rank in ranks], sure))
        return found


def check_steps(job: Traced, shape: str, ranks: int, least: int) -> None:
    """That each of the program's steps has one end of Argus's, with one number on all ranks."""
    with open_store(job.url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT rank, step, toUnixTimestamp64Nano(ts) - j.offset + toInt64(duration_ns) AS end FROM iterations"
            " CROSS JOIN (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j"
            f" WHERE job = '{shape}' ORDER BY rank, step",
        )
    shifts = set()
    for rank in range(ranks):
        mine = rows["rank"] == rank
        assert mine.sum() >= least, (shape, rank)
        numbers, begins = job.truth(shape, rank)
        theirs = numbers[np.searchsorted(begins, rows["end"][mine], side="right") - 1]
        assert np.array_equal(np.diff(theirs), np.ones(len(theirs) - 1)), (shape, rank)
        shifts |= set((theirs - rows["step"][mine].astype(int)).tolist())
    assert len(shifts) == 1, (shape, shifts)


@pytest.fixture(scope="module", params=HALVES, ids=("first", "second"))
def from_the_start(
    request: pytest.FixtureRequest, fakegpu: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Traced:
    """Six jobs, started by one command that Argus runs."""
    from shapes import SHAPES

    folder = tmp_path_factory.mktemp("start")
    lines = []
    for name in request.param:
        shape = SHAPES[name]
        lines.append(
            f"{sys.executable} {root}/tests/fakegpu/run.py --ranks {shape.ranks} --env TORCHELASTIC_RUN_ID={name}"
            f" --program {fakegpu}/fake_plan -- '{shape.write(folder)}' --steps {STEPS} --log {folder}/truth-{name} &"
        )
    url = f"chdb://{folder}/store"
    command = [*ARGUS, "run", "--store", url, "--", "sh", "-c", "\n".join([*lines, "wait"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return Traced(url, folder, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def in_the_middle(fakegpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Six jobs that had made their communicators, and trained, before they were attached to."""
    from run import Job
    from shapes import SHAPES

    folder = tmp_path_factory.mktemp("middle")
    url = f"chdb://{folder}/store"
    with contextlib.ExitStack() as running:
        pids = []
        for name in MIDDLE:
            shape = SHAPES[name]
            words = [shape.write(folder), "--steps", "100000", "--log", f"{folder}/truth-{name}"]
            job = Job(shape.ranks, words, {"TORCHELASTIC_RUN_ID": name}, program=fakegpu / "fake_plan")
            pids += running.enter_context(job).pids
        time.sleep(BEFORE_S)
        words = ["--no-stacks", "--buffer-mb", "64", "--steps", "60", "--duration", "60"]
        said = argus_with(url)("trace", *pid_words(pids), *words).stdout
    return Traced(url, folder, said)


def shapes_of(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = HALVES[("first", "second").index(request.node.callspec.id)]
    return found


def test_steps_from_the_start(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    from shapes import SHAPES

    # Of a dozen processes that are forked at once, some call before they are let through: counted, and no step.
    assert "dropped" not in from_the_start.said
    for name in shapes_of(request):
        check_steps(from_the_start, name, SHAPES[name].ranks, STEPS - 2)


def test_groups_from_the_start(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    from shapes import SHAPES

    for name in shapes_of(request):
        found = {dimension: [ranks for ranks, _ in groups] for dimension, groups in from_the_start.groups(name).items()}
        wanted = {dimension: sorted(groups) for dimension, groups in SHAPES[name].groups.items()}
        if name == "tp_dp":
            del wanted["world"]  # nothing is sent in it
        assert found == wanted, name


def test_steps_in_the_middle(in_the_middle: Traced) -> None:
    from shapes import SHAPES

    assert "coverage: complete" in in_the_middle.said
    for name in MIDDLE:
        check_steps(in_the_middle, name, SHAPES[name].ranks, 50)


def test_groups_in_the_middle_are_right_or_said_to_be_guesses(in_the_middle: Traced) -> None:
    from shapes import SHAPES

    for name in MIDDLE:
        shape = SHAPES[name]
        found = in_the_middle.groups(name)
        for dimension, groups in found.items():
            for ranks, sure in groups:
                assert sure < 0.41 or ranks in shape.groups.get(dimension, []), (name, dimension, ranks, sure)
        if len(shape.groups) == 1:
            assert {dimension: [ranks for ranks, _ in groups] for dimension, groups in found.items()} == shape.groups
