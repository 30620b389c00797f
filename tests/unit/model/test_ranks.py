"""Which numbers lack between others."""

from __future__ import annotations

import random

import pytest

from argus.model.ranks import Gaps
from argus.model.units import ranks_text


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_the_numbers_that_are_not_there(seed: int) -> None:
    rng = random.Random(seed)
    there = rng.choices(range(40), k=rng.randrange(12))
    begin, end = rng.randrange(10), rng.randrange(10, 35)
    lacking = sorted(set(range(begin, end)) - set(there))
    gaps = Gaps(there, begin, end)
    assert list(gaps) == lacking
    assert len(gaps) == len(lacking)
    assert gaps[:8] == lacking[:8]
    assert gaps[-3:] == lacking[-3:]
    assert list(gaps.above(17)) == [number for number in lacking if number > 17]
    assert [gaps[-place] for place in range(1, len(lacking) + 1)] == lacking[::-1]
    with pytest.raises(IndexError):
        gaps[len(lacking)]


def test_a_gap_of_any_size_is_listed() -> None:
    assert ranks_text(Gaps((0, 2, 10**15), 0, 10**15)) == "ranks 1, 3, 4, 5, 6, 7, 8, 9 and 999999999999990 more"
    assert not Gaps()
    assert not Gaps((0, 1, 2), 0, 2)
