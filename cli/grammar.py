"""How ranks, steps, processes, spans and times are written on the command line: one grammar for every verb.

=============  ====================================  ==========================================
what           written as                            also accepted
=============  ====================================  ==========================================
ranks          ``3``, ``0-7``, ``0-3,8``             the option repeated
processes      ``4821``, ``4821,4822``               the option repeated
steps          ``100:200`` (both included), ``100:``,  ``100-200``
               ``:200``, ``100``
span of time   ``500ms``, ``30s``, ``5m``, ``2h``,     ``30`` (seconds)
               ``1d``
moment         a span (that long before the end of   Unix time in seconds
               the run), or
               ``2026-05-01T12:00:30`` (UTC)
=============  ====================================  ==========================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.units import span_ns

MAX_PID = 2**22
"""The kernel's PID_MAX_LIMIT on 64-bit machines."""
LAST_STEP = 2**32 - 1
"""``iterations.step`` is a UInt32: the end of an open range."""


def parse_ranks(words: Iterable[str]) -> tuple[int, ...]:
    """``("3", "0-2,7")`` → (0, 1, 2, 3, 7).

    Raises:
        ArgusError: A word names no ranks.
    """
    ranks: set[int] = set()
    for word in _parts(words):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ArgusError(f"'{word}' names no ranks", "Write 3, 0-7 or 0-3,8", EXIT_USAGE)
        ranks |= set(range(first, last + 1))
    return tuple(sorted(ranks))


def parse_pids(words: Iterable[str]) -> tuple[int, ...]:
    """``("4821,4822", "4823")`` → (4821, 4822, 4823), each once, in the order given.

    Raises:
        ArgusError: A word names no process.
    """
    pids = []
    for word in _parts(words):
        number = int(word) if re.fullmatch(r"\s*\d{1,9}\s*", word) else 0
        if not 1 <= number <= MAX_PID:
            hint = f"Write 4821, or 4821,4822; the largest is {MAX_PID}. By name: --name {word.strip() or 'TEXT'}"
            raise ArgusError(f"'{word}' is no process id", hint, EXIT_USAGE)
        pids.append(number)
    return tuple(dict.fromkeys(pids))


def _parts(words: Iterable[str]) -> list[str]:
    return [part for word in words for part in word.split(",")]


def parse_open_steps(word: str) -> tuple[int | None, int | None]:
    """``"100:200"`` → (100, 200), both included; ``"100:"`` → (100, None), ``":200"`` → (None, 200), ``"100"`` →
    (100, 100).

    Raises:
        ArgusError: The word names no steps.
    """
    match = re.fullmatch(r"(\d{1,9})?(?:([-:])(\d{1,9})?)?", word)
    if match is not None and (match[1] or match[3]) and (match[2] != "-" or (match[1] and match[3])):
        first = int(match[1]) if match[1] else None
        last = int(match[3]) if match[3] else None if match[2] else first
        if first is None or last is None or first <= last:
            return first, last
    raise ArgusError(f"'{word}' names no steps", "Write 100:200, 100:, :200 or 100", EXIT_USAGE)


def parse_steps(word: str) -> tuple[int, int]:
    """As :func:`parse_open_steps`, with 0 and :data:`LAST_STEP` for what is open."""
    first, last = parse_open_steps(word)
    return first or 0, LAST_STEP if last is None else last


def parse_span(word: str) -> int:
    """``"30s"``, ``"500ms"``, ``"5m"``, ``"30"`` (seconds) → nanoseconds.

    Raises:
        ArgusError: The word is no span, is nothing, or is longer than a year.
    """
    if (ns := span_ns(word)) is None:
        raise ArgusError(f"'{word}' is no span of time", "Write 30s, 500ms, 5m or 2h; at most a year", EXIT_USAGE)
    return ns


def parse_time(word: str) -> int:
    """A time of day and date in UTC, or Unix time in seconds → nanoseconds.

    Raises:
        ArgusError: The word is no time.
    """
    if match := re.fullmatch(r"(\d{9,11})(?:\.(\d{1,9}))?", word):
        return int(match[1]) * 10**9 + int((match[2] or "").ljust(9, "0"))
    # datetime holds microseconds only.
    match = re.fullmatch(r"(.*?:\d\d)\.(\d{1,9})(\D.*)?", word)
    text, fraction = (match[1] + (match[3] or ""), match[2]) if match else (word, "")
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        hint = "Write 2026-05-01T12:00:30, 2026-05-01T12:00:30.5+02:00, or Unix time"
        raise ArgusError(f"'{word}' is not a time", hint, EXIT_USAGE) from None
    when = when.replace(tzinfo=timezone.utc) if when.tzinfo is None else when
    if not 1970 <= when.year < 2200:
        raise ArgusError(f"'{word}' is not a time of a trace", "Write a year between 1970 and 2199", EXIT_USAGE)
    return int(when.timestamp()) * 10**9 + int(fraction.ljust(9, "0"))


def parse_since(word: str) -> tuple[int | None, int | None]:
    """What ``--since`` means: (span before the end of the run in ns, None) or (None, wall time in ns).

    Numbers of up to eight digits are seconds, longer ones Unix time.

    Raises:
        ArgusError: The word is neither a span nor a time.
    """
    if re.fullmatch(r"\d{1,8}(?:\.\d+)?\s*(ms|[smhd])?", word):
        return parse_span(word), None
    return None, parse_time(word)
