"""Who is in an NCCL communicator, asked in the process's own memory.

A communicator that was made before Argus came is a pointer, and equal calls do not distinguish parallel ones. Its
object does: NCCL keeps there a hash of the unique id (of a split, of the parent's hash and the colour), which is the
same on all ranks, and rank, number of ranks and device, one after the other (``commHash``, ``rank``, ``nRanks`` and
``cudaDev`` of ``struct ncclComm``, src/include/comm.h). Where in the object is another matter in each version; but the
functions that NCCL exports to ask for rank, size and device load just these fields, so their code shows where they are.
"""

from __future__ import annotations

import os
import platform
import struct
import weakref
from typing import Any

from argus.capture.process.elf import Elf, NotElf
from argus.capture.process.mapped import File, Lasting, Reference, lasting
from argus.capture.reader import progress, reader
from argus.model.groups import Place

GETTERS = ("ncclCommUserRank", "ncclCommCount", "ncclCommCuDevice")
"""What returns rank, number of ranks and device: int32 one after the other."""
_HASH_BYTES = 8
"""The hash lies before them."""
MAX_CODE = 8192
"""A getter's code is some 700 bytes, with checks and logging."""
MAX_RANKS = 1 << 22
_LOAD = 0x8B
_WIDE = frozenset((0x48, 0x49, 0x4C, 0x4D))


_MOST_LIBRARIES = 256
_offsets: dict[Lasting, int | None] = {}
_received: weakref.WeakKeyDictionary[Reference, int | None] = weakref.WeakKeyDictionary()
"""What the reader process found in the code of files that are in use."""


def rank_offset(library: Reference, owner: str = "") -> int | None:
    """Offset in bytes of the rank in a communicator. None: not in the code of this library, or no x86_64.

    Args:
        library: The file. Each is read once; one that this process cannot read was (``remember``).
        owner: ``mapped.owner_text``, where it is read.
    """
    if not isinstance(library, File):
        return _received.get(library)
    key = lasting(library.key, owner)
    if key not in _offsets:
        if len(_offsets) >= _MOST_LIBRARIES:
            _offsets.clear()
        _offsets[key] = _read_offset(library)
    return _offsets[key]


def remember(library: Reference, offset: int | None) -> None:
    """Takes over what a reader process found (``rank_offset``)."""
    _received[library] = offset


def _read_offset(library: File) -> int | None:
    if platform.machine() != "x86_64":
        return None
    try:
        elf = Elf(library, dynamic_only=True)
        getters = elf.symbols(GETTERS)
        loads = []
        for name in GETTERS:
            offset = elf.file_offset(getters[name].address)
            if offset is None:
                return None
            loads.append(loads_in(library.read(min(getters[name].size, MAX_CODE), offset)))
    except (OSError, NotElf, KeyError):
        return None
    return common_offset(*loads)


def loads_in(code: bytes) -> set[int]:
    """Displacements, in bytes, of the loads of 32 bits in x86_64 code. What only looks like one may be among them."""
    offsets = set()
    for at in range(len(code) - 2):
        # mov r32, [register + displacement]; with REX.W it loads 64 bits.
        if code[at] != _LOAD or (at and code[at - 1] in _WIDE):
            continue
        mode, base = code[at + 1] >> 6, code[at + 1] & 7
        place = at + 2 + (base == 4)
        if mode == 2 and place + 4 <= len(code):
            offsets.add(struct.unpack_from("<i", code, place)[0])
        elif mode == 1 and place < len(code):
            offsets.add(struct.unpack_from("<b", code, place)[0])
    return {offset for offset in offsets if offset >= _HASH_BYTES}


def common_offset(of_rank: set[int], of_size: set[int], of_device: set[int]) -> int | None:
    """The offset at which rank, size and device follow one another, as the loads of the three getters have it. None:
    there is none, or several."""
    offsets = [offset for offset in of_rank if offset + 4 in of_size and offset + 8 in of_device]
    return offsets[0] if len(offsets) == 1 else None


def read_place(pid: int, address: int, offset: int) -> Place | None:
    """What a process says of one of its communicators. None: it cannot be read, or makes no sense.

    Args:
        pid: The process.
        address: The communicator's handle.
        offset: Of the rank in it (:func:`rank_offset`).
    """
    if reader.shared.on:
        return reader.read_fields("place", pid, _place, address=address, offset=offset)
    progress.memory()
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        key, rank, size = struct.unpack("<Qii", os.pread(memory, 16, address + offset - _HASH_BYTES))
    except (OSError, OverflowError, struct.error):
        return None
    finally:
        os.close(memory)
    return Place(key, rank, size) if key and 0 <= rank < size <= MAX_RANKS else None


def _place(key: Any, rank: Any, size: Any) -> Place:
    return Place(*reader.integers([key, rank, size]))
