"""What a trace observes, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from argus.capture import DEFAULT_OFF_CPU_NS
from argus.capture.kernel.links import Backend
from argus.capture.probes import DEFAULT_LAUNCH_RING_BYTES
from argus.cupti import RAW_ROWS_S
from argus.cupti.collector import CuptiOptions
from argus.live.cost.governor import DEFAULT_BUDGET


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
        rate_hz: Samples a second and CPU; None: more while something is the matter (``Tracer.raise_sampling``).
        off_cpu_ns: Time off the CPU from which on it is reported, with its stack and reason; None: not at all.
        step_flops: Floating-point operations of the model in a step, of all ranks; 0: not given.
        peak_flops: What a GPU can do at most in a second; 0: not given.
        raw: Which operations of the GPUs are stored one by one: one of ``cupti.RAW_MODES``.
        raw_rows_s: How many a second of each job, at most, where ``raw`` is "auto".
        max_overhead: What observing may cost the job, as a share of its time; above that less is observed.
        host: Name of this node; empty: its own.
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
    host: str = ""
    redact: tuple[str, ...] = ()
