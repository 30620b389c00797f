"""What the memory of a Python program says is bounded: lines, line tables, lists of threads, counters."""

from __future__ import annotations

import random
import struct
from collections import Counter as Tally
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.python import code, interpreter, layouts
from argus.capture.python.code import MAX_LINE, CodeResolver
from argus.capture.python.interpreter import MAX_COUNT, MAX_INTERPRETERS, MAX_THREADS
from argus.capture.reader import left_out
from argus.live.sampling.processes import SampledProcesses
from argus.model.stacks import Frame, Stack
from argus.tables import stacks
from argus.tables.arrow import Origin


def varint(value: int) -> bytes:
    """As Objects/locations.md writes it: six bits a byte, the lowest first."""
    out = []
    while True:
        out.append(value & 63 | (64 if value > 63 else 0))
        value >>= 6
        if not value:
            return bytes(out)


def step_of(lines: int) -> bytes:
    """A range of 3.11's table whose line lies so much further on, without columns."""
    return bytes([0x80 | 13 << 3]) + varint(lines << 1)


@pytest.mark.parametrize("bits", [31, 40, 100_000])
def test_a_line_table_with_an_impossible_step(bits: int) -> None:
    ends, found = code._DECODERS["locations"](step_of(1 << bits) + step_of(5), 10)
    assert len(ends) == 2
    assert all(0 <= line <= MAX_LINE for line in found)
    stack = Stack((Frame("python", "f", "x.py", found[-1]),), "complete", "none")
    table = stacks.to_stacks([stack], Origin("j", 1, "h", 0))
    assert table["lines"].to_pylist() == [found[-1:]]


def test_a_number_of_a_line_table_is_not_as_long_as_its_bytes() -> None:
    """Each further byte would cost as much as there are bits before it."""
    bits: list[int] = []

    class First(int):
        def __add__(self, other: int) -> int:
            bits.append(other.bit_length())
            return int(self) + other

    code._DECODERS["locations"](step_of(1 << 100_000), First(10))
    assert bits[0] < 64


def test_rows_take_any_line() -> None:
    """Wherever a frame comes from."""
    stack = Stack((Frame("python", "f", "x.py", 1 << 40), Frame("python", "g", "x.py", -3)), "complete", "none")
    table = stacks.to_stacks([stack], Origin("j", 1, "h", 0))
    assert table["lines"].to_pylist() == [[2**32 - 1, 0]]
    assert table["python_line"].to_pylist() == [0]


@pytest.mark.parametrize("decoder", list(code._DECODERS))
def test_any_bytes_are_a_line_table(decoder: str) -> None:
    rng = random.Random(3)
    for _ in range(3000):
        table = rng.randbytes(rng.randrange(0, 200))
        ends, lines = code._DECODERS[decoder](table, rng.choice([0, 7, MAX_LINE]), rng.randrange(1 << 12))
        assert len(ends) == len(lines)
        assert all(0 <= line <= MAX_LINE for line in lines)


def of_3_11() -> NDArray[np.void]:
    record = np.zeros((), interpreter.PYTHON)
    layout = layouts.LAYOUTS[3, 11]
    for field in interpreter._SAME:
        record[field] = getattr(layout, field)
    return record


def resolver() -> CodeResolver:
    record = of_3_11()
    record["major"], record["minor"] = 3, 11
    return CodeResolver(-1, record)


PROMISED = 256 << 10
"""Bytes of a line table, as docs/security.md has them."""


def test_a_long_line_table_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver()
    asked: list[int] = []

    def read(fd: int, address: int, size: int) -> bytes:
        asked.append(size)
        data = bytearray(size)
        struct.pack_into("<q", data, made._table.bytes_size, PROMISED + 1)
        return bytes(data)

    monkeypatch.setattr(code, "read_memory", read)
    found = made._bytes(0x1000)
    assert found is not None
    assert found[0] == b""
    assert max(asked) < 4096
    assert made.counters["python_lines_unknown"] == 1


def test_long_tables_are_decoded_within_a_budget() -> None:
    made = resolver()
    made.budget = 5000
    known = 0
    for number in range(10):
        one = code._Code(tuple([number] * 8), "f", "x.py", step_of(1) * 1000)
        known += made._line(one, 4) > 0
    assert known == 2
    assert made.counters["python_lines_unknown"] == 8


def test_code_is_remembered_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver()
    monkeypatch.setattr(code, "MAX_CODE_BYTES", 100_000)
    header = tuple([1] * len(made._order))
    monkeypatch.setattr(made, "_read_header", lambda address: header)
    monkeypatch.setattr(made, "_read_code", lambda head: code._Code((*head, 0), "f", "x.py", bytes(10_000)))
    for address in range(1, 200):
        made._code_at(address)
        assert sum(one.nbytes for one in made._codes.values()) < 250_000


class Forged:
    """Memory in which every pointer leads to the next object, without end."""

    pid = 7

    def __init__(self, step: int) -> None:
        self.step, self.reads = step, 0

    def u64(self, address: int) -> int:
        self.reads += 1
        return address + self.step

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        return struct.pack("<Q", address + self.step) * (size // 8 + 1)


def test_forged_lists_of_interpreters_and_threads_end() -> None:
    record = of_3_11()
    record["runtime"] = 1 << 20
    left_out.take()
    memory: Any = Forged(4096 * 8)
    states = list(interpreter._thread_states(memory, record))
    assert len(states) <= MAX_THREADS
    assert memory.reads < 2 * MAX_THREADS
    assert left_out.take() == [("python_lists_cut", 7, 1)]
    memory = Forged(8)
    assert len(list(interpreter._list(memory, 8, 8, MAX_INTERPRETERS))) == MAX_INTERPRETERS
    assert left_out.take() == [("python_lists_cut", 7, 1)]


def test_a_forged_list_of_threads_takes_bounded_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is slow to read: 500 states in 50 ms, and each 64th time the clock is asked."""
    left_out.take()
    memory: Any = Forged(4096 * 8)
    monkeypatch.setattr(interpreter, "time", SimpleNamespace(thread_time=lambda: memory.reads * 1e-4))
    assert 500 <= len(list(interpreter._thread_states(memory, of_3_11()))) < 500 + 64
    assert left_out.take() == [("python_lists_cut", 7, 1)]


def collections(*counts: int) -> tuple[int, ...] | None:
    """What is read where a process says this."""
    left = list(counts)
    layout = next(table for table in layouts.LAYOUTS.values() if not table.gc_statistics_is_pointer)
    process: Any = SimpleNamespace(
        _fields={"gc_collecting": 1 << 20}, _table=layout, memory=SimpleNamespace(u64=lambda at: left.pop(0))
    )
    return interpreter.PythonProcess.collections(process)


def test_counters_of_collections_that_cannot_be_are_not_believed() -> None:
    assert collections(1, 2, 3) == (1, 2, 3)
    assert collections(1, 2, (1 << 64) - 1) is None
    assert collections(0, MAX_COUNT + 1, 0) is None


@pytest.mark.parametrize("counts", [[(0, 0, 0), (1 << 62, 0, 0)], [(0, 0, 0), ((1 << 64) - 1, 1, 2)]], ids=str)
def test_counters_that_alternate_stay_within_what_a_row_takes(counts: Sequence[tuple[int, ...]]) -> None:
    sampled: Any = SimpleNamespace(_collected={}, _counters=Tally())
    process: Any = SimpleNamespace(pid=7)
    for _ in range(5):
        for each in counts:
            SampledProcesses._count_collections(sampled, process, SimpleNamespace(collections=lambda each=each: each))  # type: ignore[arg-type, misc]
    assert np.array(list(sampled._counters.values()), np.uint64).max() <= MAX_COUNT
