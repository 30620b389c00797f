"""Changes of a whole run: they cost what they say, and nothing else differs."""

from __future__ import annotations

import numpy as np
import pytest

from argus.model.errors import ArgusError
from argus.simulate.changes import parse_change
from argus.simulate.mesh import Mesh
from argus.simulate.noise import QUIET, Noise
from argus.simulate.write import Spec

MESH = Mesh(dp=4, per_host=2)


def step_ms(change: str = "", noise: Noise = QUIET, seed: int = 0) -> float:
    spec = Spec(MESH, noise=noise, steps=5, seed=seed, changes=[parse_change(change)] if change else [])
    return float(np.mean([np.median(step.cpu_end - step.cpu_begin) for step in spec.play()])) / 1e6


@pytest.mark.parametrize(
    ("change", "longer_ms"),
    [
        ("kernel=gemm_bf16_128x128_tn:1.1", 0.1 * 0.62 * 12),
        ("kernel=multi_tensor_apply_kernel_adam:2", 3.0),
        ("compute=1.1", 3.9),
        ("bandwidth=dp:0.5", 4.0),
        ("void=0.05", 0.05 * 43.05),
        ("loader=0.05", 0.05 * 43.05),
        ("host=1:1.1", 3.9),
    ],
)
def test_a_change_costs_what_it_says(change: str, longer_ms: float) -> None:
    assert step_ms(change) - step_ms() == pytest.approx(longer_ms, abs=0.2)


def test_runs_differ_by_their_spread() -> None:
    noise = Noise(op=0, gpu=0, transfer=0, drift=0, spike=0, data=0, run=0.02)
    steps = [step_ms(noise=noise, seed=seed) for seed in range(40)]
    assert np.std(steps) / np.mean(steps) == pytest.approx(0.02, rel=0.4)


def test_without_a_spread_a_seed_is_the_same_job_as_ever() -> None:
    assert step_ms(noise=Noise()) == step_ms(noise=Noise(run=0.0))


@pytest.mark.parametrize(
    "text", ["", "x=1", "kernel=1.1", "kernel=nothing:1.1", "compute=", "compute=-1", "compute=a", "bandwidth=xy:2",
             "host=a:2", "compute=x:2", "void=nan"],
)  # fmt: skip
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(ArgusError):
        parse_change(text)


def test_a_host_that_the_job_lacks_is_refused() -> None:
    with pytest.raises(ArgusError, match="no host 2 of 2"):
        Spec(MESH, changes=[parse_change("host=2:1.1")])
