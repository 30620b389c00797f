"""Loads what was left on disk into a store: spools, and what writers that are gone have spilled."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import named
from argus.store import spill, spool
from argus.store.failures import transient
from argus.store.open import LEASE_TIMEOUT_S, Store
from argus.store.reader import query_columns
from argus.store.replay import replay, sent_before_s
from argus.store.schema import ensure_schema
from argus.store.schema_files import table_columns
from argus.system import files

_MAX_JOURNAL_BYTES = 64 << 20
"""Of half a million files."""
_JOURNAL = ".loaded"
"""Which files are in which store. A store itself remembers only the newest 1000 tokens of a table, and of those with a
partition for each day of storing only that day's."""


_NO_TRACE = frozenset({
    "baselines", "clocks", "findings", "group_joins", "health", "health_figures", "host_names", "iteration_rollup",
    "raw_requests", "step_shifts",
})  # fmt: skip
"""Tables that no trace or import into a spool writes: what Argus concluded, and what it has of nodes."""
_OF_ALL_HOSTS = frozenset({"dumped_calls", "dumped_groups", "parallel_layout"})
"""Tables of no host that say something of all: for runs alone that the spool began."""
_OURS = {"ranks": ("uid", "container")}
"""Columns whose content Argus alone vouches for, by table, besides when a row was stored: whose a run is decides what
it is compared with."""


@dataclass
class Loaded:
    """What became of a spool's files."""

    rows: Counter[str] = field(default_factory=Counter)
    """Rows that were sent, by table."""
    files: int = 0
    known: int = 0
    """Files that had been loaded into this store before."""
    unfinished: int = 0
    """Files whose writer was killed, or still writes."""
    trouble: list[str] = field(default_factory=list)
    """A line for each file that could not be loaded."""


def check_target(store: Store) -> None:
    """Refuses to load files into files.

    Raises:
        ArgusError: The store is a spool itself.
    """
    if store.spooled:
        raise ArgusError(f"{store.url} is a spool itself", "Name a store: --store chdb:///folder", EXIT_USAGE)


class _Author:
    """What a spool may bring whose author is not trusted: rows of traces and imports, of what hosts did in runs of
    which the store had nothing before this spool was first loaded, and of ranks that no other host has. So each node
    of a run may bring its own. Rows of no host (names of kernels, communicators, stacks) go with them.

    Args:
        folder: The spool. Its journal tells what it has brought before.
        store: Where to.
        identity: Of the store.
        brought: Lines of the journal: ``_line`` of each host in a run, of each run, and of each that it began.
    """

    def __init__(self, folder: Path, store: Store, identity: str, brought: set[str]) -> None:
        self._folder, self._store, self._identity, self._brought = folder, store, identity, brought
        self._refused: set[tuple[str, int, str]] = set()
        self._open: dict[tuple[str, int], bool] = {}
        self._ranks_of_others: dict[tuple[str, int], set[int]] = {}

    @property
    def goes_on(self) -> bool:
        """Whether more may come of a run."""
        return any(self._open.values())

    def own_rows(self, file: Path, batch: spool.Spooled) -> pa.Table:
        """What is taken of a batch.

        Raises:
            ArgusError: It is not the author's to bring.
        """
        columns = table_columns()[batch.table]
        if batch.table in _NO_TRACE or not {"job", "run"} <= columns.keys():
            raise _not_trusted(f"{file.name} is for {batch.table}, which no trace writes to a spool")
        of = [name for name in ("job", "run", "host") if name in columns]
        there = set(batch.rows.column_names)
        if not there.issuperset(of) or any(batch.rows.column(name).null_count for name in of):
            raise _not_trusted(f"{file.name} does not say whose its rows are")
        for one in batch.rows.select(of).group_by(of).aggregate([]).to_pylist():
            job, run, host = str(one["job"]), int(one["run"]), str(one.get("host", ""))
            where = f"run {run} of job '{named(job)}'" + (f" on host {named(host)}" if "host" in of else "")
            own = self._is_own(job, run, host) if "host" in of else self._may_add(job, run, batch.table)
            if not own:
                raise _not_trusted(f"{file.name} has rows of {where}, which are there")
            if {"rank", "host"} <= there:
                ranks = batch.rows.filter((pc.field("job") == one["job"]) & (pc.field("run") == one["run"]))["rank"]
                if self._others_ranks(job, run) & set(ranks.unique().to_pylist()):
                    raise _not_trusted(f"{file.name} has ranks of {where} that another host has")
        if batch.table == "jobs" and "ended" in there:
            goes_on = batch.rows.column("ended").is_null().to_pylist()
            for one, still in zip(batch.rows.select(["job", "run"]).to_pylist(), goes_on, strict=True):
                self._open[str(one["job"]), int(one["run"])] = still
        left_out = {"stored", *_OURS.get(batch.table, ())}
        return batch.rows.select([name for name in batch.rows.column_names if name not in left_out])

    def _is_own(self, job: str, run: int, host: str) -> bool:
        if _line(job, run, host) in self._brought:
            self._open.setdefault((job, run), True)
            return True
        if (job, run, host) in self._refused:
            return False
        if _has_rows(self._store, job, run, host):
            self._refused.add((job, run, host))
            return False
        self._begins(job, run)
        self._note(_line(job, run), _line(job, run, host))
        self._open[job, run] = True
        return True

    def _may_add(self, job: str, run: int, table: str) -> bool:
        """Whether it may bring rows of no host."""
        begun = self._begins(job, run)
        return begun or (table not in _OF_ALL_HOSTS and _line(job, run) in self._brought)

    def _begins(self, job: str, run: int) -> bool:
        """Whether the store had nothing of a run before this spool."""
        line = _line(job, run, begun=True)
        if line not in self._brought and _line(job, run) not in self._brought and not _has_rows(self._store, job, run):
            self._note(line, _line(job, run))
        return line in self._brought

    def _note(self, *lines: str) -> None:
        """Before the first row is there: a load that is killed goes on later."""
        for line in lines:
            if line not in self._brought:
                _note(self._folder, self._identity, line)
                self._brought.add(line)

    def _others_ranks(self, job: str, run: int) -> set[int]:
        """Ranks of a run on hosts that this spool has not brought."""
        if (job, run) not in self._ranks_of_others:
            text = "SELECT DISTINCT rank, host FROM ranks WHERE job = {job:String} AND run = {run:UInt32}"
            rows = query_columns(self._store, text, {"job": job, "run": run})
            both = zip(rows["rank"].tolist(), rows["host"].tolist(), strict=True)
            others = {int(rank) for rank, host in both if _line(job, run, str(host)) not in self._brought}
            self._ranks_of_others[job, run] = others
        return self._ranks_of_others[job, run]


def _line(job: str, run: int, host: str | None = None, *, begun: bool = False) -> str:
    """How the journal names a host's part of a run, a run of which something was brought, or one that was begun. No
    token has a space in it."""
    return f"run {hashlib.sha256(repr((run, job, host, begun)).encode(errors='replace')).hexdigest()}"


def _has_rows(store: Store, job: str, run: int, host: str | None = None) -> bool:
    """Whether any table has rows of a run, or of a host in it."""
    of, where = {"job", "run"}, "job = {job:String} AND run = {run:UInt32}"
    if host is not None:
        of, where = of | {"host"}, f"{where} AND host = {{host:String}}"
    tables = [name for name, columns in table_columns().items() if of <= columns.keys()]
    each = " UNION ALL ".join(f"(SELECT 1 AS n FROM `{name}` WHERE {where} LIMIT 1)" for name in tables)
    return bool(len(query_columns(store, each, {"job": job, "run": run, "host": host or ""})["n"]))


def _not_trusted(reason: str) -> ArgusError:
    return ArgusError(f"{reason}: --trusted loads it if whoever wrote the spool is trusted")


def load_spool(
    folder: Path, store: Store, *, remove: bool = False, trusted: bool = True, progress: Callable[[int, int], None]
) -> Loaded:
    """Sends the files of a spool to a store, in the order they were written.

    Args:
        folder: The spool.
        store: Where to. An embedded one is made if there is something to load.
        remove: Delete each file once it is stored.
        trusted: Whether its author is: all that it holds is stored as it is. Otherwise only rows of traces and imports
            are, of what hosts did in runs of which the store has nothing but from this spool.
        progress: Called with (files done, files in all) before each file and at the end.

    Raises:
        ArgusError: There is no such folder, it holds no file of a spool, or the store cannot be reached.
    """
    check_target(store)
    with _alone(folder):
        if folder.is_dir():
            os.close(_readable(folder))
        batches = [file for _, file in spool.batch_files(folder)]
        if not batches:
            what = "holds no file of a spool" if folder.is_dir() else "is no folder"
            raise ArgusError(f"{folder} {what}", "Give the folder of a spool:///folder", EXIT_UNAVAILABLE)
        ensure_schema(store)
        result = Loaded(unfinished=sum(name.endswith(spool.UNFINISHED) for name in os.listdir(folder)))
        identity = _identity(store)
        loaded_before, noted = _journal(folder, identity)
        age_s = max(0.0, time.time() - noted) if noted else 0.0
        author = None if trusted else _Author(folder, store, identity, loaded_before)
        asked: set[str] = set()
        again = False
        for done, file in enumerate(batches):
            progress(done, len(batches))
            try:
                batch = spool.read(file)
                known = batch.token in loaded_before
                if not known and author is not None:
                    batch = replace(batch, rows=author.own_rows(file, batch))
                if not known:
                    # A load that was killed, or could not write its journal, may have stored batches that the journal
                    # lacks. They are the first ones: one of each table is looked up, and if it is there, each.
                    if again or batch.table not in asked:
                        asked.add(batch.table)
                        known = not replay(store, replace(batch, doubt=True), age_s, LEASE_TIMEOUT_S)
                        again |= known
                    else:
                        store.insert(batch.table, batch.rows, batch.token)
                    _note(folder, identity, batch.token)
                result.known += known
                result.files += not known
                if not known:
                    result.rows[batch.table] += batch.rows.num_rows
            except ArgusError as failure:
                if transient(failure):
                    raise
                reason = failure.message if failure.message.startswith(file.name) else f"{file.name}: {failure.message}"
                result.trouble.append(reason)
                continue
            if remove:
                file.unlink()
        progress(len(batches), len(batches))
        if remove and not result.trouble and not (author is not None and author.goes_on):
            (folder / _JOURNAL).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
    return result


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps others from loading a folder at the same time: the one behind would send what the store has forgotten.

    Raises:
        ArgusError: Somebody loads it.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        fd = -1  # whoever lists it says what is wrong
    try:
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgusError(
                    f"{folder} is being loaded by another process",
                    "Wait for it; what it has loaded will not be loaded again",
                    EXIT_UNAVAILABLE,
                ) from None
            except OSError:
                pass  # a file system without locks
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _readable(folder: Path) -> int:
    """A descriptor of a spool's folder that is to be loaded.

    Raises:
        ArgusError: It cannot be read, or others may change it.
    """
    try:
        return files.open_folder(folder)
    except files.Untrusted as failure:
        hint = failure.fix or "Name the folder itself"
        raise ArgusError(f"{folder} is not loaded: {failure.strerror}", hint, EXIT_UNAVAILABLE) from None
    except OSError as failure:
        raise ArgusError(f"cannot read the folder {folder}: {failure.strerror}", "", EXIT_UNAVAILABLE) from None


def _identity(store: Store) -> str:
    """What distinguishes this store from one that was made at the same place later."""
    with store.lease() as client:
        return str(client.command("SELECT min(toUnixTimestamp64Milli(applied)) FROM schema_migrations"))


def _journal(folder: Path, identity: str) -> tuple[set[str], float]:
    """The tokens that were loaded into a store, and when the newest was, Unix time; 0: none."""
    try:
        with files.opened(folder) as fd:
            lines = files.read_at(fd, _JOURNAL, _MAX_JOURNAL_BYTES).decode(errors="replace").splitlines()
            written = os.stat(_JOURNAL, dir_fd=fd, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return set(), 0.0
    except files.Untrusted as failure:
        # What is in the store would be sent again, and what others wrote there not at all.
        hint = f"Remove it: rm {folder / _JOURNAL}"
        raise ArgusError(f"{folder / _JOURNAL} is not used: {failure.strerror}", hint, EXIT_UNAVAILABLE) from None
    except OSError:
        return set(), 0.0
    tokens = {token for line in lines for at, _, token in [line.partition(" ")] if at == identity}
    return tokens, written if tokens else 0.0


def _note(folder: Path, identity: str, token: str) -> None:
    # A folder that may only be read can be loaded too; the next time, its batches are looked for in the store.
    with contextlib.suppress(OSError), files.opened(folder) as fd:
        files.append_at(fd, _JOURNAL, f"{identity} {token}\n".encode())


def load_spilled(
    store: Store,
    folder: Path,
    *,
    trusted: bool = True,
    progress: Callable[[int, int], None] = lambda done, files: None,
) -> Loaded:
    """Stores what writers that are gone have left on disk for a store. Files that cannot be stored are set aside.

    Args:
        store: Where to. An embedded one is made if there is something to load.
        folder: The store's folder (``spill.place``), or another one's, where it was copied from.
        trusted: Whether it may hold what no trace writes: findings, baselines, health and names of nodes.
        progress: Called with (files done, files in all) before each file and at the end.

    Raises:
        ArgusError: The store cannot be reached, or is a spool itself.
    """
    check_target(store)
    result = Loaded()
    files, done = spill.waiting(folder).files, 0
    if files:
        ensure_schema(store)
    for abandoned in spill.abandoned(folder):
        try:
            for file in abandoned.files():
                progress(min(done, files - 1), files)
                done += 1
                try:
                    batch = spool.read(file, summed=True)
                    if not trusted and batch.table in _NO_TRACE:
                        foreign = _not_trusted(f"{file.name} is for {batch.table}, which no trace writes")
                        result.trouble.append(foreign.message)
                        continue
                    if replay(store, batch, sent_before_s(file, batch), LEASE_TIMEOUT_S):
                        result.rows[batch.table] += batch.rows.num_rows
                        result.files += 1
                    else:
                        result.known += 1
                except ArgusError as failure:
                    if transient(failure):
                        raise
                    reason = f"{failure.message} (set aside: {abandoned.set_aside(file)})"
                    result.trouble.append(reason)
                    continue
                file.unlink()
        finally:
            abandoned.close()
    if files:
        progress(files, files)
    return result
