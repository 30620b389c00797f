"""Makes a thread of another process call a function, as a signal would (x86_64).

The thread is stopped (ptrace) only while a signal frame is laid on its stack, as the kernel lays one for a handler:
general and vector registers, the mask, and the C library's own way back, ``rt_sigreturn``. Then it is let go, and runs
the function by itself, all signals blocked meanwhile. So the stop is short, signals that come are delivered afterwards,
no register is lost, and nothing depends on who interrupted still being there. A system call that the thread was waiting
in begins anew with its own arguments: the program sees no EINTR.

Calling the allocator or the loader from a signal handler is safe only if the thread was in neither of them; ``at_rest``
says so.

A library that runs the call while the process is stopped was tried and left: pyinjector 1.4.0 saves no vector registers
(a loop that held a value in one then read another, 3 of 3), gives up amid ``dlopen`` when a signal comes (7 of 7), and
crashed an allocating program (1 of 4).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from argus.capture.elf import Elf, NotElf
from argus.capture.mapped import open_mapped
from argus.capture.targets import PROC, Mapping, executable_mappings, start_ticks

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

# linux/ptrace.h, elf.h, wait.h
_GETREGS, _SETREGS = 12, 13
_CONT, _DETACH = 7, 17
_GETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4206, 0x4207, 0x420A, 0x420B
_NT_X86_XSTATE = 0x202
_EVENT_STOP = 128
_WALL = 0x40000000

_REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
"""struct user_regs_struct."""

_RESTARTED = {-512, -513, -514, -516}
"""What a system call that was interrupted holds in place of a result (ERESTARTSYS and its kin; linux/errno.h)."""
_EINTR = -4
# These end with EINTR when their thread is stopped, signal or not: signal(7).
_ENDED_BY_STOPS = {128, 208, 220, 232, 281, 441}  # rt_sigtimedwait io_getevents semtimedop epoll_wait epoll_pwait(2)
# Waiting for a futex, a time or a descriptor: what neither the allocator nor the loader does while it holds a lock.
# poll select sched_yield pause nanosleep accept recvfrom recvmsg wait4 rt_sigtimedwait futex restart_syscall
# clock_nanosleep epoll_wait waitid pselect6 ppoll epoll_pwait accept4 recvmmsg epoll_pwait2 futex_waitv
_WAITS = {7, 23, 24, 34, 35, 43, 45, 47, 61, 128, 202, 219, 230, 232, 247, 270, 271, 281, 288, 299, 441, 449}
_GUARDED = re.compile(r"^(libc[.-]|ld-|ld\.so|libpthread[.-]|libdl[.-]|libjemalloc|libtcmalloc|libmimalloc)")
"""Files whose code may hold a lock of the allocator or the loader, or be about to."""

_SIGRETURN = bytes.fromhex("48c7c00f0000000f05")
"""mov $15, %rax; syscall: the C library's __restore_rt, which every signal handler returns to."""
_MOST_CODE = 32 << 20
"""Of a C library that is searched: glibc has 2 MB."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
# ptrace's XSAVE area and struct _fpx_sw_bytes at its byte 464; asm/sigcontext.h
_SW_BYTES = 464
_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_XSTATE_BV = 512
_TILE_DATA = 1 << 18
_TILES_OFFSET, _TILE_DATA_OFFSET = 2752, 2816
_RED_ZONE = 128
_NO_ALTSTACK = 0x7F  # no mode of sigaltstack: the kernel leaves the thread's own as it is
_UC_FLAGS = 7  # UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS


class Refused(Exception):
    """The thread could not be made to call the function. It goes on as if nothing had been."""


@dataclass(frozen=True)
class Functions:
    """Addresses in a process: of ``dlopen``, and of the C library's return from a signal handler."""

    dlopen: int
    sigreturn: int


def find_functions(pid: int) -> Functions:
    """Raises:
    Refused: The process has no glibc that Argus understands.
    """
    mappings = executable_mappings(pid)
    dlopen = sigreturn = 0
    # dlopen moved from libdl to libc in glibc 2.34; where both have it they are one.
    for mapping in mappings:
        name = Path(mapping.path).name
        if not re.match(r"^lib(c|dl)(\.so\.\d+|-2\.\d+\.so)$", name):
            continue
        with contextlib.suppress(NotElf, OSError):
            file = open_mapped(pid, mapping)
            offset = Elf(file).functions(["dlopen"]).get("dlopen")
            if offset is not None and mapping.offset <= offset < mapping.offset + mapping.end - mapping.start:
                dlopen = mapping.start + offset - mapping.offset
            if name.startswith("libc") and not sigreturn:
                at = file.read(min(mapping.end - mapping.start, _MOST_CODE), mapping.offset).find(_SIGRETURN)
                sigreturn = mapping.start + at if at >= 0 else 0
    if not dlopen or not sigreturn:
        raise Refused("its C library is none that Argus understands")
    return Functions(dlopen, sigreturn)


def supported() -> bool:
    """Whether this machine's processor is one of those whose signal frames are known here."""
    return platform.machine() == "x86_64"


_HANDLER_BYTES = 32 << 10
"""How deep a handler's own frames are looked through for the signal's."""


class Stopped:
    """A thread while it is stopped. Made by ``stop``.

    Attributes:
        tid: The thread.
        held_s: Once it goes on: for how long it was stopped, from when that was seen (it is looked at every 0.1 ms).
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.held_s = 0.0
        raw = bytearray(8 * len(_REGISTERS))
        _ptrace(_GETREGS, tid, None, _address(raw))
        self.registers = dict(zip(_REGISTERS, struct.unpack(f"={len(_REGISTERS)}Q", raw), strict=True))

    @property
    def system_call(self) -> int:
        """The system call it is waiting in; -1: none."""
        number: int = struct.unpack("=q", struct.pack("=Q", self.registers["orig_rax"]))[0]
        return number

    def at_rest(self, mappings: list[Mapping], way_back: int) -> bool:
        """Whether the thread is in neither allocator nor loader, nor in a handler that may have interrupted them.

        Args:
            mappings: Executable ones.
            way_back: Where signal handlers return to: its address lies on the stack while one runs.
        """
        with open(PROC / str(self.tid) / "mem", "rb", buffering=0) as memory:
            memory.seek(self.registers["rsp"] & ~7)
            stack = memory.read(_HANDLER_BYTES) or b""
        words = memoryview(stack[: len(stack) // 8 * 8]).cast("Q")
        if way_back in words:
            return False
        if self.system_call >= 0:
            return self.system_call in _WAITS
        for mapping in mappings:
            if mapping.start <= self.registers["rip"] < mapping.end:
                return _GUARDED.match(Path(mapping.path).name) is None
        return False  # code without a file: who knows what called it

    def call(self, function: int, text: bytes, argument: int, way_back: int) -> None:
        """Lets the thread call ``function(text, argument)`` when it goes on, and then be where it was.

        Raises:
            OSError: The thread ended, or its stack cannot be written. It is as it was.
        """
        before = self.registers
        resumed = dict(before)
        result: int = struct.unpack("=q", struct.pack("=Q", before["rax"]))[0]
        if self.system_call >= 0 and (
            result in _RESTARTED or (result == _EINTR and self.system_call in _ENDED_BY_STOPS)
        ):
            resumed["rax"] = before["orig_rax"]
            resumed["rip"] = before["rip"] - 2  # of `syscall`
        mask = bytearray(8)
        _ptrace(_GETSIGMASK, self.tid, 8, _address(mask))
        text_at = (before["rsp"] - _RED_ZONE - len(text) - 1) & ~15
        state = _vector_state(self.tid)
        state_at = (text_at - len(state)) & ~63
        frame_at = ((state_at - 440) & ~15) - 8
        frame = _frame(resumed, bytes(mask), state_at, way_back)
        with open(PROC / str(self.tid) / "mem", "r+b", buffering=0) as memory:
            for place, data in ((text_at, text + b"\0"), (state_at, state), (frame_at, frame)):
                memory.seek(place)
                if memory.write(data) != len(data):
                    raise OSError("its stack cannot be written")
        blocked = bytearray(struct.pack("=Q", ~sum(1 << (number - 1) for number in _FAULTS) & (1 << 64) - 1))
        _ptrace(_SETSIGMASK, self.tid, 8, _address(blocked))
        changed = dict(before, rip=function, rsp=frame_at, rdi=text_at, rsi=argument, rax=0)
        changed["orig_rax"] = (1 << 64) - 1  # not in a system call: nothing is to be restarted
        changed["eflags"] = before["eflags"] & ~0x500  # direction, trap
        raw = bytearray(struct.pack(f"={len(_REGISTERS)}Q", *(changed[name] for name in _REGISTERS)))
        try:
            _ptrace(_SETREGS, self.tid, None, _address(raw))
        except OSError:
            _ptrace(_SETSIGMASK, self.tid, 8, _address(mask))
            raise


@contextlib.contextmanager
def stop(tid: int) -> Iterator[Stopped]:
    """Stops a thread for the time of the block.

    Raises:
        Refused: It may not be stopped, or does not stop.
        OSError: It ended.
    """
    try:
        _ptrace(_SEIZE, tid, None, None)
    except PermissionError as failure:
        if start_ticks(tid) is None:
            raise ProcessLookupError(f"{tid} ended") from failure
        raise Refused("it may not be traced (a debugger, or a security module?)") from failure
    thread, since = None, 0.0
    try:
        _ptrace(_INTERRUPT, tid, None, None)
        deadline = time.monotonic() + 2.0
        while True:
            found, status = os.waitpid(tid, _WALL | os.WNOHANG)
            if not found:
                if time.monotonic() > deadline:
                    raise Refused("it does not stop (it waits in the kernel)")
                time.sleep(50e-6)  # not at once: this thread may be more urgent than the one that has to stop
                continue
            if not os.WIFSTOPPED(status):
                raise ProcessLookupError(f"{tid} ended")
            if status >> 16 == _EVENT_STOP:
                break
            _ptrace(_CONT, tid, None, os.WSTOPSIG(status))  # a signal on its way: it goes there
        since = time.monotonic()
        thread = Stopped(tid)
        yield thread
    finally:
        with contextlib.suppress(OSError):
            _ptrace(_DETACH, tid, None, None)
        if thread is not None:
            thread.held_s = time.monotonic() - since


def _vector_state(tid: int) -> bytes:
    """The thread's vector registers, as a signal frame holds them."""
    raw = bytearray(32768)
    vector = bytearray(struct.pack("=QQ", _address(raw), len(raw)))
    _ptrace(_GETREGSET, tid, _NT_X86_XSTATE, _address(vector))
    size = struct.unpack_from("=Q", vector, 8)[0]
    features = struct.unpack_from("=Q", raw, _SW_BYTES)[0]
    used = struct.unpack_from("=Q", raw, _XSTATE_BV)[0]
    if features & _TILE_DATA and not used & _TILE_DATA:
        # Memory for AMX tiles belongs only to threads that use them; of others the kernel accepts no such frame.
        features &= ~_TILE_DATA
        size = _TILE_DATA_OFFSET if used & _TILE_DATA >> 1 else _TILES_OFFSET
    struct.pack_into("=IIQI", raw, _SW_BYTES, _MAGIC1, size + 4, features, size)
    return bytes(raw[:size]) + struct.pack("=I", _MAGIC2)


def _frame(registers: dict[str, int], mask: bytes, state_at: int, way_back: int) -> bytes:
    """struct rt_sigframe."""
    order = ("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx")
    return b"".join(
        (
            struct.pack("=Q", way_back),
            struct.pack("=QQQiiQ", _UC_FLAGS, 0, 0, _NO_ALTSTACK, 0, 0),
            struct.pack("=15Q", *(registers[name] for name in order)),
            struct.pack("=QQQ", registers["rsp"], registers["rip"], registers["eflags"]),
            struct.pack("=HHHH", registers["cs"], 0, 0, registers["ss"]),
            struct.pack("=QQ", 0, 0),
            mask,
            struct.pack("=QQ", 0, state_at),
            bytes(64),
            mask,
            bytes(128),
        )
    )


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _ptrace(request: int, tid: int, address: int | None, data: int | None) -> None:
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
