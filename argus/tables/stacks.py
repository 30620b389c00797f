"""Stacks and what was counted of them, as columns of ``stacks``, ``stack_samples``, ``gc_pauses``, ``thread_usage``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.model import records
from argus.tables.arrow import Origin, constant, dictionary

if TYPE_CHECKING:
    from argus.model.stacks import Frame, Stack

Words: TypeAlias = "Sequence[str] | pa.Array"
"""A string for each row: a list, or an Arrow array (dictionary-encoded or not)."""

_TIME = pa.timestamp("ns", tz="UTC")


def _words(words: Words) -> pa.Array:
    """Strings as an Arrow dictionary without duplicates (ClickHouse refuses those)."""
    if isinstance(words, pa.Array):
        plain = words.cast(pa.string()) if pa.types.is_dictionary(words.type) else words
        return plain.dictionary_encode()
    # A fifth of what Arrow's own way takes for as few rows as these are.
    places = {word: place for place, word in enumerate(dict.fromkeys(words))}
    codes = np.fromiter(map(places.__getitem__, words), np.int32, len(words))
    return dictionary(codes, list(places))


def _times(ns: NDArray[np.uint64], offset_ns: int) -> pa.Array:
    shifted = np.ascontiguousarray(ns.astype(np.int64) + offset_ns)
    return pa.Array.from_buffers(_TIME, len(shifted), [None, pa.py_buffer(shifted)])


def _common(events: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32], threads: Words) -> dict[str, object]:
    count = len(events)
    return {
        "job": constant(origin.job, count),
        "run": np.full(count, origin.run, np.uint32),
        "rank": np.asarray(ranks, np.uint32),
        "host": constant(origin.host, count),
        "pid": np.ascontiguousarray(events["pid"]),
        "tid": np.ascontiguousarray(events["tid"]),
        "thread": _words(threads),
    }


def to_samples(
    counts: NDArray[np.void],
    origin: Origin,
    ranks: NDArray[np.uint32],
    threads: Words,
    stack_ids: NDArray[np.uint64],
    reasons: Words,
) -> pa.Table:
    """Rows of the table ``stack_samples``.

    Args:
        counts: ``records.STACK_COUNT``, shape (n,).
        origin: Where they come from.
        ranks: Rank of each, shape (n,).
        threads: Name of the thread of each; empty: not known.
        stack_ids: ``Stack.id`` of each, shape (n,); 0: no stack was taken, or it is not known.
        reasons: Why the thread was off the CPU, for each (``offcpu.reasons``); those of samples are not looked at.
    """
    what = counts["what"]
    off = (what & records.WHAT_OFF) != 0
    if isinstance(reasons, pa.Array):
        reasons = reasons.to_pylist()
    if not off.all():
        reasons = [word if is_off else "" for word, is_off in zip(reasons, off.tolist(), strict=True)]
    return pa.table(
        {
            **_common(counts, origin, ranks, threads),
            "ts": _times(counts["first_ns"], origin.mono_offset_ns),
            "last_ts": _times(counts["last_ns"], origin.mono_offset_ns),
            "kind": dictionary(off.astype(np.int32), ["cpu", "off"]),
            "reason": _words(reasons),
            "gil": (what & records.WHAT_GIL) != 0,
            "gc": (what & records.WHAT_GC) != 0,
            "in_kernel": (what & records.WHAT_KERNEL) != 0,
            "count": np.minimum(counts["count"], 2**32 - 1).astype(np.uint32),
            "ns": counts["ns"].astype(np.int64),
            "runqueue_ns": counts["runqueue_ns"].astype(np.int64),
            "max_ns": counts["max_ns"].astype(np.int64),
            "stack_id": np.asarray(stack_ids, np.uint64),
        }
    )


def to_stacks(stacks: Sequence[Stack], origin: Origin) -> pa.Table:
    """Rows of the table ``stacks``: one each. They are few: a stack comes once a run."""
    frames = [frame for stack in stacks for frame in stack.frames]
    offsets = np.zeros(len(stacks) + 1, np.int32)
    np.cumsum([len(stack.frames) for stack in stacks], out=offsets[1:])
    leaves = [stack.frames[-1] if stack.frames else None for stack in stacks]
    pythons = [stack.deepest_python for stack in stacks]

    def lists(values: pa.Array) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)

    return pa.table(
        {
            "job": constant(origin.job, len(stacks)),
            "run": np.full(len(stacks), origin.run, np.uint32),
            "stack_id": np.array([stack.id for stack in stacks], np.uint64),
            "kinds": lists(_texts([frame.kind for frame in frames])),
            "functions": lists(_texts([frame.function for frame in frames])),
            "files": lists(_texts([frame.file for frame in frames])),
            "lines": lists(pa.array(_lines(frames), pa.uint32())),
            "depth": np.minimum(np.diff(offsets), 2**16 - 1).astype(np.uint16),
            "leaf_kind": _words(_texts([leaf.kind if leaf else "" for leaf in leaves])),
            "leaf_function": _words(_texts([leaf.function if leaf else "" for leaf in leaves])),
            "leaf_file": _words(_texts([leaf.file if leaf else "" for leaf in leaves])),
            "python_function": _words(_texts([frame.function if frame else "" for frame in pythons])),
            "python_file": _words(_texts([frame.file if frame else "" for frame in pythons])),
            "python_line": np.array(_lines(pythons), np.uint32),
            "python": _words([stack.python for stack in stacks]),
            "native": _words([stack.native for stack in stacks]),
        }
    )


def _lines(frames: Sequence[Frame | None]) -> list[int]:
    """Their lines, which a process says itself: within what the column takes."""
    return [min(max(frame.line, 0), 2**32 - 1) if frame is not None else 0 for frame in frames]


def _texts(values: Sequence[str]) -> pa.Array:
    """Strings from a process's memory: what is no Unicode text is shown by its number, as ``Stack.id`` takes it."""
    return pa.array([value.encode("utf-8", "backslashreplace").decode() for value in values], pa.string())


def to_pauses(
    pauses: NDArray[np.void],
    origin: Origin,
    ranks: NDArray[np.uint32],
    threads: Words,
    stack_ids: NDArray[np.uint64],
    *,
    generations: NDArray[np.int8] | None = None,
) -> pa.Table:
    """Rows of the table ``gc_pauses``.

    A pause is known by samples: it began between the last one before and the first one in it, and ended likewise. Its
    times are the middles of these gaps, its uncertainty half of both. Where the thread was off the CPU before or after,
    the gap is long and says nothing; but collecting takes the CPU, so that a pause that began more than a period before
    its first sample would have met another.

    Args:
        pauses: ``records.PAUSE``, shape (n,). ``period_ns`` 0: not known, and gaps are taken as they are.
        origin: Where they come from.
        ranks: Rank of each, shape (n,).
        threads: Name of the thread of each.
        stack_ids: ``Stack.id`` of each, shape (n,); 0: no stack was taken, or it is not known.
        generations: Oldest generation that each collected, shape (n,); -1 or None: not known.
    """
    begin, end = pauses["begin_ns"].astype(np.int64), pauses["end_ns"].astype(np.int64)
    before, after = pauses["before_ns"].astype(np.int64), pauses["after_ns"].astype(np.int64)
    period_ns = pauses["period_ns"].astype(np.int64)
    longest = np.where(period_ns > 0, period_ns, np.iinfo(np.int64).max)
    # A neighbour that nobody saw is 0: then it was a period away, as far as that is known.
    early = np.clip(np.where(before > 0, begin - before, period_ns), 0, longest)
    late = np.clip(np.where(after > 0, after - end, period_ns), 0, longest)
    count = len(pauses)
    return pa.table(
        {
            **_common(pauses, origin, ranks, threads),
            "ts": _times((begin - early // 2).astype(np.uint64), origin.mono_offset_ns),
            "duration_ns": end - begin + (early + late) // 2,
            "uncertainty_ns": (early + late) // 2,
            "generation": np.full(count, -1, np.int8) if generations is None else np.asarray(generations, np.int8),
            "stack_id": np.asarray(stack_ids, np.uint64),
        }
    )


def to_usage(usage: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32], threads: Words) -> pa.Table:
    """Rows of the table ``thread_usage``.

    Args:
        usage: ``records.THREAD_USAGE``, shape (n,).
        origin: Where they come from.
        ranks: Rank of each, shape (n,).
        threads: Name of each thread.
    """
    begin = usage["begin_ns"].astype(np.uint64)
    return pa.table(
        {
            **_common(usage, origin, ranks, threads),
            "ts": _times(begin, origin.mono_offset_ns),
            "interval_ns": usage["end_ns"].astype(np.int64) - begin.astype(np.int64),
            **{name: usage[name].astype(np.int64) for name in ("cpu_ns", "runqueue_ns", "io_ns")},
            "voluntary": usage["switches_voluntary"].astype(np.int64),
            "involuntary": usage["switches_involuntary"].astype(np.int64),
        }
    )
