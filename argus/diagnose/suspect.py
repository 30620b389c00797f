"""What a detector reports: one cause of lost time, and what it does to the job's step time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from argus.diagnose.verdict import Collective, Evidence

LEAST_LEFT = 0.05
"""Part of a step that is left at least, whatever is lost: costs are estimated one by one, and may add up to more."""


@dataclass(frozen=True)
class StepTime:
    """What a step takes, and what it would take without what was found, ns."""

    now_ns: float
    ideal_ns: float

    def shorter(self, lost_ns: float) -> StepTime:
        """Without something that costs so much more, ns."""
        return replace(self, ideal_ns=max(self.ideal_ns - lost_ns, LEAST_LEFT * self.now_ns))

    def before(self, growth: float) -> StepTime:
        """Without something that makes all steps so many times as long."""
        return replace(self, ideal_ns=self.ideal_ns / growth)


@dataclass(eq=False)
class Suspect:
    """One cause of lost time, as a detector reports it.

    Attributes:
        kind: One of :data:`argus.diagnose.verdict.FINDING_KINDS`.
        ranks: Global ranks; empty: all of them, or nobody in particular.
        hosts: Where they are.
        since, last: First and last step.
        lost_ns: What an average step is longer for it, ns.
        slowdown: Step time over what it would be without it.
        confidence: 0 to 1.
        level: One of :data:`argus.diagnose.verdict.LEVELS`.
        evidence: What it was detected by.
        action: What to do.
        phase, kernels: Where it shows.
        cost: What it costs the job; follows the evidence.
        further: What else was found out about it; comes last.
        effect: What it does to the job's step time; None: a step is ``lost_ns`` shorter without it.
        replaces: Suspects of earlier detectors that this one explains.
        collective: Of a hang: the collective that ranks wait in.
        owner: Who has to act, where it is not who has to act on its kind.
        detector: The name of the detector, which the diagnosis fills in.
    """

    kind: str
    ranks: list[int]
    hosts: list[str]
    since: int
    last: int
    lost_ns: float
    slowdown: float
    confidence: float
    level: str
    evidence: list[Evidence]
    action: str
    phase: str = ""
    kernels: list[str] = field(default_factory=list)
    cost: Evidence | None = None
    further: list[Evidence] = field(default_factory=list)
    effect: Callable[[StepTime], StepTime] | None = None
    replaces: tuple[Suspect, ...] = ()
    collective: Collective | None = None
    owner: str = ""
    detector: str = ""


def without_effect(step: StepTime) -> StepTime:
    """The :attr:`Suspect.effect` of what costs the job nothing yet."""
    return step


def slowdown_of(step_ns: float, lost_ns: float) -> float:
    """Step time over what it would be without so much lost time, ns."""
    return step_ns / max(step_ns - lost_ns, LEAST_LEFT * step_ns)
