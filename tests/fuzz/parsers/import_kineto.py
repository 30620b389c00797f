"""Traces of PyTorch's profiler: Chrome's trace format, as JSON or gzipped."""

from __future__ import annotations

import gzip
import json

from argus.importers import kineto
from argus.model.errors import ArgusError
from tests.fuzz import storing
from tests.unit.importers.test_kineto import trace

ALLOWED = (ArgusError,)
CODE = ["argus.importers.kineto", "argus.importers.recordings.recording", "argus.importers.recordings.steps",
        "argus.importers.recordings.collectives"]  # fmt: skip
TOKENS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"-1", b"1e999", b'"\\ud800"', b'"ph": "X"', b'"dur": ',
          b'"ts": ', b'"args": {}', b'"cat": "kernel"', b'"stream": ', b'"grid": [1, 2]', b'"rank": -5', b"[" * 2000,
          b'"Input Dims": [[1, 2], [2, 3]]', b'"baseTimeNanoseconds": ', b"NaN", b"Infinity", b"true"]  # fmt: skip
SECONDS = 4.0


def seeds() -> list[bytes]:
    texts = [json.dumps(trace(0, 1)).encode(), json.dumps(trace(1, 2, annotated=False, args=False)).encode()]
    small = json.loads(texts[0])
    small["traceEvents"] = small["traceEvents"][:6]
    texts.append(json.dumps(small).encode())
    texts.append(json.dumps(small["traceEvents"]).encode())
    return [b"\0" + text for text in texts] + [b"\1" + texts[2]] + [b"\2" + gzip.compress(texts[2], mtime=0)]


def run(data: bytes) -> None:
    kind, text = data[:1], data[1:]
    if kind == b"\1":
        text = gzip.compress(text, 1, mtime=0)
    with storing.as_file(text, "rank0.json") as path:
        storing.store_some([kineto.read(path, 0)], data)
