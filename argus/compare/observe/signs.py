"""Signs that runs of one workload do not behave alike, each with its chance if they do. Pure functions over arrays.

A sign needs both: a chance below the level it is given, and an effect of :data:`LEAST` or more, so that many runs do
not make a trifle a finding. Which sign explains which is :data:`EXPLAINS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from argus.compare.observe import nulls
from argus.compare.observe.series import Array, Series, arm_numbers

MARGIN = 0.05
"""Coefficient of variation, and difference between arms, up to which runs count as alike by default: run-to-run
variation of 1 to 3 % is usual on a machine that nothing was done for."""
LEAST = 0.01
"""Share of the value that a drift, a mode or a period must amount to."""
OUTLIER = 2.0
"""Margins by which an outlier lies above the median, at least."""
TAIL_TIMES = 5.0
"""Times the median beyond which a sample is in the tail, at least."""
TAIL_WIDTHS = 10.0
"""The same in widths of the body, from the median to the 90th percentile: a wide body has a long tail by nature."""
TAIL_RATE = 1e-3
"""Share of samples in that tail that is usual: a lognormal body with sigma 1 has 5e-4."""
USUAL_ERRORS = 1e-3
"""Share of requests that may fail, or be tried again, without a sign of it."""


@dataclass(frozen=True)
class Sign:
    """Something that runs alike do not show.

    Attributes:
        kind: Of :data:`KINDS`.
        figure: In which it shows.
        p: Chance of it where runs are alike.
        effect: How much, as a share of the value (0.1: 10 %); of a tail the share of samples in it.
        text: In words.
        runs: Numbers of the runs concerned, in the order of execution; empty: all.
    """

    kind: str
    figure: str
    p: float
    effect: float
    text: str
    runs: tuple[int, ...] = ()


def drift(series: Series, margin: float) -> Sign | None:
    """A trend of the value over the order of runs: Kendall's tau, with the size of it by the Theil-Sen slope."""
    from scipy.stats import kendalltau, theilslopes

    values = series.residuals()
    if len(values) < 4 or not np.ptp(values):
        return None
    span, slope = float(np.ptp(series.positions)), float(theilslopes(values, series.positions)[0])
    p = _less_sure(float(kendalltau(series.positions, values).pvalue), values - slope * series.positions)
    effect = math.expm1(slope * span)
    if abs(effect) < LEAST:
        return None
    way = "slower" if effect > 0 else "faster"
    return Sign("drift", series.name, p, effect, f"became {abs(effect):.1%} {way} from the first run to the last")


def shift(series: Series, margin: float) -> Sign | None:
    """Slower or faster from some run on: the split of ranks that stands out most, against random orders."""
    from scipy.stats import rankdata

    values = series.residuals()
    p, before = nulls.shift_chance(rankdata(values))
    if not before:
        return None
    effect = math.expm1(float(np.median(values[before:]) - np.median(values[:before])))
    if abs(effect) < LEAST:
        return None
    later = np.arange(len(values)) >= before
    p = _less_sure(p, values - np.where(later, np.median(values[later]), np.median(values[~later])))
    way = "slower" if effect > 0 else "faster"
    text = f"{abs(effect):.1%} {way} from run {series.positions[before] + 1} on"
    return Sign("shift", series.name, p, effect, text, _numbers(series, np.arange(before, len(values))))


def two_modes(series: Series, margin: float) -> Sign | None:
    """Runs in two groups with nothing between them: the widest gap against laws with one mode."""
    values = series.residuals()
    p, below = nulls.widest_gap(values)
    if not below:
        return None
    ordered = np.argsort(values, kind="stable")
    low, high = ordered[:below], ordered[below:]
    effect = math.expm1(float(np.median(values[high]) - np.median(values[low])))
    if effect < LEAST:
        return None
    text = f"{len(high)} of {len(values)} runs are {effect:.1%} slower than the others, with none between"
    return Sign("two_modes", series.name, p, effect, text, _numbers(series, high))


def periodic(series: Series, margin: float) -> Sign | None:
    """Every k-th run slower: the contrast of ranks that stands out most, against random orders."""
    from scipy.stats import rankdata

    values = series.residuals()
    if len(values) < 2 * nulls.LEAST_IN_PHASE:
        return None
    p, period, phase = nulls.period_chance(rankdata(values), tuple(series.positions.tolist()))
    if not period:
        return None
    inside = series.positions % period == phase
    effect = math.expm1(float(np.median(values[inside]) - np.median(values[~inside])))
    if effect < LEAST:
        return None
    text = f"every {_ordinal(period)} run is {effect:.1%} slower than the others"
    return Sign("periodic", series.name, p, effect, text, _numbers(series, np.flatnonzero(inside)))


def outliers(series: Series, margin: float) -> Sign | None:
    """Single runs far above the others: the largest distance from the median, against laws up to Student's t with 4
    degrees of freedom."""
    values = series.residuals()
    if len(values) < 5:
        return None
    statistic = float(nulls.outlier_statistic(values[None])[0])
    far = math.log1p(OUTLIER * margin)
    out = np.flatnonzero(values - np.median(values) > far)
    if not len(out):
        return None
    effect = math.expm1(float(values.max() - np.median(values)))
    p = nulls.outlier_chance(statistic, len(values))
    text = f"{len(out)} of {len(values)} runs took far longer, the longest {effect + 1:.1f} times the median"
    return Sign("outliers", series.name, p, effect, text, _numbers(series, out))


def spread(series: Series, margin: float) -> Sign | None:
    """Runs that vary by more than the margin: chi-square of the variance within arms."""
    from scipy.stats import chi2

    found = series.spread()
    if not found > margin:
        return None
    p = float(chi2.sf(series.df() * (found / margin) ** 2, series.df()))
    return Sign("spread", series.name, p, found, f"runs vary by {found:.1%}, more than the margin of {margin:.1%}")


def tail(series: Series, margin: float) -> Sign | None:
    """Rare samples many times longer than the body, in two runs at least: binomial, over the usual share."""
    from scipy.stats import binom

    found, total, hit = 0, 0, list[int]()
    for arm in np.unique(series.arms):
        members = np.flatnonzero(series.arms == arm).tolist()
        pooled = np.concatenate([series.samples[run] for run in members])
        if not len(pooled):
            continue
        middle, high = np.quantile(pooled, [0.5, 0.9])
        limit = max(TAIL_TIMES * middle, middle + TAIL_WIDTHS * (high - middle))
        counts = [int(np.count_nonzero(series.samples[run] > limit)) for run in members]
        found, total = found + sum(counts), total + len(pooled)
        hit += [int(run) for run, count in zip(members, counts, strict=True) if count]
    if len(hit) < min(2, len(series)):
        return None
    p = float(binom.sf(found - 1, total, TAIL_RATE))
    text = f"{found:,} of {total:,} samples ({found / total:.2%}) take {TAIL_TIMES:g} times the median or more"
    return Sign("tail", series.name, p, found / total, text, _numbers(series, np.array(sorted(hit))))


def slows_within(series: Series, margin: float) -> Sign | None:
    """Samples that become slower within each run: t-test over runs, of the last third's median over the first's."""
    from scipy.stats import ttest_1samp

    ratios = series.growth[np.isfinite(series.growth)]
    if len(ratios) < 3:
        return None
    if not np.ptp(ratios):
        ratios = ratios + np.linspace(-1e-9, 1e-9, len(ratios))
    effect = math.expm1(float(ratios.mean()))
    if effect < margin:
        return None
    p = float(ttest_1samp(ratios, 0.0, alternative="greater").pvalue)
    return Sign(
        "slows_within", series.name, p, effect, f"each run becomes {effect:.1%} slower from its start to its end"
    )


def arm_differences(series: Series, margin: float) -> Sign | None:
    """Arms of which one is slower: Welch's t-test of each pair, the chance multiplied by the number of pairs.

    Where arms differ in one number, only more of it that is slower counts (``worse_with_more``).
    """
    from scipy.stats import ttest_ind

    parts = series.by_arm(series.logs())
    numbers = arm_numbers(series.arm_names)
    pairs = list(combinations(sorted(parts), 2))
    best: Sign | None = None
    for one, two in pairs:
        if min(len(parts[one]), len(parts[two])) < 2:
            continue
        if numbers is not None and numbers[one] > numbers[two]:
            one, two = two, one
        effect = math.expm1(float(parts[two].mean() - parts[one].mean()))
        side = "two-sided" if numbers is None else "greater"
        if (abs(effect) if numbers is None else effect) <= margin:
            continue
        p = min(1.0, len(pairs) * _welch(parts[two], parts[one], side, ttest_ind))
        names = series.arm_names[one], series.arm_names[two]
        kind = "arms_differ" if numbers is None else "worse_with_more"
        text = f"arm {names[1]} is {abs(effect):.1%} {'slower' if effect > 0 else 'faster'} than arm {names[0]}"
        if best is None or (p, -abs(effect)) < (best.p, -abs(best.effect)):
            best = Sign(kind, series.name, p, effect, text)
    return best


def _welch(one: Array, two: Array, side: str, ttest_ind: Callable[..., object]) -> float:
    if max(float(np.ptp(one)), float(np.ptp(two))) < 1e-9:
        return 0.0  # no scatter, and apart
    p = float(ttest_ind(one, two, equal_var=False, alternative=side).pvalue)  # type: ignore[attr-defined]
    return 0.0 if math.isnan(p) else p


def errors_of(name: str, errors: Sequence[int], samples: Sequence[int]) -> Sign | None:
    """Errors or retries that runs report, more than :data:`USUAL_ERRORS` of what they did: binomial.

    Args:
        name: errors or retries.
        errors: By run. samples: What went well, by run.
    """
    from scipy.stats import binom

    found, total = sum(errors), sum(samples) + sum(errors)
    if not found:
        return None
    p = float(binom.sf(found - 1, total, USUAL_ERRORS))
    text = f"{found:,} {name} in {total:,} requests ({found / total:.2%})"
    return Sign("errors", name, p, found / total, text)


def _less_sure(p: float, rest: Array) -> float:
    """A two-sided chance of values in a random order, for values that follow one another: the variance of a sum of
    those with an autocorrelation of r is (1 + r) / (1 - r) times as large (Bayley and Hammersley 1946).

    Args:
        p: The chance if they were independent.
        rest: The values without the trend, shape (n,), in order.
    """
    from scipy.stats import norm

    centred = rest - rest.mean()
    total = float(centred @ centred)
    if not total:
        return p
    correlation = min(float(centred[1:] @ centred[:-1]) / total, 0.9)
    if correlation <= 0:
        return p
    score = float(norm.isf(p / 2)) / math.sqrt((1 + correlation) / (1 - correlation))
    return float(2 * norm.sf(score))


def _numbers(series: Series, places: NDArray[np.intp]) -> tuple[int, ...]:
    return tuple(sorted(int(one) for one in series.positions[places]))


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


OF_VALUES = (periodic, drift, shift, two_modes, outliers)
"""Tests that every figure gets, the more specific first."""
OF_SAMPLES = (tail, slows_within)
"""Those of figures with samples within runs."""
EXPLAINS: dict[str, tuple[str, ...]] = {
    "periodic": ("two_modes", "outliers", "spread"),
    "drift": ("two_modes", "spread"),
    "shift": ("two_modes", "spread"),
    "two_modes": ("outliers", "spread"),
    "outliers": ("spread",),
    "tail": ("spread",),
}
"""What a sign leaves to say nothing more: of the same figure."""
KINDS = (
    "failures", "errors", "arms_differ", "worse_with_more", "tail", "periodic", "drift", "shift", "slows_within",
    "two_modes", "outliers", "spread",
)  # fmt: skip
"""All kinds, in the order in which they are reported."""


def applicable(series: Series) -> list[Callable[[Series, float], Sign | None]]:
    """The tests that apply to a figure."""
    tests: list[Callable[[Series, float], Sign | None]] = list(OF_VALUES)
    if series.primary:
        tests.append(spread)
    if series.primary and series.samples:
        tests += OF_SAMPLES
    if series.arms_compared and len(np.unique(series.arms)) > 1:
        tests.append(arm_differences)
    return tests


def signs_of(series: Series, margin: float, level: float) -> list[Sign]:
    """The signs of one figure whose chance is below ``level``, without those that others explain."""
    found = [sign for test in applicable(series) if (sign := test(series, margin)) is not None and sign.p <= level]
    trends = {sign.kind: sign for sign in found if sign.kind in ("drift", "shift")}
    if len(trends) == 2:
        found.remove(trends["drift" if _is_step(series, trends["shift"].runs[0]) else "shift"])
    explained = {kind for sign in found for kind in EXPLAINS.get(sign.kind, ())}
    return in_order([sign for sign in found if sign.kind not in explained])


def _is_step(series: Series, first: int) -> bool:
    """Whether two levels, parted at a run, fit the values better than a line does: smaller sum of absolute errors."""
    values, at = series.residuals(), series.positions
    later = at >= first
    steps = values - np.where(later, np.median(values[later]), np.median(values[~later]))
    line = values - np.polyval(np.polyfit(at, values, 1), at)
    return float(np.abs(steps).sum()) < float(np.abs(line).sum())


def in_order(signs: Sequence[Sign]) -> list[Sign]:
    """Signs in the order in which they are reported."""
    return sorted(signs, key=lambda sign: (KINDS.index(sign.kind), sign.p))
