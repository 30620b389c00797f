"""The file of ``--account``: wall time, CPU time and exit code of the command of ``argus run``, Argus left out."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.system import files

SCHEMA = "argus.run.account/1"


class Account:
    """The file: written before the command starts, and again once it has ended.

    Args:
        path: Where; it is replaced.
        tracing: ``on``, or ``off: `` and why.

    Raises:
        ArgusError: It cannot be written.
    """

    def __init__(self, path: Path, tracing: str) -> None:
        self._path = path
        self._document: dict[str, Any] = {"schema": SCHEMA, "tracing": tracing, "ended": False}
        try:
            self._write()
        except OSError as failure:
            raise ArgusError(f"{path} cannot be written: {failure.strerror}", "", EXIT_USAGE) from failure
        self._began_ns = time.monotonic_ns()
        self._before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def started(self, began_ns: int) -> None:
        """The command has begun, at ``began_ns`` of CLOCK_MONOTONIC; other children of this process were waited for."""
        self._began_ns = began_ns
        self._before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def ended(self, code: int) -> None:
        """It was waited for. ``code``: its exit code, below 0 the signal that ended it. What cannot be written is
        left: the command's own result comes first."""
        wall_ns, spent, before = (
            time.monotonic_ns() - self._began_ns, resource.getrusage(resource.RUSAGE_CHILDREN), self._before,
        )  # fmt: skip
        self._document |= {
            "ended": True, "exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None,
            "wall_ns": wall_ns, "user_ns": round((spent.ru_utime - before.ru_utime) * 1e9),
            "system_ns": round((spent.ru_stime - before.ru_stime) * 1e9),
            "voluntary_switches": spent.ru_nvcsw - before.ru_nvcsw,
            "involuntary_switches": spent.ru_nivcsw - before.ru_nivcsw,
        }  # fmt: skip
        try:
            self._write()
        except OSError:
            pass

    def _write(self) -> None:
        with files.replacing(self._path) as file:
            file.write(json.dumps(self._document).encode() + b"\n")
