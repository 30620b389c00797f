"""System calls that no library wraps. Imports no numpy: the process that compiles needs them, too."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from typing import Any

SYS_BPF = {"x86_64": 321, "aarch64": 280}
SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}


def system_call(numbers: dict[str, int], *arguments: Any) -> int:
    """Makes a system call.

    Args:
        numbers: Its number by ``platform.machine()``.

    Raises:
        OSError: It failed.
    """
    result = int(libc().syscall(numbers[platform.machine()], *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def bpf(command: int, attributes: bytes) -> int:
    """bpf(2) with the bytes of a ``union bpf_attr``."""
    request = ctypes.create_string_buffer(attributes, len(attributes))
    return system_call(SYS_BPF, command, ctypes.byref(request), len(attributes))


@cache
def libc() -> ctypes.CDLL:
    """The C library, loaded once: each CDLL brings a Python class of its own."""
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library
