"""Step times of the whole job: how long, and whether every rank became slower from a step on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.iteration.changes import STEEPEST, Detector, powers
from argus.model.statistics import MEDIAN, median_deviation, order_error, share_in_order

Float = NDArray[np.float64]

REGRESSION = 0.10
"""Least growth of the step time that counts; GREYHOUND keeps change points of at least 10 % as well (ATC '25)."""
MIN_STEPS = 10
"""Steps that must lie before and after: GREYHOUND drops change points closer than 10 iterations."""
NOISE_RATIO = 4.0
"""The jump must be at least this many standard errors of the difference of the two means: one in 30,000 by chance, and
the position was searched for, which costs two orders of magnitude of it."""


RANK_SUM = 5.0
"""Standard errors by which the share of (earlier, later) pairs in order must exceed one half (Mann-Whitney): means are
moved by a few spikes, ranks are not."""
MISSED = 3.0
"""Standard errors beyond what is asked for by which growth is found 9 times of 10, in 40 to 400 independent steps (a
test has it)."""
SEPARATE = 0.99
"""Share of ordered pairs that is enough with few steps: 10 against 10 in full order are one in 180,000 by chance."""
LEVEL_STEPS = 11
"""Steps whose median is the level at the middle one: five in a row that take 20 times as long (warm-up, evaluation,
restart) do not move it, nor do they the ten on either side of a change."""
FENCE = 4.45
"""MADs off that level (3 standard deviations of normal values) beyond which a step counts no more."""
SHARP = 0.75
"""Part of the growth that lies between the :data:`MIN_STEPS` steps on either side of a sudden change; of a rise that
takes longer than 13 of them it is less."""


RISE_PARTS, RISE_PLACES = 256, 48
"""Parts of a series whose means a rise is fitted to, and places where it may begin and end."""


@dataclass(frozen=True)
class Regression:
    """Every rank slower from a step on.

    Attributes:
        index: First slow step, an index into the durations.
        before_ns: Median step time before.
        after_ns: Median step time from then on.
        confidence: Share of pairs (a step before, a step after) of which the later is slower, 0 to 1.
    """

    index: int
    before_ns: float
    after_ns: float
    confidence: float


def find_regression(durations: Float, *, least: float = REGRESSION, errors: float = RANK_SUM) -> Regression | None:
    """The newest lasting growth of the step time.

    Splits the log durations, clipped so that single spikes do not count, where two means fit best; splits the two parts
    again as long as they differ; then compares the last stretch with the best earlier one. A job that was slow and is
    fast again has no regression.

    Step times may wander or swing (load that follows the hour, clocks that follow the temperature): neighbouring steps
    are alike then, and carry as much information as fewer independent ones. A level that came slowly, and that was
    reached and left again before, is such a swing.

    Args:
        durations: Job step times in order, shape (steps,), ns.
        least: Growth that counts.
        errors: Standard errors by which pairs must be in order.

    Returns:
        The regression that the last stretch is in, or None.
    """
    if len(durations) < 2 * MIN_STEPS:
        return None
    logs = _without_spikes(np.log(np.maximum(durations, 1.0)), np.log1p(least) / 2)
    cuts = [0, *_splits(logs, 0, np.log1p(least) / 2), len(logs)]
    medians = [float(np.median(durations[a:b])) for a, b in pairwise(cuts)]
    if len(medians) < 2:
        return None
    # Neighbours that differ little are one level: the onset is where the last level began.
    last = len(medians) - 1
    while last > 0 and medians[last - 1] > medians[-1] / (1 + least / 2):
        last -= 1
    if last == 0:
        return None
    onset = cuts[last]
    before = min(medians[:last])
    after = float(np.median(durations[onset:]))
    if after < (1 + least) * before:
        return None
    here, there = logs[onset:], logs[cuts[last - 1] : onset]
    sure = share_in_order(there, here)
    by_chance = order_error(len(there), len(here))
    if sure < SEPARATE and sure - 0.5 < errors * by_chance:
        return None
    residuals, low, high = _residuals(logs, cuts), float(np.log(before)), float(np.log(after))
    # As many steps that their median, of a standard error of 1.25 deviations / sqrt(n), is sure to an eighth of growth.
    width = max(MIN_STEPS, int(np.ceil((8 * MEDIAN * float(np.std(residuals)) / (high - low)) ** 2)))
    if width <= min(onset, len(here)):
        rise = float(np.median(logs[onset : onset + width]) - np.median(logs[onset - width : onset]))
        if rise < SHARP * (high - low):
            if _swung(logs[:onset], low, high, width):
                return None
            # Levels that come slowly are no reason for more than one: what they differ by is wandering, too.
            residuals = _residuals(logs, [0, onset, len(logs)])
    if float(np.mean(here) - np.mean(there)) < errors * _wander(residuals, len(here), len(there)):
        return None
    return Regression(onset, before, after, sure)


def find_growth(durations: Float, *, least: float = REGRESSION) -> Regression | None:
    """:func:`find_regression`, or growth that lasts by the detector that watches running jobs: what came gradually has
    no step at which it parts, and adds up there.

    Args:
        durations: Job step times in order, shape (steps,), ns.
        least: Growth that counts.
    """
    change = find_regression(durations, least=least)
    if change is not None or len(durations) < 2 * MIN_STEPS:
        return change
    if (ramp := _ramp(durations, least)) is not None:
        return ramp
    detector = Detector(1, least=least)
    for step, duration in enumerate(durations[-MOST:].tolist()):
        detector.feed(step, np.array([duration]))
    since, now = int(detector.since[0]), float(detector.newest[0])
    if since < 0 or not now >= 1 + least:
        return None
    before = float(np.exp(detector.best[0]))
    index = max(0, len(durations) - MOST) + since
    sure = float(np.mean(np.median(durations[:index]) < durations[index:])) if index else 0.0
    return Regression(index, before, before * now, sure)


def _ramp(durations: Float, least: float) -> Regression | None:
    """Growth that came gradually and goes on: a level, then a line, where the two fit best (least squares), beyond
    :data:`RANK_SUM` standard errors of the line where steps depend on their neighbours."""
    logs = _without_spikes(np.log(np.maximum(durations, 1.0)), np.log1p(least) / 2)
    count = len(logs)
    at = np.arange(count)
    best: tuple[float, int, Float] | None = None
    for start in np.unique(np.linspace(MIN_STEPS, count - MIN_STEPS, 64).astype(int)).tolist():
        line = np.clip(at - start, 0, None) / (count - 1 - start)
        line = line - line.mean()
        gain = float(line @ logs) ** 2 / float(line @ line)
        if best is None or gain > best[0]:
            best = gain, start, line
    if best is None:
        return None
    _, start, line = best
    power = float(line @ line)
    grown = float(line @ logs) / power
    residuals = logs - logs.mean() - grown * line
    # The mean of n steps errs by std / sqrt(n); the slope of a line of this power by std / sqrt(power).
    error = _wander(residuals, count, count) / 2**0.5 * float(np.sqrt(count / power))
    before, after = float(np.median(durations[:start])), float(np.median(durations[-MIN_STEPS:]))
    low, high = np.log(before), np.log(max(after, 1.0))
    if grown < np.log1p(least) or grown < RANK_SUM * error or after < (1 + least) * before:
        return None
    if start >= 2 * MIN_STEPS and _swung(logs[:start], float(low), float(high), MIN_STEPS):
        return None
    # A line that ends before the last step begins elsewhere.
    start = max(MIN_STEPS, _fit_rise(logs, None)[0])
    return Regression(start, before, after, float(np.mean(durations[start:] > before)))


def find_rise(durations: Float, index: int) -> tuple[int, int] | None:
    """The steps within which a growth came gradually: where a level, a line and a level fit better than one sudden
    change at ``index`` does.

    Args:
        durations: Job step times in order, shape (steps,), ns.
        index: What was found as the first slow step; the rise is around it.

    Returns:
        The first step of the rise and the first one after it, indices into the durations; None: it was sudden.
    """
    logs = _without_spikes(np.log(np.maximum(durations, 1.0)), np.log1p(REGRESSION) / 2)
    begin, end = _fit_rise(logs, index)
    return (begin, end) if begin < end else None


def _fit_rise(logs: Float, index: int | None) -> tuple[int, int]:
    """The first step of a rise and the first one after it (least squares); the same step twice for a sudden change, but
    if a rise fits better by :data:`RANK_SUM` standard errors. ``None``: the sudden change is where that fits best."""
    edges = np.unique(np.linspace(0, len(logs), min(len(logs), RISE_PARTS) + 1).astype(int))
    weight = np.diff(edges) / len(logs)
    means = np.add.reduceat(np.exp(logs - np.median(logs)), edges[:-1]) / np.diff(edges)
    middle = (edges[:-1] + edges[1:] - 1) / 2
    places = np.unique(np.linspace(0, len(logs), RISE_PLACES).astype(int))
    first, last = (each.ravel() for each in np.meshgrid(places, places, indexing="ij"))
    long = last - first >= 2 * MIN_STEPS
    if index is not None:
        long &= (first <= index) & (index <= last)
    first, last = first[long], last[long]
    changes = edges[1:-1] if index is None else np.array([index])
    lines = np.clip((middle - first[:, None]) / (last - first)[:, None], 0, 1)
    shapes = np.concatenate([middle >= changes[:, None], lines])
    shapes = shapes - (shapes @ weight)[:, None]
    gains = np.square(shapes @ (weight * means)) / np.maximum(np.square(shapes) @ weight, 1e-12)
    sudden, best = int(np.argmax(gains[: len(changes)])), int(np.argmax(gains))
    left = float(weight @ np.square(means - weight @ means)) - float(gains[best])
    if (gains[best] - gains[sudden]) * len(means) < RANK_SUM**2 * left or best < len(changes):
        return int(changes[sudden]), int(changes[sudden])
    return int(first[best - len(changes)]), int(last[best - len(changes)])


def least_growth(durations: Float) -> float:
    """Growth of the newer half of the steps, as a share, from which on :func:`find_growth` reports nine of ten: less
    does not count, or the steps' own wandering hides it.

    Args:
        durations: Job step times in order, shape (steps,), ns.
    """
    if len(durations) < 2 * MIN_STEPS:
        return float("inf")
    logs = _without_spikes(np.log(np.maximum(durations, 1.0)), np.log1p(REGRESSION) / 2)
    half = len(logs) // 2
    error = _wander(_residuals(logs, [0, half, len(logs)]), half, len(logs) - half)
    return float(np.expm1(max(np.log1p(REGRESSION), RANK_SUM * error) + MISSED * error))


def _without_spikes(logs: Float, least: float) -> Float:
    """Logs of step times without single spikes, shape (steps,): at most :data:`FENCE` MADs, or ``least``, off the level
    around them."""
    from scipy.ndimage import median_filter  # 50 ms, which a start does without

    half = LEVEL_STEPS // 2
    level = np.pad(median_filter(logs, LEVEL_STEPS)[half:-half], half, mode="edge")
    reach = max(least, FENCE * median_deviation(logs - level, 0.0))
    return np.asarray(np.clip(logs, level - reach, level + reach))


def _residuals(logs: Float, cuts: list[int]) -> Float:
    """Residuals of a line fitted to each stretch, shape (steps,)."""
    parts = []
    for begin, end in pairwise(cuts):
        at = np.arange(end - begin) - (end - begin - 1) / 2
        here = logs[begin:end] - np.mean(logs[begin:end])
        parts.append(here - at * float(at @ here) / max(float(at @ at), 1.0))
    return np.concatenate(parts)


def _wander(residuals: Float, one: int, other: int) -> float:
    """Standard error of the difference of two means, of so many steps each, where steps depend on their neighbours as
    in an autoregressive process of the first order."""
    alike = float(residuals[1:] @ residuals[:-1]) / max(float(residuals @ residuals), 1e-30)
    # Two standard errors of a correlation of independent steps are none.
    alike = float(np.clip(alike - 2 / np.sqrt(len(residuals)), 0.0, 0.99))
    fewer = (1 - alike) / (1 + alike)
    return float(np.std(residuals)) * float(np.sqrt(1 / max(one * fewer, 1.0) + 1 / max(other * fewer, 1.0)))


def _swung(logs: Float, low: float, high: float, width: int) -> bool:
    """Whether step times were near ``high`` (log) for ``width`` steps before, and then near ``low`` for as many."""
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(logs, width)[:: width // 5], axis=1)
    lows = np.flatnonzero(smooth <= low + (high - low) / 4)
    return bool(len(lows)) and bool(np.any(smooth[: lows[-1]] >= high - (high - low) / 4))


def _splits(logs: Float, offset: int, least: float) -> list[int]:
    count = len(logs)
    if count < 2 * MIN_STEPS:
        return []
    places = np.arange(MIN_STEPS, count - MIN_STEPS + 1)
    sums = np.cumsum(logs)
    left = sums[places - 1] / places
    right = (sums[-1] - sums[places - 1]) / (count - places)
    gain = (right - left) ** 2 * places * (count - places)
    best = int(np.argmax(gain))
    place = int(places[best])
    jump = abs(float(right[best] - left[best]))
    spread = float(np.sqrt((np.var(logs[:place]) * place + np.var(logs[place:]) * (count - place)) / count))
    error = spread * float(np.sqrt(1 / place + 1 / (count - place)))
    if jump < least or jump < NOISE_RATIO * error:
        return []
    return [
        *_splits(logs[:place], offset, least),
        offset + place,
        *_splits(logs[place:], offset + place, least),
    ]


MOST = 20_000
"""Newest steps that are fed to the detector of running jobs one by one: 1.5 s."""
VARIES = 0.05
"""Scatter of the step time (MAD over median) from which it is asked what the work explains; healthy steps of equal work
scatter by less."""


def without_work(durations: Float, work: Float) -> Float:
    """Step times less what the work of each step explains: as if each had the typical work.

    Args:
        durations: Shape (steps,), ns.
        work: Measures of each step's work, above 0, shape (steps, measures); NaN: not known.

    Returns:
        Shape (steps,), ns; as they are where the work explains nothing.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(np.where(work > 0, work, np.nan))
    power = powers(np.log(np.maximum(durations, 1.0))[None], logs[None])[0]
    rest: Float = np.asarray(durations, np.float64).copy()
    for which in np.flatnonzero(power).tolist():
        more = logs[:, which] - np.nanmedian(logs[:, which])
        rest = np.asarray(rest * np.exp(-power[which] * np.nan_to_num(more)))
    return rest


def more_to_do(change: Regression, work: Float) -> tuple[int, float] | None:
    """Whether the work of a step grew when steps became longer, by so much that it explains it: time grows with the
    square of the work at most.

    Args:
        change: In the steps that ``work`` is of.
        work: As of :func:`without_work`.

    Returns:
        Which measure, and by which factor it grew; None: none explains it.
    """
    grown = change.after_ns / change.before_ns
    enough = min(MIN_STEPS, change.index, len(work) - change.index)
    best: tuple[int, float] | None = None
    for which in range(work.shape[1]):
        before, after = work[: change.index, which], work[change.index :, which]
        before, after = before[np.isfinite(before)], after[np.isfinite(after)]
        if len(before) < enough or len(after) < enough:
            continue
        factor = float(np.median(after) / max(float(np.median(before)), 1e-9))
        if factor**STEEPEST * (1 + REGRESSION / 2) >= grown and (best is None or factor > best[1]):
            # What varied as much before, without steps being longer, is no growth.
            by_chance = float(np.quantile(before, 0.95))
            if float(np.median(after)) > by_chance and factor > 1:
                best = which, factor
    return best
