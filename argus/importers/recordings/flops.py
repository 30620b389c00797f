"""How fast the matrix products and the attention of a recording were: shapes of operations, and the time of the kernels
that they launched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.recording import Recording
from argus.model.records import GPU_LAUNCH_MATCHED, GpuKind
from argus.semantics.gpu.flops import OUTSIDE, WORK, Achieved, launched_by, step_of, sum_up


def outermost(works: NDArray[np.void]) -> NDArray[np.void]:
    """Operations that lie in no other one of the same thread, by thread and time. ``works``: ``WORK``, shape (n,)."""
    works = works[np.lexsort((-works["end_ns"], works["begin_ns"], works["tid"]))]
    nested = np.zeros(len(works), bool)
    for tid in np.unique(works["tid"]).tolist():
        of_thread = np.flatnonzero(works["tid"] == tid)
        ends = np.maximum.accumulate(works["end_ns"][of_thread])
        nested[of_thread[1:]] = works["end_ns"][of_thread[1:]] <= ends[:-1]
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
    eligible = (ops["kind"] == GpuKind.KERNEL) & (ops["flags"] & GPU_LAUNCH_MATCHED != 0) & (ops["graph"] == 0)
    kernels = ops[eligible & ~recording.communication()]
    owner = launched_by(works, kernels)
    kernels, owner = kernels[owner >= 0], owner[owner >= 0]
    recording.counters["operations_without_kernels"] = len(works) - len(np.unique(owner))
    begin = steps["ts_ns"].astype(np.int64)
    place = step_of(works["begin_ns"], begin, begin + steps["duration_ns"].astype(np.int64))
    step = np.where(place >= 0, steps["step"].astype(np.int64)[place], OUTSIDE) if len(steps) else place
    return sum_up(works, step, kernels, owner)


def works_of(works: list[tuple[int, int, int, float, int]]) -> NDArray[np.void]:
    """``WORK`` rows of (begin, end, thread, floating-point operations, place in ``Recording.operators``)."""
    return np.array(works, WORK) if works else np.empty(0, WORK)
