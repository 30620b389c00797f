"""Links that hold uprobes: made by bpf(2), one for all points of a file or one for each; closed together."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Sequence
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

CLOSERS = 64
"""Threads that close links."""


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


def close_links(links: Sequence[tuple[list[int], list[int]]]) -> None:
    """Closes links, given as pairs of those at entries and those at exits. A process that ends does not wait for it.

    Raises:
        OSError: One of them could not be closed. The others are.
    """
    # Each close waits for a grace period of the kernel; the waits of several threads overlap. Entries first: a call
    # entered without its exit probed would look as if it never returned.
    failures: list[OSError] = []
    for edge in (0, 1):
        edges = [link for both in links for link in both[edge]]
        shares = [edges[number::CLOSERS] for number in range(min(CLOSERS, len(edges)))]
        for closing in [Aside(partial(_close_all, share), "argus-unlink") for share in shares]:
            failures += closing.result()
    if failures:
        raise failures[0]


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
    making = Aside(make, "argus-link")
    if making.wait(seconds):
        return making.result()
    Aside(lambda: close_links([(making.result(), [])]), "argus-unlink")
    raise LateError(making)


def close_in_time(links: Sequence[tuple[list[int], list[int]]], seconds: float = PATIENCE_S) -> bool:
    """As ``close_links``, which goes on by itself if it takes longer. Whether it is done."""
    return Aside(lambda: close_links(links), "argus-unlink").wait(seconds)
