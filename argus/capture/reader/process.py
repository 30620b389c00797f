"""The process that opens and parses what traced processes have written, for ``argus.capture.reader.reader``: run as a
script.

Two kinds. The first, the nursery, has imported everything and given up its rights; it does nothing but fork readers and
end them. A reader answers one request at a time. It has a user of its own, which nobody else is and which owns nothing;
three capabilities; limits on memory, CPU and descriptors; and the system calls that reading takes.

What is asked and answered: ``wire``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[4])  # it is begun without any (-I -S)

from argus.capture.reader.reader import PROGRAM_BYTES
from argus.capture.reader.wire import HEADER, MAX_BYTES, MAX_FDS, Closed, receive, receive_head, send
from argus.system import memory

USER = 0xF0000000
"""User and group of readers, plus the parent's PID: no system gives such numbers to anybody, so that no process but
root's may send them signals, and they own no file."""
DESCRIPTORS = 16_384
"""Two of each process, and one of each file."""
_TRIM_S = 10.0
"""How often a reader gives freed memory back."""
REMEMBERED_BYTES = 1 << 30
"""What is remembered of the code of all Python processes together."""
STATES_S = 0.2
"""For so long thread states are believed that were read for another thread of the process."""
_KEPT = (2, 19, 40)
"""CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE: include/uapi/linux/capability.h."""
_SYS_ADMIN = 21
"""Leads to mapped files where there is no CAP_CHECKPOINT_RESTORE (before Linux 5.9)."""
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
# include/uapi/linux/prctl.h and seccomp.h.
_PDEATHSIG, _KEEPCAPS, _SECCOMP, _NO_NEW_PRIVS, _FILTER = 1, 8, 22, 38, 2
_REFUSE, _ALLOW, _KILL = 0x00050000 | errno.EPERM, 0x7FFF0000, 0x80000000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h, in this order: read write close fstat
# newfstatat statx lseek mmap mprotect munmap brk mremap madvise rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
# ioctl pread64 readv preadv sched_yield sched_getaffinity dup setitimer getpid gettid getuid geteuid getgid getegid
# sendto recvfrom sendmsg recvmsg uname fcntl getcwd getrusage times fstatfs futex getdents64 restart_syscall
# clock_gettime clock_nanosleep exit exit_group readlinkat ppoll process_vm_readv getrandom rseq membarrier
# faccessat faccessat2 getxattr; x86 alone: poll readlink access.
_X86 = """
0 1 3 5 262 332 8 9 10 11 12 25 28 13 14 15 131 16 17 19 295 24 204 32 38 39 186 102 107 104 108 44 45 46 47 63 72 79 98
100 138 202 217 219 228 230 60 231 267 271 310 318 334 324 269 439 191 7 89 21
"""
_ARM = """
63 64 57 80 79 291 62 222 226 215 214 216 233 134 135 139 132 29 67 65 69 124 123 23 103 172 178 174 175 176 177 206 207
211 212 160 25 17 165 153 44 98 61 128 113 115 93 94 78 73 270 278 293 283 48 439 8
"""
_CALLS = {
    "x86_64": (0xC000003E, 257, tuple(map(int, _X86.split()))),
    "aarch64": (0xC00000B7, 56, tuple(map(int, _ARM.split()))),
}
"""By machine: AUDIT_ARCH, the number of openat (which may open nothing for writing), numbers of what is allowed."""

_libc = ctypes.CDLL(None, use_errno=True)


# ---- rights


def give_up_rights(user: int) -> None:
    """Keeps three capabilities, and becomes a user that nobody is where that is permitted."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    data = ctypes.create_string_buffer(24)
    _libc.capget(header, data)
    words = struct.unpack("=6I", data.raw)
    has = words[1] | words[4] << 32
    kept = sum(1 << bit for bit in _KEPT if has >> bit & 1)
    if not kept >> 40 & 1:
        kept |= has & 1 << _SYS_ADMIN
    for bit in range(64):
        if not kept >> bit & 1:
            _libc.prctl(24, bit, 0, 0, 0)  # PR_CAPBSET_DROP; refused without SETPCAP, and no exec follows
    _libc.prctl(_KEEPCAPS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    both = (kept & 0xFFFFFFFF, kept & 0xFFFFFFFF, 0, kept >> 32, kept >> 32, 0)
    if _libc.capset(header, struct.pack("=6I", *both)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)


def confine() -> bool:
    """Allows the system calls of ``_CALLS`` from here on; others are refused (seccomp(2)). Whether that works here."""
    machine = _CALLS.get(platform.machine())
    if machine is None:
        return False
    arch, openat, calls = machine
    # struct sock_filter: code, jump if true, jump if false, operand. 0x20 loads a word of struct seccomp_data.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (0x06, 0, 0, _KILL), (0x20, 0, 0, 0)]
    steps += [(0x15, 0, 2, openat), (0x20, 0, 0, 32), (0x45, len(calls), len(calls) + 1, _WRITES)]
    # (The flags of openat are its third argument. Both targets of that jump lie behind the list.)
    steps += [(0x15, len(calls) - place, 0, number) for place, number in enumerate(calls)]
    steps += [(0x06, 0, 0, _REFUSE), (0x06, 0, 0, _ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(filters)))
    return bool(_libc.prctl(_SECCOMP, _FILTER, program, 0, 0) == 0)


def limit(memory: int) -> None:
    """Bounds memory (bytes beyond those of now) and descriptors; no file is written, no core dumped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        memory += int(file.read().split()[0]) * mmap.PAGESIZE
    for name, value in (
        ("RLIMIT_AS", memory),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NOFILE", DESCRIPTORS),
    ):
        with contextlib.suppress(OSError, ValueError):
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))


# ---- a process that is read


class _Session:
    """What is kept of a process between requests."""

    def __init__(self, pid: int, memory: bool) -> None:
        from argus.capture.process.symbols import Symbols

        self.pid, self.memory = pid, memory
        self.symbols = Symbols(pid)
        if not memory:
            self.symbols.without_memory = True
        self.interpreter: Any = None
        self.python: Any = None
        self.resolver: Any = None
        self._states: tuple[float, dict[int, int]] = (0.0, {})

    def find_python(self) -> Any:
        from argus.capture.python.code import CodeResolver
        from argus.capture.python.interpreter import PythonProcess, find_interpreter

        if not self.memory:
            return None
        interpreter = find_interpreter(self.pid)
        if interpreter is not None and interpreter.layout is not None:
            python = PythonProcess(self.pid, interpreter)
            self.close_python()
            self.python, self.resolver = python, CodeResolver(python, interpreter.layout)
        self.interpreter = interpreter
        return interpreter

    def thread_states(self, *, fresh: bool = True) -> dict[int, int]:
        now = time.monotonic()
        if self.python is None:
            return {}
        if fresh or now - self._states[0] > STATES_S:
            self._states = now, self.python.thread_states()
        return self._states[1]

    @property
    def nbytes(self) -> int:
        """What is remembered of its code."""
        return 0 if self.resolver is None else int(self.resolver.nbytes)

    def forget(self) -> None:
        if self.resolver is not None:
            self.resolver.forget()

    def close_python(self) -> None:
        if self.python is not None:
            self.python.close()
        self.python = self.resolver = None

    def close(self) -> None:
        self.close_python()
        self.symbols.close()

    def counters(self) -> dict[str, int]:
        return {**self.symbols.counters, **({} if self.resolver is None else self.resolver.counters)}


class _Sessions(dict[int, _Session]):
    """By number, those that were asked about last at the end. What they remember is bounded in all: whoever remembers
    most forgets it, so that who remembers little keeps it whatever others have."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._counted: dict[int, int] = {}

    def used(self, number: int) -> None:
        """A session has answered: those that remember most forget it, if it is too much in all; of several, the one
        that was not asked for longest."""
        self[number] = self.pop(number)
        self._count(number, self[number].nbytes)
        while self.nbytes > REMEMBERED_BYTES:
            most = max(self, key=lambda other: self._counted.get(other, 0))
            self[most].forget()
            self._count(most, 0)

    def let_go(self, number: int) -> None:
        """Closes a session, if there is one of that number."""
        self._count(number, 0)
        if (session := self.pop(number, None)) is not None:
            session.close()

    def _count(self, number: int, nbytes: int) -> None:
        self.nbytes += nbytes - self._counted.pop(number, 0)
        if nbytes:
            self._counted[number] = nbytes


class _Reader:
    """Answers requests."""

    def __init__(self, sock: socket.socket, cpu_s: float) -> None:
        from argus.capture.process.names import KernelNames

        self.sock, self.cpu_s = sock, cpu_s
        self.sessions = _Sessions()
        self.names = KernelNames()
        self.places: list[int] = []
        """Descriptors that are closed once they were sent."""
        self.given: list[int] = []
        """Descriptors that came with the request."""
        self.memories: dict[int, Any] = {}
        """Memory that names are read in, by the number that the parent has for it."""
        self.entries: list[tuple[str, str]] = []
        """What belongs into the cache of symbols on disk, which is the parent's to write."""

    def slow(self, path: str) -> None:
        send(self.sock, {"slow": path})

    # Each gets the request and the bytes beside it, and gives the answer, bytes and descriptors.

    def libraries(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.targets import find_libraries

        libraries = find_libraries(request["pid"])
        rows = []
        for one in libraries[:MAX_FDS]:
            status, layout = one.file.status, one.layout
            group = None if layout is None or layout.group is None else list(vars(layout.group).values())
            rows.append(
                {
                    "path": one.path,
                    "device": one.device,
                    "inode": one.inode,
                    "deleted": one.deleted,
                    "offsets": one.offsets,
                    "roles": one.roles,
                    "text_bytes": one.text_bytes,
                    "layout": None if layout is None else [layout.sizes, layout.numel, group],
                    "on_overlay": one.file.on_overlay,
                    "rank_offset": self._rank_offset(one, request["pid"]),
                    "status": [
                        *(status.st_mode, status.st_ino, status.st_dev, status.st_nlink, status.st_uid),
                        *(status.st_gid, status.st_size, status.st_ctime_ns, status.st_mtime_ns),
                    ],
                }
            )
            # What reads is closed here, where a file system that never answers is noticed, and given out to nobody.
            self.places.append(one.file.place())
        kept, self.entries = self.entries, []
        return {"libraries": rows, "unread": libraries.unread, "entries": kept}, b"", self.places

    def instructions(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        """Of a file that came with the request: the bytes at some offsets, and where functions may be probed."""
        from argus.capture.process.instructions import LONGEST, Code
        from argus.capture.process.mapped import open_referred

        code = Code(open_referred(self.given[0], request["device"]))
        heads = [code.read(offset, LONGEST).hex() for offset in request["heads"]]
        found = [code.places(entry, throws=throws) for entry, throws in request["functions"]]
        rows = [[[one.offset, one.code.hex(), one.below, sorted(one.intact)] for one in places] for places in found]
        return {"heads": heads, "places": rows}, b"", []

    @staticmethod
    def _rank_offset(library: Any, pid: int) -> int | None:
        """Where NCCL's communicators have their ranks; -1: its code does not say; None: it is no NCCL."""
        from argus.capture.process.mapped import owner_text
        from argus.capture.process.nccl import rank_offset

        if "libnccl" not in library.roles:
            return None
        offset = rank_offset(library.file, owner_text(pid))
        return -1 if offset is None else offset

    def facts(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.environment import process_facts

        return {"facts": process_facts(request["pid"])}, b"", []

    def interpreter(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.python.interpreter import find_interpreter

        return (*self._interpreter(find_interpreter(request["pid"])), [])

    @staticmethod
    def _interpreter(interpreter: Any) -> tuple[dict[str, Any], bytes]:
        if interpreter is None:
            return {"found": None}, b""
        fields = {name: getattr(interpreter, name) for name in ("version", "state", "path", "settled")}
        return {"found": fields}, b"" if interpreter.layout is None else interpreter.layout.tobytes()

    def open(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        self.sessions.let_go(request["session"])
        self.sessions[request["session"]] = _Session(request["pid"], request["memory"])
        return {}, b"", []

    def close(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        self.sessions.let_go(request["session"])
        return {}, b"", []

    def refresh(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        symbols = self._session(request).symbols
        return {"moved": symbols.refresh(), "grows": symbols.grows}, b"", []

    def find_python(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        return (*self._interpreter(self._session(request).find_python()), [])

    def threads(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        import numpy as np

        states = self._session(request).thread_states()
        tids = np.fromiter(states.keys(), "<u8", len(states))
        return {}, tids.tobytes() + np.fromiter(states.values(), "<u8", len(states)).tobytes(), []

    def collections(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        session = self._session(request)
        return {"counts": None if session.python is None else session.python.collections()}, b"", []

    def gil_holder(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        session = self._session(request)
        return {"holder": None if session.python is None else session.python.gil_holder()}, b"", []

    def learn(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        import numpy as np

        session, at = self._session(request), 0
        for size in request["sizes"]:
            if session.resolver is not None:
                session.resolver.learn(np.frombuffer(data[at : at + size], np.uint8))
            at += size
        return {}, b"", []

    def resolve(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        """Stacks: of each its flags, bytes of its frames, bytes of its addresses."""
        import numpy as np

        from argus.capture.blocked import assemble
        from argus.capture.python.code import DECODED_BYTES
        from argus.model.records import FRAME

        session, at, resolved = self._session(request), 0, []
        if request["budget"] and session.resolver is not None:
            session.resolver.budget = DECODED_BYTES
        for flags, frame_bytes, native_bytes in request["stacks"]:
            frames = np.frombuffer(data[at : at + frame_bytes], FRAME)
            at += frame_bytes
            native = np.frombuffer(data[at : at + native_bytes], "<u8")
            at += native_bytes
            stack = assemble(session.symbols, session.resolver, frames, native, flags)
            bounds = session.symbols.function(int(native[0])) if len(native) else None
            resolved.append([self._stack(stack), bounds])
        return {"stacks": resolved}, b"", []

    @staticmethod
    def _stack(stack: Any) -> list[Any]:
        return [stack.python, stack.native, [[f.kind, f.function, f.file, f.line] for f in stack.frames]]

    def blocked(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.blocked import read_blocked

        session = self._session(request)
        layout = None if session.interpreter is None else session.interpreter.layout
        states = session.thread_states(fresh=False) if session.python is not None else None
        one = read_blocked(
            session.pid, request["tid"], session.symbols, session.python, session.resolver, layout, states
        )
        return {"found": None if one is None else [one.stopped, one.what, self._stack(one.stack)]}, b"", []

    def file(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        """A small file of /proc/PID whose reading reads the process's memory."""
        from argus.capture.reader import progress

        pid, name = request["pid"], request["name"]
        if name not in ("environ", "cmdline", "exe"):
            raise ValueError(name)
        if name == "exe":
            with progress.look_up(progress.PROGRAM), open(f"/proc/{pid}/exe", "rb") as file:
                return {}, file.read(PROGRAM_BYTES), []
        progress.memory()
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return {}, file.read(MAX_BYTES), []

    def maps(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.reader import reader

        return {}, reader.maps(request["pid"], executable=request["executable"]), []

    def cupti(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.cupti import candidates

        return {"paths": candidates(request["pid"])}, b"", []

    def helper(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        """Where CUPTI's helper has its memory, and what lies there, not opened."""
        from argus.capture.process.cupti import open_helper

        where, place = open_helper(request["pid"], request["where"])
        self.places = [] if place < 0 else [place]
        return {"where": where}, b"", self.places

    def helper_memory(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.cupti import read_helper

        return {}, read_helper(request["pid"], request["where"], min(request["size"], MAX_BYTES)), []

    def texts(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        """Names in memory that is kept open; without any to read it is let go of."""
        from argus.capture.process.cupti import Texts

        key = request["key"]
        if request["pointers"] is None:
            if (old := self.memories.pop(key, None)) is not None:
                old.close()
            return {"sizes": []}, b"", []
        if key not in self.memories:
            self.memories[key] = Texts(request["pid"])
        found = self.memories[key].at(request["pointers"])
        sizes = [-1 if text is None else len(text) for text in found]
        return {"sizes": sizes}, b"".join(text or b"" for text in found), []

    def c_library(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.c_library import find_functions

        found = find_functions(request["pid"])
        return {"found": None if found is None else list(vars(found).values())}, b"", []

    def probed(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.instructions import probes_stand

        file = request["device"], request["inode"]
        return {"found": probes_stand(request["pid"], file, request["offsets"])}, b"", []

    def group(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.pytorch import GroupLayout, read_group

        group = read_group(request["pid"], request["address"], GroupLayout(*request["layout"]))
        return {"found": None if group is None else [group.name, group.rank, group.size]}, b"", []

    def place(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        from argus.capture.process.nccl import read_place

        place = read_place(request["pid"], request["address"], request["offset"])
        return {"found": None if place is None else [place.key, place.rank, place.size]}, b"", []

    def remember(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        self.names.remember(request["pid"])
        return {}, b"", []

    def forget(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        self.names.forget(request["pid"])
        return {}, b"", []

    def symbol(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        symbol = self.names._symbol(request["pid"], request["address"])
        return {"found": symbol is not None}, (symbol or "").encode(errors="replace"), []

    def string(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        memory = self.names._memory(request["pid"])
        string = None if memory is None else memory.string(request["address"])
        return {"found": string is not None}, string or b"", []

    def dead(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        """What does not answer: all of it."""
        from argus.capture.reader import progress

        progress.dead = set(request["what"])
        return {}, b"", []

    def hello(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        return {}, b"", []

    def _session(self, request: dict[str, Any]) -> _Session:
        session = self.sessions.get(request["session"])
        if session is None:
            raise OSError(errno.ESTALE, "no session")
        return session

    def answer(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes, list[int]]:
        answer, more, fds = _OPS[request["op"]](self, request, data)
        if (session := self.sessions.get(request.get("session", 0))) is not None:
            answer["counters"] = session.counters()
            self.sessions.used(request["session"])
        return answer, more, fds

    def _has_room(self) -> bool:
        """Whether another descriptor can be had."""
        try:
            os.close(os.dup(self.sock.fileno()))
        except OSError:
            return False
        return True

    def serve(self) -> None:
        """Answers until the other end is gone."""
        from argus.capture.reader import left_out, progress

        trim_due = time.monotonic() + _TRIM_S
        while True:
            head, self.given = receive_head(self.sock)
            _, size, more, _ = HEADER.unpack(head)
            request, data = json.loads(receive(self.sock, size)), receive(self.sock, more)
            progress.process, progress.owner = request["pid"], tuple(request["owner"])
            signal.setitimer(signal.ITIMER_PROF, self.cpu_s)  # its signal ends the process
            give: tuple[dict[str, Any], bytes, list[int]]
            try:
                give = self.answer(request, data)
            except OSError as reason:
                give = {"error": [reason.errno or errno.EIO, str(reason.strerror or reason)]}, b"", []
            except MemoryError:
                give = {"failed": "MemoryError"}, b"", []
            except Exception as reason:
                give = {"failed": f"{type(reason).__name__}: {reason}"[:500]}, b"", []
            while self.given:
                os.close(self.given.pop())
            signal.setitimer(signal.ITIMER_PROF, 0)
            progress.clear()
            give[0]["left_out"] = [[name, number] for name, pid, number in left_out.take() if pid == request["pid"]]
            give[0]["missed"] = sorted(progress.missed)
            progress.missed.clear()
            give[0]["full"] = not self._has_room()
            send(self.sock, *give)
            while self.places:
                os.close(self.places.pop())
            if time.monotonic() >= trim_due:
                memory.trim()
                trim_due = time.monotonic() + _TRIM_S


_Op = Callable[[_Reader, dict[str, Any], bytes], tuple[dict[str, Any], bytes, list[int]]]
_OPS: dict[str, _Op] = {
    name: getattr(_Reader, name)
    for name in (
        *("libraries", "interpreter", "open", "close", "refresh", "find_python", "threads", "collections"),
        *("gil_holder", "learn", "resolve", "blocked", "file", "facts", "group", "place", "dead", "hello"),
        *("remember", "forget", "symbol", "string"),
        *("maps", "cupti", "helper", "helper_memory", "texts", "c_library", "probed", "instructions"),
    )
}


def _leave(self: Any, symbols: list[str], names: dict[str, str], source: int) -> None:
    """In the place of ``Demangler._ask``: names that may grow stay symbols."""
    names.update((symbol, symbol) for symbol in symbols)


def _begin_reader(sock: socket.socket, cpu_s: float, memory: int) -> None:
    """In a fork of the nursery: one reader, until it ends."""
    from argus.capture.process import demangler, symbol_cache
    from argus.system import disk_cache

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    reader = _Reader(sock, cpu_s)
    # Names that may grow without bound are left to the parent, who has a process for them.
    demangler.Demangler._ask = _leave  # type: ignore[method-assign]
    disk_cache.keep = lambda path, body, newest: reader.entries.append((path.name, body.decode()))
    symbol_cache.on_slow = reader.slow
    limit(memory)
    confine()
    with contextlib.suppress(Closed, OSError):
        reader.serve()
    os._exit(0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    shared = mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # readers are reaped by the kernel
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("900")
    os.environ.clear()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would have rights of their own
    import argus.capture.blocked
    import argus.capture.process.c_library
    import argus.capture.process.cupti
    import argus.capture.process.names
    import argus.capture.process.nccl
    import argus.capture.process.targets  # noqa: F401
    from argus.capture.process import cupti, demangler, instructions
    from argus.capture.reader import progress
    from argus.system import disk_cache

    memory.settle()
    folder = sys.argv[5]
    disk_cache.folder = lambda kind: Path(folder, kind) if folder else None
    demangler._library()
    cupti.memory_device()  # readers make no files
    instructions.settle()
    progress.page = memoryview(shared)
    give_up_rights(USER + int(sys.argv[3]) % 0x01000000)
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # giving up a user has cleared it
    if os.getppid() != int(sys.argv[3]):
        return
    gc.collect()
    gc.freeze()
    while True:
        try:
            head, fds = receive_head(control)
        except Closed:
            return
        _, pid, _, _ = HEADER.unpack(head)
        if not fds:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            continue
        child = os.fork()
        if child == 0:
            control.close()
            try:
                _begin_reader(socket.socket(fileno=fds[0]), float(sys.argv[6]), int(sys.argv[7]))
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        control.sendall(struct.pack("<i", child))


if __name__ == "__main__":
    main()
