"""How far a compressed form is from the durations it stands for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def w1(sample: NDArray[np.float64], value: NDArray[np.float64], weight: NDArray[np.float64]) -> float:
    """The first Wasserstein distance between samples and weighted points, over the samples' mean.

    It is the area between the two quantile functions (Vallender 1974): the time by which launches are wrong, as a part
    of the whole.

    Args:
        sample: Durations, shape (n,), n > 0.
        value: Points, shape (m,).
        weight: Of the points, shape (m,), not all 0; only their proportions count.

    Returns:
        0 where both are the same; infinite where the mean is 0 and they are not.
    """
    from scipy.stats import wasserstein_distance  # takes half a second to import

    distance = float(wasserstein_distance(sample, value, v_weights=weight))
    mean = float(np.mean(sample, dtype=np.float64))
    return distance / mean if mean else (np.inf if distance else 0.0)


def quantile_error(
    sample: NDArray[np.float64], found: NDArray[np.float64], q: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How far quantiles are off, as parts of the exact ones, shape (m,).

    Args:
        sample: Durations, shape (n,).
        found: Quantiles as decoded, shape (m,).
        q: Which, 0 to 1, shape (m,).
    """
    exact = np.quantile(sample, q, method="inverted_cdf")
    return np.abs(found - exact) / np.maximum(exact, 1)


def recall(exact: NDArray[np.int64], found: NDArray[np.int64]) -> float:
    """Part of the outliers that are found again, by their times, ns: shapes (n,) and (m,). 1: there are none."""
    return float(np.isin(exact, found).mean()) if len(exact) else 1.0


def power(healthy: NDArray[np.float64], sick: NDArray[np.float64], false_alarms: float = 1e-3) -> float:
    """Part of the sick scores above what at most ``false_alarms`` of the healthy ones exceed."""
    return float(np.mean(sick > np.quantile(healthy, 1 - false_alarms, method="higher")))
