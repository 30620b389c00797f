"""Step times: the median, its band, the ranks that findings name, and where something changed."""

from __future__ import annotations

import numpy as np

from argus.diagnose.iteration.against_baseline import MIN_RUNS
from argus.diagnose.read.query import ITERATIONS, by_hosts
from argus.model.units import duration
from argus.report.arrays import Arrays
from argus.report.look import Columns, Look, absent, panel
from argus.report.panel import Column, Line, Panel, Series, Table

ID = "steps"
TITLE = "Step times"

POINTS = 1_000
"""Of longer runs neighbouring steps share a point."""
LINES = 6
"""Ranks that have a line of their own."""
LEAST_BEFORE = 10
"""Steps before a change that make a baseline."""
LISTED = 20

_SPREAD = by_hosts(f"""
SELECT intDiv(step - {{first:UInt32}}, {{width:UInt32}}) AS place, toInt64(min(step)) AS from_step,
       arrayElement(quantilesExactInclusive(0.05, 0.5, 0.95)(duration_ns) AS q, 1) AS low_ns, q[2] AS median_ns,
       q[3] AS high_ns, toFloat64(max(duration_ns)) AS longest_ns, argMax(rank, duration_ns) AS slowest_rank
FROM {ITERATIONS}
GROUP BY place ORDER BY place
""")
"""How long steps take over all ranks."""

_OF_RANKS = by_hosts(f"""
SELECT rank, intDiv(step - {{first:UInt32}}, {{width:UInt32}}) AS place, toFloat64(max(duration_ns)) AS longest_ns
FROM {ITERATIONS} AND rank IN {{ranks:Array(UInt32)}}
GROUP BY rank, place ORDER BY rank, place
""")


def build(look: Look, arrays: Arrays) -> Panel:
    """Step times over steps."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen; `argus trace --steps 60` records some")
    count = look.steps[1] - look.steps[0] + 1
    width = -(-count // POINTS)
    rows = look.read(_SPREAD, width=width)
    if not len(rows["place"]):
        return absent(ID, TITLE, "no step of any rank is stored")
    median = rows["median_ns"].astype(np.float64)
    lines: list[Line] = [
        {"title": "median of the ranks", "role": "typical", "y": arrays.add(median)},
        {"title": "5 % are shorter", "role": "low", "y": arrays.add(rows["low_ns"])},
        {"title": "5 % are longer", "role": "high", "y": arrays.add(rows["high_ns"])},
    ]
    ranks = look.named[:LINES]
    sql = [look.sql("Step times over all ranks", _SPREAD, width=width)]
    if ranks:
        own = look.read(_OF_RANKS, width=width, ranks=ranks)
        sql.append(look.sql("Step times of the ranks that findings name", _OF_RANKS, width=width, ranks=ranks))
        for rank in ranks:
            kept = own["rank"] == rank
            values = np.full(len(median), np.nan, np.float32)
            at = np.searchsorted(rows["place"], own["place"][kept])
            values[at] = own["longest_ns"][kept]
            lines.append({"title": look.place.of(rank), "role": "named", "y": arrays.add(values)})
    before = _before(look)
    earlier = median[rows["from_step"].astype(np.int64) < before] if before is not None else median[:0]
    if len(earlier) >= LEAST_BEFORE and before is not None:
        usual = np.full(len(median), np.median(earlier), np.float32)
        lines.append({"title": f"usual before step {before}", "role": "baseline", "y": arrays.add(usual)})
    lines += _healthy_runs(look, arrays, len(median))
    view: Series = {
        "view": "series", "x_title": "step", "x_unit": "count", "x": arrays.add(rows["from_step"], "f8"),
        "y_title": "step time", "y_unit": "ns", "lines": lines, "marks": look.marks,
    }  # fmt: skip
    lead = "The median of all ranks and the band in which 90 % of them lie."
    if width > 1:
        lead += f" Each point is {width} steps; of named ranks the longest of them."
    if look.cost_ns is not None:
        takes, lost = map(duration, look.cost_ns)
        lead += f" A step now takes {takes}, of which {lost} are lost: the {look.slowdown_text}."
    if look.marks:
        lead += " Marks: " + "; ".join(f"step {mark['step']}: {mark['text']}" for mark in look.marks[:6]) + "."
    return panel(ID, TITLE, lead, [view], table=_table(look, rows), sql=sql)


def _healthy_runs(look: Look, arrays: Arrays, count: int) -> list[Line]:
    """A line for the runs that this one is compared with; empty: too few are known."""
    known = look.case.baseline if look.case is not None else None
    if known is None or len(known.runs) < MIN_RUNS:
        return []
    mean = float(np.mean([run.step.value for run in known.runs]))
    title = f"{len(known.runs)} healthy runs of this job class"
    return [{"title": title, "role": "baseline", "y": arrays.add(np.full(count, mean, np.float32))}]


def _before(look: Look) -> int | None:
    """The step before which the job was as usual; None: nothing changed."""
    return min((mark["step"] for mark in look.marks if mark["kind"] != "note"), default=None)


def _table(look: Look, rows: Columns) -> Table:
    columns: list[Column] = [
        {"title": "from step", "unit": ""}, {"title": "median", "unit": "ns"}, {"title": "longest", "unit": "ns"},
        {"title": "of rank", "unit": ""}, {"title": "host", "unit": ""},
    ]  # fmt: skip
    order = np.argsort(-rows["longest_ns"].astype(np.float64), kind="stable")[:LISTED]
    listed: list[list[str | float | int | None]] = []
    for at in order.tolist():
        rank = int(rows["slowest_rank"][at])
        listed.append([
            int(rows["from_step"][at]), float(rows["median_ns"][at]), float(rows["longest_ns"][at]), rank,
            look.place.host.get(rank, ""),
        ])  # fmt: skip
    return {"columns": columns, "rows": listed, "of": len(rows["longest_ns"])}
