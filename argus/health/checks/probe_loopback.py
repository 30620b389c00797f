"""Network stack: how fast TCP runs inside the node (measured)."""

from __future__ import annotations

import socket
import threading
import time

from argus.health.check import Look, Result
from argus.health.checks._idle import BUSY, wait_for_nobody
from argus.health.limit import Limit
from argus.model.units import bandwidth

LIMITS: dict[str, Limit] = {"busy": BUSY}
CHUNK, LASTS_S, TIMEOUT_S = 1 << 20, 0.5, 5.0


def check(look: Look) -> Result:
    """One connection over 127.0.0.1 for half a second. No threshold, as in probe_cpu."""
    wait_for_nobody(look)
    found = look.found()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        sender = threading.Thread(target=_send, args=(server.getsockname(),), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            room = bytearray(CHUNK)
            received, begun = 0, time.perf_counter()
            while count := connection.recv_into(room):
                received += count
            spent = time.perf_counter() - begun
    sender.join(TIMEOUT_S)
    found.figures["gb_per_s"] = received / spent / 1e9
    return found.result(f"{bandwidth(received / spent)} over loopback")


def _send(address: tuple[str, int]) -> None:
    data, until = bytes(CHUNK), time.perf_counter() + LASTS_S
    with socket.create_connection(address, TIMEOUT_S) as connection:
        while time.perf_counter() < until:
            connection.sendall(data)
