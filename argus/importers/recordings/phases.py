"""Phases of a recording's steps, from the ranges that it names: PyTorch's own, and those that people give."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.recording import Int, Recording
from argus.semantics.gpu.usage import union
from argus.semantics.phases.cpu import BY_MARKS, MARK, PHASE, PHASES, Phase, PhaseTracker, What
from argus.semantics.steps.range_names import Role, base_of, meaning_of, role_of

PAUSE_NS = 1_000_000
"""A backward pass ends where its engine does nothing for so long, and for :data:`PAUSES` times its usual pause."""
PAUSES = 20
MOST_NAMED = 16
"""Ranges of a rank that become phases under their own names: those with the most time."""
LONGEST_NAME = 40
_OF_PYTORCH = re.compile(r"::|^(##|ProfilerStep|Torch-Compiled|Optimizer\.|FSDP|nccl|DistributedDataParallel)")
"""Names that PyTorch gives, which are no part of a training loop by themselves."""
_BEGINS = {Role.BACKWARD: (What.BACKWARD_BEGIN, What.BACKWARD_END)}


def role_of_range(name: str) -> Role:
    """What a range is for: by PyTorch's names, else by the words of its own."""
    return role_of(name) or meaning_of(name).role


def phases_of(recording: Recording, steps: NDArray[np.void]) -> tuple[NDArray[np.void], list[str]]:
    """Where the training thread's time went in each step, by the same marks as live, and by ranges of other names that
    hold none of these.

    Args:
        recording: With ``ranges`` and ``engine``. What could not be paired is counted in its ``counters``.
        steps: ``ITERATION`` rows, in order of time.

    Returns:
        :data:`argus.semantics.phases.cpu.PHASE` rows, none where no range has a role; and the names of phases:
        :data:`argus.semantics.phases.cpu.PHASES`, then those of other ranges, at most :data:`MOST_NAMED`.
    """
    chosen = [(each, role) for each in recording.ranges if (role := role_of_range(each[0]))]
    tid = _training_thread(chosen)
    rows: list[tuple[int, int, int, int, int, int]] = []
    for (_, begin, end, own), role in chosen:
        first, last = _BEGINS.get(role, (What.RANGE_BEGIN, What.RANGE_END))
        if own == tid and end > begin:
            shown = 0 if role is Role.BACKWARD else int(role)
            rows += [(begin, 0, own, first, shown, 0), (end, 0, own, last, shown, 0)]
    if tid >= 0 and not any(role is Role.BACKWARD for _, role in chosen):
        for begin, end in _backwards(recording.engine):
            rows += [(begin, 0, tid, What.BACKWARD_BEGIN, 0, 0), (end, 0, tid, What.BACKWARD_END, 0, 0)]
    if not rows or not len(steps):
        return np.empty(0, PHASE), list(PHASES)
    tracker = PhaseTracker()
    marks = np.array(rows, MARK)
    marks = marks[np.lexsort((marks["what"] % 2 == 0, marks["ts_ns"]))]
    parts, segments = [], []
    fed = 0
    for place in range(len(steps)):
        end = int(steps["ts_ns"][place]) + int(steps["duration_ns"][place])
        until = int(np.searchsorted(marks["ts_ns"], np.uint64(end), side="right"))
        tracker.feed(marks[fed:until])
        fed = max(fed, until)
        parts.append(tracker.split(steps[place : place + 1]))
        segments.append([(int(begin), int(end), int(phase)) for begin, end, phase in tracker.take_segments().tolist()])
    recording.counters["ranges_unfinished"] += tracker.counters["ranges_unfinished"]
    marked = union(
        np.array([row[0] for row in rows[::2]], np.int64), np.array([row[0] for row in rows[1::2]], np.int64)
    )
    named = _named_ranges(recording, tid, marked)
    done = [_with_named(*each, named, marked) for each in zip(parts, segments, strict=True)]
    return np.concatenate(done), [*PHASES, *(name for name, _, _ in named)]


def _named_ranges(recording: Recording, tid: int, marked: Int) -> list[tuple[str, Int, bool]]:
    """Ranges of the training thread that have no role, lie in none that has one, and hold none.

    Args:
        recording: With its ranges and calls.
        tid: The thread.
        marked: When ranges that have a role were open: disjoint and in order, shape (n, 2).

    Returns:
        Of each name: the name of the phase, when it was open (begin and end, shape (n, 2)), and whether it launches
        kernels that compute. Those with the most time come first; what lies in another range belongs to that.
    """
    by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, begin, end, own in recording.ranges:
        base = base_of(name)
        if own != tid or end <= begin or not name[:1].isalpha() or role_of_range(name) or _OF_PYTORCH.search(name):
            continue
        if base != recording.marked_by:
            by_name[base].append((begin, end))
    found = []
    launches = np.sort(recording.calls["ts_ns"][recording.launching() & (recording.calls["tid"] == tid)])
    for base, each in by_name.items():
        label = re.sub(r"[^A-Za-z0-9_.-]+", "_", base)[:LONGEST_NAME].strip("_.-")
        begins, ends = np.array(each, np.int64).T
        within = np.searchsorted(marked[:, 0], begins, side="right") - 1
        outside = (within < 0) | (marked[within, 1] <= begins)
        begins, ends = begins[outside], ends[outside]
        if not len(begins) or not label[:1].isalpha() or label in PHASES or _any_between(marked[:, 0], begins, ends):
            continue
        found.append((label, union(begins, ends), _any_between(launches, begins, ends)))
    found.sort(key=lambda each: -int(np.sum(each[1][:, 1] - each[1][:, 0])))
    kept: list[tuple[str, Int, bool]] = []
    for label, spans, computes in found:
        if len(kept) < MOST_NAMED and label not in (name for name, _, _ in kept):
            kept.append((label, spans, computes))
    return kept


def _any_between(times: Int, begins: Int, ends: Int) -> bool:
    """Whether any of these ordered times lies in one of these ranges."""
    return bool((np.searchsorted(times, ends) > np.searchsorted(times, begins)).any())


def _with_named(
    rows: NDArray[np.void],
    segments: Sequence[tuple[int, int, int]],
    named: Sequence[tuple[str, Int, bool]],
    marked: Int,
) -> NDArray[np.void]:
    """The phases of one step, with what no mark explains given to the named ranges that were open then.

    A gap that was only taken for a forward or for loading by what is around it goes to a named range, too, if that
    launches no kernels which compute: a layer of a model is part of its forward.

    Args:
        rows: :data:`PHASE` of the step.
        segments: When each phase was, in order.
        named, marked: As :func:`_named_ranges` returns and takes them.
    """
    if not len(rows) or not len(segments):
        return rows
    first, last = segments[0][0], segments[-1][1]
    cut = [
        (max(int(begin), first), min(int(end), last), len(PHASES) + place, computes)
        for place, (_, spans, computes) in enumerate(named)
        for begin, end in spans[(spans[:, 0] < last) & (spans[:, 1] > first)].tolist()
    ]
    if not cut:
        return rows
    covered = marked[(marked[:, 0] < last) & (marked[:, 1] > first)].ravel().tolist()
    edges = sorted({*(edge for begin, end, _ in segments for edge in (begin, end)), *covered,
                    *(edge for begin, end, *_ in cut for edge in (begin, end))})  # fmt: skip
    edges = [edge for edge in edges if first <= edge <= last]
    pieces: list[tuple[int, int]] = []
    at = 0
    for begin, end in pairwise(edges):
        while segments[at][1] <= begin:
            at += 1
        phase = segments[at][2]
        inside = np.searchsorted(marked[:, 0], begin, side="right") - 1
        if inside < 0 or marked[inside, 1] <= begin:
            over = (place for since, until, place, computes in cut
                    if since <= begin < until and (phase == Phase.OTHER or not computes))  # fmt: skip
            phase = min(over, default=phase)
        pieces.append((phase, end - begin))
    spent: Counter[int] = Counter()
    runs: Counter[int] = Counter()
    for phase, together in groupby(pieces, key=lambda piece: piece[0]):
        spent[phase] += sum(length for _, length in together)
        runs[phase] += 1
    out = rows[[spent[int(phase)] > 0 or int(phase) == Phase.COMMUNICATION for phase in rows["phase"].tolist()]]
    for row in out:
        row["duration_ns"], row["spans"] = spent[int(row["phase"])], runs[int(row["phase"])]
    more = np.zeros(sum(phase >= len(PHASES) for phase in spent), PHASE)
    more["rank"], more["step"], more["method"], more["confidence"] = rows["rank"][0], rows["step"][0], BY_MARKS, 1.0
    for row, phase in zip(more, sorted(phase for phase in spent if phase >= len(PHASES)), strict=True):
        row["phase"], row["duration_ns"], row["spans"] = phase, spent[phase], runs[phase]
    return np.concatenate([out, more])


def _training_thread(chosen: list[tuple[tuple[str, int, int, int], Role]]) -> int:
    """The thread with the most ranges that only the one that trains has; -1: no range has a role."""
    count: dict[int, int] = {}
    for (_, _, _, tid), role in chosen:
        # Threads of their own write checkpoints, too.
        weight = 3 if role in (Role.OPTIMIZER, Role.DATA) else role is not Role.CHECKPOINT
        count[tid] = count.get(tid, 0) + weight
    return max(count, key=lambda tid: count[tid], default=-1)


def _backwards(engine: Int) -> list[tuple[int, int]]:
    """When autograd's engine was at work: (begin, end) of each backward pass. ``engine``: begin, end and thread of what
    it evaluated, shape (n, 3)."""
    if not len(engine):
        return []
    order = np.argsort(engine[:, 0], kind="stable")
    begin, end = engine[order, 0], np.maximum.accumulate(engine[order, 1])
    pause = begin[1:] - end[:-1]
    usual = float(np.median(np.maximum(pause, 0))) if len(pause) else 0.0
    cuts = np.flatnonzero(pause > max(PAUSE_NS, PAUSES * usual)) + 1
    first, last = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(begin)]]) - 1
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))
