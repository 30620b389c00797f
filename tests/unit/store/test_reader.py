"""Reading: parameters, columns, runs, and the views."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store, open_store
from argus.store.read.status import describe_table, list_tables, store_status
from argus.store.reader import latest_run, list_jobs, list_runs, query, query_columns
from argus.store.schema import ensure_schema
from argus.store.writer import Writer
from tests.stores import new_store

T0 = 1_700_000_000_000_000_000
MS = 1_000_000


def collectives(job: str, rank: int, seq: list[int], ts: list[int], **more: Any) -> dict[str, Any]:
    return {
        "job": job, "run": 1, "rank": rank, "host": "h", "pid": 1, "tid": 1, "comm": 10 + rank, "op": "AllReduce",
        "seq": seq, "bytes": 4, "count": 1, "dtype": "float32", "redop": "sum", "peer": -1, "stream": 0, "ts": ts,
        "duration_ns": 1, "result": 0, "in_group": False, **more,
    }  # fmt: skip


def communicator(job: str, rank: int, offset: int, version: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "job": job, "run": 1, "rank": [rank], "comm": 10 + rank, "comm_group": 7, "comm_rank": rank, "nranks": 2,
        "seq_offset": offset, "joined_by": "unique_id", "error": "", "version": version, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(new_store(tmp_path_factory.mktemp("reader"))) as opened:
        with Writer(opened, source="test") as writer:
            for job, late in (("a", 5 * MS), ("b", 50 * MS)):
                writer.append("collectives", collectives(job, 0, [0, 1], [T0, T0 + 100 * MS]))
                # Rank 1 was attached one call earlier: its seq 1 is rank 0's seq 0.
                writer.append("collectives", collectives(job, 1, [1, 2], [T0 + late, T0 + 100 * MS + 2 * late]))
                writer.append("communicators", communicator(job, 0, 0))
                writer.append("communicators", communicator(job, 1, 99))
                writer.flush()
                writer.append("communicators", communicator(job, 1, -1, version=2))
            writer.append("collectives", collectives("a", 0, [0, 1], [T0 - MS] * 2, op=["Send", "GroupStart"]))
            # Not in communicators at all, and known to be unknown.
            writer.append("collectives", collectives("a", 2, [0], [T0 - 5 * MS]))
            writer.append("collectives", collectives("a", 3, [0], [T0 - 5 * MS]))
            writer.append("communicators", communicator("a", 3, 0, error="made before Argus attached"))
            writer.append(
                "iterations",
                {
                    "job": "a", "run": 1, "rank": [0, 0, 1], "step": [3, 4, 3], "host": "h",
                    "ts": [T0, T0 + 20 * MS, T0], "duration_ns": [10 * MS, 10 * MS, 10 * MS], "collectives": 0,
                    "launches": 0, "method": "test", "confidence": 1.0,
                },
            )  # fmt: skip
            writer.append(
                "launches",
                {
                    "job": "a", "run": 1, "rank": [0, 0, 0, 0, 1, 2], "host": "h", "pid": 1, "tid": 1,
                    "call": "cuLaunchKernel", "kind": "kernel", "kernel": "k", "handle": 1, "stream": 0, "bytes": 0,
                    "shared_bytes": 0, "grid": [[1, 1, 1]] * 6, "block": [[1, 1, 1]] * 6,
                    "ts": [T0 - 1, T0, T0 + 10 * MS, T0 + 25 * MS, T0 + 9 * MS, T0], "duration_ns": 1, "result": 0,
                    "in_nccl": False,
                },
            )  # fmt: skip
            writer.append(
                "jobs",
                {
                    "job": "new", "run": [9], "host": "h", "started": T0 + 10**12, "ended": [None], "world_size": 2,
                    "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
                },
            )  # fmt: skip
            assert writer.flush(), writer.last_error
        yield opened


def test_parameters_are_values_not_text(store: Store) -> None:
    text = "a' OR 1 = 1 --\n\t\\"
    table = query(store, "SELECT {x:String} AS x, {n:Array(UInt64)} AS n", {"x": text, "n": [1, 2**64 - 1]})
    assert table.to_pylist() == [{"x": text, "n": [1, 2**64 - 1]}]
    assert query(store, "SELECT * FROM jobs WHERE job = {x:String}", {"x": text}).num_rows == 0


def test_columns(store: Store) -> None:
    found = query_columns(
        store,
        "SELECT toDateTime64(1.5, 3, 'UTC') AS t3, toDateTime64(2, 9, 'UTC') AS t, toInt64(-7) AS i, 'x' AS s,"
        " toLowCardinality('y') AS l, [1, 2] AS a, CAST(NULL, 'Nullable(Int32)') AS n, true AS b",
    )
    assert list(found) == ["t3", "t", "i", "s", "l", "a", "n", "b"]
    assert (found["t3"][0], found["t3"].dtype, found["t"][0]) == (1_500_000_000, np.int64, 2_000_000_000)
    assert (found["i"][0], found["i"].dtype) == (-7, np.int64)
    assert (found["s"][0], found["l"][0], found["a"][0]) == ("x", "y", [1, 2])
    assert np.isnan(found["n"][0])
    assert found["b"].dtype == bool
    empty = query_columns(store, "SELECT ts, job FROM launches WHERE job = 'none'")
    assert (empty["ts"].dtype, len(empty["job"])) == (np.int64, 0)


def test_words_that_repeat_and_lack(store: Store) -> None:
    words = "SELECT if(number % 3 = 2, NULL, toString(number % 3)) AS w FROM numbers({n:UInt32}) ORDER BY number"
    assert query_columns(store, words, {"n": 6})["w"].tolist() == ["0", "1", None, "0", "1", None]
    none = query_columns(store, words, {"n": 0})["w"]
    assert (none.dtype, none.tolist()) == (np.dtype(object), [])


def test_errors_are_one_line(store: Store) -> None:
    with pytest.raises(ArgusError, match="Unknown expression identifier `nope`") as failure:
        query(store, "SELECT nope FROM jobs")
    assert "\n" not in failure.value.message
    assert "Stack trace" not in failure.value.message
    with pytest.raises(ArgusError, match="Timeout exceeded"):
        query(
            store,
            "SELECT sum(sleepEachRow(0.01)) FROM numbers(1000) SETTINGS max_block_size = 10",
            settings={"max_execution_time": 0.2},
        )


def test_runs(store: Store) -> None:
    assert latest_run(store) == ("new", 9)
    assert latest_run(store, "a") == ("a", 1)
    assert set(list_jobs(store)) == {"a", "b", "new"}
    run = list_runs(store, "a")[0]
    assert (run.ranks, run.steps) == (4, 2)
    assert (run.started_ns, run.ended_ns) == (T0 - 5 * MS, T0 + 110 * MS)
    with pytest.raises(ArgusError, match="no job 'c'") as failure:
        latest_run(store, "c")
    assert "new" in failure.value.hint


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}/store") as empty:
        assert list_runs(empty) == []
        with pytest.raises(ArgusError, match="nothing is stored yet") as failure:
            latest_run(empty)
        assert "argus trace --pid" in failure.value.hint
        assert failure.value.exit_code == EXIT_UNAVAILABLE
        with empty.lease():
            pass
        with pytest.raises(ArgusError, match="nothing is stored yet"):
            query(empty, "SELECT * FROM jobs")
        assert list_runs(empty) == []
        ensure_schema(empty)
        with pytest.raises(ArgusError, match="nothing is stored yet"):
            latest_run(empty)


def test_lateness(store: Store) -> None:
    sql = (
        "SELECT rank, aligned_seq, lateness_ns, comm_group FROM collectives_aligned"
        " WHERE job = {job:String} AND run = 1 AND op = 'AllReduce' AND aligned ORDER BY rank, aligned_seq"
    )

    def found(job: str) -> list[tuple[int, int, int, int]]:
        return [tuple(row.values()) for row in query(store, sql, {"job": job}).to_pylist()]

    assert found("a") == [(0, 0, 0, 7), (0, 1, 0, 7), (1, 0, 5 * MS, 7), (1, 1, 10 * MS, 7)]
    assert found("b") == [(0, 0, 0, 7), (0, 1, 0, 7), (1, 0, 50 * MS, 7), (1, 1, 100 * MS, 7)]


def test_lateness_is_unknown_where_it_is(store: Store) -> None:
    table = query(
        store,
        "SELECT rank, op, aligned, aligned_seq, lateness_ns FROM collectives_aligned"
        " WHERE job = 'a' AND (rank >= 2 OR op != 'AllReduce') ORDER BY rank, op",
    )
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, "GroupStart", 1, 1, None),
        (0, "Send", 1, 0, None),
        (2, "AllReduce", 0, None, None),
        (3, "AllReduce", 0, None, None),
    ]


def test_a_filter_on_one_rank_does_not_change_lateness(store: Store) -> None:
    table = query(store, "SELECT max(lateness_ns) AS m FROM collectives_aligned WHERE job = 'a' AND rank = 1")
    assert table.to_pylist() == [{"m": 10 * MS}]


def test_launches_by_step(store: Store) -> None:
    table = query(
        store,
        "SELECT rank, toUnixTimestamp64Nano(ts) - {t0:Int64} AS at, step FROM launches_by_step ORDER BY rank, at",
        {"t0": T0},
    )
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, -1, None),
        (0, 0, 3),
        (0, 10 * MS, None),
        (0, 25 * MS, 4),
        (1, 9 * MS, 3),
        (2, 0, None),
    ]


def test_filters_reach_the_tables_behind_the_views(store: Store) -> None:
    for view in ("collectives_aligned", "launches_by_step"):
        plan = query(store, f"EXPLAIN indexes = 1 SELECT count() FROM {view} WHERE job = 'a' AND run = 1")
        text = "\n".join(plan.column(0).to_pylist())
        assert "(job in ['a', 'a'])" in text, text


def test_status(store: Store, tmp_path: Path) -> None:
    status = store_status(store)
    assert status.engine.startswith("chdb ")
    tables = {t.name: t for t in status.tables}
    assert tables["launches"].rows == 6
    assert (tables["launches"].oldest_ns, tables["launches"].newest_ns) == (T0 - 1, T0 + 25 * MS)
    assert (tables["findings"].rows, tables["findings"].oldest_ns) == (0, None)
    assert tables["launches_by_step"].rows is None
    assert tables["jobs"].comment == "One row per tracing session and host"
    assert {r.job for r in status.runs} == {"a", "b", "new"}
    assert store_status(open_store(f"chdb://{tmp_path}/none", create=False)).schema is None
    assert {t.name for t in list_tables(store)} == set(tables)
    assert ("step", "UInt32") in [c[:2] for c in describe_table(store, "iterations")]
    with pytest.raises(ArgusError, match="no table 'nope'"):
        describe_table(store, "nope")


def test_numbers_and_words_do_not_load_pandas() -> None:
    """A third of a second of the first query, where it is installed. pyarrow loads it for most of what it does."""
    program = """
import sys
import pyarrow as pa
from argus.store.reader import _column

def column(type, count, *buffers):
    return pa.chunked_array([pa.Array.from_buffers(type, count, [None, *map(pa.py_buffer, buffers)])] * 2)

assert _column(column(pa.int64(), 2, (7).to_bytes(8, "little") * 2)).tolist() == [7] * 4
assert _column(column(pa.timestamp("ns", "UTC"), 1, (7).to_bytes(8, "little"))).tolist() == [7] * 2
assert _column(column(pa.string(), 1, bytes([0, 0, 0, 0, 1, 0, 0, 0]), b"x")).tolist() == ["x"] * 2
print(sorted({name for name in sys.modules if name == "pandas"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
