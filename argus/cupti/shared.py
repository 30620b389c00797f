"""The memory that a traced process and Argus share: ``helper/argus_cupti.h`` in numpy's words, and access to it.

``tests/unit/cupti/test_shared.py`` compiles the header and compares. Order of accesses: a word that announces
something (``state`` of a slot, ``done_seq``, ``names_used``) is read before, and written after, what it announces.
Aligned 32- and 64-bit words are single loads and stores in numpy; between them stands a ``fence``, which x86 does not
need (``argus.capture.kernel.ring`` explains why).
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.ring import make_fence
from argus.capture.process.cupti import MEMFD  # noqa: F401 - of the same header

MAGIC = 0x3149545055434741
HEAD_BYTES = 65536
SLOTS_OFFSET = 32768
MAX_SLOTS = 256
NAMES_OFFSET = 65536
NAMES_BYTES = 8 << 20
BUFFERS_OFFSET = NAMES_OFFSET + NAMES_BYTES
MAX_KINDS = 64
MAX_CALLBACKS = 64
INDEX_DIVISOR = 4

MAX_ATTRIBUTES = 8
REASON_BYTES = 256
CANDIDATES_BYTES = 4096
NAMES_REPLACED = 1
"""``SLOT.flags``: pointers to names were replaced by ids of names."""


class State(enum.IntEnum):
    """``enum argus_cupti_state``: the helper's own state."""

    DORMANT = 1
    PROBED = 2
    ON = 3
    OFF = 4
    IGNORED = 5
    FAILED = 6
    ENDED = 7


class Command(enum.IntEnum):
    """``enum argus_cupti_command``."""

    PROBE = 1
    START = 2
    STOP = 3
    RELEASE = 4


class SlotState(enum.IntEnum):
    """``enum argus_cupti_slot_state``."""

    FREE = 0
    LENT = 1
    FULL = 2
    READY = 3
    CLAIMED = 4


LAYOUT = np.dtype([("size", "<u4"), ("name", "<u2", (2,))])
"""``struct argus_cupti_layout``: bytes of a record of one kind, and where its pointers to names are."""

ATTRIBUTE = np.dtype([("attribute", "<u4"), ("bytes", "<u4"), ("value", "<u8")])
"""``struct argus_cupti_attribute``."""

CONTROL = np.dtype(
    [
        ("magic", "<u8"),
        ("head_bytes", "<u4"),
        ("pid", "<u4"),
        ("state", "<u4"),
        ("done_seq", "<u4"),
        ("cupti_version", "<u4"),
        ("cupti_result", "<i4"),
        ("reason", "u1", (REASON_BYTES,)),
        ("library", "u1", (256,)),
        ("slots", "<u4"),
        ("buffer_bytes", "<u4"),
        ("holding", "<u4"),
        ("reserved", "<u4"),
        ("file_bytes", "<u8"),
        ("names_used", "<u8"),
        ("names_count", "<u8"),
        ("wakes", "<u8"),
        ("requests", "<u8"),
        ("refused", "<u8"),
        ("completed", "<u8"),
        ("strangers", "<u8"),
        ("records", "<u8"),
        ("unknown_bytes", "<u8"),
        ("names_lost", "<u8"),
        ("cupti_dropped", "<u8"),
        ("flushes", "<u8"),
        ("callback_ns", "<u8"),
        ("walk_ns", "<u8"),
        ("refused_kinds", "<u8"),
        ("command_seq", "<u4"),
        ("command", "<u4"),
        ("heartbeat", "<u4"),
        ("flush_ms", "<u4"),
        ("on_ms", "<u4"),
        ("period_ms", "<u4"),
        ("walks_outside", "<u4"),
        ("reserved_too", "<u4"),
        ("want_slots", "<u4"),
        ("want_buffer_bytes", "<u4"),
        ("kinds_count", "<u4"),
        ("kinds", "<u4", (MAX_KINDS,)),
        ("attributes_count", "<u4"),
        ("runtime_calls_count", "<u4"),
        ("driver_calls_count", "<u4"),
        ("attributes", ATTRIBUTE, (MAX_ATTRIBUTES,)),
        ("runtime_calls", "<u4", (MAX_CALLBACKS,)),
        ("driver_calls", "<u4", (MAX_CALLBACKS,)),
        ("layouts", LAYOUT, (MAX_KINDS,)),
        ("candidates", "u1", (CANDIDATES_BYTES,)),
    ]
)
"""``struct argus_cupti_control``: at offset 0."""

SLOT = np.dtype(
    [
        ("state", "<u4"),
        ("stream", "<u4"),
        ("sequence", "<u8"),
        ("valid", "<u8"),
        ("lost", "<u8"),
        ("count", "<u4"),
        ("flags", "<u4"),
        ("reserved", "<u8", (3,)),
    ]
)
"""``struct argus_cupti_slot``: ``MAX_SLOTS`` of them at ``SLOTS_OFFSET``."""

NAME = np.dtype([("pointer", "<u8"), ("id", "<u4"), ("length", "<u4")])
"""``struct argus_cupti_name``: the text follows, padded to 8 bytes."""

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Memory:
    """A mapping of the shared file.

    Args:
        fd: The file, open for reading and writing. Not closed by this class.
        size_bytes: How much of it to map.

    Attributes:
        control: Shape (), dtype ``CONTROL``: its fields are read and written in place.
        slots: Shape (``MAX_SLOTS``,), dtype ``SLOT``.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, size_bytes: int = HEAD_BYTES) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self.fence = make_fence()
        # Unmapped when the last array over it is gone.
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, "u1")
        self.control: NDArray[np.void] = np.ndarray((), CONTROL, self._bytes)
        self.slots: NDArray[np.void] = np.ndarray((MAX_SLOTS,), SLOT, self._bytes, SLOTS_OFFSET)
        self.slot_states: NDArray[np.uint32] = self.slots["state"]
        self._words: dict[str, NDArray[Any]] = {
            name: np.ndarray((1,), field[0], self._bytes, field[1])
            for name, field in (CONTROL.fields or {}).items()
            if field[0].subdtype is None
        }

    def load(self, name: str) -> int:
        """A number of ``control``."""
        return int(self._words[name][0])

    def store(self, name: str, value: int) -> None:
        """Sets a number of ``control``."""
        self._words[name][0] = value

    def text(self, name: str) -> str:
        """A text of ``control``: made printable, since another program wrote it."""
        raw = self.control[name].tobytes().split(b"\0", 1)[0].decode(errors="backslashreplace")
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in raw)

    def store_text(self, name: str, text: bytes) -> None:
        """Sets a text of ``control``. It must be shorter than the field."""
        field = self.control[name]
        field[: len(text)] = np.frombuffer(text, "u1")
        field[len(text) :] = 0

    def view(self, offset: int, count: int, dtype: Any = "u1") -> NDArray[Any]:
        """An array over the mapping.

        Raises:
            ValueError, TypeError: It does not lie within the mapping.
        """
        words: NDArray[Any] = np.ndarray((count,), dtype, self._bytes, offset)
        return words

    def buffer(self, slot: int, buffer_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Records and index of a slot, in place."""
        at = BUFFERS_OFFSET + slot * stride_bytes(buffer_bytes)
        index_bytes = buffer_bytes // INDEX_DIVISOR
        return self.view(at, buffer_bytes), self.view(at + buffer_bytes, index_bytes // 4, "<u4")

    def there(self, offset: int) -> int:
        """Bytes of the file from an offset on that somebody has written, up to the first page that nobody has: to read
        such a page makes it, and it counts as the reader's."""
        try:
            return max(os.lseek(self._fd, offset, os.SEEK_HOLE) - offset, 0)
        except OSError:  # behind its end
            return 0

    def buffer_there(self, slot: int, buffer_bytes: int) -> tuple[int, int]:
        """The same of a slot's records, and of its index."""
        at = BUFFERS_OFFSET + slot * stride_bytes(buffer_bytes)
        return self.there(at), self.there(at + buffer_bytes)

    def wake(self, name: str) -> None:
        """Wakes whoever sleeps on this word (futex, between processes)."""
        number = _SYS_FUTEX.get(platform.machine())
        if number is not None:
            address = ctypes.c_void_p(self._words[name].ctypes.data)
            _libc.syscall(ctypes.c_long(number), address, _FUTEX_WAKE, 1 << 30, None, None, 0)


def stride_bytes(buffer_bytes: int) -> int:
    """From one slot's buffer to the next: a buffer is followed by its index."""
    return buffer_bytes + buffer_bytes // INDEX_DIVISOR


def total_bytes(slots: int, buffer_bytes: int) -> int:
    """Of the file, up to the end of the last slot."""
    return BUFFERS_OFFSET + slots * stride_bytes(buffer_bytes)
