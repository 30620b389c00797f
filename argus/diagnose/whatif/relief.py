"""What a step would take if what was found were not so, where the step can be rebuilt from what the GPUs did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from argus.diagnose.case import Case
from argus.diagnose.causes.copies import COPIES
from argus.diagnose.ranks.links import SlowLinkSuspect
from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import MIN_STEPS, GpuWindow
from argus.diagnose.read.query import runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.whatif import dependencies, operations, rebuild
from argus.diagnose.whatif.rebuild import Rebuilt
from argus.model.units import duration, ranks_text


def add(case: Case, suspects: Sequence[Suspect], step_ns: float) -> tuple[dict[str, Any] | None, float]:
    """Adds it to what else was found out about suspects. What one costs is that, from then on: one number for one loss.
    The rebuilt step knows what others hide of a rank's lateness.

    Args:
        case: The job.
        suspects: Changed in place.
        step_ns: What a step takes. The rebuilt one is off by some percent; what a suspect costs is in proportion to it.

    Returns:
        The ``whatif`` of the verdict (None: the step cannot be rebuilt); and what the suspects cost less than was
        estimated, ns: a transfer that waits for another stage anyway costs nothing.
    """
    if case.gpus is None or (carried := case.transfers) is None:
        return None, 0.0
    gpus = _recently(case, case.gpus)
    rebuilt = rebuild.read(case.query, case.params, gpus, carried.now, carried.dimensions)
    if rebuilt is None:
        return None, 0.0
    # Of several that are late in the same steps each alone would gain little: what they cost was shared out before.
    several = sum(bool(suspect.ranks) and not _between_ranks(suspect) for suspect in suspects) > 1
    dearer = 0.0
    for suspect in suspects:
        if suspect.ranks:
            dearer += _relieved(case, gpus, rebuilt, suspect, step_ns, several=several)
    return operations.in_verdict(dependencies.answer(rebuilt.model)), dearer


def _recently(case: Case, gpus: GpuWindow) -> GpuWindow:
    """What the GPUs did since all costs what it does, as far as these steps are enough."""
    since = gpus.now.steps >= case.recently(case.changed)[0]
    return replace(gpus, now=gpus.now.cut(since)) if np.sum(since) >= MIN_STEPS else gpus


def _relieved(
    case: Case, gpus: GpuWindow, rebuilt: Rebuilt, suspect: Suspect, step_ns: float, *, several: bool
) -> float:
    """Adds what a step would take without one suspect; returns what that costs less than was estimated, ns."""
    carried = case.transfers
    assert carried is not None
    name, one = ranks_text(suspect.ranks), len(suspect.ranks) == 1
    if _between_ranks(suspect):
        if not isinstance(suspect, SlowLinkSuspect):
            return 0.0
        now, *would = rebuild.unburdened_ns(rebuilt, gpus, carried.now, suspect.unburdened, carried.dimensions)
        supposed = f"transfers of {name} took what is usual"
        sql = runnable_sql(queries.TRANSFERS, carried.window)
        cheaper = now - would[0] < suspect.lost_ns
    else:
        relieved = rebuild.relieved_ns(rebuilt.model, rebuilt.workers, suspect.ranks)
        if relieved is None:
            return 0.0
        (now, *would), sql = relieved, runnable_sql(queries.GPU_TIMES, gpus.window)
        supposed = f"{name}{' alone' if several else ''} took as long as {'its' if one else 'their'} peers"
        cheaper = not several and suspect.lost_ns > 0 and would[0] < now
    before_ns = suspect.lost_ns
    if cheaper:
        suspect.lost_ns = step_ns * max(1 - would[0] / now, 0.0)
        suspect.slowdown = step_ns / (step_ns - suspect.lost_ns)
    range_ns = dict.fromkeys(duration(ns) for ns in would)
    text = f"if {supposed}, a step would take {' to '.join(range_ns)} instead of {duration(now)}"
    suspect.further.append({"text": text, "sql": sql})
    return before_ns - suspect.lost_ns


def _between_ranks(suspect: Suspect) -> bool:
    """Whether what is slow is a link between ranks: one of a rank's copies delays what it does itself."""
    return suspect.kind == "link_degradation" and suspect.phase != COPIES
