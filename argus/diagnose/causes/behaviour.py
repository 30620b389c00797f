"""What behaves differently on suspected ranks: whether their GPUs were kept waiting, and which functions take longer
than on ranks with the same work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from argus.diagnose.case import Case
from argus.diagnose.kernels import issue_latency, patterns
from argus.diagnose.read.gpu_times import WINDOWS, GpuWindow
from argus.diagnose.suspect import Suspect
from argus.model.units import ranks_text

ISSUED = ("compute_straggler", "masked_compute_straggler", "kernel_issue_stall", "host_contention", "gc_pause")
"""Kinds of which it is reported whether the GPU was kept waiting."""
REFERENCES = 16
"""Suspected ranks, and others, that are compared, at most."""


def begin(case: Case, suspects: Sequence[Suspect]) -> None:
    """Begins the queries that :func:`add` will ask."""
    for suspect in suspects:
        if case.gpus is not None and (given := _compared(case.params, suspect, case.gpus)) is not None:
            for text, window in (issue_latency.asked(*given), patterns.asked(*given)):
                case.ahead.start(text, window)


def add(case: Case, suspects: Sequence[Suspect]) -> None:
    """Adds it to what else was found out about suspects, where the GPUs' times are known."""
    for suspect in suspects:
        if case.gpus is None or (given := _compared(case.params, suspect, case.gpus)) is None:
            continue
        waited, sql = issue_latency.against_peers(case.query, *given)
        if waited is not None and (waited.stalled or (waited.busy and suspect.kind.endswith("compute_straggler"))):
            text = waited.text(f"the GPU of {ranks_text(given[1])}", "on others")
            suspect.further.append({"text": text, "sql": sql})
        odd, sql = patterns.explain(case.query, *given)
        suspect.further += [{"text": one.text(), "sql": sql} for one in odd]


def _compared(
    params: dict[str, Any], suspect: Suspect, gpus: GpuWindow
) -> tuple[dict[str, Any], list[int], list[int]] | None:
    """The newest steps of a suspect, its ranks, and some with the same work; None: there is nothing to compare."""
    if not suspect.ranks or suspect.kind not in ISSUED:
        return None
    is_suspect = np.isin(gpus.now.ranks, suspect.ranks)
    same = np.isin(gpus.mesh.stage, gpus.mesh.stage[is_suspect]) & ~is_suspect
    peers = gpus.now.ranks[same].tolist()
    peers = peers[:: max(1, len(peers) // REFERENCES)][:REFERENCES]
    if not peers:
        return None
    steps = gpus.now.steps[-WINDOWS[0] :]
    window = {**params, "first": max(suspect.since, int(steps[0])), "last": int(steps[-1])}
    return window, suspect.ranks[:REFERENCES], peers
