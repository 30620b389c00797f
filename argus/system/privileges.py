"""Which capabilities of root the verbs need, and what becomes of the others: a trace gives them up before it begins.

Given up is for good, in this process and in all that it starts (the engine of an embedded store, the compiler). It
happens before any other thread is there, since capabilities are a thread's own. Imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Collection

from argus.system.proc import field_of, read_file
from argus.system.syscalls import bpf

BITS = {
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "FOWNER": 3,
    "SYS_PTRACE": 19,
    "SYS_NICE": 23,
    "NET_ADMIN": 12,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "PERFMON": 38,
    "BPF": 39,
    "CHECKPOINT_RESTORE": 40,
}
"""Those that any verb has a use for (include/uapi/linux/capability.h)."""
NEEDED = {
    "BPF": "programs and maps in the kernel",
    "PERFMON": "probes, samples of stacks",
    "SYS_PTRACE": "mappings and memory of other users' processes",
    "DAC_READ_SEARCH": "their environment, and libraries in folders of theirs",
}
"""Without these nothing can be traced, and why. With them alone Argus needs no root, from Linux 6.6 on."""
USEFUL = {
    "CHECKPOINT_RESTORE": "libraries that were replaced while they ran, and GPU times",
    "NET_ADMIN": "delays of threads; forks as they happen, before Linux 6.6",
    "SYS_RESOURCE": "many processes: more descriptors than the limit",
    "SYS_ADMIN": "measured overhead, which is estimated otherwise; --inject",
}
"""What a trace lacks without these."""
_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_BPF_ENABLE_STATS = 32
_MULTI_LINKS = (6, 6)
"""First kernel on which probes do not need SYS_ADMIN (uprobe_multi links)."""

own_process = False
"""Whether this process runs one verb and ends: what it gives up, nobody misses afterwards."""
statistics_fd = -1
"""Keeps the kernel measuring the run time of BPF programs, opened while there was SYS_ADMIN; -1: it was not."""


def effective() -> set[str]:
    """Those of ``BITS`` that this thread has."""
    bits = int(field_of(read_file("/proc/thread-self/status"), b"CapEff"), 16)
    return {name for name, bit in BITS.items() if bits >> bit & 1}


def needed() -> dict[str, str]:
    """``NEEDED`` on this kernel."""
    return NEEDED if _has_multi_links() else {**NEEDED, "SYS_ADMIN": "probes, before Linux 6.6"}


def lacking() -> set[str]:
    """What this thread lacks of it."""
    return needed().keys() - effective()


def _has_multi_links() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= _MULTI_LINKS


def keep_for_trace(*, inject: bool) -> None:
    """Gives up what a trace does not need. What fails changes nothing: a trace works with more, too.

    Args:
        inject: Helpers are put into running processes: nothing is given up.
    """
    global statistics_fd
    if inject or not own_process:
        return
    kept = set(NEEDED) | set(USEFUL)
    if _has_multi_links():
        with contextlib.suppress(OSError):
            statistics_fd = bpf(_BPF_ENABLE_STATS, bytes(16))
        kept.discard("SYS_ADMIN")
    with contextlib.suppress(OSError):
        keep(kept)


def keep_for_files() -> None:
    """Gives up all but reading files of others: what reads a recording needs no more. What fails changes nothing."""
    if own_process:
        with contextlib.suppress(OSError):
            keep(("DAC_READ_SEARCH",))


def keep_for_rows() -> None:
    """Gives up all but reading and writing files of others: ``sudo argus report -o`` a page into a user's folder. For
    verbs that work with a store alone. What fails changes nothing."""
    if own_process:
        with contextlib.suppress(OSError):
            keep(("DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER"))


def of_verbs() -> dict[str, list[str]]:
    """What each verb needs, capabilities by their names with CAP_; those of ``USEFUL`` are not among them."""
    tracing = [f"CAP_{name}" for name in needed()]
    return {
        "trace, dump": tracing,
        "trace --inject": sorted({*tracing, "CAP_SYS_ADMIN"}),
        "run": tracing,
        "run --user": [*tracing, "CAP_SETUID", "CAP_SETGID"],
        "others": [],
    }


def keep(names: Collection[str]) -> None:
    """Gives up all capabilities of this thread but these, and of all that it starts.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    kept = sum(1 << BITS[name] for name in names)
    for bit in range(64):
        if libc.prctl(_PR_CAPBSET_READ, bit, 0, 0, 0) != 1:
            continue  # it has none such
        if not kept >> bit & 1:
            libc.prctl(_PR_CAPBSET_DROP, bit, 0, 0, 0)  # refused without SETPCAP: then no child has more than this one
    header = ctypes.create_string_buffer(struct.pack("=Ii", _VERSION, 0), 8)
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("=6I", data.raw))
    words = [word & (kept >> 32 * (index // 3)) & 0xFFFFFFFF for index, word in enumerate(words)]
    if libc.capset(header, struct.pack("=6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
