"""Putting the CUPTI helper into processes that were not armed (``--cupti inject``), one at a time, beside the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from argus.capture.process.targets import maps_cuda
from argus.cupti.inject import inject
from argus.live.gpu.process import GpuProcess
from argus.model.errors import ArgusError
from argus.system.aside import Aside

FINISH_S = 30.0
"""Longest wait for an injection that is under way: it gives up by itself before, unless the process's memory does not
answer. Then others have their turn."""
AGAIN_S = 1.0
"""How often a process that has not loaded CUDA is checked again."""
MOST_AT_ONCE = 64
"""Processes that wait for their turn, or for memory that does not answer; others begin to wait later."""


class Injector:
    """Injects in threads that nobody waits for at the end.

    Args:
        note: Called with a line for people.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._ended = False
        self._running: list[Aside[str]] = []

    def poll(self, process: GpuProcess, now: float) -> bool:
        """Begins to inject once the process has loaded CUDA. Whether the helper is in it now.

        Args:
            process: One without a program.
            now: ``time.monotonic()``.
        """
        if process.failure:
            return False
        pid = process.target.pid
        if process.injection is None:
            if now >= process.again_at:
                process.again_at = now + AGAIN_S
                self._running = [each for each in self._running if not each.wait(0)]
                if len(self._running) < MOST_AT_ONCE and maps_cuda(pid):
                    process.injection = Aside(lambda: self._inject(pid), "argus-inject")
                    self._running.append(process.injection)
            return False
        if not process.injection.wait(0):
            return False
        try:
            how = process.injection.result()
        except (ArgusError, OSError) as failure:
            process.failure = str(failure)
            self._note(f"GPU times: {process.failure}")
            return False
        self._note(f"process {pid}: {how}")
        return True

    def _inject(self, pid: int) -> str:
        while not (turn := self._turn).acquire(timeout=FINISH_S):
            with self._lock:
                if self._turn is turn:  # who has it hangs
                    self._turn = threading.Lock()
        try:
            with self._lock:
                if self._ended:
                    raise ArgusError(f"process {pid} is not injected any more: the trace ends")
                self._begun.add(pid)
            return inject(pid)
        finally:
            with self._lock:
                self._begun.discard(pid)
            turn.release()

    def end(self) -> None:
        """Begins no injection any more."""
        with self._lock:
            self._ended = True

    def finish(self, process: GpuProcess) -> None:
        """Waits for an injection that is under way: half a helper is worse."""
        with self._lock:
            is_begun = process.target.pid in self._begun
        if process.injection is not None and is_begun:
            process.injection.wait(FINISH_S)
