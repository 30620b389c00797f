"""Makes the ``View`` of a running trace, which the live view and its plain lines print, from the tracer's memory."""

from __future__ import annotations

import os
import time

from argus.capture.reader import reader
from argus.live.cost.budget import BudgetSide
from argus.live.display.recent import lateness_ms
from argus.live.display.view import JobView, RankView, View, own_ms, parts_of_gpu, parts_of_thread
from argus.live.job import Job
from argus.live.session import Session
from argus.live.sides.calls import CallSide
from argus.live.sides.gpu_times import GpuSide
from argus.live.sides.stack_samples import StackSide
from argus.semantics.gpu.flops import utilization
from argus.semantics.groups.mesh import describe

WITH_PHASES = 0.9
"""Of all steps: where fewer have phases, the line says of how many it is."""


def describe_phases(job: Job) -> list[str]:
    """Where a job's steps go, by phase: of the CPU's time and of the GPUs', a line each."""
    lines = []
    for what, spent in (("steps", job.phase_ns), ("steps of the GPUs", job.gpu_phase_ns)):
        total = sum(spent.values())
        parts = [f"{phase.replace('_', ' ')} {ns / total:.1%}" for phase, ns in spent.most_common() if ns]
        if parts:
            behind = job.hidden_ns if what == "steps" else 0
            hidden = f"; communication behind them {behind / total:.1%}" if behind else ""
            few = what == "steps" and job.phased_steps < WITH_PHASES * job.step_count
            seen = f" (of {job.phased_steps:,} of {job.step_count:,} steps whose phases were seen)" if few else ""
            lines.append(f"where {what} go: {', '.join(parts)}{hidden}{seen}")
    return lines


class Viewer:
    """Makes a ``View`` of a trace, time after time.

    Args:
        session, calls, gpu, stacks, budget: The trace, and those of its sides that are shown.
    """

    def __init__(self, session: Session, calls: CallSide, gpu: GpuSide, stacks: StackSide, budget: BudgetSide) -> None:
        self._session, self._calls, self._gpu = session, calls, gpu
        self._stacks, self._budget = stacks, budget
        self._before: tuple[float, float, dict[int, tuple[int, int]]] = (time.monotonic(), 0.0, {})

    def start(self) -> None:
        """Rates are counted from now on."""
        self._before = (time.monotonic(), self._cpu_s(), {})

    def view(self, lost: dict[str, int]) -> View:
        """The session as people see it now; rates since the previous call. ``lost``: loss counters that are not 0."""
        now, cpu = time.monotonic(), self._cpu_s()
        before, cpu_before, counts_before = self._before
        span = max(now - before, 1e-3)
        gpu, stacks = self._gpu.views(), self._stacks.view()
        timed_of = {each.pid: each for each in gpu}
        ranks, counts = [], {}
        for job in self._session.jobs:
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
        self._before = (now, cpu, counts)
        ring = self._session.probes.launches
        return View(
            monotonic_ns=time.monotonic_ns(),
            elapsed_s=(time.monotonic_ns() - self._session.started_ns) / 1e9,
            ranks=sorted(ranks, key=lambda rank: (rank.job, rank.rank)),
            kernels=self._calls.kernel_launches.most_common(8),
            gpu=gpu,
            gpu_kernels=self._gpu.top_kernels(8),
            gpu_kernel_ns=self._gpu.kernel_ns,
            stacks=stacks,
            collectives=[
                (op, self._calls.collective_calls[op], size) for op, size in self._calls.collective_bytes.most_common(6)
            ],
            launches=sum(count[0] for count in counts.values()),
            collective_calls=sum(count[1] for count in counts.values()),
            lost=lost,
            waiting_bytes=self._session.writer.bytes_waiting,
            store_error=self._session.writer.trouble,
            cpu_share=(cpu - cpu_before) / span,
            ring_fill=ring.most_used_bytes / ring.size_bytes,
            notes=list(self._session.notes),
            steps_go=self.steps_go(),
            overhead=self._budget.overhead.share,
            jobs=[self._job_view(job) for job in self._session.jobs if job.ranks()],
        )

    def _cpu_s(self) -> float:
        """CPU time of Argus so far, s: its own and that of the embedded engine and of readers."""
        times = os.times()
        return times.user + times.system + self._session.writer.store.engine_cpu_s() + reader.shared.cpu_s()

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

    def steps_go(self) -> list[str]:
        """Where the jobs' steps go, by phase: of the CPU's time and of the GPUs', a line each."""
        return [line for job in self._session.jobs for line in describe_phases(job)]

    def utilization(self) -> list[str]:
        """Model FLOPs utilisation of the jobs, where it was given what that takes; a line a job."""
        step_flops, peak_flops = self._session.options.step_flops, self._session.options.peak_flops
        lines = []
        for job in self._session.jobs:
            if counted := job.counted.describe(peak_flops):
                lines.append(counted)
            if not (step_flops and peak_flops and job.step_ns and job.step_count):
                continue
            ranks = max(max((m.target.identity.world_size for m in job.ranks()), default=0), len(job.ranks()))
            lines.append(utilization(step_flops, peak_flops, ranks, job.step_ns / job.step_count))
        return lines

    def mesh(self) -> list[str]:
        """What the jobs' communicators are for, in lines for people."""
        return [line for job in self._session.jobs for line in describe(job.mesh)]
