"""The interface of comparers.

A comparison goes through :data:`argus.compare.comparers.order.COMPARERS` and calls ``figures(before, after)`` of each,
once. A comparer reads the profiles of both sides (:mod:`argus.diagnose.read.profile`), never the store, and returns
figures of each run; which of them differ by more than runs do is decided for all in one place
(:mod:`argus.compare.changes`). A comparer is one file with a function ``figures``, and one line of the list.

What a figure ``explains`` are figures that are less specific: a kernel explains the phase that it runs in, a slow host
the waiting of all others. Such a figure costs only what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from argus.diagnose.read.profile import Profile
from argus.diagnose.variation import Mean

Side = Sequence[Profile]
"""The runs of one side, at least one."""


@dataclass(frozen=True)
class Figure:
    """Something that may have changed.

    Attributes:
        kind: What, one of :data:`argus.compare.comparers.order.KINDS`.
        subject: Which kernel, communicator, host or phase; empty: there is one only.
        before, after: Of each run, ns a step unless ``unit`` says otherwise.
        text: What it is, in words, for a sentence "TEXT: 1.2 ms -> 1.4 ms a step".
        exposure: How much of a change the step feels, 0 to 1; 0: it costs nothing itself.
        explains: Kinds, or ``kind subject`` of single ones, that it explains.
        unit: ns or share.
        note: What else belongs to it, a clause.
        least: Share of ``before`` that it must change by.
    """

    kind: str
    subject: str
    before: Sequence[Mean]
    after: Sequence[Mean]
    text: str
    exposure: float = 1.0
    explains: tuple[str, ...] = ()
    unit: str = "ns"
    note: str = ""
    least: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.kind} {self.subject}".rstrip()


class Comparer(Protocol):
    """A subject in which runs can differ. A module with this function is one."""

    def figures(self, before: Side, after: Side) -> list[Figure]:
        """Its figures of both sides; empty: one side was not observed."""


def of_all(side: Side, name: str) -> list[Mean] | None:
    """A figure of all runs of a side; None: one of them lacks it."""
    values = [profile.figures.get(name) for profile in side]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def felt(before: Side, after: Side, change_ns: float, phases: Sequence[str]) -> float:
    """How much of a change the step feels, 0 to 1: what is hidden behind other work makes no phase longer.

    Args:
        before, after: The runs.
        change_ns: What changed, ns a step.
        phases: Where it shows if it is not hidden.
    """
    shown = [sum(one.phase_ns(tuple(phases)) for one in side) / len(side) for side in (before, after)]
    return min(1.0, max(0.0, (shown[1] - shown[0]) / change_ns)) if change_ns else 0.0


def mean_change(first: Sequence[Mean], second: Sequence[Mean]) -> float:
    """Mean of the second minus mean of the first."""
    return sum(one.value for one in second) / len(second) - sum(one.value for one in first) / len(first)
