"""Files that unpack to far more than they have, and files that are exchanged while they are read."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus.importers import kineto, packed, tables, whatif_parquet
from argus.importers.regular import open_regular
from argus.model.errors import ArgusError
from tests.unit.importers.test_kineto import trace

DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))

# ---- files that unpack to far more than they have


OPERATIONS: dict[str, Any] = {"step": 0, "optype": "forward", "start_ts": 0.0, "duration": 1.0, "rank": 0}
LOGGED = ("rank", "step", "duration")


def repeated(path: Path, rows: int, changed: dict[str, Any], **options: Any) -> None:
    """A Parquet file of rows that are all the same."""
    columns = {}
    for name, value in (OPERATIONS | changed).items():
        words = pa.array([value])
        columns[name] = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), words)
        if not isinstance(value, str) or options.get("use_dictionary") is False:
            columns[name] = columns[name].dictionary_decode()
    pq.write_table(pa.table(columns), path, compression="zstd", **options)


PARQUET_READERS: dict[str, Callable[[Path], object]] = {
    "whatif": lambda path: whatif_parquet.read(path, None),
    "iterations": lambda path: sum(len(block["step"]) for block in tables.blocks(path, LOGGED)),
}


@pytest.mark.parametrize("reader", PARQUET_READERS)
@pytest.mark.parametrize(
    ("rows", "changed", "options", "why"),
    [
        (4_000_000, {}, {}, "claims to have 4,000,000 rows"),
        (50_000, {"step": "1" * 10_000}, {"row_group_size": 50_000}, "'step' has more than 64 MiB of text"),
        (1000, {"step": "1" * 100_000}, {"use_dictionary": False}, "unpacks to more than 6"),
        (10, {"step": [0]}, {}, "the column 'step' is of the type list"),
    ],
)  # fmt: skip
def test_a_parquet_file_is_read_in_proportion_to_its_bytes(
    tmp_path: Path, reader: str, rows: int, changed: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    """394 KB of constants took 1.3 GiB."""
    path = tmp_path / "trace.parquet"
    repeated(path, rows, changed, **options)
    with pytest.raises(ArgusError, match=re.escape(why)) as refused:
        PARQUET_READERS[reader](path)
    assert "\n" not in refused.value.message
    assert path.stat().st_size < 1 << 20


def test_memory_that_does_not_suffice_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, trace_path = tmp_path / "trace.parquet", tmp_path / "rank0.json"
    repeated(path, 10, {})
    trace_path.write_text(json.dumps(trace(0)))

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(whatif_parquet, "_numbered", full)
    monkeypatch.setattr(kineto, "_recording", full)
    for read in (lambda: whatif_parquet.read(path, None), lambda: kineto.read(trace_path, 0)):
        with pytest.raises(ArgusError, match="needs more memory than there is"):
            read()


PACKED: dict[str, tuple[bytes, bytes, bytes, Callable[[Path], object]]] = {
    "rank0.json": (b'{"traceEvents": [', b" " * 50, b"]}", lambda path: kineto.read(path, 0)),
    "rank0.csv": (b"rank,step,duration\n", b"1,1,1\n", b"", PARQUET_READERS["iterations"]),
    "rank0.jsonl": (
        b'{"rank": 1, "step": 1, "duration": 1}\n', b" " * 200_000 + b"\n", b"", PARQUET_READERS["iterations"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_file_is_unpacked_in_proportion_to_its_bytes(tmp_path: Path, name: str) -> None:
    """92 KB took 150 MiB. What is not packed is read at any size."""
    head, part, tail, read = PACKED[name]
    text = head + part * ((100 << 20) // len(part)) + tail
    plain, small = tmp_path / name, tmp_path / f"{name}.gz"
    small.write_bytes(gzip.compress(text, 9))
    with pytest.raises(ArgusError, match=r"unpacks to more than [89]\d\.\d MiB") as refused:
        read(small)
    assert "gunzip" in refused.value.hint
    plain.write_bytes(text)
    small.write_bytes(gzip.compress(text[: 60 << 20] + tail, 9))
    for path in (plain, small):
        why = ""
        try:
            read(path)
        except ArgusError as failure:  # it has no events
            why = failure.message
        assert "unpacks" not in why


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.gz")), ids=lambda path: path.name)
def test_real_files_unpack_to_a_tenth_of_the_bound(path: Path) -> None:
    with gzip.open(path) as file:
        unpacked = sum(len(part) for part in iter(lambda: file.read(1 << 20), b""))
    assert unpacked <= path.stat().st_size * packed.MOST_TIMES / 10


# ---- files that are exchanged while they are read


EXCHANGED: dict[str, tuple[Any, Callable[[Path], int]]] = {
    "whatif.parquet": (whatif_parquet, lambda path: len(whatif_parquet.read(path, None).operations)),
    "log.parquet": (tables, lambda path: sum(len(block["step"]) for block in tables.blocks(path, LOGGED))),
    "log.csv": (tables, lambda path: sum(len(block["step"]) for block in tables.blocks(path, LOGGED))),
    "log.csv.gz": (tables, lambda path: sum(len(block["step"]) for block in tables.blocks(path, LOGGED))),
    "log.jsonl": (tables, lambda path: sum(len(block["step"]) for block in tables.blocks(path, LOGGED))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGED)
def test_what_was_opened_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A name may lead to a pipe or a device once it was looked at."""
    module, read = EXCHANGED[name]
    path, other = tmp_path / name, tmp_path / "other"
    for place, rows in ((path, 3), (other, 5)):
        if name.endswith(".parquet"):
            repeated(place, rows, {})
        elif name.endswith(".jsonl"):
            place.write_text('{"rank": 0, "step": 1, "duration": 1}\n' * rows)
        else:
            text = ("rank,step,duration\n" + "0,1,1\n" * rows).encode()
            place.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)

    def opened(named: Path) -> BinaryIO:
        file = open_regular(named)
        if other.exists():
            other.replace(path)
        return file

    monkeypatch.setattr(module, "open_regular", opened)
    assert read(path) == 3
