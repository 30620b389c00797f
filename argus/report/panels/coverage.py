"""What Argus cost the job, and what it could not see."""

from __future__ import annotations

from argus.diagnose.read.observed import THROUGHOUT
from argus.model.counters import describe
from argus.model.text import counted
from argus.model.units import elapsed, ranks_text
from argus.report.arrays import Arrays
from argus.report.look import Look, bounded, fact, panel
from argus.report.panel import Column, Fact, Facts, Panel, Table

ID = "coverage"
TITLE = "What Argus cost, and could not see"

LISTED = 50

_COUNTERS = """
SELECT counter, sum(c.value) AS total, max(c.loss) AS losing, max(c.value) AS most,
       argMax(c.host, c.value) AS where_most
FROM coverage AS c FINAL
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY counter ORDER BY losing DESC, counter
"""
_SIGNALS = """
SELECT signal, seen, reason, count() AS many, arraySlice(arraySort(groupArray(rank)), 1, 64) AS some_ranks FROM
(
  SELECT rank, signal, toFloat64(min(s.seen)) AS seen, argMin(s.reason, s.seen) AS reason
  FROM signal_coverage AS s FINAL
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank, signal
)
GROUP BY signal, seen, reason ORDER BY signal, many DESC LIMIT 100
"""
"""Each signal by the least share of the time that it was observed at."""
_SPANS = """
SELECT host, toUnixTimestamp64Nano(started) AS begin_ns, toUnixTimestamp64Nano(ifNull(ended, started)) AS end_ns,
       ended IS NULL AS open
FROM jobs FINAL WHERE job = {job:String} AND run = {run:UInt32} ORDER BY host LIMIT 2000
"""


def build(look: Look, arrays: Arrays) -> Panel:
    """Coverage in the terminal's words, signals that were not observed throughout, and the overhead."""
    rows = look.read(_COUNTERS)
    names = ("counter", "total", "losing", "most", "where_most")
    counters = list(zip(*(rows[name].tolist() for name in names), strict=True))
    facts: list[Fact] = []
    dropped = look.verdict["coverage"]["dropped"]
    if not counters and not dropped:
        facts.append(fact("losses", "nothing was traced live: argus import reported what is missing", "unknown"))
    elif look.verdict["coverage"]["complete"]:
        so_far = "" if look.verdict["coverage"]["ended"] else " so far (the trace goes on, or was cut off)"
        facts.append(fact("losses", f"coverage is complete: nothing was lost{so_far}", "good"))
    facts += [fact(name, describe(name, value), "bad") for name, value in sorted(dropped.items())]
    facts += _overhead({str(one[0]): (int(one[1]), int(one[3]), str(one[4])) for one in counters})
    facts += _signals(look)
    facts += _spans(look)
    columns: list[Column] = [
        {"title": "counter", "unit": ""}, {"title": "value", "unit": "count"}, {"title": "loss", "unit": ""},
        {"title": "in words", "unit": ""},
    ]  # fmt: skip
    listed: list[list[str | float | int | None]] = [
        [
            bounded(name, 60),
            int(value),
            "yes" if loss else "no",
            bounded(describe(str(name), int(value))) if loss else "",
        ]
        for name, value, loss, _, _ in sorted(counters, key=lambda one: (not one[2] or not one[1], not one[1], one[0]))
        if value
    ]
    table: Table | None = {"columns": columns, "rows": listed[:LISTED], "of": len(listed)} if listed else None
    view: Facts = {"view": "facts", "facts": facts[:60]}
    sql = [
        look.sql("All counters", _COUNTERS), look.sql("Signals and what of them was observed", _SIGNALS),
        look.sql("When each host was traced", _SPANS),
    ]  # fmt: skip
    lead = "What was lost, what was not observed, and what observing took from the job."
    return panel(ID, TITLE, lead, [view], table=table, sql=sql)


def _overhead(counters: dict[str, tuple[int, int, str]]) -> list[Fact]:
    """What observing took, by host the most."""
    if "overhead_ppm" not in counters:
        return []
    most, host = counters["overhead_ppm"][1:]
    text = f"{most / 1e6:.2%} of the job's time" + (f" on {bounded(host, 64)}, where it was most" if host else "")
    parts = {
        name.removeprefix("overhead_").removesuffix("_ns").replace("_", " "): value
        for name, (value, _, _) in counters.items()
        if name.startswith("overhead_") and name.endswith("_ns") and name != "overhead_job_ns"
    }
    spent = sum(parts.values())
    shares = [f"{name} {value / spent:.0%}" for name, value in sorted(parts.items(), key=lambda one: -one[1]) if value]
    return [fact("overhead", text + (f"; of which {', '.join(shares[:5])}" if spent else ""))]


def _signals(look: Look) -> list[Fact]:
    rows = look.read(_SIGNALS)
    facts = []
    whole = []
    names = ("signal", "seen", "reason", "many", "some_ranks")
    for signal, seen, reason, many, ranks in zip(*(rows[name].tolist() for name in names), strict=True):
        if seen >= THROUGHOUT:
            whole.append(str(signal))
            continue
        share = f"{seen:.0%} of the time at least" if seen > 0 else "not at all for some of the time"
        whose = ranks_text([int(rank) for rank in ranks]) if many <= 64 else f"{counted(int(many), 'rank')}"
        text = f"observed {share} ({whose})" + (f": {bounded(reason, 200)}" if reason else "")
        facts.append(fact(str(signal).replace("_", " "), text, "unknown"))
    if whole:
        facts.append(fact("observed throughout", ", ".join(dict.fromkeys(whole)).replace("_", " "), "good"))
    return facts


def _spans(look: Look) -> list[Fact]:
    rows = look.read(_SPANS)
    if not len(rows["host"]):
        return []
    begin, end = int(rows["begin_ns"].min()), int(rows["end_ns"].max())
    open_hosts = int(rows["open"].astype(bool).sum())
    if open_hosts:
        return [fact("traced", f"{counted(open_hosts, 'host')} is still being traced, or the trace was cut off"
                     if open_hosts == 1 else f"{open_hosts} hosts are still being traced, or their traces were cut off",
                     "unknown")]  # fmt: skip
    return [fact("traced", f"for {elapsed((end - begin) / 1e9)}")] if end > begin else []
