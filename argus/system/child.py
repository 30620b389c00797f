"""Questions to a module of Argus's that runs in a process of its own, once: what it takes up is gone with the answer.

Such a module reads its request from standard input and writes the answer to standard output, both JSON (``serve``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argus.model.units import span_text
from argus.system import secrets

_PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """What the process said instead of an answer."""


def environment() -> dict[str, str]:
    """The environment of a Python of Argus's own that runs in ``/``: it finds Argus where this one was found.

    In the current folder somebody may have put a module that would be imported instead, or a file of settings that a
    library reads; in ``/`` nobody but root can.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**secrets.without(os.environ), "PYTHONPATH": os.pathsep.join(paths)}


def ask(module: str, request: Any, limit_s: float) -> Any:
    """The answer of a module to a request.

    Args:
        module: Its name; it calls ``serve`` when it is run.
        limit_s: How long it may take.

    Raises:
        ChildError: It failed, gave no answer, or took longer.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(os.getpid())], input=json.dumps(request).encode(), capture_output=True,
            cwd="/", env=environment(), timeout=limit_s, check=False,
            start_new_session=True,  # a Ctrl-C is for Argus, which ends the process if it is to end
        )  # fmt: skip
    except OSError as reason:
        raise ChildError(f"error: it cannot be started: {reason.strerror or reason}") from reason
    except subprocess.TimeoutExpired as reason:
        raise ChildError(f"error: it did not end within {span_text(limit_s)}") from reason
    if done.returncode == 0:
        with contextlib.suppress(ValueError):
            return json.loads(done.stdout)
    message = done.stderr.decode(errors="replace").strip()
    raise ChildError(message or f"error: it ended with {done.returncode}")


def serve(answer: Callable[[Any], Any]) -> int:
    """Answers one request. Ends with the thread that asks.

    Returns:
        The exit status: 1 if ``answer`` raised, with the reason on standard error.
    """
    asker = int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != asker:
        return 1
    request = json.load(sys.stdin)
    try:
        found = answer(request)
    except Exception as reason:
        print(f"{type(reason).__name__}: {reason}", file=sys.stderr)
        return 1
    json.dump(found, sys.stdout)
    return 0
