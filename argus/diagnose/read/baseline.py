"""Earlier healthy runs of a job's class: the table ``baselines``."""

from __future__ import annotations

from dataclasses import dataclass

from argus.diagnose.read import queries
from argus.diagnose.read.profile import Profile, class_begin, class_of, class_parts, from_text, read_class
from argus.diagnose.read.query import Query

NEWEST = 20
"""Runs that count, the newest: software and hardware age."""


@dataclass(frozen=True)
class Baseline:
    """Runs that a new one is compared with.

    Attributes:
        name: The class (:func:`argus.diagnose.read.profile.class_of`).
        runs: The newest first.
        unreadable: Rows that another version of Argus wrote, and that this one cannot read.
        elsewhere: Runs of the same name that are of other classes, and what those have otherwise; asked only where the
            class has no runs.
    """

    name: str
    runs: tuple[Profile, ...]
    unreadable: int = 0
    elsewhere: tuple[int, str] = (0, "")


def read_baseline(query: Query, job: str, run: int) -> Baseline | None:
    """The baseline of a run, which is never part of it; None: there is none of any job.

    Raises:
        ArgusError: The store cannot be asked.
    """
    if not int(query(queries.ANY_BASELINE, {})["n"][0]):
        return None
    return _of(query, read_class(query, job, run), (job, run))


def baseline_of(query: Query, profile: Profile) -> Baseline:
    """The same of a run whose figures were read."""
    return _of(query, class_of(profile), (profile.job, profile.run))


def _of(query: Query, name: str, without: tuple[str, int]) -> Baseline:
    rows = query(queries.BASELINES, {"class": name})
    runs: list[Profile] = []
    unreadable = 0
    for job, run, text, removed in zip(rows["job"], rows["run"], rows["profile"], rows["removed"], strict=True):
        if removed or (str(job), int(run)) == without or len(runs) == NEWEST:
            continue
        try:
            runs.append(from_text(str(text)))
        except ValueError:
            unreadable += 1
    return Baseline(name, tuple(runs), unreadable, (0, "") if runs else _elsewhere(query, name))


def _elsewhere(query: Query, name: str) -> tuple[int, str]:
    """Runs of the classes that have this one's name, and in which of the other parts of a class they differ."""
    own = class_parts(name)
    rows = query(queries.BASELINE_CLASSES, {"begin": class_begin(own.name)})
    others = [(class_parts(str(one)), int(runs)) for one, runs in zip(rows["class"], rows["runs"], strict=True)]
    others = [(one, runs) for one, runs in others if one != own and one.name == own.name]
    differ = {
        "another number of ranks": any(one.ranks != own.ranks for one, _ in others),
        "another mesh": any(one.mesh != own.mesh for one, _ in others),
        "another GPU model": any(one.gpu != own.gpu for one, _ in others),
    }
    return sum(runs for _, runs in others), ", ".join(text for text, there in differ.items() if there)
