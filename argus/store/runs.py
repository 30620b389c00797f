"""A run that is stored as a whole: its number, and that all its rows have arrived."""

from __future__ import annotations

import time

from argus.model.errors import EXIT_FAILURE, ArgusError
from argus.store.failures import is_full
from argus.store.open import Store
from argus.store.reader import newest_run, next_run
from argus.store.schema import ensure_schema
from argus.store.writer import Writer

FLUSH_S = 120.0
"""How long to wait for a store that is away."""
FULL_S = 10.0
"""How long for one that has no room left."""


def new_run(store: Store) -> int:
    """Number of a run that is about to be stored: the time, or one more than the newest.

    Raises:
        ArgusError: The store cannot be had.
    """
    ensure_schema(store)
    return next_run(int(time.time()), newest_run(store))


def _flush(writer: Writer) -> bool:
    return writer.flush(FULL_S) or (not is_full(writer.last_error) and writer.flush(FLUSH_S - FULL_S))


def flush_whole(writer: Writer, job: str, run: int) -> None:
    """Sends what waits.

    Raises:
        ArgusError: Rows were not stored.
    """
    whole = _flush(writer)
    if not whole or writer.rows_dropped:
        writer.close(timeout_s=0)  # else whoever leaves it waits once more
        why = str(writer.last_error or "the store does not answer")
        raise ArgusError(
            f"run {run} of {job} was not stored as a whole: {why}",
            "It has no end in the table jobs; give the same command again",
            EXIT_FAILURE,
        )
