"""Rows into the store: Argus's writer against clickhouse-connect's own column insert; small inserts; the spill.

Ours: numpy columns through ``Writer`` (conversion to Arrow, a token, the answer awaited). Reference: the same rows, as
columns of Python values made ready beforehand, through ``Client.insert(column_oriented=True)`` of the same client. Both
go to the table ``collectives`` of one embedded engine, in turn, ``ROWS`` at a time. The ratio is of rows a second,
median of rounds; ``cpu``: CPU time of the writing process, which shares its node with the job. ``small_N``: inserts a
second of N rows each, one after the other. ``spill``: rows a second to disk, with fsync, and from there into the store.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema
from argus.store.spill import Place
from argus.store.writer import Writer, load_spilled, to_arrow
from benches import Result

ROWS = 200_000
SMALL = (1, 10, 100, 1_000, 10_000)
SMALL_S = 1.0
T0 = 1_700_000_000_000_000_000


def _columns(count: int, seed: int) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {
        "job": "bench", "run": 1, "rank": np.repeat(np.arange(8), -(-count // 8))[:count], "host": "node", "pid": 77,
        "tid": 78, "comm": 5, "op": "AllReduce", "seq": np.arange(count), "bytes": np.full(count, 1 << 20),
        "count": 1 << 18, "dtype": "float32", "redop": "sum", "peer": -1, "stream": 0,
        "ts": T0 + np.cumsum(chance.integers(1000, 100_000, count)), "duration_ns": chance.integers(900, 9000, count),
        "result": 0, "in_group": False,
    }  # fmt: skip


def _spread(columns: dict[str, Any], count: int) -> list[list[Any]]:
    return [c.tolist() if isinstance(c, np.ndarray) else [c] * count for c in columns.values()]


def _small(store: Store) -> dict[str, float]:
    found = {}
    for size in SMALL:
        batch = to_arrow("collectives", _columns(size, 1))
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < SMALL_S:
            store.insert("collectives", batch, f"small/{size}/{done}/{begin}")
            done += 1
        found[f"small_{size}_inserts_per_s"] = done / (time.perf_counter() - begin)
        found[f"small_{size}_rows_per_s"] = found[f"small_{size}_inserts_per_s"] * size
    return found


def _spill(store: Store, folder: Path) -> dict[str, float]:
    place = Place(folder, 4 << 30)
    away = Writer(open_store("clickhouse://127.0.0.1:1/none"), source="bench", place=place)
    begin = time.perf_counter()
    for part in range(4):
        away.append("collectives", _columns(ROWS, part))
        away.flush(timeout_s=0)
    to_disk = time.perf_counter() - begin
    assert sum(away.close(timeout_s=0).on_disk.values()) == 4 * ROWS
    begin = time.perf_counter()
    assert load_spilled(store, folder).rows["collectives"] == 4 * ROWS
    back = time.perf_counter() - begin
    return {"spill_rows_per_s": 4 * ROWS / to_disk, "replay_rows_per_s": 4 * ROWS / back}


def run(rounds: int) -> Result:
    rows: dict[str, list[float]] = {"Argus's writer": [], "column insert": []}
    used_s: dict[str, list[float]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder, open_store(f"chdb://{folder}/store") as store:
        ensure_schema(store)
        with Writer(store, source="bench") as writer, store.lease() as client:
            for number in range(rounds + 1):
                columns = _columns(ROWS, number)
                ready = _spread(columns, ROWS)
                client.command("TRUNCATE TABLE collectives")  # else merges of what went before are measured as well
                begin, cpu = time.perf_counter(), time.process_time()
                writer.append("collectives", columns)
                assert writer.flush(), writer.last_error
                ours = time.perf_counter() - begin, time.process_time() - cpu
                begin, cpu = time.perf_counter(), time.process_time()
                client.insert("collectives", ready, column_names=list(columns), column_oriented=True)
                reference = time.perf_counter() - begin, time.process_time() - cpu
                if number:  # the first warms up
                    for name, (seconds, used) in zip(rows, (ours, reference), strict=True):
                        rows[name].append(ROWS / seconds)
                        used_s[name].append(used)
        costs = {f"cpu_ns_per_row ({name})": statistics.median(s) / ROWS * 1e9 for name, s in used_s.items()}
        more = costs | _small(store) | _spill(store, Path(folder) / "spill")
    ratio = statistics.median(rows["Argus's writer"]) / statistics.median(rows["column insert"])
    return Result(f"blocks of {ROWS:,} rows of 19 columns into the embedded store", "rows/s", rows, ratio, more)
