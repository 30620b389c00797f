"""What a setting of an observation may be: the same on the command line and in a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from argus.model.text import named
from argus.model.units import LONGEST_SPAN_NS, span_ns

MOST_RUNS = 10_000
"""Runs of one observation, warm-up included: their records are rewritten after each."""
WHOLE = {"repeat": (1, MOST_RUNS), "warmup": (0, MOST_RUNS), "seed": (0, 2**64 - 1)}
"""Whole numbers, with the least and the most."""
SHORTEST_S, LONGEST_S = 0.01, LONGEST_SPAN_NS / 1e9
LEAST_MARGIN, MOST_MARGIN = 0.001, 1.0
UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
"""Units of latencies, in ns."""


def whole(name: str, text: str) -> int:
    """A number of :data:`WHOLE`.

    Raises:
        ValueError: It is none, with a text that follows "SETTING is ".
    """
    least, most = WHOLE[name]
    number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else None
    if number is None or not least <= number <= most:
        raise ValueError(f"'{named(text)}', which is not a whole number from {least:,} to {most:,}")
    return number


def seconds(text: str) -> float:
    """A span of time, in seconds: 90, 90s, 500ms, 5m, 1h.

    Raises:
        ValueError: As above.
    """
    ns = span_ns(text)
    if ns is None or not SHORTEST_S <= ns / 1e9 <= LONGEST_S:
        raise ValueError(f"'{named(text)}', which is not a time from {SHORTEST_S * 1e3:g}ms to a year: 90, 90s, 5m, 1h")
    return ns / 1e9


def margin(text: str, *, percent: bool = False) -> float:
    """A margin as a share. ``percent``: the text has it in percent.

    Raises:
        ValueError: As above.
    """
    scale = 100 if percent else 1
    try:
        share = float(text) / scale
    except ValueError:
        share = math.nan
    if not LEAST_MARGIN <= share <= MOST_MARGIN:
        least, most = scale * LEAST_MARGIN, scale * MOST_MARGIN
        raise ValueError(f"'{named(text)}', which is not a number from {least:g} to {most:g}")
    return share


_READ: dict[str, Callable[[str], Any]] = {
    **{name: partial(whole, name) for name in WHOLE}, "timeout": seconds, "ready_timeout": seconds, "margin": margin,
}  # fmt: skip


def read(name: str, text: str) -> Any:
    """A setting that is a number or a time, by its name in a file.

    Raises:
        ValueError: It cannot have this value, with a text that follows "SETTING is ".
    """
    return _READ[name](text)
