"""What a kernel usually looks like: its durations cut into cells, with the shape of each.

Durations of the first rank-steps are pooled. A kernel density estimate on logarithmic bins finds their modes; cells are
cut between modes, at the 99th and 99.9th percentile, and then where a cell is widest for its mass.

The bandwidth is fixed: rules such as Silverman's take the whole spread for one mode and smear several into one. On 189
kernels of real traces a fixed one had the held-out likelihood of the best rule there is (ISJ) at 1/500 of its cost.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from argus.compress.bins import BINS, CENTER_LOG, CENTER_NS, PER_NEPER

BANDWIDTH = 0.02
"""Of the density estimate, nepers."""
VALLEY = 0.7
"""Two modes are two if the density between them falls to this share of the lower one."""
MODE = (0.003, 2)
"""A mode has at least this share of the launches, and so many of them: single launches far out are a tail."""
TAILS = (0.99, 0.999)
"""Quantiles at which the upper tail is cut off."""
TAIL_SAMPLES = 5
"""Samples above a tail cut, at least: cells that stay empty cost accuracy elsewhere."""
CELLS = 6
"""Cells of a kernel, where its modes and tails do not need more."""
MAX_CELLS = 12
POINTS = 16
"""Points of a cell's shape: its quantiles at (j + 1/2) / 16."""
SHAPE_UNIT = 1 / 8192
"""Of a shape's codes: a point over the cell's mean."""
_MOST_CODE = 65535
SPIKE = 3.0
"""A spike is longer than this many times the 99.9th percentile."""
COUNT_UNIT = 0.35
"""Of the count codes, in roots of counts. A count's root has a deviation of 1/2 by chance alone (Poisson)."""
MEAN_UNIT = (0.005, 0.04)
"""Of the mean codes, nepers: of cells with 15 % of the launches and more, and of rare ones."""
ESCAPE = (0.01, 1.75)
"""A row is stored as a histogram if the error of its codes is above the first, and above the second times the 90th
percentile of the errors of the rank-steps that the template was made from."""


@dataclass(frozen=True)
class Template:
    """Of one kernel. All arrays have one entry a cell, in order of duration, shape (k,), unless noted."""

    edge: NDArray[np.int64]
    """The first bin of each cell, and one past the last, shape (k + 1,); the outer ones take in everything."""
    mode: NDArray[np.uint8]
    """Number of the mode it is part of, from 0."""
    share: NDArray[np.float64]
    """Part of the launches."""
    mean_ns: NDArray[np.float64]
    unit: NDArray[np.float64]
    """Of its mean codes, nepers."""
    shape: NDArray[np.float64]
    """Quantiles over the mean, shape (k, 16)."""
    spike_ns: float
    """A launch that took longer is a spike."""
    samples: int

    @property
    def heaviest(self) -> int:
        """The cell with most launches: its count is what the others leave."""
        return int(np.argmax(self.share))

    def number(self, kernel_id: int) -> int:
        """A hash of its content and kernel: equal templates have one number on all hosts."""
        parts = (self.edge, self.mode, self.share, self.mean_ns, self.unit, self.shape)
        text = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        digest = hashlib.blake2b(text + kernel_id.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def spike_limit(counts: NDArray[np.int64]) -> float:
    """What is longer is a spike, ns: three times the 99.9th percentile, of few samples that of all but three.

    Args:
        counts: Of the samples by bin, shape (4096,).
    """
    total = int(counts.sum())
    rare = min(0.5, max(1 - TAILS[1], 3 / max(total, 1)))
    place = int(np.searchsorted(np.cumsum(counts), (1 - rare) * total))
    return SPIKE * float(CENTER_NS[min(place, BINS - 1)])


def valleys(counts: NDArray[np.int64], bandwidth: float | NDArray[np.float64] = BANDWIDTH) -> list[NDArray[np.int64]]:
    """Where to cut between modes: of each row the bins that begin a mode, the first one left out.

    Args:
        counts: Histograms, shape (n, 4096).
        bandwidth: Nepers; one, or one a row of shape (n,).

    Source: Gaussian density estimate by FFT (Silverman 1982, AS 176), on all rows at once.
    """
    used = np.flatnonzero(counts.any(axis=0))
    if not len(used):
        return [np.empty(0, np.int64) for _ in counts]
    pad = 4 + int(np.ceil(4 * PER_NEPER * float(np.max(bandwidth))))
    low, high = int(used[0]) - pad, int(used[-1]) + pad + 1
    size = 1 << int(np.ceil(np.log2(high - low)))
    dense = np.zeros((len(counts), size))
    dense[:, pad : pad + used[-1] + 1 - used[0]] = counts[:, used[0] : used[-1] + 1]
    frequency = np.fft.rfftfreq(size) * 2 * np.pi * PER_NEPER
    width = np.broadcast_to(np.asarray(bandwidth, np.float64), (len(counts),))[:, None]
    density = np.fft.irfft(np.fft.rfft(dense) * np.exp(-0.5 * (frequency * width) ** 2), size)
    density[density < 1e-9 * density.max(axis=1, keepdims=True)] = 0
    return [_cuts(row) + low for row in density]


def _cuts(density: NDArray[np.float64]) -> NDArray[np.int64]:
    step = np.diff(density)
    moves = np.flatnonzero(step)
    rising = step[moves] > 0
    turn = np.flatnonzero(rising[:-1] != rising[1:])
    # Where nothing was seen between two modes, the cut is in the middle: either may move.
    places, peaks = (moves[turn] + 1 + moves[turn + 1]) // 2, rising[turn]
    # Peak, valley, peak, …: valleys that are too shallow go, with the lower of their peaks.
    peak, valley = places[peaks].tolist(), places[~peaks].tolist()
    kept_peaks, kept = peak[:1], []
    for bottom, top in zip(valley, peak[1:], strict=False):
        kept.append(bottom)
        kept_peaks.append(top)
        while kept and density[kept[-1]] > VALLEY * min(density[kept_peaks[-2]], density[kept_peaks[-1]]):
            if density[kept_peaks[-2]] >= density[kept_peaks[-1]]:
                kept_peaks.pop()
                kept.pop()
            else:
                # The lower peak is on the left: of the valleys on either side of it the deeper one stays.
                del kept_peaks[-2]
                if len(kept) > 1 and density[kept[-1]] < density[kept[-2]]:
                    del kept[-2]
                else:
                    kept.pop()
    return np.array(kept, np.int64)


def build(counts: NDArray[np.int64], scale: NDArray[np.float64], cells: int = CELLS) -> list[Template]:
    """Templates of kernels.

    Args:
        counts: Pooled durations without spikes, shape (n, 4096), at least one sample a row.
        scale: What the middle of a bin is multiplied with, so that sums are exact, shape (n,).
        cells: How many cells where modes and tails do not need more.
    """
    return [
        _build(row, cut, float(factor), cells) for row, cut, factor in zip(counts, valleys(counts), scale, strict=True)
    ]


def _build(counts: NDArray[np.int64], cuts: NDArray[np.int64], scale: float, cells: int) -> Template:
    total = int(counts.sum())
    below = np.concatenate([[0], np.cumsum(counts)])
    used = np.flatnonzero(counts)
    first, last = int(used[0]), int(used[-1]) + 1
    cuts = cuts[(below[cuts] > 0) & (below[cuts] < total)]
    mass = np.diff(below[np.concatenate([[first], cuts, [last]])])
    least = max(MODE[0] * total, MODE[1])
    while len(cuts) and (len(cuts) > MAX_CELLS - 3 or mass.min() < least):  # the smallest modes join a neighbour
        smallest = int(np.argmin(mass))
        cuts = np.delete(cuts, min(smallest, len(cuts) - 1))
        mass = np.diff(below[np.concatenate([[first], cuts, [last]])])
    edges = sorted({first, last, *cuts.tolist()})
    modes = list(edges[:-1])
    for tail in TAILS:
        place = int(np.searchsorted(below, tail * total))
        if edges[-2] < place < last and total - below[place] >= TAIL_SAMPLES:
            edges = sorted({*edges, place})
    while len(edges) - 1 < min(cells, MAX_CELLS):
        best, where = 0.0, -1
        for low, high in pairwise(edges):
            inside = counts[low:high]
            here = int(inside.sum())
            if here < 2 * TAIL_SAMPLES or np.count_nonzero(inside) < 4:
                continue
            center = CENTER_LOG[low:high]
            middle = float(inside @ center) / here
            score = np.sqrt(here) * np.sqrt(float(inside @ (center - middle) ** 2) / here)
            cut = low + int(np.searchsorted(center, middle))
            if score > best and low < cut < high:
                best, where = score, cut
        if where < 0:
            break
        edges = sorted({*edges, where})
    bounds = np.array(edges, np.int64)
    share = np.diff(below[bounds]) / total
    mean = np.empty(len(share))
    shape = np.empty((len(share), POINTS))
    for k, (low, high) in enumerate(pairwise(edges)):
        inside = counts[low:high]
        mean[k] = float(inside @ CENTER_NS[low:high]) / inside.sum()
        shape[k] = quantiles(below, (below[low] + (np.arange(POINTS) + 0.5) / POINTS * inside.sum())) / mean[k]
    shape = _codes(shape / shape.mean(axis=1, keepdims=True)) * SHAPE_UNIT
    mode = np.searchsorted(np.array(modes), bounds[:-1], side="right") - 1
    bounds[0], bounds[-1] = -BINS, 2 * BINS
    common, rare = MEAN_UNIT
    # The error of a rare cell's mean moves few launches: equal parts of the whole error cost fewest bits.
    unit = np.clip(common * 0.15 / share, common, rare)
    return Template(
        edge=bounds,
        mode=mode.astype(np.uint8),
        share=share.astype(np.float32).astype(np.float64),
        mean_ns=(mean * scale).astype(np.float32).astype(np.float64),
        unit=unit.astype(np.float32).astype(np.float64),
        shape=shape,
        spike_ns=spike_limit(counts) * scale,
        samples=total,
    )


def _codes(shape: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points over their cell's mean as codes of 16 bits, shape (cells, POINTS). What a point has beyond the largest
    code goes to the next ones, so that a cell's mean stays what it is."""
    codes = np.clip(np.rint(shape / SHAPE_UNIT), 1, _MOST_CODE)
    for number in np.flatnonzero(np.abs(codes.mean(axis=1) * SHAPE_UNIT - 1) > SHAPE_UNIT / 2).tolist():
        row = codes[number]
        left = POINTS / SHAPE_UNIT - row.sum()
        for point in np.argsort(-row):
            moved = np.clip(left, 1 - row[point], _MOST_CODE - row[point])
            row[point] += moved
            left -= moved
        row.sort()
    return codes


def quantiles(below: NDArray[np.int64], rank: NDArray[np.float64]) -> NDArray[np.float64]:
    """Durations at ranks (0 up to the number of samples), ns, as if samples filled their bins evenly.

    Args:
        below: Samples below each bin, shape (4097,).
        rank: Shape (m,).
    """
    place = np.clip(np.searchsorted(below, rank, side="right") - 1, 0, BINS - 1)
    inside = (rank - below[place]) / np.maximum(below[place + 1] - below[place], 1)
    out: NDArray[np.float64] = np.exp((place + np.clip(inside, 0, 1)) / PER_NEPER)
    return out
