"""What Argus prints: text, whatever names it holds.

Names of jobs, functions, kernels and files are chosen by whoever runs a process, and a terminal obeys what is in them.
All that a verb prints goes through ``SafeText``, so that no verb can forget it. Only what a verb prints through
:func:`styled` may have colours.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO, cast

from argus.model.text import harmless, printable


class SafeText(io.TextIOWrapper):
    """A text stream that writes control characters as escapes."""

    def write(self, text: str, /) -> int:
        super().write(harmless(text))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Writes text whose colours are Argus's own. They pass on a terminal."""
        super().write(harmless(text, styled=self.colours))
        return len(text)

    @property
    def colours(self) -> bool:
        """Whether what is written may have colours."""
        try:
            return self.isatty() or bool(os.environ.get("FORCE_COLOR"))
        except ValueError:  # it is closed
            return False


class _Styled(io.TextIOBase):
    def __init__(self, stream: SafeText) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str, /) -> int:
        return self._stream.write_styled(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def styled(stream: TextIO) -> TextIO:
    """The same stream, on which colours pass: for text in which names of others are ``printable`` already."""
    return cast(TextIO, _Styled(stream)) if isinstance(stream, SafeText) else stream


def redraw(text: str = "") -> None:
    """Replaces the line that a terminal shows of progress (standard error)."""
    stream = styled(sys.stderr)
    stream.write(f"\r\x1b[2K{printable(text)}")
    stream.flush()


def print_text_only() -> None:
    """From here on standard output and standard error take text only. What is written to their ``buffer`` is bytes of
    a format, and stays as it is."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, SafeText):
            stream.flush()
            safe = SafeText(
                stream.buffer,
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, safe)
