"""What a slow GPU takes longer for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.causes.cpu_time import long_kernels, slow_kernels

MS = 1e6
USUAL = {"forward": 10.0, "backward": 20.0, "optimizer": 4.0}


def columns(slow: dict[str, float], *, ranks: int = 4, steps: int = 10) -> dict[str, NDArray[Any]]:
    """Steps whose phases take USUAL ms, on rank 1 what ``slow`` says."""
    rows = [
        (rank, step, phase, (slow.get(phase, took) if rank == 1 else took) * MS)
        for rank in range(ranks)
        for step in range(steps)
        for phase, took in USUAL.items()
    ]
    names = ("rank", "step", "phase", "duration_ns")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def test_the_phase_that_takes_the_most_time_more_is_named() -> None:
    found = slow_kernels(columns({"forward": 15.0, "backward": 38.0}), (1,), 23 * MS)
    assert found is not None
    assert (found.phase, found.factor, found.excess_ns) == ("backward", pytest.approx(1.9), 23 * MS)
    assert found.text == (
        "kernels of its GPU compute for 38.0 ms in backward against 20.0 ms (1.90x), 15.0 ms in forward against 10.0 ms"
        " (1.50x) a step"
    )


def test_a_phase_of_little_is_not_reported() -> None:
    found = slow_kernels(columns({"forward": 10.5, "backward": 38.0}), (1,), 18 * MS)
    assert found is not None
    assert "forward" not in found.text


@pytest.mark.parametrize("slow", [{}, {"backward": 24.0}, {"backward": 15.0}])
def test_kernels_that_explain_less_than_half_are_not_the_cause(slow: dict[str, float]) -> None:
    assert slow_kernels(columns(slow), (1,), 10 * MS) is None


def test_one_slow_step_is_not_the_rule() -> None:
    given = columns({})
    given["duration_ns"][(given["rank"] == 1) & (given["step"] == 3)] *= 50
    assert slow_kernels(given, (1,), 10 * MS) is None


def test_gpu_times_of_the_slow_or_of_the_others_alone_show_nothing() -> None:
    given = columns({"backward": 38.0})
    for ranks in ((0, 1, 2, 3), (9,)):
        assert slow_kernels(given, ranks, 10 * MS) is None
    empty = {name: column[:0] for name, column in given.items()}
    assert slow_kernels(empty, (1,), 10 * MS) is None


# ---- kernels


def summaries(factor: dict[str, float], *, ranks: int = 4, more_often: float = 1.0) -> dict[str, NDArray[Any]]:
    """50 steps of three kernels, one of which runs on two streams; on rank 1 they take ``factor`` times as long."""
    kernels = [(1, "gemm", 24, 1.0), (2, "gemm", 8, 0.5), (3, "softmax", 24, 0.1), (4, "adam", 2, 2.0)]
    rows = [
        (number, name, rank, times * 50 * (more_often if rank == 1 else 1), 50,
         times * 50 * took * (factor.get(name, 1.0) * more_often if rank == 1 else 1.0) * MS)
        for number, name, times, took in kernels
        for rank in range(ranks)
    ]  # fmt: skip
    names = ("kernel_id", "kernel", "rank", "launches", "steps", "spent_ns")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def test_the_kernels_that_take_longer_are_named() -> None:
    found = long_kernels(summaries({"gemm": 1.5, "softmax": 2.0, "adam": 1.01}), (1,), 16 * MS)
    assert found is not None
    assert found.names == ["gemm", "softmax"]
    assert found.excess_ns == pytest.approx(14 * MS + 2.4 * MS + 0.04 * MS)
    assert found.text == (
        "slower kernels: gemm 42.0 ms a step against 28.0 ms (1.50x); softmax 4.80 ms a step against 2.40 ms (2.00x)"
    )


def test_kernels_that_run_more_often_are_not_slower() -> None:
    assert long_kernels(summaries({}, more_often=2.0), (1,), 10 * MS) is None


def test_slow_kernels_that_explain_less_than_half_are_not_named() -> None:
    assert long_kernels(summaries({"adam": 2.0}), (1,), 10 * MS) is None
    assert long_kernels(summaries({"gemm": 0.5}), (1,), 1 * MS) is None


def test_kernels_of_one_side_only_show_nothing() -> None:
    given = summaries({"gemm": 1.5})
    for ranks in ((0, 1, 2, 3), (9,)):
        assert long_kernels(given, ranks, 10 * MS) is None
    only = {name: column[(given["kernel_id"] != 1) | (given["rank"] == 1)] for name, column in given.items()}
    found = long_kernels(only, (1,), 3 * MS)
    assert found is not None
    assert found.excess_ns == pytest.approx(2 * MS), "of the first gemm no other rank is known"
    assert long_kernels({name: column[:0] for name, column in given.items()}, (1,), MS) is None
