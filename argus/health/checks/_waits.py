"""What a task waits for in the kernel: whether that shows a fault of the node, or any user can make it.

Any user can make tasks that cannot be interrupted, for as long as he likes: a parent in ``vfork`` waits for its child;
a mount of his own (FUSE, in a user namespace) does not answer; with memory that lies in such a mount he keeps the lock
of any file, while others wait for it. So what a user's task waits for shows a fault only where it is the answer of
something that no user can be or mount: a server of NFS and its like, a GPU, a network adapter. Waits for locks do not
(``nfs_start_io_write``), nor what lies behind a page fault, since that page may be in a mount of his own.

He can keep the kernel's own threads and root's processes waiting, too: the threads that write back what he wrote to his
mount, ``sync``, whoever reads his process's memory (``/proc/PID/cmdline``) or wants its lock. So a kernel thread shows
no more than a user's task. A task of root's also shows a fault where it waits for a disk on its own behalf, or sleeps
in the driver of a GPU by a function of the kernel's own.
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
_DISK = re.compile(
    r"_*wait_on_buffer|submit_bio_wait|_*(blk|bio|nvme|scsi|ata|dm|md|raid\d+)_\w+|rq_qos_wait|get_request|dio_await_\w+"
    r"|_*iomap_dio_rw|_*blkdev_direct_IO\w*|_*wait_(read_)?barrier|regular_request_wait|make_stripe_request"
    r"|jbd2_\w+|wait_transaction_\w+|add_transaction_credits|start_this_handle|do_get_write_access"
    r"|xlog_\w+|xfs_(log_force\w*|buf_iowait|buf_lock)|btrfs_commit_transaction|wait_current_trans"
    r"|read_extent_buffer_pages\w*|btrfs_(wait_ordered_range|sync_log)|zio_wait|txg_wait_\w+"
)
"""The innermost function: a disk, or the log of a file system on it (block, drivers/nvme, scsi, ata, md, fs/buffer.c,
fs/direct-io.c, fs/iomap, fs/jbd2, fs/xfs, fs/btrfs; OpenZFS)."""
_SLEEP = re.compile(
    r"_*down(_(common|interruptible|killable|timeout))?|msleep(_interruptible)?|usleep_range(_state)?|fsleep"
    r"|_*schedule|schedule_(hr)?timeout\w*|(do_|_*)wait_for_common\w*|wait_for_completion\w*"
)
"""Sleeps, semaphores and completions of the kernel's own: who calls them says what for. None is a lock of memory."""
_LOCK = re.compile(r"_*mutex_lock\w*|_*down_(read|write)\w*|rwsem_down_\w+")
_CONDITION = re.compile(r"_*cv_(timed)?wait\w*")
"""A sleep of OpenZFS (module spl)."""
_FOR_OTHERS = re.compile(
    r"ksys_sync|\w*sync_(filesystem|inodes|fs)_?\w*|iterate_supers\w*|wait_sb_inodes|\w*writeback_\w*inodes\w*|wb_\w+"
    r"|\w*remote\w*|process_vm_\w+|access_process_vm|\w*process_madvise|\w*uprobe\w*|ptrace_\w+"
    r"|shrink_\w+|\w*try_to_free_\w+|\w*reclaim\w*|\w*(migrate|compact|collapse)\w*|generic_shutdown_super"
)
"""A function on the way there: the task writes, reads, frees or moves what may be another's (``sync``, memory of other
processes, reclaim, compaction, ``umount``)."""
_PF_KTHREAD = 0x00200000
"""A kernel thread (include/linux/sched.h), in the flags of /proc/PID/stat: proc_pid_stat(5), field 9."""
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


def what_for(where: Sequence[Frame], *, node_s: bool, fuse_of_node: bool) -> Wait:
    """What a wait shows.

    Args:
        where: As ``frames`` has it.
        node_s: Whether it is a task of the node's: ``is_node_s``.
        fuse_of_node: Whether FUSE may be the node's own (root has mounted one).
    """
    if not where:
        return Wait.ANY
    if node_s:
        where = _without_sleeps(where)
    within = list(itertools.takewhile(lambda frame: not _PAGE_FAULT.fullmatch(frame[0]), where))
    (innermost, module), *_ = where
    if _MADE.fullmatch(innermost):
        return Wait.MADE
    if (_SERVER.fullmatch(innermost) or module in _DRIVERS) and not _LOCKS.fullmatch(innermost):
        return Wait.FAULT
    if any(_FUSE.fullmatch(name) for name, _ in within):
        return Wait.ANY if fuse_of_node or node_s else Wait.MADE
    if any(_NETWORK.fullmatch(name) or module in _LUSTRE for name, module in within):
        return Wait.FAULT if _PAGE.fullmatch(innermost) else Wait.BEHIND
    return Wait.FAULT if node_s and _is_for_disk(where) else Wait.ANY


def _without_sleeps(where: Sequence[Frame]) -> Sequence[Frame]:
    """From the function on that had a task sleep, if there is one. Behind a lock that is only a lock of NVIDIA's own
    driver: a process can keep others, such as those of its memory."""
    caller = list(
        itertools.dropwhile(
            lambda frame: _SLEEP.fullmatch(frame[0]) or (frame[1] == "spl" and _CONDITION.fullmatch(frame[0])), where
        )
    )
    locker = list(itertools.dropwhile(lambda frame: _LOCK.fullmatch(frame[0]), caller))
    if locker and locker[0][0].startswith("os_acquire_") and locker[0][1] in _DRIVERS:
        return locker
    return caller or where


def _is_for_disk(where: Sequence[Frame]) -> bool:
    """Whether a task waits for a disk, and on its own behalf; False where only the innermost function is known."""
    innermost = where[0][0]
    waits = _PAGE.fullmatch(innermost) or _DISK.fullmatch(innermost)
    return bool(waits) and len(where) > 1 and not any(_FOR_OTHERS.fullmatch(name) for name, _ in where)


def is_node_s(task: str) -> bool:
    """Whether a task is the node's own: root's in all respects (no program that takes root's rights for a user), in no
    container, and no kernel thread, since those work for everybody. False, where that is not known."""
    try:
        status = read_file(f"{task}/status")
        fields = read_file(f"{task}/stat").rpartition(b")")[2].split()
    except OSError:
        return False
    if len(fields) < 7 or int(fields[6]) & _PF_KTHREAD:
        return False
    return numbers(field_of(status, b"Uid")) == (0, 0, 0, 0) and len(numbers(field_of(status, b"NSpid"))) == 1


def has_fuse(look: Look) -> bool:
    """Whether root has mounted a file system that a program or the host of a virtual machine answers for."""
    try:
        return any(re.match(r"(fuse(?!ctl)|virtiofs)", mount.type) for mount in mounts(look))
    except (Absent, Blind):
        return False
