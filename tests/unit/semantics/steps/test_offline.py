"""Steps of whole, short recordings: what they must be found in, and where there are none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.semantics.steps.offline import LEAST_CALLS, Steps, find_steps

Int = NDArray[np.int64]

LAYERS, MICRO_BATCHES = 12, 4
GAP = 1_000_000


def layer(base: int) -> list[int]:
    return [base + kernel for kernel in (0, 1, 2, 1, 3, 4, 4, 5, 1, 6)]


MICRO_BATCH = [90, 91, *(layer(100) * LAYERS), 92, *(layer(200) * LAYERS), 93]
OPTIMISER = [300, 301, 300, 301, 302, 303]
STEP = [80, 81, *MICRO_BATCH, *OPTIMISER]
"""Forward layers, backward layers, an optimiser: 252 calls."""
ACCUMULATED = [80, 81, *(MICRO_BATCH * MICRO_BATCHES), *OPTIMISER]


def steps_of(codes: list[int] | Int, first: int = 80) -> Steps | None:
    """Steps, with a pause before each call ``first``."""
    array = np.array(codes, np.int64)
    return find_steps(array, np.where(array == first, GAP, 10))


def test_a_recording_of_whole_steps_is_cut_where_it_begins() -> None:
    found = steps_of(STEP * 5)
    assert found is not None
    assert found.bounds.tolist() == [len(STEP) * k for k in range(6)]
    assert (found.length, found.whole) == (len(STEP), True)
    assert found.confidence.tolist() == pytest.approx([6 / 7] * 5)


@pytest.mark.parametrize("begin", [0, 1, 40, 66, 100, 200, len(STEP) - 1])
def test_a_cut_recording_is_cut_at_the_pauses(begin: int) -> None:
    codes = (STEP * 5)[begin:-20]
    found = steps_of(codes)
    assert found is not None
    assert not found.whole
    starts = [place for place, code in enumerate(codes) if code == 80]
    assert found.bounds.tolist() == starts


def test_two_steps_are_enough_and_less_is_not() -> None:
    two = steps_of(STEP * 2)
    assert two is not None
    assert two.bounds.tolist() == [0, len(STEP), 2 * len(STEP)]
    assert two.confidence.tolist() == [0.75, 0.75]
    assert steps_of((STEP * 2)[: int(1.5 * len(STEP))]) is None


def test_layers_of_one_step_are_no_steps() -> None:
    assert steps_of(STEP) is None


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_micro_batches_are_no_steps(steps: int) -> None:
    found = steps_of(ACCUMULATED * steps)
    assert found is not None
    assert found.bounds.tolist() == [len(ACCUMULATED) * k for k in range(steps + 1)]


def test_an_optimiser_of_one_call_separates_steps_from_micro_batches() -> None:
    step = [*(MICRO_BATCH * MICRO_BATCHES), 300]
    found = steps_of(step * 4, first=300)
    assert found is not None
    assert found.length == len(step)


def test_what_comes_before_the_first_step_is_no_step() -> None:
    """Set-up makes some of the calls of a step, too."""
    generator = np.random.default_rng(1)
    before = generator.integers(500, 900, 3 * len(STEP)).tolist()
    before[100], before[400] = 92, 80
    found = steps_of(before + STEP * 6)
    assert found is not None
    assert found.bounds.tolist() == [len(before) + len(STEP) * k for k in range(7)]


def test_a_last_step_that_differs_is_left_out_and_the_one_before_is_not() -> None:
    last = [777 if place % 20 == 0 else code for place, code in enumerate(STEP)]
    found = steps_of((STEP * 4 + last)[:-10])
    assert found is not None
    assert found.bounds.tolist() == [len(STEP) * k for k in range(5)]


@pytest.mark.parametrize("seed", range(20))
def test_threads_that_mix_their_calls_and_calls_that_differ(seed: int) -> None:
    """Neighbours change places here and there, and one call in 50 is missing or one too many."""
    generator = np.random.default_rng(seed)
    codes: list[int] = []
    true = [0]
    for _ in range(5):
        step = list(STEP)
        for place in generator.integers(2, len(step) - 2, 20).tolist():
            step[place], step[place + 1] = step[place + 1], step[place]
        del step[int(generator.integers(20, 60))]
        step.insert(int(generator.integers(60, 100)), 999)
        step.insert(int(generator.integers(20, 100)), 2)
        codes += step
        true.append(len(codes))
    found = steps_of(codes)
    assert found is not None
    assert len(found.bounds) == len(true)
    assert np.abs(found.bounds - true).max() <= 0.05 * len(STEP)
    assert (found.confidence < 6 / 7).any()


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("kinds", [5, 10, 40, 150])
def test_noise_has_no_steps(kinds: int) -> None:
    for seed in range(12):
        generator = np.random.default_rng(seed)
        for count in (500, 5000):
            assert steps_of(generator.integers(0, kinds, count)) is None
            assert steps_of(generator.exponential(kinds / 4, count).astype(np.int64)) is None


def test_what_never_comes_back_has_no_steps() -> None:
    assert steps_of(np.arange(5000)) is None


def test_one_kernel_again_and_again_has_no_steps() -> None:
    assert steps_of([1] * 1000) is None
    assert steps_of([1, 2, 3] * 300) is None


@pytest.mark.parametrize("count", [0, 1, 2, LEAST_CALLS, 2 * LEAST_CALLS])
def test_short_sequences(count: int) -> None:
    assert steps_of(np.arange(count) % 5) is None


def test_columns_must_fit() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        find_steps(np.zeros(3, np.int64), np.zeros(2, np.int64))


def test_100_000_calls_take_a_second_at_most() -> None:
    found = steps_of(STEP * 750)
    assert found is not None
    assert len(found.bounds) == 751
