"""ELF files as probes are found in them: headers, symbol tables, build ids."""

from __future__ import annotations

from argus.capture.process import elf, nccl
from tests.fuzz.harness import memory_file
from tests.fuzz.small_elf import BASE, FUNCTIONS, small_elf

ALLOWED = (elf.NotElf, OSError)
CODE = ["argus.capture.process.elf", "argus.capture.process.nccl"]
NAMES = [name for name, _, _ in FUNCTIONS]


def seeds() -> list[bytes]:
    return [small_elf(), small_elf(stripped=True)]


def run(data: bytes) -> None:
    file = memory_file(data)
    nccl._read_offset(file)  # it raises nothing
    found = elf.Elf(file)
    for name, offset in found.functions(NAMES).items():
        assert name in NAMES
        assert 0 <= offset < 1 << 64
        found.address(offset)
    found.symbols(NAMES)
    found.variables()
    found.load_bias(0x7F0000000000, 0)
    for address in (0, BASE + 0x1004, (1 << 64) - 1):
        name = found.symbol_at(address)
        assert name is None or len(name) <= elf._LONGEST_SYMBOL
    assert found.nbytes <= 4 * len(data)
    whole = elf.SymbolFile(file)
    assert whole.text_bytes >= 0
    assert whole.name_bytes >= 0
    for section in range(8):
        for name in NAMES:
            offset = whole.function(name, (section, 1))
            assert offset is None or 0 <= offset < 1 << 64
