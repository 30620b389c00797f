"""The environment of runs: what all ranks have in common, what differs between them, what changed between runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from argus.diagnose.read.query import Query
from argus.model.environment import OWN, UNREADABLE

_FACTS = """
SELECT fact, value, count() AS processes, arraySort(groupUniqArray(64)(rank)) AS ranks FROM environment_facts
WHERE job = {job:String} AND run = {run:UInt32}
GROUP BY fact, value ORDER BY fact, processes DESC
"""
_PROCESSES = "SELECT count() AS processes FROM environments FINAL WHERE job = {job:String} AND run = {run:UInt32}"


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

    def value(self, fact: str) -> str:
        """What most ranks have; empty: it is not set, or not known."""
        if fact in self.facts:
            return self.facts[fact]
        values = self.differing.get(fact, {})
        return max(values, key=lambda value: len(values[value]), default="")


@dataclass(frozen=True)
class Change:
    """A fact that two runs do not have in common.

    Attributes:
        fact: Its name.
        before, after: Its value on most ranks; empty: not set.
        ranks: On which it is as ``after`` says, up to 64; empty: on all.
    """

    fact: str
    before: str
    after: str
    ranks: list[int]


def read_environment(query: Query, job: str, run: int) -> Environment:
    """The environment of a run, as it is stored."""
    params = {"job": job, "run": run}
    known = query(_PROCESSES, params)
    processes = int(known["processes"][0]) if len(known["processes"]) else 0
    rows = query(_FACTS, params)
    values: dict[str, dict[str, list[int]]] = defaultdict(dict)
    counts: Counter[str] = Counter()
    names = ("fact", "value", "processes", "ranks")
    for fact, value, many, ranks in zip(*(rows[name].tolist() for name in names), strict=True):
        values[str(fact)][str(value)] = [int(rank) for rank in ranks]
        counts[str(fact)] += int(many)
    common = {fact for fact, known in values.items() if len(known) == 1 and counts[fact] == processes}
    return Environment(
        processes,
        {fact: next(iter(values[fact])) for fact in sorted(common)},
        {fact: values[fact] for fact in sorted(values) if fact not in common},
    )


def environment_changes(before: Environment, after: Environment) -> list[Change]:
    """What is not the same in two runs, by name. Facts that could not be read in one of them are no change; those that
    belong to single ranks or hosts (:data:`argus.model.environment.OWN`) neither."""
    if not before.processes or not after.processes:
        return []
    unread = {one for each in (before, after) for one in each.value(UNREADABLE).split(",")}
    changes = []
    for fact in sorted({*before.facts, *before.differing, *after.facts, *after.differing} - {*OWN, UNREADABLE}):
        old, new = before.value(fact), after.value(fact)
        if old == new or fact in unread or (fact.endswith(".version") and "versions" in unread):
            continue
        ranks = after.differing.get(fact, {}).get(new, [])
        changes.append(Change(fact, old, new, ranks))
    return changes
