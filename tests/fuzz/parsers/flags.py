"""Moments that somebody flags: rows that whoever may write to the store may have written."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from argus.live.sides import flags
from argus.live.sides.flags import FAR_NS, MOST, FlagWatcher
from tests.fuzz.harness import Bytes

ALLOWED = ()
CODE = ["argus.live.sides.flags"]
JOBS = [("llama", 7), ("other", 8)]


def seeds() -> list[bytes]:
    row = bytes([0]) + time.time_ns().to_bytes(8, "little") * 2 + bytes([2, 1, 0, 0, 0, 2, 0, 0, 0, 3]) + b"why"
    return [row * count for count in (1, 3)]


def run(data: bytes) -> None:
    taken = Bytes(data)
    rows: list[tuple[Any, ...]] = []
    for _ in range(min(len(data) // 16, MOST)):
        job, run_number = JOBS[taken.number() % 2] if taken.number() else ("strange", taken.number(4))
        times = [int.from_bytes(taken.take(8), "little", signed=True) for _ in range(2)]
        ranks = [taken.number(4) for _ in range(taken.number() % 8)]
        rows.append((job, run_number, *times, ranks, taken.take(taken.number()).decode(errors="replace"), 5))
    columns: dict[str, Any] = {}
    for place, name in enumerate(("job", "run", "begin_ns", "end_ns", "ranks", "why", "asked_ms")):
        values = [row[place] for row in rows]
        if name in ("job", "ranks", "why"):
            column = np.empty(len(values), object)
            column[:] = values
        else:
            column = np.array(values, np.int64)
        columns[name] = column
    watcher = FlagWatcher(SimpleNamespace(spooled=False))  # type: ignore[arg-type]
    watcher._jobs = dict.fromkeys(JOBS, SimpleNamespace())  # type: ignore[arg-type]
    with mock.patch.object(flags, "query_columns", return_value=columns):
        watcher.ask()
        now = time.time_ns()
        for _, flag in watcher.take():
            assert flag.begin_ns < flag.end_ns
            assert now - FAR_NS - 10**10 <= flag.begin_ns
            assert flag.end_ns <= now + FAR_NS + 10**10
        watcher.ask()
        assert not watcher.take(), "each flag is taken once"
