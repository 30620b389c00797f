"""Step numbers that a log has more than once: epochs that each begin at the first step, attempts of a job that was
resumed, and rows that were written twice.

Rows of a rank are read in the order in which they were logged: by their time if that is logged, else as the files have
them. Where its step numbers go back a new stretch begins.

* Stretches that all begin at the first step, and are equally long, are epochs: their steps are numbered on.
* A stretch that begins later, or at the first step and is longer than those before it, is a job that was resumed: its
  rows supersede the earlier ones from its first step on.
* Rows that equal an earlier one of their rank and step are copies.
* Anything else is refused, or, if it is few rows, left out and counted as a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import EXIT_USAGE, ArgusError

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

ALIKE = 0.02
"""Share by which epochs may differ in length: the same data make as many batches, but for the last one."""
ATTEMPT = 10
"""Rows that a resumed job has at least, if it did not come as far as before: fewer are no attempt."""
MOST_LOST = 0.1
"""Share of rows that may contradict others. More are not a few damaged rows: what they mean has to be named."""
TELLING = 0.5
"""Different contents in so many of the steps, at least: equal rows are copies then. Times in whole seconds are all
equal."""
LEAST_ROWS = 3
"""Rows of a stretch, on average: fewer are rows in no order."""
MOST_RESUMES = 1000
LARGEST = 2**32 - 1


@dataclass(frozen=True)
class Rows:
    """All rows, in file order, shape (rows,).

    Attributes:
        rank, step: As logged.
        content: A hash of what else is read of the row.
        time: When it was logged, ns; None: not logged.
        epoch: None: not logged.
    """

    rank: Int
    step: Int
    content: Int
    time: Int | None = None
    epoch: Int | None = None


@dataclass(frozen=True)
class Numbering:
    """Which rows count, and as which step.

    Attributes:
        steps: Of each row in file order; -1: it does not count.
        counters: Rows that do not count for a reason, by counter.
        losses: Rows left out that contradict others, by counter.
        notes: What was concluded, clauses.
    """

    steps: Int
    counters: dict[str, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def number(rows: Rows) -> Numbering:
    """Decides which rows count, and as which step.

    Raises:
        ArgusError: What repeated step numbers mean is not clear, or numbers become too large.
    """
    order = np.argsort(rows.rank, kind="stable") if rows.time is None else np.lexsort((rows.time, rows.rank))
    rank, step, content = rows.rank[order], rows.step[order], rows.content[order]
    notes: list[str] = []
    counters: dict[str, int] = {}
    if rows.epoch is not None:
        step = _by_epoch(step, rows.epoch[order], notes)
    # A row right after one of the same step.
    again = np.concatenate([[False], (rank[1:] == rank[:-1]) & (step[1:] == step[:-1])])
    same = np.concatenate([[False], content[1:] == content[:-1]])
    copies, wrong = again & same, again & ~same
    copies[np.flatnonzero(~again)] |= _copied(rank[~again], step[~again], content[~again])
    kept = ~copies & ~wrong
    stretches = _stretches(rank[kept], step[kept])
    superseded = np.zeros(len(rank), np.bool_)
    if stretches is not None:
        at = np.flatnonzero(kept)
        if stretches.are_epochs():
            step[at] += stretches.offsets(notes)
        else:
            old, odd = stretches.resumed(notes)
            superseded[at[old]], wrong[at[odd]] = True, True
    if wrong.sum() > MOST_LOST * len(rank):
        place = int(np.argmax(wrong))
        raise ArgusError(
            f"{int(wrong.sum()):,} of {len(rank):,} rows are of a rank and step with another row and other times, such "
            f"as rank {rank[place]} in step {step[place]}",
            "Name the column that distinguishes them (--epoch-column, --time-column), or leave out those not meant",
            EXIT_USAGE,
        )
    step[copies | wrong | superseded] = -1
    if step.max() > LARGEST:
        raise ArgusError(f"steps numbered on exceed {LARGEST}", "Is that the column of steps?", EXIT_USAGE)
    numbered = np.empty_like(step)
    numbered[order] = step
    for name, those in (("rows_repeated", copies), ("rows_superseded", superseded)):
        if those.any():
            counters[name] = int(those.sum())
    losses = {"rows_contradicting": int(wrong.sum())} if wrong.any() else {}
    return Numbering(numbered, counters, losses, notes)


def _by_epoch(step: Int, epoch: Int, notes: list[str]) -> Int:
    """Steps numbered on from epoch to epoch, unless they are already."""
    epochs, which = np.unique(epoch, return_inverse=True)
    low, high = np.full(len(epochs), LARGEST, np.int64), np.full(len(epochs), -1, np.int64)
    np.minimum.at(low, which, step)
    np.maximum.at(high, which, step)
    if len(epochs) < 2 or np.all(low[1:] > np.maximum.accumulate(high)[:-1]):
        return np.asarray(step.copy())
    offsets = _offsets(high, int(low.min()), _stride(step))
    notes.append(
        f"step numbers begin again in each of {len(epochs)} epochs: they are numbered on, to {high[-1] + offsets[-1]}"
    )
    return np.asarray(step + offsets[which])


def _offsets(high: Int, first: int, stride: int) -> Int:
    """What to add to the steps of each epoch.

    Args:
        high: The last step of each.
        first: The first step that an epoch has.
        stride: From one logged step to the next.
    """
    spans = high[:-1] - first + stride
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(spans, dtype=np.int64)])


def _stride(step: Int) -> int:
    """From one logged step to the next, as most are."""
    there = np.unique(step)
    return int(np.median(np.diff(there))) if len(there) > 1 else 1


def _copied(rank: Int, step: Int, content: Int) -> Bool:
    """Rows that equal an earlier one of their rank and step, in stretches in which all that were there before do."""
    count = len(rank)
    at = np.arange(count)
    earlier, equal = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    by_key = np.lexsort((at, step, rank))
    twice = (rank[by_key][1:] == rank[by_key][:-1]) & (step[by_key][1:] == step[by_key][:-1])
    earlier[by_key[1:][twice]] = True
    steps = count - int(twice.sum())
    if not twice.any() or len(np.unique(content)) < TELLING * steps:
        return equal
    by_content = np.lexsort((at, content, step, rank))
    one, other = by_content[1:], by_content[:-1]
    equal[one] = (rank[one] == rank[other]) & (step[one] == step[other]) & (content[one] == content[other])
    stretch = np.cumsum(_begins(rank, step)) - 1
    differs = np.bincount(stretch, earlier & ~equal) > 0
    return np.asarray(equal & ~differs[stretch])


def _begins(rank: Int, step: Int) -> Bool:
    """Rows with which a stretch begins: steps go back, or another rank's begin."""
    return np.concatenate([[True], (rank[1:] != rank[:-1]) | (step[1:] < step[:-1])])


@dataclass(frozen=True)
class _Stretches:
    """Rows of ranks, one rank after the other, and the stretches of ranks that have steps twice.

    Attributes:
        rank, step: Of the rows, shape (rows,).
        of_row: The stretch of each row.
        ranks, low, high, sizes, number: Of each stretch: its rank, first and last step, rows, and how many its rank has
            before it.
        twice: Which are of a rank that has steps twice.
        last: Which are the last one of their rank.
    """

    rank: Int
    step: Int
    of_row: Int
    ranks: Int
    low: Int
    high: Int
    sizes: Int
    number: Int
    twice: Bool
    last: Bool

    def _again(self) -> tuple[Bool, Bool]:
        """Stretches of :attr:`twice` after their rank's first: all, and those that begin at its first step."""
        ranks, which = np.unique(self.ranks, return_inverse=True)
        first = np.full(len(ranks), LARGEST, np.int64)
        np.minimum.at(first, which, self.low)
        later = self.twice & (self.number > 0)
        return later, later & (self.low == first[which])

    def are_epochs(self) -> bool:
        """Whether the stretches are epochs.

        Raises:
            ArgusError: They may be, or attempts of a job that was resumed.
        """
        later, at_first = self._again()
        if not at_first.any():
            return False
        rank = int(self.ranks[np.argmax(at_first)])
        own = self.ranks == rank
        unclear = ArgusError(
            f"step numbers of rank {rank} begin again at {_listed(self.low[own][1:])} after "
            f"{_listed(self.high[own][:-1])}: epochs and attempts of a resumed job cannot be told apart",
            "Name the column with the epoch (--epoch-column), or import one attempt",
            EXIT_USAGE,
        )
        if not np.array_equal(later, at_first):
            raise unclear
        # Places where epochs end: all but a rank's last one are whole.
        length = self.high - self.low[at_first].min() + 1
        whole = length[self.twice & ~self.last]
        if whole.min() >= (1 - ALIKE) * whole.max() and length[self.twice].max() <= (1 + ALIKE) * whole.max():
            return True
        for one in np.unique(self.ranks[self.twice]).tolist():
            # A job that began anew, and came further than before.
            lengths = length[self.ranks == one]
            if lengths[-1] <= (1 + ALIKE) * lengths[:-1].max():
                raise unclear
        return False

    def offsets(self, notes: list[str]) -> Int:
        """What to add to the step of each row, if stretches are epochs."""
        count = int(self.number.max()) + 1
        high = np.zeros(count, np.int64)
        np.maximum.at(high, self.number, self.high)
        _, at_first = self._again()
        offsets = _offsets(high, int(self.low[at_first].min()), _stride(self.step))
        notes.append(
            f"step numbers begin again {_times(count - 1)}: taken as {count} epochs, whose steps are numbered on, to "
            f"{high[-1] + offsets[-1]}"
        )
        return np.asarray(offsets[self.number][self.of_row])

    @staticmethod
    def _attempts(step: Int, stretch: Int, low: Int, high: Int) -> Bool:
        """Which stretches of a rank are attempts: they, or later ones, come further than those before, or are long;
        and they have the steps again that they begin before."""
        attempt = np.ones(len(low), np.bool_)
        further = np.maximum.accumulate(high[::-1])[::-1]
        reached = np.maximum.accumulate(high)
        for one in range(1, len(low)):
            here, before = stretch == one, stretch < one
            both = (step >= low[one]) & (step <= min(int(high[one]), int(reached[one - 1])))
            repeated = 2 * np.sum(here & both) >= len(np.unique(step[before & both]))
            attempt[one] = repeated and (further[one] > reached[one - 1] or np.sum(here) >= ATTEMPT)
        return attempt

    def resumed(self, notes: list[str]) -> tuple[Bool, Bool]:
        """Rows that a resumed job logged again later, and rows that contradict earlier ones without that, shape
        (rows,)."""
        old, odd = np.zeros(len(self.rank), np.bool_), np.zeros(len(self.rank), np.bool_)
        resumes: set[int] = set()
        for rank in np.unique(self.ranks[self.twice]).tolist():
            rows = slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())
            own = slice(*np.searchsorted(self.ranks, [rank, rank + 1]).tolist())
            step, stretch = self.step[rows], self.of_row[rows] - own.start
            attempt = self._attempts(step, stretch, self.low[own], self.high[own])
            begins = np.where(attempt, self.low[own], LARGEST + 1)
            after = np.minimum.accumulate(np.append(begins[1:], LARGEST + 1)[::-1])[::-1]
            gone = attempt[stretch] & (step >= after[stretch])
            old[rows] = gone
            resumes.update(after[stretch[gone]].tolist())
            # What is in no attempt counts only where nothing else has that step.
            odd[rows] = ~attempt[stretch] & np.isin(step, step[attempt[stretch] & ~gone])
        if old.any():
            steps = self.step[old]
            notes.append(
                f"the job was resumed at step {_listed(sorted(resumes))}: {len(steps):,} earlier rows, of steps "
                f"{steps.min()} to {steps.max()}, do not count"
            )
        return old, odd


def _stretches(rank: Int, step: Int) -> _Stretches | None:
    """The stretches; None: no rank has a step twice.

    Raises:
        ArgusError: Rows are in no order.
    """
    if not len(rank):
        return None
    by_key = np.lexsort((step, rank))
    twice = (rank[by_key][1:] == rank[by_key][:-1]) & (step[by_key][1:] == step[by_key][:-1])
    if not twice.any():
        return None
    begins = _begins(rank, step)
    of_row = np.cumsum(begins) - 1
    at = np.flatnonzero(begins)
    ends = np.append(at[1:], len(rank)) - 1
    ranks = rank[at]
    affected = np.isin(ranks, rank[by_key][1:][twice])
    new = np.concatenate([[True], ranks[1:] != ranks[:-1]])
    heads = np.maximum.accumulate(np.where(new, np.arange(len(at)), 0))
    before, sizes = np.arange(len(at)) - heads, ends - at + 1
    if sizes[affected].sum() < LEAST_ROWS * affected.sum() or before.max() > MOST_RESUMES:
        raise ArgusError(
            f"rank {ranks[affected][0]} has steps twice, and its rows are in no order",
            "Name the column of times (--time-column), or sort the rows as they were logged",
            EXIT_USAGE,
        )
    last = np.append(new[1:], True)
    return _Stretches(rank, step, of_row, ranks, step[at], step[ends], sizes, before, affected, last)


def _listed(numbers: Sequence[int] | Int) -> str:
    some = [str(each) for each in np.asarray(numbers)[:3].tolist()]
    return ", ".join(some) + (", …" if len(numbers) > 3 else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
