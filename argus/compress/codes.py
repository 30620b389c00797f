"""Rows as deviations from templates, and what it costs in accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.compress.bins import BINS, CENTER_LOG, CENTER_NS, PER_NEPER
from argus.compress.rows import Rows
from argus.compress.templates import COUNT_UNIT, MAX_CELLS, POINTS, Template

RANGE_UNIT = 16
"""Codes of the least and the greatest duration are so fine: 1/16 neper, relative to the mean."""
_LARGEST = 127
_FAR = 2 * BINS


class Bank:
    """Templates as padded arrays, so that rows of many kernels are encoded in the same few calls.

    Attributes:
        templates: By slot.
    """

    def __init__(self) -> None:
        self.templates: list[Template] = []
        self._edge = np.empty((0, MAX_CELLS + 1), np.int64)
        self._cells = np.empty((0, 4, MAX_CELLS))
        self._shape = np.empty((0, MAX_CELLS, POINTS))
        self._modes = np.empty((0, MAX_CELLS + 1), np.int64)
        self._mode_cells = np.empty((0, 2, MAX_CELLS))
        self._heaviest = np.empty(0, np.int64)
        self._width = np.empty(0, np.int64)

    def add(self, new: list[Template]) -> NDArray[np.int64]:
        """Takes templates; their slots, shape (n,)."""
        first = len(self.templates)
        self.templates += new
        parts = [_padded(template) for template in new]
        for name, part in zip(
            ("_edge", "_cells", "_shape", "_modes", "_mode_cells"), zip(*parts, strict=True), strict=True
        ):
            setattr(self, name, np.concatenate([getattr(self, name), np.stack(part)]))
        self._heaviest = np.concatenate([self._heaviest, [template.heaviest for template in new]])
        self._width = np.concatenate([self._width, [len(template.share) for template in new]])
        return np.arange(first, len(self.templates))

    def put(self, slot: int, new: Template) -> None:
        """A new template in the place of an old one."""
        self.templates[slot] = new
        edge, cells, shape, modes, mode_cells = _padded(new)
        self._edge[slot], self._cells[slot], self._shape[slot] = edge, cells, shape
        self._modes[slot], self._mode_cells[slot] = modes, mode_cells
        self._heaviest[slot], self._width[slot] = new.heaviest, len(new.share)

    def encode(self, rows: Rows, slot: NDArray[np.int64]) -> Codes:
        """Codes of rows.

        Args:
            rows: All with at least one launch.
            slot: Of the template of each, shape (r,).
        """
        place, inside = np.divmod(rows.key, BINS)
        start = np.arange(len(rows)) * BINS
        below = np.concatenate([[0], np.cumsum(rows.count)])
        log = np.concatenate([[0.0], np.cumsum(rows.count * CENTER_LOG[inside])])
        ns = np.concatenate([[0.0], np.cumsum(rows.count * CENTER_NS[inside])])
        n, total = rows.row["n"], rows.row["total_ns"].astype(np.float64)
        bounds = np.searchsorted(place, np.arange(len(rows) + 1))

        # The whole kernel may have become slower or faster: cells move along with the modes.
        share, usual = self._mode_cells[slot, 0], self._mode_cells[slot, 1]
        shift = np.zeros(len(rows))
        for _ in range(2):
            cut = np.searchsorted(rows.key, _moved(self._modes[slot], shift, start))
            there = np.diff(below[cut], axis=1)
            middle = np.diff(log[cut], axis=1) / np.maximum(there, 1)
            weight = np.minimum(share, there / n[:, None])
            whole = weight.sum(axis=1)
            shift = np.where(whole > 0, (weight * (middle - usual)).sum(axis=1) / np.maximum(whole, 1e-300), 0.0)

        squares = np.add.reduceat(rows.count * CENTER_LOG[inside] ** 2, bounds[:-1])
        spread = np.sqrt(np.maximum(squares - (there * middle**2).sum(axis=1), 0) / n)

        cut = np.searchsorted(rows.key, _moved(self._edge[slot], shift, start))
        there = np.diff(below[cut], axis=1)
        scale = total / np.diff(ns[bounds])
        mean = np.diff(ns[cut], axis=1) / np.maximum(there, 1) * scale[:, None]
        expected, usual, unit = self._cells[slot, 0], self._cells[slot, 1], self._cells[slot, 2]
        deviation = np.rint((np.sqrt(there) - np.sqrt(expected * n[:, None])) / COUNT_UNIT)
        every = np.arange(len(rows))
        deviation[every, self._heaviest[slot]] = 0
        decoded = decoded_counts(n, deviation, expected, self._heaviest[slot])
        level = total / np.maximum((decoded * usual).sum(axis=1), 1e-300)
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.rint(np.log(mean / (usual * level[:, None])) / unit)
        moved = np.where((there > 0) & (total > 0)[:, None], moved, 0)

        first, last = inside[bounds[:-1]], inside[bounds[1:] - 1]
        average = np.log(np.maximum(total / n, 1e-3))
        low = np.rint((average - CENTER_LOG[first] - np.log(scale.clip(1e-300))) * RANGE_UNIT)
        high = np.rint((CENTER_LOG[last] + np.log(scale.clip(1e-300)) - average) * RANGE_UNIT)
        fits = (np.abs(deviation).max(axis=1) <= _LARGEST) & (np.abs(moved).max(axis=1) <= _LARGEST)
        fits &= (low >= 0) & (low < 256) & (high >= 0) & (high < 256) & (total > 0)
        codes = Codes(
            slot=slot,
            width=self._width[slot],
            counts=deviation.clip(-_LARGEST, _LARGEST).astype(np.int8),
            means=moved.clip(-_LARGEST, _LARGEST).astype(np.int8),
            low=low.clip(0, 255).astype(np.uint8),
            high=high.clip(0, 255).astype(np.uint8),
            fits=fits,
            error=np.zeros(len(rows)),
            inside=there,
            shift=shift,
            spread=spread,
        )
        codes.error = self._error(rows, codes, below, inside, bounds, scale)
        return codes

    def atoms(
        self, n: NDArray[np.int64], total_ns: NDArray[np.int64], codes: Codes
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What codes stand for: launches of each cell, shape (r, 12), and durations of its points, (r, 12, 16), ns."""
        slot = codes.slot
        return decoded(
            n, total_ns, codes.counts, codes.means, self._cells[slot, 0], self._cells[slot, 1], self._cells[slot, 2],
            self._shape[slot], self._heaviest[slot],
        )  # fmt: skip

    def _error(
        self,
        rows: Rows,
        codes: Codes,
        below: NDArray[np.int64],
        inside: NDArray[np.int64],
        bounds: NDArray[np.int64],
        scale: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The distance (W1 over the mean) of what codes stand for to the histogram, shape (r,).

        Both are compared quantile by quantile, at the middle of each of the points decoded: W1 is the area between two
        quantile functions (Vallender 1974).
        """
        n, total = rows.row["n"], rows.row["total_ns"]
        count, value = self.atoms(n, total, codes)
        edge = np.cumsum(count, axis=1) - count
        row, cell = np.nonzero(count > 0)
        weight = count[row, cell] / POINTS
        rank = edge[row, cell][:, None] + (np.arange(POINTS) + 0.5) * weight[:, None]
        target = below[bounds[row]][:, None] + rank
        element = np.clip(
            np.searchsorted(below, target, side="right") - 1, bounds[row][:, None], bounds[row + 1][:, None] - 1
        )
        part = ((target - below[element]) / rows.count[element]).clip(0, 1)
        actual = np.exp((inside[element] + part) / PER_NEPER) * scale[row][:, None]
        apart = (np.abs(actual - value[row, cell]) * weight[:, None]).sum(axis=1)
        whole: NDArray[np.float64] = np.bincount(row, weights=apart, minlength=len(rows)) / np.maximum(total, 1)
        return whole


@dataclass
class Codes:
    """Rows in codes; all of shape (r,) unless noted."""

    slot: NDArray[np.int64]
    width: NDArray[np.int64]
    """Cells of its template."""
    counts: NDArray[np.int8]
    """Shape (r, 12)."""
    means: NDArray[np.int8]
    """Shape (r, 12)."""
    low: NDArray[np.uint8]
    high: NDArray[np.uint8]
    fits: NDArray[np.bool_]
    """False: a code would be too large."""
    error: NDArray[np.float64]
    inside: NDArray[np.int64]
    """Launches in each cell, not in codes, shape (r, 12)."""
    shift: NDArray[np.float64]
    """How far modes have moved, nepers."""
    spread: NDArray[np.float64]
    """Standard deviation of logarithms inside modes."""

    def remembered(self, rows: Rows) -> Rows:
        """The rows, with what is needed to decide whether the next step is like them."""
        for name in ("inside", "shift", "spread"):
            rows.row[name] = getattr(self, name)
        return rows


def decoded_counts(
    n: NDArray[np.int64],
    codes: NDArray[np.float64] | NDArray[np.int8],
    share: NDArray[np.float64],
    heaviest: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Launches of each cell, (r, k), that add up to ``n``: the heaviest cell has what the others leave.

    Args:
        n: Launches, shape (r,).
        codes: Of the counts, shape (r, k).
        share: Of the template's cells, 0 past the last one, shape (r, k).
        heaviest: Cell without a code, shape (r,).
    """
    root = np.sqrt(share * n[:, None]) + COUNT_UNIT * codes
    counts = np.where(share > 0, np.maximum(root, 0) ** 2, 0.0)
    every = np.arange(len(n))
    counts[every, heaviest] = 0
    rest = counts.sum(axis=1)
    counts *= np.minimum(1, n / np.maximum(rest, 1e-300))[:, None]
    counts[every, heaviest] = np.maximum(n - rest, 0)
    return counts


def decoded(
    n: NDArray[np.int64],
    total_ns: NDArray[np.int64],
    count_codes: NDArray[np.int8] | NDArray[np.float64],
    mean_codes: NDArray[np.int8] | NDArray[np.float64],
    share: NDArray[np.float64],
    mean_ns: NDArray[np.float64],
    unit: NDArray[np.float64],
    shape: NDArray[np.float64],
    heaviest: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What codes stand for: launches of each cell, (r, k), and its points' durations, (r, k, 16), ns.

    Cells keep their proportions, and their level follows from the sum, which is exact: so no code for it is needed.
    """
    counts = decoded_counts(n, count_codes, share, heaviest)
    means = mean_ns * np.exp(mean_codes * unit)
    level = total_ns / np.maximum((counts * means).sum(axis=1), 1e-300)
    return counts, (means * level[:, None])[:, :, None] * shape


def _moved(edge: NDArray[np.int64], shift: NDArray[np.float64], start: NDArray[np.int64]) -> NDArray[np.int64]:
    bins = edge + np.rint(shift * PER_NEPER).astype(np.int64)[:, None]
    out: NDArray[np.int64] = start[:, None] + np.where(
        edge <= -BINS, 0, np.where(edge >= _FAR, BINS, bins.clip(0, BINS))
    )
    return out


def _padded(template: Template) -> tuple[NDArray[np.generic], ...]:
    cells = len(template.share)
    rest = MAX_CELLS - cells
    edge = np.pad(template.edge, (0, rest), constant_values=_FAR)
    fill = np.pad(
        np.stack([template.share, template.mean_ns, template.unit, template.unit]),
        ((0, 0), (0, rest)),
        constant_values=1.0,
    )
    fill[0, cells:] = 0
    shape = np.pad(template.shape, ((0, rest), (0, 0)), constant_values=1.0)
    logs = np.log(template.mean_ns) + np.log(template.shape).mean(axis=1)
    first = np.flatnonzero(np.diff(template.mode, prepend=255))
    share = np.add.reduceat(template.share, first)
    middle = np.add.reduceat(template.share * logs, first) / share
    modes = np.concatenate([template.edge[first], np.full(MAX_CELLS + 1 - len(first), _FAR)])
    missing = MAX_CELLS - len(first)
    return edge, fill, shape, modes, np.stack([np.pad(share, (0, missing)), np.pad(middle, (0, missing))])
