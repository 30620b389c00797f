"""Whose clocks agree, of recordings that were made on several hosts, or on nobody knows which.

No clock is believed, and no name of a host: containers share names, and hosts differ by some 0.3 ms. What is believed
are collectives: ranks leave them together. Which calls are the same is known without clocks, from the steps that
recordings number, or from the calls' own numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.collectives import POINT_TO_POINT, places_by_comm
from argus.importers.recordings.recording import Int, Recording
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.statistics import median_deviation
from argus.model.units import UNKNOWN_HOST, duration, ranks_text

AGREE_NS = 50_000
"""Clocks that differ by less are one: no lateness that a diagnosis reports is as small. Hosts that follow NTP are 50 us
to some ms apart."""
MIN_CALLS = 3
"""Fewer calls in common show nothing. Three that agree to :data:`AGREE_NS` do so by chance in one of 10^4
recordings whose clocks differ by ms."""
SAME_CALLS = 0.98
"""Share of the calls of two ranks that must be equal, to be the same ones."""
MATCHED = 0.4
"""Share of the ends of transfers that two ranks must have in common: a stage hands on what half of its transfers
brought."""
TIGHT_NS = 2_000
"""Both sides of a transfer end as exactly together as a GPU's times are. Stages that are one behind the other are at a
constant distance, too, but for what their kernels scatter, which is more."""
BIN_NS = 100_000
NEAR_NS = 100_000_000
"""Such ends are compared up to so far apart."""
MOST_CALLS = 2_048
"""Calls that are shifted against one another, where nothing numbers them."""
MOST_TRANSFERS = 512
"""Newest transfers of a rank that are compared with another's: each with each."""
MOST_PAIRS = 2_016
"""Pairs of ranks that are compared where no names show which ranks call together: all of 64 ranks."""
HOST_OF_HINT = "For example: --host-of 0-7=node0 --host-of 8-15=node1, or --host-of '/(node[0-9]+)/'"
_POD = re.compile(r"(?:^|[-_.])(?:node|host|pod|machine|server)[-_.]?\w+", re.IGNORECASE)


@dataclass(frozen=True)
class Apart:
    """How the clocks of two recordings differ.

    Attributes:
        offset_ns: Added to the second's times, it gives the first's.
        scatter_ns: Median distance of single calls from that.
        moved_ns: By how much it changed from the first third of the calls to the last.
        calls: That were compared.
    """

    offset_ns: float
    scatter_ns: float
    moved_ns: float
    calls: int


@dataclass(frozen=True)
class Clock:
    """A recording's clock against the first one's: as :class:`Apart`, summed up over the ranks in between.
    ``error_ns``: the median scatter, which is no bound."""

    offset_ns: int
    error_ns: int
    moved_ns: float
    calls: int


def compare_clocks(recordings: Sequence[Recording]) -> dict[int, Clock]:
    """The clocks of recordings against that of the first of each part that collectives connect.

    Returns:
        By rank; ranks that nothing connects with the first one are missing.
    """
    if not recordings:
        return {}
    ways: dict[int, list[tuple[int, Apart]]] = defaultdict(list)
    for a, b in _pairs(recordings):
        if (apart := _compare(recordings[a], recordings[b])) is not None:
            ways[a].append((b, apart))
            back = Apart(-apart.offset_ns, apart.scatter_ns, -apart.moved_ns, apart.calls)
            ways[b].append((a, back))
    clocks = {0: Clock(0, 0, 0.0, 0)}
    _reach(clocks, ways)
    if len(clocks) < len(recordings):
        _by_transfers(clocks, ways, recordings)
    return {recordings[place].rank: clock for place, clock in clocks.items()}


def _reach(clocks: dict[int, Clock], ways: Mapping[int, list[tuple[int, Apart]]]) -> None:
    """Goes on from what is found, by the ways that scatter least (Prim)."""
    while True:
        best: tuple[float, int, int, Apart] | None = None
        for here in clocks:
            for other, apart in ways[here]:
                if other not in clocks and (best is None or apart.scatter_ns < best[0]):
                    best = apart.scatter_ns, here, other, apart
        if best is None:
            return
        _, here, other, apart = best
        near = clocks[here]
        clocks[other] = Clock(
            round(near.offset_ns + apart.offset_ns),
            round(near.error_ns + apart.scatter_ns),
            near.moved_ns + apart.moved_ns,
            min(apart.calls, near.calls or apart.calls),
        )


def _pairs(recordings: Sequence[Recording]) -> list[tuple[int, int]]:
    """Which to compare: of a group that has a name each rank with the first; else all, of few."""
    pairs: dict[tuple[int, int], None] = {}
    members: dict[int, list[int]] = defaultdict(list)
    alike: dict[bytes, list[int]] = defaultdict(list)
    for place, each in enumerate(recordings):
        rows = each.collectives[~np.isin(each.collectives["call"], POINT_TO_POINT)]
        for comm in np.unique(rows["comm"]).tolist():
            if comm in each.groups:
                members[comm].append(place)
            else:
                kinds = np.unique(_codes(rows[rows["comm"] == comm]))
                alike[kinds.tobytes()].append(place)
    for ranks in members.values():
        pairs |= dict.fromkeys((ranks[0], other) for other in ranks[1:])
    for ranks in alike.values():
        several = sorted(set(ranks))
        many = list(combinations(several, 2))
        pairs |= dict.fromkeys(many if len(many) <= MOST_PAIRS else [(several[0], other) for other in several[1:]])
    return list(pairs)


def _codes(rows: NDArray[np.void]) -> Int:
    return rows["call"].astype(np.int64) << 56 | rows["dtype"].astype(np.int64) << 48 | rows["count"].astype(np.int64)


def _compare(a: Recording, b: Recording) -> Apart | None:
    """By the communicator whose calls end together best; None: none do."""
    best: Apart | None = None
    lanes = [lanes_of(each) for each in (a, b)]
    for comm, lane in lanes[0].items():
        for other, other_lane in lanes[1].items():
            named = comm in a.groups or other in b.groups
            if (comm != other) if named else not np.array_equal(lane.kinds, other_lane.kinds):
                continue
            shift = line_up(lane, other_lane)
            apart = None if shift is None else _ends_apart(lane, other_lane, shift)
            if apart is not None and (best is None or apart.scatter_ns < best.scatter_ns):
                best = apart
    return best


@dataclass(frozen=True)
class Lane:
    """The calls of one communicator on one rank, point-to-point ones left out.

    Attributes:
        codes: What each is, shape (n,). ``kinds``: those that there are.
        ends: When its kernels had ended, ns; -1: not known.
        numbers: The group's own number of each; -1: not known.
        begun: Place of the first call of each step that the recording numbers, by its number.
    """

    codes: Int
    kinds: Int
    ends: Int
    numbers: Int
    begun: dict[int, int]

    def first(self, count: int) -> Lane:
        """The first so many calls."""
        return replace(self, codes=self.codes[:count], ends=self.ends[:count], numbers=self.numbers[:count])


def lanes_of(each: Recording) -> dict[int, Lane]:
    """The collectives of each communicator of a recording, by handle."""
    return {comm: lane_of(each, places) for comm, places in places_by_comm(each.collectives).items()}


def lane_of(each: Recording, places: Int) -> Lane:
    """The calls at these places of a recording's collectives."""
    rows = each.collectives[places]
    codes = _codes(rows)
    begun: dict[int, int] = {}
    if len(each.marks) and len(rows):
        first = np.searchsorted(rows["ts_ns"].astype(np.int64), each.marks["begin_ns"])
        after = np.searchsorted(rows["ts_ns"].astype(np.int64), each.marks["end_ns"])
        inside = after > first
        begun = dict(zip(each.marks["number"][inside].tolist(), first[inside].tolist(), strict=True))
    return Lane(codes, np.unique(codes), each.gpu_end[places], each.numbers[places], begun)


def line_up(a: Lane, b: Lane) -> int | None:
    """Added to places of the second's calls, it gives those of the same calls of the first; None: it is not clear.

    By the calls' own numbers, else by the steps, else by ends that are alike but for a constant.
    """
    if (a.numbers >= 0).all() and (b.numbers >= 0).all() and len(a.numbers) and len(b.numbers):
        _, here, there = np.intersect1d(a.numbers, b.numbers, return_indices=True)
        return int(here[0] - there[0]) if len(here) and len(np.unique(here - there)) == 1 else None
    shifts = [a.begun[step] - b.begun[step] for step in a.begun.keys() & b.begun.keys()]
    if shifts:
        values, uses = np.unique(shifts, return_counts=True)
        chosen = int(values[np.argmax(uses)])
        return chosen if 2 * uses.max() > len(shifts) and paired(a, b, chosen) is not None else None
    fits: list[tuple[float, float, int]] = []
    a, b = a.first(MOST_CALLS), b.first(MOST_CALLS)
    for shift in range(-min(len(b.codes), 256), min(len(a.codes), 256) + 1):
        least = max(min(len(a.codes), len(b.codes)) // 2, MIN_CALLS)
        both = paired(a, b, shift)
        if both is None or len(both) < least:
            continue
        apart = a.ends[both] - b.ends[both - shift]
        fits.append((median_deviation(apart), abs(float(np.median(apart))), shift))
    # Steps repeat: of shifts that fit alike the one by which clocks differ least.
    tight = min((scatter for scatter, _, _ in fits), default=0.0)
    fitting = [(off, shift) for scatter, off, shift in fits if scatter <= 2 * tight + BIN_NS / 5]
    return min(fitting)[1] if fitting else None


def paired(a: Lane, b: Lane, shift: int) -> Int | None:
    """Places of the first's calls whose ends both know; None: they are not the same calls."""
    low, high = max(shift, 0), min(shift + len(b.codes), len(a.codes))
    if high <= low:
        return None
    own, other = slice(low, high), slice(low - shift, high - shift)
    if np.mean(a.codes[own] == b.codes[other]) < SAME_CALLS:
        return None
    known = (a.ends[own] >= 0) & (b.ends[other] >= 0)
    return low + np.flatnonzero(known)


def _ends_apart(a: Lane, b: Lane, shift: int) -> Apart | None:
    both = paired(a, b, shift)
    return None if both is None or len(both) < MIN_CALLS else _apart(a.ends[both] - b.ends[both - shift])


def _apart(differences: Int) -> Apart:
    apart = differences.astype(np.float64)
    offset, third = float(np.median(apart)), max(len(apart) // 3, 1)
    moved = float(np.median(apart[-third:]) - np.median(apart[:third]))
    scatter = median_deviation(apart, offset)
    # Of few calls it is chance.
    return Apart(offset, scatter, moved if len(apart) >= 12 and abs(moved) > 2 * scatter else 0.0, len(apart))


def _by_transfers(
    clocks: dict[int, Clock], ways: dict[int, list[tuple[int, Apart]]], recordings: Sequence[Recording]
) -> None:
    """Connects what collectives do not by transfers between two ranks, which end together, too."""
    ends = [np.sort(_transfers(each)) for each in recordings]
    pairs = list(combinations(range(len(recordings)), 2))
    if len(pairs) > MOST_PAIRS:
        return
    for a, b in pairs:
        if (a in clocks and b in clocks) or (apart := _peak(ends[a], ends[b])) is None:
            continue
        ways[a].append((b, apart))
        ways[b].append((a, Apart(-apart.offset_ns, apart.scatter_ns, -apart.moved_ns, apart.calls)))
    _reach(clocks, ways)


def _transfers(each: Recording) -> Int:
    pairwise = np.isin(each.collectives["call"], POINT_TO_POINT) & (each.gpu_end >= 0)
    return np.unique(each.gpu_end[pairwise])[-MOST_TRANSFERS:]


def _peak(a: Int, b: Int) -> Apart | None:
    """How two ranks' ends are apart, by the distance that most of them have; None: none stands out."""
    least = max(MATCHED * min(len(a), len(b)), 2 * MIN_CALLS)
    if min(len(a), len(b)) < least:
        return None
    first = np.searchsorted(a, b - NEAR_NS)
    count = np.searchsorted(a, b + NEAR_NS) - first
    which = np.repeat(np.arange(len(b)), count)
    place = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    apart = a[place] - b[which]
    if not len(apart):
        return None
    bins = np.bincount((apart + NEAR_NS) // BIN_NS)
    pairs = bins + np.append(bins[1:], 0)
    best = np.flatnonzero(pairs >= 0.9 * pairs.max())
    peak = int(best[np.argmin(np.abs(best * BIN_NS - NEAR_NS))])
    low = peak * BIN_NS - NEAR_NS
    inside = apart[(apart >= low) & (apart < low + 2 * BIN_NS)]
    inside = inside[np.abs(inside - np.median(inside)) <= 5 * TIGHT_NS]
    densest = _apart(inside) if len(inside) >= least else None
    return densest if densest is not None and densest.scatter_ns <= TIGHT_NS else None


# ---- hosts


def host_in_path(path: str) -> str:
    """The host or pod named by a file's name or its folder's; empty: neither names one."""
    parts = path.replace("\\", "/").split("/")
    if match := re.match(r"(.+)_\d+\.\d+(?:\.\d+)?\.pt\.trace\.json", parts[-1]):
        return match[1]
    for part in (re.sub(r"(\.pt)?(\.trace)?\.(json|sqlite|db|sqlite3)(\.gz)?$", "", parts[-1]), *parts[-2:-1]):
        plain = re.sub(r"[-_.]?(?:global[-_.]?|local[-_.]?)?rank[-_.]?\d+", "", part, flags=re.IGNORECASE)
        if match := _POD.search(plain):
            return match[0].strip("-_.")
    return ""


def hosts_given(words: Sequence[str], recordings: Sequence[Recording]) -> dict[int, str]:
    """The hosts that a user gives, by rank.

    Args:
        words: ``0-7=node1``, ``3=node1`` or ``0,2,4=node1``; or a regular expression, whose first group in the path of
            a rank's file is its host. The last that fits counts; but a rank has one host by number.
        recordings: All of the job.

    Raises:
        ArgusError: A word is neither, or names a rank that there is not, or that another has on another host.
    """
    host_of: dict[int, str] = {}
    numbered: dict[int, str] = {}
    ranks = {each.rank for each in recordings}
    for word in words:
        if match := re.fullmatch(r"([\d,\s-]+)=(.+)", word):
            for part in match[1].split(","):
                ends = [int(end) for end in part.split("-") if end.strip()]
                if len(ends) not in (1, 2):
                    raise ArgusError(f"--host-of {word}: {part!r} is not a rank", HOST_OF_HINT, EXIT_USAGE)
                wanted = {rank for rank in ranks if ends[0] <= rank <= ends[-1]}
                if not wanted:
                    raise ArgusError(f"--host-of {word}: rank {part} is not imported", HOST_OF_HINT, EXIT_USAGE)
                host = match[2].strip()
                if twice := sorted(rank for rank in wanted if numbered.get(rank, host) != host):
                    raise ArgusError(
                        f"--host-of {word}: {ranks_text(twice)} {'is' if len(twice) == 1 else 'are'} on "
                        f"{numbered[twice[0]]} by another --host-of", HOST_OF_HINT, EXIT_USAGE,
                    )  # fmt: skip
                numbered |= dict.fromkeys(wanted, host)
                host_of |= dict.fromkeys(wanted, host)
            continue
        try:
            pattern = re.compile(word)
        except re.error as failure:
            raise ArgusError(f"--host-of {word}: not a pattern: {failure}", HOST_OF_HINT, EXIT_USAGE) from None
        if not pattern.groups:
            raise ArgusError(f"--host-of {word}: the pattern has no group for the host", HOST_OF_HINT, EXIT_USAGE)
        hits = {each.rank: hit[1] for each in recordings if (hit := pattern.search(each.path)) and hit[1]}
        if not hits:
            raise ArgusError(f"--host-of {word}: it matches no file's path", HOST_OF_HINT, EXIT_USAGE)
        host_of |= hits
    return host_of


def find_hosts(
    recordings: Sequence[Recording], clocks: Mapping[int, Clock], given: Mapping[int, str] | None = None
) -> list[str]:
    """Puts each recording on its host: sets ``host``.

    Args:
        recordings: With the hosts that they name, :data:`UNKNOWN_HOST` where they name none.
        clocks: As :func:`compare_clocks` gives them.
        given: Hosts that the user gave, by rank: believed.

    Returns:
        What to report of it, sentences without a full stop.
    """
    given = given or {}
    notes: list[str] = []
    named: dict[str, list[Recording]] = defaultdict(list)
    for each in recordings:
        if each.rank in given:
            each.host = given[each.rank]
        else:
            named[each.host].append(each)
    for name, members in sorted(named.items()):
        parts = _alike(members, clocks, named=name != UNKNOWN_HOST)
        if len(parts) == 1:
            continue
        largest = max(parts, key=len)
        for part in parts:
            if name == UNKNOWN_HOST:
                host = f"host-of-rank-{part[0].rank}"
            else:
                host = name if part is largest else f"{name}.rank-{part[0].rank}"
            for each in part:
                each.host = host
        if name != UNKNOWN_HOST:
            notes.append(
                f"{len(members)} ranks name their host {name!r}, but clocks or GPUs are those of {len(parts)} hosts"
            )
        elif len(recordings) > 1:
            notes.append(f"no recording names its host: by their clocks and GPUs the ranks are on {len(parts)} "
                         "(name them with --host-of RANK=HOST)")  # fmt: skip
    notes += _clock_notes(recordings, clocks)
    return notes


def _alike(members: list[Recording], clocks: Mapping[int, Clock], *, named: bool) -> list[list[Recording]]:
    """Recordings of one name, by hosts: those whose clocks agree, or that are in one file, and that use different
    GPUs."""
    parts: list[list[Recording]] = []
    alone: list[Recording] = []
    for each in members:
        clock = clocks.get(each.rank)
        near = next((part for part in parts if part[0].path == each.path), None)
        if near is None and clock is not None:
            near = next((part for part in parts if _agree(clocks.get(part[0].rank), clock)), None)
        if near is not None:
            near.append(each)
        elif clock is not None:
            parts.append([each])
        else:
            alone.append(each)
    for each in alone:
        # A name is believed where nothing contradicts: two recordings of one GPU do.
        twin = next((part for part in parts if part[0].path == each.path), None)
        if twin is None and named:
            twin = next((part for part in parts if each.device() not in {other.device() for other in part}), None)
        if twin is not None:
            twin.append(each)
        else:
            parts.append([each])
    return sorted((host for part in parts for host in _by_gpus(part)), key=lambda part: part[0].rank)


def _by_gpus(part: list[Recording]) -> list[list[Recording]]:
    """Recordings whose clocks agree, by hosts: several GPUs that are each used twice are those of two hosts. Where all
    ranks use GPU 0, each sees only its own, and nothing shows how many hosts there are."""
    if len({each.device() for each in part}) < 2:
        return [part]
    hosts: list[list[Recording]] = []
    for each in sorted(part, key=lambda each: each.rank):
        fits = (
            host for host in hosts
            if any(other.path == each.path for other in host)
            or each.device() not in {other.device() for other in host} or each.device() < 0
        )  # fmt: skip
        if (host := next(fits, None)) is None:
            hosts.append([each])
        else:
            host.append(each)
    return hosts


def _agree(one: Clock | None, other: Clock) -> bool:
    if one is None:
        return False
    apart = abs(one.offset_ns - other.offset_ns) + abs(one.moved_ns - other.moved_ns)
    return apart <= AGREE_NS


def _clock_notes(recordings: Sequence[Recording], clocks: Mapping[int, Clock]) -> list[str]:
    hosts = sorted({each.host for each in recordings})
    if len(hosts) < 2:
        return []
    notes = []
    unknown = [each.rank for each in recordings if each.rank not in clocks]
    known = [clocks[each.rank] for each in recordings if each.rank in clocks]
    offsets = [clock.offset_ns for clock in known]
    if offsets and max(offsets) - min(offsets) > AGREE_NS:
        error = max(clock.error_ns for clock in known)
        apart = duration(max(offsets) - min(offsets))
        notes.append(
            f"clocks of {len(hosts)} hosts are up to {apart} apart, as "
            f"collectives show, whose ends scatter by {duration(error)}; argus diagnose allows for it, and says how "
            "far off they are at most"
        )
    if unknown:
        some = ", ".join(map(str, unknown[:8])) + ", …" * (len(unknown) > 8)
        notes.append(f"no collective shows how the clock of rank {some} differs from the others': it is compared by "
                     "what its GPU does, and with ranks of its host")  # fmt: skip
    return notes
