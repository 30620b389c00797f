"""Code objects, strings and line tables in the memory of a Python process."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from argus.capture.python import code, interpreter, layouts
from argus.model.records import CODE as CODE_RECORD
from argus.model.records import FRAME
from tests.fuzz.harness import Bytes, is_text, memory_file

ALLOWED = ()
CODE = ["argus.capture.python.code", "argus.capture.python.interpreter"]
VERSIONS = sorted(layouts.LAYOUTS)
TYPE = 0x100
"""Address of the code type; code objects, names and tables lie where ``seeds`` puts them."""
OBJECT, NAME, FILE, TABLE = 0x200, 0x400, 0x500, 0x600


def _layout(version: tuple[int, int]) -> Any:
    record = interpreter._record(layouts.LAYOUTS[version], (*version, 1))
    record["code_type"] = TYPE
    return record


def _memory(version: tuple[int, int]) -> bytes:
    layout = layouts.LAYOUTS[version]
    memory = bytearray(0x800)

    def put(at: int, form: str, *values: Any) -> None:
        struct.pack_into(form, memory, at, *values)

    put(OBJECT, "<QQ", 1, TYPE)
    put(OBJECT + layout.code_firstlineno, "<I", 7)
    for field, at in (("code_name", NAME), ("code_filename", FILE), ("code_linetable", TABLE)):
        put(OBJECT + getattr(layout, field), "<Q", at)
    if layout.code_qualname != interpreter.NO_OFFSET:
        put(OBJECT + layout.code_qualname, "<Q", NAME)
    for at, text in ((NAME, b"function"), (FILE, b"/srv/train.py")):
        put(at + layout.unicode_length, "<q", len(text))
        put(at + layout.unicode_state, "<I", (1 | 1 << 3 | 1 << 4) << layout.unicode_kind_shift)
        memory[at + layout.unicode_ascii : at + layout.unicode_ascii + len(text)] = text
    table = b"\x80\x00\xd8\x04\x08\x88\x01"
    put(TABLE + layout.bytes_size, "<q", len(table))
    memory[TABLE + layout.bytes_data : TABLE + layout.bytes_data + len(table)] = table
    return bytes(memory)


def seeds() -> list[bytes]:
    return [bytes([number, sent]) + _memory(version) for number, version in enumerate(VERSIONS) for sent in (0, 1)]


def run(data: bytes) -> None:
    taken = Bytes(data)
    version = VERSIONS[taken.number() % len(VERSIONS)]
    sent = taken.number() & 1
    image = taken.rest()
    file = memory_file(image)
    resolver = code.CodeResolver(file.fd, _layout(version))
    read = resolver._read_header(OBJECT)
    header = [0] * len(resolver._order) if read is None else list(read)
    name, qualname = header[resolver._name], header[resolver._qualname] if resolver._qualname >= 0 else 0
    check = interpreter.check_of(name, qualname, header[resolver._filename], header[resolver._linetable])
    frames = np.zeros(3, FRAME)
    frames["code"], frames["check"] = OBJECT, check
    frames["firstlineno"], frames["instruction"] = header[resolver._first] & 0x7FFFFFFF, (0, 6, 0xFFFFFFFF)
    if sent:
        record = np.frombuffer(image.ljust(CODE_RECORD.itemsize + 64, b"\0"), np.uint8).copy()
        head = record[: CODE_RECORD.itemsize].view(CODE_RECORD)
        head["code"], head["check"], head["content"] = OBJECT, check, 9
        frames["content"] = 9
        resolver.learn(record)
    chain = resolver.chain(frames)
    for frame in (*resolver.resolve(frames), *chain.frames):
        if frame is not None:
            is_text(frame.function, code.MAX_NAME + 1)
            is_text(frame.file, 4 * code.MAX_NAME + 1)
            assert 0 <= frame.line <= code.MAX_LINE
