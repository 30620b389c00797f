"""Healthy runs become the baseline of their job class."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from argus.diagnose.read import queries
from argus.diagnose.read.profile import Profile, class_of, read_profile, to_text
from argus.diagnose.verdict import Verdict
from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

HEALTHY, SET = "healthy", "set"
"""``baselines.source``: by itself, or by ``argus baseline set``."""


def learn(store: Store, verdict: Verdict) -> bool:
    """Makes a run a baseline if its verdict allows that: it is healthy, over, and was observed without a loss. One that
    somebody took out stays out, and one that is there stays as it is.

    Returns:
        Whether it became one.

    Raises:
        ArgusError: The store did not take it.
    """
    coverage = verdict["coverage"]
    if verdict["status"] != "healthy" or not coverage["ended"] or not coverage["complete"]:
        return False
    query = partial(query_columns, store)
    job, run = verdict["job"], verdict["run"]
    if len(query(queries.BASELINE_ROW, {"job": job, "run": run})["class"]):
        return False
    try:
        profile = read_profile(query, job, run)
    except ArgusError:
        return False  # too short for a baseline
    keep(store, profile, HEALTHY)
    return True


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
