"""Stacks: Python and native frames as one, a number that is the same everywhere, and who is in the same place."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from argus.records import STACK_IDLE_PYTHON, STACK_NATIVE_CUT, STACK_PYTHON, STACK_PYTHON_CUT, STACK_PYTHON_REJECTED
from argus.text import printable

UNRESOLVED = "(unresolved)"
"""Function of a Python frame that could not be named."""
CUT = "(callers of this are missing: the stack is too deep)"
REJECTED = "(Python frames could not be read)"
"""Markers: said at the root of a stack that lacks frames there, lest what is left be taken for the whole."""
MAX_GROUPS = 8
"""So many groups of stacks a person reads."""


class PythonName(Protocol):
    """A Python frame with its names (``capture.code.PythonFrame``)."""

    @property
    def function(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


class NativeName(Protocol):
    """A native frame with its names (``capture.symbols.NativeFrame``)."""

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
        is_interpreter: Which native frames are the eval loop: for each, or a function that tells.
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
        # Memory without a file lies elsewhere in each process: the offset would tell equal stacks apart.
        return Frame(kind, frame.module, frame.module)
    return Frame(kind, f"{frame.module.rpartition('/')[2] or '?'}+{frame.offset:#x}", frame.module)


# ---- for people


def short_file(file: str) -> str:
    """A path as people know it: from the package on in an installed one, else the last two parts."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    if match := re.search(r"/lib(?:64)?/python\d\.\d+/(.+)$", file):
        return match.group(1)
    return "/".join(file.rsplit("/", 2)[-2:]) if file.startswith("/") else file


def label(frame: Frame, *, lines: bool = False) -> str:
    """A frame in words, printable: ``step (llama/train.py:41)``, ``cudaLaunchKernel (libcudart.so.12)``."""
    function, file = printable(frame.function), printable(frame.file)
    if frame.kind == "python" and file:
        return f"{function} ({short_file(file)}" + (f":{frame.line})" if lines and frame.line else ")")
    name = file.rpartition("/")[2]
    return f"{function} ({name})" if name and not function.startswith(name) else function


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks as a person writes them: 0-2,4-31."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in parts)


def thread_role(name: str, *, main: bool = False) -> str:
    """What threads of different ranks have in common: ``main``, or the name without its numbers (pt_autograd_#)."""
    if main:
        return "main"
    return re.sub(r"(?<![A-Za-z0-9.])\d+|(?<=[A-Za-z])\d+$", "#", name) if not name.startswith("python") else name


# ---- who is where


@dataclass(frozen=True)
class Group:
    """Threads in the same place.

    Attributes:
        members: (rank, thread), sorted.
        frames: What all of them have in common, root first. Lines that differ are 0.
        alike: stack: all frames are equal; functions: all functions are; prefix: they part after ``frames``.
        odd: They are few, and most others are in one place.
        common: How many functions from the root on are those of the largest group.
    """

    members: tuple[tuple[int, str], ...]
    frames: tuple[Frame, ...]
    alike: str
    odd: bool = False
    common: int = 0

    @property
    def ranks(self) -> str:
        """The ranks in words: 0-2,4-31."""
        return rank_text(rank for rank, _ in self.members)


_Member = tuple[int, str, Stack]


def group_by_stack(members: Sequence[_Member], max_groups: int = MAX_GROUPS) -> list[Group]:
    """Which threads are in the same place: the view that shows who hangs where.

    Identical stacks are a group. If that makes more groups than a person reads, the small ones are put together by
    their functions, whatever the lines; and if there are still too many, by as many frames from the root as it takes.
    Groups of some size are never blurred by what others do.

    Args:
        members: (rank, thread, stack).
        max_groups: What a person reads.

    Returns:
        The groups, largest first. Odd ones are marked where more than half are in one place: those with at most a
        quarter of the members each.
    """
    exact = _classes(members, lambda stack: stack.frames)
    found = [(own, "stack") for own in exact]
    if len(found) > max_groups:
        worth = max(2, len(members) // (2 * max_groups))
        kept, rest = _split(exact, worth)
        found = [(own, "stack") for own in kept]
        alike = _classes(rest, _functions)
        if len(found) + len(alike) > max_groups:
            kept, rest = _split(alike, worth)
            found += [(own, "functions") for own in kept]
            found += [(own, "prefix") for own in _by_prefix(rest, max(1, max_groups - len(found)))]
        else:
            found += [(own, "functions") for own in alike]
    groups = [_group(own, alike) for own, alike in found if own]
    groups.sort(key=lambda group: (-len(group.members), group.members))
    if not groups:
        return []
    first = groups[0]
    most = 2 * len(first.members) > len(members)
    return [
        replace(
            group,
            odd=most and group is not first and 4 * len(group.members) <= len(members),
            common=_common([_keys(first.frames), _keys(group.frames)]),
        )
        for group in groups
    ]


def _classes(members: Iterable[_Member], key: Callable[[Stack], Hashable]) -> list[list[_Member]]:
    classes: dict[Hashable, list[_Member]] = {}
    for member in members:
        classes.setdefault(key(member[2]), []).append(member)
    return list(classes.values())


def _split(classes: list[list[_Member]], worth: int) -> tuple[list[list[_Member]], list[_Member]]:
    kept = [own for own in classes if len(own) >= worth]
    return kept, [member for own in classes if len(own) < worth for member in own]


def _keys(frames: Iterable[Frame]) -> tuple[tuple[str, str, str], ...]:
    return tuple((frame.kind, frame.function, frame.file) for frame in frames)


def _functions(stack: Stack) -> Hashable:
    return _keys(stack.frames)


def _by_prefix(members: list[_Member], room: int) -> list[list[_Member]]:
    """The finest classes by common beginning that are no more than ``room``."""
    if not members:
        return []
    low, high = 0, max(len(stack.frames) for _, _, stack in members)
    while low < high:  # more frames never make fewer classes
        middle = (low + high + 1) // 2
        if len(_classes(members, lambda stack: _keys(stack.frames[:middle]))) <= room:  # noqa: B023 - used at once
            low = middle
        else:
            high = middle - 1
    return _classes(members, lambda stack: _keys(stack.frames[:low]))


def _common(stacks: Sequence[tuple[tuple[str, str, str], ...]]) -> int:
    length = min(map(len, stacks))
    return next((n for n in range(length) if any(stack[n] != stacks[0][n] for stack in stacks)), length)


def _group(members: list[_Member], alike: str) -> Group:
    stacks = list({stack.frames: None for _, _, stack in members})
    length = _common([_keys(frames) for frames in stacks])
    if alike == "prefix" and all(len(frames) == length for frames in stacks):
        alike = "functions" if len(stacks) > 1 else "stack"
    elif alike == "functions" and len(stacks) == 1:
        alike = "stack"
    frames = tuple(
        frame if all(other[n].line == frame.line for other in stacks) else replace(frame, line=0)
        for n, frame in enumerate(stacks[0][:length])
    )
    return Group(tuple(sorted((rank, thread) for rank, thread, _ in members)), frames, alike)
