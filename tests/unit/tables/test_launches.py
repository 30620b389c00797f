"""Records become rows: kinds, kernel names, lists, times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from argus.capture import kernel_books
from argus.capture.process import names as names_module
from argus.capture.process.names import KernelNames, demangle
from argus.model import calls, event_kinds, records
from argus.tables import arrow, collectives, launches

ORIGIN = arrow.Origin("j", 7, "h", 1_000)


def rows_of(events: np.ndarray, names: KernelNames | None = None) -> list[dict[str, object]]:
    table = launches.to_table(events, ORIGIN, np.arange(len(events), dtype=np.uint32), names or KernelNames())
    return table.to_pylist()  # type: ignore[no-any-return]


def launch(symbol: str, **fields: object) -> np.ndarray:
    event = np.zeros(1, records.LAUNCH)
    event["call"] = calls.BY_SYMBOL[symbol].id
    for name, value in fields.items():
        event[name] = value
    return event


def test_a_kernel_has_its_grid_and_shared_memory_and_no_bytes() -> None:
    event = launch("cuLaunchKernel", handle=5, bytes=4096, grid=(1, 2, 3), block=(4, 5, 6), ts_ns=10, duration_ns=-1)
    (row,) = rows_of(event)
    assert (row["kind"], row["kernel"], row["bytes"], row["shared_bytes"]) == ("kernel", "kernel@0x5", 0, 4096)
    assert (row["grid"], row["block"], row["duration_ns"]) == ([1, 2, 3], [4, 5, 6], -1)


def test_what_is_no_kernel_has_bytes_and_no_grid() -> None:
    (row,) = rows_of(launch("cudaMalloc", bytes=77))
    assert (row["kind"], row["kernel"], row["bytes"], row["shared_bytes"]) == ("alloc", "", 77, 0)
    assert (row["grid"], row["block"]) == ([], [])


@pytest.mark.parametrize(
    ("symbol", "direction", "kind"),
    [
        ("cudaMemcpyAsync", 1, "memcpy_h2d"),
        ("cudaMemcpyAsync", 2, "memcpy_d2h"),
        ("cudaMemcpyAsync", 3, "memcpy_d2d"),
        ("cudaMemcpyAsync", 4, "memcpy"),
        ("cudaMemcpyAsync", 0, "memcpy"),
        ("cuMemcpyDtoHAsync_v2", 0, "memcpy_d2h"),
        ("cuMemcpyDtoHAsync_v2", 1, "memcpy_d2h"),
        ("cudaStreamSynchronize", 1, "sync"),
    ],
)
def test_a_copy_s_direction_comes_from_its_name_or_its_argument(symbol: str, direction: int, kind: str) -> None:
    (row,) = rows_of(launch(symbol, direction=direction))
    assert row["kind"] == kind


def test_no_dictionary_holds_a_word_twice() -> None:
    """ClickHouse refuses a whole batch for it."""
    events = np.concatenate([launch(call.symbol) for call in calls.CALLS if call.program == "cuda"])
    table = launches.to_table(events, ORIGIN, np.zeros(len(events), np.uint32), KernelNames())
    for column in table.columns:
        chunk = column.chunk(0)
        if hasattr(chunk, "dictionary"):
            words = chunk.dictionary.to_pylist()
            assert len(set(words)) == len(words)


def test_mixed_rows_keep_their_order() -> None:
    events = np.concatenate([
        launch("cuLaunchKernel", handle=1, grid=(9, 8, 7), block=(1, 1, 1)),
        launch("cudaStreamSynchronize"),
        launch("cuLaunchKernel", handle=2, grid=(6, 5, 4), block=(2, 2, 2)),
    ])  # fmt: skip
    assert [row["grid"] for row in rows_of(events)] == [[9, 8, 7], [], [6, 5, 4]]
    assert [row["kernel"] for row in rows_of(events)] == ["kernel@0x1", "", "kernel@0x2"]


def control(symbol: str, pid: int, handle: int, name: bytes = b"", parent: int = 0, result: int = 0) -> np.ndarray:
    record = np.zeros(1, records.CONTROL)
    record["call"], record["pid"], record["handle"] = calls.BY_SYMBOL[symbol].id, pid, handle
    record["parent"], record["result"], record["name_len"] = parent, result, len(name)
    record["data"][0, : len(name)] = np.frombuffer(name, "u1")
    return record


def test_names_are_learned_from_look_ups_by_process() -> None:
    names = KernelNames()
    names.learn(control("cuModuleGetFunction", 10, 0x100, b"_Z4gemmPfi"))
    names.learn(control("cuLibraryGetKernel", 10, 0x200, b"softmax"))
    names.learn(control("cuKernelGetFunction", 10, 0x300, parent=0x200))
    names.learn(control("cuModuleGetFunction", 10, 0x400, b"refused", result=500))
    driver = calls.Layer.DRIVER
    assert names.name(10, 0x100, driver) == "gemm(float*, int)"
    assert names.name(10, 0x300, driver) == "softmax"
    assert names.name(11, 0x100, driver) == "kernel@0x100", "another process's handle means nothing"
    assert names.name(10, 0x400, driver) == "kernel@0x400"
    assert names.unresolved == 2
    names.forget(10)
    assert names.name(10, 0x100, driver) == "kernel@0x100"


def test_names_of_a_program_that_never_stops_making_kernels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched again and again keeps its name, however long ago it was looked up."""
    monkeypatch.setattr(kernel_books, "KEPT_HANDLES", 100)
    names = KernelNames()
    names.learn(control("cuModuleGetFunction", 10, 1, b"gemm"))
    names.learn(control("cuModuleGetFunction", 11, 1, b"another's"))
    driver = calls.Layer.DRIVER
    for number in range(2, 5000):
        if number % 3:  # one of three was looked up before Argus came
            names.learn(control("cuModuleGetFunction", 10, number, b"fused_%d" % number))
        assert names.name(10, 1, driver) == "gemm"
        assert names.name(10, number, driver) == (f"fused_{number}" if number % 3 else f"kernel@{number:#x}")
        assert len(names._books.of_pid[10]) <= 100
    assert names.name(10, 2, driver) == "kernel@0x2", "it went"
    assert names.name(10, 4999, driver) == "fused_4999"
    assert names.name(11, 1, driver) == "another's"


def test_names_of_all_processes_are_bounded_by_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has most loses those that were launched longest ago."""
    monkeypatch.setattr(kernel_books, "OF_ALL", 100_000)
    monkeypatch.setattr(names_module, "owner_of", lambda pid: (pid // 100, ""))
    names = KernelNames()
    driver = calls.Layer.DRIVER
    for number in range(1, 31):
        names.learn(control("cuModuleGetFunction", 100, number, b"honest_%d" % number))
    for pid in range(200, 212):
        for number in range(1, 100):
            names.learn(control("cuModuleGetFunction", pid, number, b"k" * 170))
            assert names._books.total <= 100_000
    assert [names.name(100, number, driver) for number in range(1, 31)] == [f"honest_{n}" for n in range(1, 31)]
    for pid in (100, *range(200, 212)):
        names.forget(pid)
    assert names._books.total == 0


def test_long_names_of_a_process_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_books, "OF_PROCESS", 100_000)
    monkeypatch.setattr(names_module, "demangle", lambda symbol, pid: f"{symbol} {'x' * 4000}")
    names = KernelNames()
    for number in range(1, 500):
        names.learn(control("cuModuleGetFunction", 10, number, b"k%d" % number))
        assert names.name(10, number, calls.Layer.DRIVER).startswith(f"k{number} ")
        assert sum(len(str(name)) for name in names._books.of_pid[10].launched.values()) <= 100_000
    assert names.name(10, 499, calls.Layer.DRIVER).startswith("k499 ")


def test_names_within_the_bounds_are_those_that_were_learned_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    names = KernelNames()
    known: dict[tuple[int, int], str] = {}
    for _ in range(3000):
        pid, handle = rng.choice([10, 11, 12]), rng.randrange(60)
        if rng.random() < 0.5:
            text = "".join(rng.choices("abcdef", k=rng.randrange(1, 50)))
            names.learn(control("cuModuleGetFunction", pid, handle, text.encode()))
            known[pid, handle] = text
        elif rng.random() < 0.02:
            names.forget(pid)
            known = {key: name for key, name in known.items() if key[0] != pid}
        else:
            expected = known.setdefault((pid, handle), f"kernel@{handle:#x}")
            assert names.name(pid, handle, calls.Layer.DRIVER) == expected


def unread(pid: int, handle: int, address: int, start: bytes = b"") -> np.ndarray:
    """A registration whose name, but for its beginning, is left to be read from the process."""
    record = control("__cudaRegisterFunction", pid, handle, start)
    record["flags"], record["name_address"] = records.FLAG_NAME_ADDRESS, address
    return record


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("plain_c_kernel", "plain_c_kernel"),
        ("_Z6kernelIfEvPT_", "void kernel<float>(float*)"),
        ("_Z19__device_stub__gemmPfi", "gemm(float*, int)"),
        ("_Znonsense", "_Znonsense"),
    ],
)
def test_symbols_read_as_people_write_them(symbol: str, name: str) -> None:
    assert demangle(symbol) == name


def test_payload_counts_bytes_and_marks_have_none() -> None:
    events = np.zeros(3, records.COLLECTIVE)
    events["call"] = [calls.BY_SYMBOL[s].id for s in ("ncclAllReduce", "ncclSend", "ncclGroupEnd")]
    events["count"], events["dtype"] = [10, 10, 10], [9, 8, 7]
    assert event_kinds.payload_bytes(events).tolist() == [20, 80, 0]
    assert event_kinds.is_collective(events).tolist() == [True, False, False]


def test_an_unknown_dtype_is_called_unknown_and_has_no_bytes() -> None:
    events = np.zeros(1, records.COLLECTIVE)
    events["call"], events["count"], events["dtype"], events["redop"] = calls.BY_SYMBOL["ncclAllReduce"].id, 5, 99, 200
    table = collectives.to_table(events, ORIGIN, np.zeros(1, np.uint32)).to_pylist()
    assert (table[0]["dtype"], table[0]["bytes"], table[0]["redop"]) == ("unknown", 0, "custom")


def torch_call(kind: str, **fields: object) -> np.ndarray:
    event = np.zeros(1, records.COLLECTIVE)
    event["call"] = next(c.id for c in calls.CALLS if c.layer is calls.Layer.TORCH and c.kind == kind)
    for name, value in fields.items():
        event[name] = value
    return event


def collective_rows(events: np.ndarray) -> list[dict[str, object]]:
    table = collectives.to_table(events, ORIGIN, np.zeros(len(events), np.uint32))
    return table.to_pylist()  # type: ignore[no-any-return]


def test_torch_s_own_dtypes_have_names_and_sizes_beside_nccl_s() -> None:
    codes = {6: ("float32", 4), 15: ("bfloat16", 2), 4: ("int64", 8), 11: ("bool", 1), 10: ("complex128", 16)}
    events = np.concatenate([torch_call("AllReduce", count=10, dtype=calls.TORCH_DTYPE + code) for code in codes])
    rows = collective_rows(events)
    assert [(row["dtype"], row["bytes"]) for row in rows] == [(name, 10 * size) for name, size in codes.values()]
    assert {row["op"] for row in rows} == {"AllReduce"}
    of_nccl = np.zeros(1, records.COLLECTIVE)
    of_nccl["call"], of_nccl["count"], of_nccl["dtype"] = calls.BY_SYMBOL["ncclAllReduce"].id, 10, 6
    assert collective_rows(of_nccl)[0]["dtype"] == "float16", "6 is another type to NCCL"


def test_a_dtype_that_torch_may_get_yet_has_no_bytes() -> None:
    (row,) = collective_rows(torch_call("Broadcast", count=10, dtype=calls.TORCH_DTYPE + 22))
    assert (row["dtype"], row["bytes"], row["count"]) == ("unknown", 0, 10)


def test_a_barrier_has_no_dtype() -> None:
    (row,) = collective_rows(torch_call("Barrier", stream=5))
    assert (row["op"], row["dtype"], row["bytes"], row["stream"]) == ("Barrier", "", 0, 0)


def test_a_group_s_own_count_is_no_stream() -> None:
    of_nccl = np.zeros(1, records.COLLECTIVE)
    of_nccl["call"], of_nccl["stream"] = calls.BY_SYMBOL["ncclAllReduce"].id, 77
    events = np.concatenate([torch_call("AllReduce", stream=78), torch_call("AllReduce"), of_nccl])
    assert [row["stream"] for row in collective_rows(events)] == [0, 0, 77]
    assert event_kinds.has_count(events).tolist() == [True, False, False]


def test_torch_s_sends_are_no_collectives() -> None:
    events = np.concatenate([torch_call(kind) for kind in ("AllReduce", "Barrier", "Send", "Recv")])
    assert event_kinds.is_collective(events).tolist() == [True, True, False, False]


def test_no_dictionary_of_collectives_holds_a_word_twice() -> None:
    events = np.concatenate([torch_call("AllReduce", dtype=code) for code in range(256)])
    for column in collectives.to_table(events, ORIGIN, np.zeros(256, np.uint32)).columns:
        chunk = column.chunk(0)
        if hasattr(chunk, "dictionary"):
            words = chunk.dictionary.to_pylist()
            assert len(set(words)) == len(words)
