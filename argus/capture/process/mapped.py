"""Opens files that another process has mapped, or that lie beside those: the only place in Argus that does.

Argus runs as root and the process may be anybody's. It chooses the names, may exchange what lies under them at any
moment, may put a pipe or a device there, and may give its own symbolic links absolute targets. So:

* A mapped file is opened through ``/proc/PID/map_files/START-END``, which leads to the mapped file itself without a
  look-up by name. Where the kernel does not permit that (it needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE), its path is
  followed inside the process's root (``files.find``), and the file found must have the device and the inode of the
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
from copy import copy
from dataclasses import dataclass
from typing import Any

from argus.capture.reader import progress
from argus.system import files
from argus.system import proc as system_proc
from argus.system.proc import number as number_of
from argus.system.proc import owner_of, rights_of

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

MOUNTS_BYTES = 32 << 20
"""Of /proc/PID/mountinfo: 1,000 file systems in user space, which is what ``fusermount`` allows users together, take 17
MB if their names are as long as can be."""
MOUNTS_READ = 3
"""It is read so often at most."""
ROOTS, NOT_KNOWN = -1, -2
"""Whose a file system is that is not in user space."""
_DEVICE = re.compile(rb"([0-9]{1,4}):([0-9]{1,7})")
_USER = re.compile(rb"(?:^|,)user_id=([0-9]{1,10})(?:,|$)")

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
        self.fd, self._device = fd, progress.PATHS
        super().__init__(fd, os.fstat(fd), None)  # where that fails it is closed all the same

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


def mount_of(fd: int) -> int:
    """The mount that a descriptor's file was reached by, by its number; -1: not known."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:")), -1)


class Mounts:
    """What is mounted for a process, by the number of the mount. It is read when a mount is entered that is not known:
    to go through an automounter's folder mounts one.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._table: dict[int, tuple[str, int]] = {}
        self._reads = 0
        self._cut = False
        self._own: set[int] = set()

    def enter_root(self, root: int) -> None:
        """The mount of its root folder, which is in no table where the folder is not where that is mounted (chroot)."""
        self._own.add(mount_of(root))

    def enter(self, fd: int, owners: frozenset[int]) -> None:
        """A descriptor leads to something that is about to be asked for its status, or read. A file system in user
        space says of its files what its owner likes, also whose they are, and answers when he likes.

        Args:
            fd: The descriptor.
            owners: Whose file systems may be asked.

        Raises:
            Refused: It is somebody else's, or not known.
            OSError: It did not answer before, or more is mounted than is read.
        """
        number = mount_of(fd)
        if number in self._own:
            return
        if number not in self._table and self._reads < MOUNTS_READ:
            self._reads += 1
            self._table = self._read()
        if self._cut and number not in self._table:
            raise OSError(errno.EFBIG, "more is mounted than is read")
        device, owner = self._table.get(number, ("", NOT_KNOWN))
        if owner not in (ROOTS, *owners):
            raise Refused("it lies on a file system of somebody else's")
        progress.refuse(device)

    def _read(self) -> dict[int, tuple[str, int]]:
        """Device, as /proc/PID/maps writes it, and owner of each."""
        table: dict[int, tuple[str, int]] = {}
        left = MOUNTS_BYTES
        with open(f"{system_proc.PROC}/{self._pid}/mountinfo", "rb") as lines:
            while left > 0 and (line := lines.readline(left)):
                left -= len(line)
                words = line.rstrip(b"\n").split(b" ")  # other blanks may be part of names
                if len(words) < 6 or (device := _DEVICE.fullmatch(words[2])) is None:
                    continue
                # ``fusermount`` lets nobody choose another, and who mounts without it has root's rights in the
                # process's container.
                user = _USER.search(words[-1])
                number = os.makedev(int(device[1]), int(device[2]))
                table[number_of(words[0])] = device_of(number), ROOTS if user is None else number_of(user[1])
        self._cut = left <= 0
        return table


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


def open_beside(pid: int, mapping: Mapping, path: str) -> File:
    """A regular file that a mapped file names, or that lies beside one: in the process's root, as ``open_in_root``, if
    the process may read it, and the mapped file is still where it was.

    Raises:
        Refused: What lies there is no regular file, the process may not read it, or others may have put it there.
        OSError: It cannot be opened, or the process has ended.
    """
    with FileTree(pid) as tree:
        tree.check_still_there(mapping)
        return tree.file(path)


class Foreign(Refused):
    """The part of a path that has to be of who is believed is somebody else's."""

    def __init__(self) -> None:
        super().__init__("it is somebody else's")


class Elsewhere(Refused):
    """The same part is on another mount than it has to be."""

    def __init__(self) -> None:
        super().__init__("it is on another mount")


@dataclass(frozen=True)
class Place:
    """What lies at a path.

    Attributes:
        path: Without links.
        status: Its own.
        above: That of the folder that it lies in.
        mount: The number of its mount.
    """

    path: str
    status: os.stat_result
    above: os.stat_result
    mount: int


class FileTree:
    """Files and folders of a process, by paths that the process chose, or others: what it may not read itself is not
    read, and file systems in user space of others are not asked.

    Args:
        pid: The process.

    Raises:
        OSError: The process ended, or may not be inspected.
    """

    def __init__(self, pid: int) -> None:
        self.rights = rights_of(pid)
        self._pid = pid
        self._mounts = Mounts(pid)
        self._root = open_root(pid)
        try:
            self._mounts.enter_root(self._root)
        except BaseException:
            os.close(self._root)
            raise

    def __enter__(self) -> FileTree:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def believing(self, user: int) -> FileTree:
        """The same where a user is believed, too (``Rights.with_owner``). It is closed with this one."""
        other = copy(self)
        other.rights = self.rights.with_owner(user)
        return other

    def place(self, path: str, *, owned: str = "", on: int = NOT_KNOWN) -> Place:
        """What lies at a path, if the process may go there.

        Args:
            path: Absolute.
            owned: As ``file``.
            on: The mount that this part has to be on; default: any.

        Raises:
            Foreign: That part is somebody else's.
            Elsewhere: It is on another mount.
            Refused: The process may not go there, or it is somebody else's.
            OSError: It cannot be reached.
        """
        with progress.look_up():
            fd, place = self._find(path, owned, on)
            os.close(fd)
            return place

    def file(self, path: str, *, owned: str = "", chosen: bool = False) -> File:
        """A regular file, as ``open_in_root``, if the process may read it.

        Args:
            path: Absolute.
            owned: The name of a part of the path. That part, the file, and each link on the way belong to who is
                believed, and nobody else may write to the file (but for its group) or have given it this name.
            chosen: Whether guests may have chosen the path.

        Raises:
            Refused: What lies there is no regular file, the process may not read it, or it is somebody else's.
            OSError: It cannot be opened.
        """
        with progress.look_up():
            fd, place = self._find(path, owned, chosen=chosen)
            try:
                status = place.status
                if not self.rights.may_read(fd, status):
                    raise Refused(f"{path} may not be read by the process")
                if owned and stat.S_ISREG(status.st_mode) and (status.st_mode & 0o002 or status.st_nlink > 1):
                    raise Refused(f"{path} may be somebody else's")
                return _open_place(fd)
            finally:
                os.close(fd)

    def names(self, folder: str, most: int = MOST_NAMES) -> list[str]:
        """Names in a folder, at most so many, in no order; nothing where it cannot be read.

        Args:
            folder: Absolute path.
            most: Others are passed over: a process may make a folder of millions.
        """
        names: list[str] = []
        with contextlib.suppress(OSError), progress.look_up():
            fd, place = self._find(folder)
            try:
                if not self.rights.may_read(fd, place.status):
                    return []
                opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
            finally:
                os.close(fd)
            try:
                with os.scandir(opened) as entries:
                    for entry in entries:
                        names.append(entry.name)
                        if len(names) >= most:
                            break
            finally:
                os.close(opened)
        return names

    def link(self, name: str) -> Place | None:
        """What a link of /proc/PID (``cwd``, ``exe``) leads to, if that is what lies at the path that it shows; None:
        others may have put there what does.

        Raises:
            Refused: The process may not go there.
            OSError: It cannot be reached.
        """
        path = os.readlink(f"{system_proc.PROC}/{self._pid}/{name}")
        if not path.startswith("/"):
            return None
        with progress.look_up():
            try:
                fd, place = self._find(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            os.close(fd)
            return place if self._leads_to(name, place.status) else None

    def _leads_to(self, name: str, status: os.stat_result) -> bool:
        with _place(f"/proc/{self._pid}/{name}") as there:
            self._mounts.enter(there, self.rights.owners)
            return os.path.samestat(os.fstat(there), status)

    def check_still_there(self, mapping: Mapping) -> None:
        """Raises Refused if a mapped file was removed, or another lies at its path: whoever put it there may have put
        what lies beside it. Raises OSError if that cannot be known."""
        if mapping.deleted:
            raise Refused(f"{mapping.path} is not there any more")
        progress.refuse(mapping.device)
        with progress.look_up():
            fd, place = self._find(mapping.path)
            try:
                if not self._maps(mapping, place.status) and not _is_mapped(fd, mapping):
                    raise Refused(f"{mapping.path} is another file than the mapped one")
            finally:
                os.close(fd)

    def _maps(self, mapping: Mapping, status: os.stat_result) -> bool:
        """Whether a file is the mapped one, where that can be asked: some overlays show another inode in maps."""
        try:
            with (
                progress.file(mapping.device),
                _place(f"/proc/{self._pid}/map_files/{mapping.start:x}-{mapping.end:x}") as place,
            ):
                return os.path.samestat(os.fstat(place), status)
        except OSError:
            return False

    def check_unchangeable(self, path: str) -> None:
        """Whether the process may be told to load a file: only if nobody who could not change the process anyway may
        change it, a folder above it or a link on the way (``files.is_safe_part``). Then it stays what it was when it
        was looked at.

        Args:
            path: Absolute, as the process sees it.

        Raises:
            files.Untrusted: Somebody else may.
            OSError: It does not exist, or cannot be reached.
        """
        owners = tuple(self.rights.owners)

        def arrive(part: str, fd: int) -> None:
            try:
                self._mounts.enter(fd, self.rights.owners)
            except Refused:
                raise files.Untrusted(path, "others may change it") from None

        def check(part: str, fd: int, status: os.stat_result) -> None:
            _refuse_magic(part, fd, status)
            if not files.is_safe_part(status, owners, last=not stat.S_ISDIR(status.st_mode), own_group=True):
                raise files.Untrusted(path, "others may change it")

        with progress.look_up():
            check("/", self._root, os.fstat(self._root))
            place = files.walk(self._root, path, check, arrive=arrive)
            try:
                if not stat.S_ISREG(os.fstat(place).st_mode):
                    raise Refused("it is no regular file")
            finally:
                os.close(place)

    def _find(self, path: str, owned: str = "", on: int = NOT_KNOWN, *, chosen: bool = False) -> tuple[int, Place]:
        """What lies there, not opened (O_PATH); as ``place`` and ``file``."""
        rights = self.rights

        def arrive(part: str, fd: int) -> None:
            if owned and part == owned and on != NOT_KNOWN and mount_of(fd) != on:
                raise Elsewhere
            self._mounts.enter(fd, rights.owners)

        def check(part: str, fd: int, status: os.stat_result) -> None:
            nonlocal chosen
            _refuse_magic(part, fd, status)
            if not rights.may_pass(fd, status, ask_guests=chosen):
                raise Refused(f"{path} may not be read by the process")
            folder = stat.S_ISDIR(status.st_mode)
            if owned and (part == owned or not folder) and status.st_uid not in rights.owners:
                raise Foreign if part == owned else Refused(f"{path} is somebody else's")
            chosen = chosen or (stat.S_ISLNK(status.st_mode) and status.st_uid in rights.guests)

        fd, found, above = files.find(self._root, path, check, arrive=arrive)
        try:
            return fd, Place(found, os.fstat(fd), above, mount_of(fd))
        except BaseException:
            os.close(fd)
            raise


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
