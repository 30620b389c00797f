"""Numbers as people read them: durations, bytes, rates, lists of ranks. One way each, for every room."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_DURATIONS = (("µs", 1e3, 1e3), ("ms", 1e6, 1e6), ("s", 1e9, 1e10))
"""Units beyond ns: how many ns they are, and from how many on they are used."""
RANKS_LISTED = 8
"""Ranks that a sentence names; of more it gives the number."""
UNKNOWN_HOST = "unknown"
"""Stands for a host that nothing names: of recordings of one host, of logs, and of dumps."""
_ROUNDED = 0.9995
"""What is above so much of a unit would have four digits in the one below it: 999.6 µs are 1.00 ms."""


def duration(ns: float, signed: bool = False) -> str:
    """A duration, or a difference of two, in the unit that suits its size and with three digits or more: 950 ns,
    3.42 µs, 12.5 ms, 1,024 ms, 12.5 s. ``signed``: positive ones have a plus sign."""
    name, factor = "ns", 1.0
    for unit, unit_ns, from_ns in _DURATIONS:
        if abs(ns) >= from_ns * _ROUNDED:
            name, factor = unit, unit_ns
    value = abs(ns) / factor
    decimals = 0 if name == "ns" or value >= 99.95 else 1 if value >= 9.995 else 2
    sign = "" if value <= 0.5 and name == "ns" else "-" if ns < 0 else "+" if signed else ""
    return f"{sign}{value:,.{decimals}f} {name}"


LONGEST_SPAN_NS = 366 * 86400 * 10**9
_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|[smhd])?")
_SPAN_UNITS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


def span_ns(text: str) -> int | None:
    """A span of time as people write it, in ns: 500ms, 30s, 5m, 2h, 1d, or 30 (seconds). None: it is none, is nothing,
    or is longer than a year."""
    match = _SPAN.fullmatch(text)
    ns = round(float(match[1]) * _SPAN_UNITS_S[match[2] or "s"] * 1e9) if match else 0
    return ns if 0 < ns <= LONGEST_SPAN_NS else None


def seconds(measured_s: float) -> str:
    """What takes seconds as a rule, and is not compared with what takes ms: 12.5 ms, 1.3 s, 12.5 s, 3,600 s."""
    if measured_s < 0.9995:
        return duration(1e9 * measured_s)
    return f"{measured_s:,.{0 if measured_s >= 99.95 else 1}f} s"


def span_text(chosen_s: float) -> str:
    """A time that somebody chose, such as a limit or a window: 2 s, 5 min 00 s; 500 ms if not whole seconds."""
    return seconds(chosen_s) if chosen_s % 1 else elapsed(chosen_s)


def elapsed(since_s: float) -> str:
    """Time since something, such as the start, or without it, such as a silence: 42 s, 3 min 12 s, 2 h 05 min."""
    whole = int(since_s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def narrow(since_s: float) -> str:
    """Time since something in a narrow column: 42s, 3m12s, 5h07m, 2d04h."""
    whole = max(round(since_s), 0)
    for unit, part, unit_s, part_s in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= unit_s:
            return f"{whole // unit_s}{unit}{whole % unit_s // part_s:02}{part}"
    return f"{whole}s"


def size(nbytes: float) -> str:
    """Bytes that are transferred, in units of 1,000 as bandwidths have them: 999 B, 12.5 MB."""
    units = ("B", "KB", "MB", "GB", "TB", "PB")
    power = _power(nbytes, 1000, len(units))
    return f"{nbytes / 1000**power:,.{1 if power else 0}f} {units[power]}"


def bandwidth(bytes_per_s: float) -> str:
    """Bytes that are transferred in a second: 850 B/s, 32.0 GB/s."""
    return f"{size(bytes_per_s)}/s"


def binary_size(nbytes: float) -> str:
    """Bytes of memory or of a disk, in units of 1,024, with three digits at most: 128 MiB, 4.23 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = _power(nbytes, 1024, len(units))
    value = nbytes / 1024**power
    return f"{value:,.0f} {units[power]}" if value >= 999.5 or not power else f"{value:.3g} {units[power]}"


def _power(value: float, base: int, units: int) -> int:
    """Which unit suits a value, where each is ``base`` of the one before it."""
    return next((power for power in range(units - 1, 0, -1) if abs(value) >= base**power * _ROUNDED), 0)


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


def ranks_text(ranks: Sequence[int], most: int = RANKS_LISTED) -> str:
    """Ranks in a sentence, the first ones and how many more: rank 3; ranks 3, 7. Empty where there are none."""
    if not len(ranks):
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks, most)}"


def named_hosts(hosts: Iterable[str]) -> list[str]:
    """Names of hosts, each once, without :data:`UNKNOWN_HOST`."""
    return [host for host in dict.fromkeys(hosts) if host not in ("", UNKNOWN_HOST)]


def ranks_on(ranks: Sequence[int], hosts: Iterable[str]) -> str:
    """Ranks in a sentence, and up to four hosts that they are on: rank 3 on node-0. Hosts without a name are left
    out."""
    names = named_hosts(hosts)
    return ranks_text(ranks) + (f" on {', '.join(names[:4])}" if names else "")


def rank_pattern(ranks: Sequence[int]) -> str:
    """The ranks of one group, which are often evenly spaced: 0-7; 0,8..56; 1,4,6."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4 and len(steps) == 1:
        return f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return ",".join(map(str, ranks))
