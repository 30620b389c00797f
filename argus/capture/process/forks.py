"""What happens to processes on this host: forks and execs, from the kernel's proc connector (pyroute2)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable

from argus.system.syscalls import libc

_TIME_ERROR = 5
"""What ``ntp_gettime`` returns (TIME_ERROR of sys/timex.h) while nothing disciplines the clock."""


class _NtpTime(ctypes.Structure):
    """``struct ntptimeval`` of glibc's sys/timex.h, whose fields are longs."""

    _fields_ = [
        (name, ctypes.c_long)
        for name in ("seconds", "fraction", "maxerror", "esterror", "tai", "unused1", "unused2", "unused3", "unused4")
    ]


def wall_error_ns() -> int:
    """By how much the wall clock of this host may be off, as its kernel says; ns, -1: not known."""
    try:
        ntp = _NtpTime()
        state = libc().ntp_gettime(ctypes.byref(ntp))
    except (OSError, AttributeError):
        return -1
    return -1 if state < 0 or state == _TIME_ERROR else int(ntp.maxerror) * 1000


_RECEIVE_BYTES = 1 << 20
"""Room for some 14,000 events: a burst of forks while this thread waits for the interpreter."""


_SO_ATTACH_FILTER = 26
_FORK, _FORK_AT, _EVENT = 1, 36, struct.Struct("=IIQIIII")
"""PROC_EVENT_FORK; where a message has its event, behind struct nlmsghdr and struct cn_msg; and the event: struct
proc_event of linux/cn_proc.h with what, cpu, time, parent's thread and process, child's thread and process."""
_ONLY_FORKS = b"".join(
    struct.pack("HBBI", *each)
    for each in (
        (0x20, 0, 0, _FORK_AT),  # BPF_LD | BPF_W | BPF_ABS: as a number in network order
        (0x15, 0, 1, socket.htonl(_FORK)),  # BPF_JMP | BPF_JEQ | BPF_K
        (0x06, 0, 0, 0xFFFFFFFF),  # BPF_RET | BPF_K: all of it
        (0x06, 0, 0, 0),
    )
)
"""A socket filter: who only wants forks is not woken for each exec, exit and change of a name."""


def forks_of(data: bytes) -> list[tuple[int, int]]:
    """Processes (parent, child) that were forked, as messages of the proc connector have it. New threads are none."""
    forks, at = [], 0
    while at + _FORK_AT + _EVENT.size <= len(data):
        what, _, _, _, parent, thread, child = _EVENT.unpack_from(data, at + _FORK_AT)
        if what == _FORK and thread == child:
            forks.append((parent, child))
        at += max(-(-int.from_bytes(data[at : at + 4], sys.byteorder) // 4) * 4, 16)
    return forks


class ForkWatcher:
    """Calls back for each new process, within about a millisecond of its fork, from a thread of its own.

    Args:
        on_fork: Takes (parent process, child process).

    ``state`` says whether it works, in words for people; where it does not, look at /proc now and then instead.
    """

    def __init__(self, on_fork: Callable[[int, int], None]) -> None:
        self._on_fork = on_fork
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.missed = 0
        """Times the kernel reported that it dropped events (the socket's buffer was full)."""
        self.state = "on"
        try:
            self._socket = self._listen()
        except ImportError:
            self.state = "off: pyroute2 is not installed"
        except OSError as reason:
            # Containers without the host's network namespace, kernels without CONFIG_PROC_EVENTS.
            self.state = f"off: the kernel's proc connector refuses ({reason.strerror})"
        else:
            self._thread = threading.Thread(target=self._read, name="argus-forks", daemon=True)
            self._thread.start()

    @staticmethod
    def _listen() -> socket.socket:
        # pyroute2's messages over a plain socket: its own socket reads ahead, so that one cannot wait for events with a
        # time-out and be sure that none is left behind.
        from pyroute2.netlink import NLMSG_DONE
        from pyroute2.netlink.connector import cn_proc

        message = cn_proc.proc_event_control()
        message["idx"], message["val"], message["len"] = cn_proc.CN_IDX_PROC, cn_proc.CN_VAL_PROC, 4
        message["action"] = cn_proc.PROC_CN_MCAST_LISTEN
        message["header"] = {"type": NLMSG_DONE, "flags": 0, "sequence_number": 0, "pid": os.getpid()}
        message.encode()
        events = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR)
        try:
            events.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            with contextlib.suppress(OSError):  # without it all events come, and the others are left out here
                program = ctypes.create_string_buffer(_ONLY_FORKS)
                wanted = struct.pack("HL", len(_ONLY_FORKS) // 8, ctypes.addressof(program))
                events.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, wanted)
            events.bind((0, cn_proc.CN_IDX_PROC))
            events.send(bytes(message.data))
            events.settimeout(0.2)
        except OSError:
            events.close()
            raise
        return events

    def _read(self) -> None:
        while not self._stop.is_set():
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as reason:
                if reason.errno != errno.ENOBUFS:
                    self.state = f"failed: {reason.strerror}"
                    return
                self.missed += 1
                continue
            try:
                for parent, child in forks_of(data):
                    self._on_fork(parent, child)
            except Exception as reason:
                self.state = f"failed: {type(reason).__name__}: {reason}"
                return

    def close(self) -> None:
        """Stops the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._socket.close()


_NETLINK_CONNECTOR = 11
"""Protocol number from include/uapi/linux/netlink.h; Python's socket module lacks it."""
