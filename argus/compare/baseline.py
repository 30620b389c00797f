"""Baselines by hand: which there are, and which runs are added or taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from argus.diagnose.learn import SET, keep, put
from argus.diagnose.read import queries
from argus.diagnose.read.profile import Profile, class_parts, from_text, read_profile
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.text import named
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.schema import ensure_schema


@dataclass(frozen=True)
class Entry:
    """A run that is a baseline.

    Attributes:
        name, size, mesh, gpu: Of its class: the job's name without ids, ranks, dimensions, GPU model (empty: unknown).
        job, run: Which run.
        step_ns, steps: Its mean step, over so many.
        source: healthy or set. added_ns: Since when, wall time.
    """

    name: str
    size: int
    mesh: str
    gpu: str
    job: str
    run: int
    step_ns: float
    steps: int
    source: str
    added_ns: int


def list_baselines(store: Store) -> list[Entry]:
    """All of them, by class, the oldest first.

    Raises:
        ArgusError: The store cannot be asked.
    """
    rows = query_columns(store, queries.ALL_BASELINES)
    names = ("class", "job", "run", "step_ns", "steps", "source", "added")
    out = []
    for name, job, run, step_ns, steps, source, added in zip(*(rows[one].tolist() for one in names), strict=True):
        of = class_parts(str(name))
        out.append(
            Entry(of.name, of.ranks, of.mesh, of.gpu, job, int(run), float(step_ns), int(steps), source, int(added))
        )
    return out


def set_baseline(store: Store, job: str, run: int) -> Profile:
    """Makes a run a baseline, whatever its verdict is.

    Raises:
        ArgusError: It is too short, or the store did not take it.
    """
    ensure_schema(store)
    profile = read_profile(partial(query_columns, store), job, run)
    keep(store, profile, SET)
    return profile


def remove_baselines(store: Store, runs: Sequence[tuple[str, int]]) -> None:
    """Takes runs out. They do not become baselines again by themselves.

    Raises:
        ArgusError: One is not a baseline, or the store did not take it.
    """
    for job, run in runs:
        rows = query_columns(store, queries.BASELINE_ROW, {"job": job, "run": run})
        there = [place for place, removed in enumerate(rows["removed"].tolist()) if not removed]
        if not there:
            raise no_baseline(job, run)
        for place in there:
            put(store, {
                "class": str(rows["class"][place]), "job": job, "run": run, "profile": "", "step_ns": 0.0,
                "step_error_ns": -1.0, "steps": 0, "source": str(rows["source"][place]), "removed": 1,
            })  # fmt: skip


def no_baseline(job: str, run: int) -> ArgusError:
    """The error for a run that is not a baseline."""
    return ArgusError(
        f"run {run} of job '{named(job)}' is not a baseline", "argus baseline list shows all", EXIT_UNAVAILABLE
    )


def stored_profile(store: Store, job: str, run: int) -> Profile:
    """What is kept of a baseline.

    Raises:
        ArgusError: It is not a baseline, or another version of Argus wrote it.
    """
    rows = query_columns(store, queries.BASELINE_ROW, {"job": job, "run": run})
    for text, removed in zip(rows["profile"], rows["removed"], strict=True):
        if not removed:
            try:
                return from_text(str(text))
            except ValueError:
                raise ArgusError(
                    f"the baseline of run {run} of job '{named(job)}' was written by another version of Argus",
                    "Make it again: argus baseline set", EXIT_UNAVAILABLE,
                ) from None  # fmt: skip
    raise no_baseline(job, run)
