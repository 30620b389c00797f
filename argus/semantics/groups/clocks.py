"""How far apart the clocks of several hosts are, from collectives that they take part in.

Two facts show it. Causality: nobody leaves a synchronising collective before everybody has entered it, which bounds the
offset of two clocks from both sides whatever the network does; all bounds of a minute together leave the band that the
offset lies in (Duda et al., "Estimating global time in distributed systems", 1987). And ranks leave a collective
together: once the last has come, what is left is the transfer, and nobody takes longer for it than twice the time of
the rank that came last. So ends differ by no more than the shortest time that any rank spent in the call, also where
one host is always the last, where causality alone leaves the other side of the band open.

The second holds for times of the GPU. A CPU that waits for the GPU may wait for other work of its own as well, so there
only causality counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]

SYNCHRONISING = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Barrier")
"""Operations that no rank can leave before all have entered. The root of a Broadcast can, and so can all but the root
of a Reduce or Gather."""

METHODS = ("reference", "gpu", "waits", "wall", "none")
"""Names of ``CLOCK["method"]``, as the table ``clocks`` spells them."""
REFERENCE, BY_GPU, BY_WAITS, BY_WALL, UNKNOWN = range(5)

CALL = np.dtype(
    [
        ("group", "<u8"),
        ("seq", "<i8"),
        ("host", "<i4"),
        ("method", "u1"),
        ("entry_ns", "<i8"),
        ("end_ns", "<i8"),
        ("took_ns", "<i8"),
    ]
)
"""One collective on one host, on the host's own clock: ``entry_ns`` when the last of its ranks entered it, ``end_ns``
when the first of them left (-1: not known), ``took_ns`` the shortest time that any of them spent in it (-1: not known).
``method`` is :data:`BY_GPU` or :data:`BY_WAITS`. Any part of a host's ranks will do."""

CLOCK = np.dtype(
    [
        ("host", "<i4"),
        ("since_ns", "<i8"),
        ("at_ns", "<i8"),
        ("offset_ns", "<i8"),
        ("drift_ppb", "<i8"),
        ("error_ns", "<i8"),
        ("calls", "<u4"),
        ("method", "u1"),
        ("through", "<i4"),
    ]
)
"""A line: from ``since_ns`` on, a time t of ``host`` is t + offset_ns + (t - at_ns) * drift_ppb / 1e9 of the reference,
give or take ``error_ns`` (-1: nothing is known, and the offset is 0). ``through``: the host it was compared with; -1:
the reference."""

WINDOW_NS = 60_000_000_000
"""A line holds for a minute. Crystals differ by some 20 ppm, 1.2 ms a minute, so a constant will not do; NTP and warmth
change the rate by less than 0.1 ppm in that time, 6 us."""
MAX_WINDOWS = 240
"""Longer runs have longer windows. What a line then misses shows in the residuals, and so in the error."""
MIN_CALLS = 8
"""Fewer collectives in common than this are ignored."""
MAX_DRIFT = 1e-3
"""Linux corrects a clock's rate by at most 500 ppm (MAXFREQ, include/linux/timex.h), so two differ by at most 1,000."""
STRAY = 0.05
"""Share of waits that may have been for something else than the collective: VIOLATIONS of groups.py."""
FLOOR_NS = 1_000
"""No error is smaller: a time stamp of a GPU is that exact."""
OUTLIER = 4.0
"""Ends further from the line than so many median deviations do not count for it."""
CERTAIN = 3.0
"""Standard errors from which on a drift is believed. Below it is taken for 0, and its standard error for the error."""


def estimate(
    calls: NDArray[np.void],
    hosts: int,
    *,
    reference: int = 0,
    wall_error_ns: Int | None = None,
    window_ns: int = WINDOW_NS,
    minutes: Int | None = None,
) -> NDArray[np.void]:
    """Estimates the clocks of all hosts against one.

    Hosts that share no communicator with the reference are reached through others, by the way with the least error;
    errors add up. Times between windows, of which nothing is known, are bridged: there a clock's rate is taken to be no
    farther from the mean one than at either end.

    Args:
        calls: :data:`CALL` rows of communicators that span hosts, in any order.
        hosts: Number of hosts; ``calls["host"]`` is below it.
        reference: The host whose clock all are converted to.
        wall_error_ns: By how much each host's clock may be off true time by its own account, shape (hosts,); -1: not
            known. A bound as well: used where it is the better one.
        window_ns: Length of the windows, ns.
        minutes: When the windows that calls are given of begin, on any host's clock, ns; None: calls of all times are.

    Returns:
        :data:`CLOCK` rows, ordered by host and time, at least one a host. Each host's first holds from the beginning.
    """
    known = _known(calls)
    base, span = _extent(known)
    if minutes is None:
        count = int(min(max(1, span // window_ns), MAX_WINDOWS))
        begins = np.linspace(0, span + 1, count + 1)
        ends, begins = begins[1:], begins[:-1]
    else:
        begins = (np.unique(minutes) - base).astype(np.float64)
        ends = begins + window_ns
    walls = _walls(wall_error_ns, hosts, reference)
    stretches: dict[int, list[_Stretch]] = defaultdict(list)
    for begin, end, links in zip(begins.tolist(), ends.tolist(), _windows(known, base, begins, reference), strict=True):
        for host, line in _nearest(links + walls, reference, base).items():
            stretches[host].append(_Stretch(int(begin), int(end), line))
    last = max(int(ends[-1]), span + 1)
    rows: list[tuple[float, ...]] = [(reference, 0, 0, 0, 0, 0, 0, REFERENCE, -1)]
    for host in range(hosts):
        if host == reference:
            continue
        if host in stretches:
            rows += _rows(host, stretches[host], base, last)
        else:
            rows.append((host, 0, 0, 0, 0, -1, 0, UNKNOWN, -1))
    return np.array(rows, CLOCK)


def most_informative(calls: NDArray[np.void], hosts: int, *, reference: int = 0) -> list[int]:
    """The communicators by which each host is best compared with the reference, ascending. Arguments as for
    :func:`estimate`; all calls are taken for those of one window."""
    known = _known(calls)
    base, _ = _extent(known)
    (links,) = _windows(known, base, np.zeros(1), reference)
    return sorted({line.group for line in _nearest(links, reference, base).values()})


def likely(groups: Mapping[int, tuple[Sequence[int], float]], *, reference: int = 0) -> list[int]:
    """The communicators by which each host would be best compared with the reference, ascending, if clocks that share
    one were off by the time of its shortest collective.

    Args:
        groups: By communicator: its hosts, and that time, ns.
        reference: As for :func:`estimate`.
    """
    links = []
    for group, (members, took) in groups.items():
        hub = reference if reference in members else min(members)
        links += [
            _Link(hub, member, 0.0, 0.0, 0.0, took, 0.0, MIN_CALLS, BY_GPU, group)
            for member in members
            if member != hub
        ]
    return sorted({line.group for line in _nearest(links, reference, 0).values()})


def _known(calls: NDArray[np.void]) -> NDArray[np.void]:
    return calls[(calls["entry_ns"] >= 0) & (calls["end_ns"] >= 0) & (calls["took_ns"] >= 0)]


def _extent(known: NDArray[np.void]) -> tuple[int, int]:
    """When the first call was entered, and how much later the last one, ns. Clocks may be hours apart: the length of
    the run is what the host with the most calls saw."""
    if not len(known):
        return 0, 0
    times = known["entry_ns"][known["host"] == np.bincount(known["host"]).argmax()]
    return int(times.min()), int(times.max()) - int(times.min())


def _rows(host: int, stretches: list[_Stretch], base: int, last: int) -> list[tuple[float, ...]]:
    """The lines of one host, and what joins them over times that nothing is known of. ``last``: when the run ends."""
    rows: list[tuple[float, ...]] = []
    stretches = _best(stretches, base)

    def add(since: int, line: _Line, offset_ns: float, drift: float, error: float, at: int) -> None:
        # On the reference's clock, whose windows differ from the host's own by the offset alone.
        own = base + since - int(line.offset) if rows else 0
        rows.append((host, own, at, round(offset_ns), round(drift * 1e9), math.ceil(error) + FLOOR_NS, line.calls,
                     line.method, line.through))  # fmt: skip

    for place, here in enumerate(stretches):
        line, after = here.line, stretches[place + 1] if place + 1 < len(stretches) else None
        begin, until = here.begin if place else 0, here.end if after is not None else last
        add(begin, line, line.offset, line.drift, max(_error(line, base, begin), _error(line, base, until)), line.at)
        if after is not None and after.begin > here.end:
            at, offset, drift, error = _chord(here, after, base)
            add(here.end, line, offset, drift, error, at)
    return rows


def _best(stretches: list[_Stretch], base: int) -> list[_Stretch]:
    """Without a host's own account of its clock where the lines before and after are better."""
    lines = [place for place, one in enumerate(stretches) if one.line.method != BY_WALL]
    kept = []
    for place, one in enumerate(stretches):
        before = next((stretches[i] for i in reversed(lines) if i < place), None)
        after = next((stretches[i] for i in lines if i > place), None)
        error = math.inf
        if one.line.method == BY_WALL and before is not None and after is not None:
            error = _chord(before, after, base)[3]
        elif one.line.method == BY_WALL and (near := before or after) is not None:
            error = max(_error(near.line, base, when) for when in (one.begin, one.end))
        if one.line.error < error:
            kept.append(one)
    return kept


def _chord(here: _Stretch, after: _Stretch, base: int) -> tuple[int, float, float, float]:
    """(When it is exact on the host's own clock, the offset then, its drift, its error) of what joins two lines: exact
    at both ends, and off by most where the rate changes at once from one end's to the other's."""
    gap = after.begin - here.end
    begin, end = base + here.end - int(here.line.offset), base + after.begin - int(after.line.offset)
    offset = here.line.at_time(begin)
    drift = (after.line.at_time(end) - offset) / (end - begin)
    bend = max(abs(one.line.drift - drift) + one.line.drift_error for one in (here, after))
    error = max(_error(here.line, base, here.end), _error(after.line, base, after.begin)) + bend * gap / 2
    return begin, offset, drift, error


def _error(line: _Line, base: int, when: int) -> float:
    """By how much a line may be off at a time of the reference, counted from ``base``, ns."""
    return line.error + line.drift_error * abs(when - (line.at - base + line.offset))


def convert(times: Int, clock: NDArray[np.void]) -> Int:
    """Times of one host on the reference's clock.

    Args:
        times: ns, shape (n,).
        clock: The host's :data:`CLOCK` rows, ordered by time.
    """
    row = clock[np.maximum(np.searchsorted(clock["since_ns"], times, side="right") - 1, 0)]
    return np.asarray(times + row["offset_ns"] + (times - row["at_ns"]) * row["drift_ppb"] // 1_000_000_000, np.int64)


def error_at(times: Int, clock: NDArray[np.void]) -> Int:
    """By how much :func:`convert` may be off for these times, ns, shape (n,); -1: not known."""
    row = clock[np.maximum(np.searchsorted(clock["since_ns"], times, side="right") - 1, 0)]
    return np.asarray(row["error_ns"], np.int64)


class _Link(NamedTuple):
    """Two hosts compared: a time t of ``member`` is t + offset + (t - at) * drift of ``hub``."""

    hub: int
    member: int
    at: float
    """Relative to the first entry of all calls, ns."""
    offset: float
    drift: float
    error: float
    drift_error: float
    calls: int
    method: int
    group: int = -1
    """The communicator that it is estimated from; -1: none, it is the hosts' own account."""


class _Line(NamedTuple):
    """A host against the reference."""

    at: int
    offset: float
    drift: float
    error: float
    drift_error: float
    calls: int
    method: int
    through: int
    group: int = -1
    """The communicator that it shares with ``through``."""

    def at_time(self, own: float) -> float:
        """The offset at a time of the host's own clock."""
        return self.offset + self.drift * (own - self.at)


@dataclass(frozen=True)
class _Stretch:
    """What a host's line was fitted in: from ``begin`` to ``end`` after the first entry of all calls, ns."""

    begin: int
    end: int
    line: _Line


def _walls(errors: Int | None, hosts: int, reference: int) -> list[_Link]:
    if errors is None or errors[reference] < 0:
        return []
    own = float(errors[reference])
    return [
        _Link(reference, host, 0.0, 0.0, 0.0, own + float(errors[host]), 0.0, 0, BY_WALL)
        for host in range(hosts)
        if host != reference and errors[host] >= 0
    ]


def _windows(calls: NDArray[np.void], base: int, begins: Float, reference: int) -> list[list[_Link]]:
    """Links of each window."""
    out: list[list[_Link]] = [[] for _ in begins]
    if not len(calls):
        return out
    order = np.lexsort((calls["host"], calls["seq"], calls["method"], calls["group"]))
    calls = calls[order]
    new = np.ones(len(calls), np.bool_)
    new[1:] = (np.diff(calls["seq"]) != 0) | (calls["group"][1:] != calls["group"][:-1])
    new[1:] |= calls["method"][1:] != calls["method"][:-1]
    first = np.flatnonzero(new)
    # A call is in the window that the host with the lowest number entered it in.
    at = (calls["entry_ns"][first] - base).astype(np.float64)
    window = np.clip(np.searchsorted(begins, at, side="right") - 1, 0, len(out) - 1)
    lengths = np.diff(np.append(first, len(calls)))
    of_call = np.repeat(np.arange(len(first)), lengths)
    key = np.stack([calls["group"][first].view(np.int64), calls["method"][first].astype(np.int64), window])
    _, kind = np.unique(key, axis=1, return_inverse=True)
    kind = np.asarray(kind).reshape(-1)
    by_kind = np.argsort(kind, kind="stable")
    cuts = np.flatnonzero(np.diff(kind[by_kind])) + 1
    row_order = np.argsort(kind[of_call], kind="stable")
    row_cuts = np.flatnonzero(np.diff(kind[of_call][row_order])) + 1
    for chosen, rows in zip(np.split(by_kind, cuts), np.split(row_order, row_cuts), strict=True):
        of_pair = calls[rows]
        members, column = np.unique(of_pair["host"], return_inverse=True)
        if len(members) < 2 or len(chosen) < MIN_CALLS:
            continue
        line = np.searchsorted(np.sort(chosen), of_call[rows])
        times = np.full((3, len(chosen), len(members)), np.nan)
        times[0, line, column] = of_pair["entry_ns"] - base
        times[1, line, column] = of_pair["end_ns"] - base
        times[2, line, column] = of_pair["took_ns"]
        links = _star(times[0], times[1], times[2], members, of_pair[0], reference)
        out[int(window[chosen[0]])] += links
    return out


def _star(entry: Float, end: Float, took: Float, members: Int, call: np.void, reference: int) -> list[_Link]:
    """Compares each member of a communicator with one of them.

    Args:
        entry: Last entry of each host, shape (calls, members), ns; NaN: not seen.
        end: First end, the same.
        took: Shortest time of a rank in it, the same.
        members: Hosts, shape (members,).
        call: One of the calls.
        reference: Taken for the hub if it has most of the calls.
    """
    method, group = int(call["method"]), int(call["group"])
    seen = np.sum(~np.isnan(end), axis=0)
    hub = int(np.argmax(seen))
    wanted = np.flatnonzero(members == reference)
    if len(wanted) and seen[wanted[0]] >= 0.9 * seen[hub]:
        hub = int(wanted[0])
    others = np.flatnonzero(np.arange(len(members)) != hub)
    shared = np.where(np.isnan(end[:, [hub]]), np.nan, entry[:, others])
    at = np.nansum(shared, axis=0) / np.maximum(np.sum(~np.isnan(shared), axis=0), 1)
    x = entry[:, others] - at
    apart = end[:, [hub]] - end[:, others]
    both = ~np.isnan(apart)
    shortest = np.nanmin(took, axis=1)
    # The most informative calls are those that no rank was in for long.
    tight = shortest <= 2 * np.nanquantile(shortest, 0.1)
    used = both & tight[:, None]
    few = np.sum(used, axis=0) < MIN_CALLS
    used[:, few] = both[:, few]
    with np.errstate(invalid="ignore", divide="ignore"):
        offset, drift, drift_error, spread, used = _fit(x, apart, used)
        line = offset + drift * x
        low = np.where(both, entry[:, [hub]] - end[:, others] - line, -np.inf)
        high = np.where(both, end[:, [hub]] - entry[:, others] - line, np.inf)
        least, most = low.max(axis=0), high.min(axis=0)
        if method == BY_WAITS or (least > most).any():
            trimmed = _trimmed(low, high, both)
            chosen = (least > most) | (method == BY_WAITS)
            least, most = np.where(chosen, trimmed[0], least), np.where(chosen, trimmed[1], most)
        moved = np.clip(0.0, np.minimum(least, most), np.maximum(least, most))
        error = np.maximum(most - moved, moved - least)
        if method == BY_GPU:
            waited = np.where(used, shortest[:, None], np.nan)
            count = np.sum(used, axis=0)
            longest = np.full(len(others), np.inf)
            longest[count > 0] = _quantile(waited[:, count > 0], 0.5)
            error = np.minimum(error, longest + spread + np.abs(moved))
    calls = np.sum(used, axis=0)
    good = (calls >= MIN_CALLS) & (least <= most) & (np.abs(drift) <= MAX_DRIFT) & np.isfinite(error)
    return [
        _Link(int(members[hub]), int(members[others[i]]), float(at[i]), float(offset[i] + moved[i]), float(drift[i]),
              float(error[i]), float(drift_error[i]), int(calls[i]), method, group)
        for i in np.flatnonzero(good).tolist()
    ]  # fmt: skip


def _quantile(values: Float, q: float) -> Float:
    """Of each column, shape (members,), NaN left out and neighbours weighted; NaN where there is nothing else. (numpy
    takes a column at a time.)"""
    ordered = np.sort(values, axis=0)  # NaN last
    place = q * np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    columns, below = np.arange(values.shape[1]), place.astype(np.int64)
    above = np.minimum(below + (place > below), len(values) - 1)
    low = ordered[below, columns]
    return np.asarray(low + (place - below) * (ordered[above, columns] - low))


def _trimmed(low: Float, high: Float, both: NDArray[np.bool_]) -> tuple[Float, Float]:
    """The bounds without the :data:`STRAY` share of the calls that would be the tightest, each shape (members,)."""
    count = np.sum(both, axis=0)
    skipped = np.floor(STRAY * count).astype(np.int64)
    columns = np.arange(low.shape[1])
    least = np.sort(low, axis=0)[np.maximum(len(low) - 1 - skipped, 0), columns]
    most = np.sort(high, axis=0)[np.minimum(skipped, len(high) - 1), columns]
    return least, most


def _fit(x: Float, y: Float, used: NDArray[np.bool_]) -> tuple[Float, Float, Float, Float, NDArray[np.bool_]]:
    """Lines y = offset + drift * x, one a column, that a minority of strays does not move.

    Args:
        x: Shape (calls, members).
        y: The same.
        used: Which of them count, the same.

    Returns:
        (offset, drift, :data:`CERTAIN` standard errors of the drift, 90th percentile of the residuals: each shape
        (members,); which calls counted in the end).
    """
    count = np.sum(used, axis=0)
    width = x.shape[1]
    drift = np.zeros(width)
    masked = np.where(used, y, np.nan)
    times = np.where(used, x, np.nan)
    enough = count >= MIN_CALLS
    offset = np.zeros(width)
    deviation = np.full(width, np.inf)
    if enough.any():
        # Theil and Sen's idea, cheaply: the slope between the medians of the first and the last third.
        third = [_quantile(times[:, enough], share) for share in (1 / 3, 2 / 3)]
        early = np.where(times[:, enough] <= third[0], 1.0, np.nan)
        late = np.where(times[:, enough] >= third[1], 1.0, np.nan)
        rise = _quantile(masked[:, enough] * late, 0.5) - _quantile(masked[:, enough] * early, 0.5)
        run = _quantile(times[:, enough] * late, 0.5) - _quantile(times[:, enough] * early, 0.5)
        drift[enough] = np.where(run > 0, rise / np.where(run > 0, run, 1.0), 0.0)
        for _ in range(3):
            offset[enough] = _quantile((masked - drift * times)[:, enough], 0.5)
            residual = np.abs(masked - offset - drift * times)
            deviation[enough] = _quantile(residual[:, enough], 0.5)
            near = used & (residual <= OUTLIER * np.maximum(deviation, FLOOR_NS))
            weight = near.astype(np.float64)
            total = np.maximum(weight.sum(axis=0), 1.0)
            mean_x = np.sum(np.where(near, x, 0.0), axis=0) / total
            mean_y = np.sum(np.where(near, y, 0.0), axis=0) / total
            square = np.sum(np.where(near, (x - mean_x) ** 2, 0.0), axis=0)
            product = np.sum(np.where(near, (x - mean_x) * (y - mean_y), 0.0), axis=0)
            drift = np.where(square > 0, product / np.maximum(square, 1.0), 0.0)
        used = near
        residual = np.where(near, y - mean_y - drift * (x - mean_x), 0.0)
        left = np.maximum(total - 2, 1.0)
        drift_error = np.sqrt(np.sum(residual**2, axis=0) / left / np.maximum(square, 1.0))
        drift_error[square <= 0] = MAX_DRIFT
        certain = np.abs(drift) > CERTAIN * drift_error
        drift = np.where(certain, drift, 0.0)
        offset[enough] = _quantile(np.where(near, y - drift * x, np.nan)[:, enough], 0.5)
        left_over = np.abs(np.where(near, y - offset - drift * x, np.nan))
        spread = np.full(width, np.inf)
        spread[enough] = _quantile(left_over[:, enough], 0.9)
        return offset, drift, CERTAIN * drift_error, spread, used
    return offset, drift, np.full(width, np.inf), np.full(width, np.inf), used & False


def _nearest(links: list[_Link], reference: int, base: int) -> dict[int, _Line]:
    """Each host that can be compared against the reference, by the way of least error."""
    # Imported late: it takes a quarter of a second, and most jobs compare no hosts.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    best: dict[tuple[int, int], _Link] = {}
    for link in links:
        pair = (min(link.hub, link.member), max(link.hub, link.member))
        if pair not in best or link.error < best[pair].error:
            best[pair] = link
    if not best:
        return {}
    ends = np.array(list(best))
    size = max(int(ends.max()), reference) + 1
    errors = [link.error for link in best.values()]
    graph = csr_array((errors, (ends[:, 0], ends[:, 1])), shape=(size, size))
    distance, before = dijkstra(graph, directed=False, indices=reference, return_predecessors=True)
    lines = {reference: _Line(base, 0.0, 0.0, 0.0, 0.0, 0, REFERENCE, -1)}
    for host in np.flatnonzero(np.isfinite(distance)).tolist():
        way = []
        while host not in lines:
            way.append(host)
            host = int(before[host])
        for further in reversed(way):
            link = best[min(host, further), max(host, further)]
            lines[further] = _extended(lines[host], host, link, base)
            host = further
    del lines[reference]
    return lines


def _extended(line: _Line, host: int, link: _Link, base: int) -> _Line:
    """The line of the other end of a link, given a host's own."""
    inverse = link.member == host
    # In the clock of the other end: when the link is exact, and what to add there to get this host's time.
    at = link.at + link.offset if inverse else link.at
    own = -link.offset if inverse else link.offset
    drift = -link.drift if inverse else link.drift
    offset = own + line.offset + line.drift * (at + own - (line.at - base))
    calls = link.calls if line.method == REFERENCE else min(link.calls, line.calls)
    through = -1 if line.method == REFERENCE else host
    return _Line(
        base + round(at),
        offset,
        drift + line.drift,
        link.error + line.error,
        link.drift_error + line.drift_error,
        calls,
        max(link.method, line.method),
        through,
        link.group,
    )
