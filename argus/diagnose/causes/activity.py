"""What the threads of silent ranks do: compute, wait, or stay in one place.

A job that makes no steps may hang, evaluate, write a checkpoint, or have nothing to do. Stacks show which: threads that
compute, or that are now here and now there, go on. A CPU that is busy in a wait for a GPU or for other ranks does not:
CUDA and NCCL spin.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query
from argus.model.stacks import Frame
from argus.model.units import ranks_text
from argus.semantics.stacks.stack import label

COMPUTES = 0.25
"""Share of one CPU from which on a rank computes: what a thread gets that shares its CPU with three others. Watchdogs
and threads that poll take a few percent."""
MOVES = 0.8
"""A thread that spends less than this share of its time in one place moves."""
PLACES = 3
"""Ranks that are described."""

_COMMUNICATES = re.compile(
    r"nccl|rccl|gloo|c10d|torch/distributed|libmpi|mpi4py|libuc[pst]\b|all_?reduce|all_?gather|reduce_?scatter", re.I
)
_USES_GPU = re.compile(
    r"libcuda\b|libcuda\.|libcudart|libamdhip|libhsa|cuda(Stream|Device|Event)Synchronize|torch/cuda/|"
    r"cu(Stream|Ctx|Event)Synchronize|hip(Stream|Device|Event)Synchronize"
)
_LOADS = re.compile(r"torch/utils/data/")
_SPINS = re.compile(r"sched_yield|pthread_spin|_mm_pause|clock_gettime|\[vdso\]|\[vsyscall\]|gomp_barrier|kmp_.*wait")
_OURS = re.compile(r"^argus")
"""Argus's own thread in an armed process."""

Key = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Activity:
    """What one rank did.

    Attributes:
        rank: Which.
        computes: Share of one CPU that its threads took, or would have taken had one been free; waits that spin left
            out.
        queued: The part of it in which none was free.
        moves: Its main thread was now here, now there.
        spins: Share of one CPU that was burned in waits.
        place: Where its main thread was for most of the time; None: no stack of it is stored.
        reason: What it waited for there; empty: it ran.
        waits_for: ``communication``, ``gpu``, ``data`` or ``disk``; empty: anything else, such as a sleep of its own.
    """

    rank: int
    computes: float
    queued: float
    moves: bool
    spins: float
    place: Frame | None
    reason: str
    waits_for: str

    @property
    def progresses(self) -> bool:
        """Whether it computes or moves: what it does goes on."""
        return self.computes >= COMPUTES or self.moves

    @property
    def text(self) -> str:
        """In words."""
        where = f" in {label(self.place, lines=True)}" if self.place is not None else ""
        if self.computes >= COMPUTES:
            if self.queued > self.computes / 2:
                return (
                    f"rank {self.rank} is ready to compute{where}, but for {self.queued:.0%} of the time no CPU is free"
                )
            return f"rank {self.rank} computes ({self.computes:.0%} of a CPU, most{where})"
        if self.moves:
            return f"rank {self.rank} goes on (it was in several places, most often{where})"
        if self.spins >= COMPUTES:
            return f"rank {self.rank} spins in a wait{where}"
        return f"rank {self.rank} waits{f' ({self.reason})' if self.reason else ''}{where}"


def activities(
    query: Query, params: Mapping[str, Any], ranks: Sequence[int], from_ns: int, to_ns: int
) -> dict[int, Activity]:
    """What some ranks did in some time.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        ranks: Which.
        from_ns, to_ns: When, wall time.

    Returns:
        By rank; those of which nothing is stored are missing.
    """
    rows = query(queries.ACTIVITY, {**params, "ranks": list(ranks), "from_ns": from_ns, "to_ns": to_ns})
    names = ("rank", "own", "first_thread", "thread", "kind", "reason", "spent_ns")
    by_rank: dict[int, list[_Row]] = defaultdict(list)
    stacks = (rows[name] for name in ("kinds", "functions", "files", "lines"))
    for rank, own, first, thread, kind, reason, ns, *frames in zip(
        *(rows[name].tolist() for name in names), *stacks, strict=True
    ):
        if not _OURS.match(thread):
            stack = tuple(map(Frame, *frames))
            by_rank[int(rank)].append(_Row(bool(own and first), str(thread), str(kind), str(reason), float(ns), stack))
    span = max(to_ns - from_ns, 1)
    return {rank: _activity(rank, rows_of_rank, span) for rank, rows_of_rank in by_rank.items()}


@dataclass(frozen=True)
class _Row:
    main: bool
    thread: str
    kind: str
    reason: str
    ns: float
    stack: tuple[Frame, ...]

    @property
    def trains(self) -> bool:
        """The main thread, or one that does backward passes."""
        return self.main or self.thread.startswith("pt_autograd")


def _matches(pattern: re.Pattern[str], stack: Sequence[Frame]) -> bool:
    return any(pattern.search(frame.function) or pattern.search(frame.file) for frame in stack)


def waits_for(stack: Sequence[Frame], reason: str) -> str:
    """What a thread with this stack waits for: ``communication``, ``gpu``, ``data``, ``disk``, or empty."""
    if _matches(_COMMUNICATES, stack):
        return "communication"
    if reason == "driver" or _matches(_USES_GPU, stack):
        return "gpu"
    if _matches(_LOADS, stack):
        return "data"
    return "disk" if reason in ("disk", "page_fault") else ""


def _spins(row: _Row) -> bool:
    """Whether a running thread is busy waiting, by its leaf: a program that launches kernels is in libcuda, too, but
    comes from many places."""
    leaf = row.stack[-1:]
    return _matches(_SPINS, leaf) or _matches(_USES_GPU, leaf) or _matches(_COMMUNICATES, leaf)


def _place(stack: Sequence[Frame]) -> Key:
    """Where a thread is: its Python functions with their lines, or, where no Python runs, its functions."""
    python = tuple((frame.function, frame.file, frame.line) for frame in stack if frame.kind == "python")
    return python or tuple((frame.function, frame.file, 0) for frame in stack)


def _activity(rank: int, rows: Sequence[_Row], span_ns: float) -> Activity:
    busy = {True: 0.0, False: 0.0}
    spun = queued = 0.0
    places: Counter[Key] = Counter()
    shown: dict[Key, _Row] = {}
    for row in rows:
        # Who is ready to run and gets no CPU would compute.
        if row.kind == "cpu" or row.reason == "runqueue":
            if row.kind == "cpu" and _spins(row):
                spun += row.ns * row.trains
            else:
                busy[row.trains] += row.ns
                queued += row.ns * (row.trains and row.kind != "cpu")
        if row.main and row.stack:
            key = _place(row.stack)
            places[key] += row.ns  # type: ignore[assignment]
            if key not in shown or row.ns > shown[key].ns:
                shown[key] = row
    most = places.most_common(1)
    at = shown[most[0][0]] if most else None
    total = sum(places.values())
    python = [frame for frame in at.stack if frame.kind == "python"] if at is not None else []
    frame = python[-1] if python else at.stack[-1] if at is not None else None
    moves = bool(most) and most[0][1] < MOVES * total and bool(python)
    wait = waits_for(at.stack, at.reason) if at is not None else ""
    computes = busy[True]
    # What other threads compute is what a thread waits for that waits neither for a GPU nor for other ranks.
    if wait not in ("communication", "gpu"):
        computes += busy[False]
    reason = at.reason if at is not None else ""
    return Activity(rank, computes / span_ns, queued / span_ns, moves, spun / span_ns, frame, reason, wait)


def describe(of_threads: Sequence[Activity], others: int = 0) -> str:
    """Ranks' activities in one sentence, without a full stop."""
    texts = [one.text for one in of_threads[:PLACES]]
    left = [one.rank for one in of_threads[PLACES:]]
    more = f"; so {'does' if len(left) == 1 else 'do'} {ranks_text(left)}" if left else ""
    return "; ".join(texts) + more + (f"; {others} more were not looked at" if others else "")
