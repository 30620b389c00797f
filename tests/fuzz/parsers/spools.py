"""Files of a spool: Arrow with a table, a token and a checksum in its metadata."""

from __future__ import annotations

import zlib

from argus.model.errors import ArgusError
from argus.store import spool
from argus.store.arrow import to_arrow
from argus.store.schema_files import table_columns
from tests.fuzz import storing

ALLOWED = (ArgusError,)
CODE = ["argus.store.spool"]
SECONDS = 4.0
TOKENS = [b"argus.table", b"argus.token", b"argus.sum", b"argus.doubt", b"argus-crc32:", b"coverage", b"jobs", b"nan"]
COVERAGE = {
    "job": "j", "run": 1, "host": "h", "counter": ["lost", "seen"], "ts": 1_790_000_000 * 10**9, "value": 0,
    "loss": False, "version": 1,
}  # fmt: skip
FLAG = {"job": "j", "run": 1, "ts": [10**18], "until": [10**18 + 5], "ranks": [[1, 2]], "why": "w"}


def seeds() -> list[bytes]:
    found = []
    for table, rows in (("coverage", COVERAGE), ("raw_requests", FLAG)):
        for sent_s in (0.0, 1.7e9):
            found.append(bytes(spool._encoded(table, "trace/host/1/x/0", to_arrow(table, rows), sent_s)))
    return [mode + data for data in found for mode in (b"\0", b"\1")]


def run(data: bytes) -> None:
    """The second byte: whether its checksum is made to fit, so that more than that is looked at."""
    image = bytearray(data[1:])
    places = spool._sum_places(image)
    if data[:1] != b"\1" and all(place + 8 <= len(image) for place in places):
        for place in places:
            image[place : place + 8] = spool._ZERO
        total = f"{zlib.crc32(image):08x}".encode()
        for place in places:
            image[place : place + 8] = total
    with storing.as_file(bytes(image), "000001-coverage.arrow") as path:
        found = spool.read(path, summed=bool(data[:1] == b"\2"))
    assert set(found.rows.schema.names) <= table_columns()[found.table].keys()
    assert spool._GOOD_TOKEN.fullmatch(found.token)
    found.rows.validate(full=True)
    to_arrow(found.table, found.rows) if found.rows.num_rows and not _lacks(found) else None


def _lacks(found: spool.Spooled) -> bool:
    """Whether ClickHouse would have to fill in columns, which the writer does not."""
    return True
