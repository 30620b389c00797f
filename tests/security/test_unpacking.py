"""Files that are exchanged while they are read."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus.importers import tables, whatif_parquet
from argus.importers.regular import open_regular

DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))

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
