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
from argus.store.read.contents import HASHED, numbered_by_content
from argus.store.read.owners import KEYS, hosts_there, ranks_there, rows_there, runs_there
from argus.store.reader import query_columns
from argus.store.replay import NotLookedUp, replay, sent_before_s
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
_RANKS_OF_NO_HOST = frozenset({"communicators", "dumped_calls", "dumped_groups"})
MOST_PARTS = 10_000
"""Runs, and hosts in runs, of which one load takes rows whose author is not trusted: the store is asked for each. A
hundred nodes have fewer in a month."""
MOST_TEMPLATES = 100_000
"""Of a file whose author is not trusted, for the same reason. A host has two of each of 8,192 kernels at first."""
CLOCKS_S = 60.0
"""By how much the clock of who wrote such a spool may be ahead."""
WAIT_S = 5.0
"""For so long in all a load waits until the second of a run's number is over."""
MOST_NAME_BYTES = 4096
"""Of a job or a host in such a spool: a server takes questions of a bounded length."""
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
    of a run may bring its own. Rows of no host (names of kernels, communicators, stacks) go with them: names of kernels
    and stacks whose number is the hash of what they hold, and templates that are not there.

    Of runs that may still begin nothing is taken: whoever is given that number would find rows of others there.

    Rows of tables with ranks and no host (communicators, calls in dumps) are taken of ranks alone that the spool has
    brought of a host: such files come after the others.

    Args:
        folder: The spool. Its journal tells what it has brought before.
        store: Where to.
        identity: Of the store.
        brought: Lines of the journal: ``_line`` of each host in a run, of each run, and of each that it began.
    """

    def __init__(self, folder: Path, store: Store, identity: str, brought: set[str]) -> None:
        self._folder, self._store, self._identity, self._brought = folder, store, identity, brought
        self._named: set[tuple[str, int, str]] = set()
        self._hosts_there: dict[tuple[str, int, str], bool] = {}
        self._runs_there: dict[tuple[str, int], bool] = {}
        self._open: dict[tuple[str, int], bool] = {}
        self._wait_s = WAIT_S
        self._others: tuple[set[tuple[str, int]], pa.Table] | None = None
        """The runs of the last file with ranks, and which of these other hosts have."""

    @property
    def goes_on(self) -> bool:
        """Whether more may come of a run."""
        return any(self._open.values())

    def own_rows(self, file: Path, batch: spool.Spooled) -> pa.Table:
        """What is taken of a batch.

        Raises:
            ArgusError: It is not the author's to bring, or of more runs and hosts than a load takes.
        """
        columns = table_columns()[batch.table]
        if batch.table in _NO_TRACE or not {"job", "run"} <= columns.keys():
            raise _not_trusted(f"{file.name} is for {batch.table}, which no trace writes to a spool")
        of: list[str] = [name for name in ("job", "run", "host", "rank") if name in columns]
        if not set(batch.rows.column_names).issuperset(of):
            raise _not_trusted(f"{file.name} does not say whose its rows are")
        keys = _distinct(batch.rows, of)
        parts = self._parts(file, keys)
        runs = {(job, run) for job, run, _ in parts}
        self._check_time(file, runs)
        _check_content(file, batch)
        lines = self._of_hosts(file, parts) if "host" in columns else self._of_runs(file, runs, batch.table)
        if "rank" in columns:
            self._check_ranks(file, keys, runs)
        rows = batch.rows
        if batch.table == "kernel_templates" or (batch.table == "stacks" and not numbered_by_content("stacks", rows)):
            rows = self._new_rows(file, batch)
        # Before the first row is there: a load that is killed goes on later.
        self._note(lines)
        if batch.table == "jobs" and "ended" in batch.rows.column_names:
            goes_on = {"job": batch.rows["job"], "run": batch.rows["run"], "on": batch.rows["ended"].is_null()}
            newest = _plain(pa.table(goes_on)).group_by(["job", "run"], use_threads=False).aggregate([("on", "last")])
            self._open |= {(one["job"], one["run"]): one["on_last"] for one in newest.to_pylist()}
        left_out = {"stored", *_OURS.get(batch.table, ())}
        return rows.select([name for name in rows.column_names if name not in left_out])

    def _check_time(self, file: Path, runs: set[tuple[str, int]]) -> None:
        """No run may be one that a trace or an import will get, or a job that starts again.

        Raises:
            ArgusError: It may be.
        """
        job, run = max(runs, key=lambda one: one[1], default=("", 0))
        if 0 < (ahead_s := run + 1 - time.time()) <= self._wait_s:  # it was made just now
            self._wait_s -= ahead_s
            time.sleep(ahead_s)
        if (ahead_s := run + 1 - time.time()) > CLOCKS_S:
            why = "whose number is a time to come, which a trace that begins then would get"
            raise _not_trusted(f"{file.name} has rows of {_where(job, run)}, {why}")
        if ahead_s > 0:
            raise ArgusError(f"{file.name} has rows of {_where(job, run)}, which begins only now: load it in a minute")

    def _new_rows(self, file: Path, batch: spool.Spooled) -> pa.Table:
        """Rows that the store lacks, where it cannot be seen that their number is of what they hold: what templates
        were made from is not stored, nor are folders of stacks with ``--redact paths``. Those that are there stay,
        since others' rows refer to them; whoever brings one again brings the same."""
        of = KEYS[batch.table]
        keys = _distinct(batch.rows, list(of))
        if keys.num_rows > MOST_TEMPLATES:
            what = "templates" if batch.table == "kernel_templates" else batch.table
            raise _not_trusted(f"{file.name} has more than {MOST_TEMPLATES:,} {what}")
        asked = [tuple(one[name] for name in of) for one in keys.to_pylist()]
        if not (there := rows_there(self._store, batch.table, asked)):
            return batch.rows
        brought = zip(*(batch.rows[name].to_pylist() for name in of), strict=True)
        return batch.rows.filter(pa.array([key not in there for key in brought], pa.bool_()))

    def _parts(self, file: Path, keys: pa.Table) -> list[tuple[str, int, str]]:
        """The hosts' parts of runs that a batch has rows of, in order; without a name where its table has no host."""
        of: list[str] = [name for name in ("job", "run", "host") if name in keys.column_names]
        found = _distinct(keys, of)
        if found.num_rows > MOST_PARTS:
            raise _not_trusted(f"{file.name} has rows of more than {MOST_PARTS:,} hosts and runs")
        for name in {"job", "host"} & set(of):
            if (pc.max(pc.binary_length(found[name])).as_py() or 0) > MOST_NAME_BYTES:
                raise _not_trusted(f"{file.name} has the name of a {name} of more than {MOST_NAME_BYTES:,} bytes")
        parts = sorted((one["job"], one["run"], one.get("host", "")) for one in found.to_pylist())
        if len(self._named) + len(set(parts) - self._named) > MOST_PARTS:
            rest = "load the spool again for what is left"
            raise ArgusError(f"{file.name} brings this load beyond {MOST_PARTS:,} hosts and runs: {rest}")
        self._named.update(parts)
        return parts

    def _of_hosts(self, file: Path, parts: list[tuple[str, int, str]]) -> list[str]:
        """Lines for the journal of hosts' parts of runs that are the spool's.

        Raises:
            ArgusError: One is not.
        """
        new = {part for part in parts if _line(*part) not in self._brought}
        if unknown := new - self._hosts_there.keys():
            there = hosts_there(self._store, unknown)
            self._hosts_there |= {part: part in there for part in unknown}
        for job, run, host in parts:
            if (job, run, host) in new and self._hosts_there[job, run, host]:
                raise _not_trusted(f"{file.name} has rows of {_where(job, run, host)}, which are there")
        for job, run, host in parts:
            self._open[job, run] = (job, run, host) in new or self._open.get((job, run), True)
        begun = self._begun({(job, run) for job, run, _ in new})
        lines = [_line(job, run, begun=True) for job, run in begun]
        return lines + [line for job, run, host in new for line in (_line(job, run), _line(job, run, host))]

    def _of_runs(self, file: Path, runs: set[tuple[str, int]], table: str) -> list[str]:
        """The same of runs, for rows of no host."""
        begun = self._begun(runs)
        for job, run in sorted(runs - begun):
            if table in _OF_ALL_HOSTS or _line(job, run) not in self._brought:
                raise _not_trusted(f"{file.name} has rows of {_where(job, run)}, which are there")
        return [line for job, run in begun for line in (_line(job, run, begun=True), _line(job, run))]

    def _begun(self, runs: set[tuple[str, int]]) -> set[tuple[str, int]]:
        """Runs of which the store had nothing before this spool."""
        begun = {(job, run) for job, run in runs if _line(job, run, begun=True) in self._brought}
        new = {(job, run) for job, run in runs - begun if _line(job, run) not in self._brought}
        if unknown := new - self._runs_there.keys():
            there = runs_there(self._store, unknown)
            self._runs_there |= {one: one in there for one in unknown}
        return begun | {one for one in new if not self._runs_there[one]}

    def _check_ranks(self, file: Path, keys: pa.Table, runs: set[tuple[str, int]]) -> None:
        """Of rows of no host each rank must be one that the spool has brought of a host before.

        Raises:
            ArgusError: A rank is that of another host, or of none.
        """
        of = ["job", "run", "rank"]
        if self._others is None or self._others[0] != runs:
            # Kept: of others none becomes the spool's, and most files are of the same runs.
            self._others = runs, self._by_whose(ranks_there(self._store, runs))[1]
        others = self._others[1]
        if (theirs := keys.join(others, of, join_type="left semi")).num_rows:
            where = _where(**theirs.drop_columns(["rank"]).slice(0, 1).to_pylist()[0])
            raise _not_trusted(f"{file.name} has ranks of {where} that another host has")
        if "host" in keys.column_names:
            return
        ours, _ = self._by_whose(ranks_there(self._store, runs))
        if (nobodys := keys.join(ours, of, join_type="left anti")).num_rows:
            where = _where(**nobodys.drop_columns(["rank"]).slice(0, 1).to_pylist()[0])
            raise _not_trusted(f"{file.name} has ranks of {where} that the spool has brought of no host")

    def _by_whose(self, stored: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Ranks that the spool has brought, and others'."""
        hosts = _distinct(stored, ["job", "run", "host"])
        brought = [_line(**one) in self._brought for one in hosts.to_pylist()]
        ours, others = (
            _distinct(stored.join(hosts.filter(pa.array([own == wanted for own in brought], pa.bool_())),
                                  ["job", "run", "host"], join_type="left semi"), ["job", "run", "rank"])
            for wanted in (True, False)
        )  # fmt: skip
        return ours, others

    def _note(self, lines: list[str]) -> None:
        new = [line for line in dict.fromkeys(lines) if line not in self._brought]
        if new:
            _note(self._folder, self._identity, *new)
            self._brought.update(new)


def _check_content(file: Path, batch: spool.Spooled) -> None:
    """Rows that are named by a hash must be what it is of: others refer to them.

    Raises:
        ArgusError: They are not.
    """
    wanted = set(KEYS.get(batch.table, ()))
    if batch.table in HASHED:
        wanted = {name for name, column in table_columns()[batch.table].items() if not column.optional}
    if not wanted <= set(batch.rows.column_names):
        raise _not_trusted(f"{file.name} lacks columns of {batch.table}")
    if batch.table not in KEYS and not numbered_by_content(batch.table, batch.rows):
        raise _not_trusted(f"{file.name} has rows of {batch.table} whose number is not that of what they hold")


def _distinct(rows: pa.Table, of: list[str]) -> pa.Table:
    """The different values of some columns."""
    return _plain(rows.select(of)).group_by(of).aggregate([])


def _plain(rows: pa.Table) -> pa.Table:
    """Rows without dictionaries, by which Arrow does not group."""
    kinds = [field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in rows.schema]
    return rows.cast(pa.schema(list(zip(rows.column_names, kinds, strict=True))))


def _where(job: str, run: int, host: str | None = None) -> str:
    return f"run {run} of job '{named(job)}'" + ("" if host is None else f" on host {named(host)}")


def _line(job: str, run: int, host: str | None = None, *, begun: bool = False) -> str:
    """How the journal names a host's part of a run, a run of which something was brought, or one that was begun. No
    token has a space in it."""
    return f"run {hashlib.sha256(repr((run, job, host, begun)).encode(errors='replace')).hexdigest()}"


def _not_trusted(reason: str) -> ArgusError:
    return ArgusError(f"{reason}: --trusted loads it if whoever wrote the spool is trusted")


def load_spool(
    folder: Path, store: Store, *, remove: bool = False, trusted: bool = True, progress: Callable[[int, int], None]
) -> Loaded:
    """Sends the files of a spool to a store, in the order they were written. If its author is not trusted, those with
    ranks of no host come last.

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
        if author is not None:
            batches.sort(key=lambda file: spool.table_of(file) in _RANKS_OF_NO_HOST)
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
                    if not batch.rows.num_rows:
                        pass
                    elif again or batch.table not in asked:
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
                if transient(failure) and not _of_its_rows(store, failure):
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


def _of_its_rows(store: Store, failure: ArgusError) -> bool:
    """Whether a store could not look for a batch for what is in it: it answers other questions."""
    if not isinstance(failure, NotLookedUp):
        return False
    try:
        query_columns(store, "SELECT 1 AS one")
    except ArgusError:
        return False
    return True


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


def _note(folder: Path, identity: str, *tokens: str) -> None:
    # A folder that may only be read can be loaded too; the next time, its batches are looked for in the store.
    with contextlib.suppress(OSError), files.opened(folder) as fd:
        files.append_at(fd, _JOURNAL, "".join(f"{identity} {token}\n" for token in tokens).encode())


def load_spilled(
    store: Store,
    folder: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, files: None,
) -> Loaded:
    """Stores what writers that are gone have left on disk for a store. Files that cannot be stored are set aside.

    Args:
        store: Where to. An embedded one is made if there is something to load.
        folder: The store's folder (``spill.place``), or another one's, where it was copied from: whoever wrote it is
            trusted, since a run of which the store has rows already is brought to its end by it.
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
                    if replay(store, batch, sent_before_s(file, batch), LEASE_TIMEOUT_S):
                        result.rows[batch.table] += batch.rows.num_rows
                        result.files += 1
                    else:
                        result.known += 1
                except ArgusError as failure:
                    if _of_its_rows(store, failure):
                        result.trouble.append(f"{file.name}: {failure.message} (it stays)")
                        continue
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
