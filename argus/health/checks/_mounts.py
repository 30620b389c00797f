"""Mounts of this node, from /proc/self/mountinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from argus.health.check import Look

NETWORK = ("nfs", "nfs4", "lustre", "cifs", "ceph", "gpfs", "beegfs", "fuse.glusterfs", "wekafs")
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "vfat")
IMAGE = r"(loop|nbd|z?ram|sr|fd|ublkb)\d+(p\d+)?"
"""Devices behind which there is an image, memory, a medium or a program: often a user's, which a program with root's
rights has mounted (Singularity, udisks), and any user can make one that is broken, read-only or full."""


@dataclass(frozen=True)
class Mount:
    """A mount: where, what, and whether its file system (not only this mount) is read-only."""

    path: str
    type: str
    device: str
    read_only: bool
    """Of the file system, or of the mount itself."""
    file_system_read_only: bool

    @property
    def is_image(self) -> bool:
        """Whether what is mounted may be a user's image, ``IMAGE``."""
        return self.device.startswith("/dev/") and is_image(self.device.removeprefix("/dev/"))


def is_image(name: str) -> bool:
    """Whether a block device, such as "nbd0", may have a user's image behind it, ``IMAGE``."""
    return re.fullmatch(IMAGE, name) is not None


def mounts(look: Look) -> list[Mount]:
    """All mounts but users' own; of several at one place only the last one can be seen. proc(5) has the format."""
    by_place = {}
    # The kernel escapes blank, tab, end of a line and backslash in names: whatever else ends a line is part of one.
    for line in look.read(f"proc/{'self' if look.root == Path('/') else 1}/mountinfo").split("\n"):
        left, _, right = line.partition(" - ")
        words, behind = left.split(" "), right.split(" ")  # a source may be empty
        if len(words) < 6 or len(behind) < 3:
            continue
        if behind[0].startswith("fuse") and re.search(r"(?:^|,)user_id=0*[1-9]", behind[2]):
            continue  # what it answers is up to that user: it is no disk of the node
        path = unescaped(words[4])
        whole = "ro" in behind[2].split(",")
        by_place[path] = Mount(path, behind[0], behind[1], whole or "ro" in words[5].split(","), whole)
    return list(by_place.values())


def unescaped(path: str) -> str:
    """A path in mountinfo or fstab(5): blanks, tabs, line breaks and backslashes are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
