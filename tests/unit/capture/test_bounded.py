"""A cache that is bounded in bytes keeps what was used last."""

from __future__ import annotations

import random

import pytest

from argus.capture.bounded import Bounded, text_bytes


@pytest.mark.parametrize("seed", range(20))
def test_it_keeps_what_was_used_last(seed: int) -> None:
    rng = random.Random(seed)
    most, most_bytes = rng.randrange(1, 12), rng.randrange(1, 200)
    cache = Bounded[int, int](most, most_bytes)
    used: list[tuple[int, int, int]] = []  # key, value, bytes: what was used last comes last
    for step in range(500):
        key = rng.randrange(20)
        before = next((one for one in used if one[0] == key), None)
        if rng.random() < 0.5:
            assert cache.get(key) == (None if before is None else before[1])
            if before is not None:
                used.append(used.pop(used.index(before)))
        else:
            size = rng.randrange(60)
            cache.keep(key, step, size)
            used = [one for one in used if one[0] != key]
            if size <= most_bytes:
                used.append((key, step, size))
            while len(used) > most or sum(one[2] for one in used) > most_bytes:
                used.pop(0)
        assert len(cache) == len(used)
        assert cache.nbytes == sum(one[2] for one in used)


def test_a_text_counts_as_what_it_may_take() -> None:
    assert text_bytes("train.py") == 8
    assert text_bytes("\U0001f600" + "n" * 9) == 40
