"""A rank with data-loader workers: Python that launches a few kernels on the fake GPU each second, and forked children
that are busy for some milliseconds of each. Ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import time

STEP_S = 1.0
LAUNCHES = 4
WORKERS = 4


def load(number: int) -> int:
    """What a worker does for a batch."""
    return sum(place * number for place in range(20_000))


def work() -> None:
    for number in range(1 << 30):
        begin = time.monotonic()
        load(number)
        time.sleep(max(0.0, begin + STEP_S - time.monotonic()))


def train() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuInit(0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    cuda.cuModuleLoadData(ctypes.byref(module), b"any")
    cuda.cuModuleGetFunction(ctypes.byref(function), module, b"layer")
    while True:
        begin = time.monotonic()
        for place in range(LAUNCHES):
            cuda.cuLaunchKernel(function, place + 1, 1, 1, 128, 1, 1, 0, None, None, None)
        cuda.cuCtxSynchronize()
        time.sleep(max(0.0, begin + STEP_S - time.monotonic()))


def main() -> None:
    libc = ctypes.CDLL(None)
    end_with_parent = 1, signal.SIGKILL  # PR_SET_PDEATHSIG
    libc.prctl(*end_with_parent)
    for _ in range(WORKERS):
        if not os.fork():
            libc.prctl(*end_with_parent)
            work()
    train()


main()
