"""The mesh: how much slower each worker is than those with the same work, stages by data-parallel ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.query import by_hosts
from argus.model.statistics import low_median
from argus.model.units import duration
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, in_order, panel
from argus.report.panel import Column, Grid, Panel, Sql, Table

ID = "mesh"
TITLE = "Mesh: who is slow"

LEAST = 0.1
"""Slowdown that has the strongest colour at least: 1 % is noise."""

MOST_LANES = 128
"""Workers side by side; a job without stages that has more is drawn node by node."""
LISTED = 20
MOST_CELLS, CELLS_A_RANK = 4096, 8
"""A grid with more of both is mostly empty, as no mesh is: ranks are drawn one after the other."""

_GPU = """
SELECT rank, quantileExactInclusive(0.5)(forward_ns + backward_ns + optimizer_ns + compute_ns + idle_ns) AS own_ns,
       quantileExactInclusive(0.5)(forward_ns + backward_ns + optimizer_ns + compute_ns) AS computing_ns,
       quantileExactInclusive(0.5)(idle_ns) AS nothing_ns
FROM
(
$inner
)
GROUP BY rank ORDER BY own_ns DESC
"""
"""What each GPU does itself in a typical step: computing, and idle time."""

_CPU = by_hosts("""
SELECT rank, quantileExactInclusive(0.5)(own) AS own_ns, quantileExactInclusive(0.5)(own) AS computing_ns,
       toFloat64(0) AS nothing_ns
FROM
(
  SELECT rank, step, toFloat64(sumIf(duration_ns, phase != 'communication')) AS own FROM $phases
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  GROUP BY rank, step
)
GROUP BY rank ORDER BY own_ns DESC
""")
"""The same of training threads: a step without waiting for communication."""

_OPERATIONS = """
SELECT rank, sum(duration_ns) / uniqExact(step) AS own_ns, own_ns AS computing_ns, toFloat64(0) AS nothing_ns
FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND op IN ('forward-compute', 'backward-compute')
GROUP BY rank ORDER BY own_ns DESC
"""


def build(look: Look, arrays: Arrays) -> Panel:
    """Slowdown of each worker: its own time of a typical step over that of the workers with the same work."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen, so ranks cannot be compared step by step")
    rows, sql, source = _own_times(look)
    if len(rows["rank"]) < 2:
        why = "one rank has times of its own, and there is nothing to compare it with"
        none = "neither times of GPUs nor phases of steps are stored: arm the job (argus run …) to have GPU times"
        return absent(ID, TITLE, why if len(rows["rank"]) else none, sql=[sql])
    ranks, order = np.unique(rows["rank"].astype(np.int64), return_index=True)
    own, computing, idle = (rows[name][order].astype(np.float64) for name in ("own_ns", "computing_ns", "nothing_ns"))
    stage, lane = _places(look, ranks)
    usual, usual_own = np.empty(len(ranks)), np.empty(len(ranks))
    for label in np.unique(stage).tolist():
        usual[stage == label] = low_median(computing[stage == label][:, None])[0]
        usual_own[stage == label] = low_median(own[stage == label][:, None])[0]
    # A GPU that computes for longer has less idle time; one that is kept waiting has more.
    excess = np.maximum(computing - usual, own - usual_own)
    slowdown = 1.0 + excess / np.maximum(usual, 1.0)
    row, column, row_names, column_names, titles = _grid(look, ranks, stage, lane)
    cells = np.full((len(row_names), len(column_names)), np.nan)
    details = [[""] * len(column_names) for _ in row_names]
    for at in np.argsort(slowdown, kind="stable").tolist():
        # The slowest of those that share a cell comes last.
        cells[row[at], column[at]] = slowdown[at]
        rest = f", idle for {duration(idle[at])}" if idle[at] else ""
        details[row[at]][column[at]] = (
            f"{look.place.of(int(ranks[at]))}: {slowdown[at]:.2f}x, {duration(computing[at])} a step{rest}; "
            f"usual {duration(usual[at])}"
        )
    view: Grid = {
        "view": "grid", "row_title": titles[0], "column_title": titles[1], "rows": row_names, "columns": column_names,
        "unit": "ratio", "middle": 1.0, "least": LEAST, "cells": arrays.add(cells), "details": details,
    }  # fmt: skip
    folded = " Of ranks that work on one layer together the slowest is shown." if len(ranks) > cells.size else ""
    lead = (
        f"{source}: how much longer than the workers with the same work, over what these compute in a typical "
        f"step.{folded}"
    )
    if look.cost_ns is not None:
        lead += f" It is a worker's own time; what the job loses is the {look.slowdown_text}."
    return panel(ID, TITLE, lead, [view], table=_table(look, ranks, slowdown, computing, idle, usual), sql=[sql])


def _own_times(look: Look) -> tuple[dict[str, NDArray[np.float64]], Sql, str]:
    """Rows of rank, own_ns, computing_ns, nothing_ns; their query; and what the time is."""
    gpu = look.within(_GPU, queries.GPU_TIMES)
    tried = [(gpu, look.newest(), "Computing, or idle, on the GPU")]
    tried += [(_OPERATIONS, look.newest(), "Computing"), (_CPU, look.newest(), "A step without waiting for others")]
    text, asked, source = next((one for one in tried if len(look.read(one[0], **one[1])["rank"])), tried[-1])
    rows = look.read(text, **asked)
    return rows, look.sql(f"{source}, by rank", text, **asked), source


def _places(look: Look, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Stage and data-parallel rank of each rank, shape (ranks,) each."""
    if look.recorded_stages:
        places = np.array([look.recorded_stages.get(rank, (0, 0)) for rank in ranks.tolist()], np.int64)
        return places[:, 0], places[:, 1]
    mesh = look.mesh
    at = np.searchsorted(mesh.ranks, ranks).clip(0, max(len(mesh.ranks) - 1, 0))
    stage = in_order(mesh.stage[at]) if mesh.staged else mesh.stage[at]
    return np.asarray(stage, np.int64), in_order(mesh.replica[at])


def _grid(
    look: Look, ranks: NDArray[np.int64], stage: NDArray[np.int64], lane: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str], list[str], tuple[str, str]]:
    """Row and column of each rank, and the names of both."""
    # Recorded data-parallel ranks may be far apart.
    numbers, lane = np.unique(lane, return_inverse=True)
    lanes = len(numbers)
    stages = len(set(stage.tolist())) if look.stages else 1
    if (look.stages or lanes <= MOST_LANES) and not _sparse(stages, lanes, ranks):
        row = in_order(stage) if look.stages else np.zeros(len(ranks), np.int64)
        row_names = [f"stage {one}" for one in range(int(row.max()) + 1)] if look.stages else ["all"]
        named = "data-parallel rank" if lanes < len(ranks) or look.stages else "rank"
        names = [str(one) for one in (numbers if named != "rank" else ranks).tolist()]
        return row, lane, row_names, names, ("stage" if look.stages else "", named)
    hosts = [look.place.host.get(rank, "") for rank in ranks.tolist()]
    row_of = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    row = np.array([row_of[host] for host in hosts], np.int64)
    column = np.zeros(len(ranks), np.int64)
    seen: dict[str, int] = {}
    for at, host in enumerate(hosts):
        column[at] = seen[host] = seen.get(host, -1) + 1
    if _sparse(len(row_of), int(column.max()) + 1, ranks):
        row, column = np.divmod(np.arange(len(ranks)), MOST_LANES)
        names = [f"from rank {rank}" for rank in ranks[::MOST_LANES].tolist()]
        return row, column, names, [str(one) for one in range(MOST_LANES)], ("", "rank")
    return row, column, list(row_of), [str(one) for one in range(int(column.max()) + 1)], ("node", "rank of the node")


def _sparse(rows: int, columns: int, ranks: NDArray[np.int64]) -> bool:
    return rows * columns > max(MOST_CELLS, CELLS_A_RANK * len(ranks))


def _table(
    look: Look,
    ranks: NDArray[np.int64],
    slowdown: NDArray[np.float64],
    computing: NDArray[np.float64],
    idle: NDArray[np.float64],
    usual: NDArray[np.float64],
) -> Table:
    columns: list[Column] = [
        {"title": "rank", "unit": ""}, {"title": "host", "unit": ""}, {"title": "group", "unit": ""},
        {"title": "slowdown", "unit": "ratio"}, {"title": "computes", "unit": "ns"},
        {"title": "idle", "unit": "ns"}, {"title": "usually computes", "unit": "ns"},
    ]  # fmt: skip
    rows: list[list[str | float | int | None]] = []
    for at in np.argsort(-slowdown, kind="stable")[:LISTED].tolist():
        rank = int(ranks[at])
        rows.append([
            rank, look.place.host.get(rank, ""), look.group(rank), float(slowdown[at]), float(computing[at]),
            float(idle[at]), float(usual[at]),
        ])  # fmt: skip
    return {"columns": columns, "rows": rows, "of": len(slowdown)}
