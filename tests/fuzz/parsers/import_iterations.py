"""Step times as a table of text."""

from __future__ import annotations

from typing import Any

from argus.importers import iterations_csv
from argus.importers.iterations_csv import Columns
from argus.model.errors import ArgusError
from tests.fuzz import storing

ALLOWED = (ArgusError,)
CODE = ["argus.importers.iterations_csv"]
TOKENS = [b",", b"\n", b"\r\n", b'"', b"worker", b"step", b"ms", b"\0", b"\xff", b"nan", b"1e308", b"3.0", b" ", b"_",
          "１".encode(), b"\n\n", b",,,"]  # fmt: skip


def seeds() -> list[bytes]:
    rows = [f"{rank},{step},{5 + rank * 0.5}" for step in range(4) for rank in range(2)]
    named = [f"host{rank},{step},{5 + rank * 0.5}" for step in range(4) for rank in range(2)]
    return ["\n".join(["worker,step,ms", *lines, ""]).encode() for lines in (rows, named)] + [
        b'"worker","step","ms"\r\n"0","1.0","7"\r\n'
    ]


def run(data: bytes) -> None:
    nowhere: Any = None
    with storing.as_file(data, "times.csv") as path, storing.dropped():
        iterations_csv.write(nowhere, "job", path, Columns("worker", "step", "ms"))
