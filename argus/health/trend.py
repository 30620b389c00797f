"""What stands out in the history of nodes: against a node's own past, and against its peers.

Everything is done on hourly medians, as matrices of nodes and hours with NaN where nothing was measured. What nodes
share (the season, the load of a job that runs on all) is taken away first: of each value the median of the node's peers
in that hour. A change is reported when it is both large (``Watch.change``) and beyond what the node, or its peers, do
anyway: robust z-scores by the median absolute deviation (Iglewicz and Hoaglin, 1993), which half of the values may not
upset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from argus.model.statistics import NORMAL, mad, medians

Matrix: TypeAlias = npt.NDArray[np.float64]

WINDOW = 12
"""Hours that are compared: a job's short rest does not matter, and a change is seen within a day."""
LEAST = 4
"""Values in the window below which nothing is reported."""
PAST = 28 * 24
"""Hours of the past that count. The older half of what is there is compared with: a slow change is seen, too."""
SCORE_OWN = 6.0
SCORE_PEERS = 6.0
"""Robust standard deviations. 200 nodes with 8 figures make 1,600 tests an hour: 5 would be passed by chance each month
if tails were normal, and they are heavier."""


@dataclass(frozen=True)
class Watch:
    """A figure that shows degradation.

    Attributes:
        bad: 1: high is bad; -1: low is.
        change: From what on a change matters: a share of the value, or units of the figure where ``units``.
        units: See there.
        meaning: What a change means, for people.
    """

    bad: int
    change: float
    units: bool
    meaning: str


WATCHED: dict[str, Watch] = {
    "gpu_clocks.busy_clock_mhz": Watch(-1, 0.03, False, "its clock under load"),
    "gpu_heat.core_c": Watch(1, 6.0, True, "its temperature"),
    "gpu_heat.memory_c": Watch(1, 6.0, True, "its memory's temperature"),
    "disk_slow.mean_s": Watch(1, 1.0, False, "the time of a disk operation"),
    "gpu.count": Watch(-1, 0.5, True, "the number of its GPUs"),
    "memory.total_gib": Watch(-1, 0.01, False, "its memory"),
    "infiniband.rate_gbit": Watch(-1, 0.1, False, "the rate of its port"),
    "link.speed_gbit": Watch(-1, 0.1, False, "the speed of its link"),
    "gpu_pcie.width": Watch(-1, 0.1, False, "its PCIe width"),
    "probe_memory.copy_gb_per_s": Watch(-1, 0.07, False, "its memory bandwidth"),
    "probe_cpu.operations_per_s": Watch(-1, 0.07, False, "the speed of a CPU thread"),
    "probe_disk.write_s": Watch(1, 1.0, False, "the time of a synchronous write"),
    "probe_gpu.gemm_tflops": Watch(-1, 0.05, False, "the rate at which it multiplies"),
    "probe_gpu.copy_gb_per_s": Watch(-1, 0.05, False, "its copy bandwidth"),
    "probe_gpu.device_gb_per_s": Watch(-1, 0.05, False, "its memory bandwidth"),
    "probe_loopback.gb_per_s": Watch(-1, 0.15, False, "the speed of TCP inside the node"),
}
COUNTERS: dict[str, float] = {
    "gpu_ecc.corrected_total": 50,
    "gpu_pcie.replays_total": 100,
    "gpu_nvlink.errors_total": 2,
    "gpu_nvlink.crc_total": 1000,
    "link_errors.errors_total": 100,
    "link_errors.drops_total": 10000,
    "infiniband.symbol_error_total": 20,
    "infiniband.out_of_sequence_total": 1000,
    "edac.corrected_total": 20,
    "devlink.errors_total": 2,
}
"""Counters with the rise of a day from which on it matters, where peers do not have it."""
RATIO = 10.0
"""So many times its peers' and its own usual rise, a counter of a node stands out."""


@dataclass(frozen=True)
class Deviation:
    """A node's figure that stands out.

    Attributes:
        node: Row of the matrix.
        how: ``past`` or ``peers``, or both by ``+``.
        value: Now: median of the window; of counters the rise of a day.
        usual: Its own past, or that of its peers.
        score: Robust standard deviations; of counters the ratio.
    """

    node: int
    how: str
    value: float
    usual: float
    score: float


def deviations(values: Matrix, watch: Watch) -> list[Deviation]:
    """Nodes whose newest hours stand out.

    Args:
        values: Hourly medians of nodes of one kind, (nodes, hours), the newest hour last; NaN: nothing measured.
        watch: What is bad.
    """
    values = values[:, -PAST - WINDOW :]
    nodes, hours = values.shape
    own = values - _others(values)
    alone = np.asarray(np.isnan(own).all(1))
    own = np.where(alone[:, None], values, own)
    now, raw_now = medians(own[:, -WINDOW:]), medians(values[:, -WINDOW:])
    enough = (~np.isnan(own[:, -WINDOW:])).sum(1) >= LEAST
    past, raw_past = own[:, : max(hours - 2 * WINDOW, 0)], values[:, : max(hours - 2 * WINDOW, 0)]
    half = max(past.shape[1] // 2, min(past.shape[1], 24))
    usual, raw_usual = medians(past[:, :half]), medians(raw_past[:, :half])
    known = (~np.isnan(past[:, :half])).sum(1) >= 12
    noise = _block_noise(past[:, : max(half, 4 * WINDOW)])
    level = np.abs(raw_usual)
    least = np.full(nodes, watch.change) if watch.units else watch.change * level
    with np.errstate(invalid="ignore", divide="ignore"):
        moved, raw_moved = (now - usual) * watch.bad, (raw_now - raw_usual) * watch.bad
        # Against few peers a change of theirs shows as one of this node's: its own values must have moved as well.
        score_own = moved / np.maximum(noise, least / 20)
        by_past = known & enough & (moved >= least) & (raw_moved >= least / 2) & (score_own >= SCORE_OWN)
        least_peers = np.full(nodes, watch.change) if watch.units else watch.change * np.abs(raw_now)
        score_peers, center = _peer_scores(np.where(enough, raw_now, np.nan), noise, least_peers, watch)
        by_peers = enough & ((raw_now - center) * watch.bad >= least_peers) & (score_peers >= SCORE_PEERS)
    deviating = []
    for node in np.flatnonzero(by_past | by_peers):
        how = "+".join(name for name, hit in (("past", by_past[node]), ("peers", by_peers[node])) if hit)
        reference = raw_usual[node] if by_past[node] else center[node]
        score = max(score_own[node] if by_past[node] else 0.0, score_peers[node] if by_peers[node] else 0.0)
        deviating.append(Deviation(int(node), how, float(raw_now[node]), float(reference), float(score)))
    return deviating


def rising(counts: Matrix, least: float) -> list[Deviation]:
    """Nodes whose counter rises as no peer's does.

    Args:
        counts: The counter's newest value in each hour, (nodes, hours); NaN: not read.
        least: The rise of a day that matters.
    """
    if counts.shape[1] < 2:
        return []
    filled = _forward(counts)
    steps = np.diff(filled, axis=1)
    rises = np.nan_to_num(np.where(steps < 0, filled[:, 1:], steps))
    day = rises[:, -24:].sum(1)
    before = rises[:, :-24]
    days = before.shape[1] // 24
    own = (
        np.median(before[:, before.shape[1] - days * 24 :].reshape(len(counts), days, 24).sum(2), 1)
        if days
        else 0 * day
    )
    deviating = []
    for node, rise in enumerate(day):
        others = np.delete(day, node)
        usual = max(float(np.quantile(others, 0.9)) if len(others) >= 3 else 0.0, float(own[node]))
        if rise >= least and rise >= RATIO * (usual + 1):
            deviating.append(
                Deviation(node, "peers" if len(others) >= 3 else "past", float(rise), usual, rise / (usual + 1))
            )
    return deviating


def busy_share(counts: Matrix, busy: npt.NDArray[np.bool_]) -> float:
    """Which share of a counter's rise of the last day fell into hours in which jobs ran; NaN: no rise.

    Args:
        counts: One node's, (hours,).
        busy: Whether jobs ran, for the same newest hours.
    """
    steps = np.clip(np.nan_to_num(np.diff(_forward(counts[None, -25:]), axis=1))[0], 0, None)
    total = steps.sum()
    return float(steps[busy[len(busy) - len(steps) :]].sum() / total) if total else float("nan")


def held(values: Matrix, hours: int) -> Matrix:
    """Each value, until there is a new one, for so many hours at most; (nodes, hours), NaN: nothing measured."""
    place = np.arange(values.shape[1])
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, place), axis=1)
    out: Matrix = np.take_along_axis(values, np.maximum(last, 0), 1)
    return np.where((last >= 0) & (place - last < hours), out, np.nan)


def _forward(values: Matrix) -> Matrix:
    """NaN replaced by the last value before it."""
    place = np.where(np.isnan(values), 0, np.arange(values.shape[1]))
    filled: Matrix = np.take_along_axis(values, np.maximum.accumulate(place, axis=1), 1)
    return filled


def _others(values: Matrix) -> Matrix:
    """For each node and hour the median of the other nodes; of many, that of all is as good."""
    nodes = len(values)
    if nodes >= 12:
        return np.broadcast_to(medians(values, 0), values.shape)
    out = np.full(values.shape, np.nan)
    for node in range(nodes if nodes > 1 else 0):
        out[node] = medians(np.delete(values, node, 0), 0)
    return out


def _block_noise(past: Matrix) -> Matrix:
    """How far medians of a window stray, the correlation of hours and days in it: from their changes over half a day,
    two days and four, of which a steady drift is taken away, since that is what is to be found."""
    blocks = past.shape[1] // WINDOW
    noise = np.full(len(past), np.inf)
    if blocks < 3:
        return noise
    levels = medians(past[:, past.shape[1] - blocks * WINDOW :].reshape(len(past), blocks, WINDOW))
    for lag in (1, 4, 8):
        if lag == 1 or blocks >= lag + 4:
            change = levels[:, lag:] - levels[:, :-lag]
            strays = NORMAL / np.sqrt(2) * medians(np.abs(change - medians(change)[:, None]))
            noise = strays if lag == 1 else np.fmax(noise, strays)
    return noise


def _peer_scores(now: Matrix, noise: Matrix, least: Matrix, watch: Watch) -> tuple[Matrix, Matrix]:
    """Robust z of each node against the others, and their median. NaN with fewer than three others to compare with."""
    score, center = np.full(len(now), np.nan), np.full(len(now), np.nan)
    for node, value in enumerate(now):
        others = np.delete(now, node)
        others = others[~np.isnan(others)]
        if np.isnan(value) or len(others) < 3:
            continue
        center[node] = np.median(others)
        spread = mad(others, float(center[node]))
        # The MAD of n values is itself uncertain, by a factor of about 1 + 2/n for few.
        spread *= 1 + 2 / len(others)
        own = noise[node] if np.isfinite(noise[node]) else 0.0
        score[node] = (value - center[node]) * watch.bad / max(spread, own, least[node] / 8)
    return score, center
