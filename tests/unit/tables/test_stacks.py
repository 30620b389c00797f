"""Counts of stacks as rows of the store: every column against hand-computed values, and back through a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from argus.model import records
from argus.model.stacks import Frame, Stack
from argus.store.arrow import to_arrow
from argus.store.open import open_store
from argus.store.read.stacks import read_stacks
from argus.store.reader import query
from argus.store.writer import Writer
from argus.tables.arrow import Origin
from argus.tables.stacks import to_pauses, to_samples, to_stacks, to_usage
from tests.builders.stack_data import native, py, stack
from tests.stores import new_store

ORIGIN = Origin("llama", 7, "node-3", 1_000)

USAGE = np.dtype(
    [
        ("pid", "<u4"), ("tid", "<u4"), ("cpu_ns", "<i8"), ("runqueue_ns", "<i8"), ("io_ns", "<i8"),
        ("switches_voluntary", "<i8"), ("switches_involuntary", "<i8"), ("begin_ns", "<u8"), ("end_ns", "<u8"),
    ]
)  # fmt: skip


def counts() -> np.ndarray:
    made = np.zeros(3, records.STACK_COUNT)
    made["stack"], made["pid"], made["tid"] = [11, 12, 0], 40, [40, 41, 42]
    made["what"] = [
        records.WHAT_GIL | records.WHAT_GC | records.WHAT_KERNEL | records.NO_SYSCALL,
        records.WHAT_OFF | records.WHAT_GIL_WAIT | 202,
        records.WHAT_OFF | records.WHAT_PREEMPTED | records.NO_SYSCALL,
    ]
    made["count"], made["ns"] = [5, 2, 1], [50, 900, 70]
    made["runqueue_ns"], made["max_ns"] = [0, 30, 70], [0, 500, 70]
    made["first_ns"], made["last_ns"] = [100, 200, 300], [150, 260, 370]
    return made


def test_samples() -> None:
    table = to_samples(
        counts(),
        ORIGIN,
        np.array([0, 0, 1], np.uint32),
        ["main", "worker", "worker"],
        np.array([2**64 - 1, 5, 0], np.uint64),
        ["nonsense", "gil", "runqueue"],
    )
    rows = table.to_pylist()
    assert rows[0] | {"ts": 0, "last_ts": 0} == {
        "job": "llama", "run": 7, "rank": 0, "host": "node-3", "pid": 40, "tid": 40, "thread": "main", "ts": 0,
        "last_ts": 0, "kind": "cpu", "reason": "", "gil": True, "gc": True, "in_kernel": True, "count": 5, "ns": 50,
        "runqueue_ns": 0, "max_ns": 0, "stack_id": 2**64 - 1,
    }  # fmt: skip
    assert [table["ts"].cast(pa.int64()).to_pylist(), table["last_ts"].cast(pa.int64()).to_pylist()] == [
        [1100, 1200, 1300], [1150, 1260, 1370],
    ]  # fmt: skip
    assert [
        (r["kind"], r["reason"], r["count"], r["ns"], r["runqueue_ns"], r["max_ns"], r["gil"]) for r in rows[1:]
    ] == [
        ("off", "gil", 2, 900, 30, 500, False),
        ("off", "runqueue", 1, 70, 70, 70, False),
    ]
    for column in ("thread", "reason", "kind"):
        words = table[column].combine_chunks().dictionary.to_pylist()
        assert len(words) == len(set(words)), "ClickHouse refuses dictionaries with duplicates"


def test_words_may_come_as_dictionaries_with_duplicates() -> None:
    names = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "a", "b"]))
    made = counts()
    table = to_samples(made, ORIGIN, np.zeros(3, np.uint32), names, np.zeros(3, np.uint64), names)
    assert table["thread"].to_pylist() == ["a", "a", "b"]
    assert table["reason"].to_pylist() == ["", "a", "b"]
    assert table["thread"].combine_chunks().dictionary.to_pylist() == ["a", "b"]
    to_arrow("stack_samples", table)


def test_no_rows() -> None:
    empty = np.empty(0, np.uint32)
    none = np.empty(0, np.uint64)
    for table, rows in (
        ("stack_samples", to_samples(np.empty(0, records.STACK_COUNT), ORIGIN, empty, [], none, [])),
        ("stacks", to_stacks([], ORIGIN)),
        ("gc_pauses", to_pauses(np.empty(0, records.PAUSE), ORIGIN, empty, [], none)),
        ("thread_usage", to_usage(np.empty(0, USAGE), ORIGIN, empty, [])),
    ):
        assert to_arrow(table, rows).num_rows == 0


def test_columns_of_stacks() -> None:
    one = stack(native("_start", "/bin/python3"), py("main", 3), py("step", 9), native("read"))
    assert to_stacks([one], ORIGIN).to_pylist() == [
        {
            "job": "llama", "run": 7, "stack_id": one.id,
            "kinds": ["native", "python", "python", "native"], "functions": ["_start", "main", "step", "read"],
            "files": ["/bin/python3", "/app/train.py", "/app/train.py", "/usr/lib/libc.so.6"], "lines": [0, 3, 9, 0],
            "depth": 4, "leaf_kind": "native", "leaf_function": "read", "leaf_file": "/usr/lib/libc.so.6",
            "python_function": "step", "python_file": "/app/train.py", "python_line": 9,
            "python": "complete", "native": "leaf",
        }
    ]  # fmt: skip
    none = to_stacks([Stack((), "none", "none")], ORIGIN).to_pylist()[0]
    assert (none["depth"], none["leaf_function"], none["python_function"], none["python_line"]) == (0, "", "", 0)


def pause(begin: int, end: int, before: int, after: int, period: int = 0) -> np.ndarray:
    made = np.zeros(1, records.PAUSE)
    made["period_ns"] = period
    made["begin_ns"], made["end_ns"], made["before_ns"], made["after_ns"], made["pid"], made["tid"] = (
        begin, end, before, after, 40, 41,
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("seen", "period", "ts", "took", "uncertainty"),
    [
        ((1000, 1300, 900, 1400), 100, 950, 400, 100),
        ((1000, 1000, 900, 1100), 100, 950, 100, 100),  # met by one sample
        ((1000, 1300, 960, 1340), 100, 980, 340, 40),
        ((1000, 1300, 0, 0), 100, 950, 400, 100),  # neighbours not seen
        ((1000, 1300, 10, 9000), 100, 950, 400, 100),  # it was off the CPU before and after
        ((1000, 1300, 800, 1500), 0, 900, 500, 200),  # the period is not known
    ],
)
def test_pauses(seen: tuple[int, int, int, int], period: int, ts: int, took: int, uncertainty: int) -> None:
    table = to_pauses(pause(*seen, period), ORIGIN, np.zeros(1, np.uint32), ["main"], np.array([9], np.uint64))
    row = table.to_pylist()[0]
    assert table["ts"].cast(pa.int64()).to_pylist() == [1000 + ts]
    assert (row["duration_ns"], row["uncertainty_ns"], row["generation"], row["stack_id"]) == (took, uncertainty, -1, 9)
    again = to_pauses(
        pause(*seen),
        ORIGIN,
        np.zeros(1, np.uint32),
        ["main"],
        np.array([9], np.uint64),
        generations=np.array([2], np.int8),
    )
    assert again["generation"].to_pylist() == [2]


def test_pauses_of_a_time_in_which_the_rate_changed() -> None:
    both = np.concatenate([pause(1000, 1300, 10, 9000, 100), pause(2000, 2300, 10, 9000, 20)])
    table = to_pauses(both, ORIGIN, np.zeros(2, np.uint32), ["main"] * 2, np.zeros(2, np.uint64))
    assert table["duration_ns"].to_pylist() == [400, 320]
    assert table["uncertainty_ns"].to_pylist() == [100, 20]


def test_usage() -> None:
    made = np.zeros(1, USAGE)
    made[0] = (40, 41, 600, 70, -1, 12, 3, 1000, 2000)
    row = to_usage(made, ORIGIN, np.array([5], np.uint32), ["w"]).to_pylist()[0]
    del row["ts"]
    assert row == {
        "job": "llama", "run": 7, "rank": 5, "host": "node-3", "pid": 40, "tid": 41, "thread": "w", "interval_ns": 1000,
        "cpu_ns": 600, "runqueue_ns": 70, "io_ns": -1, "voluntary": 12, "involuntary": 3,
    }  # fmt: skip


def test_stacks_come_back_as_they_were_whatever_the_names(tmp_path: Path) -> None:
    hostile = [
        py("<script>alert(1)</script>", 1, '/a;b/"c".py'), py("a;b\n\tc", 2), py("\0\x1b[31m", 3), py("naïve🙂", 4),
        Frame("native", "std::map<int, std::vector<a::b> >::operator[](int&&)", "/lib/l'ib.so"), py("", 2**32 - 1, ""),
    ]  # fmt: skip
    whole = stack(*hostile, native="complete")
    broken = stack(py("\udc80bad", 1))
    with open_store(new_store(tmp_path)) as store:
        with Writer(store, source="test") as writer:
            for _ in range(3):  # re-sent stacks are harmless
                writer.append("stacks", to_stacks([whole, broken, Stack((), "none", "none")], ORIGIN))
                assert writer.flush(), writer.last_error
        found = read_stacks(store, "llama", 7, [whole.id, broken.id, 12345, 0])
        assert found[whole.id] == whole
        assert found[whole.id].id == whole.id
        assert found[broken.id].frames[0].function == "\\udc80bad"
        assert found[broken.id].id == broken.id
        assert set(found) == {whole.id, broken.id}
        assert query(store, "SELECT count() AS n FROM stacks FINAL").to_pylist() == [{"n": 3}]
