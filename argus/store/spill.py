"""Where a writer puts rows while its store is away: files of a spool, in a folder that one process owns at a time.

::

    <root>/<kind>-<where>-<hash>/        one folder a store: chdb-var-lib-argus-1f2e3d4c
        <session>/                       one folder a writer; whoever holds the lock on ``owner`` owns what is in it
            owner                        locked (flock) while the writer lives: the kernel lets go when it is killed
            000017-launches.arrow        a batch (``spool.py``), with its deduplication token and a checksum
        aside/                           files that are damaged, or that the store refuses; nobody reads them by itself

A folder whose lock can be had belongs to a writer that is dead or done: the next one takes the lock and stores what is
there, each batch under its own token. Two can never have it at once, and nothing depends on process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import limits, spool
from argus.store.url import Target
from argus.system import files

MAX_BYTES = 4 << 30
"""What the batches for one store may take up on disk, of all writers together. An hour of ten hosts' rows at the volume
of README.md, or a night of one's; small beside the disk of a node with GPUs."""
_OWNER, _ASIDE, _NEW = "owner", "aside", ".new"
_RECOUNT_S = 30.0
"""How long the space that other writers use is believed to be what it was."""


@dataclass(frozen=True)
class Place:
    """Where batches for a store go."""

    folder: Path
    """The store's folder; it is made when the first batch comes."""
    max_bytes: int


def place(target: Target) -> Place | None:
    """Where batches for a store go while it is away.

    ``ARGUS_SPILL_DIR`` names the root (``off``: memory only); otherwise it is ``/var/spool/argus`` for root, else
    ``$XDG_STATE_HOME/argus/spill`` or ``~/.local/state/argus/spill``. Never beside an embedded store: what is
    wrong with that one is most often its disk. ``ARGUS_SPILL_MAX`` bounds it: ``500M``, ``20G``.

    Returns:
        None where nothing is spilled: it was switched off, or the store is a spool itself.

    Raises:
        ArgusError: A variable's value is wrong.
    """
    root = os.environ.get("ARGUS_SPILL_DIR", "")
    if target.spool is not None or root.lower() in ("off", "none"):
        return None
    if root and not os.path.isabs(root):
        raise ArgusError(
            f"ARGUS_SPILL_DIR is '{root}', which is no absolute path", "Write an absolute path, or off", EXIT_USAGE
        )
    return Place(Path(root or _default_root()) / _name(target), limits.bytes_from("ARGUS_SPILL_MAX", MAX_BYTES))


def _default_root() -> str:
    if os.geteuid() == 0:
        return "/var/spool/argus"
    return os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "argus", "spill")


def _name(target: Target) -> str:
    """One name a store, however its URL is written: neither user nor TLS make it another one."""
    where = f"chdb:{target.path}" if target.path else f"clickhouse:{target.host}:{target.port}/{target.database}"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", where).strip("-")[:60]
    return f"{readable}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Waiting:
    """What waits on disk for a store."""

    folder: str
    files: int = 0
    bytes: int = 0
    writers: int = 0
    """Folders whose writer still lives."""
    aside: int = 0
    """Files that could not be stored: damaged, or refused by the store."""


class Folder:
    """A folder of batches that this process owns, its own or that of a writer that is gone."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._number = 0

    def write(self, table: str, token: str, rows: object, *, sent_s: float) -> tuple[Path, int]:
        """Writes a batch so that it outlives a power cut. Returns the file and its size, bytes.

        ``sent_s`` is when it was first sent, Unix time; 0: it was not.

        Raises:
            ArgusError: There is no room, or the folder cannot be written to.
        """
        file = spool.write(self.path, table, token, rows, sent_s=sent_s, number=self._number + 1, sync=True)
        self._number = int(file.name.split("-")[0])
        return file, file.stat().st_size

    def files(self) -> list[Path]:
        """The batches, in the order they were written."""
        return [file for _, file in spool.batch_files(self.path)]

    def set_aside(self, file: Path) -> Path:
        """Moves a file away that cannot be stored. Returns where it is now."""
        aside = self.path.parent / _ASIDE
        with contextlib.suppress(OSError):
            aside.mkdir(mode=0o700, exist_ok=True)
        moved = aside / f"{self.path.name}-{file.name}"
        with contextlib.suppress(OSError):
            file.rename(moved)
        return moved

    def close(self) -> None:
        """Lets go of the folder. What is in it waits for the next writer; an empty one is removed."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                if name.endswith(".part"):  # cut short by a kill or a full disk: never acknowledged
                    os.unlink(self.path / name)
            if os.listdir(self.path) == [_OWNER]:
                os.unlink(self.path / _OWNER)
                os.rmdir(self.path)
                os.rmdir(self.path.parent)
        os.close(self._lock)


def create(where: Place, session: str) -> Folder:
    """Makes a writer's own folder.

    Raises:
        ArgusError: It cannot be made, or belongs to somebody else.
    """
    try:
        path, lock = where.folder / session, None
        while lock is None:
            with files.opened(where.folder, create=True) as folder:
                lock = _made(folder, path)
                os.fsync(folder)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise ArgusError(
            f"cannot spill to {where.folder}: {reason}", "Name another place: ARGUS_SPILL_DIR", EXIT_UNAVAILABLE
        ) from None
    return Folder(path, lock)


def _made(folder: int, path: Path) -> int | None:
    """Makes a writer's folder, and returns the lock on it; None: it was tidied away meanwhile."""
    # Locked before it has its name: whoever looks for abandoned folders must never see one that is just being made.
    new, lock = f"{_NEW}-{uuid.uuid4().hex}", -1
    try:
        os.mkdir(new, 0o700, dir_fd=folder)
        made = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            lock = files.open_at(made, _OWNER, os.O_RDWR | os.O_CREAT)
        finally:
            os.close(made)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()}\n".encode())
        os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as failure:
        if lock >= 0:
            os.close(lock)
        if isinstance(failure, FileNotFoundError):
            return None
        raise
    return lock


def _tidy(folder: Path) -> None:
    """Removes folders whose makers were killed before they gave them their names. Who loses one so that it is just
    making notices, since it can no longer be named, and makes another."""
    for path in _listed(folder):
        if path.name.startswith(_NEW):
            if (found := lock(path)) is not None:
                found.close()
            with contextlib.suppress(OSError):  # what has an owner is not empty
                os.rmdir(path)


def lock(path: Path) -> Folder | None:
    """Takes over a writer's folder; None while its owner lives, or where it is none."""
    try:
        with files.opened(path) as folder:
            held = files.open_at(folder, _OWNER, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its former owner may have emptied and removed it between the two calls.
        if os.stat(path / _OWNER).st_ino == os.fstat(held).st_ino:
            return Folder(path, held)
    except OSError:
        pass
    os.close(held)
    return None


def is_root(folder: Path) -> bool:
    """Whether a folder is one with writers' folders in it."""
    return any(owned(path) for path in _sessions(folder))


def owned(path: Path) -> bool:
    """Whether a folder is a writer's (and not a plain spool)."""
    return (path / _OWNER).exists()


def abandoned(folder: Path) -> Iterator[Folder]:
    """Takes over, one after the other, the folders whose writers are gone. Each must be closed."""
    _tidy(folder)
    for path in _sessions(folder):
        if (found := lock(path)) is not None:
            yield found


def _sessions(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if path.name != _ASIDE and not path.name.startswith(_NEW)]


def _listed(folder: Path) -> list[Path]:
    try:
        with files.opened(folder) as fd:  # what others put there is not believed
            return [folder / name for name in sorted(os.listdir(fd))]
    except OSError:
        return []


def waiting(folder: Path) -> Waiting:
    """What waits on disk in a store's folder."""
    files = size = writers = 0
    for path in _sessions(folder):
        for _, file in spool.batch_files(path):
            with contextlib.suppress(OSError):
                size += file.stat().st_size
                files += 1
        if owned(path) and (found := lock(path)) is None:
            writers += 1
        elif owned(path) and found is not None:
            found.close()
    aside = 0
    with contextlib.suppress(OSError):
        aside = len(os.listdir(folder / _ASIDE))
    return Waiting(str(folder), files, size, writers, aside)


class Others:
    """The space that other writers' batches take up: measured now and then, since only the sum has a bound.

    There may be hundreds of thousands of files: a folder is listed only if it has changed since, and only files that
    were not there are looked at.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._measured = -_RECOUNT_S
        self._bytes = 0
        self._known: dict[Path, tuple[int, dict[str, int]]] = {}
        """Of each folder: when it had changed last (``changed_ns``), and the size of its batches."""

    def bytes(self, own: Path | None) -> int:
        """Bytes of all folders but ``own``, at most 30 s old."""
        if time.monotonic() - self._measured >= _RECOUNT_S:
            self._measured = time.monotonic()
            known, self._known = self._known, {}
            for path in _sessions(self._folder):
                if path != own:
                    changed, sizes = known.get(path, (-1, {}))
                    # Asked before it is listed: what comes in between is seen the next time.
                    if (now := changed_ns(path)) != changed:
                        sizes = {name: sizes.get(name) or _size(path / name) for _, name in spool.names(path)}
                    # Clocks of file systems are coarse: of a folder that changes now, the next change may not show.
                    self._known[path] = now if time.time_ns() - now > 1_000_000_000 else -1, sizes
            self._bytes = sum(sum(sizes.values()) for _, sizes in self._known.values())
        return self._bytes


def changed_ns(folder: Path) -> int:
    """When a file of a folder was made or taken away last, as the file system has it; -1: not known."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return -1


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
