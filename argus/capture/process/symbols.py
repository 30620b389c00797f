"""Names of native code: which function of which file an address of a process is in.

What a process maps is read from /proc/PID/maps; functions come from the symbol tables of the files
(``elf.FunctionTable``), read once for all processes that map them, and from the maps that JIT compilers write for perf.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import platform
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.elf import Beyond, FunctionTable, NotElf
from argus.capture.process.mapped import File, Lasting, lasting, open_in_root, open_mapped, owner_text
from argus.capture.process.names import demangle
from argus.capture.process.rust import demangle_v0, strip_legacy
from argus.capture.process.targets import PROC, Mapping
from argus.capture.reader import left_out, progress

ENTRIES = frozenset(
    (
        "_start",
        "_start_c",  # musl
        "__libc_start_main",
        "__libc_start_main_impl",
        "__libc_start_call_main",
        "start_thread",
        "clone",
        "__clone",
        "clone3",
        "__clone3",
    )
)
"""Where threads and programs begin, by the names that glibc and musl give it: nothing called these."""
EVALUATION_LOOPS = ("_PyEval_EvalFrameDefault", "_TAIL_CALL_")
"""CPython's evaluation loop, and the beginning of the names of the functions it was split into (3.14, tail calls)."""

_MAPS_LINE = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ ..x. [0-9a-f]+ \S+ \d+ *.*$", re.MULTILINE)
"""Of executable memory."""
_MAPS_RIGHTS = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) ..x. ", re.MULTILINE)
_MAPS_FIELDS = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) *(.*)", re.DOTALL)
_DELETED = b" (deleted)"

_MAX_TABLES = 512
_MAX_TABLE_BYTES = 512 << 20
_MAX_KNOWN = 200_000
"""Addresses of one process that are remembered; some 40 MB."""
_MAX_PERF_MAP = 256 << 20
"""Bytes of a perf map that are read."""
_MAX_PERF_LINES, _MAX_PERF_TEXT = 1 << 18, 32 << 20
"""Functions of a perf map that are remembered, and bytes of their names: some 30 MB."""
_LONGEST_PERF_NAME = 4096
_PERF_BYTES_AT_ONCE = 1 << 20
_PERF_LINES_AT_ONCE, _PERF_LINES_LEAST = 1 << 16, 16
"""Lines that are read at once, and again in each second after that: a tenth of a core. A reading counts as so many."""
_MISS_REFRESH_NS = 100_000_000
"""How often maps are read again because an address lies outside them."""
_LONGEST_CALL = 7
"""Bytes before a return address that its call instruction takes (``FF /2`` with a 32-bit displacement, no prefixes)."""


@dataclass(frozen=True)
class NativeFrame:
    """Where an address is.

    Attributes:
        function: Its name as people read it; empty: no symbol covers the address.
        module: The file, as the process sees it; or ``[vdso]``, ``[jit]`` (named by a perf map), ``[anon]`` (executable
            memory that no file holds), ``[unmapped]``.
        offset: Of the address in the file or the vdso, or of its function where unwind tables list it without a name;
            in the function (jit), in its memory (``[anon]``). Of a return address it is that of the byte before, which
            belongs to the call. 0 for what is not mapped.
        build_id: Of the file, hexadecimal; empty: it has none.
        kind: ``native``, ``jit`` or ``vdso``.
    """

    function: str
    module: str
    offset: int
    build_id: str
    kind: str

    @property
    def text(self) -> str:
        """The function, or ``libfoo.so+0x1234`` where it is not known."""
        if self.function:
            return self.function
        name = self.module.rpartition("/")[2]
        return f"{name}+{self.offset:#x}" if self.offset else name

    @property
    def evaluates(self) -> bool:
        """Whether it is CPython's evaluation loop."""
        loop, parts = EVALUATION_LOOPS
        return _base(self.function) == loop or self.function.startswith(parts)


class Unwinder(Protocol):
    """Finds the callers of a thread from what was copied of it: its registers, and its stack from the stack pointer on.

    Today the kernel side follows frame pointers by itself, which in practice reach only the leaf. An unwinder by
    .eh_frame tables (``Symbols`` knows which file lies where) fits in here: it replaces the chain that is given to
    ``Symbols.verified``.
    """

    def unwind(self, pc: int, sp: int, fp: int, stack: bytes) -> NDArray[np.uint64]:
        """The address ``pc`` and the return addresses above it, leaf first, as far as ``stack`` reaches."""


class FramePointers:
    """``Unwinder`` for code that keeps frame pointers: each frame begins with the caller's one, then comes the return
    address (System V ABI x86-64 section 3.2.2; the same layout on aarch64)."""

    def unwind(self, pc: int, sp: int, fp: int, stack: bytes) -> NDArray[np.uint64]:
        words = np.frombuffer(stack, "<u8", count=len(stack) // 8)
        chain = [pc]
        below = sp - 8
        while fp > below and (fp - sp) % 8 == 0 and (fp - sp) // 8 + 1 < len(words):
            at = (fp - sp) // 8
            chain.append(int(words[at + 1]))
            below, fp = fp, int(words[at])
        return np.array(chain, np.uint64)


@dataclass(eq=False, slots=True)
class _Region:
    """Executable memory of a process, and which file (``key``) it is of; None: of none, or it was not opened yet
    (``opened``), or cannot be. ``row``: its line of /proc/PID/maps, of which a process may have tens of thousands."""

    row: bytes
    start: int
    end: int
    offset: int
    key: _TableKey | None = None
    opened: bool = False

    @property
    def path(self) -> str:
        """Its name: a file's, ``[vdso]`` or the like, or none."""
        return os.fsdecode(_fields(self.row)[5].removesuffix(_DELETED))

    @property
    def module(self) -> str:
        """The path for people and tables."""
        return os.fsencode(self.path).decode(errors="backslashreplace")

    @property
    def mapping(self) -> Mapping | None:
        """None: memory of no file."""
        *_, device, inode, name = _fields(self.row)
        path = os.fsdecode(name.removesuffix(_DELETED))
        if not int(inode) or not path.startswith("/"):
            return None
        return Mapping(self.start, self.end, self.offset, device.decode(), int(inode), path, name.endswith(_DELETED))


def _region(row: bytes) -> _Region:
    start, end, offset = (int(text, 16) for text in _fields(row)[:3])
    return _Region(row, start, end, offset)


def _fields(row: bytes) -> tuple[bytes, ...]:
    found = _MAPS_FIELDS.fullmatch(row)
    assert found is not None, "chosen by _MAPS_LINE"
    return found.groups()


_TableKey = bytes | Lasting
_tables: OrderedDict[_TableKey, FunctionTable | None] = OrderedDict()
"""Of every file (or vdso image) that was asked for, the least recently used first. None: it holds no symbols. What
comes of files in a process's root is for processes of its user alone."""
_REFUSED_FILES = 4096
_refused: OrderedDict[Lasting, None] = OrderedDict()
"""Of these, files that are no library's size, or damaged."""


def _remembered(key: _TableKey, table: FunctionTable | None) -> FunctionTable | None:
    _tables[key] = table
    size = sum(kept.nbytes for kept in _tables.values() if kept is not None)
    while len(_tables) > _MAX_TABLES or (size > _MAX_TABLE_BYTES and len(_tables) > 1):
        _, dropped = _tables.popitem(last=False)
        size -= 0 if dropped is None else dropped.nbytes
    return table


def readable(symbol: str, source: int = 0) -> str:
    """A C++ or Rust symbol as people read it, without Rust's hash; any other name unchanged. ``source``: the process
    whose symbol it is."""
    if symbol.startswith("_R"):
        return demangle_v0(symbol) or demangle(symbol, source)
    return strip_legacy(demangle(symbol, source))


class Symbols:
    """Names of the native code of one process.

    Once the process has ended, what was read of it goes on being answered, and nothing else.

    Args:
        pid: The process.

    Raises:
        OSError: It has ended, or may not be looked at.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.without_memory = False
        """Nothing is read of the process's memory: it did not answer before."""
        # Descriptors of a process that ended never show the next process of its number.
        self._proc = os.open(PROC / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._root = -1
        self._perf_map: _PerfMap | None = None
        self._rows: list[bytes] = []
        self._regions: dict[bytes, _Region] = {}
        self._by_start: list[_Region] = []
        self._starts: list[int] = []
        self._known: dict[int, NativeFrame] = {}
        self._calls: dict[int, bool] = {}
        self._read_ns = 0
        self._unmapped = 0
        self.counters = {
            "native_files_unreadable": 0,
            "native_addresses_unmapped": 0,
            "native_addresses_unnamed": 0,
            "native_chains_doubted": 0,
            "perf_map_lines_rejected": 0,
            "perf_map_bytes_unread": 0,
        }
        """Files whose symbols could not be read; addresses (each counted once while it is remembered) outside all that
        is mapped, and without a name; chains of which only the leaf was believed; lines of perf maps without sense;
        bytes of a perf map beyond its bounds."""
        try:
            # Stays the same root after the end of the process.
            with progress.Touching(progress.PATHS):  # not refused: nearly always the kernel asks nobody
                self._root = os.open(f"/proc/self/fd/{self._proc}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._perf_map = _PerfMap(self._proc, self._root, self.counters)
            if not self._read_maps():
                raise ProcessLookupError(f"process {pid} has ended")
        except OSError:
            self.close()
            raise

    def refresh(self) -> bool:
        """Reads again what is mapped, and what was added to the perf map.

        Returns:
            Whether code is no longer where it was.
        """
        before = self._unmapped
        with contextlib.suppress(OSError):  # it ended: what was read stays
            self._read_maps()
        return self._unmapped != before

    @property
    def grows(self) -> bool:
        """Whether the process writes a perf map, to which code is added without more being mapped."""
        return self._perf_map is not None and self._perf_map.is_there

    def _read_maps(self) -> bool:
        progress.memory()  # a lock of it is waited for
        fd = os.open("maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            parts = []
            while part := os.read(fd, 1 << 16):
                parts.append(part)
        finally:
            os.close(fd)
        progress.clear()
        self._read_ns = time.monotonic_ns()
        # It is the same memory where writing to it is allowed for a while.
        rows = _MAPS_LINE.findall(_MAPS_RIGHTS.sub(rb"\1 r-xp ", b"".join(parts)))
        if not rows:
            return False  # a zombie
        if rows != self._rows:
            self._rows = rows
            self._take(rows)
        if self._perf_map is not None and self._perf_map.refresh():
            self._forget(region for region in self._by_start if _may_be_jit(region))
        return True

    def _take(self, rows: list[bytes]) -> None:
        old = self._regions
        self._regions = {row: old.get(row) or _region(row) for row in rows}
        gone = [region for row, region in old.items() if row not in self._regions]
        self._unmapped += bool(gone)
        self._forget(gone)
        self._by_start = sorted(self._regions.values(), key=lambda region: region.start)
        self._starts = [region.start for region in self._by_start]

    def _forget(self, regions: Iterable[_Region]) -> None:
        """Drops what is remembered of addresses in these, and of those that lay outside all regions."""
        gone = set(regions)
        for book in (self._known, self._calls):
            for address in [a for a in book if (region := self._at(a)) is None or region in gone]:
                del book[address]

    def name(self, addresses: NDArray[np.uint64]) -> list[NativeFrame]:
        """Where addresses of a stack are.

        Args:
            addresses: u64, leaf first. [0] is where the thread was; the others are return addresses, which are looked
                up one byte before: a call may be the last instruction of a function.
        """
        looked = np.array(addresses, np.uint64)
        looked[1:] -= np.uint64(1)
        return self._frames(looked.tolist())

    def function(self, address: int) -> tuple[int, int] | None:
        """Begin and end of the function that an address is in, where nothing else lies between; None: not known."""
        region = self._at(address)
        if region is None:
            return None
        table = self._table(region)
        shift = address - region.start + region.offset
        virtual = None if table is None else table.virtual(shift)
        if table is None or virtual is None or (bounds := table.bounds(virtual)) is None:
            return None
        begin, end = (address - virtual + bound for bound in bounds)
        return (begin, end) if region.start <= begin and end <= region.end else None

    def _frames(self, addresses: list[int]) -> list[NativeFrame]:
        frames_by_address = self._known
        if len(frames_by_address) > _MAX_KNOWN:
            frames_by_address.clear()
        frames = []
        for address in addresses:
            frame = frames_by_address.get(address)
            if frame is None:
                # Not before: looking an address up may drop what is known of others.
                frame = frames_by_address[address] = self._resolve(address)
            frames.append(frame)
        return frames

    def _at(self, address: int) -> _Region | None:
        """The executable memory that an address lies in, or None."""
        place = bisect.bisect_right(self._starts, address) - 1
        return self._by_start[place] if place >= 0 and address < self._by_start[place].end else None

    def _resolve(self, address: int) -> NativeFrame:
        region = self._at(address)
        if region is None and time.monotonic_ns() - self._read_ns > _MISS_REFRESH_NS:
            self.refresh()
            region = self._at(address)
        if region is None:
            self.counters["native_addresses_unmapped"] += 1
            return NativeFrame("", "[unmapped]", 0, "", "native")
        frame = self._in_region(region, address)
        self.counters["native_addresses_unnamed"] += not frame.function
        return frame

    def _in_region(self, region: _Region, address: int) -> NativeFrame:
        offset = address - region.start + region.offset
        vdso = region.path == "[vdso]"
        table = self._vdso(region) if vdso else self._table(region)
        if table is not None:
            virtual = table.virtual(offset)
            function = None if virtual is None else table.find(virtual)
            name = "" if function is None else readable(table.name(function), self._pid)
            if function is None and virtual is not None and (bounds := table.bounds(virtual)) is not None:
                offset -= virtual - bounds[0]
            return NativeFrame(name, region.module, offset, table.build_id, "vdso" if vdso else "native")
        if self._perf_map is not None and _may_be_jit(region):
            if self._perf_map.refresh():
                self._forget(other for other in self._by_start if _may_be_jit(other))
            line = self._perf_map.find(address)
            if line is not None:
                return NativeFrame(line[0], "[jit]", address - line[1], "", "jit")
        if region.mapping is None:
            # Memory that no file holds has no offset of its own.
            return NativeFrame("", region.path or "[anon]", address - region.start, "", "native")
        return NativeFrame("", region.module, offset, "", "native")

    def _table(self, region: _Region) -> FunctionTable | None:
        """The functions of the file that a region is of; None: it is of none, or has none."""
        if region.key is not None and region.key in _tables:
            _tables.move_to_end(region.key)
            return _tables[region.key]
        mapping = region.mapping
        if mapping is None or (region.key is None and region.opened):
            return None
        file = self._open(mapping)
        region.opened = True
        table = self._table_of(region, file)
        if file is not None and (region.key in _refused or (table is not None and table.left_out)):
            left_out.count_once("files_refused", self._pid, file.key)
        return table

    def _table_of(self, region: _Region, file: File | None) -> FunctionTable | None:
        """The functions of a file that was opened for a region."""
        if file is None:
            self.counters["native_files_unreadable"] += 1
            return None
        owner = owner_text(self._pid)
        own, for_all = (file.key, owner), lasting(file.key, owner)
        region.key = own if own in _tables else for_all
        if region.key in _tables:
            return _tables[region.key]
        root = f"/proc/self/fd/{self._root}" if self._root >= 0 else ""
        try:
            table = FunctionTable(file, region.path, root, "/", EVALUATION_LOOPS[:1])
            if table.refused:
                region.key = file.key, f"process {self._pid}"
            elif table.of_root:
                region.key = own
            return _remembered(region.key, table)
        except NotElf as reason:
            if isinstance(reason, Beyond):
                _refused[for_all] = None
                while len(_refused) > _REFUSED_FILES:
                    _refused.popitem(last=False)
            return _remembered(for_all, None)
        except OSError:
            region.key = None
            self.counters["native_files_unreadable"] += 1
            return None

    def _open(self, mapping: Mapping) -> File | None:
        """The mapped file; None: it cannot be opened."""
        if self._proc < 0:
            return None
        try:
            return open_mapped(self._pid, mapping, proc=self._proc)
        except OSError:
            # The process has ended: what it mapped may still be where it was.
            if mapping.deleted or self._root < 0:
                return None
            with contextlib.suppress(OSError):
                return open_in_root(self._root, mapping.path, mapping)
            return None

    def _vdso(self, region: _Region) -> FunctionTable | None:
        """The functions of the code that the kernel gives every process."""
        image = self._memory([(region.start, region.end - region.start)])[0]
        if not image:
            # That of another process of this machine is the same.
            with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
                for row in _MAPS_LINE.findall(maps.read()):
                    if row[5] == b"[vdso]":
                        start, end = int(row[0], 16), int(row[1], 16)
                        with open("/proc/self/mem", "rb", buffering=0) as memory:
                            image = os.pread(memory.fileno(), end - start, start)
        if image in _tables:
            return _tables[image]
        try:
            return _remembered(image, FunctionTable(image, "[vdso]", ""))
        except NotElf:
            return _remembered(image, None)

    def _memory(self, places: list[tuple[int, int]]) -> list[bytes]:
        """What lies at (address, bytes) of the process; empty where it cannot be read."""
        if self.without_memory:
            return [b""] * len(places)
        progress.memory()
        try:
            fd = os.open("mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return [b""] * len(places)
        parts = []
        try:
            for address, count in places:
                data = b""
                with contextlib.suppress(OSError, OverflowError):
                    data = os.pread(fd, count, address)
                parts.append(data)
        finally:
            os.close(fd)
        return parts

    def verified(self, chain: NDArray[np.uint64]) -> tuple[int, bool]:
        """How much of a frame-pointer chain may be believed.

        All of it, if every return address lies in executable memory behind a call instruction and nothing can have
        called the outermost function; else the leaf only: code without frame pointers keeps other values in that
        register, and a chain through it may lead anywhere. Functions may still be missing in between (those that made
        no frame of their own). On machines other than x86-64 only the leaf is believed.

        Args:
            chain: u64, leaf first.

        Returns:
            How many addresses from the leaf on may be believed, and whether the stack ends there.
        """
        if len(chain) == 0:
            return 0, False
        if platform.machine() != "x86_64":
            return 1, False
        if len(chain) == 1:
            # A return address in clone is in the new thread; where the thread was may be in the one that called it.
            return 1, _base(self.name(chain)[0].function) == "_start"
        if self._behind_calls(chain[1:].tolist()) and _base(self.name(chain)[-1].function) in ENTRIES:
            return len(chain), True
        self.counters["native_chains_doubted"] += 1
        return 1, False

    def _behind_calls(self, addresses: list[int]) -> bool:
        """Whether a call instruction ends at each address."""
        behind_call = self._calls
        if len(behind_call) > _MAX_KNOWN:
            behind_call.clear()
        missing = [address for address in addresses if address not in behind_call]
        regions = [self._at(address - 1) for address in missing]
        if None in regions:
            return False
        codes = self._memory([(address - _LONGEST_CALL, _LONGEST_CALL) for address in missing])
        believed = all(behind_call.get(address, True) for address in addresses)
        for address, region, code in zip(missing, regions, codes, strict=True):
            answer = self._is_call(code, address)
            believed &= answer
            # A JIT compiler puts other code where this was.
            if code and region is not None and not _may_be_jit(region):
                behind_call[address] = answer
        return believed

    def _is_call(self, code: bytes, address: int) -> bool:
        """Whether these bytes end with a call (Intel's manual, volume 2, CALL): ``E8`` with a target in executable
        memory, or ``FF /2`` with all its bytes. Prefixes come before and do not matter."""
        if len(code) != _LONGEST_CALL:
            return False
        if code[-5] == 0xE8:
            target = address + int.from_bytes(code[-4:], "little", signed=True)
            if self._at(target) is not None:
                return True
        return any(code[-n] == 0xFF and _indirect_call_bytes(code[1 - n :]) == n for n in range(2, 8))

    def interpreter_frame(self, address: int, *, leaf: bool = False) -> bool:
        """Whether an address lies in CPython's evaluation loop (``NativeFrame.evaluates`` of its frame).

        Args:
            address: A return address, or where a thread was.
            leaf: It is the latter.
        """
        return self._frames([int(address) if leaf else max(int(address) - 1, 0)])[0].evaluates

    def close(self) -> None:
        """Lets go of the process; what is known is still answered."""
        for fd in (self._proc, self._root):
            if fd >= 0:
                os.close(fd)
        self._proc = self._root = -1
        if self._perf_map is not None:
            self._perf_map.close()


def _base(function: str) -> str:
    """A function's name without what compilers add to its parts (``.cold``, ``.lto_priv.0``, `` [clone .cold]``)."""
    return function.partition(" ")[0].partition(".")[0]


def _may_be_jit(region: _Region) -> bool:
    """Whether code in it may be a JIT compiler's: in memory of no file, or of one that is not on a disk (memfd)."""
    inode, name = _fields(region.row)[4:]
    if inode == b"0" or not name.startswith(b"/"):
        return not name.startswith(b"[v")  # [vdso], [vsyscall]
    return name.endswith(_DELETED) and name.startswith((b"/memfd:", b"/dev/zero", b"/SYSV"))


def _indirect_call_bytes(rest: bytes) -> int:
    """How many bytes an instruction has that begins with FF and goes on with ``rest``; 0: it is no near call."""
    mode, operation, base = rest[0] >> 6, (rest[0] >> 3) & 7, rest[0] & 7
    if operation != 2:
        return 0
    if mode == 3:
        return 2
    count = 2
    if base == 4:
        if len(rest) < 2:
            return 0
        count += 1
        base = rest[1] & 7
    if mode == 0:
        return count + (4 if base == 5 else 0)
    return count + (1 if mode == 1 else 4)


class _PerfMap:
    """What a process's JIT compilers wrote to /tmp/perf-PID.map: a line a function, ``start size name`` (tools/perf/
    Documentation/jit-interface.txt of Linux). It grows; a later line takes the place of earlier ones."""

    def __init__(self, proc: int, root: int, counters: dict[str, int]) -> None:
        self._counters = counters
        status = _read_small(proc, "status")
        numbers = re.search(rb"^NSpid:.*?(\d+)$", status, re.MULTILINE)
        users = re.search(rb"^Uid:\s+(\d+)\s+(\d+)", status, re.MULTILINE)
        # Somebody else could have put a file there.
        self._users = {0} if users is None else {0, int(users[1]), int(users[2])}
        self._root = root
        self._path = f"/tmp/perf-{numbers[1].decode() if numbers else 0}.map"
        self._file: File | None = None
        self._left, self._left_ns = float(_PERF_LINES_AT_ONCE), time.monotonic_ns()
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        # Oldest first, the first ones longest.
        self._parts: list[_Part] = []

    @property
    def is_there(self) -> bool:
        """Whether there is one."""
        return self._file is not None

    def refresh(self) -> bool:
        """Reads what was added, a part of it if that is much; returns whether something was read."""
        if self._root < 0:
            return False
        try:
            file = open_in_root(self._root, self._path, follow=False)
        except OSError:
            return False  # none yet; or taken away, and what was read stays
        if file.status.st_uid not in self._users:
            return False
        if self._file is None or file.key[:2] != self._file.key[:2] or file.status.st_size < self._at:
            self._start_over()
        self._file = file
        began = self._at
        now_ns = time.monotonic_ns()
        self._left += (now_ns - self._left_ns) * _PERF_LINES_AT_ONCE / 1e9
        self._left, self._left_ns = min(self._left, _PERF_LINES_AT_ONCE), now_ns
        while self._left >= 1 and file.status.st_size > self._at:
            kept = sum(len(part.starts) for part in self._parts), sum(len(part.text) for part in self._parts)
            if self._at >= _MAX_PERF_MAP or kept[0] >= _MAX_PERF_LINES or kept[1] >= _MAX_PERF_TEXT:
                more = file.status.st_size - self._at
                self._counters["perf_map_bytes_unread"] = max(self._counters["perf_map_bytes_unread"], more)
                break
            try:
                data = file.read(_PERF_BYTES_AT_ONCE, self._at)
            except OSError:
                break
            text = data[: data.rfind(b"\n") + 1] or (data if len(data) == _PERF_BYTES_AT_ONCE else b"")
            if not text:
                break  # half a line
            lines = text.split(b"\n", int(self._left))
            if len(lines) > self._left:
                text = text[: len(text) - len(lines.pop())]
            self._left -= max(len(lines), _PERF_LINES_LEAST)
            self._at += len(text)
            self._add(lines)
        return self._at > began

    def _add(self, lines: list[bytes]) -> None:
        starts, ends, names = [], [], []
        for line in lines:
            words = line.split(b" ", 2)
            try:
                start, size = int(words[0], 16), int(words[1], 16)
                name = words[2].strip()[:_LONGEST_PERF_NAME]
            except (ValueError, IndexError):
                self._counters["perf_map_lines_rejected"] += line != b""
                continue
            if not name or not 0 < start < start + size < 1 << 64:
                self._counters["perf_map_lines_rejected"] += 1
                continue
            starts.append(start)
            ends.append(start + size)
            names.append(name)
        if not starts:
            return
        self._parts.append(_part(np.array(starts, np.uint64), np.array(ends, np.uint64), names))
        # Each part is at least twice as long as the next: few parts, and each line is copied few times.
        while len(self._parts) > 1 and len(self._parts[-2].starts) < 2 * len(self._parts[-1].starts):
            new, old = self._parts.pop(), self._parts.pop()
            self._parts.append(
                _part(
                    np.concatenate([old.starts, new.starts]),
                    np.concatenate([old.ends, new.ends]),
                    [*old.names(), *new.names()],
                )
            )

    def find(self, address: int) -> tuple[str, int] | None:
        """Name and start of the function at an address, of the newest line that covers it."""
        for part in reversed(self._parts):
            if part.apart:
                at = int(np.searchsorted(part.starts, np.uint64(address), "right")) - 1
                covers = np.array([at] if at >= 0 and part.ends[at] > address else [], np.int64)
            else:
                covers = np.flatnonzero((part.starts <= address) & (address < part.ends))
            if len(covers):
                return part.name(int(covers[-1])).decode(errors="replace"), int(part.starts[covers[-1]])
        return None

    def close(self) -> None:
        self._file = None
        self._root = -1  # the descriptor may be another's soon


@dataclass(frozen=True, eq=False)
class _Part:
    """Lines of a perf map: begin and end of each function, and where in ``text`` its name ends; they lie end to end.

    Attributes:
        apart: No two of them overlap, and they are sorted.
    """

    starts: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    text: bytes
    name_ends: NDArray[np.uint32]
    apart: bool

    def name(self, line: int) -> bytes:
        return self.text[int(self.name_ends[line - 1]) if line else 0 : int(self.name_ends[line])]

    def names(self) -> list[bytes]:
        ends = self.name_ends.tolist()
        return [self.text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _part(starts: NDArray[np.uint64], ends: NDArray[np.uint64], names: list[bytes]) -> _Part:
    """Lines by start, if no two of them overlap; else as they came. Of several with the same start the last is kept."""
    _, last = np.unique(starts[::-1], return_index=True)
    keep = len(starts) - 1 - last  # by start
    apart = not (ends[keep][:-1] > starts[keep][1:]).any()
    if not apart:
        keep = np.sort(keep)
    kept = [names[i] for i in keep.tolist()]
    name_ends = np.cumsum(np.fromiter(map(len, kept), np.uint32, len(kept)), dtype=np.uint32)
    return _Part(starts[keep], ends[keep], b"".join(kept), name_ends, apart)


def _read_small(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
