"""Lists of interpreters, thread states and frames in the memory of a Python process, and its debug offsets."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from argus.capture.python import interpreter as python
from argus.capture.python import layouts
from argus.capture.python.interpreter import Interpreter, Memory, PythonProcess
from argus.model.records import NO_OFFSET
from tests.fuzz.harness import Bytes, memory_file

ALLOWED = ()
CODE = ["argus.capture.python.interpreter"]
VERSIONS = sorted(layouts.LAYOUTS)
RUNTIME, TYPE = 0x100, 0x40


def _links(version: tuple[int, int]) -> bytes:
    """Memory with an interpreter, two thread states and two frames, as far as one place may serve all."""
    layout = layouts.LAYOUTS[version]
    memory = bytearray(RUNTIME + (1 << 14))

    def put(at: int, value: int) -> None:
        if 0 <= at <= len(memory) - 8:
            struct.pack_into("<Q", memory, at, value)

    if version in layouts.DEBUG_OFFSETS:
        memory[RUNTIME : RUNTIME + len(layouts.DEBUG_COOKIE)] = layouts.DEBUG_COOKIE
        put(RUNTIME + layouts.DEBUG_VERSION, version[0] << 24 | version[1] << 16)
        for field, at in layouts.DEBUG_OFFSETS[version].items():
            value = layouts.OBJECT_TYPE if field == "object_type" else getattr(layout, field, 0)
            put(RUNTIME + at, value if value != NO_OFFSET else 0)
    interpreter, states, frames = 0x2000, (0x2800, 0x2C00), (0x3000, 0x3400)
    put(RUNTIME + layout.interp_head, interpreter)
    put(interpreter + layout.threads_head, states[0])
    put(states[0] + layout.thread_next, states[1])
    for state, frame in zip(states, frames, strict=True):
        put(state + layout.thread_id, state)
        put(state + layout.thread_frame, frame)
    put(frames[0] + layout.frame_previous, frames[1])
    for frame in frames:
        put(frame + layout.frame_code, 0x3800)
    put(0x3800 + layouts.OBJECT_TYPE, TYPE)
    return bytes(memory)


def seeds() -> list[bytes]:
    return [bytes([number]) + _links(version) for number, version in enumerate(VERSIONS)]


@contextmanager
def _numbers() -> Iterator[None]:
    """The threads of this process, looked up once: they are not what is fuzzed."""
    with mock.patch.object(python, "_numbers_inside", return_value={7: 7, 8: 8}):
        yield


def run(data: bytes) -> None:
    taken = Bytes(data)
    version = VERSIONS[taken.number() % len(VERSIONS)]
    file = memory_file(taken.rest())
    memory: Any = Memory.__new__(Memory)
    memory._fd = os.dup(file.fd)
    try:
        table: Any = layouts.LAYOUTS[version]
        if version in layouts.DEBUG_OFFSETS:
            own = python._own_offsets(memory, RUNTIME, version, table)
            if not isinstance(own, str):
                table = own
        record = python._record(table, (*version, 1))
        record["runtime"], record["code_type"] = RUNTIME, TYPE
        with _numbers():
            python._find_live(7, memory, record, table)
            process: Any = PythonProcess.__new__(PythonProcess)
            process.pid, process.memory, process._record, process._table = 7, memory, record, table
            process.interpreter = Interpreter((*version, 1), "on", record, "/usr/bin/python3")
            process._fields = {name: int(record[name]) for name in python.PYTHON.names or () if name != "reserved"}
            states = process.thread_states()
            assert len(states) <= python.MAX_THREADS
            for tid in (*states, 9):
                frames = process.walk(tid, states)
                assert frames is None or frames.dtype == python.FRAME
            for address in (0x3000, 0x3400):
                walked = process._walk(address)
                assert walked is None or len(walked) <= python.MAX_FRAMES
            counts = process.collections()
            assert counts is None or np.array(counts, np.uint64).max() <= python.MAX_COUNT
            process.collecting()
            process.gil_holder()
    finally:
        memory.close()
