"""The unit that a sequence of calls repeats: proposed by its n-grams, and verified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hash = NDArray[np.uint64]

WINDOW = 65_536
"""Calls looked at for a period. 3 steps of 20,000 launches, the largest step of the public traces at hand, fit in."""
NEAR_EXACT = 0.98
"""Share of calls that must repeat. One unit in 50 may differ: a step with fewer than 50 equal parts (micro-batches,
layers) is distinguished from its parts, and a rare extra call (a log line's reduction) does not hide the period."""
GRAM = 16
"""Calls in the n-gram whose re-occurrences propose periods. Proposals are verified, so this only bounds their
number."""
CANDIDATES = 64
"""Proposals verified, those with most votes. The true period has a vote from every n-gram unique in its unit."""
MIN_PERIODS = 3
"""A period must hold over three units: two can be a coincidence of warm-up steps."""
LOCK_PERIODS = 5
"""Units :class:`StepTracker` wants before it believes a period: attached inside a step of 4 micro-batches, 3 are
seen."""
PROOF_UNITS = 20
"""Units over which a new period must hold before steps are reported: up to 19 micro-batches a step are distinguished
from steps. Evaluation more often than every 20 steps is in turn taken for a part of a longer step, where it launches
kernels of its own."""
PROOF = 0.95
"""Share of those units that must be followed by another at once: 19 of 20. Fewer suffice where nothing new is launched
in between."""
SHORT_STRETCH = 4096
"""Stretches of calls up to this long are looked at in four places: steps that evaluation comes between so often are
short."""
KNOWN_KERNELS = 0.9
"""Share of the launches between repetitions that must be known from them: an evaluation may have a kernel or two of its
own (an argmax), an optimiser has hardly any other."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing, Knuth TAOCP 3, 6.4
_BASE = np.uint64(0xD1342543DE82EF95)  # odd, hence invertible modulo 2^64; from Steele and Vigna, LXM multipliers


def mix(values: NDArray[np.uint64] | NDArray[np.int64]) -> Hash:
    """Spreads values over 64 bits, so that polynomial hashes of small codes do not collide."""
    mixed = values.astype(np.uint64, copy=True)
    mixed ^= mixed >> np.uint64(30)
    mixed *= MULTIPLIER
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)  # splitmix64's second constant
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _powers(count: int) -> Hash:
    powers = np.full(count, _BASE, np.uint64)
    if count:
        powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


@dataclass(frozen=True)
class Prefix:
    """Hashes of all windows of a sequence, any width, from one pass (Karp and Rabin, modulo 2^64)."""

    sums: Hash
    powers: Hash

    @classmethod
    def of(cls, codes: NDArray[np.uint64] | NDArray[np.int64]) -> Prefix:
        powers = _powers(len(codes) + 1)
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(mix(codes) * powers[:-1], out=sums[1:])
        return cls(sums, powers)

    def windows(self, width: int) -> Hash:
        """Hashes of windows ``[i, i + width)``, shape (n - width + 1,), comparable with one another."""
        count = len(self.sums) - width
        # Shifting each up to the last one's power avoids inverses.
        return (self.sums[width:] - self.sums[:-width]) * self.powers[count - 1 :: -1][:count]

    def matches(self, unit: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Where windows equal ``unit``, shape (n - len(unit) + 1,)."""
        width = len(unit)
        count = len(self.sums) - width
        if count <= 0:
            return np.zeros(0, np.bool_)
        target = np.sum(mix(unit) * _powers(width), dtype=np.uint64)
        return np.asarray((self.sums[width:] - self.sums[:-width]) == target * self.powers[:count])


@dataclass(frozen=True)
class Period:
    """A repeating unit of a call sequence.

    Attributes:
        length: Calls in the unit.
        score: Share of calls equal to the one a period later, 0 to 1.
        repeats: Whole units in the stretch the score was taken over.
    """

    length: int
    score: float
    repeats: int


def _score(codes: NDArray[np.int64], length: int) -> Period | None:
    """The repetition of ``codes`` at ``length``, over the newer half of the window and at least three units of it."""
    start = min(len(codes) - MIN_PERIODS * length, len(codes) // 2)
    if start < 0:
        return None
    tail = codes[start:]
    return Period(length, float(np.mean(tail[length:] == tail[:-length])), len(tail) // length)


def find_period(codes: NDArray[np.int64]) -> Period | None:
    """The shortest unit that the end of a sequence repeats.

    Each n-gram votes for the distance to its previous occurrence; the distances with most votes are verified against
    the newer half of the window (the older may be warm-up). The shortest that holds wins, unless a longer one leaves
    at most a quarter of its mismatches: then the shorter one is a part of the unit (a layer, a bucket) that repeats
    often. A multiple of the true period never has fewer mismatches, since an extra call disturbs one period's worth
    of comparisons.

    Args:
        codes: One integer a call, shape (n,); the newest :data:`WINDOW` are used.

    Returns:
        The period, or None where nothing repeats three times with a share of :data:`NEAR_EXACT`.
    """
    codes = codes[-WINDOW:]
    count = len(codes)
    if count < MIN_PERIODS:
        return None
    gram = max(1, min(GRAM, count // 8))
    hashes = Prefix.of(codes).windows(gram)
    order = np.argsort(hashes, kind="stable")
    same = hashes[order[1:]] == hashes[order[:-1]]
    distances = (order[1:] - order[:-1])[same]
    votes = np.bincount(distances[distances <= count // MIN_PERIODS], minlength=1)
    shifts = np.flatnonzero(votes)
    if len(shifts) > CANDIDATES:
        shifts = np.sort(shifts[np.argsort(votes[shifts], kind="stable")[-CANDIDATES:]])
    best: Period | None = None
    for length in shifts:
        period = _score(codes, int(length))
        if period is None or period.score < NEAR_EXACT:
            continue
        if best is None or (period.score > best.score and 1 - period.score <= (1 - best.score) / 4):
            best = period
            if best.score == 1.0:
                break
    return best


BACKWARD = np.uint64(0x6261636B77617264)
"""Code of backward passes: no other call's, but by chance."""
EXACT, LOOSE, COLLECTIVES = "exact", "loose", "collectives"


def codes_of(calls: NDArray[np.void], level: str) -> NDArray[np.uint64]:
    """What is compared of calls at a level."""
    codes = calls["exact"] if level != LOOSE else calls["loose"]
    return np.ascontiguousarray(codes[calls["collective"]] if level == COLLECTIVES else codes)


def find_unit(
    window: NDArray[np.void], level: str, final: bool
) -> tuple[tuple[NDArray[np.uint64], float] | None, bool]:
    """The first unit in a window that keeps repeating, from ever longer beginnings of it, so that the size of the
    batches that calls come in does not matter: ((unit, score) or None, whether one still has to prove itself)."""
    part = window[window["collective"]] if level == COLLECTIVES else window
    launches = ~window["collective"] & ~window["backward"]
    codes = codes_of(window, level)
    prefix = Prefix.of(codes)
    size = 32
    while size < 2 * len(codes):
        size = min(2 * size, 2 * len(codes))
        # An evaluation in the first stretch hides the period from it, but not from one beside it.
        moves = range(0, 2 * size, size // 2) if size <= SHORT_STRETCH else (0,)
        for begin in moves:
            seen = codes[begin : begin + size]
            if begin and len(seen) < size:
                break
            period = find_period(seen.view(np.int64))
            if period is None or len(seen) < LOCK_PERIODS * period.length:
                continue
            if not _holds_every_communicator(part, begin + len(seen), period.length):
                continue
            unit = seen[-period.length :]
            if level != COLLECTIVES and (unit == BACKWARD).all():
                continue  # micro-batches
            if launches.any() and level == COLLECTIVES and (unit == unit[0]).all():
                continue  # equal buckets: only the launches between them could separate the steps
            decided = _prove(part, prefix, unit, period, level, final, whole=size >= len(codes))
            if decided is not None:
                return decided
    return None, False


def _prove(
    part: NDArray[np.void],
    prefix: Prefix,
    unit: NDArray[np.uint64],
    period: Period,
    level: str,
    final: bool,
    *,
    whole: bool,
) -> tuple[tuple[NDArray[np.uint64], float] | None, bool] | None:
    """What :func:`find_unit` answers for one proposed unit; None: it is none. ``whole``: it is from all calls."""
    starts = np.flatnonzero(prefix.matches(unit))
    gaps = np.diff(starts)
    proof = gaps[:PROOF_UNITS]
    share = float(np.mean(proof == period.length)) if len(proof) else 0.0
    if share >= PROOF and (final or len(proof) == PROOF_UNITS):
        return (unit, period.score), False
    if share >= PROOF:
        return None, True
    proven = len(proof) == PROOF_UNITS or (final and len(proof) >= LOCK_PERIODS)
    if proven and share >= 0.5 and level != COLLECTIVES and _nothing_new(part, starts, period.length):
        return (unit, period.score), False
    # Steps that often differ (evaluation, lost records) are better than none.
    share = float(np.mean(gaps == period.length)) if len(gaps) else 0.0
    if (final or len(gaps) >= 3 * PROOF_UNITS) and share >= 0.5 and whole:
        return (unit, period.score * share), False
    return None


def _holds_every_communicator(part: NDArray[np.void], end: int, length: int) -> bool:
    """Whether the unit that ends before ``end`` holds a call of every communicator that is in regular use: a
    micro-batch alone does not."""
    collective = part[part["collective"]]
    newer = collective[len(collective) // 2 :]
    inside = part[end - length : end]
    regular, uses = np.unique(newer["comm"], return_counts=True)
    have = np.unique(inside["comm"][inside["collective"]])
    return bool(np.isin(regular[uses >= 2], have).all())


def _nothing_new(calls: NDArray[np.void], starts: NDArray[np.int64], length: int) -> bool:
    """Whether what lies between units launches only what the units launch, too: evaluation between steps.

    What lies between a step's micro-batches is the optimiser, with kernels of its own.

    Args:
        calls: Those that the units were looked for in, shape (n,).
        starts: Where units begin.
        length: Calls in one.
    """
    inside = np.zeros(len(calls) + 1, np.int64)
    inside[starts] += 1
    inside[np.minimum(starts + length, len(calls))] -= 1
    covered = np.cumsum(inside[:-1]) > 0
    between = np.arange(len(calls)) > starts[0]
    between &= (np.arange(len(calls)) < starts[-1]) & ~covered & ~calls["collective"]
    unit = calls["loose"][starts[0] : starts[0] + length][~calls["collective"][starts[0] : starts[0] + length]]
    extra = calls["loose"][between]
    return len(extra) == 0 or float(np.mean(np.isin(extra, unit))) >= KNOWN_KERNELS
