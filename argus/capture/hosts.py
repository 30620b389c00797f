"""What happens to processes on this host: forks and execs, from the kernel's proc connector (pyroute2)."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable
from typing import Any


class ForkWatcher:
    """Calls back for each new process, within about a millisecond of its fork, from a thread of its own.

    Args:
        on_fork: Takes (parent process, child process).

    ``state`` says whether it works, in words for people; where it does not, look at /proc now and then instead.
    """

    def __init__(self, on_fork: Callable[[int, int], None]) -> None:
        self._on_fork = on_fork
        self._stop = threading.Event()
        self._socket: Any = None
        self._thread: threading.Thread | None = None
        self.missed = 0
        """Times the kernel said that it dropped events (the socket's buffer was full)."""
        self.state = "on"
        try:
            from pyroute2.netlink.connector.cn_proc import ProcEventSocket

            self._socket = ProcEventSocket()
            self._socket.bind()
            self._socket.control(listen=True)
        except ImportError:
            self.state = "off: pyroute2 is not installed"
        except Exception as reason:
            # Containers without the host's network namespace, kernels without CONFIG_PROC_EVENTS.
            self.state = f"off: the proc connector refuses ({reason})"
        if self.state != "on":
            self._close_socket()
            return
        self._thread = threading.Thread(target=self._read, name="argus-forks", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._socket.fileno()], [], [], 0.2)[0]:
                continue
            try:
                for message in self._socket.get():
                    if message.get("event") == "PROC_EVENT_FORK" and message["child_pid"] == message["child_tgid"]:
                        self._on_fork(int(message["parent_tgid"]), int(message["child_tgid"]))
            except OSError:
                self.missed += 1
            except Exception as reason:
                self.state = f"failed: {type(reason).__name__}: {reason}"
                return

    def _close_socket(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Stops the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        self._close_socket()
