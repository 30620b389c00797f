"""CUPTI's buffers become columns; what is not believable is counted, and nothing is read outside a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.cupti import decode as decoding
from argus.cupti import layouts
from argus.cupti.decode import apart, decode
from argus.model.records import GPU_OP, HOST_OP, GpuKind, HostKind

pytest.importorskip("cupti.cupti")

NOW = 10**15
PID = 4711


@pytest.fixture(scope="module", params=[24, 28, 130001, 130200, 130300, 130400])
def known(request: pytest.FixtureRequest) -> layouts.Layouts:
    return layouts.for_version(request.param)


def record(known: layouts.Layouts, kind: str, **fields: Any) -> NDArray[np.void]:
    made = np.zeros(1, known.dtype(known.kind(kind)))
    made["kind"] = known.kind(kind)
    for name, value in {"start": NOW, "end": NOW + 100, **fields}.items():
        if name in (made.dtype.names or ()):
            made[name] = value
    return made


def pack(*records: NDArray[np.void], room: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    raw = b"".join(one.tobytes() for one in records)
    offsets = np.cumsum([0, *(one.nbytes for one in records)])[:-1]
    return np.frombuffer(raw + bytes(room), "u1").copy(), offsets.astype(np.uint32)


def read(known: layouts.Layouts, *records: NDArray[np.void], **more: Any) -> decoding.Batch:
    options: dict[str, Any] = {"names": 100, "since_ns": NOW, "now_ns": NOW + 10**9, **more}
    return decode(*pack(*records), known, PID, True, {}, **options)


KERNEL: dict[str, Any] = {
    "device_id": 3,
    "context_id": 1,
    "stream_id": 7,
    "grid_x": 11,
    "grid_y": 12,
    "grid_z": 13,
    "block_x": 128,
    "block_y": 2,
    "block_z": 4,
    "static_shared_memory": 1024,
    "dynamic_shared_memory": 49152,
    "registers_per_thread": 255,
    "correlation_id": 99,
    "name": 5,
    "graph_node_id": (1 << 40) + 1,
    "graph_id": 17,
}


@pytest.mark.parametrize("kind", ["CONCURRENT_KERNEL", "KERNEL"])
def test_every_field_of_a_kernel(known: layouts.Layouts, kind: str) -> None:
    batch = read(known, record(known, kind, **KERNEL))
    assert batch.gpu.dtype == GPU_OP
    assert len(batch.host) == 0
    assert not batch.rejected
    (row,) = batch.gpu
    expected = {
        "start_ns": NOW,
        "end_ns": NOW + 100,
        "kind": GpuKind.KERNEL,
        "pid": PID,
        "correlation": 99,
        "name": 5,
        "device": 3,
        "context": 1,
        "stream": 7,
        "graph": 17,
        "graph_node": (1 << 40) + 1,
        "registers": 255,
        "shared_static": 1024,
        "shared_dynamic": 49152,
        **dict.fromkeys(("launch_ns", "launch_end_ns", "launch_tid", "flags", "bytes", "copy"), 0),
    }
    assert {name: int(row[name]) for name in expected} == expected
    assert row["grid"].tolist() == [11, 12, 13]
    assert row["block"].tolist() == [128, 2, 4]
    assert len(expected) + 2 == len(GPU_OP.names or ())


@pytest.mark.parametrize(
    ("kind", "made", "copy"),
    [("MEMCPY", GpuKind.MEMCPY, 2), ("MEMCPY2", GpuKind.MEMCPY, 10), ("MEMSET", GpuKind.MEMSET, 0)],
)
def test_copies_and_fills(known: layouts.Layouts, kind: str, made: GpuKind, copy: int) -> None:
    fields = {name: KERNEL[name] for name in ("device_id", "context_id", "stream_id", "correlation_id", "graph_id")}
    batch = read(known, record(known, kind, bytes=1 << 33, copy_kind=copy, graph_node_id=8, **fields))
    (row,) = batch.gpu
    seen = [int(row[name]) for name in ("kind", "copy", "bytes", "device", "context", "stream", "correlation", "graph")]
    assert seen == [made, copy, 1 << 33, 3, 1, 7, 99, 17]
    assert int(row["graph_node"]) == 8
    assert int(row["name"]) == 0


def test_the_cpu_s_side(known: layouts.Layouts) -> None:
    thread = np.zeros(1, known.dtype(known.kind("OVERHEAD")))["object_id"]
    thread["pt"]["thread_id"] = 55
    batch = read(
        known,
        record(known, "RUNTIME", cbid=211, thread_id=12, correlation_id=3, return_value=2),
        record(known, "DRIVER", cbid=307, thread_id=13, correlation_id=4),
        record(known, "SYNCHRONIZATION", type=3, correlation_id=5, stream_id=9, return_value=0),
        record(known, "OVERHEAD", overhead_kind=1 << 16, object_kind=known.thread_object, object_id=thread),
        record(known, "OVERHEAD", overhead_kind=1, object_kind=4, object_id=thread),
        record(known, "JIT", jit_operation_type=1, thread_id=14, cache_path=6, correlation_id=7),
        record(known, "MODULE", id=21),
        record(known, "MARKER", id=31, flags_=2, timestamp=NOW, name=8, object_kind=2, object_id=thread),
    )
    assert batch.host.dtype == HOST_OP
    assert len(batch.gpu) == 0
    rows = {(HostKind(row["kind"]), int(row["code"])): row for row in batch.host}
    assert len(rows) == 8
    assert (batch.host["pid"] == PID).all()

    def of(kind: HostKind, code: int) -> list[int]:
        return [int(rows[kind, code][name]) for name in ("start_ns", "end_ns", "correlation", "name", "tid", "stream")]

    assert of(HostKind.RUNTIME, 211) == [NOW, NOW + 100, 3, 0, 12, 0]
    assert int(rows[HostKind.RUNTIME, 211]["result"]) == 2
    assert of(HostKind.DRIVER, 307) == [NOW, NOW + 100, 4, 0, 13, 0]
    assert of(HostKind.SYNCHRONIZATION, 3) == [NOW, NOW + 100, 5, 0, 0, 9]
    assert of(HostKind.OVERHEAD, 1 << 16)[4] == 55
    assert of(HostKind.OVERHEAD, 1)[4] == 0
    assert of(HostKind.JIT, 1) == [NOW, NOW + 100, 7, 6, 14, 0]
    assert of(HostKind.MODULE, 21) == [0, 0, 0, 0, 0, 0]
    assert of(HostKind.MARKER, 2) == [NOW, NOW, 31, 8, 55, 0]


def test_mixed_kinds_keep_their_order_within_a_kind(known: layouts.Layouts) -> None:
    kinds = ["CONCURRENT_KERNEL", "RUNTIME", "MEMCPY", "CONCURRENT_KERNEL", "MEMSET", "DRIVER"] * 1700
    records = [record(known, kind, correlation_id=number, bytes=1) for number, kind in enumerate(kinds)]
    batch = read(known, *records)
    assert len(batch.gpu) + len(batch.host) == len(kinds)
    for kind, made in (("CONCURRENT_KERNEL", GpuKind.KERNEL), ("MEMCPY", GpuKind.MEMCPY), ("MEMSET", GpuKind.MEMSET)):
        expected = [number for number, one in enumerate(kinds) if one == kind]
        assert batch.gpu["correlation"][batch.gpu["kind"] == made].tolist() == expected
    assert batch.host["correlation"][batch.host["kind"] == HostKind.RUNTIME].tolist() == list(range(1, len(kinds), 6))


def test_a_buffer_of_one_kind_gives_the_same_as_its_records_apart(known: layouts.Layouts) -> None:
    records = [record(known, "CONCURRENT_KERNEL", **{**KERNEL, "correlation_id": n}) for n in range(9973)]
    together = read(known, *records)
    buffer, index = pack(*records)
    order = np.random.default_rng(1).permutation(len(index))
    apart = decode(buffer, index[order], known, PID, True, {}, names=100, since_ns=NOW, now_ns=NOW)
    assert len(together.gpu) == 9973
    assert (together.gpu[order] == apart.gpu).all()


def test_impossible_records_are_counted_and_left_out(known: layouts.Layouts) -> None:
    hour = 3600 * 10**9
    good = record(known, "CONCURRENT_KERNEL", correlation_id=1)
    batch = read(
        known,
        record(known, "CONCURRENT_KERNEL", start=0, end=0),
        good,
        record(known, "CONCURRENT_KERNEL", start=NOW, end=0),
        record(known, "MEMCPY", start=NOW + 1, end=NOW),
        record(known, "RUNTIME", start=NOW - 2 * hour, end=NOW),
        record(known, "RUNTIME", start=NOW, end=NOW + hour),
        record(known, "CONCURRENT_KERNEL", start=(1 << 64) - 1, end=(1 << 64) - 1),
        record(known, "CONCURRENT_KERNEL", correlation_id=2, start=NOW - hour + 1, end=NOW + 2 * 10**9),
    )
    assert batch.gpu["correlation"].tolist() == [1, 2]
    assert (batch.gpu["pid"] == PID).all()
    assert len(batch.host) == 0
    assert dict(batch.rejected) == {"start_zero": 2, "end_before_start": 1, "impossible_time": 3}
    assert set(batch.rejected) <= set(decoding.REJECTIONS)


def test_names_are_ids_or_pointers(known: layouts.Layouts) -> None:
    records = [record(known, "CONCURRENT_KERNEL", name=name) for name in (0x7F0000001000, 5, 0x7F0000002000, 0)]
    buffer, index = pack(*records)
    by_pointer = decode(buffer, index, known, PID, False, {0x7F0000001000: 1, 0x7F0000002000: 2})
    assert by_pointer.gpu["name"].tolist() == [1, 0, 2, 0]
    # An id that nobody gave would be an index out of range later.
    by_id = decode(buffer, index[1:], known, PID, True, {}, names=6)
    assert by_id.gpu["name"].tolist() == [5, 0, 0]
    assert decode(buffer, index[1:2], known, PID, True, {}, names=5).gpu["name"].tolist() == [0]


def test_offsets_outside_the_buffer_are_counted(known: layouts.Layouts) -> None:
    buffer, index = pack(record(known, "CONCURRENT_KERNEL"), record(known, "CONCURRENT_KERNEL"))
    size = len(buffer) // 2
    offsets = np.array([0, 4, size, size + 8, 2 * size - 8, 2 * size, 1 << 31, (1 << 32) - 8], np.uint32)
    batch = decode(buffer, offsets, known, PID, True, {}, names=1)
    assert len(batch.gpu) == 2
    assert batch.rejected["bad_offset"] + batch.rejected["unknown_kind"] == 6
    # The last record is cut off.
    batch = decode(buffer[:-8], index, known, PID, True, {}, names=1)
    assert len(batch.gpu) == 1
    assert dict(batch.rejected) == {"bad_offset": 1}
    for length in (0, 4, 8):
        assert not len(decode(buffer[:length], index, known, PID, True, {}).gpu)


def test_an_index_has_no_more_records_than_fit(known: layouts.Layouts) -> None:
    buffer, index = pack(*[record(known, "CONCURRENT_KERNEL")] * 50)
    assert apart(buffer, index, known).all()
    assert not len(apart(buffer, index[:0], known))
    forgeries: list[NDArray[np.uint32]] = [np.repeat(index, 300), index[::-1], np.tile(index, 300)]
    for forged in (np.zeros(16_384, np.uint32), *forgeries):
        kept: NDArray[np.uint32] = forged[apart(buffer, forged, known)]
        assert len(decode(buffer, kept, known, PID, True, {}, now_ns=NOW).gpu) <= 50


def test_the_records_that_are_apart_are_those_that_a_loop_finds(known: layouts.Layouts) -> None:
    rng = np.random.default_rng(3)
    table = known.table()["size"].tolist()
    for _ in range(100):
        buffer = rng.integers(0, 256, int(rng.integers(8, 3000)), dtype=np.uint8)
        words = buffer[: len(buffer) // 4 * 4].view("<u4")
        words[::2] = rng.choice(np.array([*known.dtypes, 0, 77], np.uint32), len(words[::2]))
        index = rng.integers(0, len(buffer), int(rng.integers(0, 40)), dtype=np.uint32)
        index = np.sort(index) if rng.random() < 0.7 else index
        expected, end = [], 0
        for offset in index.tolist():
            place = min(offset // 8, len(buffer) // 8 - 1)
            kind = int(buffer[8 * place : 8 * place + 4].view("<u4")[0])
            expected.append(offset >= end)
            end = max(end, offset + (max(table[kind], 8) if kind < len(table) else 8))
        assert apart(buffer, index, known).tolist() == expected


def test_an_unknown_kind_is_counted(known: layouts.Layouts) -> None:
    strange = record(known, "MEMSET")
    for kind in (0, 63, 64, 1 << 16, 0x7FFFFFFF):
        strange["kind"] = kind
        batch = read(known, record(known, "MEMCPY"), strange)
        assert len(batch.gpu) == 1
        assert dict(batch.rejected) == {"unknown_kind": 1}


def test_no_bytes_and_no_index_break_it(known: layouts.Layouts) -> None:
    rng = np.random.default_rng(7)
    kinds = np.array([*known.dtypes, 0, 77], np.uint32)
    for _ in range(200):
        size = int(rng.integers(0, 4096))
        buffer = rng.integers(0, 256, size, dtype=np.uint8)
        words = buffer[: size // 4 * 4].view("<u4")
        words[::4] = rng.choice(kinds, len(words[::4]))
        index = rng.integers(0, 1 << int(rng.integers(3, 33)), int(rng.integers(0, 300)), dtype=np.uint64)
        index = (index & ~np.uint64(7) if rng.random() < 0.8 else index).astype(np.uint32)
        batch = decode(buffer, index, known, PID, bool(rng.random() < 0.5), {1: 1}, names=2, now_ns=NOW)
        assert len(batch.gpu) + len(batch.host) + batch.rejected.total() == len(index)
        assert (batch.gpu["name"] < 2).all()
        assert (batch.host["name"] < 2).all()
        assert (batch.gpu["start_ns"] <= batch.gpu["end_ns"]).all()
        assert (batch.gpu["start_ns"] > 0).all()


def test_it_reads_shared_memory_without_keeping_it(known: layouts.Layouts) -> None:
    buffer, index = pack(record(known, "CONCURRENT_KERNEL", correlation_id=8))
    batch = decode(buffer, index, known, PID, True, {}, names=1)
    buffer[:] = 0xFF
    assert batch.gpu["correlation"].tolist() == [8]
    assert not np.shares_memory(batch.gpu, buffer)
