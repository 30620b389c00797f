"""Objects of NCCL and PyTorch in a process's memory, the code of NCCL's getters, and PyTorch's version file."""

from __future__ import annotations

import ctypes
import os
import struct
from unittest import mock

from argus.capture.process import nccl, pytorch
from argus.capture.process.mapped import Mapping
from tests.fuzz.harness import Bytes, joined, memory_file

ALLOWED = ()
CODE = ["argus.capture.process.nccl", "argus.capture.process.pytorch"]
LAYOUT = next(group for group in pytorch._GROUPS.values())
ROOM = 4096


def seeds() -> list[bytes]:
    getter = b"\xf3\x0f\x1e\xfa\x8b\x87\x20\x00\x00\x00\x8b\x47\x24\xc3\x8b\x84\x24\x28\x00\x00\x00"
    communicator = struct.pack("<Qii", 0x1234, 1, 4)
    group = bytearray(256)
    struct.pack_into("<ii", group, LAYOUT.rank, 1, 4)
    struct.pack_into("<QQ", group, LAYOUT.name, 0, 1)
    return [
        joined(getter, getter[3:], getter[7:], communicator, version, bytes(group))
        for version in (b"__version__ = '2.13.0'\n", b'from typing import *\n__version__ = "2.0.1+cpu"\n')
    ]


def run(data: bytes) -> None:
    *getters, communicator, version, group = Bytes(data).pieces(6)
    loads = [nccl.loads_in(code[: nccl.MAX_CODE]) for code in getters]
    offset = nccl.common_offset(*loads)
    assert offset is None or offset >= 8
    memory = ctypes.create_string_buffer(ROOM)
    memory[: min(len(communicator), ROOM)] = communicator[:ROOM]
    place = nccl.read_place(os.getpid(), ctypes.addressof(memory), 8)
    assert place is None or (place.key and 0 <= place.rank < place.size <= nccl.MAX_RANKS)
    nccl.read_place(os.getpid(), int.from_bytes(communicator[:8], "little"), offset or 8)
    memory[: min(len(group), ROOM)] = group[:ROOM]
    if struct.unpack_from("<Q", memory, LAYOUT.name)[0] == 0:  # a name in the group itself
        struct.pack_into("<Q", memory, LAYOUT.name, ctypes.addressof(memory) + LAYOUT.name + 8)
    member = pytorch.read_group(os.getpid(), ctypes.addressof(memory), LAYOUT)
    assert member is None or (member.name.isprintable() and len(member.name) <= pytorch.MAX_NAME)
    assert member is None or 0 <= member.rank < member.size
    with mock.patch.object(pytorch, "open_beside", return_value=memory_file(version)):
        library = Mapping(0, 0, 0, "08:01", 7, "/torch/lib/libtorch_cpu.so", deleted=False)
        pytorch.layout_of(os.getpid(), library)
