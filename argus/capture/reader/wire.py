"""Messages between who asks and the process that reads (``process.py``), and what a reader may use.

A message, both ways: ``HEADER``, JSON, bytes. Descriptors travel beside the header (SCM_RIGHTS). A request is an object
with "op" and "pid"; an answer has "error" (number, text) or what the operation says.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct("<4sIII")
"""Magic, bytes of JSON, bytes that follow it, descriptors."""
MAGIC = b"Arg1"
MAX_JSON, MAX_BYTES, MAX_FDS = 16 << 20, 16 << 20, 200
CPU_S = 20.0
"""CPU time of a request. PyTorch's largest library takes some seconds."""
MEMORY_BYTES = 3 << 30
"""Memory beyond that at the start: tables of symbols (512 MiB), and of one file while it is read (768 MiB), twice."""


class Closed(Exception):
    """The other end is gone."""


def receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
        Closed: The other end is gone.
    """
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise Closed
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(sock: socket.socket, what: dict[str, Any], data: bytes = b"", fds: Sequence[int] = ()) -> None:
    """Sends a message."""
    text = json.dumps(what, default=int).encode()  # numpy's integers
    head = HEADER.pack(MAGIC, len(text), len(data), len(fds))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([head, text], rights)
    sock.sendall((head + text)[sent:] + data)


def receive_begin(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """The begin of a message's header, one byte of it at least, and the descriptors that came with it.

    Args:
        sock: Where from.
        flags: As for recvmsg(2).

    Raises:
        Closed: The other end is gone.
    """
    room = socket.CMSG_SPACE(4 * MAX_FDS)
    head, rights, _, _ = sock.recvmsg(HEADER.size, room, flags)
    fds = array.array("i")
    for level, kind, body in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(body[: len(body) // 4 * 4])
    if not head:
        raise Closed
    return head, list(fds)


def receive_head(sock: socket.socket) -> tuple[bytes, list[int]]:
    """A message's header, and the descriptors that came with it."""
    head, fds = receive_begin(sock)
    return head + receive(sock, HEADER.size - len(head)), fds
