"""Stacks: Python and native frames merged, an id that is alike on all hosts, and groups of threads with one stack."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from argus.model.stacks import Frame, Stack
from argus.model.text import printable
from argus.model.units import rank_text

MAX_GROUPS = 8
"""So many groups of stacks a person reads."""


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


def thread_role(name: str, *, main: bool = False) -> str:
    """What threads of different ranks have in common: ``main``, or the name without its numbers (pt_autograd_#)."""
    if main:
        return "main"
    return re.sub(r"(?<![A-Za-z0-9.])\d+|(?<=[A-Za-z])\d+$", "#", name) if not name.startswith("python") else name


# ---- groups of threads


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
    grouped = [(own, "stack") for own in exact]
    if len(grouped) > max_groups:
        worth = max(2, len(members) // (2 * max_groups))
        kept, rest = _split(exact, worth)
        grouped = [(own, "stack") for own in kept]
        alike = _classes(rest, _functions)
        if len(grouped) + len(alike) > max_groups:
            kept, rest = _split(alike, worth)
            grouped += [(own, "functions") for own in kept]
            grouped += [(own, "prefix") for own in _by_prefix(rest, max(1, max_groups - len(grouped)))]
        else:
            grouped += [(own, "functions") for own in alike]
    groups = [_group(own, alike) for own, alike in grouped if own]
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
