"""Operations of a GPU, sorted into the steps whose calls asked for them, once these are over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argus.model.event_kinds import EVENT_KINDS, op_kinds
from argus.model.records import GpuKind

NO_STEP = 0xFFFFFFFF
"""Stands for the step of what was called outside every step."""
KEPT_OPS = 1_000_000
"""Operations of a process that wait for their step: ten steps of a large model. Beyond, they are of none."""
KEPT_NS = 60_000_000_000
"""How long they wait; those that waited for half of it then go along."""
SLOTS = 1 << 16
MAX_KEYS = 1 << 17
"""Shapes of launches that are remembered, 16 MB a process."""
NEW_SHAPES = 2_048
"""New shapes that get a number at once, 20 us each: a job has some hundreds in all."""

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
"""Odd constants (xxHash's primes, and the golden ratio): multiplying by them spreads small numbers over 64 bits."""


class KernelGroups:
    """Which group an operation belongs to: kernels by name and shape of their launch, copies by size; and by stream.

    Args:
        number: Gives the number of a group: called once for each that is new, with a record of it, shape (1,).
        others: Gives the number of the group of all that is in no other, and is told how many operations it gets.
    """

    def __init__(self, number: Callable[[NDArray[np.void]], int], others: Callable[[int], int]) -> None:
        self._number = number
        self._number_of_others = others
        self._keys = np.zeros(SLOTS, np.uint64)
        self._groups = np.full(SLOTS, -1, np.int64)
        self._others: dict[int, int] = {}

    def of(self, ops: NDArray[np.void]) -> NDArray[np.int64]:
        """The group of each of ``records.GPU_OP``, shape (n,). Of more than ``NEW_SHAPES`` that are new the rest are in
        the group of all others this time."""
        keys = _keys(ops)
        slot = keys >> np.uint64(64 - 16)
        numbers = np.where(self._keys[slot] == keys, self._groups[slot], -1)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            # Few are new; two that share a slot are looked up one by one.
            fresh, first, inverse = np.unique(keys[missing], return_index=True, return_inverse=True)
            groups = np.full(len(fresh), -1)
            left = NEW_SHAPES
            for place, (key, at) in enumerate(zip(fresh.tolist(), missing[first].tolist(), strict=True)):
                group = self._others.get(key)
                if len(self._others) > MAX_KEYS:
                    # Shapes that change with the data: they are looked up anew, and the compressor puts them together.
                    self._others.clear()
                if group is None:
                    if not left:
                        continue
                    left -= 1
                    group = self._others[key] = self._number(ops[at : at + 1])
                    if self._groups[key >> 48] < 0:
                        self._keys[key >> 48], self._groups[key >> 48] = key, group
                groups[place] = group
            numbers[missing] = groups[inverse]
            crowded = numbers < 0
            if crowded.any():
                numbers[crowded] = self._number_of_others(int(np.count_nonzero(crowded)))
        return numbers


def _keys(ops: NDArray[np.void]) -> NDArray[np.uint64]:
    """One number for all that distinguishes groups; different groups have the same with a chance of 2^-64."""
    grid, block = ops["grid"], ops["block"]
    what: NDArray[np.uint64] = ops["name"] * _MIX[3]
    for place in range(3):
        what ^= grid[:, place] * _MIX[place] + (block[:, place] * _MIX[place + 1] << np.uint64(1))
    memory = np.flatnonzero(ops["kind"] != GpuKind.KERNEL)
    if len(memory):
        copies = ops[memory]
        kinds = copies["kind"].astype(np.uint64) << np.uint64(16) | copies["copy"].astype(np.uint64) << np.uint64(8)
        what[memory] = (kinds | size_class(copies["bytes"])) * _MIX[0]
    what ^= what >> np.uint64(29)
    what *= _MIX[0]
    what += (ops["device"].astype(np.uint64) << np.uint64(32) | ops["stream"]) * _MIX[1]
    what ^= what >> np.uint64(32)
    what *= _MIX[2]
    what |= np.uint64(1)
    return what


def size_class(size: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sizes of copies by powers of two: the least n with size <= 2^n of each, shape (n,)."""
    _, exponent = np.frexp(np.maximum(size, np.uint64(1)).astype(np.float64) - 1)
    least: NDArray[np.uint64] = exponent.astype(np.uint64)
    return least


def size_text(bits: int) -> str:
    """The largest size of a class in words: 21 → "<= 2 MiB"."""
    size, units = 1 << bits, iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = next(units)
    while size >= 1024 and unit != "EiB":
        size, unit = size // 1024, next(units)
    return f"<= {size} {unit}"


class Ops(NamedTuple):
    """Operations as columns, shape (n,) each: when they were asked for and began, and how long they took, ns."""

    called: NDArray[np.int64]
    start: NDArray[np.int64]
    duration: NDArray[np.int64]
    group: NDArray[np.int64]

    def part(self, begin: int, end: int | None) -> Ops:
        """Those from one place to another."""
        return Ops(*(column[begin:end] for column in self))


class StepOps(NamedTuple):
    """The operations of a step (``NO_STEP``: of none), and begin and end of its time, ns."""

    step: int
    begin_ns: int
    end_ns: int
    ops: Ops


class KernelSteps:
    """The operations of one process until their step is over. ``feed`` them, ``settle`` the steps.

    Attributes:
        outside: Operations that were of no step.
        cut: Steps of which some operations had waited too long: the others are of no step either.
    """

    def __init__(self) -> None:
        self.outside = self.cut = 0
        self._forced_ns = 0
        self._parts: list[Ops] = []
        self._count = 0
        self._newest_ns = 0

    def feed(self, ops: NDArray[np.void], called_ns: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
        """Takes operations.

        Args:
            ops: ``records.GPU_OP``, shape (n,).
            called_ns: When each was asked for, shape (n,).
            groups: The group of each, shape (n,).
        """
        if not len(ops):
            return
        start = ops["start_ns"].astype(np.int64)
        self._parts.append(Ops(called_ns, start, ops["end_ns"].astype(np.int64) - start, groups))
        self._count += len(ops)
        self._newest_ns = max(self._newest_ns, int(called_ns.max()))

    @property
    def size(self) -> int:
        """Operations that wait for their step."""
        return self._count

    def settle(
        self, steps: Iterable[tuple[int, int, int]], *, final: bool = False, most: int | None = None
    ) -> list[StepOps]:
        """The operations of steps that are over, and those of none that came before or between them.

        Args:
            steps: Begin and end in ns, and number, of each, in order of time: all of their operations are here.
            final: No more steps will come.
            most: Operations that may wait. Where there are more, half as many stay: the newest. None: ``KEPT_OPS``.

        Returns:
            In order of time, the operations of each in the order in which they were asked for. What was outside every
            step lasts from its first operation to its last.
        """
        done: Sequence[tuple[int, int, int]] = list(steps)
        limit = done[-1][1] if done else 0
        whole = [(begin_ns, end_ns, step) for begin_ns, end_ns, step in done if begin_ns >= self._forced_ns]
        self.cut += len(done) - len(whole)
        done = whole
        if final:
            limit = self._newest_ns + 1
        elif self._count > (KEPT_OPS if most is None else most):
            called = np.concatenate([part.called for part in self._parts])
            if most is None:
                until = max(int(np.median(called)), int(called.min()) + 1)  # all may have been called at one time
            else:
                last = len(called) - most // 2 - 1
                until = int(np.partition(called, last)[last]) + 1
            limit = max(limit, until)
            self._forced_ns = limit
        elif self._parts and min(int(part.called[0]) for part in self._parts) < self._newest_ns - KEPT_NS:
            limit = max(limit, self._newest_ns - KEPT_NS // 2)
            self._forced_ns = limit
        if not self._count or limit <= 0:
            return []
        ops = Ops(*(np.concatenate(column) for column in zip(*self._parts, strict=True)))
        if np.any(ops.called[1:] < ops.called[:-1]):
            order = np.argsort(ops.called, kind="stable")
            ops = Ops(*(column[order] for column in ops))
        cut = int(np.searchsorted(ops.called, limit))
        ops, rest = ops.part(0, cut), ops.part(cut, None)
        self._count = len(rest.called)
        self._parts = [Ops(*(column.copy() for column in rest))] if self._count else []
        settled: list[StepOps] = []

        def outside(begin: int, end: int) -> None:
            if end > begin:
                part = ops.part(begin, end)
                self.outside += end - begin
                until = int((part.start + part.duration).max())
                settled.append(StepOps(NO_STEP, int(part.start.min()), until, part))

        at = 0
        for begin_ns, end_ns, step in done:
            first, last = np.searchsorted(ops.called, [begin_ns, end_ns]).tolist()
            outside(at, first)
            if last > first:
                settled.append(StepOps(step, begin_ns, end_ns, ops.part(first, last)))
            at = max(at, last)
        outside(at, cut)
        return settled


def describe(op: NDArray[np.void], words: Sequence[str], places: NDArray[np.int32]) -> dict[str, Any]:
    """What a group is called: name, grid and block, stream and device.

    Args:
        op: A record of it, ``records.GPU_OP``, shape (1,).
        words: Names.
        places: By id of a name: its place in ``words``.
    """
    (kind,), name = op_kinds(op).tolist(), int(op["name"][0])
    if kind:
        word = f"{EVENT_KINDS[kind]} {size_text(int(size_class(op['bytes'])[0]))}"
    else:
        word = words[int(places[name])] if name < len(places) else ""
    return {
        "name": word,
        "stream": int(op["stream"][0]),
        "device": int(op["device"][0]),
        "grid": () if kind else tuple(op["grid"][0].tolist()),
        "block": () if kind else tuple(op["block"][0].tolist()),
    }
