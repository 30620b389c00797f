"""For what share of the time the GPU times of each owner are recorded, and what was recorded whole by that."""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from argus.cupti import MINIMUM_SHARE
from argus.cupti.collector import CuptiOptions
from argus.live.cost.governor import Rung
from argus.model.losses import Owner

CHANGE_NS = 2_000_000_000
"""After the share has changed: the helper reads it now and then, and what was launched before it did has no times."""
QUARTER = 0.25
"""Share of the time, after the first rung."""


class DutyCycle:
    """How GPU times are collected, and how they were.

    Args:
        options: How they are collected at first.

    Attributes:
        options: How they are collected now.
    """

    def __init__(self, options: CuptiOptions) -> None:
        self._asked = options
        self.options = options
        self._regimes: deque[tuple[int, CuptiOptions]] = deque([(0, options)], maxlen=16)
        """Since when, CLOCK_MONOTONIC, it was collected how."""
        self._reduced: set[Rung] = set()

    @property
    def share(self) -> float:
        """Share of the time for which GPU times are recorded."""
        return self.options.share

    def reducible(self) -> set[Rung]:
        """Rungs that would make a difference now."""
        could = {Rung.GPU_ALWAYS: self.share > QUARTER, Rung.GPU_QUARTER: self.share > MINIMUM_SHARE}
        return {rung for rung, can in could.items() if can}

    def reduce(self, rung: Rung) -> float:
        """Takes a rung. The share that is wanted from now on."""
        self._reduced.add(rung)
        return self._wanted()

    def restore(self, rung: Rung) -> float:
        """Takes that back. The share that is wanted from now on."""
        self._reduced.discard(rung)
        return self._wanted()

    def _wanted(self) -> float:
        if not self._reduced:
            return self._asked.share
        return min(MINIMUM_SHARE if Rung.GPU_QUARTER in self._reduced else QUARTER, self._asked.share)

    def set_share(self, share: float, now_ns: int) -> None:
        """Records for this share of the time from now on, CLOCK_MONOTONIC."""
        self.options = replace(self.options, share=share)
        self._regimes.append((now_ns, self.options))

    def records_whole(self, start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As ``CuptiOptions.records_whole``, by how it was collected then. Where that changed nothing is whole."""
        whole = np.zeros(len(start_ns), bool)
        _, *ends = (begin for begin, _ in (*self._regimes, (1 << 62, self.options)))
        for (begin, options), end in zip(self._regimes, ends, strict=True):
            inside = (start_ns >= begin + CHANGE_NS * (begin > 0)) & (start_ns + duration_ns <= end)
            whole |= inside & options.records_whole(start_ns, duration_ns)
        return whole


class DutyCycles:
    """That of each owner: what the records of one cost is given up for that one.

    Args:
        options: How they are collected at first.
    """

    def __init__(self, options: CuptiOptions) -> None:
        self._asked = options
        self._of: dict[Owner, DutyCycle] = {}

    def of(self, owner: Owner) -> DutyCycle:
        """That of an owner."""
        if owner not in self._of:
            self._of[owner] = DutyCycle(self._asked)
        return self._of[owner]

    @property
    def share(self) -> float:
        """The lowest share of all."""
        return min((duty.share for duty in self._of.values()), default=self._asked.share)

    def forget(self, owners: AbstractSet[Owner]) -> None:
        """Drops what is known of others than these, as long as they have nothing that is given up."""
        self._of = {
            owner: duty for owner, duty in self._of.items() if owner in owners or duty.share < self._asked.share
        }
