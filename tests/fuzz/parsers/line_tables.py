"""Line tables of Python code objects, of all three formats."""

from __future__ import annotations

from itertools import pairwise

from argus.capture.python import code
from tests.fuzz.harness import Bytes

ALLOWED = ()
CODE = ["argus.capture.python.code"]


def seeds() -> list[bytes]:
    def example(a: int) -> int:
        while a:
            a -= 1
        return a

    own = example.__code__
    table = getattr(own, "co_linetable", b"") or own.co_lnotab
    return [bytes([kind, 0, *first, 8]) + table for kind in range(3) for first in ((1, 0, 0, 0), (255,) * 4)]


def run(data: bytes) -> None:
    taken = Bytes(data)
    decoder = list(code._DECODERS.values())[taken.number() % 3]
    until = code._ALL if taken.number() & 1 else taken.number(2)
    first = taken.number(4) & code.MAX_LINE
    table = taken.rest()
    ends, lines = decoder(table, first, until)
    assert len(ends) == len(lines) <= len(table) + 1
    assert all(0 <= line <= code.MAX_LINE for line in lines)
    assert all(a < b for a, b in pairwise(ends)) or not ends
