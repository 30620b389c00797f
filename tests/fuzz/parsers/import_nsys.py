"""Recordings of Nsight Systems, exported to SQLite."""

from __future__ import annotations

import sqlite3
import struct

from argus.importers import nsys
from argus.model.errors import ArgusError
from tests.fuzz import storing
from tests.unit.importers.test_nsys import PIDS, export

ALLOWED = (ArgusError,)
CODE = ["argus.importers.nsys", "argus.importers.recordings.recording", "argus.importers.recordings.steps"]
SECONDS = 4.0
_NUMBERS = [0, 1, -1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 63)]
_TABLES = ("StringIds", "PROCESSES", "TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS",
           "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_RUNTIME",
           "NVTX_EVENTS")  # fmt: skip
_whole = storing.made(lambda path: export(path, steps=2, pids=PIDS[:1]))


def seeds() -> list[bytes]:
    older = storing.made(lambda path: export(path, steps=1, pids=PIDS[:1], without=("NVTX_EVENTS", "ANALYSIS_DETAILS")))
    changed = b"".join(struct.pack("<BBBq", table, column, 2, 5) for table in range(8) for column in range(3))
    return [b"\0" + _whole, b"\0" + older, *(b"\1" + changed[at : at + 22] for at in range(0, len(changed), 22))]


def run(data: bytes) -> None:
    """Bytes of the file, or values in its rows: SQLite checks little of what it is given."""
    image = data[1:] if data[:1] == b"\0" else _whole
    with storing.as_file(image, "report_rank0.sqlite") as path:
        if data[:1] != b"\0":
            _change(path, data[1:])
        storing.store_some(nsys.read(path, 0), data)


def _change(path: object, changes: bytes) -> None:
    db = sqlite3.connect(str(path), isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        for at in range(0, min(len(changes), 11 * 8), 11):
            piece = changes[at : at + 11].ljust(11, b"\0")
            table = _TABLES[piece[0] % len(_TABLES)]
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            kind, number = piece[2] % 6, struct.unpack("<q", piece[3:])[0]
            value = (number, _NUMBERS[number % len(_NUMBERS)], number / 7, piece[3:], piece[3:].decode("latin-1"),
                     None)[kind]  # fmt: skip
            where = "" if piece[2] & 0x40 else " WHERE rowid % 3 = 1"
            db.execute(f'UPDATE {table} SET "{columns[piece[1] % len(columns)]}" = ?{where}', (value,))
    finally:
        db.close()
