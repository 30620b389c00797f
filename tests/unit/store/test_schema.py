"""The schema: splitting SQL, applying migrations once, and refusing what this Argus does not know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import schema
from argus.store.open import Store, open_store
from argus.store.reader import query
from argus.store.schema import Migration, ensure_schema, init_schema, interval, schema_state, table_columns
from argus.store.statements import check_no_format, check_read_only, is_complete, returns_rows, split_statements


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path}/store") as opened:
        yield opened


def rows(store: Store, sql: str) -> list[tuple[object, ...]]:
    with store.lease() as client:
        return [tuple(row) for row in client.query(sql).result_rows]


# ---- SQL text ----


def test_split_statements() -> None:
    text = """
    -- a comment; with a semicolon and an apostrophe: it's
    CREATE TABLE a (x String COMMENT 'semi;colon and ''quote'' and \\' -- no comment') ; /* block; */
    SELECT "a;b", `c;d`, 5 - 3, 6 / 2, 'a--b', '/*' -- end;
    ;;
    SELECT $tag$ raw; '$ $tag$; SELECT 2"""
    assert split_statements(text) == [
        "CREATE TABLE a (x String COMMENT 'semi;colon and ''quote'' and \\' -- no comment')",
        "SELECT \"a;b\", `c;d`, 5 - 3, 6 / 2, 'a--b', '/*'",
        "SELECT $tag$ raw; '$ $tag$",
        "SELECT 2",
    ]


def test_is_complete() -> None:
    assert is_complete("SELECT 1; -- done")
    assert not is_complete("SELECT 1")
    assert not is_complete("SELECT ';")
    assert not is_complete("SELECT 1 -- ;")
    assert not is_complete("SELECT 1; SELECT")
    assert not is_complete("/* open ;")


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO t VALUES (1)",
        "/* SELECT */ DROP TABLE t",
        "-- SELECT\nALTER TABLE t DELETE WHERE 1",
        "create table t (a Int8)",
        "TRUNCATE TABLE t",
        "KILL QUERY WHERE 1",
        "SYSTEM FLUSH LOGS",
        "SET readonly = 0",
        "SELECT 1 INTO\n OUTFILE '/tmp/x'",
        "SELECT 1 INTO /* x */ OUTFILE '/tmp/x'",
        "WITH a AS (SELECT 1) INSERT INTO FUNCTION file('/tmp/x') SELECT * FROM a",
        "explain pipeline insert into function file('x') select 1",
        "SELEC 1",
        "'text'",
    ],
)
def test_what_changes_something_is_refused(sql: str) -> None:
    with pytest.raises(ArgusError):
        check_read_only(sql)
    assert not returns_rows(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'INSERT INTO t; DROP'",
        "(SELECT 1) UNION ALL SELECT 2",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "SHOW TABLES",
        "DESCRIBE TABLE t",
        "EXPLAIN SELECT 1",
        "EXISTS TABLE t",
        "FROM t SELECT `INSERT`, drop",
        "-- INSERT INTO\nSELECT 1",
    ],
)
def test_what_only_reads_is_allowed(sql: str) -> None:
    check_read_only(sql)
    assert returns_rows(sql)


def test_a_format_clause_is_refused() -> None:
    with pytest.raises(ArgusError, match="FORMAT clause"):
        check_no_format("SELECT 1 FORMAT JSON")
    with pytest.raises(ArgusError):
        check_no_format("SELECT 1 format CSV SETTINGS x = 1")
    check_no_format("SELECT 'x FORMAT JSON'")
    check_no_format("SELECT format('{}', a) FROM t -- FORMAT CSV")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("30d", "INTERVAL 30 DAY"),
        ("12 hours", "INTERVAL 12 HOUR"),
        ("6months", "INTERVAL 6 MONTH"),
        ("INTERVAL 2 DAY", "INTERVAL 2 DAY"),
        ("1 week", "INTERVAL 1 WEEK"),
    ],
)
def test_interval(text: str, meant: str) -> None:
    assert interval(text) == meant


@pytest.mark.parametrize("text", ["", "30", "d", "0d", "3 fortnights", "1 DAY; DROP TABLE t", "100 years", "99999d"])
def test_bad_interval(text: str) -> None:
    with pytest.raises(ArgusError) as failure:
        interval(text)
    assert failure.value.exit_code == EXIT_USAGE


# ---- in a store ----


def test_tables_are_created_once_and_match_what_the_files_say(store: Store) -> None:
    assert schema_state(store).version == 0
    state = ensure_schema(store)
    assert state.version == state.known == schema.migrations()[-1].version
    assert not state.changed
    assert not state.missing
    assert ensure_schema(store) == state
    number = len(schema.migrations())
    assert rows(store, "SELECT count(), uniqExact(version) FROM schema_migrations") == [(number, number)]
    for table, columns in table_columns().items():
        described = rows(store, f"DESCRIBE TABLE {table}")
        assert [(c.name, c.type) for c in columns.values()] == [(r[0], r[1]) for r in described]
        assert [c.optional for c in columns.values()] == [r[2] == "DEFAULT" for r in described]
    assert rows(store, "SELECT name FROM system.columns WHERE database = 'default' AND comment = '' AND (table IN"
                       f" {tuple(table_columns())} OR table LIKE '%_rollup')") == []  # fmt: skip


def test_a_newer_store_is_refused(store: Store) -> None:
    ensure_schema(store)
    with store.lease() as client:
        client.command("INSERT INTO schema_migrations (version, name, checksum) VALUES (999, '999_x.sql', '')")
    with pytest.raises(ArgusError, match=r"newer Argus \(schema 999") as failure:
        ensure_schema(store)
    assert failure.value.exit_code == EXIT_UNAVAILABLE


def test_upgrades_and_changed_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = schema.migrations()
    ensure_schema(store)
    edited = Migration(1, now[0].name, now[0].text + "\n-- edited")
    sql = "CREATE TABLE IF NOT EXISTS more (a UInt8) ENGINE = MergeTree ORDER BY a"
    more = Migration(900, "900_more.sql", sql)
    monkeypatch.setattr(schema, "migrations", lambda: [edited, *now[1:], more])
    state = ensure_schema(store)
    assert state.version == more.version
    assert state.changed == [now[0].name]
    assert rows(store, "SELECT count() FROM more") == [(0,)]


@pytest.mark.parametrize(
    "lacking", ["SELECT count() FROM more", "SELECT another FROM jobs", "SELECT j.another FROM jobs AS j"]
)
def test_what_an_older_argus_did_not_have_is_told_with_the_way_to_get_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    now = schema.migrations()
    ensure_schema(store)
    with pytest.raises(ArgusError) as failure:
        query(store, lacking)
    assert "older" not in failure.value.message  # it's up to date: the query is wrong
    sql = (
        "CREATE TABLE IF NOT EXISTS more (a UInt8) ENGINE = MergeTree ORDER BY a;\n"
        "ALTER TABLE jobs ADD COLUMN IF NOT EXISTS another UInt8"
    )
    monkeypatch.setattr(schema, "migrations", lambda: [*now, Migration(900, "900_more.sql", sql)])
    with pytest.raises(ArgusError, match=r"older Argus \(schema \d+, now 900\)") as failure:
        query(store, lacking)
    assert f"argus store init --store '{store.url}'" in failure.value.hint
    ensure_schema(store)
    assert len(query(store, lacking)) <= 1


def test_a_lower_number_that_comes_later_is_applied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = schema.migrations()
    # Nothing of a higher number builds on the tables of health checks.
    skipped = next(one for one in now if one.version == 11)
    rest = [one for one in now if one is not skipped]
    monkeypatch.setattr(schema, "migrations", lambda: rest)
    assert ensure_schema(store).version == now[-1].version
    monkeypatch.setattr(schema, "migrations", lambda: now)
    assert schema_state(store).missing == [skipped.version]
    assert ensure_schema(store).missing == []


RECOUNT = (
    "SELECT job, run, step, count() AS n, sum(duration_ns) AS s, min(duration_ns) AS a, max(duration_ns) AS b,"
    " toUnixTimestamp64Nano(min(ts)) AS c, toUnixTimestamp64Nano(max(ts)) AS d, argMax(rank, duration_ns) AS w"
    " FROM iterations GROUP BY job, run, step ORDER BY job, run, step"
)
ROLLED_UP = (
    "SELECT job, run, step, sum(n), sum(sum_ns), min(min_ns), max(max_ns), toUnixTimestamp64Nano(min(first_ts)),"
    " toUnixTimestamp64Nano(max(last_ts)), argMaxMerge(slowest) FROM iteration_rollup"
    " GROUP BY job, run, step ORDER BY job, run, step"
)


def test_the_rollup_equals_a_recount(store: Store) -> None:
    from argus.store.writer import to_arrow

    from .test_store_writer import iterations

    ensure_schema(store)
    for rank in range(8):
        took = [1000 + rank * (k + 1) for k in range(50)]
        batch = to_arrow("iterations", {**iterations(50, rank), "duration_ns": took})
        store.insert("iterations", batch, f"rank {rank}")
        store.insert("iterations", batch, f"rank {rank}")  # its answer was lost
    assert rows(store, ROLLED_UP) == rows(store, RECOUNT)
    assert rows(store, "SELECT sum(n) FROM iteration_rollup") == [(400,)]
    told = "SELECT ranks, mean_ns, slowest_ns, slowest_rank, median_ns BETWEEN 1033 AND 1044 FROM step_times"
    assert rows(store, f"{told} WHERE step = 10") == [(8, 1038.5, 1077, 7, 1)]


def test_a_retry_repairs_a_rollup_that_the_kill_of_the_engine_left_behind(store: Store) -> None:
    from argus.store.writer import to_arrow

    from .test_store_writer import iterations

    ensure_schema(store)
    with store.lease() as client:
        made = client.command("SELECT create_table_query FROM system.tables WHERE name = 'iteration_rollup_feed'")
        client.command("DROP TABLE iteration_rollup_feed")
        batch = to_arrow("iterations", iterations(50))
        store.insert("iterations", batch, "one")  # as far as the engine got
        client.command(str(made).replace("\\'", "'"))
    store.insert("iterations", batch, "one")
    assert rows(store, "SELECT count() FROM iterations") == [(50,)]
    assert rows(store, ROLLED_UP) == rows(store, RECOUNT)


def test_times_to_live(store: Store) -> None:
    init_schema(store, raw_ttl="3h")

    def ttl(table: str) -> str:
        sql = f"SELECT extract(create_table_query, 'TTL (.*?) SETTINGS') FROM system.tables WHERE name = '{table}'"
        return str(rows(store, sql)[0][0])

    assert ttl("launches") == "stored + toIntervalHour(3)"
    assert ttl("iterations") == "stored + toIntervalDay(30)"
    init_schema(store, ttl="90d")
    assert ttl("iterations") == "stored + toIntervalDay(90)"
    assert ttl("launches") == "stored + toIntervalHour(3)"
    # Tables that an upgrade adds are kept as the others are.
    with store.lease() as client:
        client.command("DROP TABLE phase_ops")
        client.command("DROP TABLE gpu_host_events")
        client.command("ALTER TABLE schema_migrations DELETE WHERE version IN (3, 8) SETTINGS mutations_sync = 2")
    ensure_schema(store)
    assert ttl("phase_ops") == "stored + toIntervalDay(90)"
    assert ttl("gpu_host_events") == "stored + toIntervalHour(3)"


def test_a_store_folder_can_be_read_by_its_owner_only(store: Store) -> None:
    ensure_schema(store)
    assert store.target.path is not None
    assert store.target.path.stat().st_mode & 0o077 == 0
    assert (store.target.path / "socket").stat().st_mode & 0o077 == 0
