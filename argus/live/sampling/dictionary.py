"""Stacks by the numbers that the kernel gives them, and by what they contain."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from argus.capture.bounded import text_bytes
from argus.live.display.stack_view import hot_line
from argus.live.job import Job
from argus.model.losses import Owner
from argus.model.shares import CONTAINERS
from argus.model.stacks import Frame, Stack

KEPT_STACKS, KEPT_BYTES = 16_384, 64 << 20
"""Stacks remembered in all, some 2 KB each; beyond either bound those of an owner with more than its part are
numbered and sent anew, which costs time and loses nothing. A job has some hundreds; one that compiles while it runs
makes new ones all the time."""
STACKS_OF_PROCESS = 512
"""So many of each process are remembered, if that is more: the kernel numbers each process's stacks apart."""
BEFORE = 1.5
"""Of all owners' stacks of before, in times of ``KEPT_BYTES``: who has all the room and begins anew keeps them."""
_NUMBER_BYTES, _STACK_BYTES, _FRAME_BYTES = 100, 300, 300
"""Of a number, a stack and a frame, without texts."""


class _Kept:
    """An owner's stacks."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        """By the kernel's number: ``Stack.id``."""
        self.stacks: dict[int, Stack] = {}
        """By ``Stack.id``."""
        self.frames: dict[Frame, Frame] = {}
        """Theirs: equal ones are one object."""
        self.nbytes = 0

    def keep(self, stack: Stack) -> int:
        """Adds a stack, if it is not there. Returns the bytes that this takes."""
        if stack.id in self.stacks:
            return 0
        new = {frame for frame in stack.frames if frame not in self.frames}
        frames = tuple(self.frames.setdefault(frame, frame) for frame in stack.frames)
        if any(one is not other for one, other in zip(frames, stack.frames, strict=True)):
            stack = replace(stack, frames=frames)
        self.stacks[stack.id] = stack
        texts = sum(text_bytes(frame.function) + text_bytes(frame.file) for frame in new)
        nbytes = _STACK_BYTES + 8 * len(frames) + _FRAME_BYTES * len(new) + texts
        self.nbytes += nbytes
        return nbytes


def _most(processes: int) -> int:
    """Numbers of stacks that are remembered in all."""
    return max(KEPT_STACKS, STACKS_OF_PROCESS * processes)


class StackDictionary:
    """The stacks of a session by their owners, and which of them each job's table has."""

    def __init__(self) -> None:
        self.nbytes = 0
        """What the stacks take, about, without those of before."""
        self._of: dict[Owner, _Kept] = {}
        self._before: dict[Owner, _Kept] = {}
        """What each had, before it was begun anew; the newest last."""
        self.before_nbytes = 0
        self._hot_lines: dict[int, str] = {}
        """Of the stacks that the live view has shown."""
        self._written: dict[tuple[str, int], set[int]] = {}
        self._owner_of: dict[tuple[str, int], Owner] = {}
        """Of these jobs."""

    def __len__(self) -> int:
        return sum(len(kept.ids) for kept in self._of.values())

    def full(self, processes: int = 0) -> list[Owner]:
        """Owners for whom it is time to ``begin_anew``. ``processes``: so many have stacks."""
        most = _most(processes)
        many, much = len(self) > most, self.nbytes > KEPT_BYTES
        if not many and not much:
            return []
        parts = self._parts()
        return [
            owner
            for owner, kept in self._of.items()
            if (many and len(kept.ids) > parts[owner] * most) or (much and kept.nbytes > parts[owner] * KEPT_BYTES)
        ]

    def has_room(self, owner: Owner) -> bool:
        """Whether an owner's stacks may be added before ``full`` is heeded the next time."""
        kept = self._of.get(owner)
        return kept is None or self.nbytes <= KEPT_BYTES or kept.nbytes <= self._parts()[owner] * KEPT_BYTES

    def _parts(self) -> dict[Owner, float]:
        """Each owner's part of the room: equal ones, but a user in many containers has that of ``CONTAINERS``."""
        containers = Tally(user for user, _ in self._of)
        weights = {owner: min(1.0, CONTAINERS / containers[owner[0]]) for owner in self._of}
        total = sum(weights.values())
        return {owner: weight / total for owner, weight in weights.items()}

    def begin_anew(self, owner: Owner, asked_for: Iterable[int] = ()) -> None:
        """Forgets an owner's stacks of long ago: a program that makes code all the time never stops making new ones.
        Counts that are under way are still understood, unless all owners' are too much: then whose user has most of
        what was forgotten loses its oldest.

        Args:
            owner: Whose.
            asked_for: Numbers that rows to come have, of threads that wait for long: their stacks are kept, up to half
                of the owner's part, those that come first.
        """
        carried = self._carried(owner, asked_for)
        self._drop_before(owner)
        self._before[owner] = kept = self._of.pop(owner, _Kept())
        self.nbytes -= kept.nbytes
        self.before_nbytes += kept.nbytes
        if self.before_nbytes > BEFORE * KEPT_BYTES:
            self._shrink_before()
        self._hot_lines.clear()
        for key in [key for key in self._written if self._owner_of.get(key) == owner]:
            del self._written[key], self._owner_of[key]
        for number, stack in carried:
            self.add(number, stack, owner)

    def _carried(self, owner: Owner, numbers: Iterable[int]) -> list[tuple[int, Stack]]:
        """Numbers and stacks that stay when an owner's are begun anew."""
        part = self._parts().get(owner, 0.0) / 2
        both = [kept for of in (self._of, self._before) if (kept := of.get(owner)) is not None]
        carried, taken = list[tuple[int, Stack]](), _Kept()
        for number in dict.fromkeys(numbers):
            kept = next((one for one in both if number in one.ids), None)
            stack = kept.stacks.get(kept.ids[number]) if kept is not None else None
            if stack is None:
                continue
            taken.nbytes += _NUMBER_BYTES
            taken.keep(stack)
            if taken.nbytes > part * KEPT_BYTES or len(carried) >= part * KEPT_STACKS:
                break
            carried.append((number, stack))
        return carried

    def _drop_before(self, owner: Owner) -> int:
        """Forgets an owner's stacks of before. Returns their bytes."""
        nbytes = self._before.pop(owner, _Kept()).nbytes
        self.before_nbytes -= nbytes
        return nbytes

    def _shrink_before(self) -> None:
        """Forgets stacks of before until there is room for the others."""
        of_user: Tally[int] = Tally()
        for (user, _), kept in self._before.items():
            of_user[user] += kept.nbytes
        while self.before_nbytes > BEFORE * KEPT_BYTES:
            most = max(of_user, key=of_user.__getitem__)
            oldest = next(owner for owner in self._before if owner[0] == most)
            of_user[most] -= self._drop_before(oldest)

    def forget_gone(self, owners: Collection[Owner]) -> None:
        """Drops the stacks of all but these owners."""
        for gone in (self._of.keys() | self._before.keys()) - set(owners):
            self.nbytes -= self._of.pop(gone, _Kept()).nbytes
            self._drop_before(gone)

    def add(self, number: int, stack: Stack, owner: Owner) -> None:
        """Remembers an owner's stack. ``number``: the kernel's; of a stack that the kernel has none of, its own
        ``id``."""
        kept = self._of.setdefault(owner, _Kept())
        if number not in kept.ids:
            kept.nbytes += _NUMBER_BYTES
            self.nbytes += _NUMBER_BYTES
        kept.ids[number] = stack.id
        self.nbytes += kept.keep(stack)

    def get(self, stack_id: int, owner: Owner | None = None) -> Stack | None:
        """The stack of a ``Stack.id``, of an owner or of any; None: it was forgotten."""
        for one in self._of.keys() | self._before.keys() if owner is None else (owner,):
            kept, before = self._of.get(one), self._before.get(one)
            if kept is not None and (stack := kept.stacks.get(stack_id)) is not None:
                return stack
            if before is not None and (stack := before.stacks.get(stack_id)) is not None:
                self.nbytes += self._of.setdefault(one, _Kept()).keep(stack)
                return stack
        return None

    def ids_of(self, numbers: NDArray[np.uint64], owner: Owner) -> NDArray[np.uint64]:
        """``Stack.id`` of each of the kernel's numbers for an owner's stacks; 0: there is none."""
        now, before = (of[owner].ids if owner in of else {} for of in (self._of, self._before))
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
        fresh = set(ids.tolist()) - written
        return [stack for one in fresh if one and (stack := self.get(one, job.owner)) is not None]

    def note_written(self, job: Job, stacks: Iterable[Stack]) -> None:
        """The job's table has these from now on."""
        self._owner_of[job.name, job.run] = job.owner
        self._written.setdefault((job.name, job.run), set()).update(stack.id for stack in stacks)

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        self._written.pop((job.name, job.run), None)
        self._owner_of.pop((job.name, job.run), None)
