"""What the reader process is about to touch that may never answer: a file system, or a process's memory.

Written to a page that its parent sees, so that a reader that hangs need not be asked what it hangs on. Elsewhere
nothing is written. Imports nothing.
"""

from __future__ import annotations

SIZE = 64
"""Bytes of the page that are used."""
MEMORY = b"memory"

page: memoryview | None = None
"""Shared with the parent; None: this is no reader."""
dead: set[str] = set()
"""File systems (device as in /proc/PID/maps) that did not answer: nothing of them is opened."""


def clear() -> None:
    """Nothing is touched now."""
    if page is not None:
        page[0] = 0


def file(device: str) -> None:
    """A file of a device, ``major:minor``, is opened or read.

    Raises:
        OSError: Its file system did not answer before.
    """
    if device in dead:
        raise TimeoutError(f"the file system {device} does not answer")
    if page is not None:
        text = device.encode()[: SIZE - 1]
        page[1 : 1 + len(text)] = text
        page[0] = len(text)


def memory() -> None:
    """Memory of a process is read."""
    if page is not None:
        page[1:7] = MEMORY
        page[0] = 6
