"""Traces of pipeline-parallel training as StragglerAnalysis publishes them: a Parquet file with one row an operation,
and a YAML file that describes how the job is split.

Columns: ``step``, ``optype``, ``start_ts`` and ``duration`` (seconds), ``dp_rank``, ``stage``, ``rank``, ``seq_id``
(number among operations of one type of a rank in a step), ``mc`` and ``gmc`` (model chunk within the stage and within
the model) and ``mb_id`` (micro-batch). Columns that can be inferred from others may be missing. Rows may be in any
order.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from argus.diagnose.whatif.dependencies import Layout, Operations
from argus.importers import parquet
from argus.importers.packed import too_large
from argus.importers.regular import open_regular
from argus.importers.rows import ImportReport, store_run, too_high
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.ranks import HIGHEST_RANK
from argus.model.text import printable
from argus.store.open import Store

Int = NDArray[np.int64]

REQUIRED = ("step", "optype", "start_ts", "duration")
READ = (*REQUIRED, "rank", "stage", "dp_rank", "mc", "gmc", "mb_id", "seq_id")
MAX_META_BYTES = 1 << 20
_WHOLE = re.compile("[0-9]{1,10}")
SIZES = {
    "dp_size": "data", "pp_size": "pipeline", "tp_size": "tensor", "dsp_size": "sequence", "vpp_size": "virtual",
    "world_size": "world",
}  # fmt: skip
"""Sizes in the metadata, and what :class:`Layout` calls them."""
ROWS = 1 << 18
_MAGIC = b"PAR1"
_UNREADABLE = (OSError, ValueError, pa.ArrowException)
"""What pyarrow raises of a damaged file. A ValueError: of a name that is not UTF-8."""


@dataclass(frozen=True)
class Trace:
    """What a file holds.

    Attributes:
        name: The job's name in the metadata; empty: none.
        operations: ``start_ns`` counts from the file's own zero.
        microbatch: Of each operation, -1: none. Shape (operations,).
        report: What was guessed or left out.
        notes: The same in words.
    """

    path: Path
    name: str
    layout: Layout
    operations: Operations
    microbatch: Int
    report: ImportReport
    notes: list[str]


def read_meta(path: Path) -> tuple[str, Layout]:
    """Reads the metadata: lines ``name: value``, as much of YAML as these files use. Comments, quotes and other names
    are allowed.

    Raises:
        ArgusError: It cannot be read, a line cannot be parsed, or a size is not a number above 0.
    """
    try:
        with open_regular(path) as file:
            if len(content := file.read(MAX_META_BYTES + 1)) > MAX_META_BYTES:
                raise ArgusError(f"{path} is longer than 1 MiB", "Name a YAML file with --meta", EXIT_USAGE)
            lines = content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise ArgusError(
            f"{path} cannot be read: {_why(failure)}", "Name a YAML file with --meta", EXIT_USAGE
        ) from None
    name = ""
    sizes: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split(" #")[0].strip()
        if not text or text.startswith("#") or text in ("---", "..."):
            continue
        key, colon, value = (part.strip().strip("'\"") for part in text.partition(":"))
        if not colon:
            raise ArgusError(
                f"{path}, line {number}: '{text[:60]}' is not 'name: value'",
                "Write one size a line, such as 'dp_size: 4'",
                EXIT_USAGE,
            )
        if key == "trial_name":
            name = value
        elif key in SIZES:
            if not _WHOLE.fullmatch(value) or not 0 < int(value) <= HIGHEST_RANK:
                raise ArgusError(
                    f"{path}, line {number}: {key} is '{value[:40]}'",
                    f"A size is a whole number from 1 to {HIGHEST_RANK:,}",
                    EXIT_USAGE,
                )
            sizes[SIZES[key]] = int(value)
    if not sizes:
        raise ArgusError(f"{path} names no size of the job", f"It must have: {', '.join(SIZES)}", EXIT_USAGE)
    layout = Layout(**sizes)
    product = layout.data * layout.pipeline * layout.tensor * layout.sequence
    if product * layout.virtual > HIGHEST_RANK:
        raise ArgusError(
            f"{path}: dp x pp x tp x dsp x vpp is {product * layout.virtual:,}", "It is no job", EXIT_USAGE
        )
    if layout.world and layout.world != product:
        raise ArgusError(
            f"{path}: world_size is {layout.world}, but dp x pp x tp x dsp is {product}",
            "One of them is wrong",
            EXIT_USAGE,
        )
    return name, layout


def read(path: Path, meta: Path | None) -> Trace:
    """Reads a trace.

    Args:
        path: The Parquet file.
        meta: The YAML file; None: the job is split by the trace's ranks and stages, without data-sequence groups.

    Raises:
        ArgusError: A file cannot be read, is of another kind, lacks a column, or a row has no sense.
    """
    name, layout = read_meta(meta) if meta is not None else ("", Layout())
    try:
        with open_regular(path) as file:
            there, table = _columns(path, file)
        return _trace(path, meta, name, layout, there, table)
    except MemoryError:
        raise too_large(path) from None
    except OSError as failure:
        raise _unreadable(path, failure) from None


def _columns(path: Path, file: BinaryIO) -> tuple[list[str], pa.Table]:
    """All names, and the columns that are used: text as a dictionary, so that memory holds each word once."""
    try:
        opened = parquet.opened(path, file, READ)
        there = opened.schema_arrow.names
        table = opened.read(columns=[one for one in there if one in READ])
        if "optype" in table.column_names:
            table["optype"].validate(full=True)  # text that is not UTF-8
        return there, table
    except _UNREADABLE as failure:
        if isinstance(failure, MemoryError):
            raise
        raise _unreadable(path, failure, _damaged(path, file)) from None


def _unreadable(path: Path, failure: BaseException, where: str = "") -> ArgusError:
    hint = "Is it whole, and is it a Parquet file?"
    return ArgusError(f"{path} cannot be read as Parquet: {_why(failure)}{where}", hint, EXIT_USAGE)


def _trace(path: Path, meta: Path | None, name: str, layout: Layout, there: list[str], table: pa.Table) -> Trace:
    lacking = [column for column in REQUIRED if column not in table.column_names]
    if not {"dp_rank", "stage"} & set(table.column_names) and "rank" not in table.column_names:
        lacking.append("rank")
    if lacking:
        raise ArgusError(
            f"{path} lacks the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}",
            f"It has: {', '.join(there[:16])}",
            EXIT_USAGE,
        )
    if not table.num_rows:
        raise ArgusError(f"{path} has no rows", "", EXIT_USAGE)
    report = ImportReport(world_size=layout.world)
    notes: list[str] = []

    def column(key: str, default: Int | int) -> Int:
        if key not in table.column_names:
            report.counters[f"column_{key}_missing"] = 1
            made: Int = np.broadcast_to(np.asarray(default, np.int64), table.num_rows).copy()
            return made
        values = parquet.plain(path, key, table[key])
        if values.null_count and key in ("mc", "gmc", "mb_id", "seq_id"):
            values = pc.fill_null(values, -1)
        return _whole(path, key, values, least=-1 if key in ("mc", "gmc", "mb_id", "seq_id") else 0)

    names, op = _types(path, table["optype"])
    step = column("step", 0)
    start, start_ns = _seconds(path, "start_ts", table["start_ts"])
    length, duration_ns = _seconds(path, "duration", table["duration"])
    below = duration_ns < 0
    if below.any():
        report.counters["durations_below_zero"] = int(below.sum())
        duration_ns[below] = 0
        length = np.where(below, length.dtype.type(0), length)
    # The sum in the file's own precision, which is what its published answers are made from.
    end_ns = _nanoseconds(start + length)
    chunk = column("mc", -1)
    stage, dp_rank, rank = _places(table, column, layout, report)
    for what, places in (("stage", stage), ("dp_rank", dp_rank), ("rank", rank)):
        if int(places.max()) > HIGHEST_RANK:
            row = int(np.argmax(places))
            raise too_high(f"{path}, row {row}" + (f", {what}" if what != "rank" else ""), int(places[row]))
    stages = max(layout.pipeline, int(stage.max()) + 1)
    if meta is not None:
        for what, places, size in (("stage", stage, layout.pipeline), ("dp_rank", dp_rank, layout.data)):
            if int(places.max()) >= size:
                row = int(np.argmax(places))
                raise ArgusError(
                    f"{path}, row {row}: {what} is {places[row]}, but by {meta} there are {size}",
                    "Is it the metadata of this trace?",
                    EXIT_USAGE,
                )
    else:
        layout = Layout(data=int(dp_rank.max()) + 1, pipeline=stages)
        notes.append("no metadata: how the job is split is inferred from the ranks in the trace")
    global_chunk = column("gmc", np.where(chunk >= 0, chunk * stages + stage, stage))
    seq = column("seq_id", -1)
    if (seq < 0).any():
        seq = _numbered(step, rank, op, start_ns)
    operations = Operations(
        step=step, rank=rank, stage=stage, dp_rank=dp_rank, op=op, seq=seq, chunk=chunk, global_chunk=global_chunk,
        start_ns=start_ns, end_ns=end_ns, duration_ns=duration_ns, names=names,
    )  # fmt: skip
    report.ranks = np.unique(rank).tolist()
    return Trace(path, name, layout, operations, column("mb_id", -1), report, notes)


def _places(table: pa.Table, column: Any, layout: Layout, report: ImportReport) -> tuple[Int, Int, Int]:
    """Stage, data-parallel rank and global rank of each row. A missing one is inferred from the others, in Megatron's
    order: data-parallel ranks are neighbours within a stage."""
    width = layout.tensor * layout.sequence
    rank = column("rank", -1)
    stage = column("stage", np.where(rank >= 0, rank // (width * layout.data), 0))
    dp_rank = column("dp_rank", np.where(rank >= 0, rank // width % layout.data, 0))
    if (rank < 0).any():
        rank = (stage * layout.data + dp_rank) * width
    return stage, dp_rank, rank


def _numbered(step: Int, rank: Int, op: Int, start_ns: Int) -> Int:
    """Numbers of the operations of each step, rank and type in order of time."""
    order = np.lexsort((start_ns, op, rank, step))
    keys = np.stack([values[order] for values in (step, rank, op)])
    begins = np.concatenate([[True], np.any(keys[:, 1:] != keys[:, :-1], axis=0)])
    places = np.arange(len(step))
    seq: Int = np.empty(len(step), np.int64)
    seq[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return seq


def _types(path: Path, values: pa.ChunkedArray) -> tuple[tuple[str, ...], Int]:
    if values.null_count:
        raise ArgusError(f"{path}, row {_first_null(values)}: optype is empty", "Each row needs one", EXIT_USAGE)
    of_words = pa.types.is_dictionary(values.type)
    of = values.type.value_type if of_words else values.type
    if not (pa.types.is_string(of) or pa.types.is_large_string(of)):
        raise ArgusError(f"{path}: optype is of the type {of}", "It must be text", EXIT_USAGE)
    encoded = (values if of_words else values.dictionary_encode()).unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    return tuple(encoded.dictionary.to_pylist()), encoded.indices.to_numpy().astype(np.int64)


def _whole(path: Path, key: str, values: pa.ChunkedArray, *, least: int) -> Int:
    """A column of whole numbers."""
    if values.null_count:
        raise ArgusError(f"{path}, row {_first_null(values)}: {key} is empty", "Each row needs one", EXIT_USAGE)
    try:
        integers: Int = values.cast(pa.int64()).to_numpy().astype(np.int64)
    except pa.ArrowException as failure:
        raise ArgusError(f"{path}: {key} is not of whole numbers: {_why(failure)}", "", EXIT_USAGE) from None
    wrong = (integers < least) | (integers > 2**31 - 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgusError(f"{path}, row {row}: {key} is {integers[row]}", f"It must be {least} or more", EXIT_USAGE)
    return integers


def _seconds(path: Path, key: str, values: pa.ChunkedArray) -> tuple[NDArray[Any], Int]:
    """A column of seconds, as it is and in ns."""
    if values.null_count:
        raise ArgusError(f"{path}, row {_first_null(values)}: {key} is empty", "Each row needs one", EXIT_USAGE)
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
        of = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        raise ArgusError(f"{path}: {key} is of the type {of}", "It must be seconds", EXIT_USAGE)
    seconds = values.to_numpy()
    # 2^62 ns are 146 years: beyond, sums would not fit.
    wrong = ~np.isfinite(seconds) | (np.abs(seconds.astype(np.float64)) > 2**62 / 1e9)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgusError(f"{path}, row {row}: {key} is {seconds[row]}", "It must be a number of seconds", EXIT_USAGE)
    return seconds, _nanoseconds(seconds)


def _nanoseconds(seconds: NDArray[Any]) -> Int:
    return np.rint(seconds.astype(np.float64) * 1e9).astype(np.int64)


def _first_null(values: pa.ChunkedArray) -> int:
    return int(np.argmax(values.is_null().to_numpy()))


def _damaged(path: Path, file: BinaryIO) -> str:
    """Which part of a file cannot be read; empty: not known."""
    try:
        there = file.seek(0, os.SEEK_END)
        file.seek(max(there - len(_MAGIC), 0))
        ending = file.read()
    except OSError:
        return ""
    if ending != _MAGIC:
        return f"; it ends at byte {there:,} without a footer, as one that is cut off"
    try:
        opened = parquet.opened(path, file, READ)
        # Of a column's own metadata nothing is asked: where they are damaged, that ends the process (Arrow 21).
        names = [name for name in opened.schema_arrow.names if name in READ]
        for group in range(opened.num_row_groups):
            for name in names:
                try:
                    opened.read_row_group(group, [name])
                except _UNREADABLE:
                    return f"; column '{printable(name)[:64]}' is damaged, in row group {group:,}"
    except _UNREADABLE:
        return f"; its footer, before byte {there:,}, is damaged"
    return ""


def _why(failure: BaseException) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return (str(failure).splitlines() or [type(failure).__name__])[0][:160]


def write(store: Store, job: str, trace: Trace) -> int:
    """Stores a trace as a new run of a job: ``phase_ops``, ``parallel_layout``, and a row of ``iterations`` for each
    rank and step.

    The file's times count from a zero of its own, often anew in each step. They are stored as if the first step had
    begun now; where steps would overlap, each is put at the end of the one before.

    Returns:
        Number of the run.

    Raises:
        ArgusError: The store cannot be had or refuses rows.
    """
    operations = trace.operations
    steps, step = np.unique(operations.step, return_inverse=True)
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(begin, step, operations.start_ns)
    np.maximum.at(end, step, operations.end_ns)
    now = time.time_ns()
    if np.any(begin[1:] < end[:-1]):
        trace.report.counters["steps_laid_end_to_end"] = len(steps)
        lengths = end - begin
        shift = now + np.cumsum(lengths) - lengths - begin
    else:
        shift = np.full(len(steps), now - int(begin[0]))
    trace.report.begin_ns = int((begin + shift).min())
    trace.report.end_ns = int((end + shift).max())
    return store_run(store, job, "whatif", trace.report, _tables(trace, step, shift), str(trace.path))


def _tables(trace: Trace, step: Int, shift: Int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    operations, layout = trace.operations, trace.layout
    yield "parallel_layout", {
        "dp": layout.data, "pp": layout.pipeline, "tp": layout.tensor, "sp": layout.sequence, "vpp": layout.virtual,
        "world_size": layout.world, "source": "whatif", "version": [time.time_ns()],
    }  # fmt: skip
    moved = shift[step]
    names = pa.array(operations.names, pa.string())
    for at in range(0, len(operations), ROWS):
        here = slice(at, at + ROWS)
        yield "phase_ops", {
            "rank": operations.rank[here].astype(np.uint32), "step": operations.step[here].astype(np.uint32),
            "stage": operations.stage[here].astype(np.uint32), "dp_rank": operations.dp_rank[here].astype(np.uint32),
            "op": pa.DictionaryArray.from_arrays(pa.array(operations.op[here].astype(np.int32)), names),
            "seq": operations.seq[here].astype(np.uint32), "microbatch": trace.microbatch[here].astype(np.int32),
            "chunk": operations.chunk[here].astype(np.int32),
            "global_chunk": operations.global_chunk[here].astype(np.int32),
            "ts": operations.start_ns[here] + moved[here], "ts_end": operations.end_ns[here] + moved[here],
            "duration_ns": operations.duration_ns[here].astype(np.uint64),
        }  # fmt: skip
    _, ranked = np.unique(operations.rank, return_inverse=True)
    lane, first, which = np.unique(step * (int(ranked.max()) + 1) + ranked, return_index=True, return_inverse=True)
    begin = np.full(len(lane), np.iinfo(np.int64).max)
    end = np.full(len(lane), np.iinfo(np.int64).min)
    np.minimum.at(begin, which, operations.start_ns + moved)
    np.maximum.at(end, which, operations.end_ns + moved)
    yield "iterations", {
        "rank": operations.rank[first].astype(np.uint32), "step": operations.step[first].astype(np.uint32),
        "ts": begin, "duration_ns": (end - begin).astype(np.uint64), "collectives": 0, "launches": 0,
        "method": "imported", "confidence": 1.0,
    }  # fmt: skip


def median_step_ns(trace: Trace) -> float:
    """Median length of the steps, ns."""
    operations = trace.operations
    _, step = np.unique(operations.step, return_inverse=True)
    begin = np.full(int(step.max()) + 1, math.inf)
    end = np.full(int(step.max()) + 1, -math.inf)
    np.minimum.at(begin, step, operations.start_ns)
    np.maximum.at(end, step, operations.end_ns)
    return float(np.median(end - begin))
