"""Every record that crosses a boundary: one numpy dtype each, with units.

The first three mirror ``bpf/argus.h``; ``tests/unit/test_records.py`` compiles the header and compares sizes and
offsets. Times are CLOCK_MONOTONIC nanoseconds of the host; a duration of -1 means "not measured".
"""

from __future__ import annotations

import enum

import numpy as np

NOT_MEASURED = -1
"""A duration that could not be observed. 0 would claim that it was observed and was nothing."""

FLAG_IN_NCCL = 1
"""The call was made by NCCL itself, inside a traced NCCL call."""
FLAG_IN_GROUP = 2
"""The call lies between ncclGroupStart and ncclGroupEnd of its thread."""
FLAG_READ_FAULT = 4
"""An argument in user memory could not be read; fields that come from it are 0."""

FLAG_UNFINISHED = 8
"""The call had not returned when its thread ended or Argus stopped."""

LAUNCH = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("duration_ns", "<i8"),
        ("handle", "<u8"),
        ("stream", "<u8"),
        ("bytes", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("grid", "<u4", (3,)),
        ("block", "<u2", (3,)),
        ("call", "u1"),
        ("flags", "u1"),
        ("result", "<i4"),
        ("direction", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""``struct argus_launch``: one CUDA call (launch, copy, synchronise, allocate, load)."""

COLLECTIVE = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("duration_ns", "<i8"),
        ("comm", "<u8"),
        ("stream", "<u8"),
        ("count", "<u8"),
        ("seq", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("peer", "<i4"),
        ("result", "<i4"),
        ("call", "u1"),
        ("dtype", "u1"),
        ("redop", "u1"),
        ("flags", "u1"),
        ("reserved", "<u4"),
    ]
)
"""``struct argus_collective``: one NCCL operation of one process."""

NAME_LEN = 256

CONTROL = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("duration_ns", "<i8"),
        ("handle", "<u8"),
        ("parent", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("nranks", "<i4"),
        ("rank", "<i4"),
        ("color", "<i4"),
        ("key", "<i4"),
        ("result", "<i4"),
        ("call", "u1"),
        ("flags", "u1"),
        ("name_len", "<u2"),
        ("data", "u1", (NAME_LEN,)),
    ]
)
"""``struct argus_control``: communicators made, asked and ended, kernels named."""


class Counter(enum.IntEnum):
    """``enum argus_counter``: what the kernel side counts."""

    LAUNCHES = 0
    COLLECTIVES = 1
    CONTROL = 2
    LAUNCHES_DROPPED = 3
    COLLECTIVES_DROPPED = 4
    CONTROL_DROPPED = 5
    NESTED = 6
    PENDING_FULL = 7
    EXIT_UNMATCHED = 8
    UNFINISHED = 9
    EXIT_MISSED = 10
    READ_FAULT = 11
    SEQ_FULL = 12
    INIT_ALL_CUT = 13
    HITS = 14


LOSS_COUNTERS = frozenset(
    {
        Counter.LAUNCHES_DROPPED,
        Counter.COLLECTIVES_DROPPED,
        Counter.CONTROL_DROPPED,
        Counter.PENDING_FULL,
        Counter.EXIT_MISSED,
        Counter.READ_FAULT,
        Counter.SEQ_FULL,
        Counter.INIT_ALL_CUT,
    }
)
"""Counters that must all be 0 for coverage to be complete."""
