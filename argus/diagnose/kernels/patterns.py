"""Which function behaves differently on some ranks: EROICA's patterns (arXiv 2506.08528, NSDI '26).

Of each function (a kernel, a kind of collective, a Python function) three numbers stand for a window of a rank:

* beta: its share of the time. Of kernels and collectives their time on the GPU; of Python functions the main thread's.
* mu: how well it uses what it runs on while it runs, 0 to 1. Of a kernel, how fast it is against the fastest rank, grid
  by grid; of a collective, the share of its time that is not waiting for other ranks (the shortest of any rank over its
  own); of a Python function, the share of its time on a CPU.
* sigma: the standard deviation of mu over the steps.

No time stamps are in them, so clocks need not agree, and 20 bytes a function are all that has to leave a node. EROICA
measures mu by hardware counters; here it is derived from stored durations, which needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.model.statistics import median_deviation
from argus.model.units import ranks_text

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

LEAST_BETA = 0.01
"""Functions that take less of the time are left out (EROICA)."""
DIFFERS = 0.4
"""Two ranks differ if a pattern's parts, each over the largest of any rank, differ by so much in all (EROICA's
delta)."""
TIMES_MAD = 5.0
"""A rank is abnormal that differs from more others than the median rank does, by so many MADs (EROICA's k)."""
MANY = 0.5
"""Where so many differ from a rank, it may be that half of the ranks is slow: then the worse half is."""
COST = 0.01
"""Share of the time that a function must cost a rank more than the others to be reported."""
MAX_FUNCTIONS = 3
"""Functions that are reported, at most."""
BYTES = 20
"""A function's pattern: a hash of its name and three 32-bit numbers."""


@dataclass(frozen=True)
class Odd:
    """A function that behaves differently on some ranks.

    Attributes:
        kind: ``kernel``, ``collective`` or ``python``.
        function: Its name.
        ranks: On which.
        beta, mu: On those ranks (median).
        usual_beta, usual_mu: On the others (low median of beta, high median of mu).
        cost: Share of the time that it takes more there.
    """

    kind: str
    function: str
    ranks: tuple[int, ...]
    beta: float
    mu: float
    usual_beta: float
    usual_mu: float
    cost: float

    def text(self) -> str:
        """In words."""
        what = {"kernel": "kernel ", "collective": "", "python": "function "}[self.kind] + self.function
        if self.kind == "python":
            tail = f"on a CPU for {self.mu:.0%} of it against {self.usual_mu:.0%}"
        elif self.kind == "collective":
            tail = f"of which {self.mu:.0%} is not waiting, against {self.usual_mu:.0%}"
        else:
            tail = f"at {self.mu:.2f} of the fastest rank's speed against {self.usual_mu:.2f} of its peers"
        return f"{what} of {ranks_text(self.ranks)}: {self.beta:.1%} of the time against {self.usual_beta:.1%}, {tail}"


def differing(beta: Float, mu: Float, sigma: Float) -> tuple[Float, Bool]:
    """Differential observability: with how many of the others a rank differs.

    Args:
        beta, mu, sigma: Of one function, shape (ranks,).

    Returns:
        The share of the other ranks that each one differs from, and which ranks are abnormal, shape (ranks,) each.
        EROICA's rule, delta > median + k MAD; where half of the ranks differs from the other half, no rank differs from
        more than the median one, and the half that takes longer and is slower is abnormal.
    """
    count = len(beta)
    parts = [values / max(float(values.max()), 1e-12) for values in (beta, mu, sigma)]
    # A hundredth more or less of the time is no different behaviour, however little it is in all.
    parts[0] = beta / max(float(beta.max()), 10 * LEAST_BETA)
    parts[2] = sigma / max(float(sigma.max()), 0.25)
    apart = np.sum([np.abs(part[:, None] - part[None, :]) for part in parts], axis=0) >= DIFFERS
    share = apart.sum(axis=1) / max(count - 1, 1)
    middle = float(np.median(share))
    odd = (share > middle + TIMES_MAD * median_deviation(share, middle)) & (share > 0)
    if not odd.any() and middle >= MANY * (1 - 1 / count) - 1e-9 and count > 1:
        worse = beta - mu
        odd = worse > (np.sort(worse)[(count - 1) // 2] + worse.max()) / 2
    return share, odd & (beta > LEAST_BETA)


def find_odd(columns: Mapping[str, NDArray[Any]], ranks: Sequence[int]) -> list[Odd]:
    """Functions that behave differently on some ranks, those that cost most first.

    Args:
        columns: As :data:`argus.diagnose.read.queries.PATTERNS` returns them for these ranks and some others.
        ranks: Whose behaviour is to be explained.
    """
    odd_functions = []
    everybody = np.unique(columns["rank"].astype(np.int64))
    if not len(everybody) or not np.isin(everybody, ranks).any() or np.isin(everybody, ranks).all():
        return []
    names = [f"{kind}\0{name}" for kind, name in zip(columns["kind"], columns["function"], strict=True)]
    distinct, which = np.unique(np.array(names, object).astype(str), return_inverse=True)
    for number, name in enumerate(distinct.tolist()):
        rows = which == number
        beta, mu, sigma = (np.zeros(len(everybody)) for _ in range(3))
        place = np.searchsorted(everybody, columns["rank"][rows].astype(np.int64))
        for into, column in ((beta, "beta"), (mu, "mu"), (sigma, "sigma")):
            into[place] = np.nan_to_num(columns[column][rows].astype(np.float64))
        seen = np.zeros(len(everybody), np.bool_)
        seen[place] = True
        if seen.sum() < 2:
            continue
        odd = np.zeros(len(everybody), np.bool_)
        odd[seen] = differing(beta[seen], mu[seen], sigma[seen])[1]
        odd_ranks = odd & np.isin(everybody, ranks)
        others = seen & ~np.isin(everybody, ranks)
        if not odd_ranks.any() or not others.any():
            continue
        usual = float(np.quantile(beta[others], 0.5, method="lower"))
        cost = float(np.median(beta[odd_ranks])) - usual
        if cost < COST:
            continue
        kind, function = name.split("\0", 1)
        odd_functions.append(
            Odd(
                kind, function, tuple(everybody[odd_ranks].tolist()), float(np.median(beta[odd_ranks])),
                float(np.median(mu[odd_ranks])), usual, float(np.quantile(mu[others], 0.5, method="higher")), cost,
            )
        )  # fmt: skip
    # Waiting for others in collectives is what everybody but the slow ones does.
    kept = [odd for odd in odd_functions if odd.kind != "collective" or odd.mu >= odd.usual_mu]
    return sorted(kept, key=lambda odd: -odd.cost)[:MAX_FUNCTIONS]


def asked(params: Mapping[str, Any], ranks: Sequence[int], peers: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """The query of :func:`explain` and its parameters, for who begins it before."""
    return queries.PATTERNS, {**params, "ranks": [*ranks, *peers]}


def explain(
    query: Query, params: Mapping[str, Any], ranks: Sequence[int], peers: Sequence[int]
) -> tuple[list[Odd], str]:
    """What behaves differently on some ranks in some steps (``first`` to ``last`` of the parameters).

    Returns:
        Functions, and the query.
    """
    text, window = asked(params, ranks, peers)
    return find_odd(query(text, window), ranks), runnable_sql(text, window)
