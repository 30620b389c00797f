"""A thread that does not run, read from outside: its stack cannot change before it runs again, and the kernel's count
of its switches shows whether it did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argus.capture import offcpu
from argus.capture.bounded import Bounded, text_bytes
from argus.capture.process.symbols import NativeFrame, Symbols
from argus.capture.process.targets import PROC
from argus.capture.python.code import NO_CHAIN, Chain, CodeResolver
from argus.capture.python.interpreter import PythonProcess
from argus.model import records
from argus.model.stacks import Stack, merge
from argus.system.proc import field_of, read_file

TRIES = 5
"""A thread that ran while it was read is read again."""
_merged_stacks = Bounded[tuple[Chain, tuple[NativeFrame, ...], bool, int], Stack](8192, 64 << 20)
_FRAME_BYTES = 320
"""Of a frame without its texts, with what it was made of: the key of ``_merged_stacks`` has that."""


@dataclass(frozen=True)
class Blocked:
    """A thread that does not run.

    Attributes:
        stopped: By a signal or a debugger; else it waits.
        what: As in ``records.STACK_COUNT``: why it is off the CPU.
        stack: Where it is.
    """

    stopped: bool
    what: int
    stack: Stack

    @property
    def reason(self) -> str:
        """Why, in a word (``argus.capture.offcpu``)."""
        return "stopped" if self.stopped else offcpu.reason(self.what)


def assemble(
    symbols: Symbols,
    resolver: CodeResolver | None,
    frames: NDArray[np.void],
    native: NDArray[np.uint64],
    flags: int,
) -> Stack:
    """A stack with names.

    Args:
        symbols, resolver: Of its process; no resolver: it runs no CPython.
        frames: ``records.FRAME``, leaf first.
        native: User addresses, leaf first.
        flags: ``STACK.flags``.
    """
    python = resolver.chain(frames) if resolver is not None and len(frames) else NO_CHAIN
    believed, complete = symbols.verified(native) if len(native) else (0, False)
    named = map(_without_place, symbols.name(native[:believed])) if believed else ()
    if python.cut:
        flags |= records.STACK_PYTHON_CUT
    return _merged(python, tuple(named), complete, flags)


@lru_cache(maxsize=8192)
def _without_place(frame: NativeFrame) -> NativeFrame:
    """Where in a function is left out: without it most stacks are stacks that were met before."""
    return replace(frame, offset=0) if frame.function else frame


def _merged(
    python: Chain,
    native: tuple[NativeFrame, ...],
    complete: bool,
    flags: int,
) -> Stack:
    key = python, native, complete, flags
    stack = _merged_stacks.get(key)
    if stack is None:
        loops = [frame.evaluates for frame in native]
        stack = merge(python.frames, python.entries, native, complete, flags, loops)
        _merged_stacks.keep(key, stack, stack_bytes(stack))
    return stack


def stack_bytes(stack: Stack) -> int:
    """What a stack takes in memory, about, with the frames that it was made of, if it shares nothing with others."""
    texts = sum(text_bytes(frame.function) + text_bytes(frame.file) for frame in stack.frames)
    return _FRAME_BYTES * (1 + len(stack.frames)) + texts


def read_blocked(
    pid: int,
    tid: int,
    symbols: Symbols,
    python: PythonProcess | None,
    resolver: CodeResolver | None,
    layout: NDArray[np.void] | None,
    states: dict[int, int] | None = None,
) -> Blocked | None:
    """What a thread that does not run is doing; None: it runs.

    Args:
        pid, tid: The thread, as the host numbers it.
        symbols, python, resolver, layout: Of its process; None: it runs no CPython that can be read.
        states: ``PythonProcess.thread_states``, when it is known already.

    Raises:
        OSError: The thread has ended, or may not be looked at.
    """
    folder = PROC / str(pid) / "task" / str(tid)
    for _ in range(TRIES):
        before = _moment(folder)
        if before[0] not in "SDTtI":
            return None
        words = _system_call(folder)
        if words == ["running"]:
            continue
        flags, frames = 0, None
        if python is not None:
            frames = python.walk(tid, states)
            if frames is not None:
                flags = records.STACK_PYTHON
            elif tid in (python.thread_states() if states is None else states):
                flags = records.STACK_PYTHON_REJECTED
        native = np.array([int(words[-1], 16)] if words else [], np.uint64)
        stack = assemble(symbols, resolver, frames if frames is not None else np.empty(0, records.FRAME), native, flags)
        if _moment(folder) == before:
            return Blocked(before[0] in "Tt", _what(layout, before[0], words), stack)
    return None


def read_state(pid: int, tid: int) -> Blocked | None:
    """The same of a thread whose process cannot be read: whether it is stopped, and no stack. It waits for nothing.

    Raises:
        OSError: The thread has ended, or may not be looked at.
    """
    state, _ = _moment(PROC / str(pid) / "task" / str(tid))
    if state not in "SDTtI":
        return None
    return Blocked(state in "Tt", _what(None, state, []), _merged(NO_CHAIN, (), False, 0))


def _moment(folder: Path) -> tuple[str, bytes]:
    """State letter, and how often the thread was switched: equal twice means that it did not run between."""
    status = read_file(f"{folder}/status")
    switches = (field_of(status, name) for name in (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches"))
    return field_of(status, b"State")[:1].decode("ascii", "replace") or "X", b" ".join(switches)


def _system_call(folder: Path) -> list[str]:
    """/proc/PID/task/TID/syscall in words: number, six arguments, stack pointer, program counter; or "running".

    Nothing where the kernel does not list it (CONFIG_HAVE_ARCH_TRACEHOOK)."""
    try:
        return (folder / "syscall").read_text().split()
    except PermissionError:
        return []


def _what(layout: NDArray[np.void] | None, state: str, words: list[str]) -> int:
    what = records.WHAT_OFF | records.NO_SYSCALL
    if len(words) >= 8:
        number = int(words[0])
        what = records.WHAT_OFF | (number & records.WHAT_SYSCALL if number >= 0 else records.NO_SYSCALL)
        if layout is not None and offcpu.reason(what) == "futex":
            address = int(words[1], 16)
            if int(layout["runtime"].item()) <= address < int(layout["runtime_end"].item()):
                what |= records.WHAT_GIL_WAIT
    if state == "D":
        what |= records.WHAT_UNINTERRUPTIBLE
    return what
