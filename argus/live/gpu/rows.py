"""A process's operations on GPUs as rows: matched with their launches, added up by window, step, phase and kernel."""

from __future__ import annotations

import itertools
import math
from collections import Counter as Tally
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from argus.cupti.collector import CollectorState
from argus.live.gpu.duty_cycle import DutyCycles
from argus.live.gpu.process import CuptiProgram, GpuProcess
from argus.live.job import Job
from argus.live.session import Session
from argus.live.sides.kernel_rows import KernelSide
from argus.model import records
from argus.model.event_kinds import is_launch
from argus.model.losses import Whom
from argus.semantics.gpu.correlation import KEEP_PROBED
from argus.semantics.phases.gpu import GPU_METHODS, GPU_OPS, GPU_PHASES, communicates
from argus.tables import gpu as gpu_rows
from argus.tables.arrow import Origin

MAX_DEVICES = 64
"""GPUs of a node: four times as many as the largest has. A process that claims others makes them up."""
KEPT_NAMES = 4096
"""Kernels that the live view counts, at least; a program that makes kernels all the time has any number."""


class GpuRows:
    """Writes what GPUs did.

    Args:
        session: Where rows go.
        kernels: Gets the operations one by one.
        duties: How they are recorded.

    Attributes:
        kernel_ns: Time of all kernels on the GPUs; two that ran at once count twice.
    """

    def __init__(self, session: Session, kernels: KernelSide, duties: DutyCycles) -> None:
        self._session = session
        self._kernel_side = kernels
        self._duties = duties
        self._calls: Tally[str] = Tally()
        self._ns: Tally[str] = Tally()
        self.kernel_ns = 0

    def top_kernels(self, count: int) -> list[tuple[str, int, int]]:
        """The kernels that took most time on the GPUs: name, calls, nanoseconds."""
        return [(name, self._calls[name], total) for name, total in self._ns.most_common(count)]

    def write_fetched(
        self, process: GpuProcess, program: CuptiProgram, launches: NDArray[np.void], now_ns: int
    ) -> None:
        """Writes what was fetched of a rank, as far as it is ready.

        Args:
            process: A rank.
            program: Its program.
            launches: Its CUDA calls, ``records.LAUNCH``, in order.
            now_ns: CLOCK_MONOTONIC.
        """
        assert process.member is not None
        assert process.job is not None
        gpu, host = program.take()
        real = gpu["device"] < MAX_DEVICES
        if not real.all():
            number = int(np.sum(~real))
            self._session.losses.count("gpu_ops_of_no_device", Whom(process.job), number=number)
            gpu = gpu[real]
        process.put_off_at = math.inf
        self._expect(process, program, launches)
        self.write_ready(process, program, program.correlator.feed(gpu, host, launches, now_ns))
        events = host[gpu_rows.is_event(host)]
        if len(events):
            events["tid"] = program.correlator.on_host(events["tid"])
            origin, rank, pid = self._session.origin(process.job), process.member.rank, process.target.pid
            table = gpu_rows.gpu_host_events(events, origin, rank, pid, program.names, now_ns)
            self._session.writer.append("gpu_host_events", table)

    def put_off(
        self, process: GpuProcess, program: CuptiProgram, launches: NDArray[np.void], now: float, now_ns: int
    ) -> None:
        """Leaves what was fetched for a later turn, in which its launches are not given again.

        Args:
            process, program, launches, now_ns: As for ``write_fetched``.
            now: ``time.monotonic()``.
        """
        process.put_off_at = min(process.put_off_at, now)
        self._expect(process, program, launches)
        program.correlator.feed_probed(launches, now_ns)

    def _expect(self, process: GpuProcess, program: CuptiProgram, launches: NDArray[np.void]) -> None:
        """Keeps launches until an operation that is newer is known."""
        options = self._duties.of(process.owner).options
        if process.was_on and options.api and options.share == 1:
            # While another profiler has CUPTI, or it failed, nothing answers, for hours maybe: the state says so.
            away = program.collector.state in (CollectorState.IGNORED, CollectorState.FAILED)
            kept = 0 if away else KEEP_PROBED
            asked = np.append(process.unanswered, launches["ts_ns"][is_launch(launches)])
            process.unanswered = asked[max(len(asked) - kept, 0) :]

    def write_ready(
        self, process: GpuProcess, program: CuptiProgram, ops: NDArray[np.void], *, final: bool = False
    ) -> None:
        """Writes operations that are matched with their launches, and the windows and steps that are over.

        Args:
            process: A rank.
            program: Its program.
            ops: ``records.GPU_OP``.
            final: Nothing more will come.
        """
        assert process.member is not None
        assert process.job is not None
        origin, rank, pid = self._session.origin(process.job), process.member.rank, process.target.pid
        if len(ops):
            self._feed(process, program, ops)
        windows = process.usage.advance(final=final)
        windows = windows[self._duties.of(process.owner).records_whole(windows["start_ns"], windows["duration_ns"])]
        if len(windows):
            process.windows.append(windows)
            self._session.writer.append("gpu_usage", gpu_rows.gpu_usage(windows, origin, rank, pid))
        self._write_steps(process, origin, rank, final=final)
        self._count_over_share(process)

    def keep(self, process: GpuProcess, most: int) -> None:
        """Keeps no more than so many operations of a process, as ``GpuProcess.keep``, since others need the room."""
        room = process.keep(most)
        if process.job is not None:
            self._kernel_side.keep(process.job, process.target.pid, room)
            process.waiting = self._kernel_side.waiting(process.job, process.target.pid)
        self._count_over_share(process)

    def leave_out(self, process: GpuProcess) -> None:
        """Drops what was fetched of a process and not worked on, as its job is forgotten: a loss. Operations that wait
        for their launches are written without."""
        if process.program is not None and process.job is not None:
            number = process.program.keep(0)
            self._session.losses.count("gpu_ops_over_share", Whom(process.job), number=number)
            self.write_ready(process, process.program, process.program.correlator.flush())

    def count_late(self, job: Job, steps: NDArray[np.void], processes: Iterable[GpuProcess]) -> None:
        """Counts steps of ranks whose GPU times are over: they get no row. Arguments: of the job, as
        ``GpuSide.feed_steps``, and all processes."""
        of_job = [each for each in processes if each.job is job and each.member is not None]
        over = {each.member.rank: each for each in of_job if each.member is not None and each.over}
        for rank in {each.member.rank for each in of_job if each.member is not None and not each.over}:
            over.pop(rank, None)  # it has another process, and the steps are that one's
        for rank, process in over.items():
            if not process.first_ns or process.failure:
                continue
            late = steps[(steps["rank"] == rank) & (steps["ts_ns"] >= process.first_ns)]
            whole = self._duties.of(process.owner).records_whole(late["ts_ns"], late["duration_ns"])
            if number := int(whole.sum()):
                self._session.losses.count("gpu_steps_late", Whom(job), number=number)

    def _count_over_share(self, process: GpuProcess) -> None:
        """Operations that were dropped, as there was no room for them, are losses of the rank's job."""
        if number := process.take_over_share():
            self._session.losses.count("gpu_ops_over_share", Whom(process.job, process.owner), number=number)

    def _feed(self, process: GpuProcess, program: CuptiProgram, ops: NDArray[np.void]) -> None:
        """Operations to all that adds them up."""
        assert process.member is not None
        assert process.job is not None
        words = program.names.of(ops["name"])
        kernel = ops["kind"] == records.GpuKind.KERNEL
        kinds = program.kinds(ops, words)
        communication = communicates(kinds)
        self._kernel_side.feed(process.job, process.member.rank, process.target.pid, program.names, ops, communication)
        process.usage.feed(ops, communication)
        process.steps.feed(ops, communication, kinds)
        self._count_over_share(process)
        if self._session.options.cupti_options.api:
            process.flops.feed(ops[~communication], words[~communication], program.names.words)
        duration = (ops["end_ns"] - ops["start_ns"])[kernel].astype(np.float64)
        count, total = np.bincount(words[kernel]), np.bincount(words[kernel], duration)
        for word in np.flatnonzero(count).tolist():
            name = program.names.words[word]
            self._calls[name] += int(count[word])
            self._ns[name] += int(total[word])
        self.kernel_ns += int(duration.sum())
        if len(self._ns) > 2 * KEPT_NAMES:
            self._ns = Tally(dict(self._ns.most_common(KEPT_NAMES)))
            self._calls = Tally({name: self._calls[name] for name in self._ns})
        process.kernels += int(np.sum(kernel))
        process.first_ns = process.first_ns or int(ops["start_ns"].min())
        probed = ops["launch_ns"][(ops["flags"] & records.GPU_LAUNCH_PROBED) != 0]
        if len(probed):
            process.unanswered = process.unanswered[process.unanswered > probed.max()]

    def _write_steps(self, process: GpuProcess, origin: Origin, rank: int, *, final: bool) -> None:
        """Steps that are over: their GPU times, phases, collectives and FLOPs."""
        assert process.job is not None
        append, pid = self._session.writer.append, process.target.pid
        steps = process.steps.advance(final=final)
        duty = self._duties.of(process.owner)
        steps = steps[duty.records_whole(steps["start_ns"], steps["duration_ns"])]
        over = process.steps.take_over()
        begin, end, _ = np.array(over, np.int64).reshape(-1, 3).T
        whole = duty.records_whole(begin, end - begin).tolist()
        whole_steps = list(itertools.compress(over, whole))
        self._kernel_side.settle(process.job, pid, whole_steps, final=final)
        process.waiting = self._kernel_side.waiting(process.job, pid)
        process.flops.settle(whole_steps)
        rows, counted = process.flops.take(final=final)
        process.job.counted.add(counted)
        if rows:
            rows |= {"job": origin.job, "run": origin.run, "rank": rank, "host": origin.host, "pid": pid}
            append("kernel_flops", rows | {"ts": rows["ts"] + origin.mono_offset_ns})
        if len(steps):
            append("gpu_steps", gpu_rows.gpu_steps(steps, origin, rank, pid))
        phases = process.steps.take_phases()
        phases = phases[np.isin(phases["step"], steps["step"])]
        if len(phases):
            append("gpu_phases", gpu_rows.gpu_phases(phases, origin, rank, pid, GPU_PHASES, GPU_METHODS))
            for code in np.unique(phases["phase"]).tolist():
                spent = int(phases["duration_ns"][phases["phase"] == code].sum())
                process.job.gpu_phase_ns[GPU_PHASES[code]] += spent
        collectives = process.steps.take_collectives()
        collectives = collectives[np.isin(collectives["step"], steps["step"])]
        if len(collectives):
            append("gpu_collectives", gpu_rows.gpu_collectives(collectives, origin, rank, pid, GPU_OPS))
