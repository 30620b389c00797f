"""What Argus does while there is nothing to show yet: a line that comes at once and goes with the first result."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from argus.model.text import printable
from argus.model.units import elapsed

REPEAT_AFTER_S = 2.0
"""In plain lines a stage is named once it takes longer than this."""
_REDRAWN_S = 0.1


class Status:
    """A line on standard error: on a terminal one that is drawn again and again, with the seconds that a stage takes,
    and wiped away at the end; elsewhere a line at the beginning, and one for each stage that takes long.

    Args:
        text: What begins.
        plain: Plain lines even on a terminal.
    """

    def __init__(self, text: str, *, plain: bool = False) -> None:
        self._terminal = not plain and sys.stderr is not None and sys.stderr.isatty()
        self._text, self._since = text, time.monotonic()
        self._printed = ""
        self._over = False
        self._draw()
        threading.Thread(target=self._go_on, name="argus-status", daemon=True).start()

    def stage(self, text: str) -> None:
        """Names what begins now."""
        self._text, self._since = text, time.monotonic()

    def done(self) -> None:
        """Wipes it away. Nothing is shown from here on. Takes no lock: a signal's handler may call it."""
        if not self._over:
            self._over = True
            self._wipe()

    def _wipe(self) -> None:
        if self._terminal:
            self._write("\r\x1b[K")

    def _go_on(self) -> None:
        while not self._over:
            time.sleep(_REDRAWN_S)
            if not self._over:
                self._draw()
                if self._over:
                    self._wipe()

    def _draw(self) -> None:
        took = time.monotonic() - self._since
        if self._terminal:
            width = 80
            with contextlib.suppress(OSError):
                width = os.get_terminal_size(2).columns or width  # 0: it does not know
            text = printable(f"{self._text} … {elapsed(took)}" if took >= 1 else f"{self._text} …")
            self._write(f"\r\x1b[K{text[: max(width - 1, 1)]}")
        elif not self._printed or (took >= REPEAT_AFTER_S and self._printed != self._text):
            self._printed = self._text
            self._write(f"argus: {printable(self._text)} …\n")

    def _write(self, text: str) -> None:
        # Not through sys.stderr: the thread must never hold its lock when the process ends.
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
