"""Reasons for being off the CPU, and the numbers of system calls against the kernel's headers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from argus.capture import offcpu
from argus.model.records import NO_SYSCALL, WHAT_GIL_WAIT, WHAT_KERNEL, WHAT_OFF, WHAT_PREEMPTED, WHAT_UNINTERRUPTIBLE

FUTEX, READ, IOCTL, OPENAT, MUNMAP = 202, 0, 16, 257, 11


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (FUTEX, ""),
        (WHAT_KERNEL | NO_SYSCALL, ""),
        (WHAT_OFF | FUTEX, "futex"),
        (WHAT_OFF | WHAT_GIL_WAIT | FUTEX, "gil"),
        (WHAT_OFF | WHAT_PREEMPTED | NO_SYSCALL, "runqueue"),
        (WHAT_OFF | WHAT_PREEMPTED | FUTEX, "runqueue"),
        (WHAT_OFF | WHAT_UNINTERRUPTIBLE | NO_SYSCALL, "page_fault"),
        (WHAT_OFF | NO_SYSCALL, "other:none"),
        (WHAT_OFF | READ, "read"),
        (WHAT_OFF | WHAT_UNINTERRUPTIBLE | READ, "disk"),
        (WHAT_OFF | 1, "write"),
        (WHAT_OFF | IOCTL, "driver"),
        (WHAT_OFF | WHAT_UNINTERRUPTIBLE | IOCTL, "driver"),
        (WHAT_OFF | OPENAT, "other:openat"),
        (WHAT_OFF | WHAT_UNINTERRUPTIBLE | OPENAT, "disk"),
        (WHAT_OFF | WHAT_UNINTERRUPTIBLE | MUNMAP, "other:munmap"),
        (WHAT_OFF | 74, "disk"),
        (WHAT_OFF | 7, "poll"),
        (WHAT_OFF | 232, "poll"),
        (WHAT_OFF | 230, "sleep"),
        (WHAT_OFF | 45, "network"),
        (WHAT_OFF | 61, "wait_child"),
        (WHAT_OFF | 4000, "other:4000"),
    ],
)
def test_reasons_on_x86_64(what: int, expected: str) -> None:
    assert offcpu.reason(what, "x86_64") == expected


def test_another_machine_has_other_numbers() -> None:
    assert offcpu.reason(WHAT_OFF | 98, "aarch64") == "futex"
    assert offcpu.reason(WHAT_OFF | 202, "aarch64") == "network"
    assert offcpu.reason(WHAT_OFF | 29, "aarch64") == "driver"
    assert offcpu.reason(WHAT_OFF | 98, "riscv64") == "other:98"
    assert offcpu.reason(WHAT_OFF | WHAT_PREEMPTED, "riscv64") == "runqueue"


def test_many_are_named_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offcpu.platform, "machine", lambda: "x86_64")
    what = np.array([WHAT_OFF | FUTEX, WHAT_OFF, 5, WHAT_OFF | FUTEX, WHAT_OFF | WHAT_PREEMPTED], np.uint32)
    assert offcpu.reasons(what) == ["futex", "read", "", "futex", "runqueue"]
    assert offcpu.reasons(what[:0]) == []


def numbers(header: str) -> dict[str, int]:
    """System calls as the C preprocessor sees them in a header of the kernel."""
    text = f"#define __BITS_PER_LONG 64\n#define __ARCH_WANT_RENAMEAT\n#include <{header}>\n"
    options = ["-D__ARCH_WANT_STAT64", "-D__ARCH_WANT_NEW_STAT", "-D__ARCH_WANT_SYS_CLONE3"]
    done = subprocess.run(["gcc", "-E", "-dM", *options, "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the header {header} is not installed")
    defined = dict(re.findall(r"^#define (\w+) (\w+)$", done.stdout, re.MULTILINE))
    by_name = {}
    for name, value in defined.items():
        if name.startswith("__NR_"):
            while value in defined:
                value = defined[value]
            if value.isdigit():
                by_name[name.removeprefix("__NR_")] = int(value)
    return by_name


@pytest.mark.parametrize(("machine", "header"), [("x86_64", "asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")])
def test_numbers_are_the_kernel_s(machine: str, header: str) -> None:
    if machine == "x86_64" and not list(Path("/usr/include").glob("**/asm/unistd_64.h")):
        pytest.skip("the header is that of another machine")
    truth = numbers(header)
    assert len(truth) > 250
    column = offcpu.ARCHITECTURES[machine]
    checked = 0
    for row in offcpu.SYSCALLS:
        name, number = row[0], row[column]
        if number < 0:
            assert name not in truth
        elif name in truth:
            assert truth[name] == number, name
            checked += 1
        else:
            assert number > max(truth.values()), f"{name} is not in the header"
    assert checked > 80
    used = [row[column] for row in offcpu.SYSCALLS if row[column] >= 0]
    assert len(set(used)) == len(used)
