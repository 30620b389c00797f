"""Kernel durations compressed: bytes, fidelity, detection and speed, against what others store.

Synthetic: 8 ranks, 100,000 launches a rank and step of 60 kinds with 1 to 6 modes, of which a sixth are as noisy as
communication and an eighth route like mixtures of experts (the weights of their modes change every step); 1 % Pareto
tails, spikes of 40 times at 1e-4, drift. Real: the kernels of the reference data's traces, cut into windows in time,
with templates from the first half and tested on the second; their bytes are those by which
a store grows that holds another job already, since of a table of a few hundred rows a third is headers of columns, and
keys, names and templates are left out of all forms alike.

Ours goes through ``Compressor`` into a store, and is decoded from what the store gives back; bytes are those of the
store after OPTIMIZE FINAL, of all columns. References: the triples (count, p50, p99 of each cluster of a kernel density
estimate with Scott's bandwidth) of the ARGUS paper in float32 and in 16-bit logarithmic codes; logarithmic bins
(DDSketch); t-digest and KLL where the package datasketches is there, at their smallest; for speed scipy's
gaussian_kde on 256 points where scipy is there, by CPU time. W1 is relative to the mean and includes spikes. The ratio
is W1 of the float32 triples over ours.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.compress.bins import BINS, CENTER_LOG, PER_NEPER, bins_of
from argus.compress.decode import decode_escapes, decode_summaries
from argus.compress.fidelity import auc, power, quantile_error, recall, w1
from argus.compress.kernels import Compressor
from argus.compress.templates import valleys
from argus.errors import ArgusError
from argus.interop import kineto, nsys
from argus.records import GpuKind
from argus.store.open import Store, open_store
from argus.store.reader import query
from argus.store.schema import ensure_schema
from argus.store.writer import Writer
from benches import Result

KINDS = 60
RANKS = 8
EVENTS = 100_000
SPIKES = 1e-4
STEP_NS = 1_500_000_000
GRID = (np.arange(100) + 0.5) / 100
"""Quantiles that detection compares; the last two are left out: spikes rule them."""
BINS_WIDE = 0.075
"""Relative error of the logarithmic bins that take about as many bytes as ours."""
QUANTILES = (0.01, 0.5, 0.9, 0.99, 0.999)
REFERENCE = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Stream:
    """Launches of one job, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.seed = seed
        self.share = rng.dirichlet(np.full(KINDS, 3.0))
        self.noisy = rng.random(KINDS) < 1 / 6
        self.routed = ~self.noisy & (rng.random(KINDS) < 1 / 8)
        self.modes = np.where(self.noisy, 1, rng.integers(1, 7, KINDS))
        self.modes[self.routed] = np.maximum(self.modes[self.routed], 3)
        self.center = rng.normal(10.5, 1.0, KINDS)[:, None] + np.cumsum(rng.uniform(0.1, 0.6, (KINDS, 6)), axis=1)
        self.spread = rng.uniform(0.005, 0.03, (KINDS, 6))
        self.spread[self.noisy] = rng.uniform(0.15, 0.4, (int(self.noisy.sum()), 6))
        self.weight = rng.dirichlet(np.full(6, 2.0), KINDS) * (np.arange(6) < self.modes[:, None])
        self.drift = rng.normal(0, 3e-4, KINDS)

    def step(
        self,
        rank: int,
        step: int,
        *,
        slower: float = 1.0,
        split: float = 0.0,
        spikes: float = SPIKES,
        events: int = EVENTS,
    ) -> tuple[Ints, Ints, Ints]:
        """(kind, start_ns, duration_ns) of a rank and step, in order of time."""
        rng = np.random.default_rng((self.seed, rank, step))
        weight = self.weight.copy()
        weight[self.routed] *= rng.gamma(4.0, 0.25, (int(self.routed.sum()), 6))
        upto = np.cumsum(weight, axis=1)
        # A program launches each kernel as often in every step; how often experts are called depends on the data.
        often = np.rint(self.share * events)
        often[self.routed] *= rng.normal(1, 0.05, int(self.routed.sum()))
        kind = rng.permutation(np.repeat(np.arange(KINDS), np.maximum(often, 1).astype(np.int64)))
        events = len(kind)
        mode = (rng.random(events)[:, None] * upto[kind, -1:] > upto[kind]).sum(axis=1)
        log = self.center[kind, mode] + self.spread[kind, mode] * rng.standard_normal(events) + self.drift[kind] * step
        tail = rng.random(events) < 0.01
        log[tail] += np.minimum(rng.exponential(1 / 3.0, int(tail.sum())), 1.0)
        if split:
            # Two halves further apart, with the mean kept.
            half = np.where(rng.random(events) < 0.5, 1 + split, 1 - split)
            log += np.log(half)
        duration = np.exp(log) * slower
        duration[rng.random(events) < spikes] *= 40
        start = np.sort(rng.integers(0, STEP_NS, events)) + step * STEP_NS
        return kind, start, duration.astype(np.int64)


# ---- ours ----


@dataclass
class Stored:
    """What a store gives back of one job: rows of both tables, their templates, and spikes."""

    summaries: dict[str, Any]
    templates: dict[str, Any]
    escapes: dict[str, Any]
    spikes: dict[str, Any]

    def __post_init__(self) -> None:
        self.where: dict[tuple[int, int, int], tuple[int, int]] = {}
        for table, rows in enumerate((self.summaries, self.escapes)):
            keys = zip(*(rows[name].tolist() for name in ("kernel_id", "rank", "step", "steps")), strict=True)
            for place, (kernel, rank, first, covered) in enumerate(keys):
                for step in range(first, first + covered):
                    self.where[kernel, rank, step] = (table, place)
        self.decoded = (decode_summaries(self.summaries, self.templates), decode_escapes(self.escapes))
        self.points = tuple(decoded.points() for decoded in self.decoded)
        order = np.lexsort((self.spikes["step"], self.spikes["rank"], self.spikes["kernel_id"]))
        self.spike_rows = {name: column[order] for name, column in self.spikes.items()}
        self.spike_place: dict[tuple[int, int, int], list[int]] = {}
        keys = zip(*(self.spike_rows[name].tolist() for name in ("kernel_id", "rank", "step")), strict=True)
        for place, key in enumerate(keys):
            self.spike_place.setdefault(key, []).append(place)

    def of(self, kernel: int, rank: int, step: int) -> tuple[Floats, Floats]:
        """Durations and weights of one kernel, rank and step, spikes included."""
        table, place = self.where[kernel, rank, step]
        covered = (self.summaries, self.escapes)[table]["steps"][place]
        value, weight = self.points[table][0][place], self.points[table][1][place] / covered
        spikes = self.spike_rows["duration_ns"][self.spike_place.get((kernel, rank, step), [])]
        return np.concatenate([value, spikes]), np.concatenate([weight, np.ones(len(spikes))])


class Ours:
    """The compressor, a store, and what becomes of rows in it."""

    def __init__(self, store: Store, job: str, **options: Any) -> None:
        self.store, self.job = store, job
        self.compressor = Compressor(**options)
        self.writer = Writer(store, source="bench")

    def kinds(self) -> Ints:
        return np.array(
            [
                self.compressor.group(f"void kind_{kind}<float>(int)", 7, 0, (kind, 1, 1), (128, 1, 1))
                for kind in range(KINDS)
            ]
        )

    def write(self, *, final: bool = False) -> None:
        for table, columns in self.compressor.take(final=final).items():
            host = {} if table in ("kernel_groups", "kernel_templates") else {"host": "node-0"}
            self.writer.append(table, {"job": self.job, "run": 1, **host, **columns})
        if final and not self.writer.flush(timeout_s=60):
            raise ArgusError(f"the store takes no rows: {self.writer.last_error}")

    def read(self) -> Stored:
        tables = []
        for table in ("kernel_summaries", "kernel_templates", "kernel_escapes", "kernel_spikes"):
            sql = f"SELECT * EXCEPT (stored) FROM {table} WHERE job = {{job:String}}"
            if table == "kernel_spikes":
                sql = sql.replace(
                    "* EXCEPT (stored)", "rank, kernel_id, step, toUnixTimestamp64Micro(ts) AS ts, duration_ns"
                )
            found = query(self.store, sql, {"job": self.job})
            flat = {name: found.column(name).combine_chunks() for name in found.column_names}
            tables.append({
                name: column if pa.types.is_list(column.type) else column.to_numpy(zero_copy_only=False)
                for name, column in flat.items()
            })  # fmt: skip
        return Stored(*tables)


def _bytes(store: Store, tables: str = "kernel_%") -> dict[str, float]:
    with store.lease() as client:
        for name in ("kernel_groups", "kernel_templates", "kernel_summaries", "kernel_escapes", "kernel_spikes"):
            client.command(f"ALTER TABLE {name} MODIFY SETTING min_bytes_for_wide_part = 0")
            client.command(f"OPTIMIZE TABLE {name} FINAL")
        found = client.query(
            "SELECT table, sum(data_compressed_bytes) FROM system.parts"
            f" WHERE active AND table LIKE '{tables}' GROUP BY table"
        )
        return {table: float(size) for table, size in found.result_rows}


def _column_bytes(store: Store, table: str, without: set[str]) -> float:
    with store.lease() as client:
        # Parts of one file for all columns do not tell the columns' sizes.
        client.command(f"ALTER TABLE {table} MODIFY SETTING min_bytes_for_wide_part = 0")
        client.command(f"OPTIMIZE TABLE {table} FINAL SETTINGS optimize_skip_merged_partitions = 0")
        found = client.query(
            "SELECT column, sum(column_data_compressed_bytes) FROM system.parts_columns"
            f" WHERE active AND table = '{table}' GROUP BY column"
        )
        return sum(float(size) for name, size in found.result_rows if name not in without)


# ---- what others store ----


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


_NORMAL = np.array([statistics.NormalDist().inv_cdf((j + 0.5) / 64) for j in range(64)])


def decode_triples(rows: Floats) -> tuple[Floats, Floats]:
    """A log-normal distribution for each cluster, by its median and 99th percentile."""
    spread = np.log(np.maximum(rows[:, 2] / rows[:, 1], 1)) / 2.3263
    value = rows[:, 1:2] * np.exp(spread[:, None] * _NORMAL)
    return value.ravel(), np.repeat(rows[:, 0] / 64, 64)


def _coded(rows: Floats) -> Floats:
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


def log_bins(sample: Floats, width: float) -> tuple[Floats, Floats, int]:
    """DDSketch as logarithmic bins: points, weights, and bytes (numbers of bins and counts, zstd)."""
    bins, counts = np.unique(np.floor(np.log(np.maximum(sample, 1)) / width).astype(np.int64), return_counts=True)
    packed = np.diff(bins, prepend=0).astype(np.uint16).tobytes() + counts.astype(np.uint32).tobytes()
    return np.exp((bins + 0.5) * width), counts.astype(float), len(pa.Codec("zstd", 6).compress(packed, asbytes=True))


def _sketches() -> dict[str, Callable[[Floats], tuple[Floats, Floats, int]]]:
    """t-digest and KLL by the package datasketches, at their smallest sensible sizes."""
    try:
        import datasketches
    except ImportError:
        return {}

    def decode(sketch: Any) -> tuple[Floats, Floats, int]:
        blob = pa.Codec("zstd", 6).compress(sketch.serialize(), asbytes=True)
        value = np.array([sketch.get_quantile(q) for q in (np.arange(256) + 0.5) / 256])
        return value, np.ones(256), len(blob)

    def tdigest(sample: Floats) -> tuple[Floats, Floats, int]:
        sketch = datasketches.tdigest_double(10)
        sketch.update(sample)
        return decode(sketch)

    def kll(sample: Floats) -> tuple[Floats, Floats, int]:
        sketch = datasketches.kll_floats_sketch(8)
        sketch.update(sample.astype(np.float32))
        return decode(sketch)

    return {"t-digest k=10": tdigest, "KLL k=8": kll}


# ---- fidelity ----


def _grid(value: Floats, weight: Floats, q: Floats) -> Floats:
    order = np.argsort(value, kind="stable")
    upto = np.cumsum(weight[order])
    return value[order][np.minimum(np.searchsorted(upto, q * upto[-1]), len(value) - 1)]


class Table:
    """Lines of fidelity: name, bytes, W1 and errors of quantiles."""

    def __init__(self, title: str, unit: str) -> None:
        self.lines = [
            title,
            f"{'':<30} {unit:>11} {'W1 mean':>8} {'median':>8} "
            + " ".join(f"{f'p{100 * q:g}':>7}" for q in QUANTILES)
            + " %",
        ]

    def add(self, name: str, size: float, samples: list[Floats], found: list[tuple[Floats, Floats]]) -> float:
        distance = [w1(sample, *points) for sample, points in zip(samples, found, strict=True)]
        q = np.array(QUANTILES)
        errors = [quantile_error(sample, _grid(*points, q), q) for sample, points in zip(samples, found, strict=True)]
        means = " ".join(f"{100 * error:>7.2f}" for error in np.mean(errors, axis=0))
        mean = float(np.mean(distance))
        self.lines.append(
            f"{name:<30} {size:>11.4g} {100 * mean:>8.3f} {100 * float(np.median(distance)):>8.3f} {means}"
        )
        return mean


def _synthetic(folder: Path, steps: int, tested: int) -> tuple[dict[str, float], list[str]]:
    stream = Stream(11)
    more: dict[str, float] = {}
    with open_store(f"chdb://{folder}/synthetic") as store:
        ensure_schema(store)
        ours = Ours(store, "plain")
        ids = ours.kinds()
        kept: dict[tuple[int, int], tuple[Ints, Ints, Ints]] = {}
        for step in range(steps):
            for rank in range(RANKS):
                kind, start, duration = stream.step(rank, step)
                ours.compressor.feed(rank, step, step * STEP_NS, (step + 1) * STEP_NS, ids[kind], start, duration)
                if step >= steps - tested and rank < 4:
                    kept[rank, step] = (kind, start, duration)
            ours.write(final=step == steps - 1)
        sizes = _bytes(store)
        for table, size in sizes.items():
            more[f"bytes_{table}"] = size / (steps * RANKS)
        more["bytes_per_rank_step"] = sum(sizes.values()) / (steps * RANKS)
        stored = ours.read()
        more["escaped_share"] = len(stored.escapes["count"]) / (
            len(stored.escapes["count"]) + len(stored.summaries["count"])
        )
        more.update(_query_times(store, steps))

        identity = [kernel.identity for kernel in ours.compressor._kernels]
        keys, samples = [], []
        for (rank, step), (kind, _, duration) in kept.items():
            order = np.argsort(kind, kind="stable")
            edges = np.searchsorted(kind[order], np.arange(KINDS + 1))
            for k in range(KINDS):
                mine = order[edges[k] : edges[k + 1]]
                keys.append((identity[k], rank, step))
                samples.append(duration[mine].astype(float))
        table = Table(
            f"synthetic: {steps} steps of {RANKS} ranks, the newest {tested} of 4 ranks compared", "B/rank-step"
        )
        mine = table.add("ours", more["bytes_per_rank_step"], samples, [stored.of(*key) for key in keys])
        more["w1"] = mine
        reference = triples(samples)
        store_triples(store, "triples", keys, reference)
        for form, rows in (("f32", reference), ("u16", [_coded(row) for row in reference])):
            size = _column_bytes(store, f"triples_{form}", set()) / len(kept)
            more[f"triples_{form}_bytes_per_rank_step"] = size
            more[f"triples_{form}_w1"] = table.add(
                f"triples {form}", size, samples, [decode_triples(row) for row in rows]
            )
        some = list(range(0, len(samples), 4))
        few = [samples[k] for k in some]
        for width in (0.02, 2 * BINS_WIDE):
            sketched = [log_bins(sample, width) for sample in few]
            size = sum(row[2] for row in sketched) / len(few) * KINDS
            table.add(f"log bins {100 * width / 2:.3g} % (DDSketch)", size, few, [row[:2] for row in sketched])
        for name, sketch in _sketches().items():
            sketched = [sketch(sample) for sample in few]
            size = sum(row[2] for row in sketched) / len(few) * KINDS
            table.add(name, size, few, [row[:2] for row in sketched])
        planted, found = _planted(stream, stored, identity, kept)
        more["spike_recall"] = recall(planted, found)
    return more, table.lines


def _planted(
    stream: Stream, stored: Stored, identity: list[int], kept: dict[tuple[int, int], tuple[Ints, Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Times of spikes as planted (30 times its kind's highest mode and more), and as stored."""
    top = np.exp(np.where(stream.weight > 0, stream.center, -np.inf).max(axis=1))
    planted = [start[duration > 15 * top[kind]] // 1000 for kind, start, duration in kept.values()]
    return np.concatenate(planted), stored.spikes["ts"]


def _query_times(store: Store, steps: int) -> dict[str, float]:
    """Rows a second that the view decodes, and what three quantiles cost."""
    spent = {}
    for name, sql in (
        ("view_p99", "SELECT kernel, rank, avg(p99_ns) FROM kernel_stats WHERE job = 'plain' GROUP BY kernel, rank"),
        (
            "view_total",
            "SELECT kernel, rank, sum(total_ns) FROM kernel_stats WHERE job = 'plain' GROUP BY kernel, rank",
        ),
        ("view_all", "SELECT * FROM kernel_stats WHERE job = 'plain' FORMAT Null"),
    ):
        best = math.inf
        for _ in range(2):
            begin = time.perf_counter()
            with store.lease() as client:
                client.command(sql) if "FORMAT" in sql else client.query(sql)
            best = min(best, time.perf_counter() - begin)
        spent[f"{name}_rows_per_s"] = steps * RANKS * KINDS / best
    return spent


def _pooling(folder: Path, steps: int) -> dict[str, float]:
    """What it buys to put steps together: a calm job (no routing) and the stream above."""
    more = {}
    for calm in (True, False):
        stream = Stream(11)
        stream.routed[:] &= not calm
        for limit in (1, 4, 16):
            with tempfile.TemporaryDirectory(dir=folder) as inside, open_store(f"chdb://{inside}/store") as store:
                ensure_schema(store)
                ours = Ours(store, "pooled", steps_per_row=limit)
                ids = ours.kinds()
                for step in range(steps):
                    for rank in range(2):
                        kind, start, duration = stream.step(rank, step, events=EVENTS // 4)
                        ours.compressor.feed(
                            rank, step, step * STEP_NS, (step + 1) * STEP_NS, ids[kind], start, duration
                        )
                ours.write(final=True)
                size = sum(v for k, v in _bytes(store).items() if k != "kernel_templates")
                more[f"pooled_{'calm' if calm else 'routed'}_{limit}_bytes"] = size / (2 * steps)
    return more


# ---- detection ----


def _scores(vectors: Floats) -> Floats:
    """How far each rank is from the median of the others, (ranks, steps, kinds), by quantiles, (…, 98)."""
    out = np.empty(vectors.shape[:3])
    for rank in range(len(vectors)):
        usual = np.median(np.delete(vectors, rank, axis=0), axis=0)
        out[rank] = np.abs(vectors[rank] - usual).mean(axis=-1) / usual.mean(axis=-1)
    return out


def _detection(folder: Path, steps: int) -> tuple[dict[str, float], list[str]]:
    stream = Stream(5)
    cases: dict[str, dict[str, float]] = {
        "healthy": {}, "5 % slower": {"slower": 1.05}, "split, same mean": {"split": 0.04},
        "10 x spikes": {"spikes": 10 * SPIKES},
    }  # fmt: skip
    warm = 5
    sketches = {f"log bins {BINS_WIDE:.0%}": lambda part: log_bins(part, 2 * BINS_WIDE), **_sketches()}
    forms = ("exact", "triples f32", "ours", *sketches)
    vectors: dict[tuple[str, str], Floats] = {}
    spikes: dict[tuple[str, str], Floats] = {}
    with open_store(f"chdb://{folder}/detection") as store:
        ensure_schema(store)
        for number, (case, change) in enumerate(cases.items()):
            ours = Ours(store, f"case{number}")
            ids = ours.kinds()
            ranks = range(RANKS) if case == "healthy" else [RANKS - 1]
            found = {form: np.empty((len(ranks), steps, KINDS, 98)) for form in forms}
            count = {form: np.zeros((len(ranks), steps)) for form in forms}
            identity = [kernel.identity for kernel in ours.compressor._kernels]
            for step in range(warm + steps):
                for rank in range(RANKS):
                    sick = rank == RANKS - 1 and step >= warm and case != "healthy"
                    kind, start, duration = stream.step(rank, step, **(change if sick else {}))  # type: ignore[arg-type]
                    ours.compressor.feed(rank, step, step * STEP_NS, (step + 1) * STEP_NS, ids[kind], start, duration)
                    if step < warm or rank not in ranks:
                        continue
                    at = ranks.index(rank), step - warm
                    order = np.lexsort((duration, kind))
                    parts = np.split(duration[order].astype(float), np.searchsorted(kind[order], np.arange(1, KINDS)))
                    for k, (part, rows) in enumerate(zip(parts, triples(parts), strict=True)):
                        found["exact"][(*at, k)] = part[(GRID[:98] * len(part)).astype(int)]
                        found["triples f32"][(*at, k)] = _grid(*decode_triples(rows), GRID[:98])
                        count["exact"][at] += np.sum(part > 10 * np.median(part))
                        count["triples f32"][at] += sum(rows[rows[:, 1] > 10 * np.median(part)][:, 0])
                        for form, sketch in sketches.items():
                            value, weight, _ = sketch(part)
                            found[form][(*at, k)] = _grid(value, weight, GRID[:98])
                            long = weight[value > 10 * np.median(part)].sum() / weight.sum()
                            count[form][at] += long * len(part)
            ours.write(final=True)
            stored = ours.read()
            for r, rank in enumerate(ranks):
                for s in range(steps):
                    for k in range(KINDS):
                        table, place = stored.where[identity[k], rank, s + warm]
                        points = (stored.points[table][0][place], stored.points[table][1][place])
                        found["ours"][r, s, k] = _grid(*points, GRID[:98])
                    count["ours"][r, s] = np.sum((stored.spikes["rank"] == rank) & (stored.spikes["step"] == s + warm))
            for form in forms:
                vectors[form, case] = found[form]
                spikes[form, case] = count[form]
    more, lines = (
        {},
        [f"detection, one kernel kind of one rank in one step: AUC / found at 1 false alarm in 1,000 ({steps} steps)"],
    )
    lines.append(f"{'':<20}" + "".join(f"{form:>18}" for form in forms))
    for case in list(cases)[1:]:
        shown = []
        for form in forms:
            healthy = vectors[form, "healthy"]
            if case == "10 x spikes":
                low, high = spikes[form, "healthy"].ravel(), spikes[form, case].ravel()
            else:
                scores = _scores(healthy)
                usual = np.maximum(np.median(scores, axis=(0, 1)), 1e-6)  # coarse bins mostly do not differ at all
                low = (scores / usual).ravel()
                sick = np.concatenate([healthy[:-1], vectors[form, case]])
                high = (_scores(sick)[-1] / usual).ravel()
            key = f"{form.split()[0]}_{case.replace(' %', '').replace(',', '').replace(' ', '_')}"
            more[f"auc_{key}"], more[f"tpr_{key}"] = auc(low, high), power(low, high)
            shown.append(f"{more[f'auc_{key}']:.3f} / {more[f'tpr_{key}']:.2f}")
        lines.append(f"{case:<20}" + "".join(f"{text:>18}" for text in shown))
    return more, lines


# ---- real traces ----


def _real_groups(least: int) -> list[tuple[tuple[Any, ...], Ints, Ints]]:
    """(identity, start_ns, duration_ns) of each kernel of each recording with at least so many launches."""
    recordings = [
        kineto.read(path, place) for place, path in enumerate(sorted((REFERENCE / "kineto").glob("*.json.gz")))
    ]
    for path in sorted((REFERENCE / "nsys").glob("*.sqlite")):
        recordings += nsys.read(path, 0)
    out = []
    for place, recording in enumerate(recordings):
        ops = recording.ops[recording.ops["kind"] == GpuKind.KERNEL]
        ops = ops[np.argsort(ops["start_ns"], kind="stable")]
        keys = np.column_stack([ops["name"], ops["stream"], ops["device"], ops["grid"], ops["block"]])
        unique, inverse = np.unique(keys.astype(np.int64), axis=0, return_inverse=True)
        for number in np.flatnonzero(np.bincount(inverse) >= least).tolist():
            chosen = ops[inverse == number]
            name, stream, device, *shape = unique[number].tolist()
            identity = (f"{place}:{recording.symbols[name]}", stream, device, tuple(shape[:3]), tuple(shape[3:]))
            out.append(
                (
                    identity,
                    chosen["start_ns"].astype(np.int64),
                    (chosen["end_ns"] - chosen["start_ns"]).astype(np.int64),
                )
            )
    return out


EXTRA = {"low", "high", "trend", "spikes", "spike_sum", "spike_max", "reason"}
"""Columns of rows that say what triples do not."""
KEYS = {"job", "run", "rank", "host", "kernel_id", "kernel", "step", "steps", "template", "stored"}


def _row_bytes(store: Store) -> tuple[float, float]:
    """Bytes of rows and spikes without keys: of columns for what triples say too, and of all."""
    tables = ("kernel_summaries", "kernel_escapes")
    spikes = _column_bytes(store, "kernel_spikes", KEYS)
    return tuple(sum(_column_bytes(store, t, KEYS | more) for t in tables) + spikes for more in (EXTRA, set()))  # type: ignore[return-value]


def _filler(ours: Ours) -> tuple[list[tuple[int, int, int]], list[Floats]]:
    """Rows of another job: a table of a few hundred rows is a third headers of columns."""
    stream = Stream(7)
    ids = ours.kinds()
    keys, samples = [], []
    for step in range(40):
        for rank in range(2):
            kind, start, duration = stream.step(rank, step, events=6_000)
            ours.compressor.feed(rank, step, step * STEP_NS, (step + 1) * STEP_NS, ids[kind], start, duration)
            for k in np.unique(kind).tolist():
                keys.append((ours.compressor._kernels[ids[k]].identity, rank, step))
                samples.append(duration[kind == k].astype(float))
    ours.write(final=True)
    return keys, samples


def _real(folder: Path, least: int, windows: int) -> tuple[dict[str, float], list[str]]:
    groups = _real_groups(least)
    more: dict[str, float] = {}
    table = Table(f"real: {len(groups)} kernels of {least} launches and more, {windows} windows", "B/window")
    cuts = [np.array_split(np.arange(len(start)), windows) for _, start, _ in groups]
    many = len(groups) * windows
    late = [k * windows + window for k in range(len(groups)) for window in range(windows // 2, windows)]
    samples = [duration[mine].astype(float) for cut, (*_, duration) in zip(cuts, groups, strict=True) for mine in cut]
    tested = [samples[place] for place in late]
    others: tuple[list[tuple[int, int, int]], list[Floats]] = ([], [])
    identity: list[int] = []
    for together in (1, 16):
        with open_store(f"chdb://{folder}/real{least}_{together}") as store:
            ensure_schema(store)
            others = _filler(Ours(store, "filler"))
            before = _row_bytes(store)
            ours = Ours(store, "real", pool=windows // 2, steps_per_row=together)
            compressor = ours.compressor
            ids = [compressor.group(name, stream, 0, grid, block) for (name, stream, _, grid, block), *_ in groups]
            identity = [compressor._kernels[number].identity for number in ids]
            for window in range(windows):
                for k, (_, start, duration) in enumerate(groups):
                    mine = cuts[k][window]
                    bounds = int(start[mine[0]]), int(start[mine[-1]]) + 1
                    compressor.feed(k, window, *bounds, np.full(len(mine), ids[k]), start[mine], duration[mine])
            ours.write(final=True)
            stored = ours.read()
            same, every = ((now - was) / many for now, was in zip(_row_bytes(store), before, strict=True))
            key = f"real_{least}_upto{together}"
            more[f"{key}_bytes"], more[f"{key}_all_columns_bytes"] = same, every
            more[f"{key}_rows"] = (len(stored.summaries["count"]) + len(stored.escapes["count"])) / many
            found = [stored.of(identity[place // windows], place // windows, place % windows) for place in late]
            more[f"{key}_w1"] = table.add(f"ours, up to {together} a row", same, tested, found)
            table.lines[-1] += f"   {every:.4g} B with all columns"
    keys = [(identity[place // windows], place // windows, place % windows) for place in range(many)]
    reference = triples(samples)
    with open_store(f"chdb://{folder}/real{least}_triples") as store:
        sizes = []
        for name, (keys_of, rows) in (
            ("filler", (others[0], triples(others[1]))),
            ("both", (others[0] + keys, triples(others[1]) + reference)),
        ):
            store_triples(store, name, keys_of, rows)
            sizes.append(
                [_column_bytes(store, f"{name}_{form}", {"kernel", "rank", "step"}) for form in ("f32", "u16")]
            )
    for place, (form, rows) in enumerate((("f32", reference), ("u16", [_coded(row) for row in reference]))):
        size = (sizes[1][place] - sizes[0][place]) / many
        more[f"real_{least}_triples_{form}_bytes"] = size
        decoded = [decode_triples(rows[k]) for k in late]
        more[f"real_{least}_triples_{form}_w1"] = table.add(f"triples {form}", size, tested, decoded)
    return more, table.lines


# ---- speed ----


def _speed(events: int, repeat: int) -> float:
    """Events a second of CPU time, from decoded records to rows, once templates are there."""
    stream = Stream(3)
    compressor = Compressor()
    ids = np.array([compressor.group(f"kind_{kind}", 7, 0, (kind, 1, 1), (128, 1, 1)) for kind in range(KINDS)])
    batches = [
        (ids[kind], start, duration)
        for kind, start, duration in (stream.step(0, step, events=events) for step in range(4))
    ]
    for step in range(32):
        compressor.feed(0, step, 0, STEP_NS, *batches[step % 4])
    compressor.take()
    begin = time.process_time()
    for step in range(repeat):
        compressor.feed(0, 32 + step, 0, STEP_NS, *batches[step % 4])
        compressor.take()
    return repeat * events / (time.process_time() - begin)


def _scipy_speed(events: int) -> float:
    """Events a second of CPU time of scipy's density estimate of each kind on 256 points."""
    try:
        from scipy.stats import gaussian_kde
    except ImportError:
        return math.nan
    kind, _, duration = Stream(3).step(0, 0, events=events)
    log = np.log(duration)
    begin = time.process_time()
    some = range(0, KINDS, 6)
    used = 0
    for k in some:
        mine = log[kind == k]
        used += len(mine)
        gaussian_kde(mine)(np.linspace(mine.min(), mine.max(), 256))
    return used / (time.process_time() - begin)


def run(rounds: int) -> Result:
    quick = rounds <= 1
    rows: dict[str, list[float]] = {}
    for _ in range(min(rounds, 3)):
        for name, value in (
            ("ours, 100,000 launches a batch", _speed(100_000, 10)),
            ("scipy, 100,000", _scipy_speed(100_000)),
            ("ours, 1,000,000 launches a batch", _speed(1_000_000, 3)),
            ("scipy, 1,000,000", _scipy_speed(1_000_000)),
        ):
            rows.setdefault(name, []).append(value / 1e6)
    more: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="argus-bench-") as name:
        folder = Path(name)
        parts = [_synthetic(folder, 24 if quick else 200, 2 if quick else 5), _detection(folder, 4 if quick else 12)]
        if REFERENCE.is_dir():
            parts += [_real(folder, 100, 4), _real(folder, 200, 8)]
        if not quick:
            more.update(_pooling(folder, 60))
    for figures, lines in parts:
        more.update(figures)
        print("\n".join(lines), end="\n\n")
    for size, label in (("100,000", "100k"), ("1,000,000", "1M")):
        mine, other = rows[f"ours, {size} launches a batch"], rows[f"scipy, {size}"]
        more[f"speedup_over_scipy_{label}"] = statistics.median(mine) / statistics.median(other)
    return Result("kernel durations compressed", "M events/s/core", rows, more["triples_f32_w1"] / more["w1"], more)
