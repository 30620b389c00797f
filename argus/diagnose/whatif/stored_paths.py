"""The critical paths of the steps of a stored run, from the best that is stored of it:

1. every operation of the GPUs (``kernel_events``, where ``argus trace`` kept them): measured;
2. the operations that a recording has (``phase_ops``): their dependencies are known, delays between them are left
   out;
3. the GPUs' times by phase and step: the step is rebuilt from the schedule of its pipeline, if that explains its
   length.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import MIN_STEPS, Asked, Case
from argus.diagnose.read import queries
from argus.diagnose.read.ahead import Ahead, remembered
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.query import Query, of_job
from argus.diagnose.whatif import dependencies, operations, rebuild
from argus.diagnose.whatif.critical_path import CriticalPath, Paths, Work, through, walk
from argus.model.errors import ArgusError
from argus.model.ranks import Gaps
from argus.model.units import listed

Columns = Mapping[str, NDArray[Any]]
Int = NDArray[np.int64]

MOST_STEPS = 50
"""Steps of which paths are worked out at once."""
MOST_OPERATIONS = 300_000
"""Operations of one step that are read: some 60 MB."""
WHOLE = 0.9
"""A step's operations are all there if they fill this share of the time in which its GPU was busy."""
AHEAD_NS = 10_000_000_000
"""The CPU is at most so far ahead of its GPU, where a call is looked up that launched a kernel."""
SURE_STEP = 0.8
"""Steps whose boundary is less sure are left out, as in a diagnosis."""


def read_paths(
    query: Query, job: str, run: int, steps: tuple[int, int], hosts: Hosts | None = None, ranks: tuple[int, ...] = ()
) -> Paths:
    """The critical paths of some steps.

    Args:
        query: Runs SQL with parameters, returns columns.
        job, run: The session.
        steps: First and last, by the numbers that are the same on all hosts.
        hosts: How the hosts go together; None: all have the same clock.
        ranks: Only these were chosen; a path needs all of them. Empty: all.
    """
    first, last = steps
    if ranks:
        return Paths((), why_not="a critical path spans all ranks, and only some were chosen")
    if last - first >= MOST_STEPS:
        return Paths((), why_not=f"{last - first + 1:,} steps are more than {MOST_STEPS}; choose fewer: --steps")
    params = {"job": job, "run": run}
    measured, why = _measured(query, params, first, last, hosts)
    if measured:
        return Paths(tuple(measured), "operations of the GPUs, as they were recorded", True, why)
    whys = [why]
    for source in (_recorded, _rebuilt):
        paths, text, why = source(query, params, first, last, hosts)
        if paths:
            return Paths(tuple(paths), text, False, why)
        whys.append(why)
    return Paths((), why_not="; ".join(filter(None, whys)))


# ---- by operations of the GPUs


def _shift(hosts: Hosts | None, host: str) -> int:
    return 0 if hosts is None else hosts.shift_of(host)


def _converted(hosts: Hosts | None, host: str, times: Int) -> Int:
    return times if hosts is None else hosts.on_reference(host, times)


def _measured(
    query: Query, params: Mapping[str, Any], first: int, last: int, hosts: Hosts | None
) -> tuple[list[CriticalPath], str]:
    """Paths, and why there are not all."""
    most = max((shift.shift for shift in hosts.shifts), default=0) if hosts is not None else 0
    window = {**params, "first": first - most, "last": last, "ranks": []}
    rows = query(queries.STEPS_ON_GPUS, window)
    names = ("rank", "node", "step", "begin_ns", "end_ns", "busy_ns")
    by_step: dict[int, list[tuple[int, str, int, int, int, int]]] = {}
    for rank, node, step, begin, end, busy in zip(*(rows[name].tolist() for name in names), strict=True):
        number = step + _shift(hosts, str(node))
        if first <= number <= last:
            by_step.setdefault(number, []).append((rank, str(node), step, begin, end, busy))
    if not by_step:
        return [], "no GPU times of these steps are stored"
    waited = query(queries.WAITED_FOR_DATA, window)
    loading = {
        (rank, step): ns
        for rank, step, ns in zip(*(waited[name].tolist() for name in ("rank", "step", "loading_ns")), strict=True)
    }
    members = _Members(query(queries.MEMBERS, params), hosts)
    found, whys = [], list[str]()
    for number, of_ranks in sorted(by_step.items()):
        path, why = _of_step(query, params, number, of_ranks, loading, members, hosts)
        if path is not None:
            found.append(path)
        elif why not in whys:
            whys.append(why)
    return found, "; ".join(whys[:3])


class _Members:
    """Which communicator a rank's handle is, and which rank has which place in it."""

    def __init__(self, rows: Columns, hosts: Hosts | None) -> None:
        self.handle: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._hosts = hosts
        names = ("rank", "comm", "comm_group", "comm_rank", "seq_offset")
        for rank, comm, group, place, offset in zip(*(rows[name].tolist() for name in names), strict=True):
            self.handle[rank, comm] = group, offset, place
        self._joined = {
            (join.host, join.comm_group): (join.joined_group, join.seq_shift)
            for join in (hosts.joins if hosts is not None else ())
            if not join.error
        }

    def of(self, rank: int, host: str, comm: int) -> tuple[int, int, int] | None:
        """(Number of the communicator, what to add to numbers of calls, the rank's place in it); None: not known."""
        found = self.handle.get((rank, comm))
        if found is None:
            return None
        group, shift = self._joined.get((host, found[0]), (found[0], 0))
        return group, found[1] + shift, found[2]


def _of_step(
    query: Query,
    params: Mapping[str, Any],
    number: int,
    of_ranks: list[tuple[int, str, int, int, int, int]],
    loading: Mapping[tuple[int, int], int],
    members: _Members,
    hosts: Hosts | None,
) -> tuple[CriticalPath | None, str]:
    node = {rank: host for rank, host, *_ in of_ranks}
    own = {rank: (begin, end) for rank, _, _, begin, end, _ in of_ranks}
    extent = {"begin": min(begin for begin, _ in own.values()), "end": max(end for _, end in own.values())}
    asked = {**params, **extent, "ranks": sorted(own)}
    count = int(query(queries.COUNT_ON_GPUS, asked)["operations"][0])
    if not count:
        return (
            None,
            "the operations of its GPUs are not stored one by one (argus trace --raw all or argus flag keeps them)",
        )
    if count > MOST_OPERATIONS:
        return None, f"{count:,} operations in a step are more than {MOST_OPERATIONS:,}"
    rows = query(queries.DONE_ON_GPUS, asked)
    calls = _calls(query, asked, rows, node, members)
    words, word = np.unique(rows["word"].astype(str), return_inverse=True)
    table = words.tolist()
    works, spans = {}, {}
    for rank, _, _, begin, end, busy in of_ranks:
        inside = (rows["rank"] == rank) & (rows["begin_ns"] >= begin) & (rows["begin_ns"] < end)
        starts = rows["begin_ns"][inside].astype(np.int64)
        ends = starts + np.maximum(rows["took_ns"][inside].astype(np.int64), 0)
        if _covered_ns(starts, ends) < WHOLE * busy:
            return None, f"of some operations of rank {rank}'s GPU nothing is stored"
        both = _converted(hosts, node[rank], np.concatenate([starts, ends, [begin, end]]))
        spans[rank] = int(both[-2]), int(both[-1])
        works[rank] = Work(
            both[: len(starts)], both[len(starts) : -2], rows["what"][inside].astype(np.int64), calls[inside],
            word[inside].astype(np.int64), table,
        )  # fmt: skip
    waited = {rank: loading.get((rank, step), 0) for rank, _, step, *_ in of_ranks}

    def apart_ns(one: int, other: int) -> int:
        return 0 if hosts is None else hosts.between([node[one]], [node[other]])

    return CriticalPath(number, walk(works, spans, apart_ns=apart_ns, loading_ns=waited)), ""


def _covered_ns(begins: Int, ends: Int) -> int:
    """Time in which at least one of these, in order of their begins, goes on."""
    if not len(begins):
        return 0
    before = np.maximum.accumulate(np.concatenate([[begins[0]], ends[:-1]]))
    return int(np.maximum(ends - np.maximum(begins, before), 0).sum())


def _calls(query: Query, asked: Mapping[str, Any], rows: Columns, node: Mapping[int, str], members: _Members) -> Int:
    """Of each operation that is NCCL's: a number that is the same on all ranks of the call; else 0.

    The call is the last one before the launch on the same thread. Sends and receives are numbered by pair of ranks, in
    the step: where the two have made different numbers of them, nothing is known.
    """
    out = np.zeros(len(rows["rank"]), np.int64)
    places = np.flatnonzero((rows["what"] == 2) & (rows["launched_ns"] >= 0))
    if not len(places):
        return out
    launched = rows["launched_ns"][places].astype(np.int64)
    called = query(
        queries.CALLS_OF_RANKS, {**asked, "begin": int(launched.min()) - AHEAD_NS, "end": int(launched.max()) + 1}
    )
    names = ("rank", "tid", "called_ns", "comm", "pairwise", "word", "seq", "peer")
    by_thread: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for rank, tid, *call in zip(*(called[name].tolist() for name in names), strict=True):
        by_thread.setdefault((rank, tid), []).append(tuple(call))
    times = {key: np.array([call[0] for call in own], np.int64) for key, own in by_thread.items()}
    pairs: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for place, at in zip(places.tolist(), launched.tolist(), strict=True):
        rank, tid = int(rows["rank"][place]), int(rows["launch_tid"][place])
        own = by_thread.get((rank, tid))
        before = int(np.searchsorted(times[rank, tid], at, side="right")) - 1 if own else -1
        if own is None or before < 0:
            continue
        _, comm, pairwise, word, seq, peer = own[before]
        handle = members.of(rank, node[rank], comm)
        if handle is None:
            continue
        group, offset, own_place = handle
        if not pairwise:
            out[place] = _number(group, seq + offset, zlib.crc32(str(word).encode("utf-8", "replace")))
        elif peer >= 0 and own_place >= 0:
            pairs.setdefault((group, min(own_place, peer), max(own_place, peer)), {}).setdefault(rank, []).append(place)
    for (group, one, other), by_rank in pairs.items():
        if len(by_rank) == 2 and len({len(ordered) for ordered in by_rank.values()}) == 1:
            for ordered in by_rank.values():
                for turn, place in enumerate(ordered):
                    out[place] = _number(group, turn, one << 32 | other)
    return out


def _number(*parts: int) -> int:
    return zlib.crc32(repr(parts).encode()) << 31 | zlib.adler32(repr(parts[::-1]).encode()) & 0x7FFFFFFF or 1


# ---- by a model


def _recorded(
    query: Query, params: Mapping[str, Any], first: int, last: int, hosts: Hosts | None
) -> tuple[list[CriticalPath], str, str]:
    """(Paths, what from, why there are none)."""
    window = {**params, "first": max(first, 0), "last": max(last, 0)}
    recorded = operations.read(query, window)
    if recorded is None:
        return [], "", ""
    try:
        model = dependencies.build(*recorded)
    except ArgusError as failure:
        return [], "", f"the dependencies of the recorded operations are not known: {failure.message}"
    rows = query(queries.STEP_BEGINS, window)
    begins = dict(zip(rows["step"].tolist(), rows["begin_ns"].tolist(), strict=True))
    paths = [
        CriticalPath(step, through(model, place, int(begins[step])))
        for place, step in enumerate(model.steps.tolist())
        if step in begins
    ]
    return paths, "recorded operations and their dependencies; delays between them are left out", "; ".join(model.notes)


def _rebuilt(
    query: Query, params: Mapping[str, Any], first: int, last: int, hosts: Hosts | None
) -> tuple[list[CriticalPath], str, str]:
    """(Paths, what from, why there are none)."""
    asked: dict[str, Any] = {**params, "since_ns": 0}
    if hosts is not None:
        query = of_job(query)
        asked |= hosts.params()
    with Ahead(query) as ahead:
        run = remembered(ahead)
        span = run(queries.SPAN, asked)
        if not len(span["n"]) or not int(span["n"][0]):
            return [], "", "no whole step was seen"
        asked |= {"first": int(span["first"][0]), "last": min(last, int(span["last"][0]))}
        series = run(queries.STEPS, asked)
        sure = series["confidence"] >= SURE_STEP
        numbers = series["step"][sure].astype(np.int64)
        if len(numbers) < MIN_STEPS:
            return [], "", f"{len(numbers)} steps up to then are too few to rebuild one from ({MIN_STEPS})"
        durations = series["duration_ns"][sure].astype(np.float64)
        ranks = int(series["ranks"].max(initial=0))
        calls = float(np.median(series["calls"][sure]) * ranks)
        case = Case(run, ahead, asked, Asked(), numbers, durations, ranks, calls, hosts)
        if case.gpus is None:
            return [], "", "what the GPUs did is stored for too few steps"
        carried = case.transfers
        rebuilt = (
            None if carried is None
            else rebuild.read(run, case.params, case.gpus, carried.now, carried.dimensions)
        )  # fmt: skip
    if rebuilt is None:
        return [], "", "its dependencies could not be rebuilt: no schedule explains what its steps take"
    whole = query(queries.STEPS_OF_HOSTS, {**params, "first": first - _most(hosts), "last": last})
    begins: dict[int, int] = {}
    for step, node, begin in zip(*(whole[name].tolist() for name in ("step", "node", "begin_ns")), strict=True):
        number = step + _shift(hosts, str(node))
        at = int(_converted(hosts, str(node), np.array([begin], np.int64))[0])
        begins[number] = min(begins.get(number, at), at)
    paths = [
        CriticalPath(step, through(rebuilt.model, place, begins[step]))
        for place, step in enumerate(rebuilt.model.steps.tolist())
        if first <= step <= last and step in begins
    ]
    lacking = Gaps((path.step for path in paths), first, last + 1)
    why = f"steps {listed(lacking, 4)} were not rebuilt" if lacking else ""
    return paths, "the step rebuilt from times of the GPUs by phase; delays between its operations are left out", why


def _most(hosts: Hosts | None) -> int:
    return max((shift.shift for shift in hosts.shifts), default=0) if hosts is not None else 0
