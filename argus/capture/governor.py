"""Keeps what observing costs the traced job within a budget: where it is more, less is observed, in fixed steps.

What is taken from a job's threads (probes, interrupts, CUPTI) is CPU time; what a job loses is less: where a thread
waits for its GPU anyway, nobody waits for the thread. So the share is

    taken · min(1, C / W, 1 - S / W) / max(W, C)

with W the time of all ranks' processes, C the CPU time that they spent and S the time that their threads spent in calls
that wait for a GPU. A job whose threads all compute (C > W) loses its part of C; one whose launching thread never waits
its part of W; one that waits nine tenths of the time a tenth of that. It is an estimate, and made to err upwards: C and
``taken`` are those of all threads, not of the one that matters.

``Governor`` is a pure function of such measurements over time. Who measures, and who carries out what it decides, is
``argus.overhead``.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from argus.capture import DEFAULT_RATE_HZ

DEFAULT_BUDGET = 0.01
"""Of the job's time (``--max-overhead``)."""
LOW_RATE_HZ = 7
"""Samples of stacks a second and CPU where stacks cost too much."""
PATIENCE = 2
"""So many windows in a row must be above the budget: loading a module makes thousands of calls, once."""
ROOM = 0.5
"""What was given up is taken up again while the cost is below this part of the budget."""
RETURN_S, LONGEST_RETURN_S = 60.0, 3600.0
"""For how long that must be so. Each time that it was too early doubles it."""


class Part(str, enum.Enum):
    """What costs. Equal to its text."""

    CALLS = "calls"
    MARKS = "marks"
    STACKS = "stacks"
    GPU = "gpu"

    __str__ = str.__str__


@dataclass(frozen=True)
class Rung:
    """A step down.

    Attributes:
        name: The feature that changes, as table ``features`` has it.
        text: What is so from then on, for people.
        back: What is so again when it is taken back; empty: it is not.
    """

    name: str
    text: str
    back: str = ""


LADDERS: dict[Part, tuple[Rung, ...]] = {
    Part.STACKS: (
        Rung(
            "sampling more often",
            f"stacks are sampled {DEFAULT_RATE_HZ} times a second at most",
            "stacks may be sampled more often again",
        ),
        Rung(
            "sampling at the usual rate",
            f"stacks are sampled {LOW_RATE_HZ} times a second",
            f"stacks are sampled {DEFAULT_RATE_HZ} times a second again",
        ),
        Rung("following waits", "time off the CPU is not followed", "time off the CPU is followed again"),
    ),
    Part.MARKS: (
        # Steps that were found by calls meanwhile have other bounds: there is no way back from either.
        Rung(
            "NVTX ranges", "NVTX's ranges are not probed any more; steps told by them are found by calls from here on"
        ),
        Rung("ranges", "PyTorch's ranges are not probed any more; steps are found by calls from here on"),
    ),
    Part.GPU: (
        Rung(
            "GPU times for all of the time",
            "GPU times are recorded for a quarter of the time",
            "GPU times are recorded as before",
        ),
        Rung(
            "GPU times for a quarter of the time",
            "GPU times are recorded for a tenth of the time",
            "GPU times are recorded for a quarter of the time",
        ),
    ),
    Part.CALLS: (
        Rung(
            "products",
            "cuBLAS and attention are not probed, FLOP/s are not told",
            "cuBLAS and attention are probed again",
        ),
        Rung("launches", "launches are not probed", "launches are probed again"),
    ),
}
"""Each part's steps, in order. What is next is the next step of the part that costs most."""


@dataclass(frozen=True)
class Reading:
    """What was spent since the trace began, ns.

    Attributes:
        wall: Time of all ranks' processes, one after the other.
        cpu: CPU time of these processes.
        waited: Time that their threads spent in calls that wait for a GPU.
        taken: Time that observing took from their threads, by part.
    """

    wall: int = 0
    cpu: int = 0
    waited: int = 0
    taken: Mapping[Part, int] = field(default_factory=dict)

    def since(self, before: Reading) -> Reading:
        """What was spent since another reading."""
        taken = {part: max(ns - before.taken.get(part, 0), 0) for part, ns in self.taken.items()}
        return Reading(self.wall - before.wall, self.cpu - before.cpu, self.waited - before.waited, taken)

    def shares(self) -> dict[Part, float]:
        """Shares of the job's time that the job loses, by part: the module says how. Empty: there was no job."""
        if self.wall <= 0:
            return {}
        exposed = min(1.0, self.cpu / self.wall, 1 - self.waited / self.wall)
        return {part: ns * max(exposed, 0.0) / max(self.wall, self.cpu) for part, ns in self.taken.items()}


@dataclass(frozen=True)
class Change:
    """One step of a ladder.

    Attributes:
        rung: Which.
        down: Whether it is taken, or taken back.
        share: What observing cost in the last window.
        part_share: Of that, the part that the step belongs to.
    """

    rung: Rung
    down: bool
    share: float
    part_share: float


class Governor:
    """Decides, window by window, whether less is to be observed, or more again.

    Args:
        budget: Share of the job's time, above 0.

    Attributes:
        taken: The steps that are in force, oldest first.
    """

    def __init__(self, budget: float = DEFAULT_BUDGET) -> None:
        self.budget = budget
        self.taken: list[Rung] = []
        self._part = {rung.name: part for part, rungs in LADDERS.items() for rung in rungs}
        self._above = 0
        self._room_since: float | None = None
        self._wait_s: dict[str, float] = {}
        self._returned: set[str] = set()

    def judge(self, shares: Mapping[Part, float], now: float, able: Collection[str]) -> Change | None:
        """Takes a window's costs. One step at most comes of it.

        Args:
            shares: ``Reading.shares`` of the window.
            now: When it ended, seconds.
            able: Names of the steps down that would make a difference now.
        """
        total = sum(shares.values())
        if total > self.budget:
            self._room_since = None
            self._above += 1
            return self._down(shares, total, able) if self._above >= PATIENCE else None
        self._above = 0
        if not self.taken or total > ROOM * self.budget:
            self._room_since = None
            return None
        self._room_since = now if self._room_since is None else self._room_since
        return self._up(shares, total, now - self._room_since)

    def _down(self, shares: Mapping[Part, float], total: float, able: Collection[str]) -> Change | None:
        for part in sorted(LADDERS, key=lambda part: -shares.get(part, 0.0)):
            if not shares.get(part):
                break
            rungs = (rung for rung in LADDERS[part] if rung not in self.taken and rung.name in able)
            rung = next(rungs, None)
            if rung is None:
                continue
            self._above = 0
            self.taken.append(rung)
            if rung.name in self._returned:
                self._wait_s[rung.name] = min(2 * self._wait_s.get(rung.name, RETURN_S), LONGEST_RETURN_S)
            return Change(rung, True, total, shares[part])
        return None

    def _up(self, shares: Mapping[Part, float], total: float, for_s: float) -> Change | None:
        """Takes the newest step back, once there has been room for long enough."""
        for rung in reversed(self.taken):
            if not rung.back:
                continue
            if for_s < self._wait_s.get(rung.name, RETURN_S):
                return None
            self.taken.remove(rung)
            self._returned.add(rung.name)
            self._room_since = None
            return Change(rung, False, total, shares.get(self._part[rung.name], 0.0))
        return None
