"""Training steps from the period of the call sequence, with no help from the training code.

A training loop makes the same calls again and again: the shortest period of the merged sequence of kernel launches and
NCCL collectives is a step. This is GREYHOUND's idea (ATC '25: period of the NCCL call types), taken further in three
ways: kernels are part of the sequence, so that equal gradient buckets are not taken for steps; the period is verified
instead of read off an autocorrelation peak; and steps get numbers that agree on every rank, from the calls' aligned
sequence numbers (:mod:`argus.semantics.groups.communicators`), whenever the ranks were attached.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model.records import COLLECTIVE, LAUNCH, join
from argus.semantics.steps.period import (
    BACKWARD,
    COLLECTIVES,
    EXACT,
    LOCK_PERIODS,
    LOOSE,
    MULTIPLIER,
    PROOF,
    PROOF_UNITS,
    WINDOW,
    Hash,
    Prefix,
    codes_of,
    find_unit,
    mix,
)

Int = NDArray[np.int64]

ITERATION = np.dtype(
    [
        ("rank", "<u4"),
        ("step", "<u4"),
        ("ts_ns", "<u8"),
        ("duration_ns", "<u8"),
        ("collectives", "<u4"),
        ("launches", "<u4"),
        ("method", "u1"),
        ("confidence", "<f4"),
    ]
)
"""One step of one rank: what the table ``iterations`` holds, on the host's monotonic clock."""

METHODS = ("collectives", "launches", "imported", "marks", "pulses")
"""Names of ``ITERATION["method"]``, as the table ``iterations`` spells them."""
BY_COLLECTIVES = 0
BY_LAUNCHES = 1
BY_MARKS = 3
BY_PULSES = 4

KEPT_BOUNDARIES = 16_384
"""Numbered boundaries of a communicator, 16 bytes each: a rank may be so many steps behind the first."""
HOLD_NS = 50_000_000
"""Calls younger than this (before the newest) wait, so that another thread's batch can still sort in before them. Ring
buffers are drained every 10-20 ms."""
MOST_CALLS = 1 << 19
"""Calls looked through in one ``advance``, some 0.3 s: of four ranks without a period that keep all they may."""
GAP_UNITS = 32
"""Units over which the median gap between calls is taken."""


def launch_codes(launches: NDArray[np.void]) -> tuple[Hash, Hash]:
    """Codes of launches with and without their grid, each shape (n,).

    Sequences of varying length change the grids in every step, the kernels in none.
    """
    loose = mix(launches["handle"])
    grid = launches["grid"].astype(np.uint64)
    exact = mix(loose ^ mix(grid[:, 0] | (grid[:, 1] << np.uint64(32))) ^ (grid[:, 2] * MULTIPLIER))
    return exact, loose


def collective_codes(collectives: NDArray[np.void], *, with_comm: bool = True) -> Hash:
    """Codes of collectives from operation, count, data type and, unless compared between ranks, communicator; shape
    (n,)."""
    kind = (collectives["call"].astype(np.uint64) << np.uint64(8)) | collectives["dtype"].astype(np.uint64)
    codes = mix(mix(collectives["count"].astype(np.uint64)) ^ (kind * MULTIPLIER))
    return mix(codes ^ mix(collectives["comm"])) if with_comm else codes


CALL = np.dtype(
    [
        ("ts", "<i8"),
        ("exact", "<u8"),
        ("loose", "<u8"),
        ("comm", "<u8"),
        ("seq", "<i8"),
        ("collective", "?"),
        ("backward", "?"),
    ]
)
"""A call of one rank, as :meth:`StepTracker.feed_calls` takes it."""

_NUMBERED = np.dtype([*((name, ITERATION[name]) for name in ITERATION.names or ()), ("number", "<i8")])
_RECENT = 64


def calls_of(calls: NDArray[np.void]) -> NDArray[np.void]:
    """What steps are found by.

    Args:
        calls: :data:`argus.model.records.LAUNCH` rows of kernel and graph launches only, those inside NCCL removed, or
            :data:`argus.model.records.COLLECTIVE` rows of collective operations only, nested ones removed; of any
            ranks, shape (n,).

    Returns:
        ``CALL`` rows, shape (n,), in the same order.
    """
    rows = np.zeros(len(calls), CALL)
    rows["ts"] = calls["ts_ns"]
    if calls.dtype == LAUNCH:
        rows["exact"], rows["loose"] = launch_codes(calls)
    else:
        rows["exact"] = rows["loose"] = collective_codes(calls)
        rows["comm"], rows["seq"], rows["collective"] = calls["comm"], calls["seq"], True
    return rows


def backward_calls(began: NDArray[np.uint64]) -> NDArray[np.void]:
    """The same of backward passes that PyTorch began, at ``began``, ns, shape (n,). Layers that are all alike repeat
    within a step; on CPUs, where nothing is launched, only its backward pass distinguishes them from steps."""
    rows = np.zeros(len(began), CALL)
    rows["ts"], rows["exact"], rows["loose"], rows["backward"] = began, BACKWARD, BACKWARD, True
    return rows


@dataclass
class _Lock:
    """The unit a rank is in, as found, not yet rotated to a step's boundary."""

    level: str
    unit: NDArray[np.uint64]
    score: float
    anchor_comm: int | None = None
    suffix: int = 0
    """Calls at the end of the rotated unit that distinguish the boundary from every other place in the unit."""


@dataclass
class _Rank:
    rank: int
    calls: NDArray[np.void] = field(default_factory=lambda: np.empty(0, CALL))
    """Recent calls, a part of ``room``."""
    room: NDArray[np.void] = field(default_factory=lambda: np.empty(1024, CALL))
    dropped: int = 0
    """Calls that left the ring, so that positions are ``dropped`` + index."""
    parsed: int = 0
    """Position up to which boundaries were looked for."""
    tried: int = 0
    """Position at which a period was last looked for."""
    lock: _Lock | None = None
    boundary: int = -1
    """Position of the last boundary; -1: none yet."""
    number: int = -1
    last_exact: int = 0
    recent: list[bool] = field(default_factory=list)
    newest: int = 0
    bounds: list[tuple[int, int]] = field(default_factory=list)
    """(time, number) of recent boundaries, to compare families of ranks."""
    seen_collective: bool = False

    @property
    def unread(self) -> int:
        """Calls that the next look goes through."""
        since = self.dropped if self.lock is None else min(self.parsed, max(self.last_exact, self.dropped))
        return self.dropped + len(self.calls) - since

    def put(self, at: int, calls: NDArray[np.void]) -> None:
        """Replaces the calls from index ``at`` on, in place where there is room: batches are small, the ring is not."""
        count = at + len(calls)
        if count > len(self.room):
            # It grows by a quarter: what was dropped to make room for others must not come back at once.
            room = np.empty(max(count, len(self.room) + len(self.room) // 4, 1024), CALL)
            room[:at] = self.calls[:at]
            self.room = room
        self.room[at:count].view(np.uint8)[:] = calls.view(np.uint8)
        self.calls = self.room[:count]

    def keep(self, most: int, window: int) -> int:
        """Keeps the newest calls, so many at most. Returns how many of the newest ``window`` that are in no step yet go
        with the others."""
        gone = max(len(self.calls) - most, 0)
        unread = max(self.boundary - self.dropped, len(self.calls) - window, 0)
        self.calls = self.room = self.calls[gone:].copy()
        self.dropped += gone
        return max(gone - unread, 0)


@dataclass
class _Epoch:
    start: int
    per_step: int


@dataclass
class _Family:
    """Ranks that share their anchor communicator, and so count steps together."""

    group: int
    epochs: list[_Epoch]
    last: int
    """Aligned number of the newest boundary's call."""
    shift: int | None = None
    """Added to the family's numbers, so that families agree; None: not known yet."""
    trusted: bool = True
    members: set[int] = field(default_factory=set)
    calls: array[int] = field(default_factory=lambda: array("q"))
    """Boundaries' calls that have a number, ascending."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Their numbers."""

    def place(self, calls: NDArray[np.int64], per_step: int) -> int:
        """Which of a step's calls ends it.

        Calls that belong to no step may lie between those and the newest boundary, so counting on from there would err.

        Args:
            calls: Aligned numbers of a step's calls on the family's communicator, shape (occurrences, calls), the
                newest last.
            per_step: How many they are.
        """
        hits = np.isin(calls, self.calls).sum(axis=0)
        if hits.any():
            return int(hits.argmax())
        # Nothing in common yet.
        return int(np.argmin((calls[-1] - self.last) % per_step))

    def number(self, call: int) -> int:
        """The step that ends with a call: known from the first rank that had it, else counted on from its neighbour.

        Calls now and then that belong to no step (an evaluation's) move it by less than one.
        """
        place = bisect_left(self.calls, call)
        if place < len(self.calls) and self.calls[place] == call:
            return self.numbers[place]
        per_step = next((e for e in reversed(self.epochs) if call >= e.start), self.epochs[0]).per_step
        if not self.calls:
            number = call // per_step
        elif place:
            number = self.numbers[place - 1] + max(1, round((call - self.calls[place - 1]) / per_step))
            if place < len(self.calls):
                number = min(number, self.numbers[place])
        else:
            number = self.numbers[0] - max(1, round((self.calls[0] - call) / per_step))
        self.calls.insert(place, call)
        self.numbers.insert(place, number)
        if len(self.calls) > KEPT_BOUNDARIES:
            del self.calls[: KEPT_BOUNDARIES // 2]
            del self.numbers[: KEPT_BOUNDARIES // 2]
        return number


def _is_same(lock: _Lock | None, level: str, unit: NDArray[np.uint64]) -> bool:
    """Whether a found unit is the locked one, from whichever call on."""
    if lock is None or lock.level != level or len(lock.unit) != len(unit):
        return False
    return bool(Prefix.of(np.concatenate([unit, unit])).matches(lock.unit).any())


class StepTracker:
    """Finds the steps of one job as its calls come in.

    A step ends at the entry of its last collective: the one before the largest median gap between collectives. That
    call's aligned sequence number is the same on all ranks, so that ranks attached at different moments agree on the
    step's number; without collectives, steps are counted from 0 on each rank.

    Counters of what was not turned into steps: ``late_calls`` (sorted in too late to count), ``steps_before_first``,
    ``steps_repeated`` (a number at or before the previous one's, merged into the next), ``calls_without_alignment``
    (left the ring while their communicators were unknown).

    Args:
        window: Calls kept per rank; twice this before the oldest go.
        first: The number that becomes step 0; None: that of the first step completed. Trackers of one job on several
            hosts agree only if all get the same.
    """

    def __init__(self, window: int = WINDOW, first: int | None = None) -> None:
        self._window = window
        self._ranks: dict[int, _Rank] = {}
        self._groups: dict[tuple[int, int], tuple[int, int]] = {}
        self._groups_of: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """``_groups`` by rank and communicator."""
        self._in_group: defaultdict[int, set[int]] = defaultdict(set)
        """Ranks of each group."""
        self._sizes: dict[int, int] = {}
        self._untrusted: set[int] = set()
        self._lined: dict[tuple[int, int], tuple[int, int]] = {}
        """``_groups`` as it was when last sure."""
        self._counted: dict[tuple[int, int], tuple[_Family, int]] = {}
        """(rank, communicator) -> the family that counts its calls, and what it adds to their numbers. That stays as it
        was begun while :meth:`align` gets other numbers that differ by the same on all its ranks."""
        self._first = first
        self._next, self._over = 0, set[int]()
        self.counters: Tally[str] = Tally()
        self._reported: Tally[int] = Tally()
        """Steps by rank that have been reported since its calls were last lined up otherwise."""

    def align(self, communicators: NDArray[np.void]) -> None:
        """Takes what is known of the communicators: :data:`argus.semantics.groups.communicators.COMMUNICATOR` rows, the
        full table.

        A communicator with an ``error`` counts for its own rank alone: its steps are found, but their numbers may
        differ between ranks and their confidence is at most one half.
        """
        known: dict[tuple[int, int], tuple[int, int]] = {}
        self._groups_of, self._in_group = defaultdict(dict), defaultdict(set)
        seen: Tally[int] = Tally()
        self._sizes = {}
        self._untrusted = set()
        for rank, comm, group, nranks, offset, error in zip(
            communicators["rank"].tolist(),
            communicators["comm"].tolist(),
            communicators["comm_group"].tolist(),
            communicators["nranks"].tolist(),
            communicators["seq_offset"].tolist(),
            communicators["error"].tolist(),
            strict=True,
        ):
            if error:
                alone = int(mix(np.array([group ^ (rank + 1)], np.uint64))[0])
                self._untrusted.add(alone)
                group, offset = alone, 0
            known[rank, comm] = self._groups_of[rank][comm] = group, offset
            self._in_group[group].add(rank)
            seen[group] += 1
            self._sizes[group] = max(seen[group], nranks)
        self._groups = known
        moved = self._moved()
        for key in moved:
            del self._counted[key]
        # Rows that were reported keep their numbers.
        for rank in {rank for rank, comm in moved if (rank, comm) in known}:
            self.counters["steps_counted_anew"] += self._reported.pop(rank, 0)
        lined = {key: row for key, row in known.items() if row[0] not in self._untrusted}
        self._lined = {key: row for key, row in self._lined.items() if key in known} | lined
        for rank, state in self._ranks.items():
            if state.lock is not None and (rank, state.lock.anchor_comm) not in self._counted:
                state.lock.anchor_comm = None

    def _moved(self) -> list[tuple[int, int]]:
        """Whose calls are not where their family counts them."""
        moved = [
            key
            for key, (family, _) in self._counted.items()
            if key not in self._groups or (not family.trusted and self._groups[key][0] not in self._untrusted)
        ]
        # Of ranks that were in one group and are in one: those whose numbers changed by the same stand together.
        together: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for key, (group, offset) in self._lined.items():
            if key in self._groups and self._groups[key][0] not in self._untrusted:
                there, now = self._groups[key]
                together[group, there][now - offset].add(key[0])
        apart: set[int] = set()
        same: list[set[int]] = []
        for parts in together.values():
            apart |= {rank for part in parts.values() if len(parts) > 1 for rank in part}
            for part in parts.values():
                touched = [known for known in same if known & part]
                same = [known for known in same if not known & part] + [part.union(*touched)]
        sides = [side for side in same if side & apart]
        stays = max(sides, key=lambda side: (len(side), -min(side)), default=set())
        for side in sides:
            if side is not stays:
                moved += [key for key in self._counted if key[0] in side and key not in moved]
        return moved

    def _families_of(self, rank: int, groups: Iterable[int]) -> dict[int, tuple[_Family, int] | None]:
        """By group, the family that counts its calls, and what to add to the group's numbers to have the family's."""
        candidates: dict[int, dict[int, tuple[_Family, int]]] = {group: {} for group in groups}
        for key, (family, offset) in self._counted.items():
            there, now = self._groups[key]
            if there in candidates and (family.trusted or key[0] == rank):
                candidates[there].setdefault(id(family), (family, offset - now))
        return {
            group: max(pairs.values(), key=lambda pair: (len(pair[0].members), -pair[0].group), default=None)
            for group, pairs in candidates.items()
        }

    def feed(
        self,
        rank: int,
        launches: NDArray[np.void],
        collectives: NDArray[np.void],
        backwards: NDArray[np.uint64] | None = None,
    ) -> None:
        """Adds calls of one rank: what :func:`calls_of` takes, in any order."""
        if launches.dtype != LAUNCH or collectives.dtype != COLLECTIVE:
            raise TypeError("feed takes LAUNCH and COLLECTIVE records")
        parts = [calls_of(launches), calls_of(collectives)]
        if backwards is not None:
            parts.append(backward_calls(backwards))
        new = np.concatenate(parts)
        self.feed_calls(rank, new[np.argsort(new["ts"], kind="stable")])

    def feed_calls(self, rank: int, new: NDArray[np.void]) -> None:
        """Adds calls of one rank: ``CALL`` rows, ordered by time."""
        state = self._ranks.get(rank) or self._ranks.setdefault(rank, _Rank(rank))
        if not len(new):
            return
        merged_from = len(state.calls)
        if merged_from and new["ts"][0] < state.calls["ts"][-1]:
            merged_from = int(np.searchsorted(state.calls["ts"], new["ts"][0], side="right"))
            settled = state.parsed - state.dropped
            if merged_from < settled:
                self.counters["late_calls"] += int(np.sum(new["ts"] < state.calls["ts"][settled - 1]))
                merged_from = settled
            tail_calls = join(state.calls[merged_from:], new)
            new = tail_calls[np.argsort(tail_calls["ts"], kind="stable")]
        state.put(merged_from, new)
        state.newest = max(state.newest, int(new["ts"][-1]))
        state.seen_collective = state.seen_collective or bool(new["collective"].any())
        if len(state.calls) > 2 * self._window:
            surplus = len(state.calls) - self._window
            state.put(0, state.calls[surplus:].copy())
            state.dropped += surplus
            if state.lock is None or state.lock.anchor_comm is None:
                self.counters["calls_without_alignment"] += surplus

    def advance(self, *, until_ns: int | None = None, final: bool = False) -> NDArray[np.void]:
        """The steps completed since the last call. Of ranks without a period as many as keep ``MOST_CALLS`` are looked
        at, in turns.

        Args:
            until_ns: All calls before this have been fed; None: those :data:`HOLD_NS` older than the newest.
            final: No more calls will come: do not wait for those of other threads. To be called while it is
                ``waiting``.

        Returns:
            :data:`ITERATION` rows, ordered by rank and step within a rank.
        """
        ready: dict[int, int] = {}
        chosen, self._next = _in_turn(self._ranks, self._over if final else set(), self._next)
        self._over = self._over | {rank for rank, _ in chosen} if final else set()
        self._over = self._over if len(self._over) < len(self._ranks) else set()
        for rank, state in chosen:
            horizon = state.newest if final else state.newest - HOLD_NS
            if until_ns is not None and not final:
                horizon = min(horizon, until_ns)
            ready[rank] = int(np.searchsorted(state.calls["ts"], horizon, side="right"))
            self._detect(state, ready[rank], final)
        for rank, state in chosen:
            if state.lock is not None and state.lock.anchor_comm is None:
                self._anchor(state, ready[rank], final)
        parsed = [self._parse(state, ready[rank]) for rank, state in chosen]
        return self._number(np.concatenate(parsed)) if parsed else np.empty(0, ITERATION)

    @property
    def waiting(self) -> bool:
        """Whether ranks have not had their turn in the ``final`` look."""
        return bool(self._over)

    def forget_calls(self) -> None:
        """Gives back what calls are kept, up to 5 MB a rank. To be called after the ``final`` steps were taken: what is
        fed later goes on from there."""
        for state in self._ranks.values():
            state.dropped += len(state.calls)
            state.calls = state.room = np.empty(0, CALL)

    def kept(self, rank: int) -> int:
        """Bytes that are kept of a rank's calls."""
        return self._ranks[rank].room.nbytes if rank in self._ranks else 0

    def keep(self, rank: int, most: int) -> int:
        """Keeps so many bytes of a rank's newest calls. Returns how many calls are therefore in no step."""
        return self._ranks[rank].keep(most // CALL.itemsize, self._window)

    def _detect(self, state: _Rank, ready: int, final: bool) -> None:
        """Locks the rank onto a period where it has none, or where its own no longer fits."""
        position = state.dropped + ready
        since = 0
        if state.lock is not None:
            # Of what was looked at: the newest batch may well hold more than five units.
            lost = max(state.parsed, position if final else 0) - state.last_exact > LOCK_PERIODS * len(state.lock.unit)
            if not lost and (
                len(state.recent) < PROOF_UNITS or sum(state.recent[-PROOF_UNITS:]) >= PROOF * PROOF_UNITS
            ):
                return
            since = max(state.last_exact - state.dropped, 0) if lost else 0
        if not final and position - state.tried < max(32, (ready - since) // 8):
            return
        state.tried = position
        window = state.calls[max(since, ready - self._window) : ready]
        for level in (EXACT, LOOSE, COLLECTIVES):
            detected, pending = find_unit(window, level, final)
            if detected is not None:
                unit, score = detected
                # The last boundary stays: a new pattern goes on from it.
                if not _is_same(state.lock, level, unit):
                    state.lock = _Lock(level, unit, score)
                    state.recent.clear()
            if detected is not None or pending:
                return

    def _anchor(self, state: _Rank, ready: int, final: bool) -> None:
        """Rotates the unit so that it ends at the step's boundary, the same call on every rank of the family."""
        lock = state.lock
        assert lock is not None
        window = state.calls[max(0, ready - self._window) : ready]
        if lock.level == COLLECTIVES:
            window = window[window["collective"]]
        codes = codes_of(window, lock.level)
        length = len(lock.unit)
        starts = Prefix.of(codes).matches(lock.unit).nonzero()[0]
        if not len(starts):
            state.lock = None
            return
        starts = starts[-GAP_UNITS:]
        unit = window[starts[-1] : starts[-1] + length]
        if not unit["collective"].any():
            if any(other.seen_collective for other in self._ranks.values()):
                return
            self._rotate(lock, _before_largest_gap(window["ts"][starts[:, None] + np.arange(length)]))
            lock.anchor_comm = 0
            return
        places = np.flatnonzero(unit["collective"])
        uses = Tally(unit["comm"][places].tolist())
        known = {comm: self._groups[state.rank, comm] for comm in uses if (state.rank, comm) in self._groups}
        if len(known) < len(uses):
            return
        trusted = {comm for comm, (group, _) in known.items() if group not in self._untrusted}
        shared = {comm for comm in trusted if self._sizes[known[comm][0]] > 1}
        if not final and not state.dropped and not shared and len(trusted) < len(known):
            return  # more calls may still show how the ranks line up
        shared = shared or set(known)
        places = places[np.isin(unit["comm"][places], list(shared))]
        of_groups = self._families_of(state.rank, {group for group, _ in known.values()})
        families = {comm: of_groups[group] for comm, (group, _) in known.items()}
        joined = [
            (len(pair[0].members), -known[comm][0], comm)
            for comm, pair in families.items()
            if pair is not None and pair[0].epochs[-1].per_step == uses[comm] and comm in shared
        ]
        if joined:
            comm = max(joined)[2]
            pair = families[comm]
            assert pair is not None
            family, offset = pair[0], known[comm][1] + pair[1]
            places = places[unit["comm"][places] == comm]
            chosen = family.place(window["seq"][starts[:, None] + places] + offset, uses[comm])
        else:
            chosen = _before_largest_gap(window["ts"][starts[:, None] + places])
            comm = int(unit["comm"][places[chosen]])
            group, offset = known[comm]
            pair = families[comm]
            if pair is None:
                boundary = int(unit["seq"][places[chosen]]) + offset
                family = _Family(group, [_Epoch(0, uses[comm])], boundary, trusted=group not in self._untrusted)
            else:
                family, offset = pair[0], offset + pair[1]
                boundary = int(unit["seq"][places[chosen]]) + offset
                first = int(np.min(state.calls["seq"][state.calls["comm"] == comm])) + offset
                start = max(family.last, first)
                if boundary <= start:
                    return
                family.epochs.append(_Epoch(start, uses[comm]))
                family.last = boundary
        family.members.add(state.rank)
        self._counted[state.rank, comm] = family, offset
        self._rotate(lock, int(places[chosen]))
        lock.anchor_comm = comm

    @staticmethod
    def _rotate(lock: _Lock, last: int) -> None:
        lock.unit = np.roll(lock.unit, -(last + 1))
        length = len(lock.unit)
        twice = Prefix.of(np.concatenate([lock.unit, lock.unit]))
        lock.suffix = length
        width = 1
        while width < length:
            if int(twice.matches(lock.unit[-width:])[:length].sum()) <= 1:
                lock.suffix = width
                break
            width *= 2

    def _parse(self, state: _Rank, ready: int) -> NDArray[np.void]:
        """The rank's steps between the last boundary and position ``ready``; ``step`` is still the family's number."""
        none = np.empty(0, _NUMBERED)
        lock = state.lock
        if lock is None or lock.anchor_comm is None:
            return none
        length = len(lock.unit)
        if state.boundary < state.dropped:
            state.boundary = -1
        begin = max(0, (state.boundary if state.boundary >= 0 else state.dropped) - state.dropped)
        window = state.calls[begin:ready]
        places = np.flatnonzero(window["collective"]) if lock.level == COLLECTIVES else np.arange(len(window))
        codes = codes_of(window, lock.level)
        prefix = Prefix.of(codes)
        exact = np.zeros(len(codes), np.bool_)
        whole = prefix.matches(lock.unit)
        exact[length - 1 :][: len(whole)] = whole
        ends = np.zeros(len(codes), np.bool_)
        partial = prefix.matches(lock.unit[len(lock.unit) - lock.suffix :])
        ends[lock.suffix - 1 :][: len(partial)] = partial
        ends |= exact
        state.parsed = state.dropped + ready
        first_exact = int(np.argmax(exact)) if exact.any() else -1
        if first_exact >= 0:
            state.last_exact = state.dropped + begin + int(places[np.flatnonzero(exact)[-1]])
        bounds = np.flatnonzero(ends)
        if state.boundary < 0:
            if first_exact < 0:
                return none
            bounds = bounds[bounds >= first_exact - length]
            if first_exact >= length and (not len(bounds) or bounds[0] != first_exact - length):
                # The unit before the first whole one may have been warm-up: it ends where the whole one begins.
                anchor = window[places[first_exact - length]]
                if lock.anchor_comm == 0 or (anchor["collective"] and anchor["comm"] == lock.anchor_comm):
                    bounds = np.concatenate([[first_exact - length], bounds])
        else:
            bounds = np.concatenate([[0], bounds[bounds > 0]])
        if len(bounds) < 2:
            return none
        bounds = _spaced(bounds, exact, length)
        if len(bounds) < 2:
            return none
        at = places[bounds]
        calls = window[at]
        sizes = np.diff(bounds)
        steps = np.zeros(len(sizes), ITERATION)
        steps["rank"] = state.rank
        steps["ts_ns"] = calls["ts"][:-1]
        steps["duration_ns"] = np.diff(calls["ts"])
        sums = np.concatenate([[0], np.cumsum(window["collective"])])
        steps["collectives"] = sums[at[1:] + 1] - sums[at[:-1] + 1]
        passes = np.concatenate([[0], np.cumsum(window["backward"])])
        steps["launches"] = np.diff(at) - steps["collectives"] - (passes[at[1:] + 1] - passes[at[:-1] + 1])
        steps["method"] = BY_LAUNCHES if lock.anchor_comm == 0 else BY_COLLECTIVES
        likeness = np.minimum(sizes, length) / np.maximum(sizes, length)
        ok = exact[bounds[1:]] & (sizes == length)
        # An irregular step of the usual size still had a call that differs: never as sure as an exact one.
        steps["confidence"] = np.where(ok, lock.score, np.minimum(likeness, 0.9) * lock.score)
        numbers = self._family_numbers(state, calls)[1:]
        before = np.maximum.accumulate(np.concatenate([[state.number], numbers[:-1]]))
        keep = (numbers > before) & (steps["duration_ns"] > 0)
        self.counters["steps_repeated"] += int(np.sum(~keep))
        _merge_into_next(steps, keep)
        if keep.any():
            newest = int(np.flatnonzero(keep)[-1])
            state.number = int(numbers[newest])
            state.boundary = state.dropped + begin + int(at[newest + 1])
        elif state.boundary < 0:
            state.boundary = state.dropped + begin + int(at[0])
        state.recent = (state.recent + ok.tolist())[-_RECENT:]
        kept_bounds = zip(calls["ts"][1:][keep].tolist(), numbers[keep].tolist(), strict=True)
        state.bounds = (state.bounds + list(kept_bounds))[-_RECENT:]
        out = np.zeros(int(keep.sum()), _NUMBERED)
        for name in ITERATION.names or ():
            out[name] = steps[name][keep]
        out["number"] = numbers[keep]
        return out

    def _family_numbers(self, state: _Rank, calls: NDArray[np.void]) -> NDArray[np.int64]:
        """The family's numbers of boundary calls, shape (n,)."""
        lock = state.lock
        assert lock is not None
        if lock.anchor_comm == 0:
            return np.arange(state.number, state.number + len(calls), dtype=np.int64)
        assert lock.anchor_comm is not None
        family, offset = self._counted[state.rank, lock.anchor_comm]
        aligned = calls["seq"] + offset
        family.last = max(family.last, int(aligned[-1]))
        return np.array([family.number(call) for call in aligned.tolist()], np.int64)

    def _family(self, state: _Rank) -> _Family | None:
        if state.lock is None or not state.lock.anchor_comm:
            return None
        return self._counted[state.rank, state.lock.anchor_comm][0]

    def _number(self, parsed: NDArray[np.void]) -> NDArray[np.void]:
        """Turns families' numbers into the job's."""
        out = parsed[list(ITERATION.names or ())].astype(ITERATION)
        if not len(parsed):
            return out
        numbers = parsed["number"].copy()
        states = [self._ranks[rank] for rank in np.unique(parsed["rank"]).tolist()]
        states.sort(key=lambda state: -len(family.members) if (family := self._family(state)) else 0)
        for state in states:
            family = self._family(state)
            if family is None:
                continue
            if family.shift is None:
                family.shift = self._shift(state, family)
            of_rank = parsed["rank"] == state.rank
            numbers[of_rank] += family.shift
            if not family.trusted:
                out["confidence"][of_rank] = np.minimum(out["confidence"][of_rank], 0.5)
        if self._first is None:
            self._first = int(numbers.min())
        numbers -= self._first
        self.counters["steps_before_first"] += int(np.sum(numbers < 0))
        out["step"] = np.maximum(numbers, 0)
        kept: NDArray[np.void] = out[numbers >= 0]
        for rank, count in zip(*(each.tolist() for each in np.unique(kept["rank"], return_counts=True)), strict=True):
            self._reported[rank] += count
        return kept

    def _shift(self, state: _Rank, family: _Family) -> int:
        """What makes a new family's numbers agree with the others': most calls that both make lie in the same step."""
        settled = [other for other in self._ranks.values() if (f := self._family(other)) and f.shift is not None]
        if not settled:
            return 0
        # All pairs of ranks would be quadratic.
        beside = set[int]().union(*(self._in_group[group] for group, _ in self._groups_of[state.rank].values()))
        for other in (other for other in settled if other.rank in beside):
            reference = self._family(other)
            assert reference is not None
            assert reference.shift is not None
            differences = self._shared(other, state)
            if len(differences):
                return int(Tally(differences.tolist()).most_common(1)[0][0]) + reference.shift
        other = settled[0]
        reference = self._family(other)
        assert reference is not None
        assert reference.shift is not None
        # No call in common (pure pipelines): their steps overlap in time, one step apart at the most.
        self.counters["families_joined_by_time"] += 1
        there, here = np.array(other.bounds, np.int64), np.array(state.bounds, np.int64)
        if not len(there) or not len(here):
            return reference.shift
        nearest = np.argmin(np.abs(there[:, 0][None, :] - here[:, 0][:, None]), axis=1)
        return int(Tally((there[nearest, 1] - here[:, 1]).tolist()).most_common(1)[0][0]) + reference.shift

    def _shared(self, there: _Rank, here: _Rank) -> NDArray[np.int64]:
        """Step numbers of shared calls on one rank minus those on another, shape (calls,)."""
        of_group = {group: (comm, offset) for comm, (group, offset) in self._groups_of[here.rank].items()}
        for comm, (group, offset) in self._groups_of[there.rank].items():
            if group not in of_group:
                continue
            sides = []
            for state, handle, add in ((there, comm, offset), (here, *of_group[group])):
                calls = state.calls[state.calls["collective"] & (state.calls["comm"] == handle)]
                bounds = np.array(state.bounds, np.int64).reshape(-1, 2)
                place = np.searchsorted(bounds[:, 0], calls["ts"])
                inside = (place < len(bounds)) & (place > 0)
                sides.append((calls["seq"][inside] + add, bounds[place[inside], 1]))
            _, left, right = np.intersect1d(sides[0][0], sides[1][0], return_indices=True)
            if len(left):
                return np.asarray(sides[0][1][left] - sides[1][1][right])
        return np.empty(0, np.int64)


def _before_largest_gap(times: NDArray[np.int64]) -> int:
    """Which call of a unit the largest median gap follows, from their times in several units, shape (units, calls)."""
    after = np.median(np.diff(times, axis=1), axis=0)
    wrap = np.median(times[1:, 0] - times[:-1, -1]) if len(times) > 1 else 0.0
    return int(np.argmax(np.append(after, wrap)))


def _spaced(bounds: NDArray[np.int64], exact: NDArray[np.bool_], length: int) -> NDArray[np.int64]:
    """Boundaries without those inside a unit that matched as a whole, and none closer than half a unit; shape (m,)."""
    kept = [int(bounds[0])]
    for bound in bounds[1:].tolist():
        while exact[bound] and len(kept) > 1 and bound - kept[-1] < length and not exact[kept[-1]]:
            kept.pop()
        if 2 * (bound - kept[-1]) >= length:
            kept.append(bound)
    return np.array(kept, np.int64)


def _merge_into_next(steps: NDArray[np.void], keep: NDArray[np.bool_]) -> None:
    """Adds each step that is left out to its successor, so that no time is lost between steps."""
    for i in np.flatnonzero(~keep[:-1]).tolist():
        steps["duration_ns"][i + 1] += steps["duration_ns"][i]
        steps["ts_ns"][i + 1] = steps["ts_ns"][i]
        steps["collectives"][i + 1] += steps["collectives"][i]
        steps["launches"][i + 1] += steps["launches"][i]
        steps["confidence"][i + 1] = min(0.5, float(steps["confidence"][i + 1]))


def concatenate(parts: Iterable[NDArray[np.void]]) -> NDArray[np.void]:
    """Joins arrays of :data:`ITERATION`, none included."""
    kept = list(parts)
    return np.concatenate(kept) if kept else np.empty(0, ITERATION)


def _in_turn(states: dict[int, _Rank], over: set[int], first: int) -> tuple[list[tuple[int, _Rank]], int]:
    """Ranks that are looked at now, from ``first`` on, without those that are ``over``; and which comes first then."""
    ranks = sorted(states.keys() - over, key=lambda rank: (rank < first, rank))
    most = MOST_CALLS
    for number, rank in enumerate(ranks):
        most -= states[rank].unread
        if most < 0 and number:
            first, ranks = rank, ranks[:number]
            break
    return [(rank, states[rank]) for rank in sorted(ranks)], first
