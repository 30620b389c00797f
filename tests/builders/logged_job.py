"""Makes logs of training loops, with timers that contain the wait for other ranks or do not, and planted faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Logged
from argus.diagnose.ranks import phase_times
from argus.diagnose.read import queries
from argus.diagnose.suspect import Suspect

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Which timers a loop has.

    Attributes:
        own: Share of a step that each of them takes by itself. ``""``: what no timer covers.
        waits: How the wait is shared out among timers.
    """

    own: dict[str, float]
    waits: dict[str, float]


LAYOUTS = {
    "wait inside compute": Layout(
        {"data_loading": 0.01, "compute": 0.86, "communication": 0.001, "waiting": 0.01, "": 0.1}, {"compute": 1.0}
    ),
    "wait inside backward": Layout(
        {"dataloader": 0.03, "forward": 0.3, "backward": 0.55, "optimizer": 0.1, "": 0.02}, {"backward": 1.0}
    ),
    "wait inside communication": Layout(
        {"input": 0.02, "compute": 0.75, "communication": 0.2, "": 0.03}, {"communication": 1.0}
    ),
    "wait timed": Layout(
        {"fetch_batch": 0.05, "fwd_bwd": 0.7, "allreduce": 0.15, "barrier_wait": 0.01, "": 0.09}, {"barrier_wait": 1.0}
    ),
    "only compute": Layout({"compute": 0.9, "": 0.1}, {"compute": 1.0}),
    "wait not timed": Layout({"data": 0.05, "forward": 0.35, "": 0.6}, {"": 1.0}),
    "wait in two timers": Layout(
        {"load": 0.02, "train_step": 0.8, "grad_sync": 0.15, "": 0.03}, {"train_step": 0.6, "grad_sync": 0.4}
    ),
}
HOST = ("data_loading", "dataloader", "input", "fetch_batch", "data", "load")


@dataclass(frozen=True)
class Fault:
    """What is planted.

    Attributes:
        where: A timer, ``""`` what none covers.
        rank: None: all of them.
        size: Share of a usual step.
        since, until: Shares of the recording.
        shape: ``step``, ``ramp`` (grows from nothing to ``size`` until the end), ``often`` (in 75 % of the steps),
            ``half`` (in every other one), ``spikes`` (in 8 %).
    """

    where: str
    rank: int | None
    size: float
    since: float = 0.33
    until: float = 1.0
    shape: str = "step"


@dataclass(frozen=True)
class Log:
    """Times in ms.

    Attributes:
        step: Shape (ranks, steps).
        phases: The same of each timer.
    """

    step: Float
    phases: dict[str, Float] = field(default_factory=dict)


def make(
    layout: Layout,
    *,
    ranks: int = 16,
    steps: int = 300,
    step_ms: float = 80.0,
    noise: float = 0.004,
    common: float = 0.015,
    drift: float = 0.002,
    spikes: float = 0.01,
    faults: tuple[Fault, ...] = (),
    seed: int = 0,
) -> Log:
    """A log of ranks that wait for one another in every step.

    Args:
        noise: Of each rank's own time, share of a step.
        common: What all ranks share varies by, share of a step.
        drift: Each rank's own time wanders by, share of a step.
        spikes: Share of (rank, step) in which a rank is late by up to a fifth of a step.
    """
    rng = np.random.default_rng(seed)
    own: dict[str, Float] = {}
    for name, share in layout.own.items():
        varies = 1 + rng.lognormal(-3.5, 0.6, (ranks, steps)) * min(1.0, 0.02 / share)
        own[name] = share * step_ms * varies
    # Ranks differ a little all along, wander, and are late now and then, outside computing.
    loose = [name for name in own if name in HOST or name == ""]
    where = loose[0]
    slow = np.cumsum(rng.standard_normal((ranks, steps)), axis=1)
    slow *= drift / max(float(np.std(slow[:, -1])), 1e-9)
    hiccups = np.where(rng.random((ranks, steps)) < spikes, rng.random((ranks, steps)) * 0.2, 0.0)
    extra = noise * np.abs(rng.standard_normal((ranks, steps))) + np.abs(slow) + hiccups
    own[where] = own[where] + step_ms * (extra + drift * rng.random((ranks, 1)))
    for fault in faults:
        own[fault.where] = own[fault.where] + step_ms * _profile(fault, ranks, steps, rng)
    together = step_ms * common * np.abs(rng.standard_normal(steps))
    together += step_ms * (rng.random(steps) < 0.01) * rng.random(steps)
    total = np.sum(list(own.values()), axis=0)
    wait = total.max(axis=0) - total
    phases = dict(own)
    for name, share in layout.waits.items():
        phases[name] = phases[name] + share * (wait + together)
    step = total + wait + together
    # Ranks leave a step a little apart, which the next one makes up for.
    apart = step_ms * 0.003 * rng.standard_normal((ranks, steps))
    step = np.maximum(step + np.diff(apart, axis=1, prepend=0.0), 0.1 * step_ms)
    return Log(step, {name: values for name, values in phases.items() if name})


def _profile(fault: Fault, ranks: int, steps: int, rng: np.random.Generator) -> Float:
    at = np.arange(steps)
    first, end = int(fault.since * steps), int(fault.until * steps)
    there = (at >= first) & (at < end)
    shape = there * fault.size
    if fault.shape == "ramp":
        shape = shape * np.clip((at - first) / max(end - first - 1, 1), 0, 1)
    elif fault.shape == "half":
        shape = shape * (np.arange(steps) % 2)
    elif fault.shape in ("often", "spikes"):
        shape = shape * (rng.random(steps) < (0.75 if fault.shape == "often" else 0.08))
    found = np.zeros((ranks, steps))
    found[slice(None) if fault.rank is None else fault.rank] = shape * (1 + 0.05 * rng.standard_normal(steps))
    return np.maximum(found, 0.0)


def rows(log: Log, unit: float = 1e6) -> tuple[dict[str, Any], dict[str, Any]]:
    """As the store returns them: step times, and phases with ``other``."""
    ranks, steps = log.step.shape
    rank, step = (each.ravel() for each in np.meshgrid(np.arange(ranks), np.arange(steps), indexing="ij"))
    times = {"rank": rank, "step": step, "duration_ns": log.step.ravel() * unit}
    rest = np.maximum(log.step - np.sum(list(log.phases.values()), axis=0), 0.0)
    phases = {**log.phases, "other": rest}
    found = {
        "rank": np.tile(rank, len(phases)), "step": np.tile(step, len(phases)),
        "phase": np.repeat(np.array(list(phases)), len(rank)),
        "duration_ns": np.concatenate([values.ravel() for values in phases.values()]) * unit,
    }  # fmt: skip
    return times, found


def judge_rows(
    times: dict[str, Any], phases: dict[str, Any], newest_ns: float, threshold: float = 0.05
) -> tuple[list[Suspect], Logged]:
    """What is concluded from rows of ``iterations`` and ``phases``, without a store."""

    def query(text: str, params: Any) -> dict[str, Any]:
        if text == queries.LOGGED_PHASES:
            return {"n": np.array([len(phases["rank"])])}
        return times if text == queries.STEP_TIMES else phases

    params = {"job": "logged", "run": 1, "first": 0, "last": int(times["step"].max())}
    found = phase_times.slow_ranks(query, params, {}, threshold, newest_ns)
    assert found is not None
    return found
