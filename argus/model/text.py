"""Text of others: names of files, functions, threads and kernels may hold anything, and end up on a terminal."""

from __future__ import annotations

import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""What moves a terminal's cursor, changes its state, or the order in which text is shown; all but tab and newline."""
_STYLES = re.compile(r"(\x1b\[(?:[0-9;]*m|\?25[lh])|\r?(?:\x1b\[1A)?\x1b\[2K)")
"""What Argus itself sends to a terminal in text: colours, a hidden cursor, a line of progress drawn anew."""


def counted(number: int, word: str) -> str:
    """A number with its noun: ``1 rank``, ``1,024 ranks``, ``2 processes``."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"


def shortened(text: str, width: int) -> str:
    """Text of at most ``width`` characters, its middle left out: C++ names differ at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[-tail:] if tail else ''}"


FRAME_WIDTH = 160
"""Characters of a frame of a stack that a line shows: names of C++ templates have thousands."""
NAME_WIDTH = 80
"""Characters of a name that a sentence or a column shows."""


def named(text: str) -> str:
    """A name of others within a sentence or a column: one line, of at most :data:`NAME_WIDTH` characters."""
    return shortened(printable(text), NAME_WIDTH)


def harmless(text: str, *, styled: bool = False) -> str:
    """Text of many lines as it may reach a terminal, a log or a file: control characters are written as escapes, of a
    kind that JSON has, too. ``styled``: the colours in it are Argus's own."""
    if not _UNSAFE.search(text):
        return text
    if not styled:
        return _UNSAFE.sub(_escaped, text)
    parts = _STYLES.split(text)
    parts[::2] = [_UNSAFE.sub(_escaped, part) for part in parts[::2]]
    return "".join(parts)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def printable(text: str) -> str:
    """Text that no reader trips over: control characters and what is no Unicode are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
