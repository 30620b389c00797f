"""Keeps the memory of a process that runs for days at what it uses.

glibc gives each thread that allocates a heap of its own, up to eight a CPU, and raises the size from which on an array
is mapped by itself to 32 MiB once such a one was freed: what is freed later lies between what is kept, and stays with
the process. A tracer has a few threads and allocates arrays of all sizes a hundred times a second; the engine of an
embedded store has a thread for each connection, which takes in batches of rows of all sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

TRIM_S = 60.0
"""How often ``trim`` is worth its few milliseconds."""
ARENAS = 2
MAPPED_BYTES = 1 << 20
"""Larger arrays are mapped by themselves, and are gone when they are freed: a page fault for each 4 KiB of them, which
for smaller ones would cost more than it saves."""
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Of mallopt(3), in malloc.h. Setting the first ends its growth."""


def settle() -> None:
    """Bounds what freed memory may hold back, from now on. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, ARENAS)
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def trim() -> None:
    """Gives back what was freed: glibc's, and Arrow's where that is in use."""
    if (pa := sys.modules.get("pyarrow")) is not None:
        pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Memory of this process that no file has, bytes; 0: it is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
