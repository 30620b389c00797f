"""Opens files that Argus writes or relies on, in such a way that no other user can have replaced them.

A name in a folder that others may write to can be a link to a file of root's, a pipe that is waited for, or a device.
So stores, spools, spills, caches, journals and ``--output`` are opened here: the folder first, by ``O_DIRECTORY`` and
``O_NOFOLLOW``, and only if nobody but its owner and root may change it; then its files by ``openat`` with
``O_NOFOLLOW`` and ``O_NONBLOCK``, regular files only. The rule is ``trusted``. This module imports no numpy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shlex
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from argus.model.units import binary_size

UNFINISHED = ".new-"
"""How names of files begin that are not whole yet."""
MAX_LINKS = 40
"""Symbolic links that a path may lead through, as in the kernel (``MAXSYMLINKS``)."""
MAX_DEPTH = 1024
"""Folders that a path may lead down through."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

_former_umask: int | None = None


class Untrusted(PermissionError):
    """Somebody else may change a file or folder, or has chosen what it is. ``strerror`` names who or how."""

    def __init__(self, path: object, reason: str, fix: str = "") -> None:
        super().__init__(errno.EPERM, reason, str(path))
        self.fix = fix
        """A command that mends it; empty: none does."""


class NotRegular(OSError):
    """What was to be read is a pipe, a socket or a device."""

    def __init__(self, path: object) -> None:
        super().__init__(errno.EINVAL, "it is no regular file", str(path))


def trusted(status: os.stat_result) -> bool:
    """Whether nobody but the effective user and root may change a file, by its status. It must be no link's."""
    return not distrust(status)


def distrust(status: os.stat_result, owners: tuple[int, ...] = (), *, root_group: bool = False) -> str:
    """Why a file is not to be believed; empty: it is.

    Args:
        status: Of the file; no link's.
        owners: Who may own it; empty: the effective user and root.
        root_group: Whether members of root's group may write to it.
    """
    if status.st_uid not in (owners or (0, os.geteuid())):
        return f"it belongs to {owner(status.st_uid)}"
    if _written_by_others(status, root_group=root_group):
        return f"others may write to it (its mode is {stat.S_IMODE(status.st_mode):o})"
    return ""


def _written_by_others(status: os.stat_result, *, root_group: bool, own_group: bool = False) -> bool:
    trusted = (root_group and status.st_gid == 0) or (own_group and status.st_gid == status.st_uid)
    return bool(status.st_mode & (0o002 if trusted else 0o022))


def is_safe_part(status: os.stat_result, owners: tuple[int, ...], *, last: bool, own_group: bool = False) -> bool:
    """Whether nobody but these owners may change what follows a part of a path (``changeable``). Names no user, which
    would mean to look for who that is.

    Args:
        status: Of the part itself: of a link, not of what it leads to.
        owners: Who may own it.
        last: Whether nothing follows it: a sticky folder protects what lies in it only.
        own_group: Whether the group with the owner's number may write, too: distributions give each user one.
    """
    if stat.S_ISLNK(status.st_mode):
        return status.st_uid in owners
    if not last and status.st_uid == 0 and status.st_mode & stat.S_ISVTX:
        return True
    return status.st_uid in owners and not _written_by_others(status, root_group=True, own_group=own_group)


def owner(uid: int) -> str:
    """A user's name, else ``uid 65534``."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def open_folder(folder: Path, *, create: bool = False) -> int:
    """A descriptor of a folder that nobody else may change, and whose last component is no link.

    Args:
        folder: The folder. Missing ones, and their parents, are made for their owner alone if ``create``.
        create: Whether to make it.

    Raises:
        Untrusted: Others may change it.
        OSError: It cannot be opened or made.
    """
    if create:
        make_folder(folder, 0o700)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as failure:
        if failure.errno in (errno.ENOTDIR, errno.ELOOP) and folder.is_symlink():
            raise Untrusted(folder, "it is a symbolic link") from None
        raise
    if reason := distrust(os.fstat(fd)):
        os.close(fd)
        raise Untrusted(folder, reason, _fix(folder))
    return fd


def _fix(folder: Path) -> str:
    name = shlex.quote(str(folder))
    user = "root:root" if os.geteuid() == 0 else str(os.geteuid())
    return f"If all in it is yours: chown -R {user} {name}; chmod -R go-w {name}"


def open_at(folder: int, name: str, flags: int, mode: int = 0o600) -> int:
    """Opens a regular file in a folder, following no link and waiting for no pipe.

    Args:
        folder: A descriptor of the folder (``open_folder``).
        name: The file's name in it.
        flags: As for ``os.open``.
        mode: Of a new file.

    Raises:
        Untrusted: It is a link, a pipe or a device, or others may change it.
        OSError: It cannot be opened.
    """
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            raise Untrusted(name, "it is a symbolic link") from None
        if failure.errno == errno.ENXIO:
            raise Untrusted(name, "it is no regular file") from None
        raise
    status = os.fstat(fd)
    reason = distrust(status) if stat.S_ISREG(status.st_mode) else "it is no regular file"
    if reason:
        os.close(fd)
        raise Untrusted(name, reason)
    return fd


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes, whoever it belongs to. Links are followed.

    Raises:
        NotRegular: It is a pipe, which would be waited for, a socket, or a device, some of which act when opened.
        OSError: It cannot be opened, or is a folder.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kind = os.fstat(place).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise NotRegular(path)
        return open(path, "rb", opener=lambda name, flags: open_place(place, flags))
    finally:
        os.close(place)


def read_secret(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """A password or a token: the begin of a file, or of a pipe, such as a shell makes of ``<(pass show argus)``; and
    its status. A pipe without a writer is not waited for.

    Args:
        path: The file.
        most: Bytes that are read at most.

    Raises:
        NotRegular: It is a socket or a device.
        OSError: It cannot be read, or is a folder.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(place)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise NotRegular(path)
        with open(open_place(place, os.O_RDONLY), "rb") as file:
            os.set_blocking(file.fileno(), True)  # a pipe's writer is waited for, if it has one
            return file.read(most), status
    finally:
        os.close(place)


def read_settings(file: Path, max_bytes: int) -> bytes:
    """The content of a file that says what to do.

    Raises:
        Untrusted: Root reads it, and somebody who is none of ``counted_as_root`` may change it, a folder above it, or a
            link on the way. Which that is, is the failure's ``filename``.
        NotRegular: As ``open_regular``.
        OSError: It cannot be read, or is larger than ``max_bytes`` (EFBIG).
    """
    with open_regular(file) as opened:
        # What was opened is looked at: before, something else may have had its name.
        if os.geteuid() == 0 and (found := changeable(file.absolute(), counted_as_root())):
            part, reason = found
            name = shlex.quote(str(part))
            raise Untrusted(part, reason, f"Make it root's: chown -h root:root {name}; chmod go-w {name}")
        if not os.path.samestat(os.stat(file), os.fstat(opened.fileno())):
            raise Untrusted(file, "it was replaced while it was opened", "Try again")
        text = opened.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {binary_size(max_bytes)}", str(file))
    return text


def read_at(folder: int, name: str, max_bytes: int) -> bytes:
    """A file's content.

    Raises:
        Untrusted: As ``open_at``.
        OSError: It cannot be read, or is larger than ``max_bytes`` (EFBIG).
    """
    with open(open_at(folder, name, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {binary_size(max_bytes)}", name)
        return file.read(max_bytes)


def write_at(folder: int, name: str, data: bytes, mode: int = 0o600, *, alone: bool = False) -> None:
    """Writes a file at once: whoever reads it sees the old content or the new. What had its name is replaced, and
    never written to.

    Args:
        folder: A descriptor of the folder.
        name: The file's name in it.
        data: Its content.
        mode: Of the file.
        alone: Nobody else writes it now: the caller has a lock. What a killed one has left is replaced.

    Raises:
        OSError: It cannot be written. The old one is still there.
    """
    new = UNFINISHED + (name if alone else uuid.uuid4().hex)
    if alone:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, mode)
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def append_at(folder: int, name: str, data: bytes) -> None:
    """Appends to a file, which is made where it is missing.

    Raises:
        Untrusted: As ``open_at``.
        OSError: It cannot be written.
    """
    with open(open_at(folder, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that gets a name at the end, and is removed where that fails. What had the name is replaced, and never
    written to: the folder may be one that others write to. Its mode is the umask's. Written to instead are a descriptor
    of this process's (``own_descriptor``), and a device or pipe that nobody else could have put there
    (``open_special``).

    Raises:
        Untrusted: A link of somebody else's is on the way to the folder, or others could have put the device there.
        OSError: It cannot be written. The old one is still there.
    """
    if (own := own_descriptor(path)) is not None:
        with open(own, "wb") as file:
            yield file
        return
    folder, new = open_output_folder(path.parent), UNFINISHED + uuid.uuid4().hex
    try:
        if (device := open_special(folder, path.name, links=True)) is not None:
            with open(device, "wb") as file:
                yield file
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(new, flags, 0o666, dir_fd=folder), "wb") as file:
                yield file
            os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def own_descriptor(path: Path) -> int | None:
    """A copy of the descriptor of this process that a path such as /dev/stdout or /dev/fd/3 names; None: it names none.

    Raises:
        OSError: That descriptor is not open.
    """
    name = {"/dev/stdout": "1", "/dev/stderr": "2"}.get(str(path), "")
    if str(path.absolute().parent) in ("/dev/fd", "/proc/self/fd"):
        name = path.name
    if not (name.isascii() and name.isdigit()):
        return None
    try:
        return os.dup(int(name))
    except (OverflowError, ValueError):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(path)) from None


def open_special(folder: int, name: str, *, links: bool = False, pipes: bool = False) -> int | None:
    """A descriptor to write to a character device; None: something else, or nothing, has that name.

    Args:
        folder: A descriptor of the folder.
        name: The name in it.
        links: Whether a link of a folder that nobody else may change is followed: to a device or a pipe and, from /dev,
            to anything.
        pipes: Whether a pipe of others counts, and is refused where they could have put it there. One's own is written
            to in any folder.

    Raises:
        Untrusted: Others could have put it there. It was not opened: some devices act when they are.
        OSError: It cannot be opened, nobody reads the pipe, or it is a block device.
    """
    try:
        place = os.open(name, _PLACE, dir_fd=folder)
    except OSError:
        return None
    try:
        linked = links and stat.S_ISLNK(os.fstat(place).st_mode) and not distrust(os.fstat(folder))
        if linked:
            try:
                target = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                return None
            os.close(place)
            place = target
        status = os.fstat(place)
        if stat.S_ISBLK(status.st_mode):
            raise OSError(errno.EINVAL, "it is a block device")
        in_dev = linked and os.path.samestat(os.fstat(folder), os.stat("/dev"))
        is_pipe = stat.S_ISFIFO(status.st_mode) and (linked or pipes or trusted(status))
        if not (stat.S_ISCHR(status.st_mode) or in_dev or is_pipe):
            return None
        if not in_dev:
            _refuse_planted(place, name)
        device = open_place(place, os.O_WRONLY)
    finally:
        os.close(place)
    os.set_blocking(device, True)
    return device


def open_place(place: int, flags: int) -> int:
    """Opens what an O_PATH descriptor leads to, whatever has its name by now. Neither a pipe's other end nor a lease on
    a file is waited for.

    Raises:
        OSError: It cannot be opened.
    """
    way = f"/proc/self/fd/{place}"
    try:
        return os.open(way, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failure:
        failure.filename = os.readlink(way)
        raise


def _refuse_planted(place: int, name: str) -> None:
    """Raises ``Untrusted`` if others could have put a device or pipe where it lies. A pipe of one's own will do in any
    folder, such as /tmp."""
    where, status = os.readlink(f"/proc/self/fd/{place}"), os.fstat(place)
    above = Path(where).parent
    if where.startswith("pipe:") or str(above) in ("/dev", "/dev/pts"):
        return
    found = changeable(above, (0, os.geteuid()))
    if found is not None and not (stat.S_ISFIFO(status.st_mode) and trusted(status)):
        raise Untrusted(name, f"it is no regular file, and others may change {found[0]}: {found[1]}")


def open_output_folder(folder: Path) -> int:
    """A descriptor of a folder that others may write to. Links on the way are followed only if they belong to the
    effective user or ``counted_as_root``: who may write there must not choose where root does.

    Raises:
        Untrusted: A link belongs to somebody else.
        OSError: It cannot be opened.
    """
    root = os.open("/", _PLACE | os.O_DIRECTORY)
    try:
        fd = walk(root, os.path.abspath(folder), _no_link_of_others(folder))
    finally:
        os.close(root)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Makes a folder, and those above it, where they are missing. Root follows links on the way as in
    ``open_output_folder``.

    Args:
        folder: The folder.
        mode: Its own, and that of those above it that are made, less the umask.

    Raises:
        Untrusted: A link on the way belongs to somebody else.
        OSError: It cannot be made, or is something else.
    """
    if os.geteuid() != 0:
        for each in reversed((folder, *folder.parents)):
            if each == folder or not each.exists():
                each.mkdir(mode=mode, exist_ok=True)
        return
    parts, check = folder.absolute().parts[1:], _no_link_of_others(folder)
    root = os.open("/", _PLACE | os.O_DIRECTORY)
    at = os.dup(root)
    try:
        for number, part in enumerate(parts, 1):
            way = "/".join(parts[:number])
            try:
                below = walk(root, way, check)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # a link that leads nowhere
                    os.mkdir(part, mode, dir_fd=at)
                below = walk(root, way, check)
            os.close(at)
            at = below
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    finally:
        os.close(at)
        os.close(root)


def _no_link_of_others(folder: Path) -> Callable[[str, int, os.stat_result], None]:
    """Checks a part of the way to a folder."""

    def check(part: str, fd: int, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), *counted_as_root()):
            raise Untrusted(folder, f"the link {part} on the way to it belongs to {owner(status.st_uid)}")

    return check


Check = Callable[[str, int, os.stat_result], None]


def walk(
    start: int,
    path: str,
    check: Check | None = None,
    *,
    arrive: Callable[[str, int], None] | None = None,
    follow: bool = True,
) -> int:
    """What lies at a path, not opened (O_PATH); else as ``find``."""
    return find(start, path, check, arrive=arrive, follow=follow)[0]


def find(
    start: int,
    path: str,
    check: Check | None = None,
    *,
    arrive: Callable[[str, int], None] | None = None,
    follow: bool = True,
) -> tuple[int, str, os.stat_result]:
    """What lies at a path, not opened (O_PATH), its path without links, and the status of the folder that it lies in.
    The path is followed here, part by part, and the kernel follows no link of it: neither a link nor ``..`` leads out
    of the folder that it begins in.

    Args:
        start: Descriptor of that folder. It counts as ``/``.
        path: The path.
        check: Is given each part on the way, a descriptor of it (O_PATH) and its status, and may raise.
        arrive: Is given the same before its file system is asked for its status, and may raise.
        follow: Whether the last part may be a link. If not, a link is returned as what it is.

    Raises:
        OSError: It does not exist, or cannot be reached.
    """
    rest, links = _parts(path), 0
    fds, names = [os.dup(start)], [""]
    """Of each folder from the first on, for ``..``."""
    try:
        while rest:
            part = rest.pop()
            if part == "..":
                if len(fds) > 1:
                    os.close(fds.pop())
                    names.pop()
                continue
            if len(fds) > MAX_DEPTH:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            fds.append(_open_part(fds[-1], part, folder=bool(rest)))
            names.append(part)
            if arrive is not None:
                arrive(part, fds[-1])
            status = os.fstat(fds[-1])
            if check is not None:
                check(part, fds[-1], status)
            if not stat.S_ISLNK(status.st_mode) or not (rest or follow):
                continue
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink("", dir_fd=fds[-1])
            os.close(fds.pop())
            names.pop()
            rest += _parts(target)
            while target.startswith("/") and len(fds) > 1:
                os.close(fds.pop())
                names.pop()
        above = os.fstat(fds[-2] if len(fds) > 1 else start)
        return fds.pop(), "/".join(names) or "/", above
    except OSError as failure:
        if not isinstance(failure, Untrusted):
            failure.filename = path
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _open_part(folder_fd: int, part: str, *, folder: bool) -> int:
    """A part of a path (O_PATH), a link as such."""
    if folder:
        # An automounter mounts what is opened as a folder.
        with contextlib.suppress(NotADirectoryError):
            return os.open(part, _PLACE | os.O_DIRECTORY, dir_fd=folder_fd)
    return os.open(part, _PLACE, dir_fd=folder_fd)


def open_log(path: Path) -> int:
    """A descriptor that appends to a log, which is made where it is missing. A device, a pipe, or what ``/dev/stderr``
    and its like lead to, is opened as it is.

    Raises:
        Untrusted: A link on the way is somebody else's, or the file is; or it is a second name of a file, which others
            could have made.
        OSError: It cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if str(path.absolute().parent) in ("/dev", "/dev/fd", "/proc/self/fd"):
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    folder = open_output_folder(path.parent)
    try:
        place = -1
        while place < 0:
            try:
                place = os.open(path.name, _PLACE, dir_fd=folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process has just made it
                    return os.open(path.name, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
        try:
            status = os.fstat(place)
            if stat.S_ISLNK(status.st_mode):
                raise Untrusted(path, "it is a symbolic link")
            if status.st_uid not in (0, os.geteuid()):
                raise Untrusted(path, f"it belongs to {owner(status.st_uid)}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and (why := distrust(os.fstat(folder))):
                raise Untrusted(path, f"it has another name, too, and others may change its folder: {why}")
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                _refuse_planted(place, path.name)
            fd = open_place(place, os.O_WRONLY | os.O_APPEND)
        finally:
            os.close(place)
    finally:
        os.close(folder)
    os.set_blocking(fd, True)
    return fd


def _parts(path: str) -> list[str]:
    """The components of a path, the last one first."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


@contextlib.contextmanager
def opened(folder: Path, *, create: bool = False) -> Iterator[int]:
    """``open_folder``, closed at the end."""
    fd = open_folder(folder, create=create)
    try:
        yield fd
    finally:
        os.close(fd)


def keep_newest(folder: int, belongs: Callable[[str], bool], newest: int, *, before_ns: int = 1 << 63) -> None:
    """Removes the oldest files of a kind. Another process may remove some, too.

    Args:
        folder: A descriptor of the folder.
        belongs: Whether a name is one of the kind.
        newest: How many files stay.
        before_ns: Younger ones stay as well (ns since 1970).
    """
    ages = []
    for name in filter(belongs, os.listdir(folder)):
        with contextlib.suppress(FileNotFoundError):
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
    for age, name in sorted(ages, reverse=True)[newest:]:
        if age < before_ns:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def folder_for_others(folder: Path) -> Iterator[tuple[Path, int]]:
    """A folder for what other users load or run, which is made where it is missing: its path without links, and a
    descriptor of it. It is written to by ``write_at``.

    Raises:
        Untrusted: Root runs this, and somebody who is none of ``counted_as_root`` may change the folder, one above it,
            or a link on the way. Which that is, is the failure's ``filename``.
        OSError: It cannot be made or opened.
    """
    for only_where in (True, False):
        if os.geteuid() == 0 and (found := changeable(folder.absolute(), counted_as_root(), only_where=only_where)):
            raise Untrusted(*found)
        make_folder(folder)
    place = Path(os.path.realpath(folder))
    fd = open_output_folder(place)
    try:
        yield place, fd
    finally:
        os.close(fd)


def counted_as_root(code: str = "") -> tuple[int, ...]:
    """Who may choose where root's own files are: root, who called sudo, and who owns Argus's code, of which ``code`` is
    a file."""
    caller = os.environ.get("SUDO_UID", "")
    return (0, os.stat(code or __file__).st_uid, *([int(caller)] if caller.isascii() and caller.isdigit() else []))


def changeable(path: Path, owners: tuple[int, ...] = (0,), *, only_where: bool = False) -> tuple[Path, str] | None:
    """Who else than root may change a program that root runs, or put another in its place.

    The file, each folder above it, and each link on the way must be root's, and not for others to write to. A sticky
    folder (``/tmp``) will do where what lies in it is root's.

    Args:
        path: An absolute path.
        owners: Who may own a part of it.
        only_where: Who may change which file or folder that is, not the thing itself, which may be missing.

    Returns:
        The first part at fault, and why; None: there is none.

    Raises:
        OSError: A part of the path is missing, or it has too many links.
    """
    rest, at, links = _parts(str(path)), Path("/"), 0
    while True:
        try:
            status = os.lstat(at)
        except FileNotFoundError:
            if only_where:
                return None
            raise
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if not is_safe_part(status, owners, last=not rest):
                return at, f"the link belongs to {owner(status.st_uid)}"
            target = os.readlink(at)
            rest += _parts(target)
            at = Path("/") if target.startswith("/") else at.parent
            continue
        if only_where and not rest:
            return None
        if not is_safe_part(status, owners, last=not rest):
            return at, distrust(status, owners, root_group=True)
        if not rest:
            return None
        part = rest.pop()
        at = at.parent if part == ".." else at / part


# ---- what root creates


def keep_private() -> None:
    """From here on what root creates is for root alone. The former umask is kept for commands that Argus starts."""
    global _former_umask
    if os.geteuid() == 0 and _former_umask is None:
        _former_umask = os.umask(0o077)


def share() -> None:
    """Undoes ``keep_private``: for files that other users are to read, and in a command's child."""
    global _former_umask
    if _former_umask is not None:
        os.umask(_former_umask)
        _former_umask = None
