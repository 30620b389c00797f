"""What tracing a job of many processes takes: tracer and engine, of a core, at 10, 100 and 500 processes.

The job does next to nothing, so that what is measured is what each process costs Argus because it is there. Two kinds:
``ranks``, as many ranks in C that make a step a second of four launches and a collective, of functions that do
nothing; ``workers``, ranks in Python on the fake GPU with four data-loader workers each, as many processes in all.
``argus trace --children`` traces their launcher with all defaults (stacks, diagnosis, an embedded store). From
``ARGUS_BENCH_SETTLE`` seconds (60) after the last process became a rank on, CPU time is counted for
``ARGUS_BENCH_SECONDS`` (60): of the tracer with all that it has started, and of the engine. The reference is ``top -b
-H -d 1`` in the same seconds, which reads every thread of the machine once a second, and prints how much CPU each
takes.

``ARGUS_BENCH_PROCESSES`` (10,100,500) and ``ARGUS_BENCH_KINDS`` (ranks,workers) shape it. A round takes some three
minutes a number and kind. The ratio is that of the largest number: reference over Argus; below 1 Argus takes more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from argus.model.errors import ArgusError
from argus.store.open import open_store
from argus.store.reader import query_columns
from benches import Result
from benches._processes import cpu_s, engine_of, family

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = [int(word) for word in os.environ.get("ARGUS_BENCH_PROCESSES", "10,100,500").split(",")]
KINDS = os.environ.get("ARGUS_BENCH_KINDS", "ranks,workers").split(",")
SETTLE_S = float(os.environ.get("ARGUS_BENCH_SETTLE", "60"))
MEASURED_S = float(os.environ.get("ARGUS_BENCH_SECONDS", "60"))
START_S = 120.0
"""So long all processes may take to become ranks."""
WORKERS = 4
HERE = Path(__file__).resolve().parent


def _compile(folder: Path) -> Path:
    """The rank in C, with libraries that have names of CUDA and NCCL and do nothing."""
    gcc, calls = ["gcc", "-O2", "-fcf-protection=none"], HERE / "overhead_calls.c"
    try:
        for name, flags in (("libcuda.so.1", []), ("libnccl.so.2", ["-DNCCL"])):
            shared = ["-fPIC", "-shared", f"-Wl,-soname,{name}", "-o", folder / name]
            subprocess.run([*gcc, *flags, *shared, calls], check=True)
        libraries = [folder / "libcuda.so.1", folder / "libnccl.so.2", "-Wl,-rpath,$ORIGIN"]
        subprocess.run([*gcc, "-o", folder / "rank", HERE / "processes.c", *libraries], check=True)
    except (OSError, subprocess.CalledProcessError) as reason:
        raise ArgusError(f"the bench's job does not compile: {reason}") from reason
    return folder / "rank"


def _fakegpu() -> Path:
    sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))
    import run

    run.build()
    return Path(run.BUILD)


@contextlib.contextmanager
def _job(kind: str, number: int, folder: Path) -> Iterator[int]:
    """The launcher's PID, once it has started its ranks."""
    environment = dict(os.environ)
    if kind == "ranks":
        command = [str(number), str(_compile(folder))]
    else:
        command = [str(max(number // (WORKERS + 1), 1)), sys.executable, str(HERE / "programs" / "loading.py")]
        environment["LD_LIBRARY_PATH"] = str(_fakegpu())
    launcher = [sys.executable, str(HERE / "programs" / "many.py"), *command]
    with subprocess.Popen(launcher, env=environment, stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout is not None
            if job.stdout.readline() != b"ready\n":
                raise ArgusError("the bench's job does not start")
            yield job.pid
        finally:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(20)
            job.kill()


@contextlib.contextmanager
def _trace(pid: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ["-m", "argus.cli.main", "trace", "--children", "--pid", str(pid), "--plain", "--store", f"chdb://{folder}"]
    log = folder.parent / "log"
    with subprocess.Popen([sys.executable, *words], stdout=log.open("wb"), stderr=subprocess.STDOUT) as tracing:
        try:
            yield tracing
        finally:
            tracing.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracing.wait(60)
            tracing.kill()


def _wait_for_ranks(tracing: subprocess.Popen[bytes], folder: Path, number: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if tracing.poll() is not None:
            raise ArgusError(f"the trace ended: {(folder.parent / 'log').read_text()[-2000:]}")
        time.sleep(2.0)
        if engine_of(folder):
            with contextlib.suppress(ArgusError), contextlib.closing(open_store(f"chdb://{folder}")) as store:
                if query_columns(store, "SELECT uniqExact(pid) AS n FROM ranks")["n"][0] >= number:
                    return
    raise ArgusError(f"not all of {number} processes have become ranks in {START_S:.0f} s")


def _measure(kind: str, number: int) -> dict[str, float]:
    """Shares of a core."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))) / "store"
        folder.mkdir()
        launcher = stack.enter_context(_job(kind, number, folder.parent))
        tracing = stack.enter_context(_trace(launcher, folder))
        ranks = number if kind == "ranks" else max(number // (WORKERS + 1), 1)
        _wait_for_ranks(tracing, folder, ranks)
        time.sleep(SETTLE_S)
        top = stack.enter_context(
            subprocess.Popen(["top", "-b", "-H", "-d", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        stack.callback(top.kill)

        def spent() -> dict[str, float]:
            return {
                "tracer": sum(map(cpu_s, family(tracing.pid))),
                "engine": cpu_s(engine_of(folder)),
                "reference": cpu_s(top.pid),
                "job": sum(map(cpu_s, family(launcher))),
            }

        time.sleep(2.0)
        begin, before = time.monotonic(), spent()
        time.sleep(MEASURED_S)
        after, took = spent(), time.monotonic() - begin
        return {name: 100 * (after[name] - before[name]) / took for name in before}


def run(rounds: int) -> Result:
    rows: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in KINDS:
            for number in NUMBERS:
                found = _measure(kind, number)
                for name, share in (*found.items(), ("tracer and engine", found["tracer"] + found["engine"])):
                    rows.setdefault(f"{number} {kind}: {name}", []).append(share)
    largest = f"{max(NUMBERS)} {KINDS[0]}"
    ours, theirs = rows[f"{largest}: tracer and engine"], rows[f"{largest}: reference"]
    return Result("a job of many processes, traced", "% of a core", rows, sum(theirs) / sum(ours))
