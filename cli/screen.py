"""A terminal that a picture fills and keys come from, left as it was however the program ends or is suspended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from .drawing import plain_ascii
from .outlet import Outlet

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""To the alternate screen, without a cursor, empty."""
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know these show a frame at once; others ignore them."""
_KEYS = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown",
    "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\t": "tab", "\x1b": "escape", "k": "up", "j": "down", " ": "pagedown", "h": "?",
}  # fmt: skip
SLICE_S = 0.1
"""Longest wait for a key at once: a signal that ends the trace is noticed so soon."""
STOPPED_S = 1.0
"""How long the last frame may take: then the terminal counts as stopped."""
FALLBACK = (80, 24)


def is_possible(console: Console) -> bool:
    """Whether a picture can be drawn: a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal and os.isatty(console.file.fileno())


def parse_keys(text: str) -> list[str]:
    """Keys in what a terminal has sent: ``up``, ``escape``, ``q``; unknown sequences are left out."""
    keys = []
    while text:
        length = next((size for size in (4, 3) if text[:size] in _KEYS), 1)
        if text[0] == "\x1b" and length == 1 and len(text) > 1 and text[1] in "[O":
            # An unknown sequence ends with a letter or a tilde.
            length = next((at + 1 for at in range(2, len(text)) if text[at].isalpha() or text[at] == "~"), len(text))
            text = text[length:]
            continue
        key = _KEYS.get(text[:length], text[0])
        if len(key) > 1 or key.isprintable():
            keys.append(key)
        text = text[length:]
    return keys


class Screen:
    """The terminal as a canvas. A context manager: within it the alternate screen is shown and keys are read singly.

    Args:
        console: Where it is drawn; ``is_possible`` was true of it.
        source: Descriptor that keys come from; no terminal: there are no keys.

    Ctrl-C stays a signal. On Ctrl-Z the terminal is given back before the process stops, and taken again when it goes
    on in the foreground; while it is in the background nothing is drawn.
    """

    def __init__(self, console: Console, source: int = 0) -> None:
        self._console = console
        self._out = console.file.fileno()
        self._outlet = Outlet(self._out)
        self._source = source if source >= 0 and os.isatty(source) else -1
        self._terminal = self._source
        self._modes: list[Any] | None = None
        self._shown = self._closed = False
        self._size = (0, 0)
        self._before: dict[signal.Signals, Any] = {}
        encoding = (getattr(console.file, "encoding", "") or "ascii").lower()
        self._ascii = not encoding.startswith("utf")

    def __enter__(self) -> Screen:
        for number, handler in (
            (signal.SIGTSTP, self._suspend),
            (signal.SIGQUIT, self._die),
            (signal.SIGWINCH, lambda *_: None),  # interrupts a wait
        ):
            self._before[number] = signal.signal(number, handler)
        try:
            self._show()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the terminal back, for good. Any thread may call it, as when the process is to end at once."""
        self._closed = True
        self._hide()
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines now."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._out)
            if columns > 0 and lines > 0:
                return columns, lines
        return FALLBACK

    @property
    def in_front(self) -> bool:
        """Whether the terminal is this process's: a background job must neither draw nor read."""
        try:
            return os.tcgetpgrp(self._out) == os.getpgrp()
        except OSError:  # it is not the controlling terminal: nobody else uses it
            return True

    def draw(self, lines: Sequence[Text]) -> None:
        """Shows a frame: as many lines as the screen has, each cut at its width."""
        if not self._shown:
            self._show()
        if not self._shown:
            return
        size = self.size
        with self._console.capture() as capture:
            for line in lines[: size[1]]:
                line = line.copy()
                if not line.plain.isprintable():
                    # In place, so that colours stay where they were: names are cut at the width anyway.
                    line.plain = "".join(c if c.isprintable() else "?" for c in line.plain)
                line.truncate(size[0], overflow="ellipsis")
                self._console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False, markup=False)
        text = capture.get().rstrip("\n").replace("\n", "\x1b[0m\x1b[K\r\n")
        if self._ascii:
            text = plain_ascii(text)
        # Lines that wrapped at the old width may lie about after a resize.
        clear = "\x1b[2J" if size != self._size else ""
        self._size = size
        if self._closed:
            return
        self._outlet.write(f"{_BEGIN}{clear}\x1b[H{text}\x1b[0m\x1b[K\x1b[J{_END}", frame=True)

    def keys(self, seconds: float, stopping: Sequence[object] = ()) -> list[str]:
        """Waits for keys, for so long at most or until there is something in ``stopping``; returns what came."""
        until = time.monotonic() + seconds
        while not stopping:
            left = min(until - time.monotonic(), SLICE_S)
            if self._source < 0 or not self._shown:
                if left <= 0:
                    return []
                time.sleep(left)
                continue
            columns = self._size
            ready, _, _ = select.select([self._source], [], [], max(left, 0.0))
            if ready and self.in_front:
                with contextlib.suppress(OSError):
                    if text := os.read(self._source, 256).decode(errors="ignore"):
                        return parse_keys(text)
                self._source = -1  # the terminal has hung up
            if left <= 0 or self.size != columns:
                return []
        return []

    # ---- the terminal's state

    def _show(self) -> None:
        if self._shown or self._closed or not self.in_front:
            return
        if self._source >= 0 and self._modes is None:
            with contextlib.suppress(termios.error):
                self._modes = termios.tcgetattr(self._terminal)
                tty.setcbreak(self._terminal, termios.TCSADRAIN)
        self._shown = True
        self._size = (0, 0)
        self._outlet.write(_ENTER)

    def _hide(self) -> None:
        if not self._shown:
            return
        self._shown = False
        written = False
        with contextlib.suppress(OSError):  # it may be gone
            self._outlet.write(_LEAVE)
            written = self._outlet.drain(STOPPED_S)
        if self._modes is not None:
            with contextlib.suppress(termios.error):
                # Of a terminal that is stopped nobody waits for what it has not shown.
                termios.tcsetattr(self._terminal, termios.TCSADRAIN if written else termios.TCSANOW, self._modes)
            self._modes = None

    def _suspend(self, number: int, _frame: FrameType | None) -> None:
        self._hide()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # It goes on here. In the background it shows nothing until it is in front again.
        signal.signal(number, self._suspend)
        self._show()

    def _die(self, number: int, _frame: FrameType | None) -> None:
        self._hide()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def stdin_fd() -> int:
    """Descriptor of standard input; -1: there is none."""
    try:
        return sys.stdin.fileno()
    except (AttributeError, ValueError, OSError):
        return -1
