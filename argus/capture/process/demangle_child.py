"""The process that demangles C++ symbols for ``argus.capture.process.demangler``: run as a script, and nothing else.

A symbol of a traced process may expand without bound in memory and time. Here memory and CPU time have limits, and
there are no rights: the process has given up its user (where it had any rights), opens nothing, and may make only the
system calls that reading, writing and allocating take. Its end costs one name.

Reads ``<I`` length and that many bytes, a symbol; answers ``<iII``: 0, or -1 if it is no symbol; length; microseconds
of CPU that it took, in ticks of the kernel's clock; and so many bytes of the name; until its input ends. Arguments:
seconds of CPU for a symbol, bytes of memory beyond those at the start, bytes of a name, and libstdc++.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys

USER = 0xF1000000
"""User and group of the process, plus the parent's PID: no system gives such numbers to anybody, so that no process but
root's may send it signals. Readers have others (``argus.capture.reader.process``)."""
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3, include/uapi/linux/capability.h
_NO_NEW_PRIVS = 38  # PR_SET_NO_NEW_PRIVS, include/uapi/linux/prctl.h
_SECCOMP = 22  # PR_SET_SECCOMP
_FILTER = 2  # SECCOMP_MODE_FILTER
# read, write, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, mremap, madvise, setitimer,
# futex, exit, exit_group, getrandom: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
_ALLOWED = {
    "x86_64": (0xC000003E, (0, 1, 9, 10, 11, 12, 13, 14, 15, 25, 28, 38, 202, 60, 231, 318)),
    "aarch64": (0xC00000B7, (63, 64, 222, 226, 215, 214, 134, 135, 139, 216, 233, 103, 98, 93, 94, 278)),
}


def _confine() -> None:
    """Allows the system calls of ``_ALLOWED`` from here on; any other ends the process (seccomp(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    machine = _ALLOWED.get(platform.machine())
    if machine is None:
        return
    arch, calls = machine
    # struct sock_filter: code, jump if true, jump if false, operand. 0x20 loads a word of struct seccomp_data.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    for place, number in enumerate(calls):
        steps.append((0x15, len(calls) - place, 0, number))
    steps += [(0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ALLOW
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(filters)))
    libc.prctl(_SECCOMP, _FILTER, program, 0, 0)  # a kernel without it: the limits remain


def _limit(nbytes: int) -> None:
    """Bounds what the process may do, and drops what it may do as root."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    for limit, value in (("RLIMIT_AS", size + nbytes), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_NOFILE", 8)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, limit), (value, value))
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.chdir("/")
            _give_up_rights()


def _give_up_rights() -> None:
    """Becomes a user that nobody is. A trace has no right to that any more: then root without a capability."""
    user = USER + os.getppid() % 0x01000000
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    ctypes.CDLL(None).capset(header, ctypes.create_string_buffer(24))


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    cpu_s, memory, most = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    library = ctypes.CDLL(sys.argv[4])
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    length_of = library.strnlen
    length_of.argtypes, length_of.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_size_t
    status = ctypes.c_int()
    # Once, so that what is loaded when first used is there.
    library.free(library.__cxa_demangle(b"_Z1fv", None, None, ctypes.byref(status)))
    _limit(memory)
    _confine()
    while True:
        symbol = _read(struct.unpack("<I", _read(4))[0])
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        pointer = library.__cxa_demangle(symbol, None, None, ctypes.byref(status))
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        cpu_us = min(max(int(1e6 * (cpu_s - left_s)), 0), 0xFFFFFFFF)
        name = ctypes.string_at(pointer, length_of(pointer, most)) if pointer else b""
        library.free(pointer)
        _write(struct.pack("<iII", 0 if pointer else -1, len(name), cpu_us) + name)


if __name__ == "__main__":
    main()
