"""Steps and parallel groups of jobs of every shape on the fake GPU, against what the programs say themselves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.semantics.gpu.usage import time_in, union
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import ARGUS, argus_with, pid_words
from tests.stores import new_store

# GPU times come on too late for short jobs where others have the CPUs.
pytestmark = [pytest.mark.kernel, pytest.mark.alone]

HALVES = (
    ("one_gpu", "dp", "tp_dp", "pp_1f1b", "evaluation", "variable_length"),
    ("fsdp", "tp_pp_dp", "moe_ep", "pp_interleaved", "grad_accumulation", "checkpoint"),
)
"""Traced together: a trace takes longer to begin than these jobs take."""
ALL = os.environ.get("ARGUS_ALL_SHAPES", "") not in ("", "0")
MIDDLE = [half[k : k + 3] for half in HALVES for k in (0, 3)] if ALL else [
    ("fsdp", "tp_dp", "pp_1f1b", "evaluation", "checkpoint", "variable_length")
]  # fmt: skip
"""Those attached to in the middle: of each kind one, or all, with GPU times (``ARGUS_ALL_SHAPES=1``)."""
START_IDS, MIDDLE_IDS = ("first", "second"), [f"part {number}" for number in range(len(MIDDLE))]
STEPS = 120
EVERY_STEP = ("--max-overhead", "100")
"""A dozen processes on a busy machine may cost more than 1 %, and are seen in windows then: counts need every step."""
BEFORE_S = 1.5
"""How long jobs have trained before they are attached to in the middle."""


@dataclass
class Traced:
    url: str
    folder: Path
    output: str

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
        own = rows["rank"] == rank
        assert own.sum() >= least, (shape, rank)
        numbers, begins = job.truth(shape, rank)
        theirs = numbers[np.searchsorted(begins, rows["end"][own], side="right") - 1]
        assert np.array_equal(np.diff(theirs), np.ones(len(theirs) - 1)), (shape, rank)
        shifts |= set((theirs - rows["step"][own].astype(int)).tolist())
    print(f"{shape}: {int(np.sum(rows['rank'] == 0))} steps, all of them the program's own, on {ranks} ranks")
    assert len(shifts) == 1, (shape, shifts)


@pytest.fixture(scope="module", params=HALVES, ids=START_IDS)
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
            f" --env FAKEGPU_OPS_LOG={folder}/ops-{name} --cupti"
            f" --program {fakegpu}/fake_plan -- '{shape.write(folder)}' --steps {STEPS} --log {folder}/truth-{name} &"
        )
    url = new_store(folder)
    flops = ["--step-flops", "6e11", "--peak-tflops", "20"]
    command = [*ARGUS, "run", "--store", url, *flops, *EVERY_STEP, "--", "sh", "-c", "\n".join([*lines, "wait"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return Traced(url, folder, done.stdout + done.stderr)


@pytest.fixture(scope="module", params=MIDDLE, ids=MIDDLE_IDS)
def in_the_middle(request: pytest.FixtureRequest, fakegpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Six jobs that had made their communicators, and trained, before they were attached to."""
    from run import Job
    from shapes import SHAPES

    folder = tmp_path_factory.mktemp("middle")
    url = new_store(folder)
    with contextlib.ExitStack() as running:
        pids, jobs = [], []
        for name in request.param:
            shape = SHAPES[name]
            words = [shape.write(folder), "--steps", "100000", "--log", f"{folder}/truth-{name}"]
            env = {"TORCHELASTIC_RUN_ID": name, "FAKEGPU_OPS_LOG": f"{folder}/ops-{name}" if ALL else None}
            job = Job(shape.ranks, words, env, program=fakegpu / "fake_plan", cupti=ALL)
            jobs.append(running.enter_context(job))
            pids += job.pids
        time.sleep(BEFORE_S)
        words = [*EVERY_STEP, "--no-stacks", "--buffer-mb", "64", "--steps", "120" if ALL else "60", "--duration", "90"]
        output = argus_with(url)("trace", *pid_words(pids), *words).stdout
        for process in [process for job in jobs for process in job.processes]:
            process.terminate()
        for process in [process for job in jobs for process in job.processes]:
            process.wait(30)
    return Traced(url, folder, output)


def shapes_of(request: pytest.FixtureRequest) -> tuple[str, ...]:
    part = request.node.callspec.id
    found: tuple[str, ...] = HALVES[START_IDS.index(part)] if part in START_IDS else MIDDLE[MIDDLE_IDS.index(part)]
    return found


def test_steps_from_the_start(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    from shapes import SHAPES

    # Of a dozen processes that are forked at once, some call before they are let through: counted, and no step.
    assert "dropped" not in from_the_start.output
    for name in shapes_of(request):
        check_steps(from_the_start, name, SHAPES[name].ranks, STEPS - 2)


def check_groups(job: Traced, names: tuple[str, ...]) -> None:
    """That the groups are the program's own."""
    from shapes import SHAPES

    for name in names:
        found = {dimension: [ranks for ranks, _ in groups] for dimension, groups in job.groups(name).items()}
        wanted = {dimension: sorted(groups) for dimension, groups in SHAPES[name].groups.items()}
        if name == "tp_dp":
            del wanted["world"]  # nothing is sent in it
        assert found == wanted, name
        print(f"{name}: {sum(map(len, wanted.values()))} groups, the program's own")


def test_groups_from_the_start(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    check_groups(from_the_start, shapes_of(request))


FORWARD = (
    *("embedding_lookup_bf16", "gemm_bf16_128x128", "gemm_bf16_256x128", "attention_fwd_hdim128", "layer_norm_fwd"),
    *("elementwise_gelu", "cross_entropy_forward", "moe_topk_router"),
)
OPTIMIZER = ("multi_tensor_l2norm", "multi_tensor_adamw")


def timeline(folder: Path, shape: str, pid: int, edges: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """What the fake GPU says of its time between these edges, by phase: each moment once, what computes first."""
    import run

    ops, names = run.ops_log(folder / f"ops-{shape}", pid)
    words = np.array(["", *(name.partition("(")[0] for name in names)])[ops["name"]]
    start, transfer, end = ops["start_ns"], ops["transfer_ns"], ops["end_ns"]
    kernel, nccl = ops["kind"] == 1, np.char.startswith(words, "nccl")
    forward, optimizer = np.isin(words, FORWARD), np.isin(words, OPTIMIZER)
    pairs = np.char.find(words, "SendRecv") >= 0
    parts = [
        ("forward", start, end, forward),
        ("backward", start, end, kernel & ~nccl & ~forward & ~optimizer),
        ("optimizer", start, end, optimizer),
        ("all_reduce", start, end, np.char.find(words, "AllReduce") >= 0),
        ("all_gather", start, end, np.char.find(words, "AllGather") >= 0),
        ("reduce_scatter", start, end, np.char.find(words, "ReduceScatter") >= 0),
    ]
    if shape == "moe_ep":
        parts.append(("all_to_all", start, end, pairs))
    else:
        parts += [("send_recv", transfer, end, pairs), ("pipeline_bubble", start, transfer, pairs)]
    # The parameters, on their way to the host, and what the program does with them before it goes on: a thread may lose
    # its CPU in the call that launches, so the operation's own start is later.
    saved = (ops["copy"] == 2) & (ops["bytes"] > 1 << 20)
    batch = ops["copy"] == 1
    ends, starts = np.sort(end), np.append(np.sort(start), end.max() + 1)
    by_start = np.argsort(start)
    following = np.append(ops["called_ns"][by_start], starts[-1])[np.searchsorted(starts, end)]
    idle_since = np.append(0, ends)[np.searchsorted(ends, start, side="right")]
    parts += [
        ("memcpy", start, end, ~kernel & ~saved),
        ("checkpoint", start, np.maximum(end, following), saved),
        ("data_loading", idle_since, start, batch),
    ]
    found: dict[str, NDArray[np.int64]] = {}
    covered = np.empty((0, 2), np.int64)
    for phase, begins, until, chosen in parts:
        before = time_in(covered, edges)
        covered = union(np.append(covered[:, 0], begins[chosen]), np.append(covered[:, 1], until[chosen]))
        found[phase] = time_in(covered, edges) - before
    found["idle"] = np.diff(edges) - time_in(covered, edges)
    return found


def check_phases(job: Traced, names: tuple[str, ...], least: int) -> None:
    """Of each shape, by phase: the time of the GPU, over all steps, within 2 % of what the fake GPU itself says."""
    with open_store(job.url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT toString(job) AS job, rank, pid, step, toString(phase) AS phase, duration_ns,"
            " toUnixTimestamp64Nano(ts) - j.offset AS begin FROM gpu_phases"
            " CROSS JOIN (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j ORDER BY job, rank, step",
        )
    for name in names:
        shares, worst, steps = {}, 0.0, []
        for rank in range(len(np.unique(rows["rank"][rows["job"] == name]))):
            own = (rows["job"] == name) & (rows["rank"] == rank)
            begins, first = np.unique(rows["begin"][own].astype(np.int64), return_index=True)
            steps = rows["step"][own][first].astype(int)
            assert steps.tolist() == list(range(steps[0], steps[-1] + 1)), (name, rank)
            assert len(steps) >= least, (name, rank)
            last = int(rows["duration_ns"][own][rows["begin"][own] == begins[-1]].sum())
            edges = np.append(begins, begins[-1] + last)
            truth = {phase: int(spent.sum()) for phase, spent in timeline(
                job.folder, name, int(rows["pid"][own][0]), edges
            ).items()}  # fmt: skip
            reported = {
                phase: int(rows["duration_ns"][own & (rows["phase"] == phase)].sum())
                for phase in {*truth, *rows["phase"][own].tolist()}
            }
            total = sum(truth.values())
            assert sum(reported.values()) == total == edges[-1] - edges[0]
            for phase, spent in reported.items():
                if truth.get(phase, 0) > 0.1 * total:
                    worst = max(worst, abs(spent / truth[phase] - 1))
                # Of phases below a tenth of the step, 0.2 % of the step.
                assert spent == pytest.approx(truth.get(phase, 0), rel=0.02, abs=0.002 * total), (name, rank, phase)
            shares = truth
        print(f"{name}: {len(steps)} steps, phases within {worst:.2%} of the timeline")
        assert shares["forward"] > 0
        assert shares["backward"] > 0
        assert (reported.get("checkpoint", 0) > 0) == (name == "checkpoint")
        assert (shares.get("pipeline_bubble", 0) > 0) == name.startswith(("pp", "tp_pp"))


def test_phases_of_the_gpus_are_the_timeline_s(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    # A busy machine may take longer to begin than a process waits for it.
    check_phases(from_the_start, shapes_of(request), STEPS // 2)


if ALL:  # a kernel test that is skipped is a failure where they must run

    def test_phases_in_the_middle(in_the_middle: Traced, request: pytest.FixtureRequest) -> None:
        check_phases(in_the_middle, shapes_of(request), 30)


def test_bus_bandwidth_is_the_link_s(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    """Of what four ranks reduce: the fake's link takes 20 us, and then 50 GB/s; an all-reduce uses it 2 x 3/4 times."""
    job, size = ("dp", 25_000_000) if "dp" in shapes_of(request) else ("moe_ep", 25_000_000)
    with open_store(from_the_start.url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT count() AS calls, toFloat64(quantileExact(0.5)(bus_gb_s)) AS gb_s, min(seen) AS seen,"
            " toFloat64(avg(waited_ns)) AS waited_ns FROM collective_bandwidth"
            f" WHERE job = '{job}' AND op = 'AllReduce' AND bytes = {size}",
        )
    assert rows["calls"][0] >= STEPS // 2
    assert rows["seen"][0] == 4
    assert rows["gb_s"][0] == pytest.approx(size * 1.5 / (20_000 + size / 50), rel=0.02)
    assert rows["waited_ns"][0] > 0


def test_the_time_in_each_communicator_is_its_kernels_time(from_the_start: Traced) -> None:
    """Step by step: what ``gpu_collectives`` adds up is what the kernels took, and each has its communicator."""
    with open_store(from_the_start.url, create=False) as store:
        reported = query_columns(
            store,
            "SELECT g.job AS job, g.rank AS rank, g.step AS step, toInt64(sum(g.duration_ns)) AS reported_ns,"
            " toInt64(any(k.real_ns)) AS real_ns, countIf(g.comm = 0) AS unknown"
            " FROM gpu_collectives AS g JOIN (SELECT job, rank, step, sum(e.duration_ns) AS real_ns"
            "  FROM kernel_events AS e ASOF JOIN gpu_steps AS w ON e.job = w.job AND e.rank = w.rank AND e.ts >= w.ts"
            "  WHERE match(e.name, '^nccl') AND e.ts < addNanoseconds(w.ts, w.duration_ns)"
            "  GROUP BY job, rank, step) AS k ON g.job = k.job AND g.rank = k.rank AND g.step = k.step"
            " GROUP BY job, rank, step",
        )
    assert len(reported["reported_ns"]) > STEPS
    assert reported["reported_ns"].tolist() == reported["real_ns"].tolist()
    assert not reported["unknown"].any()


def test_utilization(from_the_start: Traced, request: pytest.FixtureRequest) -> None:
    """Of 6e11 operations a step and a peak of 2e13 a second: by the program's own step times, and what is printed."""
    from shapes import SHAPES

    output = [
        line.split() for line in from_the_start.output.splitlines() if line.startswith("model FLOPs utilization: ")
    ]
    assert len(output) == len(shapes_of(request))
    with open_store(from_the_start.url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT toString(job) AS job, avgIf(1 / mfu, step >= 5) AS inverse, u.average AS average FROM utilization"
            " JOIN (SELECT job, avg(duration_ns) AS average FROM iterations GROUP BY job) AS u USING job"
            " GROUP BY job, average",
        )
    for job, inverse, average in zip(*(column.tolist() for column in rows.values()), strict=True):
        ranks = SHAPES[job].ranks
        _, begins = from_the_start.truth(job, 0)
        # The program's first steps load its kernels, and are not all among Argus's.
        own_s = float(np.diff(begins)[5:].mean()) / 1e9
        assert 1 / inverse == pytest.approx(6e11 / ranks / own_s / 2e13, rel=0.05), job
        reported = [float(words[3].rstrip("%,")) / 100 for words in output if words[-2] == str(ranks)]
        assert pytest.approx(6e11 / ranks / (average / 1e9) / 2e13, abs=0.001) in reported, job


def test_steps_in_the_middle(in_the_middle: Traced, request: pytest.FixtureRequest) -> None:
    from shapes import SHAPES

    assert "coverage: complete" in in_the_middle.output
    for name in shapes_of(request):
        check_steps(in_the_middle, name, SHAPES[name].ranks, 50)


def test_groups_in_the_middle(in_the_middle: Traced, request: pytest.FixtureRequest) -> None:
    """They were made before Argus came; the processes' memory shows who is in them."""
    check_groups(in_the_middle, shapes_of(request))
