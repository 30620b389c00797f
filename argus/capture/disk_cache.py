"""What was worked out once and is kept on disk for the next start: BPF programs, and where libraries have functions.

What Argus finds there ends up in the kernel, with root's rights. So only files are read that nobody but the user that
Argus runs as can have written, in a folder of the same kind, and whole (a checksum comes first). Anything else is no
error: it is worked out again. This module imports no numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

MAX_BYTES = 64 << 20
"""A larger file is not read: no entry is nearly as large."""
_LEFT_S = 3600
"""A file that was begun so long ago, and not finished, is the rest of an Argus that was killed."""


def folder(kind: str) -> Path | None:
    """Where entries of a kind are kept: in ``ARGUS_CACHE_DIR``, for root ``/var/cache/argus``, else
    ``$XDG_CACHE_HOME/argus`` or ``~/.cache/argus``. None: nowhere (``ARGUS_CACHE_DIR=off``)."""
    named = os.environ.get("ARGUS_CACHE_DIR", "")
    if named.lower() in ("off", "none"):
        return None
    if named:
        return Path(named) / kind
    if os.geteuid() == 0:
        return Path("/var/cache/argus") / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "argus" / kind


def _trusted(status: os.stat_result) -> bool:
    """What root loads into the kernel must be root's own."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(path: Path) -> bytes | None:
    """An entry's content; None: there is none that can be trusted. One that is read counts as new (``keep``)."""
    try:
        if not _trusted(path.parent.stat()):
            return None
        # Not to wait, should somebody have put a pipe there.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not _trusted(status) or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return None
            text = file.read(MAX_BYTES)
        checksum, _, body = text.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            return None
        os.utime(path)
    except (OSError, ValueError):
        return None
    return body


def keep(path: Path, body: bytes, newest: int) -> None:
    """Writes an entry, and removes the oldest of its kind. Where that fails the next start takes longer, no more.

    Args:
        path: In ``folder(kind)``, which is created; the suffix is the same for all entries of a kind.
        body: What to keep.
        newest: How many entries stay.
    """
    with contextlib.suppress(OSError):
        where = path.parent
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _trusted(where.stat()):
            return
        # With a name of its own until it is whole: two that start at once do not see half of each other's.
        handle, new = tempfile.mkstemp(dir=where, prefix=".new-")
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.rename(new, path)
        except BaseException:
            os.unlink(new)
            raise
        for left in where.glob(".new-*"):
            with contextlib.suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - _LEFT_S:
                    left.unlink()
        _forget_oldest(where, path.suffix, newest)


def _forget_oldest(where: Path, suffix: str, newest: int) -> None:
    ages = []
    for path in where.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # another Argus removes them, too
            ages.append((path.stat().st_mtime_ns, path))
    for _, old in sorted(ages, reverse=True)[newest:]:
        old.unlink(missing_ok=True)
