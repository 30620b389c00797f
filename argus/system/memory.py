"""Keeps the memory of a process that runs for days at what it uses.

glibc gives each thread that allocates a heap of its own, up to eight a CPU, and raises the size from which on an array
is mapped by itself to 32 MiB once such a one was freed: what is freed later lies between what is kept, and stays with
the process. A tracer has a few threads and allocates arrays of all sizes a hundred times a second; the engine of an
embedded store has a thread for each connection, which takes in batches of rows of all sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from pathlib import Path

from argus.system.proc import field_of, number, read_file
from argus.system.syscalls import libc

TRIM_S = 60.0
"""How often ``trim`` is worth its few milliseconds."""
ARENAS = 2
MAPPED_BYTES = 1 << 20
"""Larger arrays are mapped by themselves, and are gone when they are freed: a page fault for each 4 KiB of them, which
for smaller ones would cost more than it saves."""
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Of mallopt(3), in malloc.h. Setting the first ends its growth."""
_MADV_DONTNEED = 4
"""Of madvise(2)."""
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)", re.DOTALL)
"""The first line of a mapping in /proc/PID/smaps: addresses, rights, path."""


def settle() -> None:
    """Bounds what freed memory may hold back, from now on. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc().mallopt(_M_ARENA_MAX, ARENAS)
        libc().mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
    if (pa := sys.modules.get("pyarrow")) is not None:
        pa.set_memory_pool(pa.system_memory_pool())  # its own allocator keeps 10 MB beside glibc's


def trim() -> None:
    """Gives back what was freed, glibc's and Arrow's where that is in use, and what of libraries is not used."""
    if (pa := sys.modules.get("pyarrow")) is not None:
        pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):
        libc().malloc_trim(0)
    unmap_unused()


def unmap_unused() -> None:
    """Takes the code and constants of libraries out of this process until they are used again.

    A start touches far more of a library than what runs later: of chdb's 180 MB half. The pages stay in the system's
    cache, from which what is used comes back in microseconds. What was not there in the last call, too, is left: a
    library that is being loaded may still be written to.
    """
    global _seen
    with contextlib.suppress(OSError, AttributeError, MemoryError):
        before, _seen = _seen, frozenset(_unchanged(Path("/proc/self/smaps").read_bytes()))
        for start, size, _ in before & _seen:
            libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


_Mapping = tuple[int, int, bytes]
"""Address, bytes, the line of smaps."""
_seen: frozenset[_Mapping] = frozenset()


def _unchanged(smaps: bytes) -> list[_Mapping]:
    """Mappings of libraries that may not be written to, and of which no page was (relocations), be it in memory or in
    swap. A library is a file of which some mapping may be executed. Memory files are none: others may have named them.

    Args:
        smaps: /proc/PID/smaps. In names only the end of a line is escaped.
    """
    found: list[tuple[bytes, _Mapping]] = []
    libraries = set()
    mapping: tuple[bytes, _Mapping] | None = None
    for line in smaps.split(b"\n"):
        if head := _MAPPING.match(line):
            start, end, rights, path = int(head[1], 16), int(head[2], 16), head[3], head[4]
            mapping = None
            if rights in (b"r--p", b"r-xp") and path.startswith(b"/") and not path.startswith(b"/memfd:"):
                mapping = path, (start, end - start, line)
                if rights == b"r-xp":
                    libraries.add(path)
        elif line.startswith((b"Anonymous:", b"Swap:")) and line.split()[1] != b"0":
            mapping = None
        elif line.startswith(b"VmFlags:") and mapping is not None:  # the last line of a mapping
            found.append(mapping)
    return [mapping for path, mapping in found if path in libraries]


def resident() -> int:
    """Memory of this process that no file has, bytes; 0: it is not known."""
    with contextlib.suppress(OSError):
        return max(number(field_of(read_file("/proc/self/status"), b"RssAnon").removesuffix(b" kB")), 0) * 1024
    return 0
