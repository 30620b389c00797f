"""Communicators: what is sent in each, by whom, and how fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.query import by_hosts
from argus.model.units import duration, rank_pattern, size
from argus.report.arrays import Arrays
from argus.report.look import Columns, Look, absent, bounded, panel
from argus.report.panel import Bar, Bars, Column, Panel, Sql, Table

ID = "communicators"
TITLE = "Communicators"

SHOWN = 24
LISTED = 50

_GPU = """
SELECT comm_group, op, one, other, quantileExactInclusive(0.5)(took_ns) AS took_ns, max(calls) AS calls,
       max(bytes) AS bytes
FROM
(
$inner
)
GROUP BY comm_group, op, one, other
"""
"""What a step's calls of each communicator took the rank that waited for nobody. In no order."""

_CPU = by_hosts("""
SELECT m.comm_group AS comm_group, c.op AS op, toInt64(-1) AS one, toInt64(-1) AS other, toFloat64(nan) AS took_ns,
       max(c.calls) AS calls, max(c.bytes) AS bytes
FROM
(
  SELECT rank, comm, op, toInt64(count()) AS calls, toInt64(sum(bytes)) AS bytes FROM collectives
  WHERE job = {job:String} AND run = {run:UInt32} AND op NOT IN ('GroupStart', 'GroupEnd')
    AND ts >= fromUnixTimestamp64Nano({begin_ns:Int64}) AND ts < fromUnixTimestamp64Nano({end_ns:Int64})
  GROUP BY rank, comm, op
) AS c
INNER JOIN ($handles) AS m ON c.rank = m.rank AND c.comm = m.comm
GROUP BY comm_group, op
""")
"""Calls and bytes of a rank in some time."""

_MEMBERS = by_hosts("""
SELECT comm_group, groupUniqArray(rank) AS ranks FROM ($handles) GROUP BY comm_group
""")


def bus_factor(op: str, ranks: int) -> float:
    """Bytes on the busiest link over the payload of a call, as NCCL's own tests define bus bandwidth, and as the view
    ``collective_bandwidth`` has it."""
    if op == "AllReduce":
        return 2 * (ranks - 1) / ranks
    return ranks - 1 if op in ("AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter") else 1


@dataclass(frozen=True)
class Traffic:
    """What is sent in a communicator.

    Attributes:
        group, op: Which.
        pair: Numbers of the two ranks of a transfer; None: a collective of all.
        ranks: Global ranks in it.
        dimension: What it is for.
        calls, nbytes: Of a step and rank.
        took_ns: What they take the rank that waits for nobody; NaN: not known.
    """

    group: int
    op: str
    pair: tuple[int, int] | None
    ranks: tuple[int, ...]
    dimension: str
    calls: float
    nbytes: float
    took_ns: float

    @property
    def bus_bytes_s(self) -> float:
        """Bus bandwidth, bytes/s; NaN: not known."""
        if not self.took_ns > 0 or not self.nbytes > 0 or len(self.ranks) < 2:
            return float("nan")
        return self.nbytes * bus_factor(self.op, len(self.ranks)) / self.took_ns * 1e9

    @property
    def title(self) -> str:
        pair = f" {self.pair[0]}-{self.pair[1]}" if self.pair is not None else ""
        return f"{self.dimension} {self.op}{pair}, ranks {bounded(rank_pattern(sorted(self.ranks)), 40)}"


def build(look: Look, arrays: Arrays) -> Panel:
    """Bars of bandwidth, slowest kind by slowest kind, and what is sent."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen, so what a step sends is not known")
    rows, sql = _rows(look)
    found = _traffic(look, rows)
    if not found:
        why = "no collective of a communicator that is known was seen: the job communicates by other means, or not"
        return absent(ID, TITLE, why, sql=sql)
    bars = _bars(look, found)
    lead = (
        "Bus bandwidth by communicator and operation, the lowest of each kind first: payload and time of the rank that "
        f"waits for nobody, in a typical step. {_compared(found)}"
        if bars
        else "What is sent in a step. How fast is not known without GPU times: arm the job (argus run …)."
    )
    if bars:
        view: Bars = {"view": "bars", "unit": "bytes_per_s", "origin": 0.0, "least": 0.0, "bars": bars}
    else:
        view = {"view": "bars", "unit": "bytes", "origin": 0.0, "least": 0.0, "bars": _sizes(look, found)}
    return panel(ID, TITLE, lead, [view], table=_table(look, found), sql=sql)


def _kinds(found: list[Traffic]) -> list[list[Traffic]]:
    """Those whose bandwidth is known by dimension, operation and size."""
    kinds: dict[tuple[str, str, int], list[Traffic]] = {}
    for one in found:
        if one.bus_bytes_s > 0:
            kinds.setdefault((one.dimension, one.op, len(one.ranks)), []).append(one)
    return list(kinds.values())


def _compared(found: list[Traffic]) -> str:
    """What bandwidths are compared with, in words."""
    kinds = _kinds(found)
    alone = sum(len(those) == 1 for those in kinds)
    if alone == len(kinds):
        text = "Each is the only one of its kind (dimension, operation, ranks): there is nothing to compare it with"
    else:
        text = "Each is compared with the median of its kind (dimension, operation, ranks)"
        text += ", except those that are the only one of their kind" if alone else ""
    return f"{text}; what the links could do is not known."


def _rows(look: Look) -> tuple[Columns, list[Sql]]:
    """Rows of :data:`_GPU`, else of :data:`_CPU`, and their query."""
    window = look.newest()
    text = look.within(_GPU, queries.TRANSFERS)
    rows = look.read(text, **window)
    if len(rows["comm_group"]):
        return rows, [look.sql("What a step's calls of each communicator take", text, **window)]
    # On the CPU: calls of the time of the last step.
    span = look.read(queries.SPAN_NS, first=window["last"], last=window["last"])
    asked = {"begin_ns": int(span["begin_ns"][0]), "end_ns": int(span["end_ns"][0])} if len(span["steps"]) else {
        "begin_ns": 0, "end_ns": 0
    }  # fmt: skip
    rows = look.read(_CPU, **asked)
    return rows, [look.sql("What a rank sends in the last step", _CPU, **asked)]


def _traffic(look: Look, rows: Columns) -> list[Traffic]:
    """Each communicator and operation, those that take most time, else most bytes, first."""
    members = look.read(_MEMBERS)
    ranks_of = {
        int(group): tuple(sorted(int(rank) for rank in ranks))
        for group, ranks in zip(members["comm_group"].tolist(), members["ranks"].tolist(), strict=True)
    }
    dimensions = _dimensions(look)
    found = []
    names = ("comm_group", "op", "one", "other", "took_ns", "calls", "bytes")
    for group, op, one, other, took, calls, nbytes in zip(*(rows[name].tolist() for name in names), strict=True):
        ranks = ranks_of.get(int(group), ())
        pair = (int(one), int(other)) if one >= 0 and other >= 0 else None
        if pair is not None and max(pair) < len(ranks):
            ranks = (ranks[pair[0]], ranks[pair[1]])
        what = dimensions.get(int(group), "unknown")
        found.append(Traffic(int(group), str(op), pair, ranks, what, float(calls), float(nbytes), float(took)))
    return sorted(found, key=lambda one: (-np.nan_to_num(one.took_ns), -one.nbytes, one.group, one.op))


def _dimensions(look: Look) -> Mapping[int, str]:
    """What each communicator is for, by its number on all hosts."""
    groups = look.read(queries.GROUPS)
    joined = gpu_times.joined(look.examined.across)
    rows = zip(groups["host"].tolist(), groups["comm_group"].tolist(), groups["dimension"].tolist(), strict=True)
    return {joined.get((str(host), int(group)), int(group)): str(what) for host, group, what in rows}


def _bars(look: Look, found: list[Traffic]) -> list[Bar]:
    """The lowest bandwidths of each dimension and operation, in turn."""
    queues = [sorted(those, key=lambda one: one.bus_bytes_s) for those in _kinds(found)]
    turn = max(1, SHOWN // max(len(queues), 1))
    named = set(look.named)
    bars: list[Bar] = []
    for queue in queues[:SHOWN]:
        typical = float(np.median([one.bus_bytes_s for one in queue]))
        than = "the only one of its kind, compared with nothing"
        if len(queue) > 1:
            than = f"median of {len(queue)} such communicators: {size(typical)}/s"
        for one in queue[:turn]:
            bars.append({
                "title": one.title, "value": one.bus_bytes_s,
                "detail": f"{size(one.nbytes)} in {one.calls:.0f} calls a step take {duration(one.took_ns)}; "
                + than,
                "named": bool(named & set(one.ranks)) and len(one.ranks) < len(look.ranks),
            })  # fmt: skip
    return bars[:SHOWN]


def _sizes(look: Look, found: list[Traffic]) -> list[Bar]:
    """What is sent in a step, where times are not known."""
    named = set(look.named)
    most = sorted(found, key=lambda one: -one.nbytes)[:SHOWN]
    return [
        {
            "title": one.title, "value": one.nbytes, "detail": f"{one.calls:.0f} calls a step",
            "named": bool(named & set(one.ranks)) and len(one.ranks) < len(look.ranks),
        }
        for one in most
    ]  # fmt: skip


def _table(look: Look, found: list[Traffic]) -> Table:
    columns: list[Column] = [
        {"title": "dimension", "unit": ""}, {"title": "operation", "unit": ""}, {"title": "ranks", "unit": ""},
        {"title": "calls a step", "unit": "count"}, {"title": "sent a step", "unit": "bytes"},
        {"title": "time", "unit": "ns"}, {"title": "bus bandwidth", "unit": "bytes_per_s"},
        {"title": "communicator", "unit": ""},
    ]  # fmt: skip
    rows: list[list[str | float | int | None]] = [
        [
            one.dimension, bounded(one.op, 40), bounded(rank_pattern(sorted(one.ranks)), 60), one.calls, one.nbytes,
            _finite(one.took_ns), _finite(one.bus_bytes_s), str(one.group),
        ]
        for one in found[:LISTED]
    ]  # fmt: skip
    return {"columns": columns, "rows": rows, "of": len(found)}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
