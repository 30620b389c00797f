"""Nsight Systems recordings, as ``nsys export --type sqlite`` writes them: one process that used a GPU is one rank.

Tables and columns differ between versions, and with what was traced: what is missing is noted, and only what
is indispensable is required. Times are nanoseconds of the recording's own clock; ``ANALYSIS_DETAILS`` and
``TARGET_INFO_SESSION_START_TIME`` relate them to UTC.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from argus.importers.kineto import EPOCH_2000_NS, rank_in_name
from argus.importers.packed import too_large
from argus.importers.recordings.collectives import operation_name, take_collectives
from argus.importers.recordings.facts import NSYS, NSYS_VARIABLES, nsys_facts
from argus.importers.recordings.recording import CALL, MOST_NS, CpuRange, Progress, Recording, connect
from argus.importers.recordings.steps import marks_from
from argus.importers.regular import open_regular
from argus.model.environment import COMMAND
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.records import GPU_OP, GpuKind
from argus.system import files
from argus.system.redact import command_line

SUFFIXES = (".sqlite", ".db", ".sqlite3")
"""How names of exported recordings end."""
EXPORT_HINT = "Export one with: nsys export --type sqlite report.nsys-rep"
ROWS = 65_536
"""Rows of numbers that are Python objects at once."""
AT_ONCE = 256
"""The same of rows with texts."""

MAX_TABLES = 2_000
"""Recordings have some 100."""
MAX_TEXT_BYTES = 64 << 20
MAX_NAME = 16_384
"""Characters of a name that are read. Kernels of templates have some thousand."""
MAX_RANGE = 1_024
"""The same of a range: any number of ranges may refer to one name."""
MAX_PROCESSES = 1_024
"""Processes that used a GPU, in one recording: each becomes a rank."""
_ARGUMENT = re.compile(r"PROCESS_0:(?:COMMAND|ARGUMENT_(\d{1,4}))")
_ENVIRONMENT = 1 << 20
"""Characters of a property of the target that are read."""
_STEPS = 100_000
"""Instructions of SQLite between two looks at how many there were: about a millisecond."""
MIN_STEPS = 200_000_000
STEPS_A_PAGE = 400_000
"""What reading a file may take. A page of 4 KB has some 400 rows at most; each is read ten times at most, by 50
instructions, and sorted."""

Int = NDArray[np.int64]

_KERNEL, _MEMCPY, _MEMSET = (f"CUPTI_ACTIVITY_KIND_{what}" for what in ("KERNEL", "MEMCPY", "MEMSET"))
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_MAGIC = b"SQLite format 3\0"
_TIMED = f'"start" >= 0 AND "end" <= {MOST_NS}'
"""What a row's times may be: with the recording's own zero they fit into 64 bits."""
_OPERATIONS = {
    _KERNEL: {
        "correlation": "correlationId", "device": "deviceId", "context": "contextId", "stream": "streamId",
        "registers": "registersPerThread", "shared_static": "staticSharedMemory",
        "shared_dynamic": "dynamicSharedMemory", "graph": "graphId", "graph_node": "graphNodeId",
        "gx": "gridX", "gy": "gridY", "gz": "gridZ", "bx": "blockX", "by": "blockY", "bz": "blockZ",
    },
    _MEMCPY: {
        "correlation": "correlationId", "device": "deviceId", "context": "contextId", "stream": "streamId",
        "bytes": "bytes", "copy": "copyKind", "graph_node": "graphNodeId",
    },
    _MEMSET: {
        "correlation": "correlationId", "device": "deviceId", "context": "contextId", "stream": "streamId",
        "bytes": "bytes", "graph_node": "graphNodeId",
    },
}  # fmt: skip
_KINDS = {_KERNEL: GpuKind.KERNEL, _MEMCPY: GpuKind.MEMCPY, _MEMSET: GpuKind.MEMSET}
_STEP_WORDS = ("step", "iter", "batch")
_PHASE_WORDS = ("data", "load", "optim", "zero", "forward", "fwd", "fprop", "backward", "bwd", "bprop", "opt")
_RANGE = "eventType IN (59, 60)"
"""NVTX ranges, pushed and popped on a thread (59), or begun and ended (60)."""


@contextlib.contextmanager
def _lasting(path: Path, file: BinaryIO, size: int) -> Iterator[Path]:
    """A name by which an open file can be opened again, whatever becomes of its own: SQLite takes no open file, and
    resolves links by itself, also /proc/self/fd. Where root reads what others may exchange meanwhile, that is a copy.

    Args:
        path: The file.
        file: The same, open.
        size: Bytes that are copied at most.

    Raises:
        OSError: There is no room for it.
    """
    others = None
    if os.geteuid() == 0:
        try:
            others = files.changeable(path.absolute(), files.counted_as_root())
        except OSError:
            others = path, "it has another name by now"
    if others is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="argus-import-") as folder:
        copy = Path(folder) / "recording.sqlite"
        file.seek(0)
        left = size  # it may grow meanwhile
        try:
            if shutil.disk_usage(folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with copy.open("wb") as copied:
                while left > 0 and (part := file.read(min(left, 1 << 20))):
                    copied.write(part)
                    left -= len(part)
        except OSError as failure:
            raise OSError(failure.errno, f"no copy of it in {folder}: {failure.strerror}") from None
        yield copy


class _Export:
    """One open file, asked for what it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                size = self._whole(file)
                with _lasting(path, file, size) as name:
                    # Immutable: a folder that may not be written to is enough.
                    uri = f"file:{quote(str(name.absolute()))}?mode=ro&immutable=1"
                    self._db = sqlite3.connect(uri, uri=True)  # which opens it
        except FileNotFoundError:
            raise ArgusError(f"{path} does not exist", EXPORT_HINT, EXIT_UNAVAILABLE) from None
        except (OSError, sqlite3.Error) as failure:
            reason = getattr(failure, "strerror", None) or failure
            raise ArgusError(f"{path} cannot be read: {reason}", "", EXIT_UNAVAILABLE) from None
        self._db.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
        self._bound(size)
        self.columns: dict[str, dict[str, str]] = {}
        # No views: they run what the file's maker wrote, perhaps for ever.
        tables = self.rows("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'")
        if len(tables) > MAX_TABLES:
            self._db.close()
            raise ArgusError(f"{path} has {len(tables):,} tables, so it is not a recording", EXPORT_HINT, EXIT_USAGE)
        for (table,) in tables:
            columns = self.rows("SELECT name FROM pragma_table_info(?)", (str(table),))
            self.columns[str(table)] = {str(name).lower(): str(name) for (name,) in columns}

    def close(self) -> None:
        self._db.close()

    def _bound(self, size: int) -> None:
        """Bounds what reading may take: a file of so many bytes may hold whatever its maker chose."""
        self._db.execute("PRAGMA trusted_schema = OFF")
        if sys.version_info >= (3, 11):
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT_BYTES)
            self._db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self._steps_left = MIN_STEPS + size // max(self.page_bytes, 512) * STEPS_A_PAGE
        self._db.set_progress_handler(self._count, _STEPS)

    def _count(self) -> bool:
        """Whether SQLite is to stop: it has done far more than the file's size calls for."""
        self._steps_left -= _STEPS
        return self._steps_left < 0

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query that has few."""
        return list(self.each(sql, parameters))

    def each(self, sql: str, parameters: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, of which memory holds some."""
        try:
            cursor = self._db.execute(sql, parameters)
            while batch := cursor.fetchmany(AT_ONCE):
                yield from batch
        except (sqlite3.Error, ValueError) as failure:
            raise self._unreadable(failure) from None

    def _whole(self, file: BinaryIO) -> int:
        """The file's size. Checks that it is what its header declares
        (https://www.sqlite.org/fileformat.html#the_database_header)."""
        head = file.read(100)
        if not head:
            raise ArgusError(f"{self.path} is empty", EXPORT_HINT, EXIT_USAGE)
        if not head.startswith(_MAGIC):
            raise ArgusError(f"{self.path} is not an SQLite file", EXPORT_HINT, EXIT_USAGE)
        there = file.seek(0, os.SEEK_END)
        page = int.from_bytes(head[16:18], "big")
        self.page_bytes = 65_536 if page == 1 else page
        # The number of pages counts only if the version that wrote it last is the one that changed the file last.
        counted = len(head) == 100 and head[24:28] == head[92:96]
        wanted = int.from_bytes(head[28:32], "big") * self.page_bytes if counted else 100
        if there < wanted:
            raise ArgusError(
                f"{self.path} is cut off at byte {there:,} of {wanted:,}"
                if counted
                else f"{self.path} is cut off at byte {there:,}",
                "Copy or export it again",
                EXIT_USAGE,
            )
        return there

    def _unreadable(self, failure: Exception) -> ArgusError:
        if self._steps_left < 0:
            text = f"{self.path} takes far longer to read than a recording of its size: it is not read"
            return ArgusError(text, EXPORT_HINT, EXIT_USAGE)
        return ArgusError(
            f"{self.path} cannot be read: {failure}{self._damaged()}", "It may be damaged. Export it again", EXIT_USAGE
        )

    def _damaged(self) -> str:
        """Where SQLite's own check finds the first damage; empty: it names no place."""
        # SQLite's message may hold the file's own bytes, which may be no UTF-8, or be empty.
        with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
            (message,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            # "On tree page 655 cell 10: …", "Tree 12 page 34: …", "Page 7: never used"
            if page := re.search(r"page (\d+)(?! of)", message, re.IGNORECASE):
                return f", its page at byte {(int(page[1]) - 1) * self.page_bytes:,} is damaged"
        return ""

    def integers(self, sql: str, width: int) -> Int:
        """Rows of integers, shape (n, width)."""
        parts = [np.empty((0, width), np.int64)]
        try:
            cursor = self._db.execute(sql)
            while batch := cursor.fetchmany(ROWS):
                parts.append(np.array(batch, np.int64).reshape(-1, width))
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as failure:
            raise self._unreadable(failure) from None
        return np.concatenate(parts)

    def has(self, table: str, *columns: str) -> bool:
        return table in self.columns and all(column.lower() in self.columns[table] for column in columns)

    def column(self, table: str, name: str, default: str = "0") -> str:
        """A column, or what stands for it where this version has none or no value."""
        return f'COALESCE("{name}", {default})' if self.has(table, name) else default

    def strings(self, ids: Int) -> dict[int, str]:
        """Texts by id."""
        if not self.has("StringIds", "id", "value"):
            return {}
        wanted = np.unique(ids).tolist()
        out: dict[int, str] = {}
        for low in range(0, len(wanted), 500):
            part = wanted[low : low + 500]
            marks = ",".join("?" * len(part))
            sql = f"SELECT id, substr(value, 1, {MAX_NAME}) FROM StringIds WHERE id IN ({marks})"
            for number, text in self.each(sql, part):
                out[number] = str(text)
        return out


def read(path: Path, place: int, progress: Progress = lambda what, share: None) -> list[Recording]:
    """Reads one export: a recording for each process that used a GPU.

    Args:
        path: The file.
        place: The first rank to give where the recording has none.
        progress: Called with how far it is.

    Raises:
        ArgusError: It cannot be read, is not an export, or has no GPU activity; in one line.
    """
    try:
        with contextlib.closing(_Export(path)) as export:
            return _read(export, path, place, lambda share: progress(f"reading {path.name}", share))
    except MemoryError:
        raise too_large(path) from None


def _read(export: _Export, path: Path, place: int, progress: object) -> list[Recording]:
    assert callable(progress)
    if not export.has("StringIds") and not any(table in export.columns for table in (*_OPERATIONS, _RUNTIME)):
        some = ", ".join(list(export.columns)[:4]) or "no table"
        what = f"not an export of Nsight Systems: it has {some}"
        raise ArgusError(f"{path} is SQLite, but {what}", EXPORT_HINT, EXIT_USAGE)
    base, zero = _zero(export)
    ops, of_process, names = _operations(export)
    progress(0.4)
    calls, call_process, functions = _calls(export)
    progress(0.7)
    if not len(ops) and not len(calls):
        raise ArgusError(f"{path} has no CUDA activity", "Record it with: nsys profile --trace=cuda,nvtx", EXIT_USAGE)
    untimed = sum(
        count
        for table in (*_OPERATIONS, _RUNTIME)
        if export.has(table, "start", "end")
        for (count,) in export.rows(f'SELECT count() FROM "{table}" WHERE "end" >= "start" AND NOT ({_TIMED})')
    )
    used = np.unique(of_process) if len(ops) else np.unique(call_process)
    if len(used) > MAX_PROCESSES:
        what = f"{len(used):,} processes that used a GPU, more than {MAX_PROCESSES:,}"
        raise ArgusError(f"{path} has {what}", EXPORT_HINT, EXIT_USAGE)
    ranges = _ranges(export)
    progress(0.9)
    processes: dict[int, str] = {}
    if export.has("PROCESSES", "globalPid", "name"):
        sql = f"SELECT CAST(globalPid AS INTEGER), substr(name, 1, {MAX_NAME}) FROM PROCESSES"
        known = export.each(f"{sql} WHERE globalPid IS NOT NULL")
        processes = {key >> 24: str(name or "") for key, name in known}
    notes = [
        f"this export has no {what}"
        for table, what in ((_RUNTIME, "CUDA calls: launches are not known"), (_KERNEL, "kernels"))
        if not export.has(table)
    ]
    out, facts = [], _facts(export)
    alone = rank_in_name(path.name) if len(used) == 1 else None
    for number, process in enumerate(used.tolist()):
        rank, source = (place + number, "order") if alone is None else (alone, "file name")
        recording = Recording(
            str(path), "nsys", rank, source, process & 0xFFFFFF, 0, _host(export), processes.get(process, ""), zero=zero
        )
        recording.notes = list(notes)
        recording.facts = dict(facts)
        if number == 0:  # of the file, once
            recording.losses["rows_of_impossible_times"] = int(untimed)
        ops_of_process = ops[of_process == process].copy()
        ops_of_process["pid"] = recording.pid
        calls_of_process = calls[call_process == process].copy()
        for name in ("start_ns", "end_ns"):
            ops_of_process[name] += np.uint64(base)
        calls_of_process["ts_ns"] += base
        recording.symbols = _own(names, ops_of_process["name"])
        recording.functions = _own(functions, calls_of_process["function"])
        connect(recording, calls_of_process, ops_of_process)
        named = ranges.get(process, [])
        take_collectives(recording, _collectives(named, base), {})
        recording.ranges = [(text, begin + base, end + base, tid & 0xFFFFFF) for text, begin, end, tid in named]
        recording.marks, recording.marked_by = marks_from(recording.ranges)
        out.append(recording)
    return out


def _own(names: list[str], places: NDArray[Any]) -> list[str]:
    """The first of the names, and those that are used; ``places`` become their places among these."""
    used = np.unique(np.append(places, 0))
    places[...] = np.searchsorted(used, places)
    return [names[place] for place in used.tolist()] if names else []


def _zero(export: _Export) -> tuple[int, str]:
    """Wall time of the recording's time 0, ns, and what time 0 is in words."""
    wall = started = None
    if export.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        for (value,) in export.rows("SELECT CAST(utcEpochNs AS INTEGER) FROM TARGET_INFO_SESSION_START_TIME LIMIT 1"):
            wall = value
    if export.has("ANALYSIS_DETAILS", "startTime"):
        for (value,) in export.rows("SELECT CAST(startTime AS INTEGER) FROM ANALYSIS_DETAILS LIMIT 1"):
            started = value
    if wall is None or not EPOCH_2000_NS <= wall - (started or 0) <= MOST_NS:
        return 0, "unknown: times are stored as if they counted from 1970"
    base = wall - (started or 0)
    return (
        (base, "1970 (UTC)") if 0 <= base < MOST_NS else (0, "unknown: times are stored as if they counted from 1970")
    )


def _host(export: _Export) -> str:
    if export.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        for (value,) in export.rows("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname' LIMIT 1"):
            return str(value) or "unknown"
    return "unknown"


def _facts(export: _Export) -> dict[str, str]:
    properties: dict[str, str] = {}
    if export.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        wanted = (*NSYS, NSYS_VARIABLES)
        marks = ", ".join("?" * len(wanted))
        sql = f"SELECT name, substr(value, 1, {_ENVIRONMENT}) FROM TARGET_INFO_SYSTEM_ENV WHERE name IN ({marks})"
        found = export.rows(f"{sql} LIMIT 64", wanted)
        properties = {str(name): str(value) for name, value in found if value is not None}
    gpus: list[tuple[Any, ...]] = []
    if export.has("TARGET_INFO_GPU", "name"):
        gpus = export.rows("SELECT substr(name, 1, 256) FROM TARGET_INFO_GPU LIMIT 64")
    facts = nsys_facts(properties, (name for (name,) in gpus))
    return facts | ({COMMAND: command} if (command := _command(export)) else {})


def _command(export: _Export) -> str:
    """What was profiled, without secrets; empty: the export does not say it."""
    if not export.has("META_DATA_CAPTURE", "name", "value"):
        return ""
    words: dict[int, str] = {}
    sql = "SELECT name, substr(value, 1, 4096) FROM META_DATA_CAPTURE WHERE name GLOB 'PROCESS_0:*' LIMIT 1024"
    for name, value in export.rows(sql):
        place = _ARGUMENT.fullmatch(str(name))
        if place and value is not None:
            words[int(place[1]) + 1 if place[1] else 0] = str(value)
    return command_line([word for _, word in sorted(words.items())])


def _operations(export: _Export) -> tuple[NDArray[np.void], Int, list[str]]:
    """GPU operations, their processes (globalPid without the thread's bits), names by id (the first is of none)."""
    parts, owners = [np.empty(0, GPU_OP)], [np.empty(0, np.int64)]
    texts: list[str] = [""]
    for table, fields in _OPERATIONS.items():
        if not export.has(table, "start", "end"):
            continue
        text = next((c for c in ("demangledName", "shortName", "mangledName") if export.has(table, c)), "")
        name = export.column(table, text) if text and table == _KERNEL else "0"
        wanted = [f'"{export.columns[table]["start"]}"', f'"{export.columns[table]["end"]}"',
                  export.column(table, "globalPid"), name]  # fmt: skip
        wanted += [export.column(table, column) for column in fields.values()]
        chosen = f'"start" BETWEEN 0 AND "end" AND "end" < {MOST_NS}'
        rows = export.integers(f'SELECT {", ".join(wanted)} FROM "{table}" WHERE {chosen}', len(wanted))
        ops = np.zeros(len(rows), GPU_OP)
        ops["start_ns"], ops["end_ns"], ops["kind"] = rows[:, 0], rows[:, 1], _KINDS[table]
        values = dict(zip(fields, rows.T[4:], strict=True))
        for place, axis in enumerate("xyz"):
            if f"g{axis}" in values:
                ops["grid"][:, place], ops["block"][:, place] = values.pop(f"g{axis}"), values.pop(f"b{axis}")
        for field, column in values.items():
            ops[field] = column
        if table == _KERNEL:
            ids, inverse = np.unique(rows[:, 3], return_inverse=True)
            known = export.strings(ids)
            texts = ["", *(known.get(number, "") for number in ids.tolist())]
            ops["name"] = 1 + inverse
        parts.append(ops)
        owners.append(rows[:, 2] >> 24)
    return np.concatenate(parts), np.concatenate(owners), texts


def _calls(export: _Export) -> tuple[NDArray[np.void], Int, list[str]]:
    """CUDA calls, their processes, and the functions' names."""
    if not export.has(_RUNTIME, "start", "end"):
        return np.empty(0, CALL), np.empty(0, np.int64), []
    columns = ("globalTid", "correlationId", "nameId", "returnValue")
    wanted = ", ".join(export.column(_RUNTIME, column) for column in columns)
    chosen = f'start BETWEEN 0 AND "end" AND "end" < {MOST_NS}'
    rows = export.integers(f'SELECT start, "end", {wanted} FROM {_RUNTIME} WHERE {chosen}', 6)
    calls = np.zeros(len(rows), CALL)
    calls["ts_ns"], calls["duration_ns"] = rows[:, 0], rows[:, 1] - rows[:, 0]
    calls["tid"], calls["correlation"] = rows[:, 2] & 0xFFFFFF, rows[:, 3] & 0xFFFFFFFF
    calls["result"] = rows[:, 5]
    ids, inverse = np.unique(rows[:, 4], return_inverse=True)
    known = export.strings(ids)
    calls["function"] = inverse
    return calls, rows[:, 2] >> 24, [known.get(number, f"function {number}") for number in ids.tolist()]


def _ranges(export: _Export) -> dict[int, list[tuple[str, int, int, int]]]:
    """NVTX ranges that may be steps, phases or collectives: (text, begin, end, globalTid), by process. Equal texts are
    one object."""
    if not export.has("NVTX_EVENTS", "start", "end", "globalTid"):
        return {}
    words = (*_STEP_WORDS, *_PHASE_WORDS, "nccl", "record_param_comms")
    texts: dict[int, str] = {}
    if export.has("NVTX_EVENTS", "textId") and export.has("StringIds", "id", "value"):
        cut = f"substr(value, 1, {MAX_RANGE})"
        likes = " OR ".join(f"{cut} LIKE '%{word}%'" for word in words)
        texts = {number: str(text) for number, text in export.each(f"SELECT id, {cut} FROM StringIds WHERE {likes}")}
    own = f"substr(n.text, 1, {MAX_RANGE})" if export.has("NVTX_EVENTS", "text") else "NULL"
    shared = "n.textId" if texts else "NULL"
    likes = " OR ".join(f"t LIKE '%{word}%'" for word in words)
    kinds = f"AND n.{_RANGE}" if export.has("NVTX_EVENTS", "eventType") else ""
    sql = (
        f'SELECT {own} AS t, {shared} AS number, CAST(n.start AS INTEGER), CAST(n."end" AS INTEGER), '
        "CAST(n.globalTid AS INTEGER) FROM NVTX_EVENTS n "
        f'WHERE n.start + n."end" + n.globalTid IS NOT NULL AND n."end" >= n.start AND {_TIMED} {kinds} '
        f"AND (t IS NULL AND number IS NOT NULL OR {likes})"
    )
    ranges: dict[int, list[tuple[str, int, int, int]]] = {}
    once: dict[str, str] = {}
    for text, number, begin, end, tid in export.each(sql):
        name = texts.get(number) if text is None else once.setdefault(str(text), str(text))
        if name is not None and 0 <= begin < MOST_NS and 0 <= end < MOST_NS:
            ranges.setdefault(tid >> 24, []).append((name, begin, end, tid))
    return ranges


def _collectives(ranges: list[tuple[str, int, int, int]], base: int) -> list[CpuRange]:
    """Collectives of PyTorch's ``record_param_comms`` and ``nccl:`` ranges, and where it has none, of NCCL's own."""
    ordered = sorted(((tid & 0xFFFFFF, begin, -end, text) for text, begin, end, tid in ranges))
    out: list[CpuRange] = []
    for tid, begin, end, text in ordered:
        of_torch = text.startswith(("nccl:", "record_param_comms"))
        if not of_torch and not re.match(r"nccl[A-Z]", text):
            continue
        op = "" if text.startswith("record_param_comms") else operation_name(text)
        if not of_torch and not op:
            continue  # a group's mark, a question
        around = out[-1] if out and out[-1].tid == tid and out[-1].end_ns >= -end + base else None
        if around is None:
            out.append(CpuRange(op, begin + base, -end + base, tid))
        elif op and not around.op:
            out[-1] = CpuRange(op, around.begin_ns, around.end_ns, tid)
    return out
