"""Cases without a store, for tests of single detectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import THRESHOLD, Asked, Case
from argus.diagnose.read.ahead import Ahead
from argus.diagnose.read.query import Query


def case_of(
    query: Query,
    params: Mapping[str, Any],
    durations: NDArray[np.float64],
    hosts: Mapping[int, str],
    *,
    threshold: float = THRESHOLD,
) -> Case:
    """A job whose steps are 0 to ``len(durations)``, all of them sure."""
    given = dict(params)
    case = Case(
        query, Ahead(query), given, Asked(threshold), np.arange(len(durations)), durations, ranks=len(hosts), calls=1.0
    )
    case.hosts = dict(hosts)
    return case
