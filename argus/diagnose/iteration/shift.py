"""Why all steps became longer where that is not the job's doing: Argus came or changed, or others take its CPUs.

A regression means that the job itself changed. It is not reported where step times grew when Argus attached, or
attached something else, nor where threads that train wait for a free CPU for much of what steps became longer by.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argus.diagnose.read import queries
from argus.diagnose.read.observed import AROUND_S, SETTLED_S, Observed
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.verdict import Evidence
from argus.model.units import duration

WINDOW_NS = 30_000_000_000
"""So much of the time before and since is compared, ns: thread times come in intervals of 1 to 10 s."""
EXPLAINS = 0.25
"""Part of the growth from which on waiting for a CPU explains it: who is taken off the CPU finds its caches cold, and
of several threads that compute together all wait for the last."""
FEW_STEPS = 5
"""A change point may be off by so many steps."""
ALONE = 0.25
"""Growth that counts for one rank on CPUs alone: no GPU's own times and no other rank confirm it, and clocks, caches
and hypervisors move the times of a CPU by some percent."""


@dataclass(frozen=True)
class Shift:
    """Why steps became longer.

    Attributes:
        by_argus: What Argus changed at that time, in words; empty: nothing.
        evidence: How long threads wait for a CPU, before and since; None: not known.
        queued_ns: By how much more a step, ns.
        taken: Whether that is why.
        unknown: The job is traced, and it is not known yet whether its threads waited for a CPU.
    """

    by_argus: str = ""
    evidence: Evidence | None = None
    queued_ns: float = 0.0
    taken: bool = False
    unknown: bool = False


def explain(
    query: Query,
    params: Mapping[str, Any],
    ranks: Sequence[int],
    steps: tuple[int, int, int],
    before_ns: float,
    after_ns: float,
) -> Shift:
    """What else changed when steps became longer.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run and what else the job's queries need.
        ranks: Whose threads are asked.
        steps: The first step looked at, the first long one, and the last.
        before_ns, after_ns: What a step took, and takes.
    """
    first, onset, last = steps
    spans = [query(queries.SPAN_NS, {**params, "first": a, "last": b}) for a, b in ((first, onset - 1), (onset, last))]
    if any(not len(span["end_ns"]) or not int(span["steps"][0]) for span in spans):
        return Shift()
    begun = int(spans[1]["begin_ns"][0])
    observed = Observed(query, params)
    if by_argus := _by_argus(observed, begun, max(AROUND_S * 1e9, FEW_STEPS * after_ns)):
        return Shift(by_argus)
    shares, asked = [], dict(params)
    windows = (
        (max(int(spans[0]["begin_ns"][0]), begun - WINDOW_NS), begun),
        (max(begun, int(spans[1]["end_ns"][0]) - WINDOW_NS), int(spans[1]["end_ns"][0])),
    )
    for window in windows:
        asked = {**params, "ranks": list(ranks), "from_ns": window[0], "to_ns": window[1]}
        rows = query(queries.HOST_TIME, asked)
        waits = np.asarray(rows["runqueue_share"], np.float64)
        shares.append(float(np.median(waits[waits >= 0])) if np.any(waits >= 0) else -1.0)
    if min(shares) < 0:
        return Shift(unknown=bool(observed))
    was, now = shares[0] * before_ns, shares[1] * after_ns
    text = f"a thread waits {duration(now)} a step for a free CPU, and waited {duration(was)} before step {onset}"
    waits_evidence: Evidence = {"text": text, "sql": runnable_sql(queries.HOST_TIME, asked)}
    return Shift("", waits_evidence, now - was, now - was >= EXPLAINS * (after_ns - before_ns))


def _by_argus(observed: Observed, begun_ns: int, around_ns: float) -> str:
    """What Argus did when steps became longer, in words; empty: nothing."""
    if not observed:
        return ""
    if begun_ns < observed.attached_ns + SETTLED_S * 1e9:
        return "Argus had just attached"
    for at, why in observed.changes():
        if abs(at - begun_ns) <= around_ns:
            clock = time.strftime("%H:%M:%S", time.gmtime(at / 1e9))
            return f"Argus changed what it observes at {clock} UTC ({why})"
    return ""
