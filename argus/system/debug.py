"""What does not belong on a terminal: warnings of libraries, tracebacks of defects, and, with ``--debug``, how long
things take. It goes to a file of the user's own, in a private folder.

Without ``--debug`` warnings are counted and dropped; a traceback is written all the same, and its path shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from argus.model.text import harmless
from argus.system import files, redact

KEPT = 20
"""Logs that are kept, newest first."""
MAX_BYTES = 16 << 20
"""Of one log: a library that warns in a loop must not fill the disk."""

counters: Counter[str] = Counter()
"""``warnings``: of libraries, and what they logged; ``thread_failures``; ``log_dropped``: lines a full log lacks."""

_log: TextIO | None = None
_path: Path | None = None
_bytes = 0


def folder() -> Path:
    """Where logs are: ``$XDG_STATE_HOME/argus``, for root ``/var/log/argus``, else ``~/.local/state/argus``."""
    if home := os.environ.get("XDG_STATE_HOME"):
        return Path(home) / "argus"
    if os.geteuid() == 0:
        return Path("/var/log/argus")
    return Path(os.path.expanduser("~/.local/state/argus"))


def wanted() -> bool:
    """Whether the environment asks for a log (``ARGUS_DEBUG``)."""
    return os.environ.get("ARGUS_DEBUG", "").lower() not in ("", "0", "no", "off", "false")


def _create(kind: str) -> tuple[TextIO, Path]:
    """A new log.

    Raises:
        OSError: It cannot be written, or others could put something else in its place.
    """
    where = folder()
    path = where / f"{kind}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with files.opened(where, create=True) as opened:
        handle = os.open(path.name, flags, 0o600, dir_fd=opened)
        files.keep_newest(opened, lambda name: name.endswith(".log"), KEPT)
    log = open(handle, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    return log, path


def _about() -> str:
    return f"argv {redact.quoted(sys.argv)}, Python {sys.version.split()[0]}, Linux {os.uname().release}"


def begin() -> Path | None:
    """Opens this process's log; returns its path, or None where none can be written."""
    global _log, _path
    if _log is None:
        try:
            _log, _path = _create("debug")
        except OSError:
            return None
        note(f"{_about()}, uid {os.geteuid()}")
    return _path


def path() -> Path | None:
    """This process's log; None: it has none."""
    return _path


def note(text: str) -> None:
    """Writes a line, if there is a log: the time (``CLOCK_MONOTONIC``, s), this process's CPU time so far (s), text.

    Further lines of the text are indented: whatever names of others hold, they begin no line of the log.
    """
    global _bytes
    if _log is None:
        return
    if _bytes > MAX_BYTES:
        counters["log_dropped"] += 1
        return
    line = f"{time.monotonic():.3f} {time.process_time():.3f} {_indented(text)}\n"
    _bytes += len(line)
    with contextlib.suppress(OSError, ValueError):
        _log.write(line)


def _indented(text: str) -> str:
    return harmless(text.rstrip()).replace("\n", "\n    ")


def crash(failure: BaseException) -> Path | None:
    """Writes the traceback of a defect, with or without ``--debug``; returns where, or None if it cannot be written."""
    text = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
    if _log is not None:
        note(text)
        return _path
    try:
        log, where = _create("error")
        with log:
            log.write(f"{_indented(_about())}\n    {_indented(text)}\n")
    except OSError:
        return None
    return where


def traceback_of(failure: BaseException) -> str:
    """``crash``, and a sentence for people that names the place."""
    where = crash(failure)
    return f"The traceback is in {where}" if where else f"Its traceback is lost: {folder()} cannot be written"


def capture() -> None:
    """From here on nothing that a library warns of, and no traceback of a thread, reaches the terminal."""
    import threading
    import warnings

    def warned(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        counters["warnings"] += 1
        note(f"warning {filename}:{lineno}: {category.__name__}: {message}")

    def failed(which: threading.ExceptHookArgs) -> None:
        counters["thread_failures"] += 1
        name = which.thread.name if which.thread is not None else "?"
        _note_traceback(f"thread {name} failed", which.exc_type, which.exc_value, which.exc_traceback)

    def ignored(which: Any) -> None:
        counters["thread_failures"] += 1
        what = which.err_msg or "exception ignored in"
        _note_traceback(f"{what} {which.object!r}", which.exc_type, which.exc_value, which.exc_traceback)

    warnings.showwarning = warned
    threading.excepthook = failed
    sys.unraisablehook = ignored


def _note_traceback(
    what: str, kind: type[BaseException], value: BaseException | None, trace: TracebackType | None
) -> None:
    if _log is not None:
        note(what + "\n" + "".join(traceback.format_exception(kind, value, trace)))


def capture_logging() -> None:
    """The same of what libraries log: to standard error, where nobody has set logging up. Takes 16 ms."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            counters["warnings"] += 1
            with contextlib.suppress(Exception):
                note(f"{record.levelname.lower()} of {record.name}: {record.getMessage()}")

    logging.lastResort = Handler(logging.WARNING)
