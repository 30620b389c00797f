"""Training steps from the marks that PyTorch itself makes: a step ends where the optimiser does.

Where these marks exist, nothing has to be concluded from repetition (:mod:`argus.semantics.steps`): steps are exact
from the second one on, whatever is called in between (evaluations, log lines' reductions, varying micro-batches).
Numbers agree on all ranks by the collectives: the last call of a communicator before a step's end is the same on all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.semantics.phases import Role, What
from argus.semantics.steps import BY_MARKS, ITERATION

Int = NDArray[np.int64]

FIRST_ENDS = 4
"""Ends of the optimiser wanted on every rank before steps are told, if a batch is loaded after each of them, or after
none."""
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
"""Ends kept of a thread until it is known what is a step: hours of usual steps."""
PENDING = 64
"""Ends that wait for communicators to be lined up; beyond, ranks are put together by time."""
KEPT_CALLS = 65_536
"""Times of calls kept for steps that have not ended, a rank: as many as the tracker of call sequences keeps."""
KEPT_KEYS = 8192
"""Numbered calls kept of each communicator: a rank may be so many steps behind the first one."""
THREADS = 64
"""Threads looked at, as in :mod:`argus.semantics.phases`."""
DEPTH = 256
"""Ranges open in one another, likewise."""
USUAL = 32
"""Newest steps from which the usual number of backward passes, and of collectives, is taken."""
RARE = 1 / 8
"""A number of backward passes that fewer of these steps had is odd, if at least half of them have had another one.
Scalers leave the optimiser out more rarely, and where micro-batches vary no number says anything."""
KEPT_BEFORE = 512
"""Calls before the newest step's end are dropped when there are so many: at every end it would cost more."""


@dataclass
class _End:
    ts: int
    loaded: bool
    """Whether a batch was loaded between this end and the next."""
    backwards: int
    """Backward passes since the end before; -1: not all were seen."""


@dataclass
class _Thread:
    """Optimiser's ends of one thread: the last before a backward pass."""

    roles: list[int] = field(default_factory=list)
    candidate: int = 0
    loaded: bool = False
    backwards: int = -1
    """Begun since the newest end in ``ends``, less the one that told it."""
    between: int = -1
    """Those up to the candidate."""
    begun: int = 0
    """Backward passes since an optimiser ended, or since the thread was first seen."""
    ended: bool = False
    """Whether an optimiser has ended."""
    ends: deque[_End] = field(default_factory=lambda: deque(maxlen=KEPT_ENDS))
    seen: int = 0

    def take(self, ts: int, what: int, role: int) -> None:
        if what == What.RANGE_BEGIN:
            self.roles = [*self.roles, role][-DEPTH:]
            if role == Role.DATA:
                self.loaded = True
                if not self.candidate and self.ends:
                    self.ends[-1].loaded = True
        elif what == What.RANGE_END and self.roles:
            # Of optimisers in one another the outer one ends last.
            if self.roles.pop() == Role.OPTIMIZER:
                self.candidate, self.loaded, self.between = ts, False, self.backwards
                self.begun, self.ended = 0, True
        elif what == What.BACKWARD_BEGIN:
            self.begun += 1
            if self.candidate:
                self.confirm()
                self.backwards = 0
            if self.backwards >= 0:
                self.backwards += 1

    @property
    def trains(self) -> bool:
        """Whether an optimiser may be expected to end."""
        return self.begun <= MOST_BACKWARDS if self.ended else 0 < self.begun <= FIRST_BACKWARDS

    def confirm(self) -> None:
        if self.candidate:
            self.ends.append(_End(self.candidate, self.loaded, self.between))
            self.seen += 1
            self.candidate = 0


@dataclass
class _Rank:
    rank: int
    threads: dict[int, _Thread] = field(default_factory=dict)
    comm: Int = field(default_factory=lambda: np.empty(0, np.int64))
    seq: Int = field(default_factory=lambda: np.empty(0, np.int64))
    called: Int = field(default_factory=lambda: np.empty(0, np.int64))
    """Entries of its collectives, in order."""
    launched: Int = field(default_factory=lambda: np.empty(0, np.int64))
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Steps' ends that have no number yet: time and backward passes, -1: not known."""
    last: tuple[int, int] | None = None
    """Time and number of the newest that has."""
    looked: int = 0
    """Time of the newest end whose calls were looked at."""
    told: int = 0
    """Rows since its calls were last lined up otherwise."""
    moved: bool = False
    """Whether that has happened since the newest step that has a number."""
    merged: bool = False
    """Whether the next step has an end inside of it that was none."""
    usual: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=USUAL))
    """Backward passes and collectives of the newest steps."""
    bounds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PENDING))

    def odd(self, backwards: int) -> bool:
        """Whether a step of so many backward passes is unlike the newest ones: an optimiser's end may lack."""
        if backwards < 0 or not self.usual:
            return False
        counts = Tally(each for each, _ in self.usual)
        ((_, most),) = counts.most_common(1)
        return 2 * most >= len(self.usual) and counts[backwards] < RARE * len(self.usual)

    def main(self) -> _Thread | None:
        return max(self.threads.values(), key=lambda thread: thread.seen, default=None)


def _turn(state: _Rank) -> tuple[bool, float]:
    """Sorts those that are not sure by their next end: of equals, a rank that lacks an end has the longer step."""
    if state.last is None or not state.ends:
        return True, 0
    end = state.ends[0][0]
    return False, end + (end - state.last[0]) / 2


class MarkedSteps:
    """Steps of one job from its ranks' marks.

    Attributes:
        counters: ``steps_before_first`` (ended before the first one that was numbered), ``steps_repeated`` (at or
            before the number before, merged into the next), ``families_joined_by_time``, ``steps_counted_anew`` (of
            a rank whose calls turned out to be lined up otherwise, told with numbers that are not the others').
    """

    def __init__(self) -> None:
        self.counters: Tally[str] = Tally()
        self._ranks: dict[int, _Rank] = {}
        self._groups: dict[tuple[int, int], tuple[int, int]] = {}
        self._lined: dict[tuple[int, int], tuple[int, int]] = {}
        """``_groups``, and what it had of those that are in doubt since."""
        self._doubtful: set[tuple[int, int]] = set()
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        self._by_batch: bool | None = None

    # ---- what happened

    def feed_marks(self, rank: int, marks: NDArray[np.void]) -> None:
        """Takes marks of a rank: :data:`argus.semantics.phases.MARK`, those of each thread in order, shape (n,)."""
        threads = self._ranks.setdefault(rank, _Rank(rank)).threads
        wanted = marks[marks["what"] <= What.BACKWARD_BEGIN]
        columns = (wanted[name].tolist() for name in ("tid", "ts_ns", "what", "role"))
        for tid, ts, what, role in zip(*columns, strict=True):
            thread = threads.get(tid)
            if thread is None:
                if len(threads) >= THREADS:
                    del threads[min(threads, key=lambda tid: threads[tid].seen)]
                thread = threads[tid] = _Thread()
            thread.take(ts, what, role)

    def feed_calls(self, rank: int, launched: Int | None, collectives: NDArray[np.void] | None) -> None:
        """Takes calls of a rank.

        Args:
            rank: Global rank.
            launched: Entries of launches, ns, shape (n,).
            collectives: :data:`argus.records.COLLECTIVE` rows of collective operations.
        """
        state = self._ranks.setdefault(rank, _Rank(rank))
        if launched is not None:
            state.launched = np.sort(np.concatenate([state.launched, launched.astype(np.int64)]), kind="stable")
            state.launched = state.launched[-KEPT_CALLS:]
        if collectives is not None:
            called = np.concatenate([state.called, collectives["ts_ns"].astype(np.int64)])
            order = np.argsort(called, kind="stable")[-KEPT_CALLS:]
            state.called = called[order]
            state.comm = np.concatenate([state.comm, collectives["comm"].astype(np.int64)])[order]
            state.seq = np.concatenate([state.seq, collectives["seq"].astype(np.int64)])[order]

    def align(self, communicators: NDArray[np.void]) -> None:
        """Takes what is known of the communicators: :data:`argus.semantics.groups.COMMUNICATOR` rows, all of them."""
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
        self._lined = {key: place for key, place in self._lined.items() if key in self._doubtful} | self._groups
        # Where calls are numbered anew, steps' old numbers of calls mean others.
        kept = set(communicators["comm_group"].tolist()) - moved
        self._numbers = {group: numbers for group, numbers in self._numbers.items() if group in kept}

    # ---- steps

    def ready(self, ranks: Iterable[int], *, final: bool = False) -> bool:
        """Whether these ranks' steps can be told by their marks.

        Args:
            ranks: All that have made calls or marks.
            final: Nothing more will come.
        """
        if self._by_batch is not None:
            return True
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
        """Whether these ranks' steps will be told by their marks before long. Arguments as for :meth:`ready`."""
        known = [self._ranks[rank].threads.values() if rank in self._ranks else () for rank in ranks]
        return bool(known) and all(any(thread.trains for thread in threads) for threads in known)

    def advance(self, until_ns: int, *, final: bool = False) -> NDArray[np.void]:
        """The steps completed since the last call.

        Args:
            until_ns: All calls before this have been fed.
            final: Nothing more will come.

        Returns:
            :data:`argus.semantics.steps.ITERATION` rows, ordered by rank and step.
        """
        if self._by_batch is None:
            return np.empty(0, ITERATION)
        states = [state for _, state in sorted(self._ranks.items())]
        for state in states:
            self._collect(state, until_ns, final)
        found: list[tuple[float, ...]] = []
        going = True
        while going:
            # Who is sure comes first. Only when all of these have been heard, one goes on that is not.
            waiting = sum(len(state.ends) for state in states)
            for state in states:
                found += self._number(state, final)
            going = sum(len(state.ends) for state in states) < waiting
            for state in [] if going else sorted(states, key=_turn):
                before = len(state.ends)
                found += self._number(state, final, unsure=True)
                if len(state.ends) < before:
                    going = True
                    break
        return np.array(sorted(found, key=lambda row: row[:2]), ITERATION)

    def _collect(self, state: _Rank, until_ns: int, final: bool) -> None:
        """Moves optimiser's ends that are steps' ends from the main thread to the rank."""
        thread = state.main()
        if thread is None:
            return
        if final:
            thread.confirm()
        newest = state.ends[-1][0] if state.ends else state.last[0] if state.last else 0
        while thread.ends and (final or thread.ends[0].ts <= until_ns):
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

    def _keys(self, state: _Rank, end: int) -> list[tuple[int, int]]:
        """(group, number of its last call) of each communicator that was called since the end looked at before."""
        first, until = np.searchsorted(state.called, [state.looked, end], side="right").tolist()
        state.looked = end
        comms, back = np.unique(state.comm[first:until][::-1], return_index=True)
        found = []
        for comm, newest in zip(comms.tolist(), state.seq[until - 1 - back].tolist(), strict=True):
            group, offset = self._groups.get((state.rank, comm), (-1, 0))
            if self._sizes.get(group, 1) > 1:
                found.append((group, newest + offset))
        return found

    def _number(self, state: _Rank, final: bool, *, unsure: bool = False) -> list[tuple[float, ...]]:
        """Rows of the ends that can be numbered now.

        Args:
            state: The rank.
            final: Nothing more will come.
            unsure: All others have been heard: the first end is numbered though there is a doubt.
        """
        if not state.ends:
            return []
        comms = {(state.rank, comm) for comm in np.unique(state.comm).tolist()}
        patient = not final and len(state.ends) < PENDING
        if patient and comms - self._groups.keys() - self._doubtful:
            return []  # they will be looked at within a second
        if state.last is None:
            if patient and comms & self._doubtful and not comms & self._groups.keys():
                return []  # more calls may still tell how the ranks line up
            self._find_place(state, patient or not unsure)
            if state.last is not None:
                unsure = False
        rows: list[tuple[float, ...]] = []
        while state.last is not None and state.ends:
            end, backwards = state.ends[0]
            before, number = state.last
            looked, keys = state.looked, self._keys(state, end)
            told = [n for group, key in keys if (n := self._numbers.get(group, {}).get(key)) is not None]
            called, launched = (
                int(np.searchsorted(times, end, side="right") - np.searchsorted(times, before, side="right"))
                for times in (state.called, state.launched)
            )
            usual = Tally(state.usual).most_common(1)[0][0] if state.usual else (backwards, called)
            if keys and not told and backwards >= 0 and (backwards, called) != usual:
                # Perhaps an end was lost. Those of the others are there once all have gone one step further.
                if not unsure or (len(state.ends) == 1 and not final):
                    state.looked = looked
                    break
                unsure = False
            del state.ends[0]
            here = told[0] if told else number + 1
            if state.moved and keys:
                # Rows keep their numbers, and only those are wrong that do not lead to this one.
                self.counters["steps_counted_anew"] += state.told if here != number + 1 else 0
                state.moved, state.told = False, 0
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
                state.told += 1
                rows.append((state.rank, here - 1, before, end - before, called, launched, BY_MARKS, sure))
            else:
                self.counters["steps_before_first"] += 1
            self._prune(state, end)
        return rows

    def _find_place(self, state: _Rank, patient: bool) -> None:
        """Numbers a rank's first end, by the first of its ends that another rank has had, too."""
        if all(other.last is None for other in self._ranks.values()):
            self._place(state, 0)
            return
        for place, (end, _) in enumerate(state.ends):
            keys = self._keys(state, end)
            # Calls before the first end may be of any step.
            for group, key in keys if place else ():
                number = self._numbers.get(group, {}).get(key)
                if number is not None:
                    self._place(state, number - place)
                    return
        state.looked = 0
        alone = not any(self._sizes.get(group, 1) > 1 for (rank, _), (group, _) in self._groups.items()
                        if rank == state.rank)  # fmt: skip
        # Who has had a few steps and no call in common will have none.
        if patient and not (alone and len(state.ends) >= FIRST_ENDS):
            return
        # No call in common: steps of the ranks overlap in time.
        bounds = [bound for other in self._ranks.values() for bound in other.bounds]
        if bounds:
            self.counters["families_joined_by_time"] += 1
            oldest = min(bounds)[0]
            place = next((i for i, (end, _) in enumerate(state.ends) if end >= oldest), len(state.ends) - 1)
            chosen = state.ends[place][0]
            self._place(state, min(bounds, key=lambda bound: abs(bound[0] - chosen))[1] - place)

    @staticmethod
    def _place(state: _Rank, number: int) -> None:
        end, _ = state.ends.pop(0)
        state.looked = end
        state.last = end, number
        state.bounds.append(state.last)

    def _remember(self, group: int, key: int, number: int) -> None:
        numbers = self._numbers.setdefault(group, {})
        numbers.setdefault(key, number)
        if len(numbers) > KEPT_KEYS:
            del numbers[next(iter(numbers))]

    @staticmethod
    def _prune(state: _Rank, end: int) -> None:
        """Drops calls before a step's end."""
        until = bisect_right(state.called, end)
        if until > KEPT_BEFORE:
            state.called, state.comm, state.seq = state.called[until:], state.comm[until:], state.seq[until:]
        gone = bisect_right(state.launched, end)
        if gone > KEPT_BEFORE:
            state.launched = state.launched[gone:]
