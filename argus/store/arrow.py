"""Columns as the Arrow types that a table's ClickHouse types take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from argus.store.schema_files import Column, table_columns
from argus.system import redact

Values: TypeAlias = "npt.NDArray[Any] | Sequence[Any] | str | int | float | bool | None"
"""One column of a batch. A single value stands for all rows."""


def without_folders(rows: pa.Table) -> pa.Table:
    """Rows whose texts have the last components of absolute paths only."""
    columns = [_shortened(column) for column in rows.columns]
    return pa.table(columns, names=rows.column_names)


def _shortened(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _shortened(pa.chunked_array([array.dictionary])))
    if pa.types.is_list(kind):
        values = _shortened(pa.chunked_array([array.values]))
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null() if array.null_count else None)
    if pa.types.is_string(kind):
        return pc.replace_substring_regex(array, pattern=redact.PATH, replacement=r"\1")
    return array


def joined(parts: list[pa.Table]) -> pa.Table:
    """Tables of the same columns as one, in one piece."""
    schema = pa.schema(
        [
            # What one append gave as a single value, another may have given row by row.
            first
            if all(part.schema.field(k).type == first.type for part in parts)
            else pa.field(first.name, pa.string())
            for k, first in enumerate(parts[0].schema)
        ]
    )
    # One dictionary a column: Arrow's file format cannot replace one between batches.
    return pa.concat_tables([part.cast(schema) for part in parts]).unify_dictionaries().combine_chunks()


def cut(rows: pa.Table, most_bytes: int) -> list[pa.Table]:
    """A table as several of so many bytes at most, in its order. Of a dictionary each has what it uses. One that is a
    row, or most of which is what all of its rows have in common, stays larger."""
    if rows.nbytes <= most_bytes or rows.num_rows < 2:
        return [rows]
    half = rows.num_rows // 2
    halves = [_with_used_values(rows.slice(*part)) for part in ((0, half), (half, rows.num_rows - half))]
    if sum(each.nbytes for each in halves) > 1.5 * rows.nbytes:
        return [rows]
    return [piece for each in halves for piece in cut(each, most_bytes)]


def _with_used_values(rows: pa.Table) -> pa.Table:
    return pa.table([_used(column) for column in rows.columns], names=rows.column_names)


def _used(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    if not pa.types.is_dictionary(column.type):
        return column
    array = column.unify_dictionaries().combine_chunks()
    used = pc.unique(array.indices.drop_null())
    return pa.DictionaryArray.from_arrays(pc.index_in(array.indices, used), array.dictionary.take(used))


def to_arrow(table: str, rows: pa.Table | Mapping[str, Values]) -> pa.Table:
    """Converts columns to what the table's ClickHouse types take, copying them.

    Raises:
        ValueError: No such table, a column is missing, unknown, of another length, or does not fit its type.
    """
    tables = table_columns()
    if table not in tables:
        raise ValueError(f"there is no table '{table}' (known: {', '.join(sorted(tables))})")
    columns = tables[table]
    given = rows.column_names if isinstance(rows, pa.Table) else list(rows)
    if unknown := [name for name in given if name not in columns]:
        raise ValueError(f"table '{table}' has no column {', '.join(unknown)} (it has {', '.join(columns)})")
    if missing := [c.name for c in columns.values() if not c.optional and c.name not in given]:
        raise ValueError(f"rows for table '{table}' lack the column {', '.join(missing)}")
    lengths = {name: _length(rows[name]) for name in given}
    counts = Counter(n for n in lengths.values() if n is not None)
    count = counts.most_common(1)[0][0] if counts else 1
    if wrong := [f"{name}: {n}" for name, n in lengths.items() if n is not None and n != count]:
        raise ValueError(f"the columns for table '{table}' differ in length: {', '.join(wrong)}, others {count}")
    return pa.table(
        {name: _convert(table, rows[name], column, count) for name, column in columns.items() if name in given}
    )


def as_declared(table: str, rows: pa.Table) -> pa.Table:
    """Rows whose columns have the types that the table's ClickHouse types take. Columns may be missing.

    Raises:
        ValueError: A column does not fit its type, or lacks values where its type has no NULL.
    """
    columns = table_columns()[table]
    return pa.table({name: _convert(table, rows[name], columns[name], rows.num_rows) for name in rows.column_names})


def _length(values: Values) -> int | None:
    if isinstance(values, (str, bytes, int, float, bool, np.generic)) or values is None:
        return None
    return len(values)


_INTEGERS = {
    f"{sign}Int{bits}": getattr(pa, f"{sign.lower()}int{bits}")() for sign in ("", "U") for bits in (8, 16, 32, 64)
}
_FLOATS = {"Float32": pa.float32(), "Float64": pa.float64()}
_TIMES = {"DateTime64(9": "ns", "DateTime64(6": "us", "DateTime64(3": "ms", "DateTime": "s"}


def _arrow_type(clickhouse: str) -> pa.DataType:
    for wrapper in ("Nullable(", "LowCardinality("):
        if clickhouse.startswith(wrapper):
            return _arrow_type(clickhouse[len(wrapper) : -1])
    if clickhouse.startswith("Array("):
        return pa.list_(_arrow_type(clickhouse[6:-1]))
    if clickhouse.startswith("Map("):
        key, _, value = clickhouse[4:-1].partition(",")
        return pa.map_(_arrow_type(key.strip()), _arrow_type(value.strip()))
    for prefix, unit in _TIMES.items():
        if clickhouse == prefix or clickhouse.startswith((prefix + ",", prefix + ")", prefix + "(")):
            return pa.timestamp(unit, tz="UTC")
    if clickhouse == "Bool":
        return pa.bool_()
    if clickhouse == "String":
        return pa.string()
    found = _INTEGERS.get(clickhouse) or _FLOATS.get(clickhouse)
    if found is None:
        raise ValueError(f"Argus does not write the type {clickhouse}")
    return found


def _convert(table: str, values: Any, column: Column, count: int) -> pa.Array:
    try:
        kind = _arrow_type(column.type)
        if _length(values) is None:
            one = _array([values.item() if isinstance(values, np.generic) else values], kind)
            repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), one)
            array = repeated if pa.types.is_string(kind) else repeated.cast(kind)
        else:
            array = _array(values, kind)
        if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
            array = array.dictionary_decode()  # which counts what is missing through its dictionary, too
        if array.null_count and "Nullable(" not in column.type:
            raise ValueError("some are missing (null)")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
        raise ValueError(
            f"column '{column.name}' of table '{table}' ({column.type}) does not take these values: {failure}"
        ) from None
    return array


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_list(kind) and isinstance(values, np.ndarray) and values.ndim == 2:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(offsets, _array(values.reshape(-1), kind.value_type))
    if isinstance(values, np.ma.MaskedArray):
        data = np.array(values.data, order="C")
        array = pa.array(data, mask=np.ma.getmaskarray(values))
    elif isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise ValueError(f"{values.ndim} dimensions")
        # A copy: pyarrow would keep pointing into the caller's ring buffer.
        data = np.array(values, order="C", dtype=values.dtype.newbyteorder("="))
        if data.dtype.kind == "S":
            data = np.char.decode(data, "utf-8", "replace")
        array = pa.array(data, from_pandas=False)
    elif isinstance(values, pa.Array):
        array = values
    elif pa.types.is_timestamp(kind):
        return _times(values, kind)
    else:
        try:
            return pa.array(list(values), type=kind)
        except UnicodeEncodeError:  # names of files that are no UTF-8 come as lone surrogates
            return pa.array(_storable(values), type=kind)
    if pa.types.is_timestamp(kind):
        return _times(array, kind)
    if pa.types.is_dictionary(array.type):
        return array.cast(_DICTIONARY if pa.types.is_string(kind) else kind)
    if pa.types.is_boolean(kind) and pa.types.is_integer(array.type):
        return pc.not_equal(array, 0)
    if pa.types.is_integer(kind) and pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    return array.cast(kind)


def _storable(value: Any) -> Any:
    """Strings as valid UTF-8, whatever bytes they came from, also within lists and maps."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode() if _LONE.search(value) else value
    if isinstance(value, Mapping):
        return {_storable(name): _storable(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_storable(each) for each in value]
    return value


_LONE = re.compile("[\ud800-\udfff]")


def _times(values: Any, kind: pa.DataType) -> pa.Array:
    """Nanoseconds since 1970 (or timestamps) as the column's timestamps, rounded down to its unit."""
    array = values if isinstance(values, pa.Array) else pa.array(list(values))
    if pa.types.is_floating(array.type):
        raise ValueError("a float cannot hold a time in nanoseconds exactly; give int64")
    if pa.types.is_null(array.type):
        return array.cast(kind)
    if not pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64()).cast(pa.timestamp("ns", tz="UTC"))
    elif array.type.tz is None:
        array = array.cast(pa.timestamp(array.type.unit, tz="UTC"))
    return array if array.type == kind else pc.floor_temporal(array, unit=_UNIT[kind.unit]).cast(kind)


_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_UNIT = {"ns": "nanosecond", "us": "microsecond", "ms": "millisecond", "s": "second"}
