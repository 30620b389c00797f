"""Moments that somebody flags: a row in the store, which every tracer of the run reads.

So a flag reaches all hosts of a job, from wherever the store can be reached.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from argus.live.side import Side
from argus.model.errors import ArgusError
from argus.store.flags import Flag
from argus.store.open import Store
from argus.store.reader import query_columns

if TYPE_CHECKING:
    from argus.live.job import Job
    from argus.live.session import Session
    from argus.live.sides.kernel_rows import KernelSide
    from argus.live.sides.stack_samples import StackSide

MOST = 1000
"""New flags that are taken at a time, the newest first: whoever can write to the store may have written any number."""
KEPT_NS = 1200 * 1_000_000_000
"""A flag that was taken is remembered for so long: twice as long as the store is asked for it."""
ASK_S = 2.0
"""How often a tracer asks for new flags."""
FAR_NS = 3600 * 1_000_000_000
"""How far behind and ahead a flag may reach: whoever can write to the store may have written anything."""

_NEW = """
SELECT job, run, toUnixTimestamp64Nano(ts) AS begin_ns, toUnixTimestamp64Nano(until) AS end_ns, ranks, why,
       toUnixTimestamp64Milli(asked) AS asked_ms
FROM raw_requests
WHERE has({jobs:Array(String)}, job) AND has({runs:Array(UInt32)}, run) AND stored >= now() - 600
ORDER BY asked DESC LIMIT {most:UInt32}
"""


class FlagWatcher:
    """Reads new flags in a thread of its own: a store that answers slowly holds nobody up.

    Attributes:
        trouble: Why flags cannot be read; empty: they can, or the store is away for now.
    """

    def __init__(self, store: Store) -> None:
        self.trouble = "a spool is not read: moments cannot be flagged" if store.spooled else ""
        self._store = store
        self._jobs: dict[tuple[str, int], Job] = {}
        self._seen: dict[tuple[object, ...], int] = {}
        """Flags that were taken, oldest first, and when, ``time.time_ns``."""
        self._pending: deque[tuple[Job, Flag]] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, jobs: Mapping[tuple[str, int], Job]) -> None:
        """Says for which runs flags are wanted: jobs by name and run. Begins to look for them."""
        self._jobs = dict(jobs)
        if self._thread is None and not self._stop.is_set() and not self._store.spooled:
            self._thread = threading.Thread(target=self._watch, name="argus-flags", daemon=True)
            self._thread.start()

    def take(self) -> Sequence[tuple[Job, Flag]]:
        """New flags, each with its job as ``look`` had it."""
        flags = []
        while self._pending:
            flags.append(self._pending.popleft())
        return flags

    def close(self) -> None:
        """Ends the thread; a query that goes on is not waited for."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.ask()
            except ArgusError:
                pass  # the writer reports that the store is away
            except Exception as failure:  # a driver's own: the next attempt may do
                self.trouble = f"flags cannot be read: {failure}"
            self._stop.wait(ASK_S)

    def ask(self) -> None:
        """Asks the store once.

        Raises:
            ArgusError: It cannot be asked.
        """
        jobs = dict(self._jobs)
        if not jobs:
            return
        names = {"jobs": sorted({name for name, _ in jobs}), "runs": sorted({run for _, run in jobs}), "most": MOST}
        columns = query_columns(self._store, _NEW, names, settings={"max_execution_time": 5})
        words = ("job", "run", "begin_ns", "end_ns", "ranks", "why", "asked_ms")
        now_ns = time.time_ns()
        while self._seen and now_ns - next(iter(self._seen.values())) > KEPT_NS:
            del self._seen[next(iter(self._seen))]
        for row in reversed(list(zip(*(columns[word].tolist() for word in words), strict=True))):
            name, run, begin_ns, end_ns, ranks, why, _ = row
            key = (*row[:4], tuple(ranks), *row[5:])
            if key not in self._seen and (job := jobs.get((name, run))) is not None:
                self._seen[key] = now_ns
                begin_ns, end_ns = max(begin_ns, now_ns - FAR_NS), min(end_ns, now_ns + FAR_NS)
                if begin_ns < end_ns:
                    self._pending.append((job, Flag(begin_ns, end_ns, tuple(ranks), why)))


class FlagSide(Side):
    """Keeps the moments that somebody has flagged.

    Args:
        session: The trace.
        store: Where flags are.
        kernels: Stores the operations of these moments.
        stacks: Samples more often after them.
    """

    name = "flags"

    def __init__(self, session: Session, store: Store, kernels: KernelSide, stacks: StackSide) -> None:
        self._session = session
        self._kernels = kernels
        self._stacks = stacks
        self._watcher = FlagWatcher(store)

    def work(self, now: float, *, final: bool = False) -> None:
        """Takes new flags over, where that makes a difference."""
        if not self._kernels.keeps:
            return
        session, watcher = self._session, self._watcher
        watcher.look({(job.name, job.run): job for job in session.jobs})
        if watcher.trouble and watcher.trouble not in session.notes:
            session.note(watcher.trouble)
        for job, flag in watcher.take():
            why = f"asked for: {flag.why}"
            if changed := self._stacks.raise_sampling(why, time.monotonic()):
                session.note(changed)
            begin_ns, end_ns = (int(ns) - session.mono_offset_ns for ns in (flag.begin_ns, flag.end_ns))
            self._kernels.flag(job, begin_ns, end_ns, why, flag.ranks, asked=True)

    def close(self) -> None:
        """Asks for flags no more."""
        self._watcher.close()
