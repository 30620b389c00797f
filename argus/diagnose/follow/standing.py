"""What is the matter with a run that is traced, and what has changed: what ``watch`` hands to those who show it.

It imports next to nothing: a trace shows its first line before the diagnosis is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from argus.diagnose.verdict import Finding
from argus.model.units import rank_text


@dataclass(frozen=True)
class Standing:
    """What is the matter with a run now.

    Attributes:
        status: As of a verdict.
        findings: With evidence and action.
        reason: Why a verdict is inconclusive.
        provisional: The trace has only just begun: what is found may be of its start, and is to be confirmed.
    """

    status: str
    findings: list[Finding] = field(default_factory=list)
    reason: str = ""
    provisional: bool = False


@dataclass(frozen=True)
class News:
    """What has changed: a finding came (``found``) or went (``over``), the diagnosis ended (``off``, and why), or a
    part of it failed (``failed``)."""

    what: str
    finding: Finding | None = None
    text: str = ""


def in_words(finding: Finding) -> str:
    """A finding in a line: ``gc pause: rank 2 on node7 since step 121, 1.45x``."""
    ranks = finding["ranks"]
    who = f" rank{'s' * (len(ranks) > 1)} {rank_text(ranks)}" if ranks else ""
    hosts = f" on {', '.join(finding['hosts'][:4])}" if finding["hosts"] else ""
    cost = "" if finding["kind"] == "hang" else f", {finding['slowdown']:.2f}x"
    return f"{finding['kind'].replace('_', ' ')}:{who}{hosts} since step {finding['steps'][0]}{cost}"
