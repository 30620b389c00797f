"""The commands of train_step.py, answered by a program on the fake GPU: parts are tried with it where there is none.

It calls the fake driver by ctypes. ``profile`` writes what was launched, which is what torch.profiler would see.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from protocol import answer, serve

BUILD = Path(os.environ.get("FAKEGPU_BUILD") or Path(__file__).resolve().parents[2] / "build" / "fakegpu")
KERNEL_NS = 20_000
"""Of every kernel, by default of the fake GPU; ``FAKEGPU_JITTER=0`` keeps to it."""


class Profiler:
    """Counts what is launched; it slows nothing down."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._before = trainer, 0

    def start(self) -> None:
        self._before = self._trainer.done

    def stop(self) -> None:
        pass

    def seen(self) -> int:
        return (self._trainer.done - self._before) * (len(self._trainer.kernels) + 1)


class Trainer:
    """Some named kernels a step, and copies."""

    def __init__(self, options: argparse.Namespace) -> None:
        ctypes.CDLL(str(BUILD / "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
        self.cuda = ctypes.CDLL(str(BUILD / "libcuda.so.1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.backend = options.backend
        self.slow = options.slow_rank == self.rank
        self.slow_from, self.done = options.slow_from, 0
        self.check("cuInit", 0)
        context = ctypes.c_void_p()
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.check("cuCtxSetCurrent", context)
        module = ctypes.c_void_p()
        self.check("cuModuleLoadData", ctypes.byref(module), b"image")
        self.kernels: list[tuple[str, ctypes.c_void_p]] = []
        for layer in range(6):
            for name in (f"_Z6layer{layer}Pf", f"gemm_{layer}", "pointwise"):
                function = ctypes.c_void_p()
                self.check("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                self.kernels.append((name, function))
        self.memory = ctypes.c_uint64()
        self.check("cuMemAlloc_v2", ctypes.byref(self.memory), 1 << 20)
        self.host = (ctypes.c_char * 65536)()

    def check(self, call: str, *arguments: Any) -> None:
        if result := getattr(self.cuda, call)(*arguments):
            raise RuntimeError(f"{call}: {result}")

    def launch(self, function: ctypes.c_void_p) -> None:
        self.check("cuLaunchKernel", function, *[ctypes.c_uint(1)] * 6, 0, None, None, None)

    def step(self) -> None:
        self.check("cuMemcpyHtoDAsync_v2", self.memory, self.host, ctypes.c_size_t(4096), None)
        for _, function in self.kernels:
            self.launch(function)
        self.done += 1
        if self.slow and self.done > self.slow_from:
            for _ in range(100):
                self.launch(self.kernels[1][1])
        self.sync()

    def sync(self) -> None:
        self.check("cuCtxSynchronize")

    def steps(self, count: int) -> dict[str, Any]:
        self.sync()
        time.sleep(0.005)
        marks = [time.monotonic_ns()]
        for _ in range(count):
            self.step()
            marks.append(time.monotonic_ns())
        self.sync()
        time.sleep(0.005)
        lengths = [b - a for a, b in itertools.pairwise(marks)]
        return {"begin_ns": marks[0], "end_ns": marks[-1], "steps": count, "step_ns": lengths}

    def profile(self, count: int, file: str) -> dict[str, Any]:
        summary = self.steps(count)
        events = [["kernel", name, 0, KERNEL_NS / 1e3, 0] for name, _ in self.kernels] * count
        events += [["gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, 1.0, 0]] * count
        Path(file).write_text(json.dumps({"events": events}))
        return {**summary, "kernels": len(self.kernels) * count, "copies": count, "trace_bytes": 0}

    def profiler(self) -> Profiler:
        return Profiler(self)

    def traffic(self) -> dict[str, Any]:
        begin = time.monotonic_ns()
        size = ctypes.c_size_t(4096)
        for _ in range(7):
            self.check("cuMemcpyHtoDAsync_v2", self.memory, self.host, size, None)
            self.check("cuMemcpyDtoHAsync_v2", self.host, self.memory, size, None)
            self.check("cuMemcpyDtoDAsync_v2", self.memory, self.memory, size, None)
            self.check("cuMemsetD8Async", self.memory, 0, size, None)
        self.sync()
        made = dict.fromkeys(("memcpy_htod", "memcpy_dtoh", "memcpy_dtod", "memset"), 7)
        return {"begin_ns": begin, "end_ns": time.monotonic_ns(), **made, "graph_kernels": 0}

    def load(self, batches: int) -> dict[str, Any]:
        begin = time.monotonic_ns()
        workers = [os.fork() for _ in range(2)]
        if 0 in workers:
            os._exit(0)
        for worker in workers:
            os.waitpid(worker, 0)
        self.steps(batches)
        return {"items": batches * 4, "expected": batches * 4, "begin_ns": begin, "end_ns": time.monotonic_ns()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--mode", "--size", "--backend", "--device"):
        parser.add_argument(name, default="fake")
    for name in ("--warmup", "--slow-rank", "--slow-from", "--slow-matmuls"):
        parser.add_argument(name, type=int, default=-1)
    trainer = Trainer(parser.parse_args())
    answer(ready=True, pid=os.getpid(), rank=trainer.rank, backend=trainer.backend, startup_s=0, parameters=0)
    serve(trainer)


if __name__ == "__main__":
    main()
