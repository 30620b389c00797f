"""Rows on disk while the store is away: bounded, checked, and stored exactly once, by whoever comes next."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from argus.cli.main import main
from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import replay, spill, spool
from argus.store import writer as writer_module
from argus.store.arrow import to_arrow
from argus.store.open import Store, open_store
from argus.store.replay import holds
from argus.store.schema_files import table_columns, table_keys
from argus.store.url import parse_url
from argus.store.writer import Writer
from tests.stores import rows
from tests.unit.store.test_writer import T0, example, iterations, launches

ROOT = Path(__file__).parents[2]

NOWHERE = "clickhouse://127.0.0.1:1/argus"
AWAY = ArgusError("cannot reach the store", "", EXIT_UNAVAILABLE)


@pytest.fixture
def place(tmp_path: Path) -> spill.Place:
    return spill.Place(tmp_path / "spill" / "one", spill.MAX_BYTES)


def count(store: Store, table: str = "iterations") -> int:
    return int(rows(store, f"SELECT count() FROM {table}")[0][0])


def leave(place: spill.Place, *batches: tuple[str, Any]) -> list[Path]:
    """What a writer leaves that never reaches its store. Returns the files."""
    writer = Writer(open_store(NOWHERE), source="test", place=place)
    for table, values in batches:
        writer.append(table, values)
        assert not writer.flush(timeout_s=0)
    report = writer.close(timeout_s=0)
    assert report.dropped == {}
    assert sum(report.on_disk.values()) > 0
    return sorted(place.folder.glob("*/*.arrow"))


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_rows_go_to_disk_and_back_in_the_same_run(
    store: Store, place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, away = Store.insert, True

    def insert(self: Store, *arguments: Any, **options: Any) -> None:
        if away:
            raise AWAY
        real(self, *arguments, **options)

    monkeypatch.setattr(Store, "insert", insert)
    writer = Writer(store, source="test", place=place, flush_s=0)
    writer.start()
    for k in range(5):
        writer.append("iterations", iterations(10, rank=k))
        writer.append("launches", launches(20, k * 20))
        writer.maybe_flush()
    wait_for(lambda: writer.counters().get("rows_spilled", (0,))[0] >= 140, "little came to disk")
    files = list(place.folder.glob("*/*.arrow"))
    sent = [batch.sent_s for batch in map(spool.read, files) if batch.doubt]
    assert sent, "no file says that its rows were sent already"
    assert all(0 < time.time() - sent_s < 600 for sent_s in sent)
    assert len(files) >= 9  # at most the one that is being sent stays in memory
    assert writer.bytes_waiting > 0
    assert "cannot reach" in writer.trouble
    away = False
    assert writer.flush(timeout_s=30), writer.last_error
    assert not list(place.folder.glob("*/*.arrow"))
    report = writer.close()
    assert report.written == {"iterations": 50, "launches": 100}
    assert (report.dropped, report.on_disk) == ({}, {})
    assert (count(store), count(store, "launches")) == (50, 100)
    assert not place.folder.exists()


def test_the_next_writer_stores_what_a_killed_one_left(store: Store, place: spill.Place) -> None:
    code = """
import sys, time
from pathlib import Path
from argus.store.open import open_store
from argus.store.spill import Place
from argus.store.writer import Writer
sys.path.insert(0, sys.argv[2])
from tests.unit.store.test_writer import iterations
writer = Writer(open_store("clickhouse://127.0.0.1:1/argus"), source="test", place=Place(Path(sys.argv[1]), 1 << 30))
for rank in range(3):
    writer.append("iterations", iterations(10, rank))
    writer.flush(timeout_s=0)
print("spilled", flush=True)
time.sleep(600)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(place.folder), str(ROOT)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "spilled\n"
        size = spill.waiting(place.folder).bytes
        assert spill.waiting(place.folder) == spill.Waiting(str(place.folder), 3, size, 1, 0)
        assert list(spill.abandoned(place.folder)) == [], "taken from a writer that lives"
    finally:
        child.kill()
        child.communicate()
    with Writer(store, source="test", place=place) as writer:
        writer.start()
        wait_for(lambda: count(store) == 30, "not stored")
        wait_for(lambda: not place.folder.exists(), "not tidied up")
        assert writer.counters() == {"spill_rows_adopted": (30, False)}


def test_a_folder_is_never_taken_over_twice(place: spill.Place) -> None:
    leave(place, ("iterations", iterations(10)))
    (first,) = spill.abandoned(place.folder)
    assert list(spill.abandoned(place.folder)) == []
    first.close()
    (again,) = spill.abandoned(place.folder)
    again.close()


def test_what_a_writer_left_that_was_killed_while_it_made_its_folder_is_tidied(place: spill.Place) -> None:
    own = spill.create(place, "mine")
    unlocked, bare = place.folder / f"{spill._NEW}-1", place.folder / f"{spill._NEW}-2"
    for made in (unlocked, bare):
        made.mkdir()
    (unlocked / spill._OWNER).write_text("4821\n")
    assert list(spill.abandoned(place.folder)) == []
    assert os.listdir(place.folder) == ["mine"]
    own.close()


def test_a_folder_that_is_tidied_away_while_it_is_made_is_made_again(
    place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.open, []

    def slow(path: Any, *arguments: Any, **options: Any) -> int:
        opened = real(path, *arguments, **options)
        if str(path).endswith(spill._OWNER) and not calls:
            calls.append(path)
            assert list(spill.abandoned(place.folder)) == []  # between the file and its lock
            assert os.listdir(place.folder) == []
        return opened

    monkeypatch.setattr(os, "open", slow)
    made = spill.create(place, "mine")
    assert calls
    assert os.listdir(place.folder) == ["mine"]
    assert list(spill.abandoned(place.folder)) == [], "it is not locked"
    made.close()


def test_stored_just_before_the_kill_is_not_stored_again(store: Store, place: spill.Place) -> None:
    """The answer came, the file was not deleted yet, and the store has forgotten the token since."""
    (file,) = leave(place, ("launches", launches(10)))
    os.utime(file, (time.time() - 3600,) * 2)
    batch = spool.read(file, summed=True)
    store.insert(batch.table, batch.rows, "a token that the store does not remember")
    assert holds(store, batch.table, batch.rows)
    with Writer(store, source="test", place=place) as writer:
        writer.start()
        wait_for(lambda: not file.exists(), "not looked at")
    assert count(store, "launches") == 10


@pytest.mark.parametrize("age", ["sent long ago", "sent", "the clock was set back"])
def test_what_is_not_known_of_a_file_is_looked_up(store: Store, place: spill.Place, age: str) -> None:
    (file,) = leave(place, ("launches", launches(10)))
    batch = spool.read(file, summed=True)
    file.unlink()
    sent_s = {"sent long ago": time.time() - 3600, "sent": time.time(), "the clock was set back": 0.0}[age]
    table = "iterations" if age == "sent long ago" else "launches"
    content = to_arrow("iterations", iterations(10)) if table == "iterations" else batch.rows
    file = spool.write(file.parent, table, "token", content, sent_s=sent_s)
    if age == "the clock was set back":
        os.utime(file, (time.time() + 3600,) * 2)
    store.insert(table, content, "a token that the store does not remember")
    with Writer(store, source="test", place=place) as writer:
        writer.start()
        wait_for(lambda: not file.exists(), "not looked at")
    assert count(store, table) == 10


def test_what_identifies_a_batch() -> None:
    import numpy as np

    batch = to_arrow("iterations", {**iterations(300), "rank": np.arange(300) % 100, "ts": T0 - np.arange(300)})
    key = list(table_keys()["iterations"])
    assert replay.identifying_rows(batch, key, by_shard=False) == [0, 299]
    reported = replay.identifying_rows(batch, key, by_shard=True)
    ranks = batch["rank"].to_pylist()
    assert len(reported) == 128
    assert {ranks[place] for place in reported} == set(range(36, 100))
    assert {99, 299} < set(reported)


def test_a_part_of_a_batch_is_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DOUBT_S", 0.0)
    insert, failing = Store.insert, [AWAY]

    def lossy(self: Store, table: str, batch: Any, token: str, *rest: Any) -> None:
        if failing:
            insert(self, table, batch.slice(0, 4), "a part")
            raise failing.pop()
        insert(self, table, batch, token, *rest)

    monkeypatch.setattr(Store, "insert", lossy)
    writer = Writer(store, source="test")
    writer.append("launches", launches(10))
    assert writer.flush(timeout_s=30)
    assert writer.counters() == {"batches_in_part": (1, True)}
    writer.close()


def test_the_keys_are_those_of_the_engine(store: Store) -> None:
    reported = rows(
        store, "SELECT name, sorting_key FROM system.tables WHERE engine = 'MergeTree' AND database = 'default'"
    )
    columns = {name: tuple(part for part in key.split(", ") if "(" not in part) for name, key in reported}
    assert columns == table_keys()
    assert {"findings", "kernel_summaries", "kernel_escapes"} < set(table_keys())


@pytest.mark.parametrize("table", table_keys())
def test_a_batch_is_distinguished_from_others(store: Store, table: str) -> None:
    from tests.unit.store.test_writer import example

    given: dict[str, Any] = {
        name: [example(name, c.type)[0]] * 3 for name, c in table_columns()[table].items() if name != "stored"
    }
    last = "ts" if "ts" in given else table_keys()[table][-1]
    given[last] = [1, 2, 3] if last == "step" else [T0, T0 + 10**9, T0 + 2 * 10**9]
    batch = to_arrow(table, given)
    assert not holds(store, table, batch)
    store.insert(table, batch.slice(0, 2), "two of them")
    assert not holds(store, table, batch)
    store.insert(table, batch.slice(2, 1), "and the last")
    assert holds(store, table, batch)


@pytest.mark.parametrize("damage", ["empty", "cut", "a bit", "no checksum", "unknown column", "unknown table"])
def test_what_cannot_be_stored_is_set_aside_counted_and_reported(store: Store, place: spill.Place, damage: str) -> None:
    files = leave(place, *[("iterations", iterations(n)) for n in (10, 20, 30)])
    data = bytearray(files[1].read_bytes())
    if damage in ("empty", "cut"):
        files[1].write_bytes(data[: 0 if damage == "empty" else len(data) - 100])
    elif damage == "a bit":
        data[len(data) // 2] ^= 4
        files[1].write_bytes(data)
    elif damage == "no checksum":
        files[1].write_bytes(data.replace(b"argus-crc32:", b"argus-crc33:"))
    else:
        batch = spool.read(files[1])
        more = batch.rows.append_column("surprise", batch.rows["step"])
        files[1].unlink()
        table, content = ("iterations", more) if damage == "unknown column" else ("tomorrow", batch.rows)
        spool.write(files[1].parent, table, batch.token, content).rename(files[1])
    with Writer(store, source="test", place=place) as writer:
        writer.start()
        wait_for(lambda: count(store) == 40, "the others were not stored")
        wait_for(lambda: not list(place.folder.glob("*/owner")), "the folder is still held")
    name = "spill_files_refused" if "unknown" in damage else "spill_files_damaged"
    assert writer.counters() == {"spill_rows_adopted": (40, False), name: (1, True)}
    (aside,) = (place.folder / "aside").iterdir()
    assert aside.name.endswith(files[1].name)
    assert "set aside" in writer.report().last_error
    assert spill.waiting(place.folder).aside == 1


def test_columns_that_came_later_get_their_defaults(store: Store, place: spill.Place) -> None:
    (file,) = leave(place, ("jobs", {
        "job": "j", "run": 1, "host": "h", "started": T0, "ended": None, "world_size": 1, "launcher": "", "version": 1,
        "mono_offset_ns": 0, "argus_version": "",
    }))  # fmt: skip
    assert "wall_error_ns" not in spool.read(file).rows.column_names
    with Writer(store, source="test", place=place) as writer:
        writer.start()
        wait_for(lambda: count(store, "jobs") == 1, "not stored")
    assert rows(store, "SELECT wall_error_ns FROM jobs") == [(-1,)]


def test_the_bound_holds_and_launches_go_first(tmp_path: Path) -> None:
    size = to_arrow("launches", launches(1000)).nbytes
    place = spill.Place(tmp_path / "spill", size * 2)
    writer = Writer(open_store(NOWHERE), source="test", place=place)
    writer.append("iterations", iterations(100))
    for k in range(200):
        writer.append("launches", launches(1000, k * 1000))
        writer.flush(timeout_s=0)
        assert spill.waiting(place.folder).bytes <= size * 2
    dropped = writer.rows_dropped["launches"]
    assert 0 < dropped < 200_000
    report = writer.close(timeout_s=0)
    assert report.dropped == {"launches": dropped}
    assert report.on_disk == {"iterations": 100, "launches": 200_000 - dropped}
    assert writer.counters()["rows_dropped_launches"] == (dropped, True)
    kept = [spool.read(file).rows for file in sorted(place.folder.glob("*/*-launches.arrow"))]
    assert kept[-1]["handle"][-1].as_py() == 199_999, "the newest were dropped"


def test_other_writers_count_towards_the_bound(place: spill.Place) -> None:
    (file,) = leave(place, ("iterations", iterations(100)))
    small = to_arrow("iterations", iterations(10)).nbytes
    room = 3 * small + int(2.2 * to_arrow("launches", launches(100)).nbytes)
    full = spill.Place(place.folder, file.stat().st_size + 1)
    writer = Writer(open_store(NOWHERE), source="test", place=full, max_bytes=room)
    for rank in range(3):
        writer.append("iterations", iterations(10, rank))
        assert not writer.flush(timeout_s=0)
    assert "rows wait in memory: the spill" in writer.trouble
    assert "is full" in writer.trouble
    assert writer.rows_dropped == {}, "there is room in memory"
    for k in range(5):
        writer.append("launches", launches(100, k * 100))
        writer.flush(timeout_s=0)
    # What is too much for memory goes as always: single calls first.
    assert writer.rows_dropped == {"launches": 300}
    assert writer.close(timeout_s=0).dropped == {"launches": 500, "iterations": 30}
    assert file.exists()


# ---- hundreds of thousands of files ----


def listings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that are listed from here on."""
    found: list[Path] = []
    real = spool.names
    monkeypatch.setattr(spool, "names", lambda folder: found.append(folder) or real(folder))
    return found


def test_of_other_writers_files_only_new_ones_are_looked_at(
    place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        spill.create(place, name).write("iterations", "t", to_arrow("iterations", iterations(1)), sent_s=0.0)
        os.utime(place.folder / name, (1, 1))
    size = (place.folder / "first" / "000001-iterations.arrow").stat().st_size
    clock, looked = [1000.0], []
    monkeypatch.setattr(spill.time, "monotonic", lambda: clock[0])
    real = spill._size
    monkeypatch.setattr(spill, "_size", lambda file: looked.append(file.name) or real(file))
    listed = listings(monkeypatch)
    others = spill.Others(place.folder)
    assert others.bytes(None) == 2 * size
    assert (len(listed), len(looked)) == (2, 2)
    clock[0] += 31
    assert others.bytes(None) == 2 * size
    assert (len(listed), len(looked)) == (2, 2), "nothing has changed"
    new = place.folder / "second" / "000002-iterations.arrow"
    new.write_bytes(b"x" * 1000)
    clock[0] += 31
    assert others.bytes(None) == 2 * size + 1000
    assert (listed[2:], looked[2:]) == ([new.parent], [new.name])
    new.unlink()
    clock[0] += 31
    assert others.bytes(None) == 2 * size
    assert others.bytes(place.folder / "first") == 2 * size, "30 s later"
    clock[0] += 31
    assert others.bytes(place.folder / "first") == size


def test_a_folder_is_listed_once_however_often_adopting_is_interrupted(
    store: Store, place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(place, *[("iterations", iterations(10, rank)) for rank in range(5)])
    listed = listings(monkeypatch)
    writer = Writer(store, source="test", place=place)
    real = replay.replay

    def interrupted(*given: Any) -> bool:
        writer.append("launches", launches(1))
        with writer._changed:
            writer._seal("launches")
        return real(*given)

    monkeypatch.setattr(writer_module, "replay", interrupted)
    for _ in range(6):
        writer._adopt()
        assert writer.flush(), writer.last_error
    assert (count(store), count(store, "launches")) == (50, 5)
    assert len(listed) == 1
    assert not list(place.folder.glob("*/*.arrow"))
    assert writer.counters() == {"spill_rows_adopted": (50, False)}


def test_a_folder_that_others_have_changed_is_listed_again(
    store: Store, place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = leave(place, *[("iterations", iterations(10, rank)) for rank in range(3)])
    writer = Writer(store, source="test", place=place)
    writer._listed = {files[0].parent: (spill.changed_ns(files[0].parent), deque([files[0].with_name("gone.arrow")]))}
    listed = listings(monkeypatch)
    writer._adopt()
    assert listed == [], "as it was left"
    assert count(store) == 0
    writer._listed = {files[0].parent: (spill.changed_ns(files[0].parent), deque([files[0].with_name("gone.arrow")]))}
    os.utime(files[0].parent, (1, 1))
    writer._adopt()
    assert (len(listed), count(store)) == (1, 30)
    writer.close()


def test_a_spool_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = to_arrow("iterations", iterations(1))
    with open_store(f"spool://{tmp_path}") as first, open_store(f"spool://{tmp_path}") as second:
        listed = listings(monkeypatch)
        for number in range(3):
            first.insert("iterations", batch, f"first {number}")
            second.insert("iterations", batch, f"second {number}")
    assert len(listed) == 2
    assert [file.name[:6] for _, file in spool.batch_files(tmp_path)] == [f"{k:06}" for k in range(1, 7)]


def test_a_full_disk_leaves_rows_in_memory_and_says_so(
    store: Store, place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.fsync, True

    def fsync(fd: int) -> None:
        if full and os.path.isfile(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    failing = [AWAY] * 2
    insert = Store.insert
    monkeypatch.setattr(
        Store, "insert", lambda *a, **o: (_ for _ in ()).throw(failing.pop()) if failing else insert(*a, **o)
    )
    writer = Writer(store, source="test", place=place)
    writer.append("iterations", iterations(10))
    assert not writer.flush(timeout_s=0)
    assert "cannot reach the store; rows wait in memory: no space is left on the disk" in writer.trouble
    assert writer.counters() == {"spill_failures": (1, False)}
    assert not list(place.folder.glob("*/*.arrow*"))
    assert writer.flush(timeout_s=30)
    assert writer.close().written == {"iterations": 10}
    assert count(store) == 10


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_spill_disk_that_is_really_full(tmp_path: Path) -> None:
    import numpy as np

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("mount is not allowed here")
    try:
        place = spill.Place(disk / "spill", spill.MAX_BYTES)
        writer = Writer(open_store(NOWHERE), source="test", place=place)
        writer.append("iterations", iterations(10))
        assert not writer.flush(timeout_s=0)
        noise = np.random.default_rng(1).integers(0, 2**63, 100_000)
        writer.append("launches", {**launches(100_000), "handle": noise})
        assert not writer.flush(timeout_s=0)
        assert "no space is left on the disk" in writer.trouble
        report = writer.close(timeout_s=0)
        assert report.on_disk == {"iterations": 10}
        assert report.dropped == {"launches": 100_000}
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_stuck_insert_does_not_keep_the_rest_in_memory(
    store: Store, place: spill.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that swallows everything: no failure, no answer."""
    import threading

    monkeypatch.setattr(writer_module, "STUCK_S", 0.2)
    answer, real, calls = threading.Event(), Store.insert, 0

    def insert(self: Store, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            answer.wait(60)
        real(self, *arguments, **options)

    monkeypatch.setattr(Store, "insert", insert)
    writer = Writer(store, source="test", place=place, flush_s=0)
    writer.start()
    for k in range(3):
        writer.append("iterations", iterations(10, k))
        writer.maybe_flush()
    wait_for(lambda: writer.counters().get("rows_spilled", (0,))[0] == 30, "still in memory")
    assert "no answer to an insert" in writer.trouble
    answer.set()
    assert writer.flush(60)
    writer.close()
    assert count(store) == 30


def test_load_stores_what_was_left(
    place: spill.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"chdb://{tmp_path}/store"
    monkeypatch.setenv("ARGUS_SPILL_DIR", str(tmp_path / "root"))
    where = spill.place(parse_url(url))
    assert where is not None
    files = leave(where, ("iterations", iterations(10)), ("launches", launches(20)))
    assert main(["store", "status", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "2 files" in out
    assert "argus store load" in out
    files[1].write_bytes(b"nonsense")
    assert main(["store", "load", "--store", url]) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert "1 files loaded" in captured.out
    assert "000002-launches.arrow is damaged" in captured.err
    assert "set aside" in captured.err
    assert main(["store", "load", "--store", url]) == 0
    assert "0 files loaded" in capsys.readouterr().out
    # A copy of one store's folder, taken to another store.
    leave(place, ("iterations", iterations(7, rank=5)))
    assert main(["store", "load", str(place.folder), "--trusted", "--store", url]) == 0
    with open_store(url) as store:
        assert count(store) == 17
    monkeypatch.setenv("ARGUS_SPILL_DIR", "off")
    assert main(["store", "load", "--store", url]) == EXIT_USAGE


def test_what_was_left_elsewhere_is_loaded_from_who_is_trusted(
    place: spill.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"chdb://{tmp_path}/store"
    monkeypatch.setenv("ARGUS_SPILL_DIR", str(tmp_path / "root"))
    columns = table_columns()["health"].items()
    health = {name: example(name, column.type)[:1] for name, column in columns if name != "stored"}
    (file, _) = leave(place, ("health", health), ("iterations", iterations(7)))
    words = ["store", "load", str(place.folder), "--store", url]
    assert main(words) == EXIT_UNAVAILABLE
    captured = capsys.readouterr()
    assert "is what traces left elsewhere, and may hold rows of any run" in captured.err
    assert "--trusted" in captured.err
    assert file.exists()
    assert main([*words, "--trusted"]) == 0
    with open_store(url) as store:
        assert (count(store), count(store, "health")) == (7, 1)
    here = spill.place(parse_url(url))
    assert here is not None
    leave(here, ("health", health))
    assert main(["store", "load", "--store", url]) == 0, "what is this machine's own is trusted"


def test_where_batches_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARGUS_SPILL_DIR", str(tmp_path))
    monkeypatch.setenv("ARGUS_SPILL_MAX", "3g")
    one = spill.place(parse_url("clickhouse://a@db:8123/argus"))
    assert one is not None
    assert one.folder.parent == tmp_path
    assert one.max_bytes == 3 << 30
    assert spill.place(parse_url("clickhouse://b@db:8123/argus?verify=false")) == one
    assert spill.place(parse_url("clickhouse://a@db:8123/other")) != one
    assert spill.place(parse_url("spool:///tmp/x")) is None
    monkeypatch.setenv("ARGUS_SPILL_MAX", "lots")
    with pytest.raises(ArgusError, match="no size"):
        spill.place(parse_url("chdb:///tmp/x"))
    monkeypatch.delenv("ARGUS_SPILL_MAX")
    monkeypatch.setenv("ARGUS_SPILL_DIR", "here")
    with pytest.raises(ArgusError, match="no absolute path"):
        spill.place(parse_url("chdb:///tmp/x"))
    monkeypatch.setenv("ARGUS_SPILL_DIR", "off")
    assert spill.place(parse_url("chdb:///tmp/x")) is None
    monkeypatch.delenv("ARGUS_SPILL_DIR")
    default = spill.place(parse_url("chdb:///tmp/x"))
    assert default is not None
    assert default.max_bytes == 4 << 30


def test_what_others_put_there_is_not_believed(place: spill.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(place, ("iterations", iterations(10)))
    real = os.fstat

    def of_another(fd: int) -> os.stat_result:
        status = list(real(fd))
        return os.stat_result([*status[:4], 54321, *status[5:]])

    monkeypatch.setattr(os, "fstat", of_another)
    assert list(spill.abandoned(place.folder)) == []
    with pytest.raises(ArgusError, match="it belongs to uid 54321"):
        spill.create(place, "mine")


def test_every_counter_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text().split("## Counters")[1].split("## ")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    loss = {name.strip(): row[2] == "yes" for row in cells for name in row[1].split(",")}
    assert {name: loss.get(name) for name in writer_module._COUNTERS} == {
        name: name in writer_module._LOSSES for name in writer_module._COUNTERS
    }


def test_who_gives_up_brings_to_disk_what_is_not_stored(place: spill.Place) -> None:
    writer = Writer(open_store(NOWHERE), source="test", place=place)
    writer.append("iterations", iterations(10))
    assert writer.give_up(60) == (10, 0)
    (file,) = place.folder.glob("*/*.arrow")
    assert spool.read(file).rows.num_rows == 10
    writer.append("iterations", iterations(5))
    assert writer.give_up(0) == (10, 5), "no time is left"
    assert writer.close(timeout_s=0).on_disk == {"iterations": 15}


def test_who_gives_up_without_a_place_says_what_is_lost() -> None:
    writer = Writer(open_store(NOWHERE), source="test")
    writer.append("iterations", iterations(10))
    assert writer.give_up(60) == (0, 10)


def test_who_gives_up_waits_for_nobody(place: spill.Place) -> None:
    writer = Writer(open_store(NOWHERE), source="test", place=place)
    writer.append("iterations", iterations(10))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with writer._changed:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert writer.give_up(0) == (0, 0), "what is pending cannot be counted"
    done.set()
    thread.join()
    assert writer.close(timeout_s=0).on_disk == {"iterations": 10}
