"""Which communicator handles on which ranks are one communicator, and how their calls line up.

A handle is a pointer: it means nothing outside its process. Where Argus saw a communicator made, the unique id (or the
parent and colour of a split) names the group, and every rank's calls are numbered from 0. A process group of PyTorch
itself can be asked for its name, and for how many collectives it has had. Otherwise, where Argus attached later, two
facts join handles: ranks of one communicator make equal calls in equal order, and they leave a collective together.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from argus.model.calls import CALLS
from argus.model.groups import Membership, Place
from argus.model.records import COLLECTIVE, CONTROL
from argus.model.units import duration
from argus.semantics.steps.by_calls import collective_codes
from argus.semantics.steps.period import MIN_PERIODS, Prefix, find_period

Int = NDArray[np.int64]

COMMUNICATOR = np.dtype(
    [
        ("rank", "<u4"),
        ("comm", "<u8"),
        ("comm_group", "<u8"),
        ("comm_rank", "<i4"),
        ("nranks", "<i4"),
        ("seq_offset", "<i8"),
        ("joined_by", "U12"),
        ("error", "U160"),
    ]
)
"""Rows of the table ``communicators``, less job, run and version."""

NCCL_IN_PROGRESS = 7
"""ncclInProgress of ncclResult_t: a non-blocking communicator that is being made."""
RECENT = 4096
"""Newest calls of a communicator that are lined up: hundreds of steps."""
NEAREST = 8
"""Offsets at which two ranks call at about the same time are compared call by call, so many at least: of a job with one
call a step any offset is a candidate, and to compare a thousand calls takes 20 us."""
NEAR_STEPS = 2.0
"""Where synchronises are seen, those within so many times between two of them are, too: a rank may be late by most of a
step."""
MOST_NEAR, CUTS = 512, 8
"""But no more than so many; of steps of more calls, those that agree with one of so many waits in the middle."""
PLACES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)
"""Where in what two ranks have in common it is looked how far apart they call, as shares of it."""
MIN_CALLS = 8
"""Fewer calls in common determine no offset."""
VIOLATIONS = 0.05
"""Share of calls that may break causality (a rank leaving a collective that another has not called yet). Not 0: a
synchronise on an unrelated stream ends early now and then."""
SLACK_NS = 100_000
"""Two hosts' clocks, or two probes' times, may differ by this much before causality counts as broken. NTP in one rack
is within 100 us; inside one host the difference is below 1 us."""
AMBIGUOUS = 0.5
"""The runner-up offset must fit at least twice as badly as the best one."""
AMBIGUOUS_CALLS = 0.05
"""The same by call times alone, which need not agree: only a clear fit counts. A rank late by a whole number of
steps, give or take 5 %, would still deceive it."""
ODD_CALLS = 3
ODD_SHARE = 0.05
"""So many calls, of few so large a share, may seem to end with the next one on one rank only: a wait so short that it
was taken for none."""
LAST_WAITS = 0.05
"""A rank that comes last may wait for its GPU for this share of the time more than another one. Equal work keeps
healthy ranks within 1 % of one another."""
LAST_BY = 0.02
"""Only a rank that is later by this share of the time between two ends counts as last; below it ranks take turns."""
APART = "not called at the same time"
"""Why two handles with equal calls are not one communicator."""
MOST_LIVES, AT_ONCE = 64, 8
"""So many process groups of one name are compared with another rank's, and more where no more than so many of them are
there at one time: a process has one after the other."""
CROWDED = f"more than {MOST_LIVES} process groups of this name at one time"
"""Why others are lined up with no other rank's."""
PORTION, PAIRS, CELLS = 1024, 64, 65_536
"""Rows that are made, pairs of lives that are compared, and numbers that are compared at once, in one part: a
millisecond or a few."""
BLOCKED = 0.1
"""Synchronise calls shorter than this share of the rank's long ones (90th percentile) did not wait for the GPU."""


@dataclass(frozen=True)
class RankCalls:
    """What is known of one rank.

    Attributes:
        rank: Global rank.
        collectives: :data:`argus.model.records.COLLECTIVE` rows of collective operations, nested ones removed,
        time-ordered. sync_ts: Entries of blocking synchronise calls (stream, event, device), shape (n,), ns.
        sync_duration: Time inside them, shape (n,), ns; -1: not measured.
        control: :data:`argus.model.records.CONTROL` rows; those that do not concern communicators are ignored.
        clock_ns: Added to this rank's times to compare them with the others'.
        named: The process's own names of its process groups, by handle, in the order in which they were met. Their
            calls have the group's own count of collectives, plus 1, in ``stream``.
        in_memory: The process's NCCL communicators, read from its memory, by handle.
        ends: When each of ``collectives`` ended, where that is known better than by the next wait, shape (m,), ns.
    """

    rank: int
    collectives: NDArray[np.void]
    sync_ts: Int = field(default_factory=lambda: np.empty(0, np.int64))
    sync_duration: Int = field(default_factory=lambda: np.empty(0, np.int64))
    control: NDArray[np.void] = field(default_factory=lambda: np.empty(0, CONTROL))
    clock_ns: int = 0
    named: Mapping[int, Membership] = field(default_factory=dict)
    in_memory: Mapping[int, Place] = field(default_factory=dict)
    ends: Int | None = None


@dataclass(frozen=True)
class _Calls:
    """Calls of one handle, newest :data:`RECENT`: codes, numbers, entries and, -1 where unknown, ends, each shape
    (n,)."""

    rank: int
    comm: int
    codes: Int
    seq: Int
    ts: Int
    end: Int
    blocked: Int
    """Time the rank has waited for its GPU before each call, ns, shape (n,)."""


@dataclass(slots=True)
class _Row:
    group: int
    joined_by: str
    comm_rank: int = -1
    nranks: int = -1
    offset: int = 0
    error: str = ""


def _group_id(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _made(
    ranks: Sequence[RankCalls],
) -> Generator[None, None, tuple[dict[tuple[int, int], _Row], dict[tuple[int, int], tuple[int, int]]]]:
    """Communicators whose making was seen, and what was asked about others: (rank, nranks), -1 where unknown."""
    rows: dict[tuple[int, int], _Row] = {}
    asked: dict[tuple[int, int], tuple[int, int]] = {}
    keys: dict[int, list[tuple[int, int, tuple[int, int]]]] = defaultdict(list)
    for calls in ranks:
        yield
        splits: Counter[int] = Counter()
        for event in calls.control[np.argsort(calls.control["ts_ns"], kind="stable")]:
            call = int(event["call"])
            kind = CALLS[call].kind if call < len(CALLS) else ""
            if not kind.startswith("comm_") or kind == "comm_end" or event["result"] not in (0, NCCL_IN_PROGRESS):
                continue
            handle = (calls.rank, int(event["handle"]))
            if kind == "comm_query":
                before = asked.get(handle, (-1, -1))
                asked[handle] = (max(before[0], int(event["rank"])), max(before[1], int(event["nranks"])))
            elif kind == "comm_split":
                parent = (calls.rank, int(event["parent"]))
                ordinal = splits[parent[1]]
                splits[parent[1]] += 1
                if parent not in rows or not event["handle"]:
                    continue  # the parent was made before Argus attached, or this rank is in no part of the split
                group = _group_id("split", rows[parent].group, ordinal, int(event["color"]))
                rows[handle] = _Row(group, "split")
                keys[group].append((int(event["key"]), rows[parent].comm_rank, handle))
            elif event["data"][:128].any():
                group = _group_id("unique_id", event["data"][:128].tobytes())
                rows[handle] = _Row(group, "unique_id", int(event["rank"]), int(event["nranks"]))
            else:
                asked[handle] = (int(event["rank"]), int(event["nranks"]))
    done = 0
    for members in keys.values():
        # NCCL numbers the ranks of a part by key, then by rank in the parent; sure only where all of them were seen.
        wanted, portions = -1, []
        for low in range(0, len(members), PORTION):
            portions.append(sorted(members[low : low + PORTION]))
            wanted = max(wanted, *(asked.get(handle, (-1, -1))[1] for _, _, handle in portions[-1]))
            done += len(portions[-1])
            if done >= PORTION:
                done = 0
                yield
        for place, (_, _, handle) in enumerate(heapq.merge(*portions)):
            if place % PORTION == PORTION - 1:
                yield
            row = rows[handle]
            row.comm_rank, row.nranks = asked.get(handle, (-1, -1))
            if wanted in (-1, len(members)) and row.comm_rank < 0:
                row.comm_rank = place
            if row.nranks < 0:
                row.nranks = len(members)
    return rows, asked


@dataclass(frozen=True)
class _Life:
    """One of a rank's groups of one name: its turn among these, and when it was called, ns.

    ``counts``: what the group had counted at its calls, ascending and each once, with times and numbers of these.
    """

    comm: int
    turn: int
    comm_rank: int
    begin: int
    end: int
    counts: Int
    ts: Int
    seq: Int


def _lives(calls: RankCalls) -> Generator[None, None, list[tuple[Membership, _Life]]]:
    """A rank's groups whose names are known and whose calls carry the group's count, in the order of ``named``."""
    lives: list[tuple[Membership, _Life]] = []
    rows = calls.collectives[calls.collectives["stream"] > 0] if calls.named else calls.collectives[:0]
    if not len(rows):
        return lives
    counts, order = rows["stream"].astype(np.int64) - 1, np.lexsort((rows["stream"].astype(np.int64), rows["comm"]))
    comms, counts = rows["comm"][order], counts[order]
    ts, seq = rows["ts_ns"][order].astype(np.int64) + calls.clock_ns, rows["seq"][order].astype(np.int64)
    begins = np.flatnonzero(np.concatenate([[True], comms[1:] != comms[:-1]]))
    first, last = np.minimum.reduceat(ts, begins).tolist(), np.maximum.reduceat(ts, begins).tolist()
    once = np.flatnonzero(np.concatenate([[True], (comms[1:] != comms[:-1]) | (counts[1:] != counts[:-1])]))
    cuts = [*np.searchsorted(once, begins).tolist(), len(once)]
    counts, ts, seq = counts[once], ts[once], seq[once]
    at = {comm: place for place, comm in enumerate(comms[begins].tolist())}
    for done, (comm, place) in enumerate(calls.named.items()):
        if done % PORTION == PORTION - 1:
            yield
        own = at.get(comm)
        if own is not None:
            of = slice(cuts[own], cuts[own + 1])
            life = _Life(comm, place.turn, place.rank, first[own], last[own], counts[of], ts[of], seq[of])
            lives.append((place, life))
    return lives


def _compared(lives: Sequence[_Life], others: int) -> set[int]:
    """Places of the lives that are compared with so many of another rank: all, but the newest few where too many groups
    of one name are there at one time. A process has them one after the other."""
    if len(lives) * others <= MOST_LIVES**2:
        return set(range(len(lives)))
    begins, ends = (np.array([getattr(life, name) for life in lives], np.int64) for name in ("begin", "end"))
    order = np.sort(begins)
    at_once = np.arange(1, len(lives) + 1) - np.searchsorted(np.sort(ends), order, side="left")
    if at_once.max() <= AT_ONCE:
        return set(range(len(lives)))
    return set(np.argsort(begins, kind="stable")[-MOST_LIVES:].tolist())


def _apart(a: _Life, b: _Life) -> float:
    """How far apart the ranks make the same calls, ns; infinite: none is in both, nor do they overlap."""
    _, in_a, in_b = np.intersect1d(a.counts, b.counts, assume_unique=True, return_indices=True)
    if not len(in_a):
        return 0.0 if max(a.begin, b.begin) < min(a.end, b.end) else np.inf
    return float(np.median(np.abs(a.ts[in_a] - b.ts[in_b])))


def _same_lives(a: Sequence[_Life], b: Sequence[_Life]) -> Generator[None, None, dict[int, int]]:
    """Which of two ranks' groups of one name are the same, as places in ``a`` by places in ``b``: ranks call a group at
    one time.

    Turns cannot tell: Argus may have attached while one rank still was in the group before, and the name of a group
    that lives shortly may not have been read on one rank.
    """
    if len(a) == len(b) == 1:
        return {0: 0}
    (begin_a, begin_b), (end_a, end_b) = (
        [np.array([getattr(life, name) for life in lives], np.int64) for lives in (a, b)] for name in ("begin", "end")
    )
    spacing = min((int(np.diff(np.sort(each)).min()) for each in (begin_a, begin_b) if len(each) > 1), default=0)
    nearest: dict[int, tuple[float, int]] = {}
    back: dict[int, tuple[float, int]] = {}
    compared, height = 0, max(CELLS // max(len(a), 1), 1)
    for low in range(0, len(b), height):
        yield
        of = slice(low, low + height)
        longest = np.maximum((end_a - begin_a)[None], (end_b - begin_b)[of, None])
        limits = np.maximum(longest, spacing) / 2
        # No call is nearer to one of the other life than the lives are: few pairs are left to be compared call by call.
        near = np.maximum(begin_a[None], begin_b[of, None]) - np.minimum(end_a[None], end_b[of, None]) < limits
        rows, columns = np.nonzero(near)
        for other, one, limit in zip((rows + low).tolist(), columns.tolist(), limits[near].tolist(), strict=True):
            compared += 1
            if compared % PAIRS == 0:
                yield
            apart = _apart(a[one], b[other])
            if apart < limit:
                nearest[other] = min(nearest.get(other, (np.inf, -1)), (apart, one))
                back[one] = min(back.get(one, (np.inf, -1)), (apart, other))
    return {place: one for place, (_, one) in sorted(nearest.items()) if back[one][1] == place}


def named_group(place: Membership) -> int:
    """The number of a group whose name is known."""
    return _group_id("name", place.name, place.size, place.turn)


def _named(ranks: Sequence[RankCalls]) -> Generator[None, None, dict[tuple[int, int], _Row]]:
    """Groups whose names are known from the processes, lined up by the groups' own counts of collectives."""
    rows: dict[tuple[int, int], _Row] = {}
    parts: dict[int, list[tuple[int, _Life]]] = defaultdict(list)
    lives: dict[tuple[str, int], dict[int, list[_Life]]] = defaultdict(lambda: defaultdict(list))
    for calls in ranks:
        yield
        for place, life in (yield from _lives(calls)):
            lives[place.name, place.size][calls.rank].append(life)
    for (name, size), of_ranks in lives.items():
        known: dict[int, _Life] = {}
        for rank, seen in sorted(of_ranks.items()):
            yield
            named, new = yield from _named_of_rank(name, size, rank, seen, known)
            rows |= named
            for group, life in new:
                parts[group].append((rank, life))
    for members in parts.values():
        yield
        yield from _line_up_by_counts(members, rows)
    return rows


def _named_of_rank(
    name: str, size: int, rank: int, seen: list[_Life], known: dict[int, _Life]
) -> Generator[None, None, tuple[dict[tuple[int, int], _Row], list[tuple[int, _Life]]]]:
    """A rank's groups of one name: their rows, and those that can be lined up, by group. ``known``: those of the ranks
    before it, by number; what none of these was in is added."""
    rows: dict[tuple[int, int], _Row] = {}
    found: list[tuple[int, _Life]] = []
    places = sorted(_compared(seen, len(seen)))
    numbers = list(known)
    of_others = sorted(_compared(list(known.values()), len(places)))
    crowded = len(of_others) < len(known)
    pairs: dict[int, int] = {}
    if known:
        pairs = yield from _same_lives([known[numbers[at]] for at in of_others], [seen[at] for at in places])
    same = {places[at]: numbers[of_others[one]] for at, one in pairs.items()}
    compared, shift = set(places), 0
    for at, life in enumerate(seen):
        if at % PORTION == PORTION - 1:
            yield
        if at not in compared or (crowded and at not in same):
            row = _Row(_group_id("name", rank, life.comm), "name", life.comm_rank, size, 0, CROWDED)
            rows[rank, life.comm] = row
            continue
        if at in same:
            number = same[at]
            shift = number - life.turn
        else:
            number = life.turn + shift
            if number in known:  # another one, which this rank was not seen in
                number = _group_id(rank, life.comm)
            known[number] = life
        group = _group_id("name", name, size, number)
        rows[rank, life.comm] = _Row(group, "name", life.comm_rank, size)
        found.append((group, life))
    return rows, found


def _line_up_by_counts(
    members: list[tuple[int, _Life]], rows: dict[tuple[int, int], _Row]
) -> Generator[None, None, None]:
    """Offsets of the ranks of one group, by its own count. ``rows``: its and others' rows, which get them."""
    own = [rows[rank, life.comm] for rank, life in members]
    if max(Counter(row.comm_rank for row in own).values()) > 1:
        for row in own:
            row.error = "several process groups of this name have the same ranks"
        return
    steady = True
    for at, (_, life) in enumerate(members):
        if at % PAIRS == PAIRS - 1:
            yield
        steady = steady and len(np.unique(life.counts - life.seq)) == 1
    if steady:
        # The same number on every host, too.
        for (_, life), row in zip(members, own, strict=True):
            row.offset = int(life.counts[0] - life.seq[0])
        return
    # A call that is several collectives to the group: its count runs ahead of the calls.
    reference = members[0][1]
    for at, ((_, life), row) in enumerate(zip(members[1:], own[1:], strict=True)):
        if at % PAIRS == PAIRS - 1:
            yield
        _, first, its = np.intersect1d(reference.counts, life.counts, assume_unique=True, return_indices=True)
        offsets = np.unique(reference.seq[first] - life.seq[its])
        if len(offsets) == 1:
            row.offset = int(offsets[0])
        else:
            row.error = "calls do not agree with the group's count" if len(offsets) else "no call in common yet"
    lowest = min(row.offset for row in own if not row.error)
    for row in own:
        row.offset -= lowest


def _ends(calls: RankCalls, ts: Int) -> Int:
    """End of each call: the exit of the first blocking synchronise that begins after it; -1: none. Shape (n,), ns."""
    measured = calls.sync_duration >= 0
    starts, durations = calls.sync_ts[measured], calls.sync_duration[measured]
    if not len(starts):
        return np.full(len(ts), -1, np.int64)
    waited = durations >= BLOCKED * np.quantile(durations, 0.9)
    starts, durations = starts[waited], durations[waited]
    order = np.argsort(starts, kind="stable")
    starts, durations = starts[order].astype(np.int64), durations[order]
    place = np.searchsorted(starts, ts, side="left")
    inside = np.minimum(place, len(starts) - 1)
    return np.where(place < len(starts), starts[inside] + durations[inside] + calls.clock_ns, -1)


def _blocked(calls: RankCalls, ts: Int) -> Int:
    """Time that the rank has waited for its GPU before each call since its first synchronise, shape (n,), ns."""
    order = np.argsort(calls.sync_ts, kind="stable")
    sums = np.concatenate([[0], np.cumsum(np.maximum(calls.sync_duration[order], 0))])
    return np.asarray(sums[np.searchsorted(calls.sync_ts[order], ts)], np.int64)


def _traffic(calls: RankCalls) -> Generator[None, None, list[_Calls]]:
    traffic: list[_Calls] = []
    rows = calls.collectives
    if rows.dtype != COLLECTIVE:
        raise TypeError("RankCalls.collectives takes COLLECTIVE records")
    if not len(rows):
        return traffic
    order = np.lexsort((rows["seq"], rows["comm"]))
    rows, ts = rows[order], rows["ts_ns"][order].astype(np.int64)
    ends = _ends(calls, ts) if calls.ends is None else calls.ends[order] + calls.clock_ns
    codes = collective_codes(rows, with_comm=False).view(np.int64)
    seq, blocked = rows["seq"].astype(np.int64), _blocked(calls, ts)
    ts += calls.clock_ns
    cuts = [0, *(np.flatnonzero(np.diff(rows["comm"])) + 1).tolist(), len(rows)]
    for at, (begin, end) in enumerate(itertools.pairwise(cuts)):
        if at % PORTION == PORTION - 1:
            yield
        own = slice(max(begin, end - RECENT), end)
        comm = int(rows["comm"][begin])
        traffic.append(_Calls(calls.rank, comm, codes[own], seq[own], ts[own], ends[own], blocked[own]))
    return traffic


def _signature(calls: _Calls) -> int:
    """Equal for handles that repeat the same calls, wherever in the pattern each was first seen."""
    period = find_period(calls.codes)
    if period is not None:
        return _group_id(np.unique(calls.codes[-period.length :]).tolist())
    # Lost records hide the period; what is rare (start-up, evaluation) some ranks saw and others did not.
    codes, uses = np.unique(calls.codes[len(calls.codes) // 2 :], return_counts=True)
    return _group_id(codes[uses >= MIN_PERIODS].tolist())


def _candidates(a: _Calls, b: _Calls, prefix: Prefix) -> Int:
    """Offsets (a's number minus b's) at which some stretch of ``b`` equals one of ``a``, shape (k,). ``prefix``: of
    ``a``'s codes."""
    width = max(1, min(64, len(b.codes) // 3, len(a.codes) // 3))
    candidates = []
    for end in {len(b.codes), max(width, 2 * len(b.codes) // 3), max(width, len(b.codes) // 3)}:
        starts = np.flatnonzero(prefix.matches(b.codes[end - width : end].view(np.uint64)))
        candidates.append(a.seq[starts + width - 1] - b.seq[end - 1])
    return np.unique(np.concatenate(candidates))


def _near(a: _Calls, b: _Calls, offsets: Int, *, synced: bool) -> Int:
    """Of these offsets those at which the ranks call at about the same time."""
    if len(offsets) <= NEAREST:
        return offsets
    # At several places of what both have at an offset: one may be a pause, or calls that were not seen.
    first, last = np.maximum(b.seq[0], a.seq[0] - offsets), np.minimum(b.seq[-1], a.seq[-1] - offsets)
    ts_a, ts_b = a.ts - a.ts[0], b.ts - a.ts[0]
    places = [first + (last - first) * part for part in PLACES]
    apart = np.median(
        [np.abs(np.interp(at + offsets, a.seq, ts_a) - np.interp(at, b.seq, ts_b)) for at in places], axis=0
    )
    apart[last < first] = np.inf
    order, number = np.argsort(apart, kind="stable"), NEAREST
    if synced:
        stretch = max(_waited(calls.blocked, calls.ts, calls.end)[1] for calls in (a, b))
        number = max(NEAREST, int(np.sum(apart <= NEAR_STEPS * stretch)))
    chosen = order[:number]
    if number > MOST_NEAR:
        # Steps of many equal calls: those at which one of the waits of ``b`` follows the same call as one of ``a``.
        cuts_a, cuts_b = (calls.seq[1:][np.diff(calls.end) != 0] for calls in (a, b))
        middle = len(cuts_b) // 2
        some = cuts_b[max(middle - CUTS // 2, 0) : middle + CUTS // 2]
        cut_alike = chosen[np.isin(offsets[chosen], (cuts_a[:, None] - some[None]).ravel())]
        chosen = (cut_alike if len(cut_alike) else chosen)[:MOST_NEAR]
    return np.sort(offsets[chosen])


def _waited(blocked: Int, ts: Int, end: Int) -> tuple[float, float]:
    """(share of the time that a rank waits for its GPU, time between two ends in ns), both typical."""
    cuts = np.flatnonzero(np.diff(end))
    if len(cuts) < 2:
        return 0.0, 0.0
    stretch = max(float(np.median(np.diff(ts[cuts]))), 1.0)
    return float(np.median(np.diff(blocked[cuts]))) / stretch, stretch


@dataclass(frozen=True)
class _Fit:
    offset: int
    cost_ns: float
    """Mean distance between the two ranks' ends of the same call."""
    error: str


def _align(a: _Calls, b: _Calls, prefix: Prefix) -> Generator[None, None, _Fit]:
    """The offset that makes call ``n`` of ``b`` call ``n + offset`` of ``a``. ``prefix``: of ``a``'s codes.

    Call times cannot decide it: a rank that is late by 0.6 steps calls nearest to the *next* step of the others. Ends
    can, and causality can: nobody leaves a collective that somebody has not called yet.
    """
    synced = bool((a.end >= 0).any() and (b.end >= 0).any())
    size = int(max(a.seq[-1] - a.seq[0], b.seq[-1] - b.seq[0])) + 1
    if len(a.seq) < MIN_CALLS or len(b.seq) < MIN_CALLS or size > 16 * RECENT:
        return _Fit(0, np.inf, "too few calls to line up")
    if max(int(a.ts.min()), int(b.ts.min())) > min(int(a.ts.max()), int(b.ts.max())) + SLACK_NS:
        return _Fit(0, np.inf, APART)
    lanes = []
    for calls in (a, b):
        lane = np.full((4, int(calls.seq[-1] - calls.seq[0]) + 1), -1, np.int64)
        lane[:, calls.seq - calls.seq[0]] = calls.codes, calls.ts, calls.end, calls.blocked
        seen = np.zeros(lane.shape[1], np.bool_)
        seen[calls.seq - calls.seq[0]] = True
        lanes.append((lane, seen))
    (lane_a, seen_a), (lane_b, seen_b) = lanes
    least = max(MIN_CALLS, min(len(a.seq), len(b.seq)) // 4)
    fits: list[tuple[float, float, int]] = []
    least_uneven, compared = np.inf, 0
    yield
    for offset in _near(a, b, _candidates(a, b, prefix), synced=synced).tolist():
        # Index of b's first call in a's lane.
        begin = int(b.seq[0] + offset - a.seq[0])
        low, high = max(begin, 0), min(begin + lane_b.shape[1], lane_a.shape[1])
        if high - low < least:
            continue
        compared += high - low
        if compared > CELLS:
            compared = 0
            yield
        in_a, in_b = slice(low, high), slice(low - begin, high - begin)
        both = seen_a[in_a] & seen_b[in_b]
        if synced:
            both &= (lane_a[2, in_a] >= 0) & (lane_b[2, in_b] >= 0)
        number = np.count_nonzero(both)
        if number < MIN_CALLS:
            continue
        chosen = both if number < len(both) else slice(None)  # mostly no call is missing: nothing is copied
        code_a, ts_a, end_a, blocked_a = lane_a[:, in_a][:, chosen]
        code_b, ts_b, end_b, blocked_b = lane_b[:, in_b][:, chosen]
        if np.count_nonzero(code_a == code_b) < 0.98 * number:
            continue
        if synced:
            # Which calls a synchronise follows: it distinguishes equal buckets of one step, whose ends are the same.
            uneven = float(np.mean((np.diff(end_a) != 0) != (np.diff(end_b) != 0)))
            broken = np.mean((ts_b > end_a + SLACK_NS) | (ts_a > end_b + SLACK_NS))
            least_uneven = min(least_uneven, uneven)
            # Most offsets end here; what follows costs the most.
            if broken > VIOLATIONS:
                continue
            # Who comes last waits for nobody, and so never more than the others. This unmasks a rank whose own CPU
            # holds it up by most of a step: its ends are late as well, nearest to those of the others' next step.
            waited_a, stretch = _waited(blocked_a, ts_a, end_a)
            waited_b, _ = _waited(blocked_b, ts_b, end_b)
            late = float(np.median(ts_a - ts_b))
            if not (abs(late) > LAST_BY * stretch and (waited_a - waited_b) * np.sign(late) > LAST_WAITS):
                odd = uneven - min(ODD_SHARE, max(1e-3, ODD_CALLS / len(end_a)))
                fits.append((odd, float(np.mean(np.abs(end_a - end_b))), offset))
        else:
            least_uneven = 0.0
            fits.append((0.0, float(np.abs(ts_a - ts_b).sum() / number), offset))
    possible = sorted((cost, offset) for odd, cost, offset in fits if odd <= 2 * least_uneven)
    if not possible:
        return _Fit(0, np.inf, "no offset fits both call sequences")
    cost, offset = possible[0]
    runner_up = possible[1][0] if len(possible) > 1 else np.inf
    limit = AMBIGUOUS if synced else AMBIGUOUS_CALLS
    if cost > limit * runner_up:
        how = "ends" if synced else "call times (no synchronise was seen)"
        return _Fit(
            offset,
            cost,
            f"ambiguous: by {how}, offset {offset} fits to {duration(cost)} "
            f"and {possible[1][1]} to {duration(runner_up)}",
        )
    return _Fit(offset, cost, "")


def _join(
    members: list[_Calls],
    known: dict[tuple[int, int], _Row],
    size: int,
    *,
    several: bool = False,
    together: bool = False,
) -> Generator[None, None, list[dict[tuple[int, int], _Row]]]:
    """Groups among handles with equal call sequences, one handle a rank, lined up against a reference.

    ``together``: they are known to be one communicator, whenever each was seen to call.
    """
    groups = []
    left = members
    while left:
        reference = next((m for m in left if (m.rank, m.comm) in known), min(left, key=lambda m: m.rank))
        others = [m for m in left if m is not reference]
        prefix, fits = Prefix.of(reference.codes), []
        for other in others:
            yield
            fits.append((yield from _align(reference, other, prefix)))
        inside = np.ones(len(others), np.bool_)
        if several or 0 < size < len(left):
            inside = _together([fit.cost_ns for fit in fits], size - 1 if size > 0 else 0)
        inside &= np.array([together or fit.error != APART for fit in fits], np.bool_)
        base = known.get((reference.rank, reference.comm))
        group = base.group if base else _group_id("traffic", reference.rank, reference.comm)
        rows = {(reference.rank, reference.comm): base or _Row(group, "traffic", nranks=size)}
        for other, fit, is_member in zip(others, fits, inside.tolist(), strict=True):
            if is_member:
                rows[other.rank, other.comm] = _Row(group, "traffic", -1, size, fit.offset, fit.error)
        if 0 < size < len(rows):
            for row in rows.values():
                row.error = row.error or f"{len(rows)} ranks have equal call sequences, the communicator has {size}"
        if base is None:
            lowest = min(row.offset for row in rows.values() if not row.error) if rows else 0
            for row in rows.values():
                row.offset -= lowest
            if len(rows) == 1:
                row = next(iter(rows.values()))
                row.joined_by = "single"
                if size > 1:
                    row.joined_by = "traffic"
            elif all(row.error for key, row in rows.items() if key != (reference.rank, reference.comm)):
                # Nothing lines up with the reference: its own offset means nothing either.
                rows[reference.rank, reference.comm].error = next(row.error for row in rows.values() if row.error)
        groups.append(rows)
        left = [m for m in left if (m.rank, m.comm) not in rows]
    return groups


def _together(costs: list[float], wanted: int) -> NDArray[np.bool_]:
    """Which handles end with the reference, from how far apart they end (ns); ``wanted``: how many should, 0:
    unknown."""
    values = np.array(costs, np.float64)
    order = np.argsort(values, kind="stable")
    inside = np.ones(len(values), np.bool_)
    if wanted:
        inside[order[wanted:]] = False
        return inside
    ranked = np.maximum(values[order], 1.0)
    if len(ranked) > 1:
        with np.errstate(invalid="ignore"):  # ranks without any fit are infinitely far away
            ratio = np.nan_to_num(ranked[1:] / ranked[:-1], nan=1.0, posinf=np.inf)
        cut = int(np.argmax(ratio))
        # Ranks of one communicator leave it within microseconds of one another; 4x apart and 20 us is another one.
        if ratio[cut] > 4 and ranked[cut + 1] > 20_000:
            inside[order[cut + 1 :]] = False
    return inside


def _confirmed(ranks: Sequence[RankCalls]) -> Generator[None, None, dict[tuple[int, int], Place]]:
    """Handles whose members are known from the processes' memory, by (rank, handle).

    What was read is believed where several processes agree: one key and size, and each another rank. A handle whose
    memory was given to something else, or an object that is laid out otherwise, would not.
    """
    alike: dict[tuple[int, int], list[tuple[tuple[int, int], Place]]] = defaultdict(list)
    for calls in ranks:
        yield
        for comm, place in calls.in_memory.items():
            alike[place.key, place.size].append(((calls.rank, comm), place))
    confirmed: dict[tuple[int, int], Place] = {}
    for at, ((_, size), members) in enumerate(alike.items()):
        if at % PAIRS == PAIRS - 1:
            yield
        if not 1 < len(members) <= min(size, len(ranks)):
            continue
        places = {place.rank for _, place in members}
        if len(places) == len(members) == len({rank for (rank, _), _ in members}):
            confirmed |= dict(members)
    return confirmed


def find_groups(ranks: Sequence[RankCalls]) -> NDArray[np.void]:
    """Groups the communicators of a job and lines up their calls.

    Args:
        ranks: What is known of each rank, one entry a rank.

    Returns:
        :data:`COMMUNICATOR` rows, ordered by rank and handle. ``error`` is why an alignment is unknown; such a row's
        ``seq_offset`` is a guess that nothing may rely on.
    """
    finding = groups_in_parts(ranks)
    while True:
        try:
            next(finding)
        except StopIteration as done:
            return cast("NDArray[np.void]", done.value)


def groups_in_parts(ranks: Sequence[RankCalls]) -> Generator[None, None, NDArray[np.void]]:
    """As :func:`find_groups`, which it returns, for those who have other things to do meanwhile: it can be left often,
    after a few milliseconds each, and gone on with later. What it was given must not change."""
    made, asked = yield from _made(ranks)
    made |= yield from _named(ranks)
    confirmed = yield from _confirmed(ranks)
    for key, member in confirmed.items():
        asked[key] = member.rank, member.size
    of: dict[tuple[int, int], _Calls] = {}
    for rank_calls in ranks:
        yield
        of |= {(calls.rank, calls.comm): calls for calls in (yield from _traffic(rank_calls))}
    several = len({rank for rank, _ in of}) < len(of)
    # Known groups that lack ranks may be continued by handles that were there before Argus.
    sizes: Counter[int] = Counter()
    for at, row in enumerate(made.values()):
        if at % PORTION == 0:
            yield
        sizes[row.group] += 1
    rows: dict[tuple[int, int], _Row] = {}
    by_signature: dict[tuple[int, int], list[_Calls]] = defaultdict(list)
    by_place: dict[tuple[int, int], list[_Calls]] = defaultdict(list)
    for key, calls in of.items():
        yield
        known = made.get(key)
        if known is not None and known.nranks <= sizes[known.group]:
            continue
        if key in confirmed:
            by_place[confirmed[key].key, confirmed[key].size].append(calls)
        else:
            size = known.nranks if known is not None else asked.get(key, (-1, -1))[1]
            by_signature[_signature(calls), size].append(calls)
    for (_, size), members in _by_one_size(by_signature).items():
        yield
        if size == 1:
            for at, calls in enumerate(members):
                if at % PORTION == PORTION - 1:
                    yield
                rows[calls.rank, calls.comm] = _Row(_group_id("single", calls.rank, calls.comm), "single", 0, 1)
            continue
        per_rank = Counter(calls.rank for calls in members)
        if max(per_rank.values()) > 1 and len(per_rank) > 1:
            for at, calls in enumerate(members):
                if at % PORTION == PORTION - 1:
                    yield
                if (calls.rank, calls.comm) not in made:
                    group = _group_id("traffic", calls.rank, calls.comm)
                    error = "several communicators of one rank have equal call sequences"
                    rows[calls.rank, calls.comm] = _Row(group, "traffic", -1, size, 0, error)
            continue
        for group_rows in (yield from _join(members, made, size, several=several)):
            for key, row in group_rows.items():
                rows.setdefault(key, row)
    for (_, size), members in by_place.items():
        for group_rows in (yield from _join(members, made, size, together=True)):
            for key, row in group_rows.items():
                row.joined_by = row.joined_by if key in made else "memory"
                rows.setdefault(key, row)
    for key, member in confirmed.items():
        alone = "sends and receives alone do not show how calls line up"
        rows.setdefault(key, _Row(_group_id("memory", member.key, member.size), "memory", error=alone))
    return (yield from _table(made, rows, asked))


def _by_one_size(by_signature: dict[tuple[int, int], list[_Calls]]) -> dict[tuple[int, int], list[_Calls]]:
    """A size that only some ranks were asked for holds for all with the same calls, if no other size competes."""
    known: dict[int, list[int]] = defaultdict(list)
    for signature, size in by_signature:
        if size > 0:
            known[signature].append(size)
    for signature, size in list(by_signature):
        if size < 0 and len(known[signature]) == 1:
            by_signature[signature, known[signature][0]] += by_signature.pop((signature, size))
    return by_signature


def _table(
    made: dict[tuple[int, int], _Row],
    others: dict[tuple[int, int], _Row],
    asked: dict[tuple[int, int], tuple[int, int]],
) -> Generator[None, None, NDArray[np.void]]:
    """:data:`COMMUNICATOR` rows, ordered. What was made is as it was seen then; ``asked`` completes what is unknown."""
    of_rank: dict[int, list[tuple[int, _Row]]] = defaultdict(list)
    count = 0
    for rows in (made, others):
        for at, ((rank, comm), row) in enumerate(rows.items()):
            if at % PORTION == 0:
                yield
            if rows is made or (rank, comm) not in made:
                of_rank[rank].append((comm, row))
                count += 1
    out, done = np.zeros(count, COMMUNICATOR), 0
    for rank, own in sorted(of_rank.items()):
        own.sort(key=itemgetter(0))
        for low in range(0, len(own), PORTION):
            yield
            part = []
            for comm, row in own[low : low + PORTION]:
                place, nranks = asked.get((rank, comm), (-1, -1))
                place, nranks = (
                    (row.comm_rank if row.comm_rank >= 0 else place),
                    (row.nranks if row.nranks > 0 else nranks),
                )
                part.append((rank, comm, row.group, place, nranks, row.offset, row.joined_by, row.error[:160]))
            out[done : done + len(part)] = part
            done += len(part)
    return out


def keep_alignment(rows: NDArray[np.void], before: NDArray[np.void]) -> NDArray[np.void]:
    """Takes an alignment by traffic that was clear before over one that no longer is: a busy node blurs the times that
    it is concluded from, and the calls have not changed.

    Args:
        rows: :data:`COMMUNICATOR` rows as they are found now.
        before: As they were found last.

    Returns:
        ``found``, with whole groups as they were.
    """
    clear = before[(before["error"] == "") & np.isin(before["joined_by"], ("traffic", "memory"))]
    doubtful = {(row["rank"], row["comm"]) for row in rows[rows["error"] != ""]}
    lost = {row["comm_group"] for row in clear if (row["rank"], row["comm"]) in doubtful}
    kept = {(row["rank"], row["comm"]): row for row in clear if row["comm_group"] in lost}
    out: NDArray[np.void] = rows.copy()
    for place, row in enumerate(rows):
        old = kept.get((row["rank"], row["comm"]))
        if old is not None:
            out[place] = old
    return out
