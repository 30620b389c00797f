"""Who is in a communicator that no recording names: ranks whose collectives end together.

All ranks of a collective leave it within some microseconds, on whatever clock each of them writes that down. So the
difference of two ranks' ends is constant, but for the drift of clocks, if they are in one communicator, and scatters as
the work in between does if they are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.clocks import MIN_CALLS, MOST_PAIRS, Lane, lanes_of, line_up, paired
from argus.importers.recordings.recording import Recording
from argus.model.groups import Membership

TOGETHER_NS = 20_000
"""Ranks that leave a collective together do so within this: a ring's last step, and what a profiler's times are rounded
to."""
LEAST_NS = 500.0
"""Smaller scatter is the rounding of times to 1 us."""
APART = 2.0
"""Ranks of different communicators scatter by so many times more than those of one."""


@dataclass(frozen=True)
class Member:
    """A rank's place in an inferred communicator.

    Attributes:
        membership: Its name, the same on all ranks; the rank's place in it; and how many there are.
        offset: Added to the rank's numbers of the calls, it gives those of the communicator.
    """

    membership: Membership
    offset: int


def infer_members(recordings: Sequence[Recording]) -> dict[tuple[int, int], Member]:
    """Communicators that the recordings do not name, by (rank, handle). Those that are not clear are missing."""
    lanes: dict[tuple[bytes, int], list[tuple[int, int, Lane]]] = defaultdict(list)
    for each in recordings:
        for comm, lane in lanes_of(each).items():
            if comm not in each.groups:
                lanes[lane.kinds.tobytes(), _calls_a_step(lane)].append((each.rank, comm, lane))
    members: dict[tuple[int, int], Member] = {}
    for number, (_, alike) in enumerate(sorted(lanes.items(), key=lambda item: item[0])):
        if len(alike) < 2 or len(alike) * (len(alike) - 1) // 2 > MOST_PAIRS:
            continue
        scatter = np.full((len(alike), len(alike)), np.inf)
        shifts: dict[tuple[int, int], int] = {}
        for a in range(len(alike)):
            for b in range(a + 1, len(alike)):
                if alike[a][0] == alike[b][0] or (shift := line_up(alike[a][2], alike[b][2])) is None:
                    continue
                scatter[a, b] = scatter[b, a] = _scatter(alike[a][2], alike[b][2], shift)
                shifts[a, b] = shift
        for part in divide(scatter) or _divide_by_handle(scatter, [comm for _, comm, _ in alike]):
            ranks = [alike[place][0] for place in part]
            offsets = [0] + [shifts[part[0], place] for place in part[1:]]
            name = f"ends together {number}/" + ",".join(map(str, sorted(ranks)))
            for place, offset in zip(part, offsets, strict=True):
                rank, comm, _ = alike[place]
                membership = Membership(name, sorted(ranks).index(rank), len(ranks))
                members[rank, comm] = Member(membership, offset - min(offsets))
    return members


def divide(scatter: NDArray[np.float64]) -> list[list[int]]:
    """The parts of equal size, at least two each, whose members scatter little among themselves and at least
    :data:`APART` times as much against all others; empty: there are no such parts.

    Args:
        scatter: Of each pair, ns, symmetric, shape (n, n); infinite where they cannot be compared.
    """
    many = len(scatter)
    above = np.triu_indices(many, 1)
    levels = np.unique(np.maximum(scatter[above], LEAST_NS))
    levels = levels[levels <= TOGETHER_NS]
    for place, level in enumerate(levels.tolist()):
        following = levels[place + 1] if place + 1 < len(levels) else np.inf
        if following < APART * level:
            continue
        close = np.maximum(scatter, LEAST_NS) <= level
        np.fill_diagonal(close, True)
        parts = {tuple(np.flatnonzero(row).tolist()) for row in close}
        # Who is close to one of a part is close to all of it, and to nobody else.
        sizes = {len(part) for part in parts}
        if len(sizes) == 1 and sizes.pop() >= 2 and sum(map(len, parts)) == many:
            beyond = scatter[~close]
            if not len(beyond) or float(beyond.min()) >= APART * level:
                return [list(part) for part in sorted(parts)]
    return []


def _divide_by_handle(scatter: NDArray[np.float64], handles: list[int]) -> list[list[int]]:
    """The same among the ranks' communicators of one handle each, where those of all together have no parts of equal
    size: one of all ranks, and some of a few. Handles of recordings are streams, which ranks make in equal order."""
    parts = []
    for handle in sorted(set(handles)):
        places = np.array([place for place, other in enumerate(handles) if other == handle])
        parts += [places[part].tolist() for part in divide(scatter[np.ix_(places, places)])]
    return parts


def _scatter(a: Lane, b: Lane, shift: int) -> float:
    """The distance of the differences of their ends from a line through them, root mean square of all but the largest
    twentieth, ns; infinite: too few calls."""
    both = paired(a, b, shift)
    if both is None or len(both) < 2 * MIN_CALLS:
        return np.inf
    at = a.ends[both].astype(np.float64)
    apart = at - b.ends[both - shift]
    at -= at.mean()
    third = max(len(at) // 3, 1)
    lasted, moved = (float(np.median(of[-third:]) - np.median(of[:third])) for of in (at, apart))
    if lasted > 0:  # a broken file may have all ends at one time
        apart -= moved / lasted * at
    distance = np.sort(np.abs(apart - np.median(apart)))
    return float(np.sqrt(np.mean(np.square(distance[: -max(len(distance) // 20, 1)]))))


def _calls_a_step(lane: Lane) -> int:
    """Where sizes are not known, this distinguishes communicators of one rank; 0: steps are not known."""
    places = np.array(sorted(lane.begun.values()))
    return int(np.median(np.diff(places))) if len(places) > 1 else 0
