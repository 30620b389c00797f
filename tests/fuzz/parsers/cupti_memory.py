"""The memory that Argus shares with the CUPTI helper of a process: its words, names and buffers."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from argus.cupti import buffers, collector, layouts, shared
from argus.cupti.buffers import load_walk
from argus.cupti.collector import Collector, CollectorState, _Step
from tests.fuzz.harness import Bytes, joined

ALLOWED = ()
CODE = ["argus.cupti.buffers", "argus.cupti.collector", "argus.cupti.shared"]
BUFFER, SLOTS = 16384, 2
_walk = load_walk()
_COUNTERS = (shared.CONTROL.fields or {})["names_used"][1]


class _Texts:
    """A process whose memory has one text everywhere."""

    def at(self, pointers: Sequence[int]) -> list[bytes | None]:
        return [b"kernel %d" % (pointer & 3) if pointer & 4 else None for pointer in pointers]

    def close(self) -> None:
        pass


def _control() -> bytes:
    control = np.zeros((), shared.CONTROL)
    control["magic"], control["head_bytes"], control["state"] = shared.MAGIC, shared.HEAD_BYTES, shared.State.ON
    control["slots"], control["buffer_bytes"] = SLOTS, BUFFER
    name = b"kernel"
    control["names_used"] = shared.NAME.itemsize + 8
    names = struct.pack("<QII", 0x1234, 1, len(name)) + name.ljust(8, b"\0")
    slots = np.zeros(SLOTS, shared.SLOT)
    slots["state"] = (shared.SlotState.READY, shared.SlotState.FULL)
    known = layouts.for_version(130400)
    row = np.zeros(1, known.dtype(known.kind("CONCURRENT_KERNEL")))
    row["kind"], row["start"], row["end"], row["name"] = known.kind("CONCURRENT_KERNEL"), 10**15, 10**15 + 5, 1
    slots["valid"], slots["count"] = row.nbytes, 1
    return joined(control.tobytes()[:1200], slots.tobytes(), names, row.tobytes())


def seeds() -> list[bytes]:
    return [bytes([mode]) + _control() for mode in range(4)]


def run(data: bytes) -> None:
    taken = Bytes(data)
    mode = taken.number()
    control, slots, names, records = taken.pieces(4)
    fd = os.memfd_create("argus-fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, shared.total_bytes(SLOTS, BUFFER))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(fd, control[: shared.CONTROL.itemsize], 0)
        os.pwrite(fd, slots[: shared.SLOT.itemsize * shared.MAX_SLOTS], shared.SLOTS_OFFSET)
        os.pwrite(fd, names, shared.NAMES_OFFSET)
        for slot in range(SLOTS):
            at = shared.BUFFERS_OFFSET + slot * shared.stride_bytes(BUFFER)
            os.pwrite(fd, records[:BUFFER], at)
        _collect(fd, mode)
    finally:
        os.close(fd)


def _collect(fd: int, mode: int) -> None:
    watched: Any = Collector(os.getpid())
    watched._fd, watched._pidfd = os.dup(fd), os.pidfd_open(os.getpid())
    watched._memory = shared.Memory(fd)
    watched.buffers.layouts = layouts.for_version(130400)
    watched.buffers.texts, watched._step = _Texts(), _Step.ON
    watched._base = dict.fromkeys(collector._COUNTED, 0)
    watched._next_check = float("inf")  # no look at whether this process maps it
    if mode & 1:
        watched.buffers.walk, watched.buffers.claim = _walk, lambda address: 1
    batches: list[Any] = []
    try:
        memory = watched._memory
        watched._check(memory)
        watched._set_on(memory)
        watched._memory = watched._map(memory)
        for _ in range(2):
            batches += watched.poll(1.0)
        if mode & 2 and watched._memory is not None:
            watched.buffers.take_left(watched._memory, batches)
        if watched._memory is not None:
            watched.buffers.count_kept(watched._memory)
            watched._memory.text("reason")
    except buffers.Damaged as reason:
        watched._rest(CollectorState.FAILED, str(reason))
    assert all(0 <= value <= collector._MAX_COUNT for value, _ in watched.counters().values())
    assert watched.text.isprintable()
    for batch in batches:
        for rows in (batch.gpu, batch.host):
            assert (rows["name"] < len(watched.names)).all()
    watched.close()
