"""Earlier healthy runs of a job's class: the table ``baselines``. Learned ones are of the run's own users, those set by
hand of whoever runs Argus."""

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
        elsewhere: Runs of the same name that are of other classes or users, and what those have otherwise; asked only
            where there are no runs.
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
    owner = read_owner(query, *without)
    rows = query(queries.BASELINES, {"class": name, "owner": owner})
    runs: list[Profile] = []
    unreadable = 0
    for job, run, text in zip(rows["job"], rows["run"], rows["profile"], strict=True):
        if (str(job), int(run)) == without or len(runs) == NEWEST:
            continue
        try:
            runs.append(from_text(str(text)))
        except ValueError:
            unreadable += 1
    return Baseline(name, tuple(runs), unreadable, (0, "") if runs else _elsewhere(query, name, without, unreadable))


def read_owner(query: Query, job: str, run: int) -> list[str]:
    """The users of a run's ranks, ascending, those in containers apart; empty: not known."""
    return [str(user) for user in query(queries.RUN_OWNER, {"job": job, "run": run})["owner"][0]]


def _elsewhere(query: Query, name: str, without: tuple[str, int], unreadable: int) -> tuple[int, str]:
    """Runs that have this class's name and are not in the baseline of a run, which has no readable one, and in what
    they differ."""
    own = class_parts(name)
    params = {"begin": class_begin(own.name), "job": without[0], "run": without[1]}
    rows = query(queries.BASELINE_CLASSES, params)
    others = [(class_parts(str(one)), int(runs)) for one, runs in zip(rows["class"], rows["runs"], strict=True)]
    others = [(one, runs - unreadable * (one == own)) for one, runs in others if one.name == own.name]
    others = [(one, runs) for one, runs in others if runs > 0]
    differ = {
        "another number of ranks": any(one.ranks != own.ranks for one, _ in others),
        "another mesh": any(one.mesh != own.mesh for one, _ in others),
        "another GPU model": any(one.gpu != own.gpu for one, _ in others),
        "another user": any(one == own for one, _ in others),
    }
    return sum(runs for _, runs in others), ", ".join(text for text, there in differ.items() if there)
