"""Simulates a job and stores it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.simulate.changes import Change, set_up
from argus.simulate.engine import Step, play
from argus.simulate.faults import Fault, Hang, settle
from argus.simulate.kernels import Kernels
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.program import Program
from argus.simulate.rows import Rows
from argus.store.open import Store
from argus.store.runs import flush_whole, new_run
from argus.store.writer import Writer

BLOCK = 40_000
"""Ranks and steps of which rows are made at once: some 20 rows each."""
WAITING_BYTES = 100 << 20
"""What may wait for the store before the next block is made; a writer would drop rows from 256 MB on."""

Progress = Callable[[str, float], object]


@dataclass
class Spec:
    """A job to simulate.

    Attributes:
        mesh, program, noise: What it is.
        faults: What is wrong with it.
        steps: How many are traced.
        seed: Of the noise, and of the ranks of faults.
        calls: Collectives of a rank and step that are stored, roughly.
        skewed: Hosts have clocks of their own, up to 5 ms apart, that drift by up to 20 ppm (crystals do).
        layout: How the job is split is stored too (``parallel_layout``), which no live trace knows.
        kernels: Ranks whose kernels are summed up (``kernel_summaries``): those of faults first.
        changes: What is different in this run from its first step on.
        environment: Facts of every rank, by name (``environments``); empty: nothing is stored of it.
        model: Seed of what the job's kernels are: runs of one program have the same; None: ``seed``.
    """

    mesh: Mesh
    program: Program = field(default_factory=Program)
    noise: Noise = field(default_factory=Noise)
    faults: list[Fault] = field(default_factory=list)
    steps: int = 100
    seed: int = 0
    calls: int = 8
    skewed: bool = True
    layout: bool = False
    kernels: int = 0
    changes: list[Change] = field(default_factory=list)
    model: int | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._setup = set_up(self.program, self.mesh, self.changes)
        settle(self.faults, self.mesh, self.steps, self.seed)

    def summarised_ranks(self) -> list[int]:
        """Ranks whose kernels are summed up."""
        faulty = [rank for fault in self.faults for rank in fault.ranks]
        others = np.linspace(0, self.mesh.size - 1, self.kernels).astype(int).tolist()
        return list(dict.fromkeys(faulty[: (self.kernels + 1) // 2] + others + list(range(self.mesh.size))))[
            : self.kernels
        ]

    def rows(self, start_ns: int) -> Rows:
        """What makes rows of the steps, of a job that begins at a wall-clock time."""
        hosts = self.mesh.hosts
        if hosts == 1 or not self.skewed:
            return Rows(self.mesh, self.program, start_ns, hosts=self._setup.hosts)
        rng = np.random.default_rng([self.seed, 1])
        offset, drift = rng.integers(1, 5_000_000, hosts), rng.integers(-20_000, 20_000, hosts)
        return Rows(self.mesh, self.program, start_ns, offset, drift, self._setup.hosts)

    def kernels_of(self, rows: Rows) -> Kernels:
        """What sums up the kernels of some ranks."""
        ranks = self.summarised_ranks()
        return Kernels(rows, self._setup.program, ranks, self.seed, self.model, self.noise.run / 5)

    def play(self, *, healthy: bool = False) -> Iterable[Step]:
        """The steps. ``healthy``: the same noise, without the faults."""
        sends, reduces = max(1, self.calls // 8), max(1, self.calls // 4)
        faults = [] if healthy else self.faults
        program = self._setup.program
        for fault in faults:
            program = fault.configure(program, self.mesh)
        return play(self.mesh, program, self.noise, faults, self.steps, self.seed, sends, reduces)


@dataclass(frozen=True)
class Made:
    """What was stored.

    Attributes:
        run: Its number.
        rows: By table.
        step_ns: Median over ranks of each step's time, shape (steps,).
    """

    run: int
    rows: dict[str, int]
    step_ns: NDArray[np.float64]


def write(
    store: Store,
    job: str,
    spec: Spec,
    progress: Progress = lambda what, share: None,
    *,
    run: int | None = None,
    start_ns: int | None = None,
) -> Made:
    """Simulates a job and stores it as a new run.

    Args:
        store: Where to.
        job: Its name.
        spec: What to simulate.
        progress: Called with what is done, and the share of it.
        run: Number of the run; None: the time.
        start_ns: Wall-clock time at which it begins; None: that of the run.

    Raises:
        ArgusError: The store cannot be had or refuses rows; the run is then left without an end in ``jobs``.
    """
    run = new_run(store) if run is None else run
    rows = spec.rows(run * 10**9 if start_ns is None else start_ns)
    version = time.time_ns()
    block: list[Step] = []
    step_ns: list[float] = []
    last_ns, hung = 0.0, False
    with Writer(store, source=f"simulate/{run}") as writer:

        def store_all(tables: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
            for table, columns in tables:
                writer.append(table, {**columns, "job": job, "run": run})
            # The store takes one block while the next is made.
            if writer.bytes_waiting > WAITING_BYTES:
                flush_whole(writer, job, run)

        writer.start()

        store_all(rows.job(0.0, None, version))
        store_all(rows.ranks(version))
        if spec.environment:
            store_all(rows.environment(spec.environment, version))
        if spec.layout:
            store_all(rows.layout(version))
        summed = spec.kernels_of(rows) if spec.kernels else None
        for step in spec.play():
            block.append(step)
            hung = step.spent
            if not step.spent:
                step_ns.append(float(np.median(step.cpu_end - step.cpu_begin)))
                last_ns = float(step.gpu_end.max())
                if summed is not None:
                    summed.feed(step)
            if len(block) * spec.mesh.size >= BLOCK:
                store_all(rows.steps(block))
                if summed is not None:
                    store_all(summed.tables())
                progress("steps", (step.number + 1) / spec.steps)
                block.clear()
        if block:
            store_all(rows.steps(block))
        if summed is not None:
            store_all(summed.tables(final=True))
        if hung:
            last_ns += max(fault.size for fault in spec.faults if isinstance(fault, Hang)) * 1e9
        store_all(rows.coverage(last_ns, version))
        store_all(rows.job(0.0, last_ns, version + 1))
        flush_whole(writer, job, run)
        progress("steps", 1.0)
        return Made(run, dict(writer.rows_written), np.array(step_ns))


def truth(spec: Spec, job: str, made: Made) -> dict[str, Any]:
    """What is true of a simulated job: its faults, and what each step would have taken without them.

    The ideal times are those of the same job with the same noise and no faults.
    """
    ideal = np.array([float(np.median(step.cpu_end - step.cpu_begin)) for step in spec.play(healthy=True)])
    ideal = ideal[: len(made.step_ns)]
    mesh = spec.mesh
    names = [f"node{number:04d}" for number in range(mesh.hosts)]
    return {
        "schema": "argus.truth/1",
        "job": job,
        "run": made.run,
        "seed": spec.seed,
        "mesh": {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "ep": mesh.ep, "vpp": mesh.vpp, "ranks": mesh.size},
        "micro_batches": spec.program.micro_batches,
        "steps": len(made.step_ns),
        "slowdown": round(float(np.mean(made.step_ns) / np.mean(ideal)), 4) if len(ideal) else 1.0,
        "faults": [
            {
                "kind": fault.kind,
                "dose": fault.dose,
                "size": fault.size,
                "ranks": list(fault.ranks),
                "alike": list(fault.alike(mesh)),
                "hosts": list(dict.fromkeys(names[int(mesh.host[rank])] for rank in fault.ranks)),
                "steps": [fault.since, fault.since + fault.lasts - 1 if fault.lasts else spec.steps - 1],
                "ramp": fault.ramp,
                "phase": fault.phase,
                "slowdown": _slowdown(made.step_ns, ideal, fault),
            }
            for fault in spec.faults
        ],
        "step_ns": [round(value) for value in made.step_ns.tolist()],
        "ideal_step_ns": [round(value) for value in ideal.tolist()],
    }


def _slowdown(actual: NDArray[np.float64], ideal: NDArray[np.float64], fault: Fault) -> float:
    steps: Sequence[int] = [step for step in range(len(ideal)) if fault.level(step) > 0]
    return round(float(np.mean(actual[steps]) / np.mean(ideal[steps])), 4) if len(steps) else 1.0
