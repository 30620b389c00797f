"""A run's figures, read once from the store: the unit in which runs are compared, and what a baseline keeps of one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.environment import read_environment
from argus.diagnose.read.query import Query
from argus.diagnose.variation import BATCHES, Mean, mean_of
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError

GPU = "gpu.model"
"""The fact that is part of a job's class."""
WARM_UP = 5
"""First steps that are left out: allocators, caches and autotuning settle in them. Of short runs a tenth."""
TAIL_STEPS = 100
"""Steps from which on a run has a 99th percentile."""
FEWEST_STEPS = 20
"""Steps below which a run's mean has no error that means anything: two a batch."""
_ALL_STEPS = {"first": 0, "last": (1 << 32) - 1}
TRANSFER_ROWS = 200_000
"""Ranks and steps whose collectives are read, about: of a larger job every so many steps, 20 at least."""
KERNELS = 60
"""Kernels of which figures are kept, those that take longest."""
COMPUTE = ("forward", "backward", "optimizer", "compute")
"""Phases of a GPU in which kernels run that are not NCCL's."""
COMMUNICATION = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "communication",
    "pipeline_bubble",
)  # fmt: skip
"""Phases in which only NCCL's run."""
_IDS = re.compile(r"(?:[-_.:/@](?:[0-9a-f]{8,}|\d{1,7}(?![0-9a-f])))+$")
"""Ids at the end of a name. No text matches in two ways, so that no name takes long."""
_APART = re.compile(r"(?:uid)?[0-9]{1,10}")
"""What a trace puts after a name and # where another job of the node had the name (``argus.live.roster``)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a run: launches of a rank and step, ns of a rank and step, which of its ids takes longest, and
    quantiles of the durations of its launches, ns (empty: they were not read)."""

    launches: float
    spent_ns: Mean
    kernel_id: int
    quantiles: tuple[float, ...] = ()


@dataclass(frozen=True)
class Transfer:
    """A communicator's collectives of a step: bytes, and the time of the rank that waited for nobody, ns."""

    bytes: float
    transfer_ns: Mean


@dataclass(frozen=True)
class Profile:
    """What is compared of a run. Figures are of a rank and step, ns unless noted; a missing one was not observed.

    Attributes:
        job, run: Which.
        ranks: With steps. world_size: Of the whole job; 0: unknown.
        hosts: Ascending.
        mesh: Ranks of a communicator of each dimension.
        steps: Steps that the means are over.
        ended: The trace was closed.
        work: A step's launches, collectives, bytes (of a rank) and flops (of all).
        step: A step.
        phases: By name. clock: whose: gpu, cpu, or empty.
        kernels: By name, without NCCL's.
        transfers: By dimension and operation.
        figures: ``idle`` (of the GPU), ``issue_latency`` (median of a step's kernels), ``void`` (a share),
            ``collections``, ``runqueue``, ``step_median`` and ``step_p99`` (of :data:`TAIL_STEPS` steps or more).
        latencies: Quantiles of the issue latency over ranks and steps.
        computed: Computation of a rank, by host. slowest: of the slowest rank of each host, and slowest_ranks: which
            that is; empty: by an Argus that did not read it.
        environment: What most ranks ran on and with, by fact (``environment.Environment.typical``); empty:
            not known.
    """

    job: str
    run: int
    ranks: int
    world_size: int
    hosts: tuple[str, ...]
    mesh: dict[str, int]
    steps: int
    ended: bool
    work: dict[str, float]
    step: Mean
    phases: dict[str, Mean] = field(default_factory=dict)
    clock: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    figures: dict[str, Mean] = field(default_factory=dict)
    latencies: tuple[float, ...] = ()
    computed: dict[str, Mean] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    slowest: dict[str, Mean] = field(default_factory=dict)
    slowest_ranks: dict[str, int] = field(default_factory=dict)

    def phase_ns(self, names: tuple[str, ...]) -> float:
        """Time in these phases."""
        return sum(mean.value for name, mean in self.phases.items() if name in names)


def read_profile(query: Query, job: str, run: int, *, last: int | None = None) -> Profile:
    """The figures of a run.

    Args:
        query: Runs SQL with parameters, returns columns.
        job, run: Which.
        last: Last step that counts; None: of the run.

    Raises:
        ArgusError: It has fewer than :data:`FEWEST_STEPS` whole steps, or the store cannot be asked.
    """
    params: dict[str, Any] = {"job": job, "run": run, **_ALL_STEPS}
    steps = query(queries.RUN_STEPS, params)
    numbers = steps["step"].astype(np.int64)
    numbers = numbers if last is None else numbers[numbers <= last]
    numbers = numbers[min(WARM_UP, len(numbers) // 10) :]
    if len(numbers) < FEWEST_STEPS:
        raise ArgusError(
            f"run {run} of job '{job}' has {len(numbers)} whole steps that can be compared",
            f"{FEWEST_STEPS} are needed", EXIT_UNAVAILABLE,
        )  # fmt: skip
    params |= {"first": int(numbers[0]), "last": int(numbers[-1]), "batches": BATCHES}
    used = np.isin(steps["step"].astype(np.int64), numbers)
    size = query(queries.RUN_SIZE, params)
    known = len(size["world_size"]) > 0
    phases, clock = read_phases(query, params, numbers)
    every = max(1, int(steps["ranks"].max()) * len(numbers) // TRANSFER_ROWS)
    transfers = _transfers(query(queries.RUN_TRANSFERS, {**params, "every": min(every, len(numbers) // FEWEST_STEPS)}))
    work = {name: float(np.mean(steps[name][used])) for name in ("launches", "collectives")}
    work["bytes"] = sum(one.bytes for one in transfers.values())
    work["flops"] = float(size["step_flops"][0]) if known else 0.0
    kernels = _kernels(query(queries.RUN_KERNELS, params), len(numbers), int(numbers[-1] - numbers[0]) + 1)
    latencies = read_latencies(query, params)
    mesh = query(queries.RUN_MESH, params)
    durations = steps["duration_ns"][used].astype(np.float64)
    step = mean_of(durations)
    slowest = query(queries.RUN_SLOWEST, params)
    return Profile(
        job, run, int(steps["ranks"].max()), int(size["world_size"][0]) if known else 0,
        tuple(sorted(map(str, size["hosts"][0]))) if known else (),
        {str(name): int(n) for name, n in zip(mesh["dimension"], mesh["nranks"], strict=True)},
        len(numbers), bool(known and not int(size["open"][0])),
        {name: value for name, value in work.items() if value > 0},
        step, phases, clock, kernels, transfers,
        _figures(query, params, numbers, step) | tail_figures(durations), latencies,
        _by_host(query(queries.RUN_COMPUTE, params)), read_environment(query, job, run).typical(), _by_host(slowest),
        dict(zip(map(str, slowest["host"]), map(int, slowest["rank"]), strict=True)),
    )  # fmt: skip


def tail_figures(durations: NDArray[np.float64]) -> dict[str, Mean]:
    """Median and 99th percentile of a run's steps, shape (steps,); empty: they are too few for a tail."""
    if len(durations) < TAIL_STEPS:
        return {}
    median, high = np.quantile(durations, [0.5, 0.99])
    return {"step_median": Mean(float(median)), "step_p99": Mean(float(high))}


def step_tail(profile: Profile) -> float | None:
    """The 99th percentile of a step over its median; None: not known."""
    return tail_of(profile.figures)


def tail_of(figures: Mapping[str, Mean]) -> float | None:
    """The same of :func:`tail_figures`."""
    if "step_p99" not in figures or "step_median" not in figures:
        return None
    return figures["step_p99"].value / max(figures["step_median"].value, 1.0)


def mean_step_ns(query: Query, job: str, run: int) -> float | None:
    """A run's mean step, without the first ones, as a profile has it, of however few steps; None: it has none."""
    steps = query(queries.RUN_STEPS, {"job": job, "run": run, **_ALL_STEPS})["duration_ns"]
    steps = steps[min(WARM_UP, len(steps) // 10) :]
    return float(np.mean(steps)) if len(steps) else None


def read_phases(query: Query, params: Mapping[str, Any], numbers: NDArray[np.int64]) -> tuple[dict[str, Mean], str]:
    """Time in each phase, and whose: gpu, or cpu where no GPU was timed; empty: neither.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first and last step.
        numbers: The steps that count, ascending.
    """
    for clock, sql in (("gpu", queries.RUN_GPU_PHASES), ("cpu", queries.RUN_CPU_PHASES)):
        rows = query(sql, params)
        if len(rows["step"]):
            return _by_step(rows, "phase", numbers), clock
    return {}, ""


def read_latencies(query: Query, params: Mapping[str, Any]) -> tuple[float, ...]:
    """Quantiles of the issue latency over ranks and steps, ns; empty: not observed. ``params``: job, run, first and
    last step."""
    rows = query(queries.RUN_LATENCIES, params)
    return tuple(map(float, rows["points"][0])) if len(rows["n"]) and int(rows["n"][0]) else ()


def read_class(query: Query, job: str, run: int) -> str:
    """:func:`class_of` a run, without its figures."""
    params = {"job": job, "run": run}
    size, mesh = query(queries.RUN_SIZE, params), query(queries.RUN_MESH, params)
    ranks, gpu = query(queries.RUN_RANKS, params), query(queries.GPU_MODEL, params)["model"].tolist()
    return _class(
        job, int(size["world_size"][0]) if len(size["world_size"]) else 0, int(ranks["ranks"][0]),
        {str(name): int(n) for name, n in zip(mesh["dimension"], mesh["nranks"], strict=True)},
        str(gpu[0]) if gpu else "",
    )  # fmt: skip


def _by_step(rows: Mapping[str, NDArray[Any]], name: str, numbers: NDArray[np.int64]) -> dict[str, Mean]:
    """Means by a column; a step without a row counts as 0."""
    out: dict[str, Mean] = {}
    for one in np.unique(rows[name].astype(str)).tolist():
        chosen = rows[name].astype(str) == one
        steps, series = rows["step"][chosen].astype(np.int64), np.zeros(len(numbers))
        place = np.searchsorted(numbers, steps).clip(0, len(numbers) - 1)
        counted = numbers[place] == steps
        series[place[counted]] = rows["duration_ns"][chosen][counted]
        out[one] = mean_of(series)
    return out


def _transfers(rows: Mapping[str, NDArray[Any]]) -> dict[str, Transfer]:
    out: dict[str, Transfer] = {}
    names = np.array([f"{d or 'unknown'} {op}" for d, op in zip(rows["dimension"], rows["op"], strict=True)], object)
    for name in dict.fromkeys(names.tolist()):
        chosen = names == name
        out[name] = Transfer(float(np.mean(rows["bytes"][chosen])), mean_of(rows["transfer_ns"][chosen]))
    return out


def _kernels(rows: Mapping[str, NDArray[Any]], steps: int, span: int) -> dict[str, Kernel]:
    """The kernels that take longest. ``steps``: with sure boundaries; ``span``: from the first to the last."""
    out: dict[str, Kernel] = {}
    names = rows["kernel"]
    for name in dict.fromkeys(names.tolist()):
        chosen = names == name
        each = max(float(rows["ranks"][chosen][0]), 1.0) * steps
        spent = rows["spent_ns"][chosen].astype(np.float64)
        batches = np.zeros(BATCHES)
        batches[rows["batch"][chosen].astype(int).clip(0, BATCHES - 1)] = spent
        batches /= np.bincount(np.arange(span) * BATCHES // span, minlength=BATCHES) * each / steps
        error = float(batches.std(ddof=1) / math.sqrt(BATCHES))
        launches = float(rows["launches"][chosen].sum()) / each
        longest = int(rows["kernel_id"][chosen][int(np.argmax(spent))])
        out[str(name)] = Kernel(launches, Mean(float(spent.sum()) / each, error), longest)
    kept = sorted(out, key=lambda name: -out[name].spent_ns.value)[:KERNELS]
    return {name: out[name] for name in kept}


def _by_host(rows: Mapping[str, NDArray[Any]]) -> dict[str, Mean]:
    return {
        str(host): mean_of(rows["compute_ns"][rows["host"] == host].astype(np.float64))
        for host in dict.fromkeys(rows["host"].tolist())
    }


def _figures(query: Query, params: Mapping[str, Any], numbers: NDArray[np.int64], step: Mean) -> dict[str, Mean]:
    out: dict[str, Mean] = {}
    rows = query(queries.RUN_GPU_STEPS, params)
    if len(rows["step"]):
        out["idle"], out["void"] = mean_of(rows["idle_ns"]), mean_of(rows["void_share"].astype(np.float64))
        latency = rows["latency_ns"].astype(np.float64)
        if np.isfinite(latency).any():
            out["issue_latency"] = mean_of(latency[np.isfinite(latency)])
    pauses = query(queries.RUN_PAUSES, params)
    if len(pauses["n"]) and (int(pauses["n"][0]) or int(pauses["sampled"][0])):
        ranks = max(len(numbers), 1)
        out["collections"] = Mean(float(pauses["paused_ns"][0]) / ranks)
    waits = query(queries.RUN_WAITS, params)
    if len(waits["batch"]):
        share = waits["runqueue_ns"].astype(np.float64) / np.maximum(waits["interval_ns"].astype(np.float64), 1.0)
        out["runqueue"] = mean_of(share) * step.value
    return out


def class_name(job: str) -> str:
    """A job's name without what differs from run to run: the ids at its end, and what a trace puts there where another
    job had the name. ``llama-7b-20261125-1234`` and ``llama-7b#uid1000`` are of the class ``llama-7b``."""
    name, end = job, len(job)
    while (at := job.rfind("#", 0, end)) > 0 and _APART.fullmatch(job, at + 1, end):
        name, end = job[:at], at
    return _IDS.sub("", name) or name


def class_of(profile: Profile) -> str:
    """What runs have in common whose step times may be compared: name, ranks, mesh and GPU, as one line. Work of a step
    is compared besides (:func:`same_work`)."""
    return _class(profile.job, profile.world_size, profile.ranks, profile.mesh, profile.environment.get(GPU, ""))


def _class(job: str, world_size: int, ranks: int, mesh: Mapping[str, int], gpu: str) -> str:
    dimensions = ",".join(f"{name}{size}" for name, size in sorted(mesh.items()))
    return json.dumps([class_name(job), world_size or ranks, dimensions, gpu])


@dataclass(frozen=True)
class Class:
    """The parts of a class: the job's name without ids, ranks, dimensions of the mesh, GPU model."""

    name: str
    ranks: int
    mesh: str
    gpu: str


def class_parts(text: str) -> Class:
    """A class as it is stored. A store is not trusted: what is none is a name alone."""
    try:
        name, ranks, mesh, gpu = json.loads(text)
        return Class(str(name), int(ranks), str(mesh), str(gpu))
    except (ValueError, TypeError):
        return Class(text, 0, "", "")


def class_begin(name: str) -> str:
    """How the stored classes of a name begin."""
    return json.dumps([name])[:-1] + ", "


def same_work(first: Profile, second: Profile, tolerance: float = 0.02) -> bool:
    """Whether a step of both has the same launches, collectives, bytes and flops, as far as both were observed."""
    return all(
        abs(first.work[name] - second.work[name]) <= tolerance * max(first.work[name], second.work[name])
        for name in first.work.keys() & second.work.keys()
    )


def to_text(profile: Profile) -> str:
    """A profile as JSON, for the table ``baselines``."""
    return json.dumps(asdict(profile))


def from_text(text: str) -> Profile:
    """The same, read.

    Raises:
        ValueError: It is none.
    """
    try:
        raw = json.loads(text)

        def means(name: str) -> dict[str, Mean]:
            return {str(key): Mean(**one) for key, one in raw[name].items()}

        kernels = {
            str(name): Kernel(one["launches"], Mean(**one["spent_ns"]), int(one["kernel_id"]), tuple(one["quantiles"]))
            for name, one in raw["kernels"].items()
        }
        transfers = {
            str(name): Transfer(one["bytes"], Mean(**one["transfer_ns"])) for name, one in raw["transfers"].items()
        }
        return Profile(
            **{
                **raw, "hosts": tuple(raw["hosts"]), "step": Mean(**raw["step"]), "phases": means("phases"),
                "kernels": kernels, "transfers": transfers, "figures": means("figures"),
                "latencies": tuple(raw["latencies"]), "computed": means("computed"),
                "slowest": means("slowest") if "slowest" in raw else {},
                "slowest_ranks": {str(host): int(rank) for host, rank in raw.get("slowest_ranks", {}).items()},
            }
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"not a profile: {failure}") from None
