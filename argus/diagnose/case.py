"""What is diagnosed: the request and the stored data, each read once, when it is first needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.causes.stacks import StackReader
from argus.diagnose.ranks.lateness import RECENT_STEPS, WINDOWS, Lateness, Straggler, lateness_of
from argus.diagnose.read import gpu_times, queries, transfers
from argus.diagnose.read.ahead import Ahead
from argus.diagnose.read.baseline import Baseline, read_baseline
from argus.diagnose.read.gpu_times import GpuWindow
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.observed import on_cpus_alone
from argus.diagnose.read.peers import between_stages
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.read.transfers import Carried
from argus.diagnose.suspect import StepTime, Suspect
from argus.diagnose.verdict import Evidence
from argus.model.ranks import Gaps

THRESHOLD = 0.05
"""Lost share of the step time from which a job counts as degraded. Below it lies what healthy clusters differ by:
StragglerAnalysis (OSDI '25) explains jobs only from a slowdown of 1.03 on, and calls them slow from 1.1."""
MIN_STEPS = 10
"""With fewer whole steps no verdict is reached: the sign test cannot reach its certainty with two ranks."""
HANG_S = 20.0
"""Silence that counts as a hang, s, or :data:`argus.diagnose.iteration.hang.HANG_STEPS` if that is longer. A checkpoint
or an evaluation that keeps other ranks waiting for so long is worth the same attention. Whoever follows the job
diagnoses it in the moment from which on this can be seen (argus.diagnose.follow.follow.Follower.due_s): a hang is named
within 30 s."""
MOST_CALLS = 1_500_000
"""Collective calls that are compared at once: 1.4 s of CPU time of a query where cores are busy, and 150 MB. Of
larger jobs fewer of the newest steps are compared (:data:`argus.diagnose.ranks.lateness.WINDOWS` [0] at least), and
since when is found by halving."""


@dataclass(frozen=True)
class Asked:
    """What the caller requested.

    Attributes:
        threshold: Lost share of the step time that counts.
        hang_after_s: Silence after the last step that counts as a hang, s.
        to_the_end: The job's last moments are part of it: it may hang.
        whole: All of its steps are, not only the newest.
    """

    threshold: float = THRESHOLD
    hang_after_s: float = HANG_S
    to_the_end: bool = True
    whole: bool = True


WAITED_FOR = ("slow_gpus", "late_ranks", "slow_links", "stage_links")
"""Detectors of ranks and links that others wait for."""
UNKNOWN_HOST = "unknown"
"""The host of ranks for which a recording names none."""
ALIKE_TIMES = "step times that are alike on all ranks do not show who is behind it: import timers (--phase)"
"""Why no rank can be named where ranks' own times are not known."""


@dataclass(frozen=True)
class Logged:
    """What the times that a training loop logged show, besides their suspects.

    Attributes:
        note: A clause on ranks that recovered, and on a job without suspects.
        blind: A slow rank would not show.
        synchronous: Ranks wait for one another: a step is as long as its slowest rank makes it.
        least: What was too small to be seen, a clause.
        partial: A timer that contains computing contains the wait as well: of what a rank is slower by, its own time
            shows a part.
        leads: Of each of the newest steps the rank whose own time was furthest above its usual one, and by how much
            more than any other's, ns; None: ranks' own times are not known.
        waits: Timers that contain the wait for other ranks.
        equal: Timers that are equally long on all ranks in each step.
        episodes: First and last steps of what :attr:`note` says of ranks that recovered.
        unseen: Ranks below the highest one that are not logged, or not in the newest steps.
    """

    note: str = ""
    blind: bool = False
    synchronous: bool = False
    least: str = ""
    partial: bool = False
    leads: Mapping[int, tuple[int, float]] | None = None
    waits: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    episodes: tuple[tuple[int, int], ...] = ()
    unseen: Gaps = field(default_factory=Gaps)


@dataclass
class Notes:
    """What detectors add to the verdict's reason, clauses without a full stop; empty: nothing.

    Attributes:
        doubt: Why the job may hang.
        blurred: Who came late by less than clocks may differ by.
        more_work: That longer steps have more to do, or why they are no fault.
        more_work_since: The step from which on they have more to do; None: they have not.
        long_steps: On long steps that are no rank's.
        recovered: On a rank that the GPUs' own times show to have been slow in a few steps, and to be well since.
        logged: Of logged times; None: there are none, or others are known.
        why_not: Why ranks cannot be compared; empty: they can.
        history: What earlier runs of the job say, or that there are too few.
    """

    doubt: str = ""
    blurred: str = ""
    more_work: str = ""
    more_work_since: int | None = None
    long_steps: str = ""
    recovered: str = ""
    logged: Logged | None = None
    why_not: str = ""
    history: str = ""


@dataclass
class Case:
    """A run of a job that is diagnosed.

    Attributes:
        query: Runs SQL with parameters, returns columns; a query with the same parameters is run once.
        ahead: The same; begins queries whose answers are needed later.
        params: job, run, first and last (steps), and what the job's hosts need.
        asked: The request.
        numbers: Steps with a sure boundary, ascending, shape (steps,).
        durations: The job's time of each, ns, shape (steps,).
        ranks: How many of them were seen.
        calls: Collective calls of a step, of all ranks.
        across: How the hosts of the job go together; None: it has one, or all have the same clock.
        stacks: Where threads were; None: nothing is stored of them.
        suspects: What the detectors that were asked so far report.
        notes: Clauses of detectors for the verdict's reason.
        costless: Ranks that come late while their GPUs lose nothing by it.
        failed: What could not be examined, for a defect of Argus: names of detectors, and of what follows them.
    """

    query: Query
    ahead: Ahead
    params: dict[str, Any]
    asked: Asked
    numbers: NDArray[np.int64]
    durations: NDArray[np.float64]
    ranks: int
    calls: float
    across: Hosts | None = None
    stacks: StackReader | None = None
    suspects: list[Suspect] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    costless: list[Straggler] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        return self.asked.threshold

    @property
    def last(self) -> int:
        """The newest step."""
        return int(self.numbers[-1])

    @cached_property
    def reach(self) -> int:
        """Newest steps whose calls may be compared at once."""
        return int(np.clip(MOST_CALLS / max(self.calls, 1.0), WINDOWS[0], max(WINDOWS)))

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Node of each rank."""
        return hosts_of(self.query, self.params)

    @cached_property
    def recent_ns(self) -> float:
        """What one of the newest steps takes."""
        return float(np.median(self.durations[-RECENT_STEPS:]))

    def recently(self, since: int) -> NDArray[np.int64]:
        """The newest steps, without those before a step where the others are enough: what costs time since then is not
        in them."""
        count = len(self.numbers) - int(np.searchsorted(self.numbers, since))
        return self.numbers[-int(np.clip(count, MIN_STEPS, RECENT_STEPS)) :]

    def taken_ns(self, since: int) -> float:
        """What one of :meth:`recently` takes."""
        count = len(self.recently(since))
        all_of_them = count >= len(self.numbers[-RECENT_STEPS:])
        return self.recent_ns if all_of_them else float(np.median(self.durations[-count:]))

    @property
    def changed(self) -> int:
        """The step since which all of the ranks and links that were found so far are waited for."""
        return max((suspect.since for suspect in self.suspects_of(*WAITED_FOR) if suspect.lost_ns > 0), default=0)

    @property
    def step(self) -> StepTime:
        """What a step takes, and would take without what was found so far."""
        return step_time(self.taken_ns(self.changed), self.suspects)

    @cached_property
    def gpus(self) -> GpuWindow | None:
        """What the GPUs did; None: nothing is stored of it, or of fewer than ten steps."""
        self._begin()
        return gpu_times.read(self.query, self.params, self.numbers, len(self.hosts), self.across)

    @cached_property
    def lateness(self) -> Lateness | None:
        """Who came late to collectives in the newest :attr:`reach` steps; None: ranks cannot be compared, and
        ``notes.why_not`` has the reason."""
        self._begin()
        lateness = lateness_of(self.query(queries.LATENESS, self.newest()), self.numbers[-self.reach :])
        if len(lateness.ranks) > 1 and len(lateness.steps) >= MIN_STEPS:
            return lateness
        aligned = self.query(queries.ALIGNMENT, self.params)
        ranks = int(aligned["ranks"][0]) if len(aligned["ranks"]) else 0
        if ranks < 2:
            self.notes.why_not = "collectives of fewer than 2 ranks were seen, so no rank can be compared with another"
        elif int(aligned["aligned_ranks"][0]) < 2:
            self.notes.why_not = f"the ranks' collectives could not be lined up: {aligned['why'][0]}"
        elif self.params["left_out"] and not len(lateness.steps):
            self.notes.why_not = (
                "all collectives that were seen link stages of a pipeline, which come late in the order of the stages"
                " by design"
            )
        else:
            self.notes.why_not = (
                f"only {len(lateness.steps)} steps have collectives that most of their ranks were seen in"
            )
        return None

    @cached_property
    def transfers(self) -> Carried | None:
        """What transfers took; None: nothing is known of the GPUs."""
        if self.gpus is None:
            return None
        return transfers.read(self.gpus, self.query, self.params, self.numbers, len(self.hosts), self.across)

    @cached_property
    def baseline(self) -> Baseline | None:
        """Earlier runs of the job's class that were healthy; None: no run of any job is a baseline."""
        return read_baseline(self.query, self.params["job"], self.params["run"])

    @cached_property
    def on_cpus(self) -> bool:
        """The job computes on CPUs alone."""
        return on_cpus_alone(self.query, self.params)

    def newest(self) -> dict[str, Any]:
        """Parameters of the newest :attr:`reach` steps."""
        return {**self.params, "first": int(self.numbers[-self.reach :][0])}

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """The nodes of some ranks, each once; of imported ones only those that are named."""
        names = (self.hosts.get(rank, UNKNOWN_HOST) for rank in ranks)
        return list(dict.fromkeys(name for name in names if name != UNKNOWN_HOST))

    def suspects_of(self, *detectors: str) -> list[Suspect]:
        """What some detectors report."""
        return [suspect for suspect in self.suspects if suspect.detector in detectors]

    def _begin(self) -> None:
        """Begins the queries whose answers every diagnosis needs."""
        if "left_out" in self.params:
            return
        for window in gpu_times.windows(self.params, self.numbers, len(self.hosts)):
            self.ahead.start(queries.GPU_TIMES, window)
        groups = self.query(queries.GROUPS, self.params)
        self.params["left_out"] = between_stages(groups, gpu_times.joined(self.across))
        self.ahead.start(queries.LATENESS, self.newest())
        for text, window in transfers.newest(self.params, self.numbers, len(self.hosts)):
            self.ahead.start(text, window)


def step_time(recent_ns: float, suspects: Iterable[Suspect]) -> StepTime:
    """What a step takes, and would take without what these report."""
    step = StepTime(recent_ns, recent_ns)
    for suspect in suspects:
        step = step.shorter(suspect.lost_ns) if suspect.effect is None else suspect.effect(step)
    return step


def hosts_of(query: Query, params: dict[str, Any]) -> dict[int, str]:
    """Node of each rank of a run."""
    rows = query(queries.HOSTS, params)
    return {int(rank): str(host) for rank, host in zip(rows["rank"], rows["host"], strict=True)}


def evidence(text: str, sql: str, params: dict[str, Any]) -> Evidence:
    """A sentence, and the query that shows it with its parameters put in."""
    return {"text": text, "sql": runnable_sql(sql, params)}
