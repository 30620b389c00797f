"""The critical path of a step: what, on which rank, the step had to wait for, from its begin to its end.

Two ways lead to it:

* :func:`walk` goes back in time through what was recorded of the GPUs. Where a GPU only communicates, the path goes on
  at the rank that came last to that call: the others waited for it. Where it computes, copies or idles, the path stays.
* :func:`through` goes back through a :class:`argus.diagnose.whatif.dependencies.Model`, whose dependencies are known,
  but whose operations follow one another without a delay.

Pure functions of numbers; :mod:`argus.diagnose.whatif.stored_paths` reads these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.whatif import rebuild
from argus.diagnose.whatif.dependencies import COMMUNICATION, Model

Int = NDArray[np.int64]
Key = TypeVar("Key", int, str)

COMPUTING, COPYING, COMMUNICATING = "computing", "copying", "communication"
WAITING, IDLE, LOADING = "waiting for communication", "idle GPU", "waiting for data"
WHAT = (COMPUTING, COPYING, COMMUNICATING, WAITING, IDLE, LOADING)
"""What a segment of a path can be. ``communication``: all ranks of the call were there, and the transfer took that
long. ``waiting for communication``: who else is in the call, or when they came, is not known."""
KERNEL, COPY, CALL = 0, 1, 2
"""Kinds of operations of :class:`Work`: a kernel that computes, a copy or fill, a kernel of NCCL."""
SHORT_NS = 10_000
"""Gaps between operations of a GPU up to this long are no segments of their own: launches are some us apart always."""
MOSTLY = 0.5
"""A gap at the begin of a step is waiting for data, if the GPU waited for data for this share of it."""


@dataclass(frozen=True)
class Segment:
    """A part of a path.

    Attributes:
        rank: Whose.
        what: One of :data:`WHAT`.
        name: The kernel or operation that takes most of it, or more words; may be empty. It may be of others: it is to
            be shown as :mod:`argus.model.text` does.
        begin_ns, end_ns: When.
    """

    rank: int
    what: str
    name: str
    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class CriticalPath:
    """The path of one step.

    Attributes:
        step: Its number.
        segments: In order of time; they do not overlap.
    """

    step: int
    segments: tuple[Segment, ...]

    @property
    def length_ns(self) -> int:
        """From the begin of the first segment to the end of the last."""
        return self.segments[-1].end_ns - self.segments[0].begin_ns if self.segments else 0

    def by_rank(self) -> dict[int, int]:
        """Time of the path on each rank, ns, the most first."""
        return _summed((segment.rank, segment.length_ns) for segment in self.segments)

    def by_what(self) -> dict[str, int]:
        """Time of the path by :data:`WHAT`, ns, the most first."""
        return _summed((segment.what, segment.length_ns) for segment in self.segments)


@dataclass(frozen=True)
class Paths:
    """The paths of some steps.

    Attributes:
        steps: Those that are known, in order.
        source: What they are from, for people.
        measured: Times are when it happened; else they count from the begin of the step as a model has it, without
            delays between operations.
        why_not: Why there are none, or not of all steps, for people; empty: there is one of each.
    """

    steps: tuple[CriticalPath, ...]
    source: str = ""
    measured: bool = True
    why_not: str = ""


def _summed(parts: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    out: dict[Key, int] = {}
    for key, ns in parts:
        out[key] = out.get(key, 0) + ns
    return dict(sorted(out.items(), key=lambda item: -item[1]))


# ---- through what was recorded


@dataclass(frozen=True)
class Work:
    """What a rank's GPU did in a step: operations in any order, shape (operations,).

    Attributes:
        begin_ns, end_ns: On a clock that all ranks share.
        kind: :data:`KERNEL`, :data:`COPY` or :data:`CALL`.
        call: Of a kernel of NCCL: a number that the same call has on all ranks; 0: not known.
        name: Place of its name in ``names``.
        names: Names of operations.
    """

    begin_ns: Int
    end_ns: Int
    kind: Int
    call: Int
    name: Int
    names: Sequence[str]


@dataclass(frozen=True)
class _Line:
    """What a GPU did as stretches that do not overlap: computing hides copies, and these communication.

    Attributes:
        at: Bounds, ascending, shape (stretches + 1,).
        operation: Of each stretch, -1: none; shape (stretches,).
    """

    at: Int
    operation: Int

    @staticmethod
    def of(work: Work) -> _Line:
        at = np.unique(np.concatenate([work.begin_ns, work.end_ns]))
        operation = np.full(max(len(at) - 1, 0), -1, np.int64)
        first, last = np.searchsorted(at, work.begin_ns), np.searchsorted(at, work.end_ns)
        for place in np.lexsort((work.begin_ns, -work.kind)).tolist():
            operation[first[place] : last[place]] = place
        return _Line(at, operation)

    def before(self, at_ns: int) -> tuple[int, int]:
        """(Operation right before a time, -1: none; when the stretch began)."""
        place = int(np.searchsorted(self.at, at_ns, side="left")) - 1
        if place < 0:
            return -1, -(1 << 62)
        if place >= len(self.operation):
            return -1, int(self.at[-1])
        return int(self.operation[place]), int(self.at[place])


def walk(
    works: Mapping[int, Work],
    span_ns: Mapping[int, tuple[int, int]],
    *,
    apart_ns: Callable[[int, int], int] = lambda one, other: 0,
    loading_ns: Mapping[int, int] | None = None,
) -> tuple[Segment, ...]:
    """The path back from the end of the rank that was last.

    Args:
        works: Of each rank.
        span_ns: When the step began and ended on each rank.
        apart_ns: By how much the clocks of two ranks may differ: who came later by less did not come later.
        loading_ns: How long each rank's GPU waited for data in the step.
    """
    lines = {rank: _Line.of(work) for rank, work in works.items() if len(work.begin_ns)}
    ranks = [rank for rank in works if rank in span_ns]
    if not ranks:
        return ()
    entries: dict[int, list[tuple[int, int]]] = {}
    for rank in lines:
        work = works[rank]
        for place in np.flatnonzero((work.kind == CALL) & (work.call != 0)).tolist():
            entries.setdefault(int(work.call[place]), []).append((int(work.begin_ns[place]), rank))
    rank = max(ranks, key=lambda own: span_ns[own][1])
    until = span_ns[rank][1]
    found: list[Segment] = []
    while until > span_ns[rank][0]:
        first = span_ns[rank][0]
        operation, since = lines[rank].before(until) if rank in lines else (-1, first)
        since = max(since, first)
        if operation < 0:
            found.append(Segment(rank, IDLE, "", since, until))
            until = since
            continue
        work = works[rank]
        name = work.names[int(work.name[operation])]
        kind = int(work.kind[operation])
        if kind != CALL:
            found.append(Segment(rank, COMPUTING if kind == KERNEL else COPYING, name, since, until))
            until = since
            continue
        came, last = max(entries.get(int(work.call[operation]), [(0, rank)]))
        if len(entries.get(int(work.call[operation]), ())) < 2:
            found.append(Segment(rank, WAITING, name, since, until))
            until = since
        elif last == rank or came - int(work.begin_ns[operation]) <= apart_ns(rank, last) or not since < came < until:
            found.append(Segment(rank, COMMUNICATING, name, since, until))
            until = since
        else:
            found.append(Segment(rank, COMMUNICATING, name, came, until))
            rank, until = last, came
            if rank not in span_ns:
                break
    return _joined(found[::-1], span_ns, loading_ns or {})


def _joined(
    segments: Sequence[Segment], span_ns: Mapping[int, tuple[int, int]], loading_ns: Mapping[int, int]
) -> tuple[Segment, ...]:
    """Segments of one rank that are of one kind become one, with the gaps between that are short."""
    out: list[Segment] = []
    weights: dict[str, int] = {}
    for segment in segments:
        short = segment.what == IDLE and segment.length_ns <= SHORT_NS
        if out and out[-1].rank == segment.rank and (short or out[-1].what == segment.what):
            before = out[-1]
            if not short:
                weights[segment.name] = weights.get(segment.name, 0) + segment.length_ns
            name = max(weights, key=lambda own: weights[own]) if weights else before.name
            out[-1] = Segment(before.rank, before.what, name, before.begin_ns, segment.end_ns)
            continue
        out.append(segment)
        weights = {segment.name: segment.length_ns}
    for place, segment in enumerate(out):
        least = MOSTLY * segment.length_ns
        if segment.what == IDLE and segment.begin_ns <= span_ns[segment.rank][0] and (
            loading_ns.get(segment.rank, 0) >= max(least, 1)
        ):  # fmt: skip
            out[place] = Segment(segment.rank, LOADING, segment.name, segment.begin_ns, segment.end_ns)
    return tuple(out)


# ---- through a model


_IDLE_OPS = (rebuild.IDLE,)
_CALLS = (*COMMUNICATION, rebuild.SYNC, rebuild.LAYERS, rebuild.FORWARD_P2P, rebuild.BACKWARD_P2P)


def through(model: Model, place: int, begin_ns: int = 0) -> tuple[Segment, ...]:
    """The longest way through a step of a model: what would have to be shorter for the step to be.

    Args:
        model: From :func:`argus.diagnose.whatif.dependencies.build` or :mod:`argus.diagnose.whatif.rebuild`.
        place: Which of its steps, as an index.
        begin_ns: When the step began.
    """
    plan, lanes = model.schedule, len(model.dp_ranks)
    took = np.zeros((plan.rows, lanes))
    took[plan.row] = model.actual_ns[:, :, place]
    ends = np.zeros((plan.rows, lanes))
    before_row = np.zeros((plan.rows, lanes), np.int64)
    before_lane = np.tile(np.arange(lanes), (plan.rows, 1))
    for begin, end, first, further, together in plan.levels:
        start = ends[first].copy()
        came = np.repeat(first[:, None], lanes, axis=1)
        for rows, others in further:
            later = ends[others] > start[rows]
            came[rows] = np.where(later, others[:, None], came[rows])
            start[rows] = np.maximum(start[rows], ends[others])
        lane = np.tile(np.arange(lanes), (end - begin, 1))
        if len(together):
            latest = start[together].argmax(axis=1)
            lane[together] = latest[:, None]
            came[together] = came[together, latest][:, None]
            start[together] = start[together].max(axis=1, keepdims=True)
        before_row[begin:end], before_lane[begin:end] = came, lane
        ends[begin:end] = start + took[begin:end]
    node = np.full(plan.rows, -1, np.int64)
    node[plan.row] = np.arange(len(plan.row))
    row, lane_ = np.unravel_index(int(ends.argmax()), ends.shape)
    found: list[Segment] = []
    at_row, at_lane = int(row), int(lane_)
    while at_row:
        own = int(node[at_row])
        length = float(took[at_row, at_lane])
        if own >= 0 and length >= 1:
            name = model.names[int(model.op[own])]
            what = IDLE if name in _IDLE_OPS else COMMUNICATING if name in _CALLS else COMPUTING
            end_ns = begin_ns + round(float(ends[at_row, at_lane]))
            found.append(Segment(int(model.rank[own, at_lane]), what, name, end_ns - round(length), end_ns))
        at_row, at_lane = int(before_row[at_row, at_lane]), int(before_lane[at_row, at_lane])
    return _without_overlap(found[::-1])


def _without_overlap(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Rounded times of segments that follow one another."""
    out: list[Segment] = []
    for segment in segments:
        begin = max(segment.begin_ns, out[-1].end_ns) if out else segment.begin_ns
        if segment.end_ns > begin:
            out.append(Segment(segment.rank, segment.what, segment.name, begin, segment.end_ns))
    return tuple(out)
