"""What a spool may bring whose author is not trusted: whose its rows are is read as the store would read it."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from argus.store import spool
from argus.store.load import Loaded, load_spool
from argus.store.open import Store
from argus.store.writer import Writer
from tests.unit.store.test_spool import count, rows_of

LATER = 4_000_000_000 * 10**9
"""2096: rows that were stored long ago would have expired."""
HERE = {"job": "llama", "run": 7, "host": ["node-1"], "rank": [3]}
"""The only rank that the store has."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "spool"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def there(store: Store) -> Store:
    """A store with a rank of another host, and a call of it."""
    with Writer(store, source="theirs") as writer:
        writer.append("ranks", rows_of("ranks", **HERE))
        writer.append("collectives", calls())
        writer.append("communicators", rows_of("communicators", "llama", 7, rank=[3], version=[1]))
        assert writer.flush(), writer.last_error
    return store


def load(folder: Path, store: Store) -> Loaded:
    return load_spool(folder, store, trusted=False, progress=lambda done, files: None)


def with_values(rows: pa.Table, column: str, values: pa.Array) -> pa.Table:
    return rows.set_column(rows.column_names.index(column), column, values)


def calls(**of: Any) -> pa.Table:
    return rows_of("collectives", **(HERE | {"stored": [LATER]} | of))


FORGED: dict[str, Callable[[], pa.Table]] = {
    "job as bytes": lambda: with_values(calls(), "job", pa.array([b"llama"])),
    "job as coded bytes": lambda: with_values(calls(), "job", pa.array([b"llama"]).dictionary_encode()),
    "host as bytes": lambda: with_values(calls(), "host", pa.array([b"node-1"])),
    "run as text": lambda: with_values(calls(), "run", pa.array(["7"])),
    "run as a decimal": lambda: with_values(calls(), "run", pa.array([Decimal(7)])),
    "rank as text": lambda: with_values(calls(host=["other"]), "rank", pa.array(["3"])),
    "rank as a fraction": lambda: with_values(calls(host=["other"]), "rank", pa.array([3.0])),
}


@pytest.mark.parametrize("how", FORGED)
def test_whose_a_row_is_is_compared_as_the_store_would_hold_it(folder: Path, there: Store, how: str) -> None:
    spool.write(folder, "collectives", "t/1", FORGED[how]())
    found = load(folder, there)
    assert (dict(found.rows), count(there, "collectives")) == ({}, 1)
    (line,) = found.trouble
    assert ", which are there: --trusted" in line or "that another host has: --trusted" in line


UNFIT: dict[str, tuple[str, pa.Array]] = {
    "run as a list": ("run", pa.array([[7]])),
    "run as a time": ("run", pa.array([7], pa.timestamp("s"))),
    "run as a word": ("run", pa.array(["x"])),
    "no run": ("run", pa.array([None], pa.uint32())),
    "a higher run than there is": ("run", pa.array([7 + 2**32])),
    "a fraction of a run": ("run", pa.array([7.4])),
    "job as a structure": ("job", pa.array([{"name": "llama"}])),
    "no job in its dictionary": ("job", pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([None], pa.string()))),
    "bytes that are no text": ("job", pa.array([b"\xff"])),
    "no rank": ("rank", pa.array([None], pa.uint32())),
    "a fraction of a rank": ("rank", pa.array([0.4])),
    "a higher rank than there is": ("rank", pa.array([3 + 2**32])),
}


@pytest.mark.parametrize("trusted", [False, True])
def test_values_that_do_not_fit_their_column_are_a_line_and_others_are_loaded(
    folder: Path, store: Store, trusted: bool
) -> None:
    for number, (column, values) in enumerate(UNFIT.values(), 1):
        spool.write(folder, "collectives", f"t/{number}", with_values(calls(), column, values))
    spool.write(folder, "collectives", "t/good", calls())
    found = load_spool(folder, store, trusted=trusted, progress=lambda done, files: None)
    assert (found.files, count(store, "collectives")) == (1, 1)
    for number, line in enumerate(found.trouble, 1):
        column, _ = list(UNFIT.values())[number - 1]
        assert line.startswith(f"{number:06}-collectives.arrow is damaged: column '{column}' of table 'collectives'")
    assert len(found.trouble) == len(UNFIT)


def test_a_file_of_jobs_without_runs_has_no_newest_run(folder: Path) -> None:
    spool.write(folder, "jobs", "t/1", rows_of("jobs").drop_columns(["run"]))
    spool.write(folder, "jobs", "t/2", rows_of("jobs", run=5))
    assert spool.newest_run(folder) == 5
