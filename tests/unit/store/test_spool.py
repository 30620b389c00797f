"""The spool: files that hold batches, and loading them: once, in order, past damaged ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from argus.cli.main import main
from argus.compress.kernels import kernel_id
from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import spool
from argus.store.arrow import to_arrow
from argus.store.load import Loaded, load_spool
from argus.store.open import Store, open_store
from argus.store.reader import newest_run, query_columns
from argus.store.schema import ensure_schema
from argus.store.schema_files import table_columns
from argus.store.writer import Writer
from argus.tables.arrow import Origin
from argus.tables.stacks import to_stacks
from tests.builders.stack_data import native, py, stack
from tests.unit.store.test_writer import example, iterations, launches

HELD = 1_800_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def write(folder: Path, batches: list[tuple[str, Any]]) -> None:
    with Writer(open_store(f"spool://{folder}"), source="test") as writer:
        for table, rows in batches:
            writer.append(table, rows)
            assert writer.flush(), writer.last_error


def load(folder: Path, store: Store, **options: Any) -> Loaded:
    return load_spool(folder, store, progress=lambda done, files: None, **options)


def count(store: Store, table: str) -> int:
    return int(query_columns(store, f"SELECT count() AS n FROM {table}")["n"][0])


def test_batches_become_numbered_files_and_come_back(folder: Path) -> None:
    write(folder, [("iterations", iterations(7)), ("launches", launches(11)), ("iterations", iterations(13))])
    assert sorted(os.listdir(folder)) == ["000001-iterations.arrow", "000002-launches.arrow", "000003-iterations.arrow"]
    batches = [spool.read(folder / name) for name in sorted(os.listdir(folder))]
    assert [batch.rows.num_rows for batch in batches] == [7, 11, 13]
    assert len({batch.token for batch in batches}) == 3
    assert batches[1].table == "launches"
    assert batches[1].rows["handle"].to_pylist() == list(range(11))


@pytest.mark.parametrize("table", table_columns())
@pytest.mark.thorough(first=4)
def test_every_column_of_every_table_is_loaded(folder: Path, store: Store, table: str) -> None:
    # Times far in the future: nothing expires while the test runs.
    given = {
        name: [HELD * 10**9 if "Date" in c.type else example(name, c.type)[0]] * 3
        for name, c in table_columns()[table].items()
    }
    write(folder, [(table, given)])
    assert load(folder, store).rows == {table: 3}
    with Writer(store, source="direct") as writer:
        writer.append(table, given)
        assert writer.flush(), writer.last_error
    names = ", ".join(table_columns()[table])
    with store.lease() as client:
        rows = client.query(f"SELECT {names} FROM {table}").result_rows
    # What went through the spool equals what was written at once.
    assert len(rows) in (1, 2, 6)  # versioned tables keep one row a key
    assert all(row == rows[0] for row in rows)


def test_loading_twice_stores_once(folder: Path, store: Store) -> None:
    write(folder, [("iterations", iterations(7)), ("launches", launches(11))])
    first = load(folder, store)
    assert (first.files, first.rows) == (2, {"iterations": 7, "launches": 11})
    again = load(folder, store)
    assert (again.files, again.known, dict(again.rows)) == (0, 2, {})
    # Without the journal the store's own memory of tokens serves.
    (folder / ".loaded").unlink()
    load(folder, store)
    assert (count(store, "iterations"), count(store, "launches")) == (7, 11)


@pytest.mark.thorough
def test_another_store_gets_everything(folder: Path, store: Store, tmp_path: Path) -> None:
    write(folder, [("iterations", iterations(7))])
    load(folder, store)
    with open_store(f"chdb://{tmp_path}/other") as other:  # a copy of the first one would count as the same store
        ensure_schema(other)
        assert load(folder, other).rows == {"iterations": 7}
    assert load(folder, store).known == 1


def test_more_files_than_a_store_remembers_tokens(folder: Path, store: Store) -> None:
    """Of most tables it remembers a thousand; here ten, so that there need not be as many files."""
    with store.lease() as client:
        (window,) = client.query(
            "SELECT extract(engine_full, 'non_replicated_deduplication_window = (\\\\d+)') FROM system.tables"
            " WHERE database = currentDatabase() AND name = 'collectives'"
        ).result_rows[0]
    setting = "ALTER TABLE collectives MODIFY SETTING non_replicated_deduplication_window"
    folder.mkdir()
    for k in range(25):
        columns = table_columns()["collectives"].items()
        given = {name: [example(name, c.type)[0]] for name, c in columns if name != "stored"}
        spool.write(folder, "collectives", f"t/{k}", to_arrow("collectives", {**given, "seq": [k]}))
    first = spool.read(min(folder.glob("*.arrow")))
    try:
        with store.lease() as client:
            client.command(f"{setting} = 10")
        assert load(folder, store).files == 25
        assert load(folder, store).known == 25
        assert count(store, "collectives") == 25
        (folder / ".loaded").unlink()  # as if the folder could not be written to
        again = load(folder, store)
        assert (again.known, count(store, "collectives")) == (25, 25)
        store.insert("collectives", first.rows, first.token)
        assert count(store, "collectives") == 26, "the store itself has forgotten"
    finally:
        with store.lease() as client:
            client.command(f"{setting} = {window}")


@pytest.mark.parametrize("noted", ["just now", "long ago"])
def test_a_load_that_was_killed_before_it_noted_a_batch(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, noted: str
) -> None:
    """The next one looks for it, unless sending it again under its token may repair a rollup as well."""
    batches = [
        (table, rows(5 + k)) for k in range(3) for table, rows in (("iterations", iterations), ("launches", launches))
    ]
    write(folder, batches)
    load(folder, store)
    rolled_up = "SELECT sum(n) AS n FROM iteration_rollup"
    before = query_columns(store, rolled_up)["n"].tolist()
    journal = folder / ".loaded"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    if noted == "long ago":
        os.utime(journal, (journal.stat().st_mtime - 3600,) * 2)
    sent: list[str] = []
    real = Store.insert

    def insert(self: Store, table: str, *rest: Any) -> None:
        sent.append(table)
        real(self, table, *rest)

    monkeypatch.setattr(Store, "insert", insert)
    again = load(folder, store)
    assert sent == (["iterations"] * 2 if noted == "just now" else [])
    assert again.known == 6 - len(sent)
    assert (count(store, "iterations"), count(store, "launches")) == (18, 18)
    assert query_columns(store, rolled_up)["n"].tolist() == before


def test_two_do_not_load_a_folder_at_once(folder: Path, store: Store) -> None:
    write(folder, [("iterations", iterations(7))])
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ArgusError, match="being loaded by another process") as refused:
        load(folder, store)
    assert refused.value.exit_code == EXIT_UNAVAILABLE
    os.close(other)
    assert load(folder, store).files == 1


def test_remove_deletes_what_is_stored_and_only_that(folder: Path, store: Store) -> None:
    write(folder, [("iterations", iterations(7)), ("iterations", iterations(3))])
    (folder / "000002-iterations.arrow").write_bytes(b"nonsense")
    found = load(folder, store, remove=True)
    assert len(found.trouble) == 1
    assert sorted(os.listdir(folder)) == [".loaded", "000002-iterations.arrow"]
    (folder / "000002-iterations.arrow").unlink()
    write(folder, [("iterations", iterations(3))])
    assert load(folder, store, remove=True).rows == {"iterations": 3}
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "overwritten", "other", "pipe", "unknown table", "unknown column"])
def test_a_damaged_file_is_told_and_others_are_loaded(folder: Path, store: Store, damage: str) -> None:
    write(folder, [("iterations", iterations(100)), ("iterations", iterations(200)), ("iterations", iterations(300))])
    file = folder / "000002-iterations.arrow"
    data = file.read_bytes()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "overwritten":
        file.write_bytes(data[:1000] + os.urandom(1500) + data[2500:])
    elif damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif damage == "other":
        with pa.ipc.new_file(str(file), pa.schema([("a", pa.int64())])) as out:
            out.write_table(pa.table({"a": [1]}))
    else:
        batch = spool.read(file)
        file.unlink()
        rows = batch.rows.append_column("surprise", pa.array([1] * 200)) if damage == "unknown column" else batch.rows
        table = "iterations" if damage == "unknown column" else "tomorrow"
        spool.write(folder, table, batch.token, rows).rename(file)
    found = load(folder, store)
    assert found.rows == {"iterations": 400}
    (line,) = found.trouble
    assert line.startswith("000002-iterations.arrow")
    assert "\n" not in line


NO_TRACE = {"baselines": ["llama"], "findings": ["llama"], "health": ["node-7"], "health_figures": ["node-7"],
            "host_names": ["node-7"], "clocks": ["llama"], "raw_requests": ["llama"]}  # fmt: skip


def rows_of(table: str, job: str = "job", run: int = 7, **more: Any) -> pa.Table:
    given = {name: example(name, column.type)[:1] for name, column in table_columns()[table].items()}
    return to_arrow(table, given | {"job": [job], "run": [run]} | more if "job" in given else given | more)


def stacks_of(job: str = "job", run: int = 7) -> pa.Table:
    """A stack under its own number."""
    return to_stacks([stack(py("main", 3), native("read"))], Origin(job, run, "", 0))


def kernel_of(job: str = "job", run: int = 7, **more: Any) -> pa.Table:
    """A kernel under its own number."""
    of = {"kernel_id": [kernel_id("gemm", 7, (4, 1, 1), (128, 1, 1))], "kernel": ["gemm"], "name": ["gemm(int)"],
          "stream": [7], "grid": [[4, 1, 1]], "block": [[128, 1, 1]]}  # fmt: skip
    return rows_of("kernel_groups", job, run, **(of | more))


@pytest.mark.parametrize("table", NO_TRACE)
@pytest.mark.thorough(first=3)
def test_a_spool_brings_no_verdicts_baselines_and_nodes(folder: Path, store: Store, table: str) -> None:
    folder.mkdir(mode=0o700)
    spool.write(folder, table, "t/1", rows_of(table))
    found = load(folder, store, trusted=False)
    assert (found.files, count(store, table)) == (0, 0)
    (line,) = found.trouble
    assert line.startswith(f"000001-{table}.arrow is for {table}, which no trace writes to a spool: --trusted loads it")
    assert load(folder, store).rows == {table: 1}


def test_a_spool_brings_no_rows_of_runs_that_are_there(folder: Path, store: Store) -> None:
    with Writer(store, source="theirs") as writer:
        writer.append("iterations", iterations(7))  # of the run 1 of a job
        assert writer.flush(), writer.last_error
    theirs = query_columns(store, "SELECT job, run, host FROM iterations LIMIT 1")
    job, run, host = str(theirs["job"][0]), int(theirs["run"][0]), str(theirs["host"][0])
    folder.mkdir(mode=0o700)
    spool.write(folder, "ranks", "t/1", rows_of("ranks", job, run, version=[2**63], host=[host]))
    spool.write(folder, "ranks", f"run/{'0' * 64}", rows_of("ranks", "own", uid=[1000], container=["pod 1"]))
    own = stacks_of("own").append_column("stored", pa.array([4_000_000_000], pa.timestamp("s", "UTC")))
    spool.write(folder, "stacks", "t/3", own)
    for known in (0, 2):
        found = load(folder, store, trusted=False)
        assert (found.files, found.known) == (2 - known, known)
        (line,) = found.trouble
        where = f"run {run} of job '{job}' on host {host}"
        assert line.startswith(f"000001-ranks.arrow has rows of {where}, which are there: --trusted")
        ranks = query_columns(store, "SELECT job, uid, container FROM ranks")
        assert [ranks[name].tolist() for name in ("job", "uid", "container")] == [["own"], [-1], [""]]
        stored = query_columns(store, "SELECT stored > now() + 60 AS later FROM stacks")
        assert stored["later"].tolist() == [0]
    assert load(folder, store).files == 1


def test_a_spool_says_whose_all_its_rows_are(folder: Path, store: Store) -> None:
    folder.mkdir(mode=0o700)
    whole = rows_of("iterations")
    for place, batch in enumerate((whole.drop_columns(["host"]), whole.drop_columns(["run"])), 1):
        spool.write(folder, "iterations", f"t/{place}", batch)
    found = load(folder, store, trusted=False)
    assert (found.files, count(store, "iterations")) == (0, 0)
    assert all("does not say whose its rows are" in line for line in found.trouble)
    assert len(found.trouble) == 2


def test_a_spool_brings_no_ranks_of_another_host_and_nothing_of_all_hosts(folder: Path, store: Store) -> None:
    with Writer(store, source="theirs") as writer:
        writer.append("ranks", rows_of("ranks", "llama", 7, host=["node-1"], rank=[3]))
        assert writer.flush(), writer.last_error
    folder.mkdir(mode=0o700)
    spool.write(folder, "kernel_groups", "t/1", kernel_of("llama", 7))
    spool.write(folder, "ranks", "t/2", rows_of("ranks", "llama", 7, host=["other"], rank=[3]))
    spool.write(folder, "ranks", "t/3", rows_of("ranks", "llama", 7, host=["other"], rank=[4]))
    spool.write(folder, "dumped_calls", "t/4", rows_of("dumped_calls", "llama", 7))
    spool.write(folder, "communicators", "t/5", rows_of("communicators", "llama", 7, rank=[4]))
    found = load(folder, store, trusted=False)
    assert found.rows == {"ranks": 1, "communicators": 1}
    first, second, third = found.trouble
    assert "000001-kernel_groups.arrow has rows of run 7 of job 'llama', which are there" in first
    assert "000002-ranks.arrow has ranks of run 7 of job 'llama' on host other that another host has" in second
    assert "000004-dumped_calls.arrow has rows of run 7 of job 'llama', which are there" in third


def test_each_node_of_a_run_brings_its_own(folder: Path, tmp_path: Path, store: Store) -> None:
    for number, host in enumerate(("node-1", "node-2")):
        of_node = folder if not number else tmp_path / "second"
        of_node.mkdir(mode=0o700)
        spool.write(of_node, "ranks", f"t{number}/1", rows_of("ranks", "llama", 7, host=[host], rank=[number]))
        spool.write(of_node, "kernel_groups", f"t{number}/2", kernel_of("llama", 7))
        template = rows_of("kernel_templates", "llama", 7, template=[number + 1])
        spool.write(of_node, "kernel_templates", f"t{number}/3", template)
        found = load(of_node, store, trusted=False)
        assert (found.files, found.trouble) == (3, [])
    assert count(store, "kernel_templates") == 2
    assert query_columns(store, "SELECT host FROM ranks ORDER BY rank")["host"].tolist() == ["node-1", "node-2"]


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.thorough(first=1)
def test_a_spool_that_is_still_written_is_loaded_in_parts(folder: Path, store: Store, remove: bool) -> None:
    folder.mkdir(mode=0o700)
    spool.write(folder, "jobs", "t/1", rows_of("jobs", ended=[None], version=[1]))
    assert load(folder, store, trusted=False, remove=remove).files == 1
    spool.write(folder, "ranks", "t/2", rows_of("ranks"))
    found = load(folder, store, trusted=False, remove=remove)
    assert (found.files, found.trouble) == (1, [])
    spool.write(folder, "jobs", "t/3", rows_of("jobs", ended=[HELD * 10**9], version=[2]))
    assert load(folder, store, trusted=False, remove=remove).trouble == []
    assert folder.exists() != remove


def test_who_loads_a_spool_says_whether_it_is_trusted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(mode=0o700)
    spool.write(folder, "findings", "t/1", rows_of("findings"))
    words = ["store", "load", str(folder), "--store", f"chdb://{tmp_path}/store"]
    assert main(words) == EXIT_FAILURE
    assert "not loaded: 000001-findings.arrow is for findings" in capsys.readouterr().err
    assert main([*words, "--trusted"]) == 0


def test_a_spool_is_not_queried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, [("iterations", iterations(7))])
    for words in (["sql", "SELECT 1"], ["diagnose"], ["store", "status"], ["store", "init"],
                  ["store", "load", str(folder)]):  # fmt: skip
        assert main([*words, "--store", f"spool://{folder}"]) == EXIT_USAGE
        assert "spool" in capsys.readouterr().err
    with pytest.raises(ArgusError, match="load it first"):
        query_columns(open_store(f"spool://{folder}"), "SELECT 1")


@pytest.mark.parametrize("url", ["spool://host/a", "spool:///", "spool:///a?b=c", "spool:a"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ArgusError) as wrong:
        open_store(url)
    assert wrong.value.exit_code == EXIT_USAGE


def test_load_from_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, [("iterations", iterations(7)), ("launches", launches(11))])
    url = f"chdb://{tmp_path}/store"
    assert main(["store", "load", str(folder), "--store", url]) == 0
    out = capsys.readouterr().out
    assert "iterations" in out
    assert "11" in out
    (folder / "000003-launches.arrow").write_bytes(b"")
    (folder / "000004-launches.arrow.part").write_bytes(b"")
    assert main(["store", "load", str(folder), "--store", url]) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert "2 were there already" in captured.out
    assert "not loaded: 000003-launches.arrow" in captured.err
    assert "1 unfinished" in captured.err
    other = tmp_path / "other"
    for wrong in (tmp_path / "none", tmp_path):
        assert main(["store", "load", str(wrong), "--store", f"chdb://{other}"]) == EXIT_UNAVAILABLE
        assert not other.exists(), "an empty store was made"


def test_what_fills_a_spool_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, table = tmp_path / "my spool", tmp_path / "t.csv"
    table.write_text("rank,step,ms\n" + "".join(f"{rank},{step},9\n" for rank in range(2) for step in range(3)))
    columns = ["--rank-column", "rank", "--step-column", "step", "--duration-column", "ms"]
    for words in (["simulate", "--ranks", "2", "--steps", "3"], ["import", "iterations", str(table), *columns]):
        assert main([*words, "--job", "my job", "--store", f"spool://{folder}"]) == 0
        output = capsys.readouterr().out
        assert f"argus store load '{folder}'" in output
        assert "argus diagnose --job 'my job'" in output


def test_a_folder_that_was_loaded_and_removed_meanwhile_is_made_anew(folder: Path) -> None:
    """``argus store load --remove`` of a spool that is still written to."""
    with Writer(open_store(f"spool://{folder}"), source="test") as writer:
        writer.append("iterations", iterations(7))
        assert writer.flush()
        shutil.rmtree(folder)
        writer.append("iterations", iterations(3))
        assert writer.flush(timeout_s=0), writer.last_error
    assert [spool.read(file).rows.num_rows for _, file in spool.batch_files(folder)] == [3]


def test_a_killed_writer_leaves_no_half_file(folder: Path, store: Store) -> None:
    write(folder, [("iterations", iterations(7))])
    (folder / "000002-iterations.arrow.part").write_bytes(b"ARROW1")
    write(folder, [("iterations", iterations(11))])
    found = load(folder, store)
    assert (found.unfinished, found.trouble, found.rows) == (1, [], {"iterations": 18})


def test_needs_neither_engine_nor_client(folder: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('chdb', 'clickhouse_connect'): sys.modules[name] = None\n"
        "from argus.store.open import open_store\n"
        "from argus.store.reader import newest_run\n"
        "from argus.store.schema import ensure_schema\n"
        "from argus.store.writer import Writer\n"
        "import argus.cli.store, argus.cli.main\n"
        "store = open_store(sys.argv[1])\n"
        "ensure_schema(store)\n"
        "assert newest_run(store) == 0\n"
        "writer = Writer(store, source='t')\n"
        "writer.start()\n"
        "writer.append('coverage', {'job': 'j', 'run': 5, 'host': 'h', 'counter': ['c'], 'value': 1, 'loss': False,"
        " 'ts': [1], 'version': 1})\n"
        "assert writer.close().written == {'coverage': 1}\n"
        "sys.exit(argus.cli.main.main(['sql', 'SELECT 1', '--store', sys.argv[1]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, f"spool://{folder}"], capture_output=True, text=True)
    assert done.returncode == EXIT_USAGE, done.stderr
    assert "load it first" in done.stderr


def test_the_newest_run_is_known(folder: Path) -> None:
    job = {"job": "j", "host": "h", "started": [1], "ended": [None], "world_size": 1, "launcher": "",
           "mono_offset_ns": 0, "argus_version": "", "version": 1}  # fmt: skip
    write(folder, [("jobs", {**job, "run": 41}), ("jobs", {**job, "run": 23})])
    assert newest_run(open_store(f"spool://{folder}")) == 41
    write(folder, [("jobs", {**job, "run": 2**32 - 1}), ("jobs", {**job, "run": 43})])
    assert newest_run(open_store(f"spool://{folder}")) == 43


def packed(folder: Path, batches: int, rows: int) -> Path:
    """A file of a spool whose columns unpack to a thousand times its size."""
    folder.mkdir(mode=0o700)
    schema = pa.schema([("ts", pa.int64())], metadata={spool._TABLE: b"iterations", spool._TOKEN: b"a/b:1"})
    file = folder / "000001-iterations.arrow"
    column = pa.array(np.zeros(rows, np.int64))
    with pa.ipc.new_file(str(file), schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        for _ in range(batches):
            out.write_batch(pa.record_batch([column], schema=schema))
    file.chmod(0o600)
    return file


def test_columns_are_not_unpacked_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 kB were 5.7 GB."""
    monkeypatch.setattr(spool, "MAX_UNPACKED_BYTES", 64 << 20)
    file, opened, taken = packed(folder, 12, 1 << 20), pa.ipc.open_file, list[int]()

    def counted(data: Any) -> Any:
        reader = opened(data)
        parts = range(reader.num_record_batches)
        batch = lambda number: (taken.append(number), reader.get_batch(number))[1]  # noqa: E731
        return SimpleNamespace(num_record_batches=len(parts), schema=reader.schema, get_batch=batch)

    monkeypatch.setattr(pa.ipc, "open_file", counted)
    with pytest.raises(spool.Damaged, match="unpacks to more than 64 MiB"):
        spool.read(file)
    assert taken == [*range(9)], "8 MiB each"


def test_a_part_that_needs_more_memory_than_may_be_taken_is_a_line(folder: Path) -> None:
    file = packed(folder, 1, 64 << 20)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from argus.store import spool\nfrom argus.system import limits\n"
        "limits.DATA_BYTES = 400 << 20\nwith limits.frugal():\n"
        "    try: spool.read(Path(sys.argv[1]))\n    except spool.Damaged as failure: print(failure)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == ("000001-iterations.arrow is not read: it unpacks to more than Argus may take of memory\n"), (
        done.stdout + done.stderr
    )
