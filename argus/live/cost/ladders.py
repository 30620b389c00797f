"""What observing costs the jobs of each owner, and what of it is given up for that owner alone.

Where jobs of several owners are traced, none decides what is observed of the others, and none hides in a mean over all
what observing costs it: GPU times and waits have a ladder for each owner. The rate at which stacks are sampled is that
of all. It is lowered where more than half of the owners have need of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from argus.live.cost.governor import Change, Governor, Part, Reading, Rung
from argus.model.losses import Owner

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
                where nothing is known of that, by their time.
        """
        before, self._spent = self._spent, spent
        if len(times) < 2:
            return {owner: window.shares() for owner in times}
        wall = max(sum(time.wall for time in times.values()), 1)
        by_time = {owner: time.wall / wall for owner, time in times.items()}
        taken: dict[Owner, dict[Part, int]] = {owner: {} for owner in times}
        for part, ns in window.taken.items():
            now, then = spent.get(part, {}), before.get(part, {})
            new = {owner: max(now.get(owner, 0) - then.get(owner, 0), 0) for owner in times}
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
        agreed = 2 * len(wanted) > len(self._concerned(shares))
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

    def _concerned(self, shares: Mapping[Owner, Shares]) -> list[Shares]:
        """Those of owners whom observing costs something; of all, if there are none."""
        least = NOTICEABLE * self._shared.budget
        return [each for each in shares.values() if sum(each.values()) > least] or list(shares.values())

    def middle(self, shares: Mapping[Owner, Shares]) -> Shares:
        """Those of the owner in the middle, by what observing costs in all, of those whom it costs something; of two
        the lower ones."""
        in_order = sorted(self._concerned(shares), key=lambda each: sum(each.values()))
        return in_order[(len(in_order) - 1) // 2]

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
