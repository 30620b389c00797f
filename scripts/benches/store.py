"""Rows into the store, and out of a large job's: writer, small inserts, spill, and queries at 1,024 and 10,240 ranks.

Ours: numpy columns through ``Writer`` (conversion to Arrow, a token, the answer awaited). Reference: the same rows, as
columns of Python values made ready beforehand, through ``Client.insert(column_oriented=True)`` of the same client. Both
go to the table ``collectives`` of one embedded engine, in turn, ``ROWS`` at a time. The ratio is of rows a second,
median of rounds; ``cpu``: CPU time of the writing process, which shares its node with the job. ``small_N``: inserts a
second of N rows each, one after the other. ``spill``: rows a second to disk, with fsync, and from there into the store.
``engine_mb``: what the engine takes in addition while it stores so much, sent at once, and in batches of the writer's.

``LARGE``: 100 steps of jobs of that many ranks (``_large_job``), each in a store of its own: rows a second, and bytes
of a rank and step, by table as they lie there, and the time of each query, the best of three, with ``MOST_BYTES`` of
memory at most: the ten heaviest of a diagnosis, on the newest 20 steps, and such as docs/sql.md shows. ``growth``: how
many times as many ranks, over how many times as much CPU time of the engine their queries take; above 1: less than
proportional. CPU time, since it is the same however busy the machine is; two cores share it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from argus.diagnose.read import queries
from argus.store.arrow import to_arrow
from argus.store.load import load_spilled
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema
from argus.store.spill import Place
from argus.store.writer import Writer
from benches import Result
from benches._large_job import LargeJob
from benches._processes import engine_of, pss_bytes

ROWS = 200_000
SMALL = (1, 10, 100, 1_000, 10_000)
SMALL_S = 1.0
T0 = 1_700_000_000_000_000_000
AT_ONCE = 20_000_000
LARGE = (1_024, 10_240)
LARGE_STEPS = 100
MOST_BYTES = 2_000_000_000
DIAGNOSIS = (
    "STEPS", "LATENESS", "LEAD", "LAST", "LAST_CALLS", "PHASE_TIME", "GPU_PHASE_TIME", "KERNEL_TIME", "SLOWER",
    "STEP_TIMES",
)  # fmt: skip
USERS = {
    "kernel_stats_one": """SELECT rank, avg(p50_ns), avg(p99_ns) FROM kernel_stats
        WHERE job = {job:String} AND kernel = 'flash_bwd' GROUP BY rank""",
    "kernel_stats_one_step": """SELECT rank, p50_ns FROM kernel_stats
        WHERE job = {job:String} AND kernel = 'flash_bwd' AND step_from = 50""",
    "kernel_stats_rank": """SELECT kernel, avg(p50_ns), avg(p99_ns) FROM kernel_stats
        WHERE job = {job:String} AND rank = 5 GROUP BY kernel""",
    "kernel_stats_all": """SELECT kernel, rank, avg(p50_ns) AS ns FROM kernel_stats WHERE job = {job:String}
        GROUP BY kernel, rank ORDER BY ns DESC LIMIT 20""",
    "kernel_times": "SELECT rank, sum(spent_ns) FROM kernel_times WHERE job = {job:String} GROUP BY rank",
    "step_times": "SELECT * FROM step_times WHERE job = {job:String} ORDER BY slowest_ns DESC LIMIT 10",
    "slow_phases": "SELECT * FROM slow_phases WHERE job = {job:String} ORDER BY excess_ns DESC LIMIT 10",
    "slow_gpu_phases": "SELECT * FROM slow_gpu_phases WHERE job = {job:String} ORDER BY excess_ns DESC LIMIT 10",
    "collectives_aligned": """SELECT rank, avg(lateness_ns) AS late_ns FROM collectives_aligned
        WHERE job = {job:String} AND aligned GROUP BY rank ORDER BY late_ns DESC LIMIT 10""",
    "iterations": """SELECT rank, quantileExact(0.5)(duration_ns) AS ns FROM iterations
        WHERE job = {job:String} GROUP BY rank ORDER BY ns DESC LIMIT 10""",
    "gpu_steps": """SELECT rank, quantileExact(0.5)(void_share) AS void, argMax(step, void_share) FROM gpu_steps
        WHERE job = {job:String} GROUP BY rank ORDER BY void DESC""",
}
"""Each stands for those of its kind in docs/sql.md."""


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


def _memory(folder: Path) -> dict[str, float]:
    """What the engine takes in addition while it stores ``AT_ONCE`` bytes of rows, MB: sent as they are, and in batches
    of the writer's. Names of kernels make up most of them."""
    columns = {
        "job": "bench", "run": 1, "rank": 0, "host": "node", "pid": 77, "tid": 78, "call": "cuLaunchKernel",
        "kind": "kernel", "kernel": [f"{number:08}".ljust(4000, "x") for number in range(AT_ONCE // 4000)],
        "handle": 1, "stream": 0, "bytes": 0, "shared_bytes": 0, "grid": np.ones((AT_ONCE // 4000, 3), "u4"),
        "block": np.ones((AT_ONCE // 4000, 3), "u4"), "ts": time.time_ns(), "duration_ns": -1, "result": 0,
        "in_nccl": False,
    }  # fmt: skip
    rows = to_arrow("launches", columns)

    def whole(store: Store) -> None:
        store.insert("launches", rows, "whole", 60.0)

    def in_batches(store: Store) -> None:
        with Writer(store, source="bench") as writer:
            writer.append("launches", rows)
            assert writer.flush(60.0), writer.last_error

    found = {}
    for send in (whole, in_batches):
        with open_store(f"chdb://{folder / send.__name__}") as store:
            ensure_schema(store)
            store.insert("launches", rows.slice(0, 100), "first")
            engine = engine_of(folder / send.__name__)
            before = most = pss_bytes(engine)[0]
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(send, store)
                while not sent.done():
                    most = max(most, pss_bytes(engine)[0])
                    time.sleep(0.002)
                sent.result()
        found[f"engine_mb_of_{AT_ONCE // 10**6}_mb_{send.__name__}"] = (most - before) / 1e6
    return found


def _large(folder: Path, ranks: int, steps: int) -> tuple[dict[str, float], float]:
    """Figures of one job, and the CPU time of its queries together, s."""
    found: dict[str, float] = {}
    rows: dict[str, int] = {}
    spent: dict[str, float] = {}
    with open_store(f"chdb://{folder}") as store, Writer(store, source="bench") as writer:
        ensure_schema(store)
        for table, columns in LargeJob("large", ranks, steps).blocks():
            begin = time.perf_counter()
            rows[table] = rows.get(table, 0) + writer.append(table, columns)
            assert writer.flush(), writer.last_error
            spent[table] = spent.get(table, 0.0) + time.perf_counter() - begin
        large = [table for table in rows if rows[table] > ranks]
        for table in large:
            found[f"{ranks} ranks: {table}_rows_per_s"] = rows[table] / spent[table]
        found[f"{ranks} ranks: rows_per_s"] = sum(rows.values()) / sum(spent.values())
        with store.lease() as client:
            for table in large:
                size = client.command(
                    "SELECT sum(data_compressed_bytes) FROM system.parts WHERE active AND table = {t:String}",
                    parameters={"t": table},
                )
                found[f"{ranks} ranks: {table}_bytes_per_rank_and_step"] = int(str(size)) / ranks / steps
            values = {
                "job": "large", "run": 1, "first": steps - min(20, steps), "last": steps - 1, "onset": steps // 2,
                "ranks": [37, 0, 1, 2, 3, 4, 5, 6, 7], "members": list(range(40)), "left_out": [], "since_ns": 0,
            }  # fmt: skip
            used = store.engine_cpu_s()
            for name, text in {**{name: getattr(queries, name) for name in DIAGNOSIS}, **USERS}.items():
                given = {key: value for key, value in values.items() if f"{{{key}:" in text}
                took = []
                for _ in range(3):
                    begin = time.perf_counter()
                    client.query(text, parameters=given, settings={"max_memory_usage": MOST_BYTES})
                    took.append(time.perf_counter() - begin)
                found[f"{ranks} ranks: {name}_ms"] = min(took) * 1e3
            used = store.engine_cpu_s() - used
    return found | {f"{ranks} ranks: queries_cpu_s": used / 3}, used


def _growth(folder: Path, quick: bool) -> dict[str, float]:
    sizes = tuple(ranks // 16 for ranks in LARGE) if quick else LARGE
    (few, few_s), (many, many_s) = (_large(folder / str(ranks), ranks, LARGE_STEPS) for ranks in sizes)
    return few | many | {"growth": sizes[1] / sizes[0] / (many_s / few_s)}


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
    with tempfile.TemporaryDirectory() as folder:
        more |= _memory(Path(folder)) | _growth(Path(folder), quick=rounds == 1)
    ratio = statistics.median(rows["Argus's writer"]) / statistics.median(rows["column insert"])
    return Result(f"blocks of {ROWS:,} rows of 19 columns into the embedded store", "rows/s", rows, ratio, more)
