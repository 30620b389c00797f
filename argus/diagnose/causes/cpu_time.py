"""Why a rank is late: where its CPU time went, compared with the others in the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.model.units import duration
from argus.semantics.phases.cpu import PHASES

HALF = 0.5
"""A CPU-side component explains the lateness if its excess is at least this share of it."""
HIDDEN_BACKWARD = 2.0
"""A backward pass takes twice the forward's work (two matrix products a layer instead of one; Kaplan et al. 2020).
Where only the forward is waited for on the CPU, a slow GPU's backward is late twice as much again, unseen."""
NOTABLE = 0.1
"""A phase that takes less than this share of all excess is not reported; nor is a GPU's excess that is less than this
share of the lateness, or negative: the scatter of a step's parts is as large."""
SELECTIVE, ALIKE = 3.0, 1.25
"""One phase takes so many times as long as the others', and the rest of the step's work no more than so many times as
long: what runs beside a rank slows all that it computes."""
SHOWN_NS = 5e4
"""What rounds to the 0.1 ms that texts show."""
MAX_KERNELS = 3
"""Kernels that a finding names, at most."""
UNMARKED_BATCH = ("", "data_loading", "forward")
"""Phases in which a batch is made ready: what comes between a loader, or the reset of gradients, and a backward counts
as forward where nothing is marked."""
FLAT = 1.2
"""Lateness that grows by less than a fifth from a step's first collective to its last is flat."""


@dataclass(frozen=True)
class Cause:
    """Attributes:
    kind: A kind of :data:`argus.diagnose.verdict.FINDING_KINDS`.
    text: What was compared, with numbers.
    known: Whether CUDA calls or phases were stored to compare.
    phase: The phase of a step that takes longer; empty: not determined.
    selective: Whether that one takes several times as long, and the rest of the step's work does not.
    """

    kind: str
    text: str
    known: bool
    phase: str = ""
    selective: bool = False


def attribute(
    columns: Mapping[str, NDArray[Any]],
    ranks: tuple[int, ...],
    late_ns: float,
    gpu_ns: tuple[float, float] | None = None,
    *,
    hidden: bool = False,
) -> Cause:
    """The kind of a straggler.

    The slow rank's steps are as long as everybody's, so a delay on its CPU (data, compiling, launching) shows as
    excess of that component. A slow GPU shows as none: the CPU waits for it in synchronise calls that are as long as
    everybody's, only later.

    Args:
        columns: As :data:`argus.diagnose.read.queries.CPU_TIME` returns them for the slow ranks and some others.
        ranks: The slow ranks.
        late_ns: How late they are.
        gpu_ns: By how much their GPUs compute longer, and are idle for longer; None: not known. A CPU that
            waits since its GPU's queue is full looks like one that is slow; the GPU is idle where it is.
        hidden: By the GPU's own times it is not late itself.
    """

    def longer(more_ns: float) -> str:
        """A GPU's excess in words."""
        return f"{duration(more_ns)} a step longer" if more_ns >= max(NOTABLE * late_ns, SHOWN_NS) else "as long"

    slow = np.isin(columns["rank"], ranks) if len(columns.get("rank", ())) else np.zeros(0, np.bool_)
    if gpu_ns is not None and gpu_ns[0] >= HALF * late_ns and gpu_ns[0] > gpu_ns[1]:
        text = (
            f"its GPU is to blame: against those with the same work it computes {longer(gpu_ns[0])}, and is "
            f"idle for {longer(gpu_ns[1])}"
        )
        return Cause("compute_straggler", text, True)
    if not slow.any() or slow.all():
        return Cause("compute_straggler", "no CUDA calls were stored to distinguish the GPU from the CPU", False)

    def excess(name: str) -> float:
        values = np.asarray(columns[name], np.float64)
        return float(np.median(values[slow]) - np.median(values[~slow]))

    parts = {name: excess(f"{name}_ns") for name in ("module", "data", "other", "sync")}
    for name, kind, words in (
        ("module", "jit_stall", "loading or compiling GPU code"),
        ("data", "data_loading", "outside CUDA before the copy of the batch to the GPU"),
        ("other", "kernel_issue_stall", "outside CUDA between launches"),
    ):
        if parts[name] >= HALF * late_ns and parts[name] == max(parts["module"], parts["data"], parts["other"]):
            return Cause(kind, f"{duration(parts[name])} a step more than the others {words}", True)
    if gpu_ns is not None and gpu_ns[1] > max(gpu_ns[0], 0.0):
        text = (
            f"its GPU is not to blame: it is idle for {duration(gpu_ns[1])} a step longer than those with "
            f"the same work, and computes {longer(gpu_ns[0])}; kernels are launched too late"
        )
        return Cause("kernel_issue_stall", text, True)
    if hidden and gpu_ns is not None:
        text = (
            f"its GPU is not late: against those with the same work it computes {longer(gpu_ns[0])}, and is "
            f"idle for {longer(gpu_ns[1])}; its CPU no longer runs as far ahead"
        )
        return Cause("kernel_issue_stall", text, True)
    # To 0.1 ms: "-31 ns" reads like a measurement.
    data, other, module = (duration(round(parts[name], -5), signed=True) for name in ("data", "other", "module"))
    text = (
        f"its CPU is not to blame: against the others it spends {data} a step before the copy of the batch, "
        f"{other} between launches, {module} loading code"
    )
    return Cause("compute_straggler", text, True)


def attribute_by_phases(columns: Mapping[str, NDArray[Any]], ranks: tuple[int, ...], late_ns: float) -> Cause | None:
    """The kind of a straggler whose steps' phases are known, as those of PyTorch on CPUs are.

    The slow rank's steps are as long as everybody's: what it does longer, the others wait for in communication.

    Args:
        columns: As :data:`argus.diagnose.read.queries.PHASE_TIME` returns them for the slow ranks and some others.
        ranks: The slow ranks.
        late_ns: How late they are.

    Returns:
        None: no phases of both are known, or none that explains it.
    """
    here, steps = columns["rank"], columns["step"]
    slow = np.isin(here, ranks)
    if not slow.any() or slow.all():
        return None

    def typical(chosen: NDArray[np.bool_], phase: str) -> float:
        # A phase that a step does not have has no row.
        of_phase = chosen & (columns["phase"] == phase)
        calls = len(np.unique(np.stack([here[chosen], steps[chosen]]), axis=1).T)
        times = np.asarray(columns["duration_ns"][of_phase], np.float64)
        return float(np.median(np.concatenate([times, np.zeros(max(0, calls - len(times)))])))

    parts = {
        phase: (typical(slow, phase), typical(~slow, phase))
        for phase in np.unique(columns["phase"]).tolist()
        if phase != "communication"
    }
    phase, (slow_ns, others_ns) = max(parts.items(), key=lambda item: item[1][0] - item[1][1], default=("", (0.0, 0.0)))
    if slow_ns - others_ns < HALF * late_ns:
        return None
    what = "outside the phases that PyTorch marks" if phase == "other" else f"in {phase_text(phase)}"
    text = f"it spends {duration(slow_ns)} a step {what}, the others {duration(others_ns)}"
    rest = np.sum([times for name, times in parts.items() if name not in (phase, "data_loading")], axis=0)
    alike = np.size(rest) == 2 and 0 < rest[0] <= ALIKE * rest[1]
    selective = bool(alike and slow_ns >= SELECTIVE * others_ns)
    kind = "data_loading" if phase == "data_loading" else "compute_straggler"
    return Cause(kind, text, True, phase, selective)


def refine(cause: Cause, columns: Mapping[str, NDArray[Any]], ranks: tuple[int, ...], late_ns: float) -> Cause:
    """A cause that was concluded from CUDA calls, with what the phases of the same steps show.

    Marks show better than calls what a CPU did instead of launching. What comes before the copy of a batch need not be
    the loading of that batch: a range of another kind that takes half of the lateness is the cause then.

    Args:
        cause: As :func:`attribute` returns it.
        columns, ranks, late_ns: As of :func:`attribute_by_phases`.

    Returns:
        The same cause where phases are not known, or show nothing else.
    """
    by_phase = attribute_by_phases(columns, ranks, late_ns)
    if by_phase is None:
        return cause
    if cause.kind != "data_loading":
        if not cause.known or by_phase.kind == "data_loading":
            return by_phase
        if cause.kind != "kernel_issue_stall" or by_phase.phase in ("", "other"):
            return cause
        return replace(cause, text=f"{cause.text}; {by_phase.text}", phase=by_phase.phase)
    if by_phase.phase in UNMARKED_BATCH:
        return cause
    if by_phase.phase == "other":
        # A loader of the user's own has no marks.
        loads = columns["phase"] == "data_loading"
        slow = np.isin(columns["rank"], ranks)
        if not (loads & slow).any() or not (loads & ~slow).any():
            return cause
    text = f"{by_phase.text}; that is before the copy of the batch to the GPU"
    return replace(cause, kind="kernel_issue_stall", text=text, phase=by_phase.phase)


def phase_text(phase: str) -> str:
    """A phase for a sentence: Argus's own in words, a range of the program by its name."""
    return phase.replace("_", " ") if phase in PHASES else phase


@dataclass(frozen=True)
class SlowKernels:
    """What a slow GPU takes longer for.

    Attributes:
        phase: The one that takes the most time more.
        factor: How many times as long as the others'.
        excess_ns: Time more in a step, of all phases together.
        text: What was compared, with numbers.
    """

    phase: str
    factor: float
    excess_ns: float
    text: str


def slow_kernels(columns: Mapping[str, NDArray[Any]], ranks: tuple[int, ...], late_ns: float) -> SlowKernels | None:
    """In which phases the kernels of some ranks' GPUs take longer than the others'.

    Args:
        columns: As :data:`argus.diagnose.read.queries.GPU_PHASE_TIME` returns them for the slow ranks and some others.
        ranks: The slow ranks.
        late_ns: How late they are.

    Returns:
        None: GPU times of both are not known, or do not explain half of the lateness.
    """
    slow = np.isin(columns["rank"], ranks)
    if not slow.any() or slow.all():
        return None
    parts = []
    for phase in np.unique(columns["phase"]).tolist():
        of_phase = columns["phase"] == phase
        if (of_phase & slow).any() and (of_phase & ~slow).any():
            times = np.asarray(columns["duration_ns"], np.float64)
            parts.append((float(np.median(times[of_phase & slow])), float(np.median(times[of_phase & ~slow])), phase))
    parts.sort(key=lambda part: part[1] - part[0])
    excess = sum(max(slow_ns - others_ns, 0.0) for slow_ns, others_ns, _ in parts)
    if excess < HALF * late_ns:
        return None
    texts = [
        f"{duration(slow_ns)} in {phase} against {duration(others_ns)} ({slow_ns / max(others_ns, 1):.2f}x)"
        for slow_ns, others_ns, phase in parts
        if slow_ns - others_ns >= NOTABLE * excess
    ]
    slow_ns, others_ns, phase = parts[0]
    return SlowKernels(
        phase, slow_ns / max(others_ns, 1), excess, f"kernels of its GPU compute for {', '.join(texts)} a step"
    )


@dataclass(frozen=True)
class LongKernels:
    """Which kernels of a slow GPU take longer.

    Attributes:
        names: Those that cost the most time first.
        excess_ns: Time more in a step, of all kernels together.
        text: What was compared, with numbers.
    """

    names: list[str]
    excess_ns: float
    text: str


def long_kernels(columns: Mapping[str, NDArray[Any]], ranks: tuple[int, ...], late_ns: float) -> LongKernels | None:
    """Which kernels take longer on some ranks than on the others.

    Each kernel's mean duration is compared: that holds although ranks may run it more often than others.

    Args:
        columns: As :data:`argus.diagnose.read.queries.KERNEL_TIME` returns them for the slow ranks and some others.
        ranks: The slow ranks.
        late_ns: How late they are.

    Returns:
        None: nothing is known of the kernels of both, or they do not explain half of the lateness.
    """
    slow = np.isin(columns["rank"], ranks)
    if not slow.any() or slow.all():
        return None
    kernel, place = np.unique(columns["kernel_id"], return_inverse=True)
    launches = np.asarray(columns["launches"], np.float64)
    mean = np.asarray(columns["spent_ns"], np.float64) / np.maximum(launches, 1)
    often = launches / np.maximum(np.asarray(columns["steps"], np.float64), 1)
    by_name: dict[str, list[tuple[float, float, float, float]]] = {}
    for number in range(len(kernel)):
        slow_rows, other_rows = slow & (place == number), ~slow & (place == number)
        if slow_rows.any() and other_rows.any():
            pair = float(np.median(mean[slow_rows])), float(np.median(mean[other_rows]))
            times = float(np.median(often[slow_rows]))
            name = str(columns["kernel"][np.flatnonzero(slow_rows)[0]])
            by_name.setdefault(name, []).append((*pair, times, (pair[0] - pair[1]) * times))
    by_cost = sorted(by_name.items(), key=lambda item: -sum(part[3] for part in item[1]))
    excess = sum(max(sum(part[3] for part in parts), 0.0) for _, parts in by_cost)
    if excess < HALF * late_ns:
        return None
    reported = [
        (name, parts) for name, parts in by_cost[:MAX_KERNELS] if sum(part[3] for part in parts) >= NOTABLE * excess
    ]
    texts = []
    for name, parts in reported:
        slow_ns, others_ns = (sum(part[which] * part[2] for part in parts) for which in (0, 1))
        texts.append(
            f"{name} {duration(slow_ns)} a step against {duration(others_ns)} ({slow_ns / max(others_ns, 1):.2f}x)"
        )
    return LongKernels([name for name, _ in reported], excess, f"slower kernels: {'; '.join(texts)}")


def has_syncs(columns: Mapping[str, NDArray[Any]], ranks: tuple[int, ...]) -> bool:
    """Whether these ranks wait for the GPU at all in most steps."""
    slow = np.isin(columns["rank"], ranks) if len(columns.get("rank", ())) else np.zeros(0, np.bool_)
    return bool(slow.any() and np.median(np.asarray(columns["sync_ns"], np.float64)[slow]) > 0)
