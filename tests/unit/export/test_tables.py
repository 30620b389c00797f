"""``argus export parquet`` and ``csv``: rows of any table or view, with their types, and inert in a spreadsheet."""

from __future__ import annotations

import csv
import gzip
import io
import resource
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from argus.cli.main import main
from argus.export import tables
from argus.export.tables import Chosen, cell, find_table, narrow, table_names, write_table
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.timeline_job import MS, T0, TimelineJob, store_timeline

Run = Callable[..., tuple[int, str, str]]
MADE = Chosen("made", 1)
"""Rollups of other tests may still be there: what was traced last is not always this."""


@pytest.fixture
def argus(store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs ``argus`` in this process: (exit code, output, errors)."""
    monkeypatch.setenv("ARGUS_STORE", store.url)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return run


def read_csv(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_text(), newline="")))


def test_types_are_kept(store: Store, argus: Run, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob(ranks=2, steps=3))
    file = tmp_path / "k.parquet"
    code, out, err = argus("export", "parquet", "kernel_events", "-o", str(file), "--job", "made")
    assert (code, err) == (0, "")
    assert out == f"{file}: 36 rows of kernel_events, 26 columns\n"
    rows = parquet.read_table(file)
    assert rows.num_rows == 36
    kinds = {name: rows.schema.field(name).type for name in rows.column_names}
    assert kinds["ts"] == pa.timestamp("ns", tz="UTC")
    assert kinds["stored"] == pa.timestamp("ns", tz="UTC"), "a time in whole seconds is a time as well"
    assert pa.types.is_dictionary(kinds["name"])
    assert kinds["rank"] == pa.uint32()
    assert kinds["duration_ns"] == pa.int64()
    assert kinds["launch_probed"] == pa.bool_()
    assert rows["grid"][0].as_py() == [4, 1, 1]
    assert rows["ts"].cast(pa.int64())[0].as_py() == T0
    assert set(rows["name"].to_pylist()) > {"gemm", "adam"}


@pytest.mark.thorough
def test_every_table_and_view_can_be_exported(store: Store, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob())
    exported = []
    for name in table_names(store):
        table = find_table(store, name)
        assert table is not None
        chosen = narrow(store, table, MADE if {"job", "run"} <= set(table.types) else Chosen())
        expected = int(query_columns(store, f"SELECT count() AS n FROM {chosen.source}", chosen.values)["n"][0])
        for kind in tables.FORMATS:
            if expected:
                assert write_table(store, chosen, tmp_path / f"{name}.{kind}", kind) == expected, name
        if expected:
            exported.append(name)
            assert parquet.read_table(tmp_path / f"{name}.parquet").num_rows == expected
            assert len(read_csv(tmp_path / f"{name}.csv")) == expected
    assert {"kernel_events", "iteration_rollup", "collectives_across", "latest_phases", "newest_runs"} < set(exported)


def test_rows_are_chosen(store: Store, argus: Run, tmp_path: Path) -> None:
    job = TimelineJob(ranks=3, steps=4)
    store_timeline(store, job)
    store_timeline(store, TimelineJob(ranks=1, steps=2, job="other", run=7))
    file = tmp_path / "i.csv"

    def chosen(*words: str, table: str = "iterations") -> set[tuple[int, int]]:
        code, _, err = argus("export", "csv", table, "-o", str(file), *words)
        assert code == 0, err
        return {(int(row["rank"]), int(row["step"])) for row in read_csv(file)}

    whole = {(rank, step) for rank in range(3) for step in range(4)}
    assert chosen() == {(0, 0), (0, 1)}, "the run traced last"
    assert chosen("--job", "made") == whole
    assert chosen("--job", "made", "--rank", "1-2", "--steps", "2:") == {(1, 2), (2, 2), (1, 3), (2, 3)}
    since = (T0 + job.length_ns) / 1e9
    assert chosen("--job", "made", "--since", f"{since:.9f}") == {own for own in whole if own[1] >= 1}
    assert chosen("--job", "made", "--last", f"{job.length_ns // MS + 1}ms") == {own for own in whole if own[1] >= 2}
    assert chosen("--job", "other", table="gpu_steps") == {(0, 0), (0, 1)}


def test_what_cannot_be_chosen_by_is_said_in_one_line(store: Store, argus: Run, tmp_path: Path) -> None:
    store_timeline(store, TimelineJob())
    file = str(tmp_path / "x.csv")
    for words, message in (
        (("csv", "kernel_event", "-o", file), "there is no table 'kernel_event'"),
        (("csv", "no\x1b[31m", "-o", file), "there is no table 'no\\x1b[31m'"),
        (("csv", "jobs; DROP TABLE jobs", "-o", file), "there is no table"),
        (("csv", "-o", file), "csv needs a table"),
        (("csv", "jobs"), "a table needs a file"),
        (("csv", "jobs", "-o", file, "--rank", "1"), "rows of jobs have no rank, so --rank cannot choose"),
        (("csv", "ranks", "-o", file, "--steps", "1"), "rows of ranks have no step"),
        (("csv", "communicators", "-o", file, "--last", "5s"), "rows of communicators have no time"),
        (("csv", "ranks", "-o", file, "--thread", "main"), "a table has no stacks"),
        (("csv", "ranks", "-o", file, "--gil"), "a table has no stacks"),
        (("svg", "ranks", "-o", file), "svg exports stacks or a timeline, not a table"),
        (("csv", "ranks", "-o", file, "--job", "none"), "no job 'none' is stored"),
        (("csv", "gc_pauses", "-o", file), "gc_pauses has no such rows"),
    ):
        job = ("--job", "made") if "--job" not in words else ()
        code, out, err = argus("export", *words, *job)
        assert code != 0
        assert out == ""
        assert message in err.splitlines()[0], err
        assert len(err.splitlines()) <= 2
    assert "kernel_events" in argus("export", "csv", "kernel_event", "-o", file)[2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1+1", "'=1+1"), ("+1", "'+1"), ("-1", "'-1"), ("@x", "'@x"), ("\tx", "'\tx"), ("\rx", "'\\u000dx"),
        ("\nx", "'\nx"), ("\uff1d1", "'\uff1d1"), ("\uff201", "'\uff201"), ("a=1", "a=1"), ("", ""),
        ("\ud800", "\\ud800"), ("a\u202eb", "a\\u202eb"), ("a\x1b[0m", "a\\u001b[0m"),
    ],
)  # fmt: skip
def test_a_cell_is_inert(text: str, shown: str) -> None:
    assert cell(text) == shown


def test_csv_is_inert_and_whole(store: Store, tmp_path: Path) -> None:
    names = (
        '=HYPERLINK("http://x";"y")',
        "+1",
        "-2",
        "@sum",
        "a,b",
        'quote"d',
        "line\nbreak",
        "",
        "<script>",
        "\x1b[31m",
    )
    store_timeline(store, TimelineJob(ranks=1, steps=1, kernels=len(names), names=names))
    with store.lease() as client:
        client.command("INSERT INTO gc_pauses (job, run, rank, thread, ts, duration_ns) VALUES"
                       " ('made', 1, 0, '=bad\\xed\\xa0\\x80', now64(9), -5)")  # fmt: skip
    chosen = narrow(store, find_table(store, "kernel_events") or pytest.fail("no table"), MADE)
    write_table(store, chosen, tmp_path / "k.csv", "csv")
    rows = read_csv(tmp_path / "k.csv")
    assert [row["name"] for row in rows][: len(names)] == [
        "'" + name if name[:1] in ("=", "+", "-", "@") else name.replace("\x1b", "\\u001b") for name in names
    ]
    assert rows[0]["grid"] == "[4, 1, 1]"
    assert rows[0]["launch_probed"] == "true"
    at = datetime.fromtimestamp(T0 // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    assert rows[0]["ts"] == f"{at}.000000000Z"
    pauses = narrow(store, find_table(store, "gc_pauses") or pytest.fail("no table"), MADE)
    write_table(store, pauses, tmp_path / "p.csv.gz", "csv")
    text = gzip.decompress((tmp_path / "p.csv.gz").read_bytes()).decode()
    assert "'=bad\ufffd" in text, "bytes that are no text are replaced"
    assert ",-5," in text, "a number below 0 is no formula"
    write_table(store, pauses, tmp_path / "p.parquet", "parquet")
    assert parquet.read_table(tmp_path / "p.parquet")["thread"][0].as_py().startswith("=bad\ufffd")


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("table", ["kernel_events", "kernel_groups", "step_times", "communicators"])
def test_pieces_are_the_whole(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """In order of time, by step, or by all columns; also where many rows are of one ns."""
    store_timeline(store, TimelineJob(ranks=2 if table == "kernel_events" else 30, steps=40, kernels=3))
    with Writer(store, source="test") as writer:
        writer.append("kernel_groups", {
            "job": "made", "run": 1, "kernel_id": np.arange(500, dtype=np.uint64), "kernel": "k", "name": "k",
            "stream": 1, "grid": [[]] * 500, "block": [[]] * 500,
        })  # fmt: skip
        assert writer.flush(), writer.last_error
    chosen = narrow(store, find_table(store, table) or pytest.fail("no table"), MADE)
    whole = pa.concat_tables(tables.batches(store, chosen), promote_options="permissive")
    monkeypatch.setattr(tables, "BATCH", 25)
    parts = list(tables.batches(store, chosen))
    assert len(parts) > 1
    assert max(part.num_rows for part in parts) <= 25
    assert sum(part.num_rows for part in parts) == whole.num_rows
    write_table(store, chosen, tmp_path / "t.parquet", "parquet")
    both = [sorted(map(repr, rows.to_pylist())) for rows in (parquet.read_table(tmp_path / "t.parquet"), whole)]
    assert both[0] == both[1]


def test_a_disk_that_fills_leaves_no_half_file(store: Store, tmp_path: Path, argus: Run) -> None:
    store_timeline(store, TimelineJob(steps=30, kernels=60))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for kind in tables.FORMATS:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            code, _, err = argus("export", kind, "kernel_events", "-o", str(tmp_path / f"k.{kind}"), "--job", "made")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code != 0
        assert "cannot be written" in err
        assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
