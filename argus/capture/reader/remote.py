"""What names a process's stacks, where the reader process does the reading.

``RemoteSymbols``, ``RemotePython`` and ``RemoteResolver`` stand for ``Symbols``, ``PythonProcess`` and
``CodeResolver`` of one process, which are in the reader. Where it cannot read the process, its stacks have raw
addresses (``NO_SYMBOLS``).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.capture.blocked import Blocked, assemble, read_state
from argus.capture.bounded import Bounded, text_bytes
from argus.capture.process.demangler import shared as demangler
from argus.capture.process.symbols import NativeFrame
from argus.capture.python.code import CHAIN_FRAMES
from argus.capture.python.interpreter import MAX_COUNT, MAX_THREADS, Interpreter, interpreter_of
from argus.capture.reader import reader
from argus.capture.reader.reader import Answer, Malformed, integers, text
from argus.model.records import FRAME, NATIVE_FRAMES
from argus.model.stacks import Frame, Stack

_AT_ONCE = 256 << 10
"""Bytes of code objects that wait for the next stacks."""
_FRAMES = CHAIN_FRAMES + NATIVE_FRAMES + 16
"""Frames of a stack that are believed: Python's, native ones, and markers."""
_FRAME_BYTES = 300
"""Of a frame that is kept, without its texts."""
_KINDS = ("python", "native", "jit", "kernel", "vdso", "marker")
_STATES = ("complete", "cut", "rejected", "none", "leaf")


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
        self.grows = True  # for all that is known
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
        except OSError as failure:
            # ESTALE: another thread's question has ended the reader since, and this one begins.
            again = isinstance(failure, reader.Unreadable) or failure.errno == errno.ESTALE
            if not again or not reader.shared.reads(self.pid) or not reader.shared.on:
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
            moved, self.grows = reader.checked(
                self.ask("refresh"), lambda answer: (bool(answer.what["moved"]), bool(answer.what["grows"]))
            )
        except OSError:
            self.grows = True
            return False
        return bool(moved)

    def find_python(self) -> Interpreter | None:
        """The process's interpreter, whose frames are named from then on.

        Raises:
            OSError: It ended, or cannot be read.
        """
        if not reader.shared.reads_memory(self.pid):
            raise reader.Unreadable(f"the memory of process {self.pid} does not answer")
        interpreter: Interpreter | None = reader.checked(self.ask("find_python"), interpreter_of)
        self._python = interpreter is not None and interpreter.layout is not None
        return interpreter

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
            stack, bounds = reader.checked(answer, self._stack_and_bounds)
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

    def _stack(self, fields: Any) -> Stack:
        python, native, rows = fields
        if python not in _STATES or native not in _STATES or len(rows) > _FRAMES:
            raise Malformed("a stack")
        frames = tuple(
            _frame(text(kind, 64), text(function), text(file), integers([line], 1 << 32)[0])
            for kind, function, file, line in rows
        )
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
        """As ``blocked.read_blocked``; without a stack where the reader cannot answer.

        Raises:
            OSError: The thread has ended.
        """
        try:
            return reader.checked(self.ask("blocked", tid=tid), self._blocked)  # type: ignore[no-any-return]
        except (FileNotFoundError, ProcessLookupError):
            raise
        except OSError:
            return read_state(self.pid, tid)

    def _blocked(self, answer: Answer) -> Blocked | None:
        fields = answer.what["found"]
        if fields is None:
            return None
        stopped, what, stack = fields
        return Blocked(bool(stopped), integers([what], 1 << 32)[0], self._stack(stack))

    def close(self) -> None:
        """As ``Symbols.close``."""
        if not self._closed and self._generation == reader.shared.generation:
            with contextlib.suppress(OSError):
                reader.shared.ask("close", self.pid, session=self._number).close()
        self._closed = True


_frames = Bounded[tuple[str, str, str, int], Frame](16_384, 16 << 20)


def _frame(kind: str, function: str, file: str, line: int) -> Frame:
    """A frame; equal ones are one object, if they are met often."""
    key = kind, function, file, line
    frame = _frames.get(key)
    if frame is None:
        if kind not in _KINDS:
            raise Malformed("a kind of frame")
        frame = Frame(kind, text(function), text(file), line)
        _frames.keep(key, frame, _FRAME_BYTES + text_bytes(function) + text_bytes(file))
    return frame


class RemotePython:
    """As ``PythonProcess``, of which an interpreter was found by ``RemoteSymbols.find_python``."""

    def __init__(self, symbols: RemoteSymbols) -> None:
        self.symbols = self._symbols = symbols

    def thread_states(self) -> dict[int, int]:
        """As ``PythonProcess.thread_states``; nothing where it cannot be read."""
        try:
            return reader.checked(self._symbols.ask("threads"), _threads)  # type: ignore[no-any-return]
        except OSError:
            return {}

    def collections(self) -> tuple[int, ...] | None:
        """As ``PythonProcess.collections``."""
        try:
            return reader.checked(self._symbols.ask("collections"), _collections)  # type: ignore[no-any-return]
        except OSError:
            return None

    def gil_holder(self) -> int | None:
        """As ``PythonProcess.gil_holder``."""
        try:
            return reader.checked(self._symbols.ask("gil_holder"), _holder)  # type: ignore[no-any-return]
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


def _holder(answer: Answer) -> int | None:
    holder = answer.what["holder"]
    return None if holder is None else integers([holder], 1 << 32)[0]


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
