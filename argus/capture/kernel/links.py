"""Links that hold uprobes: made by bpf(2), one for all points of a file or one for each; closed together."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from argus.system.aside import Aside
from argus.system.syscalls import SYS_BPF, SYS_PERF_EVENT_OPEN, system_call

Backend = Literal["multi", "perf"]
TRACE_UPROBE_MULTI = 48
_BPF_F_UPROBE_MULTI_RETURN = 1
_BPF_LINK_CREATE = 28
PERF_FLAG_FD_CLOEXEC = 8
_BPF_PERF_EVENT = 41
PATIENCE_S = 5.0
"""Longest wait for probes that the kernel puts on a file, or takes away: tens of ms where everybody answers."""

STEADY_S = 0.5
"""Files that are closed later than that after one another are not waited for."""
CLOSERS = 64
"""Threads that close links, in all: each set of users that share files has as many as another. Each user has one for
its own files, however many there are."""
Users = frozenset[int]
Links = tuple[list[int], list[int]]
"""Descriptors that hold probes at entries and at exits."""


class _LinkCreateUprobeMulti(ctypes.Structure):
    """``union bpf_attr``, the part for BPF_LINK_CREATE with uprobe_multi."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("link_flags", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("ref_ctr_offsets", ctypes.c_uint64),
        ("cookies", ctypes.c_uint64),
        ("cnt", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


def link(
    backend: Backend, program: int, path: str, points: list[tuple[int, int]], at_exit: bool, pid: int | None
) -> list[int]:
    """Descriptors that hold these probes.

    Raises:
        OSError: The kernel refuses. Nothing is left attached.
    """
    if backend == "multi":
        return [_link_multi(program, path, points, at_exit, pid)]
    links: list[int] = []
    try:
        for offset, cookie in points:
            links.append(_link_perf(program, path, offset, cookie, at_exit, pid))
    except OSError:
        close_links([(links, [])])
        raise
    return links


def _link_multi(program: int, path: str, points: list[tuple[int, int]], at_exit: bool, pid: int | None) -> int:
    offsets = (ctypes.c_uint64 * len(points))(*(offset for offset, _ in points))
    cookies = (ctypes.c_uint64 * len(points))(*(cookie for _, cookie in points))
    name = ctypes.create_string_buffer(os.fsencode(path))
    request = _LinkCreateUprobeMulti(
        prog_fd=program,
        attach_type=TRACE_UPROBE_MULTI,
        path=ctypes.addressof(name),
        offsets=ctypes.addressof(offsets),
        cookies=ctypes.addressof(cookies),
        cnt=len(points),
        flags=_BPF_F_UPROBE_MULTI_RETURN if at_exit else 0,
        pid=pid or 0,
    )
    return system_call(SYS_BPF, _BPF_LINK_CREATE, ctypes.byref(request), ctypes.sizeof(request))


def _link_perf(program: int, path: str, offset: int, cookie: int, at_exit: bool, pid: int | None) -> int:
    pmu = Path("/sys/bus/event_source/devices/uprobe")
    kind = int((pmu / "type").read_text())
    retprobe_bit = int((pmu / "format/retprobe").read_text().split(":")[1])
    name = ctypes.create_string_buffer(os.fsencode(path))
    # struct perf_event_attr: type, size, config, …, config1 (path) at 56, config2 (offset) at 64.
    attribute = bytearray(112)
    struct.pack_into("<IIQ", attribute, 0, kind, len(attribute), int(at_exit) << retprobe_bit)
    struct.pack_into("<QQ", attribute, 56, ctypes.addressof(name), offset)
    buffer = (ctypes.c_char * len(attribute)).from_buffer(attribute)
    event = system_call(
        SYS_PERF_EVENT_OPEN,
        ctypes.byref(buffer),
        ctypes.c_int(pid if pid is not None else -1),
        ctypes.c_int(-1 if pid is not None else 0),
        ctypes.c_int(-1),
        ctypes.c_ulong(PERF_FLAG_FD_CLOEXEC),
    )
    # union bpf_attr for BPF_LINK_CREATE: prog_fd, target_fd, attach_type, flags, perf_event.bpf_cookie.
    request = ctypes.create_string_buffer(struct.pack("<IIIIQ", program, event, _BPF_PERF_EVENT, 0, cookie), 48)
    try:
        return system_call(SYS_BPF, _BPF_LINK_CREATE, ctypes.byref(request), ctypes.sizeof(request))
    finally:
        os.close(event)  # the link holds it


class Closing:
    """Closes links in threads of its own. A process that ends does not wait for them. What does not close keeps no
    links of other users from it, and of the same file only those at exits.

    Args:
        files: Users who share a file, and its links, each.
        then: Called with its number, by any thread, once a file's are closed.

    Attributes:
        moved_ns: When the last file was closed so far, CLOCK_MONOTONIC; 0: none was.
    """

    def __init__(self, files: Sequence[tuple[Users, Links]], then: Callable[[int], None] = lambda _: None) -> None:
        self._then = then
        self.moved_ns = 0
        self._links = [links for _, links in files]
        self._left = set(range(len(files)))
        self._lock, self._over = threading.Lock(), threading.Event()
        self._failures: list[OSError] = []
        self._not_begun = deque[Callable[[], None]]()
        of_users: dict[Hashable, deque[int]] = {}
        several = len({users for users, _ in files}) > CLOSERS
        for number, (users, _) in enumerate(files):
            # Where they are many, those of several users wait for others of the same first one.
            key = min(users) if several and len(users) > 1 else users
            of_users.setdefault(key, deque()).append(number)
        if not files:
            self._over.set()
        most = max(CLOSERS // max(len(of_users), 1), 1)
        for numbers in of_users.values():
            at_once = max(most // len(numbers), 1)
            self._begin(partial(self._go_on, numbers, at_once), min(len(numbers), most))

    def _begin(self, work: Callable[[], None], most: int) -> None:
        """Begins so many threads, or as many as there may be: one of them closes all. Where there may be none, who asks
        whether all are closed begins one."""
        for begun in range(most):
            try:
                Aside(work, "argus-unlink")
            except RuntimeError:
                if not begun:
                    self._not_begun.append(work)
                return

    def _begin_again(self) -> None:
        for _ in range(len(self._not_begun)):
            with contextlib.suppress(IndexError):  # another thread has
                self._begin(self._not_begun.popleft(), 1)

    def _go_on(self, numbers: deque[int], at_once: int) -> None:
        while True:
            try:
                number = numbers.popleft()
            except IndexError:
                return
            failures: list[OSError] = []
            with contextlib.suppress(Exception):  # what fails for a file costs that file
                for links in self._links[number]:
                    failures += _close_at_once(links, at_once)
            with self._lock:
                self._failures += failures
                self._left.discard(number)
                self.moved_ns = time.monotonic_ns()
                over = not self._left
            with contextlib.suppress(Exception):
                self._then(number)
            if over:
                self._over.set()

    def closed(self, number: int, _: float = 0.0) -> bool:
        """Whether those of a file are closed."""
        self._begin_again()
        return number not in self._left

    def wait(self, seconds: float | None) -> bool:
        """Waits for so long at most; returns whether all are closed."""
        self._begin_again()
        return self._over.wait(seconds)

    def wait_on(self, seconds: float, numbers: Collection[int] | None = None) -> bool:
        """Waits for so long at most until the links of these files, or of all, are closed, but only as long as they are
        one after the other. Returns whether they are."""
        chosen = set(self._left if numbers is None else numbers)
        deadline, left = time.monotonic() + seconds, len(chosen) + 1
        while 0 < len(self._left & chosen) < left and (more_s := deadline - time.monotonic()) > 0:
            left = len(self._left & chosen)
            if self._over.wait(min(STEADY_S, more_s)):
                break
        return not self._left & chosen

    def result(self) -> None:
        """Waits until all are closed.

        Raises:
            OSError: One of them could not be closed. The others are.
        """
        while not self.wait(STEADY_S):
            pass
        if self._failures:
            raise self._failures[0]


def close_links(links: Sequence[Links]) -> None:
    """Closes links of one user, and waits until that is done.

    Raises:
        OSError: One of them could not be closed. The others are.
    """
    Closing([(Users(), both) for both in links]).result()


def _close_at_once(links: Sequence[int], at_once: int) -> list[OSError]:
    """Closes links of one file, in so many threads, or in as many as there may be. Each close waits for a grace period
    of the kernel; the waits of several threads overlap. Who has entries and exits closes entries first: a call entered
    without its exit probed would look as if it never returned."""
    shares = [links[share::at_once] for share in range(min(at_once, len(links)))]
    failures: list[OSError] = []
    closing: list[Aside[list[OSError]]] = []
    for share in shares[1:]:
        try:
            closing.append(Aside(partial(_close_all, share), "argus-unlink"))
        except RuntimeError:
            failures += _close_all(share)
    for share in shares[:1]:
        failures += _close_all(share)
    for each in closing:
        failures += each.result()
    return failures


def _close_all(links: Sequence[int]) -> list[OSError]:
    failures = []
    for link in links:
        try:
            os.close(link)
        except OSError as failure:
            failures.append(failure)
    return failures


class LateError(TimeoutError):
    """Probes have not come in time. ``wait(0)``: whether they have since, and are taken away, or will not come."""

    def __init__(self, making: Aside[list[int]]) -> None:
        super().__init__(errno.ETIMEDOUT, "the file, or a process that maps it, does not answer")
        self.wait = making.wait


def link_in_time(make: Callable[[], list[int]], seconds: float = PATIENCE_S) -> list[int]:
    """What ``link`` returns, if it does so in time. The kernel reads the page of each function, and takes a lock of
    each process that maps the file: either may be held by a file system that does not answer. Probes that come later
    are taken away.

    Raises:
        LateError: It does not return.
        OSError: As of ``link``.
    """
    lock, made, late = threading.Lock(), False, False

    def work() -> list[int]:
        nonlocal made
        links = make()
        with lock:
            made = not late
        if late:
            close_links([(links, [])])
        return links

    try:
        making = Aside(work, "argus-link")
    except RuntimeError as failure:
        raise OSError(errno.EAGAIN, "no thread can be started") from failure
    if making.wait(seconds):
        return making.result()
    with lock:
        late = not made
    if made:
        return making.result()
    raise LateError(making)
