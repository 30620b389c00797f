"""From CUPTI's activity buffers to columns: ``records.GPU_OP`` and ``records.HOST_OP``.

A buffer was written by another program: its offsets are checked before anything is read by them, its times before
anybody believes them. No record becomes a Python object. numpy copies a structure field by field, so a record's fields
are moved as the longest runs of bytes that lie together on both sides (``_Plan``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.cupti import shared
from argus.cupti.layouts import Layouts
from argus.model.records import GPU_OP, HOST_OP, GpuKind, HostKind

REJECTIONS = ("start_zero", "end_before_start", "impossible_time", "bad_offset", "unknown_kind")
"""Why a record is not believed."""

EARLIER_NS = 3600 * 10**9
"""An operation may have begun so long before Argus came."""
LATER_NS = 10**9
"""CUPTI interpolates the GPU's clock: it may be that far ahead."""

_ROWS = 4096
"""Records moved at a time, so that source and result stay in the processor's cache."""


@dataclass
class Batch:
    """What one buffer held.

    Attributes:
        gpu: Dtype ``GPU_OP``, ordered by kind, then as CUPTI wrote them; ``launch_*`` are 0.
        host: Dtype ``HOST_OP``, likewise.
        rejected: Records left out, by reason (``REJECTIONS``).
    """

    gpu: NDArray[np.void]
    host: NDArray[np.void]
    rejected: Counter[str] = field(default_factory=Counter)


_Fields = dict[str, "str | tuple[str, ...]"]

_GPU_FIELDS: _Fields = {
    "start_ns": "start",
    "end_ns": "end",
    "graph_node": "graph_node_id",
    "correlation": "correlation_id",
    "device": "device_id",
    "context": "context_id",
    "stream": "stream_id",
    "graph": "graph_id",
}
_KERNEL_FIELDS: _Fields = {
    **_GPU_FIELDS,
    "name": "name",
    "grid": ("grid_x", "grid_y", "grid_z"),
    "block": ("block_x", "block_y", "block_z"),
    "shared_static": "static_shared_memory",
    "shared_dynamic": "dynamic_shared_memory",
    "registers": "registers_per_thread",
}
_COPY_FIELDS: _Fields = {**_GPU_FIELDS, "bytes": "bytes", "copy": "copy_kind"}
_TIMES: _Fields = {"start_ns": "start", "end_ns": "end"}
_API_FIELDS: _Fields = {
    **_TIMES,
    "correlation": "correlation_id",
    "tid": "thread_id",
    "code": "cbid",
    "result": "return_value",
}

# Kind of record -> the result's kind, and from which field of CUPTI's record each of its fields comes. Fields that a
# generation lacks stay 0.
_CONVERSIONS: dict[str, tuple[GpuKind | HostKind, _Fields]] = {
    "CONCURRENT_KERNEL": (GpuKind.KERNEL, _KERNEL_FIELDS),
    "KERNEL": (GpuKind.KERNEL, _KERNEL_FIELDS),
    "MEMCPY": (GpuKind.MEMCPY, _COPY_FIELDS),
    "MEMCPY2": (GpuKind.MEMCPY, _COPY_FIELDS),
    "MEMSET": (GpuKind.MEMSET, {**_GPU_FIELDS, "bytes": "bytes"}),
    "RUNTIME": (HostKind.RUNTIME, _API_FIELDS),
    "DRIVER": (HostKind.DRIVER, _API_FIELDS),
    "INTERNAL_LAUNCH_API": (HostKind.DRIVER, _API_FIELDS),
    "SYNCHRONIZATION": (
        HostKind.SYNCHRONIZATION,
        {**_TIMES, "correlation": "correlation_id", "code": "type", "stream": "stream_id", "result": "return_value"},
    ),
    "OVERHEAD": (HostKind.OVERHEAD, {**_TIMES, "correlation": "correlation_id", "code": "overhead_kind"}),
    "JIT": (
        HostKind.JIT,
        {
            **_TIMES,
            "correlation": "correlation_id",
            "code": "jit_operation_type",
            "tid": "thread_id",
            "name": "cache_path",
        },
    ),
    "MODULE": (HostKind.MODULE, {"code": "id"}),
    "MARKER": (
        HostKind.MARKER,
        {"start_ns": "timestamp", "end_ns": "timestamp", "correlation": "id", "code": "flags_", "name": "name"},
    ),
}
_THREAD_IN_OBJECT = ("OVERHEAD", "MARKER")
"""Kinds whose record names a thread only if its object is one."""


@dataclass(frozen=True)
class _Plan:
    """How records of one kind become rows of ``target``.

    Attributes:
        target: ``GPU_OP`` or ``HOST_OP``.
        kind: For the field ``kind``.
        source: CUPTI's record, as the runs that are moved (``runs``), ``pointer``, ``object_kind``, ``object_thread``.
        result: The target, as the same runs.
        runs: Names of the runs.
        timed: The record has times.
    """

    target: np.dtype[np.void]
    kind: int
    source: np.dtype[np.void]
    result: np.dtype[np.void]
    runs: tuple[str, ...]
    timed: bool


@lru_cache(maxsize=256)
def _plan(layouts: Layouts, kind: int) -> _Plan | None:
    """None: Argus does not know this kind."""
    name = next((name for name in _CONVERSIONS if layouts.kind(name) == kind), None)
    if name is None or kind not in layouts.dtypes:
        return None
    made, fields = _CONVERSIONS[name]
    target = GPU_OP if isinstance(made, GpuKind) else HOST_OP
    record = layouts.dtype(kind)
    record_fields: Mapping[str, Any] = record.fields or {}
    target_fields: Mapping[str, Any] = target.fields or {}
    moves: list[tuple[int, int, int]] = []  # offset in the target, in the record, bytes
    pointer = -1
    for there, here in fields.items():
        parts = here if isinstance(here, tuple) else (here,)
        to, room = target_fields[there][1], target_fields[there][0].itemsize // len(parts)
        for place, part in enumerate(parts):
            if part not in record_fields:
                continue
            if there == "name":
                pointer = record_fields[part][1]
            elif record_fields[part][0].itemsize != room:
                raise TypeError(f"{name}.{part} has {record_fields[part][0].itemsize} bytes, {there} has {room}")
            # Of a name the lower half: the id that the helper put there (every machine with CUDA is little-endian).
            moves.append((to + place * room, record_fields[part][1], room))
    runs: list[tuple[int, int, int]] = []
    for to, at, size in sorted(moves):
        if runs and runs[-1][0] + runs[-1][2] == to and runs[-1][1] + runs[-1][2] == at:
            to, at, size = runs[-1][0], runs[-1][1], runs.pop()[2] + size
        runs.append((to, at, size))
    names = [f"run{number}" for number in range(len(runs))]
    formats: list[Any] = [f"<u{size}" if size in (1, 2, 4, 8) else f"V{size}" for _, _, size in runs]
    extra: list[tuple[str, str, int]] = [("pointer", "<u8", pointer)] if pointer >= 0 else []
    if name in _THREAD_IN_OBJECT:
        extra.append(("object_kind", "<u4", record_fields["object_kind"][1]))
        extra.append(("object_thread", "<u4", record_fields["object_id"][1] + 4))
    source = np.dtype(
        {
            "names": names + [one[0] for one in extra],
            "formats": formats + [one[1] for one in extra],
            "offsets": [at for _, at, _ in runs] + [one[2] for one in extra],
            "itemsize": record.itemsize,
        }
    )
    result = np.dtype(
        {"names": names, "formats": formats, "offsets": [to for to, _, _ in runs], "itemsize": target.itemsize}
    )
    return _Plan(target, int(made), source, result, tuple(names), "start_ns" in fields)


@lru_cache(maxsize=64)
def _sizes(layouts: Layouts) -> NDArray[np.int64]:
    """Bytes of a record by its kind; of one that is not known, as few as there can be. Shape (``MAX_KINDS`` + 1,)."""
    sizes: NDArray[np.int64] = np.maximum(np.append(layouts.table()["size"].astype(np.int64), 0), 8)
    return sizes


def apart(buffer: NDArray[np.uint8], index: NDArray[np.uint32], layouts: Layouts) -> NDArray[np.bool_]:
    """Which records of an index begin where all before them have ended: so many fit into the buffer, whatever another
    program put into the index.

    Args:
        buffer: As for ``decode``.
        index: Offset of each record, in order.
        layouts: As for ``decode``.
    """
    if not len(index) or len(buffer) < 8:
        return np.ones(len(index), np.bool_)
    words: NDArray[np.uint64] = np.ndarray((len(buffer) // 8,), "<u8", buffer)
    offsets = index.astype(np.int64)
    kinds = np.minimum(words[np.minimum(offsets >> 3, len(words) - 1)].astype(np.uint32), shared.MAX_KINDS)
    ends = np.maximum.accumulate(offsets + _sizes(layouts)[kinds])
    return np.append(True, offsets[1:] >= ends[:-1])


def decode(
    buffer: NDArray[np.uint8],
    index: NDArray[np.uint32],
    layouts: Layouts,
    pid: int,
    names_replaced: bool,
    pointer_ids: Mapping[int, int],
    *,
    names: int | None = None,
    since_ns: int = 0,
    now_ns: int | None = None,
) -> Batch:
    """What a buffer holds.

    Args:
        buffer: Bytes that CUPTI wrote, contiguous, beginning at a multiple of 8. May be shared memory.
        index: Offset of each record.
        layouts: Of the CUPTI that wrote it.
        pid: For the rows.
        names_replaced: Records hold ids of names where CUPTI put pointers.
        pointer_ids: Else: the id of the name at each pointer.
        names: How many ids there are, 0 included; a greater one becomes 0. None: any is believed.
        since_ns: When Argus came; times more than ``EARLIER_NS`` before are impossible.
        now_ns: CLOCK_MONOTONIC; times more than ``LATER_NS`` after it are impossible. None: none is.
    """
    rejected: Counter[str] = Counter()
    size = len(buffer)
    offsets = index.astype(np.int64)  # a copy: who wrote it may still write
    fits = (offsets <= size - 8) & ((offsets & 7) == 0)
    if not fits.all():
        rejected["bad_offset"] += int(np.count_nonzero(~fits))
        offsets = offsets[fits]
    if not len(offsets):
        return Batch(np.empty(0, GPU_OP), np.empty(0, HOST_OP), rejected)
    words: NDArray[np.uint64] = np.ndarray((size // 8,), "<u8", buffer)
    kinds = np.minimum(words[offsets >> 3].astype(np.uint32), shared.MAX_KINDS)
    same = bool((kinds == kinds[0]).all())
    present = [int(kinds[0])] if same else np.flatnonzero(np.bincount(kinds)).tolist()

    chosen: list[tuple[_Plan, NDArray[np.int64]]] = []
    for kind in present:
        at = offsets if same else offsets[kinds == kind]
        plan = _plan(layouts, kind) if kind < shared.MAX_KINDS else None
        if plan is None:
            rejected["unknown_kind"] += len(at)
            continue
        within = at <= size - plan.source.itemsize
        if not within.all():
            rejected["bad_offset"] += int(np.count_nonzero(~within))
            at = at[within]
        if len(at):
            chosen.append((plan, at))

    made = []
    for target in (GPU_OP, HOST_OP):
        plans = [(plan, at) for plan, at in chosen if plan.target is target]
        rows: NDArray[np.void] = np.zeros(sum(len(at) for _, at in plans), target)
        filled = 0
        for plan, at in plans:
            for part in _parts(buffer, plan, at):
                here = rows[filled : filled + len(part)]
                believed = _convert(part, plan, here, rejected, pid, since_ns, now_ns, layouts)
                if plan.source.names and "pointer" in plan.source.names:
                    _name(part, here, names_replaced, pointer_ids, names)
                filled += len(part) if believed is None else _squeeze(here, believed)
        made.append(rows[:filled])
    return Batch(made[0], made[1], +rejected)


def _parts(buffer: NDArray[np.uint8], plan: _Plan, at: NDArray[np.int64]) -> Any:
    """The records at these offsets, ``_ROWS`` at a time, dtype ``plan.source``. Offsets are within the buffer."""
    size = plan.source.itemsize
    first, last = int(at[0]), int(at[-1])
    if last - first == (len(at) - 1) * size and bool((at[1:] - at[:-1] == size).all()):
        records: NDArray[np.void] = np.ndarray((len(at),), plan.source, buffer, first)
        for begin in range(0, len(at), _ROWS):
            yield records[begin : begin + _ROWS]
        return
    # Every place where a record can begin, each as one item: picked by number, an item is copied whole.
    windows: NDArray[np.void] = np.ndarray(((len(buffer) - size) // 8 + 1,), f"V{size}", buffer, 0, (8,))
    places = at >> 3
    for begin in range(0, len(at), _ROWS):
        yield windows[places[begin : begin + _ROWS]].view(plan.source)


def _convert(
    part: NDArray[np.void],
    plan: _Plan,
    rows: NDArray[np.void],
    rejected: Counter[str],
    pid: int,
    since_ns: int,
    now_ns: int | None,
    layouts: Layouts,
) -> NDArray[np.bool_] | None:
    """Fills zeroed rows from records. Returns which are believed; None: all."""
    result = rows.view(plan.result)
    for run in plan.runs:
        result[run] = part[run]
    rows["kind"] = plan.kind
    rows["pid"] = pid
    if plan.source.names and "object_kind" in plan.source.names:
        rows["tid"] = np.where(part["object_kind"] == layouts.thread_object, part["object_thread"], 0)
    if not plan.timed:
        return None
    start, end = np.ascontiguousarray(rows["start_ns"]), np.ascontiguousarray(rows["end_ns"])
    low = max(since_ns - EARLIER_NS, 1)
    high = 2**63 - 1 if now_ns is None else now_ns + LATER_NS
    span = np.uint64(max(high - low, 0))
    # Unsigned: what lies below `low` becomes huge.
    wrong = (start - np.uint64(low) > span) | (end - np.uint64(low) > span) | (end < start)
    if not wrong.any():
        return None
    zero = (start == 0) | (end == 0)
    backwards = (end < start) & ~zero
    rejected["start_zero"] += int(np.count_nonzero(zero))
    rejected["end_before_start"] += int(np.count_nonzero(backwards))
    rejected["impossible_time"] += int(np.count_nonzero(wrong & ~zero & ~backwards))
    believed: NDArray[np.bool_] = ~wrong
    return believed


def _name(
    part: NDArray[np.void],
    rows: NDArray[np.void],
    replaced: bool,
    pointer_ids: Mapping[int, int],
    names: int | None,
) -> None:
    """Puts ids of names where they are not yet, and takes away those that nobody gave."""
    if not replaced:
        pointers, where = np.unique(part["pointer"], return_inverse=True)
        ids = np.array([pointer_ids.get(pointer, 0) for pointer in pointers.tolist()], np.uint32)
        rows["name"] = ids[where]
    elif names is not None:
        unknown = rows["name"] >= names
        if unknown.any():
            rows["name"][unknown] = 0


def _squeeze(rows: NDArray[np.void], keep: NDArray[np.bool_]) -> int:
    """Moves the rows to keep to the front, and zeroes the rest. Returns how many they are."""
    whole = rows.view(f"V{rows.dtype.itemsize}")
    kept = whole[keep]
    whole[: len(kept)] = kept
    rest: NDArray[np.uint64] = rows[len(kept) :].view("<u8")
    rest[:] = 0
    return len(kept)
