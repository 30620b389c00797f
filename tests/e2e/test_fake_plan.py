"""fake_plan does what its plan says, on all ranks, and refuses what makes no sense."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"
sys.path.insert(0, str(FAKEGPU))

from run import Job, ops_log  # noqa: E402
from shapes import SHAPES, Shape  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="futexes and memfd")

KERNEL, COPY = 1, 2


@pytest.fixture
def program(fakegpu: Path) -> Path:
    return fakegpu / "fake_plan"


def plan(tmp_path: Path, *texts: str) -> str:
    """The same plan for all ranks, or one for each."""
    return Shape("plan", len(texts), list(texts), {}).write(tmp_path)


def truth(log: Path, ranks: int) -> tuple[list[Any], list[list[Any]]]:
    """The first lines, and the steps, by rank."""
    files = [[json.loads(line) for line in Path(f"{log}.{rank}").read_text().splitlines()] for rank in range(ranks)]
    return [lines[0] for lines in files], [lines[1:] for lines in files]


def wait_for_steps(log: Path, rank: int, count: int) -> None:
    path = Path(f"{log}.{rank}")
    deadline = time.monotonic() + 20
    while not path.exists() or path.read_text().count("\n") <= count:
        assert time.monotonic() < deadline, f"{count} steps of rank {rank}"
        time.sleep(0.01)


def kernels(log: Path, pid: int) -> list[tuple[str, int]]:
    """Name and duration of each kernel that ran, but NCCL's."""
    ops, names = ops_log(log, pid)
    named = [(names[op["name"] - 1], int(op["end_ns"] - op["start_ns"])) for op in ops if op["kind"] == KERNEL]
    return [(name, duration) for name, duration in named if not name.startswith("nccl")]


def do(program: Path, tmp_path: Path, texts: Sequence[str], *args: str) -> list[list[tuple[str, int]]]:
    """Carries plans out to their end and returns the kernels of each rank."""
    log = tmp_path / "ops"
    env = {"FAKEGPU_OPS_LOG": str(log), "FAKEGPU_JITTER": "0"}
    with Job(len(texts), [plan(tmp_path, *texts), *args], env=env, program=program) as job:
        assert job.wait(20) == [0] * len(texts)
        return [kernels(log, pid) for pid in job.pids]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_runs_to_its_end_and_has_its_groups(program: Path, tmp_path: Path, shape: Shape) -> None:
    log = tmp_path / "log"
    with Job(shape.ranks, [shape.write(tmp_path), "--steps", "3", "--log", str(log)], program=program) as job:
        assert job.wait(20) == [0] * shape.ranks
    first, steps = truth(log, shape.ranks)
    assert [line["pid"] for line in first] == job.pids
    for rank, line in enumerate(first):
        assert line["rank"] == rank
        assert {name: group["ranks"] for name, group in line["groups"].items()} == shape.of(rank)
        for group in line["groups"].values():
            assert (group["size"], group["ranks"][group["rank"]]) == (len(group["ranks"]), rank)
    for own in steps:
        assert [line["step"] for line in own] == [1, 2, 3]
        assert all(line["start_ns"] < line["end_ns"] for line in own)
        assert all(before["end_ns"] <= after["start_ns"] for before, after in itertools.pairwise(own))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_groups_of_a_shape_are_partitions(shape: Shape) -> None:
    assert len(shape.plans) == shape.ranks
    for parts in shape.groups.values():
        assert sorted(rank for part in parts for rank in part) == list(range(shape.ranks))


def test_what_is_sent_is_received(tmp_path: Path) -> None:
    """By each pair of ranks, in number: NCCL would wait for ever for what is missing."""
    for shape in SHAPES.values():
        pairs: dict[tuple[str, int, int], int] = {}
        for rank, text in enumerate(shape.plans):
            for words in map(str.split, text.splitlines()):
                if words[0] in ("send", "recv"):
                    peer = shape.of(rank)[words[1]][int(words[2])]
                    key = (words[1], rank, peer) if words[0] == "send" else (words[1], peer, rank)
                    pairs[key] = pairs.get(key, 0) + (1 if words[0] == "send" else -1)
        assert set(pairs.values()) <= {0}, shape.name


def test_repetitions_and_what_is_not_in_every_step(program: Path, tmp_path: Path) -> None:
    text = "step\nrepeat 2\nkernel 1 3\nrepeat 2\nkernel 4 1\ndone\ndone\nevery 3\nkernel 13 1\ndone\nsync\nend\n"
    (ran,) = do(program, tmp_path, [text], "--steps", "7")
    names = [name for name, _ in ran]
    once = (["gemm_bf16_128x128"] * 3 + ["layer_norm_fwd"] * 2) * 2
    assert names == [*once * 3, "multi_tensor_l2norm", *once * 3, "multi_tensor_l2norm", *once]


def test_ranks_draw_the_same_numbers(program: Path, tmp_path: Path) -> None:
    plans = SHAPES["variable_length"].plans
    one, other = do(program, tmp_path, plans, "--steps", "5")
    assert one == other
    embeddings = [duration for name, duration in one if name == "embedding_lookup_bf16"]
    assert 10 <= len(embeddings) <= 20
    assert len(set(embeddings)) == len(embeddings), "each micro-batch has a length of its own"
    assert all(25_000 <= duration <= 100_000 for duration in embeddings)
    assert do(program, tmp_path, plans, "--steps", "5")[0] == one
    assert do(program, tmp_path, plans, "--steps", "5", "--seed", "1")[0] != one


def test_a_key_draws_the_same_whatever_was_drawn_before(program: Path, tmp_path: Path) -> None:
    keyed = "kernelv 1 8 96 @7\n"
    one, other = do(program, tmp_path, [f"step\n{keyed}end\n", f"step\nkernelv 4 1 9\n{keyed}end\n"], "--steps", "4")
    assert one == [kernel for kernel in other if kernel[0] == "gemm_bf16_128x128"]
    assert len(set(one)) > 1


@pytest.mark.parametrize("is_reported", [0, 3])
def test_all_ranks_end_after_the_same_step(program: Path, tmp_path: Path, is_reported: int) -> None:
    log = tmp_path / "log"
    with Job(4, [SHAPES["pp_1f1b"].write(tmp_path), "--log", str(log)], program=program) as job:
        wait_for_steps(log, is_reported, 3)
        os.kill(job.pids[is_reported], signal.SIGTERM)
        assert job.wait(20) == [0] * 4
    _, steps = truth(log, 4)
    assert len({len(own) for own in steps}) == 1
    assert len(steps[0]) > 1


def test_ranks_that_never_meet_end_after_the_same_step(program: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    texts = [f"step\nhost {us}\nend\n" for us in (1000, 1500)]
    with Job(2, [plan(tmp_path, *texts), "--log", str(log)], program=program) as job:
        wait_for_steps(log, 1, 11)
        job.processes[1].terminate()
        assert job.wait(20) == [0, 0]
    _, (fast, slow) = truth(log, 2)
    assert len(fast) == len(slow) > 10


BAD = {
    "": "no step",
    "step\nsync\n": "the step has no end",
    "step\nend\nsync\n": ":3: sync: only groups come before the step",
    "step\ndance\nend\n": ":2: no such instruction: dance",
    "step\ndata\nend\n": ":2: data wants 1 words after it",
    "step\ndata -1\nend\n": ":2: not a number from 0: -1",
    "step\nkernel 16 1\nend\n": ":2: kernels are 0 to 15",
    "step\nkernelv 1 9 8\nend\n": ":2: nothing lies between 9 and 8",
    "step\nrepeat 2 @1\ndone\nend\n": ":2: nothing is drawn here",
    "step\nrepeat 2\nend\n": ":2: no done to this",
    "step\ndone\nend\n": ":2: done without every or repeat",
    "step\ngroupstart\nend\n": ":2: groupstart without groupend",
    "step\nrepeat 2\ngroupstart\ndone\ngroupend\nend\n": ":3: groupstart without groupend",
    "step\nallreduce tp 1 f32\nend\n": ":2: no such group: tp",
    "step\nallreduce world 1 f16\nend\n": ":2: types are f32 and bf16",
    "step\nsend world 1 1 f32\nend\n": ":2: world has 1 ranks",
    "group a split 0\nstep\nend\n": ":1: want: group NAME split COLOR KEY",
    "group a init 1 0 x\ngroup a init 1 0 y\nstep\nend\n": ":2: there is a group a already",
    "group a init 1 0 x\ngroup b init 1 0 x\nstep\nend\n": ":2: a has the id x already",
    "group a init 2 0 x\nstep\nend\n": ":1: 1 ranks of 2 have it",
    "group a split -1 0\nstep\nallreduce a 1 f32\nend\n": ":3: this rank is in no part of a",
}


@pytest.mark.parametrize("text", BAD, ids=list(BAD.values()))
def test_a_bad_plan_is_refused(program: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan"
    path.write_text(text)
    done = subprocess.run([program, path, "--steps", "1"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2
    assert f"{path}" in done.stderr
    assert BAD[text] in done.stderr


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["step\nsync\nend\n", "step\nnothing\nend\n"], "no such instruction: nothing"),
        (["group a split 0 0\nstep\nend\n", "step\nallreduce world 1 f32\nend\n"], "0 splits, but rank 0 has 1"),
        (["step\nend\n", "step\nallreduce world 1 f32\nend\n"], "all ranks or none must split or use the world"),
        (["group a init 2 0 x\nstep\nend\n"] * 2, "rank 1 sees the group x otherwise"),
    ],
)
def test_plans_that_do_not_fit_together_are_refused_by_all(
    program: Path, tmp_path: Path, texts: list[str], message: str
) -> None:
    with Job(2, [plan(tmp_path, *texts)], program=program, stderr=subprocess.PIPE) as job:
        assert job.wait(20) == [2, 2]
        for process in job.processes:
            assert process.stderr is not None
            assert message in process.stderr.read().decode()


def test_a_wrong_command_line_is_refused(program: Path, tmp_path: Path) -> None:
    for args in ([], ["--steps"], [str(tmp_path / "missing")], ["plan", "--dance", "1"]):
        done = subprocess.run([program, *args], capture_output=True, text=True, timeout=10)
        assert done.returncode == 2, args
        assert "fake_plan: " in done.stderr
