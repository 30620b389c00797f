"""What observing costs the jobs of each owner, and what of it is given up for that owner alone.

Where jobs of several owners are traced, none decides what is observed of the others, and none hides in a mean over all
what observing costs it: GPU times and waits have a ladder for each owner. The rate at which stacks are sampled is that
of all. It is lowered where more than half of the users have need of it: each has one vote, which its containers share.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from argus.live.cost.governor import Change, Governor, Part, Reading, Rung
from argus.model.losses import ANY_CONTAINER, Owner

OF_OWNERS = frozenset(rung for rung in Rung if rung.part in (Part.OFF_CPU, Part.GPU))
"""Rungs that are taken for one owner."""
EVERYBODYS = frozenset(Rung) - OF_OWNERS
NOTICEABLE = 0.2
"""Of the budget: what costs less is not worth giving up, and whom it costs less has no say in what others give up."""
KEPT_OWNERS = 256
"""Owners without processes for whom it is kept in mind what was given up: their job may start again."""
Shares = Mapping[Part, float]
"""Of the time of an owner's jobs, what they lose, by part."""


@dataclass(frozen=True)
class OwnChange:
    """A step of a ladder. ``owner``: whose; None: everybody's."""

    owner: Owner | None
    change: Change


class Ladders:
    """Decides, window by window.

    Args:
        shared: Has the ladder of what is everybody's.
    """

    def __init__(self, shared: Governor) -> None:
        self._shared = shared
        self._of: dict[Owner, Governor] = {}
        self._spent: Mapping[Part, Mapping[Owner, int]] = {}

    @property
    def taken(self) -> list[tuple[Owner, Rung]]:
        """The rungs that are in force for an owner."""
        return [(owner, rung) for owner, governor in self._of.items() for rung in governor.taken]

    def split(
        self, window: Reading, times: Mapping[Owner, Reading], spent: Mapping[Part, Mapping[Owner, int]]
    ) -> dict[Owner, Shares]:
        """What a window cost each owner.

        Args:
            window: Of all.
            times: Of each owner with processes: their time, nothing else.
            spent: As ``Side.spent_by_owner`` has it, of all sides. What a part took is that of owners in these parts;
                where nothing is known of that, by their time. Of owners without an account of their own it is that of
                their user in ``ANY_CONTAINER``, by their time.
        """
        before, self._spent = self._spent, spent
        if len(times) < 2:
            return {owner: window.shares() for owner in times}
        wall = max(sum(time.wall for time in times.values()), 1)
        by_time = {owner: time.wall / wall for owner, time in times.items()}
        taken: dict[Owner, dict[Part, int]] = {owner: {} for owner in times}
        for part, ns in window.taken.items():
            now, then = spent.get(part, {}), before.get(part, {})
            new = _spent_of_each({owner: max(ns - then.get(owner, 0), 0) for owner, ns in now.items()}, times)
            total = sum(new.values())
            for owner in times:
                taken[owner][part] = round(ns * (new[owner] / total if total else by_time[owner]))
        return {
            owner: replace(time, taken=taken[owner], waited=round(window.waited * by_time[owner])).shares()
            for owner, time in times.items()
        }

    def look(
        self, shares: Mapping[Owner, Shares], now: float, able: Mapping[Owner, Collection[Rung]]
    ) -> list[OwnChange]:
        """The steps that are to be carried out, one of each owner at most.

        Args:
            shares: As ``split`` has them.
            now: When the window ended, seconds.
            able: Of each of these owners: steps down that would make a difference now.
        """
        changes = self._forget(shares)
        wanted: dict[Owner, Rung] = {}
        for owner, of_owner in shares.items():
            governor = self._of.setdefault(owner, Governor(self._shared.budget))
            change = governor.next_change(of_owner, now, able[owner], shared=EVERYBODYS)
            if change is not None and change.rung in EVERYBODYS:
                wanted[owner] = change.rung
            elif change is not None:
                changes.append(OwnChange(owner, change))
        if not shares:
            return changes
        votes = _votes(self._concerned(shares))
        agreed = 2 * sum(votes[owner] for owner in wanted) > sum(votes.values())
        change = self._shared.next_change(self.middle(shares), now, set(wanted.values()) if agreed else ())
        if change is not None:
            changes.append(OwnChange(None, change))
        for owner in wanted:
            if agreed:
                self._of[owner].was_heard()
                continue
            least = NOTICEABLE * self._shared.budget
            worth = {rung for rung in able[owner] if rung in OF_OWNERS and shares[owner].get(rung.part, 0.0) > least}
            if (own := self._of[owner].next_change(shares[owner], now, worth)) is not None:
                changes.append(OwnChange(owner, own))
        return changes

    def _concerned(self, shares: Mapping[Owner, Shares]) -> Mapping[Owner, Shares]:
        """Owners whom observing costs something; all, if there are none."""
        least = NOTICEABLE * self._shared.budget
        return {owner: each for owner, each in shares.items() if sum(each.values()) > least} or shares

    def middle(self, shares: Mapping[Owner, Shares]) -> Shares:
        """What observing costs the user in the middle, by the sum, of those whom it costs something; of two the lower
        one. Each owner has its part of its user's vote."""
        concerned = self._concerned(shares)
        votes = _votes(concerned)
        left = Fraction(sum(votes.values()), 2)
        in_order = sorted(concerned, key=lambda owner: sum(concerned[owner].values()))
        for owner in in_order:
            left -= votes[owner]
            if left <= 0:
                break
        return concerned[owner]

    def _forget(self, shares: Mapping[Owner, Shares]) -> list[OwnChange]:
        """Forgets owners that have no processes, and takes back what was given up for some that left long ago."""
        gone = [owner for owner in self._of if owner not in shares]
        changes = []
        for place, owner in enumerate(gone):
            taken = self._of[owner].taken
            if not taken or place < len(gone) - KEPT_OWNERS:
                changes += [OwnChange(owner, Change(rung, False, 0.0, 0.0)) for rung in reversed(taken)]
                del self._of[owner]
        return changes


def _votes(owners: Collection[Owner]) -> dict[Owner, Fraction]:
    """One a user, shared by its containers."""
    containers = Tally(user for user, _ in owners)
    return {owner: Fraction(1, containers[owner[0]]) for owner in owners}


def _spent_of_each(new: Mapping[Owner, int], times: Mapping[Owner, Reading]) -> dict[Owner, float]:
    """What was spent on each owner with processes: what containers of a user have in common, by their time."""
    own = {owner: float(new.get(owner, 0)) for owner in times}
    sharing = [owner for owner in times if owner not in new and (owner[0], ANY_CONTAINER) in new]
    wall = Tally[int]()
    for owner in sharing:
        wall[owner[0]] += times[owner].wall
    for owner in sharing:
        own[owner] = new[owner[0], ANY_CONTAINER] * times[owner].wall / max(wall[owner[0]], 1)
    return own
