"""Which of several traced processes take more than their share, so that the others do not pay for their calls.

Probes are shared: what one process calls fills the rings of all, and what its probes cost counts against the budget of
all. The kernel side has a budget for each process and ring (bpf/common.bpf.h): no process fills a ring for the others.
The rest is decided here. A process is ignored from then on, rather than less observed of everybody:

* if it floods: more than ``RECORDS_S`` calls a second, beyond a burst, or records refused, beside a job that does not;
* if what observing costs is above the budget, and would not be without the processes of some owners: one user, or one
  container, takes no observation from another that makes calls. Within one owner's jobs the governor thins what is
  observed of all.

A job alone is never ignored: nobody has to be protected from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from argus.capture.probes import RECORDS_S

BURST_HITS = RECORDS_S
"""Calls beyond ``RECORDS_S`` that are no flood yet: a second of twice as many."""
LEAST_RAN = 0.01
"""Of the time: of what ran for less nothing is concluded."""
LEAST_CALLS_S = 10.0
"""Of all processes of an owner: one that makes fewer loses nothing that counts while calls are seen in windows. A
notebook that idles beside a job has nothing of that ignored."""
PATIENCE_S = 1.0
"""For so long an owner must be above the budget while others are not: a program makes many calls while it warms up."""


@dataclass(frozen=True)
class Spent:
    """What one process did since it was looked at last.

    Attributes:
        job, owner: Whose it is; anything that can be compared.
        hits: Of its probes.
        cost_ns: What its hits cost the threads that made them, ns, by the prices of the files that it maps.
        refused: Records that its budgets had no room for.
        elapsed_s: Since then.
        ran_s: The same, less the time in which it waited for a CPU: it makes no calls then.
    """

    job: Hashable
    owner: Hashable
    hits: int
    cost_ns: float
    refused: int
    elapsed_s: float
    ran_s: float


@dataclass
class _Account:
    beyond: float = 0.0
    """Calls beyond the budget that it has made and not made up for."""
    refusals: int = 0
    """Looks in a row at which records had been refused."""


class Neighbours:
    """Decides which processes are ignored.

    Args:
        budget: What observing may cost, as a share of the jobs' time.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._accounts: dict[int, _Account] = {}
        self._heavy_s: dict[Hashable, float] = {}
        self.suspects = False
        """Whether some owner is above the budget and others are not: what they cost together says nothing of these."""

    def look(self, spent: Mapping[int, Spent]) -> dict[int, str]:
        """The processes that are to be ignored from now on, and why.

        Args:
            spent: Of each process that is recorded, by PID.
        """
        self._accounts = {pid: self._accounts.get(pid, _Account()) for pid in spent}
        flooding = {pid for pid, one in spent.items() if self._floods(self._accounts[pid], one)}
        calm = {one.job for one in spent.values()} - {spent[pid].job for pid in flooding}
        reasons = {}
        if calm:
            for pid in flooding:
                rate = spent[pid].hits / max(spent[pid].elapsed_s, 1e-3)
                reasons[pid] = f"it makes {rate:,.0f} traced calls a second beside other jobs"
        return reasons | self._above({pid: one for pid, one in spent.items() if pid not in reasons})

    @staticmethod
    def _floods(account: _Account, one: Spent) -> bool:
        account.beyond = max(account.beyond + one.hits - RECORDS_S * one.elapsed_s, 0.0)
        account.refusals = account.refusals + 1 if one.refused else 0
        return account.beyond > BURST_HITS or account.refusals >= 2

    def _above(self, spent: Mapping[int, Spent]) -> dict[int, str]:
        """Of owners that are above the budget where others are not: the processes that are."""
        shares: dict[Hashable, list[float]] = {}
        rates: defaultdict[Hashable, float] = defaultdict(float)
        for one in spent.values():
            rates[one.owner] += one.hits / max(one.elapsed_s, 1e-3)
        for one in spent.values():
            if rates[one.owner] < LEAST_CALLS_S:
                continue
            shares.setdefault(one.owner, []).append(_share(one))
        together = [share for each in shares.values() for share in each]
        heavy = {owner for owner, each in shares.items() if sum(each) > self._budget * len(each)}
        self.suspects = bool(heavy and len(heavy) < len(shares) and sum(together) > self._budget * len(together))
        if not self.suspects:
            self._heavy_s.clear()
            return {}
        elapsed_s = max(one.elapsed_s for one in spent.values())
        self._heavy_s = {owner: self._heavy_s.get(owner, -elapsed_s) + elapsed_s for owner in heavy}
        patient = {owner for owner, seconds in self._heavy_s.items() if seconds < PATIENCE_S}
        return {
            pid: f"probes take {share:.1%} of its time, and more than the budget of all only because of it"
            for pid, one in spent.items()
            if one.owner in heavy - patient and (share := _share(one)) > self._budget
        }


def _share(one: Spent) -> float:
    return one.cost_ns / 1e9 / max(one.ran_s, LEAST_RAN * one.elapsed_s, 1e-3)
