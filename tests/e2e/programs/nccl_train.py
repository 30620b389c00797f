"""A Python program that trains on the fake GPU: what it does in a step are collectives, and waits for them.

    python nccl_train.py LIBRARIES FOLDER

RANK and WORLD_SIZE as launchers have them. A file FOLDER/fault-RANK makes that rank do what it says from then on:
"hang" (it waits for data that never comes) or "collect" (it collects garbage with many objects about).
FOLDER/steps-RANK grows by a line a step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

SIZES = (1 << 20, 1 << 18, 1 << 19, 4)
"""Bytes of the collectives of a step."""
SUM, FLOAT = 0, 7


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def check(result: int) -> None:
    assert result == 0, result


def communicator(nccl: ctypes.CDLL, rank: int, size: int, folder: Path) -> ctypes.c_void_p:
    unique, file = UniqueId(), folder / "unique-id"
    if rank == 0:
        check(nccl.ncclGetUniqueId(ctypes.byref(unique)))
        (folder / "unique-id.new").write_bytes(bytes(unique))
        (folder / "unique-id.new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    unique = UniqueId.from_buffer_copy(file.read_bytes())
    comm = ctypes.c_void_p()
    check(nccl.ncclCommInitRank(ctypes.byref(comm), size, unique, rank))
    return comm


def waits_for_data(never: threading.Event) -> None:
    never.wait()


def collects_garbage() -> None:
    gc.collect()


def spins(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def train(rank: int, size: int, cuda: ctypes.CDLL, nccl: ctypes.CDLL, folder: Path) -> None:
    check(cuda.cudaSetDevice(0))
    stream, memory = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cudaStreamCreate(ctypes.byref(stream)))
    check(cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(SIZES[0])))
    comm = communicator(nccl, rank, size, folder)
    fault, kept = folder / f"fault-{rank}", []
    with (folder / f"steps-{rank}").open("w", buffering=1) as log:
        for step in range(100_000):
            what = fault.read_text() if fault.exists() else ""
            if what == "hang":
                waits_for_data(threading.Event())
            if what == "collect":
                kept = kept or [[number] for number in range(400_000)]
                collects_garbage()
            spins(0.006)
            for bytes_ in SIZES:
                check(nccl.ncclAllReduce(memory, memory, ctypes.c_size_t(bytes_ // 4), FLOAT, SUM, comm, stream))
                check(cuda.cudaStreamSynchronize(stream))
            log.write(f"{step}\n")


if __name__ == "__main__":
    libraries = Path(sys.argv[1])
    gc.disable()
    train(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        ctypes.CDLL(str(libraries / "libcudart.so.13")),
        ctypes.CDLL(str(libraries / "libnccl.so.2")),
        Path(sys.argv[2]),
    )
