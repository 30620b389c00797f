"""A job diagnosed again and again while it runs, at a cost that does not grow with its past."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from argus.diagnose.case import HANG_S, THRESHOLD
from argus.diagnose.causes.stacks import StackReader
from argus.diagnose.findings import id_of
from argus.diagnose.follow.continuous import Continuous
from argus.diagnose.iteration.hang import SEEN_S
from argus.diagnose.iteration.regression import REGRESSION
from argus.diagnose.read import queries
from argus.diagnose.read.hosts import Hosts, align_hosts, prepare
from argus.diagnose.read.query import Query, of_job
from argus.diagnose.run import diagnose
from argus.diagnose.verdict import Finding, Verdict
from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns

INTERVAL_S = 5.0
"""How often a job is diagnosed, s."""
SPAN_NS = 900_000_000_000
"""Rows of the last so many ns are read, counted from the newest step (a job that hangs is not forgotten)."""
STEPS = 500
"""Of those the newest steps: twice what the longest comparison takes."""
HOSTS_S = 60.0
"""How often the hosts of a job are lined up anew: their clocks drift by some ms an hour."""
AGAIN = 1.25
"""A finding is reported again once its slowdown has changed by this factor."""
LEAST_PAUSE = 4.0
"""The pause after a round is at least so many times as long as it took: a slow store is not kept busy."""


@dataclass(frozen=True)
class Round:
    """What one round found.

    Attributes:
        at_ns: Wall time.
        took_s: How long it took.
        verdict: All of it.
        new: Findings that were not there before, or whose slowdown has changed much.
        gone: Those that are not there any more.
        changed: Whether there is something to report: the first verdict, another status, findings that came or went.
        ended: The trace has ended, or was cut off: there will be nothing new.
        failed: What could not be examined, as of :class:`argus.diagnose.case.Case`.
    """

    at_ns: int
    took_s: float
    verdict: Verdict
    new: list[Finding]
    gone: list[Finding]
    changed: bool
    ended: bool
    failed: tuple[str, ...] = ()


_Key = tuple[str, tuple[int, ...]]


def _key(finding: Finding) -> _Key:
    return finding["kind"], tuple(finding["ranks"])


def _names_onset(finding: Finding) -> bool:
    """Whether the evidence names the first step, as that of all steps that became longer does."""
    pattern = rf"\bstep {finding['steps'][0]}\b"
    return any(re.search(pattern, evidence["text"]) for evidence in finding["evidence"])


@dataclass
class Follower:
    """Judges one run of one job, round after round.

    Attributes:
        store: The store.
        job, run: Whose.
        threshold, hang_after_s: As of :func:`argus.diagnose.run.diagnose`.
        since_ns: Wall time before which nothing counts; 0: no limit but :data:`SPAN_NS`.
        keep: How the hosts of the job go together is stored.
        settings: ClickHouse settings of all queries, such as ``max_threads``.
    """

    store: Store
    job: str
    run: int
    threshold: float = THRESHOLD
    hang_after_s: float = HANG_S
    since_ns: int = 0
    keep: bool = True
    settings: dict[str, int] = field(default_factory=dict)
    _newest_ns: int = 0
    _status: str = ""
    _reported: dict[_Key, Finding] = field(default_factory=dict)
    _begun: dict[_Key, int] = field(default_factory=dict)
    _open: dict[str, _Key] = field(default_factory=dict)
    """Findings of the round before, by id."""
    _across: Hosts | None = None
    _across_due: float = 0.0
    _steps: Continuous | None = None

    def next_round(self) -> Round:
        """Judges the job as it is now.

        Raises:
            ArgusError: The store cannot be asked.
        """
        started = time.monotonic()
        query: Query = partial(query_columns, self.store, settings=self.settings)
        newest = query(queries.NEWEST_STEP, {"job": self.job, "run": self.run, "since_ns": self._newest_ns})
        self._newest_ns = max(self._newest_ns, int(newest["ns"][0]) if len(newest["ns"]) else 0)
        since = max(self.since_ns, self._newest_ns - SPAN_NS, 0)
        if started >= self._across_due:
            # One host: a short query.
            lined_up = prepare(self.store, query, self.job, self.run) if self.keep else None
            self._across = lined_up if self.keep else align_hosts(query, self.job, self.run)
            self._across_due = time.monotonic() + (HOSTS_S if self._across is not None else 0.0)
        failed: list[str] = []
        verdict = diagnose(
            query,
            self.job,
            self.run,
            threshold=self.threshold,
            hang_after_s=self.hang_after_s,
            across=self._across,
            stacks=StackReader(self.store, self.job, self.run),
            since_ns=since,
            newest=STEPS,
            judged=lambda case: failed.extend(case.failed),
        )
        self._watch(query, verdict)
        return replace(self._round(verdict, time.monotonic() - started), failed=tuple(failed))

    def due_s(self) -> float:
        """How soon the silence since the newest step counts as a hang, s, when the job is to be diagnosed whatever the
        pause; infinite: that moment is past, or no step was seen."""
        due = self._newest_ns / 1e9 + self.hang_after_s + SEEN_S - time.time()
        return due if due > 0 else math.inf

    def _watch(self, query: Query, verdict: Verdict) -> None:
        """Feeds the new steps to the change detector, and adds what it detects."""
        if not verdict["steps"]:
            return
        if self._steps is None:
            self._steps = Continuous(least=max(self.threshold, REGRESSION))
        params: dict[str, Any] = {"job": self.job, "run": self.run}
        if self._across is not None:
            query = of_job(query)
            params |= self._across.params()
        rows = query(queries.HOSTS, params)
        hosts = dict(zip(rows["rank"].astype(int).tolist(), rows["host"].tolist(), strict=True))
        last = verdict["steps"][1]
        self._steps.read_steps(query, params, last, list(hosts))
        self._steps.read_ranks(query, params, last, self._across)
        self._steps.add(verdict, params, query, hosts)
        self._steps.add_ranks(verdict, params, hosts)

    def _name(self, verdict: Verdict) -> None:
        """Gives findings the ids that they have had since they were found: by kind and ranks; of those whose ranks
        changed, by kind and the most ranks in common."""
        now = {_key(finding) for finding in verdict["findings"]}
        left = {id_: key for id_, key in self._open.items() if key not in now}
        kept = {key: id_ for id_, key in self._open.items() if key in now}
        given = set(kept.values())
        for finding in verdict["findings"]:
            kind, ranks = key = _key(finding)
            if key in kept:
                finding["id"] = kept[key]
                continue
            common = {
                id_: len(set(ranks) & set(before))
                for id_, (of, before) in left.items()
                if of == kind and (set(ranks) & set(before))
            }
            if common:
                finding["id"] = max(common, key=lambda id_: common[id_])
                left.pop(finding["id"])
            else:
                finding["id"] = id_of(self.job, self.run, finding, given | left.keys())
            given.add(finding["id"])
        self._open = {finding["id"]: _key(finding) for finding in verdict["findings"]}

    def _round(self, verdict: Verdict, took_s: float) -> Round:
        self._name(verdict)
        now = {_key(finding): finding for finding in verdict["findings"]}
        new = []
        for key, finding in now.items():
            # The window moves on: what was there when it began has not begun there. Where the evidence names the step,
            # an earlier one was another time.
            before = 1 << 31 if _names_onset(finding) else self._begun.get(key, 1 << 31)
            self._begun[key] = finding["steps"][0] = min(finding["steps"][0], before)
            reported = self._reported.get(key)
            grown = 1.0 if reported is None else finding["slowdown"] / reported["slowdown"]
            # How long a hang lasts is no news.
            if reported is None or (finding["kind"] != "hang" and not 1 / AGAIN < grown < AGAIN):
                new.append(finding)
        # One whose ranks are others now goes on.
        gone = [
            finding for key, finding in self._reported.items() if key not in now and finding["id"] not in self._open
        ]
        changed = verdict["status"] != self._status or bool(new or gone)
        self._status = verdict["status"]
        kept = {key: finding for key, finding in self._reported.items() if key in now}
        self._reported = kept | {_key(finding): finding for finding in new}
        self._begun = {key: step for key, step in self._begun.items() if key in now}
        coverage = verdict["coverage"]
        ended = coverage["ended"] or "trace_cut_off" in coverage["dropped"]
        return Round(time.time_ns(), took_s, verdict, new, gone, changed, ended)


def follow(
    follower: Follower,
    wait: Callable[[float], bool],
    trouble: Callable[[ArgusError], None],
    interval_s: float = INTERVAL_S,
) -> Iterator[Round]:
    """Rounds until the trace ends or somebody stops it.

    Args:
        follower: Judges.
        wait: Waits for so many seconds; true: stop.
        trouble: Called with the error of a round that failed, as when the store is away; the next round may succeed.
        interval_s: From the begin of a round to that of the next one, at least.
    """
    while True:
        started = time.monotonic()
        pause = interval_s
        try:
            latest = follower.next_round()
        except ArgusError as failure:
            trouble(failure)
        else:
            yield latest
            if latest.ended:
                return
            pause = max(interval_s - (time.monotonic() - started), LEAST_PAUSE * latest.took_s)
            pause = min(pause, follower.due_s())
        if wait(max(pause, 0.1)):
            return
