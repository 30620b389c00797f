"""What is remembered of the code that a process has mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.capture.process.symbols import Symbols

_LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def own() -> Iterator[Symbols]:
    symbols = Symbols(os.getpid())
    yield symbols
    symbols.close()


def _protect(memory: mmap.mmap, rights: int) -> None:
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _LIBC.mprotect(ctypes.c_void_p(at), len(memory), rights) == 0, os.strerror(ctypes.get_errno())


def test_code_stays_where_only_its_rights_change(own: Symbols) -> None:
    """A JIT compiler's, which may be written to for a moment."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    own.refresh()
    _protect(memory, mmap.PROT_READ | mmap.PROT_WRITE)
    assert own.refresh(), "it is no code any more"
    _protect(memory, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    own.refresh()
    writable = {id(region) for region in own._by_start}
    before = len(own._by_start)
    _protect(memory, mmap.PROT_READ | mmap.PROT_EXEC)
    assert not own.refresh()
    assert (len(own._by_start), {id(region) for region in own._by_start}) == (before, writable)


def test_a_region_says_what_the_line_of_maps_does(own: Symbols, tmp_path: Path) -> None:
    path = tmp_path / "a  b\r(deleted)"
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC, offset=mmap.PAGESIZE)
    inode = path.stat().st_ino
    own.refresh()
    (region,) = (one for one in own._by_start if one.path == str(path))
    assert region.mapping is not None
    assert (region.mapping.inode, region.mapping.path, region.mapping.deleted) == (inode, str(path), False)
    assert (region.end - region.start, region.offset) == (mmap.PAGESIZE, mmap.PAGESIZE)
    path.unlink()
    own.refresh()
    (region,) = (one for one in own._by_start if one.path == str(path))
    assert region.mapping is not None
    assert (region.mapping.deleted, region.mapping.path) == (True, str(path))
    memory.close()
    vdso = next(one for one in own._by_start if one.path == "[vdso]")
    assert vdso.mapping is None
