"""A spool: rows as files in a folder, for a machine that has neither an engine nor a server at hand.

Every batch that the writer would send becomes one file ``NNNNNN-<table>.arrow`` (Arrow IPC, compressed) that holds, in
its schema's metadata, the table, the batch's deduplication token and a checksum of the whole file. ``load.py`` sends
the files to a store under the same tokens, so that a folder loaded twice is stored once. What a writer spills to disk
while its store is away (``spill.py``) has the same form.

A file appears whole or not at all; its number is the order of writing. Several tracers may share a folder.

What a file says is compared with the schema before anything is sent: its table, its columns, the form of its token.
Its values are converted to the types of the columns, so that what is compared with a store is what the store would
hold. A folder that others may write to is refused (``argus.system.files``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import binary_size
from argus.store import limits
from argus.store.arrow import as_declared
from argus.store.failures import disk_full
from argus.store.schema_files import table_columns
from argus.system import files

_NAME = re.compile(r"(\d{6,})-(\w+)\.arrow")
_TABLE, _TOKEN, _DOUBT, _SUM = b"argus.table", b"argus.token", b"argus.doubt", b"argus.sum"
_MARK, _ZERO = b"argus-crc32:", b"00000000"
"""The value of ``argus.sum``: the mark, and the CRC-32 (hexadecimal) of the file with zeros in that place. Arrow writes
metadata twice, at the beginning and at the end; both places count. A file stays one that any reader of Arrow takes."""
_GOOD_TOKEN = re.compile(r"[^\W_][\w./:@+-]{0,299}", re.ASCII)
"""``writer.py`` makes tokens of who writes, a session, the table and a number."""
MAX_FILE_BYTES = 512 << 20
"""A larger file is not read: a batch has at most ``writer.MAX_BYTES`` in memory, and less on disk."""
MAX_UNPACKED_BYTES = 1 << 30
"""Nor is one whose columns have more."""
UNFINISHED = ".part"


def prepare(folder: Path) -> None:
    """Creates a spool's folder.

    Raises:
        ArgusError: It cannot be, or may not be written to.
    """
    os.close(_opened(folder, create=True))


def _opened(folder: Path, *, create: bool = False) -> int:
    """A descriptor of a spool's folder, which may be written to.

    Raises:
        ArgusError: It cannot be, or others may change it.
    """
    try:
        fd = files.open_folder(folder, create=create)
        if not os.access(folder, os.W_OK | os.X_OK):
            os.close(fd)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as failure:
        raise _refused(folder, failure) from None
    return fd


def write(
    folder: Path, table: str, token: str, rows: pa.Table, *, sent_s: float = 0.0, number: int = 0, sync: bool = False
) -> Path:
    """Writes a batch and returns its file.

    Args:
        folder: The spool.
        table: The table of the rows.
        token: The batch's deduplication token.
        rows: Of ``arrow.to_arrow``'s types.
        sent_s: When the rows were first sent and no answer came, Unix time: a store may have them; 0: they were not.
        number: The lowest number that the file may get, where the caller knows it; 0: the folder is listed.
        sync: Whether to return only when the file would outlive a power cut (``fsync`` of file and folder).

    Raises:
        ArgusError: There is no room, or the folder cannot be written to; all of that may pass.
    """
    data = _encoded(table, token, rows, sent_s)
    try:
        fd = files.open_folder(folder)
    except FileNotFoundError:
        fd = _opened(folder, create=True)  # whoever has loaded what was there has removed it as well
    except OSError as failure:
        raise _refused(folder, failure) from None
    try:
        if not limits.has_room(fd, len(data)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return folder / _write(fd, table, data, number or 1 + max((n for n, _ in names(folder)), default=0), sync)
    except OSError as failure:
        raise _refused(folder, failure) from None
    finally:
        os.close(fd)


def _write(folder: int, table: str, data: memoryview, number: int, sync: bool) -> str:
    """Writes a file with the next free number into a folder, and returns its name."""
    while True:
        whole = f"{number:06}-{table}.arrow"
        part = whole + UNFINISHED
        try:
            # Whoever makes the unfinished file owns the number.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(part, flags, 0o600, dir_fd=folder)
        except FileExistsError:
            number += 1
            continue
        try:
            with open(fd, "wb") as sink:
                if _there(folder, whole):  # since the folder was listed
                    os.unlink(part, dir_fd=folder)
                    number += 1
                    continue
                sink.write(data)
                if sync:
                    sink.flush()
                    os.fsync(fd)
            os.rename(part, whole, src_dir_fd=folder, dst_dir_fd=folder)
            if sync:
                os.fsync(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        return whole


def _there(folder: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _encoded(table: str, token: str, rows: pa.Table, sent_s: float) -> memoryview:
    codec = next((name for name in ("zstd", "lz4") if pa.Codec.is_available(name)), None)
    metadata = {_SUM: _MARK + _ZERO, _TABLE: table, _TOKEN: token, **({_DOUBT: repr(sent_s)} if sent_s else {})}
    schema = rows.schema.with_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as out:
        out.write_table(rows.replace_schema_metadata(schema.metadata))
    data = bytearray(sink.getvalue())
    places = _sum_places(data)
    total = f"{zlib.crc32(data):08x}".encode()
    for place in places:
        data[place : place + len(total)] = total
    return memoryview(data)


def _sum_places(data: bytes | bytearray) -> tuple[int, ...]:
    """Where a file's checksum is: at its beginning and at its end; nowhere: it was written before there was one."""
    first = data.find(_MARK)
    return () if first < 0 else tuple(sorted({first + len(_MARK), data.rfind(_MARK) + len(_MARK)}))


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refused(folder: Path, failure: OSError) -> ArgusError:
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(f"spool://{folder}")
    reason = failure.strerror or str(failure)
    hint = "Name another: --store spool:///path"
    if isinstance(failure, files.Untrusted):
        hint = f"{hint}. {failure.fix}" if failure.fix else hint
        return ArgusError(f"the spool {folder} is not used: {reason}", hint, EXIT_UNAVAILABLE)
    return ArgusError(f"cannot write to the spool {folder}: {reason}", hint, EXIT_UNAVAILABLE)


def batch_files(folder: Path) -> list[tuple[int, Path]]:
    """The finished files of a spool, in order."""
    return [(number, folder / name) for number, name in sorted(names(folder))]


def table_of(file: Path) -> str:
    """The table that the name of a file says it is for; what it holds decides."""
    match = _NAME.fullmatch(file.name)
    return match.group(2) if match else ""


def names(folder: Path) -> list[tuple[int, str]]:
    """The numbers and names of a spool's finished files, in no order."""
    try:
        found = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise ArgusError(f"cannot read the folder {folder}: {failure.strerror}", "", EXIT_UNAVAILABLE) from None
    return [(int(match.group(1)), name) for name in found if (match := _NAME.fullmatch(name))]


@dataclass(frozen=True)
class Spooled:
    """One batch of a spool. Its rows have the types of the table's columns; some columns may be missing."""

    table: str
    token: str
    rows: pa.Table
    doubt: bool = False
    """Whether a store may have the rows already: they were sent, and no answer came."""
    sent_s: float = 0.0
    """When they were first sent, Unix time; 0: not known, or not before they were written."""


class Damaged(ArgusError):
    """A file of a spool that does not hold what was written."""


class Foreign(ArgusError):
    """A file of a spool with a table, a column or a token that this Argus does not have."""


def read(file: Path, *, summed: bool = False) -> Spooled:
    """Reads a file of a spool.

    Args:
        file: The file.
        summed: Whether to believe only what has a checksum; spools of older Argus have none.

    Raises:
        Damaged: Its content is not what was written, or does not fit the types of the columns.
        Foreign: It names what is not in the schema.
        ArgusError: It cannot be read.
    """
    try:
        with files.opened(file.parent) as folder:
            data = bytearray(files.read_at(folder, file.name, MAX_FILE_BYTES))
        places = _sum_places(data)
        ends = {bytes(data[place : place + len(_ZERO)]) for place in places}
        for place in places:
            data[place : place + len(_ZERO)] = _ZERO
        if (places or summed) and ends != {f"{zlib.crc32(data):08x}".encode()}:
            raise Damaged(f"{file.name} is damaged: its checksum is wrong")
        rows = _unpacked(file, data)
        rows.validate(full=True)
        metadata = rows.schema.metadata or {}
        table, token = metadata[_TABLE].decode(), metadata[_TOKEN].decode()
        # Before it was a time, it was just '1'.
        sent_s = float(metadata[_DOUBT]) if metadata.get(_DOUBT, b"1") != b"1" else 0.0
        _check_names(file, table, token, rows.schema.names)
        if zones := {field.type.tz for field in rows.schema if pa.types.is_timestamp(field.type)} - {"UTC", None}:
            raise Foreign(f"{file.name} has times of the zone {min(zones)[:80]!r}; Argus writes UTC")
        rows = as_declared(table, rows.replace_schema_metadata(None))
        return Spooled(table, token, rows, _DOUBT in metadata, sent_s)
    except MemoryError:
        raise Damaged(f"{file.name} is not read: it unpacks to more than Argus may take of memory") from None
    except KeyError:
        raise Damaged(f"{file.name} is no file of a spool: it names no table") from None
    except (pa.ArrowException, ValueError) as failure:
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise Damaged(f"{file.name} is damaged: {reason}") from None
    except files.Untrusted as failure:
        raise Damaged(f"{file.name} is not read: {failure.strerror}") from None
    except OSError as failure:
        if failure.errno is None:  # pyarrow's: the file ends before what it says
            raise Damaged(f"{file.name} is damaged: {str(failure).splitlines()[0]}") from None
        raise ArgusError(f"{file.name} cannot be read: {failure.strerror}") from None


def _unpacked(file: Path, data: bytearray) -> pa.Table:
    """The rows, part by part: compressed ones of 95 kB were 5.7 GB. One part alone has the bound of the process's
    memory (``limits.frugal``)."""
    reader = pa.ipc.open_file(pa.py_buffer(data))
    parts, size = [], 0
    for number in range(reader.num_record_batches):
        parts.append(reader.get_batch(number))
        # What its own size says is believed by no more than that: ``nbytes`` reads where a length in the file says.
        size += parts[-1].get_total_buffer_size()
        if size > MAX_UNPACKED_BYTES:
            raise Damaged(f"{file.name} is not read: it unpacks to more than {binary_size(MAX_UNPACKED_BYTES)}")
    return pa.Table.from_batches(parts, reader.schema)


def _check_names(file: Path, table: str, token: str, columns: list[str]) -> None:
    """Compares what a file says with the schema: names end up in statements, tokens in the journal.

    Raises:
        Foreign: One is none of Argus's.
    """
    known = table_columns().get(table)
    if known is None:
        raise Foreign(f"{file.name} is for the table {table[:80]!r}, which this Argus does not have")
    if unknown := set(columns) - known.keys():
        raise Foreign(f"{file.name} has the column {min(unknown)[:80]!r}, which {table} does not have")
    if len(set(columns)) < len(columns):
        raise Foreign(f"{file.name} has a column twice")
    if not _GOOD_TOKEN.fullmatch(token):
        raise Foreign(f"{file.name} has a token that Argus did not make")


def newest_run(folder: Path, end: int = 2**32) -> int:
    """The highest number of a run in a spool that is below ``end``; 0: none."""
    newest = 0
    for _, file in batch_files(folder):
        if file.name.endswith("-jobs.arrow"):
            with contextlib.suppress(ArgusError):
                rows = read(file).rows
                if "run" in rows.column_names:
                    runs = rows.column("run").to_numpy()
                    newest = max(newest, int(np.max(runs[runs < end], initial=0)))
    return newest
