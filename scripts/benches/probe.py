"""What a traced call costs the target: one launch without a probe, with an entry probe, with entry and exit.

A small C program (probe.c) makes calls that do nothing, in batches; between batches the real probes are attached and
taken away, so traced and untraced batches alternate. The reference is a runtime launch traced the plain way, an entry
and an exit probe on both cudaLaunchKernel and the cuLaunchKernel inside it; ours needs no exit. Also measured: how long
attaching and detaching take, and what a probe on a return instruction costs: a function's exits could be seen there.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from argus.capture import prices
from argus.capture.probes import Probes
from argus.capture.process.targets import Target, open_target
from argus.model.errors import ArgusError
from benches import Result

CALLS = 30_000
INSTRUCTIONS = {
    "e": "driver call, entry probe, first instruction emulated",
    "s": "driver call, entry probe, first instruction single-stepped",
    "d": "cuLaunchKernel, entry probe (9 arguments read)",
    "x": "cuStreamSynchronize, entry and exit probe",
    "g": "cublasGemmEx, entry and exit probe",
    "m": "cublasLtMatmul, entry and exit probe (3 descriptors read)",
    "n": "ncclAllReduce that begins with sub rsp, entry probe",
    "r": "cudaLaunchKernel with cuLaunchKernel inside, entry probes",
}
WITH_EXITS = {
    "n": "ncclAllReduce that begins with sub rsp, entry and exit",
    "r": "cudaLaunchKernel with cuLaunchKernel inside, entry and exit",
}


def run(rounds: int) -> Result:
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        # Its name must look like none of the libraries: this is the statically linked case.
        program = Path(folder) / "probe_target"
        try:
            subprocess.run(["gcc", "-O2", "-fcf-protection=none", "-o", program, source], check=True)
        except (OSError, subprocess.CalledProcessError) as reason:
            raise ArgusError(f"the bench's target does not compile: {reason}") from reason
        process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            return _measure(process, rounds)
        finally:
            process.kill()
            process.wait()


def _measure(process: subprocess.Popen[str], rounds: int) -> Result:
    def per_call(kind: str, calls: int = CALLS) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{kind} {calls}\n")
        process.stdin.flush()
        return int(process.stdout.readline()) / calls / 1000

    time.sleep(0.05)
    target: Target = open_target(process.pid)
    rows: dict[str, list[float]] = {"any of them, untraced": []}
    rows.update({name: [] for name in INSTRUCTIONS.values()})
    rows.update({name: [] for name in WITH_EXITS.values()})
    attach_ms, detach_ms = [], []
    with_exits = Probes(launch_durations=True)
    entries = Probes()
    try:
        for probes in (entries, with_exits):
            probes.add_target(process.pid)
        entries.attach_optional("math")
        for _ in range(rounds):
            rows["any of them, untraced"].append(per_call("r", 20 * CALLS))
            began = time.perf_counter()
            attachment = [entries.attach(library, process.pid, timed=False) for library in target.libraries]
            attach_ms.append((time.perf_counter() - began) * 1e3)
            for kind, name in INSTRUCTIONS.items():
                rows[name].append(per_call(kind))
                entries.launches.drain()
                entries.collectives.drain()
                entries.math.drain()
            began = time.perf_counter()
            entries.detach(attachment)
            detach_ms.append((time.perf_counter() - began) * 1e3)
            attachment = [with_exits.attach(library, process.pid) for library in target.libraries]
            for kind, name in WITH_EXITS.items():
                rows[name].append(per_call(kind))
                with_exits.launches.drain()
                with_exits.collectives.drain()
            with_exits.detach(attachment)
        prices.INSTRUCTIONS["ret"] = b"\xc3"
        traps = prices.measure(entries._attach_to_self)
    finally:
        entries.close()
        with_exits.close()
        target.close()
    ours, plain = rows[INSTRUCTIONS["r"]], rows[WITH_EXITS["r"]]
    return Result(
        "time of one call in the target",
        "microseconds a call",
        rows,
        statistics.median(theirs / own for theirs, own in zip(plain, ours, strict=True)),
        {
            "attach_ms": statistics.median(attach_ms),
            "detach_ms": statistics.median(detach_ms),
            "trap on sub rsp, us": traps.entry["sub rsp"] / 1e3,
            "trap on a return instruction, us": traps.entry["ret"] / 1e3,
            "trap at an exit besides its entry, us": traps.exit / 1e3,
            "trap on push, us": traps.entry["push"] / 1e3,
        },
    )
