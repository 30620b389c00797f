"""CUPTI's activity records: buffers, their index, and which records are believed."""

from __future__ import annotations

import numpy as np

from argus.cupti import decode, layouts
from argus.cupti.buffers import load_walk
from tests.fuzz.harness import Bytes

ALLOWED = ()
CODE = ["argus.cupti.decode"]
VERSIONS = (24, 28, 130001, 130400)
NOW, NAMES = 10**15, 100
KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "OVERHEAD", "MARKER")
_walk = load_walk()


def seeds() -> list[bytes]:
    found = []
    for number, version in enumerate(VERSIONS):
        known = layouts.for_version(version)
        records, offsets = b"", []
        for name in KINDS:
            kind = known.kind(name)
            if kind not in known.dtypes:
                continue
            row = np.zeros(1, known.dtype(kind))
            row["kind"] = kind
            for field, value in (("start", NOW), ("end", NOW + 100), ("timestamp", NOW), ("name", 5)):
                if field in (row.dtype.names or ()):
                    row[field] = value
            offsets.append(len(records))
            records += row.tobytes()
        index = np.array(offsets, np.uint32).tobytes()
        for replaced in (0, 1):
            found.append(bytes([number, replaced, len(offsets)]) + index + records)
    return found


def run(data: bytes) -> None:
    taken = Bytes(data)
    known = layouts.for_version(VERSIONS[taken.number() % len(VERSIONS)])
    replaced = bool(taken.number() & 1)
    index = np.frombuffer(taken.take(4 * taken.number()), np.uint32)
    raw = taken.rest()
    raw += bytes(-len(raw) % 8)
    buffer = np.frombuffer(raw, np.uint8).copy()
    for places in (index, _walk(buffer, known.table())[0]):
        batch = decode.decode(buffer, places, known, 7, replaced, {5: 3}, names=NAMES, since_ns=NOW, now_ns=NOW + 10**9)
        assert len(batch.gpu) + len(batch.host) + sum(batch.rejected.values()) == len(places)
        assert batch.rejected.keys() <= set(decode.REJECTIONS)
        for rows in (batch.gpu, batch.host):
            assert (rows["name"] < NAMES).all()
            assert (rows["end_ns"] >= rows["start_ns"]).all()
            assert (rows["end_ns"] < 1 << 63).all()
