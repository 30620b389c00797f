"""Where PyTorch's objects keep what Argus reads from outside, by version: tensors and gloo process groups.

Nothing of this is a public interface. A version that is not listed is traced without it: collectives have no sizes, and
how the ranks' calls line up is concluded from the calls themselves.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MAX_NAME = 256
"""Longest name of a process group that is believed: PyTorch's own are "0", "1" …, or 40 hexadecimal digits."""


@dataclass(frozen=True)
class Membership:
    """A process's place in a process group: the group's name, the same on all of its ranks, and rank and size in it."""

    name: str
    rank: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes.

    Attributes:
        numel: Of the number of elements in ``c10::TensorImpl``; its type follows.
        group_rank, group_size: Of int32 in ``c10d::ProcessGroupGloo``.
        group_name: Of its name, a ``std::string`` of libstdc++: pointer and length.
        group_counter: Of its uint32 count of collectives, the same on all ranks: the tag of the next one's messages.
    """

    numel: int
    group_rank: int
    group_size: int
    group_name: int
    group_counter: int


LAYOUTS = {("x86_64", 2, 13): Layout(152, 16, 20, 32, 212)}
"""By machine and version. Measured: a tensor of known size, and a group of known rank, size and name after a known
number of collectives, were looked for in their own memory (``tests/e2e/programs/torch_layout.py``)."""

_VERSION_LINE = re.compile(r"__version__ = ['\"](\d+)\.(\d+)")


@lru_cache(maxsize=256)
def layout_of(library: str) -> Layout | None:
    """By the version beside PyTorch's library (torch/version.py). None: not known.

    Args:
        library: Path of libtorch_cpu.
    """
    try:
        text = (Path(library).parent.parent / "version.py").read_text(errors="replace")
    except OSError:
        return None
    found = _VERSION_LINE.search(text)
    return LAYOUTS.get((platform.machine(), int(found[1]), int(found[2]))) if found else None


def read_group(pid: int, address: int, layout: Layout) -> Membership | None:
    """What a process says of one of its gloo process groups. None: it cannot be read, or makes no sense."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        (rank,) = struct.unpack("<i", os.pread(memory, 4, address + layout.group_rank))
        (size,) = struct.unpack("<i", os.pread(memory, 4, address + layout.group_size))
        text, length = struct.unpack("<QQ", os.pread(memory, 16, address + layout.group_name))
        name = os.pread(memory, length, text) if 0 < length <= MAX_NAME else b""
        whole = 0 < len(name) == length
    except (OSError, OverflowError, struct.error):
        return None
    finally:
        os.close(memory)
    if not 0 <= rank < size or not whole or not name.isascii() or not name.decode().isprintable():
        return None
    return Membership(name.decode(), rank, size)
