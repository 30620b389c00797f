"""What is beyond the bounds on a process's mappings and files is counted for that process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from argus.capture.process import elf, targets
from argus.capture.process.mapped import Allowance
from argus.capture.process.symbols import Symbols
from argus.capture.reader import left_out, reader
from tests.security.mapping_process import folder_of_nobody, mapping

pytestmark = pytest.mark.kernel
PROGRAM = Path(os.path.realpath("/usr/bin/python3"))


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    left_out.take()
    yield
    left_out.take()


@contextlib.contextmanager
def mapped_library() -> Iterator[tuple[int, Path]]:
    """A process that maps a copy of a library, and the copy."""
    with folder_of_nobody() as folder:
        path = folder / "libown.so"
        path.write_bytes(PROGRAM.read_bytes())
        with mapping([path]) as pid:
            yield pid, path


def test_a_list_of_mappings_that_is_cut_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 200)
    with mapped_library() as (pid, _):
        for _ in range(2):
            assert len(reader.maps(pid, executable=True)) <= 200
        assert left_out.take() == [("mappings_cut", pid, 1)]


def test_a_list_of_mappings_that_is_whole_is_not_counted() -> None:
    with mapped_library() as (pid, _):
        reader.maps(pid)
        targets.find_libraries(pid, Allowance(10_000, 0))
        assert left_out.take() == []


def test_a_file_that_is_refused_is_counted_for_each_that_maps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each process, whoever reads it: for functions and for names. Also if it is remembered."""
    with folder_of_nobody() as folder:
        path = folder / "libown.so"
        image = bytearray(PROGRAM.read_bytes())
        sections = int.from_bytes(image[40:48], "little")
        for number in range(int.from_bytes(image[60:62], "little")):
            at = sections + 64 * number + 32
            image[at : at + 8] = (1 << 40).to_bytes(8, "little")  # each section claims a terabyte
        path.write_bytes(image)
        with mapping([path]) as one, mapping([path]) as other:
            for pid in (one, other):
                targets.find_libraries(pid, Allowance(10_000, 0))
                targets.find_libraries(pid, Allowance(10_000, 0))
                symbols = Symbols(pid)
                region = next(each for each in symbols._by_start if each.path == str(path))
                symbols.name(np.array([region.start + 64], np.uint64))
                symbols.close()
                assert left_out.take() == [("files_refused", pid, 1)]


def test_a_table_that_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed table of symbols that unpacks to more than any library's."""

    def beyond(data: bytes) -> bytes:
        raise elf.Beyond("larger than that of any library")

    section = elf._Headers.section
    monkeypatch.setattr(elf, "_decompressed", beyond)
    monkeypatch.setattr(elf, "_has_local", lambda headers: False)
    monkeypatch.setattr(
        elf._Headers, "section", lambda self, name: b"xz" if name == b".gnu_debugdata" else section(self, name)
    )
    with mapped_library() as (pid, path):
        symbols = Symbols(pid)
        region = next(each for each in symbols._by_start if each.path == str(path))
        symbols.name(np.array([region.start + 64], np.uint64))
        symbols.close()
        assert left_out.take() == [("files_refused", pid, 1)]


def test_what_is_no_elf_file_is_not_counted() -> None:
    with folder_of_nobody() as folder:
        path = folder / "data"
        path.write_bytes(b"data" * 4096)
        with mapping([path]) as pid:
            targets.find_libraries(pid, Allowance(10_000, 0))
            assert left_out.take() == []
