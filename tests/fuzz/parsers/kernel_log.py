"""The kernel log, as its checks read it: who writes to /dev/kmsg, and programs whose names the kernel puts there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from argus.health.check import MAX_TEXT, Absent, Blind, Look, clean
from argus.health.checks import kernel_log, xid
from tests.fuzz.harness import memory_file

ALLOWED = (Blind,)
CODE = ["argus.health.checks._kmsg", "argus.health.checks.kernel_log", "argus.health.checks.xid", "argus.health.check"]
TOKENS = [b"\n", b"6,1,1,-;", b",", b";", b" SUBSYSTEM=pci\n", b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, ",
          b"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 3", b"\\x1b", b"\\x", b"\\ud800", b"\\N{",
          b"EXT4-fs error (device sda1): ", b"INFO: task a:1 blocked for more than 120 seconds", b"\xc2\xb2", b"\xff",
          b"pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error ", b"python[7]: "]  # fmt: skip
_LIMITS = {"hours": 1e6, "ignore": ["13"]}


def seeds() -> list[bytes]:
    return [
        b"6,1,100,-;Linux version 6.1\n4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, fallen off the bus\n",
        b"3,3,300,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 3\n SUBSYSTEM=pci\n",
        b"4,4,400,c;EXT4-fs error (device sda1): ext4_find_entry: reading directory\\x0a#2\n"
        b"4,5,500,-;INFO: task python:77 blocked for more than 120 seconds\n"
        b"12,6,600,-;a program's line\n6,7,700,-;python[12]: segfault at 0 ip 0 sp 0 error 4 in \\x1b[31m\n",
    ]


def run(data: bytes) -> None:
    file = memory_file(data)
    told: list[str] = []
    look = Look(_LIMITS, kmsg=Path(f"/proc/{os.getpid()}/fd/{file.fd}"), report=lambda *words: told.extend(words))
    for check in (xid, kernel_log):
        with contextlib.suppress(Absent):  # a node without GPUs
            result = check.check(look)
            told += [result.text, result.hint]
            assert all(0 <= figure < 1 << 32 for figure in result.figures.values())
    for text in told:
        line = clean(text)  # as it is reported
        assert line.isprintable()
        assert len(line) <= MAX_TEXT
