"""The live pipeline: probes → columns → steps → store. One ``Tracer`` is one run of ``argus trace``.

It owns no thread but the writer's, the fork watcher's and the watchdog's: whoever runs it calls ``poll`` a few times a
second. ``poll`` never waits for the store. What is observed is the business of its sides (``argus.live.side``).
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from operator import methodcaller

from argus.capture.attachment import Attachment
from argus.capture.kernel import btf
from argus.capture.probes import Probes
from argus.capture.process import demangler
from argus.capture.process.names import KernelNames
from argus.capture.process.targets import Target, sees_host_pids
from argus.capture.reader import reader
from argus.live.bulkhead import Watchdog
from argus.live.choose import find_targets
from argus.live.clock import CLOCK_S, mono_offset_ns
from argus.live.cost.budget import BudgetSide
from argus.live.display.view import View
from argus.live.display.viewer import Viewer
from argus.live.job import Job, Member
from argus.live.last_rows import LastRows
from argus.live.options import Options
from argus.live.roster import Roster
from argus.live.session import Session, host_name
from argus.live.session_rows import OVER_S, SessionRows
from argus.live.side import Counters, Side
from argus.live.sides.calls import POLL_S, CallSide
from argus.live.sides.environment import EnvironmentSide
from argus.live.sides.flags import FlagSide
from argus.live.sides.gpu_times import GpuSide
from argus.live.sides.kernel_rows import KernelSide
from argus.live.sides.probing import ProbingSide
from argus.live.sides.stack_samples import StackSide
from argus.live.signals import Signals
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store import spill
from argus.store.host_names import claim
from argus.store.open import Store
from argus.store.reader import newest_run, next_run
from argus.store.schema import ensure_schema
from argus.store.writer import Writer
from argus.system import debug, memory
from argus.system.aside import Aside
from argus.system.host import machine_digits
from argus.system.limits import raise_descriptor_limit

WORK_INTERVAL_S = 0.25
"""How often drained records become rows. The ring holds a second of the densest load, and is drained more often."""
IDLE_WORK_INTERVAL_S = 1.0
"""The same while no calls are probed."""
MANY_RANKS, MOST_WORK_INTERVAL_S = 32, 4.0
"""From so many ranks on records become rows less often: twice as many, half as often; but so often at least."""
LOOK_INTERVAL_S = 0.5
"""How often every process is looked at: whether it ended, loaded libraries, has children."""
IDLE_LOOK_INTERVAL_S = 1.0
"""The same while no calls are probed: a turn costs more than what it does."""
IDLE_SLACK_S = 0.5
"""While no calls are probed, what is due so soon is done at once: half of the intervals, or each would have turns of
its own for ever."""
FORGOTTEN_AT_ONCE = 16
"""Jobs that are forgotten in one look: each has last rows, which take a millisecond or two."""
QUICK_LOOK_INTERVAL_S = 0.05
"""How often a young child is looked at until it has loaded a library: calls before that go unseen."""
FIRST_COVERAGE_S, COVERAGE_S = 2.0, 4.0
"""How often counters become rows: at first, and later."""


OVER_SHARE = tuple(
    f"{what}_over_share"
    for what in (
        *("rows", "look_ups", "processes", "files", "communicators", "groups", "calls", "last_steps", "step_calls"),
        "environments",
    )
)
"""Losses that are counted in ``Session.losses`` alone, of no side's."""


class Tracer:
    """One tracing session.

    Args:
        store: Where rows go. It may be away: rows wait on disk (``argus.store.spill``), bounded and counted.
        options: What to trace.

    Attributes:
        session: What its sides share.
        sides: What it observes, causes before effects: the order in which they work.
        on_stall: Called by the watchdog's thread with a line for people, when the loop has not turned for a second.

    Use: ``start``, then ``poll`` until ``done``, then ``stop``.
    """

    def __init__(self, store: Store, options: Options) -> None:
        source, paths = f"trace/{host_name(options)}", "paths" not in options.redact
        writer = Writer(store, source=source, place=spill.place(store.target), paths=paths)
        session = self.session = Session(options, writer)
        writer.owners = session
        self.bulkheads = session.bulkheads
        self._store = store
        self._names = KernelNames(session)
        self._stacks = StackSide(session)
        self._kernels = KernelSide(session)
        self._gpu = GpuSide(session, self._kernels)
        self._probing = ProbingSide(session, self._gpu)
        self._rows = SessionRows(session)
        self._signals = Signals(session)
        self._calls = CallSide(session, self._gpu, self._probing, self._rows, self._names)
        self._budget = BudgetSide(session, self._calls, self._probing, (self._stacks, self._gpu), self._signals)
        self._flags = FlagSide(session, store, self._kernels, self._stacks)
        self.sides: list[Side] = [
            self._stacks,
            self._probing,
            self._budget,
            self._calls,
            self._gpu,
            self._flags,
            self._kernels,
            EnvironmentSide(session),
        ]
        self._signals.sides = self.sides
        self._viewer = Viewer(session, self._calls, self._gpu, self._stacks, self._budget)
        self.on_stall: Callable[[str], None] = session.note
        self._watchdog = Watchdog(lambda: self.bulkheads.doing, lambda line: self.on_stall(line), self._relieve)
        self._roster: Roster
        """From ``start`` on."""
        self._last_rows = LastRows(session)
        self._reads, self._polled, self._reported_notes = False, 0.0, 0
        self._work_due = self._look_due = self._coverage_due = self._quick_look_due = self._trim_due = 0.0
        self._clock_due, self._coverage_s = time.monotonic() + CLOCK_S, FIRST_COVERAGE_S

    @property
    def host(self) -> str:
        """Name of this host, as rows have it."""
        return self.session.host

    @property
    def options(self) -> Options:
        """What is traced."""
        return self.session.options

    @property
    def started_ns(self) -> int:
        """When it began, CLOCK_MONOTONIC."""
        return self.session.started_ns

    @property
    def jobs(self) -> list[Job]:
        """Every attempt of every job seen so far."""
        return self.session.jobs

    @property
    def attached(self) -> list[Attachment]:
        """Probes put on files so far."""
        return self._roster.attached if self.session.has_roster else []

    @property
    def past(self) -> Tally[str]:
        """What the jobs that are not among ``jobs`` any more did: jobs, launches, collectives."""
        return self._roster.past if self.session.has_roster else Tally()

    @property
    def store_error(self) -> str:
        """After ``stop``: why rows could not be stored; empty: all were."""
        return self._last_rows.error

    def notes(self) -> list[str]:
        """What happened that the user may want to know, oldest first."""
        return list(self.session.notes)

    def news(self) -> list[str]:
        """Those of them that came since the last call; the newest 100 if there were more."""
        fresh = self.session.notes.since(self._reported_notes)
        self._reported_notes = self.session.notes.total
        return fresh

    def live(self) -> list[Member]:
        """Ranks whose process runs."""
        return self.session.live()

    def gpu_times(self, *, done: bool = False) -> list[str]:
        """The state of GPU times in lines for people; empty: not known yet. ``done``: with what was recorded."""
        return self._gpu.describe(done=done) if done or self._gpu.settled(time.monotonic()) else []

    @property
    def samples(self) -> int:
        """Stacks that were sampled on a CPU."""
        return self._stacks.counters().get("stack_samples", (0, False))[0]

    def stacks(self) -> list[str]:
        """How the sampling of stacks goes, or went, in lines for people."""
        return self._stacks.summary()

    def overhead(self) -> list[str]:
        """The overhead, and what was observed only in part to limit it, in lines for people."""
        return self._budget.summary()

    def steps_go(self) -> list[str]:
        """Where the jobs' steps go, by phase: of the CPU's time and of the GPUs', a line each."""
        return self._viewer.steps_go()

    def utilization(self) -> list[str]:
        """Model FLOPs utilisation of the jobs, where it was given what that takes; a line a job."""
        return self._viewer.utilization()

    def mesh(self) -> list[str]:
        """What the jobs' communicators are for, in lines for people."""
        return self._viewer.mesh()

    def view(self) -> View:
        """The session as people see it now; rates since the previous call."""
        return self._viewer.view(self.lost())

    def not_started(self) -> list[str]:
        """What of the probes did not start, in lines for people; the stack side has its own in ``stacks``."""
        return self._rows.describe_not_started(IDLE_LOOK_INTERVAL_S)  # the longest of them, up to 256 ranks

    # ---- begin

    def start(self, progress: Callable[[str], None] = lambda _: None, *, wait_for_stacks: bool = True) -> None:
        """Finds the targets, loads the programs and attaches. The store is opened and stacks' programs are loaded
        meanwhile, each in a thread of its own.

        Args:
            progress: Called with what takes time now, in words for people.
            wait_for_stacks: Return once stacks are sampled. Otherwise that begins in a later ``poll``, half a second
                after the probes.

        Raises:
            ArgusError: Nothing can be traced, with the reason. Nothing is left attached.
        """
        if not sees_host_pids():
            raise ArgusError(
                "Argus runs in a PID namespace of its own, while the kernel reports the host's PIDs",
                "Start the container with --pid=host, or run Argus on the host",
                EXIT_UNAVAILABLE,
            )
        memory.settle()
        raise_descriptor_limit()
        self._enter_reader()
        targets: list[Target] = []
        reader.shared.on_slow = lambda path: progress(f"reading {os.path.basename(path)}")
        try:
            targets = find_targets(self.options, self.session.note)
            debug.note("start: targets found")
            # A store that cannot be had is an error now, not at the end. One that goes away later is waited for.
            opening = Aside(self._open_store, "argus-open")
            progress("loading BPF programs")
            self._load()
            progress("attaching probes")
            self._budget.start()
            if self.options.children:
                # A launcher's children become ranks as their calls become rows: until then nothing bounds what probes
                # cost them, and calls pile up.
                progress(f"opening the store {self._store.url}")
                while not opening.wait(POLL_S):
                    pass
            self._roster.start(targets, set(self.options.pids))
            self._budget.probes_are_on()
            debug.note("start: probes attached")
            btf.forget()
            # The engine of a store yields to the job, and may take long on a busy node: calls are recorded meanwhile.
            progress(f"opening the store {self._store.url}")
            while not opening.wait(POLL_S):
                self._calls.drain()
                self._budget.poll(time.monotonic())
            self.session.run = opening.result()
            self._roster.renumber(self.session.run)
            debug.note("start: store open")
            self._calls.drain()
            self._budget.run_is_numbered()
            self.session.writer.start()
            self._rows.write_ranks()
            self._signals.store()
            self.session.writer.maybe_flush(math.inf)  # who reads the store sees at once that there is a run
            if wait_for_stacks:
                progress("loading BPF programs for stacks")
                while not self._stacks.loaded(POLL_S):
                    self._calls.drain()
                    self._budget.poll(time.monotonic())
                self._stacks.begin_sampling(time.monotonic())
            self._calls.drain()
        except BaseException as failure:
            if isinstance(failure, Exception):
                self._stacks.wait_until_loaded()  # what it loads is closed below
            self.abort()
            for target in targets:
                target.close()
            raise
        finally:
            reader.shared.on_slow = None
        self.session.started_ns = time.monotonic_ns()
        self._viewer.start()

    def _load(self) -> None:
        """Loads the programs behind probes, and begins to load those that sample stacks."""
        options, session = self.options, self.session
        session.probes = Probes(
            launch_ring_bytes=options.launch_ring_bytes,
            launch_durations=options.launch_durations,
            backend=options.backend,
        )
        self._calls.open()
        self._watchdog.start()
        debug.note("start: programs loaded")
        self._stacks.begin_loading()
        session.roster = self._roster = Roster(session, self._names, timed=self._gpu.may_time)
        if not session.probes.prices.measured:
            session.note("what a probe costs could not be measured on this machine: overhead goes by another's prices")

    def _open_store(self) -> int:
        """Sees to the store's tables and the name of the node, and returns the number of the run."""
        ensure_schema(self._store)
        if self.options.run is None:
            # Runs are numbered by the second, and a second trace may begin in the same one.
            # A clock that was set back must not make an old run the newest one.
            return next_run(self.session.run, newest_run(self._store))
        # Other nodes of the run may go by the name that this one has: containers often do.
        self.session.rename(claim(self._store, self.options.run, self.host, machine_digits()))
        return self.options.run

    # ---- go on

    def poll(self) -> None:
        """One turn, as ``argus.live.side`` describes it. Call it again after ``pace_s``."""
        roster, part = self._roster, self.bulkheads.part
        # What ended before the rings are read has nothing left in them afterwards.
        ended = roster.leaving()
        now = self._polled = time.monotonic()
        self._watchdog.expect(now)
        soon = now + (0.0 if self.session.calls_come else IDLE_SLACK_S)
        for side in reversed(self.sides):
            with part(side.name):
                side.poll(now, soon - now)
        if soon >= self._quick_look_due:
            self._quick_look_due = now + QUICK_LOOK_INTERVAL_S
            with part("processes"):
                self._look_quickly(now)
        if soon >= self._work_due:
            self._work_due = now + self._work_interval_s
            self._work(now)
            with part("processes"):
                if ended:
                    self._rows.count_refused(self._stacks.over_share)
                roster.retire(ended)
                self._calls.forget_processes(ended)
        if soon >= self._look_due:
            self._look_due = now + self._look_interval_s
            self._look(now)
        self._see_to_itself(now, soon)
        self._watchdog.expect(now + self.pace_s)

    def _look_quickly(self, now: float) -> None:
        changed, self._calls.soon = self._roster.look_quickly(now), self._roster.young(now)
        if changed:
            self._rows.ranks_changed(now)
        if changed or self._calls.soon:
            for side in self.sides:
                side.look_quickly(now)

    def _work(self, now: float, *, final: bool = False) -> None:
        for side in self.sides:
            with self.bulkheads.part(side.name):
                side.work(now, final=final)

    def _look(self, now: float) -> None:
        roster = self._roster
        with self.bulkheads.part("processes"):
            changed = roster.look(now)
            if self._stacks.on and roster.adopt_cpu_ranks(now):
                changed = True
            if changed:
                self._rows.ranks_changed(now)
            self._forget_jobs(now)
        self._of_each_side(lambda side: side.look(now))
        with self.bulkheads.part("coverage"):
            self._signals.store()

    def _of_each_side(self, does: Callable[[Side], None], job: Job | None = None) -> None:
        for side in self.sides:
            with self.bulkheads.part(side.name, job):
                does(side)

    def _relieve(self, now: float) -> None:
        """Called by the watchdog's thread."""
        for side in self.sides:
            side.relieve(now)

    def _see_to_itself(self, now: float, soon: float) -> None:
        """The session's own counters, clock, memory and rows, when they are due."""
        part = self.bulkheads.part
        if soon >= self._coverage_due:
            self._coverage_due = now + self._coverage_s
            self._coverage_s = min(1.5 * self._coverage_s, COVERAGE_S)
            with part("coverage"):
                self._write_coverage()
            with part("host usage"):
                self._rows.write_host_usage()
        if soon >= self._clock_due:
            self._clock_due = now + CLOCK_S
            with part("the clock"):
                self._compare_clocks(mono_offset_ns())
        if soon >= self._trim_due:
            self._trim_due = now + memory.TRIM_S
            memory.trim()
        with part("the store"):
            self._rows.store_changed(now)
            self.session.writer.maybe_flush(now)

    def _compare_clocks(self, offset_ns: int) -> None:
        """Takes a new offset of the wall clock over, if need be: of jobs that go on it is stored anew."""
        if self.session.take_offset(offset_ns):
            for job in self.jobs:
                if not job.over_since:
                    self._rows.write_job(job)

    def _forget_jobs(self, now: float) -> None:
        """Stores the last of jobs whose ranks have started again long ago, and forgets them."""
        over = self._roster.take_over(now, OVER_S, FORGOTTEN_AT_ONCE)
        for job in over:
            self._of_each_side(methodcaller("end_job", job), job)
        self._rows.write_ended(over)
        if over:
            self._write_coverage(over)
        for job in over:
            self._rows.forget(job)
            self._signals.forget(job)
            for side in self.sides:
                side.forget(job)

    @property
    def pace_s(self) -> float:
        """How soon after the beginning of the last ``poll`` it is to be called again."""
        calls_come = self.session.calls_come
        due = min(side.due for side in self.sides if side.punctual == calls_come)
        if calls_come:
            return max(min(self._calls.poll_s, due - self._polled), 0.001)
        if self._stacks.loading:
            return POLL_S
        return max(POLL_S, min(self._look_due, self._work_due, due) - self._polled)

    @property
    def _look_interval_s(self) -> float:
        """A look costs 0.1 ms for each process."""
        return max(LOOK_INTERVAL_S if self.session.calls_come else IDLE_LOOK_INTERVAL_S, self._work_interval_s / 2)

    @property
    def _work_interval_s(self) -> float:
        """A turn costs half a millisecond for each rank that has made calls, however many they were."""
        if not self.session.calls_come:
            return IDLE_WORK_INTERVAL_S
        ranks = len(self._roster.by_pid)
        return min(WORK_INTERVAL_S * max(ranks / MANY_RANKS, 1.0), MOST_WORK_INTERVAL_S)

    def raise_sampling(self, reasons: Sequence[str]) -> None:
        """Samples stacks more often while something is the matter with a job. Call it about once a second.

        Args:
            reasons: What, a line each; none: nothing that is known.
        """
        if changed := self._stacks.raise_sampling(reasons[0] if reasons else "", time.monotonic()):
            self.session.note(changed)

    def done(self) -> bool:
        """Whether every target has ended."""
        return not self.session.has_roster or self._roster.done()

    # ---- end

    def stop(self) -> dict[str, int]:
        """Takes the probes away, stores what is left, and returns the loss counters that are not 0."""
        session = self.session
        self._watchdog.expect(math.inf)
        # Whatever fails from here on, the rest is done: above all the last counters, without which it is not known
        # whether the rows are complete.
        part = self.bulkheads.part
        self._of_each_side(lambda side: side.begin_stop())
        with part("processes"):
            self._roster.family.close()
        session.end_ns = time.monotonic_ns()
        with part("coverage"):
            self._signals.store(session.end_ns, over="the trace has ended")
        with part("probes"):
            session.probes.detach()
        self._of_each_side(lambda side: side.stop())
        with part("processes"):
            self._roster.look(time.monotonic())
        self._work(time.monotonic(), final=True)
        # Storing what is left may take long, and calls of that time are not a job's silence.
        self._calls.seen_ns = session.end_ns
        with part("the last rows"):
            self._rows.write_ranks()
        self._rows.write_ended(self.jobs)
        with part("coverage"):
            self._write_coverage()
        with part("host usage"):
            self._rows.write_host_usage()
        with part("the store"):
            self._last_rows.store()
        lost = self.lost()
        self._of_each_side(lambda side: side.close())
        for name, let_go in (
            ("the watchdog", self._watchdog.close),
            ("probes", session.probes.close),
            ("processes", self._roster.close),
            ("the store", self._store.close),
        ):
            with part(name):
                let_go()
        session.probes = None
        demangler.shared.close()
        self._leave_reader()
        return lost

    def give_up(self, timeout_s: float) -> str:
        """Brings rows that are not stored to disk, for the case that the process ends at once: any thread may call it.

        Args:
            timeout_s: How long that may take. What is not on disk then is lost.

        Returns:
            What has become of them, for people.
        """
        return self._last_rows.give_up(timeout_s)

    def abort(self) -> None:
        """Lets go of everything at once, storing nothing more."""
        self._watchdog.close()
        for side in self.sides:
            side.close()
        if self.session.has_roster:
            self._roster.close()
        if self.session.has_probes:
            self.session.probes.close()
            self.session.probes = None
        self._leave_reader()

    def _enter_reader(self) -> None:
        self._reads = True
        reader.shared.on_loss = self.session.count_of_reader
        reader.shared.enter()

    def _leave_reader(self) -> None:
        reads, self._reads = self._reads, False
        if reads:
            reader.shared.on_loss = reader.not_counted
            reader.shared.leave()

    # ---- counters

    def counters(self) -> Counters:
        """Every counter of the session: value, and whether a value above 0 is a loss."""
        counters: Counters = {}
        for side in self.sides:
            with self.bulkheads.part("counters"):
                counters |= side.counters()
        with self.bulkheads.part("counters"):
            counters |= self._roster.counters()
        counters = {name: (value, True) for name, value in self.bulkheads.counters.items()} | counters
        counters |= {name: (value, True) for name, value in reader.shared.counters.items()}
        counters |= self._watchdog.counters()
        counters["reader_restarts"] = (reader.shared.counters["reader_restarts"], False)
        counters["clock_jumps"] = (self.session.clock_jumps, False)
        counters |= {name: (self.session.losses.totals[name], True) for name in OVER_SHARE}
        names = demangler.shared
        counters |= {"names_given_up": (names.given_up, False), "names_shortened": (names.shortened, False)}
        counters |= {name: (value, True) for name, value in self._last_rows.dropped.items()}
        return counters | self.session.writer.counters()

    def lost(self) -> dict[str, int]:
        """The loss counters that are not 0. Coverage is complete if there is none."""
        return {name: value for name, (value, loss) in self.counters().items() if loss and value}

    def _write_coverage(self, jobs: Sequence[Job] | None = None) -> None:
        """Stores the session's counters with these jobs; None: with those that run, and at the end with all."""
        with self.bulkheads.part("coverage"):
            self._rows.write_not_started(self._roster.family.state)
        self._rows.write_coverage(self.counters(), self._calls.seen_ns, self._stacks.over_share, self.sides, jobs)
