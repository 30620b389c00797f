"""Launches of kernels of jobs of several kinds, rank by rank and step by step, for scripts/bench compress.

A job has kernels (name, stream, grid, block), ranks and steps; ``step`` gives the launches of one rank in one step as
three arrays, in order of time: the place of each in ``kernels``, its begin and its duration, ns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from argus.importers import kineto, nsys
from argus.model.errors import ArgusError
from argus.model.records import GpuKind
from argus.simulate.kernels import Kernels
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec
from argus.store.open import Store
from argus.store.reader import query

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Launches: TypeAlias = tuple[Ints, Ints, Ints]
Kernel: TypeAlias = "tuple[str, int, tuple[int, ...], tuple[int, ...]]"

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path(os.environ.get("ARGUS_REFERENCE_DATA", ROOT.parent / "shared" / "data"))
KINDS = 60
EVENTS = 100_000
SPIKES = 1e-4
SPIKE = 40
"""Spikes of the synthetic stream, and those that are planted, take so many times as long."""
STEP_NS = 1_500_000_000
RECORDED_S = 14.0
"""How long the job on the fake GPU is traced."""
RECORDED_RANKS = 4
CASES: dict[str, Callable[[Ints, np.random.Generator], Floats]] = {
    "5 % slower": lambda took, rng: took * 1.05,
    "split, same mean": lambda took, rng: took * np.where(rng.random(len(took)) < 0.5, 1.04, 0.96),
    "10 x spikes": lambda took, rng: took * np.where(rng.random(len(took)) < 9 * SPIKES, SPIKE, 1),
}
"""What is planted on one rank: times of launches, as they would be with the fault. The second one changes how many
modes there are, and no mean; of the third there are 9 more launches in 10,000 that take 40 times as long."""


class Job(Protocol):
    """Any of the jobs below."""

    @property
    def kernels(self) -> list[Kernel]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def steps(self) -> int: ...
    def step(self, rank: int, step: int) -> Launches: ...


class Stream:
    """A production-like job, the same for the same seed: kernels of 1 to 6 modes, of which a sixth are as noisy as
    communication and an eighth route like mixtures of experts (the weights of their modes change every step); 1 %
    Pareto tails, spikes of 40 times at 1e-4, drift.

    Args:
        seed: Of everything.
        ranks: How many.
        steps: How many.
        events: Launches of a rank and step.
    """

    def __init__(self, seed: int, ranks: int = 8, steps: int = 1 << 20, events: int = EVENTS) -> None:
        rng = np.random.default_rng(seed)
        self.seed, self.ranks, self.steps, self.events = seed, ranks, steps, events
        self.kernels: list[Kernel] = [
            (f"void kind_{kind}<float>(int)", 7, (kind, 1, 1), (128, 1, 1)) for kind in range(KINDS)
        ]
        self.share = rng.dirichlet(np.full(KINDS, 3.0))
        self.noisy = rng.random(KINDS) < 1 / 6
        self.routed = ~self.noisy & (rng.random(KINDS) < 1 / 8)
        self.modes = np.where(self.noisy, 1, rng.integers(1, 7, KINDS))
        self.modes[self.routed] = np.maximum(self.modes[self.routed], 3)
        self.center = rng.normal(10.5, 1.0, KINDS)[:, None] + np.cumsum(rng.uniform(0.1, 0.6, (KINDS, 6)), axis=1)
        self.spread = rng.uniform(0.005, 0.03, (KINDS, 6))
        self.spread[self.noisy] = rng.uniform(0.15, 0.4, (int(self.noisy.sum()), 6))
        self.weight = rng.dirichlet(np.full(6, 2.0), KINDS) * (np.arange(6) < self.modes[:, None])
        self.drift = rng.normal(0, 3e-4, KINDS)

    def step(self, rank: int, step: int) -> Launches:
        rng = np.random.default_rng((self.seed, rank, step))
        weight = self.weight.copy()
        weight[self.routed] *= rng.gamma(4.0, 0.25, (int(self.routed.sum()), 6))
        upto = np.cumsum(weight, axis=1)
        # A program launches each kernel as often in every step; how often experts are called depends on the data.
        often = np.rint(self.share * self.events)
        often[self.routed] *= rng.normal(1, 0.05, int(self.routed.sum()))
        kind = rng.permutation(np.repeat(np.arange(KINDS), np.maximum(often, 1).astype(np.int64)))
        events = len(kind)
        mode = (rng.random(events)[:, None] * upto[kind, -1:] > upto[kind]).sum(axis=1)
        log = self.center[kind, mode] + self.spread[kind, mode] * rng.standard_normal(events) + self.drift[kind] * step
        tail = rng.random(events) < 0.01
        log[tail] += np.minimum(rng.exponential(1 / 3.0, int(tail.sum())), 1.0)
        duration = np.exp(log)
        duration[rng.random(events) < SPIKES] *= SPIKE
        start = np.sort(rng.integers(0, STEP_NS, events)) + step * STEP_NS
        return kind, start, duration.astype(np.int64)


@dataclass
class Recorded:
    """Launches that are there already."""

    kernels: list[Kernel]
    ranks: int
    steps: int
    launches: dict[tuple[int, int], Launches] = field(repr=False)
    """By rank and step."""

    def step(self, rank: int, step: int) -> Launches:
        return self.launches[rank, step]


# ---- real traces


def real_groups(least: int) -> list[tuple[Kernel, Ints, Ints]]:
    """(kernel, start_ns, duration_ns) of each kernel of each recording with at least so many launches. The recording's
    place is part of the kernel's name."""
    recordings = [
        kineto.read(path, place) for place, path in enumerate(sorted((REFERENCE / "kineto").glob("*.json.gz")))
    ]
    for path in sorted((REFERENCE / "nsys").glob("*.sqlite")):
        recordings += nsys.read(path, 0)
    out: list[tuple[Kernel, Ints, Ints]] = []
    for place, recording in enumerate(recordings):
        ops = recording.ops[recording.ops["kind"] == GpuKind.KERNEL]
        ops = ops[np.argsort(ops["start_ns"], kind="stable")]
        keys = np.column_stack([ops["name"], ops["stream"], ops["device"], ops["grid"], ops["block"]])
        unique, inverse = np.unique(keys.astype(np.int64), axis=0, return_inverse=True)
        for number in np.flatnonzero(np.bincount(inverse) >= least).tolist():
            chosen = ops[inverse == number]
            name, stream, device, *shape = unique[number].tolist()
            kernel = (f"{place}:{device}:{recording.symbols[name]}", stream, tuple(shape[:3]), tuple(shape[3:]))
            start, end = chosen["start_ns"].astype(np.int64), chosen["end_ns"].astype(np.int64)
            out.append((kernel, start, end - start))
    return out


class Drawn:
    """A job whose kernels take as long as real ones: each launch's time is drawn from those of a real trace. So there
    are ranks and steps to compare; what lies in the order of launches is lost.

    Args:
        groups: As ``real_groups`` gives them.
        ranks: How many.
        steps: How many.
        seed: Of the draws.
        most: Launches of a kernel, rank and step, at most.
    """

    def __init__(
        self, groups: list[tuple[Kernel, Ints, Ints]], ranks: int, steps: int, seed: int, most: int = 400
    ) -> None:
        self.kernels = [kernel for kernel, *_ in groups]
        self.ranks, self.steps, self._seed = ranks, steps, seed
        self._took = [duration for *_, duration in groups]
        self._often = [min(len(took), most) for took in self._took]
        self._kind = np.repeat(np.arange(len(groups)), self._often)

    def step(self, rank: int, step: int) -> Launches:
        rng = np.random.default_rng((self._seed, rank, step))
        parts = [rng.choice(took, often) for took, often in zip(self._took, self._often, strict=True)]
        order = rng.permutation(len(self._kind))
        start = step * STEP_NS + np.arange(len(order)) * (STEP_NS // len(order))
        return self._kind[order], start, np.concatenate(parts)[order]


# ---- simulated


def simulated(ranks: int, steps: int, seed: int) -> Recorded:
    """Kernels of a job that ``argus simulate`` makes, one by one."""
    spec = Spec(Mesh(dp=ranks), steps=steps, seed=seed, kernels=ranks)
    kernels = Kernels(spec.rows(0), spec.program, range(ranks), seed)
    launches: dict[tuple[int, int], Launches] = {}
    for step in spec.play():
        for rank, _, _, group, start, took in kernels.launches(step):
            launches[rank, step.number] = (group, start, took)
    return Recorded(
        [(name, 7, (64 + k, 1, 1), (256, 1, 1)) for k, name in enumerate(kernels.names)], ranks, steps, launches
    )


# ---- recorded on the fake GPU


def record_fake_gpu(store: Store, *, stacks: bool = False) -> None:
    """Traces a job on the fake GPU by ``argus trace``: eBPF, CUPTI's records, every kernel one by one and summed up.
    ``stacks``: and those of the CPU.

    Raises:
        ArgusError: It cannot be traced here.
    """
    sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))
    from run import PROGRAM, Job  # type: ignore[import-not-found]

    if os.geteuid() != 0 or not PROGRAM.exists():
        raise ArgusError("tracing needs root, and the fake GPU: scripts/setup")
    args = ["--steps", "0", "--layers", "24", "--forward-us", "24000", "--backward-us", "40000"]
    with tempfile.TemporaryFile() as output, Job(RECORDED_RANKS, args, {"FAKEGPU_JITTER": "0.02"}, cupti=True) as job:
        time.sleep(1)
        words = [word for pid in job.pids for word in ("--pid", str(pid))]
        options = ["--raw", "all", "--no-diagnose", "--duration", str(RECORDED_S), "--store", store.url]
        options += [] if stacks else ["--no-stacks"]
        command = [sys.executable, "-m", "argus.cli.main", "trace", *words, *options]
        try:
            code = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=300).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code != 0:
            output.seek(0)
            raise ArgusError(f"argus trace failed: {output.read().decode(errors='replace')[-400:]}")


def recorded(store: Store) -> tuple[Recorded, list[int], int]:
    """The launches of the only job of a store, one by one; the ``kernel_id`` of each of its kernels; and the number of
    the first step. Steps are those that all ranks have as a whole, numbered from 0."""
    found = query(
        store,
        """SELECT k.rank AS rank, assumeNotNull(k.step) AS step, g.kernel_id AS id,
                  toUnixTimestamp64Nano(k.ts) AS start, k.duration_ns AS took
           FROM kernels_by_step AS k
           INNER JOIN kernel_groups AS g
             ON k.name = g.name AND k.stream = g.stream AND k.grid = g.grid AND k.block = g.block
           WHERE k.kind = 'kernel' AND k.step IS NOT NULL
           ORDER BY rank, step, start""",
    )  # fmt: skip
    rank, step, start, took = (
        found.column(name).to_numpy().astype(np.int64) for name in ("rank", "step", "start", "took")
    )
    ids, kind = np.unique(found.column("id").to_numpy(), return_inverse=True)
    named = query(
        store, "SELECT kernel_id, name, stream, grid, block FROM kernel_groups ORDER BY kernel_id"
    ).to_pylist()
    of = {row["kernel_id"]: (row["name"], row["stream"], tuple(row["grid"]), tuple(row["block"])) for row in named}
    ranks = np.unique(rank).tolist()
    # The first and the last one may be cut.
    first = 1 + max(int(step[rank == r].min()) for r in ranks)
    last = min(int(step[rank == r].max()) for r in ranks) - 1
    launches = {}
    for r in ranks:
        for s in range(first, last + 1):
            of_step = (rank == r) & (step == s)
            launches[r, s - first] = (kind[of_step], start[of_step], took[of_step])
    job = Recorded([of[number] for number in ids.tolist()], len(ranks), last - first + 1, launches)
    return job, ids.tolist(), first


def by_kind(launches: Launches, kinds: int) -> list[Floats]:
    """Durations of each kernel, ascending."""
    kind, _, duration = launches
    order = np.lexsort((duration, kind))
    return np.split(duration[order].astype(float), np.searchsorted(kind[order], np.arange(1, kinds)))


def planted(case: str, launches: Launches, seed: Any) -> Launches:
    """The launches with a fault of ``CASES``."""
    kind, start, duration = launches
    return kind, start, CASES[case](duration, np.random.default_rng(seed)).astype(np.int64)
