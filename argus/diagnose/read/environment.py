"""The environment of runs: what all ranks have in common, what differs between them, what changed between runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query
from argus.model.environment import OWN, UNREADABLE, is_unread


@dataclass(frozen=True)
class Environment:
    """What a run ran on and with.

    Attributes:
        processes: Of how many it is known; 0: of none.
        facts: Those that all have in common.
        differing: Those that are not alike: by value, up to 64 ranks. Ranks on which one is not set are missing.
    """

    processes: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    differing: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def typical(self) -> dict[str, str]:
        """Each fact with the value that most ranks have, but for those that belong to single ranks and hosts
        (:data:`argus.model.environment.OWN`)."""
        most = {fact: max(values, key=lambda value: len(values[value])) for fact, values in self.differing.items()}
        return {fact: value for fact, value in {**self.facts, **most}.items() if fact not in OWN}


@dataclass(frozen=True)
class Change:
    """A fact that no run of one side has in common with a run of the other; empty: not set."""

    fact: str
    before: str
    after: str

    def text(self) -> str:
        """As a clause."""
        return f"{self.fact} is {self.after or 'not set'}, was {self.before or 'not set'}"


def read_environment(query: Query, job: str, run: int) -> Environment:
    """The environment of a run, as it is stored."""
    params = {"job": job, "run": run}
    known = query(queries.ENVIRONMENT_PROCESSES, params)
    processes = int(known["processes"][0]) if len(known["processes"]) else 0
    if not processes:
        return Environment()
    rows = query(queries.ENVIRONMENT_FACTS, params)
    values: dict[str, dict[str, list[int]]] = defaultdict(dict)
    counts: Counter[str] = Counter()
    names = ("fact", "value", "processes", "some_ranks")
    for fact, value, many, ranks in zip(*(rows[name].tolist() for name in names), strict=True):
        values[str(fact)][str(value)] = [int(rank) for rank in ranks]
        counts[str(fact)] += int(many)
    common = {fact for fact, each in values.items() if len(each) == 1 and counts[fact] == processes}
    return Environment(
        processes,
        {fact: next(iter(values[fact])) for fact in sorted(common)},
        {fact: values[fact] for fact in sorted(values) if fact not in common},
    )


def environment_changes(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> list[Change] | None:
    """Facts that changed, by name. Runs in which one could not be read count neither for it nor against it.

    Args:
        before, after: Of the runs of each side, their facts (:meth:`Environment.typical`); empty ones are not known.

    Returns:
        None: nothing is known of one of the sides.
    """
    sides = [[run for run in side if run] for side in (before, after)]
    if not all(sides):
        return None
    every = [run for side in sides for run in side]
    changes = []
    for fact in sorted({fact for run in every for fact in run} - {UNREADABLE}):
        old, new = ({run.get(fact, "") for run in side if fact in run or not is_unread(fact, run)} for side in sides)
        if old and new and not old & new:
            changes.append(Change(fact, " | ".join(sorted(old)), " | ".join(sorted(new))))
    return changes
