"""Names of kernels: from the calls that look them up, or from the symbol of the host stub that launches them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import OrderedDict
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from argus.capture import calls
from argus.capture.elf import Elf, NotElf
from argus.capture.targets import Mapping, executable_mappings, reachable
from argus.records import NAME_LEN

_MAX_OPEN_TABLES = 4
"""Symbol tables kept in memory: PyTorch's largest takes about 100 MB."""


@cache
def _demangler() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    return library


@lru_cache(maxsize=65536)
def demangle(symbol: str) -> str:
    """A C++ symbol as people read it; any other name unchanged. A host stub's prefix is taken off."""
    text = symbol
    library = _demangler()
    if library is not None and symbol.startswith("_Z"):
        status = ctypes.c_int()
        pointer = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
        if pointer:
            text = ctypes.string_at(pointer).decode(errors="replace")
            library.free(pointer)
    return text.replace("__device_stub__", "", 1)


class KernelNames:
    """Kernel names by process and handle, as far as they are known.

    Handles are what launches carry: a CUfunction or CUkernel of the driver, or the host stub's address of the runtime.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}
        self._tables: OrderedDict[tuple[int, ...], Elf | None] = OrderedDict()
        self._maps: dict[int, list[Mapping]] = {}
        self.unresolved = 0
        """Handles for which no name was found."""
        self.cut = 0
        """Names longer than a record has room for: they lack their end, and two may look the same."""

    def learn(self, control: NDArray[np.void]) -> None:
        """Takes names from control records (calls that look kernels up). Other records are skipped."""
        for record in control:
            call = int(record["call"])
            if call >= len(calls.CALLS) or calls.CALLS[call].kind != "name" or record["result"] != 0:
                continue
            pid, handle = int(record["pid"]), int(record["handle"])
            if calls.CALLS[call].shape is calls.Shape.KERNEL_OUT:
                known = self._known.get((pid, int(record["parent"])))
                if known is not None:
                    self._known[pid, handle] = known
                continue
            raw = record["data"][: int(record["name_len"])].tobytes()
            self.cut += len(raw) >= NAME_LEN - 1
            if raw:
                self._known[pid, handle] = demangle(raw.decode(errors="replace"))

    def forget(self, pid: int) -> None:
        """Drops the names of a process that ended or replaced its program."""
        for key in [key for key in self._known if key[0] == pid]:
            del self._known[key]
        self._maps.pop(pid, None)

    def name(self, pid: int, handle: int, layer: calls.Layer) -> str:
        """The name of a kernel, or ``kernel@0x…`` where none is known."""
        key = (pid, handle)
        known = self._known.get(key)
        if known is not None:
            return known
        found = self._symbol(pid, handle) if layer is calls.Layer.RUNTIME else None
        if found is None:
            self.unresolved += 1
            found = f"kernel@{handle:#x}"
        self._known[key] = found
        return found

    def remember(self, pid: int) -> None:
        """Notes what a process maps, so that its kernels can be named after it ended too."""
        with contextlib.suppress(OSError):
            self._maps[pid] = executable_mappings(pid)

    def _symbol(self, pid: int, address: int) -> str | None:
        """The function symbol at an address of a process."""
        for fresh in (False, True):
            if fresh or pid not in self._maps:
                self.remember(pid)
            for mapping in self._maps.get(pid, []):
                if mapping.start <= address < mapping.end:
                    elf = self._table(pid, mapping)
                    virtual = None if elf is None else elf.address(address - mapping.start + mapping.offset)
                    symbol = None if elf is None or virtual is None else elf.symbol_at(virtual)
                    return None if symbol is None else demangle(symbol)
        return None

    def _table(self, pid: int, mapping: Mapping) -> Elf | None:
        path = reachable(pid, mapping) or mapping.path
        try:
            stat = os.stat(path)
        except OSError:
            return None
        if stat.st_ino != mapping.inode:
            return None
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns)
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        elf = None
        with contextlib.suppress(NotElf, OSError):
            elf = Elf(path)
        self._tables[key] = elf
        while len(self._tables) > _MAX_OPEN_TABLES:
            self._tables.popitem(last=False)
        return elf
