"""Where an NCCL library keeps a communicator's rank, and what is read there."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from argus.capture.process.mapped import File, Reference, open_file
from argus.capture.process.nccl import common_offset, loads_in, rank_offset, read_place, remember
from argus.capture.process.targets import Library
from argus.live.job import Job, Member
from argus.model.calls import BY_SYMBOL
from argus.model.groups import Place
from argus.model.records import CONTROL
from tests.builders.sessions import a_session

LIBRARY = """
struct ncclComm {{ char before[{before}]; unsigned long hash; int rank, size, device; }};
__attribute__((noinline)) int check(const void *p) {{ __asm__ volatile("" ::: "memory"); return p ? 0 : 4; }}
#define GETTER(name, field) int name(struct ncclComm *comm, int *to) \\
    {{ if (check(comm) || check(to)) return 4; *to = comm->field; return 0; }}
GETTER(ncclCommUserRank, rank)
GETTER(ncclCommCount, {size})
GETTER(ncclCommCuDevice, device)
"""


def build(folder: Path, before: int, flags: str = "-O2", size: str = "size") -> File:
    source, library = folder / "nccl.c", folder / "libnccl.so"
    source.write_text(LIBRARY.format(before=before, size=size))
    subprocess.run(["cc", flags, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return open_file(library)


@pytest.mark.parametrize("before", [24, 1_181_400])
@pytest.mark.parametrize("flags", ["-O0", "-O2"])
def test_the_rank_s_offset_is_inferred_from_the_getters(tmp_path: Path, before: int, flags: str) -> None:
    offset = rank_offset(build(tmp_path, before, flags))
    assert offset == before + 8

    block = ctypes.create_string_buffer(before + 64)
    block[before : before + 20] = (0xF00D).to_bytes(8, "little") + b"\3\0\0\0\x08\0\0\0\0\0\0\0"
    assert read_place(os.getpid(), ctypes.addressof(block), offset) == Place(0xF00D, 3, 8)
    block[before + 8] = 8
    assert read_place(os.getpid(), ctypes.addressof(block), offset) is None, "no rank of its size"
    assert read_place(os.getpid(), 16, offset) is None
    assert read_place(2**22 + 1, ctypes.addressof(block), offset) is None


def test_what_a_reader_found_is_kept_as_long_as_its_file(tmp_path: Path) -> None:
    """This process cannot read it again. After 256 libraries all was forgotten."""
    library = build(tmp_path, 64)
    held = [Reference(library.place(), library.status, False) for _ in range(300)]
    for number, one in enumerate(held):
        remember(one, number)
    assert [rank_offset(one) for one in held] == list(range(300))
    assert rank_offset(Reference(library.place(), library.status, False)) is None, "of it nothing was found"


def test_nothing_is_read_of_a_library_that_is_laid_out_otherwise(tmp_path: Path) -> None:
    assert rank_offset(build(tmp_path, 64, size="hash")) is None
    assert rank_offset(open_file(__file__)) is None


def test_what_could_be_meant_twice_is_not_guessed() -> None:
    assert common_offset({100, 200}, {104, 300}, {108}) == 100
    assert common_offset({100, 200}, {104, 204}, {108, 208}) is None
    assert common_offset({100}, {104}, {300}) is None
    assert common_offset({100}, {108}, {116}) is None


@pytest.mark.parametrize(
    (("code", "offsets")),
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
def test_loads(code: str, offsets: set[int]) -> None:
    assert loads_in(bytes.fromhex(code)) == offsets


@pytest.mark.parametrize("made", ["ncclCommInitRank", "ncclCommSplit"])
def test_a_communicator_at_the_address_of_another_is_asked_anew(tmp_path: Path, made: str) -> None:
    """Only of the one that was made, and on its rank: asking costs a read of the process's memory."""
    file = build(tmp_path, 24)
    library = Library("libnccl.so", file, "", 0, False, {}, ("libnccl",))
    target = SimpleNamespace(pid=os.getpid(), libraries=[library])
    members = [Member(target, rank, "test") for rank in range(2)]  # type: ignore[arg-type]
    blocks = [ctypes.create_string_buffer(64) for _ in range(2)]
    handles = [ctypes.addressof(block) for block in blocks]
    job = Job("job", 1)

    def keys(key: int, *call: str) -> list[int]:
        """The keys known of each communicator on each rank, once memory has this one and this call was made."""
        for block in blocks:
            block[24:44] = key.to_bytes(8, "little") + b"\3\0\0\0\x08\0\0\0\0\0\0\0"
        event = np.zeros(len(call), CONTROL)
        event["call"], event["handle"] = [BY_SYMBOL[name].id for name in call], handles[0]
        job.keep_control(0, event)
        for member in members:
            job.ask_communicators(member, handles, a_session())
        return [place.key for rank in range(2) for place in job.places[rank].values() if place is not None]

    assert keys(7) == [7, 7, 7, 7]
    assert keys(8) == [7, 7, 7, 7]
    assert keys(9, "ncclCommDestroy") == [7, 7, 7, 7]
    assert sorted(keys(10, made)) == [7, 7, 7, 10]
    assert sorted(keys(11)) == [7, 7, 7, 10]
    assert job.places[0][handles[0]] == Place(10, 3, 8)
