"""Numbers as people read them: durations, bytes, rates, lists of ranks. One way each, for every room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

_BYTES = ("B", "KB", "MB", "GB", "TB", "PB")
RANKS_LISTED = 8
"""Ranks that a sentence names; of more it gives the number."""


def duration(ns: float) -> str:
    """A duration with one decimal: 950 ns, 3.4 µs, 12.5 ms, 90.0 s."""
    for unit, factor in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if ns < 1000 * factor:
            return f"{ns / factor:.0f} {unit}" if factor == 1.0 else f"{ns / factor:.1f} {unit}"
    return f"{ns / 1e9:.1f} s"


def short_duration(ns: float) -> str:
    """A duration, or a difference of two, with three digits: 3.42 µs, -12.5 ms, 950 ms."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= scale:
            return f"{ns / scale:,.3g} {unit}" if abs(ns) < 1e12 else f"{ns / scale:,.0f} {unit}"
    return f"{ns:.0f} ns"


def milliseconds(ns: float, form: str = ",.1f") -> str:
    """A duration in ms, however long, where several are compared: 1,024.5 ms. ``form``: of the number."""
    return f"{ns / 1e6:{form}} ms"


def plain_ms(ns: float) -> str:
    """The same without a mark between thousands: 1024.5 ms."""
    return f"{ns / 1e6:.1f} ms"


def clock_difference(ns: float) -> str:
    """By how much clocks may differ: 250 us, 1.5 ms."""
    return f"{ns / 1e3:,.0f} us" if ns < 1e6 else milliseconds(ns)


def issue_delay(ns: float) -> str:
    """A time that is mostly far below a millisecond: 85 us, 0.1 ms."""
    return milliseconds(ns) if ns >= 1e5 else f"{ns / 1e3:,.0f} us"


def part_of_step(ns: float) -> str:
    """What a part of a step takes: 12.5 ms, 85.0 µs."""
    return milliseconds(ns) if ns >= 1e5 else f"{ns / 1e3:,.1f} µs"


def elapsed(seconds: float) -> str:
    """Time since the start: 42 s, 3 min 12 s, 2 h 05 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(nbytes: float) -> str:
    """Bytes in decimal units, with one decimal: 999 B, 12.5 MB."""
    for unit in _BYTES[:-1]:
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} {_BYTES[-1]}"


def binary_size(nbytes: int) -> str:
    """Bytes in units of 1024, with three digits, as disks and memory are counted: 1.21 MiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def mebibytes(nbytes: int) -> str:
    """Bytes in whole MiB, rounded down, as limits are set: 1,024 MiB."""
    return f"{nbytes >> 20:,} MiB"


def rate(per_second: float) -> str:
    """A rate: 12/s, 3.4k/s, 1.2M/s."""
    if per_second >= 1e6:
        return f"{per_second / 1e6:.1f}M/s"
    if per_second >= 1e3:
        return f"{per_second / 1e3:.1f}k/s"
    return f"{per_second:.0f}/s"


def rank_text(ranks: Iterable[int]) -> str:
    """All ranks, as ranges: 0-2,4-31."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in parts)


def listed(things: Sequence[object], most: int = RANKS_LISTED) -> str:
    """The first ones, and how many more there are: 3, 7; 0, 1, 2, 3, 4, 5, 6, 7 and 2 more."""
    return ", ".join(map(str, things[:most])) + (f" and {len(things) - most} more" if len(things) > most else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a sentence, the first eight and how many more: rank 3; ranks 3, 7. Empty where there are none."""
    if not len(ranks):
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


def rank_pattern(ranks: Sequence[int]) -> str:
    """The ranks of one group, which are often evenly spaced: 0-7; 0,8..56; 1,4,6."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4 and len(steps) == 1:
        return f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return ",".join(map(str, ranks))
