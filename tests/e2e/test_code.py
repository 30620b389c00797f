"""Frames of real processes are named as CPython itself names them."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest

from argus.capture.python import layouts
from argus.capture.python.code import _DECODERS, HIDDEN, CodeResolver, PythonFrame
from argus.capture.python.interpreter import PythonProcess, check_of, find_interpreter
from argus.model.records import CODE, FRAME, FRAME_ENTRY, PYTHON
from tests.e2e.python_programs import Running
from tests.pythons import pythons

PYTHONS = pythons()
pytestmark = pytest.mark.skipif(not PYTHONS, reason="no CPython 3.8 or later")


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    return PYTHONS[request.param]


def _attach(pid: int) -> tuple[PythonProcess, CodeResolver]:
    interpreter = find_interpreter(pid)
    assert interpreter is not None
    assert interpreter.state == "on"
    assert interpreter.settled
    assert interpreter.layout is not None
    process = PythonProcess(pid, interpreter)
    return process, CodeResolver(process, interpreter.layout)


def _rows(frames: list[PythonFrame | None]) -> list[tuple[str, str, int] | None]:
    return [None if frame is None else (frame.function, frame.file, frame.line) for frame in frames]


def test_every_stack_is_what_cpython_says_itself(python: str) -> None:
    with Running(python, "blocked.py") as program:
        output = {int(tid): frames for tid, frames in json.loads(program.line()).items()}
        process, resolver = _attach(program.pid)
        assert len(output) > 20
        for _ in range(2):
            for tid, expected in output.items():
                frames = process.walk(tid)
                assert frames is not None
                assert _rows(resolver.resolve(frames)) == [tuple(frame[:3]) for frame in expected]
                assert [int(np.int32(value)) for value in frames["instruction"].view(np.int32)] == [
                    frame[3] for frame in expected
                ]
        assert resolver.counters == {"python_frames_unresolved": 0, "python_code_reused": 0, "python_lines_unknown": 0}
        program.end()
        # The process is gone: nothing is reported of it, nor made up.
        assert resolver.resolve(frames) == [None] * len(frames)
        assert process.thread_states() == {}
        assert process.walk(tid) is None
        assert process.gil_holder() is None
        assert process.collections() is None
        process.close()


@pytest.mark.parametrize("names", [(), ("same",)], ids=["names", "name"])
def test_code_that_replaced_another_is_not_taken_for_it(python: str, names: tuple[str, ...]) -> None:
    with Running(python, "churn.py", *names) as program:
        tid = int(program.line())
        process, resolver = _attach(program.pid)
        addresses, expected = set(), set()
        for number in range(80):
            # Not every one is looked at, or an address would show its two or three functions in turn.
            for _ in range(number * 7 % 5):
                program.line()
                program.send()
            output = program.line().strip()
            frames = _walk(process, tid)
            named = resolver.resolve(frames)
            (position,) = [at for at, frame in enumerate(named) if frame is not None and frame.file.startswith("<made")]
            function, file, line = _rows(named)[position] or ("", "", 0)
            assert f"{function} {file} {line}" == output
            addresses.add(int(frames["code"][position]))
            expected.add(output)
            program.send()
        # Else the test would show nothing: an address must have meant several functions.
        assert len(addresses) < len(expected) / 2
        process.close()


def test_a_frame_whose_code_is_gone_is_not_reported(python: str) -> None:
    with Running(python, "churn.py") as program:
        tid = int(program.line())
        process, resolver = _attach(program.pid)
        for _ in range(20):
            output = program.line().strip()
            frames = _walk(process, tid)
            program.send()
            program.line()
            named = resolver.resolve(frames)
            made = [row for row in _rows(named) if row and row[1].startswith("<made")]
            # At best it is still what it was.
            assert [f"{function} {file} {line}" for function, file, line in made] in ([], [output])
            program.send()
        unresolved = resolver.counters["python_frames_unresolved"]
        assert unresolved
        assert resolver.counters["python_code_reused"] <= unresolved
        process.close()


def _walk(process: PythonProcess, tid: int) -> np.ndarray:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        frames = process.walk(tid)
        if frames is not None and len(frames):
            return frames
    raise AssertionError("the thread never held still")


# ---- line tables and garbage, without a process


def test_lines_of_the_oldest_table_step_back_and_far() -> None:
    # Objects/lnotab_notes.txt: pairs of unsigned address and signed line steps.
    ends, lines = _DECODERS["lnotab"](bytes([0, 127, 0, 73, 6, 256 - 100, 255, 0, 45, 1]), 10)
    assert list(zip(ends, lines, strict=True)) == [(6, 210), (261, 110), (306, 110), (1 << 31, 111)]


def test_lines_of_pairs_may_be_missing() -> None:
    # The example of Objects/lnotab_notes.txt, 3.10.
    table = bytes([6, 1, 44, 1, 4, 256 - 128, 50, 2, 0, 127, 0, 100, 8, 0])
    ends, lines = _DECODERS["pairs"](table, 10)
    assert list(zip(ends, lines, strict=True)) == [(6, 11), (50, 12), (54, 0), (104, 14), (112, 241)]


def test_lines_of_locations_of_each_kind() -> None:
    table = bytes(
        [
            0x80 | 0 << 3 | 1, 0x35,  # short: the same line, two units
            0x80 | 11 << 3 | 0, 4, 9,  # one line: next line
            0x80 | 13 << 3 | 7, 0b000101,  # no columns: -2
            0x80 | 14 << 3 | 2, 0x40 | 0b101010, 0b000001, 0, 0, 0,  # long: +53
            0x80 | 15 << 3 | 3,  # none
        ]
    )  # fmt: skip
    ends, lines = _DECODERS["locations"](table, 100)
    assert list(zip(ends, lines, strict=True)) == [(4, 100), (6, 101), (22, 99), (28, 152), (36, 0)]


@pytest.mark.parametrize("kind", ["lnotab", "pairs", "locations"])
def test_any_bytes_are_a_line_table_of_some_kind(kind: str) -> None:
    random = np.random.default_rng(7)
    for size in (0, 1, 2, 3, 255, 4096):
        ends, lines = _DECODERS[kind](random.integers(0, 256, size, np.uint8).tobytes(), 1)
        assert len(ends) == len(lines)
        assert ends == sorted(ends)


class _Here:
    """Objects of a CPython made up in this process's memory."""

    def __init__(self, version: tuple[int, int]) -> None:
        self.table = layouts.LAYOUTS[version]
        self.arena = np.zeros(1 << 16, np.uint8)
        self.base = self.arena.ctypes.data
        self.used = 0
        self.record = np.zeros((), PYTHON)
        for name in PYTHON.names or ():
            if hasattr(self.table, name) and name not in ("gil_holder", "gil_locked", "gc_collecting"):
                self.record[name] = getattr(self.table, name)
        self.record["major"], self.record["minor"] = version
        self.record["code_type"] = 0x1234_5678

    def place(self, data: bytes) -> int:
        at = self.used
        self.arena[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self.used = at + len(data) + -len(data) % 16
        return self.base + at

    def text(self, characters: bytes, *, kind: int = 1, ascii_only: bool = True, length: int | None = None) -> int:
        head = bytearray(self.table.unicode_ascii if ascii_only else self.table.unicode_compact)
        struct.pack_into(
            "<q", head, self.table.unicode_length, len(characters) // (kind or 1) if length is None else length
        )
        state = (kind | 8 | 16 * ascii_only) << self.table.unicode_kind_shift
        struct.pack_into("<I", head, self.table.unicode_state, state)
        return self.place(bytes(head) + characters)

    def data(self, content: bytes, length: int | None = None) -> int:
        return self.place(bytes(16) + struct.pack("<qq", len(content) if length is None else length, -1) + content)

    def frame(self, name: int, filename: int, linetable: int, instruction: int = 0) -> np.ndarray:
        code = bytearray(256)
        struct.pack_into("<QQ", code, layouts.OBJECT_TYPE - 8, 1, 0x1234_5678)
        struct.pack_into("<I", code, self.table.code_firstlineno, 5)
        for field, value in (("filename", filename), ("name", name), ("qualname", name), ("linetable", linetable)):
            struct.pack_into("<Q", code, getattr(self.table, f"code_{field}"), value)
        check = check_of(name, name, filename, linetable)
        return np.array([(self.place(bytes(code)), check, 0, instruction & 0xFFFFFFFF, 5)], FRAME)


@pytest.fixture
def here() -> Iterator[tuple[_Here, CodeResolver]]:
    made = _Here((3, 11))
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        yield made, CodeResolver(memory.fileno(), made.record)


def test_no_instruction_yet_is_the_first_line(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    frame = made.frame(made.text(b"f"), made.text(b"f.py"), made.data(bytes([0x80 | 11 << 3, 0, 0])), -1)
    assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 5)]
    frame["instruction"] = 0
    assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 6)]
    # Beyond the table: there is no line, and none is made up.
    frame["instruction"] = 2
    assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 0)]


@pytest.mark.parametrize("length", [-1, 1 << 25, (1 << 63) - 1])
def test_a_garbage_length_is_refused(here: tuple[_Here, CodeResolver], length: int) -> None:
    made, resolver = here
    good, table = made.text(b"f"), made.data(b"")
    for frame in (
        made.frame(made.text(b"f", length=length), good, table),
        made.frame(good, made.text(b"f", length=length), table),
    ):
        assert resolver.resolve(frame) == [None]
    # A table of lines that is too large costs the lines.
    without_lines = [PythonFrame("f", "f", 0)] if 0 < length < 1 << 32 else [None]
    assert resolver.resolve(made.frame(good, good, made.data(b"", length))) == without_lines
    assert resolver.counters["python_frames_unresolved"] == 2 + (without_lines == [None])
    assert resolver.counters["python_lines_unknown"] == (without_lines != [None])


def test_a_string_that_is_none_is_refused(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    good, table = made.text(b"f"), made.data(b"")
    for bad in (
        made.text(b"ff", kind=2),
        made.text(b"fff", kind=3, ascii_only=False),
        made.text(b"", kind=0, ascii_only=False),
        0,
        8,
        1 << 63,
    ):
        assert resolver.resolve(made.frame(bad, good, table)) == [None]


def test_a_very_long_name_is_cut(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    (frame,) = resolver.resolve(made.frame(made.text(b"n" * 5000), made.text(b"f"), made.data(b"")))
    assert frame is not None
    assert frame.function == "n" * 4096 + "…"


def test_cpython_s_own_frame_is_marked(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    name = made.text(b"__init__")
    frame = made.frame(name, name, made.data(b""))
    assert resolver.resolve(frame) == [PythonFrame("__init__", "__init__", 0)]
    assert resolver.resolve(frame)[0] is not HIDDEN
    made.arena[int(frame["code"][0]) - made.base + made.table.code_firstlineno] = 0
    frame["firstlineno"] = 0
    assert resolver.resolve(frame)[0] is HIDDEN


def test_other_code_at_the_address_is_counted(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    frame = made.frame(made.text(b"f"), made.text(b"f.py"), made.data(b""))
    assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 0)]
    other = frame.copy()
    other["check"] += 1
    assert resolver.resolve(other) == [None]
    other = frame.copy()
    other["firstlineno"] += 1
    assert resolver.resolve(other) == [None]
    assert resolver.counters == {"python_frames_unresolved": 2, "python_code_reused": 2, "python_lines_unknown": 0}


@pytest.mark.parametrize("count", [0, 0x7F12_3456_7890, 0x7_F123_4567])
def test_a_code_object_that_was_freed_is_not_reported(here: tuple[_Here, CodeResolver], count: int) -> None:
    """Its tables are freed before it: all else is still in place when another's lines lie there."""
    made, resolver = here
    frame = made.frame(made.text(b"f"), made.text(b"f.py"), made.data(bytes([0x80 | 11 << 3, 0, 0])))
    at = int(frame["code"][0]) - made.base
    made.arena[at : at + 8] = np.frombuffer(struct.pack("<Q", count), np.uint8)
    assert resolver.resolve(frame) == [None]
    # immortal, as constants of 3.12 and later are; and 3.14 has flags above
    for alive in (0xFFFF_FFFF, 0x0001_0000_C000_0000):
        made.arena[at : at + 8] = np.frombuffer(struct.pack("<Q", alive), np.uint8)
        assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 6)]


def test_equal_pointers_with_other_contents_are_another_code_object(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    name, file, table = made.text(b"f"), made.text(b"f.py"), made.data(bytes([0x80 | 11 << 3, 0, 0]))
    frame = made.frame(name, file, table)
    assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 6)]
    made.arena[file - made.base + made.table.unicode_ascii] = ord("g")
    assert resolver.resolve(frame) == [PythonFrame("f", "g.py", 6)]
    made.arena[table - made.base + made.table.bytes_data] = 0x80 | 12 << 3
    assert resolver.resolve(frame) == [PythonFrame("f", "g.py", 7)]


def sent(made: _Here, frame: np.ndarray, name: int, file: int, table: int, *, table_bytes: int = 64) -> np.ndarray:
    """What the kernel sends of a code object: its objects as they lie in memory."""
    head = np.zeros(1, CODE)
    for field in ("code", "check"):
        head[field] = frame[field]
    head["content"] = frame["content"] = 77
    for field, address in (("name", name), ("file", file)):
        at, size = address - made.base, head[field].shape[1]
        head[field][0] = made.arena[at : at + size]
        head[f"{field}_bytes"] = size
    head["table_bytes"] = table_bytes
    at = table - made.base
    return np.concatenate([head.view(np.uint8), made.arena[at : at + table_bytes]])


def test_what_the_kernel_sent_needs_no_memory(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    name, file, table = made.text(b"f"), made.text(b"f.py"), made.data(bytes([0x80 | 11 << 3, 0, 0]))
    frame = made.frame(name, file, table)
    record = sent(made, frame, name, file, table)
    made.arena[:] = 0  # all is gone
    assert resolver.resolve(frame) == [None]
    fresh = CodeResolver(-1, made.record)
    fresh.learn(record)
    assert fresh.resolve(frame) == [PythonFrame("f", "f.py", 6)]
    assert fresh.chain(frame).frames == (PythonFrame("f", "f.py", 6),)
    assert fresh.chain(frame) is fresh.chain(frame)
    frame["firstlineno"] |= FRAME_ENTRY
    assert fresh.chain(frame).entries == (True,)
    # Another code object of the same address: that one was not announced.
    for field in ("content", "check"):
        other = frame.copy()
        other[field] += 1
        assert fresh.resolve(other) == [None], field
        assert fresh.chain(other).frames == (None,), field
    assert fresh.counters["python_frames_unresolved"] == 4


def test_what_was_not_sent_whole_is_read_from_memory(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    file, table = made.text(b"f.py"), made.data(bytes([0x80 | 11 << 3, 0, 0]) * 200)
    for name, table_bytes in ((made.text(b"n" * 300), 900), (made.text(b"m"), 500)):
        frame = made.frame(name, file, table)
        resolver.learn(sent(made, frame, name, file, table, table_bytes=table_bytes))
        (found,) = resolver.resolve(frame)
        assert found is not None
        assert (len(found.function), found.line) == (300 if table_bytes == 900 else 1, 6)


def test_a_long_line_table_is_known_as_far_as_it_was_sent(here: tuple[_Here, CodeResolver]) -> None:
    """Each of its ranges is one code unit (2 bytes of instructions) and one line further, in 3 bytes."""
    made, resolver = here
    name, file = made.text(b"f"), made.text(b"f.py")
    table = made.data(bytes([0x80 | 11 << 3, 0, 0]) * 200)
    begun = (500 - made.table.bytes_data + 2) // 3
    frame = made.frame(name, file, table)
    resolver.learn(sent(made, frame, name, file, table, table_bytes=500))

    def frame_at(unit: int) -> np.ndarray:
        other = frame.copy()
        other["instruction"] = 2 * unit
        return other

    assert resolver.resolve(frame_at(190)) == [PythonFrame("f", "f.py", 5 + 191)]  # from memory
    made.arena[:] = 0
    for unit in (0, 7, begun - 2):
        assert resolver.resolve(frame_at(unit)) == [PythonFrame("f", "f.py", 5 + unit + 1)], unit
    assert resolver.counters["python_lines_unknown"] == 0
    # The last one may be cut: the byte that follows could have belonged to it.
    for unit in (begun - 1, begun, 190):
        assert resolver.resolve(frame_at(unit)) == [PythonFrame("f", "f.py", 0)], unit
        assert resolver.chain(frame_at(unit)).frames == (PythonFrame("f", "f.py", 0),)
    assert resolver.counters == {"python_frames_unresolved": 0, "python_code_reused": 0, "python_lines_unknown": 6}


def test_a_line_table_of_impossible_size_has_no_lines(here: tuple[_Here, CodeResolver]) -> None:
    made, resolver = here
    name, file, table = made.text(b"f"), made.text(b"f.py"), made.data(bytes([0x80 | 11 << 3, 0, 0]))
    frame = made.frame(name, file, table)
    record = sent(made, frame, name, file, table)
    at = CODE.itemsize + made.table.bytes_size
    record[at : at + 8] = 255  # -1
    made.arena[:] = 0
    resolver.learn(record)
    assert resolver.resolve(frame) == [PythonFrame("f", "f.py", 0)]
    assert resolver.counters["python_lines_unknown"] == 1
