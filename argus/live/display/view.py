"""The data of one picture of the live view: jobs, ranks and rates at one moment, made from the tracer's memory.

``Tracer.view`` fills a :class:`View`; ``cli/live.py`` draws it. Nothing here asks the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argus.live.display.recent import COMPUTING, OTHER, WAITING
from argus.live.display.stack_view import NO_STACKS, StackView
from argus.live.gpu.describe import GpuView


@dataclass(frozen=True)
class RankView:
    """A rank as the live view shows it. Rates are per second since the last view.

    Attributes:
        step_ms: Typical time of its newest steps.
        late_ms: By how much it typically comes later to collectives than the first rank; None: not known.
        own_ms: Time of a step in which it does not wait for others; None: not known.
        parts: Shares of its time by :data:`argus.live.display.recent.PARTS`; empty: not known.
        by: Where they come from: ``GPU``, ``phases`` or ``stacks``.
    """

    job: str
    rank: int
    pid: int
    state: str
    launch_rate: float
    collective_rate: float
    steps: int
    last_step: int
    step_ms: float
    run: int = 0
    late_ms: float | None = None
    own_ms: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    by: str = ""


@dataclass(frozen=True)
class JobView:
    """A job as the live view shows it.

    Attributes:
        ranks, world: Ranks traced here, and of the whole job; 0: not known.
        step: Number of the newest step; -1: none yet.
        step_ms: Times of the newest steps, the oldest first: the median over ranks.
        newest_ns: Monotonic end of the newest step; 0: none yet.
        calls: Calls of CUDA, NCCL and gloo so far.
        live: Whether one of its processes runs.
    """

    name: str
    run: int
    ranks: int
    world: int
    launcher: str
    step: int = -1
    step_ms: Sequence[float] = ()
    newest_ns: int = 0
    calls: int = 0
    live: bool = True


@dataclass(frozen=True)
class View:
    """A moment of the session, for people."""

    monotonic_ns: int
    elapsed_s: float
    ranks: list[RankView]
    kernels: list[tuple[str, int]]
    gpu: list[GpuView]
    gpu_kernels: list[tuple[str, int, int]]
    gpu_kernel_ns: int
    collectives: list[tuple[str, int, int]]
    launches: int
    collective_calls: int
    lost: dict[str, int]
    waiting_bytes: int
    store_error: str
    cpu_share: float
    ring_fill: float
    notes: list[str]
    stacks: StackView = NO_STACKS
    steps_go: list[str] = field(default_factory=list)
    overhead: float | None = None
    jobs: list[JobView] = field(default_factory=list)


def parts_of_gpu(gpu: GpuView) -> dict[str, float]:
    """Shares of a rank's last seconds as its GPU spent them; empty: it is not timed."""
    if gpu.busy is None or gpu.exposed is None:
        return {}
    return {COMPUTING: max(gpu.busy - gpu.exposed, 0.0), WAITING: gpu.exposed, OTHER: max(1.0 - gpu.busy, 0.0)}


def parts_of_thread(on: float, off: float, queued: float) -> dict[str, float]:
    """Shares of a rank's main thread's last seconds: on the CPU, waiting, queued for a CPU (short times off the CPU are
    not seen); empty: the thread was not observed."""
    whole = on + off + queued
    scale = 1.0 / max(whole, 1.0)
    return {COMPUTING: on * scale, WAITING: off * scale, OTHER: queued * scale} if whole else {}


def own_ms(step_ms: float, parts: Mapping[str, float], by: str) -> float | None:
    """Time of a step in which a rank does not wait for others; None: waits for others cannot be distinguished."""
    if not step_ms or not parts or by == "stacks":
        return None
    return step_ms * (1.0 - parts.get(WAITING, 0.0))
