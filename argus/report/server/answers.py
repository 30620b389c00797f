"""What the server answers, from a store: runs, pages, parts of a heat map at full resolution. All of it only reads.

Functions here wait for the store: they run in threads, a few at a time.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import ranks_text
from argus.report.page import finite, packed
from argus.store.open import Store
from argus.store.read.jobs import JobRun, find_job_runs
from argus.store.reader import query_columns

PAGES = 4
"""Pages that are kept: as many runs as a few people look at. One of 10,240 ranks has some 10 MB."""
REST = 3
"""A page is made anew after so many times the time that it took: a run changes all the time, and pages of it cost the
store, which may be on a node that trains, at most a quarter of a core."""
MOST_REST_S = 60.0
MOST_RUNS = 2_000
"""Runs that the list has, the newest."""
STEADY_S = 10
"""A run without steps may have changed every so often, s: there is nothing that counts its progress."""

_VERSION = """
SELECT
  (SELECT max(step) FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}) AS step,
  (SELECT toInt64(toUnixTimestamp64Nano(max(created))) FROM findings WHERE job = {job:String} AND run = {run:UInt32})
    AS judged,
  (SELECT countIf(ended IS NULL) FROM jobs FINAL WHERE job = {job:String} AND run = {run:UInt32}) AS open,
  (SELECT toInt64(intDiv(toUnixTimestamp(max(ts)), {steady:UInt32})) FROM coverage
   WHERE job = {job:String} AND run = {run:UInt32}) AS covered,
  (SELECT count() FROM jobs WHERE job = {job:String} AND run = {run:UInt32}) +
  (SELECT count() FROM ranks WHERE job = {job:String} AND run = {run:UInt32}) +
  (SELECT count() FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}) AS known
"""


@dataclass(frozen=True)
class Asked:
    """A page that is asked for: a run, and of its steps the first and the last (None: all)."""

    job: str
    run: int
    first: int | None = None
    last: int | None = None


Zoom = Callable[[str, int, int], tuple[Any, bytes]]
"""A measure of the heat map from one step to another, with the packed arrays beside it."""


@dataclass(frozen=True)
class Built:
    """A page.

    Attributes:
        page: The document (:class:`argus.report.panel.Page`).
        arrays: Those that it refers to, packed.
        zoom: Answers for parts of its heat map.
    """

    page: Any
    arrays: bytes
    zoom: Zoom


Build = Callable[[Store, Asked], Built]


@dataclass(frozen=True)
class _Kept:
    """A page as it was sent, of a version of its run.

    Attributes:
        rests_until_s: When its run is looked at again, by the clock of :class:`Answers`.
    """

    version: str
    answer: bytes
    zoom: Zoom
    rests_until_s: float


class Answers:
    """Answers from one store. Pages are built once for each state of their run, whoever asks for them."""

    def __init__(self, store: Store, build: Build, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._build = build
        self._clock = clock
        self._pages: OrderedDict[Asked, _Kept] = OrderedDict()
        self._locks: dict[Asked, threading.Lock] = {}
        self._guard = threading.Lock()

    def runs(self) -> bytes:
        """The runs of the store: those with the newest verdicts first, then those without one.

        Raises:
            ArgusError: The store cannot be reached.
        """
        runs = find_job_runs(self._store)
        runs.sort(key=lambda run: (run.judged_ns, run.ended_ns), reverse=True)
        left_out = max(len(runs) - MOST_RUNS, 0)
        shown = [_row(run) for run in runs[:MOST_RUNS]]
        return _json({"store": self._store.url, "runs": shown, "left_out": left_out})

    def version(self, asked: Asked) -> str:
        """Something that differs once the run has more to show; not before its page has rested (:data:`REST`).

        Raises:
            ArgusError: The store cannot be reached, or has no such run.
        """
        with self._guard:
            kept = self._pages.get(asked)
        if kept is not None and self._clock() < kept.rests_until_s:
            return kept.version
        values = {"job": asked.job, "run": asked.run, "steady": STEADY_S}
        rows = query_columns(self._store, _VERSION, values)
        if not int(rows["known"][0]):
            raise ArgusError("no such run is stored", "The list of runs has those that are", EXIT_UNAVAILABLE)
        step, judged, is_open, covered = (int(rows[name][0] or 0) for name in ("step", "judged", "open", "covered"))
        return f"{step}.{judged}.{is_open}" + (f".{covered}" if not step else "")

    def page(self, asked: Asked) -> bytes:
        """The page of a run as JSON: ``page`` and ``arrays`` (base64).

        Raises:
            ArgusError: The store cannot be reached, or has no such run.
        """
        return self._page(asked).answer

    def heatmap(self, asked: Asked, measure: str) -> bytes:
        """A measure of the heat map, of the steps that are asked for: ``heatmap`` and ``arrays`` (base64).

        Raises:
            ArgusError: The store cannot be reached, or has no such run or measure.
        """
        if asked.first is None or asked.last is None or asked.first > asked.last:
            raise ArgusError("which steps?", "Ask for &first=STEP&last=STEP", EXIT_UNAVAILABLE)
        # Of the page that is looked at: a newer one may have another scale.
        whole = Asked(asked.job, asked.run)
        with self._guard:
            kept = self._pages.get(whole)
        try:
            heatmap, arrays = (kept or self._page(whole)).zoom(measure, asked.first, asked.last)
        except ArgusError:
            self.version(whole)  # of a run that is gone that is what is wrong
            raise
        return _json({"heatmap": heatmap, "arrays": packed(arrays)})

    def _page(self, asked: Asked) -> _Kept:
        with self._guard:
            lock = self._locks.setdefault(asked, threading.Lock())
        try:
            with lock:
                return self._built(asked)
        finally:
            with self._guard:
                for old in [one for one, lock in self._locks.items() if one not in self._pages and not lock.locked()]:
                    del self._locks[old]

    def _built(self, asked: Asked) -> _Kept:
        version = self.version(asked)
        with self._guard:
            kept = self._pages.get(asked)
            if kept is not None and kept.version == version:
                self._pages.move_to_end(asked)
                return kept
        began_s = self._clock()
        built = self._build(self._store, asked)
        answer = {"page": built.page, "arrays": packed(built.arrays), "version": version}
        text, ended_s = _json(answer), self._clock()
        rests_s = min(REST * (ended_s - began_s), MOST_REST_S)
        kept = _Kept(version, text, built.zoom, ended_s + rests_s)
        with self._guard:
            self._pages[asked] = kept
            self._pages.move_to_end(asked)
            while len(self._pages) > PAGES:
                self._pages.popitem(last=False)
        return kept


def asked_for(parameters: dict[str, str]) -> Asked:
    """What a request asks for.

    Raises:
        ArgusError: It is not a run of a job.
    """
    job = parameters.get("job", "")
    if not job or len(job) > 1_000:
        raise ArgusError("which job?", "Ask for ?job=NAME&run=NUMBER", EXIT_UNAVAILABLE)
    numbers: dict[str, int | None] = {}
    for name in ("run", "first", "last"):
        text = parameters.get(name, "")
        if text and not (re.fullmatch("[0-9]{1,10}", text) and int(text) < 1 << 32):
            raise ArgusError(f"{name} is not a number", "", EXIT_UNAVAILABLE)
        numbers[name] = int(text) if text else None
    if numbers["run"] is None:
        raise ArgusError("which run?", "Ask for ?job=NAME&run=NUMBER", EXIT_UNAVAILABLE)
    return Asked(job, numbers["run"], numbers["first"], numbers["last"])


def _row(run: JobRun) -> dict[str, Any]:
    """A run in the list. Its numbers fit into JavaScript's, times in ns as text do not have to."""
    summary = ""
    if run.kind:
        of = f" of {ranks_text(run.finding_ranks)}" if run.finding_ranks else ""
        summary = run.kind.replace("_", " ") + of
    return {
        "job": run.job,
        "run": run.run,
        "began_ns": str(run.started_ns),
        "ended_ns": None if run.open else str(run.ended_ns),
        "ranks": run.ranks,
        "world_size": run.world_size,
        "hosts": run.hosts,
        "steps": run.steps,
        "step_ns": run.step_ns,
        "status": run.status,
        "summary": summary,
    }


def _json(answer: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(answer), allow_nan=False, separators=(",", ":"))
    return text.encode()
