"""What a task waits for in the kernel: whether that shows a fault of the node, or any user can make it.

Any user can make tasks that cannot be interrupted, for as long as he likes: a parent in ``vfork`` waits for its child;
a mount of his own (FUSE, in a user namespace) does not answer; with memory that lies in such a mount he keeps the lock
of any file, while others wait for it. So what a user's task waits for shows a fault only where it is the answer of
something that no user can be or mount: a server of NFS and its like, a GPU, a network adapter. Waits for locks do not
(``nfs_start_io_write``), nor what lies behind a page fault, since that page may be in a mount of his own.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence

from argus.health.check import Absent, Blind, Look
from argus.health.checks._mounts import mounts
from argus.system.proc import field_of, numbers, read_file

Frame = tuple[str, str]
"""Function and module (empty: the kernel's own, or not known)."""


class Wait(enum.Enum):
    """What a wait shows."""

    MADE = "any user can make it"
    ANY = "a fault, or what a user made"
    BEHIND = "for a lock or page of a network file system"
    FAULT = "for a server or device that does not answer"


_MADE = re.compile(
    r"kernel_clone|_?do_fork|wait_for_vfork_done|handle_userfault|(do_|vfs_)?coredump\w*|exit_mm|do_exit|exit_aio"
    r"|exec_mmap|begin_new_exec|flush_old_exec|de_thread|_*refrigerator|do_freezer_trap|mem_cgroup_\w+|ptrace_\w+"
)
"""The innermost function: vfork; userfaultfd; threads that wait for a core dump, or for others when they end or execute
a program; a frozen or full control group (kernel/fork.c, fs/userfaultfd.c, fs/coredump.c, kernel/exit.c, fs/exec.c,
kernel/freezer.c, mm/memcontrol.c)."""
_FUSE = re.compile(r"_*(fuse|cuse)_\w+|request_wait_answer|wait_answer_interruptible")
_SERVER = re.compile(
    r"_*rpc_\w*wait\w*|_*(nfs\d*|pnfs)_\w*wait\w*|_*nfs_commit\w*|nfs_file_direct_\w+|wait_on_commit|netfs_\w*wait\w*"
    r"|ceph_(mdsc|osdc|monc)_\w+|ceph_\w*wait\w*|wait_for_response|compound_send_recv|(cifs|smb\d?)_\w*wait\w*"
    r"|p9_client_rpc|afs_\w*wait\w*|ptlrpc_\w+|cl_sync_io_wait|osc_\w*wait\w*|ldlm_completion_ast"
    r"|nvidia_\w+|os_acquire_\w+|_nv\d+rm|mlx5_cmd\w*"
)
"""The innermost function: net/sunrpc, fs/nfs, fs/netfs, fs/ceph, fs/smb, net/9p, fs/afs of Linux; Lustre; NVIDIA's
driver; drivers/net/ethernet/mellanox. ``rpc_wait_bit_killable`` is where tasks wait for a dead NFS server."""
_DRIVERS = frozenset(
    ["nvidia", "nvidia_modeset", "nvidia_drm", "nvidia_uvm", "amdgpu", "beegfs", "mmfslinux", "mmfs26", "wekafsio"]
)
_LOCKS = re.compile(r"\w*(user_pages|mmap|uvm_(api|down|vm_fault|ioctl|unlocked_ioctl|va_space|open|release))\w*")
"""In drivers: locks of the process's memory, which the process can keep."""
_NETWORK = re.compile(r"_*(nfs\d*|pnfs|rpc|netfs|ceph|cifs|smb\d?|afs|v9fs|p9)_\w+")
_LUSTRE = {"lustre", "ptlrpc", "osc", "mdc", "lov", "lmv", "obdclass"}
_PAGE = re.compile(r"folio_wait_bit\w*|_*folio_lock\w*|wait_on_page_bit\w*|_*lock_page\w*|bit_wait_io|io_schedule\w*")
"""Waits for a page of a file (mm/filemap.c)."""
_PAGE_FAULT = re.compile(r"\w*(page_fault|mm_fault|do_mem_abort|get_user_pages|pin_user_pages|fixup_user_fault)\w*")
_FRAME = re.compile(r"\[<[^>]*>\] ([\w.]+)\+\S+(?: \[(\w+)\])?")


def frames(task: str) -> list[Frame]:
    """Where a task sleeps, innermost function first, without the scheduler's and its locks'. Only root may know of
    others' tasks; empty: not known."""
    try:
        with open(f"{task}/wchan") as file:
            innermost = file.read().strip().partition(".")[0]
    except OSError:
        innermost = ""
    if _MADE.fullmatch(innermost):  # the stack of one that executes a program may have to be waited for
        return [(innermost, "")]
    try:
        with open(f"{task}/stack") as file:
            found = [(name.partition(".")[0], module) for name, module in _FRAME.findall(file.read())]
    except OSError:
        found = []
    return found or ([(innermost, "")] if innermost not in ("", "0") else [])


def what_for(where: Sequence[Frame], *, fuse_of_node: bool) -> Wait:
    """What a wait shows.

    Args:
        where: As ``frames`` has it.
        fuse_of_node: Whether FUSE may be the node's own (a mount by root, a task of the node's).
    """
    if not where:
        return Wait.ANY
    within = list(itertools.takewhile(lambda frame: not _PAGE_FAULT.fullmatch(frame[0]), where))
    (innermost, module), *_ = where
    if _MADE.fullmatch(innermost):
        return Wait.MADE
    if (_SERVER.fullmatch(innermost) or module in _DRIVERS) and not _LOCKS.fullmatch(innermost):
        return Wait.FAULT
    if any(_FUSE.fullmatch(name) for name, _ in within):
        return Wait.ANY if fuse_of_node else Wait.MADE
    if any(_NETWORK.fullmatch(name) or module in _LUSTRE for name, module in within):
        return Wait.FAULT if _PAGE.fullmatch(innermost) else Wait.BEHIND
    return Wait.ANY


def is_node_s(task: str) -> bool:
    """Whether a task is the node's own: root's in all respects (no program that takes root's rights for a user), and in
    no container. False, where that is not known."""
    try:
        status = read_file(f"{task}/status")
    except OSError:
        return False
    return numbers(field_of(status, b"Uid")) == (0, 0, 0, 0) and len(numbers(field_of(status, b"NSpid"))) == 1


def has_fuse(look: Look) -> bool:
    """Whether root has mounted a file system that a program or the host of a virtual machine answers for."""
    try:
        return any(re.match(r"(fuse(?!ctl)|virtiofs)", mount.type) for mount in mounts(look))
    except (Absent, Blind):
        return False
