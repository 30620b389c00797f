"""Which calls are what (launches, waits, collectives), and the kinds of GPU operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.model import calls
from argus.model.records import GpuKind

CALL_KINDS = [call.kind for call in calls.CALLS]
_KERNEL = np.array([kind == "kernel" for kind in CALL_KINDS])
_GRAPH = np.array([kind == "graph" for kind in CALL_KINDS])
_SYNC = np.array([kind == "sync" for kind in CALL_KINDS])


def is_kernel(launches: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which calls launch one kernel. Shape (n,)."""
    mask: NDArray[np.bool_] = _KERNEL[launches["call"]]
    return mask


def is_launch(launches: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which calls launch work: a kernel or a graph. Shape (n,)."""
    mask: NDArray[np.bool_] = (_KERNEL | _GRAPH)[launches["call"]]
    return mask


def is_sync(launches: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which calls wait for the GPU. Shape (n,)."""
    mask: NDArray[np.bool_] = _SYNC[launches["call"]]
    return mask


_COLLECTIVE = np.array([call.shape in (calls.Shape.COLLECTIVE, calls.Shape.C10D) for call in calls.CALLS])
GROUP_CALLS = np.array([call.shape in (calls.Shape.GROUP_START, calls.Shape.GROUP_END) for call in calls.CALLS])
TORCH_CALLS = np.array([call.layer is calls.Layer.TORCH for call in calls.CALLS])
_ABOUT_COMMUNICATORS = np.array([call.kind.startswith("comm_") for call in calls.CALLS])
NO_DTYPE, UNKNOWN_DTYPE = 0, 1
_TYPES = {
    **dict(enumerate(zip(calls.NCCL_DTYPES, calls.NCCL_DTYPE_BYTES, strict=True))),
    **{calls.TORCH_DTYPE + code: named for code, named in calls.TORCH_DTYPES.items()},
}
DTYPE_WORDS = list(dict.fromkeys(["", "unknown", *(name for name, _ in _TYPES.values())]))
DTYPE_CODES = np.full(256, UNKNOWN_DTYPE, np.int32)
_DTYPE_BYTES = np.zeros(256, np.uint64)
for _code, (_name, _size) in _TYPES.items():
    DTYPE_CODES[_code], _DTYPE_BYTES[_code] = DTYPE_WORDS.index(_name), _size


def is_collective(collectives: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records are collectives: every member calls them (not Send, Recv or group marks). Shape (n,)."""
    mask: NDArray[np.bool_] = _COLLECTIVE[collectives["call"]]
    return mask


def has_count(collectives: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records have a process group's own count of collectives, plus 1, in ``stream``. Shape (n,)."""
    mask: NDArray[np.bool_] = TORCH_CALLS[collectives["call"]] & (collectives["stream"] > 0)
    return mask


def of_nccl(collectives: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records are of NCCL's communicators, sends and receives included. Shape (n,)."""
    mask: NDArray[np.bool_] = ~TORCH_CALLS[collectives["call"]] & ~GROUP_CALLS[collectives["call"]]
    return mask


def payload_bytes(collectives: NDArray[np.void]) -> NDArray[np.uint64]:
    """Elements times element size, as passed to the call. Shape (n,)."""
    size = _DTYPE_BYTES[collectives["dtype"]]
    nbytes: NDArray[np.uint64] = np.where(GROUP_CALLS[collectives["call"]], 0, collectives["count"] * size)
    return nbytes.astype(np.uint64)


def about_communicators(control: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which control records make, ask or end a communicator. Shape (n,)."""
    known = control["call"] < len(calls.CALLS)
    mask: NDArray[np.bool_] = known & _ABOUT_COMMUNICATORS[np.minimum(control["call"], len(calls.CALLS) - 1)]
    return mask


_COPIES = {
    1: "memcpy_h2d",
    2: "memcpy_d2h",
    3: "memcpy_h2d",
    4: "memcpy_d2h",
    5: "memcpy_d2d",
    6: "memcpy_d2d",
    7: "memcpy_d2d",
    8: "memcpy_d2d",
    9: "memcpy_h2h",
    10: "memcpy_p2p",
}
"""CUpti_ActivityMemcpyKind; arrays of textures count as what they lie in."""
EVENT_KINDS = ["kernel", "memset", "memcpy", *dict.fromkeys(_COPIES.values())]
"""``kernel_events.kind``."""
_COPY_CODE = np.full(256, EVENT_KINDS.index("memcpy"), np.int32)
for _number, _word in _COPIES.items():
    _COPY_CODE[_number] = EVENT_KINDS.index(_word)


def op_kinds(ops: NDArray[np.void]) -> NDArray[np.int32]:
    """What operations are: places in ``EVENT_KINDS``. ``ops``: ``records.GPU_OP``, shape (n,)."""
    kinds = np.where(ops["kind"] == GpuKind.KERNEL, 0, 1).astype(np.int32)
    copies = ops["kind"] == GpuKind.MEMCPY
    kinds[copies] = _COPY_CODE[ops["copy"][copies]]
    return kinds
