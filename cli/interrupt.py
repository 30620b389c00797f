"""Ctrl-C at any moment: what becomes of it before a verb runs, in a verb, and while a trace goes on.

Until a verb's modules are imported there is nothing to tidy up, so the process ends at once (``quit_at_once``). A verb
is interrupted by ``KeyboardInterrupt``, as any Python program (``interrupt_verbs``), and what it tidies up may take
``GRACE_S``: C code that returns to Python late, or threads that are waited for, would hold the terminal for seconds. A
trace has something to store first and answers by itself (``Stopping``).

This module imports nothing that takes time: the sooner its first handler stands, the better.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130
"""Exit code: 128 + SIGINT, as shells have it."""
GRACE_S = 0.4
"""What is tidied up after a Ctrl-C may take so long. The terminal is to be back within half a second."""

GIVEN_UP = "argus: stopped at once; rows that were not stored yet are lost"

came = False
"""Whether this process was interrupted: what fails from then on fails for that reason."""
announced = False
"""Whether a line was printed that announces it."""
restore: Callable[[], None] | None = None
"""Gives the terminal back as it was, where something has changed it: called before the process ends at once."""

_SHOW_CURSOR = b"\x1b[?25h"


def quit_at_once() -> None:
    """Lets SIGINT end this process without a word. Where it is ignored (``nohup``, a shell's ``&``) it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda _number, _frame: leave())


def ignore_at_exit() -> None:
    """Lets SIGINT do nothing once the interpreter is on its way out: all is done, and the exit code shows it."""
    import atexit

    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def leave_with(code: int) -> None:
    """Lets SIGINT end the process at once with this code: the verb is done, and only threads may be waited for."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda _number, _frame: leave(code))


def interrupt_verbs() -> None:
    """Lets SIGINT interrupt what runs, for ``GRACE_S`` at most, if this process began with ``quit_at_once``."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and handler is not signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def interrupt_plainly() -> None:
    """Lets SIGINT raise KeyboardInterrupt and nothing else, for a prompt, which goes on."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(code: int = INTERRUPTED) -> None:
    """Ends the process at once. The kernel takes probes away with it; the engine of a store ends by itself."""
    with contextlib.suppress(Exception):
        if restore is not None:
            restore()
    # A live display hides the cursor, and has no chance to show it again.
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(stream):
                os.write(stream, _SHOW_CURSOR)
                break
    os._exit(code)


def _interrupt(_number: int, _frame: object) -> None:
    global came
    if came:
        leave()
    came = True
    leave_after(GRACE_S)
    raise KeyboardInterrupt


def leave_after(seconds: float, code: int = INTERRUPTED) -> None:
    """Ends the process in so many seconds, whatever it is at then."""
    in_a_while(seconds, lambda: leave(code))


def in_a_while(seconds: float, action: Callable[[], None]) -> Any:
    """Calls something after so many seconds, in a thread of its own, unless ``cancel()`` of what it returns is called
    first."""
    import threading

    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


class Stopping(list[int]):
    """The signals that have come to end a trace, oldest first: empty as long as it is to go on.

    What they do depends on how far the trace is:

    * while it attaches, the first one ends it: ``KeyboardInterrupt``, and the process within ``GRACE_S``;
    * from ``attached`` on the first one is only noted, and ends a ``wait``;
    * the next one calls ``give_up``, in a thread of its own, which has ``GRACE_S`` until the process ends.

    Args:
        give_up: Saves what can be saved, and returns what to say.
        feedback: Called once, by ``storing``, or soon after the first signal in a thread of its own, if the trace does
            not come to ``storing`` at once.
    """

    def __init__(self, give_up: Callable[[], str] | None = None, feedback: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._give_up, self._feedback = give_up, feedback
        self._attached = self._ended = False
        self._announced: Any = None
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)

    def attached(self) -> None:
        """From here on a signal ends the trace in good order."""
        self._attached = True

    def storing(self) -> None:
        """The trace is at its end, and stores what is left: calls ``feedback``, if that was not done yet."""
        if self._announced is not None:
            self._announced.cancel()
        self._announce()

    def _announce(self) -> None:
        if self._feedback is not None:
            say, self._feedback = self._feedback, None
            say()

    def wait(self, seconds: float) -> None:
        """Waits for so long, or until a signal comes."""
        if seconds > 0:
            select.select([self._pipe[0]], [], [], seconds)

    def close(self) -> None:
        for end in self._pipe:
            os.close(end)

    def note(self, number: int, _frame: object) -> None:
        """The handler of the signals."""
        global came, announced
        self.append(number)
        with contextlib.suppress(OSError):
            os.write(self._pipe[1], b"!")
        if not self._attached:
            if len(self) > 1:
                leave()
            came = announced = True
            # Printed now: what is tidied up may take a while, and modules amid import may swallow the exception.
            with contextlib.suppress(OSError):
                os.write(2, b"\r\x1b[K" if os.isatty(2) else b"")
                os.write(2, b"argus: stopped before the trace began; nothing was stored\n")
            leave_after(GRACE_S)
            raise KeyboardInterrupt
        if len(self) == 1:
            self._announced = in_a_while(GRACE_S / 2, self._announce)
        elif len(self) == 2:
            came = True
            in_a_while(0.0, self._end)
            in_a_while(GRACE_S, self._end_with)  # should saving, or counting what is lost, take too long

    def _end(self) -> None:
        text = ""
        with contextlib.suppress(Exception):
            text = "" if self._give_up is None else self._give_up()
        self._end_with(text)

    def _end_with(self, text: str = "") -> None:
        if not self._ended:
            self._ended = True
            with contextlib.suppress(OSError):
                os.write(2, (text or GIVEN_UP).encode() + b"\n")
        leave()


@contextlib.contextmanager
def stopping(
    give_up: Callable[[], str] | None = None, feedback: Callable[[], None] | None = None
) -> Iterator[Stopping]:
    """``Stopping`` as the handler of SIGINT, SIGTERM and SIGHUP (unless ``nohup`` has it ignored), while it lasts."""
    signals = Stopping(give_up, feedback)
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, signals.note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.close()


def pause(stop: list[int], seconds: float) -> None:
    """Sleeps, if ``stop`` is a ``Stopping`` no longer than until a signal comes."""
    if isinstance(stop, Stopping):
        stop.wait(seconds)
    else:
        time.sleep(max(0.0, seconds))


def flush_and_leave(code: int) -> None:
    """Ends a process that was interrupted: without waiting for threads, but with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    leave(code)
