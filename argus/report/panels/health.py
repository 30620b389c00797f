"""Node health: what `argus health` found on the nodes of the job."""

from __future__ import annotations

from datetime import datetime, timezone

from argus.report.arrays import Arrays
from argus.report.look import Look, absent, bounded, fact, panel
from argus.report.panel import Column, Fact, Facts, Panel, Table

ID = "health"
TITLE = "Node health"

SHOWN = 60
LISTED = 50
NEAR_S = 3600
"""Checks up to so long after the run count: they say how its nodes were."""
_STATES = {"critical": "bad", "warning": "bad", "unknown": "unknown", "ok": "good"}
_LOST = ("critical", "warning", "unknown")

_NEWEST = """
SELECT h.host AS host, h.check AS check, argMax(h.status, h.ts) AS status, argMax(h.text, h.ts) AS text,
       argMax(h.hint, h.ts) AS hint, toUnixTimestamp64Nano(max(h.ts)) AS ts_ns
FROM health AS h
WHERE h.host IN (SELECT DISTINCT host FROM ranks WHERE job = {job:String} AND run = {run:UInt32})
  AND h.ts < fromUnixTimestamp64Nano({until_ns:Int64})
GROUP BY host, check
ORDER BY indexOf(['critical', 'warning', 'unknown', 'ok', 'absent'], status), host, check
"""

_FIGURES = """
SELECT f.host AS host, f.check AS check, f.figure AS figure, f.device AS device, argMax(f.value, f.ts) AS value
FROM health_figures AS f
WHERE f.host IN (SELECT DISTINCT host FROM ranks WHERE job = {job:String} AND run = {run:UInt32})
  AND f.ts < fromUnixTimestamp64Nano({until_ns:Int64})
GROUP BY host, check, figure, device
ORDER BY host, check, figure, device
LIMIT 1000
"""


def build(look: Look, arrays: Arrays) -> Panel:
    """What is not well, and how many checks are."""
    end_ns = look.window_ns[1]
    until_ns = end_ns + NEAR_S * 1_000_000_000 if end_ns else 2**62
    sql = [look.sql("The newest result of each check", _NEWEST, until_ns=until_ns)]
    rows = look.read(_NEWEST, until_ns=until_ns)
    if not len(rows["host"]):
        return absent(
            ID, TITLE, "no health check of its nodes is stored: run argus health on each, or from cron", sql=sql
        )
    names = ("host", "check", "status", "text", "hint", "ts_ns")
    checks = list(zip(*(rows[name].tolist() for name in names), strict=True))
    wrong = [one for one in checks if one[2] in _LOST and one[1] != "argus"]
    fine = [one for one in checks if one[2] == "ok" and one[1] != "argus"]
    hosts = {one[0] for one in checks}
    facts: list[Fact] = []
    for host, check, status, text, hint, ts_ns in wrong[:SHOWN]:
        at = datetime.fromtimestamp(ts_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        what_to_do = f" → {hint}" if hint else ""
        facts.append(fact(f"{host}: {check}", f"{status}, {at}: {text}{what_to_do}", _STATES.get(status, "")))
    if len(wrong) > SHOWN:
        facts.append(fact("more", f"{len(wrong) - SHOWN} more that are not well: the query below lists them", "bad"))
    if fine:
        nodes = f"{len(hosts)} node{'s' * (len(hosts) != 1)}"
        facts.append(fact("well", f"{len(fine):,} checks of {nodes} are well", "good"))
    unseen = sorted(set(look.place.host.values()) - {bounded(host, 64) for host in hosts})
    if unseen:
        facts.append(fact("not checked", f"no check is stored of {', '.join(unseen[:8])}"
                          + (f" and {len(unseen) - 8} more" if len(unseen) > 8 else ""), "unknown"))  # fmt: skip
    view: Facts = {"view": "facts", "facts": facts}
    sql.append(look.sql("Numbers that checks measured", _FIGURES, until_ns=until_ns))
    lead = f"The newest results of argus health on the nodes of the job, {len(wrong)} of them not well."
    return panel(ID, TITLE, lead, [view], table=_figures(look, until_ns, {one[:2] for one in wrong}), sql=sql)


def _figures(look: Look, until_ns: int, wrong: set[tuple[str, str]]) -> Table | None:
    """Numbers of the checks that are not well first."""
    rows = look.read(_FIGURES, until_ns=until_ns)
    if not len(rows["host"]):
        return None
    names = ("host", "check", "figure", "device", "value")
    figures = list(zip(*(rows[name].tolist() for name in names), strict=True))
    figures.sort(key=lambda one: (one[0], one[1]) not in wrong)
    columns: list[Column] = [{"title": title, "unit": ""} for title in names]
    listed: list[list[str | float | int | None]] = [
        [bounded(host, 64), bounded(check, 40), bounded(figure, 60), bounded(device, 40), float(value)]
        for host, check, figure, device, value in figures[:LISTED]
    ]
    return {"columns": columns, "rows": listed, "of": len(figures)}
