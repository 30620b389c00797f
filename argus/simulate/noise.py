"""What differs from step to step without any fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.simulate.mesh import Mesh

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """How much.

    Attributes:
        op: Standard deviation of the logarithm of a computation's time. Single kernels spread by 1 % and have tails
            (docs/compression.md: public traces); a computation is the sum of hundreds of them, which
            share the clock and temperature of the GPU of the moment.
        gpu: The same of GPUs of one type, all along (chips and cooling differ).
        transfer: The same of a transfer's time.
        drift: Of what all share, from step to step (a random walk that comes back by a tenth each step).
        spike: Chance of a rank to be held up by its operating system in a step.
        spike_ms: Typical length of that (log-normal, sigma 0.5).
        data: Of the time that loading a batch takes.
        lengths: Of the work in a step, where sequences vary.
        run: Of computations, of transfers and of loading, from one run of a job to the next: each has its own draw.
            Clusters differ by 0.5 to 1.5 % between runs. Single kernels differ by a fifth of it.
        uneven: Of that in a micro-batch of one data-parallel rank: sequences are packed into batches of nearly equal
            length.
    """

    op: float = 0.008
    gpu: float = 0.004
    transfer: float = 0.05
    drift: float = 0.001
    spike: float = 2e-4
    spike_ms: float = 3.0
    data: float = 0.15
    lengths: float = 0.2
    uneven: float = 0.02
    run: float = 0.0


QUIET = Noise(op=0, gpu=0, transfer=0, drift=0, spike=0, data=0)
"""None at all: for schedules that are compared with what is worked out by hand."""


@dataclass
class StepNoise:
    """One step's draws. Shapes: ``op`` (computations of a stage, pp, dp, tp), ``spike_ns``, ``data`` (pp, dp, tp),
    ``lengths`` (micro-batches, dp), ``transfer`` (draws,)."""

    op: NDArray[np.float32]
    spike_ns: Float
    data: Float
    lengths: Float
    transfer: Float


class Dice:
    """Draws the noise of a job: the same for the same seed, whatever faults there are."""

    def __init__(self, noise: Noise, mesh: Mesh, batches: int, seed: int, *, variable: bool) -> None:
        self._noise, self._mesh, self._batches, self._seed, self._variable = noise, mesh, batches, seed, variable
        start = np.random.default_rng([seed, 0])
        self._gpu = np.exp(noise.gpu * start.standard_normal(mesh.shape)).astype(np.float32)
        compute, self._transfers, self._loading = np.exp(
            noise.run * np.random.default_rng([seed, 5]).standard_normal(3)
        ).tolist()
        self._gpu *= np.float32(compute)
        self._common = 0.0

    def step(self, step: int) -> StepNoise:
        """The draws of a step; steps are asked for in order, from -1 on."""
        n, mesh = self._noise, self._mesh
        rng = np.random.default_rng([self._seed, step + 2])
        self._common = 0.9 * self._common + n.drift * float(rng.standard_normal())
        op = rng.standard_normal((2 * self._batches * mesh.vpp, *mesh.shape), dtype=np.float32)
        op *= np.float32(n.op)
        op += np.float32(self._common)
        np.exp(op, out=op)
        op *= self._gpu
        hit = rng.random(mesh.shape) < n.spike
        lengths = np.zeros((self._batches, mesh.dp))
        if self._variable:
            lengths = n.uneven * rng.standard_normal(lengths.shape) + n.lengths * float(rng.standard_normal())
        return StepNoise(
            op,
            np.asarray(hit * n.spike_ms * 1e6 * np.exp(0.5 * rng.standard_normal(mesh.shape)), np.float64),
            np.exp(n.data * rng.standard_normal(mesh.shape)) * self._loading,
            np.exp(lengths),
            np.exp(n.transfer * np.abs(rng.standard_normal(64))) * self._transfers,
        )
