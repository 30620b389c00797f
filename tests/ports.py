"""Ports of the loopback that nobody else takes."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_240
_CLAIMS: list[socket.socket] = []
"""Of the ports that this process has given out: abstract names, which end with it."""


def free_port() -> int:
    """A port that can be listened on, now and again later. It is outside the range that connections get theirs from,
    and no other test gets it while this process lives."""
    highest = int(_RANGE.read_text().split()[0])
    for port in random.sample(range(_LOWEST, highest), highest - _LOWEST):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0argus tests port {port}")
            with contextlib.closing(socket.create_server(("127.0.0.1", port))):
                pass
        except OSError:
            claim.close()
            continue
        _CLAIMS.append(claim)
        return port
    raise OSError(f"no port of the loopback is free from {_LOWEST} to {highest - 1}")
