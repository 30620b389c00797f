"""Every record that crosses a boundary: one numpy dtype each, with units.

The first three mirror ``bpf/argus.h``; ``tests/unit/model/test_records.py`` compiles the header and compares sizes and
offsets. Times are CLOCK_MONOTONIC nanoseconds of the host; a duration of -1 means "not measured".
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

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
FLAG_NAME_ADDRESS = 16
"""A name that is not, or not wholly, in ``data``: ``name_address`` is where it lies in the process."""

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
"""``struct argus_collective``: one collective operation of one process."""

NAME_LEN = 176
"""Room for a name in a control record, its closing 0 included (``bpf/argus.h`` explains why so much)."""

MARK_NAME_LEN = 96
"""Bytes of a mark's name that are kept."""
MARK = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("handle", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("call", "u1"),
        ("flags", "u1"),
        ("name_len", "<u2"),
        ("at_exit", "<u4"),
        ("name", "u1", (MARK_NAME_LEN,)),
    ]
)
"""``struct argus_mark``: a range, a backward pass, a wait or a work of PyTorch, or a range of NVTX, begins or ends."""

MATH_WORDS = 15
DESCRIPTOR_WORDS = 5
"""Of each of cuBLAS's three layout descriptors in ``MATH["words"]``."""
MATH = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("duration_ns", "<i8"),
        ("words", "<u8", (MATH_WORDS,)),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("result", "<i4"),
        ("call", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
    ]
)
"""``struct argus_math``: one call of cuBLAS or of PyTorch's attention, with the arguments that define what it
multiplies."""

CONTROL = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("duration_ns", "<i8"),
        ("handle", "<u8"),
        ("parent", "<u8"),
        ("name_address", "<u8"),
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
    NAMES_READ_LATER = 15
    MARKS = 16
    MARKS_DROPPED = 17
    MATH = 18
    MATH_DROPPED = 19
    RECORDS_OVER_BUDGET = 20
    HITS_IGNORED = 21
    PENDING_OVER_SHARE = 22
    SEQ_OVER_SHARE = 23
    RECORDS_OVER_SHARE = 24
    LAYOUT_UNKNOWN = 25


TARGET = np.dtype(
    [
        ("paid_ns", "<u8", (5,)),
        ("refused", "<u8"),
        ("hits", "<u8"),
        ("ignored", "<u8"),
        ("pending_refused", "<u8"),
        ("seq_refused", "<u8"),
        ("owner_refused", "<u8"),
        ("trap_ns", "<u8"),
        ("held", "<i4", (5,)),
        ("granted", "<i4", (5,)),
        ("owner", "<u4"),
        ("user", "<u4"),
    ]
)
"""``struct argus_target``: a traced process, what it may still write and keep, and what it did. ``held``
and ``granted`` are in the order of ``enum argus_held``."""

TORCH = np.dtype([("numel", "<u4"), ("counter", "<u4"), ("sizes", "<u4"), ("file", "<u4")])
"""``struct argus_torch``: where objects of a PyTorch that a process maps keep things. ``file``: its slot, plus 1."""
TORCHES = 2
"""Of so many a process's are known (``ARGUS_TORCHES``)."""

OWNER = np.dtype([("began", "<u8", (5,)), ("bytes", "<u8", (5,)), ("lost", "<u8", (len(Counter),))])
"""``struct argus_owner``: what the processes of a user in a container, or in all of them, wrote into the rings, and
what was lost of it, by ``Counter``."""

ROOM = np.dtype([("granted", "<i4", (5,))])
"""``struct argus_room``: what these may hold of the maps that processes fill, in the order of ``enum argus_held``."""

PRICES = np.dtype([("of", "<u4", (256,))])
"""``struct argus_prices``: what calls of files in the last slot cost an owner's processes, ns, by the call's number."""


LOSS_COUNTERS = frozenset(
    {
        Counter.LAUNCHES_DROPPED,
        Counter.COLLECTIVES_DROPPED,
        Counter.CONTROL_DROPPED,
        Counter.MARKS_DROPPED,
        Counter.MATH_DROPPED,
        Counter.RECORDS_OVER_BUDGET,
        Counter.PENDING_FULL,
        Counter.EXIT_MISSED,
        Counter.READ_FAULT,
        Counter.SEQ_FULL,
        Counter.PENDING_OVER_SHARE,
        Counter.SEQ_OVER_SHARE,
        Counter.RECORDS_OVER_SHARE,
        Counter.INIT_ALL_CUT,
        Counter.LAYOUT_UNKNOWN,
    }
)
"""Counters that must all be 0 for coverage to be complete."""


class GpuKind(enum.IntEnum):
    """What an operation on the GPU is (``GPU_OP.kind``)."""

    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3


class HostKind(enum.IntEnum):
    """What a record of the CPU side by CUPTI is (``HOST_OP.kind``)."""

    RUNTIME = 1
    DRIVER = 2
    SYNCHRONIZATION = 3
    OVERHEAD = 4
    JIT = 5
    MODULE = 6
    MARKER = 7


GPU_OP = np.dtype(
    [
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("bytes", "<u8"),
        ("graph_node", "<u8"),
        ("launch_ns", "<u8"),
        ("launch_end_ns", "<u8"),
        ("correlation", "<u4"),
        ("name", "<u4"),
        ("pid", "<u4"),
        ("launch_tid", "<u4"),
        ("device", "<u4"),
        ("context", "<u4"),
        ("stream", "<u4"),
        ("graph", "<u4"),
        ("grid", "<u4", (3,)),
        ("block", "<u4", (3,)),
        ("shared_static", "<u4"),
        ("shared_dynamic", "<u4"),
        ("registers", "<u2"),
        ("kind", "u1"),
        ("copy", "u1"),
        ("flags", "<u4"),
    ]
)
"""One operation on a GPU, as CUPTI timed it: a kernel, a copy or a fill.

``kind``: ``GpuKind``. ``name``: id in the process's name table, 0 for none. ``stream``: CUPTI's id of the stream, not
its handle. ``copy``: CUpti_ActivityMemcpyKind. ``launch_ns``, ``launch_end_ns``, ``launch_tid``: the call that launched
it; all 0 while unknown.
"""

GPU_LAUNCH_MATCHED = 1
"""``GPU_OP.flags``: an API record of the same correlation id gave the launch's time and thread."""
GPU_LAUNCH_PROBED = 2
"""``GPU_OP.flags``: a probe saw the launch as well; ``launch_ns`` is then that row's ``ts`` in ``launches``."""
GPU_START_CLAMPED = 4
"""``GPU_OP.flags``: its recorded start was before its launch began; ``start_ns`` was raised to ``launch_ns``."""

HOST_OP = np.dtype(
    [
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("correlation", "<u4"),
        ("name", "<u4"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("code", "<u4"),
        ("stream", "<u4"),
        ("result", "<i4"),
        ("kind", "u1"),
        ("reserved", "u1", (3,)),
    ]
)
"""One record of the CPU side by CUPTI: an API call, a wait, CUPTI's overhead, a compilation, a loaded module, a marker.

``kind``: ``HostKind``. ``code``: callback id of an API call, CUpti_ActivitySynchronizationType,
CUpti_ActivityOverheadKind, CUpti_ActivityJitOperationType, module id, or CUpti_ActivityFlag of a marker. ``tid``: the
thread as the process itself sees it; 0: the record does not have it. A marker has ``start_ns`` = ``end_ns``.
"""


THREAD_USAGE = np.dtype(
    [
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("cpu_ns", "<i8"),
        ("runqueue_ns", "<i8"),
        ("io_ns", "<i8"),
        ("switches_voluntary", "<i8"),
        ("switches_involuntary", "<i8"),
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
    ]
)
"""What a thread spent from ``begin_ns`` to ``end_ns``, by the kernel's own accounts: on a CPU, runnable without one,
waiting for a disk; and how often it went off a CPU by itself or was made to. -1: not measured."""


# ---- bpf/stacks.h

NO_OFFSET = 0xFFFF
"""A field that this version of CPython does not have."""
PYTHON_FRAMES = 256
"""Deepest Python stack that the kernel side keeps."""
NATIVE_FRAMES = 64

PYTHON = np.dtype(
    [
        *((name, "<u8") for name in ("runtime", "runtime_end", "code_type", "gil_holder", "gil_locked")),
        *((name, "<u8") for name in ("gc_collecting", "ns_dev", "ns_ino", "eval_begin", "eval_end")),
        *((name, "<u2") for name in ("interp_head", "interp_next", "threads_head", "thread_next", "thread_id")),
        *((name, "<u2") for name in ("native_thread_id", "pthread_tid", "thread_frame", "cframe_frame")),
        *((name, "<u2") for name in ("frame_code", "frame_previous", "frame_instr", "frame_owner", "frame_bytes")),
        *((name, "<u2") for name in ("code_firstlineno", "code_filename", "code_name", "code_qualname")),
        *((name, "<u2") for name in ("code_linetable", "code_adaptive", "code_bytes")),
        *((name, "u1") for name in ("owner_entry", "owner_entry_2", "entry_is_frame", "instr_shift")),
        *((name, "u1") for name in ("code_tag_bits", "major", "minor")),
        *((name, "u1") for name in ("unicode_ascii", "unicode_compact", "unicode_kind_shift")),
        ("reserved", "u1", (2,)),
    ],
    align=True,
)
"""``struct argus_python``: how to walk one process's interpreter."""

FRAME = np.dtype(
    [*((name, "<u8") for name in ("code", "check", "content")), ("instruction", "<u4"), ("firstlineno", "<u4")]
)
"""``struct argus_frame``: one Python frame, leaf first. ``firstlineno`` carries ``FRAME_ENTRY``."""
FRAME_ENTRY = 0x80000000
"""``FRAME.firstlineno``: C code called in here. Before 3.11 that is true of every frame."""

CODE = np.dtype(
    [
        *((name, "<u8") for name in ("code", "check", "content")),
        *((name, "<u4") for name in ("pid", "table_bytes", "name_bytes", "file_bytes")),
        ("name", "u1", (256,)),
        ("file", "u1", (512,)),
    ]
)
"""``struct argus_code``: names of a code object, as objects in memory; its line table follows."""

STACK = np.dtype(
    [
        ("stack", "<u8"),
        ("ts_ns", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("python_frames", "<u2"),
        ("native_frames", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u2"),
    ]
)
"""``struct argus_stack``: head of a stack not seen before; ``FRAME`` records and native addresses (u64) follow."""
STACK_PYTHON = 1
STACK_PYTHON_CUT = 2
STACK_PYTHON_REJECTED = 4
STACK_NATIVE_CUT = 8
STACK_KERNEL = 16
STACK_IDLE_PYTHON = 32

STACK_COUNT = np.dtype(
    [
        ("stack", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("what", "<u4"),
        ("window", "<u4"),
        ("count", "<u8"),
        ("ns", "<u8"),
        ("runqueue_ns", "<u8"),
        ("max_ns", "<u8"),
        ("first_ns", "<u8"),
        ("last_ns", "<u8"),
    ]
)
"""``struct argus_row``: one stack of one thread during one window."""
WINDOW_BITS = 27
"""``window`` is in units of 2^27 ns, 134 ms."""

LOG = np.dtype([(name, "<u8") for name in ("written", "taken", "window", "window_begin")])
"""``struct argus_log``: head of what one CPU has counted; rows of ``STACK_COUNT`` follow."""
WHAT_SYSCALL = 0xFFF
NO_SYSCALL = 0xFFF
WHAT_OFF = 0x1000
WHAT_PREEMPTED = 0x2000
WHAT_UNINTERRUPTIBLE = 0x4000
WHAT_GIL_WAIT = 0x8000
WHAT_GIL = 0x10000
WHAT_GC = 0x20000
WHAT_KERNEL = 0x40000

PAUSE = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("before_ns", "<u8"),
        ("after_ns", "<u8"),
        ("stack", "<u8"),
        ("period_ns", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
    ]
)
"""``struct argus_pause``: a pause for garbage collection, from the first to the last sample that saw it."""

BOARD = np.dtype(
    [
        ("ended", "<u8"),
        ("period_ns", "<u8"),
        ("clones", "<u8"),
        ("execs", "<u8"),
    ]
)
"""``struct argus_board``: what the stack sampler's two sides look at often, in memory that both have."""


OFF_NOW = np.dtype(
    [("stack", "<u8"), ("pid", "<u4"), ("tid", "<u4"), ("since_ns", "<u8"), ("what", "<u4"), ("reserved", "<u4")]
)
"""A thread that is off the CPU now, and since when. ``stack`` 0: none was taken when it went off."""


class StackCounter(enum.IntEnum):
    """``enum argus_stack_counter``: what the stack sampler counts in the kernel."""

    SAMPLES = 0
    OFF_CPU = 1
    OFF_CPU_NO_STACK = 2
    SAMPLES_DROPPED = 3
    STACKS_DROPPED = 4
    PAUSES_DROPPED = 5
    THREADS_FULL = 6
    PYTHON = 7
    PYTHON_CUT = 8
    PYTHON_REJECTED = 9
    PYTHON_FAULT = 10
    NO_THREAD_STATE = 11
    THREAD_WALKS = 12
    THREAD_LIST_CUT = 13
    NATIVE_CUT = 14
    NATIVE_NONE = 15
    STACKS_SENT = 16
    OFF_STACKS = 17
    EXECS = 18
    CODES_SENT = 19
    CODES_DROPPED = 20
    OFF_CPU_GUESSED = 21
    THREADS_OVER_SHARE = 22
    STACKS_FORGOTTEN = 23


STACK_LOSS_COUNTERS = frozenset(
    {
        StackCounter.SAMPLES_DROPPED,
        StackCounter.PAUSES_DROPPED,
        StackCounter.THREADS_FULL,
        StackCounter.THREADS_OVER_SHARE,
    }
)
"""Those that must be 0 for coverage to be complete."""


def join(first: NDArray[np.void], second: NDArray[np.void]) -> NDArray[np.void]:
    """Records in one piece, both of one type and contiguous: as bytes, which takes a tenth of the time that
    ``np.concatenate`` takes for a few."""
    joined = np.concatenate([first.view(np.uint8), second.view(np.uint8)])
    return joined.view(first.dtype)
