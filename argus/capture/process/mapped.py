"""Opens files that another process has mapped, or that lie beside those: the only place in Argus that does.

Argus runs as root and the process may be anybody's. It chooses the names, may exchange what lies under them at any
moment, may put a pipe or a device there, and may give its own symbolic links absolute targets. So:

* A mapped file is opened through ``/proc/PID/map_files/START-END``, which leads to the mapped file itself without a
  look-up by name. Where the kernel does not permit that (it needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE), its path is
  followed inside the process's root (``files.walk``), and the file found must have the device and the inode of the
  mapping. ``openat2`` with RESOLVE_IN_ROOT would do the same, but it takes its flags from memory, where the reader's
  filter of system calls cannot tell reading from writing.
* A file is opened in two steps: as a place only (O_PATH), which has no effect on it; then, if it is a regular file, for
  reading. A pipe or a device is never opened. O_NONBLOCK: a file lease does not make Argus wait.
* What is read, is read with ``pread`` from that descriptor. A memory map would end Argus if the file were cut short.
* Probes are attached through a descriptor of the same file (``Reference.path``), so they are in the file that was
  parsed. Who attaches them has it as a place only, as the reader process gave it out: it can neither read the file nor
  be kept waiting when it closes it.

This module imports no numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from argus.capture.reader import progress
from argus.system import files
from argus.system.proc import Rights, masters_of, owner_of, rights_of

MOST_NAMES = 4096
"""Names of a folder that are read."""
_MOST_PROCESSES = 4096
"""Processes of which an ``Allowance`` is remembered."""
_OVERLAY, _BTRFS = 0x794C7630, 0x9123683E
"""OVERLAYFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC of linux/magic.h: /proc/PID/maps shows another device than ``stat``."""
_PROC = 0x9FA0
"""PROC_SUPER_MAGIC of linux/magic.h."""
_FUSE = 0x65735546
"""FUSE_SUPER_MAGIC of fs/fuse/inode.c."""

Key = tuple[int, int, int, int]
"""Device, inode, size in bytes, time of change in ns, as ``fstat`` has them: distinguishes files and their versions
while they are open. No user can choose the device."""
Lasting = tuple[Key, str]
"""The same when the file may be closed (``lasting``)."""
_GIVEN_AGAIN = (0, 7, 43)
"""Major numbers of devices that are no disks, loop devices and network block devices: once unmounted, their numbers are
the next mount's, which may be anybody's."""


class Refused(OSError):
    """What lies there is not opened: it is no regular file, not the mapped one, or not for the process to read."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EPERM, what)


class Irregular(Refused):
    """What lies there is a folder, a pipe, a socket or a device."""

    def __init__(self) -> None:
        super().__init__("it is no regular file")


@dataclass(frozen=True)
class Mapping:
    """One executable file mapping of a process, as /proc/PID/maps shows it."""

    start: int
    end: int
    offset: int
    device: str
    inode: int
    path: str
    deleted: bool


class Reference:
    """A regular file of a process that is shown to the kernel, and not read here: a place only (O_PATH), which has no
    effect on the file, even when it is closed. To close a file that is open for reading may wait for a file system in
    user space without an end, and no signal ends that. So may ``fstat``: nothing is asked of the file.

    Args:
        fd: Descriptor, which belongs to this object from now on.
        status: Of the file: what of ``os.stat_result`` is used.
        on_overlay: As the attribute.

    Attributes:
        fd: The descriptor.
        status: Of the file when it was opened.
        on_overlay: Whether it is a file of an overlay, as those of containers are: several overlays may show one file.
        path: Leads to this very file, for the kernel and within this process.
    """

    __slots__ = ("__weakref__", "_device", "_on_overlay", "fd", "status")

    def __init__(self, fd: int, status: Any, on_overlay: bool | None) -> None:
        self.fd = fd
        self.status = status
        self._on_overlay = on_overlay
        self._device = device_of(status.st_dev)

    @classmethod
    def received(cls, fd: int, status: Any, on_overlay: bool) -> Reference:
        """A file that the reader process opened and describes; the one of before, if there is one."""
        made = cls(fd, status, on_overlay)
        return _received.setdefault(made.key, made)

    def __del__(self) -> None:
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fd}, {self.key})"

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    @property
    def key(self) -> Key:
        status = self.status
        return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)

    @property
    def device(self) -> str:
        """The device it is on, as /proc/PID/maps writes devices."""
        return self._device

    @property
    def on_overlay(self) -> bool:
        return bool(self._on_overlay)

    def place(self) -> int:
        """A descriptor of the same file as a place alone (O_PATH), for another process."""
        return os.open(self.path, os.O_PATH | os.O_CLOEXEC)


class File(Reference):
    """A regular file that is open for reading: in the reader process, where there is one. It is closed when nothing
    refers to it any more.

    Args:
        fd: Descriptor, which belongs to this object from now on.
    """

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        super().__init__(fd, os.fstat(fd), None)

    def __del__(self) -> None:
        with progress.Touching(self._device):  # a file system in user space is asked
            os.close(self.fd)

    @property
    def on_overlay(self) -> bool:
        if self._on_overlay is None:
            with progress.file(self._device):
                self._on_overlay = _file_system(self.fd) == _OVERLAY
        return self._on_overlay

    def status_now(self) -> os.stat_result:
        """Its status at the time of the call: it may have been cut short, or written to.

        Raises:
            OSError: Its file system does not say.
        """
        with progress.file(self._device):
            return os.fstat(self.fd)

    def read(self, size: int, offset: int) -> bytes:
        """At most ``size`` bytes at an offset; fewer at the file's end.

        Raises:
            OSError: They cannot be read.
        """
        parts = []
        with progress.file(self._device):
            while size > 0 and (part := os.pread(self.fd, size, offset)):
                parts.append(part)
                size -= len(part)
                offset += len(part)
        return b"".join(parts)


_open: weakref.WeakValueDictionary[Key, File] = weakref.WeakValueDictionary()
"""Files that are open now: processes of a node map the same ones, and share a descriptor."""
_received: weakref.WeakValueDictionary[Key, Reference] = weakref.WeakValueDictionary()
"""The same of those that the reader process opened."""


def owner_text(pid: int) -> str:
    """The user and the container of a process. Jobs of Slurm are one: they have the host's mounts, and their user's
    files."""
    user, container = progress.owner if progress.process == pid else owner_of(pid)
    return str((user, "" if container.startswith("slurm ") else container))


def lasting(key: Key, owner: str) -> Lasting:
    """Under what it is remembered what a file holds, once it may be closed. Where the device's number may be another
    mount's by then, whose inodes, sizes and times its owner chooses, that is for processes of one owner alone.

    Args:
        key: Of the file.
        owner: ``owner_text`` of the process that maps it.
    """
    return key, owner if os.major(key[0]) in _GIVEN_AGAIN else ""


def device_of(number: int) -> str:
    """A device as /proc/PID/maps writes it."""
    return f"{os.major(number):02x}:{os.minor(number):02x}"


def _walk(root: int, path: str, *, follow: bool = True) -> int:
    """What lies at a path in a process's root, not opened (O_PATH). Links of /proc, among them those that lead to files
    without a look-up (/proc/PID/fd/N and the like), are never followed.

    Raises:
        OSError: It does not exist, or cannot be reached.
    """

    return files.walk(root, path, _refuse_magic, follow=follow)


def _refuse_magic(part: str, fd: int, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode) and _file_system(fd) == _PROC:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part)


def check_unchangeable(pid: int, root: int, path: str) -> None:
    """Whether a process may be told to load a file: only if nobody who could not change the process anyway may change
    it, a folder above it or a link on the way (``files.changeable``). Then it stays what it was when it was looked at.

    Args:
        pid: The process.
        root: Descriptor of its root folder (``open_root``).
        path: Absolute, as the process sees it.

    Raises:
        files.Untrusted: Somebody else may.
        OSError: It does not exist, or cannot be reached.
    """
    owners = masters_of(pid)
    device = -1

    def check(part: str, fd: int, status: os.stat_result) -> None:
        nonlocal device
        _refuse_magic(part, fd, status)
        safe = files.is_safe_part(status, owners, last=not stat.S_ISDIR(status.st_mode), own_group=True)
        if status.st_dev != device:
            # A file system in user space says of its files what its owner likes, also whose they are.
            safe = safe and (_file_system(fd) != _FUSE or _mounted_by(pid, fd) in owners)
            device = status.st_dev
        if not safe:
            raise files.Untrusted(path, "others may change it")

    with progress.look_up():
        check("/", root, os.fstat(root))
        place = files.walk(root, path, check)
        try:
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise Refused("it is no regular file")
        finally:
            os.close(place)


def mount_of(fd: int) -> int:
    """The mount that a descriptor's file was reached by, by its number; -1: not known."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:")), -1)


def _mounted_by(pid: int, fd: int) -> int:
    """Who mounted the file system in user space that a descriptor's file is of; -1: not known. ``fusermount`` lets
    nobody choose another, and who mounts without it has root's rights in the process's container."""
    number = b"%d" % mount_of(fd)
    with open(f"/proc/{pid}/mountinfo", "rb") as lines:
        for line in lines:
            words = line.rstrip(b"\n").split(b" ")  # other blanks may be part of names
            if words[0] == number:
                found = re.search(rb"(?:^|,)user_id=(\d+)(?:,|$)", words[-1])
                return int(found[1]) if found else -1
    return -1


def open_root(pid: int) -> int:
    """A descriptor (O_PATH) of a process's root folder. It stays that folder when the process has ended.

    Raises:
        OSError: The process ended, or may not be inspected.
    """
    with progress.look_up():
        return os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def open_mapped(pid: int, mapping: Mapping, *, proc: int = -1) -> File:
    """The file that a process has mapped, also from other mounts and after the file was deleted.

    Args:
        pid: The process.
        mapping: Which of its mappings.
        proc: Descriptor of /proc/PID, where the caller holds one: PIDs are used again.

    Raises:
        Refused: It is no regular file, or can only be reached by its path, where another file lies by now.
        OSError: It cannot be opened, or the process has ended.
    """
    process = f"/proc/{pid}" if proc < 0 else f"/proc/self/fd/{proc}"
    refused: OSError
    try:
        with (
            progress.file(mapping.device),
            _place(f"{process}/map_files/{mapping.start:x}-{mapping.end:x}") as place,
        ):
            status = os.fstat(place)
            # An overlay shows the inode of the layer below in maps, before Linux 6.8.
            if status.st_ino == mapping.inode or _file_system(place) == _OVERLAY:
                return _open_place(place)
        refused = Refused(f"{mapping.path} is not mapped there any more")
    except Refused:
        raise
    except OSError as reason:
        refused = reason
    if mapping.deleted:
        raise refused
    with progress.look_up(), _place(f"{process}/root") as root:
        return open_in_root(root, mapping.path, mapping)


def key_of(pid: int, mapping: Mapping) -> Key | None:
    """The key of a mapped file, which is not opened. None: it has to be, to say."""
    try:
        with progress.file(mapping.device):
            status = os.stat(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}")
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def open_in_root(root: int, path: str, mapping: Mapping | None = None, *, follow: bool = True) -> File:
    """A regular file, by a path that a process chose, resolved as the process would.

    Args:
        root: Descriptor of the process's root folder (``open_root``). Symbolic links lead nowhere outside it.
        path: Absolute.
        mapping: The mapping that it must be the file of.
        follow: Whether the last part of the path may be a symbolic link.

    Raises:
        Refused: What lies there is no regular file, or is not the mapped one.
        OSError: It cannot be opened.
    """
    if mapping is not None:
        progress.refuse(mapping.device)
    with progress.look_up():
        place = _walk(root, path, follow=follow)
        try:
            if mapping is not None and not _is_mapped(place, mapping):
                raise Refused(f"{path} is another file than the mapped one")
            return _open_place(place)
        finally:
            os.close(place)


def open_file(path: str | os.PathLike[str]) -> File:
    """A regular file that no process chose: of Argus's own, or of its tests.

    Raises:
        Refused: What lies there is no regular file.
        OSError: It cannot be opened.
    """
    with _place(os.fspath(path)) as place:
        return _open_place(place)


def open_referred(place: int, device: str) -> File:
    """Opens for reading what another process has as a ``Reference``.

    Args:
        place: Its descriptor, which stays the caller's.
        device: The one that the file is on.

    Raises:
        Refused: It is no regular file.
        OSError: It cannot be opened.
    """
    with progress.file(device):
        return _open_place(place)


def open_beside(pid: int, path: str) -> File:
    """A regular file that a mapped file names, or that lies beside one: in the process's root, as ``open_in_root``, if
    the process may read it.

    Raises:
        Refused: What lies there is no regular file, or the process may not read it.
        OSError: It cannot be opened, or the process has ended.
    """
    root = open_root(pid)
    try:
        return open_readable(root, path, rights_of(pid))
    finally:
        os.close(root)


def open_readable(root: int, path: str, rights: Rights, *, owned: str = "") -> File:
    """As ``open_in_root``, if a process may read it.

    Args:
        root: Descriptor of its root folder.
        path: Absolute.
        rights: The process's.
        owned: The name of a part of the path. That part, the file, and each link on the way belong to who is believed,
            and nobody else may write to the file or have given it this name.

    Raises:
        Refused: What lies there is no regular file, the process may not read it, or it is somebody else's.
        OSError: It cannot be opened.
    """
    place = _walk_readable(root, path, rights, owned)
    try:
        status = os.fstat(place)
        with progress.look_up():
            may_read = rights.may_read(place, status)
        if not may_read:
            raise Refused(f"{path} may not be read by the process")
        if owned and stat.S_ISREG(status.st_mode) and (status.st_mode & 0o002 or status.st_nlink > 1):
            raise Refused(f"{path} may be somebody else's")
        return _open_place(place)
    finally:
        os.close(place)


def _walk_readable(root: int, path: str, rights: Rights, owned: str = "") -> int:
    """What lies there, not opened (O_PATH), if a process may go there; as ``open_readable``."""
    chosen_by_guests = False

    def check(part: str, fd: int, status: os.stat_result) -> None:
        nonlocal chosen_by_guests
        _refuse_magic(part, fd, status)
        if not rights.may_pass(fd, status, ask_guests=chosen_by_guests):
            raise Refused(f"{path} may not be read by the process")
        folder = stat.S_ISDIR(status.st_mode)
        if owned and (part == owned or not folder) and status.st_uid not in rights.owners:
            raise Refused(f"{path} is somebody else's")
        chosen_by_guests = chosen_by_guests or (stat.S_ISLNK(status.st_mode) and status.st_uid in rights.guests)

    with progress.look_up():
        return files.walk(root, path, check)


def is_owned(root: int, path: str, rights: Rights, owned: str) -> bool:
    """Whether something lies at a path that belongs to who is believed, as ``open_readable``."""
    try:
        os.close(_walk_readable(root, path, rights, owned))
    except (FileNotFoundError, NotADirectoryError, PermissionError, Refused):
        return False
    return True


def same_place(root: int, path: str, link: str) -> os.stat_result | None:
    """What a link of /proc leads to, if that is what lies at a path in a process's root; None: it is not any more.

    Args:
        root: Descriptor of the process's root folder.
        path: Absolute.
        link: Such as /proc/PID/cwd.
    """
    with progress.look_up(), _place(link) as there:
        place = _walk(root, path)
        try:
            return status if os.path.samestat(status := os.fstat(there), os.fstat(place)) else None
        finally:
            os.close(place)


def owner_in_root(root: int, folder: str) -> int:
    """Whose a folder of a process is; raises OSError if it cannot be reached."""
    with progress.look_up():
        place = _walk(root, folder)
        try:
            return os.fstat(place).st_uid
        finally:
            os.close(place)


class Allowance:
    """How many new files of each process are parsed: a process may map 20,000, and others without end.

    Args:
        burst: Files of a process at once: more than a PyTorch job maps.
        per_second: Files a second after that.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def take(self, pid: int, now: float | None = None) -> bool:
        """Whether one more file of a process may be parsed.

        Args:
            pid: The process.
            now: ``time.monotonic()``; default: the time of the call.
        """
        now = time.monotonic() if now is None else now
        left, since = self._left.pop(pid, (float(self._burst), now))
        left = min(left + (now - since) * self._per_second, float(self._burst))
        self._left[pid] = (left - 1 if left >= 1 else left, now)
        while len(self._left) > _MOST_PROCESSES:
            self._left.popitem(last=False)
        return left >= 1


def names_in_root(root: int, folder: str, rights: Rights, most: int = MOST_NAMES) -> list[str]:
    """Names in a folder of a process, at most so many, in no order; nothing where it cannot be read.

    Args:
        root: Descriptor of the process's root folder.
        folder: Absolute path.
        rights: The process's: what it may not read is not read.
        most: Others are passed over: a process may make a folder of millions.
    """

    names: list[str] = []
    with contextlib.suppress(OSError), progress.look_up():
        place = _walk_readable(root, folder, rights)
        try:
            if not rights.may_read(place, os.fstat(place)):
                return []
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    names.append(entry.name)
                    if len(names) >= most:
                        break
        finally:
            os.close(fd)
    return names


@contextlib.contextmanager
def _place(path: str) -> Iterator[int]:
    """What lies at a path of /proc, not opened (O_PATH)."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_place(place: int) -> File:
    """Opens for reading what an O_PATH descriptor leads to, if that is a regular file."""
    status = os.fstat(place)
    if not stat.S_ISREG(status.st_mode):
        raise Irregular
    shared = _open.get((status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns))
    if shared is not None:
        return shared
    # A magic link of this process's own: it leads to the same inode, whatever became of the name.
    with progress.file(device_of(status.st_dev)):
        file = File(os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    return _open.setdefault(file.key, file)


def _is_mapped(place: int, mapping: Mapping) -> bool:
    """Whether a file found by its path is the mapped one."""
    status = os.fstat(place)
    if status.st_ino != mapping.inode:
        return False
    return device_of(status.st_dev) == mapping.device or _file_system(place) in (_OVERLAY, _BTRFS)


class _Statfs(ctypes.Structure):
    """struct statfs of x86-64 and aarch64, as far as it is needed: 120 bytes in all."""

    _fields_ = (("type", ctypes.c_long), ("rest", ctypes.c_byte * 248))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _file_system(fd: int) -> int:
    """The kernel's number of the file system's kind (fstatfs); 0: not known."""
    statfs = _Statfs()
    if _libc.fstatfs(ctypes.c_int(fd), ctypes.byref(statfs)) != 0:
        return 0
    return int(statfs.type)
