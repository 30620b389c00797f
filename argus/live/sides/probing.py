"""The side that probes calls: attaches and removes probes as ``live.cost.governor.Plan`` has it, opens windows in
turns, and finds the call by which steps are counted where collectives are observed in windows only.

A window begins and ends by itself (``capture.probing.windows.Window``). Calls made while its probes are being attached
or removed are in no window, since some functions are probed then and others not. A **sample** is a window of a few
steps now and then, for their phases; it does not change the windows of other subjects.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import get_args
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Attachment, Subject, subject_of
from argus.capture.probing.windows import Window
from argus.live.cost.governor import DEFAULT_BUDGET, LONGEST_WINDOW_S, OF_BUDGET, PATIENCE, Part, Plan, Rung
from argus.live.job import Job
from argus.live.session import Session
from argus.live.side import Side
from argus.live.sides.early_calls import EarlyCalls, seen_calls
from argus.live.sides.gpu_times import GpuSide
from argus.live.sides.windows_seen import WindowsSeen
from argus.model import calls
from argus.model.losses import UNKNOWN, Owner
from argus.semantics.steps.thinned import Pulse, concatenate_windows, find_pulse

SUBJECTS: tuple[Subject, ...] = get_args(Subject)
GONE_NS = 60_000_000
"""So long after a window has ended its probes may be there: each is away after a grace period of the kernel."""
SEARCH_S, SEARCH_EVERY = 0.125, 10
"""Where all is seen, calls of so long are searched for a pulse, twice as long each time that none is found in them, and
not more often than after ten times that."""
SEARCHED_S = 0.2
"""A window waits for so long at most until calls of the last one have been searched."""
LEAST_WAIT_S, OF_WAIT = 0.002, 1 / 8
"""While the last window's probes go, the loop asks so often whether they are gone: after an eighth of the time that it
has waited, up to ``GONE_NS``. A window is not much later for it."""
PULSE_STEPS = 50
"""Steps in a window in which only the pulse is seen, where it cannot be seen throughout."""
UNDISTURBED = 1.02
"""Steps that windows make so much longer at most are stored like others."""
HEAVY_TURN = 8
"""Every so many windows one in which all is seen, where the others are for the pulse alone."""
RUN_NS = 1_000
"""A program's run, with what it writes to a ring: ``scripts/bench probe``."""
FIRST_SAMPLE_S = 0.5
"""After ranges are no longer probed throughout: the first phases of a trace should not be all that a short one has."""


@dataclass
class _Searched:
    """Calls of one job in windows, until its pulse is known.

    Attributes:
        begin_ns, end_ns: Of the window that is gathered; 0: it goes on.
        parts: By rank.
    """

    begin_ns: int
    end_ns: int = 0
    parts: dict[int, list[NDArray[np.void]]] = field(default_factory=dict)


@dataclass
class _OfJob:
    searched: _Searched | None = None
    pulse: Pulse | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """When the pulse was seen; the end is 0 as long as it is."""
    steps_at: int = 0
    """Steps counted when this began."""
    lacking: list[Attachment] = field(default_factory=list)
    """Files without their probes of the pulse: it is seen throughout again once they have them."""
    after_window: bool = False
    """It is seen throughout again once the probes of a window are gone."""
    failed: int = 0
    """Windows in a row in which no pulse was found: they grow."""
    search_at: float = 0.0
    """When its pulse is looked for again while all is seen."""

    @property
    def seen(self) -> bool:
        """Whether the pulse is seen now."""
        return bool(self.spans) and not self.spans[-1][1]

    def end(self, end_ns: int) -> None:
        """It is no longer seen."""
        self.spans[-1] = self.spans[-1][0], end_ns


class _PulseSpans(Side):
    """When pulses are seen: the part of ``ProbingSide`` that is about them."""

    _session: Session
    _jobs: dict[int, tuple[Job, _OfJob]]
    _window: Window | None
    plan: Plan

    def _begin_span(self, job: Job, state: _OfJob, begin_ns: int) -> None:
        if job.thinned is not None:
            job.thinned.unseen(state.spans[-1][1] if state.spans else 0, begin_ns)
        state.spans.append((begin_ns, 0))
        del state.spans[:-64]

    def _set_pulse(self, chosen: Collection[int], since_ns: int, *, everywhere: bool = False) -> None:
        """Has these calls probed. Pulses that are seen throughout were not seen since that moment, where probes on the
        job's files were changed, or ``everywhere``."""
        changed = {id(each) for each in self._session.probes.set_pulse(chosen)}
        for job, state in self._jobs.values():
            throughout = state.pulse and (state.pulse.call in chosen or self._probed_anyway(state.pulse.call))
            if throughout and state.seen and (everywhere or _maps(job, changed, self._session)):
                state.end(since_ns)
                self._see(job, state)

    def _end_spans(self, subjects: Collection[Subject], since_ns: int) -> list[tuple[Job, _OfJob]]:
        """Pulses of these subjects, which are probed anew, were not seen since that moment. Returns those that they
        bring, whether these were seen before, in windows only, or waited for their probes."""
        moved = []
        for job, state in self._jobs.values():
            if state.pulse is not None and subject_of(calls.CALLS[state.pulse.call]) in subjects:
                if state.seen:
                    state.end(since_ns)
                if self._probed_anyway(state.pulse.call):
                    moved.append((job, state))
        return moved

    def _see_after_window(self, job: Job, state: _OfJob) -> None:
        """A pulse that its subject brings is seen throughout, once the probes of a window are gone which see it, too:
        else it would be counted twice."""
        state.lacking, state.after_window = [], self._probes_go
        if not state.after_window:
            self._see(job, state)

    @property
    def _probes_go(self) -> bool:
        """Whether a window, or its probes, are there: what they see would be seen twice where all is seen."""
        return self._window is not None or self._session.probes.window_goes

    def _see(self, job: Job, state: _OfJob) -> None:
        """A pulse is seen throughout from now on, or once the job's files have its probes."""
        state.lacking, state.after_window = [], False
        if state.pulse is not None:
            state.lacking = [each for each in _files(job, self._session) if self._lacks(each, state.pulse.call)]
        if not state.lacking:
            self._begin_span(job, state, time.monotonic_ns())

    def _lacks(self, attachment: Attachment, call: int) -> bool:
        """Whether a file has a function that is to be seen throughout, and no probe there."""
        if call not in attachment.entry_points:
            return False
        if not self._probed_anyway(call):
            return self._session.probes.lacks_pulse(attachment, call)
        subject = subject_of(calls.CALLS[call])
        optional = subject is not None and subject in attachment.optional_points
        return optional and subject not in attachment.optional_links

    def _see_again(self) -> None:
        """Goes on with pulses whose files have their probes by now, or are gone, and with those that wait for the end
        of a window."""
        for job, state in self._jobs.values():
            if state.after_window:
                self._see_after_window(job, state)
        if waiting := [(job, state) for job, state in self._jobs.values() if state.lacking]:
            there = {id(each) for each in self._session.probes.attachments}
            for job, state in waiting:
                assert state.pulse is not None
                call = state.pulse.call
                state.lacking = [each for each in state.lacking if id(each) in there and self._lacks(each, call)]
                if not state.lacking:
                    self._see(job, state)

    def _probed_anyway(self, call: int) -> bool:
        """Whether a function is probed throughout, pulse or not."""
        subject = subject_of(calls.CALLS[call])
        return subject is None or (
            subject in self._session.probes.probed and subject not in self.plan.windowed | self.plan.off
        )


class ProbingSide(_PulseSpans, WindowsSeen):
    """What is probed, over time.

    Args:
        session: The trace.
        gpu: Says whether it helps to know what cuBLAS and attention multiply.

    Attributes:
        plan: What is in force.
        on_ns: For how long each subject was seen in windows so far, those included that some jobs did not have.
        on_hits: Calls of each function in them, shape (256,), by its number.
        thinned_since_ns: By subject, since when it is seen in windows.
    """

    name = "windows"
    parts = (Part.CALLS, Part.MARKS)
    punctual = True

    def __init__(self, session: Session, gpu: GpuSide) -> None:
        super().__init__()
        self._session = session
        self._gpu = gpu
        self._budget = session.options.max_overhead or DEFAULT_BUDGET
        self.plan = Plan()
        self.on_ns: dict[str, int] = dict.fromkeys(SUBJECTS, 0)
        self.on_hits = np.zeros(256, np.int64)
        self.thinned_since_ns: dict[str, int] = {}
        self._window: Window | None = None
        self._of_pulse = False
        """Whether the window is for the pulse alone."""
        self._sample = False
        """Whether the window is a sample."""
        self._there: WeakSet[Job] = WeakSet()
        """Jobs when it was opened."""
        self._seen_in_window: tuple[Collection[Subject], Collection[int] | None, Collection[int]] = (), None, ()
        """Subjects and calls that it was to see, and the pulses then."""
        self._spoiled = False
        """Whether what is probed changed while it was opened: it is no window of any job."""
        self._ended: Window | None = None
        """The last one, until it is known whether something broke it."""
        self._noted = False
        """Whether it was taken note that it has begun."""
        self._length_s = 0.0
        """How long it is to be."""
        self._fed_ns = 0
        """What was called before this has been fed, CLOCK_MONOTONIC."""
        self._left_out: set[int] = set()
        """Jobs of which not all was seen in the window (their ``id``): it is none of theirs."""
        self._due = self._sample_due = 0.0
        self._again_at = self._waits_since = self._may_since = 0.0
        """When to ask again whether a window may begin; since when one is to, and may not; since when it may. 0: it is
        not so."""
        self._turn = 0
        self._jobs: dict[int, tuple[Job, _OfJob]] = {}
        self._thinned: WeakSet[Job] = WeakSet()
        """Jobs that know what of their marks is seen in part."""
        self._slowed = 1.0
        self._early = EarlyCalls()
        self._heavy = 0
        self._share = 0.0
        """Of the jobs' time, what pulses cost while they are seen, as measured; 0: it was not."""

    # ---- the plan

    def apply(self, plan: Plan, slowed: float) -> int:
        """Probes what a plan says from now on. What its rungs mean beyond their probes is for ``reduce``.

        Args:
            plan: The new one.
            slowed: How many times as long a step takes while all is probed.

        Returns:
            Since when that is so: when probes began to go, CLOCK_MONOTONIC.
        """
        self.take_note()
        seen = ("windowed", "off", "entries", *(("sampled",) if self._sample else ()))
        if any(getattr(plan, name) != getattr(self.plan, name) for name in seen):
            self._spoil_window()  # other changes, of how often, come with each look
        since_ns, jobs = time.monotonic_ns(), self._session.jobs
        before, self.plan, self._slowed = self.plan, plan, slowed
        unprobed = plan.windowed | plan.off
        gone = [subject for subject in SUBJECTS if subject in unprobed and subject in self._session.probes.probed]
        changed = [
            subject
            for subject in SUBJECTS
            if subject not in unprobed
            and subject in self._session.probes.probed
            and (subject in plan.entries) != (subject in self._session.probes.entries_only)
        ]
        back = [subject for subject in SUBJECTS if subject in (before.windowed | before.off) - unprobed]
        self._session.probes.detach_optional(*gone, *changed)
        for subject in (*changed, *back):
            if subject in plan.entries:
                self._session.probes.entries_only.add(subject)
            else:
                self._session.probes.entries_only.discard(subject)
        # Those of math wait for GPU times.
        self._session.probes.attach_optional(*(subject for subject in (*changed, *back) if subject != "math"))
        moved = self._end_spans({*changed, *back}, since_ns)
        if self._session.probes.pulse:  # which of them their subjects bring has changed
            self._set_pulse(self._session.probes.pulse, since_ns, everywhere=True)
        for job, state in moved:
            self._see_after_window(job, state)
        for name in plan.windowed - before.windowed:
            self.thinned_since_ns[name] = since_ns
        if "ranges" in plan.off - before.off:
            self._sample_due = time.monotonic() + FIRST_SAMPLE_S
            for job in jobs:
                job.thin_marks(since_ns)
        for job, state in self._jobs.values():
            self._keep_pulse(job, state, unprobed - before.windowed - before.off, since_ns)
        for job in jobs:
            if self._needs_pulse(job):
                self._begin_search(job, self._session.attached_ns, since_ns)
        if "nvtx" in plan.windowed - before.windowed:
            for job in jobs:
                job.thin_ranges(since_ns)
        if "backward" in plan.windowed - before.windowed:
            for job in jobs:
                job.pulse_spans = [(0, since_ns)]
        self._thinned.update(jobs)
        if plan.rungs:  # also where steps are still counted throughout: the pace of that time is the first known
            for job in jobs:
                job.note_queues()
        if plan.windowed and not self._due:
            self._due = time.monotonic() + plan.period_s
        return since_ns

    def _thin(self, job: Job, since_ns: int) -> None:
        """What of its marks is not seen of a job that began after probes went."""
        self._thinned.add(job)
        if "ranges" in self.plan.off:
            job.thin_marks(since_ns)
        if "nvtx" in self.plan.windowed:
            job.thin_ranges(since_ns)
        if "backward" in self.plan.windowed:
            job.pulse_spans = [(since_ns, since_ns)]

    def reduce(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """What a rung means to steps. Its probes have gone: ``apply`` takes those of all rungs of a plan at once, since
        each that goes alone waits for a grace period of the kernel."""
        if rung is Rung.NVTX_RANGES:
            for job in self._session.jobs:
                job.drop_ranges()

    def _needs_pulse(self, job: Job) -> bool:
        """Whether a job's steps cannot be inferred from its sequence of calls any more: of some only parts are seen."""
        if id(job) in self._jobs or job.over_since:
            return False
        return "collectives" in self.plan.windowed or ("launches" in self.plan.windowed and job.by_calls)

    def _keep_pulse(self, job: Job, state: _OfJob, gone: Collection[str], since_ns: int) -> None:
        """Goes on with a pulse whose function was probed anyway, and is not from now on."""
        if state.pulse is None or subject_of(calls.CALLS[state.pulse.call]) not in gone:
            return
        if state.seen:
            state.end(since_ns)
        self._count_by(job, state)

    def _begin_search(self, job: Job, attached_ns: int, since_ns: int) -> None:
        """What was seen until now is the first window. Its newest records have not been read yet."""
        if job.thin_calls(since_ns):
            early = self._early.take(job)
            self._jobs[id(job)] = job, _OfJob(_Searched(attached_ns, since_ns, early))

    def _search_throughout(self, now: float) -> None:
        """Looks for the pulses that are not known yet in what is seen though there are no windows any more: the steps
        of these jobs cannot be inferred from all calls again."""
        self._pace.rest()
        begin_ns = time.monotonic_ns()
        for job, state in self._jobs.values():
            waits = state.pulse is not None or state.searched is not None or job.over_since or now < state.search_at
            if not waits and not self._probes_go:
                length_s = min(SEARCH_S * _grown(state), LONGEST_WINDOW_S)
                state.searched = _Searched(begin_ns, begin_ns + round(length_s * 1e9))
                state.search_at = now + SEARCH_EVERY * length_s

    # ---- windows

    @property
    def due(self) -> float:
        """When ``poll`` has something to do, as ``time.monotonic`` has it."""
        return max(self._wanted_at, self._again_at)

    @property
    def _wanted_at(self) -> float:
        windows = self._due if self.plan.windowed else float("inf")
        return min(windows, self._sample_due) if self.plan.sampled else windows

    def poll(self, now: float, slack_s: float = 0.0) -> None:
        """Opens a window when its turn has come, and takes note of one that has ended."""
        self._probe_products()
        jobs = self._session.jobs
        if not self.plan.windowed:
            self._search_throughout(now)
        for job in (each for each in jobs if each not in self._thinned):
            self._thin(job, time.monotonic_ns())
        self.take_note()
        if (ended := self._ended) is not None and ended.over:
            self._ended = None
            if ended.failure is not None:
                raise ended.failure
        self._see_again()
        may = self._window is None and not self._session.probes.window_goes
        self._wait(now, may)
        self._may_since = (self._may_since or now) if may else 0.0
        self.find_pulses(self._fed_ns)  # however soon the next one is opened
        if may and self.plan.sampled and now >= self._sample_due:
            self._open_sample(now)
        if not self.plan.windowed or now < self._due or self._window is not None or not may:
            return
        if now < max(self._due, self._may_since) + SEARCHED_S and any(map(_is_searched, self._jobs.values())):
            return
        for job in jobs:
            if self._needs_pulse(job):  # one that has begun since
                self._begin_search(job, 0, time.monotonic_ns())
        alone = {call for call in self.pulses - self._session.probes.pulse if not self._probed_anyway(call)}
        self._of_pulse = bool(alone) and self._turn % HEAVY_TURN != 0
        self._turn += 1
        searching = [state for job, state in self._jobs.values() if state.pulse is None and not job.over_since]
        length = min(self.plan.length_s * max(map(_grown, searching), default=1), LONGEST_WINDOW_S)
        period = length / self.plan.duty
        if self._of_pulse:
            share = max(self._pulse_share(), self._share)
            step_s = max((state.pulse.step_ns for _, state in self._jobs.values() if state.pulse), default=0) / 1e9
            length = min(max(PULSE_STEPS * step_s, 0.1), LONGEST_WINDOW_S)
            period = max(length * share / (OF_BUDGET * self._budget), 2 * length)
        self._due = self._pace.begin(now, period)
        self._open([s for s in SUBJECTS if s in self.plan.windowed], length, alone if self._of_pulse else None)

    def take_note(self, fed_ns: int = 0) -> None:
        """Takes note that a window has begun, or is over. To be called before calls are fed that may have been made in
        it.

        Args:
            fed_ns: What was called before this is fed now, CLOCK_MONOTONIC; 0: nothing is.
        """
        window = self._window
        if window is not None:
            over = bool(window.end_ns)
            if not self._noted and (over or window.begin_ns):
                self._noted, self._left_out = True, set(map(id, self._session.jobs))
                self._session.probes.settle_window(window)
                self._begin_window(window)
            if over:
                self._ended = window
                self._end_window(window)
        self._fed_ns = max(self._fed_ns, fed_ns)

    def _spoil_window(self) -> None:
        """Subjects that are probed change: a window that is being opened is none, since it was to see something else.
        Another one is opened soon."""
        if self._window is not None and not self._noted and not self._spoiled:
            self._window.end()
            self._spoiled = True
            if self._sample:
                self._sample_due = time.monotonic()
            else:
                self._due, self._turn = time.monotonic(), self._turn - 1

    def _begin_window(self, window: Window) -> None:
        """It has begun, or nothing was seen in it."""
        self._left_out = _left_out(window.lacking, self._session)
        if not window.begin_ns or self._spoiled:
            return
        begin_ns = max(window.begin_ns, self._fed_ns)  # its first calls may have been fed already
        window.begin_ns = min(begin_ns, window.end_ns or begin_ns)
        if not self._of_pulse and not self._sample:
            self._windows.append((window, self._left_out))
        for job in self._jobs_of_window():
            job.note_queues()
            if id(job) in self._left_out:
                continue
            if self._sample:
                job.sampled.begin(window.begin_ns)
            self._begin_passes(job, window.begin_ns, seen=not self._of_pulse)
            state = self._jobs.get(id(job), (job, None))[1]
            if state is None or self._sample:
                continue
            if state.pulse is None:
                if self._of_pulse or (state.searched is not None and state.searched.end_ns):
                    continue  # it sees others' pulses alone; or the last one will be looked at once it is over
                # Of one that is over nothing comes: none would be found, and windows would grow.
                state.searched = None if job.over_since else _Searched(window.begin_ns)
            elif not self._sees(state.pulse.call):
                continue
            elif not state.seen and not state.lacking and not state.after_window:
                self._begin_span(job, state, window.begin_ns)

    def _sees(self, call: int) -> bool:
        """Whether the window has probes on a function."""
        subjects, only, pulse = self._seen_in_window
        return subject_of(calls.CALLS[call]) in subjects and call not in pulse and (only is None or call in only)

    def _wait(self, now: float, may: bool) -> None:
        """Sets when to ask again whether a window may begin, if one is to: the longer that lasts, the more seldom."""
        if may or self._wanted_at > now:
            self._waits_since = self._again_at = 0.0
            return
        self._session.probes.wait_for_window()
        self._waits_since = self._waits_since or now
        self._again_at = now + min(max((now - self._waits_since) * OF_WAIT, LEAST_WAIT_S), GONE_NS / 1e9)

    def _open_sample(self, now: float) -> None:
        """Sees the ranges of a few steps, and what marks these."""
        marking = {job.pulse_subject for job in self._session.jobs}
        subjects = [s for s in SUBJECTS if s in self.plan.sampled | (self.plan.windowed & marking)]
        self._sample_due = now + self.plan.sample_period_s
        self._of_pulse = False
        self._open(subjects, self.plan.sample_s, sample=True)

    def _open(
        self, subjects: list[Subject], length_s: float, only: Collection[int] | None = None, *, sample: bool = False
    ) -> None:
        """Opens a window. One that cannot begin, for whatever reason, is lost."""
        self._sample, self._noted, self._length_s = sample, False, length_s
        self._there, self._spoiled = WeakSet(self._session.jobs), False
        self._seen_in_window = subjects, only, self._session.probes.pulse
        try:
            self._window = self._session.probes.open_window(subjects, length_s, only)
        finally:
            if self._window is None:
                self._lose(_left_out(self._session.probes.lacking, self._session))
        self.take_note()

    def _jobs_of_window(self) -> list[Job]:
        """Those that there were when it was opened: it is none of others."""
        return [job for job in self._session.jobs if job in self._there]

    def _lose(self, left_out: Collection[int]) -> None:
        """A window has not begun: jobs that lacked probes in it (their ``id``) lost it."""
        for job in self._jobs_of_window() if not self._of_pulse else ():
            if id(job) in left_out:
                self.had.add(job, "samples" if self._sample else "windows", self._length_s * 1e9, had=False)

    @staticmethod
    def _begin_passes(job: Job, begin_ns: int, *, seen: bool) -> None:
        """The marks by which steps are counted, where they are seen in windows, are seen in this one."""
        if job.pulse_spans is None or not seen:
            return
        if job.thinned is not None:
            job.thinned.unseen(job.pulse_spans[-1][1], begin_ns)
        job.pulse_spans.append((begin_ns, 0))
        del job.pulse_spans[:-64]

    def _probe_products(self) -> None:
        """Probes cuBLAS and attention once GPU times are on, without which it is of no use."""
        probes = self._session.probes
        absent = "math" not in probes.probed and "math" not in probes.refused
        if absent and "math" not in self.plan.off and self._gpu.wants_math:
            probes.attach_optional("math")

    def _end_window(self, window: Window) -> None:
        self._window, sample = None, self._sample
        if self._spoiled or not window.begin_ns:
            self._lose(set(map(id, self._session.jobs)) if self._spoiled else self._left_out)
            return
        for job in self._jobs_of_window():
            job.note_queues()
            had = id(job) not in self._left_out
            if not self._of_pulse:
                self._add_window(job, "samples" if sample else "windows", window, had=had)
            if not had:
                continue
            job.sampled.end(window.end_ns)
            if job.pulse_spans and not job.pulse_spans[-1][1]:
                job.pulse_spans[-1] = job.pulse_spans[-1][0], window.end_ns
                if job.thinned is not None and sample:
                    job.thinned.watched(window.begin_ns, window.end_ns)
            elif job.thinned is not None and not self._of_pulse and not sample:
                job.thinned.watched(window.begin_ns, window.end_ns)
                if self._slowed > UNDISTURBED:
                    job.thinned.disturbed(window.begin_ns - GONE_NS // 4, window.end_ns + GONE_NS)
        if not self._of_pulse:
            for subject in window.subjects:
                self.on_ns[subject] += window.end_ns - window.begin_ns
            self.on_hits += window.hits
        for _, state in self._jobs.values():
            if state.searched is not None and not state.searched.end_ns:
                state.searched.end_ns = window.end_ns
            elif state.spans and state.spans[-1] == (window.begin_ns, 0):
                state.spans[-1] = window.begin_ns, window.end_ns

    # ---- the pulse

    def feed(self, job: Job, rank: int, events: NDArray[np.void]) -> None:
        """Takes calls of a rank that are seen in windows, or its pulse: LAUNCH or COLLECTIVE rows, shape (n,)."""
        if id(job) not in self._jobs:
            self._early.keep(job, rank, events)
            return
        state = self._jobs[id(job)][1]
        ts = events["ts_ns"].astype(np.int64)
        if state.searched is not None:
            inside = (ts >= state.searched.begin_ns) & (ts < (state.searched.end_ns or 1 << 62))
            state.searched.parts.setdefault(rank, []).append(seen_calls(events[inside]))
        if state.pulse is None or job.thinned is None:
            return
        pulses = ts[events["call"] == state.pulse.call]
        for begin, end in state.spans:
            job.thinned.feed(rank, pulses[(pulses >= begin) & (pulses < (end or 1 << 62))])

    def find_pulses(self, drained_ns: int) -> None:
        """Looks for pulses in windows that have ended and whose records are all there, while no other is there: where
        one is found, its call would be seen twice."""
        if self._probes_go:
            return
        for job in self._session.jobs:
            state = self._jobs.get(id(job), (job, None))[1]
            if job.calls_end is not None:  # numbers go on from the last steps by calls
                continue
            if state is not None and state.searched is not None and 0 < state.searched.end_ns < drained_ns - GONE_NS:
                self._search(job)

    def _search(self, job: Job) -> None:
        state = self._jobs[id(job)][1]
        searched, state.searched = state.searched, None
        if searched is None or job.thinned is None:
            return
        prices = {call: int(price) for call, price in enumerate(_entry_prices(job, self._session).tolist()) if price}
        pulses: dict[int, Pulse] = {}
        for rank, parts in sorted(searched.parts.items()):
            seen = concatenate_windows(parts)
            if pulse := find_pulse(seen["code"].copy(), seen["call"].copy(), seen["ts"].copy(), prices):
                pulses[rank] = pulse
        if not pulses or len(pulses) < len(searched.parts):
            # Where all is seen, a job that calls nothing saves, or waits for data; a window may just be too short.
            called = any(len(part) for parts in searched.parts.values() for part in parts)
            state.failed += called or bool(self.plan.windowed)
            return
        # All ranks' probes are on the same functions.
        able = set.intersection(*(set(pulse.calls) for pulse in pulses.values())) & prices.keys()
        if not able:
            return
        able = {call for call in able if self._probed_anyway(call)} or able
        call = min(able, key=lambda call: (sum(p.calls[call] * prices[call] for p in pulses.values()), call))
        first = next(iter(pulses.values()))
        state.pulse, state.failed = Pulse(call, first.calls[call], first.step_ns, first.calls), 0
        for rank, pulse in pulses.items():
            job.begin_pulses(rank, pulse.calls[call], round(pulse.step_ns / self._slowed), pulse.calls)
        self._count_by(job, state)

    def _count_by(self, job: Job, state: _OfJob) -> None:
        assert state.pulse is not None
        state.lacking, state.after_window = [], False
        name = calls.CALLS[state.pulse.call].symbol
        throughout = anyway = self._probed_anyway(state.pulse.call)
        if not anyway:
            throughout = self._pulse_share() <= OF_BUDGET * self._budget
        if throughout:
            if not anyway:
                self._set_pulse(self._session.probes.pulse | {state.pulse.call}, time.monotonic_ns())
            self._see_after_window(job, state)
        how = "throughout" if throughout else "in windows"
        self._session.note(f"steps of {job.name} are counted by {name}, {state.pulse.per_step} a step, seen {how}")

    def _pulse_share(self) -> float:
        """What pulses cost while they are seen, as a share of the jobs' time: of the job with most."""
        shares = [
            p.per_step * (float(_entry_prices(job, self._session)[p.call]) + RUN_NS) * self._slowed / p.step_ns
            for job, state in self._jobs.values()
            if (p := state.pulse) is not None and not self._probed_anyway(p.call)
        ]
        return max(shares, default=0.0)

    def measured_share(self) -> float:
        """What the probes that are seen in windows cost while they are on, by the jobs' own steps, as a share of their
        time: of the job with most. 0: not known."""
        ratios = [job.thinned.slowdown() for job, _ in self._jobs.values() if job.thinned is not None]
        slowest = max(ratios, default=0.0)
        return 1 - 1 / slowest if slowest > 1 else 0.0

    def weigh(self, share: float) -> None:
        """Takes what the pulses that are seen throughout have cost, as a share of the jobs' time: where that is too
        much twice, they are seen in windows from then on."""
        self._heavy = self._heavy + 1 if self._session.probes.pulse and share > OF_BUDGET * self._budget else 0
        if self._heavy < PATIENCE:
            return
        self._heavy = 0
        self.take_note()
        now_ns = time.monotonic_ns()
        self._session.probes.set_pulse(())
        for job, state in self._jobs.values():
            if state.pulse is not None and (state.seen or state.lacking):
                state.spans[-1:] = [(begin, end or now_ns) for begin, end in state.spans[-1:]]
                state.lacking = []
                self._session.note(
                    f"steps of {job.name} are counted in windows: {calls.CALLS[state.pulse.call].symbol} costs too much"
                )
        self._share = share

    @property
    def pulses(self) -> set[int]:
        """Numbers of the calls by which steps are counted."""
        return {state.pulse.call for _, state in self._jobs.values() if state.pulse is not None}

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        self._jobs.pop(id(job), None)
        self._early.take(job)
        self._sum_up(job)


def _grown(state: _OfJob) -> int:
    """How many times as long its windows are, after those in which no pulse was found."""
    return 1 << min(state.failed, 6)


def _entry_prices(job: Job, session: Session) -> NDArray[np.float64]:
    """What entries cost a job, ns, shape (256,), by the call's number."""
    files = {id(each): each for member in job.ranks() for each in session.roster.attachments_of(member)}
    return session.probes.prices_of(files.values()).entry


def _is_searched(one: tuple[Job, _OfJob]) -> bool:
    """Whether calls of a job are to be searched for its pulse, as soon as all are there."""
    job, state = one
    return state.searched is not None and state.searched.end_ns > 0 and job.calls_end is None and not job.over_since


def _left_out(lacking: Collection[Attachment], session: Session) -> set[int]:
    """Jobs with processes that map a file which lacks probes (their ``id``)."""
    files = {id(each) for each in lacking}
    return {id(job) for job in session.jobs if _maps(job, files, session)}


def _maps(job: Job, files: Collection[int], session: Session) -> bool:
    """Whether a process of a job maps one of these (their ``id``)."""
    return bool(files) and any(id(each) in files for each in _files(job, session))


def _files(job: Job, session: Session) -> list[Attachment]:
    """Probed files that its processes map."""
    of = session.roster.attachments_of
    return [*{id(each): each for member in job.members.values() for each in of(member)}.values()]
