"""What a GPU record costs the traced process: Argus's helper against a Python callback (cupti-python's).

A Python program has kernels of 300 names launched by a C thread (cupti.c), while its main thread sleeps or counts as
fast as it can. Kernel records go to Argus's helper, which a collector in this process reads, or to a C client of CUPTI
that does nothing with them: what the first costs beyond the second is Argus's.

Without a GPU the fake GPU plays CUDA and CUPTI. It must not be used with cupti-python (its licence), so the reference
is then what was measured of cupti-python's callback, which reads start, end and name of each record: 650 ns a record in
the process, 1,000 ns a record that a spinning main thread loses (1 million kernel records, 300 names, on two cores).
With a GPU its callback runs here too, as the reference.

``ratio`` compares the cost in the process, by the helper's own clock: two callbacks. Argus itself walks the records,
at a cost that stands below ("CPU of the collector"). ``ratio_main_thread`` compares what the main thread loses: the
time that it waits for locks, the GIL above all, and the whole of that cost, as on a machine with no core to spare. What
its rate of counting loses is shown too, but on few cores that is mostly the noise of what else competes for them.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from argus.cupti import build as helper
from argus.cupti.collector import Collector, CollectorState, CuptiOptions
from argus.cupti.decode import decode
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from benches import Result

NAMES = 300
RECORDS = 1_000_000
A_SECOND = {"fake": 300_000, "real": 200_000}
PYTHON_NS = 650.0
"""A record in cupti-python's callback: process CPU time, objects made and three attributes read."""
PYTHON_MAIN_NS = 1000.0
"""What a main thread that spins loses for each record."""

ROOT = Path(__file__).resolve().parents[2]
FAKEGPU = Path(os.environ.get("FAKEGPU_BUILD", ROOT / "build" / "fakegpu"))

TARGET = """
import ctypes as C, json, sys, time
load = C.CDLL(sys.argv[1])
if sys.argv[3]: C.CDLL(sys.argv[3])  # the fake one: no other must be found
load.begin.argtypes = [C.c_long, C.c_long]
finished = C.c_int.in_dll(load, "finished")
result = load.prepare(int(sys.argv[2]))
print(json.dumps({"result": result}), flush=True)
seen = [0, 0]
def main_thread():
    "Time run, and waited for a core."
    return map(int, open("/proc/thread-self/schedstat").read().split()[:2])
def completed(activities):
    for activity in activities:
        seen[0] += 1
        seen[1] += activity.end - activity.start + len(activity.name)
for line in sys.stdin:
    word, *arguments = line.split()
    answer = {}
    if word == "run":
        count, rate, spin = map(int, arguments)
        ran, waited = main_thread()
        began = time.monotonic_ns()
        assert load.begin(count, rate) == 0
        spins = 0
        if spin:
            while not finished.value:
                for _ in range(200): spins += 1
        spin_ns = time.monotonic_ns() - began
        now_ran, now_waited = main_thread()
        blocked_ns = spin_ns - (now_ran - ran) - (now_waited - waited)
        load.end()
        answer = {"spins": spins, "spin_ns": spin_ns, "blocked_ns": blocked_ns}
    elif word == "cpu":
        answer = {"cpu_ns": time.process_time_ns()}
    elif word == "null":
        answer = {"result": load.null_client(arguments[0].encode(), int(arguments[1]), int(arguments[2]))}
    elif word == "python":
        from cupti import cupti
        if int(arguments[0]):
            cupti.activity_register_callbacks(lambda: (1 << 20, 0), completed)
            cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
        else:
            cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL)
            cupti.activity_flush_all(1)
        answer = {"records": seen[0]}
    print(json.dumps(answer), flush=True)
"""


class Target:
    """The program that is measured."""

    def __init__(self, load: Path, real: bool) -> None:
        env = {**os.environ, "CUDA_INJECTION64_PATH": str(helper.library()), "FAKEGPU_KERNEL_NS": "*=100"}
        if not real:
            env["LD_LIBRARY_PATH"] = os.pathsep.join([str(FAKEGPU), *filter(None, [env.get("LD_LIBRARY_PATH")])])
        cupti = "" if real else str(FAKEGPU / "libcupti.so.13")
        self.process = subprocess.Popen(
            [sys.executable, "-c", TARGET, str(load), str(NAMES), cupti],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ArgusError(f"the bench's target ended ({self.process.wait()})")
        found: dict[str, Any] = json.loads(line)
        if found.get("result"):
            raise ArgusError(f"the bench's target: error {found['result']}", "", EXIT_UNAVAILABLE)
        return found

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def ask(self, *words: object) -> dict[str, Any]:
        self.send(*words)
        return self.answer()

    def answered(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def helper_cpu_ns(self) -> int:
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            if (task / "comm").read_text().startswith("argus-cupti"):
                return int((task / "schedstat").read_text().split()[0])
        raise ArgusError("the helper is not in the bench's target")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def run(rounds: int) -> Result:
    if helper.main():  # it measures the helper as its source is now
        raise ArgusError("the CUPTI helper does not compile", "", EXIT_UNAVAILABLE)
    real = Path("/dev/nvidiactl").exists()
    if not real and not (FAKEGPU / "libcupti.so.13").exists():
        raise ArgusError(f"no fake GPU in {FAKEGPU}", "Build it: make -C tests/fakegpu", EXIT_UNAVAILABLE)
    with tempfile.TemporaryDirectory() as folder:
        load = Path(folder) / "load.so"
        try:
            subprocess.run(
                ["gcc", "-O2", "-shared", "-fPIC", "-o", load, Path(__file__).with_suffix(".c"), "-ldl", "-lpthread"],
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as reason:
            raise ArgusError(f"the bench's target does not compile: {reason}") from reason
        target = Target(load, real)
        try:
            target.answer()
            return _measure(target, rounds, real)
        finally:
            target.close()


class _Ours:
    """A run with Argus's helper, and what the outside spent on it."""

    def __init__(self, target: Target, *words: object) -> None:
        collector = Collector(target.pid, CuptiOptions(api=False, buffers=64))
        self.outside_ns = 0

        def poll() -> None:
            before = time.thread_time_ns()
            collector.poll(time.monotonic())
            self.outside_ns += time.thread_time_ns() - before

        deadline = time.monotonic() + 10
        while collector.state != CollectorState.ON:
            poll()
            if collector.state not in (CollectorState.WAITING, CollectorState.ON) or time.monotonic() > deadline:
                raise ArgusError(f"CUPTI in the bench's target is {collector.text}", "", EXIT_UNAVAILABLE)
            time.sleep(0.005)
        self.outside_ns = 0
        cpu_before = target.ask("cpu")["cpu_ns"]
        thread_before = target.helper_cpu_ns()
        target.send(*words)
        while not target.answered():
            poll()
            time.sleep(0.02)
        self.result = target.answer()
        collector.begin_stop()
        while not collector.stopped:
            poll()
            time.sleep(0.005)
        self.thread_ns = target.helper_cpu_ns() - thread_before
        self.result["cpu_ns"] = target.ask("cpu")["cpu_ns"] - cpu_before
        self.records = collector.records
        self.counters = {name: value for name, (value, _) in collector.counters().items()}
        self.lost = {name: value for name, (value, loss) in collector.counters().items() if loss and value}
        self.layouts = collector.buffers.layouts


def _null(target: Target, cupti: str, real: bool, *words: object) -> dict[str, Any]:
    before = target.ask("cpu")["cpu_ns"]
    target.ask("null", cupti, 1, int(not real))
    result = target.ask(*words)
    target.ask("null", cupti, 0, int(not real))
    result["cpu_ns"] = target.ask("cpu")["cpu_ns"] - before
    return result


def _python(target: Target, *words: object) -> dict[str, Any]:
    before = target.ask("python", 1)["records"]
    cpu_before = target.ask("cpu")["cpu_ns"]
    result = target.ask(*words)
    result["records"] = target.ask("python", 0)["records"] - before
    result["cpu_ns"] = target.ask("cpu")["cpu_ns"] - cpu_before
    return result


def _lost_ns(ours: dict[str, Any], idle: dict[str, Any], records: int) -> float:
    """Time that the counting thread lost for each record, by how fast it counted."""
    share = 1 - (ours["spins"] / ours["spin_ns"]) / (idle["spins"] / idle["spin_ns"])
    return share * float(ours["spin_ns"]) / records


def _measure(target: Target, rounds: int, real: bool) -> Result:
    rate = A_SECOND["real" if real else "fake"]
    asleep, counting = ("run", RECORDS, rate, 0), ("run", RECORDS, rate, 1)
    own, thread, process, blocked, counted, outside = (
        "Argus: callbacks in the process",
        "Argus: CPU of the helper's thread, with CUPTI's flushes",
        "Argus: CPU of the process beyond an idle client",
        "Argus: main thread blocked beyond an idle client",
        "Argus: main thread's counting lost",
        "Argus, outside: CPU of the collector",
    )
    python_process, python_counted = (
        "cupti-python: CPU of the process beyond an idle client",
        "cupti-python: main thread's counting lost",
    )
    rows: dict[str, list[float]] = {name: [] for name in (own, thread, process, blocked, counted, outside)}
    if real:
        rows |= {python_process: [], python_counted: []}
    warm_up = _Ours(target, "run", 10_000, 0, 0)
    library = _library(target)
    for _ in range(rounds):
        idle = _null(target, library, real, *asleep)
        ours = _Ours(target, *asleep)
        if ours.lost or ours.records < RECORDS:
            raise ArgusError(f"the bench lost records: {ours.records} of {RECORDS}, {ours.lost}")
        spent = ours.counters["cupti_callback_ns"] + ours.counters["cupti_walk_ns"]
        rows[own].append(spent / ours.records)
        rows[thread].append(ours.thread_ns / ours.records)
        rows[process].append((ours.result["cpu_ns"] - idle["cpu_ns"]) / ours.records)
        rows[outside].append(ours.outside_ns / ours.records)
        spun_idle = _null(target, library, real, *counting)
        spun = _Ours(target, *counting)
        rows[blocked].append((spun.result["blocked_ns"] - spun_idle["blocked_ns"]) / spun.records)
        rows[counted].append(_lost_ns(spun.result, spun_idle, spun.records))
        if real:
            theirs = _python(target, *asleep)
            rows[python_process].append((theirs["cpu_ns"] - idle["cpu_ns"]) / theirs["records"])
            theirs = _python(target, *counting)
            rows[python_counted].append(_lost_ns(theirs, spun_idle, theirs["records"]))
    cost = statistics.median(rows[own])
    reference = statistics.median(rows[python_process]) if real else PYTHON_NS
    reference_main = statistics.median(rows[python_counted]) if real else PYTHON_MAIN_NS
    return Result(
        f"{RECORDS:,} kernel records of {NAMES} names, {rate:,} a second, {'a GPU' if real else 'the fake GPU'}",
        "ns a record",
        rows,
        reference / cost,
        {
            "ratio_main_thread": reference_main / (cost + max(statistics.median(rows[blocked]), 0)),
            "python_callback_ns": reference,
            "python_main_thread_ns": reference_main,
            "collector_records_per_s": 1e9 / statistics.median(rows[outside]),
            "decode_ns": _decode_ns(warm_up),
        },
    )


def _library(target: Target) -> str:
    for line in Path(f"/proc/{target.pid}/maps").read_text().splitlines():
        if "libcupti.so" in line:
            return line.split(None, 5)[5]
    raise ArgusError("no CUPTI in the bench's target")


def _decode_ns(ours: _Ours) -> float:
    """The decoding of one buffer of kernel records, again and again."""
    known = ours.layouts
    assert known is not None
    kind = known.kind("CONCURRENT_KERNEL")
    dtype = known.dtype(kind)
    made = np.zeros((1 << 20) // dtype.itemsize, dtype)
    made["kind"], made["start"], made["end"] = kind, time.monotonic_ns(), time.monotonic_ns() + 1000
    made["name"] = np.arange(len(made)) % NAMES + 1
    buffer = made.view("u1")
    index = (np.arange(len(made)) * dtype.itemsize).astype(np.uint32)
    spent = []
    for _ in range(50):
        began = time.perf_counter_ns()
        decode(buffer, index, known, 1, True, {}, names=NAMES + 1)
        spent.append((time.perf_counter_ns() - began) / len(made))
    return statistics.median(spent)
