"""The tables: splitting SQL, making and upgrading tables, and refusing those of a newer Argus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.model.environment import OWN, UNREADABLE
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import schema_files
from argus.store.open import Store, open_store
from argus.store.reader import query
from argus.store.schema import SchemaState, ensure_schema, init_schema, interval, schema_state
from argus.store.schema_files import Upgrade, table_columns
from argus.store.statements import check_no_format, check_read_only, is_complete, returns_rows, split_statements
from tests.stores import new_store, rows

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


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, SchemaState]]:
    """A store whose tables were made here, for tests that leave it as it is."""
    with open_store(f"chdb://{tmp_path_factory.mktemp('created')}/store") as store:
        assert schema_state(store).version == 0
        yield store, ensure_schema(store)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Store]:
    """A store with all tables, which a test may change."""
    with open_store(new_store(tmp_path)) as store:
        yield store


def test_tables_are_created_once_and_match_what_the_files_say(created: tuple[Store, SchemaState]) -> None:
    bare, state = created
    assert state.version == state.known == schema_files.VERSION
    assert not state.changed
    assert not state.missing
    assert ensure_schema(bare) == state
    assert rows(bare, "SELECT version, checksum FROM schema_migrations") == [(state.version, schema_files.checksum())]
    for table, columns in table_columns().items():
        described = rows(bare, f"DESCRIBE TABLE {table}")
        assert [(c.name, c.type) for c in columns.values()] == [(r[0], r[1]) for r in described]
        assert [c.optional for c in columns.values()] == [r[2] == "DEFAULT" for r in described]
    assert rows(bare, "SELECT name FROM system.columns WHERE database = 'default' AND comment = '' AND (table IN"
                       f" {tuple(table_columns())} OR table LIKE '%_rollup')") == []  # fmt: skip


def test_every_statement_makes_a_table_or_a_view() -> None:
    made = [*schema_files.tables().values(), *schema_files.feeds().values(), *schema_files.views().values()]
    assert sorted(made) == sorted(schema_files.statements())


def test_a_view_stands_behind_those_that_it_reads() -> None:
    order = list(schema_files.views())
    for reader, read in (("collectives_across", "calls_across"), ("function_patterns", "collective_waits"),
                         ("latest_ranks", "latest_run"), ("latest_run", "newest_runs")):  # fmt: skip
        assert order.index(read) < order.index(reader)


STATEMENTS = {
    27: "925bc9301e471da53ebd1de5c324a1487724e3d4201dac420a8d9e3d9ca32328",
    28: "cca82b4102babc38224b10235758596098fbdc5aed94dc8d1202ad3d4cbbb697",
    29: "5058eb8ad3556411f28703f9e1a14a865990dec7b34060731130de1cc6c303fb",
}
"""Checksum of the statements of each version that has been released, or is about to be."""


def test_changed_statements_are_a_new_version() -> None:
    assert STATEMENTS.get(schema_files.VERSION) == schema_files.checksum(), (
        "schemas/ has changed: raise VERSION in schema_files.py, write schemas/upgrades/ for tables of older stores,"
        f" and note here: {schema_files.VERSION}: {schema_files.checksum()!r}"
    )
    assert max(upgrade.version for upgrade in schema_files.upgrades()) <= schema_files.VERSION


def test_a_newer_store_is_refused(own: Store) -> None:
    with own.lease() as client:
        client.command("INSERT INTO schema_migrations (version, name, checksum) VALUES (999, 'argus 9', '')")
    with pytest.raises(ArgusError, match=r"newer Argus \(schema 999") as failure:
        ensure_schema(own)
    assert failure.value.exit_code == EXIT_UNAVAILABLE
    assert "\n" not in failure.value.message


def new_version(monkeypatch: pytest.MonkeyPatch, *statements: str, upgrade: tuple[str, ...] = ()) -> int:
    """Makes this Argus one of version 900, which has more statements."""
    now, upgrades = schema_files.statements(), schema_files.upgrades()
    monkeypatch.setattr(schema_files, "VERSION", 900)
    monkeypatch.setattr(schema_files, "statements", lambda: (*now, *statements))
    monkeypatch.setattr(schema_files, "upgrades", lambda: [*upgrades, Upgrade(900, upgrade)])
    return 900


MORE = "CREATE TABLE IF NOT EXISTS more (a UInt8) ENGINE = MergeTree ORDER BY a"


def test_an_upgrade_makes_tables_and_views_and_alters_what_is_there(
    own: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = schema_files.VERSION
    version = new_version(
        monkeypatch,
        MORE,
        "CREATE OR REPLACE VIEW another AS SELECT another FROM jobs",
        upgrade=("ALTER TABLE jobs ADD COLUMN IF NOT EXISTS another UInt8",),
    )
    assert schema_state(own).missing == list(range(before + 1, version + 1))
    assert ensure_schema(own).version == version
    assert rows(own, "SELECT count() FROM more") == [(0,)]
    assert rows(own, "SELECT count() FROM another") == [(0,)]
    assert rows(own, "SELECT version FROM schema_migrations ORDER BY version") == [(before,), (version,)]


@pytest.mark.thorough
def test_a_store_that_was_made_from_other_statements_of_the_version(
    own: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = schema_files.statements()
    monkeypatch.setattr(schema_files, "statements", lambda: (*now, MORE))
    state = ensure_schema(own)
    assert (state.changed, state.missing) == (["schemas"], [])


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize(
    "lacking", ["SELECT count() FROM more", "SELECT another FROM jobs", "SELECT j.another FROM jobs AS j"]
)
def test_what_an_older_argus_did_not_have_an_embedded_store_gets_when_it_is_asked(
    own: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    with pytest.raises(ArgusError) as failure:
        query(own, lacking)
    assert "older" not in failure.value.message  # it's up to date: the query is wrong
    new_version(monkeypatch, MORE, upgrade=("ALTER TABLE jobs ADD COLUMN IF NOT EXISTS another UInt8",))
    with monkeypatch.context() as server:
        server.setattr(Store, "embedded", False)
        with pytest.raises(ArgusError, match=r"older Argus \(schema \d+, now 900\)") as failure:
            query(own, lacking)
    assert f"argus store init --store '{own.url}'" in failure.value.hint, "a server's tables are other people's, too"
    assert capsys.readouterr().err == ""
    assert len(query(own, lacking)) <= 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"argus: brought the store {own.url} from schema ")
    assert line.endswith(" to 900; its rows stay")
    assert len(query(own, lacking)) <= 1
    assert capsys.readouterr().err == ""


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


def test_the_rollup_equals_a_recount(own: Store) -> None:
    from argus.store.arrow import to_arrow
    from tests.unit.store.test_writer import iterations

    for rank in range(8):
        took = [1000 + rank * (k + 1) for k in range(50)]
        batch = to_arrow("iterations", {**iterations(50, rank), "duration_ns": took})
        own.insert("iterations", batch, f"rank {rank}")
        own.insert("iterations", batch, f"rank {rank}")  # its answer was lost
    assert rows(own, ROLLED_UP) == rows(own, RECOUNT)
    assert rows(own, "SELECT sum(n) FROM iteration_rollup") == [(400,)]
    told = "SELECT ranks, mean_ns, slowest_ns, slowest_rank, median_ns BETWEEN 1033 AND 1044 FROM step_times"
    assert rows(own, f"{told} WHERE step = 10") == [(8, 1038.5, 1077, 7, 1)]


def test_a_retry_repairs_a_rollup_that_the_kill_of_the_engine_left_behind(own: Store) -> None:
    from argus.store.arrow import to_arrow
    from tests.unit.store.test_writer import iterations

    with own.lease() as client:
        made = client.command("SELECT create_table_query FROM system.tables WHERE name = 'iteration_rollup_feed'")
        client.command("DROP TABLE iteration_rollup_feed")
        batch = to_arrow("iterations", iterations(50))
        own.insert("iterations", batch, "one")  # as far as the engine got
        client.command(str(made).replace("\\'", "'"))
    own.insert("iterations", batch, "one")
    assert rows(own, "SELECT count() FROM iterations") == [(50,)]
    assert rows(own, ROLLED_UP) == rows(own, RECOUNT)


@pytest.mark.thorough
def test_times_to_live(bare: Store) -> None:
    init_schema(bare, raw_ttl="3h")

    def ttl(table: str) -> str:
        sql = f"SELECT extract(create_table_query, 'TTL (.*?) SETTINGS') FROM system.tables WHERE name = '{table}'"
        return str(rows(bare, sql)[0][0])

    assert ttl("launches") == "stored + toIntervalHour(3)"
    assert ttl("iterations") == "stored + toIntervalDay(30)"
    init_schema(bare, ttl="90d")
    assert ttl("iterations") == "stored + toIntervalDay(90)"
    assert ttl("launches") == "stored + toIntervalHour(3)"
    # Tables that an upgrade adds are kept as the others are.
    with bare.lease() as client:
        client.command("DROP TABLE phase_ops")
        client.command("DROP TABLE gpu_host_events")
        client.command("TRUNCATE TABLE schema_migrations")
    ensure_schema(bare)
    assert ttl("phase_ops") == "stored + toIntervalDay(90)"
    assert ttl("gpu_host_events") == "stored + toIntervalHour(3)"


def test_a_store_folder_can_be_read_by_its_owner_only(created: tuple[Store, SchemaState]) -> None:
    bare, _ = created
    assert bare.target.path is not None
    assert bare.target.path.stat().st_mode & 0o077 == 0
    assert (bare.target.path / "socket").stat().st_mode & 0o077 == 0


def test_the_views_leave_out_the_same_facts_as_the_digest() -> None:
    """What differs between ranks and hosts of a healthy job is no change of its environment."""
    view = schema_files.views()["environment_changes"]
    left_out = re.search(r"fact NOT IN \(([^)]*)\)", view)
    assert left_out is not None
    assert {one.strip(" '") for one in left_out[1].split(",")} == {*OWN, UNREADABLE}
