"""From stored rows back to distributions of durations.

Rows are columns by name, as ``Compressor.take`` gives them or a query of the tables does (numpy or Arrow).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.compress.codes import decoded
from argus.compress.templates import POINTS, SHAPE_UNIT

ESCAPE_PER_NEPER = 64
"""Bins a neper in kernel_escapes."""


@dataclass
class Decoded:
    """Distributions, one a row. Spikes are not in them."""

    weight: NDArray[np.float64]
    """Launches of each part (cell or bin), in order of duration, shape (r, k); 0 where a row has fewer parts."""
    value_ns: NDArray[np.float64]
    """Durations that stand for equal parts of each, ascending, shape (r, k, p)."""
    edge_ns: NDArray[np.float64] | None
    """Of bins: where they begin and end, shape (r, k, 2). None: cells, whose points give their shape."""

    def points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Durations in ns and launches at each, both of shape (r, k * p). Launches add up to those that are no
        spikes, launches times durations to ``total_ns``."""
        many = self.value_ns.shape[2]
        shape = (len(self.weight), self.weight.shape[1] * many)
        return self.value_ns.reshape(shape), np.repeat(self.weight / many, many, axis=1).reshape(shape)

    def quantile(self, q: float) -> NDArray[np.float64]:
        """The duration below which a part ``q`` of the launches lies, ns, shape (r,); NaN: a row has none.

        The same as the view kernel_stats computes, where there are no spikes.
        """
        upto = np.cumsum(self.weight, axis=1)
        whole = upto[:, -1:]
        target = q * whole
        cell = np.argmax((upto >= target) & (self.weight > 0), axis=1)
        every = np.arange(len(cell))
        inside = self.weight[every, cell]
        with np.errstate(invalid="ignore", divide="ignore"):
            part = ((target[:, 0] - (upto[every, cell] - inside)) / inside).clip(0, 1)
            if self.edge_ns is not None:
                low, high = self.edge_ns[every, cell].T
                return np.where(inside > 0, low * (high / np.where(low > 0, low, 1)) ** part, np.nan)
        points = self.value_ns.shape[2]
        place = np.nan_to_num(part * points - 0.5).clip(0, points - 1)
        low_point, high_point = np.floor(place).astype(int), np.ceil(place).astype(int)
        low, high = self.value_ns[every, cell, low_point], self.value_ns[every, cell, high_point]
        return np.where(inside > 0, low + (high - low) * (place - low_point), np.nan)


def decode_summaries(rows: Mapping[str, Any], templates: Mapping[str, Any]) -> Decoded:
    """Distributions of rows of kernel_summaries, one a row, at most 12 cells of 16 points.

    Their distance (W1) from the launches is at most 1.5 times ``escape_error`` of the template, or 1.5 over the number
    of launches if that is more, plus 1 %, of the mean, plus 2 ns: the compressor decodes each row before it stores it,
    and measures the distance point by point.

    Args:
        rows: ``template``, ``count``, ``spikes``, ``total_ns``, ``count_codes``, ``mean_codes``.
        templates: All columns but ``job`` and ``run`` of those that the rows name, of one job and run.

    Raises:
        KeyError: A row's template is missing.
    """
    place = {number: k for k, number in enumerate(_numbers(templates["template"]).tolist())}
    which = np.array([place[number] for number in _numbers(rows["template"]).tolist()], np.int64)
    share, mean, unit = (_padded(templates[name])[which] for name in ("share", "mean_ns", "unit"))
    cells = share.shape[1]
    shape = _padded(templates["shape"], cells * POINTS)[which].reshape(-1, cells, POINTS) * SHAPE_UNIT
    count, value = decoded(
        _numbers(rows["count"]).astype(np.int64) - _numbers(rows["spikes"]).astype(np.int64),
        _numbers(rows["total_ns"]).astype(np.int64),
        _padded(rows["count_codes"], cells),
        _padded(rows["mean_codes"], cells),
        share,
        mean,
        unit,
        shape,
        _numbers(templates["heaviest"]).astype(np.int64)[which] - 1,
    )
    return Decoded(count, value, None)


def decode_escapes(rows: Mapping[str, Any]) -> Decoded:
    """Distributions of rows of kernel_escapes, one a row, one point a bin: W1 is at most 1.6 % of the mean plus
    2 ns.

    Args:
        rows: ``total_ns``, ``bins``, ``counts``.
    """
    count = _padded(rows["counts"])
    bins = _padded(rows["bins"], count.shape[1])
    middle = np.exp((bins + 0.5) / ESCAPE_PER_NEPER)
    total = _numbers(rows["total_ns"]).astype(np.float64)
    level = (total / np.maximum((count * middle).sum(axis=1), 1e-300))[:, None]
    edge = np.stack([np.exp(bins / ESCAPE_PER_NEPER), np.exp((bins + 1) / ESCAPE_PER_NEPER)], axis=2)
    return Decoded(count, (middle * level)[:, :, None], edge * level[:, :, None])


def _numbers(column: Any) -> NDArray[Any]:
    return column.to_numpy() if isinstance(column, pa.ChunkedArray) else np.asarray(column)


def _padded(column: Any, width: int | None = None) -> NDArray[np.float64]:
    """Lists as a two-dimensional array, filled up with 0."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    lists = column if isinstance(column, pa.Array) else pa.array(list(column))
    offsets = lists.offsets.to_numpy()
    length = np.diff(offsets)
    wide = max(1, int(length.max(initial=0))) if width is None else width
    out = np.zeros((len(length), wide))
    out[np.arange(wide) < length[:, None]] = lists.values.to_numpy()[offsets[0] : offsets[-1]]
    return out
