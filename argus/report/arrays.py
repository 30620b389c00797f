"""The numbers of a page: arrays one after the other, compressed once."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from argus.report.panel import ArrayRef

DType = Literal["u1", "u2", "u4", "i4", "f4", "f8"]
UNKNOWN = 255
"""In arrays of ``u1``: not known."""
LEVEL = 6
"""Of zlib: 9 takes twice as long for 2 % of the bytes (`scripts/bench report`)."""
_ALIGNED = 8
"""Browsers read numbers only where their size divides the offset."""


class Arrays:
    """Takes arrays, and returns where each one is. :meth:`packed` ends it."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(LEVEL)
        self._parts: list[bytes] = []
        self.length = 0

    def add(self, values: ArrayLike, dtype: DType = "f4") -> ArrayRef:
        """An array, little-endian in C order. ``u1`` is taken as it is, floats that are too large are infinite."""
        array: NDArray[Any] = np.asarray(values)
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(array, np.dtype(f"<{dtype}"))
        offset = self._written(b"\0" * (-self.length % _ALIGNED))
        self._written(data.tobytes())
        return {"dtype": dtype, "shape": list(data.shape), "offset": offset, "length": data.nbytes}

    def _written(self, data: bytes) -> int:
        """Appends bytes; returns where the next ones begin."""
        self._parts.append(self._deflate.compress(data))
        self.length += len(data)
        return self.length

    def packed(self) -> bytes:
        """All of them, as zlib has it (``DecompressionStream("deflate")`` of browsers)."""
        return b"".join([*self._parts, self._deflate.flush()])


def unpacked(packed: bytes, ref: ArrayRef) -> NDArray[Any]:
    """An array of a page again."""
    data = zlib.decompress(packed)[ref["offset"] : ref["offset"] + ref["length"]]
    return np.frombuffer(data, np.dtype(f"<{ref['dtype']}")).reshape(ref["shape"])
