"""Where in a library's file a function begins, and which function an address is in: symbol tables read as columns.

Headers and tables are numpy views of what was read: PyTorch's libraries hold hundreds of thousands of symbols, so
nothing here makes an object of each.

The files are those of traced processes, which may have written anything into them: what a file says of its own sizes
and counts is checked against what it holds and against the bounds below, and all loops are bounded. A file that exceeds
a bound is refused (``NotElf``), as one that is damaged.
"""

from __future__ import annotations

import lzma
import mmap
import os
import platform
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.mapped import File, Refused, open_file, open_in_root
from argus.capture.reader import progress

Source = str | Path | File
"""A file that was opened already (``argus.capture.process.mapped``), or the path of one that no traced process
chose."""

SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
"""Elf64_Sym, from the System V ABI (24 bytes)."""

_EXECUTABLE = 1
"""PF_X in ``p_flags`` of a segment."""
_WRITABLE = 2
"""PF_W."""
_FUNCTION = 2
"""STT_FUNC in the low four bits of ``info``."""


class NotElf(Exception):
    """The file is not a readable 64-bit little-endian ELF file."""


class Beyond(NotElf):
    """The file is one, and is larger than any library, or claims to be, or is damaged: it is not read."""


@dataclass(frozen=True)
class _Segment:
    file_offset: int
    address: int
    file_bytes: int
    executable: bool = False
    writable_bytes: int = 0


Place = tuple[int, int]
"""A row of a file's symbol tables: number of the section, row in it."""


@dataclass(frozen=True)
class Symbol:
    """A symbol that a file defines: virtual address in the file, and size in bytes."""

    address: int
    size: int


class Elf:
    """Symbols of one ELF file, read at once; the file is closed afterwards.

    Args:
        path: The file.
        dynamic_only: Only the symbols that the file offers to others; those of a large library's .symtab cost.

    Raises:
        NotElf: It is no 64-bit little-endian ELF file.
        OSError: It cannot be read.
    """

    def __init__(self, path: Source, *, dynamic_only: bool = False) -> None:
        headers = _Headers(_File(path), str(path))
        try:
            self._segments = _segments(headers)
            self._tables = [
                table
                for section, kind in headers.symbol_tables()
                if (kind == _DYNAMIC or not dynamic_only) and (table := _read_table(headers, section)) is not None
            ]
        except (ValueError, IndexError, OverflowError) as reason:
            raise Beyond(f"{path} is damaged: {reason}") from reason
        self.text_bytes = _text_bytes(self._segments)
        """Size of the file's code."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(table.symbols.nbytes + len(table.strings) for table in self._tables)

    def forget_symbols(self) -> None:
        """Keeps only what is loaded of the file; no symbol is found any more."""
        self._tables.clear()

    def file_offset(self, address: int) -> int | None:
        """The offset in the file of a virtual address, or None where no segment of the file holds it."""
        return _file_offset(self._segments, address)

    def address(self, file_offset: int) -> int | None:
        """The virtual address at an offset in the file: the inverse of ``file_offset``."""
        for segment in self._segments:
            if segment.file_offset <= file_offset < segment.file_offset + segment.file_bytes:
                return file_offset - segment.file_offset + segment.address
        return None

    def located(self, names: Collection[str]) -> dict[str, tuple[Place, int]]:
        """Of the functions among ``names`` that this file defines: which row of its symbol tables says so, for
        ``SymbolFile.function``, and the function's offset in the file."""
        places = {}
        for name, (table, row) in self._find(names, functions=True).items():
            offset = _code_offset(self._segments, int(table.symbols["value"][row]))
            if offset is not None:
                places[name] = ((table.section, row), offset)
        return places

    def functions(self, names: Collection[str]) -> dict[str, int]:
        """File offsets of the functions among ``names`` that this file defines."""
        return {name: offset for name, (_, offset) in self.located(names).items()}

    def symbols(self, names: Collection[str]) -> dict[str, Symbol]:
        """The symbols of any kind among ``names`` that this file defines."""
        return {
            name: Symbol(int(table.symbols["value"][row]), int(table.symbols["size"][row]))
            for name, (table, row) in self._find(names, functions=False).items()
        }

    def _find(self, names: Collection[str], *, functions: bool) -> dict[str, tuple[_Table, int]]:
        """The first row that defines each name, of the first table that has one. Of functions, those in an executable
        segment: a probe is put there."""
        rows_by_name: dict[str, tuple[_Table, int]] = {}
        for table in self._tables:
            symbols = table.symbols
            rows = np.flatnonzero(
                (symbols["section"] != 0) & ((symbols["info"] & 15) == _FUNCTION)
                if functions
                else symbols["section"] != 0
            )
            missing = [name for name in names if name not in rows_by_name]
            for name, places in _rows_named(table.strings, symbols["name"][rows], missing).items():
                row = int(rows[places[0]])
                if not functions or _code_offset(self._segments, int(symbols["value"][row])) is not None:
                    rows_by_name[name] = (table, row)
        return rows_by_name

    def variables(self) -> list[Symbol]:
        """Where the file's variables lie, those without initial values included: its writable segments."""
        return [Symbol(part.address, part.writable_bytes) for part in self._segments if part.writable_bytes]

    def load_bias(self, start: int, file_offset: int) -> int | None:
        """What to add to the file's virtual addresses, given where an executable mapping of it lies.

        Args:
            start: Address at which the mapping begins.
            file_offset: Offset in the file that is mapped there, a multiple of the page size.
        """
        for segment in self._segments:
            # The kernel maps whole pages, so a mapping begins up to a page before its segment.
            slack = segment.file_offset % mmap.PAGESIZE
            if (
                segment.executable
                and segment.file_offset - slack <= file_offset < segment.file_offset + segment.file_bytes
            ):
                return start - (file_offset - segment.file_offset + segment.address)
        return None

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
                name = table.strings[start : start + _LONGEST_SYMBOL]
                return name.partition(b"\0")[0].decode(errors="replace")
        return None


class SymbolFile:
    """An ELF file of which only the headers were read.

    Args:
        path: The file.

    Attributes:
        file: It, open.

    Raises:
        NotElf: It is no 64-bit little-endian ELF file.
        OSError: It cannot be read.
    """

    def __init__(self, path: Source) -> None:
        self._image = _File(path)
        self.file = self._image.file
        try:
            self._headers = _Headers(self._image, str(path))
            self._segments = _segments(self._headers)
            self.build_id = self._headers.build_id()
            """GNU build id in hexadecimal; empty: it has none."""
        except (ValueError, IndexError, OverflowError) as reason:
            raise Beyond(f"{path} is damaged: {reason}") from reason

    @property
    def text_bytes(self) -> int:
        """Size of the file's code."""
        return _text_bytes(self._segments)

    @property
    def layout(self) -> bytes:
        """Segments and sections as the file has them. Tools that move a library's parts leave its build id."""
        return self._headers.segments.tobytes() + self._headers.sections.tobytes()

    @property
    def name_bytes(self) -> int:
        """Size of the tables of the symbols' names: what reading all of them costs."""
        sections = self._headers.sections
        links = sections["link"][[section for section, _ in self._headers.symbol_tables()]]
        return sum(sections["size"][links[links < len(sections)]].tolist())

    def function(self, name: str, place: Place) -> int | None:
        """The file offset of a function, if this row of a symbol table is of that function; else None."""
        section, row = place
        sections = self._headers.sections
        if not 0 <= section < len(sections) or int(sections["type"][section]) not in _SYMBOL_TABLES:
            return None
        table = sections[section]
        if not 0 <= row < int(table["size"]) // SYMBOL.itemsize or int(table["link"]) >= len(sections):
            return None
        at = int(table["offset"]) + row * SYMBOL.itemsize
        raw = self._image[at : at + SYMBOL.itemsize]
        if len(raw) < SYMBOL.itemsize:
            return None
        symbol = np.frombuffer(raw, SYMBOL)[0]
        if symbol["section"] == 0 or (int(symbol["info"]) & 15) != _FUNCTION:
            return None
        strings = sections[int(table["link"])]
        word = name.encode() + b"\0"
        begin = int(symbol["name"])
        if begin + len(word) > int(strings["size"]):
            return None
        begin += int(strings["offset"])
        if self._image[begin : begin + len(word)] != word:
            return None
        return _code_offset(self._segments, int(symbol["value"]))


def _code_offset(segments: Collection[_Segment], address: int) -> int | None:
    """As ``_file_offset``, of code alone."""
    return _file_offset([segment for segment in segments if segment.executable], address)


def _file_offset(segments: Collection[_Segment], address: int) -> int | None:
    for segment in segments:
        if segment.address <= address < segment.address + segment.file_bytes:
            return address - segment.address + segment.file_offset
    return None


def _text_bytes(segments: Collection[_Segment]) -> int:
    return sum(segment.file_bytes for segment in segments if segment.executable)


def _rows_named(text: bytes, names: NDArray[np.uint32], wanted: Collection[str]) -> dict[str, list[int]]:
    """Which symbols have these names, without a look at each name: eight bytes of all of them at a time.

    Args:
        text: The table of names, each ended by a zero byte.
        names: Where in ``text`` each symbol's name begins, shape (n,).
        wanted: The names.

    Returns:
        For each name that some symbol has, their places in ``names``, ascending.

    Raises:
        NotElf: More of them look alike than in any library.
    """
    words = {name.encode(): name for name in wanted}
    rows_by_name: dict[str, list[int]] = {}

    def check(rows: NDArray[np.intp]) -> None:
        begins, which = np.unique(names[rows], return_inverse=True)
        if len(begins) > _MOST_ALIKE:
            raise Beyond(f"{len(begins)} names look like those of functions that are looked for")
        for number, begin in enumerate(begins.tolist()):
            name = words.get(text[begin : begin + longest].partition(b"\0")[0])
            if name is not None and text[begin : begin + longest].find(b"\0") >= 0:
                rows_by_name.setdefault(name, []).extend(rows[which == number][:_MOST_ALIKE].tolist())

    longest = max(map(len, words), default=0) + 1
    last = len(text) - _CHUNK
    # The chunks of names that begin near the table's end would reach over it.
    near = names.astype(np.int64) > last - longest
    check(np.flatnonzero(near & (names < len(text))))
    rows = np.flatnonzero(~near)
    at = 0
    pending = list(words)
    while pending and len(rows):
        # As a view of every eight bytes in the text: what is taken from it is a copy of a few.
        chunks = np.ndarray((len(text) - _CHUNK + 1,), "<u8", text, strides=(1,))[names[rows] + np.uint32(at)]
        going_on = np.zeros(len(rows), bool)
        ends = np.zeros(len(rows), bool)
        for count in {min(len(word) + 1 - at, _CHUNK) for word in pending}:
            alike = [word for word in pending if min(len(word) + 1 - at, _CHUNK) == count]
            keys = [int.from_bytes((word + b"\0")[at : at + count], "little") for word in alike]
            match = _among(chunks & np.uint64((1 << 8 * count) - 1), np.array(sorted(set(keys)), np.uint64))
            if any(len(word) + 1 > at + _CHUNK for word in alike):
                going_on |= match
            if any(len(word) + 1 <= at + _CHUNK for word in alike):
                ends |= match
        check(rows[ends])
        rows = rows[going_on]
        at += _CHUNK
        pending = [word for word in pending if len(word) + 1 > at]
    return {name: sorted(set(places)) for name, places in rows_by_name.items()}


def _among(values: NDArray[np.uint64], few: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which values are among a few sorted ones: ``np.isin`` would sort the values."""
    matches: NDArray[np.bool_] = few[np.minimum(few.searchsorted(values), len(few) - 1)] == values
    return matches


def _occurrences(text: bytes, word: bytes) -> list[int]:
    places = []
    at = text.find(word)
    while at >= 0:
        places.append(at)
        at = text.find(word, at + 1)
    return places


_STATIC, _DYNAMIC = 2, 11
_SYMBOL_TABLES = {_STATIC: "SHT_SYMTAB", _DYNAMIC: "SHT_DYNSYM"}
_INDIRECT_FUNCTION = 10
"""STT_GNU_IFUNC: code that chooses the function."""
_SPECIAL_SECTIONS = 0xFF00
"""SHN_LORESERVE: from here on a symbol's section number is no section (absolute, common)."""
_LOAD, _NOTE = 1, 4
"""PT_LOAD, PT_NOTE."""
_NT_GNU_BUILD_ID = 3
_ALIAS_BYTES = 64
"""How far names of one address are compared for length."""
_STRINGS_IN_MEMORY = 1 << 20
"""A larger table of names stays in its file: libtorch_cpu's takes 74 MB, and few of its names are ever asked for."""
_LONGEST_SYMBOL = 1 << 14
_MOST_BYTES = 512 << 20
"""Of a section that is read: PyTorch's names of symbols take 80 MB, with all debug information some 200."""
_MOST_BYTES_IN_ALL = 768 << 20
"""Of all sections of a file that are read."""
_MOST_SYMBOLS = 8 << 20
"""Of a table: libtorch_cpu has half a million."""
_MOST_PER_BLOCK, _MOST_INLINE = 32, 4 << 20
"""A section is at most so many times as large as what the file takes on its disk, and so many bytes more: file systems
compress. A file with holes claims any size."""
_MOST_SEGMENTS = 256
"""That are loaded: libraries have 4 to 20."""
_MOST_NOTES, _MOST_NOTE_BYTES = 16, 1 << 16
_MOST_ALIKE = 1 << 18
"""Names that are compared in whole with those that are looked for: 53,000 of libarrow, for 400."""
_MOST_NESTED = 4096
"""Functions inside a function that are passed over on the way to it."""
_MOST_CODE = 4 << 20
"""Bytes of a function that are searched for jumps, and functions among whose parts they lead, at most:"""
_MOST_PARTS = 256
_MOST_NAMES_READ = 1 << 16
_XZ_MEMORY, _XZ_BYTES = 128 << 20, 64 << 20
"""What the decoder may take (``xz -9`` needs 65 MiB), and what comes out of ``.gnu_debugdata``: of a large library
some MB."""
_MOST_CHECKED = 512 << 20
"""A debug file without a build id is checked whole (CRC-32, 0.5 s)."""
_ROWS_AT_ONCE = 1 << 17
_LONGEST_NAME = 255
"""NAME_MAX."""
_CHUNK = 8
"""Bytes of a name that are compared at a time."""

# Elf64_Phdr and Elf64_Shdr, from the System V ABI.
_SEGMENT = np.dtype(
    [("type", "<u4"), ("flags", "<u4")]
    + [(name, "<u8") for name in ("offset", "address", "physical", "file_bytes", "memory_bytes", "align")]
)
_SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4")]
    + [(name, "<u8") for name in ("flags", "address", "offset", "size")]
    + [("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry_bytes", "<u8")]
)


class _File:
    """Bytes of a file, read when they are asked for: a map would kill Argus if the file were cut short meanwhile."""

    def __init__(self, source: Source) -> None:
        self.file = source if isinstance(source, File) else open_file(source)

    def __len__(self) -> int:
        return self.file.status_now().st_size

    @property
    def most(self) -> int:
        """A section of it is not larger than this."""
        # Some file systems report no blocks at all; nothing can be inferred from them.
        on_disk = self.file.status_now().st_blocks * 512
        return _MOST_PER_BLOCK * on_disk + _MOST_INLINE if on_disk else _MOST_BYTES

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(len(self))
        return self.file.read(end - begin, begin)


_Image = bytes | _File


class _Headers:
    """Segments and sections of an ELF image.

    Raises:
        NotElf: It is none, or damaged.
    """

    def __init__(self, image: _Image, shown: str) -> None:
        if image[:6] != b"\x7fELF\x02\x01" or len(image) < 64:
            raise NotElf(f"{shown} is not a 64-bit little-endian ELF file")
        self.image = image
        self._read_bytes = 0
        self._most = image.most if isinstance(image, _File) else _MOST_BYTES
        self.segments = self._table(int.from_bytes(image[32:40], "little"), image[56:58], _SEGMENT)
        self.sections = self._table(int.from_bytes(image[40:48], "little"), image[60:62], _SECTION)
        self._names = b""
        names = int.from_bytes(image[62:64], "little")
        if names < len(self.sections):
            self._names = self.data(names)

    def _table(self, offset: int, count: bytes, record: np.dtype[np.void]) -> NDArray[np.void]:
        raw = self.image[offset : offset + int.from_bytes(count, "little") * record.itemsize]
        return np.frombuffer(raw, record, count=len(raw) // record.itemsize)

    def data(self, section: int) -> bytes:
        """What a section holds in the file.

        Raises:
            NotElf: More than any library's, as a file with holes can claim.
        """
        header = self.sections[section]
        begin, size = int(header["offset"]), int(header["size"])
        self._read_bytes += max(min(size, len(self.image) - begin), 0)
        if size > min(_MOST_BYTES, self._most) or self._read_bytes > _MOST_BYTES_IN_ALL:
            raise Beyond(f"section {section} claims {size} bytes")
        return self.image[begin : begin + size]

    def symbol_tables(self) -> list[tuple[int, int]]:
        """Numbers and types of the sections with symbols: the first of each type; a file may have no more (System V
        ABI, "Sections")."""
        kinds = self.sections["type"].tolist()
        return sorted((kinds.index(kind), kind) for kind in _SYMBOL_TABLES if kind in kinds)

    def symbols(self, section: int) -> NDArray[np.void]:
        """A table of symbols.

        Raises:
            NotElf: It is larger than any library's.
        """
        raw = self.data(section)
        if len(raw) > _MOST_SYMBOLS * SYMBOL.itemsize:
            raise Beyond(f"section {section} has {len(raw) // SYMBOL.itemsize} symbols")
        return np.frombuffer(raw, SYMBOL, count=len(raw) // SYMBOL.itemsize)

    def index(self, name: bytes) -> int | None:
        """The number of the section of this name, or None where there is none."""
        for index, at in enumerate(self.sections["name"].tolist()):
            if self._names.startswith(name + b"\0", at):
                return index
        return None

    def section(self, name: bytes) -> bytes | None:
        """What the section of this name holds, or None where there is none."""
        index = self.index(name)
        return None if index is None else self.data(index)

    def build_id(self) -> str:
        """The GNU build id in hexadecimal, from the notes; empty: none."""
        for segment in self.segments[self.segments["type"] == _NOTE][:_MOST_NOTES]:
            size = min(int(segment["file_bytes"]), _MOST_NOTE_BYTES)
            notes = self.image[int(segment["offset"]) : int(segment["offset"]) + size]
            align = 8 if segment["align"] == 8 else 4
            at = 0
            while at + 12 <= len(notes):
                name_bytes, data_bytes, kind = np.frombuffer(notes, "<u4", 3, at).tolist()
                data_at = at + -(-(12 + name_bytes) // align) * align
                if kind == _NT_GNU_BUILD_ID and notes[at + 12 : at + 12 + name_bytes] == b"GNU\0":
                    return notes[data_at : data_at + data_bytes].hex()
                at = data_at + -(-data_bytes // align) * align
        return ""


@dataclass(frozen=True)
class _Table:
    section: int
    symbols: NDArray[np.void]
    strings: bytes


def _read_table(headers: _Headers, section: int) -> _Table | None:
    """A symbol table with its names; None: its names are nowhere."""
    link = int(headers.sections["link"][section])
    if link >= len(headers.sections):
        return None
    return _Table(section, headers.symbols(section), headers.data(link))


def _segments(headers: _Headers) -> list[_Segment]:
    """What is loaded of the file.

    Raises:
        NotElf: More segments than any library has.
    """
    if int((headers.segments["type"] == _LOAD).sum()) > _MOST_SEGMENTS:
        raise Beyond("it has more segments than any library")
    return [
        _Segment(
            int(segment["offset"]),
            int(segment["address"]),
            int(segment["file_bytes"]),
            bool(segment["flags"] & _EXECUTABLE),
            int(segment["memory_bytes"]) if segment["flags"] & _WRITABLE else 0,
        )
        for segment in headers.segments[headers.segments["type"] == _LOAD]
    ]


class _Names:
    """A table of strings: in memory, or, if large, in its file, which is then held open."""

    def __init__(self, image: _Image, offset: int, text: bytes) -> None:
        self._text = b""
        self._file: File | None = None
        self._offset = offset
        self._length = len(text)
        if len(text) <= _STRINGS_IN_MEMORY or isinstance(image, bytes):
            self._text = text
        else:
            self._file = image.file

    @property
    def nbytes(self) -> int:
        return len(self._text)

    def places(self, name: bytes) -> list[int]:
        """Where a name lies in a table that is in memory."""
        return _occurrences(self._text, name + b"\0")

    def __getitem__(self, at: int) -> str:
        if self._file is None:
            raw = self._text[at : at + _LONGEST_SYMBOL]
        else:
            raw = self._file.read(min(512, self._length - at), self._offset + at)
            if b"\0" not in raw:
                raw = self._file.read(min(_LONGEST_SYMBOL, self._length - at), self._offset + at)
        return raw.partition(b"\0")[0].decode(errors="replace")


@dataclass
class _Columns:
    start: NDArray[np.uint64]
    size: NDArray[np.uint64]
    name: NDArray[np.uint32]
    rank: NDArray[np.uint32]
    """Which of several names of one address is preferred: the smallest."""
    names: _Names


_RANK_INDIRECT, _RANK_LOCAL, _RANK_UNSIZED = 1 << 7, 1 << 8, 1 << 9


class FunctionTable:
    """Which function of an ELF file an address is in.

    All function symbols count, local ones too: of ``.symtab``, ``.dynsym``, the compressed table ``.gnu_debugdata``
    (Fedora, RHEL) and, where the file was stripped, of its separate debug file. Of several names of one address the
    one is taken that is not local and is shortest. A symbol without a size (hand-written assembly) reaches to the next
    symbol, or the end of its section, if local symbols are known; else it covers its first byte only, since the
    functions behind it may have no symbols.

    Args:
        file: The file, or the image itself (the vdso).
        shown_path: The file's path as its process sees it: separate debug files are looked for beside it.
        root: The process's root folder, a path of Argus's own: separate debug files are looked for in it. Empty:
            nowhere.
        system_root: A root folder below which the process has no say, with /usr/lib/debug/.build-id. Empty: none. The
            name of a debug file that the file itself has is not looked for there.
        split: Functions whose other parts are looked for in stripped files: compilers move what a profile calls cold
            out of a function (``_other_parts``). A part is named as gcc names it, ``function.cold``.

    Raises:
        NotElf: It is no 64-bit little-endian ELF file.
        OSError: It cannot be read.
    """

    build_id: str
    """GNU build id in hexadecimal; empty: it has none."""
    debug_file: str
    """The separate debug file that was used; empty: none."""
    of_root: bool
    """Whether the debug file was found in the process's own root: another process's may have another one there."""
    refused: bool
    """Whether debug files were not looked for, because paths of the process did not answer before."""
    left_out: bool
    """Whether it has a compressed table that is larger than any library's, or damaged, and was not read."""

    def __init__(
        self,
        file: Source | bytes,
        shown_path: str = "",
        root: str = "/",
        system_root: str = "",
        split: Collection[str] = (),
    ) -> None:
        self.debug_file = ""
        self.of_root = self.refused = self.left_out = False
        self._unwound = np.empty((2, 0), np.uint64)
        """Begins and ends of functions that unwind tables list, without names, where symbols are few."""
        shown = shown_path or "the image"
        headers = _Headers(file if isinstance(file, bytes) else _File(file), shown)
        try:
            self.build_id = headers.build_id()
            loaded = headers.segments[(headers.segments["type"] == _LOAD) & (headers.segments["file_bytes"] > 0)]
            if len(loaded) > _MOST_SEGMENTS:
                raise Beyond(f"{shown} has more segments than any library")
            # Executable segments come first, so that they win where two share a page of the file.
            loaded = loaded[np.argsort(~loaded["flags"] & _EXECUTABLE, kind="stable")]
            self._segments = [_Segment(*row) for row in loaded[["offset", "address", "file_bytes"]].tolist()]
            sources = _columns(headers)
            if not _has_local(headers):
                sources += self._more(headers, shown_path, root, system_root)
                self._unwound = _unwound(headers)
                sources += [part for name in split for part in self._parts(headers, sources, name)]
        except (ValueError, IndexError, OverflowError) as reason:
            raise Beyond(f"{shown} is damaged: {reason}") from reason
        self._join(sources)

    def _more(self, headers: _Headers, shown_path: str, root: str, system_root: str) -> list[_Columns]:
        """Symbols of a stripped file that were kept elsewhere."""
        compressed = headers.section(b".gnu_debugdata")
        if compressed is not None:
            try:
                return _columns(_Headers(_decompressed(compressed), ".gnu_debugdata"))
            except (lzma.LZMAError, MemoryError, NotElf):
                self.left_out = True
        for folder, path, crc in self._debug_files(headers, shown_path, root, system_root):
            try:
                image = _File(_in_folder(folder, path))
                debug = _Headers(image, path)
                same = debug.build_id() == self.build_id if self.build_id else _checksum(image) == crc
                if same and _has_local(debug):
                    self.debug_file = folder.rstrip("/") + path
                    self.of_root = folder != system_root
                    return _columns(debug)
            except TimeoutError:
                self.refused = True
            except (OSError, NotElf):
                continue
        return []

    def _debug_files(
        self, headers: _Headers, shown_path: str, root: str, system_root: str
    ) -> Iterator[tuple[str, str, int]]:
        """Where gdb looks too ("Separate Debug Files" in its manual): a root folder, a path in it, and the checksum
        that .gnu_debuglink asks for."""
        if self.build_id:
            for folder in dict.fromkeys((system_root, root)):
                yield folder, f"/usr/lib/debug/.build-id/{self.build_id[:2]}/{self.build_id[2:]}.debug", 0
        link = headers.section(b".gnu_debuglink")
        if link is not None and shown_path:
            name = os.fsdecode(link.partition(b"\0")[0])
            if name and "/" not in name and len(name) <= _LONGEST_NAME:
                beside = os.path.dirname(shown_path)
                for place in (f"{beside}/{name}", f"{beside}/.debug/{name}", f"/usr/lib/debug{beside}/{name}"):
                    yield root, place, int.from_bytes(link[-4:], "little")

    def _parts(self, headers: _Headers, sources: list[_Columns], name: str) -> list[_Columns]:
        """Columns of the other parts of a function, where none of its own names covers them."""
        begins, ends = self._unwound
        for columns in sources:
            for at in np.flatnonzero(np.isin(columns.name, columns.names.places(name.encode())))[:_MOST_NOTES].tolist():
                begin, size = int(columns.start[at]), int(columns.size[at])
                parts = _other_parts(lambda a, b: self._code(headers, a, b), (begin, begin + size), begins, ends)
                if len(parts):
                    row = np.zeros(len(parts), np.uint32)
                    text = f"{name}.cold\0".encode()
                    sizes = ends[parts] - begins[parts]
                    return [_Columns(begins[parts], sizes, row, row + _RANK_LOCAL, _Names(b"", 0, text))]
        return []

    def _code(self, headers: _Headers, begin: int, end: int) -> bytes:
        """What lies between two virtual addresses; nothing where that is more than a function."""
        if end - begin > _MOST_CODE:
            return b""
        for segment in self._segments:
            if segment.address <= begin and end <= segment.address + segment.file_bytes:
                at = begin - segment.address + segment.file_offset
                return headers.image[at : at + end - begin]
        return b""

    def _join(self, sources: list[_Columns]) -> None:
        """One table of all, sorted by address, one name an address."""
        if not sources:
            nothing = np.zeros(0, np.uint64)
            sources = [
                _Columns(nothing, nothing, nothing.astype(np.uint32), nothing.astype(np.uint32), _Names(b"", 0, b""))
            ]
        start = np.concatenate([columns.start for columns in sources])
        rank = np.concatenate([columns.rank for columns in sources])
        order = np.lexsort((rank, start))
        start = start[order]
        order = order[np.concatenate(([True], start[1:] != start[:-1]))[: len(start)]]
        self._start = np.concatenate([columns.start for columns in sources])[order]
        end = self._start + np.concatenate([columns.size for columns in sources])[order]
        unsized = rank[order] >= _RANK_UNSIZED
        end[:-1] = np.where(unsized[:-1], np.minimum(end[:-1], self._start[1:]), end[:-1])
        self._end = end
        self._name = np.concatenate([columns.name for columns in sources])[order]
        self._read: dict[int, str] = {}
        self._names = [columns.names for columns in sources]
        self._source = np.repeat(np.arange(len(sources), dtype=np.uint8), [len(c.start) for c in sources])[order]
        # Symbols inside others (an entry point in the middle of a function): how far back one may have to look.
        self._reach = np.maximum.accumulate(end) if (end[:-1] > self._start[1:]).any() else None

    def __len__(self) -> int:
        return len(self._start)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        columns = (self._start, self._end, self._name, self._source, self._reach, self._unwound)
        return sum(c.nbytes for c in columns if c is not None) + sum(names.nbytes for names in self._names)

    def virtual(self, file_offset: int) -> int | None:
        """The virtual address of a file offset, or None where no segment of the file holds it."""
        for segment in self._segments:
            if segment.file_offset <= file_offset < segment.file_offset + segment.file_bytes:
                address = file_offset - segment.file_offset + segment.address
                return address if address < 1 << 64 else None
        return None

    def find(self, address: int) -> int | None:
        """The function that a virtual address is in (a number for ``name``), or None. The innermost, where one lies in
        another."""
        wanted = np.uint64(address)
        at = int(self._start.searchsorted(wanted, "right")) - 1
        last = at - _MOST_NESTED
        while at >= 0 and self._end[at] <= wanted:
            at = at - 1 if self._reach is not None and self._reach[at] > wanted and at > last else -1
        return at if at >= 0 else None

    def bounds(self, address: int) -> tuple[int, int] | None:
        """Begin and end of the function that a virtual address is in, named or not; None: not known, or another begins
        inside it."""
        at = self.find(address)
        if at is not None:
            begin, end = int(self._start[at]), int(self._end[at])
            return None if at + 1 < len(self._start) and self._start[at + 1] < end else (begin, end)
        begins, ends = self._unwound
        at = int(begins.searchsorted(np.uint64(address), "right")) - 1
        if at < 0 or ends[at] <= address:
            return None
        # Where a symbol covers a part of it, that part is another function.
        begin, end = int(begins[at]), int(ends[at])
        near = slice(int(self._start.searchsorted(np.uint64(begin))), int(self._start.searchsorted(np.uint64(end))))
        return None if near.stop > near.start or self.find(begin) is not None else (begin, end)

    def name(self, function: int) -> str:
        """The symbol, as the file has it, without a version (``@GLIBC_…``)."""
        symbol = self._read.get(function)
        if symbol is None:
            if len(self._read) >= _MOST_NAMES_READ:
                self._read.clear()
            whole = self._names[self._source[function]][int(self._name[function])]
            symbol = self._read[function] = whole.partition("@")[0] or whole
        return symbol


def _in_folder(folder: str, path: str) -> File:
    """A regular file below a root folder, as a process with that root resolves its path.

    Raises:
        OSError: It is not there, or is no regular file.
    """
    if not folder:
        raise Refused("there is no such folder")
    with progress.look_up():
        root = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_in_root(root, path)
    finally:
        os.close(root)


def _decompressed(data: bytes) -> bytes:
    """What an xz stream holds.

    Raises:
        NotElf: More than any library's.
        LZMAError, MemoryError: It is damaged, or needs more memory than ``_XZ_MEMORY``.
    """
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    whole = decoder.decompress(data, max_length=_XZ_BYTES)
    if not decoder.eof:
        raise Beyond(".gnu_debugdata is cut short, or larger than that of any library")
    return whole


def _checksum(image: _File) -> int:
    """CRC-32 of a whole file; -1: it is larger than any that is checked."""
    size = len(image)
    if size > min(_MOST_CHECKED, image.most):
        return -1
    checksum = 0
    for at in range(0, size, _STRINGS_IN_MEMORY):
        checksum = zlib.crc32(image[at : at + _STRINGS_IN_MEMORY], checksum)
    return checksum


_FRAME_HEADER = bytes((1, 0x1B, 0x03, 0x3B))
"""Version 1, and the encodings that linkers write: DW_EH_PE_pcrel|sdata4, udata4, datarel|sdata4."""


def _unwound(headers: _Headers) -> NDArray[np.uint64]:
    """Begins and ends of all functions, shape (2, n), by ``.eh_frame_hdr`` and ``.eh_frame`` (Linux Standard Base,
    Core, chapter "Exception Frames"). Those whose two tables disagree are left out."""
    nothing = np.empty((2, 0), np.uint64)
    places = [headers.index(name) for name in (b".eh_frame_hdr", b".eh_frame")]
    if places[0] is None or places[1] is None:
        return nothing
    table, frames = headers.data(places[0]), headers.data(places[1])
    table_at, frames_at = (int(headers.sections["address"][place]) for place in places)
    if not table.startswith(_FRAME_HEADER) or len(table) < 12:
        return nothing
    count = min(int(np.frombuffer(table, "<u4", 1, 8)[0]), (len(table) - 12) // 8, _MOST_SYMBOLS)
    rows = np.frombuffer(table, "<i4", 2 * count, 12).reshape(-1, 2).astype(np.int64)
    begin, at = rows[:, 0] + table_at, rows[:, 1] + table_at - frames_at
    inside = (at >= 0) & (at + 16 <= len(frames))
    begin, at = begin[inside], at[inside]
    # A frame description: its length, its CIE, where the function begins (relative to that place), and how long it is.
    ranges = [nothing]
    for first in range(0, len(at), _ROWS_AT_ONCE):
        here, starts = at[first : first + _ROWS_AT_ONCE], begin[first : first + _ROWS_AT_ONCE]
        words = np.frombuffer(frames, np.uint8)[(here + 8)[:, None] + np.arange(8)].copy().view("<i4").astype(np.int64)
        same = (words[:, 0] + frames_at + here + 8 == starts) & (words[:, 1] > 0)
        ranges.append(np.stack([starts[same], (starts + words[:, 1])[same]]).astype(np.uint64))
    return np.concatenate(ranges, axis=1)


_FEWEST_JUMPS = 3
"""From a function into a part of it, and back: what looks like a jump may be a part of another instruction."""


def _other_parts(
    code: Callable[[int, int], bytes],
    function: tuple[int, int],
    begins: NDArray[np.uint64],
    ends: NDArray[np.uint64],
) -> NDArray[np.intp]:
    """Which of the functions that unwind tables list are parts of this one.

    Functions are entered where they begin. Only a part of the same function is jumped into elsewhere, and from there
    back into the middle of this one.

    Args:
        code: What lies between two addresses.
        function: Begin and end.
        begins, ends: Of the functions, ascending.
    """
    targets = _jump_targets(code(*function), function[0])
    at = begins.searchsorted(targets, "right").astype(np.intp) - 1
    inside = (at >= 0) & ((targets < function[0]) | (targets >= function[1]))
    inside[inside] &= (begins[at[inside]] < targets[inside]) & (targets[inside] < ends[at[inside]])
    starts_of, jumps = np.unique(at[inside], return_counts=True)

    def returns(part: int) -> int:
        back = _jump_targets(code(int(begins[part]), int(ends[part])), int(begins[part]))
        return int(((function[0] < back) & (back < function[1])).sum())

    often = starts_of[jumps >= _FEWEST_JUMPS][:_MOST_PARTS]
    parts = [part for part in often.tolist() if returns(part) >= _FEWEST_JUMPS]
    return np.array(parts, np.intp)


def _jump_targets(code: bytes, address: int) -> NDArray[np.uint64]:
    """Where bytes that may be jumps lead: ``E9`` and ``0F 80`` to ``0F 8F`` with a displacement of 32 bits (Intel's
    manual, volume 2, JMP and Jcc)."""
    if platform.machine() != "x86_64" or len(code) < 6:
        return np.empty(0, np.uint64)
    data = np.frombuffer(code, np.uint8)
    conditional = np.flatnonzero((data[:-5] == 0x0F) & (data[1:-4] & 0xF0 == 0x80)) + 1
    at = np.concatenate([np.flatnonzero(data[:-4] == 0xE9), conditional]) + 1
    displacements = data[at[:, None] + np.arange(4)].copy().view("<i4")[:, 0]
    targets: NDArray[np.int64] = at + 4 + address + displacements.astype(np.int64)
    return targets.astype(np.uint64)


def _has_local(headers: _Headers) -> bool:
    """Whether the table that has local symbols too was left in."""
    return _STATIC in headers.sections["type"]


def _columns(headers: _Headers) -> list[_Columns]:
    """The functions of each symbol table of an image."""
    tables = []
    sections = headers.sections
    section_end = sections["address"] + sections["size"]
    for index, number in headers.symbol_tables():
        kind = _SYMBOL_TABLES[number]
        if int(sections["link"][index]) >= len(sections):
            continue
        symbols = headers.symbols(index)
        strings = sections[sections["link"][index]]
        text = headers.data(int(sections["link"][index]))
        symbols = symbols[
            np.isin(symbols["info"] & 15, (_FUNCTION, _INDIRECT_FUNCTION))
            & (symbols["section"] != 0)
            & (symbols["section"] < min(_SPECIAL_SECTIONS, len(sections)))
            & (symbols["name"] < len(text))
        ]
        size = symbols["size"].copy()
        unsized = size == 0
        rest = section_end[symbols["section"]] - symbols["value"]
        # To the end of the section; ``_join`` cuts it at the next symbol.
        size[unsized] = rest[unsized] if kind == "SHT_SYMTAB" else 1
        damaged = (size > np.maximum(rest, 1)) | (rest > section_end[symbols["section"]])  # not in its section
        size[damaged] = 1
        rank = np.where(symbols["info"] >> 4 == 0, np.uint32(_RANK_LOCAL), np.uint32(0))
        rank[(symbols["info"] & 15) == _INDIRECT_FUNCTION] += np.uint32(_RANK_INDIRECT)
        rank[unsized] += np.uint32(_RANK_UNSIZED if kind == "SHT_SYMTAB" else 2 * _RANK_UNSIZED)
        rank += _lengths(text, symbols["name"], symbols["value"])
        names = _Names(headers.image, int(strings["offset"]), text)
        tables.append(_Columns(symbols["value"].copy(), size, symbols["name"].copy(), rank, names))
    return tables


def _lengths(text: bytes, names: NDArray[np.uint32], values: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Lengths of the names of addresses that have several, up to ``_ALIAS_BYTES``; 0 for all others."""
    lengths = np.zeros(len(names), np.uint32)
    order = np.argsort(values)
    same = values[order][1:] == values[order][:-1]
    several = order[np.concatenate((same, [False])) | np.concatenate(([False], same))] if len(same) else order[:0]
    if len(several):
        # A large table is not copied for the sake of its last names.
        table = np.frombuffer(text if len(text) > 1 << 16 else text + bytes(_ALIAS_BYTES), np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(table, _ALIAS_BYTES)
        for first in range(0, len(several), _ROWS_AT_ONCE):
            these = several[first : first + _ROWS_AT_ONCE]
            ends = windows[np.minimum(names[these], len(windows) - 1)] == 0
            lengths[these] = np.where(ends.any(axis=1), ends.argmax(axis=1), _ALIAS_BYTES)
        last = several[names[several] >= len(windows)]
        lengths[last] = [len(text[at : at + _ALIAS_BYTES].partition(b"\0")[0]) for at in names[last].tolist()]
    return lengths
