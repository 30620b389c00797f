"""NCCL calls as columns of the table ``collectives``."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus import records
from argus.capture import calls
from argus.capture.launches import Origin, dictionary

_OPS = [call.kind for call in calls.CALLS]
_OP_WORDS = list(dict.fromkeys(_OPS))
_OP_CODE = np.array([_OP_WORDS.index(op) for op in _OPS], dtype=np.int32)
_COLLECTIVE = np.array([call.shape is calls.Shape.COLLECTIVE for call in calls.CALLS])
_GROUP = np.array([call.shape in (calls.Shape.GROUP_START, calls.Shape.GROUP_END) for call in calls.CALLS])
_ABOUT_COMMUNICATORS = np.array([call.kind.startswith("comm_") for call in calls.CALLS])
_DTYPE_WORDS = [*calls.NCCL_DTYPES, "unknown", ""]
_REDOP_WORDS = [*calls.NCCL_REDOPS, "custom", ""]
_NO_REDOP = 255


def is_collective(collectives: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records are collectives: every member calls them (not Send, Recv or group marks). Shape (n,)."""
    mask: NDArray[np.bool_] = _COLLECTIVE[collectives["call"]]
    return mask


def payload_bytes(collectives: NDArray[np.void]) -> NDArray[np.uint64]:
    """Elements times element size, as passed to the call. Shape (n,)."""
    sizes = np.array([*calls.NCCL_DTYPE_BYTES, 0], np.uint64)
    code = np.minimum(collectives["dtype"], len(calls.NCCL_DTYPE_BYTES))
    nbytes: NDArray[np.uint64] = np.where(_GROUP[collectives["call"]], 0, collectives["count"] * sizes[code])
    return nbytes.astype(np.uint64)


def to_table(collectives: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32]) -> pa.Table:
    """Rows of the table ``collectives``. Arguments as in ``argus.capture.launches.to_table``."""
    group = _GROUP[collectives["call"]]
    dtype = np.minimum(collectives["dtype"], len(calls.NCCL_DTYPES)).astype(np.int32)
    dtype[group] = len(_DTYPE_WORDS) - 1
    redop = np.minimum(collectives["redop"], len(calls.NCCL_REDOPS)).astype(np.int32)
    redop[collectives["redop"] == _NO_REDOP] = len(_REDOP_WORDS) - 1
    return pa.table(
        {
            **origin.columns(collectives, ranks),
            "comm": np.ascontiguousarray(collectives["comm"]),
            "op": dictionary(_OP_CODE[collectives["call"]], _OP_WORDS),
            "seq": np.ascontiguousarray(collectives["seq"]),
            "bytes": payload_bytes(collectives),
            "count": np.ascontiguousarray(collectives["count"]),
            "dtype": dictionary(dtype, _DTYPE_WORDS),
            "redop": dictionary(redop, _REDOP_WORDS),
            "peer": np.ascontiguousarray(collectives["peer"]),
            "stream": np.ascontiguousarray(collectives["stream"]),
            "in_group": (collectives["flags"] & records.FLAG_IN_GROUP) != 0,
        }
    )


def about_communicators(control: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which control records make, ask or end a communicator. Shape (n,)."""
    known = control["call"] < len(calls.CALLS)
    mask: NDArray[np.bool_] = known & _ABOUT_COMMUNICATORS[np.minimum(control["call"], len(calls.CALLS) - 1)]
    return mask


def communicator_calls(control: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32]) -> pa.Table:
    """Rows of the table ``communicator_calls``, from control records about communicators: a few a process.

    Arguments as in ``argus.capture.launches.to_table``.
    """
    ids = [row["data"][: int(row["name_len"])].tobytes().hex() for row in control]
    return pa.table(
        {
            **origin.columns(control, ranks),
            "call": dictionary(control["call"].astype(np.int32), [call.symbol for call in calls.CALLS]),
            "comm": np.ascontiguousarray(control["handle"]),
            "parent": np.ascontiguousarray(control["parent"]),
            "comm_rank": np.ascontiguousarray(control["rank"]),
            "nranks": np.ascontiguousarray(control["nranks"]),
            "color": np.ascontiguousarray(control["color"]),
            "key": np.ascontiguousarray(control["key"]),
            "unique_id": pa.array(ids, pa.string()),
        }
    )
