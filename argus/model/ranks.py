"""Numbers of ranks: how high they may be, and which of them lack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import overload

HIGHEST_RANK = 10_000_000
"""The largest jobs have some 100,000 ranks: a higher number is a mistake."""


class Gaps(Sequence[int]):
    """The numbers of a range that are not there, in order. They take memory for each gap, not for each number."""

    def __init__(self, there: Iterable[int] = (), begin: int = 0, end: int = 0) -> None:
        inside = sorted({number for number in there if begin <= number < end})
        edges = pairwise((begin - 1, *inside, end))
        self._gaps = [range(low + 1, high) for low, high in edges if high > low + 1]
        self._before = [0, *accumulate(map(len, self._gaps))]

    def above(self, number: int) -> Gaps:
        """Those that are higher than a number."""
        out = Gaps()
        out._gaps = [range(max(gap.start, number + 1), gap.stop) for gap in self._gaps if gap.stop > number + 1]
        out._before = [0, *accumulate(map(len, out._gaps))]
        return out

    def __len__(self) -> int:
        return self._before[-1]

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place += len(self) if place < 0 else 0
        if not 0 <= place < len(self):
            raise IndexError(place)
        at = bisect_right(self._before, place) - 1
        return self._gaps[at][place - self._before[at]]
