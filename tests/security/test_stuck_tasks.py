"""No user makes a node critical by tasks of his own that wait in the kernel; a dead server or driver does, whoever it
is that waits for it."""

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
    for folder in list(built.parents)[:3]:
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
NOT_CRITICAL = [
    "",  # not known
    "nfs_start_io_write [nfs], nfs_file_write [nfs]",  # a lock: its holder may wait for memory of his own
    f"{FAULT}, {COPY}, nfs_file_read [nfs]",
    "lookup_slow, walk_component, path_lookupat",
    f"{PAGE}, ext4_file_read_iter",
    "ext4_buffered_write_iter, ext4_file_write_iter",
    "os_lock_user_pages [nvidia], _nv012345rm [nvidia]",
    "uvm_api_migrate [nvidia_uvm], uvm_ioctl [nvidia_uvm]",
    f"{FAULT}, pin_user_pages, os_lock_user_pages [nvidia], nvidia_ioctl [nvidia]",
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


class Node:
    """A node with tasks that wait."""

    def __init__(self, root: Path) -> None:
        self.root, self.tasks = root, 4711

    def waits(
        self, where: str, number: int = MANY, uids: str = "1000 1000 1000 1000", nested: str = "",
        *, stack: bool = True, name: bytes = b"python",
    ) -> None:  # fmt: skip
        frames = [frame.partition(" ") for frame in where.split(", ") if frame]
        for _ in range(number):
            self.tasks += 1
            task = self.root / f"proc/{self.tasks}/task/{self.tasks}"
            task.mkdir(parents=True)
            (task / "stat").write_bytes(b"%d (%b) D 1 " % (self.tasks, name) + b"0 " * 17 + b"99 0\n")
            (task / "status").write_bytes(
                b"Name:\t%b\nUid:\t%b\nNSpid:\t%d%b\nvoluntary_ctxt_switches:\t7\n"
                % (name, uids.replace(" ", "\t").encode(), self.tasks, nested.encode())
            )
            (task / "wchan").write_text(frames[0][0] if frames else "0")
            if stack:
                lines = [f"[<0>] {name}+0x1d3/0x400{' ' * bool(module)}{module}\n" for name, _, module in frames]
                (task / "stack").write_text("".join(lines))

    def status(self) -> str:
        return stuck.check(Look({"seconds": 0.0, "critical": 20}, self.root)).status


@pytest.mark.parametrize("where", FAULTS)
def test_who_waits_for_a_dead_server_or_driver_is_critical_whoever_it_is(tmp_path: Path, where: str) -> None:
    node = Node(tmp_path)
    node.waits(where, 19)
    assert node.status() == "warning"
    node.waits(where, 1)
    assert node.status() == "critical"


@pytest.mark.parametrize("where", NOT_CRITICAL)
def test_where_a_user_may_wait_as_long_as_he_likes_is_not_critical(tmp_path: Path, where: str) -> None:
    node = Node(tmp_path)
    node.waits(where)
    node.waits(where, uids="1000 0 0 0")  # a program with root's rights
    node.waits(where, uids="0 0 0 0", nested="\t7")  # in a container
    node.waits(where, name=b"\xff\rUid:\t0 0 0 0")
    assert node.status() == "warning"
    node.waits(where, uids="0 0 0 0")
    assert node.status() == "critical"


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
