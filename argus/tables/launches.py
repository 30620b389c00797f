"""CUDA calls as columns of the table ``launches``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus import records
from argus.capture import calls
from argus.capture.names import KernelNames

_SYMBOLS = np.array([call.symbol for call in calls.CALLS], dtype=object)
_KINDS = [call.kind for call in calls.CALLS]
_KERNEL = np.array([kind == "kernel" for kind in _KINDS])
_GRAPH = np.array([kind == "graph" for kind in _KINDS])
_SYNC = np.array([kind == "sync" for kind in _KINDS])
_LAYER = np.array([int(call.layer) for call in calls.CALLS], dtype="u1")
# A copy whose call does not say its direction, but whose argument may (cudaMemcpyKind).
_UNDIRECTED = np.array([kind == "memcpy" for kind in _KINDS])
_ALL_KINDS = list(dict.fromkeys([*_KINDS, *calls.DIRECTIONS.values()]))
_KIND_CODE = np.array([_ALL_KINDS.index(kind) for kind in _KINDS], dtype=np.int32)
_DIRECTION_CODE = {value: _ALL_KINDS.index(name) for value, name in calls.DIRECTIONS.items()}


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


def dictionary(codes: NDArray[np.int32], words: list[str]) -> pa.DictionaryArray:
    """Strings as codes into ``words``: what ClickHouse takes for a LowCardinality(String)."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(words, pa.string()))


@lru_cache(maxsize=64)
def _one_word(word: str) -> pa.Array:
    return pa.array([word], pa.string())


def constant(word: str, count: int) -> pa.DictionaryArray:
    """One string ``count`` times."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), _one_word(word))


@dataclass(frozen=True)
class Origin:
    """Where records come from: what every row says besides the record itself.

    Attributes:
        job: Job name.
        run: Session number.
        host: Node name.
        mono_offset_ns: Wall time minus CLOCK_MONOTONIC.
    """

    job: str
    run: int
    host: str
    mono_offset_ns: int

    def columns(self, events: NDArray[np.void], ranks: NDArray[np.uint32]) -> dict[str, object]:
        """The columns that all tables of calls share. ``ranks``: rank of each record, shape (n,)."""
        count = len(events)
        ts = pa.array(events["ts_ns"].astype(np.int64) + self.mono_offset_ns, pa.int64())
        return {
            "job": constant(self.job, count),
            "run": np.full(count, self.run, np.uint32),
            "rank": ranks,
            "host": constant(self.host, count),
            "pid": np.ascontiguousarray(events["pid"]),
            "tid": np.ascontiguousarray(events["tid"]),
            "ts": ts.cast(pa.timestamp("ns", tz="UTC")),
            "duration_ns": np.ascontiguousarray(events["duration_ns"]),
            "result": np.ascontiguousarray(events["result"]),
        }


def kernel_codes(launches: NDArray[np.void], names: KernelNames) -> tuple[NDArray[np.int32], list[str]]:
    """Kernel names of calls, dictionary-encoded.

    Returns:
        Codes, shape (n,), and the names they stand for. Name 0 is empty: the call launches no kernel.
    """
    codes = np.zeros(len(launches), np.int32)
    words: dict[str, int] = {"": 0}
    chosen = np.flatnonzero(is_kernel(launches))
    kernels = launches[chosen]
    for pid in np.unique(kernels["pid"]):
        mine = np.flatnonzero(kernels["pid"] == pid)
        handles, first, inverse = np.unique(kernels["handle"][mine], return_index=True, return_inverse=True)
        layers = _LAYER[kernels["call"][mine[first]]]
        table = np.empty(len(handles), np.int32)
        for place, (handle, layer) in enumerate(zip(handles, layers, strict=True)):
            name = names.name(int(pid), int(handle), calls.Layer(int(layer)))
            table[place] = words.setdefault(name, len(words))
        codes[chosen[mine]] = table[inverse]
    return codes, list(words)


def triples(values: NDArray[np.generic], present: NDArray[np.bool_], kind: pa.DataType) -> pa.ListArray:
    """Rows of ``values`` (shape (n, 3)) as lists; empty where not ``present``."""
    offsets = np.zeros(len(present) + 1, np.int32)
    np.cumsum(present * 3, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values[present].ravel(), kind))


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
            "kind": dictionary(kinds, _ALL_KINDS),
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
