"""Importers of profilers' recordings with damaged, cut and made-up files: one clear line, or a recording that goes all
the way to the rows that would be stored.

``ARGUS_FUZZ=2000 pytest tests/unit/importers/test_broken_files.py`` makes so many cases of each kind."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argus.importers import kineto, nsys
from argus.importers.recordings import convert
from argus.importers.recordings.clocks import compare_clocks, find_hosts
from argus.importers.recordings.groups import find_communicators, mesh_of
from argus.importers.recordings.phases import phases_of
from argus.importers.recordings.recording import Recording
from argus.importers.recordings.steps import find_all_steps
from argus.model.errors import ArgusError
from tests.builders.kineto_job import Job, make
from tests.unit.importers.test_nsys import export

CASES = int(os.environ.get("ARGUS_FUZZ", "60"))
cases = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="ARGUS_FUZZ" not in os.environ,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
ARGUMENTS = (
    "correlation", "device", "stream", "grid", "block", "bytes", "Collective name", "In msg nelems", "Group size",
    "Process Group Name", "Process Group Ranks", "Seq", "dtype", "Input Dims", "Input type", "Dst Rank",
)  # fmt: skip


def taken(recordings: Sequence[Recording]) -> None:
    """Goes as far as the import does before it writes."""
    convert.check_ranks(recordings)
    clocks = compare_clocks(recordings)
    for each in recordings:
        each.clock_ns = clocks[each.rank].offset_ns if each.rank in clocks else 0
    communicators = find_communicators(recordings)
    steps = find_all_steps(recordings, communicators)
    find_hosts(recordings, clocks)
    mesh_of(recordings, communicators)
    for each in recordings:
        phases_of(each, steps[each.rank].rows)
        convert.summary(each, steps[each.rank])


def one_line(read: Any) -> None:
    """Reading either succeeds, or says in one line what is wrong."""
    reported = ""
    try:
        taken(read())
    except ArgusError as failure:
        reported = failure.message.strip() or "\n"
    assert "\n" not in reported
    assert "Traceback" not in reported
    assert len(reported) < 1000


@cache
def whole() -> bytes:
    """A small trace, as it is written."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = make(Job(dp=2, steps=3, layers=2, names="number", version="2.6"), Path(folder))
        return files[0].read_bytes()


@cache
def whole_export() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.sqlite"
        export(path)
        return path.read_bytes()


def damaged(text: bytes, cuts: float, flips: list[tuple[float, int]], twice: bool) -> bytes:
    out = bytearray(text[: max(1, int(cuts * len(text)))] if cuts < 1 else text)
    for place, bit in flips:
        out[int(place * (len(out) - 1))] ^= 1 << bit
    return bytes(out) + (bytes(out[: len(out) // 2]) if twice else b"")


DAMAGE = st.tuples(
    st.one_of(st.just(1.0), st.floats(0, 1)),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), max_size=6),
    st.booleans(),
)


@cases
@given(DAMAGE, st.booleans())
def test_damaged_traces(tmp_path_factory: pytest.TempPathFactory, damage: Any, packed: bool) -> None:
    path = _file(tmp_path_factory, "rank0.json")
    text = whole()
    path.write_bytes(damaged(gzip.compress(text, 1), *damage) if packed else damaged(text, *damage))
    one_line(lambda: [kineto.read(path, 0)])


@pytest.mark.thorough
@cases
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(FIELDS + ARGUMENTS), VALUES), min_size=1, max_size=30),
    VALUES,
)
def test_traces_with_odd_values(tmp_path_factory: pytest.TempPathFactory, changes: Any, head: Any) -> None:
    trace = json.loads(whole())
    for place, field, value in changes:
        event = trace["traceEvents"][place % len(trace["traceEvents"])]
        if field in FIELDS:
            event[field] = value
        elif isinstance(event.get("args"), dict):
            event["args"][field] = value
    trace["distributedInfo"], trace["baseTimeNanoseconds"] = head, head
    path = _file(tmp_path_factory, "rank0.json")
    path.write_text(json.dumps(trace))
    one_line(lambda: [kineto.read(path, 0)])


@cases
@given(VALUES, st.integers(0, 2000))
@pytest.mark.thorough
def test_json_that_is_no_trace(tmp_path_factory: pytest.TempPathFactory, value: Any, depth: int) -> None:
    path = _file(tmp_path_factory, "rank0.json")
    path.write_text('{"traceEvents": ' + "[" * depth + json.dumps(value) + "]" * depth + "}")
    one_line(lambda: [kineto.read(path, 0)])


@cases
@given(DAMAGE)
def test_damaged_exports(tmp_path_factory: pytest.TempPathFactory, damage: Any) -> None:
    path = _file(tmp_path_factory, "a.sqlite")
    path.write_bytes(damaged(whole_export(), *damage))
    one_line(lambda: nsys.read(path, 0))


@pytest.mark.thorough
@cases
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), VALUES), min_size=1, max_size=12))
def test_exports_with_odd_values(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    path = _file(tmp_path_factory, "a.sqlite")
    path.write_bytes(whole_export())
    with sqlite3.connect(path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table, column, value in changes:
            name = tables[table % len(tables)]
            columns = [row[1] for row in db.execute(f'PRAGMA table_info("{name}")')]
            shown = value if isinstance(value, (int, float, str, type(None))) else json.dumps(value)
            if isinstance(shown, int) and abs(shown) >= 1 << 63:
                shown = float(shown % (1 << 70))
            if isinstance(shown, str):
                shown = shown.encode("utf-8", "replace").decode()
            try:
                db.execute(f'UPDATE "{name}" SET "{columns[column % len(columns)]}" = ? WHERE rowid % 5 = 0', (shown,))
            except sqlite3.Error:
                continue
    db.close()
    one_line(lambda: nsys.read(path, 0))


def _file(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.getbasetemp() / name
