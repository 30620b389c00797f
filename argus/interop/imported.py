"""What other tools recorded, on its way into the store: one rank's calls, GPU operations, collectives and steps.

An importer (``kineto``, ``nsys``) reads a file into :class:`Recording`, columns on one clock; :func:`find_all_steps`
says what a step is, and :func:`write` stores it as a traced run is stored. Nothing is written before all files were
read.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus import __version__, records
from argus.capture import calls as hooked
from argus.capture import collectives, gpu_rows
from argus.capture.launches import Origin, constant, dictionary, triples
from argus.capture.pytorch import Membership
from argus.errors import EXIT_FAILURE, EXIT_USAGE, ArgusError
from argus.records import COLLECTIVE, GPU_OP, GpuKind
from argus.semantics.gpu import GpuSteps, GpuUsage, time_in, union
from argus.semantics.gpu_phases import (
    GPU_METHODS,
    GPU_PHASES,
    OF_NCCL,
    Transfers,
    What,
    communicates,
    kinds_of,
    what_of,
)
from argus.semantics.groups import COMMUNICATOR, RankCalls, find_groups
from argus.semantics.mesh import Group, Traffic, find_mesh
from argus.semantics.offline_steps import find_steps
from argus.semantics.steps import ITERATION, PROOF_UNITS, StepTracker
from argus.store.open import Store
from argus.store.reader import newest_run
from argus.store.schema import ensure_schema
from argus.store.writer import Writer

Int = NDArray[np.int64]
Progress = Callable[[str, float], None]
"""Told what is done and how much of it, 0 to 1."""

CALL = np.dtype(
    [
        ("ts_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("correlation", "<i8"),
        ("op", "<i8"),
        ("tid", "<u4"),
        ("function", "<i4"),
        ("kind", "<i4"),
        ("result", "<i4"),
    ]
)
"""One CUDA call. ``function``: place in ``Recording.functions``; ``kind``: in ``KINDS``; ``op``: place of the first GPU
operation that it launched, -1: none is known."""

MARK = np.dtype([("number", "<i8"), ("begin_ns", "<i8"), ("end_ns", "<i8")])
"""One step that the recording itself tells of."""

ANNOTATIONS, ONLINE, OFFLINE = "annotations", "calls", "repetition"
"""How steps were found: the recording tells; by the detector of live traces; by that of whole recordings."""
UNKNOWN_TYPE = 255
"""``COLLECTIVE["dtype"]`` that stands for none known."""
COVERED = 0.5
"""Annotations are steps if they cover this share of the time from the first to the last."""
NEXT_NS_SHARE = 0.1
"""A step lasts until the next one begins, unless the pause between them is longer than this share of it."""
CHUNK = 1 << 18
FIRST_NUMBER = 1 << 24
SLICE = 20_000
"""Calls that the detector of live traces gets at once: less than its window."""
ALIGN_WITHIN = 1024
"""Calls that two ranks' recordings of one communicator may begin apart."""
ALIGN_CALLS = 4
FLUSH_S = 120.0

KINDS = ["other", *dict.fromkeys(call.kind for call in hooked.CALLS if call.program == "cuda" or call.kind == "module")]
_LAUNCHING = [KINDS.index(kind) for kind in ("kernel", "graph")]
_WORKING = [place for place, kind in enumerate(KINDS) if kind.startswith(("kernel", "graph", "mem"))]
_SYNC = KINDS.index("sync")
_PATTERNS = (
    ("kernel", re.compile(r"Launch.*Kernel|ModuleLaunch|ExtLaunch")),
    ("graph", re.compile(r"GraphLaunch")),
    ("memcpy", re.compile(r"Memcpy")),
    ("memset", re.compile(r"Memset")),
    ("sync", re.compile(r"Synchronize$")),
    ("alloc", re.compile(r"(Malloc|MemAlloc)")),
    ("free", re.compile(r"(^|[a-z])Free|MemFree")),
)
_TRAINING = (What.BACKWARD, What.OPTIMIZER)

_OPS = {
    "allreduce": "AllReduce", "allreducesparse": "AllReduce", "allreducecoalesced": "AllReduce",
    "allgather": "AllGather", "allgatherbase": "AllGather", "allgatherintotensor": "AllGather",
    "allgatherintotensorcoalesced": "AllGather", "allgathercoalesced": "AllGather", "allgathertotensor": "AllGather",
    "reducescatter": "ReduceScatter", "reducescatterbase": "ReduceScatter", "reducescattertensor": "ReduceScatter",
    "reducescattertensorcoalesced": "ReduceScatter", "broadcast": "Broadcast", "bcast": "Broadcast",
    "broadcastoop": "Broadcast", "reduce": "Reduce", "reduceoop": "Reduce", "alltoall": "AlltoAll",
    "alltoallbase": "AlltoAll", "alltoallv": "AlltoAll", "gather": "Gather", "scatter": "Scatter",
    "barrier": "Barrier", "send": "Send", "recv": "Recv",
}  # fmt: skip
_CALL_OF = {op: hooked.BY_SYMBOL[hooked.symbol_of(op)].id for op in dict.fromkeys(_OPS.values())}
_P2P = [_CALL_OF["Send"], _CALL_OF["Recv"]]
_KERNEL_OP = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+?)(?:_|\(|$)")


@dataclass(frozen=True)
class CpuRange:
    """A range on the CPU that stands for a collective: ``op`` empty where its name does not say which.

    Attributes:
        group: Name and ranks of the process group, as the recording has them; empty: not told.
        count: Elements as passed to NCCL; 0: not known.
        dtype: Code as in ``COLLECTIVE``; UNKNOWN_TYPE: not known.
        size: Ranks of the group; -1: not known.
        number: The group's own number of the call; -1: not known.
    """

    op: str
    begin_ns: int
    end_ns: int
    tid: int
    group: tuple[str, str] = ("", "")
    count: int = 0
    dtype: int = UNKNOWN_TYPE
    size: int = -1
    number: int = -1
    peer: int = -1


@dataclass
class Recording:
    """What one file says of one rank. Times are wall-clock ns, or count from ``zero``.

    Attributes:
        source: "kineto" or "nsys".
        rank_source: What told the rank: "trace", "file name" or "order".
        world_size: Ranks of the job; 0: not known.
        functions: Names of CUDA calls; ``calls["function"]`` are places in it.
        busy: When a CUDA call of any kind was going on, as ``semantics.gpu.union`` gives it.
        symbols: Names of kernels by ``ops["name"]``; the first is of none.
        gpu_end: When each collective's kernels had ended, -1: not known. Shape of ``collectives``.
        numbers: The process group's own number of each collective, -1: not known. Shape of ``collectives``.
        groups: By handle: name, ranks (empty: not told) and size (-1: not known).
        marks: Steps that the recording tells of, and ``marked_by``: how it calls them.
        zero: What time 0 is, in words.
    """

    path: str
    source: str
    rank: int
    rank_source: str
    pid: int
    world_size: int = 0
    host: str = "unknown"
    command: str = ""
    calls: NDArray[np.void] = field(default_factory=lambda: np.empty(0, CALL))
    functions: list[str] = field(default_factory=list)
    busy: Int = field(default_factory=lambda: np.empty((0, 2), np.int64))
    ops: NDArray[np.void] = field(default_factory=lambda: np.empty(0, GPU_OP))
    symbols: list[str] = field(default_factory=lambda: [""])
    collectives: NDArray[np.void] = field(default_factory=lambda: np.empty(0, COLLECTIVE))
    gpu_end: Int = field(default_factory=lambda: np.empty(0, np.int64))
    numbers: Int = field(default_factory=lambda: np.empty(0, np.int64))
    groups: dict[int, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)
    marks: NDArray[np.void] = field(default_factory=lambda: np.empty(0, MARK))
    marked_by: str = ""
    zero: str = "1970 (UTC)"
    counters: Tally[str] = field(default_factory=Tally)
    losses: Tally[str] = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)

    def kinds(self) -> NDArray[np.uint8]:
        """What the operations are, ``gpu_phases.What``. Shape of ``ops``."""
        by_name = np.array([what_of(symbol) for symbol in self.symbols], np.uint8)
        return kinds_of(self.ops, by_name[self.ops["name"]])

    def communication(self) -> NDArray[np.bool_]:
        """Which operations are NCCL's kernels. Shape of ``ops``."""
        found: NDArray[np.bool_] = communicates(self.kinds())
        return found

    def launching(self) -> NDArray[np.bool_]:
        """Which calls launch kernels and graphs that are not NCCL's. Shape of ``calls``."""
        op = self.calls["op"]
        of_nccl = (op >= 0) & np.append(self.communication(), False)[op]
        found: NDArray[np.bool_] = np.isin(self.calls["kind"], _LAUNCHING) & ~of_nccl
        return found

    @property
    def span(self) -> tuple[int, int]:
        """First and last time in it, ns; (0, 0): it is empty."""
        begins = [a.min() for a in (self.calls["ts_ns"], self.marks["begin_ns"]) if len(a)]
        ends = [a.max() for a in (self.calls["ts_ns"] + self.calls["duration_ns"], self.marks["end_ns"]) if len(a)]
        if len(self.ops):
            begins.append(self.ops["start_ns"].min())
            ends.append(self.ops["end_ns"].max())
        if len(self.collectives):
            begins.append(self.collectives["ts_ns"].min())
            ends.append(self.collectives["ts_ns"].max())
        return (int(min(begins)), int(max(ends))) if begins else (0, 0)


@dataclass
class RankSteps:
    """Steps of one rank: ``ITERATION`` rows (``method`` unused), how they were found, and the reason in words."""

    rows: NDArray[np.void]
    method: str
    why: str


# ---- reading


def function_kind(name: str) -> tuple[str, int]:
    """A CUDA or HIP function as the library exports it, without Nsight's version, and its place in KINDS."""
    plain = re.sub(r"_v\d+(?=_pt[sd]z$|$)", "", name)
    known = hooked.BY_SYMBOL.get(plain) or hooked.BY_SYMBOL.get(re.sub(r"^hip", "cuda", plain))
    if known is not None and known.kind in KINDS:
        return plain, KINDS.index(known.kind)
    if re.match(r"(cu|hip)[A-Z]|cuda[A-Z]", plain):
        for kind, pattern in _PATTERNS:
            if pattern.search(plain):
                return plain, KINDS.index(kind)
    return plain, 0


def connect(recording: Recording, calls: NDArray[np.void], ops: NDArray[np.void]) -> None:
    """Puts calls and operations into a recording: sorted, connected by correlation id, nested calls left out.

    Args:
        recording: Its ``functions`` are those of ``calls``.
        calls: ``CALL`` rows of all kinds; ``kind`` and ``op`` are filled in here.
        ops: ``GPU_OP`` rows; what is known of their launches is filled in here. ``correlation`` 0: not known.
    """
    shown = [function_kind(name) for name in recording.functions]
    recording.functions = [name for name, _ in shown]
    calls["kind"] = np.array([kind for _, kind in shown], np.int32)[calls["function"]]
    calls = calls[np.lexsort((-calls["duration_ns"], calls["ts_ns"]))]
    recording.busy = union(calls["ts_ns"], calls["ts_ns"] + calls["duration_ns"])
    ops = ops[np.argsort(ops["start_ns"], kind="stable")]
    # Of operations with one number (a graph's) the first; numbers wrap at 2^32 in CUPTI.
    by_number = np.argsort(ops["correlation"], kind="stable")
    numbers = ops["correlation"][by_number].astype(np.int64)
    place = np.searchsorted(numbers, calls["correlation"])
    inside = np.minimum(place, max(len(numbers) - 1, 0))
    found = (place < len(numbers)) & (calls["correlation"] != 0)
    if len(numbers):
        found &= numbers[inside] == calls["correlation"]
        calls["op"] = np.where(found, by_number[inside], -1)
    else:
        calls["op"] = -1
    calls = _without_nested(recording, calls)
    left_out = (calls["kind"] == 0) & (calls["op"] < 0)
    recording.counters["calls_of_other_kinds"] += int(left_out.sum())
    calls = calls[~left_out]

    launching = np.flatnonzero(calls["op"] >= 0)
    keys = ops["correlation"][calls["op"][launching]].astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys, launching = keys[order], launching[order]
    place = np.searchsorted(keys, ops["correlation"].astype(np.int64))
    inside = np.minimum(place, max(len(keys) - 1, 0))
    if len(keys):
        matched = (place < len(keys)) & (keys[inside] == ops["correlation"]) & (ops["correlation"] != 0)
        by = calls[launching[inside]]
        for target, values in (
            ("launch_ns", by["ts_ns"]),
            ("launch_end_ns", by["ts_ns"] + by["duration_ns"]),
            ("launch_tid", by["tid"]),
        ):
            ops[target][matched] = values[matched]
        ops["flags"][matched] |= records.GPU_LAUNCH_MATCHED | records.GPU_LAUNCH_PROBED
        early = matched & (ops["start_ns"] < ops["launch_ns"])
        recording.counters["starts_clamped"] += int(early.sum())
        ops["start_ns"][early] = ops["launch_ns"][early]
        ops["end_ns"][early] = np.maximum(ops["end_ns"][early], ops["start_ns"][early])
        ops["flags"][early] |= records.GPU_START_CLAMPED
    recording.counters["operations_without_launch"] += int(np.sum(ops["flags"] & records.GPU_LAUNCH_MATCHED == 0))
    recording.calls, recording.ops = calls, ops


def _without_nested(recording: Recording, calls: NDArray[np.void]) -> NDArray[np.void]:
    """Calls without those of the driver inside a call of the runtime that does the same, as live traces have them."""
    driver = np.array([re.match(r"cu[A-Z]", name) is not None for name in recording.functions], bool)[calls["function"]]
    if not driver.any():
        return calls
    nested = np.zeros(len(calls), bool)
    end = calls["ts_ns"] + calls["duration_ns"]
    for tid in np.unique(calls["tid"][driver]).tolist():
        outer = np.flatnonzero((calls["tid"] == tid) & ~driver & (calls["kind"] > 0))
        inner = np.flatnonzero((calls["tid"] == tid) & driver)
        place = np.searchsorted(calls["ts_ns"][outer], calls["ts_ns"][inner], side="right") - 1
        holds = place >= 0
        around = outer[np.maximum(place, 0)] if len(outer) else inner
        holds &= (end[around] >= end[inner]) & (len(outer) > 0)
        nested[inner[holds]] = True
        for mine, above in zip(inner[holds].tolist(), around[holds].tolist(), strict=True):
            if calls["op"][above] < 0:
                calls["op"][above] = calls["op"][mine]
    recording.counters["nested"] += int(nested.sum())
    return calls[~nested]


def operation_name(text: str) -> str:
    """The collective that PyTorch, NCCL or a kernel of NCCL calls so; empty: none."""
    kernel = _KERNEL_OP.search(text)
    name = kernel[1] if kernel else text.split(",")[0].removeprefix("nccl:").removeprefix("c10d::")
    name = re.sub(r"[^a-z]", "", name.split(" ")[0].lower().removeprefix("nccl"))
    return _OPS.get(name, "")


def take_collectives(recording: Recording, ranges: Sequence[CpuRange], detail: dict[int, CpuRange]) -> None:
    """Makes collectives of CPU ranges and of NCCL's kernels. A kernel launched in a range is that call.

    Args:
        recording: With calls and operations connected.
        ranges: What the CPU side tells; of ranges in one another, the outer one.
        detail: By place in ``recording.ops``: what a kernel itself tells. Its times are not looked at.
    """
    ranges = sorted(ranges, key=lambda each: (each.tid, each.begin_ns))
    ops = recording.ops
    kernels = np.flatnonzero(recording.communication())
    begins = np.array([each.begin_ns for each in ranges], np.int64)
    tids = np.array([each.tid for each in ranges], np.int64)
    of_range: dict[int, list[int]] = {}
    alone: list[int] = []
    first = {tid: int(np.searchsorted(tids, tid)) for tid in set(tids.tolist())}
    last = {tid: int(np.searchsorted(tids, tid, side="right")) for tid in first}
    for place in kernels.tolist():
        launched, tid = int(ops["launch_ns"][place]), int(ops["launch_tid"][place])
        low = first.get(tid, 0)
        near = low + int(np.searchsorted(begins[low : last.get(tid, 0)], launched, side="right")) - 1
        if launched and tid in first and near >= low and launched <= ranges[near].end_ns:
            of_range.setdefault(near, []).append(place)
        else:
            alone.append(place)
    found: list[tuple[int, int, int, int, str, CpuRange | None, int]] = []
    for number, each in enumerate(ranges):
        mine = of_range.get(number, [])
        told = next((detail[place] for place in mine if place in detail), None)
        op = each.op or (told.op if told else "") or _kernel_operation(recording, mine)
        if not op:
            continue  # a wait
        chosen = each if each.count or each.group[0] or told is None else told
        end = max((int(ops["end_ns"][place]) for place in mine), default=-1)
        stream = int(ops["stream"][mine[0]]) if mine else -1
        found.append((each.begin_ns, each.end_ns - each.begin_ns, each.tid, end, op, chosen, stream))
    for place in alone:
        told = detail.get(place)
        op = (told.op if told else "") or _kernel_operation(recording, [place])
        if not op:
            recording.counters["collectives_not_understood"] += 1
            continue
        launched = int(ops["launch_ns"][place])
        inside = int(ops["launch_end_ns"][place]) - launched if launched else records.NOT_MEASURED
        begin = launched or int(ops["start_ns"][place])
        end, stream, tid = int(ops["end_ns"][place]), int(ops["stream"][place]), int(ops["launch_tid"][place])
        found.append((begin, inside, tid, end, op, told, stream))
    found.sort(key=lambda row: row[0])
    _fill_collectives(recording, found)


def _kernel_operation(recording: Recording, places: list[int]) -> str:
    for place in places:
        symbol = recording.symbols[recording.ops["name"][place]]
        if op := operation_name(symbol):
            return op
        if "SendRecv" in symbol:
            # NCCL has one kernel for Send, Recv and all-to-all, which is made of them.
            recording.counters["collectives_send_or_receive"] += 1
            return "Send"
    return ""


def _fill_collectives(recording: Recording, found: list[tuple[int, int, int, int, str, CpuRange | None, int]]) -> None:
    out = np.zeros(len(found), COLLECTIVE)
    recording.gpu_end = np.full(len(found), -1, np.int64)
    recording.numbers = np.full(len(found), -1, np.int64)
    counted: Tally[tuple[int, bool]] = Tally()
    # A call whose kernel was not recorded is of the stream that most such calls have, or of most calls'.
    of_op: dict[str, Tally[int]] = {op: Tally() for _, _, _, _, op, _, _ in found}
    for _, _, _, _, op, _, stream in found:
        of_op[op][stream] += stream >= 0
    every = sum(of_op.values(), Tally()) or Tally([-1])
    streams = {op: max((each if +each else every).most_common(1)[0][0], -1) for op, each in of_op.items()}
    for place, (begin, inside, tid, end, op, told, stream) in enumerate(found):
        row = out[place]
        row["ts_ns"], row["duration_ns"], row["tid"], row["pid"] = begin, inside, tid, recording.pid
        row["call"], row["redop"], row["peer"] = _CALL_OF[op], 255, -1
        row["dtype"] = UNKNOWN_TYPE
        recording.gpu_end[place] = end
        name, ranks, size = "", "", -1
        if told is not None:
            row["count"], row["dtype"], row["peer"] = told.count, told.dtype, told.peer
            recording.numbers[place] = told.number
            (name, ranks), size = told.group, told.size
        if op == "Barrier":
            row["count"] = 0
        elif row["dtype"] == UNKNOWN_TYPE:
            recording.counters["collectives_without_size"] += 1
        # Without a name: PyTorch gives each process group a stream of its own, which tells them apart.
        handle = _handle(name, ranks) if name or ranks else 1 + (stream if stream >= 0 else streams[op])
        if name or ranks:
            members = tuple(int(word) for word in re.findall(r"\d+", ranks)) if "..." not in ranks else ()
            recording.groups[handle] = (name, members, size)
        row["comm"] = handle
        key = handle, op in ("Send", "Recv")
        row["seq"] = counted[key]
        counted[key] += 1
    recording.collectives = out


def _handle(name: str, ranks: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}/{ranks}".encode(), digest_size=7).digest(), "little")


_NO_STEP = re.compile(r"optim|dataloader", re.IGNORECASE)
_STEP_WORD = re.compile(r"(^|[^a-z])(step|iter|iteration|batch|microstep|epoch_step)([^a-z]|$)", re.IGNORECASE)


def marks_from(ranges: Sequence[tuple[str, int, int, int]]) -> tuple[NDArray[np.void], str]:
    """The steps that named ranges tell of: ranges of one name but for its number, on one thread, one after the other,
    that cover most of the time; the name says step, iteration or batch.

    Args:
        ranges: (name, begin ns, end ns, thread) of each.

    Returns:
        ``MARK`` rows in order of time, and what the ranges are called; none: ("", empty).
    """
    alike: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for text, begin, end, tid in ranges:
        if end <= begin:
            continue
        number = re.search(r"(\d+)\D*$", text)
        base = re.sub(r"\d+", "N", text)
        profiler = text.startswith("ProfilerStep")
        if not profiler and (not _STEP_WORD.search(re.sub(r"([a-z])([A-Z])", r"\1_\2", base)) or _NO_STEP.search(text)):
            continue
        alike.setdefault(("ProfilerStep#N" if profiler else base, tid), []).append(
            (begin, end, int(number[1]) if number else -1)
        )
    best: tuple[tuple[bool, int], str, list[tuple[int, int, int]]] | None = None
    for (base, _), rows in alike.items():
        rows = sorted(set(rows))
        overlap = any(rows[k][1] > rows[k + 1][0] + 1000 for k in range(len(rows) - 1))
        covered = sum(end - begin for begin, end, _ in rows)
        if overlap or covered < COVERED * (rows[-1][1] - rows[0][0]):
            continue
        if len(rows) < 2 and base != "ProfilerStep#N":
            continue
        key = (base == "ProfilerStep#N", covered)
        if best is None or key > best[0]:
            best = (key, base, rows)
    if best is None:
        return np.empty(0, MARK), ""
    _, base, rows = best
    marks = np.zeros(len(rows), MARK)
    numbers = [number for _, _, number in rows]
    if any(later <= earlier for earlier, later in pairwise(numbers)) or min(numbers) < 0 or max(numbers) >= 1 << 31:
        numbers = list(range(len(rows)))
    marks["number"] = numbers
    marks["begin_ns"], marks["end_ns"] = [row[0] for row in rows], [row[1] for row in rows]
    return marks, base


# ---- steps


def find_all_steps(
    recordings: Sequence[Recording], communicators: NDArray[np.void], *, ignore_annotations: bool = False
) -> dict[int, RankSteps]:
    """The steps of each rank: as the recording tells, else as the calls repeat. Numbers agree on all ranks.

    Args:
        recordings: One a rank.
        communicators: ``groups.COMMUNICATOR`` rows of them.
        ignore_annotations: Look at the calls alone.

    Returns:
        By rank.
    """
    found: dict[int, RankSteps] = {}
    unmarked = []
    for each in recordings:
        if len(each.marks) and not ignore_annotations:
            found[each.rank] = _by_marks(each)
        else:
            unmarked.append(each)
    if unmarked:
        online = _online(unmarked, communicators)
        for each in unmarked:
            rows = online[online["rank"] == each.rank]
            found[each.rank] = (
                RankSteps(rows, ONLINE, f"calls repeat {len(rows)} times") if len(rows) else _offline(each)
            )
        # Far above 0: a rank may have begun before the one it is compared with.
        for one in found.values():
            one.rows["step"] += FIRST_NUMBER
        told = [found[each.rank].rows for each in recordings if found[each.rank].method == ANNOTATIONS]
        if told or not len(online):
            _number_alike(told, [found[each.rank].rows for each in unmarked])
    base = min((int(steps.rows["step"].min()) for steps in found.values() if len(steps.rows)), default=0)
    for each in recordings:
        steps = found[each.rank].rows
        steps["step"] -= base
        _count_calls(each, steps)
    return found


def _by_marks(recording: Recording) -> RankSteps:
    marks = recording.marks
    rows = np.zeros(len(marks), ITERATION)
    ends = marks["end_ns"].copy()
    pause = marks["begin_ns"][1:] - ends[:-1]
    follows = (np.diff(marks["number"]) == 1) & (pause <= NEXT_NS_SHARE * (ends[:-1] - marks["begin_ns"][:-1]))
    ends[:-1][follows] = marks["begin_ns"][1:][follows]
    rows["rank"], rows["step"] = recording.rank, marks["number"]
    rows["ts_ns"], rows["duration_ns"], rows["confidence"] = marks["begin_ns"], ends - marks["begin_ns"], 1.0
    return RankSteps(rows, ANNOTATIONS, f"{recording.marked_by} tells")


def _online(recordings: Sequence[Recording], communicators: NDArray[np.void]) -> NDArray[np.void]:
    """Steps by the detector of live traces, where it finds as many as it wants to see; else none."""
    tracker = StepTracker()
    tracker.align(communicators)
    fed = []
    for each in recordings:
        chosen = each.calls[each.launching()]
        together = ~np.isin(each.collectives["call"], _P2P)
        fed.append((each.rank, _launch_records(each, chosen), np.ascontiguousarray(each.collectives[together])))
    if any(len(launches) + len(called) < PROOF_UNITS for _, launches, called in fed):
        return np.empty(0, ITERATION)
    begin = min(each.span[0] for each in recordings)
    end = max(each.span[1] for each in recordings) + 1
    most = max(len(launches) + len(called) for _, launches, called in fed)
    edges = np.linspace(begin, end, most // SLICE + 2).astype(np.int64)
    parts = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for rank, launches, called in fed:
            part = [a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (launches, called)]
            tracker.feed(rank, *part)
        parts.append(tracker.advance(final=high == edges[-1]))
    found = np.concatenate(parts)
    enough = all(np.sum(found["rank"] == each.rank) >= PROOF_UNITS for each in recordings)
    return found if enough else np.empty(0, ITERATION)


def _launch_records(recording: Recording, calls: NDArray[np.void]) -> NDArray[np.void]:
    out = np.zeros(len(calls), records.LAUNCH)
    out["ts_ns"], out["duration_ns"], out["tid"], out["pid"] = (
        calls["ts_ns"], calls["duration_ns"], calls["tid"], recording.pid,
    )  # fmt: skip
    known = calls["op"] >= 0
    ops = recording.ops[calls["op"][known]]
    out["handle"] = len(recording.symbols) + calls["function"]
    out["handle"][known] = ops["name"]
    out["grid"][known] = ops["grid"]
    return out


def sequence(recording: Recording) -> tuple[Int, Int, Int]:
    """What steps are found in: (code, time in ns, time before it in which no call was made) of each call that gives
    the GPU work, or of each GPU operation where calls were not recorded. Each of shape (n,)."""
    ops = recording.ops
    work = ops["kind"].astype(np.int64) << 40 | ops["copy"].astype(np.int64) << 32 | ops["name"]
    chosen = recording.calls[np.isin(recording.calls["kind"], _WORKING) | (recording.calls["op"] >= 0)]
    if 2 * np.sum(chosen["op"] >= 0) < np.sum(ops["graph"] == 0):
        start = ops["start_ns"].astype(np.int64)
        gaps = np.diff(start, prepend=start[:1]) - _inside(union(start, ops["end_ns"].astype(np.int64)), start)
        return work, start, gaps
    graph = np.isin(chosen["kind"], [KINDS.index("graph")])
    codes = np.where(chosen["op"] >= 0, np.append(work, 0)[chosen["op"]], -1 - chosen["function"].astype(np.int64))
    codes = np.where(graph, codes | 1 << 50, codes)
    ts = np.ascontiguousarray(chosen["ts_ns"])
    return codes, ts, np.diff(ts, prepend=ts[:1]) - _inside(recording.busy, ts)


def _inside(intervals: Int, ts: Int) -> Int:
    """Time in intervals between each time and the one before it; 0 for the first."""
    return np.concatenate([[0], time_in(intervals, ts)])[: len(ts)] if len(ts) else ts


def _offline(recording: Recording) -> RankSteps:
    codes, ts, gaps = sequence(recording)
    found = find_steps(codes, gaps)
    if found is None:
        nothing = f"nothing in {len(codes):,} calls repeats that explains them"
        return RankSteps(np.empty(0, ITERATION), "", nothing)
    steps = len(found.bounds) - 1
    rows = np.zeros(steps, ITERATION)
    last = int((recording.calls["ts_ns"] + recording.calls["duration_ns"]).max(initial=0))
    edges = np.append(ts, max(last, int(ts[-1]) + 1))[found.bounds]
    rows["rank"], rows["step"], rows["ts_ns"], rows["duration_ns"] = (
        recording.rank, np.arange(steps), edges[:-1], np.diff(edges),
    )  # fmt: skip
    rows["confidence"] = found.confidence
    why = f"a unit of {found.length:,} calls repeats" + (", from the first to the last" if found.whole else "")
    if not np.isin(recording.kinds(), _TRAINING).any():
        # An inference repeats layer by layer.
        rows["confidence"] = np.minimum(rows["confidence"], 0.5)
        why += "; no kernel of a backward pass or an optimiser is named, so it may be a layer"
    return RankSteps(rows, OFFLINE, why)


def _number_alike(known: list[NDArray[np.void]], found: list[NDArray[np.void]]) -> None:
    """Numbers steps so that those of other ranks which begin closest have the same number. Changes ``step`` of
    ``found``.

    Args:
        known: Rows of ranks whose recordings number them.
        found: Rows of the others, in order of time.
    """
    rows_of = [rows for rows in found if len(rows)]
    reference = max((rows for rows in known if len(rows)), key=len, default=None)
    if reference is None:
        reference = max(rows_of, key=len, default=None)
    if reference is None:
        return
    starts, numbers = reference["ts_ns"].astype(np.int64), reference["step"].astype(np.int64)
    for rows in rows_of:
        mine = rows["ts_ns"].astype(np.int64)
        middle = len(mine) // 2
        first = int(numbers[0])
        # Recorded at another time: by order.
        if mine[-1] >= starts[0] and mine[0] <= starts[-1] + int(reference["duration_ns"][-1]):
            first = int(numbers[np.argmin(np.abs(starts - mine[middle]))]) - middle
        rows["step"] = first + np.arange(len(mine))


def _count_calls(recording: Recording, steps: NDArray[np.void]) -> None:
    launched = recording.calls["ts_ns"][recording.launching()]
    called = np.sort(recording.collectives["ts_ns"].astype(np.int64))
    begin = steps["ts_ns"].astype(np.int64)
    end = begin + steps["duration_ns"].astype(np.int64)
    steps["launches"] = np.searchsorted(launched, end) - np.searchsorted(launched, begin)
    steps["collectives"] = np.searchsorted(called, end) - np.searchsorted(called, begin)


# ---- communicators


def find_communicators(recordings: Sequence[Recording]) -> NDArray[np.void]:
    """Which communicators are one on several ranks, and how their calls line up: ``groups.COMMUNICATOR`` rows."""
    known = []
    offsets = _line_up(recordings)
    for each in recordings:
        rows = each.collectives.copy()
        together = ~np.isin(rows["call"], _P2P)
        named: dict[int, Membership] = {}
        rows["stream"] = 0
        for comm, (name, members, size) in each.groups.items():
            offset = offsets.get((each.rank, comm))
            if offset is None or (members and each.rank not in members):
                continue
            mine = together & (rows["comm"] == comm)
            rows["stream"][mine] = rows["seq"][mine] + offset + 1
            ranks = ",".join(map(str, members))
            named[comm] = Membership(f"{name}/{ranks}", members.index(each.rank) if members else -1, size)
        ended = each.gpu_end >= 0
        ts = rows["ts_ns"].astype(np.int64)
        chosen = ended & together
        known.append(
            RankCalls(
                rank=each.rank,
                collectives=np.ascontiguousarray(rows[together]),
                # A collective ends on the GPU, and all its ranks end together: better than a wait on the CPU.
                sync_ts=ts[chosen],
                sync_duration=np.maximum(each.gpu_end - ts, 0)[chosen],
                named=named,
            )
        )
    return find_groups(known) if known else np.empty(0, COMMUNICATOR)


def _line_up(recordings: Sequence[Recording]) -> dict[tuple[int, int], int]:
    """What makes each rank's call numbers in a named group those of the group, by (rank, handle): by its own numbers,
    else by calls that are equal and end together. Those that are not clear are missing."""
    out: dict[tuple[int, int], int] = {}
    for comm in sorted({comm for each in recordings for comm in each.groups}):
        members = []
        for each in recordings:
            mine = np.flatnonzero((each.collectives["comm"] == comm) & ~np.isin(each.collectives["call"], _P2P))
            if len(mine):
                members.append((each.rank, each.collectives[mine], each.gpu_end[mine], each.numbers[mine]))
        if all((numbers >= 0).all() and len(np.unique(numbers - rows["seq"].astype(np.int64))) == 1
               for _, rows, _, numbers in members):  # fmt: skip
            for rank, rows, _, numbers in members:
                out[rank, comm] = int(numbers[0]) - int(rows["seq"][0])
            continue
        if not members:
            continue
        offsets: dict[int, int] = {members[0][0]: 0}
        codes = [_codes(rows) for _, rows, _, _ in members]
        for (rank, _, end, _), code in zip(members[1:], codes[1:], strict=True):
            offset = _offset(codes[0], members[0][2], code, end)
            if offset is not None:
                offsets[rank] = offset
        lowest = min(offsets.values())
        out |= {(rank, comm): offset - lowest for rank, offset in offsets.items()}
    return out


def _codes(rows: NDArray[np.void]) -> Int:
    return rows["call"].astype(np.int64) << 56 | rows["dtype"].astype(np.int64) << 48 | rows["count"].astype(np.int64)


def _offset(code: Int, end: Int, other_code: Int, other_end: Int) -> int | None:
    """Added to the places of the other rank's calls, it gives those of the same calls; None: not clear."""
    costs: list[tuple[float, int]] = []
    least = max(min(len(code), len(other_code)) // 2, 1)
    for offset in range(-min(len(other_code), ALIGN_WITHIN), min(len(code), ALIGN_WITHIN) + 1):
        low, high = max(offset, 0), min(offset + len(other_code), len(code))
        if high - low < least:
            continue
        mine, theirs = slice(low, high), slice(low - offset, high - offset)
        if np.mean(code[mine] == other_code[theirs]) < 0.98:
            continue
        both = (end[mine] >= 0) & (other_end[theirs] >= 0)
        if both.any():
            costs.append((float(np.median(np.abs(end[mine] - other_end[theirs])[both])), offset))
    costs.sort()
    if not costs or (len(costs) > 1 and costs[0][0] > 0.5 * costs[1][0]):
        return None
    return costs[0][1]


def mesh_of(recordings: Sequence[Recording], communicators: NDArray[np.void]) -> list[Group]:
    """What the communicators are for."""
    traffic: dict[tuple[int, int], Traffic] = {}
    for each in recordings:
        # What a communicator is for is told by sizes: where they are not known, nothing is said.
        rows = each.collectives[each.collectives["dtype"] != UNKNOWN_TYPE]
        sizes = collectives.payload_bytes(rows)
        unique: Tally[tuple[int, int, int, int]] = Tally(
            zip(rows["comm"].tolist(), rows["call"].tolist(), sizes.tolist(), rows["peer"].tolist(), strict=True)
        )
        for (comm, call, size, peer), count in unique.items():
            traffic.setdefault((each.rank, comm), Traffic()).add(hooked.CALLS[call].kind, size, peer, count)
    world = max((each.world_size for each in recordings), default=0)
    told = np.array([(rank, comm) in traffic for rank, comm in communicators[["rank", "comm"]].tolist()], bool)
    return find_mesh(communicators[told], traffic, world=world, command="")


# ---- writing


def check_ranks(recordings: Sequence[Recording]) -> None:
    """Refuses two recordings of one rank.

    Raises:
        ArgusError: Naming both files.
    """
    seen: dict[int, str] = {}
    for each in recordings:
        if each.rank in seen:
            raise ArgusError(
                f"{seen[each.rank]} and {each.path} are both of rank {each.rank}",
                "Import recordings of one job, one file a rank; others under a --job name of their own",
                EXIT_USAGE,
            )
        seen[each.rank] = each.path


def write(
    store: Store,
    job: str,
    recordings: Sequence[Recording],
    steps: dict[int, RankSteps],
    communicators: NDArray[np.void],
    progress: Progress = lambda what, share: None,
) -> int:
    """Stores recordings as a new run of a job.

    Args:
        store: Where to.
        job: Name of the job.
        recordings: One a rank, ranks differ.
        steps: Of each rank.
        communicators: ``groups.COMMUNICATOR`` rows.
        progress: Told how far it is.

    Returns:
        Number of the run: the time, or one more than the newest.

    Raises:
        ArgusError: The store cannot be had, or refuses rows. The run is then left without an end: a run that was cut
            off, to ``argus diagnose`` and to whoever reads ``jobs.ended``.
    """
    run = new_run(store)
    with Writer(store, source=f"import/{run}") as writer:
        version, transfers = time.time_ns(), Transfers()
        # Of all ranks, before the first one's are told: who waited is known from those who did not.
        for each in recordings:
            kinds = each.kinds()
            pairs = kinds == What.SEND_RECV
            _gpu_steps(each, transfers).learn(each.ops[pairs], communicates(kinds[pairs]), kinds[pairs])
        _write_job(writer, job, run, recordings, version, ended=False)
        for number, each in enumerate(recordings):
            progress(f"storing rank {each.rank}", number / len(recordings))
            _write_rank(writer, job, run, each, steps[each.rank], version, transfers)
            flush_whole(writer, job, run)
        _write_groups(writer, job, run, recordings, communicators, version)
        _write_coverage(writer, job, run, recordings, version)
        flush_whole(writer, job, run)
        _write_job(writer, job, run, recordings, version + 1, ended=True)
        flush_whole(writer, job, run)
        progress("stored", 1.0)
    return run


def new_run(store: Store) -> int:
    """Number of a run that is about to be stored: the time, or one more than the newest.

    Raises:
        ArgusError: The store cannot be had.
    """
    ensure_schema(store)
    run, newest = int(time.time()), newest_run(store)
    return newest + 1 if run <= newest < run + 60 else run


def flush_whole(writer: Writer, job: str, run: int) -> None:
    """Sends what waits.

    Raises:
        ArgusError: Rows were not stored.
    """
    whole = writer.flush(FLUSH_S)
    if not whole or writer.rows_dropped:
        why = str(writer.last_error or "the store does not answer")
        raise ArgusError(
            f"run {run} of {job} was not stored as a whole: {why}", "It has no end in the table jobs; import again",
            EXIT_FAILURE,
        )  # fmt: skip


def _write_job(
    writer: Writer, job: str, run: int, recordings: Sequence[Recording], version: int, *, ended: bool
) -> None:
    for host in sorted({each.host for each in recordings}):
        mine = [each for each in recordings if each.host == host]
        spans = [each.span for each in mine]
        writer.append(
            "jobs",
            {
                "job": job, "run": run, "host": host,
                "started": np.array([min(begin for begin, _ in spans)], np.int64),
                "ended": np.array([max(end for _, end in spans)], np.int64) if ended else [None],
                "world_size": max(each.world_size for each in recordings), "launcher": mine[0].source,
                "mono_offset_ns": 0, "argus_version": __version__, "version": version,
            },
        )  # fmt: skip


def _write_rank(
    writer: Writer,
    job: str,
    run: int,
    recording: Recording,
    steps: RankSteps,
    version: int,
    transfers: Transfers,
) -> None:
    host, rank, pid = recording.host, recording.rank, recording.pid
    origin = Origin(job, run, host, 0)
    shared = {"job": job, "run": run, "rank": rank, "host": host}
    begin, _ = recording.span
    functions = sorted({recording.functions[place] for place in np.unique(recording.calls["function"]).tolist()})
    libraries = sorted(
        {"hip" if f.startswith("hip") else "cudart" if f.startswith("cuda") else "cuda" for f in functions}
    )
    writer.append(
        "ranks",
        {
            **shared, "pid": pid, "local_rank": -1, "rank_source": recording.rank_source,
            "started": np.array([begin], np.int64), "exe": "", "command": recording.command, "libraries": [libraries],
            "probes": 0, "state": "imported", "version": version,
        },
    )  # fmt: skip
    state = "on" if len(recording.ops) else "off"
    reason = f"{len(recording.ops):,} operations, imported from {recording.path}" if len(recording.ops) else (
        f"{recording.path} has no GPU operations"
    )  # fmt: skip
    writer.append("features", {**shared, "feature": "gpu_times", "state": state, "reason": reason, "version": version})
    names = gpu_rows.Names()
    names.learn(recording.symbols)
    kinds, words = _launch_kinds(recording, origin, names)
    for low in range(0, len(recording.calls), CHUNK):
        part = slice(low, low + CHUNK)
        writer.append("launches", _launches(recording, recording.calls[part], kinds[part], words, origin, names))
        writer.flush(FLUSH_S)
    if len(recording.collectives):
        ranks = np.full(len(recording.collectives), rank, np.uint32)
        writer.append("collectives", collectives.to_table(recording.collectives, origin, ranks))
    rows = steps.rows
    if len(rows):
        writer.append(
            "iterations",
            {
                **shared, "step": rows["step"].copy(), "ts": rows["ts_ns"].astype(np.int64),
                "duration_ns": rows["duration_ns"].copy(), "collectives": rows["collectives"].copy(),
                "launches": rows["launches"].copy(), "method": steps.method, "confidence": rows["confidence"].copy(),
            },
        )  # fmt: skip
    _write_gpu(writer, recording, rows, origin, names, transfers)


def _write_coverage(writer: Writer, job: str, run: int, recordings: Sequence[Recording], version: int) -> None:
    for host in sorted({each.host for each in recordings}):
        mine = [each for each in recordings if each.host == host]
        losses = sum((each.losses for each in mine), Tally())
        losses.update(dict.fromkeys(mine[0].losses, 0))
        found = {name: (value, True) for name, value in losses.items()}
        found |= {name: (value, False) for name, value in sum((each.counters for each in mine), Tally()).items()}
        if found:
            writer.append(
                "coverage",
                {
                    "job": job, "run": run, "host": host, "counter": list(found),
                    "value": np.array([value for value, _ in found.values()], np.uint64),
                    "loss": np.array([loss for _, loss in found.values()], bool),
                    "ts": np.full(len(found), max(each.span[1] for each in mine), np.int64), "version": version,
                },
            )  # fmt: skip


def _launch_kinds(recording: Recording, origin: Origin, names: gpu_rows.Names) -> tuple[NDArray[np.int32], list[str]]:
    """Kinds of calls as the table has them: those of copies by their direction. Codes, and what they stand for."""
    table = gpu_rows.kernel_events(recording.ops, origin, recording.rank, recording.pid, names)["kind"]
    column = table.combine_chunks() if isinstance(table, pa.ChunkedArray) else table
    told = column.dictionary.to_pylist()
    words = list(dict.fromkeys([*KINDS, *told]))
    place = np.array([words.index(word) for word in told], np.int64)
    of_op = np.append(place[np.asarray(column.indices)], 0) if len(recording.ops) else np.zeros(1, np.int64)
    kinds = recording.calls["kind"].copy()
    copy = (kinds == KINDS.index("memcpy")) | ((kinds == 0) & (recording.calls["op"] >= 0))
    known = copy & (recording.calls["op"] >= 0)
    kinds[known] = of_op[recording.calls["op"][known]]
    return kinds.astype(np.int32), words


def _launches(
    recording: Recording,
    calls: NDArray[np.void],
    kinds: NDArray[np.int32],
    words: list[str],
    origin: Origin,
    names: gpu_rows.Names,
) -> pa.Table:
    count = len(calls)
    known = calls["op"] >= 0
    blank = np.zeros(1, GPU_OP)
    ops = np.concatenate([recording.ops, blank])[calls["op"]]
    kernel = np.array([word == "kernel" for word in words])[kinds]
    nccl = np.append(recording.communication(), False)[calls["op"]]
    ts = pa.array(np.ascontiguousarray(calls["ts_ns"]), pa.int64()).cast(pa.timestamp("ns", tz="UTC"))
    codes = np.where(kernel & known, names.of(ops["name"]), 0).astype(np.int32)
    return pa.table(
        {
            "job": constant(origin.job, count),
            "run": np.full(count, origin.run, np.uint32),
            "rank": np.full(count, recording.rank, np.uint32),
            "host": constant(origin.host, count),
            "pid": np.full(count, recording.pid, np.uint32),
            "tid": np.ascontiguousarray(calls["tid"]),
            "call": dictionary(calls["function"].astype(np.int32), recording.functions),
            "kind": dictionary(kinds, words),
            "kernel": dictionary(codes, list(names.words)),
            "handle": np.zeros(count, np.uint64),
            "stream": np.zeros(count, np.uint64),
            "bytes": np.where(kernel, 0, ops["bytes"]).astype(np.uint64),
            "shared_bytes": np.where(kernel, ops["shared_dynamic"], 0).astype(np.uint64),
            "grid": triples(ops["grid"], kernel & known, pa.uint32()),
            "block": triples(ops["block"].astype(np.uint16), kernel & known, pa.uint16()),
            "ts": ts,
            "duration_ns": np.ascontiguousarray(calls["duration_ns"]),
            "result": np.ascontiguousarray(calls["result"]),
            "in_nccl": nccl,
        }
    )


def _gpu_steps(recording: Recording, transfers: Transfers) -> GpuSteps:
    """What a recording's GPU phases are made from, its collectives told."""
    steps = GpuSteps()
    steps.phases.transfers = transfers
    called = recording.collectives
    meant = [OF_NCCL.get(hooked.CALLS[call].kind, What.COMMUNICATION) for call in called["call"].tolist()]
    steps.phases.calls.feed(
        called["ts_ns"].astype(np.int64),
        called["tid"].astype(np.int64),
        np.array(meant, np.uint8),
        collectives.payload_bytes(called).astype(np.int64),
    )
    return steps


def _write_gpu(
    writer: Writer,
    recording: Recording,
    rows: NDArray[np.void],
    origin: Origin,
    names: gpu_rows.Names,
    transfers: Transfers,
) -> None:
    ops, rank, pid = recording.ops, recording.rank, recording.pid
    if not len(ops):
        return
    kinds = recording.kinds()
    communication = communicates(kinds)
    usage, steps = GpuUsage(), _gpu_steps(recording, transfers)
    # The recording begins before its first operation: a first step that begins between was recorded as a whole.
    begin = np.zeros(1, GPU_OP)
    begin["start_ns"] = begin["end_ns"] = recording.span[0]
    begin["kind"], begin["device"] = GpuKind.MEMSET, ops["device"][0]
    steps.feed(begin, np.zeros(1, bool), np.array([What.COPY], np.uint8))
    fed = 0
    for low in range(0, len(ops), CHUNK):
        part = slice(low, low + CHUNK)
        final = low + CHUNK >= len(ops)
        writer.append("kernel_events", gpu_rows.kernel_events(ops[part], origin, rank, pid, names))
        usage.feed(ops[part], communication[part])
        steps.feed(ops[part], communication[part], kinds[part])
        ready = len(rows) if final else int(np.searchsorted(rows["ts_ns"], ops["start_ns"][part][-1]))
        steps.feed_steps(rows[fed:ready])
        fed = ready
        windows, done = usage.advance(final=final), steps.advance(final=final)
        if len(windows):
            writer.append("gpu_usage", gpu_rows.gpu_usage(windows, origin, rank, pid))
        if len(done):
            writer.append("gpu_steps", gpu_rows.gpu_steps(done, origin, rank, pid))
        if len(phases := steps.take_phases()):
            writer.append("gpu_phases", gpu_rows.gpu_phases(phases, origin, rank, pid, GPU_PHASES, GPU_METHODS))
        writer.flush(FLUSH_S)
    recording.counters["gpu_operations_late"] += usage.late
    recording.counters["gpu_operations_without_step"] += steps.dropped


def _write_groups(
    writer: Writer,
    job: str,
    run: int,
    recordings: Sequence[Recording],
    found: NDArray[np.void],
    version: int,
) -> None:
    if len(found):
        writer.append(
            "communicators",
            {
                "job": job, "run": run,
                **{name: found[name].copy() for name in ("rank", "comm", "comm_group", "comm_rank", "nranks")},
                "seq_offset": found["seq_offset"].copy(), "joined_by": found["joined_by"].tolist(),
                "error": found["error"].tolist(), "version": version,
            },
        )  # fmt: skip
    mesh = mesh_of(recordings, found)
    if mesh:
        writer.append(
            "parallel_groups",
            {
                "job": job, "run": run, "host": recordings[0].host,
                "comm_group": np.array([group.id for group in mesh], np.uint64),
                "dimension": [group.dimension for group in mesh], "ranks": [list(group.ranks) for group in mesh],
                "nranks": np.array([group.size for group in mesh], np.int32),
                "confidence": np.array([group.confidence for group in mesh], np.float32),
                "why": [group.why for group in mesh], "version": version,
                "superseded": np.zeros(len(mesh), np.uint8),
            },
        )  # fmt: skip


def summary(recording: Recording, steps: RankSteps) -> dict[str, Any]:
    """What was read of one file and rank, for people and programs."""
    kernels = recording.ops["kind"] == GpuKind.KERNEL
    return {
        "file": recording.path,
        "rank": recording.rank,
        "rank_source": recording.rank_source,
        "pid": recording.pid,
        "gpu_operations": len(recording.ops),
        "kernels": int(kernels.sum()),
        "nccl_kernels": int(recording.communication().sum()),
        "launches": len(recording.calls),
        "collectives": len(recording.collectives),
        "steps": len(steps.rows),
        "method": steps.method,
        "why": steps.why,
        "confidence": round(float(np.median(steps.rows["confidence"])), 3) if len(steps.rows) else 0.0,
        "step_ns": int(np.median(steps.rows["duration_ns"])) if len(steps.rows) else -1,
        "zero": recording.zero,
        "counters": {name: value for name, value in (recording.losses + recording.counters).items() if value},
        "notes": recording.notes,
    }
