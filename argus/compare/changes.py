"""Which figures of two sides differ by more than runs do, and what each costs a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argus.compare.comparer import Comparer, Figure, Side
from argus.compare.comparers.order import COMPARERS
from argus.diagnose.variation import SPREAD, Difference, difference

LEVEL = 0.005
"""Chance that any of the figures of runs that do not differ is reported: it is split among them (Bonferroni), as each
may be the one that chance picks."""
GIVEN = 0.02
"""The same of one figure, where the step time itself changed."""
FEW = 4
"""Degrees of freedom below which how much figures differ between runs is assumed besides, once the step changed: those
of fewer than three runs a side."""
LEAST_COST = 0.002
"""Share of a step that a cause costs at least. Less is neither worth a search nor stable."""


@dataclass(frozen=True)
class Cause:
    """A figure that changed.

    Attributes:
        figure: Which.
        found: Its difference, in the figure's unit.
        cost_ns: What an average step became longer by it, without what more specific causes explain; below 0: shorter;
            0: it costs nothing itself.
        low_ns, high_ns: 95 % interval of that.
        confidence: 0 to 1.
    """

    figure: Figure
    found: Difference
    cost_ns: float
    low_ns: float
    high_ns: float
    confidence: float


def find_causes(
    before: Side, after: Side, step_ns: float, comparers: Sequence[Comparer] = COMPARERS, *, changed: bool = False
) -> tuple[list[Cause], int, list[Cause]]:
    """What changed, the costliest first; what costs nothing comes last.

    Args:
        before, after: The runs.
        step_ns: A step before.
        comparers: Who finds figures.
        changed: The step time did, so that something must have: then each figure counts by :data:`GIVEN` alone.

    Returns:
        The causes; how many figures were compared; and those that changed by no more than runs do, as causes.
    """
    figures = [figure for comparer in comparers for figure in comparer.figures(before, after)]
    level = GIVEN if changed else LEVEL / max(len(figures), 1)
    # Of one run beside a few it is not known what figures scatter by: as little as steps do at least.
    spread = SPREAD if changed and len(before) + len(after) - 2 < FEW else 0.0
    causes: list[Cause] = []
    undecided: list[Cause] = []
    for figure in figures:
        found = difference(figure.before, figure.after, spread=spread)
        if found.p >= level or abs(found.change) < figure.least * abs(found.before):
            undecided.append(
                Cause(
                    figure, found, found.change * figure.exposure, found.low * figure.exposure,
                    found.high * figure.exposure, 0.0,
                )
            )  # fmt: skip
            continue
        explained = sum(
            cause.cost_ns
            for cause in causes
            if {figure.kind, figure.key} & set(cause.figure.explains) and cause.cost_ns * found.change > 0
        )
        whole = found.change * figure.exposure
        left = whole - explained if abs(explained) < abs(whole) else 0.0
        if figure.exposure and abs(left) < LEAST_COST * step_ns:
            continue
        low_ns, high_ns = (bound * figure.exposure + left - whole for bound in (found.low, found.high))
        if explained and low_ns <= 0 <= high_ns:
            continue  # what is left of it may be chance
        causes.append(Cause(figure, found, left, low_ns, high_ns, confidence_of(found, len(figures))))
    return sorted(causes, key=lambda cause: -abs(cause.cost_ns)), len(figures), undecided


CAPPED = 0.99
"""Confidence at most: runs may differ in something that was not measured."""
ASSUMED = 0.6
"""Confidence at most where no side has two runs: by how much runs differ was assumed."""


def confidence_of(found: Difference, compared: int = 1) -> float:
    """How sure it is that something changed that is one of so many figures."""
    return min(1 - min(1.0, found.p * compared), ASSUMED if found.assumed else CAPPED)
