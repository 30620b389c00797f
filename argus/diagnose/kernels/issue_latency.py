"""Whether GPUs wait for their CPUs or their kernels are slow, by how long operations wait from launch to begin.

Flare (arXiv 2502.05413, NSDI '26) compares the distribution of these issue latencies with that of healthy steps. A CPU
that runs ahead of its GPU fills the queue, and operations wait: latencies are long and spread out. A CPU that cannot
keep up has each operation begin at once: the distribution falls together near zero, and the GPU is idle in
between (Flare's void percentage). A GPU whose kernels became slow does the opposite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.model.statistics import mad
from argus.model.units import duration

Float = NDArray[np.float64]

STEPS = 50
"""Steps on either side, at most."""
MIN_ROWS = 10
"""Steps of ranks on either side, at least."""
RANKS = 16
"""Ranks on either side, at most."""
TIMES_CHANCE = 3.0
"""The distance must be so many times that between two halves of the reference."""
LEAST_W1 = 0.2
"""Least distance that counts, over the reference's mean."""
FELL = 0.5
"""Latencies that fell to less are those of a queue that is empty."""
LEAST_VOID = 0.02
"""Least growth of the share of a step in which the GPU is idle."""
POINTS = (np.arange(16) + 0.5) / 16
"""Quantiles that stand for the distribution of a step."""
PARTS = 1_024
"""Quantiles by which two distributions are compared: the distance is right within a thousandth of their range. Exact is
scipy.stats, whose import takes a third of a second of CPU time."""
Z99 = float(ndtri(0.99))
"""99th percentile of a standard normal value."""


@dataclass(frozen=True)
class Issue:
    """Latencies and idle time now, against a reference.

    Attributes:
        w1: Distance of the two distributions, over the reference's mean latency.
        chance: That of two halves of the reference.
        latency_ns: Median now.
        usual_ns: Median of the reference.
        void: Share of a step without anything to do, now (median).
        usual_void: That of the reference.
        stalled: Operations begin at once and the GPU is idle in between: its CPU keeps it waiting.
        busy: The GPU is as busy as the reference's, so if it is slower, its kernels are.
    """

    w1: float
    chance: float
    latency_ns: float
    usual_ns: float
    void: float
    usual_void: float
    stalled: bool
    busy: bool

    def text(self, subject: str, reference: str) -> str:
        """In words. ``subject``: the GPU of rank 3; ``reference``: on the other ranks."""
        latencies = (
            f"operations of {subject} begin {duration(self.latency_ns)} after their launch (median) against "
            f"{duration(self.usual_ns)} {reference} (W1 {self.w1:.2f} of the mean, "
            f"{self.chance:.2f} expected by chance), and it is "
            f"idle for {self.void:.1%} of a step against {self.usual_void:.1%}"
        )
        if self.stalled:
            return f"{latencies}: its CPU does not keep up"
        return f"{latencies}: it is not kept waiting, its kernels take longer" if self.busy else latencies


def compare(now: Mapping[str, NDArray[Any]], usual: Mapping[str, NDArray[Any]]) -> Issue | None:
    """Compares issue latencies and idle time.

    Args:
        now: Rows of :data:`argus.diagnose.read.queries.ISSUE`.
        usual: Others of it, in order of steps: the reference.

    Returns:
        None: too little is known.
    """
    measured, reference = _known(now), _known(usual)
    if len(measured["p50_ns"]) < MIN_ROWS or len(reference["p50_ns"]) < MIN_ROWS:
        return None
    there = _points(reference)
    half = np.argsort(reference["step"], kind="stable")
    first, second = half[: len(half) // 2], half[len(half) // 2 :]
    chance = _distance(there[first].ravel(), there[second].ravel(), float(there.mean()))
    distance = _distance(_points(measured).ravel(), there.ravel(), float(there.mean()))
    latency, usual_ns = float(np.median(measured["p50_ns"])), float(np.median(reference["p50_ns"]))
    void, usual_void = float(np.median(measured["void_share"])), float(np.median(reference["void_share"]))
    more = max(LEAST_VOID, TIMES_CHANCE * mad(reference["void_share"], usual_void))
    differs = distance >= max(LEAST_W1, TIMES_CHANCE * chance)
    stalled = differs and latency < FELL * usual_ns and void - usual_void >= more
    busy = void - usual_void < more
    return Issue(distance, chance, latency, usual_ns, void, usual_void, stalled, busy)


def asked(params: Mapping[str, Any], ranks: Sequence[int], peers: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """The query of :func:`against_peers` and its parameters, for who begins it before."""
    chosen = [*ranks[:RANKS], *peers[:RANKS]]
    return queries.ISSUE, {**params, "first": max(params["first"], params["last"] - STEPS + 1), "ranks": chosen}


def against_peers(
    query: Query, params: Mapping[str, Any], ranks: Sequence[int], peers: Sequence[int]
) -> tuple[Issue | None, str]:
    """Some ranks against others in the same steps (``first`` to ``last`` of the parameters, the newest of them).

    Returns:
        What was found, and the query."""
    text, window = asked(params, ranks, peers)
    rows = query(text, window)
    chosen = np.isin(rows["rank"], ranks)
    issue = compare({name: values[chosen] for name, values in rows.items()}, {n: v[~chosen] for n, v in rows.items()})
    return issue, runnable_sql(text, window)


def against_past(query: Query, params: Mapping[str, Any], onset: int, ranks: Sequence[int]) -> tuple[Issue | None, str]:
    """Some ranks from a step on against themselves before it.

    Returns:
        What was found, and the query."""
    window = {
        **params, "first": max(params["first"], onset - STEPS), "last": min(params["last"], onset + STEPS - 1),
        "ranks": list(ranks[:RANKS]),
    }  # fmt: skip
    rows = query(queries.ISSUE, window)
    later = rows["step"].astype(np.int64) >= onset
    issue = compare({name: values[later] for name, values in rows.items()}, {n: v[~later] for n, v in rows.items()})
    return issue, runnable_sql(queries.ISSUE, window)


def _known(rows: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    kept = rows["p50_ns"] >= 0
    return {name: values[kept] for name, values in rows.items()}


def _points(rows: Mapping[str, NDArray[Any]]) -> Float:
    """Quantiles of each row's latencies, rebuilt from median and 99th percentile as of log-normal values, shape (rows,
    points), ns."""
    middle = np.maximum(rows["p50_ns"].astype(np.float64), 1.0)
    spread = np.log(np.maximum(rows["p99_ns"].astype(np.float64), middle) / middle) / Z99
    return np.asarray(middle[:, None] * np.exp(spread[:, None] * _NORMAL))


_NORMAL = ndtri(np.asarray(POINTS))


def _distance(sample: Float, reference: Float, mean: float) -> float:
    """W1 over ``mean``, by the quantiles of both at the middles of :data:`PARTS` equal parts."""
    parts = (np.arange(PARTS) + 0.5) / PARTS
    one, other = (np.quantile(values, parts, method="inverted_cdf") for values in (sample, reference))
    return float(np.abs(one - other).mean() / max(mean, 1.0))
