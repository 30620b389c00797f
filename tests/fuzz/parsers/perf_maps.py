"""Maps that JIT compilers write for perf: a line a function."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from argus.capture.process import symbols
from tests.fuzz.harness import Bytes, is_text, memory_file

ALLOWED = ()
CODE = ["argus.capture.process.symbols"]
TOKENS = [b"\n", b" ", b"ffffffffffffffff", b"0x", b"1000 10 a\n", b"1000 ffffffffffffffff b\n", b"-1 "]


def seeds() -> list[bytes]:
    lines = b"".join(b"%x 20 py::function_%d:/srv/train.py\n" % (0x1000 + 32 * n, n) for n in range(20))
    return [b"\0" + lines, b"\x40" + lines + b"1010 1000 covers\n1010 8 \xff\xfe\n"]


def run(data: bytes) -> None:
    taken = Bytes(data)
    first = taken.number()
    text = taken.rest()
    counters = {"perf_map_lines_rejected": 0, "perf_map_bytes_unread": 0}
    part: Any = symbols._PerfMap.__new__(symbols._PerfMap)
    part._counters, part._users, part._root, part._path = counters, {os.getuid()}, 0, ""
    part._file, part._left, part._left_ns = None, float(symbols._PERF_LINES_AT_ONCE), 0
    part._start_over()
    half = len(text) * first // 255
    for size in (half, len(text)):  # it grows
        with mock.patch.object(symbols, "open_in_root", lambda *_, size=size, **__: memory_file(text[:size])):
            part.refresh()
    for address in (0, 0x1000, 0x1004, 0x1FFF, (1 << 63) - 1, (1 << 64) - 1):
        found = part.find(address)
        if found is not None:
            is_text(found[0], symbols._LONGEST_PERF_NAME)
            assert found[1] <= address
    part.close()
