"""Ranks that come late at no cost, for their GPUs lose nothing by it, and that came earlier before: what was their
slack is gone."""

from __future__ import annotations

import numpy as np

from argus.diagnose.case import MIN_STEPS, MOST_CALLS, Case
from argus.diagnose.causes import lost_time
from argus.diagnose.iteration.regression import SEPARATE
from argus.diagnose.ranks.late_ranks import onset_of
from argus.diagnose.ranks.lateness import Straggler, find_onset
from argus.diagnose.read import queries
from argus.diagnose.suspect import Suspect, without_effect


def detect(case: Case) -> list[Suspect]:
    """Of the ranks that come late at no cost (:attr:`argus.diagnose.case.Case.costless`) those that lost their lead.
    In very large jobs it is not looked for."""
    if case.calls * len(case.numbers) > 8 * MOST_CALLS:
        return []
    suspects = []
    for straggler in case.costless:
        if lost_its_lead(case, straggler):
            loss = lost_time.explain(case, straggler, onset_of(case, straggler))
            lost_time.share_out([loss])
            suspect = lost_time.suspect_of(case, loss)
            suspect.effect = without_effect
            suspects.append(suspect)
    return suspects


def lost_its_lead(case: Case, straggler: Straggler) -> bool:
    """Whether ranks that come late came earlier before, in nearly every step of theirs: that they always come late may
    be what they do besides."""
    rows = case.query(queries.LEAD, lost_time.lead_params(case, straggler))
    ahead = rows["suspects_ns"] - rows["others_ns"]
    since = find_onset(ahead, straggler.gain_ns)
    before, after = ahead[:since], ahead[since:]
    return min(len(before), len(after)) >= MIN_STEPS and bool(np.mean(after[:, None] > before[None, :]) >= SEPARATE)
