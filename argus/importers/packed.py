"""What a packed file may unpack to: a few bytes can stand for gigabytes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import IO, Any

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.units import binary_size

MOST_TIMES = 200
"""Bytes that a packed byte may stand for. Traces of PyTorch's profiler were measured at 13 to 20, logs of step times
at 3.3 to 3.7, Parquet at 1.1. gzip packs up to 1,032 into one."""
SPARE = 64 << 20
"""Bytes that any file may unpack to: short ones may say one thing over and over."""
UNPACK_HINT = "If it is what you mean: gunzip -k FILE, and import what that writes, which is read at any size"


def most_unpacked(packed: int) -> int:
    """Bytes that so many packed bytes may unpack to."""
    return packed * MOST_TIMES + SPARE


def too_much(path: Path, packed: int, hint: str = UNPACK_HINT) -> ArgusError:
    """What to raise of a file that unpacks to more."""
    most = binary_size(most_unpacked(packed))
    return ArgusError(f"{path} has {packed:,} bytes, and unpacks to more than {most}", hint, EXIT_USAGE)


def too_large(path: Path) -> ArgusError:
    """What to raise where memory does not suffice for a file."""
    return ArgusError(f"{path} needs more memory than there is", "Import a part of it, or elsewhere", EXIT_USAGE)


class Unpacked:
    """Reads what is unpacked, and refuses more of it than ``most_unpacked``."""

    def __init__(self, path: Path, stream: IO[bytes] | Any, packed: int) -> None:
        self._path, self._stream, self._packed = path, stream, packed
        self._left = most_unpacked(packed)

    def read(self, size: int = -1) -> bytes:
        """As a file's.

        Raises:
            ArgusError: It is too much.
        """
        data: bytes = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise too_much(self._path, self._packed)
        return data

    @property
    def closed(self) -> bool:
        """Whether it is."""
        return bool(self._stream.closed)

    def close(self) -> None:
        """Closes it."""
        self._stream.close()

    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    # What pyarrow asks of a file.
    def readable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is not."""
        return False

    def seekable(self) -> bool:
        """It is not."""
        return False
