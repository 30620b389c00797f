"""Kernels that became slower on all ranks though they are launched as before: the GPUs, not the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql

STEPS = 20
"""Steps on either side that are compared."""
RANKS = 16
"""Ranks whose kernels are read, at most."""
AS_OFTEN = 0.02
"""By how much launches of a step may differ."""
MOST_TIME = 0.8
"""Share of the kernels' time that must be of kernels that are launched as before, and of those that became slower.
Longer sequences or larger batches have other grids, so that other kernels take their time."""
LAST_STEP = 2**32 - 1
EXPLAINS = 0.5
"""Share of the growth of a step that they must explain; and of their common growth each must have."""

Columns: TypeAlias = "Mapping[str, NDArray[Any]]"


def slower_kernels(
    query: Query, params: Mapping[str, Any], onset: int, ranks: Sequence[int], grown_ns: float
) -> tuple[str, str] | None:
    """Whether the same kernels (name, stream, grid and block), launched as often, explain why steps became longer.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: Of the job.
        onset: The step from which on steps are longer.
        ranks: Ranks of which some are read.
        grown_ns: By how much a step is longer.

    Returns:
        What was found, and the query; None: it is not so, or not known.
    """
    asked = {**params, "ranks": list(ranks[:RANKS])}
    earlier = {**asked, "first": max(params["first"], onset - STEPS), "last": onset - 1}
    later = {**asked, "first": onset, "last": min(params["last"], onset + STEPS - 1)}
    text = slower(query(queries.KERNEL_TIME, earlier), query(queries.KERNEL_TIME, later), grown_ns)
    return None if text is None else (text, runnable_sql(queries.KERNEL_TIME, later))


def slower_than_in(
    query: Query, params: Mapping[str, Any], other: tuple[str, int], ranks: Sequence[int], grown_ns: float
) -> tuple[str, str] | None:
    """The same against another run, of which all steps count that are stored.

    Args:
        query, ranks, grown_ns: As for :func:`slower_kernels`.
        params: Of the job and the steps that are compared.
        other: Job and run.
    """
    asked = {name: params[name] for name in ("job", "run", "first", "last")} | {"ranks": list(ranks[:RANKS])}
    job, run = other
    before = query(queries.KERNEL_TIME, {**asked, "job": job, "run": run, "first": 0, "last": LAST_STEP})
    text = slower(before, query(queries.KERNEL_TIME, asked), grown_ns, f"in run {run}")
    return None if text is None else (text, runnable_sql(queries.KERNEL_TIME, asked))


def slower(before: Columns, now: Columns, grown_ns: float, when: str = "before") -> str | None:
    """:func:`slower_kernels` of rows of :data:`argus.diagnose.read.queries.KERNEL_TIME` before and from then on.
    ``when`` the former were, in words."""
    was, now_is = _each(before), _each(now)
    ranks = {rank for _, rank in now_is} & {rank for _, rank in was}
    whole = sum(often * mean for (_, rank), (often, mean) in now_is.items() if rank in ranks)
    if not ranks or not whole:
        return None
    same = [
        (*now_is[key], was[key][1])
        for key in now_is.keys() & was.keys()
        if key[1] in ranks and abs(now_is[key][0] - was[key][0]) <= AS_OFTEN * was[key][0]
    ]
    if not same:
        return None
    often, mean, usual = np.array(same).T
    longer = float(often @ mean) / max(float(often @ usual), 1.0)
    slow = mean / np.maximum(usual, 1.0) - 1 >= EXPLAINS * (longer - 1)
    share = float((often * mean)[slow].sum()) / whole
    extra_ns = float(often @ (mean - usual)) / len(ranks)
    if share < MOST_TIME or extra_ns < EXPLAINS * grown_ns:
        return None
    return (
        f"the same kernels, with grids and as many launches as {when}, take {longer:.2f} times as long on the "
        f"{len(ranks)} ranks that were compared, {share:.0%} of the kernels' time: rather slower GPUs than more work"
    )


def _each(rows: Columns) -> dict[tuple[int, int], tuple[float, float]]:
    """By kernel and rank: launches of a step, and what one takes, ns."""
    found = {}
    names = ("kernel_id", "rank", "launches", "spent_ns", "steps")
    for kernel, rank, launches, spent, steps in zip(*(rows[name].tolist() for name in names), strict=True):
        if launches and steps:
            found[int(kernel), int(rank)] = float(launches) / float(steps), float(spent) / float(launches)
    return found
