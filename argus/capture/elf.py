"""Where in a library's file a function begins: symbol tables read as columns.

pyelftools parses the headers; the tables themselves, which hold hundreds of thousands of symbols in PyTorch's
libraries, are viewed with numpy and searched by name.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from numpy.typing import NDArray

SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
"""Elf64_Sym, from the System V ABI (24 bytes)."""

_EXECUTABLE = 1
"""PF_X in ``p_flags`` of a segment."""
_FUNCTION = 2
"""STT_FUNC in the low four bits of ``info``."""


class NotElf(Exception):
    """The file is not a readable 64-bit little-endian ELF file."""


@dataclass(frozen=True)
class _Segment:
    file_offset: int
    address: int
    file_bytes: int


@dataclass(frozen=True)
class _Table:
    symbols: NDArray[np.void]
    strings: bytes


class Elf:
    """Symbols of one ELF file, read at once; the file is closed afterwards.

    Args:
        path: Any path the file can be opened by (also /proc/PID/map_files/…).

    Raises:
        NotElf: It is no 64-bit little-endian ELF file.
        OSError: It cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            try:
                view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except ValueError as reason:
                raise NotElf(f"{path} is empty") from reason
            with view:
                if view[:6] != b"\x7fELF\x02\x01":
                    raise NotElf(f"{path} is not a 64-bit little-endian ELF file")
                try:
                    self._read(view, ELFFile(file))
                except (ELFError, ValueError, KeyError, AttributeError) as reason:
                    raise NotElf(f"{path} is damaged: {reason}") from reason

    def _read(self, view: mmap.mmap, elf: ELFFile) -> None:
        self._segments = [
            _Segment(segment["p_offset"], segment["p_vaddr"], segment["p_filesz"])
            for segment in elf.iter_segments("PT_LOAD")
        ]
        self.text_bytes = sum(
            segment["p_filesz"] for segment in elf.iter_segments("PT_LOAD") if segment["p_flags"] & _EXECUTABLE
        )
        """Size of the file's code."""
        self._tables: list[_Table] = []
        for section in elf.iter_sections():
            if section["sh_type"] not in ("SHT_DYNSYM", "SHT_SYMTAB"):
                continue
            strings = elf.get_section(section["sh_link"])
            raw = view[section["sh_offset"] : section["sh_offset"] + section["sh_size"]]
            text = view[strings["sh_offset"] : strings["sh_offset"] + strings["sh_size"]]
            self._tables.append(_Table(np.frombuffer(raw, SYMBOL, count=len(raw) // SYMBOL.itemsize), text))

    def file_offset(self, address: int) -> int | None:
        """The offset in the file of a virtual address, or None where no segment of the file holds it."""
        for segment in self._segments:
            if segment.address <= address < segment.address + segment.file_bytes:
                return address - segment.address + segment.file_offset
        return None

    def address(self, file_offset: int) -> int | None:
        """The virtual address at an offset in the file: the inverse of ``file_offset``."""
        for segment in self._segments:
            if segment.file_offset <= file_offset < segment.file_offset + segment.file_bytes:
                return file_offset - segment.file_offset + segment.address
        return None

    def functions(self, names: Collection[str]) -> dict[str, int]:
        """File offsets of the functions among ``names`` that this file defines."""
        found: dict[str, int] = {}
        for table in self._tables:
            defined = (table.symbols["section"] != 0) & ((table.symbols["info"] & 15) == _FUNCTION)
            symbols = table.symbols[defined]
            for name in names:
                if name in found:
                    continue
                # Linkers share tails ("ncclAllReduce" inside "pncclAllReduce"), so a match may begin inside a string.
                places = _occurrences(table.strings, name.encode() + b"\0")
                if not places:
                    continue
                match = np.flatnonzero(np.isin(symbols["name"], places))
                if match.size:
                    offset = self.file_offset(int(symbols["value"][match[0]]))
                    if offset is not None:
                        found[name] = offset
        return found

    def symbol_at(self, address: int) -> str | None:
        """The name of the function that covers a virtual address, or None."""
        for table in self._tables:
            symbols = table.symbols
            covers = (
                ((symbols["info"] & 15) == _FUNCTION)
                & (symbols["section"] != 0)
                & (symbols["value"] <= address)
                & (address < symbols["value"] + np.maximum(symbols["size"], 1))
            )
            match = np.flatnonzero(covers)
            if match.size:
                start = int(symbols["name"][match[0]])
                return table.strings[start : table.strings.index(b"\0", start)].decode(errors="replace")
        return None


def _occurrences(text: bytes, word: bytes) -> list[int]:
    places = []
    at = text.find(word)
    while at >= 0:
        places.append(at)
        at = text.find(word, at + 1)
    return places
