"""Why ranks come late, and what it costs: by their CPUs, phases and kernels, and by what else was seen of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import MIN_STEPS, Case, evidence
from argus.diagnose.causes.contention import Compared, Sharpened, sharpen
from argus.diagnose.causes.copies import COPIES, COPY_ACTION, slow_copies
from argus.diagnose.causes.cpu_time import (
    FLAT,
    HIDDEN_BACKWARD,
    Cause,
    SlowKernels,
    attribute,
    has_syncs,
    long_kernels,
    phase_text,
    refine,
    slow_kernels,
)
from argus.diagnose.causes.crowded import find_crowd, may_slow
from argus.diagnose.ranks.lateness import WINDOWS, Lateness, Straggler
from argus.diagnose.read import gpu_times, queries
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.diagnose.verdict import Evidence
from argus.model.units import duration, ranks_on, ranks_text

REFERENCES = 16
"""Other ranks that a straggler's CPU time is compared with: their median is steady from there on."""
UNKNOWN_CAUSE = 0.7
"""Confidence is (share of steps in which it was last) x (1 - chance that turns look so) x this, where neither CUDA
calls nor phases were stored to find its cause by."""


@dataclass
class Loss:
    """What late ranks cost, and why.

    Attributes:
        straggler: The ranks.
        onset, last: First and last step.
        cause: Why they are late.
        loss_ns: What a step is longer for it.
        grown_ns: What it may cost more: steps are longer than before the onset, or kernels take longer than on the
            others.
        evidence: For it.
        phase, kernels: Where it shows.
        action: In addition to what the kind of cause asks for.
        level: As of a finding; empty: the level that follows from the kernels.
    """

    straggler: Straggler
    onset: int
    last: int
    cause: Cause
    loss_ns: float
    grown_ns: float
    evidence: list[Evidence]
    phase: str
    kernels: list[str]
    action: str
    level: str


@dataclass(frozen=True)
class _Peers:
    """Attributes:
    ranks, late: Those that are the cause; and those with the ranks that wait for them.
    chosen: Some that they are compared with.
    window: Parameters of the queries that compare them.
    gpu_ns: How much longer their GPUs compute, and are idle; None: not known.
    """

    ranks: list[int]
    late: list[int]
    chosen: list[int]
    window: dict[str, Any]
    gpu_ns: tuple[float, float] | None


def explain(case: Case, straggler: Straggler, onset: int) -> Loss:
    """Why ranks are late since a step, and what that costs."""
    peers = _peers(case, straggler, onset)
    step_ns = float(np.median(case.durations[-straggler.window :]))
    cpu = case.query(queries.CPU_TIME, peers.window)
    by_calls, shown_by = _by_cpu(case, straggler, onset, peers, cpu)
    seen = _sharpened(case, straggler, onset, by_calls, peers)
    before, cause = by_calls, seen.cause
    alone = cause.kind == "compute_straggler" and peers.gpu_ns is None and not len(cpu["rank"])
    worked = {**peers.window, "last": case.last}
    if alone and not cause.selective and may_slow(case.query, worked, peers.ranks, straggler.gain_ns, step_ns):
        where = {host for rank, host in case.hosts.items() if rank in peers.ranks}
        # Programs that come and go are seen in the steps that are compared, and not on the average since the onset.
        firsts = dict.fromkeys((onset, peers.window["first"]))
        crowds = (find_crowd(case.query, {**case.params, "first": first, "last": case.last}, where) for first in firsts)
        crowd = next((found for found in crowds if found is not None), None)
        if crowd is not None:
            cause = Cause("host_contention", crowd.text, False)
            seen = Sharpened(cause, [crowd.evidence], crowd.action)
    # That its CPU is not the cause is evidence against its GPU.
    because: list[Evidence] = []
    if cause.kind == before.kind or before.kind != "compute_straggler" or before.phase:
        because = [evidence(before.text, *shown_by)]
    kernels = longer = None
    summed = {**peers.window, "last": case.last}
    if cause.kind == "compute_straggler" and not cause.phase:
        kernels = slow_kernels(case.query(queries.GPU_PHASE_TIME, peers.window), straggler.ranks, straggler.gain_ns)
        longer = long_kernels(case.query(queries.KERNEL_TIME, summed), straggler.ranks, straggler.gain_ns)
    cited = [_seen_by(case, straggler, onset, step_ns, copies=before.phase == COPIES), *because, *seen.evidence]
    if kernels is not None:
        cited.append(evidence(kernels.text, queries.GPU_PHASE_TIME, peers.window))
    if longer is not None:
        cited.append(evidence(longer.text, queries.KERNEL_TIME, summed))
    flat = _is_flat(case.lateness, straggler)
    half_hidden = (
        cause.kind == "compute_straggler"
        and kernels is None
        and cause.known
        and not cause.phase
        and flat
        and has_syncs(cpu, straggler.ranks)
    )
    lost, grown, costs = _cost(case, straggler, onset, step_ns, peers, kernels, half_hidden=half_hidden)
    phase = (
        before.phase
        or (kernels.phase if kernels is not None else "")
        or ("before the first collective" if flat else "between the collectives")
    )
    if seen.alike:
        waiting = tuple(rank for rank in straggler.waiting if rank not in seen.alike)
        straggler = replace(straggler, ranks=tuple(sorted({*peers.ranks, *seen.alike})), waiting=waiting)
    names = [] if longer is None else longer.names
    return Loss(
        straggler, onset, case.last, cause, lost, grown, [*cited, *costs], phase, names, seen.action, seen.level
    )  # fmt: skip


def _peers(case: Case, straggler: Straggler, onset: int) -> _Peers:
    ranks, gpus, lateness = list(straggler.ranks), case.gpus, case.lateness
    late = ranks + list(straggler.waiting)
    others = [int(rank) for rank in lateness.ranks if rank not in late] if lateness is not None else []
    gpu_ns = None
    if gpus is not None and (slow := np.isin(gpus.now.ranks, ranks)).any():
        compute, idle, _ = gpu_times.own_excess(gpus.now, gpus.mesh)
        gpu_ns = float(np.median(compute[slow])), float(np.median(idle[slow]))
        same = np.isin(gpus.mesh.stage, gpus.mesh.stage[slow]) & ~np.isin(gpus.now.ranks, late)
        if straggler.whole_stage:
            # Only their idle time is compared with the other stages'.
            gpu_ns = 0.0, straggler.gain_ns
            others = others or gpus.now.ranks[~slow].tolist()
        others = gpus.now.ranks[same].tolist() or others
    chosen = some(others)
    first = max(onset, int(case.numbers[-straggler.window :][0]))
    return _Peers(ranks, late, chosen, {**case.params, "first": first, "ranks": ranks + chosen}, gpu_ns)


def some(ranks: Sequence[int]) -> list[int]:
    """At most :data:`REFERENCES` of these ranks, evenly chosen."""
    return list(ranks[:: max(1, len(ranks) // REFERENCES)][:REFERENCES])


def _by_cpu(
    case: Case, straggler: Straggler, onset: int, peers: _Peers, cpu: Mapping[str, NDArray[Any]]
) -> tuple[Cause, tuple[str, dict[str, Any]]]:
    """Why, by what the CPUs did, and the GPUs' copies; and the query that shows it, with its parameters."""
    if peers.gpu_ns is not None and peers.gpu_ns[1] > peers.gpu_ns[0]:
        copies = slow_copies(case.query, peers.window, peers.ranks, peers.chosen, straggler.gain_ns)
        if copies is not None:
            return copies.cause, (copies.sql, peers.window)
    cause = attribute(cpu, straggler.ranks, straggler.gain_ns, peers.gpu_ns, hidden=straggler.hidden)
    by_calls = queries.CPU_TIME, peers.window
    if cause.known and cause.kind not in ("kernel_issue_stall", "data_loading"):
        return cause, by_calls
    window = peers.window
    phases = case.query(queries.PHASE_TIME, window)
    if not len(phases["rank"]) and onset < window["first"]:
        # Of samples the newest one may lie before the newest steps.
        window = {**window, "first": onset}
        phases = case.query(queries.PHASE_TIME, window)
    refined = refine(cause, phases, straggler.ranks, straggler.gain_ns)
    by_phases = refined is not cause and (not cause.known or refined.kind != cause.kind)
    return refined, (queries.PHASE_TIME, window) if by_phases else by_calls


def _sharpened(case: Case, straggler: Straggler, onset: int, cause: Cause, peers: _Peers) -> Sharpened:
    """The cause with what the stack side saw of the ranks."""
    theirs = {case.hosts[rank] for rank in peers.ranks if rank in case.hosts}
    gpus_idle = None if peers.gpu_ns is None or straggler.hidden or cause.kind == "compute_straggler" else peers.gpu_ns
    compared = Compared(
        late=peers.ranks,
        others=peers.chosen,
        late_ns=straggler.gain_ns,
        where=ranks_text(peers.ranks),
        neighbours=[rank for rank, host in case.hosts.items() if host in theirs and rank not in peers.ranks],
        elsewhere=some([rank for rank, host in case.hosts.items() if host not in theirs]),
        idle_ns=None if gpus_idle is None else gpus_idle[1],
    )
    return sharpen(case.query, {**case.params, "first": onset, "last": case.last}, cause, compared, case.stacks)


def _is_flat(lateness: Lateness | None, straggler: Straggler) -> bool:
    """Whether ranks are as late at the last collective of a step as at the first."""
    if lateness is None or not (inside := np.isin(lateness.ranks, straggler.ranks)).any():
        return False
    tail = lateness.tail(straggler.window)
    return float(np.nanmedian(tail.last[inside])) <= FLAT * float(np.nanmedian(tail.first[inside]))


def _seen_by(case: Case, straggler: Straggler, onset: int, step_ns: float, *, copies: bool) -> Evidence:
    """What shows that they are late. ``copies``: by their copies."""
    name = ranks_text(straggler.ranks)
    if straggler.idle and case.gpus is not None:
        norm = "those of the other stages" if straggler.whole_stage else "those with the same work, or at first"
        text = (
            f"the GPUs of {name} {'have nothing to compute' if copies else 'are idle'} for longer than {norm}, "
            f"in {straggler.persistence:.0%} of the newest {straggler.window} steps, and others wait for them for "
            f"{duration(straggler.gain_ns)} of {duration(step_ns)} a step"
        )
        return evidence(text, queries.GPU_TIMES, case.gpus.window)
    text = (
        f"{name} came last to the collectives in {straggler.persistence:.0%} of the newest "
        f"{straggler.window} steps, {duration(straggler.gain_ns)} after everybody else, of "
        f"{duration(step_ns)} a step"
    )
    return evidence(text, queries.LEAD, {**lead_params(case, straggler), "first": onset})


def _cost(
    case: Case,
    straggler: Straggler,
    onset: int,
    step_ns: float,
    peers: _Peers,
    kernels: SlowKernels | None,
    *,
    half_hidden: bool,
) -> tuple[float, float, list[Evidence]]:
    """What a step is longer for late ranks, what they may cost more, ns; and sentences on it.

    Args:
        case, straggler, onset: Who is late, since when.
        step_ns: A step.
        peers: With their GPUs' own excess.
        kernels: What their GPUs take longer for; None: not known.
        half_hidden: Their GPUs are slow, and only the forward shows.
    """
    lost = straggler.gain_ns
    grown = 0.0 if kernels is None else max(min(kernels.excess_ns, step_ns) - lost, 0.0)
    if straggler.hidden and peers.gpu_ns is not None:
        lost, grown = float(np.clip(sum(peers.gpu_ns), 0.0, lost + grown)), 0.0
    before = case.durations[case.numbers < onset]
    if len(before) >= MIN_STEPS:
        was = float(np.median(before[-max(WINDOWS) :]))
        if step_ns - was <= lost + grown:
            return lost, grown, []
        text = f"a step took {duration(was)} before step {onset} and takes {duration(step_ns)} now"
        return lost, step_ns - was - lost, [evidence(text, queries.STEPS, case.params)]
    if not half_hidden:
        return lost, grown, []
    lost *= 1 + HIDDEN_BACKWARD
    text = (
        f"estimated: only the forward is waited for on the CPU; a backward takes twice as long, so the slow GPU "
        f"costs about {duration(lost)} a step"
    )
    cited = {**lead_params(case, straggler), "first": onset}
    return lost, grown, [evidence(text, queries.LATENESS, cited)]


def lead_params(case: Case, straggler: Straggler) -> dict[str, Any]:
    """Parameters of the query for how much later ranks came than those that they are compared with."""
    late = [*straggler.ranks, *straggler.waiting]
    return {**case.params, "ranks": late, "members": _members(case.lateness, late, straggler.behind)}


def _members(lateness: Lateness | None, ranks: list[int], behind: Sequence[int]) -> list[int]:
    """Ranks that are in communicators with these, but for those that these are behind, if others are left."""
    if lateness is None:
        return ranks
    inside = np.flatnonzero(np.isin(lateness.ranks, ranks))
    together = [members for members, _ in lateness.groups if np.isin(members, inside).any()]
    members = set(lateness.ranks[np.concatenate([inside, *together])].tolist())
    fewer = members - (set(behind) - set(ranks))
    return sorted(fewer if fewer - set(ranks) else members)


def share_out(losses: Sequence[Loss]) -> None:
    """Adds what those that are late may cost more than is seen of each: all of them together do, where there are
    several, for the less late wait in part of the time."""
    seen_ns = sum(loss.loss_ns for loss in losses)
    most_ns = max((loss.loss_ns + loss.grown_ns for loss in losses), default=0.0)
    for loss in losses:
        part = loss.loss_ns / seen_ns if seen_ns else 1 / len(losses)
        loss.loss_ns = part * max(most_ns, seen_ns)


def cpu_action(where: str, phase: str) -> str:
    """What to do about ranks whose CPUs are late.

    Args:
        where: The ranks, in words.
        phase: In which phase of a step, or range of the program; empty: not determined.
    """
    if phase == "checkpoint":
        return (
            f"See why {where} saves checkpoints in steps in which the others do not, and what disk or network it saves "
            "to."
        )
    if phase == "":
        return f"Look at the CPU of {where}: other processes on its cores, affinity, garbage collection, frequency."
    usual = {
        "forward": ": hooks, values that are read back (.item()), work on the CPU between layers.",
        "backward": ": hooks on gradients, values that are read back (.item()).",
        "optimizer": ": a loop over parameters instead of foreach=True or fused=True, norms that are read back "
        "(.item()), states in host memory.",
        "other": " between the marked parts of a step: logging, metrics, callbacks.",
    }
    if phase in usual:
        in_phase = "" if phase == "other" else f" in the {phase}"
        return f"See what the CPU of {where} does{in_phase}{usual[phase]}"
    return (
        f"See what {where} does in {phase_text(phase)} that the others do not, and whether it can do that in fewer "
        "steps or in a thread of its own."
    )


def suspect_of(case: Case, loss: Loss) -> Suspect:
    """The ranks as a suspect."""
    straggler, step_ns = loss.straggler, case.step.now_ns
    names = case.hosts_of(straggler.ranks)
    where = ranks_on(straggler.ranks, names)
    actions = {
        "jit_stall": f"Find what compiles or loads GPU code in every step of {where}: shapes that change, or a cache "
        "(TRITON_CACHE_DIR, CUDA_CACHE_PATH) that it cannot write.",
        "data_loading": f"Look at the data loader of {where}: its workers, prefetching, and the disk or network it "
        "reads from.",
        "kernel_issue_stall": cpu_action(where, loss.cause.phase),
        "compute_straggler": f"Check the GPU of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC) and move "
        "the rank if it stays slow.",
        "link_degradation": COPY_ACTION.format(where=where),
    }
    if loss.cause.kind == "data_loading" and loss.cause.phase == COPIES:
        actions["data_loading"] = (
            f"See what {where} copies to its GPU that the others do not: larger batches, or tensors that stay in host "
            "memory between uses."
        )
    guessed = bool(loss.cause.phase) or not (loss.cause.known or loss.kernels)
    if loss.cause.kind == "compute_straggler" and (guessed or case.on_cpus):
        actions["compute_straggler"] = f"See what {where} does there that the others do not" + (
            ":" if loss.action else f": argus export svg --rank {straggler.ranks[0]} --diff rank=others -o diff.svg."
        )
    certainty = straggler.persistence * (1 - straggler.p_value) * (1.0 if loss.cause.known else UNKNOWN_CAUSE)
    return Suspect(
        kind=loss.cause.kind,
        ranks=list(straggler.ranks),
        hosts=names,
        since=loss.onset,
        last=loss.last,
        phase=loss.phase,
        kernels=loss.kernels,
        lost_ns=loss.loss_ns,
        slowdown=slowdown_of(step_ns, loss.loss_ns),
        confidence=certainty,
        level=loss.level or ("kernel" if loss.kernels else "phase"),
        evidence=loss.evidence,
        action=" ".join(filter(None, [actions.get(loss.cause.kind, ""), loss.action])),
    )
