"""The runs of a side, read from the store or from the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from argus.compare.distributions import with_distributions
from argus.diagnose.read import queries
from argus.diagnose.read.baseline import baseline_of
from argus.diagnose.read.profile import Profile, class_name, read_profile, same_work
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import ranks_text
from argus.store.open import Store
from argus.store.reader import query_columns

MOST_RANKS = 8
"""Ranks of a finding that are named; more are rather all."""


def read_side(store: Store, runs: Sequence[tuple[str, int]]) -> list[Profile]:
    """The figures of runs, each (job, run).

    Raises:
        ArgusError: One is too short, or the store cannot be asked.
    """
    query = partial(query_columns, store)
    return [with_distributions(query, read_profile(query, job, run)) for job, run in runs]


def stored_verdicts(store: Store, runs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """The newest stored verdict on each of some runs, in words that begin with the status; runs that were never
    diagnosed are missing.

    Raises:
        ArgusError: The store cannot be asked.
    """
    found = {}
    for job, run in runs:
        rows = query_columns(store, queries.NEWEST_VERDICT, {"job": job, "run": run})
        if len(rows["status"]):
            status, kind, ranks = str(rows["status"][0]), str(rows["kind"][0]), rows["ranks"][0]
            whom = f" of {ranks_text([int(rank) for rank in ranks])}" if 0 < len(ranks) <= MOST_RANKS else ""
            found[job, run] = status + (f" ({kind.replace('_', ' ')}{whom})" if kind else "")
    return found


def baseline_side(store: Store, side: Sequence[Profile]) -> list[Profile]:
    """The baseline of runs: of the first one's class, with the same work, and none of the runs themselves.

    Raises:
        ArgusError: There is none.
    """
    among = {(one.job, one.run) for one in side}
    baseline = baseline_of(partial(query_columns, store), side[0])
    runs = [one for one in baseline.runs if (one.job, one.run) not in among and same_work(one, side[0])]
    if not runs:
        many, differing = baseline.elsewhere
        other = f" ({many} of '{class_name(side[0].job)}' have {differing})" if many else ""
        raise ArgusError(
            f"no earlier run of the class of '{side[0].job}' is a baseline{other}",
            "Name runs to compare with (--against JOB@RUN), or make one a baseline: argus baseline set",
            EXIT_UNAVAILABLE,
        )  # fmt: skip
    return runs
