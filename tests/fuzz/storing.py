"""What importers are given in the place of a store: rows are converted as they would be, and dropped."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from argus.importers import rows
from argus.importers.recordings import convert
from argus.importers.recordings.groups import find_communicators
from argus.importers.recordings.recording import Recording
from argus.importers.recordings.steps import find_all_steps
from argus.store.arrow import to_arrow

HELD = "/dev/shm" if os.path.isdir("/dev/shm") else None
with contextlib.suppress(ImportError):
    # pyarrow imports it when it is first needed, which would be a second of some case.
    importlib.import_module("pandas")
pa.array(["a"]).dictionary_encode()
"""Arrow's allocator reserves 1 GiB of addresses at its first use, which would be more than a case may have."""


class Writer:
    """Converts rows to the types of their tables."""

    rows_dropped = 0
    last_error = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def append(self, table: str, columns: Any) -> int:
        """As ``argus.store.writer.Writer.append``, whose errors an importer must not see."""
        return int(to_arrow(table, columns).num_rows)

    def flush(self, *_: Any) -> bool:
        return True

    def close(self, **_: Any) -> None:
        pass


@contextlib.contextmanager
def dropped() -> Iterator[None]:
    """Importers write to nowhere."""
    with (
        mock.patch.object(convert, "Writer", Writer),
        mock.patch.object(convert, "new_run", return_value=1),
        mock.patch.object(rows, "Writer", Writer),
        mock.patch.object(rows, "new_run", return_value=1),
    ):
        yield


ONE_OF = 8
"""So many inputs that are read one is stored: that takes ten times as long as reading it."""


def store_some(recordings: Sequence[Recording], data: bytes) -> None:
    """``store``, of some inputs, the same ones each time."""
    if zlib.crc32(data) % ONE_OF == 0:
        store(recordings)


def store(recordings: Sequence[Recording]) -> None:
    """All that ``argus import`` does with recordings."""
    convert.check_ranks(recordings)
    communicators = find_communicators(recordings)
    steps = find_all_steps(recordings, communicators)
    nowhere: Any = None
    with dropped():
        convert.write(nowhere, "job", recordings, steps, communicators)
    for each in recordings:
        convert.summary(each, steps[each.rank])


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder in memory."""
    path = Path(tempfile.mkdtemp(prefix="argus-fuzz-", dir=HELD))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def made(make: Any) -> bytes:
    """The bytes of the file that ``make(path)`` writes."""
    with folder() as place:
        make(place / "made")
        return (place / "made").read_bytes()


@contextlib.contextmanager
def as_file(data: bytes, name: str) -> Iterator[Path]:
    """A file in memory that holds an input."""
    path = _held() / name
    path.write_bytes(data)
    yield path


_folders: dict[int, Path] = {}


def _held() -> Path:
    """This process's own folder in memory, which goes with it."""
    pid = os.getpid()
    if pid not in _folders:
        import atexit

        found = _folders[pid] = Path(tempfile.mkdtemp(prefix="argus-fuzz-", dir=HELD))
        atexit.register(lambda: os.getpid() == pid and shutil.rmtree(found, ignore_errors=True))
    return _folders[pid]
