"""Files of other processes are opened as what the process has mapped, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.process import mapped
from tests.security.mapping_process import NOBODY, mapping, mapping_of, needs_root
from tests.security.test_files import NO_DRIVER

pytestmark = needs_root()


def _without_map_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may not follow /proc/PID/map_files."""
    real = os.open

    def refuse(path: Any, *words: Any, **options: Any) -> int:
        if "/map_files/" in str(path):
            raise PermissionError(errno.EPERM, "not permitted", path)
        return real(path, *words, **options)

    monkeypatch.setattr(mapped, "os", SimpleNamespace(**{**vars(os), "open": refuse}))


@pytest.mark.parametrize("permitted", [True, False])
def test_the_mapped_file_is_opened_once_for_all(folder: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool) -> None:
    (folder / "code.so").write_bytes(b"code" * 2000)
    if not permitted:
        _without_map_files(monkeypatch)
    with mapping([folder / "code.so"]) as pid:
        where = mapping_of(pid, "code.so")
        file = mapped.open_mapped(pid, where)
        assert file.read(8, 4) == b"codecode"
        assert os.path.samefile(file.path, folder / "code.so")
        assert mapped.open_mapped(pid, where) is file
        fd = file.fd
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.parametrize("permitted", [True, False])
def test_another_file_under_the_name_is_not_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool
) -> None:
    (tmp_path / "of_root").write_bytes(b"secret" * 2000)
    code = folder / "code.so"
    code.write_bytes(b"code" * 2000)
    with mapping([code]) as pid:
        where = mapping_of(pid, "code.so")
        code.rename(folder / "was.so")
        code.symlink_to(tmp_path / "of_root")
        if permitted:
            assert mapped.open_mapped(pid, where).read(4, 0) == b"code"
            return
        _without_map_files(monkeypatch)
        with pytest.raises(mapped.Refused, match="another file"):
            mapped.open_mapped(pid, where)


def test_a_deleted_file_is_opened_through_its_mapping(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = folder / "code.so"
    code.write_bytes(b"code" * 2000)
    with mapping([code]) as pid:
        code.unlink()
        code.write_bytes(b"new!" * 2000)
        where = mapping_of(pid, "code.so")
        assert where.deleted
        assert mapped.open_mapped(pid, where).read(4, 0) == b"code"
        _without_map_files(monkeypatch)
        with pytest.raises(PermissionError):
            mapped.open_mapped(pid, where)


def test_absolute_links_lead_nowhere_outside_the_root_of_the_process(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "of_root").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "of_root")
    (folder / "up").symlink_to("../" * 20 + str(tmp_path / "of_root"))
    (folder / "magic").symlink_to(f"/proc/{os.getpid()}/root{tmp_path}/of_root")
    root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    inside = folder / tmp_path.relative_to("/")
    try:
        for name in ("link", "up"):
            with pytest.raises(FileNotFoundError):
                mapped.open_in_root(root, f"/{name}")
        inside.mkdir(parents=True)
        (inside / "of_root").write_bytes(b"its own")
        for name in ("link", "up"):
            assert mapped.open_in_root(root, f"/{name}").read(9, 0) == b"its own"
    finally:
        os.close(root)
    with mapped.FileTree(os.getpid()) as tree, pytest.raises(OSError) as failure:
        tree.file(str(folder / "magic"))
    assert failure.value.errno == errno.ELOOP


@pytest.mark.parametrize("kind", ["pipe", "device", "no driver", "folder"])
def test_what_is_no_regular_file_is_never_opened(folder: Path, kind: str) -> None:
    place = folder / "version.py"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "no driver":
        os.mknod(place, 0o644 | stat.S_IFCHR, NO_DRIVER)
        with pytest.raises(OSError, match="No such device or address"):
            place.open()
    else:
        place.mkdir()
    with mapped.FileTree(os.getpid()) as tree, pytest.raises(mapped.Irregular):
        tree.file(str(place))


@pytest.mark.parametrize("through", ["map_files", "path"])
def test_a_device_that_a_mapping_leads_to_is_never_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """Who opens this one gets ENXIO. None of its kind can be mapped, so the mapping is made up."""
    device = folder / "code.so"
    os.mknod(device, 0o644 | stat.S_IFCHR, NO_DRIVER)
    status = device.stat()
    where = mapped.Mapping(4096, 8192, 0, mapped.device_of(status.st_dev), status.st_ino, str(device), False)
    real = os.open
    failed: list[int | None] = []

    def lead(path: Any, *words: Any, **options: Any) -> int:
        if through == "map_files":
            path = re.sub(r".*/map_files/.*", str(device), str(path))
        try:
            return real(path, *words, **options)
        except OSError as failure:
            failed.append(failure.errno)
            raise

    monkeypatch.setattr(mapped, "os", SimpleNamespace(**{**vars(os), "open": lead}))
    with pytest.raises(mapped.Irregular):
        mapped.open_mapped(os.getpid(), where)
    assert failed == ([] if through == "map_files" else [errno.ENOENT])
    place = real(device, os.O_PATH)
    try:
        with pytest.raises(mapped.Irregular):
            mapped.open_referred(place, where.device)
    finally:
        os.close(place)


def test_a_lease_on_a_file_is_not_waited_for(folder: Path) -> None:
    """Its holder has 45 s to let go, in which the open would wait. The kernel signals it; here that ends the lease."""
    (folder / "leased.so").write_bytes(b"code" * 2000)
    fd = os.open(folder / "leased.so", os.O_RDWR)
    before = signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK))
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with mapped.FileTree(os.getpid()) as tree, pytest.raises(BlockingIOError):
            tree.file(str(folder / "leased.so"))
    finally:
        signal.signal(signal.SIGIO, before)
        os.close(fd)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("permitted", [True, False])
def test_a_process_with_mounts_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool) -> None:
    """The file lies in a file system that only the process has mounted."""
    (folder / "made.so").write_bytes(b"host" * 2000)
    there = "mount -t tmpfs none {0} && printf '%8000s' inside > {0}/made.so && chmod 755 {0} && exec \"$@\""
    before = ["unshare", "--mount", "--propagation=private", "sh", "-c", there.format(folder), "sh"]
    before += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with mapping([folder / "made.so"], before) as pid:
        where = mapping_of(pid, "made.so")
        if not permitted:
            _without_map_files(monkeypatch)
        assert mapped.open_mapped(pid, where).read(8, 7992) == b"  inside"


@pytest.mark.skipif(shutil.which("nsenter") is None, reason="needs nsenter")
def test_the_same_inode_of_another_device_is_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tmpfs counts its inodes from 1: whoever mounts two chooses which file has the number of which."""
    mounted = "mount -t tmpfs none {0} && printf '%8000s' {1} > {0}/made.so && chmod 755 {0}"
    maps = ["unshare", "--mount", "--propagation=private", "sh", "-c"]
    maps += [mounted.format(folder, "first") + ' && exec "$@"', "sh"]
    with mapping([folder / "made.so"], maps) as pid:
        where = mapping_of(pid, "made.so")
        inside = ["nsenter", f"--target={pid}", "--mount", "sh", "-c", mounted.format(folder, "second")]
        subprocess.run(inside, check=True)
        there = os.stat(f"/proc/{pid}/root{folder}/made.so")
        if there.st_ino != where.inode:
            pytest.skip("inodes of tmpfs are numbered across mounts, as before Linux 5.9")
        assert mapped.device_of(there.st_dev) != where.device
        _without_map_files(monkeypatch)
        with pytest.raises(mapped.Refused, match="another file"):
            mapped.open_mapped(pid, where)


def _overlay(folder: Path) -> str:
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir()
    (folder / "lower" / "code.so").write_bytes(b"code" * 2000)
    options = ",".join(f"{name}dir={folder / name}" for name in ("lower", "upper", "work"))
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, folder / "merged"], capture_output=True, text=True
    )
    return done.stderr


@pytest.mark.parametrize("permitted", [True, False])
def test_a_file_of_an_overlay(folder: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool) -> None:
    """/proc/PID/maps may show another device than ``stat`` for it."""
    if output := _overlay(folder):
        pytest.skip(f"no overlay can be mounted here: {output}")
    try:
        with mapping([folder / "merged" / "code.so"]) as pid:
            where = mapping_of(pid, "code.so")
            if not permitted:
                _without_map_files(monkeypatch)
            file = mapped.open_mapped(pid, where)
            assert file.on_overlay
            assert file.read(4, 0) == b"code"
            del file
    finally:
        subprocess.run(["umount", folder / "merged"], check=True)


def test_a_mapping_that_became_another_files_is_refused(folder: Path) -> None:
    (folder / "one.so").write_bytes(b"one!" * 2000)
    (folder / "two.so").write_bytes(b"two!" * 2000)
    with mapping([folder / "one.so", folder / "two.so"]) as pid:
        one, two = mapping_of(pid, "one.so"), mapping_of(pid, "two.so")
        moved = mapped.Mapping(two.start, two.end, two.offset, one.device, one.inode, two.path, False)
        with pytest.raises(mapped.Refused, match="another file"):
            mapped.open_mapped(pid, moved)


def test_a_folder_of_a_million_names_is_read_in_part(folder: Path) -> None:
    for number in range(30):
        (folder / str(number)).touch()
    with mapped.FileTree(os.getpid()) as tree:
        assert len(tree.names(str(folder), 20)) == 20
        assert sorted(tree.names(str(folder))) == sorted(map(str, range(30)))
        assert tree.names(str(folder / "none")) == []
