"""Changes of step times, detected while they happen: O(1) for each step and series, at a set rate of false alarms.

A series is the logarithm of a step time: of the whole job, or of one rank. What the work of the step explains is taken
out first (tokens, bytes, launches: whatever is known). The rest is compared with a reference that is a sample of all
steps since the last change, so that slow growth is not followed but adds up. Two cumulative sums (Page, "Continuous
inspection schemes", Biometrika 1954) detect lasting growth and lasting decline; their threshold comes from the rate of
false alarms by Siegmund's approximation (Siegmund, "Sequential Analysis", 1985, (2.56)). A third one, of single long
steps (a Bernoulli CUSUM: Reynolds and Stoumbos, J. of Quality Technology 31, 1999), detects that these became more
frequent.

What makes such sums alarm falsely is met one by one: heavy tails by medians and by clipping what a step adds;
autocorrelation by the variance of sums instead of that of steps; warm-up in that a decline only renews the reference;
evaluations and checkpoints in that a change must last; and an alarm is verified against the reference by ranks before
it counts (as GREYHOUND verifies its change points, ATC '25).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, wrightomega

from argus.model.statistics import MEDIAN, NORMAL, mad, order_error, share_in_order

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

LEAST = 0.05
"""Growth that counts: EROICA (NSDI '26) is triggered by 5 % as well."""
ALARMS = 1.0
"""False alarms allowed in a million steps, of all series of a detector together."""
REFERENCE = 64
"""Steps that the reference consists of: their median is true to 0.16 standard deviations, a third of the slack."""
RECENT = 64
"""Newest steps that are kept: of what a change is described by, and how steps hang together."""
FIRST = 32
"""Steps before a reference is a reference."""
REFRESHED = 16
"""Steps between two looks at the reference."""
SLACK = 0.5
"""What is taken off the sums in each step, in scales: half of the least change that is looked for (Page 1954)."""
CLIP = 3.0
"""Most scales that one step adds: fewer than five long steps in a row never are a change."""
LASTS = 20
"""Steps that a change must last: evaluations and checkpoints of fewer steps are none (GREYHOUND waits for 10, EROICA
for 50)."""
UNLIKELY = 0.15
"""Of those steps as many must be longer by half of the change as noise lets, less this share: a checkpoint shortly
before an evaluation does not make that last."""
ERRORS = 4.0
"""Standard errors of the reference's median that a change must be."""
RANK_SUM = 5.0
"""Standard errors by which ranks must confirm a change (Mann-Whitney)."""
CLEAR = 6.0
"""A change of so many standard deviations of the steps is confirmed by 95 % of the pairs in order: a few long steps
among those before leave it at that, and are no reason to doubt it. Of a smaller one it takes 98 %."""
SPIKE = 1.5
"""A step that takes so many times as long as usual is a spike, as in :mod:`argus.diagnose.iteration.stalls`."""
RARE = 0.01
"""Share of spikes that is normal in any job, until more is known."""
MORE = 5.0
"""So many times as many spikes are looked for."""
EXPLAINS = 0.8
"""Work explains step times if it takes a fifth off their scatter."""
MIN_DIFFERENCES = 8
"""Differences of work that are needed to estimate what it explains."""
STEEPEST = 2.0
"""Time grows at most with the square of the work: attention does with the length of sequences."""


@dataclass(frozen=True)
class Event:
    """What happened to a series.

    Attributes:
        kind: ``step`` (longer from a step on), ``ramp`` (longer and longer), ``jitter`` (single long steps became more
            frequent), ``spike`` (one long step), ``faster``, ``over`` (as fast as before the growth that was reported).
        series: Which, from 0.
        step: The first step of it.
        decided: The step in which it was detected.
        before: Typical time before, as fed, of the work that is typical now.
        after: Typical time now. Of spikes that step's; of jitter the share of long steps, and ``before`` what it was.
    """

    kind: str
    series: int
    step: int
    decided: int
    before: float
    after: float


def threshold(steps: float, slack: float = SLACK) -> float:
    """Where a one-sided CUSUM of standard normal values alarms falsely once in so many steps: Siegmund's approximation
    of the average run length, (exp(x) - x - 1) / (2 k^2) with x = 2 k (h + 1.166), solved for h by the lower branch of
    Lambert's W (Corless and Jeffrey 2002)."""
    odds = 1 + 2 * slack * slack * steps
    above = -float(wrightomega(complex(-odds, -np.pi)).real)
    return (above - odds) / (2 * slack) - 1.166


def powers(times: Float, work: Float) -> Float:
    """By which power of its work each series grows: least absolute deviations of the differences of neighbouring steps,
    which levels do not touch; of several measures the one that explains most.

    Args:
        times: Logarithms, shape (series, steps); NaN: not known.
        work: Logarithms of measures of work, shape (series, steps, measures).

    Returns:
        Shape (series, measures), 0 to :data:`STEEPEST`; 0: it explains nothing.
    """
    change = np.diff(times, axis=1)
    scatter = np.nanmedian(np.abs(np.where(np.isnan(change), 0.0, change)), axis=1)
    best = EXPLAINS * scatter
    exponents = np.zeros((len(times), work.shape[2]))
    for which in range(work.shape[2]):
        more = np.diff(work[:, :, which], axis=1)
        usable = np.isfinite(change) & np.isfinite(more) & (np.abs(more) > 1e-4)
        weight = np.where(usable, np.abs(more), 0.0)
        ratio = np.where(usable, np.divide(change, more, out=np.zeros_like(change), where=usable), np.inf)
        by_ratio = np.argsort(ratio, axis=1)
        upto = np.cumsum(np.take_along_axis(weight, by_ratio, 1), axis=1)
        middle = np.argmax(upto >= upto[:, -1:] / 2, axis=1)
        slope = np.take_along_axis(ratio, np.take_along_axis(by_ratio, middle[:, None], 1), 1)[:, 0]
        slope = np.clip(np.where(usable.sum(axis=1) >= MIN_DIFFERENCES, slope, 0.0), 0.0, STEEPEST)
        left = np.nanmedian(np.abs(np.nan_to_num(change - slope[:, None] * np.nan_to_num(more))), axis=1)
        better = left < best
        best = np.where(better, left, best)
        exponents[better] = 0.0
        exponents[better, which] = slope[better]
    return exponents


def _medians(work: Float, axis: int = 0) -> Float:
    """Medians of measures of work over steps, ``axis``; 0 for a measure that no step has: it explains nothing."""
    unknown = np.isnan(work).all(axis=axis, keepdims=True)
    return np.asarray(np.nanmedian(np.where(unknown, 0.0, work), axis=axis))


class Detector:
    """Watches some series, which have a value, or NaN, in each step.

    Args:
        series: How many.
        alarms: False alarms allowed in a million steps, of all series together.
        least: Growth that counts, as a share.
        work: How many measures of a step's work are fed with each time.
    """

    def __init__(self, series: int, *, alarms: float = ALARMS, least: float = LEAST, work: int = 0) -> None:
        if series < 1 or alarms <= 0 or least <= 0:
            raise ValueError("a detector needs a series, a rate above 0 and a growth above 0")
        self.series, self.least, self.work = series, float(np.log1p(least)), work
        # Two sums and the spikes' share the rate.
        between = 1e6 * series * 3 / alarms
        self.limit, self.spike_limit = threshold(between), float(np.log(between))
        n = series
        self._reference = np.full((n, REFERENCE), np.nan)
        self._reference_work = np.full((n, REFERENCE, work), np.nan)
        self._reference_step = np.zeros((n, REFERENCE), np.int64)
        self._filled, self._stride, self._skip = (np.zeros(n, np.int64) for _ in range(3))
        self._stride[:] = 1
        self._recent = np.full((n, RECENT), np.nan)
        self._recent_work = np.full((n, RECENT, work), np.nan)
        self._steps = np.full(RECENT, -1, np.int64)
        self._fed = 0
        self._center, self._scale, self._slope = np.full(n, np.nan), np.full(n, np.nan), np.zeros((n, max(work, 1)))
        self._carries = np.zeros(n)
        self._up, self._down, self._spiky = np.zeros((3, n))
        self._up_since, self._down_since = np.zeros((2, n), np.int64)
        self._seen, self._spikes, self._in_spike = np.zeros(n), np.zeros(n), np.zeros(n, np.bool_)
        self.best = np.full(n, np.nan)
        """Logarithm of the time that growth is measured against; NaN: none is open. Shape (series,)."""
        self.since = np.full(n, -1, np.int64)
        """First step of the growth that is open; -1: none. Shape (series,)."""

    @property
    def level(self) -> Float:
        """Typical time of each series, as fed; NaN: not known yet. Shape (series,)."""
        return np.exp(self._center + self._typical(self._reference_work))

    @property
    def newest(self) -> Float:
        """Typical time of the newest :data:`LASTS` steps over what growth is measured against; NaN: none is open. Shape
        (series,)."""
        places = np.arange(max(0, self._fed - LASTS), self._fed) % RECENT
        rest = self._recent[:, places] - np.nansum(
            self._slope[:, None, : self.work] * self._recent_work[:, places], axis=2
        )
        known = np.where(np.isnan(rest).all(axis=1, keepdims=True), 0.0, rest)
        return np.asarray(np.exp(np.nanmedian(known, axis=1) - self.best))

    @property
    def slope(self) -> Float:
        """By which power of each measure of work the time grows, shape (series, work); 0: it explains nothing."""
        return self._slope[:, : self.work]

    def feed(self, step: int, values: Float, work: Float | None = None) -> list[Event]:
        """One step of all series.

        Args:
            step: Its number; ascending.
            values: Times, shape (series,); NaN: not known.
            work: Measures of its work, above 0, shape (series, work); NaN: not known.

        Returns:
            What is reported now.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            y = np.log(np.where(values > 0, values, np.nan))
            logs = np.zeros((self.series, 0)) if work is None else np.log(np.where(work > 0, work, np.nan))
        if logs.shape[1] != self.work:
            raise ValueError(f"{self.work} measures of work are to be fed, not {logs.shape[1]}")
        place = self._fed % RECENT
        self._recent[:, place], self._recent_work[:, place], self._steps[place] = y, logs, step
        self._fed += 1
        events: list[Event] = []
        rest = y - np.nansum(self._slope[:, : self.work] * logs, axis=1)
        off = np.nan_to_num(rest - self._center)
        ready = np.isfinite(self._center) & np.isfinite(rest)
        # The smallest change that counts is one scale: what is quieter than that is not made more of.
        scaled = np.clip(off / np.maximum(self._scale * self._spread(), self.least), -CLIP, CLIP)
        for sums, sign, since in ((self._up, 1.0, self._up_since), (self._down, -1.0, self._down_since)):
            zero = sums <= 0
            since[zero & ready] = self._fed - 1
            sums[ready] = np.maximum(0.0, sums + sign * scaled - SLACK)[ready]
        events += self._long_steps(step, off, ready, values)
        # What may be part of a change is no reference yet.
        usual = ~ready | ((np.abs(scaled) < CLIP) & (np.maximum(self._up, self._down) < self.limit / 2))
        self._remember(step, y, logs, usual & np.isfinite(y))
        if self._fed % REFRESHED == 0 or (np.isnan(self._center) & (self._filled >= FIRST)).any():
            self._refresh()
        for sums, since, grows in ((self._up, self._up_since, True), (self._down, self._down_since, False)):
            for one in np.flatnonzero((sums > self.limit) & (self._fed - since >= LASTS)).tolist():
                events += self._decide(one, step, int(since[one]), grows=grows)
        return events

    def _spread(self) -> Float:
        """How much more sums scatter than those of independent values: of an AR(1) series by (1 + r) / (1 - r)."""
        return np.sqrt((1 + self._carries) / (1 - self._carries))

    def _typical(self, work: Float) -> Float:
        """What the typical work adds, shape (series,)."""
        if not self.work:
            return np.zeros(self.series)
        return np.asarray(np.sum(self._slope[:, : self.work] * _medians(work, axis=1), axis=1))

    def _remember(self, step: int, y: Float, work: Float, usual: Bool) -> None:
        """Puts a step into the references: every ``stride``-th one; a full reference is thinned out to every other."""
        self._skip[usual] -= 1
        for one in np.flatnonzero((self._filled == REFERENCE) & usual & (self._skip < 0)).tolist():
            for kept in (self._reference, self._reference_work, self._reference_step):
                kept[one, : REFERENCE // 2] = kept[one, ::2]
            self._reference[one, REFERENCE // 2 :] = self._reference_work[one, REFERENCE // 2 :] = np.nan
            self._filled[one] = REFERENCE // 2
            self._stride[one] *= 2
        chosen = np.flatnonzero(usual & (self._skip < 0))
        self._reference[chosen, self._filled[chosen]] = y[chosen]
        self._reference_work[chosen, self._filled[chosen]] = work[chosen]
        self._reference_step[chosen, self._filled[chosen]] = step
        self._filled[chosen] += 1
        self._skip[chosen] = self._stride[chosen] - 1

    def _refresh(self) -> None:
        """Reference levels, scatter and dependence, from what is kept."""
        known = self._filled >= FIRST
        if not known.any():
            return
        order = np.arange(self._fed - min(self._fed, RECENT), self._fed) % RECENT
        recent, recent_work = self._recent[:, order], self._recent_work[:, order]
        if self.work:
            self._fit(recent, recent_work)
        rest = self._reference - np.nansum(self._slope[:, None, : self.work] * self._reference_work, axis=2)
        rest = rest[known]
        center = np.nanmedian(rest, axis=1)
        self._center[known] = center
        self._scale[known] = NORMAL * np.nanmedian(np.abs(rest - center[:, None]), axis=1)
        now = recent - np.nansum(self._slope[:, None, : self.work] * recent_work, axis=2)
        # Dependence of neighbours, around the recent level: a change must not look like dependence.
        now = now[known] - np.nan_to_num(np.nanmedian(np.where(np.isnan(now), 0, now)[known], axis=1))[:, None]
        score = np.clip(np.nan_to_num(now / np.maximum(self._scale[known], 1e-6)[:, None]), -2.5, 2.5)
        carries = (score[:, 1:] * score[:, :-1]).sum(axis=1) / np.maximum((score * score).sum(axis=1), 1e-9)
        # An estimate from 64 steps is 1 / 8 off; too small ones cost false alarms.
        carries = np.clip(carries + 1 / np.sqrt(score.shape[1]), 0.0, 0.9)
        quiet = np.maximum(self._up, self._down)[known] < self.limit / 2
        self._carries[known] = np.where(quiet, carries, np.maximum(self._carries[known], 0))

    def _fit(self, recent: Float, work: Float) -> None:
        """By which power of its work each series grows. Where work does not vary any more, what is known holds."""
        varies = np.nanmax(np.nan_to_num(np.abs(np.diff(work, axis=1))), axis=(1, 2)) > 1e-4
        self._slope[varies] = powers(recent, work)[varies]

    def _long_steps(self, step: int, off: Float, ready: Bool, values: Float) -> list[Event]:
        spike = ready & (off > max(np.log(SPIKE), self.least)) & (off > 6 * np.nan_to_num(self._scale))
        begins = spike & ~self._in_spike
        self._in_spike = spike
        usual = np.maximum(RARE, (self._spikes + 1) / (self._seen + 1 / RARE))
        often = np.minimum(MORE * usual, 0.5 + usual / 2)
        step_up = np.where(begins, np.log(often / usual), np.log((1 - often) / (1 - usual)))
        self._spiky[ready] = np.maximum(0.0, self._spiky + step_up)[ready]
        # What may be more of them than usual does not show what is usual.
        counted = ready & (self._spiky < self.spike_limit / 3)
        self._seen += counted
        self._spikes += begins & counted
        events = []
        for one in np.flatnonzero(begins).tolist():
            events.append(Event("spike", one, step, step, float(values[one] / np.exp(off[one])), float(values[one])))
        for one in np.flatnonzero(self._spiky > self.spike_limit).tolist():
            events.append(Event("jitter", one, step, step, float(usual[one]), float(often[one])))
            # From now on this is how it is.
            self._spiky[one] = 0.0
            self._spikes[one] = often[one] * self._seen[one]
        return events

    def _decide(self, one: int, step: int, since: int, *, grows: bool) -> list[Event]:
        """Whether a sum beyond the limit is a change. If it is none, sums begin anew; if too young, they go on."""
        sums = self._up[one], self._down[one]
        self._up[one] = self._down[one] = 0.0
        age = min(self._fed - since, RECENT)
        places = np.arange(self._fed - age, self._fed) % RECENT
        slope = self._slope[one, : self.work]
        now = self._recent[one, places] - np.nansum(slope * self._recent_work[one, places], axis=1)
        now = now[np.isfinite(now)]
        past = self._reference[one] - np.nansum(slope * self._reference_work[one], axis=1)
        # Before the sum began to grow.
        earlier = self._reference_step[one] < self._steps[places[0]]
        past = past[np.isfinite(past) & earlier]
        if len(now) < LASTS // 2 or not len(past):
            return []
        level, sign = float(np.median(now)), 1 if grows else -1
        change = sign * (level - self._center[one])
        share = share_in_order(past, now, ties=0.5)
        # As many as are independent: of the reference only every stride-th step was kept.
        far = float(self._carries[one] ** self._stride[one])
        ours, theirs = len(now) / self._spread()[one] ** 2, len(past) * (1 - far) / (1 + far)
        by_chance = order_error(theirs, ours)
        # What the reference's own median may be off. Steps that hang together count for fewer.
        error = MEDIAN * self._scale[one] * self._spread()[one] / np.sqrt(len(past))
        known = self._seen[one] + FIRST - age >= FIRST * self._spread()[one] ** 2
        sure = (
            (known or not grows)
            and change >= ERRORS * error
            and sign * (share - 0.5) >= min(RANK_SUM * by_chance, 0.45 if change >= CLEAR * self._scale[one] else 0.48)
        )
        if change < self.least:
            return []
        kind, first = self._shape(one, places, int(self._steps[(self._fed - age) % RECENT]))
        # What is over again, or may soon be, is none.
        beyond = sign * (now[-LASTS:] - self._center[one]) >= change / 2
        likely = float(ndtr(change / 2 / max(self._scale[one], 1e-6)))
        lasts = np.mean(beyond[-LASTS // 4 :]) >= 0.5 and np.mean(beyond) >= likely - UNLIKELY
        if np.sum(self._steps[places] >= first) < LASTS or not lasts or not sure:
            if age < RECENT:
                self._up[one], self._down[one] = sums
            return []
        if grows and self._has_more_to_do(one, places, change):
            self._begin_anew(one, places)
            return []
        typical = float(np.sum(slope * _medians(self._recent_work[one, places]))) if self.work else 0.0
        before, after = np.exp(self._center[one] + typical), np.exp(level + typical)
        if not grows:
            back_again = np.isfinite(self.best[one]) and level < self.best[one] + self.least / 2
            kind = "over" if back_again else "faster"
            if back_again:
                self.best[one], self.since[one] = np.nan, -1
        else:
            if self.since[one] < 0:
                self.best[one], self.since[one] = self._center[one], first
            before = np.exp(self.best[one] + typical)
        self._begin_anew(one, places)
        return [Event(kind, one, first, step, float(before), float(after))]

    def _shape(self, one: int, places: Int, first: int) -> tuple[str, int]:
        """Whether a growth came at once or gradually, and its first step: which of the two fits what is kept of the
        past and all of the newest steps better (least squares over where it begins)."""
        slope = self._slope[one, : self.work]
        filled = self._filled[one]
        past, now = self._reference_step[one, :filled], self._steps[places]
        earlier = past < now[0]
        at = np.concatenate([past[earlier], now]).astype(np.float64)
        y = np.concatenate(
            [
                (self._reference[one, :filled] - np.nansum(slope * self._reference_work[one, :filled], axis=1))[
                    earlier
                ],
                self._recent[one, places] - np.nansum(slope * self._recent_work[one, places], axis=1),
            ]
        )
        at, y = at[np.isfinite(y)], y[np.isfinite(y)]
        y = np.minimum(y, np.median(y[-LASTS:]) + 3 * max(self._scale[one], self.least))
        starts = at[2 : -LASTS // 2]
        if len(starts) < 2:
            return "step", first
        best = []
        for shape in ((at >= starts[:, None]) * 1.0, np.maximum(at - starts[:, None], 0.0)):
            x = shape - shape.mean(axis=1, keepdims=True)
            gain = (x @ (y - y.mean())) ** 2 / np.maximum((x * x).sum(axis=1), 1e-12)
            best.append((float(gain.max()), int(starts[gain.argmax()])))
        return ("ramp", best[1][1]) if best[1][0] > best[0][0] else ("step", best[0][1])

    def _has_more_to_do(self, one: int, places: Int, change: float) -> bool:
        """Whether the work of a step grew with its time, once and for all: differences of neighbouring steps do not
        show that."""
        for which in range(self.work):
            if self._slope[one, which]:
                continue
            now, past = self._recent_work[one, places, which], self._reference_work[one, :, which]
            if np.isfinite(now).any() and np.isfinite(past).any():
                more = float(np.nanmedian(now) - np.nanmedian(past))
                varied = NORMAL * float(np.nanmedian(np.abs(past - np.nanmedian(past))))
                # A measure that had varied, and explained nothing, explains nothing.
                if more > max(4 * varied, 1e-4) and change < STEEPEST * more + self.least:
                    return True
        return False

    def _begin_anew(self, one: int, places: Int) -> None:
        """The steps of a change are the new reference."""
        kept = places[np.isfinite(self._recent[one, places])][-REFERENCE // 2 :]
        self._reference[one], self._reference_work[one] = np.nan, np.nan
        self._reference[one, : len(kept)] = self._recent[one, kept]
        self._reference_work[one, : len(kept)] = self._recent_work[one, kept]
        self._reference_step[one, : len(kept)] = self._steps[kept]
        self._filled[one], self._stride[one], self._skip[one] = len(kept), 1, 0
        slope = self._slope[one, : self.work]
        rest = self._recent[one, kept] - np.nansum(slope * self._recent_work[one, kept], axis=1)
        self._center[one] = float(np.median(rest))
        self._scale[one] = max(self._scale[one], mad(rest, float(self._center[one])))
        self._up_since[one] = self._down_since[one] = self._fed
