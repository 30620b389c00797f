"""Which nodes to drain: results of now and of late, trends, peers, and silence, ranked."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from argus.health.check import CRITICAL, OK, UNKNOWN, WARNING
from argus.health.trend import COUNTERS, WATCHED, Matrix, busy_share, deviations, held, rising
from argus.model.units import elapsed
from argus.store.open import Store
from argus.store.reader import query_columns

PROBE_HOURS = 26
"""So long a measurement stands for what a node can do: probes run once a day, at about the same time."""
SILENT_S = 3 * 3600
"""A node of which nothing came for so long is silent; history reaches an embedded store only each hour."""
RECENT_S = 24 * 3600
_MAKE_THE_KIND = ("gpu.count", "memory.total_gib")
"""Figures of which a node's kind is made (``argus.health.run.kind_of``)."""
_WEIGHTS = {CRITICAL: 100.0, WARNING: 10.0, UNKNOWN: 3.0}
_DEVIATES, _DIFFERS, _SILENT, _AGAIN = 25.0, 5.0, 50.0, 20.0

_LATEST = """
SELECT host, check, argMax(h.kind, ts) AS kind, argMax(h.status, ts) AS status, argMax(h.text, ts) AS text,
       argMax(h.hint, ts) AS hint, max(ts) AS last, uniqExactIf(toStartOfHour(ts), h.status = 'critical') AS bad_hours
FROM health AS h
WHERE ts > fromUnixTimestamp64Nano({since:Int64}) AND ts <= fromUnixTimestamp64Nano({now:Int64})
GROUP BY host, check
ORDER BY host, check
"""
_SEEN = """
SELECT host, max(ts) AS last FROM health WHERE ts <= fromUnixTimestamp64Nano({now:Int64}) GROUP BY host ORDER BY host
"""
_FACTS = """
SELECT kind, host, name, argMax(value, ts) AS value
FROM health ARRAY JOIN mapKeys(facts) AS name, mapValues(facts) AS value
WHERE ts > fromUnixTimestamp64Nano({since:Int64}) AND ts <= fromUnixTimestamp64Nano({now:Int64})
GROUP BY kind, host, name
ORDER BY kind, name, host
"""
_FIGURES = """
SELECT host, argMax(f.kind, ts) AS kind, check, figure, device, intDiv(toUnixTimestamp(ts), 3600) AS hour,
       if(endsWith(figure, '_total'), argMax(value, ts), quantileExact(0.5)(value)) AS value
FROM health_figures AS f
WHERE ts > fromUnixTimestamp64Nano({since:Int64}) AND ts <= fromUnixTimestamp64Nano({now:Int64})
  AND concat(check, '.', figure) IN ({names:Array(String)})
GROUP BY host, check, figure, device, hour
"""


@dataclass
class Reason:
    """Why a node is in the report.

    Attributes:
        kind: ``check`` (a result of now), ``recent`` (of the last day), ``trend``, ``facts`` or ``silent``.
        name: The check, or ``check.figure``.
        status: How bad: ``critical``, ``warning`` or ``unknown``.
        text: In one line.
        hint: What to do.
        weight: Its part of the score.
    """

    kind: str
    name: str
    status: str
    text: str
    hint: str = ""
    weight: float = 0.0


@dataclass
class NodeReport:
    """A node with its reasons, the gravest first."""

    host: str
    kind: str
    last: float
    """Unix time of its newest result, s."""
    reasons: list[Reason] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The sum of the reasons' weights: nodes are ranked by it."""
        return sum(reason.weight for reason in self.reasons)

    @property
    def advice(self) -> str:
        """``drain``, ``watch`` or ``ok``."""
        if any(reason.status == CRITICAL for reason in self.reasons):
            return "drain"
        return "watch" if self.reasons else OK

    def as_json(self) -> dict[str, Any]:
        """For ``--format json``."""
        return {**asdict(self), "score": self.score, "advice": self.advice}


def report(store: Store, *, now: float | None = None, days: int = 28) -> list[NodeReport]:
    """Every node that has history, the worst first.

    Args:
        store: The store.
        now: Unix time, s; None: now.
        days: How much history trends look at.

    Raises:
        ArgusError: The store cannot be asked.
    """
    now = time.time() if now is None else now
    span = {"now": int(now * 1e9), "since": int((now - RECENT_S) * 1e9)}
    seen = query_columns(store, _SEEN, span)
    nodes = {
        host: NodeReport(host, "", last / 1e9) for host, last in zip(seen["host"], seen["last"].tolist(), strict=True)
    }
    for row in _rows(query_columns(store, _LATEST, span)):
        node = nodes[row["host"]]
        node.kind = row["kind"]
        if row["check"] != "argus":
            node.reasons += _results(row, node.last)
    for node in nodes.values():
        if now - node.last > SILENT_S:
            text = f"nothing came for {elapsed(now - node.last)}"
            hint = "Is it up? Does cron run? argus health -v there shows it."
            node.reasons.append(Reason("silent", "argus", WARNING, text, hint, _SILENT))
    _facts(nodes, query_columns(store, _FACTS, span))
    for host, reason in trends(store, now=now, days=days):
        nodes[host].reasons.append(reason)
    for node in nodes.values():
        node.reasons.sort(key=lambda reason: -reason.weight)
    return sorted(nodes.values(), key=lambda node: (-node.score, node.host))


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def _results(row: dict[str, Any], last: float) -> list[Reason]:
    name, status = row["check"], row["status"]
    entries = []
    # A check that the newest runs left out does not describe the present.
    if status in _WEIGHTS and last - row["last"] / 1e9 < 3600:
        entries.append(Reason("check", name, status, row["text"], row["hint"], _WEIGHTS[status]))
    if status != CRITICAL and row["bad_hours"]:
        text = f"was critical in {row['bad_hours']} of the last 24 hours"
        entries.append(Reason("recent", name, WARNING, text, "What comes and goes comes again.", _AGAIN))
    return entries


def _facts(nodes: dict[str, NodeReport], columns: dict[str, Any]) -> None:
    """Nodes whose versions differ from those of most peers."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for row in _rows(columns):
        groups.setdefault((row["kind"], row["name"]), {})[row["host"]] = row["value"]
    for (_, name), values in groups.items():
        (usual, count), *_ = Counter(values.values()).most_common(1)
        if len(values) < 3 or count * 3 < len(values) * 2:
            continue  # no value that two thirds have
        for host, value in values.items():
            if value != usual:
                text = f"{name} is {value}; {count} of {len(values)} nodes of its kind have {usual}"
                nodes[host].reasons.append(
                    Reason("facts", name, WARNING, text, "Install what the others have.", _DIFFERS)
                )


def trends(store: Store, *, now: float | None = None, days: int = 28) -> list[tuple[str, Reason]]:
    """Hosts whose figures stand out, against their own past or their peers of the same kind.

    Raises:
        ArgusError: The store cannot be asked.
    """
    now = time.time() if now is None else now
    span = {"now": int(now * 1e9), "since": int((now - days * 86400) * 1e9), "names": [*WATCHED, *COUNTERS]}
    columns = query_columns(store, _FIGURES, span)
    last = int(now // 3600)
    series: dict[tuple[str, str, str], list[int]] = {}
    usual = _usual_kinds(columns)
    names = columns["check"] + "." + columns["figure"]
    for place, (kind, name, device) in enumerate(zip(columns["kind"], names, columns["device"], strict=True)):
        if name in _MAKE_THE_KIND:  # a node that lost some is not of another kind
            kind = usual[columns["host"][place]]
        # All GPUs of nodes of a kind are peers; networks and disks have their own places in each node.
        series.setdefault((kind, name, "" if name.startswith("gpu_") else device), []).append(place)
    texts = []
    busy = _busy(columns, last, days)
    for (_, name, _), places in sorted(series.items()):
        rows, matrix = _matrix(columns, np.array(places), last, days)
        if name.startswith("probe_"):
            matrix = held(matrix, PROBE_HOURS)
        findings = deviations(matrix, WATCHED[name]) if name in WATCHED else rising(matrix, COUNTERS[name])
        for one in findings:
            host, device = rows[one.node]
            of = f" of {device}" if device else ""
            if name in WATCHED:
                against = {"past": "its own past", "peers": "its peers"}.get(one.how, "its own past and its peers")
                text = f"{WATCHED[name].meaning}{of} is {one.value:.4g}, against {one.usual:.4g} of {against}"
            else:
                flags = busy.get(host, np.zeros(days * 24, bool))
                during = ", only while jobs ran" if busy_share(matrix[one.node], flags) > 0.95 else ""
                text = f"{name}{of} rose by {one.value:.0f} in 24 h{during}; {one.usual:.0f} is usual"
            hint = f"argus sql: health_figures, figure {name}. Run the job elsewhere and compare."
            texts.append(
                (host, Reason("trend", name + (f"/{device}" if device else ""), WARNING, text, hint, _DEVIATES))
            )
    return texts


def _usual_kinds(columns: dict[str, Any]) -> dict[str, str]:
    """The kind that each host had in most hours."""
    counts: dict[str, Counter[str]] = {}
    for host, kind in zip(columns["host"], columns["kind"], strict=True):
        counts.setdefault(host, Counter())[kind] += 1
    return {host: kinds.most_common(1)[0][0] for host, kinds in counts.items()}


def _matrix(columns: dict[str, Any], places: Any, last: int, days: int) -> tuple[list[tuple[str, str]], Matrix]:
    """Hosts with devices as rows, hours up to now as columns."""
    pairs = list(zip(columns["host"][places], columns["device"][places], strict=True))
    rows = sorted(set(pairs))
    number = {pair: k for k, pair in enumerate(rows)}
    matrix = np.full((len(rows), days * 24), np.nan)
    row = np.array([number[pair] for pair in pairs])
    hour = columns["hour"][places].astype(np.int64) - last + days * 24 - 1
    inside = (hour >= 0) & (hour < days * 24)
    matrix[row[inside], hour[inside]] = columns["value"][places][inside]
    measured = ~np.isnan(matrix).all(0)
    return rows, matrix[:, int(np.argmax(measured)) :] if measured.any() else matrix


def _busy(columns: dict[str, Any], last: int, days: int) -> dict[str, Any]:
    """Hours in which a node's GPUs were busy: the clock under load was measured."""
    places = np.flatnonzero(columns["figure"] == "busy_clock_mhz")
    busy: dict[str, Any] = {}
    for host, hour in zip(columns["host"][places], columns["hour"][places].astype(np.int64), strict=True):
        place = int(hour) - last + days * 24 - 1
        if 0 <= place < days * 24:
            busy.setdefault(host, np.zeros(days * 24, bool))[place] = True
    return busy
