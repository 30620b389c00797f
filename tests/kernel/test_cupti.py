"""Argus's helper in real processes, with the fake libcupti: what ran is recorded once and exactly, whatever happens."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process import cupti
from argus.cupti import build as helper
from argus.cupti import collector as outside
from argus.cupti import shared
from argus.cupti.collector import Collector, CollectorState, CuptiOptions
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model.records import GPU_OP, HOST_OP, GpuKind, HostKind
from argus.semantics.gpu.usage import time_in, union
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.kernel.conftest import wait_for_cuda, wait_until

pytest.importorskip("cupti.cupti")
pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="map_files is root's")]

import run as fakegpu  # noqa: E402

SMALL = {"buffers": 2, "buffer_bytes": 65536}
FAKE_KINDS = {1: GpuKind.KERNEL, 2: GpuKind.MEMCPY, 3: GpuKind.MEMSET}
"""``enum fakegpu_kind`` of the ops log."""
EDGE_NS = 500_000_000
"""The fake works ahead: what was queued before CUPTI was on has no record though it ends later."""

# A program that uses the GPU and executes commands, a line at a time; answers each with a line.
PROGRAM = """
import ctypes as C, os, sys, time
folder = os.environ["FAKEGPU_BUILD"] + "/"
cuda = C.CDLL(folder + "libcuda.so.1", mode=C.RTLD_GLOBAL)
runtime = C.CDLL(folder + "libcudart.so.13")
def ok(result): assert result == 0, result
def say(text): print(text, flush=True)
ok(runtime.cudaSetDevice(0))
module, function = C.c_void_p(), C.c_void_p()
ok(cuda.cuModuleLoadData(C.byref(module), b"image"))
ok(cuda.cuModuleGetFunction(C.byref(function), module, b"a_kernel"))
def launch(count):
    for _ in range(count): ok(cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None))
    ok(runtime.cudaDeviceSynchronize())
say("ready")
for line in sys.stdin:
    word, *arguments = line.split()
    if word == "launch":
        began = time.monotonic_ns()
        launch(int(arguments[0]))
        say(time.monotonic_ns() - began)
    elif word == "record":
        cupti = C.CDLL(folder + "libcupti.so.13")
        ok(cupti.cuptiActivityEnable(10))  # CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
        ok(cupti.cuptiActivityDisable(10))
        say("recorded")
    elif word == "fill":
        ok(runtime.cudaMemset(C.c_void_p(4096), 0, C.c_size_t(64)))
        say("filled")
    elif word == "fork":
        child = os.fork()
        if not child:
            time.sleep(float(arguments[0]))
            sys.exit(7)
        say(child)
    elif word == "clone":  # no handler of pthread_atfork runs
        libc = C.CDLL(None)
        child = libc.syscall(C.c_long(56 if os.uname().machine == "x86_64" else 220), C.c_long(17), *[C.c_long(0)] * 4)
        if not child:
            libc.exit(7)
        say(child)
    elif word == "reap":
        say(os.waitstatus_to_exitcode(os.wait()[1]))
    elif word == "exec":
        os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], sys.argv[1]])
    elif word == "profile":  # as a profiler inside the program: keeps the subscription and takes the buffers
        cupti, client = C.CDLL(folder + "libcupti.so.13"), C.CDLL(folder + "libcupti_client.so")
        subscriber = C.c_void_p()
        result = cupti.cuptiSubscribe(C.byref(subscriber), client.client_told, None)
        result = result or cupti.cuptiActivityRegisterCallbacks(client.client_request, client.client_complete)
        say(result)
    elif word == "leave":
        cupti.cuptiActivityFlushAll(1)
        say(cupti.cuptiUnsubscribe(subscriber))
    elif word == "sleep":
        time.sleep(float(arguments[0]))
        say("awake")
    elif word == "exit":
        break
"""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    folder = fakegpu.build()
    assert (folder / "libcupti.so.13").exists(), "the fake GPU was built without cupti-python"
    assert helper.main() == 0


class Watch:
    """A collector, and all that it gave."""

    def __init__(self, pid: int, **options: Any) -> None:
        self.collector = Collector(pid, CuptiOptions(**options))
        self._gpu: list[NDArray[np.void]] = []
        self._host: list[NDArray[np.void]] = []

    def poll(self) -> None:
        self._keep(self.collector.poll(time.monotonic()))

    def _keep(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self._gpu.append(batch.gpu)
            self._host.append(batch.host)

    def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> Watch:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout_s} s; the collector is {self.collector.text}")
            self.poll()
            time.sleep(0.01)
        return self

    def until_text(self, text: str, timeout_s: float = 30.0) -> Watch:
        return self.until(lambda: self.collector.text.startswith(text), timeout_s)

    def until_on(self, timeout_s: float = 30.0) -> Watch:
        return self.until(lambda: self.collector.state == CollectorState.ON, timeout_s)

    def stop(self) -> Watch:
        self._keep(self.collector.stop())
        return self

    def counter(self, name: str) -> int:
        return self.collector.counters()[name][0]

    def losses(self) -> dict[str, int]:
        return {name: value for name, (value, loss) in self.collector.counters().items() if loss and value}

    @property
    def gpu(self) -> NDArray[np.void]:
        return np.concatenate([np.zeros(0, GPU_OP), *self._gpu])

    @property
    def host(self) -> NDArray[np.void]:
        return np.concatenate([np.zeros(0, HOST_OP), *self._host])

    @property
    def kernels(self) -> NDArray[np.void]:
        gpu = self.gpu
        return gpu[gpu["kind"] == GpuKind.KERNEL]


class Program:
    """The program above."""

    def __init__(self, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, PROGRAM],
            env={**os.environ, **fakegpu.armed(), "FAKEGPU_BUILD": str(fakegpu.BUILD), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def send(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def program(**env: str) -> Iterator[Program]:
    started = Program(**{"FAKEGPU_KERNEL_NS": "*=1000", **env})
    try:
        yield started
    finally:
        started.kill()


@contextmanager
def burst(folder: Path, *arguments: object, **env: str) -> Iterator[fakegpu.Job]:
    """``fake_burst``, which begins when ``go`` exists in the folder, and then writes ``log`` there."""
    args = ["--go", str(folder / "go"), "--log", str(folder / "log"), *map(str, arguments)]
    env = {"FAKEGPU_JITTER": "0", "FAKEGPU_CUPTI_STRICT": "1", **env}
    with fakegpu.Job(1, args, env, program=fakegpu.BUILD / "fake_burst", cupti=True) as job:
        yield job


def result_of(folder: Path) -> Any:
    return json.loads((folder / "log").read_text())


def written(folder: Path) -> Callable[[], bool]:
    log = folder / "log"
    return lambda: log.exists() and log.stat().st_size > 0


def state_of(pid: int) -> shared.State:
    """What the helper says, without disturbing it or whoever watches it."""
    fd = os.open(f"/proc/{pid}/map_files/{cupti.helper_mapping(pid)}", os.O_RDWR)
    try:
        return shared.State(shared.Memory(fd).load("state"))
    finally:
        os.close(fd)


def requests_of(pid: int) -> int:
    """How many buffers CUPTI has asked for."""
    fd = os.open(f"/proc/{pid}/map_files/{cupti.helper_mapping(pid)}", os.O_RDWR)
    try:
        return shared.Memory(fd).load("requests")
    finally:
        os.close(fd)


def status_kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads_named(pid: int, name: str) -> list[Path]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().strip().startswith(name)]


def helper_thread(pid: int) -> Path:
    (found,) = threads_named(pid, "argus-cupti")
    return found


# ---- what ran is recorded once, and exactly


def check_against_log(watch: Watch, ops: NDArray[np.void], names: list[str], on_ns: int, off_ns: int) -> None:
    """Each record is of an operation that ran, with its times and its name; none is missing between the first and the
    last; and the first and the last are where CUPTI was switched on and off."""
    taken = watch.gpu
    key = [("kind", "i8"), ("correlation", "i8"), ("start_ns", "i8"), ("end_ns", "i8")]
    there = np.zeros(len(ops), key)
    there["kind"] = [FAKE_KINDS[kind] for kind in ops["kind"].tolist()]
    here = np.zeros(len(taken), key)
    here["kind"] = taken["kind"]
    for name in ("correlation", "start_ns", "end_ns"):
        there[name], here[name] = ops[name], taken[name]
    place = {entry: number for number, entry in enumerate(there.tolist())}
    assert len(place) == len(ops)
    found = np.array([place.get(entry, -1) for entry in here.tolist()])
    assert (found >= 0).all(), f"{int((found < 0).sum())} records of what never ran"
    assert len(np.unique(found)) == len(found), "recorded twice"
    assert len(np.unique(taken["correlation"])) == len(taken)
    texts = [watch.collector.names[name] for name in taken["name"].tolist()]
    assert texts == [names[name - 1] if name else "" for name in ops["name"][found].tolist()]
    assert (taken["bytes"] == ops["bytes"][found]).all()
    assert (taken["device"] == ops["device"][found]).all()
    recorded = np.zeros(len(ops), bool)
    recorded[found] = True
    for kind in np.unique(ops["kind"]):
        for stream in np.unique(ops["stream"]):
            here_in_order = recorded[(ops["kind"] == kind) & (ops["stream"] == stream)]
            places = np.flatnonzero(here_in_order)
            assert not len(places) or here_in_order[places[0] : places[-1] + 1].all(), "a gap"
    certain = (ops["start_ns"] > on_ns + EDGE_NS) & (ops["end_ns"] < off_ns - EDGE_NS)
    assert certain.sum() > 100
    assert recorded[certain].all()
    outside_of_it = (ops["end_ns"] < on_ns - EDGE_NS) | (ops["start_ns"] > off_ns + EDGE_NS)
    assert not recorded[outside_of_it].any()


@pytest.mark.parametrize("env", [{}, {"FAKEGPU_CUPTI_PER_THREAD": "1", "FAKEGPU_CUPTI_RESERVE": "1"}])
def test_every_operation_of_a_job_is_recorded_once_while_it_is_on(tmp_path: Path, env: dict[str, str]) -> None:
    env = {"FAKEGPU_OPS_LOG": str(tmp_path / "ops"), "FAKEGPU_CUPTI_STRICT": "1", **env}
    with fakegpu.Job(3, ["--steps", "110"], env, cupti=True) as job:
        wait_until(lambda: all((tmp_path / f"ops.{pid}").exists() for pid in job.pids), what="the job")
        time.sleep(0.6)
        watches = [Watch(pid) for pid in job.pids]
        on_ns = {}
        deadline = time.monotonic() + 10
        while len(on_ns) < 3 and time.monotonic() < deadline:
            for watch in watches:
                watch.poll()
                if watch.collector.state == CollectorState.ON:
                    on_ns.setdefault(watch.collector.pid, time.monotonic_ns())
            time.sleep(0.01)
        while time.monotonic_ns() < max(on_ns.values()) + 1.5e9:
            for watch in watches:
                watch.poll()
            time.sleep(0.02)
        off_ns = time.monotonic_ns()
        for watch in watches:
            watch.collector.begin_stop()
        while not all(watch.collector.stopped for watch in watches):
            for watch in watches:
                watch.poll()
            time.sleep(0.01)
        assert None in job.poll(), "the job ended too early for this test"
        assert job.wait(20) == [0, 0, 0]
    for watch in watches:
        assert watch.collector.text == "off"
        assert watch.losses() == {}
        ops, names = fakegpu.ops_log(tmp_path / "ops", watch.collector.pid)
        check_against_log(watch, ops, names, on_ns[watch.collector.pid], off_ns)
        # Each kernel that was launched since has the record of its launch.
        calls = watch.host[np.isin(watch.host["kind"], [HostKind.RUNTIME, HostKind.DRIVER])]
        assert np.isin(watch.kernels["correlation"][100:], calls["correlation"]).all()
        launched = dict(zip(calls["correlation"].tolist(), calls["start_ns"].tolist(), strict=True))
        late = [op for op in watch.kernels[100:] if launched[int(op["correlation"])] > int(op["start_ns"])]
        assert not late, "it began before it was launched"


@pytest.mark.alone
def test_nothing_is_lost_at_200_000_kernels_a_second(tmp_path: Path) -> None:
    launches = 400_009
    with burst(tmp_path, "--launches", launches, "--rate", 200_000, "--hold", 30) as job:
        watch = Watch(job.pids[0]).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    ran = result_of(tmp_path)
    kernels = watch.kernels
    assert watch.losses() == {}
    assert len(kernels) == launches
    assert len(np.unique(kernels["correlation"])) == launches
    spent = kernels["end_ns"] - kernels["start_ns"]
    for number, name in enumerate(watch.collector.names[1:], 1):
        own = kernels["name"] == number
        assert int(own.sum()) == ran["kernels"][name]["count"]
        assert int(spent[own].sum()) == ran["kernels"][name]["ns"]
    assert len(watch.collector.names) == 9
    assert int((watch.host["kind"] == HostKind.RUNTIME).sum()) == launches


@pytest.mark.parametrize("env", [{}, {"FAKEGPU_CUPTI_PER_THREAD": "1"}])
def test_what_a_tiny_ring_drops_is_counted_to_the_record(tmp_path: Path, env: dict[str, str]) -> None:
    launches = 100_003
    with burst(tmp_path, "--launches", launches, "--rate", 200_000, "--hold", 30, **env) as job:
        watch = Watch(job.pids[0], api=False, **SMALL).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    dropped = watch.counter("cupti_records_dropped")
    waits = int((watch.host["kind"] == HostKind.SYNCHRONIZATION).sum())
    assert dropped > 10_000
    assert watch.counter("cupti_buffers_refused") > 0
    # One wait for each of four streams, if it was not dropped itself.
    assert 0 <= waits <= 4
    assert launches <= len(watch.kernels) + waits + dropped <= launches + 4
    assert len(watch.gpu) + len(watch.host) + dropped == launches + 4
    assert set(watch.losses()) == {"cupti_records_dropped", "cupti_buffers_refused"}


def test_threads_with_buffers_of_their_own(tmp_path: Path) -> None:
    launches = 50_021
    env = {"FAKEGPU_CUPTI_PER_THREAD": "1"}
    with burst(tmp_path, "--launches", launches, "--threads", 8, "--rate", 50_000, "--hold", 30, **env) as job:
        watch = Watch(job.pids[0]).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    calls = watch.host[watch.host["kind"] == HostKind.RUNTIME]
    assert watch.losses() == {}
    assert len(watch.kernels) == launches
    assert sorted(calls["correlation"].tolist()) == sorted(watch.kernels["correlation"].tolist())
    assert len(np.unique(calls["tid"])) == 8


def test_a_name_whose_memory_is_used_again(tmp_path: Path) -> None:
    """The fake puts another name where one was as soon as all buffers are out: the helper, if it walks, mixes none up.

    Argus itself reads a name up to a poll later. The real CUPTI has not been seen to use a name's memory again.
    """
    env = {"FAKEGPU_CUPTI_REUSE_NAMES": "1"}
    with burst(tmp_path, "--launches", 40_000, "--rate", 20_000, "--hold", 30, **env) as job:
        watch = Watch(job.pids[0], flush_ms=100, walks_outside=False).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    kernels = watch.kernels
    assert len(kernels) == 40_000
    # Launch n is of kernel n modulo 8, and its grid n modulo 1000, plus 1.
    texts = np.array(watch.collector.names)[kernels["name"]]
    assert set(watch.collector.names) == {"", *(f"burst_kernel_{k}" for k in range(8))}
    expected = np.char.add("burst_kernel_", ((kernels["grid"][:, 0] - 1) % 8).astype(str))
    assert (texts == expected).all(), f"{int((texts != expected).sum())} names are another's"


def test_a_flush_that_takes_long(tmp_path: Path) -> None:
    env = {"FAKEGPU_CUPTI_FLUSH_DELAY_MS": "1500"}
    with burst(tmp_path, "--launches", 40_000, "--rate", 20_000, "--hold", 30, **env) as job:
        watch = Watch(job.pids[0], flush_ms=100).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    assert (len(watch.kernels), watch.losses()) == (40_000, {})
    assert watch.collector.text == "off"


def test_wrong_records_are_rejected_and_counted_to_the_record(tmp_path: Path) -> None:
    """Every 5,000th is wrong, another way each time; a kind nobody knows loses the rest of its buffer as well."""
    launches = 39_999
    env = {"FAKEGPU_CUPTI_CORRUPT": "5000"}
    with burst(tmp_path, "--launches", launches, "--rate", 40_000, "--hold", 30, **env) as job:
        watch = Watch(job.pids[0], api=False).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    known = watch.collector.buffers.layouts
    assert known is not None
    kernel_bytes = known.dtype(known.kind("CONCURRENT_KERNEL")).itemsize
    wait_bytes = known.dtype(known.kind("SYNCHRONIZATION")).itemsize
    # 7 are wrong: 1 and 5, 2 and 6, 3 and 7, 4. None but those behind the 4th is lost.
    rejected = {name: value for name, value in watch.losses().items() if name.startswith("cupti_rejected")}
    assert sum(rejected.values()) <= 6
    assert set(rejected) <= {f"cupti_rejected_{w}" for w in ("start_zero", "end_before_start", "impossible_time")}
    unknown = watch.counter("cupti_bytes_unknown")
    waits = int((watch.host["kind"] == HostKind.SYNCHRONIZATION).sum())
    seen_bytes = kernel_bytes * (len(watch.kernels) + sum(rejected.values())) + wait_bytes * waits
    assert unknown > 0
    assert seen_bytes + unknown == kernel_bytes * launches + wait_bytes * 4


def test_each_kind_of_wrong_record_has_a_counter(tmp_path: Path) -> None:
    with burst(tmp_path, "--launches", 1999, "--hold", 30, FAKEGPU_CUPTI_CORRUPT="500") as job:
        watch = Watch(job.pids[0], api=False).until_on()
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 15).stop()
    reasons = ("start_zero", "end_before_start", "impossible_time")
    assert watch.losses() == {f"cupti_rejected_{reason}": 1 for reason in reasons}
    assert len(watch.kernels) == 1996


def test_the_store_has_every_operation_with_its_launch(store_url: str, tmp_path: Path) -> None:
    """The whole way: three ranks, traced by probes and CUPTI at once."""
    launches, collectives = 1009, 211
    go, log = tmp_path / "go", tmp_path / "ops"
    args = ["--exact", str(launches), str(collectives), "--go", str(go), "--hold", "1"]
    with fakegpu.Job(3, args, {"FAKEGPU_OPS_LOG": str(log)}, cupti=True) as job:
        wait_for_cuda(job.pids)
        tracer = Tracer(open_store(store_url), Options(pids=tuple(job.pids), max_overhead=1e6))
        tracer.start()
        try:
            # None has called CUDA yet, so CUPTI is switched on as soon as the first does.
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not all(state == "on" for state in gpu_states(tracer)):
                tracer.poll()
                time.sleep(0.02)
            go.touch()
            deadline = time.monotonic() + 20
            while not tracer.done() and time.monotonic() < deadline:
                tracer.poll()
                time.sleep(0.02)
        finally:
            lost = tracer.stop()
        assert job.wait(10) == [0, 0, 0]
    assert (lost, tracer.store_error) == ({}, "")
    with open_store(store_url) as store:
        stored = query_columns(
            store,
            "SELECT pid, countIf(kind = 'kernel') AS kernels, uniqExact(correlation) AS ids, sum(duration_ns) AS ns, "
            "countIf(launch_probed) AS probed, min(issue_latency_ns) AS least, groupUniqArray(name) AS names "
            "FROM kernel_events GROUP BY pid, rank ORDER BY rank",
        )
    assert stored["pid"].tolist() == job.pids
    for number, pid in enumerate(job.pids):
        ops, names = fakegpu.ops_log(log, pid)
        assert stored["kernels"][number] == launches + collectives == int((ops["kind"] == 1).sum())
        assert stored["ids"][number] == len(ops)
        assert stored["ns"][number] == int((ops["end_ns"] - ops["start_ns"]).sum())
        # A thread that loses its core between the probe and CUPTI's note of the same call: they are not seen as one.
        assert 0.99 * len(ops) < stored["probed"][number] <= len(ops)
        assert stored["least"][number] >= 0
        assert sorted(stored["names"][number]) == sorted({names[name - 1] if name else "" for name in ops["name"]})


def test_steps_of_the_gpus_are_the_timeline_s(store_url: str, tmp_path: Path) -> None:
    """Busy, exposed and idle time of every step against what the fake GPU says that ran, to the nanosecond."""
    log = tmp_path / "ops"
    with fakegpu.Job(2, ["--steps", "100000"], {"FAKEGPU_OPS_LOG": str(log)}, cupti=True) as job:
        wait_for_cuda(job.pids)
        tracer = Tracer(open_store(store_url), Options(pids=tuple(job.pids)))
        tracer.start()
        try:
            deadline = time.monotonic() + 60
            while not tracer.done() and time.monotonic() < deadline:
                tracer.poll()
                time.sleep(0.02)
                # Of the first seconds GPU times are not known.
                if all(member.steps >= 150 for member in tracer.live()):
                    job.send_signal(signal.SIGTERM)
        finally:
            tracer.stop()
        assert job.wait(10) == [0, 0]
    with open_store(store_url) as store:
        rows = query_columns(
            store,
            "SELECT pid, step, toUnixTimestamp64Nano(ts) - j.offset AS begin, duration_ns, busy_ns, idle_ns,"
            " void_share, exposed_communication_ns AS exposed FROM gpu_steps"
            " CROSS JOIN (SELECT any(mono_offset_ns) AS offset FROM jobs FINAL) AS j ORDER BY pid, step",
        )
    for pid in job.pids:
        ops, names = fakegpu.ops_log(log, pid)
        nccl = np.isin(ops["name"], [n + 1 for n, name in enumerate(names) if name.startswith("ncclDevKernel")])
        other = (ops["kind"] == 1) & ~nccl
        own = rows["pid"] == pid
        assert own.sum() >= 30
        steps = rows["step"][own].astype(int)
        assert steps.tolist() == list(range(steps[0], steps[-1] + 1))
        begin = rows["begin"][own].astype(np.int64)
        edges = np.append(begin, begin[-1] + int(rows["duration_ns"][own][-1]))
        assert np.array_equal(edges[1:-1], (begin + rows["duration_ns"][own])[:-1])

        def covered(chosen: NDArray[np.bool_], ops: Any = ops, edges: Any = edges) -> Any:
            return time_in(union(ops["start_ns"][chosen], ops["end_ns"][chosen]), edges)

        busy = covered(np.ones(len(ops), bool))
        assert rows["busy_ns"][own].tolist() == busy.tolist()
        assert rows["idle_ns"][own].tolist() == (np.diff(edges) - busy).tolist()
        assert rows["exposed"][own].tolist() == (covered(other | nccl) - covered(other)).tolist()
        assert rows["void_share"][own] == pytest.approx(1 - busy / np.diff(edges), abs=1e-6)


def gpu_states(tracer: Tracer) -> list[str]:
    return [rank.state for rank in tracer.view().gpu] or [""]


# ---- how it ends


class Looking(threading.Thread):
    """Watches a program of its own while tests run that take their time as well."""

    def __init__(self, target: Program) -> None:
        super().__init__(daemon=True)
        self.target = target
        self.watch = Watch(target.pid).until_on()
        self.began = time.monotonic()
        self._enough = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._enough.wait(0.01):
            self.watch.poll()

    def end(self) -> None:
        self._enough.set()
        self.join()


@pytest.fixture(scope="module")
def looking() -> Iterator[Looking]:
    with program() as target:
        found = Looking(target)
        yield found
        found.end()


@pytest.mark.usefixtures("looking")  # its time passes meanwhile
def test_argus_is_killed_and_another_comes(tmp_path: Path) -> None:
    """The helper notices by itself that nobody reads any more, and gives all memory back."""
    script = """
        import sys, time
        from argus.cupti.collector import Collector
        collector = Collector(int(sys.argv[1]))
        printed = False
        while True:
            collector.poll(time.monotonic())
            if collector.state == "on" and not printed:
                print("on", flush=True)
                printed = True
            time.sleep(0.02)
    """
    with burst(tmp_path, "--launches", 200_000, "--rate", 10_000, "--hold", 30) as job:
        (pid,) = job.pids
        (tmp_path / "go").touch()
        wait_until(lambda: bool(cupti.helper_mapping(pid)), what="the helper")
        command = [sys.executable, "-c", textwrap.dedent(script), str(pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as argus:
            assert argus.stdout
            assert argus.stdout.readline() == "on\n"
            argus.kill()
        killed = time.monotonic()
        assert state_of(pid) == shared.State.ON
        assert status_kib(pid, "RssShmem") > 32 << 10
        wait_until(lambda: state_of(pid) != shared.State.ON, 11.5, "the helper to give up")
        assert time.monotonic() - killed > 8
        wait_until(lambda: status_kib(pid, "RssShmem") < 1024, 1, "the memory")
        watch = Watch(pid).until_on()
        before = len(watch.gpu)
        watch.until(lambda: len(watch.gpu) > before + 1000, 5).stop()
        assert job.poll() == [None]
        kernels = watch.kernels[np.argsort(watch.kernels["correlation"])]
        assert (np.diff(kernels["grid"][:, 0].astype(np.int64)) % 1000 == 1).all(), "a gap"
        assert watch.losses() == {}


def test_it_stays_on_while_argus_looks(looking: Looking) -> None:
    """For longer than a helper waits for an Argus that gives no sign of life."""
    wait_until(lambda: time.monotonic() > looking.began + 11, 12)
    looking.target.ask("launch 100")
    looking.end()
    watch = looking.watch.stop()
    assert (len(watch.kernels), watch.counter("cupti_interruptions"), watch.losses()) == (100, 0, {})


def test_another_argus_comes_at_once_after_a_kill(tmp_path: Path) -> None:
    with program() as target:
        first = Watch(target.pid).until_on()
        target.ask("launch 100")
        first.collector.close()  # as a kill does: no word to the helper
        second = Watch(target.pid).until_on()
        target.ask("launch 50")
        second.stop()
        assert len(second.kernels) == 50


def test_the_target_is_killed(tmp_path: Path) -> None:
    """What CUPTI had written is taken from buffers that were never returned."""
    with burst(tmp_path, "--launches", 10_000_000, "--rate", 20_000, FAKEGPU_CUPTI_RESERVE="1") as job:
        watch = Watch(job.pids[0], flush_ms=60_000).until_on()
        (tmp_path / "go").touch()
        watch.until(lambda: len(watch.gpu) > 10_000)
        came = len(watch.gpu)
        time.sleep(0.1)
        job.kill()
        watch.until(lambda: watch.collector.stopped or watch.collector.state == CollectorState.OFF, 3)
    assert watch.collector.text == "off: the process ended"
    assert watch.counter("cupti_records_salvaged") > 0
    assert watch.counter("cupti_buffers_unfinished") > 0
    assert set(watch.losses()) <= {"cupti_buffers_unfinished", "cupti_records_unfinished"}
    kernels = watch.kernels[np.argsort(watch.kernels["correlation"])]
    assert len(kernels) > came + 1000
    # The longest kernels were still running; of those before there is each one.
    steady = kernels[: -8 * 1024]
    assert (np.diff(steady["grid"][:, 0].astype(np.int64)) % 1000 == 1).all(), "a gap"
    names = np.array(watch.collector.names)[steady["name"]]
    assert (names == np.char.add("burst_kernel_", ((steady["grid"][:, 0] - 1) % 8).astype(str))).mean() > 0.99


def test_a_buffer_that_was_used_before_holds_nothing_of_it() -> None:
    """Else the records of a killed process would come twice."""
    with program() as target:
        watch = Watch(target.pid, api=False, buffers=1).until_on()
        target.ask("launch 500")
        watch.until(lambda: len(watch.kernels) == 500)
        target.ask("launch 20")
        time.sleep(0.05)  # for the fake to write the records
        target.kill()
        watch.until_text("off: the process ended", 3)
    assert len(watch.kernels) == 520
    assert len(np.unique(watch.kernels["correlation"])) == len(watch.kernels)


def test_the_target_ends_with_records_that_were_not_flushed(tmp_path: Path) -> None:
    with burst(tmp_path, "--launches", 1009) as job:
        watch = Watch(job.pids[0], flush_ms=3_600_000).until_on()
        (tmp_path / "go").touch()
        watch.until(lambda: watch.collector.state == CollectorState.OFF)
        assert job.wait(5) == [0]
    assert watch.collector.text == "off: the process ended"
    assert (len(watch.kernels), watch.losses()) == (1009, {})
    assert watch.counter("cupti_records_salvaged") == 0


@pytest.mark.parametrize(("gives_back", "stopped"), [(True, False), (False, False), (True, True)])
def test_the_target_ends_while_argus_reads_a_buffer(gives_back: bool, stopped: bool) -> None:
    """The names that it points at are the process's: they are read before it is gone, unless Argus ends there."""
    with program() as target:
        watch = Watch(target.pid, flush_ms=3_600_000 if stopped else 50).until_on()
        claim = watch.collector.buffers.claim
        assert claim
        ended_after = -1.0

        def claimed_as_it_ends(address: int) -> int:
            nonlocal ended_after
            taken = claim(address)
            if taken and ended_after < 0:
                began = time.monotonic()
                target.send("exit")
                if gives_back:
                    time.sleep(0.5)
                else:
                    target.process.wait(5)
                ended_after = time.monotonic() - began
            return taken

        watch.collector.buffers.claim = claimed_as_it_ends
        target.ask("launch 100")
        if stopped:
            watch.stop()
        watch.until(lambda: watch.collector.state == CollectorState.OFF)
    if gives_back:
        assert (len(watch.kernels), watch.losses()) == (100, {})
    else:
        assert 0.5 < ended_after < 3


def test_the_target_ends_while_its_buffers_are_full_and_nobody_reads(tmp_path: Path) -> None:
    launches = 30_011
    with burst(tmp_path, "--launches", launches) as job:
        watch = Watch(job.pids[0], api=False, **SMALL).until_on()
        (tmp_path / "go").touch()
        assert job.wait(15) == [0]
        ended_ns = time.monotonic_ns()
        watch.until(lambda: watch.collector.state == CollectorState.OFF)
    assert ended_ns - result_of(tmp_path)["end_ns"] < 3e9, "the end was held up"
    assert watch.collector.text == "off: the process ended"
    assert 0 < len(watch.kernels) <= 2 * 65536 / 216
    assert len(watch.gpu) + len(watch.host) + watch.counter("cupti_records_dropped") == launches + 4


def test_the_target_is_stopped_for_a_while(tmp_path: Path) -> None:
    with burst(tmp_path, "--launches", 200_000, "--rate", 20_000, "--hold", 30) as job:
        (pid,) = job.pids
        (tmp_path / "go").touch()
        wait_until(lambda: bool(cupti.helper_mapping(pid) and threads_named(pid, "argus-cupti")), what="the helper")
        os.kill(pid, signal.SIGSTOP)
        watch = Watch(pid).until_text("failed: the helper does not answer")
        os.kill(pid, signal.SIGCONT)
        watch.until_on()
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        watch.until(lambda: time.monotonic() > stopped_at + 1)
        os.kill(pid, signal.SIGCONT)
        before = len(watch.gpu)
        watch.until(lambda: len(watch.gpu) > before + 20_000).stop()
        assert watch.collector.text == "off"
        kernels = watch.kernels[np.argsort(watch.kernels["correlation"])]
        assert (np.diff(kernels["grid"][:, 0].astype(np.int64)) % 1000 == 1).all(), "a gap"
        assert watch.losses() == {}


def test_a_fork_runs_on_without_the_memory_and_the_parent_is_recorded(tmp_path: Path) -> None:
    with program() as target:
        watch = Watch(target.pid).until_on()
        target.ask("launch 100")
        child = int(target.ask("fork 1"))
        assert cupti.helper_mapping(child) == ""
        other = Watch(child)
        other.poll()
        assert other.collector.text.startswith("waiting: the process is not armed")
        target.ask("launch 100")
        assert target.ask("reap") == "7", "the child did not end as it should"
        target.ask("launch 100")
        watch.stop()
        other.collector.close()
    assert (len(watch.kernels), watch.losses()) == (300, {})


def test_a_child_that_was_cloned_ends_as_it_should(tmp_path: Path) -> None:
    """It has what the helper keeps of the memory, and not the memory: its end was a fault."""
    with program() as target:
        watch = Watch(target.pid).until_on()
        target.ask("launch 100")
        target.ask("clone")
        assert target.ask("reap") == "7", "the child did not end as it should"
        target.ask("launch 100")
        watch.stop()
    assert (len(watch.kernels), watch.losses()) == (200, {})


def test_a_target_that_replaces_itself_is_found_again(tmp_path: Path) -> None:
    with program() as target:
        watch = Watch(target.pid).until_on()
        target.ask("launch 100")
        target.ask("sleep 0.2")  # for the fake to write the records
        assert target.ask("exec") == "ready"
        watch.until(lambda: watch.collector.stopped or watch.collector.state == CollectorState.OFF)
        assert watch.collector.text == "off: the process runs another program now (exec)"
        again = Watch(target.pid).until_on()
        target.ask("launch 50")
        again.stop()
    # Exec calls no exit handlers: these lay in a buffer that was never returned.
    assert len(watch.kernels) == 100
    assert (len(again.kernels), again.losses()) == (50, {})


def test_two_at_once(tmp_path: Path) -> None:
    with program() as target:
        first = Watch(target.pid).until_on()
        second = Watch(target.pid).until_text("ignored: another Argus", 3)
        assert second.collector.text == f"ignored: another Argus (PID {os.getpid()}) traces it"
        target.ask("launch 100")
        first.stop()
        assert len(first.kernels) == 100
        third = Watch(target.pid).until_on()
        target.ask("launch 10")
        third.stop()
        assert len(third.kernels) == 10


# ---- why it is not on


def test_another_profiler_holds_cupti() -> None:
    with program(FAKEGPU_CUPTI_BUSY="1") as target:
        watch = Watch(target.pid).until_text("ignored", 3)
        assert watch.collector.text == "ignored: another profiler (nsys, ncu, …) holds CUPTI"
        target.ask("launch 100")


def test_a_profiler_of_the_program_s_own_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what it asks for; Argus keeps what it had, and comes back. No buffer is lost by it, however often."""
    monkeypatch.setattr(outside, "AGAIN_S", 0.3)
    with program() as target:
        watch = Watch(target.pid, flush_ms=100, buffers=3, buffer_bytes=1 << 20).until_on()
        for turn in range(4):
            before = len(watch.gpu)
            target.ask("launch 100")
            watch.until(lambda least=before + 100: len(watch.gpu) == least)
            target.ask("launch 7")
            assert target.ask("profile") == "0", turn
            watch.until_text("ignored", 3)
            assert watch.collector.text == "ignored: another profiler (nsys, ncu, …) holds CUPTI"
            target.ask("launch 100")
            assert target.ask("leave") == "0"
            watch.until_on(5)
        before = len(watch.gpu)
        target.send("launch 10000")
        watch.until(lambda: len(watch.gpu) >= before + 10_000)
        target.answer()
        watch.stop()
        assert watch.counter("cupti_interruptions") == 4
        assert watch.counter("cupti_buffers_refused") == 0
    assert 10_400 <= len(watch.kernels) <= 10_428
    assert len(np.unique(watch.kernels["correlation"])) == len(watch.kernels)


def test_a_version_that_nobody_knows() -> None:
    with program(FAKEGPU_CUPTI_VERSION="140000") as target:
        watch = Watch(target.pid)
        watch.until(lambda: watch.collector.state != CollectorState.WAITING, 3)
        assert watch.collector.text.startswith("off: CUPTI 14.0 is newer than this Argus knows")
        target.ask("launch 100")


def test_there_is_no_cupti(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "_SYSTEM", ())
    for name in ("libcuda.so.1", "libcudart.so.13"):
        shutil.copy(fakegpu.BUILD / name, tmp_path)
    for name in ("libcupti.so.13", "libcupti.so.12"):  # the system's, if it has one, is not looked for then
        (tmp_path / name).touch()
    with program(FAKEGPU_BUILD=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path)) as target:
        watch = Watch(target.pid).until_text("failed", 3)
        assert "no libcupti.so.13 or .12 found" in watch.collector.text
        assert "pip install nvidia-cuda-cupti" in watch.collector.text
        target.ask("launch 100")


@pytest.mark.parametrize(
    "function",
    ["cuptiGetVersion", "cuptiSubscribe", "cuptiActivityRegisterTimestampCallback", "cuptiActivityRegisterCallbacks",
     "cuptiActivityEnable"],
)  # fmt: skip
def test_a_function_of_cupti_that_fails(function: str) -> None:
    with program(FAKEGPU_CUPTI_FAIL=f"{function}:15") as target:
        watch = Watch(target.pid).until_text("failed", 3)
        assert watch.collector.text.startswith(f"failed: {function}: ")
        assert watch.collector.text.endswith("(15)")
        target.ask("launch 100")


def test_a_flush_that_fails_hides_no_loss() -> None:
    """What CUPTI never gives back is counted."""
    with program(FAKEGPU_CUPTI_FAIL="cuptiActivityFlushAll:999") as target:
        watch = Watch(target.pid, api=False).until_on()
        target.ask("launch 100")
        target.ask("sleep 0.2")  # for the fake to write the records
        watch.stop()
    assert len(watch.kernels) == 0
    assert watch.counter("cupti_buffers_unfinished") == 1
    # The last words of a record may be zeros, and look as if nothing had been written there.
    assert 99 * 216 < watch.losses()["cupti_bytes_unknown"] <= 101 * 216


# ---- nothing is left behind


def test_fifty_times_on_and_off_leave_nothing_behind() -> None:
    # Threads that allocate at the same moment make glibc reserve another arena: 64 MiB of addresses, whoever they are.
    with program(MALLOC_ARENA_MAX="1") as target:
        own, theirs = os.getpid(), target.pid

        def once() -> int:
            watch = Watch(theirs).until_on()
            target.ask("launch 20")
            watch.stop()
            assert (len(watch.kernels), watch.collector.text) == (20, "off")
            return len(watch.kernels)

        def usage(pid: int) -> tuple[int, int, int]:
            mappings = Path(f"/proc/{pid}/maps").read_text().count("argus-cupti")
            return descriptors(pid), mappings, status_kib(pid, "Threads")

        for _ in range(3):
            once()
        gc.collect()  # what tests before this one left in cycles has descriptors, which would go some time
        before = [usage(pid) for pid in (own, theirs)]
        sizes = [status_kib(pid, "VmRSS") for pid in (own, theirs)]
        virtual = status_kib(theirs, "VmSize")
        for _ in range(50):
            once()
        gc.collect()
        assert [usage(pid) for pid in (own, theirs)] == before
        assert status_kib(own, "VmRSS") - sizes[0] < 4096
        assert status_kib(theirs, "VmRSS") - sizes[1] < 1024
        assert status_kib(theirs, "VmSize") - virtual < 1024
        assert status_kib(theirs, "RssShmem") < 512


def test_on_takes_its_memory_at_once_and_off_gives_it_back() -> None:
    with program() as target:
        assert status_kib(target.pid, "RssShmem") <= 64
        watch = Watch(target.pid, buffers=8, buffer_bytes=1 << 20).until_on()
        assert status_kib(target.pid, "RssShmem") >= 8 << 10
        watch.stop()
        assert status_kib(target.pid, "RssShmem") < 512


@pytest.mark.alone
def test_off_means_off() -> None:
    """After it was on, launches cost what they cost where CUPTI was on without Argus, and the helper's thread sleeps.

    CUPTI itself stays attached until cuptiFinalize, and the fake one costs 0.13 us a launch then (a tenth of it)."""

    def ratio(*programs: Program) -> float:
        """Of the best times of the first and of the second. They take turns: what disturbs disturbs both."""
        times = [[int(one.ask("launch 2000")) for one in programs] for _ in range(25)]
        first, second = (min(column) for column in zip(*times, strict=True))
        return first / second

    with program() as target, program() as untouched:
        untouched.ask("record")
        # On one core: two may differ by more than what is measured.
        for one in (target, untouched):
            os.sched_setaffinity(one.pid, {min(os.sched_getaffinity(0))})
        ratios = []
        for _ in range(5):
            watch = Watch(target.pid).until_on()
            target.ask("launch 2000")
            watch.stop()
            ratios.append(ratio(target, untouched))
        assert sorted(ratios)[2] < 1.15, ratios
        asked = requests_of(target.pid)
        target.ask("launch 2000")
        target.ask("fill")
        time.sleep(0.1)
        assert requests_of(target.pid) == asked, "something is recorded still"
        thread = helper_thread(target.pid)
        switches = (thread / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0]
        time.sleep(1)
        assert (thread / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0] == switches


def test_a_share_of_the_time_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds are on in the first quarter of each period of the clock, and off in the rest."""
    period_ms, on_ms = 2_000, 500
    monkeypatch.setattr(outside, "PERIOD_MS", period_ms)
    monkeypatch.setattr(outside.CuptiOptions, "on_ms", on_ms)
    with burst(tmp_path, "--launches", 12_000, "--rate", 2_000, "--hold", 30) as job:
        watch = Watch(job.pids[0], share=0.25, flush_ms=100).until_on()
        assert watch.collector.state == CollectorState.ON
        (tmp_path / "go").touch()
        watch.until(written(tmp_path), 20).stop()
    phase_ms = watch.kernels["start_ns"] // 1_000_000 % period_ms
    # The helper looks every 100 ms.
    assert phase_ms.max() < on_ms + 250, "recorded in a pause"
    assert 0.1 < len(phase_ms) / 12_000 < 0.45
    periods = np.unique(watch.kernels["start_ns"] // (period_ms * 1_000_000))
    assert len(periods) >= 3, "it comes back after each pause"
    assert not watch.losses()
