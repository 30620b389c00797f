"""What a spool may bring whose author is not trusted: whose its rows are is read as the store would read it."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from argus.cli.main import main
from argus.store import load as loading
from argus.store import reader, spool
from argus.store.arrow import to_arrow
from argus.store.load import Loaded, load_spool
from argus.store.open import Store
from argus.store.read.owners import hosts_there, ranks_there, runs_there
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders import flight_dumps
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


def test_rows_name_their_rank(folder: Path, there: Store) -> None:
    for number, table in enumerate(("collectives", "ranks"), 1):
        of = HERE | {"host": ["other"]}
        spool.write(folder, table, f"t/{number}", rows_of(table, **of).drop_columns(["rank"]))
    found = load(folder, there)
    assert (dict(found.rows), len(found.trouble)) == ({}, 2)
    assert all("does not say whose its rows are" in line for line in found.trouble)


def test_rows_of_no_host_are_of_ranks_that_the_spool_brings(folder: Path, there: Store) -> None:
    of = {"job": "llama", "run": 7}
    # Imports write them before the ranks.
    for number, rank in enumerate((3, 4, 5), 1):
        row = rows_of("communicators", **of, rank=[rank], version=[2**63])
        spool.write(folder, "communicators", f"t/{number}", row)
    spool.write(folder, "ranks", "t/4", rows_of("ranks", **of, host=["other"], rank=[4]))
    found = load(folder, there)
    assert found.rows == {"ranks": 1, "communicators": 1}
    assert [line.split(": --trusted")[0] for line in found.trouble] == [
        "000001-communicators.arrow has ranks of run 7 of job 'llama' that another host has",
        "000003-communicators.arrow has ranks of run 7 of job 'llama' that the spool has brought of no host",
    ]
    kept = query_columns(there, "SELECT rank, version FROM communicators FINAL ORDER BY rank")
    assert kept["rank"].tolist() == [3, 4]
    assert kept["version"].tolist() == [1, 2**63]


@pytest.mark.parametrize("how", ["simulate", "import"])
def test_all_that_simulations_and_imports_write_is_taken(folder: Path, store: Store, tmp_path: Path, how: str) -> None:
    words = ["simulate", "--ranks", "4", "--ranks-per-host", "2", "--steps", "5"]
    if how == "import":
        hang = flight_dumps.run(flight_dumps.job(1, 1, 4), [flight_dumps.Fault("cpu", 1, 10)])
        words = ["import", "flight-recorder", str(flight_dumps.write(tmp_path / "dumps", hang))]
    assert main([*words, "--job", "own", "--store", f"spool://{folder}"]) == 0
    found = load(folder, store)
    assert found.trouble == []
    assert found.rows.keys() >= {
        "ranks",
        "communicators",
        *(("dumped_calls", "dumped_groups") if how == "import" else ()),
    }


def many(number: int, first: int = 1) -> pa.Table:
    """A rank of each of many runs."""
    one = {name: rows_of("ranks")[name].to_pylist() * number for name in rows_of("ranks").column_names}
    return to_arrow("ranks", one | {"run": list(range(first, first + number))})


def test_all_runs_of_a_file_are_asked_for_at_once(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = reader.query

    def query(store: Store, sql: str, *rest: Any, **options: Any) -> pa.Table:
        asked.append(sql)
        return real(store, sql, *rest, **options)

    spool.write(folder, "ranks", "t/1", many(400))
    monkeypatch.setattr(reader, "query", query)
    assert load(folder, store).rows == {"ranks": 400}
    assert 0 < len(asked) < 10
    assert len((folder / ".loaded").read_text().splitlines()) == 3 * 400 + 1


def test_a_load_takes_rows_of_a_bounded_number_of_runs(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_PARTS", 20)
    for number, rows in enumerate((many(21), many(20, 100), many(1, 200), many(5, 110)), 1):
        spool.write(folder, "ranks", f"t/{number}", rows)
    found = load(folder, store)
    assert found.rows == {"ranks": 20 + 5}
    first, second = found.trouble
    assert first.startswith("000001-ranks.arrow has rows of more than 20 hosts and runs: --trusted loads it")
    assert (
        second == "000003-ranks.arrow brings this load beyond 20 hosts and runs: load the spool again for what is left"
    )
    again = load(folder, store)
    assert (again.rows, again.trouble) == ({"ranks": 1}, [first])


def test_names_of_jobs_in_a_spool_have_a_bounded_length(folder: Path, store: Store) -> None:
    spool.write(folder, "ranks", "t/1", rows_of("ranks", "j" * 4097))
    spool.write(folder, "ranks", "t/2", rows_of("ranks", "j" * 4096))
    found = load(folder, store)
    assert found.rows == {"ranks": 1}
    (line,) = found.trouble
    assert line.startswith("000001-ranks.arrow has the name of a job of more than 4,096 bytes")


def test_what_a_store_has_is_found_whatever_its_name(store: Store) -> None:
    odd = ["a'b", "a\\b", "a\tb\n", "ü\0x", "", "[']", "{x:String}", "a\\'b", "\\N", "NULL", "a','b", "%s"]
    names = [*odd, "x" * 4000]
    with Writer(store, source="theirs") as writer:
        for name in names:
            writer.append("ranks", rows_of("ranks", name, 7, host=[name]))
            writer.append("collectives", rows_of("collectives", name, 8, host=[name], stored=[LATER]))
        assert writer.flush(), writer.last_error
    runs = {(name, run) for name in names for run in (7, 8)}
    assert runs_there(store, runs | {(name, 9) for name in names} | {("other", 7)}) == runs
    hosts = {(name, run, name) for name, run in runs}
    assert hosts_there(store, hosts | {(name, 7, "other") for name in names}) == hosts
    found = ranks_there(store, runs)
    assert {(one["job"], one["run"], one["host"]) for one in found.to_pylist()} == {one for one in hosts if one[1] == 7}
    assert (runs_there(store, []), hosts_there(store, []), ranks_there(store, []).num_rows) == (set(), set(), 0)


def test_a_file_of_jobs_without_runs_has_no_newest_run(folder: Path) -> None:
    spool.write(folder, "jobs", "t/1", rows_of("jobs").drop_columns(["run"]))
    spool.write(folder, "jobs", "t/2", rows_of("jobs", run=5))
    assert spool.newest_run(folder) == 5
