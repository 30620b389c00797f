"""Kernels of some ranks of a simulated job, one by one, summed up as a trace does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.compress.kernels import Compressor
from argus.simulate.engine import OPTIMIZER_KERNELS, PHASES, Step
from argus.simulate.program import BACKWARD_WORK, Program
from argus.simulate.rows import Rows

CATALOG = (
    # phase, name, share of the phase's time, share of its launches, modes (shapes it is called with)
    ("forward", "gemm_bf16_128x128_tn", 0.62, 0.16, 3),
    ("forward", "flash_fwd_kernel", 0.16, 0.04, 1),
    ("forward", "layer_norm_fwd_kernel", 0.06, 0.10, 2),
    ("forward", "elementwise_kernel", 0.16, 0.70, 4),
    ("backward", "gemm_bf16_128x128_nt", 0.64, 0.20, 3),
    ("backward", "flash_bwd_kernel", 0.18, 0.04, 1),
    ("backward", "layer_norm_bwd_kernel", 0.06, 0.10, 2),
    ("backward", "elementwise_backward_kernel", 0.12, 0.66, 4),
    ("optimizer", "multi_tensor_apply_kernel_adam", 1.0, 1.0, 2),
)
JITTER, TAIL, SPIKE = 0.01, 0.01, 1e-4
"""Standard deviation of the logarithm of a kernel's time in one mode; share with a Pareto tail; share of spikes, forty
times as long: what the stream that compression is measured on has (docs/compression.md)."""


class Kernels:
    """Feeds kernels of some ranks to a compressor.

    Args:
        rows: Of the job.
        program: What its ranks run.
        ranks: Whose kernels.
        seed: Of the job.
        model: Of what its kernels are: the same in all runs of one program.
        run: Standard deviation of the logarithm of a kernel's time from run to run.
    """

    def __init__(
        self, rows: Rows, program: Program, ranks: Sequence[int], seed: int, model: int | None = None, run: float = 0.0
    ) -> None:
        self._rows, self._ranks, self._seed = rows, np.array(sorted(ranks)), seed
        self._compressor = Compressor()
        launches = {
            "forward": program.kernels * program.micro_batches,
            "backward": int(BACKWARD_WORK * program.kernels * program.micro_batches),
            "optimizer": OPTIMIZER_KERNELS,
        }
        rng = np.random.default_rng([seed if model is None else model, 3])
        of_run = np.exp(run * np.random.default_rng([seed, 6]).standard_normal(len(CATALOG)))
        for name, factor in program.kernel_factors:
            of_run[self.names.index(name)] *= factor
        group, weight, phase = [], [], []
        for place, (name_of_phase, name, time, often, modes) in enumerate(CATALOG):
            count = max(modes, round(often * launches[name_of_phase]))
            level = np.exp(rng.uniform(-0.7, 0.7, modes))[np.arange(count) % modes]
            group.append(np.full(count, self._compressor.group(name, 7, 0, (64 + place, 1, 1), (256, 1, 1))))
            weight.append(time * of_run[place] * level / level.sum())
            phase.append(np.full(count, PHASES.index(name_of_phase)))
        self._group, self._weight, self._phase = map(np.concatenate, (group, weight, phase))

    @property
    def names(self) -> list[str]:
        """Of the kernels."""
        return [name for _, name, *_ in CATALOG]

    def feed(self, step: Step) -> None:
        """Sums the kernels of a step up."""
        for rank, begin_ns, end_ns, group, start_ns, duration_ns in self.launches(step):
            self._compressor.feed(rank, step.number, begin_ns, end_ns, group, start_ns, duration_ns)

    def launches(
        self, step: Step
    ) -> Iterator[tuple[int, int, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """The kernels of a step: in each phase as much time as the GPU computed in it, but for spikes. Where there
        are more layers there are more of them.

        Yields:
            Of each rank: its number, begin and end of the step on its GPU, ns; of each launch the kernel, as a place in
            :attr:`names`, begin and duration, ns, shape (n,).
        """
        rng = np.random.default_rng([self._seed, step.number + 2, 4])
        spent = step.phases.reshape(len(step.phases), -1)
        begins, ends = step.gpu_begin.ravel(), step.gpu_end.ravel()
        layers = step.layers.ravel()
        for rank in self._ranks.tolist():
            of = self._of_layers(float(layers[rank]))
            took = self._weight[of] * np.exp(JITTER * rng.standard_normal(len(of)))
            took *= np.where(rng.random(len(took)) < TAIL, 1 + 0.1 * rng.pareto(3, len(took)), 1.0)
            total = np.bincount(self._phase[of], took, len(PHASES))
            ns = took * (spent[:, rank] / np.maximum(total[: len(spent)], 1e-12))[self._phase[of]]
            ns = np.where(rng.random(len(ns)) < SPIKE, 40 * ns, ns).astype(np.int64)
            start = begins[rank] + np.linspace(0, ends[rank] - begins[rank], len(ns), endpoint=False)
            yield rank, int(begins[rank]), int(ends[rank]), self._group[of], start.astype(np.int64), ns

    def _of_layers(self, layers: float) -> NDArray[np.int64]:
        """Which launches of the program a rank makes that has so many times its layers, some again, shape (n,)."""
        if layers == 1:
            return np.arange(len(self._group))
        parts = []
        for number in np.unique(self._group).tolist():
            of_group = np.flatnonzero(self._group == number)
            parts.append(of_group[np.arange(max(1, round(layers * len(of_group)))) % len(of_group)])
        return np.concatenate(parts)

    def tables(self, *, final: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows that are ready."""
        for table, columns in self._compressor.take(final=final).items():
            if "rank" not in columns:
                yield table, dict(columns)
                continue
            ranks: NDArray[np.int64] = np.asarray(columns["rank"]).astype(np.int64)
            more = {"host": self._rows.host_column(ranks)}
            if "ts" in columns:
                more["ts"] = self._rows.wall(np.asarray(columns["ts"]).astype(np.float64), ranks)
            yield table, {**columns, **more}
