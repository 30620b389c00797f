"""What is read of a process group's own memory, against this process's, and layouts by version."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

import pytest

from argus.capture.process.mapped import Mapping, device_of
from argus.capture.process.pytorch import LAYOUTS, MAX_NAME, GroupLayout, layout_of, read_group
from argus.model.groups import Membership

LAYOUT = GroupLayout(rank=16, size=20, name=32, counter=212)


class Group:
    """A process group's object, as far as it is looked at, in this process.

    Args:
        name: Its name.
        rank, size: Its place.
        text: Where the memory says that the name lies, if not where it does.
        length: How long the memory says that it is, if not as it is.
    """

    def __init__(self, name: bytes, rank: int, size: int, *, text: int | None = None, length: int | None = None):
        self.name = ctypes.create_string_buffer(name)
        where = ctypes.addressof(self.name) if text is None else text
        content = bytearray(b"\xa5" * 256)
        struct.pack_into("<ii", content, LAYOUT.rank, rank, size)
        struct.pack_into("<QQ", content, LAYOUT.name, where, len(name) if length is None else length)
        self.content = ctypes.create_string_buffer(bytes(content), len(content))
        self.address = ctypes.addressof(self.content)

    def read(self, pid: int | None = None) -> Membership | None:
        return read_group(os.getpid() if pid is None else pid, self.address, LAYOUT)


@pytest.mark.parametrize("name", [b"0", b"default_pg", b"5f2b" * 10, b"x" * MAX_NAME])
def test_a_group_s_name_and_place_are_read(name: bytes) -> None:
    assert Group(name, 2, 4).read() == Membership(name.decode(), 2, 4)
    assert Group(name, 0, 1).read() == Membership(name.decode(), 0, 1)


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (-1, 4), (0, 0), (0, -2), (3, 1)])
def test_a_place_that_cannot_be_is_not_believed(rank: int, size: int) -> None:
    assert Group(b"0", rank, size).read() is None


@pytest.mark.parametrize("name", [b"", b"x" * (MAX_NAME + 1), b"a\nb", b"a\0b", b"\xff\xfe", "ä".encode(), b"\x7f"])
def test_a_name_that_is_none_is_not_believed(name: bytes) -> None:
    assert Group(name, 0, 2, length=len(name)).read() is None


@pytest.mark.parametrize("text", [0, 8, (1 << 63) - 8, (1 << 63) + 5, (1 << 64) - 1])
def test_a_name_that_is_nowhere_cannot_be_read(text: int) -> None:
    assert Group(b"0", 0, 2, text=text).read() is None


def test_a_length_out_of_all_proportion_is_not_read() -> None:
    assert Group(b"0", 0, 2, length=(1 << 64) - 1).read() is None


@pytest.mark.parametrize("address", [0, 4096, (1 << 63) - 16, (1 << 64) - 64])
def test_an_object_that_is_nowhere_cannot_be_read(address: int) -> None:
    assert read_group(os.getpid(), address, LAYOUT) is None


def test_nothing_is_read_of_a_process_that_is_not_there() -> None:
    group = Group(b"0", 0, 2)
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    assert group.read(nobody) is None
    assert group.read() is not None


def test_reading_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for group in (Group(b"0", 0, 2), Group(b"0", 0, 2, text=0)):
        for _ in range(3):
            group.read()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- versions


def installed(folder: Path, version: str | None) -> Mapping:
    """The library of a PyTorch with this torch/version.py, as it is mapped."""
    library = folder / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    if version is not None:
        (folder / "torch" / "version.py").write_text(version)
    return mapping_of(library)


def mapping_of(file: Path) -> Mapping:
    status = file.stat()
    return Mapping(0, 0, 0, device_of(status.st_dev), status.st_ino, str(file), deleted=False)


@pytest.mark.parametrize(
    "text",
    [
        "from typing import Optional\n\n__all__ = ['__version__']\n__version__ = '2.13.0+cpu'\ndebug = False\n",
        '__version__ = "2.13.1"\n',
    ],
)
def test_a_known_version_has_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    layout = layout_of(os.getpid(), installed(tmp_path, text))
    assert layout is LAYOUTS["x86_64", 2, 13]
    assert layout.group == LAYOUT


@pytest.mark.parametrize(("version", "places"), [("2.0.1", (72, 168)), ("2.12.0", (64, 160)), ("2.14.1", (56, 152))])
def test_of_others_tensors_are_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, places: tuple[int, int]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    layout = layout_of(os.getpid(), installed(tmp_path, f"__version__ = '{version}'\n"))
    assert layout is not None
    assert ((layout.sizes, layout.numel), layout.group) == (places, None)


@pytest.mark.parametrize("text", ["__version__ = '1.13.0'\n", "__version__ = '3.13.0'\n", "nothing", "", None])
def test_an_unknown_version_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert layout_of(os.getpid(), installed(tmp_path, text)) is None


def test_another_machine_has_its_own_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert layout_of(os.getpid(), installed(tmp_path, "__version__ = '2.13.0'\n")) is None


def test_a_file_of_bytes_is_no_version(tmp_path: Path) -> None:
    library = installed(tmp_path, "")
    (tmp_path / "torch" / "version.py").write_bytes(b"\xff\xfe__version__")
    assert layout_of(os.getpid(), library) is None
