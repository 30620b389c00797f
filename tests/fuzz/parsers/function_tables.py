"""Function tables: symbols, unwind tables, .gnu_debugdata and .gnu_debuglink of a mapped file."""

from __future__ import annotations

from argus.capture.process import elf
from argus.capture.process.symbols import EVALUATION_LOOPS
from tests.fuzz.harness import Bytes, memory_file
from tests.fuzz.small_elf import BASE, small_elf

ALLOWED = (elf.NotElf, OSError)
CODE = ["argus.capture.process.elf"]
SECONDS = 3.0
"""A compressed table may unpack to 64 MiB."""


def seeds() -> list[bytes]:
    files = [small_elf(), small_elf(stripped=True), small_elf(stripped=True, debug="link"),
             small_elf(stripped=True, debug="data")]  # fmt: skip
    return [bytes([place]) + file for file in files for place in (0, 1)]


def run(data: bytes) -> None:
    taken = Bytes(data)
    place = taken.number()
    image = taken.rest()
    source = memory_file(image) if place & 1 else image
    table = elf.FunctionTable(source, "/lib/argus-fuzz.so", "/nowhere", "", EVALUATION_LOOPS[:1])
    for offset in (0, 0x1000, 0x1004, 0x1051, 0x10FF, 0x2010, (1 << 63) - 1):
        virtual = table.virtual(offset)
        if virtual is None:
            continue
        function = table.find(virtual)
        if function is not None:
            assert len(table.name(function)) <= elf._LONGEST_SYMBOL
        bounds = table.bounds(virtual)
        assert bounds is None or bounds[0] <= bounds[1]
    for address in (0, BASE + 0x1004, (1 << 64) - 1):
        table.find(address)
        table.bounds(address)
    assert table.nbytes <= 1 << 28
    assert len(table.build_id) <= 2 * elf._MOST_NOTE_BYTES
