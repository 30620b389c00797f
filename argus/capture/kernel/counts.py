"""What the stack sampler counted: a log for each CPU, in memory that both sides have (``struct argus_log`` of
``bpf/stacks.h``).

A CPU adds to the rows of the window of time that it is in, and begins new ones. When the window is over nobody writes
to its rows any more, so that they are read with no system call, and no sample is counted twice or lost meanwhile.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from argus.model import records

GRACE_NS = 5_000_000
"""So long after its end a window is taken to be over. Programs run for microseconds, with interrupts off."""

_NONE = np.empty(0, records.STACK_COUNT)
_ROW_WORDS = records.STACK_COUNT.itemsize // 8


def value_bytes(rows: int) -> int:
    """Size of one log: ``struct log`` of bpf/stacks.bpf.h."""
    return -(-(records.LOG.itemsize + rows * (records.STACK_COUNT.itemsize + 4)) // 8) * 8


class CountLogs:
    """The reader's end of all logs.

    Args:
        map_fd: Descriptor of the map "logs". Not closed by this class.
        cpus: How many logs there are.
        rows: Of each: a power of two.

    Attributes:
        until_ns: All that was counted before, by CLOCK_MONOTONIC, has been taken.
    """

    def __init__(self, map_fd: int, cpus: int, rows: int) -> None:
        stride = value_bytes(rows)
        self.until_ns = 0
        self._rows = rows
        self._map = mmap.mmap(map_fd, -(-cpus * stride // mmap.PAGESIZE) * mmap.PAGESIZE)
        # Looked at in every turn: elements of numpy arrays take ten times as long.
        self._looked_at = memoryview(self._map).cast("Q")
        self._places = range(0, cpus * stride // 8, stride // 8)
        heads: NDArray[np.void] = np.ndarray(cpus, records.LOG, self._map, 0, (stride,))
        self._written, self._taken = heads["written"], heads["taken"]
        self._window, self._window_begin = heads["window"], heads["window_begin"]
        # As words: numpy copies plain integers ten times as fast as structures, field by field.
        self._words: NDArray[np.uint64] = np.ndarray(
            (cpus, rows, _ROW_WORDS), "<u8", self._map, records.LOG.itemsize, (stride, 8 * _ROW_WORDS, 8)
        )

    @property
    def used(self) -> float:
        """Part of the fullest log that waits to be read, 0 to 1."""
        words = self._looked_at
        return max(words[at] - words[at + 1] for at in self._places) / self._rows

    def take(self, now_ns: int, *, final: bool = False) -> NDArray[np.void]:
        """Takes the rows of all windows that are over.

        Args:
            now_ns: CLOCK_MONOTONIC.
            final: Nobody counts any more: all of them.

        Returns:
            ``records.STACK_COUNT``, a copy, shape (n,): the rows of each CPU, oldest first.
        """
        over = (now_ns - GRACE_NS) >> records.WINDOW_BITS
        # First, so that none of these is of a later window than the one that is read next.
        written = self._written.tolist()
        windows = self._window.tolist()
        begins = self._window_begin.tolist()
        parts, ends = [], []
        for cpu, begin in enumerate(self._taken.tolist()):
            end = written[cpu] if final or windows[cpu] < over else min(written[cpu], begins[cpu])
            if begin < end:
                first, last = begin % self._rows, (end - 1) % self._rows + 1
                words = self._words[cpu]
                parts += [words[first:last]] if first < last else [words[first:], words[:last]]
            ends.append(max(begin, end))
        self.until_ns = now_ns if final else over << records.WINDOW_BITS
        if not parts:
            return _NONE
        rows: NDArray[np.void] = np.concatenate(parts).view(records.STACK_COUNT)[:, 0]
        self._taken[:] = ends
        return rows

    def close(self) -> None:
        """Unmaps them."""
        # numpy's views keep the map open until they are gone.
        self._looked_at.release()
        del self._written, self._taken, self._window, self._window_begin, self._words
        self._map.close()
