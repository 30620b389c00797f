"""Tables that other programs wrote, read in blocks of text columns: CSV, JSON lines, Parquet, also packed with gzip.

The format of a file is detected by its first bytes, not by its name. Every value comes as text, an absent one as empty
text: columns of logs change their type from block to block, and errors then name the row.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from argus.importers import parquet
from argus.importers.packed import Unpacked, too_large
from argus.importers.regular import open_regular
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import printable
from argus.model.units import binary_size
from argus.system import files

BLOCK_BYTES = 8 << 20
LONGEST_LINE = 1 << 20
"""Of JSON lines, bytes: a row of a log is hundreds, and a file without line ends is none."""
LARGEST_GROUP = 2 << 30
"""Bytes of a Parquet row group, unpacked: a group is read as a whole."""
ROWS = 1 << 16
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".parquet", ".pq")
"""How files that are read of a folder end."""
_COLUMNS = re.compile(r"(CSV parse error: Expected \d+ columns, got \d+): (.*)", re.DOTALL)
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


def find(paths: Sequence[Path]) -> list[Path]:
    """Files to read: those named, those that a pattern matches, and of folders all tables in them, sorted by name.

    Raises:
        ArgusError: One does not exist, or a folder or a pattern has none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIXES) and one.is_file())
            if not inside:
                raise ArgusError(f"{path} has no {', '.join(SUFFIXES)} file", "", EXIT_USAGE)
            files += inside
        elif path.exists():
            files.append(path)
        elif glob.has_magic(str(path)):
            inside = [Path(one) for one in sorted(glob.glob(str(path))) if Path(one).is_file()]
            if not inside:
                raise ArgusError(f"no file matches {path}", "", EXIT_USAGE)
            files += inside
        else:
            raise ArgusError(f"there is no file {path}", "", EXIT_USAGE)
    return files


def number_in(path: Path) -> int | None:
    """The rank in a file's name: ``rank3.csv``, ``worker_12.jsonl.gz``, ``worker-3 (1).csv``, ``0.parquet``; None: it
    has no number."""
    stem = re.sub(r"(\.(csv|tsv|jsonl|ndjson|json|parquet|pq|txt|log|gz))+$", "", path.name)
    numbers = re.findall(r"(?<!\d)\d{1,9}(?!\d)", stem)
    for word in ("rank", "worker"):
        if after := re.search(word + r"[-_.]?(\d{1,9})(?!\d)", stem, re.IGNORECASE):
            return int(after[1])
    return int(numbers[-1]) if numbers else None


def blocks(path: Path, wanted: Sequence[str]) -> Iterator[Mapping[str, pa.Array]]:
    """The rows of a file, in blocks.

    Args:
        path: The file.
        wanted: Names of its columns; of JSON lines also of parts of objects (``metrics.step_ms``).

    Returns:
        Of each block the columns as text, of the same length, above 0.

    Raises:
        ArgusError: The file cannot be read, is damaged, or lacks a column.
    """
    with contextlib.ExitStack() as opened:
        try:
            # Once: what has its name may become another file, or a pipe.
            file = opened.enter_context(open_regular(path))
            head, packed = _head(path, file.read(1 << 16))
        except OSError as failure:
            raise ArgusError(f"{path} cannot be read: {failure.strerror}", "", EXIT_USAGE) from None
        if head[:4] == _PARQUET:
            yield from _parquet(path, file, wanted)
        elif head.lstrip()[:1] == b"{":
            yield from _json_lines(path, file, wanted, packed=packed)
        elif head.lstrip()[:1] == b"[":
            raise ArgusError(
                f"{path} is one JSON list", "One object a line is needed: jq -c '.[]' FILE > rows.jsonl", EXIT_USAGE
            )
        else:
            yield from _csv(path, file, wanted, packed=packed)


def _head(path: Path, head: bytes) -> tuple[bytes, bool]:
    """The first bytes, unpacked, and whether they were packed."""
    if head[:2] != _GZIP:
        return head.removeprefix(b"\xef\xbb\xbf"), False
    try:
        return zlib.decompressobj(wbits=31).decompress(head, 1 << 12).removeprefix(b"\xef\xbb\xbf"), True
    except zlib.error as failure:
        raise ArgusError(f"{path} cannot be unpacked: {why(failure)}", "Is the file whole?", EXIT_USAGE) from None


def _stream(path: Path, file: BinaryIO, *, packed: bool) -> Any:
    """The file from its beginning, unpacked. It has a place of its own: pyarrow reads ahead, also what it no longer
    needs."""
    again = os.fdopen(files.open_place(file.fileno(), os.O_RDONLY), "rb")
    if not packed:
        return pa.input_stream(again)
    return Unpacked(path, pa.input_stream(again, compression="gzip"), os.fstat(file.fileno()).st_size)


def _check_names(path: Path, wanted: Sequence[str], there: Sequence[str]) -> None:
    lacking = [name for name in wanted if name not in there]
    if lacking:
        listed = ", ".join(name or "(no name)" for name in there[:16])
        raise ArgusError(
            f"{path} has no column {', '.join(repr(name) for name in lacking)}", f"It has: {listed}", EXIT_USAGE
        )
    if twice := [name for name in wanted if list(there).count(name) > 1]:
        raise ArgusError(f"{path} has the column {twice[0]!r} twice", "Which one is meant?", EXIT_USAGE)


def _csv(path: Path, file: BinaryIO, wanted: Sequence[str], *, packed: bool) -> Iterator[Mapping[str, pa.Array]]:
    tabs = path.name.removesuffix(".gz").endswith(".tsv")
    parse = pcsv.ParseOptions(delimiter="\t" if tabs else ",")
    read = pcsv.ReadOptions(block_size=BLOCK_BYTES)
    rows = 0
    try:
        with _stream(path, file, packed=packed) as stream:
            head = pcsv.open_csv(stream, read_options=read, parse_options=parse)
            names = _names(path, head.schema)
            head.close()
        _check_names(path, wanted, names)
        convert = pcsv.ConvertOptions(
            include_columns=list(wanted), column_types=dict.fromkeys(wanted, pa.string()), strings_can_be_null=False
        )
        with _stream(path, file, packed=packed) as stream:
            for batch in pcsv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert):
                if batch.num_rows:
                    rows += batch.num_rows
                    yield {name: batch.column(name) for name in wanted}
    except (OSError, ValueError, pa.ArrowException) as failure:
        # Of a row of too many columns or too few, the message ends with its text.
        matched = _COLUMNS.match(str(failure))
        where = _row_of(file, matched[2], packed=packed) if matched is not None else ""
        where = where or (f", after row {rows}" if rows else " cannot be read")
        hint = "Is the file whole?" if rows else "Is it text with commas?"
        raise ArgusError(f"{path}{where}: {matched[1] if matched else why(failure)}", hint, EXIT_USAGE) from None


def _names(path: Path, schema: pa.Schema) -> list[str]:
    try:
        return list(schema.names)
    except UnicodeDecodeError:
        raise ArgusError(f"{path}: its first row is not UTF-8", "Is it text with commas?", EXIT_USAGE) from None


def _row_of(file: BinaryIO, broken: str, *, packed: bool) -> str:
    """Which row of the file reads so, and where; empty: it is not found, or the file is packed."""
    if not broken or packed:
        return ""
    text = b"\n" + broken.encode(errors="replace")
    # Not mapped into memory: whoever owns the file may cut it meanwhile, which would end the import by a signal.
    window, before, row = b"", 0, 1
    while True:
        part = os.pread(file.fileno(), BLOCK_BYTES, before + len(window))
        window += part
        place = window.find(text)
        # Longer rows may begin like it.
        while place >= 0 and window[place + len(text) : place + len(text) + 1] not in (b"", b"\r", b"\n"):
            place = window.find(text, place + 1)
        # What follows the row must be there, or nothing.
        if place >= 0 and (not part or place + len(text) < len(window)):
            row += window.count(b"\n", 0, place)
            return f", row {row} at byte {before + place + 1:,}"
        if not part:
            return ""
        done = max(len(window) - len(text), 0)
        row += window.count(b"\n", 0, done)
        window, before = window[done:], before + done


def _json_lines(path: Path, file: BinaryIO, wanted: Sequence[str], *, packed: bool) -> Iterator[Mapping[str, pa.Array]]:
    parts = {name: name.split(".") for name in wanted}
    columns: dict[str, list[str]] = {name: [] for name in wanted}
    keys: list[str] = []
    seen: set[str] = set()
    row = 0

    def block() -> Mapping[str, pa.Array]:
        arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
        for values in columns.values():
            values.clear()
        return arrays

    for line in _lines(path, file, packed=packed):
        row += 1
        if not line.strip():
            continue
        try:
            there = json.loads(line)
        except (ValueError, RecursionError) as failure:
            raise ArgusError(
                f"{path}, line {row} is not JSON: {why(failure)}", "Is the file whole?", EXIT_USAGE
            ) from None
        if not isinstance(there, dict):
            raise ArgusError(f"{path}, line {row} is not an object", "One object a line is needed", EXIT_USAGE)
        keys = keys or [str(key) for key in there]
        for name, values in columns.items():
            value = there.get(name)
            if value is None and len(parts[name]) > 1:
                value = _inside(there, parts[name])
            if value is not None:
                seen.add(name)
            values.append(_text(value))
        if len(columns[wanted[0]]) == ROWS:
            if len(seen) < len(wanted):
                _check_names(path, [name for name in wanted if name not in seen], keys)
            yield block()
    if columns[wanted[0]]:
        if len(seen) < len(wanted):
            _check_names(path, [name for name in wanted if name not in seen], keys)
        yield block()


def _lines(path: Path, file: BinaryIO, *, packed: bool) -> Iterator[bytes]:
    rest, row = b"", 0
    try:
        with _stream(path, file, packed=packed) as stream:
            while chunk := stream.read(1 << 18):
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > LONGEST_LINE:
                    raise ArgusError(
                        f"{path}, line {row + len(lines) + 1} is longer than {LONGEST_LINE:,} bytes",
                        "One object a line is needed",
                        EXIT_USAGE,
                    )
                row += len(lines)
                yield from lines
    except (OSError, pa.ArrowException) as failure:
        raise ArgusError(f"{path}, after line {row}: {why(failure)}", "Is the file whole?", EXIT_USAGE) from None
    if rest.strip():
        yield rest


def _inside(there: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        if not isinstance(there, dict):
            return None
        there = there.get(part)
    return there


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        # Half of a pair of UTF-16, which JSON may escape, is not text.
        return value[:4096].encode("utf-8", "replace").decode()
    return repr(value) if isinstance(value, (float, bool, int)) else type(value).__name__


def _parquet(path: Path, file: BinaryIO, wanted: Sequence[str]) -> Iterator[Mapping[str, pa.Array]]:
    rows = 0
    try:
        found = parquet.opened(path, file, wanted)
        _check_names(path, wanted, found.schema_arrow.names)
        for group in range(found.metadata.num_row_groups):
            size = found.metadata.row_group(group).total_byte_size
            if size > LARGEST_GROUP:
                raise ArgusError(
                    f"{path}: row group {group} has {binary_size(size)}, over {binary_size(LARGEST_GROUP)}",
                    "Write smaller row groups",
                    EXIT_USAGE,
                )
        for batch in found.iter_batches(batch_size=ROWS, columns=list(wanted)):
            if not batch.num_rows:
                continue
            plain = {name: parquet.plain(path, name, batch.column(name)) for name in wanted}
            columns = {name: pc.fill_null(pc.cast(values, pa.string()), "") for name, values in plain.items()}
            rows += batch.num_rows
            yield columns
    except MemoryError:
        raise too_large(path) from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as failure:
        where = f" cannot be read after row {rows}" if rows else " cannot be read as Parquet"
        raise ArgusError(f"{path}{where}: {why(failure)}", "Is the file whole?", EXIT_USAGE) from None


def why(failure: BaseException) -> str:
    """The first line of an exception's message."""
    return printable((str(failure).splitlines() or [type(failure).__name__])[0][:160])
