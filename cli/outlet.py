"""Output that nobody waits for: a terminal that is stopped (Ctrl-S), or a reader that does not read, must not hold up a
trace."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

MOST = 1 << 20
"""Bytes that wait; what comes then is left out, and counted."""
WAIT_S = 0.5
"""Longest wait for room at once: somebody else may have made the descriptor non-blocking."""


class Outlet:
    """Writes to a descriptor in a thread of its own, in order.

    Args:
        fd: Where to. It stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._bytes = self._left_out = 0
        self._busy = False
        self._failure: OSError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, text: str, *, frame: bool = False) -> None:
        """Takes text to write. A frame takes the place of one that waits.

        Raises:
            OSError: An earlier text could not be written: the terminal is gone.
        """
        data = text.encode(errors="replace")
        if not data:
            return
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if frame and self._waiting and self._waiting[-1][1]:
                self._bytes -= len(self._waiting.pop()[0])
            if self._bytes + len(data) > MOST:
                self._left_out += 1
                return
            if self._left_out and not frame:
                data = f"({self._left_out} texts left out: nobody read them)\n".encode() + data
                self._left_out = 0
            self._waiting.append((data, frame))
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="argus-outlet", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Waits until all is written, for so long at most. Whether it is."""
        until = time.monotonic() + seconds
        with self._changed:
            while (self._waiting or self._busy) and self._failure is None:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return self._failure is None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data, _ = self._waiting.popleft()
                self._bytes -= len(data)
                self._busy = True
            try:
                while data:
                    try:
                        data = data[os.write(self._fd, data) :]
                    except BlockingIOError:
                        select.select([], [self._fd], [], WAIT_S)
            except OSError as failure:
                self._failure = failure
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            if self._failure is not None:
                return
