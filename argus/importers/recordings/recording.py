"""One rank's calls, GPU operations, collectives and steps, as a recording of another tool has them.

An importer (``kineto``, ``nsys``) reads a file into :class:`Recording`, columns on one clock.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argus.model import calls as hooked
from argus.model import records
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.records import COLLECTIVE, GPU_OP
from argus.model.units import UNKNOWN_HOST
from argus.semantics.gpu.flops import WORK
from argus.semantics.gpu.usage import union
from argus.semantics.phases.gpu import communicates, kinds_of, what_of

Int = NDArray[np.int64]
Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""

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
"""One CUDA call. ``function``: place in ``Recording.functions``; ``kind``: in ``CALL_KINDS``; ``op``: that of the first
GPU operation that it launched, -1: none is known."""

MARK = np.dtype([("number", "<i8"), ("begin_ns", "<i8"), ("end_ns", "<i8")])
"""One step that the recording itself marks."""
MOST_NS = 1 << 62
"""Times are below that, and what is added to them: the year 2116."""
UNKNOWN_TYPE = 255
"""``COLLECTIVE["dtype"]`` that stands for none known."""

CALL_KINDS = [
    "other",
    *dict.fromkeys(call.kind for call in hooked.CALLS if call.program == "cuda" or call.kind == "module"),
]
_LAUNCHING = [CALL_KINDS.index(kind) for kind in ("kernel", "graph")]
_PATTERNS = (
    ("kernel", re.compile(r"Launch.*Kernel|ModuleLaunch|ExtLaunch")),
    ("graph", re.compile(r"GraphLaunch")),
    ("memcpy", re.compile(r"Memcpy")),
    ("memset", re.compile(r"Memset")),
    ("sync", re.compile(r"Synchronize$")),
    ("alloc", re.compile(r"(Malloc|MemAlloc)")),
    ("free", re.compile(r"(^|[a-z])Free|MemFree")),
)


@dataclass(frozen=True)
class CpuRange:
    """A range on the CPU that stands for a collective: ``op`` is empty where its name does not contain one.

    Attributes:
        group: Name and ranks of the process group, as the recording has them; empty: not recorded.
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
    """What one file holds of one rank. Times are wall-clock ns, or count from ``zero``.

    Attributes:
        source: "kineto" or "nsys".
        rank_source: Where the rank comes from: "trace", "file name" or "order".
        world_size: Ranks of the job; 0: not known.
        functions: Names of CUDA calls; ``calls["function"]`` are places in it.
        busy: When a CUDA call of any kind was going on, as :func:`argus.semantics.gpu.usage.union` gives it.
        symbols: Names of kernels by ``ops["name"]``; the first is of none.
        gpu_end: When each collective's kernels had ended, -1: not known. Shape of ``collectives``.
        numbers: The process group's own number of each collective, -1: not known. Shape of ``collectives``.
        groups: By handle: name, ranks (empty: not recorded) and size (-1: not known).
        marks: Steps that the recording marks, and ``marked_by``: the name of the marks.
        works: ``WORK`` rows, by places in ``operators``: matrix products and attention whose shapes the recording has.
        operators: What they are: kind, name, type and shape, as in the table ``kernel_flops``.
        zero: What time 0 is, in words.
        ranges: Named ranges of its threads that may be phases: (name, begin ns, end ns, thread).
        engine: What autograd's engine evaluated: begin ns, end ns, thread. Shape (n, 3).
        facts: Of its environment, as the table ``environments`` has them.
        clock_ns: Added to its times, it gives those of the first recording of the job; 0 where that is not known.
    """

    path: str
    source: str
    rank: int
    rank_source: str
    pid: int
    world_size: int = 0
    host: str = UNKNOWN_HOST
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
    works: NDArray[np.void] = field(default_factory=lambda: np.empty(0, WORK))
    operators: list[tuple[str, str, str, str]] = field(default_factory=list)
    zero: str = "1970 (UTC)"
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)
    engine: Int = field(default_factory=lambda: np.empty((0, 3), np.int64))
    facts: dict[str, str] = field(default_factory=dict)
    clock_ns: int = 0
    counters: Tally[str] = field(default_factory=Tally)
    losses: Tally[str] = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)

    def kinds(self) -> NDArray[np.uint8]:
        """What the operations are, ``gpu_phases.What``. Shape of ``ops``."""
        by_name = np.array([what_of(symbol) for symbol in self.symbols], np.uint8)
        return kinds_of(self.ops, by_name[self.ops["name"]])

    def communication(self) -> NDArray[np.bool_]:
        """Which operations are NCCL's kernels. Shape of ``ops``."""
        communicating: NDArray[np.bool_] = communicates(self.kinds())
        return communicating

    def device(self) -> int:
        """Number of the GPU that most of its operations ran on; -1: there are none."""
        numbers, uses = np.unique(self.ops["device"], return_counts=True)
        return int(numbers[np.argmax(uses)]) if len(numbers) else -1

    def launching(self) -> NDArray[np.bool_]:
        """Which calls launch kernels and graphs that are not NCCL's. Shape of ``calls``."""
        op = self.calls["op"]
        of_nccl = (op >= 0) & np.append(self.communication(), False)[op]
        launches: NDArray[np.bool_] = np.isin(self.calls["kind"], _LAUNCHING) & ~of_nccl
        return launches

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


def function_kind(name: str) -> tuple[str, int]:
    """A CUDA or HIP function as the library exports it, without Nsight's version, and its place in CALL_KINDS."""
    plain = re.sub(r"_v\d+(?=_pt[sd]z$|$)", "", name)
    known = hooked.BY_SYMBOL.get(plain) or hooked.BY_SYMBOL.get(re.sub(r"^hip", "cuda", plain))
    if known is not None and known.kind in CALL_KINDS:
        return plain, CALL_KINDS.index(known.kind)
    if re.match(r"(cu|hip)[A-Z]|cuda[A-Z]", plain):
        for kind, pattern in _PATTERNS:
            if pattern.search(plain):
                return plain, CALL_KINDS.index(kind)
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
    has_op = (place < len(numbers)) & (calls["correlation"] != 0)
    if len(numbers):
        has_op &= numbers[inside] == calls["correlation"]
        calls["op"] = np.where(has_op, by_number[inside], -1)
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
        if early.any():
            by_start = np.argsort(ops["start_ns"], kind="stable")
            ops, place = ops[by_start], np.argsort(by_start)
            calls["op"] = np.where(calls["op"] >= 0, place[calls["op"]], -1)
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
        for inner_call, above in zip(inner[holds].tolist(), around[holds].tolist(), strict=True):
            if calls["op"][above] < 0:
                calls["op"][above] = calls["op"][inner_call]
    recording.counters["nested"] += int(nested.sum())
    return calls[~nested]


def find_files(paths: Sequence[Path], suffixes: tuple[str, ...], hint: str) -> list[Path]:
    """Files to read: those named, and of folders all recordings in them (of their subfolders, where a folder itself has
    none), sorted by name.

    Args:
        paths: Files and folders.
        suffixes: How names of recordings in a folder end.
        hint: How to get one, for people.

    Raises:
        ArgusError: One does not exist, or a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = _recordings(path.iterdir(), suffixes) or _recordings(path.glob("*/*"), suffixes)
            if not inside:
                what = f"no {' or '.join(suffixes)} file, nor have its subfolders"
                raise ArgusError(f"{path} has {what}", hint, EXIT_UNAVAILABLE)
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise ArgusError(f"{path} does not exist", hint, EXIT_UNAVAILABLE)
    return files


def _recordings(paths: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(one for one in paths if one.name.endswith(suffixes) and one.is_file())
