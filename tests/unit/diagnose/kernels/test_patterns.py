"""EROICA's patterns: which function behaves differently on which ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from argus.diagnose.kernels.patterns import BYTES, LEAST_BETA, differing, find_odd


def columns(functions: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """By (kind, function): beta, mu and sigma of each rank, shape (ranks, 3)."""
    rows = [
        (kind, name, rank, *values)
        for (kind, name), each in functions.items()
        for rank, values in enumerate(np.asarray(each).tolist())
    ]
    kind, name, rank, beta, mu, sigma = zip(*rows, strict=True)
    return {
        "kind": np.array(kind, object), "function": np.array(name, object), "rank": np.array(rank),
        "beta": np.array(beta), "mu": np.array(mu), "sigma": np.array(sigma),
    }  # fmt: skip


def alike(ranks: int, beta: float, mu: float, sigma: float = 0.02, seed: int = 1) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    noise = 1 + 0.02 * rng.standard_normal((ranks, 3))
    return np.asarray(np.array([beta, mu, sigma]) * noise)


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_a_rank_that_differs_from_the_others(ranks: int) -> None:
    each = alike(ranks, 0.3, 0.95)
    assert not differing(*each.T)[1].any()
    each[2, :2] = 0.5, 0.45
    share, odd = differing(*each.T)
    assert np.flatnonzero(odd).tolist() == [2]
    assert share[2] == 1
    assert share[0] == pytest.approx(1 / (ranks - 1))


def test_half_of_the_ranks() -> None:
    """EROICA's rule alone sees nothing: each rank differs from as many others."""
    each = alike(8, 0.3, 0.95)
    each[4:, :2] = np.array([0.5, 0.45]) * (1 + 0.01 * np.arange(4)[:, None])
    assert np.flatnonzero(differing(*each.T)[1]).tolist() == [4, 5, 6, 7]


def test_functions_of_little_time_do_not_count() -> None:
    each = alike(8, LEAST_BETA / 3, 0.95)
    each[2, :2] = LEAST_BETA / 1.5, 0.2
    assert not differing(*each.T)[1].any()


def test_what_is_reported() -> None:
    gemm, small, waits, loader = alike(8, 0.3, 0.95), alike(8, 0.02, 0.95), alike(8, 0.3, 0.5), alike(8, 0.05, 0.9)
    gemm[3, :2] = 0.55, 0.4
    small[3, :2] = 0.024, 0.4
    waits[3, :2] = 0.05, 1.0
    loader[3, :2] = 0.35, 0.1
    given = {
        ("kernel", "gemm"): gemm, ("kernel", "tiny"): small, ("collective", "AllReduce"): waits,
        ("python", "load"): loader,
    }  # fmt: skip
    found = find_odd(columns(given), [3])
    assert [(odd.function, odd.ranks) for odd in found] == [("load", (3,)), ("gemm", (3,))]
    assert found[1].text() == (
        "kernel gemm of rank 3: 55.0% of the time against 30.0%, at 0.40 of the fastest rank's speed against 0.95 of "
        "its peers"
    ).replace("30.0%", f"{found[1].usual_beta:.1%}").replace("0.95", f"{found[1].usual_mu:.2f}")
    assert "on a CPU for 10% of it" in found[0].text()
    # Nobody else is blamed, and nobody to compare with is no answer.
    assert find_odd(columns(given), [1]) == []
    assert find_odd(columns(given), list(range(8))) == []
    assert find_odd({name: values[:0] for name, values in columns(given).items()}, [3]) == []


def test_a_worker_s_patterns_are_small() -> None:
    """Functions over 1 % of the time are 100 at most, of each kind."""
    assert 3 / LEAST_BETA * BYTES <= 30_000
