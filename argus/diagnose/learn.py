"""Healthy runs become the baseline of their job class."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from argus.diagnose.iteration.against_baseline import LEAST, LEVEL, MIN_RUNS, has_long_tail
from argus.diagnose.read import queries
from argus.diagnose.read.baseline import baseline_of
from argus.diagnose.read.profile import Profile, class_of, read_profile, same_work, step_tail, to_text
from argus.diagnose.read.query import Query
from argus.diagnose.variation import SPREAD, difference
from argus.diagnose.verdict import Verdict
from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

HEALTHY, SET = "healthy", "set"
"""``baselines.source``: by itself, or by ``argus baseline set``."""


def learn(store: Store, verdict: Verdict) -> bool:
    """Makes a run a baseline if its verdict allows that: it is healthy, over, was observed without a loss, and has no
    longer tail of steps than the baseline. One that was taken out stays out, and one that is there stays as it is.

    What was learned may turn out to be wrong: a run that is found faulty later is taken out, and so are those that are
    too slow for the others once this one is there. What was set by hand stays, and so do runs of other users.

    Returns:
        Whether it became one.

    Raises:
        ArgusError: The store did not take it.
    """
    coverage = verdict["coverage"]
    if not coverage["ended"]:
        return False
    query = partial(query_columns, store)
    job, run = verdict["job"], verdict["run"]
    rows = query(queries.BASELINE_ROW, {"job": job, "run": run})
    if verdict["status"] in ("degraded", "hung"):
        for name, source, removed in zip(rows["class"], rows["source"], rows["removed"], strict=True):
            if str(source) == HEALTHY and not removed:
                _take_out(store, str(name), job, run)
        return False
    if verdict["status"] != "healthy" or not coverage["complete"] or len(rows["class"]):
        return False
    try:
        profile = read_profile(query, job, run)
    except ArgusError:
        return False  # too short for a baseline
    if has_long_tail(step_tail(profile), [one for one in baseline_of(query, profile).runs if same_work(one, profile)]):
        return False  # the verdict says so, and would not of the next run
    keep(store, profile, HEALTHY)
    for one in too_slow(query, profile):
        _take_out(store, class_of(profile), one.job, one.run)
    return True


def too_slow(query: Query, profile: Profile) -> list[Profile]:
    """Learned baselines of a run's class and work that would be a regression against all others, the run with them:
    the first runs of a class are learned while there is nothing to compare them with."""
    others = [one for one in baseline_of(query, profile).runs if same_work(one, profile)]
    sources = query(queries.ALL_BASELINES, {})
    learned = {
        (str(job), int(run))
        for job, run, source in zip(sources["job"], sources["run"], sources["source"], strict=True)
        if str(source) == HEALTHY
    }
    found = []
    for one in others:
        rest = [profile.step, *(other.step for other in others if other is not one)]
        if (one.job, one.run) not in learned or len(rest) < MIN_RUNS:
            continue
        by = difference(rest, [one.step], spread=SPREAD, single=True)
        if by.change >= LEAST * by.before and by.p / 2 < LEVEL / len(others):
            found.append(one)
    return found


def _take_out(store: Store, name: str, job: str, run: int) -> None:
    """As ``argus baseline rm`` does. ``name``: of the class."""
    put(store, {
        "class": name, "job": job, "run": run, "profile": "", "step_ns": 0.0, "step_error_ns": -1.0, "steps": 0,
        "source": HEALTHY, "removed": 1,
    })  # fmt: skip


def keep(store: Store, profile: Profile, source: str) -> None:
    """Makes a run a baseline.

    Raises:
        ArgusError: The store did not take it.
    """
    put(store, {
        "class": class_of(profile), "job": profile.job, "run": profile.run, "profile": to_text(profile),
        "step_ns": profile.step.value, "step_error_ns": profile.step.error, "steps": profile.steps, "source": source,
        "removed": 0,
    })  # fmt: skip


def put(store: Store, row: Mapping[str, Any]) -> None:
    """Writes a row of ``baselines``, newer than those before it.

    Raises:
        ArgusError: The store did not take it.
    """
    now = time.time_ns()
    with Writer(store, source="baseline") as writer:
        writer.append("baselines", {**{name: [value] for name, value in row.items()}, "added": [now], "version": [now]})
        report = writer.close()
    if report.dropped:
        raise ArgusError(f"the baseline could not be stored: {report.last_error}")
