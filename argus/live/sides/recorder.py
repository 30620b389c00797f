"""A flight recorder of the GPUs: the newest operations of a process one by one, bounded in memory.

A large job runs more kernels than a store should take one by one, and hardly ever asks for one of them. All are
summed up (``argus.compress``); one by one go to the store those of some steps, and those of moments that are flagged.
What is flagged may lie behind: it is still here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.model import records

RECORDER_BYTES = 32 << 20
"""What is kept of a process: a quarter of a million operations, two steps and more of a large model's 100,000."""


@dataclass
class _Part:
    ops: NDArray[np.void]
    called_ns: NDArray[np.int64]
    stored: NDArray[np.bool_]


def called_ns(ops: NDArray[np.void]) -> NDArray[np.int64]:
    """When the CPU asked for each operation, or when it began where that is not known: decides which step it is of.

    Args:
        ops: ``records.GPU_OP``, shape (n,).
    """
    matched = (ops["flags"] & records.GPU_LAUNCH_MATCHED) != 0
    return np.where(matched, ops["launch_ns"], ops["start_ns"]).astype(np.int64)


class FlightRecorder:
    """The newest operations of one process. Each is given out once: what was stored is not stored again.

    Args:
        max_bytes: What may be kept. The oldest goes first.

    Attributes:
        forgotten: Operations that were never given out and are no more.
        gone_ns: When the last of what is no more, given out or not, had ended; 0: everything is here.
    """

    def __init__(self, max_bytes: int = RECORDER_BYTES) -> None:
        self.forgotten = 0
        self.gone_ns = 0
        self._max_bytes = max_bytes
        self._parts: deque[_Part] = deque()
        self._bytes = 0

    def feed(
        self, ops: NDArray[np.void], called_ns: NDArray[np.int64], stored: NDArray[np.bool_] | None = None
    ) -> None:
        """Takes operations over; the arrays must not be changed afterwards.

        Args:
            ops: ``records.GPU_OP``, shape (n,).
            called_ns: As the function ``called_ns`` has it, shape (n,).
            stored: Which of them are stored already, shape (n,); None: none.
        """
        if not len(ops):
            return
        self._parts.append(_Part(ops, called_ns, np.zeros(len(ops), bool) if stored is None else stored.copy()))
        self._bytes += ops.nbytes
        while self._bytes > self._max_bytes and len(self._parts) > 1:
            self._forget_oldest()

    @property
    def nbytes(self) -> int:
        """Bytes of the operations that are here."""
        return self._bytes

    def keep(self, most_bytes: int) -> None:
        """Forgets the oldest where there is more than so much: the operations of one ``feed`` together."""
        while self._bytes > most_bytes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._parts.popleft()
        self._bytes -= oldest.ops.nbytes
        self.forgotten += int(np.sum(~oldest.stored))
        self.gone_ns = max(self.gone_ns, int(oldest.ops["end_ns"].max()))

    def take_called(self, begin_ns: int, end_ns: int) -> NDArray[np.void]:
        """What the CPU asked for in this time: the operations of a step."""
        return self._take([(part.called_ns >= begin_ns) & (part.called_ns < end_ns) for part in self._parts])

    def take_ran(self, begin_ns: int, end_ns: int) -> NDArray[np.void]:
        """What ran in this time, if only for a part of it."""
        begin, end = max(begin_ns, 0), max(end_ns, 0)
        return self._take([(part.ops["end_ns"] > begin) & (part.ops["start_ns"] < end) for part in self._parts])

    def close(self) -> None:
        """Lets everything go; counts what was never given out."""
        self.forgotten += sum(int(np.sum(~part.stored)) for part in self._parts)
        self.gone_ns = max([self.gone_ns, *(int(part.ops["end_ns"].max()) for part in self._parts)])
        self._parts.clear()
        self._bytes = 0

    def _take(self, chosen: list[NDArray[np.bool_]]) -> NDArray[np.void]:
        parts = [np.empty(0, records.GPU_OP)]
        for part, mask in zip(self._parts, chosen, strict=True):
            mask &= ~part.stored
            if mask.any():
                part.stored |= mask
                parts.append(part.ops[mask])
        return np.concatenate(parts)
