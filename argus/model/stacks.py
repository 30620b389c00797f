"""A thread's stack: frames with names."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from argus.model.records import (
    STACK_IDLE_PYTHON,
    STACK_NATIVE_CUT,
    STACK_PYTHON,
    STACK_PYTHON_CUT,
    STACK_PYTHON_REJECTED,
)


class PythonName(Protocol):
    """A Python frame with its names (``capture.python.code.PythonFrame``)."""

    @property
    def function(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


class NativeName(Protocol):
    """A native frame with its names (``capture.process.symbols.NativeFrame``)."""

    @property
    def function(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class Frame:
    """One frame.

    Attributes:
        kind: python, native, jit, kernel, or marker: a note in parentheses that frames are missing, or what the thread
            was doing besides.
        function: Its name; of a native frame without one, the module and the offset in it.
        file: Source file of a Python frame, executable or library of another; empty: not known.
        line: Of a Python frame; 0: none.
    """

    kind: str
    function: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Stack:
    """A stack.

    Attributes:
        frames: Root first.
        python: complete; cut: the frames nearest to the root are missing; rejected: there were some that could not be
            read; none: no Python runs in the thread.
        native: complete; leaf: only where the thread was; cut: the same, the chain being too long; none: not known.
    """

    frames: tuple[Frame, ...]
    python: str
    native: str

    @functools.cached_property
    def id(self) -> int:
        """Hash of the content (BLAKE2b, 64 bits), the same on every rank, host and run; never 0: "no stack"."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.python, self.native, *(x for f in self.frames for x in (f.kind, f.function, f.file, f.line))):
            text = str(part).encode("utf-8", "backslashreplace")
            digest.update(len(text).to_bytes(4, "little") + text)
        return int.from_bytes(digest.digest(), "little") or 1

    @property
    def deepest_python(self) -> Frame | None:
        """The Python frame nearest to the leaf."""
        return next((frame for frame in reversed(self.frames) if frame.kind == "python"), None)


UNRESOLVED = "(unresolved)"
"""Function of a Python frame that could not be named."""
CUT = "(callers of this are missing: the stack is too deep)"
REJECTED = "(Python frames could not be read)"
"""Markers: at the root of a stack that lacks frames there, lest what is left be taken for the whole."""


def merge(
    python: Sequence[PythonName | None],
    entries: Sequence[bool],
    native: Sequence[NativeName],
    native_complete: bool,
    flags: int,
    is_interpreter: Callable[[NativeName], bool] | Sequence[bool],
) -> Stack:
    """One stack of Python and native frames.

    The interpreter runs a Python function that Python called in the same native frame (3.11 and later), and begins a
    native frame of its own (the eval loop) for one that C code called. So with a complete native chain each frame of
    the eval loop stands for the Python frames from one that C called up to the next such. Where the two sides do not
    count alike (the thread was about to begin or leave a function) nothing is guessed: the Python frames, then the
    native leaf.

    Args:
        python: Python frames, leaf first; None: could not be named.
        entries: For each: C code called it (``FRAME_ENTRY``; before 3.11: all).
        native: Native frames that may be believed, leaf first.
        native_complete: Whether they reach down to the thread's entry.
        flags: ``STACK.flags``.
        is_interpreter: Which native frames are the eval loop: for each, or a function that decides.
    """
    evaluating = [is_interpreter(frame) for frame in native] if callable(is_interpreter) else list(is_interpreter)
    upper = [_python(frame) for frame in reversed(python)]
    if flags & STACK_PYTHON_REJECTED:
        python_state, upper = "rejected", []
    elif flags & STACK_PYTHON_CUT:
        python_state, upper = "cut", [Frame("marker", CUT), *upper]
    else:
        # Frames without a flag would be a defect of whoever calls; losing them would be another.
        python_state = "complete" if upper or (flags & STACK_PYTHON and not flags & STACK_IDLE_PYTHON) else "none"
    if not native:
        native_state = "cut" if flags & STACK_NATIVE_CUT else "none"
        lower, running = [], [False]
    else:
        native_state = "complete" if native_complete else "cut" if flags & STACK_NATIVE_CUT else "leaf"
        lower, running = [_native(frame) for frame in reversed(native)], evaluating[::-1]
    if native_state == "complete":
        if not upper:
            return Stack(tuple(lower), python_state, native_state)
        if python_state == "complete":
            segments = _segments(upper, entries[::-1])
            if segments is not None and len(segments) == sum(running):
                following = iter(segments)
                woven = [
                    x
                    for frame, loop in zip(lower, running, strict=True)
                    for x in (next(following) if loop else [frame])
                ]
                return Stack(tuple(woven), python_state, native_state)
        native_state = "leaf"
    leaf = lower[-1:] if not (running[-1] and upper) else []
    if python_state == "rejected":
        upper = [Frame("marker", REJECTED)]
    return Stack((*upper, *leaf), python_state, native_state)


def _segments(frames: Sequence[Frame], entries: Sequence[bool]) -> list[list[Frame]] | None:
    """Frames, root first, cut before each entry; None: the first is none."""
    if not entries or not entries[0]:
        return None
    segments: list[list[Frame]] = []
    for frame, entry in zip(frames, entries, strict=True):
        if entry:
            segments.append([])
        segments[-1].append(frame)
    return segments


def _python(frame: PythonName | None) -> Frame:
    if frame is None:
        return Frame("python", UNRESOLVED)
    return Frame("python", frame.function, frame.file, max(frame.line, 0))


def _native(frame: NativeName) -> Frame:
    kind = "jit" if frame.kind == "jit" else "native"
    if frame.function:
        return Frame(kind, frame.function, frame.module)
    if frame.module.startswith("["):
        # Memory without a file lies elsewhere in each process: the offset would separate equal stacks.
        return Frame(kind, frame.module, frame.module)
    return Frame(kind, f"{frame.module.rpartition('/')[2] or '?'}+{frame.offset:#x}", frame.module)
