"""What a store holds: its engine, its schema, and how much is in every table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from argus.model.errors import ArgusError
from argus.store import spill
from argus.store.cluster import LOCAL
from argus.store.open import Store
from argus.store.reader import Run, list_runs, query, query_columns
from argus.store.schema import SchemaState, schema_state
from argus.store.spill import Waiting


@dataclass(frozen=True)
class TableStatus:
    """One table or view."""

    name: str
    comment: str
    rows: int | None
    """None for a view: counting it would run it."""
    bytes: int | None
    """On disk, compressed."""
    oldest_ns: int | None = None
    """Wall time of the oldest row; None: no rows, or rows without a time."""
    newest_ns: int | None = None
    kept: str = ""
    """How long rows are kept, as ClickHouse has it: ``30 days``; empty: for ever."""


@dataclass(frozen=True)
class StoreStatus:
    """What ``argus store status`` shows."""

    url: str
    engine: str
    """``chdb`` or ``ClickHouse``, with its version; empty: nothing is there yet."""
    schema: SchemaState | None
    tables: list[TableStatus] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    spill: Waiting | None = None
    """What traces have left on disk for this store; None: nothing is spilled for it."""


def list_tables(store: Store) -> list[TableStatus]:
    """The tables and views with comments, rows and bytes on disk; of a cluster those of the node that is asked.

    Raises:
        ArgusError: The store cannot be reached.
    """
    found = query(
        store,
        "SELECT name, comment, engine = 'View' AS is_view, toInt64(ifNull(total_rows, 0)) AS rows,"
        " toInt64(ifNull(total_bytes, 0)) AS bytes,"
        " extractGroups(engine_full, 'TTL \\\\w+ \\\\+ toInterval([A-Za-z]+)\\\\((\\\\d+)\\\\)') AS ttl"
        " FROM system.tables WHERE database = currentDatabase() AND NOT is_temporary AND engine != 'MaterializedView'"
        " ORDER BY is_view, name",
    ).to_pylist()
    by_name = {t["name"]: t for t in found}
    if f"jobs{LOCAL}" in by_name:
        here = {name.removesuffix(LOCAL): t for name, t in by_name.items() if name.endswith(LOCAL)}
        found = [
            {**here.get(t["name"], t), "name": t["name"], "comment": t["comment"]}
            for t in found
            if not t["name"].endswith(LOCAL)
        ]
    return [
        TableStatus(
            t["name"],
            t["comment"],
            None if t["is_view"] else t["rows"],
            None if t["is_view"] else t["bytes"],
            kept=f"{t['ttl'][1]} {t['ttl'][0].lower()}{'s' * (t['ttl'][1] != '1')}" if t["ttl"] else "",
        )
        for t in found
    ]


def store_status(store: Store) -> StoreStatus:
    """Reads a store's status.

    Raises:
        ArgusError: The store cannot be reached, or was written by a newer Argus.
    """
    place = spill.place(store.target)
    waiting = None if place is None else spill.waiting(place.folder)
    if not store.exists():
        return StoreStatus(store.url, "", None, spill=waiting)
    with store.lease() as client:
        engine = f"{'chdb' if store.embedded else 'ClickHouse'} {client.server_version}"
    times = query_columns(
        store,
        "SELECT table, argMin(name, indexOf(['ts', 'created', 'started'], name)) AS time_column FROM system.columns"
        " WHERE database = currentDatabase() AND name IN ('ts', 'created', 'started') GROUP BY table",
    )
    column_of = dict(zip(times["table"], times["time_column"], strict=True))
    tables = []
    for table in list_tables(store):
        if table.rows and table.name in column_of:
            # Names come from the store's own catalogue, and are quoted.
            column, name = (x.replace("`", "``") for x in (column_of[table.name], table.name))
            span = query_columns(
                store,
                f"SELECT toDateTime64(min(`{column}`), 9) AS a, toDateTime64(max(`{column}`), 9) AS b FROM `{name}`",
            )
            oldest, newest = int(span["a"][0]), int(span["b"][0])
            table = replace(table, oldest_ns=oldest, newest_ns=newest)
        tables.append(table)
    state = schema_state(store)
    runs: list[Run] = list_runs(store) if state.version else []
    return StoreStatus(store.url, engine, state, tables, runs, waiting)


def describe_table(store: Store, table: str) -> list[tuple[str, str, str]]:
    """The columns of a table as (name, type, comment).

    Raises:
        ArgusError: There is no such table.
    """
    rows = query(
        store,
        "SELECT name, type, comment FROM system.columns"
        " WHERE database = currentDatabase() AND table = {table:String} ORDER BY position",
        {"table": table},
    ).to_pylist()
    if not rows:
        names = ", ".join(t.name for t in list_tables(store))
        raise ArgusError(f"there is no table '{table}'", f"There are: {names}" if names else "The store is empty")
    return [(row["name"], row["type"], row["comment"]) for row in rows]
