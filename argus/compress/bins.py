"""Durations on logarithmic bins, without a sort and without a logarithm a duration.

A float32's exponent and leading mantissa bits name one of 96,256 slices, each 0.05 % wide; a table has the bin
of each slice. (The bits themselves are no logarithmic bins: a slice doubles its width at each power of two.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 4096
"""Bins of a duration; bin b holds exp(b / 128) up to exp((b + 1) / 128) ns, the first one 0 ns as well."""
PLACE = 12
"""Bits of a bin's number: a row's number shifted by as much, plus a bin, is a key."""
PER_NEPER = 128
"""Bins a neper: 0.78 % each. Twice as many gave no better distance to the samples (measured on synthetic streams)."""
LONGEST_NS = 1 << 42
"""73 minutes: no kernel takes longer, a longer record is broken."""

_DROPPED_BITS = 12
_FIRST = 127 << (23 - _DROPPED_BITS)


def _table() -> NDArray[np.int16]:
    slices = np.arange(((127 + 47) << 11) - _FIRST, dtype=np.uint32) + np.uint32(_FIRST)
    middle = ((slices << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))).view(np.float32).astype(np.float64)
    table = np.zeros(_FIRST + len(slices), np.int16)
    table[_FIRST:] = np.minimum(np.floor(np.log(middle) * PER_NEPER), BINS - 1)
    return table


_TABLE = _table()
CENTER_LOG = (np.arange(BINS) + 0.5) / PER_NEPER
"""ln of the middle of each bin, ns."""
CENTER_NS = np.exp(CENTER_LOG)
"""The middle of each bin, ns."""


def bins_of(duration_ns: NDArray[np.int64]) -> NDArray[np.int16]:
    """The bin of each duration, shape (n,). Durations of 0 up to ``LONGEST_NS``; misplaced by 0.05 % at most."""
    bits: NDArray[np.int32] = duration_ns.astype(np.float32).view(np.int32)
    bits >>= _DROPPED_BITS
    return _TABLE[bits]


def occupied(keys: NDArray[np.int64], space: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys that occur, ascending, and how often: two arrays of shape (k,).

    One pass over a dense histogram; a sort instead where that would be far larger than the keys.

    Args:
        keys: Whole numbers from 0 up to ``space``, shape (n,).
        space: How many there may be.
    """
    if space > max(1 << 21, 16 * len(keys)):
        return np.unique(keys, return_counts=True)
    counts = np.bincount(keys, minlength=space)
    used = np.flatnonzero(counts != 0)
    return used, counts[used]
