"""What an injection does to the process: stops its main thread (``interrupt``), has it make a file in memory, fills and
seals that with the helper, and has the thread load it.

The process may keep who does this waiting, for ever and beyond a SIGKILL: its other threads run on while its main
thread is stopped. So ``inject_child`` does it in a process of its own. Imports little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from argus.cupti import interrupt
from argus.cupti.interrupt import Code
from argus.system.proc import stat_of

REST_TIMEOUT_S = 10.0
"""How long to look for a moment in which the main thread can be made to load a library."""
REST_INTERVALS_S = (0.001, 0.01)
"""Time between two looks, at random: a program with a period of its own would else be found at the same place again and
again. One that is nearly always in the allocator was at rest in 2 looks of 100 beside two busy loops, in 5 at rest."""
FILL_S = 2.0
"""Longest wait for the file in memory to be filled."""
MEMORY_FILE = b"argus-inject"
"""What the file in memory is called."""
_LOADED_AS = b"/proc/self" + b"/" * 24 + b"fd/%d"
"""What the thread loads. So many slashes that no other name is the same to the loader, and that the helper has room to
write its own there (helper/inject.c)."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_FILL = f"""
import errno, fcntl, os, socket, sys
sock, content = socket.socket(fileno=0), b""
while len(content) < int(sys.argv[1]) and (part := sock.recv(int(sys.argv[1]) - len(content))):
    content += part
failure = errno.EINVAL
try:
    file = socket.recv_fds(sock, 1, 1)[1][0]
    # EINVAL: it is no file in memory. A tmpfs's has its seals sealed; one of memfd_create that is new has not.
    sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    if not sealed and not os.fstat(file).st_size and os.pwrite(file, content, 0) == len(content):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, {_SEALS})
        failure = 0
except OSError as reason:
    failure = reason.errno or failure
sock.send(failure.to_bytes(4, "little"))
"""


left_behind: list[subprocess.Popen[bytes]] = []
"""Who filled a file in memory, and could not be ended."""


class Request(NamedTuple):
    """What is to be done.

    Attributes:
        pid, start_ticks: The process, and when it started (field 22 of /proc/PID/stat).
        program: As ``program_of``, when the process was looked at.
        dlopen, syscall, way_back: Where it has these functions, and the C library's return from a signal handler.
        codes: Files that it executes.
        library: The helper: a file of Argus's own.
    """

    pid: int
    start_ticks: int
    program: tuple[str, ...]
    dlopen: int
    syscall: int
    way_back: int
    codes: list[Code]
    library: str


def program_of(pid: int) -> tuple[str, ...]:
    """What changes when a process calls exec, though its PID stays: the program, its owner, where it was loaded.

    All of it is the kernel's: no file is looked at, which might take as long as its file system likes.

    Raises:
        OSError: The process ended, or may not be looked at.
    """
    place = f"/proc/{pid}"
    fields = stat_of(place)
    # proc(5): startcode, endcode, startstack. The kernel places the last two anew with each exec.
    return os.readlink(f"{place}/exe"), str(os.stat(place).st_uid), *(field.decode() for field in fields[23:26])


def load(request: Request, wanted: Callable[[], bool] = lambda: True) -> float:
    """Makes a process load the helper; returns for how long it was stopped at most, s. The calling thread has to end
    soon: ptrace holds what it has stopped until then.

    Args:
        request: Which process, and what is where in it.
        wanted: Asked before each look; where it is false no further one is taken.

    Raises:
        Refused: It cannot or should not be done. The process is as it was.
        OSError: The process ended, or may not be looked at.
    """
    pid = request.pid
    pidfd = os.pidfd_open(pid)
    try:
        if int(stat_of(f"/proc/{pid}")[19]) != request.start_ticks:
            raise ProcessLookupError(f"{pid} ended")
        # It is the memory of the program that runs now, and of no later one.
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Begun before a thread is stopped.
            with _Filler(Path(request.library).read_bytes()) as filler:
                return _stop_and_load(request, pidfd, memory, filler, wanted)
        finally:
            os.close(memory)
    finally:
        os.close(pidfd)


def _stop_and_load(request: Request, pidfd: int, memory: int, filler: _Filler, wanted: Callable[[], bool]) -> float:
    longest_s = 0.0
    deadline = time.monotonic() + REST_TIMEOUT_S
    while True:
        if not wanted():
            raise interrupt.Refused("the trace ends")
        with _undisturbed(), interrupt.stop(request.pid, memory) as thread:
            if _ended(pidfd) or program_of(request.pid) != request.program:
                raise interrupt.Refused("it has become another program meanwhile")
            called = thread.at_rest(request.codes, request.way_back)
            if called:
                _load(thread, pidfd, request, filler)
        longest_s = max(longest_s, thread.held_s)
        if called:
            return longest_s
        if time.monotonic() > deadline:
            raise interrupt.Refused("its main thread was never found where loading a library is safe")
        time.sleep(random.uniform(*REST_INTERVALS_S))


def _ended(pidfd: int) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(0))


def _load(thread: interrupt.Stopped, pidfd: int, request: Request, filler: _Filler) -> None:
    """Makes the thread load a library when it goes on."""
    number = thread.memory_file(MEMORY_FILE, request.syscall, request.way_back)
    load = interrupt.Call(request.dlopen, (_LOADED_AS % number, os.RTLD_NOW))
    forget = interrupt.Call(request.syscall, (interrupt.SYS_CLOSE, number))
    try:
        filler.fill(pidfd, number)
    except OSError as failure:
        thread.call([forget], request.way_back)
        raise interrupt.Refused(f"its file in memory cannot be filled ({failure.strerror or failure})") from failure
    thread.call([load, forget], request.way_back)


class _Filler:
    """Writes a process's own, empty file in memory, and seals it, from a child that holds nothing else.

    By its number another thread may have put anything else there. It is written through the description that the
    process itself has of it, so with no more rights than the process has; and only if it is a file in memory. Even
    that may keep who writes waiting for ever, since the process may be writing to it: then the child is left behind.
    """

    def __init__(self, content: bytes) -> None:
        self._sock, its_end = socket.socketpair()
        self._sock.settimeout(FILL_S)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _FILL, str(len(content))], stdin=its_end.fileno(), cwd="/", env={},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._sock.sendall(content)

    def __enter__(self) -> _Filler:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._process.kill()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            left_behind.append(self._process)

    def fill(self, pidfd: int, number: int) -> None:
        """Fills the file that the process has by a number.

        Raises:
            OSError: It cannot be filled, or keeps who writes waiting.
        """
        file = interrupt.take_file(pidfd, number)
        try:
            socket.send_fds(self._sock, [b"f"], [file])
        finally:
            os.close(file)
        if failure := int.from_bytes(self._sock.recv(4), "little"):
            raise OSError(failure, os.strerror(failure))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nobody else gets this thread's processor while the process waits for it. Where that is not allowed, they may."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    changed = False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, policy, priority)
