"""Profiles of runs that never ran: what two sides of a comparison are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from argus.diagnose.read.profile import Kernel, Profile, Transfer
from argus.diagnose.variation import Mean

MS = 1e6
KERNELS = {"gemm": 15.0, "attention": 8.0, "norm": 3.0, "copy": 2.0, "adam": 3.0}
"""ms a step."""
PHASES = {"forward": 10.0, "backward": 18.0, "optimizer": 3.0, "all_reduce": 5.0, "idle": 1.0, "data_loading": 2.0}


def profile(run: int = 1, spread: float = 0.003, seed: int = 0, **changed: Any) -> Profile:
    """A run of two hosts whose computation, transfers and waiting differ from those of other runs by a spread.

    Args:
        run: Its number, and the seed of what it differs by.
        spread: Standard deviation of that.
        seed: Of other runs of the same number.
        changed: ``kernels``, ``phases``, ``transfers`` (each ms by name, added), ``step_ms`` (added), or a field of the
            profile.
    """
    rng = np.random.default_rng([run, seed])
    speed, transfer, waiting = 1 + spread * rng.standard_normal(3)
    more = {name: changed.pop(name, {}) for name in ("kernels", "phases", "transfers")}
    phases = {name: ms + more["phases"].get(name, 0.0) for name, ms in PHASES.items()}
    of = {"all_reduce": transfer, "idle": waiting, "data_loading": waiting}
    phases = {name: ms * of.get(name, speed) for name, ms in phases.items()}
    step = sum(phases.values()) + changed.pop("step_ms", 0.0)
    fields: dict[str, Any] = {
        "job": "llama", "run": run, "ranks": 8, "world_size": 8, "hosts": ("node0", "node1"), "mesh": {"dp": 8},
        "steps": 100, "ended": True, "work": {"launches": 3000.0, "collectives": 3.0, "bytes": 1e8},
        "step": Mean(step * MS, 0.001 * step * MS),
        "phases": {name: Mean(ms * MS, 0.001 * ms * MS) for name, ms in phases.items()}, "clock": "gpu",
        "kernels": {
            name: Kernel(100.0, Mean((ms + more["kernels"].get(name, 0.0)) * speed * MS, 0.001 * MS), place)
            for place, (name, ms) in enumerate(KERNELS.items())
        },
        "transfers": {"dp AllReduce": Transfer(1e8, Mean((8 + more["transfers"].get("dp", 0.0)) * transfer * MS, 1e3))},
        "figures": {"void": Mean(phases["idle"] / step), "issue_latency": Mean(8 * MS * speed, 1e3),
                    "runqueue": Mean(0.1 * MS * waiting, 1e2), "collections": Mean(0.2 * MS * waiting, 1e2)},
        "latencies": tuple(8 * MS * speed * (1 + 0.01 * place) for place in range(32)),
        "computed": {"node0": Mean(31 * MS * speed, 1e3), "node1": Mean(31.1 * MS * speed, 1e3)},
    }  # fmt: skip
    return Profile(**{**fields, **changed})


def side(first: int, count: int = 3, **changed: Any) -> list[Profile]:
    """So many runs, numbered from one on."""
    return [profile(first + place, **{key: _copied(value) for key, value in changed.items()}) for place in range(count)]


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
