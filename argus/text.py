"""Text of others: names of files, functions, threads and kernels may hold anything, and end up on a terminal."""

from __future__ import annotations


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


def printable(text: str) -> str:
    """Text that no reader trips over: control characters and what is no Unicode are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
