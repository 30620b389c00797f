"""The tables of a store: made, upgraded to the version that ``schemas/`` describes, and stamped with it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argus import __version__
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import schema_files, spool
from argus.store.cluster import LOCAL, Cluster, render
from argus.store.failures import lacks_table, spool_not_queried
from argus.store.open import LEASE_TIMEOUT_S, Store

DEFAULT_TTL = "INTERVAL 30 DAY"
"""How long rows are kept."""
DEFAULT_RAW_TTL = "INTERVAL 2 DAY"
"""How long single CUDA calls are kept: they are by far the most rows."""

_VERSIONS = """
CREATE TABLE IF NOT EXISTS schema_migrations
(
  version UInt32 COMMENT 'Version that the tables were brought to',
  name String COMMENT 'Argus that did so; up to version 25 the file that was applied',
  checksum String COMMENT 'SHA-256 of the statements, comments left out; up to version 25 of the file',
  applied DateTime64(3, 'UTC') DEFAULT now64(3) COMMENT 'When it did'
) ENGINE = ReplacingMergeTree ORDER BY version
COMMENT 'Which versions of the tables this store has had'
"""
_LAST_NUMBERED = 25
"""Up to this version each was a file of its own, and a store has a row of each that was applied. From the next one on a
row is a stamp: all that the version has is there."""

_UNITS = {"s": "SECOND", "m": "MINUTE", "h": "HOUR", "d": "DAY", "w": "WEEK", "y": "YEAR"}
_UNIT_DAYS = {"SECOND": 1 / 86400, "MINUTE": 1 / 1440, "HOUR": 1 / 24, "DAY": 1, "WEEK": 7, "MONTH": 31, "YEAR": 366}
_MAX_TTL_DAYS = 3660
"""Ten years. DateTime ends in 2106, and a sum beyond it wraps round: the rows would expire at once."""


@dataclass(frozen=True)
class SchemaState:
    """What a store has against what this Argus knows."""

    version: int
    """Version of the store's tables; 0: there are none."""
    known: int
    """Version that this Argus makes."""
    changed: list[str] = field(default_factory=list)
    """``schemas``, where the store's tables were made from other statements that are of the same version."""
    missing: list[int] = field(default_factory=list)
    """Versions that the store was not brought to; empty: it is up to date. Up to 25 one may be older than ``version``:
    of two that were made at the same time, the one with the higher number may have been done first."""


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
    newest = schema_files.VERSION
    every = range(1, newest + 1)
    if not client.command("EXISTS TABLE schema_migrations"):
        return SchemaState(0, newest, missing=list(every))
    rows = client.query("SELECT version, checksum FROM schema_migrations FINAL ORDER BY version").result_rows
    recorded = {int(version): checksum for version, checksum in rows}
    version = max(recorded, default=0)
    if version > newest:
        raise ArgusError(
            f"the store {store.url} was written by a newer Argus (schema {version}; this one has {newest})",
            "Upgrade Argus, or name another store with --store",
            EXIT_UNAVAILABLE,
        )
    complete = version if version > _LAST_NUMBERED else 0
    missing = [number for number in every if number > complete and number not in recorded]
    differs = recorded.get(newest, schema_files.checksum()) != schema_files.checksum()
    return SchemaState(version, newest, ["schemas"] if differs else [], missing)


def ensure_schema(store: Store, *, timeout_s: float = LEASE_TIMEOUT_S) -> SchemaState:
    """Makes sure that rows can be written: creates or upgrades the tables of an embedded store, checks a server's. An
    upgrade is reported in one line on standard error.

    A spool has no tables: it gets its folder.

    Raises:
        ArgusError: The store cannot be reached, was written by a newer Argus, or is a server without the tables.
    """
    if store.target.spool is not None:
        spool.prepare(store.target.spool)
        return SchemaState(schema_files.VERSION, schema_files.VERSION)
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
    made = init_schema(store, timeout_s=timeout_s)
    if state.version:
        line = f"argus: brought the store {store.url} from schema {state.version} to {made.version}; its rows stay"
        print(line, file=sys.stderr)
    return made


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

    Safe to run twice, also at the same time: tables are made and altered where they lack something, views are replaced.

    Args:
        store: The store.
        ttl: How long rows are kept, as ``interval`` reads it. Given for a store that has tables: changes theirs.
        raw_ttl: The same for single CUDA calls.
        timeout_s: How long to wait for the store.
        cluster: Name of a cluster of servers: tables are made on all of it (``cluster.render``). Tables that are there
            already report it themselves.
        replicas: Whether they are replicated; otherwise they are made on this node only, as a shard of its own.

    Raises:
        ArgusError: The store cannot be reached or refuses, was written by a newer Argus, or has tables of another form.
    """
    if cluster and store.embedded:
        raise ArgusError("an embedded store cannot be a cluster", "Name a server: --store clickhouse://…", EXIT_USAGE)
    if store.target.spool is not None:
        raise spool_not_queried(store.target)
    from argus.store.driver import Error

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

            def carry_out(*statements: str) -> None:
                for statement in statements:
                    filled = _fill(statement, values)
                    for each in [filled] if form is None else render(filled, form):
                        _make(client, each)

            carry_out(_VERSIONS.strip())
            if before.missing:
                _bring_up_to_date(client, carry_out, before.missing)
            if before.version:
                carry_out(*_ttl_changes(explicit))
            return schema_state(store, client)
        except Error as failure:
            raise store.explain(failure) from None


def _bring_up_to_date(client: Any, carry_out: Callable[..., None], missing: list[int]) -> None:
    """Makes what a store lacks, and stamps it with the version. Tables hold rows, so they are altered; views hold none,
    so they are all made anew."""
    there = client.command("EXISTS TABLE jobs")
    carry_out(*schema_files.tables().values(), *schema_files.feeds().values())
    for upgrade in schema_files.upgrades() if there else ():
        if upgrade.version in missing:
            carry_out(*upgrade.statements)
    carry_out(*schema_files.views().values())
    client.command(
        "INSERT INTO schema_migrations (version, name, checksum) SELECT {v:UInt32}, {n:String}, {c:String}",
        settings={"distributed_foreground_insert": 1},
        parameters={"v": schema_files.VERSION, "n": f"argus {__version__}", "c": schema_files.checksum()},
    )


def _make(client: Any, statement: str) -> None:
    """Carries out a statement. A view that it reads is gone for a moment where another process, which
    makes the same tables, replaces it."""
    from argus.store.driver import Error

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
    from argus.store.driver import Error

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

    from argus.store.driver import Error

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


def _ttl_changes(explicit: set[str]) -> list[str]:
    """The statements that change how long tables keep rows, where ``ttl`` or ``raw_ttl`` was given."""
    changes = []
    for name, statement in schema_files.tables().items():
        rule = re.search(r"^TTL (.*\{\{(\w+)\}\}.*)$", statement, re.MULTILINE)
        if rule and rule.group(2) in explicit:
            # Rows already stored keep their dates; only whole parts are dropped, so nothing is rewritten.
            changes.append(f"ALTER TABLE {name} MODIFY TTL {rule.group(1)} SETTINGS materialize_ttl_after_modify = 0")
    return changes
