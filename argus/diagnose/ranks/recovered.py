"""Ranks that held the job up for a while, by what their own GPUs did, and no longer do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.iteration.regression import RANK_SUM, SEPARATE
from argus.diagnose.iteration.stalls import LONGEST_STALL
from argus.diagnose.ranks.lateness import find_episode
from argus.diagnose.read.gpu_times import MIN_STEPS, GpuWindow, newest_count
from argus.model.statistics import low_median, order_error, row_medians, share_in_order
from argus.model.units import duration, ranks_text

Float = NDArray[np.float64]

EXPLAINED = 0.5
"""Part of what steps took longer that a rank's GPU had to do itself, at least."""


def clause(case: Case) -> str:
    """A clause on the ranks whose GPUs held the job up in several steps in a row, and what that cost; empty: none did,
    or it is not over for :data:`argus.diagnose.read.gpu_times.MIN_STEPS` steps."""
    if case.gpus is None:
        return ""
    both, here, there = np.intersect1d(case.numbers, case.gpus.now.steps, return_indices=True)
    if len(both) < 2 * MIN_STEPS:
        return ""
    durations = case.durations[here]
    extra = durations - float(np.median(durations[-newest_count(len(both)) :]))
    episode = find_episode(extra >= case.threshold * (durations - extra), LONGEST_STALL + 1)
    if episode is None or len(both) - episode[1] < MIN_STEPS:
        return ""
    inside, since = slice(*episode), slice(episode[1], None)
    longer_ns = float(np.median(extra[inside]))
    own = _own_excess(case.gpus, there, since)
    more = row_medians(own[:, inside]) - row_medians(own[:, since])
    places = [
        place
        for place in np.flatnonzero(more >= EXPLAINED * longer_ns).tolist()
        if more[place] >= more.max() / 2 and _in_order(own[place, since], own[place, inside])
    ]
    if not places or 2 * len(places) > len(own):
        return ""
    return (
        f"{ranks_text(case.gpus.now.ranks[places].tolist())} held the job up in steps {both[episode[0]]} to "
        f"{both[episode[1] - 1]}, by {duration(longer_ns)} each "
        f"({float(np.sum(extra[inside])) / float(np.sum(durations)):.0%} of the time), and no longer "
        f"{'does' if len(places) == 1 else 'do'}"
    )


def _own_excess(gpus: GpuWindow, columns: NDArray[np.int64], since: slice) -> Float:
    """By how much each rank's GPU computes or is idle for longer than those with the same work; of a stage's only rank,
    than in the steps since. Shape (ranks, steps), ns."""
    own = (gpus.now.compute + gpus.now.idle)[:, columns]
    for label in np.unique(gpus.mesh.stage).tolist():
        members = np.flatnonzero(gpus.mesh.stage == label)
        alone = len(members) < 2
        own[members] -= row_medians(own[members, since])[:, None] if alone else low_median(own[members])
    return own


def _in_order(well: Float, slow: Float) -> bool:
    """Whether a rank's excess was greater while it was slow, beyond chance, by the limits of regressions."""
    well, slow = well[np.isfinite(well)], slow[np.isfinite(slow)]
    if not len(well) or not len(slow):
        return False
    sure = share_in_order(well, slow)
    return sure >= SEPARATE or sure - 0.5 >= RANK_SUM * order_error(len(well), len(slow))
