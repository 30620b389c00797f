"""What a process runs with: settings, limits, versions by the names of what it maps, and its repository's files."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from argus.capture.process import environment, mapped
from argus.model.environment import LONGEST, MOST
from argus.system import proc
from tests.fuzz.harness import Bytes, is_text, joined

ALLOWED = ()
CODE = ["argus.capture.process.environment", "argus.system.proc", "argus.model.environment"]
TOKENS = [b"\0", b"..", b"ref: refs/heads/", b"gitdir: /", b"gitdir: ", b"/.git", b"\xff", b"\n", b"/proc/self/root",
          b"/torch/lib/libtorch_cpu.so", b"/nvidia/nccl/lib/", b"libcuda.so.550.54", b"cpu,cpuacct", b"0::/",
          b"kubepods/pod", b"NCCL_", b"TORCH_", b"OMP_NUM_THREADS=", b"0" * 40]  # fmt: skip
PID = 4242
COMMIT = b"0123456789abcdef0123456789abcdef01234567"
_folder = Path(tempfile.mkdtemp(prefix="argus-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
_own = os.getpid()
_library = _folder / "root/w/torch/lib/libtorch_cpu.so"
_library.parent.mkdir(parents=True)
_library.touch()


@atexit.register
def _remove() -> None:
    if os.getpid() == _own:
        shutil.rmtree(_folder, ignore_errors=True)


def seeds() -> list[bytes]:
    status = _library.stat()
    torch = b"%s %d /w/torch/lib/libtorch_cpu.so" % (mapped.device_of(status.st_dev).encode(), status.st_ino)
    maps = b"7f00-7f01 r-xp 0 %s\n7f02-7f03 r-xp 0 08:01 8 /usr/lib/libcuda.so.550.54\n" % torch
    mounts = b"40 30 8:1 / / rw - ext4 x rw\n41 40 0:50 / /w rw - nfs y rw\n"
    first = [b"NCCL_DEBUG=INFO\0OMP_NUM_THREADS=1", b"python3\0train.py", b"0::/a/b\n4:cpu,cpuacct:/a", mounts, maps,
             b"__version__ = '2.13.0'\n"]  # fmt: skip
    return [
        joined(*first, b"ref: refs/heads/main\n", b"gitdir: ../x\n", b"../c\n", COMMIT + b" refs/heads/main\n"),
        joined(*first, COMMIT + b"\n", b"", b"", b""),
    ]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _make(data: bytes) -> None:
    environ, command, cgroup, mounts, maps, version, head, git, common, packed = Bytes(data).pieces(10)
    place, root = _folder / str(PID), _folder / "root"
    if not place.exists():
        place.mkdir()
        (_folder / "cgroups/a").mkdir(parents=True)
        for name, target in (("exe", "/usr/bin/python3"), ("cwd", "/w"), ("root", str(root))):
            (place / name).symlink_to(target)
    files = {"environ": environ, "cmdline": command, "cgroup": cgroup, "mountinfo": mounts, "maps": maps}
    users = b"Name:\tx\nUid:\t1 1 1 1\nGid:\t1 1 1 1\nGroups:\t7\nCpus_allowed_list:\t0\nMems_allowed_list:\t0\n"
    for name, text in (files | {"status": users}).items():
        _write(place / name, text)
    _write(_folder / "cgroups/a/cpu.max", head)
    _write(root / "w/torch/version.py", version)
    shutil.rmtree(root / "w/.git", ignore_errors=True)
    (root / "w/.git").unlink(missing_ok=True)  # where it was a file
    if git:
        _write(root / "w/.git", git)
        _write(root / "x/HEAD", head)
        _write(root / "x/commondir", common)
        _write(root / "c/packed-refs", packed)
    else:
        _write(root / "w/.git/HEAD", head)


def _open_root(_: int) -> int:
    return os.open(_folder / "root", os.O_PATH | os.O_DIRECTORY)


def run(data: bytes) -> None:
    _make(data)
    with (
        mock.patch.object(environment, "PROC", _folder),
        mock.patch.object(proc, "PROC", _folder),
        mock.patch.object(environment, "CGROUPS", _folder / "cgroups"),
        mock.patch.object(mapped, "open_root", _open_root),
    ):
        facts = environment.process_facts(PID)
    assert len(facts) <= MOST
    for name, value in facts.items():
        is_text(name, LONGEST)
        is_text(value, LONGEST + 1)
    commit = facts.get("git.commit", "")
    assert not commit.strip("0123456789abcdef")
    assert len(commit) in (0, 40, 64)
