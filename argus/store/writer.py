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
import re
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from argus import debug, redact
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store import spill, spool
from argus.store.open import LEASE_TIMEOUT_S, Store, is_forbidden, lacks_table, transient
from argus.store.schema import Column, ensure_schema, table_columns, table_keys

Values: TypeAlias = "npt.NDArray[Any] | Sequence[Any] | str | int | float | bool | None"
"""One column of a batch. A single value stands for all rows."""

FLUSH_ROWS = 200_000
"""A table with so many rows waiting is sent at once."""
FLUSH_S = 1.0
"""The longest that a row waits before it is sent."""
MAX_BYTES = 256 << 20
"""What may wait in memory."""
SPILL_BYTES = 64 << 20
"""So much in memory goes to disk also while the store takes rows, but too slowly."""
STUCK_S = 5.0
"""An insert that has had no answer for so long: what waits behind it goes to disk."""
DOUBT_S = 20.0
"""After so long the batches of other writers may have pushed a token out of the store's memory (1000 blocks a table).
With many hosts it is sooner: a batch whose answer was lost is always looked for before it is sent again."""
DOUBT_ROLLED_UP_S = 600.0
"""The same for a table with a rollup. Sending again under the token also repairs a rollup that a kill left behind;
being found in the table says nothing of it. Such tables remember 20,000 blocks (schemas/009_rollups.sql): 30 a second
for so long."""
ROLLED_UP = ("iterations",)
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


@dataclass(frozen=True)
class Report:
    """What became of the rows, by table."""

    written: dict[str, int] = field(default_factory=dict)
    """Rows the store has acknowledged."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that were lost: too much waited, the store refused them, or it was still away at the end."""
    last_error: str = ""
    """Why, as the store said it last; empty: nothing went wrong."""
    on_disk: dict[str, int] = field(default_factory=dict)
    """Rows that wait on disk for the store, and for whoever writes to it next."""


class Writer:
    """Collects rows and stores them.

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
        self._pending: dict[str, list[pa.Table]] = {}
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
            return f"no answer to an insert for {stuck_s:.0f} s" if stuck_s > STUCK_S else ""
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
            The number of rows taken: none of rows that are more than half of what may wait in memory.

        Raises:
            ValueError: No such table, a column is missing, unknown, of another length, or does not fit its type.
        """
        converted = to_arrow(table, rows)
        if not self._paths and table in PATHS_IN:
            converted = _without_folders(converted)
        count = int(converted.num_rows)
        if count == 0:
            return 0
        with self._changed:
            if converted.nbytes > self.max_bytes // 2:
                # Room for it would cost the rows of everybody else: it is what a hostile name, or a defect, makes.
                self._tally["rows_too_large"] += count
                return 0
            self._pending.setdefault(table, []).append(converted)
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
                rows = sum(part.num_rows for part in self._pending[table])
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
            Whether every row that was appended has been stored; ``last_error`` tells why not.
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
                    batch = self._outbox.popleft()
                    self._bytes -= batch.nbytes
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

    # ---- inside; the condition's lock is held where nothing else is said -------------------------------------------

    def _seal(self, table: str) -> None:
        for other in REFERS.get(table, ()):
            if other in self._pending:
                self._seal(other)
        parts = self._pending.pop(table)
        self._pending_since.pop(table)
        alike: dict[tuple[str, ...], list[pa.Table]] = {}
        for part in parts:
            alike.setdefault(tuple(part.column_names), []).append(part)
        for group in alike.values():
            rows = _joined(group)
            self._bytes += rows.nbytes - sum(part.nbytes for part in group)
            sequence = self._sequence[table]
            self._sequence[table] += 1
            token = f"{self.source}/{self._session}/{table}/{sequence}"
            self._outbox.append(_Batch(table, token, rows, rows.num_rows, rows.nbytes))

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
        self.rows_dropped[table] += part.num_rows
        self._bytes -= part.nbytes
        if not self._pending[table]:
            del self._pending[table], self._pending_since[table]

    def _drop(self, batch: _Batch) -> None:
        self._outbox.remove(batch)
        self._bytes -= batch.nbytes
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
                        self._outbox.popleft()
                        self._bytes -= batch.nbytes
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
                            self._outbox.popleft()
                            self._bytes -= batch.nbytes
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
        forgotten = _forgotten(batch.table, time.monotonic() - since)
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
        others = self._others.bytes(self._folder.path if self._folder else None)
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
        replay(self.store, batch, _age_s(file, batch), _LEASE_S, self._holds, self._sent_again)

    def _left_in(self, folder: spill.Folder) -> deque[Path]:
        """The batches in a folder. Adopting is interrupted for each batch of this writer's own: the folder is listed
        again only if somebody else has changed it meanwhile."""
        changed, left = self._listed.get(folder.path, (-1, deque[Path]()))
        return left if left and changed == spill.changed_ns(folder.path) else deque(folder.files())


_MOMENTS = (
    ("DateTime64(9", "fromUnixTimestamp64Nano({}, 'UTC')"),
    ("DateTime64(6", "fromUnixTimestamp64Micro({}, 'UTC')"),
    ("DateTime64(3", "fromUnixTimestamp64Milli({}, 'UTC')"),
    ("DateTime", "toDateTime({}, 'UTC')"),
)
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


def _without_folders(rows: pa.Table) -> pa.Table:
    """Rows whose texts have the last components of absolute paths only."""
    columns = [_shortened(column) for column in rows.columns]
    return pa.table(columns, names=rows.column_names)


def _shortened(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _shortened(pa.chunked_array([array.dictionary])))
    if pa.types.is_list(kind):
        values = _shortened(pa.chunked_array([array.values]))
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null() if array.null_count else None)
    if pa.types.is_string(kind):
        return pc.replace_substring_regex(array, pattern=redact.PATH, replacement=r"\1")
    return array


def _unlink(file: Path | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            file.unlink()


def _forgotten(table: str, age_s: float) -> bool:
    """Whether a store may not remember the token of a batch any more that was sent so long ago."""
    return age_s > (DOUBT_ROLLED_UP_S if table in ROLLED_UP else DOUBT_S)


def replay(
    store: Store,
    batch: spool.Spooled,
    age_s: float,
    timeout_s: float,
    holds_it: Callable[[str, pa.Table, bool], bool] | None = None,
    sent_again: Callable[[str, bool], None] = lambda table, anew: None,
) -> bool:
    """Stores a batch that a writer left on disk, unless the store has it. Returns whether it was sent.

    It was perhaps stored just before its writer was killed, so long ago that its token is forgotten.

    Args:
        store: Where to.
        batch: What was on disk.
        age_s: How long ago it may have been sent first; 0: not known.
        timeout_s: How long to wait for the store.
        holds_it: Asks the store for (table, rows, whether the token may be forgotten); None: ``holds`` does.
        sent_again: Told (table, what ``insert_again`` returns).

    Raises:
        ArgusError: As ``Store.insert``.
    """
    forgotten = age_s <= 0 or _forgotten(batch.table, age_s)
    if forgotten or (batch.doubt and batch.table not in ROLLED_UP):
        known = holds_it(batch.table, batch.rows, forgotten) if holds_it else holds(store, batch.table, batch.rows)
        if known:
            return False
    if forgotten or batch.doubt:
        sent_again(batch.table, insert_again(store, batch.table, batch.rows, batch.token, timeout_s))
    else:
        store.insert(batch.table, batch.rows, batch.token, timeout_s)
    return True


def insert_again(store: Store, table: str, rows: pa.Table, token: str, timeout_s: float) -> bool:
    """Stores a batch that was sent before and is not there, or perhaps is.

    ClickHouse notes a block's token before the block is in place (``MergeTreeSink``: the deduplication log, then the
    part's name). An engine that was killed between the two takes the token for stored, and the rows are nowhere. A
    living one does both under one lock: rows that are not there after their token was taken are in no one's hands, and
    are sent under another token. Copies of a replicated table note the token along with the block, and may lag: there,
    and of shards, the token is believed.

    Returns:
        Whether rows were sent under another token because the store had lost them. Of a table with a rollup that has
        them twice.

    Raises:
        ArgusError: As ``Store.insert``.
    """
    if table not in table_keys() and not store.spooled:
        # What keeps the newest version of a row does not mind a repetition.
        store.insert(table, rows, f"{token}/{uuid.uuid4().hex[:8]}", timeout_s)
        return False
    store.insert(table, rows, token, timeout_s)
    if store.spooled or _distributed(store, table):
        return False
    with store.lease(timeout_s):
        found, asked = look_up(store, table, rows)
    if found or not asked:
        return False
    store.insert(table, rows, f"{token}/lost", timeout_s)
    return True


def _age_s(file: Path, batch: spool.Spooled) -> float:
    """How long ago a batch may have been sent first; 0: not known, as where the clock was set back."""
    try:
        written = file.stat().st_mtime
    except OSError:
        return 0.0
    return max(0.0, time.time() - min(written, batch.sent_s or written))


def load_spilled(
    store: Store, folder: Path, *, progress: Callable[[int, int], None] = lambda done, files: None
) -> spool.Loaded:
    """Stores what writers that are gone have left on disk for a store. Files that cannot be stored are set aside.

    Args:
        store: Where to. An embedded one is made if there is something to load.
        folder: The store's folder (``spill.place``), or another one's, where it was copied from.
        progress: Called with (files done, files in all) before each file and at the end.

    Raises:
        ArgusError: The store cannot be reached, or is a spool itself.
    """
    spool.check_target(store)
    result = spool.Loaded()
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
                    if replay(store, batch, _age_s(file, batch), LEASE_TIMEOUT_S):
                        result.rows[batch.table] += batch.rows.num_rows
                        result.files += 1
                    else:
                        result.known += 1
                except ArgusError as failure:
                    if transient(failure):
                        raise
                    told = f"{failure.message} (set aside: {abandoned.set_aside(file)})"
                    result.trouble.append(told)
                    continue
                file.unlink()
        finally:
            abandoned.close()
    if files:
        progress(files, files)
    return result


def holds(store: Store, table: str, rows: pa.Table) -> bool:
    """Whether a store has a batch already (``look_up``).

    Raises:
        ArgusError: The store cannot be asked.
    """
    found, asked = look_up(store, table, rows)
    return 0 < asked == found


def look_up(store: Store, table: str, rows: pa.Table) -> tuple[int, int]:
    """Looks for a batch in a store by some of its rows. Returns how many of how many are there.

    A batch is stored whole, or (where it spans days, which are partitions) a day at a time from the first on: the first
    and the last row are looked for. Of a Distributed table each shard may have its part or not: there it is the first
    and the last row of each rank, of up to 64. Tables that keep the newest version of a row do not mind a repetition:
    nothing is looked for, (0, 0).

    Raises:
        ArgusError: The store cannot be asked.
    """
    types = table_columns().get(table, {})
    # What compares exactly.
    names = [
        name
        for name in rows.column_names
        if name in types and name != "stored" and not re.search(r"Array|Map|Float|Nullable", types[name].type)
    ]
    key = [name for name in table_keys().get(table, ()) if name in names]
    if not key or not rows.num_rows:
        return 0, 0
    found = 0
    try:
        places = _telling(rows, key, by_shard=_distributed(store, table))
        for place in places:
            found += _has_row(store, table, rows.slice(place, 1), {name: types[name].type for name in names})
    except ArgusError as failure:
        # Whatever it is, the rows are not to blame: they wait.
        raise ArgusError(failure.message, failure.hint, EXIT_UNAVAILABLE) from None
    return found, len(places)


def _distributed(store: Store, table: str) -> bool:
    if store.embedded:
        return False
    from argus.store.reader import query_columns

    engines = "SELECT engine FROM system.tables WHERE database = currentDatabase() AND name = {table:String}"
    return bool(query_columns(store, engines, {"table": table})["engine"].tolist() == ["Distributed"])


def _telling(rows: pa.Table, key: list[str], *, by_shard: bool) -> list[int]:
    """The places of the rows by which a batch is told."""
    order = ["ts"] if "ts" in rows.column_names else key
    plain = {}
    for name in {*order, *(each for each in ("job", "rank") if each in rows.column_names)}:
        values = rows[name]
        plain[name] = values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
    sorted_by = pc.sort_indices(pa.table(plain), [(name, "ascending") for name in order]).to_pylist()
    if not by_shard:
        return sorted({sorted_by[0], sorted_by[-1]})
    shards = [plain[name].to_pylist() for name in ("job", "rank") if name in plain]
    ends: dict[tuple[Any, ...], list[int]] = {}
    for place in sorted_by:
        pair = ends.setdefault(tuple(values[place] for values in shards), [place, place])
        pair[1] = place
    return sorted({place for pair in list(ends.values())[:64] for place in pair})


def _has_row(store: Store, table: str, row: pa.Table, types: Mapping[str, str]) -> bool:
    from argus.store.reader import query_columns

    tests: list[str] = []
    values: dict[str, Any] = {}
    for k, (name, kind) in enumerate(types.items()):
        value = row[name].cast(pa.int64())[0].as_py() if "Date" in kind else row[name][0].as_py()
        plain = "Int64" if "Date" in kind else re.sub(r"LowCardinality\((.*)\)", r"\1", kind)
        told = f"{{p{k}:{plain}}}"
        if "Date" in kind:
            # A constant on that side, so that the sorting key and the partitions are used.
            told = next(made for prefix, made in _MOMENTS if kind.startswith(prefix)).format(told)
        values[f"p{k}"] = value
        tests.append(f"`{name}` = {told}")
    found = query_columns(store, f"SELECT count() AS n FROM `{table}` WHERE {' AND '.join(tests)}", values)
    return int(found["n"][0]) > 0


def _joined(parts: list[pa.Table]) -> pa.Table:
    """Tables of the same columns as one, in one piece."""
    schema = pa.schema(
        [
            # What one append gave as a single value, another may have given row by row.
            first
            if all(part.schema.field(k).type == first.type for part in parts)
            else pa.field(first.name, pa.string())
            for k, first in enumerate(parts[0].schema)
        ]
    )
    # One dictionary a column: Arrow's file format cannot replace one between batches.
    return pa.concat_tables([part.cast(schema) for part in parts]).unify_dictionaries().combine_chunks()


def to_arrow(table: str, rows: pa.Table | Mapping[str, Values]) -> pa.Table:
    """Converts columns to what the table's ClickHouse types take, copying them.

    Raises:
        ValueError: No such table, a column is missing, unknown, of another length, or does not fit its type.
    """
    tables = table_columns()
    if table not in tables:
        raise ValueError(f"there is no table '{table}' (known: {', '.join(sorted(tables))})")
    columns = tables[table]
    given = rows.column_names if isinstance(rows, pa.Table) else list(rows)
    if unknown := [name for name in given if name not in columns]:
        raise ValueError(f"table '{table}' has no column {', '.join(unknown)} (it has {', '.join(columns)})")
    if missing := [c.name for c in columns.values() if not c.optional and c.name not in given]:
        raise ValueError(f"rows for table '{table}' lack the column {', '.join(missing)}")
    lengths = {name: _length(rows[name]) for name in given}
    counts = Counter(n for n in lengths.values() if n is not None)
    count = counts.most_common(1)[0][0] if counts else 1
    if wrong := [f"{name}: {n}" for name, n in lengths.items() if n is not None and n != count]:
        raise ValueError(f"the columns for table '{table}' differ in length: {', '.join(wrong)}, others {count}")
    return pa.table(
        {name: _convert(table, rows[name], column, count) for name, column in columns.items() if name in given}
    )


def _length(values: Values) -> int | None:
    if isinstance(values, (str, bytes, int, float, bool, np.generic)) or values is None:
        return None
    return len(values)


_INTEGERS = {
    f"{sign}Int{bits}": getattr(pa, f"{sign.lower()}int{bits}")() for sign in ("", "U") for bits in (8, 16, 32, 64)
}
_FLOATS = {"Float32": pa.float32(), "Float64": pa.float64()}
_TIMES = {"DateTime64(9": "ns", "DateTime64(6": "us", "DateTime64(3": "ms", "DateTime": "s"}


def _arrow_type(clickhouse: str) -> pa.DataType:
    for wrapper in ("Nullable(", "LowCardinality("):
        if clickhouse.startswith(wrapper):
            return _arrow_type(clickhouse[len(wrapper) : -1])
    if clickhouse.startswith("Array("):
        return pa.list_(_arrow_type(clickhouse[6:-1]))
    if clickhouse.startswith("Map("):
        key, _, value = clickhouse[4:-1].partition(",")
        return pa.map_(_arrow_type(key.strip()), _arrow_type(value.strip()))
    for prefix, unit in _TIMES.items():
        if clickhouse == prefix or clickhouse.startswith((prefix + ",", prefix + ")", prefix + "(")):
            return pa.timestamp(unit, tz="UTC")
    if clickhouse == "Bool":
        return pa.bool_()
    if clickhouse == "String":
        return pa.string()
    found = _INTEGERS.get(clickhouse) or _FLOATS.get(clickhouse)
    if found is None:
        raise ValueError(f"Argus does not write the type {clickhouse}")
    return found


def _convert(table: str, values: Any, column: Column, count: int) -> pa.Array:
    try:
        kind = _arrow_type(column.type)
        if _length(values) is None:
            one = _array([values.item() if isinstance(values, np.generic) else values], kind)
            repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), one)
            array = repeated if pa.types.is_string(kind) else repeated.cast(kind)
        else:
            array = _array(values, kind)
        if array.null_count and "Nullable(" not in column.type:
            raise ValueError("some are missing (null)")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
        raise ValueError(
            f"column '{column.name}' of table '{table}' ({column.type}) does not take these values: {failure}"
        ) from None
    return array


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        values = pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_list(kind) and isinstance(values, np.ndarray) and values.ndim == 2:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(offsets, _array(values.reshape(-1), kind.value_type))
    if isinstance(values, np.ma.MaskedArray):
        data = np.array(values.data, order="C")
        array = pa.array(data, mask=np.ma.getmaskarray(values))
    elif isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise ValueError(f"{values.ndim} dimensions")
        # A copy: pyarrow would keep pointing into the caller's ring buffer.
        data = np.array(values, order="C", dtype=values.dtype.newbyteorder("="))
        if data.dtype.kind == "S":
            data = np.char.decode(data, "utf-8", "replace")
        array = pa.array(data, from_pandas=False)
    elif isinstance(values, pa.Array):
        array = values
    elif pa.types.is_timestamp(kind):
        return _times(values, kind)
    else:
        try:
            return pa.array(list(values), type=kind)
        except UnicodeEncodeError:  # names of files that are no UTF-8 come as lone surrogates
            return pa.array(_storable(values), type=kind)
    if pa.types.is_timestamp(kind):
        return _times(array, kind)
    if pa.types.is_dictionary(array.type):
        return array.cast(_DICTIONARY if pa.types.is_string(kind) else kind)
    if pa.types.is_boolean(kind) and pa.types.is_integer(array.type):
        return pc.not_equal(array, 0)
    if pa.types.is_integer(kind) and pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    return array.cast(kind)


def _storable(value: Any) -> Any:
    """Strings as valid UTF-8, whatever bytes they came from, also within lists and maps."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode() if _LONE.search(value) else value
    if isinstance(value, Mapping):
        return {_storable(name): _storable(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_storable(each) for each in value]
    return value


_LONE = re.compile("[\ud800-\udfff]")


def _times(values: Any, kind: pa.DataType) -> pa.Array:
    """Nanoseconds since 1970 (or timestamps) as the column's timestamps, rounded down to its unit."""
    array = values if isinstance(values, pa.Array) else pa.array(list(values))
    if pa.types.is_floating(array.type):
        raise ValueError("a float cannot hold a time in nanoseconds exactly; give int64")
    if pa.types.is_null(array.type):
        return array.cast(kind)
    if not pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64()).cast(pa.timestamp("ns", tz="UTC"))
    elif array.type.tz is None:
        array = array.cast(pa.timestamp(array.type.unit, tz="UTC"))
    return array if array.type == kind else pc.floor_temporal(array, unit=_UNIT[kind.unit]).cast(kind)


_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_UNIT = {"ns": "nanosecond", "us": "microsecond", "ms": "millisecond", "s": "second"}
