"""Kernel durations compressed: bytes, fidelity, detection and speed, against what others store.

Four kinds of jobs (``_jobs.py``): synthetic, 8 ranks with 100,000 launches a rank and step of 60 kinds; the kernels of
the reference data's real traces, cut into windows in time, with templates from the first half and tested on the second
(left out, with a line, where they are not there); a job that ``argus simulate`` makes; and one on the fake GPU, traced
by ``argus trace`` there and then, where the rows that the trace has stored are compared with the kernels that it has
stored one by one (left out where nothing can be traced).

Of each: what is stored goes through a store, bytes are those on its disk after OPTIMIZE FINAL of all columns, and W1
over the mean, quantiles and outliers (longer than ten times their kernel's median; kept: to a tenth of their duration)
are of what is decoded from the store's answer. Then faults are planted on the launches of one rank, one kind of kernel
at a time: 5 % slower; 4 % shorter or longer at the same mean; spikes ten times as frequent. Scores are of one rank,
step and kind against the median of the other ranks; those of spikes count outliers of a rank.

References: the triples (count, p50, p99 of each cluster of a kernel density estimate with Scott's bandwidth) of the
ARGUS paper in float32 and in 16-bit logarithmic codes; logarithmic bins (DDSketch); t-digest and KLL where the package
datasketches is there, at their smallest. Of all of them the second time at equal bytes: one for so many steps together
that it takes no more bytes a step than ours; when a fault is looked for, only the newest of these steps has it. For
speed scipy's gaussian_kde on 256 points where scipy is there, by CPU time. The ratio is W1 of the float32 triples over
ours.

Bytes of real traces are those by which a store grows that holds another job already, since of a table of a few hundred
rows a third is headers of columns; keys, names and templates are left out of all forms alike. Faults are planted on
jobs whose launches are drawn at random from the real ones.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from argus.compress.decode import decode_escapes, decode_summaries
from argus.compress.fidelity import power, recall
from argus.compress.kernels import Compressor
from argus.model.errors import ArgusError
from argus.model.statistics import share_in_order
from argus.store.open import Store, open_store
from argus.store.reader import query
from argus.store.schema import ensure_schema
from argus.store.schema_files import table_columns
from argus.store.writer import Writer
from benches import Result
from benches._forms import (
    FAR,
    Floats,
    Form,
    Ints,
    Points,
    Table,
    coded,
    decode_triples,
    f32_triples,
    grid,
    sketches,
    store_triples,
    triples,
)
from benches._jobs import (
    CASES,
    EVENTS,
    KINDS,
    REFERENCE,
    SPIKE,
    STEP_NS,
    Drawn,
    Job,
    Kernel,
    Launches,
    Stream,
    by_kind,
    planted,
    real_groups,
    record_fake_gpu,
    recorded,
    simulated,
)

GRID = ((np.arange(100) + 0.5) / 100)[:98]
"""Quantiles that detection compares; the last two are left out: spikes rule them."""
TABLES = ("kernel_groups", "kernel_templates", "kernel_summaries", "kernel_escapes", "kernel_spikes")
STEPS = 100
"""Of the synthetic job."""
SKETCHED = 240
"""Samples at most of which sketches are made."""


def _progress(text: str) -> None:
    print(f"bench: {text} …", file=sys.stderr, flush=True)


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

    def calm(self, kernel: int, rank: int, step: int) -> Points:
        """Durations and weights of one kernel, rank and step, without spikes."""
        table, place = self.where[kernel, rank, step]
        return self.points[table][0][place], self.points[table][1][place]

    def of(self, kernel: int, rank: int, step: int) -> Points:
        """Durations and weights of one kernel, rank and step, spikes included."""
        table, place = self.where[kernel, rank, step]
        value, weight = self.calm(kernel, rank, step)
        weight = weight / (self.summaries, self.escapes)[table]["steps"][place]
        spikes = self.spike_rows["duration_ns"][self.spike_place.get((kernel, rank, step), [])]
        return np.concatenate([value, spikes]), np.concatenate([weight, np.ones(len(spikes))])


def _read(store: Store) -> Stored:
    """What a store has of its only job."""
    tables = []
    for table in TABLES[1:]:
        sql = f"SELECT * EXCEPT (stored) FROM {table}"
        if table == "kernel_templates":
            sql = "SELECT * FROM kernel_templates FINAL"
        if table == "kernel_spikes":
            sql = "SELECT rank, kernel_id, step, toUnixTimestamp64Micro(ts) AS ts, duration_ns FROM kernel_spikes"
        found = query(store, sql)
        flat = {name: found.column(name).combine_chunks() for name in found.column_names}
        tables.append({
            name: column if pa.types.is_list(column.type) else column.to_numpy(zero_copy_only=False)
            for name, column in flat.items()
        })  # fmt: skip
    templates, summaries, escapes, spikes = tables
    return Stored(summaries, templates, escapes, spikes)


class Ours:
    """The compressor, a store, and what becomes of rows in it."""

    def __init__(self, store: Store, kernels: Sequence[Kernel], **options: Any) -> None:
        self.store = store
        self.compressor = Compressor(**options)
        self.writer = Writer(store, source="bench")
        self.numbers = np.array([self.compressor.group(*kernel[:2], 0, *kernel[2:]) for kernel in kernels])
        self.ids = [self.compressor._kernels[number].identity for number in self.numbers]

    def feed(self, rank: int, step: int, launches: Launches) -> None:
        kind, start, duration = launches
        self.compressor.feed(rank, step, int(start[0]), int(start[-1]) + 1, self.numbers[kind], start, duration)

    def write(self, *, final: bool = False, job: str = "job") -> None:
        for table, columns in self.compressor.take(final=final).items():
            host = {} if table in ("kernel_groups", "kernel_templates") else {"host": "node-0"}
            self.writer.append(table, {"job": job, "run": 1, **host, **columns})
        if final and not self.writer.flush(timeout_s=60):
            raise ArgusError(f"the store takes no rows: {self.writer.last_error}")


def _emptied(store: Store) -> Store:
    with store.lease() as client:
        for table in TABLES:
            client.command(f"TRUNCATE TABLE {table}")
    return store


def _bytes(store: Store) -> dict[str, float]:
    with store.lease() as client:
        for name in TABLES:
            client.command(f"ALTER TABLE {name} MODIFY SETTING min_bytes_for_wide_part = 0")
            client.command(f"OPTIMIZE TABLE {name} FINAL")
        found = client.query(
            "SELECT table, sum(data_compressed_bytes) FROM system.parts"
            f" WHERE active AND table IN {TABLES} GROUP BY table ORDER BY table"
        )
        return {table: float(size) for table, size in found.result_rows}


def _column_bytes(store: Store, table: str, without: set[str]) -> float:
    with store.lease() as client:
        # Parts of one file for all columns do not have the columns' sizes.
        client.command(f"ALTER TABLE {table} MODIFY SETTING min_bytes_for_wide_part = 0")
        client.command(f"OPTIMIZE TABLE {table} FINAL SETTINGS optimize_skip_merged_partitions = 0")
        found = client.query(
            "SELECT column, sum(column_data_compressed_bytes) FROM system.parts_columns"
            f" WHERE active AND table = '{table}' GROUP BY column"
        )
        return sum(float(size) for name, size in found.result_rows if name not in without)


# ---- fidelity ----


@dataclass
class Pooled:
    """How many steps a form has to put together to take no more bytes than ours."""

    form: Form
    steps: int


class History:
    """Durations of each kernel by rank and step, and of several steps together."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._known: dict[tuple[int, int], list[Floats]] = {}

    def take(self, rank: int, step: int, launches: Launches) -> None:
        self._known[rank, step] = by_kind(launches, len(self.job.kernels))

    def of(self, rank: int, step: int) -> list[Floats]:
        if (rank, step) not in self._known:
            self.take(rank, step, self.job.step(rank, step))
        return self._known[rank, step]

    def together(self, kind: int, rank: int, step: int, steps: int) -> Floats:
        """Those of so many steps up to this one, or from the first one on."""
        first = max(0, step - steps + 1)
        return np.concatenate([self.of(rank, s)[kind] for s in range(first, first + steps)])


def _compared(
    store: Store,
    job: Job,
    title: str,
    key: str,
    stored: Stored,
    ids: list[int],
    first: int,
    tested: list[tuple[int, int]],
) -> tuple[Table, dict[str, Pooled]]:
    """What is stored of a job, and what others would, against its launches.

    Args:
        store: Takes the triples.
        job: The job, of which ``stored`` is what is stored.
        title: Of the table.
        key: Of the figures.
        stored: As a store gives it back.
        ids: ``kernel_id`` of the job's kernels.
        first: Number of the job's first step in the store.
        tested: Ranks and steps that are compared.

    Returns:
        The table, and what of other forms takes no more bytes.
    """
    history = History(job)
    keys = [(kind, *at) for at in tested for kind, sample in enumerate(history.of(*at)) if len(sample)]
    samples = [history.of(rank, step)[kind] for kind, rank, step in keys]
    groups = len(keys) / len(tested)
    table = Table(title, "B/rank-step", key)
    own_bytes = sum(_bytes(store).values()) / (job.ranks * job.steps)
    table.add("ours", own_bytes, samples, [stored.of(ids[kind], rank, first + step) for kind, rank, step in keys])
    reference = triples(samples)
    store_triples(store, key, [(ids[kind], rank, step) for kind, rank, step in keys], reference)
    sizes = {}
    for form, rows in (("f32", reference), ("u16", [coded(row) for row in reference])):
        sizes[form] = _column_bytes(store, f"{key}_{form}", set()) / len(tested)
        table.add(f"triples {form}", sizes[form], samples, [decode_triples(row) for row in rows])
    some = np.linspace(0, len(keys) - 1, min(SKETCHED, len(keys))).astype(int).tolist()
    few = [samples[k] for k in some]
    forms: dict[str, tuple[Form, float]] = {"triples": (f32_triples, min(sizes.values()))}
    for name, form in sketches().items():
        found = form(few)
        size = sum(row[2] for row in found) / len(few) * groups
        table.add(name, size, few, [row[:2] for row in found])
        forms[name] = form, size
    pooled = {}
    for name, (form, size) in forms.items():
        steps = max(1, math.ceil(size / own_bytes))
        while steps <= job.steps:
            found = form([history.together(*keys[k], steps) for k in some])
            each = sum(row[2] for row in found) / len(few) * groups / steps
            if name == "triples":  # their table's columns are smaller than their arrays
                each = size / steps
            if each <= own_bytes:
                if steps > 1:
                    table.add(f"{name}, {steps} steps together", each, few, [row[:2] for row in found])
                if steps > 1 or name != "triples":  # those are looked at step by step in any case
                    pooled[name] = Pooled(form, steps)
                break
            steps = max(steps + 1, math.ceil(steps * each / own_bytes))
        else:
            table.lines.append(f"{name}: never as small as ours in {job.steps} steps")
    return table, pooled


def _stored_job(store: Store, job: Job) -> tuple[Stored, list[int]]:
    """Sums up all steps of a job, stores that, and reads it."""
    ours = Ours(_emptied(store), job.kernels)
    for step in range(job.steps):
        for rank in range(job.ranks):
            ours.feed(rank, step, job.step(rank, step))
        ours.write(final=step == job.steps - 1)
    return _read(store), ours.ids


def _synthetic(store: Store, steps: int, tested: int) -> tuple[Table, dict[str, Pooled]]:
    stream = Stream(11, steps=steps)
    stored, ids = _stored_job(store, stream)
    kept = [(rank, step) for rank in range(0, stream.ranks, 2) for step in range(steps - tested, steps)]
    title = f"synthetic: {steps} steps of {stream.ranks} ranks, {len(kept)} of them compared"
    table, pooled = _compared(store, stream, title, "synthetic", stored, ids, 0, kept)
    more = table.figures
    more["w1"], more["bytes_per_rank_step"] = more["synthetic_ours_w1"], more["synthetic_ours_bytes"]
    more["triples_f32_w1"] = more["synthetic_triples_f32_w1"]
    for name, size in _bytes(store).items():
        more[f"bytes_{name}"] = size / (steps * stream.ranks)
    rows = len(stored.summaries["count"]), len(stored.escapes["count"])
    more["escaped_share"] = rows[1] / sum(rows)
    more.update(_query_times(store, sum(rows)))
    # As planted: 40 times one of its kind's modes.
    top = np.exp(np.where(stream.weight > 0, stream.center, -np.inf).max(axis=1))
    launches = [stream.step(*at) for at in kept]
    spikes = np.concatenate([start[took > 3 / 8 * SPIKE * top[kind]] for kind, start, took in launches])
    more["spike_recall"] = recall(spikes // 1000, stored.spikes["ts"])
    return table, pooled


def _query_times(store: Store, rows: int) -> dict[str, float]:
    """Rows a second that the view decodes, and what three quantiles cost."""
    spent = {}
    for name, sql in (
        ("view_p99", "SELECT kernel, rank, avg(p99_ns) FROM kernel_stats GROUP BY kernel, rank"),
        (
            "view_total",
            "SELECT kernel, rank, sum(total_ns) FROM kernel_stats GROUP BY kernel, rank",
        ),
        ("view_all", "SELECT * FROM kernel_stats FORMAT Null"),
    ):
        best = math.inf
        for _ in range(2):
            begin = time.perf_counter()
            with store.lease() as client:
                client.command(sql) if "FORMAT" in sql else client.query(sql)
            best = min(best, time.perf_counter() - begin)
        spent[f"{name}_rows_per_s"] = rows / best
    return spent


def _pooling(store: Store, steps: int) -> dict[str, float]:
    """What it buys to put steps together: a calm job (no routing) and the stream above."""
    more = {}
    for calm in (True, False):
        stream = Stream(11, ranks=2, steps=steps, events=EVENTS // 4)
        stream.routed[:] &= not calm
        for limit in (1, 4, 16):
            ours = Ours(_emptied(store), stream.kernels, steps_per_row=limit)
            for step in range(steps):
                for rank in range(stream.ranks):
                    ours.feed(rank, step, stream.step(rank, step))
            ours.write(final=True)
            size = sum(v for k, v in _bytes(store).items() if k != "kernel_templates")
            more[f"pooled_{'calm' if calm else 'routed'}_{limit}_bytes"] = size / (stream.ranks * steps)
    return more


# ---- detection ----


def _scores(vectors: Floats) -> Floats:
    """How far each rank is from the median of the others, (ranks, steps, kinds), by quantiles, (…, 98)."""
    out = np.empty(vectors.shape[:3])
    for rank in range(len(vectors)):
        usual = np.median(np.delete(vectors, rank, axis=0), axis=0)
        out[rank] = np.abs(vectors[rank] - usual).mean(axis=-1) / usual.mean(axis=-1)
    return out


def _far(value: Floats, weight: Floats, launches: int) -> float:
    """Outliers among so many launches, as the points have them."""
    median = grid(value, weight, np.array([0.5]))[0]
    return float(weight[value > FAR * median].sum() / weight.sum() * launches)


def _of_take(*taken: dict[str, dict[str, Any]]) -> Stored:
    """What ``Compressor.take`` gave, one time after the other, as a store would give it back."""
    tables = []
    for table in ("kernel_summaries", "kernel_templates", "kernel_escapes", "kernel_spikes"):
        parts = [one[table] for one in taken if table in one] or [_empty(table)]
        tables.append({name: _joined([part[name] for part in parts]) for name in parts[0]})
    return Stored(*tables)


def _empty(table: str) -> dict[str, Any]:
    lists = pa.array([], pa.list_(pa.int64()))
    return {
        name: lists if column.type.startswith("Array") else np.empty(0, np.int64)
        for name, column in table_columns()[table].items()
    }


def _joined(parts: list[Any]) -> Any:
    arrow = isinstance(parts[0], (pa.Array, pa.ChunkedArray))
    return pa.chunked_array(parts).combine_chunks() if arrow else np.concatenate(parts)


def _detection(
    job: Job, title: str, key: str, pooled: dict[str, Pooled], steps: int, window: int
) -> tuple[dict[str, float], list[str]]:
    """How well each form reveals faults of ``CASES`` on the last rank.

    Args:
        job: Without faults.
        title: What it is.
        key: Of the figures.
        pooled: Forms at equal bytes; triples are shown a step each as well.
        steps: How many are looked at, each by itself; those before them are healthy.
        window: Steps over which outliers are counted.
    """
    warm = min(max([5, *(one.steps for one in pooled.values())]), job.steps - steps)
    kinds, sick = len(job.kernels), job.ranks - 1
    history, compressor = History(job), Compressor()
    numbers = np.array([compressor.group(*kernel[:2], 0, *kernel[2:]) for kernel in job.kernels])
    ids = [compressor._kernels[number].identity for number in numbers]

    def feed(into: Compressor, rank: int, step: int, launches: Launches) -> None:
        kind, start, duration = launches
        into.feed(rank, step, int(start[0]), int(start[-1]) + 1, numbers[kind], start, duration)

    for step in range(warm):
        for rank in range(job.ranks):
            launches = job.step(rank, step)
            feed(compressor, rank, step, launches)
            history.take(rank, step, launches)
    before = compressor.take()
    newest = {(rank, step): job.step(rank, step) for step in range(warm, warm + steps) for rank in range(job.ranks)}
    of_forms: dict[str, Pooled] = {"triples": Pooled(f32_triples, 1)}
    of_forms |= {f"{name}, {one.steps}": one for name, one in pooled.items()}
    forms = ("exact", "ours", *of_forms)
    vectors: dict[tuple[str, str], Floats] = {}
    counts: dict[tuple[str, str], Floats] = {}
    for case in ("healthy", *CASES):
        ranks = [sick] if case in CASES else list(range(job.ranks))
        copied = copy.deepcopy(compressor)
        now = dict(newest)
        for step in range(warm, warm + steps):
            for rank in range(job.ranks):
                if case in CASES and rank == sick:
                    now[rank, step] = planted(case, now[rank, step], (rank, step))
                feed(copied, rank, step, now[rank, step])
        stored = _of_take(before, copied.take(final=True))
        found = {form: np.full((len(ranks), steps, kinds, len(GRID)), np.nan) for form in forms}
        far = {form: np.zeros((len(ranks), steps)) for form in forms}
        for r, rank in enumerate(ranks):
            for s in range(steps):
                parts = by_kind(now[rank, warm + s], kinds)
                there = [kind for kind, part in enumerate(parts) if len(part)]
                points: dict[str, list[Points]] = {"exact": [(parts[k], np.ones(len(parts[k]))) for k in there]}
                points["ours"] = [stored.of(ids[k], rank, warm + s) for k in there]
                for name, one in of_forms.items():
                    first = warm + s - one.steps + 1
                    samples = [
                        np.concatenate([*(history.of(rank, past)[k] for past in range(first, warm + s)), parts[k]])
                        for k in there
                    ]
                    points[name] = [row[:2] for row in one.form(samples)]
                for form, rows in points.items():
                    for k, row in zip(there, rows, strict=True):
                        # Ours keeps spikes apart, so that they do not rule what is compared.
                        shown = stored.calm(ids[k], rank, warm + s) if form == "ours" else row
                        if shown[1].sum() > 0:
                            found[form][r, s, k] = grid(*shown, GRID)
                        far[form][r, s] += _far(*row, len(parts[k]))
        for form in forms:
            vectors[form, case], counts[form, case] = found[form], far[form]
        if case == "healthy":
            for (rank, step), launches in newest.items():
                history.take(rank, step, launches)
    return _judged(title, key, forms, vectors, counts, window)


def _judged(
    title: str,
    key: str,
    forms: Sequence[str],
    vectors: dict[tuple[str, str], Floats],
    counts: dict[tuple[str, str], Floats],
    window: int,
) -> tuple[dict[str, float], list[str]]:
    """AUC and power of each form and case; the table's lines."""
    more: dict[str, float] = {}
    lines = [f"{title}: AUC / found at 1 false alarm in 1,000; of others, so many steps together as take no more bytes"]
    lines.append(f"{'':<20}" + "".join(f"{form:>20}" for form in forms))
    for case in CASES:
        shown = []
        for form in forms:
            healthy, faulty = vectors[form, "healthy"], vectors[form, case]
            if case == "10 x spikes":
                low, high = (
                    each[:, : each.shape[1] // window * window].reshape(len(each), -1, window).sum(axis=-1).ravel()
                    for each in (counts[form, "healthy"], counts[form, case])
                )
            else:
                whole = ~np.isnan(np.concatenate([healthy, faulty])).any(axis=(0, 1, 3))
                scores = _scores(healthy[:, :, whole])
                usual = np.maximum(np.median(scores, axis=(0, 1)), 1e-6)  # coarse bins mostly do not differ at all
                low = (scores / usual).ravel()
                high = (_scores(np.concatenate([healthy[:-1], faulty])[:, :, whole])[-1] / usual).ravel()
            judged = share_in_order(low, high, ties=0.5), power(low, high)
            shown.append(f"{judged[0]:.3f} / {judged[1]:.2f}")
            if form in ("exact", "ours", "triples"):
                name = f"{key}_{form}_{case.split(',')[0]}".replace(" %", "").replace(" ", "_")
                more[f"{name}_auc"], more[f"{name}_found"] = judged
        lines.append(f"{case:<20}" + "".join(f"{text:>20}" for text in shown))
    return more, lines


# ---- real traces ----


EXTRA = {"low", "high", "trend", "spikes", "spike_sum", "spike_max", "reason"}
"""Columns of rows with information that triples lack."""
KEYS = {"job", "run", "rank", "host", "kernel_id", "kernel", "step", "steps", "template", "stored"}


def _row_bytes(store: Store) -> tuple[float, float]:
    """Bytes of rows and spikes without keys: of columns that triples have too, and of all."""
    tables = ("kernel_summaries", "kernel_escapes")
    spikes = _column_bytes(store, "kernel_spikes", KEYS)
    return tuple(sum(_column_bytes(store, t, KEYS | more) for t in tables) + spikes for more in (EXTRA, set()))  # type: ignore[return-value]


def _filler(store: Store) -> tuple[list[tuple[int, int, int]], list[Floats]]:
    """Rows of another job: a table of a few hundred rows is a third headers of columns."""
    stream = Stream(7, ranks=2, steps=40, events=6_000)
    ours = Ours(store, stream.kernels)
    keys, samples = [], []
    for step in range(stream.steps):
        for rank in range(stream.ranks):
            launches = stream.step(rank, step)
            ours.feed(rank, step, launches)
            for k, sample in enumerate(by_kind(launches, KINDS)):
                keys.append((ours.ids[k], rank, step))
                samples.append(sample)
    ours.write(final=True, job="filler")
    return keys, samples


def _real(store: Store, groups: list[tuple[Kernel, Ints, Ints]], least: int, windows: int) -> Table:
    groups = [group for group in groups if len(group[1]) >= least]
    key = f"real_{least}"
    table = Table(f"real: {len(groups)} kernels of {least} launches and more, {windows} windows", "B/window", key)
    cuts = [np.array_split(np.arange(len(start)), windows) for _, start, _ in groups]
    many = len(groups) * windows
    late = [k * windows + window for k in range(len(groups)) for window in range(windows // 2, windows)]
    samples = [
        duration[window_places].astype(float)
        for cut, (*_, duration) in zip(cuts, groups, strict=True)
        for window_places in cut
    ]
    tested = [samples[place] for place in late]
    others: tuple[list[tuple[int, int, int]], list[Floats]] = ([], [])
    ids: list[int] = []
    for together in (1, 16):
        others = _filler(_emptied(store))
        before = _row_bytes(store)
        ours = Ours(store, [kernel for kernel, *_ in groups], pool=windows // 2, steps_per_row=together)
        ids = ours.ids
        for window in range(windows):
            for k, (_, start, duration) in enumerate(groups):
                window_places = cuts[k][window]
                ours.feed(k, window, (np.full(len(window_places), k), start[window_places], duration[window_places]))
        ours.write(final=True)
        stored = _read(store)
        same, every = ((now - was) / many for now, was in zip(_row_bytes(store), before, strict=True))
        found = [stored.of(ids[place // windows], place // windows, place % windows) for place in late]
        name = f"ours, up to {together} a row"
        table.add(name, same, tested, found)
        table.lines[-1] += f"   {every:.4g} B with all columns"
        table.figures[f"{key}_upto{together}_all_columns_bytes"] = every
    keys = [(ids[place // windows], place // windows, place % windows) for place in range(many)]
    reference = triples(samples)
    sizes = []
    for name, (keys_of, rows) in (
        ("filler", (others[0], triples(others[1]))),
        ("both", (others[0] + keys, triples(others[1]) + reference)),
    ):
        store_triples(store, f"{key}_{name}", keys_of, rows)
        sizes.append(
            [_column_bytes(store, f"{key}_{name}_{form}", {"kernel", "rank", "step"}) for form in ("f32", "u16")]
        )
    for place, (form, rows) in enumerate((("f32", reference), ("u16", [coded(row) for row in reference]))):
        size = (sizes[1][place] - sizes[0][place]) / many
        table.add(f"triples {form}", size, tested, [decode_triples(rows[k]) for k in late])
    for name, sketch in sketches().items():
        rows_of = sketch(tested)
        table.add(name, sum(row[2] for row in rows_of) / len(tested), tested, [row[:2] for row in rows_of])
    return table


# ---- the fake GPU, and what is simulated ----


def _recorded(folder: Path, compare: int) -> tuple[Job, Table, dict[str, Pooled]]:
    with open_store(f"chdb://{folder}/recorded") as store:
        record_fake_gpu(store)
        job, ids, first = recorded(store)
        stored = _read(store)
        step = list(range(max(0, job.steps - compare), job.steps))
        tested = [(rank, s) for rank in range(job.ranks) for s in step]
        launches = sum(len(job.step(*at)[0]) for at in tested) / len(tested)
        title = f"fake GPU, traced: {job.steps} steps of {job.ranks} ranks, {launches:.0f} kernels each"
        table, pooled = _compared(store, job, title, "recorded", stored, ids, first, tested)
        with store.lease() as client:
            raw = client.command(
                "SELECT sum(data_compressed_bytes) FROM system.parts WHERE active AND table = 'kernel_events'"
            )
        table.figures["recorded_raw_bytes_per_rank_step"] = float(str(raw)) / (job.ranks * job.steps)
        summed = [stored.of(ids[kind], rank, first + s)[1].sum() for rank, s in tested for kind in _kinds(job, rank, s)]
        there = [len(sample) for at in tested for sample in by_kind(job.step(*at), len(ids)) if len(sample)]
        off = np.abs(np.array(summed) - np.array(there)).sum() / sum(there)
        table.figures["recorded_launches_miscounted_share"] = float(off)
        return job, table, pooled


def _kinds(job: Job, rank: int, step: int) -> list[int]:
    return [kind for kind, sample in enumerate(by_kind(job.step(rank, step), len(job.kernels))) if len(sample)]


# ---- speed ----


def _speed(events: int, repeat: int) -> float:
    """Events a second of CPU time, from decoded records to rows, once templates are there."""
    stream = Stream(3, events=events)
    compressor = Compressor()
    ids = np.array([compressor.group(*kernel[:2], 0, *kernel[2:]) for kernel in stream.kernels])
    batches = [(ids[kind], start, duration) for kind, start, duration in (stream.step(0, step) for step in range(4))]
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
    kind, _, duration = Stream(3, events=events).step(0, 0)
    log = np.log(duration)
    begin = time.process_time()
    some = range(0, KINDS, 6)
    used = 0
    for k in some:
        of_kind = log[kind == k]
        used += len(of_kind)
        gaussian_kde(of_kind)(np.linspace(of_kind.min(), of_kind.max(), 256))
    return used / (time.process_time() - begin)


def run(rounds: int) -> Result:
    quick = rounds <= 1
    begun = time.perf_counter()
    rows: dict[str, list[float]] = {}
    _progress("speed")
    for _ in range(min(rounds, 3)):
        for name, value in (
            ("ours, 100,000 launches a batch", _speed(100_000, 10)),
            ("scipy, 100,000", _scipy_speed(100_000)),
            ("ours, 1,000,000 launches a batch", _speed(1_000_000, 3)),
            ("scipy, 1,000,000", _scipy_speed(1_000_000)),
        ):
            rows.setdefault(name, []).append(value / 1e6)
    more: dict[str, float] = {}
    looked_at = 4 if quick else 8

    def show(figures: dict[str, float], lines: list[str]) -> None:
        more.update(figures)
        print("\n".join(lines), end="\n\n", flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="argus-bench-", ignore_cleanup_errors=True) as name,
        open_store(f"chdb://{name}/store") as store,
    ):
        ensure_schema(store)
        _progress("the synthetic job")
        table, pooled = _synthetic(store, 24 if quick else STEPS, 1 if quick else 4)
        show(table.figures, table.lines)
        _progress("faults in it")
        show(*_detection(Stream(5), "synthetic", "synthetic", pooled, looked_at, 1))
        if not quick:
            _progress("several steps a row")
            more.update(_pooling(store, 60))
        groups = real_groups(100) if REFERENCE.is_dir() else []
        if groups:
            _progress("real traces")
            for least, windows in ((100, 4), (200, 8)):
                table = _real(store, groups, least, windows)
                show(table.figures, table.lines)
            _progress("faults in jobs drawn from them")
            drawn = Drawn(groups, 8, 40, 13)
            stored, ids = _stored_job(store, drawn)
            tested = [(rank, step) for rank in range(drawn.ranks) for step in range(36, 40)]
            table, pooled = _compared(store, drawn, "drawn from real traces", "drawn", stored, ids, 0, tested)
            show(table.figures, table.lines)
            show(*_detection(drawn, "drawn from real traces", "drawn", pooled, looked_at, 2))
        else:
            print(f"real traces: left out, there are none in {REFERENCE} (ARGUS_REFERENCE_DATA)\n")
        _progress("a simulated job")
        made = simulated(8, 40 if quick else 60, 17)
        stored, ids = _stored_job(store, made)
        tested = [(rank, step) for rank in range(made.ranks) for step in range(made.steps - 4, made.steps)]
        table, pooled = _compared(
            store, made, f"simulated: {made.steps} steps of 8 ranks", "simulated", stored, ids, 0, tested
        )
        show(table.figures, table.lines)
        show(*_detection(made, "simulated", "simulated", pooled, looked_at, 4))
        _progress("a job on the fake GPU, traced")
        try:
            job, table, pooled = _recorded(Path(name), 10)
            show(table.figures, table.lines)
            show(*_detection(job, "fake GPU", "recorded", pooled, 2 * looked_at, 8))
        except ArgusError as failure:
            print(f"fake GPU: left out, {failure}\n")
    for size, label in (("100,000", "100k"), ("1,000,000", "1M")):
        own, other = rows[f"ours, {size} launches a batch"], rows[f"scipy, {size}"]
        more[f"speedup_over_scipy_{label}"] = statistics.median(own) / statistics.median(other)
    more["seconds"] = time.perf_counter() - begun
    ratio = more["triples_f32_w1"] / more["w1"]
    return Result("kernel durations compressed", "M events/s/core", rows, ratio, more)
