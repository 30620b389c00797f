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
from pathlib import Path
from typing import Any

from argus.capture.process.mapped import Mapping, open_beside
from argus.capture.reader import progress, reader
from argus.model.groups import Membership

MAX_NAME = 256
"""Longest name of a process group that is believed: PyTorch's own are "0", "1" …, or 40 hexadecimal digits."""


@dataclass(frozen=True)
class GroupLayout:
    """Offsets in bytes, in ``c10d::ProcessGroupGloo``.

    Attributes:
        rank, size: Of int32.
        name: Of its name, a ``std::string`` of libstdc++: pointer and length.
        counter: Of its uint32 count of collectives, the same on all ranks: the tag of the next one's messages.
    """

    rank: int
    size: int
    name: int
    counter: int


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes, in ``c10::TensorImpl``.

    Attributes:
        sizes: Of the number of dimensions; the sizes follow, where they are at most five.
        numel: Of the number of elements; its type follows.
        group: Those of a process group; None: not known.
    """

    sizes: int
    numel: int
    group: GroupLayout | None = None


_GROUPS = {("x86_64", 2, 13): GroupLayout(16, 20, 32, 212)}
"""Measured: a group of known rank, size and name after a known number of collectives was looked for in its own memory
(``tests/e2e/programs/torch_layout.py``, which finds tensors' sizes of the PyTorch that runs it, too)."""
_TENSORS = {range(3): (72, 168), range(3, 13): (64, 160), range(13, 16): (56, 152)}
"""By minor versions of 2. Measured: ``tests/e2e/programs/tensor_layout.cc``, compiled for x86_64 against the headers in
PyPI's wheels of 2.0.1, 2.1.2, 2.2.2, 2.3.1, 2.4.1, 2.5.1, 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0,
2.14.1 and 2.15.0."""
LAYOUTS = {
    ("x86_64", 2, minor): Layout(sizes, numel, _GROUPS.get(("x86_64", 2, minor)))
    for minors, (sizes, numel) in _TENSORS.items()
    for minor in minors
}
"""By machine and version."""

_VERSION_LINE = re.compile(r"__version__ = ['\"](\d{1,4})\.(\d{1,4})")


MAX_VERSION_BYTES = 64 << 10
"""Of torch/version.py, which has a few hundred."""


def layout_of(pid: int, library: Mapping) -> Layout | None:
    """By the version beside PyTorch's library (torch/version.py). None: not known.

    Args:
        pid: The process.
        library: Of libtorch_cpu.
    """
    try:
        text = open_beside(pid, library, str(Path(library.path).parent.parent / "version.py")).read(
            MAX_VERSION_BYTES, 0
        )
    except OSError:
        return None
    version = _VERSION_LINE.search(text.decode(errors="replace"))
    return LAYOUTS.get((platform.machine(), int(version[1]), int(version[2]))) if version else None


def read_group(pid: int, address: int, layout: GroupLayout) -> Membership | None:
    """What a process says of one of its gloo process groups. None: it cannot be read, or makes no sense."""
    if reader.shared.on:
        return reader.read_fields("group", pid, _membership, address=address, layout=list(vars(layout).values()))
    progress.memory()
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        (rank,) = struct.unpack("<i", os.pread(memory, 4, address + layout.rank))
        (size,) = struct.unpack("<i", os.pread(memory, 4, address + layout.size))
        text, length = struct.unpack("<QQ", os.pread(memory, 16, address + layout.name))
        name = os.pread(memory, length, text) if 0 < length <= MAX_NAME else b""
        whole = 0 < len(name) == length
    except (OSError, OverflowError, struct.error):
        return None
    finally:
        os.close(memory)
    if not 0 <= rank < size or not whole or not name.isascii() or not name.decode().isprintable():
        return None
    return Membership(name.decode(), rank, size)


def _membership(name: Any, rank: Any, size: Any) -> Membership:
    return Membership(reader.text(name, MAX_NAME), *reader.integers([rank, size]))
