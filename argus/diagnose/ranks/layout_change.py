"""Steps that became longer since work is shared out differently: what the regression is."""

from __future__ import annotations

from argus.diagnose.case import Case
from argus.diagnose.ranks import layout
from argus.diagnose.suspect import Suspect


def detect(case: Case) -> list[Suspect]:
    """What the layout explains of a regression, in its place: only what was not so before it."""
    (regression,) = case.suspects
    if case.gpus is None:
        return []
    suspects = layout.suspects_of(case, case.gpus, fresh=regression.since)
    for suspect in suspects:
        suspect.further += regression.evidence
        suspect.effect = regression.effect
        suspect.replaces = (regression,)
    return suspects
