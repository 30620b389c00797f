"""Starting: both sets of BPF programs loaded, with what was kept against bcc compiling in the same process.

Each turn is a process of its own, timed from before it imports anything of Argus until programs are loaded (nothing is
attached). "Kept" is a start that finds its programs on disk, "compiled" one that does not and has a process of its own
compile them, "bcc" one in which bcc compiles the same sources for the tracer itself, without loading them. The ratio is
of seconds, bcc against kept. Memory is that of the tracer alone, without its rings, which all of them would map.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benches import Result

_PROGRAM = """
import json, sys, time
begin, cpu = time.monotonic(), time.process_time()
from argus.capture import bcc, bpf, compile, stacks
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
    return Result("start of a tracer until its BPF programs are loaded", "s", seconds, ratio, more)
