"""pprof's format: ``profile.proto`` of https://github.com/google/pprof, gzipped; field numbers are that file's."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterable

from argus.semantics.profile import Profile
from argus.semantics.stacks import Frame
from argus.text import printable

_TYPES = {
    "cpu": (("samples", "count"), ("cpu", "nanoseconds")),
    "off": (("waits", "count"), ("off_cpu", "nanoseconds")),
}


def write_pprof(profile: Profile) -> bytes:
    """The file. Samples carry the labels rank, thread and tid, for ``go tool pprof -tagfocus`` and ``-tagroot``."""
    strings: dict[str, int] = {"": 0}
    functions: dict[tuple[str, str], int] = {}
    locations: dict[Frame, int] = {}
    known: dict[int, bytes] = {}

    def text(value: str) -> int:
        return strings.setdefault(printable(value), len(strings))

    @functools.cache
    def labels(rank: int, thread: str, tid: int) -> bytes:
        # As text: pprof takes a number 0 for none, and there is a rank 0.
        values = {"rank": str(rank) if rank >= 0 else "", "thread": thread, "tid": str(tid) if tid else ""}
        return b"".join(
            _message(3, _number(1, text(key)) + _number(2, text(value))) for key, value in values.items() if value
        )

    kinds = [kind for kind in _TYPES if any(sample.kind == kind for sample in profile.samples)] or ["cpu"]
    out = bytearray()
    for kind in kinds:
        for name, unit in _TYPES[kind]:
            out += _message(1, _value_type(text(name), text(unit)))
    for sample in profile.samples:
        # By identity first: samples of a thousand ranks share their stacks, and hashing all frames takes long.
        stack = known.get(id(sample.frames))
        if stack is None:  # pprof wants the leaf first
            stack = _packed(1, (locations.setdefault(frame, len(locations) + 1) for frame in reversed(sample.frames)))
            known[id(sample.frames)] = stack
        values = [v for kind in kinds for v in ((sample.count, sample.ns) if kind == sample.kind else (0, 0))]
        body = stack + _packed(2, values)
        out += _message(2, body + labels(sample.rank, sample.thread, sample.tid))
    for frame, number in locations.items():
        function = functions.setdefault((frame.function, frame.file), len(functions) + 1)
        line = _number(1, function) + _number(2, frame.line)
        out += _message(4, _number(1, number) + _message(4, line))
    for (name, file), number in functions.items():
        # Without system_name: where both are equal pprof takes the name for a C++ one, and <module> for a template.
        out += _message(5, _number(1, number) + _number(2, text(name)) + _number(4, text(file)))
    out += _number(9, profile.begin_ns) + _number(10, max(profile.end_ns - profile.begin_ns, 0))
    out += _message(11, _value_type(text("cpu"), text("nanoseconds"))) + _number(12, profile.period_ns)
    out += _number(13, text(f"{profile.title}: {profile.subtitle}"))
    out += _number(14, text(_TYPES[kinds[0]][1][0]))
    for word in strings:  # last: everything above may add to it
        out += _message(6, word.encode())
    return gzip.compress(bytes(out), mtime=0)


def _varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return bytes((value,))
    value &= (1 << 64) - 1  # negative numbers are written as their two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))


def _value_type(kind: int, unit: int) -> bytes:
    return _number(1, kind) + _number(2, unit)
