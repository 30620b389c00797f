"""Who waits for whom in collectives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.peers import between_stages
from argus.diagnose.read.query import by_hosts
from argus.model.units import duration
from argus.report.arrays import Arrays
from argus.report.look import Columns, Look, absent, panel
from argus.report.panel import Column, Grid, Panel, Sql, Table

ID = "waits"
TITLE = "Who waits for whom"

LEAST = 0.05
"""Part of a step that has the strongest colour at least: less than that is no finding either."""

MOST = 16
"""Rows, and columns."""
LISTED = 30
ON_GPUS = "on the GPUs"

_GPU = by_hosts("""
SELECT one.1 AS rank, waited_for, sum(one.2 - least_ns) AS waited_ns, any(steps) AS steps FROM
(
  SELECT step, arrayJoin(arrayZip(groupArray(rank), groupArray(took))) AS one, argMin(rank, took) AS waited_for,
         min(took) AS least_ns, uniqExact(step) OVER () AS steps
  FROM
  (
    SELECT g.rank AS rank, g.step AS step, m.comm_group AS comm_group, g.op AS op,
           toFloat64(sum(g.duration_ns)) AS took
    FROM $gpucollectives AS g
    INNER JOIN ($handles) AS m ON g.rank = m.rank AND g.comm = m.comm
    WHERE g.job = {job:String} AND g.run = {run:UInt32} AND g.step BETWEEN {first:UInt32} AND {last:UInt32}$near
      AND g.op NOT IN ('', 'SendRecv') AND m.comm_group NOT IN {left_out:Array(UInt64)}
    GROUP BY rank, step, comm_group, op
  )
  GROUP BY step, comm_group, op
)
WHERE rank != waited_for
GROUP BY rank, waited_for
ORDER BY waited_ns DESC
""")
"""How long each rank's GPU was in collectives for longer than the rank that came last to them, by that rank. Among
ranks of several stages who comes last shows the order of the stages, and is left out as for the verdict."""

_CPU = """
SELECT one.1 AS rank, waited_for, sum(latest_ns - one.2) AS waited_ns, any(steps) AS steps FROM
(
  SELECT arrayJoin(arrayZip(groupArray(rank), groupArray(t.last_ns))) AS one, argMax(rank, t.last_ns) AS waited_for,
         max(t.last_ns) AS latest_ns, uniqExact(step) OVER () AS steps
  FROM
  (
$inner
  ) AS t
  GROUP BY comm_group, step
)
WHERE rank != waited_for
GROUP BY rank, waited_for
ORDER BY waited_ns DESC
"""
"""The same of calls on the CPU: how much earlier than the last rank each one made the last call of a communicator in a
step."""


def build(look: Look, arrays: Arrays) -> Panel:
    """A grid of ranks, or groups of ranks, that wait, and ranks that are waited for."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen")
    rows, sql, how = _rows(look)
    if not len(rows["rank"]):
        return absent(ID, TITLE, "no collective of two ranks or more whose calls line up was seen", sql=[sql])
    steps = max(int(rows["steps"][0]), 1)
    waiting, late = rows["rank"].astype(np.int64), rows["waited_for"].astype(np.int64)
    spent = rows["waited_ns"].astype(np.float64) / steps
    view = _grid(look, arrays, waiting, late, spent)
    lead = (
        f"Time that ranks wait in collectives of a step for the one that comes last, {how} of {steps} steps. "
        "Columns are who is waited for most. Waits in several communicators add up, also for a rank that itself waits."
    )
    if look.cost_ns is not None:
        hidden = " So do those that computing hides." if how == ON_GPUS else ""
        lead += f"{hidden} What a step loses is the {look.slowdown_text}."
    return panel(ID, TITLE, lead, [view], table=_table(look, late, spent, waiting), sql=[sql])


def _rows(look: Look) -> tuple[Columns, Sql, str]:
    window = look.newest()
    left_out = between_stages(look.read(queries.GROUPS), gpu_times.joined(look.examined.across))
    rows = look.read(_GPU, **window, left_out=left_out)
    if len(rows["rank"]) or "left_out" not in look.params:
        sql = look.sql("Who waits for whom on the GPU", _GPU, **window, left_out=left_out)
        return rows, sql, ON_GPUS
    case = look.case
    if case is not None:
        window["first"] = max(window["first"], int(case.numbers[-case.reach :][0]))
    text = look.within(_CPU, queries.LATENESS)
    return look.read(text, **window), look.sql("Who calls last", text, **window), "by the calls on the CPU"


def _grid(
    look: Look, arrays: Arrays, waiting: NDArray[np.int64], late: NDArray[np.int64], spent: NDArray[np.float64]
) -> Grid:
    columns = _most(late, spent)
    ranks = np.unique(np.concatenate([waiting, late]))
    by_rank = len(ranks) <= MOST
    if by_rank:
        names = [str(rank) for rank in ranks.tolist()]
        label = {rank: number for number, rank in enumerate(ranks.tolist())}
        row = np.array([label[rank] for rank in waiting.tolist()], np.int64)
        members = np.ones(len(names))
    else:
        groups = [look.group(rank) for rank in ranks.tolist()]
        heaviest: dict[str, float] = dict.fromkeys(groups, 0.0)
        group_of = dict(zip(ranks.tolist(), groups, strict=True))
        for rank, value in zip(waiting.tolist(), spent.tolist(), strict=True):
            heaviest[group_of[rank]] += value
        kept = sorted(heaviest, key=lambda name: -heaviest[name])[:MOST]
        names = [name for name in dict.fromkeys(groups) if name in set(kept)]
        place = {name: number for number, name in enumerate(names)}
        row = np.array([place.get(group_of[rank], -1) for rank in waiting.tolist()], np.int64)
        members = np.array([groups.count(name) for name in names], np.float64)
    at = {rank: number for number, rank in enumerate(columns)}
    column = np.array([at.get(rank, -1) for rank in late.tolist()], np.int64)
    cells = np.zeros((len(names), len(columns)))
    shown = (row >= 0) & (column >= 0)
    np.add.at(cells, (row[shown], column[shown]), spent[shown])
    cells /= members[:, None]
    each = "" if by_rank else "a rank of "
    details = [
        [f"{each}{'rank ' if by_rank else ''}{names[r]} waits {duration(cells[r, c])} a step for "
         f"{look.place.of(columns[c])}" for c in range(len(columns))]
        for r in range(len(names))
    ]  # fmt: skip
    step_ns = look.case.recent_ns if look.case is not None else 0.0
    view: Grid = {
        "view": "grid", "row_title": "waiting rank" if by_rank else "waiting: mean of all ranks",
        "column_title": "rank waited for", "rows": names, "columns": [str(rank) for rank in columns], "unit": "ns",
        "middle": None, "least": LEAST * step_ns, "cells": arrays.add(cells), "details": details,
    }  # fmt: skip
    return view


def _most(late: NDArray[np.int64], spent: NDArray[np.float64]) -> list[int]:
    """Who is waited for most, in order of rank."""
    ranks, place = np.unique(late, return_inverse=True)
    whole = np.bincount(place, weights=spent)
    return sorted(int(ranks[at]) for at in np.argsort(-whole, kind="stable")[:MOST])


def _table(look: Look, late: NDArray[np.int64], spent: NDArray[np.float64], waiting: NDArray[np.int64]) -> Table:
    columns: list[Column] = [
        {"title": "waited for", "unit": ""}, {"title": "host", "unit": ""}, {"title": "by ranks", "unit": "count"},
        {"title": "together, a step", "unit": "ns"}, {"title": "a rank that waits, a step", "unit": "ns"},
    ]  # fmt: skip
    ranks, place = np.unique(late, return_inverse=True)
    whole = np.bincount(place, weights=spent)
    rows: list[list[str | float | int | None]] = []
    for at in np.argsort(-whole, kind="stable")[:LISTED].tolist():
        rank = int(ranks[at])
        many = len(np.unique(waiting[place == at]))
        rows.append([rank, look.place.host.get(rank, ""), many, float(whole[at]), float(whole[at] / max(many, 1))])
    return {"columns": columns, "rows": rows, "of": len(ranks)}
