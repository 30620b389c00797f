"""Reports of NCCL's RAS, as JSON that may lack a comma."""

from __future__ import annotations

import json
from typing import Any

from argus.importers.dumps import ras
from argus.model.errors import ArgusError
from tests.fuzz import storing
from tests.unit.importers.dumps.test_ras import report

ALLOWED = (ArgusError,)
CODE = ["argus.importers.dumps.ras"]
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"\n "',
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"[" * 500,
    b'"rank": -5',
    b'"rank": 1e30',
    b'"size": 99999999999',
    b'"timestamp": ""',
    b'"collective_counts": []',
    b'"considered_dead": 3',
    b'"missing_ranks": {}',
    b'"\\ud800"',
    b'"hash": ""',
    b'"pid": "x"',
]


def seeds() -> list[bytes]:
    texts = [json.dumps(report([9, 9, 8, 9], gone=gone)) for gone in ((), (1,))]
    return [text.encode() for text in texts] + [json.dumps(report([1, 2]), indent=1).replace(",\n", "\n", 3).encode()]


def run(data: bytes) -> None:
    nowhere: Any = None
    with storing.as_file(data, "0.json") as path, storing.dropped():
        one = ras.read(path)
        ras.write(nowhere, "job", [one, one])
