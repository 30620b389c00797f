"""Which run is judged when, where jobs of several owners are traced together.

All rounds together take a fifth of the time. Users have equal parts of it, and so have the containers of a user: who
has many jobs, or slow ones, waits for them alone. The moment in which a run's silence counts as a hang comes between,
for an owner that has not had many of these lately.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Mapping
from typing import TypeAlias

from argus.diagnose.follow.follow import LEAST_PAUSE
from argus.model.losses import UNKNOWN, Owner
from argus.model.shares import CONTAINERS

Run: TypeAlias = "tuple[str, int]"

BURST_S = 10.0
"""Of the moments in which hangs count: rounds that pay off in so many seconds may be ahead of an owner's part."""
SLOW_S = 1.0
"""A round that failed after so long is not tried again at once. One that failed sooner cost little: the store is away,
and comes back."""
SOON_S = 0.001
"""The shortest pause: sums of times are not exact."""
MOST_FAILURES = 3
"""The pause after failures doubles so many times."""
LIMIT_S = 4.0
"""Beside other owners a round ends after so long, and a run's next one after twice as long, up to eight times: a hang
that counts after 25 s is named within 30."""


class Turns:
    """When each run is judged next. Times are seconds since any moment, the same in all calls."""

    def __init__(self) -> None:
        self._owners: Mapping[Run, Owner] = {}
        self._runs: list[Run] = []
        self._next: dict[Run, float] = {}
        self._last: dict[Run, float] = {}
        self._due: dict[Run, float] = {}
        self._failures: Tally[Run] = Tally()
        self._free: dict[Owner, float] = {}
        """When an owner's part pays for its rounds."""
        self._hurried: dict[Owner | int, float] = {}
        """The same of rounds ahead of it, of owners and users."""
        self._served: dict[Owner | int, float] = {}

    def keep(self, runs: set[Run], owners: Mapping[Run, Owner], now: float) -> None:
        """Sets which runs there are, and whose; of others nothing is known any more."""
        self._runs, self._owners = sorted(runs), owners
        for book in (self._next, self._last, self._due, self._failures):
            for run in book.keys() - runs:
                book.pop(run)
        present = {owner for run in runs for owner in (self._owner(run), self._owner(run)[0])}
        for times in (self._free, self._hurried, self._served):
            for one in [one for one, until in times.items() if one not in present and until < now - BURST_S]:
                del times[one]  # type: ignore[arg-type]

    def _owner(self, run: Run) -> Owner:
        return self._owners.get(run, UNKNOWN)

    def choose(self, now: float) -> Run | None:
        """The run to be judged now; None: there is none."""

        def order(run: Run) -> tuple[float, float, float]:
            owner = self._owner(run)
            served = self._served.get(owner[0], -math.inf), self._served.get(owner, -math.inf)
            return (*served, self._last.get(run, -math.inf))

        return min((run for run in self._runs if self._at(run) <= now), key=order, default=None)

    def _at(self, run: Run) -> float:
        owner = self._owner(run)
        hurried = self._hurried.get(owner, -math.inf) - BURST_S
        by_user = self._hurried.get(owner[0], -math.inf) - CONTAINERS * BURST_S
        return min(self._usual(run), max(self._due.get(run, math.inf), hurried, by_user))

    def _usual(self, run: Run) -> float:
        return max(self._next.get(run, -math.inf), self._free.get(self._owner(run), -math.inf))

    def limit_s(self, run: Run) -> float:
        """How long the next round of a run may take; infinite: there is no other owner."""
        if len({self._owner(one) for one in self._runs}) < 2:
            return math.inf
        return LIMIT_S * 2.0 ** min(self._failures[run], MOST_FAILURES)

    def judged(
        self, run: Run, begun: float, ended: float, *, pause_s: float, due_s: float = math.inf, failed: bool = False
    ) -> None:
        """A round is over.

        Args:
            run: Whose.
            begun, ended: When.
            pause_s: From its begin to that of the run's next one, at least.
            due_s: How soon the run's silence counts as a hang.
            failed: Nothing came of it.
        """
        owner, costs = self._owner(run), (1 + LEAST_PAUSE) * (ended - begun)
        if self._usual(run) > begun:
            for one in (owner, owner[0]):
                self._hurried[one] = max(self._hurried.get(one, begun), begun) + costs
        owners = {self._owner(each) for each in self._runs} | {owner}
        parts = len({user for user, _ in owners}) * sum(user == owner[0] for user, _ in owners)
        self._free[owner] = max(self._free.get(owner, begun), begun) + parts * costs
        if failed and ended - begun >= SLOW_S:
            self._failures[run] += 1
        elif not failed and ended - begun < self.limit_s(run) / 2:  # else the next one may take as long as this one
            self._failures[run] = max(min(self._failures[run], MOST_FAILURES) - 1, 0)
        self._next[run] = begun + pause_s * 2.0 ** (min(self._failures[run], MOST_FAILURES) if failed else 0)
        self._due[run] = math.inf if failed else ended + due_s
        self._last[run] = self._served[owner] = self._served[owner[0]] = begun

    def pause_s(self, now: float, most_s: float) -> float:
        """How long there is nothing to do; ``most_s``: new runs are looked for by then."""
        return max(min([most_s, *(self._at(run) - now for run in self._runs)]), SOON_S)
