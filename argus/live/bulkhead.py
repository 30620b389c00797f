"""Bulkheads: a part of a trace that fails is skipped and counted, and the rest goes on; a watchdog reports a hung loop.

A trace reads what others have written: memory, files, records of any process. A defect in how one of them is read must
cost that process, or that turn of that part, and never the trace of everybody. ``Tracer`` has one ``Bulkheads`` and
gives it to its sides: ``part`` surrounds a piece of a turn, ``process`` what is done for one process, ``job`` for one
job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from argus.model.losses import UNKNOWN, Losses, Owned, Owner, Whom
from argus.model.text import printable
from argus.model.units import seconds
from argus.system import debug

STALL_S = 1.0
"""The rings hold a second of the densest load. A loop that has not turned for longer works late; its rings are read for
it (``draining``)."""
_LOOKS_S = 0.25
"""How often the watchdog looks."""
_REPORTED = 32
"""Failures that are reported with a line; all are counted."""


class _Guard:
    """Surrounds some work: an exception of it ends here. An interrupt does not."""

    def __init__(self, owner: Bulkheads, what: str, failed: Callable[[Exception], None]) -> None:
        self._owner, self._what, self._failed = owner, what, failed

    def __enter__(self) -> None:
        self._before, self._owner.doing = self._owner.doing, self._what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._owner.doing = self._before
        if not isinstance(error, Exception):
            return False
        self._failed(error)
        return True


class Bulkheads:
    """Counts what failed, and reports each kind of failure once.

    Args:
        note: Called with a line for people.
        losses: "processes_quarantined", "turns_failed" and "job_turns_failed" are counted there; None: apart.

    Attributes:
        counters: Losses of the whole session ("detectors_failed" is one), those included that others have counted.
        doing: What is done now, for the watchdog; empty: nothing that has a name.
    """

    def __init__(self, note: Callable[[str], None] = lambda _: None, losses: Losses | None = None) -> None:
        self._note = note
        self.losses = losses if losses is not None else Losses()
        self.counters = self.losses.totals
        self.doing = ""
        self._reported: set[str] = set()

    def part(self, name: str, job: Owned | None = None) -> _Guard:
        """Part of a turn: if it fails, this turn goes on without, and the next one tries again.

        Args:
            name: For people.
            job: The only job that it concerns; None: it may concern any.
        """

        def failed(failure: Exception) -> None:
            self.losses.count("turns_failed", Whom(job))
            self._report(f"{name} failed", failure, "the rest of the trace goes on")

        return _Guard(self, name, failed)

    def job(self, job: Owned) -> _Guard:
        """What is done for one job in a turn."""

        def failed(failure: Exception) -> None:
            self.losses.count("job_turns_failed", Whom(job))
            self._report(f"job {job.name}: what came of it could not be worked on", failure, "other jobs go on")

        return _Guard(self, f"job {job.name}", failed)

    def diagnosed(self, job: Owned, failed: int) -> None:
        """Sets how many parts of a job's diagnosis failed so far; a lower number changes nothing."""
        if failed > job.losses["detectors_failed"]:
            self.losses.count("detectors_failed", Whom(job), number=failed - job.losses["detectors_failed"])

    def process(
        self,
        pid: int,
        part: str,
        quarantine: Callable[[], None],
        job: Owned | None = None,
        owner: Callable[[int], Owner] = lambda pid: UNKNOWN,
    ) -> _Guard:
        """What is done for one process.

        Args:
            pid: The process.
            part: What is done, for people.
            quarantine: Called if it fails; to leave the process alone from then on.
            job: The job that the process belongs to; None: to none yet.
            owner: Called if it fails and there is no job, with the process: whose jobs it may belong to.
        """

        def failed(failure: Exception) -> None:
            whom = Whom(job)
            if job is None:
                with self.part(f"finding out whose process {pid} is"):
                    whom = Whom(None, owner(pid))
            self.losses.count("processes_quarantined", whom)
            self._report(f"process {pid} is left alone: its {part} could not be read", failure, "the others go on")
            with self.part(f"leaving process {pid} alone", job):
                quarantine()

        return _Guard(self, f"{part} of process {pid}", failed)

    def _report(self, what: str, failure: Exception, so: str) -> None:
        if what in self._reported or len(self._reported) >= _REPORTED:
            return
        self._reported.add(what)
        where = debug.crash(failure)
        trace = f"; the traceback is in {where}" if where else ""
        message = str(failure).partition("\n")[0][:200]
        self._note(printable(f"{what} ({type(failure).__name__}: {message}); {so}{trace}"))


class Watchdog:
    """Notices that the loop has not turned.

    Args:
        doing: What the loop does now.
        report: Called, by the watchdog's thread, with a line for people, once for each stall.
        meanwhile: Called by its thread at each look with ``time.monotonic()``: what must go on while the loop hangs. It
            may wait for nothing.

    Attributes:
        stalls: How often the loop was late by more than ``STALL_S``.
        longest_s: By how much it was late at most.
        failures: How often ``meanwhile`` failed.
    """

    def __init__(
        self,
        doing: Callable[[], str],
        report: Callable[[str], None],
        meanwhile: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._doing, self._report, self._meanwhile = doing, report, meanwhile
        self.stalls, self.longest_s, self.failures = 0, 0.0, 0
        self._due = float("inf")
        self._counted = float("inf")
        self._looked = self._cpu = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def expect(self, due: float) -> None:
        """The loop is to turn by then, ``time.monotonic``; infinity: nothing is expected."""
        self._due = due

    def look(self, now: float, cpu: float) -> None:
        """Looks once. Any thread may, one at a time.

        Args:
            now: ``time.monotonic()``.
            cpu: ``time.process_time()``.
        """
        away_s = now - self._looked
        # This thread did not run, nor did the others: Argus was stopped (Ctrl-Z, a debugger), or the machine slept.
        asleep = self._looked > 0 and away_s > _LOOKS_S + STALL_S / 2 and cpu - self._cpu < away_s / 2
        self._looked, self._cpu = now, cpu
        due = self._due
        late_s = now - due
        if late_s <= STALL_S:
            return
        if asleep and due != self._counted:
            self._due = max(self._due, now)
            return
        self.longest_s = max(self.longest_s, late_s)
        if due == self._counted:
            return
        self._counted = due
        self.stalls += 1
        doing = self._doing()
        at = f", at: {doing}" if doing else ""
        self._report(printable(f"the loop has not turned for {seconds(late_s)}{at}; the rings are read meanwhile"))

    def counters(self) -> dict[str, tuple[int, bool]]:
        """By name: the value, and whether a value above 0 is a loss."""
        return {"loop_stalls": (self.stalls, False), "relief_failed": (self.failures, True)}

    def start(self) -> None:
        """Looks every quarter of a second, in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="argus-watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _LOOKS_S)

    def _go_on(self) -> None:
        while not self._stop.wait(_LOOKS_S):
            now = time.monotonic()
            try:
                self._meanwhile(now)
            except Exception as failure:
                self.failures += 1
                if self.failures == 1:
                    debug.crash(failure)
            self.look(now, time.process_time())
