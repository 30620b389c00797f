"""Logs of NCCL's Inspector: a line of JSON a collective."""

from __future__ import annotations

import json
from typing import Any

from argus.importers.dumps import inspector
from argus.model.errors import ArgusError
from tests.fuzz import storing
from tests.unit.importers.dumps.test_ras import line

ALLOWED = (ArgusError,)
CODE = ["argus.importers.dumps.inspector"]
TOKENS = [
    b"\n",
    b"{}\n",
    b"null\n",
    b"{",
    b"}",
    b'"',
    b":",
    b"-1",
    b"1e999",
    b"NaN",
    b"[" * 500,
    b'"coll_perf": []',
    b'"rank": 1e30',
    b'"n_ranks": -1',
    b'"coll_sn": "x"',
    b'"dump_timestamp_us": 9223372036854775808',
    b'"\\ud800"',
    b'"coll_msg_size_bytes": 1e30',
    b'"id": ""',
    b"\0",
]


def seeds() -> list[bytes]:
    lines = [json.dumps(line(rank, seq, 900 + rank, size=2)) + "\n" for seq in (1, 2) for rank in (0, 1)]
    return ["".join(lines).encode(), lines[0].encode(), (lines[0] + "{cut").encode()]


def run(data: bytes) -> None:
    nowhere: Any = None
    with storing.as_file(data, "inspector.log") as path, storing.dropped():
        inspector.write(nowhere, "job", inspector.read_all([path]), str(path))
