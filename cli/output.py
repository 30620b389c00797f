"""What Argus prints: text, whatever names it holds.

Names of jobs, functions, kernels and files are chosen by whoever runs a process, and a terminal obeys what is in them.
All that a verb prints goes through ``SafeText``, so that no verb can forget it.
"""

from __future__ import annotations

import io
import os
import sys

from argus.model.text import harmless


class SafeText(io.TextIOWrapper):
    """A text stream that writes control characters as escapes. On a terminal colours pass."""

    def write(self, text: str, /) -> int:
        super().write(harmless(text, styled=self.colours))
        return len(text)

    @property
    def colours(self) -> bool:
        """Whether what is written may have colours."""
        try:
            return self.isatty() or bool(os.environ.get("FORCE_COLOR"))
        except ValueError:  # it is closed
            return False


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
