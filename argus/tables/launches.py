"""CUDA calls as columns of the table ``launches``."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.capture.process.names import KernelNames
from argus.model import calls, records
from argus.model.event_kinds import CALL_KINDS, is_kernel
from argus.tables.arrow import Origin, dictionary, triples

_SYMBOLS = np.array([call.symbol for call in calls.CALLS], dtype=object)
_LAYER = np.array([int(call.layer) for call in calls.CALLS], dtype="u1")
# A copy whose call does not say its direction, but whose argument may (cudaMemcpyKind).
_UNDIRECTED = np.array([kind == "memcpy" for kind in CALL_KINDS])
_WORDS = list(dict.fromkeys([*CALL_KINDS, *calls.DIRECTIONS.values()]))
_KIND_CODE = np.array([_WORDS.index(kind) for kind in CALL_KINDS], dtype=np.int32)
_DIRECTION_CODE = {value: _WORDS.index(name) for value, name in calls.DIRECTIONS.items()}


def kernel_codes(launches: NDArray[np.void], names: KernelNames) -> tuple[NDArray[np.int32], list[str]]:
    """Kernel names of calls, dictionary-encoded.

    Returns:
        Codes, shape (n,), and the names they stand for. Name 0 is empty: the call launches no kernel.
    """
    codes = np.zeros(len(launches), np.int32)
    words: dict[str, int] = {"": 0}
    chosen = np.flatnonzero(is_kernel(launches))
    if not len(chosen):
        return codes, list(words)
    kernels = launches[chosen]
    order = np.argsort(kernels["pid"], kind="stable")
    pids, starts = np.unique(kernels["pid"][order], return_index=True)
    for pid, of_process in zip(pids.tolist(), np.split(order, starts[1:]), strict=True):
        handles, first, inverse = np.unique(kernels["handle"][of_process], return_index=True, return_inverse=True)
        layers = _LAYER[kernels["call"][of_process[first]]]
        table = np.empty(len(handles), np.int32)
        for place, (handle, layer) in enumerate(zip(handles, layers, strict=True)):
            name = names.name(pid, int(handle), calls.Layer(int(layer)))
            table[place] = words.setdefault(name, len(words))
        codes[chosen[of_process]] = table[inverse]
    return codes, list(words)


def to_table(launches: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32], names: KernelNames) -> pa.Table:
    """Rows of the table ``launches``.

    Args:
        launches: ``records.LAUNCH``, shape (n,).
        origin: Where they come from.
        ranks: Rank of each record, shape (n,).
        names: Where kernel names are known.
    """
    call = launches["call"]
    kernel = is_kernel(launches)
    kinds = _KIND_CODE[call]
    undirected = _UNDIRECTED[call]
    if undirected.any():
        for value, code in _DIRECTION_CODE.items():
            if value:  # 0 is also "the call does not say"
                kinds = np.where(undirected & (launches["direction"] == value), code, kinds).astype(np.int32)
    kernel_code, kernel_words = kernel_codes(launches, names)
    nbytes = launches["bytes"].copy()
    return pa.table(
        {
            **origin.columns(launches, ranks),
            "call": dictionary(call.astype(np.int32), list(_SYMBOLS)),
            "kind": dictionary(kinds, _WORDS),
            "kernel": dictionary(kernel_code, kernel_words),
            "handle": np.ascontiguousarray(launches["handle"]),
            "stream": np.ascontiguousarray(launches["stream"]),
            "bytes": np.where(kernel, 0, nbytes).astype(np.uint64),
            "shared_bytes": np.where(kernel, nbytes, 0).astype(np.uint64),
            "grid": triples(launches["grid"], kernel, pa.uint32()),
            "block": triples(launches["block"], kernel, pa.uint16()),
            "in_nccl": (launches["flags"] & records.FLAG_IN_NCCL) != 0,
        }
    )
