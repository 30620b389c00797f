"""Kernel names that are read from the memory of a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from argus.capture.process.demangler import MAX_NAME
from argus.capture.process.names import KernelNames
from argus.model import calls, records
from tests.unit.tables.test_launches import control, unread

pytestmark = pytest.mark.core


class Process:
    """A program that holds strings, and can replace itself by another."""

    SOURCE = """
import ctypes, os, sys
kept = [ctypes.create_string_buffer(text.encode("latin1")) for text in sys.argv[1:]]
print(*map(ctypes.addressof, kept), flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", "print('new', flush=True); input()"])
"""

    def __init__(self, *texts: str) -> None:
        command = [sys.executable, "-c", self.SOURCE, *texts]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.addresses = [int(word) for word in self.process.stdout.readline().split()]

    def replace(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        assert self.process.stdout.readline() == "new\n"

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.wait()


LONG = "a" * 9000
"""Lies on three pages, or four."""


BEGUN = "_Z4gemmPfi"


def test_names_left_unread_are_read_from_the_process() -> None:
    driver = calls.Layer.DRIVER
    with Process(BEGUN, LONG, "not a name", "b" * 20000) as process:
        names = KernelNames()
        names.learn(np.concatenate([
            *(unread(process.pid, 1 + i, address) for i, address in enumerate(process.addresses)),
            unread(process.pid, 5, 8),
            unread(process.pid, 6, 1 << 63),
            unread(process.pid, 7, process.addresses[1], b"a" * (records.NAME_LEN - 1)),
            unread(process.pid, 8, process.addresses[0], b"freed_meanwhile"),
            control("cuKernelGetFunction", process.pid, 9, parent=1),
        ]))  # fmt: skip
        assert names.name(process.pid, 1, driver) == names.name(process.pid, 9, driver) == "gemm(float*, int)"
        long = names.name(process.pid, 2, driver)
        assert long == names.name(process.pid, 7, driver)
        assert long.startswith(LONG[: MAX_NAME - 100])
        assert len(long) < MAX_NAME + 100
        assert (names.cut, names.unresolved) == (0, 0)
        for handle in (3, 4, 5, 6):
            assert names.name(process.pid, handle, driver) == f"kernel@{handle:#x}"
        assert names.name(process.pid, 8, driver) == "freed_meanwhile"
        assert (names.cut, names.unresolved) == (1, 4)


@pytest.mark.parametrize("end", ["exec", "exit"])
def test_a_name_is_never_read_from_another_program(end: str) -> None:
    driver = calls.Layer.DRIVER
    with Process(BEGUN) as process:
        names = KernelNames()
        names.learn(unread(process.pid, 1, process.addresses[0]))
        names.learn(unread(process.pid, 2, process.addresses[0], b"_Z4g"))
        memory = names._memories[process.pid]
        assert not memory.gone()
        if end == "exec":
            process.replace()
        else:
            process.process.kill()
            process.process.wait()
        assert memory.gone()
        assert names.name(process.pid, 1, driver) == "kernel@0x1"
        assert names.name(process.pid, 2, driver) == "_Z4g"
        names.learn(unread(process.pid, 3, 8))
        assert names.name(process.pid, 3, driver) == "kernel@0x3"
        if end == "exec":
            assert names._memories[process.pid] is not memory
        names.forget(process.pid)


def test_a_stub_is_named_by_the_symbol_that_covers_its_address(tmp_path: Path) -> None:
    source = tmp_path / "stub.c"
    source.write_text(
        "#include <stdio.h>\n#include <unistd.h>\n"
        'static __attribute__((noinline)) void my_kernel_stub(void) { __asm__ volatile(""); }\n'
        'int main(void) { my_kernel_stub(); printf("%p\\n", (void *)my_kernel_stub); fflush(stdout); pause(); }\n'
    )
    subprocess.run(["gcc", "-o", tmp_path / "stub", source], check=True)
    process = subprocess.Popen([tmp_path / "stub"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = int(process.stdout.readline(), 16)
        names = KernelNames()
        names.remember(process.pid)
    finally:
        process.kill()
        process.wait()
    # it has ended: what it mapped was remembered
    assert names.name(process.pid, address, calls.Layer.RUNTIME) == "my_kernel_stub"
    assert names.name(os.getpid(), 8, calls.Layer.RUNTIME) == "kernel@0x8"
