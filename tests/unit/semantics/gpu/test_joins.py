"""Joins by thread and time do what a loop over the threads does, and take no pass for each of them."""

from __future__ import annotations

import numpy as np
import pytest

from argus.semantics.gpu.joins import last_of, running_max
from tests.unit.semantics.gpu.counted import calls_made

MANY = 20_000


@pytest.mark.parametrize("seed", range(40))
def test_the_last_row_of_a_group_is_the_one_that_a_loop_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, asked, groups = int(random.integers(0, 60)), int(random.integers(0, 60)), int(random.integers(1, 6))
    group = random.integers(0, groups, rows).astype(np.uint32)
    time = random.integers(-20, 20, rows)
    of = random.integers(0, groups + 2, asked).astype(np.uint32)
    at = random.integers(-30, 30, asked)
    expected = []
    for one, moment in zip(of.tolist(), at.tolist(), strict=True):
        places = [place for place in range(rows) if group[place] == one and time[place] <= moment]
        expected.append(max(places, key=lambda place: (time[place], place), default=-1))
    assert last_of(group, time, of, at).tolist() == expected


@pytest.mark.parametrize("seed", range(40))
def test_the_running_maximum_is_each_group_s_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 60))
    values = random.choice([random.integers(-20, 20, rows), random.integers(-(1 << 62), 1 << 62, rows)])
    first = random.random(rows) < 0.3
    first[0] = True
    starts = np.flatnonzero(first)
    expected = np.concatenate([np.maximum.accumulate(part) for part in np.split(values, starts[1:])])
    assert running_max(values, first).tolist() == expected.tolist()


def test_a_group_for_each_row_takes_no_pass_each() -> None:
    group, time, first = np.arange(MANY)[::-1].copy(), np.full(MANY, 5), np.ones(MANY, bool)
    assert last_of(group, time, group, time).tolist() == list(range(MANY))
    assert running_max(group, first).tolist() == group.tolist()
    assert calls_made(lambda: (last_of(group, time, group, time), running_max(group, first))) < 500
