"""For what share of the time the GPU times of each owner are recorded, and what was recorded whole by that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from argus.cupti import MINIMUM_SHARE
from argus.cupti.collector import PERIOD_MS, CuptiOptions
from argus.live.cost.governor import Rung
from argus.model.losses import Owner

CHANGE_NS = 2_000_000_000
"""After the share has changed: the helper reads it now and then, and what was launched before it did has no times."""
PERIOD_NS = PERIOD_MS * 1_000_000
QUARTER = 0.25
"""Share of the time, after the first rung."""


class DutyCycle:
    """How GPU times are collected, and how they were.

    Args:
        options: How they are collected at first.

    Attributes:
        options: How they are collected now.
        ended: Operations of programs that are no more.
    """

    def __init__(self, options: CuptiOptions) -> None:
        self._asked = options
        self.options = options
        self.ended = 0
        self._regimes: deque[tuple[int, CuptiOptions]] = deque([(0, options)], maxlen=16)
        """Since when, CLOCK_MONOTONIC, it was collected how."""
        self._reduced: set[Rung] = set()
        self._recorded: deque[tuple[int, int]] = deque(maxlen=256)
        """Operations until when, CLOCK_MONOTONIC, of the last period or since the share changed."""
        self._rate = math.nan
        """Operations a nanosecond, in the middle of a period; NaN: not known."""
        self._evened = 0

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
        self._rate *= share / self.share
        self._recorded = deque(list(self._recorded)[-1:], maxlen=256)
        self.options = replace(self.options, share=share)
        self._regimes.append((now_ns, self.options))

    def evened(self, operations: int, now_ns: int) -> int:
        """Operations that count until now, CLOCK_MONOTONIC, as if they were recorded evenly within each period. Else a
        quarter of the time would cost four times as much in one window of the governor's, and nothing in three.

        Args:
            operations: That were recorded until now, of programs that are there.
        """
        operations += self.ended
        before_ns, before = self._recorded[-1] if self._recorded else (now_ns, 0)
        self._recorded.append((now_ns, operations))
        while len(self._recorded) > 2 and now_ns - self._recorded[1][0] >= PERIOD_NS:
            self._recorded.popleft()
        since_ns, first = self._recorded[0]
        if now_ns - since_ns >= PERIOD_NS:  # from a period ago on, which lies between two looks
            next_ns, second = self._recorded[1]
            first += round((second - first) * (now_ns - PERIOD_NS - since_ns) / (next_ns - since_ns))
            self._rate = (operations - first) / PERIOD_NS
        elif self.share == 1 and now_ns > since_ns:
            self._rate = (operations - first) / (now_ns - since_ns)
        if self.share == 1:  # what is held back from before the share changed is due within a period
            held = (before - self._evened) * max(PERIOD_NS - (now_ns - before_ns), 0) // PERIOD_NS
            self._evened = operations - held
        elif not math.isnan(self._rate):
            due = min(round(self._rate * (now_ns - before_ns)), operations - self._evened)
            most_held = round(2 * self._rate * PERIOD_NS)  # one period's, and as much again as the rate grows
            self._evened += max(due, operations - self._evened - most_held)
        return self._evened

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
