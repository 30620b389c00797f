"""Pickles of plain data: None, truth values, numbers, strings, lists, tuples and dictionaries, and nothing else.

A pickle is a program for a stack machine. Here only the instructions are known that push such values or put them into
containers; every other one (a class, a call, a persistent id) is refused by its name and place, so nothing of the
file's choosing is ever imported or called. All loops are over the bytes of the file: reading takes time and memory in
proportion to them, however the values refer to one another. What is returned may be nested to any depth or contain
itself: read it level by level, never compare, hash or print it as a whole.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_BYTES = 64 << 20
"""Largest pickle. A flight recorder's 2,000 entries with 60 frames each take 2 MB, 100,000 entries 50 MB."""
MAX_NUMBER_BYTES = 16
"""Longest integer. Times and sizes have 8 bytes."""
MAX_CONTAINERS = 3_000_000
"""Lists, tuples and dictionaries in one pickle: one byte can make one of 64 bytes. 250,000 entries have as many."""
LATEST_PROTOCOL = 5


class NotPlain(ValueError):
    """The bytes are not a pickle of plain data: what is wrong, and at which byte."""


class _Mark:
    """Where a run of values on the stack begins."""


_MARK = _Mark()
_UNUSABLE = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"i": "INST", b"o": "OBJ",
    b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"P": "PERSID", b"Q": "BINPERSID", b"\x82": "EXT1", b"\x83": "EXT2",
    b"\x84": "EXT4", b"\x8f": "EMPTY_SET", b"\x90": "ADDITEMS", b"\x91": "FROZENSET", b"B": "BINBYTES",
    b"C": "SHORT_BINBYTES", b"\x8e": "BINBYTES8", b"\x96": "BYTEARRAY8", b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
}  # fmt: skip
"""Instructions that make, call or name something else, for the message."""
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_FIXED = {ord("J"): struct.Struct("<i"), ord("K"): struct.Struct("<B"), ord("M"): struct.Struct("<H"),
          ord("G"): struct.Struct(">d")}  # fmt: skip
_TEXTS = {ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("T"): 4, ord("U"): 1}
"""Strings by the bytes of their length."""
_MAKE_CONTAINERS = frozenset(b"}])tld\x85\x86\x87")
_KEYS = (str, int, float, bool, type(None))


class _Reader:
    """One pickle. ``at`` is the byte after what was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) < count:
            raise NotPlain(f"it ends at byte {len(self.data):,}, in the middle of a value")
        self.at += count
        return part

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise NotPlain(f"it ends at byte {len(self.data):,}, in the middle of a line")
        part = self.data[self.at : end]
        self.at = end + 1
        return part

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise NotPlain(f"a value is missing at byte {self.at:,}")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        """The values after the newest mark, which is taken away. Each is moved once: linear in the file."""
        items = []
        while True:
            if not self.stack:
                raise NotPlain(f"a mark is missing at byte {self.at:,}")
            value = self.stack.pop()
            if value is _MARK:
                break
            items.append(value)
        items.reverse()
        return items

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise NotPlain(f"byte {self.at:,} adds to something that is not a {kind.__name__}")
        return self.stack[-1]

    def put(self, target: dict[Any, Any], items: list[Any]) -> None:
        if len(items) % 2:
            raise NotPlain(f"a key without a value at byte {self.at:,}")
        for place in range(0, len(items), 2):
            key = items[place]
            if not isinstance(key, _KEYS):
                raise NotPlain(f"a key that is a {type(key).__name__} at byte {self.at:,}")
            target[key] = items[place + 1]

    def number(self, text: bytes) -> Any:
        text = text.strip().removesuffix(b"L")
        if text in (b"00", b"01"):
            return text == b"01"
        if len(text) > 40:
            raise NotPlain(f"a number of {len(text):,} digits at byte {self.at:,}")
        try:
            return int(text)
        except ValueError:
            raise NotPlain(f"an invalid number at byte {self.at:,}") from None

    def long(self, count: int) -> int:
        if count > MAX_NUMBER_BYTES:
            raise NotPlain(f"a number of {count:,} bytes at byte {self.at:,}")
        return int.from_bytes(self.take(count), "little", signed=True)

    def text(self, count: int) -> str:
        """Undecodable bytes become replacement characters: names are data, not a reason to refuse a dump."""
        return self.take(count).decode("utf-8", errors="replace")

    def remember(self, place: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise NotPlain(f"nothing to remember at byte {self.at:,}")
        self.memo[place] = self.stack[-1]

    def recall(self, place: int) -> None:
        if place not in self.memo:
            raise NotPlain(f"a reference to nothing at byte {self.at:,}")
        self.stack.append(self.memo[place])

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")


def _containers(reader: _Reader, code: int) -> bool:
    """Instructions about containers; whether ``code`` is one."""
    stack = reader.stack
    if code in _MAKE_CONTAINERS:
        reader.containers += 1
        if reader.containers > MAX_CONTAINERS:
            raise NotPlain(f"it holds more than {MAX_CONTAINERS:,} containers")
    if code == ord("}"):
        stack.append({})
    elif code == ord("]"):
        stack.append([])
    elif code == ord(")"):
        stack.append(())
    elif code == ord("("):
        stack.append(_MARK)
    elif code == ord("a"):
        value = reader.pop()
        reader.top(list).append(value)
    elif code == ord("e"):
        values = reader.since_mark()
        reader.top(list).extend(values)
    elif code == ord("s"):
        value, key = reader.pop(), reader.pop()
        reader.put(reader.top(dict), [key, value])
    elif code == ord("u"):
        values = reader.since_mark()
        reader.put(reader.top(dict), values)
    elif code == ord("t"):
        stack.append(tuple(reader.since_mark()))
    elif code in (0x85, 0x86, 0x87):
        values = [reader.pop() for _ in range(code - 0x84)]
        stack.append(tuple(reversed(values)))
    elif code == ord("l"):
        stack.append(reader.since_mark())
    elif code == ord("d"):
        values = reader.since_mark()
        made: dict[Any, Any] = {}
        reader.put(made, values)
        stack.append(made)
    else:
        return False
    return True


def _values(reader: _Reader, code: int) -> bool:
    """Instructions that push a number or a string; whether ``code`` is one."""
    stack = reader.stack
    if code in _CONSTANTS:
        stack.append(_CONSTANTS[code])
    elif code in _FIXED:
        form = _FIXED[code]
        stack.append(form.unpack(reader.take(form.size))[0])
    elif code in _TEXTS:
        stack.append(reader.text(reader.unsigned(_TEXTS[code])))
    elif code == 0x8A:
        stack.append(reader.long(reader.unsigned(1)))
    elif code == 0x8B:
        stack.append(reader.long(reader.unsigned(4)))
    elif code in (ord("I"), ord("L")):
        stack.append(reader.number(reader.line()))
    elif code == ord("F"):
        try:
            stack.append(float(reader.line()))
        except ValueError:
            raise NotPlain(f"an invalid number at byte {reader.at:,}") from None
    elif code == ord("V"):
        stack.append(reader.line().decode("raw-unicode-escape", errors="replace"))
    elif code == ord("S"):
        stack.append(reader.line().decode("utf-8", errors="replace").strip("'\""))
    else:
        return False
    return True


def _references(reader: _Reader, code: int) -> bool:
    """Instructions about the memo and the stack; whether ``code`` is one."""
    if code == ord("q"):
        reader.remember(reader.unsigned(1))
    elif code == ord("r"):
        reader.remember(reader.unsigned(4))
    elif code == 0x94:
        reader.remember(len(reader.memo))
    elif code == ord("h"):
        reader.recall(reader.unsigned(1))
    elif code == ord("j"):
        reader.recall(reader.unsigned(4))
    elif code in (ord("p"), ord("g")):
        place = reader.number(reader.line())
        (reader.remember if code == ord("p") else reader.recall)(int(place))
    elif code == ord("0"):
        if not reader.stack:
            raise NotPlain(f"a value is missing at byte {reader.at:,}")
        reader.stack.pop()
    elif code == ord("1"):
        reader.since_mark()
    elif code == ord("2"):
        value = reader.pop()
        reader.stack += [value, value]
    elif code == 0x80:
        if (protocol := reader.unsigned(1)) > LATEST_PROTOCOL:
            raise NotPlain(f"it is of protocol {protocol}, which does not exist")
    elif code == 0x95:
        reader.take(8)
    else:
        return False
    return True


def loads(data: bytes) -> Any:
    """The value that a pickle (protocols 0 to 5) of plain data stands for.

    Args:
        data: The whole file. What comes after the end of the pickle is not read.

    Raises:
        NotPlain: It is not a pickle, is cut off, too large, or holds anything but plain data.
    """
    if len(data) > MAX_BYTES:
        raise NotPlain(f"it has {len(data):,} bytes, over {MAX_BYTES:,}")
    reader = _Reader(data)
    while reader.at < len(data):
        _usual(reader)
        if reader.at >= len(data):
            break
        code = data[reader.at]
        reader.at += 1
        if code == ord("."):
            value = reader.pop()
            if reader.stack:
                raise NotPlain(f"it ends at byte {reader.at:,} with values left over")
            return value
        if _values(reader, code) or _containers(reader, code) or _references(reader, code):
            continue
        name = _UNUSABLE.get(bytes([code]))
        what = f"instruction {name}" if name else f"byte 0x{code:02x}"
        raise NotPlain(f"{what} at byte {reader.at - 1:,} is not of plain data")
    raise NotPlain(f"it ends at byte {len(data):,}, before its end mark")


def _usual(reader: _Reader) -> None:
    """Runs the instructions that a dump mostly consists of, until one that is another or wrong: references, strings,
    small numbers. They do what :func:`_references` and :func:`_values` do; a dump is read in half the time."""
    data, stack, memo, at = reader.data, reader.stack, reader.memo, reader.at
    end = len(data) - 5
    while at < end:
        code = data[at]
        if code == 0x68:  # BINGET
            place = data[at + 1]
            if place not in memo:
                break
            stack.append(memo[place])
            at += 2
        elif code == 0x6A:  # LONG_BINGET
            place = int.from_bytes(data[at + 1 : at + 5], "little")
            if place not in memo:
                break
            stack.append(memo[place])
            at += 5
        elif code == 0x58:  # BINUNICODE
            last = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            if last > len(data):
                break
            stack.append(data[at + 5 : last].decode("utf-8", errors="replace"))
            at = last
        elif code == 0x71 or code == 0x72:  # BINPUT, LONG_BINPUT
            if not stack or stack[-1] is _MARK:
                break
            size = 1 if code == 0x71 else 4
            memo[int.from_bytes(data[at + 1 : at + 1 + size], "little")] = stack[-1]
            at += 1 + size
        elif code == 0x4B:  # BININT1
            stack.append(data[at + 1])
            at += 2
        elif code == 0x28:  # MARK
            stack.append(_MARK)
            at += 1
        else:
            break
    reader.at = at
