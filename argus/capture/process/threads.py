"""What the kernel accounts for each thread of a process: CPU time, waits for a CPU and for disks, context switches.

Source is the kernel's taskstats interface (Documentation/accounting/taskstats.rst), which needs privilege, or else
files of /proc/PID/task. pyroute2's client takes 130 µs a thread; here one message asks for many threads, and the
answers are viewed as an array: 10 µs a thread, where the two files take 30.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from functools import cache

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.targets import PROC, cpu_ns
from argus.model.records import NOT_MEASURED, THREAD_USAGE
from argus.system.proc import read_file

_NETLINK_GENERIC = 16
"""From include/uapi/linux/netlink.h; Python's socket module lacks it."""
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
# From include/uapi/linux/genetlink.h.
_GENL_ID_CTRL, _CTRL_CMD_GETFAMILY, _CTRL_ATTR_FAMILY_ID, _CTRL_ATTR_FAMILY_NAME = 16, 3, 1, 2
# From include/uapi/linux/taskstats.h.
_TASKSTATS_CMD_GET, _TASKSTATS_CMD_ATTR_PID, _TASKSTATS_TYPE_STATS, _TASKSTATS_TYPE_AGGR_PID = 1, 1, 3, 4
_HEADER = struct.Struct("<IHHII")
_GENL_BYTES = 4
_AT_ONCE = 64
"""Threads asked for with one message: all answers must fit into the socket's buffer."""

_REQUEST = struct.Struct("<IHHIIBBHHHI")
"""nlmsghdr (length, type, flags, sequence, port), genlmsghdr (command, version, reserved) and one attribute (length,
type, thread)."""

_STATS_FIELDS = {
    "version": ("<u2", 0),
    "cpu_delay": ("<u8", 24),
    "blkio_count": ("<u8", 32),
    "blkio_delay": ("<u8", 40),
    "swapin_count": ("<u8", 48),
    "cpu_run": ("<u8", 72),
    "pid": ("<u4", 128),
    "elapsed_us": ("<u8", 144),
    "voluntary": ("<u8", 272),
    "involuntary": ("<u8", 280),
    "freepages_count": ("<u8", 312),
    "thrashing_count": ("<u8", 328),
    "compact_count": ("<u8", 352),
    "wpcopy_count": ("<u8", 400),
    "irq_count": ("<u8", 416),
}
_STATS_BYTES = 424
_STATS_LEAST = 344
"""Of version 10 (Linux 5.15). What an older kernel does not report reads as 0."""
STATS = np.dtype(
    {
        "names": list(_STATS_FIELDS),
        "formats": [kind for kind, _ in _STATS_FIELDS.values()],
        "offsets": [at for _, at in _STATS_FIELDS.values()],
        "itemsize": _STATS_BYTES,
    }
)
"""The part of ``struct taskstats`` that is used: cpu_delay_total, blkio_delay_total and cpu_run_virtual_total in ns,
ac_pid, ac_etime in µs, nvcsw, nivcsw, and how often the other delays occurred. New versions add at the end; versions 15
and 16 did not in some kernels, so ``_Taskstats`` compares its own thread's numbers first."""
_DELAY_COUNTS = [name for name in _STATS_FIELDS if name.endswith("_count")]

_SYSCTL = PROC / "sys/kernel/task_delayacct"
_SWITCHES = re.compile(rb"ctxt_switches:\s*(\d+)\s*nonvoluntary_ctxt_switches:\s*(\d+)")
_SAME_BEGIN_NS = 100_000_000
"""A thread that began so much later than the one of its number before is another."""

_ROUNDING_NS = 1_000_000
"""The kernel reports a thread's CPU time, and its wait for a CPU, as of two moments that may lie so far apart."""

_TASK = np.dtype(
    [
        ("tid", "<u4"),
        ("cpu_ns", "<i8"),
        ("runqueue_ns", "<i8"),
        ("io_ns", "<i8"),
        ("switches_voluntary", "<i8"),
        ("switches_involuntary", "<i8"),
        ("began_ns", "<i8"),
    ]
)
"""A thread's accounts since it began; ``began_ns`` 0: unknown."""
_ACCOUNTS = ("cpu_ns", "runqueue_ns", "io_ns", "switches_voluntary", "switches_involuntary")


class ThreadWatch:
    """Names of the threads of one process, and what the kernel accounts for them.

    Args:
        pid: The process, in the PID namespace of Argus.

    Raises:
        OSError: It has ended, or may not be looked at.

    Attributes:
        tids: Threads that there were when ``usage`` was read last, or when it found that nothing had run since.
        state: "run-queue" and "I/O": "on", "on for …", or "off: why".
        counters: ``threads_ended``: threads that ended between two readings; what they spent after the last one is not
            known. ``threads_unread``: times a thread's accounts were asked for and not given, though it was there.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # Descriptors of a process that ended never show the next process of its number.
        self._tasks = os.open(PROC / str(pid) / "task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._last: NDArray[np.void] | None = None
        self._rows: NDArray[np.void] = np.zeros(0, THREAD_USAGE)
        self._seen = (-1, "")
        """The process's CPU time before the last reading, and whether delays were accounted then."""
        self._last_ns = self._asked_ns = 0
        self.tids: list[int] = []
        self.counters = {"threads_ended": 0, "threads_unread": 0, "thread_times_rejected": 0}
        self.state = {"run-queue": _runqueue_state(), "I/O": "off: not read yet"}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the process."""
        tasks = getattr(self, "_tasks", -1)
        if tasks >= 0:
            os.close(tasks)
        self._tasks = -1

    def _tids(self) -> list[int]:
        if self._tasks < 0:
            return []
        try:
            return sorted(int(name) for name in os.listdir(self._tasks))
        except OSError:
            return []

    def _file(self, tid: int, name: str) -> bytes | None:
        try:
            fd = os.open(f"{tid}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._tasks)
        except OSError:
            return None
        try:
            return os.read(fd, 1 << 14)
        except OSError:
            return None
        finally:
            os.close(fd)

    def names(self) -> dict[int, str]:
        """What each thread calls itself now, at most 15 bytes."""
        names = {tid: self._file(tid, "comm") for tid in self._tids()}
        return {tid: name.rstrip(b"\n").decode(errors="replace") for tid, name in names.items() if name is not None}

    def usage(self, now_ns: int) -> NDArray[np.void]:
        """What threads spent since the previous call.

        Args:
            now_ns: CLOCK_MONOTONIC.

        Returns:
            ``records.THREAD_USAGE``, a row for each thread that is there. The first call gives none. The row of a
            thread that began since the previous call begins with the thread.
        """
        asked_ns = time.monotonic_ns()
        seen = cpu_ns(self._pid), _delays_state()
        ran = seen != self._seen or seen[0] < 0
        self._seen = seen
        if not ran and self._last is not None and len(self._rows) == len(self._last):
            return self._nothing(now_ns, asked_ns)
        tasks = self._read(now_ns)
        spent_ns = time.monotonic_ns() - self._asked_ns
        last, since_ns = self._last, self._last_ns
        self._last, self._last_ns, self._asked_ns = tasks, now_ns, asked_ns
        if last is None:
            return np.zeros(0, THREAD_USAGE)
        if not np.array_equal(last["tid"], tasks["tid"]):
            self.counters["threads_ended"] += int((~np.isin(last["tid"], tasks["tid"])).sum())
        rows = np.zeros(len(tasks), THREAD_USAGE)
        rows["pid"], rows["tid"] = self._pid, tasks["tid"]
        rows["begin_ns"], rows["end_ns"] = since_ns, now_ns
        before = np.zeros(len(tasks), _TASK)
        if len(last):
            place = np.minimum(np.searchsorted(last["tid"], tasks["tid"]), len(last) - 1)
            same = last["tid"][place] == tasks["tid"]
            # A number that was given to a new thread.
            for name in ("cpu_ns", "switches_voluntary", "switches_involuntary"):
                same &= tasks[name] >= last[name][place]
            dated = (tasks["began_ns"] > 0) & (last["began_ns"][place] > 0)
            same &= ~dated | (tasks["began_ns"] - last["began_ns"][place] < _SAME_BEGIN_NS)
            before[same] = last[place[same]]
        else:
            same = np.zeros(len(tasks), bool)
        rows["begin_ns"][~same] = np.clip(tasks["began_ns"][~same], since_ns, now_ns)
        for name in _ACCOUNTS:
            measured = (tasks[name] >= 0) & (before[name] >= 0)
            rows[name] = np.where(measured, tasks[name] - before[name], NOT_MEASURED)
        # Linux 6.18 was seen to count a wait from the one before it, or from boot. A thread that runs, or waits for a
        # CPU, waits for no disk; spent_ns goes from before the previous reading to after this one.
        elsewhere = np.maximum(rows["cpu_ns"], 0) + np.maximum(rows["runqueue_ns"], 0)
        most = np.where(same, spent_ns - elsewhere + _ROUNDING_NS, now_ns - rows["begin_ns"] + _SAME_BEGIN_NS)
        impossible = rows["io_ns"] > most
        rows["io_ns"][impossible] = NOT_MEASURED
        self.counters["thread_times_rejected"] += int(impossible.sum())
        # One that was there before, but not read: what it spent since then is not known.
        attributable = same | (tasks["began_ns"] == 0) | (tasks["began_ns"] > since_ns - _SAME_BEGIN_NS)
        chosen: NDArray[np.void] = rows[attributable]
        self._rows = chosen
        return chosen

    def _nothing(self, now_ns: int, asked_ns: int) -> NDArray[np.void]:
        """Of a process that has not run since the previous reading: the same threads, which have spent nothing."""
        rows: NDArray[np.void] = self._rows.copy()
        rows["begin_ns"], rows["end_ns"] = self._last_ns, now_ns
        for name in _ACCOUNTS:
            np.minimum(rows[name], 0, out=rows[name])  # what was not measured was not
        self._last_ns, self._asked_ns, self._rows = now_ns, asked_ns, rows
        return rows

    def _read(self, now_ns: int) -> NDArray[np.void]:
        """The accounts of all threads, by thread number."""
        tids = self.tids = self._tids()
        source = _taskstats()
        delays = self._seen[1]
        if isinstance(source, str):
            self.state["I/O"] = f"off: {source}" if delays == "on" else delays
            return self._from_files(tids)
        stats, unread = source.ask(tids)
        self.counters["threads_unread"] += unread
        asked_ns = time.monotonic_ns()
        tasks = np.zeros(len(stats), _TASK)
        tasks["tid"] = stats["pid"]
        tasks["cpu_ns"], tasks["runqueue_ns"] = stats["cpu_run"], stats["cpu_delay"]
        tasks["switches_voluntary"], tasks["switches_involuntary"] = stats["voluntary"], stats["involuntary"]
        tasks["began_ns"] = np.maximum(asked_ns - stats["elapsed_us"].astype(np.int64) * 1000, 1)
        tasks["io_ns"] = NOT_MEASURED
        if self.state["run-queue"] != "on":
            tasks["runqueue_ns"] = NOT_MEASURED
        if delays != "on":
            self.state["I/O"] = delays
            return tasks
        accounted = tasks["began_ns"] > _accounted_since(asked_ns)
        for name in _DELAY_COUNTS:
            accounted |= stats[name] > 0
        tasks["io_ns"][accounted] = stats["blkio_delay"][accounted]
        why = (
            "the others began before kernel.task_delayacct was set (with the boot option delayacct it is early enough)"
        )
        if accounted.all():
            self.state["I/O"] = "on"
        elif accounted.any():
            self.state["I/O"] = f"on for {int(accounted.sum())} of {len(accounted)} threads: {why}"
        else:
            self.state["I/O"] = f"off: {why.replace('the others', 'all threads')}"
        return tasks

    def _from_files(self, tids: list[int]) -> NDArray[np.void]:
        rows = []
        for tid in tids:
            schedstat, status = self._file(tid, "schedstat"), self._file(tid, "status")
            switches = _SWITCHES.search(status or b"")
            if status is None:
                continue
            times = (schedstat or b"").split()
            cpu, runqueue = (int(times[0]), int(times[1])) if len(times) > 1 else (NOT_MEASURED, NOT_MEASURED)
            counts = (int(switches[1]), int(switches[2])) if switches else (NOT_MEASURED, NOT_MEASURED)
            if self.state["run-queue"] != "on":
                runqueue = NOT_MEASURED
            rows.append((tid, cpu, runqueue, NOT_MEASURED, *counts, 0))
        return np.array(rows, _TASK)


@cache
def _runqueue_state() -> str:
    try:
        words = (PROC / "self/schedstat").read_text().split()
    except OSError:
        return "off: the kernel does not account for it (CONFIG_SCHED_INFO)"
    # Argus itself has run for a while.
    return "on" if any(word != "0" for word in words) else "off: the kernel does not account for it (schedstats)"


def _delays_state() -> str:
    try:
        value = read_file(str(_SYSCTL)).strip()
    except OSError:
        return "off: the kernel does not account for it (CONFIG_TASK_DELAY_ACCT)"
    return "on" if value != b"0" else "off: kernel.task_delayacct is 0 (sysctl -w kernel.task_delayacct=1)"


_accounted_ns: list[int] = []


def _accounted_since(now_ns: int) -> int:
    """A time since which delays are accounted: threads that began before may have none of them (kernel/delayacct.c
    decides at a thread's start)."""
    if not _accounted_ns:
        words: list[str] = []
        with contextlib.suppress(OSError):
            words = (PROC / "cmdline").read_text().split()
        _accounted_ns.append(0 if "delayacct" in words else now_ns)
    return _accounted_ns[0]


@cache
def _taskstats() -> _Taskstats | str:
    """The connection that all share, or why there is none."""
    try:
        return _Taskstats()
    except PermissionError:
        return "needs CAP_NET_ADMIN (run Argus with sudo)"
    except OSError as reason:
        return f"the kernel's taskstats interface refuses ({reason.strerror or reason})"


class _Taskstats:
    """The kernel's taskstats interface.

    Raises:
        OSError: It is not there, or it may not be asked, or says what cannot be.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_GENERIC)
        try:
            self._socket.bind((0, 0))
            # The kernel has answered when sending returns.
            self._socket.setblocking(False)
            self._family = self._find_family()
            self._compare()
        except OSError:
            self._socket.close()
            raise

    def _find_family(self) -> int:
        name = b"TASKSTATS\0"
        attribute = struct.pack("<HH", 4 + len(name), _CTRL_ATTR_FAMILY_NAME) + name + b"\0\0"
        message = struct.pack("<BBH", _CTRL_CMD_GETFAMILY, 1, 0) + attribute
        header = _HEADER.pack(_HEADER.size + len(message), _GENL_ID_CTRL, _NLM_F_REQUEST, 0, 0)
        self._socket.send(header + message)
        reply = self._socket.recv(1 << 14)
        _raise_error(reply)
        value = _attribute(reply, _HEADER.size + _GENL_BYTES, len(reply), _CTRL_ATTR_FAMILY_ID)
        if value is None:
            raise OSError("it has no number")
        return int(struct.unpack_from("<H", reply, value[0])[0])

    def _compare(self) -> None:
        """Whether the fields lie where they are looked for: this thread's are known from /proc."""
        tid = threading.get_native_id()
        path = PROC / f"self/task/{tid}"

        def account() -> tuple[int, int, int]:
            switches = _SWITCHES.search((path / "status").read_bytes())
            cpu = int((path / "schedstat").read_text().split()[0])
            return (cpu, int(switches[1]), int(switches[2])) if switches else (cpu, 0, 0)

        first = account()
        stats, _ = self.ask([tid], strict=True)
        second = account()
        reported = (stats["cpu_run"], stats["voluntary"], stats["involuntary"])
        if (
            len(stats) != 1
            or stats["pid"][0] != tid
            or any(not low <= int(value[0]) <= high for low, value, high in zip(first, reported, second, strict=True))
        ):
            version = int(stats["version"][0]) if len(stats) else 0
            raise OSError(f"its records, version {version}, have another layout")

    def ask(self, tids: list[int], *, strict: bool = False) -> tuple[NDArray[np.void], int]:
        """What the kernel accounts for threads: ``STATS``, in the order of ``tids``; those that ended are left out. And
        for how many there was no answer.

        Args:
            tids: Threads, in the PID namespace of Argus.
            strict: Raise the error that the kernel gave for a thread.
        """
        parts: list[bytes] = []
        unread = 0
        with self._lock:
            self._drain()
            for first in range(0, len(tids), _AT_ONCE):
                asked = tids[first : first + _AT_ONCE]
                head = (_REQUEST.size, self._family, _NLM_F_REQUEST, 0, 0, _TASKSTATS_CMD_GET, 1, 0)
                requests = (_REQUEST.pack(*head, 8, _TASKSTATS_CMD_ATTR_PID, tid) for tid in asked)
                missing = len(asked)
                try:
                    self._socket.send(b"".join(requests))
                    while missing:
                        reply = self._socket.recv(1 << 12)
                        if strict:
                            _raise_error(reply)
                        missing -= 1
                        stats = _stats(reply)
                        if stats is not None:
                            parts.append(stats)
                except OSError:
                    if strict:
                        raise
                unread += missing
        return np.frombuffer(b"".join(parts), STATS), unread

    def _drain(self) -> None:
        """Throws away what an interrupted call left."""
        with contextlib.suppress(OSError):
            while self._socket.recv(1 << 12):
                pass


def _raise_error(reply: bytes) -> None:
    """Raises what the kernel answered, if it is an error."""
    _, kind, _, _, _ = _HEADER.unpack_from(reply)
    if kind == _NLMSG_ERROR:
        (error,) = struct.unpack_from("<i", reply, _HEADER.size)
        if error:
            raise OSError(-error, os.strerror(-error))


def _stats(reply: bytes) -> bytes | None:
    """``STATS`` of an answer; None: it is an error (the thread ended)."""
    length, kind, _, _, _ = _HEADER.unpack_from(reply)
    if kind == _NLMSG_ERROR:
        return None
    outer = _attribute(reply, _HEADER.size + _GENL_BYTES, length, _TASKSTATS_TYPE_AGGR_PID)
    inner = None if outer is None else _attribute(reply, *outer, _TASKSTATS_TYPE_STATS)
    if inner is None or inner[1] - inner[0] < _STATS_LEAST:
        return None
    return reply[inner[0] : min(inner[1], inner[0] + _STATS_BYTES)].ljust(_STATS_BYTES, b"\0")


def _attribute(message: bytes, begin: int, end: int, wanted: int) -> tuple[int, int] | None:
    """Begin and end of the data of a netlink attribute among those in a part of a message."""
    while begin + 4 <= end:
        length, kind = struct.unpack_from("<HH", message, begin)
        if kind & 0x3FFF == wanted:
            return begin + 4, begin + length
        begin += max((length + 3) & ~3, 4)
    return None
