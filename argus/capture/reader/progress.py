"""What the reader process is about to touch that may never answer: a file system, or a process's memory.

Written to a page that its parent sees, so that a reader that hangs need not be asked what it hangs on. Elsewhere
nothing is written. Imports nothing.
"""

from __future__ import annotations

SIZE = 64
"""Bytes of the page that are used."""
MEMORY, PATHS, PROGRAM = b"memory", "paths", "program"

page: memoryview | None = None
"""Shared with the parent; None: this is no reader."""
dead: set[str] = set()
"""What did not answer, as ``of_owner`` and ``of_process`` name it: nothing of it is opened."""
process, owner = 0, (-1, "")
"""Whose files and memory are read for the request that is being answered."""
missed: set[str] = set()
"""What of ``dead`` would have been opened since this was emptied."""


def of_process(what: str, pid: int) -> str:
    """A file system (device as in /proc/PID/maps), ``PATHS`` or ``PROGRAM``, for one process."""
    return f"{what} of process {pid}"


def of_owner(device: str, owner: tuple[int, str]) -> str:
    """A file system, for all processes of one user in one container."""
    return f"{device} of user {owner[0]} in {owner[1]}" if owner[1] else f"{device} of user {owner[0]}"


class Touching:
    """While something is touched: what it is. After it, what was before."""

    __slots__ = ("_before", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        if page is not None:
            self._before = bytes(page[:SIZE])
            text = self._what.encode()[: SIZE - 1]
            page[1 : 1 + len(text)] = text
            page[0] = len(text)

    def __exit__(self, *_: object) -> None:
        if page is not None:
            page[:SIZE] = self._before


def clear() -> None:
    """Nothing is touched now."""
    if page is not None:
        page[0] = 0


def file(device: str) -> Touching:
    """For a ``with`` block in which a file of a device, ``major:minor``, is opened or read.

    Raises:
        OSError: Its file system did not answer before.
    """
    refuse(device)
    return Touching(device)


def refuse(device: str) -> None:
    """Raises OSError if the file system did not answer before."""
    for what in (of_process(device, process), of_owner(device, owner)) if dead else ():
        if what in dead:
            missed.add(what)
            raise TimeoutError(f"the file system {device} does not answer")


def look_up(what: str = PATHS) -> Touching:
    """For a ``with`` block in which a path is looked up that the process chose. Links and mounts on the way may lead to
    any file system, so that one which does not answer is not known by its device.

    Args:
        what: ``PATHS``, or ``PROGRAM`` for /proc/PID/exe.

    Raises:
        OSError: A path of this process did not answer before.
    """
    if dead and (own := of_process(what, process)) in dead:
        missed.add(own)
        raise TimeoutError(f"the {what} of process {process} do not answer")
    return Touching(what)


def memory() -> None:
    """Memory of the process is read from here on, until something else is named."""
    if page is not None:
        page[1:7] = MEMORY
        page[0] = 6
