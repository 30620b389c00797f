"""What the probes of PyTorch and NVTX saw, as the moments that steps and phases are made of."""

from __future__ import annotations

import zlib
from collections import Counter as Tally
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
"""Threads, by domain and kind of range, whose open ranges are known. Beyond, the oldest is forgotten."""
NAMES = 4096
"""Names whose meaning is remembered: a name with a running number is another one in each step."""

_Row = tuple[int, int, int, int, int, int]
"""One ``MARK``."""


@dataclass(frozen=True)
class _Name:
    meaning: Meaning
    handle: int


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
    _open: dict[tuple[int, int, bool], list[_Name]] = field(default_factory=dict)
    _names: dict[bytes, _Name] = field(default_factory=dict)
    _backwards: bool = False
    """Whether a backward pass was named: the engine's own begins, which have no end, would report it twice."""

    def take(self, events: NDArray[np.void], *, ends_of_backward: bool) -> NDArray[np.void]:
        """Makes marks of records.

        Args:
            events: :data:`argus.model.records.MARK` rows of the process, those of each thread in order, shape (n,).
            ends_of_backward: Whether the process's backward calls have probes of their own, which report their ends,
                too. The engine's report beginnings only, and would report them twice.

        Returns:
            :data:`argus.semantics.phases.cpu.MARK` rows in order of time, shape (m,).
        """
        named = self._take_nvtx(events[_NVTX[events["call"]] != 0])
        own = _own_marks(events, engine=not ends_of_backward and not self._backwards)
        out = np.concatenate([own, np.array(named, MARK)]) if named else own
        return out[np.argsort(out["ts_ns"], kind="stable")]

    def forget(self) -> None:
        """Nothing more will be seen of NVTX."""
        self._open.clear()
        self._backwards = False

    def _take_nvtx(self, events: NDArray[np.void]) -> list[_Row]:
        rows: list[_Row] = []
        columns = (events[name].tolist() for name in ("ts_ns", "tid", "handle", "name_len"))
        what = _NVTX[events["call"]].tolist()
        for place, (kind, ts, tid, handle, length) in enumerate(zip(what, *columns, strict=True)):
            key = tid, 0 if kind in (_START, _END) else handle, kind in (_START, _END)
            if kind in (_PUSH, _START, _POINT):
                name = self._name(events["name"][place][:length].tobytes())
                stack = self._stack(key)
                if kind == _POINT:
                    rows += self._step(What.STEP_BEGIN, name, ts, tid, len(stack))
                    continue
                if name.meaning.is_step and name in stack:
                    # A step is in no other one: the end of that was left out.
                    self._close(rows, stack, stack.index(name), ts, tid)
                rows += self._begin(name, ts, tid, len(stack))
                stack.append(name)
                if len(stack) > DEPTH:
                    del stack[0]
                    self.counters["ranges_unfinished"] += 1
            elif stack := self._open.get(key, []):
                rows += self._end(stack.pop(), ts, tid, len(stack))
            else:
                self.counters["ranges_unmatched"] += 1
        return rows

    def _stack(self, key: tuple[int, int, bool]) -> list[_Name]:
        if key not in self._open and len(self._open) >= STACKS:
            del self._open[next(iter(self._open))]
        return self._open.setdefault(key, [])

    def _close(self, rows: list[_Row], stack: list[_Name], at: int, ts: int, tid: int) -> None:
        while len(stack) > at:
            rows += self._end(stack.pop(), ts, tid, len(stack))
            self.counters["ranges_unfinished"] += 1

    def _name(self, text: bytes) -> _Name:
        known_name = self._names.get(text)
        if known_name is None:
            if len(self._names) >= NAMES:
                self._names.clear()
            meaning = meaning_of(text.decode(errors="replace"))
            known_name = self._names[text] = _Name(meaning, 1 + zlib.crc32(meaning.base.encode()))
        return known_name

    def _begin(self, name: _Name, ts: int, tid: int, depth: int) -> list[_Row]:
        role = name.meaning.role
        self.optimizers += role is Role.OPTIMIZER
        if role is Role.BACKWARD:
            self._backwards = True
            return [(ts, 0, tid, What.BACKWARD_BEGIN, 0, 0)]
        return [(ts, 0, tid, What.RANGE_BEGIN, role, 0)] if role else self._step(What.STEP_BEGIN, name, ts, tid, depth)

    def _end(self, name: _Name, ts: int, tid: int, depth: int) -> list[_Row]:
        role = name.meaning.role
        if role is Role.BACKWARD:
            return [(ts, 0, tid, What.BACKWARD_END, 0, 0)]
        return [(ts, 0, tid, What.RANGE_END, role, 0)] if role else self._step(What.STEP_END, name, ts, tid, depth)

    def _step(self, what: What, name: _Name, ts: int, tid: int, depth: int) -> list[_Row]:
        if name.meaning.part or not name.meaning.base or self.steps not in (None, name.handle):
            return []
        return [(ts, name.handle, tid, what, int(name.meaning.is_step), depth)]


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
