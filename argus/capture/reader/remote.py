"""What the reader process answers, as the objects that the modules give which it runs: libraries, interpreters, and
what names a process's stacks.

``RemoteSymbols``, ``RemotePython`` and ``RemoteResolver`` stand for ``Symbols``, ``PythonProcess`` and
``CodeResolver`` of one process, which are in the reader. Where it cannot read the process, its stacks have raw
addresses (``NO_SYMBOLS``).
"""

from __future__ import annotations

import contextlib
import itertools
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.blocked import Blocked, assemble, read_blocked
from argus.capture import nccl, reader
from argus.capture.demangler import shared as demangler
from argus.capture.mapped import File
from argus.capture.python import MAX_COUNT, MAX_THREADS, Interpreter
from argus.capture.pytorch import GroupLayout, Layout
from argus.capture.reader import Answer, Malformed, integers, text
from argus.capture.symbols import NativeFrame
from argus.capture.targets import Libraries, Library
from argus.records import FRAME, PYTHON
from argus.semantics.stacks import Frame, Stack

_AT_ONCE = 256 << 10
"""Bytes of code objects that wait for the next stacks."""
_FRAMES = 1 << 18
"""Frames of a stack that are believed."""
_KINDS = ("python", "native", "jit", "kernel", "vdso", "marker")
_STATES = ("complete", "cut", "rejected", "none", "leaf")


def _checked(answer: Answer, parse: Any) -> Any:
    """What ``parse`` makes of an answer. One that makes no sense ends the reader: it is broken.

    Raises:
        Unreadable: It makes no sense.
    """
    try:
        return parse(answer)
    except (Malformed, KeyError, TypeError, ValueError, IndexError, OverflowError) as reason:
        reader.shared.distrust()
        raise reader.Unreadable(f"an answer without sense: {reason}") from reason
    finally:
        answer.close()


# ---- libraries


def libraries(pid: int) -> Libraries:
    """As ``targets.find_libraries``."""
    return _checked(reader.shared.ask("libraries", pid), _libraries)  # type: ignore[no-any-return]


def _libraries(answer: Answer) -> Libraries:
    rows = answer.what["libraries"]
    if len(rows) != len(answer.fds):
        raise Malformed("libraries without descriptors")
    found = Libraries()
    for row in rows:
        mode, inode, device, links, uid, gid, size, ctime_ns, mtime_ns = integers(row["status"])
        status = SimpleNamespace(
            st_mode=mode,
            st_ino=inode,
            st_dev=device,
            st_nlink=links,
            st_uid=uid,
            st_gid=gid,
            st_size=size,
            st_ctime_ns=ctime_ns,
            st_mtime_ns=mtime_ns,
        )
        file = File.received(answer.fds.pop(0), status, bool(row["on_overlay"]))
        names = list(row["offsets"])
        layout = None
        if row["layout"] is not None:
            sizes, numel, group = row["layout"]
            integers([sizes, numel], 1 << 16)
            layout = Layout(sizes, numel, None if group is None else GroupLayout(*integers(group, 1 << 16)))
        offset = row["rank_offset"]
        if offset is not None:
            nccl.remember(file, integers([offset], 1 << 20)[0] if offset >= 0 else None)
        found.append(
            Library(
                text(row["path"]),
                file,
                text(row["device"], 32),
                integers([row["inode"]])[0],
                bool(row["deleted"]),
                dict(zip(names, integers([row["offsets"][name] for name in names], 1 << 63), strict=True)),
                tuple(text(role, 64) for role in row["roles"]),
                (size, ctime_ns),
                integers([row["text_bytes"]])[0],
                layout,
            )
        )
    found.unread = integers([answer.what["unread"]], 1 << 32)[0]
    reader.entries(answer.what["entries"])
    return found


# ---- interpreters


def interpreter(pid: int) -> Interpreter | None:
    """As ``python.find_interpreter``."""
    if not reader.shared.reads_memory(pid):
        raise reader.Unreadable(f"the memory of process {pid} does not answer")
    return _checked(reader.shared.ask("interpreter", pid), _interpreter)  # type: ignore[no-any-return]


def _interpreter(answer: Answer) -> Interpreter | None:
    found = answer.what["found"]
    if found is None:
        return None
    major, minor, micro = integers(found["version"], 1 << 16)
    layout = None
    if answer.data:
        if len(answer.data) != PYTHON.itemsize:
            raise Malformed("a layout")
        layout = np.frombuffer(answer.data, PYTHON).copy().reshape(())
    state = text(found["state"], 4096)
    return Interpreter((major, minor, micro), state, layout, text(found["path"]), bool(found["settled"]))


# ---- stacks


class _NoSymbols:
    """Names nothing: addresses stay what they are."""

    def verified(self, chain: NDArray[np.uint64]) -> tuple[int, bool]:
        return min(len(chain), 1), False

    def name(self, addresses: NDArray[np.uint64]) -> list[NativeFrame]:
        return [NativeFrame("", "[not read]", address, "", "native") for address in addresses.tolist()]


NO_SYMBOLS: Any = _NoSymbols()
_numbers = itertools.count(1)
"""Of sessions: a process that executes another program has a new one before its old one is closed."""


class RemoteSymbols:
    """A process in the reader; as ``Symbols``, and more.

    Args:
        pid: The process.

    Raises:
        OSError: It has ended, or may not be looked at.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._number = next(_numbers)
        self.counters: dict[str, int] = {}
        self.new_budget = False
        self._generation = -1
        self._memory = True
        self._python = False
        self._closed = False
        self._before: dict[str, int] = {}
        self._functions: dict[int, tuple[int, int] | None] = {}
        self._learned: list[bytes] = []
        self._learned_bytes = 0
        with contextlib.suppress(reader.Unreadable):  # without it there are raw addresses
            self._open()

    def _open(self) -> None:
        memory = reader.shared.reads_memory(self.pid)
        self._take(reader.shared.ask("open", self.pid, session=self._number, memory=memory)).close()
        self._generation, self._memory = reader.shared.generation, memory
        self._before = dict(self.counters)
        if self._python and memory:
            self._take(reader.shared.ask("find_python", self.pid, session=self._number)).close()

    def ask(self, op: str, data: bytes = b"", **more: Any) -> Answer:
        """As ``Reader.ask``; a reader that is new is introduced to the process."""
        if self._closed:
            raise reader.Unreadable(f"process {self.pid} is no longer read")
        if self._generation != reader.shared.generation or self._memory != reader.shared.reads_memory(self.pid):
            self._open()
        try:
            return self._take(reader.shared.ask(op, self.pid, data, session=self._number, **more))
        except reader.Unreadable:
            if not reader.shared.reads(self.pid) or not reader.shared.on:
                raise
            self._open()  # in a reader that knows what the last one hung on
            return self._take(reader.shared.ask(op, self.pid, data, session=self._number, **more))

    def _take(self, answer: Answer) -> Answer:
        counted = answer.what.get("counters", {})
        if isinstance(counted, dict) and len(counted) < 64:
            for name, value in counted.items():
                if isinstance(value, int) and 0 <= value < 1 << 62:
                    self.counters[text(name, 64)] = self._before.get(name, 0) + value
        return answer

    def refresh(self) -> bool:
        """As ``Symbols.refresh``."""
        try:
            return bool(_checked(self.ask("refresh"), lambda answer: answer.what["moved"]))
        except OSError:
            return False

    def find_python(self) -> Interpreter | None:
        """The process's interpreter, whose frames are named from then on.

        Raises:
            OSError: It ended, or cannot be read.
        """
        if not reader.shared.reads_memory(self.pid):
            raise reader.Unreadable(f"the memory of process {self.pid} does not answer")
        found: Interpreter | None = _checked(self.ask("find_python"), _interpreter)
        self._python = found is not None and found.layout is not None
        return found

    def learn(self, record: bytes) -> None:
        """As ``CodeResolver.learn``, with the next stack."""
        self._learned.append(record)
        self._learned_bytes += len(record)
        if self._learned_bytes > _AT_ONCE:
            self._teach()

    def _teach(self) -> None:
        learned, self._learned, self._learned_bytes = self._learned, [], 0
        if learned:
            self.ask("learn", b"".join(learned), sizes=[len(one) for one in learned]).close()

    def assemble(self, frames: NDArray[np.void], native: NDArray[np.uint64], flags: int) -> Stack:
        """As ``blocked.assemble``; with raw addresses where the reader cannot answer."""
        frame_bytes, native_bytes = frames.tobytes(), native.tobytes()
        try:
            self._teach()
            budget, self.new_budget = self.new_budget, False
            answer = self.ask(
                "resolve",
                frame_bytes + native_bytes,
                stacks=[[flags, len(frame_bytes), len(native_bytes)]],
                budget=budget,
            )
            stack, bounds = _checked(answer, self._stack_and_bounds)
        except OSError:
            return assemble(NO_SYMBOLS, None, np.empty(0, FRAME), native, flags)
        if len(native):
            if len(self._functions) > 1024:
                self._functions.clear()
            self._functions[int(native[0])] = bounds
        return stack  # type: ignore[no-any-return]

    def _stack_and_bounds(self, answer: Answer) -> tuple[Stack, tuple[int, int] | None]:
        ((stack, bounds),) = answer.what["stacks"]
        if bounds is not None:
            begin, end = integers(bounds)
            if begin >= end:
                raise Malformed("a function")
            bounds = begin, end
        return self._stack(stack), bounds

    def _stack(self, found: Any) -> Stack:
        python, native, rows = found
        if python not in _STATES or native not in _STATES or len(rows) > _FRAMES:
            raise Malformed("a stack")
        frames = tuple(_frame(*map(str, row[:3]), *integers(row[3:], 1 << 32)) for row in rows)
        # What the reader leaves to the process that has limits for each name.
        if any(frame.function.startswith("_Z") for frame in frames):
            names = demangler.names([frame.function for frame in frames], self.pid)
            frames = tuple(
                Frame(frame.kind, name, frame.file, frame.line) for frame, name in zip(frames, names, strict=True)
            )
        return Stack(frames, python, native)

    def function(self, address: int) -> tuple[int, int] | None:
        """As ``Symbols.function``, of the leaf of a stack that was assembled."""
        return self._functions.pop(address, None)

    def blocked(self, tid: int) -> Blocked | None:
        """As ``blocked.read_blocked``; with raw addresses where the reader cannot answer.

        Raises:
            OSError: The thread has ended.
        """
        try:
            return _checked(self.ask("blocked", tid=tid), self._blocked)  # type: ignore[no-any-return]
        except (FileNotFoundError, ProcessLookupError):
            raise
        except OSError:
            return read_blocked(self.pid, tid, NO_SYMBOLS, None, None, None)

    def _blocked(self, answer: Answer) -> Blocked | None:
        found = answer.what["found"]
        if found is None:
            return None
        stopped, what, stack = found
        return Blocked(bool(stopped), integers([what], 1 << 32)[0], self._stack(stack))

    def close(self) -> None:
        """As ``Symbols.close``."""
        if not self._closed and self._generation == reader.shared.generation:
            with contextlib.suppress(OSError):
                reader.shared.ask("close", self.pid, session=self._number).close()
        self._closed = True


@lru_cache(maxsize=16_384)
def _frame(kind: str, function: str, file: str, line: int) -> Frame:
    """A frame; equal ones are one object."""
    if kind not in _KINDS:
        raise Malformed("a kind of frame")
    return Frame(kind, text(function), text(file), line)


class RemotePython:
    """As ``PythonProcess``, of which an interpreter was found by ``RemoteSymbols.find_python``."""

    def __init__(self, symbols: RemoteSymbols) -> None:
        self.symbols = self._symbols = symbols

    def thread_states(self) -> dict[int, int]:
        """As ``PythonProcess.thread_states``; nothing where it cannot be read."""
        try:
            return _checked(self._symbols.ask("threads"), _threads)  # type: ignore[no-any-return]
        except OSError:
            return {}

    def collections(self) -> tuple[int, ...] | None:
        """As ``PythonProcess.collections``."""
        try:
            return _checked(self._symbols.ask("collections"), _collections)  # type: ignore[no-any-return]
        except OSError:
            return None

    def close(self) -> None:
        """Nothing: the reader lets go of it with the process."""


def _threads(answer: Answer) -> dict[int, int]:
    words = np.frombuffer(answer.data, "<u8")
    if len(words) % 2 or len(words) > 2 * MAX_THREADS:
        raise Malformed("threads")
    tids, states = words[: len(words) // 2].tolist(), words[len(words) // 2 :].tolist()
    return dict(zip(integers(tids, 1 << 32), states, strict=True))


def _collections(answer: Answer) -> tuple[int, ...] | None:
    counts = answer.what["counts"]
    return None if counts is None else tuple(integers(counts[:3], MAX_COUNT + 1))


class RemoteResolver:
    """As ``CodeResolver``: what of it is used while stacks are sampled."""

    def __init__(self, symbols: RemoteSymbols) -> None:
        self._symbols = symbols
        self.counters: dict[str, int] = {}
        """Among the symbols' own."""

    def learn(self, record: NDArray[np.uint8]) -> None:
        """As ``CodeResolver.learn``."""
        with contextlib.suppress(OSError):
            self._symbols.learn(record.tobytes())

    @property
    def budget(self) -> int:
        """As ``CodeResolver.budget``, to be set only."""
        return 0

    @budget.setter
    def budget(self, _: int) -> None:
        self._symbols.new_budget = True


def proc_file(pid: int, name: str) -> bytes:
    """A file of /proc/PID: "environ" or "cmdline", which lie in the process's memory.

    Raises:
        OSError: It has ended, may not be looked at, or its memory does not answer.
    """
    if not reader.shared.reads_memory(pid):
        raise reader.Unreadable(f"the memory of process {pid} does not answer")
    answer = reader.shared.ask("file", pid, name=name)
    answer.close()
    return answer.data


def found_in_memory(op: str, pid: int, count: int, **more: Any) -> list[Any] | None:
    """What ``group`` and ``place`` answer, of so many parts; None: it cannot be read."""
    if not reader.shared.reads_memory(pid):
        return None

    def parse(answer: Answer) -> list[Any] | None:
        found = answer.what["found"]
        if found is not None and (not isinstance(found, list) or len(found) != count):
            raise Malformed(op)
        return found

    try:
        return _checked(reader.shared.ask(op, pid, **more), parse)  # type: ignore[no-any-return]
    except OSError:
        return None
