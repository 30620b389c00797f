"""Puts the helper into a running process that was not armed. Only on request: nothing else that Argus does changes a
process from outside.

The main thread is interrupted, as by a signal, to call ``dlopen`` (``argus.cupti.interrupt``). That is safe only where
it is not within the C library's allocator or loader: where it is found there, it goes on, and is looked at again a
little later.

The process may be hostile, and Argus is root: nothing of the process is run here, no path of it is opened for writing,
and no file is made for it. What it loads is a file in its own memory (memfd) that its own thread has made, which Argus
fills through the process's own descriptor (pidfd_getfd), with the rights that the process has on it. So
``sys.remote_exec`` of CPython 3.14 is not used: it wants a script that lies in a folder of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from argus.capture.process.c_library import Functions
from argus.capture.process.targets import (
    PROC,
    Target,
    executable_mappings,
    inspect,
    maps_cuda,
    read_environment,
    read_program,
)
from argus.cupti import build, interrupt
from argus.cupti.arm import SWITCH, helper_address
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import seconds
from argus.system.aside import Aside
from argus.system.proc import field_of, lines_of, number, read_file, stat_of

WAIT_S = 10.0
"""How long the helper may take to start once it was asked to."""
REST_TIMEOUT_S = 10.0
"""How long to look for a moment in which the main thread can be made to load a library."""
REST_INTERVALS_S = (0.001, 0.01)
"""Time between two looks, at random: a program with a period of its own would else be found at the same place again and
again. One that is nearly always in the allocator was at rest in 2 looks of 100 beside two busy loops, in 5 at rest."""
SECCOMP_VARIABLE = "ARGUS_INJECT_SECCOMP"
"""``ARGUS_INJECT_SECCOMP=1``: inject in spite of a seccomp filter. Container runtimes' default ones allow it."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_ARM_INSTEAD = "Arm it where it is started: docs/gpu-times.md"
_MACHINES = {"x86_64": 62, "aarch64": 183}
_MEMORY_FILE = b"argus-inject"
_LOADED_AS = b"/proc/self" + b"/" * 24 + b"fd/%d"
"""What the thread loads. So many slashes that no other name is the same to the loader, and that the helper has room to
write its own there (helper/inject.c)."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MOUNTS_BYTES = 16 << 20
FILL_S = 2.0
"""Longest wait for the file in memory to be filled."""
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


def inject(pid: int) -> str:
    """Puts the helper into a running process, dormant; returns what was done, and what it cost the process.

    Raises:
        ArgusError: It cannot or should not be done, with what to do instead. The process is as it was.
    """
    target = inspect(pid)
    try:
        return _inject(target)
    except (FileNotFoundError, ProcessLookupError) as reason:
        if target.alive():
            raise
        raise ArgusError(f"process {pid} ended while Argus inspected it", "", EXIT_UNAVAILABLE) from reason
    except PermissionError as reason:
        raise ArgusError(
            f"process {pid} may not be injected: {reason}", "Run Argus with sudo", EXIT_UNAVAILABLE
        ) from reason
    finally:
        target.close()


def _inject(target: Target) -> str:
    if helper_address(target.pid) is not None:
        return "already armed"
    # Opened first: it is the memory of the program that is looked at from here on, and of no later one.
    memory = os.open(PROC / str(target.pid) / "mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        program = _program(target.pid)
        refuse(target.pid)
        if not interrupt.supported():
            raise ArgusError(f"a running process cannot be injected on {platform.machine()} yet", _ARM_INSTEAD)
        # ptrace holds what a thread has stopped until that thread ends.
        return Aside(lambda: _by_ptrace(target, memory, program), "argus-ptrace").result()
    finally:
        os.close(memory)


# ---- what is not injected


def refuse(pid: int) -> None:
    """Raises if a process cannot or should not be injected.

    Raises:
        ArgusError: The reason, with what to do instead.
    """

    def no(what: str, hint: str = _ARM_INSTEAD) -> ArgusError:
        return ArgusError(f"process {pid} {what}: not injected", hint, EXIT_UNAVAILABLE)

    if pid == os.getpid():
        raise no("is Argus itself", "")
    status = read_file(f"{PROC}/{pid}/status")
    if (tracer := number(field_of(status, b"TracerPid"))) > 0:
        raise no(f"is being traced by process {tracer} (a debugger?)", "End that first")
    state = _state(status)
    if state in "Tt":
        raise no("is stopped", f"Let it go on first: kill -CONT {pid}")
    if state == "D" and _stays_uninterruptible(pid):
        raise no("hangs in the kernel (uninterruptible sleep)", "Try again once it runs: it may be waiting for a disk")
    if read_environment(pid).get(SWITCH) == "0":
        raise no(f"was started with {SWITCH}=0", "Start it without")
    head = read_program(pid)
    machine = _MACHINES.get(platform.machine())
    if len(head) < 20 or head[4] != 2 or struct.unpack_from("<H", head, 18)[0] != machine:
        raise no(f"is a program for another architecture than Argus ({platform.machine()})", "")
    if not maps_cuda(pid):
        raise no("has not loaded CUDA yet")
    names = {Path(mapping.path).name for mapping in executable_mappings(pid)}
    if any(name.startswith("ld-musl") for name in names):
        raise no("uses musl, and the helper needs glibc", "")
    if b"shstk" in field_of(status, b"x86_Thread_features"):
        raise no("has a shadow stack, which forbids it")
    if not any(name.startswith(("libc.so.6", "libc-2.")) for name in names):
        raise no("uses no glibc that Argus can find", "")
    if field_of(status, b"Seccomp") == b"2" and os.environ.get(SECCOMP_VARIABLE) != "1":
        raise no(
            "has a seccomp filter, which may end it for a call that it does not expect",
            f"{SECCOMP_VARIABLE}=1 tries all the same (the default filters of container runtimes allow it)",
        )
    if not _sees_proc(pid):
        raise no("has no /proc, through which it would load the helper")
    with contextlib.suppress(OSError):
        if YAMA.read_text().strip() == "3":
            raise no("cannot be injected on this machine (Yama, ptrace_scope 3)")


def _state(status: bytes) -> str:
    return field_of(status, b"State")[:1].decode("ascii", "replace") or "X"


def _stays_uninterruptible(pid: int) -> bool:
    for _ in range(10):
        time.sleep(0.05)
        if _state(read_file(f"{PROC}/{pid}/status")) != "D":
            return False
    return True


def _sees_proc(pid: int) -> bool:
    """Whether something is mounted at the process's /proc. The kernel's own list: no path of the process is walked."""
    with open(PROC / str(pid) / "mountinfo", "rb") as file:
        mounts = file.read(_MOUNTS_BYTES)
    # proc(5): "36 35 98:0 / /proc rw,noatime … - proc proc rw"
    parts = (line.partition(b" - ") for line in lines_of(mounts))
    return any(left.split(b" ")[4:5] == [b"/proc"] and right.startswith(b"proc ") for left, _, right in parts)


def _program(pid: int) -> tuple[object, ...]:
    """What changes when a process calls exec, though its PID stays: the program, its owner, where it was loaded.

    All of it is the kernel's: no file is looked at, which might take as long as its file system likes.
    """
    place = str(PROC / str(pid))
    fields = stat_of(place)
    # proc(5): startcode, endcode, startstack. The kernel places the last two anew with each exec.
    return os.readlink(f"{place}/exe"), os.stat(place).st_uid, *fields[23:26]


def _wait_for_helper(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while helper_address(pid) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---- by ptrace


def _by_ptrace(target: Target, memory: int, program: tuple[object, ...]) -> str:
    # Begun before a thread is stopped.
    with _Filler(build.injected_library().read_bytes()) as filler:
        return _stop_and_load(target, memory, program, filler)


def _stop_and_load(target: Target, memory: int, program: tuple[object, ...], filler: _Filler) -> str:
    pid = target.pid
    longest_s = 0.0
    deadline = time.monotonic() + REST_TIMEOUT_S
    try:
        functions = interrupt.find_functions(pid)
        mappings = executable_mappings(pid)
        stacks = interrupt.find_stacks(pid)
        while True:
            with _undisturbed(), interrupt.stop(pid, memory) as thread:
                if not target.alive() or _program(pid) != program:
                    raise interrupt.Refused("it has become another program meanwhile")
                on_stack = any(thread.registers["rsp"] in stack for stack in stacks)
                called = on_stack and thread.at_rest(mappings, functions.sigreturn)
                if called:
                    _load(thread, target.pidfd, functions, filler)
            longest_s = max(longest_s, thread.held_s)
            if called:
                break
            if time.monotonic() > deadline:
                raise interrupt.Refused("its main thread was never found where loading a library is safe")
            time.sleep(random.uniform(*REST_INTERVALS_S))
            if not on_stack:
                stacks = interrupt.find_stacks(pid)
    except interrupt.Refused as reason:
        raise ArgusError(f"process {pid} cannot be injected: {reason}", _ARM_INSTEAD, EXIT_UNAVAILABLE) from reason
    if not _wait_for_helper(pid, WAIT_S):
        what = "was loaded but did not start" if _loaded(pid) else "could not be loaded"
        raise ArgusError(f"the helper {what} in process {pid}", "Is it a launcher, or very short of memory?")
    return f"injected by ptrace: the process was stopped for {seconds(longest_s)}"


def _load(thread: interrupt.Stopped, pidfd: int, functions: Functions, filler: _Filler) -> None:
    """Makes the thread load a library when it goes on."""
    number = thread.memory_file(_MEMORY_FILE, functions)
    load = interrupt.Call(functions.dlopen, (_LOADED_AS % number, os.RTLD_NOW))
    forget = interrupt.Call(functions.syscall, (interrupt.SYS_CLOSE, number))
    try:
        filler.fill(pidfd, number)
    except OSError as failure:
        thread.call([forget], functions.sigreturn)
        raise interrupt.Refused(f"its file in memory cannot be filled ({failure.strerror or failure})") from failure
    thread.call([load, forget], functions.sigreturn)


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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

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


def _loaded(pid: int) -> bool:
    name = "/memfd:" + _MEMORY_FILE.decode()
    return any(mapping.path == name for mapping in executable_mappings(pid))
