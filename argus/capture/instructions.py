"""Instructions of the traced functions, as they lie in their file."""

from __future__ import annotations

import contextlib
import mmap
import os

LONGEST = 15
"""Bytes of an x86-64 instruction at most."""


class Code:
    """A file of functions. One that cannot be read has none.

    Args:
        path: By which it can be opened.
    """

    def __init__(self, path: str) -> None:
        self._bytes: mmap.mmap | bytes = b""
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._bytes = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)

    def __enter__(self) -> Code:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._bytes, mmap.mmap):
            self._bytes.close()

    def at(self, offset: int, size: int = LONGEST) -> bytes:
        """The bytes there; fewer at the file's end."""
        return self._bytes[offset : offset + size]
