"""Step times of a job's ranks as a table of text: one row a rank and step, columns named by the user.

The file is read in blocks and stored as it is read, so it may be of any size; 8 bytes a row are kept to tell rows that
are there twice. It tells no clock: the steps of each rank are stored one after the other, as if the first had begun
now.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
from numpy.typing import NDArray

from argus.errors import EXIT_USAGE, ArgusError
from argus.interop.rows import HOST, Told, store_run
from argus.store.open import Store

Int = NDArray[np.int64]

UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}
"""What a unit is in nanoseconds."""
BLOCK_BYTES = 8 << 20
LONGEST = 200
"""Bytes of a value: text becomes columns whose cells are all as wide as the longest."""
MOST_NS = 2.0**62 / 1e3
"""The longest step: 53 days. Longer ones are of another unit, and sums of them would not fit."""


@dataclass
class Columns:
    """How the file calls them, and the unit of durations."""

    rank: str
    step: str
    duration: str
    unit: str = "ms"


@dataclass
class _Reading:
    """What was read so far."""

    rows: int = 0
    names: list[str] | None = None
    """Ranks that are no numbers, numbered in order of appearance."""
    keys: list[Int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    steps: tuple[int, int] = (2**62, -1)
    broken: str = ""
    """The row that has too few columns, or too many."""


@dataclass(frozen=True)
class Stored:
    """What was stored. ``names``: of ranks that are no numbers, by rank; None: they are numbers."""

    run: int
    rows: int
    steps: tuple[int, int]
    names: list[str] | None
    told: Told


def write(store: Store, job: str, path: Path, columns: Columns) -> Stored:
    """Reads a file and stores it as a new run of a job.

    Raises:
        ArgusError: The file cannot be read, lacks a column, or a row makes no sense (the run is then left without an
            end); the store cannot be had or refuses rows.
    """
    reading = _Reading()
    reader = _open(path, columns, reading)
    told = Told(begin_ns=time.time_ns())
    blocks = _blocks(path, columns, reader, reading, told)
    first = next(blocks, None)
    if first is None:
        raise ArgusError(f"{path} has no rows", "It needs one for each rank and step", EXIT_USAGE)

    def tables() -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield "iterations", first
        for block in blocks:
            yield "iterations", block
        told.ranks = sorted(reading.ends)
        told.hosts = [reading.names[rank] for rank in told.ranks] if reading.names is not None else []
        told.end_ns = max(reading.ends.values())

    run = store_run(store, job, "iterations", told, tables(), str(path))
    return Stored(run, reading.rows, reading.steps, reading.names, told)


def _open(path: Path, columns: Columns, reading: _Reading) -> Any:
    wanted = [columns.rank, columns.step, columns.duration]
    if len(set(wanted)) < len(wanted):
        raise ArgusError("rank, step and duration are columns of their own", "Name three", EXIT_USAGE)

    def note(row: Any) -> str:
        reading.broken = row.text
        return "error"

    parse_options = pcsv.ParseOptions(invalid_row_handler=note)
    try:
        head = pcsv.open_csv(path, read_options=pcsv.ReadOptions(block_size=BLOCK_BYTES), parse_options=parse_options)
        names = _names(path, head.schema)
        lacking = [name for name in wanted if name not in names]
        if lacking:
            there = ", ".join(name or "(no name)" for name in names[:16])
            raise ArgusError(
                f"{path} has no column {', '.join(repr(name) for name in lacking)}", f"It has: {there}", EXIT_USAGE
            )
        if twice := [name for name in wanted if names.count(name) > 1]:
            raise ArgusError(f"{path} has the column {twice[0]!r} twice", "Which one is meant?", EXIT_USAGE)
        head.close()
        # As text: a column's type may change after the first block, and errors then name the row.
        return pcsv.open_csv(
            path,
            read_options=pcsv.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=parse_options,
            convert_options=pcsv.ConvertOptions(
                include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()), strings_can_be_null=False
            ),
        )
    except FileNotFoundError:
        raise ArgusError(f"there is no file {path}", "", EXIT_USAGE) from None
    except (OSError, pa.ArrowException) as failure:
        where = _row_of(path, reading.broken) or " cannot be read"
        raise ArgusError(f"{path}{where}: {_why(failure)}", "Is it text with commas?", EXIT_USAGE) from None


def _names(path: Path, schema: pa.Schema) -> list[str]:
    """The columns' names.

    Raises:
        ArgusError: One is no text.
    """
    try:
        return list(schema.names)
    except UnicodeDecodeError:
        raise ArgusError(f"{path}: its first row is no UTF-8", "Is it text with commas?", EXIT_USAGE) from None


def _row_of(path: Path, broken: str) -> str:
    """Which row of the file reads so, and where; empty: it is not found (the file is packed)."""
    if not broken:
        return ""
    text = broken.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        place = whole.find(b"\n" + text)
        # Longer rows may begin like it.
        while place >= 0 and whole[place + 1 + len(text) : place + 2 + len(text)] not in (b"", b"\r", b"\n"):
            place = whole.find(b"\n" + text, place + 1)
        if place < 0:
            return ""
        row = 1 + sum(whole[at : min(at + BLOCK_BYTES, place)].count(b"\n") for at in range(0, place, BLOCK_BYTES))
    return f", row {row} at byte {place + 1:,}"


def _blocks(path: Path, columns: Columns, reader: Any, reading: _Reading, told: Told) -> Iterator[Mapping[str, Any]]:
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as failure:
            where = _row_of(path, reading.broken) or f", after row {reading.rows}"
            raise ArgusError(f"{path}{where}: {_why(failure)}", "Is the file whole?", EXIT_USAGE) from None
        if not batch.num_rows:
            continue
        first = reading.rows + 1
        reading.rows += batch.num_rows
        for name in (columns.rank, columns.step, columns.duration):
            long = pc.greater(pc.binary_length(batch.column(name)), LONGEST).to_numpy(zero_copy_only=False)
            _check(path, name, batch.column(name), long, first, f"of {LONGEST} bytes or less")
        step = _whole(path, columns.step, batch.column(columns.step), first)
        with np.errstate(over="ignore"):
            took = _numbers(path, columns.duration, batch.column(columns.duration), first) * UNITS[columns.unit]
        _check(
            path, columns.duration, batch.column(columns.duration), ~np.isfinite(took) | (took < 0), first, "a duration"
        )
        _check(
            path, columns.duration, batch.column(columns.duration), took > MOST_NS, first,
            f"a duration in {columns.unit} (it is over 53 days: name another with --unit)",
        )  # fmt: skip
        rank = _ranks(path, columns, batch.column(columns.rank), first, reading)
        keys = rank << 32 | step
        kept = _new(keys, reading)
        if not kept.all():
            told.counters["rows_repeated"] += int((~kept).sum())
            rank, step, took = rank[kept], step[kept], took[kept]
        if not len(rank):
            continue
        reading.steps = (min(reading.steps[0], int(step.min())), max(reading.steps[1], int(step.max())))
        duration = np.rint(took).astype(np.int64)
        names = {"host": [reading.names[one] for one in rank.tolist()]} if reading.names is not None else {"host": HOST}
        yield {
            "rank": rank.astype(np.uint32), "step": step.astype(np.uint32),
            "ts": _begins(rank, duration, reading.ends, told.begin_ns), "duration_ns": duration.astype(np.uint64),
            "collectives": 0, "launches": 0, "method": "imported", "confidence": 1.0, **names,
        }  # fmt: skip


def _begins(rank: Int, duration: Int, ends: dict[int, int], begin_ns: int) -> Int:
    """When each step begins: where the rank's step before ended. Notes in ``ends`` where each rank's last one does."""
    order = np.argsort(rank, kind="stable")
    sorted_ = rank[order]
    total = np.cumsum(duration[order])
    heads = np.flatnonzero(np.concatenate([[True], sorted_[1:] != sorted_[:-1]]))
    lengths = np.diff(np.append(heads, len(rank)))
    before = np.repeat(total[heads] - duration[order][heads], lengths)
    known = np.array([ends.get(int(one), begin_ns) for one in sorted_[heads].tolist()], np.int64)
    end = np.repeat(known, lengths) + total - before
    ends.update(zip(sorted_[heads].tolist(), end[heads + lengths - 1].tolist(), strict=True))
    begins = np.empty(len(rank), np.int64)
    begins[order] = end - duration[order]
    return begins


def _new(keys: Int, reading: _Reading) -> NDArray[np.bool_]:
    """Which rows were not there before; of equal ones the first."""
    _, first = np.unique(keys, return_index=True)
    kept = np.zeros(len(keys), bool)
    kept[first] = True
    for earlier in reading.keys:
        place = np.minimum(np.searchsorted(earlier, keys), len(earlier) - 1)
        kept &= earlier[place] != keys
    fresh = np.sort(keys[kept])
    # Few sorted runs, as in a merge sort: each is at least twice as long as the next.
    while reading.keys and len(reading.keys[-1]) <= 2 * len(fresh):
        fresh = np.sort(np.concatenate([reading.keys.pop(), fresh]), kind="stable")
    if len(fresh):
        reading.keys.append(fresh)
    return kept


def _ranks(path: Path, columns: Columns, values: pa.Array, first: int, reading: _Reading) -> Int:
    texts = np.char.strip(values.to_numpy(zero_copy_only=False).astype(str))
    _check(path, columns.rank, values, texts == "", first, "a rank")
    # Whole numbers, also as pandas writes those of columns with gaps: 3.0.
    bare = np.char.partition(texts, ".")
    whole = np.char.isdecimal(bare[:, 0]) & (np.char.strip(bare[:, 2], "0") == "")
    numeric = whole & (np.char.str_len(bare[:, 0]) < 10)
    if reading.names is None and (first > 1 or numeric.all()):
        _check(path, columns.rank, values, ~numeric, first, "the number of a rank, as others are")
        return bare[:, 0].astype(np.int64)
    if reading.names is None:
        reading.names = []
    words, place, code = np.unique(texts, return_index=True, return_inverse=True)
    number = {name: one for one, name in enumerate(reading.names)}
    for one in np.argsort(place).tolist():
        if str(words[one]) not in number:
            number[str(words[one])] = len(reading.names)
            reading.names.append(str(words[one]))
    numbers: Int = np.array([number[str(word)] for word in words], np.int64)[code]
    return numbers


def _whole(path: Path, name: str, values: pa.Array, first: int) -> Int:
    found = _numbers(path, name, values, first)
    wrong = ~np.isfinite(found) | (found != np.rint(found)) | (found < 0) | (found > 2**32 - 1)
    _check(path, name, values, wrong, first, "the number of a step")
    return found.astype(np.int64)


def _numbers(path: Path, name: str, values: pa.Array, first: int) -> NDArray[np.float64]:
    texts = values.to_numpy(zero_copy_only=False).astype(str)
    try:
        found: NDArray[np.float64] = texts.astype(np.float64)
        return found
    except ValueError:
        pass

    def is_number(text: str) -> bool:
        try:
            float(text)
        except ValueError:
            return False
        return True

    wrong = np.array([not is_number(text) for text in texts.tolist()])
    _check(path, name, values, wrong, first, "a number")
    raise AssertionError("numpy and Python differ on what is a number")


def _check(path: Path, name: str, values: pa.Array, wrong: NDArray[np.bool_], first: int, what: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgusError(
            f"{path}, row {first + row}: {name} is '{str(values[row])[:40]}', not {what}",
            "Rows are counted from 1, without the head",
            EXIT_USAGE,
        )


def _why(failure: BaseException) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0][:160]
