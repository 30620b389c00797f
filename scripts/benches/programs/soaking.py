"""Jobs that come and go, until it is killed: what a node sees in a week, in minutes. On the fake GPU, with little CPU.

Two ranks of ``fake_train`` stay all the time. Besides, every ``EACH_S`` seconds two ranks begin that last for
``LIFE_S`` (``rank``): under a name of their own, or as the next attempt of one name. Each has kernels, functions and
source files that were never there before, a library that nobody else maps, threads that come and go, and forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

EACH_S = 10.0
LIFE_S = 25.0
STEP_S = 0.25
LAUNCHES = 6
NAMES = 3
"""Every so many jobs one has a name of its own; the others have one name, and are its attempts."""
STEADY = ("--layers", "2", "--forward-us", "20000", "--backward-us", "30000", "--data-ms", "200")
SOURCE = """
def step_{number}(launch, busy_until):
    for place in range({launches}):
        launch({number} * {launches} + place)
    while time.perf_counter() < busy_until:
        pass
"""
BUILD = Path(os.environ["PROGRAMS"])
libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def rank(number: int, library: str) -> None:
    """One rank of job ``number``: for LIFE_S seconds."""
    end_with_parent()
    ctypes.CDLL(library)
    os.unlink(library)  # mapped, and on no disk any more
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuInit(0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    cuda.cuModuleLoadData(ctypes.byref(module), b"any")
    until = time.monotonic() + LIFE_S
    for step in itertools.count(number * 1000):
        begin = time.perf_counter()
        if time.monotonic() > until:
            return
        function = ctypes.c_void_p()
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"fused_kernel_%d" % step)

        def launch(grid: int, function: ctypes.c_void_p = function) -> None:
            cuda.cuLaunchKernel(function, grid % 2**31 + 1, 1, 1, 128, 1, 1, 0, None, None, None)

        scope: dict[str, object] = {"time": time}
        exec(compile(SOURCE.format(number=step, launches=LAUNCHES), f"/tmp/generated_{step}.py", "exec"), scope)
        scope[f"step_{step}"](launch, begin + 0.004)  # type: ignore[operator]
        cuda.cuCtxSynchronize()
        if step % 8 == 0:
            threading.Thread(target=time.sleep, args=(1.0,), name=f"loader-{step}", daemon=True).start()
        if step % 16 == 0 and not os.fork():
            time.sleep(0.3)
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(max(0.0, begin + STEP_S - time.perf_counter()))


def begin_job(number: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    name = f"short-{number}" if number % NAMES == 0 else "short"
    started = []
    for each in range(2):
        library = folder / f"lib{number}-{each}.so"
        shutil.copy(BUILD / "libcublas.so.13", library)
        own = {"JOB_NAME": name, "RANK": str(each), "WORLD_SIZE": "2", "LOCAL_RANK": str(each)}
        words = [sys.executable, __file__, str(number), str(library)]
        started.append(subprocess.Popen(words, env={**os.environ, **own}, preexec_fn=end_with_parent))
    return started


def main() -> None:
    steady = {"WORLD_SIZE": "2", "JOB_NAME": "steady"}
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        steady["FAKEGPU_RENDEZVOUS"] = str(folder / "rendezvous")
        for each in range(2):
            own = {**os.environ, **steady, "RANK": str(each), "LOCAL_RANK": str(each)}
            program = [str(BUILD / "fake_train"), *STEADY]
            running.append(subprocess.Popen(program, env=own, preexec_fn=end_with_parent))
        for number in itertools.count(1):
            begin = time.monotonic()
            running += begin_job(number, folder)
            while (left := begin + EACH_S - time.monotonic()) > 0:
                time.sleep(min(left, 0.5))
                running = [process for process in running if process.poll() is None]


if __name__ == "__main__":
    rank(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
