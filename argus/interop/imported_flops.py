"""How fast the matrix products and the attention of a recording were: shapes of operations, and the time of the kernels
that they launched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.interop.recording import WORK, Int, Recording
from argus.records import GPU_LAUNCH_MATCHED, GpuKind

OUTSIDE = -1
"""``Achieved.step`` of what was launched outside every step."""


@dataclass(frozen=True)
class Achieved:
    """Rows of the table ``kernel_flops``, columns of shape (n,).

    Attributes:
        step: OUTSIDE: in none.
        text: Place in ``Recording.operators``.
        symbol: The kernel that took longest, as in ``GPU_OP["name"]``.
        ts_ns: When the first kernel began.
    """

    step: Int
    device: Int
    text: Int
    symbol: Int
    ts_ns: Int
    calls: Int
    kernels: Int
    flops: NDArray[np.float64]
    duration_ns: Int


def outermost(works: NDArray[np.void]) -> NDArray[np.void]:
    """Operations that lie in no other one of the same thread, by thread and time. ``works``: ``WORK``, shape (n,)."""
    works = works[np.lexsort((-works["end_ns"], works["begin_ns"], works["tid"]))]
    nested = np.zeros(len(works), bool)
    for tid in np.unique(works["tid"]).tolist():
        mine = np.flatnonzero(works["tid"] == tid)
        ends = np.maximum.accumulate(works["end_ns"][mine])
        nested[mine[1:]] = works["end_ns"][mine[1:]] <= ends[:-1]
    return works[~nested]


def achieved(recording: Recording, steps: NDArray[np.void]) -> Achieved:
    """What the operations whose work is known took on the GPU, by step, GPU, operator and shape.

    A kernel belongs to the operation in which its thread launched it. Operations none of whose kernels was recorded
    are counted (``operations_without_kernels``) and left out.

    Args:
        recording: With ``works``.
        steps: ``ITERATION`` rows of its rank, in order of time.
    """
    ops, works = recording.ops, outermost(recording.works)
    kernels = np.flatnonzero(
        (ops["kind"] == GpuKind.KERNEL)
        & (ops["flags"] & GPU_LAUNCH_MATCHED != 0)
        & (ops["graph"] == 0)
        & ~recording.communication()
    )
    launched, owner = ops["launch_ns"].astype(np.int64)[kernels], np.full(len(kernels), -1)
    for tid in np.unique(works["tid"]).tolist():
        mine, theirs = np.flatnonzero(works["tid"] == tid), np.flatnonzero(ops["launch_tid"][kernels] == tid)
        place = np.searchsorted(works["begin_ns"][mine], launched[theirs], side="right") - 1
        inside = (place >= 0) & (launched[theirs] <= works["end_ns"][mine[place]])
        owner[theirs[inside]] = mine[place[inside]]
    kernels, launched, owner = kernels[owner >= 0], launched[owner >= 0], owner[owner >= 0]
    recording.counters["operations_without_kernels"] = len(works) - len(np.unique(owner))
    begin = steps["ts_ns"].astype(np.int64)
    place = np.searchsorted(begin, works["begin_ns"], side="right") - 1
    step = np.full(len(works), OUTSIDE, np.int64)
    if len(steps):
        within = (place >= 0) & (works["begin_ns"] < (begin + steps["duration_ns"].astype(np.int64))[place])
        step[within] = steps["step"][place[within]]
    device = np.zeros(len(works), np.int64)
    device[owner] = ops["device"][kernels]
    seen = np.bincount(owner, minlength=len(works)) > 0
    keys, row_of = np.unique(np.stack([step, device, works["text"]])[:, seen], axis=1, return_inverse=True)
    count = keys.shape[1]
    row = np.full(len(works), -1)
    row[seen] = row_of.reshape(-1)
    of_kernel = row[owner]
    start = ops["start_ns"].astype(np.int64)[kernels]
    spent = ops["end_ns"].astype(np.int64)[kernels] - start
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, of_kernel, start)
    duration, symbol = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(duration, of_kernel, spent)
    by_name, name_of = np.unique(np.stack([of_kernel, ops["name"][kernels]]), axis=1, return_inverse=True)
    most = np.bincount(name_of.reshape(-1), weights=spent, minlength=by_name.shape[1])
    rising = np.argsort(most, kind="stable")
    symbol[by_name[0][rising]] = by_name[1][rising]
    flops = np.zeros(count)
    np.add.at(flops, row[seen], works["flops"][seen])
    return Achieved(
        step=keys[0], device=keys[1], text=keys[2], symbol=symbol, ts_ns=first,
        calls=np.bincount(row[seen], minlength=count), kernels=np.bincount(of_kernel, minlength=count),
        flops=flops, duration_ns=duration,
    )  # fmt: skip


def works_of(found: list[tuple[int, int, int, float, int]]) -> NDArray[np.void]:
    """``WORK`` rows of (begin, end, thread, floating-point operations, place in ``Recording.operators``)."""
    return np.array(found, WORK) if found else np.empty(0, WORK)
