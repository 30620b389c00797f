"""Demangles C++ symbols, in a child process, since a traced process may name its functions as it likes.

The name of a symbol of 300 bytes may have gigabytes (each of its parts can stand for all that came before), and takes
as long. Symbols that cannot, since they refer to few parts of themselves, are demangled here; others in a process with
limits (``demangle_child``), which is asked for a name, waited for briefly, and started anew when it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MAX_NAME = 4096
"""Characters of a name that are kept; a longer one ends in "…" and a checksum of its symbol, so that two differ."""
MAX_SYMBOL = 1 << 14
"""Bytes of a symbol that is demangled: templates make some of thousands."""
CACHE_BYTES = 16 << 20
"""What is remembered of names, with their symbols."""
CPU_S = 0.1
"""CPU time of the child for a symbol. PyTorch's longest take 0.2 ms."""
CHILD_BYTES = 64 << 20
"""Memory of the child beyond what it needs to start."""
WAIT_S = 1.0
"""Longest wait for the answers to what was sent: a busy node may starve the child, and the rings hold a second."""
SLOW_S = 0.01
"""CPU time of the child that no name of an honest program takes: 50 times PyTorch's longest."""
STRIKES = 3
"""So many symbols of a process may take so long, end the child, or not be answered; what it brings after that stays a
symbol."""
SAVED_S = 1.0
"""Time for the symbols of a process: what it may take at once, enough for 25,000 large ones or 100,000 small ones of
libtorch."""
BUSY = 5
"""A process pays for so many times the CPU time of the child, not for all that a busy node makes of it."""
WAITED = 2
"""But the loop waits for no longer than so many times what a process may take."""
LEAST_S = 20e-6
"""What a symbol counts at least: the child's clock has ticks."""
REFILL = 0.05
"""What a process may take on and on, as a share of the time."""
_SAFE_WORK = 1 << 16
"""A symbol whose name has fewer characters than this, whatever it says, is demangled here."""
_KEPT_SOURCES = 4096
_AT_ONCE = 1 << 15
"""Bytes of symbols sent before answers are read: less than a pipe holds, so that nobody waits for the other."""
_SYMBOLS_AT_ONCE = 8
"""Symbols sent before answers are read: all of them may take ``CPU_S``."""
_SMALL_AT_ONCE = 64
"""Symbols demangled here before the time is looked at again."""
_PIECE = 64
"""Bytes that an entry of the cache takes besides its strings."""

_ANSWER = 12
"""Bytes of the child's answer before the name."""
_REFERENCE = re.compile(r"S[0-9A-Z]*_|T(?:L[0-9]*_)?[0-9]*_")
"""What stands for parts that came before: substitutions and template parameters (Itanium C++ ABI, 5.1.10, 5.1.5.8)."""
_REPEATS = re.compile(r"Dp|sp|cv|f[lrLR]|sZ|sP")
"""Pack and fold expansions, which repeat what they hold, and conversion operators, which name their type anew."""


def is_small(symbol: str) -> bool:
    """Whether a symbol's name has no more than ``_SAFE_WORK`` characters: each reference doubles it at most."""
    references = len(_REFERENCE.findall(symbol))
    return len(symbol) << min(references, 32) <= _SAFE_WORK and not _REPEATS.search(symbol)


def shortened(name: str, symbol: str) -> str:
    """A name of at most ``MAX_NAME`` characters; of a longer one the rest is replaced by a checksum of its symbol."""
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}… [{zlib.crc32(symbol.encode(errors='replace')):08x}]"


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    return library


@cache
def _library_path() -> str:
    """Where this process found libstdc++: not every Python's search path has it."""
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as lines:
        for line in lines:
            path = os.fsdecode(line.split(None, 5)[-1].rstrip(b"\n"))
            if path.rpartition("/")[2].startswith("libstdc++.so.6"):
                return path
    return "libstdc++.so.6"


class Child:
    """The process that demangles what may be large. It begins when it is first needed, and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.ended = 0
        """How often it was ended: by its limits, or since it did not answer."""

    def begin(self) -> None:
        """Starts it, unless it runs: whoever asks first need not pay for that. ``ask`` reports what fails."""
        with contextlib.suppress(OSError):
            self._process = self._process or self._begin()

    def ask(self, symbols: Sequence[str]) -> list[tuple[str | None, float]]:
        """Names of symbols, and the CPU time that each took, s, in ticks of the kernel's clock. A name that is empty:
        it is none; None: it could not be had within the limits. What comes after such a one is not asked for: the
        answers are fewer then."""
        names: list[tuple[str | None, float]] = []
        try:
            process = self._process or self._begin()
            assert process.stdin is not None
            raw = [symbol.encode(errors="replace") for symbol in symbols]
            process.stdin.write(b"".join(struct.pack("<I", len(each)) + each for each in raw))
            process.stdin.flush()
            until = time.monotonic() + WAIT_S
            for _ in raw:
                status, length, cpu_us = struct.unpack("<iII", self._read(process, _ANSWER, until))
                name = self._read(process, length, until) if length else b""
                names.append((name.decode(errors="replace") if status == 0 else "", cpu_us / 1e6))
        except (OSError, EOFError, TimeoutError):
            self.ended += 1
            self.close()
            names.append((None, 0.0))
        return names

    def close(self) -> None:
        """Ends it, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def forget(self) -> None:
        """In a forked child: the process is the parent's, and so are its answers."""
        process, self._process = self._process, None
        if process is None:
            return
        process.returncode = 0  # it is nobody's to wait for here
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    os.close(pipe.fileno())

    def _begin(self) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("demangle_child.py"))
        limits = [str(CPU_S), str(CHILD_BYTES), str(4 * MAX_NAME + 4), _library_path()]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        # Of a start, not of an answer: that takes some 30 ms of CPU, and a busy node longer.
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            assert self._process.stdin is not None
            self._process.stdin.write(struct.pack("<I", 0))
            self._process.stdin.flush()
            self._read(self._process, _ANSWER, time.monotonic() + 10 * WAIT_S)
        return self._process

    @staticmethod
    def _read(process: subprocess.Popen[bytes], size: int, until: float) -> bytes:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        data = b""
        while len(data) < size:
            if not ready.poll(max(until - time.monotonic(), 0) * 1000):
                raise TimeoutError
            part = os.read(fd, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


class Demangler:
    """Names of C++ symbols, with bounds. Any thread may use it.

    Attributes:
        given_up: Symbols whose names could not be had within the limits, or of processes that brought too many such or
            whose time was used up.
        shortened: Names that were longer than ``MAX_NAME``.
    """

    def __init__(self) -> None:
        self.given_up = self.shortened = 0
        self._child = Child()
        self._lock = threading.RLock()
        self._cache: OrderedDict[str, str] = OrderedDict()
        self._cached_bytes = 0
        self._strikes: Counter[int] = Counter()
        self._accounts: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Of the processes that took time lately: what they had left, s, and when."""

    @property
    def restarts(self) -> int:
        """How often the child was ended by its limits."""
        return self._child.ended

    @property
    def cached_bytes(self) -> int:
        """What is remembered."""
        return self._cached_bytes

    def names(self, symbols: Sequence[str], source: int = 0) -> list[str]:
        """Symbols as people read them; what is no C++ symbol unchanged, but for its length.

        Args:
            symbols: Of any number.
            source: Whose they are, a process: if some of its symbols exceed the limits, the rest is not tried; nor is
                it while the process's time is used up (``SAVED_S``, ``REFILL``).
        """
        with self._lock:
            names: dict[str, str] = {}
            small: list[str] = []
            large: list[str] = []
            for symbol in dict.fromkeys(symbols):
                if (cached := self._cache.get(symbol)) is not None:
                    self._cache.move_to_end(symbol)
                    names[symbol] = cached
                elif not symbol.startswith("_Z") or len(symbol) > MAX_SYMBOL or "\0" in symbol:
                    names[symbol] = self._kept(symbol, symbol)
                elif is_small(symbol):
                    small.append(symbol)
                else:
                    large.append(symbol)
            self._demangle(small, names, source)
            self._ask(large, names, source)
            return [names[symbol] for symbol in symbols]

    def forget(self, source: int) -> None:
        """A process has ended: its number may be another's."""
        with self._lock:
            self._strikes.pop(source, None)
            self._accounts.pop(source, None)

    def close(self) -> None:
        """Ends the child; it begins anew when it is needed."""
        with self._lock:
            self._child.close()

    def after_fork(self) -> None:
        """In a forked child of this process."""
        self._lock = threading.RLock()
        self._child.forget()

    def _left_s(self, source: int) -> float:
        """How long symbols of a process may take now."""
        if source not in self._accounts:
            return SAVED_S
        left_s, since = self._accounts[source]
        return min(left_s + REFILL * (time.monotonic() - since), SAVED_S)

    def _spend(self, source: int, seconds: float) -> None:
        self._accounts[source] = self._left_s(source) - seconds, time.monotonic()
        self._accounts.move_to_end(source)
        if len(self._accounts) > _KEPT_SOURCES:
            self._accounts.popitem(last=False)

    def _leave(self, symbols: Sequence[str], names: dict[str, str]) -> None:
        """They stay symbols, for this process: another one's are asked for."""
        self.given_up += len(symbols)
        names.update((symbol, self._kept(symbol, symbol)) for symbol in symbols)

    def _demangle(self, symbols: list[str], names: dict[str, str], source: int) -> None:
        """Demangles small ones, here."""
        for first in range(0, len(symbols), _SMALL_AT_ONCE):
            if self._left_s(source) <= 0:
                self._leave(symbols[first:], names)
                return
            begun_s = time.thread_time()
            for symbol in symbols[first : first + _SMALL_AT_ONCE]:
                names[symbol] = self._keep(symbol, _demangle_here(symbol) or symbol)
            self._spend(source, time.thread_time() - begun_s)

    def _ask(self, symbols: list[str], names: dict[str, str], source: int) -> None:
        """Has the child demangle them, a few at a time."""
        while symbols:
            if self._strikes[source] >= STRIKES or self._left_s(source) <= 0:
                self._leave(symbols, names)
                return
            count, size = 0, 0
            while count < min(len(symbols), _SYMBOLS_AT_ONCE) and size + len(symbols[count]) <= _AT_ONCE:
                size += 4 * len(symbols[count]) + 4
                count += 1
            self._child.begin()
            begun = time.monotonic()
            answers = self._child.ask(symbols[: max(count, 1)])
            waited_s = time.monotonic() - begun
            cpu_s = sum(max(each_s, LEAST_S) for _, each_s in answers)
            busy_s = max(min(waited_s, BUSY * cpu_s), waited_s / WAITED)
            # Of an end of the child nobody knows the CPU time.
            self._spend(source, waited_s if answers[-1][0] is None else busy_s)
            _waits.seconds = waits_s() + waited_s
            for symbol, (name, cpu_s) in zip(symbols, answers, strict=False):
                self.given_up += name is None
                if name is None or cpu_s >= SLOW_S:
                    if len(self._strikes) >= _KEPT_SOURCES:
                        self._strikes.clear()
                    self._strikes[source] += 1
                names[symbol] = self._keep(symbol, name or symbol)
            symbols = symbols[len(answers) :]

    def _kept(self, symbol: str, name: str) -> str:
        if len(name) <= MAX_NAME:
            return name
        self.shortened += 1
        return shortened(name, symbol)

    def _keep(self, symbol: str, name: str) -> str:
        name = self._cache[symbol] = self._kept(symbol, name)
        self._cached_bytes += len(symbol) + len(name) + _PIECE
        while self._cached_bytes > CACHE_BYTES:
            old, gone = self._cache.popitem(last=False)
            self._cached_bytes -= len(old) + len(gone) + _PIECE
        return name


_waits = threading.local()


def waits_s() -> float:
    """How long this thread has waited for names, s, since it began: no clock of its CPU time shows it."""
    waited_s: float = getattr(_waits, "seconds", 0.0)
    return waited_s


def _demangle_here(symbol: str) -> str:
    library = _library()
    if library is None:
        return ""
    status = ctypes.c_int()
    pointer = library.__cxa_demangle(symbol.encode(errors="replace"), None, None, ctypes.byref(status))
    if not pointer:
        return ""
    name: str = ctypes.string_at(pointer).decode(errors="replace")
    library.free(pointer)
    return name


shared = Demangler()
"""The one of this process."""
os.register_at_fork(after_in_child=lambda: shared.after_fork())
