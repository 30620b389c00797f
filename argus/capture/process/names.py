"""Names of kernels: from the calls that look them up, or from the symbol of the host stub that launches them.

What the kernel side could not read of a name is read from the process when a kernel of that name is first asked for.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel_books import Books
from argus.capture.process.demangler import shared
from argus.capture.process.elf import Elf, NotElf
from argus.capture.process.mapped import File, Lasting, lasting, open_in_root, open_mapped, open_root, owner_text
from argus.capture.process.targets import PROC, Mapping, executable_mappings, program_of
from argus.capture.reader import progress, reader
from argus.model import calls
from argus.model.records import FLAG_NAME_ADDRESS, MARK_NAME_LEN, NAME_LEN
from argus.system.proc import owner_of

_MAX_OPEN_TABLES = 4
_MAX_OPEN_BYTES = 256 << 20
"""Symbol tables kept in memory: PyTorch's largest takes about 100 MB."""
_LONGEST_NAME = 1 << 14
"""Bytes that are read from a process to find the end of a name: templates make names of some thousands."""
_NAME = re.compile(rb"[!-~\x80-\xff]+")
"""What a name may consist of. Anything else is not, or no longer, one."""

# By call, and as long as a call's number can be large.
_NAMES = np.zeros(256, bool)
_NAMES[[call.id for call in calls.CALLS if call.kind == "name"]] = True
_SAME_NAME = np.zeros(256, bool)
_SAME_NAME[[call.id for call in calls.CALLS if call.shape is calls.Shape.KERNEL_OUT]] = True


def demangle(symbol: str, source: int = 0) -> str:
    """A C++ symbol as people read it; any other name unchanged, but for its length (``demangler.MAX_NAME``). A host
    stub's prefix is taken off. ``source``: the process whose symbol it is."""
    return shared.names([symbol], source)[0].replace("__device_stub__", "", 1)


def demangle_all(symbols: Sequence[str], source: int = 0) -> list[str]:
    """The same of many, which takes less time than one by one."""
    return [name.replace("__device_stub__", "", 1) for name in shared.names(symbols, source)]


class _Memory:
    """The memory of the program that a process runs when this is made.

    The descriptor stays with that program: once the process has ended or replaced it, nothing can be read any more,
    and never what lies at the same address of the next one. Where there is a reader process, that has the descriptor.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = -1
        self._program = program_of(pid)
        if not reader.shared.on:
            self._fd = os.open(PROC / str(pid) / "mem", os.O_RDONLY)
        elif not self._program:
            raise ProcessLookupError(errno.ESRCH, "it has ended")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it could not be opened
            if self._fd >= 0:
                os.close(self._fd)

    def gone(self) -> bool:
        """Whether the program has ended."""
        if self._fd < 0:
            return program_of(self._pid) != self._program
        try:
            return os.pread(self._fd, 1, 0) == b""
        except OSError:
            return False  # nothing lies at 0, as in every living program

    def string(self, address: int) -> bytes | None:
        """The string at an address, without its closing 0; None where none can be read. Waits for its pages, where
        there is no reader process."""
        if reader.shared.on:
            return None if self.gone() else _remote(self._pid, "string", address)
        progress.memory()
        text_so_far = b""
        while len(text_so_far) < _LONGEST_NAME:
            at = address + len(text_so_far)
            try:
                part = os.pread(self._fd, mmap.PAGESIZE - at % mmap.PAGESIZE, at)
            except (OSError, OverflowError):
                return None
            text, end, _ = part.partition(b"\0")
            text_so_far += text
            if end:
                return text_so_far if len(text_so_far) < _LONGEST_NAME else None
            if not part:
                return None
        return None


def _remote(pid: int, op: str, address: int) -> bytes | None:
    """What the reader process finds at an address; None: nothing, or it cannot be read."""
    if op == "string" and not reader.shared.reads_memory(pid):
        return None
    try:
        answer = reader.shared.ask(op, pid, address=address)
    except OSError:
        return None
    answer.close()
    return answer.data if answer.what.get("found") and len(answer.data) <= _LONGEST_NAME else None


_Unread = tuple[bytes, int, "_Memory | None"]
"""The beginning of a name, where it lies, and in which memory."""


class LookUps(Protocol):
    """Whether names may be looked up, of a process that can have as many as it likes."""

    def may_look_up(self, pid: int) -> bool:
        """Whether it may be asked now; if not, that is counted."""

    def looking_up(self, pid: int) -> AbstractContextManager[None]:
        """A look-up lasts as long as this."""


class _Unbounded:
    def may_look_up(self, pid: int) -> bool:
        return True

    def looking_up(self, pid: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class KernelNames:
    """Kernel names by process and handle, as far as they are known.

    Handles are what launches carry: a CUfunction or CUkernel of the driver, or the host stub's address of the runtime.

    Args:
        look_ups: When names may be looked up; None: always.
    """

    def __init__(self, look_ups: LookUps | None = None) -> None:
        self._look_ups: LookUps = look_ups or _Unbounded()
        # By process and handle: a name as people read it, or as the program has it, or what was learned of it.
        self._books = Books(lambda pid: owner_of(pid))
        self._memories: dict[int, _Memory] = {}
        self._roots: dict[int, int] = {}
        """Descriptors of the processes' root folders."""
        self._tables: OrderedDict[Lasting, Elf | None] = OrderedDict()
        self._maps: dict[int, list[Mapping]] = {}
        self.unresolved = 0
        """Handles for which no name was found."""
        self.cut = 0
        """Names longer than a record has room for, which could not be read whole: two may look the same."""
        self.unread = 0
        """Marks whose names neither the kernel side nor this one could read."""

    def learn(self, control: NDArray[np.void]) -> None:
        """Takes names from control records (calls that look kernels up). Other records are skipped.

        Nothing is demangled or read yet: an import registers tens of thousands of kernels, and few are ever launched.
        """
        taken = control[_NAMES[control["call"]] & (control["result"] == 0)]
        if not len(taken):
            return
        text = taken["data"].tobytes()
        memories: dict[int, _Memory | None] = {}
        rows = zip(
            taken["pid"].tolist(),
            taken["handle"].tolist(),
            taken["parent"].tolist(),
            _SAME_NAME[taken["call"]].tolist(),
            ((taken["flags"] & FLAG_NAME_ADDRESS) != 0).tolist(),
            taken["name_address"].tolist(),
            taken["name_len"].tolist(),
            range(0, len(text), NAME_LEN),
            strict=True,
        )
        of_pid = int(taken["pid"][0])
        book = self._books.of(of_pid)
        for pid, handle, parent, same_name, later, address, length, at in rows:
            if pid != of_pid:
                book, of_pid = self._books.of(pid), pid
            if same_name:
                if (name := book.get(parent)) is not None:
                    self._books.learn(book, handle, name)
            elif later:
                if pid not in memories:
                    memories[pid] = self._memory(pid)
                self._books.learn(book, handle, (text[at : at + length], address, memories[pid]))
            elif length:
                self._books.learn(book, handle, text[at : at + length])
        for pid in np.unique(taken["pid"]).tolist():
            self._books.make_room(pid)

    def complete(self, marks: NDArray[np.void]) -> NDArray[np.void]:
        """Reads the names of marks that the kernel side could not: of those, the name is its address.

        Args:
            marks: :data:`argus.model.records.MARK` rows, shape (n,).

        Returns:
            The same with these names, or with none where they cannot be read.
        """
        later = np.flatnonzero(marks["flags"] & FLAG_NAME_ADDRESS)
        if not len(later):
            return marks
        marks = marks.copy()
        memories: dict[int, _Memory | None] = {}
        read: dict[tuple[int, int], bytes | None] = {}
        for place in later.tolist():
            row = marks[place]
            pid, address = int(row["pid"]), int.from_bytes(row["name"][:8].tobytes(), "little")
            if (pid, address) not in read:
                read[pid, address] = self._string(pid, address, memories)
            name = read[pid, address]
            self.unread += name is None
            text = name or b""
            row["name_len"] = min(len(text), MARK_NAME_LEN)
            row["name"] = np.frombuffer(text[:MARK_NAME_LEN].ljust(MARK_NAME_LEN, b"\0"), np.uint8)
        return marks

    def _string(self, pid: int, address: int, memories: dict[int, _Memory | None]) -> bytes | None:
        """The string at an address of a process. ``memories``: of those that were asked in this turn."""
        if not self._look_ups.may_look_up(pid):
            return None
        with self._look_ups.looking_up(pid):
            if pid not in memories:
                memories[pid] = self._memory(pid)
            memory = memories[pid]
            return None if memory is None else memory.string(address)

    def forget(self, pid: int) -> None:
        """Drops the names of a process that ended or replaced its program."""
        self._books.forget(pid)
        self._memories.pop(pid, None)
        self._maps.pop(pid, None)
        if (root := self._roots.pop(pid, -1)) >= 0:
            os.close(root)
        if reader.shared.on and reader.shared.reads(pid):
            with contextlib.suppress(OSError):
                reader.shared.ask("forget", pid).close()
        shared.forget(pid)

    def name(self, pid: int, handle: int, layer: calls.Layer) -> str:
        """The name of a kernel, or ``kernel@0x…`` where none is known."""
        book = self._books.of(pid)
        if (launched := book.launch(handle)) is not None:
            return launched
        remembered = book.get(handle)
        if not self._look_ups.may_look_up(pid):
            return f"kernel@{handle:#x}"  # there may be time for it later
        with self._look_ups.looking_up(pid):
            name = None if remembered is None else self._read(pid, remembered)
            if name is None and layer is calls.Layer.RUNTIME:
                name = self._symbol(pid, handle)
        if name is None:
            self.unresolved += 1
            name = f"kernel@{handle:#x}"
        self._books.launch(book, handle, name)
        self._books.make_room(pid)
        return name

    def _read(self, pid: int, symbol: bytes | _Unread) -> str | None:
        """A name as people read it, from what was learned of it; None: it cannot be read any more."""
        if isinstance(symbol, bytes):
            return demangle(symbol.decode(errors="replace"), pid)
        start, address, memory = symbol
        whole = None if memory is None else memory.string(address)
        # The caller of a look-up may have freed its string since, and something else may lie there.
        if whole is not None and whole.startswith(start) and _NAME.fullmatch(whole):
            return demangle(whole.decode(errors="replace"), pid)
        if not start:
            return None
        self.cut += 1
        return demangle(start.decode(errors="replace"), pid)

    def _memory(self, pid: int) -> _Memory | None:
        """The memory of the program that a process runs now."""
        memory = self._memories.get(pid)
        if memory is None or memory.gone():
            memory = None
            with contextlib.suppress(OSError):
                memory = self._memories[pid] = _Memory(pid)
        return memory

    def remember(self, pid: int) -> None:
        """Notes what a process maps, and keeps its root folder, so that its kernels can be named after it ended too."""
        if reader.shared.on:
            with contextlib.suppress(OSError):
                reader.shared.ask("remember", pid).close()
            return
        with contextlib.suppress(OSError):
            self._maps[pid] = executable_mappings(pid)
        if pid not in self._roots:
            with contextlib.suppress(OSError):
                self._roots[pid] = open_root(pid)

    def _symbol(self, pid: int, address: int) -> str | None:
        """The function symbol at an address of a process."""
        if reader.shared.on:
            raw = _remote(pid, "symbol", address)
            return None if raw is None else demangle(raw.decode(errors="replace"), pid)
        for fresh in (False, True):
            if fresh or pid not in self._maps:
                self.remember(pid)
            for mapping in self._maps.get(pid, []):
                if mapping.start <= address < mapping.end:
                    elf = self._table(pid, mapping)
                    virtual = None if elf is None else elf.address(address - mapping.start + mapping.offset)
                    symbol = None if elf is None or virtual is None else elf.symbol_at(virtual)
                    return None if symbol is None else demangle(symbol, pid)
        return None

    def _open(self, pid: int, mapping: Mapping) -> File | None:
        """The mapped file, also after the process has ended."""
        with contextlib.suppress(OSError):
            return open_mapped(pid, mapping)
        with contextlib.suppress(OSError):
            if not mapping.deleted and pid in self._roots:
                return open_in_root(self._roots[pid], mapping.path, mapping)
        return None

    def _table(self, pid: int, mapping: Mapping) -> Elf | None:
        file = self._open(pid, mapping)
        if file is None:
            return None
        key = lasting(file.key, owner_text(pid))
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        elf = None
        with contextlib.suppress(NotElf, OSError):
            elf = Elf(file)
        self._tables[key] = elf
        size = sum(table.nbytes for table in self._tables.values() if table is not None)
        while len(self._tables) > _MAX_OPEN_TABLES or (size > _MAX_OPEN_BYTES and len(self._tables) > 1):
            _, dropped = self._tables.popitem(last=False)
            size -= 0 if dropped is None else dropped.nbytes
        return elf
