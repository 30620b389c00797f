"""The fake libcupti gives records as the real one lays them out, each once, exactly, and only what was enabled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"
sys.path.insert(0, str(FAKEGPU))

import layouts  # noqa: E402
from run import Job, armed, build, ops_log  # noqa: E402

from tests import forked  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="futexes and memfd")

VERSIONS = {22: 0, 24: 0, 26: 1, 28: 1, 130000: 2, 130001: 2, 130100: 3, 130200: 3, 130300: 4, 130400: 5, 130500: 5}

# Runs in a process of its own; cupti-python is used for its dtypes and enums only.
PRELUDE = """
import ctypes as C, json, os, sys, threading, time
import numpy as np
from cupti import cupti as known
d = os.environ["FAKEGPU_BUILD"] + "/"
cuda = C.CDLL(d + "libcuda.so.1", mode=C.RTLD_GLOBAL)
rt = C.CDLL(d + "libcudart.so.13")
cupti = C.CDLL(d + "libcupti.so.13")
helper = C.CDLL(d + "libcupti_client.so")
P, U, L = C.c_void_p, C.c_uint, C.c_size_t
KERNEL, COPY, SET, DRIVER, RUNTIME, OVERHEAD, MODULE, SYNC, JIT, PEER = 10, 1, 2, 4, 5, 17, 27, 38, 52, 22
FIELDS = ["buffer_bytes", "most_records", "buffers", "misalign", "dirty", "flush_in_callback", "finalize_at_exit",
          "completed_sleep_us", "requested", "refused", "completed", "callback_result"]
class Client(C.Structure):
    _fields_ = [(name, C.c_int64) for name in FIELDS] + [("enters", C.c_int64 * 3), ("exits", C.c_int64 * 3)] + [
        (name, C.c_int64) for name in ("last_domain", "last_id", "last_result", "last_correlation", "kept")]
class Buffer(C.Structure):
    _fields_ = [("data", P)] + [(n, C.c_int64) for n in ("bytes", "valid", "requested_by", "completed_by")]
client = Client.in_dll(helper, "client")
buffers = (Buffer * 65536).in_dll(helper, "client_buffers")
def ok(result): assert result == 0, result
def setup(clock=True):
    if clock: ok(cupti.cuptiActivityRegisterTimestampCallback(helper.client_clock))
    ok(cupti.cuptiActivityRegisterCallbacks(helper.client_request, helper.client_complete))
def enable(*kinds):
    for kind in kinds: ok(cupti.cuptiActivityEnable(kind))
def disable(*kinds):
    for kind in kinds: ok(cupti.cuptiActivityDisable(kind))
def flush(flag=0): ok(cupti.cuptiActivityFlushAll(flag))
def dropped():
    n = L(); ok(cupti.cuptiActivityGetNumDroppedRecords(None, 0, C.byref(n))); return n.value
def stream(flags=1):
    s = P(); ok(rt.cudaStreamCreateWithFlags(C.byref(s), U(flags))); return s
def launch(n=1, s=None, f=None):
    for _ in range(n): ok(cuda.cuLaunchKernel(f or function, 7, 5, 3, 32, 2, 1, 96, s, None, None))
def sync(): ok(rt.cudaDeviceSynchronize())
def function_of(name):
    f = P(); ok(cuda.cuModuleGetFunction(C.byref(f), module, name)); return f
def threads():
    names = []
    for thread in os.listdir("/proc/self/task"):
        try: names.append(open(f"/proc/self/task/{thread}/comm").read().strip())
        except FileNotFoundError: pass  # it ended just now
    return sorted(names)
import layouts
version = U(); ok(cupti.cuptiGetVersion(C.byref(version)))
_, _, types = next(g for g in layouts.GENERATIONS.values() if g[0] <= version.value <= g[1])
TYPE = {KERNEL: "KERNEL", 3: "KERNEL", COPY: "MEMCPY", PEER: "MEMCPY2", SET: "MEMSET", DRIVER: "API", RUNTIME: "API",
        OVERHEAD: "OVERHEAD", MODULE: "MODULE", SYNC: "SYNCHRONIZATION", JIT: "JIT"}
DTYPE = {kind: layouts.dtype_of(known, types[type]) for kind, type in TYPE.items()}
def walk(buffer):
    "The records of a returned buffer, as cupti-python's dtypes see them."
    at = 0
    while at < buffer.valid:
        kind = C.c_int.from_address(buffer.data + at).value
        dtype = DTYPE[KERNEL if kind == 999 else kind]
        yield np.frombuffer(C.string_at(buffer.data + at, dtype.itemsize), dtype)[0]
        at += dtype.itemsize
    assert at == buffer.valid
def records(kind=None):
    found = [r for i in range(client.requested) if buffers[i].completed_by for r in walk(buffers[i])]
    return found if kind is None else [r for r in found if r["kind"] == kind]
def name_of(record): return C.string_at(int(record["name"])).decode()
def show(*values): print(json.dumps(values, default=int))
ok(rt.cudaSetDevice(0))
module = P(); ok(cuda.cuModuleLoadData(C.byref(module), b"image"))
function = function_of(b"a_kernel")
"""


@pytest.fixture(scope="session")
def fakegpu() -> Path:
    folder = build()
    assert (folder / "libcupti.so.13").exists(), "built without cupti-python"
    return folder


IMPORTS = f"""
import sys
sys.path.insert(0, {str(FAKEGPU)!r})
import numpy, layouts
from cupti import cupti
"""
"""Of these the processes of all scripts are forked. None loads a library of the fake GPU."""


def run_script(folder: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {"FAKEGPU_JITTER": "0", "FAKEGPU_KERNEL_NS": "*=1000", **env}
    code = PRELUDE + textwrap.dedent(body)
    environment = {**os.environ, **settings, "FAKEGPU_BUILD": str(folder), "PYTHONPATH": str(FAKEGPU)}
    if "LD_LIBRARY_PATH" not in env:
        return forked.script(IMPORTS, code, environment, 60)
    # The dynamic linker looks at it once, when a program starts.
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def script(fakegpu: Path) -> Any:
    def run(body: str, **env: str) -> Any:
        done = run_script(fakegpu, body, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


# ---- layouts


@pytest.mark.parametrize("version", VERSIONS)
def test_records_lie_as_each_version_lays_them_out(script, version):
    assert (
        script(
            """
            assert list(layouts.GENERATIONS.values()).index(
                next(g for g in layouts.GENERATIONS.values() if g[2] is types)) == int(os.environ["EXPECT"])
            setup(); enable(KERNEL, COPY, SET, PEER, SYNC, DRIVER)
            before = time.monotonic_ns()
            s = stream(); launch(s=s)
            ok(rt.cudaMemcpyAsync(P(4096), b"x", L(1000), 1, s))
            ok(cuda.cuMemsetD8Async(C.c_uint64(4096), 1, L(77), s))
            ok(cuda.cuMemcpyPeerAsync(C.c_uint64(1), P(1), C.c_uint64(2), P(1), L(50), s))
            ok(cuda.cuStreamSynchronize(s)); flush()
            after = time.monotonic_ns()
            (k,), (c,), (m,), (p,), (y,) = (records(kind) for kind in (KERNEL, COPY, SET, PEER, SYNC))
            assert name_of(k) == "a_kernel"
            assert [int(k["grid_" + axis]) for axis in "xyz"] == [7, 5, 3]
            assert [int(k["block_" + axis]) for axis in "xyz"] == [32, 2, 1]
            assert (k["dynamic_shared_memory"], k["static_shared_memory"], k["registers_per_thread"]) == (96, 0, 32)
            assert k["end"] - k["start"] == 1000 and k["completed"] == k["end"]
            assert [int(k[f]) for f in ("device_id", "context_id", "channel_type", "graph_id")] == [0, 1, 1, 0]
            assert (c["copy_kind"], c["src_kind"], c["dst_kind"], c["bytes"], c["channel_type"]) == (1, 1, 3, 1000, 2)
            assert (m["bytes"], m["memory_kind"]) == (77, 3) and (p["copy_kind"], p["bytes"]) == (10, 50)
            assert y["type"] == 3 and before <= y["start"] <= y["end"] <= after
            for a, b in ((k, c), (c, m), (m, p)):
                assert before <= a["start"] < a["end"] <= b["start"] and a["stream_id"] == b["stream_id"]
            calls = {int(r["cbid"]): r for r in records(DRIVER)}
            launched = calls[int(known.DriverApiTraceCbid.cuLaunchKernel)]
            assert launched["correlation_id"] == k["correlation_id"]
            assert (launched["process_id"], launched["thread_id"]) == (os.getpid(), threading.get_native_id())
            assert before <= launched["start"] <= k["start"] and launched["start"] < launched["end"] <= after
            show(len(calls))
            """,
            FAKEGPU_CUPTI_VERSION=str(version),
            EXPECT=str(VERSIONS[version]),
        )[0]
        >= 6
    )


def test_generations_are_those_that_argus_knows():
    theirs = pytest.importorskip("argus.cupti.layouts")
    for first, last, ours in layouts.GENERATIONS.values():
        for version in {first, min(last, 28) if last < 100_000 else last} - {25}:
            found = theirs.generations(version)
            for kind in ("MEMCPY", "MEMCPY2", "MEMSET", "SYNCHRONIZATION", "OVERHEAD", "JIT", "MODULE"):
                assert found[kind] == ours[kind], (version, kind)
            assert found["CONCURRENT_KERNEL"] == ours["KERNEL"], version
            assert found["RUNTIME"] == ours["API"], version


def test_the_known_sizes():
    cupti = pytest.importorskip("cupti.cupti")
    sizes = [
        tuple(layouts.dtype_of(cupti, types[kind]).itemsize for kind in ("KERNEL", "MEMCPY", "MEMSET", "API"))
        for _, _, types in layouts.GENERATIONS.values()
    ]
    assert sizes == [
        (208, 88, 88, 40),
        (208, 96, 88, 40),
        (216, 96, 88, 40),
        (224, 96, 88, 40),
        (232, 96, 88, 40),
        (248, 112, 104, 40),
    ]
    assert cupti.callback_data_dtype.itemsize == 72


# ---- what is recorded


def test_only_what_is_enabled_is_recorded(script):
    assert script("""
        setup(); launch(3); sync()
        enable(KERNEL); launch(5); sync(); flush()
        first = [int(r["kind"]) for r in records()]
        disable(KERNEL); launch(7); sync(); enable(COPY)
        launch(2); ok(rt.cudaMemcpyAsync(P(4096), b"x", L(10), 1, None)); sync(); flush()
        disable(COPY); enable(3); launch(1); sync(); flush()
        then = [int(r["kind"]) for r in records()][5:]
        show(first, then, cupti.cuptiActivityEnable(0), cupti.cuptiActivityEnable(60))
    """) == [[10] * 5, [1, 3], 21, 21]


@pytest.mark.parametrize("reserve", ["0", "1"])
def test_what_counts_is_when_work_was_launched(script, reserve):
    assert script(
        """
        setup(); slow = function_of(b"slow"); s = stream()
        launch(1, s, slow); enable(KERNEL); launch(2, s, slow); disable(KERNEL); launch(1, s, slow)
        sync(); flush(); show([int(r["end"] - r["start"]) for r in records()])
        """,
        FAKEGPU_CUPTI_RESERVE=reserve,
        FAKEGPU_KERNEL_NS="slow=20000000",
    ) == [[20_000_000] * 2]


def test_single_functions_can_be_chosen(script):
    driver, runtime, correlated = script("""
        setup()
        ok(cupti.cuptiActivityEnableDriverApi(int(known.DriverApiTraceCbid.cuLaunchKernel), 1))
        ok(cupti.cuptiActivityEnableRuntimeApi(int(known.RuntimeApiTraceCbid.cudaMemcpyAsync_v3020), 1))
        enable(COPY)
        launch(3); ok(rt.cudaMemcpyAsync(P(4096), b"x", L(10), 1, None)); sync()
        ok(cupti.cuptiActivityEnableDriverApi(int(known.DriverApiTraceCbid.cuLaunchKernel), 0))
        launch(3); sync(); flush()
        a, b = records(DRIVER), records(RUNTIME)
        show([int(r["cbid"]) for r in a], [int(r["cbid"]) for r in b],
             b[0]["correlation_id"] == records(COPY)[0]["correlation_id"])
    """)
    assert driver == [307] * 3
    assert runtime == [41]
    assert correlated


def test_every_call_with_a_kind_and_its_result(script):
    assert script("""
        setup(); enable(DRIVER, RUNTIME); launch(2)
        bad = cuda.cuLaunchKernel(P(12345), 1, 1, 1, 1, 1, 1, 0, None, None, None)
        sync(); disable(DRIVER, RUNTIME); launch(2); flush()
        ids = known.DriverApiTraceCbid
        show(bad, [int(r["return_value"]) for r in records(DRIVER) if r["cbid"] == ids.cuLaunchKernel],
             [known.RuntimeApiTraceCbid(int(r["cbid"])).name for r in records(RUNTIME)])
    """) == [400, [0, 0, 400], ["cudaDeviceSynchronize_v3020"]]


def test_waits_modules_and_compilations(script):
    waits, modules, compiled = script(
        """
        setup(); enable(SYNC, MODULE, JIT)
        s, e = stream(), P(); ok(rt.cudaEventCreate(C.byref(e)))
        launch(1, s); ok(rt.cudaEventRecord(e, s)); ok(rt.cudaStreamWaitEvent(stream(), e, 0))
        ok(rt.cudaEventSynchronize(e)); ok(rt.cudaStreamSynchronize(s)); sync()
        m = P(); ok(cuda.cuModuleLoadData(C.byref(m), b"x"))
        ok(cuda.cuLibraryLoadData(C.byref(m), b"x", None, None, 0, None, None, 0)); flush()
        show([int(r["type"]) for r in records(SYNC)], [int(r["id"]) for r in records(MODULE)],
             [(r["end"] - r["start"], r["jit_operation_type"], int(r["thread_id"] == threading.get_native_id()))
              for r in records(JIT)])
        """,
        RANK="0",
        FAKEGPU_JIT_STALL_RANK="0",
        FAKEGPU_JIT_STALL_MS="20",
    )
    assert waits == [2, 1, 3, 4]
    assert modules == [1, 2]
    assert len(compiled) == 1
    assert compiled[0][0] >= 20_000_000
    assert compiled[0][1:] == [3, True]


def test_kernels_of_a_graph_come_one_by_one(script):
    nodes, graphs, correlations, durations = script("""
        setup(); enable(KERNEL)
        s = stream(); graph, execution = P(), P()
        ok(rt.cudaStreamBeginCapture(s, 0)); launch(3, s); ok(rt.cudaStreamEndCapture(s, C.byref(graph)))
        ok(rt.cudaGraphInstantiate(C.byref(execution), graph, C.c_uint64(0)))
        ok(rt.cudaGraphLaunch(execution, s)); ok(rt.cudaGraphLaunch(execution, s)); sync(); flush()
        found = records(KERNEL)
        show([int(r["graph_node_id"]) & 0xffffffff for r in found], [int(r["graph_id"]) for r in found],
             [int(r["correlation_id"]) for r in found], [int(r["end"] - r["start"]) for r in found])
    """)
    assert nodes == [1, 2, 3] * 2
    assert graphs == [1] * 6
    assert len(set(correlations[:3])) == len(set(correlations[3:])) == 1
    assert correlations[0] != correlations[3]
    assert durations == [1000] * 6


def test_the_default_clock_is_the_wall_clock_and_a_given_one_is_kept_to_the_nanosecond(script):
    for clock in ("False", "True"):
        assert script(
            f"""
            clock = time.monotonic_ns if {clock} else time.time_ns
            setup({clock}); before = clock(); enable(KERNEL); launch(100); sync(); after = clock(); flush()
            stamp = C.c_uint64(); ok(cupti.cuptiGetTimestamp(C.byref(stamp)))
            found = records(KERNEL)
            slack = 0 if {clock} else 1_000_000
            show(all(before - slack <= r["start"] < r["end"] <= after + slack for r in found),
                 {{int(r["end"] - r["start"]) for r in found}} == {{1000}}, after <= stamp.value <= clock())
            """
        ) == [True, True, True]


def test_a_clock_registered_while_recording_waits_for_the_next_time(script):
    assert script("""
        setup(False); enable(KERNEL); ok(cupti.cuptiActivityRegisterTimestampCallback(helper.client_clock))
        launch(); sync(); flush(); disable(KERNEL); enable(KERNEL); launch(); sync(); flush()
        show(*[abs(int(r["start"]) - now) < 10**9 for r, now in zip(records(), (time.time_ns(), time.monotonic_ns()))])
    """) == [True, True]


# ---- buffers


def test_full_buffers_come_back_by_themselves_in_order_and_whole(script):
    completed, kernels, ordered, sizes = script("""
        client.buffer_bytes = 10 * DTYPE[KERNEL].itemsize + 50
        setup(); enable(KERNEL); launch(95); sync(); cuda.fakegpu_deliver()
        while client.completed < 9: time.sleep(0.001)
        ids = [int(r["correlation_id"]) for r in records()]
        show(client.completed, len(ids), ids == sorted(ids),
             sorted({buffers[i].valid // DTYPE[KERNEL].itemsize for i in range(9)}))
    """)
    assert [completed, kernels, ordered, sizes] == [9, 90, True, [10]]


def test_a_flush_returns_what_is_there(script):
    assert script("""
        setup(); enable(KERNEL); flush(); flush(1); before = client.completed
        launch(5); sync(); flush(); one = client.completed
        flush(); flush(1); show(before, one, client.completed, len(records()))
    """) == [0, 1, 1, 5]


def test_a_buffer_holds_no_more_records_than_it_was_given_for(script):
    assert script("""
        client.most_records = 4
        setup(); enable(KERNEL); launch(10); sync(); flush()
        show(sorted(buffers[i].valid // DTYPE[KERNEL].itemsize for i in range(client.requested)))
    """) == [[2, 4, 4]]


def test_without_a_buffer_records_are_dropped_and_counted(script):
    assert script("""
        client.buffer_bytes = 10 * DTYPE[KERNEL].itemsize; client.buffers = 2
        setup(); enable(KERNEL); launch(50); sync(); flush()
        a = dropped(); client.buffers = -1; launch(3); sync(); flush()
        show(a, dropped(), client.refused, len(records()))
    """) == [30, 0, 30, 23]


def test_without_callbacks_or_with_useless_buffers_all_is_dropped(script):
    assert script("""
        enable(KERNEL); launch(5); sync(); flush(); a = dropped()
        setup(); client.buffer_bytes = 100; launch(5); sync(); flush(1); b = dropped()
        client.buffer_bytes = 65536; client.misalign = 4; launch(5); sync(); flush(1)
        show(a, b, dropped(), len(records()))
    """) == [5, 5, 5, 0]


def test_buffers_are_zeroed_unless_the_client_says_they_are(script):
    body = """
        client.dirty = 1; setup(); value, size = C.c_uint8({0}), L(1)
        ok(cupti.cuptiActivitySetAttribute(5, C.byref(size), C.byref(value)))
        again = C.c_uint8(9); ok(cupti.cuptiActivityGetAttribute(5, C.byref(size), C.byref(again)))
        enable(KERNEL); launch(); sync(); flush()
        show(again.value, int(records()[0]["submitted"]), int(records()[0]["registers_per_thread"]))
    """
    assert script(body.format(0)) == [0, 0, 32]
    assert script(body.format(1)) == [1, 0xEEEEEEEEEEEEEEEE, 32]


def test_the_lock_is_held_in_callbacks(script):
    waited_s, flushed = script("""
        client.completed_sleep_us = 1_000_000; setup(); enable(DRIVER); launch(); result = []
        flusher = threading.Thread(target=flush); flusher.start(); time.sleep(0.1)
        start = time.monotonic(); launch(); waited = time.monotonic() - start
        flusher.join(); client.completed_sleep_us = 0
        client.flush_in_callback = 1; flush(); show(waited, client.callback_result)
    """)
    assert waited_s > 0.1
    assert flushed == 7


def test_next_record_walks_a_buffer(script):
    assert script("""
        setup(); enable(KERNEL, COPY, DRIVER); launch(2)
        ok(rt.cudaMemcpyAsync(P(4096), b"x", L(10), 1, None)); sync(); flush()
        b, record, kinds = buffers[0], P(), []
        while not (result := cupti.cuptiActivityGetNextRecord(P(b.data), L(b.valid), C.byref(record))):
            kinds.append(C.c_int.from_address(record.value).value)
        C.c_int.from_address(b.data).value = 999
        record = P()
        bad = cupti.cuptiActivityGetNextRecord(P(b.data), L(b.valid), C.byref(record))
        show(result, kinds == [int(r["kind"]) for r in records()] if bad == 0 else sorted(kinds), bad)
    """) == [12, [1, 4, 4, 4, 4, 10, 10], 21]


def test_threads_have_buffers_of_their_own_if_wanted(script):
    assert script(
        """
        client.buffer_bytes = 10 * 40
        setup(); enable(KERNEL)
        ok(cupti.cuptiActivityEnableDriverApi(307, 1))
        def work(): launch(35, stream())
        workers = [threading.Thread(target=work) for _ in range(3)]
        [w.start() for w in workers]; [w.join() for w in workers]; sync(); flush()
        calls = [(b, r) for b in (buffers[i] for i in range(client.requested)) for r in walk(b) if r["kind"] == DRIVER]
        full = [b for b, _ in calls if b.valid == client.buffer_bytes]
        show(all(b.requested_by == r["thread_id"] for b, r in calls),
             all(b.requested_by == b.completed_by for b in full), len(full) >= 90,
             sum(r["kind"] == KERNEL for b, _ in calls for r in walk(b)), len(calls), len(records(KERNEL)))
        """,
        FAKEGPU_CUPTI_PER_THREAD="1",
    ) == [True, True, True, 0, 105, 105]


def test_records_reserved_at_the_launch_are_completed_at_the_end(script):
    held, forced, later, dropped = script(
        """
        setup(); enable(KERNEL, COPY); s = stream()
        launch(3, s, function_of(b"slow")); ok(rt.cudaMemcpyAsync(P(4096), b"x", L(10), 1, s))
        flush(); held = client.completed
        sync(); flush()
        whole = [(int(r["end"] - r["start"]), int(r["correlation_id"])) for r in records(KERNEL)]
        assert [w[0] for w in whole] == [400_000_000] * 3 and whole[0][1] < whole[2][1] and len(records(COPY)) == 1
        slow, slowest, e = function_of(b"slow"), function_of(b"slowest"), P(); ok(rt.cudaEventCreate(C.byref(e)))
        for _ in range(4):
            n, m, begun = len(records()), len(records(KERNEL)), time.monotonic()
            launch(1, s, slow); ok(rt.cudaEventRecord(e, s)); launch(1, s, slowest)
            ok(rt.cudaEventSynchronize(e)); flush(1); took = time.monotonic() - begun
            forced, given = [(int(r["start"]) > 0, name_of(r)) for r in records(KERNEL)[m:]], len(records()) - n
            sync(); flush(1); later = len(records()) - n - given
            if took < 2: break  # else the machine stood still for so long that both had run
        show(held, forced, later, dropped())
        """,
        FAKEGPU_CUPTI_RESERVE="1",
        FAKEGPU_KERNEL_NS="slow=400000000,slowest=2500000000,*=1000",
    )
    assert held == 0
    assert forced == [[True, "slow"], [False, "slowest"]]
    assert later == 0
    assert dropped == 0


# ---- subscribers and the end


def test_a_subscriber_is_notified_of_calls_and_alone(script):
    assert script("""
        one, two = P(), P()
        ok(cupti.cuptiSubscribe(C.byref(one), helper.client_told, None))
        second = cupti.cuptiSubscribe(C.byref(two), helper.client_told, None)
        launch(2); quiet = list(client.enters)
        ok(cupti.cuptiEnableCallback(1, one, 1, 307)); launch(3); chosen = list(client.exits)
        ok(cupti.cuptiEnableDomain(1, one, 2)); ok(rt.cudaFree(None)); runtime = list(client.enters)
        ok(cupti.cuptiEnableDomain(0, one, 1)); launch(3); ok(cupti.cuptiUnsubscribe(one))
        ok(rt.cudaFree(None))
        show(second, quiet, chosen, runtime, list(client.exits), client.kept,
             client.last_domain, known.RuntimeApiTraceCbid(client.last_id).name, client.last_result,
             cupti.cuptiUnsubscribe(one), cupti.cuptiSubscribe(C.byref(two), helper.client_told, None))
    """) == [39, [0, 0, 0], [0, 3, 0], [0, 3, 1], [0, 3, 1], 4, 2, "cudaFree_v3020", 0, 1, 0]


def test_finalize_takes_all_of_it_away_and_a_new_start_is_as_the_first(script):
    result, after, threads_left, again = script(
        """
        one = P(); before = threads()
        ok(cupti.cuptiSubscribe(C.byref(one), helper.client_told, None))
        client.buffer_bytes = 500
        setup(); enable(KERNEL); launch(50); sync(); flush(1); n = len(records())
        assert "fakegpu-cupti" in threads()
        launch(1); sync(); client.finalize_at_exit = 1; client.callback_result = -1
        ok(cupti.cuptiEnableDomain(1, one, 1)); launch(1)
        result = client.callback_result
        launch(5); sync(); flush(1); after = len(records()) - n
        left = [t for t in threads() if t == "fakegpu-cupti"]
        class Observer(C.Structure): _fields_ = [("a", P * 4)]
        watch = Observer(); free = cuda.fakegpu_observe(C.byref(watch)) & 1; cuda.fakegpu_observe(None)
        ok(cupti.cuptiSubscribe(C.byref(one), helper.client_told, None))
        setup(); enable(KERNEL); launch(7); sync(); flush()
        show(result, [after, free], left, [len(records()) - n, dropped()])
        """,
        FAKEGPU_CUPTI_STRICT="1",
    )
    assert result == 0
    assert after == [0, 1]
    assert threads_left == []
    assert again == [7, 0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ok(cupti.cuptiFinalize())", "cuptiFinalize outside"),
        ("client.flush_in_callback = 1; setup(); enable(KERNEL); launch(); sync(); flush()", "FlushAll inside"),
        ("client.misalign = 4; setup(); enable(KERNEL); launch(); sync(); flush()", "aligned"),
    ],
)
def test_strict_ends_a_client_that_does_what_must_not_be(fakegpu, body, message):
    done = run_script(fakegpu, body, FAKEGPU_CUPTI_STRICT="1")
    assert done.returncode == -signal.SIGABRT
    assert message in done.stderr
    assert run_script(fakegpu, "ok(cupti.cuptiFinalize())").returncode == 0


# ---- faults


def test_somebody_else_may_be_subscribed_for_ever_or_for_a_while(script):
    body = """
        one = P(); show(*[cupti.cuptiSubscribe(C.byref(one), helper.client_told, None) for _ in range(4)])
    """
    assert script(body, FAKEGPU_CUPTI_BUSY="1") == [39] * 4
    assert script(body, FAKEGPU_CUPTI_BUSY="2") == [39, 39, 0, 39]
    assert script(body) == [0, 39, 39, 39]


def test_a_function_fails_as_set(script):
    assert script(
        """
        text = C.c_char_p(); ok(cupti.cuptiGetResultString(39, C.byref(text)))
        show(cupti.cuptiActivityEnable(KERNEL), cupti.cuptiActivityFlushAll(0), cupti.cuptiActivityDisable(KERNEL),
             text.value.decode())
        """,
        FAKEGPU_CUPTI_FAIL="cuptiActivityEnable:15,cuptiActivityFlushAll:999",
    ) == [15, 999, 0, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"]


def test_every_kth_kernel_record_is_corrupt(script):
    found = script(
        """
        setup(); enable(KERNEL); launch(25); sync(); flush(); now = time.monotonic_ns()
        show([0 if r["kind"] == 999 else 1 if r["start"] == 0 else 2 if r["end"] < r["start"] else
              3 if r["start"] > now + 10**17 else "" for r in records()])
        """,
        FAKEGPU_CUPTI_CORRUPT="3",
    )[0]
    assert [kind for kind in found if kind != ""] == [1, 2, 3, 0] * 2
    assert [i for i, kind in enumerate(found) if kind != ""] == list(range(2, 25, 3))


def test_a_name_may_be_reused_for_another_kernel_after_a_flush(script):
    one, two, pointers = script(
        """
        setup(); enable(KERNEL); kernels = [function_of(b"kernel_a"), function_of(b"kernel_b")]
        def run():
            n = len(records()); [launch(1, None, f) for f in kernels]; sync(); flush()
            return [int(r["name"]) for r in records()[n:]]
        a, b, c = run(), run(), run()
        show(a == b[::-1], a == c, len(set(a)))
        """,
        FAKEGPU_CUPTI_REUSE_NAMES="1",
    )
    assert [one, two, pointers] == [True, True, 2]


def test_a_late_flush_and_its_overhead(script):
    kinds, took_ms = script(
        """
        setup(); enable(KERNEL, OVERHEAD); launch(); sync(); start = time.monotonic(); flush()
        (o,) = records(OVERHEAD)
        assert o["overhead_kind"] == 65536 and o["object_kind"] == 2
        assert int(o["object_id"]["pt"]["thread_id"]) == threading.get_native_id()
        show([int(r["kind"]) for r in records()], int(o["end"] - o["start"]) / 1e6)
        """,
        FAKEGPU_CUPTI_FLUSH_DELAY_MS="50",
        FAKEGPU_CUPTI_OVERHEAD="1",
    )
    assert kinds == [10, 17]
    assert took_ms >= 50


@pytest.mark.parametrize(
    "setting",
    [
        ("FAKEGPU_CUPTI_VERSION", "x"),
        ("FAKEGPU_CUPTI_STRICT", "2"),
        ("FAKEGPU_CUPTI_FAIL", "cuptiFinalize"),
        ("FAKEGPU_CUPTI_FAIL", "cuptiFinalize:0"),
        ("FAKEGPU_CUPTI_BUZY", "1"),
    ],
)
def test_a_malformed_or_unknown_variable_ends_the_program(fakegpu, setting):
    done = run_script(fakegpu, "show(1)", **dict([setting]))
    assert done.returncode == 2
    assert setting[0] in done.stderr


def test_a_forked_child_that_flushes_and_ends_does_not_hang(script):
    assert script("""
        setup(); enable(KERNEL); launch(3); sync(); flush()
        child = os.fork()
        if not child:
            flush(1); os._exit(7)
        launch(2); sync(); flush(); show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(records()))
    """) == [7, 5]


# ---- injection, and exactness under load


def test_cuda_loads_the_injected_library_once_when_it_starts(fakegpu):
    body = "cuda.cuInit(0); show(client.requested)"
    client = fakegpu / "libcupti_client.so"
    env = {"LD_LIBRARY_PATH": str(fakegpu)}
    assert run_script(fakegpu, body, **env, CUDA_INJECTION64_PATH=str(client)).stdout == "[-1]\n"
    assert run_script(fakegpu, body, **env, CUDA_INJECTION64_PATH="/nonexistent").stdout == "[0]\n"
    assert run_script(fakegpu, body, **env, CUDA_INJECTION64_PATH=str(fakegpu / "libcudart.so.13")).stdout == "[0]\n"
    assert run_script(fakegpu, body).stdout == "[0]\n"


def test_the_environment_of_an_armed_job(fakegpu):
    assert armed("/a/lib.so")["CUDA_INJECTION64_PATH"] == "/a/lib.so"
    assert armed("/a/lib.so")["LD_LIBRARY_PATH"].startswith(str(fakegpu))


def sorted_by(array: Any, *fields: str) -> Any:
    return array[np.lexsort([array[field] for field in reversed(fields)])]


@pytest.mark.parametrize(
    ("args", "env"),
    [
        ([], {}),
        (["--threads", "3", "--streams", "2"], {"FAKEGPU_JITTER": "0.2"}),
        (["--graph", "100"], {}),
        (["--threads", "2", "--kernels", "200", "--kernel-ns", "10"], {"FAKEGPU_CUPTI_RESERVE": "1"}),
        (["--graph", "50", "--threads", "2"], {"FAKEGPU_CUPTI_RESERVE": "1"}),
    ],
)
def test_under_load_every_kernel_is_recorded_once_and_exactly(fakegpu, tmp_path, args, env):
    cupti = pytest.importorskip("cupti.cupti")
    launches, log = 200_000, tmp_path / "log"
    own = {
        "FAKEGPU_JITTER": "0",
        "FAKEGPU_OPS_LOG": str(tmp_path / "ops"),
        "CUPTI_CLIENT_OUT": str(tmp_path / "records"),
        "CUPTI_CLIENT_KINDS": "10",
        **env,
    }
    command = ["--launches", str(launches), "--kernel-ns", "300", *args, "--log", str(log)]
    client = fakegpu / "libcupti_client.so"
    with Job(1, command, env=own, program=fakegpu / "fake_burst", cupti=client, stderr=subprocess.PIPE) as job:
        assert job.wait(60) == [0]
        assert job.processes[0].stderr is not None
        assert job.processes[0].stderr.read() == b""
    output = json.loads(log.read_text())
    ran, names = ops_log(tmp_path / "ops", output["pid"])
    seen = np.fromfile(f"{tmp_path}/records.{output['pid']}", cupti.activity_kernel10_dtype)
    assert output["launches"] == len(ran) == len(seen) == launches
    by_name = {name: ran[ran["name"] == number] for number, name in enumerate(names, 1)}
    for name, expected in output["kernels"].items():
        assert len(by_name[name]) == expected["count"]
        if own["FAKEGPU_JITTER"] == "0" and "--graph" not in args:
            assert (by_name[name]["end_ns"] - by_name[name]["start_ns"]).sum() == expected["ns"]
    ran = sorted_by(ran, "correlation", "graph_node")
    node = seen["graph_node_id"] & 0xFFFFFFFF
    seen = seen[np.lexsort([node, seen["correlation_id"]])]
    assert np.array_equal(seen["correlation_id"], ran["correlation"])
    assert np.array_equal(seen["start"], ran["start_ns"])
    assert np.array_equal(seen["end"], ran["end_ns"])
    assert np.array_equal(seen["stream_id"], ran["stream"])
    assert len({(pointer, name) for pointer, name in zip(seen["name"], ran["name"], strict=True)}) == len(names)
    elapsed_s = (output["end_ns"] - output["start_ns"]) / 1e9
    print(f"{launches / elapsed_s:,.0f} kernels/s")


def test_the_log_of_operations_records_what_ran_while_nobody_watched(fakegpu, tmp_path):
    log = tmp_path / "log"
    with Job(2, ["--steps", "3", "--log", str(log)], env={"FAKEGPU_OPS_LOG": str(tmp_path / "ops")}) as job:
        assert job.wait(30) == [0, 0]
        pids = job.pids
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    counts = {line["rank"]: line["counts"] for line in lines if "counts" in line}
    for rank, pid in enumerate(pids):
        ran, names = ops_log(tmp_path / "ops", pid)
        kernels = ran[ran["kind"] == 1]
        launched = sum(n for name, n in counts[rank].items() if "Launch" in name or name == "ncclAllReduce")
        assert len(kernels) >= launched
        nccl = [number for number, name in enumerate(names, 1) if name.startswith("nccl")]
        assert np.isin(kernels["name"], nccl).sum() >= 12
        assert (ran["end_ns"] >= ran["transfer_ns"]).all()
        assert (ran["transfer_ns"] >= ran["start_ns"]).all()
        called, before_ns = ran["called_ns"], time.monotonic_ns() - int(60e9)
        assert ((before_ns < called) & (called <= ran["start_ns"])).all()
