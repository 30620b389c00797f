"""Latencies, errors and retries that a run's output reports."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.compare.observe.exposed import Histogram, samples_between
from argus.compare.observe.plan import Readings
from argus.compare.observe.settings import UNITS

MOST_SAMPLES = 1_000_000
"""Latencies of one run that are kept; ``left_out`` counts the others."""
BIN = 1.02
"""Ratio of a bin's ends in the histogram that is kept of a run: 1 % error."""
LONGEST_LINE = 65_536
"""Characters of a line that are searched: a pattern of somebody's may need time that grows with their square."""
LEAST_IN_THIRD = 10
"""Latencies in each third of a run, for its start to be compared with its end."""


def read_latencies(lines: Iterable[str], readings: Readings, wall_ns: int) -> dict[str, Any] | None:
    """The figures of one run; None: nothing is to be read.

    Args:
        lines: Of its output.
        readings: What is read from them.
        wall_ns: How long the run took, for the throughput.

    Returns:
        ``count``, quantiles in ns (None without any latency), ``throughput_s`` (latencies a second), ``errors`` and
        ``retries`` (None: not counted), ``histogram`` (bin numbers and counts, of bins of a ratio of :data:`BIN`),
        ``growth`` (log of the last third's median over the first's), ``left_out``, and ``unreadable``: what was found
        and is no latency (not above 0, no number, an unknown unit), and lines that are longer than is searched.
    """
    if not (readings.pattern or readings.key or readings.errors or readings.retries):
        return None
    pattern = re.compile(readings.pattern) if readings.pattern else None
    counted = {
        name: re.compile(text) for name, text in (("errors", readings.errors), ("retries", readings.retries)) if text
    }
    counts = dict.fromkeys(counted, 0)
    samples: list[float] = []
    left_out = unreadable = 0
    for line in lines:
        unreadable += len(line) >= LONGEST_LINE
        line = line[:LONGEST_LINE]
        for name, one in counted.items():
            counts[name] += bool(one.search(line))
        there = _by_pattern(pattern, line, readings.unit) if pattern else _by_key(readings, line)
        found = [one for one in there if one is not None]
        unreadable += len(there) - len(found)
        room = MOST_SAMPLES - len(samples)
        samples += found[:room]
        left_out += len(found[room:])
    values = np.array(samples, np.float64)
    return {
        **summary(values), "throughput_s": round(len(values) / (wall_ns / 1e9), 6) if wall_ns and len(values) else None,
        "errors": counts.get("errors"), "retries": counts.get("retries"), "left_out": left_out,
        "unreadable": unreadable,
    }  # fmt: skip


def exposed_latencies(
    before: Histogram, after: Histogram | None, name: str, readings: Readings, wall_ns: int
) -> dict[str, Any]:
    """The same figures of a run by a histogram that a server exposes. Quantiles lie within a bucket, in which latencies
    are taken to be even; whether the run became slower is not known.

    Args:
        before, after: The histogram then; None: it could not be read any more.
        name: The histogram's.
        readings, wall_ns: As above.
    """
    if after is None:
        lost = {"throughput_s": None, "errors": None, "retries": None, "left_out": 0, "unreadable": 1}
        return {**summary(np.empty(0)), **lost}
    values, count, mean = samples_between(before, after, name, readings)
    figures = {**summary(values), "growth": None, "count": count}
    if mean is not None:
        figures["mean_ns"] = round(mean, 1)
    return {
        **figures, "throughput_s": round(count / (wall_ns / 1e9), 6) if wall_ns and count else None, "errors": None,
        "retries": None, "left_out": 0, "unreadable": 0,
    }  # fmt: skip


def _by_pattern(pattern: re.Pattern[str], line: str, unit: str) -> list[float | None]:
    """Latencies of a line, ns; None: it is none."""
    found: list[float | None] = []
    for match in pattern.finditer(line):
        groups = match.groups()
        scale = UNITS.get((groups[1] or unit) if len(groups) > 1 else unit)
        value = _number(groups[0])
        found.append(None if scale is None or value is None else value * scale)
    return found


def _by_key(readings: Readings, line: str) -> list[float | None]:
    """The same of a JSON object; empty: it has not the key."""
    if not readings.key or not line.lstrip().startswith("{"):
        return []
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return [None]
    for part in readings.key.split("."):
        if not isinstance(value, dict) or part not in value:
            return []
        value = value[part]
    unit = readings.key.rpartition("_")[2]
    scale = UNITS.get(unit, UNITS[readings.unit]) if "_" in readings.key else UNITS[readings.unit]
    numbers = [_number(one) for one in (value if isinstance(value, list) else [value])]
    return [None if one is None else one * scale for one in numbers]


def _number(value: object) -> float | None:
    """A latency above 0; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < 1e18 and math.isfinite(number) else None


def summary(values: NDArray[np.float64]) -> dict[str, Any]:
    """Count, mean, quantiles, histogram and growth of latencies in ns, in the order in which they came."""
    if not len(values):
        names = ("mean_ns", "p50_ns", "p95_ns", "p99_ns", "max_ns", "growth")
        return {"count": 0, **dict.fromkeys(names), "histogram": []}
    p50, p95, p99 = (round(float(one), 1) for one in np.quantile(values, [0.5, 0.95, 0.99]))
    bins, counts = np.unique(np.floor(np.log(values) / math.log(BIN)).astype(np.int64), return_counts=True)
    third = len(values) // 3
    growth = None
    if third >= LEAST_IN_THIRD:
        growth = round(float(np.log(np.median(values[-third:]) / np.median(values[:third]))), 6)
    return {
        "count": len(values), "mean_ns": round(float(values.mean()), 1), "p50_ns": p50, "p95_ns": p95, "p99_ns": p99,
        "max_ns": round(float(values.max()), 1), "growth": growth,
        "histogram": [[int(number), int(count)] for number, count in zip(bins, counts, strict=True)],
    }  # fmt: skip


def samples_of(histogram: Iterable[Iterable[int]]) -> NDArray[np.float64]:
    """Latencies as a histogram has them: the middles of its bins, ascending."""
    pairs = np.array([list(one) for one in histogram], np.int64).reshape(-1, 2)
    middles = np.exp((pairs[:, 0] + 0.5) * math.log(BIN))
    return np.repeat(middles, np.clip(pairs[:, 1], 0, MOST_SAMPLES))
