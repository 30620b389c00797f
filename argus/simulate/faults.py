"""What can be wrong with a job, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

DOSES = ("loud", "quiet", "masked")


@dataclass
class Effects:
    """What faults do to a step. Shapes (pp, dp, tp) unless noted; 1 or 0 where nothing is wrong.

    Attributes:
        step_ns: What a step takes without faults, waits and communication: what some doses are shares of.
        compute: Factor of computations: what their kernels take.
        layers: Factor of a stage's layers: how many kernels it has.
        launch: Factor of what launching a kernel takes the CPU.
        link: Factor of transfers between hosts or stages that the rank takes part in.
        lengths: Factor of micro-batches, shape (micro-batches, dp).
        data_ns: More time before the batch.
        module_ns, pause_ns, queued_ns, stall_ns: Loading code; collecting garbage; without a CPU; held up otherwise.
        dead: Ranks that stop in this step.
    """

    step_ns: float
    compute: Float
    layers: Float
    launch: Float
    link: Float
    lengths: Float
    data_ns: Float
    module_ns: Float
    pause_ns: Float
    queued_ns: Float
    stall_ns: Float
    dead: Bool

    @classmethod
    def none(cls, mesh: Mesh, batches: int, step_ns: float) -> Effects:
        compute, layers, launch, link = np.ones((4, *mesh.shape))
        data, module, pause, queued, stall = np.zeros((5, *mesh.shape))
        lengths, dead = np.ones((batches, mesh.dp)), np.zeros(mesh.shape, np.bool_)
        return cls(step_ns, compute, layers, launch, link, lengths, data, module, pause, queued, stall, dead)


@dataclass
class Fault:
    """Something wrong.

    Attributes:
        dose: loud, quiet or masked: :attr:`doses` has the numbers.
        ranks: Global ranks; empty: chosen by the seed.
        half: Chooses half of the data-parallel ranks of a stage.
        since: First step; -1: by :attr:`begins`.
        lasts: Steps; 0: until the end.
        ramp: Steps over which it grows to its full size.
        number: Of this fault in the job.
        seed: Of what it draws.
    """

    kind: ClassVar[str] = ""
    phase: ClassVar[str] = ""
    doses: ClassVar[dict[str, float]] = {}
    begins: ClassVar[float] = 0.0
    """When it begins unless given, as a share of the steps."""

    dose: str = "loud"
    ranks: tuple[int, ...] = ()
    half: bool = False
    since: int = -1
    lasts: int = 0
    ramp: int = 0
    number: int = 0
    seed: int = 0

    @property
    def size(self) -> float:
        """What the dose means."""
        return self.doses[self.dose]

    def level(self, step: int) -> float:
        """How much of its size it has in a step, 0 to 1."""
        if step < self.since or (self.lasts and step >= self.since + self.lasts):
            return 0.0
        return min(1.0, (step - self.since + 1) / self.ramp) if self.ramp else 1.0

    def put(self, step: int, effects: Effects, mesh: Mesh) -> None:
        """Adds what it does in a step."""
        level = self.level(step)
        if level > 0 and self.hits(step):
            mask = np.zeros(mesh.size, np.bool_)
            mask[list(self.ranks)] = True
            rng = np.random.default_rng([self.seed, step + 2, self.number, 77])
            self.act(level, mask.reshape(mesh.shape), effects, rng)

    def hits(self, step: int) -> bool:
        """Whether it does anything in a step."""
        return True

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        """The same, on the ranks of ``of_ranks``, shape (pp, dp, tp)."""

    def configure(self, program: Program, mesh: Mesh) -> Program:
        """The program that the job with the fault runs, where that is what is wrong."""
        return program

    def alike(self, mesh: Mesh) -> tuple[int, ...]:
        """Ranks that no record distinguishes from its own: had it been theirs, all rows would be the same."""
        return self.ranks

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        """The ranks, where none are given."""
        chosen = int(rng.integers(mesh.size))
        if not self.half:
            return (chosen,)
        stage = mesh.place(chosen)[0]
        members = rng.permutation(mesh.dp)[: max(1, mesh.dp // 2)]
        return tuple(np.sort(mesh.ranks[stage, members].ravel()).tolist())


class ComputeStraggler(Fault):
    """A GPU computes slower: the factor."""

    kind, phase = "compute_straggler", "backward"
    doses: ClassVar = {"loud": 2.0, "quiet": 1.2, "masked": 1.08}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.compute[of_ranks] *= 1 + (self.size - 1) * level


class MaskedComputeStraggler(ComputeStraggler):
    """A GPU of a pipeline stage that has less work than the others computes slower, by the factor: mostly in the
    pipeline's bubbles. What the stage has less of the work is nearly as much, from the first step on."""

    kind = "masked_compute_straggler"
    doses: ClassVar = {"loud": 1.9, "quiet": 1.4, "masked": 1.2}

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        if mesh.pp == 1:
            raise ArgusError("masked_compute_straggler needs a pipeline to hide in", "Give --pp", EXIT_USAGE)
        return super().choose(mesh, rng)

    def configure(self, program: Program, mesh: Mesh) -> Program:
        stages = {mesh.place(rank)[0] for rank in self.ranks}
        return replace(program, light=tuple((stage, 0.95 / self.size) for stage in sorted(stages)))


class LinkDegradation(Fault):
    """The network link of a rank is slow: the factor of what it sends and receives, gradients and activations. Those of
    its communicators take as long."""

    kind, phase = "link_degradation", "communication"
    doses: ClassVar = {"loud": 8.0, "quiet": 3.0, "masked": 1.7}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.link[of_ranks] *= 1 + (self.size - 1) * level

    def alike(self, mesh: Mesh) -> tuple[int, ...]:
        """Those that take part in the same transfers between hosts or stages."""
        groups = [members.tolist() for name, each in mesh.groups.items() if name in ("dp", "pp") for members in each]

        def transfers(rank: int) -> list[list[int]]:
            return [members for members in groups if rank in members]

        near = {rank: transfers(rank) for rank in self.ranks}
        members = {rank for those in near.values() for group in those for rank in group}
        return tuple(sorted(rank for rank in members if transfers(rank) in near.values()))

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        if mesh.dp == 1 and mesh.pp == 1:
            raise ArgusError("link_degradation needs ranks that communicate", "Give --dp or --pp", EXIT_USAGE)
        return super().choose(mesh, rng)


class PipelineBubble(Fault):
    """The batch is split into too few micro-batches, each so many times as large. From the first step."""

    kind, phase = "pipeline_bubble", "pipeline_bubble"
    doses: ClassVar = {"loud": 4.0, "quiet": 2.0, "masked": 1.34}

    def configure(self, program: Program, mesh: Mesh) -> Program:
        fewer = max(1, round(program.micro_batches / self.size))
        if mesh.vpp > 1:
            fewer = max(1, fewer // mesh.pp) * mesh.pp
        grown = program.micro_batches / fewer
        return replace(
            program, micro_batches=fewer, forward_ms=program.forward_ms * grown, tp_ms=program.tp_ms * grown,
            ep_ms=program.ep_ms * grown, p2p_ms=program.p2p_ms * grown,
        )  # fmt: skip

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        if mesh.pp == 1:
            raise ArgusError("pipeline_bubble needs a pipeline", "Give --pp", EXIT_USAGE)
        return tuple(range(mesh.size))


class StageImbalance(Fault):
    """A pipeline stage has more work than the others: the factor."""

    kind, phase = "stage_imbalance", "backward"
    doses: ClassVar = {"loud": 1.6, "quiet": 1.2, "masked": 1.08}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.layers[of_ranks] *= 1 + (self.size - 1) * level

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        if mesh.pp == 1:
            raise ArgusError("stage_imbalance needs a pipeline", "Give --pp", EXIT_USAGE)
        return tuple(mesh.ranks[int(rng.integers(mesh.pp))].ravel().tolist())


class SequenceImbalance(Fault):
    """Micro-batches of the data-parallel ranks differ in work: standard deviation of its logarithm."""

    kind, phase = "sequence_imbalance", "forward"
    doses: ClassVar = {"loud": 0.6, "quiet": 0.25, "masked": 0.12}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        spread = self.size * level
        drawn = np.exp(spread * rng.standard_normal(effects.lengths.shape) - spread**2 / 2)
        effects.lengths *= np.where(of_ranks.any(axis=(0, 2)), drawn, 1.0)

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(range(mesh.size))


class _Sometimes(Fault):
    """Hits in some steps: once in so many, at random."""

    period: ClassVar[int] = 10

    def hits(self, step: int) -> bool:
        turn, place = divmod(step - self.since, self.period)
        return place == int(np.random.default_rng([self.seed, self.number, turn, 78]).integers(self.period))

    def struck(self, of_ranks: Bool, level: float, effects: Effects, rng: np.random.Generator) -> Float:
        """How long, ns, shape (pp, dp, tp): its size is a share of the step, less or more by a fifth."""
        took = level * self.size * effects.step_ns * math.exp(0.2 * rng.standard_normal())
        return np.where(of_ranks, took, 0.0)


class JitStall(_Sometimes):
    """A rank compiles or loads GPU code in one of ten steps: share of a step that it takes."""

    kind, phase = "jit_stall", "forward"
    doses: ClassVar = {"loud": 3.0, "quiet": 1.0, "masked": 0.4}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.module_ns += self.struck(of_ranks, level, effects, rng)


class KernelIssueStall(Fault):
    """A CPU launches kernels so slowly that its GPU has to wait: the factor. (4 us a launch become more than a kernel
    takes from 3 on.)"""

    kind, phase = "kernel_issue_stall", "idle"
    doses: ClassVar = {"loud": 8.0, "quiet": 3.7, "masked": 3.2}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.launch[of_ranks] *= 1 + (self.size - 1) * level


class DataLoading(Fault):
    """A rank waits for its batch: share of a step."""

    kind, phase = "data_loading", "data_loading"
    doses: ClassVar = {"loud": 0.6, "quiet": 0.15, "masked": 0.07}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.data_ns += of_ranks * (level * self.size * effects.step_ns * math.exp(0.15 * rng.standard_normal()))


class GcPause(_Sometimes):
    """A rank's Python collects garbage in one of four steps: share of a step that it takes."""

    kind, phase = "gc_pause", "forward"
    period = 4
    doses: ClassVar = {"loud": 1.0, "quiet": 0.4, "masked": 0.2}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.pause_ns += self.struck(of_ranks, level, effects, rng)


class HostContention(Fault):
    """Other programs take a host's CPUs: share of a step in which the ranks there wait for one, and as much slower
    launches."""

    kind, phase = "host_contention", "idle"
    doses: ClassVar = {"loud": 0.8, "quiet": 0.2, "masked": 0.08}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        wait = level * self.size * effects.step_ns * np.exp(0.4 * rng.standard_normal(of_ranks.shape))
        effects.queued_ns += of_ranks * wait
        effects.launch[of_ranks] *= 1 + self.size * level

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(np.flatnonzero(mesh.host == int(rng.integers(mesh.hosts))).tolist())


class Regression(Fault):
    """All ranks compute slower from a step on: the factor."""

    kind, phase = "regression", "backward"
    doses: ClassVar = {"loud": 1.6, "quiet": 1.2, "masked": 1.08}
    begins = 0.5

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.compute[of_ranks] *= 1 + (self.size - 1) * level

    def choose(self, mesh: Mesh, rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(range(mesh.size))


class Jitter(_Sometimes):
    """A rank is held up in one of ten steps, and nothing shows by what: share of a step."""

    kind, phase = "jitter", "idle"
    doses: ClassVar = {"loud": 3.0, "quiet": 1.0, "masked": 0.4}

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.stall_ns += self.struck(of_ranks, level, effects, rng)


class Hang(Fault):
    """A rank stops, and all others wait for it: so many seconds are traced on."""

    kind, phase = "hang", "communication"
    doses: ClassVar = {"loud": 300.0, "quiet": 90.0, "masked": 45.0}
    begins = 0.6

    def act(self, level: float, of_ranks: Bool, effects: Effects, rng: np.random.Generator) -> None:
        effects.dead |= of_ranks


FAULTS: dict[str, type[Fault]] = {
    one.kind: one
    for one in (
        ComputeStraggler, MaskedComputeStraggler, LinkDegradation, PipelineBubble, StageImbalance, SequenceImbalance,
        JitStall, KernelIssueStall, DataLoading, GcPause, HostContention, Regression, Jitter, Hang,
    )
}  # fmt: skip
"""Every kind of a verdict (argus.diagnose.verdict)."""


def parse(text: str) -> Fault:
    """A fault as the command line gives it: ``KIND[:DOSE][:ranks=0,3-5|:half][:from=STEP][:steps=N][:ramp=N]``.

    Raises:
        ArgusError: It does not.
    """
    kind, *rest = text.split(":")
    if kind not in FAULTS:
        raise ArgusError(f"there is no fault '{kind}'", f"Known: {', '.join(FAULTS)}", EXIT_USAGE)
    fault = FAULTS[kind]()
    for part in rest:
        name, equals, value = part.partition("=")
        try:
            if not equals and name in DOSES:
                fault.dose = name
            elif part == "half":
                fault.half = True
            elif name == "ranks":
                fault.ranks = _ranks(value)
            elif name in ("from", "steps", "ramp"):
                setattr(fault, {"from": "since", "steps": "lasts"}.get(name, name), int(value))
            else:
                raise ValueError
        except ValueError:
            raise ArgusError(
                f"'{part}' in the fault '{text}' is not understood",
                f"KIND[:{'|'.join(DOSES)}][:ranks=0,3-5|:half][:from=STEP][:steps=N][:ramp=N]", EXIT_USAGE,
            ) from None  # fmt: skip
    return fault


def _ranks(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ranks += range(int(first), int(last if dash else first) + 1)
    return tuple(ranks)


def settle(faults: list[Fault], mesh: Mesh, steps: int, seed: int) -> list[Fault]:
    """Numbers the faults, and chooses ranks and first steps where none are given.

    Raises:
        ArgusError: A rank or a step that the job does not have.
    """
    for number, fault in enumerate(faults):
        fault.number, fault.seed = number, seed
        if fault.since < 0:
            fault.since = int(fault.begins * steps)
        if fault.since >= steps:
            raise ArgusError(
                f"{fault.kind}: it would begin at step {fault.since}, after the last of {steps}",
                "Change from= or --steps",
                EXIT_USAGE,
            )
        fault.ranks = fault.ranks or fault.choose(mesh, np.random.default_rng([seed, number, 4242]))
        if max(fault.ranks) >= mesh.size or min(fault.ranks) < 0:
            raise ArgusError(f"{fault.kind}: there is no rank {max(fault.ranks)} of {mesh.size}", "", EXIT_USAGE)
    return faults
