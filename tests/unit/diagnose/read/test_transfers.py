"""Ranks whose partners are unknown: their links are compared with nobody's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from argus.diagnose.read.transfers import without_partners


def test_who_communicates_with_nobody_knows_whom() -> None:
    collective = np.array([[30.0] * 3, [30.0] * 3, [30.0] * 3, [1.0] * 3, [np.nan] * 3])
    seen: Any = SimpleNamespace(
        now=SimpleNamespace(ranks=np.arange(5), collective=collective, step=np.full((5, 3), 100.0))
    )
    carried: Any = SimpleNamespace(now=SimpleNamespace(members=[(0, 1), (2,)]))
    # Rank 2 is alone in what it is known to be in; rank 3 hardly communicates, and of rank 4 nothing is known.
    assert without_partners(seen, carried, 0.05) == [2]
    carried.now.members = [(0, 1), (2, 7)]
    assert without_partners(seen, carried, 0.05) == []
