"""What a GPU did in each second, and in each step: busy, idle, communicating, and how far ahead of it its CPU was.

Times are unions of intervals, never sums: two kernels that run at once count once. A window is closed when records of
the same process have come that are ``LAG_NS`` newer; CUPTI delivers them within a second or two of their end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model import records
from argus.semantics.phases.gpu import GPU_COLLECTIVE, GPU_PHASE, GpuPhases, communicates, what_of

WINDOW_NS = 1_000_000_000
LAG_NS = 4_000_000_000
KEPT_STEPS = 4096
"""Steps that wait for their operations: none come while GPU times are off."""
KEPT_OPS = 1 << 20
"""Operations of a device that are kept until their step is known: 34 MB, some 50 steps of the largest public traces.
Steps come after about 20."""
OPS_AT_ONCE = 1 << 18
"""Operations whose steps are settled at once, 0.3 s: some twelve steps of the largest public traces."""
IDLE_GAP_NS = 1_000
"""Idle time shorter than this is no gap: it is the order of what a GPU needs between two kernels of one stream."""

USAGE = np.dtype(
    [
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("device", "<u4"),
        ("busy_ns", "<i8"),
        ("compute_ns", "<i8"),
        ("communication_ns", "<i8"),
        ("exposed_communication_ns", "<i8"),
        ("overlapped_communication_ns", "<i8"),
        ("memcpy_ns", "<i8"),
        ("idle_ns", "<i8"),
        ("idle_gaps", "<u4"),
        ("largest_gap_ns", "<i8"),
        ("kernels", "<u4"),
        ("queue_depth_mean", "<f4"),
        ("queue_depth_max", "<i4"),
        ("issue_latency_p50_ns", "<i8"),
        ("issue_latency_p99_ns", "<i8"),
    ]
)
"""One window of one device; the table ``gpu_usage`` documents the fields."""

_COMPUTE, _COMMUNICATION, _MEMORY = range(3)
_MIX = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)
"""Odd numbers with well-mixed bits, the primes of xxHash32: to distinguish kernels of different grids."""
_OP = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),
        ("launch", "<i8"),
        ("tid", "<u4"),
        ("identity", "<u4"),
        ("what", "u1"),
        ("kind", "u1"),
    ]
)
"""``kind``: ``gpu_phases.What``. ``identity``: of kernels, the same for those of one name and grid; of others KiB."""
_UNKNOWN = -1

Intervals = NDArray[np.int64]
"""Shape (n, 2): begin and end, ns."""


def is_communication(name: str) -> bool:
    """Whether a kernel, by its demangled name, is one of NCCL's."""
    return bool(communicates(np.array([what_of(name)], np.uint8))[0])


def union(begin: NDArray[np.int64], end: NDArray[np.int64]) -> Intervals:
    """Intervals without overlap that cover the same time, in order. Empty ones vanish."""
    real = end > begin
    begin, end = begin[real], end[real]
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.ones(len(begin), bool)
    first[1:] = begin[1:] > reach[:-1]
    last = np.ones(len(begin), bool)
    last[:-1] = first[1:]
    return np.column_stack([begin[first], reach[last]])


def time_in(intervals: Intervals, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of each window lies in disjoint, ordered intervals. ``edges``: shape (n + 1,); returns shape (n,)."""
    begin, end = intervals[:, 0], intervals[:, 1]
    before = np.concatenate([[0], np.cumsum(end - begin)])
    count = np.searchsorted(begin, edges, side="left")
    total = before[count]
    inside = count > 0
    total[inside] -= np.maximum(end[count[inside] - 1] - edges[inside], 0)
    return np.diff(total)


def gaps_between(intervals: Intervals, edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The stretches of windows that no interval covers, cut at the windows' edges.

    Returns:
        Window number and length of each, both of shape (m,).
    """
    begin = np.concatenate([[edges[0]], intervals[:, 1]])
    end = np.concatenate([intervals[:, 0], [edges[-1]]])
    begin, end = np.maximum(begin, edges[0]), np.minimum(end, edges[-1])
    begin, end = begin[end > begin], end[end > begin]
    first = np.searchsorted(edges, begin, side="right") - 1
    last = np.searchsorted(edges, end, side="left") - 1
    pieces = last - first + 1
    window = np.repeat(first - np.concatenate([[0], np.cumsum(pieces)[:-1]]), pieces) + np.arange(pieces.sum())
    lower = np.maximum(np.repeat(begin, pieces), edges[window])
    upper = np.minimum(np.repeat(end, pieces), edges[window + 1])
    return window, upper - lower


@dataclass
class _Device:
    """Operations that a window still needs."""

    number: int
    closed_ns: int
    """Windows before this are done; until the first one is, the first operation's start."""
    begun: bool = False
    """Whether a window has been closed."""
    fresh: list[NDArray[np.void]] = field(default_factory=list)
    ops: NDArray[np.void] = field(default_factory=lambda: np.empty(0, _OP))

    @property
    def size(self) -> int:
        """Operations in it."""
        return len(self.ops) + sum(map(len, self.fresh))


def _newest(parts: list[NDArray[np.void]], number: int) -> tuple[NDArray[np.void], int]:
    """Those operations that ended last, by their ends, and how many others there were."""
    joined = np.concatenate(parts)
    joined = joined[np.argsort(joined["end"], kind="stable")]
    return joined[len(joined) - number :].copy(), len(joined) - number


class GpuUsage:
    """The windows of one process's GPUs. ``feed`` what has come, then ``advance``.

    Args:
        most: Operations that are kept of all its GPUs; beyond, the oldest are dropped. None: any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self.late = 0
        """Operations that came after their window was closed."""
        self.over_share = 0
        """Operations that were dropped since there were too many."""
        self.size = 0
        """Operations that a window still needs."""
        self.most = most
        self._devices: dict[int, _Device] = {}
        self._newest_ns = 0
        self._launches_known = False

    def feed(self, ops: NDArray[np.void], communication: NDArray[np.bool_]) -> None:
        """Takes operations.

        Args:
            ops: ``records.GPU_OP``, shape (n,), in any order.
            communication: Which are NCCL's kernels, shape (n,).
        """
        if not len(ops):
            return
        short = _short(ops, communication)
        self._launches_known |= bool((short["launch"] != _UNKNOWN).any())
        self._newest_ns = max(self._newest_ns, int(short["end"].max()))
        for number in np.unique(ops["device"]).tolist():
            of_device = short[ops["device"] == number]
            device = self._devices.get(number)
            first = int(of_device["start"].min())
            if device is None:
                device = self._devices[number] = _Device(number, first)
            elif not device.begun:
                device.closed_ns = min(device.closed_ns, first)
            self.late += int(np.sum(of_device["start"] < device.closed_ns))
            device.fresh.append(of_device)
        self.size += len(short)
        if self.most is not None:
            self.keep(self.most)

    def keep(self, most: int) -> None:
        """Drops the oldest operations where there are more than so many."""
        while self.size > most:
            device = max(self._devices.values(), key=lambda device: device.size)
            device.ops, dropped = _newest([device.ops, *device.fresh], device.size // 2)
            device.fresh = []
            self.size -= dropped
            self.over_share += dropped

    def advance(self, *, final: bool = False) -> NDArray[np.void]:
        """The windows that can be closed.

        Args:
            final: No more operations will come: close all, the last one at the end of the last operation.

        Returns:
            ``USAGE``, by device and time.
        """
        windows = [np.empty(0, USAGE)]
        until = (self._newest_ns - LAG_NS) // WINDOW_NS * WINDOW_NS
        for device in self._devices.values():
            end = self._newest_ns if final else until
            if end <= device.closed_ns:
                continue
            device.ops = np.concatenate([device.ops, *device.fresh])
            device.fresh = []
            first = device.closed_ns // WINDOW_NS + 1
            inner = np.arange(first, -(-end // WINDOW_NS), dtype=np.int64) * WINDOW_NS
            edges = np.concatenate([[device.closed_ns], inner, [end]])
            windows.append(_windows(device, edges, self._launches_known))
            device.closed_ns, device.begun = end, True
            needed = device.ops["end"] > end
            self.size -= int(np.sum(~needed))
            device.ops = device.ops[needed]
        return np.concatenate(windows)


STEP_USAGE = np.dtype([("step", "<u4"), *((name, USAGE[name]) for name in USAGE.names or ())])
"""``USAGE`` of one step of one device."""


@dataclass
class _Settling:
    """The steps of a device that are over, until they are added up.

    Attributes:
        ops: All operations that are kept of it, in order of launch.
        bounds, over: Begin and end of each step on the CPU and on the GPU, shape (n, 2).
        steps: Their numbers.
        rows, phases: What has been found by now: ``STEP_USAGE``, ``GPU_PHASE``.
    """

    number: int
    ops: NDArray[np.void]
    bounds: NDArray[np.int64]
    over: NDArray[np.int64]
    steps: list[int]
    rows: list[NDArray[np.void]] = field(default_factory=list)
    phases: list[NDArray[np.void]] = field(default_factory=list)


class GpuSteps:
    """The steps of one process's GPUs. ``feed`` what ran and which steps there were, then ``advance``.

    A step of the CPU ends while the GPU still carries it out. On the GPU it ends when everything has ended that was
    launched before it ended on the CPU; where no launches are known, when it ended on the CPU.

    Args:
        most: Operations that are kept of all its GPUs; beyond, the oldest are dropped. None: :data:`KEPT_OPS` of each.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.dropped = 0
        """Operations that were dropped since their step did not come."""
        self.over_share = 0
        """Operations that were dropped since others need the room (``keep``), once there are steps; and steps that have
        no row, as their operations were dropped before there was one."""
        self.size = 0
        """Operations that wait for their step."""
        self.phases = GpuPhases()
        self._split: list[NDArray[np.void]] = []
        self._collectives: list[NDArray[np.void]] = []
        self._over_now: list[tuple[int, int, int]] = []
        self._ops: dict[int, list[NDArray[np.void]]] = {}
        self._parts: deque[tuple[_Settling, Callable[[_Settling], None]]] = deque()
        """What is to be done yet for the steps that are over: for operations that are too many to do it at once."""
        self._done: list[tuple[int, int, int]] = []
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=KEPT_STEPS)
        self._stepless = True
        """Whether no step has come yet: of what never has one nothing is missing."""
        self._recorded_ns = 0
        """When the first operation began."""
        self._given_up_ns = 0
        """Up to when operations were dropped for others while there was no step."""
        self._first_ns = 0
        self._newest_ns = 0
        self._due_ns = 0
        self._launches_known = False

    def feed(
        self, ops: NDArray[np.void], communication: NDArray[np.bool_], kinds: NDArray[np.uint8] | None = None
    ) -> None:
        """Takes operations, as ``GpuUsage.feed``. ``kinds``: what they are, ``gpu_phases.What``, shape (n,)."""
        if not len(ops):
            return
        short = _short(ops, communication, kinds)
        self._launches_known |= bool((short["launch"] != _UNKNOWN).any())
        self._recorded_ns = self._recorded_ns or int(short["start"].min())
        self._first_ns = self._first_ns or self._recorded_ns
        self._newest_ns = max(self._newest_ns, int(short["end"].max()))
        for number in np.unique(ops["device"]).tolist():
            kept = self._ops.setdefault(number, [])
            kept.append(short[ops["device"] == number])
            self.size += len(kept[-1])
            if sum(map(len, kept)) > KEPT_OPS:
                self.dropped += self._drop(number, KEPT_OPS // 2)
        if self.most is not None:
            self.dropped += self._shrink(self.most)

    def keep(self, most: int) -> None:
        """Drops the oldest operations where there are more than so many, since others need the room."""
        dropped = self._shrink(most)
        if not self._stepless:
            self.over_share += dropped
        elif dropped:
            self.dropped += dropped
            self._first_ns = self._given_up_ns = self._first_ns if self.size else self._newest_ns

    def _shrink(self, most: int) -> int:
        """Leaves no more than so many. Returns how many it dropped."""
        dropped = self._abandon() if self.size > most else 0
        while self.size > most:
            sizes = {number: sum(map(len, kept)) for number, kept in self._ops.items()}
            number = max(sizes, key=sizes.__getitem__)
            dropped += self._drop(number, sizes[number] // 2)
        return dropped

    def _drop(self, number: int, left: int) -> int:
        """Drops all operations of a device but those that ended last. Returns how many."""
        newest, dropped = _newest(self._ops[number], left)
        self.size -= dropped
        self._ops[number] = [newest]
        if len(newest):
            self._first_ns = max(self._first_ns, int(newest["end"][0]))  # of all devices
        return dropped

    def learn(self, ops: NDArray[np.void], communication: NDArray[np.bool_], kinds: NDArray[np.uint8]) -> None:
        """Learns how long transfers take, from operations that are fed later. Arguments as for ``feed``."""
        self.phases.learn(_short(ops, communication, kinds))

    def take_phases(self) -> NDArray[np.void]:
        """``gpu_phases.GPU_PHASE`` of the steps that ``advance`` gave since the last call."""
        parts, self._split = self._split, []
        return np.concatenate([np.empty(0, GPU_PHASE), *parts])

    def take_collectives(self) -> NDArray[np.void]:
        """``gpu_phases.GPU_COLLECTIVE`` of the steps that ``advance`` gave since the last call."""
        parts, self._collectives = self._collectives, []
        return np.concatenate([np.empty(0, GPU_COLLECTIVE), *parts])

    def take_over(self) -> list[tuple[int, int, int]]:
        """Begin and end on the CPU in ns, and number, of the steps that ``advance`` found over since the last call."""
        steps, self._over_now = self._over_now, []
        return steps

    def feed_steps(self, steps: NDArray[np.void]) -> None:
        """Takes the rank's steps: rows of ``semantics.steps.by_calls.ITERATION``, in order of time."""
        columns = (steps[name].tolist() for name in ("ts_ns", "duration_ns", "step"))
        if self._parts:
            self.over_share += max(
                len(self._steps) + len(steps) - KEPT_STEPS, 0
            )  # steps, of an operation each at least
        self._stepless = self._stepless and not len(steps)
        self._steps += [(ts, ts + duration, step) for ts, duration, step in zip(*columns, strict=True)]

    def advance(self, *, final: bool = False) -> NDArray[np.void]:
        """The steps that are over on the GPUs, too. Those of very many operations come in several calls, a device at a
        time, and ``take_over`` has them with the last device.

        Args:
            final: No more operations will come: all of it is done at once.

        Returns:
            ``STEP_USAGE``, by device and step.
        """
        finished = [np.empty(0, STEP_USAGE)]
        left = OPS_AT_ONCE
        while final or left == OPS_AT_ONCE:
            if not self._parts:
                left -= self._begin(final=final) // 4
            if not self._parts:
                break
            while self._parts:
                settling, part = self._parts[0]
                cost = -(-len(settling.ops) // _STAGES)
                if not final and left < min(cost, OPS_AT_ONCE):
                    break
                self._parts.popleft()
                left -= cost
                part(settling)
                if not self._parts or self._parts[0][0] is not settling:
                    finished += settling.rows
                    self.size -= len(settling.ops)
            if self._parts:
                break
            self._over_now += self._done
        return np.concatenate(finished)

    def _begin(self, *, final: bool) -> int:
        """Finds the steps that are over. Returns how many operations it looked at."""
        while self._first_ns and self._steps and self._steps[0][0] < self._first_ns:
            begin_ns, *_ = self._steps.popleft()  # it was not recorded from its beginning on
            self.over_share += self._recorded_ns <= begin_ns < self._given_up_ns
        # Records come about once a second, and looking at them costs a sort.
        if not self._steps or not self._ops or (not final and self._newest_ns < self._due_ns):
            return 0
        self._due_ns = self._newest_ns + WINDOW_NS
        looked, ready = self.size, len(self._steps)
        for number, kept in self._ops.items():
            ops = np.concatenate(kept)
            ops = ops[np.argsort(ops["launch"], kind="stable")]
            self._ops[number] = [ops]
            if not final:
                # Records of what ended LAG_NS before the newest are here. If something among them was launched after a
                # step was over, so are all that were launched until then: the step's own, and what was in the queue.
                settled = ops["launch"][ops["end"] <= self._newest_ns - LAG_NS]
                idle = not len(ops) or int(ops["end"].max()) <= self._newest_ns - LAG_NS  # another one works
                by_launches = len(settled) and self._launches_known and not idle
                reach = int(settled.max()) if by_launches else self._newest_ns - LAG_NS
                ends = np.array([end for _, end, _ in self._steps], np.int64)
                ready = min(ready, int(np.sum(np.maximum(self._over(ops, ends), ends) < reach)))
        if not ready:
            return looked
        self._done = [self._steps.popleft() for _ in range(ready)]
        bounds = np.array([[begin, end] for begin, end, _ in self._done], np.int64)
        for number, (ops,) in self._ops.items():
            over = self._over(ops, bounds.ravel()).reshape(-1, 2)
            settling = _Settling(number, ops, bounds, over, [step for _, _, step in self._done])
            self._parts += [(settling, part) for part in (self._add_up, self._split_phases, self._find_collectives)]
            self._ops[number] = [ops[ops["end"] > over[-1, 0]]]
            self.size += len(self._ops[number][0])
        return looked

    def _abandon(self) -> int:
        """Gives up the steps that are being settled. Returns how many operations are in none of them by that."""
        left = {settling.number: settling for settling, _ in self._parts}.values()
        self.size -= sum(len(settling.ops) for settling in left)
        if left:
            self._over_now += self._done
        self._parts.clear()
        return sum(int(np.sum(settling.ops["end"] <= settling.over[-1, 0])) for settling in left)

    def _add_up(self, settling: _Settling) -> None:
        """The windows of these steps of a device."""
        device = _Device(settling.number, 0, ops=settling.ops)
        stretches = _stretches(settling.bounds)
        for which, out in _windows_of_steps(device, settling.over, stretches, self._launches_known):
            out["step"] = [settling.steps[i] for i in which.tolist()]
            settling.rows.append(out)

    def _split_phases(self, settling: _Settling) -> None:
        """The phases of these steps of a device."""
        if settling.rows:
            phases = self.phases.split(settling.ops, *_edges_of(settling.rows))
            phases["device"] = settling.number
            settling.phases.append(phases)

    def _find_collectives(self, settling: _Settling) -> None:
        """Its collectives: the last of what is done for them."""
        self._split += settling.phases
        if settling.rows:
            collectives = self.phases.collectives(settling.ops, *_edges_of(settling.rows))
            collectives["device"] = settling.number
            self._collectives.append(collectives)

    def _over(self, ops: NDArray[np.void], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """When what was launched up to each of these times had ended, shape (n,). ``ops``: in order of launch."""
        if not self._launches_known:
            return bounds
        known = ops[ops["launch"] != _UNKNOWN]
        ended = np.maximum.accumulate(known["end"]) if len(known) else known["end"]
        place = np.searchsorted(known["launch"], bounds, side="right")
        return np.where(place > 0, ended[np.maximum(place, 1) - 1], bounds) if len(known) else bounds


_STAGES = 3
"""For each device: what ``GpuSteps._begin`` puts into ``_parts``."""


def _edges_of(parts: list[NDArray[np.void]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps as windows that follow one another, and the step of each; -1: of none. ``parts``: ``STEP_USAGE``."""
    rows = np.concatenate(parts)
    ends = rows["start_ns"] + rows["duration_ns"]
    edges: list[int] = []
    steps: list[int] = []
    for begin, end, step in zip(rows["start_ns"].tolist(), ends.tolist(), rows["step"].tolist(), strict=True):
        if edges and begin > edges[-1]:
            steps.append(-1)
        edges += [begin, end] if not edges or begin > edges[-1] else [end]
        steps.append(step)
    return np.array(edges, np.int64), np.array(steps, np.int64)


def _stretches(bounds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of steps that follow one another without a break. ``bounds``: begin and end of each, shape (n, 2)."""
    return np.split(np.arange(len(bounds)), np.flatnonzero(bounds[1:, 0] != bounds[:-1, 1]) + 1)


def _windows_of_steps(
    device: _Device, over: NDArray[np.int64], stretches: list[NDArray[np.int64]], launches_known: bool
) -> list[tuple[NDArray[np.int64], NDArray[np.void]]]:
    """The windows of steps, as ``STEP_USAGE`` without their numbers, and which steps they are of: those without time
    are left out.

    Args:
        device: All operations that are kept of it.
        over: Begin and end of each step on the GPU, shape (n, 2).
        stretches: As ``_stretches``: such steps share an edge.
        launches_known: Whether launches are known of any operation.
    """
    begin, end = np.empty(len(over), np.int64), np.empty(len(over), np.int64)
    for part in stretches:
        edges = np.maximum.accumulate(np.append(over[part, 0], over[part[-1], 1]))
        begin[part], end[part] = edges[:-1], edges[1:]
    real = np.flatnonzero(end > begin)
    begin, end = begin[real], end[real]
    found = []
    # What is between stretches is a window, too: each operation is looked at once, however many stretches there are.
    for rows in np.split(np.arange(len(real)), np.flatnonzero(begin[1:] < end[:-1]) + 1):
        if not len(rows):
            continue
        edges = np.unique(np.concatenate([begin[rows], end[rows]]))
        ops = device.ops
        # What began later was in the queue, if it was launched by then.
        known = (ops["launch"] != _UNKNOWN) & (ops["launch"] < edges[-1])
        inside = ops[(ops["end"] > edges[0]) & ((ops["start"] < edges[-1]) | known)]
        usage = _windows(_Device(device.number, 0, ops=inside), edges, launches_known)
        usage = usage[np.searchsorted(edges, begin[rows])]
        out = np.zeros(len(rows), STEP_USAGE)
        for name in USAGE.names or ():
            out[name] = usage[name]
        found.append((real[rows], out))
    return found


def _short(
    ops: NDArray[np.void], communication: NDArray[np.bool_], kinds: NDArray[np.uint8] | None = None
) -> NDArray[np.void]:
    """What windows need of operations."""
    short = np.empty(len(ops), _OP)
    short["tid"], short["kind"] = ops["launch_tid"], 0 if kinds is None else kinds
    # A graph's collectives were called when it was captured: none of the calls before its launch is theirs.
    short["tid"][communication & (ops["graph"] != 0)] = 0
    grid = ops["grid"].astype(np.uint32) @ _MIX
    memory = ops["kind"] != records.GpuKind.KERNEL
    short["identity"] = np.where(memory, ops["bytes"] >> np.uint64(10), ops["name"] * _MIX[0] ^ grid)
    short["start"], short["end"] = ops["start_ns"], ops["end_ns"]
    known = (ops["flags"] & records.GPU_LAUNCH_MATCHED) != 0
    short["launch"] = np.where(known, ops["launch_ns"].astype(np.int64), _UNKNOWN)
    short["what"] = np.where(communication, _COMMUNICATION, _COMPUTE)
    short["what"][ops["kind"] != records.GpuKind.KERNEL] = _MEMORY
    return short


def _windows(device: _Device, edges: NDArray[np.int64], launches_known: bool) -> NDArray[np.void]:
    """The windows between ``edges`` (n + 1), from all operations that reach into them."""
    ops = device.ops[np.argsort(device.ops["start"], kind="stable")]  # once, for all that is sorted below
    out = np.zeros(len(edges) - 1, USAGE)
    out["start_ns"], out["duration_ns"], out["device"] = edges[:-1], np.diff(edges), device.number

    def covered(chosen: NDArray[np.bool_]) -> Intervals:
        part = ops[chosen]
        return union(np.maximum(part["start"], edges[0]), np.minimum(part["end"], edges[-1]))

    busy = covered(np.ones(len(ops), bool))
    out["busy_ns"] = time_in(busy, edges)
    out["compute_ns"] = time_in(covered(ops["what"] == _COMPUTE), edges)
    out["communication_ns"] = time_in(covered(ops["what"] == _COMMUNICATION), edges)
    either = time_in(covered(ops["what"] != _MEMORY), edges)
    out["exposed_communication_ns"] = either - out["compute_ns"]
    out["overlapped_communication_ns"] = out["communication_ns"] - out["exposed_communication_ns"]
    out["memcpy_ns"] = time_in(covered(ops["what"] == _MEMORY), edges)
    out["idle_ns"] = out["duration_ns"] - out["busy_ns"]
    window, length = gaps_between(busy, edges)
    real = length >= IDLE_GAP_NS
    out["idle_gaps"] = np.bincount(window[real], minlength=len(out))
    np.maximum.at(out["largest_gap_ns"], window[real], length[real])

    begun = ops[(ops["start"] >= edges[0]) & (ops["start"] < edges[-1])]
    place = np.searchsorted(edges, begun["start"], side="right") - 1
    kernel = begun["what"] != _MEMORY
    out["kernels"] = np.bincount(place[kernel], minlength=len(out))
    matched = begun["launch"] != _UNKNOWN
    _latencies(out, place[kernel & matched], (begun["start"] - begun["launch"])[kernel & matched])
    known = np.bincount(place[matched], minlength=len(out)) > 0
    known |= launches_known & (np.bincount(place, minlength=len(out)) == 0)
    _queue(out, ops[(ops["launch"] != _UNKNOWN) & (ops["start"] > edges[0])], edges)
    out["queue_depth_mean"][~known] = out["queue_depth_max"][~known] = _UNKNOWN
    return out


def _latencies(out: NDArray[np.void], window: NDArray[np.int64], latency: NDArray[np.int64]) -> None:
    """Percentiles by nearest rank: a latency that occurred."""
    order = np.lexsort((latency, window))
    latency = latency[order]
    count = np.bincount(window, minlength=len(out))
    first = np.cumsum(count) - count
    some = count > 0
    for name, share in (("issue_latency_p50_ns", 0.5), ("issue_latency_p99_ns", 0.99)):
        rank = np.ceil(count[some] * share).astype(np.int64) - 1
        out[name] = _UNKNOWN
        out[name][some] = latency[first[some] + rank]


def _queue(out: NDArray[np.void], ops: NDArray[np.void], edges: NDArray[np.int64]) -> None:
    """How many operations were launched and had not begun, over time."""
    launch, start = np.sort(ops["launch"]) - edges[0], np.sort(ops["start"]) - edges[0]
    edges = edges - edges[0]

    def up_to(times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum of min(time, edge), at every edge."""
        count = np.searchsorted(times, edges)
        sums = np.concatenate([[0], np.cumsum(times)])
        below: NDArray[np.int64] = sums[count] + (len(times) - count) * edges
        return below

    waited = np.diff(up_to(start)) - np.diff(up_to(launch))
    out["queue_depth_mean"] = waited / out["duration_ns"]

    def depth(at: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(launch, at, side="right") - np.searchsorted(start, at, side="right")

    deepest = depth(edges[:-1])
    inside = launch[(launch >= 0) & (launch < edges[-1])]
    np.maximum.at(deepest, np.searchsorted(edges, inside, side="right") - 1, depth(inside))
    out["queue_depth_max"] = deepest
