"""The GPU side of a live trace: CUPTI in every rank's process, its records matched with their launches, as rows.

``Tracer`` tells who is traced (``look``), lets what was recorded be fetched (``poll``, before it reads the rings, so
that the probe's record of a call is there when CUPTI's is) and turned into rows (``work``).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from argus import records
from argus.bulkhead import Bulkheads
from argus.capture import gpu_rows
from argus.capture.launches import Origin, is_launch
from argus.capture.targets import PROC, Target, mapped_pages, maps_cuda
from argus.cupti.arm import helper_address
from argus.cupti.collector import Collector, CollectorState, CuptiOptions
from argus.cupti.decode import Batch
from argus.cupti.inject import inject
from argus.errors import ArgusError
from argus.kernels import KernelSide
from argus.roster import YOUNG_S, Job, Member
from argus.semantics.correlation import KEEP_PROBED, Correlator
from argus.semantics.gpu import USAGE, GpuSteps, GpuUsage
from argus.semantics.gpu_flops import GpuFlops
from argus.semantics.gpu_phases import GPU_METHODS, GPU_OPS, GPU_PHASES, Calls, communicates, kinds_of, what_of
from argus.store.writer import Writer

AGAIN_SHARE = 1 / 20
"""Of its age: how soon a candidate is looked at again."""
AGAIN_S = 1.0
"""Before a process that runs another program now is looked at anew."""
CHANGE_NS = 2_000_000_000
"""After it is collected otherwise: the helper looks now and then, and what was launched before it did has no times."""
LINGER_S = 3.0
"""How long after its end a process's last records are waited for."""
SETTLE_S = 2.0
"""How long "not armed" may be only the first look's answer."""
RECENT_WINDOWS = 5
"""Seconds that the live view averages over."""
UNARMED_S = 0.5
"""How often a process without the helper is looked at: whether it has ended."""
KEPT_BATCHES = 64
"""Buffers of a process that is no rank yet: it becomes one with the first of them, or never."""
MAX_DEVICES = 64
"""GPUs of a node: four times as many as the largest has. A process that claims others makes them up."""
KEPT_NAMES = 4096
"""Kernels that the live view knows of, at least; a program that makes kernels all the time has any number."""
NOT_BEGUN = 0.0, "GPU times have not begun"
"""As ``GpuSide.seen`` tells it."""
NO_GPU = "the process has loaded no CUDA library"
NOT_ARMED = "the process is not armed: start it with `argus run -- …`, or see `argus arm`"

COUNTERS = (
    "gpu_ops",
    "gpu_launch_matched",
    "gpu_launch_unmatched",
    "gpu_launch_probed",
    "gpu_start_clamped",
    "gpu_started_before_launch_returned",
)
"""What ``Correlator`` counts; none is a loss."""


@dataclass(frozen=True)
class GpuView:
    """A rank's GPUs as the live view shows them.

    Attributes:
        state: ``CollectorState`` in a word.
        text: The same with its reason.
        busy, idle, exposed, overlapped: Shares of the last seconds: something ran, nothing ran, only NCCL ran, NCCL and
            other kernels ran. None: not known.
        idle_gaps: Idle stretches a second; None: not known.
        queue_depth: Operations launched and not begun, on average; None: not known.
        match_rate: Share of the operations whose launch is known; None: not known.
        ended_ns: Monotonic time at which these seconds end; 0: there are none.
    """

    job: str
    rank: int
    pid: int
    state: str
    text: str
    busy: float | None = None
    idle: float | None = None
    exposed: float | None = None
    overlapped: float | None = None
    idle_gaps: float | None = None
    queue_depth: float | None = None
    match_rate: float | None = None
    ended_ns: int = 0


class _Program:
    """CUPTI in one program: a process has several when it execs."""

    def __init__(self, pid: int, options: CuptiOptions) -> None:
        self.collector = Collector(pid, options)
        self.correlator = Correlator(api=options.api, host_tids=lambda: host_tids(pid))
        self.names = gpu_rows.Names(pid)
        self.batches: list[Batch] = []
        self._kinds = np.zeros(0, np.uint8)

    def poll(self, now: float) -> None:
        self.batches += self.collector.poll(now)

    def take(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """What has come since the last call: operations, and records of the CPU side."""
        batches, self.batches = self.batches, []
        self.names.learn(self.collector.names)
        return (
            np.concatenate([np.empty(0, records.GPU_OP), *(batch.gpu for batch in batches)]),
            np.concatenate([np.empty(0, records.HOST_OP), *(batch.host for batch in batches)]),
        )

    def kinds(self, ops: NDArray[np.void], words: NDArray[np.int32]) -> NDArray[np.uint8]:
        """What operations are, ``semantics.gpu_phases.What``. ``words``: their names."""
        fresh = [what_of(word) for word in self.names.words[len(self._kinds) :]]
        self._kinds = np.concatenate([self._kinds, np.array(fresh, np.uint8)])
        return kinds_of(ops, self._kinds[words])


@dataclass
class _Process:
    """A process, from when it was first seen until its last record is stored."""

    target: Target
    since: float
    job: Job | None = None
    member: Member | None = None
    program: _Program | None = None
    usage: GpuUsage = field(default_factory=GpuUsage)
    steps: GpuSteps = field(default_factory=GpuSteps)
    flops: GpuFlops = field(default_factory=GpuFlops)
    windows: deque[NDArray[np.void]] = field(default_factory=lambda: deque(maxlen=4 * RECENT_WINDOWS))
    injection: Future[str] | None = None
    failure: str = ""
    was_on: bool = False
    kernels: int = 0
    unanswered: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Times of launches, since GPU times are on, after the newest one of which an operation is known: the newest
    ``KEEP_PROBED``, as many as an operation can still be matched with."""
    written: tuple[str, str] = ("", "")
    again_at: float = 0.0
    ended_at: float = 0.0
    over: bool = False
    due: float = 0.0
    """When there may be something to fetch, ``time.monotonic()``."""
    last: tuple[str, str] | None = None
    """State and reason once it is over."""

    @property
    def state(self) -> tuple[str, str]:
        """State and reason, for people."""
        if self.last is not None:
            return self.last
        if self.failure:
            return "failed", self.failure
        if self.program is None:
            return "waiting", "the helper is being put into the process"
        collector = self.program.collector
        state, reason = str(collector.state), collector.reason
        return state, reason

    @property
    def may_have(self) -> bool:
        """Whether operations may have come, or may yet: a program without the helper has none."""
        return self.program is not None and (self.was_on or self.program.collector.armed)

    def let_go(self) -> None:
        """Keeps of a process that is over only what is told of it."""
        self.last = self.state
        self.program = self.injection = None
        self.usage, self.steps, self.flops = GpuUsage(), GpuSteps(), GpuFlops()
        self.unanswered = self.unanswered[:0].copy()


class GpuSide:
    """CUPTI in the processes of a session.

    Args:
        writer: Where rows go.
        mode: "auto" wakes processes that are armed, "inject" arms them first, "off" leaves all alone.
        options: How to collect.
        origin: What a job's rows say besides the records themselves.
        version: Gives the next row version.
        note: Told what users may want to know.
        not_armed: Why a process may be without the helper; empty: nobody gave it one.
        expected: Every process was given the helper.
        kernels: Takes the operations.
        waited: Told of processes that had waited for CUPTI before their first CUDA call.
        bulkheads: Count what fails.
    """

    def __init__(
        self,
        writer: Writer,
        mode: str,
        options: CuptiOptions,
        origin: Callable[[Job], Origin],
        version: Callable[[], int],
        note: Callable[[str], None],
        kernels: KernelSide,
        waited: Callable[[int], None] = lambda pid: None,
        not_armed: str = "",
        expected: bool = False,
        bulkheads: Bulkheads | None = None,
    ) -> None:
        self._bulkheads = bulkheads or Bulkheads()
        self._writer = writer
        self._mode = mode
        self._options = options
        self._origin = origin
        self._version = version
        self._note = note
        self._waited = waited
        self._kernel_side = kernels
        self._not_armed = not_armed or NOT_ARMED
        self._expected = expected
        self._processes: list[_Process] = []
        self._counted: dict[str, tuple[int, bool]] = {}
        self._late = 0
        self._dropped = self._guessed = self._products_unknown = 0
        self._without_rank = self._of_no_device = 0
        self._unanswered = 0
        self._missed = self._failed = 0
        self._asked: dict[tuple[int, int], tuple[float, float, bytes]] = {}
        """Of each candidate: when it was looked at first, when it is again, and how much it had mapped."""
        self._kernels: Tally[str] = Tally()
        self._kernel_ns: Tally[str] = Tally()
        self._all_ns = 0
        self._regimes: deque[tuple[int, CuptiOptions]] = deque([(0, options)], maxlen=16)
        """Since when, CLOCK_MONOTONIC, it was collected how."""
        self._stopping = False
        self._injector: ThreadPoolExecutor | None = None

    # ---- who

    def may_time(self, pid: int) -> bool:
        """Whether GPU times of a process may come."""
        if self._mode != "auto" or self._expected:
            return self._mode != "off"
        try:
            return helper_address(pid) is not None
        except OSError:  # it has ended, or may not be looked at
            return False

    def look(self, jobs: Iterable[Job], candidates: Iterable[Target], now: float) -> None:
        """Takes note of who is traced.

        Args:
            jobs: Their ranks get CUPTI.
            candidates: Processes that may become ranks: those that are armed get CUPTI, since the first of their
                operations may come before their first traced call.
            now: ``time.monotonic()``.
        """
        known = {_key(process.target): process for process in self._processes if not process.over}
        for job in jobs:
            for member in job.ranks():
                process = known.get(_key(member.target))
                if process is None and not self._stopping and member.state == "traced" and not self._seen(member):
                    process = self._add(_Process(member.target, now))
                if process is not None and process.member is None:
                    process.job, process.member = job, member
                    process.steps.phases.transfers = job.transfers
                    process.steps.phases.calls = job.calls.setdefault(member.rank, Calls())
        candidates = list(candidates) if self._mode == "auto" and not self._stopping else []
        if candidates:
            self._asked = {key: self._asked[key] for key in map(_key, candidates) if key in self._asked}
        for target in candidates:
            key = _key(target)
            first, due, mapped = self._asked.get(key, (now, now, b""))
            if key in known or now < due:
                continue
            pages = mapped_now(target.pid)
            again_s = min((now - first) * AGAIN_SHARE, AGAIN_S) if now < first + YOUNG_S else AGAIN_S
            self._asked[key] = first, now + again_s, pages
            if (pages != mapped or not pages) and Collector.find(target.pid) is not None:
                self._add(_Process(target, now))

    def _seen(self, member: Member) -> bool:
        return any(process.member is member for process in self._processes)

    def _add(self, process: _Process) -> _Process:
        self._processes.append(process)
        if self._mode == "auto":
            process.program = _Program(process.target.pid, self._options)
        return process

    def callers(self) -> set[int]:
        """Processes that are no ranks yet and of which operations have come."""
        return {
            process.target.pid
            for process in self._processes
            if process.member is None and process.program is not None
            if any(len(batch.gpu) for batch in process.program.batches)
        }

    @property
    def share(self) -> float:
        """Share of the time for which GPU times are recorded."""
        return self._options.share

    def seen(self) -> dict[int, tuple[float, str]]:
        """For what share of the time each process's GPU times are recorded now, and why it is not 1. Those for which
        that has not begun are left out (``NOT_BEGUN``)."""
        found = {}
        for process in self._processes:
            if not process.over:
                state, reason = self._state(process)
                found[process.target.pid] = (self._options.share if state == "on" else 0.0), reason
        return found

    def set_share(self, share: float, now_ns: int) -> None:
        """Records for this share of the time from now on.

        Args:
            share: ``CuptiOptions.share``.
            now_ns: CLOCK_MONOTONIC.
        """
        self._options = replace(self._options, share=share)
        self._regimes.append((now_ns, self._options))
        for process in self._processes:
            process.unanswered, process.due = process.unanswered[:0], 0.0
            if process.program is not None:
                process.program.collector.set_share(share)

    def _records_whole(self, start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As ``CuptiOptions.records_whole``, by how it was collected then. Where that changed nothing is whole."""
        whole = np.zeros(len(start_ns), bool)
        _, *ends = (begin for begin, _ in (*self._regimes, (1 << 62, self._options)))
        for (begin, options), end in zip(self._regimes, ends, strict=True):
            inside = (start_ns >= begin + CHANGE_NS * (begin > 0)) & (start_ns + duration_ns <= end)
            whole |= inside & options.records_whole(start_ns, duration_ns)
        return whole

    # ---- what

    def take_steps(self, job: Job, steps: NDArray[np.void]) -> None:
        """Takes a job's steps: rows of ``semantics.steps.ITERATION``."""
        # A rank's first steps may come with the calls that it became a rank by.
        self.look([job], (), time.monotonic())
        for process in self._processes:
            if process.job is job and process.member is not None and not process.over and process.may_have:
                process.steps.feed_steps(steps[steps["rank"] == process.member.rank])

    def take_segments(self, job: Job, rank: int, segments: NDArray[np.void]) -> None:
        """Takes what a rank's training thread did: ``semantics.phases.SEGMENT``."""
        self.look([job], (), time.monotonic())
        for process in self._processes:
            if process.job is not job or process.member is None or not process.may_have:
                continue
            if process.member.rank == rank and not process.over:
                process.steps.phases.feed_timeline(segments)

    @property
    def wants_math(self) -> bool:
        """Whether it helps to know what is multiplied: kernels are timed, and matched with their launches."""
        return self._options.api and any(process.was_on and not process.over for process in self._processes)

    def take_math(self, found: NDArray[np.void]) -> None:
        """Takes calls of cuBLAS: ``records.MATH`` of all processes."""
        for process in self._processes if len(found) else ():
            if process.was_on and process.member is not None and not process.over:
                process.flops.feed_calls(found[found["pid"] == process.target.pid])

    @property
    def collects(self) -> bool:
        """Whether records of a process may come."""
        return any(process.program is not None and not process.over for process in self._processes)

    def poll(self, now: float) -> None:
        """Fetches what was recorded. Call it before the rings are read."""
        for process in self._processes:
            if not process.over and now >= process.due:
                with self._guard(process):
                    self._fetch(process, now)
                    program = process.program
                    process.due = min(program.collector.due, now + UNARMED_S) if program is not None else 0.0

    def _guard(self, process: _Process) -> AbstractContextManager[None]:
        """What fails for a process costs that process."""
        return self._bulkheads.process(
            process.target.pid,
            "GPU times",
            lambda: self._quarantine(process),
            process.job,
            lambda _: process.target.identity.uid,
        )

    def _quarantine(self, process: _Process) -> None:
        """Reads nothing of a process any more."""
        process.failure = "what its memory holds could not be read"
        program, process.program = process.program, None
        if program is not None:
            self._count(program)
            program.collector.close()

    def _fetch(self, process: _Process, now: float) -> None:
        if process.member is not None and process.member.state != "traced" and not process.ended_at:
            process.ended_at = now
        if process.program is None:
            if self._mode == "inject":
                self._inject(process, now)
            return
        process.program.poll(now)
        collector = process.program.collector
        process.was_on |= collector.state is CollectorState.ON or collector.records > 0
        if collector.from_the_start:
            self._waited(process.target.pid)
        if process.ended_at and now > process.ended_at + LINGER_S and not collector.stopped:
            collector.close()

    def _inject(self, process: _Process, now: float) -> None:
        if process.failure or self._stopping:
            return
        if process.injection is None:
            if now < process.again_at:
                return
            process.again_at = now + AGAIN_S
            if maps_cuda(process.target.pid):
                if self._injector is None:
                    self._injector = ThreadPoolExecutor(1, thread_name_prefix="argus-inject")
                process.injection = self._injector.submit(inject, process.target.pid)
            return
        if not process.injection.done():
            return
        try:
            how = process.injection.result()
        except (ArgusError, OSError) as failure:
            process.failure = str(failure)
            self._note(f"GPU times: {process.failure}")
            return
        self._note(f"process {process.target.pid}: {how}")
        process.program = _Program(process.target.pid, self._options)

    def work(self, cuda: NDArray[np.void], now: float, now_ns: int, *, final: bool = False) -> None:
        """Turns what was fetched into rows.

        Args:
            cuda: ``records.LAUNCH`` of all processes, as the rings had them since the last call.
            now: ``time.monotonic()``.
            now_ns: The same in nanoseconds.
            final: Nothing more will come.
        """
        for process in self._processes:
            if not process.over:
                with self._guard(process):
                    self._work_on(process, cuda, now, now_ns, final=final)
        self._processes = [each for each in self._processes if not each.over or each.member is not None]

    def _work_on(self, process: _Process, cuda: NDArray[np.void], now: float, now_ns: int, *, final: bool) -> None:
        program = process.program
        if program is not None and process.member is not None:
            gone = program.collector.stopped
            if not (process.may_have or gone or final):
                self._write_state(process)
                return
            launches = cuda[cuda["pid"] == process.target.pid]
            self._take(process, program, launches[np.argsort(launches["ts_ns"], kind="stable")], now_ns)
            if gone or final:
                self._hand_over(process, program, program.correlator.flush())
            if final or (gone and process.ended_at):
                self._end(process)
            elif gone and not self._stopping:
                self._begin_again(process, now)
        elif final or (program is None and process.ended_at and now > process.ended_at + LINGER_S):
            self._end(process)
        elif program is not None and len(program.batches) > KEPT_BATCHES:
            early, program.batches = program.batches[:-KEPT_BATCHES], program.batches[-KEPT_BATCHES:]
            self._without_rank += sum(len(batch.gpu) for batch in early)
        elif program is not None and program.collector.stopped:
            # It was never a rank, and may still become one by what the rings hold.
            process.ended_at = process.ended_at or now
            if now > process.ended_at + LINGER_S:
                self._end(process)
        self._write_state(process)
        if process.over:
            process.let_go()

    def forget(self, job: Job) -> None:
        """Drops what is left of a job that is over."""
        self._failed += _failures([each for each in self._processes if each.over and each.job is job])
        self._processes = [each for each in self._processes if not each.over or each.job is not job]

    def _take(self, process: _Process, program: _Program, launches: NDArray[np.void], now_ns: int) -> None:
        assert process.member is not None
        assert process.job is not None
        gpu, host = program.take()
        real = gpu["device"] < MAX_DEVICES
        if not real.all():
            self._of_no_device += int(np.sum(~real))
            gpu = gpu[real]
        if process.was_on and self._options.api and self._options.share == 1:
            # While another profiler has CUPTI, or it failed, nothing answers, for hours maybe: the state says so.
            away = program.collector.state in (CollectorState.IGNORED, CollectorState.FAILED)
            kept = 0 if away else KEEP_PROBED
            asked = np.append(process.unanswered, launches["ts_ns"][is_launch(launches)])
            process.unanswered = asked[max(len(asked) - kept, 0) :]
        self._hand_over(process, program, program.correlator.feed(gpu, host, launches, now_ns))
        events = host[gpu_rows.is_event(host)]
        if len(events):
            events["tid"] = program.correlator.on_host(events["tid"])
            self._writer.append(
                "gpu_host_events",
                gpu_rows.gpu_host_events(
                    events, self._origin(process.job), process.member.rank, process.target.pid, program.names, now_ns
                ),
            )

    def _hand_over(self, process: _Process, program: _Program, ops: NDArray[np.void], *, final: bool = False) -> None:
        """Operations that are ready, to their table and into the windows."""
        assert process.member is not None
        assert process.job is not None
        origin, rank, pid = self._origin(process.job), process.member.rank, process.target.pid
        if len(ops):
            words = program.names.of(ops["name"])
            kernel = ops["kind"] == records.GpuKind.KERNEL
            kinds = program.kinds(ops, words)
            self._kernel_side.feed(process.job, rank, pid, program.names, ops, communicates(kinds))
            process.usage.feed(ops, communicates(kinds))
            process.steps.feed(ops, communicates(kinds), kinds)
            if self._options.api:
                own = ~communicates(kinds)
                process.flops.feed(ops[own], words[own], program.names.words)
            duration = (ops["end_ns"] - ops["start_ns"])[kernel].astype(np.float64)
            count, total = np.bincount(words[kernel]), np.bincount(words[kernel], duration)
            for word in np.flatnonzero(count).tolist():
                name = program.names.words[word]
                self._kernels[name] += int(count[word])
                self._kernel_ns[name] += int(total[word])
            self._all_ns += int(duration.sum())
            if len(self._kernel_ns) > 2 * KEPT_NAMES:
                self._kernel_ns = Tally(dict(self._kernel_ns.most_common(KEPT_NAMES)))
                self._kernels = Tally({name: self._kernels[name] for name in self._kernel_ns})
            process.kernels += int(np.sum(kernel))
            probed = ops["launch_ns"][(ops["flags"] & records.GPU_LAUNCH_PROBED) != 0]
            if len(probed):
                process.unanswered = process.unanswered[process.unanswered > probed.max()]
        windows = process.usage.advance(final=final)
        windows = windows[self._records_whole(windows["start_ns"], windows["duration_ns"])]
        if len(windows):
            process.windows.append(windows)
            self._writer.append("gpu_usage", gpu_rows.gpu_usage(windows, origin, rank, pid))
        steps = process.steps.advance(final=final)
        steps = steps[self._records_whole(steps["start_ns"], steps["duration_ns"])]
        over = process.steps.take_over()
        begin, end, _ = np.array(over, np.int64).reshape(-1, 3).T
        whole = self._records_whole(begin, end - begin).tolist()
        whole_steps = list(itertools.compress(over, whole))
        self._kernel_side.settle(process.job, pid, whole_steps, final=final)
        process.flops.settle(whole_steps)
        rows, counted = process.flops.take(final=final)
        process.job.counted.add(counted)
        if rows:
            rows |= {"job": origin.job, "run": origin.run, "rank": rank, "host": origin.host, "pid": pid}
            self._writer.append("kernel_flops", rows | {"ts": rows["ts"] + origin.mono_offset_ns})
        if len(steps):
            self._writer.append("gpu_steps", gpu_rows.gpu_steps(steps, origin, rank, pid))
        phases = process.steps.take_phases()
        phases = phases[np.isin(phases["step"], steps["step"])]
        if len(phases):
            self._writer.append("gpu_phases", gpu_rows.gpu_phases(phases, origin, rank, pid, GPU_PHASES, GPU_METHODS))
            for code in np.unique(phases["phase"]).tolist():
                spent = int(phases["duration_ns"][phases["phase"] == code].sum())
                process.job.gpu_phase_ns[GPU_PHASES[code]] += spent

        talked = process.steps.take_collectives()
        talked = talked[np.isin(talked["step"], steps["step"])]
        if len(talked):
            self._writer.append("gpu_collectives", gpu_rows.gpu_collectives(talked, origin, rank, pid, GPU_OPS))

    def _end(self, process: _Process) -> None:
        """Stores the last windows and lets go."""
        process.over = True
        self._late += process.usage.late
        self._dropped += process.steps.dropped
        self._guessed += process.steps.phases.guessed
        self._products_unknown += process.flops.products.unknown
        if process.program is None:
            if process.job is not None:
                self._kernel_side.settle(process.job, process.target.pid, [], final=True)
            return
        if process.ended_at:
            self._unanswered += len(process.unanswered)
        collector = process.program.collector
        armed = collector.armed or self._expected
        if armed and not process.was_on and process.member is not None and process.member.launches:
            self._missed += collector.state is CollectorState.OFF or collector.state is CollectorState.WAITING
        if process.member is None:
            self._without_rank += sum(len(batch.gpu) for batch in process.program.batches)
        else:
            self._hand_over(process, process.program, np.empty(0, records.GPU_OP), final=True)
        self._count(process.program)
        process.program.collector.close()

    def _begin_again(self, process: _Process, now: float) -> None:
        """The program that was observed is no more, and its process lives: it runs another one."""
        if not process.again_at:
            process.again_at = now + AGAIN_S
        elif now >= process.again_at:
            assert process.program is not None
            process.again_at = 0.0
            self._unanswered += len(process.unanswered)
            process.unanswered = process.unanswered[:0]
            self._count(process.program)
            process.program = None if self._mode == "inject" else _Program(process.target.pid, self._options)
            process.injection = None

    # ---- the end

    def begin_stop(self) -> None:
        """Switches CUPTI off everywhere. ``poll`` until ``stopped``."""
        self._stopping = True
        for process in self._processes:
            process.due = 0.0
            if process.injection is not None:
                with contextlib.suppress(ArgusError, OSError):
                    if not process.injection.cancel():
                        process.injection.result()  # half a helper is worse than some seconds' wait
            if process.program is not None and not process.over:
                process.program.collector.begin_stop()

    @property
    def stopped(self) -> bool:
        """Whether nothing more will come."""
        return all(
            process.over or process.program is None or process.program.collector.stopped for process in self._processes
        )

    def close(self) -> None:
        """Lets go of every process. The helpers notice, and switch CUPTI off."""
        self._stopping = True
        for process in self._processes:
            if process.program is not None:
                process.program.collector.close()
        if self._injector is not None:
            self._injector.shutdown(wait=False, cancel_futures=True)

    # ---- what is known of it

    def _write_state(self, process: _Process) -> None:
        state, reason = self._state(process)
        if state == "off" and process.was_on and (self._stopping or process.ended_at):
            state = "on"  # it was; the trace is over
        if process.member is None or process.job is None or (state, reason) == process.written:
            return
        process.written = state, reason
        origin = self._origin(process.job)
        self._writer.append(
            "features",
            {
                "job": origin.job,
                "run": origin.run,
                "rank": process.member.rank,
                "host": origin.host,
                "feature": "gpu_times",
                "state": [state],
                "reason": [reason],
                "version": self._version(),
            },
        )

    def _state(self, process: _Process) -> tuple[str, str]:
        if self._mode == "off":
            return "off", "switched off with --cupti off"
        state, reason = process.state
        if state == "waiting" and reason == "the process is not armed":
            if not process.target.on_gpu:
                return "off", NO_GPU
            return "off", self._not_armed
        if state == "on" and not reason and self._options.share < 1:
            return state, f"{self._options.share:.0%} of the time"
        return state, reason

    def _count(self, program: _Program) -> None:
        """Keeps what a program that is no more has counted."""
        self._counted = _sum(self._counted, program)

    def counters(self) -> dict[str, tuple[int, bool]]:
        """Every counter of the GPU side: value, and whether a value above 0 is a loss."""
        if self._mode == "off":
            return {}
        found = dict.fromkeys(COUNTERS, (0, False)) | self._counted
        late, dropped = self._late, self._dropped
        for process in self._processes:
            if process.over:
                continue
            late += process.usage.late
            dropped += process.steps.dropped
            if process.program is not None:
                found = _sum(found, process.program)
        found["gpu_ops_late"] = (late, False)
        found["gpu_ops_without_step"] = (dropped, False)
        live = (process.steps.phases.guessed for process in self._processes if not process.over)
        found["gpu_collectives_guessed"] = (self._guessed + sum(live), False)
        unknown = (process.flops.products.unknown for process in self._processes if not process.over)
        found["math_calls_unknown"] = (self._products_unknown + sum(unknown), False)
        found["gpu_ops_without_rank"] = (self._without_rank, True)
        found["gpu_ops_of_no_device"] = (self._of_no_device, True)
        found["gpu_launches_unanswered"] = (self._unanswered, True)
        found["gpu_processes_missed"] = (self._missed, True)
        found["gpu_times_failed"] = (self._failed + _failures(self._processes), True)
        found["gpu_share_percent"] = (round(100 * self._options.share), False)
        return found

    def top_kernels(self, count: int) -> list[tuple[str, int, int]]:
        """The kernels that took most time on the GPUs: name, calls, nanoseconds."""
        return [(name, self._kernels[name], total) for name, total in self._kernel_ns.most_common(count)]

    @property
    def kernel_ns(self) -> int:
        """Time of all kernels on the GPUs; two that ran at once count twice."""
        return self._all_ns

    def views(self) -> list[GpuView]:
        """Every rank's GPUs."""
        found = []
        for process in self._processes:
            if process.member is None or process.job is None:
                continue
            state, reason = self._state(process)
            text = f"{state}: {reason}" if reason else state
            row = (process.job.name, process.member.rank, process.target.pid, state, text)
            windows = np.concatenate([np.empty(0, USAGE), *process.windows])
            if len(windows):
                ended_ns = int((windows["start_ns"] + windows["duration_ns"]).max())
                windows = windows[windows["start_ns"] >= ended_ns - RECENT_WINDOWS * 10**9]
            whole = float(windows["duration_ns"].sum())
            if not whole:
                found.append(GpuView(*row))
                continue

            def share(name: str, windows: NDArray[np.void] = windows, whole: float = whole) -> float:
                return float(windows[name].sum()) / whole

            deep = windows[windows["queue_depth_mean"] >= 0]
            rate = process.program.correlator.match_rate if process.program is not None else -1.0
            found.append(
                GpuView(
                    *row,
                    busy=share("busy_ns"),
                    idle=share("idle_ns"),
                    exposed=share("exposed_communication_ns"),
                    overlapped=share("overlapped_communication_ns"),
                    idle_gaps=share("idle_gaps") * 1e9,
                    queue_depth=float(np.average(deep["queue_depth_mean"], weights=deep["duration_ns"]))
                    if len(deep)
                    else None,
                    match_rate=rate if rate >= 0 and self._options.api else None,
                    ended_ns=ended_ns,
                )
            )
        return sorted(found, key=lambda view: (view.job, view.rank))

    def known(self, now: float) -> bool:
        """Whether every rank's state is more than a first impression."""
        ranks = [process for process in self._processes if process.member is not None]
        return bool(ranks) and all(
            self._mode == "off"
            or self._state(process)[0] in ("on", "ignored", "failed")
            or (self._state(process)[0] == "off" and now > process.since + SETTLE_S)
            for process in ranks
        )

    def summary(self, *, done: bool = False) -> list[str]:
        """The state of GPU times, in lines for people.

        Args:
            done: The session is over: with what was recorded.
        """
        ranks = [process for process in self._processes if process.member is not None]
        if not ranks:
            return []
        lines = []
        on = [process for process in ranks if (process.was_on if done else process.state[0] == "on")]
        if on:
            text = f"GPU times: on ({_ranks(on)})"
            if done:
                counted = self.counters()
                text += f", {sum(process.kernels for process in ranks):,} kernels"
                total, matched = counted["gpu_ops"][0], counted["gpu_launch_matched"][0]
                if total and self._options.api:
                    # Never rounded up to all.
                    text += f", {int(1e4 * matched / total) / 100:.2f} % matched with their launch"
            lines.append(text)
        reasons: dict[str, list[_Process]] = {}
        for process in ranks:
            state, reason = self._state(process)
            if process in on and (not done or state == "on" or reason in ("", "the process ended")):
                continue
            reasons.setdefault(f"{state}: {reason}" if reason else state, []).append(process)
        for text, processes in reasons.items():
            everywhere = len(processes) == len(ranks) and not on
            lines.append(f"GPU times: {text}" if everywhere else f"GPU times of {_ranks(processes, True)}: {text}")
        return lines


def _failures(processes: Iterable[_Process]) -> int:
    """Ranks whose GPU times failed, or are another profiler's."""
    away = (CollectorState.FAILED, CollectorState.IGNORED)
    return sum(process.member is not None and process.state[0] in away for process in processes)


def _key(target: Target) -> tuple[int, int]:
    return target.pid, target.start_ticks


def _ranks(processes: list[_Process], named: bool = False) -> str:
    numbers = sorted({process.member.rank for process in processes if process.member is not None})
    if not named:
        return "1 rank" if len(numbers) == 1 else f"{len(numbers)} ranks"
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _sum(found: dict[str, tuple[int, bool]], program: _Program) -> dict[str, tuple[int, bool]]:
    """Counters with those of a program added; of times that are no sums, the longest."""
    out = dict(found)
    more = {name: (value, False) for name, value in program.correlator.counters.items()}
    for name, (value, loss) in {**program.collector.counters(), **more}.items():
        before, lost = out.get(name, (0, False))
        out[name] = (before + value, loss or lost)
    return out


def mapped_now(pid: int) -> bytes:
    """``targets.mapped_pages``; empty: the process has ended."""
    try:
        return mapped_pages(pid)
    except OSError:
        return b""


def host_tids(pid: int) -> dict[int, int]:
    """Threads of a process as its own PID namespace numbers them → as the host does. Empty: there is no difference."""
    found = {}
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError, ValueError, StopIteration):
                lines = (task / "status").read_text(errors="replace").splitlines()
                inside = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
                found[int(inside)] = int(task.name)
    return {} if all(inside == host for inside, host in found.items()) else found
