"""What a spool may bring whose author is not trusted: whose its rows are is read as the store would read it."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from argus.cli.main import main
from argus.compress.kernels import Compressor
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store import load as loading
from argus.store import reader, spill, spool
from argus.store import replay as replaying
from argus.store.arrow import to_arrow
from argus.store.load import Loaded, load_spilled, load_spool
from argus.store.open import Store, open_store
from argus.store.read.owners import hosts_there, ranks_there, runs_there
from argus.store.reader import newest_run, next_run, query_columns
from argus.store.runs import new_run
from argus.store.writer import Writer
from argus.tables.arrow import Origin
from argus.tables.stacks import to_stacks
from tests.builders import flight_dumps
from tests.builders.stack_data import native, py, stack
from tests.unit.store.test_spool import count, kernel_of, rows_of, stacks_of

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


# ---- runs to come


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(loading.time, "time", lambda: 1_796_000_000.5)
    return 1_796_000_000


def test_a_spool_brings_nothing_of_a_run_that_is_to_come(folder: Path, store: Store, now: int) -> None:
    """A job of its own moves the number that the next run gets to where it has put rows."""
    ahead = now + 1_000_000
    spool.write(folder, "jobs", "t/1", rows_of("jobs", "mine", ahead))
    of = {"job": "llama", "run": ahead + 1, "rank": [0]}
    spool.write(folder, "ranks", "t/2", rows_of("ranks", **of, host=["node-1"], version=[2**63]))
    spool.write(folder, "iterations", "t/3", rows_of("iterations", **of, host=["node-1"]))
    spool.write(folder, "communicators", "t/4", rows_of("communicators", **of, version=[2**63]))
    found = load(folder, store)
    assert (dict(found.rows), len(found.trouble)) == ({}, 4)
    for line in found.trouble:
        assert ", whose number is a time to come, which a trace that begins then would get: --trusted" in line
    assert new_run(store) < ahead
    assert load_spool(folder, store, progress=lambda done, files: None).trouble == []
    # Whoever is trusted may be ahead, and the next run still comes after all that is there.
    assert new_run(store) == ahead + 2


@pytest.mark.parametrize("table", ["jobs", "ranks", "iterations", "collectives", "stacks"])
def test_no_run_begins_with_a_number_of_which_a_spool_brought_rows(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, now: int, table: str
) -> None:
    """Clocks of those who wrote it may be a minute ahead: it is loaded when that is over."""
    row = stacks_of("llama", now + 50) if table == "stacks" else rows_of(table, "llama", now + 50)
    spool.write(folder, table, "t/1", row)
    found = load(folder, store)
    assert dict(found.rows) == {}
    (line,) = found.trouble
    assert line.endswith(f"has rows of run {now + 50} of job 'llama', which begins only now: load it in a minute")
    assert new_run(store) == now
    monkeypatch.setattr(loading.time, "time", lambda: now + 51.5)
    assert load(folder, store).rows == {table: 1}
    assert new_run(store) == now + 51


def test_a_load_waits_until_the_second_of_a_run_is_over(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, now: int
) -> None:
    """An import into a spool is loaded at once, and several that were numbered in one second; not any number."""
    clock = [now + 0.5]
    monkeypatch.setattr(loading.time, "time", lambda: clock[0])
    monkeypatch.setattr(loading.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    for number in range(20):
        spool.write(folder, "iterations", f"t/{number}", rows_of("iterations", f"job {number}", now + number))
    found = load(folder, store)
    assert found.rows == {"iterations": 5}
    assert clock == [now + 5]
    assert all(line.endswith("which begins only now: load it in a minute") for line in found.trouble)


@pytest.mark.parametrize("table", ["jobs", "ranks", "iterations"])
def test_a_run_is_numbered_above_all_that_jobs_ranks_and_steps_have(store: Store, now: int, table: str) -> None:
    ahead = now + 7200
    with Writer(store, source="theirs") as writer:
        more = {} if table != "iterations" else {"stored": [LATER]}
        writer.append(table, rows_of(table, "llama", ahead, **more))
        assert writer.flush(), writer.last_error
    assert newest_run(store) == ahead
    assert new_run(store) == ahead + 1


@pytest.mark.parametrize("absurd", [2**32 - 1, 2**32 - 2, 3_000_000_000])
def test_a_number_that_is_no_time_counts_as_none(store: Store, now: int, absurd: int) -> None:
    with Writer(store, source="theirs") as writer:
        writer.append("ranks", rows_of("ranks", "llama", absurd))
        writer.append("jobs", rows_of("jobs", "llama", now + 60))
        assert writer.flush(), writer.last_error
    assert (newest_run(store), new_run(store)) == (now + 60, now + 61)
    assert next_run(now, absurd) == now
    # A clock that has lost its time is behind all runs, not they ahead of it.
    assert next_run(1000, now + 60) == now + 61


def test_numbers_of_runs_never_leave_their_column() -> None:
    for now in (0, 1_790_000_000, 4_000_000_000, 2**32 - 2, 2**32 - 1):
        for newest in (0, now - 1, now, now + 1, 2**32 - 2, 2**32 - 1):
            assert now <= next_run(now, newest) <= 2**32 - 1


# ---- rows of no host whose number is a hash


def test_kernels_are_numbered_as_a_trace_numbers_them(folder: Path, store: Store) -> None:
    traced = Compressor()
    for grid in ((1, 2, 3), (4, 1, 1)):
        traced.group("void gemm<float>(int, (anonymous namespace)::T)", 7, 0, grid, (128, 1, 1))
    rows = to_arrow("kernel_groups", {"job": "own", "run": 7, **traced.take()["kernel_groups"]})
    spool.write(folder, "kernel_groups", "t/1", rows)
    found = load(folder, store)
    assert (dict(found.rows), found.trouble) == ({"kernel_groups": 2}, [])


def test_stacks_are_numbered_as_a_trace_numbers_them(folder: Path, store: Store) -> None:
    all_kinds = [stack(), stack(native("read")), stack(py("main", 3), native("\ud800")), stack(py("\u00e9", 0, ""))]
    spool.write(folder, "stacks", "t/1", to_stacks(all_kinds, Origin("own", 7, "", 0)))
    found = load(folder, store)
    assert (dict(found.rows), found.trouble) == ({"stacks": 4}, [])


OTHER_KERNELS: dict[str, Callable[[], pa.Table]] = {
    "kernel": lambda: kernel_of(kernel=["idle"]),
    "stream": lambda: kernel_of(stream=[8]),
    "grid": lambda: kernel_of(grid=[[4, 1, None]]),
    "block": lambda: kernel_of(block=[[]]),
}
OTHER_STACKS: dict[str, Callable[[], pa.Table]] = {
    "functions": lambda: with_values(stacks_of(), "functions", pa.array([["main", "write"]])),
    "a frame less": lambda: with_values(stacks_of(), "kinds", pa.array([["python"]])),
    "no frame": lambda: with_values(stacks_of(), "files", pa.array([["/app/train.py", None]])),
    "native": lambda: with_values(stacks_of(), "native", pa.array(["complete"])),
    "depth": lambda: with_values(stacks_of(), "depth", pa.array([1], pa.uint16())),
    "leaf_function": lambda: with_values(stacks_of(), "leaf_function", pa.array(["write"])),
    "python_line": lambda: with_values(stacks_of(), "python_line", pa.array([4], pa.uint32())),
}


@pytest.mark.parametrize("what", OTHER_KERNELS)
def test_what_is_numbered_by_its_content_has_that_content(folder: Path, store: Store, what: str) -> None:
    rows = OTHER_KERNELS[what]()
    spool.write(folder, "kernel_groups", "t/1", rows)
    spool.write(folder, "kernel_groups", "t/2", kernel_of().drop_columns(["run"]))
    spool.write(folder, "kernel_groups", "t/3", rows.drop_columns(["grid"]))
    found = load(folder, store)
    assert dict(found.rows) == {}
    first, _, third = found.trouble
    assert first.startswith("000001-kernel_groups.arrow has rows of kernel_groups whose number is not that of what")
    assert third.startswith("000003-kernel_groups.arrow lacks columns of kernel_groups")


@pytest.mark.parametrize("what", OTHER_STACKS)
def test_a_spool_replaces_no_stack(folder: Path, there: Store, what: str) -> None:
    """Samples of others refer to them."""
    with Writer(there, source="theirs") as writer:
        writer.append("stacks", with_values(stacks_of(), "job", pa.array(["llama"])))
        assert writer.flush(), writer.last_error
    before = query_columns(there, "SELECT * EXCEPT stored FROM stacks FINAL")
    spool.write(folder, "ranks", "t/1", rows_of("ranks", "llama", 7, host=["other"], rank=[4]))
    spool.write(folder, "stacks", "t/2", with_values(OTHER_STACKS[what](), "job", pa.array(["llama"])))
    found = load(folder, there)
    assert (found.trouble, found.rows["stacks"]) == ([], 0)
    after = query_columns(there, "SELECT * EXCEPT stored FROM stacks FINAL")
    assert all(str(after[name].tolist()) == str(before[name].tolist()) for name in before)


def test_stacks_whose_folders_are_left_out_are_loaded(folder: Path, store: Store) -> None:
    """Their number is that of the paths in full (``--redact paths``)."""
    of = open_store(f"spool://{folder}")
    with Writer(of, source="t", paths=False) as writer:
        writer.append("stacks", to_stacks([stack(native("read"), py("main", 3))], Origin("own", 7, "", 0)))
        assert writer.flush(), writer.last_error
    found = load(folder, store)
    assert (dict(found.rows), found.trouble) == ({"stacks": 1}, [])
    assert query_columns(store, "SELECT python_file AS f FROM stacks")["f"].tolist() == ["train.py"]


def test_a_spool_replaces_no_template(folder: Path, tmp_path: Path, there: Store) -> None:
    """Those of others decode what others have stored."""
    of = {"job": "llama", "run": 7, "kernel_id": [5], "mean_ns": [[100.0]]}
    with Writer(there, source="theirs") as writer:
        writer.append("kernel_templates", rows_of("kernel_templates", **of, template=[1]))
        assert writer.flush(), writer.last_error
    spool.write(folder, "ranks", "t/1", rows_of("ranks", "llama", 7, host=["other"], rank=[4]))
    both = [rows_of("kernel_templates", **(of | {"mean_ns": [[9.0]]}), template=[number]) for number in (1, 2)]
    spool.write(folder, "kernel_templates", "t/2", pa.concat_tables(both))
    spool.write(folder, "kernel_templates", "t/3", both[0])
    found = load(folder, there)
    assert (found.trouble, dict(found.rows)) == ([], {"ranks": 1, "kernel_templates": 1})
    kept = query_columns(there, "SELECT template, mean_ns FROM kernel_templates ORDER BY template")
    assert list(zip(kept["template"].tolist(), kept["mean_ns"].tolist(), strict=True)) == [(1, [100.0]), (2, [9.0])]
    assert load(folder, there).known == 3


def test_a_load_looks_for_a_bounded_number_of_templates(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_TEMPLATES", 1, raising=False)
    some = [rows_of("kernel_templates", template=[number]) for number in (1, 2)]
    spool.write(folder, "kernel_templates", "t/1", pa.concat_tables(some))
    spool.write(folder, "kernel_templates", "t/2", some[0])
    found = load(folder, store)
    assert found.rows == {"kernel_templates": 1}
    assert found.trouble[0].startswith("000001-kernel_templates.arrow has more than 1 templates: --trusted loads it")


# ---- what cannot be looked for


@pytest.fixture
def odd_job(monkeypatch: pytest.MonkeyPatch) -> str:
    """A job that the store takes no questions about."""
    real = replaying.query_columns

    def query_columns(store: Store, sql: str, values: Any) -> Any:
        if "odd" in values.values():
            raise ArgusError("the store does not take this", "", EXIT_UNAVAILABLE)
        return real(store, sql, values)

    monkeypatch.setattr(replaying, "query_columns", query_columns)
    return "odd"


@pytest.mark.parametrize("trusted", [False, True])
def test_a_batch_that_cannot_be_looked_for_is_a_line_and_others_are_loaded(
    folder: Path, store: Store, odd_job: str, trusted: bool
) -> None:
    for number, job in enumerate((odd_job, "even"), 1):
        spool.write(folder, "collectives", f"t/{number}", calls(job=job))
    spool.write(folder, "ranks", "t/3", rows_of("ranks", "even"))
    found = load_spool(folder, store, trusted=trusted, progress=lambda done, files: None)
    assert found.trouble == ["000001-collectives.arrow: the store does not take this"]
    assert found.rows == {"collectives": 1, "ranks": 1}


def test_a_spilled_batch_that_cannot_be_looked_for_stays(tmp_path: Path, store: Store, odd_job: str) -> None:
    """Spilled rows are Argus's own: they are not set aside."""
    session = tmp_path / "spilled" / "session"
    session.mkdir(mode=0o700, parents=True)
    session.parent.chmod(0o700)
    (session / spill._OWNER).touch(0o600)
    for number, job in enumerate((odd_job, "even"), 1):
        spool.write(session, "collectives", f"t/{number}", calls(job=job), sent_s=1.0)
    found = load_spilled(store, session.parent)
    assert found.trouble == ["000001-collectives.arrow: the store does not take this (it stays)"]
    assert found.rows == {"collectives": 1}
    assert [file.name for _, file in spool.batch_files(session)] == ["000001-collectives.arrow"]


def test_a_store_that_does_not_answer_ends_the_load(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        monkeypatch.setattr(loading, "query_columns", away)
        raise ArgusError("cannot reach the store", "", EXIT_UNAVAILABLE)

    monkeypatch.setattr(replaying, "query_columns", away)
    spool.write(folder, "collectives", "t/1", calls())
    with pytest.raises(ArgusError, match="cannot reach the store"):
        load(folder, store)
    monkeypatch.undo()
    assert load(folder, store).files == 1
