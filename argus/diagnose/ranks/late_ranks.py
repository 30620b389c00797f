"""Ranks that come late to collectives, or whose GPUs their CPUs keep waiting: who of them holds up the others, since
when, why, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import MOST_CALLS, Case, evidence
from argus.diagnose.causes import lost_time
from argus.diagnose.causes.cpu_time import HIDDEN_BACKWARD
from argus.diagnose.causes.lost_time import Loss
from argus.diagnose.ranks import slow_gpus
from argus.diagnose.ranks.lateness import (
    PERSISTENCE,
    Straggler,
    find_onset,
    find_stragglers,
    lead_of,
)
from argus.diagnose.ranks.slow_gpus import SlowGpu
from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.gpu_times import GpuWindow
from argus.diagnose.suspect import Suspect
from argus.model.units import duration, ranks_text

BLOCK = 10
"""Steps that are read at once to see whether ranks were late before them."""


def detect(case: Case) -> list[Suspect]:
    """Ranks that hold up the others, unless the times of GPUs already name those that are the cause
    (:mod:`argus.diagnose.ranks.slow_gpus`); in place of slow GPUs where just these come late."""
    stragglers = _late(case)
    # Ranks whose GPUs lose nothing cost nothing yet: they are reported where nothing else is found.
    case.costless = [straggler for straggler in stragglers if straggler.hidden]
    stragglers = [straggler for straggler in stragglers if not straggler.hidden]
    starved: list[SlowGpu | None] = [None] * len(stragglers)
    if case.gpus is not None:
        least_ns = slow_gpus.LEAST_SHARE * case.recent_ns
        stragglers, starved = kept_waiting(stragglers, case.gpus, least_ns, case.threshold)
    gpus = case.suspects_of("slow_gpus")
    staged = case.gpus is not None and case.gpus.mesh.staged
    losses: list[Loss] = []
    for straggler, slow in zip(stragglers, starved, strict=True):
        loss = _loss(case, straggler, slow, gpus, losses, staged=staged)
        if loss is not None and _counts(case, straggler, slow, loss):
            losses.append(loss)
    lost_time.share_out(losses)
    suspects = []
    for loss in losses:
        if loss.cause.kind == "compute_straggler" and _blames_gpus(loss.straggler, gpus, staged=staged):
            continue
        suspect = lost_time.suspect_of(case, loss)
        # Where just the slow ones came late, what that costs the others is seen better.
        same = [gpu for gpu in gpus if set(gpu.ranks) == set(loss.straggler.ranks)]
        suspects.append(replace(suspect, replaces=tuple(same)))
    return suspects


def _late(case: Case) -> list[Straggler]:
    """Ranks that come late by more than clocks may differ by, as far as the GPUs' own times do not clear them."""
    lateness = case.lateness
    if lateness is None:
        return []
    durations = case.durations
    # Where only the forward is visible, a third of the loss is: the cause decides. What GPUs' own times show counts
    # from less on.
    visible = case.threshold / (1 + HIDDEN_BACKWARD)
    least = visible if case.gpus is None else min(visible, slow_gpus.LEAST_SHARE)
    stragglers = []
    for straggler in find_stragglers(lateness, durations[np.searchsorted(case.numbers, lateness.steps)], least):
        error_ns = case.across.between(*_places(case, straggler)) if case.across is not None else 0
        narrower = narrowed(straggler, case.gpus)
        # What its GPU does itself needs no clock.
        proven = narrower is None or narrower.own or narrower.hidden
        if straggler.gain_ns <= error_ns and not (proven and case.gpus is not None):
            if straggler.gain_ns < visible * float(np.median(durations[-straggler.window :])):
                continue
            case.notes.blurred = (
                f"{ranks_text(straggler.ranks)} came {duration(straggler.gain_ns)} after everybody else, "
                f"less than the clocks of the hosts may differ by ({duration(error_ns)})"
            )
            continue
        if narrower is not None and (straggler.gain_ns > error_ns or narrower.own):
            stragglers.append(narrower)
    return stragglers


def _loss(
    case: Case,
    straggler: Straggler,
    slow: SlowGpu | None,
    gpus: list[Suspect],
    losses: Sequence[Loss],
    *,
    staged: bool,
) -> Loss | None:
    """What ranks cost that come late; None: others explain it.

    Args:
        case: The job.
        straggler: The ranks.
        slow: What their GPUs are kept waiting by; None: not known.
        gpus: Slow GPUs.
        losses: Of other late ranks.
        staged: The job has a pipeline.
    """
    begun = slow_gpus.starved_since(case.gpus, slow) if case.gpus is not None and slow is not None else None
    # Where GPUs are the cause it is reported only if its CPU is: till then since when it is late need not be found.
    left = begun is None and _blames_gpus(straggler, gpus, staged=staged)
    if left and lost_time.explain(case, straggler, gpus[0].since).cause.kind == "compute_straggler":
        return None
    onset = onset_of(case, straggler) if begun is None else begun
    loss = lost_time.explain(case, straggler, onset)
    if begun is None and loss.straggler.ranks != straggler.ranks:
        # Together they come late for longer, if each of them does so only now and then.
        loss = replace(loss, onset=min(onset, onset_of(case, loss.straggler)))
    if any(
        other.cause.kind == "host_contention" and set(loss.straggler.ranks) <= set(other.straggler.ranks)
        for other in losses
    ):
        return None
    clocks = case.across if case.lateness is not None else None
    if clocks is not None and (agreement := clocks.agreement(*_places(case, straggler))):
        loss.evidence.append(evidence(agreement, queries.CLOCKS, case.params))
    return loss


def _counts(case: Case, straggler: Straggler, slow: SlowGpu | None, loss: Loss) -> bool:
    """Whether a loss is large enough. What CPUs keep GPUs waiting for counts from the same share on, whether arrivals
    or the GPUs' times show it."""
    waits = slow is not None or (straggler.own and loss.cause.kind != "compute_straggler")
    least = slow_gpus.LEAST_SHARE if waits else case.threshold
    return loss.loss_ns + loss.grown_ns >= least * float(np.median(case.durations[-straggler.window :]))


def _blames_gpus(straggler: Straggler, gpus: list[Suspect], *, staged: bool) -> bool:
    """Whether late ranks, where their GPUs are the cause, are left to the slow GPUs that were detected.

    The GPUs' own times show better than the order of arrivals who of several late ranks is slow: a late pipeline is
    late on all of its stages. Of pipelines arrivals do not show either what it costs the others: who comes late to a
    stage's collective may be waited for by nobody.
    """
    slow = [set(gpu.ranks) for gpu in gpus if staged or gpu.kind == "compute_straggler"]
    return bool(slow) and (staged or set(straggler.ranks) not in slow)


def narrowed(straggler: Straggler, seen: GpuWindow | None) -> Straggler | None:
    """A straggler without the ranks that only wait for others by the GPUs' own times; None: all of them
    wait, for a rank of their pipeline or of their tensor-parallel peers."""
    if seen is None:
        return straggler
    own, sure = gpu_times.own_lateness(seen)
    late = straggler.ranks + straggler.waiting
    known = np.isin(seen.now.ranks, late)
    most = float(own[known].max(initial=0.0))
    # Of several ranks that are late alike the mean is known better than each.
    steps = gpu_times.by_step(seen.now.cut(slice(-gpu_times.WINDOWS[0], None)), seen.mesh)
    level, error = gpu_times.levels(steps[known].mean(axis=0)[None])
    beyond = sure[known].any() or level[0] > gpu_times.ERRORS * error[0]
    # They were found by the latest of them, who is another one in each step: later than any of them is typically.
    ahead = lead_of(steps, known, ~known)
    latest = max(most, float(np.median(ahead))) if len(ahead) else most
    if beyond and latest >= straggler.gain_ns / 2:
        # Half as late as a typical one of them: the latest of many is late by chance, too.
        typical = float(np.median(own[known & (own >= most / 2)]))
        guilty = tuple(sorted(seen.now.ranks[known & (own >= typical / 2)].tolist()))
        return replace(straggler, ranks=guilty, waiting=tuple(sorted(set(late) - set(guilty))), own=True)
    if known.sum() < len(late):
        return straggler
    together = seen.mesh.replica
    slow = ~known & sure & (own >= straggler.gain_ns / 2)
    if np.isin(together[known], together[slow]).any():
        return None
    return replace(straggler, hidden=True)


def kept_waiting(
    stragglers: list[Straggler], seen: GpuWindow, least_ns: float, threshold: float
) -> tuple[list[Straggler], list[SlowGpu | None]]:
    """Stragglers, and ranks besides whose GPUs their CPUs keep waiting.

    Where all ranks of a stage are kept waiting, who comes last to its collectives is a matter of turns: the others that
    are late themselves by half as much or more are as much the cause.

    Args:
        stragglers: Who comes late.
        seen: What the GPUs did.
        least_ns: What ranks cost a step that count.
        threshold: Share of a step that a stage which is idle by itself costs at least.

    Returns:
        The stragglers; and of each what its GPUs are kept waiting by, if that is known.
    """
    own, _ = gpu_times.own_lateness(seen)
    pairs: list[tuple[Straggler, SlowGpu | None]] = [(one, None) for one in stragglers]
    found = slow_gpus.find_starved(seen.now, seen.mesh, seen.before, threshold)
    idle_stage = slow_gpus.find_idle_stage(seen.now, seen.mesh, threshold)
    if idle_stage is not None and not any(set(one.ranks) & set(idle_stage.ranks) for one in found):
        found.append(idle_stage)
    for slow in found:
        if slow.cost_ns < least_ns:
            continue
        total = len(seen.now.steps)
        window = min(gpu_times.WINDOWS[0] if slow is idle_stage else gpu_times.newest_count(total), total)
        part = [one for one, _ in pairs if set(one.ranks) <= set(slow.ranks)]
        named_ranks = {rank for one in part for rank in one.ranks}
        late = {rank for one, _ in pairs for rank in one.ranks + one.waiting}
        if part:
            typical = float(np.median(own[np.isin(seen.now.ranks, sorted(named_ranks))]))
            alike = np.isin(seen.now.ranks, slow.ranks) & (own >= typical / 2)
            together = tuple(seen.now.ranks[alike].tolist())
            if named_ranks < set(together):
                whole = Straggler(together, slow.cost_ns, slow.persistence, 0.0, window, idle=True)
                pairs = [(whole, slow), *(pair for pair in pairs if pair[0] not in part)]
            else:
                pairs = [(one, slow if one.ranks == slow.ranks else of) for one, of in pairs]
        elif not late & set(slow.ranks):
            idle = Straggler(
                slow.ranks, slow.cost_ns, slow.persistence, 0.0, window, idle=True, whole_stage=slow is idle_stage
            )
            pairs.append((idle, slow))
    return [one for one, _ in pairs], [of for _, of in pairs]


def _places(case: Case, straggler: Straggler) -> tuple[list[str], list[str]]:
    """The hosts of ranks that come late, and those of the others."""
    late = straggler.ranks + straggler.waiting
    compared = case.lateness.ranks.tolist() if case.lateness is not None else []
    here = [case.hosts[rank] for rank in straggler.ranks if rank in case.hosts]
    return here, [case.hosts[rank] for rank in compared if rank not in late and rank in case.hosts]


def onset_of(case: Case, straggler: Straggler) -> int:
    """The step since which a straggler holds the others up."""
    numbers = case.numbers
    cited = lost_time.lead_params(case, straggler)

    def lead(low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """How much later they came than the others in some steps, ns."""
        rows = case.query(queries.LEAD, {**cited, "first": int(numbers[low]), "last": int(numbers[high - 1])})
        kept = np.isin(rows["step"].astype(np.int64), numbers)
        return rows["step"][kept].astype(np.int64), (rows["suspects_ns"] - rows["others_ns"])[kept]

    def not_late(probe: int, high: int) -> bool:
        steps, ahead = lead(probe, min(probe + BLOCK, high))
        return bool(len(steps) and np.mean(ahead >= straggler.gain_ns / 2) < PERSISTENCE)

    low, high = 0, len(numbers)
    if case.calls * high > 8 * MOST_CALLS:
        # Back from the newest steps, farther and farther, until some in which it was not late; then halve.
        far = 2 * BLOCK
        late_from, fine = max(0, high - far), -1
        while late_from > 0 and fine < 0:
            far *= 2
            probe = max(0, high - far)
            fine, late_from = (probe, late_from) if not_late(probe, high) else (fine, probe)
        while fine >= 0 and late_from - fine > 2 * BLOCK:
            probe = (late_from + fine) // 2
            fine, late_from = (probe, late_from) if not_late(probe, high) else (fine, probe)
        if fine < 0:
            return int(numbers[0])
        low, high = fine, min(late_from + 2 * BLOCK, high)
    steps, ahead = lead(low, high)
    since = find_onset(ahead, straggler.gain_ns) if len(steps) else 0
    # Late in all steps in which it could be compared: others may have been seen for longer.
    return int(steps[since]) if since else int(numbers[low])
