"""Text of others: names of files, functions, threads and kernels may hold anything, and end up on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text that no reader trips over: control characters and what is no Unicode are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
