"""Changes of step times detected online: false alarms on healthy series against what is allowed, and how soon faults
show.

Healthy series have what real ones have: heavy tails, steps that hang together, warm-up, evaluations, checkpoints,
sequence lengths that vary. The reference on the same series is a sliding window: the mean of the newest 50 steps over
the shortest of the last 50 means is above 1.05 (how EROICA is triggered). Rows of faults are steps from the onset to
when it is reported. The ratio is the reference's false alarms over ours (half an alarm where there was none).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.iteration.changes import Detector
from benches import Result

Float = NDArray[np.float64]
SERIES, STEPS, ONSET = 250, 2000, 600
CHANGES = ("step", "ramp", "jitter")


def _dependent(rng: np.random.Generator, carries: float, spread: float) -> Float:
    noise = rng.standard_normal((SERIES, STEPS)) * spread * np.sqrt(1 - carries**2)
    for step in range(1, STEPS):
        noise[:, step] += carries * noise[:, step - 1]
    return np.asarray(np.exp(noise))


def _quiet(rng: np.random.Generator, spread: float = 0.02) -> Float:
    return np.asarray(np.exp(spread * rng.standard_normal((SERIES, STEPS))))


def _warm_up(rng: np.random.Generator) -> Float:
    return np.asarray(_quiet(rng) * (1 + 2 * np.exp(-np.arange(STEPS) / 20)))


def _now_and_then(rng: np.random.Generator) -> Float:
    """A checkpoint every 77 steps, an evaluation of 15 steps every 200."""
    times = _quiet(rng)
    times[:, ::77] += 3
    times[:, np.arange(STEPS) % 200 >= 185] *= 2
    return times


HEALTHY: dict[str, Callable[[np.random.Generator], Float]] = {
    "1 % of noise": lambda rng: _quiet(rng, 0.01),
    "15 % of noise": lambda rng: _quiet(rng, 0.15),
    "Student's t with 3 degrees": lambda rng: np.exp(0.05 * rng.standard_t(3, (SERIES, STEPS))),
    "Pareto tail": lambda rng: 1 + 0.05 * rng.pareto(2.5, (SERIES, STEPS)),
    "autocorrelation 0.5": lambda rng: _dependent(rng, 0.5, 0.05),
    "autocorrelation 0.8": lambda rng: _dependent(rng, 0.8, 0.05),
    "warm-up": _warm_up,
    "checkpoints, evaluations": _now_and_then,
}


def _alarms(times: Float, work: Float | None = None) -> tuple[int, list[int], float]:
    """False alarms, the steps in which the first of each series was reported, and the time it took, s."""
    detector = Detector(len(times), alarms=len(times), work=0 if work is None else work.shape[2])
    first_alarm: dict[int, int] = {}
    count = 0
    began = time.perf_counter()
    for step in range(times.shape[1]):
        for event in detector.feed(step, times[:, step], None if work is None else work[:, step]):
            if event.kind in CHANGES:
                count += 1
                first_alarm.setdefault(event.series, step)
    return count, list(first_alarm.values()), time.perf_counter() - began


def _sliding(times: Float) -> int:
    """How often the reference's rule begins to hold."""
    sums = np.cumsum(np.pad(times, ((0, 0), (1, 0))), axis=1)
    means = (sums[:, 50:] - sums[:, :-50]) / 50
    best = np.lib.stride_tricks.sliding_window_view(means, 50, axis=1).min(axis=2)
    hit = means[:, 49:] > 1.05 * best
    return int((hit[:, 1:] & ~hit[:, :-1]).sum())


def run(rounds: int) -> Result:
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {}
    ours = theirs = took = 0.0
    fed = 0
    for seed in range(min(rounds, 3)):
        rng = np.random.default_rng(seed)
        million = SERIES * STEPS / 1e6
        for name, make in HEALTHY.items():
            times = make(rng)
            count, _, seconds = _alarms(times)
            rows.setdefault(f"{name}: alarms a million", []).append(count / million)
            reference = _sliding(times)
            rows.setdefault(f"{name}: sliding window", []).append(reference / million)
            ours, theirs, took, fed = ours + count, theirs + reference, took + seconds, fed + times.size
        length = np.exp(0.3 * rng.standard_normal((SERIES, STEPS)))
        times = (0.3 + 0.7 * length**1.2) * _quiet(rng, 0.01)
        for name, work in (("lengths that are known", length[:, :, None]), ("lengths that are not", None)):
            count, _, _ = _alarms(times, work)
            rows.setdefault(f"{name}: alarms a million", []).append(count / million)
        some = slice(0, 100)
        for growth in (1.06, 1.1, 1.3):
            slow = _quiet(rng)[some, :1200]
            slow[:, ONSET:] *= growth
            _, alarms, _ = _alarms(slow)
            rows.setdefault(f"+{growth - 1:.0%} at once: steps to report", []).append(float(np.median(alarms)) - ONSET)
            more[f"found_{growth}"] = len(alarms) / 100
        ramp = _quiet(rng)[some] * np.exp(np.maximum(np.arange(STEPS) - ONSET, 0) * 2e-4)
        _, alarms, _ = _alarms(ramp)
        rows.setdefault("0.02 % a step: steps to report", []).append(float(np.median(alarms)) - ONSET)
        more["found_ramp"] = len(alarms) / 100
    more["us_a_step_and_series"] = took / fed * 1e6
    return Result(
        "changes of step times, 1 false alarm in a million steps allowed", "", rows, theirs / max(ours, 0.5), more
    )
