"""Opens Parquet files of which memory need not hold far more than their bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from argus.importers.packed import most_unpacked, too_much
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.units import binary_size

SPARE_ROWS = 100_000
"""Rows that any file may have; beyond, each must have a byte of it. Real ones take 10 or 11 (StragglerAnalysis), since
times differ from row to row. A value that repeats takes none: millions of rows fit into a kilobyte."""
MOST_TEXT = 64 << 20
"""Bytes of text of a column that are laid out at once: 65,536 rows of 1 KiB each; of more rows ``MOST_OF_ROW`` each."""
MOST_OF_ROW = 64
_HINT = "Write it without packing"


def opened(path: Path, file: BinaryIO, wanted: Sequence[str]) -> pq.ParquetFile:
    """A file whose rows, and whose size when unpacked (as its footer says), are in proportion to its bytes. Text comes
    as a dictionary: each different word once.

    Args:
        path: What messages call it.
        file: The open file. It must stay open, and is not closed with the result.
        wanted: Columns that will be read. Those that are missing do not matter.

    Raises:
        ArgusError: It is not so, a column is there twice, or holds lists or structures.
        OSError, ValueError, ArrowException: It is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    found = pq.ParquetFile(file)
    rows = found.metadata.num_rows
    if rows > size + SPARE_ROWS:
        message = f"{path} has {size:,} bytes, and claims to have {rows:,} rows"
        raise ArgusError(message, "Real rows differ, and take bytes each", EXIT_USAGE)
    # Of columns nothing is asked: statistics that are damaged end the process (Arrow 21).
    groups = (found.metadata.row_group(group).total_byte_size for group in range(found.metadata.num_row_groups))
    if sum(max(group, 0) for group in groups) > most_unpacked(size):
        raise too_much(path, size, _HINT)
    fields = [field for field in found.schema_arrow if field.name in wanted]
    names = [field.name for field in fields]
    for field in fields:
        if names.count(field.name) > 1:
            raise ArgusError(f"{path} has the column {field.name!r} twice", "Which one is meant?", EXIT_USAGE)
        if pa.types.is_nested(field.type):
            message = f"{path}: the column {field.name!r} is of the type {str(field.type)[:60]}"
            raise ArgusError(message, "Each row needs one value", EXIT_USAGE)
    words = [field.name for field in fields if _is_text(field.type)]
    return pq.ParquetFile(file, read_dictionary=words) if words else found


def _is_text(kind: pa.DataType) -> bool:
    return any(
        check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                  pa.types.is_large_binary, pa.types.is_string_view, pa.types.is_binary_view)
    )  # fmt: skip


def plain(path: Path, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """A column without its dictionary.

    Raises:
        ArgusError: Its text would be too much.
    """
    if not pa.types.is_dictionary(values.type):
        return values
    total = 0
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        if _is_text(values.type.value_type):
            total += pc.sum(pc.take(pc.binary_length(chunk.dictionary), chunk.indices)).as_py() or 0
    if total > (most := max(MOST_TEXT, MOST_OF_ROW * len(values))):
        message = f"{path}: the column {name!r} has more than {binary_size(most)} of text in {len(values):,} rows"
        raise ArgusError(message, "Names and numbers are short", EXIT_USAGE)
    return pc.cast(values, values.type.value_type)
