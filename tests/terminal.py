"""A terminal for tests: a shell behind a pseudo-terminal, and an emulator that knows what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import pyte
import pytest

from tests.lacking import open_terminal

PROMPT = "READY>"
_SWITCH = re.compile(rb"\x1b\[\?1049([hl])")


class Terminal:
    """A shell with job control in a terminal of its own, as a person has it. A context manager.

    Args:
        columns, lines: Its size.
        environment: Added to that of the test.
    """

    def __init__(self, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None) -> None:
        self.main, self.alternate = pyte.Screen(columns, lines), pyte.Screen(columns, lines)
        self._streams = {screen: pyte.ByteStream(screen) for screen in (self.main, self.alternate)}
        self.in_alternate = False
        self._rest = b""
        self.raw = b""
        self._master, slave = open_terminal()
        self._resize_pty(columns, lines)
        shell = {"PS1": f"{PROMPT} ", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PROMPT_COMMAND": ""}
        gone = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
        inherited = {name: value for name, value in os.environ.items() if name not in gone}

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**inherited, **shell, **(environment or {})},
            preexec_fn=take_terminal,
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        self.wait(lambda: PROMPT in self.text, what="the shell")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Its jobs are in process groups of their own; the hang-up reaches them all.
        os.close(self._master)
        try:
            self.shell.wait(20)
        except subprocess.TimeoutExpired:
            self.shell.send_signal(signal.SIGKILL)
            self.shell.wait()

    @property
    def screen(self) -> pyte.Screen:
        """What is shown now."""
        return self.alternate if self.in_alternate else self.main

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    @property
    def line_by_line(self) -> bool:
        """Whether lines are edited and echoed by the terminal: not while a shell prompts, which does that itself."""
        modes = termios.tcgetattr(self._master)[3]
        return bool(modes & termios.ICANON) and bool(modes & termios.ECHO)

    def run(self, command: str) -> None:
        """Types a command. When it has ended, however that is, the terminal's modes are printed: a shell would put them
        right before its next prompt."""
        modes = "stty -a | grep -oE '.(icanon|echo)\\b' | paste -sd, | sed 's/^/modes/; s/$/ (all)/'"
        self.type(f"(trap : INT QUIT; {command}; {modes})\n")

    @property
    def modes_after(self) -> bool | None:
        """Whether the terminal edited and echoed lines when the command of ``run`` had ended; None: it runs."""
        if not (found := re.search(r"^modes(.*) \(all\)$", self.text, re.M)):
            return None
        return found[1] == " icanon, echo"

    @property
    def cursor_shown(self) -> bool:
        return not self.screen.cursor.hidden

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def resize(self, columns: int, lines: int) -> None:
        self._resize_pty(columns, lines)
        for screen in (self.main, self.alternate):
            screen.resize(lines, columns)

    def _resize_pty(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait(self, condition: Callable[[], bool], seconds: float = 90, what: str = "it") -> None:
        """Reads what comes until something holds, and no frame is half drawn; fails if it does not in time."""
        deadline = time.monotonic() + seconds
        while self._amid_frame or not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds} s for {what}; the terminal shows:\n{self.text}")
            if select.select([self._master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self._feed(os.read(self._master, 65536))

    @property
    def _amid_frame(self) -> bool:
        return self.raw.rfind(b"\x1b[?2026h") > self.raw.rfind(b"\x1b[?2026l")

    def wait_for(self, text: str, seconds: float = 90) -> None:
        self.wait(lambda: text in self.text, seconds, f"{text!r}")

    def _feed(self, data: bytes) -> None:
        self.raw += data
        data, self._rest = self._rest + data, b""
        if (cut := data.rfind(b"\x1b")) >= 0 and not _SWITCH.match(data, cut) and len(data) - cut < 8:
            data, self._rest = data[:cut], data[cut:]  # it may be half of a sequence
        begin = 0
        for found in _SWITCH.finditer(data):
            self._streams[self.screen].feed(data[begin : found.start()])
            begin = found.end()
            self.in_alternate = found[1] == b"h"
            if self.in_alternate:
                self.alternate.reset()
                self.alternate.cursor.hidden = self.main.cursor.hidden
        self._streams[self.screen].feed(data[begin:])
