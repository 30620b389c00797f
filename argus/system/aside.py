"""Work that goes on beside the main thread, and whose result is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Aside(Generic[Result]):
    """Calls a function in a thread of its own. The process does not wait for it at its end.

    Args:
        work: What to call.
        name: Of the thread.
    """

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._call, name=name, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._value = self._work()
        except BaseException as failure:
            self._failure = failure

    def wait(self, seconds: float) -> bool:
        """Waits for so long at most; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Result:
        """Waits for the result.

        Raises:
            BaseException: Whatever the function raised.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._value
