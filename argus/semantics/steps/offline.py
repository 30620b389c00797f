"""Steps of a whole, short recording, from its sequence of calls alone.

:class:`argus.semantics.steps.by_calls.StepTracker` watches a job for hours, and believes a period after some twenty
exact repetitions. A profiler's recording has two to ten steps, and is there as a whole, so another question can be
asked:
*which unit, repeated, is the recording?*

1. Each n-gram of calls that comes back proposes the stretches between its occurrences as steps: it is an anchor.
   Anchors of equal spacing are alike; one of each kind is looked at.
2. A proposal is evaluated over the whole recording. Its stretches are compared with the typical one by what is called
in
   them, how often; what lies before the first and after the last anchor is compared with the same part of the nearest
   stretch. So a layer, which repeats within each step only, explains little of the recording, and a step explains it
   all. The order inside a stretch does not count: threads launch at once, and never in quite the same order twice.
3. The shortest unit that explains the recording wins, unless a longer one leaves a quarter of its mismatches: then the
   shorter one is a part of a step (a micro-batch) that the optimiser comes between.
4. Each call of the unit must have been seen twice: nothing is concluded from one and a half steps.
5. A profiler begins and ends between steps, so a recording that is a whole number of units is cut where it begins.
   Otherwise steps are cut where the caller launches nothing for the longest time, in the median.

What a step is made of is not known here. A recording of nothing but equal layers, an inference, is explained by the
layer, and its layers are the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.semantics.steps.period import Prefix

Int = NDArray[np.int64]

WIDTHS = (1, 2, 4, 8, 16, 32)
"""Calls in the n-grams that propose anchors. A single call that is made once a step (an optimiser's) is found however
threads mix; long ones distinguish places in a step of few kernels."""
MOST_ANCHOR_KINDS = 64
"""Kinds of anchors that are looked at, those that stand for most calls."""
SAME_SPACING = 32
"""Anchors are of one kind if their median spacings fall in the same of so many parts of an octave: 2 %."""
REGULAR = 0.1
"""Spacings this close to the median count as regular."""
MISMATCH = 0.1
"""Most calls of a stretch, as a share, that may be missing or too many: sparse models launch by what the data are."""
CHANCE = 0.5
"""Two long enough stretches of anything have much the same in them. Steps differ by no more than this share of what
random stretches of the same mixture of calls differ by, and so do their pairs of neighbours."""
SURELY = 0.05
"""Up to this share the order of calls is not looked at: timestamps in whole microseconds lose it."""
EXPLAINED = 0.5
"""Least share of the recording that its steps must explain. What comes before may be set-up; half of it is not."""
PART_OF = 0.25
"""A longer unit wins if it leaves this share of the mismatches, as in ``steps.find_period``."""
FEW = 8
"""Mismatches of a longer unit that may be chance: an optimiser of fewer calls is believed where all else is equal."""
MORE = 0.1
"""Or if it explains so much more of the recording."""
SEEN_TWICE = 0.9
"""Least share of a unit that must be there a second time."""
LEAST_CALLS = 8
"""Calls in a step: less is no forward, backward and update. A loop of one kernel has no steps."""
UNLIKE = 0.01
"""Steps of a recording that begins and ends between steps differ by no more than this, or than the unit's mismatch; and
its length from a whole number of units by no more than this, or three times that mismatch, of a unit, and the more the
more units there are (by the root of their number)."""
_CELLS = 1 << 24


@dataclass(frozen=True)
class Steps:
    """Steps of one sequence of calls.

    Attributes:
        bounds: Index of the first call of each step, and the end of the last one, shape (k + 1,).
        confidence: Of each step, shape (k,): its likeness to the typical one, 0 to 1, times (k + 1) / (k + 2): the
            chance that what happened k times happens again.
        length: Calls in a typical step.
        whole: Whether the recording is a whole number of steps.
    """

    bounds: Int
    confidence: NDArray[np.float64]
    length: int
    whole: bool


@dataclass(frozen=True)
class _Anchors:
    """Occurrences of n-grams, one row of ``first`` and ``count`` a gram: ``places[first : first + count]``."""

    places: Int
    first: Int
    count: Int
    spacing: Int
    """Median distance between occurrences."""
    regular: NDArray[np.float64]
    """Share of the distances that are near the median."""

    def of(self, gram: int) -> Int:
        return self.places[self.first[gram] : self.first[gram] + self.count[gram]]


@dataclass(frozen=True)
class _Unit:
    places: Int
    length: int
    rate: float
    """Mismatches by calls compared."""
    scope: int
    """Calls that belong to steps, whole or cut."""


def find_steps(codes: Int, gaps: Int) -> Steps | None:
    """The steps of a recording.

    Args:
        codes: One integer a call, equal for equal calls, in order of time, shape (n,).
        gaps: How long the caller made no call before each, ns, shape (n,).

    Returns:
        The steps; None where nothing is repeated that explains the recording.
    """
    if len(codes) != len(gaps):
        raise ValueError("codes and gaps differ in length")
    count = len(codes)
    if count < 2 * LEAST_CALLS:
        return None
    dense = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    anchors = [_anchors(dense, width) for width in WIDTHS if width <= count // 2]
    units = sorted(_units(dense, anchors), key=lambda unit: unit.length)
    best: _Unit | None = None
    while units:
        # Those that are about as long differ by where the anchor lies: of those that explain most, what fits best.
        alike = [unit for unit in units if unit.length <= (1 + REGULAR) * units[0].length]
        units = units[len(alike) :]
        most = max(unit.scope for unit in alike)
        unit = min((unit for unit in alike if unit.scope >= (1 - MORE / 2) * most), key=lambda unit: unit.rate)
        if best is None:
            best = unit
            continue
        between = best.rate * unit.length
        better = unit.rate <= PART_OF * best.rate and (between >= FEW or (unit.rate == 0 and between >= 0.5))
        if better or (unit.scope - best.scope >= MORE * count and unit.rate <= max(best.rate, MISMATCH / 2)):
            best = unit
    if best is None:
        return None
    return _from_the_start(dense, anchors, best) or _at_gaps(dense, gaps, anchors, best)


def _anchors(codes: Int, width: int) -> _Anchors:
    hashes = Prefix.of(codes).windows(width)
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    ordered = hashes[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    first, count = edges[:-1], np.diff(edges)
    kept = (count >= 2) & (count <= len(codes) // LEAST_CALLS + 1)
    first, count = first[kept], count[kept]
    if not len(first):
        return _Anchors(order, first, count, first, np.empty(0))
    gram = np.repeat(np.arange(len(first)), count - 1)
    start = np.cumsum(count - 1) - (count - 1)
    at = np.repeat(first, count - 1) + np.arange(len(gram)) - np.repeat(start, count - 1)
    distance = order[at + 1] - order[at]
    by_size = np.lexsort((distance, gram))
    spacing = distance[by_size][start + (count - 1) // 2]
    near = np.abs(distance - spacing[gram]) <= REGULAR * spacing[gram]
    regular = np.bincount(gram, near, minlength=len(first)) / (count - 1)
    return _Anchors(order, first, count, spacing, regular)


def _units(codes: Int, anchors: list[_Anchors]) -> list[_Unit]:
    """Proposals that explain the recording."""
    proposals: list[tuple[int, Int]] = []
    for each in anchors:
        long = np.flatnonzero((each.spacing >= LEAST_CALLS) & (each.regular >= 0.5))
        kind = each.count[long] * 4096 + np.round(np.log2(each.spacing[long]) * SAME_SPACING).astype(np.int64)
        _, inverse, votes = np.unique(kind, return_inverse=True, return_counts=True)
        # Of each kind the most regular anchor, the earliest of those.
        order = np.lexsort((each.places[each.first[long]], -each.regular[long], inverse))
        chosen = long[order[np.searchsorted(inverse[order], np.arange(len(votes)))]]
        weight = votes * each.count[chosen]
        for place in np.argsort(-weight, kind="stable")[:MOST_ANCHOR_KINDS].tolist():
            proposals.append((int(weight[place]), each.of(int(chosen[place]))))
    proposals.sort(key=lambda proposal: -proposal[0])
    evaluated = (_evaluated(codes, places) for _, places in proposals[: 2 * MOST_ANCHOR_KINDS])
    return [unit for unit in evaluated if unit is not None]


def _bags(codes: Int, bounds: Int, kinds: int) -> Int:
    """How often each call is made between bounds, shape (len(bounds) - 1, kinds)."""
    inside = codes[bounds[0] : bounds[-1]]
    row = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    cells = np.bincount(row * kinds + inside, minlength=(len(bounds) - 1) * kinds)
    return cells.reshape(len(bounds) - 1, kinds).astype(np.int64)


def _typical(bags: Int) -> Int:
    """The lower median of each column: with two stretches, what both have."""
    typical: Int = np.sort(bags, axis=0)[(len(bags) - 1) // 2]
    return typical


def _likeness(bags: Int, typical: Int) -> NDArray[np.float64]:
    """2 x what two have in common by what they have together (Dice), of each row; shape (rows,)."""
    common = np.minimum(bags, typical).sum(axis=1)
    return np.asarray(2 * common / np.maximum(bags.sum(axis=1) + typical.sum(), 1), np.float64)


def _by_chance(counts: NDArray[Any]) -> float:
    """By how many calls two random draws of one mixture differ, calls counted as Poisson's."""
    return float(np.sum(2 * np.sqrt(counts / np.pi)))


def _in_order(one: Int, other: Int) -> bool:
    """Whether two stretches have more in common than their mixture of calls: neighbours, too."""
    width = int(max(one.max(initial=0), other.max(initial=0))) + 1
    pairs = np.concatenate([each[:-1] * width + each[1:] for each in (one, other)])
    place = np.unique(pairs, return_inverse=True)[1]
    counts = [np.bincount(part, minlength=place.max(initial=0) + 1) for part in np.split(place, [len(one) - 1])]
    return bool(np.abs(counts[0] - counts[1]).sum() <= CHANCE * _by_chance((counts[0] + counts[1]) / 2))


def _evaluated(codes: Int, places: Int) -> _Unit | None:
    """What the stretches between ``places`` explain of the recording; None: not enough."""
    kinds = int(codes.max()) + 1
    if (len(places) - 1) * kinds > _CELLS:
        return None
    bags = _bags(codes, places, kinds)
    typical = _typical(bags)
    alike = np.flatnonzero(_likeness(bags, typical) >= 1 - 2 * MISMATCH)
    if not len(alike):
        return None
    # What lies outside them is no step: set-up before, validation after.
    places = places[alike[0] : alike[-1] + 2]
    bags = bags[alike[0] : alike[-1] + 1]
    length = int(typical.sum())
    if length < LEAST_CALLS:
        return None
    wrong = int(np.abs(bags - typical).sum())
    compared = int(bags[1:].sum())
    begin, end = int(places[0]), int(places[-1])
    scope = end - begin
    # What lies before and after, with the same part of the nearest stretch.
    before, after = min(begin, length), min(len(codes) - end, length)
    for low, size, same in (
        (begin - before, before, int(places[1]) - before),
        (end, after, int(places[-2])),
    ):
        there = np.bincount(codes[low : low + size], minlength=kinds)
        here = np.bincount(codes[same : same + size], minlength=kinds)
        missing = int(np.maximum(there - here, 0).sum())
        if 2 * missing > size:
            continue  # it is something else
        wrong += int(np.abs(there - here).sum())
        compared += size
        scope += size
    if compared < SEEN_TWICE * length or scope < EXPLAINED * len(codes):
        return None
    if wrong > SURELY * _by_chance(typical) * compared / length:
        # It may be chance: then pairs of calls that follow one another differ as well.
        other = (
            codes[places[1] : places[2]]
            if len(places) > 2
            else np.concatenate([codes[end : end + after], codes[begin - before : begin]])
        )
        if wrong > CHANCE * _by_chance(typical) * compared / length or not _in_order(codes[begin : places[1]], other):
            return None
    rate = wrong / compared
    return _Unit(places, length, rate, scope) if rate <= MISMATCH else None


def _like_parts(codes: Int, bounds: Int) -> NDArray[np.float64]:
    bags = _bags(codes, bounds, int(codes.max()) + 1)
    return _likeness(bags, _typical(bags))


def _steps(codes: Int, bounds: Int, length: int, whole: bool) -> Steps | None:
    if len(bounds) < 2:
        return None
    likeness = _like_parts(codes, bounds)
    steps = len(likeness)
    return Steps(bounds, likeness * (steps + 1) / (steps + 2), length, whole)


def _from_the_start(codes: Int, anchors: list[_Anchors], unit: _Unit) -> Steps | None:
    """The steps of a recording that begins and ends between two."""
    count = len(codes)
    parts = round(count / unit.length)
    drift = abs(count - parts * unit.length) / unit.length
    if parts < 2 or drift > max(UNLIKE, 3 * unit.rate) * np.sqrt(parts):
        return None
    tried = [np.round(np.arange(parts + 1) * count / parts).astype(np.int64)]
    for each in anchors:
        # Where steps differ in length, the earliest anchors show where each begins.
        kind = np.flatnonzero((each.count == parts) & (each.regular >= 0.5))
        kind = kind[np.abs(each.spacing[kind] - unit.length) <= REGULAR * unit.length]
        if len(kind):
            places = each.of(int(kind[np.argmin(each.places[each.first[kind]])]))
            tried.append(np.append(places - places[0], count))
    likeness = [float(_like_parts(codes, bounds).min()) for bounds in tried]
    best = int(np.argmax(likeness))
    if likeness[best] < 1 - max(UNLIKE, unit.rate):
        return None
    return _steps(codes, tried[best], unit.length, whole=True)


def _at_gaps(codes: Int, gaps: Int, anchors: list[_Anchors], unit: _Unit) -> Steps | None:
    """Steps cut before the call that the largest median gap comes before."""
    wanted = len(unit.places)
    rows = [unit.places]
    for each in anchors:
        kind = np.flatnonzero((each.count == wanted) & (each.regular >= 0.5))
        kind = kind[np.abs(each.spacing[kind] - unit.length) <= REGULAR * unit.length]
        rows += [each.of(gram) for gram in kind.tolist()]
    table = np.array(rows)
    # Anchors of one turn each: those of a stretch, in the order in which they follow one another in all stretches.
    table = table[np.argsort(table[:, 0], kind="stable")]
    table = table[(table[:, 0] < table[0, 0] + unit.length) & (table[:, 0] >= table[0, 0])]
    offset = np.arange(unit.length)
    near = np.searchsorted(table[:, 0], table[0, 0] + offset, side="right") - 1
    places = table[near] + (table[0, 0] + offset - table[near, 0])[:, None]
    inside = (places < len(codes)) & (places > 0)
    # A median of those that are there, all but one at least: the recording may have been cut at either end.
    # Cells outside sort behind all others: the median is of those before them.
    waits = np.where(inside, gaps[np.clip(places, 0, len(codes) - 1)], np.iinfo(np.int64).max)
    waits.sort(axis=1)
    worth = waits[np.arange(len(waits)), (inside.sum(axis=1) - 1) // 2]
    worth[inside.sum(axis=1) < max(wanted - 1, 2)] = -1
    best = int(np.argmax(worth))
    bounds = places[best][inside[best]]
    if len(bounds) < 2 or (np.diff(bounds) < LEAST_CALLS).any():
        bounds = unit.places
    # A step more at either end, where anchors are missing but the calls are there.
    kinds = int(codes.max()) + 1
    typical = _typical(_bags(codes, bounds, kinds))
    while (before := bounds[0] - unit.length) >= 0 and _is_like(codes[before : bounds[0]], typical):
        bounds = np.concatenate([[before], bounds])
    while (after := bounds[-1] + unit.length) <= len(codes) and _is_like(codes[bounds[-1] : after], typical):
        bounds = np.append(bounds, after)
    return _steps(codes, bounds, unit.length, whole=False)


def _is_like(part: Int, typical: Int) -> bool:
    bag = np.bincount(part, minlength=len(typical))
    return bool(_likeness(bag[None, :], typical)[0] >= 1 - MISMATCH)
