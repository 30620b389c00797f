"""Steps from one event a step, seen throughout or in windows: where observing more would cost the job too much.

The event (a **pulse**) is the begin of PyTorch's backward passes, or a call that each step makes equally often: which,
is found in short windows in which every call is seen (``find_pulse``). A step begins at a pulse and ends at the next
one, or after as many as a step has. Where pulses are seen throughout, steps are counted exactly. What was not observed
is unknown, not missing: a step that the edge of a window cuts is no step, and numbers go on by how many steps fit in.
While a thread waits for a CPU it makes no steps: such time counts neither in windows nor between them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model.statistics import MEDIAN_ERROR, median_deviation
from argus.semantics.steps.by_calls import BY_PULSES, ITERATION
from argus.semantics.steps.period import find_period

Int = NDArray[np.int64]

REPEATS = 4
"""So often a unit must repeat in a window before one of its calls is taken for a pulse."""
USUAL = 64
"""Newest steps from which the usual duration is taken."""
EXACT, ALIGNED, GUESSED = 1.0, 0.9, 0.5
"""How sure a step's number is: counted from a known step on; the same on all ranks, if not the true one; not even
that."""
KEPT = 4096
"""Newest steps of the first rank by which the others' are numbered."""
KEPT_SPANS = 4096
"""Spans of each kind that are kept while a rank makes no steps: two hours of windows. Beyond, the oldest become one."""
KEPT_PULSES = 65_536
"""Pulses of a rank that wait for the first rank's steps, at most."""
AHEAD = 4
"""So many steps later than the first rank's are the others' pulses taken: by then it has made the step that they are
in, be it longer than others."""
VOTES = 16
"""Steps of a rank after a gap that are compared with the first rank's: one may begin late."""
LEAST_STEPS = 4
"""So many steps are to be seen in a window, and before it, to estimate how much seeing everything slows them."""
LEAST_WINDOWS, MOST_WINDOWS = 6, 32
"""So many windows are needed for that, and remembered."""
PACE_WINDOWS, PACE_PULSES, MOST_PULSES = 64, 8, 256
"""How often pulses come is taken from so many newest windows at most, with so many pulses at least; older ones than it
takes to have ``MOST_PULSES`` do not count, and no window for more than these."""
EARLY_PULSES, EARLY_GAPS = 64, 8
"""Until windows have had so many pulses (the mean of 64 steps that scatter by 10 % is 1 % off), or until there were so
many gaps, the pace is that of the beginning, too, and gaps are estimated anew."""
SIGNIFICANT = 4.0
"""Standard errors by which steps must be longer in windows, or it is not reported."""


@dataclass(frozen=True)
class Pulse:
    """A call that each step makes equally often.

    Attributes:
        call: Its number (``capture.calls``).
        per_step: How often a step makes it.
        step_ns: How long a step took while everything was seen.
        calls: Of a step: how often it makes each call, by number.
    """

    call: int
    per_step: int
    step_ns: int
    calls: Mapping[int, int] = field(default_factory=dict)


def find_pulse(
    codes: NDArray[np.uint64], called: NDArray[np.int64], ts: Int, prices: Mapping[int, int]
) -> Pulse | None:
    """The cheapest call to count steps by, if what was called in a window repeats.

    Args:
        codes: What was called, all that distinguishes calls, in order of time, shape (n,).
        called: Numbers of the functions, shape (n,).
        ts: When, ns, shape (n,).
        prices: What a hit of each costs, ns; functions without a price are no pulses.

    Returns:
        That which costs least in a step; of equals, the rarest.
    """
    period = find_period(codes.view(np.int64))
    if period is None or len(codes) < REPEATS * period.length:
        return None
    units = len(codes) // period.length
    newest = called[len(codes) - period.length :]
    step_ns = int((ts[-1] - ts[-1 - (units - 1) * period.length]) // (units - 1))
    counts = {int(call): int(count) for call, count in zip(*np.unique(newest, return_counts=True), strict=True)}
    able = [call for call in counts if prices.get(call, 0) > 0]
    if not able or step_ns <= 0:
        return None
    best = min(able, key=lambda call: (counts[call] * prices[call], counts[call], call))
    return Pulse(best, counts[best], step_ns, counts)


@dataclass
class _Rank:
    rank: int
    per_step: int
    waiting: list[Int] = field(default_factory=list)
    last: int = 0
    """Begin of the step that it is in; 0: not known."""
    number: int = 0
    """Of that step."""
    count: int = 0
    """Pulses of that step so far, the first included."""
    newest: int = 0
    """The newest pulse."""
    confidence: float = EXACT
    usual: deque[int] = field(default_factory=lambda: deque(maxlen=USUAL))
    slowed: list[int] = field(default_factory=list)
    """Durations of the steps of the newest window in which everything was seen."""
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    """Of windows: their steps' duration, against that of steps before."""
    collectives: int = 0
    launches: int = 0
    since: int = 0
    """Since when pulses have been seen: the end of time that was not seen, else the first pulse."""
    pulses: float = 0.0
    """Those since then; where the first one begins it, it counts half."""
    paces: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=PACE_WINDOWS))
    """Of windows: time that the thread had in it, ns, and pulses."""
    beginning: tuple[float, float] = (0.0, 0.0)
    """The same of the time before the first gap."""
    gaps: int = 0
    """Times so far in which pulses were not seen."""
    early_ns: float = 0.0
    """Time that the thread had in gaps that are yet to be estimated anew."""
    early_steps: int = 0
    """Steps that were counted for these."""
    owed: float = 0.0
    """Steps that were counted too many in gaps; negative: too few."""

    @property
    def step_ns(self) -> int:
        return int(np.median(self.usual)) if self.usual else 0

    @property
    def early(self) -> bool:
        """Whether the pace is still that of the beginning, since windows have had few pulses."""
        few = self.gaps <= EARLY_GAPS and sum(count for _, count in self.paces) < EARLY_PULSES
        return few and self.beginning[1] > 0

    @property
    def pace_ns(self) -> float:
        """Time for each step, pauses and the steps that windows cut included, but not waits for a CPU: more than a
        usual step takes where some take long. 0: not known."""
        paces = list(reversed(self.paces))  # what else runs changes: the newest say most
        if self.early or not paces:
            paces.append(self.beginning)
        seen_ns = pulses = 0.0
        for window_ns, count in paces:
            seen_ns, pulses = seen_ns + window_ns, pulses + count
            if pulses >= MOST_PULSES:
                break
        return seen_ns * self.per_step / pulses if pulses >= PACE_PULSES and seen_ns > 0 else float(self.step_ns)


class _Spans:
    """Spans of time, from one moment to another, that may lie over one another; by when they begin."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._reach: list[int] = []
        """The latest end of each span and those that begin before it, ascending."""
        self.merged = 0
        """Spans that became one with the next, since there were too many."""

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Takes a span."""
        at = bisect_right(self._begins, begin)
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        self._reach_from(at)
        if len(self._begins) > KEPT_SPANS:
            self.merged += 1
            self._ends[:2] = [self._reach[1]]
            del self._begins[1], self._reach[0]

    def _reach_from(self, at: int) -> None:
        before = self._reach[at - 1 : at]
        self._reach[at:] = itertools.accumulate([*before, *self._ends[at:]], max)
        del self._reach[at : at + len(before)]

    def forget(self, before: int) -> None:
        """Drops those that ended before a moment."""
        until = bisect_left(self._begins, before)
        kept = [at for at in range(until) if self._ends[at] >= before]
        if len(kept) < until:
            for column in (self._begins, self._ends):
                column[:until] = [column[at] for at in kept]
            self._reach_from(0)

    def touches(self, begin: int, end: int) -> bool:
        """Whether one of them has a moment between two others."""
        at = bisect_left(self._begins, end)
        return at > 0 and self._reach[at - 1] > begin

    def hold(self, begin: int, end: int) -> bool:
        """Whether one of them has all from one moment to another."""
        at = bisect_right(self._begins, begin)
        return at > 0 and self._reach[at - 1] >= end

    def between(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What they have of the time from one moment to another, in order."""
        at = range(bisect_right(self._reach, begin), bisect_left(self._begins, end))
        parts = [(max(self._begins[i], begin), min(self._ends[i], end)) for i in at]
        return sorted(part for part in parts if part[0] < part[1])

    def ends(self, after: int, until: int) -> list[int]:
        """Ends of those that end after one moment, and until another, in order."""
        return sorted(end for end in self._ends[bisect_right(self._reach, after) :] if after < end <= until)


class ThinnedSteps:
    """Steps of one job from its ranks' pulses.

    How many steps a gap had follows from the pace of the windows before it; in the first gap, from the pace of a
    beginning that Argus itself disturbed. Once windows show the pace, the first gaps are estimated anew, and the
    difference goes into the next gap: no step is given a second number, and none waits for its number.

    Args:
        other_hosts: The job has ranks on other hosts, where somebody else estimates how many steps were not observed.
        queues: By rank, in order of time: a moment, CLOCK_MONOTONIC, and for how long its thread had waited for a CPU
            until then, ns (``capture.process.targets.queued_ns``). Read when steps are numbered: may grow meanwhile.

    Attributes:
        counters: ``steps_not_observed`` (that fit into the time in which pulses were not seen), ``steps_disturbed``
            (counted, but not stored, since more was observed meanwhile, which slowed them), ``windows_merged`` (of so
            long ago that they count as if nothing had been seen between them: a rank has made no step since).
    """

    def __init__(
        self, *, other_hosts: bool = False, queues: Mapping[int, Sequence[tuple[int, int]]] | None = None
    ) -> None:
        self._other_hosts = other_hosts
        self._queues = {} if queues is None else queues
        self.counters: Tally[str] = Tally()
        self._ranks: dict[int, _Rank] = {}
        self._unseen, self._disturbed, self._watched = _Spans(), _Spans(), _Spans()
        self._first: deque[tuple[int, int]] = deque(maxlen=KEPT)
        """Begin and number of the first rank's steps."""

    @property
    def ranks(self) -> set[int]:
        """Those that were begun."""
        return set(self._ranks)

    @property
    def step_ns(self) -> int:
        """How long a step usually takes; 0: not known."""
        return max((state.step_ns for state in self._ranks.values()), default=0)

    def slowdown(self) -> float:
        """How many times as long a step takes while everything is seen as between windows, by the steps themselves: the
        median over windows, of the rank with most. 0: too few windows had steps, or they differ by chance."""
        slowdowns = []
        for state in self._ranks.values():
            if len(state.ratios) < LEAST_WINDOWS:
                continue
            ratios = np.array(state.ratios)
            middle = float(np.median(ratios))
            # The median's standard error by the median absolute deviation, as of a normal distribution.
            error = MEDIAN_ERROR * median_deviation(ratios, middle) / len(ratios) ** 0.5
            if middle - 1 > SIGNIFICANT * error:
                slowdowns.append(middle)
        return max(slowdowns, default=0.0)

    def begin(
        self,
        rank: int,
        per_step: int,
        *,
        number: int = 0,
        after_ns: int = 0,
        step_ns: int = 0,
        pulses: int = 0,
        collectives: int = 0,
        launches: int = 0,
    ) -> None:
        """Goes on from where a rank's steps were found otherwise.

        Args:
            rank: Global rank.
            per_step: Pulses of a step.
            number: Of the step in which the next pulse is.
            after_ns: When the last whole step ended that was found otherwise; 0: none was.
            step_ns: How long steps took until then; 0: not known.
            pulses: Pulses of that step that were there already.
            collectives, launches: Calls that a step makes, for rows.
        """
        state = self._ranks[rank] = _Rank(rank, max(per_step, 1), collectives=collectives, launches=launches)
        state.number, state.newest, state.count = number, after_ns, pulses
        if step_ns:
            state.usual.append(step_ns)
        state.confidence = EXACT if after_ns else GUESSED

    def feed(self, rank: int, ts: Int) -> None:
        """Takes pulses of a rank, CLOCK_MONOTONIC, shape (n,)."""
        if rank in self._ranks and len(ts):
            self._ranks[rank].waiting.append(np.asarray(ts, np.int64))

    def unseen(self, begin_ns: int, end_ns: int) -> None:
        """Between these moments pulses were not observed."""
        self._unseen.add(begin_ns, end_ns)

    def disturbed(self, begin_ns: int, end_ns: int) -> None:
        """Between these moments so much was observed that steps were slower for it."""
        self._disturbed.add(begin_ns, end_ns)

    def watched(self, begin_ns: int, end_ns: int) -> None:
        """Between these moments everything was observed: a window that begins in them does not count for the pace."""
        self._watched.add(begin_ns, end_ns)

    def advance(self, until_ns: int, *, final: bool = False) -> NDArray[np.void]:
        """The steps completed since the last call.

        Args:
            until_ns: All pulses before this have been fed.
            final: Nothing more will come.

        Returns:
            :data:`argus.semantics.steps.by_calls.ITERATION` rows, ordered by rank and step.
        """
        rows: list[tuple[float, ...]] = []
        for place, (_, state) in enumerate(sorted(self._ranks.items())):
            if not state.waiting:
                continue
            ts = np.sort(np.concatenate(state.waiting))
            # By the first rank's steps the others' are numbered: it is some ahead of them.
            until = until_ns if place == 0 else until_ns - AHEAD * state.step_ns
            ready = len(ts) if final else int(np.searchsorted(ts, until, side="right"))
            ready = max(ready, len(ts) - KEPT_PULSES)
            state.waiting = [ts[ready:]] if ready < len(ts) else []
            rows += self._walk(state, ts[:ready], first=place == 0)
        oldest = min((state.newest for state in self._ranks.values() if state.newest), default=0)
        for spans in (self._unseen, self._disturbed, self._watched):
            spans.forget(oldest)
            self.counters["windows_merged"] += spans.merged
            spans.merged = 0
        return np.array(rows, ITERATION) if rows else np.empty(0, ITERATION)

    def _walk(self, state: _Rank, ts: Int, *, first: bool) -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = []
        for part in self._parts(state.newest, ts):
            if not len(part):
                continue
            cut = state.newest and self._unseen.touches(state.newest, int(part[0]))
            if cut:
                self._pace(state, int(part[0]))
            if cut or not state.newest:
                self._place(state, part, first)
            state.pulses += len(part) if state.since else len(part) - 0.5
            state.since = state.since or int(part[0])
            for pulse in part.tolist():
                rows += self._step(state, pulse, first)
        return rows

    def _parts(self, newest: int, ts: Int) -> list[Int]:
        """Pulses between which nothing was unseen."""
        ends = self._unseen.ends(max(newest, int(ts[0])), int(ts[-1])) if len(ts) else []
        return np.split(ts, np.searchsorted(ts, ends)) if ends else [ts]

    def _pace(self, state: _Rank, begun: int) -> None:
        """Takes how often pulses came in the window before a gap, or until the first gap."""
        gaps = self._unseen.between(state.since or state.newest, begun)
        if state.since and not self._watched.hold(state.since, state.since + 1):
            whole, *parts = self._ran(state.rank, [(state.since, gaps[-1][1]), *gaps])
            seen = whole - sum(parts)
            counts = min(state.pulses, MOST_PULSES)
            pace = max(seen, 0) * counts / state.pulses, counts
            if state.gaps:
                state.paces.append(pace)
            else:
                state.beginning = pace
        state.since, state.pulses = gaps[-1][1], 0.0
        state.gaps += 1

    def _ran(self, rank: int, spans: Sequence[tuple[int, int]]) -> list[int]:
        """How long each span is, less the time in which a rank's thread waited for a CPU, ns."""
        queue = np.array(self._queues.get(rank, ()), np.int64).reshape(-1, 2)
        if not len(queue):
            return [end - begin for begin, end in spans]
        waited = np.diff(np.interp(np.reshape(spans, (-1, 2)), queue[:, 0], queue[:, 1]))[:, 0].tolist()
        return [
            int(end - begin - min(max(wait, 0), end - begin)) for (begin, end), wait in zip(spans, waited, strict=True)
        ]

    def _place(self, state: _Rank, part: Int, first: bool) -> None:
        """Which step the first pulse after time that was not seen is of, and which of its pulses it is."""
        begun, step_ns, before = int(part[0]), state.step_ns, state.number
        pace_ns, gap_ns = state.pace_ns, 0.0
        state.count = 0
        if state.per_step > 1 and len(part) > 1:
            gaps = np.diff(part)
            # What ends a step (an optimiser, a log line) takes longer than what lies between its pulses.
            means = [float(np.mean(gaps[i :: state.per_step])) for i in range(min(state.per_step, len(gaps)))]
            state.count = state.per_step - 1 - int(np.argmax(means))
        if state.newest:
            gap_ns = self._gap_ns(state, begun, pace_ns)
            passed = round(self._passed(state, gap_ns, pace_ns)) if pace_ns else 0
            state.number += max(passed, 1) if state.last else passed
        aligned = first
        # The first pulse that begins a step, and those that begin the ones after it.
        whole = -state.count % state.per_step
        begins = part[whole :: state.per_step][:VOTES]
        if not first and step_ns and (number := self._number_at(begins, step_ns)) is not None:
            number -= whole > 0
            aligned, state.number = number >= before, max(number, before)
        # On one host a step has one number on all ranks, whether or not it is known how many steps came before.
        alike = aligned and not (self._other_hosts and state.newest)
        self.counters["steps_not_observed"] += max(state.number - before - bool(state.last), 0)
        if state.early or not pace_ns:
            state.early_ns, state.early_steps = state.early_ns + gap_ns, state.early_steps + state.number - before
        else:
            state.early_ns, state.early_steps = 0.0, 0
        state.last, state.confidence = 0, ALIGNED if alike else GUESSED

    def _number_at(self, begins: Int, step_ns: int) -> int | None:
        """The number of the first of these steps, by those of the first rank that began nearest to them; None: not
        known. Where that was not observed, its steps before and after it show about which it was."""
        if not self._first or not len(begins):
            return None
        times, numbers = np.array(self._first, np.int64).T
        known = (begins >= times[0] - step_ns / 2) & (begins <= times[-1] + step_ns / 2)
        if not known.any():
            return None
        number = np.rint(np.interp(begins, times, numbers)).astype(np.int64) - np.arange(len(begins))
        return int(np.median(number[known]))

    @staticmethod
    def _passed(state: _Rank, gap_ns: float, pace_ns: float) -> float:
        """Steps in the time from the newest one that is known to a pulse after a gap, less those that are owed."""
        if state.early_ns:
            state.owed = state.early_steps - state.early_ns / pace_ns
        fit = gap_ns / pace_ns
        passed = max(fit - state.owed, fit / 2)  # a debt is paid over several gaps, lest one seems to have no steps
        state.owed -= fit - passed
        return passed

    def _gap_ns(self, state: _Rank, begun: int, pace_ns: float) -> float:
        """Time in which steps were made, from the newest one that is known to a pulse after time that was not seen."""
        last = state.last or state.newest
        gaps = self._unseen.between(last, begun)
        ran = sum(self._ran(state.rank, gaps))
        # No step began where pulses were seen and none came, for however long that was.
        edges = [gaps[0][0] - last, *(after[0] - before[1] for before, after in itertools.pairwise(gaps))]
        return ran + sum(min(edge, pace_ns) for edge in (*edges, begun - gaps[-1][1]))

    def _step(self, state: _Rank, pulse: int, first: bool) -> list[tuple[float, ...]]:
        state.newest = pulse
        if state.count % state.per_step:
            state.count += 1
            return []
        rows: list[tuple[float, ...]] = []
        if state.last:
            duration = pulse - state.last
            watched = self._watched.hold(state.last, pulse)
            if watched:
                state.slowed.append(duration)
            elif state.slowed:
                if min(len(state.slowed), len(state.usual)) >= LEAST_STEPS:
                    state.ratios.append(float(np.median(state.slowed)) / state.step_ns)
                state.slowed.clear()
            if self._disturbed.touches(state.last, pulse):
                self.counters["steps_disturbed"] += 1
            else:
                if not watched:
                    state.usual.append(duration)
                rows.append(
                    (
                        state.rank,
                        state.number,
                        state.last,
                        duration,
                        state.collectives,
                        state.launches,
                        BY_PULSES,
                        state.confidence,
                    )
                )
        if state.count:
            state.number += 1
        state.last, state.count = pulse, 1
        if first:
            self._first.append((pulse, state.number))
        return rows


def concatenate_windows(parts: Iterable[NDArray[np.void]]) -> NDArray[np.void]:
    """Calls of a window in order of time: :data:`SEEN` rows."""
    kept = list(parts)
    joined = np.concatenate(kept) if kept else np.empty(0, SEEN)
    return joined[np.argsort(joined["ts"], kind="stable")]


SEEN = np.dtype([("ts", "<i8"), ("code", "<u8"), ("call", "<i8")])
"""One call in a window: when, the code that identifies it, and the function's number."""
