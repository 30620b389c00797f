"""Putting the CUPTI helper into processes that were not armed (``--cupti inject``), beside the loop: for one user's
processes in a container one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from argus.capture.process.targets import maps_cuda
from argus.cupti.inject import inject
from argus.cupti.inject_apart import Children
from argus.live.gpu.process import GpuProcess
from argus.model.errors import ArgusError
from argus.model.losses import Owner
from argus.system.aside import Aside

AGAIN_S = 1.0
"""How often a process that has not loaded CUDA is checked again."""
MOST_AT_ONCE = 8
"""Injections under way, of all users. Those of one user in all containers are as many as stay free."""
HELD_UP = "not injected: processes of this user keep earlier injections waiting"
"""Why a process has to wait until one of these has ended (``GpuProcess.failure``)."""
NO_THREAD = "not injected yet: Argus can start no thread now"
"""Why it has to wait until that is possible."""


class Injector:
    """Injects in threads that nobody waits for. What touches a process is done by a child, which may be left behind.

    Args:
        note: Called with a line for people.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._children = Children()
        self._lock = threading.Lock()
        self._running: list[Owner] = []
        self._ended = False

    def poll(self, process: GpuProcess, now: float) -> bool:
        """Begins to inject once the process has loaded CUDA. Whether the helper is in it now.

        Args:
            process: One without a program.
            now: ``time.monotonic()``.
        """
        if process.failure not in ("", HELD_UP, NO_THREAD):
            return False
        if process.injection is None:
            if now >= process.again_at and self._has_turn(process.owner):
                process.again_at = now + AGAIN_S
                if maps_cuda(process.target.pid):
                    self._begin(process)
            return False
        if not process.injection.wait(0):
            return False
        try:
            how = process.injection.result()
        except (ArgusError, OSError) as failure:
            process.failure = str(failure)
            self._note(f"GPU times: {process.failure}")
            return False
        self._note(f"process {process.target.pid}: {how}")
        return True

    def _has_turn(self, owner: Owner) -> bool:
        with self._lock:
            running = list(self._running)
        of_user = sum(one[0] == owner[0] for one in running)
        return not self._ended and owner not in running and of_user < MOST_AT_ONCE - len(running)

    def _begin(self, process: GpuProcess) -> None:
        pid, owner = process.target.pid, process.owner
        if not self._children.has_room(owner):
            process.failure = HELD_UP
            return
        process.failure = ""
        with self._lock:
            self._running.append(owner)
        try:
            process.injection = Aside(lambda: self._inject(pid, owner), "argus-inject")
        except BaseException as failure:
            with self._lock:
                self._running.remove(owner)
            if not isinstance(failure, RuntimeError):
                raise
            process.failure = NO_THREAD  # it is tried again

    def _inject(self, pid: int, owner: Owner) -> str:
        try:
            return inject(pid, lambda request: self._children.load(request, owner))
        finally:
            with self._lock:
                self._running.remove(owner)

    def end(self) -> None:
        """Begins no injection any more."""
        self._ended = True
        self._children.end()

    def finish(self) -> None:
        """Waits for the injections that are under way, for ``inject_apart.FINISH_S`` at most in all."""
        self._children.finish()
