"""The tables: ``schemas/NNN_*.sql`` applied in order, each once."""

from __future__ import annotations

import functools
import hashlib
import re
import time
from dataclasses import dataclass, field
from typing import Any

from argus.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.resources import resource_dir
from argus.store.cluster import LOCAL, Cluster, render
from argus.store.open import LEASE_TIMEOUT_S, Store, lacks_table, spool_not_queried
from argus.store.statements import split_statements

DEFAULT_TTL = "INTERVAL 30 DAY"
"""How long rows are kept."""
DEFAULT_RAW_TTL = "INTERVAL 2 DAY"
"""How long single CUDA calls are kept: they are by far the most rows."""

_MIGRATIONS = """
CREATE TABLE IF NOT EXISTS schema_migrations
(
  version UInt32 COMMENT 'Number of the file in schemas/',
  name String COMMENT 'Name of the file',
  checksum String COMMENT 'SHA-256 of the file',
  applied DateTime64(3, 'UTC') DEFAULT now64(3) COMMENT 'When it was applied'
) ENGINE = ReplacingMergeTree ORDER BY version
COMMENT 'Which schema files were applied'
"""

ROLLUP = "_rollup"
"""How the names of tables end that materialised views write to."""
_UNITS = {"s": "SECOND", "m": "MINUTE", "h": "HOUR", "d": "DAY", "w": "WEEK", "y": "YEAR"}
_UNIT_DAYS = {"SECOND": 1 / 86400, "MINUTE": 1 / 1440, "HOUR": 1 / 24, "DAY": 1, "WEEK": 7, "MONTH": 31, "YEAR": 366}
_MAX_TTL_DAYS = 3660
"""Ten years. DateTime ends in 2106, and a sum beyond it wraps round: the rows would expire at once."""


EQUIVALENT = {1: ("a293423f2a31dcc26fe6305b93a83a35dd4879d009d38f75d5dc900ceb558696",)}
"""Checksums of older forms of a file that differ in nothing but the order of rows on disk."""


@dataclass(frozen=True)
class Migration:
    """One file of ``schemas/``."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the file, before placeholders are filled."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class SchemaState:
    """What a store has against what this Argus knows."""

    version: int
    """Newest migration applied; 0: none."""
    known: int
    """Newest migration this Argus has."""
    changed: list[str] = field(default_factory=list)
    """Applied migrations whose file has changed since."""
    missing: list[int] = field(default_factory=list)
    """Migrations this Argus has that were not applied. One may be older than ``version``: of two that are made at the
    same time, the one with the higher number may be done first."""


def migrations() -> list[Migration]:
    """The schema files in order of application."""
    found = [
        Migration(int(path.name[:3]), path.name, path.read_text(encoding="utf-8"))
        for path in sorted(resource_dir("schemas").glob("[0-9][0-9][0-9]_*.sql"))
    ]
    if not found or found[0].version != 1 or len({m.version for m in found}) != len(found):
        raise ArgusError("the schema files of this installation are incomplete", "Install Argus again")
    return found


def interval(text: str) -> str:
    """A span of time as ClickHouse writes it: ``30d``, ``12 hours`` or ``INTERVAL 30 DAY`` → ``INTERVAL 30 DAY``.

    Raises:
        ArgusError: Not a span of time, zero, or longer than ten years.
    """
    match = re.fullmatch(r"(?:INTERVAL\s+)?(\d+)\s*([A-Za-z]+)", text.strip(), re.IGNORECASE)
    unit = ""
    if match:
        word = match.group(2)
        unit = _UNITS.get(word, word.upper().removesuffix("S"))
    if not match or unit not in _UNIT_DAYS or int(match.group(1)) == 0:
        raise ArgusError(f"'{text}' is no span of time", "Write it like 30d, 12h or '6 months'", EXIT_USAGE)
    if int(match.group(1)) * _UNIT_DAYS[unit] > _MAX_TTL_DAYS:
        raise ArgusError(f"'{text}' is too long to keep rows", "At most 10 years", EXIT_USAGE)
    return f"INTERVAL {int(match.group(1))} {unit}"


def schema_state(store: Store, client: Any | None = None) -> SchemaState:
    """Reads the schema's version from a store.

    Raises:
        ArgusError: The store cannot be reached, or was written by a newer Argus.
    """
    if client is None:
        with store.lease() as leased:
            return schema_state(store, leased)
    known = {m.version: m for m in migrations()}
    newest = max(known)
    if not client.command("EXISTS TABLE schema_migrations"):
        return SchemaState(0, newest, missing=sorted(known))
    rows = client.query("SELECT version, name, checksum FROM schema_migrations FINAL ORDER BY version").result_rows
    version = max((int(row[0]) for row in rows), default=0)
    if version > newest:
        raise ArgusError(
            f"the store {store.url} was written by a newer Argus (schema {version}; this one knows {newest})",
            "Upgrade Argus, or name another store with --store",
            EXIT_UNAVAILABLE,
        )
    applied = {int(row[0]) for row in rows}
    if stranger := sorted(applied - set(known)):
        raise ArgusError(
            f"the store {store.url} has schema {stranger[0]}, which this Argus does not know",
            "Upgrade Argus, or name another store with --store",
            EXIT_UNAVAILABLE,
        )
    changed = [
        name
        for number, name, checksum in rows
        if checksum not in (known[int(number)].checksum, *EQUIVALENT.get(int(number), ()))
    ]
    return SchemaState(version, newest, changed, sorted(set(known) - applied))


def ensure_schema(store: Store, *, timeout_s: float = LEASE_TIMEOUT_S) -> SchemaState:
    """Makes sure that rows can be written: creates or upgrades the tables of an embedded store, checks a server's.

    A spool has no tables: it gets its folder.

    Raises:
        ArgusError: The store cannot be reached, was written by a newer Argus, or is a server without the tables.
    """
    if store.target.spool is not None:
        from argus.store import spool

        spool.prepare(store.target.spool)
        newest = migrations()[-1].version
        return SchemaState(newest, newest)
    with store.lease(timeout_s) as client:
        state = _state(store, client)
        if not state.missing:
            return state
        if not store.embedded:
            lacks = "has no Argus tables" if state.version == 0 else f"has old tables (schema {state.version})"
            raise ArgusError(
                f"the database '{store.database}' on {store.target.host} {lacks}",
                f"Run: argus store init --store '{store.url}'",
                EXIT_UNAVAILABLE,
            )
    return init_schema(store, timeout_s=timeout_s)


def init_schema(
    store: Store,
    *,
    ttl: str | None = None,
    raw_ttl: str | None = None,
    timeout_s: float = LEASE_TIMEOUT_S,
    cluster: str = "",
    replicas: bool = True,
) -> SchemaState:
    """Creates or upgrades the tables, and the database of a server where it lacks.

    Safe to run twice, also at the same time: every statement creates only what does not exist.

    Args:
        store: The store.
        ttl: How long rows are kept, as ``interval`` reads it. Given for a store that has tables: changes theirs.
        raw_ttl: The same for single CUDA calls.
        timeout_s: How long to wait for the store.
        cluster: Name of a cluster of servers: tables are made on all of it (``cluster.render``). Tables that are there
            already tell it themselves.
        replicas: Whether they are replicated; otherwise they are made on this node only, as a shard of its own.

    Raises:
        ArgusError: The store cannot be reached or refuses, was written by a newer Argus, or has tables of another form.
    """
    if cluster and store.embedded:
        raise ArgusError("an embedded store is no cluster", "Name a server: --store clickhouse://…", EXIT_USAGE)
    if store.target.spool is not None:
        raise spool_not_queried(store.target)
    from clickhouse_connect.driver.exceptions import Error

    explicit = {name for name, given in (("ttl", ttl), ("raw_ttl", raw_ttl)) if given}
    if not store.embedded and store.database != "default":
        _create_database(store, timeout_s, f" ON CLUSTER `{cluster}`" if cluster and replicas else "")
    with store.lease(timeout_s) as client:
        try:
            before = schema_state(store, client)
            form = _cluster(store, client, cluster, replicas)
            # Tables that come with an upgrade keep their rows for as long as those that are there.
            values = {
                "ttl": interval(ttl or _kept(client, "iterations") or DEFAULT_TTL),
                "raw_ttl": interval(raw_ttl or _kept(client, "launches") or DEFAULT_RAW_TTL),
            }

            def rendered(statement: str) -> list[str]:
                filled = _fill(statement, values)
                return [filled] if form is None else render(filled, form)

            for statement in rendered(_MIGRATIONS.strip()):
                client.command(statement)
            for migration in migrations():
                if migration.version in before.missing:
                    for statement in split_statements(migration.text):
                        for each in rendered(statement):
                            _make(client, each)
                    client.command(
                        "INSERT INTO schema_migrations (version, name, checksum)"
                        " SELECT {v:UInt32}, {n:String}, {c:String}",
                        settings={"distributed_foreground_insert": 1},
                        parameters={"v": migration.version, "n": migration.name, "c": migration.checksum},
                    )
                elif explicit:
                    for alter in _ttl_changes(migration.text, values, explicit):
                        for each in [alter] if form is None else render(alter, form):
                            client.command(each)
            return schema_state(store, client)
        except Error as failure:
            raise store.explain(failure) from None


def _make(client: Any, statement: str) -> None:
    """Carries out a statement of a migration. A view that it reads is gone for a moment where another process, which
    makes the same tables, replaces it."""
    from clickhouse_connect.driver.exceptions import Error

    for wait_s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):
        try:
            client.command(statement)
            return
        except Error as failure:
            if not lacks_table(failure):
                raise
        time.sleep(wait_s)
    client.command(statement)


def _state(store: Store, client: Any) -> SchemaState:
    from clickhouse_connect.driver.exceptions import Error

    try:
        return schema_state(store, client)
    except Error as failure:
        raise store.explain(failure) from None


def _cluster(store: Store, client: Any, name: str, replicas: bool) -> Cluster | None:
    """The form that the tables have, or, where there are none yet, are to get; None: those of one server."""
    if not name and store.embedded:
        return None
    found = client.query(
        "SELECT name, engine, engine_full FROM system.tables"
        " WHERE database = currentDatabase() AND name IN ('jobs', 'jobs_local')"
    ).result_rows
    engines = {row[0]: (row[1], row[2]) for row in found}
    if "jobs" not in engines:
        return Cluster(name, store.database, replicas) if name else None
    engine, full = engines["jobs"]
    match = re.match(r"Distributed\('([^']*)'", full) if engine == "Distributed" else None
    if name and (match is None or match.group(1) != name):
        there = f"tables of the cluster '{match.group(1)}'" if match else "tables of a single server"
        raise ArgusError(f"the database '{store.database}' has {there}", "Name another database", EXIT_USAGE)
    if match is None:
        return None
    return Cluster(match.group(1), store.database, engines["jobs_local"][0].startswith("Replicated"))


def _kept(client: Any, table: str) -> str:
    """How long a table keeps its rows, as ``interval`` reads it; empty: there is no such table."""
    rows = client.query(
        "SELECT extractGroups(engine_full, 'TTL \\\\w+ \\\\+ toInterval([A-Za-z]+)\\\\((\\\\d+)\\\\)') AS ttl"
        " FROM system.tables WHERE database = currentDatabase() AND name IN ({name:String}, {local:String})"
        " ORDER BY empty(ttl) LIMIT 1",
        parameters={"name": table, "local": table + LOCAL},
    ).result_rows
    return f"{rows[0][0][1]} {rows[0][0][0]}" if rows and rows[0][0] else ""


def _create_database(store: Store, timeout_s: float, everywhere: str) -> None:
    from dataclasses import replace

    from clickhouse_connect.driver.exceptions import Error

    with Store(replace(store.target, database="default"), create=True) as server, server.lease(timeout_s) as client:
        try:
            client.command("CREATE DATABASE IF NOT EXISTS `" + store.database.replace("`", "``") + "`" + everywhere)
        except Error as failure:
            raise store.explain(failure) from None


_CODEC_COMMENT = re.compile(r"(CODEC\((?:[^()]|\([^()]*\))*\))\s+(COMMENT '(?:[^'\\]|\\.|'')*')")


def _fill(statement: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        statement = statement.replace("{{" + name + "}}", value)
    if left := re.search(r"\{\{(\w+)\}\}", statement):
        raise ArgusError(f"a schema file uses the unknown placeholder {left.group(0)}", "Install Argus again")
    # Servers before 26.9 take a column's comment only before its codec (26.7: a syntax error).
    return _CODEC_COMMENT.sub(r"\2 \1", statement)


def _ttl_changes(text: str, values: dict[str, str], explicit: set[str]) -> list[str]:
    changes = []
    for statement in split_statements(text):
        table = re.match(r"CREATE TABLE IF NOT EXISTS (\w+)", statement)
        rule = re.search(r"^TTL (.*\{\{(\w+)\}\}.*)$", statement, re.MULTILINE)
        if table and rule and rule.group(2) in explicit:
            # Rows already stored keep their dates; only whole parts are dropped, so nothing is rewritten.
            changes.append(f"ALTER TABLE {table.group(1)} MODIFY TTL {_fill(rule.group(1), values)} "
                           "SETTINGS materialize_ttl_after_modify = 0")  # fmt: skip
    return changes


@dataclass(frozen=True)
class Column:
    """A column of a table, as the schema files declare it."""

    name: str
    type: str
    """ClickHouse type."""
    optional: bool
    """Whether a row may leave it out: it has a default."""


@functools.cache
def table_keys() -> dict[str, tuple[str, ...]]:
    """The columns of the sorting key of every table that keeps each row it is given: those that keep only the newest
    are not here. Parts of a key that are made from a column (its minute) are left out."""
    keys = {}
    for migration in migrations():
        for statement in split_statements(migration.text):
            made = re.match(r"CREATE TABLE IF NOT EXISTS (\w+)", statement)
            engine = re.search(r"^\) ENGINE = MergeTree\s(?:.*\s)?ORDER BY \((.*)\)$", statement, re.MULTILINE)
            if made and engine:
                names = (name.strip() for name in _split_commas(engine.group(1)))
                keys[made.group(1)] = tuple(name for name in names if name.isidentifier())
    return keys


_COLUMN = re.compile(r"(\w+)\s+(.+?)(?=\s+(?:DEFAULT|MATERIALIZED|ALIAS|CODEC|COMMENT|TTL)\b|$)", re.DOTALL)


@functools.cache
def table_columns() -> dict[str, dict[str, Column]]:
    """The columns of every table that rows can be written to, read from the schema files: no store is asked.

    Rollups are not among them: only materialised views write there.
    """
    tables: dict[str, dict[str, Column]] = {}
    for migration in migrations():
        for statement in split_statements(migration.text):
            made = re.match(r"CREATE TABLE IF NOT EXISTS (\w+)\s*\((.*)\n\)", statement, re.DOTALL)
            if made and made.group(1).endswith(ROLLUP):
                continue
            if made:
                tables[made.group(1)] = {c.name: c for c in map(_column, _split_commas(made.group(2)))}
            elif added := re.match(r"ALTER TABLE (\w+)\s+(ADD COLUMN .*)", statement, re.DOTALL):
                for part in _split_commas(added.group(2)):
                    text = re.sub(r"\AADD COLUMN (IF NOT EXISTS )?|\s+(AFTER \w+|FIRST)\Z", "", part)
                    column = _column(text)
                    # Rows of an older writer lack it, so ClickHouse fills the type's default.
                    tables[added.group(1)][column.name] = Column(column.name, column.type, True)
    return tables


def _column(text: str) -> Column:
    match = _COLUMN.match(text.strip())
    assert match, text
    return Column(match.group(1), match.group(2).strip(), bool(re.search(r"\s(DEFAULT|MATERIALIZED|ALIAS)\s", text)))


def _split_commas(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for token in re.findall(r"'(?:[^'\\]|\\.|'')*'|[(),]|[^'(),]+", text):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += token
    parts.append(current.strip())
    return [part for part in parts if part]
