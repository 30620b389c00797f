"""No user makes a node critical by tasks that wait in the kernel, his own or those that he keeps waiting; a dead server
or driver does, whoever it is that waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.health.check import Look, Result
from argus.health.checks import stuck
from tests.lacking import needs_mounts

HERE = Path(__file__).parent
NOBODY = 65534
MANY = 25
LIMITS = {"seconds": 0.3, "critical": 5}
ENOUGH = 10
"""Some wait so that they can be interrupted: for a request that FUSE does not take."""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads where others' tasks wait")


def build(folder: Path) -> Path:
    built = folder / "stuck_tasks"
    subprocess.run(["cc", "-Wall", "-o", str(built), str(HERE / "stuck_tasks.c"), "-lpthread"], check=True)
    for folder in built.parents[:-2]:  # of /tmp
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    return built


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


@contextlib.contextmanager
def mounted(where: Path, user: int) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A file in a mount of a user's own, and who answers for it."""
    needs_mounts()
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no file systems in user space here (/dev/fuse)")
    shown = where.with_name("shown")
    shown.write_bytes(bytes(MANY * 4096))
    where.mkdir()
    server = (HERE / "fuse_folder.py").read_text().replace("user_id=0", f"user_id={user}")
    daemon = subprocess.Popen([sys.executable, "-c", server, str(where), str(shown)], stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"mounted\n"
        yield where / "shown", daemon
    finally:
        daemon.kill()
        daemon.communicate()
        subprocess.run(["umount", "-l", str(where)], check=False)


def beside(tmp_path: Path, program: Path, how: str, *, user: int, mount_of: int | None = None) -> Result:
    """What the check finds beside a user's threads."""
    with contextlib.ExitStack() as stack:
        mount = None if mount_of is None else stack.enter_context(mounted(tmp_path / "mnt", mount_of))
        for folder in (tmp_path, *list(tmp_path.parents)[:2]):
            folder.chmod(0o755)
        process = subprocess.Popen(
            [str(program), how, str(MANY), *([str(mount[0])] if mount else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, group=user, extra_groups=[],
            start_new_session=True,
        )  # fmt: skip
        stack.callback(process.communicate)
        stack.callback(os.killpg, process.pid, signal.SIGKILL)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        if mount:
            stack.callback(mount[1].kill)  # before: no file is closed without an answer
            mount[1].send_signal(signal.SIGSTOP)
        process.stdin.write(b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + 10
        while sleeping(process.pid) < ENOUGH and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sleeping(process.pid) >= ENOUGH
        return stuck.check(Look(LIMITS))


def sleeping(pid: int) -> int:
    return sum(") D " in (task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir())


@AS_ROOT
def test_parents_in_vfork_are_not_stuck(tmp_path: Path, program: Path) -> None:
    assert "stuck_tasks" not in beside(tmp_path, program, "vfork", user=NOBODY).text


@AS_ROOT
@pytest.mark.parametrize("how", ["read", "fault"])
def test_who_waits_for_a_mount_of_a_user_s_own_is_not_critical(tmp_path: Path, program: Path, how: str) -> None:
    """Waits for a page often do not show what mount it is of."""
    result = beside(tmp_path, program, how, user=NOBODY, mount_of=NOBODY)
    assert (result.status, "stuck_tasks" in result.text) == ("warning", True), result


@AS_ROOT
def test_who_waits_for_a_mount_of_root_s_is_stuck(tmp_path: Path, program: Path) -> None:
    result = beside(tmp_path, program, "read", user=NOBODY, mount_of=0)
    assert (result.status, "stuck_tasks" in result.text) == ("warning", True), result


def test_a_mount_of_root_s_makes_waits_for_fuse_a_fault_perhaps(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.waits("request_wait_answer [fuse], __fuse_simple_request [fuse], fuse_do_getattr [fuse]")
    mountinfo = tmp_path / "proc/1/mountinfo"
    mountinfo.parent.mkdir()
    for line, status in (
        ("39 22 0:49 / /home/u9 rw - fuse x rw,user_id=1000,group_id=0", "ok"),
        ("39 22 0:49 / /sys/fs/fuse/connections rw - fusectl x rw", "ok"),
        ("39 22 0:49 / /data rw - fuse.juicefs x rw,user_id=0,group_id=0", "warning"),
        ("39 22 0:49 / /data rw - virtiofs x rw", "warning"),
    ):
        mountinfo.write_text(f"{line}\n")
        assert node.status() == status, line


# ---- stacks of other kernels and drivers -----------------------------------------------------------------------------

RPC = "rpc_wait_bit_killable [sunrpc], __rpc_execute [sunrpc], rpc_execute [sunrpc], rpc_run_task [sunrpc]"
GETATTR = f"{RPC}, nfs4_call_sync_sequence [nfsv4], nfs4_proc_getattr [nfsv4], nfs_getattr [nfs], vfs_statx"
PAGE = "folio_wait_bit_common, filemap_update_page, filemap_get_pages, filemap_read"
FAULT = "folio_wait_bit_common, filemap_fault, __do_fault, __handle_mm_fault, handle_mm_fault, exc_page_fault"
COPY = "asm_exc_page_fault, rep_movs_alternative, copy_page_to_iter, filemap_read"
FAULTS = [
    GETATTR,
    GETATTR.replace(" [sunrpc]", "").replace(" [nfsv4]", "").replace(" [nfs]", ""),  # built in
    f"{RPC}, nfs_file_fsync [nfs], {FAULT}",
    f"{PAGE}, nfs_file_read [nfs], vfs_read",
    "wait_on_page_bit_common, generic_file_read_iter, nfs_file_read [nfs]",
    "nfs_wait_on_request [nfs], nfs_updatepage [nfs]",
    "nfs_wait_bit_killable.isra.0 [nfs], nfs4_wait_clnt_recover [nfsv4]",
    "ptlrpc_set_wait [ptlrpc], ll_statfs [lustre]",
    f"{PAGE}, ll_file_read_iter [lustre]",
    "ceph_mdsc_do_request [ceph], ceph_getattr [ceph]",
    "wait_for_response [cifs], cifs_stat [cifs]",
    "os_acquire_mutex [nvidia], _nv012345rm [nvidia], nvidia_ioctl [nvidia]",
    "_nv000042rm [nvidia], nvidia_close [nvidia], __fput",
    "mlx5_cmd_exec [mlx5_core], mlx5_core_destroy_qp [mlx5_core]",
]
"""Innermost function first, with its module."""
DISK = [
    f"{PAGE}, ext4_file_read_iter, vfs_read",
    FAULT,  # of a program's own code
    f"{FAULT}, pin_user_pages, os_lock_user_pages [nvidia], nvidia_ioctl [nvidia]",
    f"{FAULT}, {COPY}, nfs_file_read [nfs]",
    "folio_wait_bit_common, folio_wait_writeback, file_write_and_wait_range, ext4_sync_file, do_fsync",
    "__wait_on_buffer, ext4_read_bh, ext4_find_entry, lookup_slow",
    "jbd2_log_wait_commit [jbd2], ext4_sync_file [ext4], do_fsync",
    "xfs_buf_iowait [xfs], xfs_buf_read_map [xfs], xfs_imap_to_bp [xfs]",
    "blk_execute_rq, nvme_submit_user_cmd [nvme_core], nvme_ioctl [nvme_core]",
    "btrfs_wait_ordered_range [btrfs], btrfs_sync_file [btrfs], do_fsync",
    "btrfs_sync_log [btrfs], btrfs_sync_file [btrfs], do_fsync",
    "txg_wait_synced [zfs], zfs_fsync [zfs], do_fsync",
    "cv_wait_common [spl], __cv_wait_io [spl], txg_wait_synced_impl [zfs], txg_wait_synced [zfs], zfs_fsync [zfs]",
    "cv_wait_common [spl], zio_wait [zfs], dmu_read_uio_dnode [zfs], zfs_read [zfs]",
    "__iomap_dio_rw, iomap_dio_rw, xfs_file_dio_read [xfs], xfs_file_read_iter [xfs]",
    "iomap_dio_rw, ext4_file_read_iter, vfs_read",
    "__blkdev_direct_IO_simple, blkdev_read_iter, vfs_read",
    "blkdev_direct_IO, blkdev_read_iter, vfs_read",
    "wait_barrier [raid10], raid10_make_request [raid10], md_handle_request [md_mod], submit_bio_noacct",
    "_wait_barrier [raid1], raid1_make_request [raid1], md_handle_request [md_mod], submit_bio_noacct",
    "wait_read_barrier [raid1], raid1_read_request [raid1], raid1_make_request [raid1]",
    "make_stripe_request [raid456], raid5_make_request [raid456], md_handle_request [md_mod]",
    "xfs_buf_lock [xfs], xfs_buf_find_lock [xfs], xfs_buf_get_map [xfs], xfs_buf_read_map [xfs]",
    "wait_for_completion_io, submit_bio_wait, blkdev_issue_flush, ext4_sync_file",
]
"""On behalf of the task itself."""
DRIVER = [
    "down, os_acquire_semaphore [nvidia], _nv012345rm [nvidia], nvidia_ioctl [nvidia]",
    "__down_common, __down, down, os_acquire_mutex [nvidia], nvidia_ioctl [nvidia]",
    "rwsem_down_write_slowpath, down_write, os_acquire_rwlock_write [nvidia], nvidia_ioctl [nvidia]",
    "msleep, nv_wait_idle [nvidia], nvidia_close [nvidia], __fput",
    "usleep_range_state, nv_wait [nvidia], nvidia_ioctl [nvidia]",
    "schedule_timeout, wait_for_completion, nv_kthread_q_flush [nvidia_uvm], nvidia_open [nvidia]",
]
"""Kernels leave some of the functions out by which a driver sleeps, and show others."""
NOT_CRITICAL = [
    "",  # not known
    "nfs_start_io_write [nfs], nfs_file_write [nfs]",  # a lock: its holder may wait for memory of his own
    "lookup_slow, walk_component, path_lookupat",
    "ext4_buffered_write_iter, ext4_file_write_iter",
    "os_lock_user_pages [nvidia], _nv012345rm [nvidia]",
    "uvm_api_migrate [nvidia_uvm], uvm_ioctl [nvidia_uvm]",
    # Locks of a process's memory, and others that it can keep, whatever function the kernel has for them:
    "rwsem_down_read_slowpath, down_read, os_lock_user_pages [nvidia], _nv012345rm [nvidia]",
    "down_read, uvm_api_migrate [nvidia_uvm], uvm_ioctl [nvidia_uvm]",
    "mutex_lock, uvm_va_block_service_locked [nvidia_uvm], uvm_ioctl [nvidia_uvm]",
    "schedule, rwsem_down_read_slowpath, down_read, os_acquire_pages [nvidia_fs], vfs_read",
    "msleep, os_lock_user_pages [nvidia], nvidia_ioctl [nvidia]",
    "wait_for_completion, request_wait_answer [fuse], fuse_simple_request [fuse]",
    "down, msleep",
    "wait_for_completion, sub_alloc [other], other_ioctl [other]",
    "cv_wait_common [spl], __cv_wait [spl], zfs_rangelock_enter [zfs], zfs_write [zfs]",
    "cv_wait_common [other], zio_wait [zfs]",
    "txg_wait_synced [zfs], zfs_sync [zfs], sync_filesystem, iterate_supers, ksys_sync",
    # As Linux 6.18 has them beside mounts of a user's own (FUSE with a cache for writes) that do not answer:
    "inode_sleep_on_writeback, wb_writeback, wb_workfn, process_one_work, worker_thread, kthread, ret_from_fork",
    "wb_wait_for_completion, __writeback_inodes_sb_nr, sync_filesystem, __x64_sys_syncfs, do_syscall_64",
    "wb_wait_for_completion, sync_inodes_sb, iterate_supers, ksys_sync, __do_sys_sync",
    "folio_wait_bit_common, folio_wait_writeback, wait_sb_inodes, sync_inodes_sb, iterate_supers, ksys_sync",
    # Who reads the arguments of a process that keeps its memory's lock, or whose memory does not come:
    "__access_remote_vm, proc_pid_cmdline_read, vfs_read",
    FAULT.replace("exc_page_fault", "__get_user_pages, get_user_pages_remote, __access_remote_vm, mem_rw"),
    "m_start, seq_read_iter, vfs_read",
    # Memory that is freed or moved, whoever it belongs to:
    "folio_wait_bit_common, folio_wait_writeback, shrink_folio_list, do_try_to_free_pages, __alloc_pages_slowpath",
    "folio_wait_bit_common, migrate_pages_batch, compact_zone, try_to_compact_pages",
    "hpage_collapse_scan_pmd, khugepaged, kthread",
    "request_wait_answer [fuse], __fuse_simple_request [fuse], fuse_do_getattr [fuse]",  # others may be let in
]
MADE = [
    "kernel_clone, __do_sys_vfork",
    "wait_for_vfork_done, _do_fork",
    "request_wait_answer [fuse], __fuse_simple_request [fuse], fuse_do_getattr [fuse]",
    f"{PAGE}, fuse_file_read_iter [fuse], vfs_read",
    f"{PAGE}, ovl_read_iter [overlay], fuse_file_read_iter",
    "handle_userfault, do_anonymous_page, __handle_mm_fault",
    "coredump_task_exit, do_exit",
    "exit_mm, do_exit",
    "exit_aio, mmput, begin_new_exec, load_elf_binary",
    "__refrigerator, get_signal",
    "mem_cgroup_oom_synchronize, pagefault_out_of_memory",
]


ROOT_S = "0 0 0 0"
KTHREAD = 0x4208060
"""Flags of a worker of Linux 6.18, in /proc/PID/stat."""


class Node:
    """A node with tasks that wait."""

    def __init__(self, root: Path) -> None:
        self.root, self.tasks = root, 4711

    def waits(
        self, where: str, number: int = MANY, uids: str = "1000 1000 1000 1000", nested: str = "",
        *, stack: bool = True, name: bytes = b"python", flags: int = 0x400000,
    ) -> None:  # fmt: skip
        frames = [frame.partition(" ") for frame in where.split(", ") if frame]
        for _ in range(number):
            self.tasks += 1
            task = self.root / f"proc/{self.tasks}/task/{self.tasks}"
            task.mkdir(parents=True)
            (task / "stat").write_bytes(
                b"%d (%b) D 1 0 0 0 -1 %d " % (self.tasks, name, flags) + b"0 " * 12 + b"99 0\n"
            )
            (task / "status").write_bytes(
                b"Name:\t%b\nUid:\t%b\nNSpid:\t%d%b\nvoluntary_ctxt_switches:\t7\n"
                % (name, uids.replace(" ", "\t").encode(), self.tasks, nested.encode())
            )
            (task / "wchan").write_text(frames[0][0] if frames else "0")
            if stack:
                lines = [f"[<0>] {name}+0x1d3/0x400{' ' * bool(module)}{module}\n" for name, _, module in frames]
                (task / "stack").write_text("".join(lines))

    def waits_for_others(self, where: str) -> None:
        """Tasks that are root's, and not the node's own."""
        self.waits(where, uids="1000 0 0 0")  # a program with root's rights
        self.waits(where, uids=ROOT_S, nested="\t7")  # in a container
        self.waits(where, name=b"\xff\rUid:\t0 0 0 0")
        self.waits(where, uids=ROOT_S, flags=KTHREAD, name=b"kworker/0:1) D 1 0 0 0 -1 0 0")

    def status(self) -> str:
        return stuck.check(Look({"seconds": 0.0, "critical": 20}, self.root)).status


@pytest.mark.parametrize("where", FAULTS)
def test_who_waits_for_a_dead_server_or_driver_is_critical_whoever_it_is(tmp_path: Path, where: str) -> None:
    node = Node(tmp_path)
    node.waits(where, 19)
    assert node.status() == "warning"
    node.waits(where, 1)
    assert node.status() == "critical"


@pytest.mark.parametrize("where", DISK + DRIVER)
def test_a_dead_disk_is_critical_where_the_node_s_own_tasks_wait_for_it(tmp_path: Path, where: str) -> None:
    """A user's page may be in a mount of his own, which the kernel does not show."""
    node = Node(tmp_path)
    node.waits(where)
    node.waits_for_others(where)
    assert node.status() == "warning"
    node.waits(where, uids=ROOT_S)
    assert node.status() == "critical"


@pytest.mark.parametrize("where", NOT_CRITICAL)
def test_where_a_user_may_wait_as_long_as_he_likes_is_not_critical(tmp_path: Path, where: str) -> None:
    """Nor where he may keep others waiting: the node's own tasks and kernel threads."""
    node = Node(tmp_path)
    node.waits(where)
    node.waits_for_others(where)
    node.waits(where, uids=ROOT_S)
    assert node.status() == "warning"


def test_a_kernel_thread_that_waits_for_a_user_unlocks_no_waits_for_locks(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.waits("nfs_start_io_write [nfs], nfs_file_write [nfs]")
    node.waits("inode_sleep_on_writeback, wb_writeback", 1, ROOT_S, flags=KTHREAD, name=b"kworker/u8:1+flush-0:47")
    node.waits("wb_wait_for_completion, sync_inodes_sb, iterate_supers, ksys_sync", 1, ROOT_S)
    assert node.status() == "warning"


def test_of_the_node_s_own_tasks_the_innermost_function_alone_shows_no_disk(tmp_path: Path) -> None:
    """It may be on its way through what is others' (``sync``)."""
    node = Node(tmp_path)
    node.waits(PAGE, uids=ROOT_S, stack=False)
    assert node.status() == "warning"


@pytest.mark.parametrize("where", MADE)
def test_where_any_user_can_wait_is_not_stuck(tmp_path: Path, where: str) -> None:
    node = Node(tmp_path)
    node.waits(where)
    node.waits(where, uids="0 0 0 0", nested="\t7")
    assert node.status() == "ok"


def test_who_waits_behind_those_counts_with_them(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.waits("nfs_start_io_write [nfs], nfs_file_write [nfs]")
    assert node.status() == "warning"
    node.waits(GETATTR, 1)
    assert node.status() == "critical"


def test_without_a_stack_the_innermost_function_counts(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.waits(GETATTR, stack=False)
    assert node.status() == "critical"
    node = Node(tmp_path / "other")
    node.waits("kernel_clone", stack=False)
    assert node.status() == "ok"
