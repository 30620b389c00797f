"""Where an NCCL library keeps a communicator's rank, and what is read there."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from argus.capture.nccl import Place, common_offset, loads_in, rank_offset, read_place

LIBRARY = """
struct ncclComm {{ char before[{before}]; unsigned long hash; int rank, size, device; }};
__attribute__((noinline)) int check(const void *p) {{ __asm__ volatile("" ::: "memory"); return p ? 0 : 4; }}
#define GETTER(name, field) int name(struct ncclComm *comm, int *to) \\
    {{ if (check(comm) || check(to)) return 4; *to = comm->field; return 0; }}
GETTER(ncclCommUserRank, rank)
GETTER(ncclCommCount, {size})
GETTER(ncclCommCuDevice, device)
"""


def build(folder: Path, before: int, flags: str = "-O2", size: str = "size") -> tuple[str, tuple[int, int]]:
    source, library = folder / "nccl.c", folder / "libnccl.so"
    source.write_text(LIBRARY.format(before=before, size=size))
    subprocess.run(["cc", flags, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    stat = library.stat()
    return str(library), (stat.st_size, stat.st_ctime_ns)


@pytest.mark.parametrize("before", [24, 1_181_400])
@pytest.mark.parametrize("flags", ["-O0", "-O2"])
def test_the_getters_tell_where_the_rank_is(tmp_path: Path, before: int, flags: str) -> None:
    library, stamp = build(tmp_path, before, flags)
    offset = rank_offset(library, stamp)
    assert offset == before + 8

    block = ctypes.create_string_buffer(before + 64)
    block[before : before + 20] = (0xF00D).to_bytes(8, "little") + b"\3\0\0\0\x08\0\0\0\0\0\0\0"
    assert read_place(os.getpid(), ctypes.addressof(block), offset) == Place(0xF00D, 3, 8)
    block[before + 8] = 8
    assert read_place(os.getpid(), ctypes.addressof(block), offset) is None, "no rank of its size"
    assert read_place(os.getpid(), 16, offset) is None
    assert read_place(2**22 + 1, ctypes.addressof(block), offset) is None


def test_a_library_that_is_laid_out_otherwise_tells_nothing(tmp_path: Path) -> None:
    assert rank_offset(*build(tmp_path, 64, size="hash")) is None
    assert rank_offset(str(tmp_path / "none.so"), (0, 0)) is None
    assert rank_offset(__file__, (0, 0)) is None


def test_what_could_be_meant_twice_is_not_guessed() -> None:
    assert common_offset({100, 200}, {104, 300}, {108}) == 100
    assert common_offset({100, 200}, {104, 204}, {108, 208}) is None
    assert common_offset({100}, {104}, {300}) is None
    assert common_offset({100}, {108}, {116}) is None


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("418b85ec061200", {0x1206EC}),  # mov eax, [r13 + 0x1206ec]
        ("8b4710c3", {16}),  # mov eax, [rdi + 16]
        ("8b442418c3", {24}),  # mov eax, [rsp + 24]
        ("488b8708000000c3", set()),  # mov rax, [rdi + 8]
        ("8b07c3", set()),  # mov eax, [rdi]
        ("8b4704c3", set()),  # mov eax, [rdi + 4]: no room for a hash
        ("8b85", set()),
    ],
)
def test_loads(code: str, found: set[int]) -> None:
    assert loads_in(bytes.fromhex(code)) == found
