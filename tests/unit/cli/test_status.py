"""The line that says what Argus does before there is anything to show. No thread, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from argus.cli import status
from argus.cli.status import Status


class Screen:
    """What was written to standard error, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
        self.text = ""
        self.now = 100.0
        monkeypatch.setattr(status.os, "write", self._write)
        monkeypatch.setattr(status.os, "get_terminal_size", lambda _: status.os.terminal_size((30, 20)))
        monkeypatch.setattr(status.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(status.sys, "stderr", self)
        monkeypatch.setattr(status.threading, "Thread", lambda **_: self)
        self._terminal = terminal

    def _write(self, fd: int, text: bytes) -> int:
        assert fd == 2
        self.text += text.decode()
        return len(text)

    def isatty(self) -> bool:
        return self._terminal

    def start(self) -> None:
        """Of the thread that draws: the test does."""


def test_on_a_terminal_it_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, terminal=True)
    line = Status("attaching to process 7")
    assert screen.text == "\r\x1b[Kattaching to process 7 …", "at once"
    line.stage("reading libtorch_cpu.so")
    screen.now += 1.2
    screen.text = ""
    line._draw()
    assert screen.text == "\r\x1b[Kreading libtorch_cpu.so … 1 s"[:33] + "", "no longer than the terminal is wide"
    screen.text = ""
    line.done()
    line.done()
    assert screen.text == "\r\x1b[K"


@pytest.mark.parametrize("terminal", [False, True])
def test_in_plain_lines_only_what_takes_long_is_named(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    screen = Screen(monkeypatch, terminal=terminal)
    line = Status("attaching to process 7", plain=True)
    for stage, took in (("loading BPF programs", 0.5), ("opening the store", 2.5)):
        line.stage(stage)
        for _ in range(3):
            screen.now += took / 3
            line._draw()
    screen.now += 1
    line._draw()
    line.done()
    assert screen.text == "argus: attaching to process 7 …\nargus: opening the store …\n"


def test_a_closed_output_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    screen: Any = Screen(monkeypatch, terminal=False)

    def closed(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(status.os, "write", closed)
    Status("attaching").done()
    monkeypatch.setattr(status.sys, "stderr", None)
    Status("attaching").done()
    assert screen.text == ""
