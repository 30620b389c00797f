"""Ranks that times name that a training loop logged: of its phases, or only of its steps, where nothing else is
stored."""

from __future__ import annotations

from argus.diagnose.case import Case
from argus.diagnose.iteration import step_times
from argus.diagnose.ranks import phase_times
from argus.diagnose.read import queries
from argus.diagnose.suspect import Suspect


def detect(case: Case) -> list[Suspect]:
    """Ranks that are slow by logged times."""
    if case.lateness is not None or case.across is not None:
        return []
    only = case.query(queries.ONLY_STEPS, case.params)
    if int(only["calls"][0]) or int(only["found"][0]):
        return []
    given = case.query, case.params, case.hosts, case.threshold, case.recent_ns
    result = phase_times.slow_ranks(*given) or step_times.slow_ranks(*given)
    if result is None:
        case.notes.why_not = "step times of fewer than 2 ranks are stored, and nothing else"
        return []
    suspects, case.notes.logged = result
    case.notes.why_not = ""
    return suspects
