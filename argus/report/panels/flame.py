"""Flame graphs: where the CPU time of the rank that is named goes, and what it does more of than the others."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from argus.diagnose.read.query import by_hosts
from argus.model.errors import ArgusError
from argus.model.stacks import Frame as StackFrame
from argus.model.units import duration
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, bounded, panel
from argus.report.panel import Column, Flame, Frame, Panel, Sql, Table
from argus.semantics.stacks.profile import Difference, Key, Profile, changes, difference, folded, frame_text
from argus.store.read.stacks import Selection, read_profile

ID = "flame"
TITLE = "Flame graph"

MOST_FRAMES = 1_500
NARROWEST = 1e-3
"""Share of the whole below which a frame is left out."""
LISTED = 25
_LANGUAGES: Mapping[str, Literal["python", "native", "kernel", ""]] = {
    "python": "python", "native": "native", "jit": "native", "kernel": "kernel"
}  # fmt: skip

_BEGUN = by_hosts("""
SELECT toUnixTimestamp64Nano(min(ts)) AS begin_ns, count() AS n FROM $iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step = {first:UInt32} AND rank IN {ranks:Array(UInt32)}$near
""")

_STACKS = """
SELECT arrayStringConcat(arrayMap((f, x) -> concat(f, ' ', arrayElement(splitByChar('/', x), -1)),
                                  any(k.functions), any(k.files)), ';') AS stack, sum(s.ns) AS total_ns
FROM
(
  SELECT job, run, stack_id, sum(ns) AS ns FROM stack_samples
  WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'cpu' AND thread != 'argus-cupti'
    AND ($all OR rank IN {ranks:Array(UInt32)})
    AND last_ts >= fromUnixTimestamp64Nano({from_ns:Int64})
    AND toUnixTimestamp64Nano(ts) + intDiv(toUnixTimestamp64Nano(last_ts) - toUnixTimestamp64Nano(ts), 2)
        >= {from_ns:Int64}
  GROUP BY job, run, stack_id
) AS s
LEFT ANY JOIN stacks AS k ON s.job = k.job AND s.run = k.run AND s.stack_id = k.stack_id
GROUP BY s.stack_id ORDER BY total_ns DESC
"""


@dataclass
class _Node:
    frame: StackFrame | None
    after: float = 0.0
    own: float = 0.0
    before: float = 0.0
    children: dict[StackFrame, _Node] = field(default_factory=dict)


def build(look: Look, arrays: Arrays) -> Panel:
    """What the first rank that is named does, compared with all others; without one what all do."""
    named = next((rank for rank in look.named if len(look.ranks) > 1), None)
    since_ns = _since_ns(look, named)
    selection = Selection(look.job, look.run, ranks=() if named is None else (named,), from_ns=since_ns or None)
    try:
        profile = read_profile(look.store, selection)
        others = None if named is None else _others(look, replace(selection, other_ranks=True))
    except ArgusError as failure:
        if not failure.message.startswith("no stacks of job"):
            raise
        whose = "it" if named is None else look.place.of(named)
        why = "it was traced with --no-stacks, they have expired, or it was imported"
        return absent(ID, TITLE, f"no stacks on the CPU are stored of {whose}: {why}")
    two = difference(others, profile) if others is not None else _alone(profile)
    unit = two.unit if others is not None else "in all"
    frames = frames_of(two.after, two.before, compared=others is not None)
    who = "all ranks" if named is None else look.place.of(named)
    view: Flame = {
        "view": "flame", "title": f"{who}: time on the CPU, {unit}",
        "compared": "the other ranks" if others is not None else "", "frames": frames,
    }  # fmt: skip
    text = _STACKS.replace("$all", "true" if named is None else "false")
    sql: list[Sql] = [
        look.sql(f"Time of each stack: {who}", text, ranks=[] if named is None else [named], from_ns=since_ns)
    ]
    lead = f"What threads of {who} run, of {duration(profile.total_ns)} on the CPU."
    if others is not None:
        lead += " Coloured by what it does more, or less, than the other ranks."
    return panel(ID, TITLE, lead, [view], table=_table(two, compared=others is not None), sql=sql)


def _since_ns(look: Look, named: int | None) -> int:
    """Wall time from which on samples count: of a fault that began later, its beginning; 0: all."""
    since_ns = look.since_ns
    first = look.steps[0] if look.steps else 0
    if named is not None and look.verdict["status"] != "hung":
        finding = next(one for one in look.findings if named in one["ranks"])
        first = max(first, finding["steps"][0] if finding["steps"] else 0)
    if look.steps and first > 0:
        ranks = [named] if named is not None else look.ranks[:1].tolist()
        rows = look.read(_BEGUN, first=first, last=first, ranks=ranks)
        if len(rows["n"]) and int(rows["n"][0]):
            since_ns = max(since_ns, int(rows["begin_ns"][0]))
    return since_ns


def _others(look: Look, selection: Selection) -> Profile | None:
    """The other ranks; None: they have no stacks."""
    try:
        return read_profile(look.store, selection)
    except ArgusError as failure:
        if not failure.message.startswith("no stacks of job"):
            raise
        return None


def _alone(profile: Profile) -> Difference:
    return Difference({}, {frames: float(ns) for frames, ns in folded(profile.samples).items()}, "in all")


def frames_of(after: Mapping[Key, float], before: Mapping[Key, float], *, compared: bool) -> list[Frame]:
    """A tree of frames, parents first, those with most time kept.

    Args:
        after: Time by stack of what is drawn, ns.
        before: The same of what it is compared with.
        compared: Whether it is compared.
    """
    root = _tree(after, before)
    frames: list[Frame] = []
    # The widest first, so that what is cut off is the narrowest; indices of parents stay below their children's.
    order = 0
    heap: list[tuple[float, int, int, _Node]] = [(-root.after, order, -1, root)]
    while heap and len(frames) < MOST_FRAMES:
        _, _, parent, node = heapq.heappop(heap)
        if node.after < NARROWEST * root.after:
            continue
        name = "all" if node.frame is None else bounded(frame_text(node.frame), 120)
        frames.append({
            "name": name, "parent": parent, "total_ns": node.after, "self_ns": node.own,
            "change_ns": node.after - node.before if compared else None,
            "language": "" if node.frame is None else _LANGUAGES.get(node.frame.kind, ""),
        })  # fmt: skip
        at = len(frames) - 1
        for child in node.children.values():
            order += 1
            heapq.heappush(heap, (-child.after, order, at, child))
    return frames


def _tree(after: Mapping[Key, float], before: Mapping[Key, float]) -> _Node:
    root = _Node(None)
    for frames, value in after.items():
        root.after += value
        node = root
        for frame in frames:
            node = node.children.setdefault(frame, _Node(frame))
            node.after += value
        node.own += value
    for frames, value in before.items():
        root.before += value
        node = root
        for frame in frames:
            node = node.children.setdefault(frame, _Node(frame))
            node.before += value
    return root


def _table(two: Difference, *, compared: bool) -> Table:
    """Functions by their own time, or by what they gained."""
    rows = changes(two, python=True)
    if not compared:
        rows = sorted(rows, key=lambda one: -one.self_after)
    columns: list[Column] = [
        {"title": "function", "unit": ""}, {"title": "in it", "unit": "ns"}, {"title": "with callees", "unit": "ns"}
    ]  # fmt: skip
    if compared:
        columns += [{"title": "in it, others", "unit": "ns"}, {"title": "more", "unit": "ns"}]
    listed: list[list[str | float | int | None]] = []
    for one in rows[:LISTED]:
        row: list[str | float | int | None] = [bounded(frame_text(one.frame)), one.self_after, one.total_after]
        listed.append([*row, one.self_before, one.gained] if compared else row)
    return {"columns": columns, "rows": listed, "of": len(rows)}
