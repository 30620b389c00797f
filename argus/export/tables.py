"""Tables and views of a store as Parquet or CSV files, read and written in pieces of bounded size."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import harmless, printable
from argus.store.open import Store
from argus.store.read.stacks import Selection
from argus.store.reader import as_texts, latest_run, nothing_stored, query, query_columns
from argus.system import files

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "csv")
BATCH = 50_000
"""Rows that are held at once: of the widest tables some 50 MB."""
BUCKETS = 256
TIMES = ("ts", "created", "started", "written")
"""Columns that are when a row is of, the first of them that a table has."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What spreadsheets take for the begin of a formula, or skip before one (https://owasp.org/www-community/attacks/
CSV_Injection)."""


@dataclass(frozen=True)
class Chosen:
    """Which rows.

    Attributes:
        job, run: The session; None: the newest.
        ranks: Empty: all.
        steps: First and last; None: not by step.
        from_ns, to_ns: Wall time, from and before; None: open.
        last_ns: The last so many ns before ``to_ns``, or the newest row; None: all.
    """

    job: str | None = None
    run: int | None = None
    ranks: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None
    from_ns: int | None = None
    to_ns: int | None = None
    last_ns: int | None = None

    @staticmethod
    def of(selection: Selection) -> Chosen:
        return Chosen(
            selection.job, selection.run, selection.ranks, selection.steps, selection.from_ns, selection.to_ns,
            selection.last_ns,
        )  # fmt: skip


@dataclass
class Table:
    """A table or view as the store has it.

    Attributes:
        name: Its name.
        types: Of its columns, in their order.
        final: Rows replace one another: the newest of each counts.
    """

    name: str
    types: dict[str, str]
    final: bool
    where: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> str:
        """The column that is when a row is of; empty: there is none."""
        return next((name for name in TIMES if self.types.get(name, "").startswith("DateTime64")), "")

    @property
    def source(self) -> str:
        """What rows are read from."""
        conditions = f" WHERE {' AND '.join(self.where)}" if self.where else ""
        return f"{_quoted(self.name)}{' FINAL' if self.final else ''}{conditions}"

    def narrowed(self, condition: str, **values: Any) -> Table:
        """The same with a further condition."""
        return Table(self.name, self.types, self.final, [*self.where, condition], {**self.values, **values})

    @property
    def columns(self) -> str:
        """What is read of a row. By number: a column's name for something made of it would mean that in conditions."""
        return ", ".join(f"{_read(name, kind)} AS c{place}" for place, (name, kind) in enumerate(self.types.items()))


def table_names(store: Store) -> list[str]:
    """The tables and views of a store."""
    rows = query_columns(
        store,
        "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine != 'MaterializedView'"
        " AND NOT startsWith(name, '.') ORDER BY name",
    )
    return [str(name) for name in rows["name"].tolist()]


def find_table(store: Store, name: str) -> Table | None:
    """A table or view; None: the store has none of that name."""
    if not store.exists():
        raise nothing_stored(store)
    if name not in table_names(store):
        return None
    rows = query_columns(
        store,
        "SELECT name, type FROM system.columns WHERE database = currentDatabase() AND table = {table:String}"
        " ORDER BY position",
        {"table": name},
    )
    engines = query_columns(
        store,
        "SELECT engine FROM system.tables WHERE database = currentDatabase() AND name IN {names:Array(String)}",
        {"names": [name, f"{name}_local"]},
    )
    final = any("Replacing" in str(engine) for engine in engines["engine"].tolist())
    return Table(name, dict(zip(map(str, rows["name"]), map(str, rows["type"]), strict=True)), final)


def narrow(store: Store, table: Table, chosen: Chosen) -> Table:
    """The rows of a table that are chosen: where it has a job and a run, those of one session.

    Raises:
        ArgusError: The table lacks the column that an option chooses by.
    """
    types = table.types
    if "job" in types and "run" in types:
        job, run = chosen.job, chosen.run
        if job is None or run is None:
            newest = latest_run(store, job)
            job, run = newest[0], newest[1] if run is None else run
        table = table.narrowed("job = {job:String} AND run = {run:UInt32}", job=job, run=run)
    elif chosen.job is not None or chosen.run is not None:
        raise _lacking(table, "job", "--job and --run")
    if chosen.ranks:
        if "rank" not in types:
            raise _lacking(table, "rank", "--rank")
        table = table.narrowed("rank IN {ranks:Array(UInt32)}", ranks=list(chosen.ranks))
    if chosen.steps is not None:
        if "step" not in types:
            raise _lacking(table, "step", "--steps")
        table = table.narrowed(
            "step BETWEEN {first:UInt32} AND {last:UInt32}", first=chosen.steps[0], last=chosen.steps[1]
        )
    return _in_time(store, table, chosen)


def _in_time(store: Store, table: Table, chosen: Chosen) -> Table:
    from_ns, to_ns = chosen.from_ns, chosen.to_ns
    if from_ns is None and to_ns is None and chosen.last_ns is None:
        return table
    if not table.time:
        raise _lacking(table, "time", "--since, --until and --last")
    time = f"toUnixTimestamp64Nano({_quoted(table.time)})"
    if chosen.last_ns is not None:
        end = to_ns
        if end is None:
            found = query_columns(store, f"SELECT max({time}) AS newest FROM {table.source}", table.values)
            end = int(found["newest"][0]) + 1 if len(found["newest"]) else 0
        from_ns = end - chosen.last_ns
    if from_ns is not None:
        table = table.narrowed(f"{time} >= {{from_ns:Int64}}", from_ns=from_ns)
    if to_ns is not None:
        table = table.narrowed(f"{time} < {{to_ns:Int64}}", to_ns=to_ns)
    return table


def _lacking(table: Table, what: str, options: str) -> ArgusError:
    hint = f"It has: {', '.join(table.types)}"
    return ArgusError(f"rows of {table.name} have no {what}, so {options} cannot choose among them", hint, EXIT_USAGE)


def write_table(store: Store, table: Table, file: Path, output_format: str) -> int:
    """Writes rows to a file, which gets its name when all are written; CSV ending in ``.gz`` is compressed.

    Args:
        store: Where they are.
        table: From :func:`narrow`.
        file: Where to.
        output_format: One of ``FORMATS``.

    Returns:
        The number of rows.

    Raises:
        ArgusError: There are no rows, or the file cannot be written.
    """
    rows = 0
    try:
        with files.replacing(file) as raw:
            if output_format == "parquet":
                rows = _parquet(raw, batches(store, table))
            elif file.suffix.lower() == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0) as packed:
                    rows = _csv(packed, batches(store, table))
            else:
                rows = _csv(raw, batches(store, table))
            if not rows:
                raise ArgusError(f"{table.name} has no such rows", "See: argus jobs", EXIT_UNAVAILABLE)
    except OSError as failure:
        why = failure.strerror or printable(str(failure)).splitlines()[0]
        raise ArgusError(f"{file} cannot be written: {why}", "", EXIT_FAILURE) from None
    return rows


# ---- reading


def batches(store: Store, table: Table) -> Iterator[pa.Table]:
    """The rows in pieces of about :data:`BATCH`, in order of time where they have one."""
    for part, order in _parts(store, table):
        yield _typed(query(store, f"SELECT {part.columns} FROM {part.source} {order}", part.values), table)


def _parts(store: Store, table: Table) -> Iterator[tuple[Table, str]]:
    """Conditions that each leave few rows, and their order."""
    key = f"toUnixTimestamp64Nano({_quoted(table.time)})" if table.time else ""
    if not key and re.fullmatch(r"U?Int(8|16|32|64)", table.types.get("step", "")):
        key = "toInt64(step)"
    if not key:
        yield from _pages(store, table, "")
        return
    found = query_columns(
        store, f"SELECT count() AS many, min({key}) AS low, max({key}) AS high FROM {table.source}", table.values
    )
    if int(found["many"][0]):
        yield from _ranges(store, table, key, int(found["low"][0]), int(found["high"][0]) + 1, int(found["many"][0]))


def _ranges(store: Store, table: Table, key: str, low: int, high: int, many: int) -> Iterator[tuple[Table, str]]:
    """Rows whose key is from ``low`` on and below ``high``."""
    part = table.narrowed(f"{key} >= {{low:Int64}} AND {key} < {{high:Int64}}", low=low, high=high)
    order = f"ORDER BY {key}"
    if many <= BATCH:
        yield part, order
        return
    if high - low <= 1:
        yield from _pages(store, part, "")
        return
    width = -(-(high - low) // BUCKETS)
    rows = query_columns(
        store,
        f"SELECT intDiv({key} - {{low:Int64}}, {{width:Int64}}) AS bucket, count() AS many FROM {part.source}"
        " GROUP BY bucket ORDER BY bucket",
        {**part.values, "width": width},
    )
    since, held = low, 0
    for bucket, count in zip(rows["bucket"].tolist(), rows["many"].tolist(), strict=True):
        at = low + bucket * width
        if held and held + count > BATCH:
            yield table.narrowed(f"{key} >= {{low:Int64}} AND {key} < {{high:Int64}}", low=since, high=at), order
            since, held = at, 0
        if count > BATCH:
            yield from _ranges(store, table, key, at, min(at + width, high), count)
            since, held = at + width, 0
            continue
        held += count
    if held:
        yield table.narrowed(f"{key} >= {{low:Int64}} AND {key} < {{high:Int64}}", low=since, high=high), order


def _pages(store: Store, table: Table, order: str) -> Iterator[tuple[Table, str]]:
    """Pages of rows that no number orders: by all of their columns, so that each is on one page."""
    many = int(query_columns(store, f"SELECT count() AS many FROM {table.source}", table.values)["many"][0])
    for first in range(0, many, BATCH):
        paged = many > BATCH
        yield table, f"ORDER BY ALL LIMIT {BATCH} OFFSET {first}" if paged else order


def _quoted(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _read(name: str, kind: str) -> str:
    """A column as it is read: states of aggregates as what they stand for, what Arrow has no type for as text."""
    column = _quoted(name)
    plain = re.sub(r"^(LowCardinality|Nullable|SimpleAggregateFunction)\((?:\w+, )?(.*)\)$", r"\2", kind)
    if kind.startswith("AggregateFunction"):
        return f"finalizeAggregation({column})"
    if plain.startswith("DateTime") and not plain.startswith("DateTime64"):
        return f"toDateTime64({column}, 9, 'UTC')"
    if plain.startswith(("Enum", "UUID", "IPv", "UInt128", "Int128", "UInt256", "Int256")):
        return f"toString({column})"
    return column


# ---- types


def _typed(rows: pa.Table, table: Table) -> pa.Table:
    """Rows with the store's names and types: times in ns UTC, words of few kinds as a dictionary, text that is text."""
    import pyarrow as pa

    columns = []
    for place, kind in enumerate(table.types.values()):
        values = rows.column(f"c{place}").combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.timestamp("ns", tz="UTC"))
        values = _text(values)
        if pa.types.is_string(values.type) and (kind.startswith("LowCardinality") or "Enum" in kind):
            values = values.dictionary_encode()
        columns.append(values)
    return pa.Table.from_arrays(columns, names=list(table.types))


def _text(values: pa.Array) -> pa.Array:
    """Values whose text is UTF-8: ClickHouse's strings are bytes."""
    import pyarrow as pa

    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array(as_texts(values), type=values.type)
    return values


# ---- writing


def _parquet(out: BinaryIO, parts: Iterator[pa.Table]) -> int:
    import pyarrow.parquet as parquet

    writer, rows = None, 0
    try:
        for part in parts:
            if not part.num_rows:
                continue
            if writer is None:
                writer = parquet.ParquetWriter(out, part.schema, compression="zstd")
            writer.write_table(part.cast(writer.schema))
            rows += part.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows


def _csv(out: Any, parts: Iterator[pa.Table]) -> int:
    import pyarrow as pa
    from pyarrow import csv

    writer, rows = None, 0
    try:
        for part in parts:
            if not part.num_rows:
                continue
            cells = pa.Table.from_arrays([_cells(column) for column in part.columns], names=part.column_names)
            if writer is None:
                writer = csv.CSVWriter(out, cells.schema)
            writer.write_table(cells)
            rows += part.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows


def _cells(column: pa.ChunkedArray) -> pa.Array:
    """A column as CSV has it: numbers as they are, times as text, lists and maps as JSON, text as :func:`cell`."""
    import pyarrow as pa

    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks)
    kind = values.type
    if pa.types.is_timestamp(kind) or pa.types.is_boolean(kind):
        return values.cast(pa.string())
    if pa.types.is_nested(kind):
        return pa.array(
            [None if value is None else cell(json.dumps(value)) for value in values.to_pylist()], pa.string()
        )
    if pa.types.is_string(kind):
        values = values.dictionary_encode()
    if pa.types.is_dictionary(values.type):
        words = pa.array([None if word is None else cell(word) for word in values.dictionary.to_pylist()], pa.string())
        return words.take(values.indices)
    return values


def cell(text: str) -> str:
    """Text as it may stand in a cell that a spreadsheet opens: control characters, marks that change the order of
    reading and lone surrogates are written as escapes, and what a spreadsheet takes for a formula begins with an
    apostrophe."""
    shown = harmless(text)
    return f"'{shown}" if text.startswith(_FORMULA) else shown
