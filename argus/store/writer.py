"""Writes columns into a store without ever stopping whoever brings them.

``append`` copies rows into memory; batches go to the store one after the other, each under a token of its own, so that
a batch sent twice because the answer got lost is stored once. While the store is away batches wait in memory, up to a
limit; beyond it the oldest rows are dropped, kernels and CUDA calls first, and counted.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from argus.store.open import Store, transient
from argus.store.schema import Column, ensure_schema, table_columns

Values: TypeAlias = "npt.NDArray[Any] | Sequence[Any] | str | int | float | bool | None"
"""One column of a batch. A single value stands for all rows."""

FLUSH_ROWS = 200_000
"""A table with so many rows waiting is sent at once."""
FLUSH_S = 1.0
"""The longest that a row waits before it is sent."""
MAX_BYTES = 256 << 20
"""What may wait in memory while the store is away."""
FIRST_TO_DROP = ("kernel_events", "launches", "stack_samples")
"""The tables whose rows go first, in this order: by far the most, and the least of a loss each."""

_BACKOFF_S = (0.05, 5.0)
_LEASE_S = 5.0


@dataclass(eq=False)
class _Batch:
    table: str
    token: str
    rows: pa.Table
    nbytes: int
    tries: int = 0


@dataclass(frozen=True)
class Report:
    """What became of the rows, by table."""

    written: dict[str, int] = field(default_factory=dict)
    """Rows the store has acknowledged."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that were lost: too much waited, the store refused them, or it was still away at the end."""
    last_error: str = ""
    """Why, as the store said it last; empty: nothing went wrong."""


class Writer:
    """Collects rows and stores them.

    Used from one thread, ``maybe_flush`` and ``flush`` send in the calling thread. After ``start`` a thread of its own
    sends, and neither blocks. Every method may be called from any thread.

    Args:
        store: Where to; a writer needs no connection to be made or appended to.
        source: Who writes, for the tokens: say, ``trace/<host>``. Two writers may share it.
        max_bytes: What may wait in memory.
        flush_rows: A table with so many rows waiting is sent by the next ``maybe_flush``.
        flush_s: So is one whose oldest row has waited so long.
    """

    def __init__(
        self,
        store: Store,
        *,
        source: str,
        max_bytes: int = MAX_BYTES,
        flush_rows: int = FLUSH_ROWS,
        flush_s: float = FLUSH_S,
    ) -> None:
        self.store = store
        self.source = source
        self.max_bytes, self.flush_rows, self.flush_s = max_bytes, flush_rows, flush_s
        self.rows_written: Counter[str] = Counter()
        self.rows_dropped: Counter[str] = Counter()
        self.last_error: Exception | None = None
        # Of this writer alone: a second tracing session of the same source must not repeat the first one's tokens.
        self._session = uuid.uuid4().hex
        self._sequence: Counter[str] = Counter()
        self._pending: dict[str, list[pa.Table]] = {}
        self._pending_since: dict[str, float] = {}
        self._outbox: deque[_Batch] = deque()
        self._sending: _Batch | None = None
        self._bytes = 0
        self._backoff_s = 0.0
        self._not_before = 0.0
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._stop = False
        self._schema_ready = False

    @property
    def bytes_waiting(self) -> int:
        """Bytes of rows in memory that the store has not acknowledged."""
        return self._bytes

    @property
    def trouble(self) -> str:
        """Why rows cannot be stored at present; empty: they can."""
        return getattr(self.last_error, "message", str(self.last_error)) if self._backoff_s else ""

    def append(self, table: str, rows: pa.Table | Mapping[str, Values]) -> int:
        """Takes rows over. They are copied: the caller's arrays may be reused at once.

        Args:
            table: The table's name.
            rows: Columns by name. Times of every precision are int64 wall-clock nanoseconds; an ``Array`` column is a
                list of lists, an Arrow list array, or a two-dimensional numpy array.

        Returns:
            The number of rows taken.

        Raises:
            ValueError: No such table, a column is missing, unknown, of another length, or does not fit its type.
        """
        converted = to_arrow(table, rows)
        count = int(converted.num_rows)
        if count == 0:
            return 0
        with self._changed:
            self._pending.setdefault(table, []).append(converted)
            self._pending_since.setdefault(table, time.monotonic())
            self._bytes += converted.nbytes
            self._shed()
        return count

    def maybe_flush(self, now: float | None = None) -> None:
        """Sends the tables that are due by rows or by age. Cheap: call it from every turn of a loop.

        Args:
            now: ``time.monotonic()``, where the caller has it already.
        """
        now = time.monotonic() if now is None else now
        with self._changed:
            for table in list(self._pending):
                rows = sum(part.num_rows for part in self._pending[table])
                if rows >= self.flush_rows or now - self._pending_since[table] >= self.flush_s:
                    self._seal(table)
            if self._worker is not None:
                self._changed.notify_all()
                return
            due = bool(self._outbox) and now >= self._not_before
        if due:
            self._send_all(deadline=0.0)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Sends everything and waits for it.

        Args:
            timeout_s: How long to try while the store is away. Rows not stored by then stay in memory.

        Returns:
            Whether every row that was appended has been stored; ``last_error`` tells why not.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for table in list(self._pending):
                self._seal(table)
            self._not_before = 0.0
            self._changed.notify_all()
            if self._worker is not None:
                self._changed.wait_for(lambda: not self._outbox, timeout_s)
                return not self._outbox
        self._send_all(deadline)
        with self._changed:
            return not self._outbox

    def start(self) -> None:
        """From here on a thread of its own sends."""
        with self._changed:
            if self._worker is None:
                self._stop = False
                self._worker = threading.Thread(target=self._work, name="argus-writer", daemon=True)
                self._worker.start()

    def close(self, timeout_s: float = 30.0) -> Report:
        """Sends what is left and ends the thread. Rows that cannot be stored in time are counted as dropped.

        Args:
            timeout_s: How long to try while the store is away.
        """
        self.flush(timeout_s)
        with self._changed:
            self._stop = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None:
            worker.join(timeout=_LEASE_S + 1)
        with self._changed:
            self._worker = None
            while self._outbox:
                self._drop(self._outbox[0])
            return self.report()

    def report(self) -> Report:
        """What became of the rows so far."""
        with self._changed:
            error = "" if self.last_error is None else str(self.last_error)
            return Report(dict(self.rows_written), dict(self.rows_dropped), error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside; the condition's lock is held where nothing else is said -------------------------------------------

    def _seal(self, table: str) -> None:
        parts = self._pending.pop(table)
        self._pending_since.pop(table)
        alike: dict[tuple[str, ...], list[pa.Table]] = {}
        for part in parts:
            alike.setdefault(tuple(part.column_names), []).append(part)
        for group in alike.values():
            rows = _joined(group)
            self._bytes += rows.nbytes - sum(part.nbytes for part in group)
            sequence = self._sequence[table]
            self._sequence[table] += 1
            token = f"{self.source}/{self._session}/{table}/{sequence}"
            self._outbox.append(_Batch(table, token, rows, rows.nbytes))

    def _shed(self) -> None:
        """Drops the oldest rows until the rest fits."""
        while self._bytes > self.max_bytes:
            waiting = [batch for batch in self._outbox if batch is not self._sending]
            for table in FIRST_TO_DROP:
                victim = next((batch for batch in waiting if batch.table == table), None)
                if victim is not None or table in self._pending:
                    break
            if victim is not None:
                self._drop(victim)
            elif table in self._pending:
                self._drop_pending(table)
            elif waiting:
                self._drop(waiting[0])
            elif self._pending:
                self._drop_pending(min(self._pending_since, key=lambda name: self._pending_since[name]))
            else:
                return

    def _drop_pending(self, table: str) -> None:
        part = self._pending[table].pop(0)
        self.rows_dropped[table] += part.num_rows
        self._bytes -= part.nbytes
        if not self._pending[table]:
            del self._pending[table], self._pending_since[table]

    def _drop(self, batch: _Batch) -> None:
        self._outbox.remove(batch)
        self._bytes -= batch.nbytes
        self.rows_dropped[batch.table] += batch.rows.num_rows

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stop and not (self._outbox and time.monotonic() >= self._not_before):
                    left_s = self._not_before - time.monotonic()
                    self._changed.wait(max(0.0, left_s) if self._outbox else None)
                if self._stop:
                    return
            self._send_all(deadline=0.0)

    def _send_all(self, deadline: float) -> None:
        """Sends batch after batch; waits and tries again until ``deadline`` (``time.monotonic``). No lock is held."""
        with self._send_lock:
            while True:
                with self._changed:
                    if not self._outbox or (self._stop and deadline == 0.0):
                        return
                    batch = self._sending = self._outbox[0]
                failure: Exception | None = None
                try:
                    self._send(batch)
                except Exception as raised:
                    failure = raised
                with self._changed:
                    self._sending = None
                    if batch not in self._outbox:
                        return  # given up meanwhile by close(), and counted as dropped
                    if failure is None:
                        self._outbox.popleft()
                        self._bytes -= batch.nbytes
                        self.rows_written[batch.table] += batch.rows.num_rows
                        self._backoff_s = self._not_before = 0.0
                    else:
                        self.last_error = failure
                        if transient(failure):
                            batch.tries += 1
                            self._backoff_s = min(max(self._backoff_s * 2, _BACKOFF_S[0]), _BACKOFF_S[1])
                            self._not_before = time.monotonic() + self._backoff_s
                        else:
                            # The store would refuse it every time, and everything behind it would wait for ever.
                            self._drop(batch)
                    self._changed.notify_all()
                    not_before = self._not_before
                if failure is not None and not_before:
                    if not_before >= deadline:
                        return
                    time.sleep(max(0.0, not_before - time.monotonic()))

    def _send(self, batch: _Batch) -> None:
        if not self._schema_ready:
            ensure_schema(self.store, timeout_s=_LEASE_S)
            self._schema_ready = True
        self.store.insert(batch.table, batch.rows, batch.token, _LEASE_S)


def _joined(parts: list[pa.Table]) -> pa.Table:
    """Tables of the same columns as one, in one piece."""
    schema = pa.schema(
        [
            # What one append gave as a single value, another may have given row by row.
            first
            if all(part.schema.field(k).type == first.type for part in parts)
            else pa.field(first.name, pa.string())
            for k, first in enumerate(parts[0].schema)
        ]
    )
    # One dictionary a column: Arrow's file format cannot replace one between batches.
    return pa.concat_tables([part.cast(schema) for part in parts]).unify_dictionaries().combine_chunks()


def to_arrow(table: str, rows: pa.Table | Mapping[str, Values]) -> pa.Table:
    """Converts columns to what the table's ClickHouse types take, copying them.

    Raises:
        ValueError: No such table, a column is missing, unknown, of another length, or does not fit its type.
    """
    tables = table_columns()
    if table not in tables:
        raise ValueError(f"there is no table '{table}' (known: {', '.join(sorted(tables))})")
    columns = tables[table]
    given = rows.column_names if isinstance(rows, pa.Table) else list(rows)
    if unknown := [name for name in given if name not in columns]:
        raise ValueError(f"table '{table}' has no column {', '.join(unknown)} (it has {', '.join(columns)})")
    if missing := [c.name for c in columns.values() if not c.optional and c.name not in given]:
        raise ValueError(f"rows for table '{table}' lack the column {', '.join(missing)}")
    lengths = {name: _length(rows[name]) for name in given}
    counts = Counter(n for n in lengths.values() if n is not None)
    count = counts.most_common(1)[0][0] if counts else 1
    if wrong := [f"{name}: {n}" for name, n in lengths.items() if n is not None and n != count]:
        raise ValueError(f"the columns for table '{table}' differ in length: {', '.join(wrong)}, others {count}")
    return pa.table(
        {name: _convert(table, rows[name], column, count) for name, column in columns.items() if name in given}
    )


def _length(values: Values) -> int | None:
    if isinstance(values, (str, bytes, int, float, bool, np.generic)) or values is None:
        return None
    return len(values)


_INTEGERS = {
    f"{sign}Int{bits}": getattr(pa, f"{sign.lower()}int{bits}")() for sign in ("", "U") for bits in (8, 16, 32, 64)
}
_FLOATS = {"Float32": pa.float32(), "Float64": pa.float64()}
_TIMES = {"DateTime64(9": "ns", "DateTime64(6": "us", "DateTime64(3": "ms", "DateTime": "s"}


def _arrow_type(clickhouse: str) -> pa.DataType:
    for wrapper in ("Nullable(", "LowCardinality("):
        if clickhouse.startswith(wrapper):
            return _arrow_type(clickhouse[len(wrapper) : -1])
    if clickhouse.startswith("Array("):
        return pa.list_(_arrow_type(clickhouse[6:-1]))
    if clickhouse.startswith("Map("):
        key, _, value = clickhouse[4:-1].partition(",")
        return pa.map_(_arrow_type(key.strip()), _arrow_type(value.strip()))
    for prefix, unit in _TIMES.items():
        if clickhouse == prefix or clickhouse.startswith((prefix + ",", prefix + ")", prefix + "(")):
            return pa.timestamp(unit, tz="UTC")
    if clickhouse == "Bool":
        return pa.bool_()
    if clickhouse == "String":
        return pa.string()
    found = _INTEGERS.get(clickhouse) or _FLOATS.get(clickhouse)
    if found is None:
        raise ValueError(f"Argus does not write the type {clickhouse}")
    return found


def _convert(table: str, values: Any, column: Column, count: int) -> pa.Array:
    try:
        kind = _arrow_type(column.type)
        if _length(values) is None:
            one = _array([values.item() if isinstance(values, np.generic) else values], kind)
            repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), one)
            array = repeated if pa.types.is_string(kind) else repeated.cast(kind)
        else:
            array = _array(values, kind)
        if array.null_count and "Nullable(" not in column.type:
            raise ValueError("some are missing (null)")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
        raise ValueError(
            f"column '{column.name}' of table '{table}' ({column.type}) does not take these values: {failure}"
        ) from None
    return array


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_list(kind) and isinstance(values, np.ndarray) and values.ndim == 2:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(offsets, _array(values.reshape(-1), kind.value_type))
    if isinstance(values, np.ma.MaskedArray):
        data = np.array(values.data, order="C")
        array = pa.array(data, mask=np.ma.getmaskarray(values))
    elif isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise ValueError(f"{values.ndim} dimensions")
        # A copy: pyarrow would keep pointing into the caller's ring buffer.
        data = np.array(values, order="C", dtype=values.dtype.newbyteorder("="))
        if data.dtype.kind == "S":
            data = np.char.decode(data, "utf-8", "replace")
        array = pa.array(data, from_pandas=False)
    elif isinstance(values, pa.Array):
        array = values
    elif pa.types.is_timestamp(kind):
        return _times(values, kind)
    else:
        return pa.array(list(values), type=kind)
    if pa.types.is_timestamp(kind):
        return _times(array, kind)
    if pa.types.is_dictionary(array.type):
        return array.cast(_DICTIONARY if pa.types.is_string(kind) else kind)
    if pa.types.is_boolean(kind) and pa.types.is_integer(array.type):
        return pc.not_equal(array, 0)
    if pa.types.is_integer(kind) and pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    return array.cast(kind)


def _times(values: Any, kind: pa.DataType) -> pa.Array:
    """Nanoseconds since 1970 (or timestamps) as the column's timestamps, rounded down to its unit."""
    array = values if isinstance(values, pa.Array) else pa.array(list(values))
    if pa.types.is_floating(array.type):
        raise ValueError("a float cannot hold a time in nanoseconds exactly; give int64")
    if pa.types.is_null(array.type):
        return array.cast(kind)
    if not pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64()).cast(pa.timestamp("ns", tz="UTC"))
    elif array.type.tz is None:
        array = array.cast(pa.timestamp(array.type.unit, tz="UTC"))
    return array if array.type == kind else pc.floor_temporal(array, unit=_UNIT[kind.unit]).cast(kind)


_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_UNIT = {"ns": "nanosecond", "us": "microsecond", "ms": "millisecond", "s": "second"}
