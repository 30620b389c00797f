"""How work is shared out: stages and data-parallel ranks with more of it than others, and pipelines that wait for work.

None of this is anybody's fault in particular: the job was laid out so. It is told where no slow GPU, CPU or link
explains the time. A stage that computes for longer all along may have slow GPUs instead: its kernels tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import single_kernels, sql
from argus.diagnose.gpu import ERRORS, LEAST, LEAST_SHARE, MIN_STEPS, WINDOWS, GpuTimes, Seen, levels
from argus.diagnose.iteration import find_regression
from argus.diagnose.peers import Mesh
from argus.diagnose.verdict import Evidence, Finding, listed, named

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LENGTHS, LENGTHS_STAGED = 0.055, 0.0167
"""Share of the step that is lost to batches of different length from which it is told: batches that are packed to
nearly equal length (2 %) cost 64 ranks 5 %. In a pipeline the micro-batches of a step level one another out: what its
sum shows is a third to a half of what is lost, and a third of :data:`argus.diagnose.run.THRESHOLD` is enough."""
HIDDEN = 3.0
"""What is lost in a pipeline to batches of different length over what its sum shows, at most."""
WIDENED = 1.0
"""Growth of how much batches differ from which on they differ more than before: twice as much. (A job whose lengths
vary does so all along, and stays as it is.)"""
ERRORS_WIDENED = 3.1
"""Standard errors by which steps with more of it must come later: one in 1,000 by chance, of jobs that lose
:data:`argus.diagnose.gpu.LEAST_SHARE` to it, forward and backward alike. Of two batches a step tells little."""
ERRORS_GROWTH = 2.0
"""Standard errors by which steps must be longer since then for that to count as lost: one in 40 by chance."""
VARIANCE = 0.71
"""Correlation of forward and backward from which half of their variance is the work's (as in
argus.diagnose.operations)."""
BEFORE = 5
"""Steps before the first of a regression that may be of it already."""
BATCHES_A_STAGE = 1.5
"""A pipeline with fewer micro-batches a stage than this is said to wait for work. Megatron-LM (SC '21) asks for many
times as many as there are stages; of p stages and m micro-batches (p - 1) / (m + p - 1) of the time is the bubble."""
ENOUGH = 4.0
"""Micro-batches a stage that the loss is told against: a bubble of a fifth."""


def judge(
    seen: Seen,
    query: sql.Query,
    params: Mapping[str, Any],
    numbers: Int,
    durations: Float,
    hosts: Mapping[int, str],
    threshold: float,
    *,
    fresh: int | None = None,
    chunks: int = 1,
) -> list[Finding]:
    """What the GPUs' times tell of the layout. Arguments as for :func:`argus.diagnose.gpu.judge`; ``fresh``: only what
    was not so before that step; ``chunks``: of a stage, at least (:func:`argus.diagnose.links.chunks`).

    Returns:
        At most one finding; ``share`` is what a step is longer for it, in ns.
    """
    now = seen.now.cut(slice(-WINDOWS[1], None))
    if len(now.steps) < MIN_STEPS:
        return []
    step_ns = float(np.median(durations[-WINDOWS[0] :]))
    shown = sql.shown(sql.GPU_TIMES, seen.window)
    lengths = partial(_lengths, _widened(seen, numbers, durations))
    for judged in (_stages, lengths, partial(_bubble, chunks)):
        if (found := judged(now, seen.mesh, step_ns, threshold)) is None:
            continue
        if fresh is not None and found.since is None:
            before = seen.now if seen.before is None else seen.before
            before = before.cut(slice(0, int(np.searchsorted(before.steps, fresh - BEFORE))))
            if len(before.steps) < MIN_STEPS or not np.array_equal(before.ranks, now.ranks):
                return []
            took = float(np.median(levels(before.step)[0]))
            if judged(before, seen.mesh, took, threshold) is not None:
                return []
        first = int(numbers[0]) if fresh is None else fresh
        evidence: list[Evidence] = [{"text": text, "sql": shown} for text in found.texts]
        finding = Finding(
            kind=found.kind,
            ranks=found.ranks,
            hosts=list(dict.fromkeys(hosts[rank] for rank in found.ranks if rank in hosts)),
            steps=[first if found.since is None else found.since, int(numbers[-1])],
            phase=found.phase,
            kernels=[],
            slowdown=round(step_ns / max(step_ns - found.loss_ns, 0.05 * step_ns), 4),
            share=found.loss_ns,
            confidence=found.confidence,
            level="phase",
            evidence=evidence,
            action=found.action,
        )
        if found.kind == "stage_imbalance":
            told = single_kernels.against_stages(query, params, seen.mesh, numbers, found.ranks, found.excess)
            reason = single_kernels.tell_apart(finding, *told, "in other stages")
            if reason == "slower":
                # It should take as long as the others, not all as long as the average of them.
                finding["share"] = min(found.excess_ns, 0.95 * step_ns)
                finding["slowdown"] = round(step_ns / (step_ns - finding["share"]), 4)
            elif not reason and len(found.ranks) == 1:
                _doubt(finding, shown)
        return [finding]
    return []


@dataclass(frozen=True)
class _Found:
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


def _widened(seen: Seen, numbers: Int, durations: Float) -> _Widened | None:
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
    found = []
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        _, first = np.unique(mesh.lockstep[members], return_index=True)
        if len(first) > 1:
            found.append(members[first])
    return found


def _apart(times: GpuTimes, mesh: Mesh) -> Float:
    """By how much the longest batch of each step takes longer than the average one, the mean over the stages, shape
    (steps,), ns; NaN: not known."""
    apart = []
    for one in _batches(mesh):
        level = levels(times.compute[one])[0][:, None]
        ratio = times.compute[one] / np.maximum(level, 1.0)
        apart.append((np.nanmax(ratio, axis=0) - np.nanmean(ratio, axis=0)) * np.median(level))
    return np.asarray(np.nanmean(apart, axis=0)) if apart else np.full(len(times.steps), np.nan)


def _stages(now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float) -> _Found | None:
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
        f"the GPUs of one stage (ranks {listed(ranks)}) compute for {typical[most] / 1e6:,.1f} ms a step, those "
        f"of the other {len(others)} for {usual / 1e6:,.1f} ms ({typical[most] / usual:.2f}x); all of its ranks do"
    ]
    action = "Move layers from this stage to the others, or split the embedding or the loss off it."
    more = float(typical[most]) - usual
    return _Found(
        "stage_imbalance", ranks, "backward", loss, 0.9, texts, action, excess=1 + more / usual, excess_ns=more
    )


def _doubt(finding: Finding, shown: str) -> None:
    """A stage of one rank of whose kernels nothing tells: as of recordings (argus.diagnose.operations)."""
    finding["confidence"] /= 2
    text = "it has no other rank: one whose GPU has been slow for as long would look the same"
    finding["evidence"].append({"text": text, "sql": shown})
    finding["action"] += (
        f" If it has no more layers than they have, check the GPU of {named(finding['ranks'])} (nvidia-smi -q -d "
        "PERFORMANCE,CLOCK,TEMPERATURE,ECC)."
    )


def _lengths(widened: _Widened | None, now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float) -> _Found | None:
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
        f"batches differ in work: the longest of a step takes {loss / 1e6:,.1f} ms more than the average one "
        f"({loss / step_ns:.0%} of the step), another rank's each time; forward and backward go together "
        f"(correlation {alike:.2f})"
    ]
    if widened is not None:
        # What was not so before counts from as little on as a transfer or a GPU that changed.
        least = LEAST_SHARE
        loss = float(np.clip(widened.sure_ns, loss, (HIDDEN if mesh.staged else 1.0) * loss))
        texts.append(
            f"they do since step {widened.since}, and an average step is {widened.growth_ns / 1e6:+,.1f} ms longer"
        )
    if loss < least * step_ns or alike < VARIANCE:
        return None
    action = (
        "Share sequences out by their length: sort or pack batches so that all data-parallel ranks get as many tokens."
    )
    since = None if widened is None else widened.since
    confidence = round(min(0.95, alike), 4)
    return _Found("sequence_imbalance", sorted(ranks), "forward", loss, confidence, texts, action, since)


def _bubble(chunks: int, now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float) -> _Found | None:
    """A pipeline whose stages wait for micro-batches."""
    stages = len(np.unique(mesh.stage))
    if not mesh.staged or stages < 2:
        return None
    # A stage that is through waits in the step's last collectives for the others: where it waits for longer than the
    # stage that does least, that is the pipeline's, too. Passes and bubble are what the micro-batches are told from.
    members = [np.flatnonzero(mesh.stage == label) for label in np.unique(mesh.stage).tolist()]
    inside = levels(now.collective)[0]
    least = min(float(np.median(inside[part])) for part in members)
    waits = levels(now.pipeline)[0] + np.maximum(inside - least, 0.0)
    # What every stage spends in collectives is in its passes (tensor parallelism): more micro-batches would not end it.
    passes = least + sum(levels(now.parts[name])[0] for name in ("forward", "backward", "compute"))
    share = float(np.median(waits / np.maximum(waits + passes, 1.0)))
    few = (stages - 1) / (chunks * BATCHES_A_STAGE * stages + stages - 1)
    if share < few:
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
    return _Found("pipeline_bubble", now.ranks.tolist(), "pipeline_bubble", loss, 0.8, texts, action)
