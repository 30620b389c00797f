"""What was worked out once and is kept on disk for the next start: BPF programs, and where libraries have functions.

What Argus finds there ends up in the kernel, with root's rights. So only files are read that nobody but the user that
Argus runs as can have written, in a folder of the same kind, and whole (a checksum comes first). Anything else is no
error: it is worked out again. This module imports no numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from argus.system import files

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


def read(path: Path) -> bytes | None:
    """An entry's content; None: there is none that can be trusted. One that is read counts as new (``keep``)."""
    try:
        with files.opened(path.parent) as where:
            text = files.read_at(where, path.name, MAX_BYTES)
            checksum, _, body = text.partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != checksum:
                return None
            with contextlib.suppress(OSError):  # not every process that reads may write
                os.utime(path.name, dir_fd=where, follow_symlinks=False)
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
    with contextlib.suppress(OSError), files.opened(path.parent, create=True) as where:
        files.write_at(where, path.name, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        old_ns = int((time.time() - _LEFT_S) * 1e9)
        files.keep_newest(where, lambda name: name.startswith(files.UNFINISHED), 0, before_ns=old_ns)
        files.keep_newest(where, lambda name: name.endswith(path.suffix), newest)
