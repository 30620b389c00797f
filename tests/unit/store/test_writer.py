"""The writer: types, limits, retries, and that an acknowledged row is stored exactly once whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import Owner
from argus.store import replay, spill, spool
from argus.store import writer as writer_module
from argus.store.arrow import cut, to_arrow
from argus.store.open import Store, open_store
from argus.store.schema_files import table_columns
from argus.store.writer import Writer
from tests.stores import rows

T0 = 1_700_000_000_123_456_789
LATER = 4_000_000_000_000_000_000
"""2096: rows that were stored long ago would have expired."""


class Clock:
    """Stands for the module ``time`` where rows are sent: sleeping takes no time."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return T0 / 1e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(writer_module, "time", made)
    return made


def iterations(count: int, rank: int = 0) -> dict[str, Any]:
    return {
        "job": "j", "run": 1, "rank": rank, "step": np.arange(count), "host": "h",
        "ts": T0 + np.arange(count) * 1000, "duration_ns": np.full(count, 1000), "collectives": 0, "launches": 0,
        "method": "test", "confidence": 1.0,
    }  # fmt: skip


def launches(count: int, handle: int = 0) -> dict[str, Any]:
    return {
        "job": "j", "run": 1, "rank": 0, "host": "h", "pid": 1, "tid": 2, "call": "cuLaunchKernel", "kind": "kernel",
        "kernel": "k", "handle": np.arange(handle, handle + count, dtype="u8"), "stream": 0, "bytes": 0,
        "shared_bytes": 0, "grid": np.tile(np.array([[4, 2, 1]], "u4"), (count, 1)),
        "block": [[1, 2, 3]] * count, "ts": T0 + np.arange(count), "duration_ns": -1, "result": 0, "in_nccl": False,
    }  # fmt: skip


def stacks(count: int) -> dict[str, Any]:
    """Rows of a table that keeps the newest version of each."""
    one = {name: [example(name, column.type)[0]] * count for name, column in table_columns()["stacks"].items()}
    # Stored long ago would have expired.
    return {**one, "stack_id": np.arange(count, dtype="u8"), "stored": LATER}


EXAMPLE: dict[str, tuple[Any, Any]] = {
    "UInt8": (200, 200), "UInt32": (2**32 - 1, 2**32 - 1), "Int32": (-5, -5), "UInt64": (2**64 - 1, 2**64 - 1),
    "Int64": (-(2**62), -(2**62)),
    "Float32": (0.5, 0.5), "Float64": (1e300, 1e300), "Bool": (True, True), "String": ("ü\n\0'", "ü\n\0'"),
    "LowCardinality(String)": ("x", "x"), "Array(UInt32)": ([1, 2], [1, 2]), "Array(UInt16)": ([], []),
    "Array(UInt8)": ([0, 7], [0, 7]), "Array(Int8)": ([-7, 0], [-7, 0]),
    "Array(Float32)": ([0.5], [0.5]), "Array(UInt64)": ([2**64 - 1], [2**64 - 1]),
    "Array(String)": (["a", ""], ["a", ""]), "Array(LowCardinality(String))": (["a", "a", ""], ["a", "a", ""]),
    "DateTime64(6, 'UTC')": (T0, T0 // 1000 * 1000), "Int8": (-1, -1), "UInt16": (2**16 - 1, 2**16 - 1),
    "DateTime64(9, 'UTC')": (T0, T0), "DateTime64(3, 'UTC')": (T0, T0 // 10**6 * 10**6),
    "Map(String, String)": ({"a": "ü"}, {"a": "ü"}),
    "Nullable(DateTime64(9, 'UTC'))": (None, None), "DateTime('UTC')": (T0, T0 // 10**9 * 10**9),
}  # fmt: skip
"""For every type in the schema: what is written, and what is read (times in nanoseconds)."""


def example(name: str, of: str) -> tuple[Any, Any]:
    """The same for a column. ClickHouse takes nothing but 0 and 1 for one that says whether a row is superseded."""
    return (1, 1) if name == "superseded" else EXAMPLE[of]


@pytest.mark.parametrize("table", table_columns())
def test_every_column_of_every_table_comes_back(store: Store, table: str) -> None:
    columns = table_columns()[table]
    given = {name: [example(name, c.type)[0]] * 3 for name, c in columns.items()}
    # Stored long ago would have expired.
    given.update({"stored": [LATER] * 3} if "stored" in columns else {})
    with Writer(store, source="test") as writer:
        assert writer.append(table, given) == 3
        assert writer.flush(), writer.last_error
    shown = [
        f"if(isNull({n}), NULL, toUnixTimestamp64Nano(toDateTime64(assumeNotNull({n}), 9)))" if "Date" in c.type else n
        for n, c in columns.items()
        if n != "stored"
    ]
    expected = tuple(example(n, c.type)[1] for n, c in columns.items() if n != "stored")
    assert rows(store, f"SELECT {', '.join(shown)} FROM {table} LIMIT 1") == [expected]


def test_forms_of_values(store: Store) -> None:
    three = {
        **launches(3),
        "pid": np.array([1, 2, 3], ">u2"),
        "call": np.array([b"cuA", b"cuB", b"cuC"]),
        "kind": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["kernel", "memcpy"])),
        "kernel": np.array(["k0", "k1", "k2"], dtype=object),
        "in_nccl": np.array([0, 1, 0], "u1"),
        "result": np.array([True, False, True]),
        "ts": np.array([T0, T0 + 1, T0 + 2]).astype("M8[ns]"),
        "grid": pa.array([[1], [], [1, 2]], pa.list_(pa.int64())),
        "duration_ns": np.arange(6)[::2],
        "run": np.uint32(9),
    }
    ended = {
        "job": "j", "run": 1, "host": ["a", "b"], "started": T0, "ended": [None, T0], "world_size": 0,
        "launcher": "unknown", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
    }  # fmt: skip
    with Writer(store, source="test") as writer:
        writer.append("launches", three)
        writer.append("launches", pa.table(to_arrow("launches", launches(1, 7))))
        writer.append("jobs", ended)
        assert writer.flush(), writer.last_error
    sql = "SELECT pid, call, kind, kernel, in_nccl, result, toUnixTimestamp64Nano(ts), grid, duration_ns, run"
    assert rows(store, sql + " FROM launches WHERE run = 9 ORDER BY ts") == [
        (1, "cuA", "kernel", "k0", False, 1, T0, [1], 0, 9),
        (2, "cuB", "memcpy", "k1", True, 0, T0 + 1, [], 2, 9),
        (3, "cuC", "kernel", "k2", False, 1, T0 + 2, [1, 2], 4, 9),
    ]
    assert rows(store, "SELECT handle, grid, block FROM launches WHERE run = 1") == [(7, [4, 2, 1], [1, 2, 3])]
    assert rows(store, "SELECT host, isNull(ended) FROM jobs ORDER BY host") == [("a", 1), ("b", 0)]


def test_rows_are_copied(store: Store) -> None:
    ring = np.arange(5, dtype="u4")  # the column's own type: nothing needs converting
    with Writer(store, source="test") as writer:
        writer.append("iterations", {**iterations(5), "step": ring, "duration_ns": ring[:]})
        ring[:] = 99
        writer.flush()
    assert rows(store, "SELECT arraySort(groupArray(step)) FROM iterations") == [([0, 1, 2, 3, 4],)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stepp": [1, 2]}, ["iterations", "no column stepp"]),
        ({"step": None}, ["lack the column step"]),
        ({"step": [1, 2, 3]}, ["differ in length", "step: 3"]),
        ({"step": [-1, 0]}, ["step", "UInt32"]),
        ({"step": np.array([2**32, 0])}, ["step", "UInt32"]),
        ({"step": ["a", "b"]}, ["step", "UInt32"]),
        ({"host": [1, 2]}, ["host", "String"]),
        ({"host": ["a", None]}, ["host", "null"]),
        ({"ts": np.array([1e18, 1e18])}, ["ts", "float"]),
        ({"step": np.zeros((2, 2))}, ["step", "dimensions"]),
    ],
)
def test_wrong_columns_are_refused_at_once(store: Store, change: dict[str, Any], words: list[str]) -> None:
    given = {**iterations(2), **change}
    given = {name: values for name, values in given.items() if values is not None}
    writer = Writer(store, source="test")
    with pytest.raises(ValueError) as failure:
        writer.append("iterations", given)
    for word in words:
        assert word in str(failure.value)
    assert writer.close().dropped == {}


def test_an_unknown_table_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"no table 'iteration' \(known: .*iterations"):
        Writer(store, source="test").append("iteration", {})


def test_imported_rows_of_long_ago_stay(store: Store) -> None:
    # Of more days than the engine takes in one insert, which is a hundred, if it is not told to.
    old = {**iterations(120), "ts": np.arange(120) * 86_400 * 10**9}
    with Writer(store, source="test") as writer:
        writer.append("iterations", old)
        assert writer.flush(), writer.last_error
    assert rows(store, "SELECT count(), min(toUnixTimestamp64Nano(ts)) FROM iterations") == [(120, 0)]


def test_flush_is_due_by_rows_and_by_time(store: Store, clock: Clock) -> None:
    now = clock.now
    writer = Writer(store, source="test", flush_rows=10, flush_s=5.0)
    writer.append("iterations", iterations(9))
    writer.maybe_flush(now)
    assert not writer.rows_written
    writer.append("iterations", iterations(1))
    writer.maybe_flush(now)
    assert writer.rows_written == {"iterations": 10}
    writer.append("iterations", iterations(1))
    writer.maybe_flush(now + 4)
    assert writer.rows_written == {"iterations": 10}
    writer.maybe_flush(now + 5)
    assert writer.rows_written == {"iterations": 11}
    assert writer.bytes_waiting == 0


def named(count: int, handle: int, length: int) -> dict[str, Any]:
    """Rows of kernels: a third with short names, then names of so many characters, every second one seen before."""
    names = [
        f"{number // 2:08}".ljust(length if number - handle >= count // 3 else 8, "x")
        for number in range(handle, handle + count)
    ]
    return {**launches(count, handle), "kernel": pa.array(names).dictionary_encode()}


def test_much_at_once_is_sent_in_small_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int, str]] = []

    def insert(table: str, rows: pa.Table, token: str, timeout_s: float) -> None:
        sent.append((rows.num_rows, rows.nbytes, token))
        Store.insert(store, table, rows, token, timeout_s)

    monkeypatch.setattr(store, "insert", insert)
    monkeypatch.setattr(writer_module, "BATCH_BYTES", 100_000)
    with Writer(store, source="test", max_bytes=100 << 20) as writer:
        writer.owners = Owners()
        for handle in range(0, 300, 100):
            writer.append("launches", launches(100, handle))
        writer.append("launches", named(1500, 300, 4000))  # 2 MB of names
        writer.append("launches", launches(100, 1800))
        assert writer.flush(), writer.last_error
        assert writer.bytes_waiting == 0
        assert not writer._shares._held
    assert sum(count for count, _, _ in sent) == 1900
    assert max(size for _, size, _ in sent) <= 100_000
    assert sent[0][0] >= 300  # those before are one batch
    assert len({token for _, _, token in sent}) == len(sent) < 60
    found = rows(store, "SELECT handle, kernel FROM launches ORDER BY handle")
    assert [handle for handle, _ in found] == list(range(1900))
    assert {(handle, len(kernel)) for handle, kernel in found} == {
        (handle, 4000 if 800 <= handle < 1800 else 8 if 300 <= handle < 1800 else 1) for handle in range(1900)
    }
    assert all(kernel.startswith(f"{handle // 2:08}") for handle, kernel in found if 300 <= handle < 1800)


def test_a_piece_keeps_what_is_null() -> None:
    values = pa.array(["a", None, "b", "a", None, "c"] * 2).dictionary_encode()
    table = pa.table({"name": values, "number": range(12)})
    pieces = cut(table, table.nbytes // 3)
    assert len(pieces) == 4
    assert pa.concat_tables(pieces).to_pydict() == table.to_pydict()
    assert [piece.column("name").chunk(0).dictionary.to_pylist() for piece in pieces] == [["a", "b"], ["a", "c"]] * 2


def test_what_all_rows_have_in_common_is_not_cut() -> None:
    """Each piece would have all of it."""
    table = to_arrow("launches", {**launches(500), "kernel": "x" * 100_000})
    assert cut(table, 50_000) == [table]
    some = to_arrow("launches", named(4, 0, 100_000))  # the last two have one name
    assert [piece.num_rows for piece in cut(some, 50_000)] == [1, 1, 2]


def test_what_rows_refer_to_is_sent_before_them(store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Rows that a kill leaves without their template, or stack, say nothing."""
    sent: list[str] = []
    monkeypatch.setattr(Store, "insert", lambda self, table, *rest: sent.append(table))

    def rows_of(table: str) -> dict[str, Any]:
        return {name: [example(name, column.type)[0]] for name, column in table_columns()[table].items()}

    writer = Writer(store, source="test", flush_s=5.0)
    for table in ("kernel_summaries", "stack_samples"):
        writer.append(table, rows_of(table))
    clock.now += 4
    for table in ("kernel_templates", "kernel_groups", "stacks", "iterations"):
        writer.append(table, rows_of(table))
    writer.maybe_flush(clock.now + 2)
    assert sent == ["kernel_groups", "kernel_templates", "kernel_summaries", "stacks", "stack_samples"]
    monkeypatch.undo()
    writer.close()


class _Flaky:
    """A store whose client loses answers or fails, as told."""

    def __init__(self, store: Store, failures: list[Exception | str]) -> None:
        self.store, self.failures = store, failures

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.store.lease() as client:
            real = client.insert_arrow

            def insert_arrow(*arguments: Any, **options: Any) -> Any:
                failure = self.failures.pop(0) if self.failures else None
                if isinstance(failure, Exception):
                    raise failure
                done = real(*arguments, **options)
                if failure == "lose the answer":
                    raise ConnectionResetError("the answer was lost")
                return done

            monkeypatch.setattr(client, "insert_arrow", insert_arrow)


def refusal(code: int) -> Exception:
    from clickhouse_connect.driver.exceptions import DatabaseError

    failure = DatabaseError("Code: x. DB::Exception: no")
    failure.code = code
    return failure


def test_a_lost_answer_does_not_double_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _Flaky(store, ["lose the answer", "lose the answer"]).install(monkeypatch)
    with Writer(store, source="test") as writer:
        writer.append("iterations", iterations(100))
        assert writer.flush()
        assert isinstance(writer.last_error, ConnectionResetError)
        # The same rows again are other rows, not a repetition.
        writer.append("iterations", iterations(100))
        assert writer.flush()
    assert rows(store, "SELECT count() FROM iterations") == [(200,)]
    with Writer(store, source="test") as second:
        second.append("iterations", iterations(100))
    assert rows(store, "SELECT count() FROM iterations") == [(300,)]


@pytest.mark.parametrize("code", [202, 241, 497])
def test_rows_wait_while_the_schema_cannot_be_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Too many queries, no memory, no right yet to read the version: the rows are not to blame."""
    from clickhouse_connect.driver.exceptions import DatabaseError

    from argus.store import schema

    real, failures = schema.schema_state, [code, code]

    def schema_state(*arguments: Any) -> Any:
        if failures:
            failure = DatabaseError("Code: x. DB::Exception: no")
            failure.code = failures.pop()
            raise failure
        return real(*arguments)

    monkeypatch.setattr(schema, "schema_state", schema_state)
    writer = Writer(store, source="test")
    writer.append("iterations", iterations(10))
    assert writer.flush(timeout_s=30)
    report = writer.close()
    assert (report.written, report.dropped, failures) == ({"iterations": 10}, {}, [])


def test_a_batch_sent_again_is_looked_for_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was lost a moment ago, but so many write that the store has forgotten its token."""
    real, calls = Store.insert, 0

    def insert(self: Store, table: str, batch: pa.Table, token: str, *rest: Any) -> None:
        nonlocal calls
        calls += 1
        real(self, table, batch, f"{token} {calls}", *rest)
        if calls == 1:
            raise ArgusError("the answer was lost", "", EXIT_UNAVAILABLE)

    monkeypatch.setattr(Store, "insert", insert)
    writer = Writer(store, source="test")
    writer.append("launches", launches(10))
    assert writer.flush(timeout_s=30)
    assert writer.close().written == {"launches": 10}
    assert rows(store, "SELECT count() FROM launches") == [(10,)]
    assert calls == 1


@pytest.mark.parametrize("table", ["launches", "iterations", "stacks"])
@pytest.mark.parametrize("again", ["by the same writer", "from disk"])
def test_a_block_that_the_engine_noted_and_lost_is_sent_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path, table: str, again: str
) -> None:
    """As where the engine is killed between noting a block's token and putting the block in its place: here it gets
    another block under that token."""
    columns = {"launches": launches(10), "iterations": iterations(10), "stacks": stacks(10)}[table]
    count = f"SELECT count() FROM {table}{' FINAL' * (table == 'stacks')} WHERE job != 'other'"
    other = to_arrow(table, {**columns, "job": "other"})
    real = Store.insert
    tokens: list[str] = []

    def insert(self: Store, table: str, batch: pa.Table, token: str, *rest: Any) -> None:
        tokens.append(token)
        real(self, table, other if len(tokens) == 1 else batch, token, *rest)
        if len(tokens) == 1:
            raise ArgusError("the engine was killed", "", EXIT_UNAVAILABLE)

    monkeypatch.setattr(Store, "insert", insert)
    writer = Writer(store, source="test")
    if again == "from disk":
        batch = to_arrow(table, columns)
        with pytest.raises(ArgusError):
            store.insert(table, batch, f"token/{table}")
        assert rows(store, count) == [(0,)]
        real(store, table, batch, f"token/{table}")
        assert rows(store, count) == [(0,)], "the engine takes it for stored"
        file = spool.write(tmp_path, table, f"token/{table}", batch, sent_s=clock.time())
        assert replay.replay(store, spool.read(file), 1.0, 30.0)
    else:
        writer.append(table, columns)
        assert writer.flush(timeout_s=30)
    assert rows(store, count) == [(10,)]
    assert len(set(tokens)) == 2
    report = writer.close()
    assert report.dropped == {}
    told = {"batches_rolled_up_twice": (1, True)} if table == "iterations" and again != "from disk" else {}
    assert {name: each for name, each in writer.counters().items() if "rolled_up" in name and each[0]} == told


def test_what_the_store_refuses_is_dropped_and_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _Flaky(store, [ArgusError("no such column")]).install(monkeypatch)
    writer = Writer(store, source="test")
    writer.append("iterations", iterations(10))
    writer.append("launches", launches(3))
    writer.flush()
    report = writer.close()
    assert report.dropped == {"iterations": 10}
    assert report.written == {"launches": 3}
    assert report.last_error == "no such column"


@pytest.mark.parametrize("code", [497, 164, 1001, 76])
def test_what_the_rows_are_not_to_blame_for_is_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A right that is granted a moment later, a disk that is read-only for a while."""
    _Flaky(store, [refusal(code), refusal(code)]).install(monkeypatch)
    writer = Writer(store, source="test")
    writer.append("iterations", iterations(10))
    assert writer.flush(timeout_s=30)
    report = writer.close()
    assert (report.written, report.dropped) == ({"iterations": 10}, {})


def test_without_a_right_nobody_waits_until_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Exception | str] = [refusal(497) for _ in range(20)]
    _Flaky(store, refusals).install(monkeypatch)
    writer = Writer(store, source="test")
    writer.append("iterations", iterations(10))
    assert writer.close(timeout_s=20).dropped == {"iterations": 10}
    assert len(refusals) > 12, "it went on trying"


def test_a_refused_password_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed, in the file that holds it as well."""
    with store.lease() as before:
        pass
    _Flaky(store, [refusal(516)]).install(monkeypatch)
    with pytest.raises(ArgusError, match="refused user"):
        store.insert("iterations", to_arrow("iterations", iterations(1)), "one")
    with store.lease() as after:
        assert after is not before


@pytest.mark.parametrize("made_anew", [True, False])
def test_where_a_table_is_gone_the_schema_is_seen_to_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, made_anew: bool
) -> None:
    """Its folder or database was removed while it was written to. What is still not there is refused for good."""
    monkeypatch.setattr(writer_module, "ensure_schema", lambda *_, **__: made_anew and rename("gone", "launches"))

    def rename(old: str, new: str) -> None:
        with store.lease() as client:
            if client.command(f"EXISTS TABLE {old}"):
                client.command(f"RENAME TABLE {old} TO {new}")

    try:
        writer = Writer(store, source="test")
        writer.append("iterations", iterations(10))
        assert writer.flush()
        rename("launches", "gone")
        writer.append("launches", launches(7))
        writer.flush()
        report = writer.close()
        assert report.dropped == ({} if made_anew else {"launches": 7})
        assert made_anew or "UNKNOWN_TABLE" in report.last_error
    finally:
        rename("gone", "launches")
    assert rows(store, "SELECT count() FROM launches") == [(7 if made_anew else 0,)]


def test_memory_is_bounded_and_launches_go_first(tmp_path: Path) -> None:
    nowhere = open_store("clickhouse://127.0.0.1:1/argus")
    size = to_arrow("launches", launches(1000)).nbytes
    writer = Writer(nowhere, source="test", max_bytes=size * 4 + 1)
    writer.append("iterations", iterations(100))
    for k in range(10):
        writer.append("launches", launches(1000, k * 1000))
        writer.flush(timeout_s=0)
        assert writer.bytes_waiting <= size * 4 + 1
    assert writer.rows_dropped == {"launches": 7000}
    big = to_arrow("iterations", iterations(1000)).nbytes
    for _ in range(2 + 4 * size // big):
        writer.append("iterations", iterations(1000))
    assert writer.rows_dropped["launches"] == 10_000
    assert writer.rows_dropped["iterations"] > 0
    report = writer.close(timeout_s=0)
    assert report.dropped["iterations"] % 1000 == 100
    assert "cannot reach the store 127.0.0.1:1" in report.last_error
    assert writer.bytes_waiting == 0


class Owners:
    """Jobs "mine" and "j": of two users."""

    refused = 0
    several = True

    def owner_of(self, job: str, run: int) -> Owner | None:
        return {"j": (1001, ""), "mine": (1002, "")}.get(job)

    def count_refused(self, job: str, run: int, rows: int) -> None:
        assert (job, run) == ("j", 1)
        self.refused += rows


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_owner_s_rows_do_not_fill_the_room_of_others(tmp_path: Path, clock: Clock, on_disk: bool) -> None:
    size = to_arrow("launches", launches(1000)).nbytes
    room = size * 20
    place = spill.Place(tmp_path / "spill", room) if on_disk else None
    writer = Writer(open_store("clickhouse://127.0.0.1:1/argus"), source="test", max_bytes=room, place=place)
    writer.owners = owners = Owners()
    mine = {**launches(1000), "job": "mine"}
    assert writer.append("launches", mine) == 1000
    for k in range(200):
        writer.append("launches", launches(1000, k * 1000))
        if on_disk:
            writer.flush(timeout_s=0)
            clock.now += 1.1
    assert owners.refused > 100_000
    for _ in range(4):
        assert writer.append("launches", mine) == 1000, "there is room for others"
    assert writer.append("jobs", {name: [example(name, column.type)[0]]
                                  for name, column in table_columns()["jobs"].items()}) == 1  # fmt: skip
    assert writer.rows_dropped == {}, "nothing had to go for it"
    report = writer.close(timeout_s=0)
    assert (report.on_disk if on_disk else report.dropped) == {
        "launches": 205_000 - owners.refused, "jobs": 1,
    }  # fmt: skip
    assert not writer._shares._held


def test_what_others_left_on_disk_is_nobody_s_share(tmp_path: Path, clock: Clock) -> None:
    size = to_arrow("launches", launches(1000)).nbytes
    place = spill.Place(tmp_path / "spill", size * 20)
    writer = Writer(open_store("clickhouse://127.0.0.1:1/argus"), source="test", max_bytes=size * 20, place=place)
    writer.owners = owners = Owners()
    writer._others_on_disk = size * 19
    for k in range(5):
        assert writer.append("launches", launches(1000, k * 1000)) == 1000
        clock.now += 2
    assert owners.refused == 0
    writer.close(timeout_s=0)
