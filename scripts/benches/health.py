"""Degrading nodes found in 30 days of history of 200: argus health's trends against three sigma of a node's past.

Four kinds of nodes: 160, 30, 6 and 4 peers. A third of the nodes gets one fault: a clock, temperature, disk or
bandwidth that gets worse at once or over days, or a counter that starts to rise while jobs run. Values have what real
ones have: offsets between nodes, a day's rhythm, jobs that come and go, heavy tails, bursts, missing days. A fault is
due when its effect has reached twice what matters (``Watch.change``, ``COUNTERS``); found is one that is reported
within 24 hours, of which the node has rows, after that. A false alarm is a node and day on which something is reported
that is not there. All values are made up: this measures the method on such values, not how real nodes degrade.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from argus.health.trend import COUNTERS, WATCHED, Matrix, deviations, rising
from argus.model.statistics import medians
from benches import Result

KINDS = (160, 30, 6, 4)
HOURS = 30 * 24
EVERY = 6
FIRST = 3 * 24
CLOCK, HEAT = "gpu_clocks.busy_clock_mhz", "gpu_heat.core_c"
DISK, COPY = "disk_slow.mean_s", "probe_gpu.copy_gb_per_s"
CRC, ECC = "gpu_nvlink.crc_total", "gpu_ecc.corrected_total"


@dataclass(frozen=True)
class Fault:
    """What was planted, where; the hours when it begins, is due, and is to be reported at the latest."""

    node: int
    figure: str
    begins: int
    due: int
    latest: int


def _history(nodes: int, rng: np.random.Generator, least_faults: int) -> tuple[dict[str, Matrix], list[Fault]]:
    shape = nodes, HOURS
    hour = np.arange(HOURS)
    job = np.repeat(rng.random((nodes, HOURS // 24 * 3)), 8, 1)[:, :HOURS]  # three jobs a day and node
    busy = job > 0.25
    tail = lambda size: size * rng.standard_t(3, shape)  # noqa: E731
    values = {
        CLOCK: 1900 + rng.normal(0, 8, (nodes, 1)) - 60 * (job - 0.6) + tail(5),
        HEAT: 58 + rng.normal(0, 2.5, (nodes, 1)) + 2 * np.sin(hour / 24 * 2 * np.pi) + 6 * job + tail(0.6),
        DISK: 0.004 * np.exp(rng.normal(0, 0.2, (nodes, 1)) + tail(0.15)) * np.where(rng.random(shape) < 0.01, 10, 1),
        COPY: 50 * (1 + rng.normal(0, 0.005, (nodes, 1))) * (1 + tail(0.004)),
    }
    rises = {
        CRC: rng.poisson(0.5, shape) * busy * 1.0,
        ECC: (rng.random(shape) < 0.002) * rng.poisson(8, shape) * 1.0,
    }
    away = np.repeat(rng.random((nodes, HOURS // 24)) < 0.02, 24, 1)  # a day's rows are missing
    faults = []
    for node in rng.permutation(nodes)[: max(least_faults, nodes // 3)]:
        figure = str(rng.choice([CLOCK, HEAT, DISK, COPY, CRC, ECC]))
        begins = int(rng.integers(5 * 24, 20 * 24))
        if figure in rises:
            rises[figure][node, begins:] += (
                rng.poisson(float(rng.uniform(100, 1000)), HOURS - begins) * busy[node, begins:]
            )
            day = np.convolve(rises[figure][node], np.ones(24))[:HOURS]
            due = begins + int(np.argmax(day[begins:] >= 2 * COUNTERS[figure])) + 1
        else:
            watch = WATCHED[figure]
            ramp = int(rng.choice([1, 1, 72, 168]))
            size = float(rng.uniform(2.5, 6)) * watch.change
            effect = size * np.clip((hour - begins) / ramp, 0, 1)
            due = begins + int(np.ceil(ramp * 2 * watch.change / size))
            values[figure][node] = values[figure][node] + watch.bad * effect * (
                1.0 if watch.units else medians(values[figure][node])
            )
        latest = due + int(np.argmax(np.cumsum(~away[node, due:]) >= 24)) + 1
        faults.append(Fault(int(node), figure, begins, due, latest))
    values[CLOCK][~busy] = np.nan
    values[COPY][rng.random(shape) < 0.4] = np.nan
    everything = values | {name: np.cumsum(rise, 1) for name, rise in rises.items()}
    for matrix in everything.values():
        matrix[away] = np.nan
    return everything, faults


def _ours(figure: str, values: Matrix) -> list[int]:
    if figure in COUNTERS:
        return [found.node for found in rising(values, COUNTERS[figure])]
    return [found.node for found in deviations(values, WATCHED[figure])]


def _three_sigma(figure: str, values: Matrix) -> list[int]:
    if figure in COUNTERS:
        values = np.diff(np.nan_to_num(values), axis=1)
    bad = WATCHED[figure].bad if figure in WATCHED else 1
    past, now = values[:, :-12], values[:, -12:]
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean of nothing is NaN
        score = bad * (np.nanmean(now, 1) - np.nanmean(past, 1)) / (np.nanstd(past, 1) / np.sqrt(12))
    return [int(node) for node in np.flatnonzero(score > 3)]


def _judge(seed: int) -> dict[str, tuple[int, int, int]]:
    """(planted, found in time, false node-days) of ours and the reference."""
    rng = np.random.default_rng(seed)
    totals = {"ours": [0, 0, 0], "three sigma": [0, 0, 0]}
    for nodes in KINDS:
        history, faults = _history(nodes, rng, 1)
        for name, method in (("ours", _ours), ("three sigma", _three_sigma)):
            alarms: dict[tuple[int, str], list[int]] = {}
            for end in range(FIRST, HOURS + 1, EVERY):
                for figure, values in history.items():
                    for node in method(figure, values[:, :end]):
                        alarms.setdefault((node, figure), []).append(end)
            real = {(fault.node, fault.figure): fault for fault in faults}
            false = {
                (node, end // 24)
                for (node, figure), ends in alarms.items()
                for end in ends
                if (node, figure) not in real or end <= real[node, figure].begins
            }
            # Reported before it is due is as good, once it has begun.
            intime = [
                fault
                for key, fault in real.items()
                if any(fault.begins < end <= fault.latest for end in alarms.get(key, []))
            ]
            for place, count in enumerate((len(faults), len(intime), len(false))):
                totals[name][place] += count
    return {name: (counts[0], counts[1], counts[2]) for name, counts in totals.items()}


def run(rounds: int) -> Result:
    planted, rows = (
        0,
        {f"{w}, {name}": [] for name in ("ours", "three sigma") for w in ("found %", "false /1000 node-days")},
    )
    node_days = sum(KINDS) * HOURS / 24
    for seed in range(rounds):
        for name, (faults, found, false) in _judge(seed).items():
            rows[f"found %, {name}"].append(100 * found / faults)
            rows[f"false /1000 node-days, {name}"].append(1000 * false / node_days)
            planted += faults if name == "ours" else 0
    ours, theirs = (float(np.mean(rows[f"false /1000 node-days, {name}"])) for name in ("ours", "three sigma"))
    return Result(
        f"{planted} faults planted in {rounds} times {sum(KINDS)} nodes x 30 days",
        "",
        rows,
        theirs / max(ours, 0.1),
        {"found_percent": float(np.mean(rows["found %, ours"])), "false_per_1000_node_days": ours},
    )
