"""Makes a thread of another process call functions, as a signal would (x86_64).

The thread is stopped (ptrace) only while signal frames are laid on its stack, as the kernel lays one for a handler:
general and vector registers, the mask, and the C library's own way back, ``rt_sigreturn``. Then it is let go, and runs
the functions by itself, all signals blocked meanwhile. So the stop is short, signals that come are delivered
afterwards, no register is lost, and nothing depends on who interrupted still being there. A system call that the thread
was waiting in begins anew with its own arguments: the program sees no EINTR.

The process may be hostile. Nothing of it is run here, and it is reached only through what belongs to the program that
was looked at: one descriptor of its memory, which ends with an exec, and the thread that ptrace holds. It may keep who
reads its memory waiting for ever, whatever was looked at before: its other threads run on, and may map a file there
that never answers. So a tracer does not do this in its own process (``argus.cupti.inject_apart``).

Calling the allocator or the loader from a signal handler is safe only if the thread was in neither of them; ``at_rest``
checks that.

Imports little: a process of its own does this for each injection.

A library that runs the call while the process is stopped was tried and left: pyinjector 1.4.0 saves no vector registers
(a loop that held a value in one then read another, 3 of 3), gives up amid ``dlopen`` when a signal comes (7 of 7), and
crashed an allocating program (1 of 4).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from argus.system.proc import stat_of

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long] * 4

# linux/ptrace.h, elf.h, wait.h
_GETREGS, _SETREGS = 12, 13
_CONT, _DETACH, _SYSCALL = 7, 17, 24
_GETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4206, 0x4207, 0x420A, 0x420B
_NT_X86_XSTATE = 0x202
_EVENT_STOP = 128
_TRACE_SYSCALLS_GOOD, _SYSCALL_STOP = 1, signal.SIGTRAP | 0x80
_WALL = 0x40000000

# asm/unistd_64.h, linux/memfd.h
SYS_CLOSE, _SYS_MEMFD_CREATE, _SYS_PIDFD_GETFD = 3, 319, 438
_CLOEXEC_AND_SEALS = 3

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

_MOST_MAPS = 64 << 20
"""Of a process's list of mappings: 65,530 of them with paths of a kilobyte."""

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
# ptrace's XSAVE area and struct _fpx_sw_bytes at its byte 464; asm/sigcontext.h
_SW_BYTES = 464
_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_XSTATE_BV = 512
_TILE_DATA = 1 << 18
_TILES_OFFSET, _TILE_DATA_OFFSET = 2752, 2816
_RED_ZONE = 128
_STOP_TIMEOUT_S = 2.0
_FRAME_BYTES = 440
_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_BLOCKED = struct.pack("=Q", ~sum(1 << (number - 1) for number in _FAULTS) & (1 << 64) - 1)
_NO_ALTSTACK = 0x7F  # no mode of sigaltstack: the kernel leaves the thread's own as it is
_UC_FLAGS = 7  # UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS


class Refused(Exception):
    """The thread could not be made to call the function. It goes on as if nothing had been."""


@dataclass(frozen=True)
class Call:
    """A call for a thread to make.

    Attributes:
        function: Its address.
        arguments: At most six; of bytes the address is passed, a zero behind them.
    """

    function: int
    arguments: tuple[int | bytes, ...]


class Code(NamedTuple):
    """Where a file is mapped that a process executes, and the file's name, without folders."""

    start: int
    end: int
    name: str


def supported() -> bool:
    """Whether this machine's processor is one of those whose signal frames are known here."""
    return platform.machine() == "x86_64"


_HANDLER_BYTES = 32 << 10
"""How deep a handler's own frames are looked through for the signal's."""
_STACK_BYTES = 64 << 10
"""Room below the stack pointer that a call gets: 12 KB of registers, and what ``dlopen`` needs."""
_ANONYMOUS = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ 0 *(\[stack\])?", re.MULTILINE)


_QUERY = 3 << 30 | 104 << 16 | ord("f") << 8 | 17
"""PROCMAP_QUERY of linux/fs.h: one mapping instead of all, which take 1 µs each (Linux 6.11)."""
_READ_WRITE = 3
"""Of its flags. A mapping that is executable or shared has others, too."""


def stack_end(pid: int, pointer: int) -> int:
    """Where the memory ends that a stack pointer lies in; 0: it is of a file, or there is no room below for calls.

    Memory of a file may be out of reach for as long as its file system likes, so it is neither read nor written.

    Raises:
        OSError: The process ended, or may not be looked at.
    """
    maps = os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # an older kernel, or no mapping there
            begin, end = _free_memory_at(maps, pointer)
            if not end:
                return 0
            if pointer - _STACK_BYTES >= begin and not _is_free(maps, end):
                return end
        parts, size = [], 0
        while size < _MOST_MAPS and (part := os.read(maps, 1 << 16)):
            parts.append(part)
            size += len(part)
    finally:
        os.close(maps)
    return next((stack.stop for stack in stacks_of(b"".join(parts)) if pointer in stack), 0)


def _free_memory_at(maps: int, address: int) -> tuple[int, int]:
    """The mapping at an address, if it is of no file, else zeros.

    Raises:
        OSError: There is none, or the kernel cannot be asked.
    """
    query = bytearray(struct.pack("=3Q80x", 104, 0, address))
    fcntl.ioctl(maps, _QUERY, query)
    begin, end, flags, _, _, inode = struct.unpack_from("=6Q", query, 24)
    return (begin, end) if flags == _READ_WRITE and not inode else (0, 0)


def _is_free(maps: int, address: int) -> bool:
    try:
        return bool(_free_memory_at(maps, address)[1])
    except FileNotFoundError:
        return False


def stacks_of(maps: bytes) -> list[range]:
    """Addresses that a stack pointer may have, in a process's list of mappings, as the kernel writes it: in memory of
    no file, with room below. Each range ends with its memory."""
    memory: list[tuple[int, int, int]] = []
    for match in _ANONYMOUS.finditer(maps):
        begin, end = int(match[1], 16), min(int(match[2], 16), 1 << 63)
        if memory and memory[-1][2] == begin:
            memory[-1] = *memory[-1][:2], end
        elif match[3]:  # the kernel makes the main thread's stack larger when it is used, down to what lies below
            line = maps[maps.rfind(b"\n", 0, max(match.start() - 1, 0)) + 1 : match.start()]
            below = int(line.partition(b" ")[0].partition(b"-")[2] or b"0", 16)
            memory.append((begin, below + _STACK_BYTES, end))
        else:
            memory.append((begin, begin + _STACK_BYTES, end))
    return [range(min(max(begin, lowest), end), end) for begin, lowest, end in memory]


class Stopped:
    """A thread while it is stopped. Made by ``stop``.

    Attributes:
        tid: The thread.
        held_s: Once it goes on: for how long it was stopped, from when that was seen (it is looked at every 0.1 ms).
    """

    def __init__(self, tid: int, memory: int) -> None:
        self.tid = tid
        self.held_s = 0.0
        self.registers = _registers(tid)
        self._memory = memory
        self._mask: bytes | None = None
        self._vectors = b""

    @property
    def system_call(self) -> int:
        """The system call it is waiting in; -1: none."""
        return _signed(self.registers["orig_rax"])

    def at_rest(self, codes: Sequence[Code], way_back: int) -> bool:
        """Whether the thread is in neither allocator nor loader, nor in a handler that may have interrupted them, and
        has a stack for calls. Its memory is read only where that lies in memory of no file by now.

        Args:
            codes: Files that it executes.
            way_back: Where signal handlers return to: its address lies on the stack while one runs.

        Raises:
            OSError: Its stack cannot be read.
        """
        if not self._may_be_at_rest(codes):
            return False
        pointer = self.registers["rsp"]
        if not (end := stack_end(self.tid, pointer)):
            return False
        begin = pointer & ~7
        stack = os.pread(self._memory, min(_HANDLER_BYTES, end - begin), begin)
        return way_back not in memoryview(stack[: len(stack) // 8 * 8]).cast("Q")

    def _may_be_at_rest(self, codes: Sequence[Code]) -> bool:
        """As far as its registers show."""
        if self.system_call >= 0:
            return self.system_call in _WAITS
        for code in codes:
            if code.start <= self.registers["rip"] < code.end:
                return _GUARDED.match(code.name) is None
        return False  # code without a file: who knows what called it

    def call(self, calls: Sequence[Call], way_back: int) -> None:
        """Lets the thread make calls, one after the other, when it goes on, and then be where it was.

        Raises:
            OSError: The thread ended, or its stack cannot be written. It is as it was.
        """
        before = self.registers
        self._save()
        assert self._mask is not None
        place = state_at = (before["rsp"] - _RED_ZONE - len(self._vectors)) & ~63
        parts = [(state_at, self._vectors)]
        registers, mask = self._resumed(), self._mask
        for one in reversed(calls):
            arguments = []
            for argument in one.arguments:
                if isinstance(argument, bytes):
                    place = (place - len(argument) - 1) & ~15
                    parts.append((place, argument + b"\0"))
                arguments.append(place if isinstance(argument, bytes) else argument)
            place = ((place - _FRAME_BYTES) & ~15) - 8
            parts.append((place, _frame(registers, mask, state_at, way_back)))
            registers = {**before, **dict(zip(_ARGUMENTS, arguments, strict=False))}
            registers |= {"rip": one.function, "rsp": place, "rax": 0}
            registers["eflags"] = before["eflags"] & ~0x500  # direction, trap
            mask = _BLOCKED
        for address, data in parts:
            if os.pwrite(self._memory, data, address) != len(data):
                raise OSError(errno.EIO, "its stack cannot be written")
        self._go_on_with(registers, mask)

    def memory_file(self, name: bytes, syscall: int, way_back: int) -> int:
        """Makes the thread open a new file in memory, ``name``; returns its number there. It is stopped again then.

        Whenever that goes wrong the thread makes the call by itself, and then is where it was.

        Args:
            name: What it is called.
            syscall: Where the process has the C library's function of that name.
            way_back: As ``at_rest``.

        Raises:
            Refused: It may not.
            OSError: The thread ended, or its stack cannot be written.
        """
        make = Call(syscall, (_SYS_MEMFD_CREATE, name, _CLOEXEC_AND_SEALS))
        self.call([make], way_back)
        for _ in ("enters it", "leaves it"):
            _ptrace(_SYSCALL, self.tid, None, None)
            if (status := _wait(self.tid, time.monotonic() + _STOP_TIMEOUT_S)) >> 8 != _SYSCALL_STOP:
                raise Refused(f"it was stopped by something else meanwhile ({status:#x})")
        registers = _registers(self.tid)
        number = _signed(registers["rax"])
        if registers["orig_rax"] != _SYS_MEMFD_CREATE or not -4096 < number < 1 << 31:
            raise Refused("its C library is none that Argus understands")
        if number < 0:
            self.restore()
            raise Refused(f"it may make no file in memory ({os.strerror(-number)})")
        return number

    def restore(self) -> None:
        """Lets the thread be where it was when it goes on.

        Raises:
            OSError: The thread ended.
        """
        if self._mask is not None:
            self._go_on_with(self._resumed(), self._mask)

    def _save(self) -> None:
        if self._mask is None:
            mask = bytearray(8)
            _ptrace(_GETSIGMASK, self.tid, 8, _address(mask))
            self._vectors = _vector_state(self.tid)
            self._mask = bytes(mask)

    def _resumed(self) -> dict[str, int]:
        """The registers that the thread goes on with: a system call that was interrupted begins anew."""
        resumed = dict(self.registers)
        result = _signed(resumed["rax"])
        if self.system_call >= 0 and (
            result in _RESTARTED or (result == _EINTR and self.system_call in _ENDED_BY_STOPS)
        ):
            resumed["rax"] = resumed["orig_rax"]
            resumed["rip"] -= 2  # of `syscall`
        return resumed

    def _go_on_with(self, registers: dict[str, int], mask: bytes) -> None:
        assert self._mask is not None
        changed = dict(registers, orig_rax=(1 << 64) - 1)  # not in a system call: nothing is to be restarted
        raw = bytearray(struct.pack(f"={len(_REGISTERS)}Q", *(changed[name] for name in _REGISTERS)))
        wanted, own = bytearray(mask), bytearray(self._mask)
        _ptrace(_SETSIGMASK, self.tid, 8, _address(wanted))
        try:
            _ptrace(_SETREGS, self.tid, None, _address(raw))
        except OSError:
            _ptrace(_SETSIGMASK, self.tid, 8, _address(own))
            raise


@contextlib.contextmanager
def stop(tid: int, memory: int) -> Iterator[Stopped]:
    """Stops a thread for the time of the block.

    A thread that does not stop in time stays traced until the calling thread ends: call it in one that does.

    Args:
        tid: The thread.
        memory: A descriptor of its process's memory, /proc/PID/mem, to read and write.

    Raises:
        Refused: It may not be stopped, or does not stop.
        OSError: It ended.
    """
    try:
        _ptrace(_SEIZE, tid, None, _TRACE_SYSCALLS_GOOD)
    except PermissionError as failure:
        if _has_ended(tid):
            raise ProcessLookupError(f"{tid} ended") from failure
        raise Refused("it may not be traced (a debugger, or a security module?)") from failure
    thread, since = None, 0.0
    try:
        _ptrace(_INTERRUPT, tid, None, None)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while (status := _wait(tid, deadline)) >> 16 != _EVENT_STOP:
            _ptrace(_CONT, tid, None, os.WSTOPSIG(status))  # a signal on its way: it goes there
        since = time.monotonic()
        thread = Stopped(tid, memory)
        yield thread
    finally:
        with contextlib.suppress(OSError):
            _ptrace(_DETACH, tid, None, None)
        if thread is not None:
            thread.held_s = time.monotonic() - since


def _has_ended(tid: int) -> bool:
    try:
        return stat_of(f"/proc/{tid}")[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait(tid: int, deadline: float) -> int:
    """Waits until a traced thread stops; returns its status, as waitpid has it."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(tid, _WALL | os.WNOHANG)
        if ended:
            if not os.WIFSTOPPED(status):
                raise ProcessLookupError(f"{tid} ended")
            return status
        time.sleep(50e-6)  # not at once: this thread may be more urgent than the one that has to stop
    raise Refused("it does not stop (it waits in the kernel)")


def take_file(pidfd: int, number: int) -> int:
    """A descriptor of a file that a process has open: its own description of it, with the rights that it has.

    Raises:
        OSError: There is none, or it may not be taken.
    """
    descriptor: int = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, number, 0)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


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


def _registers(tid: int) -> dict[str, int]:
    raw = bytearray(8 * len(_REGISTERS))
    _ptrace(_GETREGS, tid, None, _address(raw))
    return dict(zip(_REGISTERS, struct.unpack(f"={len(_REGISTERS)}Q", raw), strict=True))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _ptrace(request: int, tid: int, address: int | None, data: int | None) -> None:
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
