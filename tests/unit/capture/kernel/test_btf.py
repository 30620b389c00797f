"""The reader of kernel types: on types written here by hand, and on those of the running kernel."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from argus.capture.kernel import btf
from argus.capture.kernel.btf import Btf, BtfError
from tests.conftest import KERNEL_TEST

PTR, STRUCT, UNION, ENUM, TYPEDEF, INT, ARRAY, PROTO, VAR, FLOAT, TAG, ENUM64 = 2, 4, 5, 6, 8, 1, 3, 13, 14, 16, 17, 19


class Types:
    """Writes BTF."""

    def __init__(self) -> None:
        self.names = b"\0"
        self.types = b""
        self.count = 0

    def name(self, text: str) -> int:
        if not text:
            return 0
        at = self.names.find(b"\0" + text.encode() + b"\0")
        if at >= 0:
            return at + 1
        self.names += text.encode() + b"\0"
        return len(self.names) - len(text) - 1

    def add(self, kind: int, name: str = "", size: int = 0, *tail: int, members: int = 0, flag: int = 0) -> int:
        info = flag << 31 | kind << 24 | members
        self.types += struct.pack("<III", self.name(name), info, size)
        self.types += struct.pack(f"<{len(tail)}I", *tail)
        self.count += 1
        return self.count

    def struct(self, name: str, *members: tuple[str, int, int], kind: int = STRUCT, flag: int = 0) -> int:
        tail = [word for member, of, bits in members for word in (self.name(member), of, bits)]
        return self.add(kind, name, 64, *tail, members=len(members), flag=flag)

    def bytes(self) -> bytes:
        header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(self.types), len(self.types), len(self.names))
        return header + self.types + self.names


@pytest.fixture
def types() -> Types:
    t = Types()
    number = t.add(INT, "int", 4, 32)
    t.add(ARRAY, "", 0, number, number, 3)
    t.add(ENUM, "color", 4, t.name("red"), 0, t.name("green"), 1, members=2)
    t.add(ENUM64, "large", 8, t.name("huge"), 0, 1, members=1)
    t.add(VAR, "jiffies", number, 0)
    t.add(FLOAT, "double", 8)
    t.add(TAG, "tagged", number, 0xFFFFFFFF)
    t.struct("task", ("wrong", number, 8), kind=UNION)
    inner = t.struct("", ("deep", number, 64), kind=UNION)
    middle = t.struct("", ("first", number, 0), ("", inner, 32))
    t.struct("task", ("state", number, 0), ("", middle, 128), ("pid", number, 512), ("named", middle, 800))
    t.struct("bits", ("whole", number, 96), ("one", number, 3 << 24 | 99), ("two", number, 0 << 24 | 128), flag=1)
    proto = t.add(PROTO, "", 0, 0, number, 0, number, 0, number, members=3)
    t.add(TYPEDEF, "btf_trace_switch", t.add(PTR, "", proto))
    return t


@pytest.mark.parametrize(
    ("of", "member", "offset"),
    [("task", "state", 0), ("task", "pid", 64), ("task", "first", 16), ("task", "deep", 28), ("bits", "whole", 12)],
)
def test_offsets(types: Types, of: str, member: str, offset: int) -> None:
    assert Btf(types.bytes()).offset(of, member) == offset


@pytest.mark.parametrize(("of", "member"), [("task", "wrong"), ("task", "absent"), ("nothing", "pid"), ("bits", "one")])
def test_what_is_not_there_is_reported(types: Types, of: str, member: str) -> None:
    with pytest.raises(BtfError):
        Btf(types.bytes()).offset(of, member)


def test_arguments_of_a_tracepoint_are_those_after_its_own(types: Types) -> None:
    kernel = Btf(types.bytes())
    assert kernel.tracepoint_arguments("switch") == 2
    with pytest.raises(BtfError):
        kernel.tracepoint_arguments("other")


def test_damaged_types_are_refused(types: Types) -> None:
    data = types.bytes()
    for broken in (b"", data[:20], b"\0\0" + data[2:], data[:-8], data[:2] + b"\2" + data[3:]):
        with pytest.raises(BtfError):
            Btf(broken)
    types.types = types.types[:-4]
    with pytest.raises(BtfError):
        Btf(types.bytes())


def test_the_running_kernel(tmp_path: Path) -> None:
    if not btf.VMLINUX.exists():
        pytest.skip("this kernel has no BTF")
    kernel = btf.kernel()
    assert kernel is btf.kernel()
    pid = kernel.offset("task_struct", "pid")
    assert kernel.offset("task_struct", "tgid") == pid + 4
    assert 0 < kernel.offset("task_struct", "__state") < 256
    assert kernel.tracepoint_arguments("sched_switch") in (3, 4)
    assert kernel.tracepoint_arguments("sched_wakeup") == 1
    with pytest.raises(FileNotFoundError):
        btf.kernel(tmp_path / "none")
    btf.forget()
    assert btf.kernel() is not kernel, "what it kept is given back"
    assert btf.kernel().offset("task_struct", "pid") == pid


def test_a_folder_s_name_makes_no_kernel_test(request: pytest.FixtureRequest) -> None:
    """Nothing that is skipped here fails CI, as a skipped kernel test does."""
    assert KERNEL_TEST not in request.node.keywords


def test_the_same_as_bpftool(tmp_path: Path) -> None:
    """Another reader of the same format, where there is one."""
    try:
        dump = subprocess.run(
            ["bpftool", "btf", "dump", "file", btf.VMLINUX], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no bpftool here, or no BTF")
    body = dump.split("STRUCT 'task_struct'", 1)[1].split("\n[", 1)[0]
    for member in ("pid", "tgid", "__state"):
        line = next(line for line in body.splitlines() if f"'{member}'" in line)
        assert btf.kernel().offset("task_struct", member) * 8 == int(line.split("bits_offset=")[1].split()[0])
