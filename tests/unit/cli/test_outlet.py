"""Output that nobody waits for: pipes that are not read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from argus.cli import outlet
from argus.cli.outlet import Outlet


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    source, sink = os.pipe()
    yield source, sink
    for fd in (source, sink):
        try:
            os.close(fd)
        except OSError:
            continue


def read(fd: int, wanted: int) -> bytes:
    data = b""
    while len(data) < wanted:
        data += os.read(fd, 1 << 16)
    return data


def test_texts_come_in_order(pipe: tuple[int, int]) -> None:
    source, sink = pipe
    out = Outlet(sink)
    for number in range(100):
        out.write(f"line {number}\n")
    assert out.drain(60)
    assert os.read(source, 1 << 16).decode().splitlines() == [f"line {number}" for number in range(100)]


def test_a_reader_that_does_not_read_holds_up_nobody(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "MOST", 300_000)
    source, sink = pipe
    out = Outlet(sink)
    line = "x" * 999 + "\n"
    for _ in range(1000):  # a pipe holds 64 KiB
        out.write(line)
    assert not out.drain(0)
    took = read(source, 300_000)
    assert out.drain(60)
    out.write("after\n")
    assert out.drain(60)
    os.close(sink)
    while more := os.read(source, 1 << 16):
        took += more
    lines = took.decode().splitlines()
    # The thread may find room in between, so that what was left out is told more than once.
    told = [text for text in lines if text.startswith("(")]
    written = [text for text in lines if text not in told]
    assert {len(text) for text in written[:-1]} == {999}
    assert told
    assert lines[-1] == "after"
    left_out = sum(int(text.split()[0].strip("(")) for text in told)
    assert left_out + len(written) - 1 == 1000


def test_of_frames_that_wait_the_newest_is_shown(pipe: tuple[int, int]) -> None:
    source, sink = pipe
    out = Outlet(sink)
    out.write("a" * 200_000)
    for number in range(50):
        out.write(f"<{number}>", frame=True)
    out.write("end")
    text = read(source, 200_007).decode()
    assert out.drain(60)
    assert text[200_000:] == "<49>end"


def test_a_terminal_that_is_gone_is_an_error(pipe: tuple[int, int]) -> None:
    source, sink = pipe
    os.close(source)
    out = Outlet(sink)
    out.write("lost")
    assert not out.drain(60)
    with pytest.raises(BrokenPipeError):
        out.write("more")
