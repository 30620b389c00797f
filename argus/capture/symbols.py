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
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from argus.capture.elf import FunctionTable, NotElf
from argus.capture.names import demangle
from argus.capture.rust import demangle_v0, strip_legacy
from argus.capture.targets import PROC, FileKey, Mapping, reachable

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

_MAPS_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..x. ([0-9a-f]+) (\S+) (\d+) *(.*)$", re.MULTILINE)
_DELETED = b" (deleted)"

_MAX_TABLES = 512
_MAX_TABLE_BYTES = 512 << 20
_MAX_KNOWN = 200_000
"""Addresses of one process that are remembered; some 40 MB."""
_MAX_PERF_MAP = 256 << 20
"""Bytes of a perf map that are read."""
_MAX_PERF_PARTS = 16
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
        offset: Of the address in the file or the vdso, or of its function where unwind tables tell it without a name;
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


@dataclass(frozen=True, eq=False)
class _Region:
    """Executable memory of a process, and which file (``key``) it is of; None: of none that can be read."""

    start: int
    end: int
    offset: int
    path: str
    mapping: Mapping | None
    key: FileKey | None

    @cached_property
    def module(self) -> str:
        """The path for people and tables."""
        return os.fsencode(self.path).decode(errors="backslashreplace")


_tables: OrderedDict[FileKey | bytes, FunctionTable | None] = OrderedDict()
"""Of every file (or vdso image) that was asked for, the least recently used first. None: it holds no symbols."""


def _remembered(key: FileKey | bytes, table: FunctionTable | None) -> FunctionTable | None:
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
        return demangle_v0(symbol) or symbol
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
        # Descriptors of a process that ended never show the next process of its number.
        self._proc = os.open(PROC / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._root = -1
        self._perf_map: _PerfMap | None = None
        self._rows: list[tuple[bytes, ...]] = []
        self._regions: dict[tuple[bytes, ...], _Region] = {}
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
        }
        """Files whose symbols could not be read; addresses (each counted once while it is remembered) outside all that
        is mapped, and without a name; chains of which only the leaf was believed; lines of perf maps without sense."""
        try:
            # Stays the same root after the end of the process.
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

    def _read_maps(self) -> bool:
        fd = os.open("maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            parts = []
            while part := os.read(fd, 1 << 16):
                parts.append(part)
        finally:
            os.close(fd)
        self._read_ns = time.monotonic_ns()
        rows = _MAPS_LINE.findall(b"".join(parts))
        if not rows:
            return False  # a zombie
        if rows != self._rows:
            self._rows = rows
            self._take(rows)
        if self._perf_map is not None and self._perf_map.refresh():
            self._forget(region for region in self._by_start if _may_be_jit(region))
        return True

    def _take(self, rows: list[tuple[bytes, ...]]) -> None:
        old = self._regions
        self._regions = {row: old.get(row) or self._region(row) for row in rows}
        gone = [region for row, region in old.items() if row not in self._regions]
        self._unmapped += bool(gone)
        self._forget(gone)
        self._by_start = sorted(self._regions.values(), key=lambda region: region.start)
        self._starts = [region.start for region in self._by_start]

    def _region(self, row: tuple[bytes, ...]) -> _Region:
        start, end, offset = (int(text, 16) for text in row[:3])
        inode = int(row[4])
        path = os.fsdecode(row[5].removesuffix(_DELETED))
        if not inode or not path.startswith("/"):
            return _Region(start, end, offset, path, None, None)
        mapping = Mapping(start, end, offset, row[3].decode(), inode, path, row[5].endswith(_DELETED))
        key = None
        open_path = reachable(self._pid, mapping)
        if open_path is not None:
            with contextlib.suppress(OSError):
                key = _key(mapping, os.stat(open_path))
        self.counters["native_files_unreadable"] += key is None
        return _Region(start, end, offset, path, mapping, key)

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
        if region is None or region.key is None:
            return None
        table = self._table(region)
        shift = address - region.start + region.offset
        virtual = None if table is None else table.virtual(shift)
        if table is None or virtual is None or (bounds := table.bounds(virtual)) is None:
            return None
        begin, end = (address - virtual + bound for bound in bounds)
        return (begin, end) if region.start <= begin and end <= region.end else None

    def _frames(self, addresses: list[int]) -> list[NativeFrame]:
        known = self._known
        if len(known) > _MAX_KNOWN:
            known.clear()
        frames = []
        for address in addresses:
            frame = known.get(address)
            if frame is None:
                # Not before: looking an address up may drop what is known of others.
                frame = known[address] = self._resolve(address)
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
        if region.mapping is None or region.key is None:
            return None
        if region.key in _tables:
            _tables.move_to_end(region.key)
            return _tables[region.key]
        roots = (f"/proc/self/fd/{self._root}", "")
        # The last two serve when the process has ended.
        for path in (reachable(self._pid, region.mapping), roots[0] + region.path, region.path):
            try:
                if path is None or _key(region.mapping, os.stat(path)) != region.key:
                    continue
                return _remembered(region.key, FunctionTable(path, region.path, roots, EVALUATION_LOOPS[:1]))
            except NotElf:
                return _remembered(region.key, None)
            except OSError:
                continue
        self.counters["native_files_unreadable"] += 1
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
            return _remembered(image, FunctionTable(image, "[vdso]", ()))
        except NotElf:
            return _remembered(image, None)

    def _memory(self, places: list[tuple[int, int]]) -> list[bytes]:
        """What lies at (address, bytes) of the process; empty where it cannot be read."""
        try:
            fd = os.open("mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return [b""] * len(places)
        found = []
        try:
            for address, count in places:
                data = b""
                with contextlib.suppress(OSError, OverflowError):
                    data = os.pread(fd, count, address)
                found.append(data)
        finally:
            os.close(fd)
        return found

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
        known = self._calls
        if len(known) > _MAX_KNOWN:
            known.clear()
        missing = [address for address in addresses if address not in known]
        regions = [self._at(address - 1) for address in missing]
        if None in regions:
            return False
        codes = self._memory([(address - _LONGEST_CALL, _LONGEST_CALL) for address in missing])
        believed = all(known.get(address, True) for address in addresses)
        for address, region, code in zip(missing, regions, codes, strict=True):
            answer = self._is_call(code, address)
            believed &= answer
            # A JIT compiler puts other code where this was.
            if code and region is not None and not _may_be_jit(region):
                known[address] = answer
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


def _key(mapping: Mapping, status: os.stat_result) -> FileKey | None:
    """The file at a path, if it is the one that is mapped."""
    if status.st_ino != mapping.inode or not stat.S_ISREG(status.st_mode):
        return None
    return (mapping.device, mapping.inode, status.st_size, status.st_ctime_ns)


def _may_be_jit(region: _Region) -> bool:
    """Whether code in it may be a JIT compiler's: in memory of no file, or of one that is not on a disk (memfd)."""
    if region.mapping is None:
        return not region.path.startswith("[v")  # [vdso], [vsyscall]
    return region.mapping.deleted and region.path.startswith(("/memfd:", "/dev/zero", "/SYSV"))


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
        self._path = f"/proc/self/fd/{root}/tmp/perf-{numbers[1].decode() if numbers else 0}.map"
        self._fd = -1
        self._file: tuple[int, int] | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._rest = b""
        # Oldest first: start, end, name; each sorted by start.
        self._parts: list[tuple[NDArray[np.uint64], NDArray[np.uint64], list[bytes], bool]] = []

    def refresh(self) -> bool:
        """Reads what was added; returns whether something was."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False  # none yet; or taken away, and what was read stays
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._users:
            return False
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._at:
            self._close_file()
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._fd = os.open(self._path, flags)
            except OSError:
                return False
            self._file = (status.st_dev, status.st_ino)
            self._start_over()
        if status.st_size <= self._at or self._at >= _MAX_PERF_MAP:
            return False
        data = os.pread(self._fd, min(status.st_size, _MAX_PERF_MAP) - self._at, self._at)
        self._at += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[:_MAX_KNOWN]
        self._add(lines)
        return True

    def _add(self, lines: list[bytes]) -> None:
        starts, ends, names = [], [], []
        for line in lines:
            words = line.split(b" ", 2)
            try:
                start, size = int(words[0], 16), int(words[1], 16)
                name = words[2].strip()
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
        self._parts.append(_sorted_part(np.array(starts, np.uint64), np.array(ends, np.uint64), names))
        if len(self._parts) > _MAX_PERF_PARTS:
            joined = [name for part in self._parts for name in part[2]]
            start_column, end_column = (np.concatenate([part[i] for part in self._parts]) for i in (0, 1))
            self._parts = [_sorted_part(start_column, end_column, joined)]

    def find(self, address: int) -> tuple[str, int] | None:
        """Name and start of the function at an address, of the newest line that covers it."""
        for starts, ends, names, apart in reversed(self._parts):
            if apart:
                at = int(np.searchsorted(starts, np.uint64(address), "right")) - 1
                covers = np.array([at] if at >= 0 and ends[at] > address else [], np.int64)
            else:
                covers = np.flatnonzero((starts <= address) & (address < ends))
            if len(covers):
                return names[covers[-1]].decode(errors="replace"), int(starts[covers[-1]])
        return None

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        self._close_file()
        self._path = ""  # the descriptor in it may be another's soon


def _sorted_part(
    starts: NDArray[np.uint64], ends: NDArray[np.uint64], names: list[bytes]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], list[bytes], bool]:
    """Lines by start, if no two of them overlap; else as they came. Of several with the same start the last is kept."""
    _, last = np.unique(starts[::-1], return_index=True)
    if len(last) < len(starts):
        keep = np.sort(len(starts) - 1 - last)
        starts, ends, names = starts[keep], ends[keep], [names[i] for i in keep.tolist()]
    order = np.argsort(starts, kind="stable")
    if (ends[order][:-1] > starts[order][1:]).any():
        return starts, ends, names, False
    return starts[order], ends[order], [names[i] for i in order.tolist()], True


def _read_small(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
