"""Whether dumps are of one hang. A folder into which several hangs wrote holds files of an older one wherever the newer
one left none; their calls would be taken for where those ranks stopped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from argus.importers.dumps.flight_recorder import Dump
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.units import elapsed, ranks_text

APART_NS = 3600 * 10**9
"""Newest times further apart than this are of different hangs. The ranks of one hang stop within the timeout of one
another, which is 10 minutes by default and 30 in Megatron's examples; clocks of hosts differ by seconds."""
MOST_TIMEOUT_NS = 24 * APART_NS
"""Longer timeouts that a dump records are not believed."""
MOST = 2 / 3
"""Share of the dated dumps that the largest group must have, or nothing says which hang is meant."""
HINT = "Import each hang by itself (argus import flight-recorder FILE...); if only clocks differ: --any-time"


def of_one_time(dumps: Sequence[Dump]) -> tuple[list[Dump], list[str]]:
    """The dumps of the hang that most are of, and what to report of the others, a line each.

    Dumps without a call have no time: they are kept.

    Raises:
        ArgusError: No group of dumps is much larger than the others.
    """
    newest = {dump.rank: dump.span[1] for dump in dumps if dump.span[1]}
    groups = _groups(newest, _apart_ns(dumps))
    if len(groups) < 2:
        return list(dumps), []
    largest = max(groups, key=len)
    if len(largest) < MOST * len(newest):
        raise ArgusError(
            f"the dumps are of {len(groups)} times: "
            + "; ".join(f"{ranks_text(sorted(group))} stopped at {_moment(newest[group[-1]])}" for group in groups[:4])
            + ("; …" if len(groups) > 4 else ""),
            HINT,
            EXIT_USAGE,
        )
    lines = []
    for group in groups:
        if group is not largest:
            apart_ns = newest[group[-1]] - newest[largest[-1]]
            lines.append(
                f"the dump{'s' * (len(group) > 1)} of {ranks_text(sorted(group))} {'are' if len(group) > 1 else 'is'} "
                f"{elapsed(abs(apart_ns) / 1e9)} {'older' if apart_ns < 0 else 'newer'} than the others: "
                "left out, as if missing (--any-time keeps all)"
            )
    if undated := [dump.rank for dump in dumps if dump.rank not in newest]:
        lines.append(
            f"the dump{'s' * (len(undated) > 1)} of {ranks_text(undated)} "
            f"{'have' if len(undated) > 1 else 'has'} no call that shows of when: kept; remove what is of another hang"
        )
    kept = {*largest} | {*undated}
    return [dump for dump in dumps if dump.rank in kept], lines


def _apart_ns(dumps: Sequence[Dump]) -> int:
    """An hour, or twice the longest timeout of a call."""
    timeouts: list[int] = [at * 10**6 for dump in dumps for at in dump.calls.get("timeout_ms", [])]
    return 2 * max([APART_NS // 2, *(at for at in timeouts if at <= MOST_TIMEOUT_NS)])


def _groups(newest: dict[int, int], apart_ns: int) -> list[list[int]]:
    """Ranks by their newest time, oldest first, divided where two are far apart."""
    groups: list[list[int]] = []
    last_ns = 0
    for rank, at_ns in sorted(newest.items(), key=lambda each: each[1]):
        if not groups or at_ns - last_ns > apart_ns:
            groups.append([])
        groups[-1].append(rank)
        last_ns = at_ns
    return groups


def _moment(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
