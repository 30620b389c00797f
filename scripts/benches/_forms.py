"""What others store of the durations of a kernel, and how far it is from them, for scripts/bench compress."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import special

from argus.compress.bins import BINS, CENTER_LOG, PER_NEPER, bins_of
from argus.compress.fidelity import quantile_error, w1
from argus.compress.templates import valleys
from argus.store.open import Store

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Points: TypeAlias = tuple[Floats, Floats]
"""Durations, ns, and how many launches each stands for."""
Form: TypeAlias = "Callable[[list[Floats]], list[tuple[Floats, Floats, float]]]"
"""Of each sample of durations: what is stored of it decoded, as ``Points``, and its bytes."""

BINS_WIDE = 0.075
"""Relative error of the widest logarithmic bins that are shown."""
QUANTILES = (0.01, 0.5, 0.9, 0.99, 0.999)
FAR = 10
"""Launches that take so many times their kernel's median are outliers."""
NEAR = 0.1
"""An outlier is kept if the stored form has one of its duration, give or take this share."""


def _clusters(counts: Ints) -> list[Ints]:
    """Where the density estimate with Scott's bandwidth (1.06 σ n^-1/5, of logarithms) has its valleys."""
    n = counts.sum(axis=1)
    mean = counts @ CENTER_LOG / n
    spread = np.sqrt(np.maximum(counts @ CENTER_LOG**2 / n - mean**2, 1e-6))
    return valleys(counts, np.maximum(1.06 * spread * n**-0.2, 1 / PER_NEPER))


def triples(samples: list[Floats]) -> list[Floats]:
    """(count, p50, p99) of each cluster of each sample: shape (clusters, 3)."""
    counts = np.zeros((len(samples), BINS), np.int64)
    for row, sample in zip(counts, samples, strict=True):
        np.add.at(row, bins_of(sample.astype(np.int64)).astype(np.int64), 1)
    out = []
    for sample, cuts in zip(samples, _clusters(counts), strict=True):
        parts = np.split(np.sort(sample), np.searchsorted(np.sort(sample), np.exp(cuts / PER_NEPER)))
        out.append(np.array([(len(p), *np.quantile(p, (0.5, 0.99))) for p in parts if len(p)]))
    return out


_NORMAL = special.ndtri((np.arange(64) + 0.5) / 64)


def decode_triples(rows: Floats) -> tuple[Floats, Floats]:
    """A log-normal distribution for each cluster, by its median and 99th percentile."""
    spread = np.log(np.maximum(rows[:, 2] / rows[:, 1], 1)) / 2.3263
    value = rows[:, 1:2] * np.exp(spread[:, None] * _NORMAL)
    return value.ravel(), np.repeat(rows[:, 0] / 64, 64)


def coded(rows: Floats) -> Floats:
    """Triples after 16-bit codes of logarithms, 1/2048 neper."""
    return np.column_stack([rows[:, 0], np.exp(np.rint(np.log(np.maximum(rows[:, 1:], 1)) * 2048) / 2048)])


def store_triples(store: Store, name: str, keys: list[tuple[int, int, int]], rows: list[Floats]) -> None:
    """Stores triples as well as they can be: sorted, the best codecs found for each."""
    with store.lease() as client:
        for form, of, codec in (("f32", "Float32", "ZSTD(6)"), ("u16", "UInt16", "T64, ZSTD(6)")):
            client.command(
                f"CREATE TABLE {name}_{form} (kernel UInt64 CODEC(ZSTD(3)),"
                " rank UInt32 CODEC(Delta, ZSTD(3)), step UInt32"
                f" CODEC(Delta, ZSTD(3)), count Array(UInt32) CODEC(T64, ZSTD(6)), p50 Array({of}) CODEC({codec}),"
                f" p99 Array({of}) CODEC({codec})) ENGINE = MergeTree"
                " ORDER BY (kernel, rank, step) SETTINGS min_bytes_for_wide_part = 0"
            )
            code = (lambda x: np.rint(np.log(np.maximum(x, 1)) * 2048)) if form == "u16" else (lambda x: x)
            kind = pa.uint16() if form == "u16" else pa.float32()
            floats = pa.list_(pa.float64())
            table = pa.table({
                "kernel": pa.array([key[0] for key in keys], pa.uint64()),
                "rank": pa.array([key[1] for key in keys], pa.uint32()),
                "step": pa.array([key[2] for key in keys], pa.uint32()),
                "count": pa.array([row[:, 0].astype(np.uint32).tolist() for row in rows], pa.list_(pa.uint32())),
                "p50": pa.array([code(row[:, 1]).tolist() for row in rows], floats).cast(pa.list_(kind)),
                "p99": pa.array([code(row[:, 2]).tolist() for row in rows], floats).cast(pa.list_(kind)),
            })  # fmt: skip
            client.insert_arrow(f"{name}_{form}", table)


def _zstd(data: bytes) -> float:
    return float(len(pa.Codec("zstd", 6).compress(data, asbytes=True)))


def log_bins(width: float) -> Form:
    """DDSketch as logarithmic bins of so many nepers; of bytes: numbers of bins and counts, zstd."""

    def form(samples: list[Floats]) -> list[tuple[Floats, Floats, float]]:
        out = []
        for sample in samples:
            place, counts = np.unique(
                np.floor(np.log(np.maximum(sample, 1)) / width).astype(np.int64), return_counts=True
            )
            packed = np.diff(place, prepend=0).astype(np.uint16).tobytes() + counts.astype(np.uint32).tobytes()
            out.append((np.exp((place + 0.5) * width), counts.astype(float), _zstd(packed)))
        return out

    return form


def f32_triples(samples: list[Floats]) -> list[tuple[Floats, Floats, float]]:
    """Triples, 12 bytes each: less than what a table takes for them, since that has to know how many there are."""
    return [(*decode_triples(rows), 12.0 * len(rows)) for rows in triples(samples)]


def sketches() -> dict[str, Form]:
    """DDSketch, and t-digest and KLL by the package datasketches at their smallest sensible sizes."""
    found = {"DDSketch 1 %": log_bins(0.02), f"DDSketch {BINS_WIDE:.1%}": log_bins(2 * BINS_WIDE)}
    try:
        import datasketches
    except ImportError:
        return found
    at = (np.arange(128) + 0.5) / 128

    def tdigest(samples: list[Floats]) -> list[tuple[Floats, Floats, float]]:
        out = []
        for sample in samples:
            sketch = datasketches.tdigest_double(10)
            sketch.update(sample)
            value = np.array([sketch.get_quantile(q) for q in at])
            out.append((value, np.full(len(at), len(sample) / len(at)), _zstd(sketch.serialize())))
        return out

    def kll(samples: list[Floats]) -> list[tuple[Floats, Floats, float]]:
        out = []
        for sample in samples:
            sketch = datasketches.kll_floats_sketch(8)
            sketch.update(sample.astype(np.float32))
            value = np.array(sketch.get_quantiles(at), np.float64)
            out.append((value, np.full(len(at), len(sample) / len(at)), _zstd(sketch.serialize())))
        return out

    return {**found, "t-digest k=10": tdigest, "KLL k=8": kll}


# ---- fidelity


def grid(value: Floats, weight: Floats, q: Floats) -> Floats:
    """Quantiles of weighted points, shape (m,)."""
    order = np.argsort(value, kind="stable")
    upto = np.cumsum(weight[order])
    return value[order][np.minimum(np.searchsorted(upto, q * upto[-1]), len(value) - 1)]


def outliers(sample: Floats, value: Floats, weight: Floats) -> tuple[int, int]:
    """How many outliers a sample has, and of how many the points have the duration: the longest, the second longest
    and so on are each compared with what lies as far from the end."""
    longest = np.sort(sample[sample > FAR * np.median(sample)])[::-1]
    if not len(longest):
        return 0, 0
    scaled = weight * (len(sample) / weight.sum())
    decoded = grid(value, scaled, 1 - (np.arange(len(longest)) + 0.5) / len(sample))
    return len(longest), int(np.sum(np.abs(decoded / longest - 1) <= NEAR))


class Table:
    """Lines of fidelity: name, bytes, W1, errors of quantiles, outliers.

    Attributes:
        lines: What to print.
        figures: Of ours and of triples, by name.
    """

    def __init__(self, title: str, unit: str, key: str) -> None:
        self._key = key
        self.figures: dict[str, float] = {}
        self.lines = [
            title,
            f"{'':<34} {unit:>11} {'W1 mean':>8} {'median':>8} "
            + " ".join(f"{f'p{100 * q:g}':>7}" for q in QUANTILES)
            + f" % {'outliers':>9}",
        ]

    def add(self, name: str, size: float, samples: list[Floats], found: list[Points]) -> float:
        """Adds a form. ``found``: what it decodes for each sample. Returns the mean of W1 over the mean."""
        distance = [w1(sample, *points) for sample, points in zip(samples, found, strict=True)]
        q = np.array(QUANTILES)
        errors = np.mean(
            [quantile_error(sample, grid(*points, q), q) for sample, points in zip(samples, found, strict=True)], axis=0
        )
        there, close = np.sum(
            [outliers(sample, *points) for sample, points in zip(samples, found, strict=True)], axis=0
        )
        share = float(close / there) if there else math.nan
        mean, median = float(np.mean(distance)), float(np.median(distance))
        self.lines.append(
            f"{name:<34} {size:>11.4g} {100 * mean:>8.3f} {100 * median:>8.3f} "
            + " ".join(f"{100 * error:>7.2f}" for error in errors)
            + f" {share:>11.0%}" * bool(there)
        )
        values = {"bytes": size, "w1": mean, "outliers_told": share}
        if name.startswith(("ours", "triples")) and "together" not in name:
            short = f"{self._key}_{name.replace(',', '').replace(' ', '_')}"
            self.figures |= {f"{short}_{what}": value for what, value in values.items() if not math.isnan(value)}
        return mean
