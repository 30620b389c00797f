"""Mounts: file systems that turned read-only, and errors that ext4 counted."""

from __future__ import annotations

from argus.health.check import Absent, Blind, Look, Result
from argus.health.checks._mounts import LOCAL, mounts, unescaped
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "writable": Limit(["/tmp"], "places that must be writable, whatever they are on", "jobs fail without"),
    "skip": Limit([], "mounts that may be read-only", "what /etc/fstab has as ro is left out anyway"),
}


def check(look: Look) -> Result:
    """With errors=remount-ro the first error makes a file system read-only: mountinfo has ``ro`` for all of it."""
    found = look.found()
    intended = {
        unescaped(words[1]) for line in _fstab(look) if len(words := line.split()) > 3 and "ro" in words[3].split(",")
    }
    every = {mount.path: mount for mount in mounts(look)}
    for mount in every.values():
        turned = mount.file_system_read_only and mount.type in LOCAL
        if turned and mount.path not in intended and mount.path not in look.limits["skip"]:
            text = f"{mount.path} ({mount.device}) is read-only"
            if mount.is_image:
                found.warning(text, "It had an error, or was mounted so: often a user's image (losetup -l).")
            else:
                found.critical(text, "It had an error: dmesg, then fsck and mount again.")
    for place in look.limits["writable"]:
        below = [path for path in every if place == path or place.startswith(path.rstrip("/") + "/")]
        if below and every[max(below, key=len)].read_only:
            found.critical(f"{place} cannot be written: {max(below, key=len)} is read-only", "Mount it again with rw.")
    for folder in look.folders("sys/fs/ext4/*/errors_count"):
        device = folder.parent.name
        found.figures[f"ext4_errors/{device}"] = float(look.optional(str(folder.relative_to(look.root))) or 0)
        if found.figures[f"ext4_errors/{device}"]:
            found.warning(f"{device}: ext4 has counted errors", "Run fsck; it also sets the count back.")
    return found.result(f"{len(every)} mounts are as they should be")


def _fstab(look: Look) -> list[str]:
    try:
        return look.read("etc/fstab").splitlines()
    except (Absent, Blind):
        return []
