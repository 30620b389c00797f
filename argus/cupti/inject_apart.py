"""Injections by processes of their own (``inject_child``), which a traced process may keep waiting for ever: then they
are killed and left behind, and whoever asked goes on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from argus.cupti.interrupt import Refused
from argus.cupti.load import Request
from argus.model.losses import Owner
from argus.model.units import span_text
from argus.system.proc import field_of, read_file, stat_of

BEGIN_S, HUNG_S = 30.0, 4.0
"""A child that has used no CPU and was not switched for so long, and waits for none, hangs: while it begins, and
afterwards."""
LIMIT_S = 30.0
"""Longest that one child may take: it gives up by itself before, unless each page of memory takes seconds."""
FINISH_S = 30.0
"""Longest wait, once no more is begun, for all injections that are under way: they give up at once, or are through."""
END_S = 1.0
"""How long the end of a child is waited for."""
LOOK_S, HELD_S = 0.1, 1.0
"""How often a child is looked at. Who looks later than after the second was held up itself (a container that was
stopped), and its child most likely with it."""
MOST_HUNG, MOST_HUNG_OF_OWNER = 32, 4
"""Children that may be left hanging in all, and for one user's processes in a container. All processes of a user may
leave as many as stay free."""
SCRIPT = str(Path(__file__).with_name("inject_child.py"))


class Children:
    """Injects in children. Any thread may ask; each waits for its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[_Child] = []
        self._left: list[tuple[subprocess.Popen[bytes], Owner]] = []
        self._ended = False

    def has_room(self, owner: Owner) -> bool:
        """Whether another injection may begin for an owner: its processes have not left too many children hanging."""
        with self._lock:
            self._left = [one for one in self._left if one[0].poll() is None]
            left = [whose for _, whose in self._left]
        free = MOST_HUNG - len(left)
        of_user = sum(whose[0] == owner[0] for whose in left)
        return free > 0 and left.count(owner) < MOST_HUNG_OF_OWNER and of_user < free

    def load(self, request: Request, owner: Owner) -> float:
        """As ``argus.cupti.load.load``, for a process of an owner.

        Raises:
            Refused: It cannot or should not be done, or the process keeps its child waiting.
            OSError: The process ended, or may not be looked at.
        """
        child = _Child()
        with self._lock:
            self._running.append(child)
            if self._ended:
                child.give_up()
        try:
            return child.load(request)
        except TimeoutError as reason:
            raise Refused(f"it kept Argus waiting for {reason} (a process of user {owner[0]})") from reason
        finally:
            child.close()
            with self._lock:
                self._running.remove(child)
                if child.process.poll() is None:
                    self._left.append((child.process, owner))
            child.over.set()

    def end(self) -> None:
        """Has all give up that have not begun to load anything."""
        with self._lock:
            self._ended = True
            for child in self._running:
                child.give_up()

    def finish(self) -> None:
        """Waits for what is under way, for all together: half a helper is worse. Then kills what is left."""
        deadline = time.monotonic() + FINISH_S
        with self._lock:
            running = list(self._running)
        for child in running:
            child.over.wait(max(deadline - time.monotonic(), 0.0))
        for child in running:
            child.process.kill()


class _Child:
    """One injection. It has begun when this is made.

    Attributes:
        process: It.
        over: Set once nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self._answered = False
        self._sock, its_end = socket.socketpair()
        with its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", SCRIPT], stdin=its_end.fileno(), cwd="/", env={},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._sock.setblocking(False)
        self._deadline = time.monotonic() + LIMIT_S

    def give_up(self) -> None:
        """Asks it to give up. What it is amid, it ends."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def load(self, request: Request) -> float:
        """As ``Children.load``.

        Raises:
            TimeoutError: It hangs.
        """
        try:
            self._receive(1, BEGIN_S)
            message = json.dumps(request._asdict()).encode() + b"\n"
            while message:
                self._wait(select.POLLOUT, HUNG_S)
                message = message[self._sock.send(message) :]
            line = b""
            while not line.endswith(b"\n"):
                line += self._receive(4096, HUNG_S)
            answer = json.loads(line)
            self._answered = True
        except (BrokenPipeError, ConnectionError, EOFError) as reason:
            raise Refused("the process of Argus that was to do it has ended") from reason
        if "refused" in answer:
            raise Refused(answer["refused"])
        if "error" in answer:
            raise OSError(*answer["error"])
        return float(answer["held_s"])

    def _receive(self, most: int, hung_s: float) -> bytes:
        self._wait(select.POLLIN, hung_s)
        part = self._sock.recv(most)
        if not part:
            raise EOFError
        return part

    def _wait(self, event: int, hung_s: float) -> None:
        """Until the socket is ready."""
        ready = select.poll()
        ready.register(self._sock, event)
        seen: tuple[str, tuple[bytes, ...]] = "", ()
        looked = since = time.monotonic()
        while not ready.poll(LOOK_S * 1000):
            now = time.monotonic()
            if now - looked > HELD_S:
                since += now - looked
                self._deadline += now - looked
            looked = now
            progress = _progress(self.process.pid)
            if progress != seen or progress[0] == "R":
                seen, since = progress, now
            if now - since > hung_s:
                raise TimeoutError(span_text(hung_s))
            if now > self._deadline:
                raise TimeoutError(span_text(LIMIT_S))

    def close(self) -> None:
        """Lets go of it: one that has not answered is killed, and has to let go of the process that it has stopped."""
        self._sock.close()
        if not self._answered:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)


def _progress(pid: int) -> tuple[str, tuple[bytes, ...]]:
    """How a process is doing: "R" if a thread of it runs or waits for a CPU; its CPU time and the switches of its
    threads, which change if it does anything."""
    state, seen = "", []
    with contextlib.suppress(OSError):
        seen += stat_of(f"/proc/{pid}")[11:13]
        for tid in os.listdir(f"/proc/{pid}/task"):
            status = read_file(f"/proc/{pid}/task/{tid}/status")
            seen += [field_of(status, name) for name in (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")]
            if field_of(status, b"State")[:1] == b"R":
                state = "R"
    return state, tuple(seen)
