"""Sends batches again that a store may have already."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store import spool
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.schema_files import table_columns, table_keys

DOUBT_S = 20.0
"""After so long the batches of other writers may have pushed a token out of the store's memory (1000 blocks a table).
With many hosts it is sooner: a batch whose answer was lost is always looked for before it is sent again."""
DOUBT_ROLLED_UP_S = 600.0
"""The same for a table with a rollup. Sending again under the token also repairs a rollup that a kill left behind;
being found in the table says nothing of it. Such tables remember 20,000 blocks (schemas/iterations.sql): 30 a second
for so long."""
ROLLED_UP = ("iterations",)
_MOMENTS = (
    ("DateTime64(9", "fromUnixTimestamp64Nano({}, 'UTC')"),
    ("DateTime64(6", "fromUnixTimestamp64Micro({}, 'UTC')"),
    ("DateTime64(3", "fromUnixTimestamp64Milli({}, 'UTC')"),
    ("DateTime", "toDateTime({}, 'UTC')"),
)


class NotLookedUp(ArgusError):
    """Nobody could see whether a store has a batch: it is away, or does not take what is asked of one of the rows."""


def token_forgotten(table: str, age_s: float) -> bool:
    """Whether a store may not remember the token of a batch any more that was sent so long ago."""
    return age_s > (DOUBT_ROLLED_UP_S if table in ROLLED_UP else DOUBT_S)


def replay(
    store: Store,
    batch: spool.Spooled,
    age_s: float,
    timeout_s: float,
    holds_it: Callable[[str, pa.Table, bool], bool] | None = None,
    sent_again: Callable[[str, bool], None] = lambda table, anew: None,
) -> bool:
    """Stores a batch that a writer left on disk, unless the store has it. Returns whether it was sent.

    It was perhaps stored just before its writer was killed, so long ago that its token is forgotten.

    Args:
        store: Where to.
        batch: What was on disk.
        age_s: How long ago it may have been sent first; 0: not known.
        timeout_s: How long to wait for the store.
        holds_it: Asks the store for (table, rows, whether the token may be forgotten); None: ``holds`` does.
        sent_again: Called with (table, what ``insert_again`` returns).

    Raises:
        ArgusError: As ``Store.insert``.
    """
    forgotten = age_s <= 0 or token_forgotten(batch.table, age_s)
    if forgotten or (batch.doubt and batch.table not in ROLLED_UP):
        known = holds_it(batch.table, batch.rows, forgotten) if holds_it else holds(store, batch.table, batch.rows)
        if known:
            return False
    if forgotten or batch.doubt:
        sent_again(batch.table, insert_again(store, batch.table, batch.rows, batch.token, timeout_s))
    else:
        store.insert(batch.table, batch.rows, batch.token, timeout_s)
    return True


def insert_again(store: Store, table: str, rows: pa.Table, token: str, timeout_s: float) -> bool:
    """Stores a batch that was sent before and is not there, or perhaps is.

    ClickHouse notes a block's token before the block is in place (``MergeTreeSink``: the deduplication log, then the
    part's name). An engine that was killed between the two takes the token for stored, and the rows are nowhere. A
    living one does both under one lock: rows that are not there after their token was taken are in no one's hands, and
    are sent under another token. Copies of a replicated table note the token along with the block, and may lag: there,
    and of shards, the token is believed.

    Returns:
        Whether rows were sent under another token because the store had lost them. Of a table with a rollup that has
        them twice.

    Raises:
        ArgusError: As ``Store.insert``.
    """
    if table not in table_keys() and not store.spooled:
        # What keeps the newest version of a row does not mind a repetition.
        store.insert(table, rows, f"{token}/{uuid.uuid4().hex[:8]}", timeout_s)
        return False
    store.insert(table, rows, token, timeout_s)
    if store.spooled or _distributed(store, table):
        return False
    with store.lease(timeout_s):
        found, asked = look_up(store, table, rows)
    if found or not asked:
        return False
    store.insert(table, rows, f"{token}/lost", timeout_s)
    return True


def sent_before_s(file: Path, batch: spool.Spooled) -> float:
    """How long ago a batch may have been sent first; 0: not known, as where the clock was set back."""
    try:
        written = file.stat().st_mtime
    except OSError:
        return 0.0
    return max(0.0, time.time() - min(written, batch.sent_s or written))


def holds(store: Store, table: str, rows: pa.Table) -> bool:
    """Whether a store has a batch already (``look_up``).

    Raises:
        ArgusError: The store cannot be asked.
    """
    found, asked = look_up(store, table, rows)
    return 0 < asked == found


def look_up(store: Store, table: str, rows: pa.Table) -> tuple[int, int]:
    """Looks for a batch in a store by some of its rows. Returns how many of how many are there.

    A batch is stored whole, or (where it spans days, which are partitions) a day at a time from the first on: the first
    and the last row are looked for. Of a Distributed table each shard may have its part or not: there it is the first
    and the last row of each rank, of up to 64. Tables that keep the newest version of a row do not mind a repetition:
    nothing is looked for, (0, 0).

    Raises:
        NotLookedUp: The store cannot be asked.
    """
    types = table_columns().get(table, {})
    # What compares exactly.
    names = [
        name
        for name in rows.column_names
        if name in types and name != "stored" and not re.search(r"Array|Map|Float|Nullable", types[name].type)
    ]
    key = [name for name in table_keys().get(table, ()) if name in names]
    if not key or not rows.num_rows:
        return 0, 0
    found = 0
    try:
        places = identifying_rows(rows, key, by_shard=_distributed(store, table))
        for place in places:
            found += _has_row(store, table, rows.slice(place, 1), {name: types[name].type for name in names})
    except ArgusError as failure:
        # Whatever it is: the rows wait.
        raise NotLookedUp(failure.message, failure.hint, EXIT_UNAVAILABLE) from None
    return found, len(places)


def _distributed(store: Store, table: str) -> bool:
    if store.embedded:
        return False
    engines = "SELECT engine FROM system.tables WHERE database = currentDatabase() AND name = {table:String}"
    return bool(query_columns(store, engines, {"table": table})["engine"].tolist() == ["Distributed"])


def identifying_rows(rows: pa.Table, key: list[str], *, by_shard: bool) -> list[int]:
    """The places of the rows by which a batch is identified."""
    order = ["ts"] if "ts" in rows.column_names else key
    plain = {}
    for name in {*order, *(each for each in ("job", "rank") if each in rows.column_names)}:
        values = rows[name]
        plain[name] = values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
    sorted_by = pc.sort_indices(pa.table(plain), [(name, "ascending") for name in order]).to_pylist()
    if not by_shard:
        return sorted({sorted_by[0], sorted_by[-1]})
    shards = [plain[name].to_pylist() for name in ("job", "rank") if name in plain]
    ends: dict[tuple[Any, ...], list[int]] = {}
    for place in sorted_by:
        pair = ends.setdefault(tuple(values[place] for values in shards), [place, place])
        pair[1] = place
    return sorted({place for pair in list(ends.values())[:64] for place in pair})


def _has_row(store: Store, table: str, row: pa.Table, types: Mapping[str, str]) -> bool:
    tests: list[str] = []
    values: dict[str, Any] = {}
    for k, (name, kind) in enumerate(types.items()):
        value = row[name].cast(pa.int64())[0].as_py() if "Date" in kind else row[name][0].as_py()
        plain = "Int64" if "Date" in kind else re.sub(r"LowCardinality\((.*)\)", r"\1", kind)
        placeholder = f"{{p{k}:{plain}}}"
        if "Date" in kind:
            # A constant on that side, so that the sorting key and the partitions are used.
            placeholder = next(made for prefix, made in _MOMENTS if kind.startswith(prefix)).format(placeholder)
        values[f"p{k}"] = value
        tests.append(f"`{name}` = {placeholder}")
    found = query_columns(store, f"SELECT count() AS n FROM `{table}` WHERE {' AND '.join(tests)}", values)
    return int(found["n"][0]) > 0
