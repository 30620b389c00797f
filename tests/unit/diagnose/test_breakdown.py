"""Where the time goes of what cannot be compared: one rank, few steps, a loop without PyTorch."""

from __future__ import annotations

import json
from functools import partial

import jsonschema
import numpy as np
import pytest

from argus.cli.main import main
from argus.diagnose.breakdown import breakdown, short
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import PARTS, Verdict, json_schema
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.stack_data import MS, T0, Row, native, py, stack, store_run, store_stacks

S = 1000 * MS
MAIN = py("<module>", 90)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::F<float>>(int, F)",
         "at::native::vectorized_elementwise_kernel"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("void (anonymous namespace)::softmax<float, 8>(float*)", "(anonymous namespace)::softmax"),
        ("sgemm", "sgemm"),
        ("", ""),
    ],
)  # fmt: skip
def test_names_of_kernels_are_short(name: str, wanted: str) -> None:
    assert short(name) == wanted
    assert len(short("x" * 500)) <= 60


def judged(store: Store, job: str) -> Verdict:
    verdict = diagnose_store(store, job, 1)
    jsonschema.validate(json.loads(json.dumps(verdict)), json_schema())
    if "breakdown" in verdict:
        for part in verdict["breakdown"]["parts"]:
            assert part["part"] in PARTS
            assert len(next(iter(query_columns(store, part["sql"]).values()))), part["sql"]
    return verdict


def texts(verdict: Verdict) -> dict[str, str]:
    return {part["part"]: part["text"] for part in verdict["breakdown"]["parts"]}


def closed(writer: Writer, job: str, looked_ns: int) -> None:
    writer.append("coverage", {
        "job": job, "run": 1, "host": "node-0", "counter": ["hits"], "value": np.array([1], np.uint64),
        "loss": False, "ts": [looked_ns], "version": 1,
    })  # fmt: skip


def train(store: Store, job: str, ranks: int = 1) -> None:
    """Steps of 100 ms on CPUs: 40 % loading data."""
    steps = 30
    with Writer(store, source="test") as writer:
        store_run(writer, range(ranks), job=job, steps=steps)
        every = [(rank, step) for rank in range(ranks) for step in range(steps)]
        writer.append("iterations", {
            "job": job, "run": 1, "rank": [rank for rank, _ in every], "step": [steps + step for _, step in every],
            "host": "node-0", "ts": [T0 + (steps + step) * 100 * MS for _, step in every], "duration_ns": 100 * MS,
            "collectives": 0, "launches": 0, "method": "marks", "confidence": 1.0,
        })  # fmt: skip
        took = {"data_loading": 40, "forward": 20, "backward": 35, "optimizer": 5}
        rows = [(rank, step, phase, ms) for rank, step in every for phase, ms in took.items()]
        # Steps that were found by one mark each show nothing of their phases.
        rows += [(rank, steps + step, "optimizer", 100) for rank, step in every]
        writer.append("phases", {
            "job": job, "run": 1, "rank": [row[0] for row in rows], "step": [row[1] for row in rows],
            "host": "node-0", "ts": [T0 + row[1] * 100 * MS for row in rows], "phase": [row[2] for row in rows],
            "duration_ns": [row[3] * MS for row in rows], "overlapped_ns": 0, "spans": 1, "method": "marks",
            "confidence": 1.0,
        })  # fmt: skip
        loads = stack(MAIN, py("__getitem__", 7), native("read"))
        computes = stack(MAIN, py("train", 20), native("sgemm", "/x/libtorch_cpu.so"))
        store_stacks(writer, [
            row for step in range(2 * steps) for row in (
                Row(0, loads, step * 100, "off", ns=40 * MS, last_ms=step * 100 + 40, reason="read"),
                Row(0, computes, step * 100 + 50, count=6, last_ms=step * 100 + 90),
                Row(0, stack(py("render", 3)), step * 100, count=2, tid=7, thread="helper"),
            )
        ], job=job)  # fmt: skip
        writer.append("gc_pauses", {
            "job": job, "run": 1, "rank": 0, "host": "node-0", "pid": 1000, "tid": 1000, "thread": "python",
            "ts": [T0 + step * 100 * MS for step in range(0, 2 * steps, 2)], "duration_ns": 10 * MS,
            "uncertainty_ns": MS, "generation": 2, "stack_id": computes.id,
        })  # fmt: skip
        closed(writer, job, T0 + 2 * steps * 100 * MS)


def test_one_rank_is_healthy_and_says_where_its_time_goes(shared: Store) -> None:
    train(shared, "alone")
    verdict = judged(shared, "alone")
    assert verdict["status"] == "healthy"
    assert "one rank, so there is nothing to compare it with; a step takes 100 ms" in verdict["reason"]
    found = texts(verdict)
    assert found["phases"] == "data loading 40%, backward 35%, forward 20%, optimizer 5%"
    assert found["main_thread"] == "computing 60%, waiting 40%"
    assert found["lines_on_cpu"] == "train (app/train.py:20) 75%, render (app/train.py:3) 25%"
    assert found["lines_off_cpu"] == "__getitem__ (app/train.py:7), for a read 40%"
    assert "30 pauses of 10.0 ms, 5% of the time, most in train (app/train.py:20)" in found["garbage"]
    advice = verdict["breakdown"]["advice"]
    assert len(advice) == 2
    assert "Loading data takes 40% of a step" in advice[0]


def test_waits_that_were_not_followed_are_not_called_computing(shared: Store) -> None:
    train(shared, "thinned")
    with Writer(shared, source="test") as writer:
        writer.append("signal_coverage", {
            "job": "thinned", "run": 1, "rank": 0, "host": "node-0", "signal": "off_cpu", "ts": [T0, T0 + S // 2],
            "seen": np.array([1, 0], np.float32), "period_ns": np.uint64(0), "reason": ["", "it cost too much"],
            "version": 1,
        })  # fmt: skip
    found = texts(judged(shared, "thinned"))
    assert found["main_thread"].startswith("not known: time off the CPU was not followed")
    assert "lines_off_cpu" not in found
    assert found["lines_on_cpu"].startswith("train (app/train.py:20) 75%")


def test_what_is_not_all_of_a_job_is_not_healthy(shared: Store) -> None:
    train(shared, "part")
    with Writer(shared, source="test") as writer:
        writer.append("jobs", {
            "job": "part", "run": 1, "host": "node-0", "started": [T0], "ended": None, "world_size": 8,
            "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 2,
        })  # fmt: skip
    verdict = judged(shared, "part")
    assert verdict["status"] == "inconclusive"
    assert "fewer than 2 ranks" in verdict["reason"]
    assert "phases" in texts(verdict)


def test_a_loop_without_pytorch_computes(shared: Store) -> None:
    with Writer(shared, source="test") as writer:
        store_run(writer, [0], job="loop")
        store_stacks(writer, [
            Row(0, stack(MAIN, py("crunch", 5 if ms % 1000 else 6)), ms, count=9, last_ms=ms + 90)
            for ms in range(0, 20_000, 100)
        ], job="loop")  # fmt: skip
        closed(writer, "loop", T0 + 20 * S)
    verdict = judged(shared, "loop")
    assert verdict["status"] == "inconclusive"
    assert "no training step was seen: 1 process made no CUDA or NCCL call" in verdict["reason"]
    assert "rank 0 computes (90% of a CPU, most in crunch (app/train.py:5))" in verdict["reason"]
    assert "hang" not in verdict["reason"]
    assert texts(verdict)["lines_on_cpu"].startswith("crunch (app/train.py:5) 90%")


def test_a_trace_of_nothing_says_so(shared: Store) -> None:
    with Writer(shared, source="test") as writer:
        store_run(writer, [0], job="sleep")
        store_stacks(writer, [
            Row(0, stack(native("main", "/usr/bin/sleep"), native("clock_nanosleep")), ms, "off", ns=2 * S,
                last_ms=ms + 2000, reason="sleep") for ms in range(0, 20_000, 2000)
        ], job="sleep")  # fmt: skip
        closed(writer, "sleep", T0 + 20 * S)
    verdict = judged(shared, "sleep")
    assert verdict["status"] == "inconclusive"
    assert verdict["reason"].startswith("nothing to diagnose: 1 process made no CUDA or NCCL call")
    assert "breakdown" not in verdict


def test_a_job_that_hung_before_it_was_traced_is_not_nothing(shared: Store) -> None:
    """It has loaded CUDA, and waits in a system call of which no stack names the library."""
    with Writer(shared, source="test") as writer:
        store_run(writer, [0], job="hung before")
        writer.append("ranks", {
            "job": "hung before", "run": 1, "rank": 0, "host": "node-0", "pid": 1000, "local_rank": 0,
            "rank_source": "torchrun", "started": T0, "exe": "train", "command": "train",
            "libraries": [["libcuda.so.1"]], "probes": 40, "state": "traced", "version": 2,
        })  # fmt: skip
        store_stacks(writer, [
            Row(0, stack(native("futex_wait")), ms, "off", ns=2 * S, last_ms=ms + 2000, reason="futex")
            for ms in range(0, 20_000, 2000)
        ], job="hung before")  # fmt: skip
        closed(writer, "hung before", T0 + 20 * S)
    assert judged(shared, "hung before")["reason"].startswith(
        "1 process made no CUDA or NCCL call while it was traced: rank 0 waits (futex) in futex_wait"
    )


def test_a_short_recording_of_gpus(shared: Store) -> None:
    """Three steps of two ranks: idle half of the time, and one computes longer."""
    with Writer(shared, source="test") as writer:
        store_run(writer, [0, 1], job="short", steps=3)
        every = [(rank, step) for rank in (0, 1) for step in range(3)]
        compute = [30 * MS if rank == 0 else 40 * MS for rank, _ in every]
        writer.append("gpu_steps", {
            "job": "short", "run": 1, "rank": [rank for rank, _ in every], "host": "node-0", "pid": 1, "device": 0,
            "step": [step for _, step in every], "ts": [T0 + step * 100 * MS for _, step in every],
            "duration_ns": 100 * MS, "busy_ns": [ns + 15 * MS for ns in compute], "compute_ns": compute,
            "communication_ns": 20 * MS, "exposed_communication_ns": 15 * MS, "overlapped_communication_ns": 5 * MS,
            "memcpy_ns": 0, "idle_ns": [85 * MS - ns for ns in compute], "idle_gaps": 9, "largest_gap_ns": 8 * MS,
            "kernels": 50, "queue_depth_mean": 0.1, "queue_depth_max": 2, "issue_latency_p50_ns": 9000,
            "issue_latency_p99_ns": 20000, "void_share": 0.5,
        })  # fmt: skip
    verdict = judged(shared, "short")
    assert (verdict["status"], verdict["reason"]) == ("inconclusive", "3 whole steps were seen, 10 are needed")
    found = texts(verdict)
    assert found["gpu"].startswith("idle 50%, computing 35%, exposed communication 15%")
    assert "of communication 25% is hidden behind computing" in found["gpu"]
    assert found["ranks"] == "the GPU of rank 1 computes for 40.0 ms a step, that of rank 0 for 30.0 ms"
    first, second = verdict["breakdown"]["advice"]
    assert "idle for 50% of the time, and kernels begin as soon as they are launched" in first
    assert second.startswith("Rank 1 computes 1.33 times as long as rank 0")


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize(("steps", "status"), [(5, "inconclusive"), (40, "healthy")])
def test_a_job_on_several_hosts_has_it_as_well(shared: Store, steps: int, status: str) -> None:
    job = f"two hosts, {steps}"
    write(shared, job, Spec(Mesh(dp=16, per_host=8), steps=steps), run=1, start_ns=T0)
    verdict = judged(shared, job)
    assert (verdict["status"], verdict["breakdown"]["steps"]) == (status, [0, steps - 1])
    found = texts(verdict)
    assert found["gpu"].startswith("computing ")
    assert "backward" in found["gpu_phases"]
    assert verdict["breakdown"]["advice"]
    # Of its kernels only those of communicators are stored one by one.
    assert "kernels" not in found


def test_steps_are_those_of_the_job_where_hosts_number_them_differently(shared: Store) -> None:
    """Steps 10 to 19 of rank 0 are 110 to 119 of rank 1, whose clock is an hour ahead."""
    hour = 3600 * S
    every = [(rank, step) for rank in (0, 1) for step in range(30)]
    with Writer(shared, source="test") as writer:
        store_run(writer, [0, 1], job="shifted", steps=0)
        own = [step + 100 * rank for rank, step in every]
        ts = [T0 + step * 100 * MS + hour * rank for rank, step in every]
        writer.append("iterations", {
            "job": "shifted", "run": 1, "rank": [rank for rank, _ in every], "step": own, "host": "node-0", "ts": ts,
            "duration_ns": [(50 if 10 <= step < 20 else 100) * MS for _, step in every], "collectives": 0,
            "launches": 0, "method": "marks", "confidence": 1.0,
        })  # fmt: skip
        rows = [(at, rank, phase) for at, (rank, _) in enumerate(every) for phase in ("forward", "backward")]
        writer.append("phases", {
            "job": "shifted", "run": 1, "rank": [rank for _, rank, _ in rows], "step": [own[at] for at, *_ in rows],
            "host": "node-0", "ts": [ts[at] for at, *_ in rows], "phase": [phase for *_, phase in rows],
            "duration_ns": [
                10 * MS if 10 <= every[at][1] < 20 else (90 if phase == "forward" else 1) * MS for at, _, phase in rows
            ],
            "overlapped_ns": 0, "spans": 1, "method": "marks", "confidence": 1.0,
        })  # fmt: skip
    found = breakdown(partial(query_columns, shared), {"job": "shifted", "run": 1}, [0, 1], [110, 119], {0: 100, 1: 0})
    assert (found["step_ms"], found["seconds"]) == (50, 0.95)
    (phases,) = (part for part in found["parts"] if part["part"] == "phases")
    assert phases["text"] in ("forward 50%, backward 50%", "backward 50%, forward 50%")
    # The query of the evidence is the one that was asked.
    assert query_columns(shared, phases["sql"])["spent_ns"].tolist() == [200.0 * MS] * 2


def test_it_is_printed_after_the_status(shared: Store, capsys: pytest.CaptureFixture[str]) -> None:
    train(shared, "printed")
    assert main(["diagnose", "--job", "printed", "--store", shared.url, "--no-store"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("HEALTHY  printed  1 rank")
    heading = lines.index("where the time goes (rank 0, steps 0 to 59, 100 ms a step)")
    assert any("data loading 40%" in line for line in lines[heading:])
    assert "worth trying first" in lines
    assert lines[-2].startswith("coverage: ")
    assert lines[-1].startswith("argus report ")
