"""What the reason of a healthy verdict says of ranks whose GPUs held the job up for a while."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from argus.diagnose.reason import _of_healthy
from tests.unit.diagnose.ranks.test_slow_gpus import Cluster

SHAPES = ({"dp": 4}, {"dp": 2, "pp": 2}, {"dp": 1, "pp": 4}, {"dp": 2, "tp": 2})


def reason(cluster: Cluster) -> str:
    """Of a healthy job of which nothing but the GPUs' times is known."""
    case = cluster.case()
    case.lateness = case.transfers = case.baseline = None
    return _of_healthy(case, case.recent_ns)


def slow_for_a_while(cluster: Cluster, ranks: Sequence[int], start: int, stop: int) -> Cluster:
    cluster.factor[list(ranks), start:stop] *= 1.35
    return cluster


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("steps", "start", "stop"), [(20, 0, 8), (24, 0, 10), (28, 5, 13), (60, 10, 40)])
def test_a_gpu_that_recovered_is_mentioned_with_its_steps_and_cost(
    shape: dict[str, int], steps: int, start: int, stop: int
) -> None:
    cluster = slow_for_a_while(Cluster(**shape, steps=steps), [2], start, stop)
    said = re.match(
        rf"rank 2 held the job up in steps {start} to {stop - 1}, by (.*) ms each .* no longer does", reason(cluster)
    )
    assert said is not None
    durations = cluster.case().durations
    slots = np.isin(np.arange(steps), np.arange(start, stop))
    assert float(said[1]) == pytest.approx((durations[slots].mean() - durations[~slots].mean()) / 1e6, rel=0.05)


def test_ranks_that_recovered_together_are_mentioned_together() -> None:
    assert reason(slow_for_a_while(Cluster(8, steps=24), [2, 5], 4, 12)).startswith("ranks 2, 5 held the job up in ")


def test_a_gpu_that_explains_little_of_longer_steps_did_not_hold_the_job_up() -> None:
    """All took 50 % longer for a while, and one GPU 12 % more than the others."""
    cluster = Cluster(4, steps=24)
    cluster.factor[:, 4:12] *= 1.5
    cluster.factor[2, 4:12] *= 1.12
    assert "held" not in reason(cluster)


@pytest.mark.parametrize("shape", SHAPES)
def test_nobody_held_the_job_up(shape: dict[str, int]) -> None:
    """Where all were slow, for a few steps only, it is not over yet, or steps merely differ."""
    everybody = range(4)
    for ranks, start, stop in ((everybody, 4, 14), ([2], 4, 8), ([2], 6, 18), ([], 0, 0)):
        assert "held" not in reason(slow_for_a_while(Cluster(**shape, steps=24), ranks, start, stop))
    for seed in range(10):
        cluster = Cluster(**shape, steps=24, seed=seed)
        cluster.length = cluster.random.lognormal(0, 0.15, cluster.length.shape)
        assert "held" not in reason(cluster)
