"""Puts the helper into a running process that was not armed. Only on request: nothing else that Argus does changes a
process from outside.

The main thread is interrupted, as by a signal, to call ``dlopen`` (``argus.cupti.interrupt``). That is safe only where
it is not within the C library's allocator or loader: where it is found there, it goes on, and is looked at again a
little later.

The process may be hostile, and Argus is root: nothing of the process is run here, no path of it is opened for writing,
and no file is made for it. What it loads is a file in its own memory (memfd) that its own thread has made, which Argus
fills through the process's own descriptor (pidfd_getfd), with the rights that the process has on it. So
``sys.remote_exec`` of CPython 3.14 is not used: it wants a script that lies in a folder of the process.

What is read here comes from the kernel or from the reader. What touches the process itself (``argus.cupti.load``) may
be kept waiting by it for ever: a tracer has a process of its own do that (``argus.cupti.inject_apart``).
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path

from argus.capture.process.c_library import find_functions
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
from argus.cupti.interrupt import Code
from argus.cupti.load import MEMORY_FILE, Request, load, program_of
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import seconds
from argus.system.aside import Aside
from argus.system.proc import field_of, lines_of, number, read_file

WAIT_S = 10.0
"""How long the helper may take to start once it was asked to."""
SECCOMP_VARIABLE = "ARGUS_INJECT_SECCOMP"
"""``ARGUS_INJECT_SECCOMP=1``: inject in spite of a seccomp filter. Container runtimes' default ones allow it."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_ARM_INSTEAD = "Arm it where it is started: docs/gpu-times.md"
_MACHINES = {"x86_64": 62, "aarch64": 183}
_MOUNTS_BYTES = 16 << 20


def load_here(request: Request) -> float:
    """``load`` in a thread of this process, for which it waits: for programs that are trusted."""
    # ptrace holds what a thread has stopped until that thread ends.
    return Aside(lambda: load(request), "argus-ptrace").result()


def inject(pid: int, by: Callable[[Request], float] = load_here) -> str:
    """Puts the helper into a running process, dormant; returns what was done, and what it cost the process.

    Args:
        pid: The process.
        by: Makes it load the helper, as ``load``.

    Raises:
        ArgusError: It cannot or should not be done, with what to do instead. The process is as it was.
    """
    target = inspect(pid)
    try:
        return _inject(target, by)
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


def _inject(target: Target, by: Callable[[Request], float]) -> str:
    pid = target.pid
    if helper_address(pid) is not None:
        return "already armed"
    # First: it is the program that is looked at from here on, and no later one.
    program = program_of(pid)
    refuse(pid)
    if not interrupt.supported():
        raise ArgusError(f"a running process cannot be injected on {platform.machine()} yet", _ARM_INSTEAD)
    try:
        found = find_functions(pid)
        if found is None:
            raise interrupt.Refused("its C library is none that Argus understands")
        codes = [Code(each.start, each.end, Path(each.path).name) for each in executable_mappings(pid)]
        functions = found.dlopen, found.syscall, found.sigreturn
        longest_s = by(Request(pid, target.start_ticks, program, *functions, codes, str(build.injected_library())))
    except interrupt.Refused as reason:
        raise ArgusError(f"process {pid} cannot be injected: {reason}", _ARM_INSTEAD, EXIT_UNAVAILABLE) from reason
    if not _wait_for_helper(pid, WAIT_S):
        what = "was loaded but did not start" if _loaded(pid) else "could not be loaded"
        raise ArgusError(f"the helper {what} in process {pid}", "Is it a launcher, or very short of memory?")
    return f"injected by ptrace: the process was stopped for {seconds(longest_s)}"


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


def _wait_for_helper(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while helper_address(pid) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _loaded(pid: int) -> bool:
    name = "/memfd:" + MEMORY_FILE.decode()
    return any(mapping.path == name for mapping in executable_mappings(pid))
