"""The diagnosis that runs beside a trace: what it finds is reported, stored, and looked at more closely.

A thread of the tracer's process asks the store; most of a round is the store's work, on one thread, and most of what is
left is waiting. It runs for about a fifth of the time, of which owners have equal parts (``turns.py``). Of a job that
is traced on several hosts only one judges: the one that has the job's lowest rank.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from argus.diagnose.follow.standing import News, Standing, in_words
from argus.diagnose.verdict import Finding
from argus.model.errors import ArgusError
from argus.model.losses import Owner
from argus.model.text import printable
from argus.store.limits import QueryBounds
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.system import debug

if TYPE_CHECKING:
    # Half of what a trace imports: its own thread does that.
    from argus.diagnose.follow.follow import Follower, Round

INTERVAL_S = 10.0
"""How often, s; and in the moment from which on a hang can be seen."""
KEPT_NEWS = 256
"""The newest that nobody has taken: the live view shows what is the matter now, and takes none."""
EARLY_S = (2.0, 2.0, 3.0, 3.0)
"""Pauses before the first rounds. A verdict needs ten steps, not ten seconds; but what the first rounds see is the time
in which Argus itself starts, too: until the last of them a verdict is provisional, and a finding is reported once two
rounds in a row have it."""
SETTINGS = {"max_threads": 1, "max_execution_time": 20, "max_memory_usage": 1_000_000_000}
"""Of its queries: the tracer's own rows, and the job, go first."""

_IN_CHARGE = """
SELECT argMin(host, (rank, host)) AS host FROM
(
  SELECT rank, argMax(host, version) AS host, argMax(state, version) AS state FROM ranks
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank
)
"""
_NEWEST = """
SELECT status, kind, evidence FROM findings
WHERE job = {job:String} AND run = {run:UInt32}
  AND created = (SELECT max(created) FROM findings WHERE job = {job:String} AND run = {run:UInt32})
ORDER BY share DESC
"""


def in_charge(store: Store, job: str, run: int) -> str:
    """The host whose tracer diagnoses a run: the one that has its lowest rank; empty: no rank is stored.

    Raises:
        ArgusError: The store cannot be asked.
    """
    host = query_columns(store, _IN_CHARGE, {"job": job, "run": run}, settings=SETTINGS)["host"]
    return str(host[0]) if len(host) else ""


class Watch:
    """Judges the jobs of a trace while it runs.

    Args:
        store: Where the rows are. A connection of its own is made: the tracer's is not waited for.
        host: This one.
        interval_s: How often.

    Attributes:
        state: "on", or "off: why".
        rounds, busy_s: How many there were, and how long they took together.
    """

    def __init__(self, store: Store, host: str, interval_s: float = INTERVAL_S) -> None:
        self.state = "off: a spool is not read" if store.spooled else "on"
        self.rounds, self.busy_s = 0, 0.0
        self._store = Store(store.target, create=False)
        self._host, self._interval_s = host, interval_s
        self._runs: set[tuple[str, int]] = set()
        self._owners: dict[tuple[str, int], Owner] = {}
        self._followers: dict[tuple[str, int], Follower] = {}
        self._found: dict[tuple[str, int], Standing] = {}
        self._news: deque[News] = deque(maxlen=KEPT_NEWS)
        self._rounds_of: dict[tuple[str, int], int] = {}
        """Rounds of each run that had a verdict."""
        self._judged: dict[tuple[str, int], int] = {}
        self._held: dict[tuple[str, int], dict[tuple[str, tuple[int, ...]], Finding]] = {}
        """Findings of early rounds that were not reported yet."""
        self._failed: dict[tuple[str, int], set[str]] = {}
        self._left_out: set[tuple[str, int]] = set()
        """Runs whose diagnosis failed."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, runs: Iterable[tuple[str, int]]) -> None:
        """Sets which runs are traced: (job, run), and whose they are where it is a mapping. The first call starts the
        thread."""
        self._owners = dict(runs) if isinstance(runs, Mapping) else {}
        self._runs = set(runs)
        if self._thread is None and self.state == "on" and self._runs and not self._stop.is_set():
            self._thread = threading.Thread(target=self._go_on, name="argus-diagnose", daemon=True)
            self._thread.start()

    def take(self) -> list[News]:
        """What has changed since the last call."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def lines(self) -> list[str]:
        """What is the matter now, as far as it was reported, a line each."""
        return [
            in_words(finding)
            for run, standing in list(self._found.items())
            for finding in standing.findings
            if _key(finding) not in self._held.get(run, {})
        ]

    def standing(self, job: str, run: int) -> Standing | None:
        """What is the matter with a run now; None: there was no round yet."""
        return self._found.get((job, run))

    def detectors_failed(self, job: str, run: int) -> int:
        """How many parts of a run's diagnosis have failed, as far as that is a defect of Argus."""
        return len(self._failed.get((job, run), ()))

    def end(self) -> None:
        """No round begins any more."""
        self._stop.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends it. A round that takes longer is not waited for."""
        self.end()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            self._store.close()

    def _go_on(self) -> None:
        from argus.diagnose.follow.turns import Turns

        turns, now = Turns(), 0.0
        pause = min(EARLY_S[0], self._interval_s)
        while not self._stop.wait(pause):
            now += pause
            runs = self._runs
            for book in (self._followers, self._found, self._rounds_of, self._held, self._failed, self._judged):
                for run in book.keys() - runs:
                    book.pop(run)
            self._left_out &= runs
            turns.keep(runs - self._left_out, self._owners, now)
            while not self._stop.is_set() and (chosen := turns.choose(now)) is not None:
                limit_s, begun = turns.limit_s(chosen), now
                took, failed = self._judge(chosen, limit_s)
                now += took
                number = self._judged[chosen] = self._judged.get(chosen, 0) + 1
                pause_s = min(EARLY_S[number] if number < len(EARLY_S) else self._interval_s, self._interval_s)
                follower = self._followers.get(chosen)
                due_s = follower.due_s() if follower is not None else math.inf
                turns.judged(chosen, begun, now, pause_s=pause_s, due_s=due_s, failed=failed)
                turns.keep(runs - self._left_out, self._owners, now)
            pause = turns.pause_s(now, self._interval_s)

    def _judge(self, run: tuple[str, int], limit_s: float) -> tuple[float, bool]:
        """One round of a run: how long it took, s, and whether nothing came of it."""
        begun = time.monotonic()
        self._store.bounds = QueryBounds(SETTINGS, begun + limit_s)
        try:
            took = self.diagnose_run(*run)
            standing = self._found.get(run)
            debug.note(f"diagnosis: {run[0]}: {len(standing.findings) if standing else 0} findings")
            return max(took, time.monotonic() - begun), False
        except ArgusError:
            pass  # the store is away: the writer reports that; or the round took too long
        except Exception as failure:  # a defect, or a driver's own: the trace goes on without
            why = printable(f"off: it failed ({type(failure).__name__}: {failure})")
            self._left_out.add(run)
            self._failed.setdefault(run, set()).add("diagnosis")
            debug.crash(failure)
            self._news.append(News("off", text=f"diagnosis of {printable(run[0])} {why}"))
            if len(self._runs) == 1:
                self.state = why
        return time.monotonic() - begun, True

    def diagnose_run(self, job: str, run: int) -> float:
        """One round of one run; returns how long it took, s. If another host diagnoses it, what that one found is taken
        over: every tracer looks closer.

        Raises:
            ArgusError: The store cannot be asked.
        """
        from argus.diagnose.follow.follow import Follower

        if self._followers.get((job, run)) is None:
            self._followers[job, run] = Follower(self._store, job, run, keep=False, settings=dict(SETTINGS))
        if in_charge(self._store, job, run) != self._host:
            rows = query_columns(self._store, _NEWEST, {"job": job, "run": run}, settings=SETTINGS)
            if len(rows["status"]):
                stored = [json.loads(text) for kind, text in zip(rows["kind"], rows["evidence"], strict=True) if kind]
                self._found[job, run] = Standing(str(rows["status"][0]), stored)
            return 0.0
        latest = self._followers[job, run].next_round()
        self.rounds, self.busy_s = self.rounds + 1, self.busy_s + latest.took_s
        self._count_failed((job, run), latest)
        self._report(job, run, latest)
        return latest.took_s

    def _count_failed(self, run: tuple[str, int], latest: Round) -> None:
        before = self._failed.get(run, set())
        if not before.issuperset(latest.failed):
            self._failed[run] = before.union(latest.failed)
            self._news.append(News("failed", text=f"diagnosis of {printable(run[0])}: {latest.verdict['reason']}"))

    def _report(self, job: str, run: int, latest: Round) -> None:
        verdict = latest.verdict
        rounds = self._rounds_of[job, run] = self._rounds_of.get((job, run), 0) + 1
        early = rounds < len(EARLY_S)
        if early and verdict["status"] == "inconclusive":
            return  # more will be known in a moment
        held = self._held.pop((job, run), {})
        now = {_key(finding): finding for finding in verdict["findings"]}
        fresh = {_key(finding): finding for finding in latest.new if _key(finding) not in held}
        new = [now[key] for key in held if key in now]
        gone = [finding for finding in latest.gone if _key(finding) not in held]
        if early:
            self._held[job, run] = fresh
        else:
            new += fresh.values()
        self._found[job, run] = Standing(verdict["status"], verdict["findings"], verdict["reason"], provisional=early)
        if verdict["status"] != "inconclusive":
            debug.note(f"verdict: {verdict['status']}{' so far' * early}")
        if not (new or gone):
            return
        self._news.extend(News("found", finding) for finding in new)
        self._news.extend(News("over", finding) for finding in gone)
        from argus.diagnose.save import save

        # Stores the findings, and has all tracers of the job keep every GPU operation of the next seconds.
        save(self._store, verdict)


def _key(finding: Finding) -> tuple[str, tuple[int, ...]]:
    return finding["kind"], tuple(finding["ranks"])
