"""How far chance goes, by scipy.special, which a trace that only starts does not load. What needs numpy alone is in
:mod:`argus.model.statistics`."""

from __future__ import annotations

import numpy as np
from scipy.special import bdtrc, gammaln, ndtri


def outlier_limit(chance: float, count: int, least: float) -> float:
    """How many standard deviations from the norm one of ``count`` normal values is with this chance that any of them
    is; ``least`` at least."""
    return max(least, float(ndtri(1 - chance / max(count, 1))))


def binomial_tail(hits: int, trials: int, share: float) -> float:
    """Logarithm of the chance of at least ``hits`` (above 0) of ``trials``, each with the chance ``share``."""
    tail = float(bdtrc(hits - 1, trials, share))
    if tail > 0:
        return float(np.log(tail))
    # Too small for a number: what it begins with is nearly all of it.
    return log_choose(trials, hits) + hits * float(np.log(share)) + (trials - hits) * float(np.log1p(-share))


def log_choose(count: int, size: int) -> float:
    """Logarithm of the number of sets of ``size`` among ``count``."""
    return float(gammaln(count + 1) - gammaln(size + 1) - gammaln(count - size + 1))
