"""Training steps from the marks that PyTorch or the program itself makes: a step ends where the optimiser does, or
where a range that is a step's begins (NVTX).

Where these marks exist, nothing has to be concluded from repetition (:mod:`argus.semantics.steps.by_calls`): steps are
exact from the second one on, whatever is called in between (evaluations, log lines' reductions, varying micro-batches).
Numbers agree on all ranks by the collectives: the last call of a communicator before a step's end is the same on all.

Optimisers come first: what a program calls a step may be a micro-batch. Without them ranges of one name are the steps
if they are called so and nothing contradicts it; or if one begins in each step that the repetition of calls shows;
or, in a program without calls, if they cover most of the time. Of several such names the outermost counts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter as Tally
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge, nsmallest
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from argus.model.event_kinds import payload_bytes
from argus.semantics.phases.cpu import What, innermost
from argus.semantics.steps.by_calls import BY_MARKS, ITERATION
from argus.semantics.steps.range_names import Role

Int = NDArray[np.int64]

FIRST_ENDS = 4
"""Ends of the optimiser wanted on every rank before steps are reported, if a batch is loaded after each of them, or
after none."""
DECIDING_ENDS = 16
"""The same where it is after some: two optimisers that take turns, or a loader that only evaluation uses."""
LOADED_OFTEN = 1 / 8
"""From this share on of the optimiser's ends with a batch loaded after them, these are the steps. Evaluation is rarer
than every 16 steps, so that one at most is among those that decide; no usual program calls an optimiser more than 8
times on one batch."""
FIRST_BACKWARDS = 64
"""Backward passes of a thread until it is believed to have no optimiser that PyTorch knows: as many micro-batches may
come before the first one's end is seen, and look like steps to whoever knows the calls alone."""
MOST_BACKWARDS = 1024
"""The same once an optimiser was seen."""
KEPT_ENDS = 4096
"""Ends kept of a thread until it is known what is a step: hours of usual steps. And of a rank, of those that are to be
numbered."""
MOST_ENDS = 8192
"""Ends numbered in one ``advance``, a tenth of a second, and less than half a second with the phases of their steps:
the oldest of all ranks, so that all get on alike. The others wait for the next."""
PENDING = 64
"""Ends that wait for communicators to be lined up; beyond, ranks are put together by time."""
END_BYTES, BEGIN_BYTES = 120, 8
"""Memory of an optimiser's end (two marks), and of a range's begin, that are kept until it is known what is a step."""
THREAD_BYTES, RANGES_BYTES, ROLE_BYTES = 1200, 350, 8
"""Memory of a thread without ends, of the ranges of a name without begins, and of an open range (``bytes_of`` of
tests/unit/semantics/steps/test_by_marks.py)."""
COUNTED_MARKS = 4096
"""After so many it is counted anew what is kept."""
KEPT_CALLS = 65_536
"""Times of calls kept for steps that have not ended, a rank: as many as the tracker of call sequences keeps."""
KEPT_KEYS = 8192
"""Numbered calls kept of each communicator: a rank may be so many steps behind the first one."""
THREADS = 64
"""Threads looked at, as in :mod:`argus.semantics.phases.cpu`."""
DEPTH = 256
"""Ranges open in one another, likewise."""
USUAL = 32
"""Newest steps from which the usual number of backward passes, and of collectives, is taken."""
RARE = 1 / 8
"""A number of backward passes that fewer of these steps had is odd, if at least half of them have had another one.
Scalers leave the optimiser out more rarely, and where micro-batches vary no number is informative."""
KEPT_BEFORE = 512
"""Calls before the newest step's end are dropped when there are so many: at every end it would cost more."""

EVER = 1 << 64
"""A time after all others."""

RANGES = 64
"""Names of ranges looked at of a thread."""
DECIDING_RANGES = 16
"""Ranges of a name wanted on every rank before they are taken for steps, if there is no sign of an optimiser."""
ACCUMULATED = FIRST_BACKWARDS
"""The same where backward passes have marks, so that an optimiser's may yet come, and for each of its ends that came:
no usual program accumulates more micro-batches."""
OUTER_RANGES = 16
"""A name waits for the names around it, as long as these are not rarer: steps of so many parts are usual."""
COVERED = 0.5
"""Share of the time that ranges cover, of which nothing but their repetition shows that they are steps."""
ONE_A_STEP = 0.9
"""Share of the steps, as calls repeat, in which a range that is a step's begins exactly once. A rank may be attached
inside of one, and an evaluation may be taken for one."""
HEAVY = 0.05
"""Communicators that carry this share of the bytes are called in every step; a log line's need not be."""
CALLED_OFTEN = 0.6
"""Share of the ranges in which they are, at least. Micro-batches reduce gradients in every other at most."""


@dataclass
class _End:
    ts: int
    loaded: bool
    """Whether a batch was loaded between this end and the next."""
    backwards: int
    """Backward passes since the end before; -1: not all were seen."""


@dataclass
class _Ranges:
    """Ranges of one name on one thread."""

    is_step: bool
    depth: int
    begins: array[int] = field(default_factory=lambda: array("q"))
    seen: int = 0
    dropped: int = 0
    """Begins that are not kept, of those that are not yet counted."""
    open: int = 0
    covered: int = 0
    """Time in those that have ended, ns."""
    first: int = 0
    last: int = 0

    def begin(self, ts: int, depth: int) -> None:
        if len(self.begins) >= KEPT_ENDS:
            self.dropped += KEPT_ENDS // 8
            del self.begins[: KEPT_ENDS // 8]
        self.begins.append(ts)
        self.seen += 1
        self.depth = min(self.depth, depth)
        self.first, self.last, self.open = self.first or ts, ts, ts

    def end(self, ts: int) -> None:
        if self.open:
            self.covered, self.last, self.open = self.covered + ts - self.open, ts, 0


@dataclass
class _Thread:
    """Optimiser's ends of one thread: the last before a backward pass. And its ranges that may be steps, by name."""

    roles: list[int] = field(default_factory=list)
    candidate: int = 0
    loaded: bool = False
    backwards: int = -1
    """Begun since the newest end in ``ends``, less the one that revealed it."""
    between: int = -1
    """Those up to the candidate."""
    begun: int = 0
    """Backward passes since an optimiser ended, or since the thread was first seen."""
    ended: bool = False
    """Whether an optimiser has ended."""
    ends: deque[_End] = field(default_factory=lambda: deque(maxlen=KEPT_ENDS))
    seen: int = 0
    dropped: int = 0
    """Ends that are not kept, of those that are not yet counted."""
    passes: bool = False
    """Whether it has had a backward pass."""
    ranges: dict[int, _Ranges] = field(default_factory=dict)
    most: int = 0
    """How often ranges of one of its names were seen, at most."""
    counted: int = 0
    """``size`` when its rank was counted."""

    @property
    def size(self) -> int:
        """Bytes, but for ends and begins."""
        return THREAD_BYTES + ROLE_BYTES * len(self.roles) + RANGES_BYTES * len(self.ranges)

    @property
    def worth(self) -> tuple[int, int]:
        return self.seen, self.most

    def take(self, ts: int, what: int, role: int, handle: int, depth: int) -> None:
        if what == What.STEP_BEGIN:
            ranges = self._range(handle, bool(role), depth)
            ranges.begin(ts, depth)
            self.most = max(self.most, ranges.seen)
        elif what == What.STEP_END:
            if handle in self.ranges:
                self.ranges[handle].end(ts)
        elif what == What.RANGE_BEGIN:
            self.roles = [*self.roles, role][-DEPTH:]
            if role == Role.DATA:
                self.loaded = True
                if not self.candidate and self.ends:
                    self.ends[-1].loaded = True
        elif what == What.RANGE_END and self.roles:
            at = innermost(self.roles, role)
            # Of optimisers in one another the outer one ends last.
            if at >= 0 and self.roles[at] == Role.OPTIMIZER:
                self.candidate, self.loaded, self.between = ts, False, self.backwards
                self.begun, self.ended = 0, True
            if at >= 0:
                del self.roles[at:]
        elif what == What.BACKWARD_BEGIN:
            self.begun += 1
            self.passes = True
            if self.candidate:
                self.confirm()
                self.backwards = 0
            if self.backwards >= 0:
                self.backwards += 1

    @property
    def trains(self) -> bool:
        """Whether an optimiser may be expected to end."""
        return self.begun <= MOST_BACKWARDS if self.ended else 0 < self.begun <= FIRST_BACKWARDS

    def _range(self, handle: int, is_step: bool, depth: int) -> _Ranges:
        if handle not in self.ranges:
            if len(self.ranges) >= RANGES:
                least = min(self.ranges, key=lambda each: (self.ranges[each].is_step, self.ranges[each].seen))
                if self.ranges.pop(least).seen > 1:
                    self.keep(self.ranges)
            self.ranges[handle] = _Ranges(is_step, depth)
        return self.ranges[handle]

    def keep(self, handles: Collection[int]) -> None:
        """Forgets ranges of other names."""
        self.ranges = {handle: ranges for handle, ranges in self.ranges.items() if handle in handles}
        self.most = max((ranges.seen for ranges in self.ranges.values()), default=0)

    def confirm(self) -> None:
        if self.candidate:
            full = len(self.ends) == self.ends.maxlen
            self.ends.append(_End(self.candidate, self.loaded, self.between))
            if full:
                self.dropped += 1
                self.ends[0].backwards = -1
            self.seen += 1
            self.candidate = 0


@dataclass
class _Comms:
    """Communicators of the calls that are kept of a rank, and what is known of them."""

    calls: Tally[int] = field(default_factory=Tally)
    """How many calls of each are kept."""
    fresh: set[int] = field(default_factory=set)
    """Those that were not looked up since they came, or since the communicators were last aligned."""
    aligned: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    """Those that nobody has looked at."""

    def add(self, comms: Int) -> None:
        """Takes the communicators of calls that have come, shape (n,)."""
        for comm, count in zip(*(each.tolist() for each in np.unique(comms, return_counts=True)), strict=True):
            if comm not in self.calls:
                self.fresh.add(comm)
            self.calls[comm] += count

    def remove(self, comms: Int) -> None:
        """Takes the communicators of calls that are no longer kept, shape (n,)."""
        for comm, count in zip(*(each.tolist() for each in np.unique(comms, return_counts=True)), strict=True):
            self.calls[comm] -= count
            if not self.calls[comm]:
                del self.calls[comm]
                for each in (self.fresh, self.aligned, self.doubtful, self.unknown):
                    each.discard(comm)

    def forget(self) -> None:
        """Communicators were aligned anew."""
        self.fresh = set(self.calls)
        self.aligned, self.doubtful, self.unknown = set(), set(), set()

    def look_up(self, rank: int, groups: Collection[tuple[int, int]], doubtful: Collection[tuple[int, int]]) -> None:
        """Sorts those that are fresh by what is known of them."""
        for comm in self.fresh:
            key = rank, comm
            if key in groups:
                self.aligned.add(comm)
            if key in doubtful:
                self.doubtful.add(comm)
            elif key not in groups:
                self.unknown.add(comm)
        self.fresh.clear()


@dataclass
class _Rank:
    rank: int
    threads: dict[int, _Thread] = field(default_factory=dict)
    comm: Int = field(default_factory=lambda: np.empty(0, np.int64))
    seq: Int = field(default_factory=lambda: np.empty(0, np.int64))
    called: Int = field(default_factory=lambda: np.empty(0, np.int64))
    """Entries of its collectives, in order."""
    nbytes: Int = field(default_factory=lambda: np.empty(0, np.int64))
    launched: Int = field(default_factory=lambda: np.empty(0, np.int64))
    comms: _Comms = field(default_factory=_Comms)
    fed: int = 0
    """Marks since it was counted what is kept of them."""
    held: int = 0
    """Bytes that were kept of marks then."""
    structure: int = 0
    """Bytes of threads and names of ranges."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Steps' ends that have no number yet: time and backward passes, -1: not known."""
    last: tuple[int, int] | None = None
    """Time and number of the newest that has."""
    looked: int = 0
    """Time of the newest end whose calls were looked at."""
    awaited: list[tuple[int, int]] = field(default_factory=list)
    """Group and number of calls: as soon as one of them has a step's number, its next end may be numbered, or its first
    one be placed. Of the newest time that was tried."""
    reported: int = 0
    """Rows since its calls were last lined up otherwise."""
    moved: bool = False
    """Whether that has happened since the newest step that has a number."""
    merged: bool = False
    """Whether the next step has an end inside of it that was none."""
    usual: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=USUAL))
    """Backward passes and collectives of the newest steps."""
    bounds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PENDING))
    calls: bool = False
    """Whether it has made any."""

    def odd(self, backwards: int) -> bool:
        """Whether a step of so many backward passes is unlike the newest ones: an optimiser's end may lack."""
        if backwards < 0 or not self.usual:
            return False
        counts = Tally(each for each, _ in self.usual)
        ((_, most),) = counts.most_common(1)
        return 2 * most >= len(self.usual) and counts[backwards] < RARE * len(self.usual)

    def count(self, tids: Iterable[int]) -> None:
        """Counts anew what these threads take."""
        for tid in tids:
            if (thread := self.threads.get(tid)) is not None:
                self.structure += thread.size - thread.counted
                thread.counted = thread.size

    def remove(self, tid: int) -> None:
        """Forgets a thread."""
        self.structure -= self.threads.pop(tid).counted

    def main(self) -> _Thread | None:
        return max(self.threads.values(), key=lambda thread: thread.seen, default=None)

    def drop_ends(self, name: int | None) -> int:
        """Forgets all that are to be numbered, or kept until it is known what is a step; returns how many they were.
        ``name``: of the ranges that are steps; None: optimisers' ends are."""
        main = self.main()
        number = len(self.ends) + (len(main.ends) if main is not None and name is None else 0)
        number += len(self.ranges()[name].begins) if name is not None and name in self.ranges() else 0
        self.ends.clear()
        for thread in self.threads.values():
            thread.ends.clear()
            for ranges in thread.ranges.values():
                del ranges.begins[:]
        return number

    def ranges(self) -> dict[int, _Ranges]:
        """Those that may be steps, by name: those of the first thread that has no less than half of the most. (One that
        fetches batches is some batches ahead.)"""
        by_handle: dict[int, _Ranges] = {}
        for _, thread in sorted(self.threads.items()):
            for handle, ranges in thread.ranges.items():
                if handle not in by_handle or ranges.seen > 2 * by_handle[handle].seen:
                    by_handle[handle] = ranges
        return by_handle


@dataclass(frozen=True)
class Handover:
    """A rank's steps at the moment from which on only its backward passes are seen.

    Attributes:
        per_step: Backward passes of a step.
        number: Of the step that it is in.
        after_ns: When the last whole step ended; 0: none has.
        step_ns: How long one takes; 0: not known.
        pulses: Backward passes of the step that it is in.
        collectives: Of a step.
        tid: The thread that makes them; 0: not known.
    """

    per_step: int
    number: int
    after_ns: int
    step_ns: int
    pulses: int
    collectives: int
    tid: int


def _turn(state: _Rank) -> tuple[bool, float]:
    """Sorts those that are not sure by their next end: of equals, a rank that lacks an end has the longer step."""
    if state.last is None or not state.ends:
        return True, 0
    end = state.ends[0][0]
    return False, end + (end - state.last[0]) / 2


def _needed(state: _Rank) -> int:
    """Ranges of a rank that are wanted before they are taken for steps."""
    threads = state.threads.values()
    ends = sum(thread.seen + bool(thread.candidate) for thread in threads)
    passes = any(thread.passes for thread in threads)
    return (ACCUMULATED if ends or passes else DECIDING_RANGES) * (1 + ends)


def _plausible(state: _Rank, ranges: _Ranges) -> bool:
    """Whether every communicator that carries much is called in most of the ranges: parts of steps lack some."""
    begins = np.array(ranges.begins, np.int64)
    within = np.searchsorted(begins, state.called, side="right") - 1
    inside = (within >= 0) & (within < len(begins) - 1)
    if len(state.called) and state.called[0] > begins[0]:  # older calls are not kept
        inside &= within > np.searchsorted(begins, state.called[0])
    if not inside.any():
        return True
    comm, nbytes, within = state.comm[inside], state.nbytes[inside], within[inside]
    nbytes = nbytes if nbytes.any() else np.ones_like(nbytes)  # sizes are not known
    every = int(within.max() - within.min()) + 1
    # Those that carry much are a few, however many there are.
    each, which = np.unique(comm, return_inverse=True)
    carried = np.zeros(len(each), np.int64)
    np.add.at(carried, which, nbytes)
    heavy = np.flatnonzero(carried >= HEAVY * nbytes.sum()).tolist()
    return all(len(np.unique(within[which == one])) >= CALLED_OFTEN * every for one in heavy)


class MarkedSteps:
    """Steps of one job from its ranks' marks.

    Attributes:
        counters: ``steps_before_first`` (ended before the first one that was numbered), ``steps_repeated`` (at or
            before the number before, merged into the next), ``families_joined_by_time``, ``steps_counted_anew`` (of
            a rank whose calls turned out to be lined up otherwise, reported with numbers that are not the others'),
            ``step_ends_dropped`` (left at the end, or beyond those kept of a rank: what lies between is one step).
    """

    def __init__(self) -> None:
        self.counters: Tally[str] = Tally()
        self._ranks: dict[int, _Rank] = {}
        self._groups: dict[tuple[int, int], tuple[int, int]] = {}
        self._lined: dict[tuple[int, int], tuple[int, int]] = {}
        """``_groups``, and what it had of those that are in doubt since."""
        self._doubtful: set[tuple[int, int]] = set()
        self._sizes: dict[int, int] = {}
        self._shared: set[int] = set()
        """Ranks that have a communicator with others."""
        self._numbers: dict[int, dict[int, int]] = {}
        self._heard: list[tuple[int, int]] = []
        """Group and number of calls that have newly got a step's number."""
        self._placed = False
        """Whether a rank's end has a number."""
        self._newest = EVER
        """Ends up to this time are numbered in this ``advance``."""
        self._by_batch: bool | None = None
        self._range: int | None = None
        """The name of the ranges that are steps; None: optimisers' ends are, or nothing is known yet."""
        self._refused: dict[int, int] = {}
        """How often ranges had been seen when calls spoke against them."""

    @property
    def ranks(self) -> set[int]:
        """Those that have had marks."""
        return {rank for rank, state in self._ranks.items() if state.threads}

    @property
    def wanted(self) -> int | None:
        """Of which name ranges are to be fed that may be steps; None: of all; 0: of none."""
        return self._range or (None if self._by_batch is None else 0)

    # ---- what happened

    def feed_marks(self, rank: int, marks: NDArray[np.void]) -> None:
        """Takes marks of a rank: :data:`argus.semantics.phases.cpu.MARK`, those of each thread in order, shape (n,)."""
        state = self._ranks.setdefault(rank, _Rank(rank))
        threads = state.threads
        wanted = marks[(marks["what"] <= What.BACKWARD_BEGIN) | (marks["what"] >= What.STEP_BEGIN)]
        columns = (wanted[name].tolist() for name in ("tid", "ts_ns", "what", "role", "handle", "depth"))
        state.fed += len(wanted)
        for tid, ts, what, role, handle, depth in zip(*columns, strict=True):
            thread = threads.get(tid)
            if thread is None:
                if len(threads) >= THREADS:
                    state.remove(min(threads, key=lambda tid: threads[tid].worth))
                thread = threads[tid] = _Thread()
            thread.take(ts, what, role, handle, depth)
        state.count(np.unique(wanted["tid"]).tolist())

    def feed_calls(self, rank: int, launched: Int | None, collectives: NDArray[np.void] | None) -> None:
        """Takes calls of a rank.

        Args:
            rank: Global rank.
            launched: Entries of launches, ns, shape (n,).
            collectives: :data:`argus.model.records.COLLECTIVE` rows of collective operations.
        """
        state = self._ranks.setdefault(rank, _Rank(rank))
        state.calls |= bool(launched is not None and len(launched)) or bool(
            collectives is not None and len(collectives)
        )
        if launched is not None:
            state.launched = np.sort(np.concatenate([state.launched, launched.astype(np.int64)]), kind="stable")
            state.launched = state.launched[-KEPT_CALLS:]
        if collectives is not None:
            called = np.concatenate([state.called, collectives["ts_ns"].astype(np.int64)])
            order = np.argsort(called, kind="stable")
            gone, order = order[:-KEPT_CALLS], order[-KEPT_CALLS:]
            state.called = called[order]
            comm = np.concatenate([state.comm, collectives["comm"].astype(np.int64)])
            state.comms.add(comm[len(state.comm) :])
            state.comms.remove(comm[gone])
            state.comm = comm[order]
            state.seq = np.concatenate([state.seq, collectives["seq"].astype(np.int64)])[order]
            state.nbytes = np.concatenate([state.nbytes, payload_bytes(collectives).astype(np.int64)])[order]

    def align(self, communicators: NDArray[np.void]) -> None:
        """Takes what is known of the communicators: :data:`argus.semantics.groups.communicators.COMMUNICATOR` rows, all
        of them."""
        names = ("rank", "comm", "comm_group", "seq_offset", "nranks", "error")
        self._groups, self._doubtful, seen = {}, set(), Tally[int]()
        sizes: dict[int, int] = {}
        moved: set[int] = set()
        for rank, comm, group, offset, nranks, error in zip(*(communicators[n].tolist() for n in names), strict=True):
            key = rank, int(np.int64(np.uint64(comm)))
            if error:
                self._doubtful.add(key)
                continue
            before = self._lined.get(key, (group, offset))
            if before != (group, offset):
                moved |= {before[0], group}
                if rank in self._ranks:
                    self._ranks[rank].moved = True
            self._groups[key] = group, offset
            seen[group] += 1
            sizes[group] = max(nranks, seen[group])
        self._sizes = sizes
        self._shared = {rank for (rank, _), (group, _) in self._groups.items() if sizes[group] > 1}
        for state in self._ranks.values():
            state.comms.forget()
        self._lined = {key: place for key, place in self._lined.items() if key in self._doubtful} | self._groups
        # Where calls are numbered anew, steps' old numbers of calls mean others.
        kept = set(communicators["comm_group"].tolist()) - moved
        self._numbers = {group: numbers for group, numbers in self._numbers.items() if group in kept}

    # ---- steps

    def ready(self, ranks: Iterable[int], *, final: bool = False) -> bool:
        """Whether these ranks' steps can be found by their marks.

        Args:
            ranks: All that have made calls or marks.
            final: Nothing more will come.
        """
        if self._by_batch is not None:
            return True
        ranks = list(ranks)
        return self._ready_by_ends(ranks, final) or self._ready_by_names(ranks, final)

    def _ready_by_ends(self, ranks: list[int], final: bool) -> bool:
        """Whether the optimiser's ends are known well enough."""
        threads = []
        for rank in ranks:
            thread = self._ranks[rank].main() if rank in self._ranks else None
            if thread is None:
                return False
            if final:
                thread.confirm()
            threads.append(thread)
        # The newest end may still be followed by a batch.
        loaded = [[end.loaded for end in list(thread.ends)[:-1]] for thread in threads]
        if not threads or min(map(len, loaded)) < (1 if final else FIRST_ENDS - 1):
            return False
        flags = [flag for of_rank in loaded for flag in of_rank]
        if all(flags) or not any(flags) or final or min(map(len, loaded)) >= DECIDING_ENDS:
            self._by_batch = sum(flags) >= LOADED_OFTEN * len(flags)
            return True
        return False

    def expects(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks' steps will be found by their marks before long. Arguments as for :meth:`ready`."""
        known = [self._ranks[rank].threads.values() if rank in self._ranks else () for rank in ranks]
        return bool(known) and all(any(thread.trains for thread in threads) for threads in known)

    def _ready_by_names(self, ranks: list[int], final: bool) -> bool:
        """Whether ranges of one name are steps on all these ranks: they are called so, or cover the time of a program
        without calls."""
        states = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        if not states or len(states) < len(ranks):
            return False
        around = 0  # how often the names around the one looked at were seen
        for handle, ranges in self._common(states):
            seen = min(each.seen for each in ranges)
            if around * OUTER_RANGES > seen and not final:
                return False
            all_named_steps = all(each.is_step for each in ranges)
            covers = not any(state.calls for state in states) and all(
                each.covered >= COVERED * (each.last - each.first) for each in ranges
            )
            if not all_named_steps and not covers:
                continue
            if seen < 2 or (not final and seen < max(map(_needed, states))):
                around = max(around, seen if seen > 1 else 0)
                continue
            if not final and seen < 1.25 * self._refused.get(handle, 0):
                continue
            if all(_plausible(state, each) for state, each in zip(states, ranges, strict=True)):
                self._choose(handle)
                return True
            self._refused[handle] = seen
        return False

    def agree(self, steps: NDArray[np.void]) -> bool:
        """Whether ranges of one name begin once in each of these steps, as the repetition of calls shows them. Then the
        ranges are the steps.

        Args:
            steps: :data:`argus.semantics.steps.by_calls.ITERATION` rows, the first that were found.
        """
        ranks = np.unique(steps["rank"]).tolist()
        states = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        if self._by_batch is not None or not states or len(states) < len(ranks):
            return False
        for handle, ranges in self._common(states):
            for rank, each in zip(ranks, ranges, strict=True):
                of_rank = np.sort(steps[steps["rank"] == rank], order="ts_ns")
                edges = of_rank["ts_ns"].astype(np.int64)
                begins = np.array(each.begins, np.int64)
                counts = np.searchsorted(begins, edges + of_rank["duration_ns"].astype(np.int64)) - np.searchsorted(
                    begins, edges
                )
                if np.mean(counts == 1) < ONE_A_STEP:
                    break
            else:
                self._choose(handle)
                return True
        return False

    @staticmethod
    def _common(states: list[_Rank]) -> list[tuple[int, list[_Ranges]]]:
        """The ranges that all these ranks have, by name, the outermost first; of equals, those that came first."""
        of_each = [state.ranges() for state in states]
        common = [handle for handle in of_each[0] if all(handle in ranges for ranges in of_each)]
        candidates = [(handle, [ranges[handle] for ranges in of_each]) for handle in common]
        return sorted(candidates, key=lambda one: (max(each.depth for each in one[1]), one[1][0].first))

    def _choose(self, handle: int) -> None:
        self._range, self._by_batch = handle, False
        for state in self._ranks.values():
            for thread in state.threads.values():
                thread.keep({handle})
            state.count(state.threads)

    def hand_over(self, rank: int) -> Handover:
        """How a rank's steps go on by its backward passes alone, or by its ranges' begins: after ``advance`` with
        ``final``."""
        state = self._ranks[rank]
        thread = state.main() or _Thread()
        if self._range is not None:
            thread = max(state.threads.values(), key=lambda each: each.worth[1], default=thread)
        passes = [count for count, _ in state.usual if count > 0] or [
            end.backwards for end in thread.ends if end.backwards > 0
        ]
        per_step = Tally(passes).most_common(1)[0][0] if passes and self._range is None else 1
        durations = np.diff([end for end, _ in state.bounds])
        tid = next((tid for tid, each in state.threads.items() if each is thread), 0)
        return Handover(
            per_step,
            state.last[1] if state.last else 0,
            state.last[0] if state.last else 0,
            int(np.median(durations)) if len(durations) else 0,
            # A range that is a step's began where the last step ended.
            1 if self._range is not None else (thread.begun - 1) % per_step + 1 if state.last and thread.begun else 0,
            Tally(count for _, count in state.usual).most_common(1)[0][0] if state.usual else 0,
            tid,
        )

    def advance(self, until_ns: int, *, final: bool = False) -> NDArray[np.void]:
        """The steps completed since the last call.

        Args:
            until_ns: All calls before this have been fed.
            final: Nothing more will come.

        Returns:
            :data:`argus.semantics.steps.by_calls.ITERATION` rows, ordered by rank and step.
        """
        if self._by_batch is None:
            return np.empty(0, ITERATION)
        states = [state for _, state in sorted(self._ranks.items())]
        for state in states:
            self._collect(state, until_ns, final)
        self._newest = self._newest_of_oldest(states)
        return np.array(sorted(self._number_all(states, final), key=lambda row: row[:2]), ITERATION)

    @property
    def waiting(self) -> bool:
        """Whether ends wait for the next ``advance``."""
        return any(state.ends for state in self._ranks.values())

    @staticmethod
    def _newest_of_oldest(states: list[_Rank]) -> int:
        """Up to which time these ranks' ends are numbered at once: that of the newest of the ``MOST_ENDS`` oldest. Of
        very many ranks there are more, so that ranks which wait for others with a few ends do not take up all."""
        most = max(MOST_ENDS, PENDING * len(states))
        if sum(len(state.ends) for state in states) <= most:
            return EVER
        return max(islice(merge(*(state.ends for state in states)), most))[0]

    def _waits(self, state: _Rank) -> bool:
        """Whether a rank has an end that is to be numbered in this ``advance``."""
        return bool(state.ends) and state.ends[0][0] <= self._newest

    def _number_all(self, states: list[_Rank], final: bool) -> list[tuple[float, ...]]:
        """Rows of the ends of these ranks that can be numbered now. Who is sure comes first, in rounds by rank. Only
        when all of these have been heard, one goes on that is not. Only those are tried again that got something to go
        by: all in each round would be quadratic."""
        rows: list[tuple[float, ...]] = []
        asking: dict[tuple[int, int], set[int]] = {}
        in_turn = [(*_turn(state), place) for place, state in enumerate(states) if self._waits(state)]
        heapify(in_turn)
        this_round, to_come, next_round = list(range(len(states))), set(range(len(states))), set[int]()

        def number(place: int, *, unsure: bool) -> bool:
            """Goes on with a rank. Whether one of its ends has a number now."""
            state = states[place]
            before = len(state.ends)
            rows.extend(self._number(state, final, unsure=unsure))
            for key in state.awaited:
                asking.setdefault(key, set()).add(place)
            if self._waits(state) and len(state.ends) < before:
                heappush(in_turn, (*_turn(state), place))
            for other in set[int]().union(*(asking.pop(key, ()) for key in self._heard)) - {place}:
                if other <= place or unsure:
                    next_round.add(other)
                elif other not in to_come:
                    to_come.add(other)
                    heappush(this_round, other)
            self._heard.clear()
            return len(state.ends) < before

        while True:
            while this_round:
                place = heappop(this_round)
                to_come.discard(place)
                number(place, unsure=False)
            while not next_round and in_turn:
                alone, turn, place = heappop(in_turn)
                # It may have been put in with an end that has its number by now.
                if self._waits(states[place]) and (alone, turn) == _turn(states[place]) and number(place, unsure=True):
                    break
            else:
                if not next_round:
                    break
            this_round, to_come, next_round = sorted(next_round), next_round, set()
        return rows

    def _collect(self, state: _Rank, until_ns: int, final: bool) -> None:
        """Moves what ends steps from the main thread to the rank: optimiser's ends, or the begins of its ranges."""
        newest = state.ends[-1][0] if state.ends else state.last[0] if state.last else 0
        if self._range is not None:
            ranges = state.ranges().get(self._range)
            if ranges is not None:
                until = len(ranges.begins) if final else bisect_right(ranges.begins, until_ns)
                until = until if final else min(until, KEPT_ENDS - len(state.ends))
                self._count_dropped(ranges)
                state.ends += [(ts, 0) for ts in ranges.begins[:until] if ts > newest]
                del ranges.begins[:until]
            return
        thread = state.main()
        if thread is None:
            return
        if final:
            thread.confirm()
        self._count_dropped(thread)
        while thread.ends and (final or (thread.ends[0].ts <= until_ns and len(state.ends) < KEPT_ENDS)):
            end = thread.ends[0]
            if end.ts <= newest:
                pass  # of a thread that was not the main one until now
            elif self._by_batch and not end.loaded and not (final and len(thread.ends) == 1):
                if len(thread.ends) == 1:
                    break  # a batch may yet be loaded
                later = thread.ends[1]
                later.backwards = -1 if min(end.backwards, later.backwards) < 0 else end.backwards + later.backwards
            else:
                state.ends.append((end.ts, end.backwards))
            thread.ends.popleft()

    def _count_dropped(self, kept: _Thread | _Ranges) -> None:
        self.counters["step_ends_dropped"] += kept.dropped
        kept.dropped = 0

    def _keys(self, state: _Rank, end: int) -> list[tuple[int, int]]:
        """(group, number of its last call) of each communicator that was called since the end looked at before."""
        first, until = state.called.searchsorted([state.looked, end], side="right").tolist()
        state.looked = end
        newest_of = dict(zip(state.comm[first:until].tolist(), state.seq[first:until].tolist(), strict=True))
        keys = []
        for comm, newest in sorted(newest_of.items()):
            group, offset = self._groups.get((state.rank, comm), (-1, 0))
            if self._sizes.get(group, 1) > 1:
                keys.append((group, newest + offset))
        return keys

    def _number(self, state: _Rank, final: bool, *, unsure: bool = False) -> list[tuple[float, ...]]:
        """Rows of the ends that can be numbered now.

        Args:
            state: The rank.
            final: Nothing more will come.
            unsure: All others have been heard: the first end is numbered though there is a doubt.
        """
        state.awaited = []
        if not self._waits(state):
            return []
        comms = state.comms
        comms.look_up(state.rank, self._groups, self._doubtful)
        patient = not final and len(state.ends) < PENDING
        if patient and comms.unknown:
            return []  # they will be looked at within a second
        if state.last is None:
            if patient and comms.doubtful and not comms.aligned:
                return []  # more calls may still show how the ranks line up
            self._find_place(state, patient or not unsure)
            if state.last is not None:
                unsure = False
        rows: list[tuple[float, ...]] = []
        while state.last is not None and self._waits(state):
            end, backwards = state.ends[0]
            before, number = state.last
            looked, keys = state.looked, self._keys(state, end)
            agreed = [n for group, key in keys if (n := self._numbers.get(group, {}).get(key)) is not None]
            called, launched = (
                int(np.subtract(*times.searchsorted([end, before], side="right")))
                for times in (state.called, state.launched)
            )
            usual = Tally(state.usual).most_common(1)[0][0] if state.usual else (backwards, called)
            if keys and not agreed and backwards >= 0 and (backwards, called) != usual:
                # Perhaps an end was lost. Those of the others are there once all have gone one step further.
                if not unsure or (len(state.ends) == 1 and not final):
                    state.looked, state.awaited = looked, keys
                    break
                unsure = False
            del state.ends[0]
            here = agreed[0] if agreed else number + 1
            if state.moved and keys:
                # Rows keep their numbers, and only those are wrong that do not lead to this one.
                self.counters["steps_counted_anew"] += state.reported if here != number + 1 else 0
                state.moved, state.reported = False, 0
            if here <= number:
                self.counters["steps_repeated"] += 1
                state.merged = True
                continue
            for group, key in keys:
                self._remember(group, key, here)
            sure = 1.0 if here == number + 1 and not state.odd(backwards) and not state.merged else 0.5
            if backwards >= 0:
                state.usual.append((backwards, called))
            state.merged = False
            state.last = end, here
            state.bounds.append(state.last)
            if here > 0:
                state.reported += 1
                rows.append((state.rank, here - 1, before, end - before, called, launched, BY_MARKS, sure))
            else:
                self.counters["steps_before_first"] += 1
            self._prune(state, end)
        return rows

    def _find_place(self, state: _Rank, patient: bool) -> None:
        """Numbers a rank's first end, by the first of its ends that another rank has had, too."""
        if not self._placed:
            self._place(state, 0)
            return
        awaited: list[tuple[int, int]] = []
        for place, (end, _) in enumerate(state.ends):
            keys = self._keys(state, end)
            # Calls before the first end may be of any step.
            for group, key in keys if place else ():
                number = self._numbers.get(group, {}).get(key)
                if number is not None:
                    self._place(state, number - place)
                    return
                awaited.append((group, key))
        state.looked = 0
        alone = state.rank not in self._shared
        # Who has had a few steps and no call in common will have none.
        if patient and not (alone and len(state.ends) >= FIRST_ENDS):
            state.awaited = awaited
            return
        # No call in common: steps of the ranks overlap in time.
        of_others = [other.bounds for other in self._ranks.values() if other.bounds]
        if of_others:
            self.counters["families_joined_by_time"] += 1
            oldest = min(bounds[0][0] for bounds in of_others)
            place = next((i for i, (end, _) in enumerate(state.ends) if end >= oldest), len(state.ends) - 1)
            chosen = state.ends[place][0]
            beside = [(bounds, bisect_left(bounds, (chosen, 0))) for bounds in of_others]
            nearest = [bounds[i] for bounds, at in beside for i in (at - 1, at) if 0 <= i < len(bounds)]
            self._place(state, min(nearest, key=lambda bound: abs(bound[0] - chosen))[1] - place)

    def _place(self, state: _Rank, number: int) -> None:
        end, _ = state.ends.pop(0)
        self._placed = True
        state.looked = end
        state.last = end, number
        state.bounds.append(state.last)

    def _remember(self, group: int, key: int, number: int) -> None:
        numbers = self._numbers.setdefault(group, {})
        if key not in numbers:
            numbers[key] = number
            self._heard.append((group, key))
        if len(numbers) > KEPT_KEYS:
            del numbers[next(iter(numbers))]

    @staticmethod
    def _prune(state: _Rank, end: int) -> None:
        """Drops calls before a step's end."""
        until = bisect_right(state.called, end)
        if until > KEPT_BEFORE:
            state.comms.remove(state.comm[:until])
            state.called, state.comm, state.seq, state.nbytes = (
                column[until:] for column in (state.called, state.comm, state.seq, state.nbytes)
            )
        gone = bisect_right(state.launched, end)
        if gone > KEPT_BEFORE:
            state.launched = state.launched[gone:]


def drop_ends(steps: MarkedSteps) -> None:
    """Forgets all ends that have no number yet (``step_ends_dropped``)."""
    steps.counters["step_ends_dropped"] += sum(state.drop_ends(steps._range) for state in steps._ranks.values())


def forget_calls(steps: MarkedSteps) -> None:
    """Gives back what calls are kept, up to 2.5 MB a rank: nobody asks for them any more, or the ``final`` steps were
    taken. What is fed later goes on from there."""
    for state in steps._ranks.values():
        state.comm = state.seq = state.called = state.nbytes = state.launched = np.empty(0, np.int64)
        state.comms = _Comms()


def forget_marks(steps: MarkedSteps) -> None:
    """Gives back what is kept of marks until it is known what is a step, and the numbers of calls. To be called after
    the ``final`` steps were taken: what is fed later goes on from there, as after a loss."""
    steps._numbers = {}
    for state in steps._ranks.values():
        state.awaited = []
        # The others' ends were never looked at.
        main = state.main()
        for tid in [tid for tid, thread in state.threads.items() if thread is not main]:
            state.remove(tid)
        for thread in state.threads.values():
            thread.ends.clear()
            thread.keep(())
            thread.roles = []
        state.count(state.threads)
        state.fed, state.held = COUNTED_MARKS + 1, 0


def kept_marks(steps: MarkedSteps, rank: int) -> int:
    """Bytes that are kept of a rank's marks until it is known what is a step, at most."""
    state = steps._ranks.get(rank)
    if state is None:
        return 0
    if state.fed > COUNTED_MARKS:
        ends = sum(len(thread.ends) for thread in state.threads.values())
        begins = sum(len(ranges.begins) for thread in state.threads.values() for ranges in thread.ranges.values())
        state.fed, state.held = 0, END_BYTES * ends + BEGIN_BYTES * begins
    return state.structure + state.held + END_BYTES * state.fed // 2


def keep_marks(steps: MarkedSteps, rank: int, most: int) -> None:
    """Keeps so many bytes of a rank's newest marks, and of the threads and names with most of them; those that go are
    ``step_ends_dropped``, as far as they end steps."""
    state = steps._ranks[rank]
    state.fed += COUNTED_MARKS + 1
    if kept_marks(steps, rank) <= most:
        return
    _keep_names(steps, state, max(most // 2, most - state.held))
    state.fed += COUNTED_MARKS + 1
    kept_marks(steps, rank)  # counted anew
    room = max(most - state.structure, 0)
    if state.held <= room:
        return
    part = room / state.held
    for thread in state.threads.values():
        gone = len(thread.ends) - int(part * len(thread.ends))
        thread.dropped += gone
        for _ in range(gone):
            thread.ends.popleft()
        for ranges in thread.ranges.values():
            gone = len(ranges.begins) - int(part * len(ranges.begins))
            ranges.dropped += gone
            ranges.begins = ranges.begins[gone:]
    state.held = room


def _keep_names(steps: MarkedSteps, state: _Rank, most: int) -> None:
    """Keeps so many bytes of a rank's threads and names of ranges: those with most marks, and its main thread. Of what
    goes begins of steps are counted: of ranges that are the steps or, while that is not known, are called so. (Ends of
    another than the main thread end no steps.)"""
    excess = state.structure - most
    if excess <= 0:
        return
    ranges = [
        (each.is_step, each.seen, tid, name) for tid, of in state.threads.items() for name, each in of.ranges.items()
    ]
    going = nsmallest(-(-excess // RANGES_BYTES), ranges)
    undecided = steps._by_batch is None
    ends_steps = [is_step if undecided else name == steps._range for is_step, _, _, name in going]
    shown = state.ranges() if any(ends_steps) else {}
    for (_, _, tid, name), counts in zip(going, ends_steps, strict=True):
        gone = state.threads[tid].ranges.pop(name)
        if counts and shown[name] is gone:
            steps.counters["step_ends_dropped"] += len(gone.begins) + gone.dropped
    left = state.structure - RANGES_BYTES * len(going)
    main = state.main()
    for tid, thread in sorted(state.threads.items(), key=lambda item: item[1].worth):
        if left <= most:
            break
        if thread is not main and not thread.ranges:
            left -= thread.size
            state.remove(tid)
    changed = {tid for _, _, tid, _ in going} & state.threads.keys()
    for tid in changed:
        thread = state.threads[tid]
        thread.keep(thread.ranges)  # a dictionary of which much was removed is as large as before
    state.count(changed)


def kept_calls(steps: MarkedSteps, rank: int) -> int:
    """Bytes that are kept of a rank's calls."""
    state = steps._ranks.get(rank)
    return 0 if state is None else 8 * (len(state.launched) + 4 * len(state.called))


def keep_calls(steps: MarkedSteps, rank: int, most: int) -> int:
    """Keeps so many bytes of a rank's newest calls. Returns how many calls of steps that have not ended go."""
    state = steps._ranks[rank]
    part = most / max(kept_calls(steps, rank), 1)
    since = state.last[0] if state.last is not None else 0
    called, launched = (max(len(times) - int(part * len(times)), 0) for times in (state.called, state.launched))
    lost = int(np.sum(state.called[:called] > since)) + int(np.sum(state.launched[:launched] > since))
    state.comms.remove(state.comm[:called])
    state.called, state.comm, state.seq, state.nbytes = (
        column[called:].copy() for column in (state.called, state.comm, state.seq, state.nbytes)
    )
    state.launched = state.launched[launched:].copy()
    return lost
