"""Decisions of `argus observe` that are right: runs of workloads with known properties, drawn with numpy, and decided
as `argus observe run` does.

A line of the table is a workload at one size: how often it is called what, and how often the sign that it was made with
is named. In brackets: what fewer runs show of the same, and where the rule is wrong more often. At the end, without
those: the largest share of stable workloads that are called unstable, and the smallest share of the others that are
called what they are. The exit code is 1 where they miss --false or --power.

  scripts/stability                     200 trials a line
  scripts/stability --trials 1000 --seed 7
  scripts/stability --only drift --only stable
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import beta

from argus.compare.observe.rule import EXTERNAL, Decision, decide
from argus.compare.observe.series import Array, Series

Random = np.random.Generator
NOISE = 0.01
"""Coefficient of variation of a run's time where nothing is wrong."""
SAMPLES = 1000
"""Latencies of a run, of workloads that have any."""


@dataclass(frozen=True)
class Workload:
    """One line of the table.

    Attributes:
        name: With its size.
        runs: Of each arm.
        draw: Makes the figures.
        aim: The status that is right.
        kind: The sign that is to be named, or several of which one is; empty: none.
        counts: Whether the last line is about it, too; the others show what small sizes lack.
    """

    name: str
    runs: int
    draw: Callable[[Random, int], list[Series]]
    aim: str = "unstable"
    kind: str = ""
    counts: bool = True


def series(values: Array, **more: object) -> Series:
    """A figure of runs of one arm."""
    n = len(values)
    return Series("wall_ns", values, np.arange(n), np.zeros(n, np.intp), **more)  # type: ignore[arg-type]


def noise(random: Random, n: int, law: str = "normal", cv: float = NOISE) -> Array:
    """Factors of a run's time, about 1."""
    draws = {
        "normal": lambda: random.standard_normal(n),
        "skewed": lambda: random.exponential(size=n) - 1,
        "heavy": lambda: random.standard_t(4, n) / np.sqrt(2),
        "lognormal": lambda: (np.exp(0.5 * random.standard_normal(n)) - np.exp(0.125)) / 0.604,
    }
    return np.exp(cv * draws[law]())


def stable(law: str = "normal", cv: float = NOISE) -> Callable[[Random, int], list[Series]]:
    return lambda random, n: [series(noise(random, n, law, cv))]


def correlated(keep: float) -> Callable[[Random, int], list[Series]]:
    """Noise of which each run keeps a part of the run before."""

    def draw(random: Random, n: int) -> list[Series]:
        steps = random.standard_normal(n) * np.sqrt(1 - keep**2)
        steps[0] = random.standard_normal()
        for at in range(1, n):
            steps[at] += keep * steps[at - 1]
        return [series(np.exp(NOISE * steps))]

    return draw


def latencies(random: Random, n: int, slow: float = 0.0, growth: float = 0.0, sigma: float = 0.4) -> list[Series]:
    """A server: the median of each run, and its 99th percentile; a share of requests takes ten times as long."""
    factor = noise(random, n)
    samples = []
    for run in range(n):
        one = factor[run] * np.exp(sigma * random.standard_normal(SAMPLES))
        one[random.random(SAMPLES) < slow] *= 10
        samples.append(one * (1 + growth * np.linspace(0, 1, SAMPLES)))
    return of_samples(samples)


def of_samples(samples: list[Array]) -> list[Series]:
    """The median of each run, with its samples, and the 99th percentile."""
    middle = np.array([np.median(one) for one in samples])
    high = np.array([np.quantile(one, 0.99) for one in samples])
    third = SAMPLES // 3
    growth = np.array([np.log(np.median(one[-third:]) / np.median(one[:third])) for one in samples])
    at, arms = np.arange(len(samples)), np.zeros(len(samples), np.intp)
    return [
        Series("latency_p50_ns", middle, at, arms, samples=samples, growth=growth),
        Series("latency_p99_ns", high, at, arms, primary=False),
    ]


def tail_growth(random: Random, n: int) -> list[Series]:
    """The 99th percentile doubles from the first run to the last, and the median stays."""
    first, _ = latencies(random, n)
    samples = []
    for run, one in enumerate(first.samples):
        slow = random.random(SAMPLES) < 0.05
        samples.append(np.where(slow, one * (1.5 + 1.5 * run / n), one))
    return of_samples(samples)


def drifting(total: float) -> Callable[[Random, int], list[Series]]:
    return lambda random, n: [series(noise(random, n) * (1 + total * np.linspace(0, 1, n)))]


def shifted(by: float) -> Callable[[Random, int], list[Series]]:
    """From some run in the middle half on, all are slower."""

    def draw(random: Random, n: int) -> list[Series]:
        since = random.integers(n // 4, n - n // 4 + 1)
        return [series(noise(random, n) * np.where(np.arange(n) >= since, 1 + by, 1))]

    return draw


def bimodal(by: float, share: float) -> Callable[[Random, int], list[Series]]:
    return lambda random, n: [series(noise(random, n) * np.where(random.random(n) < share, 1 + by, 1))]


def every(period: int, by: float) -> Callable[[Random, int], list[Series]]:
    def draw(random: Random, n: int) -> list[Series]:
        phase = random.integers(period)
        return [series(noise(random, n) * np.where(np.arange(n) % period == phase, 1 + by, 1))]

    return draw


def rare(rate: float) -> Callable[[Random, int], list[Series]]:
    """Runs that take ten times as long."""
    return lambda random, n: [series(noise(random, n) * np.where(random.random(n) < rate, 10.0, 1))]


def workers(change: tuple[float, ...]) -> Callable[[Random, int], list[Series]]:
    """Arms of 1, 2, 4 and 8 workers in random order within each block; times of each by ``change``."""
    names = tuple(f"workers={2**k}" for k in range(len(change)))

    def draw(random: Random, n: int) -> list[Series]:
        arms = np.concatenate([random.permutation(len(change)) for _ in range(n)])
        values = noise(random, len(arms)) * np.array(change)[arms]
        return [Series("wall_ns", values, np.arange(len(arms)), arms, names)]

    return draw


def neighbour(share: float, effect: float, law: str = "bursts") -> Callable[[Random, int], list[Series]]:
    """Another program takes CPU time during some runs, and lengthens them by ``effect`` times its share."""

    def draw(random: Random, n: int) -> list[Series]:
        busy = np.where(random.random(n) < share, random.uniform(0.2, 0.8, n), random.uniform(0, 0.02, n))
        if law == "rising":
            busy = np.linspace(0, 0.8, n) + random.uniform(0, 0.02, n)
        return [series(noise(random, n) * (1 + effect * busy), disturbance={EXTERNAL: busy})]

    return draw


def unrelated(draw: Callable[[Random, int], list[Series]]) -> Callable[[Random, int], list[Series]]:
    """The same beside another program that does not disturb it."""

    def drawn(random: Random, n: int) -> list[Series]:
        found = draw(random, n)[0]
        busy = np.where(random.random(n) < 0.4, random.uniform(0.2, 0.8, n), random.uniform(0, 0.02, n))
        return [Series(found.name, found.values, found.positions, found.arms, disturbance={EXTERNAL: busy})]

    return drawn


WORKLOADS = (
    *(Workload("stable", n, stable(), "stable") for n in (10, 20, 30, 60)),
    Workload("stable, 2.5 % noise", 20, stable(cv=0.025), "stable"),
    Workload("stable, skewed", 20, stable("skewed"), "stable"),
    Workload("stable, lognormal", 20, stable("lognormal"), "stable"),
    Workload("stable, heavy tails", 20, stable("heavy"), "stable"),
    Workload("stable, heavy tails", 60, stable("heavy"), "stable"),
    Workload("stable, runs correlated 0.3", 20, correlated(0.3), "stable"),
    Workload("stable, runs correlated 0.3", 60, correlated(0.3), "stable"),
    Workload("stable, latencies", 10, latencies, "stable"),
    Workload("stable, latencies with wide body", 20, lambda r, n: latencies(r, n, sigma=0.8), "stable"),
    Workload("stable, 4 arms alike", 10, workers((1, 1, 1, 1)), "stable"),
    Workload("stable, faster with workers", 10, workers((1, 0.8, 0.6, 0.5)), "stable"),
    Workload("stable beside a neighbour", 20, unrelated(stable()), "stable"),
    Workload("drift of 5 %", 20, drifting(0.05), kind="drift shift"),
    Workload("drift of 10 %", 10, drifting(0.10), kind="drift shift"),
    Workload("shift of 5 %", 30, shifted(0.05), kind="drift shift"),
    Workload("two modes, 8 % apart, half", 30, bimodal(0.08, 0.5), kind="two_modes"),
    Workload("two modes, 15 % apart, a fifth", 40, bimodal(0.15, 0.2), kind="two_modes"),
    Workload("1 % of samples 10 times", 10, lambda r, n: latencies(r, n, slow=0.01), kind="tail"),
    Workload("99th percentile doubles", 20, tail_growth, kind="drift shift"),
    Workload("each run slows by 20 %", 10, lambda r, n: latencies(r, n, growth=0.2), kind="slows_within"),
    Workload("5 % of runs 10 times", 100, rare(0.05), kind="outliers two_modes"),
    Workload("10 % of runs 10 times", 45, rare(0.10), kind="outliers two_modes"),
    Workload("every 2nd 5 % slower", 20, every(2, 0.05), kind="periodic"),
    Workload("every 5th 5 % slower", 30, every(5, 0.05), kind="periodic"),
    Workload("every 5th 20 % slower", 20, every(5, 0.20), kind="periodic two_modes"),
    Workload("worse with 8 workers", 10, workers((1, 0.8, 0.7, 0.78)), kind="worse_with_more"),
    Workload("worse with each worker", 5, workers((1, 1.1, 1.2, 1.4)), kind="worse_with_more"),
    Workload("20 % noise", 20, stable(cv=0.20), kind="spread"),
    Workload("noisy neighbour, bursts", 20, neighbour(0.4, 0.5), "noise-dominated"),
    Workload("noisy neighbour, rising", 20, neighbour(0.4, 0.5, "rising"), "noise-dominated"),
    Workload("two modes beside a neighbour", 30, unrelated(bimodal(0.08, 0.5)), kind="two_modes"),
    Workload("(stable, runs correlated 0.5)", 20, correlated(0.5), "stable", counts=False),
    Workload("(drift of 5 %)", 10, drifting(0.05), kind="drift shift", counts=False),
    Workload("(shift of 5 %)", 20, shifted(0.05), kind="drift shift", counts=False),
    Workload("(two modes, 15 % apart, half)", 10, bimodal(0.15, 0.5), kind="two_modes", counts=False),
    Workload("(10 % of runs 10 times)", 10, rare(0.10), kind="outliers two_modes", counts=False),
    Workload("(every 5th 20 % slower)", 10, every(5, 0.20), kind="periodic two_modes", counts=False),
    Workload("(noisy neighbour, bursts)", 10, neighbour(0.4, 0.5), "noise-dominated", counts=False),
)


def count(workload: Workload, trials: int, seed: int) -> tuple[Counter[str], int]:
    """How often a workload was called what, and how often its sign was named."""
    statuses: Counter[str] = Counter()
    named = 0
    words = f"{workload.name} {workload.runs}".encode()
    for trial in range(trials):
        random = np.random.default_rng([seed, trial, zlib.crc32(words)])
        found: Decision = decide(workload.draw(random, workload.runs))
        statuses[found.status] += 1
        named += any(sign.kind in workload.kind.split() for sign in found.signs)
    return statuses, named


def bounds(hits: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Clopper and Pearson 1934)."""
    low = float(beta.ppf(0.025, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="trials of each workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="workloads with a word in their name"
    )
    parser.add_argument("--false", type=float, default=0.05, help="largest share of stable workloads called unstable")
    parser.add_argument("--power", type=float, default=0.95, help="smallest share of others called what they are")
    options = parser.parse_args()
    print(f"{'workload':<34} runs  stable unstable   noise  inconcl  named   right (95 %)")
    worst, least = 0.0, 1.0
    for workload in WORKLOADS:
        if options.only and not any(word in workload.name for word in options.only):
            continue
        statuses, named = count(workload, options.trials, options.seed)
        shares = [statuses[one] / options.trials for one in ("stable", "unstable", "noise-dominated", "inconclusive")]
        right = statuses[workload.aim]
        if workload.aim == "stable" and workload.counts:
            worst = max(worst, shares[1])
        elif workload.counts:
            least = min(least, right / options.trials)
        low, high = bounds(right, options.trials)
        name = f"{named / options.trials:6.1%}" if workload.kind else "     -"
        print(
            f"{workload.name:<34} {workload.runs:>4} "
            + " ".join(f"{share:>7.1%}" for share in shares)
            + f"  {name}  {right / options.trials:6.1%} ({low:.1%} to {high:.1%})",
            flush=True,
        )
    print(f"stable workloads called unstable: {worst:.1%} at most; others called what they are: {least:.1%} at least")
    return int(worst > options.false or least < options.power)


if __name__ == "__main__":
    sys.exit(main())
