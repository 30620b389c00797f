"""The GPU side of a live trace: CUPTI in every rank's process, its records matched with their launches, as rows.

A side (``argus.live.side``): what CUPTI recorded is fetched before the rings are read, so that the probe's record of a
call is there when CUPTI's is.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.targets import Target
from argus.cupti.arm import helper_address
from argus.cupti.collector import Collector, CollectorState
from argus.cupti.decode import Batch
from argus.live.cost.governor import Part, Rung
from argus.live.cost.turns import Turns
from argus.live.coverage import Seen
from argus.live.gpu.describe import GpuView, describe, failures, view_of
from argus.live.gpu.duty_cycle import DutyCycles
from argus.live.gpu.injection import Injector
from argus.live.gpu.process import LINGER_S, CuptiProgram, GpuProcess, key_of, mapped_now
from argus.live.gpu.room import over_room
from argus.live.gpu.rows import GpuRows
from argus.live.job import Job, Member
from argus.live.roster import YOUNG_S
from argus.live.session import Session
from argus.live.side import Counters, Side
from argus.live.sides.by_job import ByProcess
from argus.live.sides.kernel_rows import KernelSide
from argus.model import records
from argus.model.losses import UNKNOWN, Losses, Owner, Whom
from argus.semantics.phases.gpu import Calls

AGAIN_SHARE = 1 / 20
"""Of its age: how soon a candidate is checked again."""
AGAIN_S = 1.0
"""Before a process that runs another program now is read anew."""
HANGS_S = 120.0
"""The loop may hang for so long before the helpers are left to switch CUPTI off."""
STOP_S = 5.0
"""How long the helpers may take to answer that CUPTI is off."""
SETTLE_S = 2.0
"""How long "not armed" may be only the first answer."""
OWNERS_S = 0.25
"""How often it is looked whose processes have records: of 500 that takes a millisecond."""
UNARMED_S = 2.0
"""How often a process without the helper is checked: whether it has ended."""
OF_LOOP, SAVED_S = 0.5, 0.25
"""Share of the loop's time for GPU records of several owners, and what an owner that made few has saved: half a million
records at once."""
KEPT_BATCHES = 64
"""Buffers of a process that is no rank yet: it becomes one with the first of them, or never."""
NOT_BEGUN = 0.0, "GPU times have not begun"
"""As ``GpuSide.shares`` has it."""
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


_OF_PROCESSES = (
    "gpu_ops_without_rank",
    "gpu_ops_of_no_device",
    "gpu_ops_over_share",
    "gpu_steps_late",
    "gpu_launches_unanswered",
    "gpu_processes_missed",
)
"""Losses that are counted as they come, in ``Session.losses``."""


class GpuSide(Side):
    """CUPTI in the processes of a session.

    Args:
        session: The trace. Of its options: ``cupti`` ("auto" wakes processes that are armed, "inject" arms them first,
            "off" leaves all alone), ``cupti_options``, ``not_armed``, ``all_armed``.
        kernels: Gets the operations.
    """

    name = "GPU times"
    parts = (Part.GPU,)

    def __init__(self, session: Session, kernels: KernelSide) -> None:
        options = session.options
        self._session = session
        self._mode = options.cupti
        self._api = options.cupti_options.api
        self._duties = DutyCycles(options.cupti_options)
        self._kernel_side = kernels
        self._rows = GpuRows(session, kernels, self._duties)
        self._not_armed, self._expected = options.not_armed or NOT_ARMED, options.all_armed
        self._launched = np.empty(0, records.LAUNCH)
        """Calls of this turn (``feed_calls``)."""
        self._products = np.empty(0, records.MATH)
        """Of cuBLAS, of this turn (``feed_products``)."""
        self._processes: list[GpuProcess] = []
        self._counted: dict[str, tuple[int, bool]] = {}
        self._late = self._dropped = self._guessed = self._products_unknown = self._failed = 0
        self._lost = Losses(any_container=session.options.job is not None)
        """Of programs that are no more."""
        self._loss_names: list[str] = []
        """What ``counters`` had of losses when it was called last: of a job without them each is 0."""
        self._checked: dict[tuple[int, int], tuple[float, float, bytes]] = {}
        """Of each candidate: when it was checked first, when it is again, and how much it had mapped."""
        self._stopping = False
        self._injector = Injector(session.note)
        self._turns = Turns(OF_LOOP, SAVED_S)
        self._owners, self._owners_due = set[Owner](), 0.0
        self._polled = 0.0

    # ---- who

    def may_time(self, pid: int) -> bool:
        """Whether GPU times of a process may come."""
        if self._mode != "auto" or self._expected:
            return self._mode != "off"
        try:
            return helper_address(pid) is not None
        except OSError:  # it has ended, or may not be read
            return False

    def look_quickly(self, now: float) -> None:
        """Takes note of who is traced. Candidates that are armed get CUPTI, too, since the first of their operations
        may come before their first traced call."""
        self._look(self._session.jobs, self._session.roster.candidates(), now)

    def _look(self, jobs: Iterable[Job], candidates: Iterable[Target], now: float) -> None:
        by_key = {process.key: process for process in self._processes if not process.over}
        members = {id(process.member) for process in self._processes}  # jobs keep those that have ended for hours
        for job in jobs:
            for member in job.ranks():
                process = by_key.get(key_of(member.target))
                if process is None and id(member) not in members and not self._stopping and member.state == "traced":
                    process = self._add(GpuProcess(member.target, now))
                if process is not None and process.member is None:
                    process.job, process.member = job, member
                    members.add(id(member))
                    process.steps.phases.transfers = job.transfers
                    process.steps.phases.calls = job.calls.setdefault(member.rank, Calls())
        candidates = list(candidates) if self._mode == "auto" and not self._stopping else []
        if candidates:
            self._checked = {key: self._checked[key] for key in map(key_of, candidates) if key in self._checked}
        for target in candidates:
            key = key_of(target)
            first, due, mapped = self._checked.get(key, (now, now, b""))
            if key in by_key or now < due:
                continue
            pages = mapped_now(target.pid)
            again_s = min((now - first) * AGAIN_SHARE, AGAIN_S) if now < first + YOUNG_S else AGAIN_S
            self._checked[key] = first, now + again_s, pages
            if (pages != mapped or not pages) and Collector.find(target.pid) is not None:
                self._add(GpuProcess(target, now))

    def _add(self, process: GpuProcess) -> GpuProcess:
        self._processes.append(process)
        if self._mode == "auto":
            process.program = self._program_of(process)
        return process

    def _program_of(self, process: GpuProcess) -> CuptiProgram:
        return CuptiProgram(process.target.pid, self._duties.of(process.owner).options, self._session, process.owner)

    def callers(self) -> set[int]:
        """Processes that are no ranks yet and of which operations have come."""
        return {process.target.pid for process in self._processes if process.early}

    def observed(self, members: Sequence[Member]) -> dict[int, dict[str, Seen]]:
        """Whether GPU times are recorded, of processes that have loaded CUDA."""
        shares = self.shares()
        return {
            member.target.pid: {"gpu_times": Seen(share, 0, reason)}
            for member in members
            if member.target.on_gpu
            for share, reason in (shares.get(member.target.pid, NOT_BEGUN),)
        }

    def shares(self) -> dict[int, tuple[float, str]]:
        """For what share of the time each process's GPU times are recorded now, and why it is not 1. Those for which
        that has not begun are left out (``NOT_BEGUN``)."""
        shares = {}
        for process in self._processes:
            if not process.over:
                state, reason = self._state(process)
                share = self._duties.of(process.owner).share if state == "on" else 0.0
                shares[process.target.pid] = share, reason
        return shares

    def reducible(self, owner: Owner) -> set[Rung]:
        """Rungs that would make a difference now."""
        collects = any(each.owner == owner and each.collects for each in self._processes)
        return self._duties.of(owner).reducible() if collects else set()

    def spent_by_owner(self) -> dict[Part, dict[Owner, int]]:
        """Operations of each owner's GPUs, evenly over a period: each costs as much."""
        operations, of, now_ns = Tally[Owner](), self._duties.of, time.monotonic_ns
        for process in self._processes:
            if process.program is not None:
                operations[process.owner] += process.program.correlator.counters["gpu_ops"]
        return {Part.GPU: {owner: of(owner).evened(count, now_ns()) for owner, count in operations.items()}}

    def reduce(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """Records for a quarter of the time, or for a tenth."""
        self.set_share(self._duties.of(owner).reduce(rung), time.monotonic_ns(), owner)

    def restore(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """Takes that back."""
        self.set_share(self._duties.of(owner).restore(rung), time.monotonic_ns(), owner)

    def set_share(self, share: float, now_ns: int, owner: Owner) -> None:
        """Records an owner's GPU times for this share of the time (``CuptiOptions.share``) from CLOCK_MONOTONIC on."""
        self._duties.of(owner).set_share(share, now_ns)
        for process in [each for each in self._processes if each.owner == owner]:
            process.unanswered, process.due = process.unanswered[:0], 0.0
            if process.program is not None:
                process.program.collector.set_share(share)

    # ---- what

    def feed_steps(self, job: Job, steps: NDArray[np.void]) -> None:
        """Gets a job's steps: rows of ``semantics.steps.by_calls.ITERATION``."""
        # A rank's first steps may come with the calls that it became a rank by.
        self._look([job], (), time.monotonic())
        for process in self._processes:
            if process.job is job and process.member is not None and not process.over and process.may_have:
                process.steps.feed_steps(steps[steps["rank"] == process.member.rank])
        self._rows.count_late(job, steps, self._processes)

    def feed_segments(self, job: Job, rank: int, segments: NDArray[np.void]) -> None:
        """Gets what a rank's training thread did: ``semantics.phases.cpu.SEGMENT``."""
        self._look([job], (), time.monotonic())
        for process in self._processes:
            if process.job is not job or process.member is None or not process.may_have:
                continue
            if process.member.rank == rank and not process.over:
                process.steps.phases.feed_timeline(segments)

    @property
    def wants_math(self) -> bool:
        """Whether it helps to know what is multiplied: kernels are timed, and matched with their launches."""
        return self._api and any(process.was_on and not process.over for process in self._processes)

    def feed_calls(self, launched: NDArray[np.void]) -> None:
        """Gets the CUDA calls of a turn: ``records.LAUNCH`` of all processes, as the rings had them."""
        self._launched = launched

    def feed_products(self, products: NDArray[np.void]) -> None:
        """Gets calls of cuBLAS of a turn: ``records.MATH`` of all processes."""
        self._products = products

    def _feed_products(self) -> None:
        products, self._products = ByProcess(self._products), self._products[:0]
        for process in self._processes if len(products) else ():
            if process.was_on and process.member is not None and not process.over:
                process.flops.feed_calls(products.of(process.target.pid))

    @property
    def collects(self) -> bool:
        """Whether records of a process may come."""
        return any(process.collects for process in self._processes)

    def poll(self, now: float, slack_s: float = 0.0) -> None:
        """Fetches what was recorded, by owners whose turn it is."""
        self._polled = now
        if now >= self._owners_due:
            self._owners, self._owners_due = {each.owner for each in self._processes if each.timed}, now + OWNERS_S
        self._turns.fill(self._owners, now)
        for process in self._processes:
            if not process.over and now >= process.due:
                with self._guard(process), self._turns.spending(process.owner):
                    self._fetch(process, now)
                    program = process.program
                    process.due = min(program.collector.due, now + UNARMED_S) if program is not None else 0.0

    def _guard(self, process: GpuProcess) -> AbstractContextManager[None]:
        """What fails for a process costs that process."""
        return self._session.bulkheads.process(
            process.target.pid,
            "GPU times",
            lambda: self._quarantine(process),
            process.job,
            lambda _: process.owner,
        )

    def _quarantine(self, process: GpuProcess) -> None:
        """Reads nothing of a process any more."""
        process.failure = "what its memory holds could not be read"
        program, process.program = process.program, None
        if program is not None:
            self._count(process, program)
            program.collector.close()
        self._tally(process)
        process.drop_records()

    def _fetch(self, process: GpuProcess, now: float) -> None:
        if process.member is not None and process.member.state != "traced" and not process.ended_at:
            process.ended_at = now
        if process.program is None:
            if self._mode == "inject" and not self._stopping and self._injector.poll(process, now):
                process.program = self._program_of(process)
            return
        collector = process.program.collector
        collector.takes = self._turns.may(process.owner)
        process.program.poll(now)
        process.was_on |= collector.state is CollectorState.ON or collector.records > 0
        if collector.from_the_start:
            self._session.waited(process.target.pid)
        if process.ended_at and now > process.ended_at + LINGER_S and not collector.stopped:
            collector.abandon()

    def work(self, now: float, *, final: bool = False) -> None:
        """Turns what was fetched into rows, with the calls that ``feed_calls`` brought."""
        launched, self._launched = self._launched, self._launched[:0]
        self.look_quickly(now)  # ranks that the calls of this turn made ranks have their products, too
        self._feed_products()
        self.work_at(launched, now, time.monotonic_ns(), final=final)

    def work_at(self, cuda: NDArray[np.void], now: float, now_ns: int, *, final: bool = False) -> None:
        """The same at a given time.

        Args:
            cuda: ``records.LAUNCH`` of all processes, as the rings had them since the last call.
            now: ``time.monotonic()``.
            now_ns: The same in nanoseconds.
            final: Nothing more will come.
        """
        launches = ByProcess(cuda)
        for process in sorted(self._processes, key=lambda process: process.put_off_at):
            if not process.over:
                with self._guard(process), self._turns.spending(process.owner):
                    self._work_on(process, launches, now, now_ns, final=final)
        for process, most in over_room(self._processes):
            with self._guard(process), self._turns.spending(process.owner):
                self._rows.keep(process, most)
        self._processes = [each for each in self._processes if not each.over or each.member is not None]

    def _work_on(self, process: GpuProcess, launches: ByProcess, now: float, now_ns: int, *, final: bool) -> None:
        program = process.program
        if program is not None and process.member is not None:
            gone = program.collector.stopped
            if not (process.may_have or gone or final):
                self._write_state(process)
                return
            in_order = launches.by_time(process.target.pid)
            if not (final or self._turns.may(process.owner)):
                self._rows.put_off(process, program, in_order, now, now_ns)
                return
            self._rows.write_fetched(process, program, in_order, now_ns)
            if gone or final:
                self._rows.write_ready(process, program, program.correlator.flush())
            if final or (gone and process.ended_at and process.has_last_steps(now)):
                self._end(process)
            elif gone and not process.ended_at and not self._stopping:
                self._begin_again(process, now)
        elif final or (program is None and process.ended_at and now > process.ended_at + LINGER_S):
            self._end(process)
        elif program is not None and len(program.batches) > KEPT_BATCHES:
            early, program.batches = program.batches[:-KEPT_BATCHES], program.batches[-KEPT_BATCHES:]
            self._count_without_rank(process, early)
        elif program is not None and program.collector.stopped:
            process.ended_at = process.ended_at or now
            if now > process.ended_at + LINGER_S:
                self._end(process)
        self._write_state(process)
        if process.over:
            process.drop_records()

    def end_job(self, job: Job) -> None:
        """Ends and drops what is left of a job that is over: its owner may have had no time for that."""
        for process in [each for each in self._processes if each.job is job and each.has_ended and not each.over]:
            with self._guard(process):
                self._rows.leave_out(process)
                self._end(process)
                process.drop_records()

    def forget(self, job: Job) -> None:
        """Forgets its processes."""
        self._failed += failures([each for each in self._processes if each.over and each.job is job])
        self._processes = [each for each in self._processes if not each.over or each.job is not job]
        self._duties.forget({each.owner for each in self._processes})

    def _end(self, process: GpuProcess) -> None:
        """Stores the last windows and lets go."""
        process.over = True
        self._tally(process)
        if process.program is None:
            if process.job is not None:
                self._kernel_side.settle(process.job, process.target.pid, [], final=True)
            return
        if process.ended_at:
            self._session.losses.count("gpu_launches_unanswered", _whom(process), number=len(process.unanswered))
        collector = process.program.collector
        armed = collector.armed or self._expected
        called = armed and not process.was_on and process.member is not None and process.member.launches > 0
        if called and collector.state in (CollectorState.OFF, CollectorState.WAITING):
            self._session.losses.count("gpu_processes_missed", _whom(process))
        if process.member is None:
            self._count_without_rank(process, process.program.batches)
        else:
            self._rows.write_ready(process, process.program, np.empty(0, records.GPU_OP), final=True)
        self._count(process, process.program)
        process.program.collector.close()

    def _begin_again(self, process: GpuProcess, now: float) -> None:
        """The program that was observed is no more, and its process lives: it runs another one."""
        if not process.again_at:
            process.again_at = now + AGAIN_S
        elif now >= process.again_at:
            assert process.program is not None
            process.again_at = 0.0
            self._session.losses.count("gpu_launches_unanswered", _whom(process), number=len(process.unanswered))
            process.unanswered = process.unanswered[:0]
            self._count(process, process.program)
            process.program = None if self._mode == "inject" else self._program_of(process)
            process.injection = None

    # ---- the end

    def begin_stop(self) -> None:
        """Switches CUPTI off everywhere. ``poll`` until ``stopped``."""
        self._stopping = True
        self._injector.end()
        for process in self._processes:
            process.due = 0.0
            if process.program is not None and not process.over:
                process.program.collector.begin_stop()
        self._injector.finish()  # last: the others' CUPTI goes off meanwhile

    def relieve(self, now: float) -> None:
        """Lets the helpers know that Argus lives, while the loop hangs for a while: they switch CUPTI off otherwise."""
        programs = (process.program for process in self._processes if now < self._polled + HANGS_S)
        for program in filter(None, programs):
            program.collector.beat()

    def stop(self) -> None:
        """Waits until CUPTI is off everywhere and its last records are here."""
        deadline = time.monotonic() + STOP_S
        while not self.stopped and (now := time.monotonic()) < deadline:
            self.poll(now)
            time.sleep(0.01)
        for process in self._processes:
            if not process.over and process.program is not None:
                process.program.collector.abandon()

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

    # ---- what was observed

    def _write_state(self, process: GpuProcess) -> None:
        state, reason = self._state(process)
        if state == "off" and process.was_on and (self._stopping or process.ended_at):
            state = "on"  # it was; the trace is over
        if process.member is None or process.job is None or (state, reason) == process.written:
            return
        process.written = state, reason
        self._session.write_features(process.job, [process.member.rank], [("gpu_times", state, reason)])

    def _state(self, process: GpuProcess) -> tuple[str, str]:
        if self._mode == "off":
            return "off", "switched off with --cupti off"
        state, reason = process.state
        if state == "waiting" and reason == "the process is not armed":
            return "off", self._not_armed if process.target.on_gpu else NO_GPU
        share = self._duties.of(process.owner).share
        if state == "on" and not reason and share < 1:
            return state, f"{share:.0%} of the time"
        return state, reason

    def _count(self, process: GpuProcess, program: CuptiProgram) -> None:
        """Keeps what a program that is no more has counted."""
        self._counted = _sum(self._counted, program)
        self._duties.of(process.owner).ended += program.correlator.counters.get("gpu_ops", 0)
        for name, (value, loss) in program.collector.counters().items():
            if loss:
                self._lost.count(name, _whom(process), number=value)

    def _tally(self, process: GpuProcess) -> None:
        """Keeps what was counted of a process that is over."""
        self._late += process.usage.late
        self._dropped += process.steps.dropped
        self._guessed += process.steps.phases.guessed
        self._products_unknown += process.flops.products.unknown

    def _count_without_rank(self, process: GpuProcess, batches: Iterable[Batch]) -> None:
        self._session.losses.count("gpu_ops_without_rank", _whom(process), number=sum(len(b.gpu) for b in batches))

    def counters(self) -> Counters:
        """Every counter of the GPU side: value, and whether a value above 0 is a loss."""
        if self._mode == "off":
            return {}
        counters = dict.fromkeys(COUNTERS, (0, False)) | self._counted
        late, dropped, guessed, unknown = self._late, self._dropped, self._guessed, self._products_unknown
        for process in (each for each in self._processes if not each.over):
            late += process.usage.late
            dropped += process.steps.dropped
            guessed += process.steps.phases.guessed
            unknown += process.flops.products.unknown
        for program in _counting(self._processes):
            counters = _sum(counters, program)
        counters |= {"gpu_ops_late": (late, False), "gpu_ops_without_step": (dropped, False)}
        counters |= {"gpu_collectives_guessed": (guessed, False), "math_calls_unknown": (unknown, False)}
        totals = self._session.losses.totals
        counters |= {name: (totals[name], True) for name in _OF_PROCESSES}
        counters["gpu_times_failed"] = (self._failed + failures(self._processes), True)
        counters["gpu_share_percent"] = (round(100 * self._duties.share), False)
        self._loss_names = [name for name, (_, loss) in counters.items() if loss and name not in _OF_PROCESSES]
        return counters

    def own_losses(self, job: Job) -> dict[str, int]:
        """What was lost of the GPU times of a job's processes."""
        if self._mode == "off":
            return {}
        if not self._loss_names:
            self.counters()
        own = Tally(dict.fromkeys(self._loss_names, 0))
        own.update(self._lost.of(job))
        may_be = self._lost.may_be
        its = (each for each in self._processes if each.job is job or (each.job is None and may_be(job, each.owner)))
        for program in _counting(its):
            own.update({name: value for name, (value, loss) in program.collector.counters().items() if loss})
        return {**own, "gpu_times_failed": failures(each for each in self._processes if each.job is job)}

    def top_kernels(self, count: int) -> list[tuple[str, int, int]]:
        """The kernels that took most time on the GPUs: name, calls, nanoseconds."""
        return self._rows.top_kernels(count)

    @property
    def kernel_ns(self) -> int:
        """Time of all kernels on the GPUs; two that ran at once count twice."""
        return self._rows.kernel_ns

    def views(self) -> list[GpuView]:
        """Every rank's GPUs."""
        ranks = [process for process in self._processes if process.member is not None and process.job is not None]
        views = (view_of(process, *self._state(process), matched=self._api) for process in ranks)
        return sorted(views, key=lambda view: (view.job, view.rank))

    def settled(self, now: float) -> bool:
        """Whether every rank's state is more than a first impression."""
        ranks = [process for process in self._processes if process.member is not None]
        return bool(ranks) and all(
            self._mode == "off"
            or self._state(process)[0] in ("on", "ignored", "failed")
            or (self._state(process)[0] == "off" and now > process.since + SETTLE_S)
            for process in ranks
        )

    def summary(self) -> list[str]:
        """The state of GPU times and what was recorded, in lines for people."""
        return self.describe(done=True)

    def describe(self, *, done: bool = False) -> list[str]:
        """The state of GPU times, in lines for people.

        Args:
            done: The session is over: with what was recorded.
        """
        states = [(process, *self._state(process)) for process in self._processes if process.member is not None]
        return describe(states, self.counters() if done and states else None, matched=self._api)


def _counting(processes: Iterable[GpuProcess]) -> Iterator[CuptiProgram]:
    """What counts for these; of those that have had no helper one: it counts nothing, but has the counters' names."""
    had_none = False
    for process in processes:
        if process.over or process.program is None:
            continue
        has_none = not process.program.collector.armed
        if not (has_none and had_none):
            yield process.program
        had_none = had_none or has_none


def _whom(process: GpuProcess) -> Whom:
    """Whom a loss of a process concerns."""
    return Whom(process.job) if process.job is not None else Whom(None, process.owner)


def _sum(counters: dict[str, tuple[int, bool]], program: CuptiProgram) -> dict[str, tuple[int, bool]]:
    """Counters with those of a program added; of times that are no sums, the longest."""
    out = dict(counters)
    more = {name: (value, False) for name, value in program.correlator.counters.items()}
    for name, (value, loss) in {**program.collector.counters(), **more}.items():
        before, lost = out.get(name, (0, False))
        out[name] = (before + value, loss or lost)
    return out
