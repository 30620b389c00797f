"""The process that does one injection for ``argus.cupti.inject_apart``: run as a script, with a socket as its input.

It has none of the tracer's descriptors and few of its rights. The traced process may keep it waiting for ever, even if
it is killed: then that costs nothing but this process.

It writes a byte once it has begun, reads its request, a line of JSON (``load.Request``), and answers with another:
"held_s", or "refused" or "error". Whoever asked shuts its side of the socket down to have it give up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import socket
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # it is begun without any (-I -S)

from argus.cupti.interrupt import Code, Refused
from argus.cupti.load import Request, left_behind, load
from argus.system import privileges
from argus.system.aside import Aside

RIGHTS = ("SYS_PTRACE", "DAC_OVERRIDE", "SYS_NICE")
"""To trace processes of others, to open their memory for writing, and to let nobody else run while one is stopped."""


def _answer(request: Request, sock: socket.socket) -> dict[str, Any]:
    left = select.poll()
    left.register(sock, select.POLLIN | select.POLLRDHUP)
    try:
        # ptrace holds what a thread has stopped until that thread ends: it lets go before anything is waited for here.
        return {"held_s": Aside(lambda: load(request, lambda: not left.poll(0)), "argus-ptrace").result()}
    except Refused as reason:
        return {"refused": str(reason)}
    except OSError as reason:
        # One that was raised without a number would come out as no ProcessLookupError.
        number = reason.errno or (errno.ESRCH if isinstance(reason, ProcessLookupError) else 0)
        return {"error": [number, str(reason.strerror or reason)]}


def _receive(sock: socket.socket) -> Request:
    with sock.makefile("rb") as file:
        fields = json.loads(file.readline())
    return Request(**{**fields, "program": tuple(fields["program"]), "codes": [Code(*one) for one in fields["codes"]]})


def main() -> None:
    sock = socket.socket(fileno=0)
    with contextlib.suppress(OSError):
        privileges.keep(RIGHTS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # whoever asked has ended
        sock.sendall(b"!")
        answer = _answer(_receive(sock), sock)
        sock.sendall(json.dumps(answer).encode() + b"\n")
    # As long as one of these hangs, this process is there to be counted.
    for process in left_behind:
        process.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
