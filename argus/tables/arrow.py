"""Arrow columns that all tables share: who and when, and words by number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


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


def triples(values: NDArray[np.generic], present: NDArray[np.bool_], kind: pa.DataType) -> pa.ListArray:
    """Rows of ``values`` (shape (n, 3)) as lists; empty where not ``present``."""
    offsets = np.zeros(len(present) + 1, np.int32)
    np.cumsum(present * 3, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values[present].ravel(), kind))
