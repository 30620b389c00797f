"""Each hooked function, called from compiled C with known arguments: the same values are in ClickHouse.

``abi_calls`` of the fake GPU calls every function once, with distinct values (64-bit ones where the type allows), and
prints what it passed, when it called, and what came back.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model import calls
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import wait_for_cuda
from tests.stores import new_store

pytestmark = [pytest.mark.kernel, pytest.mark.core]


class Seen:
    """What the program says it did, and what ClickHouse holds."""

    def __init__(self, folder: Path, backend: str) -> None:
        from run import BUILD

        self._store_url = new_store(folder)
        go = folder / "go"
        program = subprocess.Popen([BUILD / "abi_calls", go], stdout=subprocess.PIPE, text=True)
        try:
            assert program.stdout is not None
            assert program.stdout.readline().strip() == "ready"
            wait_for_cuda([program.pid])
            options = Options(pids=(program.pid,), backend=backend)  # type: ignore[arg-type]
            self._tracer = Tracer(open_store(self._store_url), options)
            self._tracer.start()
            assert self._tracer.session.probes.backend == backend
            self.with_exits = {call for each in self._tracer.attached for call in each.exit_prices}
            go.touch()
            deadline = time.monotonic() + 60
            while not self._tracer.done() and time.monotonic() < deadline:
                self._tracer.poll()
                time.sleep(0.02)
            lines = program.stdout.read().splitlines()
        finally:
            program.kill()
            program.wait()
        self.called: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.offset = self._tracer.session.mono_offset_ns

    def finish(self) -> None:
        """Ends the trace. Most of it is waiting: the kernel takes perf-event probes away one by one."""
        self.lost = self._tracer.stop()
        with open_store(self._store_url) as store:
            times = "toUnixTimestamp64Nano(ts) AS at"
            self.launches = query(store, f"SELECT *, {times} FROM launches ORDER BY ts").to_pylist()
            self.collectives = query(store, f"SELECT *, {times} FROM collectives ORDER BY ts").to_pylist()
            self.communicators = query(store, f"SELECT *, {times} FROM communicator_calls ORDER BY ts").to_pylist()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], Seen]]]:
    """The program, traced by either kind of probes; the slower kind is taken away while the other tests run."""
    with ThreadPoolExecutor(1) as pool:
        perf = Seen(tmp_path_factory.mktemp("perf"), "perf")
        gone = pool.submit(perf.finish)
        multi = Seen(tmp_path_factory.mktemp("multi"), "multi")
        multi.finish()
        yield {"multi": lambda: multi, "perf": lambda: (gone.result(), perf)[1]}


@pytest.fixture(scope="module", params=["multi", "perf"])
def seen(request: pytest.FixtureRequest, both: dict[str, Callable[[], Seen]]) -> Seen:
    return both[request.param]()


def hooked(seen: Seen, program: str) -> list[dict[str, Any]]:
    return [
        line
        for line in seen.called
        if line["call"] in calls.BY_SYMBOL and calls.BY_SYMBOL[line["call"]].program == program
    ]


def in_time(seen: Seen, line: dict[str, Any], row: dict[str, Any]) -> bool:
    at = row["at"] - seen.offset
    return bool(line["start_ns"] <= at and at + max(row["duration_ns"], 0) <= line["end_ns"])


def test_nothing_was_lost(seen: Seen) -> None:
    assert seen.lost == {}


def test_every_cuda_call_is_there_once_with_its_arguments(seen: Seen) -> None:
    wrong = []
    lines = hooked(seen, "cuda")
    assert len(lines) > 60
    for line in lines:
        symbol, expect = line["call"], line["expect"]
        call = calls.BY_SYMBOL[symbol]
        # Others of the name may have come from inside libraries that the program's own call does not enclose.
        rows = [row for row in seen.launches if row["call"] == symbol and in_time(seen, line, row)]
        if len(rows) != 1:
            wrong.append(f"{symbol}: {len(rows)} rows")
            continue
        row = rows[0]
        handle = expect.get("handle", expect.get("stream", 0)) if call.kind == "sync" else expect.get("handle", 0)
        want = {
            "stream": expect.get("stream", 0),
            "bytes": expect.get("bytes", 0),
            "shared_bytes": expect.get("shared_bytes", 0),
            "grid": expect.get("grid", []),
            "block": expect.get("block", []),
            "result": line["result"] if row["duration_ns"] >= 0 else 0,
            "in_nccl": False,
        }
        if call.shape is not calls.Shape.EXTENT:  # there the handle is the struct, which the program does not print
            want["handle"] = handle
        if "kind" in expect:
            want["kind"] = calls.DIRECTIONS[expect["kind"]]
        got = {name: row[name] for name in want}
        if got != want:
            wrong.append(f"{symbol}: {got} instead of {want}")
        if call.exit != (row["duration_ns"] >= 0):
            wrong.append(f"{symbol}: duration {row['duration_ns']}")
    assert wrong == []


def test_every_nccl_call_is_there_once_with_its_arguments(seen: Seen) -> None:
    wrong = []
    lines = hooked(seen, "nccl")
    assert len(lines) >= 13
    for line in lines:
        call, expect = calls.BY_SYMBOL[line["call"]], line["expect"]
        rows = [row for row in seen.collectives if row["op"] == call.kind and in_time(seen, line, row)]
        if len(rows) != 1:
            wrong.append(f"{call.symbol}: {len(rows)} rows")
            continue
        row = rows[0]
        want = {"result": line["result"]}
        if "dtype" in expect:
            size = calls.NCCL_DTYPE_BYTES[expect["dtype"]]
            want |= {
                "dtype": calls.NCCL_DTYPES[expect["dtype"]],
                "redop": calls.NCCL_REDOPS[expect["redop"]] if "redop" in expect else "",
                "count": expect["count"],
                "bytes": expect["count"] * size,
                "comm": expect["comm"],
                "peer": expect.get("peer", -1),
                "stream": expect["stream"],
                "in_group": call.symbol in ("ncclSend", "ncclRecv"),
            }
        got = {name: row[name] for name in want}
        if got != want:
            wrong.append(f"{call.symbol}: {got} instead of {want}")
        # Where a compiler lets it begin with "sub rsp" its exit would make the entry dear.
        if (row["duration_ns"] < 0) == (call.id in seen.with_exits):
            wrong.append(f"{call.symbol}: duration {row['duration_ns']}")
    assert calls.BY_SYMBOL["ncclAllReduce"].id in seen.with_exits
    assert wrong == []


def test_every_communicator_call_is_there_with_its_arguments(seen: Seen) -> None:
    wrong = []
    lines = [line for line in hooked(seen, "control") if line["call"].startswith("ncclComm")]
    assert {"ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommSplit"} <= {
        line["call"] for line in lines
    }
    for line in lines:
        symbol, expect = line["call"], line["expect"]
        rows = [row for row in seen.communicators if row["call"] == symbol and in_time(seen, line, row)]
        if symbol == "ncclCommInitAll":
            if [row["comm_rank"] for row in rows] != list(range(expect["nranks"])):
                wrong.append(f"{symbol}: {rows}")
            continue
        if len(rows) != 1:
            wrong.append(f"{symbol}: {len(rows)} rows")
            continue
        row = rows[0]
        names = {"comm": "comm", "parent": "parent", "rank": "comm_rank", "nranks": "nranks", "color": "color"}
        want = {ours: expect[theirs] for theirs, ours in names.items() if theirs in expect}
        if "uid_hex" in expect:
            want["unique_id"] = expect["uid_hex"]
        if symbol == "ncclCommSplit":
            want["key"] = expect["key"]
        got = {name: row[name] for name in want}
        if got != want:
            wrong.append(f"{symbol}: {got} instead of {want}")
    assert wrong == []


def test_kernels_looked_up_at_run_time_have_their_names(seen: Seen) -> None:
    names = {row["call"]: row["kernel"] for row in seen.launches}
    assert names["cuLaunchKernel"] == "abi_module_function"
    assert names["cuLaunchKernelEx"] == "abi_library_kernel"
    # learned from cuKernelGetFunction, which turns a kernel into a function
    assert names["cuLaunchKernel_ptsz"] == "abi_library_kernel"


def test_host_stubs_are_named_by_their_symbol(seen: Seen) -> None:
    stubs = {
        row["kernel"] for row in seen.launches if row["call"].startswith("cudaLaunchKernel") and not row["in_nccl"]
    }
    assert stubs
    assert not any(name.startswith("kernel@") for name in stubs)


def test_calls_inside_other_calls_are_not_counted_again(seen: Seen) -> None:
    own = sum(1 for line in seen.called if line["call"] in ("ncclBroadcast", "ncclBcast"))
    assert sum(1 for row in seen.collectives if row["op"] == "Broadcast") == own
    inside = [row for row in seen.launches if row["in_nccl"]]
    assert inside
    assert {row["kernel"][:10] for row in inside if row["kind"] == "kernel"} == {"ncclDevKer"}


def test_the_program_calls_every_function_that_is_hooked(seen: Seen) -> None:
    """What is hooked and not called here is untested: the list must not grow unnoticed."""
    uncalled = {call.symbol for call in calls.CALLS} - {line["call"] for line in seen.called}
    exported = set()
    from run import BUILD

    from argus.capture.process.elf import Elf

    for library in ("libcuda.so.1", "libcudart.so.13", "libnccl.so.2"):
        exported |= Elf(BUILD / library).functions(uncalled).keys()
    assert exported - {"__cudaRegisterFunction"} == set()
