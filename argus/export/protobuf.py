"""The wire format of Protocol Buffers, as far as exporters write it: numbers, texts and messages of messages.

Written by hand, since messages are made by the million: `scripts/bench perfetto` compares with the protobuf library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_MASK = (1 << 64) - 1
_SHORT = [bytes((n,)) if n < 0x80 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(1 << 14)]
"""The varint of each number of at most 14 bits."""
_MORE = [bytes((n & 0x7F | 0x80, n >> 7 | 0x80)) for n in range(1 << 14)]
"""Of each 14 bits that are not the last ones."""
_DOUBLE = struct.Struct("<d")
_FIXED = struct.Struct("<Q")
_VARINT, _FIXED64, _BYTES = 0, 1, 2
"""Wire types."""


def varint(value: int) -> bytes:
    """A number in as few bytes as it needs; negative ones are written as their two's complement."""
    if 0 <= value < 0x4000:
        return _SHORT[value]
    value &= _MASK
    out = b""
    while value >= 0x4000:
        out += _MORE[value & 0x3FFF]
        value >>= 14
    return out + _SHORT[value]


def key(field: int, wire: int = _VARINT) -> bytes:
    """What comes before a value."""
    return varint(field << 3 | wire)


def number(field: int, value: int) -> bytes:
    """A number; nothing for 0, which readers assume."""
    return varint(field << 3) + varint(value) if value else b""


def given(field: int, value: int) -> bytes:
    """A number, 0 as well: of fields of which one is chosen."""
    return varint(field << 3) + varint(value)


def double(field: int, value: float) -> bytes:
    """A floating-point number, 0 as well."""
    return varint(field << 3 | _FIXED64) + _DOUBLE.pack(value)


def fixed64(field: int, value: int) -> bytes:
    """An unsigned number in 8 bytes."""
    return varint(field << 3 | _FIXED64) + _FIXED.pack(value & _MASK)


def message(field: int, body: bytes) -> bytes:
    """A message, or bytes, or encoded text."""
    return varint(field << 3 | _BYTES) + varint(len(body)) + body


def text(field: int, value: str) -> bytes:
    """Text. What is no Unicode (lone surrogates) is replaced."""
    return message(field, value.encode("utf-8", "replace"))


def packed(field: int, values: Iterable[int]) -> bytes:
    """Numbers one after the other."""
    return message(field, b"".join(map(varint, values)))
