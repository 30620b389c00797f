"""Which ranks are slow by their step times alone, where nothing else is known of a job.

A step time describes a single rank only where ranks do not wait for one another inside it (asynchronous training, or
times that were measured before the wait): else all are alike, and no rank is named.

What slows down all ranks in a step is taken out first: the median over ranks of (time / the rank's own typical time).
Ranks that differ all along do not move it, and those that change do not as long as they are fewer than half. Then a
rank is a straggler

* that *became* slower than it was, for good (the change points of :mod:`argus.diagnose.iteration.regression`), and now
  is slower than the others; or
* that *stands out* of the others all along: its modified z-score is over 3.5.

Where ranks differ all along but none stands out (machines of several kinds, unequal shares of data), that is no event
and no straggler: it is reported as a constant difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Logged
from argus.diagnose.chance import outlier_limit
from argus.diagnose.iteration.regression import MIN_STEPS, RANK_SUM, find_regression
from argus.diagnose.iteration.stalls import LEAST_STALLS
from argus.diagnose.ranks.lateness import ALPHA, by_chance, find_episode, find_onset
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import StepTime, Suspect
from argus.diagnose.verdict import Evidence
from argus.model.statistics import MEDIAN, mad
from argus.model.units import ranks_text

Float = NDArray[np.float64]
Int = NDArray[np.int64]

OUTLIER = 3.5
"""Modified z-score, 0.6745 x (value - median) / MAD, beyond which a value is an outlier (Iglewicz, Hoaglin 1993).
Of many ranks it is what one of 1,000 healthy jobs has (:data:`argus.diagnose.ranks.lateness.ALPHA`)."""
LEAST_SPREAD = 0.01
"""What healthy ranks differ by at least, of the step: a MAD below it, of few or synchronised ranks, makes outliers of
noise."""
LONG = 4.0
"""Standard deviations from which a step is long: of normal values one in 30,000."""
SINCE_ERRORS = 3.0
"""Standard errors by which a rank that is known to be slow must have been faster before."""
FEW = 4
"""At most one rank in so many is an outlier; more are another kind."""
CERTAIN = 5.0
"""Standard errors of a rank's own typical time by which it must lie above the median rank's."""
PERSISTENT = 0.6
"""Share of the newer steps in which a rank must be slow to be slow rather than now and then (as for lateness)."""
SEPARATE = 0.9
"""Share of the steps of a slow growth that must exceed nine in ten of the steps before."""
LEAST_EPISODE = 5
"""Steps in a row that are more than a stall, as in :data:`argus.diagnose.iteration.stalls.LONGEST_STALL`."""
LOST_STEPS = 1.0
"""What a rank must have lost meanwhile to be mentioned, in steps of its own."""
MAX_RECOVERED = 3
"""Ranks that recovered which are mentioned, at most."""
UNKNOWN_CAUSE = 0.7
"""Confidence is (share of steps in which it is slow) x this: step times do not show a cause."""


BLIND = "all ranks take equally long in each step, as if they waited for one another: a slow one would not show"


@dataclass(frozen=True)
class _Rank:
    place: int
    level: float
    """Its time over the median rank's, now."""
    since: int
    """Place among the steps."""
    became: float
    """What it was before it became slower, over the median rank; 0: it always was."""
    held: float
    now_and_then: bool


def slow_ranks(
    query: Query, params: Mapping[str, Any], hosts: Mapping[int, str], threshold: float, step_ns: float
) -> tuple[list[Suspect], Logged] | None:
    """Names the ranks that are slow.

    Args:
        query: Runs SQL.
        params: job, run, first and last (steps).
        hosts: Of each rank.
        threshold: Share of the step by which a rank must be slower than the median one.
        step_ns: Typical step time.

    Returns:
        The ranks, and what else the times show; None: there are fewer than 2 ranks with 10 steps in common.
    """
    ranks, steps, level, times = _levels(query(queries.STEP_TIMES, params))
    if len(ranks) < 2:
        return None
    own = [row[np.isfinite(row)] for row in level]
    changed = [_change(row, times[place][np.isfinite(times[place])], threshold) for place, row in enumerate(own)]
    usual = np.array([change.before if change else np.median(row) for change, row in zip(changed, own, strict=True)])
    score, center = _scores(usual)
    # The largest of many is further out.
    outlier = outlier_limit(ALPHA, len(ranks), OUTLIER)
    newest = [row[-max(MIN_STEPS, (len(row) + 1) // 2) :] for row in own]
    means = np.array([row.mean() for row in newest])
    medians = np.array([np.median(row) for row in newest])
    steps_seen = np.sqrt([len(row) for row in newest])
    error = MEDIAN * np.array([mad(row) for row in newest]) / steps_seen
    mean_error = np.array([row.std() for row in newest]) / steps_seen
    mean_score, mean_center = _scores(means)
    often, long_since = _now_and_then(own, threshold)
    slow: list[_Rank] = []
    for place, change in enumerate(changed):
        row = own[place][change.index :] if change else newest[place]
        now = change.after if change else float(medians[place])
        excess = now / center - 1
        held = float(np.mean(row >= center * (1 + excess / 2)))
        stands_out = score[place] >= outlier and usual[place] - center >= CERTAIN * error[place]
        longer = float(means[place] / mean_center)
        clearly = mean_score[place] >= outlier and means[place] - mean_center >= CERTAIN * mean_error[place]
        if excess < threshold or held < PERSISTENT or not (change or stands_out):
            if longer - 1 < threshold or not (clearly or often[place]):
                continue
            if medians[place] / center - 1 < (longer - 1) / 2:
                # A few steps make the mean.
                share = float(np.mean(newest[place] >= center * (1 + threshold)))
                slow.append(_Rank(place, longer, long_since[place], 0.0, often[place] or share, True))
                continue
            if not clearly:
                continue
            # Most steps do, and that it is slow is sure: since when may be less so.
            change = change or _change(own[place], times[place][np.isfinite(times[place])], threshold, SINCE_ERRORS)
        since = int(np.flatnonzero(np.isfinite(level[place]))[change.index]) if change else 0
        slow.append(_Rank(place, now / center, since, change.before / center if change else 0.0, held, False))
    # Where many differ there are kinds of machines, not outliers; of two ranks each stands out of the other.
    constant = [one for one in slow if not one.became and not one.now_and_then]
    if len(constant) > max(1, len(ranks) // FEW) or len(ranks) < 3:
        slow = [one for one in slow if one not in constant]
    suspects = _suspects(slow, ranks, steps, params, hosts, step_ns, usual / center)
    note = "" if slow else _note(ranks, level, usual, threshold)
    past = _recovered(ranks, steps, level, threshold, {one.place for one in slow})
    return suspects, Logged("; ".join(filter(None, [past, note])), blind=note == BLIND)


def _levels(rows: Mapping[str, NDArray[Any]]) -> tuple[Int, Int, Float, Float]:
    """Ranks with enough steps, steps that half of them were seen in, and of each rank and step its time without
    what all ranks share, and its time. NaN: not seen."""
    ranks, rank = np.unique(rows["rank"].astype(np.int64), return_inverse=True)
    steps, step = np.unique(rows["step"].astype(np.int64), return_inverse=True)
    times = np.full((len(ranks), len(steps)), np.nan)
    times[rank, step] = rows["duration_ns"]
    times[~(times > 0)] = np.nan
    common = np.isfinite(times).sum(axis=0) * 2 > len(ranks)
    steps, times = steps[common], times[:, common]
    enough = np.isfinite(times).sum(axis=1) >= MIN_STEPS
    ranks, times = ranks[enough], times[enough]
    if not len(ranks) or not len(steps):
        return ranks, steps, times, times
    shared = np.nanmedian(times / np.nanmedian(times, axis=1, keepdims=True), axis=0, keepdims=True)
    return ranks, steps, times / shared, times


@dataclass(frozen=True)
class _Change:
    """A rank became slower for good: from which of its steps on, and its typical time before and after, ns."""

    index: int
    before: float
    after: float


def _now_and_then(own: list[Float], threshold: float) -> tuple[list[float], list[int]]:
    """Ranks that have most of the long steps: more than turns would give them, at a cost that counts, and still.

    A step is long if it is further above its rank's typical one than those of a typical rank scatter, by normal or by
    heavier tails, and by the threshold at least.

    Args:
        own: Levels of each rank.
        threshold: Share of the step that counts.

    Returns:
        Of each rank the share of its steps that are long, 0: it is not reported; and its first step of those in which
        so many are.
    """
    level = [row / np.median(row) for row in own]
    scatter = [max(LONG * mad(row, 1.0), 2 * float(np.quantile(row, 0.95) - 1)) for row in level]
    limit = 1 + max(threshold, float(np.quantile(scatter, 0.5, method="lower")))
    long = [row >= limit for row in level]
    hits = [int(those.sum()) for those in long]
    often, since = [0.0] * len(own), [0] * len(own)
    for place, (row, those) in enumerate(zip(level, long, strict=True)):
        if hits[place] < LEAST_STALLS or float(np.sum(row[those] - 1)) < threshold * len(row):
            continue
        if 4 * int(those[len(those) // 2 :].sum()) < hits[place]:
            continue
        if by_chance(hits[place], sum(hits), 1, len(own), windows=1) > ALPHA:
            continue
        often[place] = hits[place] / len(row)
        # The likeliest begin: the best sum of log likelihood ratios to the end, at this share of long steps and at the
        # others'.
        others = (sum(hits) - hits[place] + 1) / (sum(map(len, level)) - len(row) + 1)
        here = min(often[place], 0.99)
        there = min(others, here / 2)
        ratio = np.where(those, np.log(here / there), np.log((1 - here) / (1 - there)))
        since[place] = int(np.argmax(np.cumsum(ratio[::-1])[::-1]))
    return often, since


def _change(level: Float, times: Float, threshold: float, errors: float = RANK_SUM) -> _Change | None:
    steady = find_regression(level, least=threshold, errors=errors)
    change = _Change(steady.index, steady.before_ns, steady.after_ns) if steady else _grown(level, threshold)
    # Where the others became faster, a rank did not become slower.
    if change is None or np.median(times[change.index :]) < (1 + threshold / 2) * np.median(times[: change.index]):
        return None
    return change


def _grown(level: Float, threshold: float) -> _Change | None:
    """A growth that came in several steps or slowly, in which no change point is sharp."""
    if len(level) < 2 * MIN_STEPS:
        return None
    low, now = float(np.quantile(level, 0.25)), float(np.median(level[-MIN_STEPS:]))
    onset = find_onset(level - low, now - low)
    if not MIN_STEPS <= onset <= len(level) - MIN_STEPS:
        return None
    before, after = level[:onset], level[onset:]
    was, became = float(np.median(before)), float(np.median(after))
    noise = max(mad(before, was), LEAST_SPREAD * was)
    if became < (1 + threshold) * was or became - was < OUTLIER * noise:
        return None
    return _Change(onset, was, became) if np.mean(after > np.quantile(before, 0.9)) >= SEPARATE else None


def _scores(level: Float) -> tuple[Float, float]:
    """Modified z-scores, and the median rank's level: the low median, of two ranks the faster one's."""
    center = float(np.quantile(level, 0.5, method="lower"))
    spread = max(float(np.quantile(np.abs(level - center), 0.5, method="lower")), LEAST_SPREAD * center * 0.6745)
    return 0.6745 * (level - center) / spread, center


def _suspects(
    slow: list[_Rank],
    ranks: Int,
    steps: Int,
    params: Mapping[str, Any],
    hosts: Mapping[int, str],
    step_ns: float,
    level: Float,
) -> list[Suspect]:
    """Ranks that always were slow are one finding; so are those that became slow at about the same time."""
    groups: dict[tuple[bool, int], list[_Rank]] = {}
    onset = -MIN_STEPS
    for one in sorted(slow, key=lambda each: each.since):
        if one.became and one.since - onset >= MIN_STEPS:
            onset = one.since
        groups.setdefault((one.now_and_then, onset if one.became else -1), []).append(one)
    others = np.delete(level, [one.place for one in slow])
    suspects = []
    for (now_and_then, _), those in groups.items():
        members = sorted(those, key=lambda each: each.place)
        since = int(steps[min(one.since for one in members)])
        numbers = [int(ranks[one.place]) for one in members]
        names = list(dict.fromkeys(hosts[number] for number in numbers if number in hosts))
        first, name, worst = members[0], ranks_text(numbers), max(one.level for one in members)
        takes = "takes" if len(numbers) == 1 else "take"
        each = _list(one.level for one in members)
        spread = f"the others take {others.min():.2f} to {others.max():.2f}" if len(others) else ""
        if first.became:
            text = (
                f"{name} {takes} {each} times as long as the median rank from step {since} on, and took "
                f"{_list(one.became for one in members)} before"
            )
        elif now_and_then:
            text = (
                f"{name} {takes} {each} times as long as the median rank on average, and much longer in "
                f"{first.held:.0%} of the steps"
            )
        else:
            text = (
                f"{name} {takes} {each} times as long as the median rank from the first step to the last: a constant "
                "difference, not an event"
            )
        evidence: list[Evidence] = [
            {"text": "; ".join(filter(None, [text, spread])), "sql": runnable_sql(queries.STEP_TIMES_BY_RANK, params)}
        ]
        suspects.append(Suspect(
            kind="jitter" if now_and_then else "compute_straggler", ranks=numbers, hosts=names,
            since=since, last=int(steps[-1]), slowdown=worst, lost_ns=(worst - 1) * step_ns,
            effect=partial(_waited_for, worst),
            confidence=min(one.held for one in members) * UNKNOWN_CAUSE if not now_and_then else 0.3,
            level="iteration", evidence=evidence,
            action=f"See what differs on {name}: the GPU and its clocks, what shares it, the host, the share of "
            "the data. Step times alone do not show it; argus trace does.",
        ))  # fmt: skip
    return suspects


def _waited_for(factor: float, step: StepTime) -> StepTime:
    """Whoever waits for the slowest rank takes as long as it does: so many times as long as the median one."""
    return replace(step, now_ns=max(step.now_ns, factor * step.ideal_ns))


def _recovered(ranks: Int, steps: Int, level: Float, threshold: float, left_out: set[int]) -> str:
    """A clause on each rank that was slow for a while and no longer is, those that lost most time first; empty: none.

    Args:
        left_out: Places of ranks that findings name.
    """
    texts: list[tuple[float, str]] = []
    for place in range(len(ranks)):
        seen = np.isfinite(level[place])
        if place in left_out or not seen.any():
            continue
        own = level[place][seen] / np.median(level[place][seen])
        least = 1 + max(threshold, 5 * mad(own, 1.0))
        episode = find_episode(own >= least, LEAST_EPISODE)
        if episode is None:
            continue
        slow, at = own[slice(*episode)], steps[seen]
        lost = float(np.sum(slow - 1))
        if lost < LOST_STEPS:
            continue
        texts.append((
            lost,
            f"rank {ranks[place]} was slow in steps {at[episode[0]]} to {at[episode[1] - 1]} (up to {slow.max():.2f}x, "
            f"which cost it the time of {lost:.1f} steps), and no longer is",
        ))  # fmt: skip
    return "; ".join(text for _, text in sorted(texts, reverse=True)[:MAX_RECOVERED])


def _note(ranks: Int, level: Float, usual: Float, threshold: float) -> str:
    """A clause on a job in which no rank is a straggler."""
    slow, fast = int(np.argmax(usual)), int(np.argmin(usual))
    if usual[slow] >= (1 + threshold) * usual[fast]:
        return (
            f"ranks differ by a constant, from the first step to the last: rank {ranks[slow]} takes "
            f"{usual[slow] / usual[fast]:.2f} times as long as rank {ranks[fast]}; none stands out of the others, "
            "and none became slower"
        )
    if np.nanmedian(np.nanstd(level, axis=0) / np.nanmean(level, axis=0)) < LEAST_SPREAD / 10:
        return BLIND
    return ""


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in list(values)[:8])
