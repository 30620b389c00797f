"""``argus import nsys``: exact values from a small export, versions that lack columns, bad input, reference exports."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.cli.main import main
from argus.importers import nsys
from argus.importers.recordings.groups import find_communicators
from argus.importers.recordings.steps import OFFLINE, find_all_steps
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from tests.stores import new_store

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", ROOT.parent / "shared" / "data")) / "nsys"
reference = pytest.mark.skipif(not DATA.is_dir(), reason=f"the reference exports are not at {DATA}")

UTC = 1_779_630_014_000_000_000
STARTED = 35_000_000_000
"""The recording's clock at the start of the session."""
STEP_NS = 1_000_000
HOST = 0x1000000000000
PIDS = (111, 112)
NAMES = ["void gemm(float *)", "void relu(int)", "void gemm(float *)", "void gemm_backward(float *)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
         *["void multi_tensor_apply_kernel<AdamFunctor>(int)"] * 3, "void gemm(float *)"]  # fmt: skip
Table = dict[str, list[tuple[Any, ...]]]
SCHEMA = {
    "StringIds": "id INTEGER, value TEXT",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, name TEXT, value TEXT",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT",
    "META_DATA_CAPTURE": "name TEXT, value TEXT",
    "ANALYSIS_DETAILS": "globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, "
    "blockX INTEGER, blockY INTEGER, blockZ INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
    "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER, returnValue INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER",
}


def export(
    path: Path,
    *,
    steps: int = 4,
    mark: str = "iteration {}",
    pids: tuple[int, ...] = PIDS,
    without: tuple[str, ...] = (),
    change: Callable[[Table], None] = lambda tables: None,
) -> Path:
    """An export of processes that train, with one NVTX range a step. ``without``: tables, or table.column."""
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, 10 + len(words))

    tables: Table = {name: [] for name in SCHEMA}
    tables["TARGET_INFO_SESSION_START_TIME"].append((UTC, "2026-05-24T13:40:14"))
    tables["TARGET_INFO_SYSTEM_ENV"] += [
        (HOST, "NvDriverVersion", "580.95.05"), (HOST, "CpuDescription", None),
        (HOST, "DeviceEnvironment", "NCCL_ALGO=Ring;AWS_SECRET_ACCESS_KEY=hunter2"),
    ]  # fmt: skip
    tables["META_DATA_CAPTURE"] += [
        ("PROCESS_0:ARGUMENT_10", "last"), ("PROCESS_0:ARGUMENT_0", "--token"), ("PROCESS_0:COMMAND", "torchrun"),
        ("PROCESS_0:ARGUMENT_1", "hunter2"), ("PROCESS_0:ARGUMENT_2", "train.py"), ("REPORT", "x"),
    ]  # fmt: skip
    tables["TARGET_INFO_GPU"] += [(0, "NVIDIA H100"), (1, "NVIDIA H100")]
    tables["ANALYSIS_DETAILS"].append((HOST, 10**9, STARTED, STARTED + 10**9))
    for pid in pids:
        process = HOST + (pid << 24)
        tables["PROCESSES"].append((process, pid, "python3"))
        correlation = 100  # the same numbers in each process
        for step in range(steps):
            begin = STARTED + step * STEP_NS
            tid = process + pid + 1
            text, number = (mark.format(step), None) if step % 2 else (None, word(mark.format(step)))
            tables["NVTX_EVENTS"].append((begin, begin + STEP_NS - 500, 59, text, tid, number))
            tables["NVTX_EVENTS"].append(
                (begin + 900, begin + 9000, 59, f"aten::batch_norm, op_id = {step}", tid, None)
            )
            for place, name in enumerate(["copy", *NAMES]):
                correlation += 1
                at = begin + 20_000 + 50_000 * place
                function = "cudaMemcpyAsync_v3020" if place == 0 else "cudaLaunchKernel_v7000"
                row = (at, at + 4_000, tid, correlation, word(function), 0)
                tables["CUPTI_ACTIVITY_KIND_RUNTIME"].append(row)
                start = at + 30_001
                shared = (start, start + 10_500, pid % 2, 1, 20 if "nccl" in name else 7, correlation, process)
                if place == 0:
                    tables["CUPTI_ACTIVITY_KIND_MEMCPY"].append((*shared, 4096, 1))
                else:
                    tables["CUPTI_ACTIVITY_KIND_KERNEL"].append((*shared, word(name), 8, 2, 1, 128, 1, 1, None))
                if "nccl" in name:
                    tables["NVTX_EVENTS"].append((at - 4_000, at + 20_000, 59, "ncclAllReduce", tid, None))
            at = begin + 900_000
            sync = (at, at + 50_000, tid, correlation + 9_000, word("cudaStreamSynchronize_v3020"), 0)
            tables["CUPTI_ACTIVITY_KIND_RUNTIME"].append(sync)
    tables["StringIds"] += [(number, text) for text, number in words.items()]
    change(tables)
    with sqlite3.connect(path) as db:
        for name, columns in SCHEMA.items():
            if name in without:
                continue
            kept = [c for c in columns.split(", ") if f"{name}.{c.split()[0]}" not in without]
            places = [columns.split(", ").index(c) for c in kept]
            db.execute(f"CREATE TABLE {name} ({', '.join(kept).replace('end ', chr(34) + 'end' + chr(34) + ' ')})")
            rows = [[row[place] for place in places] for row in tables[name]]
            db.executemany(f"INSERT INTO {name} VALUES ({','.join('?' * len(kept))})", rows)
    db.close()
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("nsys")
    url = new_store(folder)
    path = export(folder / "report.sqlite")
    assert main(["import", "nsys", str(path), "--store", url]) == 0
    with open_store(url) as opened:
        yield opened


def rows(store: Store, sql: str) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for column in query_columns(store, sql).values()), strict=True))


def test_each_process_is_a_rank(store: Store) -> None:
    assert rows(store, "SELECT rank, pid, rank_source, command FROM ranks FINAL ORDER BY rank") == [
        (0, 111, "order", "python3"),
        (1, 112, "order", "python3"),
    ]
    assert rows(store, "SELECT job, launcher FROM jobs FINAL") == [("report", "nsys")]


def test_what_is_stored_of_the_environment(store: Store) -> None:
    assert rows(store, "SELECT rank, fact, value FROM environment_facts ORDER BY rank, fact") == [
        (rank, fact, value)
        for rank in (0, 1)
        for fact, value in (
            ("command", "torchrun --token *** train.py last"),
            ("env.NCCL_ALGO", "Ring"),
            ("gpu.driver", "580.95.05"),
            ("gpu.model", "NVIDIA H100"),
        )
    ]


@pytest.mark.parametrize("without", ["TARGET_INFO_GPU", "TARGET_INFO_SYSTEM_ENV", "TARGET_INFO_SYSTEM_ENV.value"])
def test_an_export_that_says_less_of_its_target(tmp_path: Path, without: str) -> None:
    (one, _) = nsys.read(export(tmp_path / "one.sqlite", without=(without,)), 0)
    assert ("gpu.model" in one.facts, "gpu.driver" in one.facts) == (
        without != "TARGET_INFO_GPU", without == "TARGET_INFO_GPU"
    )  # fmt: skip


def test_calls_and_kernels_of_each_process_are_connected(store: Store) -> None:
    counted = "count(), countIf(kind = 'kernel')"
    assert rows(store, f"SELECT rank, {counted} FROM kernel_events GROUP BY rank ORDER BY rank") == [
        (0, 40, 36), (1, 40, 36),
    ]  # fmt: skip
    joined = """SELECT count(), min(issue_latency_ns), max(issue_latency_ns) FROM kernel_events k JOIN launches l
                ON k.rank = l.rank AND k.launch_ts = l.ts AND k.launch_tid = l.tid AND k.name = l.kernel"""
    assert rows(store, joined) == [(80, 30_001, 30_001)]
    kinds = rows(store, "SELECT call, kind, count(), sum(bytes) FROM launches GROUP BY ALL ORDER BY call")
    assert kinds == [
        ("cudaLaunchKernel", "kernel", 72, 0),
        ("cudaMemcpyAsync", "memcpy_h2d", 8, 8 * 4096),
        ("cudaStreamSynchronize", "sync", 8, 0),
    ]
    assert rows(store, "SELECT DISTINCT rank, device FROM kernel_events ORDER BY rank") == [(0, 1), (1, 0)]


def test_times_are_of_the_wall(store: Store) -> None:
    assert rows(store, "SELECT toUnixTimestamp64Nano(min(ts)) FROM launches") == [(UTC + 20_000,)]


def test_steps_are_found_by_ranges(store: Store) -> None:
    found = rows(
        store, "SELECT rank, step, toUnixTimestamp64Nano(ts), duration_ns, method FROM iterations ORDER BY rank, step"
    )
    assert found == [
        (rank, step, UTC + step * STEP_NS, STEP_NS - 500 * (step == 3), "annotations")
        for rank in (0, 1)
        for step in range(4)
    ]


def test_collectives_have_their_range_s_times(store: Store) -> None:
    found = rows(
        store, "SELECT rank, op, duration_ns, dtype, bytes, count() FROM collectives GROUP BY ALL ORDER BY rank"
    )
    assert found == [(rank, "AllReduce", 24_000, "unknown", 0, 4) for rank in (0, 1)]


def test_steps_without_their_ranges(tmp_path: Path) -> None:
    recordings = nsys.read(export(tmp_path / "a.sqlite"), 0)
    found = find_all_steps(recordings, find_communicators(recordings), ignore_annotations=True)
    reported = find_all_steps(recordings, find_communicators(recordings))
    for rank in (0, 1):
        assert found[rank].method == OFFLINE
        assert found[rank].rows["step"].tolist() == reported[rank].rows["step"].tolist()
        assert found[rank].rows["launches"].tolist() == reported[rank].rows["launches"].tolist() == [8] * 4
        shift = found[rank].rows["ts_ns"].astype(np.int64) - reported[rank].rows["ts_ns"].astype(np.int64)
        assert shift.tolist() == [20_000] * 4


@pytest.mark.parametrize("mark", ["step_{}", "train_step", "Iteration#{}", "trainStep {}", "batch {} of 100"])
def test_names_of_steps(tmp_path: Path, mark: str) -> None:
    recordings = nsys.read(export(tmp_path / "a.sqlite", mark=mark, pids=(7,)), 0)
    assert len(recordings[0].marks) == 4
    assert recordings[0].marks["begin_ns"].tolist() == [UTC + k * STEP_NS for k in range(4)]


@pytest.mark.parametrize("mark", ["optimizer.step {}", "forward {}", "stepping stone"])
def test_names_of_other_things(tmp_path: Path, mark: str) -> None:
    recordings = nsys.read(export(tmp_path / "a.sqlite", mark=mark, pids=(7,)), 0)
    assert len(recordings[0].marks) == 0


@pytest.mark.parametrize(
    "without",
    [("PROCESSES",), ("ANALYSIS_DETAILS",), ("CUPTI_ACTIVITY_KIND_MEMCPY",),
     ("CUPTI_ACTIVITY_KIND_KERNEL.graphNodeId",),
     ("CUPTI_ACTIVITY_KIND_RUNTIME.returnValue",), ("CUPTI_ACTIVITY_KIND_KERNEL.gridX",), ("NVTX_EVENTS.textId",)],
    ids=lambda names: names[0],
)  # fmt: skip
def test_versions_that_lack_something(tmp_path: Path, without: tuple[str, ...]) -> None:
    found = nsys.read(export(tmp_path / "a.sqlite", without=without), 0)
    assert [len(each.ops) for each in found] == [36 if "MEMCPY" in without[0] else 40] * 2
    assert found[0].counters["operations_without_launch"] == 0


def test_an_export_without_calls(tmp_path: Path) -> None:
    """Steps are found in what ran on the GPU."""
    url = new_store(tmp_path)
    path = export(tmp_path / "a.sqlite", without=("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"), steps=5)
    assert main(["import", "nsys", str(path), "--store", url]) == 0
    with open_store(url) as opened:
        assert rows(opened, "SELECT rank, count() FROM iterations GROUP BY rank ORDER BY rank") == [(0, 5), (1, 5)]
        assert rows(opened, "SELECT DISTINCT issue_latency_ns FROM kernel_events") == [(-1,)]
    assert main(["diagnose", "--job", "a", "--store", url, "--no-store"]) == 0


def test_two_files_are_two_ranks(tmp_path: Path) -> None:
    first = nsys.read(export(tmp_path / "report_rank3.sqlite", pids=(5,)), 0)
    second = nsys.read(export(tmp_path / "node.sqlite", pids=(5,)), 1)
    assert [(each[0].rank, each[0].rank_source) for each in (first, second)] == [(3, "file name"), (1, "order")]


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    good = export(folder / "good.sqlite").read_bytes()
    with sqlite3.connect(folder / "other.sqlite") as db:
        db.execute("CREATE TABLE people (name TEXT)")
    db.close()

    def idle(tables: Table) -> None:
        for name in ("KERNEL", "MEMCPY", "RUNTIME"):
            tables[f"CUPTI_ACTIVITY_KIND_{name}"].clear()

    export(folder / "idle.sqlite", change=idle)
    contents = {
        "empty": b"", "text": b"hello, this is no database", "cut": good[: len(good) // 2], "head": good[:40],
        "damaged": good[:8192] + b"\xa5" * (len(good) - 16384) + good[-8192:],
    }  # fmt: skip
    for name, content in contents.items():
        (folder / f"{name}.sqlite").write_bytes(content)
    return {
        "empty": (folder / "empty.sqlite", "is empty"),
        "text": (folder / "text.sqlite", "is not an SQLite file"),
        "cut": (folder / "cut.sqlite", f"is cut off at byte {len(good) // 2:,} of {len(good):,}"),
        "head": (folder / "head.sqlite", "is cut off at byte 40"),
        "damaged": (folder / "damaged.sqlite", "its page at byte "),
        "other": (folder / "other.sqlite", "is SQLite, but not an export of Nsight Systems: it has people"),
        "idle": (folder / "idle.sqlite", "has no CUDA activity"),
        "missing": (folder / "none.sqlite", "does not exist"),
    }


@pytest.mark.parametrize("name", ["empty", "text", "cut", "head", "damaged", "other", "idle", "missing"])
def test_bad_files_are_one_line_and_nothing_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path, message = bad_files(tmp_path)[name]
    code = main(["import", "nsys", str(path), "--store", f"chdb://{tmp_path}/store"])
    err = capsys.readouterr().err
    assert code in (2, 3)
    assert message in err
    assert "internal error" not in err
    assert len(err.strip().splitlines()) <= 2
    assert not (tmp_path / "store").exists()


@reference
@pytest.mark.parametrize(
    ("name", "kernels", "nccl"), [("h100_2gpu_1s", [1721, 1721], [0, 0]), ("mfu_2gpu_before", [1993, 2017], [33, 33])]
)
def test_reference_exports(name: str, kernels: list[int], nccl: list[int]) -> None:
    found = nsys.read(DATA / f"{name}.sqlite", 0)
    assert [int(np.sum(each.ops["kind"] == 1)) for each in found] == kernels
    assert [int(each.communication().sum()) for each in found] == nccl
    steps = find_all_steps(found, find_communicators(found))
    for each in found:
        # Both are inferences, and what repeats in them is a layer. That is reported, and no diagnosis relies on it.
        assert len(each.marks) == 0
        assert "may be a layer" in steps[each.rank].why
        assert steps[each.rank].rows["confidence"].max() <= 0.5


def test_a_folder_is_all_recordings_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    assert main(["import", "nsys", str(folder), "--store", f"chdb://{tmp_path}/store"]) == 3
    assert f"{folder} has no .sqlite" in capsys.readouterr().err
    for rank in (0, 1):
        export(folder / f"report_rank{rank}.sqlite", pids=(5 + rank,))
    (folder / "notes.txt").write_text("not a recording")
    assert main(["import", "nsys", str(folder), "--store", new_store(tmp_path)]) == 0
    assert "reports: 2 ranks stored" in capsys.readouterr().out


def test_recordings_of_different_times_are_not_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def later(tables: Table) -> None:
        tables["TARGET_INFO_SESSION_START_TIME"] = [(UTC + 3600 * 10**9, "2026-05-24T14:40:14")]

    first = export(tmp_path / "report_rank0.sqlite", pids=(5,))
    second = export(tmp_path / "report_rank1.sqlite", pids=(6,), change=later)
    url = new_store(tmp_path)
    assert main(["import", "nsys", str(second), str(first), "--store", url]) == 2
    output = capsys.readouterr().err
    assert f"{second} begins 59 min 59 s after the end of {first}: not of one run" in output
    assert main(["import", "nsys", str(second), "--store", url]) == 0
