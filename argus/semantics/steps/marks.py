"""What the probes of PyTorch and NVTX saw, as the moments that steps and phases are made of."""

from __future__ import annotations

import zlib
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model.calls import CALLS
from argus.semantics.phases.cpu import DEPTH, MARK, What
from argus.semantics.steps.range_names import Meaning, Role, meaning_of, role_of

_NONE = 255
_ENTRY = {
    "range_begin": What.RANGE_BEGIN,
    "range_end": What.RANGE_END,
    "backward_begin": What.BACKWARD_BEGIN,
    "backward": What.BACKWARD_BEGIN,
    "wait": What.WAIT,
    "work_begin": What.WORK_BEGIN,
    "work_end": What.WORK_END,
}
_EXIT = {"backward": What.BACKWARD_END}
_WHAT = np.array([[table.get(call.kind, _NONE) for call in CALLS] for table in (_ENTRY, _EXIT)], np.uint8)
_ENGINE = next(call.id for call in CALLS if call.kind == "backward_begin")
_PUSH, _POP, _START, _END, _POINT = range(1, 6)
_OF_NVTX = {"nvtx_push": _PUSH, "nvtx_pop": _POP, "nvtx_start": _START, "nvtx_end": _END, "nvtx_mark": _POINT}
_NVTX = np.array([_OF_NVTX.get(call.kind, 0) for call in CALLS], np.uint8)

STACKS = 256
"""Threads, by domain and kind of range, whose open ranges are known: those that had some begin or end last."""
NAMES = 4096
"""Names whose meaning is remembered: of names without end those that were used last."""
NAME_BYTES, STACK_BYTES, OPEN_BYTES = 320, 400, 48
"""Memory of a name, of a thread that may have open ranges, and of an open range, at most."""
_NUMBERS = bytes.maketrans(b"123456789", b"000000000")
"""The digits of a number mean nothing (``meaning_of``)."""

_Row = tuple[int, int, int, int, int, int]
"""One ``MARK``."""


_ROLE, _STEP, _PART, _HANDLE = 7, 8, 16, 5
"""What is known of a name, in one number: its role, whether it is called a step, whether it is never taken for one, and
from this bit on its handle. Of an open range no more is kept: there may be 65,536, all with other names."""
_UNREAD = _PART
"""A name for which there was no time: no step, and no part of one."""


def _in_one(meaning: Meaning) -> int:
    handle = 1 + zlib.crc32(meaning.base.encode())
    part = meaning.part or not meaning.base
    return handle << _HANDLE | part * _PART | meaning.is_step * _STEP | int(meaning.role)


class _Open:
    """Ranges open in one another, the outermost first. A step is in no other one of its name."""

    __slots__ = ("_names", "_steps")

    def __init__(self) -> None:
        self._names: list[int] = []
        self._steps = 0
        """How many are called a step."""

    def __len__(self) -> int:
        return len(self._names)

    def push(self, name: int) -> None:
        """A range began inside of all."""
        self._names.append(name)
        self._steps += bool(name & _STEP)

    def pop(self) -> int:
        """The innermost one ended."""
        name = self._names.pop()
        self._steps -= bool(name & _STEP)
        return name

    def drop(self) -> None:
        """The outermost one is forgotten."""
        self._steps -= bool(self._names.pop(0) & _STEP)

    def step(self, name: int) -> int:
        """Where the step of a name is open, if it is called a step. -1: nowhere."""
        return self._names.index(name) if name & _STEP and self._steps and name in self._names else -1


@dataclass
class Marks:
    """Marks of one process, with its open ranges of NVTX.

    NVTX's ends do not name what they end: the ranges pushed on a thread are a stack. Those that are started and ended
    by a number are one, too: with no tool in the process NVTX numbers all of them 0. They have stacks of their own, so
    that a range that is never ended does no harm to PyTorch's.

    Attributes:
        counters: ``ranges_unmatched`` (ends without a begin), ``ranges_unfinished`` (ranges that were never ended).
        steps: Which ranges may be steps: None: all; else those of this handle.
        optimizers: Ranges of NVTX that are an optimiser's, so far.
    """

    counters: Tally[str] = field(default_factory=Tally)
    steps: int | None = None
    optimizers: int = 0
    _open: OrderedDict[tuple[int, int, bool], _Open] = field(default_factory=OrderedDict)
    _names: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _backwards: bool = False
    """Whether a backward pass was named: the engine's own begins, which have no end, would report it twice."""

    def take(
        self,
        events: NDArray[np.void],
        *,
        ends_of_backward: bool,
        meaning: Callable[[str], Meaning | None] = meaning_of,
    ) -> NDArray[np.void]:
        """Makes marks of records.

        Args:
            events: :data:`argus.model.records.MARK` rows of the process, those of each thread in order, shape (n,).
            ends_of_backward: Whether the process's backward calls have probes of their own, which report their ends,
                too. The engine's report beginnings only, and would report them twice.
            meaning: What the name of a range of NVTX means, asked for names that are not remembered. None: there is no
                time for it. The range is then no step and no part of one, and its name is asked for again.

        Returns:
            :data:`argus.semantics.phases.cpu.MARK` rows in order of time, shape (m,).
        """
        named = self._take_nvtx(events[_NVTX[events["call"]] != 0], meaning)
        own = _own_marks(events, engine=not ends_of_backward and not self._backwards)
        out = np.concatenate([own, np.array(named, MARK)]) if named else own
        return out[np.argsort(out["ts_ns"], kind="stable")]

    def forget(self) -> None:
        """Nothing more will be seen of NVTX."""
        self._open.clear()
        self._backwards = False

    @property
    def kept(self) -> int:
        """Bytes that are kept of names and open ranges, at most."""
        ranges = sum(map(len, self._open.values()))
        return NAME_BYTES * len(self._names) + STACK_BYTES * len(self._open) + OPEN_BYTES * ranges

    def keep(self, most: int) -> None:
        """Keeps so many bytes: of the names that were used last, which are understood anew when they come again, and of
        the threads that were (``ranges_unfinished``)."""
        part = most / max(self.kept, 1)
        for _ in range(len(self._open) - int(part * len(self._open))):
            self._forget_stack()
        for _ in range(len(self._names) - int(part * len(self._names))):
            self._names.popitem(last=False)

    def forget_names(self) -> None:
        """Its process has ended: gives back what is known of names, and what was open."""
        self._names.clear()
        self._open.clear()

    def _take_nvtx(self, events: NDArray[np.void], meaning: Callable[[str], Meaning | None]) -> list[_Row]:
        rows: list[_Row] = []
        columns = (events[name].tolist() for name in ("ts_ns", "tid", "handle", "name_len"))
        what = _NVTX[events["call"]].tolist()
        for place, (kind, ts, tid, handle, length) in enumerate(zip(what, *columns, strict=True)):
            key = tid, 0 if kind in (_START, _END) else handle, kind in (_START, _END)
            if kind in (_PUSH, _START, _POINT):
                name = self._name(events["name"][place][:length].tobytes(), meaning)
                stack = self._stack(key)
                if kind == _POINT:
                    rows += self._step(What.STEP_BEGIN, name, ts, tid, len(stack))
                    continue
                at = stack.step(name)
                if at >= 0:  # a step is in no other one: the end of that was left out
                    self._close(rows, stack, at, ts, tid)
                rows += self._begin(name, ts, tid, len(stack))
                stack.push(name)
                if len(stack) > DEPTH:
                    stack.drop()
                    self.counters["ranges_unfinished"] += 1
            elif ended := self._open.get(key):
                self._open.move_to_end(key)
                rows += self._end(ended.pop(), ts, tid, len(ended))
            else:
                self.counters["ranges_unmatched"] += 1
        return rows

    def _stack(self, key: tuple[int, int, bool]) -> _Open:
        stack = self._open.get(key)
        if stack is not None:
            self._open.move_to_end(key)
            return stack
        if len(self._open) >= STACKS:
            self._forget_stack()
        stack = self._open[key] = _Open()
        return stack

    def _forget_stack(self) -> None:
        """Of the thread that had a range begin or end longest ago what is open is forgotten."""
        self.counters["ranges_unfinished"] += len(self._open.popitem(last=False)[1])

    def _close(self, rows: list[_Row], stack: _Open, at: int, ts: int, tid: int) -> None:
        while len(stack) > at:
            rows += self._end(stack.pop(), ts, tid, len(stack))
            self.counters["ranges_unfinished"] += 1

    def _name(self, text: bytes, meaning: Callable[[str], Meaning | None]) -> int:
        text = text.translate(_NUMBERS)
        known_name = self._names.get(text)
        if known_name is not None:
            self._names.move_to_end(text)
            return known_name
        found = meaning(text.decode(errors="replace"))
        if found is None:
            return _UNREAD
        if len(self._names) >= NAMES:
            self._names.popitem(last=False)
        known_name = self._names[text] = _in_one(found)
        return known_name

    def _begin(self, name: int, ts: int, tid: int, depth: int) -> list[_Row]:
        role = name & _ROLE
        self.optimizers += role == Role.OPTIMIZER
        if role == Role.BACKWARD:
            self._backwards = True
            return [(ts, 0, tid, What.BACKWARD_BEGIN, 0, 0)]
        return [(ts, 0, tid, What.RANGE_BEGIN, role, 0)] if role else self._step(What.STEP_BEGIN, name, ts, tid, depth)

    def _end(self, name: int, ts: int, tid: int, depth: int) -> list[_Row]:
        role = name & _ROLE
        if role == Role.BACKWARD:
            return [(ts, 0, tid, What.BACKWARD_END, 0, 0)]
        return [(ts, 0, tid, What.RANGE_END, role, 0)] if role else self._step(What.STEP_END, name, ts, tid, depth)

    def _step(self, what: What, name: int, ts: int, tid: int, depth: int) -> list[_Row]:
        handle = name >> _HANDLE
        if name & _PART or self.steps not in (None, handle):
            return []
        return [(ts, handle, tid, what, int(bool(name & _STEP)), depth)]


def _own_marks(events: NDArray[np.void], *, engine: bool) -> NDArray[np.void]:
    """PyTorch's own. ``engine``: with the beginnings of backward passes that its engine reports."""
    what = _WHAT[np.minimum(events["at_exit"], 1), events["call"]]
    kept = what != _NONE
    if not engine:
        kept &= events["call"] != _ENGINE
    rows, what = events[kept], what[kept]
    out = np.zeros(len(rows), MARK)
    out["ts_ns"], out["handle"], out["tid"], out["what"] = rows["ts_ns"], rows["handle"], rows["tid"], what
    ranges = np.flatnonzero(what == What.RANGE_BEGIN)
    if len(ranges):
        names, which = np.unique(rows["name"][ranges], axis=0, return_inverse=True)
        lengths = np.zeros(len(names), np.int64)
        lengths[which.ravel()] = rows["name_len"][ranges]
        roles = [
            role_of(name[:length].tobytes().decode(errors="replace"))
            for name, length in zip(names, lengths.tolist(), strict=True)
        ]
        out["role"][ranges] = np.array(roles, np.uint8)[which.ravel()]
    return out
