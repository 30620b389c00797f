"""Stacks by the numbers that the kernel gives them, and by what they contain."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from argus.live.display.stack_view import hot_line
from argus.live.job import Job
from argus.model.stacks import Stack

KEPT_STACKS = 16_384
"""Stacks remembered in all, some 2 KB each, twice; beyond it all are numbered and sent anew, which costs time and loses
nothing. A job has some hundreds; one that compiles while it runs makes new ones all the time."""


class StackDictionary:
    """The stacks of a session, and which of them each job's table has."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        """By the kernel's number: ``Stack.id``."""
        self._stacks: dict[int, Stack] = {}
        """By ``Stack.id``."""
        self._before: tuple[dict[int, int], dict[int, Stack]] = ({}, {})
        """Both, before they were begun anew."""
        self._hot_lines: dict[int, str] = {}
        """Of the stacks that the live view has shown."""
        self._written: dict[tuple[str, int], set[int]] = {}

    @property
    def full(self) -> bool:
        """Whether it is time to ``begin_anew``."""
        return len(self._ids) > KEPT_STACKS

    def begin_anew(self) -> None:
        """Forgets stacks of long ago: a program that makes code all the time never stops making new ones. Counts that
        are under way are still understood."""
        self._before = self._ids, self._stacks
        self._ids, self._stacks = {}, {}
        self._hot_lines.clear()
        self._written.clear()

    def add(self, number: int, stack: Stack) -> None:
        """Remembers a stack. ``number``: the kernel's; of a stack that the kernel has none of, its own ``id``."""
        self._ids[number] = stack.id
        self._stacks.setdefault(stack.id, stack)

    def get(self, stack_id: int) -> Stack | None:
        """The stack of a ``Stack.id``; None: it was forgotten."""
        stack = self._stacks.get(stack_id)
        if stack is None and (stack := self._before[1].get(stack_id)) is not None:
            self._stacks[stack_id] = stack
        return stack

    def ids_of(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """``Stack.id`` of each of the kernel's numbers; 0: there is none."""
        now, before = self._ids, self._before[0]
        return np.array([now.get(one) or before.get(one, 0) for one in numbers.tolist()], np.uint64)

    def hot_line(self, stack_id: int) -> str:
        """What the live view shows of a stack."""
        line = self._hot_lines.get(stack_id)
        if line is None:
            stack = self.get(stack_id)
            line = self._hot_lines[stack_id] = hot_line(stack) if stack is not None else ""
        return line

    def unwritten(self, job: Job, ids: NDArray[np.uint64]) -> list[Stack]:
        """Those of these stacks that the job's table lacks."""
        written = self._written.get((job.name, job.run), set())
        return [stack for one in set(ids.tolist()) - written if one and (stack := self.get(one)) is not None]

    def note_written(self, job: Job, stacks: Iterable[Stack]) -> None:
        """The job's table has these from now on."""
        self._written.setdefault((job.name, job.run), set()).update(stack.id for stack in stacks)

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        self._written.pop((job.name, job.run), None)
