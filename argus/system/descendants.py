"""Processes that children leave behind: they become this process's, and are killed with what started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_SUBREAPER = 36  # include/uapi/linux/prctl.h
_ROUNDS = 20
"""Whoever is killed leaves its own children behind."""
_REAP_S = 0.02


def adopt(on: bool) -> None:
    """Whether orphans of children, in whatever session, become children of this process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0)


def children() -> set[int]:
    """The children of all threads of this process; empty where the kernel does not list them."""
    found: set[int] = set()
    for place in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in place.read_text().split()}
    return found


def kill_left(strangers: Collection[int]) -> None:
    """Kills the children that are none of ``strangers``, until nothing is left or it cannot be killed."""
    for _ in range(_ROUNDS):
        left = children() - set(strangers)
        if not left:
            return
        for pid in left:
            kill(pid)
            wait(pid, _REAP_S)


def send(pid: int, number: int) -> None:
    """Sends a process a signal, if it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill(pid: int) -> None:
    """Kills a process and its group, if they are there."""
    for deliver in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            deliver(pid, signal.SIGKILL)


def wait(pid: int, timeout_s: float) -> int | None:
    """The status of a child that ends in time (0: somebody else waited for it); None: it does not."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)
