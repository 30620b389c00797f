"""How work is shared out: stages and data-parallel ranks with more of it than others, and pipelines that wait for work.

None of this is anybody's fault in particular: the job was laid out so. It is reported where no slow GPU, CPU or link
explains the time. A stage that computes for longer all along may have slow GPUs instead: its kernels show which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case, evidence
from argus.diagnose.iteration.regression import find_regression
from argus.diagnose.kernels import distributions
from argus.diagnose.ranks import stage_links
from argus.diagnose.ranks.slow_gpus import LEAST, LEAST_SHARE
from argus.diagnose.read import queries, transfers
from argus.diagnose.read.gpu_times import ERRORS, MIN_STEPS, WINDOWS, GpuTimes, GpuWindow, levels
from argus.diagnose.read.peers import Mesh
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.model.units import duration, listed, ranks_text

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LENGTHS, LENGTHS_STAGED = 0.055, 0.0167
"""Share of the step that is lost to batches of different length from which it is reported: batches that are packed to
nearly equal length (2 %) cost 64 ranks 5 %. In a pipeline the micro-batches of a step level one another out: what its
sum shows is a third to a half of what is lost, and a third of :data:`argus.diagnose.case.THRESHOLD` is enough."""
HIDDEN = 3.0
"""What is lost in a pipeline to batches of different length over what its sum shows, at most."""
WIDENED = 1.0
"""Growth of how much batches differ from which on they differ more than before: twice as much. (A job whose lengths
vary does so all along, and stays as it is.)"""
ERRORS_WIDENED = 3.1
"""Standard errors by which steps with more of it must come later: one in 1,000 by chance, of jobs that lose
:data:`argus.diagnose.ranks.slow_gpus.LEAST_SHARE` to it, forward and backward alike. Two batches a step show
little."""
ERRORS_GROWTH = 2.0
"""Standard errors by which steps must be longer since then for that to count as lost: one in 40 by chance."""
VARIANCE = 0.71
"""Correlation of forward and backward from which half of their variance is the work's (as in
argus.diagnose.whatif.operations)."""
VARIED = 4
"""One batch in so many, those whose length varies most, are left out to see whether the others differ, too: what only
they are behind is theirs. (:data:`argus.diagnose.ranks.own_times.FEW`; one batch at least.)"""
BY_TURNS = 0.3
"""Share of the loss that must be left without them, and how much one of two batches must vary in terms of the other.
Lengths that vary by chance leave 0.66 among three batches, more among more; what is one GPU's leaves noise."""
BEFORE = 5
"""Steps before the first of a regression that may be of it already."""
BATCHES_A_STAGE = 1.5
"""A pipeline with no more micro-batches a stage than this is reported to wait for work. Megatron-LM (SC '21) asks for
many times as many as there are stages; of p stages and m micro-batches (p - 1) / (m + p - 1) of the time is the
bubble."""
ENOUGH = 4.0
"""Micro-batches a stage that the loss is measured against: a bubble of a fifth."""
MOSTLY = 0.5
"""A pipeline with :data:`BATCHES_A_STAGE` waits for less of its step than this, however many stages it has."""


def detect(case: Case) -> list[Suspect]:
    """What the GPUs' times show of the layout: one suspect at most."""
    if case.gpus is None:
        return []
    chunks = transfers.chunks(case.query, case.params, case.numbers) if case.gpus.mesh.staged else 1
    return suspects_of(case, case.gpus, chunks=chunks)


def suspects_of(case: Case, gpus: GpuWindow, *, fresh: int | None = None, chunks: int = 1) -> list[Suspect]:
    """What the GPUs' times show of the layout.

    Args:
        case: The job.
        gpus: What its GPUs did.
        fresh: Only what was not so before that step; None: all.
        chunks: Of a stage, at least (:func:`argus.diagnose.read.transfers.chunks`).

    Returns:
        One suspect at most.
    """
    now = gpus.now.cut(slice(-WINDOWS[1], None))
    if len(now.steps) < MIN_STEPS:
        return []
    step_ns = float(np.median(case.durations[-WINDOWS[0] :]))
    lengths = partial(_lengths, _widened(gpus, case.numbers, case.durations))
    for find in (_stages, lengths, partial(_bubble, chunks)):
        if (imbalance := find(now, gpus.mesh, step_ns, case.threshold)) is None:
            continue
        if fresh is not None and imbalance.since is None:
            before = gpus.now if gpus.before is None else gpus.before
            before = before.cut(slice(0, int(np.searchsorted(before.steps, fresh - BEFORE))))
            if len(before.steps) < MIN_STEPS or not np.array_equal(before.ranks, now.ranks):
                return []
            took = float(np.median(levels(before.step)[0]))
            if find(before, gpus.mesh, took, case.threshold) is not None:
                return []
        return [_suspect(case, gpus, imbalance, fresh, step_ns)]
    return []


def _suspect(case: Case, gpus: GpuWindow, imbalance: _Imbalance, fresh: int | None, step_ns: float) -> Suspect:
    first = int(case.numbers[0]) if fresh is None else fresh
    suspect = Suspect(
        kind=imbalance.kind,
        ranks=imbalance.ranks,
        hosts=case.hosts_of(imbalance.ranks),
        since=first if imbalance.since is None else imbalance.since,
        last=case.last,
        phase=imbalance.phase,
        lost_ns=imbalance.loss_ns,
        slowdown=slowdown_of(step_ns, imbalance.loss_ns),
        confidence=imbalance.confidence,
        level="phase",
        evidence=[evidence(text, queries.GPU_TIMES, gpus.window) for text in imbalance.texts],
        action=imbalance.action,
    )
    if imbalance.kind != "stage_imbalance":
        return suspect
    launches, sql = distributions.against_stages(
        case.query, case.params, gpus.mesh, case.numbers, imbalance.ranks, imbalance.excess
    )
    reason = distributions.explain_stage(suspect, launches, sql, "in other stages")
    if reason == "slower":
        # It should take as long as the others, not all as long as the average of them.
        suspect.lost_ns = min(imbalance.excess_ns, 0.95 * step_ns)
        suspect.slowdown = step_ns / (step_ns - suspect.lost_ns)
    elif not reason and len(imbalance.ranks) == 1:
        _doubt(suspect, gpus)
    return suspect


@dataclass(frozen=True)
class _Imbalance:
    """Attributes:
    kind, ranks, phase, confidence, action: As of a finding.
    loss_ns: What a step is longer for it.
    texts: Of the evidence.
    since: First step; None: as far back as anything is known.
    excess: Of a stage: how many times as long as the others it computes.
    excess_ns: And how much longer.
    """

    kind: str
    ranks: list[int]
    phase: str
    loss_ns: float
    confidence: float
    texts: list[str]
    action: str
    since: int | None = None
    excess: float = 1.0
    excess_ns: float = 0.0


@dataclass(frozen=True)
class _Widened:
    """Attributes:
    since: Step from which on batches differ more than before.
    growth_ns: What an average step is longer since then.
    sure_ns: What of it is not by chance: steps' lengths scatter where what all have to do varies.
    """

    since: int
    growth_ns: float
    sure_ns: float


def _widened(seen: GpuWindow, numbers: Int, durations: Float) -> _Widened | None:
    """Since when batches differ more than they did; None: all along, or not at all."""
    steps, apart = seen.now.steps, _apart(seen.now, seen.mesh)
    if seen.before is not None and np.array_equal(seen.before.ranks, seen.now.ranks):
        earlier = seen.before.cut(slice(0, int(np.searchsorted(seen.before.steps, steps[0]))))
        if len(earlier.steps):
            steps = np.concatenate([earlier.steps, steps])
            apart = np.concatenate([_apart(earlier, seen.mesh), apart])
    known = apart > 0
    change = find_regression(apart[known], least=WIDENED, errors=ERRORS_WIDENED)
    if change is None:
        return None
    since = int(steps[known][change.index])
    after = numbers >= since
    if after.all() or not after.any():
        return None
    parts = durations[after], durations[~after]
    growth = float(np.mean(parts[0]) - np.mean(parts[1]))
    by_chance = float(np.sqrt(sum(np.var(part) / len(part) for part in parts)))
    return _Widened(since, growth, growth - ERRORS_GROWTH * by_chance)


def _batches(mesh: Mesh) -> list[Int]:
    """Of each stage a rank of each batch: those in lockstep have the same. Stages of two batches or more."""
    columns = []
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        _, first = np.unique(mesh.lockstep[members], return_index=True)
        if len(first) > 1:
            columns.append(members[first])
    return columns


def _apart(times: GpuTimes, mesh: Mesh) -> Float:
    """By how much the longest batch of each step takes longer than the average one, the mean over the stages, shape
    (steps,), ns; NaN: not known."""
    apart = []
    for one in _batches(mesh):
        level = levels(times.compute[one])[0][:, None]
        ratio = times.compute[one] / np.maximum(level, 1.0)
        apart.append((np.nanmax(ratio, axis=0) - np.nanmean(ratio, axis=0)) * np.median(level))
    return np.asarray(np.nanmean(apart, axis=0)) if apart else np.full(len(times.steps), np.nan)


def _by_turns(times: GpuTimes, mesh: Mesh) -> bool:
    """Whether the longest batch is another rank's each time: a GPU that is slow in some steps varies forward and
    backward alike as well, but on its rank alone."""
    left, lost = 0.0, 0.0
    for one in _batches(mesh):
        level = levels(times.compute[one])[0][:, None]
        ratio = times.compute[one] / np.maximum(level, 1.0)
        ratio = ratio[:, ~np.isnan(ratio).any(axis=0)]
        if not ratio.shape[1]:
            continue
        apart = float(np.mean(ratio.max(axis=0) - ratio.mean(axis=0)) * np.median(level))
        lost += apart
        if len(one) == 2:
            low, high = np.sort(ratio.std(axis=1)).tolist()
            left += apart * low / max(high, 1e-9)
            continue
        varied = (ratio - np.median(ratio, axis=0)).std(axis=1)
        rest = ratio[np.argsort(varied, kind="stable")[: len(one) - max(1, len(one) // VARIED)]]
        left += float(np.mean(rest.max(axis=0) - rest.mean(axis=0)) * np.median(level))
    return left >= BY_TURNS * lost


def _stages(now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float) -> _Imbalance | None:
    """A stage that computes for longer than the others."""
    labels = np.unique(mesh.stage)
    if not mesh.staged or len(labels) < 2:
        return None
    level, error = levels(now.compute)
    members = [np.flatnonzero(mesh.stage == label) for label in labels.tolist()]
    typical = np.array([np.median(level[part]) for part in members])
    unsure = np.array([np.median(error[part]) for part in members])
    most = int(typical.argmax())
    others = np.delete(typical, most)
    usual = float(np.median(others))
    loss = float(typical[most] - typical.mean())
    if typical[most] < (1 + LEAST) * usual or loss < threshold * step_ns:
        return None
    if typical[most] - usual < ERRORS * float(np.hypot(unsure[most], np.median(np.delete(unsure, most)))):
        return None
    ranks = now.ranks[members[most]].tolist()
    texts = [
        f"the GPUs of one stage (ranks {listed(ranks)}) compute for {duration(typical[most])} a step, those "
        f"of the other {len(others)} for {duration(usual)} ({typical[most] / usual:.2f}x); all of its ranks do"
    ]
    action = "Move layers from this stage to the others, or split the embedding or the loss off it."
    more = float(typical[most]) - usual
    return _Imbalance(
        "stage_imbalance", ranks, "backward", loss, 0.9, texts, action, excess=1 + more / usual, excess_ns=more
    )


def _doubt(suspect: Suspect, gpus: GpuWindow) -> None:
    """A stage of one rank of whose kernels nothing is known: as of recordings (argus.diagnose.whatif.operations)."""
    suspect.confidence /= 2
    text = "it has no other rank: one whose GPU has been slow for as long would look the same"
    suspect.further.append(evidence(text, queries.GPU_TIMES, gpus.window))
    suspect.action += (
        f" If it has no more layers than they have, check the GPU of {ranks_text(suspect.ranks)} (nvidia-smi -q -d "
        "PERFORMANCE,CLOCK,TEMPERATURE,ECC)."
    )


def _lengths(
    widened: _Widened | None, now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float
) -> _Imbalance | None:
    """Batches whose work differs from rank to rank and from step to step. ``widened``: more than before."""
    if widened is not None:
        now = now.cut(slice(int(np.searchsorted(now.steps, widened.since)), None))
    likeness, ranks = [], []
    for one in _batches(mesh):
        both = [now.parts[name][one] for name in ("forward", "backward")]
        moved = [(part / np.maximum(levels(part)[0][:, None], 1.0) - 1).ravel() for part in both]
        known = ~np.isnan(moved[0]) & ~np.isnan(moved[1])
        if known.sum() > 2 and all(part[known].std() > 0 for part in moved):
            likeness.append(float(np.corrcoef(moved[0][known], moved[1][known])[0, 1]))
        ranks += now.ranks[mesh.stage == mesh.stage[one[0]]].tolist()
    apart = _apart(now, mesh)
    if not likeness or np.isnan(apart).all():
        return None
    loss, alike = float(np.nanmean(apart)), float(np.median(likeness))
    least = LENGTHS_STAGED if mesh.staged else max(threshold, LENGTHS)
    texts = [
        f"batches differ in work: the longest of a step takes {duration(loss)} more than the average one "
        f"({loss / step_ns:.0%} of the step), another rank's each time; forward and backward go together "
        f"(correlation {alike:.2f})"
    ]
    if widened is not None:
        # What was not so before counts from as little on as a transfer or a GPU that changed.
        least = LEAST_SHARE
        loss = float(np.clip(widened.sure_ns, loss, (HIDDEN if mesh.staged else 1.0) * loss))
        texts.append(
            f"they do since step {widened.since}, and an average step is {duration(widened.growth_ns, signed=True)} "
            "longer"
        )
    if loss < least * step_ns or alike < VARIANCE or not _by_turns(now, mesh):
        return None
    action = (
        "Share sequences out by their length: sort or pack batches so that all data-parallel ranks get as many tokens."
    )
    since = None if widened is None else widened.since
    confidence = round(min(0.95, alike), 4)
    return _Imbalance("sequence_imbalance", sorted(ranks), "forward", loss, confidence, texts, action, since)


def _bubble(chunks: int, now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float) -> _Imbalance | None:
    """A pipeline whose stages wait for micro-batches."""
    stages = len(np.unique(mesh.stage))
    if not mesh.staged or stages < 2:
        return None
    share = _waiting(now, mesh)
    if share <= 0 or _micro_batches(share, stages, chunks) > BATCHES_A_STAGE * stages:
        return None
    best = (stages - 1) / (chunks * ENOUGH * stages + stages - 1)
    loss = (share - best) * step_ns
    if loss < threshold * step_ns:
        return None
    texts = [
        f"the GPUs wait for other stages for {share:.0%} of the time of their passes; {stages} stages with {ENOUGH:g} "
        f"micro-batches each would wait for {best:.0%}"
    ]
    action = "Split the batch into more micro-batches, or interleave stages (virtual pipeline)."
    return _Imbalance("pipeline_bubble", now.ranks.tolist(), "pipeline_bubble", loss, 0.8, texts, action)


def _waiting(now: GpuTimes, mesh: Mesh) -> float:
    """Share of the time of their passes for which stages wait for others, the median over the ranks.

    A stage that is through waits in the step's last collectives for the others: where it waits for longer than the
    stage that does least, that is the pipeline's, too.
    """
    members = [np.flatnonzero(mesh.stage == label) for label in np.unique(mesh.stage).tolist()]
    inside = levels(now.collective)[0]
    least = min(float(np.median(inside[part])) for part in members)
    waits = levels(now.pipeline - now.transfer)[0] + np.maximum(inside - least, 0.0)
    # What every stage spends in collectives is in its passes (tensor parallelism): more micro-batches would not end it.
    passes = least + sum(levels(now.parts[name])[0] for name in ("forward", "backward", "compute"))
    return float(np.median(waits / np.maximum(waits + passes, 1.0)))


def _micro_batches(share: float, stages: int, chunks: int) -> int:
    """Of a step, inferred from how long stages wait."""
    return round((stages - 1) * (1 / share - 1) / chunks)


def stages_alike(case: Case) -> str:
    """Where each stage of a pipeline is one rank, with nobody to compare it with but the other stages: that these
    compute and idle equally long, hand data on equally fast, and wait for one another as their micro-batches make them,
    in words. Empty: they do not, or it is not known; stages have more ranks."""
    if case.gpus is None or not case.gpus.mesh.staged or set(case.gpus.now.ranks.tolist()) != set(case.hosts):
        return ""
    mesh, now = case.gpus.mesh, case.gpus.now.cut(slice(-WINDOWS[1], None))
    stages = len(np.unique(mesh.stage))
    share = _waiting(now, mesh)
    if stages < len(mesh.stage) or len(now.steps) < MIN_STEPS or share <= 0:
        return ""
    compute, idle = levels(now.compute)[0], levels(now.idle)[0]
    step_ns = float(np.median(levels(now.step)[0]))
    if np.ptp(compute) > LEAST * float(np.median(compute)) or np.ptp(idle) > case.threshold * step_ns:
        return ""
    if not stage_links.all_alike(case, case.gpus):
        return ""
    count = _micro_batches(share, stages, 1)
    return (
        f"each stage is one rank: they compute for {duration(compute.min())} to {duration(compute.max())} a "
        f"step, none is idle for longer than the others, transfers between them take equally long, and they wait for "
        f"one another as with {count} micro-batches"
    )


def unknown_partners(case: Case) -> str:
    """Why a job that waits for sends and receives most of the time cannot be judged: between whom they are is not
    known, and so neither are its stages. Empty: it does not, or it is known."""
    if case.gpus is None or case.gpus.mesh.staged:
        return ""
    now = case.gpus.now.cut(slice(-WINDOWS[1], None))
    share = float(np.median(levels(now.pipeline)[0] / np.maximum(levels(now.step)[0], 1.0)))
    if share < MOSTLY:
        return ""
    return (
        f"GPUs wait for sends and receives for {share:.0%} of a step, and between which ranks those are is not known: "
        "a pipeline of few micro-batches, or a slow link"
    )
