"""What each rank of a simulated job runs."""

from __future__ import annotations

from dataclasses import dataclass

from argus.simulate.mesh import Mesh

BACKWARD_WORK = 2.0
"""A backward pass takes twice the forward's work (Kaplan et al. 2020)."""


@dataclass(frozen=True)
class Program:
    """What each rank runs.

    Attributes:
        micro_batches: Of a step.
        forward_ms: Forward pass of a micro-batch through a stage, without communication; backward takes twice that.
        tp_ms, ep_ms: Communication of tensor- and expert-parallel peers in a forward pass.
        p2p_ms: Transfer from stage to stage.
        grad_ms: Reduction of a stage's gradients among data-parallel ranks, of all buckets.
        buckets: Gradient buckets.
        optimizer_ms: The optimiser.
        kernels: Kernels of a forward pass of a stage; a backward pass has twice as many.
        launch_us: What launching one takes the CPU (eager PyTorch: 4 to 10 us).
        queue: Kernels that may wait for the GPU before a launch blocks (CUDA: 1,024).
        data_ms: What the CPU waits for a batch.
        sync_every: In every so many steps the CPU reads the norm, and so waits for the GPU.
        light: Stages that have less work: (stage, share of the usual).
        variable: Sequences, and so micro-batches, vary in length.
        void_ms: What every CPU does after it waited for its GPU, before it launches the step's first kernel.
        phase_factors: Of the time of forward passes, backward passes and the optimiser.
        slow_ranks: Factor of computations of single ranks: (rank, factor).
        kernel_factors: Of single kernels' time, which the factors of their phases contain: (name, factor).
    """

    micro_batches: int = 1
    forward_ms: float = 12.0
    tp_ms: float = 1.2
    ep_ms: float = 1.0
    p2p_ms: float = 0.3
    grad_ms: float = 8.0
    buckets: int = 2
    optimizer_ms: float = 3.0
    kernels: int = 1000
    launch_us: float = 4.0
    queue: int = 1024
    data_ms: float = 1.0
    sync_every: int = 1
    light: tuple[tuple[int, float], ...] = ()
    variable: bool = False
    void_ms: float = 0.0
    phase_factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    slow_ranks: tuple[tuple[int, float], ...] = ()
    kernel_factors: tuple[tuple[str, float], ...] = ()

    def step_ns(self, mesh: Mesh) -> float:
        """A step's computation with its pipeline's bubble, without communication, ns."""
        passes = self.micro_batches + (mesh.pp - 1) / mesh.vpp
        return (passes * (1 + BACKWARD_WORK) * self.forward_ms + self.optimizer_ms) * 1e6
