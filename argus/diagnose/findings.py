"""From suspects to the findings of a verdict: the only place where lost time becomes a share."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from argus.diagnose.owners import owner_of
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Finding
from argus.model.units import named_hosts


def findings_of(suspects: Sequence[Suspect], job: str, run: int, lost_ns: float | None = None) -> list[Finding]:
    """One finding of each suspect, the costliest first.

    Args:
        suspects: What detectors report.
        job, run: Whose.
        lost_ns: The time that a step loses, of which each has its share; None: what they cost together.
    """
    whole_ns = max(sum(suspect.lost_ns for suspect in suspects), 1.0) if lost_ns is None else lost_ns
    findings: list[Finding] = []
    for suspect in suspects:
        finding = _finding(suspect, min(1.0, suspect.lost_ns / whole_ns))
        finding["id"] = id_of(job, run, finding, {other["id"] for other in findings})
        findings.append(finding)
    return sorted(findings, key=lambda finding: -finding["share"])


def id_of(job: str, run: int, finding: Finding, taken: Collection[str] = ()) -> str:
    """The same for the same job, run, kind and lowest rank (of findings about all: phase), so that a finding to which
    ranks are added keeps it. Whoever follows a job hands it on where the lowest rank changes
    (:class:`argus.diagnose.follow.follow.Follower`). ``taken``: others that are open."""
    where = str(min(finding["ranks"])) if finding["ranks"] else finding["phase"]
    number = 0
    while True:
        text = "\0".join((job, str(run), finding["kind"], where, *([str(number)] if number else [])))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        if digest not in taken:
            return digest
        number += 1


def _finding(suspect: Suspect, share: float) -> Finding:
    finding = Finding(
        kind=suspect.kind,
        ranks=suspect.ranks,
        hosts=named_hosts(suspect.hosts),
        steps=[suspect.since, suspect.last],
        phase=suspect.phase,
        kernels=suspect.kernels,
        slowdown=round(suspect.slowdown, 4),
        share=round(share, 4),
        confidence=round(suspect.confidence, 4),
        level=suspect.level,
        id="",
        owner=owner_of(suspect.kind, suspect.owner),
        evidence=[*suspect.evidence, *([] if suspect.cost is None else [suspect.cost]), *suspect.further],
        action=suspect.action,
    )
    if suspect.collective is not None:
        finding["collective"] = suspect.collective
    return finding
