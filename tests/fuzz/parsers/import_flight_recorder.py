"""PyTorch's dumps of NCCL calls: pickles of containers, numbers and strings, or JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from argus.importers.dumps import dumps, flight_recorder
from argus.model.errors import ArgusError
from tests.builders import flight_dumps
from tests.builders.flight_dumps import Fault
from tests.fuzz import storing

ALLOWED = (ArgusError,)
CODE = ["argus.importers.dumps.flight_recorder", "argus.importers.dumps.plain_pickle", "argus.importers.dumps.dumps"]
TOKENS = [
    b"\x80\x02",
    b"}q\x00",
    b"]",
    b"(",
    b"u.",
    b"h\x00",
    b"\x8a\xff",
    b"\x8b\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
    b"cos\nsystem\n",
    b"R",
    b"\x81",
    b"N.",
    b'"version"',
    b'"entries"',
    b'"pg_config"',
    b"[" * 500,
    b'"input_sizes": [[-1]]',
    b"1e999",
    b"-9223372036854775809",
    b'"state": "scheduled"',
    b"null",
]


def seeds() -> list[bytes]:
    hang = flight_dumps.run(flight_dumps.job(2, 1, 1, steps=1, layers=1), [Fault("cpu", 1, 3)])
    found = []
    for as_json in (False, True):
        with storing.as_file(b"", "unused") as path:
            folder = flight_dumps.write(path.parent / f"seeds{as_json}", hang, as_json=as_json, ring=4)
        found += [file.read_bytes() for file in sorted(folder.iterdir())]
    return found


def run(data: bytes) -> None:
    nowhere: Any = None
    with storing.as_file(data, "rank_1") as path, storing.dropped():
        dumps.write(nowhere, "job", [flight_recorder.read(path)], Counter())
