"""Starting: `argus trace --pid P` on a PyTorch process, beside py-spy; and both sets of BPF programs loaded, with what
was kept against bcc compiling in the same process.

The trace: seconds from the exec of ``argus`` until there is a line on the terminal, probes are attached, stacks are
sampled, the first rows are stored, and the running diagnosis has its first verdict (provisional), by Argus's own
``--debug`` log, and the CPU time of its process until then (without the store's engine). "Cold": the symbols of all
libraries are read; BPF programs are compiled and the store has its tables. "Warm": with what the start before has kept.
py-spy: seconds until ``py-spy record`` has written its file, less the second that it samples. All on the same process,
in turns. ``ARGUS_BENCH_BEFORE`` names an older tree with a ``.venv`` of its own: the same of it, by its lines. The
job is a loop on one thread that rests half of its time. Without PyTorch in ``.venv`` this part is left out.

The programs: each turn is a process of its own, timed from before it imports anything of Argus until programs are
loaded (nothing is attached). "Kept" is a start that finds its programs on disk, "compiled" one that does not and has a
process of its own compile them, "bcc" one in which bcc compiles the same sources for the tracer itself, without loading
them. The ratio is of seconds, bcc against kept. Memory is that of the tracer alone, without its rings, which all of
them would map.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benches import Result

_PROGRAM = """
import json, sys, time
begin, cpu = time.monotonic(), time.process_time()
from argus.capture.kernel import bcc, compile
from argus.capture import probes as bpf, sampler as stacks
if sys.argv[1] == "bcc":
    def with_bcc(text, flags, what):
        made = bcc.load().BPF(text=text.encode(), cflags=[f"-I{bpf.resource_dir('bpf')}", *flags])
        raise StopIteration(made)
    bpf.module = stacks.module = with_bcc
    kept = []
    for probes in (bpf.Probes, stacks.StackProbes):
        try:
            probes()
        except StopIteration as made:
            kept.append(made)
else:
    kept = bpf.Probes(), stacks.StackProbes()
took = time.monotonic() - begin
with open("/proc/self/status") as file:
    resident = sum(int(line.split()[1]) for line in file if line.startswith("Rss"))
with open("/proc/self/smaps") as file:
    rings = 0
    ours = False
    for line in file:
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            ours = "bpf-map" in line
        elif ours and line.startswith("Rss:"):
            rings += int(line.split()[1])
print(json.dumps([took, (resident - rings) / 1024]))
"""


_JOB = """
import time
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(64, 64), torch.randint(0, 8, (64,))
print("runs", flush=True)
while True:
    begin = time.monotonic()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    time.sleep(time.monotonic() - begin)
"""
_MARKS = {
    "programs loaded": "start: programs loaded",
    "store open": "start: store open",
    "probes attached": "start: probes attached",
    "stacks sampled": "start: stacks sampled",
    "first row stored": "stored: first rows",
    "first step stored": "stored: first rows of iterations",
    "first verdict": "verdict: ",
}
"""Lines of the debug log, by what they mean."""
_TRACED_S = 12.0
"""The first verdict that is not provisional comes after some ten seconds."""
_SPIED_S = 1


@contextlib.contextmanager
def _job() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", _JOB], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def _trace(pid: int, cache: Path, scratch: Path) -> dict[str, float]:
    """Seconds from the start of ``argus trace`` to the events in its log."""
    logs = scratch / "argus"
    shutil.rmtree(logs, ignore_errors=True)
    words = ["trace", "--debug", "--plain", "--pid", str(pid), "--duration", str(_TRACED_S)]
    environment = {
        **os.environ, "ARGUS_CACHE_DIR": str(cache), "XDG_STATE_HOME": str(scratch),
        "ARGUS_STORE": f"chdb://{scratch}/store",
    }  # fmt: skip
    begin = time.monotonic()
    with subprocess.Popen(
        [Path(sys.executable).parent / "argus", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as tracing:  # fmt: skip
        assert tracing.stderr is not None
        next(line for line in tracing.stderr if "attaching" in line)
        found = {"first line": time.monotonic() - begin}
        tracing.stderr.read()
    (log,) = logs.glob("debug-*.log")
    for line in log.read_text().splitlines():
        at, cpu, text = line.split(" ", 2)
        for name, mark in _MARKS.items():
            if text.startswith(mark):
                found.setdefault(name, float(at) - begin)
                found.setdefault(f"{name}, CPU", float(cpu))
    return found


def _trace_before(tree: Path, pid: int, scratch: Path) -> dict[str, float]:
    """The same of an older tree: by its lines."""
    begin = time.monotonic()
    found = {}
    with subprocess.Popen(
        [tree / ".venv/bin/argus", "trace", "--plain", "--pid", str(pid), "--duration", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "ARGUS_STORE": f"chdb://{scratch}/before"},
    ) as tracing:  # fmt: skip
        assert tracing.stdout is not None
        for line in tracing.stdout:
            found.setdefault("first line", time.monotonic() - begin)
            if line.startswith("job "):
                found.setdefault("probes attached", time.monotonic() - begin)
    return found


def _spy(pid: int, scratch: Path) -> float:
    """Seconds that ``py-spy record`` takes beside those in which it samples."""
    program = Path(sys.executable).parent / "py-spy"
    begin = time.monotonic()
    subprocess.run(
        [program, "record", "--pid", str(pid), "--duration", str(_SPIED_S), "--format", "raw", "-o", scratch / "spy"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.monotonic() - begin - _SPIED_S


def _attach(rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by what was measured."""
    rows: dict[str, list[float]] = {}
    before = os.environ.get("ARGUS_BENCH_BEFORE")
    with _job() as pid, tempfile.TemporaryDirectory() as folder:
        scratch, cache = Path(folder), Path(folder) / "cache"
        for turn in range(rounds + 1):
            shutil.rmtree(cache / "symbols", ignore_errors=True)
            found = {f"trace, cold: {name}": took for name, took in _trace(pid, cache, scratch).items()}
            found |= {f"trace, warm: {name}": took for name, took in _trace(pid, cache, scratch).items()}
            if before:
                timed = _trace_before(Path(before), pid, scratch)
                found |= {f"trace, before: {name}": took for name, took in timed.items()}
            found["py-spy record: all but its second"] = _spy(pid, scratch)
            if turn:  # the first makes the store's tables, compiles programs, and reads all files from disk
                for name, took in found.items():
                    rows.setdefault(name, []).append(took)
    return rows


def run(rounds: int) -> Result:
    seconds: dict[str, list[float]] = {"kept": [], "compiled": [], "bcc": []}
    memory: dict[str, list[float]] = {"kept": [], "compiled": [], "bcc": []}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(rounds + 1):
            for name in seconds:
                where = cache if name == "kept" else "off"
                done = subprocess.run(
                    [sys.executable, "-c", _PROGRAM, name], stdout=subprocess.PIPE, text=True, check=True,
                    env={**os.environ, "ARGUS_CACHE_DIR": where},
                )  # fmt: skip
                took, mb = json.loads(done.stdout)
                if turn:  # the first fills the cache, and reads all files from disk
                    seconds[name].append(took)
                    memory[name].append(mb)
    ratio = statistics.median(theirs / ours for theirs, ours in zip(seconds["bcc"], seconds["kept"], strict=True))
    more = {f"MiB, {name}": statistics.median(values) for name, values in memory.items()}
    if importlib.util.find_spec("torch") is not None:
        seconds |= _attach(rounds)
    return Result("start of a tracer until its BPF programs are loaded", "s", seconds, ratio, more)
