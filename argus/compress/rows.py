"""Histograms of many kernels at once, as columns: one row a kernel and window, only occupied bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.compress.bins import BINS
from argus.compress.templates import MAX_CELLS

ROW = np.dtype(
    [
        ("rank", "<u4"),
        ("group", "<i8"),
        ("step", "<u4"),
        ("last", "<u4"),
        ("n", "<i8"),
        ("total_ns", "<i8"),
        ("trend", "i1"),
        ("spikes", "<i8"),
        ("spike_ns", "<i8"),
        ("spike_max_ns", "<i8"),
        ("inside", "<f4", (MAX_CELLS,)),
        ("shift", "<f4"),
        ("spread", "<f4"),
    ]
)
"""``n`` launches that took ``total_ns``, without spikes, from ``step`` to ``last``; ``group``: of the compressor.
``inside``, ``shift`` and ``spread``: as codes.Codes has them, of rows that further steps may be put to."""


@dataclass
class Rows:
    """Rows with their histograms."""

    row: NDArray[np.void]
    """``ROW``, shape (r,)."""
    key: NDArray[np.int64]
    """Number of the row times 4096 plus bin, ascending, shape (k,)."""
    count: NDArray[np.int64]
    """Launches there, shape (k,), all above 0."""

    def __len__(self) -> int:
        return len(self.row)

    def select(self, chosen: NDArray[np.bool_]) -> Rows:
        """The rows that are chosen; shape of ``chosen``: (r,)."""
        if chosen.all():
            return self
        place, inside = np.divmod(self.key, BINS)
        kept = chosen[place]
        number = np.cumsum(chosen) - 1
        return Rows(self.row[chosen], number[place[kept]] * BINS + inside[kept], self.count[kept])

    def dense(self, into: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
        """Histograms added up, shape (rows, 4096). ``into``: of each row, where it is added, shape (r,)."""
        place, inside = np.divmod(self.key, BINS)
        cells = np.bincount(into[place] * BINS + inside, weights=self.count, minlength=rows * BINS)
        return cells.astype(np.int64).reshape(rows, BINS)


def empty() -> Rows:
    """No rows."""
    return Rows(np.empty(0, ROW), np.empty(0, np.int64), np.empty(0, np.int64))


def join(parts: Sequence[Rows]) -> Rows:
    """All rows of all parts, in order."""
    if not parts:
        return empty()
    if len(parts) == 1:
        return parts[0]
    start = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return Rows(
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.key + first * BINS for part, first in zip(parts, start, strict=True)]),
        np.concatenate([part.count for part in parts]),
    )


def merge(old: Rows, new: Rows) -> Rows:
    """Rows of later steps added to those of the same rank and kernel: row by row, as many of each."""
    both, many = np.concatenate([old.key, new.key]), np.concatenate([old.count, new.count])
    order = np.argsort(both, kind="stable")  # two ascending runs: that is what it is fast at
    both = both[order]
    first = np.flatnonzero(np.diff(both, prepend=-1))
    key, count = both[first], np.add.reduceat(many[order], first) if len(first) else many
    row = old.row.copy()
    row["last"] = new.row["last"]
    part = new.row["n"] / (old.row["n"] + new.row["n"])
    row["shift"] = (1 - part) * old.row["shift"] + part * new.row["shift"]
    row["spread"] = np.sqrt((1 - part) * old.row["spread"] ** 2 + part * new.row["spread"] ** 2)
    for name in ("inside", "n", "total_ns", "spikes", "spike_ns"):
        row[name] += new.row[name]
    row["spike_max_ns"] = np.maximum(old.row["spike_max_ns"], new.row["spike_max_ns"])
    return Rows(row, key, count)
