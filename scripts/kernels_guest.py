"""What scripts/kernels runs in the machine that it boots, as the first process there: every BPF program of Argus is
given to this kernel, then a job is traced.

What comes out is appended to a file, one JSON object a line (``scripts/kernels.py`` reads it). The machine's root is
the host's, which may not be written to; ``/run`` may be. On a kernel older than Argus supports only the verifier is
asked, with older helpers in the place of those that the kernel lacks, and ``argus trace`` is to report that in one
line.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bpf_programs
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fakegpu")]

from run import Job  # noqa: E402

from argus.capture import probes, sampler  # noqa: E402
from argus.capture.kernel import btf, compile  # noqa: E402
from argus.capture.kernel.compile import Compiled  # noqa: E402
from argus.capture.kernel.programs import INSTRUCTION  # noqa: E402
from argus.store import spool  # noqa: E402
from tests.kernel import test_python_stacks as known_stacks  # noqa: E402

OUT = Path("/run/out")
ARGUS = str(Path(sys.executable).parent / "argus")
STEP_LIMIT_S = 1500
TRUTH_S = 20.0
POWER_OFF = 0x4321FEDC
"""LINUX_REBOOT_CMD_POWER_OFF of include/uapi/linux/reboot.h."""
CALL = 0x85
"""``BPF_JMP | BPF_CALL``."""
STAND_INS = {174: 5, 158: 35, 175: 35}
"""bpf_get_attach_cookie (Linux 5.15), bpf_get_current_task_btf (5.11) and bpf_task_pt_regs (5.15), and older helpers
that return a number as they do: bpf_ktime_get_ns, bpf_get_current_task."""
OPTIONS = ("--rate", "97", "--buffer-mb", "1")
"""With that ring the programs are those that ``probes`` had compiled: they are kept."""
IS_OLD = probes.kernel_version() < probes.MINIMUM_KERNEL


def say(step: str, **fields: Any) -> None:
    with (OUT / "output.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **fields}) + "\n")


def with_stand_ins(compiled: Compiled) -> Compiled:
    """Programs without the helpers that kernels before 5.15 lack."""
    programs = {}
    for name, code in compiled.programs.items():
        words = np.frombuffer(code, INSTRUCTION).copy()
        for lacking, older in STAND_INS.items():
            words["value"][(words["code"] == CALL) & (words["registers"] == 0) & (words["value"] == lacking)] = older
        programs[name] = words.tobytes()
    return replace(compiled, programs=programs)


compiler = ""
"""Which one the machine outside is asked for: a suite of Debian (scripts/compilers.py); empty: its own."""


def compile_by_host(text: str, flags: list[str]) -> dict[str, Any]:
    """Takes the place of the child that compiles: the other machine answers in seconds."""
    digest = hashlib.sha256(json.dumps([compiler, text, flags]).encode()).hexdigest()[:16]
    request = OUT / f"compile-{digest}.json"
    unfinished = request.with_suffix(".part")
    unfinished.write_text(json.dumps({"text": text, "flags": flags, "compiler": compiler}))
    unfinished.rename(request)
    deadline = time.monotonic() + STEP_LIMIT_S
    while not (answer := request.with_suffix(".answer")).exists():
        if time.monotonic() > deadline:
            raise compile.CompileError("error: the machine outside does not answer")
        time.sleep(0.2)
    found: dict[str, Any] = json.loads(answer.read_text())
    if "error" in found:
        raise compile.CompileError(found["error"])
    return found


def load_programs(suite: str) -> None:
    """All programs, compiled by a compiler of the machine outside."""
    global compiler
    compiler = suite
    os.environ["ARGUS_CACHE_DIR"] = str(OUT / f"cache-{suite}") if suite else str(OUT / "cache")
    try:
        with bpf_programs.watched(partial(say, compiler=suite)) as watched:
            if IS_OLD:
                watched.changed = staticmethod(with_stand_ins)
            bpf_programs.load_probes()
            bpf_programs.load_sampler()
            bpf_programs.everything_loaded()
    finally:
        compiler = ""
        os.environ["ARGUS_CACHE_DIR"] = str(OUT / "cache")


def truth() -> None:
    """Stacks of a program that knows its own (docs/stacks.md)."""
    probes = sampler.StackProbes(rate_hz=97)
    samples = known_stacks.Samples(probes)
    program = known_stacks.start(Path("/run/tmp"), sys.executable, "grammar")
    try:
        known_stacks.watch(samples, [program], TRUTH_S)
        samples.finish()
        found = known_stacks.judge(samples, [program])
    finally:
        program.end()
    wrong = found.on.samples["wrong"] + found.off.samples["wrong"]
    say("truth", samples=found.total, right=round(found.right, 4), wrong=wrong, output=str(found)[:2000])


def trace() -> None:
    """A job of two ranks on the fake GPU and a Python program, traced by ``argus trace``, and the rows that came."""
    stop, folder, log = Path("/run/stop"), Path("/run/spool"), OUT / "trace.log"
    busy = [sys.executable, str(ROOT / "tests" / "e2e" / "programs" / "busy.py"), str(stop)]
    os.nice(19)  # Argus needs minutes to begin as it is
    with Job(ranks=2, args=["--steps", "0"]) as job, subprocess.Popen(busy, stdout=subprocess.PIPE) as program:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
            assert program.stdout is not None
            program.stdout.readline()
            pids = [word for pid in (*job.pids, program.pid) for word in ("--pid", str(pid))]
            command = [ARGUS, "trace", *pids, "--duration", "15", "--plain", "--no-diagnose", *OPTIONS]
            with log.open("w") as output:
                code = subprocess.run(
                    [*command, "--store", f"spool://{folder}"],
                    stdout=output, stderr=subprocess.STDOUT, timeout=STEP_LIMIT_S, check=False,
                ).returncode  # fmt: skip
        finally:
            stop.touch()
            program.kill()
    rows: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for _, file in spool.batch_files(folder):
        batch = spool.read(file)
        rows[batch.table] += batch.rows.num_rows
        if batch.table == "stacks":
            functions.update(batch.rows.column("python_function").to_pylist())
        elif batch.table == "stack_samples":
            reasons.update(batch.rows.column("reason").to_pylist())
    say("trace", code=code, output=log.read_text()[-4000:], rows=rows, functions=functions, reasons=reasons)


def refusal() -> None:
    """What a user reads on a kernel that is too old."""
    command = [ARGUS, "trace", "--pid", str(os.getpid()), "--store", "spool:///run/spool"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False)
    say("refusal", code=done.returncode, output=done.stderr)


def main() -> None:
    for folder in ("tmp", "home"):
        Path("/run", folder).mkdir()
    os.environ.update(
        TMPDIR="/run/tmp", HOME="/run/home", PATH="/usr/sbin:/usr/bin:/sbin:/bin",
        PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1", ARGUS_CACHE_DIR=str(OUT / "cache"),
    )  # fmt: skip
    say("begin", release=os.uname().release, uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME))
    if IS_OLD:
        probes.MINIMUM_KERNEL = sampler.MINIMUM_KERNEL = (0, 0)
        offset = btf.Btf.offset
        # The name of task_struct.__state before 5.14.
        btf.Btf.offset = lambda types, struct, member: offset(types, struct, member.removeprefix("__"))
        # Before 5.11 maps count as locked memory.
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if "--compile-here" in sys.argv:
        compile._TIME_LIMIT_S = STEP_LIMIT_S
    else:
        compile._ask_child = compile_by_host
    steps: list[Callable[[], None]] = []
    for suite in next((word.partition("=")[2] for word in sys.argv if word.startswith("--compilers=")), "").split(","):
        programs = partial(load_programs, suite)
        programs.__name__ = f"programs by {suite or 'its own compiler'}"  # type: ignore[attr-defined]
        steps.append(programs)
    if IS_OLD:
        steps.append(refusal)
    elif "--programs" not in sys.argv:
        steps += [trace, truth]
    for step in steps:
        began = time.monotonic()
        try:
            step()
        except BaseException:  # pytest's, too
            say("failed", what=traceback.format_exc())
        say("done", what=step.__name__, seconds=round(time.monotonic() - began, 1))
    say("end")


if __name__ == "__main__":
    try:
        main()
    finally:
        os.sync()
        ctypes.CDLL(None).reboot(POWER_OFF)
