"""Reads from a store: SQL in, Arrow or numpy columns out."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.text import named
from argus.model.units import listed
from argus.store import spool
from argus.store.failures import first_line
from argus.store.open import LEASE_TIMEOUT_S, Store, nothing_hint
from argus.store.schema import ensure_schema, schema_state

_NOT_ROWS = (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, EOFError, zlib.error)
"""What comes of an answer that is damaged, or of something else than a ClickHouse server."""
_UNKNOWN_TABLE, _UNKNOWN_COLUMNS = 60, (16, 47)
"""ClickHouse's codes; a column is missing by NO_SUCH_COLUMN_IN_TABLE or UNKNOWN_IDENTIFIER."""


def query(
    store: Store,
    sql: str,
    params: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    timeout_s: float = LEASE_TIMEOUT_S,
) -> pa.Table:
    """Runs a query.

    Args:
        store: The store.
        sql: One ClickHouse query, without FORMAT. Parameters are written ``{name:Type}``.
        params: Their values. Never format values into ``sql``.
        settings: ClickHouse settings for this query, such as ``max_execution_time`` (seconds).
        timeout_s: How long to wait for an embedded store that another process is opening or closing.

    Returns:
        The result as an Arrow table; ``LowCardinality(String)`` columns are plain strings.

    Raises:
        ArgusError: The store is empty or cannot be reached, or ClickHouse refuses the query (its reason in one line).
    """
    bounded = dict(settings or {}) if store.bounds is None else store.bounds.of_query(settings or {})
    with store.lease(timeout_s) as client:
        from argus.store.driver import Error

        def ask() -> Any:
            return client.query_arrow(sql, parameters=dict(params or {}), settings=bounded)

        try:
            try:
                table = ask()
            except Error as failure:
                if getattr(failure, "code", None) == _UNKNOWN_TABLE and _is_empty(client):
                    raise nothing_stored(store) from None
                lacks = getattr(failure, "code", None) in (_UNKNOWN_TABLE, *_UNKNOWN_COLUMNS)
                if not lacks or not _upgrade_old_tables(store, client, failure):  # which asks the store, too
                    raise
                table = ask()
        except Error as failure:
            raise store.explain(failure) from None
        except _NOT_ROWS as failure:
            raise not_rows(store, failure) from None
        except OSError as failure:
            # Arrow's own, of a file that is damaged, has no number.
            raise (not_rows(store, failure) if failure.errno is None else store.explain(failure)) from None
    assert isinstance(table, pa.Table)
    return table


def not_rows(store: Store, failure: Exception) -> ArgusError:
    """The error for an answer that the driver or Arrow cannot make anything of."""
    why = first_line(str(failure)) or type(failure).__name__
    hint = f"Is {store.target.host}:{store.target.port} a ClickHouse server?" if store.target.host else ""
    return ArgusError(f"the answer of the store is not rows: {why}", hint, EXIT_UNAVAILABLE)


def query_columns(
    store: Store,
    sql: str,
    params: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Runs a query and returns its columns as numpy arrays, in the order of the query.

    ``DateTime64`` of every precision is int64 nanoseconds since 1970 (ClickHouse sends plain ``DateTime`` as uint32
    seconds); strings and arrays are objects; columns with NULLs are float64 with NaN where they are numbers, objects
    with None otherwise.

    Raises:
        ArgusError: As ``query``.
    """
    table = query(store, sql, params, settings=settings)
    return _Answer({name: _column(table.column(name)) for name in table.column_names})


class _Answer(dict[str, npt.NDArray[Any]]):
    """Columns by name. One that was asked for and is not there is an error of the store, not of the caller."""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        raise ArgusError(f"the answer of the store is not rows: it has no column {name}", "", EXIT_UNAVAILABLE)


def _column(values: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("ns", tz=values.type.tz)).cast(pa.int64())
    if pa.types.is_string(values.type):
        if not len(values):
            return np.empty(0, dtype=object)
        # Few different ones, mostly: each is made once.
        coded = pa.chunked_array(values.chunks, pa.string()).combine_chunks().dictionary_encode()
        words = np.array([*as_texts(coded.dictionary), None], dtype=object)
        places = coded.indices.fill_null(len(words) - 1) if coded.null_count else coded.indices
        return np.asarray(words[np.from_dlpack(places)])
    if pa.types.is_nested(values.type):
        out = np.empty(len(values), dtype=object)
        out[:] = as_texts(values)
        return out
    if values.null_count or not pa.types.is_primitive(values.type) or pa.types.is_boolean(values.type):
        return np.asarray(values.to_numpy())
    # pyarrow's own way loads pandas, where that is installed: half of the time that Python needs for a short job.
    parts = [np.from_dlpack(chunk) for chunk in values.chunks]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, values.type.to_pandas_dtype()), *parts])


def as_texts(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values as Python's. ClickHouse's strings are bytes: whoever may write to a store may have put anything there."""
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        parts = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        return [_replaced(value) for part in parts for value in part.cast(_as_bytes(part.type)).to_pylist()]


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """A type with bytes in the place of text."""
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    return pa.binary() if pa.types.is_string(kind) else kind


def _replaced(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_replaced, value))
    return value


@dataclass(frozen=True)
class Run:
    """One tracing session of a job."""

    job: str
    run: int
    """Unix time of its start."""
    ranks: int
    """Ranks with rows."""
    steps: int
    """Steps found; 0: none."""
    started_ns: int
    """Wall time of its first row."""
    ended_ns: int
    """Wall time of its last row."""


def list_runs(store: Store, job: str | None = None) -> list[Run]:
    """The tracing sessions in a store, newest first.

    Args:
        store: The store.
        job: Only this job's.

    Raises:
        ArgusError: The store cannot be reached.
    """
    if not store.exists():
        return []
    try:
        rows = query_columns(store, _RUNS, {"job": job or "", "any": int(job is None)})
    except ArgusError as failure:
        if failure.message.startswith(_NOTHING):
            return []
        raise
    columns = [rows[name].tolist() for name in ("job", "run", "ranks", "steps", "started", "ended")]
    return [Run(*row) for row in zip(*columns, strict=True)]


# Imported jobs may have steps and no session, sessions that were just started no step yet: hence all four tables.
_RUNS = """
SELECT job, run, length(groupUniqArrayArray(seen)) AS ranks, max(steps) AS steps,
       min(first_ns) AS started, max(last_ns) AS ended
FROM
(
  SELECT job, run, CAST([], 'Array(UInt32)') AS seen, 0 AS steps,
         toUnixTimestamp64Nano(min(started)) AS first_ns,
         toUnixTimestamp64Nano(max(ifNull(ended, started))) AS last_ns
  FROM jobs GROUP BY job, run
  UNION ALL
  SELECT job, run, groupUniqArray(rank), uniqExact(step),
         toUnixTimestamp64Nano(min(ts)), max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns))
  FROM iterations GROUP BY job, run
  UNION ALL
  SELECT job, run, groupUniqArray(rank), 0, toUnixTimestamp64Nano(min(ts)), toUnixTimestamp64Nano(max(ts))
  FROM collectives GROUP BY job, run
  UNION ALL
  SELECT job, run, groupUniqArray(rank), 0, toUnixTimestamp64Nano(min(ts)), toUnixTimestamp64Nano(max(ts))
  FROM launches GROUP BY job, run
)
WHERE {any:UInt8} = 1 OR job = {job:String}
GROUP BY job, run
ORDER BY run DESC, ended DESC, job
"""


_NEWEST = """
SELECT job, run FROM
(
  SELECT job, run, max(ifNull(ended, started)) AS last FROM jobs GROUP BY job, run
  UNION ALL
  SELECT job, run, max(iteration_rollup.last_ts) AS last FROM iteration_rollup GROUP BY job, run
)
WHERE {any:UInt8} = 1 OR job = {job:String}
GROUP BY job, run
ORDER BY run DESC, max(last) DESC, job
LIMIT 1
"""


def list_jobs(store: Store) -> list[str]:
    """The names of the jobs in a store, the one traced last first."""
    return list(dict.fromkeys(run.job for run in list_runs(store)))


_LAST_RUN = 2**32 - 1
"""Numbers of runs are UInt32."""
_AHEAD_S = 20 * 365 * 86_400
_LOST_S = 1_790_000_000
"""2026. A clock that has lost its time begins in 1970, and its runs come after those that are there all the same."""
NUMBERING = ("jobs", "ranks", "iterations")
"""The tables that ``newest_run`` sees; ``iterations`` by its rollup, which has a few rows a step."""
_NEWEST_NUMBER = """
SELECT max(last) AS run FROM
(
  SELECT max(run) AS last FROM jobs WHERE run < {end:UInt32}
  UNION ALL
  SELECT max(run) AS last FROM ranks WHERE run < {end:UInt32}
  UNION ALL
  SELECT max(run) AS last FROM iteration_rollup WHERE run < {end:UInt32}
)
"""


def _no_time(now_s: int) -> int:
    """From here on a number of a run is none that a clock has given, 20 years ahead: it says nothing of others."""
    return min(max(now_s, _LOST_S) + _AHEAD_S, _LAST_RUN)


def newest_run(store: Store) -> int:
    """The highest number of a run in a store, of any job, that a clock may have given (``next_run``); 0: none.

    Raises:
        ArgusError: The store cannot be reached.
    """
    if store.target.spool is not None:
        return spool.newest_run(store.target.spool, _no_time(int(time.time())))
    newest = query_columns(store, _NEWEST_NUMBER, {"end": _no_time(int(time.time()))})["run"]
    return int(newest[0]) if len(newest) else 0


def next_run(now_s: int, newest: int) -> int:
    """The number of a run that begins: its time, Unix s, or one more than the newest one's, so that the newest run is
    the one that was begun last whatever clocks say. A number that no clock can have given (more than 20 years ahead)
    counts as none: numbers after it would be as wrong, and end soon.

    Args:
        now_s: The time.
        newest: The highest number in the store (``newest_run``).
    """
    return max(now_s, newest + 1) if newest < _no_time(now_s) else now_s


def latest_run(store: Store, job: str | None = None) -> tuple[str, int]:
    """The newest tracing session, as (job, run).

    Args:
        store: The store.
        job: Only this job's.

    Raises:
        ArgusError: Nothing is stored, or not of that job.
    """
    if store.exists():
        # Sessions and steps show it at once. Only where neither is there, calls are looked through.
        with contextlib.suppress(ArgusError):
            newest = query_columns(store, _NEWEST, {"job": job or "", "any": int(job is None)})
            if len(newest["run"]):
                return str(newest["job"][0]), int(newest["run"][0])
    runs = list_runs(store, job)
    if runs:
        return runs[0].job, runs[0].run
    if job is not None and (jobs := list_jobs(store)):
        raise no_job(job, jobs, f" at {store.url}")
    raise nothing_stored(store)


def _upgrade_old_tables(store: Store, client: Any, failure: Exception) -> bool:
    """Where tables are those of an older Argus, what a query lacks is what was added since: an embedded store gets it,
    as it does from whoever writes to it. Returns whether it did.

    Raises:
        ArgusError: They are a server's, which may be other people's, too; or the upgrade failed.
    """
    state = schema_state(store, client)
    if state.missing and not store.embedded:
        raise ArgusError(
            f"the store {store.url} has the tables of an older Argus (schema {state.version}, now {state.known}): "
            f"{store.explain(failure).message}",
            f"Bring them up to date, what is stored stays: argus store init --store '{store.url}'",
            EXIT_UNAVAILABLE,
        ) from None
    return bool(state.missing) and not ensure_schema(store).missing


_NOTHING = "nothing is stored yet at "


def nothing_stored(store: Store) -> ArgusError:
    """The error for a store without rows."""
    return ArgusError(_NOTHING + store.url, nothing_hint(), EXIT_UNAVAILABLE)


JOBS_NAMED = 10
"""Jobs that a hint names, and runs."""


def no_job(job: str, stored: Sequence[str], where: str = "") -> ArgusError:
    """The error for a job that is not stored.

    Args:
        job: The job, or a pattern. stored: Those that are. where: " at URL"; empty: it is left out.
    """
    hint = f"Stored are: {listed(list(map(named, stored)), JOBS_NAMED)}" if stored else ""
    return ArgusError(f"no job '{named(job)}' is stored{where}", hint, EXIT_UNAVAILABLE)


def no_run(job: str, run: int | str, stored: Sequence[int]) -> ArgusError:
    """The error for a run that is not stored. ``stored``: those of its job that are, the newest first."""
    hint = f"Stored are: {listed(stored, JOBS_NAMED) or 'none'}"
    return ArgusError(f"job '{named(job)}' has no run {run}", hint, EXIT_UNAVAILABLE)


def _is_empty(client: Any) -> bool:
    try:
        return not client.command("EXISTS TABLE jobs")
    except Exception:
        return False
