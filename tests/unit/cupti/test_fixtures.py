"""Buffers that a real CUPTI filled on a real GPU (tests/data/cupti, made by scripts/gpu-check) decode to what ran."""

from __future__ import annotations

import ctypes
import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from numpy.typing import NDArray
from pyarrow import ipc

from argus.cupti import build, layouts
from argus.cupti.decode import Batch, decode
from argus.model import records
from argus.semantics.gpu.correlation import Correlator
from argus.tables.gpu import Names

DATA = Path(__file__).resolve().parents[2] / "data" / "cupti"
PROGRAMS = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())


class Recorded:
    """One program's buffers."""

    def __init__(self, program: str) -> None:
        folder = DATA / program
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        self.layouts = layouts.for_version(self.meta["cupti_version"][0])
        self.buffers: list[tuple[NDArray[np.uint8], NDArray[np.uint32]]] = []
        for records_file in sorted(folder.glob("*.records.z")):
            index_file = records_file.with_name(records_file.name.replace("records", "index"))
            buffer = np.frombuffer(bytearray(zlib.decompress(records_file.read_bytes())), np.uint8)
            self.buffers.append((buffer, np.frombuffer(zlib.decompress(index_file.read_bytes()), "<u4")))

    def batches(self) -> list[Batch]:
        names = len(self.meta["names"])
        return [decode(buffer, index, self.layouts, 7, True, {}, names=names) for buffer, index in self.buffers]

    def operations(self) -> NDArray[np.void]:
        return np.concatenate([batch.gpu for batch in self.batches()])


@pytest.fixture(params=PROGRAMS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def test_there_are_recordings() -> None:
    assert PROGRAMS == ["eager", "graphs"]


def test_every_operation_is_decoded_and_none_rejected(recorded: Recorded) -> None:
    batches = recorded.batches()
    ops = np.concatenate([batch.gpu for batch in batches])
    kernels = ops[ops["kind"] == records.GpuKind.KERNEL]
    expected = recorded.meta["operations_by_kind"]
    copies = sum(count for kind, count in expected.items() if kind.startswith("memcpy"))
    assert len(kernels) == expected["kernel"]
    assert np.sum(ops["kind"] == records.GpuKind.MEMSET) == expected["memset"]
    assert np.sum(ops["kind"] == records.GpuKind.MEMCPY) == copies
    assert sum((batch.rejected for batch in batches), Counter()) == Counter()
    total = sum(len(batch.gpu) + len(batch.host) for batch in batches)
    assert total == sum(buffer["records"] for buffer in recorded.meta["buffers"])


def test_kernels_have_the_names_that_torch_profiler_counted(recorded: Recorded) -> None:
    ops = recorded.operations()
    names = Names()
    names.learn(recorded.meta["names"])
    words = names.of(ops["name"][ops["kind"] == records.GpuKind.KERNEL])
    found = Counter(re.sub(r"\s", "", names.words[word]) for word in words.tolist())
    assert found == {re.sub(r"\s", "", name): count for name, count in recorded.meta["kernels_by_name"].items()}
    profiled = recorded.meta["kernels_in_steps_by_torch_profiler"]
    if profiled:
        begin, end = recorded.meta["steps_window_ns"]
        inside = ops[(ops["kind"] == records.GpuKind.KERNEL) & (ops["start_ns"] >= begin) & (ops["end_ns"] <= end)]
        words = names.of(inside["name"])
        assert Counter(re.sub(r"\s", "", names.words[word]) for word in words.tolist()) == {
            re.sub(r"\s", "", name): count for name, count in profiled.items()
        }


def test_times_and_shapes_are_possible(recorded: Recorded) -> None:
    ops = recorded.operations()
    duration = (ops["end_ns"] - ops["start_ns"]).astype(np.int64)
    assert duration.min() > 0
    assert duration.max() < 10_000_000, "nothing here takes 10 ms"
    assert ops["start_ns"].max() - ops["start_ns"].min() < 60_000_000_000
    kernels = ops[ops["kind"] == records.GpuKind.KERNEL]
    assert kernels["grid"].min() >= 1
    assert kernels["block"].prod(axis=1).max() <= 1024
    assert kernels["registers"].min() > 0
    assert set(ops["device"]) == {0}
    copies = ops[ops["kind"] == records.GpuKind.MEMCPY]
    assert copies["bytes"].min() > 0


def test_every_operation_is_matched_with_its_launch(recorded: Recorded) -> None:
    batches = recorded.batches()
    ops = np.concatenate([batch.gpu for batch in batches])
    host = np.concatenate([batch.host for batch in batches])
    correlator = Correlator(api=True)
    last = int(ops["end_ns"].max())
    ready = correlator.feed(ops, host, np.empty(0, records.LAUNCH), last)
    ready = np.concatenate([ready, correlator.flush()])
    assert len(ready) == len(ops)
    kernels = ready[ready["kind"] == records.GpuKind.KERNEL]
    assert np.all(kernels["flags"] & records.GPU_LAUNCH_MATCHED)
    latency = (kernels["start_ns"] - kernels["launch_ns"]).astype(np.int64)
    assert latency.min() > 0
    assert not np.any(kernels["flags"] & records.GPU_START_CLAMPED)
    single = kernels[kernels["graph"] == 0]
    assert len(np.unique(single["correlation"])) == len(single), "one launch, one kernel"


def test_a_graph_launch_has_many_kernels() -> None:
    ops = Recorded("graphs").operations()
    of_graphs = ops[(ops["graph"] != 0) & (ops["kind"] == records.GpuKind.KERNEL)]
    assert len(of_graphs) > 100
    assert len(np.unique(of_graphs["correlation"])) <= 8
    assert len(np.unique(of_graphs["graph_node"])) > 50


def _walk(buffer: NDArray[np.uint8], table: NDArray[np.void]) -> tuple[list[int], int]:
    """Offsets of records and bytes lost, as the helper finds them."""
    walk = ctypes.CDLL(str(build.library())).argus_cupti_walk
    walk.restype = ctypes.c_uint32
    index, lost = np.zeros(len(buffer) // 16, np.uint32), ctypes.c_uint64()
    count = walk(
        ctypes.c_void_p(buffer.ctypes.data),
        ctypes.c_uint64(len(buffer)),
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_void_p(index.ctypes.data),
        ctypes.c_uint32(len(index)),
        ctypes.byref(lost),
    )
    return index[:count].tolist(), lost.value


def test_the_helper_finds_the_records_by_the_sizes_of_their_version(recorded: Recorded) -> None:
    for buffer, index in recorded.buffers:
        assert _walk(buffer, recorded.layouts.table()) == (index.tolist(), 0)
        found, _ = _walk(buffer, layouts.for_version(130400).table())
        assert found != index.tolist()


def test_the_labelled_trace_shows_what_was_planted() -> None:
    folder = DATA.parent / "h200_four_ranks"
    label = json.loads((folder / "label.json").read_text())
    tables = {name: ipc.open_file(folder / f"{name}.arrow").read_all() for name in ("iterations", "kernel_events")}
    steps, kernels = tables["iterations"], tables["kernel_events"]
    assert set(kernels["rank"].to_pylist()) == set(range(label["ranks"]))
    since = label["slow_from_step"] - label["untraced_steps"] + 2  # two more were in the untraced ones' first iteration
    change = {}
    for rank in range(label["ranks"]):
        own = steps.filter(pc.equal(steps["rank"], rank))
        begin = dict(zip(own["step"].to_pylist(), own["ts"].cast("int64").to_pylist(), strict=True))
        of_rank = kernels.filter(pc.and_(pc.equal(kernels["rank"], rank), pc.equal(kernels["kind"], "kernel")))
        at = np.sort(np.array(of_rank["ts"].cast("int64")))
        count = {step: int(np.sum((at >= begin[step]) & (at < begin[step + 1]))) for step in (10, 25)}
        change[rank] = count[25] - count[10]
    slow = label["slow_rank"]
    assert change.pop(slow) >= 100, "the extra matrix products of every layer"
    assert all(abs(more) <= 2 for more in change.values()), "at the edge of a step"
    before = steps.filter(pc.less(steps["step"], since))["duration_ns"].cast("int64").to_numpy()
    after = steps.filter(pc.greater(steps["step"], since))["duration_ns"].cast("int64").to_numpy()
    assert np.median(after) > 2 * np.median(before)
