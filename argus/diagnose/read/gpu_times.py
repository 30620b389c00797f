"""What GPUs did in some steps: matrices of ranks and steps, and which ranks have the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.peers import Mesh, mesh_of
from argus.diagnose.read.query import Query
from argus.model.statistics import MEDIAN_ERROR, low_median, row_medians

Float = NDArray[np.float64]
Int = NDArray[np.int64]

ERRORS = 5.0
"""Standard errors that an excess must be above 0."""
PAST = (50, 20, 10)
"""First steps that the newest are compared with: fewer of them, too, in case that the rest were slow already."""
COMPUTES = ("forward", "backward", "optimizer", "compute")
SPANS = ("collective", "pipeline", "transfer", "idle", "step")
"""What else is known of each step."""
MIN_STEPS = 10
MOST_VALUES = 250_000
"""Steps of ranks that are read at once: some 100 bytes each on the way, and a sixth of a second."""
WINDOWS = (20, 50, 130, 250)
"""Newest steps that are compared: ever more, until all that is slow is sure."""
FIRST = 50
"""First steps that ranks are compared with where they have no peers."""
FEWEST = 12
"""Steps that are enough to estimate what a rank, or a link, of a very large job usually takes."""


@dataclass(frozen=True)
class GpuTimes:
    """What GPUs did in some steps, in ns; NaN where nothing is known.

    Attributes:
        ranks: Ascending, shape (ranks,).
        steps: Ascending, shape (steps,).
        parts: By phase (:data:`COMPUTES`), shape (ranks, steps).
        compute: All of them together, shape (ranks, steps).
        collective: Only collectives ran, shape (ranks, steps).
        pipeline: Only sends and receives ran, or it waited for them, shape (ranks, steps).
        transfer: The part of that in which data were on their way, shape (ranks, steps).
        idle: It was idle, or waited for data, shape (ranks, steps).
        step: The step on the GPU, shape (ranks, steps).
        kernels: Kernels of a step, the median over the steps, shape (ranks,).
    """

    ranks: Int
    steps: Int
    parts: dict[str, Float]
    compute: Float
    collective: Float
    pipeline: Float
    transfer: Float
    idle: Float
    step: Float
    kernels: Int

    def cut(self, kept: slice | NDArray[np.bool_]) -> GpuTimes:
        """Some of the steps."""
        parts = {name: values[:, kept] for name, values in self.parts.items()}
        spans = {name: getattr(self, name)[:, kept] for name in ("compute", *SPANS)}
        return replace(self, steps=self.steps[kept], parts=parts, **spans)


def times_of(columns: Mapping[str, NDArray[Any]], steps: Int | None = None) -> GpuTimes:
    """Arranges the rows of :data:`argus.diagnose.read.queries.GPU_TIMES` as matrices. ``steps``: those to keep; None:
    all."""
    kept = np.ones(len(columns["rank"]), np.bool_) if steps is None else np.isin(columns["step"], steps)
    ranks, row = np.unique(columns["rank"][kept].astype(np.int64), return_inverse=True)
    numbers, column = np.unique(columns["step"][kept].astype(np.int64), return_inverse=True)

    def matrix(name: str) -> Float:
        values = np.full((len(ranks), len(numbers)), np.nan)
        values[row, column] = columns[name][kept]
        return values

    parts = {phase: matrix(f"{phase}_ns") for phase in COMPUTES}
    compute = np.sum(list(parts.values()), axis=0)
    kernels = row_medians(matrix("kernels")).astype(np.int64) if len(numbers) else np.zeros(len(ranks), np.int64)
    spans = {name: matrix(f"{name}_ns") for name in SPANS}
    return GpuTimes(ranks, numbers, parts, compute, kernels=kernels, **spans)


def levels(values: Float) -> tuple[Float, Float]:
    """Median over the steps and its standard error, shape (ranks,) each."""
    level = row_medians(values)
    scatter = row_medians(np.abs(values - level[:, None]))
    count = np.maximum(np.sum(~np.isnan(values), axis=1), 1)
    return level, MEDIAN_ERROR * scatter / np.sqrt(count)


def usual_compute(times: GpuTimes, mesh: Mesh) -> Float:
    """The low median of the compute time of the ranks of each stage, by step, shape (ranks, steps)."""
    usual = np.empty_like(times.compute)
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        usual[members] = low_median(times.compute[members])
    return usual


def own_excess(now: GpuTimes, mesh: Mesh) -> tuple[Float, Float, NDArray[np.bool_]]:
    """By how much each rank's GPU computes longer, and is idle for longer, than those with the same work, in
    the newest steps: shape (ranks,) each, ns; and whether the two together are beyond chance. What it waits for other
    ranks is in neither; so of ranks that are late together it shows which one the others wait for. Time with nothing to
    do has a noise of its own, and where it is most of the two, it is enough that it is beyond chance itself."""
    recent = now.cut(slice(-WINDOWS[0], None))
    out = []
    for values in (recent.compute, recent.idle):
        more = np.zeros(values.shape)
        for label in np.unique(mesh.stage).tolist():
            members = np.flatnonzero(mesh.stage == label)
            more[members] = values[members] - low_median(values[members])
        out.append(more)
    level, error = levels(out[0] + out[1])
    idle, idle_error = levels(out[1])
    sure = (level >= ERRORS * error) | ((idle > ERRORS * idle_error) & (idle >= level / 2))
    return row_medians(out[0]), idle, sure


def own_lateness(seen: GpuWindow) -> tuple[Float, NDArray[np.bool_]]:
    """By how much each rank's GPU is late itself in the newest steps, computing or idle: longer than
    the ranks with the same work, or than itself at first (all of a stage may be late). Shape (ranks,) each, ns; and
    whether that is beyond chance."""
    compute, idle, sure = own_excess(seen.now, seen.mesh)
    own = compute + idle
    if seen.before is not None and np.array_equal(seen.before.ranks, seen.now.ranks):
        recent = seen.now.cut(slice(-newest_count(len(seen.now.steps)), None))
        first = seen.before.cut(slice(0, PAST[-1]))
        level, error = levels(recent.compute + recent.idle)
        was, was_error = levels(first.compute + first.idle)
        own = np.maximum(own, level - was)
        sure = sure | (level - was >= ERRORS * np.hypot(error, was_error))
    return own, sure


def by_step(now: GpuTimes, mesh: Mesh) -> Float:
    """By how much each rank's GPU computes or is idle for longer than the low median of those with the same
    work, in each step; and of its stage's only rank, than its own typical step. Shape (ranks, steps), ns."""
    own = now.compute + now.idle
    more = np.full(own.shape, np.nan)
    for label in np.unique(mesh.stage).tolist():
        members = np.flatnonzero(mesh.stage == label)
        values = own[members]
        more[members] = values - (low_median(values) if len(members) > 1 else row_medians(values)[:, None])
    return more


@dataclass(frozen=True)
class GpuWindow:
    """What the GPUs of a job did.

    Attributes:
        now: In the newest steps.
        before: In the first ones; None: there are not enough besides.
        mesh: Of the ranks of ``now``.
        window: Parameters of the query that ``now`` comes from.
    """

    now: GpuTimes
    before: GpuTimes | None
    mesh: Mesh
    window: dict[str, Any]


def read(query: Query, params: Mapping[str, Any], numbers: Int, ranks: int, across: Hosts | None) -> GpuWindow | None:
    """Reads what the GPUs of a job did; None: of fewer than :data:`MIN_STEPS` of the newest steps it is known.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Sure steps, ascending, shape (steps,).
        ranks: How many there are, roughly.
        across: How the hosts go together; None: it is one.
    """
    window, *past = windows(params, numbers, ranks)

    def of(asked: dict[str, Any]) -> GpuTimes:
        kept = numbers[(numbers >= asked["first"]) & (numbers <= asked["last"])]
        return times_of(query(queries.GPU_TIMES, asked), kept)

    now = of(window)
    before = of(past[0]) if past else None
    if len(now.steps) < MIN_STEPS:
        return None
    mesh = mesh_of(query(queries.GROUPS, params), now.ranks, now.kernels, joined(across))
    return GpuWindow(now, before, mesh, window)


def windows(params: Mapping[str, Any], numbers: Int, ranks: int) -> list[dict[str, Any]]:
    """Parameters of the steps that :func:`read` reads: the newest, and the first if there are enough besides."""
    newest = numbers[-int(np.clip(MOST_VALUES // max(ranks, 1), WINDOWS[0], WINDOWS[-1])) :]
    first = first_steps(numbers)[: int(np.clip(MOST_VALUES // (2 * max(ranks, 1)), FEWEST, len(newest)))]
    return [{**params, "first": int(some[0]), "last": int(some[-1])} for some in (newest, first) if len(some)]


def newest_count(total: int) -> int:
    """How many of the newest steps show what a job does now: fewer where the others would be too few to compare them
    with."""
    return WINDOWS[0] if total >= WINDOWS[0] + MIN_STEPS else MIN_STEPS


def first_steps(numbers: Int) -> Int:
    """The steps that the newest are compared with; none where there are too few besides."""
    first = numbers[: max(0, min(FIRST, len(numbers) - newest_count(len(numbers))))]
    return first if len(first) >= MIN_STEPS else first[:0]


def all_compared(seen: GpuWindow, ranks: set[int]) -> bool:
    """Whether each of these ranks is compared with others of the same work by what its own GPU did, for which no clock
    has to agree with another."""
    _, many = np.unique(seen.mesh.stage, return_counts=True)
    return ranks <= set(seen.now.ranks.tolist()) and bool(len(many)) and int(many.min()) > 1


def joined(across: Hosts | None) -> dict[tuple[str, int], int]:
    """The number that each communicator has on all hosts, by (host, number on that host)."""
    if across is None:
        return {}
    return {(join.host, join.comm_group): join.joined_group for join in across.joins if not join.error}
