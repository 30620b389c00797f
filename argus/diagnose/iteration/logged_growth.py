"""Steps of a logged training loop that became longer on all ranks: which timers grew, who has to act, and whether the
log can show that no single rank is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argus.diagnose.case import ALIKE_TIMES, Case, evidence
from argus.diagnose.ranks.own_times import is_communication, kind_of
from argus.diagnose.ranks.phase_times import UNTIMED, listed_phases
from argus.diagnose.read import queries
from argus.diagnose.verdict import Evidence
from argus.model.units import duration, ranks_text

NAMED = 0.2
"""Share of the growth from which on a timer is named."""
MOSTLY = 0.5
"""Share of the growth that one timer has at least, if its owner has to act."""
NOBODY = ", and no rank holds up the others more than before"


@dataclass(frozen=True)
class Growth:
    """What the timers of a log show of steps that became longer.

    Attributes:
        evidence: Which timers grew; None: none is logged, or none shows it.
        phase: The one that most of the growth is in; empty: there is none.
        owner: Who has to act on it; empty: who acts on regressions.
    """

    evidence: Evidence | None = None
    phase: str = ""
    owner: str = ""

    def action(self, when: str) -> str:
        """What to do.

        Args:
            when: At which step, or between which, in words.
        """
        if self.owner == "data":
            return (
                f"Find out what changed for the data of all ranks {when}: the file system and the network that they "
                "come from, workers and prefetching, what is done to a sample."
            )
        if self.owner == "infrastructure":
            return (
                f"Find out what changed in the network of all ranks {when}: links (argus health, nccl-tests between "
                "the nodes), what else uses them, NCCL's settings; then how much the ranks exchange."
            )
        return (
            f"Find out what changed for all ranks {when}: batch or sequence length, checkpointing, the network, a "
            "power or thermal limit."
        )


def grown_phases(case: Case, onset: int, grown_ns: float) -> Growth:
    """Which timers became longer.

    Args:
        case: The job.
        onset: The step since which steps are longer.
        grown_ns: By how much they are.
    """
    if case.notes.logged is None or case.notes.logged.leads is None:
        return Growth()
    at = {**case.params, "onset": onset}
    rows = case.query(queries.PHASES_GROWN, at)
    grown = [
        (float(after - before), str(phase), float(before), float(after))
        for phase, before, after in zip(rows["phase"], rows["before_ns"], rows["after_ns"], strict=True)
        if after - before >= NAMED * grown_ns
    ]
    if not grown:
        return Growth()
    texts = [f"{_called(phase)} {duration(after)} instead of {duration(before)}" for _, phase, before, after in grown]
    most, phase, _, _ = grown[0]
    owner = ""
    if most < MOSTLY * grown_ns:
        phase = ""
    elif kind_of(phase) == "data_loading":
        owner = "data"
    elif is_communication(phase):
        owner = "infrastructure"
    return Growth(evidence(f"a step has {', '.join(texts)}", queries.PHASES_GROWN, at), phase, owner)


def whose(case: Case, growth: Growth) -> str:
    """Whether a rank may be behind it, a clause with what joins it to the sentence."""
    logged = case.notes.logged
    if logged is None:
        return NOBODY
    if logged.leads is None:
        return f"; {ALIKE_TIMES}"
    if logged.unseen:
        return f"; {lacking(logged.unseen, 'in the log of the newest steps')}"
    if is_communication(growth.phase):
        return NOBODY
    if growth.phase in logged.waits or (logged.partial and not growth.phase):
        contain = "contains" if len(logged.waits) == 1 else "contain"
        return (
            f"; no rank needs longer by itself, but {listed_phases(logged.waits)} {contain} the wait for other ranks, "
            "and one that is slower inside would not show"
        )
    if growth.phase in logged.equal:
        return f"; {_called(growth.phase)} is as long on every rank, and one that is slower inside would not show"
    return NOBODY


def lacking(ranks: Sequence[int], place: str) -> str:
    """That ranks are not there, a clause, and what therefore is not known."""
    is_, which = ("is", "it") if len(ranks) == 1 else ("are", "one of them")
    return f"{ranks_text(ranks)} {is_} not {place}: whether {which} holds up the others is not known"


def _called(phase: str) -> str:
    return "what no timer covers" if phase == UNTIMED else phase.replace("_", " ")
