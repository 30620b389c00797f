"""Codecs and order keys of the large tables: bytes a row, and what the queries of a diagnosis read and cost.

Rows are those of a job that ``argus simulate`` makes, and of a job on the fake GPU that ``argus trace`` traces with
everything on (left out where nothing can be traced). Each table is copied into tables that differ in one thing: all
columns with the same codec (of those a type can have), or another order key. Bytes are those after OPTIMIZE FINAL, of
parts with a file a column. Queries run with the copy in the table's place, ``REPEAT`` times each, and cost CPU time of
the engine. What a rank stores in a day is given at the rates of these two jobs.

Reference: the engine's default, LZ4 for every column. The ratio is its bytes over those of the present codecs, of all
tables together.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

from argus.diagnose.read import queries
from argus.model.errors import ArgusError
from argus.model.units import duration
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema
from benches import Result
from benches._jobs import record_fake_gpu

CODECS = ("LZ4", "ZSTD(1)", "ZSTD(3)", "T64, ZSTD(1)", "Delta, ZSTD(1)", "DoubleDelta, ZSTD(1)")
NUMBERS = re.compile(r"U?Int(8|16|32|64)$|DateTime")
"""Types that codecs for numbers take; others are tried with the first ``PLAIN``."""
PLAIN = 3
KEYS: dict[str, tuple[str, ...]] = {
    "iterations": ("job, run, rank, step",),
    "collectives": ("job, run, rank, ts", "job, run, ts, rank", "job, run, toStartOfMinute(ts), rank, comm, ts"),
    "launches": ("job, run, rank, ts", "job, run, toStartOfMinute(ts), rank, tid, ts"),
    "kernel_events": (
        "job, run, toStartOfMinute(ts), rank, ts", "job, run, rank, stream, ts", "job, run, name, rank, ts",
    ),
    "kernel_summaries": (
        "job, run, kernel_id, step, rank", "job, run, rank, kernel_id, step", "job, run, step, kernel_id, rank",
    ),
    "phases": ("job, run, phase, step, rank", "job, run, rank, phase, step"),
    "gpu_phases": ("job, run, phase, step, rank, device", "job, run, rank, device, phase, step"),
    "gpu_steps": ("job, run, rank, device, step",),
    "gpu_collectives": ("job, run, comm, op, peer, rank, device, step",),
    "stack_samples": ("job, run, rank, tid, ts", "job, run, stack_id, rank, ts"),
    "thread_usage": ("job, run, rank, tid, ts",),
    "gpu_usage": (), "gpu_host_events": (), "stacks": (),
}  # fmt: skip
"""Order keys that are tried, by table; each table's present one is measured too."""
TIMED = KEYS.keys() - {"kernel_summaries", "stacks"}
"""Tables whose rows have a time, and so a rate."""
_NEWEST = "job = {job:String} AND ts > (SELECT max(ts) FROM $table WHERE job = {job:String}) - INTERVAL 5 SECOND"
_RANK = "job = {job:String} AND rank = 1"
QUERIES: dict[str, dict[str, str]] = {
    "iterations": {"STEPS": queries.STEPS, "LATENESS": queries.LATENESS},
    "collectives": {"LATENESS": queries.LATENESS, "LAST": queries.LAST, "LAST_CALLS": queries.LAST_CALLS},
    "phases": {"PHASE_TIME": queries.PHASE_TIME},
    "gpu_phases": {"GPU_PHASE_TIME": queries.GPU_PHASE_TIME},
    "kernel_summaries": {"KERNEL_TIME": queries.KERNEL_TIME, "SLOWER": queries.SLOWER},
    "gpu_steps": {"a rank": f"SELECT step, idle_ns FROM gpu_steps WHERE {_RANK} ORDER BY step"},
    "kernel_events": {
        "newest 5 s": f"SELECT rank, name, sum(duration_ns) FROM kernel_events WHERE {_NEWEST} GROUP BY rank, name",
        "a rank": f"SELECT name, quantile(0.5)(duration_ns) FROM kernel_events WHERE {_RANK} GROUP BY name",
    },
    "launches": {
        "newest 5 s": f"SELECT rank, kind, count() FROM launches WHERE {_NEWEST} GROUP BY rank, kind",
        "a rank": f"SELECT kind, count() FROM launches WHERE {_RANK} GROUP BY kind",
    },
    "stack_samples": {
        "newest 5 s": f"SELECT rank, stack_id, sum(ns) FROM stack_samples WHERE {_NEWEST} GROUP BY rank, stack_id",
        "a rank": f"SELECT stack_id, sum(ns) FROM stack_samples WHERE {_RANK} GROUP BY stack_id",
    },
}
"""Of a diagnosis by its name in argus/diagnose/read/queries/, or such as it is asked otherwise."""
RANKS, STEPS, SUMMED = 256, 60, 32
"""Of the simulated job; ranks whose kernels are summed up."""
SEED = 23
REPEAT = 4
WORTH = 0.02
"""A column's best codec is shown if it saves that share of its table."""


def _progress(text: str) -> None:
    print(f"bench: {text} …", file=sys.stderr, flush=True)


@dataclass
class Column:
    """A column of a table: its codec, as ``CODEC`` takes it (LZ4: none was chosen), and those it may have."""

    name: str
    type: str
    codec: str

    @property
    def codecs(self) -> list[str]:
        return list(CODECS if NUMBERS.match(self.type) else CODECS[:PLAIN])


def _columns(client: Any, table: str) -> list[Column]:
    found = client.query(
        "SELECT name, type, compression_codec FROM system.columns WHERE table = {t:String} ORDER BY position",
        parameters={"t": table},
    )
    return [Column(name, kind, codec[len("CODEC(") : -1] or "LZ4") for name, kind, codec in found.result_rows]


def _copy(client: Any, table: str, key: str, columns: list[Column]) -> dict[str, int]:
    """Copies a table to ``<table>_other``, and returns the bytes of its columns."""
    client.command(f"DROP TABLE IF EXISTS {table}_other")
    made = ", ".join(f"{column.name} {column.type} CODEC({column.codec})" for column in columns)
    client.command(
        f"CREATE TABLE {table}_other ({made}) ENGINE = MergeTree ORDER BY ({key}) SETTINGS min_bytes_for_wide_part = 0"
    )
    client.command(f"INSERT INTO {table}_other SELECT * FROM {table}")
    client.command(f"OPTIMIZE TABLE {table}_other FINAL")
    found = client.query(
        "SELECT column, sum(column_data_compressed_bytes) FROM system.parts_columns"
        f" WHERE active AND table = '{table}_other' GROUP BY column"
    )
    return {name: int(size) for name, size in found.result_rows}


def _key(client: Any, table: str) -> str:
    found = client.query("SELECT sorting_key FROM system.tables WHERE name = {t:String}", parameters={"t": table})
    return str(found.result_rows[0][0])


def _codecs(client: Any, table: str, rows: int) -> tuple[dict[str, float], list[str]]:
    """Bytes a row of a table, and lines about its columns."""
    columns, key = _columns(client, table), _key(client, table)
    present = _copy(client, table, key, columns)
    tried = {
        codec: _copy(client, table, key, [replace(c, codec=codec) if codec in c.codecs else c for c in columns])
        for codec in CODECS
    }
    whole = sum(present.values())
    least = {c.name: min(c.codecs, key=lambda codec, name=c.name: tried[codec][name]) for c in columns}  # type: ignore[misc]
    sizes = {
        "present": whole,
        **{codec: sum(tried[codec].values()) for codec in CODECS[:2]},
        "least": sum(min(present[name], tried[codec][name]) for name, codec in least.items()),
    }
    largest = sorted(present, key=lambda name: -present[name])[:4]
    lines = [
        f"{table:<18}{rows:>10,}" + "".join(f"{size / rows:>10.2f}" for size in sizes.values()) + "   "
        + ", ".join(f"{name} {present[name] / rows:.2f}" for name in largest)
    ]  # fmt: skip
    for column in columns:
        name, codec = column.name, least[column.name]
        saved = present[name] - tried[codec][name]
        if saved > WORTH * whole:
            lines.append(
                f"  {name}: {column.codec} {present[name] / rows:.2f}, ZSTD(3) {tried['ZSTD(3)'][name] / rows:.2f},"
                f" {codec} {tried[codec][name] / rows:.2f} B a row: {saved / whole:.0%} of the table"
            )
    return {name: size / rows for name, size in sizes.items()}, lines


def _asked_ms(store: Store, client: Any, text: str, values: dict[str, Any]) -> float:
    """CPU time of the engine for a query, ms."""
    given = {name: value for name, value in values.items() if f"{{{name}:" in text}
    client.query(text, parameters=given)
    used = store.engine_cpu_s()
    for _ in range(REPEAT):
        client.query(text, parameters=given)
    return (store.engine_cpu_s() - used) / REPEAT * 1e3


def _keys(store: Store, client: Any, table: str, rows: int, values: dict[str, Any]) -> list[str]:
    """Lines: bytes a row of each order key of a table, and what queries cost with it."""
    columns, present = _columns(client, table), _key(client, table)
    for text in QUERIES.get(table, {}).values():
        _asked_ms(store, client, text.replace("$table", table), values)  # so that the present key's is not the first
    lines = []
    for key in (present, *KEYS[table]):
        size = sum(_copy(client, table, key, columns).values())
        client.command(f"EXCHANGE TABLES {table} AND {table}_other")
        timings = []
        for name, text in QUERIES.get(table, {}).items():
            timings.append(f"{name} {duration(1e6 * _asked_ms(store, client, text.replace('$table', table), values))}")
        client.command(f"EXCHANGE TABLES {table} AND {table}_other")
        lines.append(
            f"{table if key == present else '':<18}{size / rows:>8.2f}  {key:<52}  {'; '.join(timings)}".rstrip()
        )
    client.command(f"DROP TABLE {table}_other")
    return lines


def _volume(client: Any, table: str, job: str, each: float) -> str:
    """What a rank of a job stores in a day, and in as long as rows are kept. ``each``: bytes a row."""
    made = str(client.command(f"SELECT create_table_query FROM system.tables WHERE name = '{table}'"))
    rows, ranks, seconds = client.query(
        "SELECT count(), uniqExact(rank), (max(toUnixTimestamp64Nano(ts)) - min(toUnixTimestamp64Nano(ts))) / 1e9"
        f" FROM {table} WHERE job = {{job:String}}",
        parameters={"job": job},
    ).result_rows[0]
    rate = rows / max(ranks, 1) / max(seconds, 1e-9)
    daily = rate * each * 86_400 / 1e6
    kept = re.search(r"TTL stored \+ toIntervalDay\((\d+)\)", made)
    whole = f"{daily * int(kept[1]):>12,.0f} MB in {kept[1]} days" if kept else ""
    return f"{table:<18}{job:<12}{rate:>10,.1f} rows/s{daily:>10,.1f} MB a day {whole}".rstrip()


def run(rounds: int) -> Result:
    ranks, steps, summed = (64, 20, 4) if rounds <= 1 else (RANKS, STEPS, SUMMED)
    begun = time.perf_counter()
    codecs = [f"{'table':<18}{'rows':>10}{'present':>10}{'LZ4':>10}{'ZSTD(1)':>10}{'least':>10}   B a row, by column"]
    keys = [f"{'table':<18}{'B a row':>8}  {'order key':<52}  queries: CPU time"]
    volumes = ["what a rank stores"]
    more: dict[str, float] = {}
    whole = {"present": 0.0, "LZ4": 0.0, "least": 0.0}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        open_store(f"chdb://{folder}/store") as store,
    ):
        ensure_schema(store)
        _progress("a simulated job")
        spec = Spec(Mesh(dp=ranks // 8, tp=2, pp=4), steps=steps, seed=SEED, kernels=summed)
        write(store, "simulated", spec)
        _progress("a traced one")
        try:
            record_fake_gpu(store, stacks=True)
        except ArgusError as failure:
            print(f"fake GPU: left out, {failure}")
        values = {
            "first": max(0, steps - 20), "last": steps - 1, "onset": steps // 2,
            "ranks": list(range(9)), "members": list(range(40)), "left_out": [], "since_ns": 0,
        }  # fmt: skip
        with store.lease() as client:
            for table in KEYS:
                found = client.query(
                    f"SELECT job, run, count() FROM {table} GROUP BY job, run ORDER BY count() DESC, job"
                )
                if not found.result_rows:
                    print(f"{table}: no rows")
                    continue
                _progress(table)
                # Queries are of the job with most rows.
                job, run_of, _ = found.result_rows[0]
                rows = sum(count for *_, count in found.result_rows)
                sizes, lines = _codecs(client, table, rows)
                codecs += lines
                more |= {f"{table}: {name}_bytes": size for name, size in sizes.items()}
                for name in whole:
                    whole[name] += sizes[name] * rows
                keys += _keys(store, client, table, rows, {**values, "job": job, "run": run_of})
                if table in TIMED:
                    volumes += [_volume(client, table, job, sizes["present"]) for job, *_ in found.result_rows]
    for lines in (codecs, keys, volumes):
        print("\n".join(lines), end="\n\n")
    more["seconds"] = time.perf_counter() - begun
    more["least_over_present"] = whole["least"] / whole["present"]
    rows_of = {"present codecs": [whole["present"] / 1e6], "LZ4": [whole["LZ4"] / 1e6]}
    return Result("bytes of all tables", "MB", rows_of, whole["LZ4"] / whole["present"], more)
