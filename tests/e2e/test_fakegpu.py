"""The fake GPU keeps time as a GPU does: order, overlap, waiting, faults, and no leftovers."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"
sys.path.insert(0, str(FAKEGPU))

from run import Job, build  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.skipif(sys.platform != "linux", reason="futexes and memfd")]

# Every script runs in a process of its own: the libraries read their environment when they are loaded.
PRELUDE = """
import ctypes as C, json, os, time
d = os.environ["FAKEGPU_BUILD"] + "/"
cuda = C.CDLL(d + "libcuda.so.1", mode=C.RTLD_GLOBAL)
rt = C.CDLL(d + "libcudart.so.13")
nccl = C.CDLL(d + "libnccl.so.2")
P, U, L = C.c_void_p, C.c_uint, C.c_uint64
def ok(result): assert result == 0, result
assert rt.cudaSetDevice(0) == 0
module, function = P(), P()
ok(cuda.cuModuleLoadData(C.byref(module), b"image"))
ok(cuda.cuModuleGetFunction(C.byref(function), module, b"a_kernel"))
def stream(flags=1):
    s = P(); ok(rt.cudaStreamCreateWithFlags(C.byref(s), U(flags))); return s
def event():
    e = P(); ok(rt.cudaEventCreate(C.byref(e))); return e
def launch(s=None):
    return cuda.cuLaunchKernel(function, 7, 5, 3, 32, 2, 1, 0, s, None, None)
def elapsed_us(a, b):
    f = C.c_float(); ok(rt.cudaEventElapsedTime(C.byref(f), a, b)); return f.value * 1000
def record(e, s): ok(rt.cudaEventRecord(e, s))
"""


@pytest.fixture(scope="session")
def fakegpu() -> Path:
    return build()


@pytest.fixture
def script(fakegpu: Path) -> Any:
    def run(body: str, **env: str) -> Any:
        settings = {"FAKEGPU_JITTER": "0", "FAKEGPU_KERNEL_NS": "*=1000000", **env}
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
            env={**os.environ, **settings, "FAKEGPU_BUILD": str(fakegpu)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_no_folder_of_it_passes_for_pytorch() -> None:
    """Tests find out whether PyTorch is there; the fake GPU is on their path, and a folder would be a package."""
    found = importlib.util.find_spec("torch")
    assert found is None or found.origin


def test_kernels_of_a_stream_run_one_after_the_other_and_streams_side_by_side(script):
    one, two = script("""
        s, t = stream(), stream()
        a, b, c, d = event(), event(), event(), event()
        record(a, s); [ok(launch(s)) for _ in range(10)]; record(b, s)
        record(c, t); [ok(launch(t)) for _ in range(10)]; record(d, t)
        ok(rt.cudaDeviceSynchronize())
        print(json.dumps([elapsed_us(a, b), elapsed_us(a, d)]))
    """)
    assert 10_000 <= one < 13_000
    assert 10_000 <= two < 15_000


def test_a_stream_waits_for_an_event_of_another(script):
    waited, query, launched_us = script("""
        s, t = stream(), stream()
        a, b, c = event(), event(), event()
        record(a, s); [ok(launch(s)) for _ in range(20)]; record(b, s)
        ok(rt.cudaStreamWaitEvent(t, b, 0))
        before = time.monotonic(); ok(launch(t)); launched = time.monotonic() - before
        record(c, t)
        query = rt.cudaEventQuery(c)
        ok(rt.cudaEventSynchronize(c))
        print(json.dumps([elapsed_us(a, c), query, launched * 1e6]))
    """)
    assert 21_000 <= waited < 24_000
    assert query == 600
    assert launched_us < 5_000


def test_the_legacy_default_stream_orders_blocking_streams_only(script):
    blocking, free = script("""
        s, t = stream(0), stream(1)
        a, b, c = event(), event(), event()
        record(a, None); [ok(launch(None)) for _ in range(10)]
        ok(launch(s)); record(b, s)
        ok(launch(t)); record(c, t)
        ok(rt.cudaDeviceSynchronize())
        print(json.dumps([elapsed_us(a, b), elapsed_us(a, c)]))
    """)
    assert 11_000 <= blocking < 14_000
    assert free < 5_000


def test_a_full_queue_blocks_the_launch(script):
    first, all_of_them = script(
        """
        s = stream(); start = time.monotonic()
        [ok(launch(s)) for _ in range(1024)]
        first = time.monotonic() - start
        [ok(launch(s)) for _ in range(1024)]
        print(json.dumps([first, time.monotonic() - start]))
        """,
        FAKEGPU_KERNEL_NS="*=200000",
    )
    assert first < 0.15
    assert 0.2 <= all_of_them < 0.4


def test_a_graph_runs_what_was_captured(script):
    (us,) = script("""
        s = stream(); graph, execution = P(), P(); a, b = event(), event()
        ok(rt.cudaStreamBeginCapture(s, 0)); [ok(launch(s)) for _ in range(30)]
        ok(rt.cudaStreamEndCapture(s, C.byref(graph)))
        ok(rt.cudaGraphInstantiate(C.byref(execution), graph, L(0)))
        record(a, s); ok(rt.cudaGraphLaunch(execution, s)); ok(rt.cudaGraphLaunch(execution, s)); record(b, s)
        ok(rt.cudaGraphExecDestroy(execution)); ok(rt.cudaStreamSynchronize(s))
        print(json.dumps([elapsed_us(a, b)]))
    """)
    assert 60_000 <= us < 63_000


def test_nonsense_is_refused(script):
    assert script("""
        p = P()
        print(json.dumps([
            cuda.cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, None, None, None),
            cuda.cuLaunchKernel(function, 1, 1, 1, 1025, 1, 1, 0, None, None, None),
            cuda.cuLaunchKernel(P(12345), 1, 1, 1, 1, 1, 1, 0, None, None, None),
            cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, P(12345), None, None),
            cuda.cuMemFree_v2(L(4096)), rt.cudaStreamSynchronize(P(99)), rt.cudaMalloc(C.byref(p), L(1 << 60)),
            cuda.cuModuleLoad(C.byref(p), b"/nonexistent"), rt.cudaGetLastError(), rt.cudaGetLastError(),
            nccl.ncclAllReduce(None, None, L(1), 7, 0, None, None)]))
    """) == [1, 1, 400, 400, 1, 400, 2, 301, 2, 0, 4]


OBSERVER = """
class Record(C.Structure):
    _fields_ = [("kind", U), ("copy", U), ("name", C.c_char_p), ("called", C.c_int64), ("queued", C.c_int64),
                ("start", C.c_int64), ("end", C.c_int64), ("transfer", C.c_int64), ("correlation", L), ("bytes", L),
                ("device", U), ("stream", U), ("grid", U * 3), ("block", U * 3), ("shared", U), ("graph", U),
                ("node", U)]
class Api(C.Structure):
    _fields_ = [("domain", U), ("name", C.c_char_p), ("correlation", L), ("start", C.c_int64), ("end", C.c_int64),
                ("result", C.c_int)]
OP, API = C.CFUNCTYPE(None, P, C.POINTER(Record)), C.CFUNCTYPE(None, P, C.POINTER(Api))
class Observer(C.Structure):
    _fields_ = [("context", P), ("op", OP), ("enter", API), ("leave", API)]
ops, calls = [], []
def on_op(_, r):
    r = r.contents
    ops.append([r.kind, r.copy, (r.name or b"").decode(), r.end - r.start, r.correlation, r.bytes, list(r.grid),
                r.graph, r.node])
def on_call(_, r):
    r = r.contents; calls.append([r.domain, r.name.decode(), r.correlation, r.end >= r.start, r.result])
watch = Observer(None, OP(on_op), API(), API(on_call))
assert cuda.fakegpu_observe(C.byref(watch)) & 1
assert not cuda.fakegpu_observe(C.byref(watch)) & 1
"""


def test_the_observer_sees_each_operation_once_with_the_id_of_its_call(script):
    ops, calls = script(
        OBSERVER
        + textwrap.dedent("""
        s = stream(); graph, execution = P(), P()
        [ok(launch(s)) for _ in range(3000)]
        ok(rt.cudaMemcpyAsync(P(4096), b"x", L(1000), 1, s))
        ok(rt.cudaStreamBeginCapture(s, 0)); ok(launch(s)); ok(launch(s))
        ok(rt.cudaStreamEndCapture(s, C.byref(graph)))
        ok(rt.cudaGraphInstantiate(C.byref(execution), graph, L(0))); ok(rt.cudaGraphLaunch(execution, s))
        ok(rt.cudaStreamSynchronize(s)); cuda.fakegpu_deliver()
        print(json.dumps([ops, calls]))
        """),
        FAKEGPU_KERNEL_NS="*=1000",
    )
    assert len(ops) == 3003
    assert ops[0][:4] == [1, 0, "a_kernel", 1000]
    assert ops[0][6] == [7, 5, 3]
    launches = [call for call in calls if call[1] == "cuLaunchKernel"]
    assert [op[4] for op in ops[:3000]] == [call[2] for call in launches[:3000]]
    assert ops[3000][:2] == [2, 1]
    assert ops[3000][5] == 1000
    copy = [call for call in calls if "emcpy" in call[1]]
    assert [call[1] for call in copy] == ["cuMemcpyHtoDAsync_v2", "cudaMemcpyAsync"]
    assert {call[2] for call in copy} == {ops[3000][4]}
    assert [op[7:] for op in ops[3001:]] == [[1, 1], [1, 2]]
    assert len({op[4] for op in ops[3001:]}) == 1


# ---- jobs of several processes ----


def train(tmp_path: Path, ranks: int = 4, steps: int = 24, env: dict[str, str] | None = None, *args: str) -> Any:
    """Runs a job and returns its steps by rank, and its call counts."""
    log = tmp_path / "log"
    with Job(ranks, ["--steps", str(steps), "--log", str(log), *args], env=env) as job:
        assert job.wait(60) == [0] * ranks
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_rank: dict[int, list[Any]] = {rank: [] for rank in range(ranks)}
    for line in lines:
        if "step" in line:
            by_rank[line["rank"]].append(line)
    return by_rank, [line["counts"] for line in lines if "counts" in line]


def period_ms(steps: list[Any]) -> float:
    return statistics.median(b["start_ns"] - a["start_ns"] for a, b in itertools.pairwise(steps[1:])) / 1e6


def train_until(tmp_path: Path, expected_ms: float, rel: float, *args: Any, **words: Any) -> Any:
    """As ``train``, up to three times: what else the machine does can only make steps longer."""
    for turn in range(3):
        (tmp_path / str(turn)).mkdir()
        found = train(tmp_path / str(turn), *args, **words)
        if all(period_ms(own) == pytest.approx(expected_ms, rel=rel) for own in found[0].values()):
            break
    return found


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_healthy_job_takes_the_time_of_its_parts(fakegpu, tmp_path, ranks):
    steps, counts = train_until(tmp_path, 36.5, 0.15, ranks, 16)
    assert all(len(own) == 16 for own in steps.values())
    assert period_ms(steps[0]) == pytest.approx(36.5, rel=0.15)
    assert [count.pop("ncclGetUniqueId", 0) for count in counts].count(1) == 1
    assert all(count == counts[0] for count in counts)
    assert counts[0]["ncclAllReduce"] == 16 * 4


@pytest.mark.parametrize(
    ("env", "expected_ms"),
    [
        ({"FAKEGPU_SLOW_RANK": "2", "FAKEGPU_SLOW_FACTOR": "2"}, 71.1),
        ({"FAKEGPU_SLOW_LINK_RANK": "1", "FAKEGPU_SLOW_LINK_FACTOR": "40"}, 97.0),
        ({"FAKEGPU_DATA_STALL_RANK": "3", "FAKEGPU_DATA_STALL_MS": "20"}, 56.0),
        ({"FAKEGPU_JIT_STALL_RANK": "1", "FAKEGPU_JIT_STALL_MS": "40", "FAKEGPU_JIT_STALL_EVERY": "1"}, 70.5),
    ],
)
def test_one_faulty_rank_slows_all(fakegpu, tmp_path, env, expected_ms):
    steps, _ = train_until(tmp_path, expected_ms, 0.12, env=env)
    for own in steps.values():
        assert period_ms(own) == pytest.approx(expected_ms, rel=0.12)


def test_a_fault_starts_after_its_step(fakegpu, tmp_path):
    env = {"FAKEGPU_SLOW_RANK": "0", "FAKEGPU_SLOW_FACTOR": "3", "FAKEGPU_FAULT_FROM_STEP": "12"}
    steps, _ = train(tmp_path, 2, 24, env)
    assert period_ms(steps[1][:12]) < 45
    assert period_ms(steps[1][13:]) > 90


def test_a_fault_is_planted_and_lifted_while_the_job_runs(fakegpu, tmp_path):
    control, log = tmp_path / "control", tmp_path / "log"
    with Job(2, ["--log", str(log)], env={"FAKEGPU_CONTROL": str(control)}) as job:
        time.sleep(0.8)
        control.write_text("# planted\nFAKEGPU_SLOW_RANK=1\nFAKEGPU_SLOW_FACTOR=3\n")
        time.sleep(1.0)
        control.unlink()
        time.sleep(0.8)
        assert job.terminate() == [0, 0]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    own = [line for line in lines if line["rank"] == 0 and "step" in line]
    periods = [(b["start_ns"] - a["start_ns"]) / 1e6 for a, b in itertools.pairwise(own)]
    assert statistics.median(periods[:8]) < 45
    assert statistics.median(periods[-8:]) < 45
    assert sum(period > 90 for period in periods) >= 5
    assert {line["rank"] for line in lines if "counts" in line} == {0, 1}


@pytest.mark.parametrize("setting", [("FAKEGPU_SLOW_RANK", "x"), ("FAKEGPU_JITTER", "-1"), ("FAKEGPU_SLOW_RNAK", "1")])
def test_a_malformed_or_unknown_variable_ends_the_program(fakegpu, setting):
    done = subprocess.run(
        [fakegpu / "fake_train", "--steps", "1"], env=dict([setting]), capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 2
    assert setting[0] in done.stderr


def test_exact_counts(fakegpu, tmp_path):
    go, log = tmp_path / "go", tmp_path / "log"
    with Job(1, ["--exact", "1009", "101", "--go", str(go), "--log", str(log)]) as job:
        time.sleep(0.3)
        assert job.poll() == [None]
        go.touch()
        assert job.wait(20) == [0]
    counts = json.loads(log.read_text())["counts"]
    assert counts["cudaLaunchKernel"] == 1009
    assert counts["ncclAllReduce"] == 101


def cpu_s(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def test_a_killed_rank_leaves_the_others_waiting_idle_and_nothing_behind(fakegpu):
    before = set(os.listdir("/dev/shm"))
    with Job(3, ["--grace", "0.5", "--fork-workers", "2"]) as job:
        time.sleep(0.8)
        os.kill(job.pids[1], signal.SIGKILL)
        time.sleep(0.5)
        used = cpu_s([job.pids[0], job.pids[2]])
        time.sleep(0.5)
        assert job.poll() == [None, -signal.SIGKILL, None]
        assert cpu_s([job.pids[0], job.pids[2]]) - used <= 0.02
        assert job.terminate() == [-signal.SIGALRM, -signal.SIGKILL, -signal.SIGALRM]
        pids = job.pids
    assert set(os.listdir("/dev/shm")) == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_hanging_rank_stops_the_job_at_its_step(fakegpu, tmp_path):
    log = tmp_path / "log"
    env = {"FAKEGPU_HANG_RANK": "1", "FAKEGPU_HANG_STEP": "8"}
    with Job(3, ["--grace", "0.5", "--log", str(log)], env=env) as job:
        time.sleep(1.2)
        assert job.poll() == [None, None, None]
        assert max(json.loads(line)["step"] for line in log.read_text().splitlines()) == 7
        assert job.terminate() == [-signal.SIGALRM, 0, -signal.SIGALRM]


def test_every_export_is_called_by_abi_calls(fakegpu, tmp_path):
    go = tmp_path / "go"
    go.touch()
    done = subprocess.run([fakegpu / "abi_calls", go], capture_output=True, text=True, timeout=30, check=True)
    ready, *lines = done.stdout.splitlines()
    assert ready == "ready"
    calls = [json.loads(line)["call"] for line in lines]
    assert {call for call in calls if calls.count(call) > 1} == {"ncclGetUniqueId"}
    exported: set[str] = set()
    for library in ("libcuda.so.1", "libcudart.so.13", "libnccl.so.2"):
        symbols = subprocess.run(["nm", "-D", "--defined-only", fakegpu / library], capture_output=True, text=True)
        exported |= {line.split()[2] for line in symbols.stdout.splitlines()}
    strings_only = {"cudaGetErrorString", "ncclGetErrorString", "ncclGetLastError"}
    assert {name for name in exported if name.startswith(("cu", "nccl"))} - set(calls) == strings_only


def test_the_static_program_carries_runtime_and_nccl_itself(fakegpu):
    needed = subprocess.run(["readelf", "-d", fakegpu / "fake_train_static"], capture_output=True, text=True).stdout
    assert "libcuda.so.1" in needed
    assert "libcudart" not in needed
    assert "libnccl" not in needed
    symbols = subprocess.run(["nm", fakegpu / "fake_train_static"], capture_output=True, text=True).stdout
    assert " T cudaLaunchKernel\n" in symbols
    assert " W ncclAllReduce\n" in symbols
    with Job(2, ["--steps", "3"], program=fakegpu / "fake_train_static") as job:
        assert job.wait(20) == [0, 0]
