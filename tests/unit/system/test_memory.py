"""What is given back of a process's memory, and what is not."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from argus.system import memory

LIB = b"/usr/lib/lib a.so"
HOSTILE = b"/memfd:x\r70000000-71000000 r-xp 0 08:01 9 /usr/lib/y\rAnonymous: 0 kB\rSwap: 0 kB\rVmFlags: rd\xff"


def mapping(at: int, rights: bytes, path: bytes, anonymous: int = 0, swap: int = 0) -> bytes:
    """As in /proc/PID/smaps, of one page."""
    return b"\n".join(
        [
            b"%x-%x %s 00000000 08:01 77                         %s" % (at << 12, (at + 1) << 12, rights, path),
            b"Rss:                   4 kB",
            b"Anonymous:             %d kB" % anonymous,
            b"Swap:                  %d kB" % swap,
            b"VmFlags: rd mr mw me sd",
            b"",
        ]
    )


@pytest.mark.parametrize(
    ("other", "given_back"),
    [
        (mapping(3, b"r--p", LIB), True),
        (mapping(3, b"r--p", LIB, anonymous=4), False),
        (mapping(3, b"r--p", LIB, swap=4), False),
        (mapping(3, b"r-xp", LIB, anonymous=4), False),
        (mapping(3, b"rw-p", LIB), False),
        (mapping(3, b"r--s", LIB), False),
        (mapping(3, b"r--p", b"/data/no library"), False),
        (mapping(3, b"r-xp", b""), False),
        (mapping(3, b"r-xp", b"[vdso]"), False),
        (mapping(3, b"r-xp", b"/memfd:argus-prices (deleted)"), False),
        (mapping(3, b"rw-s", HOSTILE), False),
        (mapping(3, b"r--p", LIB).replace(b"VmFlags: rd mr mw me sd\n", b""), False),
    ],
)
def test_only_what_a_file_gives_back_is_let_go(other: bytes, given_back: bool) -> None:
    found = memory._unchanged(mapping(1, b"r-xp", LIB) + other + mapping(5, b"rw-p", b"[heap]"))
    assert [(start >> 12, size) for start, size, _ in found] == [(1, 4096), (3, 4096)][: 1 + given_back]


def test_what_has_just_come_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is being loaded is all code for a moment, before its data is put there."""
    let_go: list[int] = []
    fake = SimpleNamespace(madvise=lambda start, size, advice: let_go.append(start.value))
    monkeypatch.setattr(memory, "libc", lambda: fake)
    monkeypatch.setattr(memory, "_seen", frozenset())
    for looks in (1, 2, 3):
        there = mapping(1, b"r-xp", LIB) + (mapping(9, b"r-xp", b"/usr/lib/new.so") if looks == 2 else b"")
        monkeypatch.setattr(memory.Path, "read_bytes", lambda path, there=there: there)
        memory.unmap_unused()
    assert let_go == [0x1000, 0x1000]


def test_libraries_that_are_let_go_work_on() -> None:
    """Beside a thread that uses them all the time."""
    code = """
import re, threading
from pathlib import Path
import numpy as np
from scipy import special
from argus.system import memory

def of_files():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\\s+(\\d+)", text)[1])

matrix = np.arange(40_000.0).reshape(200, 200) % 7 + np.eye(200)
expected = special.gammaln(np.abs(np.linalg.inv(matrix)) + 1).sum()
before = of_files()
ends = threading.Event()
wrong = []
def use():
    while not ends.is_set():
        if special.gammaln(np.abs(np.linalg.inv(matrix)) + 1).sum() != expected:
            wrong.append(1)
thread = threading.Thread(target=use)
thread.start()
for _ in range(200):
    memory.unmap_unused()
ends.set()
thread.join()
memory.unmap_unused()
memory.unmap_unused()
print(len(wrong), of_files() < before / 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr
