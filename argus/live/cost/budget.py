"""What observing costs the jobs, kept within ``--max-overhead``: measures, decides, and has the sides carry it out."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence

from argus.capture.attachment import Attachment
from argus.capture.call_prices import CallPrices
from argus.capture.process.targets import queued_ns
from argus.live.cost.governor import Change, Part, Rung
from argus.live.cost.ladders import OF_OWNERS
from argus.live.cost.neighbours import Neighbours, Spent
from argus.live.cost.overhead import FIRST_LOOKS_S, RUN_NS, Overhead, describe_change, whose
from argus.live.job import Job
from argus.live.session import Session
from argus.live.side import Counters, Side
from argus.live.sides.calls import CallSide
from argus.live.sides.probing import SUBJECTS, ProbingSide
from argus.live.signals import Signals
from argus.model.losses import UNKNOWN, Owner

MOST_SHARE = 0.9
"""Of the job's time: more is not believed to be lost while all is probed."""
COUNTED = ("hits", "hits_ignored", "marks", "stack_samples", "gpu_ops", "cupti_callback_ns")
"""Counters of sides that costs are computed from."""
NOTHING_SPENT = (0, 0, 0)
"""Of a process that the kernel side does not know (``Probes.spent``)."""


class BudgetSide(Side):
    """Keeps a trace within its budget, and processes within their share of it.

    Args:
        session: The trace.
        calls: What has been called, and in which waits.
        probing: Carries out the rungs of the probes.
        others: Sides that can reduce what they observe, and are no probes.
        signals: Receives what changes.

    Attributes:
        overhead: What is measured.
    """

    name = "overhead"
    punctual = True

    def __init__(
        self, session: Session, calls: CallSide, probing: ProbingSide, others: Sequence[Side], signals: Signals
    ) -> None:
        self._session = session
        self._calls = calls
        self._probing = probing
        self._others = others
        self._by_part: dict[Part, Side] = {part: side for side in (probing, *others) for part in side.parts}
        self._signals = signals
        self.overhead = Overhead(session.options.max_overhead)
        self._neighbours = Neighbours(session.options.max_overhead)
        self._hits: dict[int, int] = {}
        """Of each process: hits of its probes."""
        self._spent: dict[int, tuple[float, int, int, int, int]] = {}
        """Of each process: when it was looked at, hits of its probes, what their traps cost, records refused, for how
        long it had waited for a CPU."""
        self._reduced: Tally[str] = Tally()
        """How often something was given up, by the rungs' counters."""
        self._reduced_of: dict[Owner, Tally[str]] = {}
        """The same for one owner."""
        self._unreported: tuple[list[Change], int] | None = ([], 0)
        """Changes while the run had no number, and since when they hold; None: it has one."""
        self._files_probed = 0
        self._gpu_ops = 0
        self._gpu_ops_of: dict[Owner, int] = {}
        """Operations of GPUs as far as their cost counts, of all, and of each owner that is there."""

    # ---- when

    def start(self) -> None:
        """Begins to measure: before the first probe is put on."""
        self.overhead.start()
        self._govern()

    def probes_are_on(self) -> None:
        """The first probes were put on: what they cost is measured soon, before anything else takes its time."""
        self._session.attached_ns = time.monotonic_ns()
        self._govern()
        self.overhead.restart(time.monotonic())
        self._files_probed = len(self._session.roster.attached)
        if self._session.live():
            time.sleep(FIRST_LOOKS_S[0])
            self._calls.drain()
            self._govern()

    def run_is_numbered(self) -> None:
        """Reports what was changed while the run had no number."""
        assert self._unreported is not None
        (changes, since_ns), self._unreported = self._unreported, None
        for change in changes:
            self._report(change)
        self._signals.store(since_ns or self._session.attached_ns)

    @property
    def due(self) -> float:
        """When it measures next, ``time.monotonic``."""
        return self.overhead.due_at

    def poll(self, now: float, slack_s: float = 0.0) -> None:
        """Measures, when that is due: soon after probes were put on."""
        now = time.monotonic()
        if (files := len(self._session.roster.attached)) > self._files_probed:
            self.overhead.restart(now)
        self._files_probed = files
        if self.overhead.due(now):
            self._govern()

    # ---- what it costs

    def _govern(self, *, final: bool = False) -> None:
        """Measures what observing costs the jobs, and observes less where that is too much."""
        probes, probing = self._session.probes, self._probing
        if not final:
            self._calls.drain()  # waits until now, as hits are counted until now
        values = {counter.name.lower(): value for counter, value in probes.counters().items()}
        samplers: dict[str, tuple[int, int]] = {}
        spent: dict[Part, Mapping[Owner, int]] = {}
        for side in self._others:
            values |= {name: value for name, (value, _) in side.counters().items()}
            samplers |= side.run_times()
            spent |= side.spent_by_owner()
        counted = {name: values.get(name, 0) for name in COUNTED}
        of_gpus = dict(spent.get(Part.GPU, {}))
        self._gpu_ops += sum(max(count - self._gpu_ops_of.get(owner, 0), 0) for owner, count in of_gpus.items())
        self._gpu_ops_of = of_gpus
        counted["gpu_ops"] = self._gpu_ops
        counted["cupti_api"] = self._session.options.cupti_options.api
        counted["waited_ns"] = self._calls.waited_ns
        owners = {
            member.target.pid: job.owner
            for job, member in self._session.roster.by_pid.values()
            if not member.ignored and member.state == "traced"
        }
        live = {member.target.pid for member in self._session.live()}
        owners = {pid: owner for pid, owner in owners.items() if pid in live}
        programs = probes.run_times()
        of_processes = probes.spent_of_all()
        prices, hits = self._prices(of_processes), probes.hits()
        now = time.monotonic()  # reading rings may have taken longer than the time that is measured
        self.overhead.count_hits(hits, prices.now)
        able = None
        if not final:
            able = {
                owner: {rung for side in self._others for rung in side.reducible(owner)} for owner in {*owners.values()}
            }
        if len({*owners.values()}) > 1:
            spent |= _hits_by_owner(owners, of_processes)
        changes_of_ladders = self.overhead.look(now, owners, programs, samplers, counted, able, spent)
        now_ns = time.monotonic_ns()
        for own in changes_of_ladders:
            self._carry_out(own.change, now, own.owner)
            self._report(own.change, own.owner)
        if changes_of_ladders:
            self._signals.store(now_ns)
        if final:
            return
        plan = probing.plan
        apart = plan.windowed | plan.sampled
        on_ns = {subject: probing.on_ns[subject] if subject in apart else None for subject in SUBJECTS}
        if self._ignore_heavy_processes(now, of_processes):
            self.overhead.leave_out(programs, on_ns, probing.on_hits)
            return
        self.overhead.correct(probing.measured_share())
        changes = self.overhead.look_at_probes(
            now,
            programs,
            prices.whole,
            prices.entry,
            on_ns,
            probing.on_hits,
            probes.pulse,
            probing.pulses,
            step_s=self._step_s(),
        )
        if self.overhead.governor.plan != plan:
            self._apply_plan(changes, now)
        probing.weigh(self.overhead.pulse)

    def _prices(self, of_processes: Mapping[int, tuple[int, int, int]]) -> CallPrices:
        """What calls cost now: of each process by the files that it maps, and by how much it has called."""
        probes, roster = self._session.probes, self._session.roster
        groups: dict[tuple[int, ...], tuple[list[Attachment], float]] = {}
        before, self._hits = self._hits, {}
        for pid, (_, member) in roster.by_pid.items():
            if member.ignored:
                continue  # its calls are not among those that are counted
            attachments = roster.attachments_of(member)
            key = tuple(map(id, attachments))
            self._hits[pid] = of_processes.get(pid, NOTHING_SPENT)[0]
            new = max(self._hits[pid] - before.get(pid, 0), 0)
            groups[key] = attachments, new + groups.get(key, (attachments, 0))[1]
        return CallPrices.mean((probes.prices_of(files), new) for files, new in groups.values())

    def _step_s(self) -> float:
        """How long a step takes, of the job with the longest; 0: not known."""
        longest = 0.0
        for job in self._session.jobs:
            thinned = job.thinned.step_ns if job.thinned is not None else 0
            longest = max(longest, thinned or (job.step_ns / job.step_count if job.step_count else 0.0))
        return longest / 1e9

    # ---- what is given up for it

    def _apply_plan(self, changes: list[Change], now: float) -> None:
        """Probes what the governor's plan says, reports what changes, and stores it."""
        slowed = 1 / (1 - min(self.overhead.lost_inside, MOST_SHARE))
        since_ns = self._probing.apply(self.overhead.governor.plan, slowed)
        for change in changes:
            self._carry_out(change, now)
        if self._unreported is not None:
            self._unreported = [*self._unreported[0], *changes], since_ns
            return
        for change in changes:
            self._report(change)
        if changes:
            self._signals.store(since_ns)

    def _carry_out(self, change: Change, now: float, owner: Owner | None = None) -> None:
        """Has the side whose part it is observe less, or more again: of one owner, or of all."""
        rung, side = change.rung, self._by_part[change.rung.part]
        if change.down:
            side.reduce(rung, now, owner or UNKNOWN)
            self._reduced[rung.counter] += 1
            if owner is not None and rung.counter:
                self._reduced_of.setdefault(owner, Tally())[rung.counter] += 1
        else:
            side.restore(rung, now, owner or UNKNOWN)

    @property
    def _several(self) -> bool:
        """Whether jobs of several owners are traced."""
        return len({job.owner for job in self._session.jobs}) > 1

    def _report(self, change: Change, owner: Owner | None = None) -> None:
        """Says what has changed, and stores it as a feature's state."""
        of = whose(owner) if owner is not None and self._several else ""
        text = describe_change(change, self._session.options.max_overhead, of)
        self._session.note(text)
        state = change.rung.feature, "off" if change.down else "on", text
        for job in self._session.jobs:
            if owner is not None and job.owner != owner:
                continue
            if ranks := [member.rank for member in job.ranks() if member.state == "traced"]:
                self._session.write_features(job, ranks, [state])

    # ---- whose calls are ignored

    def _ignore_heavy_processes(self, now: float, of_processes: Mapping[int, tuple[int, int, int]]) -> bool:
        """Ignores processes that take more than their share from others. Whether what was counted since the last time
        is to decide nothing else: it is not all of processes that stay."""
        before, spent = self._spent, {}
        self._spent = {}
        for pid, (job, member) in self._session.roster.by_pid.items():
            if member.state != "traced" or member.ignored:
                continue
            hits, member.refused, trap_ns = of_processes.get(pid, NOTHING_SPENT)
            queued = self.overhead.queued.get(pid, 0) or queued_ns(pid)
            self._spent[pid] = now, hits, trap_ns, member.refused, queued
            if pid in before:
                then, *counts_then, queued_then = before[pid]
                elapsed_s = max(now - then, 1e-3)
                ran_s = elapsed_s - (queued - queued_then) / 1e9
                new_hits, new_ns, refused = (
                    count - earlier for count, earlier in zip(self._spent[pid][1:4], counts_then, strict=True)
                )
                # One job's steps may show that traps cost less than measured, not that others' cost more.
                cost_ns = new_hits * RUN_NS + new_ns * min(self.overhead.correction, 1.0)
                spent[pid] = Spent(id(job), job.owner, new_hits, cost_ns, refused, elapsed_s, ran_s)
        ignored = self._neighbours.look(spent)
        if ignored:  # all at once: to let go of probes takes time
            self._session.probes.ignore(*ignored)
        for pid, why in ignored.items():
            self._ignore(pid, why)
        return bool(ignored) or self._neighbours.suspects

    def _ignore(self, pid: int, why: str) -> None:
        """Notes that no call of a process is recorded any more."""
        job, member = self._session.roster.by_pid[pid]
        member.ignored = f"the calls of process {pid} are ignored: {why}"
        self._session.note(f"rank {member.rank} of {job.name}: {member.ignored}; trace it alone with --pid {pid}")
        self._signals.store()

    # ---- the end, and results

    def begin_stop(self) -> None:
        """Measures for the last time."""
        self._govern(final=True)

    def close(self) -> None:
        """Measures nothing any more."""
        self.overhead.close()

    def counters(self) -> Counters:
        """What observing cost, and how often something was given up for it."""
        given_up: Counters = {rung.counter: (self._reduced[rung.counter], True) for rung in Rung if rung.counter}
        return self.overhead.counters() | given_up

    def own_losses(self, job: Job) -> dict[str, int]:
        """What was given up for a job's owner alone."""
        reduced = self._reduced_of.get(job.owner, Tally())
        return {rung.counter: reduced[rung.counter] for rung in OF_OWNERS if rung.counter}

    def forget(self, job: Job) -> None:
        """Drops what is counted of an owner without jobs."""
        owners = {each.owner for each in self._session.jobs}
        self._reduced_of = {owner: tally for owner, tally in self._reduced_of.items() if owner in owners}

    def summary(self) -> list[str]:
        """The overhead, and what was observed only in part to limit it, in lines for people."""
        members = [member for job in self._session.jobs for member in job.members.values()]
        seen = self._probing.describe(
            {
                "launches": sum(member.launches for member in members),
                "collectives": sum(member.collectives for member in members),
            },
            self._session.end_ns or time.monotonic_ns(),
            self._session.started_ns,
        )
        return [*self.overhead.summary(several=self._several), *seen]


def _hits_by_owner(
    owners: Mapping[int, Owner], of_processes: Mapping[int, tuple[int, int, int]]
) -> dict[Part, Mapping[Owner, int]]:
    """Hits of probes, which are what they cost an owner beside others."""
    hits: Tally[Owner] = Tally()
    for pid, owner in owners.items():
        hits[owner] += of_processes.get(pid, NOTHING_SPENT)[0]
    return {Part.CALLS: hits, Part.MARKS: hits}
