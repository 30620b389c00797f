"""Where a job hangs: the collective that ranks wait in, who came to it and who did not."""

from __future__ import annotations

from argus.diagnose.read import queries
from argus.diagnose.verdict import Collective, Finding
from argus.model.units import ranks_text
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, fact, panel
from argus.report.panel import Bar, Bars, Column, Fact, Facts, Panel, Sql, Table, View

ID = "hang"
TITLE = "Where it hangs"

BEFORE_NS = 60_000_000_000
"""Calls so long before the end of the last step are looked through for the last one of each rank."""
SHOWN = 32
"""Ranks that have a bar: those that are behind first."""


def build(look: Look, arrays: Arrays) -> Panel:
    """The hang that the verdict names."""
    finding = next((one for one in look.findings if one["kind"] == "hang"), None)
    if finding is None:
        return absent(ID, TITLE, "no hang was found")
    collective = finding.get("collective")
    facts = _facts(finding, collective)
    views: list[View] = []
    table: Table | None = None
    sql: list[Sql] = []
    if collective is not None:
        group, since = int(collective["comm_group"]), {"since_ns": max(look.window_ns[1] - BEFORE_NS, 0)}
        rows = look.read(queries.LAST_CALLS, **since)
        of_group = rows["comm_group"] == group
        last = {int(rank): int(seq) for rank, seq in zip(rows["rank"][of_group], rows["seq"][of_group], strict=True)}
        views, table = _behind(look, collective, last)
        sql = [look.sql("The last collective of each rank on each communicator", queries.LAST_CALLS, **since)]
    lead = (
        "Steps, phases, kernels and waits below are of the time before it."
        if look.steps
        else "No step was seen before it."
    )
    if views:
        lead += " Bars: by how many calls of that communicator each rank is behind."
    view: Facts = {"view": "facts", "facts": facts}
    return panel(ID, TITLE, lead, [view, *views], table=table, sql=sql)


def _facts(finding: Finding, collective: Collective | None) -> list[Fact]:
    facts = []
    if finding["steps"]:
        facts.append(fact("last whole step", f"step {finding['steps'][1]}: the hang is in the next one"))
    if collective is None:
        return [*facts, fact("waits in", "no collective that some ranks came to and others did not", "unknown")]
    what = f"{collective['op']} {collective['seq']} of a communicator"
    facts.append(fact("waits in", what + (f" ({collective['dimension']})" if collective["dimension"] else "")))
    facts.append(fact("came", ranks_text(collective["came"]) if collective["came"] else "nobody"))
    facts.append(fact("did not come", ranks_text(collective["missing"]) if collective["missing"] else "nobody", "bad"))
    return facts


def _behind(look: Look, collective: Collective, last: dict[int, int]) -> tuple[list[View], Table | None]:
    """By how many collectives of the communicator each rank is behind."""
    if not last:
        return [], None
    newest, named = max(max(last.values()), int(collective["seq"])), set(look.named)
    order = sorted(last, key=lambda rank: (last[rank], rank))
    bars: list[Bar] = [
        {
            "title": look.place.of(rank), "value": float(newest - last[rank]),
            "detail": f"its last call is number {last[rank]}", "named": rank in named,
        }
        for rank in order[:SHOWN]
    ]  # fmt: skip
    columns: list[Column] = [
        {"title": "rank", "unit": ""}, {"title": "host", "unit": ""}, {"title": "last call", "unit": "count"},
        {"title": "calls behind", "unit": "count"},
    ]  # fmt: skip
    rows: list[list[str | float | int | None]] = [
        [rank, look.place.host.get(rank, ""), last[rank], newest - last[rank]] for rank in order[:50]
    ]
    view: Bars = {"view": "bars", "unit": "count", "origin": 0.0, "least": 0.0, "bars": bars}
    return [view], {"columns": columns, "rows": rows, "of": len(order)}
