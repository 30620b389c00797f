"""From a frame's code object to function, file and line.

Code objects come and go, and a new one may lie where an old one was. So the kernel reads what a frame's code object is
called while the thread runs in it, and sends it once (``records.CODE``). Where it did not (an object longer than its
record, a full ring, a stack that was read from outside), the process's memory is read, and every frame is checked
against what lies there now: the pointers of the object's names and tables, its first line and, from 3.12 on, its
version number. A frame that no longer fits is None, and counted, never guessed.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.capture.bounded import text_bytes
from argus.capture.python import layouts
from argus.capture.python.interpreter import PythonProcess, check_of, is_hidden, read_memory
from argus.capture.reader import progress
from argus.model.records import CODE, FRAME_ENTRY, NO_OFFSET

MAX_NAME = 4096
"""Characters of a name that are kept; a longer one ends in "…"."""
MAX_STRING = 1 << 24
"""A string that says it has more characters is garbage."""
MAX_LINE_TABLE = 1 << 18
"""A line table with more bytes is not read: its function's lines are not known (2,000 lines take 10 KB)."""
MAX_LINE = (1 << 31) - 1
"""Lines that a table says are beyond it are taken for this one. CPython's own are ints of C."""
_MAX_SHIFT = 30
"""Bits that a number of a line table has at most, before its last six: what comes after them is left out."""
MAX_CODES = 16_384
"""Code objects remembered for a process; all are forgotten when there are more."""
MAX_CODE_BYTES = 16 << 20
"""The same of their names, tables and lines: read from memory, and as much of what the kernel sent."""
DECODED_BYTES = 2 << 20
"""Long line tables that are decoded between two times that counts become rows: half a second of CPU at worst."""
_SCANNED_TABLE = 512
"""A line table of up to so many bytes is read anew for each instruction, up to it; a longer one is decoded once."""
_FIRST_READ = 256
"""Bytes of an object that are read at first: most names, file names and line tables fit."""


CHAIN_FRAMES, CHAIN_BYTES = 4096, 512 << 10
"""Frames of one stack that are named, from the leaf on, and bytes of their names and files: 128 for each. CPython ends
a recursion at 1,000 frames, unless a program asks for more."""
MAX_CHAIN_BYTES = 32 << 20
"""What may be remembered of whole stacks of a process; all is forgotten when there is more."""
MAX_FRAMES = 1 << 17
"""Frames that are remembered for a process: a code object has one for each of its instructions that was met."""
_FRAME_BYTES = 160
_ALL = 1 << 62
_MAX_SPANS = 1024
"""UIO_MAXIOV of include/uapi/linux/uio.h."""

_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")


@dataclass(frozen=True)
class PythonFrame:
    """One Python function at work.

    Attributes:
        function: Qualified name (3.11 and later), else the plain name.
        file: As the code object has it.
        line: 0: the instruction has none.
    """

    function: str
    file: str
    line: int


HIDDEN = PythonFrame("__init__", "__init__", 0)
"""What ``resolve`` gives for CPython's own frame below an inlined ``__init__`` (``python.is_hidden``): to be left out.
The kernel's walk keeps such frames, ``PythonProcess.walk`` does not."""


@dataclass(frozen=True, eq=False)
class Chain:
    """The Python frames of a stack, leaf first, without those that are ``HIDDEN``. Equal only to itself.

    Attributes:
        frames: None: it could not be named.
        entries: Whether C code called it.
        cut: The frames nearest to the root were left out: beyond ``CHAIN_FRAMES`` or ``CHAIN_BYTES``.
    """

    frames: tuple[PythonFrame | None, ...]
    entries: tuple[bool, ...]
    cut: bool = False

    @property
    def nbytes(self) -> int:
        """What it takes, about, with its names."""
        texts = sum(text_bytes(one.function) + text_bytes(one.file) for one in self.frames if one is not None)
        return 16 * len(self.frames) + texts


NO_CHAIN = Chain((), ())


class _Code:
    """A code object whose names are known; lines are decoded when first asked for."""

    __slots__ = (
        "content",
        "covered_to",
        "ends",
        "file",
        "frames",
        "function",
        "header",
        "line_table",
        "lines",
        "spans",
        "text_bytes",
    )

    @property
    def nbytes(self) -> int:
        """What it takes, about, once its lines are decoded (8 bytes a range twice, a range takes two or more)."""
        held = sum(len(data) for data in self.content if data is not None)
        return 400 + self.text_bytes + 9 * len(self.line_table) + held

    def __init__(self, header: tuple[int, ...], function: str, file: str, line_table: bytes) -> None:
        self.header = header
        self.function = function
        self.file = file
        self.text_bytes = text_bytes(function) + text_bytes(file)
        self.line_table = line_table
        self.spans: tuple[tuple[int, int], ...] = ()
        self.content: tuple[bytes | None, ...] = ()
        self.frames: dict[int, PythonFrame] = {}
        self.ends: array[int] | None = None
        self.lines: array[int] | None = None
        self.covered_to = _ALL
        """The first instruction whose line is not known, since the table was not sent whole."""


class _Watch:
    """Some code objects, and all of the process's memory that says that they are what they were, read in one go."""

    __slots__ = ("count", "expected", "spans")

    def __init__(self, spans: list[tuple[int, bytes]]) -> None:
        self.count = len(spans)
        self.spans = (ctypes.c_uint64 * (2 * len(spans)))(*(x for at, data in spans for x in (at, len(data))))
        self.expected = b"".join(data for _, data in spans)

    @property
    def nbytes(self) -> int:
        return 16 * self.count + len(self.expected)

    def holds(self, pid: int) -> bool:
        """Whether all of it is there now. A process that took over the number does not have it."""
        size = len(self.expected)
        buffer = ctypes.create_string_buffer(size)
        progress.memory()
        here = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), size)
        return _read_spans(pid, here, 1, self.spans, self.count, 0) == size and buffer.raw == self.expected


_read_spans = ctypes.CDLL(None).process_vm_readv
_read_spans.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_read_spans.restype = ctypes.c_ssize_t


class CodeResolver:
    """Names the frames of one process.

    Args:
        source: The process, or a descriptor of its /proc/PID/mem, which stays the caller's.
        layout: The interpreter's ``records.PYTHON`` record, shape () or (1,).

    Attributes:
        counters: "python_frames_unresolved": frames that could not be named; "python_code_reused": those of them where
            another code object lay by then; "python_lines_unknown": frames without their line.
        budget: Bytes of long line tables that may still be decoded; set it to ``DECODED_BYTES`` now and then.
    """

    def __init__(self, source: int | PythonProcess, layout: NDArray[np.void]) -> None:
        self._fd = source if isinstance(source, int) else source.memory.fd
        record = layout.reshape(())
        self._table = layouts.LAYOUTS[int(record["major"]), int(record["minor"])]
        self._code_type = int(record["code_type"])
        self._decode = _DECODERS[self._table.line_table]
        self._pid = 0 if isinstance(source, int) else source.pid
        self.budget = DECODED_BYTES
        self._codes: dict[int, _Code] = {}
        self._code_bytes = self._sent_code_bytes = 0
        # Of stacks met before: a program is mostly at a few places, and reading each code object of each anew, one
        # system call a piece, is most of what a sample would cost.
        self._chains: dict[bytes, tuple[list[PythonFrame | None], _Watch]] = {}
        self._watches: dict[tuple[_Code, ...], _Watch | None] = {}
        self._chain_bytes = 0
        self._frames_made = 0
        # What the kernel sent, by address and content: as it came, and as it was first asked for.
        self._sent: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._sent_codes: dict[tuple[int, int, int, int], _Code | None] = {}
        self._sent_chains: dict[bytes, Chain] = {}
        self._sent_bytes = 0
        self.counters = {"python_frames_unresolved": 0, "python_code_reused": 0, "python_lines_unknown": 0}
        fields = [
            (layouts.OBJECT_TYPE, "Q", "type"),
            (int(record["code_firstlineno"]), "I", "first"),
            (int(record["code_filename"]), "Q", "filename"),
            (int(record["code_name"]), "Q", "name"),
            (int(record["code_linetable"]), "Q", "linetable"),
        ]
        if int(record["code_qualname"]) != NO_OFFSET:
            fields.append((int(record["code_qualname"]), "Q", "qualname"))
        self._versioned = self._table.code_version != NO_OFFSET
        if self._versioned:
            fields.append((self._table.code_version, "I", "version"))
        fields.sort()
        text, at = "<", 0
        for offset, kind, _ in fields:
            text += f"{offset - at}x{kind}"
            at = offset + struct.calcsize("<" + kind)
        self._header = struct.Struct(text)
        # The fields alone, neighbours together: between them lies what changes all the time.
        self._groups: list[tuple[int, int, int, Callable[..., bytes]]] = []
        begin = 0
        for end in range(1, len(fields) + 1):
            last, kind, _ = fields[end - 1]
            if end == len(fields) or fields[end][0] != last + struct.calcsize("<" + kind):
                pack = struct.Struct("<" + "".join(kind for _, kind, _ in fields[begin:end])).pack
                self._groups.append((fields[begin][0], begin, end, pack))
                begin = end
        order = self._order = [name for *_, name in fields]
        self._type, self._first, self._filename, self._name, self._linetable = (
            order.index(name) for name in ("type", "first", "filename", "name", "linetable")
        )
        self._qualname = order.index("qualname") if "qualname" in order else -1
        self._version = order.index("version") if self._versioned else -1

    @property
    def nbytes(self) -> int:
        """What is remembered of the process takes, about."""
        frames = _FRAME_BYTES * self._frames_made
        return self._code_bytes + self._sent_code_bytes + self._chain_bytes + self._sent_bytes + frames

    def forget(self) -> None:
        """Forgets all of it: it is read anew. Frames of what the kernel sent are looked up in memory then."""
        self._sent.clear()
        self._sent_codes.clear()
        self._sent_chains.clear()
        self._sent_code_bytes = self._sent_bytes = 0
        self._codes.clear()
        self._code_bytes = 0
        self._forget_frames()

    def _forget_frames(self) -> None:
        """Whole stacks hold frames, too."""
        for code in (*self._codes.values(), *self._sent_codes.values()):
            if code is not None:
                code.frames.clear()
        self._chains.clear()
        self._watches.clear()
        self._chain_bytes = self._frames_made = 0

    def _keep_frame(self, code: _Code, instruction: int, frame: PythonFrame) -> PythonFrame:
        if self._frames_made >= MAX_FRAMES:
            self._forget_frames()
        self._frames_made += 1
        code.frames[instruction] = frame
        return frame

    def learn(self, record: NDArray[np.uint8]) -> None:
        """Takes what the kernel sent of a code object: one of ``Drained.codes``."""
        if len(self._sent) >= MAX_CODES or self._sent_code_bytes > MAX_CODE_BYTES:
            # Frames that speak of them are looked up in memory, until the dictionary of stacks begins anew.
            self._sent.clear()
            self._sent_codes.clear()
            self._sent_code_bytes = 0
        self._sent_code_bytes += record.nbytes
        head = record[:24].view("<u8")
        self._sent[int(head[0]), int(head[2])] = record

    def _sent_code(self, key: tuple[int, int, int, int]) -> _Code | None:
        """Of address, content, check and first line; None: it was not sent, or not whole."""
        if key in self._sent_codes:
            return self._sent_codes[key]
        record = self._sent.get(key[:2])
        if len(self._sent_codes) >= 4 * MAX_CODES:
            self._sent_codes.clear()
        code = self._sent_codes[key] = None if record is None else self._decode_sent(record, *key[2:])
        self._sent_code_bytes += 0 if code is None else code.nbytes
        return code

    def _decode_sent(self, record: NDArray[np.uint8], check: int, first: int) -> _Code | None:
        head = record[: CODE.itemsize].view(CODE)[0]
        if int(head["check"]) != check:
            return None
        named = self._text_of(head["name"][: int(head["name_bytes"])].tobytes())
        filed = self._text_of(head["file"][: int(head["file_bytes"])].tobytes())
        if named is None or filed is None:
            return None
        header = [0] * (len(self._order) + 1)
        header[self._first], header[-1] = first, check
        size, line_table = self._bytes_of(record[CODE.itemsize :].tobytes())
        code = _Code(tuple(header), named, filed, line_table)
        if len(line_table) < size:
            ends, lines = self._decode(line_table, first)
            # The last range may be cut, and those of _lnotab reach to the end.
            code.ends, code.lines = array("q", ends[:-1]), array("q", lines[:-1])
            code.covered_to = code.ends[-1] if code.ends else 0
        return code

    def _text_of(self, data: bytes) -> str | None:
        """A str, if its bytes are all there."""
        string = self._text(data)
        return None if isinstance(string, int) or string is None else string[0]

    def _bytes_of(self, data: bytes) -> tuple[int, bytes]:
        """How many bytes a bytes object has, at least, and those of them that are there."""
        table = self._table
        if len(data) < table.bytes_data:
            return 1, b""
        size: int = _I64.unpack_from(data, table.bytes_size)[0]
        if not 0 <= size <= MAX_LINE_TABLE:
            return 1, b""
        return size, data[table.bytes_data : table.bytes_data + size]

    def resolve(self, frames: NDArray[np.void]) -> list[PythonFrame | None]:
        """Names of the frames of one stack.

        Args:
            frames: ``records.FRAME``, leaf first.

        Returns:
            One entry for each, leaf first. ``HIDDEN``: to be left out. None: it could not be named, since the code
            object is gone, another one lies there, or it cannot be read.
        """
        rows = frames.tolist()
        resolved = self._sent_frames(rows)
        return self._resolve_in_memory(frames.tobytes(), rows) if resolved is None else resolved

    def chain(self, frames: NDArray[np.void]) -> Chain:
        """The frames of one stack, from the leaf on, as many as ``CHAIN_FRAMES`` and ``CHAIN_BYTES`` allow. What the
        kernel sent all of is remembered: it can be nothing else.

        Args:
            frames: As for ``resolve``.
        """
        longer, frames = len(frames) > CHAIN_FRAMES, frames[:CHAIN_FRAMES]
        key = frames.tobytes() + (b"+" if longer else b"=")
        cached = self._sent_chains.get(key)
        if cached is not None:
            return cached
        rows = frames.tolist()
        resolved = self._sent_frames(rows, CHAIN_BYTES)
        sent = resolved is not None
        if resolved is None:
            resolved = self._resolve_in_memory(key, rows, CHAIN_BYTES)
        pairs = zip(resolved, rows, strict=False)
        kept = [(frame, bool(row[4] & FRAME_ENTRY)) for frame, row in pairs if frame is not HIDDEN]
        cut = longer or len(resolved) < len(rows)
        chain = Chain(tuple(frame for frame, _ in kept), tuple(entry for _, entry in kept), cut)
        if sent:
            if self._sent_bytes > MAX_CHAIN_BYTES:
                self._sent_chains.clear()
                self._sent_bytes = 0
            self._sent_chains[key] = chain
            self._sent_bytes += len(key) + chain.nbytes
        return chain

    def _sent_frames(
        self, rows: list[tuple[int, int, int, int, int]], most_bytes: int = _ALL
    ) -> list[PythonFrame | None] | None:
        """The first of them with so many bytes of names; None: the kernel did not send what all of these are called."""
        resolved: list[PythonFrame | None] = []
        for address, check, content, instruction, first in rows:
            if most_bytes <= 0:
                break
            code = self._sent_code((address, content, check, first & ~FRAME_ENTRY)) if content else None
            if code is None or code.covered_to <= instruction < _NOT_BEGUN:
                return None
            frame = code.frames.get(instruction)
            if frame is None:
                frame = self._keep_frame(code, instruction, self._sent_frame(code, instruction))
            resolved.append(frame)
            most_bytes -= code.text_bytes
        return resolved

    def _sent_frame(self, code: _Code, instruction: int) -> PythonFrame:
        if code.function == code.file == HIDDEN.function and not code.header[self._first]:
            return HIDDEN
        return PythonFrame(code.function, code.file, self._line(code, instruction))

    def _resolve_in_memory(
        self, key: bytes, rows: list[tuple[int, int, int, int, int]], most_bytes: int = _ALL
    ) -> list[PythonFrame | None]:
        """The first of them with so many bytes of names. ``key``: of these frames, and of this bound."""
        if (chain := self._chains.get(key)) is not None:
            if chain[1].holds(self._pid):
                return list(chain[0])
            del self._chains[key]
        current: dict[int, _Code | None] = {}
        resolved: list[PythonFrame | None] = []
        whole = True
        for address, check, content, instruction, first in rows:
            if most_bytes <= 0:
                break
            sent = self._sent_code((address, content, check, first & ~FRAME_ENTRY)) if content else None
            if sent is not None and not sent.covered_to <= instruction < _NOT_BEGUN:
                resolved.append(self._sent_frame(sent, instruction))
                most_bytes -= sent.text_bytes
                continue
            if address in current:
                code = current[address]
            else:
                code = current[address] = self._code_at(address)
            fits = code is not None and code.header[-1] == check and code.header[self._first] == first & ~FRAME_ENTRY
            if code is None or not fits:
                whole = False
                if sent is not None:
                    self.counters["python_lines_unknown"] += 1
                    resolved.append(PythonFrame(sent.function, sent.file, 0))
                    most_bytes -= sent.text_bytes
                    continue
                self.counters["python_frames_unresolved"] += 1
                self.counters["python_code_reused"] += code is not None
                resolved.append(None)
                continue
            frame = code.frames.get(instruction)
            if frame is None:
                frame = self._keep_frame(code, instruction, self._frame(code, instruction))
            resolved.append(frame)
            most_bytes -= code.text_bytes
        if self._pid and whole and resolved:
            self._remember(key, resolved, current)
        return resolved

    def _remember(self, key: bytes, resolved: list[PythonFrame | None], current: dict[int, _Code | None]) -> None:
        """Keeps the names of a whole stack, all of which are known."""
        codes = tuple(code for code in current.values() if code is not None)
        if self._chain_bytes > MAX_CHAIN_BYTES:
            self._chains.clear()
            self._watches.clear()
            self._chain_bytes = 0
        if codes not in self._watches:
            spans = []
            for address, code in current.items():
                assert code is not None
                spans += [(address + at, pack(*code.header[begin:end])) for at, begin, end, pack in self._groups]
                for (at, _), data in zip(code.spans, code.content, strict=True):
                    assert data is not None
                    spans.append((at, data))
            watch = self._watches[codes] = _Watch(spans) if len(spans) <= _MAX_SPANS else None
            self._chain_bytes += 0 if watch is None else watch.nbytes + sum(code.text_bytes for code in codes)
        watch = self._watches[codes]
        if watch is not None:
            self._chains[key] = (list(resolved), watch)
            self._chain_bytes += len(key) + 8 * len(resolved)

    def _code_at(self, address: int) -> _Code | None:
        """The code object that lies there now."""
        header = self._read_header(address)
        if header is None:
            return None
        cached = self._codes.get(address)
        if cached is not None and cached.header[:-1] == header and self._is_unchanged(cached):
            return cached
        code = self._read_code(header)
        # It may have been freed, and its strings with it, between the two.
        if code is None or self._read_header(address) != header:
            self._codes.pop(address, None)
            return None
        if len(self._codes) >= MAX_CODES or self._code_bytes > MAX_CODE_BYTES:
            self._codes.clear()
            self._code_bytes = 0
        self._codes[address] = code
        self._code_bytes += code.nbytes
        return code

    def _read_header(self, address: int) -> tuple[int, ...] | None:
        data = read_memory(self._fd, address, self._header.size)
        if data is None:
            return None
        header: tuple[int, ...] = self._header.unpack(data)
        return header if header[self._type] == self._code_type and _is_alive(data) else None

    def _is_unchanged(self, cached: _Code) -> bool:
        """Whether equal pointers mean an equal object.

        Before 3.12 only its contents distinguish a new code object from an old one at the same place with strings at
        the same places, which is what exec() in a loop makes.
        """
        if self._versioned and cached.header[self._version]:
            return True
        return tuple(read_memory(self._fd, address, size) for address, size in cached.spans) == cached.content

    def _read_code(self, header: tuple[int, ...]) -> _Code | None:
        qualname = header[self._qualname] if self._qualname >= 0 else 0
        named = self._string(qualname or header[self._name])
        filed = self._string(header[self._filename])
        line_table = self._bytes(header[self._linetable])
        if named is None or filed is None or line_table is None:
            return None
        check = check_of(header[self._name], qualname, header[self._filename], header[self._linetable])
        code = _Code((*header, check), named[0], filed[0], line_table[0])
        if not (self._versioned and header[self._version]):
            length, size = self._table.unicode_length, self._table.bytes_size
            code.spans = (
                ((qualname or header[self._name]) + length, len(named[1])),
                (header[self._filename] + length, len(filed[1])),
                (header[self._linetable] + size, len(line_table[1])),
            )
            code.content = (named[1], filed[1], line_table[1])
        return code

    def _string(self, address: int) -> tuple[str, bytes] | None:
        """A str of the process, and the object's bytes from its length on."""
        data = self._read_some(address, _FIRST_READ)
        text = self._text(data)
        if isinstance(text, int):
            whole = read_memory(self._fd, address, text)
            text = None if whole is None else self._text(whole)
        return None if isinstance(text, int) else text

    def _text(self, data: bytes) -> tuple[str, bytes] | int | None:
        """A str object's text, and its bytes from its length on; how many bytes that takes, if these are too few; None:
        this is no str."""
        table = self._table
        if len(data) < table.unicode_compact:
            return None
        length: int = _I64.unpack_from(data, table.unicode_length)[0]
        state: int = _U32.unpack_from(data, table.unicode_state)[0] >> table.unicode_kind_shift
        width, compact, ascii_only = state & 7, state >> 3 & 1, state >> 4 & 1
        if not 0 <= length <= MAX_STRING or not compact or width not in (1, 2, 4) or (ascii_only and width != 1):
            return None
        begin = table.unicode_ascii if ascii_only else table.unicode_compact
        kept = min(length, MAX_NAME)
        end = begin + kept * width
        if end > len(data):
            return end
        try:
            text = data[begin:end].decode(_CODECS[width], errors="surrogatepass" if width > 1 else "strict")
        except UnicodeDecodeError:  # freed, and other things lie there by now
            return None
        if not ascii_only:
            # File names that are no UTF-8 hold lone surrogates, which no table takes.
            text = text.encode(errors="backslashreplace").decode()
        return text if kept == length else text + "…", data[table.unicode_length : end]

    def _bytes(self, address: int) -> tuple[bytes, bytes] | None:
        """A bytes object of the process, and the object's bytes from its size on."""
        table = self._table
        data = self._read_some(address, _FIRST_READ)
        if len(data) < table.bytes_data:
            return None
        size = _I64.unpack_from(data, table.bytes_size)[0]
        if not 0 <= size < 1 << 32:
            return None
        if size > MAX_LINE_TABLE:
            self.counters["python_lines_unknown"] += 1
            return b"", data[table.bytes_size : table.bytes_data]
        end = table.bytes_data + size
        if end > len(data):
            whole = read_memory(self._fd, address, end)
            if whole is None:
                return None
            data = whole
        return data[table.bytes_data : end], data[table.bytes_size : end]

    def _read_some(self, address: int, size: int) -> bytes:
        """Up to ``size`` bytes: less where the memory ends behind the object."""
        data = read_memory(self._fd, address, size)
        if data is None:
            data = read_memory(self._fd, address, min(size, -address % 4096 or size))
        return data or b""

    def _frame(self, code: _Code, instruction: int) -> PythonFrame:
        if self._qualname >= 0:
            h = code.header
            if is_hidden(h[self._name], h[self._qualname], h[self._filename], h[self._first]):
                return HIDDEN
        return PythonFrame(code.function, code.file, self._line(code, instruction))

    def _line(self, code: _Code, instruction: int) -> int:
        first = min(code.header[self._first], MAX_LINE)
        if instruction >= _NOT_BEGUN:
            return first
        if code.ends is None and len(code.line_table) <= _SCANNED_TABLE:
            ends, lines = self._decode(code.line_table, first, instruction)
            return lines[-1] if ends and ends[-1] > instruction else 0
        if code.ends is None or code.lines is None:
            if self.budget < len(code.line_table):
                self.counters["python_lines_unknown"] += 1
                return 0
            self.budget -= len(code.line_table)
            ends, lines = self._decode(code.line_table, first)
            code.ends, code.lines = array("q", ends), array("q", lines)
        position = bisect_right(code.ends, instruction)
        return code.lines[position] if position < len(code.lines) else 0


def _is_alive(data: bytes) -> bool:
    """Whether an object was not freed: its reference count, which comes first, is none then.

    A code object's tables are freed before it, and nothing else of it changes: it would be given lines of whatever lies
    there next. From 3.12 on the count has 32 bits, and immortal objects have the top ones set; 16 that are 0 follow
    (Include/object.h). A freed block begins with the address of the next one, or what malloc makes of it, or 0.
    """
    count, above = struct.unpack_from("<IH", data)
    return bool(count and not above)


_CODECS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}

# Each decoder gives the byte offsets at which ranges of instructions end, ascending, and the line of each (0: none), up
# to the range that holds the instruction ``until``.
_NOT_BEGUN = 1 << 31
"""An instruction from here on: the function has not begun."""


def _lnotab(table: bytes, first: int, until: int = _ALL) -> tuple[list[int], list[int]]:
    """3.8 and 3.9: pairs of unsigned steps of the offset and signed steps of the line (Objects/lnotab_notes.txt)."""
    ends: list[int] = []
    lines: list[int] = []
    offset, line = 0, first
    for position in range(0, len(table) - 1, 2):
        step = table[position]
        if step:
            offset += step
            ends.append(offset)
            lines.append(min(max(line, 0), MAX_LINE))
            if offset > until:
                break
        delta = table[position + 1]
        line += delta - 256 if delta > 127 else delta
    else:
        # The last line reaches to the end of the code, wherever that is.
        ends.append(1 << 31)
        lines.append(min(max(line, 0), MAX_LINE))
    return ends, lines


def _pairs(table: bytes, first: int, until: int = _ALL) -> tuple[list[int], list[int]]:
    """3.10: lengths of ranges and signed steps of the line; -128: the range has none (Objects/lnotab_notes.txt)."""
    ends: list[int] = []
    lines: list[int] = []
    offset, line = 0, first
    for position in range(0, len(table) - 1, 2):
        delta = table[position + 1]
        offset += table[position]
        if delta != 128:
            line += delta - 256 if delta > 128 else delta
        # Steps of the line alone have length 0.
        if table[position]:
            ends.append(offset)
            lines.append(0 if delta == 128 else min(max(line, 0), MAX_LINE))
            if offset > until:
                break
    return ends, lines


def _locations(table: bytes, first: int, until: int = _ALL) -> tuple[list[int], list[int]]:
    """3.11 and later: a head byte with bit 7 set, then bytes without it (Objects/locations.md).

    Head: four bits of kind, three of the length in code units of two bytes, less 1.
    """
    ends: list[int] = []
    lines: list[int] = []
    offset, line, position, size = 0, first, 0, len(table)
    while position < size:
        head = table[position]
        position += 1
        kind = head >> 3 & 15
        offset += ((head & 7) + 1) * 2
        if kind >= 13 and kind != 15:
            value = shift = 0
            while position < size:
                byte = table[position]
                position += 1
                if shift <= _MAX_SHIFT:
                    value |= (byte & 63) << shift
                    shift += 6
                if not byte & 64:
                    break
            line = max(min(line + (-(value >> 1) if value & 1 else value >> 1), MAX_LINE), -MAX_LINE)
        elif 10 <= kind <= 12:
            line += kind - 10
        while position < size and table[position] < 128:
            position += 1
        ends.append(offset)
        lines.append(0 if kind == 15 else min(max(line, 0), MAX_LINE))
        if offset > until:
            break
    return ends, lines


_DECODERS = {"lnotab": _lnotab, "pairs": _pairs, "locations": _locations}
