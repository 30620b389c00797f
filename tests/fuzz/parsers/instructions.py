"""Instructions of a traced function, as the file has them that a process maps."""

from __future__ import annotations

from argus.capture.process import instructions
from tests.fuzz.harness import memory_file

ALLOWED = ()
CODE = ["argus.capture.process.instructions"]
TOKENS = [
    b"\x55\x48\x89\xe5",  # push rbp; mov rbp, rsp
    b"\x48\x83\xec\x28", b"\x48\x81\xec\xff\xff\xff\x7f", b"\x48\x81\xec\x00\x00\x00\x80",  # sub rsp
    b"\xf3\x0f\x1e\xfa", b"\xcc", b"\xe9\0\0\0\0", b"\xeb\xfe", b"\x75\xf0", b"\xe8\0\0\0\0", b"\xc3",
    b"\xff\x25\0\0\0\0", b"\x48\x8d\x05\0\0\0\0", b"\xff\xe0", b"\x42\xff\x24\xe5\0\0\0\0", b"\xc7\xf8",
    b"\xf0\x66", b"\x62\xf1\x7c\x48", b"\x48\x89\x07", b"\xc8\xff\xff\xff", b"\xc9",
]  # fmt: skip


def seeds() -> list[bytes]:
    prologue = bytes.fromhex("f30f1efa554889e541574156534883ec28") + bytes.fromhex("4889fb4889f6")
    return [
        prologue + bytes.fromhex("85c07505e8000000004883c4285b415e415f5dc3"),
        bytes.fromhex("eb00") + prologue + b"\x75\xf0" * 20 + b"\xc3",
        b"\x90" * 4000 + b"\xc3",
        bytes.fromhex("488d0500000000486304884801c8ffe0"),
    ]


def run(data: bytes) -> None:
    file = memory_file(data)
    for entry in (0, 5, max(len(data) - 3, 0), 1 << 62, (1 << 64) - 1):
        for throws in (False, True):
            code = instructions.Code(file)
            code.look_ahead([entry])
            code.follow([(entry, throws)])
            found = code.places(entry, throws=throws)
            assert found[0].offset == entry
            offsets = [place.offset for place in found]
            assert offsets == sorted(set(offsets))
            assert offsets[-1] - entry < instructions.LINE_BYTES
            for place in found:
                assert len(place.code) <= instructions.LONGEST
                assert 0 <= place.below < instructions.FRAME_WORDS
                assert place.intact <= set(range(instructions.REGISTER_ARGUMENTS))
            # What the reader process answers of it is taken by who asked.
            row = [[one.offset, one.code.hex(), one.below, sorted(one.intact)] for one in found]
            assert [instructions._place(entry, each) for each in row] == found
