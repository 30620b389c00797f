"""Reads a BPF ring buffer as columns: the buffer is mapped and viewed as one structured array.

Layout (kernel/bpf/ringbuf.c): a page with the consumer's position, a page with the producer's, then the data, mapped
twice in a row so that a record never wraps. Each record has an 8-byte header: a length whose bit 31 says "still being
written" and bit 30 "discarded". Records of one ring have one size here, so the unread part is an array with a stride.

Ordering. The kernel publishes a record by clearing the busy bit after its data, and advances the producer's position
after the header. Reading needs the reverse: position, then headers, then data, then release our own position. x86
keeps loads in order and stores after earlier loads, so plain reads suffice (numpy's copies are opaque calls to the
interpreter, which therefore does not reorder them). Elsewhere (aarch64) each arrow above is a full barrier, made by
``membarrier(PRIVATE_EXPEDITED)``: about a microsecond a drain, not one a record.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError

BUSY = np.uint32(1 << 31)
DISCARDED = np.uint32(1 << 30)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_LENGTH = np.uint32((1 << 30) - 1)
HEADER_BYTES = 8

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_PRIVATE_EXPEDITED = 8
_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 16


def _no_fence() -> None:
    """Loads are not reordered with loads, nor stores with earlier loads, on x86."""


def make_fence(machine: str | None = None) -> Callable[[], None]:
    """A function that orders memory accesses as the reader needs on ``machine`` (default: this one).

    Raises:
        ArgusError: The machine is weakly ordered and the kernel offers no ``membarrier``.
    """
    machine = machine or platform.machine()
    if machine in ("x86_64", "AMD64"):
        return _no_fence
    return membarrier_fence()


def membarrier_fence() -> Callable[[], None]:
    """A full memory barrier by system call, usable from Python on any architecture."""
    number = _SYS_MEMBARRIER.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(number, _MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0:
        raise ArgusError(
            f"this {platform.machine()} kernel refuses membarrier, which reading the ring safely needs",
            "Allow the membarrier system call (seccomp profile), or use a kernel with CONFIG_MEMBARRIER",
            EXIT_UNAVAILABLE,
        )

    def fence() -> None:
        libc.syscall(number, _MEMBARRIER_PRIVATE_EXPEDITED, 0, 0)

    return fence


class Ring:
    """The consumer's end of one BPF ring buffer whose records all have one dtype.

    Args:
        map_fd: File descriptor of the map (BPF_MAP_TYPE_RINGBUF). Not closed by this class.
        size_bytes: Size of the data area: a power of two, and a multiple of the page size.
        dtype: The record, without its header.

    Raises:
        ArgusError: The buffer cannot be mapped.
    """

    def __init__(self, map_fd: int, size_bytes: int, dtype: np.dtype[np.void]) -> None:
        page = mmap.PAGESIZE
        if size_bytes & (size_bytes - 1) or size_bytes % page:
            raise ValueError(f"ring of {size_bytes} bytes: must be a power of two and a multiple of {page}")
        stride = HEADER_BYTES + (dtype.itemsize + 7) // 8 * 8
        self.dtype = dtype
        self.size_bytes = size_bytes
        self._slot = np.dtype(
            {
                "names": ["length", "page_offset", "record"],
                "formats": ["<u4", "<u4", dtype],
                "offsets": [0, 4, HEADER_BYTES],
                "itemsize": stride,
            }
        )
        self._mask = size_bytes - 1
        self._fence = make_fence()
        try:
            self._consumer_map = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
            self._data_map = mmap.mmap(map_fd, page + 2 * size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        except OSError as reason:
            hint = "Raise the locked-memory limit (ulimit -l)" if reason.errno in (errno.EPERM, errno.EAGAIN) else ""
            raise ArgusError(f"cannot map the ring buffer: {os.strerror(reason.errno or 0)}", hint) from reason
        self._consumer = np.frombuffer(self._consumer_map, dtype="<u8", count=1)
        self._producer = np.frombuffer(self._data_map, dtype="<u8", count=1)
        self._data = np.frombuffer(self._data_map, dtype="u1", offset=page)
        # Looked at in every turn: an element of a numpy array takes ten times as long.
        self._produced = memoryview(self._data_map).cast("Q")
        self._position = int(self._consumer[0])
        self.discarded = 0
        """Records the producer gave up after reserving them."""
        self.most_used_bytes = 0
        """The fullest the ring was when it was read: how close it came to dropping."""

    @property
    def used(self) -> float:
        """Part of the ring that waits to be read, 0 to 1."""
        return (self._produced[0] - self._position) / self.size_bytes

    def drain(self) -> NDArray[np.void]:
        """Takes every finished record, oldest first.

        Returns:
            A copy, shape (n,), dtype ``self.dtype`` (its stride includes the header). A record still being written
            ends the batch; it and what follows come next time.
        """
        produced = int(self._producer[0])
        waiting = produced - self._position
        if waiting > self.most_used_bytes:
            self.most_used_bytes = waiting
        count = waiting // self._slot.itemsize
        if count == 0:
            return np.empty(0, self.dtype)
        self._fence()
        # As words: numpy copies plain integers ten times as fast as structures, field by field.
        words: NDArray[np.uint64] = np.ndarray(
            (count, self._slot.itemsize // 8), "<u8", buffer=self._data, offset=self._position & self._mask
        )
        lengths = (words[:, 0] & _LOW_HALF).astype(np.uint32)
        busy = (lengths & BUSY) != 0
        if busy.any():
            count = int(busy.argmax())
            if count == 0:
                return np.empty(0, self.dtype)
            lengths = lengths[:count]
        self._fence()
        taken = words[:count].copy().view(self._slot)[:, 0]
        self._fence()
        self._position += count * self._slot.itemsize
        self._consumer[0] = self._position

        if ((lengths & _LENGTH) != self.dtype.itemsize).any():
            raise RuntimeError(
                "a record of another size is in the ring: bpf/argus.h and argus/model/records.py disagree"
            )
        discarded = (lengths & DISCARDED) != 0
        if discarded.any():
            self.discarded += int(discarded.sum())
            taken = taken[~discarded]
        records: NDArray[np.void] = taken["record"]
        return records

    def close(self) -> None:
        """Unmaps the buffer. Records not drained are lost."""
        # numpy's views keep the maps open until they are gone.
        self._produced.release()
        del self._consumer, self._producer, self._data
        self._consumer_map.close()
        self._data_map.close()


class VariableRing:
    """The consumer's end of one BPF ring buffer whose records differ in size. An object a record: for rare ones.

    Args, errors and order of accesses: as ``Ring``.
    """

    def __init__(self, map_fd: int, size_bytes: int) -> None:
        self._ring = Ring(map_fd, size_bytes, np.dtype([("word", "<u8")]))

    @property
    def most_used_bytes(self) -> int:
        """The fullest the ring was when it was read."""
        return self._ring.most_used_bytes

    @property
    def used(self) -> float:
        """Part of the ring that waits to be read, 0 to 1."""
        return self._ring.used

    def drain(self) -> list[NDArray[np.uint8]]:
        """Takes every finished record, oldest first: its bytes, a copy. One still being written ends the batch."""
        ring = self._ring
        produced = int(ring._producer[0])
        waiting = produced - ring._position
        ring.most_used_bytes = max(ring.most_used_bytes, waiting)
        if waiting <= 0:
            return []
        ring._fence()
        data, at, records = ring._data, ring._position & ring._mask, []
        end = at + waiting
        spans = []
        while at < end:
            header = int(data[at : at + 4].view("<u4")[0])
            if header & int(BUSY):
                break
            length = header & int(_LENGTH)
            if header & int(DISCARDED):
                ring.discarded += 1
            else:
                spans.append((at + HEADER_BYTES, length))
            at += HEADER_BYTES + (length + 7) // 8 * 8
        ring._fence()
        for begin, length in spans:
            records.append(data[begin : begin + length].copy())
        ring._fence()
        ring._position += at - (ring._position & ring._mask)
        ring._consumer[0] = ring._position
        return records

    def close(self) -> None:
        """Unmaps the buffer. Records not drained are lost."""
        self._ring.close()
