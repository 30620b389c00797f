"""Phases of a step: where its time goes, on the ranks that findings name and on the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read.query import by_hosts
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, bounded, panel
from argus.report.panel import Column, Panel, Sql, Stacked, StackedRow, Table

ID = "phases"
TITLE = "Phases of a step"

SHOWN = 12
"""Ranks that have a bar of their own: those that findings name, else a job that has no more."""

_CPU = by_hosts("""
SELECT rank, phase, sum(spent) / any(steps) AS mean_ns FROM
(
  SELECT rank, phase, toFloat64(sum(duration_ns)) AS spent FROM $phases
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  GROUP BY rank, phase
) AS p
INNER JOIN
(
  SELECT rank, uniqExact(step) AS steps FROM $phases
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  GROUP BY rank
) AS n ON p.rank = n.rank
GROUP BY rank, phase ORDER BY rank, phase
""")
"""What an average step of each rank consists of, as its training thread saw it."""

_GPU = by_hosts("""
SELECT rank, phase, sum(spent) / any(steps) AS mean_ns FROM
(
  SELECT rank, phase, toFloat64(sum(duration_ns)) AS spent FROM $gpuphases
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  GROUP BY rank, phase
) AS p
INNER JOIN
(
  SELECT rank, uniqExact(step) AS steps FROM $gpuphases
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  GROUP BY rank
) AS n ON p.rank = n.rank
GROUP BY rank, phase ORDER BY rank, phase
""")
"""The same of its GPU."""

ORDER = (
    "data_loading", "forward", "backward", "optimizer", "compute", "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "broadcast", "reduce", "send_recv", "communication", "pipeline_bubble", "memcpy", "checkpoint",
    "idle", "other",
)  # fmt: skip
"""Of parts in a bar: as in a step."""


def build(look: Look, arrays: Arrays) -> Panel:
    """Bars of an average step, on the CPU and on the GPU, as far as they are known."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen, and phases are parts of steps")
    window = look.newest()
    views: list[Stacked] = []
    sql: list[Sql] = []
    listed: list[list[str | float | int | None]] = []
    for where, text in (("CPU", _CPU), ("GPU", _GPU)):
        rows = look.read(text, **window)
        if not len(rows["rank"]):
            continue
        parts, ranks, matrix = _matrix(rows)
        bars = _bars(look, ranks, matrix, where)
        views.append({"view": "stacked", "unit": "ns", "parts": [part.replace("_", " ") for part in parts],
                      "rows": bars})  # fmt: skip
        sql.append(look.sql(f"An average step of each rank, on the {where}", text, **window))
        for number, part in enumerate(parts):
            own = matrix[:, number]
            slow = int(np.argmax(own))
            listed.append([
                where, part.replace("_", " "), *np.quantile(own, (0.05, 0.5, 0.95)).tolist(), float(own[slow]),
                int(ranks[slow]), look.place.host.get(int(ranks[slow]), ""),
            ])  # fmt: skip
    if not views:
        none = "neither PyTorch's marks nor GPU times are stored: arm the job (argus run …) to have GPU times"
        return absent(ID, TITLE, f"phases of its steps are not known: {none}")
    columns: list[Column] = [
        {"title": "of the", "unit": ""}, {"title": "phase", "unit": ""}, {"title": "5 % are below", "unit": "ns"},
        {"title": "median", "unit": "ns"}, {"title": "5 % are above", "unit": "ns"}, {"title": "most", "unit": "ns"},
        {"title": "of rank", "unit": ""}, {"title": "host", "unit": ""},
    ]  # fmt: skip
    table: Table = {"columns": columns, "rows": listed[:50], "of": len(listed)}
    lead = (
        f"An average of steps {window['first']} to {window['last']}: what findings name, and the median of all ranks, "
        "part by part. The table has what 5 % of the ranks are below and above in each part."
    )
    return panel(ID, TITLE, lead, views, table=table, sql=sql)


def _matrix(rows: dict[str, NDArray[np.float64]]) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
    """Phases, ranks, and the mean time of each: shape (ranks, phases), ns; a phase that a rank has not is 0."""
    names = dict.fromkeys(str(one) for one in rows["phase"].tolist())
    parts = sorted(names, key=lambda one: (ORDER.index(one) if one in ORDER else len(ORDER), one))[:24]
    ranks, row = np.unique(rows["rank"].astype(np.int64), return_inverse=True)
    column_of = {name: number for number, name in enumerate(parts)}
    column = np.array([column_of.get(str(one), -1) for one in rows["phase"].tolist()])
    matrix = np.zeros((len(ranks), len(parts)))
    np.add.at(matrix, (row[column >= 0], column[column >= 0]), rows["mean_ns"][column >= 0].astype(np.float64))
    return [bounded(part, 40) for part in parts], ranks, matrix


def _bars(look: Look, ranks: NDArray[np.int64], matrix: NDArray[np.float64], where: str) -> list[StackedRow]:
    named = [rank for rank in look.named[:SHOWN] if rank in set(ranks.tolist())]
    shown = named or (ranks.tolist() if len(ranks) <= 4 else [])
    bars: list[StackedRow] = [
        {
            "title": f"{where}: {look.place.of(rank)}", "named": rank in named,
            "values": [float(value) for value in matrix[int(np.searchsorted(ranks, rank))]],
        }
        for rank in shown
    ]  # fmt: skip
    if len(ranks) > 1:
        # Of a high quantile each part is another rank's: their sum would be a step that no rank has.
        median: list[float | None] = [float(value) for value in np.median(matrix, axis=0)]
        bars.append({"title": f"{where}: median of all ranks", "named": False, "values": median})
    return bars
