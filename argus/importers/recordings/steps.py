"""The steps of recordings: by their annotations, or by the period of their calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.collectives import POINT_TO_POINT
from argus.importers.recordings.recording import CALL_KINDS, MARK, Int, Recording
from argus.model import records
from argus.semantics.gpu.usage import time_in, union
from argus.semantics.phases.gpu import What
from argus.semantics.steps.by_calls import ITERATION, StepTracker
from argus.semantics.steps.offline import find_steps
from argus.semantics.steps.period import PROOF_UNITS
from argus.semantics.steps.range_names import STEP_WORD, base_of, separated

ANNOTATIONS, ONLINE, OFFLINE = "annotations", "calls", "repetition"
"""How steps were detected: by annotations in the recording; by the detector of live traces; by that of whole
recordings."""
COVERED = 0.5
"""Annotations are steps if they cover this share of the time from the first to the last."""
NEXT_NS_SHARE = 0.1
"""A step lasts until the next one begins, unless the pause between them is longer than this share of it."""
FIRST_NUMBER = 1 << 24
SLICE = 20_000
"""Calls that the detector of live traces gets at once: less than its window."""
_WORKING = [place for place, kind in enumerate(CALL_KINDS) if kind.startswith(("kernel", "graph", "mem"))]
_TRAINING = (What.BACKWARD, What.OPTIMIZER)
_NO_STEP = re.compile(r"optim|dataloader", re.IGNORECASE)


@dataclass
class RankSteps:
    """Steps of one rank: ``ITERATION`` rows (``method`` unused), how they were found, and the reason in words."""

    rows: NDArray[np.void]
    method: str
    why: str


def marks_from(ranges: Sequence[tuple[str, int, int, int]]) -> tuple[NDArray[np.void], str]:
    """The steps that named ranges mark: ranges of one name but for its number, on one thread, one after the other,
    that cover most of the time; the name says step, iteration or batch.

    Args:
        ranges: (name, begin ns, end ns, thread) of each.

    Returns:
        ``MARK`` rows in order of time, and what the ranges are called; none: ("", empty).
    """
    alike: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for text, begin, end, tid in ranges:
        if end <= begin:
            continue
        number = re.search(r"(\d{1,18})\D*$", text)
        base = base_of(text)
        profiler = text.startswith("ProfilerStep")
        if not profiler and (not STEP_WORD.search(separated(base)) or _NO_STEP.search(text)):
            continue
        alike.setdefault(("ProfilerStep#N" if profiler else base, tid), []).append(
            (begin, end, int(number[1]) if number else -1)
        )
    best: tuple[tuple[bool, int], str, list[tuple[int, int, int]]] | None = None
    for (base, _), rows in alike.items():
        rows = sorted(set(rows))
        overlap = any(rows[k][1] > rows[k + 1][0] + 1000 for k in range(len(rows) - 1))
        covered = sum(end - begin for begin, end, _ in rows)
        if overlap or covered < COVERED * (rows[-1][1] - rows[0][0]):
            continue
        if len(rows) < 2 and base != "ProfilerStep#N":
            continue
        key = (base == "ProfilerStep#N", covered)
        if best is None or key > best[0]:
            best = (key, base, rows)
    if best is None:
        return np.empty(0, MARK), ""
    _, base, rows = best
    marks = np.zeros(len(rows), MARK)
    numbers = [number for _, _, number in rows]
    if any(later <= earlier for earlier, later in pairwise(numbers)) or min(numbers) < 0 or max(numbers) >= 1 << 31:
        numbers = list(range(len(rows)))
    marks["number"] = numbers
    marks["begin_ns"], marks["end_ns"] = [row[0] for row in rows], [row[1] for row in rows]
    return marks, base


def find_all_steps(
    recordings: Sequence[Recording], communicators: NDArray[np.void], *, ignore_annotations: bool = False
) -> dict[int, RankSteps]:
    """The steps of each rank: by annotations in the recording, else by the period of its calls. Numbers agree on all
    ranks.

    Args:
        recordings: One a rank.
        communicators: ``groups.COMMUNICATOR`` rows of them.
        ignore_annotations: Look at the calls alone.

    Returns:
        By rank.
    """
    steps_of: dict[int, RankSteps] = {}
    unmarked = []
    for each in recordings:
        if len(each.marks) and not ignore_annotations:
            steps_of[each.rank] = _by_marks(each)
        else:
            unmarked.append(each)
    if unmarked:
        online = _online(unmarked, communicators)
        for each in unmarked:
            rows = online[online["rank"] == each.rank]
            steps_of[each.rank] = (
                RankSteps(rows, ONLINE, f"calls repeat {len(rows)} times") if len(rows) else _offline(each)
            )
        # Far above 0: a rank may have begun before the one it is compared with.
        for one in steps_of.values():
            one.rows["step"] += FIRST_NUMBER
        annotated = [steps_of[each.rank].rows for each in recordings if steps_of[each.rank].method == ANNOTATIONS]
        if annotated or not len(online):
            clocks = {each.rank: each.clock_ns for each in recordings}
            _number_alike(annotated, [steps_of[each.rank].rows for each in unmarked], clocks)
    base = min((int(steps.rows["step"].min()) for steps in steps_of.values() if len(steps.rows)), default=0)
    for each in recordings:
        steps = steps_of[each.rank].rows
        steps["step"] -= base
        _count_calls(each, steps)
    return steps_of


def _by_marks(recording: Recording) -> RankSteps:
    marks = recording.marks
    rows = np.zeros(len(marks), ITERATION)
    ends = marks["end_ns"].copy()
    pause = marks["begin_ns"][1:] - ends[:-1]
    follows = (np.diff(marks["number"]) == 1) & (pause <= NEXT_NS_SHARE * (ends[:-1] - marks["begin_ns"][:-1]))
    ends[:-1][follows] = marks["begin_ns"][1:][follows]
    rows["rank"], rows["step"] = recording.rank, marks["number"]
    rows["ts_ns"], rows["duration_ns"], rows["confidence"] = marks["begin_ns"], ends - marks["begin_ns"], 1.0
    return RankSteps(rows, ANNOTATIONS, f"marked by {recording.marked_by}")


def _online(recordings: Sequence[Recording], communicators: NDArray[np.void]) -> NDArray[np.void]:
    """Steps by the detector of live traces, where it finds as many as it wants to see; else none."""
    tracker = StepTracker()
    tracker.align(communicators)
    fed = []
    for each in recordings:
        chosen = each.calls[each.launching()]
        together = ~np.isin(each.collectives["call"], POINT_TO_POINT)
        fed.append((each.rank, _launch_records(each, chosen), np.ascontiguousarray(each.collectives[together])))
    if any(len(launches) + len(called) < PROOF_UNITS for _, launches, called in fed):
        return np.empty(0, ITERATION)
    begin = min(each.span[0] for each in recordings)
    end = max(each.span[1] for each in recordings) + 1
    most = max(len(launches) + len(called) for _, launches, called in fed)
    edges = np.linspace(begin, end, most // SLICE + 2).astype(np.int64)
    parts = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for rank, launches, called in fed:
            part = [a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (launches, called)]
            tracker.feed(rank, *part)
        parts.append(tracker.advance(final=high == edges[-1]))
    rows = np.concatenate(parts)
    enough = all(np.sum(rows["rank"] == each.rank) >= PROOF_UNITS for each in recordings)
    return rows if enough else np.empty(0, ITERATION)


def _launch_records(recording: Recording, calls: NDArray[np.void]) -> NDArray[np.void]:
    out = np.zeros(len(calls), records.LAUNCH)
    out["ts_ns"], out["duration_ns"], out["tid"], out["pid"] = (
        calls["ts_ns"], calls["duration_ns"], calls["tid"], recording.pid,
    )  # fmt: skip
    known = calls["op"] >= 0
    ops = recording.ops[calls["op"][known]]
    out["handle"] = len(recording.symbols) + calls["function"]
    out["handle"][known] = ops["name"]
    out["grid"][known] = ops["grid"]
    return out


def sequence(recording: Recording) -> tuple[Int, Int, Int]:
    """What steps are found in: (code, time in ns, time before it in which no call was made) of each call that gives
    the GPU work, or of each GPU operation where calls were not recorded. Each of shape (n,)."""
    ops = recording.ops
    work = ops["kind"].astype(np.int64) << 40 | ops["copy"].astype(np.int64) << 32 | ops["name"]
    chosen = recording.calls[np.isin(recording.calls["kind"], _WORKING) | (recording.calls["op"] >= 0)]
    if 2 * np.sum(chosen["op"] >= 0) < np.sum(ops["graph"] == 0):
        start = ops["start_ns"].astype(np.int64)
        gaps = np.diff(start, prepend=start[:1]) - _inside(union(start, ops["end_ns"].astype(np.int64)), start)
        return work, start, gaps
    graph = np.isin(chosen["kind"], [CALL_KINDS.index("graph")])
    codes = np.where(chosen["op"] >= 0, np.append(work, 0)[chosen["op"]], -1 - chosen["function"].astype(np.int64))
    codes = np.where(graph, codes | 1 << 50, codes)
    ts = np.ascontiguousarray(chosen["ts_ns"])
    return codes, ts, np.diff(ts, prepend=ts[:1]) - _inside(recording.busy, ts)


def _inside(intervals: Int, ts: Int) -> Int:
    """Time in intervals between each time and the one before it; 0 for the first."""
    return np.concatenate([[0], time_in(intervals, ts)])[: len(ts)] if len(ts) else ts


def _offline(recording: Recording) -> RankSteps:
    codes, ts, gaps = sequence(recording)
    by_period = find_steps(codes, gaps)
    if by_period is None:
        nothing = f"nothing in {len(codes):,} calls repeats that explains them"
        return RankSteps(np.empty(0, ITERATION), "", nothing)
    steps = len(by_period.bounds) - 1
    rows = np.zeros(steps, ITERATION)
    last = int((recording.calls["ts_ns"] + recording.calls["duration_ns"]).max(initial=0))
    edges = np.append(ts, max(last, int(ts[-1]) + 1))[by_period.bounds]
    rows["rank"], rows["step"], rows["ts_ns"], rows["duration_ns"] = (
        recording.rank, np.arange(steps), edges[:-1], np.diff(edges),
    )  # fmt: skip
    rows["confidence"] = by_period.confidence
    why = f"a unit of {by_period.length:,} calls repeats" + (", from the first to the last" if by_period.whole else "")
    if not np.isin(recording.kinds(), _TRAINING).any():
        # An inference repeats layer by layer.
        rows["confidence"] = np.minimum(rows["confidence"], 0.5)
        why += "; no kernel of a backward pass or an optimiser is named, so it may be a layer"
    return RankSteps(rows, OFFLINE, why)


def _number_alike(known: list[NDArray[np.void]], found: list[NDArray[np.void]], clocks: Mapping[int, int]) -> None:
    """Numbers steps so that those of other ranks which begin closest have the same number. Changes ``step`` of
    ``found``.

    Args:
        known: Rows of ranks whose recordings number them.
        found: Rows of the others, in order of time.
        clocks: Added to a rank's times to compare them with the others', ns.
    """

    def begins(rows: NDArray[np.void]) -> Int:
        return rows["ts_ns"].astype(np.int64) + clocks.get(int(rows["rank"][0]), 0)

    rows_of = [rows for rows in found if len(rows)]
    reference = max((rows for rows in known if len(rows)), key=len, default=None)
    if reference is None:
        reference = max(rows_of, key=len, default=None)
    if reference is None:
        return
    starts, numbers = begins(reference), reference["step"].astype(np.int64)
    for rows in rows_of:
        begin_ns = begins(rows)
        middle = len(begin_ns) // 2
        first = int(numbers[0])
        # Recorded at another time: by order.
        if begin_ns[-1] >= starts[0] and begin_ns[0] <= starts[-1] + int(reference["duration_ns"][-1]):
            first = int(numbers[np.argmin(np.abs(starts - begin_ns[middle]))]) - middle
        rows["step"] = first + np.arange(len(begin_ns))


def _count_calls(recording: Recording, steps: NDArray[np.void]) -> None:
    launched = recording.calls["ts_ns"][recording.launching()]
    called = np.sort(recording.collectives["ts_ns"].astype(np.int64))
    begin = steps["ts_ns"].astype(np.int64)
    end = begin + steps["duration_ns"].astype(np.int64)
    steps["launches"] = np.searchsorted(launched, end) - np.searchsorted(launched, begin)
    steps["collectives"] = np.searchsorted(called, end) - np.searchsorted(called, begin)
