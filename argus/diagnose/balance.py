"""How work is shared out: stages and data-parallel ranks with more of it than others, and pipelines that wait for work.

None of this is anybody's fault in particular: the job was laid out so. It is told where no slow GPU, CPU or link
explains the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import sql
from argus.diagnose.gpu import ERRORS, LEAST, MIN_STEPS, WINDOWS, GpuTimes, Seen, levels
from argus.diagnose.peers import Mesh
from argus.diagnose.verdict import Evidence, Finding, listed

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LENGTHS, LENGTHS_STAGED = 0.055, 0.0167
"""Share of the step that is lost to batches of different length from which it is told: batches that are packed to
nearly equal length (2 %) cost 64 ranks 5 %. In a pipeline the micro-batches of a step level one another out: what its
sum shows is a third to a half of what is lost, and a third of :data:`argus.diagnose.run.THRESHOLD` is enough."""
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
    params: Mapping[str, object],
    numbers: Int,
    durations: Float,
    hosts: Mapping[int, str],
    threshold: float,
    *,
    fresh: int | None = None,
    chunks: int = 1,
) -> list[Finding]:
    """What the GPUs' times tell of the layout. Arguments as for :func:`argus.diagnose.gpu.judge`; ``fresh``: only what
    was not so before that step; ``chunks``: of a stage, at
    least (:func:`argus.diagnose.links.chunks`).

    Returns:
        At most one finding; ``share`` is what a step is longer for it, in ns.
    """
    now = seen.now.cut(slice(-WINDOWS[1], None))
    if len(now.steps) < MIN_STEPS:
        return []
    step_ns = float(np.median(durations[-WINDOWS[0] :]))
    shown = sql.shown(sql.GPU_TIMES, seen.window)
    last = int(numbers[-1])
    for judged in (_stages, _lengths, partial(_bubble, chunks)):
        if (found := judged(now, seen.mesh, step_ns, threshold)) is None:
            continue
        if fresh is not None:
            before = seen.now if seen.before is None else seen.before
            before = before.cut(slice(0, int(np.searchsorted(before.steps, fresh - BEFORE))))
            if len(before.steps) < MIN_STEPS or not np.array_equal(before.ranks, now.ranks):
                return []
            took = float(np.median(levels(before.step)[0]))
            if judged(before, seen.mesh, took, threshold) is not None:
                return []
        kind, ranks, phase, loss, confidence, texts, action = found
        evidence: list[Evidence] = [{"text": text, "sql": shown} for text in texts]
        return [
            Finding(
                kind=kind,
                ranks=ranks,
                hosts=list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts)),
                steps=[int(numbers[0]), last],
                phase=phase,
                kernels=[],
                slowdown=round(step_ns / max(step_ns - loss, 0.05 * step_ns), 4),
                share=loss,
                confidence=confidence,
                level="phase",
                evidence=evidence,
                action=action,
            )
        ]
    return []


_Found = tuple[str, list[int], str, float, float, list[str], str]


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
    return "stage_imbalance", ranks, "backward", loss, 0.9, texts, action


def _lengths(now: GpuTimes, mesh: Mesh, step_ns: float, threshold: float) -> _Found | None:
    """Batches whose work differs from rank to rank and from step to step."""
    lost, likeness, ranks = [], [], []
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        # Ranks in lockstep have the same batch.
        _, first = np.unique(mesh.lockstep[members], return_index=True)
        one = members[first]
        if len(one) < 2:
            continue
        compute = now.compute[one]
        level = levels(compute)[0][:, None]
        ratio = compute / np.maximum(level, 1.0)
        lost.append(np.nanmean(np.nanmax(ratio, axis=0) - np.nanmean(ratio, axis=0)) * float(np.median(level)))
        both = [now.parts[name][one] for name in ("forward", "backward")]
        moved = [(part / np.maximum(levels(part)[0][:, None], 1.0) - 1).ravel() for part in both]
        known = ~np.isnan(moved[0]) & ~np.isnan(moved[1])
        if known.sum() > 2 and all(part[known].std() > 0 for part in moved):
            likeness.append(float(np.corrcoef(moved[0][known], moved[1][known])[0, 1]))
        ranks += now.ranks[members].tolist()
    if not lost or not likeness:
        return None
    loss, alike = float(np.max(lost)), float(np.median(likeness))
    if loss < (LENGTHS_STAGED if mesh.staged else max(threshold, LENGTHS)) * step_ns or alike < VARIANCE:
        return None
    texts = [
        f"batches differ in work: the longest of a step takes {loss / 1e6:,.1f} ms more than the average one "
        f"({loss / step_ns:.0%} of the step), another rank's each time; forward and backward go together "
        f"(correlation {alike:.2f})"
    ]
    action = (
        "Share sequences out by their length: sort or pack batches so that all data-parallel ranks get as many tokens."
    )
    return "sequence_imbalance", sorted(ranks), "forward", loss, round(min(0.95, alike), 4), texts, action


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
    return "pipeline_bubble", now.ranks.tolist(), "pipeline_bubble", loss, 0.8, texts, action
