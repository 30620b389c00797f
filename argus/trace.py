"""The live pipeline: probes → columns → steps → store. One ``Tracer`` is one run of ``argus trace``.

It owns no thread but the writer's, the fork watcher's and the watchdog's: whoever runs it calls ``poll`` a few times a
second. ``poll`` never waits for the store.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus import __version__, debug, heap, records, redact
from argus.aside import Aside
from argus.bulkhead import Bulkheads, Watchdog
from argus.capture import DEFAULT_OFF_CPU_NS, DEFAULT_RATE_HZ, calls, collectives, demangler, launches, reader
from argus.capture.bpf import DEFAULT_LAUNCH_RING_BYTES, Attachment, Backend, Probes, Subject, subject_of
from argus.capture.governor import DEFAULT_BUDGET, LOW_RATE_HZ, Change
from argus.capture.host_cpu import HostCpuReader
from argus.capture.hosts import wall_error_ns
from argus.capture.names import KernelNames
from argus.capture.targets import (
    TORCH_PYTHON,
    Target,
    find_gpu_processes,
    find_libraries,
    find_named_processes,
    hidden_processes,
    inspect,
    open_target,
    queued_ns,
    same_process,
    sees_host_pids,
)
from argus.coverage import Rank, Seen, SignalCoverage
from argus.cupti import MINIMUM_SHARE, RAW_ROWS_S
from argus.cupti.collector import CuptiOptions
from argus.draining import CallRings
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.flags import FlagWatcher
from argus.gpu import KEPT_NAMES, NOT_BEGUN, GpuSide
from argus.kernels import KernelSide
from argus.neighbours import Neighbours, Spent
from argus.overhead import FIRST_LOOKS_S, OverheadSide, words
from argus.probing import SUBJECTS, ProbingSide
from argus.recent import lateness_ms
from argus.records import LOSS_COUNTERS
from argus.roster import Job, Member, Roster
from argus.semantics.flops import utilization
from argus.semantics.groups import RankCalls, find_groups, keep_alignment
from argus.semantics.marks import Marks
from argus.semantics.mesh import describe, superseded
from argus.semantics.phases import METHODS as PHASE_METHODS
from argus.semantics.phases import PHASE, PHASES
from argus.semantics.steps import METHODS
from argus.stacks import StackSide
from argus.store import spill
from argus.store.open import Store
from argus.store.reader import newest_run, next_run
from argus.store.schema import ensure_schema
from argus.store.writer import Writer
from argus.view import JobView, RankView, View, own_ms, parts_of_gpu, parts_of_thread

POLL_S = 0.02
"""How often the rings are drained while calls are probed."""
QUIET_POLL_S = 0.1
"""The same while few calls come, and no GPU's records."""
QUIET = 1 / 256
"""Part of a ring."""
WORK_INTERVAL_S = 0.25
"""How often drained records become rows. The ring holds a second of the densest load, and is drained more often."""
IDLE_WORK_INTERVAL_S = 1.0
"""The same while no calls are probed."""
MANY_RANKS, MOST_WORK_INTERVAL_S = 32, 4.0
"""From so many ranks on records become rows less often: twice as many, half as often; but so often at least."""
GROUPS_INTERVAL_S = 1.0
"""How often the communicators are lined up while something about them is unknown."""
GROUPS_SHARE = 0.02
"""Of the time, for that, at most: a job of hundreds of ranks here takes a tenth of a second each time."""
SETTLED_GROUPS_INTERVAL_S = 60.0
"""The same once all is known; a communicator not seen before brings it forward."""
SETTLED_CALLS = 256
"""Collectives of each rank before an alignment counts as settled: dozens of steps."""
LOOK_INTERVAL_S = 0.5
"""How often every process is looked at: whether it ended, loaded libraries, has children."""
IDLE_LOOK_INTERVAL_S = 1.0
"""The same while no calls are probed: a turn costs more than what it does."""
IDLE_SLACK_S = 0.5
"""While no calls are probed, what is due so soon is done at once: half of the intervals, or each would have turns of
its own for ever."""
QUICK_LOOK_INTERVAL_S = 0.05
"""How often a young child is looked at until it has loaded a library: calls before that go unseen."""
MOST_SHARE = 0.9
"""Of the job's time: more is not believed to be lost while all is probed."""
FIRST_COVERAGE_S, COVERAGE_S = 2.0, 4.0
"""How often counters become rows: at first, and later."""
OVER_S = 10.0
"""For so long the last rows of a job may come after its last process has ended."""
GPU_STOP_S = 5.0
"""How long the helpers may take to answer that CUPTI is off."""
KEEP_COLLECTIVES = 4096
"""Recent collectives, and waits, of a rank kept to line communicators up."""
CLOCK_S = 60.0
"""How often the wall clock is compared with CLOCK_MONOTONIC anew."""
JUMP_NS = 1_000_000
"""By how much they differ otherwise than before: both are slewed alike, so that only a clock that was set, or a machine
that slept, changes it. A measurement is good to microseconds."""
LATE_STACKS_S = 3.0
"""Sampling that began so long after the trace is said to have: on a busy node, when programs are compiled first."""
SETTLE_NS = 10_000_000
"""Records of calls so long before the rings were read are in them: a probe writes within microseconds, unless it is
preempted."""


_SIGNALS: dict[str, tuple[Subject, ...]] = {
    "ranges": ("ranges",),
    "nvtx": ("nvtx",),
    "backward": ("backward",),
    "launches": ("launches",),
    "calls": ("copies", "waits"),
    "collectives": ("collectives",),
    "products": ("math",),
}
"""Of ``signal_coverage``, those that are probed: the subjects of their probes."""
_SUBJECTS = {
    "ranges": "steps and phases by PyTorch's marks",
    "backward": "backward passes",
    "nvtx": "NVTX ranges",
    "math": "matrix products",
}
"""Probes whose programs a kernel may refuse, for people."""

_TRAINS = np.array([call.kind in ("backward", "backward_begin") for call in calls.CALLS])
_RANGES = np.array([subject_of(call) == "ranges" for call in calls.CALLS])
_COMM_MADE = [call.id for call in calls.CALLS if call.kind in ("comm_init", "comm_split")]


@dataclass(frozen=True)
class Options:
    """What to trace, and how.

    Attributes:
        pids: Processes named by the user.
        all_gpu: Every process that maps libcuda.
        name: Programs whose command line contains this; with ``all_gpu`` only those of them that map libcuda.
        children: Follow forks and execs of the targets.
        job: Name of the job, over what the environment says.
        run: Number of the run, the same on every node of the job; None: the time.
        launch_durations: Probe the exits of launches too.
        launch_ring_bytes: Size of the ring of CUDA calls.
        backend: Force a way to attach; None: the best the kernel has.
        cupti: GPU times by CUPTI: "auto" wakes processes that are armed, "inject" arms them first, "off".
        cupti_options: How CUPTI collects.
        not_armed: Why processes may be without the helper, for people; empty: nobody gave them one.
        all_armed: Every process was started with it.
        stacks: Sample the threads' stacks.
        rate_hz: Samples a second and CPU; None: more while something is the matter (``Tracer.heed``).
        off_cpu_ns: Time off the CPU from which on it is told, with its stack and reason; None: not at all.
        step_flops: Floating-point operations of the model in a step, of all ranks; 0: not given.
        peak_flops: What a GPU can do at most in a second; 0: not given.
        raw: Which operations of the GPUs are stored one by one: one of ``cupti.RAW_MODES``.
        raw_rows_s: How many a second of each job, at most, where ``raw`` is "auto".
        max_overhead: What observing may cost the job, as a share of its time; above that less is observed.
        redact: What is not stored beside secrets: some of ``redact.MORE``.
    """

    pids: tuple[int, ...] = ()
    all_gpu: bool = False
    name: str | None = None
    children: bool = False
    job: str | None = None
    run: int | None = None
    launch_durations: bool = False
    launch_ring_bytes: int = DEFAULT_LAUNCH_RING_BYTES
    backend: Backend | None = None
    cupti: str = "auto"
    cupti_options: CuptiOptions = field(default_factory=CuptiOptions)
    not_armed: str = ""
    all_armed: bool = False
    stacks: bool = False
    rate_hz: int | None = None
    off_cpu_ns: int | None = DEFAULT_OFF_CPU_NS
    step_flops: float = 0.0
    peak_flops: float = 0.0
    raw: str = "auto"
    raw_rows_s: float = RAW_ROWS_S
    max_overhead: float = DEFAULT_BUDGET
    redact: tuple[str, ...] = ()


class Tracer:
    """One tracing session.

    Args:
        store: Where rows go. It may be away: rows wait on disk (``argus.store.spill``), bounded and counted.
        options: What to trace.

    Use: ``start``, then ``poll`` until ``done``, then ``stop``.
    """

    def __init__(self, store: Store, options: Options) -> None:
        self.options = options
        self.host = redact.host(socket.gethostname(), options.redact)
        self.mono_offset_ns = mono_offset_ns()
        self.started_ns = time.monotonic_ns()
        self.store_error = ""
        """After ``stop``: why rows could not be stored; empty: all were."""
        self._run = int(time.time()) if options.run is None else options.run
        self._store = store
        self._writer = Writer(
            store, source=f"trace/{self.host}", place=spill.place(store.target), paths="paths" not in options.redact
        )
        self.bulkheads = Bulkheads(self._note)
        """What failed of the session, also of who runs it."""
        self.on_stall: Callable[[str], None] = self._note
        """Called by the watchdog's thread with a line for people, when the loop has not turned for a second."""
        self._watchdog = Watchdog(lambda: self.bulkheads.doing, lambda line: self.on_stall(line), self._relieve)
        self._first_offset_ns = self.mono_offset_ns
        self._clock_due = time.monotonic() + CLOCK_S
        self._clock_jumps = 0
        self._probes: Probes | None = None
        self._rings: CallRings | None = None
        self._reads = False
        self._loading: Aside[None] | None = None
        """Loads what samples stacks; None: that was not begun, or is done."""
        self._stacks_after_s = 0.0
        self._roster: Roster | None = None
        self._probing: ProbingSide
        self._kernels = KernelSide(self._writer, self._origin, options.raw, options.raw_rows_s, self._note)
        self._flags = FlagWatcher(store)
        self._gpu = GpuSide(
            self._writer,
            options.cupti,
            options.cupti_options,
            self._origin,
            self._next_version,
            self._note,
            self._kernels,
            self._waited,
            options.not_armed,
            options.all_armed,
            self.bulkheads,
        )
        self._stacks = StackSide(
            self._writer,
            self._origin,
            self._next_version,
            on=options.stacks,
            rate_hz=options.rate_hz,
            off_cpu_ns=options.off_cpu_ns,
            bulkheads=self.bulkheads,
        )
        self._flops = options.step_flops, options.peak_flops
        self._wall_error_ns = wall_error_ns()
        self._names = KernelNames()
        self._losses: Tally[str] = Tally()
        self._neighbours = Neighbours(options.max_overhead)
        self._spent: dict[int, tuple[float, int, int, int]] = {}
        """Of each process: when it was looked at, hits of its probes, records refused, for how long it had waited for a
        CPU."""
        self._calls_in_progress = 0
        self._engine_cpu_s = 0.0
        self._kernel_launches: Tally[str] = Tally()
        self._collective_bytes: Tally[str] = Tally()
        self._collective_calls: Tally[str] = Tally()
        self._drained: dict[str, list[NDArray[np.void]]] = {
            "launches": [],
            "collectives": [],
            "control": [],
            "marks": [],
            "math": [],
        }
        self._work_due = self._look_due = self._coverage_due = self._quick_look_due = self._trim_due = 0.0
        self._written_jobs: set[tuple[str, int]] = set()
        self._view_before: tuple[float, float, dict[int, tuple[int, int]]] = (time.monotonic(), 0.0, {})
        self._version = time.time_ns()
        self._coverage_s = FIRST_COVERAGE_S
        self._host_cpu = HostCpuReader()
        self._polled = 0.0
        self._ring_poll_s = POLL_S
        self._drained_ns = 0
        self._seen_ns = 0  # what was called until then has become rows
        self._end_ns: int | None = None  # when the probes began to go: of later calls only some were seen
        self._told = 0  # notes
        self._calls_after_end = 0
        self._marks_without_rank = 0
        self._products_not_probed = 0
        self._overhead = OverheadSide(options.max_overhead)
        self._launches_detached = self._waits_not_followed = self._nvtx_detached = self._ranges_detached = 0
        self._collectives_detached = self._calls_detached = 0
        self._attached_ns = 0  # since when probes are on
        self._probes_seen = 0
        self._untold: tuple[list[Change], int] | None = ([], 0)
        self._generations = collectives.Generations()
        self._signals = SignalCoverage()
        self._refused: dict[str, str] = {}
        """Subjects of optional probes whose programs the kernel refuses, and why."""
        self._follow_state = "on"
        self._parts_written: set[tuple[str, int, int]] = set()
        """Job, run and rank of which the features say what did not start."""

    @property
    def jobs(self) -> list[Job]:
        """Every attempt of every job seen so far."""
        return [] if self._roster is None else self._roster.jobs

    @property
    def attached(self) -> list[Attachment]:
        """Probes put on files so far."""
        return [] if self._roster is None else self._roster.attached

    @property
    def past(self) -> Tally[str]:
        """What the jobs that are not among ``jobs`` any more did: jobs, launches, collectives."""
        return Tally() if self._roster is None else self._roster.past

    def notes(self) -> list[str]:
        """What happened that the user may want to know, oldest first."""
        return [] if self._roster is None else list(self._roster.notes)

    def news(self) -> list[str]:
        """Those of them that came since the last call; the newest 100 if there were more."""
        if self._roster is None:
            return []
        fresh = self._roster.notes.since(self._told)
        self._told = self._roster.notes.said
        return fresh

    def _note(self, text: str) -> None:
        if self._roster is not None:
            self._roster.notes.append(text)

    def _waited(self, pid: int) -> None:
        if self._roster is not None:
            self._roster.waited(pid)

    def live(self) -> list[Member]:
        """Ranks whose process runs."""
        return [] if self._roster is None else self._roster.live()

    def gpu_times(self, *, done: bool = False) -> list[str]:
        """The state of GPU times in lines for people; empty: not known yet. ``done``: with what was recorded."""
        return self._gpu.summary(done=done) if done or self._gpu.known(time.monotonic()) else []

    @property
    def samples(self) -> int:
        """Stacks that were sampled on a CPU."""
        return self._stacks.counters().get("stack_samples", (0, False))[0]

    def stacks(self) -> list[str]:
        """How the sampling of stacks goes, or went, in lines for people."""
        lines = self._stacks.summary()
        if lines and self._stacks_after_s > LATE_STACKS_S:
            lines[0] += f", from {self._stacks_after_s:.1f} s on: their BPF programs were being loaded until then"
        return lines

    def not_started(self) -> list[str]:
        """What of the probes did not start, in lines for people; the stack side has its own in ``stacks``."""
        lines = [f"{_SUBJECTS[subject]}: failed: {why}" for subject, why in self._refused.items()]
        if reader.shared.trouble:
            lines.append(f"reader: {reader.shared.trouble}")
        if self._follow_state != "on":
            lines.append(f"forks: {self._follow_state}; children are found up to {LOOK_INTERVAL_S} s late")
        return lines

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
        heap.settle()
        self._enter_reader()
        targets: list[Target] = []
        reader.shared.on_slow = lambda path: progress(f"reading {os.path.basename(path)}")
        try:
            targets = self._find_targets()
            debug.note("start: targets found")
            # A store that cannot be had is told now, not at the end. One that goes away later is waited for.
            opening = Aside(self._open_store, "argus-open")
            progress("loading BPF programs")
            self._probes = Probes(
                launch_ring_bytes=self.options.launch_ring_bytes,
                launch_durations=self.options.launch_durations,
                backend=self.options.backend,
            )
            self._rings = CallRings(self._probes.rings())
            self._watchdog.start()
            debug.note("start: programs loaded")
            self._loading = Aside(self._stacks.load, "argus-load")
            self._roster = Roster(
                self._probes,
                self._names,
                follow=self.options.children,
                job=self.options.job,
                run=self._run,
                bulkheads=self.bulkheads,
                timed=self._gpu.may_time,
            )
            self._refused = self._probes.refused
            progress("attaching probes")
            if not self._probes.prices.measured:
                self._note(
                    "what a probe costs could not be measured on this machine: overhead goes by another's prices"
                )
            self._probing = ProbingSide(self._probes, self.options.max_overhead, self._note)
            self._overhead.start()
            self._govern()
            if self.options.children:
                # A launcher's children become ranks as their calls become rows: until then nothing bounds what probes
                # cost them, and calls pile up.
                progress(f"opening the store {self._store.url}")
                while not opening.wait(POLL_S):
                    pass
            self._roster.start(targets, set(self.options.pids))
            self._first_look()
            debug.note("start: probes attached")
            # The engine of a store yields to the job, and may take long on a busy node: calls are recorded meanwhile.
            progress(f"opening the store {self._store.url}")
            while not opening.wait(POLL_S):
                self._drain()
                self._look_if_due()
            self._run = opening.result()
            self._roster.renumber(self._run)
            debug.note("start: store open")
            self._drain()
            self._tell_first()
            self._writer.start()
            self._write_ranks()
            self._write_signals()
            self._writer.maybe_flush(math.inf)  # who reads the store sees at once that there is a run
            if wait_for_stacks:
                progress("loading BPF programs for stacks")
                while not self._loading.wait(POLL_S):
                    self._drain()
                    self._look_if_due()
                self._begin_stacks(time.monotonic())
            self._drain()
        except BaseException as failure:
            if self._loading is not None and isinstance(failure, Exception):
                self._loading.result()  # what it loads is closed below
            self.abort()
            for target in targets:
                target.close()
            raise
        finally:
            reader.shared.on_slow = None
        self.started_ns = time.monotonic_ns()
        self._view_before = (time.monotonic(), self._cpu_s(), {})

    def _begin_stacks(self, now: float) -> None:
        """Samples stacks from here on, if what does so has been loaded."""
        if (loading := self._loading) is not None and loading.wait(0):
            self._loading = None
            loading.result()
            self._stacks.start()
            self._stacks_after_s = (time.monotonic_ns() - self.started_ns) / 1e9
            self._stacks.look(self.jobs, now)
            debug.note("start: stacks sampled")

    def _open_store(self) -> int:
        """Sees to the store's tables, and returns the number of the run."""
        ensure_schema(self._store)
        if self.options.run is None:
            # Runs are numbered by the second, and a second trace may begin in the same one.
            # A clock that was set back must not make an old run the newest one.
            return next_run(self._run, newest_run(self._store))
        return self._run

    def _find_targets(self) -> list[Target]:
        options = self.options
        pids = list(dict.fromkeys(options.pids))
        targets: list[Target] = []

        def take(pid: int) -> Target:
            return _open_launcher(pid) if options.children else open_target(pid, any_program=options.stacks)

        refused: list[ArgusError] = []
        if options.all_gpu or options.name is not None:
            found = [pid for pid in _choose(options) if pid not in pids]
            if not found and not pids:
                raise _none_found(options)
            for pid in found:
                try:
                    targets.append(open_target(pid) if options.all_gpu else take(pid))
                except ArgusError as failure:  # it ended meanwhile, or starts those that are meant
                    refused.append(failure)
        try:
            for pid in pids:
                targets.append(take(pid))
        except ArgusError:
            for target in targets:
                target.close()
            raise
        if not targets:
            if refused and options.name is not None:
                raise refused[0]
            raise ArgusError("every process found ended before it could be traced", "", EXIT_UNAVAILABLE)
        return targets

    # ---- go on

    def poll(self) -> None:
        """Drains the rings, and, when due, turns records into rows and steps. Call it again after ``pace_s``."""
        assert self._roster is not None
        # What ended before the rings are read has nothing left in them afterwards.
        ended = self._roster.leaving()
        now = self._polled = time.monotonic()
        self._watchdog.expect(now)
        soon = now + (0.0 if self._calls_come else IDLE_SLACK_S)
        part = self.bulkheads.part
        with part("GPU times"):
            self._gpu.poll(now)
            self._probe_math()
        with part("the rings"):
            self._drain()
        with part("overhead"):
            self._look_if_due()
            self._probing.poll(now, self.jobs)
        with part("stacks"):
            self._begin_stacks(now)
        if soon >= self._quick_look_due:
            self._quick_look_due = now + QUICK_LOOK_INTERVAL_S
            with part("processes"):
                changed = self._roster.look_quickly(now)
                if changed:
                    self._write_ranks()
                if changed or self._roster.young(now):
                    self._gpu.look(self.jobs, self._roster.candidates(), now)
        with part("stacks"):
            self._stacks.poll(now, slack_s=soon - now)
        if soon >= self._work_due:
            self._work_due = now + self._work_interval_s
            self._work(now)
            with part("stacks"):
                self._stacks.work(now)
            with part("processes"):
                if ended:
                    self._look_at_losses()
                self._roster.retire(ended)
                self._generations.forget(ended)
        if soon >= self._look_due:
            self._look_due = now + (LOOK_INTERVAL_S if self._calls_come else IDLE_LOOK_INTERVAL_S)
            with part("processes"):
                changed = self._roster.look(now)
                if self._stacks.on and self._roster.adopt_cpu_ranks(now):
                    changed = True
                if changed:
                    self._write_ranks()
                self._put_by(now)
            with part("stacks"):
                self._stacks.look(self.jobs, now)
            with part("coverage"):
                self._write_signals()
        self._see_to_itself(now, soon)
        self._watchdog.expect(now + self.pace_s)

    def _see_to_itself(self, now: float, soon: float) -> None:
        """The session's own counters, clock, memory and rows, when they are due."""
        part = self.bulkheads.part
        if soon >= self._coverage_due:
            self._coverage_due = now + self._coverage_s
            self._coverage_s = min(1.5 * self._coverage_s, COVERAGE_S)
            with part("coverage"):
                self._write_coverage()
            with part("host usage"):
                self._write_host_usage()
        if soon >= self._clock_due:
            self._clock_due = now + CLOCK_S
            with part("the clock"):
                self._compare_clocks(mono_offset_ns())
        if soon >= self._trim_due:
            self._trim_due = now + heap.TRIM_S
            heap.trim()
        with part("the store"):
            self._writer.maybe_flush(now)

    def _compare_clocks(self, offset_ns: int) -> None:
        """Takes a new offset of the wall clock over, if the clock was set or the machine slept. What was stored before
        keeps its times."""
        jumped_ns = offset_ns - self.mono_offset_ns
        if abs(jumped_ns) < JUMP_NS:
            return
        self._clock_jumps += 1
        self.mono_offset_ns = offset_ns
        self._wall_error_ns = wall_error_ns()
        self._note(
            f"the wall clock jumped by {jumped_ns / 1e9:+.3f} s (it was set, or the machine slept): times are of the"
            " new clock from here on"
        )
        for job in self.jobs:
            if not job.over_since:
                self._write_job(job)

    def _put_by(self, now: float) -> None:
        """Stores the last of jobs whose ranks have started again long ago, and forgets them."""
        assert self._roster is not None
        for job in self._roster.take_over(now, OVER_S):
            self._write_job(job, ended=True)
            self._write_coverage([job])
            self._written_jobs.discard((job.name, job.run))
            self._gpu.forget(job)
            self._stacks.forget(job)
            self._signals.forget(job.name, job.run)
            self._probing.forget(job)
            self._kernels.forget(job)
            self._parts_written = {key for key in self._parts_written if key[:2] != (job.name, job.run)}

    @property
    def pace_s(self) -> float:
        """How soon after the beginning of the last ``poll`` it is to be called again."""
        if self._calls_come:
            return max(min(self._ring_poll_s, min(self._probing.due, self._overhead.due_at) - self._polled), 0.001)
        if self._loading is not None:
            return POLL_S
        return max(POLL_S, min(self._look_due, self._work_due, self._stacks.due) - self._polled)

    @property
    def _work_interval_s(self) -> float:
        """A turn costs half a millisecond for each rank that has made calls, however many they were."""
        if not self._calls_come:
            return IDLE_WORK_INTERVAL_S
        ranks = 0 if self._roster is None else len(self._roster.by_pid)
        return min(WORK_INTERVAL_S * max(ranks / MANY_RANKS, 1.0), MOST_WORK_INTERVAL_S)

    @property
    def _calls_come(self) -> bool:
        return self._roster is not None and bool(self._roster.attached or self.options.children)

    def heed(self, matters: Sequence[str]) -> None:
        """Looks closer while something is the matter with a job. Call it about once a second.

        Args:
            matters: What, a line each; none: nothing that is known.
        """
        if changed := self._stacks.heed(matters[0] if matters else "", time.monotonic()):
            self._note(changed)

    # ---- what it costs

    def _first_look(self) -> None:
        """Probes were put on: what they cost is looked at soon, before anything else takes its time."""
        self._attached_ns = time.monotonic_ns()
        self._govern()
        self._overhead.restart(time.monotonic())
        self._probes_seen = len(self.attached)
        if self.live():
            time.sleep(FIRST_LOOKS_S[0])
            self._drain()
            self._govern()

    def _look_if_due(self) -> None:
        assert self._roster is not None
        now = time.monotonic()
        if len(self.attached) > self._probes_seen:
            self._overhead.restart(now)
        self._probes_seen = len(self.attached)
        if self._overhead.due(now):
            self._govern()

    def _govern(self, *, final: bool = False) -> None:
        """Measures what observing costs the jobs, and observes less where that is too much."""
        assert self._probes is not None
        if not final:
            self._drain()  # waits until now, as hits are counted until now
        found = {counter.name.lower(): value for counter, value in self._probes.counters().items()}
        for side in (self._stacks, self._gpu):
            found |= {name: value for name, (value, _) in side.counters().items()}
        names = ("hits", "hits_ignored", "marks", "stack_samples", "gpu_ops", "cupti_callback_ns")
        counted = {name: found.get(name, 0) for name in names}
        counted["cupti_api"] = self.options.cupti_options.api
        pids = [member.target.pid for member in self.live() if not member.ignored]
        programs, samplers = self._probes.run_times(), self._stacks.run_times()
        prices = self._probes.call_prices()
        hits = self._probes.hits()
        now = time.monotonic()  # reading rings may have taken longer than the time that is looked at
        self._overhead.count_hits(hits, prices)
        change = self._overhead.look(now, pids, programs, samplers, counted, None if final else self._able())
        if change is not None:
            self._carry_out(change, now)
        if final:
            return
        plan = self._probing.plan
        on_ns = {subject: self._probing.on_ns[subject] if subject in plan.windowed else None for subject in SUBJECTS}
        if self._look_at_neighbours(now):
            self._overhead.leave_out(programs, on_ns, self._probing.on_hits)
            return
        self._overhead.correct(self._probing.measured_share())
        changes = self._overhead.look_at_probes(
            now,
            programs,
            self._probes.whole_prices(),
            self._probes.entry_prices(),
            on_ns,
            self._probing.on_hits,
            self._probes.pulse,
            self._probing.pulses,
            step_s=self._step_s(),
        )
        if self._overhead.governor.plan != plan:
            self._apply(changes)
        self._probing.weigh(self._overhead.pulse)

    def _look_at_neighbours(self, now: float) -> bool:
        """Ignores processes that take more than their share from others. Whether what was counted since the last look
        is to decide nothing else: it is not all of processes that stay."""
        assert self._probes is not None
        assert self._roster is not None
        before, spent = self._spent, {}
        self._spent = {}
        for pid, (job, member) in self._roster.by_pid.items():
            if member.state != "traced" or member.ignored:
                continue
            hits, member.refused = self._probes.spent(pid)
            queued = queued_ns(pid)
            self._spent[pid] = now, hits, member.refused, queued
            if pid in before:
                then, hits_then, refused_then, queued_then = before[pid]
                elapsed_s = max(now - then, 1e-3)
                ran_s = elapsed_s - (queued - queued_then) / 1e9
                spent[pid] = Spent(
                    id(job), job.owner, hits - hits_then, member.refused - refused_then, elapsed_s, ran_s
                )
        ignored = self._neighbours.look(spent, self._overhead.hit_ns)
        for pid, why in ignored.items():
            self._ignore(pid, why)
        return bool(ignored) or self._neighbours.suspects

    def _ignore(self, pid: int, why: str) -> None:
        """Records no call of a process any more."""
        assert self._probes is not None
        assert self._roster is not None
        job, member = self._roster.by_pid[pid]
        self._probes.ignore(pid)
        member.ignored = f"the calls of process {pid} are ignored: {why}"
        self._note(f"rank {member.rank} of {job.name}: {member.ignored}; trace it alone with --pid {pid}")
        self._write_signals()

    def _of_members(self, job: Job) -> dict[str, tuple[int, bool]]:
        """The losses of a job that are its own, and its processes', and nobody else's."""
        members = list(job.members.values())
        return {
            "records_over_budget": (sum(member.refused for member in members), True),
            "stack_threads_over_share": (sum(member.over_share for member in members), True),
            "processes_ignored": (sum(bool(member.ignored) for member in members), True),
            **{name: (value, True) for name, value in self.bulkheads.of(job).items()},
        }

    def _step_s(self) -> float:
        """How long a step takes, of the job with the longest; 0: not known."""
        longest = 0.0
        for job in self.jobs:
            thinned = job.thinned.step_ns if job.thinned is not None else 0
            longest = max(longest, thinned or (job.step_ns / job.step_count if job.step_count else 0.0))
        return longest / 1e9

    def _apply(self, changes: list[Change]) -> None:
        """Probes what the governor's plan says, tells what changes, and stores it."""
        governor = self._overhead.governor
        slowed = 1 / (1 - min(self._overhead.lost_inside, MOST_SHARE))
        since_ns = self._probing.apply(governor.plan, self.jobs, self._attached_ns, slowed)
        for change in changes:
            name = change.rung.name
            if name == "NVTX ranges":
                self._nvtx_detached = 1
                for job in self.jobs:
                    job.drop_ranges()
            elif name == "NVTX ranges in windows":
                self._nvtx_detached = 1
            elif name in ("ranges", "ranges in windows"):
                self._ranges_detached = 1
            elif name == "launches":
                self._launches_detached += change.down
            elif name == "products":
                self._products_not_probed += change.down
            elif name == "collectives":
                self._collectives_detached += change.down
            elif name in ("copies", "waits") and change.down:
                self._calls_detached += 1
        if self._untold is not None:
            self._untold = [*self._untold[0], *changes], since_ns  # the run has no number yet
            return
        for change in changes:
            self._tell(change)
        if changes:
            self._write_signals(since_ns)

    def _tell_first(self) -> None:
        """Tells what was changed while the run had no number."""
        assert self._untold is not None
        (changes, since_ns), self._untold = self._untold, None
        for change in changes:
            self._tell(change)
        self._write_signals(since_ns or self._attached_ns)

    def _able(self) -> set[str]:
        """Steps down that would make a difference: names of ``governor.LADDERS``."""
        rate, share = self._stacks.rate_hz, self._gpu.share if self._gpu.collects else 0.0
        could = {
            "sampling more often": rate > DEFAULT_RATE_HZ,
            "sampling at the usual rate": rate > LOW_RATE_HZ,
            "following waits": self._stacks.follows_waits,
            "GPU times for all of the time": share > 0.25,
            "GPU times for a quarter of the time": share > MINIMUM_SHARE,
        }
        return {name for name, can in could.items() if can}

    def _carry_out(self, change: Change, now: float) -> None:
        """Takes a step of the ladders, or takes it back."""
        down, name = change.down, change.rung.name
        taken = {rung.name for rung in self._overhead.governor.taken}
        now_ns = time.monotonic_ns()
        if name == "following waits":
            self._stacks.follow_waits(not down)
            self._waits_not_followed += down
        elif name.startswith("GPU times"):
            quarter, whole = "GPU times for a quarter of the time", self.options.cupti_options.share
            least = MINIMUM_SHARE if quarter in taken else 0.25
            self._gpu.set_share(min(least, whole) if any(each.startswith("GPU") for each in taken) else whole, now_ns)
        else:
            usual = DEFAULT_RATE_HZ if "sampling more often" in taken else None
            self._stacks.limit(LOW_RATE_HZ if "sampling at the usual rate" in taken else usual, now)
        self._tell(change)
        self._write_signals(now_ns)

    def _tell(self, change: Change) -> None:
        """Tells of a step, and stores it as a feature's state."""
        text = words(change, self.options.max_overhead)
        self._note(text)
        for job in self.jobs:
            if members := [member for member in job.ranks() if member.state == "traced"]:
                self._writer.append(
                    "features",
                    {
                        "job": job.name,
                        "run": job.run,
                        "rank": np.array([member.rank for member in members], np.uint32),
                        "host": self.host,
                        "feature": change.rung.name,
                        "state": ["off" if change.down else "on"] * len(members),
                        "reason": [text] * len(members),
                        "version": self._next_version(),
                    },
                )

    def overhead(self) -> list[str]:
        """What it cost the jobs, and what was seen in part for it, in lines for people."""
        made: dict[Subject, int] = {
            "launches": sum(member.launches for job in self.jobs for member in job.members.values()),
            "collectives": sum(member.collectives for job in self.jobs for member in job.members.values()),
        }
        seen = self._probing.describe(made, self._end_ns or time.monotonic_ns(), self.started_ns)
        return [*self._overhead.summary(), *seen]

    def done(self) -> bool:
        """Whether every target has ended."""
        return self._roster is None or self._roster.done()

    def _drain(self) -> None:
        assert self._probes is not None
        assert self._rings is not None
        if self.options.children or self._gpu.collects or self._rings.used > QUIET:
            self._ring_poll_s = POLL_S
        else:
            self._ring_poll_s = min(1.25 * self._ring_poll_s, QUIET_POLL_S)
        taken, self._drained_ns = self._rings.take()
        for name, parts in taken.items():
            self._drained[name] += parts
        for launched in taken["launches"]:
            self._overhead.count_waits(launched, launches.is_sync(launched))

    def _relieve(self, now: float) -> None:
        """Reads the rings while the loop does not turn: called by the watchdog's thread, and waits for nothing."""
        if self._rings is not None:
            self._rings.relieve(now)
        self._stacks.relieve(now)

    def _take(self, name: str, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        parts, self._drained[name] = self._drained[name], []
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    def _work(self, now: float, *, final: bool = False) -> None:
        assert self._roster is not None
        self._seen_ns = self._drained_ns
        launched = np.empty(0, records.LAUNCH)
        part = self.bulkheads.part
        if final or self._calls_come or self._gpu.collects or any(self._drained.values()):
            with part("calls"):
                launched = self._work_on_calls(now, final=final)
        with part("GPU times"):
            self._gpu.look(self.jobs, self._roster.candidates(), now)
            products = self._take("math", records.MATH)
            self._gpu.take_math(products)
            self._gpu.work(launched, now, time.monotonic_ns(), final=final)
        if self._kernels.keeps:
            with part("flags"):
                self._take_flags()
        with part("kernels"):
            self._kernels.work(now, time.monotonic_ns(), final=final)

    def _take_flags(self) -> None:
        """Keeps the moments that somebody has flagged."""
        self._flags.look({(job.name, job.run): job for job in self.jobs})
        if self._flags.trouble and self._flags.trouble not in self.notes():
            self._note(self._flags.trouble)
        for job, flag in self._flags.take():
            self.heed([f"asked for: {flag.why}"])
            begin_ns, end_ns = (int(ns) - self.mono_offset_ns for ns in (flag.begin_ns, flag.end_ns))
            self._kernels.flag(job, begin_ns, end_ns, f"asked for: {flag.why}", flag.ranks, asked=True)

    def _work_on_calls(self, now: float, *, final: bool) -> NDArray[np.void]:
        """Turns what the rings brought into rows and steps. Returns the CUDA calls among it."""
        assert self._roster is not None
        control = self._take("control", records.CONTROL)
        cuda = self._take("launches", records.LAUNCH)
        nccl = self._take("collectives", records.COLLECTIVE)
        marks = self._names.complete(self._take("marks", records.MARK))
        self._names.learn(control)
        control = control[collectives.about_communicators(control)]
        callers = {int(pid) for events in (cuda, nccl, control) for pid in np.unique(events["pid"])}
        callers |= self._gpu.callers()
        callers |= set(np.unique(marks["pid"][_TRAINS[marks["call"]]]).tolist())
        launched = cuda
        if self._end_ns is not None:
            cuda, nccl, marks = (self._until_the_end(events) for events in (cuda, nccl, marks))
        self._generations.number(control, nccl)
        if self._roster.adopt_callers(callers - self._roster.by_pid.keys()):
            self._write_ranks()
        known = np.zeros(len(cuda), bool), np.zeros(len(nccl), bool), np.zeros(len(control), bool)
        for job in self._roster.jobs:
            members = {pid: member for pid, (its, member) in self._roster.by_pid.items() if its is job}
            if not members and not final:
                continue
            pids = np.array(sorted(members), np.uint32)
            ranks = np.array([members[int(pid)].rank for pid in pids], np.uint32)
            with self.bulkheads.job(job):
                known[0][:] |= self._take_launches(job, members, cuda, pids, ranks)
                known[1][:] |= self._take_collectives(job, members, nccl, pids, ranks)
                known[2][:] |= self._take_control(job, members, control, pids, ranks)
                self._take_marks(job, members, marks)
                self._steps(job, now, final=final)
        self._probing.work(self.jobs, self._drained_ns)
        self._marks_without_rank += int(np.sum(~np.isin(marks["pid"], list(self._roster.by_pid))))
        self._losses["records_without_rank"] += sum(int(np.sum(~mine)) for mine in known)
        return launched

    def _until_the_end(self, events: NDArray[np.void]) -> NDArray[np.void]:
        """Without calls made while the probes went: some functions had theirs yet, and steps would look otherwise."""
        before = events["ts_ns"] < self._end_ns
        self._calls_after_end += int(np.sum(~before))
        return events[before]

    @staticmethod
    def _select(
        events: NDArray[np.void], pids: NDArray[np.uint32], ranks: NDArray[np.uint32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        """Which events are of these processes, and the ranks of those that are."""
        if not len(pids) or not len(events):
            return np.zeros(len(events), bool), np.empty(0, np.uint32)
        place = np.minimum(np.searchsorted(pids, events["pid"]), len(pids) - 1)
        mine = pids[place] == events["pid"]
        return mine, ranks[place[mine]]

    def _origin(self, job: Job) -> launches.Origin:
        return launches.Origin(job.name, job.run, self.host, self.mono_offset_ns)

    def _take_launches(
        self,
        job: Job,
        members: dict[int, Member],
        cuda: NDArray[np.void],
        pids: NDArray[np.uint32],
        ranks: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        mine, rank = self._select(cuda, pids, ranks)
        if not mine.any():
            return mine
        events = cuda[mine]
        table = launches.to_table(events, self._origin(job), rank, self._names)
        self._writer.append("launches", table)
        kernels = table["kernel"].combine_chunks()
        counts = np.bincount(kernels.indices.to_numpy(), minlength=len(kernels.dictionary))
        for word, count in zip(kernels.dictionary.to_pylist(), counts.tolist(), strict=True):
            if word and count:
                self._kernel_launches[word] += count
        if len(self._kernel_launches) > 2 * KEPT_NAMES:
            self._kernel_launches = Tally(dict(self._kernel_launches.most_common(KEPT_NAMES)))
        launching = launches.is_launch(events)
        self._probing.count("launches", events["ts_ns"][launching])
        outside = launching & ((events["flags"] & records.FLAG_IN_NCCL) == 0)
        waiting = launches.is_sync(events)
        for pid, places in _by_pid(events):
            member, own = members[pid], events[places]
            member.launches += int(np.sum(launching[places]))
            if member.helper:
                continue
            self._probing.take(job, member.rank, own[(own["flags"] & records.FLAG_IN_NCCL) == 0])
            chosen = own[outside[places] & (own["ts_ns"] < self._probing.until_ns("launches"))]
            if len(chosen):
                job.feed(member, np.ascontiguousarray(chosen), None)
            waits = own[waiting[places]]
            if len(waits):
                pair = np.column_stack([waits["ts_ns"].astype(np.int64), waits["duration_ns"]])
                pair = pair[np.argsort(pair[:, 0], kind="stable")]
                before = job.syncs.get(member.rank)
                joined = pair if before is None else np.concatenate([before, pair])
                job.syncs[member.rank] = joined[-KEEP_COLLECTIVES:]
        return mine

    def _take_collectives(
        self,
        job: Job,
        members: dict[int, Member],
        nccl: NDArray[np.void],
        pids: NDArray[np.uint32],
        ranks: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        mine, rank = self._select(nccl, pids, ranks)
        if not mine.any():
            return mine
        events = nccl[mine]
        in_windows = events["ts_ns"] >= self._probing.until_ns("collectives")
        if in_windows.any():
            # Calls of a communicator are numbered as they are seen: those numbers mean nothing now.
            self._count_collectives(job, members, events[in_windows])
            events, rank = events[~in_windows], rank[~in_windows]
            if not len(events):
                return mine
        self._writer.append(
            "collectives",
            collectives.to_table(events, self._origin(job), rank),
        )
        nbytes = collectives.payload_bytes(events)
        for code in np.unique(events["call"]):
            chosen = events["call"] == code
            op = calls.CALLS[int(code)].kind
            if op.startswith("Group"):
                continue
            self._collective_calls[op] += int(np.sum(chosen))
            self._collective_bytes[op] += int(np.sum(nbytes[chosen]))
        together = collectives.is_collective(events)
        of_nccl = collectives.of_nccl(events)
        for pid, places in _by_pid(events):
            member, own = members[pid], events[places]
            member.collectives += int(np.sum(together[places]))
            if member.helper:
                continue
            job.count_traffic(member.rank, own, nbytes[places])
            job.ask_communicators(member, np.unique(own["comm"][of_nccl[places]]).tolist())
            chosen = own[together[places]]
            if not len(chosen):
                continue
            self._probing.take(job, member.rank, chosen)
            chosen = np.ascontiguousarray(chosen[np.argsort(chosen["ts_ns"], kind="stable")])
            job.feed(member, None, chosen)
            before = job.recent.get(member.rank)
            joined = chosen if before is None else np.concatenate([before, chosen])
            job.recent[member.rank] = joined[-KEEP_COLLECTIVES:]
            handles = {(member.rank, comm) for comm in np.unique(chosen["comm"]).tolist()}
            if not handles <= job.handles:
                new = np.isin(chosen["comm"], [comm for _, comm in handles - job.handles])
                told = chosen[new & collectives.tells_count(chosen)]
                job.ask_groups(member, np.unique(told["comm"]).tolist())
                job.handles |= handles
                job.groups_due = min(job.groups_due, time.monotonic() + GROUPS_INTERVAL_S)
        return mine

    def _count_collectives(self, job: Job, members: dict[int, Member], events: NDArray[np.void]) -> None:
        """Counts collectives that are seen in windows. Their rows would have numbers that mean nothing."""
        nbytes = collectives.payload_bytes(events)
        together = collectives.is_collective(events)
        self._probing.count("collectives", events["ts_ns"][together])
        for code in np.unique(events["call"]):
            op = calls.CALLS[int(code)].kind
            if not op.startswith("Group"):
                self._collective_calls[op] += int(np.sum(events["call"] == code))
                self._collective_bytes[op] += int(np.sum(nbytes[events["call"] == code]))
        for pid, member in members.items():
            of_rank = (events["pid"] == pid) & together
            member.collectives += int(np.sum(of_rank))
            if not member.helper and of_rank.any():
                self._probing.take(job, member.rank, events[of_rank])

    def _take_control(
        self,
        job: Job,
        members: dict[int, Member],
        control: NDArray[np.void],
        pids: NDArray[np.uint32],
        ranks: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        mine, rank = self._select(control, pids, ranks)
        if not mine.any():
            return mine
        events = control[mine]
        self._writer.append(
            "communicator_calls",
            collectives.communicator_calls(events, self._origin(job), rank),
        )
        for pid in np.unique(events["pid"]):
            of_pid = events[events["pid"] == pid]
            rank_of_pid = members[int(pid)].rank
            job.keep_control(rank_of_pid, of_pid)
            recent = job.recent.get(rank_of_pid)
            if recent is not None:
                # A communicator made where another one was: what was called there before is not its own.
                for event in of_pid[np.isin(of_pid["call"], _COMM_MADE)]:
                    recent = recent[(recent["comm"] != event["handle"]) | (recent["ts_ns"] > event["ts_ns"])]
                job.recent[rank_of_pid] = recent
        job.groups_due = 0.0
        return mine

    def _probe_math(self) -> None:
        """Probes cuBLAS and attention once GPU times are on, without which it is of no use."""
        assert self._probes is not None
        absent = "math" not in self._probes.probed and "math" not in self._probes.refused
        if absent and self._gpu.wants_math and not self._overhead.gave_up("products"):
            self._probes.attach_optional("math")

    @staticmethod
    def _take_marks(job: Job, members: dict[int, Member], marks: NDArray[np.void]) -> None:
        for pid in np.unique(marks["pid"]).tolist():
            member = members.get(pid)
            if member is None or member.helper:
                continue
            known = job.marks.setdefault(member.rank, Marks())
            known.steps = 0 if job.by_marks is False else job.marked.wanted
            mine = marks[marks["pid"] == pid]
            whole = mine["ts_ns"] < (job.ranges_until or 1 << 62)
            taken = known.take(mine[whole], ends_of_backward=member.target.has(TORCH_PYTHON))
            job.feed_marks(member, taken)
            if not whole.all():
                # Some of the ranges' probes are there for a moment longer than others.
                late = mine[~whole & ~_RANGES[mine["call"]]]
                job.feed_marks(member, known.take(late, ends_of_backward=member.target.has(TORCH_PYTHON)))

    def _steps(self, job: Job, now: float, *, final: bool) -> None:
        if now >= job.groups_due or final:
            now = time.monotonic()
            self._groups(job)
            took_s = time.monotonic() - now
            every_s = SETTLED_GROUPS_INTERVAL_S if _settled(job) else GROUPS_INTERVAL_S
            job.groups_due = now + max(every_s, took_s / GROUPS_SHARE)
        found = job.steps(self._drained_ns - SETTLE_NS, final=final)
        if not len(found):
            return
        if job.phases:
            found = self._phases(job, found)
        self._gpu.take_steps(job, found)
        job.recent_steps.feed(found)
        job.step_ns += int(found["duration_ns"].sum())
        job.step_count += len(found)
        by_rank = {member.rank: member for member in job.ranks()}
        for rank in np.unique(found["rank"]):
            member = by_rank[int(rank)]
            mine = found[found["rank"] == rank]
            member.steps += len(mine)
            member.last_step = int(mine["step"][-1])
            member.last_step_ns = int(mine["duration_ns"][-1])
        self._writer.append(
            "iterations",
            {
                "job": job.name,
                "run": np.full(len(found), job.run, np.uint32),
                "rank": found["rank"].copy(),
                "step": found["step"].copy(),
                "host": self.host,
                "ts": found["ts_ns"].astype(np.int64) + self.mono_offset_ns,
                "duration_ns": found["duration_ns"].copy(),
                "collectives": found["collectives"].copy(),
                "launches": found["launches"].copy(),
                "method": launches.dictionary(found["method"].astype(np.int32), list(METHODS)),
                "confidence": found["confidence"].copy(),
            },
        )

    def _phases(self, job: Job, found: NDArray[np.void]) -> NDArray[np.void]:
        """Stores where the time of these steps went. Returns them with the boundaries that marks told."""
        steps, rows = [], []
        for rank in np.unique(found["rank"]).tolist():
            mine = found[found["rank"] == rank]
            phases = job.phases.get(rank)
            if phases is not None:
                mine = mine if job.by_marks else phases.snap(mine)
                rows.append(phases.split(mine))
                self._gpu.take_segments(job, rank, phases.take_segments())
            steps.append(mine)
        found = np.concatenate(steps)
        parts = np.concatenate([np.empty(0, PHASE), *rows])
        if len(parts):
            for code, phase in enumerate(PHASES):
                job.phase_ns[phase] += int(parts["duration_ns"][parts["phase"] == code].sum())
            job.hidden_ns += int(parts["overlapped_ns"].sum())
            job.recent_steps.feed_phases(parts)
            order = np.lexsort((found["step"], found["rank"]))
            key = found["rank"].astype(np.int64) << 32 | found["step"]
            wanted = parts["rank"].astype(np.int64) << 32 | parts["step"]
            starts = found["ts_ns"][order[np.searchsorted(key[order], wanted)]].astype(np.int64)
            self._writer.append(
                "phases",
                {
                    "job": job.name,
                    "run": np.full(len(parts), job.run, np.uint32),
                    **{name: parts[name].copy() for name in ("rank", "step", "duration_ns", "overlapped_ns", "spans")},
                    "host": self.host,
                    "ts": starts + self.mono_offset_ns,
                    "phase": launches.dictionary(parts["phase"].astype(np.int32), list(PHASES)),
                    "method": launches.dictionary(parts["method"].astype(np.int32), list(PHASE_METHODS)),
                    "confidence": parts["confidence"].copy(),
                },
            )
        return found

    def _groups(self, job: Job) -> None:
        job.forget_old_communicators()
        nothing = np.empty((0, 2), np.int64)
        known = [
            RankCalls(
                rank=rank,
                collectives=recent,
                sync_ts=job.syncs.get(rank, nothing)[:, 0],
                sync_duration=job.syncs.get(rank, nothing)[:, 1],
                control=job.control.get(rank, np.empty(0, records.CONTROL)),
                named=job.named.get(rank, {}),
                told={comm: place for comm, place in job.told.get(rank, {}).items() if place is not None},
            )
            for rank, recent in sorted(job.recent.items())
        ]
        found = keep_alignment(find_groups(known), job.communicators)
        job.tracker.align(found)
        job.marked.align(found)
        same = np.array_equal(found, job.communicators)
        job.communicators = found
        self._mesh(job)
        if same:
            return
        self._writer.append(
            "communicators",
            {
                "job": job.name,
                "run": np.full(len(found), job.run, np.uint32),
                **{name: found[name].copy() for name in ("rank", "comm", "comm_group", "comm_rank", "nranks")},
                "seq_offset": found["seq_offset"].copy(),
                "joined_by": found["joined_by"].tolist(),
                "error": found["error"].tolist(),
                "version": np.full(len(found), self._next_version(), np.uint64),
            },
        )

    def _mesh(self, job: Job) -> None:
        before = job.mesh
        if not job.find_mesh():
            return
        guesses = superseded(before, job.mesh)
        mesh = [*job.mesh, *guesses]
        self._writer.append(
            "parallel_groups",
            {
                "job": job.name,
                "run": np.full(len(mesh), job.run, np.uint32),
                "host": self.host,
                "comm_group": np.array([group.id for group in mesh], np.uint64),
                "dimension": [group.dimension for group in mesh],
                "ranks": [list(group.ranks) for group in mesh],
                "nranks": np.array([group.size for group in mesh], np.int32),
                "confidence": np.array([group.confidence for group in mesh], np.float32),
                "why": [group.why for group in mesh],
                "version": self._next_version(),
                "superseded": np.repeat(np.array([0, 1], np.uint8), [len(job.mesh), len(guesses)]),
            },
        )

    def steps_go(self) -> list[str]:
        """Where the jobs' steps go, by phase: of the CPU's time and of the GPUs', a line each."""
        lines = []
        for job in self.jobs:
            for what, spent in (("steps", job.phase_ns), ("steps of the GPUs", job.gpu_phase_ns)):
                total = sum(spent.values())
                parts = [f"{phase.replace('_', ' ')} {ns / total:.1%}" for phase, ns in spent.most_common() if ns]
                behind = job.hidden_ns if what == "steps" else 0
                if parts:
                    hidden = f"; communication behind them {behind / total:.1%}" if behind else ""
                    lines.append(f"where {what} go: {', '.join(parts)}{hidden}")
        return lines

    def utilization(self) -> list[str]:
        """Model FLOPs utilisation of the jobs, where it was given what that takes; a line a job."""
        step_flops, peak_flops = self._flops
        lines = []
        for job in self.jobs:
            if counted := job.counted.describe(peak_flops):
                lines.append(counted)
            if not (step_flops and peak_flops and job.step_ns and job.step_count):
                continue
            ranks = max(max((m.target.identity.world_size for m in job.ranks()), default=0), len(job.ranks()))
            lines.append(utilization(step_flops, peak_flops, ranks, job.step_ns / job.step_count))
        return lines

    def mesh(self) -> list[str]:
        """What the jobs' communicators are for, in lines for people."""
        return [line for job in self.jobs for line in describe(job.mesh)]

    # ---- end

    def stop(self) -> dict[str, int]:
        """Takes the probes away, stores what is left, and returns the loss counters that are not 0."""
        assert self._probes is not None
        assert self._roster is not None
        self._watchdog.expect(math.inf)
        # Whatever fails from here on, the rest is done: above all the last counters, without which nobody knows what
        # the rows are worth.
        part = self.bulkheads.part
        with part("stacks"):
            if self._loading is not None:
                self._loading.result()
                self._begin_stacks(time.monotonic())
        with part("overhead"):
            self._govern(final=True)
        with part("GPU times"):
            self._gpu.begin_stop()
        with part("processes"):
            self._roster.family.close()
        self._end_ns = time.monotonic_ns()
        with part("coverage"):
            self._write_signals(self._end_ns, over="the trace has ended")
        with part("probes"):
            self._probes.detach()
        with part("stacks"):
            self._stacks.stop()
        with part("GPU times"):
            self._stop_gpu()
        with part("processes"):
            self._roster.look(time.monotonic())
        with part("the rings"):
            unfinished = self._probes.in_progress()
            self._calls_in_progress = sum(map(len, unfinished))
            self._drain()
            for name, events in zip(("launches", "collectives", "control"), unfinished, strict=True):
                if len(events):
                    self._drained[name].append(events)
        with part("the last rows"):
            self._work(time.monotonic(), final=True)
        # Storing what is left may take long, and calls of that time are not a job's silence.
        self._seen_ns = self._end_ns
        with part("the last rows"):
            self._write_ranks()
        for job in self.jobs:
            with self.bulkheads.job(job):
                self._write_job(job, ended=True)
        with part("coverage"):
            self._write_coverage()
        with part("host usage"):
            self._write_host_usage()
        with part("the store"):
            self._close_store()
        lost = self.lost()
        for name, let_go in (
            ("overhead", self._overhead.close),
            ("flags", self._flags.close),
            ("GPU times", self._gpu.close),
            ("the watchdog", self._watchdog.close),
            ("the rings", self._close_rings),
            ("probes", self._probes.close),
            ("processes", self._roster.close),
            ("the store", self._store.close),
        ):
            with part(name):
                let_go()
        self._probes = None
        demangler.shared.close()
        self._leave_reader()
        return lost

    def _close_store(self) -> None:
        """Stores what is left, and says what could not be."""
        report = self._writer.close()
        for table, rows in report.dropped.items():
            self._losses[f"rows_dropped_{table}"] = rows
        if report.dropped:
            self.store_error = report.last_error or "the store was away for too long"
        elif report.on_disk:
            self.store_error = (
                f"{sum(report.on_disk.values()):,} rows wait in {self._writer.spilled_to} for the store:"
                f" {report.last_error or 'it was away'}. `argus store load` stores them, as does the next trace"
            )

    def _stop_gpu(self) -> None:
        """Waits until CUPTI is off everywhere and its last records are here."""
        deadline = time.monotonic() + GPU_STOP_S
        while not self._gpu.stopped and (now := time.monotonic()) < deadline:
            self._gpu.poll(now)
            time.sleep(0.01)

    def give_up(self, timeout_s: float) -> str:
        """Brings rows that are not stored to disk, for the case that the process ends at once: any thread may call it.

        Args:
            timeout_s: How long that may take. What is not on disk then is lost.

        Returns:
            What has become of them, for people.
        """
        on_disk, lost = self._writer.give_up(timeout_s)
        parts = []
        if on_disk:
            parts.append(
                f"{on_disk:,} rows wait in {self._writer.spilled_to}: the next trace, or"
                " `argus store load`, stores them"
            )
        if lost:
            parts.append(f"{lost:,} rows are lost")
        return "argus: given up: " + ("; ".join(parts) or "nothing that was recorded is lost")

    def abort(self) -> None:
        """Lets go of everything at once, storing nothing more."""
        self._watchdog.close()
        self._overhead.close()
        self._flags.close()
        self._gpu.close()
        self._stacks.close()
        if self._roster is not None:
            self._roster.close()
        if self._probes is not None:
            self._close_rings()
            self._probes.close()
            self._probes = None
        self._leave_reader()

    def _enter_reader(self) -> None:
        self._reads = True
        reader.shared.enter()

    def _leave_reader(self) -> None:
        reads, self._reads = self._reads, False
        if reads:
            reader.shared.leave()

    def _close_rings(self) -> None:
        if self._rings is not None:
            self._rings.close()

    # ---- what was seen and lost

    def counters(self) -> dict[str, tuple[int, bool]]:
        """Every counter of the session: value, and whether a value above 0 is a loss."""
        assert self._probes is not None
        assert self._roster is not None
        family = self._roster.family
        found = {c.name.lower(): (value, c in LOSS_COUNTERS) for c, value in self._probes.counters().items()}
        for name, ring in self._probes.rings().items():
            found[f"{name}_ring_discarded"] = (ring.discarded, True)
        for side in (self._gpu, self._kernels, self._stacks, self._overhead):
            with self.bulkheads.part("counters"):
                found |= side.counters()
        found |= {name: (value, True) for name, value in self.bulkheads.counters.items()}
        found["loop_stalls"] = (self._watchdog.stalls, False)
        found["records_read_meanwhile"] = (0 if self._rings is None else self._rings.relieved, False)
        found["relief_failed"] = (self._watchdog.failures, True)
        found |= {name: (value, True) for name, value in reader.shared.counters.items() if name != "reader_restarts"}
        found["reader_restarts"] = (reader.shared.counters["reader_restarts"], False)
        found["clock_jumps"] = (self._clock_jumps, False)
        found["files_released"] = (self._roster.files_released, False)
        found["names_given_up"] = (demangler.shared.given_up, False)
        found["names_shortened"] = (demangler.shared.shortened, False)
        found["launch_probes_detached"] = (self._launches_detached, True)
        found["waits_not_followed"] = (self._waits_not_followed, True)
        # Where they are away, steps have no phases, and may have been found less surely.
        found["range_probes_detached"] = (self._ranges_detached, True)
        found["nvtx_probes_detached"] = (self._nvtx_detached, True)
        found["collective_probes_detached"] = (self._collectives_detached, True)
        found["call_probes_detached"] = (self._calls_detached, True)
        found["math_probes_detached"] = (self._products_not_probed, True)
        found["marks_without_rank"] = (self._marks_without_rank, False)
        found["calls_in_progress"] = (self._calls_in_progress, False)
        found["calls_after_end"] = (self._calls_after_end, False)
        found["kernels_without_name"] = (self._names.unresolved, False)
        found["kernel_names_cut"] = (self._names.cut, False)
        found["communicators_not_aligned"] = (
            sum(int(np.sum(job.communicators["error"] != "")) for job in self.jobs),
            False,
        )
        found["communicators_forgotten"] = (sum(job.forgotten for job in self.jobs), False)
        found["mark_names_unread"] = (self._names.unread, False)
        found["calls_before_follow"] = (family.missed_calls, True)
        found["fork_events_missed"] = (family.missed_events, True)
        found["follow_failed"] = (family.failures + (family.state != "on"), True)
        for subject in self._probes.refused:
            found[f"{subject}_not_probed"] = (1, True)
        for job in self.jobs:
            told = [job.tracker.counters, job.marked.counters]
            told += [job.thinned.counters] if job.thinned is not None else []
            told += [phases.counters for phases in job.phases.values()]
            told += [marks.counters for marks in job.marks.values()]
            for name, value in sum(told, Tally()).items():
                found[name] = (found.get(name, (0, False))[0] + value, False)
        for name, value in (self._losses + self._roster.losses).items():
            found[name] = (value, True)
        found |= self._writer.counters()
        found["processes_ignored"] = (sum(bool(m.ignored) for job in self.jobs for m in job.members.values()), True)
        return found

    def _counted(self) -> dict[str, tuple[int, bool]]:
        """The same, whatever fails: then what there is all the same, of which one tells that the rest is missing."""
        found: dict[str, tuple[int, bool]] = {}
        with self.bulkheads.part("counters"):
            found = self.counters()
        return found or {name: (value, True) for name, value in self.bulkheads.counters.items()}

    def lost(self) -> dict[str, int]:
        """The loss counters that are not 0. Coverage is complete if there is none."""
        return {name: value for name, (value, loss) in self._counted().items() if loss and value}

    def view(self) -> View:
        """The session as people see it now; rates since the previous call."""
        assert self._probes is not None
        assert self._roster is not None
        now, cpu = time.monotonic(), self._cpu_s()
        before, cpu_before, counts_before = self._view_before
        span = max(now - before, 1e-3)
        gpu, stacks = self._gpu.views(), self._stacks.view()
        timed_of = {each.pid: each for each in gpu}
        ranks, counts = [], {}
        for job in self.jobs:
            late = lateness_ms(job.recent, job.communicators)
            for pid, member in job.members.items():
                if member.helper:
                    continue
                counts[pid] = (member.launches, member.collectives)
                old = counts_before.get(pid, counts[pid])
                step_ms = job.recent_steps.typical_ms(member.rank) or member.last_step_ns / 1e6
                timed = timed_of.get(pid)
                parts, by = parts_of_gpu(timed) if timed is not None else {}, "GPU"
                if not parts:
                    parts, by = job.recent_steps.parts(member.rank), "phases"
                if not parts and pid in stacks.main:
                    parts, by = parts_of_thread(*stacks.main[pid]), "stacks"
                ranks.append(
                    RankView(
                        job.name,
                        member.rank,
                        pid,
                        member.state,
                        (member.launches - old[0]) / span,
                        (member.collectives - old[1]) / span,
                        member.steps,
                        member.last_step,
                        step_ms,
                        job.run,
                        late.get(member.rank),
                        own_ms(step_ms, parts, by),
                        parts,
                        by if parts else "",
                    )
                )
        self._view_before = (now, cpu, counts)
        ring = self._probes.launches
        return View(
            monotonic_ns=time.monotonic_ns(),
            elapsed_s=(time.monotonic_ns() - self.started_ns) / 1e9,
            ranks=sorted(ranks, key=lambda rank: (rank.job, rank.rank)),
            kernels=self._kernel_launches.most_common(8),
            gpu=gpu,
            gpu_kernels=self._gpu.top_kernels(8),
            gpu_kernel_ns=self._gpu.kernel_ns,
            stacks=stacks,
            collectives=[(op, self._collective_calls[op], size) for op, size in self._collective_bytes.most_common(6)],
            launches=sum(count[0] for count in counts.values()),
            collective_calls=sum(count[1] for count in counts.values()),
            lost=self.lost(),
            waiting_bytes=self._writer.bytes_waiting,
            store_error=self._writer.trouble,
            cpu_share=(cpu - cpu_before) / span,
            ring_fill=ring.most_used_bytes / ring.size_bytes,
            notes=list(self._roster.notes),
            steps_go=self.steps_go(),
            overhead=self._overhead.share,
            jobs=[self._job_view(job) for job in self.jobs if job.ranks()],
        )

    @staticmethod
    def _job_view(job: Job) -> JobView:
        members = job.ranks()
        return JobView(
            job.name,
            job.run,
            len(members),
            max(member.target.identity.world_size for member in members),
            members[0].target.identity.launcher,
            max(member.last_step for member in members),
            job.recent_steps.times_ms(),
            job.recent_steps.newest_ns,
            sum(member.launches + member.collectives for member in members),
            any(member.state == "traced" for member in members),
        )

    def _cpu_s(self) -> float:
        """CPU time of Argus so far, s: its own and that of the embedded engine and of readers."""
        times = os.times()
        # The engine may be replaced by another, whose time begins at 0.
        self._engine_cpu_s = max(self._engine_cpu_s, self._store.engine_cpu_s())
        return times.user + times.system + self._engine_cpu_s + reader.shared.cpu_s()

    # ---- rows about the session itself

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    def _write_job(self, job: Job, *, ended: bool = False) -> None:
        members = job.ranks()
        if not members:
            return
        self._written_jobs.add((job.name, job.run))
        self._writer.append(
            "jobs",
            {
                "job": job.name,
                "run": job.run,
                "host": self.host,
                "started": np.array([self.started_ns + self._first_offset_ns], np.int64),
                "ended": np.array([self._now_ns()], np.int64) if ended else [None],
                "world_size": max(member.target.identity.world_size for member in members),
                "launcher": members[0].target.identity.launcher,
                "mono_offset_ns": self.mono_offset_ns,
                "argus_version": __version__,
                "wall_error_ns": self._wall_error_ns,
                "step_flops": self._flops[0],
                "peak_flops": self._flops[1],
                "version": self._next_version(),
            },
        )

    def _now_ns(self) -> int:
        """Wall time on the session's own clock: an adjustment of the system's reaches it within ``CLOCK_S``."""
        return time.monotonic_ns() + self.mono_offset_ns

    def _write_ranks(self) -> None:
        for job in self.jobs:
            if job.over_since and self._end_ns is None:
                continue  # nothing of it changes any more
            if (job.name, job.run) not in self._written_jobs:
                self._write_job(job)
            members = list(job.members.values())
            if not members:
                continue
            self._writer.append(
                "ranks",
                {
                    "job": job.name,
                    "run": job.run,
                    "rank": np.array([m.rank for m in members], np.uint32),
                    "host": self.host,
                    "pid": np.array([m.target.pid for m in members], np.uint32),
                    "local_rank": np.array([m.target.identity.local_rank for m in members], np.int32),
                    "rank_source": [m.rank_source for m in members],
                    "started": np.array([int(m.target.started_unix * 1e9) for m in members], np.int64),
                    "uid": np.array([m.target.identity.uid for m in members], np.int64),
                    "container": [m.target.identity.container for m in members],
                    "exe": [_storable(m.target.exe) for m in members],
                    "command": [_storable(redact.more(m.target.command, self.options.redact)) for m in members],
                    "libraries": [[library.shown_path for library in m.target.libraries] for m in members],
                    "probes": np.array([m.probes for m in members], np.uint32),
                    "state": [m.state for m in members],
                    "version": self._next_version(),
                },
            )

    def _write_signals(self, since_ns: int | None = None, over: str = "") -> None:
        """Stores which signals are observed, where that has changed.

        Args:
            since_ns: When it changed, CLOCK_MONOTONIC; None: now.
            over: Why nothing is observed any more; empty: it is.
        """
        states: dict[Rank, dict[str, Seen]] = {}
        of_gpu = self._gpu.seen()
        for job in self.jobs:
            for member in job.ranks():
                key = job.name, job.run, member.rank
                if over or member.state != "traced":
                    states |= self._signals.end([key], over or "the process has ended")
                else:
                    states[key] = self._seen_of(member, of_gpu)
        now_ns = time.monotonic_ns() if since_ns is None else since_ns
        rows = self._signals.update(states, now_ns + self.mono_offset_ns, self.host, self._next_version())
        if len(rows["rank"]):
            self._writer.append("signal_coverage", rows)

    def _seen_of(self, member: Member, of_gpu: Mapping[int, tuple[float, str]]) -> dict[str, Seen]:
        """What is observed of a rank now, by signal: those that its process has a source of. ``of_gpu``: GPU times, as
        ``GpuSide.seen`` has them."""
        assert self._roster is not None
        assert self._probes is not None
        found: dict[str, Seen] = {}
        attached = self._roster.attachments_of(member)
        for signal, subjects in _SIGNALS.items():
            if member.ignored and any(each.seen(subject) is not None for each in attached for subject in subjects):
                found[signal] = Seen(0.0, 0, member.ignored)
                continue
            probed = [seen for each in attached for subject in subjects if (seen := each.seen(subject)) is not None]
            if probed and (windows := self._probing.seen(subjects)) is not None:
                found[signal] = windows
            elif probed:
                refused = next((self._refused[subject] for subject in subjects if subject in self._refused), "")
                found[signal] = Seen() if all(probed) else Seen(0.0, 0, refused or self._overhead.why_not(signal))
        if self._stacks.on:
            found["stacks"] = Seen() if self._stacks.rate_hz else Seen(0.0, 0, self._stacks.state)
            follows = self._stacks.follows_waits
            found["off_cpu"] = Seen() if follows else Seen(0.0, 0, "threads are not followed off the CPU")
        if member.target.on_gpu:
            share, reason = of_gpu.get(member.target.pid, NOT_BEGUN)
            found["gpu_times"] = Seen(share, 0, reason)
        return found

    def _write_not_started(self) -> None:
        """What of the probes did not start, as features of each rank."""
        assert self._roster is not None
        self._follow_state = self._roster.family.state
        parts = {subject: ("failed", why) for subject, why in self._refused.items()}
        if self._follow_state != "on":
            state, _, why = self._follow_state.partition(": ")
            parts["fork events"] = (state, why)
        if not parts:
            return
        for job in self.jobs:
            for member in job.ranks():
                if (job.name, job.run, member.rank) in self._parts_written:
                    continue
                self._parts_written.add((job.name, job.run, member.rank))
                self._writer.append(
                    "features",
                    {
                        "job": job.name,
                        "run": job.run,
                        "rank": np.full(len(parts), member.rank, np.uint32),
                        "host": self.host,
                        "feature": list(parts),
                        "state": [state for state, _ in parts.values()],
                        "reason": [why for _, why in parts.values()],
                        "version": self._next_version(),
                    },
                )

    def _write_host_usage(self) -> None:
        """Stores who used the node's CPUs since the last time, for each job that runs."""
        used = self._host_cpu.read(member.target.pid for member in self.live())
        if used is None:
            return
        columns = {name: value for name, value in vars(used).items() if name != "begin_ns"}
        for job in self.jobs:
            if not job.over_since:
                ts = np.full(1, used.begin_ns + self.mono_offset_ns, np.int64)
                self._writer.append(
                    "host_usage", {"job": job.name, "run": job.run, "host": self.host, "ts": ts, **columns}
                )

    def _look_at_losses(self) -> None:
        """What the kernel side refused to each process that is there."""
        assert self._probes is not None
        assert self._roster is not None
        for pid, (_, member) in self._roster.by_pid.items():
            member.refused = max(self._probes.spent(pid)[1], member.refused)
            member.over_share = max(self._stacks.over_share(pid), member.over_share)

    def _write_coverage(self, jobs: Sequence[Job] | None = None) -> None:
        """Stores the session's counters with these jobs; None: with those that run, and at the end with all."""
        with self.bulkheads.part("coverage"):
            self._write_not_started()
        found = self._counted()
        if jobs is None:
            begun = time.monotonic() - OVER_S
            jobs = [job for job in self.jobs if not 0 < job.over_since < begun or self._end_ns is not None]
        with self.bulkheads.part("coverage"):
            self._look_at_losses()
        of_all = found
        for job in jobs:
            found = of_all | self._of_members(job)
            self._writer.append(
                "coverage",
                {
                    "job": job.name,
                    "run": job.run,
                    "host": self.host,
                    "counter": list(found),
                    "value": np.array([value for value, _ in found.values()], np.uint64),
                    "loss": np.array([loss for _, loss in found.values()], bool),
                    "ts": np.full(len(found), (self._seen_ns or time.monotonic_ns()) + self.mono_offset_ns, np.int64),
                    "version": self._next_version(),
                },
            )


def _by_pid(events: NDArray[np.void]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The places of each process's events, in their order: what each costs does not grow with the others'."""
    order = np.argsort(events["pid"], kind="stable")
    pids, starts = np.unique(events["pid"][order], return_index=True)
    yield from zip(pids.tolist(), np.split(order, starts[1:]), strict=True)


def _storable(text: str) -> str:
    """Text that is valid UTF-8, whatever bytes it came from."""
    return os.fsencode(text).decode(errors="backslashreplace")


def _choose(options: Options) -> list[int]:
    """The processes that ``all_gpu`` and ``name`` mean now."""
    if options.name is None or options.all_gpu:
        return find_gpu_processes(options.name)
    return find_named_processes(options.name, roots=options.children)


def _none_found(options: Options) -> ArgusError:
    kind = "process that maps libcuda" if options.all_gpu else "process"
    what = f" whose command line contains '{options.name}'" if options.name is not None else ""
    hidden = hidden_processes() if options.all_gpu and os.geteuid() != 0 else 0
    processes = "1 process" if hidden == 1 else f"{hidden} processes"
    hint = f"{processes} may not be looked at: run Argus with sudo" if hidden else ""
    return ArgusError(f"no {kind}{what} is running", hint or "`argus trace` alone lists what could be traced",
                      EXIT_UNAVAILABLE)  # fmt: skip


def _open_launcher(pid: int) -> Target:
    """A process whose children are followed: it need not use the GPU itself."""
    target = inspect(pid)
    with contextlib.suppress(OSError):
        target.libraries = find_libraries(pid)
    if not same_process(pid, target.start_ticks):
        raise ArgusError(f"process {pid} ended while Argus looked at it", "", EXIT_UNAVAILABLE)
    return target


def _settled(job: Job) -> bool:
    """Whether every communicator seen is lined up, on enough calls to stay so."""
    known = {(int(row["rank"]), int(row["comm"])) for row in job.communicators if not row["error"]}
    calls_seen = min((len(recent) for recent in job.recent.values()), default=0)
    return len(job.recent) == len(job.ranks()) and calls_seen >= SETTLED_CALLS and job.handles <= known


def mono_offset_ns() -> int:
    """Wall time minus CLOCK_MONOTONIC, ns: of 32 readings, the one taken in the shortest time."""
    best = (1 << 62, 0)
    for _ in range(32):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        best = min(best, (after - before, wall - (before + after) // 2))
    return best[1]
