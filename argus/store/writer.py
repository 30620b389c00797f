"""Writes columns into a store without ever stopping whoever brings them.

``append`` copies rows into memory; batches go to the store one after the other, each under a token of its own, so that
a batch sent twice because the answer got lost is stored once. While the store is away batches go to disk
(``spill.py``), in the order they came, up to a limit; beyond it, and where there is no disk to be had, the oldest rows
are dropped, kernels and CUDA calls first, and counted.

A row is *acknowledged* once ``flush`` has returned True after it was appended, or its batch is on disk
(``rows_spilled``). What is acknowledged is stored exactly once, also when Argus or the store is killed: what a killed
writer left on disk is stored by the next writer that spills for the same store, or by ``argus store load``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import Owner
from argus.model.shares import Shares
from argus.model.units import elapsed
from argus.store import spill, spool
from argus.store.arrow import Values, cut, joined, to_arrow, without_folders
from argus.store.failures import is_forbidden, lacks_table, transient
from argus.store.open import Store
from argus.store.replay import ROLLED_UP, insert_again, look_up, replay, sent_before_s, token_forgotten
from argus.store.schema import ensure_schema
from argus.system import debug

FLUSH_ROWS = 200_000
"""A table with so many rows waiting is sent at once."""
BATCH_BYTES = 4 << 20
"""About the most that a batch has. While it is stored, the engine needs eight times as much (``scripts/bench store``):
the request, the file that the rows are read from, columns, buffers."""
FLUSH_S = 2.0
"""The longest that a row waits before it is sent: each batch is a part of the engine's, which keeps some 16 KB of it in
memory until it is merged."""
MAX_BYTES = 256 << 20
"""What may wait in memory."""
SPILL_BYTES = 64 << 20
"""So much in memory goes to disk also while the store takes rows, but too slowly."""
STUCK_S = 5.0
"""An insert that has had no answer for so long: what waits behind it goes to disk."""
ADOPT_S = 60.0
"""How often to look for what writers that are gone have left on disk."""
REFERS = {
    "kernel_summaries": ("kernel_groups", "kernel_templates"),
    "kernel_escapes": ("kernel_groups",),
    "kernel_spikes": ("kernel_groups",),
    "stack_samples": ("stacks",),
}
"""Tables whose rows say nothing without those of others, which are sent before them: a kill must not come between."""
PATHS_IN = ("ranks", "stacks", "features")
"""Tables whose texts hold paths of the traced processes."""
NEVER_REFUSED = frozenset({
    "jobs", "ranks", "coverage", "features", "signal_coverage", "environments", "kernel_groups", "kernel_templates",
    "communicators",
})  # fmt: skip
"""Tables without which rows of others say little, and whose rows come once: few, of a bounded number."""
FIRST_TO_DROP = ("kernel_events", "launches", "stack_samples")
"""The tables whose rows go first, in this order: by far the most, and the least of a loss each."""

_BACKOFF_S = (0.05, 5.0)
_LEASE_S = 5.0
_GRANT_S = 1.0
"""Once tries are so far apart, whoever waits for rows to be stored learns that its user has no right to."""


@dataclass(eq=False)
class _Batch:
    table: str
    token: str
    rows: pa.Table | None
    """None: they are on disk only."""
    count: int
    nbytes: int
    """In memory."""
    tries: int = 0
    doubt_since: float | None = None
    """``time.monotonic`` of the first time that it was sent and may have been stored; None: it was not."""
    sent_s: float = 0.0
    """The same as Unix time."""
    file: Path | None = None
    file_bytes: int = 0
    of: Counter[Owner] = field(default_factory=Counter)
    """Whose its bytes are."""


@dataclass(frozen=True)
class _Part:
    """Rows that are not in a batch yet. ``owner``: whose they are; None: nobody's. ``nbytes``: what they count as."""

    rows: pa.Table
    owner: Owner | None
    nbytes: int


def _in_batches(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Parts of the same columns as batches of ``BATCH_BYTES`` at most, in their order."""
    found: list[list[_Part]] = []
    size = 0
    for part in chain.from_iterable(map(_pieces, parts)):
        if not found or size + part.rows.nbytes > BATCH_BYTES:
            found.append([])
            size = 0
        found[-1].append(part)
        size += part.rows.nbytes
    return found


def _pieces(part: _Part) -> list[_Part]:
    pieces = cut(part.rows, BATCH_BYTES)
    ends = accumulate((piece.num_rows for piece in pieces), initial=0)
    counted = pairwise(part.nbytes * end // part.rows.num_rows for end in ends)
    return [_Part(piece, part.owner, end - begin) for piece, (begin, end) in zip(pieces, counted, strict=True)]


@dataclass(frozen=True)
class Report:
    """What became of the rows, by table."""

    written: dict[str, int] = field(default_factory=dict)
    """Rows the store has acknowledged."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that were lost: too much waited, the store refused them, or it was still away at the end."""
    last_error: str = ""
    """Why, in the store's last words; empty: nothing went wrong."""
    on_disk: dict[str, int] = field(default_factory=dict)
    """Rows that wait on disk for the store, and for whoever writes to it next."""


class JobOwners(Protocol):
    """Knows whose jobs are, by their names and runs.

    Attributes:
        several: Whether processes of several owners are traced.
    """

    several: bool

    def owner_of(self, job: str, run: int) -> Owner | None:
        """None: not known."""

    def count_refused(self, job: str, run: int, rows: int) -> None:
        """So many rows of a job were not taken."""


# Over 500 lines: the thread that sends and the callers share its lock and buffers.
class Writer:
    """Collects rows and stores them.

    One class of some 600 lines: rows in memory, on disk and on their way are one queue, under one lock, which two
    threads and every caller share.

    Used from one thread, ``maybe_flush`` and ``flush`` send in the calling thread. After ``start`` a thread of its own
    sends, and neither blocks. Every method may be called from any thread.

    Args:
        store: Where to; a writer needs no connection to be made or appended to.
        source: Who writes, for the tokens: say, ``trace/<host>``. Two writers may share it.
        max_bytes: What may wait in memory.
        flush_rows: A table with so many rows waiting is sent by the next ``maybe_flush``.
        flush_s: So is one whose oldest row has waited so long.
        place: Where batches go while the store is away (``spill.place``); None: they wait in memory.
        paths: Whether paths are stored whole; else rows of ``PATHS_IN`` have their last components only.

    Attributes:
        owners: Whose a job is. An owner that holds more of the room for rows than is free gets no more of it.
    """

    def __init__(
        self,
        store: Store,
        *,
        source: str,
        max_bytes: int = MAX_BYTES,
        flush_rows: int = FLUSH_ROWS,
        flush_s: float = FLUSH_S,
        place: spill.Place | None = None,
        paths: bool = True,
    ) -> None:
        self.store = store
        self.source = source
        self.max_bytes, self.flush_rows, self.flush_s = max_bytes, flush_rows, flush_s
        self.rows_written: Counter[str] = Counter()
        self.rows_dropped: Counter[str] = Counter()
        self.last_error: Exception | None = None
        # Of this writer alone: a second tracing session of the same source must not repeat the first one's tokens.
        self._session = uuid.uuid4().hex
        self._sequence: Counter[str] = Counter()
        self.owners: JobOwners | None = None
        self._shares = Shares()
        self._on_disk = self._others_on_disk = 0
        """Bytes of the spill, as of a moment ago: of this writer, and of others."""
        self._on_disk_due = 0.0
        self._pending: dict[str, list[_Part]] = {}
        self._pending_since: dict[str, float] = {}
        self._outbox: deque[_Batch] = deque()
        self._sending: _Batch | None = None
        self._bytes = 0
        self._backoff_s = 0.0
        self._not_before = 0.0
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._spiller: threading.Thread | None = None
        self._stop = False
        self.place, self._paths = place, paths
        self.spill_error: Exception | None = None
        self._folder: spill.Folder | None = None
        self._others = None if place is None else spill.Others(place.folder)
        self._spill_lock = threading.Lock()
        self._spill_not_before = 0.0
        self._sending_since = 0.0
        self._next_adoption = 0.0
        self._listed: dict[Path, tuple[int, deque[Path]]] = {}
        """The folder that was adopted last: when it had changed then, and what was left in it."""
        self._tally: Counter[str] = Counter()
        self._schema_ready = False

    @property
    def bytes_waiting(self) -> int:
        """Bytes of rows, in memory and on disk, that the store has not acknowledged."""
        with self._changed:
            return self._bytes + sum(batch.file_bytes for batch in self._outbox)

    @property
    def trouble(self) -> str:
        """Why rows cannot be stored at present; empty: they can."""
        if not self._backoff_s:
            stuck_s = self._stuck_s()
            return f"no answer to an insert for {elapsed(stuck_s)}" if stuck_s > STUCK_S else ""
        text: str = getattr(self.last_error, "message", str(self.last_error))
        if self.spill_error is not None:
            return f"{text}; rows wait in memory: {getattr(self.spill_error, 'message', self.spill_error)}"
        return text

    @property
    def spilled_to(self) -> str:
        """The folder on disk for rows of this store; empty: they wait in memory."""
        return "" if self.place is None else str(self.place.folder)

    @property
    def safe(self) -> bool:
        """Whether every row appended so far is stored, dropped and counted, or on disk: a kill loses none of it."""
        with self._changed:
            return not self._pending and all(batch.file is not None for batch in self._outbox)

    def counters(self) -> dict[str, tuple[int, bool]]:
        """What became of rows that were not simply stored: value, and whether a value above 0 is a loss."""
        with self._changed:
            found = {f"rows_dropped_{table}": (rows, True) for table, rows in self.rows_dropped.items()}
            for name in _COUNTERS:
                if name in self._tally:
                    found[name] = (self._tally[name], name in _LOSSES)
            return found

    def append(self, table: str, rows: pa.Table | Mapping[str, Values]) -> int:
        """Takes rows over. They are copied: the caller's arrays may be reused at once.

        Args:
            table: The table's name.
            rows: Columns by name. Times of every precision are int64 wall-clock nanoseconds; an ``Array`` column is a
                list of lists, an Arrow list array, or a two-dimensional numpy array.

        Returns:
            The number of rows taken: none of rows that are more than half of what may wait in memory, or whose owner
            holds more than is free.

        Raises:
            ValueError: No such table, a column is missing, unknown, of another length, or does not fit its type.
        """
        converted = to_arrow(table, rows)
        if not self._paths and table in PATHS_IN:
            converted = without_folders(converted)
        count = int(converted.num_rows)
        if count == 0:
            return 0
        with self._changed:
            if converted.nbytes > self.max_bytes // 2:
                # Room for it would cost the rows of everybody else: it is what a hostile name, or a defect, makes.
                self._tally["rows_too_large"] += count
                return 0
            if self.owners is None or table in NEVER_REFUSED:
                owner = None
            else:
                job, run = converted.column("job")[0].as_py(), converted.column("run")[0].as_py()
                owner = self.owners.owner_of(job, run)
                if owner is not None and not self._shares.fits(owner, self._used(), several=self.owners.several):
                    self.owners.count_refused(job, run, count)
                    return 0
            if owner is not None:
                self._shares.add(owner, converted.nbytes)
            self._pending.setdefault(table, []).append(_Part(converted, owner, converted.nbytes))
            self._pending_since.setdefault(table, time.monotonic())
            self._bytes += converted.nbytes
            self._shed()
        return count

    def maybe_flush(self, now: float | None = None) -> None:
        """Sends the tables that are due by rows or by age. Cheap: call it from every turn of a loop.

        Args:
            now: ``time.monotonic()``, where the caller has it already.
        """
        now = time.monotonic() if now is None else now
        with self._changed:
            for table in list(self._pending):
                if table not in self._pending:
                    continue  # what refers to it was due
                rows = sum(part.rows.num_rows for part in self._pending[table])
                if rows >= self.flush_rows or now - self._pending_since[table] >= self.flush_s:
                    self._seal(table)
            if self._worker is not None:
                if self._outbox:
                    self._changed.notify_all()
                return
            due = bool(self._outbox) and now >= self._not_before
        if due:
            self._send_all(deadline=0.0)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Sends everything and waits for it.

        Args:
            timeout_s: How long to try while the store is away. Rows not stored by then wait, in memory or on disk.
                Where the user has no right to store them, it is a second or two.

        Returns:
            Whether every row that was appended has been stored; ``last_error`` has the reason.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._pending:
                self._seal(next(iter(self._pending)))
            self._not_before = 0.0
            self._changed.notify_all()
            if self._worker is not None:
                self._changed.wait_for(lambda: not self._outbox, timeout_s)
                return not self._outbox
        self._send_all(deadline)
        while self._spill_next():
            pass
        with self._changed:
            return not self._outbox

    def start(self) -> None:
        """From here on a thread of its own sends, and another one brings to disk what waits for too long.

        The first one also stores what writers that are gone have left on disk for this store.
        """
        with self._changed:
            if self._worker is None:
                self._stop = False
                self._worker = threading.Thread(target=self._work, name="argus-writer", daemon=True)
                self._worker.start()
                if self.place is not None:
                    self._spiller = threading.Thread(target=self._spill_work, name="argus-spill", daemon=True)
                    self._spiller.start()

    def close(self, timeout_s: float = 30.0) -> Report:
        """Sends what is left and ends the thread. Rows that cannot be stored in time are left on disk, or, where they
        cannot be, counted as dropped.

        Args:
            timeout_s: How long to try while the store is away; at most 5 s where rows are safe on disk.
        """
        with self._changed:
            away = self._backoff_s > 0 or self._stuck_s() > STUCK_S
            safe = self.place is not None and away and self.spill_error is None
        self.flush(min(timeout_s, STUCK_S) if safe else timeout_s)
        with self._changed:
            self._stop = True
            self._changed.notify_all()
            worker, spiller = self._worker, self._spiller
        for thread in (worker, spiller):
            if thread is not None:
                thread.join(timeout=_LEASE_S + 1)
        self._spill_not_before = 0.0
        while self._spill_next(closing=True):
            pass
        with self._changed:
            self._worker = self._spiller = None
            on_disk: Counter[str] = Counter()
            while self._outbox:
                if self._outbox[0].file is not None:
                    batch = self._outbox[0]
                    self._remove(batch)
                    on_disk[batch.table] += batch.count
                else:
                    self._drop(self._outbox[0])
            report = replace(self.report(), on_disk=dict(on_disk))
        with self._spill_lock:
            if self._folder is not None:
                self._folder.close()
                self._folder = None
        return report

    def give_up(self, timeout_s: float) -> tuple[int, int]:
        """Brings what is not stored to disk, for a process that is about to end at once. Of no use afterwards.

        Args:
            timeout_s: How long that may take.

        Returns:
            Rows that are on disk, and rows that are lost.
        """
        deadline = time.monotonic() + timeout_s
        if not self._changed.acquire(timeout=timeout_s):
            return 0, sum(batch.count for batch in list(self._outbox))
        try:
            while self._pending:
                self._seal(next(iter(self._pending)))
        finally:
            self._changed.release()
        self._spill_not_before = 0.0
        while time.monotonic() < deadline and self._spill_next(closing=True):
            pass
        waiting = list(self._outbox)
        on_disk = sum(batch.count for batch in waiting if batch.file is not None)
        return on_disk, sum(batch.count for batch in waiting) - on_disk

    def report(self) -> Report:
        """What became of the rows so far."""
        with self._changed:
            error = "" if self.last_error is None else str(self.last_error)
            return Report(dict(self.rows_written), dict(self.rows_dropped), error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside; the condition's lock is held where nothing else is stated -------------------------------------------

    def _seal(self, table: str) -> None:
        for other in REFERS.get(table, ()):
            if other in self._pending:
                self._seal(other)
        parts = self._pending.pop(table)
        self._pending_since.pop(table)
        alike: dict[tuple[str, ...], list[_Part]] = {}
        for part in parts:
            alike.setdefault(tuple(part.rows.column_names), []).append(part)
        for group in chain.from_iterable(map(_in_batches, alike.values())):
            rows = joined([part.rows for part in group])
            self._bytes += rows.nbytes - sum(part.nbytes for part in group)
            sequence = self._sequence[table]
            self._sequence[table] += 1
            token = f"{self.source}/{self._session}/{table}/{sequence}"
            batch = _Batch(table, token, rows, rows.num_rows, rows.nbytes)
            for part in group:
                if part.owner is not None:
                    batch.of[part.owner] += part.nbytes
            self._outbox.append(batch)

    def _shed(self) -> None:
        """Drops the oldest rows until the rest fits."""
        while self._bytes > self.max_bytes:
            waiting = [batch for batch in self._outbox if batch is not self._sending and batch.nbytes]
            for table in FIRST_TO_DROP:
                victim = next((batch for batch in waiting if batch.table == table), None)
                if victim is not None or table in self._pending:
                    break
            if victim is not None:
                self._drop(victim)
            elif table in self._pending:
                self._drop_pending(table)
            elif waiting:
                self._drop(waiting[0])
            elif self._pending:
                self._drop_pending(min(self._pending_since, key=lambda name: self._pending_since[name]))
            else:
                return

    def _drop_pending(self, table: str) -> None:
        part = self._pending[table].pop(0)
        self.rows_dropped[table] += part.rows.num_rows
        self._bytes -= part.nbytes
        if part.owner is not None:
            self._shares.remove({part.owner: part.nbytes})
        if not self._pending[table]:
            del self._pending[table], self._pending_since[table]

    def _remove(self, batch: _Batch) -> None:
        """A batch waits no more."""
        self._outbox.remove(batch)
        self._bytes -= batch.nbytes
        self._shares.remove(batch.of)

    def _used(self) -> float:
        """Part of the room for rows that is taken, in memory or on disk, whichever is more."""
        in_memory = self._bytes / self.max_bytes
        if self.place is None:
            return in_memory
        now = time.monotonic()
        if now >= self._on_disk_due:
            self._on_disk, self._on_disk_due = sum(batch.file_bytes for batch in self._outbox), now + 1.0
        # What others have left there is nobody's share of it: there is less room.
        room = max(self.place.max_bytes - self._others_on_disk, 1)
        return max(in_memory, min(self._on_disk / room, 1.0))

    def _drop(self, batch: _Batch) -> None:
        self._remove(batch)
        self.rows_dropped[batch.table] += batch.count
        _unlink(batch.file)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stop and not (ready := self._ready()):
                    left_s = self._not_before - time.monotonic()
                    patience = max(0.0, left_s) if self._outbox else None
                    if self.place is not None:
                        due_s = max(0.0, max(self._next_adoption, self._not_before) - time.monotonic())
                        patience = due_s if patience is None else min(patience, due_s)
                    self._changed.wait(patience)
                if self._stop:
                    return
            if ready == "send":
                self._send_all(deadline=0.0)
            else:
                try:
                    self._adopt()
                except Exception as failure:  # a folder that cannot be read, say: this writer's own rows come first
                    self.last_error = failure
                    self._next_adoption = time.monotonic() + ADOPT_S

    def _ready(self) -> str:
        now = time.monotonic()
        if now < self._not_before:
            return ""
        if self._outbox:
            return "send"
        return "adopt" if self.place is not None and now >= self._next_adoption else ""

    def _send_all(self, deadline: float) -> None:
        """Sends batch after batch; waits and tries again until ``deadline`` (``time.monotonic``). No lock is held."""
        with self._send_lock:
            while True:
                with self._changed:
                    if not self._outbox or (self._stop and deadline == 0.0):
                        return
                    batch = self._sending = self._outbox[0]
                    self._sending_since = time.monotonic()
                failure: Exception | None = None
                try:
                    self._with_tables(partial(self._send, batch))
                except Exception as raised:
                    failure = raised
                with self._changed:
                    self._sending = None
                    if batch not in self._outbox:
                        return  # given up meanwhile by close(), and counted as dropped or left on disk
                    if failure is None:
                        self._remove(batch)
                        if not self.rows_written[batch.table]:
                            debug.note(f"stored: first rows of {batch.table}")
                        self.rows_written[batch.table] += batch.count
                        self._backoff_s = self._not_before = 0.0
                        _unlink(batch.file)
                    else:
                        self._failed(failure)
                        if transient(failure):
                            batch.tries += 1
                        elif batch.file is not None:
                            self._remove(batch)
                            self.rows_dropped[batch.table] += batch.count
                            self._set_aside(self._folder, batch.file, failure)
                        else:
                            # The store would refuse it every time, and everything behind it would wait for ever.
                            self._drop(batch)
                    self._changed.notify_all()
                    not_before = self._not_before
                if failure is not None and not_before:
                    if not_before >= deadline or (is_forbidden(failure) and self._backoff_s > _GRANT_S):
                        return
                    time.sleep(max(0.0, not_before - time.monotonic()))

    def _failed(self, failure: Exception) -> None:
        self.last_error = failure
        if transient(failure):
            self._backoff_s = min(max(self._backoff_s * 2, _BACKOFF_S[0]), _BACKOFF_S[1])
            self._not_before = time.monotonic() + self._backoff_s

    def _send(self, batch: _Batch) -> None:
        rows = batch.rows
        if rows is None:
            assert batch.file is not None
            rows = spool.read(batch.file, summed=True).rows
        since = batch.doubt_since
        if since is None:
            batch.doubt_since, batch.sent_s = time.monotonic(), time.time()
            self.store.insert(batch.table, rows, batch.token, _LEASE_S)
            return
        forgotten = token_forgotten(batch.table, time.monotonic() - since)
        # How long the token is remembered depends on how many write. To look is cheap, and seldom needed.
        if (forgotten or batch.table not in ROLLED_UP) and self._holds(batch.table, rows, forgotten):
            return
        self._sent_again(batch.table, insert_again(self.store, batch.table, rows, batch.token, _LEASE_S))

    def _sent_again(self, table: str, anew: bool) -> None:
        if anew and table in ROLLED_UP:
            with self._changed:
                self._tally["batches_rolled_up_twice"] += 1

    def _with_tables(self, send: Callable[[], object]) -> None:
        """Sends rows; where their table is gone, sees to the tables again, and sends once more: the folder or the
        database may have been removed meanwhile, or made anew."""
        self._prepare()
        try:
            send()
            return
        except ArgusError as failure:
            if not lacks_table(failure):
                raise
        self._schema_ready = False
        self._prepare()
        send()

    def _prepare(self) -> None:
        """Sees to the store's tables, once. Whatever is wrong with them, the rows are not to blame: they wait."""
        if self._schema_ready:
            return
        try:
            ensure_schema(self.store, timeout_s=_LEASE_S)
        except ArgusError as failure:
            raise ArgusError(failure.message, failure.hint, EXIT_UNAVAILABLE) from None
        self._schema_ready = True

    def _holds(self, table: str, rows: pa.Table, forgotten: bool) -> bool:
        if self.store.spooled:
            return False  # a file is there whole or not at all, and nothing can be asked of it
        try:
            with self.store.lease(_LEASE_S):
                found, asked = look_up(self.store, table, rows)
        except ArgusError as failure:
            # Whatever it is: that nobody could look is not the rows' fault.
            raise ArgusError(failure.message, failure.hint, EXIT_UNAVAILABLE) from None
        if forgotten and 0 < found < asked:
            with self._changed:
                self._tally["batches_in_part"] += 1
        return 0 < asked == found

    # ---- on disk ----

    def _stuck_s(self) -> float:
        """How long the insert that is being sent has had no answer, s; 0: none is."""
        return 0.0 if self._sending is None else time.monotonic() - self._sending_since

    def _spill_work(self) -> None:
        while True:
            with self._changed:
                while not self._stop and not self._spills():
                    self._changed.wait(1.0 if self._outbox else None)
                if self._stop:
                    return
            self._spill_next()

    def _spills(self, closing: bool = False) -> _Batch | None:
        """The next batch that should go to disk; None: none at present."""
        now = time.monotonic()
        if self.place is None or now < self._spill_not_before:
            return None
        stuck = self._stuck_s() > STUCK_S
        if not (closing or stuck or self._backoff_s > 0 or self._bytes > SPILL_BYTES):
            return None
        # What is being sent stays in memory for as long as an answer may be near.
        kept = None if closing or stuck else self._sending
        return next((batch for batch in self._outbox if batch.file is None and batch is not kept), None)

    def _spill_next(self, closing: bool = False) -> bool:
        """Brings one batch to disk. Returns whether there may be more to do."""
        with self._spill_lock:
            with self._changed:
                batch = self._spills(closing)
                rows = None if batch is None else batch.rows
                sent_s = 0.0 if batch is None else batch.sent_s
            if batch is None or rows is None:
                return False
            assert self.place is not None
            try:
                if not self._make_room(batch, closing):
                    return True
                if self._folder is None:
                    self._folder = spill.create(self.place, self._session)
                file, size = self._folder.write(batch.table, batch.token, rows, sent_s=sent_s)
            except Exception as failure:  # whatever it is, rows still wait in memory, and the thread must live
                with self._changed:
                    self.spill_error = failure
                    self._tally["spill_failures"] += 1
                    self._spill_not_before = time.monotonic() + _BACKOFF_S[1]
                return False
            with self._changed:
                self.spill_error = None
                if batch not in self._outbox:
                    _unlink(file)  # stored, or dropped, meanwhile
                    return True
                self._tally["rows_spilled"] += batch.count
                batch.file, batch.file_bytes, batch.rows = file, size, None
                self._bytes -= batch.nbytes
                batch.nbytes = 0
            return True

    def _make_room(self, batch: _Batch, closing: bool) -> bool:
        """Drops the oldest rows on disk until a batch fits there; the batch itself only where there is no time left.

        Raises:
            ArgusError: It does not fit: it waits in memory.
        """
        assert self.place is not None
        assert self._others is not None
        others = self._others_on_disk = self._others.bytes(self._folder.path if self._folder else None)
        while True:
            with self._changed:
                spilled = [each for each in self._outbox if each.file is not None and each is not self._sending]
                # How far it will be compressed is not known before; the sum is kept within the bound without that.
                used = others + sum(each.file_bytes for each in self._outbox) + batch.nbytes
                if used <= self.place.max_bytes:
                    return True
                victim = next((e for table in FIRST_TO_DROP for e in spilled if e.table == table), None)
                if victim is None and batch.table not in FIRST_TO_DROP and spilled:
                    victim = spilled[0]
                if victim is None and not closing:
                    hint = "Raise ARGUS_SPILL_MAX, or see to what others have left there: argus store status"
                    raise ArgusError(f"the spill {self.place.folder} is full", hint)
                self.last_error = self.last_error or ArgusError("the spill is full")
                if victim is None:
                    if batch in self._outbox:
                        self._drop(batch)
                    return False
                self._drop(victim)

    def _set_aside(self, folder: spill.Folder | None, file: Path, failure: Exception) -> None:
        self._tally["spill_files_damaged" if isinstance(failure, spool.Damaged) else "spill_files_refused"] += 1
        moved = folder.set_aside(file) if folder is not None else file
        self.last_error = ArgusError(f"{getattr(failure, 'message', failure)} (set aside: {moved})")

    def _adopt(self) -> None:
        """Stores what writers that are gone have left on disk, as long as this one has nothing of its own to send."""
        assert self.place is not None
        with self._send_lock:
            for folder in spill.abandoned(self.place.folder):
                left = self._left_in(folder)
                try:
                    while left:
                        with self._changed:
                            if self._stop or self._outbox:
                                return  # looked for again as soon as there is time
                        file = left[0]
                        if not file.exists():
                            left.popleft()  # others had the folder meanwhile
                            continue
                        try:
                            batch = spool.read(file, summed=True)
                            self._with_tables(partial(self._replay, file, batch))
                        except Exception as failure:
                            with self._changed:
                                if transient(failure):
                                    self._failed(failure)
                                    return
                                self._set_aside(folder, file, failure)
                            left.popleft()
                            continue
                        left.popleft()
                        _unlink(file)
                        with self._changed:
                            self._tally["spill_rows_adopted"] += batch.rows.num_rows
                            self._backoff_s = self._not_before = 0.0
                finally:
                    self._listed = {folder.path: (spill.changed_ns(folder.path), left)}
                    folder.close()
            self._next_adoption = time.monotonic() + ADOPT_S

    def _replay(self, file: Path, batch: spool.Spooled) -> None:
        replay(self.store, batch, sent_before_s(file, batch), _LEASE_S, self._holds, self._sent_again)

    def _left_in(self, folder: spill.Folder) -> deque[Path]:
        """The batches in a folder. Adopting is interrupted for each batch of this writer's own: the folder is listed
        again only if somebody else has changed it meanwhile."""
        changed, left = self._listed.get(folder.path, (-1, deque[Path]()))
        return left if left and changed == spill.changed_ns(folder.path) else deque(folder.files())


_COUNTERS = (
    "rows_spilled",
    "spill_rows_adopted",
    "spill_failures",
    "spill_files_damaged",
    "spill_files_refused",
    "batches_in_part",
    "batches_rolled_up_twice",
    "rows_too_large",
)
_LOSSES = ("rows_too_large", "spill_files_damaged", "spill_files_refused", "batches_in_part", "batches_rolled_up_twice")


def _unlink(file: Path | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            file.unlink()
