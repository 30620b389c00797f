"""The rule: whether repeated runs are stable, unstable, dominated by the machine's noise, or too few to say.

* ``unstable``: a sign of :mod:`argus.compare.observe.signs`. All tests of all figures together say so of stable runs in
  at most :data:`FAMILY` of cases (Bonferroni); or some runs failed and some did not.
* ``noise-dominated``: there are signs, or runs vary by more than the margin, but the variation correlates with what
  the machine did besides, and nothing is left of it without that.
* ``stable``: no sign, the upper 95 % bound of the coefficient of variation is within the margin (chi-square), and so is
  the difference of each two arms (two one-sided tests, 5 % each).
* ``inconclusive``: neither, with the number of runs that would decide if they vary as these do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from argus.compare.observe.nulls import covariance_chance
from argus.compare.observe.series import Array, Series, arm_numbers
from argus.compare.observe.signs import MARGIN, Sign, applicable, in_order, signs_of
from argus.model.text import counted as number_of

Status = Literal["stable", "unstable", "noise-dominated", "inconclusive"]
EXIT_CODES: dict[str, int] = {"stable": 0, "unstable": 10, "inconclusive": 12, "noise-dominated": 13}
"""As those of ``argus diagnose`` and ``argus compare``: 10 there is something, 12 it cannot be decided."""
FAMILY = 0.03
"""Chance that runs that are alike are called unstable, of all tests together: so it stays below 5 % where each run has
a third of the deviation of the one before, which no test of 20 runs can rule out."""
EQUIVALENCE = 0.05
"""Chance that runs that vary by the margin, or arms that differ by it, are called stable."""
NOISE = 0.01
"""Chance that a disturbance that has no effect is taken for the cause of variation."""
DOUBT = 0.1
"""Chance up to which such a disturbance may be the cause: then nothing is decided."""
LEAST_RUNS = 5
"""Fewer runs decide nothing."""
QUIET = 0.05
"""Share of the machine's CPU time that others may take of a run that counts as undisturbed."""
MOST_RUNS = 1000
"""More are not counted out: "at least 1000"."""
EXTERNAL = "others_cpu_share"
"""The disturbance that is not the workload's own doing: CPU time of other processes and of other guests (steal)."""


@dataclass(frozen=True)
class Decision:
    """What the rule says.

    Attributes:
        status: One of four.
        reason: In a sentence.
        signs: What was found, in the order of :data:`argus.compare.observe.signs.KINDS`.
        tests: How many were made. level: Of each.
        spread: Coefficient of variation within arms of the primary figure, nan if unknown. spread_upper: Its upper 95 %
            bound.
        runs: That succeeded. runs_needed: Of each arm, where ``inconclusive``.
        undetected: Share of runs that may behave otherwise although none did so: the 95 % bound for none in ``runs``.
        disturbance: Which disturbance explains the variation, and how much of its variance; None: none does.
        notes: What else a reader should hear.
    """

    status: Status
    reason: str
    signs: tuple[Sign, ...] = ()
    tests: int = 0
    level: float = FAMILY
    spread: float = math.nan
    spread_upper: float = math.nan
    runs: int = 0
    runs_needed: int | None = None
    undetected: float = 1.0
    disturbance: tuple[str, float] | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)


def decide(
    figures: Sequence[Series], *, failed: int = 0, counted: Sequence[Sign] = (), margin: float = MARGIN
) -> Decision:
    """Decides over the figures of the runs that succeeded, the primary one first.

    Args:
        figures: At least one; all of the same runs.
        failed: Runs that did not succeed.
        counted: What other tests than those of these arrays found, each with its chance: errors that runs report.
        margin: See :data:`argus.compare.observe.signs.MARGIN`.
    """
    primary = figures[0]
    n = len(primary)
    if not n:
        return Decision(
            "inconclusive", f"none of {number_of(failed, 'run')} succeeded" if failed else "there are no runs yet"
        )
    tests = sum(len(applicable(one)) for one in figures) + len(counted)
    level = FAMILY / tests
    sure = _failures(primary, failed) + [sign for sign in counted if sign.p <= level]
    upper = spread_bound(primary)
    facts = {
        "tests": tests, "level": level, "spread": primary.spread(), "spread_upper": upper, "runs": n,
        "undetected": undetected(n),
    }  # fmt: skip
    if n < LEAST_RUNS and not sure:
        reason = f"{n} run{'s decide' if n > 1 else ' decides'} nothing: at least {LEAST_RUNS} are needed"
        return Decision("inconclusive", reason, runs_needed=LEAST_RUNS * len(primary.arm_names), **facts)  # type: ignore[arg-type]
    signs = [sign for one in figures for sign in signs_of(one, margin, level)] if n >= LEAST_RUNS else []
    if sure:
        signs = in_order([*sure, *signs])
        return Decision("unstable", signs[0].text, tuple(signs), **facts)  # type: ignore[arg-type]
    if (signs or not upper <= margin) and (found := explained_by(figures, margin, level)):
        signs = in_order(signs)
        cause = NAMES.get(found.name, found.name)
        if found.sure:
            reason = f"{found.share:.0%} of the variation correlates with {cause}: the workload cannot be judged"
            explained = found.name, found.share
            return Decision("noise-dominated", reason, tuple(signs), disturbance=explained, **facts)  # type: ignore[arg-type]
        needed = 2 * n
        reason = f"runs vary, which may be due to {cause}; {needed} runs would decide"
        return Decision("inconclusive", reason, tuple(signs), runs_needed=needed, **facts)  # type: ignore[arg-type]
    if signs:
        signs = in_order(signs)
        return Decision("unstable", signs[0].text, tuple(signs), **facts)  # type: ignore[arg-type]
    undecided = _undecided_arms(primary, margin) if primary.arms_compared else None
    if upper <= margin and not undecided:
        reason = (
            f"runs vary by {primary.spread():.1%}, at most {upper:.1%} (95 %), and none of {tests} tests found more"
        )
        return Decision("stable", reason, **facts)  # type: ignore[arg-type]
    needed = runs_needed(primary, margin, level, undecided)
    reason = (
        f"whether arms {undecided[0]} and {undecided[1]} differ by more than {margin:.1%} is open"
        if undecided
        else f"runs vary by {primary.spread():.1%}, which may be up to {upper:.1%} (95 %): the margin is {margin:.1%}"
    )
    few = "at least " if needed >= MOST_RUNS else ""
    reason += f"; {few}{needed} runs{' of each arm' if len(primary.arm_names) > 1 else ''} would decide"
    return Decision("inconclusive", reason, runs_needed=needed, **facts)  # type: ignore[arg-type]


NAMES = {
    EXTERNAL: "CPU time of other processes and guests",
    "run_queue_share": "waiting for a CPU that others had",
}
"""Disturbances in words."""


def _failures(series: Series, failed: int) -> list[Sign]:
    if not failed:
        return []
    total = failed + len(series)
    text = f"{failed} of {total} runs failed, and the others did not"
    return [Sign("failures", "exit", 0.0, failed / total, text)]


def spread_bound(series: Series) -> float:
    """Upper 95 % bound of the coefficient of variation within arms: chi-square; infinite where nothing is known."""
    from scipy.stats import chi2

    df = series.df()
    return series.spread() * math.sqrt(df / float(chi2.ppf(EQUIVALENCE, df))) if df > 0 else math.inf


def undetected(runs: int) -> float:
    """Share of runs that may misbehave although none of ``runs`` did, at most, with 95 % certainty."""
    return float(1 - EQUIVALENCE ** (1 / runs))


@dataclass(frozen=True)
class Explanation:
    """A disturbance that variation correlates with: its share of the variance, and whether chance is ruled out."""

    name: str
    share: float
    sure: bool


def explained_by(figures: Sequence[Series], margin: float, level: float) -> Explanation | None:
    """The disturbance that the variation correlates with; None: it is not that.

    More disturbance must go with longer runs (permutation test, chance :data:`NOISE` split among the disturbances; up
    to :data:`DOUBT` it may), and without it no sign may be left: in the values less a line through it, or in the
    undisturbed runs alone.
    """
    primary = figures[0]
    known = {name: one for name, one in primary.disturbance.items() if np.isfinite(one).all() and np.ptp(one) > 0}
    doubtful = None
    for name, cause in known.items():
        others = known.get(EXTERNAL)
        if name != EXTERNAL and (others is None or _goes_with(cause, others) > NOISE):
            continue  # the workload's own threads wait for one another's CPUs, too
        chance = _goes_with(cause, primary.residuals())
        if chance > DOUBT:
            continue
        share = _line(cause, primary.residuals())[1]
        rest = [one.without(_line(cause, one.residuals())[0], cause) for one in figures]
        cleared = share >= 0.5 and not any(signs_of(one, margin, level) for one in rest)
        quiet = cause <= QUIET
        if cleared or (quiet.sum() >= LEAST_RUNS and _quiet_runs_are_alike(figures, quiet, margin, level)):
            found = Explanation(name, share, chance <= NOISE / len(known))
            if found.sure:
                return found
            doubtful = doubtful or found
    return doubtful


def _quiet_runs_are_alike(figures: Sequence[Series], quiet: NDArray[np.bool_], margin: float, level: float) -> bool:
    alone = [one.subset(quiet) for one in figures]
    return (
        alone[0].df() > 1
        and spread_bound(alone[0]) <= margin
        and not any(signs_of(one, margin, level) for one in alone)
    )


def _goes_with(cause: Array, values: Array) -> float:
    """Chance that values are so much larger where a cause is: their covariance, against random orders."""
    return covariance_chance(cause, values) if np.ptp(values) else 1.0


def _line(cause: Array, values: Array) -> tuple[float, float]:
    """Slope of the least-squares line, and its share of the variance."""
    centred = cause - cause.mean()
    slope = float(centred @ values / (centred @ centred))
    total = float(((values - values.mean()) ** 2).sum())
    return slope, slope**2 * float(centred @ centred) / total if total else 0.0


def _undecided_arms(series: Series, margin: float) -> tuple[str, str] | None:
    """Two arms that may differ by more than the margin, the worst pair; None: each pair is alike by two one-sided tests
    (Schuirmann 1987) on the spread within arms, or more of the arms' number is faster."""
    from scipy.stats import t

    parts = series.by_arm(series.logs())
    numbers = arm_numbers(series.arm_names)
    worst, pair = math.log1p(margin), None
    for one, two in combinations(sorted(parts), 2):
        error = series.spread() * math.sqrt(1 / len(parts[one]) + 1 / len(parts[two]))
        change = float(parts[two].mean() - parts[one].mean())
        half = float(t.ppf(1 - EQUIVALENCE, series.df())) * error if series.df() > 0 else math.inf
        if numbers is not None and (change if numbers[two] > numbers[one] else -change) + half <= worst:
            continue
        if abs(change) + half > worst:
            worst, pair = abs(change) + half, (series.arm_names[one], series.arm_names[two])
    return pair


def runs_needed(series: Series, margin: float, level: float, undecided: tuple[str, str] | None) -> int:
    """Runs of each arm that would decide, if they vary as these do; at most :data:`MOST_RUNS`."""
    from scipy.stats import chi2, t

    arms = len(np.unique(series.arms))
    found = max(series.spread(), 1e-12)
    parts = series.by_arm(series.logs())
    means = {series.arm_names[arm]: float(part.mean()) for arm, part in parts.items()}
    apart = abs(means[undecided[0]] - means[undecided[1]]) if undecided else 0.0
    for n in range(max(2, LEAST_RUNS // arms, len(series) // arms + 1), MOST_RUNS):
        df = arms * (n - 1)
        wide = found * math.sqrt(df / float(chi2.isf(level, df))) > margin
        narrow = found * math.sqrt(df / float(chi2.ppf(EQUIVALENCE, df))) <= margin
        half = float(t.ppf(1 - EQUIVALENCE, df)) * found * math.sqrt(2 / n)
        if wide or (narrow and (undecided is None or abs(math.log1p(margin) - apart) >= half)):
            return n
    return MOST_RUNS
