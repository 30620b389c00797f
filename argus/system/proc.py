"""Files of /proc: their lines and fields; whose a process is, its user and the container that it runs in; what it may
read.

A process chooses its name, and the paths that it maps and mounts. In these the kernel escapes the end of a line and
little else, so only LF ends one:
``splitlines`` and files in text mode end lines at CR and others, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path

PROC = Path("/proc")
POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
"""A pod's cgroup."""
_SLURM = re.compile(r"/slurm[^/]*/(?:.*/)?job_([0-9]{1,19})(?:/|$)", re.MULTILINE)
"""Slurm's cgroup of a job: /slurm/uid_1000/job_42 (version 1), …/slurmstepd.scope/job_42 (version 2)."""


def read_file(path: str) -> bytes:
    """A small file of /proc, in a third of the time that ``Path.read_bytes`` takes.

    Raises:
        OSError: It is not there, or may not be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 1 << 14):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def lines_of(text: bytes) -> list[bytes]:
    """Lines of a file of the kernel, as it ends them."""
    return text.removesuffix(b"\n").split(b"\n")


def field_of(text: bytes, name: bytes) -> bytes:
    """A field of /proc/PID/status and files like it, without the blanks around it; empty: there is none.

    Of several lines that begin with the name it is the last: a process's own name comes first."""
    _, found, behind = (b"\n" + text).rpartition(b"\n" + name + b":")
    return behind.partition(b"\n")[0].strip() if found else b""


def number(text: bytes) -> int:
    """A decimal number that the kernel wrote, from 0 on; -1: it is none."""
    return int(text) if text.isdigit() and len(text) < 20 else -1


def numbers(text: bytes) -> tuple[int, ...]:
    """Such numbers with blanks between them; empty: one of them is none."""
    found = tuple(map(number, text.split()))
    return () if -1 in found else found


def stat_of(place: str) -> list[bytes]:
    """Fields of /proc/PID/stat from the third on, which is the state: the second is a name, in parentheses.

    Args:
        place: The folder, such as ``/proc/1``.

    Raises:
        OSError: The process has ended, or may not be looked at.
    """
    return read_file(f"{place}/stat").rpartition(b")")[2].split()


def owner_of(pid: int) -> tuple[int, str]:
    """User and container of a process, as ``Identity.owner``; (-1, ""): it has ended."""
    try:
        uid = user_of(pid)
        return (uid, container_of(pid, read_cgroup(pid))) if uid >= 0 else (-1, "")
    except OSError:
        return -1, ""


def user_of(pid: int) -> int:
    """The user that a process runs as (its effective one), as this host numbers users; -1: it has ended, or that is
    not known."""
    try:
        users = numbers(field_of(read_file(f"{PROC}/{pid}/status"), b"Uid"))
    except OSError:
        return -1
    return users[1] if len(users) == 4 else -1


def masters_of(pid: int) -> tuple[int, ...]:
    """Users who may do to a process whatever they like: root, its own, and who is root in its user namespace; as this
    host numbers users."""
    owners = [0, user_of(pid)]
    with contextlib.suppress(OSError):
        for line in lines_of(read_file(f"{PROC}/{pid}/uid_map")):
            if len(ids := numbers(line)) == 3 and ids[0] == 0:
                owners.append(ids[1])
    return tuple(uid for uid in owners if uid >= 0)


def read_cgroup(pid: int) -> str:
    """/proc/PID/cgroup, or nothing where there are no cgroups."""
    try:
        return read_file(f"{PROC}/{pid}/cgroup").decode(errors="replace")
    except FileNotFoundError:
        return ""


def container_of(pid: int, cgroup: str) -> str:
    """What distinguishes two containers: the pod, whose containers have PID namespaces of their own; Slurm's job, which
    has none; else the PID namespace. Empty: the process is in none."""
    if pod := POD.search(cgroup):
        return f"pod {pod.group(1).replace('_', '-')}"
    if job := _SLURM.search(cgroup):
        return f"slurm {job.group(1)}"
    try:
        namespace = os.readlink(f"{PROC}/{pid}/ns/pid")
        return "" if namespace == os.readlink(f"{PROC}/self/ns/pid") else namespace
    except OSError:
        return ""


_READ, _SEARCH = 0o4, 0o1


@dataclass(frozen=True)
class Rights:
    """What all of some users may read, by owners and modes of files.

    Argus may read every file of a node. What lies at a path that a process chose is read for it only if it could do so
    itself: otherwise a link would have Argus store what is in another user's file.

    Attributes:
        users: Each must be allowed to; root is.
        groups: Those that all of a process's users are in.
        owners: Who is believed: they may do to the process what they like anyway.
        guests: Of these, who is no user of the process: asked as well where it is theirs to choose what is read.
    """

    users: frozenset[int]
    groups: frozenset[int]
    owners: frozenset[int]
    guests: frozenset[int] = frozenset()

    def with_owner(self, user: int) -> Rights:
        """The same where a user's folder is what the process runs: he is believed."""
        if user in self.owners:
            return self
        return replace(self, owners=self.owners | {user}, guests=self.guests | {user})

    def may_pass(self, fd: int, status: os.stat_result, *, ask_guests: bool = False) -> bool:
        """Whether a part of a path, not the last one, may be gone through: a folder or a link.

        Args:
            fd: It (O_PATH suffices).
            status: The same's.
            ask_guests: Whether it is guests' to choose.
        """
        return not stat.S_ISDIR(status.st_mode) or self._may(fd, status, _SEARCH, ask_guests)

    def may_read(self, fd: int, status: os.stat_result) -> bool:
        """Whether a file, or the names in a folder, may be read."""
        return self._may(fd, status, _READ | _SEARCH if stat.S_ISDIR(status.st_mode) else _READ, ask_guests=True)

    def _may(self, fd: int, status: os.stat_result, wanted: int, ask_guests: bool) -> bool:
        asked = [(user, self.groups) for user in self.users if user != 0]
        asked += [(user, frozenset[int]()) for user in (self.guests if ask_guests else ()) if user != 0]
        if not asked:
            return True
        access = access_of(fd, status)
        return access is not None and all(access.allows(user, groups, wanted) for user, groups in asked)


@dataclass(frozen=True)
class Access:
    """Who may do what to a file: its mode, and its access control list (acl(5)).

    Attributes:
        owner, other: What its owner may do, and who is named nowhere: bits as of a mode.
        uid: Its owner.
        users, groups: What others may do who are named, by number; its own group's among them.
    """

    owner: int
    other: int
    uid: int
    users: dict[int, int]
    groups: dict[int, tuple[int, ...]]

    def allows(self, user: int, groups: frozenset[int], wanted: int) -> bool:
        """Whether a user may, who is in these groups for certain: in others he may be as well."""
        if user == self.uid:
            return self.owner & wanted == wanted
        if user in self.users:
            return self.users[user] & wanted == wanted
        if known := [bits for group in groups & self.groups.keys() for bits in self.groups[group]]:
            return any(bits & wanted == wanted for bits in known)
        # Whoever is in a group by another way has no more than the group.
        every = [self.other, *(bits for all_bits in self.groups.values() for bits in all_bits)]
        return all(bits & wanted == wanted for bits in every)


_LIST = "system.posix_acl_access"
_USER, _OWN_GROUP, _GROUP, _MASK = 0x02, 0x04, 0x08, 0x10
"""Kinds of entries (include/uapi/linux/posix_acl.h)."""
_ENTRY = struct.Struct("<HHI")
_VERSION = b"\x02\0\0\0"


def access_of(fd: int, status: os.stat_result) -> Access | None:
    """Of a file; None: its list cannot be read.

    Args:
        fd: It (O_PATH suffices).
        status: The same's.
    """
    mode, whole = status.st_mode, 0o7
    entries: list[tuple[int, int, int]] = []
    try:
        listed = os.getxattr(f"/proc/self/fd/{fd}", _LIST)
    except OSError as failure:
        if failure.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            return None
    else:
        if listed[:4] != _VERSION or len(listed) % _ENTRY.size != 4:
            return None
        entries = list(_ENTRY.iter_unpack(listed[4:]))
        whole = next((bits for kind, bits, _ in entries if kind == _MASK), whole)
    own = [bits for kind, bits, _ in entries if kind == _OWN_GROUP] or [mode >> 3 & 0o7]
    groups = {status.st_gid: tuple(bits & whole for bits in own)}
    for kind, bits, group in entries:
        if kind == _GROUP:
            groups[group] = (*groups.get(group, ()), bits & whole)
    users = {user: bits & whole for kind, bits, user in entries if kind == _USER}
    return Access(mode >> 6 & 0o7, mode & 0o7, status.st_uid, users, groups)


def rights_of(pid: int) -> Rights:
    """Of a process.

    Raises:
        OSError: It has ended, may not be looked at, or its users are not known.
    """
    status = read_file(f"{PROC}/{pid}/status")
    users, groups = (numbers(field_of(status, name)) for name in (b"Uid", b"Gid"))
    if len(users) != 4 or len(groups) != 4:
        raise OSError("its users are not known")
    of_all = set(groups) if len(set(groups)) == 1 else set()
    return Rights(
        users=frozenset(users),
        groups=frozenset(of_all.union(numbers(field_of(status, b"Groups")))),
        owners=frozenset(masters_of(pid)),
    )
