"""Putting the CUPTI helper into processes that were not armed (``--cupti inject``), one at a time, beside the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from argus.capture.process.targets import maps_cuda
from argus.cupti.inject import inject
from argus.live.gpu.process import GpuProcess
from argus.model.errors import ArgusError

FINISH_S = 30.0
"""Longest wait for an injection that is under way: it gives up by itself before, unless the process's memory does not
answer."""
AGAIN_S = 1.0
"""How often a process that has not loaded CUDA is checked again."""


class Injector:
    """Injects in a thread of its own.

    Args:
        note: Called with a line for people.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._pool: ThreadPoolExecutor | None = None

    def poll(self, process: GpuProcess, now: float) -> bool:
        """Begins to inject once the process has loaded CUDA. Whether the helper is in it now.

        Args:
            process: One without a program.
            now: ``time.monotonic()``.
        """
        if process.failure:
            return False
        if process.injection is None:
            if now >= process.again_at:
                process.again_at = now + AGAIN_S
                if maps_cuda(process.target.pid):
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(1, thread_name_prefix="argus-inject")
                    process.injection = self._pool.submit(inject, process.target.pid)
            return False
        if not process.injection.done():
            return False
        try:
            how = process.injection.result()
        except (ArgusError, OSError) as failure:
            process.failure = str(failure)
            self._note(f"GPU times: {process.failure}")
            return False
        self._note(f"process {process.target.pid}: {how}")
        return True

    @staticmethod
    def finish(process: GpuProcess) -> None:
        """Begins no injection any more, and waits for one that is under way: half a helper is worse."""
        if process.injection is not None:
            with contextlib.suppress(ArgusError, OSError):
                if not process.injection.cancel():
                    process.injection.result(FINISH_S)

    def close(self) -> None:
        """Ends its thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
