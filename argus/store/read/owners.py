"""Of which runs, hosts' parts of runs, ranks and templates a store has rows: many are asked for at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa

from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.schema_files import table_columns, table_keys

_AT_ONCE = 500
_BYTES_AT_ONCE = 16 << 10
"""Of names in one question: parameters go to a server in the URL. ClickHouse takes 1 MiB there, and 128 KiB in each."""
_TYPES = {
    "job": "String",
    "run": "UInt32",
    "host": "String",
    "kernel_id": "UInt64",
    "template": "UInt64",
    "stack_id": "UInt64",
}


def runs_there(store: Store, runs: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those (job, run) of which any table has rows.

    Raises:
        ArgusError: The store cannot be asked.
    """
    return {(str(job), int(run)) for job, run in _there(store, ("job", "run"), runs)}


def hosts_there(store: Store, parts: Collection[tuple[str, int, str]]) -> set[tuple[str, int, str]]:
    """Those (job, run, host) of which any table has rows.

    Raises:
        ArgusError: The store cannot be asked.
    """
    return {(str(job), int(run), str(host)) for job, run, host in _there(store, ("job", "run", "host"), parts)}


def ranks_there(store: Store, runs: Collection[tuple[str, int]]) -> pa.Table:
    """The ranks of (job, run) and their hosts, as the table ``ranks`` has them: job, run, rank, host.

    Raises:
        ArgusError: The store cannot be asked.
    """
    kinds = {"job": pa.string(), "run": pa.uint32(), "rank": pa.uint32(), "host": pa.string()}
    parts = [pa.table({name: pa.array([], kind) for name, kind in kinds.items()})]
    text = f"SELECT DISTINCT {', '.join(kinds)} FROM ranks WHERE {_where(('job', 'run'))}"
    for some in _portions(runs):
        rows = query_columns(store, text, _parameters(("job", "run"), some))
        parts.append(pa.table({name: pa.array(rows[name].tolist(), kind) for name, kind in kinds.items()}))
    return pa.concat_tables(parts)


KEYS = {"kernel_templates": ("job", "run", "kernel_id", "template"), "stacks": ("job", "run", "stack_id")}
"""What identifies a row, of tables that others' rows refer to."""


def rows_there(store: Store, table: str, asked: Collection[tuple[str | int, ...]]) -> set[tuple[str | int, ...]]:
    """Those rows of a table (``KEYS``) that a store has.

    Raises:
        ArgusError: The store cannot be asked.
    """
    of = KEYS[table]
    text = f"SELECT DISTINCT {', '.join(of)} FROM {table} WHERE {_where(of)}"
    found: set[tuple[str | int, ...]] = set()
    for some in _portions(asked):
        rows = query_columns(store, text, _parameters(of, some))
        found |= set(zip(*(rows[name].tolist() for name in of), strict=True))
    return found & set(asked)


def _there(store: Store, of: tuple[str, ...], asked: Collection[tuple[str | int, ...]]) -> set[tuple[str | int, ...]]:
    tables = [name for name, columns in table_columns().items() if columns.keys() >= set(of)]
    # Tables that keep the newest version of a row are small, and have something of nearly every run.
    small, large = ([name for name in tables if (name in table_keys()) == keeps_all] for keeps_all in (False, True))
    found: set[tuple[str | int, ...]] = set()
    for names in (small, large):
        text = " UNION ALL ".join(
            f"(SELECT DISTINCT {', '.join(of)} FROM `{name}` WHERE {_where(of)})" for name in names
        )
        for some in _portions([one for one in asked if one not in found]):
            rows = query_columns(store, text, _parameters(of, some))
            found |= set(some) & set(zip(*(rows[name].tolist() for name in of), strict=True))
    return found


def _where(of: tuple[str, ...]) -> str:
    return " AND ".join(f"{name} IN {{{name}:Array({_TYPES[name]})}}" for name in of)


def _parameters(of: tuple[str, ...], asked: list[tuple[str | int, ...]]) -> dict[str, list[str | int]]:
    return {name: list(dict.fromkeys(values)) for name, values in zip(of, zip(*asked, strict=True), strict=True)}


def _portions(asked: Collection[tuple[str | int, ...]]) -> Iterator[list[tuple[str | int, ...]]]:
    some: list[tuple[str | int, ...]] = []
    length = 0
    for one in sorted(asked):
        size = sum(len(str(value).encode()) for value in one)
        if some and (len(some) == _AT_ONCE or length + size > _BYTES_AT_ONCE):
            yield some
            some, length = [], 0
        some.append(one)
        length += size
    if some:
        yield some
