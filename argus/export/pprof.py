"""pprof's format: ``profile.proto`` of https://github.com/google/pprof, gzipped; field numbers are that file's."""

from __future__ import annotations

import functools
import gzip

from argus.export.protobuf import message, number, packed
from argus.model.stacks import Frame
from argus.model.text import printable
from argus.semantics.stacks.profile import Profile

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
            message(3, number(1, text(key)) + number(2, text(value))) for key, value in values.items() if value
        )

    kinds = [kind for kind in _TYPES if any(sample.kind == kind for sample in profile.samples)] or ["cpu"]
    out = bytearray()
    for kind in kinds:
        for name, unit in _TYPES[kind]:
            out += message(1, _value_type(text(name), text(unit)))
    for sample in profile.samples:
        # By identity first: samples of a thousand ranks share their stacks, and hashing all frames takes long.
        stack = known.get(id(sample.frames))
        if stack is None:  # pprof wants the leaf first
            stack = packed(1, (locations.setdefault(frame, len(locations) + 1) for frame in reversed(sample.frames)))
            known[id(sample.frames)] = stack
        values = [v for kind in kinds for v in ((sample.count, sample.ns) if kind == sample.kind else (0, 0))]
        body = stack + packed(2, values)
        out += message(2, body + labels(sample.rank, sample.thread, sample.tid))
    for frame, place in locations.items():
        function = functions.setdefault((frame.function, frame.file), len(functions) + 1)
        line = number(1, function) + number(2, frame.line)
        out += message(4, number(1, place) + message(4, line))
    for (name, file), place in functions.items():
        # Without system_name: where both are equal pprof takes the name for a C++ one, and <module> for a template.
        out += message(5, number(1, place) + number(2, text(name)) + number(4, text(file)))
    out += number(9, profile.begin_ns) + number(10, max(profile.end_ns - profile.begin_ns, 0))
    out += message(11, _value_type(text("cpu"), text("nanoseconds"))) + number(12, profile.period_ns)
    out += number(13, text(f"{profile.title}: {profile.subtitle}"))
    out += number(14, text(_TYPES[kinds[0]][1][0]))
    for word in strings:  # last: everything above may add to it
        out += message(6, word.encode())
    return gzip.compress(bytes(out), mtime=0)


def _value_type(kind: int, unit: int) -> bytes:
    return number(1, kind) + number(2, unit)
