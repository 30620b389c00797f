"""Why a thread was off the CPU, from the system call that it was in and how it went off."""

from __future__ import annotations

import platform
from functools import cache

import numpy as np
from numpy.typing import NDArray

from argus.model.records import NO_SYSCALL, WHAT_GIL_WAIT, WHAT_OFF, WHAT_PREEMPTED, WHAT_SYSCALL, WHAT_UNINTERRUPTIBLE

# Name, number on x86_64 (-1: it has none), number on aarch64, and the reason; "file": disk if it waits uninterruptibly,
# else none of its own, as "other". From the kernel's arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h.
SYSCALLS: tuple[tuple[str, int, int, str], ...] = (
    ("read", 0, 63, "read"),
    ("pread64", 17, 67, "read"),
    ("readv", 19, 65, "read"),
    ("preadv", 295, 69, "read"),
    ("preadv2", 327, 286, "read"),
    ("sendfile", 40, 71, "read"),
    ("splice", 275, 76, "read"),
    ("copy_file_range", 326, 285, "read"),
    ("getdents64", 217, 61, "read"),
    ("write", 1, 64, "write"),
    ("pwrite64", 18, 68, "write"),
    ("writev", 20, 66, "write"),
    ("pwritev", 296, 70, "write"),
    ("pwritev2", 328, 287, "write"),
    ("fsync", 74, 82, "disk"),
    ("fdatasync", 75, 83, "disk"),
    ("sync", 162, 81, "disk"),
    ("syncfs", 306, 267, "disk"),
    ("sync_file_range", 277, 84, "disk"),
    ("msync", 26, 227, "disk"),
    ("readahead", 187, 213, "disk"),
    ("futex", 202, 98, "futex"),
    ("futex_waitv", 449, 449, "futex"),
    ("futex_wait", 455, 455, "futex"),
    ("poll", 7, -1, "poll"),
    ("ppoll", 271, 73, "poll"),
    ("select", 23, -1, "poll"),
    ("pselect6", 270, 72, "poll"),
    ("epoll_wait", 232, -1, "poll"),
    ("epoll_pwait", 281, 22, "poll"),
    ("epoll_pwait2", 441, 441, "poll"),
    ("io_getevents", 208, 4, "poll"),
    ("io_pgetevents", 333, 292, "poll"),
    ("io_uring_enter", 426, 426, "poll"),
    ("nanosleep", 35, 101, "sleep"),
    ("clock_nanosleep", 230, 115, "sleep"),
    ("connect", 42, 203, "network"),
    ("accept", 43, 202, "network"),
    ("accept4", 288, 242, "network"),
    ("sendto", 44, 206, "network"),
    ("recvfrom", 45, 207, "network"),
    ("sendmsg", 46, 211, "network"),
    ("recvmsg", 47, 212, "network"),
    ("sendmmsg", 307, 269, "network"),
    ("recvmmsg", 299, 243, "network"),
    ("wait4", 61, 260, "wait_child"),
    ("waitid", 247, 95, "wait_child"),
    ("vfork", 58, -1, "wait_child"),
    ("ioctl", 16, 29, "driver"),
    ("pause", 34, -1, "sleep"),
    ("rt_sigtimedwait", 128, 137, "other"),
    ("rt_sigsuspend", 130, 133, "other"),
    ("semop", 65, 193, "other"),
    ("semtimedop", 220, 192, "other"),
    ("msgsnd", 69, 189, "other"),
    ("msgrcv", 70, 188, "other"),
    ("mq_timedsend", 242, 182, "other"),
    ("mq_timedreceive", 243, 183, "other"),
    ("flock", 73, 32, "other"),
    ("fcntl", 72, 25, "other"),
    ("open", 2, -1, "file"),
    ("openat", 257, 56, "file"),
    ("openat2", 437, 437, "file"),
    ("close", 3, 57, "file"),
    ("stat", 4, -1, "file"),
    ("fstat", 5, 80, "file"),
    ("lstat", 6, -1, "file"),
    ("newfstatat", 262, 79, "file"),
    ("statx", 332, 291, "file"),
    ("access", 21, -1, "file"),
    ("faccessat", 269, 48, "file"),
    ("readlink", 89, -1, "file"),
    ("readlinkat", 267, 78, "file"),
    ("rename", 82, -1, "file"),
    ("renameat", 264, 38, "file"),
    ("renameat2", 316, 276, "file"),
    ("unlink", 87, -1, "file"),
    ("unlinkat", 263, 35, "file"),
    ("mkdir", 83, -1, "file"),
    ("mkdirat", 258, 34, "file"),
    ("truncate", 76, 45, "file"),
    ("ftruncate", 77, 46, "file"),
    ("fallocate", 285, 47, "file"),
    ("fadvise64", 221, 223, "file"),
    ("mmap", 9, 222, "other"),
    ("mprotect", 10, 226, "other"),
    ("munmap", 11, 215, "other"),
    ("brk", 12, 214, "other"),
    ("mremap", 25, 216, "other"),
    ("madvise", 28, 233, "other"),
    ("mlock", 149, 228, "other"),
    ("mbind", 237, 235, "other"),
    ("move_pages", 279, 239, "other"),
    ("membarrier", 324, 283, "other"),
    ("process_vm_readv", 310, 270, "other"),
    ("process_vm_writev", 311, 271, "other"),
    ("clone", 56, 220, "other"),
    ("clone3", 435, 435, "other"),
    ("fork", 57, -1, "other"),
    ("execve", 59, 221, "file"),
    ("exit", 60, 93, "other"),
    ("exit_group", 231, 94, "other"),
    ("sched_yield", 24, 124, "other"),
    ("restart_syscall", 219, 128, "other"),
    ("bpf", 321, 280, "other"),
    ("perf_event_open", 298, 241, "other"),
    ("io_submit", 209, 2, "file"),
    ("shutdown", 48, 210, "other"),
)
"""The system calls in which threads wait, and those that are often seen to."""

ARCHITECTURES = {"x86_64": 1, "aarch64": 2}


@cache
def _calls(machine: str) -> dict[int, tuple[str, str]]:
    """Name and reason of each system call of a machine; none where the machine is not known."""
    column = ARCHITECTURES.get(machine)
    if column is None:
        return {}
    rows = ((row[0], row[1] if column == 1 else row[2], row[3]) for row in SYSCALLS)
    return {number: (name, reason) for name, number, reason in rows if number >= 0}


def reason(what: int, machine: str = "") -> str:
    """Why a thread was off the CPU.

    Args:
        what: ``STACK_COUNT.what``.
        machine: As ``platform.machine`` gives it; empty: this one.

    Returns:
        ``gil``, ``runqueue`` (it could have run), ``futex``, ``poll``, ``sleep``, ``read``, ``write``, ``disk``
        (uninterruptibly in a read, a write or another call on files; or in fsync), ``network``, ``wait_child``,
        ``driver`` (ioctl: the GPU's among them), ``page_fault``, ``other:`` and the system call's name or number, or
        ``other:none`` (it was in none: stopped by a signal or a debugger). Empty: it was on the CPU.
    """
    if not what & WHAT_OFF:
        return ""
    if what & WHAT_PREEMPTED:
        return "runqueue"
    if what & WHAT_GIL_WAIT:
        return "gil"
    number = what & WHAT_SYSCALL
    uninterruptible = bool(what & WHAT_UNINTERRUPTIBLE)
    if number == NO_SYSCALL:
        return "page_fault" if uninterruptible else "other:none"
    name, kind = _calls(machine or platform.machine()).get(number, (str(number), "other"))
    if uninterruptible and kind in ("read", "write", "file"):
        return "disk"
    return f"other:{name}" if kind in ("file", "other") else kind


def reasons(what: NDArray[np.uint32]) -> list[str]:
    """``reason`` of each.

    Args:
        what: ``STACK_COUNT.what``, shape (n,).
    """
    values = what.tolist()
    words = {value: reason(value) for value in set(values)}
    return [words[value] for value in values]
