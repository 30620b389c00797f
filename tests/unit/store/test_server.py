"""A real ClickHouse server over HTTP: users, passwords, rights, the writer, and what diagnosis asks."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.cli.main import main
from argus.diagnose.learn import learn
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store.arrow import to_arrow
from argus.store.cluster import Cluster, render
from argus.store.open import Store, open_store
from argus.store.read.render import FORMATS
from argus.store.read.status import store_status
from argus.store.reader import query_columns
from argus.store.replay import look_up
from argus.store.schema import _fill, ensure_schema, init_schema
from argus.store.schema_files import statements, table_columns, upgrades
from argus.store.writer import Writer
from tests.builders.old_stores import make_old_store
from tests.builders.stored_job import store_job
from tests.builders.synthetic_job import Fault, ddp, simulate
from tests.clickhouse_server import MISSING, PASSWORD, Server
from tests.stores import new_store
from tests.unit.compare.test_baseline import RANK, run_of
from tests.unit.store.test_upgrades import shown
from tests.unit.store.test_writer import iterations

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    grants = "".join(
        f"<{user}><password>{user}-password</password><networks><ip>127.0.0.1</ip></networks>"
        f"<profile>default</profile><quota>default</quota><grants>"
        + "".join(f"<query>{statement}</query>" for statement in documented_grants(user))
        + f"</grants></{user}>"
        for user in ("argus_writer", "argus_reader")
    ) + (
        "<may_change_nothing><password>x</password><networks><ip>127.0.0.1</ip></networks><profile>readonly</profile>"
        "<quota>default</quota></may_change_nothing>"
    )
    with Server(tmp_path_factory.mktemp("server"), users=grants) as running:
        yield running


def documented_grants(user: str) -> list[str]:
    """The GRANT statements of docs/store.md for a user, as the server's configuration takes them."""
    text = (ROOT / "docs" / "store.md").read_text()
    lines = [line.strip().rstrip(";") for line in text.splitlines() if line.strip().startswith("GRANT ")]
    return [line.removesuffix(f" TO {user}") for line in lines if line.endswith(f" TO {user}")]


@pytest.fixture(scope="module")
def made(server: Server) -> Server:
    """The server, with all tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
        with open_store(server.url()) as store:
            init_schema(store)
    return server


@pytest.fixture
def url(made: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of its tables, without rows."""
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    filled = made.command("SELECT DISTINCT table FROM system.parts WHERE active AND database = 'argus'").split()
    for table in {*table_columns(), "iteration_rollup"}.intersection(filled):
        made.command(f"TRUNCATE TABLE {table}", "argus")
    return made.url()


def test_the_schema_is_the_same_as_in_the_embedded_engine(url: str) -> None:
    with open_store(url) as store:
        for table, columns in table_columns().items():
            rows = query_columns(store, f"SELECT name, type, comment FROM system.columns WHERE table = '{table}'"
                                        " AND database = currentDatabase() ORDER BY position")  # fmt: skip
            assert rows["name"].tolist() == list(columns)
            assert rows["type"].tolist() == [c.type for c in columns.values()]
            assert "" not in rows["comment"].tolist()


def test_a_job_is_removed_and_nothing_else(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(url) as store:
        for name, run in (("a", 1), ("a", 2), ("b", 1)):
            store_job(store, name, simulate(2, 12, ddp()), run=run)
        assert main(["store", "rm", "a", "--run", "1", "--yes", "--store", url]) == 0
        assert "removed job a, run 1: " in capsys.readouterr().out
        for table in ("iterations", "iteration_rollup", "collectives", "launches", "ranks", "communicators"):
            left = query_columns(store, f"SELECT DISTINCT job, run FROM {table} ORDER BY job, run")
            assert list(zip(left["job"], left["run"].tolist(), strict=True)) == [("a", 2), ("b", 1)], table
        newest = query_columns(store, "SELECT job, run FROM latest_run")
        assert (newest["job"][0], int(newest["run"][0])) == ("a", 2)
        assert set(query_columns(store, "SELECT DISTINCT run FROM latest_iterations")["run"].tolist()) == {2}
    assert main(["jobs", "--store", url]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == [["a", "2"], ["b", "1"]]


@pytest.mark.parametrize("table", table_columns())
def test_every_table_takes_rows(url: str, table: str) -> None:
    from tests.unit.store.test_writer import example

    given = {name: [example(name, c.type)[0]] * 3 for name, c in table_columns()[table].items() if name != "stored"}
    with open_store(url) as store, Writer(store, source="test") as writer:
        writer.append(table, given)
        assert writer.flush(), writer.last_error
        assert int(query_columns(store, f"SELECT count() AS n FROM {table}")["n"][0]) in (1, 3)


def test_a_batch_sent_twice_is_stored_once_with_its_rollup(url: str) -> None:
    batch = to_arrow("iterations", iterations(50))
    with open_store(url) as store:
        for _ in range(2):
            store.insert("iterations", batch, "one")
        assert query_columns(store, "SELECT count() AS n FROM iterations")["n"][0] == 50
        assert query_columns(store, "SELECT sum(n) AS n FROM iteration_rollup")["n"][0] == 50


@pytest.mark.parametrize("password", ["", "wrong", None])
def test_a_wrong_password_is_one_clear_line(
    server: Server, url: str, password: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if password is None:
        monkeypatch.delenv("ARGUS_STORE_PASSWORD")
    else:
        monkeypatch.setenv("ARGUS_STORE_PASSWORD", password)
    assert main(["sql", "SELECT 1", "--store", url]) == EXIT_UNAVAILABLE
    err = capsys.readouterr().err
    assert "127.0.0.1 refused user 'argus'" in err
    assert "ARGUS_STORE_PASSWORD_FILE" in err
    assert "Traceback" not in err


def test_a_password_from_a_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    monkeypatch.delenv("ARGUS_STORE_PASSWORD")
    monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", str(tmp_path / "password"))
    with open_store(url) as store:
        assert query_columns(store, "SELECT currentUser() AS u")["u"][0] == "argus"


def test_the_documented_rights_suffice(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert documented_grants("argus_writer")
    assert documented_grants("argus_reader")
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", "argus_writer-password")
    with open_store(server.url(user="argus_writer")) as store, Writer(store, source="test") as writer:
        ensure_schema(store)
        writer.append("iterations", iterations(50))
        assert writer.flush(), writer.last_error
    assert main(["sql", "--write", "DROP TABLE iterations", "--store", server.url(user="argus_writer")]) != 0
    assert "ACCESS_DENIED" in capsys.readouterr().err
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", "argus_reader-password")
    with open_store(server.url(user="argus_reader")) as store:
        assert query_columns(store, "SELECT count() AS n FROM step_times")["n"][0] == 50
        assert {t.name for t in store_status(store).tables} > {"iterations", "iteration_rollup", "step_times"}
        writer = Writer(store, source="test")
        writer.append("iterations", iterations(1))
        assert not writer.flush(timeout_s=0) or writer.rows_dropped
        assert "ACCESS_DENIED" in str(writer.last_error) or "privileges" in str(writer.last_error)


@pytest.mark.parametrize("form", FORMATS)
def test_a_user_of_the_profile_readonly_can_ask(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """ClickHouse's own: ``readonly = 1`` refuses every setting of a query."""
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", "x")
    where = ["--store", server.url(user="may_change_nothing"), "--format", form]
    assert main(["sql", "SELECT toUInt64(2) * 7 AS n", *where]) == 0
    assert "14" in capsys.readouterr().out
    assert main(["sql", "--write", "TRUNCATE TABLE iterations", *where]) == EXIT_UNAVAILABLE
    assert "READONLY" in capsys.readouterr().err


@pytest.fixture(scope="module")
def embedded_verdict(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return verdict_of(new_store(tmp_path_factory.mktemp("embedded")))


def test_a_verdict_from_a_server(url: str, embedded_verdict: Any) -> None:
    """The same job, the same verdict as from the embedded engine."""
    assert verdict_of(url) == embedded_verdict


def verdict_of(url: str) -> Any:
    with open_store(url) as store:
        store_job(store, "job", simulate(4, 60, ddp(), faults=(Fault("compute", (2,), 1.5),)))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["diagnose", "--format", "json", "--job", "job", "--store", url])
    assert code == 0, err.getvalue()
    verdict = json.loads(out.getvalue())
    assert verdict["schema"] == "argus.verdict/1"
    assert (verdict["findings"][0]["kind"], verdict["findings"][0]["ranks"]) == ("compute_straggler", [2])
    return verdict


# ---- two shards ----


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    one, two = Server(tmp_path_factory.mktemp("one")), Server(tmp_path_factory.mktemp("two"))
    one.shards = two.shards = {"both": [one.native_port, two.native_port]}
    with one, two:
        yield one, two


def test_two_shards(
    shards: tuple[Server, Server],
    embedded_verdict: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    for server in shards:
        words = ["store", "init", "--store", server.url(), "--cluster", "both", "--no-replicas"]
        assert main(words) == 0, capsys.readouterr().err
    assert main(words) == 0, capsys.readouterr().err  # again changes nothing
    urls = [server.url() for server in shards]
    with open_store(urls[0]) as store:
        assert ensure_schema(store).missing == []
        for rank in range(16):
            batch = to_arrow("iterations", {**iterations(50, rank), "duration_ns": 1000 + rank})
            for _ in range(2):
                store.insert("iterations", batch, f"rank {rank}")
    counts = []
    for url in urls:
        with open_store(url) as store:
            rows = query_columns(store, "SELECT ranks, slowest_rank FROM step_times WHERE step = 7")
            assert (rows["ranks"].tolist(), rows["slowest_rank"].tolist()) == ([16], [15])
            assert query_columns(store, "SELECT count() AS n FROM iterations")["n"][0] == 800
            counts.append(int(query_columns(store, "SELECT count() AS n FROM iterations_local")["n"][0]))
    assert sum(counts) == 800
    whole = to_arrow("iterations", {**iterations(800), "rank": [k // 50 for k in range(800)]})
    with open_store(urls[0]) as store:
        store.insert("iterations", whole, "whole")
        assert look_up(store, "iterations", whole) == (32, 32)
        assert look_up(store, "iterations", to_arrow("iterations", iterations(50, 77))) == (0, 2)
        with open_store(urls[1]) as second, second.lease() as client:
            client.command("DELETE FROM iterations_local WHERE step >= 50")
        found, asked = look_up(store, "iterations", whole)
        assert 0 < found < asked == 32, "one shard has lost its part"
        with store.lease() as client:
            client.command("DELETE FROM iterations_local WHERE step >= 50")
    assert 0 < counts[0] < 800, "everything went to one shard"
    assert verdict_of(urls[0]) == embedded_verdict
    assert main(["store", "init", "--store", urls[0], "--ttl", "5d"]) == 0
    assert "5 days" in status_line(urls[0], capsys, "iterations")
    assert main(["store", "init", "--store", urls[0], "--cluster", "other", "--no-replicas"]) == EXIT_USAGE
    assert "tables of the cluster 'both'" in capsys.readouterr().err
    with open_store(urls[0]) as store:
        job = str(query_columns(store, "SELECT job FROM latest_run")["job"][0])
    assert main(["store", "rm", job, "--yes", "--store", urls[0]]) == EXIT_UNAVAILABLE
    assert "on other shards" in capsys.readouterr().err
    assert main(["store", "rm", job, "--yes", "--store", urls[1]]) == 0
    assert main(["store", "rm", job, "--yes", "--store", urls[0]]) == EXIT_UNAVAILABLE
    assert f"no job '{job}' is stored" in capsys.readouterr().err


def test_whose_runs_are_on_two_shards(
    shards: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What asks ``ranks`` within a question about ``ranks`` or ``baselines``: rows of one run are on both shards."""
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    for server in shards:
        server.command("CREATE DATABASE whose")
        with open_store(server.url("whose")) as store:
            init_schema(store, cluster="both", replicas=False)
    with open_store(new_store(tmp_path)) as alone:
        expected = whose(alone)
    for server in shards:
        with open_store(server.url("whose")) as store:
            counted = int(query_columns(store, "SELECT count() AS n FROM ranks_local")["n"][0])
            if server is shards[0]:
                assert whose(store) == expected
            else:
                assert 0 < counted < int(query_columns(store, "SELECT count() AS n FROM ranks")["n"][0])
    own, other, reason = expected
    assert (own, other) == (["regression"], [])
    assert "ranks of uid 1000 on node-9 are stored as 'llama'" in reason


def whose(store: Store) -> tuple[list[str], list[str], str]:
    """What is found of a user's slower run, of another user's, and the reason of the first."""
    for number, job in ((1, "llama"), (2, "llama"), (3, "llama#uid1000")):
        assert learn(store, run_of(store, 1000, number, job=job))
    with Writer(store, source="test") as writer:
        for rank in range(4):
            row = {**RANK, "job": "llama", "run": 4, "rank": rank, "host": "node-9", "uid": 1000, "container": ""}
            writer.append("ranks", row)
    own = run_of(store, 1000, 4, "void=0.08", job="llama#uid1000")
    other = run_of(store, 65534, 5, "void=0.08")
    return [one["kind"] for one in own["findings"]], [one["kind"] for one in other["findings"]], own["reason"]


@pytest.mark.parametrize("form", ["server", "shard"])
def test_old_tables_become_those_that_a_new_database_has(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Of a cluster, codecs of Distributed tables, which store nothing, stay as they were."""
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    if form == "shard":
        server, words = request.getfixturevalue("shards")[0], {"cluster": "both", "replicas": False}
        databases = ["new_tables", "old_tables"]
        server.command("CREATE DATABASE new_tables")
    else:
        server, words = request.getfixturevalue("made"), {}
        databases = ["argus", "old_tables"]
    server.command("CREATE DATABASE old_tables")
    found = []
    for database in databases:
        with open_store(server.url(database)) as store:
            if database == "old_tables":
                cluster = Cluster("both", database, replicas=False) if form == "shard" else None
                make_old_store(store, 15, cluster=cluster)
                with pytest.raises(ArgusError, match=r"old tables \(schema 15\)"):
                    ensure_schema(store)
            state = init_schema(store, **words)
            assert ensure_schema(store) == state
            found.append({part: _renamed(lines, database, databases[0]) for part, lines in shown(store).items()})
    new, upgraded = found
    assert upgraded["indices"] == new["indices"]
    assert [line[:2] for line in upgraded["tables"]] == [line[:2] for line in new["tables"]]
    for line, other in zip(new["tables"], upgraded["tables"], strict=True):
        if "Distributed" not in str(line[1]):
            assert other == line
    for line, other in zip(new["columns"], upgraded["columns"], strict=True):
        assert other[:-1] == line[:-1], "all but the codec"


def _renamed(lines: list[tuple[object, ...]], database: str, name: str) -> list[tuple[object, ...]]:
    return [tuple(str(each).replace(database, name) for each in line) for line in lines]


def status_line(url: str, capsys: pytest.CaptureFixture[str], table: str) -> str:
    assert main(["store", "status", "--store", url]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{table} "))


def test_the_replicated_form_is_sql_that_a_server_understands(server: Server) -> None:
    """It takes Keeper to run; its grammar is the server's own here, and its settings and engines are looked up."""
    for form in (Cluster("main", "argus"), Cluster("it's", "argus", replicas=False)):
        for statement in (*statements(), *(one for upgrade in upgrades() for one in upgrade.statements)):
            for each in render(_fill(statement, {"ttl": "INTERVAL 1 DAY", "raw_ttl": "INTERVAL 1 DAY"}), form):
                assert server.command(f"EXPLAIN AST {each}")
                assert ("ON CLUSTER" in each) == form.replicas
                if each.startswith("CREATE TABLE") and "Distributed(" not in each:
                    assert ("ENGINE = Replicated" in each) == form.replicas
                    assert "non_replicated" not in each or not form.replicas
    engines = set(server.command("SELECT name FROM system.table_engines").split())
    assert engines > {"ReplicatedMergeTree", "ReplicatedReplacingMergeTree", "ReplicatedAggregatingMergeTree"}
    settings = server.command("SELECT name FROM system.replicated_merge_tree_settings").split()
    assert "replicated_deduplication_window" in settings
