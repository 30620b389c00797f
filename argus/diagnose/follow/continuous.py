"""Step times of the job, and what each rank's GPU does itself, watched step by step: growth is remembered.

A round of :mod:`argus.diagnose.follow.follow` reads the newest steps alone. What became slow before those, or becomes
slower by so little a step that no window shows it, is detected by what :mod:`argus.diagnose.iteration.changes` keeps:
some kilobytes a job, whatever its past.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.findings import findings_of
from argus.diagnose.iteration.changes import ALARMS, Detector, Event
from argus.diagnose.iteration.regression import REGRESSION
from argus.diagnose.iteration.shift import ALONE, Shift, explain
from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.peers import mesh_of
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Evidence, Verdict
from argus.model.statistics import low_median
from argus.model.units import duration, ranks_on

SURE_STEP = 0.8
"""Steps whose boundary is less sure are left out, as in :mod:`argus.diagnose.run`."""
WORKERS = 4
"""Ranks whose work is examined."""
MEASURES = ("launches", "calls", "bytes")
MOST_OF_RANKS = 50
"""Steps of all ranks that are read at once, the newest ones."""
MOST = 2000
"""Steps that are read at once: of a job that ran long before somebody followed it the newest ones."""


def _kept(growth: Event | None, event: Event) -> Event | None:
    """The growth that lasts after an event. Since when, and from what, it is as it was reported first."""
    if event.kind in ("step", "ramp"):
        if growth is None:
            return event
        return Event(event.kind, event.series, growth.step, event.decided, event.before, event.after)
    return None if event.kind == "over" else growth


class Continuous:
    """Watches one job.

    Args:
        alarms: False alarms allowed in a million steps.
        least: Growth that counts, as a share: as of :func:`argus.diagnose.iteration.regression.find_regression`.
    """

    def __init__(self, alarms: float = ALARMS, least: float = REGRESSION) -> None:
        self.alarms, self.least = alarms, least
        self.detector = Detector(1, alarms=alarms, least=least, work=len(MEASURES))
        self.growth: Event | None = None
        """The growth that lasts; None: there is none."""
        self.steps = 0
        """Steps that were looked at."""
        self.ranks: NDArray[np.int64] = np.empty(0, np.int64)
        self.slower: dict[int, Event] = {}
        """Growth that lasts, by the rank's place among ``ranks``."""
        self._by_rank: Detector | None = None
        self._stage: NDArray[np.int64] = self.ranks
        self._next = self._next_gpu = 0

    def read_steps(self, query: Query, params: dict[str, Any], last: int, ranks: list[int]) -> list[Event]:
        """Reads the steps that are new, but for the newest one, which some ranks may still be in.

        Args:
            query: Runs SQL with parameters, returns columns.
            params: job, run and what else the job's queries need.
            last: The newest step.
            ranks: Those there are.

        Returns:
            What happened.
        """
        first = max(self._next, last - MOST)
        if last - 1 < first:
            return []
        window = {**params, "first": first, "last": last - 1}
        rows = query(queries.STEPS, window)
        chosen = ranks[:: max(1, len(ranks) // WORKERS)][:WORKERS]
        work = query(queries.WORK, {**window, "ranks": chosen})
        by_step = dict(zip(work["step"].astype(np.int64).tolist(), range(len(work["step"])), strict=True))
        work_of_steps = np.stack([work[name].astype(np.float64) for name in MEASURES], axis=1)
        events = []
        for place, step in enumerate(rows["step"].astype(np.int64).tolist()):
            if rows["confidence"][place] < SURE_STEP:
                continue
            row = work_of_steps[by_step[step]] if step in by_step else np.full(len(MEASURES), np.nan)
            now = float(rows["duration_ns"][place])
            events += self.detector.feed(step, np.array([now]), np.where(row > 0, row, np.nan)[None])
            self.steps += 1
        self._next = last
        for event in events:
            self.growth = _kept(self.growth, event)
        return events

    def read_ranks(self, query: Query, params: dict[str, Any], last: int, across: Hosts | None) -> list[Event]:
        """Reads what the GPUs did in the steps that are new, where that is known: computing or doing nothing, which is
        not waiting for others, over the low median of the ranks with the same work.

        Args:
            query, params, last: As of :meth:`read_steps`.
            across: How the hosts go together; None: it is one.

        Returns:
            What happened; ``series`` is the place among ``ranks``.
        """
        first = max(self._next_gpu, last - MOST_OF_RANKS)
        times = gpu_times.times_of(query(queries.GPU_TIMES, {**params, "first": first, "last": last}))
        # The newest step may not be there of all ranks.
        if len(times.steps) < 2 or len(times.ranks) < 2:
            return []
        if self._by_rank is None or not np.array_equal(times.ranks, self.ranks):
            if self._by_rank is not None and not set(times.ranks.tolist()) - set(self.ranks.tolist()):
                return []
            mesh = mesh_of(query(queries.GROUPS, params), times.ranks, times.kernels, gpu_times.joined(across))
            self.ranks, self._stage = times.ranks, mesh.stage
            self._by_rank = Detector(len(times.ranks), alarms=self.alarms, least=self.least)
            self.slower.clear()
        own = times.compute + times.idle
        norm = np.full(own.shape, np.nan)
        for label in np.unique(self._stage).tolist():
            members = np.flatnonzero(self._stage == label)
            if len(members) > 1:
                norm[members] = low_median(own[members])
        events = []
        for place, step in enumerate(times.steps[:-1].tolist()):
            events += self._by_rank.feed(step, own[:, place] / np.maximum(norm[:, place], 1.0))
        self._next_gpu = int(times.steps[-1])
        for event in events:
            kept = _kept(self.slower.get(event.series), event)
            if kept is None:
                self.slower.pop(event.series, None)
            else:
                self.slower[event.series] = kept
        return events

    def add_ranks(self, verdict: Verdict, params: dict[str, Any], hosts: dict[int, str]) -> None:
        """Puts ranks whose GPUs became slower into a verdict that would be ``healthy``."""
        if self._by_rank is None or verdict["status"] != "healthy" or len(self.slower) > len(self.ranks) / 2:
            return
        newest = self._by_rank.newest
        suspects: list[Suspect] = []
        for place, event in sorted(self.slower.items()):
            if not newest[place] >= 1 + self.least:
                continue
            rank = int(self.ranks[place])
            where = ranks_on([rank], [hosts.get(rank, "")])
            how = "gradually" if event.kind == "ramp" else "at once"
            text = (
                f"since step {event.step} the GPU of {where} computes and idles for {newest[place]:.2f} times as long "
                f"as it did, against ranks with the same work; it became slower {how}"
            )
            shown = runnable_sql(
                queries.GPU_TIMES, {**params, "first": max(0, event.step - 20), "last": verdict["steps"][1]}
            )
            suspects.append(
                Suspect(
                    kind="masked_compute_straggler",
                    ranks=[rank],
                    hosts=[hosts[rank]] if rank in hosts else [],
                    since=event.step,
                    last=verdict["steps"][1],
                    lost_ns=1.0,  # nothing yet, each as much as the others
                    slowdown=1.0,
                    confidence=0.9,
                    level="iteration",
                    evidence=[{"text": text, "sql": shown}],
                    action=f"Check the GPU of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC); it has no "
                    "slack left, and is the next to cost time.",
                )
            )
        verdict["findings"] += findings_of(
            suspects, verdict["job"], verdict["run"], lost_ns=float(max(len(self.slower), 1))
        )
        if verdict["findings"]:
            verdict["status"], verdict["reason"] = "degraded", ""

    def add(
        self,
        verdict: Verdict,
        params: dict[str, Any],
        query: Query | None = None,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        """Puts growth that lasts into a verdict that would be ``healthy``: which rank is the cause other detectors know
        better. Growth that Argus itself explains is none, and that of one rank on CPUs counts from more on
        (:mod:`argus.diagnose.iteration.shift`).

        Args:
            verdict: Changed in place.
            params: job, run and what else the job's queries need.
            query: Runs SQL; None: what else changed is not asked.
            hosts: By rank.
        """
        hosts = hosts or {}
        grown = self.growth
        ratio = float(self.detector.newest[0])
        least = max(self.least, ALONE) if len(hosts) == 1 and self._by_rank is None else self.least
        if grown is None or verdict["status"] != "healthy" or not ratio >= 1 + least:
            return
        some = sorted(hosts)[:: max(1, len(hosts) // WORKERS)][:WORKERS]
        first, last = max(0, grown.step - MOST), verdict["steps"][1]
        steps = first, grown.step, last
        shift = Shift() if query is None else explain(query, params, some, steps, grown.before, grown.before * ratio)
        if shift.by_argus or shift.unknown:
            return
        how = "gradually" if grown.kind == "ramp" else "at once"
        text = (
            f"from step {grown.step} on a step takes {duration(grown.before * ratio)} instead of "
            f"{duration(grown.before)} for the same work; it became longer {how}"
        )
        sure = f"such growth is reported falsely once in {1e6 / self.alarms:,.0f} steps at most"
        shown = runnable_sql(queries.STEPS, {**params, "first": max(0, grown.step - 50), "last": verdict["steps"][1]})
        evidence: list[Evidence] = [{"text": text, "sql": shown}, {"text": sure, "sql": shown}]
        if shift.evidence is not None and shift.queued_ns > 0:
            evidence.append(shift.evidence)
        where = ", ".join(list(dict.fromkeys(hosts.values()))[:4])
        suspect = Suspect(
            kind="host_contention" if shift.taken else "regression",
            ranks=[],
            hosts=list(dict.fromkeys(hosts.values())) if shift.taken else [],
            since=grown.step,
            last=verdict["steps"][1],
            lost_ns=grown.before * (ratio - 1),
            slowdown=ratio,
            confidence=0.95,
            level="iteration",
            evidence=evidence,
            action=f"Find out what else runs on the CPUs of {where} since then (top -H), and which the job may use."
            if shift.taken
            else f"Find out what changed for all ranks at step {grown.step}"
            + (" and went on changing" if grown.kind == "ramp" else "")
            + ": memory that fills up, fragmentation, a cache that no longer holds, clocks, the network.",
        )
        verdict["findings"] += findings_of([suspect], verdict["job"], verdict["run"])
        verdict["status"], verdict["slowdown"], verdict["reason"] = "degraded", round(ratio, 4), ""
