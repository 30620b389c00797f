"""The critical path of a step: what it had to wait for, one after the other, over all ranks."""

from __future__ import annotations

from functools import partial

import numpy as np

from argus.diagnose.read import queries
from argus.diagnose.whatif.critical_path import CriticalPath, Paths
from argus.diagnose.whatif.stored_paths import read_paths
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, bounded, panel
from argus.report.panel import Column, Panel, Sql, Table, Timeline, Track
from argus.store.reader import query_columns

ID = "critical_path"
TITLE = "Critical path of a step"

STEPS = 5
"""Newest steps of which one is shown: that of median length."""
LONG = 1.25
"""Times the median step: where steps that are so long lose :data:`MOSTLY` of what a finding costs, the longest is shown
instead. What is lost now and then is lost in it, and hardly in the median."""
MOSTLY = 0.5
"""Share of the lost time."""
MOST_RANKS = 512
"""Of larger jobs reading every operation of a step takes longer than all other panels together."""
TRACKS = 16
"""Ranks that are shown, those with the most of the path."""
SPANS = 2_000
"""Spans that are drawn. Shorter ones than a part in so many of the step are a pixel's fraction."""


def build(look: Look, arrays: Arrays) -> Panel:
    """The path of a step of the newest ones."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen")
    if len(look.ranks) > MOST_RANKS:
        last = look.steps[1]
        why = f"of {len(look.ranks):,} ranks: argus export perfetto --steps {last}:{last} has it, but takes long"
        return absent(ID, TITLE, why)
    query = partial(query_columns, look.store)
    long, paths = _long_step(look), Paths(())
    if long is not None:
        paths = read_paths(query, look.job, look.run, (long, long), look.examined.across)
    if not paths.measured or not any(path.segments for path in paths.steps):  # what has no delays shows none
        long, first = None, max(look.steps[0], look.steps[1] - STEPS + 1)
        paths = read_paths(query, look.job, look.run, (first, look.steps[1]), look.examined.across)
    known = sorted((path for path in paths.steps if path.segments), key=lambda path: path.length_ns)
    if not known:
        return absent(ID, TITLE, paths.why_not or "what the steps waited for is not known")
    path = known[len(known) // 2]
    lead = _lead(path, paths) + ("" if long is None else " It is the longest of the newest steps.")
    return panel(ID, TITLE, lead, [_view(look, path)], table=_table(look, path), sql=_sql(look, path, paths))


def _long_step(look: Look) -> int | None:
    """The longest of the newest steps of the first finding, if it is in long steps that the finding costs time."""
    if not look.findings or look.case is None:
        return None
    window, finding = look.newest(), look.findings[0]
    since, last = finding["steps"]
    numbers = look.case.numbers
    among = (numbers >= max(since, window["first"])) & (numbers <= min(last, window["last"]))
    if not among.any():
        return None
    durations = look.case.durations[among].astype(float)
    usual = float(np.median(durations))
    extra = float(np.sum(durations[durations > LONG * usual] - usual))
    lost = float(np.sum(durations)) * (1 - 1 / max(finding["slowdown"], 1.0))
    return int(numbers[among][np.argmax(durations)]) if extra > 0 and extra >= MOSTLY * lost else None


def _lead(path: CriticalPath, paths: Paths) -> str:
    parts = [f"{what} {ns / max(path.length_ns, 1):.0%}" for what, ns in path.by_what().items()]
    ranks = path.by_rank()
    cut = f" Drawn are the {TRACKS} of its {len(ranks)} ranks that have most of it." if len(ranks) > TRACKS else ""
    whom = ", ".join(f"rank {rank} {ns / max(path.length_ns, 1):.0%}" for rank, ns in list(ranks.items())[:4])
    return (
        f"What step {path.step} could not have been shorter than, one thing after the other: making anything else "
        f"faster would not have ended it sooner. {', '.join(parts)}; {whom}. From {bounded(paths.source)}.{cut}"
    )


def _view(look: Look, path: CriticalPath) -> Timeline:
    named, origin = set(look.named), path.segments[0].begin_ns
    most = list(path.by_rank())[:TRACKS]
    least = path.length_ns / SPANS
    tracks: list[Track] = []
    for rank in sorted(most):
        spans = [
            (
                float(segment.begin_ns - origin),
                float(segment.end_ns - origin),
                bounded(f"{segment.what}: {segment.name}" if segment.name else segment.what),
                int(rank in named),
            )
            for segment in path.segments
            if segment.rank == rank and segment.length_ns >= least
        ]
        tracks.append({"title": look.place.of(rank), "spans": spans})
    return {"view": "timeline", "title": f"step {path.step}", "tracks": tracks}


def _table(look: Look, path: CriticalPath) -> Table:
    columns: list[Column] = [
        {"title": "rank", "unit": ""}, {"title": "host", "unit": ""}, {"title": "what", "unit": ""},
        {"title": "most of it", "unit": ""}, {"title": "time", "unit": "ns"}, {"title": "of the path", "unit": "share"},
    ]  # fmt: skip
    sums: dict[tuple[int, str], int] = {}
    longest: dict[tuple[int, str], tuple[int, str]] = {}
    for segment in path.segments:
        key = segment.rank, segment.what
        sums[key] = sums.get(key, 0) + segment.length_ns
        longest[key] = max(longest.get(key, (0, "")), (segment.length_ns, segment.name))
    rows: list[list[str | float | int | None]] = [
        [rank, look.place.host.get(rank, ""), what, bounded(longest[rank, what][1]), float(ns), ns / path.length_ns]
        for (rank, what), ns in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return {"columns": columns, "rows": rows[:50], "of": len(rows)}


def _sql(look: Look, path: CriticalPath, paths: Paths) -> list[Sql]:
    window = {"first": path.step, "last": path.step, "ranks": []}
    if not paths.measured:
        recorded = look.recorded_stages
        title, text = ("Its operations", queries.OPERATIONS) if recorded else ("When it began", queries.STEPS_OF_HOSTS)
        return [look.sql(title, text, **window)]
    return [look.sql("When it began and ended on each GPU", queries.STEPS_ON_GPUS, **window)]
