"""Latencies that a server exposes: a histogram of its page of metrics, before a run and after it.

The page is text as Prometheus reads it (exposition format 0.0.4, OpenMetrics 1.0): ``NAME_bucket{le="0.1"} 12`` counts
what took 0.1 at most since the server started, ``NAME_sum`` is what all of it took.
"""

from __future__ import annotations

import http.client
import math
import re
import urllib.request
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.compare.observe.plan import Readings
from argus.compare.observe.settings import UNITS
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import printable
from argus.model.units import span_text
from argus.system.aside import Aside

TIMEOUT_S = 10.0
"""Until the whole page is there."""
MOST_BYTES = 32 << 20
"""A longer page is not taken for a page of metrics."""
MOST_SAMPLES = 100_000
"""Latencies that stand for those of a run; of more each stands for several."""
MOST_BUCKETS = 10_000
"""Of a histogram, the first ones and +Inf: servers have a few dozen."""
_MOST = 2.0**53
"""Counts beyond that are none."""
_SHORTEST_NS, _LONGEST_NS = 1e-3, 1e18
"""Latencies are taken to lie between these, whatever the bounds of buckets are."""
_LONGEST_LINE = 65_536
_SERIES = re.compile(r"^([A-Za-z_:][\w:]*?)_(bucket|sum)(?:\{(.*)\})?\s+(\S+)(?:\s|$)")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]*)"')
_SUFFIXES = {"seconds": "s", "milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


@dataclass
class Histogram:
    """Of one metric, all its labels together: how many took up to each bound, and what all took, in its own unit."""

    counts: dict[float, float] = field(default_factory=dict)
    total: float = 0.0


def read_page(url: str) -> dict[str, Histogram]:
    """The histograms of a page, by name.

    Raises:
        ArgusError: Nothing answers there, or what does has no histogram.
    """
    request = urllib.request.Request(url, headers={"Accept": "text/plain", "User-Agent": "argus"})
    opener = urllib.request.OpenerDirector()  # without proxies and redirections: that page, and nothing else
    for handler in ("HTTPHandler", "HTTPSHandler", "HTTPErrorProcessor", "HTTPDefaultErrorHandler"):
        opener.add_handler(getattr(urllib.request, handler)())

    def fetch() -> bytes:
        data = b""
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            while (part := answer.read1(1 << 20)) and len(data) <= MOST_BYTES:
                data += part
        return data

    # A server may send a byte now and then, which no time-out of a socket sees.
    fetching = Aside(fetch, "argus-metrics")
    try:
        if not fetching.wait(TIMEOUT_S):
            raise TimeoutError(f"it is incomplete after {span_text(TIMEOUT_S)}")
        data = fetching.result()
    except (OSError, http.client.HTTPException, ValueError) as failure:
        reason = getattr(failure, "reason", None) or failure
        message = f"the metrics at {printable(url)} cannot be read: {printable(str(reason))}"
        raise ArgusError(message, "Is the server running, and is that its page?", EXIT_UNAVAILABLE) from None
    if len(data) > MOST_BYTES:
        raise ArgusError(f"the metrics at {printable(url)} are longer than 32 MiB", "Name its page", EXIT_UNAVAILABLE)
    found = histograms(data.decode("utf-8", "replace"))
    if not found:
        hint = 'A histogram has lines such as request_seconds_bucket{le="0.1"} 12'
        raise ArgusError(f"the page at {printable(url)} has no histogram", hint, EXIT_UNAVAILABLE)
    return found


def histograms(page: str) -> dict[str, Histogram]:
    """The histograms of a page's text, by name. Lines that are none, or no numbers, are passed over."""
    found: dict[str, Histogram] = {}
    totals: dict[str, float] = {}
    for line in page.splitlines():
        match = _SERIES.match(line[:_LONGEST_LINE])
        if match is None:
            continue
        name, kind, labels, text = match.groups()
        value = _number(text)
        if value is None or not 0 <= value <= _MOST:
            continue
        if kind == "sum":
            totals[name] = totals.get(name, 0.0) + value
            continue
        bound = _BOUND.search(labels or "")
        limit = _number(bound[1]) if bound else None
        if limit is not None and limit > 0:
            counts = found.setdefault(name, Histogram()).counts
            if limit in counts or len(counts) < MOST_BUCKETS or math.isinf(limit):
                counts[limit] = counts.get(limit, 0.0) + value
    for name, one in found.items():
        one.total = totals.get(name, 0.0)
    return {name: one for name, one in found.items() if math.inf in one.counts and len(one.counts) > 1}


def chosen(found: dict[str, Histogram], readings: Readings) -> str:
    """The histogram to read: the one that the settings name, or the only one.

    Raises:
        ArgusError: There is none of that name, or several.
    """
    if readings.metric in found:
        return readings.metric
    names = ", ".join(printable(name) for name in sorted(found)[:10])
    if readings.metric:
        message = f"the page has no histogram '{printable(readings.metric)}'"
        raise ArgusError(message, f"It has {names}", EXIT_USAGE)
    if len(found) > 1:
        raise ArgusError("the page has several histograms", f"Choose one with --metric: {names}", EXIT_USAGE)
    return next(iter(found))


def samples_between(
    before: Histogram, after: Histogram, name: str, readings: Readings
) -> tuple[NDArray[np.float64], int, float | None]:
    """Latencies of a run that stand for its buckets, evenly within each, ns, ascending; how many there were; and their
    mean, None: unknown. A server that counts less than before was restarted: it counts from 0."""
    if any(after.counts.get(limit, 0.0) < count for limit, count in before.counts.items()):
        before = Histogram()
    scale = UNITS[_SUFFIXES.get(name.rpartition("_")[2], readings.unit)]
    limits = sorted(after.counts)
    reached = np.array([after.counts[limit] - before.counts.get(limit, 0.0) for limit in limits])
    each = np.maximum(np.diff(np.maximum.accumulate(np.maximum(reached, 0.0)), prepend=0.0), 0.0)
    counted = float(each.sum())
    count = int(min(round(counted), int(_MOST)))
    if not count:
        return np.empty(0), 0, None
    kept = each * min(1.0, MOST_SAMPLES / counted)
    parts = []
    total = after.total - before.total
    with np.errstate(over="ignore"):
        for low, high, many in zip([0.0, *limits[:-1]], limits, kept, strict=True):
            number = math.ceil(many) if many > 0 else 0  # a rare one stays
            # What is beyond the last bound took as long at least.
            top = high if math.isfinite(high) else low
            parts.append(low + (top - low) * (np.arange(number) + 0.5) / max(number, 1))
        values = np.clip(np.concatenate(parts) * scale, _SHORTEST_NS, _LONGEST_NS)
    return values, count, total * scale / count if total > 0 else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value
